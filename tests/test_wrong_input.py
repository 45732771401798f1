"""What people type by mistake is refused in words that say what to type instead."""

import re

import numpy as np
import pytest
from scipy import sparse

from fedlib import datasets
from fedlib.engine import Checkpoint, Evaluation, FederatedDataset, Task, models, simulate
from fedlib.errors import FedlibError
from fedlib.lab.evidence import records
from fedlib.lab.job import study
from fedlib.lab.vertical.mitigations import randomised_response
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.methods import theory
from fedlib.papers.tiers import TieredTask
from fedlib.papers.vertical import Problem, centralised, simulate_parties
from fedlib.papers.vertical.secure import shares
from fedlib.population.participation import Full

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
PARTS = [[0, 1, 2, 3], [4, 5, 6, 7]]
DATA = FederatedDataset.build(X, Y, PARTS)
TASK = Task(models.softmax(3, 2), DATA)
COLUMNS = Problem(X, 2 * Y - 1, [[0], [1, 2]])
SMALL = Task(models.softmax(2, 2), FederatedDataset.build(X[:, :2], Y, PARTS))
ALGORITHM = FedAvg(Full(2), lr=0.1)


def tiered(**options):
    return TieredTask([models.linear(3)], [X], Y, [PARTS], **options)


def returning(**methods):
    """Return FedAvg with other methods, which return what they are given here."""
    functions = {k: lambda self, *_, v=v: v(*_) if callable(v) else v for k, v in methods.items()}
    return type("Own", (FedAvg,), functions)(Full(2), lr=0.1)


def measured(values):
    return lambda: simulate(ALGORITHM, TASK, 1, evaluation=Evaluation(measure=lambda *_: values))


WRONG = {
    "a round without metrics": (lambda: simulate(returning(round=lambda s, *_: s), TASK, 1),
                                "and a dictionary"),
    "a round that stays where it is": (
        lambda: simulate(returning(round=lambda s, *_: (s, {})), TASK, 1), "Got t = 0 after 0"),
    "models for a state": (
        lambda: simulate(returning(init=np.zeros((1, 8))), TASK, 1), "has no x and seeds and t"),
    "a state of another task": (
        lambda: simulate(ALGORITHM, TASK, 1, state=ALGORITHM.init(SMALL, (0,))),
        "models of 6 numbers, and the task's have 8"),
    "a measure without a split": (measured({"loss": np.zeros(1)}), "got 'loss': [1]"),
    "a measure of two runs for one": (
        measured({("own", "loss"): np.zeros(2)}), "for each of 1 runs, [1]; got"),
    "a number for a measure": (measured({("own", "loss"): 0.5}), "float"),
    "no measure": (measured(None), "{(split, metric): values}"),
    "a device of another library": (lambda: FederatedDataset.build(X, Y, PARTS, device="gpu"),
                                    "device is 'cpu', or 'cuda'"),
    "a device that is not there": (lambda: DATA.to("cuda:99"), "device is 'cpu', or 'cuda'"),
    "a device of a tiered task": (lambda: tiered(device="gpu"), "device is 'cpu', or 'cuda'"),
    "a word for False": (lambda: datasets.load("digits", normalise="False"), "True or False"),
    "another one": (lambda: FederatedDataset.build(X, Y, PARTS, augment="no"), "True or False"),
    "half of a test split": (lambda: tiered(test_labels=Y), "give both, or neither"),
    "a client for a list": (lambda: DATA.full_batch(1), "a list of numbers from 0 to 1"),
    "bytes for features": (
        lambda: Task(models.softmax(3, 2), FederatedDataset.build(X.astype("uint8"), Y, PARTS)),
        "x.astype('float32')"),
    "a column a class": (
        lambda: Task(models.softmax(3, 2), FederatedDataset.build(X, np.eye(2)[Y], PARTS)),
        "argmax(1)"),
    "data for a task": (lambda: simulate(ALGORITHM, DATA, 1), "Task(model, data)"),
    "a path for a checkpoint": (lambda: simulate(ALGORITHM, TASK, 1, checkpoint="a.pt"),
                                "Checkpoint(path, every=10)"),
    "labels of 0 and 1": (lambda: randomised_response(Y, 1.0, RNG), "2*y - 1"),
    "holders from 0": (lambda: shares(7, range(3), 2, RNG), "range(1, q + 1)"),
    "a holder twice": (lambda: shares(7, [1, 1, 2], 2, RNG), "different numbers"),
    "a secret below zero": (lambda: shares(-7, [1, 2], 2, RNG), "from 0 to"),
    "one weight for two": (lambda: theory.resting_point([1, 2], 1), "one weight a client"),
    "a column for a vector": (lambda: COLUMNS.objective(np.ones((3, 1))), "one number a feature"),
    "another sparse format": (
        lambda: Problem(sparse.coo_array(X), 2 * Y - 1, [[0], [1, 2]]), "x.tocsr()"),
    "parties in a word": (
        lambda: simulate_parties(COLUMNS, "sgd", lr=0.1, steps=1, active="12"), "how many parties"),
    "a misspelt table": (lambda: centralised(COLUMNS, "saga", 0.1, [0], table="Theta"), "'theta'"),
    "a sample that is not there": (lambda: centralised(COLUMNS, "sgd", 0.1, [-1]), "from 0 to 7"),
    "a number for a study": (lambda: study(5), "'package.module:function', in words"),
    "a misspelt profile": (lambda: records.load("participation", "fig1", "smok"), "'smoke'"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_it_says_what_was_expected(wrong):
    call, expected = WRONG[wrong]
    with pytest.raises(FedlibError, match=re.escape(expected)):
        call()


def test_a_checkpoint_that_would_never_be_written_is_refused(tmp_path):
    kept = tmp_path / "run.pt"
    with pytest.raises(FedlibError, match="saves nothing"):
        simulate(ALGORITHM, TASK, 2, checkpoint=Checkpoint(kept), progress=False)
    simulate(ALGORITHM, TASK, 2, checkpoint=Checkpoint(kept, 1), progress=False)
    again = simulate(ALGORITHM, TASK, 2, checkpoint=Checkpoint(kept), progress=False)
    assert again.state.t == 2


def test_nobody_is_told_to_delete_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for place in (tmp_path, tmp_path / "notes"):
        with pytest.raises(FedlibError, match="Delete it if it is a checkpoint"):
            simulate(ALGORITHM, TASK, 2, checkpoint=Checkpoint(place, 1), progress=False)
