"""Loading: from verified bytes to arrays, scaled and normalised as the card says."""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np

from fedlib.cards import Card, card
from fedlib.datasets import layouts
from fedlib.datasets.cards import Dataset
from fedlib.datasets.fetch import Payload, _bundled, _obtain, _placed_or_fail, _rows
from fedlib.datasets.generators import generate
from fedlib.datasets.writers import BASES
from fedlib.engine.checks import check_flag
from fedlib.errors import FedlibError


def load(name: str, normalise: bool = True, progress: bool = True) -> Dataset:
    """Load a data set, fetching it first where needed.

    Parameters
    ----------
    name
        Data set name, see `all_cards`.
    normalise
        Subtract the card's mean and divide by its standard deviation, channel by channel, after
        scaling pixels to [0, 1]. With False the pixels stay in [0, 1].
    progress
        Show a progress bar while a file is downloaded.

    Returns
    -------
    Dataset
        numpy arrays; a `UserWarning` says so when they are not the canonical release.

    Raises
    ------
    FedlibError
        As in `get`; and for a set of columns, saying what reads it.
    """
    check_flag("normalise", normalise)
    known = card(name)
    if known.format.startswith("columns-"):
        raise FedlibError(f"'{name}' is a set of columns, read elsewhere. {known.traps[0]}")
    data = (_load_folder if known.folder else _load_files)(known, normalise, progress)
    if data.fidelity != "canonical":
        warnings.warn(
            f"'{name}' is {data.fidelity}: not verified equal to the canonical release. "
            "Its card lists what that changes.",
            stacklevel=2,
        )
    return data


def _load_files(card: Card, normalise: bool, progress: bool) -> Dataset:
    if card.embedded:
        payloads = {file.role: _bundled(card, progress) for file in card.files}
    else:
        payloads = {file.role: _obtain(card, file, progress)[1] for file in card.files}
    fidelity = next(
        (p.fidelity for p in payloads.values() if p.fidelity != "canonical"), "canonical"
    )
    train_x, train_y, test_x, test_y = _PARSERS[card.format](card, payloads)
    return Dataset(
        name=card.name,
        train_x=_images(card, train_x, normalise),
        train_y=train_y.astype(np.int64),
        test_x=_images(card, test_x, normalise),
        test_y=test_y.astype(np.int64),
        classes=card.classes,
        card=card,
        hashes={key: value for p in payloads.values() for key, value in p.hashes.items()},
        fidelity=fidelity,
    )


def _images(card: Card, raw: np.ndarray, normalise: bool) -> np.ndarray:
    images = raw.reshape(-1, *card.shape).astype(np.float32)
    images /= np.float32(card.scale)
    if normalise:
        images -= np.asarray(card.mean, dtype=np.float32)[:, None, None]
        images /= np.asarray(card.std, dtype=np.float32)[:, None, None]
    return images


def _load_folder(card: Card, normalise: bool, progress: bool) -> Dataset:

    folder = _placed_or_fail(card)
    return layouts.LAYOUTS[card.format](folder, normalise=normalise, progress=progress)


# --- formats ---------------------------------------------------------------------------------


def _parse_idx(data: bytes) -> np.ndarray:
    """Return the array of an IDX file of unsigned bytes.

    Two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian
    32-bit integer, then the values, last axis fastest.
    """
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise FedlibError(
            f"Not an IDX file of unsigned bytes: it starts with {data[:4].hex(' ') or 'nothing'}, "
            "00 00 08 and the number of axes were expected."
        )
    start = 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    values = max(len(data) - start, 0)
    if values != math.prod(shape) or len(data) < start:
        raise FedlibError(f"IDX file of shape {shape} with {values} values: they disagree.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _parse_idx_set(card: Card, payloads: dict[str, Payload]) -> list[np.ndarray]:
    arrays = []
    for role in ("train_x", "train_y", "test_x", "test_y"):
        (data,) = payloads[role].parts.values()
        rows = card.train if role.startswith("train") else card.test
        expected = (rows, *card.shape[1:]) if role.endswith("x") else (rows,)
        array = _parse_idx(data)
        if array.shape != expected:
            raise FedlibError(
                f"'{card.name}', {role}: the file has shape {array.shape}, "
                f"the card says {expected}."
            )
        arrays.append(array)
    return arrays


def _parse_cifar(card: Card, payloads: dict[str, Payload]) -> list[np.ndarray]:
    (file,) = card.files
    parts, row = payloads[file.role].parts, 1 + math.prod(card.shape)
    arrays = []
    for members in (file.train_members, file.test_members):
        table = np.concatenate([_rows(parts[name], row) for name in members])
        arrays += [table[:, 1:], table[:, 0]]
    return arrays


def _made(card: Card, payloads: dict[str, Payload]) -> tuple[np.ndarray, ...]:

    return generate(card)[0]


def _parse_digits(card: Card, payloads: dict[str, Payload]) -> list[np.ndarray]:
    """Split the bundled digits: within each class, every fifth image is a test image."""
    (data,) = payloads["all"].parts.values()
    rows = card.train + card.test
    images = np.frombuffer(data, dtype=np.uint8, count=len(data) - rows).reshape(rows, -1)
    labels = np.frombuffer(data, dtype=np.uint8, offset=len(data) - rows)
    test = np.zeros(rows, dtype=bool)
    for label in range(len(card.classes)):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return [images[~test], labels[~test], images[test], labels[test]]


_PARSERS = {
    "idx": _parse_idx_set,
    "cifar-binary": _parse_cifar,
    "sklearn-digits": _parse_digits,
    "generated": _made,
}

for _base in ("digits", "fashion-mnist", "mnist"):
    BASES[_base] = functools.partial(load, _base, normalise=False)
