"""Where names lead: code and prose to the API, the API to pages, records to their manifests."""

from __future__ import annotations

import ast
import functools
import pydoc
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import ObjectEntry
from sphinx.util.nodes import make_refnode

from fedlib.lab.evidence.findings import minus, wrapped
from fedlib.paths import about, papers

from .facts import FACT

TOLD = {
    "provenance": re.compile(r"Record \S+\.(smoke|quick|long|paper)\b.*\bcommit \S+"),
    "verdict-note": re.compile(r"[A-Z]{3,}\d?-C\S+: [A-Z ,]+\."),
}
# Where one of them begins. They are printed in short lines, which a page joins again.
BEGIN = re.compile(r"\n(?=Record \S+\.|[A-Z]{3,}\d?-C\S+: [A-Z])")
COLUMNS = re.compile(r"^ |\S {3,}\S|  # ", re.M)  # a table, or code: its lines must not wrap
FOUND = "tag_found"  # on a cell that tells what was found


def mark_told(app: Sphinx, doctree: nodes.document) -> None:
    """Mark printed lines that are prose; where a figure's record comes from goes under it."""
    for block in list(doctree.findall(nodes.literal_block)):
        parts = BEGIN.split(block.astext().strip())
        lines = [" ".join(part.split()) for part in parts]
        whole = all(p in (line, wrapped(line)) for p, line in zip(parts, lines, strict=True))
        for name, pattern in TOLD.items():
            if whole and all(pattern.match(line) for line in lines):
                block["classes"].append(name)
                block.rawsource = "\n".join(lines)
                block.clear()
                block += nodes.Text(block.rawsource)
                if name == "provenance" and _printed(block):
                    home = block.parent
                    home.remove(block)
                    home += [_to_record(app, line) for line in lines]
        if _printed(block) and not COLUMNS.search(block.astext()):
            block["classes"].append("sentences")


def _printed(block: nodes.literal_block) -> bool:
    """Whether a cell printed it."""
    return "cell_output" in (block.parent or {}).get("classes", [])


def _to_record(app: Sphinx, line: str) -> nodes.paragraph:
    """Return a line on where numbers come from; the record's name leads to its manifest."""
    chapter = Path(app.env.docname).parent.name
    homes = [h for h in papers().values() if about(h).get("chapter") == chapter]
    paragraph = nodes.paragraph(classes=["provenance"])
    for part in re.split(r"(?<=Record )(\S+?\.(?:smoke|quick|long|paper))\b", line):
        files = [home / "results" / f"{part}.json" for home in homes]
        if file := next(filter(Path.is_file, files), None):
            name = file.parents[1].name
            paragraph += nodes.reference("", part, refuri=_beside(app, name, file))
        else:
            paragraph += nodes.Text(part)
    return paragraph


def _beside(app: Sphinx, paper: str, file: Path) -> str:
    """Put a manifest among the pages' sources, and return the way to it."""
    inside = f"_sources/data/papers/{paper}/results/{file.name}"
    target = Path(app.outdir) / inside
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, target)
    return "../" * app.env.docname.count("/") + inside


def note_names(app: Sphinx, doctree: nodes.document) -> None:
    """Keep what the code of a page imports from fedlib: each name, and where it is written."""
    names = {name: _written_at(whole) for name, whole in _imported(doctree).items()}
    app.env.metadata[app.env.docname]["fedlib"] = names


def link_names(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Link what the text calls by its name in code to the API, and the API's modules to pages."""
    for literal in list(doctree.findall(nodes.literal)):
        entry = _entry(app, page, literal.astext().removesuffix("()"))
        if entry and not isinstance(literal.parent, nodes.reference | nodes.title):
            place = (app.builder, page, entry.docname, entry.node_id, literal.deepcopy())
            literal.parent.replace(literal, make_refnode(*place))
    here = {n: node for node in doctree.findall(nodes.Element) for n in node.get("ids", ())}
    for module, entry in app.env.get_domain("py").modules.items():
        if entry.docname != page or entry.node_id not in here:
            continue
        users = [
            other
            for other in _pages(app)
            if module in map(_module, _names(app, other).values())
            and not other.endswith("_summary")  # all have one title, and teach no module
        ]
        if users:
            line = nodes.paragraph("", "On the pages ", classes=["api-pages"])
            for other in users:
                uri = app.builder.get_relative_uri(page, other)
                title = app.env.titles[other].astext()
                line += nodes.reference("", title, refuri=uri, internal=True)
                line += nodes.Text("." if other == users[-1] else "; ")
            place = here[entry.node_id]
            inside = isinstance(place, nodes.section)
            home, at = (place, 1) if inside else (place.parent, place.parent.index(place) + 1)
            home.insert(at, line)


def link_code(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Link names in code cells to the API."""

    def linked(match: re.Match) -> str:
        text, whole = match[0], ""
        for name in filter(None, match.groups()):
            whole = f"{whole}.{name}".lstrip(".")
            if entry := _entry(app, page, whole):
                uri = f"{app.builder.get_relative_uri(page, entry.docname)}#{entry.node_id}"
                span = f'<span class="n">{name}</span>'
                text = text.replace(span, f'<a class="code-name" href="{uri}">{span}</a>', 1)
        return text

    if _names(app, page):
        name = r'<span class="n">(\w+)</span>'
        dotted = rf'{name}(?:<span class="o">\.</span>{name})?'
        context["body"] = re.sub(dotted, linked, context["body"])


def _names(app: Sphinx, page: str) -> dict[str, str]:
    return app.env.metadata[page].get("fedlib", {})


def _pages(app: Sphinx) -> list[str]:
    return sorted(page for page in app.env.found_docs if page.startswith("notebooks/"))


def _entry(app: Sphinx, page: str, name: str) -> ObjectEntry | None:
    """Return where the API has a name as a page's code or text writes it."""
    first, *rest = name.split(".")
    whole = ".".join([_names(app, page).get(first, first), *rest])
    if not whole.startswith("fedlib"):
        return None
    entry = app.env.get_domain("py").objects.get(_written_at(whole))
    return entry if entry and entry.docname != page else None


@functools.cache
def _module(name: str) -> str:
    """Return the module in which a full name is written."""
    thing = pydoc.locate(name)
    return getattr(thing, "__module__", None) or name


def _imported(doctree: nodes.document) -> dict[str, str]:
    """Return the names that a page's code imports from fedlib, each with its dotted origin."""
    names = {}
    for block in doctree.findall(nodes.literal_block):
        try:
            tree = ast.parse(block.astext()) if "python" in block.get("language", "") else None
        except SyntaxError:  # magics, or a piece of a class
            continue
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedlib"):
                names |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    return names


@functools.cache
def _written_at(name: str) -> str:
    """Return the full name under which the API has what a dotted name leads to."""
    try:
        thing = pydoc.locate(name)
    except pydoc.ErrorDuringImport:
        return ""
    if hasattr(thing, "__qualname__") and hasattr(thing, "__module__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    return name


def link_facts(app: Sphinx, doctree: nodes.document) -> None:
    """Turn the names of claims into links where a cell says what was found."""
    for cell in [box for box in doctree.findall(nodes.container) if FOUND in box["classes"]]:
        for text in list(cell.findall(nodes.Text)):
            if isinstance(text.parent, nodes.literal_block | nodes.raw) or not FACT.search(text):
                continue
            parts: list[nodes.Node] = []
            for i, part in enumerate(FACT.split(minus(text))):
                parts.append(_to_fact(part, app.env.docname) if i % 2 else nodes.Text(part))
            text.parent.replace(text, parts)


def _to_fact(name: str, page: str) -> addnodes.pending_xref:
    options = dict(refdomain="std", reftype="ref", reftarget=name.lower(), refdoc=page)
    return addnodes.pending_xref("", nodes.inline("", name), refexplicit=True, refwarn=True,
                                 **options)  # fmt: skip
