"""Records: saved whole or not at all, found again, and honest about their age and origin."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import pandas as pd
import pytest

import fedlib
from fedlib import experiments, results, studies
from fedlib.errors import FedlibError

PAPER = "participation"
PACKAGE = Path(fedlib.__file__).parent


def manifest(experiment="fig1", profile="quick", **changes):
    """Return the manifest of a record that is up to date."""
    s = json.loads(json.dumps(experiments.settings(PAPER, experiment, profile)))
    held = dict(
        paper=PAPER, experiment=experiment, profile=profile, settings=s, seeds=[1, 2],
        wall_seconds=1.0, device="CPU", versions={}, commit="a" * 40, data={"file": "hash"},
        fidelity="canonical", diverged={}, source=results.source_hash(s["kind"]),
        date="2026-05-04T03:02:01+00:00",
    )  # fmt: skip
    return held | changes


FRAME = pd.DataFrame(dict(run=["a", "b"], seed=[1, 1], round=[0, 0], value=[1 / 3, float("nan")]))


def stored(tmp_path, **changes):
    held = manifest(**changes)
    results.save(tmp_path, FRAME, held)
    return results.load(PAPER, held["experiment"], held["profile"], tmp_path)


# --- saving and loading ---------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    written = results.save(tmp_path, FRAME, manifest())
    record = results.load(PAPER, "fig1", "quick", tmp_path)
    assert written == [record.path, record.manifest_path]
    assert [p.name for p in written] == ["fig1.quick.csv.gz", "fig1.quick.json"]
    assert sorted(p.name for p in (tmp_path / PAPER).iterdir()) == [p.name for p in written]
    assert record.manifest == manifest()
    pd.testing.assert_frame_equal(record.frame, FRAME, rtol=1e-6)
    assert record.frame["value"].isna().tolist() == [False, True]
    before = [p.read_bytes() for p in written]
    assert [p.read_bytes() for p in results.save(tmp_path, FRAME, manifest())] == before


def test_the_largest_profile_wins(tmp_path):
    for profile in ("smoke", "paper", "quick"):
        stored(tmp_path, profile=profile)
    for profile in ("largest", "replay", "paper"):
        assert results.load(PAPER, "fig1", profile, tmp_path).manifest["profile"] == "paper"
    assert results.load(PAPER, "fig1", "smoke", tmp_path).manifest["profile"] == "smoke"
    (tmp_path / PAPER / "fig1.paper.json").unlink()  # rows without a manifest are not a record
    assert results.load(PAPER, "fig1", out=tmp_path).manifest["profile"] == "quick"


@pytest.mark.parametrize("profile, make", [("largest", "quick"), ("paper", "paper")])
def test_a_missing_record_names_its_command(profile, make, tmp_path):
    stored(tmp_path, experiment="fig2")
    with pytest.raises(results.MissingRecord) as error:
        results.load(PAPER, "fig1", profile, tmp_path)
    assert f"fedlib run {PAPER} fig1 --profile {make} --out data/results" in str(error.value)
    assert isinstance(error.value, FedlibError)


def test_a_failed_save_keeps_what_was_there(tmp_path, monkeypatch):
    record = stored(tmp_path)
    before = record.path.read_bytes()
    real, calls = Path.write_bytes, []

    def full(path, content):
        calls.append(path)
        real(path, content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FedlibError, match=r"Cannot write to .*No space left.*--out"):
        results.save(tmp_path, FRAME.assign(value=2.0), manifest())
    assert calls and record.path.read_bytes() == before
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedlibError, match=r"Cannot write to .*file.*--out"):
        results.save(tmp_path / "file", FRAME, manifest())
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(FedlibError, match=r"Permission denied.*--out"):
        results.save(tmp_path / "locked", FRAME, manifest())


@pytest.mark.parametrize("which", ["csv.gz", "json"])
def test_a_corrupt_record_is_named(which, tmp_path):
    path = stored(tmp_path).path.parent / f"fig1.quick.{which}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FedlibError, match=r"fig1\.quick.* cannot be read .* make it again"):
        results.load(PAPER, "fig1", "quick", tmp_path)


# --- the records that ship ------------------------------------------------------------------------


def test_shipped_records_are_whole_and_up_to_date():
    records = results.stored()
    assert records
    for record in records:
        m = record.manifest
        assert record.path.name == f"{m['experiment']}.{m['profile']}.csv.gz"
        assert record.path.parent.name == m["paper"]
        assert {run["run"] for run in m["settings"].get("runs", [])} <= set(record.frame["run"])
        assert set(record.frame["seed"]) <= {0, *m["seeds"]}
    stale = [
        f"{r.path.name}: fedlib run {r.manifest['paper']} {r.manifest['experiment']} "
        f"--profile {r.manifest['profile']} --out data/results"
        for r in records
        if r.stale
    ]
    assert not stale, "Stale records, to be made again:\n" + "\n".join(stale)
    folder = results.folder()
    extra = {p.name for p in folder.glob("*/*") if p.parent.name != "bench"} - {
        p.name for r in records for p in (r.path, r.manifest_path)
    }
    assert not [name for name in extra if not name.startswith(".")]


# --- provenance -----------------------------------------------------------------------------------


def test_provenance_tells_everything_in_one_line(tmp_path):
    line = stored(tmp_path).provenance()
    assert line == ("Record fig1.quick, fashion-mnist, 2 seeds, CPU, 2026-05-04, commit aaaaaaaaa.")
    changed = stored(tmp_path, commit="b" * 40 + "+", seeds=[1])
    assert "1 seed, " in changed.provenance() and "commit bbbbbbbbb+." in changed.provenance()


def test_provenance_calls_a_substitute_a_substitute(tmp_path):
    assert "digits, a substitute" in stored(tmp_path, profile="smoke").provenance()
    line = stored(tmp_path, fidelity="pixels re-encoded").provenance()
    assert "fashion-mnist (pixels re-encoded)" in line
    assert "mnist" not in stored(tmp_path, data={}, fidelity="none").provenance()


# --- stale ----------------------------------------------------------------------------------------


def test_stale_follows_settings_and_source(tmp_path, monkeypatch):
    assert not stored(tmp_path).stale
    other = manifest()["settings"] | {"local_steps": 6}
    assert stored(tmp_path, settings=other).stale
    assert stored(tmp_path, source="0" * 16).stale
    record = stored(tmp_path, source="0" * 16)
    assert record.provenance().endswith("Stale: the code or the settings have changed since.")
    gone = manifest() | {"experiment": "fig1-of-old"}
    results.save(tmp_path, FRAME, gone)
    assert results.load(PAPER, "fig1-of-old", "quick", tmp_path).stale


def test_stale_follows_the_experiment_file(tmp_path, monkeypatch):
    record = stored(tmp_path)
    changed = experiments.settings(PAPER, "fig1", "quick") | {"warmup_lr": 0.2}
    monkeypatch.setattr(experiments, "settings", lambda *names: changed)
    assert record.stale


# --- the hash of the source -----------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that edits a copy of the package and hashes a kind of study there."""
    copy = tmp_path / "fedlib"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(results, "__file__", str(copy / "results.py"))
    results._definitions.cache_clear()

    def hashed(kind, module=None, old="", new=""):
        if module:
            text = (copy / module).read_text()
            assert old in text, f"{module} has changed; the test needs other text to edit"
            (copy / module).write_text(text.replace(old, new, 1))
        results._definitions.cache_clear()
        return results.source_hash(kind)

    yield hashed
    results._definitions.cache_clear()


BLIND = {
    "comment": ("local.py", "    pieces =", "    # none larger than asked for\n    pieces ="),
    "function docstring": ("local.py", "Run plain SGD on every row", "Descend"),
    "class docstring": ("algorithms/participation.py", "Algorithm 1:", "The algorithm:"),
    "module docstring": ("simulate.py", '"""The round loop', '"""The loop of rounds'),
    "layout": ("local.py", "theta[rows].clone()", "(\n        theta[rows].clone()\n    )"),
    "new function": ("local.py", "def _rows", "def unused(x):\n    return x\n\n\ndef _rows"),
    "loading of data": ("datasets.py", "def load(", "THERE = 1\n\n\ndef load("),
    "bench": ("bench.py", "repeats: int = 5", "repeats: int = 6"),
    "who computes a piece": ("cores.py", "len(pieces)) - 1", "len(pieces)) - 2"),
}


@pytest.mark.parametrize("edit", BLIND)
def test_source_hash_is_blind_to_what_cannot_matter(edit, package):
    assert package("training") == package("training", *BLIND[edit])


SEEN = {
    "the study": ("studies.py", "checkpoint_every=500", "checkpoint_every=499"),
    "a helper of the study": ("studies.py", "max(1, s.get", "max(2, s.get"),
    "a constant table": ("studies.py", '"mlp": models.mlp', '"mlp": models.softmax'),
    "the algorithm": ("algorithms/participation.py", "(self.amplify - 1)", "self.amplify"),
    "local SGD": ("local.py", "alpha=rate", "alpha=2 * rate"),
    "the task": ("tasks.py", "each.mean(1)", "each.sum(1)"),
    "a loss in a table": ("tasks.py", "0.5 * (out - target)", "(out - target)"),
    "the model": ("models.py", "1 / math.sqrt(fan_in)", "2 / math.sqrt(fan_in)"),
    "the random streams": ("rng.py", "PCG64", "Philox"),
    "a partitioner": ("partition.py", "other: float = 0.05", "other: float = 0.06"),
    "a participation process": ("participation.py", "if low <= n <= high", "if low < n <= high"),
    "the round loop": ("simulate.py", "done == rounds", "done > rounds"),
}


@pytest.mark.parametrize("edit", SEEN)
def test_source_hash_sees_what_can_matter(edit, package):
    assert package("training") != package("training", *SEEN[edit])


def test_source_hash_covers_what_is_reachable_only(package):
    kinds = {kind: package(kind) for kind in studies.KINDS}
    assert len(set(kinds.values())) == len(kinds)
    package("toy", "theory.py", "def gram(", "def gram(unused=0, *, ")
    moved = {kind for kind in kinds if package(kind) != kinds[kind]}
    assert moved == {"heterogeneity"}
    package("toy", "models.py", "self.point - x", "x - self.point")
    moved = {kind for kind in kinds if package(kind) != kinds[kind]}
    assert {"toy", "speedup", "heterogeneity"} <= moved and "factor" not in moved


def test_source_hash_is_the_same_under_every_python():
    """Python 3.12 and 3.13 print trees differently; a record must not look stale there."""
    text = results._dump(ast.parse("def f(x):\n    return g()\n\n\nclass C:\n    pass\n"))
    assert text == (
        "Module(body=[FunctionDef(name='f', args=arguments(posonlyargs=[], args=[arg(arg='x')], "
        "kwonlyargs=[], kw_defaults=[], defaults=[]), body=[Return(value=Call(func=Name(id='g', "
        "ctx=Load()), args=[], keywords=[]))], decorator_list=[]), ClassDef(name='C', bases=[], "
        "keywords=[], body=[Pass()], decorator_list=[])], type_ignores=[])"
    )


def test_every_import_of_the_computing_code_can_be_followed():
    """The hash follows ``from fedlib.x import y`` at the top of a module, and nothing else."""
    computing = ["studies", "simulate", "tasks", "local", "models", "partition", "participation",
                 "theory", "rng", "algorithms/participation"]  # fmt: skip
    for module in computing:
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        for node in ast.walk(tree):
            inner = node not in tree.body
            if isinstance(node, ast.Import):
                assert not any(a.name.startswith("fedlib") for a in node.names), module
            elif isinstance(node, ast.ImportFrom):
                ours = node.level > 0 or (node.module or "").startswith("fedlib")
                assert not (ours and (inner or node.level)), module
                assert not (ours and node.module == "fedlib.algorithms"), module
