"""Published layouts: tiny folders are read as the benchmark would, and faults are named."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedlib import datasets
from fedlib.datasets import layouts
from fedlib.errors import FedlibError

HEADER = ["Hours", *layouts.VARIABLES]
EYES = "Glascow coma scale eye opening"
COLUMN = {name: i for i, name in enumerate(layouts.feature_names())}


def row(hour, **cells) -> list[str]:
    """Return one row of a stay; names of variables are given with underscores."""
    known = {name.replace("_", " "): value for name, value in cells.items()}
    assert set(known) <= set(HEADER)
    return [str(hour), *(known.get(name, "") for name in HEADER[1:])]


def mask(name: str) -> int:
    return COLUMN[f"mask->{name}"]


# --- one stay ------------------------------------------------------------------------------------


def test_there_are_76_columns_in_the_order_of_the_benchmark():
    names = layouts.feature_names()
    assert len(names) == len(set(names)) == 76
    assert names[:4] == [
        "Capillary refill rate->0.0", "Capillary refill rate->1.0",
        "Diastolic blood pressure", "Fraction inspired oxygen",
    ]  # fmt: skip
    assert names[58] == "pH" and names[59] == "mask->Capillary refill rate"
    assert names[75] == "mask->pH" and sum("->" not in name for name in names) == 12


def test_a_stay_without_measurements_is_normal_and_unmasked():
    x = layouts.discretise([], HEADER)
    assert x.shape == (48, 76) and (x == x[0]).all()
    assert x[0, COLUMN["Glucose"]] == 128 and x[0, COLUMN["Fraction inspired oxygen"]] == 0.21
    ones = {
        "Capillary refill rate->0.0",
        f"{EYES}->4 Spontaneously",
        "Glascow coma scale motor response->6 Obeys Commands",
        "Glascow coma scale total->15",
        "Glascow coma scale verbal response->5 Oriented",
    }
    assert {name for name in COLUMN if "->" in name and x[0, COLUMN[name]] == 1} == ones
    assert (x[:, 59:] == 0).all()


@pytest.mark.parametrize(
    ("hour", "step"),
    [(0, 0), (0.5, 0), (1, 0), (1.001, 1), (2, 1), (47.5, 47), (48, 47), (48.0000005, 47)],
)
def test_a_step_ends_with_its_full_hour(hour, step):
    x = layouts.discretise([row(hour, Glucose="200")], HEADER)
    assert np.flatnonzero(x[:, mask("Glucose")]).tolist() == [step]
    assert (x[:step, COLUMN["Glucose"]] == 128).all() and (x[step:, COLUMN["Glucose"]] == 200).all()


def test_rows_after_48_hours_are_left_out():
    x = layouts.discretise([row(48.01, Glucose="200"), row(90, Glucose="300")], HEADER)
    assert (x == layouts.discretise([], HEADER)).all()


def test_the_last_value_of_a_step_holds_and_is_carried_on():
    rows = [row(3.2, Glucose="100", pH="7.1"), row(3.7, Glucose="110"), row(9.5, Glucose="90")]
    x = layouts.discretise(rows, HEADER)
    glucose, ph = x[:, COLUMN["Glucose"]], x[:, COLUMN["pH"]]
    assert glucose[:3].tolist() == [128] * 3 and (glucose[3:9] == 110).all()
    assert (glucose[9:] == 90).all() and (ph[3:] == 7.1).all() and ph[2] == 7.4
    assert np.flatnonzero(x[:, mask("Glucose")]).tolist() == [3, 9]
    assert np.flatnonzero(x[:, mask("pH")]).tolist() == [3]


def test_categories_are_one_hot_and_carried_on():
    rows = [row(0.5, Glascow_coma_scale_eye_opening="None"),
            row(5.5, Glascow_coma_scale_eye_opening="To Pain")]  # fmt: skip
    x = layouts.discretise(rows, HEADER)
    eyes = [i for name, i in COLUMN.items() if name.startswith(f"{EYES}->")]
    assert len(eyes) == 8 and (x[:, eyes].sum(axis=1) == 1).all()
    assert (x[:5, COLUMN[f"{EYES}->None"]] == 1).all()
    assert (x[5:, COLUMN[f"{EYES}->To Pain"]] == 1).all()


def test_a_number_may_be_spelt_otherwise():
    x = layouts.discretise([row(0.5, Glascow_coma_scale_total="7.0")], HEADER)
    assert x[0, COLUMN["Glascow coma scale total->7"]] == 1


def test_columns_may_come_in_any_order():
    rows = [row(0.5, Glucose="200"), row(7, Heart_Rate="60", Glascow_coma_scale_total="9")]
    turned = [cells[::-1] for cells in rows]
    x = layouts.discretise(rows, HEADER)
    np.testing.assert_array_equal(layouts.discretise(turned, HEADER[::-1]), x)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(1, Glucose="high")], "Glucose is 'high'; a number"),
        ([row(1, pH="nan")], "pH is 'nan'; a number"),
        ([row("soon")], "Hours is 'soon'; a number"),
        ([row(-0.1)], "hour -0.1 comes after hour 0"),
        ([row(5), row(4)], "hour 4 comes after hour 5"),
        ([row(1, Glascow_coma_scale_eye_opening="Shut")], "opening is 'Shut'; expected one of To"),
        ([row(1)[:-1]], "a row of 17 cells under 18 columns"),
    ],
)
def test_a_stay_that_cannot_be_read_is_named(rows, reason):
    with pytest.raises(FedlibError, match=f"stay 7.*{reason}"):
        layouts.discretise(rows, HEADER, where="stay 7")


def test_a_missing_variable_is_named():
    with pytest.raises(FedlibError, match="lacks the column 'pH'"):
        layouts.discretise([], HEADER[:-1])


# --- the whole folder ----------------------------------------------------------------------------


def write(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.fixture
def mimic(tmp_path):
    folder = tmp_path / "mimic3-ihm"
    for split, stays in (("train", "abc"), ("test", "de")):
        for i, stay in enumerate(stays):
            rows = [
                HEADER,
                row(1, Glucose=str(100 + 10 * i), Glascow_coma_scale_eye_opening="None"),
            ]
            write(folder / split / f"{stay}.csv", rows)
        listed = [[f"{stay}.csv", i % 2] for i, stay in enumerate(stays)]
        write(folder / split / "listfile.csv", [["stay", "y_true"], *listed])
    return folder


def test_mimic_folder(mimic):
    raw = layouts.load_mimic(mimic, normalise=False, progress=False)
    assert raw.train_x.shape == (3, 48, 76) and raw.test_x.shape == (2, 48, 76)
    assert raw.train_x.dtype == np.float32 and raw.train_y.dtype == np.int64
    assert raw.train_y.tolist() == [0, 1, 0] and raw.test_y.tolist() == [0, 1]
    assert raw.train_x[:, 5, COLUMN["Glucose"]].tolist() == [100, 110, 120]
    assert (raw.train_x[:, :, COLUMN[f"{EYES}->None"]] == 1).all(), "'None' is a value here"
    assert raw.fidelity == "unverified" and len(raw.hashes["train"]) == 64
    assert (raw.card.train, raw.card.test) == (3, 2)


def test_mimic_is_standardised_with_training_constants_and_only_in_numbers(mimic):
    raw = layouts.load_mimic(mimic, normalise=False, progress=False)
    data = layouts.load_mimic(mimic, progress=False)
    at = COLUMN["Glucose"]
    mean, std = raw.train_x[..., at].mean(), raw.train_x[..., at].std()
    np.testing.assert_allclose(data.test_x[..., at], (raw.test_x[..., at] - mean) / std, rtol=1e-5)
    assert data.card.mean[at] == pytest.approx(110) and data.card.std[at] == pytest.approx(std)
    others = [i for name, i in COLUMN.items() if "->" in name]
    np.testing.assert_array_equal(data.train_x[..., others], raw.train_x[..., others])
    assert np.isfinite(data.train_x).all(), "a column that never varies is only centred"
    assert np.abs(data.train_x[..., COLUMN["Weight"]]).max() < 1e-6


def test_mimic_list_of_the_validation_split_is_preferred(mimic):
    write(mimic / "train_listfile.csv", [["stay", "y_true"], ["c.csv", 1]])
    data = layouts.load_mimic(mimic, progress=False)
    assert data.train_y.tolist() == [1] and len(data.test_y) == 2


def test_hashes_follow_the_content(mimic):
    before = layouts.load_mimic(mimic, progress=False).hashes
    write(mimic / "test" / "d.csv", [HEADER, row(2, Glucose="1")])
    after = layouts.load_mimic(mimic, progress=False).hashes
    assert before["train"] == after["train"] and before["test"] != after["test"]


def refused(load, folder, *parts):
    with pytest.raises(FedlibError) as caught:
        load(folder, progress=False)
    for part in parts:
        assert part in str(caught.value)


def test_mimic_odd_files_are_named(mimic, in_time):
    listed, stay = mimic / "train" / "listfile.csv", mimic / "train" / "a.csv"
    write(stay, [HEADER, row(1, Glucose="1" * 200_000)])
    refused(layouts.load_mimic, mimic, "a.csv cannot be read (field larger", "that listfile.csv")
    stay.unlink()
    os.mkfifo(stay)
    refused(layouts.load_mimic, mimic, "a.csv cannot be read (not a regular file)")
    for rows in (["y_true", "stay"], [1]), (["stay", "y_true"], ["", 1]):
        write(listed, rows)
        refused(layouts.load_mimic, mimic, "listfile.csv: the row", "names no stay")
    write(listed, [["stay", "y_true"], ["a\0.csv", 1]])
    refused(layouts.load_mimic, mimic, "a\0.csv cannot be read")
    with listed.open("wb") as file:
        file.truncate(10**12)
    refused(layouts.load_mimic, mimic, "listfile.csv cannot be read (1000000000000 bytes long")


def test_mimic_faults_are_named(mimic, tmp_path):
    refused(layouts.load_mimic, tmp_path / "nowhere", "no folder", "nowhere")
    listed = mimic / "train" / "listfile.csv"
    write(listed, [["stay", "label"], ["a.csv", 0]])
    refused(layouts.load_mimic, mimic, "listfile.csv", "'y_true'", "stay, label")
    write(listed, [["stay", "y_true"], ["a.csv", 2]])
    refused(layouts.load_mimic, mimic, "listfile.csv", "y_true is '2'")
    write(listed, [["stay", "y_true"], ["z.csv", 0]])
    refused(layouts.load_mimic, mimic, "z.csv is missing")
    write(listed, [["stay", "y_true"]])
    refused(layouts.load_mimic, mimic, "lists no stay")
    listed.unlink()
    refused(layouts.load_mimic, mimic, "listfile.csv is missing")


# --- ModelNet40 ----------------------------------------------------------------------------------


def grey(path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((8, 8, 3), value, dtype=np.uint8)
    pixels[:4] = 0
    Image.fromarray(pixels).save(path)


@pytest.fixture
def modelnet(tmp_path):
    folder = tmp_path / "modelnet40-12view"
    for split, objects in (
        ("train", ("cup_0002", "cup_0001", "bed_0001")),
        ("test", ("bed_0002",)),
    ):
        for i, name in enumerate(objects):
            for view in range(12, 0, -1):
                grey(folder / name[:3] / split / f"{name}_{view:03d}.png", 20 * view - 5 * i)
    (folder / "cup" / "test").mkdir()
    (folder / "readme.txt").write_text("hello")
    (folder / "bed" / "train" / "notes.txt").write_text("not an image")
    return folder


def test_modelnet_folder(modelnet):
    raw = layouts.load_modelnet(modelnet, size=4, normalise=False, progress=False)
    assert raw.train_x.shape == (3, 12, 4, 4) and raw.test_x.shape == (1, 12, 4, 4)
    assert raw.train_x.dtype == np.float32 and raw.train_y.dtype == np.int64
    assert raw.classes == ("bed", "cup") and raw.train_y.tolist() == [0, 1, 1]
    levels = np.rint(raw.train_x[:, :, 3, 0] * 255).astype(int)
    views = 20 * np.arange(1, 13)
    assert levels.tolist() == [(views - lower).tolist() for lower in (10, 5, 0)]
    assert (raw.train_x[:, :, :2] == 0).all() and raw.card.shape == (12, 4, 4)


def test_modelnet_is_standardised_with_training_constants(modelnet):
    raw = layouts.load_modelnet(modelnet, size=4, normalise=False, progress=False)
    data = layouts.load_modelnet(modelnet, size=4, progress=False)
    mean, std = raw.train_x.mean(), raw.train_x.std()
    np.testing.assert_allclose(data.test_x, (raw.test_x - mean) / std, atol=1e-5)
    assert data.card.mean == pytest.approx((mean,)) and data.card.std == pytest.approx((std,))


def test_modelnet_hashes_follow_the_images(modelnet):
    before = layouts.load_modelnet(modelnet, size=4, progress=False).hashes
    grey(modelnet / "cup" / "train" / "cup_0002_007.png", 3)
    after = layouts.load_modelnet(modelnet, size=4, progress=False).hashes
    assert before["train"] != after["train"] and before["test"] == after["test"]


def test_modelnet_names_of_shaded_renders_are_read(modelnet):
    for path in list(modelnet.rglob("*.png")):
        stem, view = path.stem[:-4], path.stem[-3:]
        path.rename(path.with_name(f"{stem}.obj.shaded_v{view}.png"))
    data = layouts.load_modelnet(modelnet, size=4, progress=False)
    assert data.train_x.shape == (3, 12, 4, 4)


def test_modelnet_odd_images_are_named(modelnet, in_time):
    image = modelnet / "cup" / "train" / "cup_0001_005.png"
    Image.new("1", (20_000, 10_000)).save(image)  # 25 kB
    refused(layouts.load_modelnet, modelnet, "cup_0001_005.png cannot be read", "200000000 pixels")
    image.unlink()
    image.symlink_to("/dev/zero")
    refused(layouts.load_modelnet, modelnet, "cup_0001_005.png cannot be read (not a regular file)")
    refused(layouts.load_modelnet, Path("~nobody-at-all"), "~nobody-at-all", "in full")


def test_modelnet_faults_are_named(modelnet, tmp_path):
    refused(layouts.load_modelnet, tmp_path / "nowhere", "no folder", "nowhere")
    refused(layouts.load_modelnet, modelnet / "bed", "CLASS/train")
    broken = modelnet / "cup" / "train" / "cup_0001_005.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    refused(layouts.load_modelnet, modelnet, "cup_0001_005.png cannot be read")
    broken.write_bytes(b"<html>")
    refused(layouts.load_modelnet, modelnet, "cup_0001_005.png cannot be read")
    broken.unlink()
    refused(layouts.load_modelnet, modelnet, "cup_0001 has 11 views", "1 to 12")
    broken.write_bytes(whole)
    grey(broken.with_name("cup_0001_013.png"), 1)
    refused(layouts.load_modelnet, modelnet, "cup_0001 has 13 views")


# --- by name -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mimic3-ihm", "modelnet40-12view"])
def test_a_folder_in_the_cache_is_loaded_by_name_and_never_downloaded(
    name, mimic, modelnet, tmp_path, monkeypatch
):
    monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path / "empty"))
    assert not datasets.cached(name) and datasets.verify(name)[0]["state"] == "missing"
    for ask in (datasets.load, datasets.get):
        with pytest.raises(
            FedlibError, match=f"'{name}' is never downloaded.*FEDLIB_DATA"
        ) as caught:
            ask(name)
        substitute = {"mimic3-ihm": "ehr-like", "modelnet40-12view": "shapes-12view"}[name]
        assert f"'{substitute}' needs nothing" in str(caught.value)
    for variable in ("FEDLIB_MIRROR", "FEDLIB_DATA"):
        monkeypatch.setenv(variable, str(tmp_path))
        assert datasets.cached(name) and datasets.get(name) == [tmp_path / name]
        with pytest.warns(UserWarning, match="unverified"):
            data = datasets.load(name, progress=False)
        assert data.name == name and len(data.train_x) == 3
        assert datasets.verify(name)[0]["fidelity"] == "unverified"
        monkeypatch.delenv("FEDLIB_MIRROR", raising=False)
