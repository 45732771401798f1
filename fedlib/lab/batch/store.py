"""What a batch has come to: a table of its jobs, one store of their rows, a picture."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from fedlib import files
from fedlib.errors import FedlibError, unknown
from fedlib.lab.batch import work
from fedlib.lab.batch.grid import COLUMNS, BatchJob
from fedlib.paths import expand

PAGE = "jobs.json"
WRITABLE = "Make it writable, or copy the batch's folder to where you can write."
TICKS = 8  # values of an axis that are written out


def keep(folder: Path, jobs: list[BatchJob]) -> None:
    """Write down which jobs a folder is for, unless it says so already."""
    page = json.dumps([asdict(job) for job in jobs], indent=1) + "\n"
    if not (folder / PAGE).is_file() or (folder / PAGE).read_text("utf-8") != page:
        files.publish(folder / PAGE, page.encode())


def jobs(folder: str | Path) -> list[BatchJob]:
    """Return the jobs that a folder is for.

    Raises
    ------
    FedlibError
        When it is no folder of a batch.
    """
    page = expand(folder, "The folder") / PAGE
    try:
        entries = json.loads(page.read_text("utf-8"))
        return [BatchJob(**{**job, "seeds": tuple(job["seeds"])}) for job in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"its {PAGE} cannot be read" if page.exists() else f"it has no {PAGE}"
        raise FedlibError(
            f"{folder} is no folder of a batch: {why}. "
            "`fedlib batch run GRID.toml --out DIR` makes one."
        ) from error


def status(folder: str | Path) -> pd.DataFrame:
    """Return a row a job, see :func:`job_table`, and keep the table as ``jobs.csv``."""
    table = job_table(folder)
    write_table(folder, table)
    return table


def write_table(folder: str | Path, table: pd.DataFrame) -> None:
    """Keep a table as ``jobs.csv``."""
    files.publish(expand(folder, "The folder") / "jobs.csv", table.to_csv(index=False).encode())


def job_table(folder: str | Path) -> pd.DataFrame:
    """Return a row a job, and write nothing.

    Returns
    -------
    pandas.DataFrame
        ``job``, its id; a column for each axis; ``status``: done, failed or waiting; ``seconds``;
        ``headline``; ``why`` it failed.
    """
    rows, every, folder = [], jobs(folder), expand(folder, "The folder")
    for job in every:
        state = {"why": ""} | work.state(folder, job)
        columns = {key: state[key] for key in COLUMNS[1:]}
        rows.append({"job": job.id, **_values(job, every), **columns})
    return pd.DataFrame(rows)


def _values(job: BatchJob, every: list[BatchJob]) -> dict[str, Any]:
    """Return a job's value on every axis of the batch, None where it has none."""
    names = dict.fromkeys(name for other in every for name in other.axes)
    plain = {k: v if isinstance(v, str | int | float | bool) else str(v)
             for k, v in job.axes.items()}  # fmt: skip
    return {name: plain.get(name) for name in names}


def lacking(folder: str | Path) -> str:
    """Say which headline finished records lack, and what they have; empty when all is well."""
    every, folder = jobs(folder), expand(folder, "The folder")
    for job in every:
        state = work.state(folder, job)
        if job.notebook or state["status"] != work.DONE or state["headline"] is not None:
            continue
        rows = work.record(folder, job).frame
        run = job.headline.get("run", rows["run"].iloc[0])
        rows = rows[rows["run"] == run]
        there = sorted(set(rows["split"] + " " + rows["metric"]))
        if _name(job) not in there:
            return (
                f"[headline]: run '{run}' has no {_name(job)}. "
                f"It has: {', '.join(there) or 'nothing'}."
            )
    return ""


def collect(folder: str | Path) -> Path:
    """Put the rows of all finished jobs into one table, with their manifests beside it.

    Returns
    -------
    Path
        ``store/rows.csv.gz``: the rows of the records in the order of the jobs, with the columns
        ``job`` and one for each axis in front. ``store/manifests`` has a file for each job. The
        rows are the same, byte for byte, however often the batch was interrupted.

    Raises
    ------
    FedlibError
        When no job of an experiment is finished.
    """
    folder, frames, pages, every = expand(folder, "The folder"), [], {}, jobs(folder)
    if all(job.notebook for job in every):
        raise FedlibError(f"The jobs in {folder} are notebooks, which have no rows to collect.")
    for job in every:
        if job.notebook or work.state(folder, job)["status"] != work.DONE:
            continue
        record = work.record(folder, job)
        axes = _values(job, every)
        names = {f"axis {k}" if k in record.frame else k: v for k, v in axes.items()}
        frame = record.frame.copy()
        for at, (name, value) in enumerate({"job": job.id, **names}.items()):
            frame.insert(at, name, value)
        frames.append(frame)
        pages[job.id] = json.dumps(record.manifest, indent=1, sort_keys=True) + "\n"
    if not frames:
        raise FedlibError(f"No experiment in {folder} is finished: there are no rows to collect.")
    home = files.make_folder(folder / "store" / "manifests", WRITABLE)
    for other in {path.stem for path in home.glob("*.json")} - {*pages}:
        (home / f"{other}.json").unlink()
    for name, page in pages.items():
        files.publish(home / f"{name}.json", page.encode(), WRITABLE)
    rows = pd.concat(frames).to_csv(index=False, float_format="%.7g").encode()
    target = folder / "store" / "rows.csv.gz"
    files.publish(target, gzip.compress(rows, mtime=0), WRITABLE)
    return target


def plot(folder: str | Path, x: str | None = None, by: str | None = None) -> Any:
    """Draw the headline against one axis, a line for each value of another.

    Parameters
    ----------
    x, by
        Names of axes; default: the first two with more than one value, seeds left aside. Points
        are means over all other axes, bars their smallest and largest value. A point is left out,
        and named in the title, when a finished job of it has no headline, as one that diverged.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    FedlibError
        For an unknown axis, one taken twice, or when no job has a headline.
    """
    import matplotlib.pyplot as plt

    from fedlib.lab.show import plotting

    table = job_table(folder)
    axes = list(table.columns[1:-4])
    for name in (x, by):
        if name is not None and name not in axes:
            raise unknown("axis", name, axes)
    if x is not None and x == by:
        raise FedlibError(f"--x and --by are both '{x}': take two axes.")
    free = [n for n in axes if table[n].nunique() > 1 and n not in ("seed", "seeds", x, by)]
    x = x or (free.pop(0) if free else (axes or [None])[0])
    by = by or (free.pop(0) if free else None)
    lost = (table["status"] == work.DONE) & table["headline"].isna()
    table = table[lost | table["headline"].notna()]
    if lost[table.index].all() or x is None:
        why = lacking(folder) or "no job has one, or none has an axis."
        raise FedlibError(f"There is no headline to draw in {folder}: {why}")
    if not pd.api.types.is_numeric_dtype(table[x]):  # numbers and words on one axis
        table = table.assign(**{x: table[x].map(str, na_action="ignore")})
    figure, axis = plt.subplots()
    values = table[by].dropna().unique() if by else [None]
    for value, look in plotting.sweep(values, f"{by} = {{}}").items():
        part = table[table[by] == value] if by else table
        ends = part.groupby(x)["headline"].agg(["mean", "min", "max"])
        ends = ends.drop(part.loc[part["headline"].isna(), x].unique())
        reach = [ends["mean"] - ends["min"], ends["max"] - ends["mean"]]
        label = look.label if by else None
        axis.errorbar(ends.index, ends["mean"], yerr=reach, capsize=3, label=label, **look.line)
    numeric, at = pd.api.types.is_numeric_dtype(table[x]), table[x]
    if numeric and at.min() > 0 and at.max() >= 10 * at.min():
        axis.set_xscale("log")
    if numeric and at.nunique() <= TICKS:
        axis.minorticks_off()
        ticks = sorted(at.unique())
        axis.set_xticks(ticks, [f"{v:g}" for v in ticks])
    first = jobs(folder)[0]
    axis.set(xlabel=x, ylabel="headline" if first.notebook else f"{_name(first)}, at the end")
    if lost.any():
        without = table.loc[lost[table.index], [x, *[by] * bool(by)]].drop_duplicates()
        points = [", ".join(f"{k} = {v}" for k, v in row.items()) for _, row in without.iterrows()]
        named = "; ".join(points[:3]) + f" and {len(points) - 3} more" * (len(points) > 3)
        axis.set_title(f"not drawn, a job has no number: {named}", size="small")
    if by:
        axis.legend()
    return figure


def _name(job: BatchJob) -> str:
    """Return what the headline of an experiment's job is called."""
    return f"{job.headline['split']} {job.headline['metric']}"
