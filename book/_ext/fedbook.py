"""What the book adds to Sphinx: the claims tables, the errata, and pages that stay offline.

``claims-table`` and ``errata-table`` render facts that live in ``data/``, so that no page repeats
them by hand.
"""

from __future__ import annotations

import ast
import functools
import posixpath
import pydoc
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import yaml
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.domains.python import ObjectEntry
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import fedlib
from fedlib.errors import FedlibError
from fedlib.evidence import claims
from fedlib.paths import about, papers
from fedlib.schema import Page, read_toml

TOLD = {
    "provenance": re.compile(r"Record \S+\.(smoke|quick|paper)\b.*\bcommit \S+"),
    "verdict-note": re.compile(r"[A-Z]{3,}\d?-C\S+: [A-Z ]+\."),
}
FOUND = "tag_found"  # on a cell that tells what was found
ROOT = Path(fedlib.__file__).parent.parent
FACT = re.compile(r"(?<![\w`-])([A-Z]{3,}\d?-[CE]\d+(?:-[a-z]+)?)(?![\w`-])")


judge = functools.cache(claims.judge)  # once a build: several pages show the same verdicts


class Facts(SphinxDirective):
    """Helpers to turn short Markdown texts into cells, items and anchors."""

    def inline(self, text: str) -> list[nodes.Node]:
        """Parse a short Markdown text; the name of a claim or an erratum becomes a link."""
        linked = FACT.sub(r"{ref}`\1`", str(text).strip())
        holder = nodes.Element()
        lines = StringList(linked.splitlines() or [""], source=self.env.docname)
        self.state.nested_parse(lines, 0, holder)
        return list(holder.children)

    def anchored(self, name: str, box: nodes.Element) -> nodes.reference:
        """Make a box a place that ``{ref}`` leads to, and return a link to it that shows its name.

        The link waits in the box's head, so that a reader can copy the address.
        """
        place = nodes.make_id(name)
        box["ids"].append(place)
        standard = self.env.domaindata["std"]
        standard["labels"].setdefault(name.lower(), (self.env.docname, place, name))
        standard["anonlabels"].setdefault(name.lower(), (self.env.docname, place))
        return nodes.reference("", name, internal=True, refid=place, classes=["fact-id"])

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


class ClaimsFilter(Facts):
    """One link for each verdict; the style sheet hides what has another.

    The choice is part of the address, so it can be linked to: ``only-mixed``.
    """

    def run(self) -> list[nodes.Node]:
        """Return the links as a list."""
        rows = [row for paper in claims.papers() for row in judge(paper)]
        bar = nodes.bullet_list(classes=["claims-filter"])
        for name, number in {"all": len(rows), **claims.count(rows)}.items():
            item = nodes.list_item()
            place = self.anchored(f"only-{name.replace(' ', '-')}", item)
            place.replace(place[0], nodes.Text(f"{name} ({number})"))
            place["classes"] = []
            item += nodes.paragraph("", "", place)
            bar += item
        return [bar]


class ClaimsTable(Facts):
    """The claims of a paper (or of all): what it reports, what we measured, and the verdict.

    Argument: the paper's name or ``all``. Option ``summary``: counts of verdicts by paper only.
    """

    required_arguments = 1
    option_spec = {"summary": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Judge the claims from the stored records and lay them out."""
        asked = self.arguments[0].strip()
        papers = claims.papers() if asked == "all" else [asked]
        if not papers:
            raise self.error("claims-table: there is no file among the papers")
        try:
            judged = {paper: judge(paper) for paper in papers}
            if "summary" in self.options:
                return [self.summary(judged)]
            laid = []
            for rows in judged.values():
                laid += [self.overview(rows), *(self.card(row) for row in rows)]
            return laid
        except FedlibError as exc:
            raise self.error(f"claims-table: {exc}") from exc

    def verdict(self, text: str) -> nodes.inline:
        """Return a verdict, marked so that the style sheet can give it its sign and colour."""
        return nodes.inline("", text, classes=["verdict", f"verdict-{nodes.make_id(text)}"])

    def summary(self, judged: dict[str, list[dict]]) -> nodes.table:
        """Return the counts: a row a paper, a pill for each verdict that occurs."""
        body = []
        for paper, rows in judged.items():
            pills = nodes.bullet_list(classes=["verdict-counts"])
            for name, count in claims.count(rows).items():
                if count:
                    words = (nodes.strong(text=str(count)), nodes.Text(" "), self.verdict(name))
                    home = posixpath.dirname(self.env.docname)
                    there = f"{posixpath.relpath('book/scoreboard', home)}.html#only-{name}"
                    only = nodes.reference(
                        "", "", *words, internal=True, refuri=there.replace(" ", "-")
                    )
                    pills += nodes.list_item("", nodes.paragraph("", "", only))
            title = nodes.paragraph(text=self.short(paper))
            total = nodes.paragraph(text=f"{len(rows)} claims", classes=["fact-source"])
            body.append([[title, total], [pills]])
        return self.table(["paper", "verdicts"], [30, 70], body, ["claims-summary"])

    def short(self, paper: str) -> str:
        """Return a paper's short name: the caption of its chapter in the table of contents."""
        toc = yaml.safe_load((Path(self.env.app.srcdir) / "_toc.yml").read_text("utf-8"))
        for part in toc.get("parts", []):
            files = [chapter["file"] for chapter in part["chapters"]]
            if any(Path(file).parent.name.endswith(f"_{paper}") for file in files):
                return part["caption"]
        return paper.capitalize()

    def overview(self, rows: list[dict]) -> nodes.table:
        """Return one line a claim: a link to its card, the statement, outcomes and verdict."""
        body = []
        for row in rows:
            place = nodes.make_id(row["id"])
            link = nodes.reference("", row["id"], internal=True, refid=place, classes=["fact-id"])
            where = nodes.paragraph(text=row["where"], classes=["fact-source"])
            pill = nodes.paragraph("", "", self.verdict(row["verdict"]))
            told = nodes.paragraph(text=row["told"], classes=["fact-source"])
            name = [nodes.paragraph("", "", link), where]
            body.append([name, self.inline(row["statement"]), [pill, told]])
        heads = ["claim", "what it says", "verdict"]
        return self.table(heads, [22, 50, 28], body, ["claims-list"])

    def card(self, row: dict) -> nodes.container:
        """Return one claim: its statement, the paper and ours side by side, and where from."""
        card = _box("claim")
        head = nodes.paragraph("", "", self.anchored(row["id"], card), classes=["claim-head"])
        where = self.inline(row["where"])
        words = where[0].children if len(where) == 1 else where
        head += [nodes.Text(" · "), nodes.inline("", "", *words), self.verdict(row["verdict"])]
        reported = self.inline(row["paper_reports"])
        theirs = _box("claim-paper", _label("The paper reports"), *reported)
        ours = _box("claim-ours", _label("We measure"), *self.measured(row["checks"]))
        card += [head, _box("claim-statement", *self.inline(row["statement"]))]
        card += _box("claim-sides", theirs, ours)
        if row["note"]:
            card += _box("claim-note", *self.inline(row["note"]))
        if row["record"]:
            card += self.origin(row)
        return card

    def origin(self, row: dict) -> nodes.container:
        """Return where the verdict comes from: records, what matters and why, how old the rule."""
        lines = row["origins"] or [f"no record of: {row['record']}"]
        if row["smallest"]:
            named = ", ".join(f"{value:g} in {name}" for name, value in row["smallest"].items())
            lines = [*lines, f"smallest difference that matters: {named}. {row['because']}"]
        if row["profile"] and row["foreseen"]:
            lines.append("The rule is older than the record.")
        elif row["profile"]:
            lines.append(f"The rule is younger than the record. {row['changed']}".rstrip())
        paragraphs = [nodes.paragraph(text=line, classes=["fact-source"]) for line in lines]
        return _box("claim-origin", *paragraphs)

    def measured(self, checks: list[dict]) -> list[nodes.Node]:
        """Return one item a check: its outcome, the quantity, its value and what was asked."""
        if not checks:
            return [nodes.paragraph(text="Nothing: there are no data for it here.")]
        items = nodes.bullet_list(classes=["checks"])
        for check in checks:
            word = check["outcome"]
            sign = nodes.inline("", word, classes=["check-sign", f"check-{nodes.make_id(word)}"])
            value = nodes.strong(text=_minus(check["measured"]), classes=["check-value"])
            seen = [] if word == claims.NO_RECORD else [value, nodes.Text(" ")]
            why = f" ({check['why']})" * bool(check["why"])
            asked = f"asked: {_minus(check['asked'])}{why}"
            quantity = check["quantity"] + " (control)" * (not check["essential"])
            lines = (
                nodes.paragraph(text=_together(quantity), classes=["check-what"]),
                nodes.paragraph(
                    "", "", *seen, nodes.inline("", asked, classes=["check-bounds"]),
                    classes=["check-seen"],
                ),
            )  # fmt: skip
            items += nodes.list_item("", nodes.paragraph("", "", sign), _box("check", *lines))
        return [items]


class Erratum(Page):
    """An entry of an ``errata.toml``, in Markdown; ``test`` names the tests that hold it."""

    id: str
    kind: Literal["error", "clarification", "decision"]
    where: str
    says: str
    reads: str
    checked: str
    test: list[str]


class Errata(Page):
    """An ``errata.toml``."""

    erratum: list[Erratum]


class ErrataTable(Facts):
    """The errata of a paper, in ``data/papers/PAPER/errata.toml``, by default ``participation``."""

    optional_arguments = 1
    LISTS = {
        "error": ("Errors", "False as printed; a test of ours shows it."),
        "clarification": (
            "Clarifications",
            "True, or put right elsewhere in the paper, but a reader stumbles.",
        ),
        "decision": (
            "Decided by us",
            "Open in the paper, or different in its code, so we had to choose.",
        ),
    }
    READS = {"error": "What holds", "clarification": "We read", "decision": "We do"}

    def run(self) -> list[nodes.Node]:
        """Lay the errata out in lists by kind, one below the other, each with its anchor."""
        paper = self.arguments[0].strip() if self.arguments else "participation"
        homes = papers("errata.toml")
        if paper not in homes:
            raise self.error(f"errata-table: there is no data/papers/{paper}/errata.toml")
        path = homes[paper] / "errata.toml"
        self.env.note_dependency(str(path))
        try:
            errata = read_toml(path, Errata)["erratum"]
        except FedlibError as error:
            raise self.error(f"errata-table: {error}") from error
        lists = []
        for kind, (title, told) in self.LISTS.items():
            entries = [self.entry(erratum) for erratum in errata if erratum["kind"] == kind]
            if entries:
                box = nodes.section(ids=[nodes.make_id(f"errata-{paper}-{kind}")])
                box += [nodes.title(text=title), nodes.paragraph(text=told), *entries]
                lists.append(box)
        return lists

    def entry(self, erratum: Erratum) -> nodes.container:
        """Return one erratum: id and place, then what it says, what we read, how we checked."""
        where = self.inline(erratum["where"])
        words = where[0].children if len(where) == 1 else where
        box = _box("erratum")
        name = self.anchored(erratum["id"], box)
        head = nodes.paragraph("", "", name, nodes.Text(" · "), *words, classes=["erratum-head"])
        parts = nodes.definition_list()
        texts = {"The paper says": erratum["says"], self.READS[erratum["kind"]]: erratum["reads"]}
        texts["How we checked"] = erratum["checked"]
        for title, text in texts.items():
            told = self.inline(text)
            if title == "How we checked" and erratum["test"]:
                names = ", ".join(f"`{name}`" for name in erratum["test"])
                told += self.inline(f"Tested by {names}.")
            parts += nodes.definition_list_item(
                "", nodes.term(text=title), nodes.definition("", *told)
            )
        box += [head, parts]
        return box


def _in_repository(config: Config, file: str) -> str:
    options = config.html_theme_options
    branch = options.get("repository_branch") or "main"
    return f"{options['repository_url']}/blob/{branch}/{file}"


def _box(name: str, *children: nodes.Node) -> nodes.container:
    return nodes.container("", *children, classes=[name], is_div=True)


def _label(text: str) -> nodes.paragraph:
    return nodes.paragraph(text=text, classes=["claim-label"])


def _together(text: str) -> str:
    return re.sub(r" ([=≥≤]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)


def _minus(text: str) -> str:
    return re.sub(r"(?<![\w.])-(?=[\d.])", "\N{MINUS SIGN}", text)


def mark_told(app: Sphinx, doctree: nodes.document) -> None:
    """Mark printed lines that are prose; where a figure's record comes from goes under it."""
    for block in list(doctree.findall(nodes.literal_block)):
        lines = block.astext().strip().splitlines()
        for name, pattern in TOLD.items():
            if lines and all(pattern.match(line) for line in lines):
                block["classes"].append(name)
                if name == "provenance" and "cell_output" in block.parent.get("classes", []):
                    home = block.parent
                    home.remove(block)
                    home += [_to_record(app, line) for line in lines]


def _to_record(app: Sphinx, line: str) -> nodes.paragraph:
    """Return a line on where numbers come from; the record's name leads to its manifest."""
    chapter = Path(app.env.docname).parent.name
    (home,) = (h for h in papers().values() if about(h).get("chapter") == chapter)
    told = nodes.paragraph(classes=["provenance"])
    for part in re.split(r"(?<=Record )(\S+?\.(?:smoke|quick|paper))\b", line):
        file = home / "results" / f"{part}.json"
        if file.is_file():
            url = _in_repository(app.config, f"data/papers/{home.name}/results/{file.name}")
            told += nodes.reference("", part, refuri=url)
        else:
            told += nodes.Text(part)
    return told


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
            other for other in _pages(app) if module in map(_module, _names(app, other).values())
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

    def linked(found: re.Match) -> str:
        text, whole = found[0], ""
        for name in filter(None, found.groups()):
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
    found = {}
    for block in doctree.findall(nodes.literal_block):
        try:
            tree = ast.parse(block.astext()) if "python" in block.get("language", "") else None
        except SyntaxError:  # magics, or a piece of a class
            continue
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedlib"):
                found |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    return found


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
            for i, part in enumerate(FACT.split(_minus(text))):
                parts.append(_to_fact(part, app.env.docname) if i % 2 else nodes.Text(part))
            text.parent.replace(text, parts)


def _to_fact(name: str, page: str) -> addnodes.pending_xref:
    options = dict(refdomain="std", reftype="ref", reftarget=name.lower(), refdoc=page)
    return addnodes.pending_xref("", nodes.inline("", name), refexplicit=True, refwarn=True,
                                 **options)  # fmt: skip


def date_page(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Say when a page's source was last changed, where the repository knows."""
    for source in (ROOT / f"{page}.ipynb", ROOT / f"{page}.md"):
        if source.is_file():
            command = ["git", "log", "-1", "--format=%cs", "--", str(source)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            context["last_updated"] = done.stdout.strip() or None


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
    """Load our style sheets and our script."""
    app.config.html_static_path.append(str(Path(__file__).parent / "static"))
    app.add_css_file("facts.css", priority=890)
    app.add_css_file("book.css", priority=900)
    app.add_js_file("book.js", loading_method="defer")


def plain_signature(
    app: Sphinx, what: str, name: str, obj: object, options: dict, signature: str, returns: str
) -> tuple[str, str] | None:
    """Show what a reader types: no objects of the command line's machinery, no addresses."""
    if not signature or "<" not in signature:
        return None
    plain = re.sub(r"~?\w+\.Annotated\[(.*?), <[^>]*>\]", r"\1", signature)
    return re.sub(r"<[^<>]*>", "...", plain), returns


UNUSED = re.compile(
    r'<link rel="preload" as="font"[^>]*>\s*'  # from disk a browser refuses it, and says so
    r'|<script src="[^"]*/fontawesome/[^"]*"></script>\s*'  # its style sheet draws the icons
)
MATHJAX = re.compile(
    r"<script>window\.MathJax = .*?</script>\s*|<script [^>]*/mathjax/[^>]*></script>\s*"
)
FORMULA = re.compile(r'class="(?:[^"]* )?(?:math|text_latex)\b')
SPARE = (  # files of others that no page asks for
    *("vendor/fontawesome/*/js", "mathjax/*-full*.js", "mathjax/*-svg.js", "mathjax/*mml-*.js"),
    *("mathjax/output/svg*", "mathjax/input/mml*", "mathjax/input/asciimath*"),
    *("mathjax/adaptors", "mathjax/node-main.js", "mathjax/latest.js"),
)


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Leave out of each page, and of the site, what is loaded and not used."""
    if exception is not None or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        clean = UNUSED.sub("", text)
        if not FORMULA.search(clean):
            clean = MATHJAX.sub("", clean)
        if clean != text:
            path.write_text(clean, "utf-8")
    for spare in (p for name in SPARE for p in (Path(app.outdir) / "_static").glob(name)):
        shutil.rmtree(spare) if spare.is_dir() else spare.unlink()


def setup(app: Sphinx) -> dict:
    """Register the directives and the page handlers."""
    app.setup_extension("sphinx.ext.autodoc")  # whose signatures are made plain
    app.add_directive("claims-filter", ClaimsFilter)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("errata-table", ErrataTable)
    app.connect("builder-inited", add_styles)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("build-finished", lighten, priority=950)  # after what brings the files
    app.connect("doctree-read", mark_told)
    app.connect("doctree-read", link_facts)
    app.connect("html-page-context", drop_thebe_files, priority=950)
    app.connect("doctree-read", note_names)
    app.connect("doctree-resolved", link_names)
    app.connect("html-page-context", link_code, priority=950)
    app.connect("html-page-context", date_page, priority=950)
    app.connect("doctree-resolved", drop_thebe_nodes, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
