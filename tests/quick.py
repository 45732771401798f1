"""The tests that look at what has changed since the last commit, without the slow ones.

``make quick`` runs them after ruff. Where nothing has changed, what the last commit changed is
looked at. Of a module that half of the tests import, the closest test files are taken.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import chosen

MOST = 14  # test files for one change: about a minute on two cores
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not network"]


def changed() -> list[Path]:
    """Return the files that differ from the last commit; if none does, those that it changed."""
    compare = ("diff", "--name-only", "--diff-filter=d")
    now = [*git(*compare, "HEAD"), *git("ls-files", "--others", "--exclude-standard")]
    return [Path(name) for name in sorted(now or git(*compare, "HEAD~1"))]


def git(*words: str) -> list[str]:
    """Return the lines that git prints."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def tests(path: Path) -> list[str]:
    """Return the test files for one change: itself, or those that import or name the file."""
    if path.match("tests/test_*.py"):
        return [str(path)]
    if path.suffix == ".py" and path.parts[0] in ("fedlib", *chosen.BESIDE):
        return chosen.closest(path, MOST)
    return sorted(naming(path))[:MOST]


def naming(path: Path) -> Iterator[str]:
    """Yield the test files that name a page, a table or their kind."""
    for file in Path("tests").glob("test_*.py"):
        text = file.read_text("utf-8")
        if f'"{path.name}"' in text or f'"*{path.suffix}"' in text:
            yield str(file)


def main() -> int:
    """Print which tests are chosen, run them, and say how long it took."""
    began = time.monotonic()
    found = {path: tests(path) for path in changed()}
    for path, files in found.items():
        print(f"{path}: {' '.join(Path(file).stem for file in files) or 'no test of its own'}")
    files = sorted({file for each in found.values() for file in each})
    spread = ["-n", "2", "--dist", "loadfile"] if len(files) > 2 else []
    code = subprocess.run([*PYTEST, *spread, *files], check=False).returncode if files else 0
    took = time.monotonic() - began
    print(f"{len(files)} test files without what is slow, {took:.0f} s.")
    print("All: make test, and make test-long for the built book.")
    return 0 if code == 5 else code  # all of them are slow


if __name__ == "__main__":
    sys.exit(main())
