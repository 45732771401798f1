"""Quantities that checks measure in stored records, one value a seed, with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from fedlib import cards as datasets  # of that name: else every rule's measures have changed
from fedlib.errors import FedlibError, unknown
from fedlib.lab.evidence.records import Record

LOST = 10  # times the loss of guessing: a run that ends above has diverged, finite or not
PERCENT = ("accuracy", "f1", "auroc", "top5")  # metrics told in points of a hundred
FINAL = 0.1  # the share of a run over which "final" is the mean


class MissingRows(FedlibError):
    """A record that does not hold the runs a check asks for."""


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
    beside
        What a difference is to be seen beside: the mean of the run that it is taken from, and the
        metric.
    than
        ``[other seeds]``: values of another experiment, whose mean is to be subtracted. Its seeds
        are not those of ``low`` and ``high``, so nothing is paired.
    """

    low: np.ndarray
    high: np.ndarray
    text: str = "{}"
    ratio: bool = False
    share: bool = False
    lost: str = ""
    beside: tuple[float, str] | None = None
    than: np.ndarray | None = None

    @property
    def seeds(self) -> int:
        """How many there are; of two experiments, in the one that has fewer."""
        return min(len(values) for values in (self.low, self.than) if values is not None)

    @property
    def estimate(self) -> float:
        """The mean over seeds; of the middles, where values are ranges.

        A range without an upper end stands for its lower one, as a run that never arrives is at
        least so late. NaN where no mean exists.
        """
        low = np.where(np.isneginf(self.low), self.high, self.low)
        high = np.where(np.isposinf(self.high), self.low, self.high)
        with np.errstate(invalid="ignore"):
            return float(((low + high) / 2).mean() - (0 if self.than is None else self.than.mean()))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the t-interval of the mean over seeds; a single seed stands for itself.

        It is the whole line when some seeds diverged and others did not, and a point at infinity
        when all did. Shares have the exact interval of Clopper and Pearson, differences between two
        experiments that of Welch.
        """
        from scipy import stats  # a quarter of the time of a start, and seldom wanted

        if self.share:
            test = stats.binomtest(int(self.low.sum()), len(self.low))
            return tuple(test.proportion_ci(level, method="exact"))
        if self.than is not None:
            if not np.isfinite([*self.low, *self.than]).all() or self.seeds == 1:
                return (-math.inf, math.inf)
            with np.errstate(invalid="ignore"):  # no spread at all
                welch = stats.ttest_ind(self.low, self.than, equal_var=False)
                low, high = (float(end) for end in welch.confidence_interval(level))
            return (-math.inf, math.inf) if math.isnan(high - low) else (low, high)
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
        if math.isclose(low, high):  # known exactly, up to rounding
            return self.text.format(f"{low:.4g}")
        if math.isinf(low) or math.isinf(high):
            return self.text.format(f"{low:.3g} to {high:.3g}")
        half = (high - low) / 2
        digits = min(6, max(0, 1 - math.floor(math.log10(half)))) if half > 0 else 6
        return self.text.format(f"{(low + high) / 2:.{digits}f} ± {half:.{digits}f}")

    def size(self) -> str:
        """Return how large the estimate is, without its sign, as one would say it.

        ``"1.5 times"`` for a ratio, ``"2.4 points of 81"`` for a difference of accuracies,
        ``"0.045 of 0.5"`` for another one; empty where no mean exists.
        """
        d = abs(self.estimate)
        base, metric = self.beside or (math.nan, "")
        if not math.isfinite(d):
            return ""
        if self.ratio or metric.startswith("log "):
            return f"{math.exp(min(d, 700)):.2g} times"
        if metric in PERCENT:
            return f"{100 * d:.{1 if d >= 0.001 else 2}f} points of {100 * base:.0f}"
        return f"{d:.2g} of {base:.2g}" if math.isfinite(base) else f"{d:.2g}"


def _exactly(values: Any, **words: Any) -> Measured:
    values = np.atleast_1d(np.asarray(values, dtype=float))
    return Measured(values, values, **words)


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

    Every round counts the same, whenever one looked. A run has diverged when a value is not finite,
    or when its training loss stays above ten times that of guessing.
    """
    values = _over_rounds(record, run, metric, split, 1 - share)
    ceiling = _ceiling(record)
    if math.isfinite(ceiling):
        loss = _late(rows(record, run, "loss", "train"), share)
        values[~(loss <= ceiling).any()] = np.nan
    return values


def _over_rounds(
    record: Record, run: str, metric: str, split: str, start: float, stop: float = 1
) -> pd.Series:
    """Return each seed's mean over the rounds from one share of a run to another, ``[seeds]``.

    Between two looks lies a line.
    """
    found = rows(record, run, metric, split)
    if found.groupby("seed")["round"].nunique().nunique() > 1:
        raise MissingRows(f"Seeds of run '{run}' in {record.path.name} have different rounds.")
    wide = _by_round(found)
    ends = np.interp([start, stop], [0, 1], [wide.index.min(), wide.index.max()])
    return wide.apply(lambda values: _mean_between(*ends, wide.index, values))


def _mean_between(start: float, stop: float, x: Any, y: Any) -> float:
    """Return the mean height of a line through points; at no width, its height there."""
    from scipy import integrate

    x = np.asarray(x)
    at = np.unique([start, stop, *x[(start < x) & (x < stop)]])
    height = np.interp(at, x, y)
    return integrate.trapezoid(height, at) / np.ptp(at) if len(at) > 1 else height[0]


def _by_round(found: pd.DataFrame) -> pd.DataFrame:
    """Return ``[evaluations, seeds]``; NaN for what is too large to be added up."""
    finite = found["value"].where(found["value"].abs() < 1e30)
    return found.assign(value=finite).pivot(index="round", columns="seed", values="value")


def _late(found: pd.DataFrame, share: float) -> pd.DataFrame:
    """Return ``[evaluations, seeds]`` of the last ``share`` of the rounds, at least one."""
    wide = _by_round(found)
    first, stop = wide.index.min(), wide.index.max()
    late = wide[wide.index > stop - share * (stop - first)]
    return late if len(late) else wide.iloc[-1:]


def _same_seeds(record: Record, a: Iterable[int], b: Iterable[int]) -> None:
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
    return _exactly(gain.to_numpy(), lost=", ".join(counts), beside=(other.mean(), metric))


def sooner(
    record: Record, a: str, b: str, metric: str, split: str, target: float, t_comm: float
) -> Measured:
    """How many times sooner run ``a`` reaches a target than run ``b``, as a natural logarithm.

    A local step takes ``3 t_comm/Q + 1`` time units. What is known of the time is only that it
    lies between two evaluations, the later of which is the first that reaches the target, or
    after the end; each seed's ratio is therefore a range. The untrained model has reached nothing,
    even if its F1 happens to be that high.

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
        there = np.flatnonzero((times > 0) & (values <= target if fall else values >= target))
        if len(there):
            low[j], high[j] = times[max(there[0] - 1, 0)], times[there[0]]
    return pd.DataFrame(np.stack([low, high], 1), wide.columns)


def widens(
    record: Record, a: str, b: str, metric: str, split: str, t_comm: list[float]
) -> Measured:
    """How much further run ``a`` is ahead of run ``b`` with slower messages than with faster ones.

    Ahead at one and the same time, on average from the start to where the first of the four curves
    ends. Times are those of :func:`sooner`.

    Parameters
    ----------
    t_comm
        Times of a message, the faster first, ``[2]``.
    """
    leads = {}
    for t in t_comm:
        for run in (a, b):
            found = rows(record, run, metric, split)
            wide = found.pivot(index="clock", columns="seed", values="value")
            leads[t, run] = wide.set_axis(wide.index * (3 * t / found["Q"].iloc[0] + 1))
    end = min(wide.index.max() for wide in leads.values())
    mean = {key: wide.apply(lambda values: _mean_between(0, end, values.index, values))
            for key, wide in leads.items()}  # fmt: skip
    _same_seeds(record, mean[t_comm[0], a].index, mean[t_comm[0], b].index)
    fast, slow = (mean[t, a] - mean[t, b] for t in t_comm)
    return _exactly((fast - slow if metric == "loss" else slow - fast).to_numpy())


def earlier(record: Record, a: str, b: str, metric: str, split: str, target: float) -> Measured:
    """How many times sooner run ``a`` falls to a target than run ``b``, as a natural logarithm.

    By the record's own clock; between two looks lies a line.
    """
    one, other = (_fallen(rows(record, run, metric, split), target) for run in (a, b))
    _same_seeds(record, one.index, other.index)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(other.reindex(one.index) / one)  # NaN where neither falls so far
    return Measured(ratio.to_numpy(), ratio.to_numpy(), "{} times", ratio=True)


def _fallen(found: pd.DataFrame, target: float) -> pd.Series:
    """Return when each seed is first at a target, ``[seeds]``; infinite where it never is."""
    at = {}
    for seed, curve in found.sort_values("clock").groupby("seed"):
        times, values = curve["clock"].to_numpy(), curve["value"].to_numpy()
        there = np.flatnonzero(values <= target)
        two = slice(max(there[0] - 1, 0), there[0] + 1) if len(there) else None
        at[seed] = np.interp(-target, -values[two], times[two]) if two else math.inf
    return pd.Series(at)


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


def smoother_between(
    record: Record, a: str, b: str, metric: str, split: str, looks: int
) -> Measured:
    """As :func:`smoother`, when every ``looks`` neighbouring evaluations were averaged before.

    Of a curve that swings with a cycle, means over cycles keep what goes on between them.
    """
    frame, curve = record.frame, ["run", "seed", "metric", "split"]
    frame = frame[frame["run"].isin([a, b])].sort_values("round")
    frame = frame.assign(block=frame.groupby(curve).cumcount(ascending=False) // looks)
    means = frame.groupby([*curve, "block"], as_index=False).agg(
        round=("round", "max"), value=("value", lambda block: block.mean(skipna=False))
    )
    return smoother(replace(record, frame=means), a, b, metric, split)


def settles(record: Record, run: str, metric: str, split: str) -> Measured:
    """How many times rougher a run is in its first fifth than in its last, as a natural logarithm.

    Roughness is the mean size of the second difference of neighbouring evaluations, in which a
    steady rise does not count, nor does the jump from the untrained model. A run that diverged is
    infinitely rough at its end.
    """
    wide = rows(record, run, metric, split).pivot(index="round", columns="seed", values="value")
    rough = wide[wide.index > 0].diff().diff().abs()
    stop = rough.index.max()
    early, late = (
        rough[part].mean() for part in (rough.index <= 0.2 * stop, rough.index > 0.8 * stop)
    )
    ratio = np.log(early / late).to_numpy(copy=True)
    ratio[last(record, run, metric, split).reindex(wide.columns).isna()] = -math.inf
    return Measured(ratio, ratio, "{} times", ratio=True)


def during(
    record: Record, a: str, b: str, metric: str, split: str, start: float, stop: float
) -> Measured:
    """How much better run ``a`` is than run ``b`` on average from one share of the run to another.

    As :func:`advantage`, which looks at the end. Every round counts the same, whenever one looked.

    Parameters
    ----------
    start, stop
        Shares of the run, 0 at its beginning and 1 at its end.
    """
    one, other = (_over_rounds(record, run, metric, split, start, stop) for run in (a, b))
    _same_seeds(record, one.index, other.index)
    gain = other - one if metric == "loss" else one - other
    return _exactly(gain.to_numpy(), beside=(other.mean(), metric))


def with_fewer_rounds(
    record: Record, a: str, b: str, metric: str, split: str, rounds: float
) -> Measured:
    """How much better run ``a`` ends than run ``b`` is after more rounds, paired by seed.

    Parameters
    ----------
    rounds
        What ``a`` has made of them, as a share of those of ``b``; between two looks at ``b`` its
        value lies on a line.
    """
    one, other = (rows(record, run, metric, split) for run in (a, b))
    _same_seeds(record, one["seed"], other["seed"])
    gains, beside = [], []
    for seed, own in one.sort_values("clock").groupby("seed"):
        its, later = other[other["seed"] == seed].sort_values("rounds"), own["rounds"] / rounds
        if later.max() > its["rounds"].max():
            raise MissingRows(f"Run '{b}' in {record.path.name} is over before so many rounds.")
        clock, there = own["clock"], np.interp(later, its["rounds"], its["value"])
        ends = (1 - FINAL) * clock.max(), clock.max()
        beside.append(_mean_between(*ends, clock, there))
        gains.append(_mean_between(*ends, clock, own["value"]) - beside[-1])
    sign = -1 if metric == "loss" else 1
    return _exactly(sign * np.array(gains), beside=(float(np.mean(beside)), metric))


def best_of(record: Record, runs: list[str], b: str, metric: str, split: str) -> Measured:
    """How much better the best of several runs ends than run ``b``, paired by seed.

    The other seeds say which run that is, so that luck of the seed that is judged chooses nothing.
    """
    each = [advantage(record, run, b, metric, split) for run in runs]
    gain = np.stack([own.low for own in each])
    known = np.nan_to_num(gain, posinf=1e9, neginf=-1e9)  # diverged runs
    choice = (known.sum(1, keepdims=True) - known).argmax(0)
    lost = ", ".join(dict.fromkeys(own.lost for own in each if own.lost))
    return _exactly(gain[choice, np.arange(len(choice))], lost=lost, beside=each[0].beside)


def gains_more(
    record: Record, a: str, b: str, than_a: str, than_b: str, metric: str, split: str,
    start: float, stop: float,
) -> Measured:  # fmt: skip
    """How much more run ``a`` gains over run ``b`` than ``than_a`` over ``than_b``, by seed.

    On average from one share of the run to another, see :func:`during`.
    """
    part = dict(metric=metric, split=split, start=start, stop=stop)
    one, other = during(record, a, b, **part), during(record, than_a, than_b, **part)
    return _exactly(one.low - other.low, beside=one.beside)


def across(
    record: Record,
    than: Record,
    a: str,
    b: str,
    metric: str,
    than_metric: str,
    split: str,
    relative: bool,
) -> Measured:
    """How much better run ``a`` ends than run ``b``, minus the same in another experiment.

    Parameters
    ----------
    than
        Of the other experiment; its seeds are not paired with those of ``record``.
    than_metric
        The metric there.
    relative
        As a share of the level of run ``b`` in either experiment; else in the metrics' own units.
    """
    here, there = (
        _gained(held, a, b, name, split, relative)
        for held, name in ((record, metric), (than, than_metric))
    )
    return _exactly(here, than=there)


def _gained(record: Record, a: str, b: str, metric: str, split: str, relative: bool) -> np.ndarray:
    """Return how much better ``a`` ends than ``b``, one value a seed.

    As a share, the mean of the values is the ratio of means, and their spread has that of the level
    in it, to first order.
    """
    gain = advantage(record, a, b, metric, split).low
    if not relative:
        return gain
    level = last(record, b, metric, split).to_numpy()
    if not level.mean():
        return np.full(len(gain), math.nan)  # no share of nothing
    share = gain.mean() / level.mean()
    return share + (gain - share * level) / level.mean()


def saved(record: Record, run: str, of: str, metric: str, split: str) -> Measured:
    """What share of a count of run ``of`` the run ``run`` does without."""
    one, other = (
        rows(record, name, metric, split).set_index("seed")["value"] for name in (run, of)
    )
    _same_seeds(record, one.index, other.index)
    return _exactly((1 - one / other.reindex(one.index)).to_numpy())


def final(record: Record, run: str, metric: str, split: str, share: float = 0.0) -> Measured:
    """The value of one run at its end: the mean over the last ``share`` of its rounds.

    Without a share it is that of the last evaluation.
    """
    return _exactly(_over_rounds(record, run, metric, split, 1 - share).to_numpy())


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


def flatter(record: Record, a: str, b: str, metric: str, x: str, start: float = 0) -> Measured:
    """By how much the :func:`slope` of run ``a`` lies above that of run ``b``, paired by seed."""
    one, other = (rows(record, run, metric)["seed"].unique() for run in (a, b))
    _same_seeds(record, one, other)
    one, other = (slope(record, run, metric, x, start).low for run in (a, b))  # seeds in order
    return _exactly(one - other)


def largest(record: Record, run: str, metric: str, **where: Any) -> Measured:
    """Largest value over seeds, where the given columns have one of the given values."""
    return _exactly(float(rows(record, run, metric, **where)["value"].max(skipna=False)))


RATIOS = {  # as a factor
    "sooner": "time", "earlier": "time", "smoother": "roughness",
    "smoother_between": "roughness", "settles": "roughness",
}  # fmt: skip
MEASURES: dict[str, Callable[..., Measured]] = {
    measure.__name__: measure
    for measure in (
        advantage, sooner, earlier, widens, smoother, smoother_between, settles, during,
        with_fewer_rounds, best_of, gains_more, across, saved, final, diverged, slope, flatter,
        largest,
    )
}  # fmt: skip
