"""The GPU command, run on the CPU: the same code on the other device."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedlib
from fedlib.engine import convolution, local, recording
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.simulation import OutOfTime, simulate
from fedlib.errors import FedlibError
from fedlib.lab import bench, gpu, trials
from fedlib.lab.cli import app
from fedlib.lab.evidence import catalogue, experiments, records
from fedlib.lab.studies.personalization import TRIALS as PERSONAL
from fedlib.lab.trials import TRIALS

ROOT = Path(fedlib.__file__).parents[1]
TRAINING = "fedlib.lab.studies.participation:training"
COMMAND = [sys.executable, "-m", "fedlib", "gpu", "--device", "cpu", "--profile", "smoke"]


def started(out: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--minutes", "60", "--out", str(out)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command, env=env, cwd=out.parent, **pipes)


@pytest.mark.slow
@pytest.mark.long
def test_killed_and_started_again_it_ends_as_if_nothing_had_been(tmp_path):
    out = tmp_path / "found"
    first, deadline = started(out), time.monotonic() + 300
    while not list(out.glob("seeds/cpu/1/participation/.fig1*/*.pt")):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    held = json.loads((out / "gpu.json").read_text())
    assert not list(out.glob("records/**/*.csv.gz"))
    second = started(out)
    told, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    found = json.loads((out / "gpu.json").read_text())
    assert found["agree"] == held["agree"] and found["steps"] == held["steps"]
    assert "agrees" not in told.split("2. How fast")[0], "nothing is tried twice"
    assert {row["verdict"] for row in found["agree"]} == {"agrees"}
    few = [name for name in gpu.trials() if "resnet" not in name and "cifar" not in name]
    twice = 2 * (len(few) + 1 + 2 * 3)  # a long one, and ways to convolve
    symbols = {"FedAvg, char_lstm", "hierarchy: HierarchicalSGD, characters"}  # are float32 alone
    assert len(found["agree"]) == twice - len(symbols) and symbols <= {*few}
    assert not [r for r in found["agree"] if r["trial"] in symbols and r["type"] == "float64"]
    assert all(row["floor [ms]"] > 0 and row["ratio"] > 0 for row in found["steps"])
    assert [row["seeds"] for row in found["rounds"]] == [1, 2]
    assert found["records"] == [
        {"record": "participation/fig1.smoke", "seeds": 2, "done": [1, 2], "joined": True,
         "under way": ""}
    ]  # fmt: skip
    assert (out / "gpu.txt").read_text().strip() in told
    joined = records.load("participation", "fig1", "smoke", out / "records")
    how = dict(seeds=2, device="cpu", out=tmp_path / "w", progress=False)
    whole = experiments.run("participation", "fig1", "smoke", **how)
    keys = ["run", "seed", "round", "split", "metric"]
    frames = [r.frame.sort_values(keys).reset_index(drop=True) for r in (joined, whole)]
    assert frames[0][keys].equals(frames[1][keys])
    assert np.allclose(frames[0]["value"], frames[1]["value"], rtol=1e-5), "one by one or together"
    assert joined.manifest["seeds"] == [1, 2] and joined.state.word == "fresh"


@pytest.mark.parametrize("build", [TRIALS["FedAvg, small_cnn"], PERSONAL["ShuffledSGD"]])
def test_a_device_that_computes_something_else_is_noticed(build, monkeypatch):
    assert trials.compare(build, "float64", "cpu") < 1e-12
    right = recording.Recording.__call__

    def wrong(self, *inputs):
        return right(self, *inputs) * (1 + 1e-6)

    monkeypatch.setattr(recording.Recording, "__call__", wrong)
    assert trials.compare(build, "float64", "cpu") > gpu.TOLERANCE["float64"]


def test_both_sides_go_different_ways(monkeypatch):
    used = []
    right = local.replayed

    def seen(*args):
        used.append("replayed")
        return right(*args)

    monkeypatch.setattr(local, "replayed", seen)
    trials.compare(TRIALS["FedAvg, mlp"], "float32", "cpu")
    assert len(used) == trials.TRIAL_ROUNDS["float32"]
    with local.everywhere("loop"), pytest.raises(ZeroDivisionError), local.everywhere("batched"):
        raise ZeroDivisionError
    assert local._default.get() is None


def test_a_device_that_gives_no_number_does_not_agree(monkeypatch):
    right = recording.Recording.__call__

    def lost(self, *inputs):
        out = right(self, *inputs)
        out[0, 0] = float("nan")
        return out

    monkeypatch.setattr(recording.Recording, "__call__", lost)
    assert not trials.compare(TRIALS["FedAvg, mlp"], "float64", "cpu") <= 1e300
    assert trials._gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]), torch.ones(2)) == 2


@pytest.mark.slow
def test_a_way_of_convolving_that_is_off_is_noticed(monkeypatch):
    for layer in trials.LAYERS:
        for way in convolution.WAYS:
            assert trials.ways_gap(layer, way, "float64", "cpu") < 1e-12
    off = {"grouped": lambda *given: convolution.grouped(*given) * (1 + 1e-6)}
    monkeypatch.setattr(convolution, "WAYS", off)
    assert trials.ways_gap("second", "grouped", "float64", "cpu") > 1e-7


class Visit(gpu.Visit):
    """One that writes nothing down."""

    def keep(self, part, rows):
        self.result[part] = rows


def visit(tmp_path=Path("nowhere"), tf32=False, until=math.inf, found=None, told=None):
    tell = (told if told is not None else []).append
    return Visit(tmp_path, "cpu", "smoke", tf32, until, tell, {} if found is None else found)


def agreed(found, told=None, **options):
    gpu._agree(visit(found=found, told=told, **options))
    return found["agree"]


def test_papers_from_elsewhere_bring_their_trials_or_none(tmp_path, monkeypatch):
    for name, kind in (("here", "here_study.study:go"), ("gone", "gone_study.study:go")):
        home = tmp_path / "papers" / name
        home.mkdir(parents=True)
        (home / "experiments.toml").write_text(
            f'[common]\nkind = "{kind}"\n[e]\nwhere = ""\ntitle = ""\n'
        )
    package = tmp_path / "code" / "here_study"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "study.py").write_text("TRIALS = {'own': len}")
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path / "papers"))
    found = gpu.trials()
    assert found["here: own"] is len and not [name for name in found if "gone" in name]
    assert set(TRIALS) < set(found)


def test_what_differs_or_breaks_is_told_and_hides_nothing(monkeypatch):
    def breaks(dtype):
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(gpu, "trials", lambda: {"a": breaks, "b": TRIALS["FedAvg, mlp"]})
    monkeypatch.setattr(gpu, "LAYERS", {})
    monkeypatch.setitem(gpu.TOLERANCE, "float64", -1.0)
    found, told = {**experiments.provenance("cpu"), "tf32": False, "source": "x"}, []
    rows = agreed(found, told)
    assert [(r["trial"], r["type"], r["verdict"]) for r in rows] == [
        ("a", "float64", "failed"), ("a", "float32", "failed"),
        ("b", "float64", "differs"), ("b", "float32", "agrees"),
        ("FedAvg, 70 rounds", "float64", "differs"), ("FedAvg, 70 rounds", "float32", "agrees"),
    ]  # fmt: skip
    assert "RuntimeError: no kernel image" in told[1]
    page = gpu.gpu_summary(found)
    assert "2 of 6 trials agree" in page and "failed: a, float64 RuntimeError: no kernel" in page
    assert "differs: b, float64" in page and "agrees: b" not in page
    monkeypatch.setitem(gpu.TOLERANCE, "float64", 1e-9)
    verdicts = [r["verdict"] for r in agreed(found)]
    assert verdicts.count("agrees") == 4, "what failed is tried again"
    monkeypatch.setattr(gpu, "compare", lambda *_, **__: float("nan"))
    found["agree"] = []
    assert {r["verdict"] for r in agreed(found)} == {"failed"}
    assert "not finite" in gpu.gpu_summary(found)
    found["agree"] = []
    assert agreed(found, tf32=True)[1]["allowed"] == gpu.COARSE > gpu.TOLERANCE["float32"]
    found["agree"] = []
    agreed(found, told, until=0.0)
    assert found["agree"] == [], "out of time"


def test_another_code_or_device_keeps_nothing_but_records(tmp_path):
    page = tmp_path / "gpu.json"
    now = gpu._resumed(page, "cpu", False)

    def held(**changes):
        page.write_text(json.dumps(now | {"agree": [], "date": "2026-01-02T03:04:05"} | changes))

    held()
    assert gpu._resumed(page, "cpu", False)["agree"] == []
    assert gpu._resumed(page, "cpu", False)["date"] >= now["date"]
    others = [{"device": "another"}, {"source": "another"}, {"versions": {"torch": "1.0"}}]
    for change in [*others, {"tf32": True}]:
        held(**change)
        assert "agree" not in gpu._resumed(page, "cpu", False)
        assert not page.exists()
        aside = json.loads((tmp_path / "gpu.2026-01-02T03-04-05.json").read_text())
        assert aside["agree"] == []
    rowless = json.dumps(now | {"agree": [{}]})
    for wrong in ("{", "[]", "{}", '"a"', "null", rowless):
        page.write_text(wrong)
        with pytest.raises(FedlibError, match="not what this command writes .* Delete it"):
            gpu._resumed(page, "cpu", False)


def test_a_seed_of_other_code_is_made_again_and_stops_no_other_record(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_agree", lambda *_: None)
    monkeypatch.setattr(gpu, "_speed", lambda *_: None)
    found = gpu.run(1, tmp_path, "cpu", "smoke", tell=lambda _: None)
    page = tmp_path / "seeds" / "cpu" / "1" / "participation" / "fig1.smoke.json"
    old = json.loads(page.read_text())
    page.write_text(json.dumps(old | {"code": old["code"] | {TRAINING: "0000"}}))
    made = []
    right = experiments.run
    noted = lambda *a, **how: made.append(how["seeds"]) or right(*a, **how)  # noqa: E731
    monkeypatch.setattr(experiments, "run", noted)
    found = gpu.run(1, tmp_path, "cpu", "smoke", tell=lambda _: None)
    assert made == [[1]] and found["records"][0]["joined"]
    assert TRAINING in json.loads(page.read_text())["code"]

    def full(*args, **options):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(experiments, "run", full)
    both = [("participation", "fig2"), ("participation", "fig1")]
    gpu._records(visit(tmp_path, found=found), both)
    joined = {row["record"].split("/")[1]: row["joined"] for row in found["records"]}
    assert joined == {"fig1.smoke": True, "fig2.smoke": False}
    assert found["records"][1]["under way"] == "CUDA out of memory"


ON_A_CPU = {  # no data set: a toy, clocks, arithmetic, a small problem
    "participation": ["figB1", "figB2", "factor", "speedup"],
    "hierarchy": ["counts", "bounds"],
    "personalization": [
        "rates-fig1",
        "fig1",
        "rates-fig1-more",
        "fig1-more",
        "rates-generous",
        "generous",
        "balanced",
        "lambdas",
        "worth",
        "many",
        "fig3",
        "rates-of-weights",
        "rates-of-models",
        "single-loop",
    ],
    "tiers": ["latency", "theorem"],
    "vertical": [name for name in catalogue.experiment_names("vertical")  # events one by one
                 if name != "convergence"],  # on a text of ours: no profile is the paper's
    "beyond": [],
    "methods": [],
}


def test_no_experiment_of_the_book_is_forgotten():
    found = gpu.missing()
    assert found[: len(gpu.FIRST)] == gpu.FIRST and len(set(found)) == len(found)
    for paper, seconds in ON_A_CPU.items():
        large = [
            name
            for name in catalogue.experiment_names(paper)
            if "paper" in catalogue.profiles(paper, name)
        ]
        assert [name for name in large if (paper, name) not in found] == seconds
    assert {paper for paper, _ in found} == ON_A_CPU.keys() - {"vertical"}
    for paper, name in found:
        s = catalogue.settings(paper, name, "paper")
        if "tuned" in s:
            assert found.index((paper, s["tuned"])) < found.index((paper, name))
    deep = [catalogue.settings(*names, "paper").get("model", [""])[0] for names in found]
    assert deep[-6:] == ["resnet18"] * 6 and "resnet18" not in deep[:-6]
    with pytest.raises(FedlibError, match="Unknown profile"):
        gpu.run(1, "nowhere", "cpu", "huge")


@pytest.mark.slow
def test_what_is_tuned_is_handed_on_to_every_seed(tmp_path):
    both = [("tiers", "rates-images"), ("tiers", "fig3")]
    found, told = {}, []
    gpu._records(visit(tmp_path, found=found), both)
    tuning, tuned = found["records"]
    assert tuning["done"] == [1001, 1002] and tuned["done"] == [1, 2]
    assert tuning["joined"] and tuned["joined"]
    held = [records.load("tiers", name, "smoke", tmp_path / "records") for _, name in both]
    assert [r.manifest["seeds"] for r in held] == [[1001, 1002], [1, 2]]
    assert held[1].manifest["tuning"]["rows"] == held[0].manifest["rows"]
    assert [r.state.word for r in held] == ["fresh", "fresh"]
    gpu._records(visit(tmp_path, found=found, told=told), both)
    assert not [line for line in told if "begins" in line], "nothing is done twice"


@pytest.mark.parametrize(
    "wrong", [["--profile", "huge"], ["--device", "tpu"], ["--minutes", "0"], []]
)
def test_what_cannot_be_done_is_refused_at_once(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "found"
    result = CliRunner().invoke(app, ["gpu", "--out", str(out), *wrong])
    assert result.exit_code == 2 and not out.exists()


@pytest.mark.slow
def test_out_of_time_leaves_everything_to_go_on_from(tmp_path, monkeypatch):
    name = ("participation", "fig1", "smoke")
    how = dict(seeds=[1], device="cpu", progress=False)
    stops = 0
    for _ in range(20):
        try:
            record = experiments.run(
                *name, out=tmp_path / "a", until=time.monotonic() + 0.02, **how
            )
            break
        except OutOfTime as stopped:
            stops += 1
            assert "stopped in time after" in str(stopped)
    else:
        record = experiments.run(*name, out=tmp_path / "a", **how)
    assert stops > 1
    whole = experiments.run(*name, out=tmp_path / "b", **how)
    pd.testing.assert_frame_equal(record.frame, whole.frame)
    assert record.manifest["wall_seconds"] >= 0.02 * stops, "earlier starts count"
    assert not list((tmp_path / "a" / "participation").glob(".fig1*"))


def test_a_round_is_finished_before_time_is_looked_at():
    algorithm, task = TRIALS["FedAvg, mlp"](np.float64)
    over = dict(progress=False, checkpoint=Checkpoint(until=0.0))
    with pytest.raises(OutOfTime, match="after 1 of 3 rounds"):
        simulate(algorithm, task, 3, **over)
    assert simulate(algorithm, task, 1, **over).state.t == 1


def test_records_wait_for_data_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_agree", lambda *_: None)
    monkeypatch.setattr(gpu, "_speed", lambda *_: None)

    def missing(name):
        raise FedlibError(f"{name} is not here.")

    def no_run(*_, **__):
        raise FedlibError("digits cannot be fetched.")

    monkeypatch.setattr(gpu.datasets, "get", missing)
    monkeypatch.setattr(experiments, "run", no_run)
    told = []
    found = gpu.run(1, tmp_path, "cpu", "smoke", tell=told.append)
    assert "The records will have to wait: digits is not here." in told
    assert found["records"][0]["under way"] == "digits cannot be fetched."
    assert "0 of 2 seeds; digits cannot be fetched." in (tmp_path / "gpu.txt").read_text()


# --- speed ----------------------------------------------------------------------------------------


def test_a_slow_machine_takes_fewer_turns(monkeypatch):
    now = [0.0]

    def work():
        now[0] += 1

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench.median_seconds({"a": work}, repeats=5, seconds=7) == {"a": 1}
    assert now[0] == 8


def test_precision_is_kept_with_what_was_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for chosen in (True, False):
            experiments.set_precision(chosen)
            assert experiments.provenance("cuda")["tf32"] is chosen
            assert torch.backends.cudnn.allow_tf32 is chosen
    finally:
        experiments.set_precision(before)
    assert "tf32" not in experiments.provenance("cpu")


@pytest.mark.long
def test_rounds_of_all_seeds_count():
    row = bench.whole_rounds("cpu", 2, 0.3, 4000)
    assert row["seeds"] == 2 and row["rounds"] >= 1 and row["seconds"] >= 0.15
    rate = 2 * row["rounds"] / row["seconds"]  # told with one digit
    assert row["seed-rounds a second"] == pytest.approx(rate, rel=0.1, abs=0.05)


def test_the_loss_that_is_told_counts(monkeypatch):
    histories, right = [], trials.simulate

    def off(*args, **options):
        histories.append(right(*args, **options))
        histories[-1].frame["value"] *= len(histories)
        return histories[-1]

    monkeypatch.setattr(trials, "simulate", off)
    assert trials.compare(TRIALS["FedAvg, mlp"], "float64", "cpu") == pytest.approx(1)


@pytest.mark.parametrize("tf32, folder", [(False, "cpu"), (True, "cpu-tf32")])
def test_seeds_of_two_precisions_have_folders_of_their_own(tmp_path, monkeypatch, tf32, folder):
    def refuse(*args, **options):
        assert options["out"] == tmp_path / "seeds" / folder / "1"
        raise FedlibError("asked")

    monkeypatch.setattr(experiments, "run", refuse)
    found = {}
    gpu._records(visit(tmp_path, tf32, found=found), gpu.FIRST[:1])
    assert found["records"][0]["under way"] == "asked"


def test_only_float32_is_allowed_to_be_coarse(monkeypatch):
    monkeypatch.setattr(gpu, "trials", dict)
    monkeypatch.setattr(gpu, "LAYERS", {})
    monkeypatch.setattr(gpu, "compare", lambda *_, **__: 0.0)
    assert [row["allowed"] for row in agreed({}, tf32=True)] == [1e-9, gpu.COARSE]


def test_who_never_moved_does_not_agree():
    assert trials._gap(torch.ones(2), 2 * torch.ones(2), torch.ones(2)) == math.inf
