"""What can be run: papers, their experiments, and the settings of each profile."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlib import paths
from fedlib.errors import unknown

PROFILES = ("smoke", "quick", "paper")

_SHARED = ("title", "profiles", "common")


def papers() -> list[str]:
    """Return the papers that have experiments: fedlib's in the order of the book, then others."""
    return list(paths.papers())


def _table(paper: str) -> dict[str, Any]:
    return _read(paths.paper_folder(paper) / "experiments.toml")


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text("utf-8"))


def names(paper: str) -> list[str]:
    """Return the experiments of a paper, in the order of the file."""
    return [name for name in _table(paper) if name not in _SHARED]


def profiles(paper: str, experiment: str) -> Sequence[str]:
    """Return the profiles at which an experiment can be run."""
    if experiment not in names(paper):
        raise unknown("experiment", experiment, names(paper))
    return _table(paper)[experiment].get("only", PROFILES)


def packages(paper: str) -> list[str]:
    """Return the packages in which the paper's studies are written."""
    table = _table(paper)
    tables = [table.get("common", {}), *(table[name] for name in names(paper))]
    kinds = [entry["kind"] for entry in tables if "kind" in entry]
    return sorted({kind.split(":")[0].rpartition(".")[0] for kind in kinds} - {""})


def command(paper: str, experiment: str, out: str | None = None, profile: str | None = None) -> str:
    """Return the command that makes a record.

    Parameters
    ----------
    out
        Folder for the record; default is that of the paper itself.
    profile
        Default, also where the experiment does not run at it: ``quick`` if it can, else ``paper``.
    """
    can = profiles(paper, experiment)
    if profile not in can:
        profile = "quick" if "quick" in can else can[-1]
    if out is None:
        home = paths.paper_folder(paper).parent
        out = "data/papers" if home == paths.data_folder() / "papers" else str(home)
    return f"fedlib run {paper} {experiment} --profile {profile} --out {out}"


def describe(paper: str) -> list[dict[str, str]]:
    """Return one row an experiment: paper, experiment, where in the paper, title, profiles."""
    rows = []
    for name in names(paper):
        entry = _table(paper)[name]
        row = dict(paper=paper, experiment=name, where=entry["where"], title=entry["title"])
        rows.append(row | dict(profiles=", ".join(profiles(paper, name))))
    return rows


def settings(paper: str, experiment: str, profile: str) -> dict[str, Any]:
    """Return the resolved settings of an experiment at a profile.

    Raises
    ------
    FedlibError
        For an unknown paper, experiment or profile, with the valid ones.
    """
    valid, table = profiles(paper, experiment), _table(paper)
    entry = table[experiment]
    if profile not in valid:
        raise unknown(f"profile of {experiment}", profile, valid)
    own = {k: v for k, v in entry.items() if k not in (*PROFILES, "only")}
    layers = (table["common"], own, table["profiles"][profile], entry.get(profile, {}))
    return {k: v for layer in layers for k, v in layer.items()}
