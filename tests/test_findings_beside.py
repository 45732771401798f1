"""A finding may answer by several checks, one after the other, of its claim and of others."""

from __future__ import annotations

import math

import pytest

from fedlib.errors import FedlibError
from fedlib.lab.evidence import claims, findings

CLAIM = """
[[claim]]
id = "A-C1"
where = "Figure 1"
kind = "measured"
statement = "One is better."
data = ["mnist"]
smallest = { loss = 0.1, accuracy = 0.1 }
check = [
  { what = "lower", asks = "better", experiment = "e", measure = "advantage", with = { a = "one", b = "other", metric = "loss", split = "train" } },
  { what = "alike", asks = "same", experiment = "e", measure = "advantage", with = { a = "one", b = "other", metric = "accuracy", split = "test" } },
]
"""  # noqa: E501
FINDING = """
[[finding]]
question = "Which?"
claim = "A-C1"
check = "lower"
holds = "Lower by {size}."
smaller = "-"
level = "-"
reversed = "-"
open = "-"
[finding.beside]
check = "alike"
holds = "Alike: {measured}."
differs = "-"
open = "-"
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    home = tmp_path / "made"
    home.mkdir()
    (home / "experiments.toml").write_text(
        '[profiles.quick]\nseeds = 5\n[e]\nwhere = "Figure 1"\ntitle = "One and the other"\n'
    )
    (home / "claims.toml").write_text(CLAIM)
    (home / "findings.toml").write_text(FINDING)
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path))
    findings._read.cache_clear()
    return home


def test_both_answers_are_told_and_the_first_gives_the_outcome(paper, monkeypatch):
    lower = claims.Check("lower", "above 0", "0.3 ± 0.1", "holds", size="0.3 of 2")
    alike = claims.Check("alike", "within", "0.0 ± 0.1", "holds", size="0")
    monkeypatch.setattr(claims, "checks", lambda *asked: [lower, alike])
    (row,) = findings.answers("made")
    assert (row.answer, row.outcome) == ("Lower by 0.3 of 2. Alike: 0.0 ± 0.1.", "holds")


def test_where_settings_differ_each_answer_is_followed_by_its_own(paper, monkeypatch):
    checks = [claims.Check(what, "", "0 ± 1", "holds", size="0") for what in ("lower", "alike")]
    monkeypatch.setattr(claims, "checks", lambda *asked: checks)
    differs = "Not at the paper's scale ({}), on a substitute."
    monkeypatch.setattr(
        findings, "_fields",
        lambda p, c, check, out: {"scale": [check["quantity"]], "data": "a substitute"},
    )  # fmt: skip
    (row,) = findings.answers("made")
    assert row.answer == f"Lower by 0. {differs.format('lower')} Alike: 0 ± 1."
    assert row.setting == differs.format("alike")


def test_the_one_beside_needs_an_answer_for_each_of_its_outcomes(paper):
    (paper / "findings.toml").write_text(FINDING.replace('differs = "-"', 'level = "-"'))
    with pytest.raises(FedlibError, match="may come out as differs, holds, open; .* level, open"):
        findings.answers("made")


def test_a_check_of_another_claim_has_its_answer_at_the_end_and_is_looked_for(paper, monkeypatch):
    (paper / "claims.toml").write_text(CLAIM + CLAIM.replace("A-C1", "A-C2"))
    asked = FINDING + '[[finding.also]]\nclaim = "{}"\ncheck = "alike"\n'
    asked += 'holds = "Other: {measured} (A-C2)."\ndiffers = "-"\nopen = "-"\n'
    (paper / "findings.toml").write_text(asked.replace("{}", "A-C2"))
    lower = claims.Check("lower", "", "3", "holds", size="3")
    first, second = (claims.Check("alike", "", str(n), "holds", size="0") for n in (1, 2))
    both = {"A-C1": [lower, first], "A-C2": [lower, second]}
    monkeypatch.setattr(claims, "checks", lambda name, claim, *rest: both[claim])
    (row,) = findings.answers("made")
    assert row.answer == "Lower by 3. Alike: 1. Other: 2 (A-C2)."
    assert (row.claim, row.outcome) == ("A-C1", "holds")
    (paper / "findings.toml").write_text(asked.replace("{}", "A-C3"))
    findings._read.cache_clear()
    with pytest.raises(FedlibError, match="A-C3"):
        findings.answers("made")


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (math.log(0.25), math.log(0.5), "2 to 4 times"),
        (None, math.log(0.5), "at least 2 times"),
        (math.log(0.25), None, "at most 4 times"),
    ],
)
def test_a_ratio_turned_round_has_its_interval_turned_round(paper, low, high, said, monkeypatch):
    (paper / "findings.toml").write_text(FINDING.replace("Lower by {size}", "{size} ({inverse})"))
    lower = claims.Check("lower", "", "1", "holds", size="3 times", low=low, high=high)
    alike = claims.Check("alike", "", "0", "holds", size="0")
    monkeypatch.setattr(claims, "checks", lambda *asked: [lower, alike])
    (row,) = findings.answers("made")
    assert row.answer == f"3 times ({said}). Alike: 0."
