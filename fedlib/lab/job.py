"""What a study is given and what it returns: settings in, tidy rows out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NotRequired, TypeVar, get_args, get_type_hints

import numpy as np
import pandas as pd

from fedlib.errors import FedlibError
from fedlib.schema import Page, PositiveInt

if TYPE_CHECKING:  # who reads what experiments there are needs no engine
    from fedlib.engine.checkpoint import Checkpoint
    from fedlib.engine.simulation import History

GOLDEN_SECTION = (5**0.5 - 1) / 2


class Settings(Page):
    """What every experiment says; a study's own settings come on top.

    A study says which those are by the type of its job: ``def study(job: Job[MySettings])``.
    """

    kind: str  # "package.module:function", the study
    where: str  # in the paper
    title: str
    seeds: PositiveInt
    runs: NotRequired[list[dict[str, Any]]]  # each overrides settings, and has a name:
    run: NotRequired[str]
    tuned: NotRequired[str]  # the experiment that tuned what the runs call "tuned"
    tuned_as: NotRequired[str]  # the run of that experiment, by default that of the same name


SettingsT = TypeVar("SettingsT", bound=Settings)


@dataclass(frozen=True)
class Job(Generic[SettingsT]):
    """One experiment to be carried out.

    Attributes
    ----------
    settings
        Resolved settings, as stored in the manifest.
    seeds
        One run a seed, which also decides how the data are split: seeds run together or one by one
        are the same runs.
    device
        Where tensors live.
    folder
        Where unfinished work is kept, or None.
    progress
        Show progress bars.
    until
        When to stop, by ``time.monotonic()``; what is long passes it on to ``simulate``.
    """

    settings: SettingsT
    seeds: tuple[int, ...]
    device: str = "cpu"
    folder: Path | None = None
    progress: bool = True
    until: float | None = None


@dataclass
class Outcome:
    """Tidy rows, diverged seeds by run with their round, and hashes of the data used."""

    frame: pd.DataFrame
    diverged: dict[str, dict[int, int]]
    hashes: dict[str, str]


def study(kind: str) -> Callable[[Job], Outcome]:
    """Return the function behind a kind, ``"package.module:function"``.

    Raises
    ------
    FedlibError
        When the module cannot be imported or has no such function.
    """
    if not isinstance(kind, str):
        raise FedlibError(f"A kind is 'package.module:function', in words; got {kind!r}.")
    module, _, name = kind.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except SyntaxError as error:
        raise FedlibError(f"Python cannot read the study '{kind}': {error}.") from error
    except (ImportError, AttributeError, ValueError) as error:
        raise FedlibError(
            f"The study '{kind}' cannot be found ({error}). A kind is 'package.module:function', "
            "and the package has to be installed or on PYTHONPATH."
        ) from error


def alike(*what: str, unless: Callable[[Any], bool] = lambda s: False) -> Callable:
    """Say of a study what may be carried out together, for the same bits as one by one.

    Parameters
    ----------
    what
        ``"seeds"``, its seeds, and ``"runs"``, the runs of experiments that are the same otherwise.
    unless
        Says of settings that they are an exception.
    """

    def mark(function: Callable[[Job], Outcome]) -> Callable[[Job], Outcome]:
        function.alike = lambda s: set() if unless(s) else set(what)
        return function

    return mark


def settings_of(kind: str) -> type[Settings] | None:
    """Return the settings that a study reads, None for one that does not say."""
    arguments = get_args(get_type_hints(study(kind)).get("job"))
    return arguments[0] if arguments else None


def off_cycle(rounds: int, points: int, cycle: int = 1) -> list[int]:
    """Return the rounds at which to look at a run: early ones densely, none in step with a cycle.

    Looking every so many whole cycles always meets the same phase, and what happens within a cycle
    stays unseen. Here the phases of the later rounds fill the cycle evenly, by golden sections.

    Parameters
    ----------
    rounds
        The last round, which is always looked at, as is round 0.
    points
        About how many rounds to return.
    cycle
        Length in rounds of the process's period: availability, interval, sync time.
    """
    from fedlib.engine.checks import check_whole_number

    check_whole_number("rounds", rounds, 0)
    check_whole_number("points", points)
    check_whole_number("cycle", cycle)
    early, late = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89], np.arange(1, points)
    phase = np.floor((late * GOLDEN_SECTION) % 1 * cycle).astype(int)
    evenly = late * rounds // points // cycle * cycle + phase
    return sorted({0, rounds, *(int(t) for t in (*early, *evenly) if 0 < t < rounds)})


def split_runs(
    history: History, names: Sequence[str], seeds: int, start: int = 0
) -> tuple[dict[str, pd.DataFrame], dict[str, dict[int, int]]]:
    """Split what were rows of one batch into runs again: each has the rows that it has alone.

    Parameters
    ----------
    names
        Of the runs.
    seeds
        How many each has. When all have diverged, a run alone would have ended there.
    start
        The round from which rounds are counted.

    Returns
    -------
    dict, dict
        Rows of each run; of those that diverged, the round of each seed that did.
    """
    frame = history.frame.assign(round=history.frame["round"] - start)
    frames = {name: frame[frame["run"] == name] for name in names}
    diverged: dict[str, dict[int, int]] = {}
    for (name, seed), t in history.diverged.items():
        diverged.setdefault(name, {})[seed] = t - start
    for name, lost in diverged.items():
        if len(lost) == seeds:
            frames[name] = frames[name].query(f"round <= {max(lost.values())}")
    return frames, diverged


def joined(
    frames: dict[str, pd.DataFrame],
    diverged: dict[str, dict[int, int]],
    runs: Sequence[dict[str, Any]],
    hashes: dict[str, str],
) -> Outcome:
    """Return the outcome of runs, in the order in which the experiment names them."""
    names = [run["run"] for run in runs]
    frame = pd.concat([frames[name] for name in names], ignore_index=True)
    return Outcome(frame, {name: diverged[name] for name in names if name in diverged}, hashes)


def checkpoint(job: Job, name: str, every: int) -> Checkpoint:
    """Return where a run keeps its checkpoint, how often, and when it is to stop."""
    from fedlib.engine.checkpoint import Checkpoint

    safe = "".join(c if c.isalnum() else "_" for c in name)
    return Checkpoint(None if job.folder is None else job.folder / f"{safe}.pt", every, job.until)
