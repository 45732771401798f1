"""The search for mistakes that no test notices finds one, and leaves the tree as it is."""

from __future__ import annotations

import subprocess
import sys

import mutants
import pytest

MODULE = """
def larger(a: int | None, b: int) -> int | None:
    if b < 0:
        raise ValueError(f"{b + 1} is too small")
    return a if a > b else b


def twice(a):
    return 2 * a
"""
TEST = """
from package.module import twice


def test_twice():
    assert twice(3) == 6
"""


@pytest.mark.long
def test_the_mistake_that_no_test_notices_is_told(tmp_path):
    files = {"package/__init__.py": "", "package/module.py": MODULE, "tests/test_it.py": TEST}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [sys.executable, mutants.__file__, "package"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "3 of 9 mutants were noticed.", done.stdout + done.stderr
    told = {lines[i - 1].split()[0] for i, line in enumerate(lines) if line.startswith("-")}
    assert told == {"package/module.py:3", "package/module.py:5"}
    assert "+    return a if a >= b else b" in lines
    assert {path: (tmp_path / path).read_text() for path in files} == files


def test_messages_annotations_and_decorators_are_spared(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("import functools\n\n\n@functools.lru_cache(maxsize=5)" + MODULE)
    found = mutants.mutants([path], tmp_path / "session.sqlite")
    assert {one.start_pos[0] for one in found} == {6, 8, 12}
