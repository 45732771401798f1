"""Verdicts follow from records: measures with known answers, rules, and the shipped claims."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedlib.errors import FedlibError
from fedlib.evidence import claims, records
from fedlib.evidence.claims import Check

PAPER = "participation"
EVERY = [(paper, claim) for paper in claims.papers() for claim in claims.table(paper)]
IDS = [claim["id"] for _, claim in EVERY]
every_claim = pytest.mark.parametrize("paper, claim", EVERY, ids=IDS)


def curves(values, metric="loss", split="train", **columns):
    """Return rows for runs: ``values[run]`` is ``[seeds, evaluations]`` or ``[seeds]``."""
    rows = []
    for run, array in values.items():
        for seed, curve in enumerate(np.asarray(array, dtype=float), start=1):
            for t, value in enumerate(np.atleast_1d(curve)):
                row = dict(run=run, seed=seed, round=10 * t, split=split, metric=metric)
                rows.append(row | columns | dict(value=value))
    return pd.DataFrame(rows)


# --- the claims as they stand ---------------------------------------------------------------------


def test_all_claims_of_the_specification_are_there():
    assert {f"GFA-C{k}" for k in range(1, 9)} | {"GFA-C1-control"} <= set(IDS)
    assert len(IDS) == len(set(IDS))


@every_claim
def test_claim_is_complete_and_fits_its_experiments(paper, claim):
    assert claim["statement"] and claim["where"] and claim["paper_reports"]
    assert claim["scale"] in ("exact", "paper") and claim["expected"]
    words = [check["what"] for check in claim["check"]]
    assert words and len(set(words)) == len(words)
    for check in claim["check"]:
        assert set(check) == {"experiment", "measure", "what", "with", "inside"}
        low, high = check["inside"]
        assert low <= high and check["measure"] in claims.MEASURES
        assert "; " not in check["what"], "semicolons separate the checks"
        runs = set(records.load(paper, check["experiment"]).frame["run"])
        assert {check["with"][key] for key in ("run", "a", "b") if key in check["with"]} <= runs


@every_claim
def test_verdict_is_the_expected_one(paper, claim):
    (row,) = (row for row in claims.judge(paper) if row["id"] == claim["id"])
    assert row["verdict"] == claim["expected"], row["measured"]


def test_rows_are_for_readers_and_machines():
    rows = claims.judge(PAPER)
    assert [row["id"] for row in rows] == [claim["id"] for claim in claims.table(PAPER)]
    for row, claim in zip(rows, claims.table(PAPER), strict=True):
        assert {"id", "statement", "rule", "measured", "verdict", "record", "profile"} <= set(row)
        assert all(isinstance(value, str) for value in row.values())
        assert row["verdict"] in claims.VERDICTS and row["statement"] == claim["statement"]
        rules, measured = row["rule"].split("; "), row["measured"].split("; ")
        assert len(rules) == len(measured) == len(claim["check"])
        holds = [check.holds for check in claims.checks(PAPER, row["id"])]
        assert [text.endswith(" ✗") for text in measured] == [h is False for h in holds]
    counts = claims.count(rows)
    assert tuple(counts) == claims.VERDICTS and sum(counts.values()) == len(rows)


def test_without_records_there_is_no_verdict(tmp_path):
    for row in claims.judge(PAPER, tmp_path):
        assert row["verdict"] == claims.NO_RECORD and row["profile"] == ""
        assert set(row["measured"].split("; ")) == {claims.NO_RECORD}


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(FedlibError, match=r"Did you mean 'participation'\?"):
        claims.judge("participaton")
    with pytest.raises(FedlibError, match=r"claim 'GFA-C9'\. .*Valid: GFA-C1, "):
        claims.checks(PAPER, "GFA-C9")
    entry = dict(experiment="fig1", measure="pared", what="", inside=[0, 1]) | {"with": {}}
    with pytest.raises(FedlibError, match=r"measure 'pared'\. Did you mean 'paired'\?"):
        claims._check(PAPER, entry, None)


# --- a broken record changes the verdict ----------------------------------------------------------

IDEAL = {"amplified": 0.3, "wait-minibatch": 0.4, "wait-full": 0.405, "matched-rate": 0.5,
         "no-amplification": 0.6}  # fmt: skip


def fig1(tmp_path, losses, profile="quick"):
    """Store Figure 1 with these final losses (accuracy is one minus loss); judge GFA-C1."""
    noise = 0.001 * np.arange(5)
    loss = curves({run: value + noise for run, value in losses.items()})
    accuracy = curves({r: 1 - v + noise for r, v in losses.items()}, "accuracy", "test")
    manifest = dict(paper=PAPER, experiment="fig1", profile=profile)
    records.save(tmp_path, pd.concat([loss, accuracy]), manifest)
    (row,) = (row for row in claims.judge(PAPER, tmp_path) if row["id"] == "GFA-C1")
    return row


def test_order_in_the_record_decides(tmp_path):
    row = fig1(tmp_path, IDEAL)
    assert row["verdict"] == claims.REDUCED and "✗" not in row["measured"]
    assert row["profile"] == "quick" and row["record"] == "fig1.quick"
    swapped = IDEAL | {"amplified": IDEAL["no-amplification"], "no-amplification": 0.3}
    row = fig1(tmp_path, swapped)
    assert row["verdict"] == claims.PARTLY and row["measured"].count("✗") == 4
    backwards = {run: -value for run, value in IDEAL.items()} | {"wait-full": -0.5}
    assert fig1(tmp_path, backwards)["verdict"] == claims.NOT
    assert fig1(tmp_path, IDEAL, "paper")["verdict"] == claims.REPRODUCED


def test_tampering_with_the_shipped_record_changes_what_is_measured(tmp_path):
    record = records.load(PAPER, "fig1")
    records.save(tmp_path, record.frame, record.manifest)
    shipped = claims.checks(PAPER, "GFA-C1")
    assert claims.checks(PAPER, "GFA-C1", tmp_path) == shipped
    names = {"amplified": "no-amplification", "no-amplification": "amplified"}
    frame = record.frame.assign(run=record.frame["run"].replace(names))
    records.save(tmp_path, frame, record.manifest)
    swapped = claims.checks(PAPER, "GFA-C1", tmp_path)
    changed = [a.measured != b.measured for a, b in zip(shipped, swapped, strict=True)]
    assert changed == [True, False, True, True, True]
    worst = frame["run"].map({run: -value for run, value in IDEAL.items()} | {"wait-full": -0.5})
    sign = np.where(frame["metric"] == "loss", 1, -1)
    records.save(tmp_path, frame.assign(value=sign * worst), record.manifest)
    row = claims.judge(PAPER, tmp_path)[0]
    assert row["id"] == "GFA-C1" and row["verdict"] == claims.NOT


def test_a_record_without_the_run_counts_as_no_record(tmp_path):
    row = fig1(tmp_path, {run: v for run, v in IDEAL.items() if run != "amplified"})
    assert row["verdict"] == claims.NO_RECORD
    frame = records.load(PAPER, "fig1", "quick", tmp_path).frame
    with pytest.raises(FedlibError, match="no rows for run 'amplified', metric 'loss'"):
        claims.final(frame, "amplified", "loss", "train")


# --- from checks to a verdict ---------------------------------------------------------------------


def outcome(*holds, profile="quick"):
    return [Check("q", "b", "m", h, "r", "" if h is None else profile) for h in holds]


@pytest.mark.parametrize(
    "scale, checks, expected",
    [
        ("exact", outcome(True, True), claims.REPRODUCED),
        ("exact", outcome(True, True, profile="smoke"), claims.REPRODUCED),
        ("paper", outcome(True, True), claims.REDUCED),
        ("paper", outcome(True, True, profile="smoke"), claims.REDUCED),
        ("paper", outcome(True, True, profile="paper"), claims.REPRODUCED),
        ("paper", outcome(True, profile="paper") + outcome(True), claims.REDUCED),
        ("exact", outcome(True, False), claims.PARTLY),
        ("paper", outcome(False, True, profile="paper"), claims.PARTLY),
        ("paper", outcome(False, False), claims.NOT),
        ("exact", outcome(False), claims.NOT),
        ("paper", outcome(True, None), claims.NO_RECORD),
        ("exact", outcome(False, None), claims.NO_RECORD),
        ("exact", outcome(None), claims.NO_RECORD),
        ("paper", [], claims.NO_DATA),
    ],
)
def test_verdict(scale, checks, expected):
    assert claims.verdict(dict(scale=scale), checks) == expected


@pytest.mark.parametrize(
    "inside, holds, words",
    [
        ([0.0, 1.0], True, "between 0 and 1"),
        ([0.5, float("inf")], True, "above 0.5"),
        ([0.51, float("inf")], False, "above 0.51"),
        ([float("-inf"), 0.49], False, "below 0.49"),
        ([0.5, 0.5], True, "exactly 0.5"),
        ([0.0, 0.0], False, "exactly 0"),
    ],
)
def test_check_asks_for_the_whole_interval(inside, holds, words, tmp_path):
    frame = curves({"a": [0.5]})
    records.save(tmp_path, frame, dict(paper=PAPER, experiment="fig1", profile="quick"))
    arguments = dict(run="a", metric="loss", split="train")
    entry = dict(experiment="fig1", measure="final", what="q", inside=inside)
    got = claims._check(PAPER, entry | {"with": arguments}, tmp_path)
    assert (got.holds, got.bounds, got.profile) == (holds, words, "quick")
    spread = curves({"a": [0.4, 0.5, 0.6]})  # mean 0.5 again, half an interval of 0.25
    records.save(tmp_path, spread, dict(paper=PAPER, experiment="fig1", profile="quick"))
    got = claims._check(PAPER, entry | {"with": arguments}, tmp_path)
    assert got.holds == (inside == [0.0, 1.0])


# --- measures -------------------------------------------------------------------------------------


def test_paired_is_the_t_interval_of_differences():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 6))
    frame = curves({"a": a, "b": b}).sample(frac=1, random_state=1)
    got = claims.paired(frame, "a", "b", "loss", "train")
    known = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((known.low, known.high), rel=1e-12)
    mean, half = map(float, got.text.split(" ± "))  # two digits of the half-width
    assert mean == pytest.approx((a - b).mean(), abs=0.05)
    assert half == pytest.approx((known.high - known.low) / 2, rel=0.05)


def test_paired_is_the_mean_over_the_last_evaluations():
    a, b = np.arange(40.0).reshape(2, 20), np.zeros((2, 20))
    frame = curves({"a": a, "b": b})
    for window, expected in ((0.03, [19, 39]), (0.1, [18.5, 38.5]), (0.5, [14.5, 34.5])):
        assert claims.last(frame, "a", "loss", "train", window).tolist() == expected
        got = claims.paired(frame, "a", "b", "loss", "train", window)
        assert (got.low + got.high) / 2 == pytest.approx(np.mean(expected))


def test_paired_goes_by_seed_not_by_row():
    frame = curves({"a": [1.0, 2.0, 4.0], "b": [0.0, 1.0, 3.0]})
    frame = frame.sort_values(["run", "seed"], ascending=[True, False])
    got = claims.paired(frame, "a", "b", "loss", "train")
    assert got.low == got.high == 1.0
    other = frame[(frame["run"] == "a") | (frame["seed"] > 1)]  # one seed has no partner
    got = claims.paired(other, "a", "b", "loss", "train")
    assert not got.low <= got.high, "nothing lies inside an interval that is not known"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "a, b, low, high, text",
    [
        ([NAN, NAN], [1, 1], INF, INF, "a diverged in all 2 seeds"),
        ([INF, INF], [1, 1], INF, INF, "a diverged in all 2 seeds"),
        ([NAN, 1], [1, 1], -INF, INF, "a diverged in 1 of 2 seeds"),
        ([1, 1], [NAN, NAN], -INF, INF, "b diverged in 2 of 2 seeds"),
        ([NAN, NAN], [NAN, 1], -INF, INF, "a diverged in 2 of 2 seeds, b diverged in 1 of 2 seeds"),
    ],
)
def test_paired_with_diverged_runs(a, b, low, high, text):
    got = claims.paired(curves({"a": a, "b": b}), "a", "b", "loss", "train")
    assert (got.low, got.high, got.text) == (low, high, text)


def test_diverged_counts_seeds():
    for values, share in (([1, NAN, INF, 2], 0.5), ([1, 2], 0.0), ([NAN], 1.0)):
        got = claims.diverged(curves({"a": values}), "a")
        assert got.low == got.high == share
        assert got.text == f"{round(share * len(values))} of {len(values)} seeds"
    early = curves({"a": [[1, NAN, NAN], [1, 2, 3]], "b": [[1, 1, 1]] * 2})
    assert claims.diverged(early, "a").low == 0.5
    for window in (0.03, 1.0):  # a healthy beginning does not save a run
        got = claims.paired(early, "a", "b", "loss", "train", window)
        assert got.text == "a diverged in 1 of 2 seeds"


def test_final_takes_the_last_evaluation():
    frame = curves({"a": [[9, 9, 1.0], [9, 9, 3.0], [9, 9, 8.0]]})
    got = claims.final(frame, "a", "loss", "train")
    half = stats.t.interval(0.95, 2, loc=4, scale=stats.sem([1, 3, 8]))
    assert (got.low, got.high) == pytest.approx(half)
    one = claims.final(frame[frame["seed"] == 2], "a", "loss", "train")
    assert (one.low, one.high, one.text) == (3.0, 3.0, "3")


@pytest.mark.parametrize("power", [-1.0, -0.5, 2.0])
def test_slope_is_exact_on_power_laws(power):
    x = np.array([1, 2, 5, 10, 100])
    rows = [
        dict(run="a", seed=s, metric="squares", interval=i, value=s * float(i) ** power)
        for s in (1, 2, 3)
        for i in x
    ]
    frame = pd.DataFrame(rows)
    got = claims.slope(frame, "a", "squares", "interval")
    assert (got.low, got.high) == pytest.approx((power, power), abs=1e-12)
    frame.loc[frame["interval"] < 5, "value"] = 1.0
    assert claims.slope(frame, "a", "squares", "interval", 5).low == pytest.approx(power)
    assert claims.slope(frame, "a", "squares", "interval").low != pytest.approx(power, abs=0.01)


def test_slope_has_an_interval_over_seeds():
    powers = [-1.2, -1.0, -0.7]
    rows = [
        dict(run="a", seed=s, metric="m", cohort=c, value=float(c) ** p)
        for s, p in enumerate(powers)
        for c in (1, 2, 5)
    ]
    got = claims.slope(pd.DataFrame(rows), "a", "m", "cohort")
    known = stats.t.interval(0.95, 2, loc=np.mean(powers), scale=stats.sem(powers))
    assert (got.low, got.high) == pytest.approx(known)


def test_largest_over_chosen_rows():
    frame = pd.concat(curves({"a": [1.0, 5.0 / i]}, "factor", interval=i) for i in (1, 2, 10))
    assert claims.largest(frame, "a", "factor").high == 5
    assert claims.largest(frame, "a", "factor", interval=[2, 10]).low == 2.5
    assert claims.largest(frame, "a", "factor", interval=10).text == "1"
    with pytest.raises(FedlibError, match="no rows"):
        claims.largest(frame, "a", "factor", interval=3)
    broken = frame.assign(value=[*frame["value"][:-1], NAN])
    assert np.isnan(claims.largest(broken, "a", "factor").high), "a lost value is not passed over"
