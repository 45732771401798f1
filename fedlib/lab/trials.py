"""Every algorithm and every model once, in small: what a device is tried with.

The module of a paper's study has a dictionary ``TRIALS``, one entry for each of its algorithms:
``name -> build(dtype)``, which returns the algorithm and its task on the CPU. Whoever adds one
there has it tried on every GPU (:mod:`fedlib.lab.gpu`), and in the tests on a device that does not
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.engine.tasks import Task
from fedlib.papers.fedavg import FedAvg
from fedlib.population.participation import Independent

Trial = Callable[[np.dtype], tuple[Any, Any]]
CLIENTS, SAMPLES = 4, 12


def federated(
    model: Model, *shape: int, dtype: Any = np.float64, classes: int = 3, augment: bool = False
) -> Task:
    """Return a task on random features ``[n, *shape]``; real targets where ``classes`` is 0."""
    rng, n = stream(0, "trial"), CLIENTS * SAMPLES
    x = rng.standard_normal((n, *shape)).astype(dtype)
    y = rng.integers(0, classes, n) if classes else rng.standard_normal(n).astype(dtype)
    parts = list(np.arange(n).reshape(CLIENTS, SAMPLES))
    data = FederatedDataset.build(x, y, parts, x[:7], y[:7], augment=augment)
    return Task(model, data, "cross_entropy" if classes else "half_square", l2=0.01)


def _characters(model: Model, symbols: int) -> Task:
    """Return a task on windows of random characters, ``[n, 6]``."""
    rng, n = stream(0, "trial"), CLIENTS * SAMPLES
    x, y = rng.integers(0, symbols, (n, 6)).astype(np.uint8), rng.integers(0, symbols, n)
    parts = list(np.arange(n).reshape(CLIENTS, SAMPLES))
    return Task(model, FederatedDataset.build(x, y, parts, x[:7], y[:7]), l2=0.01)


def _own_module() -> Model:
    """Return a network that is mapped over the copies, with buffers and dropout."""
    layers = [nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3)]
    return Model(nn.Sequential(*layers))


MODELS: dict[str, Callable[[Any], Task]] = {
    "softmax": lambda d: federated(models.softmax(12, 3), 12, dtype=d),
    "mlp": lambda d: federated(models.mlp(12, 8, 3), 12, dtype=d),
    "fashion_cnn": lambda d: federated(models.fashion_cnn(), 1, 28, 28, dtype=d),
    "cifar_cnn": lambda d: federated(models.cifar_cnn(), 3, 32, 32, dtype=d, augment=True),
    "lenet": lambda d: federated(models.lenet((1, 17, 18), 3), 1, 17, 18, dtype=d),
    "small_cnn": lambda d: federated(models.small_cnn((2, 8, 9), 3), 2, 8, 9, dtype=d),
    "normed_cnn": lambda d: federated(models.normed_cnn((2, 8, 9), 3), 2, 8, 9, dtype=d),
    "lstm": lambda d: federated(models.lstm(4, 5, 3), 6, 4, dtype=d),
    "char_lstm": lambda d: _characters(models.char_lstm(5, 3, 4), 5),
    "resnet18": lambda d: federated(models.resnet18((3, 16, 16), 3), 3, 16, 16, dtype=d),
    "linear": lambda d: federated(models.linear(12), 12, dtype=d, classes=0),
    "location": lambda d: federated(models.location(1), 1, dtype=d, classes=0),
    "a module of one's own": lambda d: federated(_own_module(), 12, dtype=d),
}


def _with(build: Callable[[Any], Task]) -> Trial:
    return lambda d: (FedAvg(Independent(CLIENTS, 2), 0.05, 2, 4), build(d))


TRIALS: dict[str, Trial] = {f"FedAvg, {name}": _with(build) for name, build in MODELS.items()}
TRIALS["FedAvg, full batches, weights by size"] = lambda d: (
    FedAvg(Independent(CLIENTS, 2), 0.05, 2, None, "sizes"),
    MODELS["mlp"](d),
)
TRIALS["FedAvg, a rate for each run"] = lambda d: (
    FedAvg(Independent(CLIENTS, 2), (0.05, 0.1), 2, 4),
    MODELS["small_cnn"](d),
)
