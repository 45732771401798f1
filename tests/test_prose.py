"""Numbers that were measured are printed by code: none is typed into prose."""

from __future__ import annotations

import json
import re
import tomllib

import build
import pytest

from fedlib.lab.evidence import outcomes

NUMBER = re.compile(
    r"(?<![\w.=/-])(?:\d*\.\d+(?:e-?\d+)?|\d+(?= ?%| times\b| points?\b| per cent| of \d))"
    r"|\b(?:\w+ty|hundred|thousand|ten|twice|three|four|five|six|eight) times\b"
    r"|\bin (?:all|none of|each of) (?:the )?\w+ seeds"
)
"""A decimal, a percentage, a number of times or points, "in all ten seeds"."""

PLACE = r"\b(?:Section|Theorem|Figure|Table|Lemma|Appendix|Algorithm|Proposition)s? [\w.()]+"

ASKED = r"\b(?:less than|within|at most)(?: the)? [\d.]+"  # the smallest difference that matters

NOT_MEASURED = {
    "02_participation cifar002": ["0.05"],
    "02_participation 6393ade9": ["20", "ten times"],
    "02_participation netw0001": ["twenty times", "three times"],
    "02_participation netw0004": ["three times"],
    "03_hierarchy hier-rep-labels": ["three times"],
    "03_hierarchy hier-rep-open-words": ["three times", "four times", "four times"],
    "03_hierarchy hier-rep-rates": ["four times"],
    "03_hierarchy hier-rep-short": ["four times"],
    "03_hierarchy hier-rep-sides-read": ["four times", "four times"],
    "HFL-C5 note": ["four times"],
    "05_tiers tiers-rep-how": ["0.02"],
    "05_tiers tiers-rep-breakeven": ["2"],
    "06_vertical vert-rep-data": ["50"],
    "06_vertical vert-rep-fig3": ["50"],
    "06_vertical vert-rep-speed-lesson": ["0.001", "0.05", "0.001", "eight times"],
    "06_vertical vert-rep-speed-say": ["0.2", "3"],
    "06_vertical vert-rep-table-lesson": ["0.01"],
    "06_vertical vert-rep-open": ["0.3", "0.5", "0.001", "0.05", "0.001"],
    "07_beyond beyond-07": ["four times"],
    "index": ["four times"],  # a check's name
    "07_beyond matrix-lesson": ["ten times", "ten times"],
    "07_beyond matrix-situations": ["three times"],
    "HFL-C2 note": ["three times"],
    "03_hierarchy hier-rep-45-undecided": ["three times"],
    "HFL-C3 note": ["three times"],
    "HFL-C6 note": ["four times"],
    "03_hierarchy hier-rep-37": ["four times"],
    "PERM-C2 note": ["ten times"],
    "PERM-C7 note": ["ten times"],
    "04_personalization perm-rep-open": ["ten times"],
    "PERM-C5 note": ["ten times", "ten times"],
    "PERM-C6 note": ["ten times"],
    "GFA-C4 note": ["ten times", "twenty times", "ten times"],
}
"""Numbers of the papers, settings, thresholds and arithmetic, by where they stand."""


def plain(text: str) -> str:
    """Return Markdown without formulas, code, roles, numbers of figures, and what is asked."""
    parts = (r"```.*?```", r"\$\$.*?\$\$", r"\$[^$]*\$", r"`[^`]*`", r"\]\([^)]*\)", PLACE, ASKED)
    for part in parts:
        text = re.sub(part, " ", text, flags=re.S)
    return text


def prose():
    """Yield where a text stands, and the text: pages, results, notes and answers."""
    for name in ("index", "what_we_learned", "scoreboard"):
        yield name, (build.ROOT / "book" / f"{name}.md").read_text("utf-8")
    for page in sorted(build.ROOT.glob("notebooks/*/*_reproduce.ipynb")):
        yield from cells(page)
    for page in sorted(build.ROOT.glob("notebooks/07_beyond/*.ipynb")):
        yield from cells(page)
    for page in sorted(build.ROOT.glob("data/papers/*/claims.toml")):
        for claim in tomllib.loads(page.read_text("utf-8"))["claim"]:
            yield f"{claim['id']} note", claim.get("note", "")
    for page in sorted(build.ROOT.glob("data/papers/*/findings.toml")):
        told = tomllib.loads(page.read_text("utf-8"))
        for number, entry in enumerate([told["brief"], *told["finding"]]):
            for part in (entry, entry.get("beside", {}), *entry.get("also", [])):
                for outcome in outcomes.OUTCOMES:
                    yield f"{page.parent.name} finding {number} {outcome}", part.get(outcome, "")


def cells(page):
    for cell in json.loads(page.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            yield f"{page.parent.name} {cell['id']}", "".join(cell["source"])


def test_no_measured_number_is_typed():
    typed: dict[str, list[str]] = {}
    for where, text in prose():
        if numbers := NUMBER.findall(plain(text)):
            typed[where] = typed.get(where, []) + numbers
    assert {w: n for w, n in typed.items() if n != NOT_MEASURED.get(w)} == {}
    assert NOT_MEASURED.keys() <= typed.keys(), "an exception that is no longer needed"


@pytest.mark.parametrize(
    "text",
    ["It ends 0.22 lower.", "a hundred times as long", "In all ten seeds", "by 12 %", "3 points",
     "6 times", "in each of the ten seeds", "17 of 20"],
)  # fmt: skip
def test_a_typed_number_would_be_seen(text):
    assert NUMBER.search(plain(text).lower())
    assert not NUMBER.search(plain(f"Figure 7, $x={text}$, S = 5, ten seeds"))
