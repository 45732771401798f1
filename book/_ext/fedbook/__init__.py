"""What the book adds to Sphinx: facts as tables, links, dates, and pages that stay light."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

import fedlib
from fedlib.lab.evidence import ages

from .facts import ClaimsFilter, ClaimsTable, DurationsTable, ErrataTable
from .fold import fold
from .head import cite_page, describe_page, write_map
from .index import AddTerms
from .light import drop_thebe_files, drop_thebe_nodes, lighten
from .links import link_code, link_facts, link_names, mark_told, note_names

ROOT = Path(fedlib.__file__).parent.parent


def add_styles(app: Sphinx) -> None:
    """Load our style sheets and our script."""
    app.config.html_static_path.append(str(Path(__file__).parent / "static"))
    app.add_css_file("facts.css", priority=890)
    app.add_css_file("book.css", priority=900)
    app.add_css_file("print.css", priority=910, media="print")
    app.add_js_file("book.js", loading_method="defer")


def date_page(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Say when a page's source was last changed, where the repository knows."""
    for source in (ROOT / f"{page}.ipynb", ROOT / f"{page}.md"):
        if source.is_file():
            day = ages.git(ROOT, "log", "-1", "--format=%cs", "--", str(source)).decode()
            context["last_updated"] = day.strip() or None


def plain_signature(
    app: Sphinx, what: str, name: str, obj: object, options: dict, signature: str, returns: str
) -> tuple[str, str] | None:
    """Show what a reader types: no objects of the command line's machinery, no addresses."""
    if not signature or "<" not in signature:
        return None
    plain = re.sub(r"~?\w+\.Annotated\[(.*?), <[^>]*>\]", r"\1", signature)
    return re.sub(r"<[^<>]*>", "...", plain), returns


def skip_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: dict
) -> bool | None:
    """Leave out the fields of named tuples: Python says of each which number it has."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> dict:
    """Register the directives and the page handlers."""
    app.setup_extension("sphinx.ext.autodoc")  # whose signatures are made plain
    app.add_directive("claims-filter", ClaimsFilter)
    app.add_directive("claims-table", ClaimsTable)
    app.add_directive("durations-table", DurationsTable)
    app.add_directive("errata-table", ErrataTable)
    app.add_transform(AddTerms)
    app.connect("builder-inited", add_styles)
    app.connect("autodoc-process-signature", plain_signature)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("build-finished", lighten, priority=950)  # after what brings the files
    app.connect("doctree-read", mark_told)
    app.connect("doctree-read", link_facts)
    app.connect("html-page-context", drop_thebe_files, priority=950)
    app.connect("doctree-read", note_names)
    app.connect("doctree-resolved", link_names)
    app.connect("doctree-resolved", fold)
    app.connect("html-page-context", link_code, priority=950)
    app.connect("html-page-context", date_page, priority=950)
    app.connect("html-page-context", describe_page)
    app.connect("html-page-context", cite_page)
    app.connect("build-finished", write_map)
    app.connect("doctree-resolved", drop_thebe_nodes, priority=950)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
