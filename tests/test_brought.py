"""What a reader brings of the papers' data, and what changes with it, is computed and runs."""

from __future__ import annotations

import shlex
import tomllib

import numpy as np
import pytest
from typer.testing import CliRunner

from fedlib import datasets, paths
from fedlib.errors import FedlibError
from fedlib.lab.batch.grid import assignments
from fedlib.lab.cli import app
from fedlib.lab.evidence import brought, catalogue, claims, experiments

SETS = ["e2006-tfidf", "femnist", "givemesomecredit", "mimic3-ihm", "modelnet40-12view", "news20",
        "shakespeare", "uci-credit", "webspam", "yearprediction-msd"]  # fmt: skip


def pages() -> dict[str, dict]:
    return {paper: tomllib.loads((home / "experiments.toml").read_text("utf-8"))
            for paper, home in paths.papers("claims.toml").items()}  # fmt: skip


def test_every_set_that_is_never_downloaded_says_what_to_bring():
    assert brought.to_bring() == SETS
    for name, card in datasets.all_cards().items():
        assert bool(card.bring) == card.folder == (name in SETS)
        if card.bring:
            assert card.bring.files in card.if_missing and card.bring.source in card.if_missing


@pytest.mark.parametrize("name", SETS)
def test_experiments_on_the_set_itself_are_found(name):
    direct = {(paper, experiment)
              for paper, page in pages().items() for experiment, table in page.items()
              if table.get("paper", {}).get("dataset") == name and paper != "methods"}  # fmt: skip
    found = list(brought.uses(name))
    assert {use[:2] for use in found if use.instead == name} >= direct and found
    assert all(not use.changes for use in found if use.instead == name)
    assert any(use.claims for use in found)


def test_substitutes_make_room_with_a_model_that_fits():
    (fig8,) = (use for use in brought.uses("femnist") if use.experiment == "fig8")
    assert fig8.instead == "writers-mnist" and "HFL-C8" in fig8.claims
    assert fig8.changes == {"dataset": "femnist", "model": ["lenet", 1, 28, 62]}
    ids = {claim for use in brought.uses("mimic3-ihm") for claim in use.claims}
    asked = {c["id"] for c in claims.claims_of("tiers") if "mimic3-ihm" in c.get("data", ())}
    assert {"TDCD-C4", "TDCD-C11"} <= ids <= asked


@pytest.mark.parametrize("name", SETS)
def test_the_commands_are_ones_that_studies_take(name):
    lines = [shlex.split(line) for line in brought.commands(name)]
    assert lines[0] == ["fedlib", "data", "get", name]
    made = set()
    for line in lines:
        if line[:2] != ["fedlib", "run"]:
            continue
        paper, experiment, profile = line[2], line[3], line[5]
        changes = assignments([v for k, v in zip(line, line[1:], strict=False) if k == "--set"])
        s = catalogue.change(catalogue.settings(paper, experiment, profile), changes)
        catalogue.check_experiment(paper, experiment, profile, changes)
        assert s["dataset"] == name
        assert "tuned" not in s or (paper, s["tuned"], profile) in made, "rates come first"
        made.add((paper, experiment, profile))


def test_the_command_line_says_it(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    text = CliRunner().invoke(app, ["data", "card", "femnist"]).output
    place = f"not here. Its folder: {tmp_path / 'femnist'}"
    for part in ("fed_emnist_train.h5", "TensorFlow Federated", "HFL-C8", "notebooks/03_hierarchy"):
        assert part in text
    assert "fedlib data get femnist" in text and place in text
    assert "Bring" not in CliRunner().invoke(app, ["data", "card", "digits"]).output
    with pytest.raises(
        FedlibError, match="Who gives it out.*What it changes: fedlib data card fem"
    ):
        datasets.get("femnist")


@pytest.mark.slow
def test_a_small_file_goes_all_the_way_to_a_finding(tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    (tmp_path / "femnist").mkdir()
    rng = np.random.default_rng(0)
    for split, n in (("train", 30), ("test", 6)):
        with h5py.File(tmp_path / "femnist" / f"fed_emnist_{split}.h5", "w") as file:
            for writer in range(24):
                file[f"examples/f{writer:04d}/pixels"] = rng.random((n, 28, 28), dtype="f4")
                file[f"examples/f{writer:04d}/label"] = rng.integers(0, 62, n)
    changes = {"dataset": "femnist", "model": ["softmax", 784, 62], "time": 60.0}
    with pytest.warns(UserWarning, match="unverified"):
        for name in ("rates-8", "fig8", "fig8-one-rate"):
            experiments.run("hierarchy", name, "smoke", out=tmp_path / "runs", progress=False,
                            device="cpu", changes=changes)  # fmt: skip
    (row,) = claims.judge("hierarchy", tmp_path / "runs", ["HFL-C8"])
    assert row["data"] == "the paper's set, another copy" and row["finding"] != "no record"
