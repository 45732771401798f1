"""Which came first, the rule or the look? And has the code of the measures changed since?

A rule's text is dated by the commit since which it has been what it is, a look by the start of the
run that made the earliest record of an experiment, whatever became of that record. A history tells
both. A wheel, a zip or a shallow clone has none: what it said stands in ``data/ages.json``, which
``python -m fedlib.lab.evidence.ages`` writes. A younger record tells for itself: it keeps the rules
of its day.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import json
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlib import files, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, freshness, reach, records
from fedlib.lab.evidence.records import Record, RuleHashes

OLDER, YOUNGER, SAME, CHANGED, UNKNOWN = "older", "younger", "same", "changed", "not known"

SOURCE = Path(__file__).with_name("measures.py")
ONCE_IN = Path(__file__).with_name("claims.py")  # where measures were once
RETURNS = {"Measured", "_exactly"}  # values, and words on them:
WORD_ARGUMENTS = {"text", "lost", "beside", None}  # None is the rest of them, in **words
PROSE = {"what", "essential", "data", "reading", "changed", "note", "expected"}  # of a check
LOOK = re.compile(r"\.(quick|long|paper)\.json$")  # a smoke run is no look


# ------------------------------------------------------------------ what a rule is


def essential(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checks that a claim's finding depends on."""
    return [check for check in claim.get("check", []) if check.get("essential", True)]


def text(claim: Mapping[str, Any]) -> str:
    """Return a hash of what decides a claim: its kind, its essential checks, what matters in them.

    Prose does not count, nor the order of the checks, nor a control and the smallest difference
    that matters in a metric of controls alone.
    """
    counted = essential(claim)
    metrics, others = (
        {check.get("with", {}).get("metric") for check in part}
        for part in (counted, [c for c in claim.get("check", []) if c not in counted])
    )
    smallest = claim.get("smallest", {})
    if isinstance(smallest, dict):  # once it was one number
        smallest = {k: v for k, v in smallest.items() if k in metrics or k not in others}
    asked = ({k: v for k, v in check.items() if k not in PROSE} for check in counted)
    return freshness.short_digest([claim.get("kind"), _plain(smallest), sorted(map(_plain, asked))])


def _plain(value: Any) -> str:
    """Write a value in one way: 1 as 1.0, keys in order."""
    return json.dumps(json.loads(json.dumps(value), parse_int=float), sort_keys=True)


def measure_code(source: str, measures: Iterable[str]) -> str:
    """Return a hash of measures and of what they use of their module; "" where one is missing."""
    definitions, reached, todo = _definitions(source), {}, [*measures]
    if not definitions.keys() >= {*todo}:
        return ""
    while todo:
        name = todo.pop()
        if name in definitions and name not in reached:
            reached[name], names = definitions[name]
            todo += names
    return freshness.short_digest(reached)


@functools.lru_cache(maxsize=64)
def _definitions(source: str) -> dict[str, tuple[str, list[str]]]:
    """Return what a module defines at its top level, each with the names that it uses.

    A class is there without its methods, and each method as ``.name``: it counts when it is used.
    """
    nodes, definitions = ast.parse(source).body, {}
    for node in list(nodes):
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            node.body = [part for part in node.body if part not in methods]
            for part in methods:
                part.name = f".{part.name}"
            nodes += methods
    for node in nodes:
        names = [getattr(node, "name", "")]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        if not any(names) or (node := _Values().visit(node)) is None:
            continue
        parts = list(ast.walk(node))
        used = [part.id for part in parts if isinstance(part, ast.Name)]
        used += [f".{part.attr}" for part in parts if isinstance(part, ast.Attribute)]
        for name in names:
            before, more = definitions.get(name, ("", []))
            definitions[name] = (before + reach.dump(node), more + used)
    return definitions


class _Values(reach._Lean):
    """Leave out what only words a value: of what a measure returns, and parameters for it."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in RETURNS:
            node.args = node.args[:2]
            node.keywords = [word for word in node.keywords if word.arg not in WORD_ARGUMENTS]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if node.name in RETURNS:
            node.body = []
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node, takes = super().visit_FunctionDef(node), node.args
        used = {part.id for line in node.body for part in ast.walk(line) if hasattr(part, "id")}
        defaults = [None] * (len(takes.args) - len(takes.defaults)) + takes.defaults
        kept = [(a, d) for a, d in zip(takes.args, defaults, strict=True) if a.arg in used]
        takes.args, takes.defaults = [a for a, _ in kept], [d for _, d in kept if d]
        takes.kwarg = takes.kwarg if takes.kwarg and takes.kwarg.arg in used else None
        return node


def _measures(claim: Mapping[str, Any]) -> list[str]:
    return sorted({check["measure"] for check in essential(claim) if "measure" in check})


def experiments(check: Mapping[str, Any]) -> list[str]:
    """Return the experiments that a check reads: its own, and the one that it compares with."""
    than = check.get("with", {}).get("than")
    return [check["experiment"], *([than] if than else [])]


def experiments_of(claim: Mapping[str, Any]) -> set[str]:
    """Return the experiments that a claim's finding depends on."""
    return {name for check in essential(claim) for name in experiments(check)}


def _claims(page: str) -> dict[str, dict[str, Any]]:
    """Return the claims of a ``claims.toml`` of any day, by id; none where it cannot be read."""
    try:
        return {claim["id"]: spelled_out(claim) for claim in tomllib.loads(page)["claim"]}
    except (tomllib.TOMLDecodeError, KeyError):
        return {}


def spelled_out(claim: Mapping[str, Any]) -> dict[str, Any]:
    """Return a claim with one check for each combination of values, see :func:`catalogue.each`."""
    if "check" not in claim:
        return dict(claim)
    return claim | {"check": [one for check in claim["check"] for _, one in catalogue.each(check)]}


def _page(home: Path) -> str:
    page = home / "claims.toml"
    return page.read_text("utf-8") if page.is_file() else ""


# ------------------------------------------------------------------ what a record keeps


def rules(paper: str, experiment: str) -> dict[str, RuleHashes]:
    """Return the present rules that ask for an experiment, as two hashes for each claim."""
    source = SOURCE.read_text("utf-8")
    return {
        name: RuleHashes(text=text(claim), code=measure_code(source, _measures(claim)))
        for name, claim in _claims(_page(paths.paper_folder(paper))).items()
        if experiment in experiments_of(claim)
    }


def earlier(paper: str, experiment: str, profile: str, out: str | Path) -> dict[str, Any]:
    """Return what earlier records of an experiment say, for one about to be made in a folder.

    Returns
    -------
    dict
        ``looked``, when the first was looked at: making a record again makes no rule older. And
        ``stood``, by claim, since when a record has had its rule as it is: nor younger. Neither
        where there is none, or for a smoke run.
    """
    if profile == "smoke":
        return {}
    dates, stood, now = [], {}, rules(paper, experiment)
    for place, kind in itertools.product((out, None), catalogue.PROFILES):
        record = records.find(paper, experiment, kind, place)
        if record and (looks := records.look_dates(record.manifest)):
            dates += looks
            for name, since in records.stood(record.manifest).items():
                if record.manifest["rules"][name]["text"] == now.get(name, {}).get("text"):
                    stood[name] = min(since, stood.get(name, since))
    if not dates:
        return {}
    return {"looked": min(dates), **({"stood": stood} if stood else {})}


def _stamp(seconds: float) -> str:
    """Write a time so that words are in the order of times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------ how old a rule is


def of(paper: str, claim: Mapping[str, Any], judged_by: Iterable[Record]) -> dict[str, str]:
    """Say how old a claim's rule is.

    Parameters
    ----------
    judged_by
        The records that the claim is judged by.

    Returns
    -------
    dict
        ``text``, whether it is ``"older"`` or ``"younger"`` than the first look at a record of its
        experiments, or ``"not known"``; ``since``, when it became what it is, and ``first``, when
        there was a rule at all; ``first_look``, and ``anew``, the first look at the experiments as
        they are now; ``code``, whether that of the measures is the ``"same"`` as when the records
        were made, has ``"changed"`` or is ``"not known"``. Dates are in UTC, "" where there is
        none.
    """
    stored, now, asked = _stored(), text(claim), experiments_of(claim)
    entry = stored["claims"].get(f"{paper}/{claim['id']}", {})
    seen = asked.union(claim.get("seen", []))
    before = [stored["looks"].get(f"{paper}/{name}", {}) for name in seen]
    manifests = [r.manifest for r in judged_by if r.manifest["experiment"] in asked]
    rules = [_noted(m, claim) for m in manifests]
    looks = [part["first"] for part in before if part]
    looks += [look for m in manifests for look in records.look_dates(m)]
    since = [entry["since"]] if entry.get("hash") == now else []
    since += [
        records.stood(m)[claim["id"]]
        for m, rule in zip(manifests, rules, strict=True)
        if rule.get("text") == now and m["profile"] != "smoke"
    ]
    covered = any(name.startswith(f"{paper}/") for name in stored["claims"])
    word = UNKNOWN
    if looks and since:
        word = OLDER if min(since) <= min(looks) else YOUNGER
    elif looks and (covered or any(rule.get("text") for rule in rules)):
        word = YOUNGER  # it was changed after what we have was written
    return {
        "text": word,
        "since": min(since, default=""),
        "first": entry.get("first", ""),
        "first_look": min(looks, default=""),
        "anew": min((part["anew"] for part in before if part), default=""),
        "code": _code_since(claim, manifests, stored["measures"]),
    }


def _noted(manifest: Mapping[str, Any], claim: Mapping[str, Any]) -> dict[str, str]:
    """Return what a record keeps of a rule; old ones keep one hash of text and code together."""
    rule = manifest.get("rules", {}).get(claim["id"], {})
    return rule if isinstance(rule, dict) else {}


def _code_since(
    claim: Mapping[str, Any], manifests: list[dict[str, Any]], dated: Mapping[str, dict[str, str]]
) -> str:
    """Say whether the code of a claim's measures has changed since its records were made."""
    source, measures, words = SOURCE.read_text("utf-8"), _measures(claim), set()
    for m in manifests:
        if rule := _noted(m, claim):
            words.add(SAME if rule["code"] == measure_code(source, measures) else CHANGED)
            continue
        for name in measures:
            entry = dated.get(name, {})
            same = entry.get("hash") == measure_code(source, [name]) and entry["since"] < m["date"]
            words.add((SAME if same else CHANGED) if entry else UNKNOWN)
    return next((word for word in (CHANGED, UNKNOWN, SAME) if word in words), UNKNOWN)


def age_in_words(age: Mapping[str, str]) -> str:
    """Return a rule's ages as sentences for readers."""
    if age["text"] == UNKNOWN:
        line = "Whether the rule's text is older than the first look is not known."
    else:
        day = {k: age[k][:16].replace("T", " ") for k in ("since", "first", "first_look", "anew")}
        since = f"since {day['since']}" if age["since"] else "changed of late"
        if "" < age["first"] < min(age["since"] or age["first_look"], age["first_look"]):
            since += f"; another form since {day['first']}"
        known = "" if age["first"] else " that is known here"  # where there is no history
        line = f"The rule's text is {age['text']} than the first look{known} ({since}; "
        line += f"first look {day['first_look']})."
        if age["text"] == YOUNGER and "" < age["since"] < age["anew"]:
            line += f" It is older than the first run with the present settings ({day['anew']})."
    since = {
        SAME: "The measure's code has not changed since the record.",
        CHANGED: "The measure's code has changed since the record.",
        UNKNOWN: "Whether the measure's code has changed since the record is not known.",
    }
    return f"{line} {since[age['code']]}"


# ------------------------------------------------------------------ first the rule, then the run


def committed(paper: str, experiment: str, profile: str) -> None:
    """Refuse a run whose rules the checkout has not committed.

    Smoke runs and tuning are no look. A folder that no repository keeps, and a paper that is not
    the book's, have nobody to answer to.

    Raises
    ------
    FedlibError
        With the claims whose rules are not what they are in the last commit.
    """
    home = paths.paper_folder(paper)
    tuning = "tunes" in catalogue.settings(paper, experiment, profile)
    if profile == "smoke" or tuning or home.parent != paths.data_folder() / "papers":
        return
    if not git(home, "ls-files", ".."):
        return
    kept = _claims(git(home, "show", "HEAD:./claims.toml").decode())
    left = [
        name
        for name, claim in _claims(_page(home)).items()
        if experiment in experiments_of(claim) and text(kept.get(name, {})) != text(claim)
    ]
    if left:
        raise FedlibError(
            f"{experiment} is asked for by rules that are not committed as they are now: "
            f"{', '.join(left)}. A rule comes before its run, and the history must show it. Commit "
            f"{home / 'claims.toml'}, then run this again; --profile smoke and --set are always "
            "free."
        )


# ------------------------------------------------------------------ what the history says


def history(
    homes: Mapping[str, Path], sources: Sequence[Path] = (ONCE_IN, SOURCE)
) -> dict[str, Any] | None:
    """Return what the history says of papers' rules, looks and measures.

    Parameters
    ----------
    homes
        The papers' folders by name, all in one repository.
    sources
        The modules that measures have been in, the present one last.

    Returns
    -------
    dict or None
        ``claims``, the text of each rule, and ``measures``, the code of each measure: its ``hash``,
        ``since`` when and by which ``commit`` it has been that, and when there was ``first`` one.
        ``looks``: when the ``first`` run of an experiment began, and the first with its present
        settings, ``anew``. None without a history, or with a part of one.
    """
    at = next(iter(homes.values()))
    if git(at, "rev-parse", "--is-shallow-repository").strip() != b"false":
        return None
    claims = {
        f"{paper}/{name}": entry
        for paper, home in homes.items()
        for name, entry in _dated([home / "claims.toml"], _texts).items()
    }
    asked = (claim for home in homes.values() for claim in _claims(_page(home)).values())
    measures = {name for claim in asked for name in _measures(claim)}
    codes = _dated(
        sources,
        lambda page: {name: now for name in measures if (now := measure_code(page, [name]))},
    )
    return {"claims": claims, "looks": _first_looks(at, {*homes}), "measures": codes}


def _texts(page: str) -> dict[str, str]:
    return {name: text(claim) for name, claim in _claims(page).items()}


def _dated(
    pages: Sequence[Path], read: Callable[[str], dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Return since when each thing that files hold has been what it is in the last commit.

    Back from the last commit, along all parents, as far as the thing is the same.
    """
    at, versions = pages[0].parent, defaultdict(dict)
    log = [line.split() for line in git(at, "log", "--format=%H %ct %P").decode().splitlines()]
    when = {commit: int(seconds) for commit, seconds, *_ in log}
    parents = {commit: above for commit, _, *above in log}
    for name in (name for page in pages for name in _called(page)):
        contents = _contents(at, [f"{commit}:{name}" for commit in when])
        known = {content: read(content) for content in set(contents) - {""}}
        for commit, content in zip(when, contents, strict=True):
            versions[commit] |= known.get(content, {})
    dates = {}
    for name, present in versions[log[0][0]].items() if log else ():
        todo, seen, origins = [log[0][0]], {log[0][0]}, []
        while todo:
            commit = todo.pop()
            same = [above for above in parents[commit] if versions[above].get(name) == present]
            origins += [commit] * (not same)
            todo += {*same} - seen
            seen |= {*same}
        origin = min(origins, key=lambda commit: (when[commit], commit))
        first = min(when[commit] for commit in when if name in versions[commit])
        since, first = _stamp(when[origin]), _stamp(first)
        dates[name] = {"hash": present, "since": since, "commit": origin, "first": first}
    return dates


def _called(page: Path) -> list[str]:
    """Return the names that a file has had."""
    log = git(page.parent, "log", "--follow", "--format=", "--name-only", "-z", "--", page.name)
    return sorted({*log.decode().replace("\n", "\0").split("\0")} - {""})


def _first_looks(at: Path, papers: set[str]) -> dict[str, dict[str, str]]:
    """Return when each experiment was first run, over all records that a history has."""
    listed = git(at, "rev-list", "--objects", "HEAD").decode().splitlines()
    every: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for page in _contents(at, [line.split()[0] for line in listed if LOOK.search(line)]):
        with contextlib.suppress(ValueError):
            m = json.loads(page)
            if {"paper", "date", "wall_seconds", "settings"} <= {*m} and m["paper"] in papers:
                every[f"{m['paper']}/{m['experiment']}"].append(m)
    dates, plain = {}, freshness.plain
    for name, versions in sorted(every.items()):
        last = {m["profile"]: m["settings"] for m in sorted(versions, key=lambda m: m["date"])}
        alike = [m for m in versions if plain(m["settings"]) == plain(last[m["profile"]])]
        first, anew = (
            min(date for m in part for date in records.look_dates(m)) for part in (versions, alike)
        )
        dates[name] = {"first": first, "anew": anew}
    return dates


def _contents(at: Path, names: list[str]) -> list[str]:
    """Return what files of a repository held; "" for one that was not there."""
    check = "--batch-check=%(objectname)"
    ids = git(at, "cat-file", check, lines=names).decode().splitlines()
    there = sorted({name for name in ids if " " not in name})
    raw, start, contents = git(at, "cat-file", "--batch", lines=there), 0, {}
    for name in there:
        begin = raw.index(b"\n", start) + 1
        stop = begin + int(raw[start:begin].split()[2])
        contents[name], start = raw[begin:stop].decode("utf-8", "replace"), stop + 1
    return [contents.get(name, "") for name in ids]


def git(at: Path, *command: str, lines: Sequence[str] = ()) -> bytes:
    """Return what git says to some lines of input; nothing where it fails, or is not there."""
    asked = "\n".join(lines).encode()
    try:
        done = subprocess.run(["git", "-C", str(at), *command], input=asked, capture_output=True)
    except OSError:
        return b""
    return done.stdout if done.returncode == 0 else b""


# ------------------------------------------------------------------ where there is no history


@functools.cache
def _stored() -> dict[str, Any]:
    page = paths.data_folder() / "ages.json"
    if not page.is_file():
        return {"claims": {}, "looks": {}, "measures": {}}
    return json.loads(page.read_text("utf-8"))


def papers_of_the_book() -> dict[str, Path]:
    """Return the folders of the book's own papers that have claims."""
    home = paths.data_folder() / "papers"
    return {k: v for k, v in paths.papers("claims.toml").items() if v.parent == home}


def write_ages() -> None:
    """Write what the history says to ``data/ages.json``."""
    dates = history(papers_of_the_book())
    if dates is None:
        raise SystemExit("There is no history here, or a part of one: git fetch --unshallow")
    page = json.dumps(dates, indent=1, sort_keys=True) + "\n"
    files.publish(paths.data_folder() / "ages.json", page.encode())


if __name__ == "__main__":
    write_ages()
