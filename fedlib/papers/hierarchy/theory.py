"""Every bound of the hierarchy chapter, as a function of the counts that a clock decides.

All bounds hold given the counts: ``counts[u, i]`` is the number ``t_i^u`` of local iterations of
group i in global round u. Paper names: alpha = ``lr``, ``|N_i|`` = ``sizes``, ``G^2`` = ``G2``,
sigma^2 = ``sigma2``, script U = ``rounds``; the fall of the loss is ``gap``.

Source: A. Ali and A. Arafa, *Delay Sensitive Hierarchical Federated Learning with Stochastic Local
Updates*, arXiv 2302.04851. What is marked as ours is proved in the book's chapter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedlib.engine.estimate import gradient_noise, smoothness
from fedlib.errors import FedlibError, unknown
from fedlib.papers.bound import Bound, as_array, check_constants
from fedlib.papers.hierarchy.counts import (
    Averages,
    averages,
    checked_sizes,
    expected_averages,
)
from fedlib.population.delays import Law


def shares(sizes: Sequence[int]) -> np.ndarray:
    """Return ``w_i = |N_i| / N``, each group's share of the clients, ``[G]``."""
    n = checked_sizes(sizes)
    return n / n.sum()


def kappa(sizes: Sequence[int]) -> float:
    """Return ``G_g sum_i w_i^2``: 1 for groups of equal size, at most their number ``G_g``."""
    w = shares(sizes)
    return float(len(w) * (w**2).sum())


def _step(lr: float, L: float) -> None:
    if not (L > 0 and 0 < lr <= (1 + 1e-12) / L):
        raise FedlibError(
            f"The bound needs 0 < lr <= 1/L, but lr = {lr:.4g} and L = {L:.4g}. Take a smaller lr."
        )


def _averages(counts: Any, sizes: Sequence[int]) -> Averages:
    """Return the averages of counts; those that are averages already stay."""
    known = counts if isinstance(counts, Averages) else averages(counts)
    if len(known.inverse) != len(checked_sizes(sizes)):
        raise FedlibError(
            f"The counts know {len(known.inverse)} groups and the sizes {len(sizes)}; the columns "
            "of the counts are the groups."
        )
    return known


# --------------------------------------------------------------------------------------------------
# How far a group is from the merged model: Lemma 1


def lemma_1(counts: Any, *, sizes: Sequence[int], lr: float, G2: float) -> np.ndarray:
    """Return ``2 lr^2 (t^2 + kappa) G^2``, the bound on ``E||x^(u+1) - x_i^(u,t)||^2`` (Lemma 1).

    It has the shape of ``counts``, whose last axis holds the groups.
    """
    check_constants(counts=counts, lr=lr, G2=G2)
    return 2 * lr**2 * (as_array(counts) ** 2 + kappa(sizes)) * G2


def lemma_1_sharper(counts: Any, *, sizes: Sequence[int], lr: float, G2: float) -> np.ndarray:
    """Return ``lr^2 (t_i + 1 - 2 w_i)^2 G^2``, a bound on the same deviation (ours).

    Never above :func:`lemma_1`, and reached where two groups pull in opposite directions.
    """
    check_constants(counts=counts, lr=lr, G2=G2)
    return lr**2 * (as_array(counts) + 1 - 2 * shares(sizes)) ** 2 * G2


def remark_3_rates(counts: Any, *, G2: float) -> np.ndarray:
    """Return the largest rates that Remark 3 allows: ``[2 (t_i^2 + G_g) G^2]^(-1/2)`` for group i.

    ``G_g`` is the number of groups, the length of the last axis of ``counts``.
    """
    t = as_array(counts)
    return 1 / np.sqrt(2 * (t**2 + t.shape[-1]) * G2)


def remark_3_bound(groups: int) -> float:
    """Return what the deviation is at most with these rates, instead of 1 (ours).

    ``(1/sqrt 2 + 1/sqrt(2 (1 + G_g)))^2`` for ``G_g`` groups, below 1.245 from two groups on.
    """
    return (math.sqrt(1 / 2) + math.sqrt(1 / (2 * (1 + groups)))) ** 2


# --------------------------------------------------------------------------------------------------
# Theorem 1: one group along its own iterations


def theorem_1(
    counts: Any,
    *,
    size: int,
    kappa: float,
    lr: float,
    L: float,
    G2: float,
    sigma2: float,
    gap: float,
) -> Bound:
    """Return the bound on the mean of ``E||grad f_i||^2`` over a group's iterations (Theorem 1).

    Parameters
    ----------
    counts
        ``[U]``, local iterations of this group in each round.
    size, kappa
        Its number of clients, and :func:`kappa` of all groups.
    lr, L, G2, sigma2
        alpha, smoothness, and bounds on the second moment and the variance of a client's gradient.
    gap
        ``f_i(x^1) - E f_i(x_i^(U,t))``, or anything above it, as ``f_i(x^1) - inf f_i``.

    Returns
    -------
    Bound
        Terms ``start`` and ``noise``, and three for the U - 1 jumps from a group's model to the
        merged one: ``slope``, ``merged`` (with kappa) and ``own`` (with the squared counts).

    Raises
    ------
    FedlibError
        Unless ``0 < lr <= 1/L``, or for counts that are none.
    """
    _step(lr, L)
    check_constants(G2=G2, sigma2=sigma2)
    t = as_array(counts)
    averages(t[..., None])  # refuses what is none
    steps, jumps = t.sum(), len(t) - 1
    each = 2 * (L + 1) * lr * G2 / steps
    return Bound(
        {
            "start": 2 * gap / (lr * steps),
            "noise": lr * L * sigma2 / size,
            "slope": jumps * G2 / (lr * steps),
            "merged": each * kappa * jumps,
            "own": each * float((t[:-1] ** 2).sum()),
        }
    )


def theorem_1_floor(counts: Any, *, L: float, G2: float) -> float:
    """Return a number that Theorem 1 never falls below, at any rate, where ``gap >= 0`` (ours).

    ``2 sqrt(2 (L + 1)) G2`` times the share of the iterations that are not in the last round. The
    trivial bound is ``G2``.
    """
    t = as_array(counts)
    return float(2 * math.sqrt(2 * (L + 1)) * G2 * t[:-1].sum() / t.sum())


# --------------------------------------------------------------------------------------------------
# Theorem 2: the global model


def theorem_2(
    counts: Any,
    *,
    sizes: Sequence[int],
    lr: float,
    L: float,
    G2: float,
    sigma2: float,
    gap: float,
) -> Bound:
    """Return the bound on ``(1/U) sum_u E||grad f(x^u)||^2`` (Theorem 2).

    Parameters
    ----------
    counts
        ``[U, G]``, or :class:`~fedlib.papers.hierarchy.counts.Averages` of them.
    sizes
        Clients of each group, ``[G]``.
    lr, L, G2, sigma2
        As in :func:`theorem_1`.
    gap
        ``f(x^1) - E f(x^(U+1))``, or anything above it.

    Returns
    -------
    Bound
        Terms ``B1`` to ``B5`` in the order of the paper's equation 20. ``B4`` has the factor
        ``G2`` that is missing there; the counts before the first round are taken as zero.

    Raises
    ------
    FedlibError
        Unless ``0 < lr <= 1/L``, or for counts and sizes that do not fit.
    """
    check_constants(G2=G2, sigma2=sigma2)
    _step(lr, L)
    known, w = _averages(counts, sizes), shares(sizes)
    each = (lr * L) ** 2 * G2
    squares, balance = len(w) * w**2, kappa(sizes)
    return Bound(
        {
            "B1": 2 * gap / (lr * known.rounds),
            "B2": 12 * each * balance**2,
            "B3": lr * L * balance * sigma2,
            "B4": 12 * each * float(squares @ known.before),
            "B5": 4 * each * float(squares @ known.drift),
        }
    )


def theorem_2_sharper(
    counts: Any,
    *,
    sizes: Sequence[int],
    lr: float,
    L: float,
    G2: Any,
    sigma2: float,
    gap: float,
) -> Bound:
    """Return a bound on the same mean in three terms, from which Theorem 2 follows (ours).

    ``2 gap / (lr U) + a V + b D`` with the variance of a round's mean gradient,
    ``V = (sigma2 / N^2) mean_u sum_i |N_i| / t_i``, and the drift along the local paths,
    ``D = lr^2 L^2 mean_u (sum_i w_i G_i (t_i - 1) / 2)^2``. With ``h = lr L``:
    ``a = h / (1 - h)`` and ``b = 1`` for ``h <= 1/2``; ``a = 2 h`` and ``b = 1 + h`` above.

    Parameters
    ----------
    G2
        The paper's, or a bound on the second moment of the *mean* gradient of a group, one for all
        or ``[G]``. Clients average their noise, so ``sup ||grad f_i||^2 + sigma2 / |N_i|`` will do.

    Returns
    -------
    Bound
        Terms ``start``, ``noise`` and ``drift``. All else as in :func:`theorem_2`.
    """
    check_constants(G2=G2, sigma2=sigma2)
    _step(lr, L)
    known, w, h = _averages(counts, sizes), shares(sizes), lr * L
    a, b = _factors(h)
    pull = w * np.sqrt(as_array(G2))
    variance = float(sigma2 / checked_sizes(sizes).sum() * (w @ known.inverse))
    return Bound(
        {
            "start": 2 * gap / (lr * known.rounds),
            "noise": a * variance,
            "drift": b * h**2 / 4 * float(pull @ known.pairs @ pull),
        }
    )


def _factors(h: float) -> tuple[float, float]:
    """Return what multiplies noise and drift for a step of ``h / L``."""
    return (h / (1 - h), 1.0) if h <= 1 / 2 else (2 * h, 1 + h)


def effective_step(merge: str, counts: Any, *, sizes: Sequence[int]) -> tuple[float, np.ndarray]:
    """Return how many steps a round makes, ``s``, and the share of each group in them, ``[G]``.

    A merge with the weights ``q_i`` has ``s = sum_j q_j t_j`` and ``p_i = q_i t_i / s``: 1 and
    ``w_i`` for ``"normalised"``, the mean count and ``w_i`` for ``"nova"``, the mean count and
    ``w_i t_i / s`` for ``"plain"``. ``counts`` is ``[G]``.
    """
    t, w = as_array(counts), shares(sizes)
    s = float(w @ t)
    steps = {"normalised": (1.0, w), "nova": (s, w), "plain": (s, w * t / s)}
    if merge not in steps:
        raise unknown("merge", merge, steps)
    return steps[merge]


def other_merges(
    counts: Any,
    *,
    merge: str,
    rounds: float,
    sizes: Sequence[int],
    lr: float,
    L: float,
    G2: float,
    sigma2: float,
    gap: float,
) -> Bound:
    """Return a bound on ``(1/U) sum_u E||grad f_p(x^u)||^2`` for any of the three merges (ours).

    ``f_p = sum_i p_i f_i`` with the shares of :func:`effective_step`: f itself, but for the plain
    merge of unequal counts. A round is a step of ``lr s`` on it, with a drift that knows ``lr``.

    Parameters
    ----------
    counts
        ``[G]``, the same in each of the ``rounds``.
    merge
        ``"normalised"``, ``"plain"`` or ``"nova"``.
    gap
        ``f_p(x^1) - E f_p(x^(U+1))``, or anything above it.

    Returns
    -------
    Bound
        Terms ``start``, ``noise`` and ``drift``. All else as in :func:`theorem_2_sharper`.

    Raises
    ------
    FedlibError
        Unless ``0 < lr s <= 1/L``.
    """
    check_constants(above=True, counts=counts, rounds=rounds)
    check_constants(G2=G2, sigma2=sigma2)
    (s, p), t = effective_step(merge, counts, sizes=sizes), as_array(counts)
    if not (L > 0 and 0 < lr * s <= (1 + 1e-12) / L):
        raise FedlibError(
            f"The bound needs 0 < lr s <= 1/L, but lr = {lr:.4g}, a round makes s = {s:.4g} steps "
            f"and L = {L:.4g}. Take a smaller lr or smaller counts."
        )
    a, b = _factors(lr * s * L)
    return Bound(
        {
            "start": 2 * gap / (lr * s * rounds),
            "noise": a * float(sigma2 * (p**2 / (checked_sizes(sizes) * t)).sum()),
            "drift": b * (lr * L) ** 2 * G2 * float(p @ (t - 1) / 2) ** 2,
        }
    )


def corollary_1_rate(rounds: float, L: float) -> float:
    """Return ``min(1/sqrt U, 1/L)``, the rate of Corollary 1."""
    check_constants(above=True, rounds=rounds, L=L)
    return min(1 / math.sqrt(rounds), 1 / L)


def corollary_1(
    most: Any,
    *,
    rounds: float,
    sizes: Sequence[int],
    L: float,
    G2: float,
    sigma2: float,
    gap: float,
) -> Bound:
    """Return Theorem 2 at the rate of Corollary 1 for groups of at most ``most[i]`` iterations.

    ``most`` is ``[G]``, ``ceil(S / c_i)``. Terms as in :func:`theorem_2`; with
    ``(t - 1)(2 t - 1) / 6 <= t^2 / 3`` the last one depends on the largest counts alone.
    """
    t = as_array(most)
    known = Averages(rounds, 1 / t, t**2 / 3, t**2, np.outer(t - 1, t - 1))
    lr = corollary_1_rate(rounds, L)
    return theorem_2(known, sizes=sizes, lr=lr, L=L, G2=G2, sigma2=sigma2, gap=gap)


# --------------------------------------------------------------------------------------------------
# The sync time that a bound would choose


@dataclass(frozen=True)
class SyncTimes:
    """A bound along the sync times.

    Attributes
    ----------
    syncs
        The sync times, ``[K]``.
    bounds
        The bound at each of them.
    known
        The averages of the counts at each of them.
    """

    syncs: np.ndarray
    bounds: list[Bound]
    known: list[Averages]

    @property
    def totals(self) -> np.ndarray:
        """The whole bound at each sync time, ``[K]``."""
        return np.array([bound.total for bound in self.bounds])

    @property
    def best(self) -> float:
        """The sync time with the smallest bound; the first of those that differ by rounding."""
        least = self.totals.min()
        return float(self.syncs[(self.totals <= least + 1e-9 * abs(least)).argmax()])


def best_sync(
    syncs: Sequence[float],
    bound: Callable[[Averages], Bound],
    *,
    groups: Sequence[Law],
    server: Law,
    time: float,
    count: Callable[[float], Averages] | None = None,
) -> SyncTimes:
    """Return a bound as a function of the sync time, at a fixed system time.

    Parameters
    ----------
    syncs
        The sync times to try.
    bound
        What to minimise: a function of the averages of the counts, as
        ``partial(theorem_2_sharper, sizes=..., lr=..., ...)``.
    groups, server, time
        The delay laws and the system time T.
    count
        The averages at a sync time; by default exact expectations, with the number of rounds
        replaced by its mean. For recorded counts,
        ``lambda sync: averages(timeline(seed, sync, time, groups, server).counts)``.

    Raises
    ------
    FedlibError
        Without a sync time, and as in :mod:`fedlib.papers.hierarchy.counts`.
    """
    if not len(syncs):
        raise FedlibError("There is no sync time to try. Give at least one.")
    count = count or (lambda sync: expected_averages(groups, server, sync, time))
    known = [count(float(sync)) for sync in syncs]
    return SyncTimes(as_array(syncs), [bound(each) for each in known], known)


# --------------------------------------------------------------------------------------------------
# The constants of a task


def gradient_constants(
    task: Any, models: Iterable[torch.Tensor], batches: Sequence[Any]
) -> dict[str, float]:
    """Return ``G2`` and ``sigma2`` as minibatches at these models show them.

    The largest over clients and models of the variance of a minibatch gradient, and of its second
    moment ``||grad F_k||^2 + variance``. Models off the path may have larger ones.

    Parameters
    ----------
    task
        As in :func:`fedlib.engine.estimate.gradient_noise`.
    models
        Each ``[1, P]``.
    batches
        Draws with one row of samples for every client, used at every model.
    """
    largest = {"G2": 0.0, "sigma2": 0.0}
    for theta in models:
        noise = gradient_noise(task, theta, batches)
        moment = as_array((task.client_gradients(theta) ** 2).sum(1)) + noise
        largest["G2"] = max(largest["G2"], float(moment.max()))
        largest["sigma2"] = max(largest["sigma2"], float(noise.max()))
    return largest


def client_smoothness(
    task: Any, models: Iterable[torch.Tensor], clients: Iterable[int], **options: Any
) -> float:
    """Return the largest curvature of these clients' objectives at these models.

    By power iteration, see :func:`fedlib.engine.estimate.smoothness`, whose ``options`` it takes:
    a lower estimate of the L that every client's objective shares.
    """
    clients = list(clients)
    return max(smoothness(task, theta, n, **options) for theta in models for n in clients)


class OfGroups:
    """A task seen from the groups: client i is the mean over the clients of group i.

    Parameters
    ----------
    task
        Anything with ``client_gradients(theta[1, P]) -> [N, P]``, clients group by group.
    sizes
        Clients of each group, ``[G]``.
    """

    def __init__(self, task: Any, sizes: Sequence[int]) -> None:
        self.task, self.sizes = task, [int(n) for n in checked_sizes(sizes)]

    def client_gradients(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the exact gradients of the groups' objectives, ``[G, P]``."""
        parts = self.task.client_gradients(theta).split(self.sizes)
        return torch.stack([part.mean(0) for part in parts])


def group_constants(
    task: Any,
    sizes: Sequence[int],
    models: Sequence[torch.Tensor],
    batches: Sequence[Any],
    **options: Any,
) -> dict[str, float]:
    """Return ``L``, ``sigma2`` and ``G2`` for :func:`theorem_2_sharper`, as these models show them.

    ``L`` is the largest curvature of a group's objective; ``sigma2`` the largest variance of a
    client's minibatch gradient; ``G2`` the largest ``||grad f_i||^2 + sigma2 / |N_i|``. All are
    lower estimates of what the theorem asks for at every model.

    Parameters
    ----------
    task, models, batches
        As in :func:`gradient_constants`; clients group by group.
    sizes
        Clients of each group, ``[G]``.
    options
        As in :func:`client_smoothness`.
    """
    groups = OfGroups(task, sizes)
    sigma2 = gradient_constants(task, models, batches)["sigma2"]
    squares = torch.stack([groups.client_gradients(x).square().sum(1) for x in models]).amax(0)
    moments = as_array(squares) + sigma2 / checked_sizes(sizes)
    L = client_smoothness(groups, models, range(len(groups.sizes)), **options)
    return {"L": L, "sigma2": sigma2, "G2": float(moments.max())}
