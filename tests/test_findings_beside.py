"""A finding may answer by two checks of one claim, one after the other."""

from __future__ import annotations

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
