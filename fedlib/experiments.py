"""From a TOML experiment at a profile to a record with provenance."""

from __future__ import annotations

import datetime
import functools
import importlib
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import fedlib
from fedlib import datasets, freshness, results, studies
from fedlib.errors import FedlibError, unknown
from fedlib.paths import data_folder
from fedlib.results import PROFILES, Record

_SHARED = ("title", "profiles", "common")


def papers() -> list[str]:
    """Return the papers that have experiments."""
    return sorted(path.stem for path in (data_folder() / "experiments").glob("*.toml"))


@functools.cache
def _table(paper: str) -> dict[str, Any]:
    if paper not in papers():
        raise unknown("paper", paper, papers())
    return tomllib.loads((data_folder() / "experiments" / f"{paper}.toml").read_text())


def names(paper: str) -> list[str]:
    """Return the experiments of a paper, in the order of the file."""
    return [name for name in _table(paper) if name not in _SHARED]


def profiles(paper: str, experiment: str) -> Sequence[str]:
    """Return the profiles at which an experiment can be run."""
    if experiment not in names(paper):
        raise unknown("experiment", experiment, names(paper))
    return _table(paper)[experiment].get("only", PROFILES)


def describe(paper: str) -> list[dict[str, str]]:
    """Return one row an experiment: paper, experiment, where in the paper, title, profiles."""
    rows = []
    for name in names(paper):
        entry = _table(paper)[name]
        row = dict(paper=paper, experiment=name, where=entry["where"], title=entry["title"])
        rows.append(row | dict(profiles=", ".join(profiles(paper, name))))
    return rows


def settings(paper: str, experiment: str, profile: str) -> dict[str, Any]:
    """Return the resolved settings of an experiment at a profile.

    Raises
    ------
    FedlibError
        For an unknown paper, experiment or profile, with the valid ones.
    """
    valid, table = profiles(paper, experiment), _table(paper)
    entry = table[experiment]
    if profile not in valid:
        raise unknown(f"profile of {experiment}", profile, valid)
    own = {k: v for k, v in entry.items() if k not in (*PROFILES, "only")}
    layers = (table["common"], own, table["profiles"][profile], entry.get(profile, {}))
    return {k: v for layer in layers for k, v in layer.items()}


def choose_device(device: str = "auto") -> str:
    """Return ``"cuda"`` or ``"cpu"``.

    Raises
    ------
    FedlibError
        When CUDA is asked for and PyTorch sees none.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise unknown("device", device, ["auto", "cpu", "cuda"])
    if device == "cuda" and not torch.cuda.is_available():
        raise FedlibError(
            "Device 'cuda' was asked for, but PyTorch sees no CUDA device here. "
            "Use --device cpu, or install a CUDA build of PyTorch."
        )
    return device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def run(
    paper: str,
    experiment: str,
    profile: str = "quick",
    seeds: int | Sequence[int] | None = None,
    device: str = "auto",
    out: str | Path = "runs",
    progress: bool = True,
) -> Record:
    """Run an experiment and store its record.

    Parameters
    ----------
    paper, experiment, profile
        See :func:`names` and :func:`settings`.
    seeds
        A number of seeds, or the seeds themselves; default is the profile's number.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    out
        Folder for the record. An interrupted run leaves its checkpoints there and goes on
        from them when started again; the result is the same as without the interruption.
    progress
        Show progress bars.

    Returns
    -------
    Record
        As :func:`fedlib.results.load` would return it.
    """
    s = settings(paper, experiment, profile)
    chosen = studies.run_seeds(s["seeds"] if seeds is None else seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise FedlibError(
            f"Seeds must be different non-negative integers, at least one; got {list(chosen)}."
        )
    place = choose_device(device)
    results.make_folder(Path(out) / paper)
    present = freshness.now(s)
    mark = freshness.digest([repr((s, chosen, place)), present["code"], present["cards"]])
    folder = Path(out) / paper / f".{experiment}.{profile}.{mark}"
    about, began = provenance(place), time.perf_counter()
    outcome = _study(s["kind"])(studies.Job(s, chosen, place, folder, progress))
    manifest = {
        "paper": paper,
        "experiment": experiment,
        "profile": profile,
        "settings": s,
        "seeds": list(chosen),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "data": outcome.hashes,
        "fidelity": _fidelity(s["dataset"]) if outcome.hashes else "none",
        "diverged": outcome.diverged,
        **present,
        **about,
    }
    results.save(Path(out), outcome.frame, manifest)
    shutil.rmtree(folder, ignore_errors=True)
    return results.load(paper, experiment, profile, out)


def _study(kind: str) -> Callable[[studies.Job], studies.Outcome]:
    """Return the function behind a kind: ``"training"``, or ``"module:function"``."""
    if ":" not in kind:
        return studies.KINDS[kind]
    module, name = kind.split(":")
    return getattr(importlib.import_module(f"fedlib.{module}"), name)


def obtain(
    paper: str,
    experiment: str,
    profile: str = "replay",
    seeds: int | Sequence[int] | None = None,
    device: str = "auto",
    out: str | Path | None = None,
) -> Record:
    """Return a record: stored for ``replay``, freshly run for any other profile.

    This is what the notebooks call; the command line calls :func:`run` as well.
    """
    if profile == "replay":
        return results.load(paper, experiment, "largest", out)
    return run(paper, experiment, profile, seeds, device, out or "runs")


def check(paper: str, experiment: str, out: str | Path, progress: bool = True) -> str:
    """Make an experiment's stored smoke record again and compare the two.

    When the numbers are the same, the stored one notes that the present code gives them too:
    that is what makes a larger record of changed code *checked*. A missing smoke record, or one
    of other settings or data, is stored anew.

    Parameters
    ----------
    out
        Folder in which to make it again.

    Returns
    -------
    str
        What differs; empty when nothing does.
    """
    book, present = results.folder(), settings(paper, experiment, "smoke")
    try:
        held = results.load(paper, experiment, "smoke", book)
        seeds = held.manifest["seeds"]
    except results.MissingRecord:
        held, seeds = None, None
    made = run(paper, experiment, "smoke", seeds, "cpu", out, progress)
    new = made.manifest
    if (
        held is None
        or freshness.judge(held.manifest | {"code": new["code"]}, present).word != "fresh"
    ):
        results.save(book, made.frame, new | {"seen": freshness.seen({}, new["code"])})
        return ""
    old = held.manifest
    alike = (old["instructions"], old["versions"]["torch"]) == (
        new["instructions"], new["versions"]["torch"],
    )  # fmt: skip
    if found := results.differences(held.frame, made.frame, alike):
        return found
    seen = freshness.seen(old["seen"], new["code"])
    if seen != old["seen"]:
        results.save(book, held.frame, old | {"seen": seen})
    return ""


def check_parameters(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse notebook parameters that do not exist.

    Parameters
    ----------
    given
        Names defined since the imports, ``set(globals()) - known``. Those that the notebook
        itself made, with a leading underscore or called ``known``, are passed over.
    allowed
        The notebook's parameters.

    Raises
    ------
    FedlibError
        Naming the parameter and the valid ones.
    """
    allowed = list(allowed)
    for name in sorted(given):
        if name not in (*allowed, "known") and not name.startswith("_"):
            raise unknown("parameter", name, allowed)


def _fidelity(name: str) -> str:
    """Return ``canonical`` when every file is the release itself, else what it is."""
    found = {row["fidelity"] for row in datasets.verify(name)} - {"", "canonical"}
    return ", ".join(sorted(found)) or "canonical"


def provenance(device: str) -> dict[str, Any]:
    """Return what every stored number is kept with: device, versions, commit and date."""
    versions = {
        "fedlib": fedlib.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    return {
        "device": _device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def _commit() -> str:
    """Return the checkout's commit, with ``+`` when there are changes, or ``unknown``."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return (head.stdout.strip() + "+" * bool(dirty.stdout.strip())) or "unknown"
