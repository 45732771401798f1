"""Loops that a pilot may shorten, to know how long they take: :mod:`fedlib.lab.evidence.pilot`.

Without a pilot nothing here does anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Shortens(Protocol):
    """Does some of a loop's work, and returns what the loop returned last."""

    def rounds(self, simulate: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Do a few rounds and a look of a round loop."""

    def passes(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Do a few of the ``epochs`` of an event loop."""


under_way: ContextVar[Shortens | None] = ContextVar("pilot", default=None)


def few_rounds(simulate: F) -> F:
    """Let a pilot that is under way do a few rounds alone."""
    return _shortened(simulate, "rounds")


def few_passes(run: F) -> F:
    """Let a pilot that is under way do a few passes alone."""
    return _shortened(run, "passes")


def _shortened(loop: F, kind: str) -> F:
    @functools.wraps(loop)
    def call(*args: Any, **options: Any) -> Any:
        pilot = under_way.get()
        if pilot is None:
            return loop(*args, **options)
        return getattr(pilot, kind)(loop, *args, **options)

    return call  # type: ignore[return-value]  # it takes what the loop takes
