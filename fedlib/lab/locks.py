"""Folders for some work, in which one process works at a time."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import filelock

from fedlib.errors import FedlibError
from fedlib.files import cannot_write, make_folder


class UnderWay(FedlibError):
    """Another process is at the same work; the message says which."""


@contextlib.contextmanager
def folder_for(path: Path) -> Iterator[None]:
    """Make a folder for some work; if that fails and leaves nothing in it, take it away again."""
    new = [place for place in (path, *path.parents) if not os.path.lexists(place)]
    try:
        make_folder(path)
        yield
    except BaseException:
        for place in new:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise


@contextlib.contextmanager
def only_one(path: Path, what: str) -> Iterator[None]:
    """Let one process at a time do something; a lock dies with its process.

    Parameters
    ----------
    path
        The lock, a file that is there as long as the work is under way.
    what
        What is done, for the message.

    Raises
    ------
    UnderWay
        When another process is at it, saying which.
    """
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        try:
            who = path.read_text("utf-8").strip()
        except OSError:
            who = ""
        raise UnderWay(
            f"{what} is under way in {path.parent}, by {who or 'another process'}. Wait for it, or "
            "choose another folder with --out."
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        try:
            path.write_text(f"process {os.getpid()} on {platform.node()}, begun {now}", "utf-8")
        except OSError as error:
            raise cannot_write(path, error) from error
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
