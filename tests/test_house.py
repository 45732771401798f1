"""The package keeps to its plan: imports go down, in no circle, and nothing is written twice."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pages
import pytest

PACKAGE = pages.ROOT / "fedlib"
FLOORS = ["errors", "schema", "paths", "files", "cards", *pages.folders(), "__main__"]
WING = ["locks", "job", "trials", "vertical", "studies", "evidence", "show", "batch", "bench"]
WING += ["gpu", "cli"]
LONG = 25  # nodes of syntax from which on a definition is worth having once


def sources() -> dict[str, str]:
    """Return the text of every module by its dotted name; a folder's is its ``__init__``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path.read_text("utf-8")
    return found


@functools.cache
def statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]


def imports(text: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules of fedlib that a text imports, at its top or inside a function."""
    for node in statements(text):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not node.level, "imports are written in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in inner]
        yield from (name for name in names if name.split(".")[0] == "fedlib")


def misplaced(texts: dict[str, str]) -> list[str]:
    """Return a line for each import that goes up, sideways between papers, or in a circle."""
    wrong, graph = [], defaultdict(set)
    for module, text in texts.items():
        for other in imports(text, set(texts)):
            graph[module].add(other)
            if why := fault(module.split("."), other.split("."), texts):
                wrong.append(f"{module} imports {other}: {why}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append("a circle: " + " -> ".join(error.args[1]))
    return wrong


def fault(module: list[str], other: list[str], texts: dict[str, str]) -> str:
    """Say why one module may not import another; empty when it may."""
    if len(module) < 2 or len(other) < 2:  # the package itself holds its version
        return ""
    if FLOORS.index(other[1]) > FLOORS.index(module[1]):
        return "that is above it"
    if module[1:2] == other[1:2] == ["lab"] and len(module) > 2 and len(other) > 2:
        return "that is above it" * (WING.index(other[2]) > WING.index(module[2]))
    two = [name[2] for name in (module, other) if name[1] == "papers" and len(name) > 2]
    papers = [name for name in two if (PACKAGE / "papers" / name).is_dir()]
    combines = module[2:3] == ["beyond"]  # which is what it is for
    if module[1] == other[1] and len(papers) == 2 and papers[0] != papers[1] and not combines:
        return "that is another paper"
    if module[1] == other[1] and papers and len(papers) < 2 and papers[0] == other[2]:
        return "what papers share knows none of them"
    return ""


def test_every_module_has_its_floor():
    parts = [name.split(".") for name in sources()]
    assert {part[1] for part in parts if len(part) > 1} == set(FLOORS)
    assert {part[2] for part in parts if part[1:2] == ["lab"] and len(part) > 2} == set(WING)


def test_imports_go_down():
    assert misplaced(sources()) == []


@pytest.mark.parametrize(
    ("module", "line", "why"),
    [
        ("fedlib.engine.rng", "from fedlib import datasets", "above it"),
        ("fedlib.papers.bound", "def f():\n    from fedlib.lab.job import Job", "above"),
        ("fedlib.paths", "import fedlib.engine.data", "above it"),
        ("fedlib.papers.tiers.task", "from fedlib.papers import participation", "another paper"),
        ("fedlib.papers.tiers.task", "from fedlib.papers import beyond", "another paper"),
        ("fedlib.papers.bound", "from fedlib.papers.tiers.task import TieredTask", "none of them"),
        ("fedlib.engine.local", "def f():\n    import fedlib.lab.show.plotting", "above it"),
        ("fedlib.lab.job", "from fedlib.lab import gpu", "above it"),
        ("fedlib.engine.losses", "from fedlib.engine.tasks import Task", "a circle"),
    ],
)
def test_an_import_that_does_not_is_seen(module, line, why):
    texts = sources()
    found = misplaced(texts | {module: f"{texts[module]}\n{line}\n"})
    assert any(why in line for line in found)


def test_a_folder_says_in_a_sentence_what_it_is_for():
    for path in PACKAGE.rglob("__init__.py"):
        first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0]
        assert first.endswith("."), path
        assert ". " not in first.replace("et al.", "").replace(" v.", ""), path


# --- nothing twice -------------------------------------------------------------------------------


def repeated(texts: dict[str, str]) -> list[str]:
    """Return a line for each function or class whose content stands in two places."""
    places = defaultdict(list)
    for module, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if sum(1 for part in body for _ in ast.walk(part)) >= LONG:
                    content = "".join(map(ast.dump, body))
                    places[content].append(f"{module}.{node.name}")
    return [" and ".join(names) for names in places.values() if len(names) > 1]


def test_no_definition_is_repeated():
    assert repeated(sources()) == []


def test_a_definition_that_is_repeated_is_seen():
    texts = sources()
    whole = ast.parse(texts["fedlib.errors"]).body
    (node,) = (n for n in whole if getattr(n, "name", "") == "unknown")
    copied = ast.get_source_segment(texts["fedlib.errors"], node)
    found = repeated(texts | {"fedlib.paths": texts["fedlib.paths"] + "\n\n" + copied})
    assert found == ["fedlib.errors.unknown and fedlib.paths.unknown"]


# --- what each wing needs ------------------------------------------------------------------------

LAB = "matplotlib numba papermill pebble pydantic typer IPython ipywidgets phe opacus mpi4py ray"


def test_the_library_needs_nothing_of_the_laboratory():
    """It is imported whole, and learns, where none of the laboratory's packages is installed."""
    modules = [name for name in sources() if name.split(".")[1:2] not in (["lab"], ["__main__"])]
    compiled = "fedlib.papers.vertical"  # event by event: numba, which comes with fedlib[vertical]
    code = f"""
import sys
sys.modules.update(dict.fromkeys({LAB.split()}))
for module in {[name for name in modules if not name.startswith(compiled)]}:
    __import__(module)
del sys.modules["numba"]
for module in {[name for name in modules if name.startswith(compiled)]}:
    __import__(module)
assert not [name for name in sys.modules if name.startswith("fedlib.lab")]
from fedlib import datasets
from fedlib.engine import FederatedDataset, Task, models, simulate
from fedlib.papers.fedavg import FedAvg
from fedlib.population.participation import Independent
d = datasets.load("digits")
data = FederatedDataset.build(d.train_x, d.train_y, [range(9), range(9, 30)], d.test_x, d.test_y)
algorithm = FedAvg(Independent(2, 1), 0.1, 1, 4)
print(len(simulate(algorithm, Task(models.softmax(64, 10), data), 2).frame))
"""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode and int(done.stdout) > 2, done.stderr


# --- what starts without what ---------------------------------------------------------------------

JUDGES = [f"fedlib.lab.evidence.{name}" for name in ("claims", "findings", "tuning")]


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (f"import {', '.join(JUDGES)}", "torch scipy sklearn fedlib.engine fedlib.datasets"),
        ("import fedlib.lab.batch", "torch scipy sklearn fedlib.engine fedlib.datasets"),
        ("sys.argv[1:] = ['--help']; import fedlib.__main__", "torch pandas numba matplotlib"),
        ("sys.argv[1:] = ['--help']; import fedlib.__main__", "fedlib.papers numba mpi4py"),
    ],
    ids=["judging", "batch", "help", "help-papers"],
)
def test_what_needs_little_starts_with_little(code, without):
    """What judges records is imported without torch (to judge, it asks the studies for their
    settings, which need it); and help comes at once, and whole."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(*sorted({without.split()} & sys.modules.keys())))
{code}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.splitlines()[-1]
    assert "--help" not in code or " vertical  VFB²: parties" in done.stdout
