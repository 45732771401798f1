"""What a simulation of VFB² returns: the model, evaluations, messages, and every block update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """An evaluation at a simulated ``time``, after passes over the data (``epoch``) and ``steps``.

    ``epoch`` is ``steps / n``, plus one for every pass in which all n values of ϑ are formed.
    """

    time: float
    epoch: float
    steps: int
    loss: float


@dataclass(frozen=True)
class Messages:
    """What a party without labels gets to see, in the order in which it was formed.

    Attributes
    ----------
    theta, i
        ``[T]``: the scalar sent backward in each dominated step, and the sample.
    dominator, score, time
        ``[T]``: who sent it, ``ŵᵀx_i`` (only the dominator knows it), and when.
    """

    theta: np.ndarray
    i: np.ndarray
    dominator: np.ndarray
    score: np.ndarray
    time: np.ndarray


@dataclass(frozen=True)
class Log:
    """A row for every block update, in the paper's "after read" order: row ``t`` has label ``t``.

    The counter advances when a dominator has its score, and when a collaborator has read its block.

    Attributes
    ----------
    time, written
        When the label was given and when the update was written.
    party, step
        Whose block, ``ψ(t)``, and to which dominated step (row of :class:`Messages`) it belongs.
    read
        Version of the own block that went into the regulariser: how many writes it had seen.
    write
        Place of this update among the writes of its block, from 0.
    reads
        ``[T, q]``: versions of all blocks in the score of each dominated step.
    label
        ``[T]``: the label ``d`` of each step's dominated update.
    """

    time: np.ndarray
    written: np.ndarray
    party: np.ndarray
    step: np.ndarray
    read: np.ndarray
    write: np.ndarray
    reads: np.ndarray
    label: np.ndarray

    def staleness(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the delays of every update, ``τ₁(t)`` and ``τ₂(t)``, in labels.

        ``τ₁(t) = t - min D(t)``: a read at ``t`` missed the updates ``D(t)`` that were labelled
        before and not yet written; a dominator reads all blocks, a collaborator its own.
        ``τ₂(t) = t - min D'(t)`` for collaborators, with ``D'(t) = D(d) ∪ {d, ..., t-1}`` and ``d``
        the label of the dominated update; 0 for dominators. Both are 0 when nothing was missed.
        """
        t = np.arange(len(self.party))
        first = [_first_after(t, self.write, self.party == l) for l in range(self.reads.shape[1])]
        of_step = np.min([f[self.reads[:, l]] for l, f in enumerate(first)], axis=0)
        of_step = np.minimum(of_step, self.label)  # nothing missed: the label itself
        of_block = t.copy()
        for l, f in enumerate(first):
            mine = self.party == l
            of_block[mine] = np.minimum(f[self.read[mine]], t[mine])
        dominated = self.label[self.step] == t
        tau1 = t - np.where(dominated, of_step[self.step], of_block)
        return tau1, np.where(dominated, 0, t - of_step[self.step])


def _first_after(t: np.ndarray, write: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Return for every version of a block the first label among the writes still to come."""
    labels = np.full(mine.sum() + 1, np.iinfo(np.int64).max)
    labels[write[mine]] = t[mine]
    return np.minimum.accumulate(labels[::-1])[::-1]


@dataclass(frozen=True)
class Run:
    """What :func:`simulate_parties` returns.

    Attributes
    ----------
    w
        The model after the last update, ``[d]``.
    rows
        Evaluations, see :class:`Row`.
    messages
        ϑ and i of every dominated step, see :class:`Messages`.
    log
        Every block update, see :class:`Log`; None with ``log=False``.
    snapshots
        ``[S, d]``: where SVRG stood at each of its barriers, with ``keep="snapshots"``.
    counts
        Messages sent: ``"tree"`` (masked sums up two trees, counted even where ``trees`` is None
        and scores go straight to the dominator), ``"backward"`` (ϑ and i),
        ``"request"`` (i alone), and ``"pass"``, those with a value for every sample.
    """

    w: np.ndarray
    rows: list[Row]
    messages: Messages
    log: Log | None
    snapshots: np.ndarray | None
    counts: dict[str, int]


def time_to(rows: Sequence[Row], loss: float) -> float:
    """Return the simulated time of the first evaluation at or below a loss; infinity if none is."""
    return next((row.time for row in rows if row.loss <= loss), math.inf)


def speed_up(times: Mapping[int, float], base: int = 1) -> dict[int, float]:
    """Return ``time(base parties) / time(q parties)`` for every q, equation (14) of the paper."""
    return {q: times[base] / time for q, time in times.items()}
