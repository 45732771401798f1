"""Constants and lemmas of the vertical chapter: as printed, and our own that hold as they are.

Time is counted in block updates ``t = 0, 1, 2, ...``. Each belongs to a message ``(ϑ, i)``, which a
dominator formed at the update ``d(t) ≤ t``. Paper names: γ = ``lr``, τ₁ and τ₂ = ``read`` and
``sent``, η₁ or η₂ = ``window``, λ∇g is ``L_g``-smooth, ``L_*`` = ``L_star``, ``G`` bounds the
*squared* norm of a block of a sample's gradient.

Source: Q. Zhang, B. Gu, C. Deng and H. Huang, *Secure Bilevel Asynchronous Vertical Federated
Learning with Backward Updating*, arXiv 2103.00958. What is marked as ours is proved in the book's
chapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib.errors import FedlibError, unknown
from fedlib.papers.bound import as_array

CURVATURE = {"logistic": 0.25, "squared": 2.0, "robust": 1.0}  # largest |∂ϑ/∂z|
BENDING = {"l2": 1.0, "nonconvex": 1.0, "none": 0.0}  # largest |g''| of a coordinate


@dataclass(frozen=True)
class Constants:
    """What the theorems know of a problem.

    Attributes
    ----------
    L, L_g
        Smoothness of every sample's ``f_i``, and of ``λg``.
    G
        Bound on the squared norm of a block of a sample's gradient; our theorems on SVRG do without
        it.
    mu
        Strong convexity of every ``f_i``, or 0.
    gap
        ``f(w_0) − f*``.
    q, n
        Parties, and samples.
    """

    L: float
    L_g: float = 0.0
    G: float = 1.0
    mu: float = 0.0
    gap: float = 1.0
    q: int = 2
    n: int = 1000

    def __post_init__(self) -> None:
        if not (self.L > 0 and self.L_g >= 0 and self.G > 0 and self.gap >= 0):
            raise FedlibError(f"L, G > 0 and L_g, gap >= 0; got {self}.")
        if not 0 <= self.mu <= self.L:
            raise FedlibError(f"0 <= mu <= L; got mu = {self.mu:.4g} and L = {self.L:.4g}.")
        if not (self.q >= 2 and self.n >= 1):
            raise FedlibError(f"q >= 2 and n >= 1; got {self.q} and {self.n}.")

    @property
    def L_star(self) -> float:
        """``L_* = max(L, L_1, ..., L_q, L_g)``; no block is less smooth than the whole."""
        return max(self.L, self.L_g)


@dataclass(frozen=True)
class Delays:
    """Bounds on delays, counted in block updates.

    Attributes
    ----------
    read
        τ₁: a dominator's read misses updates among the last ``read`` at most.
    sent
        τ₂: what a message has not seen lies among the last ``sent`` updates before the block that
        it changes; it covers the dominator's read delay too.
    window
        η₁, a run of updates in which every block changes, or η₂, in which a message is done.
    """

    read: float
    sent: float
    window: float

    def __post_init__(self) -> None:
        if min(self.read, self.sent) < 0 or self.window < 1:
            raise FedlibError(f"delays are at least 0 and the window at least 1; got {self}.")

    @property
    def tau(self) -> float:
        """``τ = max(τ₁², τ₂², η²)``, the paper's one number for all delays, a square."""
        return max(self.read, self.sent, self.window) ** 2

    @classmethod
    def of(cls, tau: float) -> Delays:
        """Return the largest delays with this τ."""
        return cls(math.sqrt(tau), math.sqrt(tau), math.sqrt(tau))


def smoothness(x: Any, lam: float, loss: str, regulariser: str = "l2") -> tuple[float, float]:
    """Return ``(L, L_g)`` of a linear model from its rows ``[n, d]``.

    ``L = a max_i ‖x_i‖² + L_g`` with the loss's largest curvature ``a`` in the score, and
    ``L_g = λ`` times the regulariser's largest curvature in a coordinate.
    """
    for name, table in ((loss, CURVATURE), (regulariser, BENDING)):
        if name not in table:
            raise unknown("problem", name, table)
    L_g = lam * BENDING[regulariser]
    return CURVATURE[loss] * float((as_array(x) ** 2).sum(1).max()) + L_g, L_g


# --------------------------------------------------------------------------------------------------
# How long a step is: Lemma 2


def lemma_2(c: Constants, d: Delays, lr: float) -> float:
    """Return ``2G/(1 − 2L_*²γ²τ)``, the bound on ``E‖ṽ‖²`` of SGD (Lemma 2)."""
    return 2 * c.G / left("Lemma 2", 2, c, d, lr)


def step_length(c: Constants, d: Delays, lr: float) -> float:
    """Return ``√G/(1 − L_g γ τ₂)``, a bound on ``‖ṽ‖`` of SGD in every run (ours).

    Only the regulariser is read late by a collaborator relative to its message, so only ``L_g``
    enters.
    """
    rest = 1 - c.L_g * lr * d.sent
    return math.sqrt(c.G) / _positive(rest, "1 - L_g lr sent")


# --------------------------------------------------------------------------------------------------
# How far a late step is from a fresh one: Lemmas 3 and 10


def lemma_3(c: Constants, d: Delays, lr: float, missed: float, passed: float) -> float:
    """Return the bound on ``E‖v_t − ṽ_t‖²`` (Lemmas 3 and 11).

    Parameters
    ----------
    missed, passed
        ``Σ_{u∈D(t)} E‖ṽ_u‖²`` and ``Σ_{u∈D'(t)} E‖ṽ_u‖²``.
    """
    return 2 * (c.L_star * lr) ** 2 * (d.read * missed + 4 * d.sent * passed)


def staleness(c: Constants, d: Delays) -> float:
    """Return ``δ = Lτ₁ + L_gτ₂``: a late step is off by ``γδ`` times a step's length (ours)."""
    return c.L * d.read + c.L_g * d.sent


def lemma_10(c: Constants, d: Delays, lr: float) -> float:
    """Return ``4/(1 − 6L_*²γ²τ)``, the factor between ``Σ‖ṽ‖²`` and ``Σ‖v̂‖²`` (Lemma 10)."""
    return 4 / left("Lemma 10", 6, c, d, lr)


def steps_of_a_loop(c: Constants, d: Delays, lr: float, N: float) -> float:
    """Return ``1/((1 − γδ)² − (γLN)²)``, which bounds SVRG's ``Σ E‖ṽ‖²`` in a loop (ours).

    It stands before ``Σ E‖∇f(w_d)‖²``, both sums over an outer loop of N messages.
    """
    fresh = 1 - lr * staleness(c, d)
    return 1 / _positive(fresh * abs(fresh) - (lr * c.L * N) ** 2, "(1 - lr delta)² - (lr L N)²")


# --------------------------------------------------------------------------------------------------
# One block update


def one_step(c: Constants, d: Delays, lr: float) -> float:
    """Return what SGD's descent may lose in a block update (ours).

    ``E f(w_{t+1}) ≤ E f(w_t) − (γ/2) E‖∇_ψ f(w_{d(t)})‖² + loss``, where ``d(t)`` is the
    dominator's time.
    """
    B = step_length(c, d, lr)
    return (lr * B) ** 2 * (c.L * (0.5 + d.sent) + lr * staleness(c, d) ** 2 / 2)


# --------------------------------------------------------------------------------------------------
# SAGA's table: Lemma 7


def last_written(steps: int, n: int) -> np.ndarray:
    """Return the law of the local step that wrote a table entry last, ``[steps]``.

    After the steps ``1, ..., steps − 1``, each of which wrote one of n entries: the entry still is
    the first filling (place 0) with chance ``(1 − 1/n)^(steps−1)``, and was written last by step
    t with chance ``(1/n)(1 − 1/n)^(steps−1−t)``.
    """
    stays = (1 - 1 / n) ** np.arange(steps - 1, -1, -1)
    return np.where(np.arange(steps) > 0, stays / n, stays)


# --------------------------------------------------------------------------------------------------


def left(name: str, factor: float, c: Constants, d: Delays, lr: float) -> float:
    """Return ``1 − factor L_*² γ² τ`` if it is positive, as every lemma of the paper asks."""
    rest = 1 - factor * (c.L_star * lr) ** 2 * d.tau
    return _positive(rest, f"{name}: 1 - {factor:g} L_*² lr² tau")


def _positive(value: float, name: str) -> float:
    if not value > 0:
        raise FedlibError(f"The bound needs {name} > 0; it is {value:.4g}. Take a smaller rate.")
    return value
