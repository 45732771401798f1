"""FEMNIST's published files: tiny ones of that form are read, and faults are named."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fedlib import datasets
from fedlib.datasets import femnist
from fedlib.errors import FedlibError

WRITERS = {"f0002_01": (4, 2), "f0000_14": (3, 1), "f0001_41": (5, 3)}


def arrays(writer: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([*writer.encode(), len(split)])
    n = WRITERS[writer][split == "test"]
    return rng.random((n, 28, 28), dtype=np.float32), rng.integers(0, 62, n).astype(np.int32)


@pytest.fixture
def folder(tmp_path):
    h5py = pytest.importorskip("h5py")
    held = tmp_path / "femnist"
    held.mkdir()
    for split in ("train", "test"):
        with h5py.File(held / f"fed_emnist_{split}.h5", "w") as file:
            for writer in WRITERS:
                pixels, label = arrays(writer, split)
                file[f"examples/{writer}/pixels"] = pixels
                file[f"examples/{writer}/label"] = label
    return held


def load(folder, **options):
    return femnist.load_femnist(folder, progress=False, **options)


def change(folder, split, writer, **what) -> None:
    import h5py

    with h5py.File(folder / f"fed_emnist_{split}.h5", "r+") as file:
        group = file["examples"].require_group(writer)
        for key, value in what.items():
            if key in group:
                del group[key]
            if value is not None:
                group[key] = value


def test_every_writer_is_an_owner(folder):
    data = load(folder, normalise=False)
    own = datasets.owners(data)
    assert own.names == ("f0000_14", "f0001_41", "f0002_01") and own.sizes.tolist() == [3, 5, 4]
    assert [len(part) for part in own.test_parts] == [1, 3, 2]
    assert data.train_x.shape == (12, 1, 28, 28) and data.train_x.dtype == np.float32
    for split, parts in (("train", own.train_parts), ("test", own.test_parts)):
        for writer, rows in zip(own.names, parts, strict=True):
            pixels, label = arrays(writer, split)
            assert np.array_equal(getattr(data, f"{split}_x")[rows, 0], pixels)
            assert np.array_equal(getattr(data, f"{split}_y")[rows], label)
    assert data.train_y.dtype == np.int64 and (data.card.train, data.card.test) == (12, 6)
    assert data.classes[:11] == (*"0123456789", "A") and data.classes[35:37] == ("Z", "a")


def test_pixels_are_standardised_with_training_constants(folder):
    raw, data = load(folder, normalise=False), load(folder)
    mean, std = raw.train_x.astype(float).mean(), raw.train_x.astype(float).std()
    assert data.card.mean == pytest.approx((mean,)) and data.card.std == pytest.approx((std,))
    np.testing.assert_allclose(data.test_x, (raw.test_x - mean) / std, atol=1e-5)


def test_the_spread_is_taken_in_parts():
    x = np.random.default_rng(0).random((2500, 1, 2, 2), dtype=np.float32) + 5
    assert femnist._constants(x) == pytest.approx((x.astype(float).mean(), x.astype(float).std()))
    assert femnist._constants(np.ones((3, 1, 2, 2), dtype=np.float32)) == (1.0, 1.0)


def test_the_first_writers_can_be_read_alone(folder):
    few, whole = load(folder, clients=2, normalise=False), load(folder, normalise=False)
    assert few.owners.names == whole.owners.names[:2]
    assert np.array_equal(few.train_x, whole.train_x[:8]) and len(few.test_x) == 4
    with pytest.raises(FedlibError, match="clients is a whole number of at least 1; got 0"):
        load(folder, clients=0)


def test_hashes_follow_the_content(folder):
    before = load(folder).hashes
    assert before == load(folder, normalise=False).hashes
    change(folder, "test", "f0000_14", label=np.array([7]))
    after = load(folder).hashes
    assert before["train"] == after["train"] and before["test"] != after["test"]
    change(folder, "train", "f0000_14", pixels=np.zeros((3, 28, 28)))
    assert (
        load(folder).hashes["train"] != before["train"]
        and load(folder).hashes["test"] == (after["test"])
    )


def test_hashes_follow_the_names(folder):
    import h5py

    before = load(folder).hashes
    for split in ("train", "test"):
        with h5py.File(folder / f"fed_emnist_{split}.h5", "r+") as file:
            file.move("examples/f0002_01", "examples/f0002_02")
    after = load(folder).hashes
    assert before["train"] != after["train"] and before["test"] != after["test"]


def refused(folder, *parts) -> None:
    with pytest.raises(FedlibError) as caught:
        load(folder)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("split", "writer", "what", "reason"),
    [
        ("train", "f0001_41", {"pixels": np.zeros((5, 28, 27))}, "got (5, 28, 27) and (5,)"),
        ("train", "f0001_41", {"label": np.zeros(4)}, "got (5, 28, 28) and (4,)"),
        ("train", "f0001_41", {"label": None}, "got (5, 28, 28) and None"),
        ("test", "f0001_41", {"label": np.zeros(0), "pixels": np.zeros((0, 28, 28))}, "(0,)"),
        ("test", "f0001_41", {"label": np.full(3, 62)}, "labels from 0 to 61"),
        ("test", "f0001_41", {"label": np.array([0, -1, 0])}, "-1 to 0"),
        ("train", "f0001_41", {"pixels": np.full((5, 28, 28), 255)}, "got 255 to 255"),
        ("train", "f0001_41", {"pixels": np.full((5, 28, 28), np.nan)}, "pixels from 0 to 1"),
        ("train", "f0000_00", {"label": np.zeros(1)}, "writer f0000_00"),
    ],
)
def test_what_is_not_as_published_is_named(folder, split, writer, what, reason):
    change(folder, split, writer, **what)
    refused(folder, f"fed_emnist_{split}.h5, writer {writer}", reason)


def test_files_and_writers_that_are_missing_are_named(folder, tmp_path):
    import h5py

    refused(tmp_path / "nowhere", "There is no folder", "fed_emnist_train.h5")
    with h5py.File(folder / "fed_emnist_test.h5", "r+") as file:
        del file["examples/f0002_01"]
    refused(folder, "fed_emnist_test.h5 has no writer f0002_01")
    with h5py.File(folder / "fed_emnist_train.h5", "r+") as file:
        del file["examples"]
    refused(folder, "fed_emnist_train.h5 has no group 'examples'")
    (folder / "fed_emnist_train.h5").write_bytes(b"<html>")
    refused(folder, "fed_emnist_train.h5 cannot be read")
    (folder / "fed_emnist_train.h5").unlink()
    refused(folder, "fed_emnist_train.h5 is missing")


def test_without_h5py_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused(tmp_path, "not installed", "pip install h5py")


def test_it_is_loaded_by_name_and_never_downloaded(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "empty"))
    with pytest.raises(FedlibError, match="never downloaded.*'writers-digits' needs nothing"):
        datasets.load("femnist")
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match="unverified"):
        data = datasets.load("femnist", progress=False)
    assert len(datasets.only(data, ["f0002_01"]).train_x) == 4


def test_what_the_reader_cannot_make_out_is_named(folder, monkeypatch):
    import h5py

    def broken(*_):
        raise RuntimeError("bad symbol table node signature")

    monkeypatch.setattr(h5py, "File", broken)
    with pytest.raises(FedlibError, match=r"fed_emnist_train.h5 cannot be read \(bad symbol"):
        load(folder)
