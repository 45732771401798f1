"""Findings: the answer is that of the outcome, and is tied to a check that exists."""

from __future__ import annotations

import tomllib

import pytest

from fedlib import cards, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, claims, findings, outcomes, records, scale
from fedlib.lab.evidence.records import Record
from fedlib.lab.show.chapter import Chapter

CLAIM = """
[[claim]]
id = "A-C1"
where = "Figure 1"
kind = "measured"
statement = "One is better."
paper_reports = "One, by far."
data = ["mnist"]
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
smaller = "One, by {size} only."
level = "Neither: {measured}."
reversed = "The other, by {size}."
open = "Open: {measured}."
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


SAID = {
    "holds": "One, by 0.3 ± 0.1.",
    "smaller": "One, by 3 points of 80 only.",
    "level": "Neither: 0.3 ± 0.1.",
    "reversed": "The other, by 3 points of 80.",
    "open": "Open: 0.3 ± 0.1.",
}


@pytest.mark.parametrize("outcome", SAID)
def test_the_answer_is_that_of_the_outcome_beside_what_the_paper_says(paper, outcome, monkeypatch):
    made = claims.Check("one is better", "above 0", "0.3 ± 0.1", outcome, size="3 points of 80")
    other = claims.Check("something else", "above 0", "9 ± 9", "holds")
    monkeypatch.setattr(claims, "checks", lambda *asked: [other, made])
    (row,) = findings.answers("made")
    assert (row.answer, row.paper) == (SAID[outcome], "One, by far.")
    assert row.outcome == outcome
    told = Chapter("made").findings()._repr_markdown_()
    assert f"* **Which?** {row.answer}" in told
    assert "*The paper reports:* One, by far. (A-C1)" in told
    size = "by 3 points of 80"
    short = {"holds": f"yes, ahead {size}", "smaller": f"a little, ahead {size}"}
    short |= {"level": "no difference that matters", "reversed": f"no, behind {size}"}
    told = findings.in_short("made", "A-C1", "one is better")
    assert told.startswith(short.get(outcome, "open"))
    with pytest.raises(FedlibError, match="Unknown check of A-C1: 'two'. Valid: one is better"):
        findings.in_short("made", "A-C1", "two")


def test_who_is_as_good_is_not_said_to_be_ahead(paper, monkeypatch):
    (paper / "claims.toml").write_text(CLAIM.replace('"better"', '"within"\nbounds = [-1, inf]'))
    made = claims.Check("one is better", "at least -1", "0.3 ± 0.1", "holds", size="3 points")
    monkeypatch.setattr(claims, "checks", lambda *asked: [made])
    assert findings.in_short("made", "A-C1", "one is better").startswith("yes, at")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("measured", "Not at the paper's scale (clients), on another set."),
        ("arithmetic", ""),
    ],
)
def test_an_answer_says_scale_and_data_where_something_was_measured(paper, kind, said, monkeypatch):
    page = paper / "claims.toml"
    page.write_text(CLAIM.replace('"measured"', f'"{kind}"'))
    settings = {"dataset": "fashion-mnist", "clients": 3}
    manifest = dict(paper="made", experiment="e", profile="quick", settings=settings, seeds=[1])
    manifest |= {"date": "2026-05-04T03:02:01+00:00", "wall_seconds": 1.0}
    held = Record(None, manifest | {"fidelity": "canonical"}, None)
    monkeypatch.setattr(records, "load", lambda *names: held)
    check = claims.Check(
        "one is better", "above 0", "1", "holds", record="e.quick", profile="quick"
    )
    monkeypatch.setattr(claims, "checks", lambda *asked: [check])
    monkeypatch.setattr(Record, "provenance", lambda record: "")
    monkeypatch.setattr(catalogue, "profiles", lambda *names: ["quick", "paper"])
    monkeypatch.setattr(catalogue, "settings", lambda *names: {"clients": 9})
    (row,) = findings.answers("made")
    assert row.setting == said
    short = "yes, ahead by , in a smaller experiment, on another set"
    assert not said or findings.in_short("made", "A-C1", "one is better") == short


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('level = "Neither: {measured}."', "may come out as holds, level, open, reversed, smaller"),
        ('open = "Open: {measured}."', "'open' is missing"),
    ],
)
def test_there_is_an_answer_for_each_outcome_that_the_check_may_have(paper, line, message):
    (paper / "findings.toml").write_text(FINDING.replace(line, ""))
    with pytest.raises(FedlibError, match=message):
        findings.answers("made")
    extra = FINDING + 'differs = "They differ."\n'
    (paper / "findings.toml").write_text(extra)
    findings._read.cache_clear()
    with pytest.raises(FedlibError, match="there are answers for differs, "):
        findings.answers("made")


def test_a_box_above_new_runs_speaks_of_the_stored_records_and_says_so(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(findings, "answers", lambda paper, out: asked.append(out) or [])
    said = "**What we found**, in the stored records and not in this run\n"
    assert Chapter("participation", "smoke").findings().text == said
    assert Chapter("participation", "smoke", out=tmp_path).findings().text == said
    assert Chapter("participation").findings().text == "**What we found**\n"
    Chapter("participation", out=tmp_path).findings()
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


def test_the_paper_s_own_question_has_a_short_answer_in_three_fields(paper, monkeypatch):
    assert findings.brief("made") is None
    with pytest.raises(FedlibError, match="has no 'brief'"):
        Chapter("made").opening()
    asked = FINDING.replace("[[finding]]", "[brief]").replace("by {measured}.", "{share} lower.")
    (paper / "findings.toml").write_text(asked + FINDING)
    findings._read.cache_clear()
    check = claims.Check("one is better", "above 0", "0.3", "holds", size="0.3 of 0.6")
    monkeypatch.setattr(claims, "checks", lambda *asked: [check])
    told = Chapter("made").opening()._repr_markdown_()
    assert told.startswith("**We find:** One, 50% lower.\n\n* *The paper reports:* One, by far.")
    assert "* *Finding:* confirmed (A-C1)\n* *Scale:* nothing measured\n" in told


def test_an_answer_says_where_its_claim_was_measured_otherwise(paper, monkeypatch):
    asked = FINDING.replace("[[finding]]", "[brief]")
    (paper / "findings.toml").write_text(asked + FINDING)
    findings._read.cache_clear()
    check = claims.Check("one is better", "above 0", "0.3", "holds", size="0.3 of 0.6")
    monkeypatch.setattr(claims, "checks", lambda *asked: [check])
    said = "At the paper's own scale, on the paper's own bytes."
    smaller = {"scale": ["clients: 3, the paper's: 9"], "data": scale.SUBSTITUTE, "sets": {}}
    own = {"scale": [], "data": scale.THEIR_BYTES, "sets": {}}
    monkeypatch.setattr(claims, "measured_at", lambda *asked: smaller)  # of the claim
    monkeypatch.setattr(findings, "_fields", lambda *asked: own)  # of the check
    whole = "Not at the paper's scale (clients), on a substitute."
    assert (findings.brief("made").setting, findings.brief("made").whole) == (said, whole)
    told = Chapter("made").opening()._repr_markdown_()
    assert told.endswith(f"* *The whole claim, with its other checks:* {whole}")
    monkeypatch.setattr(findings, "_fields", lambda *asked: smaller)
    assert findings.brief("made").whole == ""


def test_a_study_of_the_book_says_what_was_expected_and_names_its_data(paper, monkeypatch):
    (paper / "paper.toml").write_text("ours = true\n")
    asked = FINDING.replace("[[finding]]", "finding = []\n[brief]")
    (paper / "findings.toml").write_text(asked)
    check = claims.Check("one is better", "above 0", "0.3", "holds")
    monkeypatch.setattr(claims, "checks", lambda *asked: [check])
    where = {"scale": [scale.OUR_EXPERIMENT], "data": scale.NONE, "sets": {"digits": scale.NONE}}
    monkeypatch.setattr(claims, "measured_at", lambda *asked: where)
    told = Chapter("made").opening()._repr_markdown_()
    assert "* *We expected:* One is better.\n" in told and findings.answers("made") == []
    assert f"* *Scale:* an experiment of ours\n* *Data:* {cards.card('digits').title}" in told


def test_a_paper_without_findings(paper):
    (paper / "findings.toml").unlink()
    with pytest.raises(FedlibError, match="There is no .*findings.toml"):
        findings.answers("made")
    assert "made" not in paths.papers("findings.toml")


@pytest.mark.parametrize("name", paths.papers("findings.toml"))
def test_findings_of_the_book(name):
    rows, ours = findings.answers(name), paths.about(paths.paper_folder(name)).get("ours")
    assert 3 <= len(rows) <= 7 or ours and not rows
    assert all("{" not in row.answer for row in [*rows, findings.brief(name)])
    page = paths.paper_folder(name) / "findings.toml"
    for entry in tomllib.loads(page.read_text("utf-8"))["finding"]:
        for outcome in outcomes.OUTCOMES:
            assert "{" in entry.get(outcome, "{"), f"no number in '{entry['question']}', {outcome}"


def test_the_first_is_one_of_all_that_are_asked_the_same_counted_or_not():
    asked = [  # as the times of TDCD-C2: one number of steps counts, another rate is a control
        ("at 0.8, t = 100: Q = 10 sooner than Q = 1", 0.5, False),
        ("at 0.8, t = 100: Q = 20 sooner than Q = 1", 0.9, False),
        ("at 0.8, t = 100: Q = 30 sooner than Q = 1", 0.1, True),
        ("at 0.8, t = 100, at one rate: Q = 30 sooner than Q = 1", 2.0, False),
        ("at 0.8, t = 100: Q = 40 ends above Q = 1", 3.0, True),
    ]
    keys = ("quantity", "estimate", "essential")
    row = {"checks": [dict(zip(keys, each, strict=True)) for each in asked]}
    assert findings.first_of(row, "sooner than")["quantity"] == asked[1][0]
    of = [each | {"reading": "ab"["above" in each["quantity"]]} for each in row["checks"]]
    read = {"readings": {"a": "", "b": ""}, "checks": of}
    asking = findings.first_of_each(read, "sooner than")
    assert list(asking) == ["a"], "the other asks who ends above, and not who is sooner"
    nothing = {"checks": [each | {"estimate": None} for each in row["checks"]]}
    assert findings.first_of(nothing, "sooner than") is None
