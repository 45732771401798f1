"""Look-ahead: walk on for some rounds, then go back part of the way.

Zhang, Lucas, Ba and Hinton, *Lookahead Optimizer: k steps forward, 1 step back*, NeurIPS 2019,
Algorithm 1::

    1  for t = 1, 2, ...
    2      θ = φ
    3      k times: θ <- θ + A(θ), here the movement of a round
    4      φ <- φ + α (θ - φ)

Wang and Ji, *A Unified Analysis of Federated Learning with Arbitrary Client Participation*, NeurIPS
2022, name it in Appendix A as related to their amplification, which is line 4 with any factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlib.engine.checks import check_each, check_whole_number
from fedlib.engine.draws import draw_one
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, FedAvg, check_settings, movement, start
from fedlib.papers.methods.common import Rate


@dataclass(frozen=True, kw_only=True)
class State(fedavg.State):
    """What a checkpoint holds: that of FedAvg, whose x are the fast weights θ, and the slow ones.

    Attributes
    ----------
    phi
        Slow weights φ, ``[R, P]``.
    t0
        The round in which the fast weights left them.
    """

    phi: Tensor
    t0: int


@dataclass(frozen=True)
class Lookahead(FedAvg):
    """FedAvg as inner optimizer of look-ahead: k rounds forward, then ``φ <- φ + α (θ - φ)``.

    This is :class:`~fedlib.papers.participation.algorithm.GeneralizedFedAvg` with an amplification
    α of at most one and an interval of k rounds. With α = 1 it is FedAvg. The original has one
    worker; what it calls a step is a round here.

    Parameters
    ----------
    participation, lr, local_steps, batch_size, weights
        As for :class:`~fedlib.papers.fedavg.FedAvg`.
    alpha
        Step size α of the slow weights, up to 1; a number, or one a run.
    interval
        Synchronisation period k, in rounds.
    """

    alpha: Rate = 0.5
    interval: int = 5

    per_run: ClassVar = ("lr", "alpha")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, ("alpha",), ("interval",))
        check_each("alpha", self.alpha, 1)
        check_whole_number("interval", self.interval)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return State(x, seeds, cursor, t, phi=x, t0=t)

    def round(  # type: ignore[override]  # its state is of its own kind
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: line 3 of the box, and lines 4 and 2 after the last of k."""
        drawn = drawn or draw_one(self, state, task)
        x, phi, t0 = state.x + movement(self, state.x, task, drawn), state.phi, state.t0  # line 3
        if state.t + 1 - t0 == self.interval:
            phi = torch.lerp(phi, x, column(self.alpha, x))  # line 4
            x, t0 = phi, state.t + 1  # line 2
        return replace(state, x=x, phi=phi, cursor=drawn.cursor, t=state.t + 1, t0=t0), {}
