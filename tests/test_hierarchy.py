"""Delay-sensitive hierarchical SGD against loops, closed forms and hand-computed clocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.data import FederatedDataset
from fedlib.engine.mixing import mix
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.hierarchy.algorithm import HierarchicalSGD, weights
from fedlib.papers.hierarchy.clock import timeline
from fedlib.population.delays import Deterministic, ShiftedExponential

ONE, QUICK = Deterministic(1.0), ShiftedExponential(0.5, 0.5)
SERVER = ShiftedExponential(2.0, 1.0)


def task_of(clients=6, samples=8, seed=0, unequal=False, model=None):
    """Softmax regression in float64, clients of equal or unequal size."""
    rng = np.random.default_rng(seed)
    n = clients * samples
    x, y = rng.normal(size=(n, 5)), rng.integers(0, 3, n)
    cuts = np.sort(rng.choice(np.arange(4, n, 4), clients - 1, replace=False)) if unequal else None
    rows = np.arange(n)
    parts = np.split(rows, cuts) if unequal else np.split(rows, clients)
    data = FederatedDataset.build(torch.from_numpy(x), y, parts)
    return Task(model or models.mlp(5, 4, 3), data)


def states(algorithm, task, rounds, seeds=(0,)):
    state, found = algorithm.init(task, seeds), []
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        found.append(state)
    return found


def loop(algorithm, task, seed, r=0):
    """Algorithm 1, client by client, with autograd on a plain loss; yields x and all y."""
    G, sizes = len(algorithm.groups), algorithm.groups
    of = np.repeat(np.arange(G), sizes)
    x, cursor = task.init([seed])[0], np.zeros((1, task.N), dtype=np.int64)
    line = algorithm.timelines([seed])[0]
    lr = algorithm.lr if np.ndim(algorithm.lr) == 0 else algorithm.lr[r]
    for counts in line.counts:
        ys, moved = [], torch.zeros_like(x)
        for i, t in enumerate(counts):
            y = x.clone()
            for _ in range(t):
                after = []
                for n in np.flatnonzero(of == i):
                    batches, cursor = task.data.next_batches(
                        (seed,), torch.tensor([[n]]), cursor, 1, algorithm.batch_size
                    )
                    at = y.clone().unsqueeze(0).requires_grad_()
                    (g,) = torch.autograd.grad(task.losses(at, batches[0]).sum(), at)
                    after.append(y - lr * g[0])
                y = torch.stack(after).mean(0)
            ys.append(y)
            moved += sizes[i] / sum(sizes) * (y - x) / t
        x = x + moved
        yield x, torch.stack(ys)


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("groups", [(3, 3), (1, 5), (6,), (1, 2, 3)])
def test_joined_batches_equal_clients_one_after_the_other(groups, batch_size):
    task = task_of(unequal=batch_size is None)
    algorithm = HierarchicalSGD(groups, 0.3, 2.0, 20.0, QUICK, SERVER, batch_size)
    slow = list(loop(algorithm, task, 3))
    fast = states(algorithm, task, len(slow), (3,))
    assert max(max(line.counts.ravel()) for line in algorithm.timelines((3,))) > 1
    for (x, y), state in zip(slow, fast, strict=True):
        assert_allclose(state.x[0], x, atol=1e-12)
        assert_allclose(state.y[0], y, atol=1e-12)


def test_runs_side_by_side_are_those_alone_whatever_their_seeds_rates_and_sync_times():
    task = task_of()
    many = HierarchicalSGD(
        (2, 4), (0.1, 0.2, 0.3, 0.3), (0.0, 2.0, 5.0, 5.0), 15.0, QUICK, SERVER, 2,
        grow=(0.0, 0.0, 0.0, 1.0),
    )  # fmt: skip
    seeds = (4, 4, 4, 7)
    together = simulate(many, task, many.rounds(seeds), seeds, name=list("abcd"), progress=False)
    for r, seed in enumerate(seeds):
        own = replace(many, lr=many.lr[r], sync=many.sync[r], grow=many.grow[r])
        alone = simulate(own, task, own.rounds((seed,)), (seed,), progress=False).state
        assert together.state.clock[r] == alone.clock[0] >= 15.0
        assert_allclose(together.state.x[r], alone.x[0], atol=1e-14)
        assert_allclose(together.state.y[r], alone.y[0], atol=1e-14)


def test_no_sync_time_is_synchronous_sgd_over_all_clients():
    task = task_of(unequal=True)
    everyone = Task(task.model, FederatedDataset.build(task.data.x, task.data.y, task.data.parts))
    found = states(HierarchicalSGD((1, 2, 3), 0.5, 0.0, 30.0, QUICK, SERVER), task, 5)
    x = task.init((0,))
    for state in found:
        x = x - 0.5 * everyone.client_gradients(x[0]).mean(0)
        assert_allclose(state.x, x, atol=1e-13)


def test_one_group_moves_by_its_mean_step_and_does_not_deviate_without_sync_time():
    task = task_of()
    start = HierarchicalSGD((6,), 0.5, 0.0, 30.0, QUICK, SERVER, 2)
    for state in states(start, task, 4):
        assert_allclose(state.x, state.y[:, 0], atol=1e-15)
    longer, before = replace(start, sync=3.0), start.init(task, (0,))
    for state, t in zip(states(longer, task, 4), longer.timelines((0,))[0].counts, strict=False):
        assert t[0] > 1
        assert_allclose(state.x - before.x, (state.y[:, 0] - before.x) / t[0], atol=1e-15)
        before = state


def test_identical_groups_coincide_when_their_counts_agree():
    x, y = np.random.default_rng(0).normal(size=(4, 5)), np.array([0, 1, 2, 0])
    data = FederatedDataset.build(np.tile(x, (3, 1)), np.tile(y, 3), np.split(np.arange(12), 3))
    task = Task(models.softmax(5, 3), data)
    algorithm = HierarchicalSGD((1, 1, 1), 0.4, 3.0, 60.0, QUICK, SERVER)
    counts, same = algorithm.timelines((1,))[0].counts, 0
    for state, t in zip(states(algorithm, task, len(counts), (1,)), counts, strict=True):
        for i in range(3):
            for j in range(i):
                gap = (state.y[0, i] - state.y[0, j]).abs().max()
                assert gap < 1e-14 if t[i] == t[j] else gap > 1e-4
                same += int(t[i] == t[j])
    assert 0 < same < 3 * len(counts)


def test_quadratics_follow_their_closed_form():
    """Clients with half squares around their mean: A = I and x_l - x* = (1 - α)^l (x - x*)."""
    points = np.random.default_rng(2).normal(size=(6, 3))
    task = Task(models.location(3), FederatedDataset.build(points, None, np.split(np.arange(6), 6)),
                "half_square")  # fmt: skip
    algorithm = HierarchicalSGD((2, 4), 0.3, 3.0, 40.0, QUICK, SERVER)
    best = torch.stack([torch.from_numpy(points[:2]).mean(0), torch.from_numpy(points[2:]).mean(0)])
    x = task.init((5,))
    for state, t in zip(
        states(algorithm, task, 6, (5,)), algorithm.timelines((5,))[0].counts, strict=False
    ):
        shrunk = torch.from_numpy((1 - 0.3) ** t).unsqueeze(1)
        assert_allclose(state.y[0], best + shrunk * (x - best), atol=1e-13)
        x = state.x


def test_a_step_with_the_mean_gradient_is_the_mean_of_the_steps():
    task = task_of(unequal=True)
    theta = task.init((0,)).repeat(6, 1)
    steps = theta - 0.7 * task.client_gradients(theta[0])
    blocks = torch.block_diag(*(torch.full((1, n), 1 / n, dtype=torch.double) for n in (1, 5)))
    mean = mix(steps, blocks)[0]
    one = states(HierarchicalSGD((1, 5), 0.7, 0.0, 9.0, ONE, ONE), task, 1)[0]
    assert_allclose(one.y[0], mean, atol=1e-14)


def test_merges_coincide_exactly_where_they_must():
    ones, equal = np.ones((1, 3), dtype=int), np.full((1, 3), 4)
    for counts, pairs in (
        (ones, [("plain", "nova"), ("plain", "normalised")]),
        (equal, [("plain", "nova")]),
    ):
        for a, b in pairs:
            assert_allclose(
                weights(a, (1, 2, 3), counts), weights(b, (1, 2, 3), counts), rtol=1e-15
            )
    mixed = np.array([[1, 4]])
    assert_allclose(weights("normalised", (1, 3), mixed), [[1 / 4, 3 / 16]])
    assert_allclose(weights("plain", (1, 3), mixed), [[1 / 4, 3 / 4]])
    assert_allclose(weights("nova", (1, 3), mixed), [[13 / 16, 39 / 64]])
    for merge in ("normalised", "plain", "nova"):
        assert (weights(merge, (1, 3), np.zeros((1, 2), dtype=int)) == 0).all()


def test_plain_merging_returns_the_weighted_mean_of_the_groups():
    task = task_of()
    for state in states(
        HierarchicalSGD((2, 4), 0.4, 4.0, 40.0, QUICK, SERVER, 2, "plain"), task, 4
    ):
        assert_allclose(state.x[0], state.y[0, 0] / 3 + 2 * state.y[0, 1] / 3, atol=1e-14)


def test_isolated_groups_are_one_round():
    task, algorithm = task_of(), HierarchicalSGD((2, 4), 0.1, 12.0, 12.0, QUICK, SERVER, 2)
    assert algorithm.rounds((0, 1, 2)) == 1
    after = states(algorithm, task, 3, (0, 1))
    assert torch.equal(after[0].x, after[2].x) and torch.equal(after[0].y, after[2].y)
    assert (after[0].clock == after[2].clock).all() and (after[0].clock >= 12).all()


def test_a_run_that_is_over_rests_while_another_goes_on():
    task = task_of()
    algorithm = HierarchicalSGD((3, 3), 0.1, (0.0, 20.0), 20.0, QUICK, SERVER, 2)
    found = states(algorithm, task, 3, (0, 0))
    assert torch.equal(found[0].x[1], found[2].x[1])
    assert not torch.equal(found[1].x[0], found[2].x[0])
    assert (found[0].cursor[1] == found[2].cursor[1]).all()


def test_relabelling_clients_and_groups_changes_nothing():
    rng = np.random.default_rng(0)
    x, y, parts = rng.normal(size=(24, 5)), rng.integers(0, 3, 24), np.split(np.arange(24), 6)
    law = (Deterministic(1.0), Deterministic(0.4))
    ends = []
    for order, groups, local in (
        ([0, 1, 2, 3, 4, 5], (2, 4), law),
        ([1, 0, 5, 3, 2, 4], (2, 4), law),  # inside the groups
        ([2, 3, 4, 5, 0, 1], (4, 2), law[::-1]),  # the groups
    ):
        task = Task(models.mlp(5, 4, 3), FederatedDataset.build(x, y, [parts[n] for n in order]))
        algorithm = HierarchicalSGD(groups, 0.3, 2.0, 30.0, local, ONE)
        ends.append(states(algorithm, task, 5)[-1].x)
    assert_allclose(ends[1], ends[0], atol=1e-12)
    assert_allclose(ends[2], ends[0], atol=1e-12)


def test_swapped_panels_have_the_same_trajectory():
    """Figure 10: with exact gradients only which group is slow and how large it is counts."""
    task = task_of(samples=4)
    slow, fast = ShiftedExponential(7.0, 0.7), ShiftedExponential(1.0, 0.1)
    data = FederatedDataset.build(
        task.data.x, task.data.y, task.data.parts[2:] + task.data.parts[:2]
    )
    a = HierarchicalSGD((2, 4), 0.3, 8.0, 60.0, (Deterministic(7.5), Deterministic(1.1)), ONE)
    b = HierarchicalSGD((4, 2), 0.3, 8.0, 60.0, (Deterministic(1.1), Deterministic(7.5)), ONE)
    first, second = states(a, task, 4)[-1], states(b, Task(task.model, data), 4)[-1]
    assert_allclose(first.x, second.x, atol=1e-12)
    lines = [timeline(s, 8.0, 500.0, laws, SERVER) for s in range(200)
             for laws in ([slow, fast], [fast, slow])]  # fmt: skip
    means = np.array([line.counts.mean(0) for line in lines]).reshape(200, 2, 2)
    spread = means[:, 0].std(0) / math.sqrt(200)
    assert (abs(means[:, 0].mean(0) - means[:, 1].mean(0)[::-1]) < 4 * spread + 1e-9).all()


def test_the_printed_delays_of_figure_8_make_all_its_schemes_one():
    task = task_of(clients=4)
    local, server = ShiftedExponential(86.4, 8.64), ShiftedExponential(18.0, 3.0)
    many = HierarchicalSGD((1,) * 4, 0.1, (0.0, 12.0, 24.0), 600.0, local, server, 2)
    history = simulate(
        many, task, many.rounds((1,) * 3), (1,) * 3, name=list("abc"), progress=False
    )
    assert torch.equal(history.state.x[0], history.state.x[1])
    assert torch.equal(history.state.x[0], history.state.x[2])
    assert all((line.counts == 1).all() for line in many.timelines((1,) * 3))


# ---------------------------------------------------------------- the clock


@pytest.mark.parametrize("S", [0.0, 0.5, 3.0, 5.0])
def test_fixed_delays_give_the_hand_computed_counts(S):
    c, server = (0.5, 2.0, 0.1), 1.5
    line = timeline(0, S, 100.0, [Deterministic(v) for v in c], Deterministic(server))
    counts = [max(1, math.ceil(round(S / v, 9))) for v in c]
    lasts = max(n * v for n, v in zip(counts, c, strict=True)) + server
    assert (line.counts == counts).all()
    assert len(line.end) == math.ceil(round(100.0 / lasts, 9))
    assert_allclose(np.diff(line.end), lasts)
    assert_allclose(line.idle[0], max(lasts - server, 0) - np.array(counts) * c, atol=1e-12)


@pytest.mark.parametrize("S", [0.0, 2.0, 7.5])
def test_groups_stop_at_the_first_iteration_that_reaches_the_sync_time(S):
    laws = [ShiftedExponential(0.5, 0.2), ShiftedExponential(0.1, 1.0)]
    line, first = timeline(3, S, 300.0, laws, SERVER), [0, 0]
    for u, counts in enumerate(line.counts):
        for i, t in enumerate(counts):
            own = line.local[i][first[i] : first[i] + t]
            first[i] += t
            assert own.sum() == pytest.approx(line.busy[u, i])
            assert own.sum() >= S * (1 - 1e-12)
            assert own[:-1].sum() < S or t == 1
            assert t <= max(1, math.ceil(S / laws[i].shift))
    assert [len(part) for part in line.local] == first == line.counts.sum(0).tolist()


def test_the_clock_is_the_sum_of_its_parts_and_ends_with_the_round_that_reaches_the_time():
    line = timeline(1, 4.0, 90.0, [QUICK, QUICK], SERVER)
    assert_allclose(line.end, np.cumsum(line.busy.max(1) + line.exchange), rtol=1e-13)
    assert (np.diff(line.end) > 0).all() and line.end[-1] >= 90.0 > line.end[-2]
    assert (line.idle.min(1) == 0).all() and (line.idle >= 0).all()


def test_a_delay_is_the_same_whatever_the_sync_time():
    few, many = (timeline(2, S, 200.0, [QUICK, QUICK], SERVER) for S in (1.0, 6.0))
    for a, b in zip(few.local, many.local, strict=True):
        n = min(len(a), len(b))
        assert n > 20 and (a[:n] == b[:n]).all()
    n = min(len(few.exchange), len(many.exchange))
    assert (few.exchange[:n] == many.exchange[:n]).all()


def test_delays_differ_by_seed_and_group_and_from_round_to_round():
    a, b = (timeline(seed, 1.0, 50.0, [QUICK, QUICK], SERVER) for seed in (0, 1))
    assert a.local[0][0] != b.local[0][0] and a.exchange[0] != b.exchange[0]
    assert a.local[0][0] != a.local[1][0]
    assert len(set(a.local[0])) == len(a.local[0]) and len(set(a.exchange)) == len(a.exchange)
    alone = QUICK.draws(0, "exchange", size=5)
    assert not np.isin(alone, a.local[0]).any()


def test_more_sync_time_and_slower_exchanges_mean_fewer_rounds():
    for law, server in (
        (Deterministic(0.7), Deterministic),
        (QUICK, lambda c: ShiftedExponential(c, 1.0)),
    ):
        by_sync = [np.mean([len(timeline(s, S, 200.0, [law, law], server(3.0)).end)
                            for s in range(20)]) for S in (0, 1, 2, 4, 8, 16)]  # fmt: skip
        by_server = [np.mean([len(timeline(s, 4.0, 200.0, [law, law], server(c)).end)
                              for s in range(20)]) for c in (1.0, 5.0, 10.0, 30.0)]  # fmt: skip
        assert (np.diff(by_sync) <= 0).all() and by_sync[0] > by_sync[-1]
        assert (np.diff(by_server) < 0).all()


@pytest.mark.parametrize("factor", [2.0, 0.25, 3.0])
def test_other_units_of_time_change_no_count(factor):
    def line(k):
        laws = [ShiftedExponential(0.5 * k, 0.2 * k), ShiftedExponential(0.1 * k, k)]
        return timeline(3, 4.0 * k, 200.0 * k, laws, ShiftedExponential(2 * k, k))

    assert (line(1.0).counts == line(factor).counts).all()
    assert_allclose(line(factor).end, factor * line(1.0).end)


def test_growing_sync_times():
    law = [Deterministic(1.0)]
    line = timeline(0, 5.0, 100.0, law, ONE, grow=1.0)
    assert line.counts[:8, 0].tolist() == [1, 2, 3, 4, 5, 5, 5, 5]
    one, fixed = (
        timeline(0, 1.0, 50.0, [QUICK], SERVER, grow=1.0),
        timeline(0, 1.0, 50.0, [QUICK], SERVER),
    )
    assert (one.end == fixed.end).all()


@pytest.mark.parametrize("S", [12.0, 30.0])
def test_a_sync_time_of_at_least_the_system_time_is_one_round(S):
    assert len(timeline(0, S, 12.0, [QUICK, ONE], SERVER).end) == 1


class Endless:
    """A law with infinite mean."""

    expected = math.inf

    def draws(self, seed, name, *keys, size):
        return np.ones(size)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict(sync=-1.0), "sync is a finite number of at least 0"),
        (dict(sync=math.nan), "sync is a finite number of at least 0"),
        (dict(time=0.0), "time is the system time, positive"),
        (dict(time=math.inf), "time is the system time, positive"),
        (dict(grow=-1.0), "grow is a finite number of at least 0"),
        (dict(local=Endless()), "mean inf"),
        (dict(server=Endless()), "mean inf"),
        (dict(server=3.0), "server is a delay law"),
        (dict(local=Deterministic(0.0)), "no end to them"),
        (dict(local=(ONE,)), "1 delay laws for 2 groups"),
        (dict(groups=()), "number of clients of each group"),
        (dict(groups=(3, 0)), "clients of group 1 is a whole number of at least 1"),
        (dict(groups=(3, 2.5)), "clients of group 1 is a whole number"),
        (dict(lr=0.0), "lr must be positive"),
        (dict(batch_size=0), "batch_size is a whole number"),
        (dict(merge="mean"), "merge"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(changed, says):
    good = dict(groups=(3, 3), lr=0.1, sync=1.0, time=9.0, local=ONE, server=SERVER, batch_size=2)
    with pytest.raises(FedlibError, match=says):
        HierarchicalSGD(**{**good, **changed})


def test_groups_that_do_not_fit_the_clients_are_refused():
    with pytest.raises(FedlibError, match="have 5 clients, the data 6"):
        HierarchicalSGD((2, 3), 0.1, 1.0, 9.0, ONE, SERVER).init(task_of(), (0,))


def test_a_clock_that_never_moves_is_refused():
    with pytest.raises(FedlibError, match="would never move"):
        timeline(0, 0.0, 9.0, [Deterministic(0.0)], Deterministic(0.0))


def test_what_treats_clients_apart_is_refused():
    from torch import nn

    from fedlib.engine.model import Model

    tasks = [
        task_of(model=Model(nn.Sequential(nn.Linear(5, 4), layer, nn.Linear(4, 3))))
        for layer in (nn.Dropout(), nn.BatchNorm1d(4))
    ]
    images = np.zeros((6, 3, 32, 32), dtype=np.float32)
    data = FederatedDataset.build(images, np.arange(6), np.split(np.arange(6), 6), augment=True)
    tasks.append(Task(models.lenet((3, 32, 32), 6), data))
    for task in tasks:
        with pytest.raises(FedlibError, match="joined minibatches"):
            HierarchicalSGD((3, 3), 0.1, 1.0, 9.0, ONE, SERVER).init(task, (0,))


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path):
    task, kept = task_of(), Checkpoint(tmp_path / "run.pt", 2)
    algorithm = HierarchicalSGD((2, 4), 0.2, 3.0, 30.0, QUICK, SERVER, 2)
    options = dict(progress=False, checkpoint=kept)
    rounds = algorithm.rounds((0, 1))

    def stop(state, _):
        if state.t == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(algorithm, task, rounds, (0, 1), callbacks=[stop], **options)
    resumed = simulate(algorithm, task, rounds, (0, 1), **options)
    whole = simulate(algorithm, task, rounds, (0, 1), progress=False)
    assert torch.equal(resumed.state.x, whole.state.x) and torch.equal(
        resumed.state.y, whole.state.y
    )
    assert resumed.frame.equals(whole.frame)
    assert (resumed.frame.groupby("seed")["clock"].max() >= 30).all()
