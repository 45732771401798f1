"""Records: tidy rows with a manifest that says how they came about."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import pandas as pd

from fedlib import cards, paths
from fedlib.errors import FedlibError, unknown
from fedlib.files import make_folder, open_regular, publish
from fedlib.lab.evidence import catalogue
from fedlib.lab.evidence.catalogue import PROFILES
from fedlib.lab.evidence.freshness import Freshness, judge_record
from fedlib.schema import NonNegativeFloat, Page, conform

LARGEST_FILE = 1 << 30  # bytes that a file of a record may have
UNREADABLE = (OSError, EOFError, ValueError, RecursionError, zlib.error)


class MissingRecord(FedlibError):
    """No stored record for an experiment; the message says how to make one."""


class RuleHashes(Page):
    """A claim's rule on the day of a record, see :mod:`fedlib.lab.evidence.ages`: two hashes."""

    text: str
    code: str  # of its measures


class Manifest(Page):
    """What a record says about itself; see :func:`fedlib.lab.evidence.experiments.run`."""

    paper: str
    experiment: str
    profile: catalogue.Profile
    settings: dict[str, Any]
    seeds: list[int]
    rows: str  # SHA-256 of the rows
    wall_seconds: NonNegativeFloat
    cpu_seconds: NotRequired[NonNegativeFloat]  # of all cores
    data: dict[str, str]  # SHA-256 of what was read
    fidelity: str
    diverged: dict[str, dict[str, int]]  # run: seed: round
    rules: NotRequired[
        dict[str, RuleHashes | str]
    ]  # by claim; once one hash of text and code together
    looked: NotRequired[str]  # when an earlier record of the experiment was first looked at
    stood: NotRequired[dict[str, str]]  # by claim, since when one has had the same rule
    tuning: NotRequired[dict[str, Any]]
    device: str
    instructions: str
    versions: dict[str, str]
    commit: str
    date: str
    tf32: NotRequired[bool]
    convolutions: NotRequired[dict[str, Any]]
    joined: NotRequired[list[str]]  # the rows of the records it was joined from
    beside: NotRequired[list[str]]  # the jobs of a batch that were rows of the same run
    code: dict[str, str]  # see fedlib.lab.evidence.freshness
    cards: dict[str, str]
    small: str | None
    seen: NotRequired[dict[str, list[str]]]
    tables: NotRequired[list[str]]
    tried: NotRequired[dict[str, str]]  # by kind of instructions, the last table there


WORD_COLUMNS = dict.fromkeys(("run", "split", "metric"), object)  # of which rules ask, soonest so


@dataclass(frozen=True)
class Record:
    """A stored result.

    Attributes
    ----------
    frame
        Tidy rows: run, seed, round (or the studied quantity), split, metric, value.
    manifest
        Settings, seeds, wall time, device, versions, commit, hashes, date.
    path
        The ``.csv.gz`` file.
    """

    frame: pd.DataFrame
    manifest: dict[str, Any]
    path: Path

    @property
    def manifest_path(self) -> Path:
        """The ``.json`` file beside the rows."""
        return self.path.with_name(self.path.name.replace(".csv.gz", ".json"))

    @property
    def names(self) -> tuple[str, str, str]:
        """Paper, experiment and profile."""
        return tuple(self.manifest[key] for key in ("paper", "experiment", "profile"))

    @property
    def state(self) -> Freshness:
        """Whether the present code would give these rows, as fresh, checked or stale, and why."""
        return self.compared()

    def compared(self, again: bool = False) -> Freshness:
        """Compare the record with the present code, settings, data cards and tuning.

        Parameters
        ----------
        again
            Make data again that can be made, too, which takes seconds.
        """
        m, (paper, experiment, profile) = self.manifest, self.names
        if strangers := sorted({*self.frame.get("seed", ())} - {0, *m["seeds"]}):
            return Freshness(
                "stale", f"Its rows have seeds that the manifest has not: {strangers}."
            )
        try:
            now = catalogue.settings(paper, experiment, profile)
        except FedlibError:
            now = None
        if tuned := m.get("tuning"):
            rates: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):  # not there, or damaged
                rates = json.loads(self._near(f"{tuned['record']}.json").read_text("utf-8"))
            if rates.get("rows") != tuned["rows"]:
                return Freshness("stale", f"Tuning has changed: {tuned['record']}.")
        rows = self._near(f"{experiment}.smoke.csv.gz")
        try:
            small = _stored(rows, (paper, experiment, "smoke")).manifest
            smoke = catalogue.settings(paper, experiment, "smoke")
        except FedlibError:
            return judge_record(m, now, again=again)
        return judge_record(m, now, small if "seen" in small else None, smoke, again)

    def _near(self, name: str) -> Path:
        """Return where a file of the same paper is: beside this record, else among stored ones."""
        beside = self.path.with_name(name)
        with contextlib.suppress(FedlibError):
            return beside if beside.exists() else folder(self.manifest["paper"]) / name
        return beside

    def provenance(self) -> str:
        """Return two lines for readers: what was run on what, how fresh, when, with which code."""
        m = self.manifest
        one = [*m["data"]][0] if len(m["data"]) == 1 else "several sets"
        data = m["settings"].get("dataset", one)
        card = cards.card(data) if m["data"] and "dataset" in m["settings"] else None
        if card and card.stands_in_for and not any(file.urls for file in card.files):
            data += ", a substitute"  # a set that is fetched may be what the paper has itself
        if m.get("fidelity", "canonical") not in ("canonical", "none"):
            data = f"{data} ({m['fidelity']})"
        if model := m["settings"].get("model"):
            data = ", ".join([data] * bool(m["data"]) + [" ".join(map(str, model))])
        commit = m["commit"][:9] + "+" * m["commit"].endswith("+")  # there were changes
        word, why = self.state
        state = {
            "fresh": "",
            "checked": " Checked: the code has changed since; a small run gives the same numbers.",
            "stale": f" Stale: {why}",
        }[word]
        return (
            f"Record {m['experiment']}.{m['profile']}{f', {data}' if m['data'] or model else ''}, "
            f"{len(m['seeds'])} seed{'s' * (len(m['seeds']) > 1)}, "
            f"{m['device']}, {m['date'][:10]}, commit {commit}.{state}"
        )


def folder(paper: str, out: str | Path | None = None) -> Path:
    """Return the folder that holds a paper's records.

    Parameters
    ----------
    out
        ``out/PAPER``; where ``out`` is a folder of papers, such as ``data/papers``, it is
        ``out/PAPER/results``. Default: where the paper itself keeps its records.
    """
    home = paths.paper_folder(paper) if out is None else paths.expand(out, "out") / paper
    return home / "results" if os.path.isfile(home / "experiments.toml") else home


def save(out: str | Path | None, frame: pd.DataFrame, manifest: dict[str, Any]) -> list[Path]:
    """Write rows and manifest, and return both paths.

    The manifest keeps the SHA-256 of the rows. The two appear together: the new manifest waits
    beside its place until the rows are there, and whoever reads in between, or after this process
    was killed, puts it into its place.

    Raises
    ------
    FedlibError
        When the folder cannot be written; nothing half-written stays behind.
    """
    target = make_folder(folder(manifest["paper"], out))
    stem = f"{manifest['experiment']}.{manifest['profile']}"
    text, rows = io.BytesIO(), frame.to_csv(index=False, float_format="%.7g").encode()
    with gzip.GzipFile(fileobj=text, mode="wb", mtime=0) as packed:
        packed.write(rows)
    manifest = manifest | {"rows": hashlib.sha256(rows).hexdigest()}
    pages = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    path, page = target / f"{stem}.csv.gz", target / f"{stem}.json"
    publish(_waiting(page), pages.encode())
    try:
        publish(path, text.getvalue())
    except BaseException:
        _waiting(page).unlink(missing_ok=True)
        raise
    _put_in_place(path, page)
    return [path, page]


def _waiting(page: Path) -> Path:
    return page.with_name(f".{page.name}.next")


def _put_in_place(path: Path, page: Path) -> None:
    """Give rows the manifest that waits for them, when it is theirs."""
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        rows = hashlib.sha256(gzip.decompress(_content(path))).hexdigest()
        if json.loads(_content(_waiting(page)))["rows"] == rows:
            os.replace(_waiting(page), page)


def load(
    paper: str, experiment: str, profile: str = "largest", out: str | Path | None = None
) -> Record:
    """Read a record.

    Parameters
    ----------
    profile
        ``"smoke"``, ``"quick"``, ``"long"``, ``"paper"``, or ``"largest"`` for the largest one.
    out
        Folder of records; default is the one that ships with fedlib.

    Raises
    ------
    MissingRecord
        With the command that produces it.
    """
    largest = PROFILES[:0:-1] if out is None else PROFILES[::-1]  # the book shows no smoke run
    if profile not in ("largest", "replay", *PROFILES):
        raise unknown("profile", profile, ["largest", *PROFILES])
    wanted = largest if profile in ("largest", "replay") else (profile,)
    for name in wanted:
        path = folder(paper, out) / f"{experiment}.{name}.csv.gz"
        try:
            return _stored(path, (paper, experiment, name))
        except MissingRecord:
            continue
    place = "" if out is None else f" in {out}"
    raise MissingRecord(
        f"There is no stored record of {paper} {experiment}{place}. To make one:\n"
        f"  {catalogue.command(paper, experiment, out and str(out), profile)}"
    )


def find(
    paper: str, experiment: str, profile: str = "largest", out: str | Path | None = None
) -> Record | None:
    """Return what :func:`load` does; None where there is no record, or none that can be read."""
    with contextlib.suppress(FedlibError):
        return load(paper, experiment, profile, out)
    return None


def _stored(path: Path, names: tuple[str, ...]) -> Record:
    """Return the record whose rows are in a file."""
    page = path.with_name(path.name.replace(".csv.gz", ".json"))
    if os.path.exists(_waiting(page)):  # no error where a name is too long
        with contextlib.suppress(*UNREADABLE, LookupError, TypeError):  # told below
            _put_in_place(path, page)
    if not (os.path.exists(path) and os.path.exists(page)):
        raise MissingRecord(f"There is no {path}.")
    record = _read(path, page, names, (path.stat().st_mtime_ns, page.stat().st_mtime_ns))
    return replace(record, frame=record.frame.copy(deep=False))  # whoever changes it has his own


@functools.lru_cache(maxsize=64)
def _read(path: Path, page: Path, names: tuple[str, ...], stamp: tuple[int, ...]) -> Record:
    """Read and verify a record, once for each time that one of its files changes."""
    at = page
    try:
        manifest, at = json.loads(_content(page)), path
        rows = gzip.decompress(_content(path))
        frame = pd.read_csv(io.BytesIO(rows), dtype=WORD_COLUMNS)
    except UNREADABLE as error:
        raise FedlibError(
            f"Record {path} cannot be read ({at.name}: {error}). Delete it and its .json, and make "
            "it again."
        ) from error
    conform(manifest, Manifest, str(page))
    if manifest["rows"] != hashlib.sha256(rows).hexdigest():
        raise FedlibError(
            f"Record {path} is not the one its manifest describes: the rows' SHA-256 is "
            f"{hashlib.sha256(rows).hexdigest()[:16]}…, the manifest says "
            f"{manifest['rows'][:16]}…. One of the two was edited or replaced; take both "
            "from where they came from, or delete both and make the record again."
        )
    record = Record(frame, manifest, path)
    if record.names != names:
        raise FedlibError(
            f"The manifest {page} describes {' '.join(record.names)}. Give the files their own "
            "names back."
        )
    return record


def _content(path: Path) -> bytes:
    with open_regular(path, LARGEST_FILE) as file:
        return file.read()


def stored(out: str | Path | None = None, paper: str | None = None) -> list[Record]:
    """Return every stored record, or a paper's, in the order of papers and names."""
    pages = _pages(out, [paper] if paper else None)
    return [load(name, *page.stem.rsplit(".", 1), out=out) for name, page in pages]


@functools.cache
def manifests() -> list[Manifest]:
    """Return the manifest of every record that ships with fedlib, without reading its rows."""
    found = []
    for _, page in _pages():
        try:
            found.append(json.loads(_content(page)))
        except UNREADABLE as error:
            raise FedlibError(
                f"{page} cannot be read ({error}). Delete it and its .csv.gz, and make the record "
                "again."
            ) from error
    return found


def _pages(
    out: str | Path | None = None, papers: list[str] | None = None
) -> Iterator[tuple[str, Path]]:
    for paper in papers or catalogue.papers():
        for page in sorted(folder(paper, out).glob("*.json")):
            yield paper, page


def differences(one: pd.DataFrame, other: pd.DataFrame, same_machine: bool) -> str:
    """Say in what two runs of one experiment differ; empty when they agree.

    Parameters
    ----------
    same_machine
        Made on the same kind of processor with the same PyTorch: values agree to 1e-5.
        Otherwise four values in five agree to 2 %, or to .02: training enlarges the last bit, and
        where a rate is near the largest that works it does so without bound.
    """
    keys = [c for c in one.columns if c != "value"]
    if list(one.columns) != list(other.columns) or len(one) != len(other):
        return f"{len(one)} rows of {list(one.columns)}, {len(other)} of {list(other.columns)}"
    if not one[keys].equals(other[keys]):
        return "the rows are of other runs, rounds or metrics"
    small = (1e-5, 1e-9) if same_machine else (0.02, 0.02)
    close = np.isclose(one["value"], other["value"], *small, equal_nan=True)
    if close.mean() >= (1 if same_machine else 0.8):
        return ""
    first = int(np.flatnonzero(~close)[0])
    a, b = one.iloc[first].to_dict(), other["value"].iloc[first]
    return f"{(~close).sum()} of {len(close)} values, first {a}, now {b}"


def look_dates(manifest: Mapping[str, Any]) -> list[str]:
    """Return when a record's run began, if that is a look, and when an earlier one did, if known.

    A smoke run is none. The parts of a joined record began when they say, side by side or not.
    """
    if "joined" in manifest and "looked" in manifest:
        return [manifest["looked"]]
    jobs = 1 + len(manifest.get("beside", []))  # which share their time
    end = datetime.fromisoformat(manifest["date"])
    end = end if end.tzinfo else end.replace(tzinfo=UTC)
    began = (end - timedelta(seconds=manifest["wall_seconds"] * jobs)).astimezone(UTC)
    began_at = [began.isoformat(timespec="seconds")] * (manifest["profile"] != "smoke")
    return [*began_at, *filter(None, [manifest.get("looked")])]


def stood(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return since when each rule that a record keeps has stood, as far as the record knows.

    Since its run began; of a joined record that does not say when its parts did, since it ended.
    """
    kept = {name for name, rule in manifest.get("rules", {}).items() if isinstance(rule, dict)}
    looks = [] if "joined" in manifest else look_dates(manifest)
    return dict.fromkeys(kept, [*looks, manifest["date"]][0]) | manifest.get("stood", {})


def _alike(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Whether two manifests agree; how many seeds were asked for may have grown since."""
    if key != "settings":
        return one.get(key) == other.get(key)
    first, second = ({**m["settings"], "seeds": None} for m in (one, other))
    return first == second


def _to_the_end(frame: pd.DataFrame, diverged: Mapping[str, Mapping[str, int]]) -> pd.DataFrame:
    """Give seeds that diverged the rounds of those beside them: alone they had ended."""
    more = []
    for run, lost in diverged.items():
        for _, part in frame[frame["run"] == run].groupby(["split", "metric"]):
            ends = part.groupby("seed")["round"].max()
            longest = part[part["seed"] == ends.idxmax()]
            more += [longest[longest["round"] > ends[seed]].assign(seed=seed, value=np.nan)
                     for seed in map(int, lost) if seed in ends]  # fmt: skip
    return pd.concat([frame, *more], ignore_index=True)


def join(
    paper: str,
    experiment: str,
    profile: str,
    sources: Sequence[str | Path],
    out: str | Path | None = None,
    replace: bool = False,
) -> Record:
    """Join records of the same experiment with different seeds into one.

    Parameters
    ----------
    sources
        Folders of records, at least two.
    out
        Where the joined record goes; default is the paper's own folder.
    replace
        Overwrite a record that is there with other seeds than those to be joined, or other
        settings.

    Raises
    ------
    FedlibError
        When they differ in settings (but for the number of seeds), data or tuning, or share a
        seed; or in code, unless the present code is known to give the numbers of all of them; and
        when a record would be lost.
    """
    parts = [load(paper, experiment, profile, source) for source in sources]
    if len(parts) < 2:
        raise FedlibError(f"Joining takes at least two records; got {len(parts)}.")
    first, seeds = parts[0].manifest, [seed for r in parts for seed in r.manifest["seeds"]]
    for record, source in zip(parts, sources, strict=True):
        for key in ("settings", "code", "cards", "data", "fidelity", "tuning", "tf32"):
            if _alike(record.manifest, first, key):
                continue
            if key != "code" or any(r.state.word == "stale" for r in (record, parts[0])):
                raise FedlibError(
                    f"The record in {source} has other {key} than the one in {sources[0]}. "
                    "Only seeds may differ."
                )
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        raise FedlibError(f"Seeds {twice} are in more than one of the records.")
    lost = None if replace else find(paper, experiment, profile, out)
    if lost and not ({*lost.manifest["seeds"]} <= {*seeds}
                     and _alike(lost.manifest, first, "settings")):  # fmt: skip
        raise FedlibError(
            f"{lost.path} is there already, with other settings or with seeds "
            f"{', '.join(map(str, lost.manifest['seeds']))}. Choose another folder with --out, or "
            "overwrite it with --replace."
        )
    every = [r.manifest for r in parts]
    diverged: dict[str, dict] = {}
    for m in every:
        for run, lost in m["diverged"].items():
            diverged.setdefault(run, {}).update(lost)
    rules = {claim: rule for claim, rule in first.get("rules", {}).items()
             if all(m.get("rules", {}).get(claim) == rule for m in every)}  # fmt: skip
    looked = [look for m in every for look in look_dates(m)]
    since = {claim: min(stood(m).get(claim, m["date"]) for m in every) for claim in rules}

    def each(key: str, tables: Sequence[Mapping[str, str]]) -> str:
        return " and ".join(dict.fromkeys(table.get(key, "?") for table in tables))

    versions = [m["versions"] for m in every]
    manifest = first | {key: each(key, every) for key in ("commit", "device", "instructions")} | {
        "seeds": sorted(seeds), "diverged": diverged,
        "settings": max((m["settings"] for m in every), key=lambda s: s.get("seeds", 0)),
        "versions": {key: each(key, versions) for key in first["versions"]},
        "rules": rules, **({"stood": since} if since else {}),
        **({"looked": min(looked)} if looked else {}),
        **{key: round(sum(m[key] for m in every), 1)
           for key in ("wall_seconds", "cpu_seconds") if all(key in m for m in every)},
        "date": max(m["date"] for m in every), "joined": [m["rows"] for m in every],
    }  # fmt: skip
    runs = {name: i for i, name in enumerate(dict.fromkeys(parts[0].frame["run"]))}
    frame = _to_the_end(pd.concat([r.frame for r in parts], ignore_index=True), diverged)
    if (twice := frame.duplicated([c for c in frame.columns if c != "value"])).any():
        raise FedlibError(
            f"{twice.sum()} rows of {paper} {experiment}.{profile} are in more than one of the "
            "records: they do not depend on the seed. Make the record once, of one seed."
        )
    order = frame.assign(at=frame["run"].map(runs)).sort_values("at", kind="stable").index
    save(out, frame.loc[order], manifest)
    return load(paper, experiment, profile, out)
