"""What a paper's records answer: questions as readers bring them, each tied to one check.

A ``findings.toml`` has an answer for every outcome that the check may have. Which of them is shown
follows from the records, like the verdicts; nobody picks one. Where they have less than the paper's
data and scale, the answer says so.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from fedlib import paths
from fedlib.errors import FedlibError, unknown
from fedlib.evidence import claims
from fedlib.schema import Page, read_toml


class Entry(Page):
    """A finding as it stands in a ``findings.toml``; ``{measured}`` is the check's value."""

    question: str
    claim: str
    check: str  # its ``what``
    holds: str
    contradicted: str
    undecided: str
    front: NotRequired[bool]  # whether the front page asks it, too


class Entries(Page):
    """A ``findings.toml``."""

    finding: list[Entry]


@dataclass(frozen=True)
class Finding:
    """A question and its answer.

    Attributes
    ----------
    question
        As readers bring it.
    answer
        By the outcome of the check, with a word on its scale.
    claim
        The claim that the check belongs to.
    outcome
        What the check came to, see :mod:`fedlib.evidence.claims`.
    front
        Whether the front page asks it, too.
    """

    question: str
    answer: str
    claim: str
    outcome: str
    front: bool


def papers() -> list[str]:
    """Return the papers that have findings, in the order of the book."""
    return [name for name, home in paths.papers().items() if (home / "findings.toml").is_file()]


@functools.cache
def _read(path: Path, paper: str) -> list[Entry]:
    found = read_toml(path, Entries)["finding"]
    known = {claim["id"]: claim for claim in claims.table(paper)}
    for entry in found:
        if entry["claim"] not in known:
            raise unknown(f"claim in {path}:", entry["claim"], known)
        asked = [check["what"] for check in known[entry["claim"]].get("check", [])]
        if entry["check"] not in asked:
            raise unknown(f"check of {entry['claim']} in {path}:", entry["check"], asked)
    return found


def answers(paper: str, out: str | Path | None = None) -> list[Finding]:
    """Return the questions of a paper with the answers that its records give.

    Parameters
    ----------
    paper
        See :func:`papers`.
    out
        Folder of records; default is the one that ships with fedlib.

    Raises
    ------
    FedlibError
        For a paper without findings, or one that names a claim or check that is not there.
    """
    page = paths.paper_folder(paper) / "findings.toml"
    if not page.is_file():
        raise FedlibError(f"There is no {page}.")
    found, known = [], {claim["id"]: claim for claim in claims.table(paper)}
    for entry in _read(page, paper):
        (check,) = (c for c in claims.checks(paper, entry["claim"], out)
                    if c.quantity == entry["check"])  # fmt: skip
        answer = _answer(entry, check, claims.reduced(known[entry["claim"]], [check]))
        front = entry.get("front", False)
        found.append(Finding(entry["question"], answer, entry["claim"], check.outcome, front))
    return found


def _answer(entry: Entry, check: claims.Check, reduced: bool) -> str:
    if check.outcome not in entry:
        return "There is no record yet that could say."
    said = entry[check.outcome].replace("{measured}", check.measured)
    return f"{said} Measured {claims.REDUCED}." if reduced else said
