"""What :func:`~fedlib.engine.simulation.simulate` asks of an algorithm, its state and its task.

Nothing here is inherited: a class that has these names fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor


class State(Protocol):
    """What stands between two rounds, and in a checkpoint: a dataclass of tensors and arrays.

    A state may have a ``clock[R]``, each run's time; without one the round is the clock.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

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
K = TypeVar("K", bound=TaskLike, contravariant=True)


class Algorithm(Protocol[S, K]):
    """Two pure functions; a frozen dataclass whose fields are the paper's symbols.

    One that can draw ahead is :class:`Drawing`, too, and one for sweeps :class:`Varied`.
    """

    def init(self, task: K, seeds: Sequence[int]) -> S:
        """Return the state before the first round, one run a seed."""

    def round(self, state: S, task: K) -> tuple[S, dict[str, Any]]:
        """Return the state after one round of every run, and what there is to tell about it."""


@runtime_checkable
class Drawing(Protocol[S, K]):
    """An algorithm that says beforehand what chance decides, see :mod:`fedlib.engine.draws`.

    A subclass that draws while it computes says ``draws = None``.
    """

    def draws(self, state: S, task: K) -> Iterator[Any]:
        """Yield the draws of one round after the other, for ever, from ``state.t`` on."""

    def round(self, state: S, task: K, drawn: Any) -> tuple[S, dict[str, Any]]:
        """As of :class:`Algorithm`, with the draws of the round on the state's device."""


class Varied(Algorithm[S, K], Protocol[S, K]):
    """A dataclass some of whose fields may hold one value a run, see :mod:`fedlib.engine.sweeps`.

    Attributes
    ----------
    per_run
        The names of these fields.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    per_run: ClassVar[tuple[str, ...]]
