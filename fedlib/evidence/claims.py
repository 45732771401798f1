"""Claims of the papers, judged from stored records.

A claim is a statement with checks. A check measures one quantity in a record, with an interval
over seeds, and compares it with what is asked. It has three outcomes: it *holds*, it is
*contradicted*, or it is *undecided*. The verdict follows from the outcomes; nobody types it. A
record keeps the hash of the rules of its day, so it is known which of the two is older.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, get_type_hints

import numpy as np
import pandas as pd
from typing_extensions import TypedDict

from fedlib import datasets, paths
from fedlib.errors import FedlibError, unknown
from fedlib.evidence import freshness, records
from fedlib.evidence.freshness import digest
from fedlib.evidence.records import Record
from fedlib.schema import CLOSED, Page, conform, read_toml

HOLDS, CONTRADICTED, UNDECIDED = "holds", "contradicted", "undecided"

REPRODUCED = "reproduced"
REDUCED = "at reduced scale"
MIXED = "mixed"
NOT = "not reproduced"
PROVED = "proved"
ARITHMETIC = "arithmetic"
NO_DATA = "needs data"
NO_RECORD = "no record"
VERDICTS = (
    *(REPRODUCED, REDUCED, MIXED, NOT, UNDECIDED),
    *(PROVED, ARITHMETIC, NO_DATA, NO_RECORD),
)

KINDS = {"measured": REPRODUCED, "proved": PROVED, "arithmetic": ARITHMETIC}
FEWEST = 5  # seeds; from fewer there is no verdict on a sign or on sameness
MANY = 40  # seeds; what they leave open needs another experiment
LOST = 10  # times the loss of guessing: a run that ends above has diverged, finite or not
LEVEL = 0.95  # of an interval, together over the checks of a claim
FINAL = 0.1  # the share of a run over which "final" is the mean


_With = TypedDict("_With", {"with": dict[str, Any]})


class Asked(Page, _With):
    """A check as it stands in a ``claims.toml``; ``with`` holds the measure's arguments."""

    what: str
    asks: Literal["better", "same", "within"]
    experiment: str
    measure: str
    bounds: NotRequired[list[int | float]]
    essential: NotRequired[bool]


class Claim(Page):
    """A claim as it stands in a ``claims.toml``."""

    id: str
    where: str
    kind: Literal["measured", "proved", "arithmetic"]
    statement: str
    paper_reports: NotRequired[str]
    smallest: NotRequired[dict[str, int | float]]  # differences that matter, by metric; time
    because: NotRequired[str]
    changed: NotRequired[str]
    expected: NotRequired[str]
    note: NotRequired[str]
    check: NotRequired[list[Asked]]


class Claims(Page):
    """A ``claims.toml``."""

    claim: list[Claim]


class MissingRows(FedlibError):
    """A record that does not hold the runs a check asks for."""


def papers() -> list[str]:
    """Return the papers that have claims, in the order of the book."""
    return [name for name, home in paths.papers().items() if (home / "claims.toml").is_file()]


def table(paper: str) -> list[Claim]:
    """Return a paper's claims as they stand in its ``claims.toml``."""
    if paper not in papers():
        raise unknown("paper", paper, papers())
    return _read(paths.paper_folder(paper) / "claims.toml")


@functools.cache
def _read(path: Path) -> list[Claim]:
    found = read_toml(path, Claims)["claim"]
    for number, claim in enumerate(found):
        told = f"{path}, claim {claim['id']}"
        if claim["id"] in {other["id"] for other in found[:number]}:
            raise FedlibError(f"{told}: another claim has this id.")
        if claim.get("expected", UNDECIDED) not in VERDICTS:
            raise unknown(f"verdict in {told}:", claim["expected"], VERDICTS)
        for check in claim.get("check", []):
            _sound(claim, check, told)
    return found


def _sound(claim: Claim, check: Asked, told: str) -> None:
    """Refuse a check that measures nothing, or asks a question that cannot be answered."""
    if check["measure"] not in MEASURES:
        raise unknown(f"measure in {told}:", check["measure"], MEASURES)
    conform(check["with"], _arguments(check["measure"]), f"{told}, 'with' of '{check['what']}',")
    bounds = check.get("bounds")
    if (check["asks"] == "within") != (bounds is not None):
        raise FedlibError(f"{told}: bounds belong to a check that asks 'within', and to no other.")
    if bounds and not (len(bounds) == 2 and bounds[0] <= bounds[1]):
        raise FedlibError(f"{told}: bounds are a lower and an upper one; got {bounds}.")
    if not _smallest(claim, check) >= 0:
        raise FedlibError(f"{told}: the smallest difference that matters is above 0, a factor 1.")


@functools.cache
def _arguments(measure: str) -> Any:
    """Return the shape of a measure's arguments beside the record."""
    function = MEASURES[measure]
    hints, open_ended = get_type_hints(function), False
    shape: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        else:
            given = parameter.default is parameter.empty
            shape[name] = hints[name] if given else NotRequired[hints[name]]
    found = TypedDict("Arguments", shape)
    found.__pydantic_config__ = CLOSED | ({"extra": "allow"} if open_ended else {})
    return found


def rules(paper: str, experiment: str | None = None) -> dict[str, str]:
    """Return a hash of what decides each claim, by id: its checks without the words, and the code.

    Parameters
    ----------
    experiment
        Only the claims with a check on this experiment; default all.
    """
    return {
        claim["id"]: _rule(claim)
        for claim in table(paper)
        if experiment in (None, *(check["experiment"] for check in claim.get("check", [])))
    }


def _rule(claim: dict[str, Any]) -> str:
    checks = [{k: v for k, v in check.items() if k != "what"} for check in claim.get("check", [])]
    names = sorted({check[key] for check in checks for key in ("asks", "measure")})
    code = {k: v for n in names for k, v in freshness.code(f"{__name__}:{n}").items()}
    return digest([claim["kind"], claim.get("smallest", {}), checks, code, FEWEST, LEVEL])


# ------------------------------------------------------------------ one quantity, seed by seed


@dataclass(frozen=True)
class Measured:
    """A quantity in a record, one value a seed.

    Attributes
    ----------
    low, high
        ``[seeds]``: between which bounds each seed's value lies; equal where it is known exactly.
    text
        How the value is to be read, with ``{}`` for the number.
    ratio
        The values are natural logarithms of ratios, and are shown as ratios.
    share
        The values are 0 or 1, and the mean is a share.
    lost
        Words on runs that diverged, or "".
    """

    low: np.ndarray
    high: np.ndarray
    text: str = "{}"
    ratio: bool = False
    share: bool = False
    lost: str = ""

    def interval(self, level: float) -> tuple[float, float]:
        """Return the t-interval of the mean over seeds; a single seed stands for itself.

        It is the whole line when some seeds diverged and others did not, and a point at infinity
        when all did. Shares have the exact interval of Clopper and Pearson.
        """
        from scipy import stats  # a quarter of the time of a start, and seldom wanted

        if self.share:
            test = stats.binomtest(int(self.low.sum()), len(self.low))
            return tuple(test.proportion_ci(level, method="exact"))
        ends = []
        for values, sign in ((self.low, -1), (self.high, 1)):
            if len(values) == 1 or (np.isinf(values).all() and len(set(values)) == 1):
                ends.append(float(values[0]))
            elif np.isfinite(values).all():
                half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
                ends.append(float(values.mean() + sign * half))
            else:
                ends.append(sign * math.inf)
        return (-math.inf, math.inf) if np.isnan(ends).any() else (ends[0], ends[1])

    def words(self, level: float) -> str:
        """Return the value for readers, with its interval."""
        low, high = self.interval(level)
        if self.lost:
            return self.lost
        if self.ratio:
            low, high = (math.exp(min(end, 700)) for end in (low, high))
            if low == 0 and high > 1e300:
                return "not to be told"
            number = f"{low:.2g} to {high:.2g}" if high < 1e300 else f"above {low:.2g}"
            return self.text.format(number)
        if low == high:
            return self.text.format(f"{low:.4g}")
        if math.isinf(low) or math.isinf(high):
            return self.text.format(f"{low:.3g} to {high:.3g}")
        half = (high - low) / 2
        digits = min(6, max(0, 1 - math.floor(math.log10(half)))) if half > 0 else 6
        return self.text.format(f"{(low + high) / 2:.{digits}f} ± {half:.{digits}f}")


def _exactly(values: Any, text: str = "{}", lost: str = "") -> Measured:
    values = np.atleast_1d(np.asarray(values, dtype=float))
    return Measured(values, values, text, lost=lost)


def rows(record: Record, run: str, metric: str, split: str | None = None, **where: Any):
    """Return a record's rows of one run and metric, where columns have one of the given values.

    Raises
    ------
    MissingRows
        When there are none.
    """
    frame, asked = record.frame, dict(run=run, metric=metric) | ({"split": split} if split else {})
    for column, wanted in (asked | where).items():
        if column not in record.frame:
            raise unknown(f"column of {record.path.name}", column, record.frame)
        frame = frame[frame[column].isin(wanted if isinstance(wanted, list) else [wanted])]
    if frame.empty:
        raise MissingRows(f"The record {record.path.name} has no rows for {asked | where}.")
    return frame


def last(record: Record, run: str, metric: str, split: str, share: float = FINAL) -> pd.Series:
    """Return each seed's mean over the last ``share`` of the rounds; NaN where it diverged.

    A run has diverged when a value is not finite, or when its training loss stays above ten times
    that of guessing.
    """
    found = rows(record, run, metric, split)
    if found.groupby("seed")["round"].nunique().nunique() > 1:
        raise MissingRows(f"Seeds of run '{run}' in {record.path.name} have different rounds.")
    values = _late(found, share).mean(skipna=False)
    values[~np.isfinite(values)] = np.nan
    ceiling = _ceiling(record)
    if math.isfinite(ceiling):
        loss = _late(rows(record, run, "loss", "train"), share)
        values[~(loss <= ceiling).any()] = np.nan
    return values


def _late(found: pd.DataFrame, share: float) -> pd.DataFrame:
    """Return ``[evaluations, seeds]`` of the last ``share`` of the rounds, at least one."""
    finite = found["value"].where(found["value"].abs() < 1e30)  # beyond it sums overflow
    wide = found.assign(value=finite).pivot(index="round", columns="seed", values="value")
    first, stop = wide.index.min(), wide.index.max()
    late = wide[wide.index > stop - share * (stop - first)]
    return late if len(late) else wide.iloc[-1:]


def _same_seeds(record: Record, a: pd.Index, b: pd.Index) -> None:
    if set(a) != set(b):
        raise MissingRows(f"Two runs of {record.path.name} that are compared differ in seeds.")


def _ceiling(record: Record) -> float:
    name = record.manifest.get("settings", {}).get("dataset")
    if name is None or not set(record.frame["metric"]) & {"accuracy", "f1"}:
        return math.inf
    return LOST * math.log(len(datasets.card(name).classes))


def advantage(
    record: Record, a: str, b: str, metric: str, split: str, share: float = FINAL
) -> Measured:
    """How much better run ``a`` ends than run ``b``, paired by seed: positive when ``a`` wins.

    A run that diverged is infinitely worse than one that did not.
    """
    one, other = (last(record, run, metric, split, share) for run in (a, b))
    _same_seeds(record, one.index, other.index)
    other = other.reindex(one.index)
    gain = (other - one) if metric == "loss" else (one - other)
    gain[one.isna() & other.notna()] = -math.inf
    gain[one.notna() & other.isna()] = math.inf
    counts = [f"{run} diverged in {n} of {len(v)} seeds"
              for run, v in ((a, one), (b, other)) if (n := int(v.isna().sum()))]  # fmt: skip
    return _exactly(gain.to_numpy(), lost=", ".join(counts))


def sooner(
    record: Record, a: str, b: str, metric: str, split: str, target: float, t_comm: float
) -> Measured:
    """How many times sooner run ``a`` reaches a target than run ``b``, as a natural logarithm.

    A local step takes ``3 t_comm/Q + 1`` time units. What is known of the time is only that it
    lies between two evaluations, the later of which is the first that reaches the target, or
    after the end; each seed's ratio is therefore a range.

    Parameters
    ----------
    target
        A loss to fall to, or an accuracy or F1 to rise to.
    """
    one, other = (
        _reached(rows(record, run, metric, split), target, t_comm, metric == "loss")
        for run in (a, b)
    )
    _same_seeds(record, one.index, other.index)
    (a_low, a_high), (b_low, b_high) = (t.loc[one.index].to_numpy().T for t in (one, other))
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = np.log(b_low / a_high), np.log(b_high / a_low)
    never = np.isinf(a_high) & np.isinf(b_high)
    low = np.where(never | np.isnan(low), -math.inf, low)
    return Measured(low, np.where(never | np.isnan(high), math.inf, high), "{} times", ratio=True)


def _reached(found: pd.DataFrame, target: float, t_comm: float, fall: bool) -> pd.DataFrame:
    """Return between which times each seed first reaches the target, ``[seeds, 2]``."""
    wide = found.pivot(index="clock", columns="seed", values="value")
    times = np.asarray(wide.index) * (3 * t_comm / found["Q"].iloc[0] + 1)
    low, high = np.full(wide.shape[1], times[-1]), np.full(wide.shape[1], math.inf)
    for j, values in enumerate(wide.to_numpy().T):
        there = np.flatnonzero(values <= target if fall else values >= target)
        if len(there):
            low[j], high[j] = times[max(there[0] - 1, 0)], times[there[0]]
    return pd.DataFrame(np.stack([low, high], 1), wide.columns)


def smoother(record: Record, a: str, b: str, metric: str, split: str) -> Measured:
    """How many times smoother run ``a`` is than run ``b``, as a natural logarithm.

    A curve's roughness is the mean change between neighbouring evaluations in the second half of
    a run. Both are to be looked at in the same rounds. A run that diverged is infinitely rough.
    """
    one, other = (_roughness(record, run, metric, split) for run in (a, b))
    _same_seeds(record, one.index, other.index)
    one = one.reindex(other.index)
    ratio = np.log(other / one).to_numpy(copy=True)
    ratio[(one.isna() & other.notna()).to_numpy()] = -math.inf
    ratio[(one.notna() & other.isna()).to_numpy()] = math.inf
    return Measured(ratio, ratio, "{} times", ratio=True)


def _roughness(record: Record, run: str, metric: str, split: str) -> pd.Series:
    """Return the mean change between evaluations of each seed, nan where it diverged."""
    rough = _late(rows(record, run, metric, split), 0.5).diff().iloc[1:].abs().mean(skipna=False)
    rough[last(record, run, metric, split).reindex(rough.index).isna()] = np.nan
    return rough


def settles(record: Record, run: str, metric: str, split: str) -> Measured:
    """How many times rougher a run is in its first fifth than in its last, as a natural logarithm.

    Roughness is the mean size of the second difference of neighbouring evaluations, in which a
    steady rise does not count. A run that diverged is infinitely rough at its end.
    """
    wide = rows(record, run, metric, split).pivot(index="round", columns="seed", values="value")
    stop, rough = wide.index.max(), wide.diff().diff().abs()
    early, late = (
        rough[part].mean()
        for part in ((wide.index > 0) & (wide.index <= 0.2 * stop), wide.index > 0.8 * stop)
    )
    ratio = np.log(early / late).to_numpy(copy=True)
    ratio[last(record, run, metric, split).reindex(wide.columns).isna()] = -math.inf
    return Measured(ratio, ratio, "{} times", ratio=True)


def during(
    record: Record, a: str, b: str, metric: str, split: str, start: float, stop: float
) -> Measured:
    """How much better run ``a`` is than run ``b`` on average from one share of the run to another.

    As :func:`advantage`, which looks at the end.

    Parameters
    ----------
    start, stop
        Shares of the run, 0 at its beginning and 1 at its end.
    """
    means = []
    for run in (a, b):
        found = rows(record, run, metric, split)
        part = found["round"].between(*(share * found["round"].max() for share in (start, stop)))
        if not part.any():
            raise MissingRows(
                f"{record.path.name} has no look at '{run}' from {start:g} to {stop:g} of the run."
            )
        means.append(found[part].groupby("seed")["value"].agg(lambda v: v.mean(skipna=False)))
    _same_seeds(record, means[0].index, means[1].index)
    gain = means[1] - means[0] if metric == "loss" else means[0] - means[1]
    return _exactly(gain.to_numpy())


def saved(record: Record, run: str, of: str, metric: str, split: str) -> Measured:
    """What share of a count of run ``of`` the run ``run`` does without."""
    one, other = (
        rows(record, name, metric, split).set_index("seed")["value"] for name in (run, of)
    )
    _same_seeds(record, one.index, other.index)
    return _exactly((1 - one / other.reindex(one.index)).to_numpy())


def final(record: Record, run: str, metric: str, split: str) -> Measured:
    """The value of one run at its last evaluation."""
    values = _late(rows(record, run, metric, split), 0.0).iloc[-1]
    return _exactly(values.to_numpy())


def diverged(record: Record, run: str) -> Measured:
    """The share of seeds whose run diverged, see :func:`last`."""
    values = last(record, run, "loss", "train")
    lost = values.isna().to_numpy()
    text = f"{int(lost.sum())} of {len(lost)} seeds"
    return Measured(1.0 * lost, 1.0 * lost, text, share=True)


def slope(record: Record, run: str, metric: str, x: str, start: float = 0) -> Measured:
    """Slope of log value against log ``x``, from ``x >= start``, one fit a seed."""
    found = rows(record, run, metric)
    if x not in found:
        raise unknown(f"column of {record.path.name}", x, found)
    found = found[found[x] >= start]
    if found.groupby("seed")[x].nunique().reindex(record.frame["seed"].unique()).min() < 2:
        raise MissingRows(f"A slope of '{metric}' in {record.path.name} needs two values of {x}.")
    return _exactly(
        [np.polyfit(np.log(own[x]), np.log(own["value"]), 1)[0] for _, own in found.groupby("seed")]
    )


def largest(record: Record, run: str, metric: str, **where: Any) -> Measured:
    """Largest value over seeds, where the given columns have one of the given values."""
    return _exactly(float(rows(record, run, metric, **where)["value"].max(skipna=False)))


RATIOS = {
    "sooner": "time",
    "smoother": "roughness",
    "settles": "roughness",
}  # what they compare, as a factor
MEASURES: dict[str, Callable[..., Measured]] = {
    "advantage": advantage,
    "sooner": sooner,
    "smoother": smoother,
    "settles": settles,
    "during": during,
    "saved": saved,
    "final": final,
    "diverged": diverged,
    "slope": slope,
    "largest": largest,
}

# ------------------------------------------------------------------ from a quantity to an outcome


def better(low: float, high: float, s: float) -> str:
    """Is it better, and not all within the smallest difference ``s`` that matters?

    An interval that begins between 0 and s supports the sign; how large the difference is, it
    leaves open.
    """
    if high < 0 or (-s <= low and high <= s):
        return CONTRADICTED
    return HOLDS if low > 0 else UNDECIDED


def same(low: float, high: float, s: float) -> str:
    """Is the difference smaller than ``s``?"""
    return within(low, high, -s, s)


def within(low: float, high: float, least: float, most: float) -> str:
    """Does it lie in a band?"""
    if least <= low and high <= most:
        return HOLDS
    return CONTRADICTED if high < least or low > most else UNDECIDED


def more_seeds(got: Measured, level: float, asks: str, least: float, most: float) -> str:
    """Say how many seeds would decide a check, if mean and spread stay what they are.

    Parameters
    ----------
    level
        Of the interval.
    asks
        ``"better"``, ``"same"`` or ``"within"``.
    least, most
        The band; for ``"better"`` that of differences that do not matter.
    """
    from scipy import stats

    middle = (got.low + got.high) / 2
    if got.share or len(middle) < 2 or not np.isfinite(middle).all() or (got.low != got.high).any():
        return ""
    mean, spread = middle.mean(), middle.std(ddof=1)
    away = [abs(mean - least), abs(mean - most)]
    room = min(away)  # of the interval, inside the band or outside
    if asks == "better":
        room = max(abs(mean), room if least < mean < most else 0.0)
    for count in range(len(middle) + 1, MANY + 1):
        if stats.t.ppf((1 + level) / 2, count - 1) * spread / math.sqrt(count) < room:
            return f"about {count} seeds would decide"
    return f"{MANY} seeds would not decide"


@dataclass(frozen=True)
class Check:
    """One check's outcome.

    Attributes
    ----------
    quantity
        What was measured.
    asked
        What was asked of it.
    measured
        Its value with the interval, or ``"no record"``.
    outcome
        ``"holds"``, ``"contradicted"``, ``"undecided"``, or ``"no record"``.
    essential
        Whether the verdict depends on it.
    record, profile
        The record it was read from.
    full
        Whether that record has the paper's data and scale.
    why
        Why nothing was decided, where numbers alone do not say it.
    """

    quantity: str
    asked: str
    measured: str
    outcome: str
    essential: bool = True
    record: str = ""
    profile: str = ""
    full: bool = False
    why: str = ""


def _words(check: dict[str, Any], s: float) -> str:
    if check["measure"] in RATIOS:
        return f"above 1, and not all within a factor {math.exp(s):g}"
    if check["asks"] == "better":
        return f"above 0, and not all within ±{s:g}"
    if check["asks"] == "same":
        return f"within ±{s:g}"
    least, most = check["bounds"]
    if least == most:
        return f"exactly {least:g}"
    if math.isinf(most):
        return f"at least {least:g}"
    return f"at most {most:g}" if math.isinf(least) else f"between {least:g} and {most:g}"


def _named(value: Any, settings: dict[str, Any]) -> Any:
    """Put roles in their places: ``{clients_grid.smallest}`` is the least of that setting."""
    if not isinstance(value, str):
        return value

    def role(match: re.Match) -> str:
        key, which = match.group(1), match.group(2)
        if key not in settings:
            raise unknown("setting in the name of a run", key, settings)
        held = settings[key]
        return str({"smallest": min, "largest": max}[which](held) if which else held)

    return re.sub(r"\{(\w+)(?:\.(smallest|largest))?\}", role, value)


def _smallest(claim: dict[str, Any], check: dict[str, Any]) -> float:
    if check["asks"] == "within":
        return 0.0
    key = RATIOS.get(check["measure"]) or check["with"]["metric"]
    if key not in claim.get("smallest", {}):
        raise FedlibError(
            f"Claim {claim.get('id')} asks whether one run is better or the same by '{key}', and "
            f"names no smallest difference that matters: smallest = {{ {key} = ... }}."
        )
    s = claim["smallest"][key]
    return math.log(s) if check["measure"] in RATIOS else s


def _check(paper: str, claim: dict[str, Any], check: dict[str, Any], out: Any) -> Check:
    """Carry out one check on the largest stored record of its experiment."""
    s, essential = _smallest(claim, check), check.get("essential", True)
    told = dict(quantity=check["what"], asked=_words(check, s), essential=essential)
    none = Check(**told, measured=NO_RECORD, outcome=NO_RECORD, record=check["experiment"])
    try:
        record = records.load(paper, check["experiment"], "largest", out)
        settings = record.manifest.get("settings", {})
        arguments = {key: _named(value, settings) for key, value in check["with"].items()}
        got = MEASURES[check["measure"]](record, **arguments)
    except records.MissingRecord:
        return none
    except MissingRows as error:
        return replace(none, why=str(error))
    level = 1 - (1 - LEVEL) / len(claim["check"])
    low, high = got.interval(level)
    if check["asks"] == "within":
        outcome = within(low, high, *check["bounds"])
    else:
        outcome = {"better": better, "same": same}[check["asks"]](low, high, s)
    profile, why = record.manifest["profile"], ""
    wanted = max(FEWEST, settings.get("seeds", 0)) if claim["kind"] != "arithmetic" else 0
    if len(got.low) < wanted:
        outcome, why = UNDECIDED, f"{len(got.low)} seeds are fewer than {wanted}"
    elif outcome == UNDECIDED:
        ends = check["bounds"] if check["asks"] == "within" else (-s, s)
        why = more_seeds(got, level, check["asks"], *ends)
    return Check(
        **told, measured=got.words(level), outcome=outcome, profile=profile, why=why,
        record=f"{check['experiment']}.{profile}", full=_full(record),
    )  # fmt: skip


def _full(record: Record) -> bool:
    """Say whether a record has the paper's own data, by hash, and its scale."""
    m = record.manifest
    name = m.get("settings", {}).get("dataset")
    theirs = name is None or not datasets.card(name).stands_in_for
    return theirs and m["profile"] == "paper" and m.get("fidelity") in ("canonical", "none")


# ------------------------------------------------------------------ from outcomes to a verdict


def verdict(claim: dict[str, Any], checks: list[Check]) -> str:
    """Return the verdict that follows from a claim's essential checks.

    All hold: *reproduced*, from the paper's data at the paper's scale; otherwise *at reduced
    scale*; *proved* or *arithmetic* for claims of that kind, which no scale changes. Some hold and
    some are contradicted: *mixed*. Some are contradicted and none holds: *not reproduced*. None is
    contradicted and some are undecided, or all checks are controls: *undecided*. A theorem without
    a check that could come out otherwise is *proved* by its proof alone.
    """
    if claim["kind"] == "proved" and not any(check.essential for check in checks):
        return PROVED
    if not checks:
        return NO_DATA
    outcomes = [check.outcome for check in checks if check.essential]
    if not outcomes:
        outcomes = [NO_RECORD if all(c.outcome == NO_RECORD for c in checks) else UNDECIDED]
    if NO_RECORD in outcomes:
        return NO_RECORD
    if CONTRADICTED in outcomes:
        return MIXED if HOLDS in outcomes else NOT
    if UNDECIDED in outcomes:
        return UNDECIDED
    if reduced(claim, [check for check in checks if check.essential]):
        return REDUCED
    return KINDS[claim["kind"]]


def reduced(claim: dict[str, Any], checks: list[Check]) -> bool:
    """Say whether a measured claim's checks had less than the paper's data and scale."""
    return claim["kind"] == "measured" and not all(check.full for check in checks)


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
    entry = known[claim]
    return [_check(paper, entry, check, out) for check in entry.get("check", [])]


def judge(
    paper: str, out: str | Path | None = None, ids: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Judge claims of a paper.

    Parameters
    ----------
    paper
        See :func:`papers`.
    out
        Folder of records; default is the one that ships with fedlib.
    ids
        The claims; default is all of them.

    Returns
    -------
    list of dict
        One a claim: id, where, statement, kind, paper_reports, smallest, because, note, changed;
        ``verdict``;
        ``checks``, a dictionary for each :class:`Check`; ``told``, the counts of outcomes in
        words; ``record`` and ``profile``; ``origins``, a line for each record; ``foreseen``,
        whether the rule is older than every record that it was applied to.
    """
    if out is not None and not Path(out).is_dir():
        raise FedlibError(f"There is no folder {out} to read records from.")
    known = {claim["id"]: claim for claim in table(paper)}
    judged = []
    for name in known if ids is None else ids:
        found = checks(paper, name, out)
        claim = known[name]
        held, rule = _read_from(paper, found, out), _rule(claim)
        words = {k: claim.get(k, "") for k in ("paper_reports", "because", "note", "changed")}
        judged.append(
            {
                **{k: claim[k] for k in ("id", "where", "statement", "kind")},
                **words,
                "verdict": verdict(claim, found),
                "told": told(found),
                "checks": [vars(check) for check in found],
                "record": ", ".join(dict.fromkeys(c.record for c in found)),
                "profile": ", ".join(dict.fromkeys(c.profile for c in found if c.profile)),
                "smallest": claim.get("smallest", {}),
                "origins": [record.provenance() for record in held],
                "foreseen": all(r.manifest.get("rules", {}).get(claim["id"]) == rule for r in held),
            }
        )
    return judged


def told(checks: list[Check]) -> str:
    """Return the outcomes in words: ``"2 of 5 hold, 3 undecided"``, essential checks first."""
    parts = []
    for essential, name in ((True, ""), (False, "controls: ")):
        outcomes = [check.outcome for check in checks if check.essential == essential]
        if outcomes:
            counts = {k: outcomes.count(k) for k in (CONTRADICTED, UNDECIDED, NO_RECORD)}
            hold = f"{outcomes.count(HOLDS)} of {len(outcomes)} hold"
            rest = [f"{count} {k}" for k, count in counts.items() if count]
            parts.append(name + ", ".join([hold + "s" * (len(outcomes) == 1), *rest]))
    return "; ".join(parts)


def _read_from(paper: str, found: list[Check], out: Any) -> list[Record]:
    names = dict.fromkeys(c.record for c in found if c.profile)
    return [records.load(paper, *name.rsplit(".", 1), out) for name in names]


def count(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Count verdicts, every verdict present, in the order of :data:`VERDICTS`."""
    return {v: sum(row["verdict"] == v for row in rows) for v in VERDICTS}
