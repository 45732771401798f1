"""Claims of the papers, judged from stored records.

A claim is a statement with checks. A check measures one quantity in a record, with an interval
over seeds, and compares it with what is asked; its outcome says what was seen. Three fields follow,
which are never mixed: what the essential checks found, at what scale, and on which data. Nobody
types them. Beside them stands how old the rule is, and whether the code of the measures has
changed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, get_type_hints

import numpy as np
from typing_extensions import TypedDict

from fedlib import cards, paths
from fedlib.errors import FedlibError, unknown
from fedlib.lab.evidence import ages, catalogue, outcomes, records, scale
from fedlib.lab.evidence.ages import experiments
from fedlib.lab.evidence.measures import MEASURES, RATIOS, Measured, MissingRows
from fedlib.lab.evidence.outcomes import FINDINGS, NO_DATA, NO_RECORD, OPEN, PROVED, READING, SHOWN
from fedlib.lab.evidence.records import Record
from fedlib.schema import CLOSED, Page, conform, read_toml

FEWEST = 5  # seeds; from fewer there is no word on a sign or on sameness
LEVEL = 0.95  # of an interval, together over the essential checks of a claim, or its controls
NO_READING = ", confirmed in none"  # of the readings on which a finding depends

DIFFERENCES = ("advantage", "during", "with_fewer_rounds", "saved")
"""Measures whose values are differences, so that a bound on one side is a threshold.

Those of slopes, of best values and of whole grids are differences, too; their bounds are a band, as
their rules were written.
"""


_With = TypedDict("_With", {"with": dict[str, Any]})


class Asked(Page, _With):
    """A check as it stands in a ``claims.toml``; ``with`` holds the measure's arguments."""

    what: str
    asks: Literal["better", "same", "within"]
    experiment: str
    measure: str
    bounds: NotRequired[list[int | float]]
    essential: NotRequired[bool]
    reading: NotRequired[str]  # of the claim's sentence; without one, a check of every reading
    looks: NotRequired[int]  # at its record, while seeds were added; 1 where none were
    each: NotRequired[dict[str, list[Any]]]  # so many checks as there are combinations


class Claim(Page):
    """A claim as it stands in a ``claims.toml``."""

    id: str
    where: str
    kind: Literal["measured", "proved", "arithmetic"]
    statement: str
    data: NotRequired[list[str]]  # the paper's own sets; "generated"; see scale.data
    differs: NotRequired[list[str]]  # from the paper's scale at every profile: "what: ours, theirs"
    ours: NotRequired[bool]  # the paper makes no such experiment, so none is at its scale
    paper_reports: NotRequired[str]
    smallest: NotRequired[dict[str, int | float]]  # differences that matter, by metric; time
    because: NotRequired[str]
    changed: NotRequired[str]
    seen: NotRequired[list[str]]  # experiments with some of the same runs, looked at before
    expected: NotRequired[str]
    note: NotRequired[str]
    check: NotRequired[list[Asked]]


class Claims(Page):
    """A ``claims.toml``."""

    claim: list[Claim]


def claims_of(paper: str) -> list[Claim]:
    """Return a paper's claims as they stand in its ``claims.toml``."""
    homes = paths.papers("claims.toml")
    if paper not in homes:
        if paper in paths.papers():
            raise FedlibError(f"{paper} has no claims: no claims.toml in {paths.papers()[paper]}.")
        raise unknown("paper", paper, homes)
    return _read(homes[paper] / "claims.toml")


@functools.cache
def _read(path: Path) -> list[Claim]:
    claims = [ages.spelled_out(claim) for claim in read_toml(path, Claims)["claim"]]
    for number, claim in enumerate(claims):
        place = f"{path}, claim {claim['id']}"
        if claim["id"] in {other["id"] for other in claims[:number]}:
            raise FedlibError(f"{place}: another claim has this id.")
        if claim.get("expected", OPEN) not in FINDINGS:
            raise unknown(f"finding in {place}:", claim["expected"], FINDINGS)
        for name in _theirs(claim, place):
            if name not in (known := [*scale.MARKS, *cards.all_cards()]):
                raise unknown(f"data set in {place}:", name, known)
        for check in claim.get("check", []):
            _sound(claim, check, place)
    return claims


def _theirs(claim: Claim, place: str) -> list[str]:
    """Return the sets of the paper's own experiment, which a measured claim has to name."""
    if "data" not in claim and claim["kind"] == "measured":
        raise FedlibError(
            f"{place}: the paper's own data set is not named. Add data = ['NAME'], with a card's "
            f"name, or '{scale.RECIPE}' where the paper says how its data are drawn; beside a name "
            f"'{scale.UNNAMED}', where we assume it; data = [] where it takes none."
        )
    return claim.get("data", [])


def _sound(claim: Claim, check: Asked, place: str) -> None:
    """Refuse a check that measures nothing, or asks a question that cannot be answered."""
    if check["measure"] not in MEASURES:
        raise unknown(f"measure in {place}:", check["measure"], MEASURES)
    conform(check["with"], _arguments(check["measure"]), f"{place}, 'with' of '{check['what']}',")
    parts = ("share", "start", "stop") if check["measure"] == "during" else ("share",)
    for name in parts:
        if not 0 <= (part := check["with"].get(name, 0)) <= 1:
            raise FedlibError(f"{place}: {name} is a part of the run, 0 to 1; got {part}.")
    bounds = check.get("bounds")
    if (check["asks"] == "within") != (bounds is not None):
        raise FedlibError(f"{place}: bounds belong to a check that asks 'within', and to no other.")
    if bounds and not (len(bounds) == 2 and bounds[0] <= bounds[1]):
        raise FedlibError(f"{place}: bounds are a lower and an upper one; got {bounds}.")
    if check.get("looks", 1) < 1:
        raise FedlibError(f"{place}: a record was looked at once or oftener; got {check['looks']}.")
    if check["measure"] in RATIOS and check["asks"] != "better":
        raise FedlibError(f"{place}: a factor can be 'better' alone; got {check['asks']}.")
    _smallest(claim, check)


@functools.cache
def _arguments(measure: str) -> Any:
    """Return the shape of a measure's arguments beside the record."""
    function = MEASURES[measure]
    hints, open_ended = get_type_hints(function), False
    shape: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        else:
            required, hint = parameter.default is parameter.empty, hints[name]
            hint = str if hint is Record else hint  # the name of its experiment
            shape[name] = hint if required else NotRequired[hint]
    arguments = TypedDict("Arguments", shape)
    arguments.__pydantic_config__ = CLOSED | ({"extra": "allow"} if open_ended else {})
    return arguments


# ------------------------------------------------------------------ from a record to an outcome


@dataclass(frozen=True)
class Check:
    """One check's outcome.

    Attributes
    ----------
    quantity
        What was measured.
    asked
        What was asked of it.
    measured
        Its value with the interval, or ``"no record"``.
    outcome
        One of :data:`fedlib.lab.evidence.outcomes.OUTCOMES`.
    essential
        Whether the finding depends on it.
    reading
        The reading of the claim's sentence that it belongs to; empty: to every one.
    estimate, low, high
        The mean over seeds and its interval, natural logarithms for a ratio; None where there is
        no such end.
    s
        The smallest difference that matters, or the threshold, in the same unit; None for a band.
    size
        The estimate as one would say it, without its sign: ``"2.4 points of 81"``.
    record, profile
        The record it was read from; two, with a comma, where two are compared.
    why
        What numbers alone do not say: why nothing was decided, which way it differs, or that the
        estimate is near s.
    """

    quantity: str
    asked: str
    measured: str
    outcome: str
    essential: bool = True
    reading: str = ""
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    s: float | None = None
    size: str = ""
    record: str = ""
    profile: str = ""
    why: str = ""


@dataclass(frozen=True)
class Question:
    """What a check asks of an interval.

    Attributes
    ----------
    kind
        ``"better"``, ``"no worse"``, ``"same"`` or ``"within"``.
    s
        The smallest difference that matters, or the threshold; None for a band.
    sign
        -1 when it is asked of the difference the other way round.
    bounds
        Of a band.
    """

    kind: str
    s: float | None = None
    sign: int = 1
    bounds: tuple[float, float] = (-math.inf, math.inf)

    def outcome(self, low: float, high: float, d: float) -> str:
        """Return the outcome for an interval and its estimate."""
        if self.kind == "within":
            return outcomes.within(low, high, *self.bounds)
        if self.sign < 0:
            low, high, d = -high, -low, -d
        rule = {"better": outcomes.better, "same": outcomes.same, "no worse": outcomes.no_worse}
        return rule[self.kind](low, high, d, self.s)


def question(claim: Claim, check: Asked) -> Question:
    """Return what a check asks.

    A bound on one side of a difference is a threshold: "at least b" asks for better by b, "at
    most b below" for no worse than b.
    """
    if check["asks"] != "within":
        return Question(check["asks"], _smallest(claim, check))
    least, most = check["bounds"]
    if check["measure"] not in DIFFERENCES or math.isinf(least) == math.isinf(most):
        return Question("within", bounds=(least, most))
    b, sign = (most, -1) if math.isinf(least) else (least, 1)
    return Question("better" if sign * b > 0 else "no worse", abs(b), sign)


def _is_log(check: dict[str, Any]) -> bool:
    """Say whether a check's values are natural logarithms, which are shown as what they are of."""
    return str(check.get("with", {}).get("metric")).startswith("log ")


def _words(check: dict[str, Any], s: float) -> str:
    if check["measure"] in RATIOS or (_is_log(check) and check["asks"] == "better"):
        return f"above 1, by a factor {math.exp(s):.3g}"
    if check["asks"] == "better":
        return f"above 0, by {s:g}"
    if check["asks"] == "same":
        return f"within ±{s:g}"
    least, most = check["bounds"]
    if _is_log(check):
        ends = (end if math.isinf(end) else math.exp(end) for end in (least, most))
        least, most = (float(f"{end:.3g}") for end in ends)
    if least == most:
        return f"exactly {least:g}"
    if math.isinf(most):
        return f"at least {least:g}"
    return f"at most {most:g}" if math.isinf(least) else f"between {least:g} and {most:g}"


def _smallest(claim: dict[str, Any], check: dict[str, Any]) -> float:
    if check["asks"] == "within":
        return 0.0
    key = RATIOS.get(check["measure"]) or check["with"].get("metric")
    if key not in claim.get("smallest", {}):
        raise FedlibError(
            f"Claim {claim.get('id')} asks whether one run is better or the same by '{key}', and "
            f"names no smallest difference that matters: smallest = {{ {key} = ... }}."
        )
    s, ratio = claim["smallest"][key], check["measure"] in RATIOS
    if not ratio < s < math.inf:
        raise FedlibError(
            f"Claim {claim.get('id')}: the smallest difference that matters is above 0, a factor "
            f"above 1, and finite; got {key} = {s}."
        )
    return math.log(s) if ratio else s


def _check(
    paper: str, claim: dict[str, Any], check: dict[str, Any], out: Any, profile: str = "largest"
) -> Check:
    """Carry out one check on the stored records of its experiments."""
    essential, asked = check.get("essential", True), question(claim, check)
    blank = Check(
        quantity=check["what"], asked=_words(check, _smallest(claim, check)), essential=essential,
        reading=check.get("reading", ""), s=asked.s,
        measured=NO_RECORD, outcome=NO_RECORD, record=check["experiment"],
    )  # fmt: skip
    try:
        read = [records.load(paper, name, profile, out) for name in experiments(check)]
        record, *than = read
        settings = record.manifest.get("settings", {})
        arguments = check["with"] | ({"than": than[0]} if than else {})
        got = MEASURES[check["measure"]](record, **arguments)
    except records.MissingRecord:
        return blank
    except MissingRows as error:
        return replace(blank, why=str(error))
    except KeyError as error:
        raise FedlibError(
            f"Claim {claim['id']}: the measure '{check['measure']}' needs a column that the record "
            f"of {' or '.join(experiments(check))} lacks ({error.args[0]})."
        ) from error
    family = sum(other.get("essential", True) == essential for other in claim["check"])
    level = 1 - (1 - LEVEL) / (family * check.get("looks", 1))
    low, high = got.interval(level)
    outcome, profile = asked.outcome(low, high, got.estimate), record.manifest["profile"]
    wanted = max(FEWEST, settings.get("seeds", 0)) if claim["kind"] != "arithmetic" else 0
    if got.seeds < wanted:
        outcome, why = OPEN, f"{got.seeds} seeds are fewer than {wanted}"
    else:
        why = _why(got, level, asked, outcome)
    ends = dict(estimate=got.estimate, low=low, high=high)
    return replace(
        blank, measured=_said(check, got, level), outcome=outcome, profile=profile, why=why,
        record=", ".join(f"{name}.{part.manifest['profile']}"
                         for name, part in zip(experiments(check), read, strict=True)),
        size=got.size(), **{k: v for k, v in ends.items() if math.isfinite(v)},
    )  # fmt: skip


def _said(check: Asked, got: Measured, level: float) -> str:
    """Return a value for readers, with its interval; a logarithm is undone."""
    ends = (got.estimate, *got.interval(level))
    if got.lost or not (_is_log(check) and np.isfinite(ends).all()):
        words = got.words(level)  # a speed is missing where a run is never at its goal
        timed = check["with"].get("metric") == "log speed"
        return words.replace("diverged", "did not come to the goal") if timed else words
    d, low, high = (f"{math.exp(end):.2g}" for end in ends)
    times = " times" * (check["measure"] in (*DIFFERENCES, *RATIOS))
    return f"{d}{times} ({low} to {high})"


def _why(got: Measured, level: float, asked: Question, outcome: str) -> str:
    low, high = got.interval(level)
    if outcome == OPEN:
        return outcomes.more_seeds(got, level, asked.outcome)
    if outcome == outcomes.DIFFERS:
        return "better" if got.estimate > 0 else "worse"
    if outcome == outcomes.OUTSIDE:
        return "above" if low > asked.bounds[1] else "below"
    if outcome in (outcomes.HOLDS, outcomes.SMALLER) and asked.kind == "better":
        ends = sorted((asked.sign * low, asked.sign * high))
        near = outcomes.is_near(*ends, asked.sign * got.estimate, asked.s)
        return "about as much as asked" * near
    return ""


# ------------------------------------------------------------------ from outcomes to three fields


def find(claim: dict[str, Any], checks: list[Check]) -> tuple[str, dict[str, str]]:
    """Return a claim's finding, and that of each reading of its sentence.

    Where readings disagree, the finding is that it depends on the reading; where in none of them
    anything speaks against the claim, and some checks cannot tell, they do not, and it is open in
    part. Where nothing could have come out otherwise there are controls only, which are shown and
    not counted.
    """
    essential = [check for check in checks if check.essential]
    if not essential and claim["kind"] != PROVED:
        if not checks:
            return NO_DATA, {}
        missing = all(check.outcome == NO_RECORD for check in checks)
        return (NO_RECORD if missing else SHOWN), {}
    names = dict.fromkeys(check.reading for check in essential if check.reading)
    each = {
        name: outcomes.finding(
            claim["kind"], [check.outcome for check in essential if check.reading in ("", name)]
        )
        for name in names or [""]
    }
    several = set(each.values())
    if NO_RECORD in several:  # of one reading: then nobody knows whether it matters
        return NO_RECORD, (each if names else {})
    if len(several) == 1:
        return several.pop(), (each if names else {})
    found = outcomes.finding(claim["kind"], [check.outcome for check in essential])
    return (found if found == outcomes.OPEN_PART else READING), each


def checks(paper: str, claim: str, out: str | Path | None = None) -> list[Check]:
    """Carry out the checks of one claim.

    Raises
    ------
    FedlibError
        For an unknown paper or claim, with the valid ones.
    """
    known = {entry["id"]: entry for entry in claims_of(paper)}
    if claim not in known:
        raise unknown("claim", claim, known)
    entry = known[claim]
    return [_check(paper, entry, check, out) for check in entry.get("check", [])]


def judge(
    paper: str, out: str | Path | None = None, ids: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Judge claims of a paper.

    Parameters
    ----------
    paper
        One with a ``claims.toml``.
    out
        Folder of records; default is the one that ships with fedlib.
    ids
        The claims; default is all of them.

    Returns
    -------
    list of dict
        One a claim: paper, id, where, statement, kind, paper_reports, smallest, because, note,
        changed; ``finding``, and ``readings``, the finding of each reading; ``sizes``, what smaller
        records find, see :func:`sizes`; ``scale``, what differs from
        the paper's own settings, and ``data``, what the data are to the paper's, both over the
        records of the essential checks, with ``sets``, the same for each set; ``own``, what those
        checks find that have both from the paper, see :func:`own_part`; ``checks``, a
        dictionary for each :class:`Check`; ``tally``, the counts of outcomes in words; ``record``
        and ``profile``; ``origins``, a line for each record; ``ages``, how old the rule is, see
        :func:`fedlib.lab.evidence.ages.of`.
    """
    if out is not None and not paths.expand(out, "out").is_dir():
        raise FedlibError(f"There is no folder {out} to read records from.")
    names = [claim["id"] for claim in claims_of(paper)] if ids is None else ids
    folder, pages = records.folder(paper, out), paths.paper_folder(paper).glob("*.toml")
    files = (*pages, *folder.glob("[!.]*"))  # what begins with a dot is under way
    stamp = tuple((page.name, page.stat().st_mtime_ns) for page in files)
    handed = {row["id"]: row for row in _handed_over().get(paper, []) if out is None}
    return [copy.deepcopy(handed.get(name) or _judged(paper, name, out, stamp)) for name in names]


@functools.cache
def _handed_over() -> dict[str, list[dict[str, Any]]]:
    """Return the rows that the process above has judged already; the book's build hands them on."""
    page = os.environ.get("FEDLIB_JUDGED")
    return json.loads(Path(page).read_text("utf-8")) if page else {}


@functools.lru_cache(maxsize=256)
def _judged(paper: str, name: str, out: str | Path | None, stamp: tuple) -> dict[str, Any]:
    """Judge a claim, once for each time that a record changes; rules are read once a process."""
    results = checks(paper, name, out)
    claim = {claim["id"]: claim for claim in claims_of(paper)}[name]
    read = read_from(paper, _records(results, made=True), out)
    counted = [check for check in results if check.essential] or results
    words = {k: claim.get(k, "") for k in ("paper_reports", "because", "note", "changed")}
    finding, readings = find(claim, results)
    return {
        "paper": paper,
        **{k: claim[k] for k in ("id", "where", "statement", "kind")},
        **words,
        "finding": finding,
        "readings": readings,
        "sizes": sizes(paper, claim, results, out),
        **measured_at(claim, read_from(paper, _records(counted, made=True), out)),
        "own": own_part(paper, claim, results, out),
        "tally": tally_checks(results),
        "checks": [vars(check) for check in results],
        "record": _records(results),
        "profile": ", ".join(dict.fromkeys(c.profile for c in results if c.profile)),
        "smallest": claim.get("smallest", {}),
        "origins": [record.provenance() for record in read],
        "ages": ages.of(paper, claim, read),
    }


def sizes(
    paper: str, claim: Claim, results: list[Check], out: str | Path | None = None
) -> list[dict[str, Any]]:
    """Return what records of smaller profiles find, where there are larger ones.

    Returns
    -------
    list of dict
        ``profile``, ``finding``, ``scale`` and ``data``, the smallest first; empty where the
        claim was tried at one size.
    """
    essential, rows = [check for check in results if check.essential], []
    largest = {check.profile for check in essential if check.profile}
    at_most = measured_at(claim, read_from(paper, _records(essential, made=True), out))
    rules = [check for check in claim["check"] if check.get("essential", True)]
    names, home = {name for rule in rules for name in experiments(rule)}, records.folder(paper, out)
    for profile in catalogue.PROFILES[1:-1] if largest - {"quick"} else ():
        there = all((home / f"{name}.{profile}.json").exists() for name in names)
        if not there or largest == {profile}:
            continue
        made = [_check(paper, claim, rule, out, profile) for rule in rules]
        if made and all(check.outcome != NO_RECORD for check in made):
            setting = measured_at(claim, read_from(paper, _records(made, made=True), out))
            if setting != at_most:
                rows.append({"profile": profile, "finding": find(claim, made)[0], **setting})
    return rows


def own_part(
    paper: str, claim: Claim, results: list[Check], out: str | Path | None = None
) -> dict[str, Any]:
    """Return what the essential checks find that are at the paper's own scale, on its data.

    Returns
    -------
    dict
        ``finding`` and ``readings`` of these checks alone, with the intervals that they have among
        all; ``checks`` and ``of``, how many they are and of how many; ``record``. Empty where they
        are none, or all.
    """
    essential = [check for check in results if check.essential and check.profile]
    own = {
        name: is_own(measured_at(claim, read_from(paper, name, out)))
        for name in {check.record for check in essential}
    }
    part = [check for check in essential if own[check.record]]
    if len(part) in (0, len(essential)):
        return {}
    finding, readings = find(claim, part)
    counts = {"checks": len(part), "of": len(essential)}
    return {"finding": finding, "readings": readings, **counts, "record": _records(part)}


def measured_at(claim: Claim, stored: list[Record]) -> dict[str, Any]:
    """Return scale and data of a claim: empty where nothing was measured."""
    if claim["kind"] == PROVED or not stored:
        return {"scale": [], "data": "", "sets": {}}
    ours, lines = claim.get("ours", False), list(claim.get("differs", []))
    each = {r.manifest["experiment"]: scale.differences_in_scale(r, ours) for r in stored}
    for line in dict.fromkeys(line for differ in each.values() for line in differ):
        where = [experiment for experiment, differ in each.items() if line in differ]
        lines.append(line if len(where) == len(each) else f"{line} ({', '.join(where)})")
    sets: dict[str, str] = {}
    for record in stored:
        name = record.manifest["settings"].get("dataset", "no data set")
        word = scale.data(record, claim.get("data", []))
        sets[name] = max(word, sets.get(name, word), key=scale.DATA.index)
    return {"scale": lines, "data": max(sets.values(), key=scale.DATA.index), "sets": sets}


def own_in_words(row: dict[str, Any]) -> str:
    """Return which part of a claim's checks is the paper's own, without what it finds.

    Empty where it is none, or all; see :func:`own_part`.
    """
    if not (own := row["own"]):
        return ""
    part = f"{own['checks']} of {own['of']} checks are"
    return f"{part} at the paper's own scale and on its data ({own['record']})"


def quantity_in_words(check: dict[str, Any]) -> str:
    """Return what a check measures, said to be a control where it is one."""
    control = not check["essential"] and not check["quantity"].startswith("control")
    return check["quantity"] + " (control)" * control


def finding_in_words(row: dict[str, Any]) -> str:
    """Return a claim's finding; where it depends on the reading, whether one is borne out."""
    borne_out = (outcomes.CONFIRMED, PROVED, outcomes.ARITHMETIC)
    some = any(found.startswith(borne_out) for found in row["readings"].values())
    return row["finding"] + NO_READING * (row["finding"] == READING and not some)


def is_reproduced(row: dict[str, Any]) -> bool:
    """Say whether a judged claim is confirmed at the paper's own scale and on the paper's set."""
    return row["finding"] == outcomes.CONFIRMED and is_own(row)


def is_own(row: dict[str, Any]) -> bool:
    """Say whether a judged claim was measured at the paper's own scale and on its data."""
    return is_own_scale(row) and is_own_data(row)


def is_own_scale(row: dict[str, Any]) -> bool:
    """Say whether something counted was measured, and at the paper's own scale."""
    return bool(row["data"]) and not row["scale"] and row.get("finding") != outcomes.SHOWN


def is_own_data(row: dict[str, Any]) -> bool:
    """Say whether a judged claim was measured, and on the paper's data."""
    return row["data"] in scale.THEIRS


def tally_checks(checks: list[Check]) -> str:
    """Return the outcomes in words: ``"2 of 5 hold, 3 open"``, essential checks first."""
    parts = []
    for essential, name in ((True, ""), (False, "controls: ")):
        words = outcomes.tally_outcomes(c.outcome for c in checks if c.essential == essential)
        parts += [name + words] * bool(words)
    return "; ".join(parts)


def read_from(paper: str, names: str, out: str | Path | None = None) -> list[Record]:
    """Return the records that a check names, ``"fig3.quick"`` or two with a comma."""
    return [records.load(paper, *name.rsplit(".", 1), out) for name in names.split(", ") if name]


def _records(results: Iterable[Check], made: bool = False) -> str:
    """Return the names of records that checks read, each once; if ``made``, of those there are."""
    names = (check.record.split(", ") for check in results if check.profile or not made)
    return ", ".join(dict.fromkeys(name for several in names for name in several))
