"""Cards: what is known about a data set.

Facts live in ``data/datasets/NAME.toml``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlib.errors import FedlibError, unknown
from fedlib.paths import data_folder
from fedlib.schema import CLOSED, read_toml


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, as its card describes it.

    ``sha256`` is the hash of the decoded payload, so that any compression of the same content
    verifies. An archive whose decoded hashes nobody has published is known by ``archive_sha256``;
    ``reencoded`` then lists the hashes of a known copy that is close to the release but not equal.
    """

    name: str
    role: str
    decoded_bytes: int
    urls: tuple[str, ...] = ()
    packed_bytes: int | None = None
    sha256: str | None = None
    archive_sha256: str | None = None
    archive_md5: str | None = None
    train_members: tuple[str, ...] = ()
    test_members: tuple[str, ...] = ()
    reencoded: Mapping[str, str] = field(default_factory=dict)
    payload: str = ""

    __pydantic_config__ = CLOSED

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members of an archive, training members first."""
        return self.train_members + self.test_members


@dataclass(frozen=True)
class Normalisation:
    """Constants that apply after division by ``scale``, one for each channel or one for all."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str

    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Bring:
    """What a reader has to bring of a set that only its owner hands out.

    ``files`` are the names below the set's folder, ``form`` is what is inside them, ``source`` who
    gives them out.
    """

    files: str
    form: str
    source: str

    __pydantic_config__ = CLOSED


@dataclass(frozen=True)
class Card:
    """What is known about a data set; the fields are those of its TOML file.

    ``shape`` is ``(channels, height, width)``, ``(views, height, width)`` or ``(steps, features)``.
    ``stands_in_for`` and ``cannot_show`` are empty unless the set serves as a substitute
    for another one. ``bring`` is there for a set that is never downloaded; ``otherwise`` says what
    else helps whoever lacks a set. ``generator`` holds kind, seed and options of a set that is
    made. The hash of made columns is that of the records' machine; any machine verifies them by
    ``rounded_sha256``.
    """

    name: str
    title: str
    licence: str
    citation: str
    homepage: str
    format: str
    shape: tuple[int, ...]
    train: int
    test: int
    classes: tuple[str, ...]
    split: str
    normalisation: Normalisation
    files: tuple[DataFile, ...]
    stands_in_for: tuple[str, ...] = ()
    cannot_show: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    bring: Bring | None = None
    otherwise: str = ""
    generator: Mapping[str, Any] = field(default_factory=dict)
    rounded_sha256: str = ""

    __pydantic_config__ = CLOSED

    @property
    def scale(self) -> float:
        """What stored values are divided by."""
        return self.normalisation.scale

    @property
    def mean(self) -> tuple[float, ...]:
        """One constant for each channel, or one for all, after the division."""
        return self.normalisation.mean

    @property
    def std(self) -> tuple[float, ...]:
        """As ``mean``."""
        return self.normalisation.std

    @property
    def embedded(self) -> bool:
        """Whether the set is made or comes with an installed package; its base may be neither."""
        return self.format in ("sklearn-digits", "generated")

    @property
    def base(self) -> str:
        """Name of the set that this one is made from; empty for one that needs no other."""
        return self.generator.get("base", "")

    @property
    def if_missing(self) -> str:
        """What to do without the set, with what to bring, its form, from whom, and what else."""
        if self.bring is None:
            return self.otherwise
        b = self.bring
        asked = f"Put {b.files} into that folder ({b.form}). Who gives it out: {b.source}."
        return f"{asked} {self.otherwise}".rstrip()

    @property
    def folder(self) -> bool:
        """Whether the set is a folder that its owner hands out, and is never downloaded."""
        return self.format.endswith("-folder")


ROLES = {
    "idx": ["test_x", "test_y", "train_x", "train_y"],
    "cifar-binary": ["all"],
    "sklearn-digits": ["all"],
    "generated": ["all"],
}
"""What files of a format are for."""


def all_cards() -> dict[str, Card]:
    """Return every card, by data set name, in alphabetical order."""
    paths = sorted((data_folder() / "datasets").glob("*.toml"))
    cards = [_read(path, (path.stat().st_mtime_ns, path.stat().st_size)) for path in paths]
    return {card.name: card for card in cards}


@functools.lru_cache(maxsize=128)
def _read(path: Path, stamp: tuple[int, ...]) -> Card:
    """Read a card, once for each time that its file changes."""
    result = read_toml(path, Card)
    if result.folder or result.format.startswith("columns-"):  # their readers know the roles
        return result
    roles = [file.role for file in result.files]
    if result.format not in ROLES:
        raise unknown(f"format in {path}:", result.format, [*ROLES, "NAME-folder", "columns-NAME"])
    if sorted(roles) != ROLES[result.format]:
        asked = ", ".join(ROLES[result.format])
        raise FedlibError(f"{path}: files have the roles {', '.join(roles)}; expected {asked}.")
    return result


def card(name: str) -> Card:
    """Return the card of one data set.

    Raises
    ------
    FedlibError
        If there is no such data set; the nearest name is suggested.
    """
    known = all_cards()
    if not isinstance(name, str) or name not in known:
        raise unknown("data set", name, known)
    return known[name]
