"""A reader changes the numbers at the top of a notebook: it runs, and says what then differs."""

from __future__ import annotations

import ast
from pathlib import Path

import build
import kernels
import nbformat
import papermill
import pytest

NOTEBOOKS = sorted((build.ROOT / "notebooks").glob("*/*.ipynb"))
CHANGES = {  # several at once, in the notebooks that run in less than about twenty seconds
    "01_foundations/1_federated_averaging": dict(
        N=7, I=2, lr=0.2, cohort=3, batch_size=8, seeds=[4]
    ),
    "01_foundations/2_splitting_data": dict(N=30, split_seed=3),
    "01_foundations/3_mix_columns_clocks": dict(G=2, K=3, P=4, parties=3, fixed=0.5, mean=0.4),
    "02_participation/1_derive": dict(N=7, D=2, local_steps=3, interval=8, rounds=64, seed=3),
    "03_hierarchy/2_build": dict(
        sizes=[3, 5], lr=0.2, sync=2, time=30.0, batch_size=16, seeds=[4, 5]
    ),
    "04_personalization/1_derive": dict(samples=[30, 5, 15, 40], d=2, mu=0.8, L=3.0, seed=4),
    "05_tiers/1_derive": dict(b=16, v=1.0, copies=10, seed=3),
    "06_vertical/1_derive": dict(n=5, lam=0.01, lr=0.1, seed=4),
    "06_vertical/2_build": dict(q=12, m=5, lam=0.01, gamma=0.05),
}


def named(path: Path) -> str:
    return path.relative_to(build.ROOT / "notebooks").with_suffix("").as_posix()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_the_values_of_the_page_are_those_of_its_parameters(path):
    """Else every failing assertion of the page itself would be a line of text."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    given: dict = {}
    for cell in cells:
        if "parameters" in cell.metadata.get("tags", []):
            exec(cell.source, given)
    calls = [
        node
        for cell in cells
        if "AsPrinted" in cell.source
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AsPrinted")
    ]
    assert len(calls) == any("with as_printed:" in cell.source for cell in cells)
    for call in calls:
        printed = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        assert printed == {name: given[name] for name in printed}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_it_runs_with_other_numbers(name, tmp_path, monkeypatch):
    for key, value in build.KERNEL.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    notebook = str(build.ROOT / "notebooks" / f"{name}.ipynb")
    assert set(CHANGES[name]) <= set(papermill.inspect_notebook(notebook))
    how = dict(kernel_name="python3", kernel_manager_class=kernels.Manager, progress_bar=False)
    papermill.execute_notebook(notebook, None, CHANGES[name], **how)
