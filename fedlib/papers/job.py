"""What a study is given and what it returns: settings in, tidy rows out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

Settings = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One experiment to be carried out.

    Attributes
    ----------
    settings
        Resolved settings, as stored in the manifest.
    seeds
        One run a seed.
    device
        Where tensors live.
    folder
        Where unfinished work is kept, or None.
    progress
        Show progress bars.
    """

    settings: Settings
    seeds: tuple[int, ...]
    device: str = "cpu"
    folder: Path | None = None
    progress: bool = True


@dataclass
class Outcome:
    """Tidy rows, diverged seeds by run with their round, and hashes of the data used."""

    frame: pd.DataFrame
    diverged: dict[str, dict[int, int]]
    hashes: dict[str, str]


def run_seeds(count: int | Sequence[int]) -> tuple[int, ...]:
    """Return seeds ``1..count``, or the given seeds."""
    return tuple(range(1, count + 1)) if isinstance(count, int) else tuple(int(c) for c in count)


def checkpoint_file(job: Job, name: str) -> Path | None:
    """Return where a run keeps its checkpoint, or None."""
    safe = "".join(c if c.isalnum() else "_" for c in name)
    return None if job.folder is None else job.folder / f"{safe}.pt"
