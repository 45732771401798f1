"""Every bound the book states, as a function, and estimators of the constants in it.

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
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedlib.errors import FedlibError
from fedlib.rng import stream

# --------------------------------------------------------------------------------------------------
# What the weights and the gradients say: d, beta, nu, delta, rho


def _array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return np.asarray(values, dtype=np.float64)


def _weights(K: Any, q: Any) -> tuple[np.ndarray, np.ndarray]:
    K, q = _array(K), _array(q)
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
    rows = _array(gradients)
    if rows.ndim != 2:
        raise FedlibError(f"The gradients have shape {rows.shape}; expected [N, P].")
    rows = rows - rows.mean(axis=0)
    return rows @ rows.T


def d2(K: Any) -> float:
    """Return ``d^2 = max_n ||grad F_n - grad f||^2`` at the point of ``K`` (Assumption 3)."""
    return float(np.diagonal(_array(K)).max())


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
    (Proposition 4.1).
    """
    K, q = _weights(K, q)
    return np.maximum(q @ np.diagonal(K) - beta2(K, q), 0.0)


def delta2(K: Any, qbar: Any) -> np.ndarray:
    """Return ``delta^2(P) = qbar^T K qbar`` of interval averages ``qbar[..., N]``: ``[...]``."""
    return beta2(K, qbar)


def rho2(q: Any) -> np.ndarray:
    """Return ``sum_n (q_t^n)^2`` of each round, ``[...]``; the paper's rho^2 is its maximum."""
    return (_array(q) ** 2).sum(axis=-1)


def factor(qbar: Any) -> np.ndarray:
    """Return the participation factor ``(sum_n |qbar^n - 1/N|)^2``, shape ``[...]``, at most 4."""
    qbar = _array(qbar)
    return np.abs(qbar - 1.0 / qbar.shape[-1]).sum(axis=-1) ** 2


def l1_bound(d2: float, qbar: Any) -> np.ndarray:
    """Return ``d^2 (sum_n |qbar^n - 1/N|)^2``, the sharper of the two bounds on ``delta^2(P)``."""
    return d2 * factor(qbar)


def variance_bound(d2: float, qbar: Any) -> np.ndarray:
    """Return ``N d^2 sum_n (qbar^n - 1/N)^2``, the paper's eq. 15 bound on ``delta^2(P)``."""
    qbar = _array(qbar)
    clients = qbar.shape[-1]
    return clients * d2 * ((qbar - 1.0 / clients) ** 2).sum(axis=-1)


def interval_means(q: Any, interval: int) -> np.ndarray:
    """Return the mean weights of each complete interval: ``q[..., T, N]`` to ``[..., T//P, N]``."""
    q = _array(q)
    count = q.shape[-2] // interval
    if count < 1:
        raise FedlibError(f"{q.shape[-2]} rounds hold no complete interval of {interval} rounds.")
    q = q[..., : count * interval, :]
    return q.reshape(*q.shape[:-2], count, interval, q.shape[-1]).mean(axis=-2)


# --------------------------------------------------------------------------------------------------
# Lemmas C.1 and C.2, Theorem 3.1, Corollaries 3.2 and 3.3


@dataclass(frozen=True)
class Bound:
    """A bound as the sum of named terms: ``bound["noise"]``, ``bound.total``."""

    terms: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of the terms."""
        return float(sum(self.terms.values()))

    def __getitem__(self, name: str) -> float:
        return self.terms[name]


def _small_step(L: float, lr: float, local_steps: int, interval: int) -> None:
    limit = 1.0 / (12.0 * L * local_steps * interval)
    if lr > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr <= 1/(12 L I P) = {limit:.4g} (L = {L:.4g}, I = {local_steps}, "
            f"P = {interval}), but lr = {lr:.4g}. Take a smaller lr or a shorter interval."
        )


def _conditions(
    L: float, lr: float, amplify: float, local_steps: int, interval: int, rounds: int
) -> None:
    _small_step(L, lr, local_steps, interval)
    limit = 1.0 / (2.0 * L * local_steps * interval)
    if lr * amplify > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr * amplify <= 1/(2 L I P) = {limit:.4g} (L = {L:.4g}, "
            f"I = {local_steps}, P = {interval}), but lr * amplify = {lr * amplify:.4g}. "
            "Amplify less or take a smaller lr."
        )
    _fits(interval, rounds)


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

    Parameters
    ----------
    gradient2
        ``E||grad f(x_{t0})||^2`` at the start of the interval.
    rho2
        An upper bound on ``sum_n (q_s^n)^2`` over the rounds ``s`` of the interval.

    The other parameters and the error are those of ``lemma_c1_bound``. The paper's noise term has
    ``1 - sum_n (q_t^n)^2`` where this has ``1 - rho2``: smaller, and the same in every round.
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
    _conditions(L, lr, amplify, local_steps, interval, rounds)
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
# How fast delta^2(P) falls: Propositions 4.4, 4.6, 4.7 and Corollary 4.8


def variance_independent(clients: int, cohort: int) -> float:
    """Return ``upsilon^2 = (1 - S/N) / (S N)``, the variance of one weight.

    For S of N clients drawn uniformly without replacement and given weight 1/S each.
    """
    if not 1 <= cohort <= clients:
        raise FedlibError(f"A cohort of {cohort} cannot be drawn from {clients} clients.")
    return (1 - cohort / clients) / (cohort * clients)


def proposition_4_4(d2: float, second_moments: Any) -> np.ndarray:
    """Return ``N d^2 sum_n E(qbar^n - 1/N)^2``, which bounds ``E delta^2(P)``.

    Parameters
    ----------
    second_moments
        ``[..., N]``, client n's ``E(qbar^n - 1/N)^2``.
    """
    moments = _array(second_moments)
    return moments.shape[-1] * d2 * moments.sum(axis=-1)


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
        ``P = upsilon^2 N^(5/2) sqrt(I T)``, prescribed.
    longest
        ``T / 2``, the longest interval Theorem 3.1 allows.
    rounds
        ``4 upsilon^4 I N^5``, the fewest rounds for which the prescribed interval fits.
    largest_gap
        The largest ``L F`` that ``I <= rho / (2 upsilon^2 N^(5/2) sqrt(L F))`` permits.
    """

    interval: float
    longest: float
    rounds: float
    largest_gap: float

    @property
    def fits(self) -> bool:
        """Whether the prescribed interval is short enough for the run."""
        return self.interval <= self.longest


def corollary_4_8(clients: int, cohort: int, local_steps: int, rounds: int) -> Prescription:
    """Return the interval Corollary 4.8 prescribes for independent participation, and its price.

    S = ``cohort`` of N = ``clients`` a round, drawn uniformly without replacement.
    """
    scale = variance_independent(clients, cohort) * clients**2.5
    if scale == 0:
        raise FedlibError("Everybody takes part in every round: delta is zero for P = 1 already.")
    return Prescription(
        interval=scale * math.sqrt(local_steps * rounds),
        longest=rounds / 2,
        rounds=4 * scale**2 * local_steps,
        largest_gap=1 / (cohort * (2 * scale * local_steps) ** 2),
    )


def variance_of_mean(autocovariance: Any) -> float:
    """Return the variance of the mean of P rounds of a stationary process, exactly.

    Parameters
    ----------
    autocovariance
        ``[P]``, the covariances at lags 0 to P - 1.
    """
    lags = _array(autocovariance)
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
    return mean * (1 - mean) * (1 - on - off) ** _array(lag)


def markov_long_run_variance(on: float, off: float) -> float:
    """Return ``pi (1 - pi) (2 - a - b) / (a + b)``, the autocovariances summed over all lags."""
    mean = markov_mean(on, off)
    return mean * (1 - mean) * (2 - on - off) / (on + off)


# --------------------------------------------------------------------------------------------------
# The toy: F_n(x) = 1/2 ||x - z_n||^2, clients taking turns in the order of z


def toy_run(
    z: Any,
    start: Any,
    gamma: float,
    eta: float,
    rounds: int,
    interval: int,
    local_steps: int = 1,
) -> np.ndarray:
    """Return the path ``x[rounds + 1, D]`` of Algorithm 1 on the toy, by its closed-form round.

    I exact steps of client n from x end at ``z_n + (1 - gamma)^I (x - z_n)``.
    """
    z, x = _array(z), _array(start).copy()
    path, reference = [x], x
    for t in range(rounds):
        x = x + (1 - (1 - gamma) ** local_steps) * (z[t % len(z)] - x)
        if (t + 1) % interval == 0:
            x = reference + eta * (x - reference)
            reference = x
        path.append(x)
    return np.array(path)


def toy_fixed_point(z: Any, gamma: float, local_steps: int = 1) -> np.ndarray:
    """Return where a cycle of the toy ends where it began, for every amplification factor.

    Parameters
    ----------
    z
        ``[N, D]``, the clients' minimisers in the order of their turns.

    Returns
    -------
    numpy.ndarray
        ``[D]``, at distance O(gamma) from the optimum ``z.mean(0)``.
    """
    z = _array(z)
    keep = (1 - gamma) ** local_steps
    weights = (1 - keep) * keep ** np.arange(len(z) - 1, -1, -1)
    return weights @ z / (1 - keep ** len(z))


def toy_contraction(gamma: float, eta: float, clients: int = 3, local_steps: int = 1) -> float:
    """Return ``1 - eta (1 - a)``, ``a = (1 - gamma)^(N I)``: the error's factor a cycle."""
    return 1 - eta * (1 - (1 - gamma) ** (clients * local_steps))


def toy_eta_max(gamma: float, clients: int = 3, local_steps: int = 1) -> float:
    """Return ``2 / (1 - a)``: the toy with P = N converges exactly for ``0 < eta < eta_max``."""
    return 2 / (1 - (1 - gamma) ** (clients * local_steps))


# --------------------------------------------------------------------------------------------------
# Estimators on a task


def smoothness(
    task: Any,
    theta: torch.Tensor,
    client: int | None = None,
    iterations: int = 100,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> float:
    """Return the largest absolute eigenvalue of the Hessian at ``theta``, by power iteration.

    Hessian-vector products are central differences of ``task.client_gradients``. The result
    approaches the spectral norm at this point from below, and a point gives a lower estimate of the
    smoothness constant L.

    Parameters
    ----------
    task
        Anything with ``client_gradients(theta[1, P]) -> [N, P]``.
    theta
        ``[1, P]``, where to look.
    client
        ``None`` for the average objective f, a number for that client's objective.
    iterations, tolerance
        Stop after this many products, or when the estimate moves by less than this fraction.
    seed
        Of the starting direction.
    """
    start = stream(seed, "power iteration").standard_normal(theta.shape)
    v = torch.as_tensor(start, dtype=theta.dtype)
    v = v.to(theta.device)
    v /= v.norm()
    scale = max(1.0, theta.norm().item())
    eps = torch.finfo(theta.dtype).eps ** (1 / 3) * scale
    estimate = 0.0
    for _ in range(iterations):
        change = task.client_gradients(theta + eps * v) - task.client_gradients(theta - eps * v)
        product = change / (2 * eps)
        product = product.mean(0) if client is None else product[client]
        previous, estimate = estimate, product.norm().item()
        if estimate == 0 or abs(estimate - previous) <= tolerance * estimate:
            break
        v = (product / estimate).reshape(theta.shape)
    return estimate


def gradient_noise(task: Any, theta: torch.Tensor, batches: Iterable[Any]) -> np.ndarray:
    """Return each client's mean squared minibatch error, ``[N]``; sigma^2 is its maximum.

    Parameters
    ----------
    task
        Anything with ``grad(theta[N, P], batch) -> [N, P]`` and
        ``client_gradients(theta[1, P]) -> [N, P]``.
    theta
        ``[1, P]``, where to look.
    batches
        Draws, each with one row of samples for every client, in the order of the clients.
    """
    exact = task.client_gradients(theta)
    everyone = theta.expand(len(exact), -1).contiguous()
    errors = [((task.grad(everyone, b) - exact) ** 2).sum(1) for b in batches]
    if not errors:
        raise FedlibError("No batches came; expected at least one draw for every client.")
    return _array(torch.stack(errors).mean(0))


# --------------------------------------------------------------------------------------------------
# Tiered decentralized coordinate descent (TDCD). Source: A. Das, T. Castiglia, S. Wang and
# S. Patterson, *Cross-Silo Federated Learning for Multi-Tier Networks with Vertical and Horizontal
# Data Partitioning*, ACM TIST, 2022. Paper names: eta = ``lr``, Q, R = ``rounds``, N = ``silos``,
# K_j = ``clients``, E = ``width``, Delta = ``gap``, B = ``batch_size``. A constant that the paper
# has per silo, such as sigma_j^2, may be given per silo, [N], or as its sum over the silos.


def _tdcd_step(lr: float, Q: int, constant: float, name: str, share: int) -> None:
    if not (Q >= 1 and lr > 0):
        raise FedlibError(f"Expected Q >= 1 local steps and lr > 0; came Q = {Q}, lr = {lr:.4g}.")
    limit = 1.0 / (share * Q * constant)
    if lr > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr <= 1/({share} Q {name}) = {limit:.4g} ({name} = {constant:.4g}, "
            f"Q = {Q}), but lr = {lr:.4g}. Take a smaller lr or fewer local steps."
        )


def tdcd_lemma_2_bound(*, L_max: float, lr: float, Q: int, gradient2: float) -> float:
    """Return the bound on the drift of the block gradients, summed over a round (Lemma 2).

    It bounds ``sum_t sum_j mean_k ||g_kj(y^t) - g_kj(y^t0)||^2`` over the Q steps from t0.

    Parameters
    ----------
    L_max, lr, Q
        Smoothness of a block gradient in its own block, eta, local steps; the lemma needs
        ``lr <= 1/(2 Q L_max)``.
    gradient2
        ``sum_j mean_k ||g_kj(y^t0)||^2``, minibatch gradients at the start of the round.

    Raises
    ------
    FedlibError
        When ``lr`` is too large.
    """
    _tdcd_step(lr, Q, L_max, "L_max", 2)
    return 4 * Q**2 * (1 + Q) * (L_max * lr) ** 2 * gradient2


def tdcd_drift_bound(*, L_max: float, lr: float, Q: int, gradient2: float) -> float:
    """Return ``gradient2 * sum_{m<Q} ((1 + lr L_max)^m - 1)^2``: the same sum, for every ``lr``.

    Ours: never above ``tdcd_lemma_2_bound``, needs no condition, and is zero for one local step.
    Parameters as there.
    """
    growth = (1 + lr * L_max) ** np.arange(Q) - 1
    return float((growth**2).sum() * gradient2)


def _tdcd_bound(L, L_max, gap, anchor, drift, lr, Q, rounds) -> Bound:
    _tdcd_step(lr, Q, max(L, L_max), "max(L, L_max)", 8)
    s = lr * Q
    return Bound(
        {
            "start": 4 * gap / (s * rounds),
            "noise": 4 * s * L * float(anchor),
            "drift": 16 * (s * L_max) ** 2 * float(drift),
            "mixed": 32 * s**3 * L * L_max**2 * float(drift),
        }
    )


def tdcd_theorem_1(
    *, L: float, L_max: float, gap: float, sigma2: Any, lr: float, Q: int, rounds: int
) -> Bound:
    """Return the bound on the mean of ``E||grad L||^2`` over the round starts (Theorem 1).

    Parameters
    ----------
    L, L_max
        Smoothness of the objective, and of every minibatch block gradient in its own block.
    gap
        ``L(theta^0) - E L(theta^T)``, or anything above it, as ``L(theta^0) - inf L``.
    sigma2
        ``sigma_j^2`` of each silo, ``[N]``, or their sum.
    lr, Q, rounds
        eta, Q and R. They enter only through ``lr * Q`` and R.

    Returns
    -------
    Bound
        Terms ``start``, ``noise``, ``drift``, ``mixed``.

    Raises
    ------
    FedlibError
        Unless ``0 < lr <= 1/(8 Q max(L, L_max))``; the message holds the numbers.
    """
    noise = _array(sigma2).sum()
    return _tdcd_bound(L, L_max, gap, noise, noise, lr, Q, rounds)


def tdcd_theorem_1_heterogeneous(
    *, L: float, L_max: float, gap: float, sigma2: Any, kappa2: Any, lr: float, Q: int, rounds: int
) -> Bound:
    """Return Theorem 1 for clients whose gradients are unbiased only on average (ours).

    ``kappa2`` holds ``kappa_j^2 >= mean_k ||grad_j F_kj - grad_j L||^2``, ``[N]`` or the sum, and
    ``sigma2`` the variances around the clients' own gradients. The bound is at most
    ``tdcd_theorem_1`` with ``sigma2 + kappa2``: heterogeneity enters only through the drift.
    """
    noise = _array(sigma2).sum()
    return _tdcd_bound(L, L_max, gap, noise, noise + _array(kappa2).sum(), lr, Q, rounds)


def tdcd_theorem_1_independent(
    *,
    L: float,
    L_max: float,
    gap: float,
    sigma2: Any,
    clients: Any,
    lr: float,
    Q: int,
    rounds: int,
    kappa2: Any = 0.0,
) -> Bound:
    """Return Theorem 1 when the noises of a silo's clients are uncorrelated (ours).

    The term ``noise`` then has ``sigma_j^2 / K_j``; the drift keeps ``sigma_j^2 + kappa_j^2``.

    Parameters
    ----------
    sigma2, clients
        ``[N]`` each, ``sigma_j^2`` and ``K_j`` of every silo; or numbers, for all silos together.
    kappa2
        As in ``tdcd_theorem_1_heterogeneous``; zero for clients with the same distribution.

    The other parameters and the error are those of ``tdcd_theorem_1``.
    """
    noise = _array(sigma2)
    anchor, drift = (noise / _array(clients)).sum(), noise.sum() + _array(kappa2).sum()
    return _tdcd_bound(L, L_max, gap, anchor, drift, lr, Q, rounds)


def tdcd_best_product(*, L: float, gap: float, sigma2: Any, rounds: float) -> tuple[float, float]:
    """Return ``(s*, value)``: the product ``lr * Q`` that minimises Theorem 1's leading terms.

    ``s* = sqrt(gap / (L R sigma2))`` and ``start + noise = 8 sqrt(gap L sigma2 / R)`` there (ours).
    The theorem allows ``s*`` from ``R = 64 max(L, L_max)^2 gap / (L sigma2)`` on.

    Raises
    ------
    FedlibError
        Without noise: the terms then fall with the product, and the step condition decides.
    """
    noise = float(_array(sigma2).sum())
    if not noise > 0:
        raise FedlibError(
            "Without noise the leading terms have no smallest value: they fall as lr * Q grows. "
            "Take the largest product that the step condition allows, 1/(8 max(L, L_max))."
        )
    return math.sqrt(gap / (L * rounds * noise)), 8 * math.sqrt(gap * L * noise / rounds)


def tdcd_round_time(*, t_comm: float, t_comp: float, Q: float) -> float:
    """Return ``3 t_comm + Q t_comp``, the time of a round in the units of the paper's cost model.

    ``t_comm`` is one round trip: hub and clients twice, hubs once; ``t_comp`` is one local step.
    """
    return 3 * t_comm + Q * t_comp


def tdcd_volume(
    *, silos: int, clients: int, size: int, batch_size: int, width: int
) -> dict[str, int]:
    """Return the numbers that one silo moves in a round, each message counted at its sender.

    Parameters
    ----------
    silos, clients
        N, and K_j of this silo.
    size, batch_size, width
        Parameters of the silo's block, B and E.

    Returns
    -------
    dict
        ``models`` down and up, ``embeddings`` up and foreign sums down, ``exchange``: its table
        to each other hub. Sample ids come from a shared seed and are not counted.
    """
    table = batch_size * width
    return {
        "models": 2 * clients * size,
        "embeddings": 2 * table,
        "exchange": (silos - 1) * table,
    }


def tdcd_effective_step(*, curvature: Any, lr: float, Q: float) -> np.ndarray:
    """Return ``c = 1 - (1 - lr curvature)^Q``: how much of a frozen block problem a round solves.

    Parameters
    ----------
    curvature
        ``[...]``, eigenvalues of ``H_j = X_j^T X_j / B`` (squared loss 1/2, linear block).
    lr, Q
        eta and the local steps; ``math.inf`` is the limit, one wherever the curvature is positive.

    Raises
    ------
    FedlibError
        In the limit, unless ``lr < 2 / curvature``: the local steps then do not settle.
    """
    curvature = _array(curvature)
    if Q == math.inf:
        if (lr * curvature >= 2).any():
            raise FedlibError(
                f"Endless local steps settle only for lr < 2 / curvature = "
                f"{2 / curvature.max():.4g}, but lr = {lr:.4g}. Take a smaller lr."
            )
        return (curvature > 0).astype(np.float64)
    return 1 - (1 - lr * curvature) ** Q


def jacobi_residual_factor(
    *, curvature: Any, silos: int, lr: float, Q: float, redundancy: float = 1.0
) -> np.ndarray:
    """Return what a round multiplies the shared part of the residual with, ``[...]``.

    ``1 - c (1 + (N - 1) rho)`` for N silos whose features have correlation rho = ``redundancy``
    across silos, ``X_j^T X_l = rho X_j^T X_j``, one client each, linear blocks and squared loss;
    c is ``tdcd_effective_step``. Identical silos in the limit of Q: ``1 - N`` (ours).
    """
    c = tdcd_effective_step(curvature=curvature, lr=lr, Q=Q)
    return 1 - c * (1 + (silos - 1) * redundancy)


def tdcd_linear_round(
    *, features: Any, targets: Any, theta: Any, lr: float, Q: float
) -> list[np.ndarray]:
    """Return the blocks after one round of TDCD on least squares, in closed form.

    ``theta_j - H_j^+ [I - (I - lr H_j)^Q] X_j^T r / B`` with ``H_j = X_j^T X_j / B`` and the
    residual r of the round's start; one client a silo, all B rows in the minibatch.

    Parameters
    ----------
    features, theta
        Per silo ``X_j [B, D_j]`` and ``theta_j [D_j]``.
    targets
        ``[B]``.
    lr, Q
        eta and local steps; ``math.inf`` gives the block-Jacobi step.
    """
    X, theta = [_array(x) for x in features], [_array(block) for block in theta]
    r = sum(x @ block for x, block in zip(X, theta, strict=True)) - _array(targets)
    moved = []
    for x, block in zip(X, theta, strict=True):
        values, vectors = np.linalg.eigh(x.T @ x / len(r))
        values = np.where(values > 1e-13 * max(values.max(), 1e-300), values, 0.0)
        c = tdcd_effective_step(curvature=values, lr=lr, Q=Q)
        share = np.divide(c, values, out=np.zeros_like(c), where=values > 0)
        moved.append(block - vectors @ (share * (vectors.T @ (x.T @ r / len(r)))))
    return moved
