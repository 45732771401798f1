"""One command for whoever sits at a GPU: check it against the CPU, time it, make large records.

Everything is kept in one folder as it is found. Started again on that folder, on this machine or
another, the command goes on: what the same code has found on the same device is not done twice.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedlib
from fedlib import datasets, files, paths
from fedlib.engine import convolution
from fedlib.errors import FedlibError
from fedlib.lab import bench, locks
from fedlib.lab.evidence import catalogue, experiments, queue
from fedlib.lab.trials import LAYERS, TRIALS, Float32Only, Trial, compare, ways_gap

FIRST = [("participation", name) for name in ("fig1", "fig2", "figD3", "figD2", "figD1")]
"""The records that a GPU is wanted for most; :func:`missing` names the others."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""How far a device may end from the CPU after some rounds, as a part of the way gone."""

ROUGH = {"FedAvg, resnet18": 0.2, "FedAvg, cifar_cnn": 0.3}
"""The same for float32 in a large network, as wherever a ReLU stands at zero, or two pixels of a
pool are alike, rounding decides, and two CPUs, too, end some hundredths apart. Float64 shows
whether the work is the same."""

COARSE = 0.05  # the same for float32 whose products round to TF32

SEEDS = (1, 10)  # side by side, of whole rounds
LONG_RUN = 70  # more than a block of draws


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
        Folder for everything: ``gpu.json`` and ``gpu.txt``, ``seeds/DEVICE/N`` with a record of
        each seed, ``seeds/DEVICE/tuning`` with what was tuned, ``records`` with all seeds joined.
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
    if device == "auto" and not torch.cuda.is_available():
        raise FedlibError(
            "PyTorch sees no CUDA device here. To try this command on a CPU, in half a minute:\n"
            "  fedlib gpu --device cpu --profile smoke"
        )
    until = time.monotonic() + 60 * minutes
    records = FIRST[:1] if profile == "smoke" else missing(profile)
    needed = {catalogue.settings(*names, profile)["dataset"] for names in records}  # or an error
    home, place = paths.expand(out, "out"), experiments.choose_device(device)
    visit = Visit(home, place, profile, tf32, until, tell)
    files.make_folder(visit.home)
    experiments.set_precision(tf32)
    with locks.only_one(visit.home / ".gpu.lock", "fedlib gpu"):
        visit.result = result = _resumed(visit.home / "gpu.json", visit.place, tf32)
        if not {"agree", "steps"} & result.keys() and list(visit.home.glob("gpu.*.json")):
            tell("What other code, device or precision found is kept beside, under its date.")
        tell(gpu_summary(result).splitlines()[0])
        for name in sorted(needed):
            try:
                datasets.get(name)
            except FedlibError as error:
                tell(f"The records will have to wait: {_first(error)}")
        _agree(visit)
        _speed(visit)
        _records(visit, records)
        tell(f"\n{gpu_summary(result)}")
        return result


@dataclass
class Visit:
    """What the parts share; ``until`` is by ``time.monotonic()``, ``result`` what is kept."""

    home: Path
    place: str
    profile: str
    tf32: bool
    until: float
    tell: Callable[[str], None]
    result: dict[str, Any] = field(default_factory=dict)

    def keep(self, part: str, rows: Any) -> None:
        """Write down what a part has found so far."""
        self.result[part] = rows
        self.result["convolutions"] = self.result.get("convolutions", {}) | convolution.choices()
        files.publish(self.home / "gpu.json", (json.dumps(self.result, indent=1) + "\n").encode())
        files.publish(self.home / "gpu.txt", gpu_summary(self.result).encode())


def missing(profile: str = "paper") -> list[tuple[str, str]]:
    """Return the records that a GPU is wanted for, paper and experiment, the most wanted first.

    They are all that compute on a data set; toys, processes and arithmetic need no GPU, and runs on
    sets of columns are simulated event by event, which no GPU makes faster.
    After :data:`FIRST` the order is that of the papers, in which tuning comes before what asks for
    it, with the ResNets, which take longest, at the end.
    """
    rest, last = [], []
    for paper, name in ((p, n) for p in catalogue.papers() for n in catalogue.experiment_names(p)):
        if (paper, name) in FIRST or profile not in catalogue.profiles(paper, name):
            continue
        s = catalogue.settings(paper, name, profile)
        columns = "dataset" in s and datasets.card(s["dataset"]).format.startswith("columns-")
        if {"dataset", "seeds"} <= s.keys() and not columns:
            (last if "resnet18" in s.get("model", []) else rest).append((paper, name))
    return [*FIRST, *rest, *last]


def _resumed(page: Path, place: str, tf32: bool) -> dict[str, Any]:
    """Return what an earlier start found, when it ran the same code on the same device.

    What another code or device found is kept beside, under its date.
    """
    about = {**experiments.provenance(place), "tf32": tf32, "source": _source()}
    try:
        stored = json.loads(page.read_text("utf-8"))
        when, same = stored["date"], stored["versions"]["torch"] == about["versions"]["torch"]
        same &= all(stored[key] == about[key] for key in ("device", "tf32", "source"))
        gpu_summary(stored)
    except FileNotFoundError:
        return about
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FedlibError(
            f"{page} is not what this command writes ({error!r}). Delete it, or choose another "
            "folder with --out; records of seeds stay."
        ) from error
    if same:
        return {**stored, **about}
    page.rename(page.with_name(f"gpu.{when[:19].replace(':', '-')}.json"))
    return about


def _first(error: Exception) -> str:
    """Return the first line of a message, which may have none."""
    return str(error).partition("\n")[0]


def _source() -> str:
    """Return a hash of the whole package: a commit is not known everywhere."""
    home = Path(fedlib.__file__).parent
    pages = {str(p.relative_to(home)): p.read_bytes() for p in sorted(home.rglob("*.py"))}
    return files.digest(pages)[:16]


# --- is it right? ---------------------------------------------------------------------------------


def trials() -> dict[str, Trial]:
    """Return every trial by name: FedAvg with each model, then each paper's algorithms."""
    every = dict(TRIALS)
    for paper, module in ((p, m) for p in catalogue.papers() for m in catalogue.modules(p)):
        with contextlib.suppress(ModuleNotFoundError):  # a paper whose code is not here
            theirs = getattr(importlib.import_module(module), "TRIALS", {})
            every |= {f"{paper}: {name}": trial for name, trial in theirs.items()}
    return every


def _agree(visit: Visit) -> None:
    slow = ("resnet", "cifar") if visit.profile == "smoke" else ()
    every: dict[str, Callable[..., float]] = {
        name: functools.partial(compare, build)
        for name, build in trials().items()
        if not any(word in name for word in slow)
    }
    every[f"FedAvg, {LONG_RUN} rounds"] = functools.partial(
        compare, TRIALS["FedAvg, mlp"], rounds=LONG_RUN
    )
    for layer, way in itertools.product(LAYERS, convolution.WAYS):
        every[f"convolution, {layer} layer, {way}"] = functools.partial(ways_gap, layer, way)
    rows = {(row["trial"], row["type"]): row for row in visit.result.get("agree", [])}
    done = {pair for pair, row in rows.items() if row["verdict"] == "agrees"}
    visit.tell(f"\n1. Is it right? {len(every)} trials on {visit.place}, compared with the CPU.")
    for name, dtype in [pair for pair in itertools.product(every, TOLERANCE) if pair not in done]:
        if time.monotonic() > visit.until:
            visit.tell("   No time left for the other trials.")
            return
        try:
            gap, why = every[name](dtype=dtype, device=visit.place), ""
            if not np.isfinite(gap):
                gap, why = None, "the results are not finite"
        except Float32Only:
            continue
        except Exception as error:  # one broken trial hides no other
            gap, why = None, f"{type(error).__name__}: {_first(error)}"
        rough = (ROUGH.get(name, 0), COARSE * visit.tf32) if dtype == "float32" else ()
        allowed = max([TOLERANCE[dtype], *rough])
        verdict = "failed" if why else "agrees" if gap <= allowed else "differs"
        row = {"trial": name, "type": dtype, "apart": gap, "allowed": allowed}
        rows[name, dtype] = row | {"verdict": verdict, "why": why}
        far = "" if gap is None else f"{gap:.1e} of the way apart, {allowed:.0e} allowed"
        visit.tell(f"   {verdict:8} {dtype}  {name}: {far}{why}")
        visit.keep("agree", [*rows.values()])


# --- how fast is it? ------------------------------------------------------------------------------


def _speed(visit: Visit) -> None:
    small = visit.profile == "smoke"
    visit.tell("\n2. How fast is it? Five local steps, and whole rounds of Figure 1's CNN.")
    names = list(bench.WORK)[:2] if small else bench.WORK
    seeds, *size = ((1, 2), 0.5, 4000) if small else (SEEDS, 8.0, 60_000)
    works = [("steps", "name", n, bench.local_steps, (n, visit.place)) for n in names]
    works += [("rounds", "seeds", n, bench.whole_rounds, (visit.place, n, *size)) for n in seeds]
    for part, key, one, work, arguments in works:
        rows = visit.result.get(part, [])
        if one in [row[key] for row in rows]:
            continue
        if time.monotonic() > visit.until:
            visit.tell(f"   {part}, {one}: no time left")
            continue
        try:
            row = work(*arguments)
        except RuntimeError as error:  # out of memory, say
            visit.tell(f"   {one}: {type(error).__name__}: {_first(error)}")
            continue
        visit.keep(part, [*rows, row])
        visit.tell(f"   {_words(row)}")


def _words(row: dict[str, Any]) -> str:
    """Put a row of the second part into words."""
    if "name" in row:
        return (
            f"{row['name']}: {row[row['chosen'] + ' [ms]']:.3f} ms, {row['ratio']} times as fast "
            f"as a plain loop; {row['share']:.0%} of that time is what its products and "
            f"convolutions need by themselves; {row['copies that fit']:,} models fit"
        )
    seeds, speed = row["seeds"], row["seed-rounds a second"]
    return (
        f"whole rounds, {seeds} seed{'s side by side' * (seeds > 1)}: {speed:,} rounds a second, "
        "each seed's counted"
    )


# --- the next records -----------------------------------------------------------------------------


def _records(visit: Visit, names: Sequence[tuple[str, str]]) -> None:
    visit.tell(f"\n3. Records of profile {visit.profile}, seed by seed.")
    asked = [dict(paper=p, experiment=name, profile=visit.profile) for p, name in names]
    rows = {row["record"]: row for row in visit.result.get("records", [])}
    seeds = visit.home / "seeds" / (visit.place + "-tf32" * visit.tf32)
    for row in queue.make(
        asked, visit.until, seeds, visit.home / "records", lambda line: visit.tell(f"   {line}"),
        sys.stderr.isatty(), visit.place, visit.tf32, stay=True,
    ):  # fmt: skip
        rows[row["record"]] = row
        visit.keep("records", [*rows.values()])


# --- in a page ------------------------------------------------------------------------------------


def gpu_summary(result: dict[str, Any]) -> str:
    """Return one page of text about everything found so far."""
    agree = result.get("agree", [])
    wrong = [row for row in agree if row["verdict"] != "agrees"]
    lines = [
        f"{result['device']}, torch {result['versions']['torch']}, fedlib {result['commit'][:9]} "
        f"({result['source']}), TF32 {'on' if result['tf32'] else 'off'}, {result['date'][:10]}",
        "",
        f"Right?  {len(agree) - len(wrong)} of {len(agree)} trials agree with the CPU",
    ]
    for dtype in TOLERANCE:
        mine = [row for row in agree if row["type"] == dtype and row["apart"] is not None]
        if mine:
            worst = max(mine, key=lambda row: row["apart"] / row["allowed"])
            far = f"{worst['apart']:.1e} of the way apart, {worst['allowed']:.0e} allowed"
            lines.append(f"        {dtype}: '{worst['trial']}' is farthest, by its bound: {far}")
    lines += [f"        {r['verdict']}: {r['trial']}, {r['type']} {r['why']}" for r in wrong]
    rounds = ", and whole rounds of Figure 1's CNN" * bool(result.get("rounds"))
    lines += ["", f"Fast?   Five local steps of each model{rounds}:"]
    timed = [*result.get("steps", []), *result.get("rounds", [])]
    lines += [f"        {_words(row)}" for row in timed]
    ways = collections.Counter(result.get("convolutions", {}).values())
    lines += [f"        convolutions of {n} shapes: {way}" for way, n in ways.most_common()]
    lines += ["", "Next?"]
    for row in result.get("records", []):
        state = f"{len(row['done'])} of {row['seeds']} seeds" + ", joined" * row["joined"]
        state += f"; {row['under way']}" if row["under way"] else ""
        lines.append(f"        {row['record']}: {state}")
    left = not result.get("records") or not all(row["joined"] for row in result["records"])
    end = "The same command on the same folder goes on from here." if left else "Nothing is left."
    return "\n".join([*lines, "", end, ""])
