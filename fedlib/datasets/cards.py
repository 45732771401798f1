"""What a loaded data set looks like; what is known about it stands in `fedlib.cards`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlib.cards import Card


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory.

    Attributes
    ----------
    train_x, test_x
        ``float32 [n, *card.shape]``: images ``[n, channels, height, width]``, views
        ``[n, views, height, width]`` or sequences ``[n, steps, features]``; text is ``uint8``, and
        sets by columns have rows of their own, see :mod:`fedlib.papers.vertical.data`.
    train_y, test_y
        Class numbers, ``int64 [n]``.
    classes
        Class names, in the order of the numbers.
    hashes
        SHA-256 of every decoded part that was read, for the record of a run.
    fidelity
        ``"canonical"``: verified equal to the release the card names; ``"re-encoded"``: the known
        near copy of the card; ``"unverified"``: right in structure, content not known.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: tuple[str, ...]
    card: Card
    hashes: dict[str, str]
    fidelity: str


def fingerprint(*arrays: Any) -> str:
    """Return the SHA-256 of arrays as a study uses them: pooled, normalised, in their order."""
    sha256 = hashlib.sha256()
    for array in map(np.ascontiguousarray, arrays):
        sha256.update(f"{array.dtype} {array.shape}".encode())
        sha256.update(array.data)
    return sha256.hexdigest()
