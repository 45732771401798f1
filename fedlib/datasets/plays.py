"""Plays as plain text, taken apart by speaking role: windows of characters and what follows."""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlib.cards import card
from fedlib.datasets.folders import LARGEST, content, existing, unreadable
from fedlib.datasets.owned import OwnedDataset, Owners
from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError

WINDOW = 80
"""Characters that a model sees before it predicts one."""

_DIRECTION = re.compile(r"\[(?:(?!\n[ \t]*\n)[^\[\]])*\]?")  # up to the next empty line at most
_PLACE = "\0"  # stands where a direction stood
_HEADING = re.compile(r"(ACT|SCENE)\b")
_SPOKEN = re.compile(r"(?P<name>[^\t:]*[A-Za-z][^\t:]*)(?:\t+|:\s+)(?P<words>.*)")
_WHAT = "plays as plain text, or a tar archive of them"


def load_plays(
    folder: str | Path,
    stride: int = 5,
    share: float = 0.2,
    smallest: int = 100,
    normalise: bool = True,
    progress: bool = True,
) -> OwnedDataset:
    """Read plays, and make one owner of each speaking role of each play.

    What a role says is put together, line by line, each line ending with a line break. The last
    ``share`` of these characters is for testing. Within each of the two texts a sample is a window
    of 80 characters and, as its class, the character that comes next; so no character of a
    training sample is part of a test sample.

    Parameters
    ----------
    folder
        Holds the plays, in files or in folders, or tar archives of them. What has no line that
        begins with ``SCENE`` and a tab is no play and is left out: poems, notes.
    stride
        A window begins every so many characters.
    share
        Of a role's characters, for testing.
    smallest
        Training samples that a role must have; smaller roles, and those without a test sample, are
        left out.
    normalise, progress
        Without effect: characters are numbers, and it takes a moment.

    Returns
    -------
    OwnedDataset
        ``train_x``, ``test_x``: ``uint8 [n, 80]``, numbers of characters in ``classes``; a
        character that is not among them counts as a blank. ``owners.names`` are such as
        ``"hamlet: OPHELIA"``, plays in alphabetical order, roles as they enter.
        ``fidelity`` is ``"unverified"``: no hash of these files has been published.

    Raises
    ------
    FedlibError
        If there is no folder, no play in it, or no role is large enough.
    """
    check_whole_number("stride", stride)
    check_whole_number("smallest", smallest)
    if not 0 < share < 1:
        raise FedlibError(f"share is a part of each role, between 0 and 1; got {share}.")
    root = existing(Path(folder), _WHAT)
    plays = {name: text for name, text in sorted(_texts(root).items()) if _opening(text)}
    if not plays:
        raise FedlibError(f"{root} holds no play; expected {_WHAT}, with a line 'SCENE', tab, ...")
    found = card("shakespeare")
    digest, samples, names = hashlib.sha256(), defaultdict(list), []
    for play, text in plays.items():
        digest.update(f"{play}\0{text}\0".encode())
        for role, lines in roles(text).items():
            symbols = numbered("\n".join(lines) + "\n", found.classes)
            cut = len(symbols) - int(share * len(symbols))
            parts = [windows(part, stride) for part in (symbols[:cut], symbols[cut:])]
            if len(parts[0]) >= smallest and len(parts[1]):
                names.append(f"{play}: {role}")
                for split, part in zip(("train", "test"), parts, strict=True):
                    samples[split].append(part)
    if not names:
        raise FedlibError(f"No role in {root} has {smallest} training samples; take fewer.")
    whole = {split: np.concatenate(parts) for split, parts in samples.items()}
    owner = {split: np.repeat(np.arange(len(names)), [len(part) for part in parts])
             for split, parts in samples.items()}  # fmt: skip
    return OwnedDataset(
        name=found.name,
        train_x=np.ascontiguousarray(whole["train"][:, :-1]),
        train_y=whole["train"][:, -1].astype(np.int64),
        test_x=np.ascontiguousarray(whole["test"][:, :-1]),
        test_y=whole["test"][:, -1].astype(np.int64),
        classes=found.classes,
        card=replace(found, train=len(whole["train"]), test=len(whole["test"])),
        hashes={"plays": digest.hexdigest()},
        fidelity="unverified",
        owners=Owners(tuple(names), owner["train"], owner["test"]),
    )


def roles(text: str) -> dict[str, list[str]]:
    """Return the lines that each role of a play speaks, roles as they enter.

    A speech begins at the margin with the name, in whatever letters, and a tab or a colon; its
    other lines are indented. A name may be broken over two lines. Stage directions, in square
    brackets, do not end a speech; two empty lines do, and so does a heading. What several speak at
    once, marked by bars, is left out, and so is everything before the line ``SCENE`` that tells the
    place of the play.
    """
    spoken: dict[str, list[str]] = defaultdict(list)
    speaker, begun, empty = "", "", 0
    for line in _opening(_DIRECTION.sub(_PLACE, text)):
        words = " ".join(line.replace(_PLACE, " ").split())
        if not words:
            empty = 0 if _PLACE in line else empty + 1
            speaker, begun = speaker if empty < 2 else "", ""
            continue
        empty = 0
        if "|" in line or _HEADING.match(line):
            speaker = begun = ""
        elif line[0].isspace():
            if speaker:
                spoken[speaker].append(words)
        elif match := _SPOKEN.match(line):
            speaker, begun = _name(f"{begun} {match['name']}"), ""
            if said := " ".join(match["words"].replace(_PLACE, " ").split()):
                spoken[speaker].append(said)
        elif any(letter.isalpha() for letter in line.split("\t")[0]):
            begun = f"{begun} {words}"
        elif speaker:
            spoken[speaker].append(words)
    return dict(spoken)


def _name(words: str) -> str:
    return " ".join(words.replace(_PLACE, " ").upper().split()).rstrip(".:,")


def _opening(text: str) -> list[str]:
    """Return the lines after that which tells the place of a play; none where there is none."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("SCENE\t")), len(lines))
    return lines[first + 1 :]


def numbered(text: str, symbols: Sequence[str]) -> np.ndarray:
    """Return the number of each character among the symbols, ``uint8 [n]``, others as blanks."""
    table = dict(zip(symbols, range(len(symbols)), strict=True))
    return np.array([table.get(one, table[" "]) for one in text], dtype=np.uint8)


def windows(symbols: np.ndarray, stride: int) -> np.ndarray:
    """Return every so manieth window with the symbol after it, ``[n, 81]``; none if too short."""
    if len(symbols) <= WINDOW:
        return np.empty((0, WINDOW + 1), dtype=symbols.dtype)
    return np.lib.stride_tricks.sliding_window_view(symbols, WINDOW + 1)[::stride]


def _texts(root: Path) -> dict[str, str]:
    """Return the text of each file below a folder, in archives too, by its name alone."""
    if odd := [path for path in root.rglob("*") if not (path.is_file() or path.is_dir())]:
        raise FedlibError(f"{odd[0]} is no file that can be read; it should be {_WHAT}.")
    found: dict[str, str] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        try:
            if ".tar" in path.suffixes or path.suffix == ".tgz":
                found |= dict(_members(path))
            else:
                found[path.stem] = content(path).decode("utf-8", "replace")
        except (OSError, EOFError, tarfile.TarError, ValueError) as error:
            raise unreadable(path, _WHAT, error) from error
    return found


def _members(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of an archive."""
    with tarfile.open(path) as archive:
        left = LARGEST
        for member in archive:
            if not member.isfile():
                continue
            left -= max(member.size, 0)
            if left < 0:
                raise ValueError(f"more than {LARGEST} bytes when unpacked")
            yield (
                Path(member.name).stem,
                archive.extractfile(member).read().decode("utf-8", "replace"),  # type: ignore[union-attr]
            )
