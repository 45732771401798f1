"""A kernel has its imports when it begins, and ends with the process that asked for it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import build
import kernels
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernels.FORKS, reason="kernels are forks on Linux alone"),
]
BUILD = """
import sys
sys.path.insert(0, {book!r})
import kernels, nbclient, nbformat
if __name__ == "__main__":
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({cell!r})])
    nbclient.NotebookClient(page, kernel_manager_class=kernels.Manager).execute()
"""
CELL = """
import os, pathlib, sys, time
there = "torch" in sys.modules
part = pathlib.Path("told.part")
part.write_text(f"{os.getpid()} {there}")
part.rename("told")
time.sleep(300)
"""


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked how


def test_a_kernel_has_its_imports_and_ends_with_a_killed_build(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(BUILD.format(book=str(build.ROOT / "book"), cell=CELL))
    asking = subprocess.Popen([sys.executable, script], cwd=tmp_path)
    told, late = tmp_path / "told", time.monotonic() + 120
    while not told.exists():
        assert asking.poll() is None and time.monotonic() < late
        time.sleep(0.05)
    pid, there = told.read_text().split()
    assert there == "True" and running(int(pid))
    asking.kill()
    asking.wait()
    late = time.monotonic() + 30
    while running(int(pid)):
        assert time.monotonic() < late, "the kernel has outlived the build"
        time.sleep(0.05)
