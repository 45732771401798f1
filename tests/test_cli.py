"""The command line: what it prints, where it writes, and how it says no."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedlib
from fedlib import paths
from fedlib.engine import models
from fedlib.errors import FedlibError
from fedlib.lab import bench
from fedlib.lab.cli import app
from fedlib.lab.evidence import ages, catalogue, claims, experiments, records, scale

PAPER = "participation"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setattr(ages, "committed", lambda *names: None)  # whatever a checkout has now


def call(*arguments, code=0):
    """Run a command in this process and return its outcome, which must end with ``code``."""
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output
    return done


ROOT = Path(fedlib.__file__).parents[1]


def process(*arguments, code=""):
    """Run the command line, or ``code``, in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(Path(fedlib.__file__).parents[1])}
    command = [sys.executable, "-c", code or "from fedlib.lab.cli import main; main()", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


# --- list, run ------------------------------------------------------------------------------------


def test_list():
    rows = json.loads(call("list", "--json").stdout)
    described = [row for paper in catalogue.papers() for row in catalogue.describe(paper)]
    assert [{k: v for k, v in row.items() if k != "took"} for row in rows] == described
    assert {"paper", "experiment", "where", "title", "profiles", "took"} == set(rows[0])
    lines = call("list").stdout.splitlines()
    assert len(lines) == len(rows) + 2
    assert lines[0].split() == list(rows[0]) and set(lines[1]) == {"-", " "}
    for row, line in zip(rows, lines[2:], strict=True):
        assert line.split()[:2] == [row["paper"], row["experiment"]] and row["title"] in line


def test_run_ends_by_naming_its_files(tmp_path):
    done = call("run", PAPER, "figB2", "--profile", "smoke", "--out", tmp_path / "out")
    files = [tmp_path / "out" / PAPER / f"figB2.smoke.{end}" for end in ("csv.gz", "json")]
    assert done.stdout.splitlines()[-2:] == [f"Wrote {path}" for path in files]
    assert all(path.exists() for path in files)
    assert len(list((tmp_path / "out" / PAPER).iterdir())) == 2


def test_run_tells_of_a_setting_that_the_experiment_does_not_have(tmp_path):
    run = ["run", PAPER, "figD1", "--profile", "smoke", "--seeds", 1, "--out", tmp_path]
    periodic = call(*run, "--set", "off=0.3", "--set", "lr=.01").stderr
    assert "[figD1] itself has no 'off'" in periodic and "no 'lr'" not in periodic


def test_run_passes_on_its_options_and_tells_of_divergence(tmp_path, monkeypatch):
    seen = []
    manifest = dict(diverged={"wild": {"1": 30, "2": 40}})
    record = records.Record(pd.DataFrame(), manifest, tmp_path / "e.quick.csv.gz")
    monkeypatch.setattr(experiments, "run", lambda *name, **how: seen.append((name, how)) or record)
    done = call("run", PAPER, "fig1")
    assert "wild diverged: seed 1 by round 30, seed 2 by round 40." in done.stdout
    assert f"Wrote {tmp_path / 'e.quick.json'}" in done.stdout
    options = ["--profile", "paper", "--seeds", "3", "--device", "cpu", "--out", "elsewhere"]
    options += ["--tf32", "--replace", "--set", "lr=.5"]
    call("run", PAPER, "fig1", *options)
    assert all(callable(how.pop("announce")) for _, how in seen)
    usual = dict(
        seeds=None, device=experiments.choose_device(), out=Path("runs"), tf32=False,
        replace=False, changes={},
    )  # fmt: skip
    other = dict(
        seeds=3, device="cpu", out=Path("elsewhere"), tf32=True, replace=True, changes={"lr": 0.5}
    )
    assert seen == [((PAPER, "fig1", "quick"), usual), ((PAPER, "fig1", "paper"), other)]


def test_run_asks_whether_the_rules_are_committed_unless_settings_are_one_s_own(monkeypatch):
    def refuse(*names):
        raise FedlibError(f"{names} has rules that are not committed.")

    begun = []
    monkeypatch.setattr(ages, "committed", refuse)
    monkeypatch.setattr(experiments, "run", lambda *name, **how: begun.append(name) or 1 / 0)
    told = call("run", PAPER, "fig1", code=2).stderr
    assert f"('{PAPER}', 'fig1', 'quick') has rules" in told and not begun
    CliRunner().invoke(app, ["run", PAPER, "fig1", "--set", "lr=.5"])
    assert len(begun) == 1


@pytest.mark.slow
def test_seeds_are_a_number_or_a_list(tmp_path):
    for text, seeds in (("1", [1]), ("2", [1, 2]), ("4,6", [4, 6]), ("5,", [5]), ("0,3", [0, 3])):
        out = tmp_path / text
        call("run", PAPER, "figD1", "--profile", "smoke", "--seeds", text, "--out", out)
        assert records.load(PAPER, "figD1", "smoke", out).manifest["seeds"] == seeds
    for text in (
        "",
        ",",
        "0",
        "a",
        "1.5",
        "-1",
        "3 4",
        "10001",
        "9" * 30,
        "1," + "9" * 30,
        "9" * 5000,
    ):
        done = call("run", PAPER, "figD1", f"--seeds={text}", "--out", tmp_path / "no", code=2)
        assert "--seeds takes how many" in done.stderr and not (tmp_path / "no").exists()


@pytest.mark.slow
def test_a_record_with_other_seeds_or_settings_is_not_overwritten(tmp_path):
    run = ["run", PAPER, "figD1", "--profile", "smoke", "--out", tmp_path]
    call(*run, "--seeds", 2)
    page = tmp_path / PAPER / "figD1.smoke.json"
    before = page.read_bytes()
    refused = call(*run, "--seeds", "3", code=2)
    assert "with seeds 1, 2. Choose another folder" in refused.stderr
    assert page.read_bytes() == before and len(list(page.parent.iterdir())) == 2
    call(*run, "--seeds", 2)
    call(*run, "--seeds", "3", "--replace")
    held = json.loads(page.read_text())
    assert held["seeds"] == [1, 2, 3]
    held["settings"]["batch_size"] += 1
    page.write_text(json.dumps(held))
    assert "with other settings (batch_size)." in call(*run, "--seeds", 3, code=2).stderr
    page.write_text("{")
    assert "is damaged, so which seeds are there" in call(*run, "--seeds", 3, code=2).stderr
    call(*run, "--seeds", 3, "--replace")


def test_the_list_says_what_stored_records_took():
    every = json.loads(call("list", "--json").stdout)
    rows = {row["experiment"]: row["took"] for row in every if row["paper"] == PAPER}
    held = records.load(PAPER, "fig1", "quick").manifest
    assert f", quick {held['wall_seconds'] / 60:.0f} min, " in rows["fig1"]
    for row in every:
        assert [part.split()[0] for part in row["took"].split(", ")] == row["profiles"].split(", ")
        for part in row["took"].split(", "):
            page = records.folder(row["paper"]) / f"{row['experiment']}.{part.split()[0]}.json"
            assert part.endswith(" not run") == (not page.exists())


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    call("run", PAPER, "figB2", "--profile", "smoke", "--out=~/mine")
    assert (tmp_path / "mine" / PAPER / "figB2.smoke.json").exists()


def test_run_with_one_seed(tmp_path):
    call("run", PAPER, "figD1", "--profile", "smoke", "--seeds", 1, "--out", tmp_path)
    assert records.load(PAPER, "figD1", "smoke", tmp_path).manifest["seeds"] == [1]


# --- claims, stale --------------------------------------------------------------------------------


def test_claims(monkeypatch, verdicts):
    assert json.loads(call("claims", PAPER, "--json").stdout) == verdicts[PAPER]
    monkeypatch.setattr(claims, "judge", lambda paper, out: verdicts[paper])
    rows = json.loads(call("claims", "--json").stdout)
    assert rows == [row for paper in paths.papers("claims.toml") for row in verdicts[paper]]
    text = call("claims").stdout
    words = ("holds", "smaller", "level", "reversed", "differs", "outside", "open", "no record")
    signs = dict(zip(words, "✓+=✗≠∉?-", strict=True))
    for row in rows:
        found = claims.finding_in_words(row).upper()
        head = f"{row['id']}  {found}  {row['tally']}  ({row['record']})"
        assert head in text and row["statement"] in text
        assert scale.sentence(row["scale"], row["data"]) in text
        for check in row["checks"]:
            assert f"{signs[check['outcome']]} {check['quantity']}" in text
            assert f"{check['measured']}, asked: {check['asked']}" in text


def test_claims_of_a_folder_that_is_not_there(tmp_path):
    assert "There is no folder" in call("claims", "--out", tmp_path / "no", code=2).stderr


def test_join(tmp_path):
    for seed in (1, 2):
        out = tmp_path / str(seed)
        experiments.run(PAPER, "figD1", "smoke", seeds=[seed], out=out, progress=False)
    folders = [tmp_path / "1", tmp_path / "2"]
    told = call("join", PAPER, "figD1", *folders, "--profile", "smoke", "--out", tmp_path / "both")
    assert told.stdout.strip().endswith("figD1.smoke.csv.gz, 2 seeds")
    again = call("join", PAPER, "figD1", folders[0], folders[0], "--profile", "smoke",
                 "--out", tmp_path / "both", code=2)  # fmt: skip
    assert "Seeds [1] are in more than one" in again.stderr


def test_claims_of_another_folder(tmp_path):
    rows = json.loads(call("claims", "--json", "--out", tmp_path).stdout)
    proofs = {"GFA-C8", "TDCD-C13", "HFL-C14", "HFL-C15", "AMP-C1"}  # they need no record
    for row in rows:
        assert row["finding"] == ("proved" if row["id"] in proofs else "no record")


def test_stale_is_silent_until_something_is_stale(tmp_path, monkeypatch):
    record = experiments.run(PAPER, "figB1", "smoke", out=tmp_path, progress=False)
    monkeypatch.setattr(records, "folder", lambda paper, out=None: tmp_path / paper)
    assert call("stale").output == "" and json.loads(call("stale", "--json").stdout) == []
    record.manifest_path.write_text(json.dumps(record.manifest | {"cards": {"x": "another"}}))
    (row,) = json.loads(call("stale", "--json").stdout)
    assert row["record"] == f"{PAPER}/figB1.smoke" and row["state"] == "stale" and row["why"]
    assert row["again"] == f"fedlib run {PAPER} figB1 --profile smoke --out data/papers"
    assert row["again"] in call("stale").stdout and row["again"] in call("stale", PAPER).stdout
    assert call("stale", "hierarchy").output == "", "of another paper"
    gone = record.manifest | {"experiment": "gone"}
    record.path.rename(record.path.with_name("gone.smoke.csv.gz"))
    record.manifest_path.rename(page := record.path.with_name("gone.smoke.json"))
    page.write_text(json.dumps(gone))
    (row,) = json.loads(call("stale", "--json").stdout)
    assert row["why"] and row["again"].startswith("delete ") and "gone.smoke" in row["again"]


def test_check_compares_with_the_stored_smoke_run(tmp_path, monkeypatch):
    monkeypatch.setattr(
        records, "folder", lambda paper, out=None: tmp_path if out is None else Path(out)
    )
    table = catalogue._table(PAPER)
    few = {"profiles": {}, "common": {}, "figB1": table["figB1"]}
    monkeypatch.setattr(catalogue, "_table", lambda paper: few)
    assert call("check", PAPER).stdout == f"{PAPER} figB1: the same\n", "stored, as there was none"
    held = records.load(PAPER, "figB1", "smoke", tmp_path)
    assert held.manifest["seen"] == {name: [h] for name, h in held.manifest["code"].items()}
    toy = "fedlib.lab.studies.participation:toy"
    older = held.manifest | {"seen": {toy: ["0"]}, "tables": ["before"]}
    records.save(tmp_path, held.frame, older)
    assert call("check", PAPER).exit_code == 0
    noted, now = records.load(PAPER, "figB1", "smoke", tmp_path).manifest, held.manifest
    assert noted["seen"][toy] == ["0", now["code"][toy]]
    assert noted["seen"].keys() == now["code"].keys()
    assert noted["tables"] == ["before", *now["tables"]]
    assert noted["tried"] == {now["instructions"].split(",")[0]: now["tables"][0]}
    records.save(tmp_path, held.frame.assign(value=held.frame["value"] * 1.01), older)
    told = call("check", PAPER, code=1)
    assert "values, first" in told.stdout
    kept = records.load(PAPER, "figB1", "smoke", tmp_path).manifest
    assert kept["seen"] == {toy: ["0"]}, "nothing is noted when a number differs"
    records.save(tmp_path, held.frame, older | {"data": {"as used": "0"}})
    assert "same rows from other data" in call("check", PAPER, code=1).stdout


# --- bench, data ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench(monkeypatch, tmp_path):
    work = {"tiny": (lambda: models.softmax(4, 10), (4,), 3, 2, 2)}
    monkeypatch.setattr(bench, "WORK", work)
    (row,) = json.loads(call("bench", "--json").stdout)
    assert row["name"] == "tiny" and row["ratio"] > 0
    header = re.split(r"  +", call("bench", "local-sgd").stdout.splitlines()[0])
    assert header == list(row)
    kept = call("bench", "--out", str(tmp_path))
    assert str(tmp_path) in kept.stderr and "Kept" not in kept.stdout
    assert bench.load_bench("local-sgd", tmp_path)[0]["rows"][0]["name"] == "tiny"


def test_data_list():
    rows = {row["name"]: row for row in json.loads(call("data", "list", "--json").stdout)}
    assert set(rows) >= {"digits", "mnist", "fashion-mnist", "cifar10"}
    assert rows["digits"]["here"] == "embedded" and rows["mnist"]["here"] == "no"
    assert "fashion-mnist" in call("data", "list").stdout


def test_data_get_and_verify(tmp_path):
    assert "'digits' is embedded" in call("data", "get", "digits").stdout
    (row,) = json.loads(call("data", "verify", "digits", "--json").stdout)
    assert row["state"] == "ok"
    rows = json.loads(call("data", "verify", "--json").stdout)
    assert {r["state"] for r in rows if r["name"] == "mnist"} == {"missing"}
    target = tmp_path / "cache" / "mnist" / "t10k-labels-idx1-ubyte.gz"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"not this")
    assert "corrupt" in call("data", "verify", "mnist", code=1).stdout


# --- how it says no -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command, words",
    [
        ("run participaton fig1", ["'participation'?", "Valid: ", "hierarchy"]),
        ("run participation fg1", ["Did you mean 'fig1'?", "Valid: ", "figD3", "speedup"]),
        ("run participation fig1 --profile fast", ["'fast'", "Valid: long, paper, quick, smoke."]),
        ("run participation fig1 --device gpu", ["'gpu'", "Valid: auto, cpu, cuda."]),
        ("run participation fig1 --set spede=3", ["A changed setting", "Did you mean 'speed'?"]),
        ("claims participaton", ["Did you mean 'participation'?"]),
        ("bench local-sdg", ["Did you mean 'local-sgd'?"]),
        ("data get mnits", ["Did you mean 'mnist'?", "Valid: ", "digits"]),
        ("data verify mnits", ["Did you mean 'mnist'?"]),
        ("records --hours 2", ["Add --work", "to see the queue"]),
    ],
)
def test_what_cannot_be_done_is_told_in_words(command, words):
    done = call(*command.split(), code=2)
    assert done.stdout == "" and done.stderr.startswith("fedlib: ")
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("rum", "run", "list --yaml", "gpu --minutes 0", "matrix a:b --seeds 0"),
        "vertical mpi --work -1",
    ],
)
def test_usage(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*command.split(), code=2)
    assert done.stdout == "" and "Usage:" in done.stderr
    assert not list(tmp_path.iterdir())


def test_tuned_is_no_number_where_nothing_was_tuned(tmp_path):
    asked = ["--profile", "smoke", "--set", "lr=tuned", "--out", str(tmp_path)]
    done = call("run", PAPER, "fig1", *asked, code=2)
    assert "with a changed lr" in done.stderr and "'lr' is \"tuned\"" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("word", ["local_steps=1" + "0" * 22, "looks=1" + "0" * 15])
def test_a_number_that_does_not_fit_is_told(word, tmp_path):
    asked = ["--profile", "smoke", "--set", word, "--out", str(tmp_path), "--yes"]
    told = call("run", PAPER, "fig1", *asked, code=2).stderr
    assert "too large for here" in told and "Traceback" not in told


def test_a_folder_too_high_is_told_where_a_paper_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path))
    (tmp_path / "papers" / "mine").mkdir(parents=True)
    (tmp_path / "papers" / "mine" / "experiments.toml").touch()
    told = call("run", "mine", "fig1", code=2).stderr
    assert f"there is no {tmp_path / 'mine' / 'experiments.toml'}" in told


def test_a_note_on_a_mistake_is_told(monkeypatch):
    def noted(*args, **options):
        error = FedlibError("mu is a number; got None.")
        error.add_note("No --strength was given.")
        raise error

    monkeypatch.setattr(experiments, "run", noted)
    done = call("run", PAPER, "fig1", code=2)
    assert done.stderr.endswith("fedlib: mu is a number; got None. No --strength was given.\n")


def test_cuda_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = call("run", PAPER, "fig1", "--device", "cuda", code=2)
    assert "PyTorch sees no CUDA device here" in done.stderr and "--device cpu" in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    done = call("run", PAPER, "figB1", "--out", tmp_path / "file", code=2)
    assert "Cannot write to" in done.stderr and "--out" in done.stderr


def loading(*name, **how):
    """Meet Ctrl-C as compiled modules do that are just being loaded."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ImportError("initialization failed") from error


def ignoring(*name, **how):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    raise FedlibError("Not to be read.")


@pytest.mark.parametrize("met", [loading, ignoring, lambda *_, **__: signal.raise_signal(2)])
def test_interruption_ends_quietly(monkeypatch, met):
    monkeypatch.setattr(experiments, "run", met)
    done = call("run", PAPER, "fig1", code=130)
    assert done.stderr.splitlines()[-1] == "Interrupted. Run the same command again to go on."
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_keeps_nothing_does_not_promise_to_go_on(monkeypatch):
    monkeypatch.setattr(claims, "judge", lambda *_: signal.raise_signal(signal.SIGINT))
    assert call("claims", PAPER, code=130).stderr.splitlines()[-1] == "Interrupted."


# --- as a process ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_entry_point_prints_mistakes_for_people():
    done = process("run", PAPER, "figg1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("fedlib: Unknown experiment 'figg1'. Did you mean 'fig1'?")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written():
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for end in ("list > /dev/full", "--help > /dev/full"):
        line = f"{sys.executable} -m fedlib {end}"
        done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True)
        told = (done.returncode, done.stderr)
        assert told == (2, "fedlib: Cannot write: No space left on device.\n")
    line = f"{sys.executable} -m fedlib list >&-"
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_are_too_long(monkeypatch):
    told = call("run", PAPER, "factor", "--profile", "smoke", "--out", "a" * 300, code=2).stderr
    assert "File name too long" in told
    for name in ((PAPER, "a" * 300), (PAPER, "factor", "--profile", "a" * 300)):
        assert "Unknown" in call("run", *name, code=2).stderr
    monkeypatch.setenv("FEDLIB_PAPERS", "a" * 5000)
    assert "is not a folder" in call("list", code=2).stderr


@pytest.mark.slow
def test_any_encoding_will_do(verdicts_page):
    env = os.environ | {"PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    env["FEDLIB_JUDGED"] = str(verdicts_page)
    command = [sys.executable, "-m", "fedlib", "claims", "beyond"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=600)
    text = done.stdout.decode("latin-1")
    assert done.returncode == 0 and "AMP-C1" in text, done.stderr
    assert text.splitlines()[-1].startswith("? holds"), "the sign that this encoding lacks"


@pytest.mark.slow
def test_importing_fedlib_brings_nothing_of_jupyter():
    code = (
        "import sys, fedlib.lab.cli, fedlib.lab.bench\n"
        "from fedlib.lab.evidence import claims, experiments\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = process(code=code)
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert {"fedlib", "torch", "pandas"} <= found
    unwanted = "IPython ipykernel jupyter jupyter_core notebook nbformat ipywidgets matplotlib"
    assert not found & set(unwanted.split())


def test_an_empty_folder_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", "participation", "figB1", "--profile", "smoke", "--out"]
    told = CliRunner().invoke(app, [*words, ""])
    assert told.exit_code == 2 and "it names no folder" in told.output and not [*tmp_path.iterdir()]
