"""The guide "Run batches", followed to the letter: every command of it, where it can be tried."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import build
import nbformat
import pandas as pd
import pytest

from fedlib.lab.evidence import catalogue

pytestmark = [pytest.mark.slow, pytest.mark.long]

PAGE = (build.ROOT / "book" / "guides" / "run_batches.md").read_text("utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)\n", PAGE, flags=re.M)[1:])] * 2, strict=True))
FILES = dict(re.findall(r"^`(\S+)`\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
STUBS = {  # what a cluster has; a "host" is a folder
    "fedlib": f'exec "{sys.executable}" -c "from fedlib.lab.cli import main; main()" "$@"',
    "sbatch": """
n=$(sed -n 's/^#SBATCH --array=1-//p' "$1")
export SLURM_ARRAY_TASK_COUNT=$n SLURM_CPUS_PER_TASK=$(sed -n 's/.*--cpus-per-task=//p' "$1")
for i in $(seq "$n"); do SLURM_ARRAY_TASK_ID=$i bash "$1" & done; wait""",
    "ssh": '[ "$1" = -n ]; shift; cd "$HOSTS/$1"; shift; exec bash -c "$*"',
    "rsync": """
[ "$1" = -a ]
at() { case $1 in *:*) echo "$HOSTS/${1%%:*}/${1#*:}" ;; *) echo "$1" ;; esac; }
mkdir -p "$(at "$3")"
case $2 in */) cp -R "$(at "$2")." "$(at "$3")" ;; *) cp "$(at "$2")" "$(at "$3")" ;; esac""",
}


def commands(section: str) -> list[str]:
    return re.findall(r"^```bash\n((?!#!).*?)^```$", SECTIONS[section], re.M | re.S)


@dataclass
class Desk:
    """A folder with the page's files, and a shell in it."""

    folder: Path
    env: dict[str, str]

    def begin(self, command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            ["bash", "-e", "-u", "-c", command], cwd=self.folder, env=self.env, text=True,
            stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def type(self, command: str, code: int = 0) -> str:
        running = self.begin(command)
        try:
            said = running.communicate(timeout=600)[0]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
        assert running.returncode == code, said
        return said

    def interrupt(self, command: str, when: Callable[[], bool]) -> str:
        running, late = self.begin(command), time.monotonic() + 600
        while not when() and running.poll() is None and time.monotonic() < late:
            time.sleep(0.02)
        os.killpg(running.pid, signal.SIGINT)
        said = running.communicate(timeout=600)[0]
        assert running.returncode == 130, said
        return said


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Desk]:
    stubs = tmp_path_factory.mktemp("bin")
    for name, text in STUBS.items():
        (stubs / name).write_text(f"#!/bin/bash\nset -e\n{text.strip()}\n")
        (stubs / name).chmod(0o755)

    def lay() -> Desk:
        folder = tmp_path_factory.mktemp("desk")
        for name, text in FILES.items():
            (folder / name).write_text(text, "utf-8")
        hosts = tmp_path_factory.mktemp("hosts")
        for name in re.search(r"hosts=\((.*?)\)", FILES["everywhere.sh"])[1].split():
            (hosts / name).mkdir()
        path = f"{stubs}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | build.KERNEL | {"PATH": path, "HOSTS": str(hosts)}
        return Desk(folder, env)

    return lay


@pytest.fixture(scope="module")
def laptop(desk) -> tuple[Path, dict[str, str]]:
    """Do what the page says, in its order; return the folder and what was said."""
    at, said = desk(), {}
    (dry,) = commands("A grid")
    said["dry"] = at.type(dry)
    assert not (at.folder / "runs").exists()
    run, status = commands("Run it, stop it, go on")
    units = at.folder / "runs" / "rates" / "units"
    said["interrupted"] = at.interrupt(run, lambda: any(units.glob("*/*")))
    said["on"] = at.type(run, 1)
    said["status"] = at.type(status)
    retry, other = commands("When a job fails")
    page = at.folder / "rates.toml"
    page.write_text(page.read_text().replace("[2, 4, 5]", "[2, 4]"))
    said["mended"] = at.type(retry)
    said["other"] = at.type(other)
    for command in commands("One table, one picture"):
        said["picture"] = at.type(command)
    return at.folder, said


def test_every_file_and_command_is_tried():
    assert list(FILES) == ["rates.toml", "ages.toml", "rates.sh", "everywhere.sh"]
    there = {title: len(commands(title)) for title in SECTIONS}
    assert list(there.values()) == [1, 2, 2, 1, 2, 3, 1, 1]
    lines = [line for _, text in re.findall(r"^(`{3})\w*\n(.*?)^\1$", PAGE, re.M | re.S)
             for line in text.splitlines()]  # fmt: skip
    assert [line for line in lines if len(line) > 88] == []


@pytest.mark.parametrize(
    "text", [*FILES.values(), *(c for title in SECTIONS for c in commands(title))]
)
def test_a_shell_can_read_it(text):
    if text.startswith("#!") or text not in FILES.values():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert not done.returncode and not done.stderr


def test_it_stops_and_goes_on(laptop):
    _, said = laptop
    assert len(re.findall(r"^\w+ +participation fig1\.smoke +9 ", said["dry"], re.M)) == 3
    assert "Interrupted. Run the same command again to go on." in said["interrupted"]
    assert "18 done, 9 failed" in said["on"] and "18 done, 9 failed" in said["status"]
    assert "5 groups of N=20 clients must be equal" in said["status"]
    assert "18 done" in said["mended"] and "failed" not in said["mended"]
    assert "6 done" in said["other"]


def test_it_ends_in_a_table_and_a_picture(laptop):
    folder, said = laptop
    assert "Wrote runs/rates/headline.svg" in said["picture"]
    assert "amplified.lr" in (folder / "runs" / "rates" / "headline.svg").read_text("utf-8")
    rows = pd.read_csv(folder / "runs" / "rates" / "store" / "rows.csv.gz")
    assert rows[["amplified.lr", "cohort", "axis seed"]].drop_duplicates().shape == (18, 3)
    s = catalogue.settings("participation", "fig1", "smoke")
    assert set(rows["run"]) == {run["run"] for run in s["runs"]}
    short = pd.read_csv(folder / "runs" / "short" / "jobs.csv")
    assert set(short["status"]) == {"done"} and set(short["seed"]) == {4} and len(short) == 6


def test_notebooks_are_jobs(desk):
    at, section = desk(), "Notebooks as jobs"
    first, last = re.findall(r"^```python\n(.*?)^```$", SECTIONS[section], re.M | re.S)
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in (first, last)]
    for cell, tag in zip(cells, ("parameters", "headline"), strict=True):
        cell.metadata["tags"] = [tag]
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    page = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": spec})
    nbformat.write(page, at.folder / "ages.ipynb")
    run, retry = commands(section)
    said = at.type(run, 1)
    assert "2 failed" in said and "patients.csv" in said
    assert "2 done" in at.type(retry)
    table = pd.read_csv(at.folder / "runs" / "ages" / "jobs.csv").set_index("hospital")
    assert table["headline"].to_dict() == {"east": 45.0, "west": 61.0}
    assert len(list(at.folder.glob("runs/ages/jobs/*/notebook.ipynb"))) == 2


@pytest.mark.parametrize("section", ["Under Slurm", "On machines that you reach by ssh"])
def test_shards_finish_the_grid(desk, section):
    at, short = desk(), {"= 1000": "= 200", "[2, 4, 5]": "[2, 4]", "=1-3": "=1-2"}
    short |= {"task=2": "task=1", "(ada emmy sofja)": "(ada emmy)"}
    for name, text in FILES.items():
        for long in short:
            text = text.replace(long, short[long])
        (at.folder / name).write_text(text)
    for command in commands(section):
        at.type(command)
    table = pd.read_csv(at.folder / "runs" / "rates" / "jobs.csv")
    assert list(table["status"]) == ["done"] * 18
    disks = [Path(at.env["HOSTS"]) / host for host in ("ada", "emmy")]
    own = [len(list(disk.glob("study/runs/rates/jobs/*"))) for disk in disks]
    assert own == ([0, 0] if section == "Under Slurm" else [9, 9])
