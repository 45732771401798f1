"""A sweep in one batch is every run of it alone, bit for bit.

Products of a module are the processor's library's, and some round them by the size of the batch.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedlib.datasets import partition
from fedlib.engine import models
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import column, sweep
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitMinibatch
from fedlib.papers.tiers import TDCD, LabelPrivateTDCD, TieredTask
from fedlib.population import participation as pt

N, SEEDS, RATES = 8, (1, 4, 6), (0.03, 0.1, 0.3, 0.7)
KEYS = ["run", "seed", "round", "split", "metric"]
MODELS = {
    "dense": lambda: models.mlp(6, 5, 3),
    "module": lambda: models.Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
}
PROCESSES = [
    pt.Full(N),
    pt.Independent(N, 3),
    pt.Regularized(N, 2),
    pt.PeriodicSampler(N, 2, 2, 4),
    pt.Drift(N, 3),
]


def problem(name="dense", samples=10):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((samples * N, 6)).astype(np.float32)
    data = FederatedDataset.build(
        x,
        rng.integers(0, 3, len(x)),
        list(np.arange(len(x)).reshape(N, -1)),
        x[:9],
        np.arange(9) % 3,
    )
    return Task(MODELS[name](), data)


def tiered():
    rng = np.random.default_rng(4)
    features = [rng.standard_normal((24, 4)).astype(np.float32) for _ in range(2)]
    rows = partition.grid(24, [3, 2])
    return TieredTask([models.mlp(4, 5, 3)] * 2, features, rng.integers(0, 3, 24), rows)


def tidy(frame):
    return frame.sort_values(KEYS).reset_index(drop=True)


def alone(algorithm, task, rounds, grid, seeds, **options):
    """Run every setting and every seed by itself."""
    frames, states = [], []
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        name = ", ".join(f"{field}={value}" for field, value in setting.items())
        for seed in seeds:
            one = replace(algorithm, **setting)
            history = simulate(one, task, rounds, (seed,), name=name, progress=False, **options)
            frames.append(history.frame)
            states.append(history.state)
    return pd.concat(frames), states


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: type(p).__name__)
def test_rates_and_seeds_in_one_call(process, model):
    task, algorithm = problem(model), FedAvg(process, 0.1, local_steps=2, batch_size=3)
    options = dict(evaluation=Evaluation(3, splits=("train", "test"), limit=50))
    found = sweep(algorithm, task, 7, {"lr": RATES}, SEEDS, progress=False, **options)
    frame, states = alone(algorithm, task, 7, {"lr": RATES}, SEEDS, **options)
    within = dict(rtol=1e-6, atol=1e-7) if model == "module" else dict(rtol=0, atol=0)
    pd.testing.assert_frame_equal(tidy(found.frame), tidy(frame), **within)
    assert found.diverged == {}
    assert found.frame["run"].unique().tolist() == [f"lr={rate}" for rate in RATES]
    for r, state in enumerate(states):
        torch.testing.assert_close(found.state.x[r], state.x[0], **within)
        assert np.array_equal(found.state.cursor[r], state.cursor[0])


@pytest.mark.parametrize("size", [5, 7])
def test_the_loss_of_two_classes_is_rounded_alike_wherever_a_copy_lies(size):
    """Numbers that fill a register, and those left over at the end, are computed alike."""
    data = FederatedDataset.build(problem().data.x, np.arange(10 * N) % 2, problem().data.parts)
    task, algorithm = Task(models.mlp(6, 5, 1), data, "logistic"), FedAvg(pt.Full(N), 0.1, 2, size)
    found = sweep(algorithm, task, 8, {"lr": RATES}, SEEDS, progress=False)
    _, states = alone(algorithm, task, 8, {"lr": RATES}, SEEDS)
    assert torch.equal(found.state.x, torch.cat([state.x for state in states]))


SAME_SEEDS = [
    FedAvg(pt.Markov(N, 0.2, 0.3), 0.1, local_steps=2, batch_size=3),
    TDCD(0.1, 2, 8),
    LabelPrivateTDCD(0.1, 2, 8, fresh=False),
]


@pytest.mark.parametrize("algorithm", SAME_SEEDS, ids=lambda a: type(a).__name__)
def test_where_seeds_share_their_padding_each_setting_is_one_run(algorithm):
    """Cohorts of different sizes are padded to the longest of the seeds."""
    task = problem() if isinstance(algorithm, FedAvg) else tiered()
    found = sweep(algorithm, task, 5, {"lr": RATES}, SEEDS, progress=False)
    for i, rate in enumerate(RATES):
        one, name = replace(algorithm, lr=rate), f"lr={rate}"
        whole = simulate(one, task, 5, SEEDS, name=name, progress=False)
        assert torch.equal(found.state.x[3 * i : 3 * i + 3], whole.state.x)
        assert tidy(found.frame[found.frame["run"] == name]).equals(tidy(whole.frame))


def test_two_fields_and_algorithms_with_memory():
    task, grid = problem(), {"lr": (0.05, 0.2), "amplify": (1.0, 3.3)}
    process = pt.PeriodicSampler(N, 2, 2, 4)
    for kind in (GeneralizedFedAvg, WaitMinibatch):
        algorithm = kind(process, 0.1, interval=3, local_steps=2, batch_size=3)
        found = sweep(algorithm, task, 8, grid, SEEDS, progress=False)
        frame, _ = alone(algorithm, task, 8, grid, SEEDS)
        assert tidy(found.frame).equals(tidy(frame))
        assert found.frame["run"].unique()[1] == "lr=0.05, amplify=3.3"


def test_evaluation_in_pieces_is_that_of_the_run_alone():
    """How samples are cut depends on the number of models; other settings do not count."""
    task = problem(samples=30)
    task.chunk = 6 * 100
    algorithm = FedAvg(pt.Full(N), 0.1, batch_size=3)
    found = sweep(algorithm, task, 2, {"lr": RATES}, SEEDS, progress=False)
    for rate in RATES:
        one = replace(algorithm, lr=rate)
        whole = simulate(one, task, 2, SEEDS, name=f"lr={rate}", progress=False).frame
        mine = found.frame[found.frame["run"] == f"lr={rate}"]
        assert tidy(mine).equals(tidy(whole))


@dataclass(frozen=True)
class Breaks:
    """FedAvg that loses the runs of some rate and seed in round 2."""

    lr: tuple = ()
    lost: tuple = ()

    per_run = ("lr",)

    def init(self, task, seeds):
        return FedAvg(pt.Full(N), self.lr).init(task, seeds)

    def round(self, state, task):
        state, metrics = FedAvg(pt.Full(N), self.lr).round(state, task)
        x = state.x.clone()
        for r, pair in enumerate(zip(self.lr, state.seeds, strict=True)):
            if pair in self.lost and state.t == 2:
                x[r] = float("nan")
        return replace(state, x=x), metrics


def test_a_diverged_run_is_told_by_name_and_seed(tmp_path):
    task, grid = problem(), {"lr": RATES}
    lost = ((RATES[1], 4), (RATES[1], 6), (RATES[3], 4))
    saved = dict(checkpoint=Checkpoint(tmp_path / "a.pt", 2), progress=False)
    for _ in range(2):  # the second call goes on from the checkpoint of the first
        history = sweep(Breaks(lost=lost), task, 4, grid, SEEDS, **saved)
        assert history.diverged == {("lr=0.1", 4): 2, ("lr=0.1", 6): 2, ("lr=0.7", 4): 2}
        assert history.state.t == 4, "healthy runs go on"
    with pytest.raises(FedlibError, match="belongs to another run"):
        sweep(Breaks(lost=lost), task, 4, {"lr": RATES[::-1]}, SEEDS, **saved)


def test_a_column_stands_beside_the_rows():
    x = torch.zeros(2, 5)
    assert column(0.3, x) == 0.3 and column(np.float64(0.3), x, 4) == 0.3
    assert column((0.25, 0.5), x).tolist() == [[0.25], [0.5]]
    assert column((0.25,), x, 2).tolist() == [[0.25]] * 4, "one value serves all runs"
    assert column((0.3, 0.5), x, 2).tolist() == torch.tensor([[0.3], [0.3], [0.5], [0.5]]).tolist()


def test_what_cannot_be_swept_is_told():
    task, algorithm = problem(), FedAvg(pt.Full(N), 0.1)
    with pytest.raises(FedlibError, match="FedAvg cannot have several values of local_steps .* lr"):
        sweep(algorithm, task, 1, {"local_steps": (1, 2)})
    with pytest.raises(FedlibError, match="local_steps is a whole number"):
        FedAvg(pt.Full(N), 0.1, local_steps=(1, 2))
    with pytest.raises(FedlibError, match=r"Each lr must be positive.*; got -0.2"):
        FedAvg(pt.Full(N), (0.1, -0.2))
    with pytest.raises(FedlibError, match="2 values for 3 runs"):
        simulate(FedAvg(pt.Full(N), (0.1, 0.2)), task, 1, (0, 1, 2), progress=False)
    with pytest.raises(FedlibError, match=r"Seed 1 occurs twice in run 'a': \(1, 2, 1\)"):
        simulate(algorithm, task, 1, (1, 2, 1), name="a", progress=False)
    with pytest.raises(FedlibError, match="2 names for 1 runs"):
        simulate(algorithm, task, 1, name=("a", "b"), progress=False)


def test_without_seeds_it_is_seed_zero():
    algorithm = FedAvg(pt.Independent(N, 3), 0.1, batch_size=5)
    frames = [sweep(algorithm, problem(), 1, {"lr": [0.1]}, progress=False).frame]
    frames.append(simulate(algorithm, problem(), 1, progress=False).frame)
    for frame in frames:
        assert set(frame["seed"]) == {0}
    assert frames[0]["value"].tolist() == frames[1]["value"].tolist()
