"""From an interval to the outcome of a check, and from outcomes to the finding of a claim.

A check has an estimate ``d``, an interval ``[low, high]`` and ``s``, the smallest difference that
matters. Its outcome says what was seen; the estimate decides between *holds* and *smaller*, so more
seeds never turn a finding into its opposite while the estimate stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fedlib.lab.evidence.measures import Measured

HOLDS, SMALLER, LEVEL, REVERSED = "holds", "smaller", "level", "reversed"
DIFFERS, OUTSIDE, OPEN, NO_RECORD = "differs", "outside", "open", "no record"
OUTCOMES = (HOLDS, SMALLER, LEVEL, REVERSED, DIFFERS, OUTSIDE, OPEN, NO_RECORD)
"""What a check may come to."""

AGAINST = (REVERSED, DIFFERS, OUTSIDE)
NEGLIGIBLE = 10  # s over this: a difference whose sign is sure and of no use to anyone

CONFIRMED = "confirmed"
DIRECTION = "confirmed in direction"
PART = "confirmed in part"
NO_EFFECT = "no effect seen"
CONTRADICTED_PART = "contradicted in part"
CONTRADICTED = "contradicted"
OPEN_PART = "open in part"
READING = "depends on the reading"
SHOWN = "shown, not counted"
PROVED, ARITHMETIC, NO_DATA = "proved", "arithmetic", "needs data"
FINDINGS = (
    *(CONFIRMED, DIRECTION, PART, NO_EFFECT, CONTRADICTED_PART, CONTRADICTED),
    *(READING, OPEN_PART, OPEN, PROVED, ARITHMETIC, SHOWN, NO_DATA, NO_RECORD),
)
"""What a claim may come to, in the order in which pages show them."""

ENOUGH_SEEDS = 40  # seeds; what they leave open needs another experiment


def better(low: float, high: float, d: float, s: float) -> str:
    """Is it better, and by ``s``?

    A difference below a tenth of ``s`` is *level* on either side, however sure its sign.
    """
    if low > 0:
        return HOLDS if d >= s else SMALLER if d >= s / NEGLIGIBLE else LEVEL
    if high < 0:
        return REVERSED if d < -s / NEGLIGIBLE else LEVEL
    return LEVEL if -s <= low and high <= s else OPEN


def no_worse(low: float, high: float, d: float, s: float) -> str:
    """Does it cost at most ``s``? To be better costs nothing."""
    return HOLDS if low > -s else REVERSED if high < -s else OPEN


def same(low: float, high: float, d: float, s: float) -> str:
    """Is the difference smaller than ``s``?"""
    if -s <= low and high <= s:
        return HOLDS
    return DIFFERS if high < -s or low > s else OPEN


def within(low: float, high: float, least: float, most: float) -> str:
    """Does it lie in a band?"""
    if least <= low and high <= most:
        return HOLDS
    return OUTSIDE if high < least or low > most else OPEN


def is_near(low: float, high: float, d: float, s: float) -> bool:
    """Say whether the estimate is so near to ``s`` that it might as well lie on the other side."""
    return math.isfinite(high - low) and abs(d - s) < (high - low) / 2


def more_seeds(got: Measured, level: float, judge: Callable[[float, float, float], str]) -> str:
    """Say how many seeds would decide a check, if mean and spread stay what they are.

    Parameters
    ----------
    level
        Of the interval.
    judge
        The outcome of an interval's two ends and the estimate.
    """
    from scipy import stats

    values = (got.low + got.high) / 2
    if got.share or got.than is not None or len(values) < 2:
        return ""
    if not np.isfinite(values).all() or (got.low != got.high).any():
        return ""
    mean, spread = values.mean(), values.std(ddof=1)
    for count in range(len(values) + 1, ENOUGH_SEEDS + 1):
        half = stats.t.ppf((1 + level) / 2, count - 1) * spread / math.sqrt(count)
        if judge(mean - half, mean + half, mean) != OPEN:
            return f"about {count} seeds would decide"
    return f"{ENOUGH_SEEDS} seeds would not decide" if len(values) < ENOUGH_SEEDS else ""


def finding(kind: str, outcomes: Sequence[str]) -> str:
    """Return what the outcomes of a claim's essential checks say together.

    Parameters
    ----------
    kind
        ``"measured"``, or ``"proved"`` or ``"arithmetic"``, which is the finding when all hold. A
        theorem without a check that could come out otherwise is proved by its proof alone.
    """
    seen = set(outcomes)
    if NO_RECORD in seen:
        return NO_RECORD
    if seen <= {HOLDS}:
        return {"measured": CONFIRMED if seen else OPEN}.get(kind, kind)
    if seen & {*AGAINST}:
        return CONTRADICTED_PART if seen & {HOLDS, SMALLER} else CONTRADICTED
    if OPEN in seen:
        return OPEN if seen == {OPEN} else OPEN_PART
    if LEVEL in seen:
        return NO_EFFECT if seen == {LEVEL} else PART
    return DIRECTION


def tally_outcomes(outcomes: Iterable[str]) -> str:
    """Return outcomes in words: ``"2 of 5 hold, 1 smaller, 2 open"``; empty for none."""
    seen = list(outcomes)
    if not seen:
        return ""
    hold = f"{seen.count(HOLDS)} of {len(seen)} hold" + "s" * (len(seen) == 1)
    rest = [f"{seen.count(word)} {word}" for word in OUTCOMES[1:] if word in seen]
    return ", ".join([hold, *rest])
