"""A pilot: a study carried out in small, to know how long the whole of it will take.

While a pilot is under way, loops that last do a few of their rounds, and put a clock forward by
what the others would have taken. The rest of the study is carried out as it is. So the clock shows
at the end how long all of it takes, and the rows are thrown away.

The loops ask for it through :mod:`fedlib.engine.pilot`.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from fedlib.engine.evaluation import Evaluation
from fedlib.engine.pilot import under_way

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
    looks
        How many of ``seconds`` are evaluations, of the round loops that came to their end.
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
        self.seconds = self.lasted = self.looks = 0.0
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

    def rounds(
        self,
        simulate: Callable[..., Any],
        algorithm: Any,
        task: Any,
        rounds: int,
        seeds: Any = (0,),
        **options: Any,
    ) -> Any:
        """Do a few rounds and a look of :func:`fedlib.engine.simulation.simulate`."""
        options |= {"checkpoint": None, "progress": False}
        evaluation = options.get("evaluation") or Evaluation()
        looked_at = [t for t in range(1, rounds) if evaluation.due(t)]
        start, name = self.clock(), options.get("name", "")
        names = {name} if isinstance(name, str) else {*name}
        result: Any = None

        def go_on(some: int) -> None:
            nonlocal result
            blind = options | {"evaluation": Evaluation(splits=())}
            result = simulate(algorithm, task, some, seeds, **blind)
            options["state"] = result.state

        # an evaluation that leaves runs out says when each is due: all of them are at the start
        due, first = getattr(evaluation.measure, "due", None), options.get("state")
        share = sum(map(len, due)) / len(due) / len(set().union(*due)) if due else 1.0

        def look(times: int) -> None:
            nonlocal result
            if due:
                options["state"] = first
            for _ in range(times):
                result = simulate(algorithm, task, 0, seeds, **options)

        try:
            self.stretch(rounds, go_on)  # first, as a look may take longer than all there is
            before = self.clock()
            self.stretch(1 + round(share * len(looked_at)) + (rounds > 0), look)
            self.looks += self.clock() - before
        except TooLong:
            self.cut = dict.fromkeys(names, (self.clock() - start) / len(names))
            raise
        for name in names:  # which may have had a loop before, a warm-up
            self.times[name] = self.times.get(name, 0.0) + (self.clock() - start) / len(names)
        return result

    def passes(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Do a few of the ``epochs`` of an event loop.

        One that keeps its ``snapshots``, of which somebody expects a number, is carried out as it
        is.
        """
        if not options.get("epochs") or options.get("keep"):
            return run(*args, **options)
        epochs, result = options.pop("epochs"), None

        def some(passes: float) -> None:
            nonlocal result
            result = run(*args, epochs=passes, **options)

        start = self.clock()
        some(min(epochs, 0.01))  # compiles the loop, once and for all
        self.skipped -= self.clock() - start
        self.stretch(epochs, some)
        return result


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
        What may run round loops and event loops. Errors end the pilot quietly: the
        real run will have them, too.
    limit, names, soon
        See :class:`Pilot`. Outside the main thread, and on Windows, which has no alarm clock, what
        has no such loop is carried out to its end.
    homes
        Packages that may be interrupted at any place.
    """
    pilot = Pilot(limit, names, soon)
    token = under_way.set(pilot)
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
        under_way.reset(token)
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
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # also when it rings on that very line
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *others)
