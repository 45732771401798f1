"""Parties as processes over MPI: the loss of a plain loop, and no fault without a name."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from scipy import sparse
from typer.testing import CliRunner

from fedlib.errors import FedlibError
from fedlib.lab import bench, cli
from fedlib.lab.vertical import measured, mpi
from fedlib.lab.vertical.mpi import find_launcher, predicted_run, run_parties
from fedlib.lab.vertical.wire import MASKS, SCORES, Part, _places, _seconds
from fedlib.papers.vertical import Problem, centralised, split_features, straggler, synchronous
from fedlib.papers.vertical.secure import log_depth, seats
from fedlib.papers.vertical.setup import Setup
from fedlib.population.delays import Deterministic

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


def test_a_party_loads_neither_torch_nor_numba(tmp_path):
    setup = Setup(problem(), "saga", 0.1, 2, compute=0.1, delays=Deterministic(0.1))
    mpi._deal(setup, tmp_path, waiting=True, equal=False, patience=60)
    code = f"""if True:
        import pickle, sys; import fedlib.lab.vertical.wire
        task = pickle.loads(open({str(tmp_path / "party-1")!r}, "rb").read())
        print(task.setup.table, *sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"full", "fedlib.papers.vertical.secure"} <= loaded
    assert not loaded & {"torch", "numba", "pandas", "sklearn"}


def test_a_party_gets_its_own_columns_and_labels_only_if_it_is_active(tmp_path):
    given = problem()
    setup = Setup(given, "svrg", 0.1, (3, 1), compute=[1, 2, 3, 4], steps=2 * N)
    mpi._deal(setup, tmp_path, waiting=False, equal=True, patience=60)
    for l, block in enumerate(given.blocks):
        task: Part = pickle.loads((tmp_path / f"party-{l}").read_bytes())
        assert np.array_equal(task.setup.problem.x, given.x[:, block])
        assert (task.setup.problem.y == 1).all() and (task.y is not None) == (l in (1, 3))
        assert task.setup.compute == [l + 1]
        assert (task.active, task.steps, task.loop) == ((3, 1), 2 * N, N)


def test_without_mpi_it_says_what_to_install(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "mpi4py" else real(name, *a)
    )
    done = CliRunner().invoke(cli.app, ["vertical", "mpi"])
    assert done.exit_code == 2 and "pip install mpi4py mpich" in done.output
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
     (dict(epochs=0), "epochs"), (dict(patience=0), "patience"), (dict(lr=-1), "lr"),
     (dict(compute=-1), "compute"), (dict(delays=0.1), "delays is a delay law"),
     (dict(hosts="none.txt"), "no file none.txt. It names a host a line"),
     (dict(hosts=__file__), "a folder that all of them see"),
     (dict(hosts=__file__, folder=os.path.dirname(__file__)), "is not empty. Take a new folder")],
)  # fmt: skip
def test_what_is_asked_for_is_checked_before_anything_starts(options, said):
    with pytest.raises(FedlibError, match=said):
        run_parties(problem(), "sgd", **{"lr": 0.1} | options)


BLOCK, MESSAGE = 0.03, 0.04  # seconds


def by_hand(waiting: bool, steps: int, slow: float) -> float:
    """Return the seconds of two parties, the first of which has the labels."""
    b, m = BLOCK, MESSAGE
    late = (1 + slow) * b  # the other's block
    score = m + late + m  # request, reading, answer: the own reading is over before
    if waiting:
        return steps * (score + m + late)
    return (steps - 1) * (score + b) + score + m + late  # its own update, then the next step


@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_the_simulator_of_the_same_settings_has_the_seconds_of_a_calculation(waiting, slow):
    run = predicted_run(two_parties(), "sgd", 0.1, **slept(waiting, slow))
    assert run.rows[-1].time == pytest.approx(by_hand(waiting, 10, slow), rel=1e-12)
    bare = predicted_run(two_parties(), "sgd", 0.1, epochs=1, waiting=waiting)
    assert bare.rows[-1].time == 0, "as processes, which are told nothing, do not sleep"


def two_parties() -> Problem:
    x = np.random.default_rng(3).standard_normal((10, 4))
    return Problem(x, np.where(x[:, 0] > 0, 1.0, -1.0), split_features(4, 2))


def slept(waiting: bool, slow: float) -> dict:
    compute = straggler(2, 1, slow, BLOCK / 2)  # two columns each
    return dict(epochs=1, waiting=waiting, compute=compute, delays=Deterministic(MESSAGE))


def test_the_kept_table_has_every_case_and_what_the_simulator_still_says():
    rows = bench.load_bench("processes")[-1]["rows"]
    assert len(rows) == 3 * 3 * 2 * 2
    for row in rows:
        q, slow = row["parties"], row["slower"]
        told = predicted_run(
            measured.made(q), row["method"], measured.RATE, waiting=row["waiting"],
            **measured.run_settings(q, slow),
        )  # fmt: skip
        assert row["simulated"] == pytest.approx(told.rows[-1].time, abs=1e-3)
        assert row["least"] <= row["seconds"] <= row["most"]
        assert measured.agrees(row), row


def test_sparse_rows_cost_what_their_entries_cost():
    x = np.array([[1.0, 0, 2], [0, 0, 3], [0, 0, 0]])
    given = Problem(sparse.csr_array(x), np.array([1.0, -1, 1]), (np.arange(3),))
    full = Setup(given, "saga", 0.1, compute=2.0, table="full")
    for setup, writes in ((Setup(given, "saga", 0.1, compute=2.0), [4, 2, 0]), (full, [6, 6, 6])):
        assert [part.tolist() for part in _seconds(setup)] == [[4, 2, 0], writes]
    dense = Problem(x, given.y, given.blocks)
    assert (np.array(_seconds(Setup(dense, "sgd", 0.1, compute=2.0))) == 6).all()


@pytest.mark.parametrize(
    ("seconds", "expected"), [(1.0, True), (1.14, True), (1.16, False), (0.98, True), (0.96, False)]
)
def test_measured_seconds_agree_within_what_is_said(seconds, expected):
    assert measured.agrees({"seconds": seconds, "simulated": 1.0}) == expected


# --- with it --------------------------------------------------------------------------------------


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sgd", "svrg", "saga"])
def test_processes_that_wait_take_the_very_steps_of_the_simulator(method):
    given, setting = problem(), dict(epochs=2, active=3, seed=5)  # 3 does not divide 100
    run = run_parties(given, method, 0.1, waiting=True, **setting)
    told = synchronous(given, method, 0.1, **setting)
    assert np.abs(run.w - told.w).max() < 1e-10  # scores are rounded to 40 bits
    assert run.rows[-1].loss == pytest.approx(told.rows[-1].loss, abs=1e-10)
    assert [row.steps for row in run.rows] == [0, N, 2 * N] and run.messages["pot"] == 0


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.parametrize("slow", [0.0, 0.5])
def test_processes_take_the_seconds_of_a_calculation(waiting, slow):
    expected = by_hand(waiting, 10, slow)

    def in_time() -> bool:
        seconds = run_parties(two_parties(), "sgd", 0.1, **slept(waiting, slow)).rows[-1].time
        assert expected <= seconds, "sleep ends late, never early"
        return seconds < 1.3 * expected + 0.2

    assert any(in_time() for _ in range(5)), "a busy machine spoils a run, not five"


@needs_mpi
@pytest.mark.slow
def test_from_a_pot_the_faster_party_takes_more_steps():
    slow = dict(compute=straggler(2, 0, 0.9, BLOCK), delays=Deterministic(0.001))

    def as_told() -> bool:
        equal, pot = (
            run_parties(two_parties(), "sgd", 0.1, epochs=2, active=2, equal=equal, **slow)
            for equal in (True, False)
        )
        assert equal.messages["pot"] == 0 < pot.messages["pot"]
        # The first takes 1.9 times as long for its own block, and both wait for its score.
        sooner = pot.rows[-1].time < 0.95 * equal.rows[-1].time
        return sooner and 10 <= pot.messages["pot"] <= 18

    assert any(as_told() for _ in range(5)), "a busy machine spoils a run, not five"


@needs_mpi
@pytest.mark.slow
def test_hosts_are_reached_as_the_launcher_reaches_them(tmp_path, monkeypatch):
    """A stand-in for ssh notes the host and runs the command here."""
    ssh, hosts, log = tmp_path / "ssh", tmp_path / "hosts", tmp_path / "log"
    ssh.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\n'
        f'echo $1 >> {log}; shift\nexec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    hosts.write_text("alpha:2\nbeta:2\n")
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", str(ssh))
    setting = dict(epochs=1, active=2, waiting=True)
    run = run_parties(problem(), "sgd", 0.1, hosts=hosts, folder=tmp_path / "shared", **setting)
    assert sorted(log.read_text().split()) == ["alpha", "beta"]
    assert np.abs(run.w - synchronous(problem(), "sgd", 0.1, epochs=1, active=2).w).max() < 1e-10
    wild = problem(loss="squared", regulariser="none")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FedlibError, match=r"Party \d failed.*diverges. Take a smaller lr"):
        run_parties(wild, "sgd", 1e6, epochs=3, hosts="~/hosts", folder=tmp_path / "other")


@needs_mpi
@pytest.mark.slow
def test_a_table_of_processes(monkeypatch):
    for name, value in (("PARTIES", (2,)), ("METHODS", ("saga",)), ("SLOW", (0.4,)), ("PASSES", 1),
                        ("BLOCK", 0.01), ("MESSAGE", 0.01)):  # fmt: skip
        monkeypatch.setattr(measured, name, value)
    waits, free = measured.processes_table(repeats=1)
    assert waits["waiting"] and not free["waiting"]
    for row in (waits, free):
        assert row["least"] == row["seconds"] == row["most"] >= 0.97 * row["simulated"]
    assert waits["loss"] == waits["simulated loss"]


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
    assert run.bytes["backward"] == 32 * run.messages["backward"]
    assert run.messages["pot"] < epochs * N


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
    ("number", "patience", "said"),
    [(signal.SIGKILL, 60, r"Party 2 \(process \d+\) died: Killed .*All parties were ended"),
     (signal.SIGSTOP, 8, r"Party 2 \(process \d+\) has been silent for 8 seconds")],
    ids=["killed", "stopped"],
)  # fmt: skip
def test_a_party_that_dies_or_stops_ends_the_run_and_is_named(number, patience, said):
    pids: dict[int, int] = {}
    begun = time.monotonic()
    with pytest.raises(FedlibError, match=said):
        run_parties(problem(), "svrg", 0.1, epochs=10_000, active=2, patience=patience,
                    watch=interfering(2, number, pids))  # fmt: skip
    assert len(pids) == Q and gone(pids), "no process is left"
    assert time.monotonic() - begun < 300


def test_a_party_that_outlives_a_failed_launcher_is_ended(tmp_path):
    """Else it may still write while its folder is deleted."""
    code = f"while touch {tmp_path}/still; do :; done & echo $! >{tmp_path}/pid; exit 3"
    launcher = subprocess.Popen(["sh", "-c", code], start_new_session=True)
    assert launcher.wait() == 3
    pids = {0: int((tmp_path / "pid").read_text())}
    os.kill(pids[0], 0)
    mpi._end(launcher, pids)
    (tmp_path / "still").unlink(missing_ok=True)
    time.sleep(0.1)
    assert not (tmp_path / "still").exists()


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
    assert "masks hide nothing here" in done.output
    assert "Root mean square error on 88 test rows" in done.output
    assert "708 backward" in done.output
