"""VFB² and VFB with a process for each party, their seconds beside the simulator's prediction.

Work and messages are slept, so that two cores do for eight parties: what is tried is the clock of
the simulator (who waits for whom), and not how fast a machine multiplies.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import timeit
from statistics import fmean, median
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.lab.vertical.mpi import environment, find_launcher, predicted_run, run_parties
from fedlib.papers.vertical.problem import Problem, split_features
from fedlib.papers.vertical.setup import METHODS, straggler
from fedlib.population.delays import Deterministic

PARTIES, SLOW = (2, 4, 8), (0.0, 0.4)
ROWS, COLUMNS, PASSES, RATE = 24, 24, 2, 0.05
BLOCK, MESSAGE = 0.05, 0.05  # seconds: of reading or updating a block; of a message on its way
AGREE = 0.15
"""How much longer than simulated a run may take; and a fifth of it, how much shorter.

A sleep ends late, never early. Between two steps of a dominator lie at most six of them, 0.3 s, and
each may end some ms late where a core is shared: the party has to get its turn, and Python takes
about 0.1 ms for a message, of which eight parties have 28 a step, and four steps at once in a round
of VFB. So up to a tenth and a little more. A run can be shorter where the last steps from the pot
fall to other parties, and in VFB, where the simulator lets nobody begin with updates before all
scores are there.
"""


def made(q: int) -> Problem:
    """Return made data in two classes, dealt out to q parties."""
    rng = stream(0, "processes")
    x = rng.standard_normal((ROWS, COLUMNS)) / np.sqrt(COLUMNS)
    y = np.where(x @ rng.standard_normal(COLUMNS) > 0, 1.0, -1.0)
    return Problem(x, y, split_features(COLUMNS, q), "logistic", 0.05)


def run_settings(q: int, slow: float) -> dict[str, Any]:
    """Return what a run is told: the last party, which has no labels, is the slow one."""
    compute = straggler(q, q - 1, slow, BLOCK * q / COLUMNS)
    delays = Deterministic(MESSAGE)
    return dict(epochs=PASSES, active=q // 2, compute=compute, delays=delays)


def processes_table(repeats: int = 3) -> list[dict[str, Any]]:
    """Run every method with 2, 4 and 8 parties, waiting or not, with and without a slow party.

    Half of the parties hold labels; the slow one is the last, which holds none. Runs take turns:
    each is made once before any is made again.

    Returns
    -------
    list of dict
        Rows with the number of parties, the method, whether all wait (VFB), by what share the
        slow party is slower; median, least and most seconds of the repeats, those of the
        simulator, the ratio of the median to them; the loss at the end, and the simulator's; how
        many jobs wanted a core of the machine meanwhile, on average.
    """
    find_launcher()  # before anything is begun
    cases = list(itertools.product(PARTIES, METHODS, (True, False), SLOW))
    taken: dict[tuple, list[float]] = {case: [] for case in cases}
    loads: dict[tuple, list[float]] = {case: [] for case in cases}
    rows = []
    for repeat, case in tqdm(list(itertools.product(range(repeats), cases)), "runs"):
        q, method, waiting, slow = case
        told = dict(run_settings(q, slow), waiting=waiting)
        end = run_parties(made(q), method, RATE, **told).rows[-1]
        taken[case].append(end.time)
        loads[case].append(os.getloadavg()[0])
        if repeat == repeats - 1:
            last, seconds = predicted_run(made(q), method, RATE, **told).rows[-1], taken[case]
            rows.append({
                "parties": q, "method": method, "waiting": waiting, "slower": slow,
                "seconds": round(median(seconds), 3), "least": round(min(seconds), 3),
                "most": round(max(seconds), 3), "simulated": round(last.time, 3),
                "ratio": round(median(seconds) / last.time, 3),
                "loss": round(end.loss, 5), "simulated loss": round(last.loss, 5),
                "load": round(fmean(loads[case]), 1),
            })  # fmt: skip
    return rows


PING = """
import time
import numpy as np
from mpi4py import MPI
world, word, took = MPI.COMM_WORLD, np.zeros(3), []
for _ in range(2000):
    began = time.perf_counter()
    for sender in (0, 1):
        (world.Send if world.rank == sender else world.Recv)(word, 1 - world.rank)
    took.append((time.perf_counter() - began) / 2)
if world.rank == 0:
    print(np.median(took))
"""


def messages_table() -> list[dict[str, Any]]:
    """Time a message of three numbers between two processes, and jobs: products of two blocks.

    Returns
    -------
    list of dict
        Rows with ``what`` and ``seconds``, a median.
    """
    command = [find_launcher(), "-n", "2", sys.executable, "-c", PING]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FedlibError(f"{command[0]} passed no message: {done.stderr.strip()[-300:]}")
    rows = [{"what": "message", "seconds": round(float(done.stdout), 8)}]
    for numbers in (12, 2_000_000):
        x, w = stream(0, "job", numbers).random((2, numbers))
        took = timeit.repeat(lambda x=x, w=w: x @ w, number=1, repeat=200)
        rows.append({"what": f"job of {numbers:,} numbers", "seconds": round(median(took), 8)})
    return rows


def agrees(row: dict[str, Any]) -> bool:
    """Tell whether the median seconds of a row are those of the simulator, within :data:`AGREE`."""
    return -AGREE / 5 <= row["seconds"] / row["simulated"] - 1 <= AGREE
