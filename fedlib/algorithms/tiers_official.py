"""TDCD as its released code runs it with BatchNorm networks, each difference a named option.

The paper's theory takes every embedding for a function of one sample. BatchNorm breaks this: in
train mode an embedding depends on the other samples of its sub-batch, and the network carries
running statistics that are no parameters. :class:`OfficialTDCD` follows the released code in
what it does with them. Silos and clients are worked on in plain loops, for clarity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlib.algorithms.tiers import TDCD, TIER_LOSSES, TieredState, TieredTask, draw_ids
from fedlib.errors import FedlibError
from fedlib.models import Model, uniform_init

Buffers = dict[str, Tensor]


class BufferedModel(Model):
    """A module with buffers, such as running statistics, that live beside the parameters.

    Parameters
    ----------
    module
        Any module. In train mode it may change its buffers, but should draw nothing at random:
        dropout would use PyTorch's global generator.
    initialise
        As for :class:`~fedlib.models.Model`. By default normalisation layers start at weight one
        and bias zero, all others with PyTorch's rule for dense and convolution layers.

    Attributes
    ----------
    buffers
        Starting values by name: the module's own, or means zero, variances one and counts zero
        if it was built without memory (on the meta device).

    Raises
    ------
    FedlibError
        When another buffer was built without memory, so that its starting value is unknown.
    """

    def __init__(
        self, module: nn.Module, initialise: Callable[..., np.ndarray] | None = None
    ) -> None:
        self.buffers = {name: _start(name, b) for name, b in module.named_buffers()}
        super().__init__(module, None, initialise or _norm_init(module))

    @classmethod
    def of(cls, model: Model, momentum: float = 0.1) -> BufferedModel:
        """Give the BatchNorm layers of a model running statistics, as in the released code.

        Parameters
        ----------
        model
            For example ``resnet18((3, 32, 16), 10, norm="batch")``; left unchanged, and its rule
            for the initial parameters is kept.
        momentum
            Weight of the newest batch in the running statistics.
        """
        module = copy.deepcopy(model.module)
        for layer in module.modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats, layer.momentum = True, momentum
                layer.register_buffer("running_mean", torch.zeros(layer.num_features))
                layer.register_buffer("running_var", torch.ones(layer.num_features))
                layer.register_buffer("num_batches_tracked", torch.tensor(0))
        return cls(module, model._initialise)

    def call(self, views: dict[str, Tensor], buffers: Buffers, x: Tensor, train: bool) -> Tensor:
        """Run one copy on ``x[B, ...]``, giving ``[B, E]``; train mode moves ``buffers`` in place.

        Parameters
        ----------
        views
            Named parameters ``[*shape]`` of one copy.
        buffers
            Named buffers of the same copy.
        x
            The samples.
        train
            Normalise by the statistics of this batch, or else by the running ones.

        Raises
        ------
        FedlibError
            When train mode meets a single sample, from which BatchNorm has no variance.
        """
        self.module.train(train)
        try:
            return torch.func.functional_call(self.module, {**views, **buffers}, (x,))
        except ValueError as error:
            if not train or len(x) > 1:
                raise
            raise FedlibError(
                "A client has a single sample in the minibatch, and BatchNorm in train mode needs "
                "at least two values a channel. Use a larger batch_size or fewer clients."
            ) from error

    def apply(self, theta: Tensor | dict[str, Tensor], x: Tensor) -> Tensor:
        """Run every copy on one sample in eval mode with the starting buffers, ``[copies, 1, E]``.

        This much lets a task ask for the embedding's width. Parameters alone do not determine
        more; a model without buffers takes any batch.

        Raises
        ------
        FedlibError
            When a model with buffers is given more than one sample.
        """
        if self.buffers and x.shape[1] > 1:
            raise FedlibError(
                "This network has running statistics, which a row of parameters does not hold. "
                "Evaluate with OfficialTDCD.evaluate(state, task), or simulate(..., "
                "evaluate=algorithm.evaluate)."
            )
        views = theta if isinstance(theta, dict) else self.views(theta)
        start = [_placed(self.buffers, x)] * len(x)
        return _each_copy(self, views, start, x)


def _start(name: str, buffer: Tensor) -> Tensor:
    if not buffer.is_meta:
        return buffer.detach().clone()
    values = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
    leaf = name.rsplit(".", 1)[-1]
    if leaf not in values:
        raise FedlibError(
            f"Buffer {name!r} was built on the meta device and has no value. Build the module on "
            "the CPU."
        )
    return torch.full(buffer.shape, values[leaf], dtype=buffer.dtype)


def _norm_init(module: nn.Module) -> Callable[..., np.ndarray]:
    kinds = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    layers = {name for name, layer in module.named_modules() if isinstance(layer, kinds)}

    def rule(name: str, shape: torch.Size, fan_in: int, rng: np.random.Generator) -> np.ndarray:
        layer, _, kind = name.rpartition(".")
        if layer in layers:
            return np.full(tuple(shape), float(kind == "weight"))
        return uniform_init(name, shape, fan_in, rng)

    return rule


def _placed(buffers: Buffers, like: Tensor) -> Buffers:
    """Copy buffers to the data's device and, if they are real numbers, to its precision."""
    return {
        name: b.to(like.device, like.dtype if b.is_floating_point() else b.dtype, copy=True)
        for name, b in buffers.items()
    }


def _each_copy(model: BufferedModel, views: Buffers, buffers: list[Buffers], x: Tensor) -> Tensor:
    """Run every copy in eval mode with its own buffers, ``[copies, B, E]``."""
    one = [{name: view[c] for name, view in views.items()} for c in range(len(x))]
    return torch.stack(
        [model.call(v, b, xc, train=False) for v, b, xc in zip(one, buffers, x, strict=True)]
    )


@dataclass(frozen=True)
class OfficialState(TieredState):
    """A :class:`~fedlib.algorithms.tiers.TieredState` with the hubs' buffers.

    Attributes
    ----------
    buffers
        One dictionary a silo, name to ``[R, *shape]``: the statistics that the hub broadcasts.
        Empty for a model without buffers.
    """

    buffers: tuple[Buffers, ...] = ()

    def of_run(self, j: int, r: int) -> Buffers:
        """Return a fresh copy of silo ``j``'s buffers in run ``r``."""
        return {name: value[r].clone() for name, value in self.buffers[j].items()}

    def bind(self, task: TieredTask) -> TieredTask:
        """Return the task with these statistics built in: its networks run in eval mode.

        ``predict``, ``loss`` and ``evaluate`` of the result take this state's ``x``.
        """
        bound = copy.copy(task)
        bound.models = [
            _Bound(model, [self.of_run(j, r) for r in range(len(self.x))])
            if isinstance(model, BufferedModel)
            else model
            for j, model in enumerate(task.models)
        ]
        return bound


class _Bound:
    """A buffered model with one set of buffers a run, in eval mode."""

    def __init__(self, model: BufferedModel, buffers: list[Buffers]) -> None:
        self.model, self.buffers, self.size = model, buffers, model.size

    def apply(self, theta: Tensor, x: Tensor) -> Tensor:
        return _each_copy(self.model, self.model.views(theta), self.buffers, x)


@dataclass
class Client:
    """A client in one round: its copy of the silo's network and its part of the minibatch.

    Attributes
    ----------
    model
        ``h_j``.
    theta
        Parameters ``[1, P_j]``.
    buffers
        Its own statistics, name to ``[*shape]``.
    places
        Where its ``b`` samples stand in the minibatch, ``[b]``; b may be zero.
    x, y
        Its samples ``[b, ...]`` and labels ``[b]``.
    """

    model: Model
    theta: Tensor
    buffers: Buffers
    places: Tensor
    x: Tensor
    y: Tensor

    def embed(self, views: dict[str, Tensor], train: bool) -> Tensor:
        """Return ``h_j(x)[b, E]`` for parameters ``[1, *shape]``; train mode moves the buffers."""
        if not isinstance(self.model, BufferedModel):
            return self.model.apply(views, self.x.unsqueeze(0))[0]
        one = {name: view[0] for name, view in views.items()}
        return self.model.call(one, self.buffers, self.x, train)

    def descend(self, foreign: Tensor, lr: float, steps: int, loss_name: str) -> None:
        """Take the local steps against the frozen foreign sum ``[b, E]``, in place."""
        views = self.model.views(self.theta)
        leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        for _ in range(steps):
            out = (self.embed(leaves, train=True) + foreign).unsqueeze(0)
            loss = TIER_LOSSES[loss_name](out, self.y.unsqueeze(0)).mean()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            for view, gradient in zip(views.values(), gradients, strict=True):
                view.sub_(gradient, alpha=lr)


@dataclass(frozen=True)
class OfficialTDCD:
    """TDCD as the released code runs it (its client, hub and averaging code; not in the paper).

    The released code has *mirror clients*: client ``k`` holds the same rows in every silo, and
    embeddings pass directly between them. This is a property of the split, not of the algorithm:
    build the task with ``partition.grid(samples, clients, seed, aligned=True)``. Any other split
    works too, through the hubs' union of embeddings.

    Only parameters are averaged over the clients. BatchNorm's running statistics are buffers:
    every client moves its own in each train-mode pass, the exchange included, and evaluation
    uses those that the hub broadcasts. A model without buffers (a plain
    :class:`~fedlib.models.Model`) gives the iterates of :class:`~fedlib.algorithms.tiers.TDCD`.

    Parameters
    ----------
    lr
        Step size η.
    local_steps
        Local steps Q a round, always in train mode.
    batch_size
        Minibatch size B, drawn as in TDCD; None takes all rows.
    exchange_in_train_mode
        The exchanged embeddings are computed without gradient but in train mode: they depend on
        the rest of the sub-batch and the pass moves the statistics. False exchanges in eval mode,
        with the running statistics, which stay as they are.
    buffers_from_first_client
        The hub broadcasts client 0's buffers, even if that client had no sample. False, our
        control, broadcasts the mean over the silo's clients (of counters, the largest).
    exchange_passes
        How often the train-mode exchange is run on the identical minibatch. None is Q times, as
        in the released code; all passes give the same embeddings, but each moves the statistics
        again. One pass costs less.

    Notes
    -----
    A client without a sample in the minibatch skips the exchange and its steps, and its
    unchanged parameters still enter the average.
    """

    lr: float
    local_steps: int
    batch_size: int | None = None
    exchange_in_train_mode: bool = True
    buffers_from_first_client: bool = True
    exchange_passes: int | None = None

    def __post_init__(self) -> None:
        TDCD(self.lr, self.local_steps, self.batch_size)  # the same checks
        if self.exchange_passes is not None and self.exchange_passes < 1:
            raise FedlibError(
                f"exchange_passes must be at least 1, or None for local_steps passes; "
                f"got {self.exchange_passes}."
            )

    def init(
        self, task: TieredTask, seeds: Sequence[int], x: Tensor | None = None
    ) -> OfficialState:
        """Return the state before round 0: TDCD's, with every network's starting buffers."""
        start = TDCD(self.lr, self.local_steps, self.batch_size).init(task, seeds, x)
        buffers = []
        for model, features in zip(task.models, task.x, strict=True):
            placed = _placed(getattr(model, "buffers", {}), features)
            buffers.append({n: b.expand(len(seeds), *b.shape).clone() for n, b in placed.items()})
        return OfficialState(start.x, start.seeds, buffers=tuple(buffers))

    def round(self, state: OfficialState, task: TieredTask) -> tuple[OfficialState, dict[str, Any]]:
        """Run one round: an exchange, Q local steps, an average of parameters only."""
        ids = draw_ids(state.seeds, state.t, len(task.y), self.batch_size)
        x = torch.empty_like(state.x)
        buffers = tuple({n: torch.empty_like(b) for n, b in silo.items()} for silo in state.buffers)
        for r in range(len(state.seeds)):
            silos = [self._clients(state, task, j, r, ids[r]) for j in range(task.N)]
            self._train(task, silos, len(ids[r]))
            for j, clients in enumerate(silos):
                x[r, task.columns[j]] = torch.cat([c.theta for c in clients]).mean(0)
                for name, value in self._hub_buffers(clients).items():
                    buffers[j][name][r] = value
        clock = state.clock + self.local_steps
        return replace(state, x=x, t=state.t + 1, clock=clock, buffers=buffers), {}

    def evaluate(
        self,
        state: OfficialState,
        task: TieredTask,
        splits: Iterable[str] = ("train",),
        limit: int | None = None,
    ) -> dict[tuple[str, str], Tensor]:
        """Return ``{(split, metric): [R]}`` in eval mode with the broadcast statistics.

        Metrics and ``limit`` are those of :meth:`TieredTask.evaluate`; the limit applies to the
        training split. Pass this method to ``simulate`` as ``evaluate``.
        """
        bound = state.bind(task)
        return {
            (split, metric): value
            for split in splits
            for metric, value in bound.evaluate(
                state.x, split, limit if split == "train" else None
            ).items()
        }

    def _clients(
        self, state: OfficialState, task: TieredTask, j: int, r: int, ids: Tensor
    ) -> list[Client]:
        """Send every client of silo ``j`` its network and its part of the minibatch."""
        owner = task.owner[j][ids.numpy()]
        clients = []
        for k in range(task.K[j]):
            places = torch.from_numpy(np.flatnonzero(owner == k))
            held = ids[places].to(task.y.device)
            theta = state.x[r : r + 1, task.columns[j]].clone()
            parts = places.to(task.y.device), task.x[j][held], task.y[held]
            clients.append(Client(task.models[j], theta, state.of_run(j, r), *parts))
        return clients

    def _train(self, task: TieredTask, silos: list[list[Client]], B: int) -> None:
        """Exchange all embeddings, then let every client with samples take its steps."""
        phi = [self._exchange(clients, B, task.widths[0]) for clients in silos]
        total = torch.stack(phi).sum(0)
        for own, clients in zip(phi, silos, strict=True):
            foreign = total - own
            for c in clients:
                if len(c.places):
                    c.descend(foreign[c.places], self.lr, self.local_steps, task.loss_name)

    @torch.no_grad()
    def _exchange(self, clients: list[Client], B: int, width: int) -> Tensor:
        """Return the silo's embeddings in the minibatch's order, ``[B, E]``."""
        train = self.exchange_in_train_mode
        again = (self.exchange_passes or self.local_steps) if train else 1
        table = clients[0].theta.new_zeros(B, width)
        for c in clients:
            views = c.model.views(c.theta)
            for _ in range((again if c.buffers else 1) if len(c.places) else 0):
                table[c.places] = c.embed(views, train)
        return table

    def _hub_buffers(self, clients: list[Client]) -> Buffers:
        """Return what the hub broadcasts: the first client's buffers, or the mean of all."""
        if self.buffers_from_first_client:
            return clients[0].buffers
        stacks = {n: torch.stack([c.buffers[n] for c in clients]) for n in clients[0].buffers}
        return {n: s.mean(0) if s.is_floating_point() else s.amax(0) for n, s in stacks.items()}
