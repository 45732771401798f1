"""What works on other people's machines: the workflow that publishes, Colab, Binder."""

import json
import re
import sys
import types

import build
import pytest
import yaml

WORKFLOW = build.ROOT / ".github" / "workflows" / "book.yml"


def test_the_workflow_runs_the_two_commands_and_publishes_what_the_book_is_built_to():
    flow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert {"push", "pull_request"} <= set(flow[True])  # YAML reads the word on as true
    jobs = flow["jobs"]
    steps = {name: job["steps"] for name, job in jobs.items()}
    commands = [step["run"] for all_steps in steps.values() for step in all_steps if "run" in step]
    told = (build.ROOT / "README.md").read_text("utf-8")
    assert sorted(commands) == ["make book", "make test"]
    assert all(re.search(rf"^{command}\b", told, re.M) for command in commands)
    (kept,) = [s["with"]["path"] for s in steps["build"] if "upload-pages" in s.get("uses", "")]
    assert kept == "_build/html"
    assert set(jobs["publish"]["needs"]) == {"test", "build"}
    assert "main" in jobs["publish"]["if"] and jobs["publish"]["permissions"]["pages"] == "write"


def test_every_action_and_python_is_one_that_the_project_allows():
    text = WORKFLOW.read_text("utf-8")
    assert all(
        re.fullmatch(r"actions/[\w-]+@v\d+", use) for use in re.findall(r"uses: (\S+)", text)
    )
    needed = re.search(
        r'requires-python = ">=([\d.]+)"', (build.ROOT / "pyproject.toml").read_text()
    )
    assert set(re.findall(r'python-version: "([\d.]+)"', text)) == {needed[1]}


CONFIG = yaml.safe_load((build.ROOT / "_config.yml").read_text("utf-8"))["repository"]
NAME = CONFIG["url"].removeprefix("https://github.com/")


def test_the_badges_open_a_notebook_that_is_there():
    told = (build.ROOT / "README.md").read_text("utf-8")
    colab = rf"https://colab\.research\.google\.com/github/{NAME}/blob/{CONFIG['branch']}/([^)]+)\)"
    binder = rf"https://mybinder\.org/v2/gh/{NAME}/{CONFIG['branch']}\?urlpath=lab/tree/([^)]+)\)"
    for link in (colab, binder):
        (notebook,) = re.findall(link, told)
        assert (build.ROOT / notebook).is_file()
    wanted = (build.ROOT / "requirements.txt").read_text("utf-8")
    assert "-e .[lab]" in wanted, "Binder installs what requirements.txt names, fedlib included"


@pytest.mark.parametrize("notebook", build.toc_notebooks(), ids=str)
def test_a_notebook_fetches_its_library_on_colab_and_nowhere_else(notebook, monkeypatch):
    cells = json.loads((build.ROOT / notebook).read_text("utf-8"))["cells"]
    (cell,) = (c for c in cells if c["id"] == "on-colab")
    code_cells = [c for c in cells if c["cell_type"] == "code"]
    assert code_cells[0] is cell, "before fedlib is asked for"
    assert cell["metadata"]["tags"] == ["remove-cell"], "no page shows it"
    asked = []
    shell = types.SimpleNamespace(run_line_magic=lambda *words: asked.append(words))
    code = "".join(cell["source"])
    exec(code, {"get_ipython": lambda: shell})
    assert asked == []
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    exec(code, {"get_ipython": lambda: shell})
    assert asked == [("pip", f"install --quiet git+{CONFIG['url']}@{CONFIG['branch']}")]
