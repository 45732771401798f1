"""The workflow that publishes the book runs the README's two commands."""

import re

import build
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
