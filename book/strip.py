"""Bring every notebook into the form in which it is committed.

Outputs go, except in cells tagged ``keep_output``; cell ids stay; the kernel is plain Python 3;
what a page hides by a tag is closed in JupyterLab, too, until a reader opens it; and as soon as the
project has a public address, the first code cell fetches the library on Colab.
``make strip`` runs this, and a test says when it was forgotten. With ``--keep`` the notebooks that
keep outputs are run first, and what those cells print now is what is kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import build
import nbformat
import pages

ROOT = Path(__file__).resolve().parent.parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
EXTRA = (
    "metadata.papermill cell.metadata.papermill metadata.language_info.version metadata.jupytext"
)
STRIP = [sys.executable, "-m", "nbstripout", "--keep-id", "--extra-keys", EXTRA]

FETCH = """\
# On Colab this fetches the library; anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    package = "git+{url}@{branch}"
    get_ipython().run_line_magic("pip", f"install --quiet {{package}}")"""

CLOSED = {  # what a tag of the page closes in a notebook
    "hide-input": ["source_hidden"],
    "remove-input": ["source_hidden"],
    "hide-output": ["outputs_hidden"],
    "hide-cell": ["source_hidden", "outputs_hidden"],
    "remove-cell": ["source_hidden", "outputs_hidden"],
}


def close(cell: nbformat.NotebookNode) -> None:
    """Write down for JupyterLab what the tags of a cell say to the page."""
    tags = cell.metadata.get("tags", [])
    hidden = {name: True for tag in tags for name in CLOSED.get(tag, [])}
    cell.metadata.pop("jupyter", None)
    if hidden:
        cell.metadata["jupyter"] = hidden


def fetch(notebook: nbformat.NotebookNode, url: str, branch: str) -> None:
    """Begin the code with a cell that fetches the library on Colab, if it has an address."""
    notebook.cells = [cell for cell in notebook.cells if cell.id != "on-colab"]
    if url:
        cell = nbformat.v4.new_code_cell(
            FETCH.format(url=url, branch=branch), id="on-colab", metadata={"tags": ["remove-cell"]}
        )
        notebook.cells.insert(1, cell)


def keeps(cell: nbformat.NotebookNode) -> bool:
    """Say whether the outputs of this cell are committed."""
    return "keep_output" in cell.metadata.get("tags", [])


def refresh(notebooks: list[Path]) -> None:
    """Run the notebooks that keep outputs and take over what the kept cells print."""
    keeping = [p for p in notebooks if any(map(keeps, nbformat.read(p, as_version=4).cells))]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(path, Path(folder) / f"{n}.ipynb") for n, path in enumerate(keeping)]
        targets = dict(jobs)
        for run in build.execute_all(jobs, "replay"):
            if run.error:
                raise SystemExit(run.error)
            ran = {c.id: c for c in nbformat.read(targets[run.notebook], as_version=4).cells}
            notebook = nbformat.read(run.notebook, as_version=4)
            for cell in filter(keeps, notebook.cells):
                cell.outputs = ran[cell.id].outputs
            nbformat.write(notebook, run.notebook)
            print(f"kept outputs of {run.notebook.relative_to(ROOT)}")


def main() -> int:
    """Strip every notebook in place."""
    parser = argparse.ArgumentParser(description="Clear the outputs of the notebooks.")
    parser.add_argument("--keep", action="store_true", help="first renew the outputs that are kept")
    notebooks = sorted((ROOT / "notebooks").rglob("*.ipynb"))
    if parser.parse_args().keep:
        refresh(notebooks)
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        notebook.metadata["kernelspec"] = dict(KERNEL)
        fetch(notebook, *pages.address())
        for cell in notebook.cells:
            close(cell)
        nbformat.write(notebook, path)
    return subprocess.run([*STRIP, *map(str, notebooks)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
