"""FEMNIST as TensorFlow Federated publishes it: two HDF5 files, one group a writer."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlib.cards import card
from fedlib.datasets.folders import existing, unreadable
from fedlib.datasets.owned import OwnedDataset, Owners
from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError

SIDE = 28  # pixels
_WHAT = "FEMNIST by writer, as fed_emnist_train.h5 and fed_emnist_test.h5"


def load_femnist(
    folder: str | Path, clients: int | None = None, normalise: bool = True, progress: bool = True
) -> OwnedDataset:
    """Read FEMNIST with its writers as owners.

    The folder holds ``fed_emnist_train.h5`` and ``fed_emnist_test.h5``; in each
    ``examples/WRITER/pixels`` is ``[n, 28, 28]``, numbers from 0 (ink) to 1 (paper), and
    ``examples/WRITER/label`` is ``[n]``, 0 to 61: digits, capitals, small letters. The package
    h5py is needed. Writers are those of the training file.

    Parameters
    ----------
    folder
        Folder with the two files.
    clients
        Read so many writers only, the first by name: all of them take 2 GiB.
    normalise
        Subtract the mean and divide by the standard deviation of all training pixels that were
        read (our choice). With False pixels are as published.
    progress
        Show a progress bar.

    Returns
    -------
    OwnedDataset
        ``train_x``, ``test_x``: ``float32 [n, 1, 28, 28]``; writers in alphabetical order.
        ``card.mean`` and ``card.std`` hold the constants in use. ``fidelity`` is ``"unverified"``.

    Raises
    ------
    FedlibError
        If h5py, the folder, a file, a writer or an array is missing or not as described. The
        message names it.
    """
    try:
        import h5py
    except ImportError as error:
        raise FedlibError(
            "FEMNIST is published as HDF5 files, and the package that reads them is not "
            "installed. What to do: pip install h5py."
        ) from error
    if clients is not None:
        check_whole_number("clients", clients)
    root, writers = existing(Path(folder), _WHAT), []
    known, splits = card("femnist"), {}
    for split in ("train", "test"):
        path = root / f"fed_emnist_{split}.h5"
        try:
            if not path.is_file():
                raise FileNotFoundError(path)
            with h5py.File(path, "r") as file:
                if "examples" not in file or not len(file["examples"]):
                    raise FedlibError(f"{path} has no group 'examples' with a group a writer.")
                if split == "train":
                    writers = sorted(file["examples"])[:clients]
                splits[split] = _read(file["examples"], writers, path, len(known.classes), progress)
        except (OSError, RuntimeError) as error:  # h5py has both for damaged files
            raise unreadable(path, _WHAT, error) from error
    mean, std = _constants(splits["train"][0]) if normalise else (0.0, 1.0)
    for x, *_ in splits.values():
        x -= np.float32(mean)
        x /= np.float32(std)
    (train_x, train_y, train, a), (test_x, test_y, test, b) = splits["train"], splits["test"]
    used = replace(known.normalisation, mean=(mean,), std=(std,))
    return OwnedDataset(
        name=known.name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=known.classes,
        card=replace(known, train=len(train_x), test=len(test_x), normalisation=used),
        hashes={"train": a, "test": b},
        fidelity="unverified",
        owners=Owners(tuple(writers), train, test),
    )


def _read(
    examples: Any, writers: list[str], path: Path, classes: int, progress: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Return images, labels, whose each one is, and a hash of all."""
    from tqdm import tqdm

    for name in writers:
        _check_writer(examples, name, path)
    sizes = [len(examples[name]["label"]) for name in writers]
    x = np.empty((sum(sizes), 1, SIDE, SIDE), dtype=np.float32)
    y = np.empty(sum(sizes), dtype=np.int64)
    owner, digest = np.repeat(np.arange(len(writers)), sizes), hashlib.sha256()
    stops = np.cumsum(sizes)
    for n, name in enumerate(tqdm(writers, path.stem, leave=False, disable=not progress)):
        here = slice(stops[n] - sizes[n], stops[n])
        x[here, 0], y[here] = examples[name]["pixels"][()], examples[name]["label"][()]
        fine = (x[here] >= 0).all() and (x[here] <= 1).all()
        if not fine or y[here].min() < 0 or y[here].max() >= classes:
            raise FedlibError(
                f"{path}, writer {name}: pixels from 0 to 1 and labels from 0 to {classes - 1} "
                f"were expected; got {x[here].min():g} to {x[here].max():g} and {y[here].min()} to "
                f"{y[here].max()}."
            )
        digest.update(name.encode() + x[here].tobytes() + y[here].tobytes())
    return x, y, owner, digest.hexdigest()


def _check_writer(examples: Any, name: str, path: Path) -> None:
    """Refuse a writer who is missing, has no samples, or whose arrays do not fit."""
    if name not in examples:
        raise FedlibError(f"{path} has no writer {name}, whom the other file has.")
    shapes = {key: getattr(examples[name].get(key), "shape", None) for key in ("pixels", "label")}
    n = (shapes["label"] or (0,))[0]
    if shapes != {"pixels": (n, SIDE, SIDE), "label": (n,)} or not n:
        raise FedlibError(
            f"{path}, writer {name}: 'pixels' [n, {SIDE}, {SIDE}] and 'label' [n] were expected, n "
            f"at least 1; got {shapes['pixels']} and {shapes['label']}."
        )


def _constants(x: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of all pixels, without a second array of that size."""
    mean = float(x.mean(dtype=np.float64))
    parts = np.array_split(x, max(1, len(x) // 1000))
    squares = sum(float(np.square(part - mean, dtype=np.float64).sum()) for part in parts)
    return mean, (squares / x.size) ** 0.5 or 1.0
