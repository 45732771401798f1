"""The pages on foundations: what they define and claim, each against another computation."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from fractions import Fraction

import nbformat
import numpy as np
import pages
import pytest
import torch
from scipy import integrate, stats

from fedlib.engine import local, models
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.mixing import Groups, mix
from fedlib.engine.tasks import Task
from fedlib.population.delays import Deterministic, ShiftedExponential

HOME = pages.ROOT / "notebooks" / "01_foundations"


@functools.cache
def page(name: str) -> dict:
    """Return what a page imports and defines; nothing else of it runs."""
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef)
    held: dict = {}
    for cell in nbformat.read(HOME / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            body = [node for node in ast.parse(cell.source).body if isinstance(node, kept)]
            exec(compile(ast.Module(body, []), name, "exec"), held)
    return held


MIX = "3_mix_columns_clocks"


def fractions(matrix) -> list[list[Fraction]]:
    return [[Fraction(v).limit_denominator(1000) for v in row] for row in np.array(matrix).tolist()]


def times(a, b):
    """The product of two matrices of fractions, exactly."""
    turned = list(zip(*b, strict=True))
    return [[sum(p * q for p, q in zip(r, c, strict=True)) for c in turned] for r in a]


# --- mix -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("G", "K"), [(1, 4), (3, 1), (2, 3), (3, 4)])
def test_groups_inside_a_whole_exactly(G, K):
    N, same = G * K, Fraction(1, K)
    groups = [[same if a // K == b // K else Fraction(0) for b in range(N)] for a in range(N)]
    everyone = [[Fraction(1, N)] * N for _ in range(N)]
    assert times(groups, groups) == groups
    assert times(everyone, groups) == times(groups, everyone) == everyone
    assert fractions(np.kron(np.eye(G), np.full((K, K), 1 / K))) == groups
    theta = torch.from_numpy(np.random.default_rng(0).normal(size=(N, 3)))
    theirs = mix(theta, torch.tensor(np.array(groups, float)))[0]
    assert (theirs[::K] - mix(theta, Groups(G, K))[0]).abs().max() < 1e-14


def test_groups_of_other_sizes_are_no_average_of_all():
    within = [[Fraction(1), 0, 0, 0], [0, *[Fraction(1, 3)] * 3]]
    assert times([[Fraction(1, 2)] * 2], within) == [[Fraction(1, 2), *[Fraction(1, 6)] * 3]]
    assert times([[Fraction(1, 4), Fraction(3, 4)]], within) == [[Fraction(1, 4)] * 4]


@pytest.mark.parametrize("N", [2, 5, 12])
def test_a_shift_brings_each_model_to_each_place_once(N):
    theta = torch.arange(N).double().unsqueeze(1)
    shift, seen = torch.roll(torch.arange(N), 1), []
    for _ in range(N):
        seen.append(theta[:, 0].long().tolist())
        theta = mix(theta, shift)[0]
    assert all(sorted(place) == list(range(N)) for place in zip(*seen, strict=True))


def test_columns_that_sum_to_one_keep_the_mean_and_others_do_not():
    rng = np.random.default_rng(1)
    theta = rng.normal(size=(6, 4))
    orders = [rng.permutation(6) for _ in range(5)]
    doubly = sum(w * np.eye(6)[o] for w, o in zip(rng.dirichlet(np.ones(5)), orders, strict=True))
    rows_only = rng.dirichlet(np.ones(6), 6)
    spread = [((t - t.mean(0)) ** 2).sum() for t in (theta, doubly @ theta)]
    assert np.abs((doubly @ theta).mean(0) - theta.mean(0)).max() < 1e-14
    assert spread[1] <= spread[0]
    wrong = rows_only.sum(0) - 1  # the direction in which the mean moves
    moved = (rows_only @ wrong).mean() - wrong.mean()
    assert moved == pytest.approx((wrong**2).sum() / 6) and moved > 1e-3
    before = np.array([0.0, 1, 1, 1])  # the second copies the first: the spread grows
    after = np.eye(4)[[0, 0, 2, 3]] @ before
    assert 4 * before.var() == pytest.approx(0.75) and 4 * after.var() == pytest.approx(1.0)


# --- masks ---------------------------------------------------------------------------------------


def test_pairs_add_and_subtract_the_same():
    rng = np.random.default_rng(0)
    drawn = []

    def draw():
        drawn.append(rng.integers(-50, 50, size=3))
        return drawn[-1]

    masks = page(MIX)["pairwise_masks"](4, draw)
    pairs = dict(zip(itertools.combinations(range(4), 2), drawn[4:], strict=True))
    for c in range(4):
        own = sum(v for (a, _), v in pairs.items() if a == c)
        own = own - sum(v for (_, b), v in pairs.items() if b == c)
        assert np.array_equal(masks[c], own)
    assert not masks.sum(0).any() and masks.any()


@pytest.mark.parametrize("modulus", [2, 3, 5])
def test_all_masked_rows_of_one_sum_are_seen_equally_often(modulus):
    """By hand: with draws r, s, t the rows are a + r + s, b - r + t, c - s - t."""
    for rows in ([0, 0, 1], [1, 1, 1], [0, 1, 0]):
        expected: dict = {}
        for r, s, t in itertools.product(range(modulus), repeat=3):
            a, b, c = rows
            view = ((a + r + s) % modulus, (b - r + t) % modulus, (c - s - t) % modulus)
            expected[view] = expected.get(view, 0) + 1
        seen = page(MIX)["views"](rows, modulus)
        assert seen == expected and set(seen.values()) == {modulus}
        assert len(seen) == modulus**2
        assert {sum(view) % modulus for view in seen} == {sum(rows) % modulus}


def test_whole_masks_cancel_to_the_bit_and_real_ones_do_not():
    ours, rng = page(MIX), np.random.default_rng(2)
    rows = rng.normal(size=(7, 50)) * 100
    masks = ours["pairwise_masks"](7, lambda: rng.integers(2**64, size=50, dtype=np.uint64))
    whole = ours["encode"](rows)
    by_hand = [sum(int(v) for v in column) % 2**64 for column in (whole + masks).T]  # no wrapping
    assert by_hand == [sum(round(v * 2**32) for v in column) % 2**64 for column in rows.T.tolist()]
    total = ours["decode"]((whole + masks).sum(0))
    assert np.abs(total - rows.sum(0)).max() <= 7 * 2.0**-33 + 1e-12
    real = ours["pairwise_masks"](7, lambda: 1e12 * rng.normal(size=50))
    assert np.abs((rows + real).sum(0) - rows.sum(0)).max() > 1e-5


# --- columns -------------------------------------------------------------------------------------


def test_a_block_s_gradient_needs_one_number_a_sample():
    """Against finite differences of the whole loss, which knows of no parties."""
    ours, rng = page(MIX), np.random.default_rng(3)
    x, y = rng.normal(size=(9, 6)), rng.integers(0, 2, 9)
    w, cut = rng.normal(size=6), [[0, 2], [1], [3, 4, 5]]

    def loss(w):
        z = x @ w
        return np.mean(np.logaddexp(0, z) - y * z)

    z = sum(x[:, c] @ w[c] for c in cut)
    assert np.abs(z - x @ w).max() < 1e-14
    back = ours["delta"](torch.tensor(z), torch.tensor(y))
    assert ((back > 0).numpy() == (y == 0)).all(), "its sign is the label"
    for c in cut:
        found = ours["block_gradient"](torch.tensor(x[:, c]), back).numpy()
        for k, j in enumerate(c):
            e = 1e-5 * np.eye(6)[j]
            assert found[k] == pytest.approx((loss(w + e) - loss(w - e)) / 2e-5, abs=1e-9)


# --- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [1, 2, 7, 40])
def test_the_slowest_of_some_by_integrating_its_tail(S):
    c, m = 0.7, 1.8
    tail, _ = integrate.quad(lambda s: 1 - (1 - math.exp(-s / m)) ** S, 0, 60 * m, limit=300)
    assert c + tail == pytest.approx(c + m * page(MIX)["harmonic"](S), abs=1e-8)


LAWS = [ShiftedExponential(1.0, 2.0), ShiftedExponential(0.0, 1.0), Deterministic(1.0)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("S", [1, 2, 9])
def test_staleness_is_conserved(law, S):
    """Against a plain reading: sort all ends, count updates since the last one of one's own."""
    times, who, stale, ages = page(MIX)["without_waiting"](law, S, 300, seed=4)
    ends = [(t, n) for n in range(S) for t in law.draws(4, "work", n, size=301).cumsum()]
    ends = sorted(ends)[:300]
    assert np.allclose(times, [t for t, _ in ends])
    if not isinstance(law, Deterministic):
        assert who.tolist() == [n for _, n in ends]
    last = dict.fromkeys(range(S), -1)
    for version, n in enumerate(who):
        assert stale[version] == version - last[n] - 1
        last[n] = version
    assert stale.sum() + ages.sum() == (S - 1) * 300
    for n in range(S):
        assert stale[who == n].sum() + ages[n] == (who != n).sum()


@pytest.mark.parametrize(("c", "m", "sync"), [(1.0, 2.0, 7.5), (0.5, 0.1, 3.1), (2.0, 3.0, 1.0)])
def test_the_steps_that_fit_into_a_sync_time(c, m, sync):
    """Against the distribution of a sum of exponentials, and a bound by Wald's identity."""
    law = ShiftedExponential(c, m)
    tails = [stats.gamma.cdf(sync - n * c, n, scale=m) for n in range(1, 200) if n * c < sync]
    expected = 1 + sum(tails)
    assert page(MIX)["expected_steps"](law, sync) == pytest.approx(expected, abs=1e-12)
    assert sync / law.expected <= expected <= sync / law.expected + 1


def test_a_delay_of_one_is_stable_below_one():
    """By hand: the roots of z² - z + a are (1 ± √(1 - 4a)) / 2."""
    for a in (0.1, 0.25, 0.6, 0.999, 1.001, 1.5):
        root = max(abs((1 + s * np.emath.sqrt(1 - 4 * a)) / 2) for s in (1, -1))
        assert page(MIX)["largest_root"](1, a) == pytest.approx(root, abs=1e-7)
        assert (root < 1) == (a < page(MIX)["step_limit"](1))
    limits = [page(MIX)["step_limit"](tau) for tau in range(3)]
    assert limits == pytest.approx([2, 1, (math.sqrt(5) - 1) / 2])


@pytest.mark.parametrize("tau", [0, 1, 2, 3, 7])
def test_the_limit_of_a_stale_step(tau):
    """Against the eigenvalues of the companion matrix, and against running it."""
    limit = page(MIX)["step_limit"](tau)
    for share in (0.05, 0.5, 0.95, 1.05, 1.5, 3.0):
        A = np.eye(tau + 1, k=-1)
        A[0, 0] = 1
        A[0, tau] -= share * limit
        largest = np.abs(np.linalg.eigvals(A)).max()
        assert largest == pytest.approx(page(MIX)["largest_root"](tau, share * limit), abs=1e-6)
        assert (largest < 1) == (share < 1)
        with np.errstate(all="ignore"):
            e = np.linalg.matrix_power(A, 4000) @ np.ones(tau + 1)
        assert (np.abs(e).max() < 1e-6) == (share < 1)


def test_stale_local_steps_against_the_recursion():
    q, tau, lr, steps = 0.3, 3, 0.15, 4
    path = page(MIX)["stale_run"](q, tau, lr, steps, rounds=40)
    e = [1.0] * (tau + 1)
    for _ in range(40):
        e.append(e[-1] - q * (1 - (1 - lr) ** steps) * e[-1 - tau])
    assert np.allclose(path, np.abs(e[tau:]), atol=1e-14)


def test_stale_updates_do_not_move_the_fixed_point():
    """Two quadratic clients on a line, by hand: 4/11, with or without delay."""
    for tau in (0, 2):
        x = [0.0] * (tau + 1)
        for _ in range(400):
            old = x[-1 - tau]
            one = two = old
            for _ in range(2):
                one, two = one - 0.25 * (one + 1), two - 0.25 * 3 * (two - 1)
            x.append(x[-1] + 0.5 * ((one + two) / 2 - old))
        assert x[-1] == pytest.approx(4 / 11, abs=1e-12)


# --- federated averaging -------------------------------------------------------------------------

AVERAGING = "1_federated_averaging"


def test_the_variance_of_a_round_by_all_its_outcomes():
    """Three clients on a line with two equally likely minibatch gradients each, cohorts of two."""
    g = {0: (1, 3), 1: (4, 8), 2: (0, 5)}
    means = {n: Fraction(a + b, 2) for n, (a, b) in g.items()}
    whole = sum(means.values()) / 3
    d2 = sum((m - whole) ** 2 for m in means.values()) / 3
    sigma2 = sum(Fraction(b - a, 2) ** 2 for a, b in g.values()) / 3
    for again, left in ((True, 1), (False, Fraction(3 - 2, 3 - 1))):
        cohorts = itertools.product(range(3), repeat=2)
        cohorts = [c for c in cohorts if again or c[0] != c[1]]
        rounds = [Fraction(u + v, 2) for a, b in cohorts for u in g[a] for v in g[b]]
        assert sum(rounds) / len(rounds) == whole
        found = sum((u - whole) ** 2 for u in rounds) / len(rounds)
        assert found == sigma2 / 2 + d2 / 2 * left


def test_a_minibatch_is_a_cohort_of_samples():
    values, B = [2, 3, 7, 11, 12], 3
    m, mean = len(values), Fraction(sum(values), 5)
    s2 = sum((v - mean) ** 2 for v in values) / m
    batches = [Fraction(sum(b), B) for b in itertools.combinations(values, B)]
    found = sum((b - mean) ** 2 for b in batches) / len(batches)
    assert found == s2 / B * Fraction(m - B, m - 1)


def test_half_the_clients_without_replacement_are_worth_99_draws():
    assert Fraction(100 - 50, 50 * (100 - 1)) == Fraction(1, 99)


def test_a_round_asks_the_device_for_no_number():
    """On torch's meta device tensors have shapes only; to ask one for its number is an error."""
    ours = page(AVERAGING)
    place = dict(device="meta", dtype=torch.float64)
    x, w = torch.zeros(650, **place), torch.ones(4, **place)
    images, share = torch.zeros(4, 6, 64, **place), torch.ones(4, 6, **place)
    labels = torch.zeros(4, 6, device="meta", dtype=torch.long)
    clients = list(zip(images, labels, strict=True))
    for after in (
        ours["round_rows"](x, (images, labels, share), w, 0.1, 2),
        ours["round_loop"](x, clients, w, 0.1, 2),
    ):
        assert after.shape == (650,) and after.device.type == "meta"
    with pytest.raises(RuntimeError):
        after.sum().item()


def test_the_fixed_point_is_where_a_hundred_rounds_end():
    rng = np.random.default_rng(6)
    roots = rng.normal(size=(4, 2, 2))
    A, z = np.einsum("nij,nkj->nik", roots, roots) + 0.1 * np.eye(2), rng.normal(size=(4, 2))
    lr, steps = 1 / np.linalg.eigvalsh(A).max(), 5
    x = np.zeros(2)
    for _ in range(2000):
        ends = []
        for curvature, centre in zip(A, z, strict=True):
            y = x
            for _ in range(steps):
                y = y - lr * curvature @ (y - centre)
            ends.append(y)
        x = np.mean(ends, 0)
    assert page(AVERAGING)["fixed_point"](A, z, lr, steps) == pytest.approx(x, abs=1e-12)
    gradient_descent = np.linalg.solve(A.sum(0), np.einsum("nij,nj->i", A, z))
    assert page(AVERAGING)["fixed_point"](A, z, lr, 1) == pytest.approx(gradient_descent)


# --- splitting data ------------------------------------------------------------------------------

SPLITTING = "2_splitting_data"


@pytest.fixture
def splits():
    """Return the page's functions, and set the names that its cells set."""
    page(SPLITTING).update(N=20, labels=np.repeat(np.arange(10), 140), p=np.full(10, 0.1))
    return page(SPLITTING)


def test_the_judge_of_a_split_wants_shuffled_labels_and_sizes_that_spread(splits):
    def cut(labels, order, seed, sigma):
        share = np.exp(sigma * np.random.default_rng(seed).standard_normal(20))
        sizes = 1 + splits["largest_remainder"](share / share.sum() * (len(labels) - 20))
        return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]

    def by_label(labels, clients, seed, sigma):
        return cut(labels, np.argsort(labels % 5, kind="stable"), seed, sigma)

    def in_order(labels, clients, seed, sigma):
        return cut(labels, np.arange(len(labels)), seed, sigma)

    def shuffled(labels, clients, seed, sigma):
        return cut(labels, np.random.default_rng(seed).permutation(len(labels)), seed, sigma)

    judge = splits["judge"]
    assert judge(shuffled) == judge(splits["quantity"]) == "right"
    assert judge(by_label) == "labels are not i.i.d."
    assert "nothing was shuffled" in judge(in_order)
    assert "spread by" in judge(lambda y, n, seed, sigma: shuffled(y, n, seed, 3.0))
    assert "spread by" in judge(lambda y, n, *_: np.array_split(np.arange(1400), n))
    assert "lost" in judge(lambda *_: [np.arange(5), np.arange(9)])


def test_rounding_to_whole_images_not_chance_moves_small_clients_away(splits):
    for clients, alpha, most in ((20, 0.5, 0.01), (200, 0.571, 0.2)):
        shares, whole = splits["distances"](clients, alpha, draws=10)
        assert 0 < whole - shares < most
    assert whole - shares > 0.05
    rng = np.random.default_rng(1)  # the shares alone: classes are alike, so p is uniform
    drawn = rng.dirichlet(np.full(200, 0.571), (10, 10))
    own = drawn / drawn.sum(1, keepdims=True)
    assert shares == pytest.approx(0.5 * np.abs(own - 0.1).sum(1).mean(), abs=0.02)


def test_two_clients_share_a_class_less_unequally_than_one_over_alpha():
    alpha, drawn = 5.0, np.random.default_rng(0).dirichlet([5.0, 5.0], 200_000)[:, 0]
    relative = drawn.var() / drawn.mean() ** 2
    assert relative == pytest.approx(1 / (2 * alpha + 1), rel=0.02)


def test_the_share_that_other_columns_explain(splits):
    """By hand: y = x explains all, noise of the same size half, an independent column nothing."""
    rng = np.random.default_rng(0)
    x, noise = rng.standard_normal((2, 4000, 1))
    explained = splits["explained"]
    assert explained(3 * x + 1, x) == pytest.approx(1)
    assert explained(x + noise, x) == pytest.approx(0.5, abs=0.03)
    assert explained(noise, x) == pytest.approx(0, abs=0.003)


# --- speed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 50, 484, 485, 969, 1500, 5000])
def test_pieces_are_counted_as_the_engine_cuts_them(copies):
    model = models.softmax(60, 2)
    data = FederatedDataset.build(np.zeros((20, 60), np.float32), np.zeros(20, int), [range(20)])
    task = Task(model, data)
    theta, batch = torch.zeros(copies, model.size), Batch(torch.zeros(copies, 16, dtype=int))
    fits = local._copies_at_once(task, theta, [batch], "threads")
    counted = page("4_speed")["pieces"](copies, model.size + 16 * 60)
    assert counted == len(local._cut(copies, fits))
