"""Records: tidy rows with a manifest that says how they came about."""

from __future__ import annotations

import ast
import copy
import errno
import functools
import gzip
import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedlib.errors import FedlibError
from fedlib.paths import data_folder

PROFILES = ("smoke", "quick", "paper")


class MissingRecord(FedlibError):
    """No stored record for an experiment; the message says how to make one."""


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
    def stale(self) -> bool:
        """True when the code that computes has changed since, or the settings have."""
        from fedlib import experiments

        m = self.manifest
        try:
            now = experiments.settings(m["paper"], m["experiment"], m["profile"])
        except FedlibError:
            return True
        return m["source"] != source_hash(now["kind"]) or m["settings"] != json.loads(
            json.dumps(now)
        )

    def provenance(self) -> str:
        """Return two lines for readers: profile, data, seeds, staleness; date, commit, device."""
        m = self.manifest
        name = m["settings"].get("dataset")
        data = "digits, a substitute" if name == "digits" else name
        if m.get("fidelity", "canonical") not in ("canonical", "none"):
            data = f"{data} ({m['fidelity']})"
        stale = " Stale: the code or the settings have changed since." if self.stale else ""
        return (
            f"Record {m['experiment']}.{m['profile']}{f', {data}' if m['data'] else ''}, "
            f"{len(m['seeds'])} seed{'s' * (len(m['seeds']) > 1)}, "
            f"{m['device']}, {m['date'][:10]}, commit {_short(m['commit'])}.{stale}"
        )


def _short(commit: str) -> str:
    """Shorten a commit, keeping the ``+`` that says there were changes."""
    return commit[:9] + "+" * commit.endswith("+")


def folder(out: str | Path | None = None) -> Path:
    """Return the folder that holds records; default is the one that ships with fedlib."""
    return data_folder() / "results" if out is None else Path(out)


def make_folder(path: Path) -> Path:
    """Make a folder that can be written, or say that another one has to be chosen."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def _cannot_write(path: Path, error: OSError) -> FedlibError:
    return FedlibError(f"Cannot write to {path}: {error.strerror}. Choose another with --out.")


def save(record_folder: Path, frame: pd.DataFrame, manifest: dict[str, Any]) -> list[Path]:
    """Write rows and manifest, each moved into place in one step. Returns both paths.

    Raises
    ------
    FedlibError
        When the folder cannot be written; nothing half-written stays behind.
    """
    target = make_folder(record_folder / manifest["paper"])
    stem = f"{manifest['experiment']}.{manifest['profile']}"
    text = io.BytesIO()
    with gzip.GzipFile(fileobj=text, mode="wb", mtime=0) as packed:
        packed.write(frame.to_csv(index=False, float_format="%.7g").encode())
    pages = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    written = []
    for name, content in ((f"{stem}.csv.gz", text.getvalue()), (f"{stem}.json", pages.encode())):
        write(target / name, content)
        written.append(target / name)
    return written


def write(path: Path, content: bytes) -> None:
    """Write a file beside its place and move it there in one step.

    Raises
    ------
    FedlibError
        When it cannot be written; nothing half-written stays behind.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def load(
    paper: str, experiment: str, profile: str = "largest", out: str | Path | None = None
) -> Record:
    """Read a record.

    Parameters
    ----------
    profile
        ``"smoke"``, ``"quick"``, ``"paper"``, or ``"largest"`` for the largest one stored.
    out
        Folder of records; default is the one that ships with fedlib.

    Raises
    ------
    MissingRecord
        With the command that produces it.
    """
    wanted = reversed(PROFILES) if profile in ("largest", "replay") else (profile,)
    for name in wanted:
        path = folder(out) / paper / f"{experiment}.{name}.csv.gz"
        page = path.with_name(f"{experiment}.{name}.json")
        if path.exists() and page.exists():
            return _read(path, page)
    make = "quick" if profile in ("largest", "replay") else profile
    raise MissingRecord(
        f"There is no stored record of {paper} {experiment}. To make one:\n"
        f"  fedlib run {paper} {experiment} --profile {make} --out data/results"
    )


def _read(path: Path, page: Path) -> Record:
    try:
        return Record(pd.read_csv(path), json.loads(page.read_text()), path)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FedlibError(
            f"Record {path} cannot be read ({error}). Delete it and its .json, and make it again."
        ) from error


@functools.lru_cache(maxsize=64)
def _rows(path: Path, changed: int) -> pd.DataFrame:
    """Read the rows of a record once for each time that the file changes."""
    return pd.read_csv(path)


def _profiles(paper: str, experiment: str) -> Sequence[str]:
    from fedlib import experiments

    return experiments.profiles(paper, experiment)


def stored(out: str | Path | None = None) -> list[Record]:
    """Return every stored record, in the order of their paths."""
    pages = sorted(folder(out).glob("*/*.json"))
    return [load(p.parent.name, *p.stem.rsplit(".", 1), out=out) for p in pages]


def source_hash(kind: str) -> str:
    """Return a hash of the code behind one kind of experiment, blind to comments and docstrings.

    It covers the function that carries the kind out (of :mod:`fedlib.studies`, or of the module
    named before the colon), and every top-level definition of fedlib reachable from it, but for
    the loading of data, which the data hashes of a record cover, and the handing of work to
    cores, which a test holds to the last bit. New code beside it leaves the hash as it is.
    """
    seen: dict[tuple[str, str], str] = {}
    todo = [tuple(kind.split(":")) if ":" in kind else ("studies", kind)]
    while todo:
        module, name = todo.pop()
        definitions, imported = _definitions(module)
        if (module, name) in seen or name not in definitions:
            continue
        node = definitions[name]
        seen[module, name] = _dump(_without_docstrings(node))
        for child in ast.walk(node):
            if isinstance(child, ast.Name):
                todo.append(imported.get(child.id, (module, child.id)))
            elif isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                todo.append((imported.get(child.value.id, ("", ""))[0], child.attr))
    text = "\n".join(f"{key}: {seen[key]}" for key in sorted(seen))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _definitions(module: str) -> tuple[dict[str, ast.AST], dict[str, tuple[str, str]]]:
    """Return a module's top-level definitions, and where its imported fedlib names live."""
    path = Path(__file__).parent / (module.replace(".", "/") + ".py")
    if module in ("", "errors", "paths", "datasets", "cores") or not path.exists():
        return {}, {}
    definitions: dict[str, ast.AST] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {t.id: node for t in targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedlib"):
            home = node.module.removeprefix("fedlib").removeprefix(".")
            for alias in node.names:
                imported[alias.asname or alias.name] = (
                    (home, alias.name) if home else (alias.name, "")
                )
    return definitions, imported


def _dump(tree: ast.AST) -> str:
    """Return ``ast.dump`` of a tree as Python 3.11 writes it, whatever Python runs.

    Python 3.12 added ``type_params`` and Python 3.13 leaves out empty lists; without this,
    every record would look stale under another Python.
    """
    for node in ast.walk(tree):
        node.__dict__.pop("type_params", None)
    return ast.dump(tree, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))


def _without_docstrings(tree: ast.AST) -> ast.AST:
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            del body[0]
    return tree
