"""Time a round of federated averaging in pfl-research: the work of every script in this folder.

Run with ``python``, one process uses all cores through torch. Run with ``torchrun``, as the guide
of pfl-research recommends, several processes share the clients of a round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from importlib.metadata import version

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

os.environ["PFL_PYTORCH_DEVICE"] = "cpu"  # both are read when pfl is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without it, workers on a GPU machine would talk by NCCL

from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

CLIENTS, SAMPLES, COHORT, STEPS, BATCH, LR = 250, 240, 10, 5, 16, 0.01
WARM_UP = 2


class Net(nn.Module):
    """The Fashion-MNIST CNN of Wang and Ji (2022): 228,586 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 32, 5, padding=2)
        self.fc1 = nn.Linear(32 * 7 * 7, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch of images."""
        h = max_pool2d(relu(self.conv1(x)), 2)
        h = max_pool2d(relu(self.conv2(h)), 2).flatten(1)
        return self.fc2(relu(self.fc1(h)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss that a client descends; pfl calls it at every step."""
        return cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return what pfl reports of a client; it asks in the very first round only."""
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Stopwatch(TrainingProcessCallback):
    """Note when training begins and when each round ends."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Start the clock."""
        self.marks = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Mark the end of a round."""
        self.marks.append(time.perf_counter())
        return False, Metrics()


def clients() -> FederatedDataset:
    """Return random images and labels, in memory, cut into clients once."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, SAMPLES, 1, 28, 28, generator=g)
    y = torch.randint(10, (CLIENTS, SAMPLES), generator=g)
    each = [PyTorchTensorDataset(pair) for pair in zip(x, y, strict=True)]
    return FederatedDataset(each.__getitem__, get_user_sampler("minimize_reuse", range(CLIENTS)))


def measure(rounds: int) -> list[float]:
    """Return the seconds of each round after the warm-up."""
    np.random.seed(0)  # workers must agree on the clients of a round
    torch.manual_seed(0)
    net, data, watch = Net(), clients(), Stopwatch()
    total = WARM_UP + rounds
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=total,
            evaluation_frequency=total,  # round 0, a warm-up, and no other
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByUser()]),
        model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_batch_size=BATCH,
            local_num_epochs=None,
            local_num_steps=STEPS,
            local_learning_rate=LR,
        ),
        callbacks=[watch],
        send_metrics_to_platform=False,
    )
    return np.diff(watch.marks)[WARM_UP:].tolist()


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds that are timed")
    seconds = measure(parser.parse_args().rounds)
    processes, threads = int(os.environ.get("WORLD_SIZE", 1)), torch.get_num_threads()
    if os.environ.get("RANK", "0") == "0":
        row = dict(
            peer="pfl-research",
            version=version("pfl"),
            torch=torch.__version__,
            seconds_per_round=round(statistics.median(seconds), 5),
            rounds=len(seconds),
            what=f"SimulatedBackend, processes: {processes}, torch threads in each: {threads}",
            date=datetime.date.today().isoformat(),
        )
        print(json.dumps(row))


if __name__ == "__main__":
    main()
