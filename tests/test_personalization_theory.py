"""The theory of the personalization chapter: bounds, counterexamples, and the studies of rates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.evidence import claims, measures
from fedlib.lab.evidence.records import Record
from fedlib.lab.job import Job
from fedlib.lab.studies import personalization_theorems as theorems
from fedlib.papers.bound import Bound
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.personalization import PERM, Mixing, ShuffledSGD, theory, weights
from fedlib.papers.personalization.theory import Constants
from fedlib.population.participation import Full

KNOWN = Constants(4, 3, 0.5, 2, 3, 0.7, 1.5, 0.9, 1.1, 20, 5, 8)
ALPHA = np.array([0.4, 0.3, 0.2, 0.1])


def bowls(seed, N=5, d=3, mu=0.5, L=2.0):
    """Quadratics of general position: Hessians ``[N, d, d]`` within [mu, L], and centres."""
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.normal(size=(N, d, d)))[0]
    eigen = rng.uniform(mu, L, (N, d))
    return np.einsum("nij,nj,nkj->nik", Q, eigen, Q), rng.normal(size=(N, d)), rng


def best(H, c, alpha):
    return np.linalg.solve(np.tensordot(alpha, H, 1), np.einsum("n,nij,nj->i", alpha, H, c))


def slopes(H, c, v):
    return np.einsum("nij,nj->ni", H, v - c)


def onto(v, radius):
    return v * min(1.0, radius / np.linalg.norm(v))


# ---- constants and step sizes


def test_constants_by_hand():
    assert KNOWN.kappa == 4 and KNOWN.kappa_phi == 2 * 3 / 0.5 and KNOWN.kappa_g == 8 / 40
    assert KNOWN.contraction == 3 / 8
    for wrong, match in (
        (dict(mu=3.0), "mu <= L"),
        (dict(N=0), "N and K are at least 1; got 0 and 3"),
        (dict(lam=0.0), "lam > 0"),
        (dict(n_min=9), "n_min <= n_max; got 20, 9 and 8"),
    ):
        with pytest.raises(FedlibError, match=match):
            replace(KNOWN, **wrong)
    for p in (0.0, 1.0, 3, float("nan")):
        with pytest.raises(FedlibError, match="p is the chance of failing"):
            theory.lemma_9(1.0, 1, 2, p)


def test_prescribed_rates_by_hand():
    c = Constants(4, 9, 0.5, 2)
    assert theory.log_factor(c, 10) == pytest.approx(math.log(60))
    assert theory.visit_rate(c, 10) == pytest.approx(4 * math.log(60) / (0.5 * 36 * 10))
    assert theory.local_rate(c, 10) == pytest.approx(math.log(90) / (0.5 * 90))
    assert theory.global_rate(c, 10) == pytest.approx(math.log(36_000) / 5)
    assert theory.visit_rate_single(c, 10) == pytest.approx(4 * math.log(36_000) / (0.5 * 360))


# ---- Lemmas 1 to 3


def test_lemma_1_holds_and_is_reached():
    H, c, rng = bowls(0)
    for _ in range(200):
        a, b = rng.dirichlet(np.ones(5), 2)
        v, u = best(H, c, a), best(H, c, b)
        G = max(np.linalg.norm(slopes(H, c, x), axis=1).max() for x in (v, u))
        known = Constants(5, 1, 0.5, 2, G)
        assert np.linalg.norm(v - u) <= known.kappa_phi * np.linalg.norm(a - b)
    two = np.eye(1)[None].repeat(2, 0) * 0.5, np.array([[3.0], [-3.0]])  # both pull with 1.5
    shift = np.array([1e-4, -1e-4])
    moved = best(*two, 0.5 + shift) - best(*two, 0.5 - shift)
    assert moved[0] == pytest.approx(
        Constants(2, 1, 0.5, 1, 1.5).kappa_phi * np.linalg.norm(2 * shift), rel=1e-9
    )


def after_closing(H, c, alpha, v, L, radius):
    return onto(v - alpha @ slopes(H, c, v) / L, radius)


def excess(H, c, alpha, v, u):
    def phi(x):
        return 0.5 * alpha @ np.einsum("ni,nij,nj->n", x - c, H, x - c)

    return phi(v) - phi(u)


def boundary_best(H, c, alpha, radius, L=2.0):
    """Return the minimiser over a ball, by projected gradient descent."""
    v = np.zeros(c.shape[1])
    for _ in range(400):
        v = after_closing(H, c, alpha, v, L, radius)
    return v


@pytest.mark.parametrize("radius", [0.3, 50.0])
def test_lemma_2_holds_inside_and_on_the_boundary(radius):
    H, c, rng = bowls(1)
    for _ in range(60):
        a, b = rng.dirichlet(np.ones(5), 2)
        b = a + (b - a) * rng.choice([0.02, 1.0])
        u, own = boundary_best(H, c, a, radius), boundary_best(H, c, b, radius)
        v = onto(own + rng.normal(size=3) * rng.choice([0.01, 1.0]), radius)
        left = excess(H, c, a, after_closing(H, c, b, v, 2.0, radius), u)
        G = np.linalg.norm(H, 2, (1, 2)).max() * (np.linalg.norm(c, axis=1).max() + radius)
        known = Constants(5, 1, 0.5, 2.0, G)
        told = (((v - own) ** 2).sum(), ((a - b) ** 2).sum())
        right = theory.lemma_2_sharper(known, *told)
        assert left <= right.total + 1e-12
        assert right.total <= theory.lemma_2(known, *told).total


def test_lemma_2_by_hand():
    found = theory.lemma_2(KNOWN, 0.25, 0.01)
    assert found["model"] == 1.0 and found["weights"] == pytest.approx((576 + 72) * 0.01)
    found = theory.lemma_2_sharper(KNOWN, 0.25, 0.01)
    by_hand = {"model": 0.75 * 0.5 * 1.7, "target": 0.75 * 1.2 * 1.7, "weights": 0.09}
    assert found.terms == pytest.approx(by_hand)


def test_without_the_closing_step_lemma_2_fails():
    """At a minimiser on the boundary the loss falls steeply, not like a square."""
    H, c, alpha = np.eye(1)[None], np.array([[2.0]]), np.ones(1)
    u, v = np.array([1.0]), np.array([0.99])
    allowed = theory.lemma_2(Constants(1, 1, 1, 1, 3), 1e-4, 0.0).total
    assert excess(H, c, alpha, v, u) > 50 * allowed
    assert excess(H, c, alpha, after_closing(H, c, alpha, v, 1.0, 1.0), u) == 0


def random_weights_near(seed, mu=0.5, L=2.0):
    """Return both sides of Lemma 3 on random quadratics: the square, and what it depends on."""
    H, c, rng = bowls(seed, mu=mu, L=L)
    n, lam = rng.integers(3, 30, 5).astype(float), 10.0 ** rng.uniform(-1, 2)
    star = best(H, c, np.full(5, 0.2))
    w = star + rng.normal(size=3) * 10.0 ** rng.uniform(-3, 1)
    z = [((g[0] - g) ** 2).sum(1) for g in (slopes(H, c, star), slopes(H, c, w))]
    a, b = (weights.water_fill(torch.from_numpy(own), torch.from_numpy(n), lam) for own in z)
    known = Constants(5, 1, mu, L, zeta_bar=z[0].mean(), lam=lam, n_min=n.min(), n_max=n.max())
    return float(((a - b) ** 2).sum()), known, float(np.linalg.norm(w - star))


def test_19_lemma_3_on_random_quadratics():
    seen = []
    for seed in range(400):
        left, known, away = random_weights_near(seed)
        ours, printed = theory.lemma_3_sharper(known, away), theory.lemma_3(known, away)
        assert left <= ours.total * (1 + 1e-9) + 1e-25 and ours.total <= printed.total
        seen.append(left / ours.total)
    assert max(seen) > 0.005  # and neither side is nothing


def test_19_lemma_3_by_hand():
    """κ_g = 0.2, N = 4, ζ̄ = 0.9, at the distance 0.5: (κ_g L)² = 0.16, with L − μ it is 0.09."""
    found = theory.lemma_3(KNOWN, 0.5)
    assert found["dissimilarity"] == pytest.approx(4 * 0.16 * 4 * 2 * 0.9 * 0.25)
    assert found["fourth"] == pytest.approx(4 * 0.16 * 4 * 4 * 4 * 0.0625)
    roots = 0.3 * 2 * 0.5 * 2 * 0.9**0.5, 0.3 * 2 * 0.5 * 0.75 * 0.5
    found = theory.lemma_3_sharper(KNOWN, 0.5)
    assert found.total == pytest.approx(sum(roots) ** 2)
    assert found["fourth"] == pytest.approx(roots[1] * sum(roots))


def test_19_the_sharper_lemma_3_is_reached_by_two_clients():
    """``f_1 = ½μw²``, ``f_2 = ½Lw²`` have ζ = 0 at 0: only the term of fourth order is left."""
    n, lam, away, mu, L = torch.ones(2).double(), 5.0, 0.3, 0.5, 2.0
    z = torch.tensor([0.0, ((L - mu) * away) ** 2]).double()
    a = weights.water_fill(z, n, lam)
    left = float(((a - 0.5) ** 2).sum())
    right = theory.lemma_3_sharper(Constants(2, 1, mu, L, lam=lam), away)
    assert right["dissimilarity"] == 0
    assert left == pytest.approx(right.total)


# ---- local SGD


def walk(H, c, w, lr, K, rounds, noise=None, copies=1, radius=math.inf):
    """Algorithm 3 on bowls, many copies, client by client; ``noise()`` is ``[copies, d]``."""
    w = np.repeat(w[None], copies, 0)
    for _ in range(rounds):
        ends = []
        for i in range(len(c)):
            v = w
            for _ in range(K):
                g = (v - c[i]) @ H[i]
                v = v - lr * (g if noise is None else g + noise())
            ends.append(v)
        w = np.mean(ends, 0)
        w = w * np.minimum(1, radius / np.linalg.norm(w, axis=1, keepdims=True))
    return w, np.array(ends)


def test_lemma_4_is_one_step_of_everybody():
    """All local models equal, so no drift: the expectation over the noise is exact."""
    H, c, rng = bowls(2)
    star, w, lr, delta2 = best(H, c, np.full(5, 0.2)), rng.normal(size=3), 0.2, 0.4
    left = ((w - lr * slopes(H, c, w).mean(0) - star) ** 2).sum() + lr**2 * delta2 / 5
    gap = excess(H, c, np.full(5, 0.2), w, star)
    mu, L = 0.5, 2.0
    right = (1 - mu * lr) * ((w - star) ** 2).sum() - (2 * lr - 4 * lr**2 * L) * gap
    right += lr**2 * delta2 / 5
    assert left <= right and left > 0.3 * right


def test_lemmas_5_and_6_hold_and_their_constants_stand_there():
    H, c, rng = bowls(3)
    star, lr, K, s = best(H, c, np.full(5, 0.2)), 0.02, 4, 0.8
    zeta = max(((g - g.mean(0)) ** 2).sum(1).max() for g in
               (slopes(H, c, star + 3 * u) for u in rng.normal(size=(200, 3))))  # fmt: skip
    known = Constants(5, K, 0.5, 2.0, delta2=3 * s**2, zeta=zeta)
    noise = lambda: s * rng.choice([-1, 1], (4000, 3))  # noqa: E731
    w, ends = walk(H, c, star + 1, lr, K, 30, noise, 4000)
    drift = ((ends - ends.mean(0)) ** 2).sum(-1).mean()
    assert drift <= theory.lemma_5_sharper(known, lr, K).total <= theory.lemma_5(known, lr).total
    right = theory.lemma_6(known, 30, lr, 3.0)
    assert ((w - star) ** 2).sum(1).mean() <= right.total
    parts = theory.lemma_5(known, 0.1)
    assert parts["noise"] == pytest.approx(3 * 4 * 0.01 * 1.92)
    assert parts["dissimilarity"] == pytest.approx(6 * 16 * 0.01 * zeta)
    assert right["start"] == pytest.approx(3 * 0.99**120)
    assert right["noise"] == pytest.approx(0.02 * 1.92 / 2.5)
    assert right["drift"] == pytest.approx((2 + 0.16) / 0.5 * theory.lemma_5(known, lr).total)
    with pytest.raises(FedlibError, match="1/\\(2L\\)"):
        theory.lemma_6(known, 30, 0.3, 3.0)


def test_lemma_6_is_false_on_the_boundary():
    """K steps before a projection have another fixed point than one step (PERM-E17)."""
    H, c = np.diag([1.0, 10.0])[None], np.array([[2.0, 2.0]])
    known = Constants(1, 1000, 1.0, 10.0, G=30.0)
    lr, star = theory.local_rate(known, 50), boundary_best(H, c, np.ones(1), 1.0, 10.0)
    shrink = np.diag((1 - lr * np.array([1.0, 10.0])) ** 1000)  # 1000 steps at once
    w = np.zeros(2)
    for _ in range(50):
        w = onto(c[0] + shrink @ (w - c[0]), 1.0)
    error = ((w - star) ** 2).sum()
    assert error == pytest.approx(0.025, rel=0.05)
    assert theory.lemma_6(known, 50, lr, 1.0).total == pytest.approx(2e-5, rel=0.02)
    assert error <= theory.local_error(known, 50, lr, 1.0).total


@pytest.mark.parametrize("radius", [0.2, 50.0])
def test_the_bound_by_contraction_holds_wherever_the_optimum_lies(radius):
    H, c, rng = bowls(4)
    star = boundary_best(H, c, np.full(5, 0.2), radius)
    G = np.linalg.norm(slopes(H, c, star), axis=1).max()
    for lr, s in itertools.product((0.01, 0.1, 0.4), (0.0, 0.5)):
        known = Constants(5, 4, 0.5, 2.0, G, 3 * s**2)
        noise = (lambda: s * rng.choice([-1, 1], (500, 3))) if s else None  # noqa: B023
        w, _ = walk(H, c, np.zeros(3), lr, 4, 15, noise, 500, radius)
        right = theory.local_error(known, 15, lr, (star**2).sum()).total
        assert ((w - star) ** 2).sum(1).mean() <= right


def test_the_drift_in_the_bound_by_contraction_by_hand():
    """One round from the optimum: K steps of client i move its gradient's part by curvature."""
    lr, K = 0.1, 2
    H, c = np.array([[[2.0]], [[1.0]]]), np.array([[1.0], [-2.0]])  # gradients -2 and 2 at 0
    w, _ = walk(H, c, np.zeros(1), lr, K, 1)
    moved = abs(w[0, 0])  # (γ²/2)(H_1 g_1 + H_2 g_2): half of them cancel
    known = Constants(2, K, 1.0, 2.0, G=2.0)
    away = math.sqrt(theory.local_error(known, 1, lr, 0.0)["drift"])
    assert moved == pytest.approx(0.01) and away == pytest.approx(0.04)


# ---- Theorem 1


def errors_after(lam, n, steps):
    """Squared errors of projected gradient descent after so many steps from uniform weights."""
    n = torch.tensor(n).double()
    z = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    start, end = torch.full((4,), 0.25).double(), weights.water_fill(z, n, lam)
    assert end.min() > 0, "full support"
    found = [weights.descend(start, z, n, lam, T) for T in steps]
    return [float((alpha - end).square().sum()) for alpha in found]


def test_20_the_rate_of_the_weights_does_not_depend_on_lambda():
    """PERM-E3: n = (1, 1, 10, 20), so n_min/n_max = 0.05."""
    n, rates = [1.0, 1.0, 10.0, 20.0], []
    known = Constants(4, 1, 1, 1, lam=100.0, n_min=1.0, n_max=20.0)
    for lam in (100.0, 1e3, 1e4):
        first, later, late, last = errors_after(lam, n, (0, 20, 60, 80))
        assert 0.005 * first < later <= known.contraction**40 * first
        rates.append((last / late) ** (1 / 40))
        own = replace(known, lam=lam)
        printed = theory.theorem_1_printed(own, 1e9, 20)["steps"]
        assert printed <= math.exp(-20 / own.kappa_g) <= math.exp(-200 * 0.999)
        assert own.contraction == known.contraction
    assert_allclose(rates, rates[0], rtol=1e-9)
    assert 0.9 < rates[0] <= known.contraction
    first, later = errors_after(100.0, [7.0] * 4, (0, 1))
    assert later < 1e-25 * first  # equal sizes: one step is exact


@pytest.mark.parametrize("away", [1.0, 0.1, 1e-3])
def test_22_weights_differ_whenever_the_model_does(away):
    """PERM-E13: ``f_1 = ½w²``, ``f_2 = w²`` agree at w* = 0, so ζ̄ = 0 and the printed bound too."""
    known = Constants(2, 1, 1.0, 2.0, D=2.0, zeta=1.0, delta2=1.0, lam=3.0)
    gradients = torch.tensor([away, 2 * away]).double()
    z, n = (gradients[0] - gradients) ** 2, torch.ones(2).double()
    off = float((weights.water_fill(z, n, 3.0) - 0.5).square().sum())
    assert off == pytest.approx(2 * (away**2 / 12) ** 2) and off > 0
    assert theory.theorem_1_printed(known, 1.0, 1e9).total == 0
    assert off == pytest.approx(theory.theorem_1(known, 50, away**2, away**4).total)  # reached


def test_theorem_1_by_hand_and_on_random_quadratics():
    roots = 2**0.5 * (3 / 8) ** 2, 0.6 * 2 * (0.9 * 0.01) ** 0.5, 0.6 * 0.75 * 1.5 * 0.1
    found = theory.theorem_1(KNOWN, 2, 0.01)
    assert found.total == pytest.approx(sum(roots) ** 2)
    assert found["steps"] == pytest.approx(roots[0] * sum(roots))
    assert found["fourth"] == pytest.approx(roots[2] * sum(roots))
    for seed in range(100):
        left, known, away = random_weights_near(seed)
        assert left <= theory.theorem_1(known, 10**6, away**2, away**4).total * (1 + 1e-9) + 1e-25


def test_the_sum_over_clients_is_n_times_the_mean():
    """PERM-E13: N copies of every client leave ζ̄ as it is, and the bound of Lemma 3 grows."""
    few = Constants(2, 1, 1.0, 2.0, zeta_bar=0.5)
    many = replace(few, N=20)
    assert theory.lemma_3(many, 0.1).total == pytest.approx(10 * theory.lemma_3(few, 0.1).total)
    told = (theory.theorem_1_printed(c, 1e6, 1e6)["start"] for c in (few, many))
    assert len(set(told)) == 1


# ---- the tools of Theorem 2


def test_proposition_2_and_its_number_of_factors():
    """The paper counts one factor fewer: its bound on a single one is zero."""

    def printed(n, step):
        return sum((math.e * n * step / m) ** m for m in range(1, n + 1))

    rng = np.random.default_rng(5)
    for factors, a in itertools.product((1, 2, 5), (0.01, 0.3)):
        product = np.eye(3)
        for _ in range(factors):
            Q = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            product = product @ (np.eye(3) - a * Q @ np.diag(rng.uniform(0, 2, 3)) @ Q.T)
        left = np.linalg.norm(product - np.eye(3), 2)
        assert left <= factors * 2 * a < printed(factors, 2 * a)
    assert printed(0, 0.1) == 0 < 0.1  # as printed for a single factor, I - 0.1


def test_lemma_9_over_all_orders():
    g = np.array([3.0, -3.0, 3.0, -3.0, 1.0, -1.0])
    for i, p in itertools.product((1, 2, 4, 6), (0.5, 0.9, 0.99)):
        means = np.array([np.mean(order[:i]) for order in itertools.permutations(g)])
        assert (abs(means) > theory.lemma_9(3.0, i, 6, p)).mean() <= p
    assert theory.lemma_9(3.0, 2, 6, 0.5) == pytest.approx(
        3 * math.sqrt(8 * 5 / 6 * math.log(4) / 2)
    )


def test_lemma_10_needs_the_logarithm_of_lemma_9():
    """PERM-E18: two clients with gradients ±1: half a gradient is left after one, always."""
    c, p = Constants(2, 1, 1, 1), 0.98
    assert 0.5 > theory.lemma_10_printed(c, 1, p, 0.0)  # and 1 - p is not zero
    assert 0.5 <= theory.lemma_10(c, 1, p, 0.0, weight=0.5)
    assert theory.lemma_10(c, 1, p, 0.0) == pytest.approx(math.sqrt(8 * math.log(2 / 0.98)))


def test_no_rate_fits_both_proofs():
    """PERM-E8: η ≤ 1/(4NKRL) in Lemma 11, η = 4Λ/(μNKR) where it is used: 16 κ Λ ≤ 1."""
    for N, K, R in itertools.product((1, 2, 10), (1, 5), (1, 2, 100)):
        c = Constants(N, K, 1.0, 1.0)
        fits = theory.visit_rate(c, R) <= 1 / (4 * N * K * R * c.L)
        assert fits == (N == K == R == 1)
    c, R = Constants(2, 60, 1.0, 1.0), 1000.0  # far above 64 κ Λ
    a = theory.visit_rate(c, R) * c.N * c.L  # all weight on one client
    assert R > 64 * theory.log_factor(c, R)
    assert 1 - (1 - a) ** 59 > math.e / (4 * R - math.e)  # (12), with τ = 0


def cross_terms(H, c, sigma, alpha, v, lr, K):
    """Return the left side of Lemma 12 for bowls: constant Hessians make Q exact."""
    N, eye = len(c), np.eye(c.shape[1])
    Q = []
    for j in sigma:
        step = np.eye(len(eye)) - lr * alpha[j] * N * H[j]
        Q.append(sum(np.linalg.matrix_power(step, k) for k in range(K)) * lr * alpha[j] * N)
    prefix, total = np.zeros(len(v)), np.zeros(len(v))
    for n in range(N - 1):
        prefix = prefix + Q[n] @ H[sigma[n]] @ (v - c[sigma[n]])
        after = eye
        for m in range(N - 1, n + 1, -1):
            after = after @ (eye - Q[m] @ H[sigma[m]])
        total = total + after @ Q[n + 1] @ H[sigma[n + 1]] @ prefix
    return total


def test_lemma_7_and_the_cross_terms_are_the_epoch():
    """g = Σ Q ∇f − cross terms; an epoch is v − g."""
    H, c, rng = bowls(6)
    alpha, v, lr, K = rng.dirichlet(np.ones(5)), rng.normal(size=3), 0.05, 3
    sigma, u = rng.permutation(5), v
    plain = np.zeros(3)
    for j in sigma:
        step = np.eye(3) - lr * alpha[j] * 5 * H[j]
        Q = sum(np.linalg.matrix_power(step, k) for k in range(K)) * lr * alpha[j] * 5
        plain = plain + Q @ H[j] @ (v - c[j])
        for _ in range(K):
            u = u - lr * alpha[j] * 5 * H[j] @ (u - c[j])
    assert_allclose(u, v - plain + cross_terms(H, c, sigma, alpha, v, lr, K), rtol=1e-12)


def test_21_lemma_12_has_the_square_of_l():
    """PERM-E14: f → cf with η → η/c leaves the left side as it is; L² h⁴ G² stays, L⁴ does not.

    The rate is one that the paper's proof allows: 4 N K L η <= 1.
    """
    H, c, rng = bowls(7)
    alpha, v, lr, K, p = np.full(5, 0.2), rng.normal(size=3), 0.005, 2, 0.01
    left, right, printed = [], [], []
    for scale in (1.0, 1e-2, 1e-6):
        own, rate = scale * H, lr / scale
        left.append((cross_terms(own, c, range(5), alpha, v, rate, K) ** 2).sum())
        g = slopes(own, c, v)
        known = Constants(5, K, 0.5 * scale, 2 * scale, np.linalg.norm(g, axis=1).max())
        told = (known, rate * 5 * K, p, np.linalg.norm(alpha @ g))
        right.append(theory.lemma_12(*told).total)
        printed.append(theory.lemma_12(*told, power=4).total)
    assert_allclose(left, left[0], rtol=1e-10)
    assert_allclose(right, right[0], rtol=1e-10)
    assert left[0] <= right[0] and left[2] > 100 * printed[2]
    known = Constants(5, 1, 1.0, 2.0, 3.0)
    found = theory.lemma_12(known, 0.1, math.exp(-1), 0.5)
    assert found["slope"] == pytest.approx(18 * math.e**6 * 1e-4 * 4 * 0.25)
    assert found["order"] == pytest.approx(18 * math.e**6 * 1e-4 * 4 * 8 * 9 * 5)


def test_the_printed_threshold_leaves_t_1_negative():
    """PERM-E14: with the sign and the factor 2L put right, at L = μ = 1."""
    c = Constants(10, 5, 1.0, 1.0)
    R = 1000.0
    for _ in range(100):  # R = 64 κ Λ(R), which is above the other two here
        R = max((40 + 1) * math.e, 64 * theory.log_factor(c, R))
    h, e = theory.visit_rate(c, R) * 50, (math.e / (4 * R - math.e)) ** 2
    outer, inner = 1 / (2 * h) + 2, (20 * h**2 * e, 36 * math.e**6 * h**4)
    assert h - 4 * h**2 - outer * (inner[0] - inner[1]) > 0  # as printed
    assert h - 4 * h**2 - outer * (inner[0] + inner[1]) * 2 < 0
    for _ in range(100):  # the cube of Appendix C.2's R is 64 κ² Λ(R) e⁶/(9 μ)
        R = (64 * theory.log_factor(c, R) * math.e**6 / 9) ** (1 / 3)
    h = theory.visit_rate(c, R) * 50
    assert R > 3 * math.e / 8 and h - 4 * h**2 < 0


def test_noise_has_a_bias_in_the_proof_of_theorem_2():
    """PERM-E16: one client, two steps, ``f = ½v² + log cosh v``, noise ±1, all of it enumerated."""
    v, a, found = 1.0, 0.3, []

    def slope(u):
        return u + math.tanh(u)

    for noises in itertools.product((-1.0, 1.0), repeat=2):
        first = v - a * (slope(v) + noises[0])
        H = (slope(first) - slope(v)) / (first - v)
        g, delta = a * (1 + (1 - a * H)) * slope(v), a * ((1 - a * H) * noises[0] + noises[1])
        assert first - a * (slope(first) + noises[1]) == pytest.approx(v - g - delta, rel=1e-12)
        found.append((v - g) * delta)
    assert abs(np.mean(found)) > 5e-4
    linear = [(v - a * (2 - a) * v) * a * ((1 - a) * x + y)
              for x, y in itertools.product((-1, 1), repeat=2)]  # fmt: skip
    assert abs(np.mean(linear)) < 1e-15  # f = ½v²


# ---- an epoch by contraction, and Theorem 2


def shuffled(H, c, alpha, sigma, v, lr, K, noise=None):
    for j in sigma:
        for _ in range(K):
            g = (v - c[j]) @ H[j]
            v = v - lr * alpha[j] * len(c) * (g if noise is None else g + noise())
    return v


def test_an_epoch_is_near_a_gradient_step_in_any_order():
    H, c, rng = bowls(8)
    for lr, K in itertools.product((0.01, 0.05, 0.09), (1, 2, 6)):
        alpha, v = rng.dirichlet(np.ones(5)), rng.normal(size=3)
        g = slopes(H, c, v)
        known = Constants(5, K, 0.5, 2.0, np.linalg.norm(g, axis=1).max())
        for sigma in itertools.permutations(range(5)):
            after = shuffled(H, c, alpha, sigma, v, lr, K)
            away = np.linalg.norm(after - (v - lr * 5 * K * alpha @ g))
            assert away <= theory.epoch_error(known, alpha, lr)


def test_the_error_of_an_epoch_is_reached():
    """Two opposite pulls from the middle, one step each: the second corrects too much."""
    H, c, lr = 2 * np.ones((2, 1, 1)), np.array([[3.0], [-3.0]]), 0.1
    after = shuffled(H, c, np.full(2, 0.5), (0, 1), np.zeros(1), lr, 1)
    known = Constants(2, 1, 2.0, 2.0, G=6.0)
    assert abs(after[0]) == pytest.approx(theory.epoch_error(known, [0.5, 0.5], lr), rel=1e-12)
    assert theory.epoch_error(Constants(1, 1, 2.0, 2.0), [1.0], 0.4) == 0  # a gradient step
    with pytest.raises(FedlibError, match="1/L"):
        theory.epoch_error(known, [0.5, 0.5], 0.6)
    with pytest.raises(FedlibError, match="sum one"):
        theory.epoch_error(known, [0.5, 0.6], 0.1)


@pytest.mark.parametrize("radius", [0.3, 50.0])
def test_the_bound_on_personal_models_holds_wherever_the_optimum_lies(radius):
    H, c, rng = bowls(9)
    for R, s in itertools.product((5, 40), (0.0, 0.6)):
        alpha = rng.dirichlet(np.ones(5))
        star = boundary_best(H, c, alpha, radius)
        G = np.linalg.norm(slopes(H, c, star), axis=1).max()
        known, v = Constants(5, 3, 0.5, 2.0, G, 3 * s**2), np.zeros((300, 3))
        lr = min(theory.visit_rate(known, R), 0.99 / (5 * alpha.max() * 2.0))
        noise = (lambda: s * rng.choice([-1, 1], (300, 3))) if s else None  # noqa: B023
        for _ in range(R):
            v = shuffled(H, c, alpha, rng.permutation(5), v, lr, 3, noise)
            v = v * np.minimum(1, radius / np.linalg.norm(v, axis=1, keepdims=True))
        right = theory.theorem_2_model(known, alpha, R, lr, (star**2).sum())
        assert ((v - star) ** 2).sum(1).mean() <= right.total


def test_the_parts_of_the_bound_at_the_prescribed_rate():
    c, R = replace(KNOWN, delta2=0.7), 10**6
    lr, log = theory.visit_rate(c, R), theory.log_factor(c, R)
    found, square = theory.theorem_2_model(c, ALPHA, R, lr, 1.0), float(ALPHA @ ALPHA)
    assert found["noise"] == pytest.approx(2 * log * 0.7 * square / (0.25 * R * 3), rel=1e-3)
    assert found["start"] == pytest.approx(math.exp(-8 * log), rel=2e-2)
    alone = theory.theorem_2_model(replace(c, delta2=0.0), ALPHA, R, lr, 0.0)
    share = (1 - square / 3) ** 2
    assert alone["order"] == pytest.approx(4 * 16 * log**2 * 9 / 0.25 / R**2 * share, rel=1e-3)


def test_the_bounds_by_contraction_are_their_recursion():
    """e ← √(q² e² + s²) + b, by hand, far from small steps; never above the bound, and near it."""
    bend, away = 2 / 3 * 0.01 * 2 * math.sqrt(0.25 * 64), 0.5 * 0.01 * 2 * 4 * 3 * 3
    told = {
        "local": (theory.local_error(Constants(2, 4, 0.5, 2.0, 3.0, 0.25), 3, 0.1, 2.0),
                  0.95**4, 3, 4 * 0.01 * 0.25 / 2, bend + away),
        "model": (theory.theorem_2_model(KNOWN, ALPHA, 5, 0.1, 2.0),
                  (0.92 * 0.94 * 0.96 * 0.98) ** 3, 5, 0.16 * 3 * 0.7 * 0.3,
                  0.5 * 1.44 * 2 * 3 * 0.9),
        "single": (theory.theorem_3_model(KNOWN, 5, 0.1, 2.0, [0.04] * 5),
                   math.exp(-0.6), 5, 1.44 * 0.7 / 3,
                   0.5 * 1.44 * 2 * 3 * 11 / 12 + 1.2 * 2 * 3 * 0.2),
        "global": (theory.global_error(KNOWN, 6, 0.2, 5, 2.0), 0.9, 6, 0.04 * 0.7 / 20, 0.0),
    }  # fmt: skip
    for name, (bound, q, R, noise2, off) in told.items():
        e, start, noise = math.sqrt(2.0), 2.0, 0.0
        for _ in range(R):
            e, start, noise = math.sqrt(q**2 * e**2 + noise2) + off, q**2 * start, q**2 * noise
            noise += noise2
        assert e**2 <= bound.total * (1 + 1e-12) and bound.total <= 1.1 * e**2, name
        assert bound["start"] == pytest.approx(start) and bound["noise"] == pytest.approx(noise)
        moved = off * (1 - q**R) / (1 - q)
        assert bound.total == pytest.approx((math.sqrt(start + noise) + moved) ** 2)


# ---- where each term is needed: measured, by the worst case that we know, and allowed


def moments(path, mean=0.0, variance=0.0, noise=0.0):
    """Return mean and variance after steps on ``½H(v − c)²``; the path has (rate, H, c)."""
    for rate, H, c in path:
        mean, variance = mean - rate * H * (mean - c), (1 - rate * H) ** 2 * variance
        variance += rate**2 * noise
    return np.array([mean, variance])


def error(path, optimum=0.0, **start):
    mean, variance = moments(path, **start)
    return (mean - optimum) ** 2 + variance


def tight_model(term):
    if term == "start":  # one client: nothing but contraction
        known = Constants(1, 2, 0.5, 0.5, 0.0)
        allowed = theory.theorem_2_model(known, [1.0], 3, 0.2, 4.0)
        return error([(0.2, 0.5, 0.0)] * 6, mean=2.0), allowed
    if term == "noise":  # clients that are all alike
        known, alpha = Constants(3, 2, 0.5, 0.5, 0.0, 0.7), np.array([0.5, 0.3, 0.2])
        epoch = [(0.03 * a, 0.5, 0.0) for a in alpha for _ in range(2)]
        return error(epoch * 100, noise=0.7), theory.theorem_2_model(known, alpha, 100, 0.01, 0.0)
    known = Constants(2, 1, 1.0, 1.0, 3.0)  # two opposite pulls, one order for ever
    epoch = [(0.01, 1.0, 3.0), (0.01, 1.0, -3.0)]
    return error(epoch * 500), theory.theorem_2_model(known, [0.5, 0.5], 500, 0.01, 0.0)


def tight_single(term):
    if term == "start":
        known = Constants(1, 1, 0.5, 0.5, 0.0)
        allowed = theory.theorem_3_model(known, 20, 0.02, 4.0, [0.0] * 20)
        return error([(0.02, 0.5, 0.0)] * 20, mean=2.0), allowed
    if term == "noise":  # all weight on one client
        known = Constants(2, 1, 0.5, 0.5, 0.0, 0.7)
        allowed = theory.theorem_3_model(known, 300, 0.01, 0.0, [0.0] * 300)
        return error([(0.02, 0.5, 0.0)] * 300, noise=0.7), allowed
    off = 0.05 * (term == "weights")  # two springs; a little weight on the wrong one
    known, lr = Constants(2, 1, 1.0, 1.0, 3.0), 1e-4 if off else 0.01
    epoch = [(2 * lr * (0.5 + off), 1.0, 3.0), (2 * lr * (0.5 - off), 1.0, -3.0)]
    if off:
        epoch = epoch[::-1]
    R = int(5 / lr / 2)
    return error(epoch * R), theory.theorem_3_model(known, R, lr, 0.0, [2 * off**2] * R)


def tight_global(term):
    known = Constants(4, 1, 0.5, 2.0, delta2=0.7)
    start, noise = (4.0, 0.0) if term == "start" else (0.0, 0.7 / 8)
    measured = error([(0.5, 0.5, 0.0)] * 9, mean=math.sqrt(start), noise=noise)
    return measured, theory.global_error(replace(known, delta2=8 * noise / 2), 9, 0.5, 1.0, start)


def tight_local(term):
    if term in ("start", "noise"):  # clients that are all alike
        start, noise = (4.0, 0.0) if term == "start" else (0.0, 0.7)
        known = Constants(6, 2, 0.5, 0.5, 0.0, noise)
        measured = error([(0.01, 0.5, 0.0)] * 400, mean=math.sqrt(start), noise=noise / 6)
        allowed = theory.local_error(known, 200, 0.01, start)
        return measured, Bound({k: v for k, v in allowed.terms.items() if k != "bend"})
    known, K, lr = Constants(2, 9, 1e-3, 1.0, 1.0), 9, 1e-3  # one round from the optimum
    ends = [moments([(lr, H, c)] * K)[0] for H, c in ((1.0, 1.0), (1e-3, -1e3))]
    return np.mean(ends) ** 2, theory.local_error(known, 1, lr, 0.0)


def springs(ratio, tilde):
    """Two springs of stiffness μ; a little weight on the wrong one; one closing step."""
    mu, L, G, eps = ratio, 1.0, 2.0, 1e-3
    own = 2 * eps * G / mu  # v*(α̂), where v*(α*) is 0
    v = tilde * own
    v = v - mu * (v - own) / L
    apart2 = (tilde - 1) ** 2 * own**2
    allowed = theory.lemma_2_sharper(Constants(2, 1, mu, L, G), apart2, 2 * eps**2)
    return 0.5 * mu * v**2, allowed


def tight_lemma_2(term):
    if term != "model":
        return springs(1.0, 0.0) if term == "weights" else springs(0.7, 1.0)
    r = 1e-3  # curvature of the loss over L; the optimum lies on the boundary
    e = (1 - r) ** 2 / (r * (2 - r))  # how far outside, for a model at the distance 1
    x = (1 - r) - r * e
    allowed = theory.lemma_2_sharper(Constants(1, 1, r, 1.0, 1.0), 1.0, 0.0)
    return r * (e * x + x**2 / 2), allowed


def tight_weights(term, rule):
    if term == "steps":  # from one corner of the simplex to another
        sizes, lam = torch.tensor([1.0, 20, 20]).double(), 3.0
        z = torch.tensor([9.0, 2 * lam / 20, 0.0]).double()
        start, end = torch.eye(3).double()[1:]
        assert torch.allclose(weights.water_fill(z, sizes, lam), end)
        found = weights.descend(start, z, sizes, lam, 7)
        known = Constants(3, 1, 1.0, 1.0, lam=lam, n_min=1.0, n_max=20.0)
        return float((found - end).square().sum()), theory.theorem_1(known, 7, 0.0, 0.0)
    N, mu, L, lam, away = 8, 0.5, 2.0, 1e6, 0.3
    if term == "fourth":  # half of the clients as client 0, half of another curvature
        b, H = np.zeros(N), np.repeat([mu, L], N // 2)
    else:  # all differ as much already, half of them come nearer
        N += 1
        b, H = np.r_[0, np.tile([100.0, -100.0], N // 2)], np.r_[mu, np.full(N - 1, L)]
    z = [torch.from_numpy((b + (H - mu) * x) ** 2) for x in (0.0, away)]
    found, goal = (weights.water_fill(one, torch.full((N,), 5.0).double(), lam) for one in z)
    known = Constants(N, 1, mu, L, zeta_bar=float(z[0].mean()), lam=lam, n_min=5.0, n_max=5.0)
    return float((found - goal).square().sum()), rule(known, away)


def tight_drift(term):
    gamma, t = 0.1, 5
    if term == "noise":  # no curvature to speak of
        known = Constants(4, t, 1e-9, 1e-9, delta2=0.7)
        return (1 - 1 / 4) * error([(gamma, 1e-9, 0.0)] * t, noise=0.7), known
    known = Constants(6, t, 1e-9, 1e-9, zeta=4.0)  # half of them pull against the others
    return error([(gamma, 1e-9, 2e9)] * t), known


def tight_lemma_6(term):
    if term == "start":
        known = Constants(3, 1, 0.5, 0.5)
        return error([(1e-3, 0.5, 0.0)], mean=2.0), theory.lemma_6(known, 1, 1e-3, 4.0)
    known = Constants(3, 1, 0.5, 0.5, delta2=0.7)
    allowed = theory.lemma_6(known, 50, 1.0, 0.0)
    return error([(1.0, 0.5, 0.0)] * 50, noise=0.7 / 3), Bound(
        {k: v for k, v in allowed.terms.items() if k != "drift"})  # fmt: skip


def tight_epoch(term):
    if term == "steps":  # one client, three of them
        a = 0.01
        known = Constants(1, 3, 1.0, 1.0, 2.0)
        moved = moments([(a, 1.0, 2.0)] * 3)[0]
        return abs(moved - 3 * a * 2.0), Bound({term: theory.epoch_error(known, [1.0], a)})
    moved = moments([(0.1, 1.0, 1.0), (0.1, 1.0, -1.0)])[0]
    known = Constants(2, 1, 1.0, 1.0, 1.0)
    return abs(moved), Bound({term: theory.epoch_error(known, [0.5, 0.5], 0.1)})


def after_one(known, away):
    return theory.theorem_1(known, 1, away**2, away**4)  # sizes are equal: a step is exact


TIGHT = {
    **{f"theorem_2_model: {k}": (tight_model, k) for k in ("start", "noise", "order")},
    **{f"theorem_3_model: {k}": (tight_single, k) for k in ("start", "noise", "order", "weights")},
    **{f"global_error: {k}": (tight_global, k) for k in ("start", "noise")},
    **{f"local_error: {k}": (tight_local, k) for k in ("start", "noise")},
    "lemma_2_sharper: weights": (tight_lemma_2, "weights"),
    "theorem_1: steps": (lambda k: tight_weights(k, None), "steps"),
    **{f"theorem_1: {k}": (lambda k: tight_weights(k, after_one), k)
       for k in ("dissimilarity", "fourth")},
    **{f"lemma_3_sharper: {k}": (lambda k: tight_weights(k, theory.lemma_3_sharper), k)
       for k in ("dissimilarity", "fourth")},
    **{f"lemma_5_sharper: {k}": (lambda k: (lambda m, c: (m, theory.lemma_5_sharper(c, 0.1, 5)))(
        *tight_drift(k)), k) for k in ("noise", "dissimilarity")},
    "lemma_6: start": (tight_lemma_6, "start"),
    **{f"epoch_error: {k}": (tight_epoch, k) for k in ("order", "steps")},
}  # fmt: skip
LOOSER = {  # the largest share that we know of; halving the term is noticed by those above a half
    "lemma_2_sharper: model": (tight_lemma_2, "model", 0.49),
    "lemma_2_sharper: target": (tight_lemma_2, "target", 0.7),
    "lemma_6: noise": (tight_lemma_6, "noise", 0.66),
    "local_error: drift": (tight_local, "drift", 0.24),
    "lemma_5: noise": (lambda k: (lambda m, c: (m, theory.lemma_5(c, 0.1)))(*tight_drift(k)),
                       "noise", 0.24),
    "lemma_5: dissimilarity": (lambda k: (lambda m, c: (m, theory.lemma_5(c, 0.1)))(
        *tight_drift(k)), "dissimilarity", 0.16),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_a_tenth_less_of_a_term_is_too_little(name):
    case, term = TIGHT[name]
    measured, allowed = case(term)
    assert measured <= allowed.total * (1 + 1e-9)
    assert measured > allowed.total - allowed[term] / 10


@pytest.mark.parametrize("name", LOOSER)
def test_of_a_looser_term_a_share_is_needed(name):
    case, term, share = LOOSER[name]
    measured, allowed = case(term)
    assert measured <= allowed.total * (1 + 1e-9)
    assert measured > allowed.total - (1 - share) * allowed[term]


def test_theorem_2_puts_the_stages_together():
    assert theory.theorem_2(KNOWN, 0.25, 0.01) == theory.lemma_2_sharper(KNOWN, 0.25, 0.01)


def test_a_single_loop_has_no_floor():
    """PERM-E23: exact weights, M = 1, noise in the global model alone, one order of the clients."""
    H, c, rng = bowls(12)
    n, lam, K, s, radius = np.array([10.0, 20, 20, 40, 60]), 4000.0, 4, 2.0, 3.0

    def mixed(w):
        g = np.einsum("nij,rnj->rni", H, w[:, None] - c)
        z = torch.from_numpy(((g[:, :1] - g) ** 2).sum(-1))
        return weights.water_fill(z, torch.from_numpy(n), lam).numpy(), z.numpy().mean(1)

    def run(R, copies, s):
        lr, gamma = (rate(Constants(5, K, 0.5, 2.0), R)
                     for rate in (theory.visit_rate_single, theory.global_rate))  # fmt: skip
        v, w, A = np.zeros((copies, 3)), np.zeros((copies, 3)), np.full((copies, 5), 0.2)
        for _ in range(R):
            for j in np.repeat(range(5), K):
                v = v - lr * 5 * A[:, j, None] * ((v - c[j]) @ H[j])
            w = w - gamma * (np.einsum("nij,rnj->ri", H, w[:, None] - c) / 5
                             + s / math.sqrt(5) * rng.standard_normal(w.shape))  # fmt: skip
            v, w = ([onto(x, radius) for x in both] for both in (v, w))
            v, w = np.array(v), np.array(w)
            A = mixed(w)[0]
        return v, lr, gamma

    star = best(H, c, np.full(5, 0.2))
    (alpha,), (zeta_bar,) = mixed(star[None])
    goal, seen, proved = best(H, c, alpha), [], []
    known = Constants(5, K, 0.5, 2.0, np.linalg.norm(slopes(H, c, goal), axis=1).max(),
                      3 * s**2, 2 * radius, zeta_bar, lam=lam, n_max=60.0)  # fmt: skip
    assert max(np.linalg.norm(x) for x in (star, goal)) < radius
    for R in (128, 512):
        v, lr, gamma = run(R, 20, s)
        assert gamma <= 0.5 and lr * 5 < 0.5
        w2 = [theory.global_error(known, r, gamma, 1, star @ star).total for r in range(R)]
        A2 = [theory.theorem_1(known, 10**6, x).total for x in w2]
        bound = theory.theorem_3_model(replace(known, delta2=0.0), R, lr, goal @ goal,
                                       [2, *A2[1:]])  # fmt: skip
        assert ((v - goal) ** 2).sum(1).mean() <= bound.total
        seen.append(((v - run(R, 1, 0.0)[0]) ** 2).sum(1).mean())
        proved.append(bound["weights"])
    assert seen[1] < 0.5 * seen[0] and proved[1] < 0.4 * proved[0]


def scaled(c, f=1.0, w=1.0):
    """The same problem with losses times f and models times w."""
    return replace(
        c, mu=c.mu * f / w**2, L=c.L * f / w**2, G=c.G * f / w, delta2=c.delta2 * (f / w) ** 2,
        D=c.D * w, zeta_bar=c.zeta_bar * (f / w) ** 2, zeta=c.zeta * (f / w) ** 2,
        lam=c.lam * (f / w) ** 2,
    )  # fmt: skip


PRINTED = {
    "2": lambda c: theory.theorem_2_printed(c, 50, 7, 0.1),
    "3": lambda c: theory.theorem_3_printed(c, 50, 4, 7, 0.1),
}
CORRECTED = {
    "2": lambda c: theory.theorem_2_corrected(c, ALPHA, 50, 7),
    "3": lambda c: theory.theorem_3_corrected(c, 50, 4, 7),
}
WRONG = {"2": {"order", "steps"}, "3": {"order", "noise", "moves", "steps", "minibatch"}}


@pytest.mark.parametrize("which", ["2", "3"])
def test_units_of_theorems_2_and_3(which):
    """PERM-E3, PERM-E14, PERM-E15: losses times 3, models times 1 or 2: all terms are times 3."""
    wrong = set()
    for w in (1.0, 2.0):
        before, after = (CORRECTED[which](c).terms for c in (KNOWN, scaled(KNOWN, 3.0, w)))
        assert_allclose([after[k] / before[k] for k in before], 3.0, rtol=1e-12)
        before, after = (PRINTED[which](c).terms for c in (KNOWN, scaled(KNOWN, 3.0, w)))
        wrong |= {k for k in before if after[k] / before[k] != pytest.approx(3.0, rel=1e-9)}
    assert wrong == WRONG[which]
    assert CORRECTED[which](KNOWN).terms.keys() >= PRINTED[which](KNOWN).terms.keys()


def test_theorems_2_and_3_by_hand():
    """N = 4, K = 3, μ = ½, L = 2, G = 3, δ² = 0.7, D = 1.5, κ_Φ = 12, κ_g = 0.2, ζ̄ = 0.9."""
    p, share = math.exp(-1), 144 * 2
    found = {
        "2": theory.theorem_2_printed(KNOWN, 50, 7, p),
        "3": theory.theorem_3_printed(KNOWN, 50, 4, 7, p),
    }
    assert found["2"].terms == pytest.approx({
        "start": 2 * 2.25 / (12 * 2500), "noise": 2 * 0.7 / (0.25 * 50),
        "order": (16 + 4) / (0.0625 * 2500) * 2 * 9 * 4, "steps": share * math.exp(-35),
        "weights start": share * 0.04 * 0.9 * 4 * 2.25 / 150,
        "dissimilarity": share * 0.04 * 0.9 * 4 * 4 * 1.1 / 625,
        "average": share * 0.04 * 0.9 * 4 * 0.7 / (0.25 * 600),
    })  # fmt: skip
    assert found["3"].terms == pytest.approx({
        "start": 2 * 2.25 / (12 * 125_000), "order": (256 * 2 + 4 * 2 / 0.25) / 2500 * 9 * 4,
        "noise": 2 * 0.7 / 25, "moves": share * 16 * 0.04 * 0.9 * 4 * 4.5 / 50,
        "steps": share * 2500 * math.exp(-35),
        "minibatch": share * 16 * 0.04 * 0.9 * 2 * 0.7 / (0.25 * 4),
    })  # fmt: skip
    own = CORRECTED["2"](KNOWN)
    assert own["order"] == pytest.approx(16 * 2 * 9 / 625)
    assert own["noise"] == pytest.approx(2 * 0.7 * 0.3 / (0.25 * 150))
    assert own["steps"] == pytest.approx(share * (3 / 8) ** 14)
    assert own["weights start"] == pytest.approx(4 * found["2"]["weights start"])
    error = 2.25 / 150 + 4 * 0.7 / (0.25 * 7500) + 4 * 1.1 / 625 + 0.7 / (0.25 * 600)
    assert own["fourth"] == pytest.approx(share * 4 * 0.16 * 9 * error)
    own = CORRECTED["3"](KNOWN)
    slack = share * 4 * (0.9 + 9) * 16 * 0.04
    assert own["moves"] == pytest.approx(slack * 2 * 4.5 / 50)
    assert own["minibatch"] == pytest.approx(slack * 0.7 / 4)
    assert own["noise"] == pytest.approx(2 * 0.7 / (0.25 * 50))


def test_the_noise_of_sgd_needs_the_factor_l():
    """PERM-E15, (15) and (17): ``½μw²`` with L = μ = 8, at rest; E w² = γδ²/(μ(2 − γμ))."""
    mu, lr, delta2 = 8.0, 0.01, 0.5
    rest = lr * delta2 / (mu * (2 - lr * mu))
    assert rest == pytest.approx((1 - lr * mu) ** 2 * rest + lr**2 * delta2)
    assert rest > 2 * lr * delta2 / mu**2 and rest <= 2 * lr * mu * delta2 / mu**2
    assert mu**2 * rest > 2 * lr * delta2 and mu**2 * rest <= 2 * lr * mu * delta2


# ---- the studies


GIVEN = dict(
    clients=4, local_steps=3, kappa=3.0, dim=3, lam=0.2, copies=2, rounds_grid=[8], noise=0.0
)


def least_squares(p):
    """The clients of a problem as tasks of the library: d samples each, one a coordinate."""
    N, d = p.centres.shape
    x = np.einsum("nk,kl->nkl", np.sqrt(d * p.curvatures), np.eye(d))
    y = (x * p.centres[:, None]).sum(-1)
    parts = list(np.arange(N * d).reshape(N, d))
    data = FederatedDataset.build(x.reshape(-1, d), y.ravel(), parts)
    return Task(models.linear(d), data, "half_square")


def test_a_problem_has_the_constants_that_it_says():
    p = theorems.draw_clients(3, GIVEN)
    assert p.curvatures.min() == 1 and p.curvatures.max() == 3
    A = p.weights(p.optimum())
    assert_allclose(A.sum(1), 1) and (A == 0).any() and (A > 0).sum() > 4
    H = np.stack([np.diag(row) for row in p.curvatures])
    assert_allclose(p.minimiser(A)[1], best(H, p.centres, A[1]), rtol=1e-12)
    v = np.random.default_rng(0).normal(size=(4, 3))
    assert_allclose(p.excess(A, v)[1], excess(H, p.centres, A[1], v[1], p.minimiser(A)[1]))
    g = slopes(H, p.centres, v[0])
    assert_allclose(p.discrepancies(v[0])[1, 2], ((g[1] - g[2]) ** 2).sum())


def test_the_studies_do_what_the_library_does():
    p, c = theorems.draw_clients(5, GIVEN), theorems.known_constants(GIVEN)
    task, A = least_squares(p), p.weights(p.optimum())
    v, visits = np.zeros((1, 4, 3)), theorems.orders(5, 4, "random")
    for _ in range(3):
        v = theorems.epoch(p, v, A, next(visits), 0.02, 3)
    algorithm = ShuffledSGD(0.02, 3, None, "printed")
    state = algorithm.init(task, (5,), A=torch.from_numpy(A))
    for _ in range(12):
        state, _ = algorithm.round(state, task)
    assert_allclose(v[0], state.v[0], rtol=1e-9)
    w = theorems.quadratic_sgd(p, np.zeros((1, 3)), 6, 3, 0.05)
    own = simulate(FedAvg(Full(4), 0.05, 3, None), task, 6, seeds=(5,), progress=False).state.x
    assert_allclose(w, own, rtol=1e-9)
    found = theorems._loop(GIVEN | dict(stages=1, global_noise=0.0, global_batch=1), p, 5, 8)
    perm = PERM(
        theory.visit_rate_single(c, 8), 3, None, "printed",
        mixing=Mixing(p.lam, "one"), global_lr=theory.global_rate(c, 8),
    )  # fmt: skip
    state = perm.init(task, (5,))
    sizes = p.sizes.astype(int)  # the library counts d samples; sizes enter through λ and n alone
    assert len(set(sizes)) > 1
    for t in range(32):
        state, _ = perm.round(state, task)
        if (t + 1) % 4 == 0:  # so the weights are set to those of the problem's own sizes
            state = replace(state, A=torch.from_numpy(p.weights(state.x.numpy())))
    v, A = state.v.numpy(), state.A.numpy()
    last = v - np.einsum("rij,jd,rid->rid", A, p.curvatures, v) / 3
    last = last + np.einsum("rij,jd->rid", A, p.curvatures * p.centres) / 3
    own = p.excess(p.weights(p.optimum()), last).mean()
    assert found["excess"] == pytest.approx(float(own), rel=1e-9)


class Loops:
    """The studies with noise and K = 1, one copy, model, client and step after the other."""

    def __init__(self, s, seed, R):
        self.p, self.c, self.seed, self.R = (
            theorems.draw_clients(seed, s),
            theorems.known_constants(s),
            seed,
            R,
        )
        self.s, self.H, self.centres = s, self.p.curvatures, self.p.centres
        (self.N, self.d), self.copies = self.H.shape, s["copies"]
        self.best = self.p.weights(best(self.bowls(), self.centres, np.full(self.N, 1 / self.N)))

    def bowls(self):
        return np.stack([np.diag(row) for row in self.H])

    def noise(self, rng, variance):
        shape = (self.copies, self.N, self.d)
        return (variance / self.d) ** 0.5 * rng.standard_normal(shape)

    def local_sgd(self, w, rounds, lr, rng, variance):
        for _ in range(rounds):
            xi, ends = self.noise(rng, variance), np.zeros((self.copies, self.N, self.d))
            for k, i in itertools.product(range(self.copies), range(self.N)):
                ends[k, i] = w[k] - lr * (self.H[i] * (w[k] - self.centres[i]) - xi[k, i])
            w = ends.mean(1)
        return w

    def travel(self, v, A, r, lr, rng):
        sigma, v = stream(self.seed, "shuffling", r).permutation(self.N), v.copy()
        for j in range(self.N):
            xi = self.noise(rng, self.s["noise"])
            for k, i in itertools.product(range(self.copies), range(self.N)):
                h = sigma[(i + j) % self.N]
                slope = self.H[h] * (v[k, i] - self.centres[h]) - xi[k, i]
                v[k, i] = v[k, i] - lr * self.N * A[k][i, h] * slope
        return v

    def excess(self, v, A, goals):
        """After a closing step by the rows of A, how far from the best models for the goals."""
        found, H = [], self.bowls()
        for k, i in itertools.product(range(self.copies), range(self.N)):
            closed = after_closing(H, self.centres, A[k][i], v[k, i], self.c.L, math.inf)
            goal = best(H, self.centres, goals[i])
            found.append(excess(H, self.centres, goals[i], closed, goal))
        return np.mean(found)

    def off(self, A):
        return np.mean(
            [((row - self.best[i]) ** 2).sum() for own in A for i, row in enumerate(own)]
        )

    def weights(self):
        w = np.zeros((self.copies, self.d))
        rate, rng = theory.local_rate(self.c, self.R), stream(self.seed, "weights", self.R)
        w = self.local_sgd(w, self.R, rate, rng, self.s["noise"])
        star = best(self.bowls(), self.centres, np.full(self.N, 1 / self.N))
        off = self.off([self.p.weights(own) for own in w])
        return {
            "model error": np.mean([((own - star) ** 2).sum() for own in w]),
            "weights error": off, "weights error by log": off / math.log(self.R),
        }  # fmt: skip

    def models(self):
        v, A = np.zeros((self.copies, self.N, self.d)), [self.best] * self.copies
        rng = stream(self.seed, "models", self.R)
        for r in range(self.R):
            v = self.travel(v, A, r, theory.visit_rate(self.c, self.R), rng)
        found, log = self.excess(v, A, self.best), theory.log_factor(self.c, self.R)
        return {"excess": found, "excess by Λ": found / log, "excess by Λ²": found / log**2}

    def loop(self, stages, rate):
        w, v = np.zeros((self.copies, self.d)), np.zeros((self.copies, self.N, self.d))
        first, rng = (stream(self.seed, name, self.R) for name in ("global", "visits"))
        variance = self.s["global_noise"] / self.s["global_batch"]
        A = [np.full((self.N, self.N), 1 / self.N)] * self.copies
        if stages == 2:
            w = self.local_sgd(w, self.R, theory.local_rate(self.c, self.R), first, variance)
            A = [self.p.weights(own) for own in w]
        for r in range(self.R):
            v = self.travel(v, A, r, rate(self.c, self.R), rng)
            if stages == 1:
                w = self.local_sgd(w, 1, theory.global_rate(self.c, self.R), first, variance)
                A = [self.p.weights(own) for own in w]
        found = self.excess(v, A, self.best)
        return {"excess": found, "log excess": math.log(found), "weights error": self.off(A)}


def test_the_studies_with_noise_are_loops_over_copies_models_and_clients():
    s = GIVEN | dict(
        local_steps=1, copies=3, noise=0.8, global_noise=1.5, global_batch=2, order="random"
    )
    loops = Loops(s, 5, 6)
    told = (s, loops.p, 5, 6)
    assert theorems._weights(*told) == pytest.approx(loops.weights(), rel=1e-9)
    assert theorems._models(*told) == pytest.approx(loops.models(), rel=1e-9)
    one, two = theory.visit_rate_single, theory.visit_rate
    for run, rate in (
        (dict(stages=1), one),
        (dict(stages=2), two),
        (dict(stages=2, rate_of=1), one),
        (dict(stages=1, rate_of=2), two),
    ):
        found = theorems._loop(s | run, *told[1:])
        assert found == pytest.approx(loops.loop(run["stages"], rate), rel=1e-9)


def test_the_error_of_the_weights_is_told_by_the_logarithm_of_all_local_steps():
    found = theorems._weights(GIVEN, theorems.draw_clients(5, GIVEN), 5, 8)
    by_log = found["weights error by log"]
    assert found["weights error"] == pytest.approx(by_log * math.log(8 * 3))


def test_hosts_drawn_with_replacement_meet_some_twice_and_all_alike():
    found = np.stack(list(itertools.islice(theorems.orders(3, 5, "replacement"), 400)))
    assert found.shape == (400, 5, 5)
    for i in range(5):
        assert_allclose(np.bincount(found[:, :, i].ravel()), 400, rtol=0.2)
    twice = [len(set(epoch[:, 0])) < 5 for epoch in found]
    assert np.mean(twice) == pytest.approx(1 - 120 / 5**5, abs=0.03)
    once = itertools.islice(theorems.orders(3, 5, "random"), 20)
    assert all(sorted(epoch[:, i]) == list(range(5)) for epoch in once for i in range(5))


def test_k_noisy_steps_at_once_are_k_noisy_steps():
    H, rate, K = np.array([0.5, 2.0]), np.array([0.1, 0.3]), 4
    shrink, spread = theorems.steps(H, rate, K)
    noise = np.random.default_rng(0).standard_normal((K, 200_000, 2))
    u = np.ones((200_000, 2))
    for xi in noise:
        u = u - rate * (H * u + xi)
    assert_allclose(u.mean(0), shrink, atol=0.005)
    assert_allclose(u.std(0), spread, rtol=0.01)
    draw = theorems.gaussian(np.random.default_rng(1), (100_000, 5), 3.0)
    assert (draw() ** 2).sum(1).mean() == pytest.approx(3.0, rel=0.02)
    assert theorems.gaussian(None, (1, 2), 0.0) is None


def test_a_visit_walks_once_through_the_samples_of_its_host():
    p, K, lr = theorems.draw_clients(5, GIVEN), 3, 0.02
    A, rng = p.weights(p.optimum()), np.random.default_rng
    e = theorems.samples(rng(1), p, K, 6.0)
    assert e.shape == (4, K, 3)
    assert_allclose(e.sum(1), 0, atol=1e-12)
    assert_allclose([np.mean([x @ x for x in own]) for own in e], 6.0)
    hosts = next(theorems.orders(5, 4, "random"))
    v = theorems.walked(p, np.ones((2, 4, 3)), A, hosts, lr, e, rng(7))
    draw, told = rng(7), np.ones((2, 4, 3))
    for host in hosts:
        order = draw.permuted(np.tile(np.arange(K), (2, 4, 1)), axis=2)
        assert all(sorted(one) == [0, 1, 2] for one in order.reshape(-1, K))
        for copy, model in itertools.product(range(2), range(4)):
            j = host[model]
            for k in order[copy, model]:
                u = told[copy, model]
                g = p.curvatures[j] * (u - p.centres[j]) + e[j, k]
                told[copy, model] = u - lr * 4 * A[model, j] * g
    assert_allclose(v, told, rtol=1e-12)
    assert not np.allclose(v[0], v[1])


def test_walks_differ_by_seed_and_length_and_lose_the_noise():
    s = GIVEN | dict(noise=30.0, order="random", walk=True, copies=4)
    p = theorems.draw_clients(1, s)
    of = [theorems._models(s, p, *which)["excess"] for which in ((1, 8), (2, 8), (1, 8))]
    assert of[0] == of[2] != of[1]
    fresh = theorems._models(s | dict(walk=False), p, 1, 256)["excess by Λ"]
    assert theorems._models(s, p, 1, 256)["excess by Λ"] < fresh / 20


def test_two_stages_are_the_first_and_then_the_second():
    s = GIVEN | dict(global_noise=0.0, global_batch=1, stages=2)
    p, c = theorems.draw_clients(5, GIVEN), theorems.known_constants(GIVEN)
    w = theorems.quadratic_sgd(p, np.zeros((1, 3)), 8, 3, theory.local_rate(c, 8))
    A, best_A = p.weights(w), p.weights(p.optimum())
    v, visits = np.zeros((1, 4, 3)), theorems.orders(5, 4, "random")
    for _ in range(8):
        v = theorems.epoch(p, v, A, next(visits), theory.visit_rate(c, 8), 3)
    found = theorems._loop(s | dict(stages=2), p, 5, 8)
    assert found["weights error"] == pytest.approx(float(((A - best_A) ** 2).sum(-1).mean()))
    last = theorems.closing(p, v, A, 3.0)
    assert found["excess"] == pytest.approx(float(p.excess(best_A, last).mean()))
    assert found["log excess"] == pytest.approx(math.log(found["excess"]))


def test_23_a_fixed_order_has_the_prescribed_rate_and_random_ones_are_faster():
    s = GIVEN | dict(clients=10, dim=8, rounds_grid=[64, 128, 256])
    runs = [dict(run=kind, order=kind) for kind in ("fixed", "random")]
    frame = theorems.rates_of_models(Job(s | {"runs": runs}, (1, 2, 3), progress=False)).frame
    record = Record(frame, {"profile": "smoke"}, Path("made.csv.gz"))
    fixed, chance = (
        measures.slope(record, kind, "excess by Λ²", "round").low for kind in ("fixed", "random")
    )
    assert_allclose(fixed, -2, atol=0.1)
    assert (chance < -2.2).all()


def test_the_studies_give_every_seed_what_it_has_alone():
    s = GIVEN | dict(global_noise=1.0, noise=1.0, global_batch=2, order="random")
    runs = [dict(run="one", stages=1), dict(run="two", stages=2)]
    for study in (theorems.rates_of_weights, theorems.rates_of_models, theorems.single_loop):
        both, one = (
            study(Job(s | {"runs": runs}, seeds, progress=False)).frame for seeds in ((1, 2), (2,))
        )
        own = both[both["seed"] == 2].reset_index(drop=True)
        pd.testing.assert_frame_equal(own, one)
        assert np.isfinite(one["value"]).all()


def powers(spread=0.02, **slopes):
    """Rows of runs that fall like powers of R, with a little noise between seeds."""
    rng, rows = np.random.default_rng(0), []
    for name, (metric, power, level) in slopes.items():
        for seed, R in itertools.product(range(1, 11), (32, 64, 128, 256, 512, 1024)):
            told = dict(run=name.replace("_", " "), seed=seed, round=R, split="train")
            value = level + power * math.log(R) + spread * rng.normal()
            rows.append(told | dict(metric=metric, value=math.exp(value)))
            rows.append(told | dict(metric="log " + metric, value=value))
    return pd.DataFrame(rows)


def decided(claim, number, runs, spread=0.02):
    """Return the outcome of one of a claim's checks on runs that fall like powers."""
    (entry,) = [row for row in claims.claims_of("personalization") if row["id"] == claim]
    check = entry["check"][number]
    told = check["with"]
    names = [told[key].replace(" ", "_") for key in ("run", "a", "b") if key in told]
    metric = told["metric"].removeprefix("log ")
    frame = powers(spread, **{name: (metric, *run) for name, run in zip(names, runs, strict=True)})
    record = Record(frame, {"profile": "quick"}, Path("made.csv.gz"))
    got = measures.MEASURES[check["measure"]](record, **told)
    return claims.question(entry, check).outcome(*got.interval(0.99), got.estimate)


@pytest.mark.parametrize(
    ("number", "power", "outcome"),
    [
        (0, -1.0, "holds"),
        (0, 0.0, "outside"),  # minibatch gradients in the weights: an error that stays
        (0, -1.9, "holds"),  # faster than an upper bound
        (1, -2.0, "holds"),
        (1, -1.0, "outside"),  # hosts drawn with replacement
        (2, -1.1, "holds"),
        (2, -2.6, "outside"),  # the noise forgotten
    ],
)
def test_slopes_decide_on_theorems_1_and_2(number, power, outcome):
    assert decided("PERM-C8", number, [(power, 0.0)]) == outcome
    assert decided("PERM-C8", number, [(power, 0.0)], spread=40.0) == "open"


@pytest.mark.parametrize(
    ("number", "runs", "outcome"),
    [
        (0, [(-1.0, 0.3), (-1.0, 0.0)], "holds"),
        (0, [(-1.0, -0.3), (-1.0, 0.0)], "reversed"),
        (1, [(-1.0, 0.0), (-1.0, 0.0)], "level"),
        (2, [(-1.0, -0.3), (-1.0, 0.0)], "reversed"),
        (3, [(-1.0, 1.0), (-1.0, 0.0)], "holds"),
        (4, [(-0.8, 1.0), (-1.0, 0.0)], "holds"),
        (4, [(-2.0, 1.0), (-1.0, 0.0)], "outside"),
        (5, [(-0.1, 0.0)], "holds"),
        (5, [(-1.5, 0.0)], "outside"),
    ],
)
def test_what_decides_on_a_single_loop(number, runs, outcome):
    assert decided("PERM-C11", number, runs) == outcome
