"""What people type by mistake is refused in words that say what to type instead."""

import re

import numpy as np
import pytest
from scipy import sparse
from torch import nn

from fedlib import datasets
from fedlib.engine import Checkpoint, Evaluation, FederatedDataset, Model, Task, models, simulate
from fedlib.errors import FedlibError
from fedlib.lab.evidence import records
from fedlib.lab.job import study
from fedlib.lab.vertical.mitigations import randomised_response
from fedlib.papers.beyond import AmplifiedHierarchicalSGD
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.hierarchy import HierarchicalSGD
from fedlib.papers.hierarchy import theory as hierarchy
from fedlib.papers.methods import theory
from fedlib.papers.participation import GeneralizedFedAvg
from fedlib.papers.tiers import TieredTask
from fedlib.papers.tiers import theory as tiers
from fedlib.papers.vertical import Problem, centralised, simulate_parties
from fedlib.papers.vertical.secure import shares
from fedlib.population.delays import Deterministic
from fedlib.population.participation import Full, Markov, Participation, PeriodicSampler

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(8, 3)).astype("float32"), np.arange(8) % 2
PARTS = [[0, 1, 2, 3], [4, 5, 6, 7]]
DATA = FederatedDataset.build(X, Y, PARTS)
TASK = Task(models.softmax(3, 2), DATA)
COLUMNS = Problem(X, 2 * Y - 1, [[0], [1, 2]])
SMALL = Task(models.softmax(2, 2), FederatedDataset.build(X[:, :2], Y, PARTS))
THREE = Task(models.softmax(3, 2), FederatedDataset.build(X, Y, [[0, 1], [2, 3], [4, 5, 6, 7]]))
WORDS = Model(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2)))
ALGORITHM = FedAvg(Full(2), lr=0.1)


def tiered(**options):
    return TieredTask([models.linear(3)], [X], Y, [PARTS], **options)


def returning(**methods):
    """Return FedAvg with other methods, which return what they are given here."""
    functions = {k: lambda self, *_, v=v: v(*_) if callable(v) else v for k, v in methods.items()}
    return type("Own", (FedAvg,), functions)(Full(2), lr=0.1)


def groups(**options):
    """Return hierarchical SGD of two groups of a client each."""
    known = dict(sync=1.0, time=5.0, local=Deterministic(1.0), server=Deterministic(1.0))
    return HierarchicalSGD((1, 1), 0.1, **known | options)


def drawing(drawn):
    """Run FedAvg under a process that draws this."""
    process = type("Own", (Participation,), {"draw": lambda self, seed, t: drawn})(2)
    return simulate(FedAvg(process, lr=0.1), TASK, 1)


def worded(largest=4, least=0, test=0):
    """Return sentences of three words, one of which is the largest and another the least."""
    x = np.ones((8, 3), dtype=int)
    x[5, 1], x[6, 2] = largest, least
    return FederatedDataset.build(x, Y, PARTS, x.clip(0, 4) + test, Y)


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
    "a state of more clients": (
        lambda: simulate(ALGORITHM, TASK, 1, state=FedAvg(Full(3), 0.1).init(THREE, (0,))),
        "its cursor is (1, 3), not (1, 2)"),
    "a state of another method": (
        lambda: simulate(GeneralizedFedAvg(Full(2), 0.1), TASK, 1,
                         state=ALGORITHM.init(TASK, (0,))), "GeneralizedFedAvg for this task: it "
        "has no u"),
    "a state, and a process of fewer clients": (
        lambda: simulate(FedAvg(Full(1), 0.1), TASK, 1, state=ALGORITHM.init(TASK, (0,))),
        "Participation is for 1 clients, the data for 2"),
    "a state before the first round": (
        lambda: simulate(ALGORITHM, TASK, 1, state=ALGORITHM.init(TASK, (0,), t=-3)),
        "round t is a whole number of at least 0; got -3"),
    "sync times of more runs": (
        lambda: simulate(groups(sync=(1.0, 2.0)), TASK, 1), "2 values for 1 runs"),
    "the class of a law": (lambda: groups(local=Deterministic), "local is a delay law"),
    "a share for a process": (
        lambda: AmplifiedHierarchicalSGD(**vars(groups()), availability=0.5),
        "availability is a process over groups"),
    "chains with several ways off": (lambda: Markov(2, 0.1, (0.1, 0.2)), "off is one number"),
    "a word for a chance": (lambda: Markov(2, ("a", "b")), "in (0, 1]"),
    "no rounds of a process": (lambda: Full(3).rho2(0, 0), "rounds is a whole number"),
    "rounds that end before they start": (lambda: Full(3).weights(0, 3, 1), "stop is a whole"),
    "the round before the first": (
        lambda: PeriodicSampler(10, 1).draw(0, -1), "t is a whole number of at least 0"),
    "clients without weights": (lambda: drawing([0, 1]), "A draw is two lists"),
    "one weight for all": (lambda: drawing((np.array([0, 1]), 0.5)), "A draw is two lists"),
    "a word nobody knows": (lambda: Task(WORDS, worded(largest=9)), "whole numbers, 0 to 9"),
    "a word before the first": (lambda: Task(WORDS, worded(least=-1)), "whole numbers, -1 to 4"),
    "a word of the test split": (lambda: Task(WORDS, worded(test=9)), "whole numbers, 9 to 13"),
    "classes from 1": (
        lambda: Task(models.softmax(3, 2), FederatedDataset.build(X, Y + 1, PARTS)), "take y - 1"),
    "test clients without a test split": (
        lambda: FederatedDataset.build(X, Y, PARTS, test_parts=PARTS), "Give test_x, too"),
    "a second moment that forgets all": (
        lambda: theory.largest_step(0.9, 0.0, 5), "beta2 is above 0"),
    "slow weights that stay": (lambda: theory.variance_left(0.9, 0.0, 5), "alpha is above 0"),
    "a round trip in the past": (
        lambda: tiers.round_time(t_comm=-1, t_comp=1, Q=1), "t_comm is at least 0"),
    "no rounds for a product": (
        lambda: tiers.best_product(L=1, gap=1, sigma2=1, rounds=0), "rounds is above 0"),
    "more rows than samples": (
        lambda: tiers.empty_chance(samples=9, rows=10, batch_size=3), "of the 9 samples"),
    "no rounds for a rate": (lambda: hierarchy.corollary_1_rate(0, 1), "rounds is above 0"),
    "one model for a list": (
        lambda: TieredTask(models.linear(3), [X], Y, [PARTS]), "[model, ...]; got one Model"),
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
