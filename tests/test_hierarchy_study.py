"""What the hierarchy chapter runs: splits between groups, even times, groups alone, gradients."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
from test_hierarchy import QUICK, SERVER, states, task_of

from fedlib import datasets
from fedlib.engine.draws import draw_one
from fedlib.engine.simulation import History
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, records
from fedlib.lab.job import Job
from fedlib.lab.studies import hierarchy as study
from fedlib.lab.studies import hierarchy_theorems as theorems
from fedlib.papers.hierarchy import AsyncHierarchicalSGD, HierarchicalSGD, arrivals, theory
from fedlib.papers.hierarchy.clock import Timeline
from fedlib.population.delays import Deterministic

LABELS = np.random.default_rng(0).integers(0, 10, 4000)
HELD = SimpleNamespace(train_y=LABELS)
SPLITS = [split for split in study.GROUP_SPLITS if split != "owners"]


def dealt(seed=1, **settings):
    return study.deal(HELD, dict(groups=[4, 8]) | settings, seed)


@pytest.mark.parametrize("split", SPLITS)
def test_every_sample_goes_to_one_client_anew_for_each_seed(split):
    parts, other = (dealt(seed, split=split, alpha=5.0) for seed in (1, 2))
    assert len(parts) == 12
    assert (np.sort(np.concatenate(parts)) == np.arange(len(LABELS))).all()
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(parts, other, strict=True))
    again = dealt(1, split=split, alpha=5.0)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_groups_with_labels_of_their_own_share_none_and_clients_hold_few():
    parts = dealt(split="labels")
    held = [set(LABELS[part]) for part in parts]
    first, second = set.union(*held[:4]), set.union(*held[4:])
    assert not first & second and len(first) == len(second) == 5
    assert max(map(len, held)) <= 4  # two shards, each within a label or on the border of two
    assert set.union(*(set(LABELS[p]) for p in dealt(2, split="labels")[:4])) != first


def test_inside_a_group_of_dirichlet_data_clients_are_alike():
    parts = dealt(split="groups", alpha=0.1)
    share = [np.bincount(LABELS[part], minlength=10) / len(part) for part in parts]
    inside = max(np.abs(share[i] - share[0]).max() for i in range(4))
    between = np.abs(np.mean(share[:4], 0) - np.mean(share[4:], 0)).max()
    assert inside < 0.15 < 0.2 < between
    sizes = [len(part) for part in parts]
    assert max(sizes[:4]) - min(sizes[:4]) <= 1 and max(sizes[4:]) - min(sizes[4:]) <= 1


def test_alpha_says_how_unlike_the_clients_are():
    alike, unlike = (dealt(split="dirichlet", alpha=alpha) for alpha in (1e6, 0.1))
    shares = [np.bincount(LABELS[part], minlength=10) / np.bincount(LABELS) for part in alike]
    assert_allclose(shares, 1 / 12, atol=0.01)
    assert np.ptp([len(part) for part in unlike]) > 100


def test_a_group_alone_has_its_own_clients():
    whole = dealt(split="groups")
    for i, rows in enumerate((whole[:4], whole[4:])):
        alone = dealt(split="groups", isolated=i)
        assert all((a == b).all() for a, b in zip(alone, rows, strict=True))


def test_owners_become_clients_other_ones_for_each_seed():
    held = datasets.load("writers-digits", progress=False)
    every = [set(part) for part in datasets.owners(held).train_parts]
    s = dict(groups=[3, 5], split="owners")
    first, second = (study.deal(held, s, seed) for seed in (1, 2))
    who = [every.index(set(part)) for part in first]
    assert len(set(who)) == 8 and who != [every.index(set(part)) for part in second]
    with pytest.raises(FedlibError, match="41 clients, and rows of 40 owners"):
        study.deal(held, s | dict(groups=[41]), 1)
    s |= dict(dataset="writers-digits", owners=10, per_owner=[20, 3], model=["softmax", 64, 10])
    task, _ = study.build_task(s, (1, 2))
    most = np.sort(datasets.owners(held).sizes)[::-1][:10]
    assert len(task.data.y) == np.minimum(most, 20).sum() and len(task.data.test_y) == 30


def test_an_unknown_split_is_named():
    with pytest.raises(FedlibError, match="dirichlet"):
        dealt(split="diriclet")


def test_a_group_alone_is_one_that_never_meets_the_others():
    task = task_of()
    apart = HierarchicalSGD((2, 4), 0.2, 15.0, 15.0, QUICK, SERVER, 2)
    data = type(task.data).build(task.data.x, task.data.y, task.data.parts[:2])
    s = dict(groups=[2, 4], delays=[0, 0.5, 0, 0.5, 0, 2, 0, 1], isolated=0, time=15.0, looks=3)
    alone = study.build_algorithm([s | dict(lr=0.2, sync=9.0, batch_size=2)], 1)
    assert alone.local[0] == QUICK and alone.server == Deterministic(0.0)
    own, every = type(task)(task.model, data), replace(alone, sync=0.0)
    fine = states(every, own, every.rounds((3,)) + 10, (3,))
    whole = apart.timelines((3,))[0].counts[0, 0]
    assert_allclose(fine[whole - 1].x, states(apart, task, 1, (3,))[0].y[:, 0], atol=1e-13)
    done = alone.timelines((3,))[0].counts[:, 0].cumsum()
    assert 4 < len(done) < done[-1]
    for state, n in zip(states(alone, own, len(done), (3,)), done, strict=True):
        if n <= whole:  # then the finer run is over
            assert_allclose(state.x, fine[n - 1].x, atol=1e-13)


def test_rows_at_even_times_hold_the_last_completed_round():
    rows = [
        dict(run="a", seed=7, round=u, clock=0.0, split="test", metric="accuracy", value=float(u))
        for u in range(4)
    ]
    rows[1]["value"] = 0.0  # round 1 was another run's look; where a run was not due stand zeros
    line = Timeline(
        np.ones((3, 1), int), np.ones((3, 1)), np.ones(3), np.array([3.0, 4.0, 11.0]), ()
    )
    history = History(pd.DataFrame(rows), None, {("a", 7): 2})
    frame, lost = study.on_time(history, "a", (7,), [line], 10.0, 5)
    told = frame[frame["split"] == "test"]
    assert told["clock"].tolist() == [0, 2, 4, 6, 8, 10]
    assert told["value"].tolist() == told["rounds"].tolist() == [0, 0, 2, 2, 2, 2]
    assert told["round"].tolist() == list(range(6)) and lost == {7: 2}
    whole = frame[frame["split"] == "clock"].set_index("metric")["value"]
    assert whole["rounds"] == 3 and whole["round length"] == pytest.approx(11 / 3)


def test_delay_laws_come_from_the_eight_numbers_or_from_what_replaces_them():
    s = dict(delays=[0.1, 1.4, 0.01, 0.14, 4.0, 2.0, 0.5, 1.0], groups=[10, 20])
    (a, b), server = study.delay_laws(s)
    assert (a.shift, a.mean, b.shift, b.mean) == pytest.approx((2.4, 0.24, 3.4, 0.34))
    assert (server.shift, server.mean) == pytest.approx((10.0, 2.0))
    (a, b), server = study.delay_laws(s | dict(shifts=[1.0, 7.0], server_shift=30.0))
    assert (a.shift, a.mean, b.shift, b.mean) == pytest.approx((1.0, 0.1, 7.0, 0.7))
    assert (server.shift, server.mean) == pytest.approx((30.0, 2.0))


TRAINED = dict(
    dataset="digits", model=["softmax", 64, 10], groups=[2, 4], split="groups", alpha=5.0,
    delays=[0, 0.5, 0, 0.5, 0, 2, 0, 1], sync=2.0, time=12.0, lr=0.1, batch_size=4, looks=3,
    evaluate_on=10_000, watch=True,
)  # fmt: skip
BY_HAND = {
    "slow": ({}, HierarchicalSGD((2, 4), 0.1, 2.0, 12.0, QUICK, SERVER, 4)),
    "fast": (dict(lr=0.5, sync=0.0), HierarchicalSGD((2, 4), 0.5, 0.0, 12.0, QUICK, SERVER, 4)),
    "plain": (
        dict(merge="plain"), HierarchicalSGD((2, 4), 0.1, 2.0, 12.0, QUICK, SERVER, 4, "plain")
    ),
    "apart": (
        dict(asynchronous=True, decay=0.5),
        AsyncHierarchicalSGD((2, 4), 0.1, 2.0, 12.0, QUICK, SERVER, 4, decay=0.5),
    ),
    "alone": (
        dict(isolated=1),
        HierarchicalSGD((4,), 0.1, 2.0, 12.0, QUICK, Deterministic(0.0), 4, "plain"),
    ),
}  # fmt: skip


def losses_and_hits(theta, x, y):
    """Softmax regression of the digits, sample by sample."""
    out = x.flatten(1).double() @ theta[:640].view(10, 64).double().T + theta[640:].double()
    loss = torch.nn.functional.cross_entropy(out, y, reduction="none")
    return loss.numpy(), (out.argmax(1) == y).double().numpy()


def test_runs_of_a_training_are_those_of_each_alone_by_hand():
    runs = [dict(run=name, **changes) for name, (changes, _) in BY_HAND.items()]
    frame = study.training(Job(TRAINED | dict(runs=runs), (3, 8), progress=False)).frame
    told = frame.set_index(["run", "seed", "split", "metric", "round"])["value"].sort_index()
    for name, (changes, algorithm) in BY_HAND.items():
        for seed in (3, 8):
            task = study.build_task(TRAINED | changes, [seed])[0]
            line, data = algorithm.timelines((seed,))[0], task.data
            done = (line.end <= 12.0).sum()
            state = [algorithm.init(task, (seed,)), *states(algorithm, task, done, (seed,))][-1]
            mine = told[name, seed]
            loss, hit = losses_and_hits(state.x[0], data.test_x, data.test_y)
            assert mine["test", "loss", 3] == pytest.approx(loss.mean(), rel=1e-4)
            assert mine["test", "accuracy", 3] == pytest.approx(hit.mean(), abs=0.004)
            loss, _ = losses_and_hits(state.x[0], data.x, data.y)
            if name == "alone":  # on rows of its own
                loss = np.array([loss[rows].mean() for rows in data.of(seed).parts])
            assert mine["train", "loss", 3] == pytest.approx(loss.mean(), rel=1e-4)
            assert mine["clock", "rounds", 0] == len(line.end)
            for i, y in enumerate(state.y[0]):
                _, hit = losses_and_hits(y, data.test_x, data.test_y)
                assert mine[f"group {i}", "accuracy", 3] == pytest.approx(hit.mean(), abs=0.004)
                made = line.counts[line.counts[:, i] > 0, i].mean()
                assert mine["clock", f"iterations of group {i}", 0] == pytest.approx(made)


def test_few_training_samples_are_spread_evenly_and_all_test_samples_are_looked_at():
    task = study.build_task(TRAINED, [3])[0]
    x, data = task.init((3,)), task.data
    state = SimpleNamespace(x=x, y=torch.stack([x, -x], 1), seeds=(3,))
    told = study.GroupMetrics(TRAINED | dict(evaluate_on=7))(state, task)
    loss, hit = losses_and_hits(x[0], data.test_x, data.test_y)
    assert float(told["test", "loss"]) == pytest.approx(loss.mean(), rel=1e-5)
    _, other = losses_and_hits(-x[0], data.test_x, data.test_y)
    for i, one in enumerate((hit, other)):
        assert float(told[f"group {i}", "accuracy"]) == pytest.approx(one.mean())
    loss, _ = losses_and_hits(x[0], data.x, data.y)
    few = loss[np.linspace(0, len(loss) - 1, 7).astype(int)]
    assert float(told["train", "loss"]) == pytest.approx(few.mean(), rel=1e-5)


def test_a_run_is_evaluated_for_the_looks_that_show_it_and_never_besides(monkeypatch):
    seen, evaluate = [], study.Task.evaluate

    def counted(task, theta, split="train", *rest):
        seen.extend([split] * len(theta))
        return evaluate(task, theta, split, *rest)

    monkeypatch.setattr(study.Task, "evaluate", counted)
    runs = [dict(run="S = 0", sync=0.0), dict(run="S = 2"), dict(run="S = 6", sync=6.0)]
    s = TRAINED | dict(runs=runs, watch=False, time=40.0)
    frame = study.training(Job(s, (3, 8), progress=False)).frame
    told = frame[(frame["split"] == "test") & (frame["metric"] == "loss")]
    shown = told.groupby(["run", "seed"])["rounds"].nunique().sum()
    assert seen.count("test") == seen.count("train") == shown < 6 * 5


def test_staleness_is_the_mean_over_the_merges_of_a_group():
    """Group 0: two iterations of 1 and a trip of 1. Group 1: one of 3 and a trip of 1."""
    line = arrivals(0, 2.0, 12.0, [Deterministic(1.0), Deterministic(3.0)], Deterministic(1.0))
    told = study._whole("a", 0, line).set_index("metric")["value"]
    assert told["rounds"] == 6 and told["round length"] == 2
    assert told["staleness of group 0"] == 2 / 4 and told["staleness of group 1"] == 1
    assert told["iterations of group 0"] == 2 and told["iterations of group 1"] == 1


def test_gradients_of_groups_are_means_over_their_clients():
    task, groups = theorems.problem(6), (2, 4)
    theta = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 2, task.size)))
    found = theorems.group_gradients(task, groups, theta)
    for i, clients in enumerate((range(2), range(2, 6))):
        assert_allclose(found[0, i], task.client_gradients(theta[:, i])[list(clients)].mean(0))
    at = theta[:, 0]
    assert_allclose(
        theorems.global_gradient(task, groups, at), task.client_gradients(at).mean(0)[None]
    )
    rows = task.data.x.square().sum(1)
    assert_allclose(rows, 1.0)  # so that every gradient of a sample has a norm of at most one


def test_walking_the_paths_ends_where_the_round_ends():
    task = theorems.problem(6)
    algorithm = HierarchicalSGD((2, 4), 0.5, 3.0, 40.0, QUICK, SERVER, 2)
    state = algorithm.init(task, (0, 1))
    drawn = draw_one(algorithm, state, task)
    total, ends = theorems.along_the_paths(algorithm, task, state, drawn)
    after, _ = algorithm.round(state, task, drawn)
    assert_allclose(ends, after.y, atol=1e-14)
    y, cursor, squares = state.x[0], np.zeros((1, 6), dtype=np.int64), 0.0
    for _ in range(drawn.counts[0, 0]):
        squares += task.client_gradients(y)[:2].mean(0).square().sum()
        (batch,), cursor = task.data.next_batches((0,), torch.tensor([[0, 1]]), cursor, 1, 2)
        y = y - 0.5 * task.grad(y.repeat(2, 1), batch).mean(0)
    assert_allclose(total[0, 0], squares, rtol=1e-12)
    assert_allclose(ends[0, 0], y, atol=1e-14)


BOUNDS = dict(groups=[2, 4], delays=[0, 0.5, 0, 0.5, 0, 2, 0, 1], sync=3.0, time=15.0, batch_size=2)


def test_both_sides_of_the_bounds_seed_by_seed():
    s = BOUNDS | dict(lr=0.5, runs=[dict(run="a")])
    frame = theorems.bounds(Job(s, (0, 4), progress=False)).frame
    task, algorithm = (
        theorems.problem(6), HierarchicalSGD((2, 4), 0.5, 3.0, 15.0, QUICK, SERVER, 2)
    )  # fmt: skip
    known = dict(lr=0.5, L=0.25, G2=1.0, sigma2=1 / 2, gap=np.log(2))
    for seed in (0, 4):
        t, state = algorithm.timelines((seed,))[0].counts, algorithm.init(task, (seed,))
        squares, paths, away = [], 0.0, []
        for _ in t:
            squares.append(float(task.client_gradients(state.x).mean(0).square().sum()))
            drawn = draw_one(algorithm, state, task)
            paths = paths + theorems.along_the_paths(algorithm, task, state, drawn)[0][0].numpy()
            state, _ = algorithm.round(state, task, drawn)
            away.append((state.x - state.y[0]).square().sum(1).numpy())
        mine, away = frame[frame["seed"] == seed], np.array(away)
        told = mine[mine["t"] == 0].set_index("metric")["value"]
        largest = (away / (2 * 0.5**2 * (t**2 + 10 / 9))).max()
        assert told["Lemma 1: ratio"] == pytest.approx(largest)
        for name, bound in (
            ("Theorem 2", theory.theorem_2), ("sharper", theory.theorem_2_sharper)
        ):  # fmt: skip
            ratio = np.mean(squares) / bound(t, sizes=(2, 4), **known).total
            assert told[f"{name}: ratio"] == pytest.approx(ratio)
        for i, size in enumerate((2, 4)):
            bound = theory.theorem_1(t[:, i], size=size, kappa=10 / 9, **known).total
            ratio = paths[i] / t[:, i].sum() / bound
            assert told[f"Theorem 1, group {i}: ratio"] == pytest.approx(ratio)
        for n, value in mine[mine["metric"] == "deviation"].set_index("t")["value"].items():
            assert value == pytest.approx(away[t == n].mean())


def test_constants_are_looked_at_along_the_run():
    task = task_of()
    algorithm = HierarchicalSGD((2, 4), 0.3, 0.0, 60.0, QUICK, SERVER, 2)
    rounds = algorithm.rounds((5,))
    found = theorems.along(algorithm, task, 5, [0.5, 1.0])
    path = states(algorithm, task, rounds, (5,))
    assert len(found) == 3 and round(rounds / 2) < rounds
    assert_allclose(found[0], task.init((5,)))
    assert_allclose(found[1], path[round(rounds / 2) - 1].x)
    assert_allclose(found[2], path[-1].x)


@pytest.mark.slow
def test_constants_against_a_whole_hessian():
    """Softmax regression on the digits: the Hessian of a group's loss, by autograd."""
    s = catalogue.settings("hierarchy", "constants-7", "smoke")
    one = {**s, "lr": 0.1, "groups": [2, 3], "runs": s["runs"][:1], "products": 200}
    one["runs"] = [{"run": "S=0", "shares": [1.0], "time": 12.0}]
    frame = theorems.constants(Job(one, (1,), progress=False)).frame
    found = frame.set_index("metric")["value"]
    task = study.build_task(one, [1])[0].of(1)
    algorithm = study.build_algorithm([{**one, **one["runs"][0]}], 1)
    largest, steep = 0.0, 0.0
    models = theorems.along(algorithm, task, 1, [1.0])
    assert len(models) == 2 and not torch.equal(*models)
    for theta in models:
        for clients in (range(2), range(2, 5)):

            def f(theta, clients=clients):
                each = []
                for n in clients:
                    rows = torch.from_numpy(task.data.parts[n])
                    logits = task.data.x[rows].flatten(1) @ theta[:640].view(10, 64).T + theta[640:]
                    each.append(torch.nn.functional.cross_entropy(logits, task.data.y[rows]))
                return torch.stack(each).mean()

            H = torch.autograd.functional.hessian(f, theta[0], vectorize=True)
            largest = max(largest, float(torch.linalg.eigvalsh(H).max()))
            g = torch.autograd.functional.jacobian(f, theta[0])
            steep = max(steep, float(g @ g) + found["sigma2"] / len(clients))
    assert found["L"] == pytest.approx(largest, rel=0.02)
    assert found["G2"] == pytest.approx(steep, rel=1e-4)
    assert found["gap"] == pytest.approx(float(
        task.evaluate(task.init([1]), "train", average="clients")["loss"]))  # fmt: skip


def test_with_direct_clients_figure_7a_turns():
    """HFL-E23: 30 stations in the delays' linear law, 4n + 2, for 2; looks are rounds apart."""
    frame = records.load("hierarchy", "fig7", "paper").frame
    frame = frame[(frame["split"] == "test") & (frame["metric"] == "accuracy")]
    runs = {run: rows.sort_values("clock") for run, rows in frame.groupby("run")}
    end, ends = 1500.0, runs["S=0, near"].groupby("seed")["rounds"].last()
    direct = end / ends.mean() + (4 * 30 + 2) - (4 * 2 + 2)  # how long a round then is
    for sync, clock in (5, end), (20, 750.0):
        rows, late = runs["S=0, near"], runs[f"S={sync}, near"]
        star = rows[rows["rounds"] >= clock / direct].groupby("seed")["value"].first()
        tree = late[late["clock"] <= clock].groupby("seed")["value"].last()
        gap = tree - star
        assert len(gap) == 10
        assert gap.mean() > 3 * gap.std() / len(gap) ** 0.5, sync
