"""The benchmark compares two ways of doing the same work, and times only the work."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlib.engine import models
from fedlib.engine.cost import count
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import BACKENDS, local_sgd
from fedlib.engine.models import Model
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab import bench
from fedlib.lab.evidence import records
from fedlib.papers.hierarchy import timeline
from fedlib.papers.personalization import PERM
from fedlib.papers.vertical import simulate_parties
from fedlib.population.delays import ShiftedExponential

TINY = {
    "mlp": (lambda: models.mlp(12, 5, 10), (3, 4), 4, 3, 3),
    "logistic 6-2": (lambda: models.softmax(6, 2), (6,), 4, 3, 3),
}


FLOORS = ("floor [ms]", "memory floor [ms]")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "WORK", TINY)


@pytest.mark.parametrize("name", TINY)
def test_both_do_the_same_work(name, tiny):
    task, theta, batches = bench.workload(name, "cpu")
    before = theta.clone()
    loop = bench.plain_loop(task, theta, batches, 0.3)
    ours = local_sgd(task, theta, batches, 0.3)
    assert (ours - theta).norm() > 0.1
    for _ in range(2):  # a second call begins at theta again
        torch.testing.assert_close(loop(), ours, rtol=1e-5, atol=1e-6)
    assert torch.equal(theta, before), "the starting points stay as they are"


def test_modules_and_optimizers_are_made_before_the_clock_starts(tiny, monkeypatch):
    made = []

    class Counted(torch.optim.SGD):
        def __init__(self, *args, **options):
            made.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(torch.optim, "SGD", Counted)
    task, theta, batches = bench.workload("mlp", "cpu")
    loop = bench.plain_loop(task, theta, batches, 0.1)
    assert len(made) == 4
    loop()
    assert len(made) == 4


def test_rows(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = bench.run("local-sgd")
    assert [row["name"] for row in rows] == list(TINY)
    for row in rows:
        times = [f"{way} [ms]" for way in ("plain loop", "loop", "batched", "threads")]
        assert list(row) == ["name", *times, "chosen", "ratio", *FLOORS, "device"]
        assert all(row[time] > 0 for time in times)
        assert row["device"] == "cpu" and row["chosen"] == "threads"


def test_every_backend_is_timed_and_the_ratio_is_that_of_the_chosen_one(tiny, monkeypatch):
    task, theta, batches = bench.workload("mlp", "cpu")
    expected = local_sgd(task, theta, batches, 0.01)

    def measure(works, device="cpu", repeats=5):
        for name, work in works.items():
            if name in BACKENDS and work().shape == theta.shape:
                torch.testing.assert_close(work(), expected, rtol=1e-5, atol=1e-6)
        return {name: 2.0**-i for i, name in enumerate(works)}

    monkeypatch.setattr(bench, "measure", measure)
    row = bench.run("local-sgd")[0]
    assert row["plain loop [ms]"] == 1000 and row["threads [ms]"] == 125 and row["ratio"] == 8


def test_works_take_turns_and_their_first_time_does_not_count(monkeypatch):
    now, order = [0.0], []
    taken = {"a": [50, 1, 2, 3, 40, 4, 9, 9], "b": [70, 4, 6, 8, 80, 5, 7, 1]}

    def work(name):
        order.append(name)
        now[0] += taken[name].pop(0)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    works = {name: functools.partial(work, name) for name in taken}
    assert bench.measure(works, repeats=2, seconds=1e9) == {"a": 3.5, "b": 5.5}
    assert order == [*"aaaabbbb"] * 2


def test_operations_are_counted():
    """Forward, gradient of the weights, and below the first layer nothing: 2 B in out each."""
    data = FederatedDataset.build(np.zeros((5, 6)), np.zeros(5, dtype=int), [np.arange(5)])
    batches = [Batch(torch.zeros(3, 4, dtype=torch.long))] * 7
    for widths, products in (((6, 2), [(6, 2)] * 2), ((6, 5, 2), [(6, 5)] * 2 + [(5, 2)] * 3)):
        task = Task(models.mlp(*widths), data)
        expected = 7 * 3 * sum(2 * 4 * a * b for a, b in products)
        steps = functools.partial(local_sgd, task, task.init(range(3)), batches, 0.1)
        assert count(functools.partial(steps, backend="batched")).flops == expected


def test_a_measurement_is_kept_with_what_it_was_made_on(tmp_path):
    assert bench.load("local-sgd", tmp_path) == []
    path = bench.save("local-sgd", [{"name": "mlp", "ratio": 2.0}], tmp_path)
    (kept,) = bench.load("local-sgd", tmp_path)
    assert path.is_relative_to(tmp_path / "bench" / "local-sgd")
    assert kept["rows"] == [{"name": "mlp", "ratio": 2.0}]
    assert {"device", "instructions", "versions", "commit", "date"} < set(kept)
    assert records.stored(tmp_path) == [], "not an experiment's record"


@pytest.mark.parametrize("rows", [[{"ms": 1.0}], [{"ms": 1.0, "device": "cpu"}]])
def test_what_the_cpu_did_is_not_put_down_to_a_gpu_at_hand(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    bench.save("steps", rows, tmp_path)
    assert bench.load("steps", tmp_path)[0]["device"].startswith("CPU")
    bench.save("local-sgd", [{"ms": 1.0, "device": "cuda"}], tmp_path)
    assert bench.load("local-sgd", tmp_path)[0]["device"] == "a GPU"


def test_the_least_that_must_move():
    """Two models of 6 · 2 + 2 numbers in and out, and in each of 3 steps 2 · 4 samples of 6."""
    data = FederatedDataset.build(np.zeros((5, 6)), np.zeros(5, dtype=int), [np.arange(5)])
    task = Task(models.softmax(6, 2), data)
    batches = [Batch(torch.zeros(2, 4, dtype=torch.long))] * 3
    theta = task.init((0, 1))
    expected = 2 * 2 * 14 + 3 * 2 * 4 * 6
    assert bench.least_bytes(task, theta, batches) == expected * theta.element_size()


def test_the_models_of_the_book_are_timed():
    assert {"softmax 784-10", "mlp 784-50-10", "fashion_cnn"} <= set(bench.WORK)
    for build, shape, copies, size, steps in bench.WORK.values():
        model = build()
        assert isinstance(model, Model) and min(copies, size, steps) > 1
        features = torch.zeros(1, 1, *shape)
        assert model.apply(torch.zeros(1, model.size), features).shape[:2] == (1, 1)


def test_shipped_measurements_are_whole():
    for name, occasions in (("local-sgd", 3), ("steps", 1)):
        kept = bench.load(name)
        assert len(kept) >= occasions
        for one in kept:
            assert one["rows"] and one["bench"] == name and not one["commit"].endswith("+")
    lines = (bench.folder() / "peers.jsonl").read_text().splitlines()
    peers = {json.loads(line)["peer"] for line in lines}
    assert peers == {"fedlib", "plain loop", "Flower", "pfl-research"}


def test_whole_rounds_are_the_same_in_a_plain_loop_and_in_fedlib():
    path = Path(__file__).parents[1] / "book" / "peers" / "ours.py"
    spec = importlib.util.spec_from_file_location("ours", path)
    spec.loader.exec_module(ours := importlib.util.module_from_spec(spec))
    task, algorithm = ours.build()
    task.data.x = task.data.x.double()
    theirs, mine = ours.plain(task, algorithm), ours.ours(task, algorithm)
    start = algorithm.init(task, (0,)).x
    for _ in range(2):
        expected = theirs()
        assert (mine() - expected).abs().max() < 1e-13
    assert (expected - start).norm() > 0.1


def test_unknown_benchmark():
    with pytest.raises(FedlibError, match=r"Did you mean 'local-sgd'\?"):
        bench.run("local-sg")


def test_the_hierarchy_loop_does_the_round_of_the_algorithm():
    task, algorithm = bench.crowd(4)
    state = algorithm.init(task, (0,))
    loop = bench.hierarchy_loop(task, algorithm, state.x[0])
    after, metrics = algorithm.round(state, task)
    assert (after.x - state.x).norm() > 0.01 and metrics["counts"].max() > 1
    for _ in range(2):
        torch.testing.assert_close(loop(), after.x[0], rtol=1e-4, atol=1e-6)


def test_the_clock_loop_has_the_rounds_of_the_clock():
    law, server = ShiftedExponential(1.0, 0.1), ShiftedExponential(10.0, 1.0)
    rounds = bench.clock_loop(20.0, 20_000.0, 1.0, 0.1, 10.0)
    assert rounds == pytest.approx(len(timeline(0, 20.0, 20_000.0, [law, law], server).end), abs=8)


def test_the_perm_loop_does_the_round_of_the_algorithm(personal):
    task = bench.personal_task("tiny", 4)
    perm = PERM(0.3, 3, 5)
    state = perm.round(perm.init(task, (0,)), task)[0]
    A = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), (1, 4))).float()
    state = dataclasses.replace(state, A=A)
    loop, after = bench.perm_loop(task, perm, state), perm.round(state, task)[0].v[0]
    assert (after - state.v[0]).norm(dim=1).min() > 0.01
    for _ in range(2):
        torch.testing.assert_close(loop(), after, rtol=1e-5, atol=1e-6)


def test_both_fillings_give_the_same_weights():
    by_sorting, ours = bench.filling(700)
    torch.testing.assert_close(by_sorting(), ours(), rtol=1e-4, atol=1e-6)
    assert ((ours() > 0).sum(1) < 700).all()


@pytest.fixture
def personal(monkeypatch):
    tiny = {"tiny": (lambda: models.softmax(6, 3), 6, 3, 20)}
    tiny["logistic 60-2"] = (lambda: models.softmax(6, 2), 6, 2, 20)
    monkeypatch.setattr(bench, "PERSONAL", tiny)


def test_rows_of_personalization(personal):
    rows = bench.personalization_table(4, 50, 1, (3, 1000))
    assert {tuple(row) for row in rows} == {
        ("name", "first", "first [ms]", "second", "second [ms]", "ratio", "device")
    }
    pairs = [(row["name"], row["first"], row["second"]) for row in rows]
    methods = ["PERM, weights each epoch", "PERM, weights each round", "PerFedAvg"]
    methods.append("PFedMe, 4 rounds of 5")
    assert pairs == [
        *[(f"{name}, a round", "plain loop", "PERM") for name in bench.PERSONAL],
        *[(f"{name}, Figure 3", m, "FedAvg") for name in bench.PERSONAL for m in methods],
        *[(f"logistic 60-2, {N} clients", "PERM", "FedAvg") for N in ("3", "1,000")],
        ("weights of 50 clients", "sorting", "water_fill"),
        ("Figure 1, a seed", "1 together", "10 together"),
    ]
    assert all(row["first [ms]"] > 0 and row["ratio"] > 0 for row in rows)


def test_a_round_bears_its_part_of_what_comes_once_an_epoch(personal, monkeypatch):
    def measure(works, repeats):
        return {name: 9.0 if "each round" in name else 1.0 for name in works}

    monkeypatch.setattr(bench, "measure", measure)
    assert bench.personal_rounds("tiny", 4, 1)["PERM, weights each epoch"] == 3


@pytest.fixture
def columns(monkeypatch):
    monkeypatch.setattr(bench, "VERTICAL", {"rows": (60, 12, 12), "thin": (50, 40, 6)})
    monkeypatch.setattr(bench, "PARTIES", 4)


@pytest.mark.parametrize("name", ["rows", "thin"])
@pytest.mark.parametrize("way", [("sgd", None), ("svrg", None), ("saga", "theta")])
def test_the_loop_of_columns_does_the_events_of_the_compiled_one(name, way, columns):
    problem, (method, table) = bench.columns_problem(name), way
    loop = bench.columns_loop(problem, method, table, 30)
    for _ in range(2):  # a second call goes on
        w = loop()
    total = simulate_parties(problem, method, bench.RATE, steps=30, active=3, table=table).w
    assert np.abs(w - total).max() > 1e-3, "it has gone on"
    first = bench.columns_loop(problem, method, table, 30)()
    np.testing.assert_allclose(first, total, rtol=0, atol=1e-12)


def test_events_of_a_dominated_step_are_counted(columns, monkeypatch):
    pushed = []

    class Counted(bench.Simulation):
        def __post_init__(self):
            super().__post_init__()
            push = self.queue.push
            self.queue.push = lambda *what: (pushed.append(what), push(*what))

    monkeypatch.setattr(bench, "Simulation", Counted)
    bench.columns_loop(bench.columns_problem("rows"), "sgd", None, 20)()
    assert len(pushed) == 20 * bench.events(4) + 3, "and three that find nothing left to do"


@pytest.mark.parametrize("name", ["rows", "thin"])
def test_scikit_learn_solves_the_same_problem(name, columns):
    problem = bench.columns_problem(name)
    w = bench.pooled_peer(problem, 3000)().coef_[0]
    assert np.abs(problem.gradient(w)).max() < 1e-6 < np.abs(problem.gradient(0 * w)).max()


def test_rows_of_vertical(columns):
    rows = bench.vertical_table(1, 20, 1)
    keys = ("name", "first", "first [ms]", "second", "second [ms]", "ratio", "events a second")
    assert {tuple(row) for row in rows} == {(*keys, "device")}
    names = {"rows": ["SGD", "SVRG", *["SAGA"] * 3, "SAGA, full table"]}
    names["thin"] = ["SGD", "SVRG", *["SAGA"] * 3]
    labels = [f"{name}, {label}" for name in names for label in names[name]]
    assert [row["name"] for row in rows] == labels
    pairs = [(row["first"], row["second"]) for row in rows if row["name"] == "thin, SAGA"]
    peers = [("scikit-learn", "VFB²"), ("scikit-learn", "pooled")]
    assert pairs == [("plain loop", "VFB²"), *peers]
    assert all(row["first [ms]"] > 0 and row["events a second"] > 0 for row in rows)


def test_milliseconds_of_vertical_are_those_of_an_epoch(columns, monkeypatch):
    monkeypatch.setattr(bench, "VERTICAL", {"rows": (60, 12, 12)})
    monkeypatch.setattr(bench, "measure", lambda works, repeats: dict.fromkeys(works, 6.0))
    rows = bench.vertical_table(2, 20, 1)
    assert [row["second [ms]"] for row in rows] == [3000] * 6
    firsts = {row["first"]: row["first [ms]"] for row in rows}
    assert firsts == {"plain loop": 18_000, "scikit-learn": 3000}
    rates = {row["second"]: row["events a second"] for row in rows}
    assert rates == {"VFB²": 60 * bench.events(4) / 3, "pooled": 60 * bench.events(1) / 3}
