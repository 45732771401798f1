"""The book's index: words, methods and symbols, each leading to the place that explains it."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

TERMS = Path(__file__).parents[2] / "terms.toml"


@functools.cache
def terms() -> dict[str, dict[str, list[str]]]:
    """Return the words of each place of each page."""
    return tomllib.loads(TERMS.read_text("utf-8"))


class AddTerms(SphinxTransform):
    """Put the words of a page into the index, from where the search takes them first."""

    default_priority = 800  # ids are given, and the domain of the index has not looked yet

    def apply(self, **kwargs: object) -> None:
        """Place an entry before what each of its words leads to."""
        page = self.env.docname
        there = {n for node in self.document.findall(nodes.Element) for n in node.get("ids", ())}
        for place, words in terms().get(page, {}).items():
            if place not in there:
                logging.getLogger(__name__).warning("no place %s to index on %s", place, page)
            entries = [("single", word, place, "main", None) for word in words]
            self.document.insert(0, addnodes.index(entries=entries))
