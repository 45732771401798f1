"""Corrections: the page and the feed say what the file says, and a wrong entry is named."""

from __future__ import annotations

import html
import tomllib
from xml.etree import ElementTree

import build
import corrections
import pages
import pytest

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import claims

FILE = paths.data_folder() / "corrections.toml"
STORED = tomllib.loads(FILE.read_text("utf-8"))["correction"]
A = "{http://www.w3.org/2005/Atom}"


def entry(name: str, /, **other: str | None) -> str:
    words = dict(name=name, date="2026-11-25", changed="words", title="T", page="book/errata",
                 said="a", says="b", why="c") | other  # fmt: skip
    lines = [f'{key} = "{value}"' for key, value in words.items() if value is not None]
    return "\n".join(["[[correction]]", *lines, ""])


def read(tmp_path, *entries: str) -> list[corrections.Correction]:
    path = tmp_path / "corrections.toml"
    path.write_text("\n".join(entries), "utf-8")
    return corrections.read(["book/errata", "book/index"], path)


def test_the_feed_says_what_the_file_says_newest_first():
    root = ElementTree.fromstring(pages.feed())
    assert root.tag == f"{A}feed" and root.findtext(f"{A}author/{A}name")
    shown = root.findall(f"{A}entry")
    days = [one.findtext(f"{A}updated") for one in shown]
    assert days == sorted(days, reverse=True) and root.findtext(f"{A}updated") == days[0]
    told = {one.findtext(f"{A}title"): one.findtext(f"{A}content") for one in shown}
    assert len(told) == len(shown) == len(STORED)
    for stored in STORED:
        content = html.unescape(told[stored["title"]])
        assert content == (
            f"<p>It said: {stored['said']}</p><p>It says now: {stored['says']}</p>"
            f"<p>Why: {stored['why']}</p>"
        )
        assert f"{stored['date']}T00:00:00Z" in days
    ids = [one.text for one in root.iter(f"{A}id")]
    assert len({*ids}) == len(ids) and all(one.startswith("urn:uuid:") for one in ids)


def test_the_page_says_what_the_file_says():
    text = "\n".join(pages.corrected())
    assert text.index("## 25 November 2026") < text.index("## 22 November 2026")
    for stored in STORED:
        assert all(stored[key] in text for key in ("title", "said", "says", "why", "page"))
        assert f"({stored['name']})=" in text


def test_the_page_counts_what_changed_a_finding(tmp_path):
    finding = dict(changed="finding")
    entries = read(tmp_path, entry("a", **finding), entry("b"), entry("c", **finding))
    told = next(corrections.page(entries))
    assert told.startswith("Of 3 corrections 2 changed") and "; 1 changed words only" in told
    assert all(one["changed"] == "words" or one["claims"] for one in STORED)


def test_claims_of_corrections_are_there():
    known = {
        claim["id"] for name in paths.papers("claims.toml") for claim in claims.claims_of(name)
    }
    assert {claim for stored in STORED for claim in stored.get("claims", [])} <= known


def links(feed: bytes) -> list[tuple[str, str]]:
    root = ElementTree.fromstring(feed)
    return [(link.get("rel"), link.get("href")) for link in root.iter(f"{A}link")]


def test_links_are_relative_without_an_address_and_whole_with_one(tmp_path):
    entries = read(tmp_path, entry("one"))
    page = "book/corrections.html"
    assert links(corrections.feed(entries, "T", "A")) == [
        ("alternate", page), ("alternate", f"{page}#one"),
    ]  # fmt: skip
    for address in ("https://example.org/fed", "https://example.org/fed/"):
        assert links(corrections.feed(entries, "T", "A", address)) == [
            ("alternate", f"https://example.org/fed/{page}"),
            ("self", "https://example.org/fed/corrections.xml"),
            ("alternate", f"https://example.org/fed/{page}#one"),
        ]


def test_a_link_of_the_feed_that_leads_nowhere_is_told(tmp_path):
    site = tmp_path / "site"
    (site / "book").mkdir(parents=True)
    (site / "book" / "corrections.html").write_text('<section id="one"></section>')
    entries = read(tmp_path, entry("one"), entry("two"))
    (site / "corrections.xml").write_bytes(corrections.feed(entries, "T", "A"))
    wrong = "corrections.xml: book/corrections.html#two leads to no such place on that page"
    assert build.check_links(site) == [wrong]


def test_those_of_a_day_stay_in_order(tmp_path):
    old = entry("old", date="2026-11-21")
    found = read(tmp_path, old, entry("b"), entry("a"))
    assert [one["name"] for one in found] == ["b", "a", "old"]


def test_signs_of_xml_are_words_in_a_feed(tmp_path):
    entries = read(tmp_path, entry("one", said="a < b & c"))
    content = ElementTree.fromstring(corrections.feed(entries, "T", "A")).find(f".//{A}content")
    assert content.text.startswith("<p>It said: a &lt; b &amp; c</p>")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"date": "25 November"}, r"'one': date = '25 November'; expected a day: 2026-11-25\.$"),
        ({"date": "20261125"}, "'one': date = '20261125'"),
        ({"date": "2026-11-31"}, "'one': date = '2026-11-31'"),
        ({"page": "book/erata"}, "has no page 'book/erata'. Did you mean 'book/errata'"),
        ({"name": "Two words"}, "'Two words': a name has small letters, digits and hyphens"),
        ({"changed": "title"}, "changed"),
        ({"why": None}, "why"),
        ({"whi": "c"}, "whi"),
    ],
)
def test_a_wrong_entry_gives_one_clear_line(tmp_path, other, message):
    with pytest.raises(FedlibError, match=message) as caught:
        read(tmp_path, entry("one", **other))
    said = str(caught.value).replace("should be:\n  ", "")  # a fault of shape stands below the file
    assert "\n" not in said and "corrections.toml" in said


def test_a_name_is_there_once(tmp_path):
    with pytest.raises(FedlibError, match="'one': the name is there twice"):
        read(tmp_path, entry("one"), entry("one"))
