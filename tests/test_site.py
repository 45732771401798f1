"""The built book as a reader meets it: from disk, offline, in a browser, wide and narrow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from html import unescape
from importlib import resources
from pathlib import Path
from urllib.parse import unquote, urlsplit

import browser
import build
import executed
import pages
import pytest

from fedlib import paths
from fedlib.lab.evidence import ages, claims, findings, scale

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGES = [
    *build.toc_pages(),
    *(f"book/scoreboard/{paper}" for paper in paths.papers("claims.toml")),
    *(f"book/errata/{paper}" for paper in paths.papers("errata.toml")),
]
LONGEST = 30_000  # pixels of a page on a desk, what is folded left folded
HEAVIEST = 1_200_000  # bytes of a page, without the files that pages share
FRONT = 600_000  # bytes of the front page, with them
PAPER = 720  # pixels between the margins of a sheet
SCHEMES = {"light": False, "dark": True}
WIDTHS = (1440, 1280, 360)
LOCAL = ("file:", "data:", "blob:")
every_page = pytest.mark.parametrize("page", PAGES)

STATE = """(() => {
  const root = document.documentElement, article = document.querySelector("article");
  const limit = root.clientWidth + 1;
  const inside = e => {
    for (let p = e.parentElement; p && p !== root; p = p.parentElement)
      if (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(p).overflowX)) return true;
    return false;
  };
  const wide = [...(article || document.body).querySelectorAll("*")].filter(e =>
    e.getClientRects().length && e.getBoundingClientRect().right > limit && !inside(e)
    && !e.closest("mjx-assistive-mml, .visually-hidden, .sr-only"));
  return {
    theme: root.dataset.theme,
    scroll: root.scrollWidth - root.clientWidth,
    wide: wide.slice(0, 5).map(e => e.outerHTML.slice(0, 160)),
    heading: (document.querySelector("h1") || {}).innerText || "",
    bare: [...document.images].filter(i => !i.alt.trim() && !i.closest("[aria-hidden=true]")
      && i.closest("article")).map(i => i.getAttribute("src").slice(-80)),
    broken: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    unset: [...document.querySelectorAll("article .math")].filter(m =>
      m.textContent.trim() && !m.querySelector("mjx-container")).length,
    formulas: document.querySelectorAll("mjx-container").length,
    wrong: [...document.querySelectorAll("mjx-merror, [data-mjx-error]")].map(m =>
      m.getAttribute("data-mjx-error") || m.textContent.slice(0, 80)),
    cut: [...document.querySelectorAll(
      "article :is(mjx-container[display], .cell_input pre)")].filter(e =>
      e.getClientRects().length && e.scrollWidth > e.clientWidth + 1).map(e =>
      (e.scrollWidth - e.clientWidth) + " px: " + e.textContent.trim().slice(0, 80)),
    silent: [...document.querySelectorAll("article *")].filter(e =>
      e.checkVisibility() && e.scrollWidth > e.clientWidth + 1
      && !e.parentElement.closest("svg, mjx-container")
      && ["auto", "scroll"].includes(getComputedStyle(e).overflowX)
      && !(e.tabIndex === 0 && e.role && (e.ariaLabel || "").includes("scrolls"))).map(e =>
      e.outerHTML.slice(0, 160)),
    height: root.scrollHeight,
    folded: document.querySelectorAll("article details:not([open])").length,
    stops: [...document.querySelectorAll("mjx-container[tabindex='0']")].filter(e =>
      e.scrollWidth <= e.clientWidth + 1).length,
    ink: getComputedStyle(article || document.body).color,
    paper: getComputedStyle(document.body).backgroundColor,
    letters: [document.body, ...document.querySelectorAll("pre")].every(e =>
      /^"Plex (Sans|Mono)"/.test(getComputedStyle(e).fontFamily)) &&
      [...document.fonts].some(f => f.family.includes("Plex Sans") && f.status === "loaded"),
  };
})()"""


@dataclass(frozen=True)
class Seen:
    """What one visit showed."""

    state: dict
    complaints: list[str]
    outside: list[str]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, verdicts_page: Path) -> tuple[Path, str]:
    """Return the folder of pages and what went wrong: ``$FEDLIB_BOOK``, or a book built here."""
    if given := os.environ.get("FEDLIB_BOOK"):
        return Path(given).resolve(), ""
    out = tmp_path_factory.mktemp("book")
    done = subprocess.run(
        [sys.executable, str(build.ROOT / "book" / "build.py"), "--out", str(out)],
        cwd=out,
        env={**os.environ, "FEDLIB_JUDGED": str(verdicts_page)},
        capture_output=True,
        text=True,
        check=False,
    )
    return out / "html", (done.stdout[-6000:] + done.stderr) if done.returncode else ""


@pytest.fixture(scope="session")
def html(built: tuple[Path, str]) -> Path:
    """Return the folder of pages; without them there is nothing more to test."""
    folder, wrong = built
    if wrong:
        pytest.skip("the book was not built")
    return folder


@pytest.fixture(scope="session")
def visits(html: Path, chromium: browser.Browser) -> dict[tuple[str, str, int], Seen]:
    """Open each page wide, light and dark in turn; then as a phone, in the other; then on paper."""
    seen = {}
    for number, name in enumerate(PAGES):
        schemes = list(SCHEMES.items())[:: -1 if number % 2 else 1]
        tab = chromium.open()
        tab.show((html / f"{name}.html").as_uri(), WIDTHS[0], dark=schemes[0][1])
        for width in WIDTHS:
            scheme, dark = schemes[width == WIDTHS[-1]]
            tab.prefer(dark)
            tab.resize(width)
            away = [url for url in tab.requests if not url.startswith(LOCAL)]
            seen[name, scheme, width] = Seen(tab.evaluate(STATE), tab.complaints, away)
        tab.resize(PAPER)
        tab.print()
        seen[name, "print", PAPER] = Seen(tab.evaluate(STATE), tab.complaints, [])
        tab.close()
    return seen


def of(visits: dict, page: str) -> list[Seen]:
    return [seen for (name, _, _), seen in visits.items() if name == page]


def brightness(colour: str) -> float:
    numbers = colour[colour.index("(") + 1 : -1].replace(",", " ").split()
    return sum(float(n) for n in numbers[:3]) / 3


def test_the_book_builds(built):
    _, wrong = built
    assert not wrong, "\n" + wrong


@every_page
def test_the_page_is_there(page, html):
    assert (html / f"{page}.html").is_file()


def test_no_page_is_heavy(html):
    sizes = {p: p.stat().st_size for p in html.rglob("*.html") if "_static" not in p.parts}
    assert {str(p): size for p, size in sizes.items() if size > HEAVIEST} == {}


@every_page
def test_no_page_is_long(page, visits):
    (desk,) = (seen for (name, _, width), seen in visits.items() if (name, width) == (page, 1440))
    assert desk.state["height"] <= LONGEST


def test_the_front_page_is_light_with_all_that_it_loads(html, chromium):
    tab = chromium.open()
    tab.show((html / f"{PAGES[0]}.html").as_uri())
    loaded = {unquote(urlsplit(u).path) for u in tab.requests if u.startswith("file:")}
    tab.close()
    assert sum(Path(file).stat().st_size for file in loaded if Path(file).is_file()) <= FRONT


def test_the_front_door_leads_to_the_front_page(html):
    assert f"{PAGES[0]}.html" in (html / "index.html").read_text("utf-8")


def test_what_was_found_reads_as_prose(html):
    """It is printed in short lines, which break well in JupyterLab; a page joins them again."""
    for notebook in build.toc_notebooks():
        cells = executed.code_cells(build.ROOT / notebook)
        page = (html / notebook.with_suffix(".html")).read_text("utf-8")
        notes = re.findall(r"verdict-note.*?<pre><span></span>(.*?)</pre>", page, re.S)
        assert len(notes) == sum("page.verdict(" in cell.source for cell in cells)
        for line in "".join(notes).splitlines():
            assert re.match(r"[A-Z]{3,}\d?-C\S+: [A-Z ,]+\.", line), line


def test_a_long_line_that_was_printed_wraps_unless_it_has_columns(html):
    wrapped = 0
    for notebook in build.toc_notebooks():
        page = (html / notebook.with_suffix(".html")).read_text("utf-8")
        block = r'class="(output stream[^"]*)">.{,80}?<pre><span></span>(.*?)</pre>'
        for looks, text in re.findall(block, page, re.S):
            columns = any(re.search("^ |   |  # ", line) for line in text.splitlines())
            assert columns != ("sentences" in looks.split()), text
            wrapped += not columns and max(map(len, text.splitlines())) > 95
    assert wrapped > 20


@pytest.mark.parametrize("notebook", build.toc_notebooks(), ids=str)
def test_a_notebook_ran_without_complaint_and_describes_its_figures(notebook, html):
    executed.check(build.ROOT / notebook, html / "_sources" / notebook)


@pytest.mark.parametrize("notebook", build.toc_notebooks(), ids=str)
def test_a_notebook_page_offers_download_and_with_an_address_colab(notebook, html):
    page = (html / notebook).with_suffix(".html").read_text("utf-8")
    assert f"_sources/{notebook.as_posix()}" in page
    assert (html / "_sources" / notebook).is_file()
    url, branch = pages.address()
    for service in ("colab.research.google.com/github/", "mybinder.org/v2/gh/"):
        assert (service in page) == bool(url)
    assert (f"/blob/{branch}/{notebook.as_posix()}" in page) == bool(url)


def text_of(fragment: str) -> str:
    """Return the words of a piece of HTML."""
    words = re.sub(r"<[^>]*>", " ", fragment).replace("\N{MINUS SIGN}", "-")
    return re.sub(r"\s+", " ", unescape(words)).replace("\N{NO-BREAK SPACE}", " ")


def cards(html) -> dict[str, str]:
    """Return the HTML of every claim's card, by the claim's address."""
    found = {}
    for page in (html / "book" / "scoreboard").glob("*.html"):
        parts = re.split(r'<div class="claim[^"]*" id="([^"]+)"', page.read_text("utf-8"))
        found |= dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


def plain(text: str) -> str:
    """Return Markdown without the marks that a page does not show."""
    return re.sub(r"\s+", " ", re.sub(r"[`*$\\\\]", "", text)).strip()


def test_each_card_has_its_own_verdict_checks_and_words(html, verdicts):
    found = cards(html)
    for rows in verdicts.values():
        for row in rows:
            card = found[row["id"].lower()]
            words = text_of(card)
            assert f'verdict-{row["finding"].replace(",", "").replace(" ", "-")}"' in card
            assert letters(scale.sentence(row["scale"], row["data"])) in letters(words)
            assert all(letters(line) in letters(words) for line in row["scale"])
            theirs, ours = words.split("We measure", 1)
            assert letters(row["statement"][:40]) in letters(theirs)
            reported = theirs.split("The paper reports", 1)[1]
            assert letters(row["paper_reports"][:25]) in letters(reported)
            signs = re.findall(r'check-sign check-([\w-]+)"', card)
            counted = [c for c in row["checks"] if c["essential"]]
            controls = [c for c in row["checks"] if not c["essential"]]
            signed = [c["outcome"].replace(" ", "-") for c in counted + controls]
            assert sorted(signs) == sorted(signed) and signs[:1] == signed[:1]
            assert len(signs) > 5 or signs == signed
            assert {*signed[: len(counted)]} <= {*signs[:5]}, "before the click: every outcome"
            for check in row["checks"]:
                if check["outcome"] != "no record":
                    assert check["measured"] in ours
                assert check["asked"] in ours
            for origin in row["origins"]:
                assert origin[:40] in ours
            assert not row["profile"] or letters(row["changed"][:20]) in letters(ours)
            age = ages.age_in_words(row["ages"]) if row["ages"]["first_look"] else ""
            assert letters(age) in letters(ours)


def test_the_overview_counts_and_states_every_claim(html, verdicts):
    page = (html / "book" / "scoreboard.html").read_text("utf-8")
    lists = re.findall(r'<table class="[^"]*claims-list.*?</table>', page, re.S)
    lines = [text_of(line) for part in lists for line in re.findall(r"<tr.*?</tr>", part, re.S)]
    for rows in verdicts.values():
        for row in rows:
            (line,) = (line for line in lines if f" {row['id']} " in line)
            assert f"{claims.finding_in_words(row)} {row['tally']}" in line
            assert letters(row["statement"][:40]) in letters(line)
            assert f'id="{row["id"].lower()}"' in page, "its old address"


def test_the_front_page_names_every_claim_below_its_finding(html, verdicts):
    page = (html / "book" / "index.html").read_text("utf-8")
    (summary,) = re.findall(r'<table class="[^"]*claims-summary.*?</table>', page, re.S)
    rows = [row for found in verdicts.values() for row in found]
    seen = 0
    for line in re.findall(r"<tr.*?</tr>", summary, re.S)[1:]:
        finding = re.search(r'class="verdict [^"]*"[^>]*>([^<]+)', line)[1]
        mine = [row for row in rows if row["finding"] == finding]
        assert re.search(r"<strong>(\d+)", line)[1] == str(len(mine))
        for row in mine:
            place = f'scoreboard/{row["paper"]}.html#{row["id"].lower()}"'
            link = re.search(rf'<a class="([^"]*)" href="{place}', line)
            assert ("own-scale" in link[1]) == claims.is_own_scale(row)
            assert ("own-part" in link[1]) == bool(row["scale"] and row["own"])
        seen += len(mine)
    assert seen == len(rows)


def results(paper: str, html: Path) -> Path:
    """Return the page that opens with a paper's answer, or with that of a study of the book."""
    about = paths.about(paths.paper_folder(paper))
    page = "1_amplified_merges" if about.get("ours") else "3_reproduce"
    return html / "notebooks" / about["chapter"] / f"{page}.html"


@pytest.mark.parametrize("paper", paths.papers("findings.toml"))
def test_what_was_found_stands_on_both_pages_and_leads_to_its_claims(paper, html):
    page = results(paper, html).read_text("utf-8")
    head, *boxes = (part[: part.index("</ul>")] for part in re.split("tag_found", page)[1:3])
    front = (html / "book" / "index.html").read_text("utf-8")
    brief = findings.brief(paper)
    for text in (head, front):
        words = letters(text_of(text))
        for part in (brief.answer, brief.finding, brief.scale, brief.data):
            assert letters(part) in words
        for claim, finding in brief.also.items():
            assert letters(claim + finding) in words or letters(finding + claim) in words
        assert f'scoreboard/{paper}.html#{brief.claim.lower()}"' in text
    for row in findings.answers(paper):
        (box,) = boxes
        words = letters(text_of(box))
        told = (row.question, row.answer, row.setting, row.paper)
        assert all(letters(part) in words for part in told)
        assert f'scoreboard/{paper}.html#{row.claim.lower()}"' in box


@pytest.mark.parametrize("paper", paths.papers("findings.toml"))
def test_the_first_screen_of_results_has_answer_and_picture(paper, html, chromium):
    tab = chromium.open()
    tab.show(results(paper, html).as_uri(), width=1440)
    names = ["div.tag_found li:last-child", "article figure img", "article h2"]
    tops = [
        tab.evaluate(f"document.querySelector('{name}').getBoundingClientRect().top")
        for name in names
    ]
    tab.close()
    assert tops[0] < tops[1] < 800 and tops[1] < tops[2]


def letters(text: str) -> str:
    """Return a text without what Markdown or a page adds to it."""
    return re.sub(r"\{[a-z:]+\}|[^A-Za-z]", "", text)


def test_every_erratum_has_an_address_and_its_three_parts_in_the_list_of_its_kind(html):
    every = (html / "book" / "errata.html").read_text("utf-8")
    seen = 0
    for paper, home in paths.papers("errata.toml").items():
        page = (html / "book" / "errata" / f"{paper}.html").read_text("utf-8")
        for erratum in tomllib.loads((home / "errata.toml").read_text("utf-8"))["erratum"]:
            before = page[: page.index(f'id="{erratum["id"].lower()}"')]
            last = re.findall(r'<section id="errata-(\w+)-(\w+)">', before)[-1]
            assert last == (paper, erratum["kind"]), erratum["id"]
            assert f'id="{erratum["id"].lower()}"' in every, "its old address"
            (box,) = re.findall(rf'id="{erratum["id"].lower()}">(.*?)</dl>', page, re.S)
            told = [text_of(part) for part in re.findall(r"<dd>(.*?)</dd>", box, re.S)]
            heads = [text_of(part).strip() for part in re.findall(r"<dt>(.*?)</dt>", box, re.S)]
            assert heads[::2] == ["The paper says", "How we checked"], erratum["id"]
            for key, shown in zip(("says", "reads", "checked"), told, strict=True):
                assert letters(shown).startswith(letters(erratum[key])[:20]), erratum["id"]
            seen += 1
    assert seen > 20


@every_page
def test_the_browser_has_nothing_to_complain_about(page, visits):
    assert [seen.complaints for seen in of(visits, page) if seen.complaints] == []


@every_page
def test_nothing_is_asked_of_the_network(page, visits):
    assert [seen.outside for seen in of(visits, page) if seen.outside] == []


@every_page
def test_images_load_and_are_described(page, visits):
    for seen in of(visits, page):
        assert seen.state["bare"] == [], "images without alternative text"
        assert seen.state["broken"] == [], "images that do not load"


@every_page
def test_letters_come_with_the_book(page, visits):
    assert all(seen.state["letters"] for seen in of(visits, page))


@every_page
def test_formulas_are_set(page, visits):
    for seen in of(visits, page):
        assert seen.state["unset"] == 0, "formulas that stayed source code"
        assert seen.state["wrong"] == [], "formulas that do not parse"


def test_the_book_has_formulas(visits):
    assert any(seen.state["formulas"] for seen in visits.values())


@every_page
def test_light_and_dark(page, visits):
    for (name, scheme, _), seen in visits.items():
        if name == page and scheme in SCHEMES:
            ink, paper = brightness(seen.state["ink"]), brightness(seen.state["paper"])
            assert seen.state["theme"] == scheme
            assert (ink > paper) == (scheme == "dark"), f"{scheme}: ink {ink}, paper {paper}"


@every_page
def test_a_phone_shows_the_whole_width(page, visits):
    for (name, _, width), seen in visits.items():
        if name == page and width == 360:
            assert seen.state["heading"]
            assert seen.state["scroll"] <= 0, f"the page scrolls sideways: {seen.state['wide']}"
            assert seen.state["wide"] == [], "sticks out at the right"


@every_page
def test_what_scrolls_sideways_is_reached_and_says_so(page, visits):
    for (name, scheme, _), seen in visits.items():
        if name == page and scheme in SCHEMES:
            assert seen.state["silent"] == []


@every_page
def test_formulas_and_code_fit_a_desk(page, visits):
    (wide,) = (seen for (name, _, width), seen in visits.items() if (name, width) == (page, 1280))
    assert wide.state["cut"] == []


@every_page
def test_the_keyboard_passes_formulas_by(page, visits):
    assert all(seen.state["stops"] == 0 for seen in of(visits, page))


@every_page
def test_what_opens_is_called_what_it_shows(page, html):
    assert "<summary aria-label" not in (html / f"{page}.html").read_text("utf-8")


@every_page
def test_paper_shows_what_is_folded_and_cuts_no_code(page, visits):
    state = visits[page, "print", PAPER].state
    assert state["folded"] == 0
    assert state["cut"] == []


@every_page
def test_no_page_loads_what_it_does_not_use(page, html):
    text = (html / f"{page}.html").read_text("utf-8")
    assert not re.search(r"<script [^>]*fontawesome|thebe", text)
    assert ("/mathjax/" in text) == bool(re.search(r'class="[^"]*\b(math|text_latex)\b', text))


def test_a_verdict_s_address_shows_its_claims_alone(html, verdicts, chromium):
    rows = [row for found in verdicts.values() for row in found]
    seen = """[...document.querySelectorAll(".claims-list tbody tr")]
      .filter(e => e.getClientRects().length).map(e => e.id)"""
    for verdict in ("contradicted", "contradicted in part"):
        tab = chromium.open()
        place = f"#only-{verdict.replace(' ', '-')}"
        assert place in (html / "book" / "index.html").read_text("utf-8")
        tab.show((html / "book" / "scoreboard.html").as_uri() + place)
        asked = [row["id"].lower() for row in rows if row["finding"] == verdict]
        assert tab.evaluate(seen) == asked
    tab.evaluate("document.querySelector('form.claims-filter select').focus()")
    tab.press("Home", 36)  # all findings
    tab.evaluate("document.querySelectorAll('form.claims-filter select')[1].focus()")
    while tab.evaluate("document.activeElement.selectedOptions[0].id") != "only-own-scale":
        tab.press("ArrowDown", 40)
    asked = [row["id"].lower() for row in rows if claims.is_own_scale(row)]
    assert tab.evaluate(seen) == asked
    said = tab.evaluate("document.querySelector('form.claims-filter output').value")
    assert said == f"{len(asked)} of {len(rows)} claims"


def test_a_link_into_a_folded_section_opens_it(html, chromium):
    page = html / "notebooks" / "03_hierarchy" / "3_reproduce.html"
    tab = chromium.open()
    tab.show(page.as_uri() + "#hier-rep-choosing")
    opened = "document.querySelectorAll('details.folded[open]')"
    ids = tab.evaluate(f"[...{opened}].map(e => e.parentElement.id)")
    assert ids == ["beyond-the-paper-choose-s"]


def test_names_in_code_and_prose_lead_to_the_api_and_its_modules_to_pages(html):
    build_page = (html / "notebooks" / "03_hierarchy" / "2_build.html").read_text("utf-8")
    name = "fedlib.papers.hierarchy"
    place = rf'href="../../book/api/{name}.html#{name}.algorithm.HierarchicalSGD"'
    assert re.search(
        rf'<a class="code-name" {place}><span class="n">HierarchicalSGD</span>', build_page
    )
    front = (html / "notebooks" / "07_beyond" / "1_amplified_merges.html").read_text("utf-8")
    assert re.search(rf"<a [^>]*{place}[^>]*>\s*<code", front)
    api = (html / "book" / "api" / "fedlib.papers.hierarchy.html").read_text("utf-8")
    section = api[api.index('id="module-fedlib.papers.hierarchy.algorithm"') :]
    users = section[section.index("On the pages") :].split("</p>")[0]
    assert "../../notebooks/03_hierarchy/2_build.html" in users
    assert "01_foundations/2_splitting_data.html" not in users


def test_a_figure_s_record_leads_to_its_manifest(html):
    page = (html / "notebooks" / "02_participation" / "3_reproduce.html").read_text("utf-8")
    linked = re.findall(r'href="../../_sources/(data/papers/[^"]+)">([^<]+)</a>', page)
    assert len(linked) >= 5
    for file, name in linked:
        assert file.endswith(f"/{name}.json")
        assert (html / "_sources" / file).read_bytes() == (build.ROOT / file).read_bytes()


@pytest.mark.parametrize("page", ["book/index", "notebooks/03_hierarchy/1_derive"])
def test_a_page_offers_its_source_and_says_when_it_changed(page, html):
    text = (html / f"{page}.html").read_text("utf-8")
    url, branch = pages.address()
    assert (f"/edit/{branch}/{page}." in text) == bool(url)
    assert url or "github.com" not in text  # nor a button for issues
    assert (
        re.search(r"Last updated[^<]*\b20\d\d-\d\d-\d\d", text)
        or not (build.ROOT / ".git").exists()
    )


@every_page
def test_a_page_says_how_it_is_cited_and_names_the_feed_of_corrections(page, html):
    text = (html / f"{page}.html").read_text("utf-8")
    foot = text_of(re.search(r"Cite this page:.*?</p>", text, re.S)[0])
    block = text_of((html / "book" / "citing.html").read_text("utf-8"))
    version = re.search(r"note = \{ ?Version (.*?) ?\}", block)[1]
    assert f"Federated Learning, Line by Line, version {version}. How to cite" in foot
    assert re.search(r'type="application/atom\+xml"[^>]* href="(../)*corrections.xml"', text)


KINDS = (  # one page of each kind
    *("book/index", "book/glossary", "book/guides/run_batches", "book/errata", "book/bibliography"),
    *("book/scoreboard", "book/scoreboard/participation", "book/rests_on"),
    "notebooks/02_participation/3_reproduce",
    *("notebooks/02_participation/2_build", "notebooks/07_beyond/1_amplified_merges"),
)
AXE = """(async rules => {
  const found = await axe.run(document, {resultTypes: ["violations"], ...rules});
  return found.violations.filter(v => ["serious", "critical"].includes(v.impact)).map(v =>
    v.id + ": " + v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)).join(" ; "));
})"""
AT_ONCE = """document.head.append(Object.assign(document.createElement("style"), {
  textContent: "*, ::before, ::after { transition: none !important }"})); true"""
CONTRAST = "({runOnly: ['color-contrast']})"  # nothing else differs in the dark


@pytest.mark.parametrize("page", KINDS)
def test_axe_finds_nothing_serious(page, html, chromium):
    script = resources.files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
    tab = chromium.open()
    tab.show((html / f"{page}.html").as_uri())
    tab.evaluate(script + "; true")
    tab.evaluate(AT_ONCE)
    for scheme, rules in (("light", "({})"), ("dark", CONTRAST)):
        tab.prefer(SCHEMES[scheme])
        over = time.monotonic() + 20
        while tab.evaluate("document.documentElement.dataset.theme") != scheme:
            assert time.monotonic() < over, f"the theme does not follow: {scheme}"
            time.sleep(0.05)
        assert tab.evaluate(AXE + rules) == []
    tab.close()


SEARCHES = {  # what a reader types, and the page that explains it
    "FedAvg": "notebooks/01_foundations/1_federated_averaging",
    "SCAFFOLD": "notebooks/07_beyond/2_methods",
    "FedNova": "notebooks/07_beyond/2_methods",
    "MIFA": "notebooks/07_beyond/2_methods",
    "FedProx": "notebooks/07_beyond/2_methods",
    "FedAdam": "notebooks/07_beyond/2_methods",
    "lookahead": "notebooks/07_beyond/2_methods",
    "IFCA": "notebooks/04_personalization/2_build",
    "APFL": "notebooks/04_personalization/3_reproduce",
    "PERM": "notebooks/04_personalization/1_derive",
    "TDCD": "notebooks/05_tiers/1_derive",
    "VFB²": "notebooks/06_vertical/1_derive",
    "Theorem 6": "notebooks/06_vertical/1_derive",
    "Lemma 3": "notebooks/04_personalization/1_derive",
    "sync time": "notebooks/03_hierarchy/1_derive",
    "mixing weights": "notebooks/04_personalization/1_derive",
    "amplification": "notebooks/02_participation/1_derive",
    "δ²(P)": "book/notation",
    "η": "book/notation",
    "secure aggregation": "notebooks/06_vertical/4_attack",
    "label inference": "notebooks/06_vertical/4_attack",
    "stale gradients": "notebooks/06_vertical/1_derive",
}
FIRST = """(async query => {
  document.getElementById("search-results").replaceChildren();
  Search.performSearch(query);
  for (let n = 0; n < 500 && document.querySelectorAll("ul.search li").length < 3; n++)
    await new Promise(done => setTimeout(done, 10));
  return [...document.querySelectorAll("ul.search li a:first-child")].slice(0, 3)
    .map(a => a.getAttribute("href").split(".html")[0]);
})"""


def test_the_search_finds_the_right_page_among_the_first_three(html, chromium):
    tab = chromium.open()
    tab.show((html / "search.html").as_uri())
    wrong = {}
    for query, page in SEARCHES.items():
        if page not in (found := tab.evaluate(f"{FIRST}({json.dumps(query)})")):
            wrong[query] = found
    tab.close()
    assert wrong == {}
