"""What must be true of a notebook after it was run, whoever ran it."""

from __future__ import annotations

from pathlib import Path

import nbformat


def code_cells(path: Path) -> list:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def kept(path: Path) -> list:
    """Return the cells whose output is stored with the notebook."""
    return [c for c in code_cells(path) if "keep_output" in c.metadata.get("tags", [])]


def check(notebook: Path, copy: Path) -> None:
    """Check an executed copy: figures are described, nothing warns, kept outputs are the same."""
    for number, cell in enumerate(code_cells(copy)):
        if any("image/png" in out.get("data", {}) for out in cell.outputs):
            told = cell.metadata.get("mystnb", {})
            figure = told.get("figure", {})
            facts = (figure.get("caption"), figure.get("name"), told.get("image", {}).get("alt"))
            assert all(facts), f"code cell {number}: caption, name and alt are {facts}"
        assert not any("live" in out.get("metadata", {}) for out in cell.outputs), number
        said = "".join(out.text for out in cell.outputs if out.get("name") == "stderr")
        assert not said, f"code cell {number} says on standard error: {said[:500]}"
    told, now = printed(kept(notebook)), printed(code_cells(copy))
    assert all(told.values()) and told == {cell: now[cell] for cell in told}


def printed(cells: list) -> dict[str, str]:
    """Return what each cell prints, by its id."""
    return {
        cell.id: "".join(out.text for out in cell.outputs if out.output_type == "stream")
        for cell in cells
    }
