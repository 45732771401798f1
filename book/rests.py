"""Which theorem rests on which, and which chapter on which, read from the notebooks' own text.

A statement rests on another where its own text or its proof refers to it, or to an equation that
the other one brings. A chapter rests on an earlier one where its text refers to a place there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

KINDS = ("assumption", "lemma", "proposition", "theorem", "corollary")
BLOCK = re.compile(  # a statement, or a proof, which may be folded
    r"^(?P<fence>:{3,}|`{3,})\{(?P<what>prf:\w+|dropdown)\} *(?P<title>[^\n]*)\n"
    r"(?P<body>.*?)^(?P=fence)\s*$",
    re.M | re.S,
)
PLACE = re.compile(r"^\(([\w-]+)\)=$|\$\$ *\(([\w-]+)\)|^:label: *(\S+)", re.M)
NAMED = re.compile(r"\{(?:prf:ref|ref|numref|eq)\}`(?:[^`]*<)?([\w-]+)>?`")
LINKED = re.compile(r"\]\(\.\./(\w+/\w+)\.ipynb")
FOLLOWS = re.compile(r"\{prf:ref\}`([\w-]+)` follows[^\n]*\n+$")  # before a proof: whose it is


@dataclass
class Rests:
    """What rests on what.

    Parameters
    ----------
    statements
        Kind, title and page of each labelled statement, in the order of the book.
    uses
        The statements on which each rests.
    pages
        The other pages that name a statement outside of statements and proofs.
    chapters
        How often one chapter (first) refers to an earlier one (second).
    """

    statements: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)
    pages: dict[str, set[str]] = field(default_factory=dict)
    chapters: Counter[tuple[str, str]] = field(default_factory=Counter)


def read(texts: dict[str, str]) -> Rests:
    """Read the text of each page, given in the order of the book by names ``CHAPTER/PAGE``."""
    found, places, owner, inside, around = Rests(), {}, {}, {}, dict(texts)
    for page, text in texts.items():
        places |= {"".join(place): page for place in PLACE.findall(text)} | {page: page}
        last = ""
        for block in BLOCK.finditer(text):
            kind, title, body = block["what"].removeprefix("prf:"), block["title"], block["body"]
            label = re.match(r":label: *(\S+)", body)
            if kind in KINDS and label:
                whose = last = label[1]
                found.statements[whose] = kind, title, page
            elif last and (kind == "proof" or title.startswith("Proof")):
                said = FOLLOWS.search(text[: block.start()])
                whose = said[1] if said else last
            else:
                continue
            inside[whose] = inside.get(whose, "") + body
            owner |= {"".join(place): whose for place in PLACE.findall(body)}
            around[page] = around[page].replace(block[0], "")
    order = list(texts)
    for label in found.statements:
        named = {owner.get(name, name) for name in NAMED.findall(inside[label])} - {label}
        found.uses[label], found.pages[label] = named & found.statements.keys(), set()
    for page, text in texts.items():
        for name in NAMED.findall(text) + LINKED.findall(text):
            there = places.get(name, page)
            if order.index(there) < order.index(page) and chapter(there) != chapter(page):
                found.chapters[chapter(page), chapter(there)] += 1
        for name in {owner.get(name, name) for name in NAMED.findall(around[page])}:
            if name in found.statements and found.statements[name][2] != page:
                found.pages[name].add(page)
    return found


def chapter(page: str) -> str:
    """Return the chapter of a page."""
    return page.split("/")[0]


def book(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the text of every notebook of the numbered parts, and the captions of chapters.

    Of the last page of a chapter only its places: it names what the chapter has, and uses none.
    """
    texts, captions = {}, {}
    for part in yaml.safe_load((root / "_toc.yml").read_text("utf-8"))["parts"]:
        for file in (entry["file"] for entry in part["chapters"] if part.get("numbered")):
            cells = json.loads((root / f"{file}.ipynb").read_text("utf-8"))["cells"]
            page = file.removeprefix("notebooks/")
            prose = ("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
            text = "\n\n".join(prose)
            if page.endswith("_summary"):
                text = "\n".join(re.findall(r"^\([\w-]+\)=$", text, re.M))
            texts[page], captions[chapter(page)] = text, part["caption"]
    return texts, captions


def picture(texts: dict[str, str], captions: dict[str, str]) -> Iterator[str]:
    """Write the chapters one below the other, with an arc to each chapter that uses another."""
    found, first = read(texts), {chapter(page): page for page in reversed(texts)}
    middle = {name: 24 + 44 * number for number, name in enumerate(captions)}
    tip = '<path d="M0 0 8 4 0 8z"/></marker></defs><g aria-hidden="true">'
    told = "The chapters, with an arc from each to those that use it"
    size = f"0 0 460 {44 * len(captions) + 4}"
    yield f'<div><svg class="rests" viewBox="{size}" role="group" aria-label="{told}">'
    yield '<defs><marker id="rests-tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="9"'
    yield f'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto">{tip}'
    for (user, used), times in sorted(found.chapters.items()):
        top, end = middle[used], middle[user]
        bend = f"{300 + (end - top) * 0.6:g}"
        path = f"M300 {top}C{bend} {top} {bend} {end} 304 {end}"
        yield f'<path class="arc" stroke-width="{1 + min(times, 12) / 4:g}" d="{path}"/>'
    yield "</g>"
    for name, y in middle.items():
        text = f'<text x="284" y="{y + 5}" text-anchor="end">{captions[name]}</text>'
        dot = f'<circle cx="296" cy="{y}" r="4"/>'
        yield f'<a href="../notebooks/{first[name]}.html">{text}{dot}</a>'
    yield from ("</svg></div>", "", "| Chapter | Rests on | Used by |", "|---|---|---|")
    for name in captions:
        rests = (captions[used] for used in captions if (name, used) in found.chapters)
        users = (captions[user] for user in captions if (user, name) in found.chapters)
        link = f"[{captions[name]}](../notebooks/{first[name]}.ipynb)"
        yield f"| {link} | {'; '.join(rests)} | {'; '.join(users)} |"


def table(texts: dict[str, str], captions: dict[str, str]) -> Iterator[str]:
    """Write, for each chapter, its statements, what each rests on, and what uses it."""
    found = read(texts)

    def named(label: str, kind: str = "") -> str:
        title = found.statements[label][1].replace("$", "").replace(r"\lambda", "λ")
        return f"{{prf:ref}}`{kind}{title} <{label}>`"  # the words of a link hold no formula

    for part, caption in captions.items():
        yield from (f"### {caption}", "", ":::{table}", ":widths: 34 33 33", "")
        yield from ("| Statement | Rests on | Used by |", "|---|---|---|")
        alone = []
        for label, (kind, _, page) in found.statements.items():
            rests = [named(other) for other in found.statements if other in found.uses[label]]
            users = [named(other) for other, used in found.uses.items() if label in used]
            for other in (page for page in texts if page in found.pages[label]):
                title = re.search(r"^# (.*)", texts[other], re.M)[1]
                users.append(f"*[{title}](../notebooks/{other}.ipynb)*")
            if chapter(page) == part and not (rests or users):
                alone.append(named(label))
            elif chapter(page) == part:
                name = named(label, f"{kind.capitalize()}: ")
                yield f"| {name} | {'; '.join(rests)} | {'; '.join(users)} |"
        told = f"Named by no other statement or page: {'; '.join(alone)}."
        yield from (":::", "", told * bool(alone), "")
