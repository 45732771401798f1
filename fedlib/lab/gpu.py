"""One command for whoever sits at a GPU: check it against the CPU, time it, make large records.

Everything is kept in one folder as it is found. Started again on that folder, on this machine or
another, the command goes on: what the same code has found on the same device is not done twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedlib
from fedlib import datasets, files
from fedlib.engine import convolution, recording
from fedlib.engine.local import everywhere
from fedlib.engine.rng import stream
from fedlib.engine.simulation import OutOfTime, simulate
from fedlib.errors import FedlibError
from fedlib.lab import bench
from fedlib.lab import trials as shared
from fedlib.lab.evidence import catalogue, experiments, queue, records
from fedlib.lab.trials import Trial

FIRST = [("participation", name) for name in ("fig1", "fig2", "figD3", "figD2", "figD1")]
"""The records that a GPU is wanted for most; :func:`wanted` names the others."""

TOLERANCE = {"float64": 1e-9, "float32": 1e-3}
"""How far a device may end from the CPU after some rounds, as a part of the way gone."""

ROUGH = {"FedAvg, resnet18": 0.2}
"""The same for float32 in a deep network: wherever a ReLU stands at zero rounding decides, and two
CPUs, too, end some hundredths apart. Float64 shows whether the work is the same."""

COARSE = 0.05  # the same for float32 whose products round to TF32

GOALS = {1: 1000, 10: 3000}
"""Seed-rounds a second of Figure 1's CNN that one H100 should reach, by seeds side by side."""

ROUNDS = {"float64": 9, "float32": 4}  # the third of a kind is recorded, later ones are replayed
LONG = 70  # more than a block of draws
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
    chosen = FIRST[:1] if profile == "smoke" else wanted(profile)
    needed = {catalogue.settings(*names, profile)["dataset"] for names in chosen}  # or an error
    place, home = experiments.choose_device(device), files.make_folder(Path(out))
    experiments.set_precision(tf32)
    with files.only_one(home / ".gpu.lock", "fedlib gpu"):
        return _all_parts(until, home, place, profile, tf32, chosen, sorted(needed), tell)


def wanted(profile: str = "paper") -> list[tuple[str, str]]:
    """Return the records that a GPU is wanted for, paper and experiment, the most wanted first.

    They are all that compute on a data set; toys, processes and arithmetic need no GPU, and runs on
    sets of columns are simulated event by event, which no GPU makes faster.
    After :data:`FIRST` the order is that of the papers, in which tuning comes before what asks for
    it, with the ResNets, which take longest, at the end.
    """
    rest, last = [], []
    for paper in catalogue.papers():
        for name in catalogue.names(paper):
            if (paper, name) in FIRST or profile not in catalogue.profiles(paper, name):
                continue
            s = catalogue.settings(paper, name, profile)
            if {"dataset", "seeds"} <= s.keys() and not _columns(s["dataset"]):
                (last if "resnet18" in s.get("model", []) else rest).append((paper, name))
    return [*FIRST, *rest, *last]


def _columns(name: str) -> bool:
    return datasets.card(name).format.startswith("columns-")


def _all_parts(
    until: float,
    home: Path,
    place: str,
    profile: str,
    tf32: bool,
    wanted: Sequence[tuple[str, str]],
    needed: Sequence[str],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    found = _resumed(home / "gpu.json", place, tf32)
    if not {"agree", "roofline"} & found.keys() and list(home.glob("gpu.*.json")):
        tell("What other code, another device or precision found is kept beside, under its date.")

    def keep(part: str, rows: Any) -> None:
        found[part] = rows
        found["convolutions"] = found.get("convolutions", {}) | convolution.told()
        files.publish(home / "gpu.json", (json.dumps(found, indent=1) + "\n").encode())
        files.publish(home / "gpu.txt", summary(found).encode())

    small = profile == "smoke"
    tell(f"{found['device']}, torch {found['versions']['torch']}, TF32 {'on' if tf32 else 'off'}")
    for name in needed:
        try:
            datasets.get(name)
        except FedlibError as error:
            tell(f"The records will have to wait: {_first(error)}")
    _agree(place, small, until, found, keep, tell)
    _speed(place, small, until, found, keep, tell)
    _records(wanted, profile, place, tf32, until, home, keep, tell)
    tell("")
    tell(summary(found))
    return found


def _resumed(page: Path, place: str, tf32: bool) -> dict[str, Any]:
    """Return what an earlier start found, when it ran the same code on the same device.

    What another code or device found is kept beside, under its date.
    """
    about = {**experiments.provenance(place), "tf32": tf32, "source": _source()}
    try:
        held = json.loads(page.read_text("utf-8"))
        when, torchs = held["date"], [one["versions"]["torch"] for one in (held, about)]
        same = all(held[key] == about[key] for key in ("device", "tf32", "source"))
        summary(held)
    except FileNotFoundError:
        return about
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FedlibError(
            f"{page} is not what this command writes ({error!r}). Delete it, or choose another "
            "folder with --out; records of seeds stay."
        ) from error
    if same and torchs[0] == torchs[1]:
        return {**held, **about}
    page.rename(page.with_name(f"gpu.{when[:19].replace(':', '-')}.json"))
    return about


def _first(error: Exception) -> str:
    """Return the first line of a message."""
    return str(error).splitlines()[0]


def _source() -> str:
    """Return a hash of the whole package: a commit is not known everywhere."""
    home = Path(fedlib.__file__).parent
    pages = sorted(home.rglob("*.py"))
    text = b"".join(str(p.relative_to(home)).encode() + p.read_bytes() for p in pages)
    return hashlib.sha256(text).hexdigest()[:16]


# --- is it right? ---------------------------------------------------------------------------------


def trials() -> dict[str, Trial]:
    """Return every trial by name: FedAvg with each model, then each paper's algorithms."""
    found = dict(shared.TRIALS)
    for paper in catalogue.papers():
        for module in catalogue.modules(paper):
            with contextlib.suppress(ModuleNotFoundError):  # a paper whose code is not here
                held = getattr(importlib.import_module(module), "TRIALS", {})
                found |= {f"{paper}: {name}": trial for name, trial in held.items()}
    return found


def compare(build: Trial, dtype: str, device: str, rounds: int = 0) -> float:
    """Return how far a device ends from the CPU after the same draws, as a part of the way gone.

    The CPU takes one copy after the other, the device all of them, recorded and replayed. The
    state's tensors count, and the loss that each side reports. On a GPU a trial whose steps could
    be recorded, and were not, is an error.
    """
    rounds = rounds or ROUNDS[dtype]
    algorithm, task = build(np.dtype(dtype))
    start, ends, losses = algorithm.init(task, SEEDS), [], []
    for backend, place in (("loop", "cpu"), ("recorded", device)):
        there = task.to(place)
        with everywhere(backend):
            history = simulate(
                algorithm, there, rounds, SEEDS, evaluate_every=rounds, splits=("test",),
                progress=False,
            )  # fmt: skip
        ends.append(_numbers(history.state))
        last = history.frame.query("metric == 'loss'").tail(len(SEEDS))
        losses.append(torch.tensor(last["value"].to_numpy()))
        kept = getattr(there, "recordings", {}).values()
        if device == "cuda" == place and kept and not any(_replays(held) for held in kept):
            raise FedlibError(f"Nothing was recorded: {'; '.join(recording.BROKEN) or 'why?'}")
        getattr(there, "recordings", {}).clear()
    gaps = [_apart(*ends, _numbers(start)), _apart(*losses, torch.zeros_like(losses[0]))]
    return float(np.max(gaps))  # nan, too, is the larger one


def _replays(held: Any) -> bool:
    return isinstance(held, recording.Recording) and held.replays


def _numbers(state: Any) -> torch.Tensor:
    """Return all that the tensors of a state hold: models, and what else is learned."""
    held = [getattr(state, field.name) for field in dataclasses.fields(state)]
    return torch.cat([one.double().cpu().flatten() for one in held if torch.is_tensor(one)])


def _apart(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> float:
    """Return how far two results are from each other, as a part of the way from the start."""
    one, other, start = (x.double().cpu() for x in (one, other, start))
    way = (one - start).norm().item()
    return (one - other).norm().item() / way if way else float("inf")


SHAPES = {"first": ((10, 16, 1, 28, 28), 32), "second": ((10, 16, 32, 14, 14), 32)}


def ways_apart(layer: str, way: str, dtype: str, device: str) -> float:
    """Return how far a way of convolving on a device is from one copy after the other on the CPU.

    In the shapes of Figure 1's CNN: the result and the gradients of filters and biases.
    """
    shape, filters = SHAPES[layer]
    rng = stream(0, "ways", len(layer))
    sizes = (shape, (shape[0], filters, shape[2], 5, 5), (shape[0], filters))
    given = [torch.from_numpy(rng.standard_normal(size).astype(dtype)) for size in sizes]
    ends = []
    for place, convolved in (("cpu", convolution.one_by_one), (device, convolution.WAYS[way])):
        x, weight, bias = (tensor.to(place) for tensor in given)
        weight.requires_grad_(), bias.requires_grad_()
        out = convolved(x, weight, bias)
        ends.append([out, *torch.autograd.grad(out.square().mean(), (weight, bias))])
    pairs = zip(*[[t.detach() for t in end] for end in ends], strict=True)
    return float(np.max([_apart(one, other, torch.zeros_like(one)) for one, other in pairs]))


def _agree(
    place: str, small: bool, until: float, found: dict, keep: Callable, tell: Callable
) -> None:
    every: dict[str, Callable[[str], float]] = {
        name: functools.partial(compare, build, device=place)
        for name, build in trials().items()
        if not (small and ("resnet" in name or "cifar" in name))
    }
    every[f"FedAvg, {LONG} rounds"] = functools.partial(
        compare, shared.TRIALS["FedAvg, mlp"], device=place, rounds=LONG
    )
    for layer, way in itertools.product(SHAPES, convolution.WAYS):
        every[f"convolution, {layer} layer, {way}"] = functools.partial(
            ways_apart, layer, way, device=place
        )
    rows = [row for row in found.get("agree", []) if row["verdict"] == "agrees"]
    done = {(row["trial"], row["type"]) for row in rows}
    tell(f"\n1. Is it right? {len(every)} trials on {place}, compared with the CPU.")
    for name, dtype in itertools.product(every, TOLERANCE):
        if (name, dtype) in done:
            continue
        if time.monotonic() > until:
            tell("   No time left for the other trials.")
            return
        try:
            gap, why = every[name](dtype), ""
        except Exception as error:  # one broken trial hides no other
            gap, why = None, f"{type(error).__name__}: {_first(error)}"
        if gap is not None and not np.isfinite(gap):
            gap, why = None, "the results are not finite"
        allowed = TOLERANCE[dtype]
        if dtype == "float32":
            allowed = max(allowed, ROUGH.get(name, 0), COARSE * found["tf32"])
        right = gap is not None and gap <= allowed
        verdict = "agrees" if right else ("failed" if why else "differs")
        row = {"trial": name, "type": dtype, "apart": gap, "allowed": allowed}
        rows.append(row | {"verdict": verdict, "why": why})
        far = "" if gap is None else f"{gap:.1e} of the way apart, {allowed:.0e} allowed"
        tell(f"   {verdict:8} {dtype}  {name}: {far}{why}")
        keep("agree", rows)


# --- how fast is it? ------------------------------------------------------------------------------


def _speed(
    place: str, small: bool, until: float, found: dict, keep: Callable, tell: Callable
) -> None:
    tell("\n2. How fast is it? Five local steps, and whole rounds of Figure 1's CNN.")

    def measured(part: str, key: str, one: Any, work: Callable[[], dict]) -> None:
        """Do some work once, keep the row, and say what stands in its way."""
        rows = found.get(part, [])
        if one in [row[key] for row in rows]:
            return
        if time.monotonic() > until:
            tell(f"   {part}, {one}: no time left")
            return
        try:
            row = work()
        except RuntimeError as error:  # out of memory, say
            tell(f"   {one}: {type(error).__name__}: {_first(error)}")
            return
        keep(part, [*rows, row])
        tell(f"   {_told(part, row)}")

    can = functools.cache(functools.partial(bench.limits, place))  # measured once, if at all
    for name in list(bench.WORK)[:2] if small else bench.WORK:
        measured("roofline", "name", name, lambda name=name: bench.roofline(name, place, can()))
    size = (0.5, 4000) if small else (8.0, 60_000)
    for seeds, goal in GOALS.items():
        measured("rounds", "seeds", seeds, lambda seeds=seeds, goal=goal:
                 bench.whole_rounds(place, seeds, *size) | {"goal": goal})  # fmt: skip
    if place == "cuda" and "compiled" not in found and time.monotonic() < until - 300:
        keep("compiled", _compiled())
        tell(f"   torch.compile in place of a recording: {found['compiled']}")


def _told(part: str, row: dict[str, Any]) -> str:
    """Put a row of the second part into words."""
    if part == "roofline":
        return (
            f"{row['name']}: {row['ours [ms]']:.3f} ms, {row['ratio']} times as fast as a plain "
            f"loop; held back by {row['held back by']}; {row['copies that fit']:,} models fit"
        )
    speed = row["seed-rounds a second"]
    return (
        f"whole rounds, {row['seeds']} seed{'s side by side' * (row['seeds'] > 1)}: {speed:,} "
        f"rounds a second, each seed's counted; the goal on a large GPU is {row['goal']:,}"
    )


def _compiled() -> dict[str, Any]:
    """Time ``torch.compile`` on the CNN's steps, or say why it could not be had."""
    task, theta, batches = bench.workload("fashion_cnn", "cuda")
    try:
        steps = bench.compiled(task, theta, 0.01)
        seconds = bench.measure({"compiled": lambda: steps(batches)}, "cuda")
    except Exception as error:  # it is an alternative only
        return {"failed": f"{type(error).__name__}: {_first(error)}"}
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
        s = catalogue.settings(paper, experiment, profile)
        seeds = experiments.choose_seeds(s, None)
        name = f"{paper}/{experiment}.{profile}"
        row = {"record": name, "seeds": len(seeds), "done": [], "joined": False, "under way": ""}
        rows.append(row)
        parts = queue.parts(paper, experiment, profile)
        folder = home / "seeds" / (place + "-tf32" * tf32)
        try:
            for part, own in parts.items():
                if "tuned" in s:
                    queue.hand_on(paper, s["tuned"], profile, folder / "tuning", folder / part)
                if not _there(paper, experiment, profile, folder / part):
                    row["under way"] = part if "tunes" in s else f"seed {part}"
                    tell(f"   {row['record']}: {row['under way']} is begun, or goes on")
                    experiments.run(
                        paper, experiment, profile, [*own], place, folder / part,
                        sys.stderr.isatty(), tf32, until,
                    )  # fmt: skip
                row["done"] += own
                row["under way"] = ""
                keep("records", rows)
            sources = [folder / part for part in parts]
            path = queue.join(paper, experiment, profile, sources, home / "records")
            row["joined"] = True
            tell(f"   Wrote {path}")
        except OutOfTime as stopped:
            row["under way"] += f", {stopped}"
            tell(f"   {row['record']}: {row['under way']}")
            return
        except (FedlibError, RuntimeError) as error:  # the next one may still be possible
            row["under way"] = _first(error)
            tell(f"   {row['record']}: {error}")
        finally:
            keep("records", rows)


def _there(paper: str, experiment: str, profile: str, source: Path) -> bool:
    """Say whether a seed's record is there, made by the present code."""
    try:
        return records.load(paper, experiment, profile, source).state.word == "fresh"
    except records.MissingRecord:
        return False


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
        mine = [row for row in agree if row["type"] == dtype and row["apart"] is not None]
        if mine:
            worst = max(mine, key=lambda row: row["apart"] / row["allowed"])
            lines.append(
                f"        {dtype}: nearest to its bound is '{worst['trial']}', "
                f"{worst['apart']:.1e} of the way apart, {worst['allowed']:.0e} allowed"
            )
    lines += [f"        {r['verdict']}: {r['trial']}, {r['type']} {r['why']}" for r in wrong]
    lines += ["", "Fast?   Five local steps of each model, and whole rounds of Figure 1's CNN:"]
    for part in ("roofline", "rounds"):
        lines += [f"        {_told(part, row)}" for row in found.get(part, [])]
    if "compiled" in found:
        lines.append(f"        torch.compile on the CNN: {found['compiled']}")
    lines += [f"        {what}: {way}" for what, way in found.get("convolutions", {}).items()]
    lines += ["", "Next?"]
    for row in found.get("records", []):
        state = f"{len(row['done'])} of {row['seeds']} seeds" + ", joined" * row["joined"]
        state += f"; {row['under way']}" if row["under way"] else ""
        lines.append(f"        {row['record']}: {state}")
    left = not found.get("records") or not all(row["joined"] for row in found["records"])
    end = "The same command on the same folder goes on from here." if left else "Nothing is left."
    return "\n".join([*lines, "", end, ""])
