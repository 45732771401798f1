"""What the delays alone decide: local iterations, rounds, and the time spent waiting.

A group works until the *sync time* S has passed and finishes the iteration at hand: it makes
``t = min{n >= 1 : tau_1 + ... + tau_n >= S}`` iterations and is busy for ``Y = tau_1 + ... +
tau_t``. A round lasts as long as the busiest group, and then one exchange with the server. No
learning happens here, so all of it has exact laws.

A delay ``tau = c + Exp(mean m)`` is a :class:`~fedlib.population.delays.ShiftedExponential`; a
fixed one is a :class:`~fedlib.population.delays.Deterministic`, or ``m = 0``.

Source: A. Ali and A. Arafa, *Delay Sensitive Hierarchical Federated Learning with Stochastic Local
Updates*, arXiv 2302.04851. The laws are the book's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib.engine.checks import check_between
from fedlib.errors import FedlibError
from fedlib.papers.bound import as_array
from fedlib.population.delays import Deterministic, Law, ShiftedExponential

NEAR = 1e-12  # a sum of rounded durations that is this near to the sync time has reached it


def laws(delays: Sequence[float], sizes: Sequence[int]) -> tuple[list[Law], Law]:
    """Return the delay laws of the groups and of the server from the paper's eight numbers.

    Parameters
    ----------
    delays
        ``d, b, e, f, d_g, b_g, e_g, f_g``. A local iteration of a group of n clients takes
        ``(d n + b) + Exp(mean e n + f)``, an exchange with G groups
        ``(d_g G + b_g) + Exp(mean e_g G + f_g)``.
    sizes
        Clients of each group, ``[G]``.

    Raises
    ------
    FedlibError
        Unless there are eight numbers of at least zero, and every group has a client.
    """
    if len(delays) != 8 or not all(math.isfinite(x) and x >= 0 for x in delays):
        raise FedlibError(
            f"The delay model has eight numbers, each finite and at least 0; got {list(delays)}."
        )
    d, b, e, f, d_g, b_g, e_g, f_g = map(float, delays)
    n = checked_sizes(sizes)
    groups: list[Law] = [ShiftedExponential(d * k + b, e * k + f) for k in n]
    return groups, ShiftedExponential(d_g * len(n) + b_g, e_g * len(n) + f_g)


def checked_sizes(sizes: Sequence[int]) -> np.ndarray:
    """Return the numbers of clients as an array ``[G]``, or say what is wrong with them."""
    n = as_array(sizes)
    if n.ndim != 1 or not len(n) or not ((n >= 1) & np.isfinite(n)).all():
        raise FedlibError(f"Every group needs a client: expected sizes [G] >= 1; got {sizes!r}.")
    return n


def _check_sync(sync: float) -> float:
    check_between("The sync time", sync, 0)
    return float(sync)


def _parts(law: Law) -> tuple[float, float]:
    """Return a delay's fixed part c and mean random part m."""
    if isinstance(law, Deterministic):
        c, m = law.value, 0.0
    elif isinstance(law, ShiftedExponential):
        c, m = law.shift, law.mean
    else:
        raise FedlibError(
            f"Exact laws are known for ShiftedExponential and Deterministic delays; got {law!r}."
        )
    return float(c), float(m)


# --------------------------------------------------------------------------------------------------
# Local iterations of one group


def survival(law: Law, sync: float) -> np.ndarray:
    """Return ``P(t > n)`` for ``n = 0, 1, ...``, as far as it is positive.

    ``P(t > n) = P(Poisson((S - n c) / m) >= n)`` where ``n c < S``, and 0 beyond: more than n
    iterations are needed exactly if n exponential times end before ``S - n c``.

    Raises
    ------
    FedlibError
        For a sync time that is negative or not finite, or iterations that take no time.
    """
    from scipy import stats  # a quarter of the time of a start, and seldom wanted

    sync, (c, m) = _check_sync(sync), _parts(law)
    if c == m == 0 < sync:
        raise FedlibError("Iterations that take no time never fill a sync time. Give a delay > 0.")
    most = sync / c if c else math.inf if sync else 0.0
    if m:  # a Poisson variable of mean S / m exceeds this with probability below 1e-20
        most = min(most, sync / m + 10 * math.sqrt(sync / m) + 40)
    n = np.arange(1, math.ceil(most) + 1)
    left = sync - n * c
    enough = left > NEAR * sync
    n, left = n[enough], left[enough]
    more = stats.poisson.sf(n - 1, left / m) if m else np.ones(len(n))
    return np.concatenate([[1.0], more[more > 0]])


def law_of(law: Law, sync: float) -> np.ndarray:
    """Return ``P(t = n)`` for ``n = 1, 2, ...``."""
    return -np.diff(survival(law, sync), append=0.0)


def moments(law: Law, sync: float) -> tuple[float, float]:
    """Return ``E t`` and ``E t^2``."""
    more = survival(law, sync)
    return float(more.sum()), float(((2 * np.arange(len(more)) + 1) * more).sum())


def largest(law: Law, sync: float) -> float:
    """Return the most iterations there can be: ``max(1, ceil(S / c))``, infinite for ``c = 0``."""
    sync, (c, _) = _check_sync(sync), _parts(law)
    if c == 0:
        return math.inf if sync > 0 else 1.0
    return float(max(1, math.ceil((1 - NEAR) * sync / c)))


def renewal(law: Law, sync: float) -> float:
    """Return ``S / E tau + E tau^2 / (2 (E tau)^2)``, close to ``E t`` once S is long."""
    sync, (c, m) = _check_sync(sync), _parts(law)
    return sync / (c + m) + (1 + (m / (c + m)) ** 2) / 2


# --------------------------------------------------------------------------------------------------
# How long groups work, and how long a round takes


def expected_busy(law: Law, sync: float) -> float:
    """Return ``E Y = E t * E tau``: Wald's identity."""
    return moments(law, sync)[0] * sum(_parts(law))


def busy_survival(law: Law, sync: float, times: Any) -> np.ndarray:
    """Return ``P(Y > y)`` of a group's working time, in the shape of ``times``.

    For ``y >= S`` it is a sum over n, the number of iterations that end before S; with
    ``a = y - (n + 1) c`` and ``b = S - n c > 0``

        P(n end before S, the next one after y)
            = e^(-a/m) (min(a, b) / m)^n / n! + P(a < Gamma(n, m) < b),

    where the first part is ``e^(-max(a, 0)/m)`` for ``n = 0`` and zero for ``a <= 0 < n``, and the
    second is zero unless ``n > 0`` and ``a < b``. (The first n exponential times add up to a Gamma
    variable. No iteration at all, n = 0, ends before any S, also before ``S = 0``.)
    """
    from scipy import special, stats

    y, (c, m) = as_array(times), _parts(law)
    most = len(survival(law, sync))  # iterations that can begin
    if not m:
        return (y < most * c).astype(float)
    n = np.arange(most).reshape(-1, *[1] * y.ndim)
    a, b = y - (n + 1) * c, sync - n * c
    reach = np.maximum(np.minimum(a, b), 0.0) / m
    with np.errstate(divide="ignore", invalid="ignore"):
        power = np.where(n > 0, n * np.log(reach), 0.0)
    ends = np.exp(power - np.maximum(a, 0.0) / m - special.gammaln(n + 1.0))
    fits = stats.poisson.sf(n - 1, np.maximum(b, 0.0) / m)
    fits = fits - stats.poisson.sf(n - 1, np.maximum(a, 0.0) / m)
    inside = np.where((n > 0) & (a < b), fits, 0.0)
    return np.where(y < max(sync, c), 1.0, np.minimum((ends + inside).sum(0), 1.0))


def slowest(groups: Sequence[Law], sync: float) -> tuple[float, float]:
    """Return the mean and the second moment of ``max_i Y_i`` over independent groups.

    By Gauss-Legendre integration of ``1 - prod_i P(Y_i <= y)`` between the points where a law has
    a kink; the relative error is below 1e-9. For ``S = 0`` and G equal groups the mean is
    ``c + m (1 + 1/2 + ... + 1/G)``.

    Raises
    ------
    FedlibError
        Without groups, or as in :func:`survival`.
    """
    if not groups:
        raise FedlibError("A round needs at least one group; got none.")
    sync, parts = _check_sync(sync), [_parts(law) for law in groups]
    first = max(max(sync, c) for c, _ in parts)
    kinks, last = {first}, first
    for law, (c, m) in zip(groups, parts, strict=True):
        steps = c * (len(survival(law, sync)) + np.arange(-1, 2))
        kinks |= {y for y in [sync + c, *steps] if y > first}
        last = max(last, sync + c + 45 * m)
    top = max(kinks)
    layers = [k + m * 4.0 ** np.arange(6) for k in kinks for _, m in parts]  # where m is short
    edges = np.unique(np.concatenate([[*kinks], np.linspace(top, last, 24), *layers]))
    edges = edges[edges <= max(top, last)]
    x, w = np.polynomial.legendre.leggauss(48)
    half = np.diff(edges)[:, None] / 2
    y = edges[:-1, None] + half * (1 + x)
    below = np.ones_like(y)
    for law in set(groups):
        below = below * (1 - busy_survival(law, sync, y)) ** list(groups).count(law)
    more = half * w * (1 - below)
    return first + float(more.sum()), first**2 + float((2 * y * more).sum())


def round_length(groups: Sequence[Law], server: Law, sync: float) -> tuple[float, float]:
    """Return the mean and the second moment of a round: the slowest group, then the exchange."""
    mean, square = slowest(groups, sync)
    c, m = _parts(server)
    return mean + c + m, square + 2 * mean * (c + m) + (c + m) ** 2 + m**2


def expected_idle(groups: Sequence[Law], sync: float) -> np.ndarray:
    """Return how long each group waits in a round on average, ``[G]``."""
    return slowest(groups, sync)[0] - np.array([expected_busy(law, sync) for law in groups])


def expected_rounds(groups: Sequence[Law], server: Law, sync: float, time: float) -> float:
    """Return about how many rounds there are until the clock reaches ``time``.

    ``T / E R + E R^2 / (2 (E R)^2)`` for rounds of length R, since the round that crosses T
    counts; close once many rounds fit. ``T / E R`` alone is about one half less.

    Raises
    ------
    FedlibError
        Unless ``time`` is positive and finite.
    """
    if not (math.isfinite(time) and time > 0):
        raise FedlibError(f"The system time is positive and finite; got {time!r}.")
    mean, square = round_length(groups, server, sync)
    return max(1.0, time / mean + square / (2 * mean**2))


# --------------------------------------------------------------------------------------------------
# What the bounds need to know of the counts


@dataclass(frozen=True)
class Averages:
    """All that the bounds on the global model ask of the counts.

    Attributes
    ----------
    rounds
        The number of global rounds.
    inverse, drift, before
        Of each group, ``[G]``, means over the rounds of ``1 / t``, of ``(t - 1)(2 t - 1) / 6``, and
        of the square of the *previous* round's t, zero in the first.
    pairs
        Of each two groups, ``[G, G]``, the mean of ``(t_i - 1)(t_j - 1)``.
    """

    rounds: float
    inverse: np.ndarray
    drift: np.ndarray
    before: np.ndarray
    pairs: np.ndarray


def averages(counts: Any) -> Averages:
    """Return the averages of recorded counts, ``[U, G]``.

    Raises
    ------
    FedlibError
        Unless it is a table of whole numbers, each at least one.
    """
    t = as_array(counts)
    if t.ndim != 2 or not t.size or not ((t >= 1) & (t == np.floor(t))).all():
        raise FedlibError(
            f"Counts are whole numbers of at least 1, rounds by groups [U, G]; got shape {t.shape}"
            + (f" with {t[~(t >= 1)][0]:g}." if t.size and (~(t >= 1)).any() else ".")
        )
    before = (t[:-1] ** 2).sum(0) / len(t)
    drift, pairs = ((t - 1) * (2 * t - 1) / 6).mean(0), (t - 1).T @ (t - 1) / len(t)
    return Averages(len(t), (1 / t).mean(0), drift, before, pairs)


def expected_averages(groups: Sequence[Law], server: Law, sync: float, time: float) -> Averages:
    """Return the averages at a sync time from the exact laws, without drawing anything."""
    rounds = expected_rounds(groups, server, sync, time)
    rows = []
    for law in groups:
        p = law_of(law, sync)
        t = np.arange(1, len(p) + 1)
        later = (rounds - 1) / rounds  # the first round has none before it
        drift, before = p @ ((t - 1) * (2 * t - 1) / 6), later * (p @ t**2)
        rows.append([p @ (1 / t), drift, before, p @ (t - 1), p @ (t - 1) ** 2])
    inverse, drift, before, more, squares = np.array(rows).T
    pairs = np.outer(more, more)  # groups are independent
    np.fill_diagonal(pairs, squares)
    return Averages(rounds, inverse, drift, before, pairs)
