"""What the book adds to Sphinx: the claims tables, the errata, and pages that stay offline.

``claims-table`` and ``errata-table`` render facts that live in ``data/``, so that no page repeats
them by hand.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

VERDICTS = (
    "reproduced",
    "partly",
    "not reproduced",
    "at reduced scale",
    "needs data we may not ship",
)


class Facts(SphinxDirective):
    """Helpers to turn short Markdown texts into cells, items and anchors."""

    def inline(self, text: str) -> list[nodes.Node]:
        """Parse a short Markdown text; a single paragraph loses its wrapping."""
        holder = nodes.Element()
        lines = StringList(str(text).strip().splitlines() or [""], source=self.env.docname)
        self.state.nested_parse(lines, 0, holder)
        return list(holder.children)

    def anchor(self, name: str, *children: nodes.Node) -> nodes.inline:
        """Wrap nodes in a place that ``{ref}`` and links can lead to."""
        place = nodes.inline("", "", *children, ids=[nodes.make_id(name)], classes=["fact-id"])
        label = name.lower()
        self.env.domaindata["std"]["labels"].setdefault(
            label, (self.env.docname, place["ids"][0], name)
        )
        self.env.domaindata["std"]["anonlabels"].setdefault(
            label, (self.env.docname, place["ids"][0])
        )
        return place

    def table(
        self,
        heads: Iterable[str],
        widths: Iterable[int],
        rows: Iterable[list[list[nodes.Node]]],
        classes: list[str],
    ) -> nodes.table:
        """Build a table from rows of cells, each cell a list of block nodes."""
        heads, widths = list(heads), list(widths)
        group = nodes.tgroup(cols=len(heads))
        group.extend(nodes.colspec(colwidth=width) for width in widths)
        top = nodes.row()
        top.extend(nodes.entry("", nodes.paragraph(text=head)) for head in heads)
        group += nodes.thead("", top)
        body = nodes.tbody()
        for cells in rows:
            body += nodes.row("", *(nodes.entry("", *cell) for cell in cells))
        group += body
        return nodes.table("", group, classes=["colwidths-given", *classes])


class ClaimsTable(Facts):
    """The claims of a paper (or of all), what was measured for each, and the verdict.

    Argument: the paper's name or ``all``. Option ``summary``: counts of verdicts by paper only.
    """

    required_arguments = 1
    option_spec = {"summary": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Judge the claims from the stored records and lay them out."""
        judged = {paper: self.judged(paper) for paper in self.papers()}
        if "summary" in self.options:
            return [self.summary(judged)]
        return [self.rows(rows) for rows in judged.values()]

    def papers(self) -> list[str]:
        """Return the papers asked for, by the names of their files in ``data/claims``."""
        asked = self.arguments[0].strip()
        if asked != "all":
            return [asked]
        from fedlib.paths import data_folder

        found = sorted(path.stem for path in (data_folder() / "claims").glob("*.toml"))
        if not found:
            raise self.error("claims-table: there is no file in data/claims")
        return found

    def judged(self, paper: str) -> list[dict]:
        """Return the rows of ``fedlib.claims.judge`` as dictionaries."""
        from fedlib import claims

        try:
            rows = claims.judge(paper)
        except Exception as exc:
            raise self.error(f"claims-table: {paper}: {exc}") from exc
        if hasattr(rows, "to_dict"):
            rows = rows.to_dict("records")
        return [dataclasses.asdict(r) if dataclasses.is_dataclass(r) else dict(r) for r in rows]

    def verdict(self, text: str) -> nodes.inline:
        """Return a verdict, marked so that the style sheet can colour it."""
        return nodes.inline("", text, classes=["verdict", f"verdict-{nodes.make_id(text)}"])

    def summary(self, judged: dict[str, list[dict]]) -> nodes.table:
        """Return the counts: a row a paper, a column a verdict that occurs."""
        counts = {paper: Counter(r["verdict"] for r in rows) for paper, rows in judged.items()}
        seen = set().union(*counts.values())
        columns = [v for v in VERDICTS if v in seen] + sorted(seen - set(VERDICTS))
        body = []
        for paper, count in counts.items():
            numbers = [[nodes.paragraph(text=str(count[name]))] for name in columns]
            total = [nodes.paragraph(text=str(count.total()))]
            body.append([[nodes.paragraph(text=_title(paper))], *numbers, total])
        heads = ["paper", *columns, "claims"]
        table = self.table(heads, [3] + [2] * (len(heads) - 1), body, ["claims-summary"])
        for head, name in zip(list(table.findall(nodes.entry))[1:-1], columns, strict=False):
            head[0][:] = [self.verdict(name)]
        return table

    def rows(self, rows: list[dict]) -> nodes.table:
        """Return one paper's claims: id, statement and rule, measured, verdict and its record."""
        body = []
        for row in rows:
            verdict = nodes.paragraph("", "", self.verdict(row["verdict"]))
            source = " · ".join(str(row[key]) for key in ("record", "profile") if row.get(key))
            record = [nodes.paragraph("", source, classes=["fact-source"])] if source else []
            rule = self.inline(row.get("rule") or "")
            for node in rule:
                node.setdefault("classes", []).append("fact-rule")
            name = nodes.paragraph("", "", self.anchor(row["id"], nodes.Text(row["id"])))
            body.append(
                [
                    [name],
                    self.inline(row["statement"]) + rule,
                    self.inline(_measured(row.get("measured"))),
                    [verdict, *record],
                ]
            )
        heads = ["claim", "what the paper says, and how we decide", "measured", "verdict"]
        return self.table(heads, [12, 44, 24, 20], body, ["claims-table"])


class ErrataTable(Facts):
    """The errata of a paper, from ``data/errata/PAPER.toml`` (``participation`` if not named).

    Every ``[[erratum]]`` has ``id``, ``where``, ``says``, ``reads`` and ``checked``, in Markdown.
    """

    optional_arguments = 1
    PARTS = (("says", "The paper says"), ("reads", "We read"), ("checked", "How we checked"))

    def run(self) -> list[nodes.Node]:
        """Lay the errata out one below the other, each with its anchor."""
        paper = self.arguments[0].strip() if self.arguments else "participation"
        from fedlib.paths import data_folder

        path = data_folder() / "errata" / f"{paper}.toml"
        if not path.is_file():
            raise self.error(f"errata-table: there is no data/errata/{paper}.toml")
        self.env.note_dependency(str(path))
        errata = tomllib.loads(path.read_text("utf-8")).get("erratum", [])
        return [self.entry(erratum) for erratum in errata]

    def entry(self, erratum: dict) -> nodes.container:
        """Return one erratum: id and place, then what it says, what we read, how we checked."""
        if lacking := {"id", "where", "says", "reads", "checked"} - set(erratum):
            raise self.error(f"errata-table: {erratum.get('id', '?')} lacks {sorted(lacking)}")
        where = self.inline(erratum["where"])
        words = where[0].children if len(where) == 1 else where
        name = self.anchor(erratum["id"], nodes.strong(text=erratum["id"]))
        head = nodes.paragraph("", "", name, nodes.Text(" · "), *words, classes=["erratum-head"])
        parts = nodes.definition_list()
        for key, title in self.PARTS:
            text = nodes.definition("", *self.inline(erratum[key]))
            parts += nodes.definition_list_item("", nodes.term(text=title), text)
        return nodes.container("", head, parts, classes=["erratum"])


def _title(paper: str) -> str:
    return paper.replace("_", " ").capitalize()


def _measured(value: object) -> str:
    if value is None or value == "":
        return "no record yet"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def drop_thebe_files(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Leave out the scripts of a live-kernel service that the book does not use."""
    files = context.get("script_files", [])
    context["script_files"] = [script for script in files if not _is_thebe(script)]
    sheets = context.get("css_files", [])
    context["css_files"] = [sheet for sheet in sheets if not _is_thebe(sheet)]


def drop_thebe_nodes(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Leave out what the same service appends to the text of each page."""
    for node in list(doctree.findall(nodes.raw)):
        text = node.astext()
        if "text/x-thebe-config" in text or text.startswith("<script>kernelName"):
            node.parent.remove(node)


def _is_thebe(script: object) -> bool:
    attributes = getattr(script, "attributes", {}) or {}
    name = f"{getattr(script, 'filename', None) or script} {attributes.get('body') or ''}"
    return "thebe" in name.lower()


def add_styles(app: Sphinx) -> None:
    """Load our style sheets; scripts of ``book/assets`` load only where a page asks for them."""
    app.config.html_static_path.append(str(Path(__file__).parent / "static"))
    app.add_css_file("facts.css", priority=890)
    for sheet in sorted((Path(app.srcdir) / "book" / "assets").glob("*.css")):
        app.add_css_file(sheet.name, priority=900)


def plain_signature(
    app: Sphinx, what: str, name: str, obj: object, options: dict, signature: str, returns: str
) -> tuple[str, str] | None:
    """Show what a reader types: no objects of the command line's machinery, no addresses."""
    if not signature or "<" not in signature:
        return None
    plain = re.sub(r"~?\w+\.Annotated\[(.*?), <[^>]*>\]", r"\1", signature)
    return re.sub(r"<[^<>]*>", "...", plain), returns


def drop_font_hints(app: Sphinx, exception: Exception | None) -> None:
    """Remove the theme's font preloads: from disk a browser refuses them and says so each time."""
    if exception is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            text = path.read_text("utf-8")
            clean = re.sub(r'<link rel="preload" as="font"[^>]*>\s*', "", text)
            if clean != text:
                path.write_text(clean, "utf-8")


def setup(app: Sphinx) -> dict:
    """Register the directives and the page handlers."""
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("errata-table", ErrataTable)
    app.connect("builder-inited", add_styles)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("build-finished", drop_font_hints)
    app.connect("html-page-context", drop_thebe_files, priority=950)
    app.connect("doctree-resolved", drop_thebe_nodes, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
