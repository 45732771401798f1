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
from fedlib.lab.evidence import catalogue, experiments, freshness, reach, records

PACKAGE = Path(fedlib.__file__).parent


def turned(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the definitions of which one table has something else than the other."""
    gone, new = freshness._changes(before, after)
    return {*gone, *new}


def of(paper: str, experiment: str) -> dict[str, str]:
    return freshness.present_code(catalogue.settings(paper, experiment, "smoke"))["code"]


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

    def edit(module, old, new):
        path = tmp_path / "fedlib" / module
        text = path.read_text() if path.exists() else ""
        assert old in text, f"{module} has changed; the test needs other text to edit"
        path.write_text(text.replace(old, new, 1))
        edited.append(module)

    def hashed(module="", old="", new="", paper="participation", experiment="fig1"):
        if module:
            edit(module, old, new)
        if not edited:
            return as_it_is(paper, experiment)
        monkeypatch.setattr(reach, "_home", lambda name: tmp_path)
        freshness.forget()
        return of(paper, experiment)

    def root():
        edited.append("by hand")
        return tmp_path / "fedlib"

    hashed.root, hashed.edit = root, edit
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
        "lab/studies/shared.py",
        "MODELS = {",
        'MODELS = {"constant": lambda: 0, ',
    ),
    "new partitioner": (
        "datasets/partition.py",
        "PARTITIONERS = {",
        'PARTITIONERS = {"alike": iid,',
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
        "    check_copies(task, theta, batches, 1)\n    on_cpu =",
    ),
    "fetching of data": ("datasets/fetch.py", "tried = []", "tried = list()"),
    "bench": ("lab/bench.py", "repeats: int = 5", "repeats: int = 6"),
    "who computes a piece": ("engine/cores.py", "len(pieces)) - 1", "len(pieces)) - 2"),
    "how a pilot is timed": (
        "lab/evidence/pilot.py",
        "2 * size, False",
        "3 * size, False",
    ),
    "what a pilot cuts short": ("engine/simulation.py", "@few_rounds\n", ""),
}


def test_what_cannot_change_a_number_makes_nothing_stale(package):
    before = package()
    for edit in BLIND.values():
        package.edit(*edit)
    assert package() == before, turned(before, package())


SEEN = {
    "the study": ("lab/studies/participation.py", "names[0], 500", "names[0], 499", "training"),
    "a helper of the study": ("lab/studies/participation.py", "max(1, s.get", "max(2, s.get", "build_algorithm"),
    "a registry": (
        *("lab/studies/shared.py", '"softmax": models.softmax', '"softmax": models.linear'),
        "MODELS[softmax]",
    ),
    "the algorithm": (
        *("papers/participation/algorithm.py", "np.subtract(self.amplify, 1)", "self.amplify"),
        "GeneralizedFedAvg.round",
    ),
    "local SGD": ("engine/local.py", "alpha=rate", "alpha=2 * rate", "_descend"),
    "a constant": ("engine/local.py", "CACHED = 2**19", "CACHED = 2**18", "CACHED"),
    "the task": ("engine/tasks.py", "batch.mean(each)", "batch.mean(-each)", "Task.losses"),
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


def test_what_can_change_a_number_is_named(package):
    before = package()
    for *edit, _ in SEEN.values():
        package.edit(*edit)
    found = {name.partition(":")[2] for name in turned(before, package())}
    assert found >= {name for *_, name in SEEN.values()}


LARGER = ("personalization", "rates-fig2", "paper")  # it convolves


def tables() -> dict[str, dict[str, str]]:
    """Hash the code of every experiment at its smallest profile, and of a larger one."""
    larger = {" ".join(LARGER): freshness.present_code(catalogue.settings(*LARGER))["code"]}
    return larger | {f"{paper} {name}": of(paper, name) for paper in catalogue.papers()
                     for name in catalogue.experiment_names(paper)}  # fmt: skip


SABOTAGE = {
    "fedlib.papers.vertical.data:_bundled": (  # the labels
        *("papers/vertical/data.py", "2.0 * (y % 2) - 1", "2.0 * (y > 4) - 1"),
        lambda m: m["paper"] == "vertical" and m["data"],  # of all that can read them
    ),
    "fedlib.datasets.loading:BASES[...]": (
        *("datasets/loading.py", "_base, normalise=False", "_base, normalise=True"),
        lambda m: any(part.startswith("writers") for part in m["data"]),
    ),
    "fedlib.engine.convolution:WAYS[grouped]": (  # of a registry that is gone through
        *("engine/convolution.py", '"grouped": grouped', '"grouped": unfolded'),
        lambda m: "small_cnn" in repr(m["settings"]),  # convolutions that are written here
    ),
    "fedlib.lab.evidence.tuning:grid": (  # in tiers one of two of this name
        *("lab/evidence/tuning.py", "min(values), max(values)", "max(values), min(values)"),
        lambda m: "tunes" in m["settings"],
    ),
    "fedlib.datasets.partition:grid": (
        *("datasets/partition.py", '"row partition", 0 if', '"row partition", 1 if'),
        lambda m: "aligned" in m["settings"] or m["experiment"] == "theorem",
    ),
}


@pytest.mark.slow
def test_a_change_turns_exactly_the_records_that_use_it(package):
    """Who uses what is known from what the stored records say that they have read and been set."""
    freshness.forget()
    before = tables()
    for *edit, _ in SABOTAGE.values():
        package.edit(*edit)
    package()
    after = tables()
    found = {name: turned(before[name], after[name]) for name in before}
    held = {f"{m['paper']} {m['experiment']}": m
            for m in records.manifests() if m["profile"] == "smoke"}  # fmt: skip
    larger = catalogue.settings(*LARGER)
    held[" ".join(LARGER)] = dict(paper=LARGER[0], data={}, experiment="", settings=larger)
    for name, (*_, uses) in SABOTAGE.items():
        users = {record for record, m in held.items() if uses(m)}
        assert {record for record in found if name in found[record]} == users != set(), name
    also = {"fedlib.datasets.loading:_base[...]", "fedlib.engine.convolution:grouped"}
    assert set.union(*found.values()) == SABOTAGE.keys() | also


OWN = {
    "__init__.py": "",
    "table.py": "REG = {'a': abs}",
    "more.py": "from own.table import REG\n\nREG['b'] = lambda: ONE",
    "left.py": "def same(x):\n    return x",
    "right.py": "def same(x):\n    return -x",
    "cost.py": "def price(x):\n    return ONE",
    "../near.py": "def price(x):\n    return ONE",
    "../loose/far.py": "def price(x):\n    return ONE",
    "lazy/__init__.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    "    from own.cost import price\n\n\ndef __getattr__(name):\n    from own import cost\n\n"
    "    return getattr(cost, name)",
    "study.py": "import random\n\nfrom own.table import REG\n\n\nclass Box:\n    size = 0\n\n\n"
    "{top}\n\n\ndef run(job):\n    {body}\n",
}
"""A study of somebody's own, in which one thing is written ONE."""

FORMS = {
    "a file in a plain folder beside it": ("from loose.far import price", "return price(job)"),
    "a plain folder's file as a module": ("from loose import far", "return far.price(job)"),
    "a file beside the package": ("from near import price", "return price(job)"),
    "a loop": ("for n in 'bc':\n    REG[n] = lambda: ONE", "return REG['b']"),
    "an entry": ("REG['b'] = lambda: ONE", "return REG['b']"),
    "an update": ("REG.update(b=lambda: ONE)", "return REG['b']"),
    "an attribute": ("Box.size = ONE", "return Box.size"),
    "setattr": ("setattr(Box, 'size', ONE)", "return Box.size"),
    "an entry of another module": ("import own.more", "return REG['b']"),
    "a call that stores": (
        "def put(f):\n    REG['b'] = f\n\n\nput(lambda: ONE)",
        "return REG['b']",
    ),
    "a call that stores in what it is given": (
        *("def put(where):\n    where['b'] = 0\n\n\nput(REG if ONE else Box)", "return REG['b']"),
    ),
    "a decorator that stores": (
        "def put(name):\n    def keep(f):\n        REG[name] = f\n        return f\n\n"
        "    return keep\n\n\n@put('b')\ndef found():\n    return ONE",
        "return REG['b']",
    ),
    "try": ("try:\n    SIZE = ONE\nexcept ImportError:\n    SIZE = 0", "return SIZE"),
    "if": ("if len(REG) < 3:\n    SIZE = ONE", "return SIZE"),
    "with": ("with open('x') as file:\n    SIZE = ONE", "return SIZE"),
    "several names at once": ("SIZE, OTHER = ONE, 5", "return SIZE"),
    "a name twice": ("SIZE = ONE\nSIZE = SIZE + 5", "return SIZE"),
    "a switch of a library": ("random.seed(ONE)", "return random.random()"),
    "a check that stores": ("def check(x):\n    REG['b'] = ONE", "check(job)\n    return REG"),
    "a check that changes what it is given": (
        "def check(x):\n    if x.pop(ONE):\n        raise ValueError",
        "check(job)\n    return job",
    ),
    "a check by a method": (
        "class Part:\n    def check(self):\n        self.size = ONE",
        "part = Part()\n    part.check()\n    return part.size",
    ),
    "a name given in a refusal": ("", "if (n := ONE) > 5:\n        raise ValueError\n    return n"),
    "a setter": (
        "class Part:\n    @property\n    def size(self):\n        return self.held\n\n"
        "    @size.setter\n    def size(self, value):\n        self.held = value + ONE",
        "part = Part()\n    part.size = job\n    return part.size",
    ),
    "an attribute by its name": (
        "class Part:\n    def size(self):\n        return ONE",
        "return getattr(Part(), 'size')()",
    ),
    "a method that another package calls": (
        "from ast import NodeVisitor\n\n\nclass Part(NodeVisitor):\n"
        "    def visit_Name(self, node):\n        return ONE",
        "return Part().visit(job)",
    ),
    "a method that fedlib calls": (
        "class Part:\n    def round(self):\n        return ONE",
        "return Part",
    ),
    "a registry gone through": (
        "def first():\n    return ONE\n\n\nALL = {'x': first}",
        "return [f() for f in ALL.values()]",
    ),
    "a name that the border has elsewhere": ("def get(x):\n    return ONE", "return get(job)"),
    "a module whose like ends the walk": ("from own.cost import price", "return price(job)"),
    "import *": ("from own.cost import *", "return price(job)"),
    "a name that a package imports late": (
        "from own.lazy import price",
        "return price(job)",
    ),
    "a module by its name": ("from own import cost", "return getattr(cost, 'price')(job)"),
    "a function of another package": ("from math import ONE as law", "return law(job)"),
    "one of two of one name": (
        "from own.left import same\nfrom own.right import same as other",
        "return same(job), other(job), ONE(job)",
    ),
}
VALUES = {"a function of another package": "sin cos", "one of two of one name": "same other"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a study and hashes its code."""
    (tmp_path / "own").mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def hashed(top: str, body: str, one: str) -> dict[str, str]:
        for name, text in OWN.items():
            text = text.replace("{top}", top).replace("{body}", body).replace("ONE", one)
            (tmp_path / "own" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "own" / name).write_text(text)
        freshness.forget()
        return freshness.code("own.study:run")

    yield hashed
    freshness.forget()


@pytest.mark.parametrize("form", FORMS)
def test_no_way_of_writing_it_hides_a_change(form, own):
    one, two = VALUES.get(form, "1 2").split()
    before, after = own(*FORMS[form], one), own(*FORMS[form], two)
    assert turned(before, after) and not turned(before, own(*FORMS[form], one))


NOTHING = {
    "another registry": ("ANY = {}\nANY['b'] = ONE", "return REG['a']"),
    "what a script does": ("if __name__ == '__main__':\n    REG['b'] = ONE", "return REG"),
    "print": ("", "print(ONE)\n    return job"),
    "a warning": ("import warnings", "warnings.warn(str(ONE))\n    return job"),
    "a refusal": ("", "if job == ONE:\n        raise ValueError\n    return job"),
    "a function that refuses, whatever its name": (
        "def sound(x):\n    for n in x:\n        if n > ONE:\n            raise ValueError",
        "sound(job)\n    return job",
    ),
    "a function that lets another refuse": (
        "def strict(x):\n    if x > ONE:\n        raise ValueError\n\n\n"
        "def sound(x):\n    low = min(x)\n    strict(low)",
        "sound(job)\n    return job",
    ),
}


@pytest.mark.parametrize("form", NOTHING)
def test_what_tells_or_refuses_makes_nothing_stale(form, own):
    assert own(*NOTHING[form], "1") == own(*NOTHING[form], "2")


def test_every_name_of_the_border_is_that_of_one_definition():
    for full in reach.BORDER:
        module, _, name = full.partition(":")
        tree, found = ast.parse(reach._file(module).read_text("utf-8")), []
        for node in tree.body:
            bound = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            defines = isinstance(node, ast.FunctionDef | ast.ClassDef)
            found += [node.name] if defines else [n.id for n in bound if type(n.ctx) is ast.Store]
        assert not name or found.count(name) == 1, full


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
        assert not turned(before, package()), line
    path = root / "core" / "steps.py"
    path.write_text(path.read_text().replace("alpha=rate", "alpha=2 * rate"))
    assert turned(before, package()), "still followed"


def test_an_import_inside_a_function_is_followed(package):
    before = package()
    old = "    return local_sgd("
    after = package(
        "papers/fedavg.py",
        old,
        "    from fedlib.papers.participation.theory import factor\n\n" + old,
    )
    assert after == before, "an import alone computes nothing"
    after = package("papers/fedavg.py", old, "    factor(q)\n" + old)
    name = "fedlib.papers.participation.theory:factor"
    assert name in after and name not in before


@pytest.mark.slow
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
    assert "fedlib.engine.models:lstm" in held["fig4"]


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
    before, card = freshness.present_code(settings), datasets.card("fashion-mnist")
    constants = dataclasses.replace(card.normalisation, **{field: value})
    changed = dataclasses.replace(card, normalisation=constants)
    monkeypatch.setattr(freshness.cards, "card", lambda name: changed)
    after = freshness.present_code(settings)
    assert before["code"] == after["code"] and before["cards"] != after["cards"]
    file = card.files[0]
    other = dataclasses.replace(file, sha256="0" * 64), *card.files[1:]
    for files in (other, (dataclasses.replace(file, train_members=("a",)), *card.files[1:])):
        changed = dataclasses.replace(card, files=files)
        monkeypatch.setattr(freshness.cards, "card", lambda name: changed)  # noqa: B023
        assert freshness.present_code(settings)["cards"] != before["cards"]
    told = dataclasses.replace(card, title="other", citation="other", homepage="x", traps=("y",))
    monkeypatch.setattr(freshness.cards, "card", lambda name: told)
    assert freshness.present_code(settings) == before


def test_digest_tells_apart():
    assert freshness.short_digest({"a": 1, "b": 2}) == freshness.short_digest({"b": 2, "a": 1})
    different = [{"a": 1}, {"a": 2}, {"b": 1}, [1, 2], [2, 1], [[1], 2], "a", 1.0, 1]
    assert len({freshness.short_digest(value) for value in different}) == len(different)


def test_the_hash_is_the_same_under_every_python():
    """Python 3.12 and 3.13 print trees differently; a record must not look stale there."""
    text = reach.dump(ast.parse("def f(x):\n    return g()\n\n\nclass C:\n    pass\n"))
    assert text == (
        "Module(body=[FunctionDef(name='f', args=arguments(posonlyargs=[], args=[arg(arg='x')], "
        "kwonlyargs=[], kw_defaults=[], defaults=[]), body=[Return(value=Call(func=Name(id='g', "
        "ctx=Load()), args=[], keywords=[]))], decorator_list=[]), ClassDef(name='C', bases=[], "
        "keywords=[], body=[Pass()], decorator_list=[])], type_ignores=[])"
    )


class Typed(reach._Leaner):
    """Leave out the same, but keep the annotations, by which dataclasses know their fields."""

    visit_AnnAssign = visit_arg = visit_FunctionDef = ast.NodeTransformer.generic_visit


@pytest.mark.slow
@pytest.mark.long
def test_what_the_hash_leaves_out_changes_no_number(tmp_path):
    """A copy of fedlib without any of it (no checks, messages, docstrings) gives the same rows."""
    shutil.copytree(PACKAGE, tmp_path / "fedlib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "data", tmp_path / "data")
    removed = 0
    computing = ("engine", "population", "papers", "datasets")
    for path in (p for name in computing for p in (tmp_path / "fedlib" / name).rglob("*.py")):
        before = path.read_text()
        parts = path.relative_to(tmp_path).with_suffix("").parts
        tree, module = ast.parse(before), ".".join(p for p in parts if p != "__init__")
        lean = Typed(frozenset({"fedlib"}), module, tree).visit(tree)
        for node in ast.walk(lean):
            if isinstance(getattr(node, "body", None), list) and not node.body:
                node.body = [ast.Pass()]
        after = ast.unparse(ast.fix_missing_locations(lean))
        removed += before.count("raise ") - after.count("raise ")
        path.write_text(after)
    assert removed > 50
    code = """import sys
from fedlib.lab.evidence import experiments
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
    assert turned(before, after) == {"fedlib.population.delays:ShiftedExponential.draws"}


def test_a_record_of_before_a_move_is_what_it_was():
    """Older manifests name modules that have moved since; ``data/moved.toml`` says where to."""
    moved = {new: old for old, new in freshness._moves().items()}
    assert len(freshness._moves()) > 10
    for name in ("participation fig1", "personalization fig1", "hierarchy fig3"):
        settings = catalogue.settings(*name.split(), "smoke")
        present = freshness.present_code(settings)
        code, turns = {}, 0
        for full, found in present["code"].items():
            home, _, short = full.partition(":")
            while home and home not in moved:
                home = home.rpartition(".")[0]
            turns += bool(home)
            code[moved[home] + full.removeprefix(home) if home else full] = found
        manifest = present | {"code": code, "settings": settings, "data": {}}
        assert turns > 5 and freshness.judge_record(manifest, settings).word == "fresh", name
        other = {full: found + "0" for full, found in code.items()}
        assert freshness.judge_record(manifest | {"code": other}, settings).word == "stale", name
