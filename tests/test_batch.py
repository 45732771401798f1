"""Batches: every job's record is the one that it would have made by itself, whatever happens."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from typer.testing import CliRunner

from fedlib import files
from fedlib.errors import FedlibError
from fedlib.lab import batch
from fedlib.lab.batch import grid as grids
from fedlib.lab.batch import spread, store, units, work
from fedlib.lab.cli import app
from fedlib.lab.evidence import catalogue, claims, experiments, freshness, records

STUDY = """
import os, signal, time
from typing import NotRequired
import pandas as pd
from fedlib.lab.job import Job, Outcome, Settings, alike
from fedlib.schema import PositiveFloat

class Walk(Settings):
    rate: PositiveFloat
    mood: NotRequired[str]
    pause: NotRequired[float]

@alike("seeds", "runs", unless=lambda s: s.get("mood") == "alone")
def walk(job: Job[Walk]) -> Outcome:
    rows = []
    for run in job.settings["runs"]:
        s = {**job.settings, **run}
        time.sleep(s.get("pause", 0))
        if s.get("mood") == "broken":
            raise ValueError("out of breath")
        if s.get("mood") == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        rows += [dict(run=run["run"], seed=seed, round=t, split="train", metric="loss",
                      value=s["rate"] * seed / (1 + t))
                 for t in range(3) for seed in job.seeds]
    return Outcome(pd.DataFrame(rows), {}, {})
"""
EXPERIMENTS = """
[common]
kind = "a_march:walk"
seeds = 2
[far]
where = "Figure 1"
title = "How far"
runs = [{ run = "slow", rate = 0.5 }, { run = "fast", rate = 2.0 }]
[near]
where = "Figure 2"
title = "How near"
runs = [{ run = "slow", rate = 0.25 }]
"""
COMMAND = [sys.executable, "-c", "from fedlib.lab.cli import main; main()", "batch", "run"]
FAR = {"paper": "march", "experiment": "far", "profile": "smoke"}
FIG1 = {"paper": "participation", "experiment": "fig1", "profile": "smoke", "rounds": 1000}


@pytest.fixture
def march(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a paper whose study takes no time, unless asked to."""
    home = tmp_path / "papers" / "march"
    home.mkdir(parents=True)
    (home / "experiments.toml").write_text(EXPERIMENTS)
    (tmp_path / "a_march.py").write_text(STUDY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a file that is mended in a second
    monkeypatch.setenv("FEDLIB_PAPERS", str(home.parent))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    yield tmp_path
    sys.modules.pop("a_march", None)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry units out in this process: one of their own takes three seconds to begin."""

    def carry_out(units: list, folder: Path, *_: int) -> Iterator[dict[str, str]]:
        for unit in units:
            yield work.carry_out_unit(unit, folder)

    monkeypatch.setattr(spread, "_processes", carry_out)


def rows(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def by_hand(folder: Path, job: batch.BatchJob) -> bytes:
    """Return the rows of the record that a job makes by itself."""
    alone = experiments.run(
        job.paper, job.experiment, job.profile, seeds=job.seeds, device=job.device,
        out=folder / job.id, progress=False, changes=job.changes,
    )  # fmt: skip
    return rows(alone.path)


# --- grids ----------------------------------------------------------------------------------------


def test_every_value_with_every_value(march):
    axes = {"fast.rate": [1.0, 2.0, 3.0], "seed": [4, 5]}
    jobs = batch.read_grid({"set": FAR, "grid": axes})
    assert [tuple(job.axes.values()) for job in jobs] == [
        (1.0, 4), (1.0, 5), (2.0, 4), (2.0, 5), (3.0, 4), (3.0, 5),
    ]  # fmt: skip
    assert [job.seeds for job in jobs[:2]] == [(4,), (5,)]
    assert [run["rate"] for run in jobs[4].settings["runs"]] == [0.5, 3.0]


def test_a_job_s_name_follows_from_what_it_is(march):
    def names(**page):
        return [job.id for job in batch.read_grid(page)]

    first = names(set=FAR, grid={"rate": [1.0, 2.0], "seed": [1, 2]})
    assert len(set(first)) == 4
    assert names(set=FAR, grid={"seed": [2, 1], "rate": [2.0, 1.0]}) == [
        first[3], first[1], first[2], first[0],
    ]  # fmt: skip
    assert names(set=FAR | {"rate": 1.0}, grid={"seed": [1]}) == first[:1]
    assert names(set=FAR, job=[{"rate": 1.0, "seed": 1}, {"rate": 1.0, "seed": 1}]) == first[:1]
    assert names(set=FAR | {"rate": 1.0, "seed": 1, "experiment": "near"}) != first[:1]
    assert names(set=FAR | {"rate": 1.0}, grid={"seeds": [[1]]}) == first[:1]


def test_changes_reach_the_runs_that_have_the_setting():
    s = {"lr": 1, "window": 5, "runs": [{"run": "a", "lr": 2}, {"run": "b=.5"}]}
    changed = catalogue.change(s, {"lr": 3, "window": 6})
    assert changed == {"lr": 3, "window": 6, "runs": [{"run": "a", "lr": 3}, {"run": "b=.5"}]}
    one = catalogue.change(s, {"b=.5.lr": 4, "new": 7})
    assert one["runs"] == [{"run": "a", "lr": 2}, {"run": "b=.5", "lr": 4}]
    assert one["lr"] == 1 and one["new"] == 7
    assert s["runs"] == [{"run": "a", "lr": 2}, {"run": "b=.5"}], "what was given stays"


def test_a_gpu_is_asked_for_by_the_device_or_by_the_notebooks_parameter():
    for asked in ({"device": "cuda"}, {"parameters": {"device": "cuda"}, "notebook": "a.ipynb"}):
        assert grids.BatchJob("a", {}, **asked).on_gpu
    assert not grids.BatchJob("a", {}, parameters={"lr": "cuda"}, notebook="cuda.ipynb").on_gpu
    same = {"paper": "participation", "experiment": "fig1", "profile": "smoke"}
    jobs = grids.read_grid({"set": same, "grid": {"device": ["cpu", "cuda"]}})
    assert [job.on_gpu for job in jobs] == [False, True], "this machine needs none"


def test_an_axis_that_is_set_has_that_value(march):
    page = {"set": FAR, "grid": {"seed": [1, 2], "pause": [0.1, 0.2]}}
    jobs = batch.read_grid(page, {"seed": 7})
    assert [job.axes for job in jobs] == [{"seed": 7, "pause": 0.1}, {"seed": 7, "pause": 0.2}]
    assert {job.seeds for job in jobs} == {(7,)}


def test_an_axis_takes_one_value_from_the_command_line(march):
    with pytest.raises(FedlibError, match=r"the axis 'pause' one value.*\[grid\]"):
        grid = {"set": FAR, "grid": {"pause": [0.1, 0.2]}}
        batch.read_grid(grid, grids.assignments(["pause=1,2"]))
    (job,) = batch.read_grid({"set": FAR, "grid": {"seeds": [[1, 2]]}}, {"seeds": [4, 5]})
    assert job.seeds == (4, 5)


@pytest.mark.slow
def test_listed_jobs_are_beside_those_of_the_grid(march, here, tmp_path):
    listed = [{"rate": 9.0, "pause": 0.01}, {"rate": 1.0, "seed": 7}]
    page = {"set": FAR | {"seed": 3}, "grid": {"rate": [1.0, 2.0]}, "job": listed}
    jobs = batch.read_grid(page)
    assert [(job.axes["rate"], job.seeds) for job in jobs] == [
        (1.0, (3,)), (2.0, (3,)), (9.0, (3,)), (1.0, (7,)),
    ]  # fmt: skip
    table = batch.run(page, tmp_path / "out", progress=False)
    assert list(table.columns[1:4]) == ["rate", "seed", "pause"] and len(table) == 4
    found = pd.read_csv(batch.collect(tmp_path / "out"))
    assert list(found.columns[:4]) == ["job", "rate", "axis seed", "pause"]


def test_values_of_a_command_line():
    words = ["lr=.01", "seeds=[4, 5]", "aligned=true", "name=fig1", "a=b.lr=1e-3"]
    assert grids.assignments(words) == {
        "lr": 0.01, "seeds": [4, 5], "aligned": True, "name": "fig1", "a=b.lr": 1e-3,
    }  # fmt: skip
    assert grids.assignments(["a.b=c=d"]) == {"a.b": "c=d"}
    for word in (".lr=3", "amplified.=3"):
        with pytest.raises(FedlibError, match="NAME=VALUE"):
            grids.assignments([word])
    with pytest.raises(FedlibError, match="lr twice"):
        grids.assignments(["lr=.1", "a.lr=1", "lr=.2"])


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ({"set": FAR, "gridd": {}}, ["'gridd'", "Did you mean 'grid'"]),
        ({"set": FAR, "grid": {"rate": []}}, ["'rate' has no values"]),
        ({"set": FAR, "grid": {"rate": 3}}, ["'rate' is 3", "array"]),
        ({"set": FAR, "grid": {"raet": [1.0]}}, ["'raet'", "Did you mean 'rate'"]),
        ({"set": FAR, "grid": {"fats.rate": [1.0]}}, ["run 'fats'", "Did you mean 'fast'"]),
        ({"set": FAR, "grid": {"raet": [1.0]}}, ["The grid: unknown key 'raet'"]),
        ({"set": FAR, "grid": {"rate": [1.0, 2.0, 1.0]}}, ["'rate' has 1.0 twice"]),
        ({"set": FAR | {"rate": 1.0}, "grid": {"rate": [2.0]}}, ["'rate'", "both in [set]"]),
        ({"set": FAR, "grid": {"rate": [-1.0]}}, ["'rate' is -1.0", "greater than 0"]),
        ({"set": FAR | {"experiment": "fra"}}, ["'fra'", "Did you mean 'far'"]),
        ({"set": {"paper": "march"}}, ["neither a notebook nor the experiment"]),
        ({"set": FAR | {"seed": -1}}, ["seed", "-1"]),
        ({"set": FAR | {"seeds": 2}, "grid": {"seed": [1]}}, ["both 'seed' and 'seeds'"]),
        ({"set": FAR, "headline": {"run": "fats"}}, ["run in [headline]", "'fast'"]),
        ({"set": FAR, "grid": {"seconds": [1.0]}}, ["'seconds' is a column"]),
        ({"set": FAR | {"paper": ["march"]}}, ["Unknown paper '['march']'"]),
        ({"notebook": "not_there.ipynb"}, ["no notebook", "not_there.ipynb"]),
        ({"notebook": "a.ipynb", "headline": {"run": "fast"}}, ["[headline] is for experiments"]),
    ],
)
def test_a_mistake_in_a_grid_is_named(march, page, words, tmp_path):
    with pytest.raises(FedlibError) as told:
        batch.run(page, tmp_path / "out", progress=False)
    assert [word for word in words if word not in str(told.value)] == [], told.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("told", [OSError, files.cannot_write])
def test_a_full_disk_stops_the_batch_and_fails_no_job(march, monkeypatch, tmp_path, told):
    full = OSError(errno.ENOSPC, "No space left on device")

    def no_room(*_):
        if told is OSError:
            raise full
        raise files.cannot_write("elsewhere", full) from full

    monkeypatch.setattr(work, "_run_experiment", no_room)
    (unit,) = batch.plan(batch.read_grid({"set": FAR, "grid": {"rate": [1.0, 2.0]}}))
    where = tmp_path if told is OSError else "elsewhere"
    with pytest.raises(FedlibError, match=f"{where}.*No space left"):
        work.carry_out_unit(unit, tmp_path)
    assert not list(tmp_path.rglob("error.txt"))


def test_numbers_and_words_on_one_axis_are_drawn(monkeypatch, tmp_path):
    table = pd.DataFrame({"job": ["a", "b"], "lr": [0.01, "tuned"], "status": work.DONE,
                          "seconds": 1.0, "why": "", "headline": [1.0, 2.0]})  # fmt: skip
    table = table[["job", "lr", "status", "seconds", "headline", "why"]]
    monkeypatch.setattr(store, "job_table", lambda folder: table)
    monkeypatch.setattr(store, "jobs", lambda folder: [SimpleNamespace(notebook="a.ipynb")])
    (axis,) = store.plot(tmp_path).axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0.01", "tuned"]


# --- what is run together -------------------------------------------------------------------------


def test_jobs_that_differ_in_seeds_and_runs_are_one_unit(march):
    axes = {"rate": [1.0, 2.0], "seed": [1, 2, 3]}
    jobs = batch.read_grid({"set": FAR, "grid": axes})
    (unit,) = batch.plan(jobs)
    assert unit.seeds == (1, 2, 3) and len(unit.variants) == 2 and len(unit.jobs) == 6
    ragged = [job for job in jobs if job.axes != {"rate": 2.0, "seed": 3}]
    assert sorted(len(unit.jobs) for unit in batch.plan(ragged)) == [2, 3]
    apart = batch.read_grid({"set": FAR, "grid": axes | {"pause": [0.0, 0.1]}})
    assert [len(unit.jobs) for unit in batch.plan(apart)] == [6, 6]
    alone = batch.read_grid({"set": FAR | {"mood": "alone"}, "grid": axes})
    assert [len(unit.jobs) for unit in batch.plan(alone)] == [1] * 6


def test_what_may_be_joined_is_what_is_padded_alike():
    """Rows of unequal length are padded to the longest beside them, and rounded otherwise."""
    tiers = FIG1 | {"paper": "tiers", "experiment": "waiting", "ticks": 2}
    tiers.pop("rounds")
    axes = {"waiting, one slow silo.slow": [2.0, 5.0], "seed": [1, 2]}
    plan = batch.plan(batch.read_grid({"set": tiers, "grid": axes}))
    assert sorted((len(unit.variants), unit.seeds) for unit in plan) == [(2, (1,)), (2, (2,))]
    come_and_go = FIG1 | {"process": "markov", "on": 0.1, "off": 0.4}
    assert len(batch.plan(batch.read_grid({"set": come_and_go, "grid": {"seed": [1, 2]}}))) == 2


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 99])
def test_units_are_cut_until_every_worker_has_one(march, workers):
    jobs = batch.read_grid({"set": FAR, "grid": {"rate": [1.0, 2.0], "seed": [1, 2, 3]}})
    plan = batch.plan(jobs, workers)
    assert len(plan) == min(workers, 6)
    assert sorted(job.id for unit in plan for job in unit.jobs) == sorted(job.id for job in jobs)
    for unit in plan:  # what is run together is full: every variant with every seed
        assert len(unit.jobs) == len(unit.variants) * len(unit.seeds)


def test_shards_are_a_partition(march):
    plan = batch.plan(batch.read_grid({"set": FAR, "grid": {"pause": [0.1 * k for k in range(7)]}}))
    parts = [units.shard(plan, f"{i}/3") for i in (1, 2, 3)]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert {unit.id for part in parts for unit in part} == {unit.id for unit in plan}
    for text in ("0/3", "4/3", "1", "a/b", "1/0", ""):
        with pytest.raises(FedlibError, match="i/n"):
            units.shard(plan, text)


@pytest.mark.parametrize("axes", [{"seed": [1, 2, 3, 4, 5, 6]}, {"pause": [0.1, 0.2, 0.3, 0.4]}])
def test_every_shard_has_a_share_whatever_the_workers_of_others(march, axes):
    jobs = batch.read_grid({"set": FAR, "grid": axes})
    shares = [batch.plan(jobs, workers, f"{n + 1}/4") for n, workers in enumerate((1, 2, 1, 8))]
    assert all(shares), "none is empty while another has several jobs"
    found = sorted(job.id for units in shares for unit in units for job in unit.jobs)
    assert found == sorted(job.id for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixed", "axes"),
    [
        (FIG1, {"amplified.lr": [1e-5, 1e-1], "seed": [3, 4]}),
        (FIG1 | {"looks": 4, "seed": 3}, {"amplified.looks": [2, 3]}),
        (FIG1, {"lr": [1e-4, 1e-3], "seeds": [[1, 2], [5, 6]]}),
        (FIG1 | {"paper": "tiers", "experiment": "waiting", "ticks": 2},
         {"waiting, one slow silo.slow": [2.0, 5.0], "seed": [1, 2]}),
        (FIG1 | {"experiment": "figB1"}, {"gamma=0.5.lr": [0.1, 0.2], "seed": [1, 2]}),
    ],
    ids=["rates and seeds", "a run's own", "several seeds a job", "tiers", "no chance"],
)  # fmt: skip
def test_a_job_in_a_unit_has_the_record_that_it_has_alone(fixed, axes, tmp_path):
    fixed = {k: v for k, v in fixed.items() if k != "rounds" or fixed["experiment"] == "fig1"}
    jobs = batch.read_grid({"set": fixed, "grid": axes})
    for unit in batch.plan(jobs):
        assert len(unit.jobs) > 1
        work.carry_out_unit(unit, tmp_path / "out")
    for job in jobs:
        held = work.record(tmp_path / "out", job)
        assert rows(held.path) == by_hand(tmp_path / "alone", job), job.axes
        alone = json.loads((tmp_path / "alone" / job.id / job.paper / held.manifest_path.name)
                           .read_text())  # fmt: skip
        for key in ("settings", "seeds", "diverged", "cards", "code", "rules", "data"):
            assert held.manifest[key] == alone[key], key
        assert job.id not in held.manifest["beside"] and held.manifest["beside"]


def test_a_run_that_diverges_ends_where_it_ends_alone(tmp_path):
    axes = {"matched-rate.lr": [1e-3, 1e37], "seed": [1, 2]}
    jobs = batch.read_grid({"set": FIG1, "grid": axes})
    (unit,) = batch.plan(jobs)
    work.carry_out_unit(unit, tmp_path / "out")
    lost = [work.record(tmp_path / "out", job).manifest["diverged"] for job in jobs]
    assert [list(found) for found in lost] == [[], [], ["matched-rate"], ["matched-rate"]]
    for job in jobs:
        held = work.record(tmp_path / "out", job)
        assert rows(held.path) == by_hand(tmp_path / "alone", job)


def test_the_plan_tells_time_and_memory():
    jobs = batch.read_grid({"set": FIG1 | {"profile": "quick"}, "grid": {"seed": [1, 2]}})
    (row,) = units.describe_units(batch.plan(jobs))
    held = json.loads(
        (Path(catalogue.paths.paper_folder("participation")) / "results" / "fig1.quick.json")
        .read_text()
    )  # fmt: skip
    shorter = FIG1["rounds"] / held["settings"]["rounds"]
    assert row["about"] == f"{round(held['wall_seconds'] * 2 / len(held['seeds']) * shorter)} s"
    assert row["GB"] == f"{0.5 + 2 * 4 * 70_000 * 784 / 1e9:.1f}" and row["jobs"] == 2


def test_time_follows_the_rounds():
    def seconds(rounds):
        page = {"set": FIG1 | {"profile": "quick", "rounds": rounds}}
        return units.estimate_unit(batch.plan(batch.read_grid(page))[0])[0]

    usual = catalogue.settings("participation", "fig1", "quick")["rounds"]
    assert seconds(3 * usual) == pytest.approx(3 * seconds(usual))


# --- running --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_and_the_store(march, tmp_path):
    page = {"set": FAR, "grid": {"rate": [1.0, 2.0], "seed": [1, 2]}, "headline": {"run": "fast"}}
    table = batch.run(page, tmp_path / "out", workers=2, progress=False)
    assert table["status"].tolist() == ["done"] * 4
    # of 1 / (rounds + 1) after two rounds, a line from 1/2 to 1/3: its mean over the last tenth
    assert table["headline"].tolist() == pytest.approx([0.35, 0.7, 0.7, 1.4])
    kept = list(csv.DictReader((tmp_path / "out" / "jobs.csv").open()))
    assert [row["rate"] for row in kept] == ["1.0", "1.0", "2.0", "2.0"]
    found = pd.read_csv(batch.collect(tmp_path / "out"))
    assert list(found.columns[:3]) == ["job", "rate", "axis seed"]
    jobs = batch.read_grid(page)
    assert found["job"].unique().tolist() == [job.id for job in jobs]
    own = found[found["job"] == jobs[3].id]
    assert own["value"].tolist() == pytest.approx([4, 2, 4 / 3] * 2)
    pages = sorted(path.stem for path in (tmp_path / "out" / "store" / "manifests").iterdir())
    assert pages == sorted(job.id for job in jobs)
    assert not (tmp_path / "out" / "units").exists(), "nothing half-done stays"


@pytest.mark.slow
def test_finished_jobs_are_not_run_again(march, here, tmp_path):
    out = tmp_path / "out"
    batch.run({"set": FAR, "grid": {"rate": [1.0]}}, out, progress=False)
    (done,) = (path for path in out.rglob("*.csv.gz"))
    before = done.stat().st_mtime_ns
    table = batch.run({"set": FAR, "grid": {"rate": [1.0, 3.0]}}, out, progress=False)
    assert table["status"].tolist() == ["done", "done"]
    assert done.stat().st_mtime_ns == before
    done.write_bytes(done.read_bytes()[:-9])
    assert batch.status(out)["status"].tolist() == ["waiting", "done"], "a damaged record"
    table = batch.run({"set": FAR, "grid": {"rate": [1.0, 3.0]}}, out, progress=False)
    assert table["status"].tolist() == ["done", "done"]


@pytest.mark.slow
def test_a_bad_job_takes_no_other_with_it(march, here, tmp_path):
    moods = {"slow.mood": ["fine", "broken", "good"], "seed": [1, 2]}
    page, out = {"set": FAR, "grid": moods}, tmp_path / "out"
    table = batch.run(page, out, progress=False)
    assert table["status"].tolist() == ["done", "done", "failed", "failed", "done", "done"]
    assert table["why"].tolist()[2] == "ValueError: out of breath"
    jobs = batch.read_grid(page)
    told = (work.place(out, jobs[2]) / "error.txt").read_text()
    assert told.count("Traceback") == 1 and "out of breath" in told
    study = march / "a_march.py"
    study.write_text(study.read_text().replace('"broken"', '"brokn"'))
    sys.modules.pop("a_march")
    assert batch.run(page, out, progress=False)["status"].tolist()[2] == "failed", "only on request"
    table = batch.run(page, out, retry=True, progress=False)
    assert table["status"].tolist() == ["done"] * 6 and not table["why"].any()
    assert not list(out.rglob("error.txt"))


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_worker_loses_its_own_jobs_and_no_other(march, tmp_path):
    page = {"set": FAR, "grid": {"mood": ["fine", "killed", "good", "well"]}}
    table = batch.run(page, tmp_path / "out", workers=2, progress=False)
    assert table["status"].tolist() == ["done", "failed", "done", "done"]
    assert table["why"].tolist()[1] == "Its process ended: killed by SIGKILL."


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_ends_with_a_sentence(march, tmp_path):
    write(tmp_path, MARCH)
    shell = f'ulimit -f 1; exec "$@" --out {tmp_path / "out"}'
    done = subprocess.run(
        ["bash", "-c", shell, "", *COMMAND, str(tmp_path / "grid.toml")],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Cannot write to" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("*.part"))


@pytest.mark.long
def test_a_script_needs_no_guard(march, tmp_path):
    script = f"""
from fedlib.lab import batch
print("begun")
table = batch.run({{"set": {FAR!r}}}, {str(tmp_path / "out")!r}, progress=False)
print(table["status"].tolist())
"""
    (tmp_path / "script.py").write_text(script)
    for given in ([str(tmp_path / "script.py")], ["-"]):
        done = subprocess.run(
            [sys.executable, *given], input=script, capture_output=True, text=True, timeout=600,
            check=True,
        )  # fmt: skip
        assert done.stdout.split("\n")[:2] == ["begun", "['done']"]


@pytest.mark.slow
def test_a_worker_makes_nothing_that_it_could_leave_behind(tmp_path):
    script = f"""
import multiprocessing, pathlib
from multiprocessing import resource_tracker
multiprocessing.set_start_method("spawn")
from fedlib.lab.batch.spread import _begin
from tqdm.auto import tqdm
_begin(1, pathlib.Path({str(tmp_path)!r}))
resource_tracker.register = lambda *what: print("made", what)
list(tqdm(range(2), disable=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == ""


@pytest.mark.slow
def test_a_headline_that_there_is_not_is_told(march, here, tmp_path, capsys):
    page = {"set": FAR, "grid": {"rate": [1.0, 2.0]}, "headline": {"metric": "lss"}}
    table = batch.run(page, tmp_path / "out", progress=False)
    words = "[headline]: run 'slow' has no train lss. It has: train loss."
    assert table["headline"].isna().all() and capsys.readouterr().err.count(words) == 1
    assert words in CliRunner().invoke(app, ["batch", "status", str(tmp_path / "out")]).stderr
    with pytest.raises(FedlibError, match="no train lss"):
        batch.plot(tmp_path / "out")
    again = batch.run(page | {"headline": {"run": "fast"}}, tmp_path / "out", progress=False)
    assert again["headline"].notna().all(), "read from the records, not from what was said before"


def test_a_unit_that_is_lost_takes_no_finished_job_with_it(march, here, tmp_path):
    page, out = {"set": FAR, "grid": {"rate": [1.0, 2.0]}}, tmp_path / "out"
    (unit,) = batch.plan(batch.read_grid(page))
    first, second = unit.jobs
    work.carry_out_unit(units.Unit((first,)), out)
    told = work.fail(unit, out, "Its process ended.")
    assert told == {first.id: "done", second.id: "failed"}
    assert work.state(out, first)["status"] == "done"
    assert work._in_short(RuntimeError("what\nhint")) == "RuntimeError: what"
    assert work._in_short(FedlibError("There is none:\n  make it")) == "There is none:"
    assert work._in_short(FedlibError()) == "FedlibError: "


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_can_be_looked_at(march, here, tmp_path, monkeypatch):
    page, call = {"set": FAR, "grid": {"rate": [1.0, 2.0]}}, CliRunner().invoke
    batch.run(page, tmp_path / "out", progress=False)

    def refuse(path, content):
        raise FedlibError(f"Cannot write to {path}.")

    monkeypatch.setattr(store.files, "publish", refuse)
    looked = call(app, ["batch", "status", str(tmp_path / "out")])
    assert looked.exit_code == 0 and "2 done" in looked.stdout and "Note:" in looked.stderr
    drawn = call(app, ["batch", "plot", str(tmp_path / "out"), "--out", str(tmp_path / "a.svg")])
    assert drawn.exit_code == 0 and (tmp_path / "a.svg").is_file()
    nowhere = str(tmp_path / "no" / "a.svg")
    missed = call(app, ["batch", "plot", str(tmp_path / "out"), "--out", nowhere])
    assert missed.exit_code == 2 and "Errno" not in missed.stderr
    folder = call(app, ["batch", "plot", str(tmp_path / "out"), "--out", str(tmp_path)])
    assert folder.exit_code == 2 and "is a folder" in folder.stderr


@pytest.mark.slow
def test_two_of_the_same_batch_refuse_each_other(march, here, tmp_path):
    page, out = {"set": FAR, "grid": {"pause": [0.0, 0.1]}}, tmp_path / "out"
    out.mkdir()
    with work.locks.only_one(out / ".1-of-2.lock", "A batch"):
        with pytest.raises(FedlibError, match="is under way in .* by process"):
            batch.run(page, out, shard="1/2", progress=False)
        table = batch.run(page, out, shard="2/2", progress=False)
    assert table["status"].tolist() == ["waiting", "done"]
    assert batch.run(page, out, progress=False)["status"].tolist() == ["done", "done"]


# --- from the command line ------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    page = folder / "grid.toml"
    page.write_text(text)
    return page


MARCH = """
[set]
paper = "march"
experiment = "far"
profile = "smoke"
pause = 0.1
[grid]
rate = [1.0, 2.0]
mood = ["a", "b", "c", "d", "e"]
"""


def start(folder: Path, *words: str) -> subprocess.Popen:
    grid = str(folder / "grid.toml")
    return subprocess.Popen(
        [*COMMAND, grid, "--out", str(folder / "out"), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def until(there: Callable[[], bool], seconds: float = 600) -> None:
    late = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < late, "it did not come"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_and_taken_up_again(march, here, tmp_path, how):
    write(tmp_path, MARCH)
    page = grids.read_grid(tmp_path / "grid.toml")
    batch.run(tmp_path / "grid.toml", tmp_path / "whole", progress=False)
    running = start(tmp_path, "--workers", "2")
    done = lambda: len(list((tmp_path / "out").glob("jobs/*/state.json")))  # noqa: E731
    until(lambda: done() >= 2)
    os.killpg(running.pid, how)
    code = running.wait(600)
    said = running.stdout.read()
    assert done() < len(page), "too late to interrupt"
    if how == signal.SIGINT:
        assert code == 130 and "Run the same command again" in said and "Traceback" not in said
    table = batch.run(tmp_path / "grid.toml", tmp_path / "out", progress=False)
    assert table["status"].tolist() == ["done"] * len(page)
    one, other = (batch.collect(tmp_path / name) for name in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_seconds_of_earlier_starts_count(march, here, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_seconds", lambda folder: (100.0, 100.0))
    page = {"set": FAR, "grid": {"rate": [1.0, 2.0]}}
    table = batch.run(page, tmp_path / "out", progress=False)
    assert (table["seconds"] >= 50).all(), "two jobs share a start"


def command_lines(group: int) -> str:
    shown = subprocess.run(
        ["ps", "-axww", "-o", "pgid=", "-o", "args="], capture_output=True, text=True, check=True
    )  # fmt: skip
    return "\n".join(line for line in shown.stdout.splitlines() if line.split()[0] == str(group))


@pytest.mark.slow
@pytest.mark.long
def test_interrupted_while_workers_begin_it_says_one_line(march, tmp_path):
    write(tmp_path, MARCH.replace("pause = 0.1", "pause = 60"))
    running = start(tmp_path, "--workers", "2")
    until(lambda: "spawn_main" in command_lines(running.pid))
    time.sleep(0.3)  # they are importing
    os.killpg(running.pid, signal.SIGINT)
    said = running.communicate(timeout=600)[0]
    assert running.returncode == 130
    said = "".join(line for line in said.splitlines(True) if not line.startswith("Note: "))
    assert said == "Interrupted. Run the same command again to go on.\n"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_batch_that_is_killed(march, tmp_path, how):
    write(tmp_path, MARCH.replace("pause = 0.1", "pause = 600"))
    running = start(tmp_path, "--workers", "2")
    until(lambda: len([*(tmp_path / "out").rglob(".*.lock")]) == 3, 60)  # the batch, two workers
    running.send_signal(how)
    running.wait(60)
    until(lambda: "spawn_main" not in command_lines(running.pid), 60)


@pytest.mark.slow
def test_commands(march, here, tmp_path):
    call = CliRunner().invoke
    write(tmp_path, MARCH.replace('"a", "b", "c", "d", "e"', '"a", "broken"'))
    grid, out = str(tmp_path / "grid.toml"), str(tmp_path / "out")
    plan = call(app, ["batch", "run", grid, "--out", out, "--dry-run"])
    assert plan.exit_code == 0 and "march far.smoke" in plan.stdout
    assert "\n4 jobs to run" in plan.stdout
    assert plan.stderr.count("[far] itself has no 'mood'") == 1
    assert not Path(out).exists()
    ran = call(app, ["batch", "run", grid, "--out", out, "--set", "pause=0"])
    assert ran.exit_code == 1 and "2 done, 2 failed" in ran.stdout
    assert "ValueError: out of breath" in ran.stdout
    again = ["batch", "run", grid, "--out", out, "--set", "pause=0", "--dry-run"]
    assert call(app, again).stdout.startswith("0 of 4 jobs to run")
    assert "\n2 of 4 jobs to run" in call(app, [*again, "--retry"]).stdout
    told = json.loads(call(app, ["batch", "status", out, "--json"]).stdout)
    assert [row["status"] for row in told] == ["done", "failed", "done", "failed"]
    assert [row["rate"] for row in told] == [1.0, 1.0, 2.0, 2.0]
    assert (
        call(app, ["batch", "collect", out])
        .stdout.strip()
        .endswith("store/rows.csv.gz: 2 of 4 jobs")
    )
    drawn = call(app, ["batch", "plot", out])
    assert drawn.stdout.strip().endswith("headline.svg: 2 of 4 jobs")
    assert drawn.exit_code == 0 and (tmp_path / "out" / "headline.svg").stat().st_size > 5000
    assert call(app, ["batch", "plot", out, "--x", "raet"]).exit_code == 2
    twice = call(app, ["batch", "plot", out, "--x", "rate", "--by", "rate"])
    assert twice.exit_code == 2 and "both 'rate'" in twice.stderr
    two = call(app, ["batch", "run", grid, "--out", out, "--ray", "auto", "--workers", "2"])
    assert two.exit_code == 2 and "--ray takes the place of --workers" in two.stderr
    absent = call(app, ["batch", "run", f"{grid}x", "--out", out])
    assert absent.exit_code == 2 and "There is no file" in absent.stderr
    wrong = call(app, ["batch", "status", str(tmp_path)])
    assert wrong.exit_code == 2 and "is no folder of a batch" in wrong.stderr
    assert "Errno" not in wrong.stderr


def test_one_experiment_with_other_settings(march, tmp_path):
    ran = CliRunner().invoke(
        app, ["run", "march", "far", "--profile", "smoke", "--out", str(tmp_path / "out"),
              "--set", "slow.rate=.125", "--seeds", "3,4"],
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    (page,) = (tmp_path / "out" / "march").glob("*.json")
    assert [r["rate"] for r in json.loads(page.read_text())["settings"]["runs"]] == [0.125, 2.0]


def test_a_job_that_is_lost_by_the_rule_of_claims_says_so(march, here, tmp_path, monkeypatch):
    """Its record says of no run that it diverged, and yet it has no headline."""
    batch.run({"set": FAR, "grid": {"rate": [1.0]}}, tmp_path / "out", progress=False)
    lost = pd.Series([0.5, float("nan")])
    monkeypatch.setattr(work.measures, "last", lambda *names, **more: lost)
    table = batch.status(tmp_path / "out")
    assert [*table["status"], *table["why"]] == ["done", "diverged"]
    assert table["headline"].isna().all()


@pytest.mark.slow
def test_a_picture_shows_means_and_reach(march, here, tmp_path):
    page = {"set": FAR, "grid": {"rate": [1.0, 100.0], "mood": ["a", "b"], "seed": [1, 3]}}
    batch.run(page, tmp_path / "out", progress=False)
    figure = batch.plot(tmp_path / "out")
    (axis,) = figure.axes
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "rate"
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["mood = a", "mood = b"]
    line, _, (bars,) = axis.containers[0]
    assert line.get_ydata().tolist() == pytest.approx([0.7, 70])
    assert [s[:, 1].tolist() for s in bars.get_segments()] == [
        pytest.approx([0.35, 1.05]), pytest.approx([35, 105]),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_mean_over_the_jobs_that_did_not_diverge_is_no_point(march, here, tmp_path):
    lost = 'value=float("inf") if seed == 3 and s["rate"] > 9 else s["rate"]'
    told = '{r["run"]: {r["seed"]: 2} for r in rows if r["value"] > 1e9}'
    text = STUDY.replace('value=s["rate"]', lost).replace("(rows), {}", f"(rows), {told}")
    (march / "a_march.py").write_text(text)
    page = {"set": FAR, "grid": {"rate": [1.0, 100.0], "seed": [1, 3]}}
    table = batch.run(page, tmp_path / "out", progress=False)
    assert table["headline"].isna().tolist() == [False, False, False, True]
    assert table["why"].tolist() == ["", "", "", "diverged"]
    (axis,) = batch.plot(tmp_path / "out").axes
    assert axis.containers[0][0].get_xdata().tolist() == [1.0]
    title = axis.get_title("left") + axis.get_title()  # as the style has it
    assert "a job has no number: rate = 100.0" in title


@pytest.mark.slow
def test_other_code_is_another_job(march, here, tmp_path):
    page = {"set": FAR, "grid": {"rate": [1.0]}}
    before = batch.run(page, tmp_path / "out", progress=False)
    (march / "a_march.py").write_text(STUDY.replace('value=s["rate"]', 'value=2 * s["rate"]'))
    sys.modules.pop("a_march")
    freshness.forget()
    assert batch.status(tmp_path / "out")["headline"].tolist() == before["headline"].tolist()
    after = batch.run(page, tmp_path / "out", progress=False)
    made = batch.collect(tmp_path / "out").parent / "manifests"
    (made / "of-a-job-that-was.json").write_text("{}")
    batch.collect(tmp_path / "out")
    assert [path.stem for path in made.iterdir()] == after["job"].tolist()
    assert after["headline"].tolist() == pytest.approx([2 * value for value in before["headline"]])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("rows", "a_march:walk returned list"),
        ("Outcome(rows, {}, {})", "has no column 'run'"),
        ("Outcome(pd.DataFrame(rows).drop(columns='split'), {}, {})", "has no column 'split'"),
        ("Outcome(pd.DataFrame(rows)[:0], {}, {})", "has no rows"),
        ("Outcome(pd.DataFrame(rows), {}, None)", "hashes of an Outcome is {part: SHA-256}"),
        ("Outcome(pd.DataFrame(rows), [], {})", "diverged of an Outcome is {run: {seed: round}}"),
    ],
)
def test_what_is_no_outcome_takes_no_record_s_place(march, tmp_path, returned, words):
    call = dict(seeds=1, out=tmp_path / "out", progress=False)
    kept = experiments.run("march", "far", "smoke", **call)
    text = STUDY.replace("Outcome(pd.DataFrame(rows), {}, {})", returned)
    (march / "a_march.py").write_text(text)
    sys.modules.pop("a_march")
    freshness.forget()
    with pytest.raises(FedlibError, match=re.escape(words)):
        experiments.run("march", "far", "smoke", replace=True, **call)
    assert records.load("march", "far", "smoke", tmp_path / "out").frame.equals(kept.frame)


def test_a_study_that_python_cannot_read_is_told(march, tmp_path):
    (march / "a_march.py").write_text(STUDY + "\ndef more(:\n")
    with pytest.raises(FedlibError, match=r"Python cannot read .*a_march.*line \d+"):
        experiments.run("march", "far", "smoke", out=tmp_path / "out", progress=False)


def test_a_folder_in_one_s_home_is_found(march, here, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "grid.toml").write_text("set = { paper = 'march', experiment = 'far' }")
    assert batch.read_grid("~/grid.toml")[0].experiment == "far"
    batch.run({"set": FAR}, "~/out", progress=False)
    assert batch.collect("~/out") == tmp_path / "out" / "store" / "rows.csv.gz"
    assert store.lacking("~/out") == ""
    experiments.run("march", "far", "smoke", out="~/runs", progress=False)
    with pytest.raises(FedlibError, match="march has no claims: no claims.toml in "):
        claims.judge("march", "~/runs")  # the folder is there
    assert records.load("march", "far", "smoke", tmp_path / "runs").manifest["seeds"] == [1, 2]


# --- notebooks ------------------------------------------------------------------------------------


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    cells = [
        ("parameters", "lr = 0.1\nout = ''"),
        ("", "import pathlib\nassert lr < 1, 'too fast'"),
        ("headline", "pathlib.Path(out, 'made').write_text('x')\nprint('loss', 2 * lr)"),
    ]
    for tag, source in cells:
        book.cells.append(
            nbformat.v4.new_code_cell(source, metadata={"tags": [tag] if tag else []})
        )
    nbformat.write(book, tmp_path / "a.ipynb")
    return tmp_path


@pytest.mark.slow
@pytest.mark.long
def test_notebooks_are_jobs_too(notebook):
    write(notebook, 'notebook = "a.ipynb"\n[grid]\nlr = [0.25, 3.0]\n')
    table = batch.run(notebook / "grid.toml", notebook / "out", progress=False)
    assert table["status"].tolist() == ["done", "failed"]
    assert table["headline"].tolist()[0] == 0.5 and "too fast" in table["why"].tolist()[1]
    homes = [work.place(notebook / "out", job) for job in store.jobs(notebook / "out")]
    assert (homes[0] / "made").read_text() == "x", "each has a folder of its own"
    assert all((home / "notebook.ipynb").is_file() for home in homes), "failed ones are kept"
    assert "too fast" in (homes[1] / "error.txt").read_text()
    with pytest.raises(FedlibError, match=r"'rl'\. Did you mean 'lr'"):
        batch.read_grid({"notebook": str(notebook / "a.ipynb"), "grid": {"rl": [1]}})
    with pytest.raises(FedlibError, match="are notebooks, which have no rows"):
        batch.collect(notebook / "out")


@pytest.mark.parametrize("text", ["no JSON", "{}", "[1]"])
def test_what_is_no_notebook_is_told(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text)
    with pytest.raises(FedlibError, match=r"a\.ipynb is no Jupyter notebook"):
        batch.read_grid({"notebook": str(tmp_path / "a.ipynb")})


@pytest.mark.parametrize(
    "lacks, words", [("kernelspec", "does not name its kernel"), ("tags", "has no parameters: no ")]
)
def test_a_notebook_that_lacks_a_kernel_or_parameters_is_told(notebook, lacks, words):
    book = nbformat.read(notebook / "a.ipynb", 4)
    for part in (book, *book.cells):
        part.metadata.pop(lacks, None)
    nbformat.write(book, notebook / "a.ipynb")
    with pytest.raises(FedlibError, match=words):
        batch.read_grid({"notebook": str(notebook / "a.ipynb"), "set": {"lr": 0.5}})


def test_another_notebook_is_another_job(notebook):
    page = {"notebook": str(notebook / "a.ipynb"), "set": {"lr": 0.5}}
    (before,) = batch.read_grid(page)
    path = notebook / "a.ipynb"
    path.write_text(path.read_text().replace("2 * lr", "3 * lr"))
    (after,) = batch.read_grid(page)
    assert before.id != after.id
