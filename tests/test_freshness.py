"""What makes a record stale, and what must not: each case is an edit of a copy of fedlib."""
# ruff: noqa: E501 - an edit reads best on one line

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedlib
from fedlib import datasets
from fedlib.evidence import catalogue, experiments, freshness, records

PACKAGE = Path(fedlib.__file__).parent


def of(paper: str, experiment: str) -> dict[str, str]:
    return freshness.now(catalogue.settings(paper, experiment, "smoke"))["code"]


@functools.cache
def as_it_is(paper: str, experiment: str) -> dict[str, str]:
    """Hash an experiment's code in the package itself; its copies are read anew each time."""
    return of(paper, experiment)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that edits a copy of the package and hashes an experiment's code there.

    Called before the first edit it hashes what was copied.
    """
    shutil.copytree(PACKAGE, tmp_path / "fedlib", ignore=shutil.ignore_patterns("__pycache__"))
    edited = []

    def hashed(module="", old="", new="", paper="participation", experiment="fig1"):
        if not (module or edited):
            return as_it_is(paper, experiment)
        if module:
            path = tmp_path / "fedlib" / module
            text = path.read_text() if path.exists() else ""
            assert old in text, f"{module} has changed; the test needs other text to edit"
            path.write_text(text.replace(old, new, 1))
        edited.append(module)
        monkeypatch.setattr(freshness, "_home", lambda name: tmp_path)
        freshness.forget()
        return of(paper, experiment)

    def root():
        edited.append("by hand")
        return tmp_path / "fedlib"

    hashed.root = root
    yield hashed
    freshness.forget()


BLIND = {
    "comment": (
        "engine/local.py",
        "    pieces =",
        "    # none larger than asked for\n    pieces =",
    ),
    "function docstring": ("engine/local.py", "Run SGD, or another local rule", "Descend"),
    "class docstring": ("papers/participation/algorithm.py", "Algorithm 1:", "The algorithm:"),
    "module docstring": ("engine/simulation.py", '"""The round loop', '"""The loop of rounds'),
    "line breaks": (
        "engine/local.py",
        "theta[rows].clone()",
        "(\n        theta[rows].clone()\n    )",
    ),
    "annotation": ("engine/local.py", "lr: float | Tensor,", "lr: Tensor | float,"),
    "new function": ("engine/local.py", "def _rows", "def unused(x):\n    return x\n\n\ndef _rows"),
    "new method": (
        "engine/tasks.py",
        "    def loss(",
        "    def unused(self):\n        return 1\n\n    def loss(",
    ),
    "new loss": (
        "engine/losses.py",
        "LOSSES = {",
        'LOSSES = {"absolute": lambda out, y: abs(out - y), ',
    ),
    "new model": (
        "papers/participation/study.py",
        "MODELS = {",
        'MODELS = {"constant": lambda: 0, ',
    ),
    "new partitioner": (
        "datasets/partition.py",
        "PARTITIONERS = {",
        'PARTITIONERS = {"alike": iid, ',
    ),
    "a model not used": ("engine/models.py", "self.point - x", "x - self.point"),
    "message": ("engine/local.py", "is for the CPU; on", "works on a CPU alone; on"),
    "new check of input": (
        "engine/local.py",
        "    backend = backend or",
        '    if not len(theta):\n        raise FedlibError("No copies.")\n    backend = backend or',
    ),
    "new call of a check": (
        "engine/local.py",
        "    on_cpu =",
        "    check_shapes(theta)\n    on_cpu =",
    ),
    "fetching of data": ("datasets/fetch.py", "tried = []", "tried = list()"),
    "bench": ("bench.py", "repeats: int = 5", "repeats: int = 6"),
    "who computes a piece": ("engine/cores.py", "len(pieces)) - 1", "len(pieces)) - 2"),
}


@pytest.mark.parametrize("edit", BLIND)
def test_what_cannot_change_a_number_makes_nothing_stale(edit, package):
    assert package() == package(*BLIND[edit])


SEEN = {
    "the study": ("papers/participation/study.py", "checkpoint_every=500", "checkpoint_every=499", "training"),
    "a helper of the study": ("papers/participation/study.py", "max(1, s.get", "max(2, s.get", "build_algorithm"),
    "a registry": (
        *("papers/participation/study.py", '"softmax": models.softmax', '"softmax": models.linear'),
        "MODELS[softmax]",
    ),
    "the algorithm": (
        *("papers/participation/algorithm.py", "np.subtract(self.amplify, 1)", "self.amplify"),
        "GeneralizedFedAvg.round",
    ),
    "local SGD": ("engine/local.py", "alpha=rate", "alpha=2 * rate", "_descend"),
    "a constant": ("engine/local.py", "CACHED = 2**19", "CACHED = 2**18", "CACHED"),
    "the task": ("engine/tasks.py", "each.mean(1)", "each.sum(1)", "Task.losses"),
    "a default of a field": ("engine/tasks.py", "l2: float = 0.0", "l2: float = 0.1", "Task"),
    "a loss": ("engine/losses.py", 'reduction="none").view', 'reduction="sum").view', "_cross_entropy"),
    "the model": ("engine/models.py", "1 / math.sqrt(fan_in)", "2 / math.sqrt(fan_in)", "uniform_init"),
    "the random streams": ("engine/rng.py", "PCG64", "Philox", "stream"),
    "a partitioner": ("datasets/partition.py", "other: float = 0.05", "other: float = 0.06", "similarity"),
    "a participation process": (
        *("population/participation.py", "if low <= n <= high", "if low < n <= high"),
        "PeriodicSampler.step",
    ),
    "the round loop": ("engine/simulation.py", "done == rounds", "done > rounds", "simulate"),
    "what is done before a refusal": ("engine/simulation.py", "    if len(names) != len(seeds)", "    if len(names) > 5:\n        names = []\n        raise FedlibError\n    if len(names) != len(seeds)", "_named"),
    "the reading of pixels": ("datasets/loading.py", "images /= np.", "images *= np.", "_images"),
}  # fmt: skip


@pytest.mark.parametrize("edit", SEEN)
def test_what_can_change_a_number_is_named(edit, package):
    *change, name = SEEN[edit]
    before, after = package(), package(*change)
    assert {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} >= {name}


def test_where_a_definition_lives_does_not_matter(package):
    """A whole module is renamed and moved into a folder; others import it by three ways."""
    before, root = package(), package.root()
    (root / "core").mkdir()
    (root / "core" / "__init__.py").write_text("from .steps import local_sgd\n")
    (root / "engine/local.py").rename(root / "core" / "steps.py")
    path = root / "papers" / "fedavg.py"
    text = path.read_text()
    for line, call in (
        ("from fedlib.core import local_sgd", "local_sgd("),
        ("from ..core.steps import local_sgd as walk", "walk("),
        ("import fedlib.core.steps as steps", "steps.local_sgd("),
        ("import fedlib.core", "fedlib.core.local_sgd("),
    ):
        there = text.replace("from fedlib.engine.local import local_sgd", line)
        path.write_text(there.replace("local_sgd(task", f"{call}task"))
        assert package() == before, line
    path = root / "core" / "steps.py"
    path.write_text(path.read_text().replace("alpha=rate", "alpha=2 * rate"))
    assert package() != before, "still followed"


def test_an_import_inside_a_function_is_followed(package):
    before = package()
    old = "    y = local_sgd("
    after = package(
        "papers/fedavg.py",
        old,
        "    from fedlib.papers.participation.theory import factor\n\n" + old,
    )
    assert after == before, "an import alone computes nothing"
    after = package("papers/fedavg.py", old, "    factor(q)\n" + old)
    assert "factor" in after and "factor" not in before


def test_only_what_a_study_reaches_counts(package):
    names = ("fig1", "figB1", "factor", "heterogeneity", "speedup")
    before = {name: package(experiment=name) for name in names}
    package("papers/participation/theory.py", "return rows @ rows.T", "return 2 * rows @ rows.T")
    assert {n for n in names if package(experiment=n) != before[n]} == {"heterogeneity"}
    package("engine/models.py", "self.point - x", "x - self.point")
    package(
        "engine/models.py", 'views["point"].unsqueeze(1) - x', 'x - views["point"].unsqueeze(1)'
    )
    moved = {n for n in names if package(experiment=n) != before[n]}
    assert moved == {"heterogeneity", "figB1", "speedup"}


def test_the_network_that_a_setting_names_counts(package):
    held = {name: package(paper="tiers", experiment=name) for name in ("fig3", "fig4")}
    assert "lstm" in held["fig4"]


def test_the_noise_of_a_generator_counts(package):
    before = package(paper="tiers", experiment="fig4"), package(paper="tiers", experiment="fig3")
    old = "rng.standard_normal"
    package("datasets/generators.py", old, "1.1 * " + old)
    assert package(paper="tiers", experiment="fig4") != before[0]
    assert package(paper="tiers", experiment="fig3") == before[1], "digits are not made"


@pytest.mark.parametrize("field, value", [("std", (0.5,)), ("mean", (0.1,)), ("scale", 2.0)])
def test_the_normalisation_of_a_card_counts(field, value, monkeypatch):
    import dataclasses

    settings = catalogue.settings("participation", "fig1", "quick")
    before, card = freshness.now(settings), datasets.card("fashion-mnist")
    constants = dataclasses.replace(card.normalisation, **{field: value})
    changed = dataclasses.replace(card, normalisation=constants)
    monkeypatch.setattr(freshness.datasets, "card", lambda name: changed)
    after = freshness.now(settings)
    assert before["code"] == after["code"] and before["cards"] != after["cards"]
    file = card.files[0]
    other = dataclasses.replace(file, sha256="0" * 64), *card.files[1:]
    for files in (other, (dataclasses.replace(file, train_members=("a",)), *card.files[1:])):
        changed = dataclasses.replace(card, files=files)
        monkeypatch.setattr(freshness.datasets, "card", lambda name: changed)  # noqa: B023
        assert freshness.now(settings)["cards"] != before["cards"]
    told = dataclasses.replace(card, title="other", citation="other", homepage="x", traps=("y",))
    monkeypatch.setattr(freshness.datasets, "card", lambda name: told)
    assert freshness.now(settings) == before


def test_digest_tells_apart():
    assert freshness.digest({"a": 1, "b": 2}) == freshness.digest({"b": 2, "a": 1})
    different = [{"a": 1}, {"a": 2}, {"b": 1}, [1, 2], [2, 1], [[1], 2], "a", 1.0, 1]
    assert len({freshness.digest(value) for value in different}) == len(different)


def test_the_hash_is_the_same_under_every_python():
    """Python 3.12 and 3.13 print trees differently; a record must not look stale there."""
    text = freshness._dump(ast.parse("def f(x):\n    return g()\n\n\nclass C:\n    pass\n"))
    assert text == (
        "Module(body=[FunctionDef(name='f', args=arguments(posonlyargs=[], args=[arg(arg='x')], "
        "kwonlyargs=[], kw_defaults=[], defaults=[]), body=[Return(value=Call(func=Name(id='g', "
        "ctx=Load()), args=[], keywords=[]))], decorator_list=[]), ClassDef(name='C', bases=[], "
        "keywords=[], body=[Pass()], decorator_list=[])], type_ignores=[])"
    )


class Typed(freshness._Lean):
    """Leave out the same, but keep the annotations, by which dataclasses know their fields."""

    visit_AnnAssign = visit_arg = visit_FunctionDef = ast.NodeTransformer.generic_visit


def test_what_the_hash_leaves_out_changes_no_number(tmp_path):
    """A copy of fedlib without any of it (no checks, messages, docstrings) gives the same rows."""
    shutil.copytree(PACKAGE, tmp_path / "fedlib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "data", tmp_path / "data")
    removed = 0
    computing = ("engine", "population", "papers", "datasets")
    for path in (p for name in computing for p in (tmp_path / "fedlib" / name).rglob("*.py")):
        before = path.read_text()
        lean = Typed().visit(ast.parse(before))
        for node in ast.walk(lean):
            if isinstance(getattr(node, "body", None), list) and not node.body:
                node.body = [ast.Pass()]
        after = ast.unparse(ast.fix_missing_locations(lean))
        removed += before.count("raise ") - after.count("raise ")
        path.write_text(after)
    assert removed > 50
    code = """import sys
from fedlib.evidence import experiments
assert experiments.__file__.startswith(sys.argv[1])
for name in sys.argv[2:]:
    experiments.run(*name.split(), "smoke", out="made", progress=False)
"""
    names = ["participation fig1", "participation factor", "tiers fig3", "tiers waiting"]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), *names], cwd=tmp_path, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for name in names:
        bare = records.load(*name.split(), "smoke", tmp_path / "made")
        assert not records.differences(experiments.run(
            *name.split(), "smoke", out=tmp_path / "whole", progress=False
        ).frame, bare.frame, True), name  # fmt: skip


def test_the_law_of_delays_counts(package):
    before = package(paper="tiers", experiment="waiting")
    package("population/delays.py", "self.shift + self.mean * unit", "self.mean * unit")
    after = package(paper="tiers", experiment="waiting")
    assert {n for n in before if before[n] != after[n]} == {"ShiftedExponential.draws"}
