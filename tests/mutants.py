"""Would a test notice? Small mistakes are put into a module, one at a time, in a copy of the tree.

``make mutants MODULE=fedlib/engine/local.py``, or a folder of modules. cosmic-ray makes the
mistakes; each is tried against the test files that import the module, fastest first.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import importlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import chosen
import pytest
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec
from tqdm import tqdm

BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd"
COMPARED = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is"
MISTAKES = {  # one for each operator of Python; more of them mostly end in a TypeError
    *(f"ReplaceBinaryOperator_{name}" for name in BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in COMPARED.split()),
    *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "AddNot"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "NumberReplacer"),
}
WHOLE = {"test_bench.py", "test_cli.py", "test_device.py", "test_gpu.py", "test_new_user.py"}
WHOLE |= {"test_notebooks.py", "test_site.py"}  # much is run for each test; only when asked for
OPTIONS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not network"]
HEAVY = ["torch", "pandas", "scipy.stats", "scipy.optimize", "sklearn.datasets"]


def copied(root: Path, home: Path) -> None:
    """Copy what is, or is about to be, in a repository."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    for name in filter(None, done.stdout.split("\0")):
        if (root / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, home / name)


def mutants(modules: list[Path], session: Path) -> list[MutationSpec]:
    """Return the mistakes that can be made in modules, in the order of their lines."""
    with use_db(session) as db:
        init(modules, db, {})
        found = [mutation for item in db.work_items for mutation in item.mutations]
    quiet = {module: list(spared(module.read_text("utf-8"))) for module in modules}
    kept = (
        one
        for one in found
        if one.operator_name.removeprefix("core/") in MISTAKES
        and not any(a <= one.start_pos < b for a, b in quiet[one.module_path])
    )
    return sorted(kept, key=lambda m: (m.module_path, m.start_pos, m.operator_name, m.occurrence))


def spared(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield from where to where a text holds messages, annotations and decorators."""
    for node in ast.walk(ast.parse(text)):
        parts = [node] if isinstance(node, ast.Raise) else getattr(node, "decorator_list", [])
        parts = [*parts, getattr(node, "annotation", None), getattr(node, "returns", None)]
        for part in filter(None, parts):
            yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def seconds(tests: list[str]) -> dict[str, float]:
    """Run tests on the code as it is; return how long each file takes."""
    report = Path("mutants.xml").resolve()
    options = ["-o", "junit_family=xunit1", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *options, *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"The tests fail without a mutant, too:\n{done.stdout[-3000:]}{done.stderr}")
    took = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        took[case.get("file")] += float(case.get("time"))
    return took


def carry_out(tests: list[str]) -> None:
    """Run tests in this process, quietly, and end it with their exit code."""
    os.setsid()  # so that whatever the tests start can be ended with them
    sys.dont_write_bytecode = True
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os._exit(pytest.main([*OPTIONS, *tests]))


def is_noticed(tests: list[str], limit: float) -> bool:
    """Run tests in a copy of this process, which has read nothing of the package; did one fail?"""
    process = multiprocessing.get_context("fork").Process(target=carry_out, args=[tests])
    process.start()
    process.join(limit)
    if late := process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return late or process.exitcode != 0


def survivors(found: list[MutationSpec], tests: dict[Path, list[str]]) -> Iterator[str]:
    """Try the mutants; yield where each one is that no test noticed, and what it changes."""
    took = seconds(sorted({file for files in tests.values() for file in files}))
    for name in HEAVY:  # read once, not for each mutant
        importlib.import_module(name)
    for one in tqdm(found, desc="mutants", unit="", smoothing=0):
        files = sorted(tests[one.module_path], key=lambda file: took.get(file, 0.0))
        limit = 60 + 3 * sum(took.get(file, 0.0) for file in files)
        operator = get_operator(one.operator_name)(**one.operator_args)
        with use_mutation(one.module_path, operator, one.occurrence) as (before, after):
            if not is_noticed(files, limit):
                lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
                change = [line for line in lines if re.match(r"[+-](?!--|\+\+)", line)]
                yield "\n".join([f"\n{one.module_path}:{one.start_pos[0]} survived", *change])


def main() -> None:
    """Read the command line, try the mutants in a copy, print what survived and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="a module, or a folder of modules")
    parser.add_argument("--tests", nargs="*", help="test files; default: those that import it")
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    asked = parser.parse_args()
    root = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        copied(root, home)
        os.chdir(home)
        sys.path.insert(0, str(home))
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than many a test
        os.environ["PYTHONPATH"] = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
        modules = sorted(asked.module.rglob("*.py")) or [asked.module]
        found = mutants(modules, home / "mutants.sqlite")
        paths = {m.module_path for m in found}
        tests = {path: asked.tests or chosen.importers(path, WHOLE) for path in paths}
        if alone := sorted(str(path) for path, files in tests.items() if not files):
            print(f"No test imports {', '.join(alone)}. Name some: TESTS=tests/test_x.py")
        found = [one for one in found if tests[one.module_path]]
        if 0 < asked.sample < len(found):
            picked = random.Random(asked.seed).sample(range(len(found)), asked.sample)
            found = [found[i] for i in sorted(picked)]
        lost = 0
        for told in survivors(found, tests):
            tqdm.write(told)
            lost += 1
        print(f"{len(found) - lost} of {len(found)} mutants were noticed.")


if __name__ == "__main__":
    main()
