"""From a TOML experiment at a profile to a record with provenance."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy
import pandas as pd
import torch

import fedlib
from fedlib import datasets, files, paths
from fedlib.engine import convolution
from fedlib.engine.checks import checked_seeds
from fedlib.engine.cores import steady
from fedlib.errors import FedlibError, unknown
from fedlib.lab import locks
from fedlib.lab.evidence import ages, catalogue, claims, duration, freshness, records, tuning
from fedlib.lab.evidence.catalogue import profiles, settings
from fedlib.lab.evidence.records import Record
from fedlib.lab.job import Job, Outcome, study

MOST_SEEDS = 10_000  # side by side
A_WHILE = 5.0  # seconds of work that a killed run may lose count of


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
    *,
    seeds: int | Sequence[int] | None = None,
    device: str = "auto",
    out: str | Path = "runs",
    progress: bool = True,
    tf32: bool = False,
    until: float | None = None,
    replace: bool = False,
    changes: Mapping[str, Any] | None = None,
    announce: Callable[[duration.Plan], None] | None = None,
) -> Record:
    """Run an experiment and store its record.

    Parameters
    ----------
    paper, experiment, profile
        See :func:`fedlib.lab.evidence.catalogue.settings`.
    seeds
        A number of seeds, or the seeds themselves; default is the profile's number.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    out
        Folder for the record. An interrupted run leaves its checkpoints there and goes on
        from them when started again; the result is the same as without the interruption, on a GPU
        up to rounding.
    progress
        Show progress bars.
    tf32
        Let a GPU multiply in TF32, with eleven bits of mantissa instead of twenty-four. The
        manifest says so.
    until
        When to stop, by ``time.monotonic()``.
    replace
        Let the new record take the place of one with other seeds or settings.
    changes
        Other values for some settings, see :func:`fedlib.lab.evidence.catalogue.change`.
    announce
        Is told what is about to be run, when nothing is in its way, for
        :func:`fedlib.lab.evidence.duration.expect`; an error of its own keeps it from being run.

    Returns
    -------
    Record
        As :func:`fedlib.lab.evidence.records.load` would return it.

    Raises
    ------
    FedlibError
        For what cannot be run, a folder in which the same run is under way, or a record with other
        seeds or settings in the way.
    OutOfTime
        When the time is over first. The same call goes on from there.
    """
    if not isinstance(out, str | Path):
        raise FedlibError(f"out is a folder for the record, such as 'runs'; got {out!r}.")
    if not isinstance(changes, Mapping | None):
        raise FedlibError(f"changes are values by the name of a setting; got {changes!r}.")
    s = catalogue.change(settings(paper, experiment, profile), changes or {})
    catalogue.check_experiment(paper, experiment, profile, changes)
    if paper in paths.papers("claims.toml"):
        claims.claims_of(paper)  # what is wrong there is told now, not after the run
    numbers = choose_seeds(s, seeds)
    place = choose_device(device)
    home = records.folder(paper, out)
    tuned = _tuning(paper, s, profile, out)
    present = freshness.present_code(s)
    if not replace:
        _check_place(home / f"{experiment}.{profile}.json", s, numbers)
    set_precision(tf32)
    how = (s, numbers, place, tuned, *[tf32] * (place == "cuda"))
    mark = freshness.short_digest([repr(how), present["code"], present["cards"]])
    folder = home / f".{experiment}.{profile}.{mark}"
    rules, earlier = ages.rules(paper, experiment), ages.earlier(paper, experiment, profile, out)
    commit = _commit()
    used = tuning.apply(s, tuned["chosen"]) if tuned else s
    job = Job(used, numbers, place, folder, progress, until=until)
    lock = home / f".{experiment}.{profile}.lock"
    with locks.folder_for(home), locks.only_one(lock, f"{paper} {experiment}, profile {profile},"):
        spent = _seconds(folder)
        if announce is not None:
            announce(duration.Plan(paper, experiment, profile, s, job, out, spent[0]))
        try:
            with _counted(folder, *spent) as seconds, steady():
                outcome = study(s["kind"])(job)
        except KeyError as error:
            if not {*error.args} & (catalogue.reads(s) - {*s}):
                raise
            raise FedlibError(
                f"The study needs the setting {error} for what [{experiment}] asks it to do. Write "
                "it into experiments.toml, or give it with --set; where only other runs have it, "
                f"as --set RUN.{error.args[0]}=VALUE."
            ) from error
        wall, cores = seconds()
        check_outcome(outcome, s["kind"])
        manifest = {
            "paper": paper,
            "experiment": experiment,
            "profile": profile,
            "settings": s,
            "seeds": list(numbers),
            "wall_seconds": round(wall, 1),
            "cpu_seconds": round(cores, 1),
            "data": outcome.hashes,
            "fidelity": _fidelity(present["cards"]) if outcome.hashes else "none",
            "diverged": outcome.diverged,
            "rules": rules,
            **earlier,
            "small": _small(paper, experiment),
            **({"tuning": tuned} if tuned else {}),
            **present,
            **provenance(place, commit),
        }
        records.save(out, outcome.frame, manifest)
        for left in home.glob(f".{experiment}.{profile}.*/"):  # of earlier code or settings, too
            shutil.rmtree(left, ignore_errors=True)
        return records.load(paper, experiment, profile, out)


def check_outcome(outcome: Any, kind: str) -> None:
    """Refuse what a study returned, unless a record can be made of it."""
    if not isinstance(outcome, Outcome):
        raise FedlibError(
            f"A study returns Outcome(frame, diverged, hashes); {kind} returned "
            f"{type(outcome).__name__}."
        )
    for name, kinds in (("diverged", Mapping), ("hashes", str)):
        value = getattr(outcome, name)
        if not (isinstance(value, Mapping) and all(isinstance(v, kinds) for v in value.values())):
            asked = "{run: {seed: round}}" if kinds is Mapping else "{part: SHA-256}"
            raise FedlibError(f"{name} of an Outcome is {asked}; that of {kind} is {value!r}.")
    frame, wanted = outcome.frame, ["run", "seed", "split", "metric", "value"]
    columns = list(frame.columns) if isinstance(frame, pd.DataFrame) else []
    lacks = [f"column '{name}'" for name in wanted if name not in columns]
    if not lacks and frame.empty:
        lacks = ["rows"]
    if lacks:
        raise FedlibError(
            f"The frame of an Outcome is a table with the columns {', '.join(wanted)}, a number a "
            f"row; that of {kind} has no {lacks[0]}."
        )


def _check_place(page: Path, s: dict[str, Any], seeds: tuple[int, ...]) -> None:
    """Refuse to overwrite a record that is not the one about to be made."""
    try:
        stored = json.loads(page.read_text("utf-8"))
        then, now = stored["settings"], json.loads(json.dumps(s))
        differs = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        differs = [f"other settings ({', '.join(sorted(differs))})"] if differs else []
        if stored["seeds"] != list(seeds):
            differs.append(f"seeds {', '.join(map(str, stored['seeds']))}")
    except OSError:
        return  # there is none
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FedlibError(
            f"{page} is damaged, so which seeds are there already is not known. Choose another "
            "folder with --out, or overwrite it with --replace."
        ) from error
    if differs:
        raise FedlibError(
            f"{page} is there already, with {' and '.join(differs)}. Choose another folder with "
            "--out, or overwrite it with --replace."
        )


@contextmanager
def _counted(
    folder: Path, wall: float, cores: float
) -> Iterator[Callable[[], tuple[float, float]]]:
    """Count how long a run works, on top of earlier starts, and keep it beside its checkpoints."""
    began, busy, over = time.perf_counter(), time.process_time(), threading.Event()

    def so_far() -> tuple[float, float]:
        return wall + time.perf_counter() - began, cores + time.process_time() - busy

    def keep() -> None:
        if folder.is_dir():
            with suppress(FedlibError):  # what stops a run counts, and not this
                files.publish(folder / "seconds", "{:.3f} {:.3f}".format(*so_far()).encode())

    def keep_on() -> None:
        while not over.wait(A_WHILE):
            keep()

    clock = threading.Thread(target=keep_on, daemon=True)
    clock.start()
    try:
        yield so_far
    finally:
        over.set()
        clock.join()
        keep()


def _seconds(folder: Path) -> tuple[float, float]:
    """Return how long earlier starts of an unfinished run worked, by the clock and in all cores."""
    with contextlib.suppress(OSError, ValueError):  # none yet, or cut short: a stopwatch, no result
        wall, cores = (folder / "seconds").read_text("utf-8").split()
        return float(wall), float(cores)
    return 0.0, 0.0


def choose_seeds(s: dict[str, Any], seeds: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the seeds to run, which are those of tuning for a tuning experiment and no other.

    Raises
    ------
    FedlibError
        For none, for one given twice or below zero, and for one that is kept for the other use.
    """
    tunes, asked = "tunes" in s, s["seeds"] if seeds is None else seeds
    if isinstance(asked, Integral):
        if isinstance(asked, bool) or not 1 <= asked <= MOST_SEEDS:
            raise FedlibError(f"A number of seeds is 1 to {MOST_SEEDS}; got {asked}.")
        if tunes and seeds is not None and asked > len(tuning.TUNING_SEEDS):
            raise FedlibError(f"Tuning has {len(tuning.TUNING_SEEDS)} seeds; got {asked}.")
        asked = tuning.TUNING_SEEDS[:asked] if tunes else range(1, int(asked) + 1)
    if isinstance(asked, str):
        raise FedlibError(
            f"Seeds are a number of them or a list; got the text '{asked}'. papermill takes a list "
            "as -y 'seeds: [1, 2]'."
        )
    numbers = tuple(map(int, checked_seeds(asked)))
    if len(set(numbers)) < len(numbers):
        raise FedlibError(f"Seeds must be different; got {list(numbers)}.")
    kept = ", ".join(map(str, tuning.TUNING_SEEDS))
    if set(numbers) & set(tuning.TUNING_SEEDS) and not tunes:
        raise FedlibError(f"Seeds {kept} are kept for tuning. Choose others.")
    if tunes and set(numbers) - set(tuning.TUNING_SEEDS):
        raise FedlibError(f"Tuning has seeds of its own, {kept}; got {list(numbers)}.")
    return numbers


def _small(paper: str, experiment: str) -> str | None:
    """Return a hash of the code of the experiment's smoke run, None where there is none."""
    if "smoke" not in profiles(paper, experiment):
        return None
    return freshness.short_digest(
        freshness.present_code(settings(paper, experiment, "smoke"))["code"]
    )


def _tuning(paper: str, s: dict[str, Any], profile: str, out: str | Path) -> dict[str, Any]:
    """Return the tuned values that the settings ask for, and the record they come from."""
    if "tuned" not in s:
        return {}
    try:
        record = records.load(paper, s["tuned"], profile, out)
    except records.MissingRecord:
        record = records.load(paper, s["tuned"], profile)
    values = tuning.tuned_values(record.frame, s)
    return {"record": f"{s['tuned']}.{profile}", "rows": record.manifest["rows"], "chosen": values}


def obtain(
    paper: str,
    experiment: str,
    profile: str = "replay",
    seeds: int | Sequence[int] | None = None,
    device: str = "auto",
    out: str | Path | None = None,
) -> Record:
    """Return a record: stored for ``replay``; for any other profile run, if it is not there yet.

    A record that is there is taken when the present code, settings, seeds, tuning and kind of
    device made it. This is what the notebooks call; the command line calls :func:`run`. What is
    run, and takes more than seconds, first prints how long it is expected to take.
    """
    if profile == "replay":
        return records.load(paper, experiment, "largest", out)
    out = out or "runs"
    if held := records.find(paper, experiment, profile, out):
        m, wanted = held.manifest, choose_seeds(settings(paper, experiment, profile), seeds)
        on_cpu = choose_device(device) == "cpu"
        alike = m["seeds"] == list(wanted) and m["device"].startswith("CPU") == on_cpu
        if alike and held.state.word == "fresh":
            return held
    announce = None if profile == "smoke" else _announce
    return run(paper, experiment, profile, seeds=seeds, device=device, out=out, announce=announce)


def _announce(plan: duration.Plan) -> None:
    """Print how long a run is expected to take, unless that is seconds."""
    expected = duration.expect(plan)
    if expected.seconds is None or expected.left > 10:
        print(f"{plan.paper} {plan.experiment}, profile {plan.profile}: {expected}")


def check_again(paper: str, experiment: str, out: str | Path, progress: bool = True) -> str:
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
    present = settings(paper, experiment, "smoke")
    try:
        stored = records.load(paper, experiment, "smoke")
        old = stored.manifest
    except records.MissingRecord:
        old = {}
    made = run(
        paper, experiment, "smoke", seeds=old.get("seeds"), device="cpu", out=out, progress=progress
    )
    new = made.manifest
    if not old or freshness.judge_record(old | {"code": new["code"]}, present).word != "fresh":
        records.save(None, made.frame, new | freshness.stamp({}, new["code"]))
        return ""
    alike = (old["instructions"], old["versions"]["torch"]) == (
        new["instructions"], new["versions"]["torch"],
    )  # fmt: skip
    if differs := records.differences(stored.frame, made.frame, alike):
        return differs
    if alike and old["data"] != new["data"]:
        return f"the same rows from other data: {new['data']}, not {old['data']}"
    noted = old | freshness.stamp(old, old["code"])  # which made the stored rows
    noted |= freshness.stamp(noted, new["code"])
    if old["versions"] == new["versions"]:
        here = {new["instructions"].split(",")[0]: freshness.short_digest(new["code"])}
        noted["tried"] = old.get("tried", {}) | here
    if noted != old:
        records.save(None, stored.frame, noted)
    return ""


def _fidelity(names: Iterable[str]) -> str:
    """Return ``canonical`` when every file is the release itself, else what it is."""
    kinds = {row["fidelity"] for name in names for row in datasets.verify(name)} - {"", "canonical"}
    return ", ".join(sorted(kinds)) or "canonical"


def set_precision(tf32: bool) -> None:
    """Let products and convolutions on a GPU round their factors to TF32, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def provenance(device: str, commit: str | None = None) -> dict[str, Any]:
    """Return what every stored number is kept with: device, versions, commit and date.

    On a GPU also whether TF32 was allowed, and which way of convolving was chosen for which shapes.
    The commit is the present one, unless it is given.
    """
    versions = {
        "fedlib": fedlib.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    gpu = {"tf32": torch.backends.cuda.matmul.allow_tf32, "convolutions": convolution.choices()}
    return {
        **(gpu if device == "cuda" else {}),
        "device": _device_name(device),
        "instructions": f"{torch.backends.cpu.get_cpu_capability()}, {_processor()}",
        "versions": versions,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def _processor() -> str:
    """Return the processor's maker, family and model: libraries choose their products by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    known = [facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts]
    return " ".join(known) or platform.machine()


def _commit() -> str:
    """Return the checkout's commit, with ``+`` when the package has changes, or ``unknown``."""
    home = Path(fedlib.__file__).parent
    if not ages.git(home, "ls-files", "."):  # it lies in a project that does not keep it
        return "unknown"
    head, changes = (
        ages.git(home, *command).decode().strip()
        for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "."])
    )
    return head + "+" * bool(changes) if head else "unknown"
