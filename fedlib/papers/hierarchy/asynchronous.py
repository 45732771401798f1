"""Hierarchical SGD without waiting: a group is merged when it is ready.

Ali and Arafa (arXiv 2302.04851) leave asynchronous merging to future work. This is our reading of
it, not an algorithm of the paper.

A group iterates for the sync time, exchanges its model with the global server, which takes a delay
of its own, and is merged when it arrives; it goes on at once from the merged model. Meanwhile
others have been merged: the movement of a group that has missed ``s`` merges of other groups
counts ``(1 + s)^-decay`` times what it would have counted.

Groups that arrive at the same instant are merged together and go on from the same model. With
equal fixed delays the iterates are therefore those of :class:`HierarchicalSGD`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedlib.engine.checks import check_between
from fedlib.engine.draws import draw_one
from fedlib.engine.mixing import average
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.hierarchy import algorithm
from fedlib.papers.hierarchy.algorithm import Drawn, HierarchicalSGD, descend
from fedlib.papers.hierarchy.clock import REACHED, Walk, check_clock
from fedlib.population.delays import EventQueue, Law


@dataclass(frozen=True, kw_only=True)
class State(algorithm.State):
    """What a checkpoint holds: that of hierarchical SGD, and where the groups began.

    Attributes
    ----------
    origin
        The models from which the groups now iterate, ``[R, G, P]``.
    """

    origin: Tensor


@dataclass(frozen=True)
class Arrivals:
    """The merges of one run: ``K`` instants, ``G`` groups. Times in the units of the delays.

    Attributes
    ----------
    counts
        Local iterations of the groups that arrive at each instant, ``[K, G]``; zero for others.
    staleness
        How many merges of other groups each of them has missed, ``[K, G]``.
    end
        When, ``[K]``.
    """

    counts: np.ndarray
    staleness: np.ndarray
    end: np.ndarray


def arrivals(
    seed: int, sync: float, time: float, groups: Sequence[Law], server: Law, grow: float = 0.0
) -> Arrivals:
    """Draw the delays of one run, merge by merge until the clock reaches the system time.

    Parameters
    ----------
    seed, sync, time, groups, server, grow
        As for :func:`~fedlib.papers.hierarchy.clock.timeline`. Local iterations last as long as
        there; every group draws its own exchanges. A group's first round has ``u = 1``.

    Raises
    ------
    FedlibError
        As there.
    """
    check_clock(sync, time, groups, server, grow)
    G = len(groups)
    walks = [Walk(law, seed, "iteration", i, time) for i, law in enumerate(groups)]
    trips = [Walk(server, seed, "own exchange", i, time) for i in range(G)]
    queue, counts, rounds = EventQueue(), np.zeros(G, dtype=int), np.zeros(G, dtype=int)

    def begin(i: int) -> None:
        rounds[i] += 1
        counts[i], busy = walks[i].until(min(grow * rounds[i], sync) if grow else sync)
        lasts = busy + trips[i].until(0)[1]
        if not lasts > 0:
            raise FedlibError(
                f"Round {rounds[i] - 1} of group {i} takes {lasts} time units: the clock would "
                "never move."
            )
        queue.push(queue.now + lasts, i)

    for i in range(G):
        begin(i)
    instants, merged, seen = [], 0, np.zeros(G, dtype=int)
    while queue.now < REACHED * time:
        now, ready = queue.pop_all()
        arrived = np.isin(np.arange(G), ready)
        instants.append((np.where(arrived, counts, 0), np.where(arrived, merged - seen, 0), now))
        merged += len(ready)
        seen[arrived] = merged
        for i in sorted(ready):
            begin(i)
    return Arrivals(*(np.array(part) for part in zip(*instants, strict=True)))


@dataclass(frozen=True)
class AsyncHierarchicalSGD(HierarchicalSGD):
    """Groups are merged as they arrive. A round is the next instant at which some do.

    Settings are those of :class:`HierarchicalSGD`, but for ``merge="nova"``: the number of steps
    that all groups made needs a round that they share.

    Parameters
    ----------
    decay
        A movement that has missed ``s`` merges of others counts ``(1 + s)^-decay``; at least 0.
    """

    decay: float = 0.0

    _line: ClassVar = staticmethod(arrivals)
    noted: ClassVar = "staleness"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merge == "nova":
            raise FedlibError(
                "merge='nova' goes as many steps as all groups made in a round; groups that do not "
                "wait have no round in common. Use 'normalised' or 'plain'."
            )
        check_between("decay", self.decay, 0)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state at time 0: all groups begin from ``x[R, P]``."""
        state = super().init(task, seeds, x)
        return State(**vars(state), origin=state.y.clone())

    def weights(self, counts: np.ndarray, noted: np.ndarray) -> np.ndarray:
        """Return what each movement counts: the less, the more merges it has missed."""
        return super().weights(counts, noted) * (1.0 + noted) ** -self.decay

    def round(  # type: ignore[override]
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Merge the groups that arrive next, in every run that still goes on.

        Returns
        -------
        State
            After the merge.
        dict
            ``"counts"`` and ``"staleness"`` of the groups that were merged, ``[R, G]``.
        """
        drawn = drawn or draw_one(self, state, task)
        start, going = state.origin.flatten(0, 1), drawn.going.unsqueeze(1)
        y = descend(self, task, start, drawn).where(going, state.y.flatten(0, 1))
        x = state.x + average(y - start, drawn.q)
        origin = x.repeat_interleave(len(self.groups), 0).where(going, start)
        after = replace(
            state, x=x, y=y.view_as(state.y), origin=origin.view_as(state.origin),
            cursor=drawn.cursor, clock=drawn.clock, t=state.t + 1,
        )  # fmt: skip
        return after, {"counts": drawn.counts, "staleness": drawn.noted}
