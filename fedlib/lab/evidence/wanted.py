"""What it would take to try a claim as its paper did: which records, how many hours, which data.

The hours are those of one core, from a few rounds timed at the paper's own settings. They lie in
``data/hours.json``, which ``make hours`` writes. Where a stored record was made on a GPU with the
paper's network, its speed says how long the same would take there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fedlib import files, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import (
    ages,
    catalogue,
    claims,
    duration,
    experiments,
    queue,
    records,
    scale,
    tuning,
)  # fmt: skip
from fedlib.lab.evidence.freshness import plain, short_digest
from fedlib.lab.job import Job

PAPER = "paper"
PATIENCE = 240.0  # seconds to time what says nothing in less


def what_it_takes(row: Mapping[str, Any]) -> str:
    """Return a sentence on what is missing for a claim; empty where nothing is, or can be.

    Parameters
    ----------
    row
        A claim as :func:`fedlib.lab.evidence.claims.judge` returns it.
    """
    paper, names = row["paper"], [*wanted(row)]
    if not names:
        return ""
    time = hours_in_words(paper, names)
    time = f"{time} of one core" if time else "how long it takes could not be timed"
    time += on_a_gpu(paper, names)
    sets = sorted({s for name in names if (s := _set(paper, name))})
    data = ", ".join(s if s in _claim(row).get("data", ()) else f"{s} (a substitute)" for s in sets)
    nearer = "To come nearer to it" if "differs" in _claim(row) else "To try it as the paper did"
    line = f"{nearer}: {', '.join(names)} at the profile {PAPER}; {time}"
    line += f"; data: {data}" * bool(data)
    more = ", and so on." if len(names) > 1 else "."
    queued = {(entry["paper"], entry["experiment"], entry["profile"])
              for entry in queue.read_queue()}  # fmt: skip
    if all((paper, name, PAPER) in queued for name in names):
        return f"{line}. `fedlib records --work` goes on with it."
    return f"{line}. `{catalogue.command(paper, names[0], profile=PAPER)}`" + more


def hours_in_words(paper: str, names: Collection[str]) -> str:
    """Say how long experiments take at the paper's setting on one core; "" where nobody knows."""
    known = [_hours().get(f"{paper}/{name}") or {"seconds": None, "least": True} for name in names]
    if not (seconds := sum(entry["seconds"] or 0.0 for entry in known)):
        return ""
    least = any(entry["least"] or not entry["seconds"] for entry in known)
    return f"about {duration.time_in_words(seconds)}" + " or more" * least


def on_a_gpu(paper: str, names: Collection[str]) -> str:
    """Say how long experiments take at the speed of a record from a GPU; "" without one.

    At least so long: no run of that record takes full batches.
    """
    every = [catalogue.settings(paper, name, PAPER) for name in names]
    for m in records.manifests():
        made = m["paper"], m["settings"].get("model")
        same = all((paper, s.get("model")) == made for s in every)
        if same and not m["device"].startswith("CPU"):
            speed = _seed_rounds(m["settings"], len(m["seeds"])) / m["wall_seconds"]
            seconds = sum(_seed_rounds(s, s["seeds"]) for s in every) / speed
            return f", or at least {duration.time_in_words(seconds)} of an {m['device']}"
    return ""


def _seed_rounds(s: Mapping[str, Any], seeds: int) -> float:
    """Return the rounds of all runs and seeds of a participation experiment."""
    rates = len(s["grid"]) if "grid" in s else 1
    return seeds * rates * len(s["runs"]) * s["rounds"] / s.get("compression", 1)


def wanted(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the experiments that a claim's finding wants at the paper's setting, tuning first."""
    paper, claim = row["paper"], _claim(row)
    done = not row["scale"] and row["data"] in scale.THEIRS
    ours = claim.get("ours") or paths.about(paths.paper_folder(paper)).get("ours")
    if done or ours or not row["data"] or row["kind"] == "arithmetic":
        return
    seen: set[str] = set()
    for name in sorted(ages.experiments_of(claim)):
        if PAPER not in catalogue.profiles(paper, name):
            continue
        before = catalogue.settings(paper, name, PAPER).get("tuned")
        for one in filter(None, (before, name)):
            if one not in seen and not _there(paper, one):
                yield one
            seen.add(one)


def _claim(row: Mapping[str, Any]) -> claims.Claim:
    return next(claim for claim in claims.claims_of(row["paper"]) if claim["id"] == row["id"])


def _there(paper: str, name: str) -> bool:
    record = records.find(paper, name, PAPER)
    return record is not None and not scale.differences_in_scale(record)


def _set(paper: str, name: str) -> str:
    return catalogue.settings(paper, name, PAPER).get("dataset", "")


@functools.cache
def _hours() -> dict[str, Any]:
    page = paths.data_folder() / "hours.json"
    return json.loads(page.read_text("utf-8")) if page.is_file() else {}


# ------------------------------------------------------------------ timing them


def time_all() -> None:
    """Time a few rounds of all that claims want, and write ``data/hours.json``.

    What was timed at the settings that are there now stays; so an interrupted call goes on.
    """
    kept, hours = _hours(), {}
    names = {(row["paper"], name) for paper in paths.papers("claims.toml")
             for row in claims.judge(paper) for name in wanted(row)}  # fmt: skip
    for paper, name in sorted(names):
        entry, mark = kept.get(f"{paper}/{name}", {}), settings_mark(paper, name)
        if entry.get("settings") != mark:
            estimate = timed(paper, name)
            entry = {
                "seconds": estimate.seconds and round(estimate.seconds), "least": estimate.least,
                "looks": estimate.looks and round(estimate.looks, 3), "why": estimate.why,
                "settings": mark,
            }  # fmt: skip
            print(f"{paper}/{name}: {estimate}", flush=True)
        hours[f"{paper}/{name}"] = entry
        _write(kept | hours)
    _write(hours)


def settings_mark(paper: str, name: str) -> str:
    """Return a digest of an experiment's settings at the paper's scale."""
    return short_digest(plain(catalogue.settings(paper, name, PAPER)))


def _write(hours: Mapping[str, Any]) -> None:
    page = json.dumps(hours, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    files.publish(paths.data_folder() / "hours.json", page.encode())


def timed(paper: str, name: str) -> duration.TimeEstimate:
    """Return how long an experiment takes at the paper's setting, all seeds, on one core.

    Where its data are not here, as long as the largest record took, by the number of rows.
    """
    s = catalogue.settings(paper, name, PAPER)
    seeds, used = experiments.choose_seeds(s, None), s
    try:
        if "tuned" in s:  # of another profile, as only time is asked for
            used = tuning.apply(s, tuning.tuned_values(records.load(paper, s["tuned"]).frame, s))
        plan = duration.Plan(paper, name, PAPER, s, Job(used, seeds, "cpu", progress=False), None)
        estimate = duration.expect(plan)
        if estimate.least or estimate.seconds is None:  # a round takes long
            estimate = duration.expect(dataclasses.replace(plan, patience=PATIENCE))
    except FedlibError as error:
        estimate = duration.TimeEstimate(None, str(error).partition(".")[0])
    return estimate if estimate.seconds else _by_rows(paper, name, s) or estimate


def _by_rows(paper: str, name: str, s: Mapping[str, Any]) -> duration.TimeEstimate | None:
    record = records.find(paper, name)
    if record is None or "rows" not in s:
        return None
    m = record.manifest
    share = s["rows"] / m["settings"]["rows"] * s["seeds"] / len(m["seeds"])
    told = f"by its rows, from a record of {m['settings']['rows']}"
    return duration.TimeEstimate(m["wall_seconds"] * share, told, least=True)


if __name__ == "__main__":
    time_all()
