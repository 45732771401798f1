"""TDCD with asynchronous hubs: nobody waits, embeddings may be stale.

Das, Castiglia, Wang and Patterson (ACM TIST 2022) leave asynchronous hubs to future work. This is
our reading of it, not an algorithm of the paper.

Every hub keeps a table ``Φ_j[M, E]`` with its embedding of every row, open to the other hubs. A
hub's round ``r``:

1. read the other hubs' tables as they stand now, and draw the round's minibatch from the shared
   stream under its **own** round number ``r``;
2. its clients take Q local steps, with the foreign rows frozen;
3. average the clients, embed all rows with the average, publish the new table; go to 1.

It lasts three round trips and Q local steps, as in the paper: hub and clients twice (foreign rows
out and models back; average out and embeddings back), hub to hub once. The price of not waiting
is the size of that last message, ``M E`` numbers instead of ``B E``;
:func:`fedlib.papers.tiers.ledger.hub_messages` lists them. The clock charges neither that size nor
the work of embedding M rows.

Hubs that finish at the same instant all publish before any of them reads. Hence with equal fixed
delays, or with ``wait=True``, the iterates are those of synchronous :class:`TDCD`: same
minibatches, same foreign embeddings, same steps.

The simulation never builds a table: it keeps every hub's published block and embeds the rows that
are looked up. This is the same number where ``h_j`` treats every row by itself; batch normalization
does not, and takes the statistics of the rows that are looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_flag
from fedlib.engine.draws import ON_HOST, Array, draw_one, upload
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import check_settings
from fedlib.papers.tiers.algorithm import TDCD, Cohort, Drawn, descend, draw_ids
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.delays import EventQueue, Law, check_law, laws_of


class HubRound(NamedTuple):
    """One finished round of one hub.

    ``seed``, ``hub`` and ``round`` say whose round it is, and which: every hub counts its own
    from 0. ``start`` is when it read the foreign tables, ``finish`` when it published its own, in
    time units. ``busy`` is the drawn duration, so ``finish - start - busy`` is time spent waiting
    for others. ``staleness[N]`` counts the tables that each other hub published after this round
    had read and before it finished; one published at the finishing instant does not count.
    """

    seed: int
    hub: int
    round: int
    start: float
    finish: float
    busy: float
    staleness: tuple[int, ...]


@dataclass(frozen=True)
class Times:
    """The part of a state that no model has a say in.

    Attributes
    ----------
    clock
        ``[R]``: present time of every run, in time units.
    start, finish
        ``[R, N]``: when the rounds under way began and will end.
    rounds
        ``[R, N]``: rounds finished.
    read
        ``[R, N, N]``: ``read[r, j, l]`` is the number of rounds hub ``l`` had finished when hub
        ``j`` last read its table.
    """

    clock: np.ndarray
    start: np.ndarray
    finish: np.ndarray
    rounds: np.ndarray
    read: np.ndarray

    @staticmethod
    def of(state: Times) -> Times:
        """Return a copy that shares no array."""
        return Times(*(getattr(state, f.name).copy() for f in fields(Times)))


@dataclass(frozen=True, kw_only=True)
class AsyncState(Times):
    """What a checkpoint holds: the hubs' published blocks and the rounds under way.

    Attributes
    ----------
    x
        Published models ``[R, P]``, the hubs' blocks side by side.
    pending
        ``[R, P]``: what each hub will publish when its present round finishes.
    seeds
        One seed a run.
    t
        The next call of ``round``.
    """

    x: Tensor
    pending: Tensor
    seeds: tuple[int, ...]
    t: int = 0


@dataclass(frozen=True)
class Instant(Generic[Array]):
    """Some hubs ``(run, silo)`` that publish together and begin anew, and what each then draws."""

    hubs: list[tuple[int, int]]
    drawn: list[Drawn[Array]]


@dataclass(frozen=True)
class Tick(Generic[Array]):
    """What happens in a call of ``round``, all of it up to chance."""

    instants: list[Instant[Array]]
    times: Times = field(metadata=ON_HOST)
    done: list[HubRound] = field(metadata=ON_HOST)


@dataclass(frozen=True)
class AsyncTDCD:
    """Asynchronous hubs under random delays.

    Parameters
    ----------
    lr
        Step size η.
    local_steps
        Local steps Q in a hub's round.
    batch_size
        Minibatch size B; None takes all rows.
    comm, comp
        Delay laws of one round trip and of one local step: one law for all silos, or a tuple
        with one for each.
    wait
        Every hub waits for the slowest before it publishes: synchronous TDCD on the same clock,
        under the same drawn delays.
    tick
        ``round`` moves all runs on by this many time units, through all events on the way. None:
        every run moves on to its own next event.
    """

    lr: float
    local_steps: int
    batch_size: int | None
    comm: Law | tuple[Law, ...]
    comp: Law | tuple[Law, ...]
    wait: bool = False
    tick: float | None = None

    per_run: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        check_flag("wait", self.wait)
        tick = 1.0 if self.tick is None else self.tick
        if not isinstance(tick, Real) or not 0 < tick < float("inf"):
            raise FedlibError(f"tick is a positive time or None; got {self.tick!r}.")
        for name in ("comm", "comp"):
            check_law(name, getattr(self, name))

    def init(self, task: TieredTask, seeds: Sequence[int], x: Tensor | None = None) -> AsyncState:
        """Return the state at time 0: all hubs have published ``x`` and begun their round 0."""
        x = TDCD(self.lr, self.local_steps, self.batch_size).init(task, seeds, x).x.clone()
        R, N = len(seeds), task.N
        hubs = [(r, j) for r in range(R) for j in range(N)]
        rounds, read = np.zeros((R, N), dtype=np.int64), np.zeros((R, N, N), dtype=np.int64)
        times = Times(np.zeros(R), np.zeros((R, N)), np.zeros((R, N)), rounds, read)
        begun = upload([Instant(hubs, self._begin(times, task, seeds, hubs))], x.device)
        pending = self._learn(task, x, x.clone(), begun[0])
        return AsyncState(**vars(times), x=x, pending=pending, seeds=tuple(seeds))

    def draws(self, state: AsyncState, task: TieredTask) -> Iterator[Tick[np.ndarray]]:
        """Let the clocks run, on the host: who publishes when, and what each hub draws."""
        times = Times.of(state)
        for t in itertools.count(state.t):
            until = float("inf") if self.tick is None else (t + 1) * self.tick
            queues, instants, done = [_queue(row) for row in times.finish], [], []
            # one instant a turn, of all runs: whoever finishes in it publishes before any begins
            while any(queue.next_time <= until for queue in queues):
                hubs = []
                for r, queue in enumerate(queues):
                    if queue.next_time <= until:
                        times.clock[r], ready = queue.pop_all()
                        done += self._finish(times, task, state.seeds[r], r, ready)
                        hubs += [(r, j) for j in ready]
                instants.append(Instant(hubs, self._begin(times, task, state.seeds, hubs)))
                for r, j in hubs:
                    queues[r].push(times.finish[r, j], j)
                if self.tick is None:
                    break
            if self.tick is not None:
                times.clock[:] = until
            yield Tick(instants, Times.of(times), done)

    def round(
        self, state: AsyncState, task: TieredTask, drawn: Tick[Tensor] | None = None
    ) -> tuple[AsyncState, dict[str, Any]]:
        """Move on by one tick, or to the next event.

        Returns
        -------
        AsyncState
            After all hubs that finished up to then have published.
        dict
            ``"hub_rounds"``: a :class:`HubRound` for each of them.
        """
        drawn = drawn or draw_one(self, state, task)
        x, pending = state.x.clone(), state.pending.clone()
        for instant in drawn.instants:
            for r, j in instant.hubs:  # step 3
                x[r, task.columns[j]] = pending[r, task.columns[j]]
            pending = self._learn(task, x, pending, instant)
        times = vars(Times.of(drawn.times))
        after = replace(state, x=x, pending=pending, t=state.t + 1, **times)
        return after, {"hub_rounds": drawn.done}

    def busy(self, task: TieredTask, seed: int, hub: int, round: int) -> float:
        """Return how long a hub's round lasts, ``3 t_comm + Q t_comp`` with every term drawn."""
        comm, comp = laws_of(self.comm, task.N)[hub], laws_of(self.comp, task.N)[hub]
        trips = comm.draws(seed, "comm", hub, round, size=3)
        steps = comp.draws(seed, "comp", hub, round, size=self.local_steps)
        time = float(trips.sum() + steps.sum())
        if not time > 0:
            raise FedlibError(
                f"Round {round} of hub {hub} lasts {time} time units. Choose delay laws that "
                "take some time, or the clock never moves."
            )
        return time

    def _finish(
        self, times: Times, task: TieredTask, seed: int, r: int, hubs: list[int]
    ) -> list[HubRound]:
        """Note that some hubs of run ``r`` finish together."""
        done, seen = [], times.rounds[r].copy()
        for j in hubs:
            stale = seen - times.read[r, j]
            stale[j] = 0
            times.rounds[r, j] += 1
            busy = self.busy(task, seed, j, int(seen[j]))
            span = float(times.start[r, j]), float(times.finish[r, j])
            done.append(HubRound(seed, j, int(seen[j]), *span, busy, tuple(stale.tolist())))
        return done

    def _begin(
        self, times: Times, task: TieredTask, seeds: Sequence[int], hubs: list[tuple[int, int]]
    ) -> list[Drawn[np.ndarray]]:
        """Note that some hubs begin a round; return the minibatch of each."""
        drawn, lasts = [], np.zeros(times.finish.shape)
        for r, j in hubs:
            count = int(times.rounds[r, j])
            ids = draw_ids((seeds[r],), count, len(task.y), self.batch_size)
            drawn.append(Drawn.of(task, seeds[r : r + 1], ids, [j]))
            lasts[r, j] = self.busy(task, seeds[r], j, count)
            times.read[r, j] = times.rounds[r]
        for r, j in hubs:
            times.start[r, j] = times.clock[r]
            times.finish[r, j] = times.clock[r] + (lasts[r].max() if self.wait else lasts[r, j])
        return drawn

    def _learn(
        self, task: TieredTask, x: Tensor, pending: Tensor, begun: Instant[Tensor]
    ) -> Tensor:
        """Steps 1 and 2 for the hubs that begin: known now, published when they finish."""
        silos = []
        for (r, j), drawn in zip(begun.hubs, begun.drawn, strict=True):
            silo = Cohort.of(task, j, drawn, x[r : r + 1], part=0)
            silo.foreign = look_up(task, j, drawn.ids[0], x[r : r + 1])
            silos.append(silo)
        descend(TDCD(self.lr, self.local_steps), task, silos)
        for (r, j), silo in zip(begun.hubs, silos, strict=True):
            pending[r, task.columns[j]] = silo.mean()[0]
        return pending


def _queue(times: np.ndarray) -> EventQueue:
    """Return the events of one run: hub ``j`` finishes at ``times[j]``."""
    queue = EventQueue()
    for j, time in enumerate(times):
        queue.push(time, j)
    return queue


@torch.no_grad()
def look_up(task: TieredTask, j: int, ids: Tensor, x: Tensor) -> Tensor:
    """Return rows of the foreign tables, ``Σ_{l≠j} Φ_l[ids]``, as published in ``x[1, P]``.

    Parameters
    ----------
    task
        The silos.
    j
        The hub that reads.
    ids
        ``[B]`` row numbers.
    x
        One run's published blocks ``[1, P]``.

    Returns
    -------
    Tensor
        ``[B, E]``; zeros when there is no other silo.
    """
    ids = ids.to(x.device)
    total = x.new_zeros(len(ids), task.widths[j])
    for l, (model, block) in enumerate(zip(task.models, task.columns, strict=True)):
        if l != j:
            total += model.apply(x[:, block], task.x[l][ids].unsqueeze(0))[0]
    return total
