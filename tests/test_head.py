"""What pages tell those who link to them, and what the index leads to, on a book of two pages."""

from __future__ import annotations

import re
import sys
from html import unescape

import build
import pytest

sys.path.insert(0, str(build.ROOT / "book" / "_ext"))
from fedbook import head, index

CONF = """
from fedbook import head, index
project = "Two pages"
def setup(app):
    app.add_transform(index.AddTerms)
    app.connect("html-page-context", head.describe_page)
    app.connect("build-finished", head.write_map)
"""
PAGE = "A < B\n=====\n\n.. note:: Not this paragraph, which is a box of its own.\n\n{}\n"


@pytest.mark.parametrize("base", ["", "https://book.example/one/"])
def test_a_page_has_a_description_and_the_book_a_map_if_it_has_an_address(
    base, tmp_path, monkeypatch
):
    from sphinx.cmd.build import build_main

    monkeypatch.setattr(index, "terms", lambda: {"index": {"a-b": ["η"], "nowhere": ["x"]}})
    (tmp_path / "conf.py").write_text(CONF + f"html_baseurl = {base!r}")
    (tmp_path / "index.rst").write_text(
        PAGE.format("Many clients hold *data* & want a model. " * 9), "utf-8"
    )
    log, out = tmp_path / "log", tmp_path / "o"
    assert build_main(["-q", "-w", str(log), str(tmp_path), str(out)]) == 0
    page = (out / "index.html").read_text("utf-8")
    described = unescape(re.search(r'name="description" content="(.*?)"', page)[1])
    assert described.startswith("Many clients hold data & want a model. Many")
    assert head.LONGEST - 10 < len(described) <= head.LONGEST
    assert 'property="og:title" content="A &lt; B"' in page
    assert (f'content="{base}index.html"' in page) == bool(base)
    there = out / "sitemap.xml"
    assert there.exists() == bool(base)
    assert not base or f"<loc>{base}index.html</loc>" in there.read_text("utf-8")
    assert '"\\u03b7": [[0, "a-b", true]]' in (out / "searchindex.js").read_text("utf-8")
    assert "no place nowhere to index on index" in log.read_text("utf-8")
