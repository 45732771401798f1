"""What a page tells those who link to it: a description, a title, and with an address a map."""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path
from xml.etree import ElementTree

from docutils import nodes
from sphinx.application import Sphinx

LONGEST = 200  # characters of a description
LEFT_OUT = (nodes.table, nodes.container, nodes.literal_block, nodes.Admonition, nodes.footnote)


def describe_page(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Describe a page by its first paragraph; say its address only if the book has one."""
    told = {"og:site_name": app.config.project, "og:type": "article"}
    told["og:title"] = unescape(re.sub(r"<[^>]*>", "", context.get("title", "")))
    if text := first_words(tree):
        told |= {"description": text, "og:description": text}
    if base := app.config.html_baseurl.rstrip("/"):
        told["og:url"] = f"{base}/{page}.html"
    for name, text in told.items():
        kind = "property" if ":" in name else "name"
        tag = f'<meta {kind}="{name}" content="{escape(text)}" />\n'
        context["metatags"] = context.get("metatags", "") + tag


def first_words(tree: object) -> str:
    """Return the beginning of a page's first paragraph, cut at a word; empty if there is none."""
    for paragraph in tree.findall(nodes.paragraph) if isinstance(tree, nodes.document) else ():
        above = paragraph.parent
        while above is not None and not isinstance(above, LEFT_OUT):
            above = above.parent
        words = paragraph.astext().split()
        if above is None and len(words) > 5:
            while len(" ".join(words)) > LONGEST:
                words.pop()
            return " ".join(words)
    return ""


def write_map(app: Sphinx, exception: Exception | None) -> None:
    """Write ``sitemap.xml``, if the book has an address: a map needs whole ones."""
    base = app.config.html_baseurl.rstrip("/")
    if exception is not None or app.builder.format != "html" or not base:
        return
    root = ElementTree.Element("urlset", xmlns="http://www.sitemaps.org/schemas/sitemap/0.9")
    for page in sorted(app.env.found_docs):
        place = ElementTree.SubElement(ElementTree.SubElement(root, "url"), "loc")
        place.text = f"{base}/{page}.html"
    ElementTree.ElementTree(root).write(
        Path(app.outdir) / "sitemap.xml", encoding="utf-8", xml_declaration=True
    )
