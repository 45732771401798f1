"""Where fedlib finds facts: data cards, and for each paper its experiments, claims and records."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NotRequired

from fedlib.errors import FedlibError, unknown
from fedlib.schema import Page, read_toml

_MARK = Path("datasets") / "digits.toml"


@functools.cache
def data_folder() -> Path:
    """Return the folder with ``datasets/``, ``papers/`` and ``results/``.

    In a checkout this is the ``data/`` beside the package; an installed wheel carries its own
    copy inside the package. The working directory plays no part.

    Raises
    ------
    FedlibError
        If neither folder is there, which means that the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    candidates = [package.parent / "data", package / "data"]
    for folder in candidates:
        if (folder / _MARK).is_file():
            return folder
    looked = " nor ".join(str(folder / _MARK) for folder in candidates)
    raise FedlibError(f"fedlib's data folder is missing: found neither {looked}. Reinstall fedlib.")


def expand(path: str | Path, what: str) -> Path:
    """Return a path with the home folder in place of its ``~``.

    Parameters
    ----------
    path
        As it was given.
    what
        Who gave it, for the message.

    Raises
    ------
    FedlibError
        When there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FedlibError(
            f"{what} is {path}, a home folder that is not known. Write the path in full."
        ) from error


def papers(file: str = "experiments.toml") -> dict[str, Path]:
    """Return every paper's folder by name: those of fedlib, then those of ``FEDLIB_PAPERS``.

    ``FEDLIB_PAPERS`` names folders laid out as ``data/papers``, several with the system's path
    separator between them. Papers come in the order of their chapters.

    Parameters
    ----------
    file
        What a folder must hold to count; a paper that can be run has an ``experiments.toml``.

    Raises
    ------
    FedlibError
        When a folder of ``FEDLIB_PAPERS`` is not there, or two papers have one name.
    """
    folders: dict[str, Path] = {}
    for home in [data_folder() / "papers", *_homes_of_others()]:
        for page in sorted(home.glob(f"*/{file}"), key=_chapter):
            if page.parent.name in folders:
                raise FedlibError(
                    f"Two papers are called '{page.parent.name}': {folders[page.parent.name]} and "
                    f"{page.parent}. Rename one of the folders."
                )
            folders[page.parent.name] = page.parent
    return folders


def _homes_of_others() -> list[Path]:
    named = os.environ.get("FEDLIB_PAPERS", "").split(os.pathsep)
    homes = [expand(p, "FEDLIB_PAPERS") for p in named if p]
    for home in homes:
        if not os.path.isdir(home):
            raise FedlibError(f"FEDLIB_PAPERS names {home}, which is not a folder.")
    return homes


class About(Page):
    """A paper's ``paper.toml``."""

    short: NotRequired[str]  # what the book calls it, by default the folder's name
    title: NotRequired[str]  # what it calls itself, by default the folder's name
    cite: NotRequired[str]  # its key in the paper.bib beside
    chapter: NotRequired[str]  # its folder among the notebooks
    question: NotRequired[str]  # for the front page
    about: NotRequired[str]  # for the front page
    note: NotRequired[str]  # for the scoreboard
    untold: NotRequired[dict[str, str]]  # by setting (or EXPERIMENT.setting) or network: what its
    # text does not give of its size, and where the profile paper has it from
    ours: NotRequired[bool]  # a study of this book, without a paper


@functools.cache
def about(folder: Path) -> About:
    """Return what a paper's ``paper.toml`` says about it, with a ``short`` and a ``title``."""
    page = folder / "paper.toml"
    facts: About = read_toml(page, About) if page.is_file() else {}
    return {"short": folder.name, "title": folder.name, **facts}


def _chapter(page: Path) -> tuple[str, str]:
    return about(page.parent).get("chapter", "~"), page.parent.name


def paper_folder(paper: str) -> Path:
    """Return the folder of a paper.

    Raises
    ------
    FedlibError
        For an unknown paper, with the valid ones.
    """
    known = papers()
    if not isinstance(paper, str) or paper not in known:
        error = unknown("paper", paper, known)
        for home in _homes_of_others() if isinstance(paper, str) else ():
            if not any(home.glob("*/experiments.toml")):
                error.add_note(f"FEDLIB_PAPERS names {home}, but there is no "
                               f"{home / paper / 'experiments.toml'}.")  # fmt: skip
        raise error
    return known[paper]
