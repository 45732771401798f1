"""What :func:`~fedlib.engine.simulation.simulate` asks of an algorithm, its state and its task.

Nothing here is inherited: a class that has these names fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor


class State(Protocol):
    """What stands between two rounds, and in a checkpoint: a dataclass of tensors and arrays.

    A state may have a ``clock[R]``, each run's time; without one the round is the clock.
    """

    @property
    def x(self) -> Tensor:
        """Models ``[R, P]``, one a run."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """One seed a run."""

    @property
    def t(self) -> int:
        """The next round."""


class TaskLike(Protocol):
    """What is learned."""

    def init(self, seeds: Sequence[int]) -> Tensor:
        """Return one freshly initialised model a seed, ``[R, P]``."""

    def evaluate(
        self, theta: Tensor, split: str = "train", limit: int | None = None
    ) -> dict[str, Tensor]:
        """Return metrics of models ``[R, P]`` by name, each ``[R]``."""


S = TypeVar("S", bound=State)
K = TypeVar("K", bound=TaskLike)


class Algorithm(Protocol[S, K]):
    """Two pure functions; a frozen dataclass whose fields are the paper's symbols.

    A class attribute ``per_run`` may name the fields that may hold one value a run, for
    :func:`~fedlib.engine.sweeps.sweep`. A generator ``draws(state, task)`` may say beforehand what
    chance decides in each of the next rounds; ``round`` then takes a third argument, ``drawn``, see
    :mod:`fedlib.engine.draws`.
    """

    def init(self, task: K, seeds: Sequence[int]) -> S:
        """Return the state before the first round, one run a seed."""

    def round(self, state: S, task: K) -> tuple[S, dict[str, Any]]:
        """Return the state after one round of every run, and what there is to tell about it."""
