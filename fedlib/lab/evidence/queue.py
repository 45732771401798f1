"""The queue of long records: made a seed at a time, and joined when all seeds are there.

``data/queue.toml`` says what is to be made, the most wanted first. Every finished seed is a record
in ``data/seeds``, until all of its experiment are there; unfinished ones go on from checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NotRequired

from fedlib import files, paths
from fedlib.engine.simulation import OutOfTime
from fedlib.errors import FedlibError
from fedlib.lab.evidence import ages, catalogue, experiments, records
from fedlib.schema import Page, PositiveFloat, PositiveInt, read_toml

HOUR = 3600.0


class Entry(Page):
    """A record that is wanted."""

    paper: str
    experiment: str
    profile: NotRequired[str]  # paper, if not said
    hours: PositiveFloat  # that all its seeds are expected to take on one core
    together: NotRequired[PositiveInt]  # seeds that are made at once, which takes less for each


class Queue(Page):
    """``data/queue.toml``."""

    record: list[Entry]


def read(page: Path | None = None) -> list[Entry]:
    """Return every record in the queue, with its profile."""
    held = read_toml(page or paths.data_folder() / "queue.toml", Queue)["record"]
    return [{"profile": "paper", **entry} for entry in held]


# --- one record -----------------------------------------------------------------------------------


def parts(
    paper: str, experiment: str, profile: str, together: int = 1
) -> dict[str, tuple[int, ...]]:
    """Return the seeds of each part of a record; a grid grows for all of its seeds alike."""
    s = catalogue.settings(paper, experiment, profile)
    seeds = experiments.choose_seeds(s, None)
    if "tunes" in s:
        return {"tuning": seeds}
    each = [seeds[first : first + together] for first in range(0, len(seeds), together)]
    return {"-".join(map(str, some)): tuple(some) for some in each}


def is_there(paper: str, experiment: str, profile: str, source: str | Path | None = None) -> bool:
    """Say whether a folder has the record of all the wanted seeds, as the present code makes it."""
    try:
        return records.load(paper, experiment, profile, source).state.word in ("fresh", "checked")
    except records.MissingRecord:
        return False


def hand_on(paper: str, experiment: str, profile: str, source: Path, target: Path | None) -> None:
    """Copy a record to another folder, if it is there and the other is not the same."""
    with contextlib.suppress(records.MissingRecord):
        held = records.load(paper, experiment, profile, source)
        with contextlib.suppress(records.MissingRecord):
            if records.load(paper, experiment, profile, target).manifest == held.manifest:
                return
        records.save(target, held.frame, held.manifest)


def join(
    paper: str, experiment: str, profile: str, sources: Sequence[Path], out: Path | None = None
) -> Path:
    """Put the records of some folders together, by default where stored records are."""
    if len(sources) > 1:
        return records.join(paper, experiment, profile, sources, out).path
    hand_on(paper, experiment, profile, sources[0], out)
    return records.load(paper, experiment, profile, out).path


# --- all of them ----------------------------------------------------------------------------------


def rows(
    page: Path | None = None, home: Path | None = None, out: Path | None = None
) -> list[dict[str, Any]]:
    """Return a line for each record of the queue.

    Parameters
    ----------
    page, home, out
        As for :func:`work`.

    Returns
    -------
    list of dict
        record; state; seeds, those that are done and all; hours spent, and hours needed still.
    """
    home, found = home or paths.data_folder() / "seeds", []
    for entry in read(page):
        paper, experiment, profile = (entry[key] for key in ("paper", "experiment", "profile"))
        wanted = parts(paper, experiment, profile, entry.get("together", 1))
        seeds = sum(map(len, wanted.values()))
        done = [p for p in wanted if is_there(paper, experiment, profile, home / p)]
        spent = [_seconds(home / p / paper, experiment, profile) for p in wanted]
        if _is_joined(paper, experiment, profile, wanted, out):
            spent = [records.load(paper, experiment, profile, out).manifest["wall_seconds"]]
            state, have, needed = "done", seeds, 0.0
        else:
            have = sum(len(wanted[part]) for part in done)
            each = sum(s for p, s in zip(wanted, spent, strict=True) if p in done)
            whole = each / len(done) * len(wanted) if done else entry["hours"] * HOUR
            needed = max(0.0, whole - sum(spent)) / HOUR
            state = "under way" if sum(spent) else "waiting"
        found.append({
            "record": f"{paper}/{experiment}.{profile}", "state": state, "seeds": f"{have}/{seeds}",
            "spent [h]": round(sum(spent) / HOUR, 2), "needed [h]": round(needed, 2),
        })  # fmt: skip
    return found


def _seconds(folder: Path, experiment: str, profile: str) -> float:
    """Return how long a part was worked at, finished or not."""
    name, spent = f"{experiment}.{profile}", 0.0
    for page in [folder / f"{name}.json", *folder.glob(f".{name}.*/seconds")]:
        with contextlib.suppress(OSError, ValueError, LookupError):
            text = page.read_text("utf-8")
            spent += json.loads(text)["wall_seconds"] if page.suffix else float(text.split()[0])
    return spent


def work(
    hours: float,
    tell: Callable[[str], None] = print,
    progress: bool = False,
    page: Path | None = None,
    home: Path | None = None,
    out: Path | None = None,
) -> None:
    """Make the next records, a seed at a time, until the time is over or nothing is left.

    What another process is at is left to it. What cannot be made is told and left out.

    Parameters
    ----------
    hours
        To spend. What is under way when they are over leaves a checkpoint.
    tell
        Is called with a line for everything that begins or ends.
    progress
        Show progress bars.
    page, home, out
        The queue, the folder for seeds and that for joined records; by default fedlib's own.
    """
    until, home = time.monotonic() + hours * HOUR, home or paths.data_folder() / "seeds"
    for entry in read(page):
        paper, experiment, profile = (entry[key] for key in ("paper", "experiment", "profile"))
        name = f"{paper}/{experiment}.{profile}"
        try:
            wanted = parts(paper, experiment, profile, entry.get("together", 1))
            if _is_joined(paper, experiment, profile, wanted, out):
                continue
            ages.committed(paper, experiment, profile)
            for part, seeds in wanted.items():
                if is_there(paper, experiment, profile, home / part):
                    continue
                if time.monotonic() > until:
                    return
                tell(f"{_clock()} {name}: seed {', '.join(map(str, seeds))} begins or goes on")
                with contextlib.suppress(files.UnderWay):
                    made = experiments.run(
                        paper, experiment, profile, [*seeds], "cpu", home / part, progress,
                        until=until, replace=True,
                    )  # fmt: skip
                    tell(f"{_clock()} {name}: made in {made.manifest['wall_seconds']:.0f} s")
            sources = [home / part for part in wanted]
            if all(is_there(paper, experiment, profile, source) for source in sources):
                with files.only_one(home / ".joining.lock", "fedlib records"):
                    tell(f"Wrote {join(paper, experiment, profile, sources, out)}")
                    for source in sources:
                        for page_ in (source / paper).glob(f"{experiment}.{profile}.*"):
                            page_.unlink()
        except OutOfTime as stopped:
            tell(f"{_clock()} {name}: {stopped}")
            return
        except (FedlibError, RuntimeError) as error:  # the next one may still be possible
            tell(f"{_clock()} {name}: {error}")


def _is_joined(paper: str, experiment: str, profile: str, wanted: dict, out: Path | None) -> bool:
    if not is_there(paper, experiment, profile, out):
        return False
    held = records.load(paper, experiment, profile, out).manifest["seeds"]
    return set(held) >= {seed for seeds in wanted.values() for seed in seeds}


def _clock() -> str:
    return time.strftime("%H:%M:%S")
