"""Tiered decentralized coordinate descent (TDCD): data split both ways.

Das, Castiglia, Wang and Patterson, *Cross-Silo Federated Learning for Multi-Tier Networks with
Vertical and Horizontal Data Partitioning*, ACM TIST 2022. Line numbers refer to the algorithm
box of the book, with the paper's indices corrected.

The whole model is a row ``x[R, P]``. Silo ``j`` owns a block of its columns, and its clients are
copies of that block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.draws import Array, draw_one
from fedlib.engine.local import local_sgd
from fedlib.engine.losses import LOSSES
from fedlib.engine.mixing import Groups, mix
from fedlib.engine.models import Model
from fedlib.engine.rng import stream
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import check_settings, first_models
from fedlib.papers.tiers.task import TieredTask


@dataclass(frozen=True)
class TieredState:
    """What a checkpoint holds.

    Attributes
    ----------
    x
        Whole models ``[R, P]``; the hubs' blocks side by side.
    seeds
        One seed a run.
    t
        The next round.
    clock
        ``[R]``: local steps done.
    """

    x: Tensor
    seeds: tuple[int, ...]
    t: int
    clock: np.ndarray


class Frozen(Task):
    """The local problem of one round: own embedding plus the frozen foreign sum.

    Parameters
    ----------
    model
        ``h_j``.
    x, y
        The round's minibatch, ``[B, ...]`` and ``[B]``.
    foreign
        ``Φ_{-j}[B, E]``.
    loss_name
        As in :class:`TieredTask`.
    """

    def __init__(self, model: Model, x: Tensor, y: Tensor, foreign: Tensor, loss_name: str) -> None:
        self.model, self.l2, self.loss_name, self.foreign = model, 0.0, loss_name, foreign
        self.data = FederatedDataset(x, y, [], None, None)

    def losses(self, theta: Tensor | dict[str, Tensor], batch: Batch) -> Tensor:
        """Return every copy's loss on its rows of the minibatch, ``[copies]``."""
        own = self.model.apply(theta, self.data.x[batch.rows])
        each = LOSSES[self.loss_name](own + self.foreign[batch.rows], self.data.y[batch.rows])
        return batch.mean(each)


@dataclass(frozen=True)
class TDCD:
    """Algorithm 1 of the paper: every client knows the labels of its rows.

    Parameters
    ----------
    lr
        Step size η; a number, or one a run.
    local_steps
        Local steps Q a round; the minibatch and the foreign embeddings stay frozen for all Q.
    batch_size
        Minibatch size B, drawn from all rows by a shared seed; None takes all rows.
    """

    lr: float | tuple[float, ...]
    local_steps: int
    batch_size: int | None = None

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self)

    def init(self, task: TieredTask, seeds: Sequence[int], x: Tensor | None = None) -> TieredState:
        """Return the state before round 0 (line 1)."""
        if not isinstance(task, TieredTask):
            raise FedlibError(f"A TieredTask is what is learned here; got {type(task).__name__}.")
        B = self.batch_size or len(task.y)
        if not 1 <= B <= len(task.y):
            raise FedlibError(f"batch_size must be between 1 and {len(task.y)}; got {B}.")
        x, seeds = first_models(task, seeds, x)
        return TieredState(x, seeds, 0, np.zeros(len(seeds)))

    def draws(self, state: TieredState, task: TieredTask) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: the minibatch, and who holds which part of it."""
        for t in itertools.count(state.t):
            ids = draw_ids(state.seeds, t, len(task.y), self.batch_size)
            yield Drawn.of(task, state.seeds, ids)

    def round(
        self, state: TieredState, task: TieredTask, drawn: Drawn[Tensor] | None = None
    ) -> tuple[TieredState, dict[str, Any]]:
        """Run one round: an exchange (lines 3-8), Q local steps (9-10), an average (11)."""
        drawn = drawn or draw_one(self, state, task)  # line 3
        silos = [Cohort.of(task, j, drawn, state.x) for j in range(task.N)]  # lines 4-5
        phi = [silo.union(silo.embed(task)) for silo in silos]  # lines 6-7, [R B, E]
        foreign = torch.stack(phi).sum(0)
        for silo, own in zip(silos, phi, strict=True):
            silo.foreign = foreign - own  # line 8
        descend(self, task, silos)  # lines 9-10
        x = torch.cat([silo.mean() for silo in silos], 1)  # line 11
        clock = state.clock + self.local_steps
        return replace(state, x=x, t=state.t + 1, clock=clock), {}

    def walk(self, local: Frozen, theta: Tensor, batch: Batch, rate: float | Tensor) -> Tensor:
        """Take the Q local steps of all copies ``[copies, P_j]``, the foreign sum frozen."""
        return local_sgd(local, theta, [batch] * self.local_steps, rate)


def draw_ids(seeds: Sequence[int], t: int, samples: int, batch_size: int | None) -> Tensor:
    """Draw the minibatch that all hubs share, ``[R, B]`` row numbers without replacement."""
    if batch_size is None:
        return torch.arange(samples).expand(len(seeds), -1)
    draws = [stream(s, "minibatch", t).choice(samples, batch_size, replace=False) for s in seeds]
    return torch.from_numpy(np.stack(draws))


@dataclass(frozen=True)
class Drawn(Generic[Array]):
    """A minibatch, and its part at each silo's clients.

    Attributes
    ----------
    ids
        Row numbers ``[R, B]``, the same for all silos.
    places
        For each silo, which places of the minibatch each of its clients holds, ``[R K_j, b]``.
    weight
        For each silo ``1/|ζ_kj|``, ``[R K_j, b]``, padded with weight zero. A client without a
        sample has weight zero everywhere: no gradient, but still averaged.
    """

    ids: Array
    places: list[Array]
    weight: list[Array]

    @staticmethod
    def of(
        task: TieredTask, seeds: Sequence[int], ids: Tensor, silos: Sequence[int] | None = None
    ) -> Drawn[np.ndarray]:
        """Look up who holds rows ``ids[R, B]``, in some silos or in all."""
        runs = zip(seeds, ids.numpy(), strict=True)
        owners = np.stack([task.owner(seed)[:, rows] for seed, rows in runs])
        parts = [_shares(owners[:, j], task.K[j]) for j in silos or range(task.N)]
        return Drawn(ids.numpy(), [places for places, _ in parts], [weight for _, weight in parts])


def _shares(owner: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Return places and weights of the clients, from the owner of each place, ``[R, B]``."""
    owner = owner + K * np.arange(len(owner))[:, None]
    order = np.argsort(owner, axis=None, kind="stable")
    count = np.bincount(owner.ravel(), minlength=len(owner) * K)
    filled = np.arange(count.max())[None] < count[:, None]
    places, weight = np.zeros(filled.shape, dtype=np.int64), np.zeros(filled.shape)
    places[filled] = order
    weight[filled] = np.repeat(1 / np.maximum(count, 1), count)
    return places, weight


@dataclass
class Cohort:
    """Silo ``j`` in one round: its clients' copies and their places in the minibatch.

    Attributes
    ----------
    theta
        ``[R K_j, P_j]``: the clients' copies of the silo's block.
    places, weight
        Places in the minibatch and their weights, see :class:`Drawn`.
    x, y
        The minibatch as silo ``j`` sees it, ``[R B, ...]`` and ``[R B]``.
    foreign
        ``Φ_{-j}[R B, E]``, set after the exchange.
    """

    j: int
    theta: Tensor
    places: Tensor
    weight: Tensor
    x: Tensor
    y: Tensor
    runs: int
    foreign: Tensor = field(init=False, repr=False)

    @classmethod
    def of(
        cls, task: TieredTask, j: int, drawn: Drawn[Tensor], x: Tensor, part: int = -1
    ) -> Cohort:
        """Send every client its model and its part of the minibatch: part ``j``, or another."""
        k = j if part < 0 else part
        places, weight = drawn.places[k], drawn.weight[k].to(x.dtype)
        theta = x[:, task.columns[j]].repeat_interleave(task.K[j], 0)
        flat = drawn.ids.flatten()
        return cls(j, theta, places, weight, task.x[j][flat], task.y[flat], len(drawn.ids))

    @property
    def batch(self) -> Batch:
        """The clients' parts of the minibatch."""
        return Batch(self.places, self.weight)

    @torch.no_grad()
    def embed(self, task: TieredTask) -> Tensor:
        """Return every client's embeddings of its samples, ``[R K_j, b, E]``."""
        return task.models[self.j].apply(self.theta, self.x[self.places])

    def union(self, parts: Tensor) -> Tensor:
        """Put the clients' embeddings into one table ``[R B, E]``, in the minibatch's order."""
        return unpadded(parts, self.batch, len(self.y))

    def mean(self) -> Tensor:
        """Return the hub's average of its clients, ``[R, P_j]``."""
        return mix(self.theta, Groups(1, len(self.theta) // self.runs)).squeeze(1)


def unpadded(parts: Tensor, batch: Batch, length: int) -> Tensor:
    """Put what the clients have of their rows, ``[C, b, E]``, into one table ``[length, E]``."""
    places = batch.rows
    if batch.weight is not None:
        places = places.masked_fill(batch.weight == 0, length)  # padding goes to a row too many
    table = parts.new_zeros(length + 1, parts.shape[-1])
    table[places] = parts
    return table[:length]


def descend(algorithm: TDCD, task: TieredTask, silos: list[Cohort]) -> None:
    """Let all clients of all silos take their Q local steps, in place.

    Silos that share a model are rows of one matrix.
    """
    groups: dict[tuple[int, torch.Size], list[Cohort]] = {}
    for silo in silos:
        key = (id(task.models[silo.j]), silo.x.shape[1:])
        groups.setdefault(key, []).append(silo)
    for group in groups.values():
        model = task.models[group[0].j]
        theta = torch.cat([silo.theta for silo in group])
        x, y = torch.cat([s.x for s in group]), torch.cat([s.y for s in group])
        foreign, batch = torch.cat([s.foreign for s in group]), _joined(group)
        rates = [column(algorithm.lr, s.theta[: s.runs], len(s.theta) // s.runs) for s in group]
        columns = [rate for rate in rates if isinstance(rate, Tensor)]
        rate = torch.cat(columns) if columns else rates[0]
        theta = algorithm.walk(Frozen(model, x, y, foreign, task.loss_name), theta, batch, rate)
        for silo, part in zip(group, theta.split([len(s.theta) for s in group]), strict=True):
            silo.theta = part


def _joined(group: list[Cohort]) -> Batch:
    """Stack the silos' batches; places move on by the length of the tables before."""
    width = max(silo.places.shape[1] for silo in group)
    rows, weight, start = [], [], 0
    for silo in group:
        pad = (0, width - silo.places.shape[1])
        rows.append(F.pad(silo.places, pad) + start)
        weight.append(F.pad(silo.weight, pad))
        start += len(silo.y)
    return Batch(torch.cat(rows), torch.cat(weight))
