"""At what scale, and on which data, a record was made: its settings beside the paper's own.

The settings of the profile ``paper`` are the paper's, as far as its text gives them; where the
rest is from stands as ``untold`` in its ``paper.toml``. A record of any profile whose settings
equal them is at the paper's own scale; how many seeds it has, how often it looks and on how many
samples decide how exact it is, and not what is tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fedlib import cards, paths
from fedlib.lab.evidence import catalogue
from fedlib.lab.evidence.freshness import TOLD
from fedlib.lab.evidence.records import Record

EXACTNESS = ("seeds", "looks", "evaluate_on", "tests")
"""Settings that decide how exact a record is."""

NO_SCALE = (*TOLD, *EXACTNESS, "dataset", "data_seed", "kind", "runs", "run")
"""Settings that are no part of a scale, or are compared in another way."""

SETTING_WORDS = {
    "model": "network",
    "pool": "inputs averaged",
    "compression": "time compressed",
    "batch_size": "minibatch",
    "rows": "training rows",
    "owners": "owners to draw from",
    "clients_grid": "clients compared",
    "samples": "samples a client",
    "augment": "images augmented",
    "warmup_rounds": "rounds of warm-up",
    "folded": "columns added up",
}

OUR_EXPERIMENT = "an experiment of ours"
"""What differs where the paper has no such experiment."""

THEIR_BYTES = "the paper's own bytes"
COPY = "the paper's set, another copy"
GENERATED = "generated as the paper says"
NONE = "none needed"
ASSUMED = "a set that we assume, as the paper names none"
ANOTHER = "another set"
SUBSTITUTE = "a substitute"
DATA = (THEIR_BYTES, COPY, GENERATED, NONE, ASSUMED, ANOTHER, SUBSTITUTE)
"""From the paper's own to the furthest from it."""

THEIRS = (THEIR_BYTES, COPY, GENERATED, NONE)
RECIPE = "generated"  # in a claim's data: the paper says how its data are drawn
UNNAMED = "unnamed"  # beside a set: the paper does not say that this experiment is on it
MARKS = (RECIPE, UNNAMED)


def differences_in_scale(record: Record, ours: bool = False) -> list[str]:
    """Return what differs between a record's settings and the paper's, in words.

    Parameters
    ----------
    ours
        Whether it is read for a claim on which the paper makes no experiment.
    """
    m = record.manifest
    ours = ours or paths.about(paths.paper_folder(m["paper"])).get("ours", False)
    if ours or "paper" not in catalogue.profiles(m["paper"], m["experiment"]):
        return [OUR_EXPERIMENT]
    theirs = json.loads(json.dumps(catalogue.settings(m["paper"], m["experiment"], "paper")))
    told = paths.about(paths.paper_folder(m["paper"])).get("untold", {})
    untold = told | {key.removeprefix(f"{m['experiment']}."): said for key, said in told.items()}
    lines = _different(m["settings"], theirs, untold)
    one, other = ({run["run"]: run for run in s.get("runs", [])} for s in (m["settings"], theirs))
    for name in one:  # of several runs that differ in one thing the first speaks
        lines = _different(one[name], other.get(name, one[name]), untold) | lines
    crowds = any("crowd" in run for run in one.values())  # numbers of clients, from the list
    return [lines[key] for key in sorted(lines) if key != ("clients" if crowds else "clients_grid")]


def _different(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], untold: Mapping[str, str]
) -> dict[str, str]:
    """Return words for each setting that differs, by its name.

    Parameters
    ----------
    untold
        Where theirs is from, by the name of a setting or of a network, if not from the text.
    """
    lines = {}
    for key in sorted({*ours, *theirs} - {*NO_SCALE}):
        here, there = ours.get(key), theirs.get(key)
        if key == "pool":  # by one is not at all
            here, there = here or 1, there or 1
        if here != there:
            word = SETTING_WORDS.get(key, key.replace("_", " "))
            known = key if key in untold else there[0] if key == "model" and there else ""
            full = f"the paper's: {_said(there)}"
            if known in untold:
                full = f"at full size {_said(there)} ({untold[known]})"
            lines[key] = f"{word}: {_said(here)}, {full}"
    return lines


def _said(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def data(record: Record, theirs: Iterable[str]) -> str:
    """Return what a record's data are to the paper: one of :data:`DATA`.

    Parameters
    ----------
    theirs
        The claim's ``data``: the sets of the paper's own experiment, with ``"unnamed"`` where we
        assume one, ``"generated"`` where the paper says how its data are drawn; empty where it has
        none, so that any will do.
    """
    m, theirs = record.manifest, set(theirs)
    name = m["settings"].get("dataset")
    if name is None or not theirs:
        return GENERATED if RECIPE in theirs else NONE
    card = cards.card(name)
    base = card.generator["base"] if card.generator.get("kind") == "part" else ""
    part = base in theirs and card.train < cards.card(base).train  # not who only has its columns
    if (name in theirs or part) and UNNAMED in theirs:
        return ASSUMED
    if name in theirs and m["fidelity"] == "canonical":
        return THEIR_BYTES
    if name in theirs or part:
        return COPY
    return SUBSTITUTE if theirs & {*card.stands_in_for} else ANOTHER


def sentence(differ: Iterable[str], data: str) -> str:
    """Return a sentence on scale and data; empty where nothing was measured.

    Parameters
    ----------
    differ
        See :func:`differences_in_scale`.
    data
        See :func:`data`.
    """
    if not data:
        return ""
    names = _names(differ)
    where = {GENERATED: "data " + GENERATED, NONE: ""}.get(data, "on " + data)
    at = f"Not at the paper's scale ({names})" if names else "At the paper's own scale"
    at = f"In {OUR_EXPERIMENT}" if names == OUR_EXPERIMENT else at
    return f"{at}{', ' * bool(where)}{where}."


def words(differ: Iterable[str], data: str) -> str:
    """Return the scale alone, in words. Parameters as for :func:`sentence`."""
    names = _names(differ)
    if not data:
        return "nothing measured"
    if names in ("", OUR_EXPERIMENT):
        return names or "the paper's own"
    return f"not the paper's ({names})"


def _names(differ: Iterable[str]) -> str:
    """Return the names of what differs, each once, in alphabetical order."""
    return ", ".join(sorted({line.partition(":")[0] for line in differ}))
