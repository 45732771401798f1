"""What works on other people's machines: the workflow that publishes, Colab, Binder."""

import re
import sys
import types

import build
import nbformat
import pages
import pytest
import strip
import yaml

WORKFLOW = build.ROOT / ".github" / "workflows" / "book.yml"


def test_the_workflow_runs_the_two_commands_and_publishes_what_the_book_is_built_to():
    flow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    assert {"push", "pull_request"} <= set(flow[True])  # YAML reads the word on as true
    jobs = flow["jobs"]
    steps = {name: job["steps"] for name, job in jobs.items()}
    commands = [step["run"] for all_steps in steps.values() for step in all_steps if "run" in step]
    told = (build.ROOT / "README.md").read_text("utf-8")
    assert sorted(commands) == ["make book", "make test", "make test-long"]
    assert all(re.search(rf"(^|`){command}\b", told, re.M) for command in commands)
    (kept,) = [s["with"]["path"] for s in steps["build"] if "upload-pages" in s.get("uses", "")]
    assert kept == "_build/html"
    assert set(jobs["publish"]["needs"]) == {"test", "whole", "build"}
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


URL, _ = pages.address()
NOTEBOOKS = [build.ROOT / notebook for notebook in build.toc_notebooks()]


@pytest.mark.parametrize("url", ["", "https://github.com/team/book"])
def test_buttons_come_with_an_address_and_go_without(url, tmp_path):
    given = yaml.safe_load((build.ROOT / "_config.yml").read_text("utf-8"))
    given["repository"]["url"] = url
    (tmp_path / "_config.yml").write_text(yaml.safe_dump(given), "utf-8")
    pages.offer(tmp_path / "_config.yml")
    left = yaml.safe_load((tmp_path / "_config.yml").read_text("utf-8"))
    gone = (given.keys() - left.keys()) | (given["html"].keys() - left["html"].keys())
    buttons = {f"use_{kind}_button" for kind in ("repository", "issues", "edit_page")}
    assert gone == (set() if url else buttons | {"launch_buttons"})
    assert left["sphinx"]["config"]["release"] == pages.edition()


def test_no_link_leads_to_an_address_that_the_project_has_not():
    there = re.compile(r"https?://(?:colab\.research|mybinder\.org)[^\s)}\"]*")
    texts = [*build.ROOT.glob("*.md"), *build.ROOT.glob("*.cff"), *NOTEBOOKS]
    for path in [*texts, *(build.ROOT / "book").rglob("*.md")]:
        named = there.findall(path.read_text("utf-8"))
        mine = URL.removeprefix("https://github.com/")
        assert not [link for link in named if not URL or mine not in link], path


def test_a_notebook_fetches_its_library_on_colab_and_nowhere_else(monkeypatch):
    for path in NOTEBOOKS:
        assert ("on-colab" in path.read_text("utf-8")) == bool(URL), f"{path}: run make strip"
    notebook = nbformat.read(NOTEBOOKS[0], 4)
    for url, branch in (
        ("https://github.com/team/book", "main"),
        ("", "main"),
        ("https://a.b/c", "d"),
    ):
        strip.fetch(notebook, url, branch)
        code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [c.id == "on-colab" for c in code_cells] == [bool(url)] + [False] * (
            len(code_cells) - 1
        )
    cell = code_cells[0]
    assert cell.metadata.tags == ["remove-cell"], "no page shows it"
    asked = []
    shell = types.SimpleNamespace(run_line_magic=lambda *words: asked.append(words))
    exec(cell.source, {"get_ipython": lambda: shell})
    assert asked == []
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    exec(cell.source, {"get_ipython": lambda: shell})
    assert asked == [("pip", "install --quiet git+https://a.b/c@d")]


def test_binder_installs_the_library():
    assert "-e .[lab]" in (build.ROOT / "requirements.txt").read_text("utf-8")
