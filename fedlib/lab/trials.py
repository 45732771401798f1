"""Every algorithm and every model once, in small: what a device is tried with, and how.

The module of a paper's study has a dictionary ``TRIALS``, one entry for each of its algorithms:
``name -> build(dtype)``, which returns the algorithm and its task on the CPU. Whoever adds one
there has it tried on every GPU (:mod:`fedlib.lab.gpu`), and in the tests on a device that does not
exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlib.engine import convolution, models, recording
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.local import everywhere
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
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


def _torch_module() -> Model:
    """Return a network that is mapped over the copies, with buffers and dropout."""
    layers = [nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 3)]
    return Model(nn.Sequential(*layers))


TASKS: dict[str, Callable[[Any], Task]] = {
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
    "a module of one's own": lambda d: federated(_torch_module(), 12, dtype=d),
}


def _with(build: Callable[[Any], Task]) -> Trial:
    return lambda d: (FedAvg(Independent(CLIENTS, 2), 0.05, 2, 4), build(d))


TRIALS: dict[str, Trial] = {f"FedAvg, {name}": _with(build) for name, build in TASKS.items()}
TRIALS["FedAvg, full batches, weights by size"] = lambda d: (
    FedAvg(Independent(CLIENTS, 2), 0.05, 2, None, "sizes"),
    TASKS["mlp"](d),
)
TRIALS["FedAvg, a rate for each run"] = lambda d: (
    FedAvg(Independent(CLIENTS, 2), (0.05, 0.1), 2, 4),
    TASKS["small_cnn"](d),
)


# --- compared with the CPU ------------------------------------------------------------------------

TRIAL_ROUNDS = {"float64": 9, "float32": 4}  # the third of a kind is recorded, later are replayed
TRIAL_SEEDS = (1, 2)
LAYERS = {"first": ((10, 16, 1, 28, 28), 32), "second": ((10, 16, 32, 14, 14), 32)}


class Float32Only(FedlibError):
    """Data are symbols, and the model is float32 whatever is asked."""


def compare(build: Trial, dtype: str, device: str, rounds: int = 0) -> float:
    """Return how far a device ends from the CPU after the same draws, as a part of the way gone.

    The CPU takes one copy after the other, the device all of them, recorded and replayed. The
    state's tensors count, and the loss that each side reports. On a GPU a trial of many rounds
    whose steps could be recorded, and were not, is an error.
    """
    rounds = rounds or TRIAL_ROUNDS[dtype]
    algorithm, task = build(np.dtype(dtype))
    x = getattr(task, "data", task).x
    if dtype == "float64" and torch.is_tensor(x) and not x.is_floating_point():
        raise Float32Only("There are no symbols of 64 bits.")
    start, ends, losses = algorithm.init(task, TRIAL_SEEDS), [], []
    for backend, place in (("loop", "cpu"), ("recorded", device)):
        there = task.to(place)
        with everywhere(backend):
            history = simulate(
                algorithm, there, rounds, TRIAL_SEEDS, progress=False,
                evaluation=Evaluation(rounds, splits="test"),
            )  # fmt: skip
        ends.append(_numbers(history.state))
        last = history.frame.query("metric == 'loss'").tail(len(TRIAL_SEEDS))
        losses.append(torch.tensor(last["value"].to_numpy()))
        recordings = getattr(there, "recordings", {})
        replays = [getattr(one, "replays", False) for one in recordings.values()]
        long = rounds > TRIAL_ROUNDS["float32"]  # some methods compute in few rounds of four
        if device == "cuda" == place and long and replays and not any(replays):
            raise FedlibError(f"Nothing was recorded: {'; '.join(recording.BROKEN) or 'why?'}")
        recordings.clear()
    gaps = [_gap(*ends, _numbers(start)), _gap(*losses, torch.zeros_like(losses[0]))]
    return float(np.max(gaps))  # nan, too, is the larger one


def _numbers(state: Any) -> torch.Tensor:
    """Return all that the tensors of a state hold: models, and what else is learned."""
    values = (getattr(state, field.name) for field in dataclasses.fields(state))
    return torch.cat([one.double().cpu().flatten() for one in values if torch.is_tensor(one)])


def _gap(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two results are from each other, as a part of the way from the start."""
    one, other, start = (x.double().cpu() for x in (one, other, start))
    way = (one - start).norm().item()
    return (one - other).norm().item() / way if way else float("inf")


def ways_gap(layer: str, way: str, dtype: str, device: str) -> float:
    """Return how far a way of convolving on a device is from one copy after the other on the CPU.

    In the shapes of Figure 1's CNN: the result and the gradients of filters and biases.
    """
    shape, filters = LAYERS[layer]
    rng = stream(0, "ways", len(layer))
    sizes = (shape, (shape[0], filters, shape[2], 5, 5), (shape[0], filters))
    tensors = [torch.from_numpy(rng.standard_normal(size).astype(dtype)) for size in sizes]
    ends = []
    for place, convolved in (("cpu", convolution.one_by_one), (device, convolution.WAYS[way])):
        x, weight, bias = (tensor.to(place) for tensor in tensors)
        weight.requires_grad_(), bias.requires_grad_()
        out = convolved(x, weight, bias)
        ends.append([out, *torch.autograd.grad(out.square().mean(), (weight, bias))])
    pairs = zip(*[[t.detach() for t in end] for end in ends], strict=True)
    return float(np.max([_gap(one, other, torch.zeros_like(one)) for one, other in pairs]))
