"""What the tiers claims measure: costs in two experiments, and F1 beside that of saying yes."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from curves import curves, record

from fedlib.errors import FedlibError
from fedlib.lab.evidence import ages, claims, measures, outcomes, records

HERE = {"few": np.array([0.50, 0.40, 0.60, 0.50]), "many": np.array([0.40, 0.35, 0.55, 0.30])}
THERE = {"few": np.array([0.9, 0.8, 0.85]), "many": np.array([0.8, 0.8, 0.75])}
TABLES = (curves(HERE, "f1", "test"), curves(THERE, "accuracy", "test"))


def across(relative, here=TABLES[0]):
    pair = record(here), record(TABLES[1])
    return measures.across(*pair, "many", "few", "f1", "accuracy", "test", relative)


def test_a_difference_of_costs_has_welch_s_interval():
    """By the formula of Welch and Satterthwaite, written out."""
    from scipy import stats

    gains = HERE["many"] - HERE["few"], THERE["many"] - THERE["few"]
    parts = np.array([gain.var(ddof=1) / len(gain) for gain in gains])
    freedom = parts.sum() ** 2 / (parts**2 / [len(gain) - 1 for gain in gains]).sum()
    half = stats.t.ppf(0.975, freedom) * math.sqrt(parts.sum())
    middle = gains[0].mean() - gains[1].mean()
    got = across(False)
    assert got.estimate == pytest.approx(middle) == pytest.approx(-0.1 + 0.2 / 3)
    assert got.interval(0.95) == pytest.approx((middle - half, middle + half))


def test_a_cost_as_a_share_is_a_ratio_of_means_with_the_spread_of_both():
    got = across(True)
    shares = [table["many"].mean() / table["few"].mean() - 1 for table in (HERE, THERE)]
    assert got.estimate == pytest.approx(shares[0] - shares[1])
    rng = np.random.default_rng(1)
    few = rng.normal(0.5, 0.02, (4000, 30))
    many = few * 0.7 + rng.normal(0, 0.02, few.shape)
    spread = (many.mean(1) / few.mean(1)).std()
    table = curves({"few": few[0], "many": many[0]}, "f1", "test")
    values = measures._gained(record(table), "many", "few", "f1", "test", True)
    assert values.std(ddof=1) / math.sqrt(30) == pytest.approx(spread, rel=0.3)


def test_a_run_that_diverged_leaves_a_difference_of_costs_open():
    lost = pd.concat([TABLES[0], curves({"few": [0.1] * 4, "many": [0.1, 0.1, 0.1, math.inf]})])
    lost.loc[(lost["run"] == "many") & (lost["seed"] == 4), "value"] = math.nan
    assert across(False, lost).interval(0.95) == (-math.inf, math.inf)


def test_there_is_no_share_of_nothing():
    none = curves({"few": np.zeros(4), "many": HERE["many"]}, "f1", "test")
    got = across(True, none)
    assert got.interval(0.95) == (-math.inf, math.inf) and math.isnan(got.estimate)
    assert outcomes.better(*got.interval(0.95), got.estimate, 0.02) == "open"


def test_few_seeds_in_either_experiment_are_few():
    assert across(False).seeds == 3
    swapped = measures.across(
        *(record(table) for table in reversed(TABLES)),
        "many",
        "few",
        "accuracy",
        "f1",
        "test",
        True,
    )
    assert swapped.seeds == 3


def test_no_number_of_seeds_is_promised_where_two_experiments_would_need_more():
    got = across(False)
    assert outcomes.more_seeds(got, 0.95, lambda *ends: "holds") == ""


def test_a_check_across_experiments_names_both_records_and_belongs_to_both():
    (claim,) = (claim for claim in claims.claims_of("tiers") if claim["id"] == "TDCD-C5")
    check = claim["check"][0]
    assert claims.experiments(check) == ["fig4", "fig3"]
    for name in ("fig3", "fig4"):
        assert "TDCD-C5" in ages.rules("tiers", name)
        assert {check["with"]["a"], check["with"]["b"]} <= {*records.load("tiers", name).frame.run}
    (row,) = claims.judge("tiers", None, ["TDCD-C5"])
    names = "fig4.quick, fig3.quick, fig3-5000.quick"  # two readings of the images' rates
    assert row["record"] == names and len(row["origins"]) == 3
    assert {*row["sets"]} == {"ehr-like", "fashion-mnist"}
    (other,) = (scale for scale in row["scale"] if scale.startswith("minibatch: 1,000"))
    assert other.endswith("(fig3, fig3-5000)")


def test_the_other_experiment_of_a_check_is_a_name():
    check = {"what": "q", "asks": "better", "experiment": "e", "measure": "across"}
    given = dict(a="a", b="b", metric="f1", than_metric="f1", split="test", relative=True)
    with pytest.raises(FedlibError, match="than"):
        claims._sound({"id": "A-C1"}, check | {"with": given}, "made")
    with pytest.raises(FedlibError, match="than"):
        claims._sound({"id": "A-C1"}, check | {"with": given | {"than": 4}}, "made")


def test_the_end_of_a_run_may_be_its_last_part():
    held = record(curves({"a": np.arange(21.0)[None]}))
    assert measures.final(held, "a", "loss", "train").estimate == 20
    assert measures.final(held, "a", "loss", "train", 0.1).estimate == pytest.approx(19.0)


def test_what_saying_yes_to_everybody_gets():
    """Some untrained networks do: F1 is then 2p / (M + p), with p of M samples positive."""
    M, frame = 3236, records.load("tiers", "fig4").frame
    first = frame[(frame["round"] == 0) & (frame["metric"] == "f1")]["value"].unique()
    positives = M * first / (2 - first)
    (yes,) = first[(first > 0) & (abs(positives - positives.round()) < 1e-3)]
    bounds = {check["bounds"][0] for claim in claims.claims_of("tiers")
              for check in claim["check"] if "saying yes" in check["what"]}  # fmt: skip
    assert bounds == {round(yes, 4)}
