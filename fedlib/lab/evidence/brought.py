"""What changes when a reader brings one of the papers' own data sets, and by which commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fedlib import cards, paths
from fedlib.lab.evidence import ages, catalogue, claims, queue


class Use(NamedTuple):
    """An experiment that would run on the set.

    Attributes
    ----------
    paper, experiment, profile
        Which one; the profile is ``paper``, or the largest that there is.
    instead
        The set that it runs on today: another one that stands in, or the set itself.
    changes
        Values of settings that put the set in its place; empty where it is there already.
    claims
        Claims about the set with a check that rests on it, by itself or by the rates it tunes.
    queued
        Whether ``fedlib records --work`` makes it.
    """

    paper: str
    experiment: str
    profile: str
    instead: str
    changes: dict[str, Any]
    claims: tuple[str, ...]
    queued: bool


def to_bring() -> list[str]:
    """Return the sets that a claim of a paper is about and that only their owners hand out."""
    named = {name for paper in paths.papers("claims.toml") for claim in claims.claims_of(paper)
             for name in claim.get("data", ())}  # fmt: skip
    return [name for name, card in cards.all_cards().items() if card.bring and name in named]


def uses(name: str) -> Iterator[Use]:
    """Yield the experiments of papers with a claim about a set that run on it, or on a substitute.

    Parameters
    ----------
    name
        Of a data set.

    Raises
    ------
    FedlibError
        If there is no such data set.
    """
    cards.card(name)
    queued = {tuple(entry[k] for k in ("paper", "experiment", "profile"))  # type: ignore[literal-required]
              for entry in queue.read_queue()}  # fmt: skip
    for paper in paths.papers("claims.toml"):
        about = [c for c in claims.claims_of(paper) if name in c.get("data", ())]
        known = {} if not about else {
            experiment: _largest(paper, experiment)
            for experiment in catalogue.experiment_names(paper)
        }  # fmt: skip
        for experiment, (profile, s) in known.items():
            now = s.get("dataset", "")
            if now != name and (not now or name not in cards.card(now).stands_in_for):
                continue
            rest = {experiment, *(e for e, (_, o) in known.items() if o.get("tuned") == experiment)}
            ids = tuple(c["id"] for c in about for checks in [c.get("check", ())]
                        if any(rest & {*ages.experiments(check)} for check in checks))  # fmt: skip
            changes = {} if now == name else _changes(s, now, name)
            there = (paper, experiment, profile) in queued
            yield Use(paper, experiment, profile, now, changes, ids, there)


def _largest(paper: str, experiment: str) -> tuple[str, dict[str, Any]]:
    can = catalogue.profiles(paper, experiment)
    profile = "paper" if "paper" in can else can[-1]
    return profile, catalogue.settings(paper, experiment, profile)


def _changes(s: dict[str, Any], now: str, name: str) -> dict[str, Any]:
    """Return the set, and the model with as many outputs as it has classes."""
    ours, theirs = (len(cards.card(one).classes) for one in (now, name))
    model = s.get("model")
    if ours != theirs and isinstance(model, list) and model[-1] == ours:
        return {"dataset": name, "model": [*model[:-1], theirs]}
    return {"dataset": name}


def commands(name: str) -> Iterator[str]:
    """Yield the commands that make the records on a set and judge them, for a shell.

    Rates are tuned on the set, too, and at the profile that asks for them.
    """
    found = list(uses(name))
    yield f"fedlib data get {name}"
    if any(use.queued and not use.changes for use in found):
        yield "fedlib records --work"
    made: set[tuple[str, str, str]] = set()
    for use in found:
        if use.queued and not use.changes:
            continue
        tuned = catalogue.settings(use.paper, use.experiment, use.profile).get("tuned")
        for experiment in filter(None, (tuned, use.experiment)):
            if (use.paper, experiment, use.profile) not in made:
                yield _run(use.paper, experiment, use.profile, name)
            made.add((use.paper, experiment, use.profile))
    for paper in dict.fromkeys(paper for paper, *_ in made):
        yield f"fedlib claims {paper} --out runs"


def _run(paper: str, experiment: str, profile: str, name: str) -> str:
    words = ["fedlib", "run", paper, experiment, "--profile", profile]
    s = catalogue.settings(paper, experiment, profile)
    if s["dataset"] != name:
        for key, value in _changes(s, s["dataset"], name).items():
            words += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join([*words, "--out", "runs"])


def told(name: str) -> Iterator[str]:
    """Yield what a card says, line by line: what to bring, what it changes, and the commands.

    Parameters
    ----------
    name
        Of a data set.

    Raises
    ------
    FedlibError
        If there is no such data set.
    """
    card = cards.card(name)
    yield f"{name}: {card.title}"
    yield f"  Licence: {card.licence}"
    yield f"  Rows: {card.train} to train on, {card.test} to test on. Split: {card.split}"
    if card.bring:
        yield f"  Bring: {card.bring.files}"
        yield f"  Form: {card.bring.form}"
        yield f"  Who gives it out: {card.bring.source}"
    if card.otherwise:
        yield f"  {card.otherwise}"
    if card.stands_in_for:
        yield f"  Stands in for: {', '.join(card.stands_in_for)}"
    for label, lines in (("Cannot show", card.cannot_show), ("Trap", card.traps)):
        yield from (f"  {label}: {line}" for line in lines)
    found = list(uses(name)) if card.bring else []
    if not found:
        return
    yield "Experiments that it changes, and claims that rest on them:"
    for use in found:
        now = f", instead of {use.instead}" if use.changes else ""
        ids = ", ".join(use.claims) or "no claim"
        yield f"  {use.paper} {use.experiment}, profile {use.profile}{now}: {ids}"
    yield f"Pages: {', '.join(pages(found))}"
    yield "Once it is there:"
    yield from (f"  {line}" for line in commands(name))


def pages(found: Iterable[Use]) -> list[str]:
    """Return the pages of claims, and the folders of chapters, that experiments are shown in."""
    papers = list(dict.fromkeys(use.paper for use in found))
    chapters = [paths.about(paths.paper_folder(paper)).get("chapter") for paper in papers]
    return [f"book/scoreboard/{paper}" for paper in papers] + [
        f"notebooks/{chapter}" for chapter in chapters if chapter
    ]
