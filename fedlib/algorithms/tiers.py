"""Tiered decentralized coordinate descent (TDCD): data split both ways.

Das, Castiglia, Wang and Patterson, *Cross-Silo Federated Learning for Multi-Tier Networks with
Vertical and Horizontal Data Partitioning*, ACM TIST 2022. Line numbers refer to the algorithm
box of the book, with the paper's indices corrected.

The whole model is a row ``x[R, P]``. Silo ``j`` owns a block of its columns, and its clients are
copies of that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.metrics import f1_score
from torch import Tensor
from torch.nn import functional as F

from fedlib.errors import FedlibError, unknown
from fedlib.local import local_sgd
from fedlib.models import Model
from fedlib.rng import stream
from fedlib.tasks import LOSSES, Batch, FederatedDataset, Task


def _logistic(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.squeeze(-1), y.to(out.dtype), reduction="none")


TIER_LOSSES = {**LOSSES, "logistic": _logistic}


class TieredTask:
    """One supervised problem whose features lie in silos and whose rows lie with clients.

    The prediction is the sum of the silos' embeddings, ``Σ_j h_j(θ_j; x_j)``, each ``[B, E]``.

    Parameters
    ----------
    models
        ``h_j``, one a silo. Silos that share one :class:`Model` object are computed together.
    features
        ``x_j[M, ...]``, one a silo, row ``p`` of each belonging to the same sample.
    labels
        ``[M]``.
    rows
        ``[silo][client]`` row numbers: who holds which sample. Every silo's clients together
        hold all rows, each once; two silos may split them differently.
    test_features, test_labels
        The official test split, in the same silos.
    loss_name
        ``"cross_entropy"``, ``"logistic"`` (one output, labels 0 and 1) or ``"half_square"``.

    Raises
    ------
    FedlibError
        When silos disagree on the number of rows or the embedding width, or rows are missing
        or held twice.
    """

    def __init__(
        self,
        models: Sequence[Model],
        features: Sequence[Tensor | np.ndarray],
        labels: Tensor | np.ndarray,
        rows: Sequence[Sequence[np.ndarray]],
        test_features: Sequence[Tensor | np.ndarray] | None = None,
        test_labels: Tensor | np.ndarray | None = None,
        loss_name: str = "cross_entropy",
        device: str = "cpu",
    ) -> None:
        if loss_name not in TIER_LOSSES:
            raise unknown("loss", loss_name, TIER_LOSSES)
        if not len(models) == len(features) == len(rows):
            raise FedlibError(
                f"{len(models)} models, {len(features)} feature blocks and {len(rows)} row splits: "
                "one of each is needed for every silo."
            )
        self.models, self.loss_name = list(models), loss_name
        self.x = [torch.as_tensor(x, device=device) for x in features]
        self.y = torch.as_tensor(labels, device=device)
        self.test_x = None
        if test_features is not None:
            self.test_x = [torch.as_tensor(x, device=device) for x in test_features]
            self.test_y = torch.as_tensor(test_labels, device=device)
        self.rows = [[np.asarray(part, dtype=np.int64) for part in silo] for silo in rows]
        self._check()
        stops = np.cumsum([model.size for model in self.models])
        self.columns = [slice(int(b - m.size), int(b)) for b, m in zip(stops, models, strict=True)]
        self.size = int(stops[-1])
        self.K = [len(silo) for silo in self.rows]
        self.owner = [np.empty(len(self.y), dtype=np.int64) for _ in self.rows]
        for owner, silo in zip(self.owner, self.rows, strict=True):
            for k, part in enumerate(silo):
                owner[part] = k

    def _check(self) -> None:
        M = len(self.y)
        for j, x in enumerate(self.x):
            if len(x) != M:
                raise FedlibError(
                    f"Silo {j} has {len(x)} rows, the labels {M}. Silos must hold the same samples "
                    "in the same order; join them by id first."
                )
            held = np.concatenate(self.rows[j]) if self.rows[j] else np.array([], dtype=int)
            if len(held) != M or not np.array_equal(np.sort(held), np.arange(M)):
                raise FedlibError(
                    f"Silo {j}: its clients hold {len(np.unique(held))} of {M} rows in "
                    f"{len(held)} places. Each row needs exactly one client in every silo."
                )
        if len(set(self.widths)) > 1:
            raise FedlibError(
                f"Embedding widths {self.widths} differ between silos. They are summed, so all "
                "h_j need the same number of outputs."
            )

    @property
    def N(self) -> int:
        """Number of silos."""
        return len(self.models)

    @cached_property
    def widths(self) -> list[int]:
        """Embedding width E of each silo."""
        with torch.no_grad():
            zeros = [torch.zeros(1, m.size, dtype=x.dtype, device=x.device) for m, x in self._pairs]
            pairs = zip(self._pairs, zeros, strict=True)
            return [m.apply(theta, x[:1].unsqueeze(0)).shape[-1] for (m, x), theta in pairs]

    @property
    def _pairs(self) -> list[tuple[Model, Tensor]]:
        return list(zip(self.models, self.x, strict=True))

    def init(self, seeds: Sequence[int]) -> Tensor:
        """Return one freshly initialised model a seed, ``[R, P]``."""
        rows = [
            torch.cat([m.init(stream(seed, "init", j)) for j, m in enumerate(self.models)], 1)
            for seed in seeds
        ]
        return torch.cat(rows).to(self.x[0].device, self.x[0].dtype)

    def predict(self, theta: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the summed embeddings ``[R, B, E]`` of whole models ``[R, P]``."""
        parts = [
            model.apply(theta[:, block], x.expand(len(theta), *x.shape))
            for model, block, x in zip(self.models, self.columns, features, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def loss(self, theta: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the mean loss of whole models on some rows (default all), ``[R]``."""
        ids = torch.arange(len(self.y)) if ids is None else ids
        out = self.predict(theta, [x[ids] for x in self.x])
        y = self.y[ids].expand(len(theta), -1)
        return TIER_LOSSES[self.loss_name](out, y).mean(1)

    @torch.no_grad()
    def evaluate(
        self, theta: Tensor, split: str = "train", limit: int | None = None
    ) -> dict[str, Tensor]:
        """Return loss, accuracy and, for logistic loss, F1 of whole models, each ``[R]``."""
        if split not in ("train", "test"):
            raise unknown("split", split, ["train", "test"])
        features, y = (self.x, self.y) if split == "train" else (self.test_x, self.test_y)
        keep = torch.linspace(0, len(y) - 1, min(limit or len(y), len(y))).long()
        outs = [self.predict(theta, [x[part] for x in features]) for part in keep.split(1000)]
        out, y = torch.cat(outs, 1), y[keep].expand(len(theta), -1)
        values = {"loss": TIER_LOSSES[self.loss_name](out, y).double().mean(1).cpu()}
        if self.loss_name == "half_square":
            return values
        guess = (out.squeeze(-1) > 0).long() if self.loss_name == "logistic" else out.argmax(-1)
        values["accuracy"] = (guess == y).double().mean(1).cpu()
        if self.loss_name == "logistic":
            pairs = zip(y.cpu(), guess.cpu(), strict=True)
            values["f1"] = torch.tensor([f1_score(*p, zero_division=0) for p in pairs])
        return values


class Message(NamedTuple):
    """One array on its way: who sends what to whom, in which round."""

    round: int
    sender: str
    receiver: str
    content: str
    shape: tuple[int, ...]
    bytes: int


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
        Local steps done.
    """

    x: Tensor
    seeds: tuple[int, ...]
    t: int = 0
    clock: int = 0


class Frozen(Task):
    """The local problem of one round: own embedding plus the frozen foreign sum.

    Parameters
    ----------
    model
        ``h_j``.
    x, y
        The round's minibatch, ``[B, ...]`` and ``[B]``.
    foreign
        ``Φ_{-j}[B, E]``, or the loss derivatives ``[B, E]`` when labels stay private.
    loss_name
        As in :class:`TieredTask`, or ``"derivative"`` for the label-private variants.
    """

    def __init__(self, model: Model, x: Tensor, y: Tensor, foreign: Tensor, loss_name: str) -> None:
        self.model, self.l2, self.loss_name, self.foreign = model, 0.0, loss_name, foreign
        self.data = FederatedDataset(x, y, [], None, None)

    def losses(self, theta: Tensor | dict[str, Tensor], batch: Batch) -> Tensor:
        """Return every copy's loss on its rows of the minibatch, ``[copies]``."""
        own = self.model.apply(theta, self.data.x[batch.rows])
        foreign = self.foreign[batch.rows]
        if self.loss_name == "derivative":
            each = (own * foreign).sum(-1)
        else:
            each = TIER_LOSSES[self.loss_name](own + foreign, self.data.y[batch.rows])
        return (each * batch.weight).sum(1)


VARIANTS = ("shared labels", "label-private exact", "label-private stale")


@dataclass(frozen=True)
class TDCD:
    """Algorithm 1 of the paper, and its label-private variants (Remark 2).

    Parameters
    ----------
    lr
        Step size η.
    local_steps
        Local steps Q a round; the minibatch and the foreign embeddings stay frozen for all Q.
    batch_size
        Minibatch size B, drawn from all rows by a shared seed; None takes all rows.
    variant
        ``"shared labels"``: every client knows the labels of its rows. ``"label-private
        exact"``: fresh derivatives every local step, same iterates. ``"label-private stale"``:
        derivatives of the round's start, reused.
    record_messages
        Return every exchanged array of the first run in ``metrics["messages"]``.
    """

    lr: float
    local_steps: int
    batch_size: int | None = None
    variant: str = "shared labels"
    record_messages: bool = False

    def __post_init__(self) -> None:
        if self.local_steps < 1 or not self.lr > 0:
            raise FedlibError(
                f"local_steps (Q) must be at least 1 and lr positive; "
                f"got {self.local_steps} and {self.lr}."
            )
        if self.variant not in VARIANTS:
            raise unknown("variant", self.variant, VARIANTS)

    def init(self, task: TieredTask, seeds: Sequence[int], x: Tensor | None = None) -> TieredState:
        """Return the state before round 0 (line 1)."""
        B = self.batch_size or len(task.y)
        if not 1 <= B <= len(task.y):
            raise FedlibError(f"batch_size must be between 1 and {len(task.y)}; got {B}.")
        return TieredState(task.init(seeds) if x is None else x, tuple(seeds))

    def round(self, state: TieredState, task: TieredTask) -> tuple[TieredState, dict[str, Any]]:
        """Run one round: an exchange (lines 3-8), Q local steps (9-10), an average (11)."""
        ids = draw_ids(state.seeds, state.t, len(task.y), self.batch_size)  # line 3, [R, B]
        silos = [Cohort.of(task, j, ids, state.x) for j in range(task.N)]  # lines 4-5
        phi = [silo.union(silo.embed(task)) for silo in silos]  # lines 6-7, [R B, E]
        foreign = torch.stack(phi).sum(0)
        for silo, own in zip(silos, phi, strict=True):
            silo.foreign = foreign - own  # line 8
        descend(self, task, silos)  # lines 9-10
        x = torch.cat([silo.mean() for silo in silos], 1)  # line 11
        metrics = {"messages": messages(self, task, silos, state.t)} if self.record_messages else {}
        clock = state.clock + self.local_steps
        return replace(state, x=x, t=state.t + 1, clock=clock), metrics


def draw_ids(seeds: Sequence[int], t: int, samples: int, batch_size: int | None) -> Tensor:
    """Draw the minibatch that all hubs share, ``[R, B]`` row numbers without replacement."""
    if batch_size is None:
        return torch.arange(samples).expand(len(seeds), -1)
    draws = [stream(s, "minibatch", t).choice(samples, batch_size, replace=False) for s in seeds]
    return torch.from_numpy(np.stack(draws))


@dataclass
class Cohort:
    """Silo ``j`` in one round: its clients' copies and their places in the minibatch.

    Attributes
    ----------
    theta
        ``[R K_j, P_j]``: the clients' copies of the silo's block.
    batch
        Places in the minibatch ``[R K_j, b]`` with weights ``1/|ζ_kj|``, padded with weight zero. A
        client without a sample has weight zero everywhere: no gradient, but still averaged.
    x, y
        The minibatch as silo ``j`` sees it, ``[R B, ...]`` and ``[R B]``.
    foreign
        ``Φ_{-j}[R B, E]``, set after the exchange.
    """

    j: int
    theta: Tensor
    batch: Batch
    x: Tensor
    y: Tensor
    runs: int
    foreign: Tensor | None = None

    @classmethod
    def of(cls, task: TieredTask, j: int, ids: Tensor, x: Tensor) -> Cohort:
        """Send every client its model and its part of the minibatch."""
        runs, B = ids.shape
        owner = task.owner[j][ids.numpy()] + task.K[j] * np.arange(runs)[:, None]
        copies = runs * task.K[j]
        order = np.argsort(owner, axis=None, kind="stable")
        count = np.bincount(owner.ravel(), minlength=copies)
        held = np.arange(count.max())[None] < count[:, None]
        places, weight = np.zeros(held.shape, dtype=np.int64), np.zeros(held.shape)
        places[held] = order
        weight[held] = np.repeat(1 / np.maximum(count, 1), count)
        device, dtype = x.device, x.dtype
        batch = Batch(
            torch.from_numpy(places).to(device), torch.from_numpy(weight).to(device, dtype)
        )
        theta = x[:, task.columns[j]].repeat_interleave(task.K[j], 0)
        flat = ids.flatten().to(device)
        return cls(j, theta, batch, task.x[j][flat], task.y[flat], runs)

    @torch.no_grad()
    def embed(self, task: TieredTask) -> Tensor:
        """Return every client's embeddings of its samples, ``[R K_j, b, E]``."""
        return task.models[self.j].apply(self.theta, self.x[self.batch.rows])

    def union(self, parts: Tensor) -> Tensor:
        """Put the clients' embeddings into one table ``[R B, E]``, in the minibatch's order."""
        held = self.batch.weight > 0
        table = parts.new_zeros(len(self.y), parts.shape[-1])
        table[self.batch.rows[held]] = parts[held]
        return table

    def mean(self) -> Tensor:
        """Return the hub's average of its clients, ``[R, P_j]``."""
        return self.theta.unflatten(0, (self.runs, -1)).mean(1)


def descend(algorithm: TDCD, task: TieredTask, silos: list[Cohort]) -> None:
    """Let all clients of all silos take their Q local steps, in place.

    Silos that share a model are rows of one matrix.
    """
    groups: dict[int, list[Cohort]] = {}
    for silo in silos:
        key = (id(task.models[silo.j]), silo.x.shape[1:])
        groups.setdefault(key, []).append(silo)
    for group in groups.values():
        model = task.models[group[0].j]
        theta = torch.cat([silo.theta for silo in group])
        x, y = torch.cat([s.x for s in group]), torch.cat([s.y for s in group])
        foreign, batch = torch.cat([s.foreign for s in group]), _joined(group)
        Q, lr = algorithm.local_steps, algorithm.lr
        if algorithm.variant == "shared labels":
            local = Frozen(model, x, y, foreign, task.loss_name)
            theta = local_sgd(local, theta, [batch] * Q, lr)
        for q in range(Q if algorithm.variant != "shared labels" else 0):
            if q == 0 or algorithm.variant == "label-private exact":
                d = _derivatives(model, theta, x, y, foreign, batch, task.loss_name)
            theta = local_sgd(Frozen(model, x, y, d, "derivative"), theta, [batch], lr)
        for silo, part in zip(group, theta.split([len(s.theta) for s in group]), strict=True):
            silo.theta = part


def _joined(group: list[Cohort]) -> Batch:
    """Stack the silos' batches; places move on by the length of the tables before."""
    width = max(silo.batch.rows.shape[1] for silo in group)
    rows, weight, start = [], [], 0
    for silo in group:
        pad = (0, width - silo.batch.rows.shape[1])
        rows.append(F.pad(silo.batch.rows, pad) + start)
        weight.append(F.pad(silo.batch.weight, pad))
        start += len(silo.y)
    return Batch(torch.cat(rows), torch.cat(weight))


def _derivatives(model, theta, x, y, foreign, batch, loss_name) -> Tensor:
    """Return ``ℓ'(Φ_j + Φ_{-j}; y)`` in the minibatch's order, ``[R B, E]``: the label holder."""
    with torch.no_grad():
        own = model.apply(theta, x[batch.rows])
    out = (own + foreign[batch.rows]).requires_grad_()
    (d,) = torch.autograd.grad(TIER_LOSSES[loss_name](out, y[batch.rows]).sum(), out)
    table = torch.zeros_like(foreign)
    held = batch.weight > 0
    table[batch.rows[held]] = d[held]
    return table


def messages(algorithm: TDCD, task: TieredTask, silos: list[Cohort], t: int) -> list[Message]:
    """Return every array that the first run exchanges in a round.

    The list follows the algorithm: models and embeddings between hub and clients, embeddings
    between hubs, models back; with private labels, derivatives and fresh embeddings as well.
    """
    out: list[Message] = []

    def send(sender: str, receiver: str, content: str, *shape: int) -> None:
        size = int(np.prod(shape)) * task.x[0].element_size()
        out.append(Message(t, sender, receiver, content, shape, size))

    E = task.widths[0]
    B = len(silos[0].y) // silos[0].runs
    for silo in silos:
        j, hub, P = silo.j, f"hub {silo.j}", task.models[silo.j].size
        count = (silo.batch.weight[: task.K[j]] > 0).sum(1).tolist()
        for k, held in enumerate(count):
            client = f"client {k},{j}"
            send(hub, client, "model", P)
            send(client, hub, "embeddings", held, E)
            send(hub, client, "foreign embeddings", held, E)
            send(client, hub, "model", P)
        for other in range(task.N):
            if other != j:
                send(hub, f"hub {other}", "embeddings", B, E)
        if algorithm.variant != "shared labels" and j > 0:
            fresh = algorithm.local_steps if algorithm.variant == "label-private exact" else 1
            for _ in range(fresh):
                send(hub, "hub 0", "fresh embeddings", B, E)
                send("hub 0", hub, "derivatives", B, E)
    return out
