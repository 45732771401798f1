"""Data whose rows come with an owner: a speaking role, a writer.

``load(name)`` returns such a set like any other, and `owners` says whose each row is:
``FederatedDataset.build(x, y, own.train_parts, test_x, test_y, test_parts=own.test_parts)`` gives
every owner a client. `only` takes some of them.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from fedlib.datasets.cards import Dataset
from fedlib.datasets.partition import _group
from fedlib.datasets.writers import writer_owners
from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError


@dataclass(frozen=True, eq=False)
class Owners:
    """Whose the rows of a data set are.

    Attributes
    ----------
    names
        One name an owner.
    train, test
        The owner's number for each row, ``int64 [n]``; every owner has rows in both.
    traits
        What else is known of owners, arrays with one row each, such as the style of a made
        writer. Empty for real ones.
    """

    names: tuple[str, ...]
    train: np.ndarray
    test: np.ndarray
    traits: Mapping[str, np.ndarray] = field(default_factory=dict)

    @functools.cached_property
    def train_parts(self) -> list[np.ndarray]:
        """Training rows of each owner, in their order, a client for each."""
        return _group(self.train, len(self.names))

    @functools.cached_property
    def test_parts(self) -> list[np.ndarray]:
        """Test rows of each owner, in their order."""
        return _group(self.test, len(self.names))

    @property
    def sizes(self) -> np.ndarray:
        """Number of training rows of each owner."""
        return np.bincount(self.train, minlength=len(self.names))


@dataclass(frozen=True, eq=False)
class OwnedDataset(Dataset):
    """A data set in memory, with its owners."""

    owners: Owners


def owners(data: Dataset) -> Owners:
    """Say whose the rows of a loaded set are.

    Parameters
    ----------
    data
        What ``load`` or `only` returned.

    Raises
    ------
    FedlibError
        For a set whose rows belong to nobody.
    """
    if isinstance(data, OwnedDataset):
        return data.owners
    kind = data.card.generator.get("kind")
    if kind in OWNERS_OF_MADE:
        names, train, test, traits = OWNERS_OF_MADE[kind](data.card)
        return Owners(names, train, test, traits)
    raise FedlibError(
        f"The rows of '{data.name}' belong to nobody. Deal them out with fedlib.datasets.partition."
    )


def only(
    data: Dataset, selected: Sequence[int | str], train: int | None = None, test: int | None = None
) -> OwnedDataset:
    """Return the rows of some owners alone; they are numbered anew, in the order given.

    Parameters
    ----------
    data
        A set whose rows have owners.
    selected
        Their numbers or names.
    train, test
        Rows that an owner keeps at most, spread evenly over those it has; None keeps all.

    Returns
    -------
    OwnedDataset
        Rows lie owner by owner. The card and the hashes are those of the whole set.

    Raises
    ------
    FedlibError
        For nobody, an owner that there is not, and one who is named twice.
    """
    current = owners(data)
    if np.ndim(selected) == 0:
        raise FedlibError(f"Owners are a list, of numbers or names; got {selected!r}.")
    who = [_number(current.names, one) for one in selected]
    if not who or len(set(who)) < len(who):
        raise FedlibError(f"Owners are chosen once each, and one at least; got {list(selected)}.")
    for name, most in (("train", train), ("test", test)):
        if most is not None:
            check_whole_number(name, most)
    rows = {
        "train": [_spread(current.train_parts[n], train) for n in who],
        "test": [_spread(current.test_parts[n], test) for n in who],
    }
    taken = {split: np.concatenate(parts) for split, parts in rows.items()}
    number = {split: np.repeat(np.arange(len(who)), list(map(len, parts)))
              for split, parts in rows.items()}  # fmt: skip
    kept = {part.name: getattr(data, part.name) for part in fields(Dataset)}
    for split in ("train", "test"):
        for part in ("x", "y"):
            kept[f"{split}_{part}"] = kept[f"{split}_{part}"][taken[split]]
    traits = {name: values[who] for name, values in current.traits.items()}
    named = tuple(current.names[n] for n in who)
    return OwnedDataset(**kept, owners=Owners(named, number["train"], number["test"], traits))


def _number(names: tuple[str, ...], one: int | str) -> int:
    """Return the number of an owner."""
    if isinstance(one, str):
        if one not in names:
            near = difflib.get_close_matches(one, names, 3, 0.4) or names[:3]
            raise FedlibError(f"There is no owner '{one}'. Near it: {', '.join(near)}.")
        return names.index(one)
    check_whole_number("An owner's number", one, 0)
    if one >= len(names):
        raise FedlibError(f"Owners are numbered 0 to {len(names) - 1}; got {one}.")
    return int(one)


def _spread(rows: np.ndarray, most: int | None) -> np.ndarray:
    if most is None or most >= len(rows):
        return rows
    return rows[np.arange(most) * len(rows) // most]


OWNERS_OF_MADE: dict[str, Callable[[Any], tuple]] = {"writers": writer_owners}
"""For a generator's kind, who tells the owners of its rows from the card."""
