"""Theorems 1 to 6 of the vertical chapter: as printed, solved anew from the paper, and our own.

A function named ``..._printed`` has the paper's conditions or settings, mistakes included;
``..._mended`` keeps the paper's inequality and solves it correctly. Both take a collaborator's
sample for independent of the model that it meets, which it is not. Those without a suffix are
ours: they ask for bounded delays alone, and are proved in the book's chapter.

An epoch in the theory is one message: a dominated update and its ``q − 1`` collaborations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from fedlib.errors import FedlibError
from fedlib.papers.bound import Bound
from fedlib.papers.vertical.theory import (
    Constants,
    Delays,
    left,
    lemma_2,
    lemma_10,
    staleness,
    step_length,
    steps_of_a_loop,
)


class Setting(NamedTuple):
    """What a theorem tells one to choose: the rate, the largest τ allowed, and the epochs."""

    lr: float
    tau: float
    epochs: float


# --------------------------------------------------------------------------------------------------
# Theorem 1: SGD, strongly convex


def theorem_1_floor(c: Constants, d: Delays, lr: float) -> Bound:
    """Return ``2C/(γμ)``, below which the proof of Theorem 1 lets no error fall (Equation 34).

    Terms ``delay`` (γ³ in C) and ``step`` (γ² in C).
    """
    by = 2 / (lr * c.mu) * lemma_2(c, d, lr)
    cubic = 5.5 * c.L_star**2 * lr**3 * d.tau**1.5
    return Bound({"delay": by * cubic, "step": by * 0.5 * c.L_star * lr**2 * math.sqrt(d.tau)})


def theorem_1_printed(c: Constants, eps: float) -> Setting:
    """Return the largest rate and τ of Theorem 1, and its number of epochs, which knows no rate."""
    size = c.G * c.L_star**2
    lr = eps * (c.mu / (96 * size)) ** (1 / 3)
    tau = min(eps ** (-4 / 3), (size / c.mu) ** (2 / 3) / eps**2)
    return Setting(lr, tau, 44 * size ** (1 / 3) / (c.mu ** (4 / 3) * eps) * _decades(c, eps))


def theorem_1_mended(c: Constants, eps: float, tau: float) -> Setting:
    """Return a rate at which the floor of :func:`theorem_1_floor` is at most ε/2, for any τ."""
    root = math.sqrt(tau)
    lr = min(
        1 / (2 * c.L_star * root),
        eps * c.mu / (16 * c.G * c.L_star * root),
        math.sqrt(eps * c.mu / (176 * c.G * tau**1.5)) / c.L_star,
    )
    return Setting(lr, tau, 2 / (lr * c.mu) * _decades(c, eps))


def theorem_1(c: Constants, d: Delays, lr: float, epochs: float) -> Bound:
    """Return a bound on ``E f(w_t) − f*`` after so many windows in which every block moves (ours).

    Terms ``start``, ``step`` and ``delay``.
    """
    _at_most(lr * c.mu, 1, "lr mu")
    B2, reach = step_length(c, d, lr) ** 2, max(d.sent, d.window)
    late = (staleness(c, d) ** 2 + (c.L * reach) ** 2) / 2
    return Bound(
        {
            "start": (1 - lr * c.mu / 2) ** epochs * c.gap,
            "step": 2 * d.window * B2 * lr * c.L * (0.5 + d.sent) / c.mu,
            "delay": 2 * d.window * B2 * lr**2 * late / c.mu,
        }
    )


def _decades(c: Constants, eps: float) -> float:
    """Return ``log(2Δ/ε)``, or 0 if the start is good enough."""
    return max(0.0, math.log(2 * c.gap / eps))


# --------------------------------------------------------------------------------------------------
# Theorem 2: SVRG, strongly convex


def theorem_2_parts(c: Constants, d: Delays, lr: float, printed: bool = True) -> dict[str, float]:
    """Return C, ρ and the four left sides of Theorem 2.

    Parameters
    ----------
    printed
        With the C of the main text, which lacks a factor τ; else with that of the appendix.

    Returns
    -------
    dict
        ``C``, ``rho``, ``positive`` (above 0), ``outer`` (at most 0.05), ``floor`` (at most ε/8).
    """
    inside = 1.0 if printed else d.tau
    C = (c.L_star**2 * lr * inside + c.L_star) * lr**2 / 2
    rho = lr * c.mu / 2 - 16 * c.L_star**2 * d.window * C / c.mu
    positive = 1 - 2 * (c.L_star * lr) ** 2 * d.tau
    parts = {"C": C, "rho": rho, "positive": positive, "outer": math.inf, "floor": math.inf}
    if rho > 0 and positive > 0:
        parts["outer"] = 8 * c.L_star**2 * math.sqrt(d.tau) * C / (rho * c.mu)
        size = (c.L_star * lr) ** 2 * d.tau**1.5 * (28 * C + 5 * lr)
        parts["floor"] = size * 2 * 18 * c.G / (positive * rho)
    return parts


def theorem_2_printed(c: Constants, d: Delays, eps: float, printed: bool = True) -> Setting:
    """Return the largest rate that Theorem 2 allows, and the epochs of all its outer loops."""

    def fits(lr: float) -> bool:
        parts = theorem_2_parts(c, d, lr, printed)
        return parts["outer"] <= 0.05 and parts["floor"] <= eps / 8

    lr = _largest(fits)
    inner = math.log(0.25) / math.log1p(-theorem_2_parts(c, d, lr, printed)["rho"])
    return Setting(lr, d.tau, inner * _decades(c, eps) / math.log(4 / 3))


def theorem_2(c: Constants, d: Delays, lr: float, N: float) -> float:
    """Return what an outer loop of N messages of SVRG leaves of ``E f(w^s) − f*`` (ours).

    It is below one: a linear rate, under bounded delay. ``f`` needs to grow as fast as
    ``‖∇f‖² ≥ 2μ(f − f*)``, and no bound on gradients is asked for.
    """
    a = steps_of_a_loop(c, d, lr, N)
    near = (1 + lr * c.L * N * math.sqrt(a)) ** 2
    return 1 - 2 * c.mu * lr * N * svrg_share(c, d, lr, N) / near


# --------------------------------------------------------------------------------------------------
# Theorem 3: SAGA, strongly convex


def theorem_3_parts(
    c: Constants, d: Delays, lr: float, rho: float, form: str = "printed"
) -> dict[str, float]:
    """Return ``c_0, c_1, c_2`` and what the conditions of Theorem 3 ask for.

    Parameters
    ----------
    rho
        ρ, between ``1 − 1/n`` and 1.
    form
        ``"printed"``; ``"restored"``, with the ``c_0`` that the proof's own lines give; or
        ``"lyapunov"``, the same with ``e(w_t)`` bounded by the Lyapunov function itself (ours).

    Returns
    -------
    dict
        ``third``: the left side that is to be at most ε/2. ``fourth`` and ``fifth``: left sides
        that are to be at most 0. ``gap``: what the logarithm needs above 0, ``ρ − 1 + γμ/4``.
    """
    L2, tau = c.L_star**2, d.tau
    kappa = L2 * lr**3 * tau + c.L_star * lr**2
    c_0 = 2 * lr**3 * tau**1.5 + 180 * kappa * lr**2 * tau**1.5 + 8 * lr**2 * tau
    if form != "printed":
        c_0 = 5 * lr**3 * tau**1.5 + 188 * kappa * lr**2 * tau**1.5
    c_0 *= 18 * c.G * L2 / left("Theorem 3", 72, c, d, lr)
    c_1, c_2 = 2 * L2 * tau * kappa, 4 * kappa * L2 * tau / c.n
    room = lr * c.mu**2 / 4 - 2 * c_1 - c_2
    memory = 1 / (1 - (1 - 1 / c.n) / rho)
    by = 1 if form == "lyapunov" else room
    return {
        "c_0": c_0,
        "c_1": c_1,
        "c_2": c_2,
        "third": 4 * c_0 / (lr * c.mu * (1 - rho) * by) if by > 0 else math.inf,
        "fourth": -lr * c.mu**2 / 4 + 2 * c_1 + c_2 * (1 + memory),
        "fifth": -lr * c.mu**2 / 4 + c_2 + c_1 * (2 + memory),
        "gap": rho - 1 + lr * c.mu / 4,
    }


# --------------------------------------------------------------------------------------------------
# Theorem 4: SGD without convexity


def theorem_4_bound(c: Constants, d: Delays, lr: float, epochs: float) -> Bound:
    """Return the right side of Equation 116, from which Theorem 4 is drawn.

    Terms ``start``, ``step`` and ``delay``.
    """
    by = lemma_10(c, d, lr) * c.q * c.G
    return Bound(
        {
            "start": 4 * c.gap / (epochs * lr),
            "step": 2 * c.L_star * lr * by,
            "delay": 22 * (c.L_star * lr) ** 2 * d.tau * by,
        }
    )


def theorem_4_printed(c: Constants, eps: float, place: str = "main") -> Setting:
    """Return the setting of Theorem 4: of the ``"main"`` text, or of the ``"appendix"``."""
    size = c.L_star * c.G
    if place == "main":
        qG = c.q * c.G
        return Setting(eps / (size * c.q), 512 * qG / eps**2, c.gap * size * c.q / eps**2)
    if place != "appendix":
        raise FedlibError(f"place is 'main' or 'appendix'; got {place!r}.")
    tau = 512 * c.q * c.G / (3 * eps**2)
    return Setting(eps / (32 * size), tau, 256 * size * c.q * c.gap / eps**2)


def theorem_4_mended(c: Constants, eps: float) -> Setting:
    """Return a setting that brings :func:`theorem_4_bound` below ε, for every τ up to its own."""
    qG = c.q * c.G
    tau = min(5.8 * qG / eps, 341 * (qG / eps) ** 2)
    return Setting(eps / (64 * c.L_star * qG), tau, 512 * c.L_star * qG * c.gap / eps**2)


def theorem_4(c: Constants, d: Delays, lr: float, epochs: float) -> Bound:
    """Return a bound on the mean of ``E‖∇f(w_d)‖²`` over all dominated updates (ours).

    Terms ``start``, ``step`` and ``delay``.
    """
    by = c.q * step_length(c, d, lr) ** 2
    return Bound(
        {
            "start": 2 * c.gap / (lr * epochs),
            "step": by * lr * c.L * (1 + 2 * d.sent),
            "delay": by * (lr * staleness(c, d)) ** 2,
        }
    )


# --------------------------------------------------------------------------------------------------
# Theorem 5: SVRG without convexity


def theorem_5_start(L_star: float, m_0: float, n_alpha: float, steps: float) -> float:
    """Return the ``c_0`` of the proof of Theorem 5 after so many steps of its recursion (152).

    ``c_t = c_{t+1}(1 + γβ) + γL_*²/2`` with ``γ = m_0/(L_* n^α)`` and ``β = 2L_*``; the proof needs
    ``c_0 ≤ β/2 = L_*``. An outer loop of N messages has ``qN`` steps.
    """
    theta = 2 * m_0 / n_alpha
    return L_star / 4 * ((1 + theta) ** steps - 1)


def svrg_share(c: Constants, d: Delays, lr: float, N: float) -> float:
    """Return how much of ``γ Σ E‖∇f(w_d)‖²`` an outer loop of N messages takes from f (ours).

    With the rate, the loop and the delays of Theorem 5 it is above 1/2 if ``n^α ≥ √10``, and above
    1/8 if ``n^α ≥ 1.4``; for smaller ``n^α`` it does not prove the theorem.
    """
    a = steps_of_a_loop(c, d, lr, N)
    share = 1 - lr * staleness(c, d) * math.sqrt(a) - lr * c.L * (d.sent + 0.5) * a
    if share <= 0:
        raise FedlibError(f"The bound needs a smaller rate than {lr:.4g}, or shorter loops.")
    return share


# --------------------------------------------------------------------------------------------------
# Theorem 6: SAGA without convexity


def theorem_6_sigma(L_star: float, m_0: float, tau: float) -> float:
    """Return the proof's ``σ`` of Theorem 6 (Equation 190); it is at most ``m_0/4``."""
    return m_0 * (0.5 - 20 * m_0**2 * tau - 10 * m_0) / (2 + 8 * (L_star * m_0) ** 2 * tau)


def theorem_6_printed(c: Constants, m_0: float, n_alpha: float, tau: float) -> float:
    """Return the smallest right side that Theorem 6 allows: at its largest number of epochs."""
    epochs = math.floor(n_alpha / (4 * m_0))
    return c.L_star * n_alpha * c.gap / (epochs * theorem_6_sigma(c.L_star, m_0, tau))


# --------------------------------------------------------------------------------------------------


def _at_most(value: float, most: float, name: str) -> None:
    if not 0 < value <= most:
        raise FedlibError(f"The bound needs {name} above 0 and at most {most}; it is {value:.4g}.")


def _largest(fits: Callable[[float], bool]) -> float:
    """Return the largest rate that fits, to ten digits, if all small ones do."""
    low, high = -250.0, 1.0  # decimal logarithms
    if not fits(10**low):
        raise FedlibError("No rate fulfils the conditions.")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(10**middle) else (low, middle)
    return 10**low
