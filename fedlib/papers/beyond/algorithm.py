"""Amplified merges: groups on a clock, and what the merges moved is amplified.

The merge is that of Ali and Arafa (:mod:`fedlib.papers.hierarchy.algorithm`): a group's movement
counts ``w_i / t_i``, so a round moves the model by one mean step, however long the groups iterated.
The amplification is that of Wang and Ji (:mod:`fedlib.papers.participation.algorithm`): once in an
interval the movement since its beginning counts ``η`` times. Neither paper has both. Groups may
also come and go between the merges, as clients do there.
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
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import check_settings
from fedlib.papers.hierarchy import algorithm
from fedlib.papers.hierarchy.algorithm import Drawn, HierarchicalSGD
from fedlib.papers.hierarchy.clock import Timeline
from fedlib.population.participation import Participation


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
    availability
        Which groups are there in which round, a process over groups; None has all of them in all.
        A group that is away makes no iteration, and those who are there share the weight by their
        sizes. The clock goes on as if all were there: the server waits as long as ever.
    """

    amplify: float | tuple[float, ...] = 1.0
    interval: int = 1
    availability: Participation | None = None

    per_run: ClassVar = (*HierarchicalSGD.per_run, "amplify")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, ("amplify",), ("interval",))
        if not isinstance(self.availability, Participation | None):
            raise FedlibError(
                "availability is a process over groups, such as Cyclic(2); got "
                f"{self.availability!r}."
            )
        if self.availability and self.availability.N != len(self.groups):
            raise FedlibError(
                f"availability is about {self.availability.N} groups, and there are "
                f"{len(self.groups)}. Its N is the number of groups, not of clients."
            )

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state at time 0, from fresh models or from given ``x[R, P]``."""
        state = super().init(task, seeds, x)
        return State(**vars(state), u=torch.zeros_like(state.x))

    def timelines(self, seeds: Sequence[int]) -> list[Timeline]:
        """Return what the clock decides, for each run; who is away has the count 0."""
        lines, process = super().timelines(seeds), self.availability
        if process is None:
            return lines
        there = [process.weights(s, 0, len(o.end)) > 0 for s, o in zip(seeds, lines, strict=True)]
        return [replace(o, counts=o.counts * t) for o, t in zip(lines, there, strict=True)]

    def weights(self, counts: np.ndarray, noted: np.ndarray) -> np.ndarray:
        """Return what each group's movement counts in the merge, ``[R, G]``."""
        q = super().weights(counts, noted)
        if self.availability is None:
            return q
        w = np.array(self.groups) / sum(self.groups)
        here = (w * (counts > 0)).sum(1, keepdims=True)
        here = here**2 if self.merge == "nova" else here  # its factor is a mean over them as well
        return np.divide(q, here, out=np.zeros_like(q), where=here > 0)

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
