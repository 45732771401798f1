"""Verdicts follow from records: outcomes, rules that can come out each way, the shipped claims."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedlib import datasets
from fedlib.errors import FedlibError
from fedlib.evidence import catalogue, claims, experiments, freshness, records
from fedlib.evidence.claims import CONTRADICTED, HOLDS, NO_RECORD, UNDECIDED, Check, Measured
from fedlib.evidence.records import Record

PAPER = "participation"
EVERY = [(paper, claim) for paper in claims.papers() for claim in claims.table(paper)]
IDS = [claim["id"] for _, claim in EVERY]
every_claim = pytest.mark.parametrize("paper, claim", EVERY, ids=IDS)
CHECKS = [(p, claim, check) for p, claim in EVERY for check in claim["check"]]
every_check = pytest.mark.parametrize(
    "paper, claim, check", CHECKS, ids=[f"{c['id']} {k['what']}" for _, c, k in CHECKS]
)
NAN, INF = float("nan"), float("inf")


def curves(values, metric="loss", split="train", **columns):
    """Return rows for runs: ``values[run]`` is ``[seeds, evaluations]`` or ``[seeds]``."""
    rows = []
    for run, array in values.items():
        for seed, curve in enumerate(np.asarray(array, dtype=float), start=1):
            for t, value in enumerate(np.atleast_1d(curve)):
                row = dict(run=run, seed=seed, round=10 * t, split=split, metric=metric)
                rows.append(row | columns | dict(value=value))
    return pd.DataFrame(rows)


def record(frame, **manifest):
    return Record(frame, dict(profile="quick", settings={}) | manifest, Path("made.csv.gz"))


# --- three outcomes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "low, high, outcome",
    [
        (0.3, 0.5, HOLDS),
        (0.05, 0.5, HOLDS),  # above zero, and reaching beyond what matters
        (0.05, 0.15, CONTRADICTED),  # a sign, but too small to matter: the same
        (0.05, 0.2, CONTRADICTED),
        (-0.1, 0.1, CONTRADICTED),
        (-0.5, -0.1, CONTRADICTED),
        (-0.1, 0.5, UNDECIDED),
        (-0.5, 0.1, UNDECIDED),
        (INF, INF, HOLDS),
        (-INF, -INF, CONTRADICTED),
        (-INF, INF, UNDECIDED),
    ],
)
def test_better(low, high, outcome):
    assert claims.better(low, high, 0.2) == outcome


@pytest.mark.parametrize(
    "low, high, outcome",
    [
        (-0.1, 0.1, HOLDS),
        (0.05, 0.2, HOLDS),
        (0.25, 0.5, CONTRADICTED),
        (-0.5, -0.25, CONTRADICTED),
        (0.1, 0.3, UNDECIDED),
        (-INF, INF, UNDECIDED),
        (INF, INF, CONTRADICTED),
    ],
)
def test_same(low, high, outcome):
    assert claims.same(low, high, 0.2) == outcome


def test_better_and_the_same_never_both_hold():
    ends = np.linspace(-1, 1, 41)
    for low in ends:
        for high in ends[ends >= low]:
            both = claims.better(low, high, 0.2), claims.same(low, high, 0.2)
            assert both != (HOLDS, HOLDS)
            assert (both[1] == HOLDS) <= (both[0] == CONTRADICTED)


def test_within_a_band():
    assert claims.within(-1.1, -0.9, -1.2, -0.8) == HOLDS
    assert claims.within(-0.7, -0.5, -1.2, -0.8) == claims.within(-2, -1.5, -1.2, -0.8)
    assert claims.within(-0.7, -0.5, -1.2, -0.8) == CONTRADICTED
    assert claims.within(-1.0, -0.5, -1.2, -0.8) == UNDECIDED


def test_how_many_seeds_would_decide():
    """By hand: the first n at which t s/√n is smaller than the way to the nearest end."""
    values = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    got, spread = Measured(values, values), values.std(ddof=1)

    def first(room, level=0.95):
        half = lambda n: stats.t.ppf(0.5 + level / 2, n - 1) * spread / math.sqrt(n)  # noqa: E731
        return next(n for n in range(7, 41) if half(n) < room)

    told = "about {} seeds would decide".format
    assert claims.more_seeds(got, 0.95, "same", -0.7, 0.7) == told(first(0.2))
    assert claims.more_seeds(got, 0.95, "within", 0.0, 0.8) == told(first(0.3))
    assert claims.more_seeds(got, 0.99, "within", 0.0, 0.8) == told(first(0.3, 0.99))
    low = Measured(values - 0.4, values - 0.4)  # mean .1
    assert claims.more_seeds(low, 0.95, "better", -0.5, 0.5) == told(first(0.4)), "as the same"
    assert claims.more_seeds(low, 0.95, "better", -0.12, 0.12) == "40 seeds would not decide"
    worse = Measured(values - 0.8, values - 0.8)
    assert claims.more_seeds(worse, 0.95, "better", -0.1, 0.1) == told(first(0.3))
    for held in (Measured(values, values + 0.1), Measured(values, values, share=True)):
        assert claims.more_seeds(held, 0.95, "same", -0.7, 0.7) == ""


# --- intervals ------------------------------------------------------------------------------------


def test_the_ends_of_a_band_belong_to_it():
    assert claims.within(1.0, 1.0, 1.0, 1.0) == HOLDS
    assert claims.within(0.2, 0.3, 0.2, 0.5) == claims.within(0.4, 0.5, 0.2, 0.5) == HOLDS
    assert claims.within(0.1, 0.2, 0.2, 0.5) == claims.within(0.5, 0.6, 0.2, 0.5)
    assert claims.within(0.1, 0.2, 0.2, 0.5) == UNDECIDED


def test_the_interval_is_student_s_at_the_level_asked_for():
    values = np.random.default_rng(0).standard_normal(6)
    for level in (0.95, 1 - 0.05 / 7):
        known = stats.t.interval(level, 5, loc=values.mean(), scale=stats.sem(values))
        assert Measured(values, values).interval(level) == pytest.approx(known, rel=1e-12)
    assert Measured(np.array([3.0]), np.array([3.0])).interval(0.95) == (3.0, 3.0)


def test_values_known_within_bounds_widen_the_interval():
    low, high = np.array([1.0, 2.0, 4.0]), np.array([2.0, 5.0, 6.0])
    got = Measured(low, high).interval(0.95)
    half = [stats.t.ppf(0.975, 2) * stats.sem(v) for v in (low, high)]
    assert got == pytest.approx((low.mean() - half[0], high.mean() + half[1]))


@pytest.mark.parametrize(
    "values, expected",
    [
        ([INF, INF, INF], (INF, INF)),
        ([INF, 1.0, 2.0], (-INF, INF)),
        ([NAN, 1.0, 2.0], (-INF, INF)),
        ([INF, -INF, 1.0], (-INF, INF)),
    ],
)
def test_intervals_of_runs_that_diverged(values, expected):
    assert Measured(np.array(values), np.array(values)).interval(0.95) == expected


def test_words():
    values = np.array([0.1, 0.2, 0.3])
    assert Measured(values, values).words(0.95) == "0.20 ± 0.25"
    assert Measured(1000 * values, 1000 * values).words(0.95) == "200 ± 248"
    assert Measured(20 * values, 20 * values).words(0.95) == "4.0 ± 5.0"
    assert Measured(values[:1], values[:1]).words(0.95) == "0.1"
    assert Measured(values, values, lost="a diverged").words(0.95) == "a diverged"
    ratio = np.log([2.0, 2.0, 2.0])
    assert Measured(ratio, ratio, "{} times", ratio=True).words(0.95) == "2 to 2 times"
    nothing = Measured(np.array([-INF]), np.array([INF]), ratio=True)
    assert nothing.words(0.95) == "not to be told"


# --- measures -------------------------------------------------------------------------------------


def test_advantage_is_positive_for_whoever_ends_better():
    low, high = curves({"a": [1.0, 2.0], "b": [3.0, 5.0]}), curves({"a": [1, 2], "b": [3, 5]}, "f1")
    both = record(pd.concat([low, high]))
    assert claims.advantage(both, "a", "b", "loss", "train").low.tolist() == [2.0, 3.0]
    assert claims.advantage(both, "a", "b", "f1", "train").low.tolist() == [-2.0, -3.0]


def test_advantage_goes_by_seed_not_by_row():
    frame = curves({"a": [1.0, 2.0, 4.0], "b": [0.0, 1.0, 3.0]})
    frame = frame.sort_values(["run", "seed"], ascending=[True, False])
    assert claims.advantage(record(frame), "b", "a", "loss", "train").low.tolist() == [1, 1, 1]
    fewer = frame[(frame["run"] == "a") | (frame["seed"] > 1)]  # one seed has no partner
    with pytest.raises(claims.MissingRows, match="differ in seeds"):
        claims.advantage(record(fewer), "b", "a", "loss", "train")


def test_final_is_the_mean_over_the_last_tenth_of_the_rounds():
    frame = curves({"a": np.arange(40.0).reshape(2, 20)})
    for share, expected in ((0.0, [19, 39]), (0.1, [18.5, 38.5]), (0.5, [14.5, 34.5])):
        found = claims.last(record(frame), "a", "loss", "train", share)
        assert found.tolist() == expected, share
    whole = curves({"a": np.arange(21.0)[None]})  # a tenth of 200 rounds begins after round 180
    assert claims.last(record(whole), "a", "loss", "train", 0.1).tolist() == [19.5]
    uneven = frame[frame["round"].isin([0, 10, 20, 30, 40, 180, 190])]  # rounds decide, not rows
    assert claims.last(record(uneven), "a", "loss", "train", 0.5).tolist() == [18.5, 38.5]


@pytest.mark.parametrize(
    "a, b, expected, words",
    [
        ([NAN, NAN], [1, 1], [-INF, -INF], "a diverged in 2 of 2 seeds"),
        ([1, 1], [INF, NAN], [INF, INF], "b diverged in 2 of 2 seeds"),
        ([NAN, 1], [1, 1], [-INF, 0], "a diverged in 1 of 2 seeds"),
        ([1e35, 1], [1, 1], [-INF, 0], "a diverged in 1 of 2 seeds"),
    ],
)
def test_a_run_that_diverged_is_worse_than_one_that_did_not(a, b, expected, words):
    got = claims.advantage(record(curves({"a": a, "b": b})), "a", "b", "loss", "train")
    assert got.low.tolist() == expected and got.words(0.95) == words


def test_a_loss_far_above_guessing_has_diverged_though_finite():
    classes = len(datasets.card("digits").classes)
    guess = math.log(classes)
    loss = curves({"a": [9.9 * guess, 10.1 * guess, guess]})
    frame = pd.concat([loss, curves({"a": [0.1, 0.1, 0.9]}, "accuracy", "test")])
    held = record(frame, settings={"dataset": "digits"})
    assert claims.last(held, "a", "loss", "train").isna().tolist() == [False, True, False]
    assert claims.last(held, "a", "accuracy", "test").isna().tolist() == [False, True, False]
    assert claims.diverged(held, "a").low.tolist() == [0, 1, 0]
    assert claims.diverged(held, "a").high.tolist() == [0, 1, 0]
    assert claims.diverged(held, "a").text == "1 of 3 seeds"
    exact = stats.beta.ppf([0.025, 0.975], [1, 2], [3, 2])  # Clopper and Pearson, 1 of 3
    assert claims.diverged(held, "a").interval(0.95) == pytest.approx(tuple(exact))
    back = curves({"a": [[20 * guess] * 10 + [1.0] * 2]})  # recovered before the end
    held = record(pd.concat([back, frame.tail(1)]), settings={"dataset": "digits"})
    assert claims.diverged(held, "a").low == [0.0]


def times(values, Q, step=10.0):
    """Return accuracies of one seed a row, looked at every ``step`` local steps."""
    rows = []
    for seed, curve in enumerate(np.atleast_2d(values), start=1):
        for i, value in enumerate(curve):
            rows.append(dict(seed=seed, clock=step * i, Q=Q, metric="accuracy", split="test",
                             round=i, value=value))  # fmt: skip
    return pd.DataFrame(rows)


def test_sooner_compares_the_times_at_which_a_target_is_reached():
    a = times([0.1, 0.2, 0.6, 0.9], Q=10).assign(run="a")  # between 10 and 20 steps
    b = times([0.1, 0.2, 0.3, 0.7], Q=1).assign(run="b")  # between 20 and 30 steps
    got = claims.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    one, other = 3 * 10 / 10 + 1, 3 * 10 / 1 + 1  # time of a local step
    assert np.exp(got.low) == pytest.approx([20 * other / (20 * one)])
    assert np.exp(got.high) == pytest.approx([30 * other / (10 * one)])


def test_sooner_never_reads_a_curve_before_its_first_evaluation():
    """A target reached at the first look may have been reached at once: the ratio has no end."""
    a, b = times([0.1, 0.9], Q=10).assign(run="a"), times([0.1, 0.2, 0.9], Q=1).assign(run="b")
    got = claims.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert np.isinf(got.high).all() and np.isfinite(got.low).all()
    never = times([0.1, 0.1, 0.1], Q=1).assign(run="b")
    got = claims.sooner(record(pd.concat([a, never])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert np.isfinite(got.low).all() and np.isinf(got.high).all(), "censored at the end"
    both = pd.concat([never, never.assign(run="a")])
    got = claims.sooner(record(both), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert (got.low, got.high) == (-INF, INF)


def test_sooner_goes_by_seed():
    a = times([[0.1, 0.9, 0.9], [0.1, 0.1, 0.9]], Q=1).assign(run="a")
    b = times([[0.1, 0.1, 0.9], [0.1, 0.1, 0.9]], Q=1).assign(run="b").iloc[::-1]
    got = claims.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 1.0)
    assert np.exp(got.low) == pytest.approx([1.0, 0.5])
    other = b.assign(seed=b["seed"] + 5)
    with pytest.raises(claims.MissingRows, match="differ in seeds"):
        claims.sooner(record(pd.concat([a, other])), "a", "b", "accuracy", "test", 0.5, 1.0)


def test_smoother_compares_changes_in_the_second_half():
    a = [0, 9, 0, 9, 0, 9, 0, 1, 2, 1, 2]  # second half, rounds 60 to 100: 0 1 2 1 2
    b = [5, 5, 5, 5, 5, 5, 4, 7, 1, 7, 1]
    got = claims.smoother(record(curves({"a": [a, a], "b": [b, a]})), "a", "b", "loss", "train")
    assert np.exp(got.low) == pytest.approx([(3 + 6 + 6 + 6) / 4, 1.0]) and got.ratio
    lost = [*b[:-1], NAN]
    held = record(curves({"a": [a, lost, lost], "b": [lost, a, lost]}))
    got = claims.smoother(held, "a", "b", "loss", "train")
    assert got.low[:2].tolist() == [INF, -INF] and np.isnan(got.low[2])


def test_settles_compares_second_differences_of_the_first_and_last_fifth():
    rise = np.arange(11.0)  # rounds 0 to 100: the first fifth has the second difference at 20
    early = rise + [0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1]
    got = claims.settles(record(curves({"a": [early, 2 * early]})), "a", "loss", "train")
    assert np.exp(got.low) == pytest.approx([3 / 0.5, 6 / 1]) and got.ratio
    lost = np.where(rise == 10, NAN, early)
    got = claims.settles(record(curves({"a": [early, lost]})), "a", "loss", "train")
    assert got.low[1] == -INF and np.isfinite(got.low[0])


def test_during_averages_over_a_part_of_the_run():
    a, b = np.arange(11.0), np.zeros(11)  # rounds 0 to 100
    held = record(curves({"a": [a, 2 * a], "b": [b, b]}))
    got = claims.during(held, "a", "b", "loss", "train", 0.2, 0.4)
    assert got.low.tolist() == [-3.0, -6.0]
    held = record(curves({"a": [a, 2 * a], "b": [b, b]}, "accuracy"))
    assert claims.during(held, "a", "b", "accuracy", "train", 0.2, 0.4).low.tolist() == [3.0, 6.0]
    with pytest.raises(claims.MissingRows, match=r"no look at 'a' from 0.21 to 0.29"):
        claims.during(held, "a", "b", "accuracy", "train", 0.21, 0.29)


def test_saved_is_a_share_seed_by_seed():
    held = record(curves({"few": [30.0, 40.0], "many": [60.0, 50.0]}, "rounds", "clock"))
    assert claims.saved(held, "few", "many", "rounds", "clock").low == pytest.approx([0.5, 0.2])


def test_a_share_of_the_run_is_the_share_that_the_claim_names():
    a = np.arange(20.0)[None]
    held = record(curves({"a": a, "b": 2 * a}))
    assert claims.advantage(held, "a", "b", "loss", "train", 0.5).low.tolist() == [14.5]


def test_a_run_that_comes_back_before_its_end_has_not_diverged():
    guess = math.log(len(datasets.card("digits").classes))
    frame = curves({"a": [[guess] * 18 + [11 * guess, 1.0]]})
    frame = pd.concat([frame, curves({"a": [0.1]}, "accuracy", "test")])
    assert claims.diverged(record(frame, settings={"dataset": "digits"}), "a").low == [0.0]


def test_records_of_f1_know_divergence_too():
    loss = curves({"a": [11 * math.log(len(datasets.card("digits").classes))]})
    held = record(pd.concat([loss, curves({"a": [0.5]}, "f1", "test")]),
                  settings={"dataset": "digits"})  # fmt: skip
    assert claims.last(held, "a", "f1", "test").isna().all()


def test_a_slope_begins_at_its_start():
    x, y = [1, 2, 5, 10, 100], [1, 1, 1, 0.1, 0.01]
    frame = pd.DataFrame(dict(run="a", seed=1, metric="m", interval=x, value=y))
    known = np.polyfit(np.log(x[2:]), np.log(y[2:]), 1)[0]
    assert claims.slope(record(frame), "a", "m", "interval", 5).low == pytest.approx([known])


def test_a_target_met_before_training_tells_nothing():
    a, b = times([0.6, 0.9], Q=10).assign(run="a"), times([0.6, 0.9], Q=1).assign(run="b")
    got = claims.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert (got.low, got.high) == (-INF, INF)


def test_rows_that_are_missing_are_not_taken_for_divergence():
    frame = curves({"a": np.arange(20.0).reshape(2, 10)})
    short = frame[(frame["seed"] == 1) | (frame["round"] < 50)]
    with pytest.raises(claims.MissingRows, match="different rounds"):
        claims.last(record(short), "a", "loss", "train")


def test_sooner_falls_to_a_loss():
    a = times([3.0, 2.0, 0.4], Q=1).assign(run="a", metric="loss")
    b = times([3.0, 2.0, 1.0, 0.4], Q=1).assign(run="b", metric="loss")
    got = claims.sooner(record(pd.concat([a, b])), "a", "b", "loss", "test", 0.5, 1.0)
    assert np.exp(got.low) == pytest.approx([1.0]) and np.exp(got.high) == pytest.approx([3.0])


@pytest.mark.parametrize("power", [-1.0, -0.5, 2.0])
def test_slope_is_exact_on_power_laws(power):
    x = np.array([1, 2, 5, 10, 100])
    rows = [
        dict(run="a", seed=s, metric="squares", interval=i, value=s * float(i) ** power)
        for s in (1, 2, 3)
        for i in x
    ]
    frame = pd.DataFrame(rows)
    assert claims.slope(record(frame), "a", "squares", "interval").low == pytest.approx([power] * 3)
    frame.loc[frame["interval"] < 5, "value"] = 1.0
    got = claims.slope(record(frame), "a", "squares", "interval", 5)
    assert got.low == pytest.approx([power] * 3)
    assert claims.slope(record(frame), "a", "squares", "interval").low != pytest.approx([power] * 3)


def test_largest_over_chosen_rows():
    parts = pd.concat(curves({"a": [1.0, 5.0 / i]}, "factor", interval=i) for i in (1, 2, 10))
    held = record(parts)
    assert claims.largest(held, "a", "factor").high == [5]
    assert claims.largest(held, "a", "factor", interval=[2, 10]).low == [2.5]
    assert claims.largest(held, "a", "factor", interval=10).words(0.95) == "1"
    with pytest.raises(FedlibError, match="no rows"):
        claims.largest(held, "a", "factor", interval=3)
    broken = parts.assign(value=[*parts["value"][:-1], NAN])
    assert np.isnan(claims.largest(record(broken), "a", "factor").high), "not passed over"


# --- from outcomes to a verdict -------------------------------------------------------------------


def made(*outcomes, full=False, essential=True):
    return [Check("q", "asked", "m", o, essential, full=full) for o in outcomes]


@pytest.mark.parametrize(
    "kind, checks, expected",
    [
        ("measured", made(HOLDS, HOLDS, full=True), claims.REPRODUCED),
        ("measured", made(HOLDS, HOLDS), claims.REDUCED),
        ("measured", made(HOLDS, full=True) + made(HOLDS), claims.REDUCED),
        ("proved", made(HOLDS), claims.PROVED),
        ("arithmetic", made(HOLDS, full=True), claims.ARITHMETIC),
        ("measured", made(HOLDS, CONTRADICTED, UNDECIDED), claims.MIXED),
        ("measured", made(CONTRADICTED, UNDECIDED), claims.NOT),
        ("measured", made(HOLDS, UNDECIDED), UNDECIDED),
        ("proved", made(CONTRADICTED), claims.NOT),
        ("measured", made(HOLDS, NO_RECORD), claims.NO_RECORD),
        ("measured", made(CONTRADICTED, NO_RECORD), claims.NO_RECORD),
        ("measured", [], claims.NO_DATA),
        ("measured", made(HOLDS, full=True) + made(CONTRADICTED, essential=False),
         claims.REPRODUCED),
        ("measured", made(HOLDS, HOLDS, essential=False), UNDECIDED),
        ("measured", made(NO_RECORD, essential=False), claims.NO_RECORD),
        ("proved", made(CONTRADICTED, essential=False), claims.PROVED),
        ("proved", made(UNDECIDED), UNDECIDED),
    ],
)  # fmt: skip
def test_verdict(kind, checks, expected):
    assert claims.verdict(dict(kind=kind), checks) == expected


def test_outcomes_in_words():
    assert claims.told(made(HOLDS)) == "1 of 1 holds"
    assert claims.told(made(HOLDS, UNDECIDED, CONTRADICTED)) == (
        "1 of 3 hold, 1 contradicted, 1 undecided"
    )
    controls = made(HOLDS) + made(HOLDS, UNDECIDED, essential=False)
    assert claims.told(controls) == "1 of 1 holds; controls: 1 of 2 hold, 1 undecided"


# --- every rule can come out each way -------------------------------------------------------------

CURVES = ("advantage", "sooner", "smoother", "settles", "during", "saved", "slope")
NOISE = np.random.default_rng(1).standard_normal((2, 40))


def imitation(check, settings, values):
    """Return a record in which the check measures ``values``, one a seed (a sign for sooner)."""
    w = {k: claims._named(v, settings) for k, v in check["with"].items()}
    manifest = dict(profile="quick", settings=settings, paper="", experiment="")
    if check["measure"] == "advantage":
        sign = -1 if w["metric"] == "loss" else 1
        runs = {w["a"]: 0.5 + sign * values, w["b"]: np.full(len(values), 0.5)}
        frame = curves(runs, w["metric"], w["split"])
        if w["metric"] != "loss":
            frame = pd.concat([frame, curves({run: 0 * v + 0.5 for run, v in runs.items()})])
    elif check["measure"] == "sooner":
        base, parts = 1000.0, []
        for run, Q, shift in ((w["a"], 10, values), (w["b"], 1, 0 * values)):
            step = 3 * w["t_comm"] / Q + 1
            for seed, s in enumerate(shift, start=1):
                at = base * np.exp(-s) / step
                clock = [0.0, at * 0.999, at, 9 * at]
                part = dict(
                    run=run,
                    seed=seed,
                    clock=clock,
                    round=range(4),
                    Q=Q,
                    metric=w["metric"],
                    split=w["split"],
                    value=[0.0, 0.0, 1.0, 1.0],
                )
                parts.append(pd.DataFrame(part))  # fmt: skip
        frame = pd.concat(parts)
    elif check["measure"] == "smoother":
        zigzag = np.array([0.0, 1.0] * 10)
        runs = {
            w["a"]: np.exp(-values)[:, None] * zigzag,
            w["b"]: 1.0 + 0 * values[:, None] + zigzag,
        }
        frame = curves(runs, w["metric"], w["split"])
    elif check["measure"] == "settles":
        zigzag = np.array([0.0, 1.0] * 20)
        size = np.where(np.arange(40) < 20, np.exp(values)[:, None], 1.0)
        frame = curves({w["run"]: size * zigzag}, w["metric"], w["split"])
    elif check["measure"] == "during":
        sign = -1 if w["metric"] == "loss" else 1
        runs = {w["a"]: sign * values[:, None] + np.zeros(21), w["b"]: np.zeros((len(values), 21))}
        frame = curves(runs, w["metric"], w["split"])
    elif check["measure"] == "saved":
        runs = {w["run"]: 50 * (1 - values), w["of"]: 50 + 0 * values}
        frame = curves(runs, w["metric"], w["split"])
    elif check["measure"] == "slope":
        x = np.array([1.0, 10, 50, 100, 1000])
        rows = [dict(run=w["run"], seed=s, metric=w["metric"], split="train", value=i**v)
                | {w["x"]: i} for s, v in enumerate(values, start=1) for i in x]  # fmt: skip
        frame = pd.DataFrame(rows)
    elif check["measure"] == "diverged":
        frame = curves({w["run"]: np.where(values > 0.5, NAN, 1.0)})
    else:
        columns = {k: v for k, v in w.items() if k not in ("run", "metric", "split")}
        frame = curves({w["run"]: values}, w["metric"], w.get("split", "time"), **columns)
    return record(frame, **manifest)


def judged(monkeypatch, paper, claim, check, values):
    settings = catalogue.settings(paper, check["experiment"], "smoke") | {"seeds": 5}
    settings.pop("dataset", None)
    held = imitation(check, settings, np.asarray(values, dtype=float))
    monkeypatch.setattr(claims.records, "load", lambda *names: held)
    return claims._check(paper, claim, check, None).outcome


@every_check
def test_a_record_can_support_contradict_or_leave_open_every_rule(paper, claim, check, monkeypatch):
    few = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    small = 1e-4 * few
    if check["asks"] == "better":
        s = claims._smallest(claim, check)
        good, bad, open_ = 3 * s + small, -3 * s + small, 40 * s * few
        assert judged(monkeypatch, paper, claim, check, s / 3 + small) == CONTRADICTED, "the same"
    elif check["asks"] == "same":
        s = claims._smallest(claim, check)
        good, bad, open_ = small, 3 * s + small, 40 * s * few
    else:
        least, most = check["bounds"]
        width = 1.0 if math.isinf(most - least) else max(most - least, 0.1)
        least = most - width if math.isinf(least) else least
        most = least + width if math.isinf(most) else most
        middle = (least + most) / 2
        good, bad, open_ = middle + 0 * few, most + width + 0 * few, middle + 40 * width * few
        if math.isinf(check["bounds"][1]):
            bad = least - width + 0 * few
        if check["measure"] == "diverged":
            good, bad, open_ = np.ones(9), np.zeros(9), np.array([0, 1, 1, 0, 1])
    assert judged(monkeypatch, paper, claim, check, good) == HOLDS
    assert judged(monkeypatch, paper, claim, check, bad) == CONTRADICTED
    if check["measure"] in (*CURVES, "diverged"):  # others: nothing random
        assert judged(monkeypatch, paper, claim, check, open_) == UNDECIDED
        if claim["kind"] != "arithmetic":  # what delays alone decide needs no seeds
            assert judged(monkeypatch, paper, claim, check, good[:2]) == UNDECIDED, "too few seeds"


@every_check
def test_noise_in_place_of_the_curve_is_not_taken_for_support(paper, claim, check, monkeypatch):
    if check["measure"] not in CURVES:
        pytest.skip("nothing random")
    wrong = sum(
        judged(monkeypatch, paper, claim, check, 3 * NOISE.reshape(-1)[5 * i : 5 * i + 5]) == HOLDS
        for i in range(8)
    )
    assert wrong <= 1


# --- the claims as they stand ---------------------------------------------------------------------


def test_all_claims_of_the_specification_are_there():
    assert {f"GFA-C{k}" for k in range(1, 9)} | {"GFA-C1-control"} <= set(IDS)
    assert len(IDS) == len(set(IDS))


@every_claim
def test_claim_is_complete(paper, claim):
    assert claim["statement"] and claim["where"] and claim["paper_reports"] and claim["expected"]
    assert claim["kind"] in claims.KINDS
    words = [check["what"] for check in claim["check"]]
    assert len(set(words)) == len(words)
    for check in claim["check"]:
        keys = {"asks", "experiment", "measure", "what", "with"}
        keys |= {"bounds"} if check["asks"] == "within" else set()
        assert set(check) - {"essential"} == keys
        if check["asks"] in ("better", "same"):
            assert claims._smallest(claim, check) > 0 and claim["because"]
        else:
            assert check["bounds"][0] <= check["bounds"][1]


@every_check
def test_the_runs_of_a_rule_are_those_of_every_profile(paper, claim, check):
    """Smoke and the stored records by their rows, the paper's profile by its settings."""
    for profile in catalogue.profiles(paper, check["experiment"]):
        settings = catalogue.settings(paper, check["experiment"], profile)
        asked = {claims._named(v, settings) for k, v in check["with"].items()
                 if k in ("a", "b", "run")}  # fmt: skip
        try:
            runs = set(records.load(paper, check["experiment"], profile).frame["run"])
        except records.MissingRecord:
            runs = {run["run"] for run in settings.get("runs", [])} or asked
        assert asked <= runs, profile


@every_claim
def test_verdict_is_the_expected_one(paper, claim, verdicts):
    (row,) = (row for row in verdicts[paper] if row["id"] == claim["id"])
    assert row["verdict"] == claim["expected"], row["told"]


def test_rows_hold_what_readers_and_machines_need(verdicts):
    rows = verdicts[PAPER]
    assert [row["id"] for row in rows] == [claim["id"] for claim in claims.table(PAPER)]
    for row, claim in zip(rows, claims.table(PAPER), strict=True):
        assert row["verdict"] in claims.VERDICTS and row["statement"] == claim["statement"]
        found = claims.checks(PAPER, row["id"])
        assert row["checks"] == [vars(check) for check in found]
        assert row["told"] == claims.told(found)
    counts = claims.count(rows)
    assert tuple(counts) == claims.VERDICTS and sum(counts.values()) == len(rows)
    assert counts["mixed"] == sum(row["verdict"] == "mixed" for row in rows)


def test_without_records_there_is_no_verdict(tmp_path):
    for row in claims.judge(PAPER, tmp_path):
        assert row["verdict"] == claims.NO_RECORD and row["profile"] == ""
        assert {check["measured"] for check in row["checks"]} == {claims.NO_RECORD}


def test_runs_are_named_by_role():
    settings = dict(clients_grid=[20, 10, 50], Q=5)
    assert claims._named("Q={Q}, K={clients_grid.smallest}", settings) == "Q=5, K=10"
    assert claims._named("K={clients_grid.largest}", settings) == "K=50"
    assert claims._named(0.5, settings) == 0.5
    with pytest.raises(FedlibError, match="run 'clients_gird'. Did you mean 'clients_grid'"):
        claims._named("K={clients_gird.largest}", settings)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(FedlibError, match=r"Did you mean 'participation'\?"):
        claims.judge("participaton")
    with pytest.raises(FedlibError, match=r"claim 'GFA-C9'\. .*Valid: GFA-C1, "):
        claims.checks(PAPER, "GFA-C9")


# --- scale, data and foresight --------------------------------------------------------------------

IDEAL = {"amplified": 0.3, "wait-minibatch": 0.4, "wait-full": 0.405, "matched-rate": 0.5,
         "no-amplification": 0.6}  # fmt: skip


def fig1(tmp_path, losses, profile="quick", **manifest):
    """Store Figure 1 with these final losses (accuracy is one minus loss); judge GFA-C1."""
    noise = 0.001 * np.arange(5)
    loss = curves({run: value + noise for run, value in losses.items()})
    accuracy = curves({r: 1 - v + noise for r, v in losses.items()}, "accuracy", "test")
    settings = catalogue.settings(PAPER, "fig1-tuned", profile) | {"seeds": 5}
    base = dict(
        paper=PAPER, experiment="fig1-tuned", profile=profile, settings=settings,
        seeds=[1, 2, 3, 4, 5],
        fidelity="canonical", data={"file": "hash"}, device="CPU", date="2026-05-04T03:02:01",
        commit="a" * 40, wall_seconds=1.0, diverged={}, versions={},
        instructions="AVX2", small=None,
        **freshness.now(settings),
    )  # fmt: skip
    records.save(tmp_path, pd.concat([loss, accuracy]), base | manifest)
    (row,) = claims.judge(PAPER, tmp_path, ["GFA-C1"])
    return row


def test_order_in_the_record_decides(tmp_path):
    row = fig1(tmp_path, IDEAL)
    assert row["verdict"] == claims.REDUCED and row["told"].startswith("5 of 5 hold;")
    assert row["profile"] == "quick" and row["record"].startswith("fig1-tuned.quick, ")
    swapped = IDEAL | {"amplified": IDEAL["no-amplification"], "no-amplification": 0.3}
    assert fig1(tmp_path, swapped)["told"].startswith("1 of 5 hold, 4 contradicted;")
    backwards = {run: -value for run, value in IDEAL.items()} | {"wait-full": -0.5}
    assert fig1(tmp_path, backwards)["verdict"] == claims.NOT


def test_reproduced_needs_the_paper_s_data_and_scale(tmp_path):
    assert fig1(tmp_path, IDEAL, "paper")["verdict"] == claims.REPRODUCED
    assert fig1(tmp_path, IDEAL, "paper", fidelity="re-encoded")["verdict"] == claims.REDUCED
    substitute = catalogue.settings(PAPER, "fig1-tuned", "paper") | {
        "dataset": "digits",
        "seeds": 5,
    }
    assert fig1(tmp_path, IDEAL, "paper", settings=substitute)["verdict"] == claims.REDUCED


def test_fewer_seeds_than_the_profile_asks_for_decide_nothing(tmp_path):
    wanted = catalogue.settings(PAPER, "fig1-tuned", "quick") | {"seeds": 6}
    row = fig1(tmp_path, IDEAL, settings=wanted)
    assert row["verdict"] == UNDECIDED
    told = {check["why"] for check in row["checks"] if check["essential"]}
    assert told == {"5 seeds are fewer than 6"}


def test_intervals_are_simultaneous_over_the_checks_of_a_claim(monkeypatch):
    held = record(curves({"a": np.zeros(5), "b": [1, 2, 3, 4, 6]}))
    monkeypatch.setattr(claims.records, "load", lambda *names: held)
    check = dict(asks="better", experiment="e", measure="advantage", what="q") | {
        "with": dict(a="a", b="b", metric="loss", split="train")
    }
    claim = dict(kind="measured", smallest={"loss": 0.1}, check=[check] * 5)
    got = claims._check(PAPER, claim, check, None).measured
    gain = claims.advantage(held, "a", "b", "loss", "train")
    assert got == gain.words(0.99) != gain.words(0.95)


def test_a_record_without_the_run_counts_as_no_record(tmp_path):
    row = fig1(tmp_path, {run: v for run, v in IDEAL.items() if run != "amplified"})
    assert row["verdict"] == claims.NO_RECORD
    assert "no rows for {'run': 'amplified'" in row["checks"][0]["why"]


def test_whether_the_rule_is_older_than_the_record(tmp_path):
    now = claims.rules(PAPER, "fig1-tuned")
    assert set(now) == {"GFA-C1", "GFA-C1-control", "GFA-C2-control"}
    assert fig1(tmp_path, IDEAL, rules=now)["foreseen"]
    assert not fig1(tmp_path, IDEAL, rules=now | {"GFA-C1": "another"})["foreseen"]
    assert not fig1(tmp_path, IDEAL)["foreseen"], "not recorded is not foreseen"


def test_a_claim_is_foreseen_when_all_its_records_are_younger(tmp_path, monkeypatch):
    claim = next(c for c in claims.table(PAPER) if c["id"] == "GFA-C6")  # figB1 and figB2
    for figure in ("figB1", "figB2"):
        held = records.load(PAPER, figure)
        rules = claims.rules(PAPER, figure) if figure == "figB1" else {}
        records.save(tmp_path, held.frame, held.manifest | {"rules": rules})
    (row,) = claims.judge(PAPER, tmp_path, [claim["id"]])
    assert len(row["origins"]) == 2 and not row["foreseen"]
    held = records.load(PAPER, "figB2")
    records.save(tmp_path, held.frame, held.manifest | {"rules": claims.rules(PAPER, "figB2")})
    (row,) = claims.judge(PAPER, tmp_path, [claim["id"]])
    assert row["foreseen"]


def test_the_hash_of_a_rule_sees_what_decides_and_no_words():
    claim = claims.table(PAPER)[0]
    first = claim["check"][0]
    for same in (claim | {"statement": "x", "note": "y"},
                 claim | {"check": [first | {"what": "z"}, *claim["check"][1:]]}):  # fmt: skip
        assert claims._rule(same) == claims._rule(claim)
    for other in (claim | {"kind": "proved"}, claim | {"smallest": {"loss": 0.1}},
                  claim | {"check": [first | {"essential": False}, *claim["check"][1:]]},
                  claim | {"check": claim["check"][1:]}):  # fmt: skip
        assert claims._rule(other) != claims._rule(claim)


def test_the_hash_of_a_rule_covers_the_code_that_judges(monkeypatch):
    first, last = claims.table(PAPER)[0], claims.table(PAPER)[-1]
    before = claims._rule(first), claims._rule(last)
    real = freshness.code
    monkeypatch.setattr(claims.freshness, "code", lambda s: real(s) | (
        {"advantage": "0"} if s.endswith(":advantage") else {}))  # fmt: skip
    assert claims._rule(first) != before[0] and claims._rule(last) == before[1]
    monkeypatch.undo()
    monkeypatch.setattr(claims, "FEWEST", 4)
    assert claims._rule(last) != before[1]


def test_a_run_keeps_the_rules_of_its_day(tmp_path):
    held = experiments.run(PAPER, "figB2", "smoke", [7], out=tmp_path, progress=False)
    assert held.manifest["rules"] == claims.rules(PAPER, "figB2") != {}
