"""MIFA: the server remembers what the absent last did, and counts it again.

Gu, Huang, Zhang and Huang, *Fast Federated Learning in the Presence of Arbitrary Device
Unavailability*, NeurIPS 2021::

    1  for t = 1, 2, ...
    2      some clients are available
    3      each of them: w_i = w,  K times: w_i <- w_i - η g_i(w_i)
    4          G_i <- (w - w_i) / η
    5      w <- w - η / N Σ_i G_i, over all clients
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedlib.engine.draws import draw_one
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.papers import fedavg
from fedlib.papers.fedavg import check_settings, movements, start
from fedlib.papers.methods.common import (
    Rate,
    Visits,
    changed,
    kept,
    nothing,
    visits,
)
from fedlib.population.participation import Participation


@dataclass(frozen=True, kw_only=True)
class State(fedavg.State):
    """What a checkpoint holds: that of FedAvg, and the memory.

    Attributes
    ----------
    G
        What each client last did, ``[R, N, P]``: the sum of its gradients in a round; zero for
        those who have not been there.
    """

    G: Tensor


@dataclass(frozen=True)
class MIFA:
    """FedAvg of everybody, where the absent count with their last movement.

    Whoever takes part renews its ``G_i = (w_t - w_i) / η``, and the model moves by the plain mean
    over all N clients, whatever weights q the process gives. The paper's analysis has everybody
    there in the first round. The authors' code has two ways around that: one waits until each has
    been available once, then lets all of them train; the other begins with a memory of zeros, as
    we do. The paper's rate η_t falls from round to round; here it stays.

    Parameters
    ----------
    participation
        Who takes part. Nobody comes twice in a round.
    lr
        Step size η; a number, or one a run. The longer clients stay away, the smaller it has to
        be: :func:`~fedlib.papers.methods.theory.memory_limit`.
    local_steps
        Local steps K of each client in a round.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    """

    participation: Participation
    lr: Rate
    local_steps: int = 1
    batch_size: int | None = None

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return State(x, seeds, cursor, t, G=nothing(x, task.N))

    def draws(self, state: State, task: Task) -> Iterator[Visits[np.ndarray]]:
        """Draw the next rounds on the host: who takes part, and which samples they read."""
        return visits(self, state, task)

    def round(
        self, state: State, task: Task, drawn: Visits[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: lines 2 to 5 of the box."""
        drawn = drawn or draw_one(self, state, task)  # line 2
        rate = column(self.lr, state.x, drawn.q.shape[1])
        new = -movements(self, state.x, task, drawn) / rate  # lines 3-4
        G = changed(state.G, drawn, new - kept(state.G, drawn))  # line 4
        x = state.x - column(self.lr, state.x) * G.mean(1)  # line 5
        return replace(state, x=x, G=G, cursor=drawn.cursor, t=state.t + 1), {}
