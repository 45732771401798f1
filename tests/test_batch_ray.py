"""A batch on a Ray cluster of two nodes, both on this machine: one of them is lost half-way."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import build
import nbformat
import psutil
import pytest

from fedlib.errors import FedlibError
from fedlib.lab import batch
from fedlib.lab.batch import spread

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
pytestmark = [pytest.mark.slow, pytest.mark.long]

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
FEDLIB = [sys.executable, "-m", "fedlib", "batch", "run"]

TRAINING = """
[set]
paper = "participation"
experiment = "fig1"
profile = "smoke"
rounds = 15000
[grid]
window = [50, 100, 150, 200, 250]
seed = [1, 2]
"""
DRAWING = """
[set]
paper = "toy"
experiment = "draw"
profile = "quick"
[grid]
"""
STUDY = '''
"""A study that draws, raises or ends its process; later seeds wait while their gate is there."""

import os
import time

import numpy as np
import pandas as pd

from fedlib.lab.job import Job, Outcome, alike


@alike("seeds")
def draw(job: Job) -> Outcome:
    case = job.settings["case"]
    if case == "raises":
        raise ValueError("This case is not foreseen.")
    if case == "ends":
        os._exit(9)
    while max(job.seeds) > 2 and os.path.exists(job.settings["gate"]):
        time.sleep(0.1)
    values = [np.random.default_rng(seed).normal() for seed in job.seeds]
    same = dict(run="draw", round=1, split="train", metric="loss")
    rows = [dict(same, seed=s, value=v) for s, v in zip(job.seeds, values)]
    return Outcome(pd.DataFrame(rows), {}, {})
'''
EXPERIMENTS = """
[profiles.quick]
seeds = 1
[common]
kind = "toy_study:draw"
dataset = "digits"
[draw]
where = "nowhere"
title = "Numbers, drawn slowly"
only = ["quick"]
case = "well"
gate = "nowhere"
"""


class Cluster:
    """Two nodes of one core each, the second with a GPU that is none.

    What belongs to them is known by its environment.
    """

    def __init__(self, home: Path) -> None:
        self.home, self.head, self.second = home, None, None

    def begin(self) -> None:
        with socket.socket() as one, socket.socket() as two:
            ports = [(s.bind(("127.0.0.1", 0)), s.getsockname()[1])[1] for s in (one, two)]
        self.address = f"127.0.0.1:{ports[0]}"
        self.env = {name: v for name, v in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {
            "RAY_TMPDIR": str(self.home),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
        }
        self.env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{build.ROOT}{os.pathsep}{self.home}"}
        self.head = self._start("--head", f"--port={ports[0]}", f"--dashboard-port={ports[1]}",
                                "--include-dashboard=false")  # fmt: skip
        eventually(lambda: spread._knock(self.address) is None, self.head, 300)
        self.second = self._start(f"--address={self.address}", "--num-gpus=1")
        eventually(lambda: len(self.raylets()) == 2, self.second, 300)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        log = (self.home / "nodes.log").open("ab")
        small = ["--num-cpus=1", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1"]
        command = [*RAY, "start", *words, *small, "--block", "--disable-usage-stats"]
        return subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def raylets(self) -> list[psutil.Process]:
        return [p for p in family(self.head) + family(self.second) if p.name() == "raylet"]

    def left(self) -> list[psutil.Process]:
        """Return every process of the cluster that is still there, whoever is its parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = [*process.cmdline(), process.environ().get("RAY_TMPDIR", "")]
                if any(str(self.home) in word for word in words):
                    found.append(process)
        return found

    def close(self) -> list[psutil.Process]:
        """Kill what there is; return what could not be killed."""
        for node in (self.head, self.second):
            if node:
                kill(family(node))
                node.wait()
        for _ in range(20):  # what a dying process has just started is found the next time
            if not (found := self.left()):
                break
            kill(found)
        return found


def family(parent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        root = psutil.Process(parent.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def eventually(happens: Callable[[], bool], process: subprocess.Popen, seconds: float) -> None:
    """Wait until something happens; fail when it does not in time, or the process ends before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError, psutil.Error):
            if happens():
                return
        if process.poll() is not None:
            pytest.fail(f"ended too early: {(process.communicate()[1] or b'').decode()}")
        time.sleep(0.1)
    pytest.fail(f"not after {seconds} seconds")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    home = Path(tempfile.mkdtemp(prefix="ray-"))  # names of sockets have to be short
    (home / "toy_study.py").write_text(STUDY)
    (home / "papers" / "toy").mkdir(parents=True)
    (home / "papers" / "toy" / "experiments.toml").write_text(EXPERIMENTS)
    made = Cluster(home)
    try:
        made.begin()
        yield made
    finally:
        left = made.close()
        shutil.rmtree(home, ignore_errors=True)
    assert not left


@pytest.fixture
def start(cluster, tmp_path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start ``fedlib batch run`` on the cluster, in a process of its own."""
    begun = []

    def go(grid: str, *words: str, address: str = cluster.address) -> subprocess.Popen[bytes]:
        (tmp_path / "grid.toml").write_text(grid)
        command = [*FEDLIB, "grid.toml", "--out", "there", "--ray", address, *words]
        env = {**cluster.env, "FEDLIB_PAPERS": str(cluster.home / "papers")}
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe))
        return begun[-1]

    yield go
    for process in begun:
        process.kill()
        process.communicate()


def done(folder: Path) -> int:
    return sum('"done"' in page.read_text() for page in folder.glob("jobs/*/state.json"))


def rows(folder: Path) -> dict[str, bytes]:
    """Return the rows of every record, byte for byte."""
    pages = sorted(folder.glob("jobs/*/*/*.csv.gz"))
    return {str(p.relative_to(folder)): gzip.decompress(p.read_bytes()) for p in pages}


def test_a_job_fails_another_ends_its_process_and_others_are_done(cluster, start, tmp_path):
    running = start(DRAWING + 'case = ["well", "raises", "ends"]')
    said, complained = (text.decode() for text in running.communicate(timeout=600))
    assert running.returncode == 1 and "1 done" in said and "2 failed" in said, said + complained
    assert "Traceback" not in said + complained
    table = batch.status(tmp_path / "there").set_index("case")
    assert list(table["status"]) == ["done", "failed", "failed"]
    told = {case: told_of(tmp_path / "there", job) for case, job in table["job"].items()}
    assert told["raises"].startswith("Traceback") and "toy_study.py" in told["raises"]
    assert table["why"]["raises"] == "ValueError: This case is not foreseen."
    assert "Ray gave it up: The worker died" in told["ends"]
    assert len(rows(tmp_path / "there")) == 1


def told_of(folder: Path, job: str) -> str:
    page = folder / "jobs" / job / "error.txt"
    return page.read_text() if page.exists() else ""


def test_interrupted_it_goes_on(start, tmp_path):
    folder, gate = tmp_path / "there", tmp_path / "gate"
    gate.touch()
    grid = DRAWING + f"gate = ['{gate}']\nseed = [1, 2, 3, 4]"
    running = start(grid)
    eventually(lambda: done(folder) == 2, running, 300)  # a unit has two jobs
    running.send_signal(signal.SIGINT)
    said, complained = (text.decode() for text in running.communicate(timeout=600))
    assert running.returncode == 130, said + complained
    assert "Run the same command again" in complained
    before = {page: page.stat().st_mtime_ns for page in folder.glob("jobs/*/state.json")}
    assert len(before) == 2 and not list(folder.glob(".*.lock"))
    gate.unlink()
    assert start(grid).wait(600) == 0
    assert done(folder) == 4
    assert {page: page.stat().st_mtime_ns for page in before} == before, "none was run again"
    pages = [json.loads(page.read_text()) for page in folder.glob("jobs/*/toy/*.json")]
    assert [len(page["beside"]) for page in pages] == [1] * 4, "one run of four, shared by two"


def test_whoever_asks_for_a_gpu_waits_for_one(start, tmp_path):
    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    say = "import os\nprint('GPU', os.environ.get('CUDA_VISIBLE_DEVICES'), device)"
    for tag, source in (("parameters", "device = 'cpu'"), ("said", say)):
        book.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": [tag]}))
    nbformat.write(book, tmp_path / "a.ipynb")
    running = start('notebook = "a.ipynb"\n[grid]\ndevice = ["cuda", "cpu"]')
    said, complained = (text.decode() for text in running.communicate(timeout=600))
    assert running.returncode == 0, said + complained
    made = [p.read_text() for p in (tmp_path / "there").glob("jobs/*/notebook.ipynb")]
    assert [sum(f"GPU {n} {device}" in text for text in made)
            for n, device in ((0, "cuda"), (0, "cpu"))] == [1, 0]  # fmt: skip


def test_a_gpu_that_no_node_has_is_told_whichever_job_asks_for_it(tmp_path, monkeypatch):
    node = {"Resources": {"CPU": 1.0}, "Alive": True}
    gone = {"Resources": {"CPU": 1.0, "GPU": 1.0}, "Alive": False}
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "nodes", lambda: [node, gone])
    grid = tomllib.loads(TRAINING)
    for devices in (["cpu", "cuda"], ["cuda", "cpu"]):
        grid["grid"] = {"device": devices}
        with pytest.raises(FedlibError, match="no node of the cluster at 'auto' has a GPU"):
            batch.run(grid, tmp_path, ray="auto", progress=False)


def test_nobody_listens(tmp_path):
    began = time.monotonic()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(FedlibError, match=f"No Ray cluster answers at '{address}'"):
            batch.run(tomllib.loads(TRAINING), tmp_path, ray=address, progress=False)
    assert time.monotonic() - began < 60
    assert batch.status(tmp_path)["status"].eq("waiting").all()
    with pytest.raises(FedlibError, match="No Ray cluster answers at 'somewhere'"):
        batch.run(tomllib.loads(TRAINING), tmp_path, ray="somewhere", progress=False)
    with pytest.raises(FedlibError, match="HOST:PORT here; got 'ray://somewhere:10001'"):
        batch.run(tomllib.loads(TRAINING), tmp_path, ray="ray://somewhere:10001", progress=False)


def test_somebody_else_listens(tmp_path):
    began = time.monotonic()
    with socketserver.TCPServer(("127.0.0.1", 0), NotRay) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(FedlibError, match="what listens there is not Ray"):
            batch.run(tomllib.loads(TRAINING), tmp_path, ray=address, progress=False)
        server.shutdown()
    assert time.monotonic() - began < 60


class NotRay(socketserver.BaseRequestHandler):
    """Answers as a web server does."""

    def handle(self) -> None:
        self.request.recv(100)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_unit_has_all_its_cores_on_one_node(monkeypatch):
    cores = [(1, True), (7, True), (16, False)]
    nodes = [{"Resources": {"CPU": float(n)}, "Alive": alive} for n, alive in cores]
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Resources": {}, "Alive": True}])
    with spread._joined("auto", 2) as places:
        assert places == 3
    message = "No node of the cluster at 'auto' has 8 cores"
    with pytest.raises(FedlibError, match=message), spread._joined("auto", 8):
        pass


def test_a_node_is_lost_halfway(cluster, start, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    running, seen = start(TRAINING), []

    def halfway() -> bool:
        seen.append(done(there))
        busy = [p for p in family(cluster.second) if p.name().startswith("ray::_elsewhere")]
        return bool(busy) and seen[-1] > 0

    eventually(halfway, running, 300)
    kill(family(cluster.second))  # waits for their end; meanwhile the other node goes on
    assert 0 < seen[-1] < 10, "it was lost before all jobs were done"
    batch.run(tmp_path / "grid.toml", here, progress=False)
    said, complained = (text.decode() for text in running.communicate(timeout=600))
    assert running.returncode == 0 and "10 done" in said, said + complained
    assert "raylet" not in said, "what Ray prints of a lost node is not for the reader of a table"
    assert len(rows(here)) == 10 and rows(there) == rows(here)
