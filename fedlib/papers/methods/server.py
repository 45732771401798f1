"""Server optimizers: the mean movement of a round is taken for a gradient.

Hsu, Qi and Brown, *Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification*, arXiv 1909.06335, 2019: momentum. Reddi, Charles, Zaheer, Garrett, Rush, Konečný,
Kumar and McMahan, *Adaptive Federated Optimization*, ICLR 2021, Algorithm 2: the adaptive ones::

    1  m = 0,  v = τ²
    2  for t = 0, 1, ...
    3      draw clients with weights q
    4      each of them: y_i = x,  K times: y_i <- y_i - η_l g_i(y_i)
    5      Δ = Σ_i q_i (y_i - x)
    6      m <- β₁ m + (1 - β₁) Δ
    7      v <- v + Δ², or β₂ v + (1 - β₂) Δ², or v - (1 - β₂) Δ² sign(v - Δ²)
    8      x <- x + η m / (√v + τ)

None of them moves the point where the mean movement is zero: FedAvg's fixed point is theirs.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedlib.engine.checks import check_between, check_each, check_positive
from fedlib.engine.draws import draw_one
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, FedAvg, check_settings, movement, start
from fedlib.papers.methods.common import Rate


@dataclass(frozen=True, kw_only=True)
class Velocity(fedavg.State):
    """What a checkpoint of :class:`FedAvgM` holds: that of FedAvg, and the momentum.

    Attributes
    ----------
    v
        Momentum, ``[R, P]``.
    """

    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Moments(fedavg.State):
    """What a checkpoint of the adaptive servers holds: that of FedAvg, and two moments.

    Attributes
    ----------
    m
        Mean movement of late, ``[R, P]``.
    v
        Mean squared movement of late, ``[R, P]``.
    """

    m: Tensor
    v: Tensor


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server: ``v <- β v + Δ``, ``x <- x + η v``.

    With β = 0 and η = 1 it is FedAvg.

    Parameters
    ----------
    participation, lr, local_steps, batch_size, weights
        As for :class:`~fedlib.papers.fedavg.FedAvg`; Hsu et al. weigh by ``"sizes"``.
    beta
        β, from 0 to 1; a number, or one a run.
    server_lr
        η; a number, or one a run. Hsu et al. have 1; Reddi et al. tune it.
    """

    beta: Rate = 0.9
    server_lr: Rate = 1.0

    per_run: ClassVar = ("lr", "beta", "server_lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("beta", self.beta, 1)
        check_settings(self, ("server_lr",))

    def init(
        self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0
    ) -> Velocity:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return Velocity(x, seeds, cursor, t, v=torch.zeros_like(x))

    def round(  # type: ignore[override]  # its state is of its own kind
        self, state: Velocity, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[Velocity, dict[str, Any]]:
        """Run one round of every run; nothing drawn before means to draw now."""
        drawn = drawn or draw_one(self, state, task)
        d = movement(self, state.x, task, drawn)
        v = column(self.beta, state.x) * state.v + d
        x = state.x + column(self.server_lr, state.x) * v
        return replace(state, x=x, v=v, cursor=drawn.cursor, t=state.t + 1), {}


@dataclass(frozen=True)
class Adaptive(FedAvg, abc.ABC):
    """An adaptive server, FedOpt; a method says how the second moment is kept.

    As in the paper, and unlike Adam's, the moments are not corrected for their start, and the
    second begins at the square of the adaptivity.

    Parameters
    ----------
    participation, lr, local_steps, batch_size, weights
        As for :class:`~fedlib.papers.fedavg.FedAvg`; ``lr`` is the clients' η_l. The paper's box
        takes the plain mean.
    server_lr
        The server's η; a number, or one a run. The paper tunes it.
    beta1
        β₁, decay of the first moment.
    beta2
        β₂, decay of the second.
    adaptivity
        τ, added to the root; the smaller, the more the server adapts.
    """

    server_lr: Rate = field(kw_only=True)
    beta1: float = 0.9
    beta2: float = 0.99
    adaptivity: float = 1e-3

    per_run: ClassVar = ("lr", "server_lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, ("server_lr",))
        check_between("beta1", self.beta1, 0, 1)
        check_between("beta2", self.beta2, 0, 1)
        check_positive("adaptivity", self.adaptivity)

    def init(
        self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0
    ) -> Moments:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        if task.model.buffers:
            raise FedlibError(
                f"{type(self).__name__} would divide the movement of BatchNorm's running "
                "statistics by its size. Use a model without them, such as one with GroupNorm."
            )
        x, seeds, cursor = start(self, task, seeds, x)
        v = torch.full_like(x, self.adaptivity**2)  # line 1
        return Moments(x, seeds, cursor, t, m=torch.zeros_like(x), v=v)

    def round(  # type: ignore[override]  # its state is of its own kind
        self, state: Moments, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[Moments, dict[str, Any]]:
        """Run one round of every run: lines 3 to 8 of the box."""
        drawn = drawn or draw_one(self, state, task)  # line 3
        d = movement(self, state.x, task, drawn)  # lines 4-5
        return replace(self.served(state, d), cursor=drawn.cursor, t=state.t + 1), {}

    def served(self, state: Moments, d: Tensor) -> Moments:
        """Return the state after the server's step, given the mean movement ``d[R, P]``."""
        m = self.beta1 * state.m + (1 - self.beta1) * d  # line 6
        v = self.second(state.v, d**2)  # line 7
        x = state.x + column(self.server_lr, state.x) * m / (v.sqrt() + self.adaptivity)  # line 8
        return replace(state, x=x, m=m, v=v)

    @abc.abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the next second moment, given the squared movement."""


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """The adaptive server that sums the squares: ``v <- v + Δ²``."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return ``v + Δ²``."""
        return v + square


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """The adaptive server that forgets at a fixed pace: ``v <- β₂ v + (1 - β₂) Δ²``."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return ``β₂ v + (1 - β₂) Δ²``."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(Adaptive):
    """The adaptive server that forgets at the pace of Δ²: ``v <- v - (1 - β₂) Δ² sign(v - Δ²)``."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Return ``v - (1 - β₂) Δ² sign(v - Δ²)``."""
        return v - (1 - self.beta2) * square * (v - square).sign()
