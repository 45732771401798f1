"""FedNova: clients that take more local steps do not count more.

Wang, Liu, Liang, Joshi and Poor, *Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization*, NeurIPS 2020, with plain SGD as the local solver::

    1  for t = 0, 1, ...
    2      draw clients with weights p
    3      each of them: y_i = x,  τ_i times: y_i <- y_i - η g_i(y_i)
    4          -η d_i = (y_i - x) / τ_i
    5      τ_eff = Σ_i p_i τ_i
    6      x <- x - τ_eff Σ_i p_i η d_i
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.engine.draws import Array, draw_one
from fedlib.engine.mixing import average
from fedlib.engine.steps import Now, Step, sgd
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, by_size, check_settings, movements, read, sizes_of, start
from fedlib.papers.methods.common import Rate
from fedlib.population.participation import Participation


@dataclass(frozen=True, kw_only=True)
class Uneven(Drawn[Array]):
    """What chance decides in a round of clients that take different numbers of steps.

    Attributes
    ----------
    tau
        Local steps of those who take part, ``[R, S]``.
    """

    tau: Array


def until(then: Step = sgd) -> Step:
    """Stop after ``tau[C, 1]`` steps."""

    def step(now: Now) -> Tensor:
        return torch.where(now.t < now.extras["tau"], then(now), now.theta)

    return step


@dataclass(frozen=True)
class UnevenFedAvg:
    """FedAvg whose clients take different numbers of local steps in a round.

    All copies are computed as long as the longest, and those that have ended stay where they are.

    Parameters
    ----------
    participation
        Who takes part, and with what weight q.
    lr
        Local step size η; a number, or one a run.
    steps
        Local steps τ_i: one number for each of the N clients, or one for all.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    weights
        As for :class:`~fedlib.papers.fedavg.FedAvg`: the p_i of the objective are the process's
        q, or with ``"sizes"`` in proportion to the clients' samples, as in the paper.
    """

    participation: Participation
    lr: Rate
    steps: int | tuple[int, ...] = 1
    batch_size: int | None = None
    weights: str = "process"

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self, counts=())
        each, N = self.steps, self.participation.N
        for one in each if isinstance(each, tuple) else (each,):
            check_whole_number("Each of steps (one number, or a tuple)", one)
        if isinstance(each, tuple) and len(each) != N:
            raise FedlibError(f"steps has {len(each)} numbers, and there are {N} clients.")
        if self.weights not in ("process", "sizes"):
            raise unknown("kind of weights", self.weights, ["process", "sizes"])

    @property
    def local_steps(self) -> int:
        """The most steps that a client takes."""
        return int(np.max(self.steps))

    def init(
        self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0
    ) -> fedavg.State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        x, seeds, cursor = start(self, task, seeds, x)
        return fedavg.State(x, seeds, cursor, t)

    def draws(self, state: fedavg.State, task: Task) -> Iterator[Uneven[np.ndarray]]:
        """Draw the next rounds on the host; a client's next round goes on where it has ended.

        Who is drawn twice begins the second visit behind as many steps as the longest client takes.
        """
        cursor, tau = state.cursor, np.broadcast_to(self.steps, task.N)
        held = sizes_of(task, state.seeds) if self.weights == "sizes" else None
        for t in itertools.count(state.t):
            clients, q = self.participation.cohort_arrays(state.seeds, t)
            q = q if held is None else by_size(q, clients, held)
            drawn = read(self, state.seeds, task, clients, q, cursor)
            cursor = cursor + (drawn.cursor - cursor) // self.local_steps * tau
            yield Uneven(drawn.q, drawn.reading, cursor, tau=tau[clients])

    def round(
        self, state: fedavg.State, task: Task, drawn: Uneven[Tensor] | None = None
    ) -> tuple[fedavg.State, dict[str, Any]]:
        """Run one round of every run."""
        drawn = drawn or draw_one(self, state, task)  # line 2
        d = movements(self, state.x, task, drawn, until(), tau=drawn.tau.view(-1, 1))  # line 3
        x = state.x + self.merged(d, drawn)  # lines 4-6
        return replace(state, x=x, cursor=drawn.cursor, t=state.t + 1), {}

    def merged(self, d: Tensor, drawn: Uneven[Tensor]) -> Tensor:
        """Return the global movement ``[R, P]``, given the clients' ``d[R * S, P]``."""
        return average(d, drawn.q)


@dataclass(frozen=True)
class FedNova(UnevenFedAvg):
    """Normalised averaging: a client's mean step counts, not the sum of its steps.

    ``x <- x + τ_eff Σ_i p_i Δ_i / τ_i`` with ``τ_eff = Σ_i p_i τ_i``, the paper's choice with plain
    SGD as local solver, where the normaliser ‖a_i‖₁ is τ_i. With equal steps it is FedAvg. Where
    only some take part, both sums go over them with their weights q. The authors' code does the
    same with everybody there, and has solvers with momentum and a proximal term beside it, which
    other normalisers belong to.
    """

    def merged(self, d: Tensor, drawn: Uneven[Tensor]) -> Tensor:
        """Return ``τ_eff Σ_i p_i Δ_i / τ_i``, ``[R, P]``."""
        tau = drawn.tau.to(d)
        mean = d / tau.view(-1, 1)  # line 4
        effective = (drawn.q.to(d) * tau).sum(1, keepdim=True)  # line 5
        return effective * average(mean, drawn.q)  # line 6
