"""What is written into the book's pages at build time, from the package and from data/papers."""

from __future__ import annotations

import json
import re
import shutil

import pages
import pytest
import yaml
from _ext.fedbook.facts import some_of_each

import fedlib
from fedlib import datasets, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import claims, findings, records


@pytest.fixture
def copy(tmp_path):
    """Return a tree with the table of contents, a page and the bibliography."""
    (tmp_path / "book").mkdir()
    shutil.copy(pages.ROOT / "_toc.yml", tmp_path)
    shutil.copy(pages.ROOT / "book" / "api.md", tmp_path / "book")
    shutil.copy(pages.ROOT / "book" / "references.bib", tmp_path / "book")
    return tmp_path


def test_every_page_asks_for_what_can_be_written(copy):
    asked = set()
    for page in (pages.ROOT / "book").rglob("*.md"):
        asked |= set(re.findall(r"<!-- generated: (\S+) -->", page.read_text("utf-8")))
    assert asked == set(pages.WRITERS)
    (copy / "book" / "page.md").write_text("<!-- generated: paper -->")
    with pytest.raises(FedlibError, match=r"'paper'\. Did you mean 'papers'"):
        pages.fill(copy)


def test_only_the_comment_is_replaced(copy, verdicts, monkeypatch):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    (copy / "book" / "page.md").write_text("Before $x$ \\1\n\n<!-- generated: papers -->\n\nAfter")
    pages.fill(copy)
    text = (copy / "book" / "page.md").read_text("utf-8")
    assert text.startswith("Before $x$ \\1\n\n1. **Who has to be there?**") and text[-5:] == "After"


def test_the_api_has_every_module_once():
    shown = [module for page in pages.api_pages().values() for module in page]
    there = {
        ".".join(path.relative_to(pages.ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (pages.ROOT / "fedlib").rglob("*.py")
    }
    hidden = {"fedlib.lab.cli", "fedlib.__main__"}
    assert len(shown) == len(set(shown)) and set(shown) == there - hidden
    folders = (name for name in shown if (pages.ROOT / name.replace(".", "/")).is_dir())
    firsts = [name for name in folders if name.count(".") == 1]
    assert firsts == [f"fedlib.{name}" for name in pages.folders()]


def test_every_page_of_the_api_is_written_and_listed(copy, verdicts, monkeypatch):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    pages.fill(copy)
    listed = pages.toc_pages(copy / "_toc.yml")
    for page, modules in pages.api_pages().items():
        text = (copy / f"{page}.md").read_text("utf-8")
        assert page in listed and all(f".. automodule:: {name}\n" in text for name in modules)
        assert f"({page.removeprefix('book/')}.md)" in (copy / "book" / "api.md").read_text("utf-8")


def test_the_commands_are_those_of_the_command_line():
    text = "\n".join(pages.commands())
    assert "| `fedlib run PAPER EXPERIMENT` | Say how long an experiment takes, run it" in text
    options = ["profile", "seeds", "device", "out", "tf32", "replace", "set", "yes"]
    assert f"Takes {', '.join(f'`--{name}`' for name in options)}. |" in text
    assert "| `fedlib claims [PAPER]` |" in text and "| `fedlib data get NAME` |" in text


def test_a_claim_leads_to_its_experiments(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    text = "\n".join(pages.scoreboard("participation"))
    assert "| {ref}`GFA-C1` | `fig1-tuned`, `fig1`, `fig1-cifar`, `fig1-network` |" in text
    assert "| {ref}`GFA-C6` | `figB1`, `figB2` |" in text
    text = "\n".join(pages.scoreboard("tiers"))
    assert "fedlib run tiers rates-images --profile quick --out runs" in text


def ours(paper: str) -> bool:
    return paths.about(paths.paper_folder(paper)).get("ours", False)


def test_claims_and_errata_have_a_page_a_paper(copy, monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    shutil.copy(pages.ROOT / "book" / "errata.md", copy / "book")
    pages.fill(copy)
    listed = pages.toc_pages(copy / "_toc.yml")
    for folder, directive, file in (("scoreboard", "claims", "claims"), ("errata",) * 3):
        names = list(paths.papers(f"{file}.toml"))
        at = listed.index(f"book/{folder}")
        assert listed[at + 1 : at + 1 + len(names)] == [f"book/{folder}/{n}" for n in names]
        for name in names:
            text = (copy / "book" / folder / f"{name}.md").read_text("utf-8")
            assert f"```{{{directive}-table}} {name}\n" in text


def test_pages_say_what_was_tried_at_the_papers_own_scale(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    papers = [paper for paper in verdicts if not ours(paper)]
    rows = [row for paper in papers for row in verdicts[paper]]
    measured = [row for row in rows if row["kind"] == "measured"]
    own = [row for row in measured
           if row["finding"] not in ("no record", "shown, not counted") and not row["scale"]]
    told = "\n".join(pages.standing())
    assert f"There are {len(rows)} claims" in told
    assert f"**{len(own)} of the {len(measured)} were" in told
    assumed = "a set that we assume, as the paper names none"
    theirs = [r for r in own if r["data"] not in ("another set", "a substitute", assumed)]
    done = [row["id"] for row in theirs if row["finding"] == "confirmed"]
    parts = [row["id"] for row in measured if row["scale"] and row["own"]]
    assert f"{len(theirs)} of these on" in told and f"{len(parts)} more were in part" in told
    assert re.findall(r"\{ref\}`(\S+)`", told) == parts + done
    assert told.endswith("Records from a GPU: `fig1-network` (NVIDIA H200).")
    for paper in papers:
        mine = [row["id"] for row in own if row in verdicts[paper]]
        assert re.findall(r"\{ref\}`(\S+)`", pages.at_own_scale(paper)) == mine
        assert pages.at_own_scale(paper) in "\n".join(pages.scoreboard(paper))
    assert "tried at the paper" not in "\n".join(pages.scoreboard("methods"))
    for paper in verdicts:  # what a study of the book has no scale of is not offered
        assert ("the paper's own scale" in [*pages.scoreboard(paper)][-1]) != ours(paper)
    monkeypatch.setattr(records, "manifests", lambda: [dict(experiment="fig0", device="H100")])
    assert "\n".join(pages.standing()).endswith("Records from a GPU: `fig0` (H100).")


def test_the_front_page_names_what_failed(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    rows = [row for paper in verdicts if not ours(paper) for row in verdicts[paper]]
    ids = [row["id"] for row in rows if row["finding"] == "contradicted"]
    part = sum(row["finding"] == "contradicted in part" for row in rows)
    runs = [row["scale"] or row["finding"] in ("no record", "shown, not counted")
            for row in rows if row["kind"] == "measured"]  # fmt: skip
    (told,) = pages.failed()
    assert re.findall(r"`([A-Z0-9]+-C\S+)`", told) == ids
    there = sum(row["finding"] == "contradicted" and row["scale"] == [] for row in rows)
    numbers = [len(rows), len(ids), there, part, len(runs), runs.count(False)]
    assert {*ids} <= pages.FAILED.keys(), "each with a few words"
    bare = re.sub("|".join(map(re.escape, pages.FAILED.values())) + r"|\{ref\}`\S+-C\S+`", "", told)
    assert re.findall(r"\d+", bare) == list(map(str, numbers))


def test_the_front_page_names_the_local_steps_that_came_first(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    (told,) = pages.local_steps()
    for claim, name in pages.LOCAL_STEPS.items():
        (row,) = (row for row in verdicts["tiers"] if row["id"] == claim)
        (part,) = (part for part in told.split("; ") if f"`{claim}`" in part)
        for reading in row["readings"] or [""]:
            ends = {check["quantity"].split(": ")[-1]: check["estimate"] for check in row["checks"]
                    if check["essential"] and check["reading"] == reading
                    and "sooner than Q = 1" in check["quantity"]}  # fmt: skip
            assert len(ends) == 3
            first = [run for run, end in ends.items() if end == max(0, *ends.values())]
            steps = first[0].removesuffix(" sooner than Q = 1") + ", " if first else "Q = 1 "
            said = rf"(or|{name}) {steps}[^,]*" + f" with {re.escape(reading)}" * bool(reading)
            assert re.search(said, part), (said, part)


def test_the_front_page_names_the_method_that_is_most_often_the_best():
    said = "\n".join(pages.papers())
    name, count = re.search(r"the best is ([^,]+) in (\d+),", said).groups()
    cells = re.search(r"Of (\d+) cells", said)[1]
    (told,) = pages.first_choice()
    assert f"Highest in {count} of our {cells} test cases, more than any other, and in " in told
    sure, best = re.search(r"in (\d+) of them for sure: (.+) \(", told).groups()
    assert best == name
    alone = [cell.best for cell in pages._cells().itertuples() if not cell.level]
    assert int(sure) == sum(best.partition(",")[0] == name for best in alone) < int(count)


def test_every_guide_has_a_link_with_its_title():
    (line,) = pages.guides()
    links = re.findall(r"\[([^]]+)\]\(guides/(\w+\.md)\)", line)
    home = pages.ROOT / "book" / "guides"
    assert sorted(name for _, name in links) == sorted(path.name for path in home.glob("*.md"))
    assert all(f"# {title}\n" in (home / name).read_text("utf-8") for title, name in links)


def test_every_question_of_the_front_page_is_answered_by_a_check_that_exists(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    text = (pages.ROOT / "book" / "index.md").read_text("utf-8")
    answers = pages.FOUND.sub(pages._found, text)
    assert "<!-- found" in text and "<!-- found" not in answers
    for paper, claim, what in pages.FOUND.findall(text):
        (check,) = (c for row in pages.judged(paper) if row["id"] == claim
                    for c in row["checks"] if c["quantity"] == what)  # fmt: skip
        short = findings.in_short(paper, claim, what)
        if check["asked"].startswith("at least -0.02"):  # as good, to two points
            is_not, may_not = check["high"] < -0.02, check["low"] < -0.02
            assert short.startswith("no, behind" if is_not else "open" if may_not else "yes, at")
            continue
        if check["asked"] == "within ±0.001":  # alike, to a tenth of a point
            alike = -0.001 < check["low"] and check["high"] < 0.001
            assert short.startswith("yes, at" if alike else ("no", "open"))
            continue
        ahead = (check["low"] > 0) - (check["high"] < 0)
        words = {1: ("yes, ahead", "a little"), -1: ("no, behind",), 0: ("open", "no difference")}
        assert short.startswith(words[ahead])


def test_the_time_of_figure_1_names_the_tuning_that_its_claim_wants():
    told = "\n".join(pages.figure_one())
    for name in ("fig1", "rates", "fig1-tuned"):
        home = paths.paper_folder("participation") / "results" / f"{name}.quick.json"
        minutes = json.loads(home.read_text("utf-8"))["wall_seconds"] / 60
        assert re.search(rf"`{name}`[^`]* {minutes:.0f} min", told)
        if name == "fig1":
            assert "".join(pages.figure_one_short()).startswith(f"{minutes:.0f} min for 10 seeds")


def test_what_a_set_to_bring_takes_in_memory_is_said_of_images():
    card = datasets.all_cards()["femnist"]
    assert pages._size(card).endswith("1 × 28 × 28 numbers: 2.2 GiB in memory as float32")
    (trap,) = (trap for trap in card.traps if "GiB" in trap)
    assert "2.2 GiB" in trap


def test_what_claims_are_called_after_is_said(verdicts):
    told = "\n".join(pages.prefixes())
    for rows in verdicts.values():
        assert {row["id"].split("-")[0] for row in rows} <= set(re.findall(r"\*\*(\w+)\*\*", told))
    assert "**PERM**;" in told and "**MAT** Which method, ours" in told


def test_what_was_seen_of_a_claim_answers_a_question_that_is_shown(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    lines = "\n".join(pages.learned()).splitlines()
    for name in pages.with_claims():
        first = {row.claim: row for row in reversed(findings.answers(name))}
        about_runs = {row["id"] for row in verdicts[name] if row["kind"] == "measured"}
        for row in (row for claim, row in first.items() if claim in about_runs):
            (line,) = (line for line in lines if line.startswith(f"* {{ref}}`{row.claim}`."))
            assert f"*{row.question}* {row.answer}" in line
            assert not row.whole or row.whole[1:] in line
    assert not any("controls: " in line for line in lines)


def test_every_claim_about_runs_stands_below_its_finding(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    parts = re.split(r"^### (.*)$", "\n".join(pages.learned()), flags=re.M)[1:]
    shown = dict(zip(map(str.lower, parts[::2]), parts[1::2], strict=True))
    for paper, rows in verdicts.items():
        for row in rows:
            mine = f"* {{ref}}`{row['id']}`. {row['statement']}" in shown.get(row["finding"], "")
            assert mine == (row["kind"] == "measured" and not ours(paper))


def test_a_claim_of_which_no_reading_is_confirmed_says_so(monkeypatch, verdicts):
    monkeypatch.setattr(pages, "judged", verdicts.get)
    lines = "\n".join(pages.learned()).splitlines()
    seen = {"confirmed": False, "none": False}
    for row in (row for paper in verdicts if not ours(paper) for row in verdicts[paper]):
        if row["finding"] == "depends on the reading" and row["kind"] == "measured":
            some = any("confirmed" in found for found in row["readings"].values())
            (line,) = (line for line in lines if line.startswith(f"* {{ref}}`{row['id']}`."))
            assert ("*No reading is confirmed.*" in line) == (not some)
            assert claims.finding_in_words(row).endswith(", confirmed in none") == (not some)
            seen["confirmed" if some else "none"] = True
    assert all(seen.values())


def test_a_card_shows_a_check_of_every_outcome_before_the_click():
    outcomes = [*["holds"] * 7, "open", *["holds"] * 3, "reversed", "outside"]
    checks = [{"outcome": word, "essential": k < 12, "k": k} for k, word in enumerate(outcomes)]
    shown, rest = some_of_each(checks, 5)
    assert [check["k"] for check in shown] == [0, 1, 2, 7, 11]
    assert sorted(check["k"] for check in shown + rest) == list(range(13))
    assert rest == sorted(rest, key=lambda check: check["k"])


def test_the_book_s_own_entry_has_version_commit_and_day(monkeypatch):
    monkeypatch.setattr(pages, "committed", lambda: ("1a2b3c4", "2031-05-06"))
    text = "\n".join(pages.citation())
    assert text.startswith("```bibtex\n@misc{fedlib2031,") and text.endswith("\n}\n```")
    assert "year         = {2031}" in text
    assert f"{{Version {fedlib.__version__}, commit 1a2b3c4, 2031-05-06}}" in text
    monkeypatch.setattr(pages, "committed", lambda: None)
    stated = yaml.safe_load((pages.ROOT / "CITATION.cff").read_text("utf-8"))
    told = f"{{Version {stated['version']}, {stated['date-released']}}}"
    assert told in "\n".join(pages.citation())


def test_a_paper_appears_as_soon_as_its_folder_does(tmp_path, monkeypatch):
    home = tmp_path / "new"
    home.mkdir()
    (home / "paper.toml").write_text(
        'short = "New"\ntitle = "A New One"\nquestion = "Why?"\nabout = "Because."\n'
    )
    (home / "errata.toml").write_text("")
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path))
    (line,) = (line for line in pages.papers() if "Why?" in line)
    assert line.endswith("**Why?** Because. *New*, *A New One*. In preparation.")
    assert "# New: errata\n\nThe paper is *A New One*.\n" in "\n".join(pages.errata("new"))


def test_a_chapter_is_complete_when_every_claim_of_it_has_a_record(tmp_path, monkeypatch):
    line = next(line for line in pages.papers() if "02_participation" in line)
    assert "`. [derive](" in line
    for name in ("fig1.quick", "fig2.smoke"):
        (tmp_path / f"{name}.csv.gz").touch()
    control = {"experiment": "fig2", "essential": False}
    made = [["fig1"], ["fig2"], ["fig1", "fig3"], []]  # the second and the third wait
    table = [{"check": [{"experiment": name} for name in names] + [control]} for names in made]
    monkeypatch.setattr(findings, "brief", lambda paper: None)
    monkeypatch.setattr(records, "folder", lambda paper: tmp_path)
    monkeypatch.setattr(claims, "claims_of", lambda paper: table)
    line = next(line for line in pages.papers() if "02_participation" in line)
    assert "`. 2 of its claims still wait for a record: [derive](" in line


def test_a_paper_of_the_book_says_what_the_pages_need():
    named = {page.split("/")[1] for page in pages.toc_pages() if page.startswith("notebooks/")}
    homes = paths.papers("paper.toml")
    assert set(paths.papers()) <= set(homes)
    for name, home in homes.items():
        about = paths.about(home)
        assert {"short", "chapter", "question", "about"} <= set(about), name
        assert about.get("ours") or f"{{{about['cite']}," in (home / "paper.bib").read_text("utf-8")
    chapters = [paths.about(home)["chapter"] for home in homes.values()]
    assert chapters == sorted(chapters), "papers come in the order of the book"
    assert named - set(chapters) <= {"01_foundations"}, "a chapter without a paper"
