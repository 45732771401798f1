"""Where the methods end, and how fast they may go, on clients that are quadratic bowls.

Client i has ``F_i(x) = a_i/2 (x - z_i)²``: its curvature a_i, its minimiser z_i. The optimum of
``Σ p_i F_i`` is ``Σ p_i a_i z_i / Σ p_i a_i``. Everything here is exact, and the derivations are in
the chapter of the book.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlib.engine.checks import check_between, check_positive, check_whole_number
from fedlib.errors import FedlibError
from fedlib.papers.bound import as_array, check_constants


def pull(curvature: Any, lr: float, steps: Any, mu: float = 0.0) -> np.ndarray:
    """Return by which share of its way to z_i a client moves in a round, κ_i.

    ``steps`` exact steps of size ``lr`` on ``F_i(y) + μ/2 (y - x)²`` from x end at
    ``x + κ_i (z_i - x)``, ``κ_i = a_i / (a_i + μ) (1 - (1 - lr (a_i + μ))^steps)``.

    Parameters
    ----------
    curvature
        a_i, ``[N]``.
    lr
        Local step size.
    steps
        Local steps, a number or ``[N]``.
    mu
        FedProx's μ.
    """
    check_positive("lr", lr)
    check_between("mu", mu, 0)
    a = as_array(curvature)
    return a / (a + mu) * (1 - (1 - lr * (a + mu)) ** np.asarray(steps))


def resting_point(minimisers: Any, weights: Any) -> Any:
    """Return ``Σ w_i z_i / Σ w_i``, where ``Σ w_i (z_i - x)`` is zero.

    The weights ``p_i κ_i`` give the end of FedAvg, FedProx and MIFA, and the only place where a
    server optimizer can rest; ``p_i κ_i / τ_i`` the end of FedNova; and ``p_i a_i`` the optimum,
    where SCAFFOLD rests.

    Parameters
    ----------
    minimisers
        z_i, ``[N]``.
    weights
        w_i, ``[N]``, with a sum other than zero.
    """
    z, w = as_array(minimisers), as_array(weights)
    if z.shape != w.shape or z.ndim != 1 or not w.sum():
        raise FedlibError(
            "One minimiser and one weight a client are needed, [N] each, and weights that do not "
            f"add up to zero; got {z} and {w}."
        )
    return (w * z).sum() / w.sum()


def memory_limit(N: int) -> float:
    """Return below which κ :class:`MIFA <fedlib.papers.methods.mifa.MIFA>` is stable in a circle.

    One client a round, in turn, all of one κ: ``2 N sin²(π / 2N)``. It is 2 for everybody there,
    and falls as ``π² / 2N``.
    """
    check_whole_number("N", N)
    return float(2 * N * np.sin(np.pi / (2 * N)) ** 2)


def momentum_limit(beta: float) -> float:
    """Return below which ``η κ`` server momentum is stable: ``2 (1 + β)``, κ being the mean."""
    check_between("beta", beta, 0, 1)
    return 2 * (1 + beta)


def largest_step(beta1: float, beta2: float, rounds: int) -> float:
    """Return how many server rates a coordinate may move in a round of FedAdam, at most.

    By Cauchy and Schwarz ``|m| <= (1 - β₁) sqrt(Σ_s (β₁²/β₂)^s / (1 - β₂)) sqrt(v)``, the sum going
    over the rounds so far. It is reached by movements that grow as ``(β₂/β₁)^t``, up to what the
    adaptivity takes away.
    """
    check_between("beta1", beta1, 0, 1)
    check_between("beta2", beta2, 0, 1)
    check_constants(True, beta2=beta2)
    check_whole_number("rounds", rounds)
    shares = (beta1**2 / beta2) ** np.arange(rounds)
    return float((1 - beta1) * np.sqrt(shares.sum() / (1 - beta2)))


def variance_left(keep: float, alpha: float, interval: int) -> float:
    """Return the variance of look-ahead's slow weights in units of that of its inner optimizer.

    The inner optimizer keeps ``keep = 1 - κ`` of its distance in a round and adds independent
    noise. Zhang et al., Proposition 2: ``α² (1 - r^{2k}) / (1 - (1 - α (1 - r^k))²)``.
    """
    check_between("keep", keep, 0, 1)
    check_between("alpha", alpha, 0, 1)
    check_constants(True, alpha=alpha)
    check_whole_number("interval", interval)
    r = keep**interval
    return float(alpha**2 * (1 - r**2) / (1 - (1 - alpha * (1 - r)) ** 2))
