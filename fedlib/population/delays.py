"""Random delays and a virtual clock: time without waiting for it.

Times are in the papers' units, one local step taking one unit (``t_comp = 1``) unless a law says
otherwise. Nothing here sleeps: a simulation draws how long things last, and an
:class:`EventQueue` says what happens next.

A draw is named by a seed, a name and keys, as everywhere in fedlib. Two simulations that name
the same delay get the same delay, so they can be compared under the same luck.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import numpy as np

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError


class Law(Protocol):
    """How long something lasts. Any object with these two members will do."""

    @property
    def expected(self) -> float:
        """Expected duration, in time units."""

    def draws(self, seed: int, name: str, *keys: int, size: int) -> np.ndarray:
        """Return independent durations ``[size]`` under one name, in time units."""


class _Law:
    """What all laws share."""

    def draw(self, seed: int, name: str, *keys: int) -> float:
        """Return one duration, the first of :meth:`draws` under the same name.

        Parameters
        ----------
        seed
            The run's seed.
        name
            What takes the time: ``"comm"``, ``"comp"``, ...
        *keys
            Whose it is and when, usually a silo and a round.
        """
        return float(self.draws(seed, name, *keys, size=1)[0])

    def draws(self, seed: int, name: str, *keys: int, size: int) -> np.ndarray:
        """Return independent durations ``[size]``; a longer array only adds to its end."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShiftedExponential(_Law):
    """A fixed part and a random part: ``τ = shift + Exp(mean)``.

    Parameters
    ----------
    shift
        The least time it takes, ``c_i`` in the source, at least 0 time units.
    mean
        Mean of the random part alone, ``1/λ_i`` in the source, at least 0 time units.

    Raises
    ------
    FedlibError
        When either is negative or not finite.

    Notes
    -----
    Source: Ali and Arafa, *Delay Sensitive Hierarchical Federated Learning with Stochastic Local
    Updates* (arXiv 2302.04851), delay model. A local iteration of group ``i`` lasts
    ``c_i + Exp(mean 1/λ_i)``; a global exchange follows the same law with its own two numbers.
    """

    shift: float
    mean: float

    def __post_init__(self) -> None:
        _check_duration("shift", self.shift)
        _check_duration("mean", self.mean)

    @property
    def expected(self) -> float:
        """``shift + mean``, in time units."""
        return self.shift + self.mean

    def draws(self, seed: int, name: str, *keys: int, size: int) -> np.ndarray:
        """Return independent durations ``[size]``; a longer array only adds to its end."""
        unit = stream(seed, f"delay {name}", *keys).standard_exponential(size)
        return self.shift + self.mean * unit


@dataclass(frozen=True)
class Deterministic(_Law):
    """Always the same time.

    Parameters
    ----------
    value
        At least 0 time units.

    Raises
    ------
    FedlibError
        When it is negative or not finite.
    """

    value: float

    def __post_init__(self) -> None:
        _check_duration("value", self.value)

    @property
    def expected(self) -> float:
        """``value``, in time units."""
        return self.value

    def draws(self, seed: int, name: str, *keys: int, size: int) -> np.ndarray:
        """Return ``value`` repeated, ``[size]``; the name is not used."""
        return np.full(size, float(self.value))


def check_law(name: str, law: Any) -> None:
    """Refuse what is no law, and a sequence that holds something else."""
    for one in law if isinstance(law, Sequence) else [law]:
        if isinstance(one, type) or not hasattr(one, "draws"):
            raise FedlibError(
                f"{name} is a delay law, or one for each that takes the time; got {one!r}. For a "
                "fixed time: Deterministic(1.0)."
            )


def _check_duration(what: str, value: float) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    if not number or not (math.isfinite(value) and value >= 0):
        raise FedlibError(f"A delay's {what} is a time of at least 0, and finite; got {value!r}.")


def laws_of(law: Law | Sequence[Law], count: int, what: str = "silo") -> list[Law]:
    """Return one law a participant: a single law serves all, a sequence must fit.

    Raises
    ------
    FedlibError
        When a sequence has another length than ``count``.
    """
    laws = list(law) if isinstance(law, Sequence) else [law] * count
    if len(laws) != count:
        raise FedlibError(
            f"{len(laws)} delay laws for {count} {what}s. Give one for each {what}, or a single "
            "law for all."
        )
    return laws


class EventQueue:
    """Things that will happen, earliest first: the virtual clock of a simulation.

    Events of the same time come out in the order in which they went in.

    Parameters
    ----------
    now
        The time at which the clock starts, in time units.

    Attributes
    ----------
    now
        Time of the last event taken out. It never goes back.

    Examples
    --------
    >>> queue = EventQueue()
    >>> queue.push(2.0, "late")
    >>> queue.push(1.0, "early")
    >>> queue.pop()
    (1.0, 'early')
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = float(now)
        self._heap: list[tuple[float, int, Any]] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_time(self) -> float:
        """Time of the next event; infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def push(self, time: float, event: Any) -> None:
        """Let an event happen at an absolute time.

        Raises
        ------
        FedlibError
            When the time lies before ``now`` or is not finite.
        """
        if not (math.isfinite(time) and time >= self.now):
            raise FedlibError(
                f"An event at {time} cannot be added: the clock stands at {self.now}. "
                "Give a finite time, now or later."
            )
        heapq.heappush(self._heap, (float(time), self._pushed, event))
        self._pushed += 1

    def pop(self) -> tuple[float, Any]:
        """Take out the next event, move the clock to it, and return both: ``(time, event)``.

        Raises
        ------
        FedlibError
            When nothing is left.
        """
        if not self._heap:
            raise FedlibError("No event is left. Check len(queue) before pop().")
        self.now, _, event = heapq.heappop(self._heap)
        return self.now, event

    def pop_all(self) -> tuple[float, list[Any]]:
        """Take out every event of the next instant: ``(time, [event, ...])``."""
        time, event = self.pop()
        events = [event]
        while self.next_time == time:
            events.append(self.pop()[1])
        return time, events
