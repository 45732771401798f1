"""Delay-sensitive hierarchical federated learning.

Ali and Arafa, *Delay Sensitive Hierarchical Federated Learning with Stochastic Local Updates*
(arXiv 2302.04851). Line numbers refer to the algorithm box of the book.

In a local iteration every client of a group takes one step from the same model, and the local
server averages. That is one step on the clients' minibatches joined into one, so a group is a
single row, however many clients it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.engine.data import Reading
from fedlib.engine.draws import ON_HOST, Array, draw_one
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import average
from fedlib.engine.sweeps import column, of_runs
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.papers.fedavg import check_settings, first_models
from fedlib.papers.hierarchy.clock import check_clock, timeline
from fedlib.population.delays import Law, check_law, laws_of

MERGES = ("normalised", "plain", "nova")


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. Row ``r`` of every array belongs to run ``r``.

    Attributes
    ----------
    x
        Global models ``[R, P]``.
    y
        The groups' models at the end of the last round, before they were merged, ``[R, G, P]``.
    seeds
        One seed a run.
    cursor
        Minibatches each client has used, ``[R, N]``.
    clock
        ``[R]``: the time, in the units of the delays.
    t
        The next round.
    """

    x: Tensor
    y: Tensor
    seeds: tuple[int, ...]
    cursor: np.ndarray
    clock: np.ndarray
    t: int = 0


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Stretch(Generic[Array]):
    """Local iterations that the same groups take together.

    Attributes
    ----------
    rows
        Which groups: rows of ``[R * G, P]``.
    reading
        Their joined minibatches, one a row and iteration.
    """

    rows: Array
    reading: Reading[Array]


@dataclass(frozen=True)
class Drawn(Generic[Array]):
    """What chance decides in a round.

    Attributes
    ----------
    stretches
        The local iterations of all groups, in the order in which they are taken.
    going
        ``[R * G]``: whether a group's run is still going on.
    q
        What each group's movement counts in the merge, ``[R, G]``; zero in a run that has ended.
    counts
        Local iterations of each group, ``[R, G]``.
    noted
        What else is told of it, ``[R, G]``: how long it waited for the slowest, or without
        waiting the staleness of its model.
    clock, cursor
        As in :class:`State`, after the round.
    """

    stretches: list[Stretch[Array]]
    going: Array
    q: Array
    counts: np.ndarray = field(metadata=ON_HOST)
    noted: np.ndarray = field(metadata=ON_HOST)
    clock: np.ndarray = field(metadata=ON_HOST)
    cursor: np.ndarray = field(metadata=ON_HOST)


@dataclass(frozen=True)
class HierarchicalSGD:
    """Algorithm 1: groups iterate for a sync time, then the global server merges them.

    A run is over when its clock has reached the system time; its model then stays as it is, so
    that runs with other clocks can go on beside it.

    Parameters
    ----------
    groups
        Clients in each group, neighbours in the data's order: ``(10, 10)``.
    lr
        Step size α; a number, or one a run.
    sync
        Sync time ``S``; a number, or one a run. At 0 every group makes one iteration a round; at
        the system time groups never meet before the end.
    time
        System time ``T``.
    local
        Delay law of a local iteration: one for all groups, or a tuple with one for each.
    server
        Delay law of the global exchange.
    batch_size
        Minibatch size of every client; None takes each client's exact gradient.
    merge
        ``"normalised"``: a group's movement counts ``w_i / t_i``, equation (12) of the paper.
        ``"plain"``: it counts ``w_i``, the weighted mean of the groups' models. ``"nova"``:
        ``(Σ_j w_j t_j) w_i / t_i``.
    grow
        Where positive, the sync time of round ``u`` is ``min(grow * u, sync)``, ``u`` from 1; a
        number, or one a run.
    """

    groups: tuple[int, ...]
    lr: float | tuple[float, ...]
    sync: float | tuple[float, ...]
    time: float
    local: Law | tuple[Law, ...]
    server: Law
    batch_size: int | None = None
    merge: str = "normalised"
    grow: float | tuple[float, ...] = 0.0

    per_run: ClassVar[tuple[str, ...]] = ("lr", "sync", "grow")
    _line: ClassVar[Callable[..., Any]] = staticmethod(timeline)  # what the clock decides in a run
    noted: ClassVar[str] = "idle"  # what of it is told of a round, beside the counts

    def __post_init__(self) -> None:
        check_settings(self, counts=())
        check_group_sizes(self.groups)
        if not np.size(self.sync) or not np.size(self.grow):
            raise FedlibError("sync and grow are a number each, or one for each run; got none.")
        check_law("local", self.local)
        laws = laws_of(self.local, len(self.groups), "group")
        for sync, grow in itertools.product(*map(np.atleast_1d, (self.sync, self.grow))):
            check_clock(sync, self.time, laws, self.server, grow)
        if self.merge not in MERGES:
            raise unknown("merge", self.merge, MERGES)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state at time 0, from fresh models or from given ``x[R, P]``."""
        check_joinable(task, self.groups)
        x, seeds = first_models(task, seeds, x)
        y = x.unsqueeze(1).repeat(1, len(self.groups), 1)
        cursor = np.zeros((len(seeds), task.N), dtype=np.int64)
        return State(x, y, seeds, cursor, np.zeros(len(seeds)))

    def timelines(self, seeds: Sequence[int]) -> list[Any]:
        """Return what the clock decides, for each run."""
        laws = laws_of(self.local, len(self.groups), "group")
        both = (of_runs(v, len(seeds)).tolist() for v in (self.sync, self.grow))
        return [
            self._line(seed, S, self.time, laws, self.server, grow)
            for seed, S, grow in zip(seeds, *both, strict=True)
        ]

    def rounds(self, seeds: Sequence[int]) -> int:
        """Return how many rounds the longest run has."""
        return max(len(line.end) for line in self.timelines(seeds))

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: when groups stop, and which samples they read."""
        lines, cursor = self.timelines(state.seeds), state.cursor
        for t in itertools.count(state.t):
            counts, noted, clock = self.at(lines, t)
            stretches = read(task, self.groups, state.seeds, counts, cursor, self.batch_size)
            cursor = cursor + np.repeat(counts, self.groups, 1)
            q = self.weights(counts, noted)
            yield Drawn(stretches, counts.ravel() > 0, q, counts, noted, clock, cursor)

    def weights(self, counts: np.ndarray, noted: np.ndarray) -> np.ndarray:
        """Return what each group's movement counts in the merge, ``[R, G]``."""
        return weights(self.merge, self.groups, counts)

    def at(self, lines: Sequence[Any], t: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return counts, what else is noted of a round, and the clock; a run that is over rests."""
        rest = np.zeros(len(self.groups), dtype=int)
        counts, other = (
            np.stack([getattr(line, part)[t] if t < len(line.end) else rest for line in lines])
            for part in ("counts", self.noted)
        )
        return counts, other, np.array([line.end[min(t, len(line.end) - 1)] for line in lines])

    def round(
        self, state: S, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[S, dict[str, Any]]:
        """Run one round of every run that still goes on.

        Returns
        -------
        State
            After the merge.
        dict
            ``"counts"`` and ``"idle"``: local iterations and waiting time of each group,
            ``[R, G]``.
        """
        drawn = drawn or draw_one(self, state, task)
        start = state.x.repeat_interleave(len(self.groups), 0)  # line 3
        y = descend(self, task, start, drawn)  # lines 4-8
        x = state.x + average(y - start, drawn.q)  # lines 9-10
        y = y.where(drawn.going.unsqueeze(1), state.y.flatten(0, 1))
        after = replace(
            state, x=x, y=y.view_as(state.y), cursor=drawn.cursor, clock=drawn.clock, t=state.t + 1
        )
        return after, {"counts": drawn.counts, "idle": drawn.noted}


def descend(algorithm: HierarchicalSGD, task: Task, start: Tensor, drawn: Drawn[Tensor]) -> Tensor:
    """Return the groups' models ``[R * G, P]`` after their local iterations from ``start``."""
    y, G = start.clone(), len(algorithm.groups)
    rate = column(algorithm.lr, start[::G], G)
    for stretch in drawn.stretches:
        rows, batches = stretch.rows, stretch.reading.batches(task.data.dtype)
        y[rows] = local_sgd(task, y[rows], batches, rate if isinstance(rate, float) else rate[rows])
    return y


def weights(merge: str, groups: Sequence[int], counts: np.ndarray) -> np.ndarray:
    """Return what each group's movement counts in the merge.

    Parameters
    ----------
    merge
        ``"normalised"``, ``"plain"`` or ``"nova"``, see :class:`HierarchicalSGD`.
    groups
        Clients in each group.
    counts
        Local iterations of each group, ``[R, G]``; zero in a run that is over.

    Returns
    -------
    numpy.ndarray
        ``[R, G]``.
    """
    if merge not in MERGES:
        raise unknown("merge", merge, MERGES)
    w = np.array(groups) / sum(groups)
    if merge == "plain":
        return w * (counts > 0)
    effective = (w * counts).sum(1, keepdims=True) if merge == "nova" else 1.0
    return np.where(counts > 0, effective * w / np.maximum(counts, 1), 0.0)


def read(
    task: Task,
    groups: Sequence[int],
    seeds: Sequence[int],
    counts: np.ndarray,
    cursor: np.ndarray,
    batch_size: int | None,
) -> list[Stretch[np.ndarray]]:
    """Draw the minibatches of a round, those of a group's clients joined, on the host.

    Rows that are still going on after ``n`` iterations take the next ones together, so nobody
    computes more iterations than it has.
    """
    R, N, longest = *cursor.shape, int(counts.max())
    if not longest:
        return []
    everyone = np.broadcast_to(np.arange(N), (R, N))
    reading, _ = task.data.read(seeds, everyone, cursor, longest, batch_size)
    rows, weight = join_batches(reading, groups, R)
    visits = reading.visits.reshape(longest, R, N, 3)[:, :, np.cumsum([0, *groups[:-1]])]
    visits, last = visits.reshape(longest, -1, 3), 0
    stretches: list[Stretch[np.ndarray]] = []
    for stop in np.unique(counts[counts > 0]):
        going = np.flatnonzero(counts >= stop)
        some = np.s_[last:stop, going]
        part = rows[going] if rows.ndim == 2 else rows[some]
        of_rows = None if weight is None else weight[going]
        full = bool(of_rows is None or (of_rows > 0).all())
        stretches.append(Stretch(going, Reading(part, of_rows, None, visits[some], not full)))
        last = int(stop)
    return stretches


def join_batches(
    reading: Reading[np.ndarray], groups: Sequence[int], runs: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Join the minibatches of each group's clients into one.

    Parameters
    ----------
    reading
        Of all clients of all runs, ``runs * N`` copies.
    groups
        Clients in each group.
    runs
        ``R``.

    Returns
    -------
    rows
        ``[steps, R * G, B]``, or ``[R * G, B]`` where all steps read the same; groups with fewer
        samples are padded to the longest.
    weight
        ``[R * G, B]``: every client of a group counts as much as the others; padding counts
        nothing. None where this is the plain mean.
    """
    rows, B = reading.rows, reading.rows.shape[-1]
    lead, N, G = rows.shape[:-2], sum(groups), len(groups)
    flat = rows.reshape(*lead, runs, N, B)
    share = np.full(flat.shape[-2:], 1 / B) if reading.weight is None else reading.weight
    share = np.broadcast_to(share.reshape(-1, N, B), (runs, N, B))
    joined = np.zeros((*lead, runs, G, max(groups) * B), dtype=rows.dtype)
    weight, first = np.zeros((runs, G, max(groups) * B)), 0
    for i, size in enumerate(groups):
        some = np.s_[..., first : first + size, :]
        joined[..., i, : size * B] = flat[some].reshape(*lead, runs, -1)
        weight[:, i, : size * B] = share[some].reshape(runs, -1) / size
        first += size
    plain = reading.weight is None and len(set(groups)) == 1
    return joined.reshape(*lead, runs * G, -1), None if plain else weight.reshape(runs * G, -1)


def check_group_sizes(groups: Any) -> None:
    """Refuse what is no list of group sizes."""
    if not isinstance(groups, Sequence) or isinstance(groups, str) or not groups:
        raise FedlibError(f"groups holds the number of clients of each group; got {groups!r}.")
    for i, size in enumerate(groups):
        check_whole_number(f"The number of clients of group {i}", size)


def check_joinable(task: Task, groups: Sequence[int]) -> None:
    """Refuse groups that do not fit the clients, and what cannot be computed on joined batches."""
    if sum(groups) != task.N:
        raise FedlibError(
            f"The groups {tuple(groups)} have {sum(groups)} clients, the data {task.N}. Give every "
            "client to one group."
        )
    if task.data.augment or task.model.drops or task.model.buffers:
        raise FedlibError(
            "A group's step is one step on its clients' joined minibatches. Augmentation, dropout "
            "and BatchNorm treat each client's apart; use a model and data without them."
        )
