"""What a page tells those who link to it: title, description, picture, feed, how it is cited."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from urllib.parse import urljoin
from xml.etree import ElementTree

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

LONGEST = 200  # characters of a description
NUMBER = r'<span class="section-number">[^<]*</span>'
LEFT_OUT = (nodes.table, nodes.container, nodes.literal_block, nodes.Admonition, nodes.footnote)


def describe_page(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Describe a page by its first paragraph and figure, and name the feed of corrections."""
    told = {"og:site_name": app.config.html_title, "og:type": "article"}
    told["og:title"] = title(app, page, context)
    if text := first_words(tree):
        told |= {"description": text, "og:description": text}
    if place := address(app, page):
        told |= {"og:url": place, "og:image": urljoin(place, picture(tree, context["pathto"]))}
        told["twitter:card"] = "summary_large_image"
    feed = context["pathto"]("corrections.xml", 1)
    tags = f'<link rel="alternate" type="application/atom+xml" title="Corrections" href="{feed}" />'
    for name, text in told.items():
        kind = "property" if name.startswith("og:") else "name"
        tags += f'\n<meta {kind}="{name}" content="{escape(text)}" />'
    context["metatags"] = f"{context.get('metatags', '')}{tags}\n"


def cite_page(app: Sphinx, page: str, template: str, context: dict, tree: object) -> None:
    """Say at the foot of a page how it is cited: its title, the book, the version, its address."""
    if isinstance(tree, nodes.document):
        book = f"{app.config.html_title}, version {app.config.release}"
        cited = escape(". ".join(filter(None, (book, address(app, page)))))
        how = app.builder.get_relative_uri(page, "book/citing") + "#cite-this"
        context["theme_extra_footer"] = (
            f"<p>Cite this page: <cite>{escape(title(app, page, context))}</cite>. "
            f'In: {cited}. <a href="{how}">How to cite</a></p>'
        )


def title(app: Sphinx, page: str, context: dict) -> str:
    """Return a page's title, and its chapter if it belongs to one: seven are called alike."""
    text = unescape(re.sub(NUMBER + r"|<[^>]*>", "", context.get("title", "")))
    listed = app.env.tocs[app.config.root_doc].findall(addnodes.toctree)
    mine = (part for part in listed if part.get("numbered") and page in part["includefiles"])
    part = next(mine, {}).get("caption")
    return f"{text} ({part})" if part else text


def address(app: Sphinx, page: str) -> str:
    """Return where a page lies in public; empty if the book is not there."""
    base = app.config.html_baseurl.rstrip("/")
    return f"{base}/{page}.html" if base else ""


def picture(tree: object, pathto: Callable[[str, int], str]) -> str:
    """Return a page's first figure, as other sites show no drawings; or the book's own card."""
    shown = tree.findall(nodes.image) if isinstance(tree, nodes.document) else ()
    figures = (image["uri"] for image in shown if image["uri"].endswith(".png"))
    return next(figures, pathto("_static/card.png", 1))


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
    if exception is not None or app.builder.format != "html" or not app.config.html_baseurl:
        return
    root = ElementTree.Element("urlset", xmlns="http://www.sitemaps.org/schemas/sitemap/0.9")
    for page in sorted(app.env.found_docs):
        place = ElementTree.SubElement(ElementTree.SubElement(root, "url"), "loc")
        place.text = address(app, page)
    ElementTree.ElementTree(root).write(
        Path(app.outdir) / "sitemap.xml", encoding="utf-8", xml_declaration=True
    )
