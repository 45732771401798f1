"""VFB² as a process: what a party sends, what it does with what it receives, who applies it.

A process runs one party. Its main thread talks: it answers requests for its masked score, adds up
what comes from below in the two trees, and, in an active party, takes dominated steps. Collaborator
threads apply the ``(ϑ, i)`` that others have sent. A process has its own columns and nothing else;
labels are with active parties alone.

Work may be given a length: a party then sleeps for the time that the simulator counts for its
block, and a message is held for the time that its law draws, by the receiver, who learns from it
when it is due. So more parties than cores can be watched, and on the simulator's terms.

Sums are taken modulo 2^64 of fixed-point numbers under masks from the operating system, see
:class:`~fedlib.papers.vertical.secure.ModularMasks`. Every message is an array of 64-bit words.
`fedlib.lab.vertical.mpi` starts the processes.
"""

from __future__ import annotations

import heapq
import itertools
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.files import publish
from fedlib.papers.vertical.problem import theta
from fedlib.papers.vertical.secure import ModularMasks, log_depth, seats, sends
from fedlib.papers.vertical.setup import CHUNK, Setup

ASK, SCORES, MASKS, BACK, BASE, READY, NEXT = range(1, 8)
"""A request for scores; a sum up either tree; (ϑ, i); a pass; a barrier; a step from the pot."""

ALL = -1  # instead of a sample: all of them
BACKLOG = 8  # updates a collaborator thread may have before it; then nothing more is received
BITS = 40  # after the point: scores add up to less than 8 million, exact to 5e-13 a party
PAUSE, SHORT, LONG = 5e-5, 2e-4, 2e-3  # seconds with nothing to do; at a barrier, and while work
# or messages take longer than that


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
            if self.setup.method == "saga" and self.setup.table == "full":
                u = self.gradient(theta, i, w)
                self.mean = self.mean + (u - self.table[i]) / self.n
                self.table[i] = u
            elif self.setup.method == "saga":
                self.mean = self.mean + (theta - self.theta[i]) / self.n * self.row(i)
                self.theta[i] = theta
            if (self.version + 1) % self.n == 0:
                self.curve.append((time.time(), self.w))
            self.version += 1  # who sees it sees all of the step

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
        Of its own columns alone, with labels that are none; ``compute`` and ``delays`` in seconds.
    y
        The labels, of an active party; of another None.
    active
        Numbers of the active parties.
    threads
        Collaborator threads.
    steps, loop
        Dominated steps in all, and between two passes over the data.
    waiting
        Whether all wait for each other after every round of a step for each active party (VFB).
    equal
        Whether active parties have equal shares of the steps, or take from a common pot.
    patience
        Seconds of silence that end the run, where nobody watches the processes.
    """

    setup: Setup
    y: np.ndarray | None
    active: tuple[int, ...]
    threads: int
    steps: int
    loop: int
    waiting: bool
    equal: bool
    patience: float


class Process:
    """One party at work."""

    def __init__(self, comm: Any, folder: Path) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.folder = MPI, comm, folder
        self.me, self.q = comm.rank, comm.size
        self.task: Part = pickle.loads((folder / f"party-{self.me}").read_bytes())
        setup, active = self.task.setup, self.task.active
        self.block, self.loss, self.first = Block(setup), setup.problem.loss, active[0]
        self.trees = {root: _places(self.q, root, self.me) for root in range(self.q)}
        self.arithmetic = ModularMasks(BITS)
        self.reads, self.writes = _seconds(setup)
        self.pass_cost = float(self.reads.sum()) / self.task.threads
        law = setup.delays[0]
        self.ways = _forever(lambda k: law.draws(setup.seed, "way", self.me, k, size=CHUNK))
        self.sleeps = bool(self.pass_cost or law.expected)
        self.pauses = SHORT, max(SHORT, min(LONG, law.expected / 3))
        self.wake = threading.Event()
        if self.me in active:
            n = self.block.n
            self.samples = _forever(  # those of the simulator
                lambda k: stream(setup.seed, "sample", self.me, k).integers(n, size=CHUNK)
            )
        self.agenda: list[tuple[float, int, Callable[..., None], tuple]] = []
        self.number, self.due = itertools.count(), np.zeros(self.q)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.until, self.open, self.over = 0, False, False
        self.early: list[tuple[int, float, int]] = []  # who, ϑ, i of the next phase
        self.round: dict[int, tuple] = {}  # updates of a round that is not complete
        self.turn = threading.Lock()
        self.sums: dict[tuple[int, int, int], tuple[int, Any]] = {}
        self.totals: dict[int, dict[int, np.ndarray]] = {}
        self.left, self.pot, self.busy = 0, 0, False  # steps of its own, and of all
        self.ready, self.step, self.handled, self.began = 0, 0, 0, np.inf
        self.flying: list[tuple[Any, np.ndarray]] = []
        self.sent = np.zeros((NEXT + 1, 2), dtype=np.int64)  # messages and bytes of each kind
        self.failure: BaseException | None = None
        beats, shape = folder / "beats", (self.q, 3)
        self.watched = beats.exists()  # by who has started it, on the same machine
        self.beats = np.memmap(beats, float, "r+", 0, shape) if self.watched else np.zeros(shape)

    def run(self) -> None:
        """Work until all phases are over, and leave the block in the folder."""
        for _ in range(self.task.threads):
            threading.Thread(target=self.collaborate, daemon=True).start()
        self.send(self.first, READY, 0)
        heard = time.time()
        while not self.over:
            moved, now = self.receive(), time.time()
            while self.agenda and self.agenda[0][0] <= now:
                _, _, what, args = heapq.heappop(self.agenda)
                what(*args)
                moved = True
            self.flying = [pair for pair in self.flying if not pair[0].Test()]
            if self.open and self.block.version == self.until:
                self.open = False
                self.send(self.first, READY, self.until)
            if self.failure:
                raise self.failure
            self.beats[self.me] = os.getpid(), now, self.handled + self.block.version
            if moved or self.agenda:
                heard = now
            elif not self.watched and now - heard > self.task.patience:
                raise FedlibError(
                    f"It has heard of nobody for {self.task.patience:g} seconds: another party has "
                    "stopped, or its host is out of reach."
                )
            if not moved and self.sleeps:
                until = [max(due - now, 0) for due, *_ in self.agenda[:1]]
                self.wake.wait(min([self.pauses[self.open], *until]))
                self.wake.clear()
            elif not moved:
                time.sleep(PAUSE)
        for request, _ in self.flying:
            request.Wait()
        times, curve = zip(*self.block.curve, strict=True)
        np.savez(self.folder / f"result-{self.me}.npz", w=self.block.w, began=self.began,
                 times=times, curve=curve, sent=self.sent)  # fmt: skip

    def later(self, seconds: float, what: Callable[..., None], *args: Any) -> None:
        """Do something after so many seconds, in which this party goes on with other things."""
        if seconds > 0:
            heapq.heappush(self.agenda, (time.time() + seconds, next(self.number), what, args))
        else:
            what(*args)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, to: int, kind: int, a: int, b: int = 0, values: Any = ()) -> None:
        """Send two whole numbers and an array of 64-bit words; to oneself it is handled at once.

        What the simulator's clock does not have takes no time on the way but its own: barriers, the
        request for a pass, and steps from the pot.
        """
        words = np.asarray(values)
        words = words.view(np.uint64) if words.size else np.empty(0, np.uint64)
        if to == self.me:
            self.handle(kind, self.me, a, b, words)
            return
        due = 0.0
        if kind not in (READY, NEXT) and b != ALL and (kind != BASE or words.size):
            way = next(self.ways)
            due = self.due[to] = max(self.due[to], time.time() + way) if way else 0.0
        head = np.array([a, b], np.int64).view(np.uint64), np.array([due]).view(np.uint64)
        message = np.concatenate([*head, words.ravel()])
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
        wait = float(words[2:3].view(np.float64)[0]) - time.time()
        self.later(wait, self.handle, kind, source, a, b, words[3:])
        self.handled += 1
        return True

    def handle(self, kind: int, source: int, a: int, b: int, words: np.ndarray) -> None:
        """Do what a message asks for."""
        if kind == ASK:
            self.contribute(source, a, b)
        elif kind in (SCORES, MASKS):
            self.add(kind, a, b, words)
        elif kind == BACK:
            job = (source, float(words.view(np.float64)[0]), a)
            self.inbox.put(job) if self.open else self.early.append(job)
        elif kind == BASE and len(words):
            self.block.receive(words.view(np.float64))
            self.later(self.pass_cost, self.send, self.first, READY, a, 1)
        elif kind == BASE:
            self.begin(a)
        elif kind == NEXT:
            self.left += 1
            self.go_on()
        elif kind == READY:
            self.ready += 1
            if self.ready == self.q:
                self.ready = 0
                self.all_here(a, bool(b))

    # --- Algorithm 1 ------------------------------------------------------------------------------

    def ask(self, i: int) -> None:
        """Begin a sum of local scores."""
        self.step, self.asked = self.step + 1, i
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
        cost = self.pass_cost if i == ALL else self.reads[i]
        self.later(cost, self.add, SCORES, root, step, encoded + mask)
        self.add(MASKS, root, step, mask)
        if self.pot and i != ALL:  # who begins a step may take another one after it
            self.pot -= 1
            self.send(root, NEXT, 0)

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
            self.form(self.arithmetic.decode(totals[SCORES] - totals[MASKS]))

    # --- dominator, collaborators, and the barriers between phases --------------------------------

    def go_on(self) -> None:
        """Begin a dominated step, if there is one to take and none under way."""
        if self.left and not self.busy:
            self.left, self.busy = self.left - 1, True
            self.ask(next(self.samples))

    def form(self, z: np.ndarray) -> None:
        """Form ϑ and send it to everybody; then the own update (Algorithms 2, 4, 6)."""
        i, w = self.asked, self.read
        if i == ALL:
            scalars = theta(self.loss, z, self.task.y)
            self.others(BASE, self.until, 0, scalars)
            self.send(self.me, BASE, self.until, 0, scalars)
            return
        scalar = float(theta(self.loss, z[0], self.task.y[i]))
        self.others(BACK, i, 0, np.array([scalar]))
        self.later(self.writes[i], self.dominate, self.block.estimate(scalar, i, w), scalar, i, w)

    def dominate(self, *update: Any) -> None:
        """Write the own update and go on."""
        self.write(self.me, *update)
        self.busy = False
        self.go_on()

    def collaborate(self) -> None:
        """Apply what others have sent (Algorithms 3, 5, 7)."""
        try:
            while True:
                source, scalar, i = self.inbox.get()
                w = self.block.w
                v = self.block.estimate(scalar, i, w)
                if self.sleeps:
                    time.sleep(self.writes[i])
                self.write(source, v, scalar, i, w)
                self.wake.set()
        except BaseException as error:
            self.failure = error

    def write(self, source: int, *update: Any) -> None:
        """Write an update; in a round that all wait for, when all its updates are there."""
        if not self.task.waiting:
            self.block.write(*update)
            return
        with self.turn:
            self.round[source] = update
            if len(self.round) == self.until - self.block.version:
                for one in sorted(self.round, key=self.task.active.index):
                    self.block.write(*self.round[one])
                self.round = {}

    def all_here(self, version: int, passed: bool) -> None:
        """Open a phase once everybody has come to its barrier; with SVRG and SAGA after a pass."""
        if version == 0:
            self.began = min(self.began, time.time())
        looped = version % self.task.loop == 0 and version < self.task.steps
        if looped and not passed and self.task.setup.method != "sgd":
            self.ask(ALL)
        else:
            self.others(BASE, version)
            self.begin(version)

    def begin(self, version: int) -> None:
        """Enter a phase, in which every block gets the updates up to the next barrier."""
        task, m = self.task, len(self.task.active)
        if version == task.steps:
            self.over = True
            return
        loop = min(task.loop - version % task.loop, task.steps - version)
        steps = min(m, loop) if task.waiting else loop
        self.until, self.open = version + steps, True
        for job in self.early:
            self.inbox.put(job)
        self.early = []
        dealt = steps if task.equal else min(steps, m)
        self.pot = steps - dealt if self.me == self.first else 0
        if self.me in task.active:
            self.left = len(range(task.active.index(self.me), dealt, m))
            self.go_on()


def _seconds(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """Return how long a party sleeps when it reads and when it updates, sample by sample."""
    x, d = setup.problem.x, setup.problem.d
    reads = np.diff(x.indptr) if sparse.issparse(x) else np.full(x.shape[0], d)
    writes = reads if setup.lazy else np.full(x.shape[0], d)
    return setup.compute[0] * reads, setup.compute[0] * writes


def _forever(draw: Callable[[int], np.ndarray]) -> Iterator[Any]:
    """Yield what is drawn, piece by piece."""
    return (one for k in itertools.count() for one in draw(k).tolist())


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
    if (line := folder / f"alive-{comm.rank}").exists():
        os.open(line, os.O_WRONLY)  # closes when this process ends
    try:
        Process(comm, folder).run()
    except BaseException as error:
        message = str(error) if isinstance(error, FedlibError) else traceback.format_exc()
        publish(folder / f"error-{comm.rank}", message.encode())
        comm.Abort(3)


if __name__ == "__main__":
    main()
