"""The event loop of VFB², compiled: the events of the plain version, one by one, in its order.

Nothing is compiled when this module is imported: numba compiles a function at its first call and
keeps the result on disk. What belongs together lies together, in few arrays of records: each array
that a compiled function is given costs time at every call.

Columns are reordered once, so that each party's are neighbours. For arrays, and wherever the
regulariser is not linear, every update goes through the whole block (*eager*). For sparse data
with ``λ∇g(w) = λw`` it goes through the non-zero columns alone (*lazy*): the block is held as
``w = c z + b D``, where ``D`` is the mean that SVRG and SAGA add to every step, and shrinking
all of ``w`` changes two numbers. A thread that read ``c_B z_B + b_B D_B`` and writes later, when
other threads have changed z and D by sums of sparse rows, needs those rows again::

    w - h (c_B z_B + b_B D_B) - γ D_T - γ β x,   z_B = z - Δz,  D_B = D - ΔD,  h = γλ
        = (c - h c_B) z + (b - h b_B - γ) D + h c_B Δz + h b_B ΔD + γ ΔD_T - γ β x

so what was added to z and D is noted as pairs of a row and its coefficients, for as long as some
thread holds an older read. Coefficients shrink by the factor h each time they return; below the
rounding of float64 they are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from scipy import sparse

from fedlib.papers.vertical.problem import LOSSES
from fedlib.papers.vertical.runs import Log, Messages
from fedlib.papers.vertical.setup import Draws, Setup

REQUEST, BACKWARD, GATHER, ANSWER, COLLABORATE, DOMINATE, BEGIN = range(7)
SGD, SVRG, SAGA = range(3)
NONE, L2, NONCONVEX = range(3)
DONE, REFILL, ROOM = range(3)
LAZY = 0.01  # the largest γλ for which the lazy form is used
TINY = 2.0**-60

WHOLE, REAL, HALF = np.int64, np.float64, np.int32
CLOCK = np.dtype([
    ("now", REAL), ("heap", WHOLE), ("order", WHOLE), ("started", WHOLE), ("target", WHOLE),
    ("oldest", WHOLE), ("formed", WHOLE), ("labels", WHOLE), ("waiting", WHOLE), ("need", WHOLE),
    ("crowded", WHOLE),
])  # fmt: skip
EVENT = np.dtype([("time", REAL), ("order", WHOLE), ("what", WHOLE), ("step", WHOLE)])
STEP = np.dtype([("of", WHOLE), ("i", WHOLE), ("theta", REAL), ("place", WHOLE), ("left", WHOLE)])
LINK = np.dtype([  # between a dominator and a party, for the dominator's present step
    ("request", REAL), ("answer", REAL), ("backward", REAL), ("mask", REAL), ("score", REAL),
    ("seen", WHOLE), ("last", REAL),
])  # fmt: skip
PARTY = np.dtype([
    ("head", WHOLE), ("size", WHOLE), ("free", WHOLE), ("version", WHOLE), ("pairs", WHOLE),
    ("c", REAL), ("b", REAL),
])  # fmt: skip
SLOT = np.dtype([  # a thread of a party: its k collaborators, then the dominator
    ("label", WHOLE), ("live", WHOLE), ("c", REAL), ("b", REAL), ("at", WHOLE), ("mean_at", WHOLE),
    ("beta", REAL),
])  # fmt: skip
PAIR = np.dtype([("row", WHOLE), ("z", REAL), ("d", REAL)])
SENT = np.dtype([
    ("theta", REAL), ("i", WHOLE), ("dominator", WHOLE), ("score", REAL), ("time", REAL),
    ("label", WHOLE),
])  # fmt: skip
UPDATE = np.dtype([
    ("time", REAL), ("written", REAL), ("party", HALF), ("step", HALF), ("read", HALF),
    ("write", HALF),
])  # fmt: skip


class Data(NamedTuple):
    """The columns in the parties' order: ``x`` for arrays, ``val``, ``col``, ``ptr`` for CSR."""

    x: np.ndarray  # [n, d]
    val: np.ndarray
    col: np.ndarray  # places in w
    ptr: np.ndarray  # [n q + 1], where row i of party l begins: ptr[i q + l]
    off: np.ndarray  # [q + 1], where each block of w begins
    y: np.ndarray
    cost: np.ndarray  # [q]
    active: np.ndarray  # [m]


class Rule(NamedTuple):
    """What does not change in a simulation."""

    sparse: bool
    lazy: bool
    method: int
    loss: int
    penalty: int
    full: bool  # SAGA's table
    lam: float
    lr: float
    q: int
    threads: int
    bound: int  # -1: none
    ordered: bool
    backward: bool
    log: bool
    prompt: bool


class Queue(NamedTuple):
    """What is under way."""

    clock: np.ndarray  # [1]
    heap: np.ndarray
    inbox: np.ndarray  # [q, room], rings of 2 step + (1 if it is (ϑ, i))
    idle: np.ndarray  # [q, k], stacks of free workers
    waiting: np.ndarray  # dominators that the bound holds back
    own: np.ndarray  # [m], steps begun
    missing: np.ndarray  # [m], scores
    samples: np.ndarray  # [m, chunk], and what else is drawn ahead
    drawn: np.ndarray  # [m, chunk, q, 4]
    links: np.ndarray  # [m, q]
    steps: np.ndarray  # by beginning


class Memory(NamedTuple):
    """What parties and threads hold."""

    parties: np.ndarray
    slots: np.ndarray  # [q, k + 1], threads
    w: np.ndarray  # z in the lazy form
    mean: np.ndarray  # what the estimator adds to every step; D in the lazy form
    fixed: np.ndarray  # λ∇g(w^s)
    kept: np.ndarray  # [q or 1, n]: ϑ as remembered
    table: np.ndarray  # [n, d]
    read: np.ndarray  # [q, k + 1, block]: the block as it was read; and the estimator
    v: np.ndarray
    pairs: np.ndarray  # [q, room]
    sums: np.ndarray  # [n], zero between two writes
    touched: np.ndarray


class Notes(NamedTuple):
    """What is written down, by place of a step and by label of an update."""

    sent: np.ndarray
    reads: np.ndarray
    updates: np.ndarray


# --- events ---------------------------------------------------------------------------------------


@njit(cache=True)
def _push(clock, heap, time, what, step):
    """Add an event to the heap: earliest first, of the same time the one that came first."""
    n = clock[0].heap
    clock[0].heap += 1
    while n > 0:
        up = (n - 1) >> 1
        if heap[up].time <= time:  # it came earlier
            break
        heap[n] = heap[up]
        n = up
    heap[n].time, heap[n].order, heap[n].what, heap[n].step = time, clock[0].order, what, step
    clock[0].order += 1


@njit(cache=True)
def _pop(clock, heap):
    """Take out the first event, set the clock to it, and return what happens and in which step."""
    what, step = heap[0].what, heap[0].step
    clock[0].now = heap[0].time
    clock[0].heap -= 1
    n, at = clock[0].heap, 0
    time, order = heap[n].time, heap[n].order
    while True:
        down = 2 * at + 1
        if down >= n:
            break
        a, b = heap[down], heap[down + 1]
        if down + 1 < n and (b.time < a.time or (b.time == a.time and b.order < a.order)):
            down += 1
        first = heap[down]
        if time < first.time or (time == first.time and order < first.order):
            break
        heap[at] = heap[down]
        at = down
    heap[at] = heap[n]
    return what, step


@njit(cache=True)
def _run(D, R, Q, M, N, until):
    """Let things happen until so many values of ϑ are formed; return early for draws or room."""
    clock, heap, inbox, idle, links, steps = Q.clock, Q.heap, Q.inbox, Q.idle, Q.links, Q.steps
    parties, slots, updates, q, k = M.parties, M.slots, N.updates, R.q, R.threads
    cost, active, m = D.cost, D.active, len(D.active)
    me = clock[0]
    while me.heap and me.formed < until:
        if me.need:
            return REFILL
        if me.crowded or me.heap + m + q + 2 > len(heap):
            return ROOM
        packed, number = _pop(clock, heap)
        what, l, worker, serving = packed % 8, packed // 8 % q, packed // 8 // q, False
        step = steps[number]

        if what == REQUEST and R.prompt:  # Simulation.arrive
            link = links[step.of, l]
            link.score, link.seen = _score(D, R, M, l, step.i), parties[l].version
            _push(clock, heap, me.now + (cost[l] + link.answer), GATHER + 8 * l, number)

        elif what <= BACKWARD:
            box = parties[l]
            inbox[l, (box.head + box.size) % inbox.shape[1]] = 2 * number + what
            box.size += 1
            me.crowded = box.size == inbox.shape[1]
            serving = True

        elif what == ANSWER:  # Simulation.answer
            _push(clock, heap, me.now + links[step.of, l].answer, GATHER + 8 * l, number)
            idle[l, parties[l].free] = worker
            parties[l].free += 1
            serving = True

        elif what == GATHER:  # Simulation.gather
            a = step.of
            Q.missing[a] -= 1
            if Q.missing[a]:
                continue
            z, masks = 0.0, 0.0
            for j in range(q):
                z += links[a, j].score + links[a, j].mask
                masks += links[a, j].mask
            z -= masks
            l = active[a]
            theta, place = _theta(R.loss, z, D.y[step.i]), me.formed
            step.theta, step.place = theta, place
            me.formed += 1
            if R.backward:
                for j in range(q):
                    if j != l:
                        time = me.now + links[a, j].backward
                        if R.ordered:
                            time = max(time, links[a, j].last)
                            links[a, j].last = time
                        _push(clock, heap, time, BACKWARD + 8 * j, number)
            _estimate(D, R, M, l, k, theta, step.i)
            sent = N.sent[place]
            sent.theta, sent.i, sent.dominator, sent.score = theta, step.i, l, z
            sent.time, sent.label = me.now, me.labels
            slots[l, k].label = me.labels
            if R.log:
                for j in range(q):
                    N.reads[place, j] = links[a, j].seen
                new = updates[me.labels]
                new.time, new.party, new.step, new.read = me.now, l, place, links[a, l].seen
            me.labels += 1
            _push(clock, heap, me.now + cost[l], DOMINATE + 8 * l, number)

        elif what == BEGIN:  # Simulation.begin
            a = number
            if me.started == me.target:
                continue
            if R.bound >= 0 and me.started - me.oldest > R.bound:
                Q.waiting[me.waiting] = a
                me.waiting += 1
                continue
            number, at = me.started, Q.own[a] % Q.samples.shape[1]
            i = Q.samples[a, at]
            steps[number].of, steps[number].i = a, i
            steps[number].left = q if R.backward else 1
            me.started += 1
            Q.own[a] += 1
            me.need = at + 1 == Q.samples.shape[1]
            Q.missing[a] = q
            for j in range(q):
                link = links[a, j]
                link.request, link.answer = Q.drawn[a, at, j, 0], Q.drawn[a, at, j, 1]
                link.backward, link.mask = Q.drawn[a, at, j, 2], Q.drawn[a, at, j, 3]
                if j != l:
                    time = me.now + link.request
                    if R.ordered:
                        time = max(time, link.last)
                        link.last = time
                    _push(clock, heap, time, REQUEST + 8 * j, number)
            _hold(D, R, M, l, k)
            links[a, l].score, links[a, l].seen = _score(D, R, M, l, i), parties[l].version
            _push(clock, heap, me.now + cost[l], GATHER + 8 * l, number)

        else:  # Simulation.write
            thread = worker if what == COLLABORATE else k
            if R.log:
                new = updates[slots[l, thread].label]
                new.written, new.write = me.now, parties[l].version
            if R.lazy:
                me.crowded = _write_lazy(D, R, M, l, thread, step.theta, step.i)
            else:
                _write(D, R, M, l, thread, step.theta, step.i)
            parties[l].version += 1
            step.left -= 1
            if me.oldest == number and step.left == 0:
                while me.oldest < me.started and steps[me.oldest].left == 0:
                    me.oldest += 1
                for j in range(me.waiting):
                    a = Q.waiting[j]
                    _push(clock, heap, me.now, BEGIN + 8 * active[a], a)
                me.waiting = 0
            if what == COLLABORATE:
                idle[l, parties[l].free] = worker
                parties[l].free += 1
                serving = True
            else:
                _push(clock, heap, me.now, BEGIN + 8 * l, step.of)

        while serving and parties[l].size and parties[l].free:  # Simulation.serve
            box = parties[l]
            job = inbox[l, box.head]
            box.head = (box.head + 1) % inbox.shape[1]
            box.size -= 1
            box.free -= 1
            worker, number = idle[l, box.free], job // 2
            step = steps[number]
            if job % 2 == 0:
                link = links[step.of, l]
                link.score, link.seen = _score(D, R, M, l, step.i), box.version
                then = ANSWER
            else:
                then = COLLABORATE
                _hold(D, R, M, l, worker)
                slots[l, worker].label = me.labels
                if R.log:
                    new = updates[me.labels]
                    new.time, new.party, new.step, new.read = me.now, l, step.place, box.version
                me.labels += 1
                _estimate(D, R, M, l, worker, step.theta, step.i)
            _push(clock, heap, me.now + cost[l], then + 8 * (l + q * worker), number)
    return DONE


@njit(cache=True)
def run_rounds(D, R, Q, M, N, until):
    """Go on in whole rounds of synchronous VFB; the plain version is ``baselines.Rounds``."""
    me, q, m = Q.clock[0], R.q, len(D.active)
    theta, sample = np.empty(m), np.empty(m, WHOLE)
    while me.formed < min(until, me.target):
        if me.need:
            return REFILL
        if me.crowded:
            return ROOM
        r = min(m, me.target - me.formed)
        gather, update = 0.0, 0.0
        for a in range(r):
            own, at = D.active[a], Q.own[a] % Q.samples.shape[1]
            for l in range(q):
                others = r
                for j in range(r):
                    others -= D.active[j] == l
                jobs = 1 if l == own else -(-others // R.threads)
                drawn = Q.drawn[a, at, l]
                gather = max(gather, drawn[0] + D.cost[l] * jobs + drawn[1])
                update = max(update, drawn[2] + D.cost[l] * jobs)
        for a in range(r):
            at, z = Q.own[a] % Q.samples.shape[1], 0.0
            i = sample[a] = Q.samples[a, at]
            Q.own[a] += 1
            me.need |= at + 1 == Q.samples.shape[1]
            for l in range(q):
                z += _score(D, R, M, l, i)
            theta[a] = _theta(R.loss, z, D.y[i])
            sent = N.sent[me.formed]
            sent.theta, sent.i, sent.dominator, sent.score = theta[a], i, D.active[a], z
            sent.time, sent.label = me.now, -1
            me.formed += 1
        for l in range(q):
            for a in range(r):
                _hold(D, R, M, l, a)
                _estimate(D, R, M, l, a, theta[a], sample[a])
            for a in range(r):
                if R.lazy:
                    me.crowded |= _write_lazy(D, R, M, l, a, theta[a], sample[a])
                else:
                    _write(D, R, M, l, a, theta[a], sample[a])
        me.now += gather + update
    return DONE


# --- the numbers ----------------------------------------------------------------------------------


@njit(cache=True)
def _theta(loss, z, y):
    if loss == 0:
        return -y / (1 + np.exp(min(y * z, 700.0)))
    if loss == 1:
        return 2 * (z - y)
    return (z - y) / (1 + (z - y) ** 2 / 2)


@njit(cache=True)
def _pull(R, w, out):
    """Write ``λ ∇g(w)``."""
    lam = R.lam
    if R.penalty == NONE:
        out[:] = 0.0
    elif R.penalty == L2:
        for j in range(len(w)):
            out[j] = lam * w[j]
    else:
        for j in range(len(w)):
            square = 1.0 + w[j] * w[j]
            out[j] = lam * w[j] / (square * square)


@njit(cache=True)
def _sum(to, factor, what):
    """Add a multiple of one vector to another."""
    for j in range(len(to)):
        to[j] += factor * what[j]


@njit(cache=True)
def _score(D, R, M, l, i):
    """Return the local score of a sample."""
    total = 0.0
    if not R.sparse:
        for j in range(D.off[l], D.off[l + 1]):
            total += D.x[i, j] * M.w[j]
        return total
    first, last = D.ptr[i * R.q + l], D.ptr[i * R.q + l + 1]
    for e in range(first, last):
        total += D.val[e] * M.w[D.col[e]]
    if R.lazy:
        total *= M.parties[l].c
        if R.method != SGD:
            other = 0.0
            for e in range(first, last):
                other += D.val[e] * M.mean[D.col[e]]
            total += M.parties[l].b * other
    return total


@njit(cache=True)
def _add(D, R, l, i, factor, to):
    """Add ``factor · (x_i)_l`` to the party's part of a vector of all columns (sparse data)."""
    at = i * R.q + l
    for e in range(D.ptr[at], D.ptr[at + 1]):
        to[D.col[e]] += factor * D.val[e]


@njit(cache=True)
def _hold(D, R, M, l, thread):
    """Remember the block as it is now, for what this thread will write."""
    start = D.off[l]
    if R.lazy:
        slot, party = M.slots[l, thread], M.parties[l]
        slot.live, slot.c, slot.b, slot.at = 1, party.c, party.b, party.pairs
    else:
        for j in range(start, D.off[l + 1]):
            M.read[l, thread, j - start] = M.w[j]


@njit(cache=True)
def _estimate(D, R, M, l, thread, theta, i):
    """Form the estimator from the block that was read and the memory as it is now."""
    beta, slot = theta, M.slots[l, thread]
    if R.method == SVRG:
        beta -= M.kept[0, i]
    elif R.method == SAGA and not R.full:
        beta -= M.kept[l, i]
    slot.beta, slot.mean_at = beta, M.parties[l].pairs
    if R.lazy:
        return
    start, stop = D.off[l], D.off[l + 1]
    read, v = M.read[l, thread, : stop - start], M.v[l, thread, : stop - start]
    _pull(R, read, v)
    if R.method != SGD:
        _sum(v, 1.0, M.mean[start:stop])
    if R.method == SVRG:
        _sum(v, -1.0, M.fixed[start:stop])
    elif R.full:
        _sum(v, -1.0, M.table[i, start:stop])
    if not R.sparse:
        _sum(v, beta, D.x[i, start:stop])
    else:
        at = i * R.q + l
        for e in range(D.ptr[at], D.ptr[at + 1]):
            v[D.col[e] - start] += beta * D.val[e]


@njit(cache=True)
def _write(D, R, M, l, thread, theta, i):
    """Add the estimator to the whole block, and remember (eager)."""
    start, stop, n = D.off[l], D.off[l + 1], len(D.y)
    read, v = M.read[l, thread, : stop - start], M.v[l, thread, : stop - start]
    _sum(M.w[start:stop], -R.lr, v)
    if R.method != SAGA:
        return
    if R.full:
        _pull(R, read, v)  # u into v: the estimator is not needed any more
        if not R.sparse:
            _sum(v, theta, D.x[i, start:stop])
        else:
            at = i * R.q + l
            for e in range(D.ptr[at], D.ptr[at + 1]):
                v[D.col[e] - start] += theta * D.val[e]
        for j in range(start, stop):
            M.mean[j] += (v[j - start] - M.table[i, j]) / n
            M.table[i, j] = v[j - start]
        return
    change = (theta - M.kept[l, i]) / n
    M.kept[l, i] = theta
    if R.sparse:
        _add(D, R, l, i, change, M.mean)
    else:
        _sum(M.mean[start:stop], change, D.x[i, start:stop])


@njit(cache=True)
def _write_lazy(D, R, M, l, thread, theta, i):
    """Add the estimator through the non-zero columns (lazy); return whether pairs need room.

    The formula stands at the top of this module.
    """
    slot, party, pairs, sums = M.slots[l, thread], M.parties[l], M.pairs[l], M.sums
    h = R.lr * R.lam if R.penalty == L2 else 0.0
    party.c -= h * slot.c
    if R.method != SGD:
        party.b -= h * slot.b + R.lr
    count, top = 0, abs(R.lr * slot.beta)
    for k in range(slot.at, party.pairs):  # h c_B Δz + h b_B ΔD + γ ΔD_T, row by row
        pair = pairs[k]
        g = h * (slot.c * pair.z + slot.b * pair.d)
        if k >= slot.mean_at:
            g += R.lr * pair.d
        if g != 0.0:
            if sums[pair.row] == 0.0:
                M.touched[count] = pair.row
                count += 1
            sums[pair.row] += g
            top = max(top, abs(g))
    for k in range(count):
        row = M.touched[k]
        g = sums[row]
        sums[row] = 0.0
        if abs(g) > TINY * top:
            _note(D, R, M, l, row, g / party.c, 0.0)
    change = 0.0
    if R.method == SAGA:
        change = (theta - M.kept[l, i]) / len(D.y)
        M.kept[l, i] = theta
        _add(D, R, l, i, change, M.mean)
    _note(D, R, M, l, i, -(R.lr * slot.beta + party.b * change) / party.c, change)
    slot.live = 0
    _forget(M, l)
    if abs(party.c) < 1e-6:
        _rescale(D, M, l)
    return 2 * party.pairs + 2 > len(pairs)


@njit(cache=True)
def _note(D, R, M, l, row, z, d):
    """Add a row to z, and note the pair."""
    _add(D, R, l, row, z, M.w)
    pair = M.pairs[l, M.parties[l].pairs]
    pair.row, pair.z, pair.d = row, z, d
    M.parties[l].pairs += 1


@njit(cache=True)
def _forget(M, l):
    """Drop the pairs that no thread of this party needs any more."""
    party, slots, pairs = M.parties[l], M.slots[l], M.pairs[l]
    first = party.pairs
    for t in range(len(slots)):
        if slots[t].live:
            first = min(first, slots[t].at)
    if first == 0 or 2 * first < party.pairs:
        return
    for k in range(first, party.pairs):
        pairs[k - first] = pairs[k]
    party.pairs -= first
    for t in range(len(slots)):
        slots[t].at -= first
        slots[t].mean_at -= first


@njit(cache=True)
def _rescale(D, M, l):
    """Move the factor c into z before it gets too small."""
    c, slots, pairs = M.parties[l].c, M.slots[l], M.pairs[l]
    for j in range(D.off[l], D.off[l + 1]):
        M.w[j] *= c
    for k in range(M.parties[l].pairs):
        pairs[k].z *= c
    for t in range(len(slots)):
        slots[t].c /= c
    M.parties[l].c = 1.0


@njit(cache=True)
def _split(indptr, indices, data, party, place, q):
    """Return CSR data with each row cut into its parties' pieces: values, places, beginnings."""
    n = len(indptr) - 1
    ptr = np.zeros(n * q + 1, np.int64)
    for i in range(n):
        for e in range(indptr[i], indptr[i + 1]):
            ptr[i * q + party[indices[e]] + 1] += 1
    for at in range(n * q):
        ptr[at + 1] += ptr[at]
    val, col, to = np.empty_like(data), np.empty(len(data), np.int32), ptr[:-1].copy()
    for i in range(n):
        for e in range(indptr[i], indptr[i + 1]):
            at = i * q + party[indices[e]]
            val[to[at]], col[to[at]] = data[e], place[indices[e]]
            to[at] += 1
    return val, col, ptr


# --- from outside ---------------------------------------------------------------------------------


class Compiled:
    """The same as the plain ``Simulation``, from the outside."""

    def __init__(self, setup: Setup, draws: Draws) -> None:
        self.setup, self.draws = setup, draws
        problem = setup.problem
        self.columns = np.concatenate(problem.blocks)
        self.D, self.R = _data(setup, self.columns), _rule(setup)
        self.Q, self.M, self.N = _queue(setup), _memory(setup, self.R), _notes(setup)
        start = np.zeros(problem.d) if setup.start is None else setup.start
        self.M.w[:] = start[self.columns]
        self._pieces = np.full(setup.m, -1)

    @property
    def now(self) -> float:
        """The simulated time."""
        return float(self.Q.clock["now"][0])

    @property
    def formed(self) -> int:
        """Values of ϑ."""
        return int(self.Q.clock["formed"][0])

    @property
    def w(self) -> np.ndarray:
        """The model as it is now, ``[d]``."""
        w = np.empty(self.setup.problem.d)
        w[self.columns] = self._whole()
        return w

    def _whole(self) -> np.ndarray:
        """Return the model in the parties' order."""
        M, off = self.M, self.D.off
        if not self.R.lazy:
            return M.w
        whole = M.w.copy()
        for party, first, last in zip(M.parties, off[:-1], off[1:], strict=True):
            whole[first:last] *= party["c"]
            if self.R.method != SGD:
                whole[first:last] += party["b"] * M.mean[first:last]
        return whole

    def receive(self, theta: np.ndarray) -> None:
        """Let every party take in ϑ of all n samples."""
        M, problem = self.M, self.setup.problem
        M.w[:] = self._whole()
        M.parties["c"], M.parties["b"], M.parties["pairs"] = 1, 0, 0
        M.kept[:] = theta
        M.mean[:] = (problem.x.T @ (theta / problem.n))[self.columns]
        if self.R.lazy:
            return
        if self.R.method == SVRG:
            M.fixed[:] = problem.penalty_gradient(M.w)
            M.mean[:] += M.fixed
        elif self.R.full:
            x = problem.x.toarray()[:, self.columns] if self.R.sparse else self.D.x
            M.table[:] = theta[:, None] * x + problem.penalty_gradient(M.w)
            M.mean[:] = M.table.mean(0)

    def restart(self, target: int, time: float) -> None:
        """After a barrier: let all dominators begin at a time, until ``target`` steps are begun."""
        clock, m = self.Q.clock, self.setup.m
        clock["now"], clock["target"], clock["waiting"], clock["heap"] = time, target, 0, m
        for a, party in enumerate(self.setup.active):
            self.Q.heap[a] = time, clock["order"][0] + a, BEGIN + 8 * party, a
        clock["order"] += m
        self._refill()

    def advance(self, formed: int) -> None:
        """Let things happen until so many values of ϑ are formed, or nothing is left to happen."""
        while (status := _run(self.D, self.R, self.Q, self.M, self.N, formed)) != DONE:
            self._refill() if status == REFILL else self._grow()

    def finish(self) -> None:
        """Let everything happen that is under way."""
        self.advance(np.iinfo(np.int64).max)

    def _refill(self) -> None:
        """Draw the next piece for every dominator that is at the end of its last."""
        for a, party in enumerate(self.setup.active):
            piece = self.Q.own[a] // self.setup.chunk
            if piece != self._pieces[a]:
                self._pieces[a], drawn = piece, self.Q.drawn[a]
                self.Q.samples[a], drawn[:, :, :3], drawn[:, :, 3] = self.draws.piece(
                    party, int(piece)
                )
        self.Q.clock["need"] = 0

    def _grow(self) -> None:
        """Double the room for events, inboxes and pairs."""
        Q, M = self.Q, self.M
        turned = [np.roll(row, -h) for row, h in zip(Q.inbox, M.parties["head"], strict=True)]
        M.parties["head"] = 0
        self.Q = Q._replace(inbox=_longer(np.stack(turned)), heap=_longer(Q.heap))
        if self.R.lazy:
            self.M = M._replace(pairs=_longer(M.pairs), touched=_longer(M.touched))
        Q.clock["crowded"] = 0

    def records(self) -> tuple[Messages, Log | None]:
        """Return what was noted on the way, as the plain version does."""
        sent = self.N.sent[: self.formed]
        messages = Messages(*(sent[f].copy() for f in SENT.names[:5]))
        if not self.R.log:
            return messages, None
        done = self.N.updates[: int(self.Q.clock["labels"][0])]
        ints = (done[f].astype(WHOLE) for f in UPDATE.names[2:])
        reads = self.N.reads[: self.formed].astype(WHOLE)
        log = Log(done["time"].copy(), done["written"].copy(), *ints, reads, sent["label"].copy())
        return messages, log


def _longer(a: np.ndarray) -> np.ndarray:
    """Return an array with twice the room along its last axis."""
    return np.concatenate([a, np.zeros_like(a)], axis=-1)


def _data(setup: Setup, columns: np.ndarray) -> Data:
    """Return the data with the parties' columns side by side."""
    problem, q = setup.problem, setup.problem.q
    sizes = [len(block) for block in problem.blocks]
    off = np.concatenate([[0], np.cumsum(sizes)]).astype(WHOLE)
    rest = off, problem.y, setup.cost.astype(REAL), np.array(setup.active, WHOLE)
    if not sparse.issparse(problem.x):
        ordered = (columns[1:] > columns[:-1]).all()
        x = problem.x if ordered else np.ascontiguousarray(problem.x[:, columns])
        return Data(x, np.zeros(1), np.zeros(1, HALF), np.zeros(1, WHOLE), *rest)
    party, place = np.empty(problem.d, HALF), np.empty(problem.d, HALF)
    party[columns], place[columns] = np.repeat(np.arange(q), sizes), np.arange(problem.d)
    x = problem.x
    return Data(np.zeros((1, 1)), *_split(x.indptr, x.indices, x.data, party, place, q), *rest)


def _rule(setup: Setup) -> Rule:
    """Return what the loop is told; names become numbers."""
    problem, is_sparse = setup.problem, sparse.issparse(setup.problem.x)
    penalty = ("none", "l2", "nonconvex").index(problem.regulariser)
    method = ("sgd", "svrg", "saga").index(setup.method)
    full = method == SAGA and setup.table == "full"
    linear = penalty == NONE or (penalty == L2 and setup.lr * problem.lam <= LAZY)
    bound = -1 if setup.bound is None else int(setup.bound)
    return Rule(
        is_sparse, is_sparse and linear and not full, method, LOSSES.index(problem.loss), penalty,
        full, float(problem.lam), setup.lr, problem.q, int(setup.threads), bound,
        bool(setup.ordered), bool(setup.backward), bool(setup.log), setup.prompt,
    )  # fmt: skip


def _queue(setup: Setup) -> Queue:
    """Return the queue at time 0: nothing is under way."""
    q, m, k, chunk = setup.problem.q, setup.m, setup.threads, setup.chunk
    idle = np.ascontiguousarray(np.tile(np.arange(k), (q, 1)))
    steps = np.zeros(max(setup.steps, m), STEP)
    return Queue(
        np.zeros(1, CLOCK), np.zeros(4 * (m + 1) * (q + 2), EVENT), np.zeros((q, 4 * m + 4), WHOLE),
        idle, np.zeros(m, WHOLE), np.zeros(m, WHOLE), np.zeros(m, WHOLE),
        np.zeros((m, chunk), WHOLE), np.zeros((m, chunk, q, 4)), np.zeros((m, q), LINK), steps,
    )  # fmt: skip


def _memory(setup: Setup, R: Rule) -> Memory:
    """Return what parties and threads hold at time 0, with room for what is needed alone."""
    n, d, q = setup.problem.n, setup.problem.d, setup.problem.q
    block = max(len(columns) for columns in setup.problem.blocks)
    threads = max(setup.threads + 1, setup.m)  # a round of VFB holds m at once
    room = max(64, 2 * (setup.m + 1) ** 2)  # enough for a round, whose writes follow at once
    rows = 0 if R.method == SGD else q if R.method == SAGA and not R.full else 1
    parties = np.zeros(q, PARTY)
    parties["free"], parties["c"] = setup.threads, 1
    eager = 0 if R.lazy else block
    return Memory(
        parties, np.zeros((q, threads), SLOT), np.zeros(d), np.zeros(d if rows else 0),
        np.zeros(d if R.method == SVRG and eager else 0), np.zeros((rows, n)),
        np.zeros((n, d) if R.full else (0, 0)), np.zeros((q, threads, eager)),
        np.zeros((q, threads, eager)), np.zeros((q, room), PAIR), np.zeros(n),
        np.zeros(room, WHOLE),
    )  # fmt: skip


def _notes(setup: Setup) -> Notes:
    """Return room for what is written down."""
    T, updates = setup.steps, setup.steps * setup.updates
    reads = np.empty((T if setup.log else 0, setup.problem.q), HALF)
    return Notes(np.empty(T, SENT), reads, np.empty(updates if setup.log else 0, UPDATE))
