"""What code a study reaches: a hash of every definition that can change one of its numbers.

Code is taken one definition at a time: a function, a method, a constant, an entry of a registry.
From the function that carries a study out, every definition that can be reached is followed,
through any import. A module's other top-level statements belong to every name that they store
into. Adding a model, a loss or a method that a study cannot reach changes nothing.

Left out are docstrings, comments, annotations and messages, and checks of input, which either
let a number pass as it is or stop the run: ``raise``, an ``if`` that does nothing but raise, and
a call for its own sake of a function that, when followed, does nothing else.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
import sysconfig
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fedlib.errors import FedlibError

BORDER = frozenset(
    (
        "fedlib.errors",
        "fedlib.paths",
        "fedlib.files",
        "fedlib.engine.cores",
        "fedlib.engine.cost",
        "fedlib.engine.pilot",
        "fedlib.engine.recording",
        "fedlib.cards:all_cards",
        "fedlib.cards:card",
        "fedlib.datasets.fetch:get",
        "fedlib.datasets.fetch:verify",
        "fedlib.datasets.fetch:_obtain",
        "fedlib.datasets.fetch:_bundled",
        "fedlib.datasets.fetch:_placed_or_fail",
        "fedlib.papers.vertical.data:_WHOLE",
        "fedlib.papers.vertical.data:_HEAD",
        "fedlib.papers.vertical.data:_UNPACK",
    )
)
"""Modules and definitions at which the walk ends, such as messages, places, counting, the handing
of work to cores, its replaying and its timing in small (tests hold that they change no bit),
and what finds, unpacks and verifies the bytes of a file, which a record's data hashes cover."""

TELLING = frozenset(("print", "warnings.warn", "typer.echo"))
"""Functions of others, by full name, that tell something and change nothing."""

PLAIN_BASES = frozenset(("abc", "collections.abc", "enum", "typing", "typing_extensions"))
"""Modules of others whose classes, as a base, call no method of ours by themselves."""

Code = dict[str, str]


class Place(NamedTuple):
    """A definition and where it is written; ``name`` is empty for a module itself."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """``"package.module:name"``, as a study is called in its settings."""
        return f"{self.module}:{self.name}"

    @property
    def beyond(self) -> bool:
        """Whether it lies beyond the border."""
        return not BORDER.isdisjoint((self.module, self.full))


class Piece(NamedTuple):
    """What one definition is, as a hash, and what it asks for.

    Attributes
    ----------
    hash
        Of the definition, with references by plain name.
    outside
        The names of other packages that it uses, as they are written and in full.
    attributes, words
        Names of methods and keys of entries that it may ask for.
    asked
        The definitions that it names, in the order of the text.
    whole
        Those of them that are not used by a key, as a registry may be; and modules that are used
        otherwise than by ``module.name``.
    imports
        What it imports itself.
    """

    hash: str
    outside: str
    attributes: frozenset[str]
    words: frozenset[str]
    asked: tuple[Place, ...]
    whole: frozenset[Place]
    imports: frozenset[Place]


class Module(NamedTuple):
    """What a file defines at its top level, what its imports are called there, and what else."""

    definitions: Mapping[str, ast.AST]
    imports: Mapping[str, Place]
    others: tuple[ast.stmt, ...]


def code(study: str, words: Iterable[str] = ()) -> Code:
    """Return a short hash of every definition that a study can reach.

    Parameters
    ----------
    study
        ``"package.module:function"``.
    words
        Strings of its settings and of its data card. An entry of a registry, a dictionary such as
        ``LOSSES`` whose values are definitions, counts when its key is among them or is written
        in the code that was reached, and when the registry is used as a whole.

    Returns
    -------
    dict
        ``{"package.module:name": hash}``; methods as ``Class.method``, entries as
        ``REGISTRY[key]``, and what a module's other statements store into a name as
        ``name[...]``. The first part of a hash is what the definition is; the next one, after a
        dot, which things of other packages it uses; a last one, after a colon, which of several
        definitions of one name it means, where several were reached.
    """
    module, name = study.split(":")
    return dict(_code(module, name, frozenset(words)))


@functools.lru_cache(maxsize=256)
def _code(module: str, name: str, words: frozenset[str]) -> Code:
    homes = _homes(module.split(".")[0])
    walk = _Walk(homes, set(words))
    walk.run(module)
    walk.follow(_resolve(homes, module, name))
    walk.settle()
    names = Counter(place.name for place in {p for _, piece in walk.pieces for p in piece.asked})
    table = defaultdict(set)
    for full, piece in walk.pieces:
        home = full.partition(":")[0] + ":"  # what is near goes by its plain name
        twice = [place for place in piece.asked if names[place.name] > 1]
        which = " ".join(place.full.removeprefix(home) for place in twice)
        table[full].add(
            piece.hash
            + (f".{_hash(piece.outside)}" if piece.outside else "")
            + (f":{_hash(which)}" if which else "")
        )
    return {full: "+".join(sorted(hashes)) for full, hashes in sorted(table.items())}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


class _Walk:
    """Everything reached so far, and what it asks for."""

    def __init__(self, homes: frozenset[str], words: set[str]) -> None:
        self.homes, self.words = homes, words
        self.attributes: set[str] = set()
        self.pieces: list[tuple[str, Piece]] = []
        self.seen: set[Place | tuple[str, ast.AST]] = set()
        self.modules: set[str] = set()  # whose top level runs
        self.whole: set[Place] = set()
        self.classes: list[tuple[Place, ast.ClassDef]] = []
        self.registries: list[tuple[Place, ast.Dict]] = []

    def run(self, module: str) -> None:
        """Note that a module is imported, and with it its packages and what it imports."""
        if module in self.modules or module.split(".")[0] not in self.homes or not _file(module):
            return
        self.modules.add(module)
        self.run(module.rpartition(".")[0])
        self.run_imports(_module(module).imports.values())

    def run_imports(self, places: Iterable[Place]) -> None:
        """Note that things are imported: modules, or what modules define."""
        for place in places:
            self.run(place.module)
            self.run(f"{place.module}.{place.name}")

    def follow(self, place: Place | None) -> None:
        """Take up a definition, once."""
        if place is None or not place.name or place.beyond or place in self.seen:
            return
        self.seen.add(place)
        self.run(place.module)
        node = _module(place.module).definitions[place.name]
        if isinstance(node, ast.Dict):
            self.registries.append((place, node))
        elif not isinstance(node, ast.Pass):
            self.part(place.module, place.full, node)
        if isinstance(node, ast.ClassDef):
            self.classes.append((place, node))

    def settle(self) -> None:
        """Add methods, entries and statements as they are asked for, until none is left to add."""
        before = -1
        while before != len(self.seen):  # what is added may ask for more
            before = len(self.seen)
            # A method is found by its name alone: whose object is before the dot, text cannot tell.
            # Those of one's own classes count all: fedlib may call them, which is not walked here.
            for place, node in list(self.classes):
                theirs = place.module.split(".")[0] != "fedlib"
                called = theirs or _called_by_others(self.homes, place.module, node)
                for method in (n for n in node.body if isinstance(n, ast.FunctionDef)):
                    if called or method.name in self.attributes or method.name.startswith("__"):
                        self.part(place.module, f"{place.full}.{method.name}", method)
            for place, node in list(self.registries):
                for key, value in zip(node.keys, node.values, strict=True):
                    word = getattr(key, "value", None)
                    if key is None:
                        self.part(place.module, f"{place.full}[**{ast.unparse(value)}]", value)
                    elif place in self.whole or not isinstance(word, str) or word in self.words:
                        self.part(place.module, f"{place.full}[{word}]", value)
            # A module that is used as an object may be asked for any name that is written.
            for place in [place for place in self.whole if not place.name]:
                for name in _module(place.module).definitions.keys() & self.words:
                    self.follow(Place(place.module, name))
            # What a module does on import counts where it stores into something that was reached.
            for module in list(self.modules):
                for place, node in _stores(self.homes, module).items():
                    if place in self.seen or not place.name:
                        self.part(module, f"{module}:{place.name}[...]", node)

    def part(self, module: str, full: str, node: ast.AST) -> None:
        """Note what a definition or a part of it is, once, and follow what it names."""
        if (full, node) in self.seen:
            return
        self.seen.add((full, node))
        piece = _piece(self.homes, module, node)
        if piece is None:
            return
        self.attributes |= piece.attributes
        self.words |= piece.words
        self.whole |= piece.whole
        self.pieces.append((full, piece))
        self.run_imports(piece.imports)
        for place in piece.asked:
            self.follow(place)


# --- one definition -------------------------------------------------------------------------------


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
    texts = {n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    attributes = {n.attr for n in inside if isinstance(n, ast.Attribute)}
    by_name = any(isinstance(n, ast.Name) and n.id == "getattr" for n in inside)
    return Piece(
        _hash(dump(tree)),
        " ".join(f"{name}={full}" for name, full in sorted(plain.outside.items())),
        frozenset(attributes | texts if by_name else attributes),
        frozenset(texts),
        tuple(plain.asked),
        frozenset(plain.whole),
        frozenset(plain.imports.values()),
    )


def _copied(node: Any) -> Any:
    """Copy a tree without its places in the file; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(node, ast.AST):
        return type(node)(**{name: _copied(value) for name, value in ast.iter_fields(node)})
    return [_copied(part) for part in node] if isinstance(node, list) else node


class _Names:
    """What the names in a piece of code stand for."""

    def __init__(
        self,
        homes: frozenset[str],
        module: str,
        node: ast.AST,
        above: frozenset[Place] = frozenset(),
    ) -> None:
        self.homes, self.module, self.root, self.above = homes, module, node, above
        self.inside = list(ast.walk(node))
        self.local = _bound(node, self.inside) if isinstance(node, ast.FunctionDef) else set()
        self.imports = dict(_imports(module, self.inside))

    def place(self, node: ast.AST) -> Place | None:
        """Return the definition or module of ours that a name, or a dotted name, stands for."""
        if isinstance(node, ast.Name):
            if node.id in self.imports:
                return _resolve(self.homes, *self.imports[node.id])
            return None if node.id in self.local else _resolve(self.homes, self.module, node.id)
        if isinstance(node, ast.Attribute):
            inside = self.place(node.value)
            if inside and not inside.name:
                return _resolve(self.homes, inside.module, node.attr)
        return None

    def others(self, node: ast.AST) -> str:
        """Return the full name of what a name of another package stands for, else nothing."""
        if isinstance(node, ast.Attribute):
            inside = self.others(node.value)
            return f"{inside}.{node.attr}" if inside else ""
        if not isinstance(node, ast.Name) or self.place(node):
            return ""
        if node.id in self.local - self.imports.keys():
            return ""  # made by the function itself
        origin = self.imports.get(node.id) or _module(self.module).imports.get(node.id)
        return ".".join(filter(None, origin)) if origin else node.id


class _Lean(ast.NodeTransformer):
    """Leave out of a piece of code what can change no number, as far as its text alone tells."""

    def tells(self, node: ast.expr) -> bool:
        """Say whether an expression by itself does nothing but tell something, or refuse."""
        return isinstance(node, ast.Constant)

    def refuses(self, node: ast.If) -> bool:
        """Say whether a statement does nothing but refuse."""
        return not node.orelse and all(isinstance(n, ast.Raise) for n in node.body)

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
        return None if self.refuses(node) else self.generic_visit(node)

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
        return None if self.tells(node.value) else self.generic_visit(node)


class _Leaner(_Lean, _Names):
    """Leave out, too, what does nothing when what it names is followed."""

    def tells(self, node: ast.expr) -> bool:
        return super().tells(node) or _tells(self, node)

    def refuses(self, node: ast.If) -> bool:
        if not super().refuses(node) or not _idle(self, [node.test]):
            return False
        named = {n.target.id for n in ast.walk(node.test) if isinstance(n, ast.NamedExpr)}
        return _reads(self.root, named) == _reads(node, named)  # nothing else needs the name

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        places = ((self.place(decorator), decorator) for decorator in node.decorator_list)
        node.decorator_list = [d for place, d in places if not (place and place.beyond)]
        return super().visit_FunctionDef(node)


def _reads(tree: ast.AST, names: set[str]) -> int:
    """Return how often names are read in a tree."""
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in names)
    return sum(isinstance(n.ctx, ast.Load) for n in nodes)


def _tells(names: _Names, node: ast.AST) -> bool:
    """Say whether an expression is a call that does nothing but tell something, or refuse."""
    if not isinstance(node, ast.Call) or not _idle(names, [*node.args, *node.keywords]):
        return False
    place = names.place(node.func)
    if place is None:
        return names.others(node.func) in TELLING
    return place.full in BORDER or _refuses(names, place)


def _refuses(names: _Names, place: Place) -> bool:
    """Say whether a function of ours raises, itself or by what it calls, and does nothing else."""
    if not _computes(names.homes, place, names.above):
        return False
    inside = ast.walk(_module(place.module).definitions[place.name])
    return any(
        isinstance(n, ast.Raise) or isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
        for n in inside
    )


@functools.cache
def _computes(homes: frozenset[str], place: Place, above: frozenset[Place]) -> bool:
    """Say whether a function of ours, called by others above, changes only what is its own."""
    if place in above or place.full in BORDER:
        return True
    node = _module(place.module).definitions.get(place.name)
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return False
    return _idle(_Names(homes, place.module, node, above | {place}), node.body)


STATEMENTS = (ast.If, ast.For, ast.While, ast.Try, ast.Return, ast.Pass, ast.Break, ast.Continue)
STATEMENTS += (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Raise, ast.Import, ast.ImportFrom)
CHANGING = {name for kind in (list, set, dict) for name in dir(kind)}
CHANGING -= {name for kind in (tuple, frozenset, MappingProxyType) for name in dir(kind)}
"""Methods by which lists, sets and dictionaries are changed; those of tensors end in ``_``."""


def _idle(names: _Names, nodes: Iterable[ast.AST]) -> bool:
    """Say whether code keeps to itself what it computes.

    Other methods, and functions of other packages, whose result is used are taken to do no more.
    """
    for node in nodes:
        if isinstance(node, ast.Expr):
            fine = isinstance(node.value, ast.Constant) or _tells(names, node.value)
        elif isinstance(node, ast.stmt):
            fine = isinstance(node, STATEMENTS)
        elif isinstance(node, ast.Attribute | ast.Subscript):
            fine = isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Call) and (place := names.place(node.func)):
            fine = _computes(names.homes, place, names.above)
        elif isinstance(node, ast.Call):
            word = getattr(node.func, "attr", "")
            changes = word in CHANGING or word.endswith("_") and not word.startswith("_")
            is_local = isinstance(node.func, ast.Name) and node.func.id in names.local
            fine = bool(names.others(node.func)) or not (changes or is_local)
        else:
            fine = not isinstance(node, ast.Yield | ast.YieldFrom | ast.Await)
        inner = () if isinstance(node, ast.Expr | ast.Raise) else ast.iter_child_nodes(node)
        if not fine or not _idle(names, inner):
            return False
    return True


class _Plain(_Leaner):
    """Write every reference by the plain name of its definition, and note them."""

    def __init__(self, homes: frozenset[str], module: str, node: ast.AST) -> None:
        super().__init__(homes, module, node)
        self.asked: list[Place] = []
        self.whole: set[Place] = set()
        self.outside: dict[str, str] = {}
        self.dotted = {id(n.value) for n in self.inside if isinstance(n, ast.Attribute)}
        self.by_key = {id(n.value) for n in self.inside if isinstance(n, ast.Subscript)}
        compared = (n.comparators for n in self.inside if isinstance(n, ast.Compare))
        self.by_key |= {id(one) for each in compared for one in each}
        if isinstance(node, ast.Module):  # statements that import are kept as they are
            imported = (_resolve(homes, *place) for place in self.imports.values())
            self.asked.extend(filter(None, imported))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        full = self.others(node)
        if full not in ("", node.id):
            self.outside[node.id] = full
        return self._definition(node) or node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._definition(node) or self.generic_visit(node)

    def _definition(self, node: ast.Name | ast.Attribute) -> ast.AST | None:
        """Return the plain name of a definition and note it; None for anything else."""
        place = self.place(node)
        if place and id(node) not in (self.by_key if place.name else self.dotted):
            self.whole.add(place)
        if place is None or not place.name:
            return None
        self.asked.append(place)
        return ast.Name(place.name, node.ctx)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        return node if isinstance(self.root, ast.Module) else None

    visit_ImportFrom = visit_Import


def _bound(function: ast.FunctionDef, inside: Iterable[ast.AST]) -> set[str]:
    """Return the names that a function makes for itself, of all nodes inside."""
    names, shared = set(), set()
    for node in inside:
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef) and node is not function:
            names.add(node.name)
        elif isinstance(node, ast.Global):
            shared.update(node.names)
    return names - shared


@functools.cache
def _called_by_others(homes: frozenset[str], module: str, node: ast.ClassDef) -> bool:
    """Say whether a class of another package is a base, which may call any method of this one."""
    names = _Names(homes, module, node)
    bases = (n.value if isinstance(n, ast.Subscript) else n for n in node.bases)
    packages = (names.others(base).rpartition(".")[0] for base in bases)
    return any(package and package not in PLAIN_BASES for package in packages)


# --- modules --------------------------------------------------------------------------------------


@functools.cache
def _resolve(homes: frozenset[str], module: str, name: str) -> Place | None:
    """Return where a module's name is defined, through re-exports; None if not with us."""
    for _ in range(20):
        if module.split(".")[0] not in homes:
            return None
        if not _file(module):  # a folder without __init__.py, or nothing
            inside = f"{module}.{name}"
            return Place(inside, "") if name and _file(inside) else None
        if not name:
            return Place(module, "")
        there = _module(module)
        if name in there.definitions:
            return Place(module, name)
        if name in there.imports:
            module, name = there.imports[name]
        elif _file(f"{module}.{name}"):
            return Place(f"{module}.{name}", "")
        else:
            starred = (place.module for key, place in there.imports.items() if key[0] == "*")
            return next(filter(None, (_resolve(homes, other, name) for other in starred)), None)
    return None


def _home(package: str) -> Path | None:
    """Return the folder in which a top-level package or module lies."""
    spec = importlib.util.find_spec(package)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        return None
    if not spec.origin:  # a folder without __init__.py
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent.parent if spec.parent else Path(spec.origin).parent


def _homes(package: str) -> frozenset[str]:
    """Return what is followed from a package or module: fedlib, it, and what lies beside it.

    Nothing lies beside what is installed.
    """
    ours, home = frozenset({"fedlib", package}), _home(package)
    if package == "fedlib" or home is None or home == Path(sysconfig.get_path("purelib")):
        return ours
    names = {path.stem for path in home.iterdir() if path.stem.isidentifier()} - {"__main__"}
    return ours | {name for name in names if _home(name) == home}


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
    """Read a module: definitions, imports, and the other statements of its top level."""
    definitions, imports, others = {}, [], []
    try:
        with tokenize.open(_file(module)) as page:  # in the encoding that it names
            text = page.read()
        body = _parsed(text).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise FedlibError(f"Python cannot read {_file(module)}: {error}.") from error
    for node in body:
        names = _defined(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            imports += node.body  # of names that a module's __getattr__ imports when asked for
        elif isinstance(node, ast.If) and _base(getattr(node.test, "left", node)) == "__name__":
            continue  # for a script alone
        elif not names or definitions.keys() & names:
            others.append(node)
        else:
            definitions |= dict.fromkeys(names, node.value if _is_registry(node) else node)
    for name in (name for node in others for name in _binds(node)):
        definitions.setdefault(name, ast.Pass())
    return Module(definitions, dict(_imports(module, imports)), tuple(others))


@functools.lru_cache(maxsize=512)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement defines, where it does nothing else; or none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    each = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return {t.id for t in each} if all(isinstance(t, ast.Name) for t in each) else set()


def _is_registry(node: ast.stmt) -> bool:
    """A dictionary whose keys are words and whose values are definitions."""
    table = getattr(node, "value", None)
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
                first = alias.name.split(".")[0]
                yield alias.asname or alias.name, Place(alias.name, "")
                yield alias.asname or first, Place(alias.name if alias.asname else first, "")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            home = ".".join([*above, *filter(None, [node.module])]) if node.level else node.module
            for alias in node.names:
                if alias.name == "*":
                    yield f"*{home}", Place(home, "")
                else:
                    yield alias.asname or alias.name, Place(home, alias.name)


@functools.cache
def _stores(homes: frozenset[str], module: str) -> dict[Place, ast.Module]:
    """Return a module's other statements by what they store into.

    What changes nothing of ours, such as a switch of a library, is everybody's: its place has no
    name. A decorator may store its function, and is a statement then.
    """
    definitions, _, others = _module(module)
    names, stores = _Names(homes, module, ast.Module([], [])), defaultdict(list)
    for node in others:
        places = {Place(module, name) for name in _binds(node)} | _changed_places(names, node)
        alone = [n for n in ast.walk(node) if isinstance(n, ast.Expr)]
        if not places and not _idle(names, alone):
            places = {Place(module, "")}
        for place in places:
            stores[place].append(node)
    for name, node in definitions.items():
        for decorator in getattr(node, "decorator_list", ()):
            for place in _changed_places(names, ast.Call(decorator, [], [])):
                call = ast.Call(decorator, [ast.Name(name, ast.Load())], [])
                stores[place].append(ast.Expr(call))
    return {place: ast.Module(nodes, []) for place, nodes in stores.items()}


def _binds(statement: ast.stmt) -> set[str]:
    """Return the names of its module that a statement gives a meaning."""
    names, nodes = set(), [statement]
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            continue  # what happens inside is not the module's
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.split(".")[0])
        nodes.extend(ast.iter_child_nodes(node))
    return names


def _changed_places(names: _Names, tree: ast.AST) -> set[Place]:
    """Return the definitions of ours that code changes in place, itself or by what it calls."""
    changed = _changed(names, tree)
    places = (one if isinstance(one, Place) else names.place(ast.Name(one)) for one in changed)
    return {place for place in places if place and place.name}


def _changed(names: _Names, tree: ast.AST) -> Iterator[str | Place]:
    """Yield what code changes in place: by the name it has there, or elsewhere by its place."""
    alone = {id(tree)} | {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _base(node)
        elif isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Call):
            parts = (n for part in (*node.args, *node.keywords) for n in ast.walk(part))
            arguments = [n.id for n in parts if isinstance(n, ast.Name)]
            place = names.place(_called(node))
            function = _module(place.module).definitions.get(place.name) if place else None
            if isinstance(function, ast.FunctionDef) and place not in names.above:
                inner = _Names(names.homes, place.module, function, names.above | {place})
                taken = {n.arg for n in ast.walk(function.args) if isinstance(n, ast.arg)}
                yield from arguments if taken & set(_changed(inner, function)) else ()
                yield from _changed_places(inner, function)
            elif place is None and id(node) in alone and not _tells(names, node):
                foreign = names.others(ast.Name(_base(node)))  # else a method of something of ours
                yield from arguments if foreign else [_base(node)]


def _called(node: ast.Call) -> ast.AST:
    """Return what is called, in ``f(x)(y)`` the function f."""
    while isinstance(node, ast.Call):
        node = node.func
    return node


def _base(node: ast.AST) -> str:
    """Return the name with which ``name.a[b].c(d)`` begins; empty for anything else."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None)
        if not isinstance(node, ast.AST):
            return ""
    return node.id


# --- text -----------------------------------------------------------------------------------------


def dump(tree: ast.AST) -> str:
    """Return ``ast.dump`` of a tree as Python 3.11 writes it, whatever Python runs.

    Python 3.12 added ``type_params`` and Python 3.13 leaves out empty lists; without this,
    every record would look stale under another Python.
    """
    for node in ast.walk(tree):
        node.__dict__.pop("type_params", None)
    return ast.dump(tree, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))


def forget() -> None:
    """Read every source file anew, after an edit."""
    for kept in (_code, _piece, _computes, _called_by_others, _resolve, _file, _module, _stores):
        kept.cache_clear()
