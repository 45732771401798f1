"""What a paper's records answer: questions as readers bring them, each tied to one check.

A ``findings.toml`` has an answer for every outcome that the check may have. Which of them is shown
follows from the records, like the findings of claims; nobody picks one. Every answer says at what
scale and on which data it was measured.
"""

from __future__ import annotations

import functools
import math
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from fedlib import cards, paths
from fedlib.errors import FedlibError, unknown
from fedlib.lab.evidence import claims, outcomes, scale
from fedlib.schema import Page, read_toml

ANSWERS = {
    "better": (outcomes.HOLDS, outcomes.SMALLER, outcomes.LEVEL, outcomes.REVERSED, outcomes.OPEN),
    "no worse": (outcomes.HOLDS, outcomes.REVERSED, outcomes.OPEN),
    "same": (outcomes.HOLDS, outcomes.DIFFERS, outcomes.OPEN),
    "within": (outcomes.HOLDS, outcomes.OUTSIDE, outcomes.OPEN),
}
"""The outcomes that a check may have, by what it asks."""

IN_SHORT = {
    outcomes.HOLDS: "yes, ahead by {}",
    outcomes.SMALLER: "a little, ahead by {}",
    outcomes.LEVEL: "no difference that matters",
    outcomes.REVERSED: "no, behind by {}",
    outcomes.OUTSIDE: "no",
    outcomes.OPEN: "open",
}
"""Whether one is better than another, or as good, in a few words, by the outcome."""


class Answers(Page):
    """A check, and an answer for each outcome that it may have.

    In an answer ``{measured}`` is the check's value with its interval, ``{size}`` how large it is,
    as one would say it, ``{share}`` the same as a share of what stands beside it, and ``{inverse}``
    the interval of a ratio, of the one turned round.
    """

    check: str  # its ``what``
    holds: str
    smaller: NotRequired[str]
    level: NotRequired[str]
    reversed: NotRequired[str]
    differs: NotRequired[str]
    outside: NotRequired[str]
    open: str


class Also(Answers):
    """A check of another claim, whose answer names that claim."""

    claim: str


class FindingEntry(Answers):
    """A finding as it stands in a ``findings.toml``."""

    question: str
    claim: str
    beside: NotRequired[Answers]  # another check of the claim, whose answer follows the first
    also: NotRequired[list[Also]]  # of other claims, whose answers follow


class Entries(Page):
    """A ``findings.toml``."""

    brief: NotRequired[FindingEntry]  # the paper's question, for the heads of pages
    finding: list[FindingEntry]


@dataclass(frozen=True)
class Finding:
    """A question and its answer.

    Attributes
    ----------
    question
        As readers bring it.
    answer
        By the outcome of the check, and of those that follow it.
    paper
        What the paper reports, in our words; of a study of the book's own, what we expected.
    setting
        At what scale and on which data the answer was measured; empty for what is exact. Where
        two checks differ in it, that of the first stands in the answer, and this is the second's.
    claim
        The claim that the check belongs to.
    outcome
        What the first check came to, see :mod:`fedlib.lab.evidence.outcomes`.
    finding
        What the claim comes to as a whole, all its checks together.
    scale, data
        Of the check, or of the last that follows it, each in words: what differs from the paper's
        setting, and what the data are to the paper's; of a study of the book's own, which they are.
    whole
        At what scale and on which data all checks of the claim were measured, where that is not
        what the answer's own was; otherwise empty.
    also
        Other claims that the answer speaks of, and what each comes to as a whole.
    """

    question: str
    answer: str
    paper: str
    setting: str
    claim: str
    outcome: str
    finding: str
    scale: str
    data: str
    whole: str
    also: dict[str, str]


@functools.cache
def _read(path: Path, paper: str) -> Entries:
    page = read_toml(path, Entries)
    entries = [*([page["brief"]] if "brief" in page else []), *page["finding"]]
    known = {claim["id"]: claim for claim in claims.claims_of(paper)}
    for entry in entries:
        for part, name in _parts(entry):
            if name not in known:
                raise unknown(f"claim in {path}:", name, known)
            claim = known[name]
            asked = {check["what"]: check for check in claim.get("check", [])}
            if part["check"] not in asked:
                raise unknown(f"check of {name} in {path}:", part["check"], asked)
            wanted = {*ANSWERS[claims.question(claim, asked[part["check"]]).kind]}
            answered = {*part} & {*outcomes.OUTCOMES}
            if answered != wanted:
                raise FedlibError(
                    f"{path}, '{entry['question']}': the check may come out as "
                    f"{', '.join(sorted(wanted))}; there are answers for "
                    f"{', '.join(sorted(answered))}."
                )
    return page


def _parts(entry: FindingEntry) -> list[tuple[Answers, str]]:
    """Return the checks of a finding, with their answers, each with its claim."""
    own = [entry, *([entry["beside"]] if "beside" in entry else [])]
    others = [(part, part["claim"]) for part in entry.get("also", [])]
    return [*((part, entry["claim"]) for part in own), *others]


def answers(paper: str, out: str | Path | None = None) -> list[Finding]:
    """Return the questions of a paper with the answers that its records give.

    Parameters
    ----------
    paper
        One with a ``findings.toml``.
    out
        Folder of records; default is the one that ships with fedlib.

    Raises
    ------
    FedlibError
        For a paper without findings, or one that names a claim or check that is not there.
    """
    return _answered(paper, out, _page(paper)["finding"])


def brief(paper: str) -> Finding | None:
    """Return the answer to a paper's own question, short; None where its findings have none."""
    page = _page(paper)
    return _answered(paper, None, [page["brief"]])[0] if "brief" in page else None


def first_of(row: dict, asked: str) -> dict | None:
    """Return, of a judged claim's checks that ask ``asked``, the one with the most.

    Controls are among them where they ask the same as a check that counts, of another run. It is
    None where none has a record. An estimate below zero says that even the best is behind what all
    are compared with.
    """
    rows = [c for c in row["checks"] if asked in c["quantity"]]
    counted = {c["quantity"].rpartition(": ")[0] for c in rows if c["essential"]}
    same = (c for c in rows if c["quantity"].rpartition(": ")[0] in counted)
    known = [c for c in same if c["estimate"] is not None]
    return max(known, key=lambda check: check["estimate"], default=None)


def first_of_each(row: dict, asked: str) -> dict[str, dict | None]:
    """Return what :func:`first_of` does for each reading that asks, with its controls."""
    of = {name: [c for c in row["checks"] if c["reading"] in (name, "")]
          for name in row["readings"] or [""]}  # fmt: skip
    return {name: first_of(row | {"checks": checks}, asked) for name, checks in of.items()
            if any(asked in c["quantity"] for c in checks if c["essential"])}  # fmt: skip


def in_short(paper: str, claim: str, what: str) -> str:
    """Return in a few words what a check found that asks whether one is better or as good.

    Parameters
    ----------
    paper, claim
        Of the check.
    what
        What it compares, in its own words.
    """
    (row,) = claims.judge(paper, None, [claim])
    entry = next(each for each in claims.claims_of(paper) if each["id"] == claim)
    checks = {check["quantity"]: check for check in row["checks"]}
    if what not in checks:
        raise unknown(f"check of {claim}:", what, checks)
    asked = next(check for check in entry["check"] if check["what"] == what)
    check, fields = checks[what], _fields(paper, entry, checks[what], None)
    known = {(): "at the paper's scale", (scale.OUR_EXPERIMENT,): f"in {scale.OUR_EXPERIMENT}"}
    where = known.get(tuple(fields["scale"]), "in a smaller experiment")
    data = "" if fields["data"] in scale.THEIRS else f", on {fields['data']}"
    found = IN_SHORT.get(check["outcome"], check["outcome"]).format(check["size"])
    if check["outcome"] == outcomes.HOLDS and asked["asks"] != "better":
        found = "yes"  # as good: which of the two is ahead is not asked
    return f"{found}, {where}{data}"


def _page(paper: str) -> Entries:
    page = paths.paper_folder(paper) / "findings.toml"
    if not page.is_file():
        raise FedlibError(f"There is no {page}.")
    return _read(page, paper)


def _answered(paper: str, out: str | Path | None, entries: list[FindingEntry]) -> list[Finding]:
    """Answer questions by what the records of their checks say."""
    results, ours = [], paths.about(paths.paper_folder(paper)).get("ours")
    ids = list(dict.fromkeys(name for entry in entries for _, name in _parts(entry)))
    judged = {row["id"]: row for row in claims.judge(paper, out, ids)}
    known = {claim["id"]: claim for claim in claims.claims_of(paper)}
    for entry in entries:
        row, sentences, settings = judged[entry["claim"]], [], []
        for part, name in _parts(entry):
            checks = {check["quantity"]: check for check in judged[name]["checks"]}
            check = checks[part["check"]]
            said = part.get(check["outcome"], "There is no record yet that could say.")
            for word in ("measured", "size"):
                said = said.replace(f"{{{word}}}", minus(check[word]))
            if "{share}" in said:
                said = said.replace("{share}", share(check["size"]))
            if "{inverse}" in said:
                said = said.replace("{inverse}", inverse(check["low"], check["high"]))
            fields = _fields(paper, known[name], check, out)
            setting = scale.sentence(fields["scale"], fields["data"])
            sentences += [settings[-1]] if settings and settings[-1] not in ("", setting) else []
            sentences.append(said)
            settings.append(setting)
        told = row["statement" if ours else "paper_reports"]
        outcome = next(c["outcome"] for c in row["checks"] if c["quantity"] == entry["check"])
        data = fields["data"] or "nothing measured"
        whole = scale.sentence(row["scale"], row["data"])
        if ours and fields["sets"]:
            data = "; ".join(cards.card(name).title for name in fields["sets"])
        results.append(
            Finding(
                entry["question"], " ".join(sentences), told, setting,
                entry["claim"], outcome, claims.finding_in_words(row),
                scale.words(fields["scale"], fields["data"]), data, whole * (whole != setting),
                {part["claim"]: claims.finding_in_words(judged[part["claim"]])
                 for part in entry.get("also", [])},
            )
        )  # fmt: skip
    return results


def share(size: str) -> str:
    """Return a difference beside its baseline as a share of it: ``"6%"`` of ``"0.024 of 0.42"``."""
    d, _, base = size.replace(" points", "").partition(" of ")
    return f"{float(d) / float(base):.0%}" if base else size


def inverse(low: float | None, high: float | None) -> str:
    """Return the interval of a ratio turned round, from the ends of its natural logarithm."""
    ends = [None if end is None else f"{math.exp(-end):.2g}" for end in (high, low)]
    if None not in ends:
        return f"{ends[0]} to {ends[1]} times"
    return f"at least {ends[0]} times" if ends[0] else f"at most {ends[1]} times"


def minus(text: str) -> str:
    """Write a minus sign where a number has a hyphen."""
    return re.sub(r"(?<![\w.])-(?=[\d.])", "\N{MINUS SIGN}", text)


def wrapped(text: str) -> str:
    """Return prose, paragraphs joined, in short lines: JupyterLab breaks long ones in a word."""
    return textwrap.fill(" ".join(text.split()), 88, break_long_words=False, break_on_hyphens=False)


def _fields(
    paper: str, claim: claims.Claim, check: dict[str, Any], out: str | Path | None
) -> dict[str, Any]:
    """Return scale and data of a check; empty for what is exact."""
    read = check["record"] if claim["kind"] == "measured" and check["profile"] else ""
    return claims.measured_at(claim, claims.read_from(paper, read, out))
