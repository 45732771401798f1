"""The bounds of the personalization chapter: as printed, corrected, and our own with constants.

Paper names: η = ``lr`` of a visit, γ = ``lr`` of the global model, δ² = ``delta2``, ζ̄_i(w*) =
``zeta_bar``, ζ = ``zeta`` (a square already), λ = ``lam``; an epoch moves a personal model like one
step of size ``h = η N K``, and ``x = h L``.

The paper's theorems hide constants and logarithms in Õ. Functions named ``..._printed`` return
their terms with every hidden factor taken as 1, and so do those named ``..._corrected``: compare
terms of one name, not a term with a measurement. All other functions return bounds that hold as
they are.

Source: Y. Deng, M. M. Kamani, P. Mahdavinia and M. Mahdavi, *Distributed Personalized Empirical
Risk Minimization*, arXiv 2310.17761. What is marked as ours is proved in the book's chapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib.errors import FedlibError
from fedlib.papers.bound import Bound, as_array


@dataclass(frozen=True)
class Constants:
    """What the theorems know of a problem.

    Attributes
    ----------
    N, K
        Clients, and local steps of a visit.
    mu, L
        Strong convexity and smoothness of every client's loss.
    G
        Bound on the norm of every client's gradient in the domain.
    delta2
        Bound on the variance of a stochastic gradient.
    D
        Diameter of the domain.
    zeta_bar
        ``ζ̄_i(w*)``, the mean of client i's discrepancies at the global optimum.
    zeta
        The largest squared distance of a client's gradient to the mean gradient.
    lam, n_min, n_max
        λ of equation (2), and the smallest and largest number of samples.
    """

    N: int
    K: int
    mu: float
    L: float
    G: float = 1.0
    delta2: float = 0.0
    D: float = 1.0
    zeta_bar: float = 0.0
    zeta: float = 0.0
    lam: float = 1.0
    n_min: float = 1.0
    n_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.mu <= self.L:
            raise FedlibError(f"0 < mu <= L; got mu = {self.mu:.4g} and L = {self.L:.4g}.")
        if not (self.N >= 1 and self.K >= 1):
            raise FedlibError(f"N and K are at least 1; got {self.N} and {self.K}.")
        if not (self.lam > 0 and 0 < self.n_min <= self.n_max):
            raise FedlibError(
                f"lam > 0 and 0 < n_min <= n_max; got {self.lam}, {self.n_min} and {self.n_max}."
            )

    @property
    def kappa(self) -> float:
        """``κ = L/μ``, the condition number of a client's loss."""
        return self.L / self.mu

    @property
    def kappa_phi(self) -> float:
        """``κ_Φ = √N G/μ``, how far the optimum moves with the weights at most (Lemma 1)."""
        return math.sqrt(self.N) * self.G / self.mu

    @property
    def kappa_g(self) -> float:
        """``κ_g = n_max/(2λ)``, how far the weights move with the discrepancies at most."""
        return self.n_max / (2 * self.lam)

    @property
    def contraction(self) -> float:
        """``1 − n_min/n_max``, what a projected gradient step leaves of the weights' error.

        The step is ``1/L_g`` with ``L_g = 2λ/n_min``, and ``μ_g = 2λ/n_max``: λ cancels. The paper
        has ``1 − 1/κ_g`` here.
        """
        return 1 - self.n_min / self.n_max


# --------------------------------------------------------------------------------------------------
# What several bounds are made of


def squared(**roots: float) -> Bound:
    """Return ``(Σ roots)²``, and of it as a term ``root · Σ roots``: alone each is its square."""
    return Bound({name: root * sum(roots.values()) for name, root in roots.items()})


def contracted(
    q: float, R: int, start2: float, noise2: float, **off: float | np.ndarray
) -> Bound:
    """Return what is left after R times ``e ← √(q² e² + noise2) + off`` (ours).

    ``(√(q^2R start2 + noise2 (1 − q^2R)/(1 − q²)) + Σ_r q^(R−1−r) off_r)²``.

    Parameters
    ----------
    start2
        ``e²`` at the start.
    noise2
        Variance that comes in each time.
    off
        By what is missed each time, by name; a number, or ``[R]``.

    Returns
    -------
    Bound
        Terms ``start``, ``noise``, and one for each of ``off``, with its share of mixed terms.
    """
    memory = q ** np.arange(R - 1, -1, -1.0)
    start, noise = q ** (2 * R) * start2, noise2 * (1 - q ** (2 * R)) / (1 - q**2)
    moved = {name: float((memory * much).sum()) for name, much in off.items()}
    beside = 2 * math.sqrt(start + noise) + sum(moved.values())
    return Bound(
        {"start": start, "noise": noise} | {name: m * beside for name, m in moved.items()}
    )


# --------------------------------------------------------------------------------------------------
# Step sizes


def log_factor(c: Constants, R: float) -> float:
    """Return ``Λ = log(√(NK) R)``, the logarithm in the rate of Theorem 2."""
    return math.log(math.sqrt(c.N * c.K) * R)


def local_rate(c: Constants, R: float) -> float:
    """Return ``γ = log(RK)/(μRK)`` of Theorem 1, with the constant 1."""
    return math.log(R * c.K) / (c.mu * R * c.K)


def visit_rate(c: Constants, R: float) -> float:
    """Return ``η = 4Λ/(μNKR)``, as the proof of Theorem 2 takes it."""
    return 4 * log_factor(c, R) / (c.mu * c.N * c.K * R)


def visit_rate_single(c: Constants, R: float) -> float:
    """Return ``η = 4 log(NKR³)/(μNKR)``, as the proof of Theorem 3 takes it in the end."""
    return 4 * global_rate(c, R) / (c.N * c.K)


def global_rate(c: Constants, R: float) -> float:
    """Return ``γ = log(NKR³)/(μR)`` of Theorem 3, with the constant 1."""
    return math.log(c.N * c.K * R**3) / (c.mu * R)


# --------------------------------------------------------------------------------------------------
# Lemmas 2 and 3: what errors of the weights do to the model, and errors of w to the weights


def lemma_2(c: Constants, away2: float, off2: float) -> Bound:
    """Return the bound on ``Φ(α*, v̂) − Φ(α*, v*)`` after the closing step (Lemma 2).

    Parameters
    ----------
    away2
        ``‖ṽ − v*(α̂)‖²``, before the closing step.
    off2
        ``‖α̂ − α*‖²``.

    Returns
    -------
    Bound
        Terms ``model`` and ``weights``.
    """
    share = 2 * c.kappa_phi**2 * c.L + 4 * c.N * c.G**2 / c.L
    return Bound({"model": 2 * c.L * away2, "weights": share * off2})


def lemma_2_sharper(c: Constants, away2: float, off2: float) -> Bound:
    """Return ``½(L−μ)(√away2 + κ_Φ √off2)² + NG²/(2L) off2``, a bound on the same (ours).

    Terms ``model`` and ``target``, the two parts of the square, and ``weights``.
    """
    apart = squared(model=math.sqrt(away2), target=c.kappa_phi * math.sqrt(off2))
    terms = {name: (c.L - c.mu) / 2 * value for name, value in apart.terms.items()}
    return Bound(terms | {"weights": c.N * c.G**2 / (2 * c.L) * off2})


def lemma_3(c: Constants, away: float) -> Bound:
    """Return the bound on ``‖α*(w) − α*(w*)‖²`` at the distance ``away`` of w from w* (Lemma 3).

    ``κ_g² 4L² Σ_j (2ζ_ij(w*) + 4L² away²) away²``, the form of Section 3.1. Terms ``dissimilarity``
    and ``fourth``, which is of fourth order in ``away``.
    """
    each = 4 * c.N * (c.kappa_g * c.L * away) ** 2
    return Bound({"dissimilarity": 2 * each * c.zeta_bar, "fourth": 4 * each * (c.L * away) ** 2})


def lemma_3_sharper(c: Constants, away: float) -> Bound:
    """Return ``(κ_g (L−μ) away √N (2√ζ̄_i + ½ (L−μ) away))²``, a bound on the same (ours).

    Terms ``dissimilarity`` and ``fourth``, as :func:`squared` has them.
    """
    return _moved_weights(c, away**2, away**4)


def _moved_weights(c: Constants, away2: float, away4: float, **others: float) -> Bound:
    each = c.kappa_g * math.sqrt(c.N) * (c.L - c.mu)
    return squared(
        **others,
        dissimilarity=2 * each * math.sqrt(c.zeta_bar * away2),
        fourth=each * (c.L - c.mu) / 2 * math.sqrt(away4),
    )


# --------------------------------------------------------------------------------------------------
# Local SGD: Lemmas 4 to 6


def lemma_5(c: Constants, lr: float) -> Bound:
    """Return ``3Kγ²δ² + 6K²γ²ζ``, the bound on ``(1/N) Σ_i E‖w_i − w̄‖²`` in a round (Lemma 5)."""
    return Bound(
        {"noise": 3 * c.K * lr**2 * c.delta2, "dissimilarity": 6 * (c.K * lr) ** 2 * c.zeta}
    )


def lemma_5_sharper(c: Constants, lr: float, t: int) -> Bound:
    """Return ``γ² (δ √((1 − 1/N) t) + √ζ t)²``, a bound on the same after t steps (ours).

    Terms ``noise`` and ``dissimilarity``, as :func:`squared` has them.
    """
    return squared(
        noise=lr * math.sqrt((1 - 1 / c.N) * c.delta2 * t),
        dissimilarity=lr * math.sqrt(c.zeta) * t,
    )


def lemma_6(c: Constants, R: int, lr: float, start2: float) -> Bound:
    """Return the bound on ``E‖w^R − w*‖²`` of local SGD (Lemma 6), for ``γ ≤ 1/(2L)``.

    It needs ``∇F(w*) = 0``, which is not said. Terms ``start``, ``drift`` and ``noise``.
    """
    _small(lr, 0.5 / c.L, "1/(2L)")
    return Bound(
        {
            "start": (1 - c.mu * lr) ** (R * c.K) * start2,
            "drift": (c.L + 2 * lr * c.L**2) / c.mu * lemma_5(c, lr).total,
            "noise": lr * c.delta2 / (c.mu * c.N),
        }
    )


def local_error_printed(c: Constants, R: float) -> Bound:
    """Return the terms of Lemma 6 at the rate of Theorem 1, with every hidden factor 1.

    Terms ``start``, ``noise`` (through the drift), ``dissimilarity`` and ``average``.
    """
    return Bound(
        {
            "start": c.D**2 / (R * c.K),
            "noise": c.kappa * c.delta2 / (c.mu**2 * R**2 * c.K),
            "dissimilarity": c.kappa * c.zeta / (c.mu * R) ** 2,
            "average": c.delta2 / (c.mu**2 * c.N * R * c.K),
        }
    )


def local_error(c: Constants, R: int, lr: float, start2: float) -> Bound:
    """Return a bound on ``E‖w^R − w*‖²`` of local SGD wherever w* lies, for ``γ < 1/L`` (ours).

    Every round is compared with one that starts in w* without noise. Only the gradients at w* have
    to be bounded by G.

    Returns
    -------
    Bound
        Terms ``start``; ``noise``, that of N clients; ``bend``, what noise does through curvature
        (for quadratics it may be left out); and ``drift``. See :func:`contracted`.
    """
    _small(lr, (1 - 1e-12) / c.L, "1/L")
    return contracted(
        (1 - c.mu * lr) ** c.K,
        R,
        start2,
        c.K * lr**2 * c.delta2 / c.N,
        bend=2 / 3 * lr**2 * c.L * math.sqrt(c.delta2 * c.K**3),
        drift=0.5 * lr**2 * c.L * c.K * (c.K - 1) * c.G,
    )


# --------------------------------------------------------------------------------------------------
# Theorem 1: the weights of Algorithm 3


def theorem_1_printed(c: Constants, R: float, steps: float) -> Bound:
    """Return the terms of Theorem 1 as printed, with its own ``κ_g = 1/(λ n_min)``.

    ``steps`` is T_α. Terms ``steps``, ``start``, ``dissimilarity`` and ``average``; ζ² there is
    read as ζ.
    """
    kappa_g, known = 1 / (c.lam * c.n_min), local_error_printed(c, R)
    share = kappa_g**2 * c.zeta_bar * c.L**2
    kept = ("start", "dissimilarity", "average")
    return Bound({"steps": math.exp(-steps / kappa_g)} | {k: share * known[k] for k in kept})


def theorem_1(c: Constants, steps: int, away2: float, away4: float | None = None) -> Bound:
    """Return a bound on ``E‖α̂_i − α_i*‖²`` after ``T_α = steps`` steps at w^R (corrected).

    ``(√2 (1 − n_min/n_max)^T_α + κ_g (L−μ) √N (2 √(ζ̄_i away2) + ½ (L−μ) √away4))²``.

    Parameters
    ----------
    away2, away4
        ``E‖w^R − w*‖²`` and ``E‖w^R − w*‖⁴`` or anything above them; by default ``D² away2``.

    Returns
    -------
    Bound
        Terms ``steps``, ``dissimilarity`` (with the N that is missing in the paper) and ``fourth``
        (missing in the paper), as :func:`squared` has them.
    """
    away4 = c.D**2 * away2 if away4 is None else away4
    return _moved_weights(c, away2, away4, steps=math.sqrt(2) * c.contraction**steps)


# --------------------------------------------------------------------------------------------------
# An epoch of shuffling: the paper's tools


def lemma_9(G: float, i: int, n: int, p: float) -> float:
    """Return what the mean of i of n vectors, drawn in random order, is off by (Lemma 9).

    With probability at least ``1 − p``, from the mean of all n, none longer than G.
    """
    _check_chance(p)
    return G * math.sqrt(8 * (1 - (i - 1) / n) * math.log(2 / p) / i)


def lemma_10(c: Constants, n: int, p: float, slope: float, weight: float = 1.0) -> float:
    """Return the bound on ``‖Σ_(j≤n) α(σ(j)) ∇f_σ(j)‖`` with the logarithm of Lemma 9.

    ``slope`` is ``‖∇Φ‖`` and ``weight`` the largest weight, 1 in the paper.
    """
    _check_chance(p)
    return c.G * weight * math.sqrt(8 * n * math.log(2 / p)) + n / c.N * slope


def lemma_10_printed(c: Constants, n: int, p: float, slope: float) -> float:
    """Return the bound of Lemma 10 as printed, with ``log(1/p)``."""
    _check_chance(p)
    return c.G * math.sqrt(8 * n * math.log(1 / p)) + n / c.N * slope


def lemma_12(c: Constants, h: float, p: float, slope: float, power: int = 2) -> Bound:
    """Return the bound of Lemma 12 on the squared cross terms of an epoch; ``slope = ‖∇Φ‖``.

    ``18 e⁶ h⁴ L² (‖∇Φ‖² + 8G²N log(1/p))``; the paper prints ``L⁴``, which is ``power=4``.
    """
    _check_chance(p)
    each = 18 * math.e**6 * h**4 * c.L**power
    return Bound({"slope": each * slope**2, "order": each * 8 * c.G**2 * c.N * math.log(1 / p)})


# --------------------------------------------------------------------------------------------------
# An epoch of shuffling by contraction (ours), and Theorem 2


def epoch_error(c: Constants, alpha: Any, lr: float) -> float:
    """Return ``½ h² L G (1 − ‖α‖²/K)``: how far an epoch is from one gradient step (ours).

    For any order of the clients, without noise: the distance of an epoch from ``v − h∇Φ(α, v)``.
    G bounds the clients' gradients at its start, and every visit's rate is below ``1/L``.
    """
    alpha = _visits(c, alpha, lr)
    h = lr * c.N * c.K
    return 0.5 * h**2 * c.L * c.G * (1 - float(alpha @ alpha) / c.K)


def theorem_2_model(c: Constants, alpha: Any, R: int, lr: float, start2: float) -> Bound:
    """Return a bound on ``E‖v^R − v*(α)‖²`` of Algorithm 1 (ours).

    It holds for every order of the clients, for a minimiser anywhere in the domain, and without a
    chance of failing; G need only bound the clients' gradients at v*.

    Parameters
    ----------
    alpha
        The weights, ``[N]``.
    R
        Epochs.
    lr
        η, with ``η max_j α(j) N < 1/L``.
    start2
        ``‖v^0 − v*‖²``.

    Returns
    -------
    Bound
        Terms ``start``, ``noise`` (at the prescribed rate, for R much larger than 4Λ, about
        ``2Λ δ²‖α‖²/(μ²RK)``) and ``order`` (alone about ``4 κ² Λ² G²/(μ²R²)``). See
        :func:`contracted`.
    """
    alpha = _visits(c, alpha, lr)
    q = float(np.prod((1 - lr * c.N * c.mu * alpha) ** c.K))
    noise = (lr * c.N) ** 2 * c.K * c.delta2 * float(alpha @ alpha)
    return contracted(q, R, start2, noise, order=epoch_error(c, alpha, lr))


def theorem_2(c: Constants, model2: float, weights2: float) -> Bound:
    """Return the bound on ``E[Φ(α*, v̂) − Φ(α*, v*)]`` of the two stages together (ours).

    :func:`lemma_2_sharper` of ``E‖v^R − v*(α̂)‖²`` and ``E‖α̂ − α*‖²``, as
    :func:`theorem_2_model` and :func:`theorem_1` bound them.
    """
    return lemma_2_sharper(c, model2, weights2)


def theorem_2_printed(c: Constants, R: float, steps: float, p: float) -> Bound:
    """Return the terms of Theorem 2 as printed, every hidden factor 1.

    Terms ``start``, ``noise``, ``order`` of the model; ``steps``, ``dissimilarity``, ``average`` of
    the weights, with ``κ_g = n_max/(2λ)`` as it is defined there; ``D²/(RK)``, which stands in the
    proof only, is ``weights start``.
    """
    _check_chance(p)
    share, known = c.kappa_phi**2 * c.L, local_error_printed(c, R)
    slack = share * c.kappa_g**2 * c.zeta_bar * c.L**2
    order = (c.L**4 + c.N) / (c.mu**4 * R**2) * c.L * c.G**2 * c.N * math.log(1 / p)
    return Bound(
        {
            "start": c.L * c.D**2 / (c.N * c.K * R**2),
            "noise": c.L * c.delta2 / (c.mu**2 * R),
            "order": order,
            "steps": share * math.exp(-steps / c.kappa_g),
            "weights start": slack * known["start"],
            "dissimilarity": slack * known["dissimilarity"],
            "average": slack * known["average"],
        }
    )


def theorem_2_corrected(c: Constants, alpha: Any, R: float, steps: float) -> Bound:
    """Return the terms of the repaired Theorem 2 under the same names, every hidden factor 1.

    One more: ``fourth``, which bounds ``E‖w^R − w*‖⁴`` by ``D²`` times the error of w.
    """
    alpha, known = as_array(alpha), local_error_printed(c, R)
    share = c.kappa_phi**2 * c.L
    slack = share * c.N * (c.kappa_g * c.L) ** 2
    return Bound(
        {
            "start": c.L * c.D**2 / (c.N * c.K * R**2),
            "noise": c.L * c.delta2 * float(alpha @ alpha) / (c.mu**2 * R * c.K),
            "order": c.kappa**2 * c.L * c.G**2 / (c.mu * R) ** 2,
            "steps": share * c.contraction ** (2 * steps),
            "weights start": slack * c.zeta_bar * known["start"],
            "dissimilarity": slack * c.zeta_bar * known["dissimilarity"],
            "average": slack * c.zeta_bar * (known["average"] + known["noise"]),
            "fourth": slack * (c.L * c.D) ** 2 * known.total,
        }
    )


# --------------------------------------------------------------------------------------------------
# Theorem 3: the single loop


def theorem_3_printed(c: Constants, R: float, M: float, steps: float, p: float) -> Bound:
    """Return the terms of Theorem 3 as printed, every hidden factor 1; M is the global minibatch.

    Terms ``start``, ``order``, ``noise`` of the model; ``moves``, ``steps``, ``minibatch`` of the
    weights.
    """
    _check_chance(p)
    share = c.kappa_phi**2 * c.L
    slack = share * (c.kappa * c.kappa_g) ** 2 * c.zeta_bar
    rest = c.kappa**4 * c.L + c.N * c.L / c.mu**2
    return Bound(
        {
            "start": c.L * c.D**2 / (c.N * c.K * R**3),
            "order": rest / R**2 * c.G**2 * c.N * math.log(1 / p),
            "noise": c.L * c.delta2 / (c.mu * R),
            "moves": slack * c.L**2 * c.D * c.G / R,
            "steps": share * R**2 * math.exp(-steps / c.kappa_g),
            "minibatch": slack * c.L * c.delta2 / (c.mu**2 * M),
        }
    )


def theorem_3_corrected(c: Constants, R: float, M: float, steps: float) -> Bound:
    """Return the terms of Theorem 3 with their units repaired, every hidden factor 1.

    A repair of units and no proved bound; :func:`theorem_3_model` is one, without a floor.
    ``ζ̄_i + L²D²`` stands for ``ζ̄_i``, which covers the term of fourth order that the proof drops.
    """
    share = c.kappa_phi**2 * c.L
    slack = share * c.N * (c.zeta_bar + (c.L * c.D) ** 2) * (c.kappa * c.kappa_g) ** 2
    return Bound(
        {
            "start": c.L * c.D**2 / (c.N * c.K * R**3),
            "order": c.kappa**2 * c.L * c.G**2 / (c.mu * R) ** 2,
            "noise": c.L * c.delta2 / (c.mu**2 * R),
            "moves": slack * c.L * c.D * c.G / R,
            "steps": share * R**2 * c.contraction ** (2 * steps),
            "minibatch": slack * c.delta2 / M,
        }
    )


def global_error(c: Constants, r: int, lr: float, M: float, start2: float) -> Bound:
    """Return a bound on ``E‖w^r − w*‖²`` of the single loop's global model (ours).

    At the rate γ = ``lr`` up to 1/L, with M samples of each client in a step. Terms ``start`` and
    ``noise``.
    """
    _small(lr, 1 / c.L, "1/L")
    return contracted(1 - c.mu * lr, r, start2, lr**2 * c.delta2 / (c.N * M))


def theorem_3_model(c: Constants, R: int, lr: float, start2: float, off2: Any) -> Bound:
    """Return a bound on ``E‖v^R − v*(α*)‖²`` of Algorithm 2, while its weights are moving (ours).

    Parameters
    ----------
    R
        Epochs.
    lr
        η, with ``η α^r(j) N < 1/L`` in every epoch.
    start2
        ``‖v^0 − v*‖²``.
    off2
        ``E‖α^r − α*‖²`` of every epoch, ``[R]``, or anything above it: of :func:`theorem_1` with
        :func:`global_error`.

    Returns
    -------
    Bound
        Terms ``start``, ``noise``, ``order`` and ``weights``. See :func:`contracted`.
    """
    h = lr * c.N * c.K
    return contracted(
        math.exp(-c.mu * h),
        R,
        start2,
        h**2 * c.delta2 / c.K,
        order=0.5 * h**2 * c.L * c.G * (1 - 1 / (c.N * c.K)),
        weights=h * math.sqrt(c.N) * c.G * np.sqrt(as_array(off2)),
    )


# --------------------------------------------------------------------------------------------------


def _check_chance(p: float) -> None:
    if not 0 < p < 1:
        raise FedlibError(f"p is the chance of failing, above 0 and below 1; got {p}.")


def _small(value: float, most: float, name: str) -> None:
    if not 0 < value <= most:
        raise FedlibError(f"The bound needs a step above 0 and up to {name} = {most:.4g}; "
                          f"got {value:.4g}. Take a smaller rate.")  # fmt: skip


def _visits(c: Constants, alpha: Any, lr: float) -> np.ndarray:
    """Return the weights, having refused those that are none and visits that are too fast."""
    alpha = as_array(alpha)
    if alpha.shape != (c.N,) or (alpha < 0).any() or abs(alpha.sum() - 1) > 1e-9:
        raise FedlibError(
            f"alpha holds one weight for each of {c.N} clients, with the sum one; got "
            f"{alpha.tolist()}."
        )
    _small(lr * c.N * float(alpha.max()), (1 - 1e-12) / c.L, "1/L")
    return alpha
