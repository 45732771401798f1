"""What a claim would take at its paper's own scale: the runs, the hours, the data, the command."""

import json

import pytest

from fedlib import paths
from fedlib.lab.evidence import catalogue, claims, queue, records, wanted


@pytest.fixture
def hours(monkeypatch):
    """Give the hours of experiments by hand."""
    known = {}
    monkeypatch.setattr(wanted, "_hours", lambda: known)
    monkeypatch.setattr(wanted, "_there", lambda paper, name: False)  # whatever is made meanwhile
    return known


def row_of(paper, name):
    (row,) = claims.judge(paper, ids=[name])
    return row


def test_nothing_is_wanted_where_it_was_tried_as_the_paper_did():
    row = row_of("hierarchy", "HFL-C4")
    assert claims.is_own_scale(row) and claims.is_own_data(row)
    assert wanted.what_it_takes(row) == ""


def test_nothing_is_tried_as_the_paper_did_where_the_paper_did_nothing():
    row = row_of("personalization", "PERM-C2")
    assert row["scale"], "an experiment of ours"
    assert wanted.what_it_takes(row) == ""


def test_a_sentence_has_runs_hours_data_and_one_command(hours):
    row = row_of("hierarchy", "HFL-C4") | {"scale": ["network: small, the paper's: large"]}
    assert [*wanted.wanted(row)] == ["rates-6", "fig6"]
    for name in ("rates-6", "fig6"):
        hours[f"hierarchy/{name}"] = {"seconds": 5400, "least": False, "why": ""}
    line = wanted.what_it_takes(row)
    assert "rates-6, fig6" in line and "about 3 h of one core" in line
    assert "data: mnist" in line and "or more" not in line
    hours[f"hierarchy/{name}"]["seconds"] = None
    assert "or more" in wanted.what_it_takes(row)
    hours.clear()
    assert "could not be timed" in wanted.what_it_takes(row)


def test_what_the_queue_has_is_left_to_the_queue(monkeypatch, hours):
    row = row_of("hierarchy", "HFL-C4") | {"scale": ["network: small, the paper's: large"]}
    entries = [dict(paper="hierarchy", experiment=e, profile="paper") for e in wanted.wanted(row)]
    monkeypatch.setattr(queue, "read_queue", lambda: entries)
    assert "`fedlib records --work`" in wanted.what_it_takes(row)
    monkeypatch.setattr(queue, "read_queue", lambda: entries[:-1])
    first = entries[0]["experiment"]
    assert f"fedlib run hierarchy {first} --profile paper" in wanted.what_it_takes(row)


def test_every_run_that_a_claim_wants_was_timed_or_says_why_not(verdicts):
    known = json.loads((paths.data_folder() / "hours.json").read_text("utf-8"))
    for paper, rows in verdicts.items():
        for row in rows:
            for name in wanted.wanted(row):
                entry = known[f"{paper}/{name}"]
                assert entry["why"] and (entry["seconds"] is None or entry["seconds"] > 0)
                assert entry["settings"] == wanted.settings_mark(paper, name), "make hours"
    assert all(name.partition("/")[2] in catalogue.experiment_names(name.partition("/")[0])
               for name in known)  # fmt: skip


def test_a_gpu_s_hours_are_rounds_over_the_speed_of_its_record():
    m = records.load("participation", "fig1-network", "quick").manifest
    speed = 3 * 4 * 300_000 / 20 / m["wall_seconds"]  # seeds, runs, rounds in compressed time
    minutes = 10 * 2 * 60_000 / speed / 60
    assert wanted.on_a_gpu("participation", ["figD1"]) == (
        f", or at least {minutes:.0f} min of an {m['device']}"
    )
    assert wanted.on_a_gpu("participation", ["figD1", "figD1-cifar"]) == ""  # another network
    assert wanted.on_a_gpu("hierarchy", ["fig11"]) == ""
