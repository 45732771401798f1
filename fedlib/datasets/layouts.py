"""Readers of folders that are not downloaded here: published layouts, put there by their owner.

Whoever has the right to use the data points at the folder. MIMIC-III is
read as the public in-hospital-mortality benchmark lays it out (H. Harutyunyan and others,
Multitask learning and benchmarking with clinical time series data, Scientific Data 6, 2019),
ModelNet40 as folders of twelve rendered views. Plays and FEMNIST have modules of their own,
`fedlib.datasets.plays` and `fedlib.datasets.femnist`.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlib.cards import Card, card
from fedlib.datasets.cards import Dataset
from fedlib.datasets.femnist import load_femnist
from fedlib.datasets.folders import content, existing, unreadable
from fedlib.datasets.plays import load_plays
from fedlib.errors import FedlibError

HOURS = 48
"""Length of a stay that is read, in hours; one step an hour."""

_EPS = 1e-6  # hours; the benchmark's tolerance at the edges of a step

# Variables in the benchmark's order, with the value that stands for "never measured" and, for a
# categorical one, its values in the order of the one-hot columns. Two charting systems spell the
# coma scales in two ways, and the benchmark keeps both spellings as values of their own.
VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Capillary refill rate": ("0.0", ("0.0", "1.0")),
    "Diastolic blood pressure": ("59.0", ()),
    "Fraction inspired oxygen": ("0.21", ()),
    "Glascow coma scale eye opening": (
        "4 Spontaneously",
        ("To Pain", "3 To speech", "1 No Response", "4 Spontaneously",
         "None", "To Speech", "Spontaneously", "2 To pain"),
    ),
    "Glascow coma scale motor response": (
        "6 Obeys Commands",
        ("1 No Response", "3 Abnorm flexion", "Abnormal extension", "No response",
         "4 Flex-withdraws", "Localizes Pain", "Flex-withdraws", "Obeys Commands",
         "Abnormal Flexion", "6 Obeys Commands", "5 Localizes Pain", "2 Abnorm extensn"),
    ),
    "Glascow coma scale total": (
        "15", ("11", "10", "13", "12", "15", "14", "3", "5", "4", "7", "6", "9", "8"),
    ),
    "Glascow coma scale verbal response": (
        "5 Oriented",
        ("1 No Response", "No Response", "Confused", "Inappropriate Words",
         "Oriented", "No Response-ETT", "5 Oriented", "Incomprehensible sounds",
         "1.0 ET/Trach", "4 Confused", "2 Incomp sounds", "3 Inapprop words"),
    ),
    "Glucose": ("128.0", ()),
    "Heart Rate": ("86", ()),
    "Height": ("170.0", ()),
    "Mean blood pressure": ("77.0", ()),
    "Oxygen saturation": ("98.0", ()),
    "Respiratory rate": ("19", ()),
    "Systolic blood pressure": ("118.0", ()),
    "Temperature": ("36.6", ()),
    "Weight": ("81.0", ()),
    "pH": ("7.4", ()),
}  # fmt: skip
"""The 17 variables, with the value of what was never measured, and categories if there are any."""


# --- MIMIC-III, in-hospital mortality ------------------------------------------------------------


def feature_names() -> list[str]:
    """Return the 76 column names: 59 values (categories as ``NAME->VALUE``), then 17 masks."""
    names = []
    for name, (_, values) in VARIABLES.items():
        names += [f"{name}->{value}" for value in values] or [name]
    return names + [f"mask->{name}" for name in VARIABLES]


def load_mimic(folder: str | Path, normalise: bool = True, progress: bool = True) -> Dataset:
    """Read the benchmark's in-hospital-mortality folder.

    The folder holds ``train/`` and ``test/``; each holds ``listfile.csv`` with the columns ``stay``
    and ``y_true``, and one csv file a stay with the column ``Hours`` and the 17 `VARIABLES`. Where
    ``train_listfile.csv`` or ``test_listfile.csv`` lies beside ``train/``, as the benchmark's
    validation split leaves it, that list is used: with it the paper's 14,681 and 3,236 stays
    result. Rows keep the order of the list. See `discretise` for the features.

    Parameters
    ----------
    folder
        Folder with ``train`` and ``test``.
    normalise
        Subtract mean and divide by standard deviation for the 12 numeric columns; one-hot and mask
        columns stay 0 or 1. Our choice: the statistics are those of the training stays that were
        read, over all hours, after filling; the benchmark ships a file of such statistics, which
        cannot be redistributed.
    progress
        Show a progress bar.

    Returns
    -------
    Dataset
        ``train_x``, ``test_x``: ``float32 [n, 48, 76]``; labels 1 for a death in hospital.
        ``card.mean`` and ``card.std`` hold the 76 constants in use. ``fidelity`` is
        ``"unverified"``: there is no published hash.

    Raises
    ------
    FedlibError
        If the folder, a file or a column is missing, or a stay cannot be read. The message names
        the file and what was expected.
    """
    root = existing(Path(folder), "the in-hospital-mortality folder with train/ and test/")
    known = card("mimic3-ihm")
    arrays, hashes = {}, {}
    for split in ("train", "test"):
        arrays[split], labels, hashes[split] = _stays(root, split, progress)
        arrays[split + "_y"] = labels
    mean, std = np.zeros(76), np.ones(76)
    if normalise:
        mean, std = _numeric_constants(arrays["train"])
    for split in ("train", "test"):
        arrays[split] = ((arrays[split] - mean) / std).astype(np.float32)
    return _dataset(known, arrays, hashes, known.classes, mean, std)


def discretise(
    rows: Iterable[list[str]], header: list[str], hours: int = HOURS, where: str = "stay"
) -> np.ndarray:
    """Turn the rows of one stay into hourly features, as the public benchmark does.

    * A row at t hours belongs to step ``int(t - 1e-6)``: step k covers (k, k + 1], and t = 0
      belongs to step 0. Rows later than ``hours`` are left out.
    * Within a step the last row that has a value for a variable gives its value.
    * A variable that was not measured in a step keeps its last value; before its first it takes
      its value from `VARIABLES`.
    * A categorical value becomes one 1 among 0s. Then come 17 masks: 1 where the variable was
      measured within the step.

    Our choices, where the benchmark stops with an assertion or leaves it open: a row before hour
    0, rows out of time order and an unknown category are errors that name the stay; a category
    that is a number may be spelt otherwise (``15.0`` for ``15``).

    Parameters
    ----------
    rows
        Rows of text; an empty cell means not measured.
    header
        Names of the cells: ``Hours`` and the 17 variables, in any order.
    hours
        Number of steps.
    where
        What to call the stay in messages.

    Returns
    -------
    numpy.ndarray
        ``float64 [hours, 76]``, columns as in `feature_names`, numbers in the units of the file.

    Raises
    ------
    FedlibError
        If a column is missing or a cell cannot be read.
    """
    names = ["Hours", *VARIABLES]
    if missing := [name for name in names if name not in header]:
        raise FedlibError(f"{where} lacks the column {missing[0]!r}; expected {', '.join(names)}.")
    column = {name: header.index(name) for name in names}
    measured: list[dict[str, str]] = [{} for _ in range(hours)]
    before = 0.0
    for row in rows:
        if len(row) != len(header):
            raise FedlibError(f"{where}: a row of {len(row)} cells under {len(header)} columns.")
        time = _number(row[column["Hours"]], "Hours", where)
        if time < before - _EPS:
            raise FedlibError(
                f"{where}: hour {time:g} comes after hour {before:g}; rows are expected in time "
                "order from hour 0 on."
            )
        before = max(time, before)
        if time <= hours + _EPS:
            step = measured[min(int(max(time - _EPS, 0)), hours - 1)]
            step |= {name: row[column[name]] for name in VARIABLES if row[column[name]] != ""}
    return _encode(measured, where)


def _encode(measured: list[dict[str, str]], where: str) -> np.ndarray:
    """Fill forward, encode, and append the masks."""
    features = np.zeros((len(measured), 76))
    at = 0
    for number, (name, (value, categories)) in enumerate(VARIABLES.items()):
        for step, values in enumerate(measured):
            if name in values:
                value = values[name]
                features[step, 76 - len(VARIABLES) + number] = 1
            if categories:
                features[step, at + _category(value, name, categories, where)] = 1
            else:
                features[step, at] = _number(value, name, where)
        at += len(categories) or 1
    return features


def _category(value: str, name: str, categories: tuple[str, ...], where: str) -> int:
    if value in categories:
        return categories.index(value)
    for position, category in enumerate(categories):
        try:
            if float(category) == float(value):
                return position
        except ValueError:
            continue
    raise FedlibError(f"{where}: {name} is {value!r}; expected one of {', '.join(categories)}.")


def _number(text: str, name: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise FedlibError(f"{where}: {name} is {text!r}; a number was expected.")
    return value


def _stays(root: Path, split: str, progress: bool) -> tuple[np.ndarray, np.ndarray, str]:
    from tqdm import tqdm

    folder = existing(root / split, f"the {split} stays")
    listed = root / f"{split}_listfile.csv"
    listed = listed if listed.is_file() else folder / "listfile.csv"
    digest = hashlib.sha256()
    header, rows = _csv(listed, digest, f"the list of {split} stays")
    for name in ("stay", "y_true"):
        if name not in header:
            raise FedlibError(
                f"{listed} lacks the column {name!r}: it has {', '.join(header) or 'none'}; "
                "'stay' and 'y_true' were expected."
            )
    if not rows:
        raise FedlibError(f"{listed} lists no stay.")
    stays, labels = [], []
    for row in tqdm(rows, desc=f"{split} stays", leave=False, disable=not progress):
        entry = dict(zip(header, row, strict=False))
        if not entry.get("stay"):
            raise FedlibError(f"{listed}: the row {row} names no stay; a csv file was expected.")
        if entry.get("y_true") not in ("0", "1"):
            raise FedlibError(f"{listed}: y_true is {entry.get('y_true')!r}; 0 or 1 was expected.")
        path = folder / entry["stay"]
        names, cells = _csv(path, digest, f"a stay that {listed.name} lists")
        stays.append(discretise(cells, names, where=str(path)).astype(np.float32))
        labels.append(int(entry["y_true"]))
    return np.stack(stays), np.array(labels, dtype=np.int64), digest.hexdigest()


def _csv(path: Path, digest: Any, what: str) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text: 'None' is a category here, not a missing value."""
    try:
        data = content(path)
        header, *rows = list(csv.reader(data.decode("utf-8").splitlines())) or [[]]
    except (OSError, ValueError, csv.Error) as error:
        raise unreadable(path, what, error) from error
    digest.update(data)
    return header, [row for row in rows if row]


def _numeric_constants(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of numeric columns over stays and hours; 0 and 1 for others."""
    mean, std = np.zeros(76), np.ones(76)
    numeric = [name in VARIABLES for name in feature_names()]
    mean[numeric] = x[:, :, numeric].mean(axis=(0, 1), dtype=np.float64)
    std[numeric] = x[:, :, numeric].std(axis=(0, 1), dtype=np.float64)
    return mean, np.where(std < 1e-7, 1.0, std)


# --- ModelNet40, twelve views --------------------------------------------------------------------

VIEWS = 12
"""Rendered views an object."""

_VIEW = re.compile(r"(?P<object>.+?)_v?(?P<view>\d{3})\.(png|jpe?g)", re.IGNORECASE)


def load_modelnet(
    folder: str | Path, size: int = 32, normalise: bool = True, progress: bool = True
) -> Dataset:
    """Read a ModelNet40 folder of rendered views.

    The layout is ``CLASS/train/NAME_001.png`` to ``NAME_012.png`` and the same under
    ``CLASS/test``; ``NAME.obj.shaded_v001.png`` and JPEG files are read too. Classes and objects
    come in alphabetical order, views by their number; the TDCD code takes them as the file system
    lists them.

    Parameters
    ----------
    folder
        Folder with one folder a class.
    size
        Images become grey and are shrunk to ``size x size`` pixels, averaging (our choice; the
        paper's code keeps colour and 224 x 224 pixels).
    normalise
        Subtract the mean and divide by the standard deviation of all training pixels (our choice).
        With False pixels stay in [0, 1].
    progress
        Show a progress bar.

    Returns
    -------
    Dataset
        ``train_x``, ``test_x``: ``float32 [n, 12, size, size]``; ``fidelity`` ``"unverified"``.

    Raises
    ------
    FedlibError
        If the folder holds no classes, an object does not have exactly the views 1 to 12, or an
        image cannot be read. The message names it.
    """
    root = existing(Path(folder), "the folder of classes")
    if size < 1:
        raise FedlibError(f"size is {size}; a number of pixels of at least 1 was expected.")
    classes = sorted(path.name for path in root.iterdir() if (path / "train").is_dir())
    if not classes:
        raise FedlibError(f"{root} has no folder CLASS/train; one folder a class was expected.")
    arrays, hashes = {}, {}
    for split in ("train", "test"):
        arrays[split], labels, hashes[split] = _objects(root, classes, split, size, progress)
        arrays[split + "_y"] = labels
    mean, std = np.zeros(1), np.ones(1)
    if normalise:
        mean[:] = arrays["train"].mean(dtype=np.float64) / 255
        std[:] = arrays["train"].std(dtype=np.float64) / 255 or 1.0
    for split in ("train", "test"):
        scaled = arrays[split].astype(np.float32) / np.float32(255)
        arrays[split] = (scaled - np.float32(mean[0])) / np.float32(std[0])
    return _dataset(card("modelnet40-12view"), arrays, hashes, tuple(classes), mean, std)


def _objects(
    root: Path, classes: list[str], split: str, size: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, str]:
    from tqdm import tqdm

    listed = []
    for label, name in enumerate(classes):
        folder = existing(root / name / split, f"the {split} objects of class '{name}'")
        listed += [(label, paths) for paths in _views(folder)]
    if not listed:
        raise FedlibError(f"{root} holds no {split} image named like NAME_001.png.")
    images = np.empty((len(listed), VIEWS, size, size), dtype=np.uint8)
    digest = hashlib.sha256()
    for i, (_, paths) in enumerate(
        tqdm(listed, desc=f"{split} objects", leave=False, disable=not progress)
    ):
        for k, path in enumerate(paths):
            images[i, k] = _grey(path, size, digest)
    return images, np.array([label for label, _ in listed], dtype=np.int64), digest.hexdigest()


def _views(folder: Path) -> list[list[Path]]:
    """Return the twelve paths of each object, objects by name and views by number."""
    objects: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _VIEW.fullmatch(path.name):
            objects.setdefault(match["object"], {})[int(match["view"])] = path
    for name, views in objects.items():
        if sorted(views) != list(range(1, VIEWS + 1)):
            raise FedlibError(
                f"{folder / name} has {len(views)} views, numbered "
                f"{', '.join(map(str, sorted(views)))}; 1 to {VIEWS} were expected."
            )
    return [[views[k] for k in sorted(views)] for _, views in sorted(objects.items())]


def _grey(path: Path, size: int, digest: Any) -> np.ndarray:
    from io import BytesIO

    from PIL import Image

    try:
        data = content(path)
        with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            grey = image.convert("L").resize((size, size), Image.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise unreadable(path, "an image of a view", error) from error
    digest.update("/".join(path.parts[-3:]).encode() + data)
    return np.asarray(grey)


# --- shared --------------------------------------------------------------------------------------


def _dataset(
    known: Card,
    arrays: dict[str, np.ndarray],
    hashes: dict[str, str],
    classes: tuple[str, ...],
    mean: np.ndarray,
    std: np.ndarray,
) -> Dataset:
    """Return the data set with a card that says what was really read."""
    read = replace(
        known,
        shape=arrays["train"].shape[1:],
        train=len(arrays["train"]),
        test=len(arrays["test"]),
        classes=classes,
        normalisation=replace(
            known.normalisation, mean=tuple(mean.tolist()), std=tuple(std.tolist())
        ),
    )
    return Dataset(
        name=known.name,
        train_x=arrays["train"],
        train_y=arrays["train_y"],
        test_x=arrays["test"],
        test_y=arrays["test_y"],
        classes=classes,
        card=read,
        hashes=hashes,
        fidelity="unverified",
    )


LAYOUTS: dict[str, Callable[..., Dataset]] = {
    "mimic-folder": load_mimic,
    "modelnet-folder": load_modelnet,
    "plays-folder": load_plays,
    "femnist-folder": load_femnist,
}
"""Readers by the format that a card names."""
