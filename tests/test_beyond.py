"""Amplified merges against FedNova's merge, generalized FedAvg, and a loop written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.data import FederatedDataset
from fedlib.engine.draws import draw_one
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.job import Job
from fedlib.lab.studies import beyond as study
from fedlib.lab.studies.beyond import build_algorithm
from fedlib.papers.beyond import AmplifiedHierarchicalSGD
from fedlib.papers.hierarchy import HierarchicalSGD
from fedlib.papers.participation import GeneralizedFedAvg
from fedlib.population.delays import Deterministic, ShiftedExponential
from fedlib.population.participation import Cyclic, Full, Trace
from fedlib.schema import conform

ONE, QUICK = Deterministic(1.0), ShiftedExponential(0.5, 0.5)
SERVER = ShiftedExponential(2.0, 1.0)


def task_of(clients=6):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8 * clients, 5)), rng.integers(0, 3, 8 * clients)
    parts = np.split(np.arange(8 * clients), clients)
    return Task(models.mlp(5, 4, 3), FederatedDataset.build(torch.from_numpy(x), y, parts))


def states(algorithm, task, rounds, seeds=(3,), x=None):
    state, found = algorithm.init(task, seeds, x), []
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        found.append(state)
    return found


def test_without_amplification_it_is_hierarchical_sgd_bit_for_bit():
    settings = ((2, 4), 0.3, 4.0, 40.0, QUICK, SERVER, 2)
    plain, task = HierarchicalSGD(*settings), task_of()
    amplified = AmplifiedHierarchicalSGD(*settings, interval=2)
    rounds = plain.rounds((3,))
    for a, b in zip(states(plain, task, rounds), states(amplified, task, rounds), strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and a.clock == b.clock


@pytest.mark.parametrize(
    ("local", "counts"),
    [(ONE, [4, 4]), ((ONE, Deterministic(2.0)), [4, 2])],
    ids=["equal counts", "others"],
)
def test_amplification_by_the_mean_count_is_the_merge_of_fednova(local, counts):
    settings = ((2, 4), 0.3, 3.5, 40.0, local, ONE, 2)
    nova, task = HierarchicalSGD(*settings, merge="nova"), task_of()
    (line,) = nova.timelines((3,))
    assert (line.counts == counts).all()
    c = (2 * counts[0] + 4 * counts[1]) / 6
    amplified = AmplifiedHierarchicalSGD(*settings, amplify=c)
    for a, b in zip(states(nova, task, 5), states(amplified, task, 5), strict=True):
        assert_allclose(a.x, b.x, atol=1e-12)
    other = states(replace(amplified, amplify=c + 1.0), task, 5)[-1]
    assert abs(other.x - b.x).max() > 1e-3


@pytest.mark.parametrize(("groups", "interval"), [((3, 3), 1), ((2, 4), 3)])
def test_with_one_iteration_a_round_it_is_generalized_fedavg_of_all_clients(groups, interval):
    task = task_of()
    amplified = AmplifiedHierarchicalSGD(
        groups, 0.2, 0.0, 100.0, QUICK, SERVER, 2, amplify=2.5, interval=interval
    )
    whole = GeneralizedFedAvg(Full(6), 0.2, 2.5, interval, 1, 2)
    for a, b in zip(states(amplified, task, 7), states(whole, task, 7), strict=True):
        assert_allclose(a.x, b.x, atol=1e-12)
        assert_allclose(a.u, b.u, atol=1e-12)
        assert a.t0 == b.t0


def test_an_interval_counts_its_movement_eta_times_by_hand():
    task, settings = task_of(), ((2, 4), 0.3, 4.0, 60.0, QUICK, SERVER, 2)
    amplified = AmplifiedHierarchicalSGD(*settings, amplify=3.0, interval=2)
    plain = HierarchicalSGD(*settings)
    assert plain.rounds((3,)) >= 5
    x, moved, at = plain.init(task, (3,)), 0.0, []
    for t in range(5):
        before = x.x
        x, _ = plain.round(x, task)
        moved = moved + (x.x - before)
        if t % 2 == 1:
            x, moved = replace(x, x=x.x + 2.0 * moved), 0.0
        at.append(x.x)
    for hand, state in zip(at, states(amplified, task, 5), strict=True):
        assert_allclose(state.x, hand, atol=1e-13)


def test_a_round_makes_the_draws_it_is_given_and_tells_what_its_groups_did():
    task, settings = task_of(), ((2, 4), 0.3, 4.0, 60.0, QUICK, SERVER, 2)
    plain, amplified = HierarchicalSGD(*settings), AmplifiedHierarchicalSGD(*settings, amplify=3.0)
    x = task.init((3,))
    other = draw_one(plain, plain.init(task, (8,), x), task)
    after, told = plain.round(plain.init(task, (3,), x), task, other)
    mine, mine_told = amplified.round(amplified.init(task, (3,), x), task, other)
    assert_allclose(mine.x, x + 3.0 * (after.x - x), atol=1e-13)
    assert all((mine_told[name] == told[name]).all() for name in ("counts", "idle"))


def test_runs_side_by_side_are_those_alone_and_one_that_is_over_stays():
    task = task_of()
    many = AmplifiedHierarchicalSGD(
        (2, 4), 0.2, (0.0, 6.0), 30.0, QUICK, SERVER, 2, amplify=(2.0, 5.0), interval=3
    )
    rounds = [replace(many, sync=s, amplify=2.0).rounds((4,)) for s in many.sync]
    assert rounds[0] >= rounds[1] + 3 and rounds[1] % 3, "one ends early, within an interval"
    found = simulate(many, task, many.rounds((4, 4)), (4, 4), name=["a", "b"], progress=False)
    for r in (0, 1):
        own = replace(many, sync=many.sync[r], amplify=many.amplify[r])
        alone = simulate(own, task, rounds[r], (4,), progress=False).state
        assert_allclose(found.state.x[r], alone.x[0], atol=1e-14)


def test_a_checkpoint_goes_on_within_an_interval(tmp_path):
    task, end = task_of(), 5
    algorithm = AmplifiedHierarchicalSGD(
        (2, 4), 0.2, 6.0, 60.0, QUICK, SERVER, 2, amplify=4.0, interval=3
    )
    whole = simulate(algorithm, task, end, (4,), progress=False)
    options = dict(progress=False, checkpoint=Checkpoint(tmp_path / "c", 2))
    with pytest.raises(KeyboardInterrupt):
        simulate(algorithm, task, end, (4,), callbacks=[stop_after(4)], **options)
    again = simulate(algorithm, task, end, (4,), **options)
    assert torch.equal(whole.state.x, again.state.x) and whole.frame.equals(again.frame)


def stop_after(t):
    def callback(state, _):
        if state.t == t:
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(dict(amplify=0.0), "amplify"), (dict(amplify=(1.0, -1.0)), "amplify"),
     (dict(interval=0), "interval"), (dict(interval=1.5), "interval")],
)  # fmt: skip
def test_settings_out_of_range_are_named(wrong, words):
    with pytest.raises(FedlibError, match=words):
        AmplifiedHierarchicalSGD((2, 4), 0.2, 6.0, 60.0, QUICK, SERVER, 2, **wrong)


def run_of(**more):
    return dict(
        groups=[3, 3], delays=[0.0, 1.0, 0.0, 0.5, 0.0, 5.0, 0.0, 1.0], sync=3.0, time=30.0,
        lr=0.1, batch_size=2, looks=5, evaluate_on=10, **more,
    )  # fmt: skip


def test_a_study_s_runs_have_factors_of_their_own():
    runs = [run_of(amplify=2.0, interval=4), run_of(interval=4) | dict(lr=0.3)]
    algorithm = build_algorithm(runs, 2)
    assert algorithm.amplify == (2.0, 2.0, 1.0, 1.0) and algorithm.interval == 4
    assert algorithm.lr == (0.1, 0.1, 0.3, 0.3) and algorithm.merge == "normalised"


@pytest.mark.parametrize("other", [dict(asynchronous=True), dict(isolated=0)])
def test_a_study_refuses_groups_that_do_not_wait(other):
    with pytest.raises(FedlibError, match="leave out"):
        build_algorithm([run_of(amplify=2.0, **other)], 1)


def test_a_study_s_runs_are_those_alone_and_only_factors_share_a_batch(monkeypatch):
    runs = [dict(run="a", amplify=2.0), dict(run="b", amplify=5.0),
            dict(run="c", amplify=5.0, interval=3), dict(run="d", merge="nova")]  # fmt: skip
    settings = run_of(dataset="digits", split="labels", model=["softmax", 64, 10])

    def trained(some):
        frame = study.training(Job(settings | dict(runs=some), (3, 8), progress=False)).frame
        return frame.set_index(["run", "seed", "round", "split", "metric"])["value"]

    batches, build = [], study.build_algorithm
    monkeypatch.setattr(
        study, "build_algorithm", lambda own, n: batches.append(len(own)) or build(own, n)
    )
    whole = trained(runs)
    assert batches == [2, 1, 1]
    ends = []
    for run in runs:
        alone = trained([run])
        assert_allclose(whole.loc[run["run"]], alone.loc[run["run"]], atol=1e-6)
        ends.append(alone.loc[run["run"], 3, 5, "train", "loss"])
    assert len({round(end, 4) for end in ends}) == 4
    assert study.training.alike(settings) == {"seeds", "runs"}


@pytest.mark.parametrize("wrong", [dict(amplify=0.0), dict(interval=0), dict(interval=1.5)])
def test_settings_of_a_study_out_of_range_are_named(wrong):
    right = run_of(dataset="digits", split="labels", model=["softmax", 64, 10])
    right |= dict(kind="k", where="w", title="t", seeds=1)
    conform(right | dict(amplify=2.0, interval=3), study.Amplified, "here")
    with pytest.raises(FedlibError, match=next(iter(wrong))):
        conform(right | wrong, study.Amplified, "here")


# --- groups that come and go ----------------------------------------------------------------------

LEVELS, CENTRES = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.5, 4.0])


def bowls(levels=LEVELS, centres=CENTRES):
    """Client n has the loss a_n/2 (x - z_n)²: one sample, u x should be u z with u² = a."""
    u = np.sqrt(levels)
    data = FederatedDataset.build(u[:, None], u * centres, [[n] for n in range(len(u))])
    return Task(models.linear(1), data, "half_square")


def by_hand(there, merge, lr=0.2, eta=3.0, P=2, counts=(4, 2), x=0.0):
    """Two groups, the first of one client and the second of two, step by step."""
    sizes, u, path = (1, 2), 0.0, []
    groups = ([0], [1, 2])
    for t, here in enumerate(there):
        total = sum(sizes[i] for i in here)
        mean = sum(sizes[i] / total * counts[i] for i in here)
        d = 0.0
        for i in here:
            y = x
            for _ in range(counts[i]):
                y -= lr * sum(LEVELS[n] * (y - CENTRES[n]) for n in groups[i]) / sizes[i]
            factor = {"plain": 1, "normalised": 1 / counts[i], "nova": mean / counts[i]}[merge]
            d += sizes[i] / total * factor * (y - x)
        x, u = x + d, u + d
        if (t + 1) % P == 0:
            x, u = x + (eta - 1) * u, 0.0
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize("merge", ["plain", "normalised", "nova"])
@pytest.mark.parametrize("process", [Cyclic(2), Trace([[0.5, 0.5], [0, 1], [1, 0]])])
def test_groups_that_are_away_make_no_step_and_the_others_share_the_weight(merge, process):
    there = [np.flatnonzero(process.weights(0, t, t + 1)[0]) for t in range(7)]
    amplified = AmplifiedHierarchicalSGD(
        (1, 2), 0.2, 3.5, 40.0, (ONE, Deterministic(2.0)), ONE, None, merge,
        amplify=3.0, interval=2, availability=process,
    )  # fmt: skip
    task = bowls()
    found = states(amplified, task, 7, x=torch.zeros((1, 1), dtype=torch.float64))
    expected = by_hand(there, merge)
    assert_allclose([one.x.item() for one in found], expected, atol=1e-12)
    everybody = by_hand([(0, 1)] * 7, merge)
    assert abs(expected - everybody).max() > 0.1
    both = (amplified, replace(amplified, availability=None))
    line, whole = (one.timelines((0,))[0] for one in both)
    assert (line.end == whole.end).all() and (line.counts == 0).any()
    assert found[-1].cursor.tolist() == [np.repeat(line.counts[:7].sum(0), (1, 2)).tolist()]


def test_with_everybody_at_each_merge_availability_changes_nothing():
    settings = ((2, 4), 0.3, 4.0, 40.0, QUICK, SERVER, 2)
    task = task_of()
    for merge in ("plain", "nova", "normalised"):
        a = AmplifiedHierarchicalSGD(*settings, merge, amplify=2.0)
        b = replace(a, availability=Full(2))
        assert_allclose(states(a, task, 3)[-1].x, states(b, task, 3)[-1].x, atol=1e-14)


def test_availability_is_of_groups():
    with pytest.raises(FedlibError, match="6 groups, and there are 2"):
        AmplifiedHierarchicalSGD((2, 4), 0.2, 6.0, 60.0, QUICK, SERVER, availability=Cyclic(6))


def test_a_study_s_groups_come_and_go_as_it_says():
    assert build_algorithm([run_of(availability="cyclic")], 1).availability == Cyclic(2)
    assert build_algorithm([run_of()], 1).availability is None
    with pytest.raises(FedlibError, match=r"availability 'cycles'.*cyclic"):
        build_algorithm([run_of(availability="cycles")], 1)


def test_phases_are_the_runs_alone_at_each_rate_and_ratio():
    base = run_of(dataset="digits", split="labels", model=["softmax", 64, 10])
    both = dict(runs=[dict(run="nova", merge="nova"), dict(run="η", amplify=2.0)])
    s = base | both | dict(rates=[0.1, 0.2], ratios=[1.0, 4.0], shifts=[9.0, 2.0], time=20.0)
    frame = study.phases(Job(s, (3,), progress=False)).frame
    assert len(frame.groupby(["method", "at", "ratio"])) == 8
    alone = run_of(dataset="digits", split="labels", model=["softmax", 64, 10])
    alone |= dict(shifts=[0.5, 2.0], time=20.0, lr=0.2, amplify=2.0, runs=[dict(run="η")])
    one = study.training(Job(alone, (3,), progress=False)).frame
    same = frame[(frame["method"] == "η") & (frame["at"] == 0.2) & (frame["ratio"] == 4.0)]
    assert (same["run"] == "η @ 0.2, 4").all()
    assert_allclose(same["value"], one["value"], atol=1e-6)
