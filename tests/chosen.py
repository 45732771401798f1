"""Which test files look at a module: those that import it, by whatever road."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection
from pathlib import Path

BESIDE = ("book", "tests")  # pytest has them on its path: their modules go by the last name


def imports(path: Path, module: Path) -> bool:
    """Tell whether a file imports a module, or by another road something that it defines."""
    parts = module.with_suffix("").parts
    dotted = ".".join(parts[parts[0] in BESIDE :]).removesuffix(".__init__")
    own = {getattr(node, "name", "") for node in _parsed(module).body}
    for home, names in _asked(path):
        whole = {home, *names, *(f"{home}.{name}" for name in names)}
        if dotted in whole or (own & names and dotted.startswith(f"{home}.")):
            return True
    return False


def importers(module: Path, without: Collection[str] = ()) -> list[str]:
    """Return the test files that import a module; if none does, those of the modules that do."""
    tests = (path for path in Path("tests").glob("test_*.py") if path.name not in without)
    if found := [str(path) for path in tests if imports(path, module)]:
        return sorted(found)
    users = [path for path in Path(module.parts[0]).rglob("*.py") if imports(path, module)]
    return sorted({file for user in users if user != module for file in importers(user, without)})


def closest(module: Path, most: int) -> list[str]:
    """Return the test files that import a module, some if there are many.

    First come those that share words with its name, then those that import little else.
    """
    words = _words(module)

    def distance(file: str) -> tuple[int, int]:
        return -len(words & _words(Path(file))), sum(len(names) for _, names in _asked(Path(file)))

    return sorted(importers(module), key=distance)[:most]


def _words(path: Path) -> set[str]:
    """Return the words of a module's name, its plural apart, and of its folder."""
    names = (path.stem, path.parent.name if path.parent.name != "tests" else "")
    return {word.removesuffix("s") for name in names for word in name.split("_")} - {"test", ""}


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def _asked(path: Path) -> list[tuple[str, set[str]]]:
    """Return what a file imports: modules and the names taken from them."""
    nodes = (n for n in ast.walk(_parsed(path)) if isinstance(n, ast.Import | ast.ImportFrom))
    return [(getattr(n, "module", "") or "", {alias.name for alias in n.names}) for n in nodes]
