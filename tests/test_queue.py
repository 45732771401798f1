"""The queue of long records, on small ones."""

from __future__ import annotations

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedlib import files
from fedlib.errors import FedlibError
from fedlib.lab import locks
from fedlib.lab.cli import app
from fedlib.lab.evidence import catalogue, experiments, queue, records

FIG3 = ("hierarchy", "fig3", "smoke")


@pytest.fixture
def place(tmp_path):
    """A queue of two records, a folder for seeds and one for what is joined."""

    def entry(experiment):
        return (
            f'[[record]]\npaper = "hierarchy"\nexperiment = "{experiment}"\n'
            'profile = "smoke"\nhours = 0.5\n'
        )

    page = tmp_path / "queue.toml"
    page.write_text(entry("fig3") + entry("counts"))
    return dict(page=page, home=tmp_path / "seeds", out=tmp_path / "joined")


def test_seeds_may_be_made_together(place, tmp_path):
    alone = {"1": (1,), "2": (2,)}
    assert queue.parts(*FIG3) == alone and queue.parts(*FIG3, together=2) == {"1-2": (1, 2)}
    ten = "participation", "fig2", "long"
    assert [*queue.parts(*ten, [5, 2])] == ["1-2-3-4-5", "6-7", "8-9", "10"], "the last goes on"
    place["page"].write_text(place["page"].read_text().replace("0.5", "0.5\ntogether = 2", 1))
    told = []
    queue.work(1, told.append, **place)
    assert [row["seeds"] for row in queue.queue_rows(**place)][0] == "2/2"
    assert any("fig3.smoke: seed 1, 2 begins" in line for line in told)


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    columns = [c for c in frame if c != "value"]
    return frame.sort_values(columns, kind="stable").reset_index(drop=True)


def test_seed_by_seed_it_makes_what_a_run_of_all_seeds_makes(place, tmp_path):
    told = []
    assert [row["state"] for row in queue.queue_rows(**place)] == ["waiting", "waiting"]
    assert [row["needed [h]"] for row in queue.queue_rows(**place)] == [0.5, 0.5]
    queue.work(1, told.append, **place)
    assert [row["state"] for row in queue.queue_rows(**place)] == ["done", "done"]
    whole = experiments.run(*FIG3, device="cpu", out=tmp_path / "whole", progress=False)
    held = records.load(*FIG3, place["out"])
    assert held.manifest["seeds"] == whole.manifest["seeds"]
    assert held.manifest["cpu_seconds"] > 0
    pd.testing.assert_frame_equal(in_order(held.frame), in_order(whole.frame), rtol=1e-5)
    assert not [p for p in place["home"].rglob("*") if p.is_file()], "joined: no longer needed"
    told.clear()
    queue.work(1, told.append, **place)
    assert len(told) == 1 and told[0].endswith("Nothing is left to be made.")


def test_without_time_nothing_is_begun_and_a_stopped_seed_goes_on(place, monkeypatch):
    told = []
    queue.work(0, told.append, **place)
    assert len(told) == 1 and "The time is over. Next: hierarchy/fig3.smoke, seed" in told[0]
    assert not [p for p in place["home"].rglob("*") if p.is_file()], "nothing was begun"
    right = experiments.run

    def short(*args, until, **options):
        return right(*args, until=0.0, **options)  # over after the first round

    with monkeypatch.context() as m:
        m.setattr(experiments, "run", short)
        queue.work(1, told.append, **place)
    assert "stopped in time after 1 of" in told[-1]
    assert queue.queue_rows(**place)[0]["state"] == "under way"
    queue.work(1, told.append, **place)
    assert [row["state"] for row in queue.queue_rows(**place)] == ["done", "done"]


def test_what_another_process_is_at_is_left_to_it(place):
    first = next(iter(queue.parts(*FIG3)))
    folder = files.make_folder(place["home"] / first / "hierarchy")
    with locks.only_one(folder / ".fig3.smoke.lock", "hierarchy fig3"):
        queue.work(1, lambda text: None, **place)
    states = {row["record"]: row["seeds"] for row in queue.queue_rows(**place)}
    assert states["hierarchy/fig3.smoke"] == "1/2", "the other seed, and none joined"
    with pytest.raises(records.MissingRecord):
        records.load(*FIG3, place["out"])
    queue.work(1, lambda text: None, **place)
    assert queue.queue_rows(**place)[0]["state"] == "done"


def test_who_ends_last_puts_the_seeds_together(place, monkeypatch):
    """Another process makes seed 1 and ends while this one is at seed 2."""
    right, first = experiments.run, []

    def run(*args, seeds, **options):
        if args == FIG3 and seeds == [1]:
            first.append(options)
            raise locks.UnderWay("elsewhere")
        if first:
            right(*FIG3, seeds=[1], **first.pop())
        return right(*args, seeds=seeds, **options)

    monkeypatch.setattr(experiments, "run", run)
    queue.work(1, lambda text: None, **place)
    assert records.load(*FIG3, place["out"]).manifest["seeds"] == [1, 2]
    assert not list(place["home"].rglob("*.json"))


def test_one_that_cannot_be_made_keeps_no_other_waiting(place, monkeypatch):
    right, told = experiments.run, []

    def run(paper, experiment, *args, **options):
        if experiment == "fig3":
            raise FedlibError("No data.")
        return right(paper, experiment, *args, **options)

    monkeypatch.setattr(experiments, "run", run)
    queue.work(1, told.append, **place)
    assert [row["state"] for row in queue.queue_rows(**place)] == ["waiting", "done"]
    assert any("No data." in line for line in told)


def test_the_book_s_queue_asks_for_what_there_is_and_tunes_first():
    held = queue.read_queue()
    names = [(row["paper"], row["experiment"], row["profile"]) for row in held]
    assert len(set(names)) == len(names)
    for place, (paper, experiment, profile) in enumerate(names):
        s = catalogue.settings(paper, experiment, profile)
        if "tuned" in s:
            assert (paper, s["tuned"], profile) in names[:place], experiment


def test_the_command_shows_the_queue():
    shown = CliRunner().invoke(app, ["records"])
    assert shown.exit_code == 0 and "hierarchy/fig3.paper" in shown.output
    wrong = CliRunner().invoke(app, ["records", "--work", "--hours", "-1"])
    assert wrong.exit_code == 2
