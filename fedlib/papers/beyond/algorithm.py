"""Amplified merges: groups on a clock, and what the merges moved is amplified.

The merge is that of Ali and Arafa (:mod:`fedlib.papers.hierarchy.algorithm`): a group's movement
counts ``w_i / t_i``, so a round moves the model by one mean step, however long the groups iterated.
The amplification is that of Wang and Ji (:mod:`fedlib.papers.participation.algorithm`): once in an
interval the movement since its beginning counts ``η`` times. Neither paper has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.draws import draw_one
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.papers.fedavg import check_settings
from fedlib.papers.hierarchy import algorithm
from fedlib.papers.hierarchy.algorithm import Drawn, HierarchicalSGD


@dataclass(frozen=True, kw_only=True)
class State(algorithm.State):
    """What a checkpoint holds: that of hierarchical SGD, and what the amplification remembers.

    Attributes
    ----------
    u
        Movement accumulated since ``t0``, ``[R, P]``.
    t0
        The round in which the current interval began.
    """

    u: Tensor
    t0: int = 0


@dataclass(frozen=True)
class AmplifiedHierarchicalSGD(HierarchicalSGD):
    """Hierarchical SGD whose accumulated movement is amplified once an interval.

    With an amplification of 1 this is :class:`HierarchicalSGD`. With groups that make one iteration
    a round it is :class:`~fedlib.papers.participation.algorithm.GeneralizedFedAvg` of all clients,
    one local step each. Where the mean count ``Σ_j w_j t_j`` is ``c`` in every round, an
    amplification by ``c`` after every merge is ``merge="nova"``.

    Parameters
    ----------
    amplify
        Amplification factor η > 0; a number, or one a run.
    interval
        Amplification interval P, in rounds. A run that ends within an interval ends unamplified.
    """

    amplify: float | tuple[float, ...] = 1.0
    interval: int = 1

    per_run: ClassVar = (*HierarchicalSGD.per_run, "amplify")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, ("amplify",), ("interval",))

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state at time 0, from fresh models or from given ``x[R, P]``."""
        state = super().init(task, seeds, x)
        return State(**vars(state), u=torch.zeros_like(state.x))

    def round(  # type: ignore[override]  # its state is of its own kind
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run that still goes on, and amplify at the end of an interval.

        Returns
        -------
        State
            After the merge.
        dict
            As for :class:`HierarchicalSGD`.
        """
        drawn = drawn or draw_one(self, state, task)
        after, report = super().round(state, task, drawn)
        x, u, t0 = after.x, state.u + (after.x - state.x), state.t0
        if after.t - t0 == self.interval:
            going = drawn.going.view(len(x), -1).any(1, keepdim=True)
            x = x + column(np.subtract(self.amplify, 1), x) * u * going
            u, t0 = torch.zeros_like(u), after.t
        return replace(after, x=x, u=u, t0=t0), report
