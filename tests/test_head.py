"""What pages tell those who link to them, and what the index leads to, on a book of two pages."""

from __future__ import annotations

import re
import struct
import sys
from html import unescape

import build
import pytest

sys.path.insert(0, str(build.ROOT / "book" / "_ext"))
from fedbook import head, index

CONF = """
from fedbook import head, index
html_title, release = "Two pages", "1.2, commit 1a2b3c4, 2031-05-06"
html_theme = "sphinx_book_theme"
def setup(app):
    app.add_transform(index.AddTerms)
    app.connect("html-page-context", head.describe_page)
    app.connect("html-page-context", head.cite_page)
    app.connect("build-finished", head.write_map)
"""
PAGE = """A < B
=====

.. toctree::
   :caption: Ways & means
   :numbered:

   book/citing

.. note:: Not this paragraph, which is a box of its own.

{}
"""
CITING = "Citing\n======\n\n.. image:: drawn.svg\n.. image:: seen.png\n.. image:: later.png\n"


@pytest.mark.parametrize("base", ["", "https://book.example/one/"])
def test_a_page_is_described_and_cited_and_with_an_address_shown_and_on_the_map(
    base, tmp_path, monkeypatch
):
    from sphinx.cmd.build import build_main

    monkeypatch.setattr(index, "terms", lambda: {"index": {"a-b": ["η"], "nowhere": ["x"]}})
    (tmp_path / "conf.py").write_text(CONF + f"html_baseurl = {base!r}")
    (tmp_path / "index.rst").write_text(
        PAGE.format("Many clients hold *data* & want a model. " * 9), "utf-8"
    )
    (tmp_path / "book").mkdir()
    (tmp_path / "book" / "citing.rst").write_text(CITING)
    for name in ("drawn.svg", "seen.png", "later.png"):
        (tmp_path / "book" / name).write_text("<svg/>")
    log, out = tmp_path / "log", tmp_path / "o"
    assert build_main(["-q", "-w", str(log), str(tmp_path), str(out)]) == 0
    page = (out / "index.html").read_text("utf-8")
    described = unescape(re.search(r'name="description" content="(.*?)"', page)[1])
    assert described.startswith("Many clients hold data & want a model. Many")
    assert head.LONGEST - 10 < len(described) <= head.LONGEST
    assert 'property="og:title" content="A &lt; B"' in page
    assert 'property="og:site_name" content="Two pages"' in page
    assert (f'content="{base}index.html"' in page) == bool(base)
    there = out / "sitemap.xml"
    assert there.exists() == bool(base)
    assert not base or f"<loc>{base}index.html</loc>" in there.read_text("utf-8")
    assert '"\\u03b7": [[1, "a-b", true]]' in (out / "searchindex.js").read_text("utf-8")
    assert "no place nowhere to index on index" in log.read_text("utf-8")
    inner = (out / "book" / "citing.html").read_text("utf-8")
    for text, shown in ((page, "_static/card.png"), (inner, "_images/seen.png")):
        pictures = re.findall(r'property="og:image" content="(.*?)"', text)
        assert pictures == [f"{base}{shown}"] * bool(base)
    assert (out / "_images" / "seen.png").is_file()
    card = (build.ROOT / "book" / "assets" / "card.png").read_bytes()
    assert struct.unpack(">8x4x4s2I", card[:24]) == (b"IHDR", 1200, 630)
    atom = '<link rel="alternate" type="application/atom+xml" title="Corrections" href="{}" />'
    assert atom.format("corrections.xml") in page and atom.format("../corrections.xml") in inner
    foot = unescape(re.sub(r"\s+", " ", re.search(r"Cite this page: (.*?)</p>", inner, re.S)[1]))
    told = "<cite>Citing (Ways & means)</cite>. In: Two pages, version 1.2, commit 1a2b3c4, 2031"
    assert foot.startswith(told) and (f"{base}book/citing.html" in foot) == bool(base)
    assert 'href="#cite-this">How to cite</a>' in foot
    assert 'book/citing.html#cite-this">How to cite</a>' in page
