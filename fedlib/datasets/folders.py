"""Files in a folder that somebody else filled: opened with care, and named when they are odd."""

from __future__ import annotations

from pathlib import Path

from fedlib.errors import FedlibError
from fedlib.files import open_regular
from fedlib.paths import expand

LARGEST = 1 << 25
"""Bytes that a file may have, more than any list, stay, view or play."""


def content(path: Path) -> bytes:
    """Return what a file holds, unless it is longer than any can be."""
    with open_regular(path, LARGEST) as file:
        return file.read()


def existing(folder: Path, what: str) -> Path:
    """Return the folder, or say that there is none and what it should be."""
    folder = expand(folder, "The folder")
    if not folder.is_dir():
        raise FedlibError(f"There is no folder {folder}; it should be {what}.")
    return folder


def unreadable(path: Path, what: str, error: Exception) -> FedlibError:
    """Return the error of a file that is missing or cannot be read."""
    if isinstance(error, FileNotFoundError):
        return FedlibError(f"{path} is missing; it should be {what}.")
    return FedlibError(f"{path} cannot be read ({error}); it should be {what}.")
