"""Which method, when: the records of the matrix as one table, one picture, and a row of one's own.

A cell is a situation at one value of its knob. In it a method stands for all its settings by the
one whose training loss was lowest on the tuning seeds; the two adaptive servers, which differ in
how fast they forget, count as one method.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

from fedlib.errors import FedlibError, unknown
from fedlib.files import digest
from fedlib.lab.evidence import (
    catalogue,
    duration,
    experiments,
    freshness,
    measures,
    records,
    tuning,
)
from fedlib.lab.evidence.records import Record
from fedlib.lab.job import study
from fedlib.lab.show import plotting

PAPER = "methods"
TUNING = "rates-"  # before the name of a situation: the experiment that tunes it
LATE = {"cycles": 0.5, "come-and-go": 0.2}  # last share of the run that is judged; else a tenth
KNOBS = {
    "everybody": "samples from anywhere",
    "sampled": "samples from anywhere",
    "cycles": "rounds of a window",
    "come-and-go": "times more rarely",
    "slow": "times slower",
    "opposite": "share with opposite labels",
    "writers": "writers a round",
    "plays": "roles a round",
}
"""What the knob of each situation is."""

ENDS = ["situation", "knob", "method", "run", "each", "accuracy"]
SMALLEST = 0.01  # accuracy: below it a difference is no reason to choose
LEVEL = 0.05  # of a false alarm in a cell, all pairs of methods together
TINTS = (plotting.BLUE, plotting.ORANGE, plotting.GREEN, plotting.PURPLE, plotting.VERMILION)
GRADE = {"FedAdam": "adaptive server", "FedYogi": "adaptive server"}


def label(run: Mapping[str, Any]) -> str:
    """Return the method that a run is of: its name without the values of knob and strength."""
    name = run["run"].rpartition(" at ")[0]
    name = name.rpartition(", ")[0] if "strength" in run else name
    first, *rest = name.split(", ")
    return ", ".join([GRADE.get(first, first), *rest])


def ends(load: Callable[[str], Record], names: Sequence[str] | None = None) -> pd.DataFrame:
    """Return how every method ends in every cell for which there are records.

    Parameters
    ----------
    load
        Returns the record of an experiment, by its name.
    names
        Situations; default is all.

    Returns
    -------
    pandas.DataFrame
        A row a cell and method: ``situation``, ``knob``, ``method``; ``run``, which setting stands
        for it; ``each``, its test accuracy at the end by seed, 0 where it diverged; ``accuracy``,
        their mean.
    """
    rows = []
    for name in names or KNOBS:
        try:
            tuned, record = load(TUNING + name), load(name)
        except records.MissingRecord:
            continue
        losses = tuning.table(tuned.frame).set_index("method")["loss"]
        runs = pd.DataFrame(record.manifest["settings"]["runs"])
        runs["method"] = [label(run.dropna().to_dict()) for _, run in runs.iterrows()]
        runs["loss"] = losses.reindex(runs["run"]).to_numpy()
        best = runs.loc[runs.groupby(["knob", "method"], sort=False)["loss"].idxmin()]
        for _, run in best.iterrows():
            share = LATE.get(name, measures.FINAL)
            each = measures.last(record, run["run"], "accuracy", "test", share).fillna(0.0)
            rows.append(dict(situation=name, **run[["knob", "method", "run"]], each=each,
                             accuracy=each.mean()))  # fmt: skip
    return pd.DataFrame(rows, columns=ENDS)


def cells(found: pd.DataFrame) -> pd.DataFrame:
    """Return what each cell says: who is best, and who is not told from it.

    Differences are paired by seed; their t-intervals hold for all pairs of a cell together.

    Returns
    -------
    pandas.DataFrame
        A row a cell: ``situation``, ``knob``; ``best``, the method with the highest mean;
        ``second``; ``behind``, by how much, in accuracy; ``level``, the methods whose difference
        from the best may be zero, or is below one point; ``sure``, whether there are none.
    """
    rows = []
    for (name, knob), cell in found.groupby(["situation", "knob"], sort=False):
        cell = cell.sort_values("accuracy", ascending=False)
        best, pairs = cell.iloc[0], len(cell) * (len(cell) - 1) / 2
        level = []
        for _, other in cell.iloc[1:].iterrows():
            gap = best["each"] - other["each"]
            error = gap.std() / np.sqrt(len(gap))
            low = gap.mean() - stats.t.ppf(1 - LEVEL / 2 / pairs, len(gap) - 1) * error
            if not (low > 0 and gap.mean() >= SMALLEST):
                level.append(other["method"])
        rows.append(dict(
            situation=name, knob=knob, best=best["method"], accuracy=best["accuracy"],
            second=cell.iloc[1]["method"], behind=best["accuracy"] - cell.iloc[1]["accuracy"],
            level=level, sure=not level,
        ))  # fmt: skip
    said = ["situation", "knob", "best", "accuracy", "second", "behind", "level", "sure"]
    return pd.DataFrame(rows, columns=said)


def draw(said: pd.DataFrame) -> None:
    """Draw the matrix: the best method of each cell, how far the second is, white where open.

    Parameters
    ----------
    said
        What :func:`cells` returns.
    """
    names = list(dict.fromkeys(said["situation"]))
    sure = [best.split(", ")[0] for best in said.loc[said["sure"], "best"]]
    colors = dict(zip(dict.fromkeys(sure), itertools.cycle(TINTS), strict=False))
    ax = plt.subplots(figsize=(8.3, 0.7 * len(names) + 0.4))[1]
    for i, name in enumerate(names):
        ax.text(-0.03, i + 0.5, f"{name}\n", ha="right", va="center", weight="bold", size="small")
        ax.text(-0.03, i + 0.5, f"\n{KNOBS[name]}", ha="right", va="center", size="x-small")
        for j, (_, cell) in enumerate(said[said["situation"] == name].iterrows()):
            shade = colors[cell["best"].split(", ")[0]] if cell["sure"] else "none"
            box = plt.Rectangle((j, i), 1, 1, fc=shade, alpha=0.25, lw=0)
            ax.add_patch(box)
            ax.add_patch(plt.Rectangle((j, i), 1, 1, fc="none", ec="0.6", lw=0.8))
            ax.text(j + 0.02, i + 0.08, f"{cell['knob']:g}", size="x-small", va="top")
            middle = dict(ha="center", va="center")
            ax.text(j + 0.5, i + 0.42, cell["best"], weight="bold", size="small", **middle)
            ax.text(j + 0.5, i + 0.75, beside(cell), size="x-small", **middle)
    ax.set(xlim=(0, 3), ylim=(len(names), 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def beside(cell: Mapping[str, Any]) -> str:
    """Return in words who comes next, and whether that can be told from the best."""
    if cell["sure"]:
        return f"{100 * cell['behind']:.1f} points before {cell['second']}"
    first, *more = cell["level"]
    return f"or {first}" + f" or {len(more)} more" * bool(more)


def firsts(said: pd.DataFrame) -> Counter[str]:
    """Return in how many cells each method is best; one with few steps for all is the same one."""
    return Counter(said["best"].str.removesuffix(", few steps"))


def in_short(said: pd.DataFrame) -> str:
    """Return in two sentences which method is best in how many cells, and how often others may be.

    Parameters
    ----------
    said
        What :func:`cells` returns.
    """
    first = ", ".join(f"{name} in {n}" for name, n in firsts(said).most_common())
    unsure = (~said["sure"]).sum()
    cells = f"Of {len(said)} cells, each a situation at one value of its knob, the best is {first}."
    return f"{cells} In {unsure} another cannot be told from it."


def _own_runs(method: str, name: str, profile: str, strengths: Sequence[float]) -> list[dict]:
    """Return the runs of a method of one's own in a situation: its knobs, and each strength."""
    short = method.rpartition(":")[2]
    knobs = dict.fromkeys(r["knob"] for r in catalogue.settings(PAPER, name, profile)["runs"])
    runs = []
    for knob, strength in itertools.product(knobs, strengths or [None]):
        words = "" if strength is None else f", strength = {strength:g}"
        more = {} if strength is None else {"strength": strength}
        runs.append(dict(run=f"{short}{words} at {knob}", method=method, knob=knob, **more))
    return runs


def enter(
    method: str,
    profile: str = "quick",
    *,
    strengths: Sequence[float] = (),
    out: str | Path = "matrix",
    names: Sequence[str] | None = None,
    seeds: int | None = None,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> pd.DataFrame:
    """Tune and run a method of one's own in every situation, and compare it with the book's.

    Interrupted, it goes on when called again.

    Parameters
    ----------
    method
        ``"package.module:function"``, a function of
        :class:`~fedlib.lab.studies.methods.Conditions` that returns an algorithm.
    profile
        The size; the book's own records are there for ``"quick"``.
    strengths
        Values of the method's own setting, ``setup.strength``, of which tuning chooses one.
    out
        Folder in which each version of the method's code gets a folder, for its records.
    names
        Situations; default is all.
    seeds
        How many runs are judged by, at least; default is the profile's. Tuning has its own. Methods
        are compared over the seeds that the book's record has, too.
    say
        Is given a line for each cell.
    progress
        Show progress bars.

    Returns
    -------
    pandas.DataFrame
        As :func:`ends`, with the book's methods and one's own, for every situation in which tuning
        finds a rate for it.

    Raises
    ------
    FedlibError
        For a method that cannot be imported or is no algorithm, an unknown profile or situation.
    """
    every = list(names or KNOBS)
    for name in every:
        if name not in KNOBS:
            raise unknown("situation", name, KNOBS)
    if ":" not in method:
        raise FedlibError(f"A method is 'package.module:function'; got '{method}'.")
    try:
        function = study(method)
    except FedlibError as error:
        if isinstance(error.__cause__, SyntaxError):
            raise  # there is a file, and Python says what is wrong in it
        raise FedlibError(
            f"The method '{method}' cannot be found ({error.__cause__}). Its file lies in the "
            "folder where you are, or is installed."
        ) from error
    try:
        inspect.signature(function).bind("setup")
    except TypeError as error:
        raise FedlibError(
            f"{method} cannot be called with one argument ({error}). A method is "
            "def method(setup), which returns an algorithm."
        ) from error
    for name in every:
        if records.find(PAPER, name, profile) is None:
            raise FedlibError(
                f"The book has no records of '{name}' at the profile '{profile}' to compare with; "
                "it has those of 'quick' and 'smoke'."
            )
    home, tables = Path(out) / f"{method.rpartition(':')[2]}-{_version(method, function)}", []
    tried = {name: _own_runs(method, name, profile, strengths) for name in every}
    say(f"As the book's records say, this takes {_expected(tried, profile, seeds)}, less what is "
        "there already.")  # fmt: skip
    for name, runs in tried.items():
        try:
            for experiment, more, some in _pair(name, seeds):
                changes = {"runs": [run | more for run in runs]}
                if not _there(experiment, profile, some, home, changes):
                    experiments.run(
                        PAPER, experiment, profile, seeds=some, out=home, changes=changes,
                        progress=progress, replace=True,
                    )  # fmt: skip
        except tuning.AtEdge as error:
            losses = tuning.table(records.load(PAPER, TUNING + name, profile, home).frame)["loss"]
            lost = "It diverges at every rate of its grid."
            why = lost if np.isinf(losses).any() else f"{error} Does it use setup.lr?"
            say(f"{name}: no place. {why}")
            continue
        except Exception as error:
            if not strengths and "None" in str(error):
                error.add_note("setup.strength is None: no --strength was given.")
            raise
        own = ends(lambda n: records.load(PAPER, n, profile, home), [name])
        book = ends(lambda n: records.load(PAPER, n, profile), [name])
        own, book = _of_the_same_seeds(own, book)
        if own["method"].iloc[0] in set(book["method"]):  # another of the same name
            own["method"] = method
        tables += [both := pd.concat([book, own], ignore_index=True)]
        for line in _lines(both, own["method"].iloc[0]):
            say(line)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=ENDS)


def _of_the_same_seeds(own: pd.DataFrame, book: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield two tables of :func:`ends` with the seeds that both have."""
    same = own["each"].iloc[0].index.intersection(book["each"].iloc[0].index)
    for table in (own, book):
        each = [values[same] for values in table["each"]]
        yield table.assign(each=each, accuracy=[values.mean() for values in each])


def _pair(name: str, seeds: int | None) -> list[tuple[str, dict[str, Any], int | None]]:
    """Return the experiment that tunes a situation, and the one that judges it."""
    return [(TUNING + name, {}, None), (name, {"lr": "tuned"}, seeds)]


def _expected(tried: Mapping[str, list[dict]], profile: str, seeds: int | None) -> str:
    """Return in words how long runs take, if as long each as those of the book's records."""
    seconds = 0.0
    for name, runs in tried.items():
        for experiment, _, some in _pair(name, seeds):
            if record := records.find(PAPER, experiment, profile):
                m = record.manifest
                share = len(runs) / len(m["settings"]["runs"])
                seconds += share * m["wall_seconds"] * (some or len(m["seeds"])) / len(m["seeds"])
    return f"about {duration.time_in_words(seconds)}" if seconds else "a time that is not known"


def _version(method: str, function: Callable) -> str:
    """Return a short hash of a method's code, with what it uses of one's own files."""
    page = Path(inspect.getsourcefile(function) or "")
    if not page.is_file():
        return digest(function)[:8]  # which a notebook has in no file
    reached = freshness.code(method)
    own = {name: code for name, code in reached.items() if not name.startswith("fedlib.")}
    return digest(sorted((own or reached).items()))[:8]


def _there(name: str, profile: str, seeds: int | None, home: Path, changes: dict) -> bool:
    """Say whether a folder holds the record of these settings already, of these seeds or more."""
    asked = catalogue.change(catalogue.settings(PAPER, name, profile), changes)
    try:
        manifest = records.load(PAPER, name, profile, home).manifest
    except records.MissingRecord:
        return False
    wanted = {*experiments.choose_seeds(asked, seeds)}
    return manifest["settings"] == asked and wanted <= {*manifest["seeds"]}


def _lines(both: pd.DataFrame, mine: str) -> list[str]:
    """Return a line for each cell of a situation: where one's own method stands."""
    lines = []
    for (name, knob), cell in both.groupby(["situation", "knob"], sort=False):
        order = cell.sort_values("accuracy", ascending=False).reset_index()
        place = int(order.index[order["method"] == mine][0]) + 1
        top = order[order["method"] != mine].iloc[:1]
        rest = "".join(f"; {t.method} {100 * t.accuracy:.1f}" for t in top.itertuples())
        own = 100 * order["accuracy"][place - 1]
        lines.append(f"{name}, {knob:g} {KNOBS[name]}: {own:.1f}, place {place} of {len(order)}"
                     f"{rest}")  # fmt: skip
    return lines


def costs(record: Record) -> pd.DataFrame:
    """Return what each method of a record has spent: gradients, models sent and models kept.

    Returns
    -------
    pandas.DataFrame
        A row a method, means over its runs and seeds.
    """
    frame = record.frame[record.frame["split"] == "spent"]
    of = {run["run"]: label(run) for run in record.manifest["settings"]["runs"]}
    mean = frame.groupby([frame["run"].map(of), "metric"], sort=False)["value"].mean()
    return mean.unstack("metric")[["gradients", "models", "kept"]]

