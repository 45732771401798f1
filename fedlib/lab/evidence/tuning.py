"""Tuning: the same grid for each method, on seeds that are used for nothing else.

A tuning experiment names another study and a setting of its runs. Each method, that is each run,
is tried at every value of a grid, and the grid grows by half a decade at either end until the best
value of every method lies inside it. The choice is the record of that experiment; an experiment
with ``tuned = "NAME"`` takes its values from there.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NotRequired

import pandas as pd

from fedlib.errors import FedlibError
from fedlib.lab.job import Job, Outcome, Settings, study

TUNING_SEEDS = (1001, 1002, 1003)
HALF_DECADE = math.sqrt(10)
MOST = 15  # values; a method whose best value is still at the edge then has none
SHARE = 1 / 3  # of the run, at its end, over whose looks the loss is averaged
VALIDATION = "validation"  # samples of the tuning seeds that are learned from by nobody


class AtEdge(FedlibError):
    """A method's best value lies at the edge of the widest grid, so that it has none."""


class Grid(Settings):
    """What tuning adds to the settings of the study that it runs."""

    study: str  # its kind
    tunes: str  # the setting that is tried
    grid: list[float]  # the first values of it
    by: NotRequired[str]  # "test" where each client is judged by a model of its own: the samples
    # held out from the tuning seeds decide, and are called validation in the record


def grid(job: Job[Grid]) -> Outcome:
    """Run every method of a study over a grid of one setting, extended until it holds the best.

    The runs are the methods. Rows have the columns ``method`` and ``at`` beside those of the study.
    """
    s = job.settings
    values, more, parts, diverged = set(), {*s["grid"]}, [], {}
    while more:
        values |= more
        found = _at(job, sorted(more))
        parts.append(found.frame)
        diverged |= found.diverged
        frame = pd.concat(parts, ignore_index=True)
        best, (low, high) = table(frame)["at"], (min(values), max(values))
        more = {low / HALF_DECADE} if (best == low).any() else set()
        more |= {high * HALF_DECADE} if (best == high).any() else set()
        if len(values) + len(more) > MOST:
            break
    return Outcome(frame, diverged, found.hashes)


def _at(job: Job, values: list[float]) -> Outcome:
    """Run every method at some values, side by side as far as the study can."""
    s = job.settings
    asked = {_name(run["run"], v): (run, v) for v in values for run in s["runs"]}
    runs = [{**run, "run": name, s["tunes"]: v} for name, (run, v) in asked.items()]
    out = study(s["study"])(replace(job, settings={**s, "runs": runs}))
    if s.get("by") == "test":
        out.frame["split"] = out.frame["split"].replace("test", VALIDATION)
    method = out.frame["run"].map({name: run["run"] for name, (run, _) in asked.items()})
    at = out.frame["run"].map({name: v for name, (_, v) in asked.items()})
    return Outcome(out.frame.assign(method=method, at=at), out.diverged, out.hashes)


def _name(method: str, value: float) -> str:
    return f"{method} @ {value:.4g}"


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the best value of every method.

    Returns
    -------
    pandas.DataFrame
        A row a method: ``method``; ``at``, the value with the lowest training loss, or validation
        loss where there is one, averaged over the looks of the last third of the run and over the
        seeds, infinite for a run that diverged; ``loss``, that average; ``interior``, whether the
        grid goes on at both sides.
    """
    split = VALIDATION if (frame["split"] == VALIDATION).any() else "train"
    losses = frame[(frame["metric"] == "loss") & (frame["split"] == split)]
    stop = losses.groupby(["method", "at", "seed"])["round"].transform("max")
    late = losses[losses["round"] > (1 - SHARE) * stop]
    means = late.groupby(["method", "at"])["value"].agg(lambda v: v.mean(skipna=False))
    means = means.fillna(math.inf).unstack("at")
    best = means.idxmin(axis=1)
    inside = (best > means.columns.min()) & (best < means.columns.max())
    found = pd.DataFrame({"at": best, "loss": means.min(axis=1), "interior": inside})
    return found.loc[list(dict.fromkeys(frame["method"]))].reset_index()


def tuned_values(frame: pd.DataFrame, settings: Settings) -> dict[str, float]:
    """Return the value for each run of ``settings`` that asks for a tuned one.

    A run asks with ``"tuned"`` in place of a value; its method has the run's own name, or the one
    that it gives as ``tuned_as``.

    Raises
    ------
    FedlibError
        When a method was not tuned; :class:`AtEdge` when its best value lies at the edge.
    """
    best, values = table(frame).set_index("method"), {}
    for run in settings["runs"]:
        if "tuned" not in run.values():
            continue
        method = run.get("tuned_as", run["run"])
        if method not in best.index:
            raise FedlibError(f"'{method}' was not tuned. Tuned: {', '.join(best.index)}.")
        if not best.loc[method, "interior"]:
            raise AtEdge(
                f"The best value of '{method}', {best.loc[method, 'at']:.4g}, lies at the edge of "
                "its grid. Tune over a wider one."
            )
        values[run["run"]] = float(best.loc[method, "at"])
    return values


def apply(settings: Settings, values: dict[str, float]) -> Settings:
    """Return settings with the tuned values in their places."""
    runs: list[dict[str, Any]] = [
        {k: values[run["run"]] if v == "tuned" else v for k, v in run.items()}
        for run in settings["runs"]
    ]
    return {**settings, "runs": runs}
