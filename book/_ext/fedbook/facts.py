"""The claims and errata tables: facts that live in ``data/``, so that no page repeats them."""

from __future__ import annotations

import functools
import posixpath
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from fedlib.errors import FedlibError
from fedlib.lab.evidence import ages, catalogue, claims, duration, outcomes, records, scale, wanted
from fedlib.lab.evidence.findings import minus
from fedlib.paths import about, papers
from fedlib.schema import Page, read_toml

SHOWN = 5  # checks of a claim that are shown before a click
FACT = re.compile(r"(?<![\w`-])([A-Z]{3,}\d?-[CE]\d+(?:-[a-z]+)?)(?![\w`-])")
judge = functools.cache(claims.judge)  # once a build: several pages show the same findings


class Facts(SphinxDirective):
    """Helpers to turn short Markdown texts into cells, items and anchors."""

    def inline(self, text: str) -> list[nodes.Node]:
        """Parse a short Markdown text; the name of a claim or an erratum becomes a link."""
        linked = FACT.sub(r"{ref}`\1`", str(text).strip())
        holder = nodes.Element()
        lines = StringList(linked.splitlines() or [""], source=self.env.docname)
        self.state.nested_parse(lines, 0, holder)
        return list(holder.children)

    def anchored(self, name: str, box: nodes.Element) -> nodes.reference:
        """Make a box a place that ``{ref}`` leads to, and return a link to it that shows its name.

        The link waits in the box's head, so that a reader can copy the address.
        """
        place = self.noted(name)
        box["ids"].append(place)
        return nodes.reference("", name, internal=True, refid=place, classes=["fact-id"])

    def noted(self, name: str) -> str:
        """Return the id of a place of this page to which ``{ref}`` shall lead by a name."""
        place, standard = nodes.make_id(name), self.env.domaindata["std"]
        standard["labels"].setdefault(name.lower(), (self.env.docname, place, name))
        standard["anonlabels"].setdefault(name.lower(), (self.env.docname, place))
        return place

    def there(self, page: str, name: str) -> str:
        """Return the address of a place on a page of the book, as seen from this one."""
        home = posixpath.dirname(self.env.docname)
        return f"{posixpath.relpath(page, home)}.html#{nodes.make_id(name)}"

    def table(
        self,
        heads: Iterable[str],
        widths: Iterable[int],
        rows: Iterable[list[list[nodes.Node]]],
        classes: list[str],
    ) -> nodes.table:
        """Build a table from rows of cells, each cell a list of block nodes."""
        heads, widths = list(heads), list(widths)
        group = nodes.tgroup(cols=len(heads))
        group.extend(nodes.colspec(colwidth=width) for width in widths)
        top = nodes.row()
        top.extend(nodes.entry("", nodes.paragraph(text=head)) for head in heads)
        group += nodes.thead("", top)
        body = nodes.tbody()
        for cells in rows:
            body += nodes.row("", *(nodes.entry("", *cell) for cell in cells))
        group += body
        return nodes.table("", group, classes=["colwidths-given", *classes])


def fields(row: dict) -> dict[str, str]:
    """Return what a claim can be chosen by: finding, scale, data, kind, paper."""
    size = "our experiment" if row["scale"] == [scale.OUR_EXPERIMENT] else "another scale"
    size = "own scale" if claims.is_own_scale(row) else size
    return {
        "finding": row["finding"],
        "scale": size if row["data"] else "nothing measured",
        "data": row["data"] or "nothing measured",
        "kind": row["kind"],
        "paper": about(papers()[row["paper"]])["short"],
    }


def _marks(row: dict) -> list[str]:
    """Return the classes by which ``book.js`` knows a claim."""
    return [nodes.make_id(f"{field} {value}") for field, value in fields(row).items()]


class ClaimsFilter(Facts):
    """A choice for each field of a claim; ``book.js`` hides the claims that have another value.

    An address chooses, too: ``only-contradicted`` shows the claims of that finding.
    """

    def run(self) -> list[nodes.Node]:
        """Return the choices as a form, each value with its number of claims."""
        rows = [fields(row) for paper in papers("claims.toml") for row in judge(paper)]
        choices = []
        for field in rows[0]:
            count = Counter(row[field] for row in rows)
            exact = Counter(row[field] for row in rows if row["kind"] == "arithmetic")
            options = f'<option value="">all ({len(rows)})</option>'
            for value in outcomes.FINDINGS if field == "finding" else count:
                mark = nodes.make_id(f"{field} {value}")
                short = value if field in ("finding", "scale") else mark
                place = self.noted(nodes.make_id(f"only {short}"))
                more = f", {exact[value]} of them without a run" * (value == "own scale")
                words = f"{value} ({count[value]}{more})"
                options += f'<option id="{place}" value="{mark}">{words}</option>'
            choices.append(f"<label>{field} <select>{options}</select></label>")
        form = f'<form class="claims-filter">{"".join(choices)}<output></output></form>'
        return [nodes.raw("", form, format="html")]


class ClaimsTable(Facts):
    """The claims of a paper (or of all): what it reports, what we measured, and what was found.

    Argument: the paper's name or ``all``. Option ``list``: a line a claim, which leads to the page
    of its paper. Option ``summary``: their names only, by finding.
    """

    required_arguments = 1
    option_spec = {"list": directives.flag, "summary": directives.flag}

    def run(self) -> list[nodes.Node]:
        """Judge the claims from the stored records and lay them out."""
        asked = self.arguments[0].strip()
        names = papers("claims.toml") if asked == "all" else [asked]
        try:
            rows = [row for paper in names for row in judge(paper)]
            if "summary" in self.options:
                return [self.summary(rows)]
            cards = [] if "list" in self.options else [self.card(row) for row in rows]
            return [self.overview(rows), *cards]
        except FedlibError as exc:
            raise self.error(f"claims-table: {exc}") from exc

    def verdict(self, text: str) -> nodes.inline:
        """Return a finding, marked so that the style sheet can give it its sign and colour."""
        kind = nodes.make_id(text.removesuffix(claims.NO_READING))
        return nodes.inline("", text, classes=["verdict", f"verdict-{kind}"])

    def summary(self, rows: list[dict]) -> nodes.table:
        """Return a row a finding: how many claims, and each as a link that shows its scale."""
        body = []
        for finding in outcomes.FINDINGS:
            names = nodes.bullet_list(classes=["claim-names"])
            for row in (row for row in rows if row["finding"] == finding):
                own, words = "", ""
                if claims.is_own_scale(row):
                    own, words = "own-scale", ", own scale"
                elif row["own"]:
                    own, words = "own-part", ", in part at own scale"
                name = self.to_card(row, classes=["claim-name", *filter(None, [own])])
                if own:
                    name += nodes.inline("", words, classes=["visually-hidden"])
                names += nodes.list_item("", nodes.paragraph("", "", name))
            if len(names):
                words = (nodes.strong(text=str(len(names))), nodes.Text(" "), self.verdict(finding))
                where = self.there("book/scoreboard", f"only {finding}")
                only = nodes.reference("", "", *words, internal=True, refuri=where)
                body.append([[nodes.paragraph("", "", only)], [names]])
        return self.table(["finding", "claims"], [28, 72], body, ["claims-summary"])

    def to_card(self, row: dict, **attributes: Any) -> nodes.reference:
        """Return a link to a claim's card that shows its name."""
        if self.options:
            place = {"refuri": self.there(f"book/scoreboard/{row['paper']}", row["id"])}
        else:
            place = {"refid": nodes.make_id(row["id"])}
        return nodes.reference("", row["id"], internal=True, **place, **attributes)

    def overview(self, rows: list[dict]) -> nodes.table:
        """Return one line a claim: a link to its card, the statement, outcomes and finding."""
        body = []
        for row in rows:
            link = self.to_card(row, classes=["fact-id"])
            where = nodes.paragraph(text=row["where"], classes=["fact-source"])
            pill = nodes.paragraph("", "", self.verdict(claims.finding_in_words(row)))
            tally = nodes.paragraph(text=row["tally"], classes=["fact-source"])
            name = [nodes.paragraph("", "", link), where]
            body.append([name, self.inline(row["statement"]), [pill, tally, *self.setting(row)]])
        heads = ["claim", "what it says", "finding"]
        table = self.table(heads, [22, 50, 28], body, ["claims-list"])
        for row, line in zip(rows, next(table.findall(nodes.tbody)), strict=True):
            line["classes"] += _marks(row)
            if self.options:
                line["ids"].append(nodes.make_id(row["id"]))
        return table

    def card(self, row: dict) -> nodes.container:
        """Return one claim: its statement, the paper and ours side by side, and where from."""
        card = _box("claim")
        head = nodes.paragraph("", "", self.anchored(row["id"], card), classes=["claim-head"])
        where = self.inline(row["where"])
        words = where[0].children if len(where) == 1 else where
        found = self.verdict(claims.finding_in_words(row))
        head += [nodes.Text(" · "), nodes.inline("", "", *words), found]
        reported = self.inline(row["paper_reports"])
        theirs = _box("claim-paper", _label("The paper reports"), *reported)
        ours = _box("claim-ours", _label("We measure"), *self.measured(row["checks"]))
        card += [head, _box("claim-statement", *self.inline(row["statement"]))]
        card += _box("claim-sides", theirs, ours)
        if row["readings"]:
            card += _box("claim-readings", self.readings(row))
        if own := claims.own_in_words(row):
            words = (nodes.Text(f"{own}; by themselves: "), self.verdict(row["own"]["finding"]))
            card += _box("claim-readings", nodes.paragraph("", "", *words))
        if row["data"]:
            card += _box("claim-setting", *self.setting(row), *self.differences(row))
        if takes := wanted.what_it_takes(row):
            card += _box("claim-setting", *self.inline(takes))
        if row["sizes"]:
            card += _box("claim-readings", self.sizes(row))
        if row["note"]:
            card += _box("claim-note", *self.inline(row["note"]))
        if row["record"]:
            card += self.origin(row)
        return card

    def setting(self, row: dict) -> list[nodes.Node]:
        """Return a line on scale and data; nothing where nothing was measured."""
        if not row["data"]:
            return []
        classes = ["fact-source", *["own-scale"] * claims.is_own_scale(row)]
        return [nodes.paragraph(text=scale.sentence(row["scale"], row["data"]), classes=classes)]

    def differences(self, row: dict) -> list[nodes.Node]:
        """Return what differs from the paper's setting, and what each data set is to it."""
        items = nodes.bullet_list(classes=["claim-differences"])
        sets = [f"{name}: {word}" for name, word in row["sets"].items()]
        for line in [*row["scale"], *sets * (len(sets) > 1 or row["data"] == scale.ANOTHER)]:
            items += nodes.list_item("", nodes.paragraph(text=line))
        return [items] if len(items) else []

    def readings(self, row: dict) -> nodes.bullet_list:
        """Return what each reading of the claim's sentence found."""
        items = nodes.bullet_list()
        for name, word in row["readings"].items():
            line = nodes.paragraph("", "", nodes.Text(f"Read as {name}: "), self.verdict(word))
            items += nodes.list_item("", line)
        return items

    def sizes(self, row: dict) -> nodes.bullet_list:
        """Return what smaller experiments found, beside what the largest did."""
        items = nodes.bullet_list()
        for size in [*row["sizes"], {**row, "profile": "the largest"}]:
            where = scale.sentence(size["scale"], size["data"]).removesuffix(".")
            words = nodes.Text(f"{where} ({size['profile']}): ")
            line = nodes.paragraph("", "", words, self.verdict(size["finding"]))
            items += nodes.list_item("", line)
        return items

    def origin(self, row: dict) -> nodes.container:
        """Return, behind a click, its records, what matters and why, and how old the rule is."""
        lines = row["origins"] or [f"no record of: {row['record']}"]
        if row["smallest"]:
            named = ", ".join(f"{value:g} in {name.replace('log ', 'the logarithm of ')}"
                              for name, value in row["smallest"].items())  # fmt: skip
            lines = [*lines, f"smallest difference that matters: {named}. {row['because']}"]
        if row["profile"]:
            age = ages.age_in_words(row["ages"]) if row["ages"]["first_look"] else ""
            lines += filter(None, [f"{age} {row['changed']}".strip()])
        paragraphs = [nodes.paragraph(text=line, classes=["fact-source"]) for line in lines]
        folded = _behind("Records, what counts, and the rule's age", paragraphs)
        return _box("claim-origin", *folded)

    def measured(self, checks: list[dict]) -> list[nodes.Node]:
        """Return one item a check, those that count first, and many checks behind a click."""
        checks = sorted(checks, key=lambda check: not check["essential"])
        if not checks:
            return [nodes.paragraph(text="Nothing: there are no data for it here.")]
        if not checks[SHOWN:]:
            return [self.items(checks)]
        shown, rest = some_of_each(checks, SHOWN)
        many = len(rest) > 1
        words = outcomes.tally_outcomes(c["outcome"] for c in rest) if many else rest[0]["outcome"]
        more = _behind(f"{len(rest)} more check{'s' * many}: {words}", [self.items(rest)])
        return [self.items(shown), *more]

    def items(self, checks: list[dict]) -> nodes.bullet_list:
        """Return one item a check: its outcome, the quantity, its value and what was asked."""
        items = nodes.bullet_list(classes=["checks"])
        for check in checks:
            word = check["outcome"]
            sign = nodes.inline("", word, classes=["check-sign", f"check-{nodes.make_id(word)}"])
            value = nodes.strong(text=minus(check["measured"]), classes=["check-value"])
            seen = [] if word == outcomes.NO_RECORD else [value, nodes.Text(" ")]
            why = f" ({check['why']})" * bool(check["why"])
            asked = f"asked: {minus(check['asked'])}{why}"
            quantity = claims.quantity_in_words(check)
            quantity += f" (read as {check['reading']})" * bool(check["reading"])
            lines = (
                nodes.paragraph(text=_together(quantity), classes=["check-what"]),
                nodes.paragraph(
                    "", "", *seen, nodes.inline("", asked, classes=["check-bounds"]),
                    classes=["check-seen"],
                ),
            )  # fmt: skip
            items += nodes.list_item("", nodes.paragraph("", "", sign), _box("check", *lines))
        return items


class DurationsTable(Facts):
    """How long the stored records from CPUs took, by paper: ``smoke`` and ``quick``."""

    def run(self) -> list[nodes.Node]:
        """Read the manifests and lay their seconds out."""
        body = []
        made = [m for m in records.manifests() if m["device"].startswith("CPU")]
        for paper in catalogue.papers():
            smoke, quick = (
                [m["wall_seconds"] for m in made if (m["paper"], m["profile"]) == (paper, profile)]
                for profile in ("smoke", "quick")
            )
            if smoke and quick:
                seconds = [sum(smoke), min(quick), max(quick), statistics.median(quick), sum(quick)]
                every, least, most, *rest = map(duration.time_in_words, seconds)
                cells = [about(papers()[paper])["short"], every, f"{least} to {most}", *rest]
                body.append([[nodes.paragraph(text=cell)] for cell in cells])
        heads = ["paper", "smoke, all", "quick, one", "half within", "all"]
        return [self.table(heads, [32, 14, 26, 14, 14], body, ["durations"])]


class Erratum(Page):
    """An entry of an ``errata.toml``, in Markdown; ``test`` names the tests that hold it."""

    id: str
    kind: Literal["error", "clarification", "decision"]
    where: str
    says: str
    reads: str
    checked: str
    test: list[str]


class Errata(Page):
    """An ``errata.toml``."""

    erratum: list[Erratum]


class ErrataTable(Facts):
    """The errata of a paper, in ``data/papers/PAPER/errata.toml``.

    Argument: the paper's name, or ``all`` for a line an erratum, which leads to the page of its
    paper.
    """

    required_arguments = 1
    LISTS = {
        "error": ("Errors", "False as printed; a test of ours shows it."),
        "clarification": (
            "Clarifications",
            "True, put right elsewhere in the paper, or a slip that changes no result; but a "
            "reader stumbles.",
        ),
        "decision": (
            "Decided by us",
            "Open in the paper, or different in its code, so we had to choose.",
        ),
    }
    READS = {"error": "What holds", "clarification": "We read", "decision": "We do"}

    def run(self) -> list[nodes.Node]:
        """Lay the errata out in lists by kind, one below the other, each with its anchor."""
        paper = self.arguments[0].strip()
        if paper == "all":
            return [self.overview({name: self.read(name) for name in papers("errata.toml")})]
        errata, lists = self.read(paper), []
        for kind, (title, meaning) in self.LISTS.items():
            entries = [self.entry(erratum) for erratum in errata if erratum["kind"] == kind]
            if entries:
                box = nodes.section(ids=[nodes.make_id(f"errata-{paper}-{kind}")])
                box += [nodes.title(text=title), nodes.paragraph(text=meaning), *entries]
                lists.append(box)
        return lists

    def read(self, paper: str) -> list[Erratum]:
        """Read the errata of a paper."""
        homes = papers("errata.toml")
        if paper not in homes:
            raise self.error(f"errata-table: there is no data/papers/{paper}/errata.toml")
        path = homes[paper] / "errata.toml"
        self.env.note_dependency(str(path))
        try:
            return read_toml(path, Errata)["erratum"]
        except FedlibError as error:
            raise self.error(f"errata-table: {error}") from error

    def overview(self, errata: dict[str, list[Erratum]]) -> nodes.table:
        """Return a line an erratum: a link to it, where the paper has it, and its list."""
        body = []
        for paper, entries in errata.items():
            for entry in entries:
                there = self.there(f"book/errata/{paper}", entry["id"])
                name = nodes.reference(
                    "", entry["id"], internal=True, refuri=there, classes=["fact-id"],
                    ids=[nodes.make_id(entry["id"])],
                )  # fmt: skip
                kind = nodes.paragraph(text=self.LISTS[entry["kind"]][0])
                where = self.inline(f"{about(papers()[paper])['short']}. {entry['where']}")
                body.append([[nodes.paragraph("", "", name)], where, [kind]])
        return self.table(["erratum", "where", "list"], [20, 60, 20], body, ["errata-list"])

    def entry(self, erratum: Erratum) -> nodes.container:
        """Return one erratum: id and place, then what it says, what we read, how we checked."""
        where = self.inline(erratum["where"])
        words = where[0].children if len(where) == 1 else where
        box = _box("erratum")
        name = self.anchored(erratum["id"], box)
        head = nodes.paragraph("", "", name, nodes.Text(" · "), *words, classes=["erratum-head"])
        parts = nodes.definition_list()
        texts = {"The paper says": erratum["says"], self.READS[erratum["kind"]]: erratum["reads"]}
        texts["How we checked"] = erratum["checked"]
        for title, text in texts.items():
            body = self.inline(text)
            if title == "How we checked" and erratum["test"]:
                names = ", ".join(f"`{name}`" for name in erratum["test"])
                body += self.inline(f"Tested by {names}.")
            parts += nodes.definition_list_item(
                "", nodes.term(text=title), nodes.definition("", *body)
            )
        box += [head, parts]
        return box


def some_of_each(checks: list[dict], most: int) -> tuple[list[dict], list[dict]]:
    """Return `most` checks in which every outcome is seen, and the rest, both in their order."""
    seen: Counter[tuple[bool, str]] = Counter()
    turn = []
    for place, check in enumerate(checks):
        kind = (not check["essential"], check["outcome"])
        turn.append((kind[0], seen[kind], place))
        seen[kind] += 1
    first = {place for *_, place in sorted(turn)[:most]}
    shown = [check for place, check in enumerate(checks) if place in first]
    return shown, [check for place, check in enumerate(checks) if place not in first]


def _behind(summary: str, inside: Iterable[nodes.Node]) -> list[nodes.Node]:
    """Return what opens with a click."""
    tags = f"<details><summary>{summary}</summary>", "</details>"
    opened, closed = (nodes.raw("", tag, format="html") for tag in tags)
    return [opened, *inside, closed]


def _box(name: str, *children: nodes.Node) -> nodes.container:
    return nodes.container("", *children, classes=[name], is_div=True)


def _label(text: str) -> nodes.paragraph:
    return nodes.paragraph(text=text, classes=["claim-label"])


def _together(text: str) -> str:
    return re.sub(r" ([=≥≤]) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)
