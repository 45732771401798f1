"""One command for whoever sits at a GPU: is it right, how fast is it, and the next records.

Everything is kept in one folder as it is found. Started again on that folder, on this machine or
another, the command goes on: what the same code has found on the same device is not done twice.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlib import bench, datasets
from fedlib.engine import convolution
from fedlib.engine.draws import upload
from fedlib.engine.local import everywhere
from fedlib.engine.simulation import OutOfTime
from fedlib.errors import FedlibError
from fedlib.evidence import catalogue, experiments, records
from fedlib.papers import trials as shared
from fedlib.papers.trials import Trial

WANTED = [("participation", name) for name in ("fig1", "fig2", "figD3", "figD2", "figD1")]
"""The records that a GPU is wanted for, the most wanted first."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""How far a device may end from the CPU after some rounds, as a part of the way gone."""

GOALS = {1: 1000, 10: 3000}
"""Seed-rounds a second of Figure 1's CNN that one H100 should reach, by seeds side by side."""

ROUNDS = 5  # the third is recorded, the fourth and fifth are replayed
SEEDS = (1, 2)


def run(
    minutes: float,
    out: str | Path,
    device: str = "auto",
    profile: str = "paper",
    tf32: bool = False,
    tell: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Do all three parts, as far as time goes.

    Parameters
    ----------
    minutes
        To spend. What is under way when they are over is kept, and goes on the next time.
    out
        Folder for everything: ``gpu.json`` and ``gpu.txt``, ``seeds/N`` with a record of each
        seed, ``records`` with those of all seeds joined.
    device
        ``"auto"``, ``"cuda"`` or ``"cpu"``, where the same code runs on the same path.
    profile
        Of the records; ``"smoke"`` shortens the other parts, too.
    tf32
        Let products round to TF32. The records say so.
    tell
        Called with each line for the reader.

    Returns
    -------
    dict
        What ``gpu.json`` holds.
    """
    until, wanted = time.monotonic() + 60 * minutes, WANTED[:1] if profile == "smoke" else WANTED
    needed = {catalogue.settings(*names, profile)["dataset"] for names in wanted}
    place, home = experiments.choose_device(device), records.make_folder(Path(out))
    experiments.set_precision(tf32)
    found = _resumed(home / "gpu.json", place, tf32)

    def keep(part: str, rows: Any) -> None:
        found[part] = rows
        found["convolutions"] = convolution.told()
        records.write(home / "gpu.json", (json.dumps(found, indent=1) + "\n").encode())
        records.write(home / "gpu.txt", summary(found).encode())

    small = profile == "smoke"
    tell(f"{found['device']}, torch {found['versions']['torch']}, TF32 {'on' if tf32 else 'off'}")
    for name in sorted(needed):
        try:
            datasets.get(name)
        except FedlibError as error:
            tell(f"The records will have to wait: {error}")
    _agree(place, small, found, keep, tell)
    _speed(place, small, until, found, keep, tell)
    _records(wanted, profile, place, tf32, until, home, keep, tell)
    tell("")
    tell(summary(found))
    return found


def _resumed(page: Path, place: str, tf32: bool) -> dict[str, Any]:
    """Return what an earlier start found, when it ran the same code on the same device."""
    about = {**experiments.provenance(place), "tf32": tf32, "source": _source()}
    same = ("device", "tf32", "source")
    try:
        held = json.loads(page.read_text())
    except FileNotFoundError:
        return about
    except (OSError, ValueError) as error:
        raise FedlibError(f"{page} cannot be read ({error}). Delete it; records stay.") from error
    if [held.get(key) for key in same] != [about[key] for key in same]:
        return about
    return {**held, **about}


def _source() -> str:
    """Return a hash of the whole package: a commit is not known everywhere."""
    home = Path(__file__).parent
    pages = sorted(home.rglob("*.py"))
    text = b"".join(str(p.relative_to(home)).encode() + p.read_bytes() for p in pages)
    return hashlib.sha256(text).hexdigest()[:16]


# --- is it right? ---------------------------------------------------------------------------------


def trials() -> dict[str, Trial]:
    """Return every trial by name: FedAvg with each model, then each paper's algorithms."""
    found = dict(shared.TRIALS)
    for paper in catalogue.papers():
        for package in catalogue.packages(paper):
            if importlib.util.find_spec(f"{package}.trials"):
                held = importlib.import_module(f"{package}.trials").TRIALS
                found |= {f"{paper}: {name}": trial for name, trial in held.items()}
    return found


def compare(build: Trial, dtype: str, device: str) -> float:
    """Return how far a device ends from the CPU after the same draws, as a part of the way gone.

    The CPU takes one copy after the other, the device all of them, recorded and replayed. The
    models count, and the loss that each side reports.
    """
    algorithm, task = build(np.dtype(dtype))
    start = algorithm.init(task, SEEDS)
    block = list(itertools.islice(algorithm.draws(start, task), ROUNDS))
    ends, losses = [], []
    for backend, place in (("loop", "cpu"), ("recorded", device)):
        there = task.to(place)
        with everywhere(backend):
            state = algorithm.init(there, SEEDS)
            for drawn in upload(block, place):
                state, _ = algorithm.round(state, there, drawn)
        ends.append(state.x)
        losses.append(there.evaluate(state.x, "test")["loss"])
    gap = ((losses[0] - losses[1]).abs() / losses[0].abs()).max().item()
    return max(apart(ends[1], ends[0], start.x), gap)


def apart(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two results are from each other, as a part of the way from the start."""
    one, other, start = (x.double().cpu() for x in (one, other, start))
    way = (other - start).norm().item()
    return (one - other).norm().item() / way if way else float("inf")


def _agree(place: str, small: bool, found: dict, keep: Callable, tell: Callable) -> None:
    every = trials()
    if small:
        every = {
            name: build
            for name, build in every.items()
            if not ("resnet" in name or "cifar" in name)
        }
    rows = [row for row in found.get("agree", []) if row["trial"] in every]
    done = {(row["trial"], row["type"]) for row in rows if row["verdict"] == "agrees"}
    rows = [row for row in rows if (row["trial"], row["type"]) in done]
    tell(f"\n1. Is it right? {len(every)} trials, {place} against the CPU.")
    for name, build in every.items():
        for dtype, allowed in TOLERANCE.items():
            if (name, dtype) in done:
                continue
            try:
                gap, why = compare(build, dtype, place), ""
            except Exception as error:  # one broken trial hides no other
                gap, why = float("nan"), f"{type(error).__name__}: {error}".splitlines()[0]
            verdict = "failed" if why else ("agrees" if gap <= allowed else "differs")
            row = {"trial": name, "type": dtype, "apart": gap, "allowed": allowed}
            rows.append(row | {"verdict": verdict, "why": why})
            tell(f"   {verdict:8} {gap:8.1e} (allowed {allowed:.0e})  {dtype}  {name} {why}")
            keep("agree", rows)


# --- how fast is it? ------------------------------------------------------------------------------


def _speed(
    place: str, small: bool, until: float, found: dict, keep: Callable, tell: Callable
) -> None:
    names = list(bench.WORK)[:2] if small else list(bench.WORK)
    rows = found.get("roofline", [])
    tell("\n2. How fast is it? Local steps, and whole rounds of Figure 1's CNN.")
    for name in names:
        if name not in [row["name"] for row in rows] and time.monotonic() < until:
            rows = rows + bench.roofline(place, [name])
            keep("roofline", rows)
            last = rows[-1]
            tell(f"   {name}: {last['ours [ms]']} ms, {last['ratio']} times the plain loop's speed,"
                 f" held back by {last['held back by']}")  # fmt: skip
    rows = found.get("rounds", [])
    for seeds, goal in GOALS.items():
        if seeds not in [row["seeds"] for row in rows] and time.monotonic() < until:
            counted = bench.whole_rounds(place, seeds, *((0.5, 4000) if small else (8.0, 60_000)))
            rows = [*rows, counted | {"goal": goal}]
            keep("rounds", rows)
            tell(f"   {seeds} seed{'s' * (seeds > 1)}: {counted['seed-rounds a second']} "
                 f"seed-rounds a second; the goal on one H100 is {goal}")  # fmt: skip
    if place == "cuda" and "compiled" not in found and time.monotonic() < until - 300:
        keep("compiled", _compiled())
        tell(f"   torch.compile instead of a recording: {found['compiled']}")


def _compiled() -> dict[str, Any]:
    """Time ``torch.compile`` on the CNN's steps, or say why it could not be had."""
    task, theta, batches = bench.workload("fashion_cnn", "cuda")
    try:
        steps = bench.compiled(task, theta, 0.01)
        seconds = bench.measure({"compiled": lambda: steps(batches)}, "cuda")
    except Exception as error:  # it is an alternative only
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"ms": round(1000 * seconds["compiled"], 3)}


# --- the next records -----------------------------------------------------------------------------


def _records(
    wanted: Sequence[tuple[str, str]],
    profile: str,
    place: str,
    tf32: bool,
    until: float,
    home: Path,
    keep: Callable,
    tell: Callable,
) -> None:
    rows: list[dict[str, Any]] = []
    tell(f"\n3. Records of profile {profile}, seed by seed.")
    for paper, experiment in wanted:
        seeds = range(1, 1 + catalogue.settings(paper, experiment, profile)["seeds"])
        row = {"record": f"{paper}/{experiment}.{profile}", "seeds": len(seeds), "done": []}
        rows.append(row | {"joined": False, "under way": ""})
        for seed in seeds:
            source = home / "seeds" / str(seed)
            name = f"{experiment}.{profile}.json"
            try:
                if not (records.folder(paper, source) / name).exists():
                    experiments.run(
                        paper, experiment, profile, [seed], place, source,
                        sys.stderr.isatty(), tf32, until,
                    )  # fmt: skip
                    tell(f"   {rows[-1]['record']}: seed {seed} is done")
            except OutOfTime as stopped:
                rows[-1]["under way"] = f"seed {seed}, {stopped}"
            except FedlibError as error:
                rows[-1]["under way"] = str(error)
            if rows[-1]["under way"]:
                tell(f"   {rows[-1]['record']}: {rows[-1]['under way']}")
                keep("records", rows)
                return
            rows[-1]["done"].append(seed)
            keep("records", rows)
        sources = [home / "seeds" / str(seed) for seed in seeds]
        joined = records.join(paper, experiment, profile, sources, home / "records")
        rows[-1]["joined"] = True
        keep("records", rows)
        tell(f"   Wrote {joined.path}")


# --- in a page ------------------------------------------------------------------------------------


def summary(found: dict[str, Any]) -> str:
    """Return one page of text about everything found so far."""
    agree = found.get("agree", [])
    wrong = [row for row in agree if row["verdict"] != "agrees"]
    versions = found["versions"]
    lines = [
        f"{found['device']}, torch {versions['torch']}, fedlib {found['commit'][:9]} "
        f"({found['source']}), TF32 {'on' if found['tf32'] else 'off'}, {found['date'][:10]}",
        "",
        f"Right?  {len(agree) - len(wrong)} of {len(agree)} trials agree with the CPU",
    ]
    for dtype in TOLERANCE:
        if gaps := [row["apart"] for row in agree if row["type"] == dtype and not row["why"]]:
            lines.append(f"        {dtype}: at most {max(gaps):.1e} apart, {TOLERANCE[dtype]:.0e} "
                         "allowed")  # fmt: skip
    lines += [f"        {r['verdict']}: {r['trial']}, {r['type']} {r['why']}" for r in wrong]
    lines += ["", "Fast?   five local steps: ours [ms], ratio to a plain loop, what holds it back"]
    for row in found.get("roofline", []):
        lines.append(f"        {row['name']:20} {row['ours [ms]']:9.3f} {row['ratio']:7.2f}  "
                     f"{row['held back by']}; {row['copies that fit']:,} copies fit")  # fmt: skip
    for row in found.get("rounds", []):
        lines.append(f"        whole rounds, {row['seeds']:2} seeds: "
                     f"{row['seed-rounds a second']} seed-rounds a second, "
                     f"{row['seed-rounds a second'] / row['goal']:.1%} of the goal")  # fmt: skip
    if "compiled" in found:
        lines.append(f"        torch.compile on the CNN: {found['compiled']}")
    lines += [f"        {what}: {way}" for what, way in found.get("convolutions", {}).items()]
    lines += ["", "Next?"]
    for row in found.get("records", []):
        state = f"{len(row['done'])} of {row['seeds']} seeds" + ", joined" * row["joined"]
        state += f"; {row['under way']}" if row["under way"] else ""
        lines.append(f"        {row['record']}: {state}")
    return "\n".join([*lines, "", "The same command on the same folder goes on from here.", ""])
