"""The bounds of the chapter on participation, as functions, and estimators of their constants.

Weights ``q`` carry clients on their last axis: ``q[..., N]``, rows summing to one. ``K[N, N]`` is
the centred Gram matrix of the clients' gradients. Arrays may be torch tensors or numpy arrays;
results are numpy, in double precision. Paper names: gamma = ``lr``, eta = ``amplify``,
P = ``interval``, I = ``local_steps``, T = ``rounds``, script F = ``gap``.

Source: S. Wang and M. Ji, *A Unified Analysis of Federated Learning with Arbitrary Client
Participation*, NeurIPS 2022. The explicit constants come from the proofs in the book's chapter on
participation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError
from fedlib.papers.bound import Bound, as_array, check_constants

# --------------------------------------------------------------------------------------------------
# What the weights and the gradients say: d, beta, nu, delta, rho


def _weights(K: Any, q: Any) -> tuple[np.ndarray, np.ndarray]:
    K, q = as_array(K), as_array(q)
    if K.ndim != 2 or K.shape[0] != K.shape[1]:
        raise FedlibError(f"The Gram matrix has shape {K.shape}; expected [N, N], see gram().")
    if q.shape[-1:] != K.shape[:1]:
        raise FedlibError(
            f"The weights have shape {q.shape} but the Gram matrix knows {K.shape[0]} clients; "
            "put the clients on the last axis of the weights."
        )
    return K, q


def gram(gradients: Any) -> np.ndarray:
    """Return the centred Gram matrix of the clients' gradients.

    Parameters
    ----------
    gradients
        ``[N, P]``, row n the full gradient of client n's objective, all at the same point.

    Returns
    -------
    numpy.ndarray
        ``K[N, N]`` with ``K[n, m] = <grad F_n - grad f, grad F_m - grad f>``; rows sum to zero.
    """
    rows = as_array(gradients)
    if rows.ndim != 2:
        raise FedlibError(f"The gradients have shape {rows.shape}; expected [N, P].")
    rows = rows - rows.mean(axis=0)
    return rows @ rows.T


def d2(K: Any) -> float:
    """Return ``d^2 = max_n ||grad F_n - grad f||^2`` at the point of ``K`` (Assumption 3)."""
    return float(np.diagonal(as_array(K)).max())


def beta2(K: Any, q: Any) -> np.ndarray:
    """Return ``beta_t^2 = ||sum_n q_t^n (grad F_n - grad f)||^2``, shape ``[...]`` (Assumption 3').

    Since ``K`` maps constants to zero, the uniform weights are subtracted first: uniform
    participation then gives an exact zero.
    """
    K, q = _weights(K, q)
    off = q - q.sum(axis=-1, keepdims=True) / q.shape[-1]
    return np.maximum(((off @ K) * off).sum(axis=-1), 0.0)


def nu2(K: Any, q: Any) -> np.ndarray:
    """Return ``nu_t^2``, the spread of the gradients inside one round, shape ``[...]``.

    ``nu_t^2 = sum_n q_t^n ||grad F_n - sum_m q_t^m grad F_m||^2 = sum_n q_t^n K_nn - beta_t^2``
    (the first term of equation 11).
    """
    K, q = _weights(K, q)
    return np.maximum(q @ np.diagonal(K) - beta2(K, q), 0.0)


def delta2(K: Any, qbar: Any) -> np.ndarray:
    """Return ``delta^2(P) = qbar^T K qbar`` of interval averages ``qbar[..., N]``: ``[...]``."""
    return beta2(K, qbar)


def rho2(q: Any) -> np.ndarray:
    """Return ``sum_n (q_t^n)^2`` of each round, ``[...]``; the paper's rho^2 is its maximum."""
    return (as_array(q) ** 2).sum(axis=-1)


def factor(qbar: Any) -> np.ndarray:
    """Return the participation factor ``(sum_n |qbar^n - 1/N|)^2``, shape ``[...]``, at most 4."""
    qbar = as_array(qbar)
    return np.abs(qbar - 1.0 / qbar.shape[-1]).sum(axis=-1) ** 2


def l1_bound(d2: float, qbar: Any) -> np.ndarray:
    """Return ``d^2 (sum_n |qbar^n - 1/N|)^2``, the sharper of the two bounds on ``delta^2(P)``."""
    return d2 * factor(qbar)


def variance_bound(d2: float, qbar: Any) -> np.ndarray:
    """Return ``N d^2 sum_n (qbar^n - 1/N)^2``, the paper's eq. 15 bound on ``delta^2(P)``."""
    qbar = as_array(qbar)
    clients = qbar.shape[-1]
    return clients * d2 * ((qbar - 1.0 / clients) ** 2).sum(axis=-1)


def interval_means(q: Any, interval: int) -> np.ndarray:
    """Return the mean weights of each complete interval: ``q[..., T, N]`` to ``[..., T//P, N]``."""
    check_whole_number("interval", interval)
    q = as_array(q)
    if q.ndim < 2:
        raise FedlibError(f"q is {[*q.shape]}. Expected weights [..., T, N].")
    count = q.shape[-2] // interval
    if count < 1:
        raise FedlibError(f"{q.shape[-2]} rounds hold no complete interval of {interval} rounds.")
    q = q[..., : count * interval, :]
    return q.reshape(*q.shape[:-2], count, interval, q.shape[-1]).mean(axis=-2)


# --------------------------------------------------------------------------------------------------
# Section 3: lemmas, Theorem 3.1 and its corollaries


def _small_step(L: float, lr: float, local_steps: int, interval: int) -> None:
    limit = 1.0 / (12.0 * L * local_steps * interval)
    if lr > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr <= 1/(12 L I P) = {limit:.4g} (L = {L:.4g}, I = {local_steps}, "
            f"P = {interval}), but lr = {lr:.4g}. Take a smaller lr or a shorter interval."
        )


def _fits(interval: float, rounds: float) -> None:
    if interval > rounds / 2:
        raise FedlibError(
            f"The bound needs P <= T/2, but P = {interval:g} and T = {rounds:g}. "
            "Run more rounds or take a shorter interval."
        )


def lemma_c1_bound(
    *,
    L: float,
    lr: float,
    local_steps: int,
    nu2: float,
    sigma2: float,
    weight_norm2: float = 0.0,
    interval: int = 1,
) -> float:
    """Return the bound on ``sum_n q_t^n E||y_{t,i}^n - ybar_{t,i}||^2`` (Lemma C.1).

    Parameters
    ----------
    L, lr, local_steps, interval
        Smoothness, gamma, I and P; the lemma needs ``lr <= 1/(12 L I P)``.
    nu2, sigma2
        Spread of the gradients inside a round, and variance of one stochastic gradient.
    weight_norm2
        ``sum_n (q_t^n)^2`` of this round.

    Raises
    ------
    FedlibError
        When ``lr`` is too large.
    """
    _small_step(L, lr, local_steps, interval)
    return 3 * local_steps * lr**2 * (6 * local_steps * nu2 + sigma2 * (1 - weight_norm2))


def lemma_c2_bound(
    *,
    L: float,
    lr: float,
    local_steps: int,
    interval: int,
    nu2: float,
    beta2: float,
    gradient2: float,
    sigma2: float,
    rho2: float,
) -> float:
    """Return the bound on ``E||ybar_{t,i} - x_{t0}||^2`` inside an interval (Lemma C.2).

    The other parameters and the error are those of ``lemma_c1_bound``. The paper's noise term has
    ``1 - sum_n (q_t^n)^2`` where this has ``1 - rho2``: smaller, and the same in every round.

    Parameters
    ----------
    gradient2
        ``E||grad f(x_{t0})||^2`` at the start of the interval.
    rho2
        An upper bound on ``sum_n (q_s^n)^2`` over the rounds ``s`` of the interval.
    """
    _small_step(L, lr, local_steps, interval)
    scale = (lr * local_steps) ** 2
    noise = rho2 + (1 - rho2) / (6 * interval)
    drift = 3 * nu2 + 24 * interval**2 * (beta2 + gradient2)
    return scale * drift + 3 * lr**2 * local_steps * interval * sigma2 * noise


def theorem_3_1(
    *,
    L: float,
    gap: float,
    sigma2: float,
    nu2: float,
    beta2: float,
    delta2: float,
    rho2: float,
    lr: float,
    amplify: float,
    local_steps: int,
    interval: int,
    rounds: int,
) -> Bound:
    """Return the bound on ``min_t E||grad f(x_t)||^2`` with its explicit constants (Theorem 3.1).

    The same number bounds the *mean* over the starts of the complete intervals, and ``delta2`` may
    be the mean over the intervals of each one's ``delta^2``.

    Parameters
    ----------
    L, gap, sigma2, nu2, beta2, delta2, rho2
        Smoothness, ``f(x_0) - f*``, gradient noise, the three parts of Assumption 3', and a
        bound on ``sum_n (q_t^n)^2``.
    lr, amplify, local_steps, interval, rounds
        gamma, eta, I, P, T.

    Returns
    -------
    Bound
        Terms ``start``, ``client_drift``, ``interval_drift``, ``participation``, ``noise``.

    Raises
    ------
    FedlibError
        When a step-size condition or ``P <= T/2`` is violated; the message holds the numbers.
    """
    check_constants(True, L=L, lr=lr, amplify=amplify, rounds=rounds)
    check_constants(True, local_steps=local_steps, interval=interval)
    check_constants(sigma2=sigma2, nu2=nu2, beta2=beta2, delta2=delta2, rho2=rho2)
    _small_step(L, lr, local_steps, interval)
    limit = 1.0 / (2.0 * L * local_steps * interval)
    if lr * amplify > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr * amplify <= 1/(2 L I P) = {limit:.4g} (L = {L:.4g}, "
            f"I = {local_steps}, P = {interval}), but lr * amplify = {lr * amplify:.4g}. "
            "Amplify less or take a smaller lr."
        )
    _fits(interval, rounds)
    step = (lr * L * local_steps) ** 2
    per_noise = (lr * L) ** 2 * local_steps * (21 + 18 * interval * rho2)
    return Bound(
        {
            "start": 8 * gap / (lr * amplify * local_steps * rounds),
            "client_drift": 126 * step * nu2,
            "interval_drift": 144 * step * interval**2 * beta2,
            "participation": 6 * delta2,
            "noise": (per_noise + 4 * lr * amplify * L * rho2) * sigma2,
        }
    )


def step_sizes_3_2(
    *,
    L: float,
    gap: float,
    sigma2: float,
    rho2: float,
    local_steps: int,
    interval: int,
    rounds: int,
) -> tuple[float, float]:
    """Return ``(lr, amplify)`` of Corollary 3.2; they always satisfy Theorem 3.1's conditions."""
    _fits(interval, rounds)
    lr = 1.0 / (12 * L * local_steps * interval * math.sqrt(rounds))
    amplify = 6 * math.sqrt(rounds)
    if sigma2 > 0:
        best = 12 * interval * math.sqrt(L * local_steps * gap / (sigma2 * rho2))
        amplify = min(amplify, best)
    return lr, amplify


def corollary_3_2(
    *,
    L: float,
    gap: float,
    sigma2: float,
    nu2: float,
    beta2: float,
    delta2: float,
    rho2: float,
    local_steps: int,
    interval: int,
    rounds: int,
) -> Bound:
    """Return the bound of Corollary 3.2 with explicit constants, terms named by what they cost.

    Never below ``theorem_3_1`` at the rates of ``step_sizes_3_2``.
    """
    _fits(interval, rounds)
    shared = 12 * math.sqrt(sigma2 * rho2 * L * gap / (local_steps * rounds))
    terms = {"statistical": shared, "deterministic": 16 * L * interval * gap / rounds}
    terms |= _drift_terms(nu2, beta2, delta2, rho2, sigma2, local_steps, interval, rounds)
    return Bound(terms)


def step_sizes_3_3(
    *, L: float, gap: float, rho2: float, local_steps: int, interval: int, rounds: int
) -> tuple[float, float]:
    """Return ``(lr, amplify)`` of Corollary 3.3.

    Raises
    ------
    FedlibError
        Unless ``T >= 4 L I P^2 F / rho^2``, the corollary's condition solved for T.
    """
    _fits(interval, rounds)
    needed = 4 * L * local_steps * interval**2 * gap / rho2
    if rounds < needed * (1 - 1e-12):
        raise FedlibError(
            f"Corollary 3.3 needs T >= 4 L I P^2 F / rho^2 = {needed:.4g}, but T = {rounds}. "
            "Run more rounds, take a shorter interval, or use Corollary 3.2."
        )
    lr = 1.0 / (12 * L * local_steps * interval * math.sqrt(rounds))
    return lr, 12 * interval * math.sqrt(L * local_steps * gap / rho2)


def corollary_3_3(
    *,
    L: float,
    gap: float,
    sigma2: float,
    nu2: float,
    beta2: float,
    delta2: float,
    rho2: float,
    local_steps: int,
    interval: int,
    rounds: int,
) -> Bound:
    """Return the bound of Corollary 3.3: exactly Theorem 3.1 at ``step_sizes_3_3``."""
    step_sizes_3_3(
        L=L, gap=gap, rho2=rho2, local_steps=local_steps, interval=interval, rounds=rounds
    )
    shared = (8 + 4 * sigma2) * math.sqrt(rho2 * L * gap / (local_steps * rounds))
    terms = {"statistical": shared}
    terms |= _drift_terms(nu2, beta2, delta2, rho2, sigma2, local_steps, interval, rounds)
    return Bound(terms)


def _drift_terms(nu2, beta2, delta2, rho2, sigma2, local_steps, interval, rounds):
    noise = sigma2 * (7 / (48 * interval) + rho2 / 8)
    return {
        "client_drift": 0.875 * nu2 / (interval**2 * rounds),
        "interval_drift": beta2 / rounds,
        "participation": 6 * delta2,
        "noise_drift": noise / (local_steps * interval * rounds),
    }


# --------------------------------------------------------------------------------------------------
# Section 4: what participation makes of delta


def variance_independent(clients: int, cohort: int) -> float:
    """Return ``upsilon^2 = (1 - S/N) / (S N)``, the variance of one weight.

    For S of N clients drawn uniformly without replacement and given weight 1/S each.
    """
    if not 1 <= cohort <= clients:
        raise FedlibError(f"A cohort of {cohort} cannot be drawn from {clients} clients.")
    return (1 - cohort / clients) / (cohort * clients)


def proposition_4_6(
    d2: float,
    clients: int,
    long_run: float,
    interval: float,
    failure: float | None = None,
    intervals: int = 1,
) -> float:
    """Return ``N^2 d^2 v / P`` for a stationary process with long-run variance ``v`` of a weight.

    Parameters
    ----------
    failure
        ``None``: a bound in expectation (to leading order in 1/P). A probability c: divided by c,
        a bound that fails with probability at most c, by Markov's inequality for the whole sum.
    intervals
        1: that bound holds for one interval and equally for the *mean* over any number of
        intervals, which is what Theorem 3.1 needs. K: for the largest of K intervals.
    """
    expected = clients**2 * d2 * long_run / interval
    return expected if failure is None else intervals * expected / _probability(failure)


def proposition_4_7(
    d2: float,
    clients: int,
    variance: float,
    interval: float,
    failure: float | None = None,
    intervals: int = 1,
) -> float:
    """Return ``N^2 d^2 upsilon^2 / P``: weights independent over rounds, exact variance, any P.

    ``failure`` and ``intervals`` as in ``proposition_4_6``. ``proposition_4_7_hoeffding`` feels
    the failure probability only through its logarithm.
    """
    return proposition_4_6(d2, clients, variance, interval, failure, intervals)


def proposition_4_7_hoeffding(
    d2: float,
    clients: int,
    interval: float,
    failure: float,
    intervals: int = 1,
    union: bool = True,
    largest: float = 1.0,
) -> float:
    """Return ``N^2 d^2 w^2 ln(2 N K / c) / (2 P)``, a bound on ``delta^2(P)`` in K intervals.

    Parameters
    ----------
    failure, intervals
        c, the probability that any of the ``K = intervals`` intervals breaks the bound.
    union
        ``False`` gives ``ln(2 / c)`` as the paper prints it: a statement on one client in one
        interval, not on the theorem's ``delta^2``.
    largest
        w, the largest weight a client can get in a round: 1 in the paper, 1/S for S equal weights.
    """
    events = clients * intervals if union else 1
    deviation2 = largest**2 * math.log(2 * events / _probability(failure)) / (2 * interval)
    return clients**2 * d2 * deviation2


def proposition_4_7_mean(
    d2: float, clients: int, interval: float, failure: float, largest: float = 1.0
) -> float:
    """Return ``N^2 d^2 w^2 ln(sqrt(2) / c) / P``, a bound on the mean of ``delta^2(P)``.

    For weights independent over rounds. The mean over any number of intervals breaks the bound
    with probability at most ``failure``, whatever the number of clients or intervals. The paper
    has the same with ``ln(2 / c) / 2``, for every interval at once.

    Parameters
    ----------
    failure, largest
        c and w, as in :func:`proposition_4_7_hoeffding`.
    """
    logarithm = math.log(math.sqrt(2) / _probability(failure))
    return clients**2 * d2 * largest**2 * logarithm / interval


def _probability(value: float) -> float:
    if not 0 < value <= 1:
        raise FedlibError(f"The failure probability is {value}; expected a number in (0, 1].")
    return value


@dataclass(frozen=True)
class Prescription:
    """What Corollary 4.8 asks for.

    Attributes
    ----------
    interval
        ``P = v N^(5/2) sqrt(I T)``, prescribed for weights of variance v.
    longest
        ``T / 2``, the longest interval Theorem 3.1 allows.
    rounds
        ``4 v^2 I N^5``, the fewest rounds for which the prescribed interval fits.
    largest_gap
        The largest ``L F`` that ``I <= rho / (2 v N^(5/2) sqrt(L F))`` permits.
    """

    interval: float
    longest: float
    rounds: float
    largest_gap: float

    @property
    def fits(self) -> bool:
        """Whether the prescribed interval is short enough for the run."""
        return self.interval <= self.longest


def prescription(
    variance: float, clients: int, rho2: float, local_steps: int, rounds: int
) -> Prescription:
    """Return the interval Corollary 4.8 prescribes for stochastic participation, and its price.

    Parameters
    ----------
    variance
        v: a bound on the variance of a weight if rounds are independent (upsilon^2), its long-run
        variance otherwise (upsilon-hat^2).
    clients, rho2, local_steps, rounds
        N, a bound on ``sum_n (q_t^n)^2``, I and T.
    """
    check_constants(variance=variance, rho2=rho2)
    check_constants(True, clients=clients, local_steps=local_steps, rounds=rounds)
    scale = variance * clients**2.5
    if scale == 0:
        raise FedlibError("The weights do not vary: delta is zero for P = 1 already.")
    return Prescription(
        interval=scale * math.sqrt(local_steps * rounds),
        longest=rounds / 2,
        rounds=4 * scale**2 * local_steps,
        largest_gap=rho2 / (2 * scale * local_steps) ** 2,
    )


def corollary_4_8(clients: int, cohort: int, local_steps: int, rounds: int) -> Prescription:
    """Return the prescription for S = ``cohort`` of N = ``clients`` a round.

    Drawn uniformly without replacement, afresh each round, with weight 1/S each.
    """
    variance = variance_independent(clients, cohort)
    return prescription(variance, clients, 1 / cohort, local_steps, rounds)


def variance_of_mean(autocovariance: Any) -> float:
    """Return the variance of the mean of P rounds of a stationary process, exactly.

    Parameters
    ----------
    autocovariance
        ``[P]``, the covariances at lags 0 to P - 1.
    """
    lags = as_array(autocovariance)
    count = len(lags)
    both = np.where(np.arange(count) == 0, 1.0, 2.0) * (count - np.arange(count))
    return float(both @ lags) / count**2


def markov_mean(on: float, off: float) -> float:
    """Return ``pi = b / (a + b)``, the time a two-state chain is on.

    ``on`` = b is the probability of switching on, ``off`` = a of switching off, each round.
    """
    if not (0 <= on <= 1 and 0 <= off <= 1 and on + off > 0):
        raise FedlibError(f"on = {on}, off = {off}: expected probabilities, not both zero.")
    return on / (on + off)


def markov_autocovariance(on: float, off: float, lag: Any) -> np.ndarray:
    """Return ``pi (1 - pi) (1 - a - b)^p``, the on-indicator's covariance at lags ``p[...]``."""
    mean = markov_mean(on, off)
    return mean * (1 - mean) * (1 - on - off) ** as_array(lag)


def markov_long_run_variance(on: float, off: float) -> float:
    """Return ``pi (1 - pi) (2 - a - b) / (a + b)``, the autocovariances summed over all lags."""
    mean = markov_mean(on, off)
    return mean * (1 - mean) * (2 - on - off) / (on + off)


def markov_weight_autocovariance(
    clients: int, on: float, off: float, lags: int, cap: int | None = None
) -> np.ndarray:
    """Return the covariances of one client's *weight* at lags ``0..lags-1``, exactly.

    N independent two-state chains; those that are on share the weight, everybody if nobody is on.

    Parameters
    ----------
    on, off
        b and a, the probabilities of switching on and off.
    cap
        At most this many clients a round, drawn uniformly among those that are on.
    """
    mean = markov_mean(on, off)
    others = np.arange(clients)  # how many of the N - 1 others are on
    stay, join = _binomials(clients - 1, 1 - off), _binomials(clients - 1, on)
    move = np.stack([np.convolve(stay[m], join[clients - 1 - m]) for m in others])
    switch = np.array([[1 - on, on], [off, 1 - off]])
    law = np.outer([1 - mean, mean], _binomials(clients - 1, mean)[-1])
    share = np.stack([np.zeros(clients), 1 / (1 + others)])  # E q, given who is on
    share[0, 0] = 1 / clients  # nobody is on, so everybody takes part
    drawn = np.stack([np.ones(clients), 1 + others])  # [own state, others on]: who takes part
    drawn[0, 0] = clients
    drawn = drawn if cap is None else np.minimum(cap, drawn)
    later, covariances = share, [(law * share / drawn).sum() - 1 / clients**2]
    for _ in range(1, lags):
        later = switch @ later @ move.T
        covariances.append((law * share * later).sum() - 1 / clients**2)
    return np.array(covariances)


def _binomials(most: int, chance: float) -> list[np.ndarray]:
    """Return the laws of the number of successes in 0, 1, ..., ``most`` trials."""
    laws = [np.ones(1)]
    for _ in range(most):
        laws.append(np.convolve(laws[-1], [1 - chance, chance]))
    return laws


def markov_weight_bound(clients: int, on: float, off: float, cap: int | None = None) -> float:
    """Return a bound on ``P Var(qbar)`` of one client's weight, for every P, 0 < a + b < 2.

    ``Var(q) + V 2 s / (1 - s)`` with r = 1 - a - b, ``s = max(r, r^2)``, and V the variance of the
    weight given who is on; without a cap V is Var(q). It bounds the long-run variance too.

    The parameters are those of :func:`markov_weight_autocovariance`.
    """
    memory = 1 - on - off
    memory = max(memory, memory**2)
    uncapped = markov_weight_autocovariance(clients, on, off, 1)[0]
    fresh = markov_weight_autocovariance(clients, on, off, 1, cap)[0] - uncapped
    return fresh + uncapped * (1 + memory) / (1 - memory)
