"""Write what the pages say about the package and about the papers, from where the facts live.

A page asks for it with a comment, ``<!-- generated: NAME -->``, where NAME is a function of
:data:`WRITERS`. So a new module appears in the API, and a new paper on the front page, on the
scoreboard and among the errata, without an edit of any page. What a check found, in a few words,
stands where ``<!-- found: PAPER CLAIM, WHAT IT COMPARES -->`` does.
"""

from __future__ import annotations

import ast
import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout's fedlib, whatever is installed

import corrections  # noqa: E402
import rests  # noqa: E402

from fedlib import paths  # noqa: E402
from fedlib.errors import unknown  # noqa: E402

if TYPE_CHECKING:
    import pandas as pd

    from fedlib import cards
    from fedlib.lab.evidence import findings

PARTS = ("derive", "build", "reproduce")
LOCAL_STEPS = {"TDCD-C1": "on images", "TDCD-C4": "on sequences", "TDCD-C6": "on views"}
FOUND = re.compile(r"<!-- found: (\S+) (\S+), (.+?) -->")


def fill(tree: Path) -> None:
    """Fill in the pages of a copy of the book, and gather the papers' entries of bibliography."""
    for page in (tree / "book").rglob("*.md"):
        text = page.read_text("utf-8")
        full = re.sub(r"<!-- generated: (\S+) -->", lambda comment: _written(comment[1]), text)
        page.write_text(FOUND.sub(_found, full), "utf-8")
    write_api(tree)
    write_facts(tree)
    with (tree / "book" / "references.bib").open("a", encoding="utf-8") as bibliography:
        for home in paths.papers("paper.bib").values():
            bibliography.write("\n" + (home / "paper.bib").read_text("utf-8"))


def _written(name: str) -> str:
    if name not in WRITERS:
        raise unknown("generated text", name, WRITERS)
    return "\n".join(WRITERS[name]())


def _found(comment: re.Match[str]) -> str:
    from fedlib.lab.evidence import findings

    return f"{findings.in_short(*comment.groups())} ({{ref}}`{comment[2]}`)"


def toc_pages(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """Return every page of the table of contents, in order, without suffix."""
    return re.findall(r"^[ -]*(?:root|file): (\S+)$", toc.read_text("utf-8"), re.M)


# --- the project's address -----------------------------------------------------------------------


def address(config: Path = ROOT / "_config.yml") -> tuple[str, str]:
    """Return the project's public address, empty if it has none, and the branch to show."""
    stored = yaml.safe_load(config.read_text("utf-8"))["repository"]
    return stored["url"].rstrip("/"), stored["branch"]


def offer(config: Path) -> None:
    """Say in a copy of the settings what is built; take the buttons that lead to no address."""
    settings = yaml.safe_load(config.read_text("utf-8"))
    settings["sphinx"]["config"]["release"] = edition()
    if not address(config)[0]:
        for group in (settings, settings["html"]):
            for button in [name for name in group if "button" in name]:
                del group[button]
    config.write_text(yaml.safe_dump(settings, allow_unicode=True), "utf-8")


def edition() -> str:
    """Say what is being built: the version, the commit if known, the day."""
    import fedlib

    commit, day = committed() or ("", stated()["date-released"])
    return f"{fedlib.__version__}{f', commit {commit}' * bool(commit)}, {day}"


def stated() -> dict:
    """Return what ``CITATION.cff`` says."""
    return yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def citation() -> Iterator[str]:
    """Write the book's entry for BibTeX: the version, the commit if known, its day, the address."""
    year = edition().rpartition(" ")[2][:4]
    yield "```bibtex"
    yield "@misc{fedlib" + year + ","
    yield f"  author       = {{{{{stated()['authors'][0]['name']}}}}},"
    yield f"  title        = {{{stated()['title']}}},"
    yield f"  year         = {{{year}}},"
    if url := address()[0]:
        yield f"  howpublished = {{\\url{{{url}}}}},"
    yield f"  note         = {{Version {edition()}}}"
    yield from ("}", "```")


def committed() -> list[str]:
    """Return the commit that is being built and its day; nothing in a copy without a history."""
    from fedlib.lab.evidence import ages

    return ages.git(ROOT, "log", "-1", "--format=%h %cs").decode().split()


# --- the package ---------------------------------------------------------------------------------


def folders() -> list[str]:
    """Return the package's folders in the order of the table in ``fedlib/__init__.py``."""
    text = ast.get_docstring(ast.parse((ROOT / "fedlib" / "__init__.py").read_text("utf-8")))
    return re.findall(r"^`fedlib\.(\w+)`", text, re.M)


def packages() -> Iterator[str]:
    """Yield the dotted names of the package and of the folders in it, in order."""
    yield "fedlib"
    for name in folders():
        home = ROOT / "fedlib" / name
        yield f"fedlib.{name}"
        yield from sorted(map(_dotted, (path.parent for path in home.glob("*/__init__.py"))))


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def api_pages() -> dict[str, list[str]]:
    """Return the modules on each page of the API: a page a folder, more where it would be long."""
    listed = {}
    for package in packages():
        home = ROOT / package.replace(".", "/")
        each = {_dotted(path): len(path.read_text("utf-8").splitlines())
                for path in sorted(home.glob("*.py")) if path.stem not in HIDDEN}  # fmt: skip
        total = sum(each.values())
        share, above = total / math.ceil(total / LONGEST), 0
        pages: list[list[str]] = [[package]]
        for module, lines in each.items():
            if above + lines / 2 > share * len(pages):
                pages.append([])
            pages[-1].append(module)
            above += lines
        for number, modules in enumerate(pages, start=1):
            listed[f"book/api/{package}" + f"-{number}" * (number > 1)] = modules
    return listed


LONGEST = 2200  # lines of source that a page of the API shows
HIDDEN = ("__init__", "__main__", "cli")  # the first stands for its folder; commands have a table


def api() -> Iterator[str]:
    """Write the table of the API's pages: what is where, each a link."""
    yield from (":::{table}", ":widths: 30 70", "", "| Folder | Modules |", "|---|---|")
    for page, modules in api_pages().items():
        link = f"[{_title(modules)}]({page.removeprefix('book/')}.md)"
        links = "; ".join(f"{{py:mod}}`{name.split('.')[-1]} <{name}>`" for name in modules)
        yield f"| {link} | {_first(modules[0])} {links} |"
    yield ":::"


def _title(modules: list[str]) -> str:
    """Return what a page is called: the folder, or from which module on it goes."""
    if (ROOT / modules[0].replace(".", "/")).is_dir():
        return modules[0]
    return f"{modules[0].rpartition('.')[0]}, from {modules[0].rpartition('.')[2]} on"


def _first(module: str) -> str:
    """Return the first sentence about a module."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text("utf-8")
    return " ".join(ast.get_docstring(ast.parse(text)).split("\n\n")[0].split())


def write_api(tree: Path) -> None:
    """Write the pages of the API into a copy of the book, and into its table of contents."""
    pages = api_pages()
    for page, modules in pages.items():
        lines = [f"# {_title(modules)}", ""]
        for module in modules:
            lines += [f"## {module}", ""] * (module != _title(modules))
            inside = [] if (ROOT / module.replace(".", "/")).is_dir() else ["   :members:"]
            lines += ["```{eval-rst}", f".. automodule:: {module}", *inside, "```", ""]
        _write(tree, page, lines)


def _write(tree: Path, page: str, lines: Iterable[str]) -> None:
    """Write a page into a copy of the book, and into its table of contents below its folder's."""
    path, toc = tree / f"{page}.md", tree / "_toc.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), "utf-8")
    head, below = f"      - file: {Path(page).parent}\n", f"          - file: {page}\n"
    inside = re.escape(head) + r"        sections:\n(?: {10}- .*\n)*"
    text = toc.read_text("utf-8")
    if re.search(inside, text):
        text = re.sub(inside, lambda found: found[0] + below, text)
    else:
        text = text.replace(head, f"{head}        sections:\n{below}")
    toc.write_text(text, "utf-8")


def commands() -> Iterator[str]:
    """Write the table of commands from what ``fedlib --help`` is made of."""
    import typer.main

    from fedlib.lab.cli import app

    yield from (":::{table}", ":widths: 34 66", "", "| Command | What it does |", "|---|---|")
    yield from _rows("fedlib", typer.main.get_command(app))
    yield ":::"


def _rows(name: str, command: object) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for word, part in inner.items():
            yield from _rows(f"{name} {word}", part)
        return
    words, options = [name], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            word = parameter.name.upper()
            words.append(word if parameter.required else f"[{word}]")
        else:
            options.append(f"`{parameter.opts[0]}`")
    text = " ".join(command.help.split("\n\n")[0].split())
    takes = f" Takes {', '.join(options)}." if options else ""
    yield f"| `{' '.join(words)}` | {text}{takes} |"


# --- the papers ----------------------------------------------------------------------------------


def papers() -> Iterator[str]:
    """Write the front page's list: a question, its answer in a sentence, where its chapter is."""
    from fedlib.lab.evidence import findings
    from fedlib.lab.show import matrix

    told = {paths.about(paths.paper_folder(name))["short"]: findings.brief(name)
            for name in paths.papers("findings.toml")}  # fmt: skip
    every = map(paths.about, paths.papers("paper.toml").values())
    listed = [about for about in every if "question" in about]
    for number, about in enumerate((a for a in listed if not a.get("ours")), start=1):
        links = _links(about)
        state = "So far: " if links else "In preparation"
        if set(PARTS) <= {page.stem.split("_", 1)[1] for page in _pages(about)}:
            waiting = _without_record(about)
            waits = f"{waiting} of its claims still wait{'s' * (waiting == 1)} for a record: "
            state = waits if waiting else ""
        yield (
            f"{number}. **{about['question']}** {about['about']} *{about['short']}*, "
            f"{_source(about)}. {state}{', '.join(links)}."
        )
        if row := told.get(about["short"]):
            yield f"\n   *We find:* {_linked(row.answer)} {_fields(row)}\n"
    for about in (a for a in listed if a.get("ours")):
        yield f"\n**{about['question']}** {about['about']} {', '.join(_links(about))}."
        if row := told.get(about["short"]):
            yield f"\n*We find:* {_linked(row.answer)} {_fields(row)}\n"
        elif about["short"] == "Which method":
            found = matrix.in_short(_cells())
            yield f"\n*We find:* {found} {{ref}}`Which one when <matrix-tree>`.\n"


def first_choice() -> Iterator[str]:
    """Write which method is the best of most cells of the matrix."""
    from fedlib.lab.show import matrix

    cells = _cells()
    best, sure = matrix.firsts(cells), matrix.firsts(cells[cells["sure"]])
    ((name, count),) = best.most_common(1)
    yield (
        f"Highest in {count} of our {best.total()} test cases, more than any other, and in "
        f"{sure[name]} of them for sure: {name} ({{ref}}`what it is <matrix-first>`)."
    )


@functools.cache
def _cells() -> pd.DataFrame:
    """Return the cells of the matrix, each with the method that is best there."""
    from fedlib.lab.evidence import records
    from fedlib.lab.show import matrix

    return matrix.cells(matrix.ends(lambda name: records.load("methods", name)))


def _fields(row: findings.Finding) -> str:
    """Return an answer's three fields in a line, which begins with its claim."""
    scale = "Scale of this check" if row.whole else "Scale"
    where = f"{{ref}}`{scale} <scale-words>`: {row.scale}. Data: {row.data}."
    found = {row.claim: row.finding} | row.also
    return f"{'; '.join(_pill(*one) for one in found.items())} {where}{_whole(row)}"


def _pill(claim: str, finding: str) -> str:
    """Return a claim with what it comes to."""
    from fedlib.lab.evidence import claims

    kind = finding.removesuffix(claims.NO_READING).replace(",", "").replace(" ", "-")
    return f"{{ref}}`{claim}`: [{finding}]{{.verdict .verdict-{kind}}}"


def _whole(row: findings.Finding) -> str:
    """Return a sentence on the scale and data of a claim that has more than an answer's check."""
    told = f" Its other checks: {_small(row.whole)}"
    return told * bool(row.whole)


def _linked(text: str) -> str:
    """Return a text in which the names of claims are links."""
    return re.sub(r"\b[A-Z]{3,}\d?-C\d+(?:-[a-z]+)*\b", r"{ref}`\g<0>`", text)


def _small(sentence: str) -> str:
    """Return a sentence with a small first letter."""
    return sentence[:1].lower() + sentence[1:]


def _without_record(about: dict[str, str]) -> int:
    """Count the claims of a paper whose verdict waits for a record."""
    from fedlib.lab.evidence import ages, claims, records

    waiting = 0
    for name, home in paths.papers("claims.toml").items():
        if paths.about(home) == about:
            there = (path.name.split(".") for path in records.folder(name).glob("*.csv.gz"))
            recorded = {experiment for experiment, profile, *_ in there if profile != "smoke"}
            for claim in claims.claims_of(name):
                waiting += not recorded.issuperset(ages.experiments_of(claim))
    return waiting


def write_facts(tree: Path) -> None:
    """Write the pages of each paper's claims and errata into a copy of the book."""
    for what, write in (("claims", scoreboard), ("errata", errata)):
        folder = {"claims": "scoreboard"}.get(what, what)
        for name in paths.papers(f"{what}.toml"):
            _write(tree, f"book/{folder}/{name}", write(name))


def scoreboard(name: str) -> Iterator[str]:
    """Write a paper's page of the scoreboard: links, the claims, the commands."""
    from fedlib.lab.evidence import catalogue, claims

    about = paths.about(paths.papers("claims.toml")[name])
    yield from _opened(about, "claims", note=True)
    if not about.get("ours"):  # a study of the book has no paper's scale
        yield from (at_own_scale(name), "")
    yield from (f"```{{claims-table}} {name}", "```", "")
    yield from ("## To make these records again", "", "| Claims | Experiments |", "|---|---|")
    runs = {
        claim["id"]: tuple(
            dict.fromkeys(e for c in claim.get("check", []) for e in claims.experiments(c))
        )
        for claim in claims.claims_of(name)
    }
    for experiments, ids in groupby((claim for claim in runs if runs[claim]), key=runs.get):
        claimed = ", ".join(f"{{ref}}`{claim}`" for claim in ids)
        yield f"| {claimed} | {', '.join(f'`{word}`' for word in experiments)} |"
    first = catalogue.command(name, catalogue.experiment_names(name)[0], "runs")
    yield from ("", "```bash", first, f"fedlib claims {name} --out runs", "```", "")
    larger = (
        "With `--profile paper` and a GPU the same two lines answer for the paper's own scale. "
    )
    yield (
        "The first makes one record; repeat it for every experiment of a claim. The second judges "
        f"what you made. {'' if about.get('ours') else larger}"
        "`--out data/papers` instead of `runs` puts your record into the book; "
        "`make book` then shows it here, finding and all."
    )


def at_own_scale(paper: str) -> str:
    """Say which of a paper's claims were tried at its own scale, and what the others want."""
    from fedlib.lab.evidence import claims

    rows = [row for row in judged(paper) if row["kind"] == "measured"]
    at_scale = [f"{{ref}}`{row['id']}`" for row in rows if claims.is_own_scale(row)]
    tried = (
        "Of the claims about runs these were tried at the paper's own scale: "
        f"{', '.join(at_scale)}."
    )
    none = "No claim about runs was tried at the paper's own scale yet."
    rest = " What each of the others would take, in hours and in data, stands with it."
    return (tried if at_scale else none) + rest * (len(at_scale) < len(rows))


@functools.cache
def judged(paper: str) -> list[dict]:
    """Judge a paper's claims, once for all pages."""
    from fedlib.lab.evidence import claims

    return claims.judge(paper)


def errata(name: str) -> Iterator[str]:
    """Write the page of a paper's errata."""
    yield from _opened(paths.about(paths.papers("errata.toml")[name]), "errata")
    yield from (f"```{{errata-table}} {name}", "```", "")


def with_claims() -> list[str]:
    """Return the papers with claims, without what is the book's own."""
    homes = paths.papers("claims.toml")
    return [name for name, home in homes.items() if not paths.about(home).get("ours")]


def standing() -> Iterator[str]:
    """Write how the papers' claims stand: what was tried at their own scale, and on what."""
    from fedlib.lab.evidence import claims, records

    rows = [row for name in with_claims() for row in judged(name)]
    measured = [row for row in rows if row["kind"] == "measured"]
    at_scale = [row for row in measured if claims.is_own_scale(row)]
    same = [row for row in at_scale if claims.is_own_data(row)]
    reproduced = [row for row in at_scale if claims.is_reproduced(row)]
    in_part = [row for row in measured if row["own"]]
    names, parts = (
        ", ".join(f"{{ref}}`{row['id']}`" for row in part) for part in (reproduced, in_part)
    )
    made = [(m["experiment"], m["device"]) for m in records.manifests()]
    graphics = [f"`{name}` ({device})" for name, device in made if not device.startswith("CPU")]
    yield (
        f"There are {len(rows)} claims of the five papers, our own controls of some among them. "
        f"{len(measured)} are about runs; the others are theorems, counts and sums. "
        f"**{len(at_scale)} of the {len(measured)} were tried at their paper's own scale**, as "
        "far as its text gives one ({ref}`the list <only-own-scale>` has claims without a run, "
        "too), "
        f"{'all ' * (same == at_scale)}{len(same)} of these on the paper's own data (the same "
        "bytes, another copy, or made as the paper says; not where it names none). "
        f"{len(in_part)} more were in part, and what those checks find by themselves stands "
        f"beside the claim ({parts}). "
        f"{len(reproduced)} are *reproduced*: confirmed, at that scale and on those data "
        f"({names}). "
        f"The other {len(at_scale) - len(reproduced)} are not, and each says what was found "
        "instead. Where a claim was not tried at that scale, its finding speaks of a smaller "
        "experiment, or of other data, and says which. "
        f"Records from a GPU: {', '.join(graphics) or 'none'}."
    )  # fmt: skip


FAILED = {  # in short, what the claims say that were contradicted so far
    "HFL-C1": "with *S* = 5 accuracies vary strongly at first",
    "PERM-C5": "PERM ends best among fifty writers",
    "TDCD-C4": "every *Q* above 1 is sooner at a given F1, on sequences",
    "TDCD-C4-larger": "the same with a larger network and four times the steps",
    "TDCD-C6": "the same at a given top-5 accuracy, on views",
    "VFB2-C8": "that no party infers labels from what it receives",
}


def failed() -> Iterator[str]:
    """Write which of the papers' claims are contradicted, and how many were tried at full scale."""
    from fedlib.lab.evidence import claims

    rows = [row for name in with_claims() for row in judged(name)]
    whole, measured = (
        [row for row in rows if row[field] == value]
        for field, value in (("finding", "contradicted"), ("kind", "measured"))
    )
    part = sum(row["finding"] == "contradicted in part" for row in rows)
    names = "; ".join(f"{FAILED.get(row['id'], '')} ({{ref}}`{row['id']}`)" for row in whole)
    there = sum(map(claims.is_own_scale, whole))
    yield (
        f"Of the {len(rows)} claims on the five papers, controls of ours among them, "
        f"{len(whole)} are contradicted: {names}. "
        f"Of these, {there} {'was' if there == 1 else 'were'} tried at the paper's own scale, as "
        f"far as its text gives one. {part} others are contradicted "
        "{ref}`in part <only-contradicted-in-part>`. Of the "
        f"{len(measured)} that are about runs {sum(map(claims.is_own_scale, measured))} were "
        "tried {ref}`at the papers' own scale <own-scale>`."
    )


def local_steps() -> Iterator[str]:
    """Write which number of local steps came first in the tiers, each at the paper's targets."""
    from fedlib.lab.evidence import findings

    told = []
    for row in (row for row in judged("tiers") if row["id"] in LOCAL_STEPS):
        first = []
        for reading, best in findings.first_of_each(row, "sooner than").items():
            run = best["quantity"].rpartition(": ")[2].split(" sooner")[0]
            steps = f"{run}, {best['size']} as fast as Q = 1" if best["estimate"] > 0 else "Q = 1"
            first.append(steps + f" with {reading}" * bool(reading))
        told.append(f"{LOCAL_STEPS[row['id']]} {', or '.join(first)} ({{ref}}`{row['id']}`)")
    yield f"First to reach the target in our smaller experiments: {'; '.join(told)}."


def prefixes() -> Iterator[str]:
    """Write what the names of claims begin with, and which paper that is."""
    from fedlib.lab.evidence import claims

    told = []
    for name, home in paths.papers("claims.toml").items():
        prefix, about = claims.claims_of(name)[0]["id"].partition("-C")[0], paths.about(home)
        short = f" {about['short']}" * (about["short"] != prefix)
        told.append(f"**{prefix}**{short}{', ours' * bool(about.get('ours'))}")
    yield f"A name begins with its paper or study: {'; '.join(told)}."


def learned() -> Iterator[str]:
    """Write the papers' claims about runs, each below its finding, with what was seen."""
    from fedlib.lab.evidence import claims, findings, outcomes

    asked = [row for name in paths.papers("findings.toml") for row in findings.answers(name)]
    answers = {row.claim: row for row in reversed(asked)}  # of several for a claim the first
    rows = [row for name in with_claims() for row in judged(name) if row["kind"] == "measured"]
    for finding in outcomes.FINDINGS:
        alike = [row for row in rows if row["finding"] == finding]
        if alike:
            yield from (f"### {finding.capitalize()}", "", "")
        for row in alike:
            none = "*No reading is confirmed.* " * ("none" in claims.finding_in_words(row))
            seen = _seen(row, answers.get(row["id"]))
            yield f"* {{ref}}`{row['id']}`. {row['statement']} {none}{seen}"
        yield ""


def _seen(row: dict, answer: findings.Finding | None) -> str:
    """Say in a sentence or two what was seen of a claim, at what scale and on which data."""
    from fedlib.lab.evidence import scale

    setting = scale.sentence(row["scale"], row["data"])
    if answer:
        return f"*{answer.question}* {answer.answer} {answer.setting}{_whole(answer)}"
    counted = [check for check in row["checks"] if check["essential"]] or row["checks"]
    if len(counted) == 1:
        ours = f"{counted[0]['quantity']}: {counted[0]['measured']}."
        return f"*What we saw:* {ours[0].upper()}{ours[1:]} {setting}"
    first = row["tally"].partition(";")[0]
    told = first.replace("controls: ", "controls ") if "controls" in first else f"checks {first}"
    return f"*What we saw:* of its {told}. {setting}"


def _opened(about: dict[str, str], what: str, note: bool = False) -> Iterator[str]:
    """Begin a paper's page: what it is called, where it is from, where its chapter is."""
    links = _links(about, "../..")
    chapter = f" Its chapter: {', '.join(links)}." if links else ""
    more = f" {about['note']}" if note and "note" in about else ""
    source = "Ours, and no paper's." if about.get("ours") else f"The paper is {_source(about)}."
    yield from (f"# {about['short']}: {what}", "", f"{source}{chapter}{more}", "")


def _source(about: dict[str, str]) -> str:
    return f"{{cite:t}}`{about['cite']}`" if "cite" in about else f"*{about['title']}*"


def _links(about: dict[str, str], up: str = "..") -> list[str]:
    """Return a link to each notebook of a paper's chapter that the table of contents names."""
    named = {page: page.name.split("_", 1)[1].replace("_", " ") for page in _pages(about)}
    return [f"[{name}]({up}/{page}.ipynb)" for page, name in named.items()]


def _pages(about: dict[str, str]) -> list[Path]:
    """Return a chapter's pages, without suffix."""
    pages = map(Path, toc_pages())
    return [page for page in pages if page.parent.name == about.get("chapter")]


def figure_one() -> Iterator[str]:
    """Write how long the first figure of the first paper took, and what its claim wants beside."""
    from fedlib.lab.evidence import catalogue, claims, duration, records, wanted

    paper, first = "participation", "fig1"
    (claim,) = (c for c in claims.claims_of(paper) if c["id"] == "GFA-C1")
    counted = [check for check in claim["check"] if check.get("essential", True)]
    (best,) = {name for check in counted for name in claims.experiments(check)} - {first}
    rates = catalogue.settings(paper, best, "quick")["tuned"]
    took = [duration.took_in_words(paper, name, "quick") for name in (first, rates, best)]
    m = records.load(paper, first, "quick").manifest
    if larger := [name for name in (rates, best) if duration.took(paper, name, "paper") is None]:
        hours = [wanted.hours_in_words(paper, names) for names in ([first], larger)]
        yield (
            "*How long?* By rounds timed on a processor, one core would take "
            f"{hours[0]} at the paper's scale{wanted.on_a_gpu(paper, [first])}; and {hours[1]}"
            f"{wanted.on_a_gpu(paper, larger)}, for what its claim {{ref}}`{claim['id']}` "
            f"rests on, `{'`, `'.join(larger)}`. The speed of the GPU is that of the record "
            "`fig1-network`. A run says beforehand how long it will take on your machine."
        )
    yield (
        f"*Smaller*: at the profile `quick` the record `{first}` took {took[0]}, for "
        f"{len(m['seeds'])} seeds on {m['device']}. The claim rests on `{rates}`, in which each "
        f"method finds its best rate: {took[1]}; and after it `{best}`: {took[2]}. The command is "
        "the same with these names."
    )


def gpu_agrees() -> Iterator[str]:
    """Write what ``fedlib gpu`` found where it was last run on a GPU."""
    from fedlib.lab import bench

    found = bench.load_bench("gpu")[-1]
    rows = found["agree"]
    apart = [row for row in rows if row["verdict"] != "agrees"]
    told = [row for row in rows if row["apart"] is not None]
    exact = max(row["apart"] for row in told if row["type"] == "float64")
    yield (
        f"`fedlib gpu` on an {found['device']}, with PyTorch {found['versions']['torch']}, "
        f"{found['date'][:10]}: {len(rows) - len(apart)} of {len(rows)} trials end where the CPU "
        f"ends. In float64 the farthest is {exact:.0e} of the way apart."
    )
    for row in apart:
        far = row["why"] if row["apart"] is None else f"by {row['apart']:.2g} of the way"
        yield f" *{row['trial']}* {row['verdict']} in {row['type']}, {far}."


def figure_one_short() -> Iterator[str]:
    """Write how long the first figure of the first paper takes, small and at the paper's scale."""
    from fedlib.lab.evidence import duration, records, wanted

    paper, first = "participation", "fig1"
    seeds = len(records.load(paper, first, "quick").manifest["seeds"])
    text = f"{duration.took_in_words(paper, first, 'quick')} for {seeds} seeds on a processor"
    text += ", without tuning"
    if duration.took(paper, first, "paper") is None:
        hours = wanted.hours_in_words(paper, [first])
        gpu = wanted.on_a_gpu(paper, [first])
        text += f"; at the paper's scale {hours} of one core{gpu or ', on a GPU not measured yet'}"
    yield text


def guides() -> Iterator[str]:
    """Write a link to every guide, in the order of the table of contents."""
    links = []
    for page in (page for page in toc_pages() if page.startswith("book/guides/")):
        title = re.search(r"^# (.+)$", (ROOT / f"{page}.md").read_text("utf-8"), re.M)[1]
        links.append(f"[{title}]({page.removeprefix('book/')}.md)")
    yield f"All guides: {', '.join(links)}."


# --- data ----------------------------------------------------------------------------------------


def brought() -> Iterator[str]:
    """Write what a reader has to bring of the papers' own sets, and what each of them changes."""
    from fedlib import cards
    from fedlib.lab.evidence import brought as sets

    for name in sets.to_bring():
        card, found = cards.card(name), list(sets.uses(name))
        yield from (f"(bring-{name})=", f"## {card.title}", "")
        yield f"* *Files:* {card.bring.files}, in a folder `{name}`."
        yield from (f"* *Form:* {card.bring.form}.", f"* *Size:* {_size(card)}.")
        yield f"* *Who gives it out:* {card.bring.source}."
        yield from (f"* *Licence:* {card.licence}.", "")
        yield from ("| Experiment | runs on | Claims |", "|---|---|---|")
        for use in found:
            ids = ", ".join(f"{{ref}}`{claim}`" for claim in use.claims) or "none"
            now = f"`{use.instead}`" if use.changes else "the set itself"
            yield f"| {use.paper} `{use.experiment}`, {use.profile} | {now} | {ids} |"
        claims = {claim for use in found for claim in use.claims}
        named = [f"{{doc}}`/{page}`" for page in toc_pages() if claims & _names(page)]
        yield from ("", f"Pages: {', '.join(named)}.", "")
        short = (line.replace(" --set", " \\\n    --set") for line in sets.commands(name))
        yield from ("```bash", *short, "```", "")


def _size(card: cards.Card) -> str:
    """Say how many samples a set has, of how many numbers each; of an image, what all take."""
    each = f"{card.train:,} samples to learn from, {card.test:,} to test on, "
    each += f"each of {' × '.join(f'{n:,}' for n in card.shape)} numbers"
    if len(card.shape) == 1:
        return each
    gigabytes = 4 * (card.train + card.test) * math.prod(card.shape) / 2**30
    return f"{each}: {gigabytes:.1f} GiB in memory as float32"


@functools.cache
def _names(page: str) -> frozenset[str]:
    """Return the claims that a notebook names."""
    path = ROOT / f"{page}.ipynb"
    text = path.read_text("utf-8") if path.is_file() else ""
    return frozenset(re.findall(r"\{ref\}`([A-Z0-9]+-C[\w-]+)`", text))


# --- corrections ---------------------------------------------------------------------------------


def corrected() -> Iterator[str]:
    """Write what this book said and says otherwise now, newest first."""
    yield from corrections.page(corrections.read(toc_pages()))


def feed(config: Path = ROOT / "_config.yml") -> bytes:
    """Return the corrections as an Atom feed, with links that fit the settings."""
    stored = yaml.safe_load(config.read_text("utf-8"))
    return corrections.feed(
        corrections.read(toc_pages()), stored["title"], stored["author"], stored["html"]["baseurl"]
    )


# --- what rests on what --------------------------------------------------------------------------


def chapters() -> Iterator[str]:
    """Write which chapter rests on which: a picture, and a table that says the same."""
    yield from rests.picture(*rests.book(ROOT))


def statements() -> Iterator[str]:
    """Write which statement rests on which, a table a chapter."""
    yield from rests.table(*rests.book(ROOT))


WRITERS = {
    writer.__name__: writer
    for writer in (
        *(api, brought, chapters, citation, commands, corrected, failed, figure_one, first_choice),
        *(figure_one_short, gpu_agrees, guides, local_steps, papers, prefixes, standing),
        *(statements, learned),
    )
}
