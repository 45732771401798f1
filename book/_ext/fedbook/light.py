"""What a page would load and not use is left out; what its HTML may not have is mended."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

UNUSED = re.compile(
    r'<link rel="preload" as="font"[^>]*>\s*'  # from disk a browser refuses it, and says so
    r'|<script src="[^"]*/fontawesome/[^"]*"></script>\s*'  # its style sheet draws the icons
)
MATHJAX = re.compile(
    r"<script>window\.MathJax = .*?</script>\s*|<script [^>]*/mathjax/[^>]*></script>\s*"
)
DOUBLED = re.compile(r' id="(?:exercise|solution|proof)-content"')  # one for every box of a page
ENTRY = (
    'role="doc-biblioentry"',
    'role="listitem"',
)  # the first is deprecated, and no child of a list
FORMULA = re.compile(r'class="(?:[^"]* )?(?:math|text_latex)\b')
SPARE = (  # files of others that no page asks for
    *("vendor/fontawesome/*/js", "mathjax/*-full*.js", "mathjax/*-svg.js", "mathjax/*mml-*.js"),
    *("mathjax/output/svg*", "mathjax/input/mml*", "mathjax/input/asciimath*"),
    *("mathjax/adaptors", "mathjax/node-main.js", "mathjax/latest.js"),
)


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


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Leave out of each page, and of the site, what is loaded and not used; mend its HTML."""
    if exception is not None or app.builder.format != "html":
        return
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        clean = DOUBLED.sub("", UNUSED.sub("", text)).replace(*ENTRY)
        if not FORMULA.search(clean):
            clean = MATHJAX.sub("", clean)
        if clean != text:
            path.write_text(clean, "utf-8")
    for spare in (p for name in SPARE for p in (Path(app.outdir) / "_static").glob(name)):
        shutil.rmtree(spare) if spare.is_dir() else spare.unlink()
