"""Is a record still what the present code, settings and data would give?

A record keeps the table of :func:`code`. Newer tables name each definition in full; older ones by
its plain name, with the same hashes, and are compared with the present one written their way. What
an older table lacks because nobody looked for it then counts as changed code, until a small run
that goes through it has given the same numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedlib import cards, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence.reach import Code, code
from fedlib.lab.evidence.reach import forget as forget

CARD = ("format", "shape", "train", "test", "classes", "scale", "mean", "std", "generator")
"""What a data card says that can change a number; the hashes of its files come on top."""

TOLD = ("title", "where", "seeds", "minutes", "claims")
"""Settings that change no number. The seeds of a record stand in its manifest."""


class Freshness(NamedTuple):
    """How a record stands to the present code: a ``word``, and ``why`` when it is not fresh.

    ``"fresh"``: same code, settings and data. ``"checked"``: the code has changed, and the stored
    smoke run, which goes through all that changed, still gives the same numbers. ``"stale"``:
    neither.
    """

    word: str
    why: str = ""


def short_digest(parts: Any) -> str:
    """Return one short hash of a :func:`code` table, or of anything made of plain values."""
    if isinstance(parts, Mapping):
        parts = sorted((key, short_digest(value)) for key, value in parts.items())
    elif isinstance(parts, list | tuple):
        parts = [short_digest(value) for value in parts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def present_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record of these settings would keep of the present code and data cards.

    Returns
    -------
    dict
        ``"code"``, see :func:`code`, and ``"cards"``, a hash for each data set.
    """
    named = {word for key, word in _strings(settings) if key == "dataset"}
    sets = [cards.card(name) for name in sorted(named)]
    read = [settings, *(card.generator for card in sets), [card.format for card in sets]]
    words = {word for _, word in _strings(read)}
    kinds = [settings[key] for key in ("kind", "study") if key in settings]  # tuning runs another
    methods = {name for key, name in _strings(settings) if key == "method" and ":" in name}
    kinds += sorted(name for name in methods if not name.startswith("__main__:"))
    return {
        "code": {k: v for kind in kinds for k, v in code(kind, words).items()},
        "cards": {card.name: _card_digest(card) for card in sets},
    }


def _card_digest(card: Any) -> str:
    files = [(file.sha256, file.archive_sha256, file.members) for file in card.files]
    return short_digest([[getattr(card, field) for field in CARD], files])


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in nested settings, with the key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def judge_record(
    manifest: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    small: Mapping[str, Any] | None = None,
    small_settings: Mapping[str, Any] | None = None,
    again: bool = False,
) -> Freshness:
    """Say whether a record is fresh, checked or stale.

    Parameters
    ----------
    manifest
        The record's: settings, code, cards, data, and ``small``, a hash of the code that the smoke
        run of the same experiment went through on that day.
    settings
        The experiment's present settings at that profile; None when there is none any more.
    small
        The manifest of the stored smoke run, with what :func:`stamp` notes; None without one.
    small_settings
        The experiment's present settings at the profile ``smoke``.
    again
        Make data again that can be made, and compare them; it takes seconds, once a process.
    """
    if settings is None:
        return Freshness("stale", "The experiment is no longer defined at this profile.")
    theirs, ours = plain(manifest["settings"]), plain(settings)
    if theirs != ours:
        keys = [k for k in sorted({*theirs, *ours}) if theirs.get(k) != ours.get(k)]
        return Freshness("stale", f"Settings have changed: {', '.join(keys)}.")
    present = present_code(settings)
    if manifest["cards"] != present["cards"]:
        names = ", ".join(sorted(present["cards"]))
        return Freshness("stale", f"A data card has changed: {names}.")
    if other := sorted({name for name in present["cards"] if not _same(name, manifest, again)}):
        return Freshness("stale", f"Data have changed: {', '.join(other)}.")
    recorded = {_now_at(name): hashes for name, hashes in manifest["code"].items()}
    gone, new = _changes(recorded, present["code"])
    changed = sorted({*gone, *new})
    if not changed:
        return Freshness("fresh")
    # Code of then and of now that gave the small run the same numbers cannot tell them apart: every
    # changed definition, as it was and as it is, has to be among what the small run went through.
    table: dict[str, set[str]] = defaultdict(set)
    for name, hashes in (small or {}).get("seen", {}).items():
        table[_now_at(name)].update(map(_wherever, hashes))
    parts = [*gone.items(), *new.items()]
    unseen = {name for name, hashes in parts if _wherever(hashes) not in table.get(name, ())}
    if unseen:
        return Freshness("stale", f"Code has changed: {_few(sorted(unseen))}.")
    # And as a whole: small runs of both days, not of one that mixed their definitions.
    days = {manifest.get("small"), short_digest(present_code(small_settings)["code"])}
    if not days <= set(small.get("tables", ())):
        return Freshness("stale", f"Code has changed: {_few(changed)}; no small run of that day.")
    return Freshness(
        "checked", f"Code has changed ({_few(changed)}); the small run gives the same."
    )


def stamp(small: Mapping[str, Any], code: Code) -> dict[str, Any]:
    """Note in a smoke run's manifest that a code table gives the same numbers.

    Returns
    -------
    dict
        ``seen``, ``{definition: [hash, ...]}``, and ``tables``, the hash of every whole table.
    """
    table = {name: list(hashes) for name, hashes in small.get("seen", {}).items()}
    for name, hashes in code.items():
        if hashes not in table.setdefault(name, []):
            table[name].append(hashes)
    tables = small.get("tables", [])
    return {"seen": table, "tables": [*tables, *({short_digest(code)} - set(tables))]}


def _same(name: str, manifest: Mapping[str, Any], again: bool) -> bool:
    """Say whether a data set is the one that a record has read."""
    card, read = cards.card(name), manifest["data"]
    if not read:  # settings name a set, and the study needs none
        return True
    known = {file.name: file.sha256 for file in card.files if file.sha256}
    if manifest["fidelity"] == "re-encoded":
        known |= {part: sha for file in card.files for part, sha in file.reencoded.items()}
    made = _made(name, _card_digest(card)) if again else {}
    return made.items() <= read.items() and all(
        known.get(part, sha) == sha for part, sha in read.items()
    )


@functools.lru_cache(maxsize=64)
def _made(name: str, card_digest: str) -> dict[str, str]:
    """Return the hashes of a set that is made, or comes with a package, as it is made now.

    Empty for a set that is fetched, and one made from another that is not in the cache.
    """
    from fedlib import datasets
    from fedlib.papers.vertical.data import load_columns

    card = cards.card(name)
    columns = card.format in ("columns-made", "columns-bundled")
    if not (card.embedded or columns) or card.base and not datasets.cached(card.base):
        return {}
    with warnings.catch_warnings():  # of what is not verified; it is compared here
        warnings.simplefilter("ignore")
        try:
            data = load_columns(name) if columns else datasets.load(name, progress=False)
        except FedlibError as error:
            return {"error": str(error)}
    return data.hashes


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a manifest holds them, without words and without where code lives."""
    kept = {k: v for k, v in json.loads(json.dumps(settings)).items() if k not in TOLD}
    return kept | {k: str(kept[k]).split(":")[-1] for k in ("kind", "study") if k in kept}


def _now_at(name: str) -> str:
    """Return what the full name of a definition is since its module has moved."""
    module, colon, short = name.partition(":")
    while colon and module not in _moves() and "." in module:
        module = module.rpartition(".")[0]
    return _moves()[module] + name.removeprefix(module) if module in _moves() else name


@functools.cache
def _moves() -> dict[str, str]:
    return tomllib.loads((paths.data_folder() / "moved.toml").read_text("utf-8"))


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _changes(recorded: Code, code: Code) -> tuple[Code, Code]:
    """Return what a record's table has and the present one has not, and the other way round.

    A definition that has moved to another module has not changed. Older tables have plain names,
    and the hashes of all definitions of one name together.
    """
    plain = {name: _in_itself(hashes) for name, hashes in recorded.items() if not _short(name)}
    ours = defaultdict(set)
    for name, hashes in code.items():
        ours[_short(name)] |= _in_itself(hashes)
    gone, new = {}, {}
    for name, hashes in recorded.items():
        if not (plain[name] <= ours[name] if name in plain else code.get(name) == hashes):
            gone[name] = hashes
    for name, hashes in code.items():
        known = recorded.get(name) == hashes or _in_itself(hashes) <= plain.get(_short(name), set())
        if not known:
            new[name] = hashes
    moved = {(_short(n), f) for n, f in gone.items() if n not in code}
    moved &= {(_short(n), f) for n, f in new.items() if n not in recorded}
    return tuple(
        {n: f for n, f in side.items() if n in other or (_short(n), f) not in moved}
        for side, other in ((gone, code), (new, recorded))
    )


def _in_itself(hashes: str) -> set[str]:
    """Return the first parts of hashes: what definitions are, whatever else they use."""
    return {part.partition(".")[0] for part in _wherever(hashes).split("+")}


def _wherever(hashes: str) -> str:
    """Leave out of hashes which of several definitions of one name is meant.

    That is said only where several are reached; the hash of the whole table covers it.
    """
    return "+".join(part.partition(":")[0] for part in hashes.split("+"))


def _short(name: str) -> str:
    """Return the plain name of a definition that is named in full; of another, nothing."""
    module, _, short = name.partition(":")
    return short if "[" not in module else ""
