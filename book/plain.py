"""The same notebooks in plain Markdown, for readers whose program does not know MyST.

VS Code, GitHub and Colab show a theorem's box as raw text. Here boxes become block quotes,
solutions fold, equations carry their number, and references are names with links. Code stays.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

BOX = re.compile(r"^(:{3,}|`{3,})\{([\w:-]+)\} ?(.*)$")
LABEL = re.compile(r"^\(([\w-]+)\)=$")
EQUATION = re.compile(r"\$\$ \(([\w-]+)\)")
ROLE = re.compile(r"\{([\w:]+)\}`([^`]+)`")
HEADING = re.compile(r"^#+ (.*)$")
ENTRY = re.compile(r"@\w+\{([^,]+),(.*?)\n\}", re.S)


@dataclass
class Places:
    """What can be referred to: label to the page that has it and the words for it."""

    pages: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    cited: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # who, year, address

    def read(self, page: str, texts: Iterable[str]) -> None:
        """Take down the labels of a page, numbered as they come."""
        count: Counter[str] = Counter()
        label = box = ""
        for line in "\n\n".join(texts).splitlines():
            if match := LABEL.match(line):
                label = match[1]
                self.pages[label], self.words[label] = page, label
            elif label and line.strip():
                match = HEADING.match(line)
                self.words[label], label = match[1] if match else label, ""
            elif match := BOX.match(line):
                kind = match[2].rpartition(":")[2]
                count[kind] += kind != "solution"
                box = f"{kind.capitalize()} {count[kind]}"
            elif box and line.startswith((":label:", ":name:")):
                name = line.split(":", 2)[2].strip()
                self.pages[name], self.words[name], box = page, box, ""
            for match in EQUATION.finditer(line):
                count["equation"] += 1
                self.pages[match[1]], self.words[match[1]] = page, f"({count['equation']})"

    def read_bibliography(self, text: str) -> None:
        """Take down who is cited: author, year, and where the work is to be found."""
        for key, entry in ENTRY.findall(text):
            given = dict(re.findall(r"(\w+) = \{(.*)\}", entry))
            names = [one.split(",")[0].strip("{}") for one in given["author"].split(" and ")]
            who = names[0] if len(names) == 1 else f"{names[0]} and {names[1]}"
            who = f"{names[0]} et al." if len(names) > 2 else who
            url = f"https://arxiv.org/abs/{given['eprint']}" if "eprint" in given else ""
            url = f"https://doi.org/{given['doi']}" if "doi" in given else url
            self.cited[key] = who, given["year"], url

    def cite(self, key: str, words: str) -> str:
        """Return who is cited in a pattern of author and year, with a link if there is one."""
        who, year, url = self.cited[key]
        said = words.format(who, year)
        return f"[{said}]({url})" if url else said

    def link(self, label: str, words: str, page: str) -> str:
        """Return words with a link to a label, as seen from a page of the same tree."""
        home = self.pages.get(label)
        if home is None or not home.endswith(".ipynb"):
            return words  # the place is on a page of the book
        up = "../" * (len(Path(page).parts) - 1)
        return f"[{words}]({'' if home == page else up + home}#{label})"


def plain(text: str, page: str, places: Places) -> str:
    """Return a cell's MyST as plain Markdown."""
    return "\n".join(_lines(text.splitlines(), page, places)).strip("\n")


def _lines(lines: list[str], page: str, places: Places) -> list[str]:
    out: list[str] = []
    rest = iter(lines)
    for line in rest:
        if match := BOX.match(line):
            body = []
            for inner in rest:
                if inner.strip() == match[1]:
                    break
                body.append(inner)
            out += _box(match[2], match[3], body, page, places)
        elif match := LABEL.match(line):
            out.append(f'<a id="{match[1]}"></a>')
        else:
            line = EQUATION.sub(lambda m: f"\\tag{{{places.words[m[1]][1:-1]}}} $$", line)
            out.append(ROLE.sub(lambda m: _role(m[1], m[2], page, places), line))
    return out


def _box(kind: str, title: str, body: list[str], page: str, places: Places) -> list[str]:
    """Return a directive as a block quote, or as something to unfold."""
    options = list(itertools.takewhile(re.compile(r":[\w-]+:").match, body))
    label = next((o.split(":", 2)[2].strip() for o in options if o.startswith(":label:")), "")
    inner = _lines(body[len(options) :], page, places)
    inner = "\n".join(inner).strip("\n").splitlines()
    if kind in ("solution", "dropdown") or any("dropdown" in o for o in options):
        name = {"solution": "Solution", "prf:proof": "Proof"}.get(kind, title or "More")
        return ["<details>", f"<summary>{name}</summary>", "", *inner, "", "</details>"]
    name = places.words.get(label) or kind.rpartition(":")[2].capitalize()
    title = ROLE.sub(lambda m: _role(m[1], m[2], page, places), title)
    if kind == "admonition":
        name, title = title, ""
    head = f"**{name}{f' ({title})' if title else ''}.**"
    anchor = [f'<a id="{label}"></a>', ""] if label else []
    return [*anchor, f"> {head}", ">", *(f"> {line}".rstrip() for line in inner)]


def _role(role: str, text: str, page: str, places: Places) -> str:
    """Return a reference as words, with a link if its place is in a notebook."""
    words, _, label = text.rpartition("<")
    label, words = label.rstrip(">").strip(), words.strip()
    if role in ("func", "class", "mod", "meth", "attr"):
        return f"`{words or label.removeprefix('~')}`"
    if role.startswith("cite"):
        told = role == "cite:t"  # named in the sentence, not after it
        pattern = "{} ({})" if told else "{}, {}"
        found = [places.cite(key.strip(), pattern) for key in label.split(",")]
        return ", ".join(found) if told else f"({'; '.join(found)})"
    return places.link(label, words or places.words.get(label, label), page)


def write(tree: Path, pages: list[Path], out: Path) -> None:
    """Write every notebook of a tree, as run there, in plain Markdown.

    Parameters
    ----------
    tree, pages
        The sources of the book after the notebooks were run; the notebooks in it.
    out
        The folder that gets the same paths.
    """
    places = Places()
    places.read_bibliography((tree / "book" / "references.bib").read_text("utf-8"))
    notebooks = {page: nbformat.read(tree / page, as_version=4) for page in pages}
    for page, notebook in notebooks.items():
        texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
        places.read(page.as_posix(), texts)
    for page in sorted((tree / "book").rglob("*.md")):
        places.read(page.relative_to(tree).as_posix(), [page.read_text("utf-8")])
    for page, notebook in notebooks.items():
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = plain(cell.source, page.as_posix(), places)
        (out / page).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, out / page)
