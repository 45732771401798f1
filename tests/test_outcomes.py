"""What an interval says of a check, and what outcomes say of a claim: the protocol's tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlib.lab.evidence import outcomes
from fedlib.lab.evidence.claims import Question
from fedlib.lab.evidence.measures import Measured
from fedlib.lab.evidence.outcomes import (
    AGAINST,
    DIFFERS,
    HOLDS,
    LEVEL,
    NO_RECORD,
    OPEN,
    OUTSIDE,
    REVERSED,
    SMALLER,
)

INF = math.inf


@pytest.mark.parametrize(
    ("low", "high", "d", "outcome"),
    [
        (0.3, 0.5, 0.4, HOLDS),
        (0.05, 0.5, 0.27, HOLDS),
        (0.1, 0.3, 0.2, HOLDS),  # s itself is enough
        (0.05, 0.31, 0.18, SMALLER),
        (0.02, 0.06, 0.04, SMALLER),
        (0.015, 0.025, 0.02, SMALLER),  # a tenth of s
        (0.005, 0.015, 0.01, LEVEL),
        (-0.1, 0.1, 0.0, LEVEL),
        (-0.2, 0.2, 0.0, LEVEL),
        (-0.015, -0.005, -0.01, LEVEL),
        (-0.5, -0.1, -0.3, REVERSED),
        (-0.05, -0.01, -0.03, REVERSED),
        (-0.1, 0.5, 0.2, OPEN),
        (0.0, 0.5, 0.25, OPEN),
        (-0.5, 0.0, -0.25, OPEN),
        (-0.5, 0.1, -0.2, OPEN),
        (0.016, 0.0214, 0.0187, LEVEL),  # between an eleventh and a tenth of s
        (-0.03, -0.01, -0.02, LEVEL),
        (INF, INF, INF, HOLDS),
        (-INF, -INF, -INF, REVERSED),
        (-INF, INF, math.nan, OPEN),
    ],
)
def test_better(low, high, d, outcome):
    assert outcomes.better(low, high, d, 0.2) == outcome


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (-0.1, 0.1, HOLDS),
        (0.3, 0.5, HOLDS),  # to be better costs nothing
        (-0.3, -0.1, OPEN),
        (-0.5, -0.3, REVERSED),
        (-0.3, -0.2, OPEN),
        (-0.2, 0.1, OPEN),
        (-INF, INF, OPEN),
    ],
)
def test_no_worse(low, high, outcome):
    assert outcomes.no_worse(low, high, (low + high) / 2, 0.2) == outcome


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (-0.2, 0.2, HOLDS),
        (0.25, 0.5, DIFFERS),
        (-0.5, -0.25, DIFFERS),
        (0.1, 0.3, OPEN),
        (-0.3, 0.1, OPEN),
        (0.2, 0.3, OPEN),
        (-0.3, -0.2, OPEN),
        (-INF, INF, OPEN),
        (INF, INF, DIFFERS),
    ],
)
def test_same(low, high, outcome):
    assert outcomes.same(low, high, (low + high) / 2, 0.2) == outcome


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.2, 0.5, HOLDS),
        (0.1, 0.19, OUTSIDE),
        (0.51, 0.6, OUTSIDE),
        (0.1, 0.2, OPEN),
        (0.5, 0.6, OPEN),
        (-INF, INF, OPEN),
    ],
)
def test_within(low, high, outcome):
    assert outcomes.within(low, high, 0.2, 0.5) == outcome


def test_more_seeds_never_turn_a_finding_round_while_the_estimate_stays():
    for d in np.linspace(-1, 1, 81):
        seen = [outcomes.better(d - half, d + half, d, 0.2) for half in np.geomspace(3, 1e-6, 200)]
        assert len(set(seen) - {OPEN, LEVEL}) <= 1 and {*seen} & {*AGAINST} <= {REVERSED}
        decided = [word for word in seen if word != OPEN]
        assert not (HOLDS in decided and decided[-1] != HOLDS)
        assert (decided[-1] == REVERSED) == (d < -0.02)


def test_better_and_the_same_never_both_speak_for_it():
    ends = np.linspace(-1, 1, 41)
    for low in ends:
        for high in ends[ends >= low]:
            d = (low + high) / 2
            both = outcomes.better(low, high, d, 0.2), outcomes.same(low, high, d, 0.2)
            assert both not in [(HOLDS, HOLDS), (LEVEL, DIFFERS), (REVERSED, LEVEL)]


def test_an_estimate_near_s_is_said_to_be():
    assert outcomes.is_near(0.1, 0.5, 0.3, 0.2) and not outcomes.is_near(0.25, 0.35, 0.3, 0.2)
    assert not outcomes.is_near(-INF, INF, 0.2, 0.2)
    assert outcomes.is_near(0.15, 0.55, 0.35, 0.2), "nearer than half the interval"
    assert not outcomes.is_near(0.3, 0.7, 0.5, 0.2)
    assert not outcomes.is_near(0.5, 1.0, 0.75, 0.5), "half the interval away"


def test_how_many_seeds_would_decide():
    """By hand: the first n at which t s/√n is smaller than the way to the nearest end."""
    values = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    got, spread = Measured(values, values), values.std(ddof=1)

    def first(room, level=0.95):
        half = lambda n: stats.t.ppf(0.5 + level / 2, n - 1) * spread / math.sqrt(n)  # noqa: E731
        return f"about {next(n for n in range(7, 41) if half(n) < room)} seeds would decide"

    def told(got, question, level=0.95):
        return outcomes.more_seeds(got, level, question.outcome)

    assert told(got, Question("same", 0.7)) == first(0.2)
    assert told(got, Question("within", bounds=(0.0, 0.8))) == first(0.3)
    assert told(got, Question("within", bounds=(0.0, 0.8)), 0.99) == first(0.3, 0.99)
    low = Measured(values - 0.4, values - 0.4)  # mean .1
    assert told(low, Question("better", 0.5)) == first(0.4), "as level"
    assert told(low, Question("better", 0.12)) == "40 seeds would not decide"
    worse = Measured(values - 0.8, values - 0.8)
    assert told(worse, Question("better", 0.1)) == first(0.3)
    assert told(worse, Question("no worse", 0.5)) == first(0.2)
    two, few = np.array([0.4, 0.6]), Measured(*2 * [np.array([0.4, 0.6])])
    want = stats.t.ppf(0.975, np.arange(2, 40)) * two.std(ddof=1) / np.sqrt(np.arange(3, 41)) < 0.2
    assert told(few, Question("same", 0.7)) == f"about {3 + want.argmax()} seeds would decide"
    for held in (Measured(values, values + 0.1), Measured(values, values, share=True)):
        assert told(held, Question("same", 0.7)) == ""


@pytest.mark.parametrize(
    ("seen", "finding"),
    [
        ([HOLDS, HOLDS], "confirmed"),
        ([HOLDS, SMALLER], "confirmed in direction"),
        ([SMALLER], "confirmed in direction"),
        ([HOLDS, LEVEL], "confirmed in part"),
        ([SMALLER, LEVEL], "confirmed in part"),
        ([LEVEL, LEVEL], "no effect seen"),
        ([HOLDS, REVERSED, OPEN], "contradicted in part"),
        ([SMALLER, DIFFERS], "contradicted in part"),
        ([REVERSED, LEVEL], "contradicted"),
        ([OUTSIDE, OPEN], "contradicted"),
        ([HOLDS, OPEN], "open in part"),
        ([LEVEL, OPEN], "open in part"),
        ([OPEN, OPEN], "open"),
        ([HOLDS, NO_RECORD], "no record"),
        ([REVERSED, NO_RECORD], "no record"),
    ],
)
def test_finding(seen, finding):
    assert outcomes.finding("measured", seen) == finding
    if seen != [HOLDS, HOLDS]:
        assert outcomes.finding("proved", seen) == finding, "a kind is a finding when all hold"


def test_what_is_exact_is_said_to_be():
    assert outcomes.finding("proved", [HOLDS]) == outcomes.finding("proved", []) == "proved"
    assert outcomes.finding("arithmetic", [HOLDS]) == "arithmetic"


def test_outcomes_in_words():
    assert outcomes.tally_outcomes([HOLDS]) == "1 of 1 holds"
    assert (
        outcomes.tally_outcomes([OPEN, HOLDS, REVERSED, OPEN]) == "1 of 4 hold, 1 reversed, 2 open"
    )
    assert outcomes.tally_outcomes([HOLDS, SMALLER]) == "1 of 2 hold, 1 smaller"
    assert outcomes.tally_outcomes([]) == ""
