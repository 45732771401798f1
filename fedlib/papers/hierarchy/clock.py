"""The clock of delay-sensitive hierarchical learning: who finishes what, and when.

Ali and Arafa, *Delay Sensitive Hierarchical Federated Learning with Stochastic Local Updates*
(arXiv 2302.04851), equations (7), (9) and (13). Nothing here depends on a model, so a whole
training is timed before its first step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np

from fedlib.engine.checks import check_between
from fedlib.errors import FedlibError
from fedlib.population.delays import Law, check_law

REACHED = 1 - 1e-12  # a sum of rounded durations has reached a time when it is this near to it


@dataclass(frozen=True)
class Timeline:
    """What the clock decides in one run of ``U`` rounds with ``G`` groups. Times in its units.

    Attributes
    ----------
    counts
        Local iterations of each group in each round, ``[U, G]``: the paper's ``t_i^u``.
    busy
        How long these took, ``[U, G]``.
    exchange
        How long the global exchange took, ``[U]``.
    end
        What the clock shows after each round, ``[U]``.
    local
        For each group the durations of its local iterations, one after the other.
    """

    counts: np.ndarray
    busy: np.ndarray
    exchange: np.ndarray
    end: np.ndarray
    local: tuple[np.ndarray, ...]

    @cached_property
    def idle(self) -> np.ndarray:
        """How long each group waited for the slowest in each round, ``[U, G]``."""
        return self.busy.max(1, keepdims=True) - self.busy


def timeline(
    seed: int,
    sync: float,
    time: float,
    groups: Sequence[Law],
    server: Law,
    grow: float = 0.0,
) -> Timeline:
    """Draw the delays of one run, round by round until the clock reaches the system time.

    Every group repeats local iterations until they have taken the sync time, and makes at least
    one. The slowest group ends the round, the exchange with the global server follows. The round
    that reaches the system time is completed and counts.

    The ``n``-th local iteration of a group lasts equally long whatever the sync time, and so does
    the ``u``-th exchange: runs that differ in the sync time are compared under the same luck.

    Parameters
    ----------
    seed
        The run's seed.
    sync
        Sync time ``S`` of a round, at least 0. At 0 every group makes one iteration.
    time
        System time ``T``, positive.
    groups
        The law of one local iteration of each group; ``local`` of the algorithm classes, whose
        ``groups`` are numbers of clients.
    server
        The law of the global exchange.
    grow
        Where positive, the sync time of round ``u`` is ``min(grow * u, sync)``, ``u`` from 1.

    Raises
    ------
    FedlibError
        For times out of range, no groups, laws whose mean is infinite, and a clock that would
        never move.
    """
    check_clock(sync, time, groups, server, grow)
    walks = [Walk(law, seed, "iteration", i, time) for i, law in enumerate(groups)]
    exchange = Walk(server, seed, "exchange", 0, time)
    clock, counts, busy = 0.0, [], []
    end: list[float] = []
    while clock < REACHED * time:
        u = len(end)
        S = min(grow * (u + 1), sync) if grow else sync
        done = [walk.until(S) for walk in walks]
        lasts = max(taken for _, taken in done) + exchange.until(0)[1]
        if not lasts > 0:
            raise FedlibError(f"Round {u} takes {lasts} time units: the clock would never move.")
        clock += lasts
        counts.append([count for count, _ in done])
        busy.append([taken for _, taken in done])
        end.append(clock)
    return Timeline(
        np.array(counts), np.array(busy), exchange.delays[: len(end)], np.array(end),
        tuple(walk.delays[: walk.used] for walk in walks),
    )  # fmt: skip


class Walk:
    """Delays of one name, one after the other, drawn as far as they are needed.

    Attributes
    ----------
    delays
        What has been drawn.
    used
        How many of them have passed.
    """

    def __init__(self, law: Law, seed: int, name: str, group: int, time: float) -> None:
        self.law, self.keys, self.used = law, (seed, name, group), 0
        self.most = 8 + int(1.2 * time / law.expected) if law.expected else 8
        self.most = min(self.most, 1_000_000)
        self.delays = law.draws(*self.keys, size=self.most)

    def until(self, S: float) -> tuple[int, float]:
        """Go on until they have taken ``S``, by one at least: how many, and how long."""
        few = 8 if not self.law.expected else 8 + int(1.5 * S / self.law.expected)
        while True:
            if self.used + few > len(self.delays):
                self.delays = self.law.draws(*self.keys, size=2 * len(self.delays) + few)
            sums = self.delays[self.used : self.used + few].cumsum()
            if sums[-1] >= REACHED * S:
                break
            few *= 2
        count = int(sums.searchsorted(REACHED * S)) + 1
        self.used += count
        return count, float(sums[count - 1])


def check_clock(
    sync: float, time: float, groups: Sequence[Law], server: Law, grow: float = 0.0
) -> None:
    """Refuse times that are none, no groups, and laws under which the clock never moves."""
    for name, value in (("sync", sync), ("grow", grow)):
        check_between(name, value, 0)
    if not isinstance(time, Real) or not 0 < time < math.inf:
        raise FedlibError(f"time is the system time, positive and finite; got {time!r}.")
    if not isinstance(groups, Sequence) or not len(groups):
        raise FedlibError(f"The groups' delays are a list, a law for each; got {groups!r}.")
    check_law("groups", list(groups))
    check_law("server", server)
    for name, law in (*((f"group {i}", law) for i, law in enumerate(groups)), ("server", server)):
        if not 0 <= law.expected < math.inf:
            raise FedlibError(
                f"The delay of {name} has the mean {law.expected}. It must be finite."
            )
    if sync > 0 and (still := [i for i, law in enumerate(groups) if not law.expected > 0]):
        raise FedlibError(
            f"Local iterations of group {still[0]} take no time, so there is no end to them within "
            f"a sync time of {sync}. Give them a delay, or take sync=0."
        )
