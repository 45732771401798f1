"""Federated averaging, the baseline of every paper.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, *Communication-Efficient Learning of Deep
Networks from Decentralized Data*, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import average
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.population.participation import Participation


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. Row ``r`` of every tensor belongs to run ``r``.

    Attributes
    ----------
    x
        Global models ``[R, P]``.
    seeds
        One seed a run.
    cursor
        Minibatches each client has used, ``[R, N]``.
    t
        The next round.
    """

    x: Tensor
    seeds: tuple[int, ...]
    cursor: np.ndarray
    t: int = 0


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging: the clients of a round take local steps, the server averages.

    Parameters
    ----------
    participation
        Who takes part, and with what weight q.
    lr
        Local step size; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    weights
        ``"process"``: the participation process's q. ``"sizes"``: q times the client's number
        of samples, renormalised over the cohort, as McMahan et al. weigh their clients.
    """

    participation: Participation
    lr: float | tuple[float, ...]
    local_steps: int = 1
    batch_size: int | None = None
    weights: str = "process"

    per_run: ClassVar = ("lr",)

    def __post_init__(self) -> None:
        check_positive(self, "lr", "local_steps")
        if self.weights not in ("process", "sizes"):
            raise unknown("kind of weights", self.weights, ["process", "sizes"])

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        return State(*start(self, task, seeds, x), t)

    def round(self, state: State, task: Task) -> tuple[State, dict[str, Any]]:
        """Run one round of every run."""
        clients, q = self.participation.cohort(state.seeds, state.t)
        if self.weights == "sizes":
            q = by_size(q, clients, task.data.sizes)
        d, cursor = movement(self, state, task, clients, q)
        return replace(state, x=state.x + d, cursor=cursor, t=state.t + 1), {}


def by_size(q: Tensor, clients: Tensor, sizes: np.ndarray) -> Tensor:
    """Return weights ``[R, S]`` proportional to q and to the clients' ``sizes[N]``."""
    q = q * torch.from_numpy(sizes)[clients]
    return q / q.sum(1, keepdim=True)


class Averaging(Protocol):
    """What :func:`movement` reads of an algorithm: settings of :class:`FedAvg`."""

    participation: Participation
    lr: float | tuple[float, ...]
    local_steps: int
    batch_size: int | None


def movement(
    algorithm: Averaging, state: State, task: Task, clients: Tensor, q: Tensor
) -> tuple[Tensor, np.ndarray]:
    """Return ``d = Σ_n q_n (y_n - x)`` for every run, ``[R, P]``, and the new data cursor.

    The copies of all runs and clients are rows of one matrix: each run's model is repeated
    for its clients, all rows take their local steps, and the weights contract them again.
    """
    batches, cursor = task.data.next_batches(
        state.seeds, clients, state.cursor, algorithm.local_steps, algorithm.batch_size
    )
    cohort = clients.shape[1]
    start = state.x.repeat_interleave(cohort, 0)  # [R S, P]
    y = local_sgd(task, start, batches, column(algorithm.lr, state.x, cohort))
    return average(y - start, q), cursor


def start(
    algorithm: Averaging, task: Task, seeds: Sequence[int], x: Tensor | None
) -> tuple[Tensor, tuple[int, ...], np.ndarray]:
    """Return models ``[R, P]``, seeds, and the cursor of clients that have used nothing yet."""
    if algorithm.participation.N != task.N:
        raise FedlibError(
            f"Participation is for {algorithm.participation.N} clients, the data for {task.N}."
        )
    x = task.init(seeds) if x is None else x
    return x, tuple(seeds), np.zeros((len(seeds), task.N), dtype=np.int64)


def check_positive(algorithm: object, *names: str) -> None:
    """Refuse fields that are not positive, and several values where all runs need the same."""
    for name in names:
        value, own = getattr(algorithm, name), getattr(algorithm, "per_run", ())
        if not np.all(np.greater(value, 0)):
            raise FedlibError(f"{name} must be positive; got {value}.")
        if np.ndim(value) and name not in own:
            raise FedlibError(f"{name} is one number for all runs; got {value}.")
