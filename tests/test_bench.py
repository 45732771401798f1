"""The benchmark compares two ways of doing the same work, and times only the work."""

from __future__ import annotations

import pytest
import torch

from fedlib import bench, models
from fedlib.errors import FedlibError
from fedlib.local import local_sgd
from fedlib.models import Model

TINY = {
    "mlp": (lambda: models.mlp(12, 5, 10), (3, 4), 4, 3, 3),
    "logistic 6-2": (lambda: models.softmax(6, 2), (6,), 4, 3, 3),
}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "WORK", TINY)


@pytest.mark.parametrize("name", TINY)
def test_both_do_the_same_work(name, tiny):
    task, theta, batches = bench._workload(name, "cpu")
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
    task, theta, batches = bench._workload("mlp", "cpu")
    loop = bench.plain_loop(task, theta, batches, 0.1)
    assert len(made) == 4
    loop()
    assert len(made) == 4


def test_rows(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = bench.run("local-sgd")
    assert [row["name"] for row in rows] == list(TINY)
    for row in rows:
        assert list(row) == ["name", "seconds", "reference_seconds", "ratio", "device"]
        assert row["device"] == "cpu" and row["ratio"] > 0


def test_the_ratio_says_how_much_faster_ours_is(tiny, monkeypatch):
    seconds = iter([2.0, 6.0, 4.0, 1.0])
    monkeypatch.setattr(bench, "_seconds", lambda work, device: next(seconds))
    assert [row["ratio"] for row in bench.run("local-sgd")] == [3.0, 0.25]


def test_the_first_call_is_not_timed(monkeypatch):
    now, taken = [0.0], [50, 1, 2, 9, 1, 3]

    def work():
        now[0] += taken.pop(0)

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench._seconds(work, "cpu") == 2 and not taken


def test_the_models_of_the_book_are_timed():
    assert {"softmax 784-10", "mlp 784-50-10", "fashion_cnn"} <= set(bench.WORK)
    for build, shape, copies, size, steps in bench.WORK.values():
        model = build()
        assert isinstance(model, Model) and min(copies, size, steps) > 1
        features = torch.zeros(1, 1, *shape)
        assert model.apply(torch.zeros(1, model.size), features).shape[:2] == (1, 1)


def test_unknown_benchmark():
    with pytest.raises(FedlibError, match=r"Did you mean 'local-sgd'\?"):
        bench.run("local-sg")
