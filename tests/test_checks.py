"""What comes in is checked once, and the message says what came and what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlib import datasets
from fedlib.engine import data, models, steps
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.data import OVERHEAD, Batch, FederatedDataset, Orders
from fedlib.engine.estimate import smoothness
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import Groups, average, mix
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import sweep
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.job import off_cycle
from fedlib.lab.trials import TASKS
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.hierarchy import theory as hierarchy_theory
from fedlib.papers.participation.algorithm import GeneralizedFedAvg
from fedlib.papers.personalization import weights
from fedlib.papers.personalization.algorithm import PERM, Mixing
from fedlib.papers.tiers import theory as tiers_theory
from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.asynchronous import AsyncTDCD
from fedlib.population.delays import Deterministic
from fedlib.population.participation import Full, Independent

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
    task = TASKS["mlp"](np.float32)
    assert simulate(algorithm, task, np.int64(2), np.arange(2), progress=False).state.t == 2
    rates = np.array([0.1, 0.2])
    assert FedAvg(ALL, rates).lr is rates and FedAvg(ALL, [0.1, 0.2]).lr == [0.1, 0.2]


@pytest.mark.parametrize("seeds", [3, np.int64(3), (), [], None, [1.5], ["1"], [-1], [True]])
@pytest.mark.parametrize("way", ["simulate", "sweep", "init"])
def test_seeds_are_whole_numbers_in_a_list(seeds, way):
    task, algorithm = TASKS["mlp"](np.float64), FedAvg(ALL, 0.1)
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
        sweep(FedAvg(ALL, 0.1), TASKS["mlp"](np.float64), 1, grid, progress=False)


def test_rounds_looks_and_splits():
    task, algorithm = TASKS["mlp"](np.float64), FedAvg(ALL, 0.1)
    for rounds in (-1, 1.5, "3"):
        with pytest.raises(FedlibError, match="rounds is a whole number"):
            simulate(algorithm, task, rounds, progress=False)
    with pytest.raises(FedlibError, match="every is a whole number"):
        Evaluation(every=0)
    one = simulate(algorithm, task, 1, progress=False, evaluation=Evaluation(splits="test")).frame
    assert set(one["split"]) == {"test"}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("state", 3),
        ("evaluation", 5),
        ("checkpoint", "run.pt"),
        ("callbacks", print),
        ("callbacks", [print, 3]),
        ("callbacks", (print for _ in range(2))),  # which would be used up in the first round
        ("name", 3),
    ],
)
def test_an_option_of_another_kind_is_named(option, value):
    task, algorithm = TASKS["mlp"](np.float64), FedAvg(ALL, 0.1)
    with pytest.raises(FedlibError, match=f"^{option} is .*; got "):
        simulate(algorithm, task, 1, progress=False, **{option: value})


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda task: simulate(FedAvg, task, 1), "An algorithm has init"),
        (lambda task: simulate(TDCD(0.1, 1), task, 1), "A TieredTask is what is learned here"),
        (lambda task: Evaluation(splits=3), "splits are names"),
        (lambda task: Evaluation(measure=3), "measure is a function"),
        (lambda task: Task(task.model, task.data, [1]), r"Unknown loss '\[1\]'"),
        (lambda task: datasets.card([1]), r"Unknown data set '\[1\]'"),
    ],
)
def test_what_is_of_another_kind_is_refused(wrong, told):
    with pytest.raises(FedlibError, match=told):
        wrong(TASKS["mlp"](np.float64))


@pytest.mark.parametrize(
    "x", [torch.zeros(3), torch.zeros(1, 3), np.zeros((2, 139)), torch.zeros(3, 139), [1.0]]
)
def test_a_start_is_a_model_for_each_seed(x):
    task = TASKS["mlp"](np.float64)
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
    task = TASKS["mlp"](np.float64)
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
    with pytest.raises(FedlibError, match="l2 is a finite number of at least 0"):
        Task(models.mlp(4, 2), FederatedDataset.build(X, Y, PARTS), l2=l2)
    with pytest.raises(FedlibError, match="takes federated data; got tuple"):
        Task(models.mlp(4, 2), (X, Y))


def test_no_column_of_a_model_is_passed_over():
    task = TASKS["mlp"](np.float64)
    row = task.init((1,))
    for wrong in (torch.cat([row, row], 1), row[0], row.numpy(), row[:0]):
        for use in (task.evaluate, lambda theta: task.grad(theta, task.data.full_batch([0]))):
            with pytest.raises(FedlibError, match="^theta"):
                use(wrong)
    with pytest.raises(FedlibError, match=r"Expected one model, \[1, 131\]"):
        task.client_gradients(torch.cat([row, row]))
    assert task.client_gradients(row[0]).equal(task.client_gradients(row))


def test_rows_of_a_module_start_a_run_in_the_features_type():
    task = TASKS["mlp"](np.float32)
    row = task.model.to_row(task.model.to_module(task.init((5,))))
    assert row.dtype == torch.float64
    state = FedAvg(ALL, 0.1).init(task, (5,), row)
    assert state.x.equal(task.init((5,)))
    with pytest.raises(FedlibError, match="int64"):
        FedAvg(ALL, 0.1).init(task, (5,), row.long())


def test_batches_weights_and_rates_fit():
    task = TASKS["mlp"](np.float64)
    theta, rows = task.init((1, 2)), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(FedlibError, match=r"step 0 is \[2, 0\]"):
        local_sgd(task, theta, [Batch(rows[:, :0])], 0.1)
    with pytest.raises(FedlibError, match=r"weights of step 0 are \[1, 4\]"):
        local_sgd(task, theta, [Batch(rows, torch.ones(1, 4) / 4)], 0.1)
    for wrong in ([0.1, 0.2], "0.1", math.nan, None, np.ones(2)):
        with pytest.raises(FedlibError, match="lr is a finite number, or a tensor"):
            local_sgd(task, theta, [Batch(rows)], wrong)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [(Evaluation, "limit", 0), (Evaluation, "limit", -1), (Evaluation, "limit", 2.5),
     (Evaluation, "at", [0.5]), (Evaluation, "at", "ab"), (Checkpoint, "every", -1),
     (Checkpoint, "every", 0.5)],
)  # fmt: skip
def test_options_of_a_simulation(kind, option, value):
    with pytest.raises(FedlibError, match=f"{option} is a whole number"):
        kind(**{option: value})


def test_a_seed_that_is_too_large():
    with pytest.raises(FedlibError, match="seed is below"):
        simulate(FedAvg(ALL, 0.1), TASKS["mlp"](np.float64), 1, [2**63], progress=False)


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
        TASKS["mlp"](np.float64).data.next_batches(**{**asked, "batch_size": 2, **held})


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
        task = TASKS["mlp"](np.float64)
        return simulate(FedAvg(ALL, 0.1, 7, 4), task, 5, progress=False).state.x

    before = read()
    few = Orders(1500)  # 96 bytes an order
    monkeypatch.setattr(data, "_orders", few)
    assert read().equal(before)
    assert len(few._kept) == 2 and few.bytes == 2 * (96 + OVERHEAD)


@pytest.mark.parametrize(
    "make", [models.small_cnn, models.normed_cnn, models.lenet, models.resnet18]
)
@pytest.mark.parametrize(
    "shape", [3, "abc", (3,), (3, 64), (0, 64, 64), (3, 64, 2.5), (3, 1, 64), (3, 64, 64, 1)]
)
def test_shapes_of_images_are_three_numbers(make, shape):
    with pytest.raises(FedlibError, match="shape is|channels is|Height or width is"):
        make(shape, 4)
    with pytest.raises(FedlibError, match="number of outputs is"):
        make((3, 64, 64), 0)


def test_resnet18_says_how_small_an_image_may_be():
    with pytest.raises(FedlibError, match="at least 9; got 8"):
        models.resnet18((3, 8, 32), 10)
    model = models.resnet18((3, 9, 9), 2)
    row = torch.zeros(1, model.size)
    assert model.apply(row, torch.zeros(1, 2, 3, 9, 9)).shape == (1, 2, 2)


def test_sizes_of_the_other_models():
    for make in (models.linear, models.location, lambda n: models.lstm(3, n)):
        for size in (0, -1, 2.5, "3", None, [3]):
            with pytest.raises(FedlibError, match="is a whole number of at least 1"):
                make(size)


@pytest.mark.parametrize(
    ("theta", "x", "told"),
    [
        (torch.zeros(2, 7), torch.zeros(2, 3, 4), "theta is"),
        (torch.zeros(2, 46), torch.zeros(2, 3, 4), "theta is"),
        (torch.zeros(2, 23), torch.zeros(3, 3, 4), "x has batches for 3 copies, theta has 2"),
        (torch.zeros(2, 23), torch.zeros(4), "Expected a batch for each copy"),
        (torch.zeros(2, 23).double(), torch.zeros(2, 3, 4), "theta holds torch.float64"),
        (torch.zeros(2, 23).long(), torch.zeros(2, 3, 4), "theta holds torch.int64"),
    ],
)
def test_a_model_is_applied_to_a_batch_a_copy(theta, x, told):
    with pytest.raises(FedlibError, match=told):
        models.mlp(4, 3, 2).apply(theta, x)


def test_rows_have_the_features_type_everywhere():
    task = TASKS["mlp"](np.float64)
    theta, batch = torch.zeros(1, task.size), task.data.full_batch([0])
    for ask in (
        lambda: local_sgd(task, theta, [batch], 0.1),
        lambda: task.grad(theta, batch),
        lambda: task.evaluate(theta),
    ):
        with pytest.raises(FedlibError, match=r"Expected torch.float64, as the features are"):
            ask()


@pytest.mark.parametrize("clients", [[], [99], [-1], [1.5], 3])
def test_clients_are_numbers_of_some(clients):
    task = TASKS["mlp"](np.float64)
    with pytest.raises(FedlibError, match="Clients are a list of numbers from 0 to"):
        task.data.full_batch(clients)
    if clients in ([99], [-1], [1.5]):
        with pytest.raises(FedlibError, match="Clients are a list of numbers from 0 to"):
            task.client_gradients(torch.zeros(1, task.size).double(), clients)
    if clients == []:
        with pytest.raises(FedlibError, match="No client was chosen"):
            task.client_gradients(torch.zeros(1, task.size).double(), clients)


def test_options_of_rules_and_estimates():
    task = TASKS["mlp"](np.float64)
    row, batch = torch.zeros(1, task.size).double(), task.data.full_batch([0])
    for beta in (-1, 1.5, math.nan, "a", None, True):
        with pytest.raises(FedlibError, match="beta is a number"):
            steps.momentum(beta)
    for mu in (-1, math.nan, math.inf, "a"):
        with pytest.raises(FedlibError, match="mu is a finite number"):
            steps.proximal(mu)
    with pytest.raises(FedlibError, match=r"asks for 'anchor'. It has the extras \[\]"):
        local_sgd(task, row, [batch], 0.1, step=steps.proximal(0.1))
    for options in ({"client": 99}, {"client": -1}, {"client": 1.5}, {"tolerance": math.nan}):
        with pytest.raises(FedlibError, match="Clients are|client is|tolerance is"):
            smoothness(task, row, **options)
    for limit in (0, -1, 1.5):
        with pytest.raises(FedlibError, match="limit is a whole number"):
            task.evaluate(row, limit=limit)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", None])
def test_a_stream_has_a_whole_number_for_a_seed(seed):
    with pytest.raises(FedlibError, match="A seed is a whole number"):
        stream(seed, "data")
    with pytest.raises(FedlibError, match="A seed is a whole number"):
        TASKS["mlp"](np.float64).init([seed])


@pytest.mark.parametrize(
    "groups",
    [(0, 2), (2, -1), (2.5, 2), (2, 2, torch.ones(3)), (2, 2, "a"), (2, 2, torch.ones(1, 1, 4))],
)
def test_groups_hold_rows(groups):
    with pytest.raises(FedlibError, match="is a whole number|The weights of 2 groups"):
        Groups(*groups)


def test_weights_are_tensors():
    theta = torch.zeros(2, 3)
    for W in (np.eye(2), None, 3):
        with pytest.raises(FedlibError, match="W is a|theta is a"):
            mix(theta, W)
    with pytest.raises(FedlibError, match="q is a list"):
        average(theta, [0.5, 0.5])


def test_targets_of_a_test_split_are_those_of_training():
    x, y, parts = np.zeros((4, 2), np.float32), np.arange(4), [np.arange(4)]
    for test_x, test_y, told in ((None, y, "without test_x"), (x, None, "both None")):
        with pytest.raises(FedlibError, match=told):
            FederatedDataset.build(x, y, parts, test_x, test_y)
    with pytest.raises(FedlibError, match="array of numbers; got MaskedArray"):
        FederatedDataset.build(np.ma.masked_array(x, x == 0), y, parts)


@pytest.mark.parametrize("process", [None, 3, "full", Full])
def test_participation_is_a_process(process):
    with pytest.raises(FedlibError, match="participation is a process"):
        FedAvg(process, 0.1)


def test_flags_are_true_or_false():
    with pytest.raises(FedlibError, match="wait is True or False; got 'no'"):
        AsyncTDCD(0.1, 2, None, LAW, LAW, wait="no")
    with pytest.raises(FedlibError, match="unbiased is True or False"):
        Mixing(unbiased="no")
    with pytest.raises(FedlibError, match="mixing is a Mixing"):
        PERM(0.1, mixing=3)


@pytest.mark.parametrize("wrong", [{"rounds": -1}, {"points": 0}, {"cycle": 0}, {"rounds": 2.5}])
def test_looks_are_whole_numbers(wrong):
    with pytest.raises(FedlibError, match="is a whole number"):
        off_cycle(**{"rounds": 100, "points": 10, **wrong})


@pytest.mark.parametrize("value", [-1.0, math.nan, "0.1", None, [0.1, -0.1]])
def test_constants_of_a_bound_are_not_below_zero(value):
    with pytest.raises(FedlibError, match="G2 is at least 0"):
        hierarchy_theory.lemma_1([[1, 2]], sizes=[1, 2], lr=0.1, G2=value)
    with pytest.raises(FedlibError, match="sigma2 is at least 0"):
        tiers_theory.theorem_1(L=1, L_max=1, gap=1, sigma2=value, lr=0.001, Q=2, rounds=10)
    with pytest.raises(FedlibError, match="rounds is above 0"):
        tiers_theory.theorem_1(L=1, L_max=1, gap=1, sigma2=1, lr=0.001, Q=2, rounds=0)


@pytest.mark.parametrize("lam", ["a", None, [[1, 2], [3]]])
def test_a_strength_of_mixing_is_a_number(lam):
    with pytest.raises(FedlibError, match="λ is a number or a tensor"):
        weights.water_fill(torch.zeros(3, 3), torch.ones(3), lam)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(task="digits"), "A task is what is learned, as Task.*got 'digits'"),
        (dict(algorithm=None), r"has init\(task, seeds\) and round\(state, task\).*got None"),
        (dict(algorithm="fedavg"), "got 'fedavg'"),
        (dict(evaluation=Evaluation(at=[1, 99])), "no round 99 to look after: 3 rounds are run"),
    ],
)
def test_simulate_says_what_it_is_given_wrongly(change, told):
    given = dict(algorithm=FedAvg(Independent(4, 2), 0.1, 1, 4), task=TASKS["mlp"](np.float64))
    with pytest.raises(FedlibError, match=told):
        simulate(**(given | change), rounds=3, progress=False)


def test_a_view_in_reverse_order_is_called_one():
    x = np.eye(4)
    with pytest.raises(FedlibError, match="a view in reverse order: take a copy"):
        FederatedDataset.build(x[::-1], np.arange(4), [[0, 1], [2, 3]])
    with pytest.raises(FedlibError, match=r"must lie in 0\.\.3; got -1"):
        FederatedDataset.build(x, np.arange(4), [[0, -1], [2, 3]])
