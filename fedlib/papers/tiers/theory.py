"""Every bound of the tiers paper that the book states, as a function.

Paper names: eta = ``lr``, Q = local steps, R = ``rounds``; Δ (ours) = ``gap``.

Source: Das, Castiglia, Wang and Patterson, *Cross-Silo Federated Learning for Multi-Tier Networks
with Vertical and Horizontal Data Partitioning*, ACM TIST 2022.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import numpy as np

from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError
from fedlib.papers.bound import Bound, as_array, check_constants


def _step(lr: float, Q: int, constant: float, name: str, share: int) -> None:
    if not (Q >= 1 and lr > 0):
        raise FedlibError(f"Expected Q >= 1 local steps and lr > 0; came Q = {Q}, lr = {lr:.4g}.")
    limit = 1.0 / (share * Q * constant)
    if lr > limit * (1 + 1e-12):
        raise FedlibError(
            f"The bound needs lr <= 1/({share} Q {name}) = {limit:.4g} ({name} = {constant:.4g}, "
            f"Q = {Q}), but lr = {lr:.4g}. Take a smaller lr or fewer local steps."
        )


def lemma_2_bound(*, L_max: float, lr: float, Q: int, gradient2: float) -> float:
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
    _step(lr, Q, L_max, "L_max", 2)
    return 4 * Q**2 * (1 + Q) * (L_max * lr) ** 2 * gradient2


def drift_bound(*, L_max: float, lr: float, Q: int, gradient2: float) -> float:
    """Return ``gradient2 * sum_{m<Q} ((1 + lr L_max)^m - 1)^2``: the same sum, for every ``lr``.

    Ours: never above ``lemma_2_bound``, needs no condition, and is zero for one local step.
    Parameters as there.
    """
    growth = (1 + lr * L_max) ** np.arange(Q) - 1
    return float((growth**2).sum() * gradient2)


def _bound(L, L_max, gap, anchor, drift, lr, Q, rounds) -> Bound:
    check_constants(True, L=L, L_max=L_max, rounds=rounds)
    check_constants(noise=anchor, drift=drift)
    _step(lr, Q, max(L, L_max), "max(L, L_max)", 8)
    s = lr * Q
    return Bound(
        {
            "start": 4 * gap / (s * rounds),
            "noise": 4 * s * L * float(anchor),
            "drift": 16 * (s * L_max) ** 2 * float(drift),
            "mixed": 32 * s**3 * L * L_max**2 * float(drift),
        }
    )


def theorem_1(
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
    check_constants(sigma2=sigma2)
    noise = as_array(sigma2).sum()
    return _bound(L, L_max, gap, noise, noise, lr, Q, rounds)


def theorem_1_independent(
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

    The other parameters and the error are those of ``theorem_1``.

    Parameters
    ----------
    sigma2, clients
        ``[N]`` each, ``sigma_j^2`` and ``K_j`` of every silo; or numbers, for all silos together.
        With ``clients=1`` nothing is said of how the noises of a silo's clients go together.
    kappa2
        ``kappa_j^2 >= mean_k ||grad_j F_kj - grad_j L||^2``, ``[N]`` or the sum, for clients whose
        gradients are unbiased only on average; ``sigma2`` then holds the variances around the
        clients' own gradients. Zero for clients with the same distribution.
    """
    noise = as_array(sigma2)
    anchor, drift = (noise / as_array(clients)).sum(), noise.sum() + as_array(kappa2).sum()
    return _bound(L, L_max, gap, anchor, drift, lr, Q, rounds)


def drift_share(*, L_max: float, lr: float, Q: int) -> float:
    """Return ``((1 + a)^Q - 1) / (a Q) - 1`` with ``a = lr L_max`` (ours).

    At every client the mean gradient of a round's Q local steps differs from the first of them by
    at most this share of its norm, on every path and for every ``lr``. Zero for one local step,
    about ``lr Q L_max / 2`` for many small ones.
    """
    a = lr * L_max
    if a * Q < 1e-5:  # by its series: the closed form would lose its digits
        return (Q - 1) * a / 2 * (1 + (Q - 2) * a / 3)
    return math.expm1(Q * math.log1p(a)) / (a * Q) - 1


def theorem_1_sharper(
    *, L: float, L_max: float, gap: float, sigma2: Any, lr: float, Q: int, rounds: int
) -> Bound:
    """Return a bound on the same mean as ``theorem_1``, by a proof that gives less away (ours).

    ``(gap / (s R) + n S) / c`` with ``s = lr Q``, ``S`` the sum of ``sigma2``,
    ``c = 1 - 2 e - s L (1 + e)^2 / 2``, ``n = s L (1 + e)^2 / 2 + e / 4`` and e the
    ``drift_share``. Parameters as in ``theorem_1``; below it wherever that holds and
    ``L >= L_max``. For one local step of a quadratic in one coordinate it is an equality.

    Returns
    -------
    Bound
        Terms ``start`` and ``noise``.

    Raises
    ------
    FedlibError
        Where c is not positive: the step is too large to promise a descent.
    """
    s, share = lr * Q, drift_share(L_max=L_max, lr=lr, Q=Q)
    step = s * L * (1 + share) ** 2 / 2
    c = 1 - 2 * share - step
    if not (Q >= 1 and lr > 0 and c > 0):
        raise FedlibError(
            f"No descent is certain at lr = {lr:.4g}, Q = {Q}: c = {c:.3g} must be positive. "
            "Take a smaller lr or fewer local steps."
        )
    noise = (step + share / 4) * float(as_array(sigma2).sum())
    return Bound({"start": gap / (s * rounds * c), "noise": noise / c})


def rest_bound(*, L_max: float, lr: float, Q: int, kappa2: Any) -> float:
    """Return the bound on ``||grad L||^2`` where TDCD on all rows comes to rest (ours).

    ``e^2 / (1 - e^2)`` times the sum of ``kappa2``, the ``kappa_j^2`` of the silos' clients at
    that point, with e the ``drift_share``. Infinite where e is one or more.
    """
    share = drift_share(L_max=L_max, lr=lr, Q=Q)
    if share >= 1:
        return math.inf
    return share**2 / (1 - share**2) * float(as_array(kappa2).sum())


def empty_chance(*, samples: int, rows: int, batch_size: int) -> float:
    """Return the probability that a client with ``rows`` of the samples has none in a minibatch.

    ``C(M - m, B) / C(M, B)``: B of M rows are drawn without replacement. Times the number of
    clients it bounds the probability that some client of a silo comes away empty.
    """
    check_whole_number("samples", samples)
    for name, some in (("rows", rows), ("batch_size", batch_size)):
        if not isinstance(some, Integral) or not 0 <= some <= samples:
            raise FedlibError(f"{name} is a number of the {samples} samples; got {some!r}.")
    from scipy import stats  # a quarter of the time of a start, and seldom wanted

    return float(stats.hypergeom.pmf(0, samples, rows, batch_size))


def best_product(*, L: float, gap: float, sigma2: Any, rounds: float) -> tuple[float, float]:
    """Return ``(s*, value)``: the product ``lr * Q`` that minimises Theorem 1's leading terms.

    ``s* = sqrt(gap / (L R sigma2))`` and ``start + noise = 8 sqrt(gap L sigma2 / R)`` there (ours).
    The theorem allows ``s*`` from ``R = 64 max(L, L_max)^2 gap / (L sigma2)`` on.

    Raises
    ------
    FedlibError
        Without noise: the terms then fall with the product, and the step condition decides.
    """
    check_constants(True, L=L, gap=gap, rounds=rounds)
    noise = float(as_array(sigma2).sum())
    if not noise > 0:
        raise FedlibError(
            "Without noise the leading terms have no smallest value: they fall as lr * Q grows. "
            "Take the largest product that the step condition allows, 1/(8 max(L, L_max))."
        )
    return math.sqrt(gap / (L * rounds * noise)), 8 * math.sqrt(gap * L * noise / rounds)


def round_time(*, t_comm: float, t_comp: float, Q: float) -> float:
    """Return ``3 t_comm + Q t_comp``, the time of a round in the units of the paper's cost model.

    ``t_comm`` is one round trip: hub and clients twice, hubs once; ``t_comp`` is one local step.
    """
    check_constants(t_comm=t_comm, t_comp=t_comp, Q=Q)
    return 3 * t_comm + Q * t_comp


def volume(*, silos: int, clients: int, size: int, batch_size: int, width: int) -> dict[str, int]:
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
        to each other hub. The sample ids, ``K_j B`` whole numbers, are not counted.
    """
    table = batch_size * width
    return {
        "models": 2 * clients * size,
        "embeddings": 2 * table,
        "exchange": (silos - 1) * table,
    }


def effective_step(*, curvature: Any, lr: float, Q: float) -> np.ndarray:
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
    curvature = as_array(curvature)
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
    c is ``effective_step``. Identical silos in the limit of Q: ``1 - N`` (ours).
    """
    c = effective_step(curvature=curvature, lr=lr, Q=Q)
    return 1 - c * (1 + (silos - 1) * redundancy)


def linear_round(
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
    X, theta = [as_array(x) for x in features], [as_array(block) for block in theta]
    r = sum(x @ block for x, block in zip(X, theta, strict=True)) - as_array(targets)
    moved = []
    for x, block in zip(X, theta, strict=True):
        values, vectors = np.linalg.eigh(x.T @ x / len(r))
        values = np.where(values > 1e-13 * max(values.max(), 1e-300), values, 0.0)
        c = effective_step(curvature=values, lr=lr, Q=Q)
        share = np.divide(c, values, out=np.zeros_like(c), where=values > 0)
        moved.append(block - vectors @ (share * (vectors.T @ (x.T @ r / len(r)))))
    return moved
