"""Every notebook runs in the smoke profile, from a folder that is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import build
import nbformat
import pytest

ROOT = build.ROOT
NOTEBOOKS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "notebooks").rglob("*.ipynb")
    if ".ipynb_checkpoints" not in path.parts
)
every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.as_posix())


def code_cells(path: Path) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def kept(path: Path) -> list:
    return [c for c in code_cells(path) if "keep_output" in c.metadata.get("tags", [])]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, tuple[build.Run, Path]]:
    """Run all of them, two at a time, with an unrelated working folder."""
    out, elsewhere = tmp_path_factory.mktemp("smoke"), tmp_path_factory.mktemp("elsewhere")
    jobs = [(ROOT / notebook, out / notebook) for notebook in NOTEBOOKS]
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


@every_notebook
def test_it_runs(notebook, smoke):
    run, _ = smoke[notebook]
    assert not run.error, "\n" + run.error


@every_notebook
def test_every_figure_it_shows_is_described(notebook, smoke):
    run, path = smoke[notebook]
    if run.error:
        pytest.skip("it did not run")
    for number, cell in enumerate(code_cells(path)):
        if any("image/png" in out.get("data", {}) for out in cell.outputs):
            told = cell.metadata.get("mystnb", {})
            figure = told.get("figure", {})
            facts = (figure.get("caption"), figure.get("name"), told.get("image", {}).get("alt"))
            assert all(facts), f"code cell {number}: caption, name and alt are {facts}"


@every_notebook
def test_it_prints_no_warning(notebook, smoke):
    run, path = smoke[notebook]
    if run.error:
        pytest.skip("it did not run")
    for number, cell in enumerate(code_cells(path)):
        said = "".join(out.text for out in cell.outputs if out.get("name") == "stderr")
        assert not said, f"code cell {number} says on standard error: {said[:500]}"


def printed(cells: list) -> dict[str, str]:
    """Return what each cell prints, by its id."""
    return {
        cell.id: "".join(out.text for out in cell.outputs if out.output_type == "stream")
        for cell in cells
    }


@pytest.mark.parametrize(
    "notebook", [n for n in NOTEBOOKS if kept(ROOT / n)], ids=lambda path: path.as_posix()
)
def test_kept_outputs_are_what_it_prints(notebook, smoke):
    run, path = smoke[notebook]
    if run.error:
        pytest.skip("it did not run")
    told, now = printed(kept(ROOT / notebook)), printed(code_cells(path))
    assert all(told.values()) and told == {cell: now[cell] for cell in told}


def test_nbval_compares_them_too(tmp_path):
    """One notebook is enough to see that who runs nbval gets the same answer."""
    notebook = Path("notebooks/01_foundations/3_speed.ipynb")
    assert kept(ROOT / notebook)
    copy = nbformat.read(ROOT / notebook, as_version=4)
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
