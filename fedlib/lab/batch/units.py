"""What is run together: jobs that differ in seeds and in their runs alone are one experiment."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib import cards
from fedlib.errors import FedlibError
from fedlib.files import digest
from fedlib.lab.batch.grid import BatchJob
from fedlib.lab.evidence import catalogue, records
from fedlib.lab.job import study

LASTING = ("rounds", "steps", "ticks")  # settings to which time is proportional
IMPORTED = 0.5  # GB that a process has before it has read any data


@dataclass(frozen=True, eq=False)
class Unit:
    """Jobs that are rows of one run.

    Attributes
    ----------
    jobs
        One, or several of one experiment; all with the same seeds for each of their variants.
    """

    jobs: tuple[BatchJob, ...]

    @property
    def id(self) -> str:
        """Follows from the jobs."""
        if len(self.jobs) == 1:
            return self.jobs[0].id
        return digest(sorted(job.id for job in self.jobs))[:10]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed of a job, once."""
        return tuple(dict.fromkeys(seed for job in self.jobs for seed in job.seeds))

    @functools.cached_property
    def variants(self) -> dict[str, BatchJob]:
        """One job for each way in which jobs differ beside seeds."""
        every: dict[str, BatchJob] = {}
        for job in self.jobs:
            every.setdefault(job.variant, job)
        return every


def plan(jobs: Sequence[BatchJob], workers: int = 1, part: str = "1/1") -> list[Unit]:
    """Join jobs into units, and cut large units until there is one for every worker.

    Jobs are joined when their study says that it gives the same bits (see
    :func:`fedlib.lab.job.alike`), their settings differ in ``runs`` alone or not at all, and
    each variant has the same seeds.

    Parameters
    ----------
    workers
        For how many.
    part
        Only this :func:`shard`. Whose units are which does not depend on the workers that each has.
    """
    seeds: dict[Any, set[int]] = defaultdict(set)
    for job in jobs:
        seeds[_alike(job), job.variant].update(job.seeds)
    groups: dict[Any, list[BatchJob]] = defaultdict(list)
    for job in jobs:
        alike = _alike(job)
        groups[alike, tuple(sorted(seeds[alike, job.variant]))].append(job)
    units = [Unit(tuple(group)) for group in groups.values()]
    return _cut(shard(_cut(units, _shares(part)[1]), part), workers)


def _cut(units: list[Unit], workers: int) -> list[Unit]:
    while len(units) < workers and any(len(unit.jobs) > 1 for unit in units):
        large = max(range(len(units)), key=lambda i: len(units[i].jobs))
        units[large : large + 1] = cut_in_two(units[large])
    return units


def cut_in_two(unit: Unit) -> list[Unit]:
    """Cut a unit in two: by its variants, or else by its seeds."""
    names = list(unit.variants)
    if len(names) > 1:
        first = set(names[: len(names) // 2])
        parts = [[j for j in unit.jobs if (j.variant in first) == a] for a in (True, False)]
    else:
        middle = len(unit.jobs) // 2
        parts = [list(unit.jobs[:middle]), list(unit.jobs[middle:])]
    return [Unit(tuple(part)) for part in parts]


def _alike(job: BatchJob) -> Any:
    """Return what jobs must share to be joined."""
    if job.notebook:
        return job.id
    s = job.settings
    may = getattr(study(s["kind"]), "alike", lambda s: set())(s)
    runs = "runs" in may and "runs" in s and not {"tunes", "tuned"} & {*s}  # found by their names
    rest = {key: value for key, value in s.items() if key != "runs" or not runs}
    seeds = () if "seeds" in may else job.seeds
    words = json.dumps(rest, sort_keys=True)
    return job.paper, job.experiment, job.profile, job.device, seeds, words


def shard(units: Sequence[Unit], text: str) -> list[Unit]:
    """Return every n-th unit, from the i-th.

    Parameters
    ----------
    text
        ``"i/n"``, with ``i`` from 1 to ``n``.

    Raises
    ------
    FedlibError
        For anything else.
    """
    i, n = _shares(text)
    return list(units[i - 1 :: n])


def _shares(text: str) -> tuple[int, int]:
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and 1 <= int(i) <= int(n)):
        raise FedlibError(f"--shard takes i/n with i from 1 to n: 1/4, 2/4, ... Got '{text}'.")
    return int(i), int(n)


def estimate_unit(unit: Unit) -> tuple[float | None, float]:
    """Return about how many seconds a unit takes, and how many GB it needs at the least.

    Seconds follow from the stored record of the experiment at that profile, in proportion
    to runs, seeds, and rounds, steps or ticks; None where there is none. Memory is that of the
    process and of the data, read and prepared.
    """
    job = unit.jobs[0]
    if job.notebook:
        return None, IMPORTED
    name = job.settings.get("dataset")
    card = cards.card(name) if name else None
    values = (card.train + card.test) * int(np.prod(card.shape)) if card else 0
    memory = IMPORTED + 2 * 4 * values / 1e9
    if not (stored := records.find(job.paper, job.experiment, job.profile)):
        return None, memory
    manifest = stored.manifest
    then = max(1, len(manifest["settings"].get("runs", [0]))) * len(manifest["seeds"])
    now = sum(max(1, len(j.settings.get("runs", [0]))) for j in unit.variants.values())
    for name in LASTING:
        ours, theirs = job.settings.get(name), manifest["settings"].get(name)
        if isinstance(ours, int) and isinstance(theirs, int):
            now, then = now * ours, then * theirs
    return manifest["wall_seconds"] * now * len(unit.seeds) / then, memory


def describe_units(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Return a row a unit: how many jobs, of what, and the estimates."""
    rows = []
    for unit in units:
        seconds, memory = estimate_unit(unit)
        first = unit.jobs[0]
        what = f"{first.paper} {first.experiment}.{first.profile}"
        row = dict(unit=unit.id, what=first.notebook.rpartition("/")[2] or what)
        row |= dict(jobs=len(unit.jobs), variants=len(unit.variants), seeds=len(unit.seeds) or "")
        time = "not known" if seconds is None else f"{max(1, round(seconds))} s"
        rows.append(row | {"about": time, "GB": f"{memory:.1f}"})
    return rows


def together(unit: Unit) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Return the changes with which one run of the experiment is that of all jobs of a unit.

    Returns
    -------
    dict, dict
        The changes; and for each run of theirs the variant that it belongs to, and its name there.
        The names are empty where there is one variant, whose runs keep theirs.
    """
    if len(unit.variants) == 1:
        return unit.jobs[0].changes, {}
    s, first, names, runs = unit.jobs[0].settings, unit.jobs[0], {}, []
    for variant, job in unit.variants.items():
        for run in job.settings["runs"]:
            name = f"{variant} {run['run']}"
            names[name] = variant, run["run"]
            runs.append({**run, "run": name})
    rest = catalogue.settings(first.paper, first.experiment, first.profile)
    changed = {key: value for key, value in s.items()
               if key != "runs" and (key not in rest or rest[key] != value)}  # fmt: skip
    return changed | {"runs": runs}, names
