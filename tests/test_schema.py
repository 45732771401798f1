"""Pages of facts have a shape: a misspelt key, a missing one or a wrong type is an error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NotRequired, get_origin, get_type_hints

import pytest

from fedlib import cards, datasets, paths, schema
from fedlib.errors import FedlibError
from fedlib.lab import job
from fedlib.lab.evidence import catalogue, claims, experiments, measures, records

STUDY = """
from typing import NotRequired
import pandas as pd
from fedlib.lab.job import Job, Outcome, Settings
from fedlib.schema import PositiveFloat

class Walk(Settings):
    rate: PositiveFloat
    window: NotRequired[int]

def walk(job: Job[Walk]) -> Outcome:
    rows = [dict(run=r["run"], seed=s, round=0, split="train", metric="loss", value=r["rate"])
            for r in job.settings["runs"] for s in job.seeds]
    return Outcome(pd.DataFrame(rows), {}, {})

def free(job: Job) -> Outcome:
    return walk(job)
"""
EXPERIMENTS = """
[common]
kind = "a_walk:walk"
[profiles.smoke]
seeds = 2
window = 3
[far]
where = "Figure 1"
title = "How far"
runs = [{ run = "slow", rate = 0.1 }, { run = "fast", rate = 2 }]
[far.quick]
seeds = 5
"""
CLAIMS = """
[[claim]]
id = "W-C1"
where = "Figure 1"
kind = "measured"
data = []
statement = "Fast is better."
smallest = { loss = 0.1 }

[[claim.check]]
what = "loss"
asks = "better"
experiment = "far"
measure = "advantage"
with = { a = "slow", b = "fast", metric = "loss", split = "train" }

[[claim.check]]
what = "end"
asks = "within"
bounds = [0, inf]
experiment = "far"
measure = "final"
with = { run = "slow", metric = "loss", split = "train" }
"""


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Add the paper ``walk``; calling the fixture edits one of its pages."""
    home = tmp_path / "papers" / "walk"
    home.mkdir(parents=True)
    (tmp_path / "a_walk.py").write_text(STUDY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDLIB_PAPERS", str(home.parent))
    texts = {"experiments": EXPERIMENTS, "claims": CLAIMS}

    def edit(page: str = "experiments", old: str = "", new: str = "") -> None:
        assert old in texts[page]
        for name, text in texts.items():
            edited = text.replace(old, new, 1) if name == page and old else text
            (home / f"{name}.toml").write_text(edited)
        for kept in (catalogue._read, claims._read, paths.about):
            kept.cache_clear()

    edit()
    yield edit
    sys.modules.pop("a_walk", None)


def test_what_is_right_passes_and_keeps_its_values(walk, tmp_path):
    record = experiments.run("walk", "far", "smoke", out=tmp_path / "out", progress=False)
    assert record.manifest["settings"]["window"] == 3
    assert record.frame["value"].tolist() == [0.1, 0.1, 2, 2]
    first, second = claims.claims_of("walk")[0]["check"]
    assert second["bounds"] == [0, float("inf")] and type(second["bounds"][0]) is int
    assert first["with"]["metric"] == "loss"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rate = 0.1", "raet = 0.1", ["run 'slow'", "'raet'", "Did you mean 'rate'"]),
        ("rate = 0.1", 'rate = "0.1"', ["run 'slow'", "'rate'", '"0.1"', "valid number"]),
        ("rate = 0.1", "rate = -1", ["run 'slow'", "'rate'", "-1", "greater than 0"]),
        ("rate = 0.1", "rate = true", ["run 'slow'", "'rate'", "true", "valid number"]),
        (", rate = 0.1", "", ["run 'slow'", "'rate' is missing"]),
        ('run = "fast"', 'run = "slow"', ["every run needs a name of its own"]),
        ('run = "fast",', "", ["every run needs a name of its own"]),
        ('run = "fast"', "run = [[1]]", ["every run needs a name of its own"]),
        ("window = 3", "windou = 3", ["[profiles.smoke]", "'windou'", "Did you mean 'window'"]),
        ("window = 3", "window = 3.5", ["[far] at smoke", "'window'", "3.5", "valid integer"]),
        ("seeds = 2", 'seeds = "2"', ["'seeds'", '"2"', "valid integer"]),
        ("seeds = 2", "seeds = 0", ["'seeds'", "greater than 0"]),
        ("[common]", "[common]\nwindou = 3", ["[common]", "Did you mean 'window'"]),
        ('title = "How far"', 'tilte = "How far"', ["[far]", "'title' is missing"]),
        ('title = "How far"', 'title = "How far"\nspeed = 3', ["[far]", "unknown key 'speed'"]),
        ('title = "How far"', 'title = "How far"\nseeds = 7', ["[far]", "'seeds' is never used",
                                                               "[far.smoke]"]),
        ("[far.quick]", "[far.smoke]\nwnidow = 1", ["[far.smoke]", "Did you mean 'window'"]),
        ("[profiles.smoke]", "[profiles.small]", ["[profiles]", "small", "'smoke'"]),
        ("[profiles.smoke]", "[profile.smoke]", ["[profile]", "'where' is missing"]),
        ("[far.quick]", 'only = ["fast"]\n[far.quick]', ["[only]", "fast", "'smoke'"]),
        ('kind = "a_walk:walk"', "", ["no kind"]),
        ('kind = "a_walk:walk"', 'kind = "a_walk:run"', ["a_walk:run", "cannot be found"]),
        ('kind = "a_walk:walk"', "kind =", ["experiments.toml cannot be read", "line 3"]),
        ('where = "Figure 1"', "where = 1", ["[far]", "'where' is 1", "valid string"]),
        ("rate = 0.1", "each = 3", ["'each' is a table of lists", "got 3"]),
        ("rate = 0.1", "each = { rate = 0.1 }", ["'each' is a table of lists", "0.1"]),
        ('"slow", ', '"{spede}", each = { speed = [1] }, ', ["{spede}", "'each' has: speed"]),
        ("[far.quick]", '[far.quick]\n[near]\ntitle = ""\nlike = "fra"',
         ["[near]", "like = 'fra'", "no experiment"]),
        ("[far.quick]", '[far.quick]\n[near]\ntitle = ""\nlike = "common"',
         ["[near]", "like = 'common'", "no experiment"]),
    ],
)  # fmt: skip
def test_a_mistake_in_an_experiment_is_named(walk, old, new, words, tmp_path):
    walk("experiments", old, new)
    with pytest.raises(FedlibError) as told:
        experiments.run("walk", "far", "smoke", out=tmp_path / "out", progress=False)
    assert [word for word in words if word not in str(told.value)] == [], told.value
    assert not (tmp_path / "out").exists()


def test_runs_come_from_products_and_settings_from_a_likeness(walk):
    walk(old="""runs = [{ run = "slow", rate = 0.1 }, { run = "fast", rate = 2 }]
[far.quick]
seeds = 5
""", new="""tuned = "near"
each = { window = [1, 2] }
runs = [{ run = "{rate}, {window}", each = { rate = [0.1, 2] } }, { run = "w{window}", rate = 1 }]
[far.quick]
seeds = 5
[near]
like = "far"
title = "How near"
tunes = "rate"
[near.quick]
seeds = 3
""")  # fmt: skip
    assert catalogue.settings("walk", "far", "quick")["runs"] == [
        {"run": "0.1, 1", "rate": 0.1, "window": 1}, {"run": "0.1, 2", "rate": 0.1, "window": 2},
        {"run": "2, 1", "rate": 2, "window": 1}, {"run": "2, 2", "rate": 2, "window": 2},
        {"run": "w1", "rate": 1, "window": 1}, {"run": "w2", "rate": 1, "window": 2},
    ]  # fmt: skip
    far, near = (catalogue.settings("walk", name, "quick") for name in ("far", "near"))
    own = {"title": "How near", "tunes": "rate", "seeds": 3}
    assert near == {k: v for k, v in far.items() if k != "tuned"} | own


def test_a_study_that_names_no_settings_reads_what_it_likes(walk, tmp_path):
    walk("experiments", 'kind = "a_walk:walk"', 'kind = "a_walk:free"\nanything = [1, "two"]')
    record = experiments.run("walk", "far", "smoke", out=tmp_path / "out", progress=False)
    assert record.manifest["settings"]["anything"] == [1, "two"]
    assert job.settings_of("a_walk:free") is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('where = "Figure 1"', 'were = "Figure 1"', ["'W-C1'", "'were'", "Did you mean 'where'"]),
        ('kind = "measured"', 'kind = "measurd2"', ["'W-C1'", "'kind'", "measurd2", "'measured'"]),
        ('asks = "better"', 'asks = "betterr"', ["'W-C1' [check] number 1", "betterr", "'better'"]),
        ('measure = "final"', 'measure = "finale"', ["W-C1", "'finale'", "Did you mean 'final'"]),
        ('a = "slow", b', 'c = "slow", b', ["W-C1", "'loss'", "unknown key 'c'", "metric"]),
        ('a = "slow", b', "b", ["W-C1", "'a' is missing"]),
        ('split = "train"', "split = 3", ["'loss'", "'split' is 3"]),
        ("bounds = [0, inf]", "", ["W-C1", "bounds belong"]),
        ("bounds = [0, inf]", "bounds = [1, 0]", ["lower and an upper", "[1, 0]"]),
        ("bounds = [0, inf]", "bounds = [nan, 0]", ["lower and an upper", "nan"]),
        ("bounds = [0, inf]", "bounds = [0]", ["lower and an upper"]),
        ("smallest = { loss = 0.1 }", "", ["names no smallest difference"]),
        ("smallest = { loss = 0.1 }", "smallest = { loss = -0.1 }", ["smallest", "above 0"]),
        ("[[claim]]", CLAIMS + "[[claim]]", ["W-C1", "another claim has this id"]),
        ('kind = "measured"', 'kind = "measured"\nexpected = "confirmes"',
         ["W-C1", "Did you mean 'confirmed'"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_claim_is_named(walk, old, new, words):
    walk("claims", old, new)
    with pytest.raises(FedlibError) as told:
        claims.claims_of("walk")
    assert [word for word in words if word not in str(told.value)] == [], told.value


def test_a_slope_of_nothing_is_no_measurement(walk, tmp_path):
    record = experiments.run("walk", "far", "smoke", out=tmp_path / "out", progress=False)
    with pytest.raises(measures.MissingRows, match="two values of round"):
        measures.slope(record, "slow", "loss", "round")
    with pytest.raises(measures.MissingRows, match="no rows"):
        measures.slope(record, "slwo", "loss", "round")
    with pytest.raises(FedlibError, match=r"far\.smoke.*'rond'\. Did you mean 'round'"):
        measures.slope(record, "slow", "loss", "rond")
    with pytest.raises(FedlibError, match="Did you mean 'seed'"):
        measures.largest(record, "slow", "loss", sede=1)


@pytest.mark.parametrize("paper", catalogue.papers())
def test_the_book_s_own_pages_are_sound(paper):
    for name in catalogue.experiment_names(paper):
        for profile in catalogue.profiles(paper, name):
            catalogue.check_experiment(paper, name, profile)
    for claim in claims.claims_of(paper):
        for check in claim.get("check", []):
            assert {*claims.experiments(check)} <= {*catalogue.experiment_names(paper)}, claim["id"]


def test_a_card_is_checked(tmp_path, monkeypatch):
    shutil.copytree(paths.data_folder() / "datasets", tmp_path / "datasets")
    monkeypatch.setattr("fedlib.cards.data_folder", lambda: tmp_path)
    page = tmp_path / "datasets" / "mnist.toml"
    text = page.read_text("utf-8")
    for old, new, words in (
        ("licence =", "license =", ["mnist.toml", "'license'", "Did you mean 'licence'"]),
        ("train = 60000", 'train = "60000"', ["'train'", "valid integer"]),
        ("scale = 255", "scael = 255", ["[normalisation]", "Did you mean 'scale'"]),
        ("sha256 =", "sha265 =", ["[files] 'train-images-idx3-ubyte.gz'", "Did you mean 'sha256'"]),
    ):
        assert old in text
        page.write_text(text.replace(old, new, 1))
        with pytest.raises(FedlibError) as told:
            datasets.card("mnist")
        assert [word for word in words if word not in str(told.value)] == [], told.value
    page.write_text(text)
    card = datasets.card("mnist")
    assert card.shape == (1, 28, 28) and card.scale == 255 and card.files[0].urls[0][:4] == "http"


def test_a_paper_s_own_page_is_checked(walk, tmp_path):
    page = tmp_path / "papers" / "walk" / "paper.toml"
    page.write_text('shrot = "Walks"')
    with pytest.raises(FedlibError, match=r"paper\.toml .*\n.*'shrot'\. Did you mean 'short'"):
        paths.papers()
    page.unlink()


def test_without_pydantic_pages_read_the_same_and_experiments_with_a_warning(monkeypatch):
    every = datasets.all_cards()
    monkeypatch.setattr(schema, "pydantic", None)
    cards._read.cache_clear()
    assert datasets.all_cards() == every
    catalogue._read.cache_clear()
    with pytest.warns(UserWarning, match="unchecked"):
        held = {
            e: catalogue.settings("tiers", e, "smoke") for e in catalogue.experiment_names("tiers")
        }
    monkeypatch.undo()
    catalogue._read.cache_clear()
    assert held == {
        e: catalogue.settings("tiers", e, "smoke") for e in catalogue.experiment_names("tiers")
    }


def test_many_faults_are_told_shortly():
    with pytest.raises(FedlibError) as told:
        schema.conform({f"k{n}": n for n in range(30)}, schema.Page, "A page")
    lines = str(told.value).splitlines()
    assert len(lines) == 2 + schema.FAULTS_SHOWN and lines[-1].strip() == "and 25 more."


def test_every_key_of_a_manifest_is_known_and_needed():
    held = records.load("participation", "fig1").manifest
    hints = get_type_hints(records.Manifest, include_extras=True)
    needed = {key for key, hint in hints.items() if get_origin(hint) is not NotRequired}
    for key in held:
        less = {k: v for k, v in held.items() if k != key}
        if key in needed:
            with pytest.raises(FedlibError, match=f"'{key}' is missing"):
                schema.conform(less, records.Manifest, "it")
    with pytest.raises(FedlibError, match="Did you mean 'device'"):
        schema.conform(held | {"devise": "x"}, records.Manifest, "it")
    assert {"rows", "settings", "seeds", "code", "commit", "diverged"} <= needed
