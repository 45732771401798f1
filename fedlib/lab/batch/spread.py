"""Running a batch: over processes of this machine, or over a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from fedlib import files
from fedlib.errors import FedlibError
from fedlib.lab import locks
from fedlib.lab.batch import grid as grids
from fedlib.lab.batch import store, work
from fedlib.lab.batch.units import Unit, plan
from fedlib.paths import expand

LOG = "workers.log"
Finished = Iterator[dict[str, str]]


def run(
    grid: str | Path | Mapping[str, Any],
    out: str | Path,
    workers: int = 1,
    threads: int = 1,
    ray: str | None = None,
    shard: str = "1/1",
    retry: bool = False,
    changes: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run the jobs of a grid that are not finished, and return a table of all.

    Interrupted, or its machine lost, it goes on when called again on the same folder.

    Parameters
    ----------
    grid
        A TOML file or what one would hold, see :class:`fedlib.lab.batch.grid.GridPage`.
    out
        Folder for everything.
    workers
        Processes side by side.
    threads
        Threads of each.
    ray
        Address of a Ray cluster, ``"auto"`` for the one this machine belongs to. It takes the place
        of ``workers``; ``threads`` is then the number of cores that a unit asks for.
    shard
        ``"i/n"``: only every n-th unit, from the i-th, for schedulers.
    retry
        Run failed jobs again.
    changes
        Values that are the same for all jobs, beside those of the grid.
    progress
        Show a bar with counts.

    Returns
    -------
    pandas.DataFrame
        See :func:`fedlib.lab.batch.store.status`.

    Raises
    ------
    FedlibError
        For a grid that cannot be run, a folder that cannot be written, or one in which the same
        batch is under way.
    """
    from fedlib.lab.evidence import experiments

    if workers < 1 or threads < 1:
        raise FedlibError(f"At least one worker and one thread; got {workers} and {threads}.")
    if ray and workers > 1:
        raise FedlibError("--ray takes the place of --workers: give one of the two.")
    jobs = grids.read_grid(grid, changes)
    for job in () if ray else jobs:
        experiments.choose_device(job.device)
    folder = files.make_folder(expand(out, "The folder").absolute())
    todo = plan(jobs, workers, shard)
    lock = folder / f".{shard.replace('/', '-of-')}.lock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.only_one(lock, f"A batch, shard {shard},"))
        store.keep(folder, jobs)
        if ray:
            gpu = any(job.on_gpu for job in jobs)
            todo = plan(jobs, stack.enter_context(_joined(ray, threads, gpu)), shard)
        left = [part for unit in todo for part in remaining(unit, folder, retry)]
        finished: Finished = iter(())
        if left and ray:
            finished = _cluster(left, folder, threads)
        elif left:
            finished = _processes(left, folder, workers, threads)
        counts = Counter()
        total = sum(len(unit.jobs) for unit in left)
        with tqdm(total=total, disable=not progress, unit="job", desc="batch") as bar:
            for outcome in finished:
                first = work.DONE in outcome.values() and not counts[work.DONE]
                if first and (lacking := store.lacking(folder)):
                    bar.write(lacking, file=sys.stderr)
                counts.update(outcome.values())
                bar.set_postfix(counts)
                bar.update(len(outcome))
        table = store.status(folder)
        if (table["status"] == work.DONE).all():
            shutil.rmtree(folder / "units", ignore_errors=True)
            (folder / LOG).unlink(missing_ok=True)
    return table


def remaining(unit: Unit, folder: Path, retry: bool) -> list[Unit]:
    """Return what of a unit is to be run; a job that failed is tried again by itself."""
    states = {job: work.state(folder, job)["status"] for job in unit.jobs}
    waiting = tuple(job for job, state in states.items() if state == work.WAITING)
    failed = [job for job, state in states.items() if state == work.FAILED and retry]
    return [Unit(waiting)] * bool(waiting) + [Unit((job,)) for job in failed]


# ------------------------------------------------------------------ this machine


def _processes(units: Sequence[Unit], folder: Path, workers: int, threads: int) -> Finished:
    """Spread units over processes. One that dies takes its unit with it, and nothing else."""
    import multiprocessing.resource_tracker

    from pebble import ProcessExpired, ProcessPool

    multiprocessing.resource_tracker.ensure_running()  # its start would let Ctrl-C through
    with _no_main():
        pool = ProcessPool(
            min(workers, len(units)), initializer=_begin, initargs=[threads, folder],
            context=multiprocessing.get_context("spawn"),
        )  # fmt: skip
        try:
            with _deaf():
                begin = functools.partial(pool.schedule, work.carry_out_unit)
                waiting = {begin(args=[unit, folder]): unit for unit in units}
            for future in as_completed(waiting):
                unit = waiting[future]
                try:
                    yield future.result()
                except ProcessExpired as error:
                    yield work.fail(unit, folder, f"Its process ended: {_ending(error.exitcode)}.")
            pool.close()
        finally:
            pool.stop()
            pool.join()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Keep Ctrl-C from threads and processes that are started here; it waits for the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """Keep workers from running the main script once more: it would begin the batch anew."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _begin(threads: int, folder: Path) -> None:
    """Prepare a worker: Ctrl-C is its parent's business, and what it mutters goes into a file."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with (folder / LOG).open("ab") as log:
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(threads)
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))  # of kernels
    tqdm.set_lock(threading.RLock())  # its own has a semaphore, which a stopped process leaves


def _end_with_parent() -> None:
    """End this process when its parent has, whatever killed it, so that the batch can go on."""
    import multiprocessing.connection

    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# ------------------------------------------------------------------ a cluster


@contextlib.contextmanager
def _joined(address: str, threads: int, gpu: bool = False) -> Iterator[int]:
    """Join a Ray cluster for a while; yield how many units it can carry out side by side.

    With ``gpu`` there has to be a node that has one: Ray would wait for it without a word.
    """
    try:
        import ray
    except ImportError as error:
        raise FedlibError("--ray needs Ray: pip install ray.") from error
    at = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if "://" in at:
        raise FedlibError(f"A Ray cluster's address is HOST:PORT here; got '{at}'.")
    try:
        _knock(at)
        ray.init(address, logging_level="ERROR", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise FedlibError(
            f"No Ray cluster answers at '{address}' ({error}). `ray start --head` starts one and "
            "says where; `ray status --address ADDRESS` shows its nodes."
        ) from error
    # Ray prints the log of a lost node, some of it only while it shuts down.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            nodes = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            places = sum(int(cores) // threads for cores in nodes)
            if not places:
                raise FedlibError(f"No node of the cluster at '{address}' has {threads} cores.")
            if gpu and not any(n["Resources"].get("GPU") for n in ray.nodes() if n["Alive"]):
                raise FedlibError(
                    f"Jobs ask for device = 'cuda', and no node of the cluster at '{address}' has "
                    "a GPU. `ray start --num-gpus 1` offers one that Ray does not find by itself."
                )
            yield places
        finally:
            ray.shutdown()


SETTINGS = b"\4"  # of a frame of HTTP/2, its kind; the first that either side sends
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + SETTINGS + b"\0\0\0\0\0"


def _knock(address: str) -> None:
    """Raise OSError where nobody listens, or not in HTTP/2: Ray would ask for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as link:
        link.sendall(HELLO)
        if link.recv(9)[3:4] != SETTINGS:
            raise OSError("what listens there is not Ray")


def _cluster(units: Sequence[Unit], folder: Path, threads: int) -> Finished:
    """Spread units over the cluster. Its nodes need fedlib and the data, and no common disk."""
    import ray

    # A unit whose node or process is lost is begun anew, on another node: up to three times.
    remote = ray.remote(num_cpus=threads, max_retries=3)(_elsewhere)
    ours = {name: value for name, value in os.environ.items() if name.startswith("FEDLIB_")}
    waiting = {
        remote.options(num_gpus=int(unit.jobs[0].on_gpu)).remote(unit, threads, ours): unit
        for unit in units
    }
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        unit = waiting.pop(done)
        try:
            outcome, made = ray.get(done)
        except ray.exceptions.RayError as error:
            yield work.fail(unit, folder, f"Ray gave it up: {error}")
            continue
        for name in sorted(made, key=lambda name: name.endswith("state.json")):  # it comes last
            home = files.make_folder((folder / name).parent)
            files.publish(home / Path(name).name, made[name])
        for name in (name for name, status in outcome.items() if status == work.DONE):
            (folder / "jobs" / name / "error.txt").unlink(missing_ok=True)
        yield outcome


def _elsewhere(
    unit: Unit, threads: int, ours: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Carry out a unit on a node, and return its files. Variables of the node's own hold there."""
    import torch

    for name, value in ours.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="fedlib-") as place:
        outcome = work.carry_out_unit(unit, Path(place))
        home = Path(place) / "jobs"
        every = (path for path in home.rglob("*") if "/." not in path.relative_to(place).as_posix())
        made = [path for path in every if path.is_file()]
        return outcome, {str(path.relative_to(place)): path.read_bytes() for path in made}
