"""VFB²: asynchronous learning over parties that hold different features, on a simulated clock.

Zhang, Gu, Deng and Huang, *Secure Bilevel Asynchronous Vertical Federated Learning with Backward
Updating* (AAAI 2021), Algorithms 2 to 7. An active party (one with labels) draws a sample ``i``,
gathers the score ``wᵀx_i`` from all parties, and sends ``ϑ = dL/dz`` and ``i`` backward to every
other party. Each party updates its own block of ``w`` with them, as soon as it gets to it.

Nothing runs in parallel here, and no time is measured. Events happen one after the other on a
**simulated clock**: a time in this module is what the cost model says, not what a computer took.
The model:

- reading or updating its block costs party ``l`` the time ``compute[l] · d_l``;
- a message between a dominator and party ``l`` takes a time drawn from ``delays[l]``. A step has
  three: the request with ``i``, the score on its way back, ``(ϑ, i)``. Messages from one sender to
  one receiver arrive in the order sent, as over TCP or MPI, unless ``ordered=False``;
- what arrives at a party waits in its inbox, first come first served, for one of ``threads``
  collaborator threads; requests wait in turn, too, unless ``prompt=True``. A dominator has a
  thread of its own for its steps;
- a thread reads the block when it takes a job up and writes when the job ends. Between the two
  others may write: updates are added without a lock, and what was read is then stale.

:class:`Simulation` is written for reading. The loop that :func:`simulate_parties` runs is the
same one compiled (:mod:`fedlib.papers.vertical.compiled`), equal event by event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse

from fedlib.engine.checks import check_whole_number
from fedlib.engine.pilot import few_passes
from fedlib.errors import unknown
from fedlib.papers.vertical.compiled import Compiled
from fedlib.papers.vertical.problem import Problem
from fedlib.papers.vertical.runs import Log, Messages, Row, Run
from fedlib.papers.vertical.setup import Draws, Setup, at_least, checked_setup, total_steps
from fedlib.population.delays import Deterministic, EventQueue, Law


class Party:
    """One party: its columns, its block of ``w``, and what its estimator remembers."""

    def __init__(self, setup: Setup, l: int) -> None:
        problem = setup.problem
        self.setup, self.penalty_gradient = setup, problem.penalty_gradient
        self.x = problem.x[:, problem.blocks[l]]  # (x_i)_l, [n, d_l]
        start = np.zeros(problem.d) if setup.start is None else setup.start
        self.w = start[problem.blocks[l]]
        self.version = 0

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
        self.w = self.w - self.setup.lr * v
        self.version += 1
        if self.setup.method == "saga" and self.setup.table == "full":
            u = self.gradient(theta, i, w)
            self.mean = self.mean + (u - self.table[i]) / len(self.table)
            self.table[i] = u
        elif self.setup.method == "saga":
            self.mean = self.mean + (theta - self.theta[i]) / len(self.theta) * self.row(i)
            self.theta[i] = theta

    def receive(self, theta: np.ndarray) -> None:
        """Take in ϑ of all n samples at the present ``w``: SVRG's snapshot, SAGA's first table."""
        self.theta, self.w_s = theta.copy(), self.w.copy()
        self.mean = self.x.T @ theta / len(theta)
        self.full = self.mean + self.penalty_gradient(self.w)
        if self.setup.method == "saga" and self.setup.table == "full":
            dense = self.x.toarray() if sparse.issparse(self.x) else self.x
            self.table = theta[:, None] * dense + self.penalty_gradient(self.w)
            self.mean = self.table.mean(0)


@dataclass
class Step:
    """A dominated step under way."""

    dominator: int
    number: int  # in the order in which steps begin
    i: int
    delays: np.ndarray
    masks: np.ndarray
    scores: np.ndarray
    reads: np.ndarray
    w: np.ndarray  # the dominator's own block as it was read
    missing: int
    theta: float = 0.0
    place: int = -1  # in the order in which ϑ is formed


@dataclass
class Simulation:
    """The events of VFB², one method for each. Reading it beside Algorithms 2 and 3 is the idea."""

    setup: Setup
    draws: Draws
    queue: EventQueue = field(default_factory=EventQueue)
    target: int = 0  # steps that may begin before the next barrier
    started: int = 0
    oldest: int = 0  # the first step that is not finished, in the order of their beginning
    formed: int = 0  # values of ϑ

    def __post_init__(self) -> None:
        q = self.setup.problem.q
        self.parties = [Party(self.setup, l) for l in range(q)]
        self.inbox, self.busy = [deque() for _ in range(q)], [0] * q
        self.waiting, self.left = deque(), {}
        self.own = dict.fromkeys(self.setup.active, 0)  # steps of each dominator
        self.last = np.zeros((q, q))  # when the last message from a to l arrives
        self.steps, self.updates = [], []

    # a dominator's thread: Algorithm 2

    def begin(self, a: int) -> None:
        """Dominator ``a`` draws a sample and asks every party for its score (lines 2 and 3)."""
        if self.started == self.target:
            return
        bound = self.setup.bound
        if bound is not None and self.started - self.oldest > bound:
            self.waiting.append(a)
            return
        i, delays, masks = self.draws.step(a, self.own[a])
        q, me = self.setup.problem.q, self.parties[a]
        step = Step(a, self.started, i, delays, masks, np.zeros(q), np.zeros(q, np.int64), me.w, q)
        self.own[a] += 1
        self.left[self.started] = self.setup.updates
        self.started += 1
        for l in range(q):
            if l != a:
                self.send(step, l, leg=0)
        self.after(self.setup.cost[a], self.gather, step, a, me.score(i), me.version)

    def gather(self, step: Step, l: int, score: float, version: int) -> None:
        """Party ``l``'s score is in. With the last of them, ϑ is formed and sent (lines 4 to 6)."""
        step.scores[l], step.reads[l] = score, version
        step.missing -= 1
        if step.missing:
            return
        a, problem = step.dominator, self.setup.problem
        z = (step.scores + step.masks).sum() - step.masks.sum()  # Algorithm 1
        step.theta = float(problem.theta(z, problem.y[step.i]))
        step.place = self.formed
        self.formed += 1
        if self.setup.backward:
            for l in range(problem.q):
                if l != a:
                    self.send(step, l, leg=2)
        v = self.parties[a].estimate(step.theta, step.i, step.w)
        label = self.label(step, a, int(step.reads[a]))
        self.steps.append((a, step.i, step.theta, z, self.queue.now, label, step.reads))
        self.after(self.setup.cost[a], self.dominate, step, label, v)

    def dominate(self, step: Step, label: int, v: np.ndarray) -> None:
        """The dominator writes its own block (line 7) and goes on with its next step."""
        self.write(step, step.dominator, label, v, step.w)
        self.after(0, self.begin, step.dominator)

    # a collaborator's threads: Algorithm 3

    def arrive(self, step: Step, l: int, leg: int) -> None:
        """A request (``leg=0``) or ``(ϑ, i)`` (``leg=2``) comes into party ``l``'s inbox."""
        if leg == 0 and self.setup.prompt:
            me, time = self.parties[l], self.setup.cost[l] + step.delays[l, 1]
            self.after(time, self.gather, step, l, me.score(step.i), me.version)
        else:
            self.inbox[l].append((step, leg))
            self.serve(l)

    def serve(self, l: int) -> None:
        """Free threads of party ``l`` take up what waits: they read the block now."""
        while self.inbox[l] and self.busy[l] < self.setup.threads:
            step, leg = self.inbox[l].popleft()
            self.busy[l] += 1
            me, cost = self.parties[l], self.setup.cost[l]
            if leg == 0:
                self.after(cost, self.answer, step, l, me.score(step.i), me.version)
            else:
                label = self.label(step, l, me.version)
                v = me.estimate(step.theta, step.i, me.w)
                self.after(cost, self.collaborate, step, l, label, v, me.w)

    def answer(self, step: Step, l: int, score: float, version: int) -> None:
        """The score that was asked for is on its way to the dominator."""
        self.after(step.delays[l, 1], self.gather, step, l, score, version)
        self.free(l)

    def collaborate(self, step: Step, l: int, label: int, v: np.ndarray, w: np.ndarray) -> None:
        """The collaborative update is written (line 4)."""
        self.write(step, l, label, v, w)
        self.free(l)

    def free(self, l: int) -> None:
        """A thread of party ``l`` takes up the next job, if there is one."""
        self.busy[l] -= 1
        self.serve(l)

    # the machinery

    def after(self, time: float, what: Callable, *args: object) -> None:
        """Let something happen when a time has passed."""
        self.queue.push(self.queue.now + time, (what, *args))

    def send(self, step: Step, l: int, leg: int) -> None:
        """Send to party ``l``; what was sent before arrives before."""
        time = self.queue.now + step.delays[l, leg]
        if self.setup.ordered:
            time = self.last[step.dominator, l] = max(time, self.last[step.dominator, l])
        self.queue.push(time, (self.arrive, step, l, leg))

    def label(self, step: Step, l: int, read: int) -> int:
        """Give the next label to an update of party ``l``, and note what it has read."""
        self.updates.append([self.queue.now, np.nan, l, step.place, read, -1])
        return len(self.updates) - 1

    def write(self, step: Step, l: int, label: int, v: np.ndarray, w: np.ndarray) -> None:
        """Write an update; when it is its step's last, the next step may be free to begin."""
        me = self.parties[l]
        self.updates[label][1], self.updates[label][5] = self.queue.now, me.version
        me.write(v, step.theta, step.i, w)
        self.left[step.number] -= 1
        if self.left.get(self.oldest) != 0:
            return
        while self.left.get(self.oldest) == 0:
            del self.left[self.oldest]
            self.oldest += 1
        while self.waiting:  # each looks again whether it may
            self.after(0, self.begin, self.waiting.popleft())

    # what the loop around it asks for

    @property
    def now(self) -> float:
        """The simulated time."""
        return self.queue.now

    @property
    def w(self) -> np.ndarray:
        """The model as it is now, ``[d]``."""
        w = np.empty(self.setup.problem.d)
        for party, block in zip(self.parties, self.setup.problem.blocks, strict=True):
            w[block] = party.w
        return w

    def receive(self, theta: np.ndarray) -> None:
        """Let every party take in ϑ of all n samples."""
        for party in self.parties:
            party.receive(theta)

    def restart(self, target: int, time: float) -> None:
        """After a barrier: let all dominators begin at a time, until ``target`` steps are begun."""
        self.target, self.queue.now = target, time
        self.waiting.clear()
        for a in self.setup.active:
            self.after(0, self.begin, a)

    def advance(self, formed: int) -> None:
        """Let things happen until so many values of ϑ are formed, or nothing is left to happen."""
        while len(self.queue) and self.formed < formed:
            what, *args = self.queue.pop()[1]
            what(*args)

    def finish(self) -> None:
        """Let everything happen that is under way."""
        while len(self.queue):
            what, *args = self.queue.pop()[1]
            what(*args)

    def records(self) -> tuple[Messages, Log]:
        """Return what was noted on the way."""
        a, i, theta, z, time, label, reads = (
            zip(*self.steps, strict=True) if self.steps else [()] * 7
        )
        label_time, written, party, place, read, write = (
            zip(*self.updates, strict=True) if self.updates else [()] * 6
        )
        whole = np.int64
        messages = Messages(
            np.array(theta), np.array(i, whole), np.array(a, whole), np.array(z), np.array(time)
        )
        reads = np.array(reads, whole).reshape(-1, self.setup.problem.q)
        ints = (np.array(v, whole) for v in (party, place, read, write))
        log = Log(np.array(label_time), np.array(written), *ints, reads, np.array(label, whole))
        return messages, log


# --- the entry ------------------------------------------------------------------------------------


@few_passes
def simulate_parties(
    problem: Problem,
    method: str,
    lr: float,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    active: int | Sequence[int] = 1,
    threads: int | None = None,
    compute: float | Sequence[float] = 1.0,
    delays: Law | Sequence[Law] = Deterministic(0.0),  # noqa: B008, a frozen value
    bound: int | None = None,
    ordered: bool = True,
    prompt: bool = False,
    inner: int | None = None,
    table: str | None = None,
    mask: float = 0.0,
    backward: bool = True,
    every: float = 1.0,
    start: np.ndarray | None = None,
    seed: int = 0,
    log: bool = True,
    keep: str | None = None,
    plain: bool = False,
) -> Run:
    """Run VFB² event by event on a simulated clock.

    Parameters
    ----------
    problem
        Data, parties and objective.
    method
        ``"sgd"``, ``"svrg"`` or ``"saga"``.
    lr
        Step size γ, at least 0.
    epochs, steps
        How long: dominated steps, or passes of n dominated steps. Give one of the two.
    active
        m, and then the first m parties hold labels; or which ones do.
    threads
        Collaborator threads k of every party; None is m, as in the paper's experiments.
    compute
        Time per feature for reading or updating a block, one number or one a party. For a slow
        party: ``straggler(q, party, 0.4)``.
    delays
        Law of a message's time: one for all parties, or one a party.
    bound
        A dominator begins its next step only when all but the last ``bound`` steps begun are
        finished everywhere; then ``τ₁, τ₂ ≤ q (3 bound + 1) - 1``. 0 lets one step happen at a
        time, None never waits.
    ordered
        Whether messages from one sender to one receiver keep their order.
    prompt
        Whether a party answers requests for its score at once, whatever its threads are at,
        instead of in turn. The inboxes of slow parties may then grow without end; ``bound`` stops
        that.
    inner
        Dominated steps between two snapshots of SVRG; None is n.
    table
        What SAGA remembers: ``"full"`` gradients, n × d numbers, or ϑ alone (``"theta"``), where
        the regulariser's gradient is exact instead of remembered. None: full for arrays, ϑ alone
        for sparse data.
    mask
        Width B of masks uniform on ``[-B, B]``, added to local scores and taken off their sum.
    backward
        False: ϑ is sent to nobody and only dominators update (AFSVRG-VP).
    every
        Passes of n dominated steps between two evaluations.
    start
        The first ``w``; None is 0.
    seed
        Names every random stream.
    log
        Whether to keep a row for every block update.
    keep
        ``"snapshots"`` keeps ``w`` at every barrier of SVRG.
    plain
        Run the version that is written for reading; it gives the same run, slowly.

    Returns
    -------
    Run
        Model, evaluations, messages and log.

    Raises
    ------
    FedlibError
        When a setting does not fit.
    """
    total = total_steps(problem.n, epochs, steps)
    setup = checked_setup(
        problem, method, lr, active, threads, compute, delays, bound, ordered, table, mask,
        backward, seed, start, total, log, prompt,
    )  # fmt: skip
    return drive((Simulation if plain else Compiled)(setup, Draws(setup)), inner, every, keep)


def drive(sim: Any, inner: int | None, every: float, keep: str | None = None) -> Run:
    """Take a simulation from barrier to barrier, with a pass over the data where one is needed.

    Parameters
    ----------
    sim
        A :class:`Simulation` at time 0, or what has its members.
    inner, every, keep
        As in :func:`simulate_parties`.
    """
    setup, problem, total = sim.setup, sim.setup.problem, sim.setup.steps
    stride = max(1, round(at_least("every", every, 1e-9) * problem.n))
    length = total if setup.method != "svrg" else problem.n if inner is None else inner
    check_whole_number("inner", length, min(total, 1))
    if keep not in (None, "snapshots"):
        raise unknown("thing to keep", str(keep), ("snapshots",))
    rows, snapshots, time, passes = [], [], 0.0, 0

    def note() -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            loss = problem.objective(sim.w)
        rows.append(Row(sim.now, sim.formed / problem.n + passes, sim.formed, loss))

    note()
    for first in range(0, total, length) if total else ():
        if setup.method != "sgd":
            w = sim.w
            sim.receive(problem.theta(problem.scores(w), problem.y))
            time += setup.pass_time(passes)
            passes += 1
            if keep and setup.method == "svrg":
                snapshots.append(w)
            del w  # as long as all of the data's columns
        last = min(first + length, total)
        sim.restart(last, time)
        for point in range((first // stride + 1) * stride, last, stride):
            sim.advance(point)
            note()
        sim.finish()
        time = sim.now
        if last == total or last % stride == 0:
            note()
    q, T = problem.q, sim.formed
    counts = {
        "tree": 2 * (q - 1) * T,
        "backward": (q - 1) * T if setup.backward else 0,
        "request": (q - 1) * T,
        "pass": 3 * (q - 1) * passes,
    }
    messages, log = sim.records()
    kept = np.array(snapshots).reshape(-1, problem.d) if keep else None
    return Run(sim.w, rows, messages, log if setup.log else None, kept, counts)
