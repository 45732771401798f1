"""What comes in is checked once, and the message says what came and what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlib.engine import data, models, steps
from fedlib.engine.data import OVERHEAD, Batch, FederatedDataset, Orders
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import average, mix
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import sweep
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import GeneralizedFedAvg
from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.asynchronous import AsyncTDCD
from fedlib.papers.trials import MODELS
from fedlib.population.delays import Deterministic
from fedlib.population.participation import Full

ALL = Full(4)
LAW = Deterministic(1.0)
MAKE = {
    "FedAvg": lambda **s: FedAvg(ALL, **{"lr": 0.1, **s}),
    "GeneralizedFedAvg": lambda **s: GeneralizedFedAvg(ALL, **{"lr": 0.1, **s}),
    "TDCD": lambda **s: TDCD(**{"lr": 0.1, "local_steps": 2, **s}),
    "AsyncTDCD": lambda **s: AsyncTDCD(
        **{"lr": 0.1, "local_steps": 2, "batch_size": None, "comm": LAW, "comp": LAW, **s}
    ),
}
WRONG = {
    "lr": [0, -1.0, math.nan, math.inf, "0.1", None, True, [0.1, "a"], (0.1, 0.0)],
    "local_steps": [0, -1, 2.5, 5.0, "5", None, True, (5, 5)],
    "batch_size": [0, -1, 2.5, 16.0, "16", True, (4, 4)],
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in WRONG.items() for v in vs])
def test_settings_that_cannot_be_are_refused(kind, field, value):
    bad = value[1] if field == "lr" and isinstance(value, list | tuple) else value
    bad = value if kind == "AsyncTDCD" else bad
    with pytest.raises(FedlibError) as error:
        MAKE[kind](**{field: value})
    assert field in str(error.value) and repr(bad) in str(error.value)


@pytest.mark.parametrize("field", ["interval", "amplify"])
def test_so_are_those_of_the_amplification(field):
    for value in (0, -2, "3", 2.5 if field == "interval" else math.nan):
        with pytest.raises(FedlibError, match=field):
            GeneralizedFedAvg(ALL, 0.1, **{field: value})


def test_numbers_of_any_kind_will_do():
    steps, lr = np.int64(3), np.float32(0.1)
    algorithm = FedAvg(ALL, lr, steps, np.int32(4))
    task = MODELS["mlp"](np.float32)
    assert simulate(algorithm, task, np.int64(2), np.arange(2), progress=False).state.t == 2
    rates = np.array([0.1, 0.2])
    assert FedAvg(ALL, rates).lr is rates and FedAvg(ALL, [0.1, 0.2]).lr == [0.1, 0.2]


@pytest.mark.parametrize("seeds", [3, np.int64(3), (), [], None, [1.5], ["1"], [-1], [True]])
@pytest.mark.parametrize("way", ["simulate", "sweep", "init"])
def test_seeds_are_whole_numbers_in_a_list(seeds, way):
    task, algorithm = MODELS["mlp"](np.float64), FedAvg(ALL, 0.1)
    with pytest.raises(FedlibError, match=r"[Ss]eeds? (is|are) a") as error:
        if way == "simulate":
            simulate(algorithm, task, 1, seeds, progress=False)
        elif way == "sweep":
            sweep(algorithm, task, 1, {"lr": [0.1]}, seeds, progress=False)
        else:
            algorithm.init(task, seeds)
    if isinstance(seeds, int):
        assert "seeds=[3]" in str(error.value) and "seeds=range(3)" in str(error.value)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ({"lr": 0.1}, "is a list of values to try; got 0.1"),
        ({"lr": "0.1"}, "is a list of values"),
        ({"lr": []}, "is a list of values"),
        ({"lr": [0.1, 0.2, 0.1]}, "has a value twice"),
        ({"rate": [0.1]}, "cannot have several values of rate"),
    ],
)
def test_a_grid_is_lists_of_different_values(grid, told):
    with pytest.raises(FedlibError, match=told):
        sweep(FedAvg(ALL, 0.1), MODELS["mlp"](np.float64), 1, grid, progress=False)


def test_rounds_looks_and_splits():
    task, algorithm = MODELS["mlp"](np.float64), FedAvg(ALL, 0.1)
    for name, value in (("rounds", -1), ("rounds", 1.5), ("rounds", "3"), ("evaluate_every", 0)):
        options = {"rounds": 2, "evaluate_every": 1} | {name: value}
        with pytest.raises(FedlibError, match=f"{name} is a whole number"):
            simulate(algorithm, task, progress=False, **options)
    one = simulate(algorithm, task, 1, splits="test", progress=False).frame
    assert set(one["split"]) == {"test"}


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(1, 3), np.zeros((2, 139)), torch.zeros(3, 139), [1.0]]
)
def test_a_start_is_a_model_for_each_seed(x):
    task = MODELS["mlp"](np.float64)
    size = task.size
    if isinstance(x, torch.Tensor) and x.shape[-1] == 139:
        x = torch.zeros(3, size)
    with pytest.raises(
        FedlibError, match=rf"Expected a tensor with a model for each seed, \[2, {size}"
    ):
        FedAvg(ALL, 0.1).init(task, (1, 2), x)


def test_rows_and_modules_fit():
    one, other = models.mlp(4, 3, 2), models.mlp(4, 5, 2)
    with pytest.raises(FedlibError, match=r"The row is \[2, 23\]\. Expected one row, \[23\]"):
        one.to_module(torch.zeros(2, 23))
    with pytest.raises(FedlibError, match=r"'1.weight' is \[5, 4\]; this model's is \[3, 4\]"):
        one.to_row(other.to_module(torch.zeros(other.size)))
    with pytest.raises(FedlibError, match="not there"):
        one.to_row(torch.nn.Linear(4, 3))


def test_models_and_batches_fit_together():
    task = MODELS["mlp"](np.float64)
    theta, rows = task.init((1, 2)), torch.zeros(2, 4, dtype=torch.long)
    for wrong in (theta[:, :-1], torch.cat([theta, theta], 1), theta[0]):
        with pytest.raises(FedlibError, match=rf"Expected one copy a row, \[C, {task.size}\]"):
            local_sgd(task, wrong, [Batch(rows)], 0.1)
    for wrong in (rows[:1], torch.cat([rows, rows]), rows[0]):
        with pytest.raises(FedlibError, match=r"step 1 is .*theta has 2 copies\. .*\[2, B\]"):
            local_sgd(task, theta, [Batch(rows), Batch(wrong)], 0.1)
    for wrong in (-1, 1.5, "2"):
        with pytest.raises(FedlibError, match="copies is a whole number of at least 0"):
            local_sgd(task, theta, [Batch(rows)], 0.1, wrong)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "place", ["train features", "train targets", "test features", "test targets"]
)
def test_data_are_finite_unless_asked_for(bad, place):
    held = {name: np.zeros((3, 2) if "features" in name else 3) for name in
            ("train features", "train targets", "test features", "test targets")}  # fmt: skip
    held[place][1] = bad
    x, y, test_x, test_y = held.values()
    count = 2 if "features" in place else 1
    with pytest.raises(
        FedlibError, match=rf"{count} of the {place} are nan or infinite.*\[1"
    ) as error:
        FederatedDataset.build(x, y, [np.arange(3)], test_x, test_y)
    assert "finite=False" in str(error.value)
    FederatedDataset.build(x, y, [np.arange(3)], test_x, test_y, finite=False)


def test_rows_are_whole_numbers():
    x, y = np.zeros((4, 2)), np.zeros(4, int)
    for wrong in ([0.0, 1.5], np.array([0.0, 1.0]), np.array([True, False]), ["0"]):
        with pytest.raises(FedlibError, match="rows are whole numbers; got an array of type"):
            FederatedDataset.build(x, y, [np.arange(2), wrong])
    with pytest.raises(FedlibError, match="no samples"):
        FederatedDataset.build(x, y, [np.arange(2), []])


X, Y, PARTS = np.arange(32.0).reshape(8, 4), np.arange(8) % 2, [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("parts", [None, 3, [], [0, 1, 0, 1], {0: [0]}, [[0, [1, 2]]], [None]])
def test_a_split_is_a_list_of_lists(parts):
    with pytest.raises(FedlibError, match="list with row numbers for each client"):
        FederatedDataset.build(X, Y, parts)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"x": 1.0}, "array of numbers"),
        ({"y": Y.astype(complex)}, "array of numbers"),
        ({"augment": True}, r"images \[n, C, H, W\]"),
        ({"test_x": X[:, :2], "test_y": Y}, r"\[2\] of torch.float64 .* \[4\]"),
        ({"test_x": X.astype(np.float32), "test_y": Y}, "float32"),
        ({"test_x": X[:0], "test_y": Y[:0]}, "test features hold no sample"),
    ],
)
def test_splits_are_alike(held, told):
    with pytest.raises(FedlibError, match=told):
        FederatedDataset.build(**{"x": X, "y": Y, "parts": PARTS, **held})


@pytest.mark.parametrize("l2", [-1, math.nan, math.inf, "0.1", None])
def test_weight_decay_is_a_number(l2):
    with pytest.raises(FedlibError, match="l2 must be at least 0, a finite number"):
        Task(models.mlp(4, 2), FederatedDataset.build(X, Y, PARTS), l2=l2)
    with pytest.raises(FedlibError, match="takes federated data; got tuple"):
        Task(models.mlp(4, 2), (X, Y))


def test_no_column_of_a_model_is_passed_over():
    task = MODELS["mlp"](np.float64)
    row = task.init((1,))
    for wrong in (torch.cat([row, row], 1), row[0], row.numpy(), row[:0]):
        for use in (task.evaluate, lambda theta: task.grad(theta, task.data.full_batch([0]))):
            with pytest.raises(FedlibError, match="^theta"):
                use(wrong)
    with pytest.raises(FedlibError, match=r"Expected one model, \[1, 131\]"):
        task.client_gradients(torch.cat([row, row]))
    assert task.client_gradients(row[0]).equal(task.client_gradients(row))


def test_rows_of_a_module_start_a_run_in_the_features_type():
    task = MODELS["mlp"](np.float32)
    row = task.model.to_row(task.model.to_module(task.init((5,))))
    assert row.dtype == torch.float64
    state = FedAvg(ALL, 0.1).init(task, (5,), row)
    assert state.x.equal(task.init((5,)))
    with pytest.raises(FedlibError, match="int64"):
        FedAvg(ALL, 0.1).init(task, (5,), row.long())


def test_batches_weights_and_rates_fit():
    task = MODELS["mlp"](np.float64)
    theta, rows = task.init((1, 2)), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(FedlibError, match=r"step 0 is \[2, 0\]"):
        local_sgd(task, theta, [Batch(rows[:, :0])], 0.1)
    with pytest.raises(FedlibError, match=r"weights of step 0 are \[1, 4\]"):
        local_sgd(task, theta, [Batch(rows, torch.ones(1, 4) / 4)], 0.1)
    for wrong in ([0.1, 0.2], "0.1", math.nan, None, np.ones(2)):
        with pytest.raises(FedlibError, match="lr is a finite number, or a tensor"):
            local_sgd(task, theta, [Batch(rows)], wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [("limit", 0), ("limit", -1), ("limit", 2.5), ("checkpoint_every", -1),
     ("checkpoint_every", 0.5), ("evaluate_at", [0.5]), ("evaluate_at", "ab"), ("seeds", [2**63])],
)  # fmt: skip
def test_options_of_a_simulation(option, value):
    with pytest.raises(FedlibError, match=option if option != "seeds" else "seed is below"):
        simulate(FedAvg(ALL, 0.1), MODELS["mlp"](np.float64), 1, progress=False, **{option: value})


@pytest.mark.parametrize(
    "held",
    [
        {"seeds": (0, 1)}, {"clients": torch.tensor([0, 1])}, {"clients": torch.tensor([[9]])},
        {"clients": torch.tensor([[-1]])}, {"clients": torch.tensor([[0.5]])}, {"steps": 0},
        {"batch_size": 0}, {"cursor": np.zeros((1, 2), int)}, {"q": torch.ones(1, 1)},
    ],
)  # fmt: skip
def test_minibatches_are_asked_for_run_by_run(held):
    asked = dict(seeds=(0,), clients=torch.tensor([[0, 1]]), cursor=np.zeros((1, 4), int), steps=1)
    with pytest.raises(FedlibError):
        MODELS["mlp"](np.float64).data.next_batches(**{**asked, "batch_size": 2, **held})


@pytest.mark.parametrize(
    ("theta", "W"),
    [
        (torch.ones(4, 3), torch.ones(4)), (torch.ones(4, 3), torch.ones(1, 1, 1, 4)),
        (torch.ones(4, 3), torch.ones(4, dtype=torch.bool)),
        (torch.ones(4, 3).long(), torch.full((1, 4), 0.25)),
    ],
)  # fmt: skip
def test_weights_that_cannot_be(theta, W):
    with pytest.raises(FedlibError, match="Expected real rows, and real weights"):
        mix(theta, W)
    with pytest.raises(FedlibError, match=r"Expected weights \[R, C\]"):
        average(torch.ones(4, 3), torch.ones(4))


def test_widths_and_norms():
    for widths in ((), (3,), (0, 3), (-4, 3), ("4", 3), ([4, 3],)):
        with pytest.raises(FedlibError, match="width"):
            models.mlp(*widths)
    with pytest.raises(FedlibError, match="at least 4"):
        models.small_cnn((1, 2, 8), 3)
    with pytest.raises(FedlibError, match="norm must be positive"):
        steps.clip(-1.0)


def test_kept_orders_are_bounded_and_the_same(monkeypatch):
    def read():
        task = MODELS["mlp"](np.float64)
        return simulate(FedAvg(ALL, 0.1, 7, 4), task, 5, progress=False).state.x

    before = read()
    few = Orders(1500)  # 96 bytes an order
    monkeypatch.setattr(data, "_orders", few)
    assert read().equal(before)
    assert len(few._kept) == 2 and few.held == 2 * (96 + OVERHEAD)
