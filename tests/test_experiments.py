"""Every experiment runs at smoke, says where it comes from, and says the same thing twice."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedlib
from fedlib import datasets, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import (
    ages,
    catalogue,
    claims,
    experiments,
    freshness,
    measures,
    records,
    tuning,
)
from fedlib.lab.job import Job
from fedlib.lab.studies import participation as studies
from fedlib.papers.vertical import load_columns

PAPER = "participation"
NAMES = [
    (paper, name) for paper in catalogue.papers() for name in catalogue.experiment_names(paper)
]
ONE_OF_A_KIND = ["fig2", "figB2", "factor", "heterogeneity"]  # and speedup, with fewer rounds
MANIFEST = {
    *("paper", "experiment", "profile", "settings", "seeds", "wall_seconds", "cpu_seconds"),
    "device",
    *(
        "versions",
        "commit",
        "data",
        "fidelity",
        "diverged",
        "code",
        "cards",
        "date",
        "instructions",
        "rows",
        "rules",
        "small",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLIB_DATA", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("FEDLIB_MIRROR", raising=False)
        yield


STORED = {(m["paper"], m["experiment"]): m for m in records.manifests() if m["profile"] == "smoke"}


def kind(paper, name):
    s = catalogue.settings(paper, name, "smoke")
    return s["kind"], s.get("study")


# Of each kind of study the quickest is made again whatever the stored one says.
QUICKEST = {kind(*key): key for key in sorted(STORED, key=lambda key: -STORED[key]["wall_seconds"])}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Say whether a stored small record is known to come from this code, here.

    To make it again would tell nothing then. Another library, or a processor without what the
    one had that made it, or a line of code that nobody has tried it with, may give other numbers.
    """
    made = again("figB1", tmp_path_factory.mktemp("here")).manifest

    @functools.cache
    def holds(paper, name):
        m, s = STORED[paper, name], catalogue.settings(paper, name, "smoke")
        there, here = (r["instructions"].split(",")[0] for r in (m, made))
        code = freshness.short_digest(freshness.present_code(s)["code"])
        made_so = there == here and code in m.get("tables", ())
        same = made_so or m.get("tried", {}).get(here) == code
        same = same and m["versions"] == made["versions"]
        return same and (paper, name) != QUICKEST[kind(paper, name)]

    return holds


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, known):
    """Return a function that runs an experiment at smoke once, and the folder of the records.

    One that is known stands there as if made just now. What asks for tuned values gets the stored
    ones: near ties turn with a last bit.
    """
    out, made = tmp_path_factory.mktemp("smoke"), {}

    def obtain(paper, name):
        if (paper, name) not in made:
            s = catalogue.settings(paper, name, "smoke")
            if "tuned" in s:
                rates = records.load(paper, s["tuned"], "smoke")
                records.save(out, rates.frame, rates.manifest)
            place = out / "tuning" if "tunes" in s else out
            if known(paper, name):
                stored = records.load(paper, name, "smoke")
                noted = {"seen", "tables", "tried"}
                m = {k: v for k, v in stored.manifest.items() if k not in noted}
                records.save(place, stored.frame, {**m, "settings": s, **freshness.present_code(s)})
                made[paper, name] = records.load(paper, name, "smoke", place)
            else:
                made[paper, name] = experiments.run(paper, name, "smoke", out=place, progress=False)
        return made[paper, name]

    obtain.out = out
    return obtain


def again(name, out, **options):
    return experiments.run(PAPER, name, "smoke", out=out, progress=False, **options)


@functools.cache
def hashes_of(dataset):
    if datasets.card(dataset).format.startswith("columns-"):
        return load_columns(dataset).hashes
    return datasets.load(dataset, progress=False).hashes


# --- every experiment -----------------------------------------------------------------------------


def test_every_kind_of_study_has_an_experiment():
    settings = [catalogue.settings(p, n, "smoke") for p, n in NAMES]
    kinds = {s.get("study", s["kind"]) for s in settings}  # tuning runs the study of another
    assert all(":" in kind and kind.startswith("fedlib.lab.studies.") for kind in kinds)
    assert {n for p, n in NAMES if p == PAPER} >= {
        *("fig1", "fig2", "figB1", "figB2", "figD1", "figD2", "figD3"),
        *("factor", "heterogeneity", "speedup"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("paper, name", NAMES, ids=[f"{p}-{n}" for p, n in NAMES])
def test_the_stored_smoke_record_is_made_again(paper, name, smoke, known):
    """What makes a record *checked*: a change of any number in any small run is noticed here."""
    held, record = records.load(paper, name, "smoke"), smoke(paper, name)
    m, s = record.manifest, catalogue.settings(paper, name, "smoke")
    tunes, tuned = "tunes" in s, {"tuning"} if "tuned" in s else set()
    assert {*m, "cpu_seconds"} == MANIFEST | tuned and record.state.word == "fresh"
    assert (m["paper"], m["experiment"], m["profile"]) == (paper, name, "smoke")
    assert m["settings"] == json.loads(json.dumps(s))
    seeds = tuning.TUNING_SEEDS if tunes else range(1, 100)
    assert m["seeds"] == list(seeds[: s["seeds"]])
    assert (tunes or m["diverged"] == {}) and {
        k: m[k] for k in ("code", "cards")
    } == freshness.present_code(s)
    assert m["versions"]["torch"] == torch.__version__ and m["wall_seconds"] >= 0
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", m["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", m["date"])
    assert bool(m["data"]) == (m["fidelity"] != "none")
    assert bool(m["data"]) or s["kind"].split(":")[1] not in ("training", "heterogeneity")
    if m["data"]:
        hashes = hashes_of(s["dataset"])
        assert m["data"].keys() - hashes.keys() == {"as used"}
        assert hashes.items() <= m["data"].items()
    assert (f", {s.get('dataset')}, a substitute" in record.provenance()) == bool(m["data"])
    frame = record.frame
    assert len(frame) and set(frame["seed"]) <= {0, *m["seeds"]} and not frame.duplicated().any()
    if paper == PAPER:
        runs = list(frame["method" if tunes else "run"].unique())
        assert runs == [run["run"] for run in s["runs"]]
        assert set(frame["seed"]) == ({0} if s["kind"].endswith(":toy") else set(m["seeds"]))
        assert tunes or np.isfinite(frame["value"]).all()
    folder = record.path.parent
    loaded = records.load(paper, name, "smoke", folder.parent)
    pd.testing.assert_frame_equal(loaded.frame, frame)
    own = re.compile(rf"\.?{re.escape(name)}\.")  # not those of rates-NAME
    files = sorted(p.name for p in folder.iterdir() if own.match(p.name))
    assert files == [f"{name}.smoke.csv.gz", f"{name}.smoke.json"], "no checkpoints are left"
    if known(paper, name):
        pytest.skip("known to come from this code, with these libraries, on such a processor")
    same = all(held.manifest[k] == m[k] for k in ("instructions", "versions"))
    assert not records.differences(held.frame, frame, same), f"then: fedlib check {paper}"
    for part, found in m["code"].items():
        seen = held.manifest.get("seen", {}).get(part, ())
        assert found in seen, f"{part} has changed; to note it: fedlib check {paper}"


QUICK = sorted(p for name in catalogue.papers() for p in records.folder(name).glob("*.quick.json"))
MANIFESTS = [json.loads(page.read_text("utf-8")) for page in QUICK]  # to read rows takes seconds
SECONDS = [m for m in MANIFESTS if m["wall_seconds"] < 4 and not m["data"]]


@pytest.mark.slow
@pytest.mark.parametrize("m", SECONDS, ids=lambda m: m["experiment"])
def test_a_stored_record_that_takes_seconds_is_made_again(m, tmp_path):
    held = records.load(m["paper"], m["experiment"], "quick")
    made = experiments.run(m["paper"], m["experiment"], "quick", out=tmp_path, progress=False)
    same = all(m[k] == made.manifest[k] for k in ("instructions", "versions"))
    assert not records.differences(held.frame, made.frame, same)


def test_the_data_as_used_are_pooled_and_normalised(smoke):
    s = catalogue.settings(PAPER, "fig1", "smoke")
    used = smoke(PAPER, "fig1").manifest["data"]["as used"]
    task, hashes = studies.build_task(s, (1,))
    d = task.data
    parts = [np.asarray(v) for v in (d.x, d.y, d.test_x, d.test_y)]
    assert used == hashes["as used"] == datasets.fingerprint(*parts)
    halved = s | {"pool": 2, "model": ["softmax", 16, 10]}
    assert studies.build_task(halved, (1,))[1]["as used"] != used
    assert datasets.fingerprint(parts[0] * 1.001, *parts[1:]) != used


def test_making_a_record_again_makes_no_rule_older(tmp_path, monkeypatch):
    """A record keeps when the experiment was first looked at, here or in the book."""
    home = tmp_path / "papers" / "mine"
    home.mkdir(parents=True)
    for name in ("experiments.toml", "claims.toml"):
        shutil.copy(paths.paper_folder(PAPER) / name, home / name)
    monkeypatch.setenv("FEDLIB_PAPERS", str(home.parent))
    make = functools.partial(
        experiments.run, "mine", "figB2", "quick", out=tmp_path, progress=False, replace=True
    )
    first = make(seeds=[7])
    assert "looked" not in first.manifest
    early = first.manifest | {"date": "2026-01-02T03:04:05+00:00", "wall_seconds": 65.0}
    records.save(tmp_path, first.frame, early)
    for seeds in ([7], [8]):
        again = make(seeds=seeds)
        assert again.manifest["looked"] == "2026-01-02T03:03:00+00:00"
    (claim,) = (c for c in claims.claims_of("mine") if c["id"] in again.manifest["rules"])
    assert ages.of("mine", claim, [again])["text"] == "older", "it is what it was at the first look"
    page = home / "claims.toml"
    page.write_text(page.read_text().replace("bounds = [0.0, 0.1]", "bounds = [0.0, 0.2]"))
    claims._read.cache_clear()
    (claim,) = (c for c in claims.claims_of("mine") if c["id"] == claim["id"])
    for record in (again, make(seeds=[9])):
        assert ages.of("mine", claim, [record])["text"] == "younger", "it was changed since"
    book = experiments.run(PAPER, "figB2", "quick", seeds=[7], out=tmp_path, progress=False)
    assert book.manifest["looked"] < first.manifest["date"], "the book has a record of it"


def test_training_record_holds_the_whole_curve(smoke):
    frame = smoke(PAPER, "fig1").frame
    assert set(zip(frame["split"], frame["metric"], strict=True)) == {
        (split, metric) for split in ("train", "test") for metric in ("loss", "accuracy")
    }
    for _, curve in frame.groupby(["run", "seed", "split", "metric"]):
        rounds = curve["round"].to_numpy()
        assert {0, 1, 2, 3, 5, 60} <= {*rounds} and len(rounds) > 15, "counted after the warm-up"
        assert len({*rounds[10:] % 10}) > 5, "a cycle has ten rounds here, five groups of two"
    first = frame[frame["round"] == 0].pivot_table("value", "seed", "run", sort=False)
    assert (first.nunique(axis=1) == 1).all(), "all runs start from the same warm-up"
    job = Job(catalogue.settings(PAPER, "fig1", "smoke"), (1, 2), progress=False)
    task, _ = studies.build_task(job.settings, (1, 2))
    warm = studies.warm_up(job, task, studies.build_process(job.settings))
    loss = task.evaluate(warm, "test")["loss"].tolist()
    row = frame.query("run == 'amplified' and round == 0 and split == 'test' and metric == 'loss'")
    np.testing.assert_allclose(row["value"], loss, rtol=1e-4)
    assert max(loss) < 0.9 * min(task.evaluate(task.init((1, 2)), "test")["loss"].tolist())


@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_two_runs_give_the_same_bytes(name, tmp_path):
    first, second = again(name, tmp_path / "a"), again(name, tmp_path / "b")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.path.parent != second.path.parent
    times = ("date", "wall_seconds", "cpu_seconds")
    timeless = [{k: v for k, v in r.manifest.items() if k not in times}
                for r in (first, second)]  # fmt: skip
    assert timeless[0] == timeless[1]


def test_seeds_are_runs_of_their_own(smoke, tmp_path):
    both, one = smoke(PAPER, "fig2"), again("fig2", tmp_path / "a", seeds=1)
    assert one.manifest["seeds"] == [1] and set(one.frame["seed"]) == {1}
    assert one.state.word == "fresh"
    kept, alone = (f[(f["seed"] == 1) & (f["metric"] == "loss")] for f in (both.frame, one.frame))
    assert kept["round"].tolist() == alone["round"].tolist()
    np.testing.assert_allclose(kept["value"], alone["value"], rtol=1e-4)
    chosen = again("figD1", tmp_path / "b", seeds=[7, 3])
    assert chosen.manifest["seeds"] == [7, 3] and set(chosen.frame["seed"]) == {7, 3}
    assert "2 seeds" in chosen.provenance() and "1 seed," in one.provenance()


@pytest.mark.slow
def test_claims_can_be_judged_from_smoke_records(smoke):
    for name in catalogue.experiment_names(PAPER):
        smoke(PAPER, name)
    for row in claims.judge(PAPER, smoke.out):
        assert row["finding"] in claims.FINDINGS and row["profile"] == "smoke"
        assert row["finding"] != "no record"
        asked = any(check["essential"] for check in row["checks"])  # what is proved may ask none
        if row["kind"] != "arithmetic" and asked:
            assert row["finding"] == "open", "two seeds decide nothing"


def test_divergence_is_in_the_manifest(tmp_path, monkeypatch):
    table = copy.deepcopy(catalogue._table(PAPER))
    table["figD1"]["runs"] = [
        dict(run="calm", algorithm="fedavg", process="independent", lr=0.1, compress_lr=False),
        dict(run="wild", algorithm="fedavg", process="independent", lr=1e38, compress_lr=False),
    ]
    monkeypatch.setattr(catalogue, "_table", lambda paper: table)
    record = again("figD1", tmp_path)
    assert record.manifest["diverged"] == {"wild": {"1": 1, "2": 1}}
    calm, wild = (record.frame[record.frame["run"] == run] for run in ("calm", "wild"))
    assert np.isfinite(calm["value"]).all() and calm["round"].max() == 60
    assert wild["round"].max() == 1, "nothing is run once every seed has diverged"
    got = measures.diverged(record, "wild")
    assert got.low.tolist() == [1, 1] and got.words(0.95) == "2 of 2 seeds"
    assert measures.diverged(record, "calm").high.tolist() == [0, 0]


# --- settings, and what is refused ----------------------------------------------------------------


def test_layers_of_settings(monkeypatch):
    table = {
        "profiles": {p: dict(a=p, b=p, c=p) for p in records.PROFILES},
        "common": dict(a=0, z=0),
        "e": dict(b=1, d=1, smoke=dict(c="own", seeds=9), where="", title=""),
        "f": dict(only=["paper"], where="", title=""),
    }
    monkeypatch.setattr(catalogue, "_table", lambda paper: table)
    got = catalogue.settings("p", "e", "smoke")
    assert got == dict(a="smoke", b="smoke", c="own", d=1, z=0, seeds=9, where="", title="")
    assert catalogue.settings("p", "e", "quick")["c"] == "quick"
    assert catalogue.experiment_names("p") == ["e", "f"]
    with pytest.raises(FedlibError, match=r"profile of f 'smoke'.* Valid: paper\."):
        catalogue.settings("p", "f", "smoke")


@pytest.mark.parametrize(
    "name, options, message",
    [
        (("participaton", "fig1", "smoke"), {}, r"Did you mean 'participation'\? Valid: "),
        ((PAPER, "fgi1", "smoke"), {}, r"experiment 'fgi1'\. Did you mean 'fig1'\? Valid: .*figD3"),
        ((PAPER, "fig1", "smok"), {}, r"Did you mean 'smoke'\? Valid: long, paper, quick, smoke"),
        ((PAPER, "fig1", "smoke"), dict(seeds=0), "1 to 10000"),
        ((PAPER, "fig1", "smoke"), dict(seeds=[2, 2]), "different"),
        ((PAPER, "fig1", "smoke"), dict(seeds=[-1]), "whole number of at least 0"),
        ((PAPER, "fig1", "smoke"), dict(seeds=1, device="tpu"), "'tpu'.* Valid: auto, cpu, cuda"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(name, options, message, tmp_path):
    with pytest.raises(FedlibError, match=message):
        experiments.run(*name, out=tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_cuda_is_used_only_where_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert experiments.choose_device() == "cpu"
    with pytest.raises(FedlibError, match="sees no CUDA device"):
        experiments.choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert experiments.choose_device() == experiments.choose_device("cuda") == "cuda"
    assert experiments.choose_device("cpu") == "cpu"


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(experiments.tuning, "study", None)
    with pytest.raises(FedlibError, match="Cannot write to .*file"):
        experiments.run(PAPER, "figB1", "smoke", out=tmp_path / "file" / "out")


def test_an_experiment_without_data_fetches_none(tmp_path, monkeypatch):
    def refuse(*given, **options):
        raise AssertionError("nothing may be fetched")

    for name in ("get", "load", "verify"):
        monkeypatch.setattr(datasets, name, refuse)
    record = experiments.run(PAPER, "figB2", "quick", out=tmp_path, progress=False)
    assert record.manifest["data"] == {} and record.manifest["fidelity"] == "none"


def test_obtain_reads_or_runs(tmp_path, monkeypatch):
    with pytest.raises(records.MissingRecord):
        experiments.obtain(PAPER, "figB1", "replay", out=tmp_path)
    made = experiments.obtain(PAPER, "figB1", "smoke", out=tmp_path)
    ran = []
    monkeypatch.setattr(experiments, "run", lambda *_, **given: ran.append(given))
    read = experiments.obtain(PAPER, "figB1", "replay", out=tmp_path)
    assert read.path == made.path and read.frame.equals(made.frame)
    again = experiments.obtain(PAPER, "figB1", "smoke", device="cpu", out=tmp_path)
    assert again.path == made.path and not ran, "it is there, and the same code made it"
    experiments.obtain(PAPER, "figB1", "smoke", 2, "cpu", tmp_path)
    assert [given["seeds"] for given in ran] == [2], "other seeds"
    m = made.manifest
    for other in ({"device": "a GPU"}, {"code": m["code"] | {"simulate": "0"}}):
        records.save(tmp_path, made.frame, m | other)
        experiments.obtain(PAPER, "figB1", "smoke", device="cpu", out=tmp_path)
    assert len(ran) == 3


@pytest.mark.slow
def test_a_record_waits_for_its_tuning(tmp_path, monkeypatch):
    """Where the record of the rates is another one, what was run at them is run again."""
    rates = experiments.run(
        "hierarchy", "rates-3", "smoke", device="cpu", out=tmp_path, progress=False
    )
    made = experiments.obtain("hierarchy", "fig3", "smoke", device="cpu", out=tmp_path)
    ran = []
    monkeypatch.setattr(experiments, "run", lambda *given, **_: ran.append(given))
    again = experiments.obtain("hierarchy", "fig3", "smoke", device="cpu", out=tmp_path)
    assert again.path == made.path and not ran
    records.save(tmp_path, rates.frame.assign(value=rates.frame["value"] + 1), rates.manifest)
    experiments.obtain("hierarchy", "fig3", "smoke", device="cpu", out=tmp_path)
    assert len(ran) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fig1", "figD2", "figD3", "figD1"])
def test_runs_in_one_batch_are_the_runs_apart(name):
    """Bit for bit; one run of figD2 is made to lose a seed, another both."""
    s = experiments.settings(PAPER, name, "smoke")
    if name == "figD2":
        s = s | {
            "runs": [run | {"lr": 5e36 if run["lr"] == 0.1 else run["lr"]} for run in s["runs"]]
        }
    whole = studies.training(Job(s, (1, 2), progress=False))
    apart = [
        studies.training(Job(s | {"runs": [run]}, (1, 2), progress=False)) for run in s["runs"]
    ]
    frame = pd.concat([one.frame for one in apart], ignore_index=True)
    pd.testing.assert_frame_equal(whole.frame, frame, check_exact=True)
    assert whole.diverged == {k: v for one in apart for k, v in one.diverged.items()}
    assert bool(whole.diverged) == (name == "figD2")
    sizes = [len(runs) for runs in studies.side_by_side(s, studies.TOGETHER)]
    assert sizes == {"fig1": [1, 2, 1, 1], "figD2": [5, 5], "figD3": [5], "figD1": [1, 1]}[name]


HOLDER = """
import sys, time
from pathlib import Path
from fedlib.lab import locks
with locks.only_one(Path(sys.argv[1]), "It"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_start_says_who_is_at_it(tmp_path):
    folder = tmp_path / PAPER
    folder.mkdir()
    lock = folder / ".figB1.smoke.lock"
    env = os.environ | {"PYTHONPATH": str(Path(fedlib.__file__).parents[1])}
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FedlibError, match="profile smoke, is under way in .*--out") as error:
            experiments.run(PAPER, "figB1", "smoke", device="cpu", out=tmp_path, progress=False)
        assert f"process {other.pid} on " in str(error.value)
        assert not list(folder.glob("*.csv.gz"))
        experiments.run(PAPER, "figB2", "smoke", device="cpu", out=tmp_path, progress=False)
        other.kill()
    experiments.run(PAPER, "figB1", "smoke", device="cpu", out=tmp_path, progress=False)
    assert not list(folder.glob(".*")), "a lock dies with its process, and nothing is left"


def test_no_room_for_the_lock(tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(FedlibError, match="Cannot write to .*lock: No space left"):
        experiments.run(PAPER, "figB1", "smoke", device="cpu", out=tmp_path, progress=False)
    assert not list((tmp_path / PAPER).glob(".*"))


def test_a_run_that_fails_gives_its_lock_back(tmp_path, monkeypatch):
    def fails(job):
        assert list((tmp_path / PAPER).glob(".figB1.smoke.lock"))
        raise ZeroDivisionError

    monkeypatch.setattr(experiments, "study", lambda kind: fails)
    with pytest.raises(ZeroDivisionError):
        experiments.run(PAPER, "figB1", "smoke", device="cpu", out=tmp_path, progress=False)
    assert not list((tmp_path / PAPER).glob(".*"))


def test_the_time_of_a_run_is_kept_while_it_works(tmp_path, monkeypatch):
    """What is killed outright cannot keep it at its end."""
    seen = []

    def works(job):
        job.folder.mkdir()
        until = time.monotonic() + 60
        while len(set(seen)) < 3 and time.monotonic() < until:
            kept = job.folder / "seconds"
            seen.append(kept.read_text() if kept.exists() else "0 0")
        raise ZeroDivisionError

    monkeypatch.setattr(experiments, "A_WHILE", 0.01)
    monkeypatch.setattr(experiments, "study", lambda kind: works)
    with pytest.raises(ZeroDivisionError):
        experiments.run(PAPER, "figB1", "smoke", device="cpu", out=tmp_path, progress=False)
    times = [[float(number) for number in text.split()] for text in dict.fromkeys(seen)]
    assert len(times) == 3, "kept every now and then while it works"
    assert times == sorted(times) and 0 < times[1][0] < times[2][0]
    assert 0 < times[2][1], "of all cores, too"


@pytest.mark.parametrize("text", [None, "", "3.5", "one two"])
def test_a_stopwatch_cut_short_begins_again(tmp_path, text):
    if text is not None:
        (tmp_path / "seconds").write_text(text)
    assert experiments._seconds(tmp_path) == (0.0, 0.0)


def first_figure():
    return experiments.settings(PAPER, "fig1", "smoke")


def test_every_process_has_a_warm_up_file_of_its_own(tmp_path):
    s = first_figure()
    one = s["runs"][0]
    s = s | {"runs": [one, one | {"run": "other", "process": "independent"}]}
    studies.training(Job(s, (1,), folder=tmp_path, progress=False))
    assert len(list(tmp_path.glob("warm_up*.pt"))) == 2


def test_rows_end_where_the_last_seed_was_lost(monkeypatch):
    s, looks, right = first_figure(), [], studies.simulate

    def lost(*args, **options):
        history = right(*args, **options)
        if options["name"] != "warm-up":
            looks[:] = sorted(set(history.frame["round"]))
            history.diverged = {(n, k): looks[k] for n in options["name"] for k in (1, 2)}
        return history

    monkeypatch.setattr(studies, "simulate", lost)
    found = studies.training(Job(s, (1, 2), progress=False)).frame
    assert set(found.groupby("run")["round"].max()) == {looks[2] - s["warmup_rounds"]}


def test_every_seed_has_a_split_of_its_own():
    s = first_figure()
    task, _ = studies.build_task(s, (1, 2))
    labels = datasets.load(s["dataset"], progress=False).train_y
    for seed in (1, 2):
        dealt = studies.partition.similarity(labels, s["clients"], seed)
        for mine, part in zip(task.of(seed).data.parts, dealt, strict=True):
            assert np.array_equal(mine, part)
    one, other = (task.of(seed).data.parts for seed in (1, 2))
    assert any({*a} != {*b} for a, b in zip(one, other, strict=True))


def test_a_record_holds_only_settings_that_its_study_reads():
    s = catalogue.settings(PAPER, "factor", "quick")
    assert {"process", "intervals", "warmup_rounds"} <= {*s}
    assert not {"lr", "looks", "model", "dataset", "warmup_lr", "batch_size"} & {*s}
    assert "looks" in catalogue.settings(PAPER, "rates", "quick"), "of the study that is tuned"


def test_an_unfinished_run_goes_on_only_under_the_same_code_and_cards(tmp_path, monkeypatch):
    places = []

    def stop(job):
        places.append(job.folder)
        raise FedlibError("far enough")

    present = freshness.present_code(catalogue.settings(PAPER, "figB1", "smoke"))
    monkeypatch.setattr(studies, "toy", stop)
    for changes in ({}, dict(code={"toy": "other"}), dict(cards={"digits": "other"}), {}):
        monkeypatch.setattr(freshness, "present_code", lambda s, c=changes: present | c)
        with pytest.raises(FedlibError, match="far enough"):
            again("figB1", tmp_path)
    assert places[0] == places[3] and len(set(places)) == 3


def test_what_is_not_the_release_is_said(monkeypatch):
    def found(*kinds):
        monkeypatch.setattr(datasets, "verify", lambda name: [dict(fidelity=k) for k in kinds])
        return experiments._fidelity("mnist")

    assert found("canonical", "canonical") == "canonical"
    assert found("", "canonical", "re-encoded") == "re-encoded"
    assert found("unverified", "re-encoded") == "re-encoded, unverified"


def test_a_commit_with_changes_has_a_plus(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    module = tmp_path / "experiments.py"
    monkeypatch.setattr(experiments.fedlib, "__file__", str(module))
    subprocess.run([*git, "init", "-q"], check=True)
    module.write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", experiments._commit())
    module.write_text("2")
    assert re.fullmatch(r"[0-9a-f]{40}\+", experiments._commit())


@pytest.mark.parametrize("seeds", [0, 10**12, "ab", 1.5, [1.5], [-1], [2**70], []])
def test_seeds_that_cannot_be(seeds, tmp_path):
    with pytest.raises(FedlibError, match=r"[Ss]eed"):
        experiments.run(PAPER, "figB1", "smoke", seeds=seeds, out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runs": 3}, "'runs' is 3"),
        ({"kind": 3}, "'kind' is 3"),
        ({"kind": "os:system"}, "is no study"),
        ({3: 4}, "goes by its name"),
        ({"dataset": "nosuch"}, "Unknown data set"),
        ({"clients": 10**6}, "1000000 clients for"),
        ({"model": []}, "model is empty"),
        ({"model": ["softmax", 63, 10]}, "64 features"),
        ({"pool": 100}, "pool = 100"),
        ({"process": "markov"}, "needs the setting 'on'"),
    ],
)
def test_settings_that_cannot_be_leave_no_folder(changes, told, tmp_path):
    with pytest.raises(FedlibError, match=told):
        experiments.run(PAPER, "fig1", "smoke", device="cpu", out=tmp_path / "new", progress=False,
                        changes=changes)  # fmt: skip
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_there_stays(tmp_path):
    with pytest.raises(FedlibError, match="clients for"):
        experiments.run(PAPER, "fig1", "smoke", device="cpu", out=tmp_path, progress=False,
                        changes={"clients": 10**6})  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_the_book_s_own_folder_is_never_meant_by_none(tmp_path):
    with pytest.raises(FedlibError, match="out is a folder"):
        experiments.run(PAPER, "fig1", "smoke", out=None)
