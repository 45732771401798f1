"""VFB² and its baselines: what must hold exactly, in float64."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from numba.core.registry import CPUDispatcher
from plain_vertical import Plain, Uniform, plain
from scipy import optimize, sparse

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.papers.vertical import (
    Problem,
    afsvrg_vp,
    centralised,
    compiled,
    pooled,
    simulate_parties,
    speed_up,
    split_features,
    straggler,
    synchronous,
    time_to,
)
from fedlib.papers.vertical.compiled import Simulation
from fedlib.papers.vertical.runs import Row
from fedlib.papers.vertical.secure import log_depth
from fedlib.papers.vertical.setup import Draws, Setup
from fedlib.population.delays import Deterministic, ShiftedExponential

N, D, Q = 40, 9, 4
RNG = np.random.default_rng(0)
X = RNG.standard_normal((N, D)) * (RNG.random((N, D)) < 0.6)
SIGNS = np.sign(X @ RNG.standard_normal(D) + 0.3 * RNG.standard_normal(N))
TARGETS = X @ RNG.standard_normal(D) + 0.1 * RNG.standard_normal(N)
METHODS = ["sgd", "svrg", "saga"]
KINDS = [
    ("logistic", "l2"),
    ("logistic", "nonconvex"),
    ("squared", "l2"),
    ("robust", "none"),
]
RANDOM = ShiftedExponential(1, 4)


def problem(loss="logistic", regulariser="l2", q=Q, lam=0.02, seed=0, x=X):
    y = SIGNS if loss == "logistic" else TARGETS
    return Problem(x, y, split_features(D, q, seed), loss, lam, regulariser)


def same_path(run, task, method, lr, **settings):
    """A run moves as pooled data would, seen in every score and at its end."""
    i = run.messages.i
    path = centralised(task, method, lr, i, **settings)
    x = task.x.toarray() if sparse.issparse(task.x) else task.x
    assert np.allclose(run.messages.score, (x[i] * path[:-1]).sum(1), rtol=0, atol=1e-12)
    assert np.allclose(run.w, path[-1], rtol=0, atol=1e-12)
    assert np.abs(path[-1] - path[0]).max() > 1e-2


# --- the problem ----------------------------------------------------------------------------------


def by_torch(w, loss, regulariser, lam):
    """The objective anew, for automatic differentiation."""
    x, y = torch.from_numpy(X), torch.from_numpy(SIGNS if loss == "logistic" else TARGETS)
    z = x @ w
    if loss == "logistic":
        cost = torch.nn.functional.softplus(-y * z)
    elif loss == "squared":
        cost = (z - y).square()
    else:
        cost = torch.log(1 + (y - z).square() / 2)
    g = {"l2": w.square(), "nonconvex": w.square() / (1 + w.square()), "none": 0 * w}[regulariser]
    return cost, lam * g.sum() / 2


@pytest.mark.parametrize("kind", KINDS)
def test_objective_and_gradients_match_automatic_differentiation(kind):
    task, w = problem(*kind), RNG.standard_normal(D)
    t = torch.tensor(w, requires_grad=True)
    cost, penalty = by_torch(t, *kind, task.lam)
    total = cost.mean() + penalty
    total.backward()
    assert task.objective(w) == pytest.approx(total.item(), abs=1e-13)
    assert np.allclose(task.gradient(w), t.grad.numpy(), atol=1e-13)
    assert np.allclose(task.losses(task.scores(w), task.y), cost.detach().numpy(), atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_and_own_data_give_the_gradient_of_a_sample(kind):
    """Test 8: ``ϑ x + λ∇g`` of every party, put together."""
    task, w = problem(*kind), RNG.standard_normal(D)
    parties = Plain(settings(task, "sgd", start=w), None).parties
    for i in (0, 7, N - 1):
        t = torch.tensor(w, requires_grad=True)
        cost, penalty = by_torch(t, *kind, task.lam)
        (cost[i] + penalty).backward()
        theta = task.theta(X[i] @ w, task.y[i])
        for party, block in zip(parties, task.blocks, strict=True):
            assert np.allclose(party.gradient(theta, i, party.w), t.grad[block], atol=1e-13)


def test_extreme_scores_overflow_nowhere():
    with np.errstate(all="raise", under="ignore"):
        theta = problem().theta(np.array([-1e4, 1e4]), np.array([1.0, 1.0]))
    assert theta[0] == -1 and -1e-300 < theta[1] <= 0


# --- learning without delay is learning on pooled data --------------------------------------------


def settings(task, method, lr=0.1, active=(0,), **told):
    return Setup(task, method, lr, active, **told)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_active_party_without_delay(method, kind):
    """Test 1."""
    task = problem(*kind)
    run = simulate_parties(task, method, 0.05, epochs=3, compute=0)
    same_path(run, task, method, 0.05)


@pytest.mark.parametrize("method", METHODS)
def test_one_active_party_and_one_thread_are_never_stale_whatever_the_delays(method):
    """Links that keep their order let no request overtake the update before it."""
    task = problem()
    run = simulate_parties(task, method, 0.05, epochs=2, delays=RANDOM)
    same_path(run, task, method, 0.05)
    free = simulate_parties(task, method, 0.05, epochs=2, delays=RANDOM, ordered=False)
    assert free.log.staleness()[0].max() > 0 and np.abs(free.w - run.w).max() > 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", [plain, simulate_parties])
def test_several_active_parties_one_step_at_a_time(method, way):
    """Test 2: the merged sequence of samples on pooled data."""
    task = problem()
    told = dict(epochs=3, active=3, bound=0, delays=RANDOM, compute=[1, 2, 3, 0.5])
    run = way(task, method, 0.05, **told)
    same_path(run, task, method, 0.05)
    assert set(run.messages.dominator) == {0, 1, 2}


@pytest.mark.parametrize("method", METHODS)
def test_sparse_data_and_remembering_scalars_alone(method):
    task = problem(x=sparse.csr_array(X))
    run = simulate_parties(task, method, 0.05, epochs=3, active=2, bound=0, delays=RANDOM)
    same_path(run, task, method, 0.05, table="theta")


@pytest.mark.parametrize("q", [40, 120])
def test_sparse_rows_of_many_parties_move_as_dense_ones(q):
    """So many updates follow one read that a scale kept beside the weights would pass zero."""
    x = np.eye(q)[np.arange(2 * q) % q] * (1 + np.arange(2 * q) % 3)[:, None]
    y = np.where(np.arange(2 * q) % 2, 1.0, -1.0)
    blocks = split_features(q, q)
    told = dict(epochs=2, active=q)
    dense, thin = (
        synchronous(Problem(rows, y, blocks, "logistic", 0.01, "l2"), "sgd", 1.0, **told).w
        for rows in (x, sparse.csr_array(x))
    )
    assert np.abs(dense).max() > 0.1 and np.allclose(dense, thin, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_parties_and_masks_change_nothing_but_rounding(method):
    """Test 3."""
    told = dict(steps=60, inner=20)
    base = simulate_parties(problem(), method, 0.05, **told)
    tasks = [problem(q=q, seed=seed) for q, seed in ((1, 0), (2, 1), (4, 2), (9, 3))]
    tasks.append(replace(problem(), blocks=problem().blocks[::-1]))
    for task in tasks:
        run = simulate_parties(task, method, 0.05, **told)
        assert np.array_equal(run.messages.i, base.messages.i)
        assert np.allclose(run.w, base.w, rtol=0, atol=1e-12)
    for width in (1.0, 1e3, 1e6):
        run = simulate_parties(problem(), method, 0.05, mask=width, **told)
        off = Q**2 * width * 2.0**-53
        assert np.abs(run.messages.score - base.messages.score).max() <= len(base.w) * off + 1e-13
        assert width == 1 or not np.array_equal(run.w, base.w)


def test_what_is_started_from_is_kept():
    start = RNG.standard_normal(D)
    run = simulate_parties(problem(), "svrg", 0.1, steps=20, inner=5, start=start, keep="snapshots")
    path = centralised(problem(), "svrg", 0.1, run.messages.i, inner=5, start=start)
    assert np.allclose(run.w, path[-1], atol=1e-12)
    assert np.allclose(run.snapshots, path[:-1:5], atol=1e-12) and len(run.snapshots) == 4


# --- estimators -----------------------------------------------------------------------------------


def all_estimates(sim):
    """Every sample's estimator at the present model, ``[n, d]``."""
    task, w = sim.setup.problem, sim.w
    theta, out = task.theta(task.scores(w), task.y), np.empty((N, D))
    for party, block in zip(sim.parties, task.blocks, strict=True):
        out[:, block] = [party.estimate(theta[i], i, party.w) for i in range(N)]
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method,table", [(m, "full") for m in METHODS] + [("saga", "theta")])
def test_estimators_are_right_on_average_and_exact_where_they_began(method, table, kind):
    """Tests 6 and 7."""
    task = problem(*kind)
    told = dict(active=2, table=table, steps=3 * N, delays=[RANDOM] * Q, start=np.full(D, 0.2))
    setup = settings(task, method, **told)
    sim = Plain(setup, Draws(setup))
    sim.receive(task.theta(task.scores(sim.w), task.y))
    first = all_estimates(sim)
    if method != "sgd" and (method == "svrg" or table == "full" or kind[1] == "none"):
        assert np.allclose(first, task.gradient(sim.w), atol=1e-13)
    sim.restart(3 * N, 0.0)
    sim.finish()
    assert np.abs(sim.w - 0.2).max() > 0.01
    later = all_estimates(sim)
    assert np.allclose(later.mean(0), task.gradient(sim.w), atol=1e-13)
    assert np.abs(later - later.mean(0)).max() > 1e-3


@pytest.mark.parametrize("table", ["full", "theta"])
def test_the_mean_is_that_of_the_table_after_each_step(table):
    """Test 5."""
    setup = settings(problem(), "saga", active=3, table=table, steps=90, delays=[RANDOM] * Q)
    for kind in (Plain, Simulation):
        sim = kind(setup, Draws(setup))
        sim.receive(setup.problem.theta(np.zeros(N), SIGNS))
        sim.restart(90, 0.0)
        for step in range(1, 91):
            sim.advance(step)
            for l, block in enumerate(setup.problem.blocks):
                if kind is Plain:
                    party = sim.parties[l]
                    mean, held = party.mean, party.table if table == "full" else party.theta
                else:
                    mine = slice(*sim.state.off[l : l + 2])
                    mean = sim.state.mean[mine]
                    held = sim.state.table[:, mine] if table == "full" else sim.state.kept[l]
                whole = held if table == "full" else held[:, None] * X[:, block]
                assert np.allclose(mean, whole.mean(0), rtol=0, atol=1e-14)


# --- fixed points and limits ----------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_fixed_points(method):
    """Test 14, first part."""
    start, told = RNG.standard_normal(D), dict(epochs=2, active=2, delays=RANDOM)
    run = simulate_parties(problem(), method, 0.0, start=start, **told)
    assert np.array_equal(run.w, start)
    null = Problem(X, X @ start, split_features(D, Q), "squared", 0.0)
    run = simulate_parties(null, method, 0.05, start=start, **told)
    assert np.allclose(run.w, start, rtol=0, atol=1e-13)
    assert np.abs(run.messages.theta).max() < 1e-13


@pytest.mark.parametrize("method", ["svrg", "saga"])
def test_least_squares_are_reached(method):
    """Test 14, second part: problem (17) has an answer in closed form."""
    task = problem("squared")
    best = np.linalg.solve(2 / N * X.T @ X + task.lam * np.eye(D), 2 / N * X.T @ TARGETS)
    assert np.allclose(task.gradient(best), 0, atol=1e-12)
    for told in ({}, dict(active=3, delays=Uniform(0, 3))):
        run = simulate_parties(task, method, 0.02, epochs=400, every=100, log=False, **told)
        assert np.allclose(run.w, best, atol=1e-10)


# --- baselines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_pooled_data_fast_is_pooled_data_plain(method):
    for task in (problem(), problem("squared", x=sparse.csr_array(X))):
        run = pooled(task, method, 0.05, epochs=3, table="full")
        same_path(run, task, method, 0.05)
        assert not any(run.counts.values())


def test_pooled_data_draws_by_its_seed():
    one, two = (pooled(problem(), "sgd", 0.05, steps=50, seed=seed) for seed in (1, 2))
    for run, seed in ((one, 1), (two, 2)):
        assert np.array_equal(run.messages.i, stream(seed, "sample", 0, 0).integers(N, size=50))
    assert not np.array_equal(one.messages.i, two.messages.i)


def test_afsvrg_with_one_active_party_is_svrg_on_its_features():
    """Test 10, first part."""
    task = problem()
    own = task.blocks[1]
    alone = Problem(X[:, own], SIGNS, (np.arange(len(own)),), "logistic", task.lam)
    run = afsvrg_vp(task, 0.1, active=[1], epochs=4, delays=RANDOM)
    path = centralised(alone, "svrg", 0.1, run.messages.i)
    assert np.allclose(run.w[own], path[-1], atol=1e-12)
    assert not np.delete(run.w, own).any() and run.counts["backward"] == 0


def test_afsvrg_with_several_ends_at_the_best_model_of_the_labelled_features():
    """Test 10, second part."""
    task = problem()
    own = np.sort(np.concatenate(task.blocks[:2]))
    alone = Problem(X[:, own], SIGNS, (np.arange(len(own)),), "logistic", task.lam)
    best = optimize.minimize(
        alone.objective, np.zeros(len(own)), jac=alone.gradient, tol=1e-14, method="BFGS"
    ).x
    assert np.abs(alone.gradient(best)).max() < 1e-7
    run = afsvrg_vp(task, 0.2, active=2, epochs=400, every=100, delays=Uniform(0, 2), log=False)
    assert np.allclose(run.w[own], best, atol=1e-6) and not np.delete(run.w, own).any()
    assert np.abs(alone.gradient(run.w[own])).max() < 1e-10
    assert np.abs(task.gradient(run.w)).max() > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_waiting_changes_nothing_with_one_active_party(method):
    """Test 11: VFB and VFB² with m = 1; a straggler costs VFB time and nothing else."""
    task = problem()
    told = dict(epochs=3, inner=25)
    run = simulate_parties(task, method, 0.05, **told)
    waited = synchronous(task, method, 0.05, **told)
    assert np.array_equal(waited.messages.i, run.messages.i)
    assert np.allclose(waited.messages.theta, run.messages.theta, rtol=0, atol=1e-13)
    assert np.allclose(waited.w, run.w, rtol=0, atol=1e-13)
    slow = synchronous(task, method, 0.05, compute=straggler(Q, 0, 0.4), **told)
    assert np.array_equal(slow.w, waited.w) and slow.rows[-1].time > 1.1 * waited.rows[-1].time


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("regulariser", ["l2", "nonconvex"])
def test_rounds_by_hand_and_compiled(method, regulariser):
    """m steps from one w, with SVRG and SGD as a formula; and the compiled rounds as the plain."""
    for x, trees in ((X, None), (sparse.csr_array(X), log_depth(Q))):
        task = problem("logistic", regulariser, x=x)
        told = dict(steps=47, inner=20, active=3, threads=2, delays=RANDOM, every=0.3, trees=trees)
        a, b = plain(task, method, 0.1, rounds=True, **told), synchronous(task, method, 0.1, **told)
        assert np.allclose(a.w, b.w, rtol=0, atol=1e-13)
        assert np.allclose(a.messages.theta, b.messages.theta, rtol=0, atol=1e-13)
        for one, two in zip(a.rows, b.rows, strict=True):
            assert one == pytest.approx(two, rel=1e-12)
    if method == "saga":
        return
    w, done, length = np.zeros(D), 0, 20 if method == "svrg" else 47
    while done < 47:
        if done % length == 0:
            anchor, full = w, task.gradient(w)
        size = min(3, length - done % length, 47 - done)
        i = b.messages.i[done : done + size]
        z = X[i] @ w
        assert np.allclose(b.messages.score[done : done + size], z, rtol=0, atol=1e-12)
        v = task.theta(z, SIGNS[i]) @ X[i] + size * task.penalty_gradient(w)
        if method == "svrg":
            v -= task.theta(X[i] @ anchor, SIGNS[i]) @ X[i]
            v -= size * (task.penalty_gradient(anchor) - full)
        w, done = w - 0.1 * v, done + size
    assert np.allclose(b.w, w, rtol=0, atol=1e-12)


def test_a_straggler_takes_so_much_longer():
    assert straggler(3, 1, 0.5).tolist() == [1, 1.5, 1]
    assert straggler(3, 1, 0.5, compute=2.0).tolist() == [2, 3, 2]


def test_the_clock_by_hand():
    """Two parties with 2 and 1 columns, one active; messages take 10, a column takes 1."""
    task = Problem(X[:, :3], SIGNS, (np.array([0, 1]), np.array([2])))
    told = dict(steps=3, delays=Deterministic(10.0))
    run = simulate_parties(task, "sgd", 0.1, **told)
    # request there at 10, score ready at 11, back at 21; own update until 23, then the next step
    assert run.messages.time.tolist() == [21, 44, 67]
    assert run.log.party.tolist() == [0, 1, 0, 1, 0, 1]
    assert run.log.time.tolist() == [21, 31, 44, 54, 67, 77]
    assert run.log.written.tolist() == [23, 32, 46, 55, 69, 78]
    assert [row.time for row in run.rows] == [0, 78]
    rounds = synchronous(task, "sgd", 0.1, **told)
    assert rounds.rows[-1].time == 3 * (21 + 11)
    svrg = simulate_parties(task, "svrg", 0.1, inner=2, **told)
    # a pass: 40 scores of 2 columns (80) or of 1 and a message (50); then the same work again
    assert svrg.messages.time.tolist() == [160 + 21, 160 + 44, 160 + 55 + 160 + 21]


def test_counts_and_speed_up():
    """Test 16."""
    run = simulate_parties(problem(), "svrg", 0.1, steps=50, inner=25, active=2, delays=RANDOM)
    assert run.counts == {"tree": 50 * 2 * 3, "backward": 50 * 3, "request": 50 * 3, "pass": 18}
    assert [row.epoch for row in run.rows] == [0, 50 / N + 1 - 10 / N + 1, 50 / N + 2]
    times = {}
    for q in (1, 2):
        rows = simulate_parties(problem(q=q), "sgd", 0.1, epochs=2, every=0.1).rows
        times[q] = time_to(rows, 0.6)
    assert speed_up(times)[1] == 1 and speed_up(times)[2] == times[1] / times[2] > 1
    assert time_to([Row(1.0, 0, 0, 0.5), Row(2.0, 0, 0, 0.4)], 0.45) == 2.0
    assert time_to([Row(1.0, 0, 0, np.nan)], 0.45) == np.inf
    assert time_to([Row(1.0, 0, 0, 0.5), Row(2.0, 0, 0, 0.4)], 0.5) == 1.0, "just reached"


# --- what does not fit ----------------------------------------------------------------------------


BLOCKS = split_features(D, 2)


def spoilt(row, column):
    x = X.copy()
    x[row, column] = np.nan
    return x


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(blocks=(np.arange(4), np.arange(5, D))), "Columns [4] are held by nobody"),
        (dict(blocks=(np.arange(6), np.arange(5, D))), "Columns [5] are held twice"),
        (dict(blocks=(np.arange(6), np.arange(6, D + 1))), "do not exist (there are 9)"),
        (dict(blocks=(np.arange(D), np.array([], int))), "Party 1 holds []"),
        (dict(blocks=3), "blocks are the columns of each party"),
        (dict(y=(SIGNS + 1) / 2), "labels -1 and +1; got 0, 1. From 0 and 1: 2 * y - 1."),
        (dict(y=SIGNS[1:]), "expected a number for each of 40 samples"),
        (dict(y=np.where(np.arange(N) == 3, np.nan, TARGETS), loss="squared"), "Label 3 is"),
        (dict(x=spoilt(5, 2)), "Feature 2 of sample 5 is nan. Fill missing values in"),
        (dict(x=sparse.csr_array(spoilt(5, 2))), "Feature 2 of sample 5 is nan."),
        (dict(x=X.astype(str)), "x is an array of numbers"),
        (dict(loss="logit"), "Did you mean 'logistic'"),
        (dict(regulariser="l1"), "Valid: l2, nonconvex, none"),
        (dict(lam=-1.0), "lam is a finite number of at least 0"),
    ],
)
def test_a_problem_that_is_none_says_why(change, says):
    told = dict(x=np.where(X == 0, 0.25, X), y=SIGNS, blocks=BLOCKS) | change
    with pytest.raises(FedlibError) as error:
        Problem(**told)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ([0, 2, 1, 4], "must be < 4. Columns are numbered from 0 to 3"),
        ([-1, 2, 1, 3], "must be >= 0"),
    ],
)
def test_sparse_columns_that_do_not_fit_say_so(columns, says):
    with pytest.raises(FedlibError) as error:
        Problem(two_rows(columns), np.array([1.0, -1.0]), split_features(4, 2))
    assert says in str(error.value)


def two_rows(columns):
    x = sparse.csr_array((2, 4))
    x.data, x.indices, x.indptr = np.arange(1.0, 5), np.array(columns), np.array([0, 1, 4])
    return x


def test_sparse_features_come_in_any_form_and_stay_as_they_came():
    for columns in ([0, 2, 1, 3], [0, 2, 3, 3]):
        x = two_rows(columns)
        made = Problem(x, np.array([1.0, -1.0]), split_features(4, 2)).x
        assert made.has_canonical_format and np.array_equal(made.toarray(), x.toarray())
        assert x.indices.tolist() == columns
    assert np.array_equal(Problem(sparse.csc_array(X), SIGNS, BLOCKS).x.toarray(), X)


def test_sparse_rows_may_be_empty_or_begin_before_the_last_ended():
    x = sparse.csr_array(np.array([[0, 0, 1.0], [0, 0, 0], [2.0, 0, 0], [0, 0, 0]]))
    assert Problem(x, np.array([1, -1, 1, -1]), split_features(3, 3)).x.nnz == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(active=0), "0 active parties of 4: at least one holds labels"),
        (dict(active=5), "5 active parties of 4"),
        (dict(active=[1, 1]), "none twice"),
        (dict(active=[]), "at least one"),
        (dict(bound=-1), "bound is a whole number of at least 0; got -1"),
        (dict(threads=0), "threads is a whole number of at least 1"),
        (dict(delays=1.0), "For a fixed time: Deterministic(1.0)"),
        (dict(delays=[RANDOM] * 3), "3 delay laws for 4 parties"),
        (dict(compute=[1, 2]), "2 times per feature for 4 parties"),
        (dict(compute=-1), "compute is a finite number of at least 0"),
        (dict(lr=-0.1), "lr is a finite number of at least 0"),
        (dict(method="adam"), "Unknown method 'adam'"),
        (dict(table="half"), "Unknown table"),
        (dict(mask=1e14), "wash the sum out"),
        (dict(epochs=1), "either epochs or steps"),
        (dict(inner=0, method="svrg"), "inner is a whole number of at least 1"),
        (dict(every=0), "every is a finite number"),
        (dict(start=np.zeros(3)), "start is (3,); expected [9]"),
        (dict(keep="all"), "Unknown thing to keep"),
        (dict(seed=-1), "seed is a whole number"),
    ],
)
def test_a_setting_that_does_not_fit_says_why(change, says):
    told = dict(method="sgd", lr=0.1, steps=5) | change
    with pytest.raises(FedlibError) as error:
        simulate_parties(problem(), **told)
    assert says in str(error.value)


def test_a_delay_is_never_negative():
    with pytest.raises(FedlibError, match="at least 0"):
        Deterministic(-1.0)
    class Early(Uniform):
        def draws(self, *names, size):
            return np.full(size, -1.0)

    with pytest.raises(FedlibError, match="A delay law gave -1"):
        simulate_parties(problem(), "sgd", 0.1, steps=5, delays=Early(0.0, 1.0))


def test_importing_compiles_nothing():
    spec = importlib.util.spec_from_file_location("anew", compiled.__file__)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found = [f for f in vars(module).values() if isinstance(f, CPUDispatcher)]
    assert len(found) > 5 and not any(f.signatures for f in found)
