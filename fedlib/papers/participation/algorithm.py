"""Generalized FedAvg with amplified updates, and the waiting baselines.

Wang and Ji, *A Unified Analysis of Federated Learning with Arbitrary Client Participation*,
NeurIPS 2022. Line numbers refer to the algorithm box of the book.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.draws import ON_HOST, Array, draw_one
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, FedAvg, check_settings, movement, read, start
from fedlib.population.participation import Full, Participation


@dataclass(frozen=True, kw_only=True)
class State(fedavg.State):
    """What a checkpoint holds: that of FedAvg, and what the amplification remembers.

    Attributes
    ----------
    u
        Movement accumulated since ``t0``, ``[R, P]``.
    t0
        The round in which the current interval began.
    """

    u: Tensor
    t0: int


@dataclass(frozen=True)
class GeneralizedFedAvg:
    """Algorithm 1: FedAvg whose accumulated movement is amplified once an interval.

    Parameters
    ----------
    participation
        Gives the weights q.
    lr
        Local step size γ; a number, or one a run.
    amplify
        Amplification factor η > 0; 1 is FedAvg. A number, or one a run.
    interval
        Amplification interval P, in rounds.
    local_steps
        Local steps I.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    """

    participation: Participation
    lr: float | tuple[float, ...]
    amplify: float | tuple[float, ...] = 1.0
    interval: int = 1
    local_steps: int = 1
    batch_size: int | None = None

    per_run: ClassVar[tuple[str, ...]] = ("lr", "amplify")

    def __post_init__(self) -> None:
        check_settings(self, ("lr", "amplify"), ("interval", "local_steps"))

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return State(x, seeds, cursor, t, u=torch.zeros_like(x), t0=t)

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: who takes part, and which samples they read."""
        return fedavg.draws(self, state, task)

    def round(
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: line 1 of the box, then lines 2 to 7."""
        drawn = drawn or draw_one(self, state, task)  # line 2
        d = movement(self, state.x, task, drawn)  # lines 3-5
        x, u, t0 = state.x + d, state.u + d, state.t0  # line 5
        if state.t + 1 - t0 == self.interval:  # line 6
            x = x + column(np.subtract(self.amplify, 1), x) * u  # line 7
            u, t0 = torch.zeros_like(u), state.t + 1  # line 7
        return replace(state, x=x, u=u, cursor=drawn.cursor, t=state.t + 1, t0=t0), {}


@dataclass(frozen=True)
class Waiting(Generic[Array]):
    """What chance decides in a round of waiting.

    Attributes
    ----------
    pieces
        The draws of all clients, some at a time to save memory; empty while waiting.
    cursor
        Minibatches each client has used after the round, ``[R, N]``.
    """

    pieces: list[Drawn[Array]]
    cursor: np.ndarray = field(metadata=ON_HOST)


@dataclass(frozen=True)
class WaitMinibatch(GeneralizedFedAvg):
    """Wait until everybody has been available, then one round of all clients.

    The model changes once every ``interval`` rounds, by FedAvg over all ``N`` clients with
    equal weights and ``local_steps`` minibatch steps each. ``amplify`` is not used. This is
    the baseline of the paper's experiments; its theory section waits with single gradients.
    """

    def draws(  # type: ignore[override]  # whoever waits draws everyone, or nobody
        self, state: State, task: Task
    ) -> Iterator[Waiting[np.ndarray]]:
        """Draw the next rounds on the host: nobody's samples, and everybody's in the last."""
        cursor, t0 = state.cursor, state.t0
        for t in itertools.count(state.t):
            pieces: list[Drawn[np.ndarray]] = []
            if t + 1 - t0 == self.interval:
                pieces, t0 = everyone(self, state.seeds, task, cursor), t + 1
                cursor = pieces[-1].cursor
            yield Waiting(pieces, cursor)

    def round(  # type: ignore[override]
        self, state: State, task: Task, drawn: Waiting[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Let the clock move on; update in the last round of an interval."""
        drawn = drawn or draw_one(self, state, task)
        x, t0 = state.x, state.t0
        if drawn.pieces:
            d = torch.zeros_like(x)
            for piece in drawn.pieces:
                d += movement(self, x, task, piece)
            x, t0 = x + d, state.t + 1
        return replace(state, x=x, cursor=drawn.cursor, t=state.t + 1, t0=t0), {}


@dataclass(frozen=True)
class WaitFull(WaitMinibatch):
    """The waiting baseline with each client's whole data in every local step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size is not None:
            raise FedlibError(f"Wait-full uses all local data; got batch_size={self.batch_size}.")


def everyone(
    algorithm: GeneralizedFedAvg, seeds: Sequence[int], task: Task, cursor: np.ndarray
) -> list[Drawn[np.ndarray]]:
    """Draw a round in which all clients take part, in pieces to save memory."""
    pieces: list[Drawn[np.ndarray]] = []
    clients, q = Full(task.N).cohort_arrays(seeds, 0)
    for first in range(0, task.N, 50):
        some = np.s_[:, first : first + 50]
        pieces.append(read(algorithm, seeds, task, clients[some], q[some], cursor))
        cursor = pieces[-1].cursor
    return pieces


ALGORITHMS = {
    "fedavg": FedAvg,
    "generalized-fedavg": GeneralizedFedAvg,
    "wait-minibatch": WaitMinibatch,
    "wait-full": WaitFull,
}
