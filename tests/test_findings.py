"""Findings: the answer is that of the outcome, and is tied to a check that exists."""

from __future__ import annotations

import pytest

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.evidence import claims, findings
from fedlib.show.chapter import Chapter

CLAIM = """
[[claim]]
id = "A-C1"
where = "Figure 1"
kind = "measured"
statement = "One is better."
smallest = { loss = 0.1 }
[[claim.check]]
what = "one is better"
asks = "better"
experiment = "e"
measure = "advantage"
with = { a = "one", b = "other", metric = "loss", split = "train" }
"""
EXPERIMENT = """
[profiles.quick]
seeds = 5
[e]
where = "Figure 1"
title = "One and the other"
"""
FINDING = """
[[finding]]
question = "Which?"
claim = "A-C1"
check = "one is better"
holds = "One, by {measured}."
contradicted = "Not one: {measured}."
undecided = "Open: {measured}."
front = true
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    home = tmp_path / "made"
    home.mkdir()
    (home / "claims.toml").write_text(CLAIM)
    (home / "experiments.toml").write_text(EXPERIMENT)
    (home / "findings.toml").write_text(FINDING)
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path))
    return home


@pytest.mark.parametrize("outcome", ["holds", "contradicted", "undecided"])
def test_the_answer_is_that_of_the_outcome(paper, outcome, monkeypatch):
    made = claims.Check("one is better", "above 0", "0.3 ± 0.1", outcome)
    other = claims.Check("something else", "above 0", "9 ± 9", "holds")
    monkeypatch.setattr(claims, "checks", lambda *asked: [other, made])
    (row,) = findings.answers("made")
    words = {"holds": "One, by", "contradicted": "Not one:", "undecided": "Open:"}[outcome]
    assert row.answer == f"{words} 0.3 ± 0.1. Measured at reduced scale."
    assert (row.outcome, row.front) == (outcome, True)
    told = Chapter("made").found()._repr_markdown_()
    assert f"* **Which?** {row.answer} (A-C1)" in told


@pytest.mark.parametrize(
    ("kind", "full", "said"),
    [
        ("measured", False, "One, by 1. Measured at reduced scale."),
        ("measured", True, "One, by 1."),
        ("arithmetic", False, "One, by 1."),
    ],
)
def test_an_answer_says_its_scale_where_that_matters(paper, kind, full, said, monkeypatch):
    page = paper / "claims.toml"
    page.write_text(CLAIM.replace('"measured"', f'"{kind}"'))
    check = claims.Check("one is better", "above 0", "1", "holds", full=full)
    larger = claims.Check("something else", "above 0", "9", "holds", full=not full)
    monkeypatch.setattr(claims, "checks", lambda *asked: [larger, check])
    (row,) = findings.answers("made")
    assert row.answer == said
    verdict = claims.verdict({"kind": kind}, [check])
    assert (verdict == "at reduced scale") == ("reduced scale" in said), "as the verdict does"


def test_a_box_above_new_runs_speaks_of_the_stored_records_and_says_so(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(findings, "answers", lambda paper, out: asked.append(out) or [])
    said = "**What we found**, in the stored records and not in this run\n"
    assert Chapter("participation", "smoke").found().text == said
    assert Chapter("participation", "smoke", out=tmp_path).found().text == said
    assert Chapter("participation").found().text == "**What we found**\n"
    Chapter("participation", out=tmp_path).found()
    assert asked == [None, None, None, tmp_path]


def test_without_a_record_there_is_no_answer(paper, tmp_path):
    (row,) = findings.answers("made", tmp_path)
    assert row.answer == "There is no record yet that could say."


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("A-C1", "A-C2", "claim in .*'A-C2'.*A-C1"),
        ("one is better", "one is best", "check of A-C1"),
    ],
)
def test_a_finding_names_what_there_is(paper, old, new, message):
    (paper / "findings.toml").write_text(FINDING.replace(old, new))
    with pytest.raises(FedlibError, match=message):
        findings.answers("made")


def test_a_paper_without_findings(paper):
    (paper / "findings.toml").unlink()
    with pytest.raises(FedlibError, match="There is no .*findings.toml"):
        findings.answers("made")
    assert "made" not in findings.papers()


@pytest.mark.parametrize("name", findings.papers())
def test_findings_of_the_book(name):
    rows = findings.answers(name)
    assert 3 <= len(rows) <= 6 and any(row.front for row in rows)
    assert all("{" not in row.answer for row in rows)
    page = paths.paper_folder(name) / "findings.toml"
    assert page.read_text("utf-8").count("{measured}") >= 2 * len(rows)
