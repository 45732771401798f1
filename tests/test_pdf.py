"""The book on paper: pages of a small made site, printed and joined."""

from __future__ import annotations

from pathlib import Path

import browser
import pdf
import pytest
from pages import ROOT

from fedlib.errors import FedlibError

pypdf = pytest.importorskip("pypdf", reason="pypdf, which joins printed pages, is not installed")

PAGE = f"""<!doctype html><html data-theme="dark"><head><meta charset="utf-8"><title>made</title>
<link rel="stylesheet" href="{ROOT.as_uri()}/book/_ext/fedbook/static/print.css" media="print">
<style>[data-theme="dark"] p::after {{content: " by night"}}</style>
<script defer src="{ROOT.as_uri()}/book/assets/book.js"></script></head><body>
<nav class="bd-links" hidden><ul>
<li><a class="reference internal" href="index.html">Made book</a></ul>
<p class="caption">First part</p><ul>
<li><a class="reference internal" href="../notebooks/01_a/one.html">1. One</a></ul>
<p class="caption">Second part</p><ul>
<li><a class="reference internal" href="../notebooks/02_b/two.html">2. Two</a>
<ul><li><a class="reference internal" href="../notebooks/02_b/under.html">Under</a></ul></ul></nav>
<article class="bd-article">%s</article></body></html>"""
ONE = """<section id="one"><h1>1. One</h1><section id="s"><h2>Säule<a class="headerlink">#</a></h2>
<p><a href="../02_b/two.html#far:x=1">set</a> <a href="https://example.org/x">out</a>
<a href="../gone.html">gone</a> <a href="#s">up</a></p>
<details><summary>Proof</summary><p>what the box hides</p></details></section></section>"""
TWO = """<section id="two"><h1>2. Two</h1><p>begins</p><div style="break-before: page">
<p>before</p><p id="far">the place</p></div></section>"""
PAGES = {
    "book/index": "<h1>Made book</h1><p>front</p>",
    "notebooks/01_a/one": ONE,
    "notebooks/02_b/two": TWO,
    "notebooks/02_b/under": "<h1>Under</h1>",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    html = tmp_path_factory.mktemp("html")
    for name, text in PAGES.items():
        path = html / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PAGE % text, "utf-8")
    return html


@pytest.fixture(scope="module")
def book(site: Path, tmp_path_factory: pytest.TempPathFactory) -> pypdf.PdfReader:
    if browser.find() is None:
        pytest.skip("there is no Chromium")
    out = tmp_path_factory.mktemp("out") / "book.pdf"
    pdf.make(site, out)
    assert [path.name for path in out.parent.iterdir()] == ["book.pdf"]
    return pypdf.PdfReader(out)


def links(page: pypdf.PageObject) -> list[dict]:
    return [link.get_object() for link in page.get("/Annots", ())]


def lead(book: pypdf.PdfReader, link: dict) -> int:
    return book.get_page_number(link["/Dest"][0].get_object())


def height(page: pypdf.PageObject, words: str) -> float:
    """Return how many points above the sheet's lower edge some words stand."""
    seen = []

    def look(text: str, now: list, line: list, *_: object) -> None:
        if words in text:
            seen.append(now[5] + now[3] * line[5])

    page.extract_text(visitor_text=look)
    return seen[0]


@pytest.mark.slow
def test_the_pages_come_in_order_with_their_numbers_and_boxes_open(book):
    words = [page.extract_text().split() for page in book.pages]
    begins = ["Made", "Made", "1.", "2.", "before", "Under"]
    assert len(words) == len(begins)
    numbers = [{w for w in page if w.isdigit()} for page in words[1:]]
    assert numbers == [{str(n)} for n in range(1, 6)]
    for begin, page in zip(begins, words, strict=True):
        assert begin in page
    assert "what the box hides" in book.pages[2].extract_text()
    assert "by night" not in book.pages[2].extract_text()
    assert book.metadata.title == "Made book"
    assert book.page_labels == ["i", "1", "2", "3", "4", "5"]


@pytest.mark.slow
def test_the_outline_has_parts_pages_and_sections(book):
    def titles(items: list) -> list:
        return [titles(i) if isinstance(i, list) else i.title for i in items]

    parts = ["First part", ["1. One", ["Säule"]], "Second part", ["2. Two", ["Under"]]]
    assert titles(book.outline) == ["Made book", *parts]
    assert book.get_destination_page_number(book.outline[2][0]) == 2


@pytest.mark.slow
def test_a_link_leads_inside_the_file_or_out_or_is_none(book):
    inner, outer, up = links(book.pages[2])  # the one to a page that is not there has gone
    assert lead(book, inner) == 4
    line = height(book.pages[4], "the place")
    assert line < inner["/Dest"][3] < line + 20  # points
    assert outer["/A"]["/URI"] == "https://example.org/x"
    assert lead(book, up) == 2
    assert [lead(book, link) for link in links(book.pages[0])] == [1, 2, 3, 5]  # the contents


@pytest.mark.slow
def test_a_chapter_alone(site, tmp_path, book):
    assert pdf.make(site, tmp_path / "a.pdf", "01_a") == 1
    (outer, up) = links(pypdf.PdfReader(tmp_path / "a.pdf").pages[1])
    assert "/A" in outer and "/Dest" in up
    with pytest.raises(FedlibError, match="Unknown chapter '01_b'.*Valid: 01_a, 02_b"):
        pdf.make(site, tmp_path / "b.pdf", "01_b")


def test_what_is_missing_is_said_in_a_line(site, tmp_path, monkeypatch):
    with pytest.raises(FedlibError, match="make book first"):
        pdf.make(tmp_path, tmp_path / "book.pdf")
    monkeypatch.setattr(browser, "find", lambda: None)
    with pytest.raises(FedlibError, match="No Chromium"):
        pdf.make(site, tmp_path / "book.pdf")


def test_a_run_that_is_stopped_leaves_the_older_file(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    writer = pypdf.PdfWriter()
    writer.add_blank_page(10, 10)
    writer.write(tmp_path / "title.pdf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "book.pdf").write_bytes(b"older")
    monkeypatch.setattr(pypdf.PdfWriter, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        pdf.join(tmp_path / "title.pdf", [], tmp_path / "out" / "book.pdf", "Made")
    (left,) = (tmp_path / "out").iterdir()
    assert left.read_bytes() == b"older"
