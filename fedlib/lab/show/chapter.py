"""What every reproduce notebook does: read its parameters, show records, print findings."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from fedlib import paths
from fedlib.errors import FedlibError, unknown
from fedlib.lab.evidence import (
    catalogue,
    claims,
    duration,
    experiments,
    findings,
    records,
    scale,
)
from fedlib.lab.evidence.records import MissingRecord, Record
from fedlib.lab.show import plotting

PARAMETERS = ("profile", "experiments_to_run", "seeds", "device", "out")


def begin(paper: str, names: Mapping[str, Any], known: Container[str]) -> Chapter:
    """Read the parameters of a reproduce notebook, and set the looks of its figures.

    Parameters
    ----------
    paper
        The paper that the notebook is about.
    names
        What the notebook has defined, ``globals()``.
    known
        The names that were there before its cell of parameters, ``set(globals())``.

    Raises
    ------
    FedlibError
        For a parameter that the notebook does not have, a profile or device that there is not, or
        an experiment that the paper has not.
    """
    new = {name: value for name, value in names.items() if name not in known}
    check_parameters(new, PARAMETERS)
    values = {name: new[name] for name in PARAMETERS}
    if values["profile"] not in (valid := ["replay", *catalogue.PROFILES]):
        raise unknown("profile", values["profile"], valid)
    experiments.choose_device(values["device"])
    if (wanted := values["experiments_to_run"]) != "all":
        values["experiments_to_run"] = wanted if isinstance(wanted, list | tuple) else [wanted]
        for name in values["experiments_to_run"]:
            catalogue.profiles(paper, name)
    plotting.use()
    return Chapter(paper, **values)


def check_parameters(names: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse notebook parameters that do not exist.

    Parameters
    ----------
    names
        Names defined since the imports, ``set(globals()) - known``. Those that the notebook
        itself made, with a leading underscore or called ``known``, are passed over.
    allowed
        The notebook's parameters.

    Raises
    ------
    FedlibError
        Naming the parameter and the valid ones.
    """
    allowed = list(allowed)
    for name in sorted(names):
        if name not in (*allowed, "known") and not name.startswith("_"):
            raise unknown("parameter", name, allowed)


class AsPrinted:
    """What a page says of its own values: ``with as_printed: assert ...``.

    The assertion holds as ever while the parameters are those of the page. Where one was changed,
    an assertion that fails is a line of text, and the notebook goes on.

    Parameters
    ----------
    names
        What the notebook has defined, ``globals()``.
    **printed
        The page's value of each parameter.
    """

    def __init__(self, names: Mapping[str, Any], **printed: object) -> None:
        self.changed = [name for name, value in printed.items() if names[name] != value]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, *_: object) -> bool:
        if said := bool(self.changed) and kind is AssertionError:
            print(f"differs from the page, since you changed {' and '.join(self.changed)}")
        return said


@dataclass(frozen=True)
class Markdown:
    """A text that a notebook shows as Markdown."""

    text: str

    def _repr_markdown_(self) -> str:
        return self.text


@dataclass(frozen=True)
class Chapter:
    """A paper's records, each obtained once, at the parameters of a notebook.

    Attributes
    ----------
    paper
        The paper's name.
    profile
        ``"replay"`` shows stored records; any other profile runs what ``out`` does not hold yet.
    experiments_to_run
        Names, or ``"all"``; the others count as missing.
    seeds, device
        As for :func:`fedlib.lab.evidence.experiments.run`.
    out
        Folder of records: for ``replay`` of those to show, default the ones that ship with fedlib;
        else of new ones, default ``runs``.
    """

    paper: str
    profile: str = "replay"
    experiments_to_run: str | Sequence[str] = "all"
    seeds: int | Sequence[int] | None = None
    device: str = "auto"
    out: str | Path | None = None
    _records: dict[str, Record] = field(default_factory=dict, init=False, repr=False)

    @property
    def where(self) -> str | Path | None:
        """The folder of the records; None for those that ship with fedlib."""
        return self.out or (None if self.profile == "replay" else "runs")

    def record(self, name: str) -> Record:
        """Return an experiment's record, stored or freshly run.

        Raises
        ------
        MissingRecord
            When there is none, the experiment is not to be run, or does not run at the profile.
        """
        if name not in self._records:
            if self.experiments_to_run != "all" and name not in self.experiments_to_run:
                raise MissingRecord(f"'{name}' is not among experiments_to_run.")
            if self.profile not in ("replay", *catalogue.profiles(self.paper, name)):
                raise MissingRecord(
                    f"{self.paper} {name} does not run at the profile '{self.profile}'. Instead:\n"
                    f"  {catalogue.command(self.paper, name)}"
                )
            self._records[name] = experiments.obtain(
                self.paper, name, self.profile, self.seeds, self.device, self.where
            )
        return self._records[name]

    def show(self, name: str, draw: Callable[[pd.DataFrame], object]) -> None:
        """Draw a record's rows and print where they come from, or draw a note that it is missing.

        Parameters
        ----------
        name
            The experiment.
        draw
            Is given the rows and draws on the current figure.
        """
        try:
            record = self.record(name)
            draw(record.frame.copy())
            origin = record.provenance()
        except MissingRecord as missing:
            plotting.missing(str(missing))
            origin = ""
        plt.show()
        print(findings.wrapped(origin))

    def frame(self, name: str) -> pd.DataFrame | None:
        """Return a record's rows, or None after printing that it is missing."""
        try:
            return self.record(name).frame.copy()
        except MissingRecord as missing:
            print(missing)
            return None

    def table(self, name: str, make: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
        """Print a record's name and the table that ``make`` returns for its rows."""
        frame = self.frame(name)
        if frame is not None:
            print(f"{name}:", make(frame).to_string(), sep="\n")

    def verdict(self, *ids: str) -> Any:
        """Print what was found of some claims and return their checks as a table.

        Where nothing was decided, the outcome says why, and how many seeds would decide.
        """
        rows = claims.judge(self.paper, self.where, ids)
        for row in rows:
            setting = scale.sentence(row["scale"], row["data"])
            each = [f"Read as {name}: {word}." for name, word in row["readings"].items()]
            head = f"{row['id']}: {claims.finding_in_words(row).upper()}."
            words = [head, *each, row["tally"] and f"{row['tally'].capitalize()}.", setting]
            if own := claims.own_in_words(row):
                words.append(f"{own}; by themselves: {row['own']['finding']}.")
            words.append(row["note"])
            print(findings.wrapped(" ".join(filter(None, words))))
        columns = ["outcome", "quantity", "measured", "asked", "record"]
        checks = [check for row in rows for check in row["checks"]]
        table = pd.DataFrame(checks, columns=[*columns, "essential", "why"])  # none if proved
        table["quantity"] = [*map(claims.quantity_in_words, checks)]
        table["outcome"] += [f" ({why})" if why else "" for why in table["why"]]
        return table[columns].style.hide(axis="index")

    def opening(self) -> Markdown:
        """Return what stored records answer to the paper's own question, in three fields.

        Raises
        ------
        FedlibError
            For a paper whose findings have no ``brief``.
        """
        plotting.use()
        row = findings.brief(self.paper)
        if row is None:
            raise FedlibError(f"data/papers/{self.paper}/findings.toml has no 'brief'.")
        found = {row.claim: row.finding} | row.also
        each = "; ".join(f"{finding} ({claim})" for claim, finding in found.items())
        lines = [f"**We find:** {row.answer}", f"* *{self._told()}:* {row.paper}",
                 f"* *Finding:* {each}",
                 f"* *Scale{' of this check' * bool(row.whole)}:* {row.scale}",
                 f"* *Data:* {row.data}"]  # fmt: skip
        if row.whole:
            lines.append(f"* *The whole claim, with its other checks:* {row.whole}")
        return Markdown("\n".join([lines[0], "", *lines[1:]]))

    def _told(self) -> str:
        ours = paths.about(paths.paper_folder(self.paper)).get("ours")
        return "We expected" if ours else "The paper reports"

    def findings(self) -> Markdown:
        """Return what stored records answer to readers' questions, each with its claim.

        At a profile that runs, the new records are not there yet; what they say follows below.
        """
        running = self.profile != "replay"
        title = "**What we found**" + running * ", in the stored records and not in this run"
        answers = findings.answers(self.paper, None if running else self.out)
        lines = [
            f"* **{row.question}** {row.answer} {row.setting} *{self._told()}:* {row.paper}"
            f" ({row.claim})"
            for row in answers
        ]
        return Markdown("\n".join([title, "", *lines]))

    def claims(self) -> Any:
        """Return all claims of the paper as a table: finding, scale and data, statement."""
        rows = claims.judge(self.paper, self.where)
        table = pd.DataFrame(rows).assign(finding=[*map(claims.finding_in_words, rows)])
        table["measured"] = [
            scale.sentence(*row) for row in zip(table["scale"], table["data"], strict=True)
        ]
        columns = ["id", "finding", "tally", "measured", "statement"]
        return table[columns].style.hide(axis="index")

    def commands(self) -> None:
        """Print the command that makes each largest stored record, and how long that took."""
        made = {(m["experiment"], m["profile"]): m
                for m in records.manifests() if m["paper"] == self.paper}  # fmt: skip
        rows = []
        for name in catalogue.experiment_names(self.paper):
            stored = (made[name, p] for p in catalogue.PROFILES[:0:-1] if (name, p) in made)
            if m := next(stored, None):
                line = catalogue.command(self.paper, name, profile=m["profile"])
                took = duration.time_in_words(m["wall_seconds"])
                if not m["device"].startswith("CPU"):
                    line += " --device cuda" + " --tf32" * m.get("tf32", False)
                    took += f", {m['device']}"
            else:
                line, took = catalogue.command(self.paper, name), "not run"
            rows.append((line, took))
        for line, took in rows:
            print(f"{line:<{max(len(line) for line, _ in rows)}}  # {took}")
