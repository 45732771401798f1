"""Is a record still what the present code would give? A hash of what can change a number.

Code is taken one definition at a time: a function, a method, a constant, an entry of a registry.
From the function that carries a study out, every definition that can be reached is followed,
through any import, and hashed with its references by plain name. So it does not matter in which
module a definition lives, and adding a model, a loss or a method that a study cannot reach changes
nothing.

Left out are docstrings, comments, annotations and messages, and checks of input, which either
let a number pass as it is or stop the run: ``raise``, an ``if`` that does nothing but raise, and
calls for the sake of a check alone, of functions whose names begin with ``check``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedlib import datasets

BORDER = {
    "modules": {"errors", "paths", "cores", "cost", "files", "recording"},
    "names": {"all_cards", "card", "get", "verify", "_obtain", "_bundled", "_placed_or_fail"},
}
"""Where the walk ends: messages, places, counting, the handing of work to cores and its replaying
(tests hold that they change no bit), and what delivers verified bytes, which a record's data hashes
cover."""

CARD = ("format", "shape", "train", "test", "classes", "scale", "mean", "std", "generator")
"""What a data card says that can change a number; the hashes of its files come on top."""

TOLD = ("title", "where", "seeds", "minutes", "claims")
"""Settings that change no number. The seeds of a record stand in its manifest."""

Code = dict[str, str]


class State(NamedTuple):
    """How a record stands to the present code: a ``word``, and ``why`` when it is not fresh.

    ``"fresh"``: same code, settings and data. ``"checked"``: the code has changed, and the stored
    smoke run, which goes through all that changed, still gives the same numbers. ``"stale"``:
    neither.
    """

    word: str
    why: str = ""


class Place(NamedTuple):
    """A definition and where it is written; ``name`` is empty for a module itself."""

    module: str
    name: str


class Piece(NamedTuple):
    """What one definition is, as a hash, and what it asks for."""

    hash: str
    attributes: frozenset[str]
    words: frozenset[str]
    asked: tuple[Place, ...]


class Module(NamedTuple):
    """What a file defines at its top level, and what its imports are called there."""

    definitions: Mapping[str, ast.AST]
    imports: Mapping[str, Place]


def code(study: str, words: Iterable[str] = ()) -> Code:
    """Return a short hash of every definition that a study can reach.

    Parameters
    ----------
    study
        ``"package.module:function"``.
    words
        Strings of its settings and of its data card. An entry of a registry, a dictionary such as
        ``LOSSES`` whose values are definitions, counts when its key is among them or is written
        in the code that was reached.

    Returns
    -------
    dict
        ``{name: hash}``; methods as ``Class.method``, entries as ``REGISTRY[key]``.
    """
    module, name = study.split(":")
    return dict(_code(module, name, frozenset(words)))


def digest(parts: Any) -> str:
    """Return one short hash of a :func:`code` table, or of anything made of plain values."""
    if isinstance(parts, Mapping):
        parts = sorted((key, digest(value)) for key, value in parts.items())
    elif isinstance(parts, list | tuple):
        parts = [digest(value) for value in parts]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record of these settings would keep of the present code and data cards.

    Returns
    -------
    dict
        ``"code"``, see :func:`code`, and ``"cards"``, a hash for each data set.
    """
    held = [datasets.card(name) for name in sorted(set(_named(settings, "dataset")))]
    words = {
        *_words(settings),
        *(w for card in held for w in (card.format, *_words(card.generator))),
    }
    kinds = [settings[key] for key in ("kind", "study") if key in settings]  # tuning runs another
    return {
        "code": {k: v for kind in kinds for k, v in code(kind, words).items()},
        "cards": {card.name: _card_digest(card) for card in held},
    }


def _card_digest(card: Any) -> str:
    files = [(file.sha256, file.archive_sha256, file.members) for file in card.files]
    return digest([[getattr(card, field) for field in CARD], files])


def _words(value: Any) -> Iterator[str]:
    """Yield every string in nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)


def _named(value: Any, key: str) -> Iterator[str]:
    """Yield what nested settings hold under a key."""
    if isinstance(value, Mapping):
        if isinstance(value.get(key), str):
            yield value[key]
        for inner in value.values():
            yield from _named(inner, key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _named(inner, key)


def judge(
    manifest: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
    small: Mapping[str, Any] | None = None,
    small_settings: Mapping[str, Any] | None = None,
) -> State:
    """Say whether a record is fresh, checked or stale.

    Parameters
    ----------
    manifest
        The record's: settings, code, cards, and ``small``, a hash of the code that the smoke run
        of the same experiment went through on that day.
    settings
        The experiment's present settings at that profile; None when there is none any more.
    small
        The manifest of the stored smoke run, with what :func:`seen` notes; None without one.
    small_settings
        The experiment's present settings at the profile ``smoke``.
    """
    if settings is None:
        return State("stale", "The experiment is no longer defined at this profile.")
    theirs, ours = _plain(manifest["settings"]), _plain(settings)
    if theirs != ours:
        keys = [k for k in sorted({*theirs, *ours}) if theirs.get(k) != ours.get(k)]
        return State("stale", f"Settings have changed: {', '.join(keys)}.")
    present = now(settings)
    if manifest["cards"] != present["cards"]:
        names = ", ".join(sorted(present["cards"]))
        return State("stale", f"A data card has changed: {names}.")
    held, code = manifest["code"], present["code"]
    changed = sorted({name for name, _ in held.items() ^ code.items()})
    if not changed:
        return State("fresh")
    table = small["seen"] if small else {}
    unseen = [
        name
        for name in changed
        if any(name in c and c[name] not in table.get(name, []) for c in (held, code))
    ]
    if unseen:
        return State("stale", f"Code has changed: {_few(unseen)}.")
    days = {manifest.get("small"), digest(now(small_settings)["code"])}
    if not days <= set(small.get("tables", ())):
        return State("stale", f"Code has changed: {_few(changed)}; no small run of that day.")
    return State("checked", f"Code has changed ({_few(changed)}); the small run gives the same.")


def seen(small: Mapping[str, Any], code: Code) -> dict[str, Any]:
    """Note in a smoke run's manifest that a code table gives the same numbers.

    Returns
    -------
    dict
        ``seen``, ``{definition: [hash, ...]}``, and ``tables``, the hash of every whole table.
    """
    table = {name: list(hashes) for name, hashes in small.get("seen", {}).items()}
    for name, found in code.items():
        if found not in table.setdefault(name, []):
            table[name].append(found)
    tables = small.get("tables", [])
    return {"seen": table, "tables": [*tables, *({digest(code)} - set(tables))]}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a manifest holds them, without words and without where code lives."""
    kept = {k: v for k, v in json.loads(json.dumps(settings)).items() if k not in TOLD}
    return kept | {"kind": str(kept.get("kind", "")).split(":")[-1]}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@functools.lru_cache(maxsize=256)
def _code(module: str, name: str, words: frozenset[str]) -> Code:
    homes = frozenset({"fedlib", module.split(".")[0]})
    walk = _Walk(homes, set(words))
    walk.follow(_resolve(homes, module, name))
    walk.settle()
    return {name: "+".join(sorted(set(found))) for name, found in sorted(walk.found.items())}


class _Walk:
    """Everything reached so far, and what it asks for."""

    def __init__(self, homes: frozenset[str], words: set[str]) -> None:
        self.homes, self.words = homes, words
        self.attributes: set[str] = set()
        self.found: dict[str, list[str]] = {}
        self.seen: set[tuple[Place, str]] = set()
        self.classes: list[tuple[Place, ast.ClassDef]] = []
        self.registries: list[tuple[Place, ast.Dict]] = []

    def follow(self, place: Place | None) -> None:
        """Take up a definition, once."""
        if place is None or not place.name or (place, "") in self.seen:
            return
        if place.module.split(".")[-1] in BORDER["modules"] or place.name in BORDER["names"]:
            return
        self.seen.add((place, ""))
        node = _module(place.module).definitions[place.name]
        if isinstance(node, ast.Dict):
            self.registries.append((place, node))
            return
        if isinstance(node, ast.ClassDef):
            self.classes.append((place, node))
        self.keep(place, place.name, node)

    def settle(self) -> None:
        """Add methods and entries as they are asked for, until nothing is left to add."""
        before = -1
        while before != len(self.seen):
            before = len(self.seen)
            for place, node in list(self.classes):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and (
                        method.name in self.attributes
                        or method.name.startswith("__")
                        or method.name == "forward"  # torch calls it
                    ):
                        self.part(place, f"{place.name}.{method.name}", method)
            for place, node in list(self.registries):
                for key, value in zip(node.keys, node.values, strict=True):
                    if key is None:
                        self.part(place, f"{place.name}[**{ast.unparse(value)}]", value)
                    elif isinstance(key, ast.Constant) and key.value in self.words:
                        self.part(place, f"{place.name}[{key.value}]", value)

    def part(self, place: Place, name: str, node: ast.AST) -> None:
        """Take up a method or an entry, once."""
        if (place, name) not in self.seen:
            self.seen.add((place, name))
            self.keep(place, name, node)

    def keep(self, place: Place, name: str, node: ast.AST) -> None:
        """Note the hash of a definition and follow what it names."""
        piece = _piece(self.homes, place.module, node)
        if piece is None:
            return
        self.attributes |= piece.attributes
        self.words |= piece.words
        self.found.setdefault(name, []).append(piece.hash)
        for other in piece.asked:
            self.follow(other)


@functools.cache
def _piece(homes: frozenset[str], module: str, node: ast.AST) -> Piece | None:
    """Return what a definition is and asks for; None if it does nothing but checks.

    A class is read without its methods: each of them is a piece of its own.
    """
    tree = _copied(node)
    if isinstance(tree, ast.ClassDef):
        tree.body = [n for n in tree.body if not isinstance(n, ast.FunctionDef)]
    plain = _Plain(homes, module, tree)
    tree = plain.visit(tree)
    if isinstance(tree, ast.FunctionDef) and not tree.body:
        return None
    inside = list(ast.walk(tree))
    texts = (n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return Piece(
        hashlib.sha256(_dump(tree).encode()).hexdigest()[:8],
        frozenset(n.attr for n in inside if isinstance(n, ast.Attribute)),
        frozenset(texts),
        tuple(plain.asked),
    )


def _copied(node: Any) -> Any:
    """Copy a tree without its places in the file; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(node, ast.AST):
        return type(node)(**{name: _copied(value) for name, value in ast.iter_fields(node)})
    return [_copied(part) for part in node] if isinstance(node, list) else node


def _resolve(homes: frozenset[str], module: str, name: str) -> Place | None:
    """Return where a module's name is defined, through re-exports; None if not with us."""
    for _ in range(20):
        if module.split(".")[0] not in homes or not _file(module):
            return None
        held = _module(module)
        if name in held.definitions:
            return Place(module, name)
        if name in held.imports:
            module, name = held.imports[name]
            if not name:
                return Place(module, "")
        elif _file(f"{module}.{name}"):
            return Place(f"{module}.{name}", "")
        else:
            return None
    return None


class _Lean(ast.NodeTransformer):
    """Leave out of a piece of code what can change no number."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        value = self.visit(node.value) if node.value else ast.Constant(...)
        return ast.Assign([self.visit(node.target)], value)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if not node.orelse and all(isinstance(n, ast.Raise) for n in node.body):
            return None
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return ast.Raise()

    def visit_Assert(self, node: ast.Assert) -> None:
        return None

    def visit_Try(self, node: ast.Try) -> Any:
        quits = all(isinstance(h.body[-1], ast.Raise) for h in node.handlers)
        if node.handlers and quits and not node.finalbody:
            body = [self.visit(n) for n in [*node.body, *node.orelse]]
            return [n for part in body for n in (part if isinstance(part, list) else [part]) if n]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant):
            return None
        if isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).split(".")[-1]
            if called.lstrip("_").startswith("check") or called in ("warn", "print", "echo"):
                return None
        return self.generic_visit(node)


class _Plain(_Lean):
    """Write every reference by the plain name of its definition, and note them."""

    def __init__(self, homes: frozenset[str], module: str, node: ast.AST) -> None:
        self.homes, self.module = homes, module
        self.asked: list[Place] = []
        self.own = _bound(node) if isinstance(node, ast.FunctionDef) else set()
        self.imports = dict(_imports(module, ast.walk(node)))

    def place(self, node: ast.AST) -> Place | None:
        """Return the definition or module that a name, or a dotted name, stands for."""
        if isinstance(node, ast.Name):
            if node.id in self.imports:
                held = self.imports[node.id]
                return _resolve(self.homes, *held) if held.name else held
            return None if node.id in self.own else _resolve(self.homes, self.module, node.id)
        if isinstance(node, ast.Attribute):
            inside = self.place(node.value)
            if inside and not inside.name:
                return _resolve(self.homes, inside.module, node.attr)
        return None

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._definition(node) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._definition(node) or self.generic_visit(node)

    def _definition(self, node: ast.Name | ast.Attribute) -> ast.AST | None:
        """Return the plain name of a definition and note it; None for anything else."""
        place = self.place(node)
        if place is None or not place.name:
            return None
        self.asked.append(place)
        return ast.Name(place.name, node.ctx)

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None


def _bound(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function makes for itself."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            names.add(node.name)
    return names


def _home(package: str) -> Path | None:
    """Return the folder in which a top-level package or module lies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent.parent if spec.parent else Path(spec.origin).parent


@functools.cache
def _file(module: str) -> Path | None:
    """Return the source of a module, without running it."""
    home, parts = _home(module.split(".")[0]), module.split(".")
    if home is None:
        return None
    whole = home.joinpath(*parts)
    return next((p for p in (whole.with_suffix(".py"), whole / "__init__.py") if p.is_file()), None)


@functools.cache
def _module(module: str) -> Module:
    tree = ast.parse(_file(module).read_text("utf-8"))
    definitions: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    definitions[target.id] = node.value if _is_registry(node) else node
    return Module(definitions, dict(_imports(module, tree.body)))


def _is_registry(node: ast.Assign | ast.AnnAssign) -> bool:
    """A dictionary whose keys are words and whose values are definitions."""
    table = node.value
    if not isinstance(table, ast.Dict):
        return False
    words = all(k is None or isinstance(k, ast.Constant) for k in table.keys)
    kinds = (ast.Name, ast.Attribute, ast.Lambda)
    return words and all(isinstance(value, kinds) for value in table.values)


def _imports(module: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[str, Place]]:
    """Yield the names that imports bind, and what they stand for."""
    path = _file(module)
    package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or full, Place(full, "")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            home = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            for alias in node.names:
                yield alias.asname or alias.name, Place(home, alias.name)


def _dump(tree: ast.AST) -> str:
    """Return ``ast.dump`` of a tree as Python 3.11 writes it, whatever Python runs.

    Python 3.12 added ``type_params`` and Python 3.13 leaves out empty lists; without this,
    every record would look stale under another Python.
    """
    for node in ast.walk(tree):
        node.__dict__.pop("type_params", None)
    return ast.dump(tree, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))


def forget() -> None:
    """Read every source file anew, after an edit."""
    for kept in (_code, _piece, _file, _module):
        kept.cache_clear()
