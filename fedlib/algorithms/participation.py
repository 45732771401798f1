"""Generalized FedAvg with amplified updates, and the waiting baselines.

Wang and Ji, *A Unified Analysis of Federated Learning with Arbitrary Client Participation*,
NeurIPS 2022. Line numbers refer to the algorithm box of the book.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib.errors import FedlibError
from fedlib.local import local_sgd
from fedlib.participation import Full, Participation
from fedlib.tasks import Task


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. Row ``r`` of every tensor belongs to run ``r``.

    Attributes
    ----------
    x
        Global models ``[R, P]``.
    u
        Movement accumulated since ``t0``, ``[R, P]``.
    seeds
        One seed a run.
    cursor
        Minibatches each client has used, ``[R, N]``.
    t, t0
        The next round, and the round in which the current interval began.
    """

    x: Tensor
    u: Tensor
    seeds: tuple[int, ...]
    cursor: np.ndarray
    t: int = 0
    t0: int = 0


@dataclass(frozen=True)
class GeneralizedFedAvg:
    """Algorithm 1: FedAvg whose accumulated movement is amplified once an interval.

    Parameters
    ----------
    participation
        Gives the weights q.
    lr
        Local step size γ.
    amplify
        Amplification factor η > 0; 1 is FedAvg.
    interval
        Amplification interval P, in rounds.
    local_steps
        Local steps I.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    """

    participation: Participation
    lr: float
    amplify: float = 1.0
    interval: int = 1
    local_steps: int = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "amplify", "interval", "local_steps"):
            if not getattr(self, name) > 0:
                raise FedlibError(f"{name} must be positive; got {getattr(self, name)}.")

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        if self.participation.N != task.N:
            raise FedlibError(
                f"Participation is for {self.participation.N} clients, the data for {task.N}."
            )
        x = task.init(seeds) if x is None else x
        cursor = np.zeros((len(seeds), task.N), dtype=np.int64)
        return State(x, torch.zeros_like(x), tuple(seeds), cursor, t, t)

    def round(self, state: State, task: Task) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: line 1 of the box, then lines 2 to 7."""
        clients, q = self.participation.cohort(state.seeds, state.t)  # line 2
        d, cursor = movement(self, state, task, clients, q)  # lines 3-5
        x, u, t0 = state.x + d, state.u + d, state.t0  # line 5
        if state.t + 1 - t0 == self.interval:  # line 6
            x = x + (self.amplify - 1) * u  # line 7
            u, t0 = torch.zeros_like(u), state.t + 1  # line 7
        return replace(state, x=x, u=u, cursor=cursor, t=state.t + 1, t0=t0), {}


class FedAvg(GeneralizedFedAvg):
    """Federated averaging: the algorithm above without amplification (η = 1).

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas, AISTATS 2017.
    """


def movement(
    algorithm: Any, state: State, task: Task, clients: Tensor, q: Tensor
) -> tuple[Tensor, np.ndarray]:
    """Return ``d = Σ_n q_n (y_n - x)`` for every run, ``[R, P]``, and the new data cursor.

    The copies of all runs and clients are rows of one matrix: each run's model is repeated
    for its clients, all rows take their local steps, and the weights contract them again.
    """
    runs, cohort = clients.shape
    batches, cursor = task.data.next_batches(
        state.seeds, clients, state.cursor, algorithm.local_steps, algorithm.batch_size
    )
    start = state.x.repeat_interleave(cohort, 0)  # [R S, P]
    y = local_sgd(task, start, batches, algorithm.lr)
    moved = (y - start).view(runs, cohort, -1)
    q = q.to(state.x.device, state.x.dtype)
    return torch.bmm(q.unsqueeze(1), moved).squeeze(1), cursor


@dataclass(frozen=True)
class WaitMinibatch(GeneralizedFedAvg):
    """Wait until everybody has been available, then one round of all clients.

    The model changes once every ``interval`` rounds, by FedAvg over all ``N`` clients with
    equal weights and ``local_steps`` minibatch steps each. ``amplify`` is not used. This is
    the baseline of the paper's experiments; its theory section waits with single gradients.
    """

    def round(self, state: State, task: Task) -> tuple[State, dict[str, Any]]:
        """Let the clock move on; update in the last round of an interval."""
        x, cursor, t0 = state.x, state.cursor, state.t0
        if state.t + 1 - t0 == self.interval:
            d, cursor = everyone(self, state, task)
            x, t0 = x + d, state.t + 1
        return replace(state, x=x, cursor=cursor, t=state.t + 1, t0=t0), {}


@dataclass(frozen=True)
class WaitFull(WaitMinibatch):
    """The waiting baseline with each client's whole data in every local step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is not None:
            raise FedlibError(f"Wait-full uses all local data; got batch_size={self.batch_size}.")


def everyone(algorithm: Any, state: State, task: Task) -> tuple[Tensor, np.ndarray]:
    """Return the movement of a round in which all clients take part, in pieces to save memory."""
    d, cursor = torch.zeros_like(state.x), state.cursor
    all_clients, q = Full(task.N).cohort(state.seeds, state.t)
    for clients, weight in zip(all_clients.split(50, 1), q.split(50, 1), strict=True):
        piece, cursor = movement(algorithm, replace(state, cursor=cursor), task, clients, weight)
        d += piece
    return d, cursor


ALGORITHMS = {
    "fedavg": FedAvg,
    "generalized-fedavg": GeneralizedFedAvg,
    "wait-minibatch": WaitMinibatch,
    "wait-full": WaitFull,
}
