"""The bounds of the participation chapter: exact identities, and inequalities on simulated runs."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch

from fedlib.engine import estimate
from fedlib.errors import FedlibError
from fedlib.papers.participation import theory
from fedlib.papers.participation.toy import (
    toy_contraction,
    toy_eta_max,
    toy_fixed_point,
    toy_run,
    toy_task,
)
from fedlib.population.participation import Markov

Z = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, math.sqrt(3)]])


def weights(rng, *shape):
    """Random stochastic rows with many exact zeros."""
    raw = rng.exponential(size=shape) * (rng.random(shape) < 0.5)
    raw[..., 0] += 1e-3
    return raw / raw.sum(-1, keepdims=True)


def cohorts(rng, rounds, clients, cohort):
    """Weights of cohorts drawn uniformly without replacement: [..., N]."""
    order = rng.random((*np.atleast_1d(rounds), clients)).argsort(-1).argsort(-1)
    return (order < cohort) / cohort


class Problem:
    """F_n(x) = sum_j x_j^2 / (1 + x_j^2) + c_nj sin(x_j - start_j), with sum_n c_n = 0.

    Not convex, and clients differ by c_n cos(x - start), most at the start: every constant of the
    assumptions is known exactly, and the suprema over x are attained where the runs begin.
    """

    def __init__(self, seed, clients=4, dim=3, sigma=0.5):
        rng = np.random.default_rng(seed)
        self.slopes = rng.standard_normal((clients, dim))
        self.slopes -= self.slopes.mean(0)
        self.sigma2 = sigma**2
        self.start = 2 * rng.standard_normal(dim)
        self.K = theory.gram(self.slopes)
        self.L = 2.0 + np.abs(self.slopes).max()  # (x^2 / (1 + x^2))'' runs from -1/2 to 2

    def mean_gradient(self, x):
        return 2 * x / (1 + x**2) ** 2

    def gradients(self, y):
        """y[..., N, dim] -> [..., N, dim], row n at its own point."""
        return self.mean_gradient(y) + self.slopes * np.cos(y - self.start)

    @property
    def gap(self):
        return float((self.start**2 / (1 + self.start**2)).sum())


def run(problem, q, lr, amplify, local_steps, interval, seeds, rng):
    """Algorithm 1 in all seeds at once.

    Returns ``|grad f|^2`` at the interval starts [K, seeds], and the largest client spread and
    interval drift met in the *first* interval (means over the seeds).
    """
    x = np.repeat(problem.start[None], seeds, 0)
    clients, dim = problem.slopes.shape
    noise = math.sqrt(problem.sigma2 / dim)
    starts, spread, drift, reference = [], 0.0, 0.0, x
    for t, weight in enumerate(q):
        if t % interval == 0:
            starts.append((problem.mean_gradient(x) ** 2).sum(1))
        y = np.repeat(x[:, None], clients, 1)
        for _ in range(local_steps):
            y = y - lr * (problem.gradients(y) + noise * rng.standard_normal(y.shape))
            mean = np.einsum("n,snd->sd", weight, y)
            if t < interval:
                off = ((y - mean[:, None]) ** 2).sum(2) @ weight
                spread = max(spread, off.mean())
                drift = max(drift, ((mean - problem.start) ** 2).sum(1).mean())
        x = x + np.einsum("n,snd->sd", weight, y - x[:, None])
        if (t + 1) % interval == 0:
            x = reference + amplify * (x - reference)
            reference = x
    return np.array(starts), spread, drift


def constants(problem, q, interval):
    return {
        "sigma2": problem.sigma2,
        "nu2": theory.nu2(problem.K, q).max(),
        "beta2": theory.beta2(problem.K, q).max(),
        "rho2": theory.rho2(q).max(),
        "delta2": theory.delta2(problem.K, theory.interval_means(q, interval)).mean(),
    }


# ---- identities of d, beta, nu, delta (specification, tests 8, 9, 13)


def test_round_heterogeneity_splits_exactly():
    rng = np.random.default_rng(0)
    g, q = rng.standard_normal((7, 5)), weights(rng, 3, 40, 7)
    K = theory.gram(g)
    whole = q @ ((g - g.mean(0)) ** 2).sum(1)
    np.testing.assert_allclose(theory.nu2(K, q) + theory.beta2(K, q), whole, rtol=1e-13)
    assert (whole <= theory.d2(K) * (1 + 1e-12)).all()


def test_nu_beta_delta_are_what_their_definitions_say():
    rng = np.random.default_rng(1)
    g, q = rng.standard_normal((6, 4)), weights(rng, 10, 6)
    K, mean = theory.gram(torch.tensor(g)), g.mean(0)
    for row, nu, beta in zip(q, theory.nu2(K, q), theory.beta2(K, q), strict=True):
        inside = row @ g
        assert nu == pytest.approx(row @ ((g - inside) ** 2).sum(1), rel=1e-12)
        assert beta == pytest.approx(((inside - mean) ** 2).sum(), rel=1e-12)
    bar = q.mean(0)
    assert theory.delta2(K, bar) == pytest.approx(((bar @ g - mean) ** 2).sum(), rel=1e-12)


def test_three_bounds_on_delta_are_ordered():
    rng = np.random.default_rng(2)
    for clients in (2, 5, 30):
        g = rng.standard_normal((clients, 3)) * rng.exponential(size=(clients, 1))
        K, bar = theory.gram(g), weights(rng, 50, clients)
        d2 = theory.d2(K)
        exact, sharp = theory.delta2(K, bar), theory.l1_bound(d2, bar)
        assert (exact <= sharp * (1 + 1e-12)).all()
        assert (sharp <= theory.variance_bound(d2, bar) * (1 + 1e-12)).all()
        assert (theory.factor(bar) <= 4).all()


def test_equal_shares_in_every_interval_make_delta_vanish():
    rng = np.random.default_rng(3)
    clients, cohort = 12, 3
    turns = np.concatenate([rng.permutation(clients) for _ in range(6)]).reshape(-1, cohort)
    q = np.zeros((len(turns), clients))
    q[np.arange(len(turns))[:, None], turns] = 1 / cohort
    K = theory.gram(rng.standard_normal((clients, 5)))
    for interval in (4, 8, 12):
        assert theory.delta2(K, theory.interval_means(q, interval)).max() < 1e-28
    assert theory.delta2(K, theory.interval_means(q, 3)).max() > 1e-2
    np.testing.assert_allclose(theory.rho2(q), 1 / cohort)


def test_wrong_shapes_are_explained():
    with pytest.raises(FedlibError, match="clients on the last axis"):
        theory.beta2(np.eye(3), np.ones(4) / 4)
    with pytest.raises(FedlibError, match="no complete interval"):
        theory.interval_means(np.ones((3, 2)) / 2, 4)


# ---- constants used in the proofs


@pytest.mark.parametrize(("split", "printed"), [(7 / 12, 2.81), (5 / 9, 2.76)])
def test_recursion_constants_are_at_most_three(split, printed):
    limit = (math.exp(split) * math.sqrt(1 + 2 * split) - 1) / split
    assert printed - 0.01 < limit <= 3
    for steps in (1, 2, 3, 10, 1000, 100_000):
        a = 1 + split / (steps - 0.5)
        growth = (a**steps - 1) / (a - 1)  # what a recursion of `steps` steps really adds up to
        assert growth <= limit * (steps - 0.5) <= 3 * steps


def test_noise_of_a_weighted_mean_has_the_stated_coefficient():
    q = weights(np.random.default_rng(4), 100, 6)
    own = (q * ((q**2).sum(1, keepdims=True) - q**2 + (1 - q) ** 2)).sum(1)
    np.testing.assert_allclose(own, 1 - theory.rho2(q), atol=1e-15)


def test_lemma_c1_by_hand():
    """3 I γ² (6 I ν² + σ² (1 - Σq²)) = 3 · 2 · 0.0001 · (12 · 5 + 8 · 0.75) = 0.0396."""
    known = dict(L=1.0, lr=0.01, local_steps=2, nu2=5.0, sigma2=8.0, weight_norm2=0.25)
    assert theory.lemma_c1_bound(**known) == pytest.approx(0.0396)


def test_step_size_turns_lemma_c1_into_its_share_of_lemma_c2():
    for steps, interval in [(1, 1), (1, 9), (5, 1), (5, 25)]:
        lr, nu2, s2 = 1 / (12 * steps * interval), 2.0, 3.0  # L = 1, at the limit
        c1 = theory.lemma_c1_bound(L=1, lr=lr, local_steps=steps, nu2=nu2, sigma2=s2)
        nested = 3 * steps * interval * 8 * steps * interval * lr**2 * c1
        share = 3 * lr**2 * steps * (steps * nu2 + s2 / 6)
        assert nested == pytest.approx(share, rel=1e-12)


def test_theorem_terms_follow_from_the_two_lemmas():
    """With rho2 at most 1 where the theorem writes 1: assembled <= theorem, equal without noise."""
    for sigma2 in (0.0, 0.7):
        lemma = {"L": 1.5, "sigma2": sigma2, "nu2": 1.1, "lr": 0.002}
        lemma |= {"local_steps": 3, "interval": 4}
        spread = theory.lemma_c1_bound(**lemma)
        drift = theory.lemma_c2_bound(**lemma, beta2=0.4, rho2=0.3, gradient2=0.0)
        assembled = 6 * (1.5**2 * (spread + drift) + 0.1) + 4 * 0.002 * 5 * 1.5 * 0.3 * sigma2
        assembled += 8 * 2.0 / (0.002 * 5 * 3 * 100)
        bound = theory.theorem_3_1(
            **lemma, beta2=0.4, rho2=0.3, gap=2.0, delta2=0.1, amplify=5.0, rounds=100
        ).total
        slack = 3 * 1.5**2 * 0.002**2 * 3 * 0.3 * sigma2  # 6 L^2 . 3 lr^2 I P . rho2 / (6 P)
        assert bound - assembled == pytest.approx(slack, abs=1e-12)


def test_lemma_c2_noise_needs_no_single_round():
    """s + (1 - s)/(6 P) grows with s, so each round's noise is at most that at s = rho^2."""
    s, rho2 = np.linspace(0, 0.7, 50), 0.7
    for interval in (1, 3, 50):
        rounds = s + (1 - s) / (6 * interval)
        assert (np.diff(rounds) > 0).all()
        printed = rho2 + (1 - s) / (6 * interval)  # the paper's bracket, whatever round t is
        assert (rounds.max() <= printed + 1e-15).all()


# ---- the bounds on simulated runs


@pytest.mark.parametrize("local_steps", [1, 4])
def test_lemmas_hold_in_a_simulation_at_the_largest_step(local_steps):
    interval = 3
    for seed in range(3):
        rng, problem = np.random.default_rng(seed), Problem(seed, sigma=2.0)
        q = weights(rng, interval, 4)
        lr = 1 / (12 * problem.L * local_steps * interval)
        _, spread, drift = run(problem, q, lr, 1.0, local_steps, interval, 2000, rng)
        c = constants(problem, q, interval)
        shared = {"L": problem.L, "lr": lr, "local_steps": local_steps, "interval": interval}
        shared |= {k: c[k] for k in ("nu2", "sigma2")}
        bound = theory.lemma_c1_bound(**shared, weight_norm2=theory.rho2(q).min())
        assert 0.01 * bound < spread <= bound
        gradient2 = (problem.mean_gradient(problem.start) ** 2).sum()
        rest = {"beta2": c["beta2"], "rho2": c["rho2"], "gradient2": gradient2}
        bound = theory.lemma_c2_bound(**shared, **rest)
        assert 0.005 * bound < drift <= bound


@pytest.mark.parametrize("corollary", [False, True])
def test_theorem_3_1_holds_in_simulations(corollary):
    local_steps, interval, rounds = 2, 4, 120
    for seed in range(4):
        rng, problem = np.random.default_rng(seed), Problem(seed)
        q = weights(rng, rounds, 4)
        c = constants(problem, q, interval) | {"L": problem.L, "gap": problem.gap}
        shape = {"local_steps": local_steps, "interval": interval, "rounds": rounds}
        lr = 1 / (12 * problem.L * local_steps * interval)
        amplify = 6.0
        if corollary:
            keys = ("L", "gap", "sigma2", "rho2")
            lr, amplify = theory.step_sizes_3_2(**{k: c[k] for k in keys}, **shape)
        starts, _, _ = run(problem, q, lr, amplify, local_steps, interval, 200, rng)
        bound = theory.theorem_3_1(**c, **shape, lr=lr, amplify=amplify).total
        assert starts.mean() <= bound
        if corollary:
            assert bound <= theory.corollary_3_2(**c, **shape).total


def test_one_interval_descends_as_the_proof_says_without_noise():
    """With sigma = 0 the inequality of one interval is exact arithmetic: a sharp check."""
    for seed in range(20):
        rng, problem = np.random.default_rng(seed), Problem(seed, sigma=0.0)
        interval, steps = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        q = weights(rng, 2 * interval, 4)
        lr = rng.uniform(0.2, 1) / (12 * problem.L * steps * interval)
        amplify = rng.uniform(0.2, 1) / (2 * problem.L * steps * interval * lr)
        x, reference = problem.start.copy(), problem.start
        for weight in q[:interval]:
            y = np.repeat(x[None], 4, 0)
            for _ in range(steps):
                y = y - lr * problem.gradients(y)
            x = weight @ y
        x = reference + amplify * (x - reference)
        c = constants(problem, q[:interval], interval)
        c |= {"L": problem.L, "gap": 0.0, "lr": lr, "amplify": amplify, "rounds": 2 * interval}
        error = theory.theorem_3_1(**c, local_steps=steps, interval=interval).total
        fall = problem.gap - (x**2 / (1 + x**2)).sum()
        gradient2 = (problem.mean_gradient(reference) ** 2).sum()
        assert gradient2 <= 4 * fall / (lr * amplify * steps * interval) + error


def test_corollary_3_3_is_theorem_3_1_at_its_rates():
    c = {"L": 1.0, "gap": 0.5, "rho2": 0.1}
    shape = {"local_steps": 2, "interval": 5, "rounds": 20_000}
    rest = {"sigma2": 1.3, "nu2": 0.8, "beta2": 0.5, "delta2": 0.01}
    lr, amplify = theory.step_sizes_3_3(**c, **shape)
    theorem = theory.theorem_3_1(**c, **rest, **shape, lr=lr, amplify=amplify).total
    assert theory.corollary_3_3(**c, **rest, **shape).total == pytest.approx(theorem, rel=1e-12)
    with pytest.raises(FedlibError, match="T >= 4 L I P\\^2 F"):
        theory.step_sizes_3_3(**c, local_steps=2, interval=5, rounds=999)
    theory.step_sizes_3_3(**c, local_steps=2, interval=5, rounds=1000)


def test_corollary_3_2_adds_one_reciprocal_too_many():
    """gamma eta = min(u, v), and 1/min <= 1/u + 1/v: the surplus is exactly the other term."""
    c = {"L": 1.0, "gap": 0.5, "rho2": 0.1, "sigma2": 1.3}
    rest = {"nu2": 0.8, "beta2": 0.5, "delta2": 0.01}
    shape = {"local_steps": 2, "interval": 5, "rounds": 20_000}
    bound = theory.corollary_3_2(**c, **rest, **shape)
    lr, amplify = theory.step_sizes_3_2(**c, **shape)
    assert amplify < 6 * math.sqrt(20_000)
    theorem = theory.theorem_3_1(**c, **rest, **shape, lr=lr, amplify=amplify).total
    assert bound.total - theorem == pytest.approx(bound["deterministic"], rel=1e-9)
    quiet = c | {"sigma2": 0.0}
    lr, amplify = theory.step_sizes_3_2(**quiet, **shape)
    theorem = theory.theorem_3_1(**quiet, **rest, **shape, lr=lr, amplify=amplify).total
    assert theory.corollary_3_2(**quiet, **rest, **shape).total == pytest.approx(theorem, rel=1e-9)


def test_violated_conditions_name_their_numbers():
    c = {"L": 2.0, "gap": 1.0, "sigma2": 0.0, "nu2": 1.0, "beta2": 1.0, "delta2": 0.0, "rho2": 0.5}
    shape = {"local_steps": 5, "interval": 10, "rounds": 100}
    with pytest.raises(FedlibError, match=r"1/\(12 L I P\) = 0.0008333.*lr = 0.001"):
        theory.theorem_3_1(**c, **shape, lr=1e-3, amplify=1.0)
    with pytest.raises(FedlibError, match=r"1/\(2 L I P\) = 0.005.*lr \* amplify = 0.008"):
        theory.theorem_3_1(**c, **shape, lr=8e-4, amplify=10.0)
    with pytest.raises(FedlibError, match="P = 10 and T = 19"):
        theory.theorem_3_1(**c, **shape | {"rounds": 19}, lr=8e-4, amplify=1.0)


# ---- how fast delta falls


@pytest.mark.parametrize(("clients", "cohort"), [(4, 1), (5, 2), (6, 6)])
def test_variance_of_a_weight_by_enumeration(clients, cohort):
    draws = np.array([np.isin(range(clients), c) for c in combinations(range(clients), cohort)])
    expected = (draws[:, 0] / cohort).var()
    assert theory.variance_independent(clients, cohort) == pytest.approx(expected, abs=1e-15)


def test_proposition_4_7_is_exact_before_cauchy_schwarz():
    """E N sum (qbar - 1/N)^2 = N^2 v / P, enumerated over all P-tuples of cohorts."""
    clients, cohort, interval = 4, 2, 3
    draws = np.array([np.isin(range(clients), c) for c in combinations(range(clients), cohort)])
    tuples = np.stack(np.meshgrid(*[range(len(draws))] * interval), -1).reshape(-1, interval)
    bar = (draws / cohort)[tuples].mean(1)
    v = theory.variance_independent(clients, cohort)
    expected = theory.variance_bound(1.0, bar).mean()
    assert theory.proposition_4_7(1.0, clients, v, interval) == pytest.approx(expected, rel=1e-12)


def test_proposition_4_7_gives_the_expected_numbers():
    v = theory.variance_independent(250, 10)
    for interval, expected in [(1, 24), (25, 0.96), (500, 0.048)]:
        assert theory.proposition_4_7(1.0, 250, v, interval) == pytest.approx(expected, rel=1e-12)


def test_ergodic_process_makes_delta_vanish():
    """A slow phase drift: nothing repeats, nothing is random, and delta still goes to zero."""
    phase = np.arange(4096)[:, None] * (math.sqrt(5) - 1) / 70 + np.arange(6) / 6
    raw = 1 + np.cos(2 * np.pi * phase)
    q = raw / raw.sum(1, keepdims=True)
    sizes = [theory.variance_bound(1.0, theory.interval_means(q, P)).max() for P in (1, 128, 1024)]
    assert sizes[0] > 50 * sizes[1] > 500 * sizes[2]


def test_unequal_long_run_shares_leave_a_bias():
    rng, share = np.random.default_rng(11), np.array([0.5, 0.3, 0.2])
    g = rng.standard_normal((3, 4))
    q = np.eye(3)[rng.choice(3, size=40_000, p=share)]
    bias = ((share @ g - g.mean(0)) ** 2).sum()
    found = theory.delta2(theory.gram(g), theory.interval_means(q, 40_000))
    assert found == pytest.approx(bias, rel=0.05)


def test_one_client_statement_does_not_cover_all_intervals():
    """Erratum E2: two clients, one a round; c = 0.1, 200 intervals, 400 runs."""
    rng, c, interval, count = np.random.default_rng(5), 0.1, 100, 200
    hits = rng.binomial(interval, 0.5, size=(400, count)) / interval
    largest = theory.variance_bound(1.0, np.stack([hits, 1 - hits], -1))
    printed = theory.proposition_4_7_hoeffding(1.0, 2, interval, c, union=False)
    union = theory.proposition_4_7_hoeffding(1.0, 2, interval, c, intervals=count)
    assert (largest <= printed).mean() >= 1 - c  # one interval: what is proved
    assert (largest.max(1) <= printed).mean() < 0.3  # all of them: not covered
    assert (largest.max(1) <= union).mean() >= 1 - c
    assert union / printed == pytest.approx(math.log(2 * 2 * count / c) / math.log(2 / c))
    v = theory.variance_independent(2, 1)
    chebyshev = theory.proposition_4_7(1.0, 2, v, interval, failure=c)
    assert (largest.mean(1) <= chebyshev).mean() >= 1 - c  # the mean over intervals: covered
    every = theory.proposition_4_7(1.0, 2, v, interval, failure=c, intervals=count)
    assert every == pytest.approx(count * chebyshev)


def test_chebyshev_statement_does_not_cover_all_intervals_either():
    rng, c, interval, count = np.random.default_rng(6), 0.2, 100, 400
    hits = rng.binomial(interval, 0.5, size=(200, count)) / interval
    largest = theory.variance_bound(1.0, np.stack([hits, 1 - hits], -1)).max(1)
    v = theory.variance_independent(2, 1)
    assert (largest <= theory.proposition_4_6(1.0, 2, v, interval, failure=c)).mean() < 0.1


def test_smaller_weights_sharpen_hoeffding_by_their_square():
    wide = theory.proposition_4_7_hoeffding(1.0, 250, 100, 0.1)
    assert theory.proposition_4_7_hoeffding(1.0, 250, 100, 0.1, largest=0.1) == pytest.approx(
        wide / 100
    )
    rng = np.random.default_rng(7)
    bars = np.stack([cohorts(rng, 100, 20, 5).mean(0) for _ in range(300)])
    sharp = theory.proposition_4_7_hoeffding(1.0, 20, 100, 0.1, largest=1 / 5)
    assert (theory.variance_bound(1.0, bars) <= sharp).mean() >= 0.9


def test_corollary_4_8_asks_for_more_than_the_experiments_have():
    ask = theory.corollary_4_8(clients=250, cohort=10, local_steps=5, rounds=300_000)
    assert theory.variance_independent(250, 10) == pytest.approx(3.84e-4, rel=1e-12)
    assert ask.interval == pytest.approx(4.6e5, rel=0.02)
    assert not ask.fits
    assert ask.rounds == pytest.approx(2.9e6, rel=0.01)
    fitting = theory.corollary_4_8(250, 10, 5, math.ceil(ask.rounds))
    assert fitting.interval == pytest.approx(fitting.longest, rel=1e-6)
    # with I local steps and L F at its limit, Corollary 3.3's condition is met with equality
    rate = theory.step_sizes_3_3(
        L=1.0,
        gap=ask.largest_gap,
        rho2=0.1,
        local_steps=5,
        interval=fitting.interval,
        rounds=math.ceil(ask.rounds),
    )
    assert rate[0] * rate[1] == pytest.approx(1 / (2 * 5 * fitting.interval), rel=1e-6)
    assert ask.largest_gap < 1e-8


def test_prescription_for_any_variance():
    """v = 2, N = 4, so v N^(5/2) = 64: P = 64 sqrt(I T), T >= 4 . 64^2 I, I <= rho / (128 g)."""
    ask = theory.prescription(2.0, clients=4, rho2=0.25, local_steps=9, rounds=100)
    assert (ask.interval, ask.longest, ask.fits) == (64 * 30, 50, False)
    assert ask.rounds == 4 * 64**2 * 9
    assert 9 == pytest.approx(0.5 / (128 * math.sqrt(ask.largest_gap)))
    assert theory.corollary_4_8(250, 10, 5, 10**6) == theory.prescription(
        theory.variance_independent(250, 10), 250, 1 / 10, 5, 10**6
    )
    with pytest.raises(FedlibError, match="do not vary"):
        theory.corollary_4_8(10, 10, 1, 100)


def test_the_prescribed_interval_leaves_what_corollary_4_8_says():
    """With it delta^2 is d^2 / sqrt(N I T), whatever the variance."""
    for variance in (1e-4, 0.3):
        ask = theory.prescription(variance, clients=30, rho2=0.1, local_steps=3, rounds=10**8)
        left = theory.proposition_4_6(7.0, 30, variance, ask.interval)
        assert left == pytest.approx(7.0 / math.sqrt(30 * 3 * 10**8), rel=1e-12)


def test_the_bound_on_the_mean_by_hand_and_against_the_printed_one():
    """4 . 9 . w^2 ln(sqrt(2) / c) / P with w = 1/3, c = sqrt(2) / e: 4 / 8."""
    c = math.sqrt(2) / math.e
    assert theory.proposition_4_7_mean(4.0, 3, 8, c, largest=1 / 3) == pytest.approx(0.5)
    for c in (0.5, 0.1, 1e-6):
        printed = theory.proposition_4_7_hoeffding(1.0, 5, 10, c, union=False)
        assert printed < theory.proposition_4_7_mean(1.0, 5, 10, c) < 2 * printed


# ---- two-state chains (specification, test 12)


@pytest.mark.parametrize(("on", "off"), [(0.1, 0.3), (0.9, 0.6), (0.5, 0.5)])
def test_markov_moments_by_matrix_powers(on, off):
    step = np.array([[1 - on, on], [off, 1 - off]])
    mean = theory.markov_mean(on, off)
    still = np.array([1 - mean, mean])
    np.testing.assert_allclose(still @ step, still, rtol=1e-14)
    lags = np.arange(2000)
    power, exact = np.eye(2), []
    for _ in lags:
        exact.append(mean * power[1, 1] - mean**2)
        power = power @ step
    covariance = theory.markov_autocovariance(on, off, lags)
    np.testing.assert_allclose(covariance, exact, atol=1e-14)
    total = covariance[0] + 2 * covariance[1:].sum()
    assert theory.markov_long_run_variance(on, off) == pytest.approx(total, rel=1e-10)
    assert 2000 * theory.variance_of_mean(covariance) == pytest.approx(total, rel=0.01)


def test_markov_moments_by_simulation():
    rng, on, off, interval = np.random.default_rng(8), 0.2, 0.3, 20
    state = rng.random(40_000) < theory.markov_mean(on, off)
    path = []
    for _ in range(interval):
        path.append(state)
        flip = rng.random(state.shape) < np.where(state, off, on)
        state = state ^ flip
    path = np.array(path, dtype=float)
    expected = theory.variance_of_mean(theory.markov_autocovariance(on, off, np.arange(interval)))
    assert path.mean(0).var() == pytest.approx(expected, rel=0.03)


def all_states(clients, on, off, cap):
    """Every state of the chains: their moves, their law, E q_0 and E q_0^2 given the state."""
    states = np.array(list(product((0, 1), repeat=clients)))
    step = np.ones((len(states), len(states)))
    for n in range(clients):
        up = np.where(states[:, n] == 1, 1 - off, on)[:, None]  # [from, 1]
        step = step * np.where(states[:, n] == 1, up, 1 - up)  # [from, to]
    mean = on / (on + off)
    law = np.where(states == 1, mean, 1 - mean).prod(1)
    share, second = [], []
    for state in states:
        there = [n for n in range(clients) if state[n]] or list(range(clients))
        size = len(there) if cap is None else min(cap, len(there))
        draws = [0 in chosen for chosen in combinations(there, size)]
        share.append(np.mean(draws) / size)
        second.append(np.mean(draws) / size**2)
    return step, law, np.array(share), np.array(second)


@pytest.mark.parametrize(("on", "off", "cap"), [(0.2, 0.3, None), (0.1, 0.2, 2), (0.9, 0.8, None)])
def test_covariances_of_a_shared_weight_by_all_states(on, off, cap):
    """Four chains: sixteen states and every draw, counted."""
    clients = 4
    step, law, share, second = all_states(clients, on, off, cap)
    np.testing.assert_allclose(law @ step, law, atol=1e-15)
    assert law @ share == pytest.approx(1 / clients)
    exact, later = [law @ second - 1 / 16], share
    for _ in range(6):
        later = step @ later
        exact.append(law @ (share * later) - 1 / 16)
    found = theory.markov_weight_autocovariance(clients, on, off, 7, cap)
    np.testing.assert_allclose(found, exact, atol=1e-15)


@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize(("on", "off"), [(0.05, 0.15), (0.3, 0.3), (0.5, 0.5), (0.9, 0.8)])
def test_a_shared_weight_varies_at_most_as_its_bound_says(on, off, cap):
    """For every P; with no memory, r = 0, it is the variance of independent rounds."""
    covariance = theory.markov_weight_autocovariance(12, on, off, 600, cap)
    bound = theory.markov_weight_bound(12, on, off, cap)
    for P in (1, 2, 3, 10, 600):
        assert P * theory.variance_of_mean(covariance[:P]) <= bound * (1 + 1e-12)
    total = covariance[0] + 2 * covariance[1:].sum()
    assert total <= bound * (1 + 1e-12)
    if on + off <= 1:
        assert total >= covariance[0] * (1 - 1e-12)
    if on + off == 1:
        assert bound == pytest.approx(covariance[0], rel=1e-12)


def test_a_capped_weight_of_everybody_on_is_an_independent_draw():
    """Nearly always on: S of N drawn afresh, with the variance known by hand."""
    covariance = theory.markov_weight_autocovariance(10, 1.0, 1e-12, 3, cap=4)
    assert covariance[0] == pytest.approx(theory.variance_independent(10, 4), rel=1e-9)
    assert abs(covariance[1:]).max() < 1e-9


def test_the_weight_of_the_markov_process_varies_as_computed():
    process = Markov(6, on=0.2, off=0.3, cap=3)
    q = process.weights(0, 0, 20_000)
    covariance = theory.markov_weight_autocovariance(6, 0.2, 0.3, 8, cap=3)
    for P in (1, 8):
        found = theory.interval_means(q, P).var()
        assert found == pytest.approx(theory.variance_of_mean(covariance[:P]), rel=0.05)


# ---- the toy (specification, tests 14 and 18)


@pytest.mark.parametrize(
    ("gamma", "eta", "x3", "x15", "distance", "contraction", "bias"),
    [
        (0.05, 1, (0.85975, 1.80135), (0.47223, 1.25247), 0.82389, 0.857375, 0.034184),
        (0.1, 1, (0.738, 1.63121), (0.23226, 0.91932), 0.41339, 0.729, 0.070143),
        (0.25, 1, (0.46875, 1.27676), (0.09336, 0.76571), 0.21023, 0.421875, 0.189832),
        (0.5, 1, (0.25, 1.11603), (0.14288, 0.98977), 0.43647, 0.125, 0.436436),
        (0.05, 2, (0.7195, 1.60271), (0.20009, 0.86702), 0.35205, 0.71475, 0.034184),
        (0.05, 5, (0.29875, 1.00676), (0.01856, 0.60991), 0.03748, 0.286875, 0.034184),
        (0.05, 10, (-0.4025, 0.01353), (0.00282, 0.58761), 0.01064, -0.42625, 0.034184),
    ],
)
def test_toy_table(gamma, eta, x3, x15, distance, contraction, bias):
    path = toy_run(Z, (1.0, 2.0), gamma, eta, rounds=15, interval=3)
    np.testing.assert_allclose(path[3], x3, atol=6e-6)
    np.testing.assert_allclose(path[15], x15, atol=6e-6)
    best, still = Z.mean(0), toy_fixed_point(Z, gamma)
    assert np.linalg.norm(path[15] - best) == pytest.approx(distance, abs=6e-6)
    assert toy_contraction(gamma, eta) == pytest.approx(contraction, abs=1e-12)
    assert np.linalg.norm(still - best) == pytest.approx(bias, abs=6e-7)
    np.testing.assert_allclose(path[6] - still, contraction * (path[3] - still), atol=1e-12)


def test_toy_is_stable_exactly_below_eta_max():
    limit = toy_eta_max(0.05)
    assert limit == pytest.approx(14.02, abs=0.005)
    still = toy_fixed_point(Z, 0.05)
    for eta, grows in [(limit * 0.99, False), (limit * 1.01, True)]:
        path = toy_run(Z, (1.0, 2.0), 0.05, eta, rounds=600, interval=3)
        assert (np.linalg.norm(path[-1] - still) > np.linalg.norm(path[0] - still)) == grows


def test_toy_fixed_point_and_local_steps():
    """I local steps are one step at rate 1 - (1 - gamma)^I, for the real iteration too."""
    gamma, steps = 0.07, 4
    one = 1 - (1 - gamma) ** steps
    many = toy_run(Z, (1.0, 2.0), gamma, 3.0, 30, 3, local_steps=steps)
    np.testing.assert_allclose(many, toy_run(Z, (1.0, 2.0), one, 3.0, 30, 3), atol=1e-14)
    still = toy_fixed_point(Z, gamma, local_steps=steps)
    np.testing.assert_allclose(still, toy_fixed_point(Z, one), atol=1e-15)
    np.testing.assert_allclose(
        toy_run(Z, still, gamma, 9.0, 3, 3, local_steps=steps)[-1], still, atol=1e-15
    )
    y = np.array([1.0, 2.0])
    for _ in range(steps):
        y = y - gamma * (y - Z[0])
    np.testing.assert_allclose(many[1], y, atol=1e-15)
    assert toy_contraction(gamma, 3.0, local_steps=steps) == pytest.approx(
        toy_contraction(one, 3.0)
    )


# ---- estimators


class Quadratic:
    """F_n(x) = 1/2 x^T A_n x; a batch is a [N, P] table of gradient errors."""

    def __init__(self):
        rng = np.random.default_rng(9)
        half = rng.standard_normal((3, 5, 5))
        self.A = torch.as_tensor(half + half.transpose(0, 2, 1))

    def client_gradients(self, theta):
        return torch.einsum("nij,j->ni", self.A, theta[0])

    def grad(self, theta, batch):
        return torch.einsum("nij,nj->ni", self.A, theta) + batch


def test_smoothness_is_the_spectral_norm():
    task, theta = Quadratic(), torch.ones(1, 5, dtype=torch.float64)
    for client in (0, 1, 2):
        expected = torch.linalg.matrix_norm(task.A[client], 2).item()
        found = estimate.smoothness(task, theta, client, iterations=3000, tolerance=1e-10)
        assert found == pytest.approx(expected, rel=1e-3)
        assert found <= expected * (1 + 1e-6)
    expected = torch.linalg.matrix_norm(task.A.mean(0), 2).item()
    found = estimate.smoothness(task, theta, iterations=3000, tolerance=1e-10)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_constant_gradient_has_no_smoothness():
    class Slope:
        def client_gradients(self, theta):
            return torch.ones(2, theta.shape[1], dtype=theta.dtype)

    assert estimate.smoothness(Slope(), torch.zeros(1, 3).double()) == 0


@pytest.mark.parametrize("failure", [-0.5, 0.0, 1.5])
def test_a_failure_probability_is_one(failure):
    with pytest.raises(FedlibError, match=r"expected a number in \(0, 1\]"):
        theory.proposition_4_7_mean(1.0, 2, 4, failure)


def test_smoothness_of_the_toy_task_is_one():
    task = toy_task()
    theta = torch.zeros(1, 2, dtype=torch.float64)
    assert estimate.smoothness(task, theta) == pytest.approx(1.0, rel=1e-8)
    assert theory.d2(theory.gram(task.client_gradients(theta))) == pytest.approx(4 / 3)


def test_gradient_noise_is_the_variance_of_each_client():
    rng, task = np.random.default_rng(10), Quadratic()
    scale = torch.tensor([[0.1], [1.0], [2.0]], dtype=torch.float64)
    batches = [scale * torch.as_tensor(rng.standard_normal((3, 5))) for _ in range(4000)]
    noise = estimate.gradient_noise(task, torch.ones(1, 5, dtype=torch.float64), batches)
    np.testing.assert_allclose(noise, 5 * scale[:, 0].numpy() ** 2, rtol=0.06)
    with pytest.raises(FedlibError, match="No batches"):
        estimate.gradient_noise(task, torch.ones(1, 5, dtype=torch.float64), [])


def test_corollary_3_2_by_hand():
    """12 √(σ² ρ² L F / (I T)) = 12 √(2 · 0.5 · 4 · 9 / 100), and 16 L P F / T."""
    c = {"L": 4.0, "gap": 9.0, "rho2": 0.5, "sigma2": 2.0, "nu2": 0.0, "beta2": 0.0, "delta2": 0.0}
    terms = theory.corollary_3_2(**c, local_steps=1, interval=2, rounds=100).terms
    assert terms["statistical"] == pytest.approx(7.2)
    assert terms["deterministic"] == pytest.approx(11.52)


