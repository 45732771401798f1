"""Records: saved whole or not at all, found again, and honest about their age and origin."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import inspect
import json
import math
import os
import re
import tomllib

import numpy as np
import pandas as pd
import pytest
import sklearn.datasets
import torch

from fedlib import files, paths
from fedlib.datasets import generators
from fedlib.engine.steps import clip, momentum
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, freshness, records

PAPER = "participation"


def manifest(experiment="fig1", profile="quick", **changes):
    """Return the manifest of a record that is up to date."""
    s = json.loads(json.dumps(catalogue.settings(PAPER, experiment, profile)))
    held = dict(
        paper=PAPER, experiment=experiment, profile=profile, settings=s, seeds=[1, 2],
        wall_seconds=1.0, device="CPU", versions={}, commit="a" * 40, data={"file": "hash"},
        fidelity="canonical", diverged={}, date="2026-05-04T03:02:01+00:00",
        instructions="AVX2", small=None,
        **freshness.present_code(catalogue.settings(PAPER, experiment, profile)),
    )  # fmt: skip
    return held | changes


FRAME = pd.DataFrame(dict(run=["a", "b"], seed=[1, 1], round=[0, 0], value=[1 / 3, float("nan")]))


def stored(tmp_path, **changes):
    held = manifest(**changes)
    records.save(tmp_path, FRAME, held)
    return records.load(PAPER, held["experiment"], held["profile"], tmp_path)


# --- saving and loading ---------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    written = records.save(tmp_path, FRAME, manifest())
    record = records.load(PAPER, "fig1", "quick", tmp_path)
    assert written == [record.path, record.manifest_path]
    assert [p.name for p in written] == ["fig1.quick.csv.gz", "fig1.quick.json"]
    assert sorted(p.name for p in (tmp_path / PAPER).iterdir()) == [p.name for p in written]
    rows = gzip.decompress(record.path.read_bytes())
    assert record.manifest == manifest() | {"rows": hashlib.sha256(rows).hexdigest()}
    pd.testing.assert_frame_equal(record.frame, FRAME, check_dtype=False, rtol=1e-6)
    assert record.frame["value"].isna().tolist() == [False, True]
    before = [p.read_bytes() for p in written]
    assert [p.read_bytes() for p in records.save(tmp_path, FRAME, manifest())] == before


def test_the_largest_profile_wins(tmp_path, monkeypatch):
    for profile in ("smoke", "paper", "quick"):
        stored(tmp_path, profile=profile)
    for profile in ("largest", "replay", "paper"):
        assert records.load(PAPER, "fig1", profile, tmp_path).manifest["profile"] == "paper"
    stored(tmp_path, experiment="fig2", profile="smoke")
    with monkeypatch.context() as as_if_it_came_with_fedlib:
        as_if_it_came_with_fedlib.setattr(records, "folder", lambda paper, out: tmp_path / paper)
        assert records.load(PAPER, "fig1").manifest["profile"] == "paper"
        with pytest.raises(records.MissingRecord):  # the book stores smoke runs and shows none
            records.load(PAPER, "fig2")
    assert records.load(PAPER, "fig1", "smoke", tmp_path).manifest["profile"] == "smoke"
    (tmp_path / PAPER / "fig1.paper.json").unlink()  # rows without a manifest are not a record
    assert records.load(PAPER, "fig1", out=tmp_path).manifest["profile"] == "quick"


@pytest.mark.parametrize("profile, make", [("largest", "quick"), ("paper", "paper")])
def test_a_missing_record_names_its_command(profile, make, tmp_path):
    stored(tmp_path, experiment="fig2")
    with pytest.raises(records.MissingRecord) as error:
        records.load(PAPER, "fig1", profile, tmp_path)
    assert f"fedlib run {PAPER} fig1 --profile {make} --out {tmp_path}" in str(error.value)
    assert isinstance(error.value, FedlibError)


def test_a_failed_save_keeps_what_was_there(tmp_path, monkeypatch):
    record = stored(tmp_path)
    before = record.path.read_bytes()
    real, calls = os.fdopen, []

    class Full:
        def __init__(self, handle, mode):
            self.file = real(handle, mode)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, content):
            calls.append(self.file.write(content[: len(content) // 2]))
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(FedlibError, match=r"Cannot write to .*No space left.*--out"):
        records.save(tmp_path, FRAME.assign(value=2.0), manifest())
    assert calls and record.path.read_bytes() == before
    assert not list(tmp_path.rglob("*.part"))


def test_rows_and_manifest_appear_together(tmp_path, monkeypatch):
    """Killed at each step of a save, a reader finds the old record or the new one, whole."""
    real = os.replace
    for steps in range(4):
        home = tmp_path / str(steps)
        stored(home)
        done = []

        def replace(source, target, steps=steps, done=done):
            if len(done) == steps:
                raise KeyboardInterrupt
            done.append(target)
            real(source, target)

        monkeypatch.setattr(os, "replace", replace)
        try:
            records.save(home, FRAME.assign(value=2.0), manifest() | {"commit": "new"})
        except KeyboardInterrupt:
            assert steps < 3
        monkeypatch.setattr(os, "replace", real)
        found = records.load(PAPER, "fig1", "quick", home)
        new = (found.frame["value"] == 2.0).all()
        assert new == (found.manifest["commit"] == "new") == (steps >= 2)
        assert records.load(PAPER, "fig1", "quick", home).frame.equals(found.frame)


def test_a_first_record_is_finished_by_its_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_put_in_place", lambda *_: None)
    records.save(tmp_path, FRAME, manifest())
    monkeypatch.undo()
    assert records.load(PAPER, "fig1", "quick", tmp_path).manifest["paper"] == PAPER
    assert len(list((tmp_path / PAPER).iterdir())) == 2


def test_a_file_is_whole_or_not_there(tmp_path):
    path, victim = tmp_path / "a.json", tmp_path / "victim"
    victim.write_bytes(b"mine")
    path.symlink_to(victim)
    left, fresh = (tmp_path / f".a.json.{i}.part" for i in "12")
    for part in (left, fresh):
        part.write_bytes(b"half")
    os.utime(left, (0, 0))
    files.publish(path, b"whole")
    assert path.read_bytes() == b"whole" and victim.read_bytes() == b"mine"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o644
    assert not left.exists() and fresh.exists(), "another process may be writing it"


def test_digests_differ_by_value_type_and_shape():
    a = np.arange(6.0)
    things = [a, a + 1e-12, a.astype("f4"), a.reshape(2, 3), [a], [a, a], "a", None, 1, 1.0]
    assert len({files.digest(thing) for thing in things}) == len(things)
    assert files.digest(a) == files.digest(torch.arange(6.0).double()) == files.digest(a.copy())
    assert files.digest("ab", "c") != files.digest("a", "bc")


@dataclasses.dataclass
class Holds:
    """Something with a field; its parts may hold it in turn."""

    field: object


def test_digests_see_what_is_not_printed():
    """Each pair prints alike, or with its place in memory, which is another in every process."""
    long, other = np.zeros(2000), np.zeros(2000)
    other[1000] = 1
    pairs = [
        (long, other),
        ({"a": long}, {"a": other}),
        (Holds(long), Holds(other)),
        (Holds([{1: long}]), Holds([{1: other}])),
        (momentum(0.5), momentum(0.9)),
        (Holds(lambda t: 0.5), Holds(lambda t: 0.9)),
        (functools.partial(clip, 1.0), functools.partial(clip, 2.0)),
        (Holds(long).__eq__, Holds(other).__eq__),
    ]
    for one, two in pairs:
        assert files.digest(one) != files.digest(two), one
    assert files.digest(momentum(0.5)) == files.digest(momentum(0.5))
    assert files.digest(Holds(long)) == files.digest(Holds(long.copy()))
    itself = Holds(0)
    itself.field = [itself]
    assert files.digest(itself) != files.digest(Holds([0]))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(FedlibError, match=r"Cannot write to .*file.*--out"):
        records.save(tmp_path / "file", FRAME, manifest())
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(FedlibError, match=r"Permission denied.*--out"):
        records.save(tmp_path / "locked", FRAME, manifest())


@pytest.mark.parametrize("which", ["csv.gz", "json"])
def test_a_corrupt_record_is_named(which, tmp_path):
    path = stored(tmp_path).path.parent / f"fig1.quick.{which}"
    path.write_bytes(path.read_bytes()[:-20])
    words = rf"cannot be read \(fig1\.quick\.{which}: .* make it again"
    with pytest.raises(FedlibError, match=words):
        records.load(PAPER, "fig1", "quick", tmp_path)


def test_a_damaged_manifest_among_those_that_ship_is_named(monkeypatch, tmp_path):
    page = tmp_path / "e1.quick.json"
    page.write_text("{")
    monkeypatch.setattr(records, "_pages", lambda: [("mine", page)])
    with pytest.raises(FedlibError, match=r"e1\.quick\.json cannot be read"):
        records.manifests.__wrapped__()


# --- the records that ship ------------------------------------------------------------------------


@pytest.mark.slow
def test_shipped_records_are_whole_and_up_to_date():
    held = records.stored()
    assert held and [record.manifest for record in held] == records.manifests()
    for record in held:
        m = record.manifest
        assert record.path.name == f"{m['experiment']}.{m['profile']}.csv.gz"
        assert record.path.parent == paths.paper_folder(m["paper"]) / "results"
        column = "method" if "method" in record.frame else "run"
        assert {run["run"] for run in m["settings"].get("runs", [])} <= set(record.frame[column])
        assert set(record.frame["seed"]) <= {0, *m["seeds"]}
    stale = {f"{r.manifest['paper']}/{r.path.name[:-7]}": r.state.why
             for r in held if r.state.word == "stale"}  # fmt: skip
    listed = tomllib.loads((paths.data_folder() / "stale.toml").read_text())
    assert stale.keys() == listed.keys(), stale
    assert all(reason.strip() for reason in listed.values())
    files = {p for r in held for p in (r.path, r.manifest_path)}
    for folder in {r.path.parent for r in held}:
        assert not [p for p in folder.iterdir() if p not in files and not p.name.startswith(".")]


# --- provenance -----------------------------------------------------------------------------------


def test_provenance_tells_everything_in_one_line(tmp_path):
    line = stored(tmp_path).provenance()
    what = "Record fig1.quick, fashion-mnist, mlp 196 32 10, 2 seeds, "
    assert line == what + "CPU, 2026-05-04, commit aaaaaaaaa."
    changed = stored(tmp_path, commit="b" * 40 + "+", seeds=[1])
    assert "1 seed, " in changed.provenance() and "commit bbbbbbbbb+." in changed.provenance()


def test_provenance_calls_a_substitute_a_substitute(tmp_path):
    assert "digits, a substitute" in stored(tmp_path, profile="smoke").provenance()
    line = stored(tmp_path, fidelity="pixels re-encoded").provenance()
    assert "fashion-mnist (pixels re-encoded)" in line
    theirs = stored(tmp_path, settings=dict(dataset="mnist")).provenance()
    assert ", mnist, 2 seeds" in theirs, "another paper has it itself"
    assert "mnist" not in stored(tmp_path, data={}, fidelity="none").provenance()


# --- fresh, checked, stale ------------------------------------------------------------------------


def test_a_record_of_today_is_fresh_and_says_nothing(tmp_path):
    record = stored(tmp_path)
    assert record.state == ("fresh", "") and "tale" not in record.provenance()


STREAM, GRAD = "fedlib.engine.rng:stream", "fedlib.engine.tasks:Task.grad"
TRAIN = "train-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda m: dict(settings=m["settings"] | {"local_steps": 6}), "Settings.*local_steps"),
        (lambda m: dict(cards={"fashion-mnist": "0"}), "data card.*fashion-mnist"),
        (lambda m: dict(code=m["code"] | {"Task.grad": "0"}), "Code.*Task.grad"),
        (lambda m: dict(code={k: v for k, v in m["code"].items() if k != STREAM}), STREAM),
        (lambda m: dict(data={TRAIN: "0" * 64}), "Data have changed: fashion-mnist"),
    ],
)
def test_what_makes_a_record_stale(change, why, tmp_path):
    record = stored(tmp_path, **change(manifest()))
    assert record.state.word == "stale" and re.search(why, record.state.why)
    assert record.provenance().endswith("Stale: " + record.state.why)


def test_an_experiment_that_is_gone(tmp_path, monkeypatch):
    record = stored(tmp_path)

    def gone(*names):
        raise FedlibError("Unknown experiment.")

    monkeypatch.setattr(catalogue, "settings", gone)
    assert record.state == ("stale", "The experiment is no longer defined at this profile.")


def test_words_about_an_experiment_make_nothing_stale(tmp_path):
    told = {"title": "Another title", "where": "elsewhere", "seeds": 99}
    assert stored(tmp_path, settings=manifest()["settings"] | told).state.word == "fresh"


def test_changed_code_that_the_small_run_went_through_is_checked(tmp_path):
    now, before = manifest()["code"], manifest()["code"] | {GRAD: "0", "gone": "1"}
    today = freshness.present_code(catalogue.settings(PAPER, "fig1", "smoke"))["code"]
    small = today | {GRAD: "0", "gone": "1"}  # what the small run went through then
    then = freshness.short_digest(small)
    noted = freshness.stamp(freshness.stamp({}, small), today)
    seen, tables = noted["seen"], noted["tables"]
    for found, word in (
        (noted, "checked"),
        (noted | {"seen": seen | {GRAD: ["0"]}}, "stale"),  # the present code was never run
        (noted | {"seen": seen | {GRAD: [now[GRAD]]}}, "stale"),  # nor the record's
        (noted | {"seen": seen | {"gone": []}}, "stale"),
        (noted | {"tables": tables[:1]}, "stale"),  # both parts, but never all of them together
        (noted | {"tables": tables[1:]}, "stale"),
        ({}, "stale"),
    ):
        records.save(tmp_path, FRAME, manifest(profile="smoke") | found)
        record = stored(tmp_path, code=before, small=then)
        assert record.state.word == word, found
    records.save(tmp_path, FRAME, manifest(profile="smoke") | noted)
    record = stored(tmp_path, code=before, small=then)
    assert record.state.why.startswith(f"Code has changed ({GRAD}, gone)")
    assert "Checked: the code has changed since" in record.provenance()
    assert stored(tmp_path, code=before).state.word == "stale", "which small run, is not known"
    other = manifest()["settings"] | {"local_steps": 6}
    changed = stored(tmp_path, code=before, small=then, settings=other)
    assert changed.state.word == "stale", "other settings are not excused by a small run"
    page = tmp_path / PAPER / "fig1.smoke.json"
    page.write_text(page.read_text().replace('"rows": "', '"rows": "0'))
    assert stored(tmp_path, code=before, small=then).state.word == "stale", "an edited small run"


def older(code):
    """Return a table as it was written before: by plain names, those of one name together."""
    short = {}
    for name, found in code.items():
        short.setdefault(name.partition(":")[2], set()).add(found.partition(".")[0])
    return {name: "+".join(sorted(found)) for name, found in short.items()}


def test_a_table_with_plain_names_is_compared_hash_by_hash(tmp_path):
    before = older(manifest()["code"])
    assert before.keys() >= {"Task.grad", "stream"} and "+" in before["_checked"]
    assert stored(tmp_path, code=before).state.word == "fresh"
    two = before["_checked"].split("+")
    for name, found in (("stream", "0"), ("_checked", two[0]), ("_checked", f"{two[0]}+0")):
        state = stored(tmp_path, code=before | {name: found}).state
        assert state.word == "stale" and name in state.why, "one of two of that name has changed"
    unknown = {name: found for name, found in before.items() if name != "stream"}
    small = freshness.present_code(catalogue.settings(PAPER, "fig1", "smoke"))["code"]
    noted = freshness.stamp(freshness.stamp({}, older(small)), small)
    for found, word in ((freshness.stamp({}, older(small)), "stale"), (noted, "checked")):
        records.save(tmp_path, FRAME, manifest(profile="smoke") | found)
        record = stored(tmp_path, code=unknown, small=freshness.short_digest(older(small)))
        assert record.state.word == word, "what nobody looked for then was seen since, or was not"


def test_a_definition_that_has_moved_has_not_changed(tmp_path):
    code = manifest()["code"]
    moved = {name.replace("fedlib.engine.rng:", "fedlib.chance:"): f for name, f in code.items()}
    assert moved != code and stored(tmp_path, code=moved).state.word == "fresh"
    moved["fedlib.chance:stream"] = "0"
    assert "fedlib.chance:stream" in stored(tmp_path, code=moved).state.why


# --- data made again ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "experiment", "profile"),
    [
        ("participation", "fig1", "smoke"),  # digits, that come with scikit-learn
        ("vertical", "credit-convex", "smoke"),  # columns that come with it
        ("vertical", "e2006-robust", "smoke"),  # columns that are made
        ("tiers", "fig4", "smoke"),  # made
        ("hierarchy", "fig8", "smoke"),  # made from digits
    ],
)
def test_data_that_can_be_made_are_made_again(paper, experiment, profile, monkeypatch):
    m = records.load(paper, experiment, profile).manifest
    settings = catalogue.settings(paper, experiment, profile)
    now = m | freshness.present_code(settings)
    assert freshness.judge_record(now, settings, again=True) == ("fresh", "")
    (part,) = m["data"].keys() - {"as used"}
    other = now | {"data": m["data"] | {part: "0" * 64}}
    told = ("stale", f"Data have changed: {settings['dataset']}.")
    assert freshness.judge_record(other, settings, again=True) == told
    assert freshness.judge_record(now | {"data": {"as used": "0"}}, settings, again=True) == told


@pytest.mark.parametrize("module", ["generators", "writers"])
def test_a_generator_that_makes_other_data_is_noticed(module, monkeypatch):
    """Whatever the hash of the code says: here only what the generator computes has changed."""
    paper, experiment, kind = ("tiers", "fig4", "ehr-like")
    if module == "writers":
        paper, experiment, kind = ("hierarchy", "fig8", "writers")
    make = generators.GENERATORS[kind]

    def otherwise(*args, **options):
        x, y = make(*args, **options)
        return x, y[::-1].copy()

    otherwise.__signature__ = inspect.signature(make)
    monkeypatch.setitem(generators.GENERATORS, kind, otherwise)
    monkeypatch.setattr(generators, "_kept", {})
    freshness._made.cache_clear()
    settings = catalogue.settings(paper, experiment, "smoke")
    now = records.load(paper, experiment, "smoke").manifest | freshness.present_code(settings)
    assert freshness.judge_record(now, settings, again=True).why.startswith("Data have changed")
    assert freshness.judge_record(now, settings).word == "fresh", (
        "nothing is made where nobody asks"
    )
    freshness._made.cache_clear()


def test_rows_of_a_bundled_set_that_are_others_are_told_not_thrown(monkeypatch):
    freshness._made.cache_clear()
    held = sklearn.datasets.load_breast_cancer()
    held.data = held.data + 1
    monkeypatch.setattr(sklearn.datasets, "load_breast_cancer", lambda: held)
    settings = catalogue.settings("vertical", "credit-convex", "smoke")
    now = records.load("vertical", "credit-convex", "smoke").manifest | freshness.present_code(
        settings
    )
    assert freshness.judge_record(now, settings, again=True).word == "stale"
    freshness._made.cache_clear()


# --- rows that are not the manifest's -------------------------------------------------------------


def test_an_edited_row_is_noticed(tmp_path):
    record = stored(tmp_path)
    rows = gzip.decompress(record.path.read_bytes()).replace(b"0.3333333", b"3.333333")
    record.path.write_bytes(gzip.compress(rows))
    with pytest.raises(FedlibError, match=r"fig1\.quick\.csv\.gz is not the one its manifest"):
        records.load(PAPER, "fig1", "quick", tmp_path)


@pytest.mark.parametrize(
    "edit", [{"profile": "paper"}, {"paper": "tiers"}, {"experiment": "fig2"}, {"rows": "0"}]
)
def test_an_edited_manifest_is_noticed(edit, tmp_path):
    page = stored(tmp_path).manifest_path
    page.write_text(json.dumps(json.loads(page.read_text()) | edit))
    with pytest.raises(FedlibError, match="manifest"):
        records.load(PAPER, "fig1", "quick", tmp_path)


def test_a_manifest_without_the_hash_of_its_rows_is_refused(tmp_path):
    page = stored(tmp_path).manifest_path
    held = json.loads(page.read_text())
    del held["rows"]
    page.write_text(json.dumps(held))
    with pytest.raises(FedlibError, match="'rows' is missing"):
        records.load(PAPER, "fig1", "quick", tmp_path)


def test_settings_that_were_taken_out_are_noticed(tmp_path):
    assert stored(tmp_path, settings={}).state.word == "stale"


@pytest.mark.parametrize("text", ["null", "[]", "3", "[" * 100_000])
@pytest.mark.parametrize("name", ["fig1.quick.json", ".fig1.quick.json.next"])
def test_a_manifest_of_another_kind(name, text, tmp_path):
    page = stored(tmp_path).manifest_path.with_name(name)
    page.write_text(text)
    if name.startswith("."):  # what waits for other rows is passed over
        assert records.load(PAPER, "fig1", "quick", tmp_path).manifest["seeds"] == [1, 2]
        return
    with pytest.raises(FedlibError, match="quick.json is not as|cannot be read"):
        records.load(PAPER, "fig1", "quick", tmp_path)


@pytest.mark.parametrize("name", ["fig1.quick.json", "fig1.quick.csv.gz"])
def test_a_pipe_is_not_waited_for(name, tmp_path):
    place = stored(tmp_path).path.with_name(name)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(FedlibError, match="not a regular file"):
        records.load(PAPER, "fig1", "quick", tmp_path)


# --- comparing two runs ---------------------------------------------------------------------------


def test_differences():
    assert records.differences(FRAME, FRAME, True) == ""
    close, off = (
        FRAME.assign(value=[1 / 3 * (1 + 1e-6), np.nan]),
        FRAME.assign(value=[0.34, np.nan]),
    )
    assert records.differences(FRAME, close, True) == ""
    assert "1 of 2 values" in records.differences(FRAME, off, True)
    assert records.differences(FRAME, FRAME.assign(value=[0.335, np.nan]), False) == ""
    said = records.differences(FRAME, FRAME.assign(value=[0.5, 1.0]), False)
    assert said.startswith("2 of 2") and said.endswith("now 0.5"), "the first is named"
    many = pd.concat([FRAME.assign(value=[0.3, 0.4])] * 5, ignore_index=True)
    for off, told in ((2, False), (3, True)):
        other = many.assign(value=np.where(np.arange(10) < off, 0.7, many["value"]))
        assert bool(records.differences(many, other, False)) == told, "four in five agree"
        assert records.differences(many, other, True)
    assert "other runs" in records.differences(FRAME, FRAME.assign(seed=[1, 2]), True)
    assert "1 rows" in records.differences(FRAME[:1], FRAME, True)


def test_settings_of_another_kind_are_stale_and_no_error(tmp_path):
    s = json.loads(json.dumps(catalogue.settings(PAPER, "fig1", "quick"))) | {"kind": 3}
    state = stored(tmp_path, settings=s).state
    assert state.word == "stale" and "kind" in state.why


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_a_time_is_not_below_zero(seconds, tmp_path):
    record = stored(tmp_path)
    record.manifest_path.write_text(json.dumps(record.manifest | {"wall_seconds": seconds}))
    with pytest.raises(FedlibError, match="wall_seconds"):
        records.load(PAPER, "fig1", "quick", tmp_path)


def test_rows_of_other_seeds_than_the_manifest_s_are_stale(tmp_path):
    held = records.load("hierarchy", "counts", "smoke")
    manifest = held.manifest | {"seeds": held.manifest["seeds"][:1]}
    records.save(tmp_path, held.frame, manifest)
    state = records.load("hierarchy", "counts", "smoke", tmp_path).state
    assert state.word == "stale" and "seeds that the manifest has not: [2]" in state.why


def test_what_a_reader_does_to_rows_stays_with_him(tmp_path):
    frame = stored(tmp_path).frame
    frame["value"] *= 2
    assert records.load(PAPER, "fig1", "quick", tmp_path).frame["value"][0] == pytest.approx(1 / 3)


def test_a_save_that_fails_halfway_leaves_nothing_that_waits(tmp_path):
    (tmp_path / PAPER / "fig1.quick.csv.gz").mkdir(parents=True)
    with pytest.raises(FedlibError, match="Cannot write"):
        records.save(tmp_path, FRAME, manifest())
    assert [p.name for p in (tmp_path / PAPER).iterdir()] == ["fig1.quick.csv.gz"]


def test_seeds_that_diverged_apart_are_joined_as_if_side_by_side(tmp_path):
    """Alone a run ends where it was lost; beside others its rows go on, and are empty."""
    rows = [dict(run="a", seed=s, round=t, split="train", metric="loss",
                 value=1.0 if t < ends else np.nan)
            for s, ends in ((1, 2), (2, 4)) for t in range(ends + 1)]  # fmt: skip
    frame = records._to_the_end(pd.DataFrame(rows), {"a": {"1": 2, "2": 4}})
    ends = frame.sort_values(["seed", "round"]).groupby("seed")
    assert ends["round"].apply(list).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert ends["value"].count().tolist() == [2, 4]


def test_a_joined_record_began_when_it_says():
    joined = manifest(joined=["x", "y"], looked="2026-01-02T03:04:05+00:00")
    assert records.look_dates(joined) == ["2026-01-02T03:04:05+00:00"]


def test_what_has_no_attributes_has_one_digest():
    class Law:
        expected = 1.0

    assert files.digest(Law()) == files.digest(Law())


def test_a_file_of_another_process_may_vanish(tmp_path, monkeypatch):
    (tmp_path / ".a.txt.0.part").write_text("")

    def gone(self):
        raise FileNotFoundError(2, "gone", str(self))

    monkeypatch.setattr(type(tmp_path), "lstat", gone)
    files.publish(tmp_path / "a.txt", b"whole")
    assert (tmp_path / "a.txt").read_bytes() == b"whole"
