"""VFB² for real: one process a party, over MPI, on the clock of this machine or of several.

:func:`run_parties` deals the columns out to files, one a party, lets ``mpiexec`` start a process
for each (`fedlib.lab.vertical.wire`), watches them, and puts the blocks together in the end.
:func:`predicted_run` asks the simulator for the same run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import fedlib
from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError
from fedlib.files import make_folder
from fedlib.lab.vertical.wire import Part
from fedlib.papers.vertical.problem import Problem
from fedlib.papers.vertical.runs import Row, Run
from fedlib.papers.vertical.secure import log_depth
from fedlib.papers.vertical.setup import Setup, at_least
from fedlib.paths import expand
from fedlib.population.delays import Deterministic, Law, check_law

INSTALL = (
    "Install mpi4py and an MPI: pip install mpi4py mpich. The "
    "simulator, fedlib.papers.vertical.simulate_parties, needs neither."
)
START = 300.0
"""Seconds that processes may take to start, as each imports NumPy, SciPy and MPI."""

_KINDS = ("ask", "score", "mask", "backward", "pass", "barrier", "pot")
_TABLE = 1 << 31  # bytes that SAGA's tables may take in all


@dataclass(frozen=True)
class WireRun:
    """What came of the processes.

    Attributes
    ----------
    w
        The model, ``[d]``.
    rows
        After each pass over the data: seconds on the clock since all parties were there, passes
        (SVRG's and SAGA's own counted), steps, and the loss. Parties pass the mark one after the
        other; a row has the time of the last of them.
    messages, bytes
        Sent in all, by kind: ``"ask"`` for a score, ``"score"`` and ``"mask"`` up the two trees,
        ``"backward"`` (ϑ and i), ``"pass"`` (all ϑ at once, or the opening of a phase),
        ``"barrier"``, ``"pot"`` (who began a step may take another one).
    """

    w: np.ndarray
    rows: list[Row]
    messages: dict[str, int]
    bytes: dict[str, int]


def run_parties(
    problem: Problem,
    method: str,
    lr: float,
    *,
    epochs: int = 10,
    active: int | Sequence[int] = 1,
    threads: int | None = None,
    table: str | None = None,
    waiting: bool = False,
    equal: bool = False,
    compute: float | Sequence[float] = 0.0,
    delays: Law = Deterministic(0.0),  # noqa: B008, a frozen value
    seed: int = 0,
    hosts: str | Path | None = None,
    folder: str | Path | None = None,
    patience: float = 60.0,
    watch: Callable[[dict[int, int]], None] | None = None,
) -> WireRun:
    """Run VFB², or its synchronous twin, with a process for each party.

    Parameters
    ----------
    problem
        Data, parties (two or more) and objective. A process gets its own columns, and the labels
        if it is active.
    method, lr, active, threads, table
        As in :func:`~fedlib.papers.vertical.algorithm.simulate_parties`. Writes of threads take
        turns; what they have read may be out of date.
    epochs
        Passes of n dominated steps; with SVRG each begins with a snapshot.
    waiting
        True: VFB, in the rounds of :func:`~fedlib.papers.vertical.baselines.synchronous`.
    equal
        True: active parties have equal shares of the steps. False: whoever is free takes the next
        one from a common pot, as in the simulator; the first active party keeps it, and gives a
        step out when the one before begins.
    compute
        Seconds a number for which a party sleeps when it reads or updates its block, as the
        simulator counts them; one for all, or one a party. For a slow party:
        ``straggler(q, party, 0.4, compute)``.
    delays
        Law of the seconds that a message is held, over its own time.
    seed
        Draws the samples, those of the simulator. Arrival times are the machine's, so two runs
        differ in rounding and in the order of updates; with ``waiting`` in rounding alone.
    hosts
        A file that ``mpiexec`` takes with ``-hostfile``, a host a line. None: all on this machine.
    folder
        With ``hosts``: an empty or new folder that all of them see under this name.
    patience
        Seconds of silence after which a party counts as lost, and the run is ended.
    watch
        Called now and then with the process number of each party that has started; not with
        ``hosts``.

    Returns
    -------
    WireRun

    Raises
    ------
    FedlibError
        Without MPI, saying what to install; when a party dies or falls silent, naming it: all
        others are ended then.
    """
    check_whole_number("epochs", epochs)
    at_least("patience", patience, 1)
    check_law("delays", delays)
    setup = Setup(
        problem, method, lr, active, threads, compute, delays, table=table, seed=seed,
        steps=epochs * problem.n,
    )  # fmt: skip
    if problem.q < 2:
        raise FedlibError("Processes need two parties or more; one party needs no messages.")
    if method == "saga" and setup.table == "full" and 8 * problem.n * problem.d > _TABLE:
        raise FedlibError(
            f"SAGA's table of {problem.n} x {problem.d} numbers is too large. Let it remember ϑ "
            "alone: table='theta'."
        )
    launcher = find_launcher()
    with tempfile.TemporaryDirectory(prefix="fedlib-vertical-") as here:
        place = Path(here) if hosts is None else _shared(hosts, folder)
        _deal(setup, place, waiting, equal, patience)
        if hosts is None:
            slept = problem.n * problem.d * setup.compute.max()  # no pass takes longer
            _attend(launcher, problem.q, place, patience, slept, watch)
        else:
            _wait(launcher, problem.q, place, expand(hosts, "hosts"))
        return _collect(problem, method, place)


def predicted_run(
    problem: Problem, method: str, lr: float, *, epochs: int, waiting: bool = False, **settings: Any
) -> Run:
    """Return the simulator's run of what :func:`run_parties` does with the same settings.

    Sums go up the same trees, and requests are answered at once.
    """
    from fedlib.papers.vertical.algorithm import simulate_parties
    from fedlib.papers.vertical.baselines import synchronous

    settings = {"compute": 0.0} | settings | dict(epochs=epochs, trees=log_depth(problem.q))
    if waiting:
        return synchronous(problem, method, lr, **settings)
    return simulate_parties(problem, method, lr, prompt=True, log=False, **settings)


def find_launcher() -> str:
    """Return the ``mpiexec`` beside this Python, or on the path.

    Raises
    ------
    FedlibError
        Without it or without mpi4py, saying what to install.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise FedlibError(f"Processes talk over MPI, and mpi4py is not installed. {INSTALL}")
    beside = Path(sysconfig.get_path("scripts")) / "mpiexec"
    launcher = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if launcher is None:
        raise FedlibError(f"There is no mpiexec to start processes with. {INSTALL}")
    return launcher


def _shared(hosts: str | Path, folder: str | Path | None) -> Path:
    """Return the folder that all hosts see, made if need be."""
    if not expand(hosts, "hosts").is_file():
        raise FedlibError(f"There is no file {hosts}. It names a host a line, such as 'alpha:2'.")
    if folder is None:
        raise FedlibError("Several hosts need a folder that all of them see under the same name.")
    place = make_folder(expand(folder, "The folder").absolute())
    if any(place.iterdir()):
        raise FedlibError(f"{place} is not empty. Take a new folder for each run.")
    return place


def _deal(setup: Setup, folder: Path, waiting: bool, equal: bool, patience: float) -> None:
    """Write down what each party needs: its columns, the labels if it is active, what to do."""
    problem, none = setup.problem, np.ones(setup.problem.n)
    for l, block in enumerate(problem.blocks):
        part = replace(problem, x=problem.x[:, block], y=none, blocks=(np.arange(len(block)),))
        own = Setup(
            part, setup.method, setup.lr, compute=float(setup.compute[l]), delays=setup.delays[l],
            table=setup.table, seed=setup.seed,
        )  # fmt: skip
        task = Part(
            own, problem.y if l in setup.active else None, setup.active, setup.threads,
            setup.steps, problem.n if setup.method == "svrg" else setup.steps, waiting, equal,
            patience,
        )  # fmt: skip
        (folder / f"party-{l}").write_bytes(pickle.dumps(task))


def _wait(launcher: str, q: int, folder: Path, hosts: Path) -> None:
    """Start the processes on several hosts and wait; nobody but ``mpiexec`` sees them there."""
    with _started(launcher, q, folder, hosts) as (running, pids):
        running.wait()
    if running.returncode or not all((folder / f"result-{l}.npz").exists() for l in range(q)):
        raise FedlibError(_whose(folder, q, pids, [], running.returncode))


def _attend(
    launcher: str,
    q: int,
    folder: Path,
    patience: float,
    slept: float,
    watch: Callable[[dict[int, int]], None] | None,
) -> None:
    """Start the processes and stay with them; on any fault end all and say whose it was."""
    begun, beats = time.time(), np.memmap(folder / "beats", np.float64, "w+", shape=(q, 3))
    progress, moved = -1.0, begun
    with _lines(folder, q) as ended, _started(launcher, q, folder) as (running, pids):
        while running.poll() is None:
            ended(0.05)
            now, seen = time.time(), np.array(beats)
            pids.update({l: int(pid) for l, pid in enumerate(seen[:, 0]) if pid})
            if seen[:, 2].sum() != progress or len(pids) < q:
                progress, moved = seen[:, 2].sum(), now
            if watch is not None:
                watch(dict(pids))
            late = [l for l in pids if now - seen[l, 1] > patience
                    and not (folder / f"result-{l}.npz").exists()]  # fmt: skip
            if late:
                raise FedlibError(
                    f"Party {late[0]} (process {pids[late[0]]}) has been silent for {patience:g} "
                    "seconds; all parties were ended."
                )
            if now - moved > patience + slept:
                raise FedlibError(
                    f"No party has moved for {patience:g} seconds; all were ended. {_said(folder)}"
                )
            if len(pids) < q and now - begun > START:
                missing = [l for l in range(q) if l not in pids]
                raise FedlibError(
                    f"Parties {missing} have not started in {START:g} seconds; all were ended. "
                    f"{_said(folder)}"
                )
        pids.update({l: int(pid) for l, pid in enumerate(beats[:, 0]) if pid})
        if running.returncode or not all((folder / f"result-{l}.npz").exists() for l in range(q)):
            raise FedlibError(_whose(folder, q, pids, ended(0), running.returncode))


@contextlib.contextmanager
def _lines(folder: Path, q: int) -> Iterator[Callable[[float], list[int]]]:
    """Keep a pipe to each party, which it holds open as long as it lives.

    Yields what waits and returns the parties that have ended so far, the first one first. A
    launcher ends all when one dies and does not say reliably which it was.
    """
    selector, ended = selectors.DefaultSelector(), []

    def look(seconds: float) -> list[int]:
        for key, _ in selector.select(seconds):
            selector.unregister(key.fileobj)
            ended.append(key.data)
        if not selector.get_map():
            time.sleep(seconds)
        return ended

    with contextlib.ExitStack() as stack:
        stack.callback(selector.close)
        for l in range(q):
            os.mkfifo(folder / f"alive-{l}")
            line = os.open(folder / f"alive-{l}", os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, line)
            selector.register(line, selectors.EVENT_READ, l)
        yield look


def environment() -> dict[str, str]:
    """Return the environment in which ``mpiexec`` starts processes that find fedlib."""
    home = str(Path(fedlib.__file__).parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",  # there are as many processes as parties already
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # Open MPI
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",  # more parties than cores
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


@contextlib.contextmanager
def _started(
    launcher: str, q: int, folder: Path, hosts: Path | None = None
) -> Iterator[tuple[subprocess.Popen, dict[int, int]]]:
    """Start ``mpiexec``; whatever happens, leave no process behind."""
    env = environment()
    code = "from fedlib.lab.vertical.wire import main; main()"
    where = ["-hostfile", str(hosts)] if hosts else []
    if not hosts:
        env["HYDRA_LAUNCHER"] = "fork"  # MPICH: no ssh
    command = [launcher, *where, "-n", str(q), sys.executable, "-c", code, str(folder)]
    pids: dict[int, int] = {}
    with (folder / "output").open("wb") as output:
        try:
            running = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise FedlibError(f"{launcher} cannot be started: {error}. {INSTALL}") from error
        try:
            yield running, pids
        finally:
            _end(running, pids)


def _end(running: subprocess.Popen, pids: dict[int, int]) -> None:
    """End ``mpiexec`` and the parties that it leaves behind; return when they are gone.

    A launcher that has failed by itself may return while a party still writes in its folder.
    """
    if running.poll() == 0:
        return
    running.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(2)
    for pid in pids.values():  # one that was stopped does not hear anything softer
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    until = time.monotonic() + 2  # a machine may keep the numbers of those who have ended
    while any(map(_lives, pids.values())) and time.monotonic() < until:
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    """Tell whether there is a process of ours with this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _whose(folder: Path, q: int, pids: dict[int, int], ended: list[int], code: int) -> str:
    """Return a message that names the party at fault."""
    for l in range(q):
        error = folder / f"error-{l}"
        if error.exists():
            return f"Party {l} failed, and all parties were ended: {error.read_text('utf-8')}"
    lost = [l for l in ended if not (folder / f"result-{l}.npz").exists()]
    if not lost:
        return f"The parties did not finish; mpiexec returned {code}. {_said(folder)}"
    said = re.search(r"EXIT STRING: (.+)", (folder / "output").read_text("utf-8", "replace"))
    why = said[1].strip() if said else f"mpiexec returned {code}"
    process = f" (process {pids[lost[0]]})" if lost[0] in pids else ""
    return f"Party {lost[0]}{process} died: {why}. All parties were ended with it."


def _said(folder: Path) -> str:
    """Return the end of what the processes printed."""
    said = (folder / "output").read_text("utf-8", "replace").strip()
    return f"They printed: {said[-2000:]}" if said else "They printed nothing."


def _collect(problem: Problem, method: str, folder: Path) -> WireRun:
    """Put the blocks together."""
    parts = [np.load(folder / f"result-{l}.npz") for l in range(problem.q)]
    began = min(float(part["began"]) for part in parts)
    order = np.argsort(np.concatenate(problem.blocks))  # back to where columns came from
    rows = [Row(0.0, 0.0, 0, problem.objective(np.zeros(problem.d)))]
    curve = np.hstack([part["curve"] for part in parts])[:, order]
    times = np.max([part["times"] for part in parts], axis=0) - began
    for mark, (w, late) in enumerate(zip(curve, times.tolist(), strict=True), 1):
        passes = mark + {"sgd": 0, "saga": 1, "svrg": mark}[method]
        rows.append(Row(late, float(passes), mark * problem.n, problem.objective(w)))
    sent = sum(part["sent"] for part in parts)[1:]
    messages, size = (dict(zip(_KINDS, sent[:, k].tolist(), strict=True)) for k in (0, 1))
    return WireRun(np.concatenate([part["w"] for part in parts])[order], rows, messages, size)
