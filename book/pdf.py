"""Print the built book into one PDF, or one chapter of it: ``make pdf CHAPTER=03_hierarchy``.

A headless Chromium prints the pages of the site one by one, in the order of its contents; pypdf
joins them. A link from page to page becomes a link inside the file, a part, a page or a section
an entry of the outline. How a page looks on paper stands in ``_ext/fedbook/static/print.css``.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
from pages import ROOT, edition

from fedlib.errors import FedlibError, unknown

NAV = """[...document.querySelectorAll(
  "nav.bd-links p.caption, nav.bd-links a.reference.internal")].map(e => {
    let deep = 0;
    for (let up = e.closest("ul"); up; up = up.parentElement.closest("ul")) deep++;
    return [deep, e.textContent.trim(), e.href || ""];
  })"""
# A place gets into the PDF only where a link on the same page leads to it: here is one for each.
PLACES = """(() => {
  for (const e of document.querySelectorAll("article [id]")) {
    if (e.closest("svg, mjx-container")) continue;
    const link = document.createElement("a");
    link.href = "#" + encodeURIComponent(e.id);
    link.hidden = true;
    document.body.append(link);
  }
  return [...document.querySelectorAll("article section h2")].map(
    h => [h.innerText.trim().replace(/#$/, ""), h.closest("section").id]);
})()"""
FIRST = "@page:first { counter-set: page %d; }"
MARGIN = 16 * 72 / 25.4  # points above the text, in print.css: Chromium leaves them out of places
UNNUMBERED = "@page { @bottom-center { content: none; } }"
STYLE = "document.head.append(Object.assign(document.createElement('style'), {textContent: %s}))"
TITLE = """<h1>%s</h1><p>Version %s</p>
<style>.contents p {display: flex; gap: 0.5em; margin: 0.15em 0}
.contents a {flex: 1; color: inherit; text-decoration: none}
.contents p.part {font-weight: 600; margin-top: 0.9em; break-after: avoid}</style>
<div class="contents" style="margin-top: 3em">%s</div>"""


@dataclass
class Piece:
    """A page of the site: its part, title, depth and file; then its PDF, first page, sections."""

    part: str
    title: str
    deep: int
    path: Path
    pdf: Path = Path()
    start: int = 0
    count: int = 0
    sections: list[tuple[str, str]] = field(default_factory=list)


def contents(tab: browser.Page, html: Path) -> list[Piece]:
    """Return the pages of a built site in the order of its contents, the front page first."""
    tab.show((html / "book" / "index.html").as_uri())
    pieces, part = [], ""
    for deep, title, link in tab.evaluate(NAV):
        part = part if link else title
        if link:
            pieces.append(Piece(part, title, deep, _file(link)))
    return pieces


def _file(link: str) -> Path:
    return Path(unquote(urlsplit(link).path))


def print_piece(tab: browser.Page, piece: Piece, start: int, folder: Path) -> None:
    """Print one page of the site, numbered from ``start`` on, and note what came out."""
    from pypdf import PdfReader

    tab.show(piece.path.as_uri(), width=680)
    tab.print()
    tab.evaluate(STYLE % json.dumps(FIRST % start))
    piece.sections = tab.evaluate(PLACES)
    piece.pdf = folder / f"{start}.pdf"
    piece.pdf.write_bytes(_paper(tab))
    piece.start, piece.count = start, len(PdfReader(piece.pdf).pages)


def print_title(tab: browser.Page, pieces: list[Piece], front: Piece, pdf: Path) -> None:
    """Print the title page with the contents."""
    rows, part = [], ""
    for piece in pieces:
        if piece.part != part:
            part = piece.part
            rows.append(f'<p class="part">{escape(part)}</p>')
        link = f'<a href="{piece.path.as_uri()}">{escape(piece.title)}</a>'
        rows.append(f'<p style="margin-left: {piece.deep}em">{link}{piece.start}</p>')
    tab.show(front.path.as_uri(), width=680)
    page = TITLE % (escape(front.title), edition(), "\n".join(rows))
    tab.evaluate(f"document.querySelector('article').innerHTML = {json.dumps(page)}")
    tab.evaluate(STYLE % json.dumps(UNNUMBERED))
    tab.print()
    pdf.write_bytes(_paper(tab))


def _paper(tab: browser.Page) -> bytes:
    a4 = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
    return base64.b64decode(tab.call("Page.printToPDF", **a4, generateTaggedPDF=False)["data"])


def join(title: Path, pieces: list[Piece], out: Path, name: str) -> None:
    """Join what was printed: links between pages lead inside the file, the outline to its parts."""
    from pypdf import PdfReader, PdfWriter
    from pypdf.generic import ArrayObject, FloatObject, NameObject, NullObject

    writer, places, sources = PdfWriter(), {}, []

    def place(page: object, top: object) -> ArrayObject:
        target = [page.indirect_reference, NameObject("/XYZ"), NullObject(), top, NullObject()]
        return ArrayObject(target)

    for source, pdf in ((None, title), *((piece.path, piece.pdf) for piece in pieces)):
        reader = PdfReader(pdf)
        pages = [writer.add_page(page) for page in reader.pages]
        sources += [(source, page) for page in pages]
        places[source, ""] = place(pages[0], NullObject())
        for anchor, dest in reader.named_destinations.items():
            page = pages[reader.get_destination_page_number(dest)]
            top = FloatObject(dest.top - MARGIN)
            places[source, unquote(anchor.removeprefix("/"))] = place(page, top)
    for source, page in sources:
        kept = ArrayObject()
        for link in page.get("/Annots", ()):
            note = link.get_object()
            url = note["/A"].get("/URI", "") if "/A" in note else "#" + note["/Dest"][1:]
            if url.startswith(("file:", "#")):
                if (target := _target(places, source, url)) is None:
                    continue  # a page that is not printed: the words stay, the link goes
                note.pop("/A", None)
                note[NameObject("/Dest")] = target
            kept.append(link)
        page[NameObject("/Annots")] = kept
    front = len(sources) - sum(piece.count for piece in pieces)
    writer.set_page_label(0, front - 1, style="/r")
    if pieces:
        writer.set_page_label(front, len(sources) - 1, style="/D", start=1)
    writer.add_metadata({"/Title": name})
    outline(writer, pieces, places)
    with tempfile.TemporaryDirectory(dir=out.parent) as beside:
        writer.write(whole := Path(beside) / out.name)
        os.replace(whole, out)


def _target(places: dict, source: Path, url: str) -> list | None:
    """Return where a link of a page leads: to a place, a figure with settings, a page, if any."""
    path, name = _file(url) if url[0] != "#" else source, unquote(urlsplit(url).fragment)
    found = (places.get((path, one)) for one in (name, name.partition(":")[0], ""))
    return next(filter(None, found), None)


def outline(writer: object, pieces: list[Piece], places: dict) -> None:
    """Give the file an outline: parts, pages, sections."""
    from pypdf.generic import Fit

    above: dict[int, object] = {}
    part = ""
    for piece in pieces:
        page = places[piece.path, ""][0]
        if piece.part != part:
            part, above = piece.part, {}
            above[0] = writer.add_outline_item(title=part, page_number=page, bold=True)
        parent = next((above[n] for n in range(piece.deep - 1, -1, -1) if n in above), None)
        item = writer.add_outline_item(title=piece.title, page_number=page, parent=parent)
        above[piece.deep] = item
        for title, name in piece.sections:
            page, _, _, top, _ = places[piece.path, name]
            writer.add_outline_item(
                title=title, page_number=page, parent=item, fit=Fit.xyz(top=top)
            )


def make(html: Path, out: Path, chapter: str = "") -> int:
    """Print a built site, or the pages of one of its folders, into a PDF; return its pages."""
    if not (html / "book" / "index.html").is_file():
        raise FedlibError(f"There is no built book in {html}: make book first.")
    if browser.find() is None:
        raise FedlibError("No Chromium was found: install one, or name it in CHROMIUM.")
    begun = time.perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser.chromium() as chromium:
        tab = chromium.open()
        front, *_ = pieces = contents(tab, html)
        if chapter:
            homes = {p.path.parent.name for p in pieces if "notebooks" in p.path.parts}
            if chapter not in homes:
                raise unknown("chapter", chapter, homes)
            pieces = [piece for piece in pieces if piece.path.parent.name == chapter]
        work = [piece.path.stat().st_size for piece in pieces]
        start = 1
        for n, piece in enumerate(pieces):
            print_piece(tab, piece, start, Path(folder))
            start += piece.count
            left = (time.perf_counter() - begun) * sum(work[n + 1 :]) / sum(work[: n + 1])
            told = f"{piece.title}: {piece.count} pages; {left:.0f} s left"
            print(f"  [{n + 1}/{len(pieces)}] {told}", flush=True)
        title = Path(folder) / "title.pdf"
        print_title(tab, pieces, front, title)
        join(title, pieces, out, front.title)
    size, seconds = out.stat().st_size / 1e6, time.perf_counter() - begun
    print(f"{start - 1} pages, {size:.1f} MB, {seconds:.0f} s: {out}")
    return start - 1


def main() -> int:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description="Print the built book into one PDF.")
    parser.add_argument("--chapter", default="", help="a folder of notebooks, such as 03_hierarchy")
    parser.add_argument("--html", type=Path, default=ROOT / "_build" / "html")
    parser.add_argument("--out", type=Path, help="default: _build/book.pdf or _build/CHAPTER.pdf")
    given = parser.parse_args()
    out = given.out or ROOT / "_build" / f"{given.chapter or 'book'}.pdf"
    try:
        make(given.html.resolve(), out.resolve(), given.chapter)
    except FedlibError as error:
        print(error)
        return 1
    except KeyboardInterrupt:
        print("Stopped; nothing was written.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
