"""Federated averaging, the baseline of every paper.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, *Communication-Efficient Learning of Deep
Networks from Decentralized Data*, AISTATS 2017.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol

import numpy as np
from torch import Tensor

from fedlib.engine.checks import check_models, check_positive, check_whole_number, checked_seeds
from fedlib.engine.cost import check_room
from fedlib.engine.data import Reading
from fedlib.engine.draws import ON_HOST, Array, draw_one
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import average
from fedlib.engine.steps import Step
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.population.participation import Participation


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. Row ``r`` of every tensor belongs to run ``r``.

    Attributes
    ----------
    x
        Global models ``[R, P]``.
    seeds
        One seed a run.
    cursor
        Minibatches each client has used, ``[R, N]``.
    t
        The next round.
    """

    x: Tensor
    seeds: tuple[int, ...]
    cursor: np.ndarray
    t: int = 0


@dataclass(frozen=True)
class Drawn(Generic[Array]):
    """What chance decides in a round of averaging.

    Attributes
    ----------
    q
        Weights of the clients that take part, ``[R, S]``.
    reading
        The minibatches of their local steps, ``R * S`` copies.
    cursor
        Minibatches each client has used after the round, ``[R, N]``.
    """

    q: Array
    reading: Reading[Array]
    cursor: np.ndarray = field(metadata=ON_HOST)


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging: the clients of a round take local steps, the server averages.

    Parameters
    ----------
    participation
        Who takes part, and with what weight q.
    lr
        Local step size; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    weights
        ``"process"``: the participation process's q. ``"sizes"``: q times the client's number
        of samples, renormalised over the cohort, as McMahan et al. weigh their clients.
    """

    participation: Participation
    lr: float | tuple[float, ...]
    local_steps: int = 1
    batch_size: int | None = None
    weights: str = "process"

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.weights not in ("process", "sizes"):
            raise unknown("kind of weights", self.weights, ["process", "sizes"])

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None, t: int = 0) -> State:
        """Return the state before round ``t``, from fresh models or from given ``x[R, P]``."""
        return State(*start(self, task, seeds, x), t)

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: who takes part, and which samples they read."""
        return draws(self, state, task, self.weights == "sizes")

    def round(
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run; nothing drawn before means to draw now."""
        drawn = drawn or draw_one(self, state, task)
        d = movement(self, state.x, task, drawn)
        return replace(state, x=state.x + d, cursor=drawn.cursor, t=state.t + 1), {}


def sizes_of(task: Task, seeds: Sequence[int]) -> np.ndarray:
    """Return how many samples each client has in each run, ``[R, N]``."""
    return np.stack([task.data.of(seed).sizes for seed in seeds])


def by_size(q: np.ndarray, clients: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return weights ``[R, S]`` proportional to q and to the clients' ``sizes[R, N]``."""
    q = q * np.take_along_axis(sizes, clients, 1)
    return q / q.sum(1, keepdims=True)


class Averaging(Protocol):
    """What a round of averaging reads of an algorithm: settings of :class:`FedAvg`."""

    @property
    def participation(self) -> Participation:
        """Who takes part."""

    @property
    def lr(self) -> float | tuple[float, ...]:
        """Local step size."""

    @property
    def local_steps(self) -> int:
        """Local steps of each client in a round."""

    @property
    def batch_size(self) -> int | None:
        """Minibatch size."""


def draws(
    algorithm: Averaging, state: State, task: Task, sizes: bool = False
) -> Iterator[Drawn[np.ndarray]]:
    """Draw the rounds after a state; weights proportional to the clients' ``sizes`` if wanted."""
    cursor, held = state.cursor, sizes_of(task, state.seeds) if sizes else None
    for t in itertools.count(state.t):
        clients, q = algorithm.participation.cohort_arrays(state.seeds, t)
        q = q if held is None else by_size(q, clients, held)
        drawn = read(algorithm, state.seeds, task, clients, q, cursor)
        cursor = drawn.cursor
        yield drawn


def read(
    algorithm: Averaging,
    seeds: Sequence[int],
    task: Task,
    clients: np.ndarray,
    q: np.ndarray,
    cursor: np.ndarray,
) -> Drawn[np.ndarray]:
    """Draw the minibatches of clients ``[R, S]`` with weights ``q[R, S]``, on the host."""
    reading, cursor = task.data.read(
        seeds, clients, cursor, algorithm.local_steps, algorithm.batch_size, q > 0
    )
    return Drawn(q, reading, cursor)


def movements(
    algorithm: Averaging,
    x: Tensor,
    task: Task,
    drawn: Drawn[Tensor],
    step: Step | None = None,
    **extras: Tensor,
) -> Tensor:
    """Return how far each client's local steps lead from its run's model, ``[R * S, P]``.

    The copies of all runs and clients are rows of one matrix: each run's model is repeated
    for its clients, and all rows take their local steps.

    Parameters
    ----------
    x
        Global models ``[R, P]``.
    step
        The local rule, see :mod:`fedlib.engine.steps`; None is plain SGD.
    extras
        What the rule needs of each copy, ``[R * S, ...]``.
    """
    cohort = drawn.q.shape[1]
    check_room(len(x) * cohort, x.shape[1], 4, x)
    start = x.repeat_interleave(cohort, 0)  # [R S, P]
    batches, rate = drawn.reading.batches(task.data.dtype), column(algorithm.lr, x, cohort)
    return local_sgd(task, start, batches, rate, step=step, extras=extras) - start


def movement(algorithm: Averaging, x: Tensor, task: Task, drawn: Drawn[Tensor]) -> Tensor:
    """Return ``d = Σ_n q_n (y_n - x)`` for every run, ``[R, P]``."""
    return average(movements(algorithm, x, task, drawn), drawn.q)


def start(
    algorithm: Averaging, task: Task, seeds: Sequence[int], x: Tensor | None
) -> tuple[Tensor, tuple[int, ...], np.ndarray]:
    """Return models ``[R, P]``, seeds, and the cursor of clients that have used nothing yet."""
    if algorithm.participation.N != task.N:
        raise FedlibError(
            f"Participation is for {algorithm.participation.N} clients, the data for {task.N}."
        )
    x, seeds = first_models(task, seeds, x)
    return x, seeds, np.zeros((len(seeds), task.N), dtype=np.int64)


def first_models(
    task: Any, seeds: Sequence[int], x: Tensor | None
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the models ``[R, P]`` from which runs start, ``x`` or fresh ones, and their seeds."""
    seeds = checked_seeds(seeds)
    if x is None:
        return task.init(seeds), seeds
    check_models(x, len(seeds), task.size)
    return x.to(task.init(seeds[:1])), seeds


def check_settings(
    algorithm: Any, rates: Sequence[str] = ("lr",), counts: Sequence[str] = ("local_steps",)
) -> None:
    """Refuse rates that are not positive, counts that are not whole, and such a batch size."""
    process = getattr(algorithm, "participation", None)
    if hasattr(algorithm, "participation") and not callable(getattr(process, "draw", None)):
        raise FedlibError(f"participation is a process, such as Full(N=20); got {process!r}.")
    if isinstance(process, type):
        raise FedlibError(f"participation is a process; got its class {process.__name__} alone.")
    for name in rates:
        check_positive(name, getattr(algorithm, name), name in algorithm.per_run)
    for name in counts:
        check_whole_number(name, getattr(algorithm, name))
    if algorithm.batch_size is not None:
        check_whole_number("batch_size", algorithm.batch_size)
