"""Parties as processes over MPI: the loss of a plain loop, and no fault without a name."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from fedlib.errors import FedlibError
from fedlib.lab import cli
from fedlib.lab.vertical.mpi import find_launcher, run_parties
from fedlib.lab.vertical.wire import MASKS, SCORES, _places
from fedlib.papers.vertical import Problem, centralised, split_features
from fedlib.papers.vertical.secure import log_depth, seats

try:
    find_launcher()
    why = ""
except FedlibError as error:
    why = str(error)
needs_mpi = pytest.mark.skipif(bool(why), reason=why)

N, D, Q = 100, 12, 4
TOLERANCE = {"sgd": 5e-3, "svrg": 1e-4, "saga": 1e-4}
"""Of the loss. SGD's noise stays with both; the others have converged."""


def problem(seed: int = 0, **options) -> Problem:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, D)) / np.sqrt(D)
    y = np.where(x @ rng.standard_normal(D) + 0.3 * rng.standard_normal(N) > 0, 1.0, -1.0)
    return Problem(x, y, split_features(D, Q), **{"lam": 0.05} | options)


# --- without MPI ----------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [2, 3, 4, 5, 8])
def test_every_party_knows_its_place_in_the_trees_of_every_dominator(q):
    for root in range(q):
        places = [_places(q, root, me) for me in range(q)]
        for kind in (SCORES, MASKS):
            above = [place[kind][0] for place in places]
            assert above[root] is None and above.count(None) == 1
            for me, place in enumerate(places):
                assert place[kind][1] == 1 + above.count(me)
                way = [me]
                while way[-1] != root:
                    way.append(above[way[-1]])
                    assert len(way) <= q, "a circle"
    assert seats(q, 1)[0] == 1 and log_depth(q)


def test_a_party_loads_neither_torch_nor_numba():
    code = "import sys; import fedlib.lab.vertical.wire; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "fedlib.papers.vertical.secure" in loaded
    assert not loaded & {"torch", "numba", "pandas", "sklearn"}


def test_without_mpi_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "mpi4py" else real(name, *a)
    )
    done = CliRunner().invoke(cli.app, ["vertical", "mpi"])
    assert done.exit_code == 2 and "pip install 'fedlib[vertical]'" in done.output
    assert "Traceback" not in done.output


def test_without_a_launcher_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FedlibError, match="no mpiexec to start processes with.*mpi4py mpich"):
        find_launcher()


def test_the_command_line_lists_papers_commands():
    said = CliRunner().invoke(cli.app, ["--help"]).output
    assert "vertical" in said and "bench" in said
    said = CliRunner().invoke(cli.app, ["vertical", "mpi", "--help"], terminal_width=120).output
    for option in ("--parties", "--active", "--algorithm", "--data", "--patience"):
        assert option in said


@needs_mpi
@pytest.mark.parametrize(
    ("options", "said"),
    [(dict(active=0), "at least one holds labels"), (dict(active=Q + 1), "at most all"),
     (dict(epochs=0), "epochs"), (dict(patience=0), "patience"), (dict(lr=-1), "lr")],
)  # fmt: skip
def test_what_is_asked_for_is_checked_before_anything_starts(options, said):
    with pytest.raises(FedlibError, match=said):
        run_parties(problem(), "sgd", **{"lr": 0.1} | options)


# --- with it --------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sgd", "svrg", "saga"])
def test_processes_reach_the_loss_of_a_plain_loop(method):
    given, epochs, lr = problem(), 12, 0.05 if method == "sgd" else 0.4
    run = run_parties(given, method, lr, epochs=epochs, active=2)
    indices = np.random.default_rng(1).integers(N, size=epochs * N)
    plain = given.objective(centralised(given, method, lr, indices)[-1])
    assert run.rows[-1].loss == given.objective(run.w)
    assert abs(run.rows[-1].loss - plain) < TOLERANCE[method]
    assert run.rows[0].loss == np.log(2) and run.rows[-1].loss < 0.9 * np.log(2)
    assert [row.steps for row in run.rows] == [k * N for k in range(epochs + 1)]
    own = {"sgd": 0, "svrg": epochs, "saga": 1}[method]
    assert run.rows[-1].epoch == epochs + own
    steps = epochs * N + own  # a pass is one sum of vectors
    assert run.messages["score"] == run.messages["mask"] == (Q - 1) * steps
    assert run.messages["backward"] == (Q - 1) * epochs * N
    assert run.bytes["backward"] == 24 * run.messages["backward"]


def gone(pids: dict[int, int]) -> bool:
    """Tell whether all processes have ended, soon."""
    for _ in range(100):
        left = []
        for pid in pids.values():
            try:
                os.kill(pid, 0)
                left.append(pid)
            except ProcessLookupError:
                pass
        if not left:
            return True
        time.sleep(0.1)
    return False


def interfering(party: int, number: int, seen: dict[int, int]):
    """Return what sends a signal to a party once all have started."""

    def watch(pids):
        if len(pids) == Q and not seen:
            seen.update(pids)
            os.kill(pids[party], number)

    return watch


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, r"Party 2 \(process \d+\) died: Killed .*All parties were ended"),
     (signal.SIGSTOP, r"Party 2 \(process \d+\) has been silent for 5 seconds")],
    ids=["killed", "stopped"],
)  # fmt: skip
def test_a_party_that_dies_or_stops_ends_the_run_and_is_named(number, said):
    pids: dict[int, int] = {}
    begun = time.monotonic()
    with pytest.raises(FedlibError, match=said):
        run_parties(problem(), "svrg", 0.1, epochs=10_000, active=2, patience=5,
                    watch=interfering(2, number, pids))  # fmt: skip
    assert len(pids) == Q and gone(pids), "no process is left"
    assert time.monotonic() - begun < 300


@needs_mpi
@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_who_saw_it():
    wild = problem(loss="squared", regulariser="none")
    with pytest.raises(FedlibError, match=r"Party \d failed.*diverges. Take a smaller lr"):
        run_parties(wild, "sgd", 1e6, epochs=3, active=1)


@needs_mpi
@pytest.mark.slow
def test_the_command_runs_and_tells_of_its_messages():
    call = ["vertical", "mpi", "--parties", "2", "--active", "1", "--algorithm", "saga",
            "--data", "diabetes", "--epochs", "2", "--lr", "0.01"]  # fmt: skip
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 0, done.output
    assert "diabetes: 354 rows, 10 columns, 2 parties, 1 with labels." in done.output
    assert "Root mean square error on 88 test rows" in done.output
    assert "708 backward" in done.output
