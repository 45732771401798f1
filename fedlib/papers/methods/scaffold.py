"""SCAFFOLD: clients remember in which direction they drift, and steer against it.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, *SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning*, ICML 2020, Algorithm 1 with option II::

    1  for r = 1, 2, ...
    2      draw clients S
    3      each of them: y_i = x
    4          K times: y_i <- y_i - η_l (g_i(y_i) - c_i + c)
    5          Δy_i = y_i - x,  Δc_i = -c + (x - y_i) / (K η_l)
    6          c_i <- c_i + Δc_i
    7      x <- x + η_g / |S| Σ_i Δy_i
    8      c <- c + 1 / N Σ_i Δc_i
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.draws import draw_one
from fedlib.engine.mixing import average
from fedlib.engine.steps import corrected
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.papers import fedavg
from fedlib.papers.fedavg import check_settings, movements, start
from fedlib.papers.methods.common import (
    Rate,
    Visits,
    came,
    changed,
    kept,
    nothing,
    visits,
)
from fedlib.population.participation import Participation


@dataclass(frozen=True, kw_only=True)
class State(fedavg.State):
    """What a checkpoint holds: that of FedAvg, and the control variates.

    Attributes
    ----------
    c
        The server's, ``[R, P]``; always the mean of the clients'.
    c_i
        The clients', ``[R, N, P]``.
    """

    c: Tensor
    c_i: Tensor


@dataclass(frozen=True)
class SCAFFOLD:
    """FedAvg, whose clients add ``c - c_i`` to each gradient: what all do, less what they do.

    Option II of the paper, which needs no further gradients: a client's new ``c_i`` is the mean of
    the gradients that it has just taken. All variates begin at zero. The paper draws clients
    uniformly, so that all weights are ``1 / |S|``. With others Δx is the weighted mean; c stays
    the mean of all ``c_i``.

    Parameters
    ----------
    participation
        Who takes part, and with what weight q. Nobody comes twice in a round.
    lr
        Local step size η_l; a number, or one a run.
    local_steps
        Local steps K of each client in a round.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    server_lr
        Global step size η_g; a number, or one a run. The paper's experiments have 1.
    """

    participation: Participation
    lr: Rate
    local_steps: int = 1
    batch_size: int | None = None
    server_lr: Rate = 1.0

    per_run: ClassVar[tuple[str, ...]] = ("lr", "server_lr")

    def __post_init__(self) -> None:
        check_settings(self, ("lr", "server_lr"))

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return State(x, seeds, cursor, t, c=torch.zeros_like(x), c_i=nothing(x, task.N))

    def draws(self, state: State, task: Task) -> Iterator[Visits[np.ndarray]]:
        """Draw the next rounds on the host: who takes part, and which samples they read."""
        return visits(self, state, task)

    def round(
        self, state: State, task: Task, drawn: Visits[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: lines 2 to 8 of the box."""
        drawn = drawn or draw_one(self, state, task)  # line 2
        cohort = drawn.q.shape[1]
        c = state.c.repeat_interleave(cohort, 0)
        correction = c - kept(state.c_i, drawn)  # line 4
        dy = movements(self, state.x, task, drawn, corrected(), correction=correction)  # lines 3-5
        path = column(np.multiply(self.local_steps, self.lr), state.x, cohort)
        dc = -c - dy / path  # line 5
        c_i = changed(state.c_i, drawn, dc)  # line 6
        x = state.x + column(self.server_lr, state.x) * average(dy, drawn.q)  # line 7
        c = state.c + average(dc, came(drawn, dc) / task.N)  # line 8
        return replace(state, x=x, c=c, c_i=c_i, cursor=drawn.cursor, t=state.t + 1), {}
