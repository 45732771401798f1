"""How long will it take? Estimates against a clock that the work itself puts forward."""

from __future__ import annotations

import dataclasses
import signal

import pandas as pd
import pytest
import torch

from fedlib.engine.evaluation import Evaluation
from fedlib.engine.pilot import few_passes
from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.lab import cli
from fedlib.lab.evidence import duration, experiments, pilot, records, tuning
from fedlib.lab.evidence.duration import Plan, TimeEstimate
from fedlib.lab.job import Job, Outcome, study

PAPER = "participation"


@dataclasses.dataclass(frozen=True)
class State:
    x: torch.Tensor
    seeds: tuple[int, ...]
    t: int = 0


class World:
    """A clock; an algorithm whose rounds and looks take time by it; a study that runs it."""

    def __init__(self, fixed: float, each: float, look: float, rounds: int, every: int) -> None:
        self.time, self.rounds_done = 0.0, 0
        self.fixed, self.each, self.look, self.rounds = fixed, each, look, rounds
        self.every = every

    def init(self, task, seeds):
        return State(torch.zeros(len(seeds), 1), tuple(seeds))

    def round(self, state, task):
        self.time += self.fixed + self.each * len(state.seeds)
        self.rounds_done += 1
        return dataclasses.replace(state, t=state.t + 1), {}

    def seen(self, state, task):
        self.time += self.look
        return {("train", "loss"): torch.zeros(len(state.seeds))}

    def study(self, job: Job) -> Outcome:
        self.time += 2  # to set it up
        frames = [
            simulate(
                self, None, self.rounds, job.seeds, name=run["run"], progress=job.progress,
                evaluation=Evaluation(self.every, measure=self.seen),
            ).frame
            for run in job.settings["runs"]
        ]  # fmt: skip
        return Outcome(pd.concat(frames), {}, {})


@pytest.fixture
def timed(monkeypatch):
    """Return a function that makes a world, and one that estimates how long its study takes."""

    def enter(seeds: int, runs: int = 2, **settings):
        world = World(**settings)
        monkeypatch.setattr(pilot, "now", lambda: world.time)
        monkeypatch.setattr(duration, "study", lambda kind: world.study)
        s = dict(kind="a:b", runs=[dict(run=f"run {k}") for k in range(runs)])
        plan = Plan("", "", "quick", s, Job(s, tuple(range(seeds)), progress=False), None)
        return world, plan

    return enter


class Stop(FedlibError):
    pass


def planned(*given, **options) -> Plan:
    """Return what would be run, without running it."""
    plans = []

    def announce(plan):
        plans.append(plan)
        raise Stop

    with pytest.raises(Stop):
        experiments.run(*given, announce=announce, **options)
    return plans[0]


def test_rounds_looks_runs_and_seeds_are_counted(timed):
    world, plan = timed(3, fixed=0.01, each=0.001, look=0.05, rounds=10_000, every=100)
    said = []
    found = duration.expect(plan, said.append)
    assert found.seconds == pytest.approx(2 + 2 * (10_000 * 0.013 + 101 * 0.05))
    assert not found.least and world.time < duration.PATIENCE
    assert len(said) == 1 and f"{duration.PATIENCE:.0f} s at most" in said[0]
    world.rounds_done = 0
    rows = world.study(plan.job).frame
    assert world.rounds_done == 20_000 and len(rows) == 2 * 3 * 101, "afterwards all is done"


def test_the_share_of_looks_is_theirs_of_all_that_rounds_and_looks_take(timed):
    _, plan = timed(seeds=1, fixed=1.0, each=1.0, look=5.0, rounds=100, every=10)
    looks = 11 * 5.0  # at the start, and after every ten rounds
    assert duration.expect(plan).looks == pytest.approx(looks / (100 * 2.0 + looks))


def test_looks_at_chosen_rounds_are_counted(monkeypatch):
    world = World(fixed=0.01, each=0, look=1.0, rounds=0, every=1)
    monkeypatch.setattr(pilot, "now", lambda: world.time)

    def work():
        looks = Evaluation(at=[0, 1, 2, 90, 700], measure=world.seen)
        simulate(world, None, 500, evaluation=looks)

    found = pilot.carry_out(work, 100)
    assert found.seconds == pytest.approx(500 * 0.01 + 5 * 1.0), "0, 1, 2, 90 and the last"


def test_what_is_slow_is_judged_by_one_seed_and_some_runs(timed):
    world, plan = timed(4, runs=3, fixed=0, each=2.0, look=1.0, rounds=50, every=25)
    found = duration.expect(plan)
    assert found.seconds == pytest.approx(2 + 3 * (50 * 8 + 3 * 1), rel=0.1)
    assert not found.least and "1 of 3 runs" in found.why
    assert world.time < duration.PATIENCE + 10, "no more than a round later"


def test_seeds_side_by_side_cost_less_than_one_after_the_other(timed):
    world, plan = timed(40, fixed=0.6, each=0.001, look=0.1, rounds=1000, every=100)
    assert duration.expect(plan).seconds == pytest.approx(2 + 2 * (1000 * 0.64 + 1.1), rel=0.1)


def test_where_not_one_run_could_be_timed_there_is_a_least_time(timed):
    _, plan = timed(1, fixed=30.0, each=0, look=1.0, rounds=50, every=25)
    found = duration.expect(plan)
    assert found.least and 50 * 30 <= found.seconds <= 2 + 2 * (50 * 30 + 3)
    assert str(found).startswith("About 50 min or more: ")


def test_every_value_of_a_grid_is_counted_and_how_it_grew(timed, monkeypatch):
    world, plan = timed(2, fixed=0.01, each=0, look=0.1, rounds=1000, every=500)
    s = plan.settings | dict(study="a:b", tunes="lr", grid=[0.1, 1.0, 10.0])
    plan = dataclasses.replace(plan, settings=s, job=dataclasses.replace(plan.job, settings=s))
    monkeypatch.setattr(duration, "study", lambda kind: tuning.grid)
    monkeypatch.setattr(tuning, "study", lambda kind: world.study)
    whole = 2 + 6 * (1000 * 0.01 + 3 * 0.1)
    assert duration._timed(plan, print).seconds == pytest.approx(whole)
    frame = pd.DataFrame(dict(at=[0.03, 0.1, 1.0, 10.0, 31.0, 31.0]))
    held = records.Record(frame, dict(settings=s), None)
    monkeypatch.setattr(records, "load", lambda *_: held)
    assert duration._timed(plan, print).seconds == pytest.approx(whole * 5 / 3)


def test_a_pilot_that_breaks_off_says_so_and_stops_nothing(timed, monkeypatch):
    _, plan = timed(2, fixed=0, each=0, look=0, rounds=5, every=1)
    monkeypatch.setattr(duration, "study", lambda kind: lambda job: [][0])
    found = duration.expect(plan)
    assert found.seconds is None and found.left == 0
    assert str(found) == "No estimate of the time: timing it broke off (IndexError)."


def test_passes_are_counted(monkeypatch):
    time, done = [0.0], []
    monkeypatch.setattr(pilot, "now", lambda: time[0])

    @few_passes
    def run(*, epochs, keep=None):
        time[0] += 3.0 * epochs
        done.append(epochs)
        return epochs

    assert pilot.carry_out(lambda: run(epochs=40.0), 100).seconds == pytest.approx(120)
    assert sum(done) < 10
    pilot.carry_out(lambda: run(epochs=40.0, keep="snapshots"), 100)
    assert done[-1] == 40 and run(epochs=30.0) == 30


# --- no harm done ---------------------------------------------------------------------------------

EVERY = [
    (PAPER, "fig1"),
    (PAPER, "factor"),
    ("hierarchy", "arrivals"),
    ("hierarchy", "rates-8"),
    ("personalization", "fig1"),
    ("tiers", "waiting"),
    ("vertical", "convergence"),
    ("beyond", "merges"),
]


@pytest.mark.slow
@pytest.mark.parametrize("paper, experiment", EVERY)
def test_rows_are_the_same_after_an_estimate(paper, experiment, tmp_path):
    plan = planned(paper, experiment, "smoke", device="cpu", out=tmp_path / "out", progress=False)
    carry_out = study(plan.settings["kind"])
    job = dataclasses.replace(plan.job, folder=None)
    before = carry_out(job)
    found = duration._timed(plan, lambda text: None)
    assert found.seconds > 0 and not found.least
    after = carry_out(job)
    assert before.frame.equals(after.frame) and before.diverged == after.diverged
    assert not (tmp_path / "out").exists()


def busy():
    for _ in range(10**8):
        pass


def test_what_has_no_rounds_is_cut_short_and_others_code_is_not(in_time):
    before = signal.getsignal(signal.SIGALRM)
    here = {__name__.split(".")[0]}
    found = pilot.carry_out(busy, 0.02, homes=here)
    assert not found.ended and found.broken is None
    scope = {"__name__": "compiler.inside"}
    exec("def work():\n    for _ in range(3_000_000):\n        pass", scope)
    assert pilot.carry_out(scope["work"], 0.001, homes=here).ended
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "whoever else waits is still woken"


def test_ctrl_c_ends_a_pilot(timed):
    world, plan = timed(1, fixed=1, each=0, look=0, rounds=9, every=9)

    def interrupted(state, task):
        raise KeyboardInterrupt

    seen, world.seen = world.seen, interrupted
    with pytest.raises(KeyboardInterrupt):
        duration.expect(plan)
    world.seen, world.rounds_done = seen, 0
    world.study(plan.job)
    assert world.rounds_done == 18, "and nothing of it is left"


# --- from stored records --------------------------------------------------------------------------


def test_a_stored_record_is_scaled_by_its_seeds(tmp_path, monkeypatch):
    m = records.load(PAPER, "fig1", "quick").manifest
    plan = planned(PAPER, "fig1", "quick", seeds=5, device="cpu", out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists(), "an error leaves nothing behind"
    found = duration.expect(plan, pytest.fail)
    assert found.seconds == pytest.approx(m["wall_seconds"] * 5 / len(m["seeds"]))
    assert (
        f"the stored record, of {len(m['seeds'])} seeds" in found.why and m["device"] in found.why
    )
    done = duration.expect(dataclasses.replace(plan, worked=100.0))
    assert done.left == pytest.approx(found.seconds - 100)
    assert ", of which 1.7 min are done: " in str(done)
    other = planned(
        PAPER, "fig1", "quick", seeds=5, device="cpu", out=tmp_path, changes={"batch_size": 3}
    )
    gpu = dataclasses.replace(plan, job=dataclasses.replace(plan.job, device="cuda"))
    timed = TimeEstimate(1.0, "timed")
    monkeypatch.setattr(duration, "_timed", lambda *_: timed)
    assert duration.expect(other) == timed == duration.expect(gpu)


def test_nothing_is_timed_for_what_is_refused(tmp_path):
    asked = (PAPER, "figB1", "smoke")
    experiments.run(*asked, seeds=[3], out=tmp_path, progress=False)
    with pytest.raises(FedlibError, match="with seeds 3"):
        experiments.run(*asked, seeds=[4], out=tmp_path, announce=pytest.fail)
    with pytest.raises(FedlibError, match="nosuch"):
        experiments.run(PAPER, "fig1", "smoke", changes={"nosuch": 1}, out=tmp_path,
                        announce=pytest.fail)  # fmt: skip


@pytest.mark.parametrize(
    "seconds, told",
    [
        *((0.0, "0.1 s"), (0.26, "0.3 s"), (3.0, "3 s"), (59.6, "60 s"), (99.4, "99 s")),
        *((131.9, "2.2 min"), (700.0, "12 min"), (5900.0, "98 min"), (6522.9, "1.8 h")),
        *((36_000.0, "10 h"), (400_000.0, "5 days")),
    ],
)
def test_words(seconds, told):
    assert duration.time_in_words(seconds) == told


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ('{"wall_seconds": 131.9, "device": "CPU (x86_64, 1 thread)"}', "2.2 min"),
        ('{"wall_seconds": 131.9, "device": "NVIDIA H200"}', "2.2 min on a GPU (NVIDIA H200)"),
        ('{"wall_seconds": 131.9', "not run"),
    ],
)
def test_a_record_from_a_gpu_says_so(page, told, tmp_path, monkeypatch):
    (tmp_path / "a.quick.json").write_text(page)
    monkeypatch.setattr(records, "folder", lambda paper: tmp_path)
    assert duration.took_in_words("any", "a", "quick") == told


# --- what is said ---------------------------------------------------------------------------------


@pytest.fixture
def long(monkeypatch):
    """Let everything be expected to take two hours; say whether somebody sits at a terminal."""
    monkeypatch.setattr(duration, "expect", lambda *_: TimeEstimate(7200.0, "so it is"))
    return lambda there: monkeypatch.setattr(cli, "_somebody_is_there", lambda: there)


def call(*arguments, answer=None):
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=answer)


def test_what_takes_more_than_an_hour_is_asked_for_at_a_terminal(long, tmp_path):
    run = ["run", PAPER, "figB1", "--profile", "smoke", "--out", tmp_path / "runs"]
    long(True)
    refused = call(*run, answer="n\n")
    assert refused.exit_code == 2 and "About 2 h: so it is.\nStart it?" in refused.stderr
    assert "Not started." in refused.stderr and "--yes" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "runs").exists()
    assert call(*run, answer="y\n").exit_code == 0
    unasked = call(*run, "--yes")
    assert unasked.exit_code == 0 and "Start it?" not in unasked.stderr
    long(False)
    script = call(*run)
    assert script.exit_code == 0 and script.stderr.startswith("About 2 h: so it is.\n")
    assert "Start it?" not in script.stderr


def test_a_notebook_prints_a_line_before_what_takes_long(long, tmp_path, capsys, monkeypatch):
    experiments.obtain(PAPER, "figB1", "quick", out=tmp_path)
    line = "participation figB1, profile quick: About 2 h: so it is.\n"
    assert capsys.readouterr().out == line
    experiments.obtain(PAPER, "figB1", "quick", out=tmp_path)
    assert capsys.readouterr().out == "", "it is there"
    monkeypatch.setattr(duration, "expect", lambda *_: TimeEstimate(9.0, "so it is"))
    experiments.obtain(PAPER, "figB2", "quick", out=tmp_path)
    assert capsys.readouterr().out == ""
