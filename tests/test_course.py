"""Every chapter begins with what one needs, and ends with lines, questions and a project."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import build
import pytest

from fedlib import paths

CHAPTERS = sorted(path for path in (build.ROOT / "notebooks").iterdir() if path.is_dir())
chapter = pytest.mark.parametrize("folder", CHAPTERS, ids=lambda folder: folder.name)

ROLE = re.compile(r"\{(?:prf:ref|ref|numref|eq)\}`(?:[^`]*<)?([\w-]+)>?`")
QUESTION = re.compile(r"^\*\*(\d)\. .*\*\*$", re.M)
OPTION = re.compile(r"^:::\{dropdown\} ([^\n]+)\n(.*?)^:::$", re.M | re.S)


def cells(page: Path, kind: str = "markdown") -> list[str]:
    held = json.loads(page.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in held if cell["cell_type"] == kind]


def summary(folder: Path) -> Path:
    (page,) = folder.glob("*_summary.ipynb")
    return page


def part(folder: Path, heading: str) -> str:
    """Return what stands below a heading of the last page, up to the next one."""
    text = "\n\n".join(cells(summary(folder)))
    return re.split(r"^## ", text.split(f"## {heading}\n", 1)[1], flags=re.M)[0]


def questions(folder: Path) -> list[list[tuple[str, str]]]:
    """Return the options of each question: what they say, and what opens."""
    text = part(folder, "Five questions")
    starts = [match.start() for match in QUESTION.finditer(text)]
    return [OPTION.findall(text[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]


def labels() -> set[str]:
    """Return every place of the notebooks and pages, and the names of claims and errata."""
    places = re.compile(r"^\(([\w-]+)\)=$|\$\$ *\(([\w-]+)\)|^:label: *(\S+)", re.M)
    found = set()
    for page in (build.ROOT / "notebooks").rglob("*.ipynb"):
        text = "\n\n".join(cells(page))
        found |= {"".join(place) for place in places.findall(text)}
        held = json.loads(page.read_text("utf-8"))["cells"]
        figures = (cell["metadata"].get("mystnb", {}).get("figure", {}) for cell in held)
        found |= {figure["name"] for figure in figures if "name" in figure}
    for page in (build.ROOT / "book").rglob("*.md"):
        found |= {"".join(place) for place in places.findall(page.read_text("utf-8"))}
    for what in ("claims", "errata"):
        for home in paths.papers(f"{what}.toml").values():
            text = (home / f"{what}.toml").read_text("utf-8")
            found |= set(re.findall(r'^id = "([^"]+)"', text, re.M))
    return found


@chapter
def test_it_is_the_last_page_of_its_chapter(folder):
    pages = [page for page in build.toc_pages() if page.startswith(f"notebooks/{folder.name}/")]
    assert pages[-1] == f"notebooks/{folder.name}/{summary(folder).stem}"
    assert summary(folder).stem == f"{len(pages)}_summary"
    title = cells(summary(folder))[0]
    assert re.match(r"\(\w+-summary\)=\n# Summary, questions, project\n", title)


@chapter
def test_its_lines_are_ten_at_most_and_end_with_the_place(folder):
    lines = re.findall(r"^\* .*$", part(folder, "In ten lines"), re.M)
    assert 5 <= len(lines) <= 10
    assert [line for line in lines if not re.search(r"\{[\w:]+\}`[^`]+`\.$", line)] == []


@chapter
def test_its_places_exist(folder):
    named = {name for text in cells(summary(folder)) for name in ROLE.findall(text)}
    assert len(named) > 10 and named - labels() == set()


@chapter
def test_its_questions_have_one_right_answer_each(folder):
    asked = questions(folder)
    assert len(asked) == 5
    for options in asked:
        assert len(options) in (3, 4)
        words = [body.split(maxsplit=1)[0].strip(".,:") for _, body in options]
        assert set(words) == {"Yes", "No"} and words.count("Yes") == 1
        assert all(len(body.split()) > 8 for _, body in options), "an answer says why"


@chapter
def test_no_rule_of_thumb_finds_the_right_answers(folder):
    """Neither a place, nor the longest words, nor the shortest."""
    asked = questions(folder)
    right = [[body.startswith("Yes") for _, body in options].index(True) for options in asked]
    assert Counter(right).most_common(1)[0][1] <= 2 or len(set(right)) >= 3
    for extreme in (max, min):
        sizes = [[len(option) for option, _ in options] for options in asked]
        told = [size.index(extreme(size)) == at for size, at in zip(sizes, right, strict=True)]
        assert sum(told) <= 3, "the right option can be told by its length"
    assert all(max(size) <= 2.2 * min(size) for size in sizes), "options of about equal length"


@chapter
def test_its_project_says_what_a_student_needs(folder):
    text = part(folder, "A project")
    for said in ("Why it is open", "Predict first", "A good result", "What goes wrong", "Hours"):
        assert said in text, said
    code = cells(summary(folder), "code")
    assert code[-1].startswith("# your turn")
    ran = "\n".join(code)
    assert "simulate" in ran, "the baseline runs something"


@chapter
def test_its_first_page_says_what_one_needs_and_what_one_can_do_afterwards(folder):
    page = next(page for page in build.toc_pages() if page.startswith(f"notebooks/{folder.name}/"))
    first = "\n\n".join(cells(build.ROOT / f"{page}.ipynb")).split("\n## ")[0]
    told = re.search(r":::\{admonition\} Before you start\n(.*?)^:::$", first, re.M | re.S)[1]
    lines = [line for line in told.splitlines() if line]
    assert [line.split("**")[1] for line in lines] == ["You need", "Afterwards you can"]
    assert folder == CHAPTERS[0] or set(ROLE.findall(lines[0])) & labels()


def test_the_table_for_teachers_leads_to_every_project():
    page = (build.ROOT / "book" / "guides" / "teach.md").read_text("utf-8")
    table = page.split("## A project for each chapter")[1]
    own = {re.match(r"\((\S+)\)=", cells(summary(folder))[0])[1] for folder in CHAPTERS}
    assert {name for name in ROLE.findall(table) if name.endswith("-summary")} == own
