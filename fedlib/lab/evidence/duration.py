"""How long will it take? As long as the stored record of the same experiment, or a pilot says."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedlib import datasets
from fedlib.engine.cores import steady
from fedlib.lab.evidence import pilot, records, tuning
from fedlib.lab.evidence.freshness import plain
from fedlib.lab.job import Job, study

PATIENCE = 20.0  # seconds that pilots may take
HOUR = 3600.0


@dataclass(frozen=True)
class Plan:
    """An experiment that is about to be run.

    Attributes
    ----------
    paper, experiment, profile
        Its names.
    settings
        Resolved settings, as the record will hold them.
    job
        What its study will be given.
    out
        Folder for the record.
    worked
        Seconds that earlier starts have worked at it.
    patience
        Seconds that pilots may take.
    """

    paper: str
    experiment: str
    profile: str
    settings: dict[str, Any]
    job: Job
    out: Any
    worked: float = 0.0
    patience: float = PATIENCE


@dataclass(frozen=True)
class TimeEstimate:
    """How long something will take.

    Attributes
    ----------
    seconds
        All of it; None when nothing can be said.
    why
        Where that comes from.
    least
        Whether it may well take longer, as not even one run could be timed.
    worked
        Seconds of it that are done.
    looks
        The share of evaluations; None where it was not timed.
    """

    seconds: float | None
    why: str
    least: bool = False
    worked: float = 0.0
    looks: float | None = None

    @property
    def left(self) -> float:
        """Seconds still to come, as far as is known."""
        return max(0.0, (self.seconds or 0.0) - self.worked)

    def __str__(self) -> str:
        """Say it in a line."""
        if self.seconds is None:
            return f"No estimate of the time: {self.why}."
        done = f", of which {time_in_words(self.worked)} are done" if self.worked else ""
        more = " or more" * self.least
        return f"About {time_in_words(self.seconds)}{more}{done}: {self.why}."


def time_in_words(seconds: float) -> str:
    """Say a time as people do: ``40 s``, ``12 min``, ``3.5 h``, ``4 days``."""
    for unit, size, until in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        many = max(seconds, 0.1) / size
        if many < until:
            return f"{many:.{int(many < 9.95)}f} {unit}".replace(".0 ", " ")
    return f"{seconds / 86400:.0f} days"


def took(paper: str, experiment: str, profile: str) -> float | None:
    """Return the seconds that the stored record of an experiment took; None where none is."""
    return _took_on(paper, experiment, profile)[0]


def _took_on(paper: str, experiment: str, profile: str) -> tuple[float | None, str]:
    """Return the seconds and the device of a stored record, without looking at its rows."""
    page = records.folder(paper) / f"{experiment}.{profile}.json"
    try:
        made = json.loads(page.read_text("utf-8"))
        return float(made["wall_seconds"]), made["device"]
    except (OSError, ValueError, LookupError, TypeError):
        return None, ""


def took_in_words(paper: str, experiment: str, profile: str) -> str:
    """Say how long the stored record of an experiment took, and on what, or that there is none."""
    seconds, device = _took_on(paper, experiment, profile)
    if seconds is None:
        return "not run"
    return time_in_words(seconds) + f" on a GPU ({device})" * (not device.startswith("CPU"))


def expect(plan: Plan, say: Callable[[str], None] = lambda text: None) -> TimeEstimate:
    """Estimate how long a run will take on this machine.

    As long as the stored record of the same experiment did, seed by seed, if it was made on the
    same kind of device. Otherwise a few rounds and a look of every run are timed.

    Parameters
    ----------
    say
        Is told when something is about to be timed.
    """
    estimate = _stored(plan) or _timed(plan, say)
    return replace(estimate, worked=plan.worked)


def _stored(plan: Plan) -> TimeEstimate | None:
    """Return what a stored record of the same settings says, None without one."""
    for place in (plan.out, None):
        if not (record := records.find(plan.paper, plan.experiment, plan.profile, place)):
            continue
        m = record.manifest
        alike = plain(m["settings"]) == plain(plan.settings)
        if alike and m["device"].startswith("CPU") == (plan.job.device == "cpu"):
            count, took = len(m["seeds"]), time_in_words(m["wall_seconds"])
            seeds = f"{count} seed{'s' * (count > 1)}"
            why = f"the stored record, of {seeds}, took {took} on {m['device']}"
            return TimeEstimate(m["wall_seconds"] / count * len(plan.job.seeds), why)
    return None


def _timed(plan: Plan, say: Callable[[str], None]) -> TimeEstimate:
    """Time a few rounds of one seed, then of more, as seeds side by side take less time each."""
    say(f"Timing a few rounds on this machine, {plan.patience:.0f} s at most.")
    for named in (plan.settings, *plan.settings.get("runs", [])):
        if "dataset" in named:
            datasets.get(named["dataset"])  # may take long, and is not asked for again
    job = plan.job
    alone = replace(job, seeds=job.seeds[:1]) if job.device == "cpu" else job  # a GPU takes all
    one, names = _piloted(alone, 0.7 * plan.patience, 0.4 * plan.patience)
    if one.ended and not one.times and one.lasted < plan.patience / 8:
        one, _ = _piloted(alone, plan.patience / 2)  # what was loaded is there by now
    if one.broken:
        return TimeEstimate(None, f"timing it broke off ({type(one.broken).__name__})")
    if not (one.ended or one.skipped):
        return TimeEstimate(None, f"nothing of it could be timed in {time_in_words(one.lasted)}")
    seconds, seen = _whole(one, names)
    if len(alone.seeds) < len(job.seeds):
        seconds = _more_seeds(job, one, seconds, plan.patience - one.lasted)
    why = "so say a few rounds timed on this machine"
    why += f", of {seen} of {len(names)} runs" * (not one.ended and seen > 0)
    looks = one.looks / sum(one.times.values()) if one.times else None
    least = not one.ended and not one.times.keys() & {*names}
    return TimeEstimate(seconds * _grown(plan), why, least, looks=looks)


def _whole(one: pilot.Pilot, names: Sequence[str]) -> tuple[float, int]:
    """Return the seconds of all runs, if a pilot saw only some of them, and how many it saw."""
    known, seconds = one.cut, one.seconds
    if one.times.keys() & {*names}:
        known, seconds = one.times, one.seconds - sum(one.cut.values())
    seen = [known[name] for name in names if name in known]
    if one.ended or not seen:
        return one.seconds, len(seen)
    return seconds + (len(names) - len(seen)) * sum(seen) / len(seen), len(seen)


def _more_seeds(job: Job, one: pilot.Pilot, seconds: float, rest: float) -> float:
    """Return how long all seeds take, when it is known for one and so many seconds are left."""
    many = len(job.seeds)
    if not one.times and not one.cut:  # two are enough to see how much another one adds
        two, _ = _piloted(replace(job, seeds=job.seeds[:2]), rest)
        return seconds + (many - 1) * max(0.0, two.seconds - seconds if two.ended else seconds)
    every, _ = _piloted(job, min(rest, seconds * many / 10))
    if every.ended:
        return every.seconds
    both = one.times.keys() & every.times.keys()
    if not both or every.broken:
        return seconds * many
    return seconds * sum(every.times[n] for n in both) / sum(one.times[n] for n in both)


def _piloted(job: Job, limit: float, soon: float | None = None) -> tuple[pilot.Pilot, list[str]]:
    """Carry a job out in small; also return the names of what it runs."""
    job, s = replace(job, folder=None, progress=False, until=None), job.settings
    carried_out, names = study(s["kind"]), [run["run"] for run in s.get("runs", [])]
    work = functools.partial(carried_out, job)
    if carried_out is tuning.grid:  # a pilot has nothing to choose a best value by
        work = functools.partial(tuning._at, job, sorted(s["grid"]))
        names = [tuning._name(run, value) for run in names for value in s["grid"]]
    homes = {"fedlib", s["kind"].split(".")[0], s.get("study", "").split(".")[0]}
    with steady():
        return pilot.carry_out(work, limit, names, soon, homes), names


def _grown(plan: Plan) -> float:
    """Return by how much the grid of a tuning experiment grew when it was last carried out."""
    record = records.find(plan.paper, plan.experiment)
    if record is None or study(plan.settings["kind"]) is not tuning.grid:
        return 1.0
    return record.frame["at"].nunique() / len(record.manifest["settings"]["grid"])
