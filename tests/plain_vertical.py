"""The events of VFB² as a plain loop, one method an event, to hold the compiled one against.

It does what the loop of the chapter's second notebook does, and knows more settings: bounds, masks,
requests answered at once, sparse rows, both tables of SAGA.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import sparse

from fedlib.engine.rng import stream
from fedlib.lab.vertical.wire import Block
from fedlib.papers.vertical import Problem
from fedlib.papers.vertical.algorithm import drive
from fedlib.papers.vertical.runs import Log, Messages, Run
from fedlib.papers.vertical.setup import CHUNK, Draws, Setup, total_steps
from fedlib.population.delays import EventQueue


def plain(problem: Problem, method: str, lr: float, *, rounds: bool = False, **told: Any) -> Run:
    """Run VFB², or VFB in rounds, plainly; settings are those of the library's functions."""
    how = {key: told.pop(key, other) for key, other in (("inner", None), ("every", 1.0))}
    keep = told.pop("keep", None)
    told["steps"] = total_steps(problem.n, told.pop("epochs", None), told.get("steps"))
    setup = Setup(problem, method, lr, **told | ({"log": False} if rounds else {}))
    return drive((Rounds if rounds else Plain)(setup, Draws(setup)), **how, keep=keep)


@dataclass(frozen=True)
class Uniform:
    """A delay between ``low`` and ``high``, every value equally likely."""

    low: float
    high: float

    def draws(self, seed: int, name: str, *keys: int, size: int) -> np.ndarray:
        """Return independent durations ``[size]``."""
        unit = stream(seed, f"delay {name}", *keys).random(size)
        return self.low + (self.high - self.low) * unit


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
    theta: float = 0.0
    place: int = -1  # in the order in which ϑ is formed
    there: set = field(default_factory=set)  # whose own terms are in, and which sums


class Plain:
    """A simulation, event by event."""

    def __init__(self, setup: Setup, draws: Draws) -> None:
        problem, q = setup.problem, setup.problem.q
        self.setup, self.draws, self.queue = setup, draws, EventQueue()
        self.target = self.started = self.oldest = self.formed = 0
        self.parties = []
        for block in problem.blocks:
            own = replace(problem, x=problem.x[:, block], blocks=(np.arange(len(block)),))
            self.parties.append(Block(Setup(own, setup.method, setup.lr, table=setup.table)))
            if setup.start is not None:
                self.parties[-1].w = setup.start[block]
        self.inbox, self.busy = [deque() for _ in range(q)], [0] * q
        self.waiting, self.left = deque(), {}
        self.own, self.pieces = dict.fromkeys(setup.active, 0), {}
        self.last = np.zeros((q, q))  # when the last message from a to l arrives
        self.steps, self.updates = [], []

    # a dominator's thread

    def begin(self, a):
        if self.started == self.target:
            return
        bound = self.setup.bound
        if bound is not None and self.started - self.oldest > bound:
            self.waiting.append(a)
            return
        i, delays, masks = self.drawn(a)
        q, me = self.setup.problem.q, self.parties[a]
        step = Step(a, self.started, i, delays, masks, np.zeros(q), np.zeros(q, np.int64), me.w)
        self.own[a] += 1
        self.left[self.started] = self.setup.updates
        self.started += 1
        for l in range(q):
            if l != a:
                self.send(step, l, leg=0)
        step.scores[a], step.reads[a] = me.score(i), me.version
        self.after(self.reading(a, i), self.gather, step, 0, a, "own term")
        if self.setup.trees:
            self.gather(step, 1, a, "own term")

    def gather(self, step, tree, l, term):
        """A term is in: party l's own, or the sum that another party has sent."""
        a, q = step.dominator, self.setup.problem.q
        step.there.add((tree, l, term))
        needed = {(tree, l, "own term")} | {
            (tree, l, j) for j in range(q) if j != a and self.receiver(tree, a, j) == l
        }
        if not needed <= step.there:
            return
        if l != a:
            hop, to = step.delays[l, 3 if tree else 1], self.receiver(tree, a, l)
            self.after(hop, self.gather, step, tree, to, l)
            return
        step.there.add(tree)
        if step.there >= ({0, 1} if self.setup.trees else {0}):
            self.formed_by(step)

    def receiver(self, tree, a, l):
        """Whom party l sends its sum to: found in the nested tuples, from the root down."""
        if self.setup.trees is None:
            return a
        seats = [a, *(p for p in range(self.setup.problem.q) if p != a)]
        seat, node, host = seats.index(l) + 1, self.setup.trees[tree], 1
        while host != seat:
            above = host
            node = next(child for child in node if seat in flat(child))
            host = min(flat(node))
        return seats[above - 1]

    def formed_by(self, step):
        a, problem = step.dominator, self.setup.problem
        z = (step.scores + step.masks).sum() - step.masks.sum()
        step.theta, step.place = float(problem.theta(z, problem.y[step.i])), self.formed
        self.formed += 1
        if self.setup.backward:
            for l in range(problem.q):
                if l != a:
                    self.send(step, l, leg=2)
        v = self.parties[a].estimate(step.theta, step.i, step.w)
        label = self.label(step, a, int(step.reads[a]))
        self.steps.append((a, step.i, step.theta, z, self.queue.now, label, step.reads))
        self.after(self.writing(a, step.i), self.dominate, step, label, v)

    def dominate(self, step, label, v):
        self.write(step, step.dominator, label, v, step.w)
        self.after(0, self.begin, step.dominator)

    # a collaborator's threads

    def arrive(self, step, l, leg):
        if leg == 0 and self.setup.trees:
            self.gather(step, 1, l, "own term")
        if leg == 0 and self.setup.prompt:
            me = self.parties[l]
            step.scores[l], step.reads[l] = me.score(step.i), me.version
            self.after(self.reading(l, step.i), self.gather, step, 0, l, "own term")
        else:
            self.inbox[l].append((step, leg))
            self.serve(l)

    def serve(self, l):
        while self.inbox[l] and self.busy[l] < self.setup.threads:
            step, leg = self.inbox[l].popleft()
            self.busy[l] += 1
            me = self.parties[l]
            if leg == 0:
                step.scores[l], step.reads[l] = me.score(step.i), me.version
                self.after(self.reading(l, step.i), self.answer, step, l)
            else:
                label = self.label(step, l, me.version)
                v = me.estimate(step.theta, step.i, me.w)
                lasts = self.writing(l, step.i)
                self.after(lasts, self.collaborate, step, l, label, v, me.w)

    def answer(self, step, l):
        self.gather(step, 0, l, "own term")
        self.done(l)

    def collaborate(self, step, l, label, v, w):
        self.write(step, l, label, v, w)
        self.done(l)

    def done(self, l):
        self.busy[l] -= 1
        self.serve(l)

    # what they need

    def reading(self, l, i):
        """Each number that party l has of a row takes its time."""
        row = self.parties[l].x[[i]]
        return self.setup.compute[l] * (row.nnz if sparse.issparse(row) else row.size)

    def writing(self, l, i):
        """Linear regularisers of sparse rows let all other columns be."""
        whole, task = self.setup.problem.blocks[l], self.setup.problem
        shrinks = task.regulariser == "nonconvex" or self.setup.lr * task.lam > 0.01
        if sparse.issparse(task.x) and not shrinks and self.setup.table == "theta":
            return self.reading(l, i)
        return self.setup.compute[l] * len(whole)

    def after(self, time, what, *args):
        self.queue.push(self.queue.now + time, (what, *args))

    def send(self, step, l, leg):
        time = self.queue.now + step.delays[l, leg]
        if self.setup.ordered:
            time = self.last[step.dominator, l] = max(time, self.last[step.dominator, l])
        self.queue.push(time, (self.arrive, step, l, leg))

    def label(self, step, l, read):
        self.updates.append([self.queue.now, np.nan, l, step.place, read, -1])
        return len(self.updates) - 1

    def write(self, step, l, label, v, w):
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

    def drawn(self, a):
        piece, at = divmod(self.own[a], CHUNK)
        if (a, piece) not in self.pieces:
            self.pieces[a, piece] = self.draws.piece(a, piece)
        samples, delays, masks = self.pieces[a, piece]
        return int(samples[at]), delays[at], masks[at]

    # from outside

    @property
    def now(self):
        return self.queue.now

    @property
    def w(self):
        w = np.empty(self.setup.problem.d)
        for party, block in zip(self.parties, self.setup.problem.blocks, strict=True):
            w[block] = party.w
        return w

    def receive(self, theta):
        for party in self.parties:
            party.receive(theta)

    def restart(self, target, time):
        self.target, self.queue.now = target, time
        self.waiting.clear()
        for a in self.setup.active:
            self.after(0, self.begin, a)

    def advance(self, formed):
        while len(self.queue) and self.formed < formed:
            what, *args = self.queue.pop()[1]
            what(*args)

    def finish(self):
        self.advance(math.inf)

    def records(self):
        columns = zip(*self.steps, strict=True) if self.steps else [()] * 7
        a, i, theta, z, time, label, reads = columns
        columns = zip(*self.updates, strict=True) if self.updates else [()] * 6
        begun, written, *ints = map(np.array, columns)
        sent = Messages(*map(np.array, (theta, i, a, z, time)))
        reads = np.array(reads, np.int64).reshape(-1, self.setup.problem.q)
        return sent, Log(begun, written, *ints, reads, np.array(label))


class Rounds(Plain):
    """Rounds in which all dominators take a step from one ``w``."""

    def restart(self, target, time):
        self.target, self.queue.now = target, time

    def advance(self, formed):
        while self.formed < min(formed, self.target):
            self.round(self.setup.active[: self.target - self.formed])

    def round(self, active):
        problem, steps, start = self.setup.problem, [], self.now
        self.queue.now += self.duration(active)
        for a in active:
            i = self.drawn(a)[0]
            self.own[a] += 1
            z = sum(party.score(i) for party in self.parties)
            theta = float(problem.theta(z, problem.y[i]))
            steps.append((theta, i))
            self.steps.append((a, i, theta, z, start, -1, [0] * problem.q))
            self.formed += 1
        for party in self.parties:
            w = party.w
            estimates = [party.estimate(theta, i, w) for theta, i in steps]
            for v, (theta, i) in zip(estimates, steps, strict=True):
                party.write(v, theta, i, w)

    def duration(self, active):
        k, parties, gather, update = self.setup.threads, range(len(self.parties)), 0.0, 0.0
        for a in active:
            i, delays, _ = self.drawn(a)
            jobs = [1 if l == a else math.ceil((len(active) - (l in active)) / k) for l in parties]
            work = [jobs[l] * self.reading(l, i) for l in parties]
            gather = max(gather, self.at(a, a, 0, delays[:, 0] + work, delays[:, 1]))
            if self.setup.trees:
                gather = max(gather, self.at(a, a, 1, delays[:, 0], delays[:, 3]))
            update = max(update, *(delays[l, 2] + jobs[l] * self.writing(l, i) for l in parties))
        return gather + update

    def at(self, a, l, tree, ready, hop):
        """When party l has the sum of all below it."""
        below = [j for j in range(len(ready)) if j != a and self.receiver(tree, a, j) == l]
        return max([ready[l], *(self.at(a, j, tree, ready, hop) + hop[j] for j in below)])


def flat(tree):
    return [leaf for child in tree for leaf in flat(child)] if isinstance(tree, tuple) else [tree]
