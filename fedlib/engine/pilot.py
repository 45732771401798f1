"""A pilot: a study carried out in small, to know how long the whole of it will take.

While a pilot is under way, loops that last do a few of their rounds, and put a clock forward by
what the others would have taken. The rest of the study is carried out as it is. So the clock shows
at the end how long all of it takes, and the rows are thrown away.

Without a pilot nothing here does anything.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import torch

from fedlib.engine.evaluation import Evaluation

F = TypeVar("F", bound=Callable[..., Any])
ENOUGH = 0.3  # seconds from which on a stretch of rounds is long enough to be judged by


class TooLong(BaseException):
    """The pilot's time is over. No error: nothing but the pilot may catch it."""


class Pilot:
    """A clock that can be put forward.

    Parameters
    ----------
    limit
        Seconds that the pilot itself may take.
    names
        The runs that there are to time, as far as they have names.
    soon
        Seconds that are enough when one of those has been timed; by default the same.

    Attributes
    ----------
    seconds
        What the clock showed at the end.
    lasted
        Seconds that the pilot itself took.
    times
        Seconds that each run of a round loop takes, by name; those of one batch share them.
    cut
        The same of the loop in which the pilot's time was over: it takes at least so long.
    ended
        Whether the pilot came to its end: False when its time was over first, or it broke off.
    broken
        The error that it broke off with, None without.
    """

    def __init__(
        self, limit: float, names: Collection[str] = (), soon: float | None = None
    ) -> None:
        self.limit, self.names, self.soon = limit, names, limit if soon is None else soon
        self.enough = min(ENOUGH, limit / (10 * max(1, len(names))))
        self.began, self.skipped = now(), 0.0
        self.seconds = self.lasted = 0.0
        self.times: dict[str, float] = {}
        self.cut: dict[str, float] = {}
        self.ended = False
        self.broken: Exception | None = None

    def clock(self) -> float:
        """Return the seconds that the work so far takes as a whole."""
        return now() - self.began + self.skipped

    def late(self) -> bool:
        """Say whether the pilot's time is over."""
        lasted = now() - self.began
        seen = any(name in self.times for name in self.names)
        return lasted > (self.soon if seen else self.limit)

    def stretch(self, whole: float, work: Callable[[Any], None]) -> None:
        """Do some of the work, and put the clock forward by the rest.

        Parameters
        ----------
        whole
            How often the work is to be done.
        work
            Is told how often to do it now: once, twice, four times as often, until that lasts. The
            first time of all is for warming up.
        """
        done: float = 0
        size: float = 1
        each = 0.0
        cold = not self.times
        try:
            while done < whole:
                if self.late():
                    raise TooLong
                size, start = min(size, whole - done), self.clock()
                done += size
                try:
                    work(size)
                except TooLong:  # it takes at least that long
                    each = max(each, (self.clock() - start) / size)
                    raise
                each = (self.clock() - start) / size
                if each * size >= self.enough and not cold:
                    break
                size, cold = 2 * size, False
        finally:
            self.skipped += each * (whole - done)


_under_way: ContextVar[Pilot | None] = ContextVar("pilot", default=None)


def now() -> float:
    """Return the time in seconds, when a GPU has done what it was told to do."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def carry_out(
    work: Callable[[], Any],
    limit: float,
    names: Collection[str] = (),
    soon: float | None = None,
    homes: Container[str] = ("fedlib",),
) -> Pilot:
    """Carry some work out in small, and return the pilot, whose clock shows how long it takes.

    Parameters
    ----------
    work
        What may call :func:`few_rounds` and :func:`few_passes`. Errors end the pilot quietly: the
        real run will have them, too.
    limit, names, soon
        See :class:`Pilot`. Outside the main thread, and on Windows, which has no alarm clock, what
        has no such loop is carried out to its end.
    homes
        Packages that may be interrupted at any place.
    """
    pilot = Pilot(limit, names, soon)
    token = _under_way.set(pilot)
    try:
        with warnings.catch_warnings(), _alarm(pilot, homes):
            warnings.simplefilter("ignore")  # and none is used up before the real run
            work()
        pilot.ended = True
    except TooLong:
        pass
    except Exception as error:
        pilot.broken = error
    finally:
        _under_way.reset(token)
        pilot.seconds = pilot.clock()
        pilot.lasted = pilot.seconds - pilot.skipped
    return pilot


@contextmanager
def _alarm(pilot: Pilot, homes: Container[str]) -> Iterator[None]:
    """Raise :class:`TooLong` when a pilot's time is over and code of some packages is at work.

    Others may not expect to be interrupted: a compiler is then left with half a function.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        inside = frame.f_globals.get("__name__", "") if frame is not None else ""
        if inside.split(".")[0] in homes and pilot.late():
            raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    others = signal.setitimer(signal.ITIMER_REAL, pilot.soon, 0.02)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)


def few_rounds(simulate: F) -> F:
    """Let a round loop do a few rounds and a look while a pilot is under way.

    Parameters
    ----------
    simulate
        :func:`fedlib.engine.simulation.simulate`.
    """

    @functools.wraps(simulate)
    def call(algorithm: Any, task: Any, rounds: int, seeds: Any = (0,), **options: Any) -> Any:
        pilot = _under_way.get()
        if pilot is None:
            return simulate(algorithm, task, rounds, seeds, **options)
        options |= {"checkpoint": None, "progress": False}
        evaluation = options.get("evaluation") or Evaluation()
        asked = [t for t in range(1, rounds) if evaluation.due(t)]
        start, told = pilot.clock(), options.get("name", "")
        names = {told} if isinstance(told, str) else {*told}
        held: Any = None

        def go_on(some: int) -> None:
            nonlocal held
            blind = options | {"evaluation": Evaluation(splits=())}
            held = simulate(algorithm, task, some, seeds, **blind)
            options["state"] = held.state

        # an evaluation that leaves runs out says when each is due: all of them are at the start
        due, first = getattr(evaluation.measure, "due", None), options.get("state")
        share = sum(map(len, due)) / len(due) / len(set().union(*due)) if due else 1.0

        def look(times: int) -> None:
            nonlocal held
            if due:
                options["state"] = first
            for _ in range(times):
                held = simulate(algorithm, task, 0, seeds, **options)

        try:
            pilot.stretch(rounds, go_on)  # first, as a look may take longer than all there is
            pilot.stretch(1 + round(share * len(asked)) + (rounds > 0), look)
        except TooLong:
            pilot.cut = dict.fromkeys(names, (pilot.clock() - start) / len(names))
            raise
        pilot.times |= dict.fromkeys(names, (pilot.clock() - start) / len(names))
        return held

    return call  # type: ignore[return-value]  # it takes what simulate takes


def few_passes(run: F) -> F:
    """Let an event loop do a few of its ``epochs`` while a pilot is under way.

    One that keeps its ``snapshots``, of which somebody expects a number, is carried out as it is.
    """

    @functools.wraps(run)
    def call(*args: Any, **options: Any) -> Any:
        pilot = _under_way.get()
        if pilot is None or not options.get("epochs") or options.get("keep"):
            return run(*args, **options)
        epochs, found = options.pop("epochs"), None

        def some(passes: float) -> None:
            nonlocal found
            found = run(*args, epochs=passes, **options)

        start = pilot.clock()
        some(min(epochs, 0.01))  # compiles the loop, once and for all
        pilot.skipped -= pilot.clock() - start
        pilot.stretch(epochs, some)
        return found

    return call  # type: ignore[return-value]  # it takes what run takes
