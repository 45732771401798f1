"""Corrections to this book: its page and its Atom feed, both from ``data/corrections.toml``."""

from __future__ import annotations

import datetime
import html
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NotRequired
from urllib.parse import urljoin
from xml.etree import ElementTree

from fedlib import paths
from fedlib.errors import FedlibError, nearest
from fedlib.schema import Page, read_toml

ATOM = "http://www.w3.org/2005/Atom"
PAGE = "book/corrections"


class Correction(Page):
    """What a page said, what it says now, and why; ``name`` stays, as readers' programs know it."""

    name: str
    date: str
    changed: Literal["finding", "words"]
    title: str
    page: str
    claims: NotRequired[list[str]]
    said: str
    says: str
    why: str


class Corrections(Page):
    """The file."""

    correction: list[Correction]


def read(pages: Sequence[str], path: Path | None = None) -> list[Correction]:
    """Return the corrections, newest first; those of a day in the order of the file.

    Parameters
    ----------
    pages
        The pages of the table of contents, without suffix.
    path
        The file; default: ``data/corrections.toml``.

    Raises
    ------
    FedlibError
        In one line: for a key or type that does not fit, a date that is none, a page that the
        book has not, a name twice or with other letters than an address has.
    """
    path = path or paths.data_folder() / "corrections.toml"
    found = read_toml(path, Corrections)["correction"]
    names: set[str] = set()
    for entry in found:
        where = f"{path}, '{entry['name']}':"
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["name"]):
            raise FedlibError(
                f"{where} a name has small letters, digits and hyphens: hfl-c2-scale."
            )
        if entry["name"] in names:
            raise FedlibError(f"{where} the name is there twice.")
        if not _is_date(entry["date"]):
            raise FedlibError(f"{where} date = '{entry['date']}'; expected a day: 2026-11-25.")
        if entry["page"] not in pages:
            raise FedlibError(
                f"{where} the book has no page '{entry['page']}'.{nearest(entry['page'], pages)}"
            )
        names.add(entry["name"])
    return sorted(found, key=lambda entry: entry["date"], reverse=True)


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def page(entries: Sequence[Correction]) -> Iterator[str]:
    """Write the list on the page: a count, a section a day, an entry a paragraph and lines."""
    count = Counter(entry["changed"] for entry in entries)
    found = f"{count['finding']} changed what is found of a claim, or of one reading of it"
    yield from (f"Of {len(entries)} corrections {found}; {count['words']} changed words only.", "")
    day = ""
    for entry in entries:
        if entry["date"] != day:
            day = entry["date"]
            yield from (f"## {datetime.date.fromisoformat(day):%-d %B %Y}", "")
        about = "".join(f", {{ref}}`{claim}`" for claim in entry.get("claims", []))
        yield from (f"({entry['name']})=", f"### {entry['title']}", "")
        yield from (f"{{doc}}`/{entry['page']}`{about}", "")
        yield f"* *It said:* {entry['said']}"
        yield f"* *It says now:* {entry['says']}"
        yield from (f"* *Why:* {entry['why']}", "")


def feed(entries: Sequence[Correction], title: str, author: str, address: str = "") -> bytes:
    """Return the corrections as an Atom feed, to lie beside the book's first page.

    Parameters
    ----------
    entries
        See `read`.
    title, author
        The book's.
    address
        Where the built book lies in public; empty for nowhere. Links are then relative: they lead
        to the page wherever the feed lies beside the book, and none says where the feed is.
    """
    ElementTree.register_namespace("", ATOM)
    address = address and address.rstrip("/") + "/"
    root = ElementTree.Element(_tag("feed"))
    _add(root, "id", _identity("feed"))
    _add(root, "title", f"{title}: corrections")
    _add(root, "updated", _moment(entries[0]["date"]))
    _add(_add(root, "author"), "name", author)
    _add(root, "link", rel="alternate", type="text/html", href=urljoin(address, f"{PAGE}.html"))
    if address:
        _add(root, "link", rel="self", href=urljoin(address, "corrections.xml"))
    for entry in entries:
        part = _add(root, "entry")
        _add(part, "id", _identity(entry["name"]))
        _add(part, "title", entry["title"])
        _add(part, "updated", _moment(entry["date"]))
        place = urljoin(address, f"{PAGE}.html#{entry['name']}")
        _add(part, "link", rel="alternate", type="text/html", href=place)
        told = (("It said", "said"), ("It says now", "says"), ("Why", "why"))
        text = "".join(
            f"<p>{words}: {html.escape(entry[key], quote=False)}</p>" for words, key in told
        )
        _add(part, "content", text, type="html")
    ElementTree.indent(root)
    return ElementTree.tostring(root, "utf-8", xml_declaration=True) + b"\n"


def _tag(name: str) -> str:
    return f"{{{ATOM}}}{name}"


def _add(
    parent: ElementTree.Element, name: str, text: str | None = None, **given: str
) -> ElementTree.Element:
    part = ElementTree.SubElement(parent, _tag(name), given)
    part.text = text
    return part


def _identity(name: str) -> str:
    """Return a name for good, the same wherever the book lies."""
    return f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, f'fedlib corrections {name}')}"


def _moment(day: str) -> str:
    return f"{day}T00:00:00Z"
