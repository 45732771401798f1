"""The queue of long records: made a seed at a time, and joined when all seeds are there.

``data/queue.toml`` says what is to be made, the most wanted first. Every finished seed is a record
in ``data/seeds``, until all of its experiment are there; unfinished ones go on from checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired

from fedlib import paths
from fedlib.engine.simulation import OutOfTime
from fedlib.errors import FedlibError
from fedlib.lab import locks
from fedlib.lab.evidence import ages, catalogue, experiments, records
from fedlib.lab.evidence.duration import HOUR
from fedlib.schema import Page, PositiveFloat, PositiveInt, read_toml


class WantedRecord(Page):
    """A record that is wanted."""

    paper: str
    experiment: str
    profile: NotRequired[str]  # paper, if not said
    hours: PositiveFloat  # that all its seeds are expected to take on one core
    together: NotRequired[PositiveInt | list[PositiveInt]]  # seeds that are made at once, which
    # takes less for each; a list says it for one part after another, its last number for the rest


class Queue(Page):
    """``data/queue.toml``."""

    record: list[WantedRecord]


def read_queue(page: Path | None = None) -> list[WantedRecord]:
    """Return every record in the queue, with its profile."""
    entries = read_toml(page or paths.data_folder() / "queue.toml", Queue)["record"]
    return [{"profile": "paper", **entry} for entry in entries]


# --- one record -----------------------------------------------------------------------------------


def parts(
    paper: str, experiment: str, profile: str, together: int | Sequence[int] = 1
) -> dict[str, tuple[int, ...]]:
    """Return the seeds of each part of a record; a grid grows for all of its seeds alike."""
    s = catalogue.settings(paper, experiment, profile)
    seeds = experiments.choose_seeds(s, None)
    if "tunes" in s:
        return {"tuning": seeds}
    sizes, each = [together] if isinstance(together, int) else [*together] or [1], []
    while seeds:
        size = max(1, sizes.pop(0) if len(sizes) > 1 else sizes[0])
        each, seeds = [*each, seeds[:size]], seeds[size:]
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
        record = records.load(paper, experiment, profile, source)
        with contextlib.suppress(records.MissingRecord):
            if records.load(paper, experiment, profile, target).manifest == record.manifest:
                return
        records.save(target, record.frame, record.manifest)


def join_parts(
    paper: str, experiment: str, profile: str, sources: Sequence[Path], out: Path | None = None
) -> Path:
    """Put the records of some folders together, by default where stored records are."""
    if len(sources) > 1:
        return records.join(paper, experiment, profile, sources, out, replace=True).path
    hand_on(paper, experiment, profile, sources[0], out)
    return records.load(paper, experiment, profile, out).path


# --- all of them ----------------------------------------------------------------------------------


def queue_rows(
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
    home, table = home or paths.data_folder() / "seeds", []
    for entry in read_queue(page):
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
            whole = each / have * seeds if done else entry["hours"] * HOUR
            needed = max(0.0, whole - sum(spent)) / HOUR
            state = "under way" if sum(spent) else "waiting"
        table.append({
            "record": f"{paper}/{experiment}.{profile}", "state": state, "seeds": f"{have}/{seeds}",
            "spent [h]": round(sum(spent) / HOUR, 2), "needed [h]": round(needed, 2),
        })  # fmt: skip
    return table


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

    def say(line: str) -> None:
        tell(f"{time.strftime('%H:%M:%S')} {line}")

    if not [*make(read_queue(page), until, home, out, say, progress)]:
        say("Nothing is left to be made.")


def make(
    entries: Iterable[Mapping[str, Any]],
    until: float,
    home: Path,
    out: Path | None,
    tell: Callable[[str], None],
    progress: bool = False,
    device: str = "cpu",
    tf32: bool = False,
    stay: bool = False,
) -> Iterator[dict[str, Any]]:
    """Make records, a seed at a time; what stands in the way of one is told, and the next begins.

    Parameters
    ----------
    entries
        See :class:`WantedRecord`; the first first.
    until
        When to stop, by ``time.monotonic()``.
    home, out, tell, progress
        See :func:`work`.
    device, tf32
        See :func:`fedlib.lab.evidence.experiments.run`.
    stay
        Seeds stay where they are and are looked at even if their record is there, and what is
        tuned is taken from among them.

    Yields
    ------
    dict
        Whenever it changes: record; seeds, how many; done, those that are there; joined; under way.
    """
    for entry in entries:
        asked = paper, experiment, profile = [entry[k] for k in ("paper", "experiment", "profile")]
        name = f"{paper}/{experiment}.{profile}"
        row = {"record": name, "seeds": 0, "done": [], "joined": False, "under way": ""}
        try:
            s, split = catalogue.settings(*asked), parts(*asked, entry.get("together", 1))
            row["seeds"] = sum(map(len, split.values()))
            if not stay and _is_joined(*asked, split, out):
                continue
            ages.committed(*asked)
            for part, seeds in split.items():
                if stay and "tuned" in s:
                    hand_on(paper, s["tuned"], profile, home / "tuning", home / part)
                if not is_there(*asked, home / part):
                    which = f"seed {', '.join(map(str, seeds))}"
                    row["under way"] = "tuning" if "tunes" in s else which
                    yield row
                    if time.monotonic() > until:
                        tell(f"The time is over. Next: {name}, {row['under way']}.")
                        return
                    tell(f"{name}: {row['under way']} begins or goes on")
                    with contextlib.suppress(locks.UnderWay):
                        made = experiments.run(
                            *asked, seeds=[*seeds], device=device, out=home / part, tf32=tf32,
                            progress=progress, until=until, replace=True,
                        )  # fmt: skip
                        tell(f"{name}: made in {made.manifest['wall_seconds']:.0f} s")
                    if not is_there(*asked, home / part):
                        continue
                row["done"] += seeds
                row["under way"] = ""
                yield row
            there = [is_there(*asked, home / part) for part in split]  # who ends last puts together
            if all(there):
                sources = [home / part for part in split]
                with locks.only_one(home / ".joining.lock", "fedlib records"):
                    tell(f"Wrote {join_parts(*asked, sources, out)}")
                    row["joined"] = True
                    for source in [] if stay else sources:
                        for page_ in (source / paper).glob(f"{experiment}.{profile}.*"):
                            page_.unlink()
        except OutOfTime as stopped:
            row["under way"] += f", {stopped}"
            tell(f"{name}: {row['under way']}")
            yield row
            return
        except (FedlibError, RuntimeError) as error:  # the next one may still be possible
            row["under way"] = str(error).partition("\n")[0]
            tell(f"{name}: {error}")
        yield row


def _is_joined(paper: str, experiment: str, profile: str, wanted: dict, out: Path | None) -> bool:
    if not is_there(paper, experiment, profile, out):
        return False
    seeds_there = records.load(paper, experiment, profile, out).manifest["seeds"]
    return set(seeds_there) >= {seed for seeds in wanted.values() for seed in seeds}
