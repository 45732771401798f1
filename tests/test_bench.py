"""The benchmark compares two ways of doing the same work, and times only the work."""

from __future__ import annotations

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

TINY = {
    "mlp": (lambda: models.mlp(12, 5, 10), (3, 4), 4, 3, 3),
    "logistic 6-2": (lambda: models.softmax(6, 2), (6,), 4, 3, 3),
}


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
        what = ["ratio", "floor [ms]", "share", "chosen", "device", "copies that fit"]
        assert list(row) == ["name", *times, *what]
        assert all(row[time] > 0 for time in [*times, "floor [ms]"])
        assert row["device"] == "cpu" and row["chosen"] == "threads"


def test_every_backend_is_timed_and_the_ratio_is_that_of_the_chosen_one(tiny, monkeypatch):
    task, theta, batches = bench.workload("mlp", "cpu")
    expected = local_sgd(task, theta, batches, 0.01)

    def measure(works, device="cpu", repeats=5):
        for name, work in works.items():
            if name in BACKENDS and work().shape == theta.shape:
                torch.testing.assert_close(work(), expected, rtol=1e-5, atol=1e-6)
        return {name: 2.0**-i for i, name in enumerate(works)}

    monkeypatch.setattr(bench, "median_seconds", measure)
    monkeypatch.setattr(bench, "floor", lambda *work: 0.1)
    row = bench.run("local-sgd")[0]
    assert row["plain loop [ms]"] == 1000 and row["threads [ms]"] == 125 and row["ratio"] == 8
    assert row["floor [ms]"] == 100 and row["share"] == 0.8


CNN = {"cnn": (lambda: models.small_cnn((2, 8, 8), 10), (2, 8, 8), 3, 3, 3)}


@pytest.mark.parametrize("fastest", ["one copy", "all copies"])
@pytest.mark.parametrize("name", [*TINY, *CNN])
def test_the_floor_is_the_time_of_the_operations_at_the_best_speed(name, fastest, monkeypatch):
    """At a billion operations a second; the other number of copies takes twice as long."""
    monkeypatch.setattr(bench, "WORK", TINY | CNN)
    task, theta, batches = bench.workload(name, "cpu")

    def least(work, inputs):
        alone = all(len(x) == 1 or x.dim() == 4 for x in inputs)
        slow = 1 if alone == (fastest == "one copy") else 2
        return slow * count(lambda: work(*inputs)).flops / 1e9

    steps = functools.partial(local_sgd, task, theta, batches, 0.1, backend="batched")
    monkeypatch.setattr(bench, "least", least)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bench.floor(task, theta, batches) == pytest.approx(count(steps).flops / 1e9 / 2)


def test_the_least_time_is_that_of_the_call_that_nothing_disturbed(monkeypatch):
    now, taken = [0.0], [9.0, 4.0, 7.0, 3.0, 8.0, 1.0]

    def work(x):
        now[0] += taken.pop(0)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench.least(work, [torch.ones(1)], seconds=20.0) == 3.0
    assert taken == [1.0], "the first call warms up, and the time is over after four"


def test_works_take_turns_and_their_first_time_does_not_count(monkeypatch):
    now, order = [0.0], []
    taken = {"a": [50, 1, 2, 3, 40, 4, 9, 9], "b": [70, 4, 6, 8, 80, 5, 7, 1]}

    def work(name):
        order.append(name)
        now[0] += taken[name].pop(0)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    works = {name: functools.partial(work, name) for name in taken}
    assert bench.median_seconds(works, repeats=2, seconds=1e9) == {"a": 3.5, "b": 5.5}
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
    assert bench.load_bench("local-sgd", tmp_path) == []
    path = bench.save_bench("local-sgd", [{"name": "mlp", "ratio": 2.0}], tmp_path)
    (kept,) = bench.load_bench("local-sgd", tmp_path)
    assert path.is_relative_to(tmp_path / "bench" / "local-sgd")
    assert kept["rows"] == [{"name": "mlp", "ratio": 2.0}]
    assert {"device", "instructions", "versions", "commit", "date"} < set(kept)
    assert records.stored(tmp_path) == [], "not an experiment's record"


def test_no_measurement_takes_the_place_of_another(tmp_path, monkeypatch):
    about = dict(date="2026-01-02T03:04:05+00:00", device="CPU")
    monkeypatch.setattr(bench.experiments, "provenance", lambda device: about)
    names = [bench.save_bench("local-sgd", [{"n": n}], tmp_path).name for n in range(3)]
    assert names == [f"2026-01-02T03-04-05{end}.json" for end in ("", "_2", "_3")]
    about["date"] = "2026-01-02T03:04:04+00:00"
    bench.save_bench("local-sgd", [{"n": -1}], tmp_path)
    kept = bench.load_bench("local-sgd", tmp_path)
    assert [one["rows"] for one in kept] == [[{"n": n}] for n in (-1, 0, 1, 2)], "oldest first"


@pytest.mark.parametrize("rows", [[{"ms": 1.0}], [{"ms": 1.0, "device": "cpu"}]])
def test_what_the_cpu_did_is_not_put_down_to_a_gpu_at_hand(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    bench.save_bench("steps", rows, tmp_path)
    assert bench.load_bench("steps", tmp_path)[0]["device"].startswith("CPU")
    bench.save_bench("local-sgd", [{"ms": 1.0, "device": "cuda"}], tmp_path)
    assert bench.load_bench("local-sgd", tmp_path)[0]["device"] == "a GPU"


def test_the_models_of_the_book_are_timed():
    assert {"softmax 784-10", "mlp 784-50-10", "fashion_cnn"} <= set(bench.WORK)
    for build, shape, copies, size, steps in bench.WORK.values():
        model = build()
        assert isinstance(model, Model) and min(copies, size, steps) > 1
        features = torch.zeros(1, 1, *shape)
        assert model.apply(torch.zeros(1, model.size), features).shape[:2] == (1, 1)


def test_shipped_measurements_are_whole():
    for name, occasions in (("local-sgd", 3), ("steps", 1), ("personalization", 1)):
        kept = bench.load_bench(name)
        assert len(kept) >= occasions
        for one in kept:
            assert one["rows"] and one["bench"] == name and not one["commit"].endswith("+")
    lines = (bench.bench_folder() / "peers.jsonl").read_text().splitlines()
    peers = {json.loads(line)["peer"] for line in lines}
    assert peers == {"fedlib", "plain loop", "Flower", "pfl-research"}


@pytest.mark.slow
@pytest.mark.long
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


@pytest.fixture
def personal(monkeypatch):
    monkeypatch.setattr(bench, "PERSONAL", {"tiny": ((6, 3), 4, 20)})


def test_rows_of_personalization(personal):
    (row,) = bench.run("personalization")
    methods = ["PERM, weights each epoch", "PERM, weights each round", "PerFedAvg"]
    methods += ["PFedMe, 4 rounds of 5", "FedAvg"]
    assert list(row) == ["name", *[f"{method} [ms]" for method in methods], "ratio"]
    assert min(row[f"{method} [ms]"] for method in methods) > 0


def test_a_round_bears_its_part_of_what_comes_once_an_epoch(personal, monkeypatch):
    def measure(works):
        ends = [works[f"PERM, weights each {when}"]()[0].t for when in ("epoch", "round")]
        assert ends == [1, 4], "the first round of four, and the last"
        return {name: 9.0 if "each round" in name else 1.0 for name in works}

    monkeypatch.setattr(bench, "median_seconds", measure)
    (row,) = bench.run("personalization")
    assert row["PERM, weights each epoch [ms]"] == 3000 and row["ratio"] == 3
