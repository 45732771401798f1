"""Where amplified merges end and how fast they get there: the formulas against runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.beyond import AmplifiedHierarchicalSGD, theory
from fedlib.papers.methods.theory import resting_point
from fedlib.population.delays import Deterministic
from fedlib.population.participation import Cyclic

ONE, TWO = Deterministic(1.0), Deterministic(2.0)
L, Z, SIZES, COUNTS = np.array([0.5, 2.0]), np.array([-1.0, 4.0]), (1, 2), (4, 2)


def bowls(levels, centres):
    """Client n has the loss a_n/2 (x - z_n)²: one sample, u x should be u z with u² = a."""
    u = np.sqrt(levels)
    data = FederatedDataset.build(u[:, None], u * centres, [[n] for n in range(len(u))])
    return Task(models.linear(1), data, "half_square")


def merges(eta, P, lr=0.2, **more):
    return AmplifiedHierarchicalSGD(
        SIZES, lr, 3.5, 400.0, (ONE, TWO), ONE, amplify=eta, interval=P, **more
    )


def path(algorithm, rounds, x, task=None):
    task = task or bowls(L[[0, 1, 1]], Z[[0, 1, 1]])
    state, found = algorithm.init(task, (0,), torch.full((1, 1), x, dtype=torch.float64)), []
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        found.append(state.x.item())
    return np.array(found)


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("eta", [0.5, 1.0, 3.0])
def test_the_end_knows_neither_factor_nor_interval_and_the_distance_shrinks_as_promised(eta, P):
    pulls = theory.pulls(L, 0.2, COUNTS, SIZES)
    m, end = pulls.sum(), resting_point(Z, pulls)
    keep = theory.kept(m, eta, P)
    assert_allclose(path(merges(eta, P), 2 * P, end), end, atol=1e-12)
    found = path(merges(eta, P), 2 * P, 9.0)[P - 1 :: P]
    assert_allclose(found - end, (9.0 - end) * keep ** np.array([1, 2]), atol=1e-12)
    if P > 1:
        assert abs(keep - (1 - eta * P * m)) > 0.01, "not P amplified merges of small steps"
        assert abs(keep - (1 - eta * m) ** P) > 0.01 or eta == 1, "nor P amplified merges"


@pytest.mark.parametrize("P", [1, 2, 5])
def test_intervals_converge_below_the_largest_factor_and_not_above(P):
    pulls = theory.pulls(L, 0.2, COUNTS, SIZES)
    end, most = resting_point(Z, pulls), float(theory.largest_factor(pulls.sum(), P))
    for eta, grows in ((0.999 * most, False), (1.001 * most, True)):
        away = abs(path(merges(eta, P), P, 9.0)[-1] - end) / abs(9.0 - end)
        assert bool(away > 1) == grows and abs(away - 1) < 0.005


def test_in_several_directions_the_eigenvalues_of_the_merge_decide():
    rng, lr, t, w = np.random.default_rng(0), 0.3, (5, 2), np.array([0.4, 0.6])
    roots = rng.normal(size=(2, 3, 3))
    H = roots @ roots.transpose(0, 2, 1)
    H = H / np.linalg.eigvalsh(H).max()
    z, I = rng.normal(size=(2, 3)), np.eye(3)
    M = sum(
        wi / ti * (I - np.linalg.matrix_power(I - lr * Hi, ti))
        for wi, ti, Hi in zip(w, t, H, strict=True)
    )
    m, v = np.linalg.eigh(M)
    assert 0 < m.min() and m.max() < 1

    def interval(x, eta, P):
        x0 = x
        for _ in range(P):
            d = 0.0
            for wi, ti, Hi, zi in zip(w, t, H, z, strict=True):
                y = x
                for _ in range(ti):
                    y = y - lr * Hi @ (y - zi)
                d = d + wi / ti * (y - x)
            x = x + d
        return x0 + eta * (x - x0)

    end = np.zeros(3)
    for _ in range(4000):
        end = interval(end, 1.0, 1)
    for eta, P in ((2.0, 1), (3.0, 4)):
        assert_allclose(interval(end, eta, P), end, atol=1e-10)
        for k in range(3):
            moved = interval(end + v[:, k], eta, P) - end
            assert_allclose(moved, theory.kept(m[k], eta, P) * v[:, k], atol=1e-10)


@pytest.mark.parametrize(("slow", "fast", "P"), [(0.01, 0.4, 1), (0.05, 0.9, 3), (0.3, 0.3, 2)])
def test_no_factor_keeps_less_of_the_worst_direction_than_the_best(slow, fast, P):
    m, (best, a_merge) = np.linspace(slow, fast, 50), theory.best_factor(slow, fast, P)
    worst = lambda eta: abs(theory.kept(m, eta, P)).max()  # noqa: E731
    assert_allclose(worst(best), a_merge**P, atol=1e-12)
    assert all(worst(best) < worst(best * other) for other in (0.9, 0.999, 1.001, 1.1))


def test_no_interval_keeps_less_a_merge_than_one():
    shares = np.concatenate([np.logspace(-4, -0.05, 25), [1.0]])
    for i, slow in enumerate(shares):
        for fast in shares[i + 1 :]:
            each = [theory.best_factor(slow, fast, P)[1] for P in (1, 2, 3, 7, 20)]
            assert min(each[1:]) > each[0]


def in_turn(eta, P, lr):
    """Three groups of one client in turn, four iterations each."""
    return AmplifiedHierarchicalSGD(
        (1, 1, 1), lr, 3.5, 4000.0, ONE, ONE, amplify=eta, interval=P, availability=Cyclic(3)
    )


@pytest.mark.parametrize("eta", [1.0, 2.5])
@pytest.mark.parametrize("P", [1, 3])
def test_a_cycle_ends_where_the_formula_says_waiting_or_not(eta, P):
    levels, centres, lr = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.5, 4.0]), 0.1
    m = (1 - (1 - lr * levels) ** 4) / 4  # the whole weight is the one group's
    end, keep = theory.cycle(m, centres, eta, every=P == 1)
    found = path(in_turn(eta, P, lr), 6, 9.0, bowls(levels, centres))[[2, 5]]
    assert_allclose(found - end, (9.0 - end) * keep ** np.array([1, 2]), atol=1e-12)
    still = theory.cycle(m, centres)[0]
    assert bool(abs(end - still) < 1e-12) == (P == 3 or eta == 1)


def test_at_the_same_speed_waiting_ends_so_many_times_nearer_as_the_factor_is_large():
    centres, eta = np.array([-1.0, 0.5, 4.0]), 8.0
    for small, most in ((1e-3, 0.02), (1e-4, 0.002)):
        m = np.full(3, small)
        (wait, kept), (each, kept_each) = (
            theory.cycle(m, centres, eta, every) for every in (False, True)
        )
        assert abs((each - centres.mean()) / (wait - centres.mean()) / eta - 1) < most
        assert abs((1 - kept) / (1 - kept_each) - 1) < most
        first = small / 3 * ((np.arange(3) - 1) @ centres)
        assert abs((wait - centres.mean()) / first - 1) < most


def test_merges_that_do_not_divide_have_pulls_of_their_own():
    plain, nova = (theory.pulls(L, 0.2, COUNTS, SIZES, merge) for merge in ("plain", "nova"))
    b = 1 - (1 - 0.2 * L) ** np.array(COUNTS)
    assert_allclose(plain, [b[0] / 3, 2 * b[1] / 3])
    assert_allclose(nova, [8 / 3 * b[0] / 12, 8 / 3 * b[1] / 3])
    task = bowls(L[[0, 1, 1]], Z[[0, 1, 1]])
    found = path(replace(merges(1.0, 1), merge="plain"), 1, 9.0, task)
    assert_allclose(found, 9.0 + (plain * (Z - 9.0)).sum(), atol=1e-12)


@pytest.mark.parametrize(("slow", "fast"), [(0.0, 0.5), (0.5, 0.4), (0.5, 1.5)])
def test_shares_out_of_range_are_refused(slow, fast):
    with pytest.raises(FedlibError, match="slow|fast"):
        theory.best_factor(slow, fast)
