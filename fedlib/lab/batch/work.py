"""One unit of a batch, carried out in a folder: it is all there at the end, or can go on."""

from __future__ import annotations

import errno
import json
import math
import shutil
import time
import traceback
from collections import ChainMap
from pathlib import Path
from typing import Any

from fedlib import files
from fedlib.errors import FedlibError
from fedlib.lab import locks
from fedlib.lab.batch.grid import BatchJob
from fedlib.lab.batch.units import Unit, together
from fedlib.lab.evidence import ages, freshness, measures, records
from fedlib.lab.evidence.records import Record

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
DONE, FAILED, WAITING = "done", "failed", "waiting"


def place(folder: Path, job: BatchJob) -> Path:
    """Return the folder of a job."""
    return folder / "jobs" / job.id


def state(folder: Path, job: BatchJob) -> dict[str, Any]:
    """Return what is known of a job: ``status``, ``seconds``, ``headline`` and, if failed, why."""
    try:
        stored = json.loads((place(folder, job) / "state.json").read_text("utf-8"))
        if stored["status"] != DONE:
            return stored | {"headline": None}
        number = headline(folder, job)
        if number is not None and math.isfinite(number):
            return stored | {"headline": number}
        lost = not job.notebook and (number is not None or record(folder, job).manifest["diverged"])
        return stored | {"headline": None} | ({"why": "diverged"} if lost else {})
    except (OSError, ValueError, KeyError, FedlibError):  # never begun, or not to be read
        return {"status": WAITING, "seconds": None, "headline": None}


def carry_out_unit(unit: Unit, folder: Path) -> dict[str, str]:
    """Carry a unit out and write its jobs' results; an error is kept with its job.

    A unit of several jobs that fails is carried out once more job by job, so that one bad job does
    not take others with it.

    Returns
    -------
    dict
        Every job's status by its id.
    """
    began, spent = time.perf_counter(), None
    try:
        if unit.jobs[0].notebook:
            _run_notebook(unit.jobs[0], folder)
        else:
            spent = _run_experiment(unit, folder)
        message = why = ""
    except locks.UnderWay:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in FULL:
            if isinstance(error, FedlibError):  # which says where
                raise
            raise files.cannot_write(folder, cause) from error
        message = f"{error}\n" if isinstance(error, FedlibError) else traceback.format_exc()
        why = _in_short(error)
    if message and len(unit.jobs) > 1:
        each = [carry_out_unit(Unit((job,)), folder) for job in unit.jobs]
        return dict(ChainMap(*each))
    seconds = (time.perf_counter() - began if spent is None else spent) / len(unit.jobs)
    if message:
        return fail(unit, folder, message, why, seconds)
    for job in unit.jobs:
        _write(folder, job, status=DONE, seconds=seconds)
        (place(folder, job) / "error.txt").unlink(missing_ok=True)
    shutil.rmtree(folder / "units" / unit.id, ignore_errors=True)
    return {job.id: DONE for job in unit.jobs}


def _in_short(error: Exception) -> str:
    """Return the kind of an error and its first line; fedlib's own say enough without a kind."""
    name, said = type(error).__name__, str(error)
    if hasattr(error, "ename"):
        name, said = error.ename, error.evalue
    line = said.strip().partition("\n")[0]
    return line if line and isinstance(error, FedlibError) else f"{name}: {line}"


def fail(
    unit: Unit, folder: Path, message: str, why: str = "", seconds: float = 0.0
) -> dict[str, str]:
    """Note that a unit has failed, or that its worker is gone; what is done of it stays done."""
    lost = [job for job in unit.jobs if state(folder, job)["status"] != DONE]
    for job in lost:
        home = files.make_folder(place(folder, job))
        files.publish(home / "error.txt", message.encode())
        short = why or message.partition("\n")[0]
        _write(folder, job, status=FAILED, seconds=seconds, why=short)
    return {job.id: FAILED if job in lost else DONE for job in unit.jobs}


def _write(folder: Path, job: BatchJob, seconds: float, **state: Any) -> None:
    home = files.make_folder(place(folder, job))
    state |= {"axes": job.axes, "seconds": round(seconds, 2)}
    page = json.dumps(state, indent=1, sort_keys=True) + "\n"
    files.publish(home / "state.json", page.encode())


# ------------------------------------------------------------------ notebooks


def _run_notebook(job: BatchJob, folder: Path) -> None:
    import papermill

    home = files.make_folder(place(folder, job))
    parameters = dict(job.parameters)
    if "out" in papermill.inspect_notebook(job.notebook):
        parameters.setdefault("out", str(home))
    papermill.execute_notebook(
        job.notebook, str(home / "notebook.ipynb"), parameters,
        progress_bar=False, cwd=str(Path(job.notebook).parent),
    )  # fmt: skip


# ------------------------------------------------------------------ experiments


def _run_experiment(unit: Unit, folder: Path) -> float:
    """Run a unit's jobs as rows of one run, and give each its record.

    Returns
    -------
    float
        Seconds, those of earlier starts included.
    """
    from fedlib.lab.evidence import experiments

    first = unit.jobs[0]
    home = folder / "units" / unit.id
    changes, names = together(unit)
    whole = experiments.run(
        first.paper, first.experiment, first.profile, seeds=unit.seeds, device=first.device,
        out=home, progress=False, replace=True, changes=changes,
    )  # fmt: skip
    for job in unit.jobs:
        mine = {name: run for name, (variant, run) in names.items() if variant == job.variant}
        _give(unit, job, whole, mine or {name: name for name in whole.frame["run"]}, folder)
    return whole.manifest["wall_seconds"]


def _give(unit: Unit, job: BatchJob, whole: Record, mine: dict[str, str], folder: Path) -> None:
    """Store the record that a job would have made by itself; ``mine`` are its runs' own names."""
    rows, m = whole.frame, whole.manifest
    if set(rows["seed"]) <= set(unit.seeds):  # a study without chance has rows of its own
        rows = rows[rows["seed"].isin(job.seeds)]
    rows = rows.assign(run=rows["run"].map(mine)).dropna(subset="run")
    diverged: dict[str, dict[str, int]] = {}
    for name in m["diverged"].keys() & mine.keys():
        lost = {seed: t for seed, t in m["diverged"][name].items() if int(seed) in job.seeds}
        if lost:
            diverged[mine[name]] = lost
        if len(lost) == len(job.seeds):  # by itself it would have ended there
            rows = rows[(rows["run"] != mine[name]) | (rows["round"] <= max(lost.values()))]
    beside = [other.id for other in unit.jobs if other is not job]
    manifest = m | {
        "settings": job.settings, "seeds": list(job.seeds), "diverged": diverged,
        **{key: round(m[key] / len(unit.jobs), 1) for key in ("wall_seconds", "cpu_seconds")},
        **ages.earlier(job.paper, job.experiment, job.profile, place(folder, job)),
        **freshness.present_code(job.settings), **({"beside": beside} if beside else {}),
    }  # fmt: skip
    records.save(place(folder, job), rows.reset_index(drop=True), manifest)


def record(folder: Path, job: BatchJob) -> Record:
    """Return a finished job's record."""
    return records.load(job.paper, job.experiment, job.profile, place(folder, job))


def headline(folder: Path, job: BatchJob) -> float | None:
    """Return the number by which jobs are compared, None where there is none.

    For an experiment it is the mean over seeds and the last tenth of a run, and not finite where a
    run is lost (:func:`fedlib.lab.evidence.measures.last`); for a notebook, the number that the
    last line of the output of its cell tagged ``headline`` ends in.
    """
    try:
        if job.notebook:
            return _printed(place(folder, job) / "notebook.ipynb")
        stored = record(folder, job)
        asked = {"run": stored.frame["run"].iloc[0], **job.headline}
        return float(measures.last(stored, **asked).mean(skipna=False))
    except (FedlibError, KeyError, ValueError, IndexError):
        return None


def _printed(path: Path) -> float:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    (cell,) = (c for c in cells if "headline" in c["metadata"].get("tags", []))
    texts = [
        "".join(out.get("text") or out.get("data", {}).get("text/plain", ""))
        for out in cell["outputs"]
    ]
    return float("".join(texts).split()[-1])
