"""Quantities in records: their intervals, and each measure on curves with a known answer."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from curves import curves, record
from scipy import stats

from fedlib import datasets
from fedlib.errors import FedlibError
from fedlib.lab.evidence import measures
from fedlib.lab.evidence.measures import Measured

NAN, INF = float("nan"), float("inf")


# --- intervals ------------------------------------------------------------------------------------


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
    nearly = np.array([-3.0, np.nextafter(-3.0, 0)])
    assert Measured(nearly, nearly).words(0.95) == "-3"
    assert Measured(values, values, lost="a diverged").words(0.95) == "a diverged"
    ratio = np.log([2.0, 2.0, 2.0])
    assert Measured(ratio, ratio, "{} times", ratio=True).words(0.95) == "2 to 2 times"
    nothing = Measured(np.array([-INF]), np.array([INF]), ratio=True)
    assert nothing.words(0.95) == "not to be told"


# --- measures -------------------------------------------------------------------------------------


def test_advantage_is_positive_for_whoever_ends_better():
    low, high = curves({"a": [1.0, 2.0], "b": [3.0, 5.0]}), curves({"a": [1, 2], "b": [3, 5]}, "f1")
    both = record(pd.concat([low, high]))
    assert measures.advantage(both, "a", "b", "loss", "train").low.tolist() == [2.0, 3.0]
    assert measures.advantage(both, "a", "b", "f1", "train").low.tolist() == [-2.0, -3.0]


def test_advantage_goes_by_seed_not_by_row():
    frame = curves({"a": [1.0, 2.0, 4.0], "b": [0.0, 1.0, 3.0]})
    frame = frame.sort_values(["run", "seed"], ascending=[True, False])
    assert measures.advantage(record(frame), "b", "a", "loss", "train").low.tolist() == [1, 1, 1]
    fewer = frame[(frame["run"] == "a") | (frame["seed"] > 1)]  # one seed has no partner
    with pytest.raises(measures.MissingRows, match="differ in seeds"):
        measures.advantage(record(fewer), "b", "a", "loss", "train")


def test_final_is_the_mean_over_the_last_tenth_of_the_rounds():
    line = np.arange(21.0)  # rounds 0 to 200; the mean of a line is its height in the middle
    frame = curves({"a": [line, 2 * line]})
    for share, expected in ((0.0, 20), (0.1, 19), (0.125, 18.75), (0.5, 15)):
        found = measures.last(record(frame), "a", "loss", "train", share)
        assert found.to_numpy() == pytest.approx([expected, 2 * expected]), share
    uneven = frame[frame["round"].isin([0, 10, 20, 30, 170, 198, 200])]  # rounds decide, not rows
    found = measures.last(record(uneven), "a", "loss", "train", 0.1)
    assert found.to_numpy() == pytest.approx([19, 38])
    bent = frame[frame["round"].isin([0, 160, 190, 200])].assign(value=[0, 0, 3, 1] * 2)
    found = measures.last(record(bent), "a", "loss", "train", 0.1)  # 2 after 180 rounds
    assert found.to_numpy() == pytest.approx([(2 + 3) / 4 + (3 + 1) / 4] * 2)


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
    got = measures.advantage(record(curves({"a": a, "b": b})), "a", "b", "loss", "train")
    assert got.low.tolist() == expected and got.words(0.95) == words


def test_a_loss_far_above_guessing_has_diverged_though_finite():
    classes = len(datasets.card("digits").classes)
    guess = math.log(classes)
    loss = curves({"a": [9.9 * guess, 10.1 * guess, guess]})
    frame = pd.concat([loss, curves({"a": [0.1, 0.1, 0.9]}, "accuracy", "test")])
    held = record(frame, settings={"dataset": "digits"})
    assert measures.last(held, "a", "loss", "train").isna().tolist() == [False, True, False]
    assert measures.last(held, "a", "accuracy", "test").isna().tolist() == [False, True, False]
    assert measures.diverged(held, "a").low.tolist() == [0, 1, 0]
    assert measures.diverged(held, "a").high.tolist() == [0, 1, 0]
    assert measures.diverged(held, "a").text == "1 of 3 seeds"
    exact = stats.beta.ppf([0.025, 0.975], [1, 2], [3, 2])  # Clopper and Pearson, 1 of 3
    assert measures.diverged(held, "a").interval(0.95) == pytest.approx(tuple(exact))
    back = curves({"a": [[20 * guess] * 10 + [1.0] * 2]})  # recovered before the end
    held = record(pd.concat([back, frame.tail(1)]), settings={"dataset": "digits"})
    assert measures.diverged(held, "a").low == [0.0]


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
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    one, other = 3 * 10 / 10 + 1, 3 * 10 / 1 + 1  # time of a local step
    assert np.exp(got.low) == pytest.approx([20 * other / (20 * one)])
    assert np.exp(got.high) == pytest.approx([30 * other / (10 * one)])


def test_sooner_never_reads_a_curve_before_its_first_evaluation():
    """A target reached at the first look may have been reached at once: the ratio has no end."""
    a, b = times([0.1, 0.9], Q=10).assign(run="a"), times([0.1, 0.2, 0.9], Q=1).assign(run="b")
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert np.isinf(got.high).all() and np.isfinite(got.low).all()
    never = times([0.1, 0.1, 0.1], Q=1).assign(run="b")
    got = measures.sooner(record(pd.concat([a, never])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert np.isfinite(got.low).all() and np.isinf(got.high).all(), "censored at the end"
    both = pd.concat([never, never.assign(run="a")])
    got = measures.sooner(record(both), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert (got.low, got.high) == (-INF, INF)


def test_sooner_goes_by_seed():
    a = times([[0.1, 0.9, 0.9], [0.1, 0.1, 0.9]], Q=1).assign(run="a")
    b = times([[0.1, 0.1, 0.9], [0.1, 0.1, 0.9]], Q=1).assign(run="b").iloc[::-1]
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 1.0)
    assert np.exp(got.low) == pytest.approx([1.0, 0.5])
    other = b.assign(seed=b["seed"] + 5)
    with pytest.raises(measures.MissingRows, match="differ in seeds"):
        measures.sooner(record(pd.concat([a, other])), "a", "b", "accuracy", "test", 0.5, 1.0)


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", 1), ("loss", -1)])
def test_widens_compares_leads_at_one_time(metric, sign):
    """Straight lines, of which the mean is the middle: Q = 30 ends first, with fast messages."""
    a = times([[0.0, 0.3, 0.6], [0.0, 0.2, 0.4]], Q=30, step=100.0).assign(run="a")
    b = times([[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]], Q=1, step=100.0).assign(run="b")
    held = record(pd.concat([a, b]).assign(metric=metric))
    got = measures.widens(held, "a", "b", metric, "test", [10.0, 100.0])
    end = 200 * (3 * 10 / 30 + 1)

    def lead(slope, t):
        return (slope / (3 * t / 30 + 1) - 0.005 / (3 * t + 1)) * end / 2

    wanted = [sign * (lead(slope, 100) - lead(slope, 10)) for slope in (0.003, 0.002)]
    assert got.low == pytest.approx(wanted) and got.high == pytest.approx(wanted)
    behind = measures.widens(held, "b", "a", metric, "test", [10.0, 100.0])
    assert behind.low == pytest.approx([-one for one in wanted])
    with pytest.raises(measures.MissingRows, match="differ in seeds"):
        measures.widens(record(pd.concat([a, b[b["seed"] == 1]])), "a", "b", "accuracy", "test",
                        [10.0, 100.0])  # fmt: skip


def test_earlier_compares_times_between_looks_by_the_records_clock():
    looks = {"a": [8.0, 4.0, 0.0, 0.0], "b": [8.0, 7.0, 3.0, 0.0], "never": [8.0, 7.0, 6.0, 5.0]}
    parts = [pd.DataFrame(dict(run=run, seed=seed, round=range(4), clock=[0.0, 10.0, 30.0, 50.0],
                               metric="log gap", split="train", value=values))
             for run, values in looks.items() for seed in (1, 2)]  # fmt: skip
    held = record(pd.concat(parts))
    got = measures.earlier(held, "a", "b", "log gap", "train", 2.0)
    assert np.exp(got.low) == pytest.approx([(30 + 20 / 3) / 20] * 2) and got.ratio
    never = measures.earlier(held, "never", "b", "log gap", "train", 2.0)
    assert never.low.tolist() == [-INF, -INF]
    both = measures.earlier(held, "never", "never", "log gap", "train", 2.0)
    assert np.isnan(both.low).all()


def test_smoother_compares_changes_in_the_second_half():
    a = [0, 9, 0, 9, 0, 9, 0, 1, 2, 1, 2]  # second half, rounds 60 to 100: 0 1 2 1 2
    b = [5, 5, 5, 5, 5, 5, 4, 7, 1, 7, 1]
    got = measures.smoother(record(curves({"a": [a, a], "b": [b, a]})), "a", "b", "loss", "train")
    assert np.exp(got.low) == pytest.approx([(3 + 6 + 6 + 6) / 4, 1.0]) and got.ratio
    lost = [*b[:-1], NAN]
    held = record(curves({"a": [a, lost, lost], "b": [lost, a, lost]}))
    got = measures.smoother(held, "a", "b", "loss", "train")
    assert got.low[:2].tolist() == [INF, -INF] and np.isnan(got.low[2])


def test_smoother_between_compares_means_of_neighbouring_evaluations():
    """Three looks make a block, counted from the end: a swing of three looks is not seen."""
    swing = np.array([0, *[9, 0, -9] * 8])  # rounds 0 to 240, so blocks end at 30, 60, ...
    steps = np.array([0, *np.repeat(np.arange(8), 3)])
    runs = {"a": [steps + swing, steps], "b": [3 * steps + swing, 2 * steps + 5 * swing]}
    held = record(curves(runs))
    got = measures.smoother_between(held, "a", "b", "loss", "train", 3)
    assert np.exp(got.low) == pytest.approx([3, 2]) and got.ratio
    assert (measures.smoother(held, "a", "b", "loss", "train").low < np.log(2)).any()
    lost = np.where(np.arange(25) == 24, NAN, steps)
    held = record(curves({"a": [lost], "b": [steps]}))
    assert measures.smoother_between(held, "a", "b", "loss", "train", 3).low.tolist() == [-INF]


def test_settles_compares_second_differences_of_the_first_and_last_fifth():
    rise = np.arange(21.0)  # rounds 0 to 200: the first fifth has second differences at 30 and 40
    early = rise + np.array([99, 0, 0, 3, *[0] * 16, 1])
    got = measures.settles(record(curves({"a": [early, 2 * early]})), "a", "loss", "train")
    assert np.exp(got.low) == pytest.approx([(3 + 6) / 2 / 0.25, 18]) and got.ratio
    lost = np.where(rise == 20, NAN, early)
    got = measures.settles(record(curves({"a": [early, lost]})), "a", "loss", "train")
    assert got.low[1] == -INF and np.isfinite(got.low[0])


def test_during_does_not_depend_on_when_one_looked():
    """The early look at 10 hardly counts: it stands for a tenth of the rounds, on a line."""
    looks = [(0, 5.0), (10, 1.0), (100, 1.0)], [(0, 5.0), (50, 2.0), (100, 1.0)]
    frame = pd.DataFrame(
        [(0, run, "loss", "train", round_, value)
         for run, curve in zip("ab", looks, strict=True) for round_, value in curve],
        columns=["seed", "run", "metric", "split", "round", "value"],
    )  # fmt: skip
    got = measures.during(
        record(frame.sample(frac=1, random_state=0)), "a", "b", "loss", "train", 0, 1
    )
    a, b = (3.0 * 10 + 1.0 * 90) / 100, (3.5 * 50 + 1.5 * 50) / 100
    assert got.low == pytest.approx([b - a])


def test_during_averages_over_a_part_of_the_run():
    a, b = np.arange(11.0), np.zeros(11)  # rounds 0 to 100
    held = record(curves({"a": [a, 2 * a], "b": [b, b]}))
    got = measures.during(held, "a", "b", "loss", "train", 0.2, 0.4)
    assert got.low.tolist() == [-3.0, -6.0]
    held = record(curves({"a": [a, 2 * a], "b": [b, b]}, "accuracy"))
    assert measures.during(held, "a", "b", "accuracy", "train", 0.2, 0.4).low.tolist() == [3.0, 6.0]
    between = measures.during(held, "a", "b", "accuracy", "train", 0.21, 0.29)
    assert between.low == pytest.approx([2.5, 5.0]), "on a line between two looks"


def test_saved_is_a_share_seed_by_seed():
    held = record(curves({"few": [30.0, 40.0], "many": [60.0, 50.0]}, "rounds", "clock"))
    assert measures.saved(held, "few", "many", "rounds", "clock").low == pytest.approx([0.5, 0.2])


def test_a_share_of_the_run_is_the_share_that_the_claim_names():
    a = np.arange(20.0)[None]
    held = record(curves({"a": a, "b": 2 * a}))
    assert measures.advantage(held, "a", "b", "loss", "train", 0.5).low == pytest.approx([14.25])


def test_a_run_that_comes_back_before_its_end_has_not_diverged():
    guess = math.log(len(datasets.card("digits").classes))
    frame = curves({"a": [[guess] * 18 + [11 * guess, 1.0]]})
    frame = pd.concat([frame, curves({"a": [0.1]}, "accuracy", "test")])
    assert measures.diverged(record(frame, settings={"dataset": "digits"}), "a").low == [0.0]


def test_records_of_f1_know_divergence_too():
    loss = curves({"a": [11 * math.log(len(datasets.card("digits").classes))]})
    held = record(pd.concat([loss, curves({"a": [0.5]}, "f1", "test")]),
                  settings={"dataset": "digits"})  # fmt: skip
    assert measures.last(held, "a", "f1", "test").isna().all()


def test_a_slope_begins_at_its_start():
    x, y = [1, 2, 5, 10, 100], [1, 1, 1, 0.1, 0.01]
    frame = pd.DataFrame(dict(run="a", seed=1, metric="m", interval=x, value=y))
    known = np.polyfit(np.log(x[2:]), np.log(y[2:]), 1)[0]
    assert measures.slope(record(frame), "a", "m", "interval", 5).low == pytest.approx([known])


def test_a_target_met_before_training_tells_nothing():
    a, b = times([0.6, 0.9], Q=10).assign(run="a"), times([0.6, 0.9], Q=1).assign(run="b")
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert (got.low, got.high) == (-INF, INF)


def test_an_untrained_model_has_reached_nothing():
    a = times([0.6, 0.1, 0.2, 0.9], Q=1).assign(run="a")  # by chance; then between 20 and 30 steps
    b = times([0.1, 0.2, 0.9, 0.9], Q=1).assign(run="b")  # between 10 and 20 steps
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "accuracy", "test", 0.5, 10.0)
    assert np.exp([got.low[0], got.high[0]]) == pytest.approx([10 / 30, 20 / 20])


def test_rows_that_are_missing_are_not_taken_for_divergence():
    frame = curves({"a": np.arange(20.0).reshape(2, 10)})
    short = frame[(frame["seed"] == 1) | (frame["round"] < 50)]
    with pytest.raises(measures.MissingRows, match="different rounds"):
        measures.last(record(short), "a", "loss", "train")


def test_sooner_falls_to_a_loss():
    a = times([3.0, 2.0, 0.4], Q=1).assign(run="a", metric="loss")
    b = times([3.0, 2.0, 1.0, 0.4], Q=1).assign(run="b", metric="loss")
    got = measures.sooner(record(pd.concat([a, b])), "a", "b", "loss", "test", 0.5, 1.0)
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
    assert measures.slope(record(frame), "a", "squares", "interval").low == pytest.approx(
        [power] * 3
    )
    frame.loc[frame["interval"] < 5, "value"] = 1.0
    got = measures.slope(record(frame), "a", "squares", "interval", 5)
    assert got.low == pytest.approx([power] * 3)
    assert measures.slope(record(frame), "a", "squares", "interval").low != pytest.approx(
        [power] * 3
    )


def test_largest_over_chosen_rows():
    parts = pd.concat(curves({"a": [1.0, 5.0 / i]}, "factor", interval=i) for i in (1, 2, 10))
    held = record(parts)
    assert measures.largest(held, "a", "factor").high == [5]
    assert measures.largest(held, "a", "factor", interval=[2, 10]).low == [2.5]
    assert measures.largest(held, "a", "factor", interval=10).words(0.95) == "1"
    with pytest.raises(FedlibError, match="no rows"):
        measures.largest(held, "a", "factor", interval=3)
    broken = parts.assign(value=[*parts["value"][:-1], NAN])
    assert np.isnan(measures.largest(record(broken), "a", "factor").high), "not passed over"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([1, 2], [1, 2], 1.5),
        ([0, 2], [2, 4], 2.0),  # middles
        ([1, 2], [3, INF], 2.0),  # one has no upper end and stands for its lower one
        ([-INF, 2], [4, 2], 3.0),
        ([INF, INF], [INF, INF], INF),
        ([-INF, -INF], [-INF, -INF], -INF),
    ],
)
def test_the_estimate_is_the_mean_of_the_middles(low, high, expected):
    assert Measured(np.array(low, float), np.array(high, float)).estimate == expected


def test_without_a_mean_there_is_no_estimate():
    for values in ([INF, -INF], [NAN, 1.0]):
        assert np.isnan(Measured(np.array(values), np.array(values)).estimate)


@pytest.mark.parametrize(
    ("values", "beside", "ratio", "expected"),
    [
        ([-0.02, -0.028], (0.81, "accuracy"), False, "2.4 points of 81"),
        ([0.00045, 0.00045], (0.5, "f1"), False, "0.04 points of 50"),
        ([0.04, 0.05], (0.5, "loss"), False, "0.045 of 0.5"),
        ([math.log(1.5)] * 2, None, True, "1.5 times"),
        ([-math.log(2)] * 2, (0.0, "log speed"), False, "2 times"),
        ([0.663, 0.663], None, False, "0.66"),
        ([INF, INF], None, True, ""),
    ],
)
def test_a_size_is_told_beside_what_it_is_taken_from(values, beside, ratio, expected):
    values = np.array(values)
    assert Measured(values, values, ratio=ratio, beside=beside).size() == expected


def test_a_difference_is_seen_beside_the_run_it_is_taken_from():
    held = record(curves({"a": [0.5, 0.7], "b": [0.4, 0.5]}, "accuracy", "test"))
    assert measures.advantage(held, "a", "b", "accuracy", "test").size() == "15.0 points of 45"
    assert measures.during(held, "b", "a", "accuracy", "test", 0, 1).size() == "15.0 points of 60"
