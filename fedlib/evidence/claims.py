"""Claims of the papers, judged from stored records.

A claim is a statement with checks. A check measures one quantity in a record and asks whether
its interval lies inside bounds that were fixed before the record was looked at. The verdict
follows from the checks; nobody types it.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from fedlib import paths
from fedlib.errors import FedlibError, unknown
from fedlib.evidence import records

REPRODUCED = "reproduced"
PARTLY = "partly"
NOT = "not reproduced"
REDUCED = "at reduced scale"
NO_DATA = "needs data we may not ship"
NO_RECORD = "no record"
VERDICTS = (REPRODUCED, REDUCED, PARTLY, NOT, NO_DATA, NO_RECORD)


class MissingRows(FedlibError):
    """A record that does not hold the runs a check asks for, as one of a smaller profile."""


@dataclass(frozen=True)
class Measured:
    """A quantity with its interval, and words for what was seen.

    Attributes
    ----------
    low, high
        The interval; equal when there is nothing random.
    text
        The value for readers, with its interval.
    """

    low: float
    high: float
    text: str


def papers() -> list[str]:
    """Return the papers that have claims, in the order of the book."""
    return [name for name, home in paths.papers().items() if (home / "claims.toml").is_file()]


@functools.cache
def table(paper: str) -> list[dict[str, Any]]:
    """Return a paper's claims as they stand in the paper's ``claims.toml``."""
    if paper not in papers():
        raise unknown("paper", paper, papers())
    text = (paths.paper_folder(paper) / "claims.toml").read_text("utf-8")
    return tomllib.loads(text)["claim"]


# ------------------------------------------------------------------ from samples to an interval


def _interval(samples: np.ndarray) -> Measured:
    """Return mean and 95 % t-interval over seeds; a single sample stands for itself."""
    mean = float(np.mean(samples))
    if len(samples) < 2 or not np.isfinite(samples).all():
        return Measured(mean, mean, f"{mean:.4g}")
    half = float(stats.t.ppf(0.975, len(samples) - 1) * stats.sem(samples))
    digits = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 6
    return Measured(mean - half, mean + half, f"{mean:.{digits}f} ± {half:.{digits}f}")


def last(frame: pd.DataFrame, run: str, metric: str, split: str, window: float = 0.03) -> pd.Series:
    """Return each seed's mean over the last share ``window`` of its evaluations."""
    rows = frame[(frame["run"] == run) & (frame["metric"] == metric) & (frame["split"] == split)]
    if rows.empty:
        raise MissingRows(
            f"The record has no rows for run '{run}', metric '{metric}', split '{split}'."
        )
    per_seed = rows.pivot_table(index="round", columns="seed", values="value", dropna=False)
    keep = max(1, round(window * len(per_seed)))
    return per_seed.iloc[-keep:].mean(skipna=False)


def paired(frame: pd.DataFrame, a: str, b: str, metric: str, split: str, window=0.03) -> Measured:
    """Final value of run ``a`` minus that of run ``b``, paired by seed."""
    one, other = (last(frame, run, metric, split, window) for run in (a, b))
    broken = [run for run, v in ((a, one), (b, other)) if not np.isfinite(v).all()]
    if broken == [a] and not np.isfinite(one).any():
        return Measured(np.inf, np.inf, f"{a} diverged in all {len(one)} seeds")
    if broken:
        counts = ", ".join(
            f"{run} diverged in {int((~np.isfinite(v)).sum())} of {len(v)} seeds"
            for run, v in ((a, one), (b, other))
            if run in broken
        )
        return Measured(-np.inf, np.inf, counts)
    return _interval((one - other.reindex(one.index)).to_numpy())


def final(frame: pd.DataFrame, run: str, metric: str, split: str, window: float = 0.0) -> Measured:
    """Final value of one run."""
    return _interval(last(frame, run, metric, split, window).to_numpy())


def diverged(frame: pd.DataFrame, run: str, metric: str = "loss", split: str = "train") -> Measured:
    """Share of seeds whose run ended without a finite value."""
    values = last(frame, run, metric, split, 0.0)
    count = int((~np.isfinite(values)).sum())
    return Measured(count / len(values), count / len(values), f"{count} of {len(values)} seeds")


def slope(frame: pd.DataFrame, run: str, metric: str, x: str, start: float = 0) -> Measured:
    """Slope of log value against log ``x``, from ``x >= start``, one fit a seed."""
    rows = frame[(frame["run"] == run) & (frame["metric"] == metric) & (frame[x] >= start)]
    fits = [
        np.polyfit(np.log(own[x]), np.log(own["value"]), 1)[0] for _, own in rows.groupby("seed")
    ]
    return _interval(np.array(fits))


def largest(frame: pd.DataFrame, run: str, metric: str, **where: Any) -> Measured:
    """Largest value over seeds, where the given columns have one of the given values."""
    rows = frame[(frame["run"] == run) & (frame["metric"] == metric)]
    for column, wanted in where.items():
        rows = rows[rows[column].isin(wanted if isinstance(wanted, list) else [wanted])]
    if rows.empty:
        raise MissingRows(f"The record has no rows for run '{run}', metric '{metric}', {where}.")
    value = float(rows["value"].max(skipna=False))
    return Measured(value, value, f"{value:.3g}")


def at_equal_time(
    frame: pd.DataFrame, a: str, b: str, metric: str, split: str, t_comm: float
) -> Measured:
    """Run ``a`` minus run ``b`` at the latest time that both reach, paired by seed.

    A local step takes ``3 t_comm/Q + 1`` time units; values between evaluations are
    interpolated. For records with the columns Q and clock (local steps).
    """
    return _interval(_gap_in_time(frame, a, b, metric, split, t_comm))


def gap_growth(
    frame: pd.DataFrame, a: str, b: str, metric: str, split: str, low: float, high: float
) -> Measured:
    """How much the gap of :func:`at_equal_time` grows from ``t_comm = low`` to ``high``."""
    gaps = [_gap_in_time(frame, a, b, metric, split, t) for t in (high, low)]
    return _interval(gaps[0] - gaps[1])


def _gap_in_time(frame, a, b, metric, split, t_comm) -> np.ndarray:
    tables = []
    for run in (a, b):
        rows = frame[(frame["run"] == run) & (frame["metric"] == metric)]
        rows = rows[rows["split"] == split]
        if rows.empty:
            raise MissingRows(f"The record has no rows for run '{run}', metric '{metric}'.")
        wide = rows.pivot_table(index="clock", columns="seed", values="value", dropna=False)
        wide.index = wide.index * (3 * t_comm / rows["Q"].iloc[0] + 1)
        tables.append(wide)
    until = min(table.index.max() for table in tables)
    one, other = (
        np.array([np.interp(until, table.index, table[seed]) for seed in tables[0]])
        for table in tables
    )
    return one - other


MEASURES: dict[str, Callable[..., Measured]] = {
    "paired": paired,
    "final": final,
    "diverged": diverged,
    "slope": slope,
    "largest": largest,
    "at_equal_time": at_equal_time,
    "gap_growth": gap_growth,
}

# ------------------------------------------------------------------ from checks to a verdict


@dataclass(frozen=True)
class Check:
    """One check's outcome.

    Attributes
    ----------
    quantity, bounds
        What was measured, and where it has to lie.
    measured
        Its value with the interval, or ``"no record"``.
    holds
        Whether the interval lies inside the bounds; None without a record.
    record, profile
        The record it was read from.
    """

    quantity: str
    bounds: str
    measured: str
    holds: bool | None
    record: str
    profile: str


def _words(low: float, high: float) -> str:
    if low == high:
        return f"exactly {low:g}"
    if np.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if np.isinf(low) else f"between {low:g} and {high:g}"


def _check(paper: str, entry: dict[str, Any], out: str | Path | None) -> Check:
    """Carry out one check on the largest stored record of its experiment."""
    if entry["measure"] not in MEASURES:
        raise unknown("measure", entry["measure"], MEASURES)
    low, high = entry["inside"]
    bounds = _words(low, high)
    try:
        record = records.load(paper, entry["experiment"], "largest", out)
    except records.MissingRecord:
        return Check(entry["what"], bounds, NO_RECORD, None, entry["experiment"], "")
    try:
        got = MEASURES[entry["measure"]](record.frame, **entry["with"])
    except MissingRows:
        return Check(entry["what"], bounds, NO_RECORD, None, entry["experiment"], "")
    holds = bool(low <= got.low and got.high <= high)
    profile = record.manifest["profile"]
    stem = f"{entry['experiment']}.{profile}"
    return Check(entry["what"], bounds, got.text, holds, stem, profile)


def verdict(claim: dict[str, Any], checks: list[Check]) -> str:
    """Return the verdict that follows from a claim's checks.

    A claim about exact or small-scale mathematics (``scale = "exact"``) is *reproduced* when all
    its checks hold. A claim about training at the paper's scale is *reproduced* only from
    records of the paper profile; from smaller ones it holds *at reduced scale*.
    """
    if not checks or any(c.holds is None for c in checks):
        return NO_RECORD if checks else NO_DATA
    held = [c.holds for c in checks]
    if all(held):
        full = claim["scale"] == "exact" or all(c.profile == "paper" for c in checks)
        return REPRODUCED if full else REDUCED
    return PARTLY if any(held) else NOT


def checks(paper: str, claim: str, out: str | Path | None = None) -> list[Check]:
    """Carry out the checks of one claim.

    Raises
    ------
    FedlibError
        For an unknown paper or claim, with the valid ones.
    """
    known = {entry["id"]: entry for entry in table(paper)}
    if claim not in known:
        raise unknown("claim", claim, known)
    return [_check(paper, entry, out) for entry in known[claim].get("check", [])]


def judge(paper: str, out: str | Path | None = None) -> list[dict[str, str]]:
    """Judge all claims of a paper.

    Parameters
    ----------
    paper
        See :func:`papers`.
    out
        Folder of records; default is the one that ships with fedlib.

    Returns
    -------
    list of dict
        Rows with id, where, statement, paper_reports, rule, measured, verdict, record, profile
        and note. Several checks of one claim are joined by semicolons; a failed one is marked.
    """
    rows = []
    for claim in table(paper):
        found = checks(paper, claim["id"], out)
        rows.append(
            {
                "id": claim["id"],
                "where": claim["where"],
                "statement": claim["statement"],
                "paper_reports": claim.get("paper_reports", ""),
                "rule": "; ".join(f"{c.quantity}: {c.bounds}" for c in found),
                "measured": "; ".join(c.measured + " ✗" * (c.holds is False) for c in found),
                "verdict": verdict(claim, found),
                "record": ", ".join(dict.fromkeys(c.record for c in found)),
                "profile": ", ".join(dict.fromkeys(c.profile for c in found if c.profile)),
                "note": claim.get("note", ""),
            }
        )
    return rows


def count(rows: list[dict[str, str]]) -> dict[str, int]:
    """Count verdicts, every verdict present, in the order of :data:`VERDICTS`."""
    return {v: sum(row["verdict"] == v for row in rows) for v in VERDICTS}
