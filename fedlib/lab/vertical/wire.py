"""VFB² as a process: what a party sends, what it does with what it receives, who applies it.

A process runs one party. Its main thread talks: it answers requests for its masked score, adds up
what comes from below in the two trees, and, in an active party, takes dominated steps. Collaborator
threads apply the ``(ϑ, i)`` that others have sent. A process has its own columns and nothing else;
labels are with active parties alone.

Sums are taken modulo 2^64 of fixed-point numbers under masks from the operating system, see
:class:`~fedlib.papers.vertical.secure.ModularMasks`. Every message is an array of 64-bit words.
`fedlib.lab.vertical.mpi` starts the processes.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.files import publish
from fedlib.papers.vertical.problem import theta
from fedlib.papers.vertical.secure import ModularMasks, log_depth, seats, sends
from fedlib.papers.vertical.setup import Setup

ASK, SCORES, MASKS, BACK, BASE, READY = range(1, 7)
"""Kinds of messages: a request for scores; a sum up either tree; (ϑ, i); a pass; a barrier."""

ALL = -1  # instead of a sample: all of them
BACKLOG = 8  # updates a collaborator thread may have before it; then nothing more is received
BITS = 40  # after the point: scores add up to less than 8 million, exact to 5e-13 a party
PAUSE = 5e-5  # seconds, when there is nothing to do


class Block:
    """A party's columns, its block of ``w``, and what its estimator remembers.

    Several threads read and write it. Writes take turns; what was read before may be out of date by
    then.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.x = setup, setup.problem.x  # (x_i)_l, [n, d_l]
        self.penalty_gradient = setup.problem.penalty_gradient
        self.w, self.version, self.n = np.zeros(setup.problem.d), 0, setup.problem.n
        self.turn, self.curve = threading.Lock(), []

    def row(self, i: int) -> np.ndarray:
        """Return ``(x_i)_l``, ``[d_l]``."""
        if not sparse.issparse(self.x):
            return self.x[i]
        here, row = slice(*self.x.indptr[i : i + 2]), np.zeros(len(self.w))
        row[self.x.indices[here]] = self.x.data[here]
        return row

    def score(self, i: int) -> float:
        """Return the local score ``w_lᵀ(x_i)_l``."""
        return float(self.row(i) @ self.w)

    def gradient(self, theta: float, i: int, w: np.ndarray) -> np.ndarray:
        """Return ``u = ϑ (x_i)_l + λ ∇g(w)`` at a block ``w`` that was read."""
        return theta * self.row(i) + self.penalty_gradient(w)

    def estimate(self, theta: float, i: int, w: np.ndarray) -> np.ndarray:
        """Return the estimator ``ṽ`` at a block ``w`` that was read, ``[d_l]``."""
        u = self.gradient(theta, i, w)
        if self.setup.method == "sgd":  # Algorithms 2, 3
            return u
        if self.setup.method == "svrg":  # Algorithms 4, 5
            return u - self.gradient(self.theta[i], i, self.w_s) + self.full
        if self.setup.table == "full":  # Algorithms 6, 7
            return u - self.table[i] + self.mean
        return u - self.theta[i] * self.row(i) + self.mean  # λ∇g(w) is exact, not remembered

    def write(self, v: np.ndarray, theta: float, i: int, w: np.ndarray) -> None:
        """Add ``-γ ṽ`` to whatever the block is by now; with SAGA remember ``u`` in its place."""
        with self.turn:
            self.w = self.w - self.setup.lr * v  # a new array: what others read stays as it is
            self.version += 1
            if self.setup.method == "saga" and self.setup.table == "full":
                u = self.gradient(theta, i, w)
                self.mean = self.mean + (u - self.table[i]) / self.n
                self.table[i] = u
            elif self.setup.method == "saga":
                self.mean = self.mean + (theta - self.theta[i]) / self.n * self.row(i)
                self.theta[i] = theta
            if self.version % self.n == 0:
                self.curve.append((time.time(), self.w))

    def receive(self, theta: np.ndarray) -> None:
        """Take in ϑ of all n samples at the present ``w``: SVRG's snapshot, SAGA's first table."""
        self.theta, self.w_s = theta.copy(), self.w.copy()
        self.mean = self.x.T @ theta / self.n
        self.full = self.mean + self.penalty_gradient(self.w)
        if self.setup.method == "saga" and self.setup.table == "full":
            dense = self.x.toarray() if sparse.issparse(self.x) else self.x
            self.table = theta[:, None] * dense + self.penalty_gradient(self.w)
            self.mean = self.table.mean(0)


class Part(NamedTuple):
    """What a party is to do.

    Attributes
    ----------
    setup
        Of its own columns alone, with labels that are none.
    y
        The labels, of an active party; of another None.
    active
        Numbers of the active parties.
    threads, phases, steps
        Collaborator threads; how often all begin anew, and dominated steps of all in between.
    """

    setup: Setup
    y: np.ndarray | None
    active: tuple[int, ...]
    threads: int
    phases: int
    steps: int


class Process:
    """One party at work."""

    def __init__(self, comm: Any, folder: Path) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.folder = MPI, comm, folder
        self.me, self.q = comm.rank, comm.size
        self.task: Part = pickle.loads((folder / f"party-{self.me}").read_bytes())
        self.block, self.loss = Block(self.task.setup), self.task.setup.problem.loss
        self.first = self.task.active[0]
        self.trees = {root: _places(self.q, root, self.me) for root in range(self.q)}
        self.arithmetic = ModularMasks(BITS)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.phase, self.open, self.over = -1, False, False
        self.early: list[tuple[float, int]] = []  # (ϑ, i) of the next phase
        self.sums: dict[tuple[int, int, int], tuple[int, Any]] = {}
        self.totals: dict[int, dict[int, np.ndarray]] = {}
        self.ready, self.step, self.handled = 0, 0, 0
        self.flying: list[tuple[Any, np.ndarray]] = []
        self.sent = np.zeros((READY + 1, 2), dtype=np.int64)  # messages and bytes of each kind
        self.failure: BaseException | None = None
        self.beats = np.memmap(folder / "beats", np.float64, "r+", shape=(self.q, 3))

    def run(self) -> None:
        """Work until all phases are over, and leave the block in the folder."""
        threads = [threading.Thread(target=self.collaborate, daemon=True)
                   for _ in range(self.task.threads)]  # fmt: skip
        for thread in threads:
            thread.start()
        self.began = time.time()
        self.send(self.first, READY, 0)
        while not self.over:
            moved = self.receive()
            self.flying = [pair for pair in self.flying if not pair[0].Test()]
            if self.open and self.block.version == (self.phase + 1) * self.task.steps:
                self.open = False
                self.send(self.first, READY, self.phase + 1)
            if self.failure:
                raise self.failure
            self.beats[self.me] = os.getpid(), time.time(), self.handled + self.block.version
            if not moved:
                time.sleep(PAUSE)
        for request, _ in self.flying:
            request.Wait()
        times, curve = zip(*self.block.curve, strict=True)
        np.savez(self.folder / f"result-{self.me}.npz", w=self.block.w, began=self.began,
                 times=times, curve=curve, sent=self.sent)  # fmt: skip

    # --- messages ---------------------------------------------------------------------------------

    def send(self, to: int, kind: int, a: int, b: int = 0, values: Any = ()) -> None:
        """Send two whole numbers and an array of 64-bit words; to oneself it is handled at once."""
        words = np.asarray(values)
        words = words.view(np.uint64) if words.size else np.empty(0, np.uint64)
        if to == self.me:
            self.handle(kind, self.me, a, b, words)
            return
        message = np.concatenate([np.array([a, b], np.int64).view(np.uint64), words.ravel()])
        self.flying.append((self.comm.Isend([message, self.mpi.UINT64_T], to, kind), message))
        self.sent[kind] += 1, message.nbytes

    def others(self, kind: int, a: int, b: int = 0, values: Any = ()) -> None:
        """Send to everybody else."""
        for party in range(self.q):
            if party != self.me:
                self.send(party, kind, a, b, values)

    def receive(self) -> bool:
        """Take a message, if there is one and threads are not too far behind."""
        if self.inbox.qsize() > BACKLOG * self.task.threads:
            return False
        status = self.mpi.Status()
        if not self.comm.Iprobe(status=status):
            return False
        kind, source = status.Get_tag(), status.Get_source()
        words = np.empty(status.Get_count(self.mpi.UINT64_T), np.uint64)
        self.comm.Recv([words, self.mpi.UINT64_T], source, kind)
        a, b = words[:2].view(np.int64).tolist()
        self.handle(kind, source, a, b, words[2:])
        self.handled += 1
        return True

    def handle(self, kind: int, source: int, a: int, b: int, words: np.ndarray) -> None:
        """Do what a message asks for."""
        if kind == ASK:
            self.contribute(source, a, b)
        elif kind in (SCORES, MASKS):
            self.add(kind, a, b, words)
        elif kind == BACK:
            job = (float(words.view(np.float64)[0]), a)
            self.inbox.put(job) if self.open else self.early.append(job)
        elif kind == BASE:
            self.begin(a, words.view(np.float64))
        elif kind == READY:
            self.ready += 1
            if self.ready == self.q:
                self.ready = 0
                self.pass_over(a)

    # --- Algorithm 1 ------------------------------------------------------------------------------

    def ask(self, i: int) -> None:
        """Begin a sum of local scores."""
        self.step += 1
        self.others(ASK, self.step, i)
        self.contribute(self.me, self.step, i)

    def contribute(self, root: int, step: int, i: int) -> None:
        """Put the own masked score into one tree and the mask into the other."""
        w = self.block.w
        if root == self.me:
            self.read = w
        score = np.atleast_1d(self.block.x @ w if i == ALL else self.block.score(i))
        try:
            encoded = self.arithmetic.encode(np.broadcast_to(score, (self.q, len(score))))[0]
        except FedlibError as error:
            worst = np.abs(score).max()
            raise FedlibError(f"Its score is {worst:g}: too large, or the run diverges. Take a "
                              "smaller lr, or scale the features.") from error  # fmt: skip
        mask = np.frombuffer(os.urandom(8 * len(score)), np.uint64)
        self.add(SCORES, root, step, encoded + mask)
        self.add(MASKS, root, step, mask)

    def add(self, kind: int, root: int, step: int, words: np.ndarray) -> None:
        """Add to the sum of one tree, and pass it on when everything from below is in."""
        receiver, needed = self.trees[root][kind]
        count, total = self.sums.pop((kind, root, step), (0, np.uint64(0)))
        count, total = count + 1, words + total
        if count < needed:
            self.sums[kind, root, step] = count, total
            return
        if receiver is not None:
            self.send(receiver, kind, root, step, total)
            return
        totals = self.totals.setdefault(step, {})
        totals[kind] = total
        if len(totals) == 2:
            del self.totals[step]
            self.resume(self.arithmetic.decode(totals[SCORES] - totals[MASKS]))

    def start(self, steps: Generator[int, np.ndarray, None]) -> None:
        """Let this party ask for scores as `steps` yields samples."""
        self.steps = steps
        self.resume(None)

    def resume(self, z: np.ndarray | None) -> None:
        """Go on with the step that has waited for a score."""
        try:
            i = self.steps.send(z)
        except StopIteration:
            return
        self.ask(i)

    # --- dominator, collaborators, and the barriers between phases --------------------------------

    def dominate(self, steps: int, phase: int) -> Generator[int, np.ndarray, None]:
        """Take dominated steps: yield a sample, get its score (Algorithms 2, 4, 6)."""
        rng = stream(self.task.setup.seed, "sample", self.me, phase)
        for i in rng.integers(self.block.n, size=steps).tolist():
            (z,) = yield i
            scalar, w = float(theta(self.loss, z, self.task.y[i])), self.read
            self.others(BACK, i, 0, np.array([scalar]))
            self.block.write(self.block.estimate(scalar, i, w), scalar, i, w)

    def collaborate(self) -> None:
        """Apply what others have sent (Algorithms 3, 5, 7)."""
        try:
            while True:
                scalar, i = self.inbox.get()
                w = self.block.w
                self.block.write(self.block.estimate(scalar, i, w), scalar, i, w)
        except BaseException as error:
            self.failure = error

    def pass_over(self, phase: int) -> None:
        """Open a phase once everybody has come to its barrier; with SVRG and SAGA after a pass."""
        if phase == self.task.phases or self.task.setup.method == "sgd":
            self.others(BASE, phase)
            self.begin(phase, np.empty(0))
        else:
            self.start(self.all_scores(phase))

    def all_scores(self, phase: int) -> Generator[int, np.ndarray, None]:
        """Form ϑ of all samples and send it to everybody."""
        z = yield ALL
        scalars = theta(self.loss, z, self.task.y)
        self.others(BASE, phase, 0, scalars)
        self.begin(phase, scalars)

    def begin(self, phase: int, scalars: np.ndarray) -> None:
        """Enter a phase."""
        self.phase = phase
        if phase == self.task.phases:
            self.over = True
            return
        if len(scalars):
            self.block.receive(scalars)
        self.open = True
        for job in self.early:
            self.inbox.put(job)
        self.early = []
        if self.me in self.task.active:
            place, number = self.task.active.index(self.me), len(self.task.active)
            self.start(self.dominate(len(range(place, self.task.steps, number)), phase))


def _places(q: int, root: int, me: int) -> dict[int, tuple[int | None, int]]:
    """Return for either tree whom a party sends its sum to, and how many terms it waits for."""
    order = seats(q, root)
    seat, places = order.index(me) + 1, {}
    for kind, tree in zip((SCORES, MASKS), log_depth(q), strict=True):
        messages = sends(tree)
        above = [order[one.receiver - 1] for one in messages if one.sender == seat]
        below = sum(one.receiver == seat for one in messages)
        places[kind] = above[0] if above else None, below + 1
    return places


def main() -> None:
    """Be the party of this process's rank, in the folder that the command line names."""
    from mpi4py import MPI

    comm, folder = MPI.COMM_WORLD, Path(sys.argv[1])
    os.open(folder / f"alive-{comm.rank}", os.O_WRONLY)  # closes when this process ends
    try:
        Process(comm, folder).run()
    except BaseException as error:
        message = str(error) if isinstance(error, FedlibError) else traceback.format_exc()
        publish(folder / f"error-{comm.rank}", message.encode())
        comm.Abort(3)
