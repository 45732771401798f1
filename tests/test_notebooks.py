"""Every notebook with a profile runs in the smoke profile, from a folder that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import build
import executed
import nbformat
import papermill
import pytest

from fedlib.lab.evidence import catalogue, freshness, records

pytestmark = pytest.mark.slow

ROOT = build.ROOT
NOTEBOOKS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
# The others have no profile: they run when the book is built, and are checked there. So are these
# with stored records; with small ones, which are made where they are not, two stand for all.
PROFILED = [n for n in NOTEBOOKS if "profile" in papermill.inspect_notebook(str(ROOT / n))]
SMALL = [n for n in PROFILED if n.parent.name in ("02_participation", "07_beyond")]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[build.Run, Path]]:
    """Run those with a profile, two at a time, with an unrelated working folder.

    They find the small records there, as if made just now, all but the quickest of each paper.
    That present code gives the same is what ``test_experiments.py`` holds.
    """
    out, elsewhere = tmp_path_factory.mktemp("smoke"), tmp_path_factory.mktemp("elsewhere")
    for paper in ("participation", "beyond", "methods"):
        small = [m for m in records.manifests() if (m["paper"], m["profile"]) == (paper, "smoke")]
        for m in sorted(small, key=lambda manifest: manifest["wall_seconds"])[1:]:
            record = records.load(paper, m["experiment"], "smoke")
            now = freshness.present_code(catalogue.settings(paper, m["experiment"], "smoke"))
            records.save(elsewhere / "runs", record.frame, m | now)
    jobs = [(ROOT / notebook, out / notebook) for notebook in SMALL]
    before = Path.cwd()
    os.chdir(elsewhere)
    try:
        runs = list(build.execute_all(jobs, "smoke"))
    finally:
        os.chdir(before)
    return {
        run.notebook.relative_to(ROOT): (run, out / run.notebook.relative_to(ROOT)) for run in runs
    }


def test_the_table_of_contents_names_every_notebook():
    assert sorted(build.toc_notebooks()) == NOTEBOOKS


@pytest.mark.parametrize("notebook", SMALL, ids=lambda path: path.as_posix())
def test_it_runs(notebook, smoke):
    run, copy = smoke[notebook]
    assert not run.error, "\n" + run.error
    executed.check(ROOT / notebook, copy)


def test_what_is_printed_in_parts_is_one_text(tmp_path):
    """A kernel sends what was printed whenever a fifth of a second is over, in mid-line, too."""
    cell = 'import sys; print("one", end=""); sys.stdout.flush(); print("\\ntwo")'
    page, copy = tmp_path / "page.ipynb", tmp_path / "copy.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), page)
    assert [run.error for run in build.execute_all([(page, copy)], "smoke")] == [""]
    (output,) = nbformat.read(copy, as_version=4).cells[0].outputs
    assert output.text == "one\ntwo\n"


def test_nbval_compares_kept_outputs(tmp_path):
    """One cell is enough to see that who runs nbval gets the same answer."""
    notebook = Path("notebooks/01_foundations/4_speed.ipynb")
    assert executed.kept(ROOT / notebook)
    copy = nbformat.read(ROOT / notebook, as_version=4)
    first = next(k for k, cell in enumerate(copy.cells) if cell.get("outputs"))
    del copy.cells[first + 1 :]
    for cell in copy.cells:
        if cell.get("outputs"):
            cell.execution_count = 1  # nbval wants to see that a kept output was once made
    nbformat.write(copy, tmp_path / notebook.name)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-q"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, notebook.name],
        cwd=tmp_path,
        env={**os.environ, **build.KERNEL},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
