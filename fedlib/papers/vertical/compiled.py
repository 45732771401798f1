"""The event loop of VFB², compiled: the events of the chapter's readable loop, in its order.

Nothing is compiled when this module is imported: numba compiles a function at its first call and
keeps the result on disk. What belongs together lies together, in few arrays of records, since each
array that is handed over from Python costs time at every call. Most of what an event does is
inlined into :func:`_run`, for the same reason.

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
from fedlib.papers.vertical.setup import CHUNK, Draws, Setup

REQUEST, BACKWARD, GATHER, MASKS, ANSWER, COLLABORATE, DOMINATE, BEGIN = range(8)
SGD, SVRG, SAGA = range(3)
NONE, L2, NONCONVEX = range(3)
DONE, REFILL, ROOM = range(3)
TINY = 2.0**-60
# No array is made in these functions, so none needs counting: three times as fast.
compiled = njit(cache=True, _nrt=False)  # type: ignore[call-overload]
inlined = njit(cache=True, _nrt=False, inline="always")  # type: ignore[call-overload]

WHOLE, REAL, HALF = np.int64, np.float64, np.int32
CLOCK = np.dtype([
    ("now", REAL), ("heap", WHOLE), ("order", WHOLE), ("started", WHOLE), ("target", WHOLE),
    ("oldest", WHOLE), ("formed", WHOLE), ("labels", WHOLE), ("waiting", WHOLE), ("need", WHOLE),
    ("crowded", WHOLE),
])  # fmt: skip
EVENT = np.dtype([  # ``what`` happens to which party and worker of it, in which step
    ("time", REAL), ("order", WHOLE), ("what", HALF), ("party", HALF), ("worker", HALF),
    ("step", HALF),  # of BEGIN: the dominator, by its place among the active
])  # fmt: skip
JOB = np.dtype([("what", HALF), ("step", HALF)])
STEP = np.dtype([("of", WHOLE), ("i", WHOLE), ("theta", REAL), ("place", WHOLE), ("left", WHOLE)])
LINK = np.dtype([  # between a dominator and a party, for the dominator's present step
    ("request", REAL), ("answer", REAL), ("backward", REAL), ("second", REAL), ("mask", REAL),
    ("score", REAL), ("seen", WHOLE), ("last", REAL), ("ready", REAL),
])  # fmt: skip
PARTY = np.dtype([
    ("head", WHOLE), ("size", WHOLE), ("free", WHOLE), ("version", WHOLE), ("pairs", WHOLE),
    ("c", REAL), ("b", REAL),
])  # fmt: skip
SLOT = np.dtype([  # a thread of a party: its k collaborators, then the dominator; in rounds, a step
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
    trees: int  # 2, or 1: all send to the dominator


class State(NamedTuple):
    """All that the loop reads and writes."""

    rule: Rule

    # the columns in the parties' order: x for arrays, val, col and ptr for CSR
    x: np.ndarray  # [n, d]
    val: np.ndarray
    col: np.ndarray  # places in w
    ptr: np.ndarray  # [n q + 1], where row i of party l begins: ptr[i q + l]
    off: np.ndarray  # [q + 1], where each block of w begins
    y: np.ndarray
    rate: np.ndarray  # [q], time per entry
    active: np.ndarray  # [m]

    # who sends to whom on the way up a tree, for each dominator
    above: np.ndarray  # [trees, m, q]
    terms: np.ndarray  # [trees, m, q], of the sum that a party sends: its own and those below it
    upward: np.ndarray  # [m, q], parties in an order in which each comes before the one above it

    # what is under way
    clock: np.ndarray  # [1]
    heap: np.ndarray
    inbox: np.ndarray  # [q, room], rings of jobs
    idle: np.ndarray  # [q, k], stacks of free workers
    waiting: np.ndarray  # dominators that the bound holds back
    begun: np.ndarray  # [m], steps
    missing: np.ndarray  # [trees, m, q], terms that a party still waits for
    samples: np.ndarray  # [m, chunk], and what else is drawn ahead
    drawn: np.ndarray  # [m, chunk, q, 5]
    links: np.ndarray  # [m, q]
    steps: np.ndarray  # by beginning; in rounds, by the place of the dominator

    # what parties and threads hold
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

    # what is written down, by place of a step and by label of an update
    sent: np.ndarray
    reads: np.ndarray
    updates: np.ndarray


# --- events ---------------------------------------------------------------------------------------
#
# A function an event, named as in the chapter's readable loop. What each of them may write:
#
# _begin        a new step and the links to its dominator; clock: started, need; own, missing;
#               or, held back by the bound, waiting
# _gather       missing; with the last term the step's theta and place, sent, reads; clock: formed
# _dominate     what a write changes, see _written
# _arrive       the inbox; clock: crowded; missing; with ``prompt`` the link's score
# _answer       missing, and what _done does
# _collaborate  what a write changes
# _serve        the inbox and idle workers; the link's score, or what the worker's thread holds
#
# Each of them pushes events. _send keeps a link's order (last), _label gives labels (clock: labels;
# updates), _written writes the block, its version, the step's left and the clock's oldest.


@compiled
def _push(clock, heap, time, what, party, worker, step):
    """Add an event to the heap: earliest first, of the same time the one that came first."""
    n = clock[0].heap
    clock[0].heap += 1
    while n > 0:
        up = (n - 1) >> 1
        if heap[up].time <= time:  # it came earlier
            break
        heap[n] = heap[up]
        n = up
    new = heap[n]
    new.time, new.order, new.what, new.party = time, clock[0].order, what, party
    new.worker, new.step = worker, step
    clock[0].order += 1


@compiled
def _pop(clock, heap):
    """Take out the first event, set the clock to it, and return what, whose, which worker, step."""
    event = heap[0]
    taken = event.what, event.party, event.worker, event.step  # now: its place is used again
    clock[0].now = event.time
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
    return taken


@compiled
def _run(state, until):
    """Let things happen until so many values of ϑ are formed; return early for draws or room."""
    clock = state.clock[0]
    # An event pushes at most one event for each party or dominator, and two more. Arrays cannot
    # grow in here, so room is looked for before an event is taken, never in the middle of one.
    most = len(state.heap) - len(state.active) - state.rule.q - 2
    while clock.heap and clock.formed < until:
        if clock.need:
            return REFILL
        if clock.crowded or clock.heap > most:
            return ROOM
        what, party, worker, step = _pop(state.clock, state.heap)
        if what <= BACKWARD:
            _arrive(state, party, what, step)
        elif what == ANSWER:
            _answer(state, party, worker, step)
        elif what <= MASKS:
            _gather(state, what - GATHER, party, step)
        elif what == COLLABORATE:
            _collaborate(state, party, worker, step)
        elif what == DOMINATE:
            _dominate(state, party, step)
        else:
            _begin(state, step)
    return DONE


@inlined
def _begin(state, a):
    """Dominator ``a`` draws a sample and asks every party for its score."""
    clock, l, q = state.clock[0], state.active[a], state.rule.q
    if clock.started == clock.target:
        return
    if state.rule.bound >= 0 and clock.started - clock.oldest > state.rule.bound:
        state.waiting[clock.waiting] = a
        clock.waiting += 1
        return
    number, at = clock.started, state.begun[a] % state.samples.shape[1]
    step, i = state.steps[number], state.samples[a, at]
    step.of, step.i, step.left = a, i, q if state.rule.backward else 1
    clock.started += 1
    state.begun[a] += 1
    clock.need = at + 1 == state.samples.shape[1]
    for j in range(q):
        for tree in range(state.rule.trees):
            state.missing[tree, a, j] = state.terms[tree, a, j]
        link, drawn = state.links[a, j], state.drawn[a, at, j]
        link.request, link.answer, link.backward = drawn[0], drawn[1], drawn[2]
        link.second, link.mask = drawn[3], drawn[4]
        if j != l:
            _send(state, link, link.request, REQUEST, j, number)
    _hold(state, l, state.rule.threads)
    link = state.links[a, l]
    link.score, link.seen = _score(state, l, i), state.parties[l].version
    _push(state.clock, state.heap, clock.now + _reading(state, l, i), GATHER, l, 0, number)
    if state.rule.trees == 2:
        _summed(state, 1, l, number)


@inlined
def _gather(state, tree, l, number):
    """A term of a tree's sum is in at party ``l``. With the last of all, ϑ is formed and sent."""
    if not _summed(state, tree, l, number):  # others are on their way
        return
    clock, q = state.clock[0], state.rule.q
    step = state.steps[number]
    a, i = step.of, step.i
    z, masks = 0.0, 0.0  # summed apart and then subtracted, so that masks cost the digits they do
    for j in range(q):
        z += state.links[a, j].score + state.links[a, j].mask
        masks += state.links[a, j].mask
    z -= masks
    place = clock.formed
    theta = _theta(state.rule.loss, z, state.y[i])
    step.theta, step.place = theta, place
    _sent(state, theta, i, l, z, clock.labels)
    if state.rule.backward:
        for j in range(q):
            if j != l:
                _send(state, state.links[a, j], state.links[a, j].backward, BACKWARD, j, number)
    if state.rule.log:
        for j in range(q):
            state.reads[place, j] = state.links[a, j].seen
    _label(state, l, state.rule.threads, place, state.links[a, l].seen)
    _estimate(state, l, state.rule.threads, theta, i)
    _push(state.clock, state.heap, clock.now + _writing(state, l, i), DOMINATE, l, 0, number)


@inlined
def _dominate(state, l, number):
    """The dominator writes its own block and goes on with its next step."""
    _written(state, l, state.rule.threads, number)
    _push(state.clock, state.heap, state.clock[0].now, BEGIN, l, 0, state.steps[number].of)


@inlined
def _arrive(state, l, what, number):
    """A request or ``(ϑ, i)`` comes into the inbox of party ``l``."""
    clock, step = state.clock[0], state.steps[number]
    if what == REQUEST and state.rule.trees == 2:  # a mask waits for nothing
        _summed(state, 1, l, number)
    if what == REQUEST and state.rule.prompt:
        link = state.links[step.of, l]
        link.score, link.seen = _score(state, l, step.i), state.parties[l].version
        ready = clock.now + _reading(state, l, step.i)
        _push(state.clock, state.heap, ready, GATHER, l, 0, number)
        return
    party, room = state.parties[l], state.inbox.shape[1]
    job = state.inbox[l, (party.head + party.size) % room]
    job.what, job.step = what, number
    party.size += 1
    clock.crowded = party.size == room
    _serve(state, l)


@inlined
def _serve(state, l):
    """Free threads of party ``l`` take up what waits: they read the block now."""
    party, now = state.parties[l], state.clock[0].now
    while party.size and party.free:
        job = state.inbox[l, party.head]
        what, number = job.what, job.step
        party.head = (party.head + 1) % state.inbox.shape[1]
        party.size -= 1
        party.free -= 1
        worker, step = state.idle[l, party.free], state.steps[number]
        if what == REQUEST:
            link = state.links[step.of, l]
            link.score, link.seen = _score(state, l, step.i), party.version
            then, lasts = ANSWER, _reading(state, l, step.i)
        else:
            _hold(state, l, worker)
            _label(state, l, worker, step.place, party.version)
            _estimate(state, l, worker, step.theta, step.i)
            then, lasts = COLLABORATE, _writing(state, l, step.i)
        _push(state.clock, state.heap, now + lasts, then, l, worker, number)


@inlined
def _answer(state, l, worker, number):
    """The score that was asked for is there: a term of the sum that the party sends."""
    _summed(state, 0, l, number)
    _done(state, l, worker)


@inlined
def _collaborate(state, l, worker, number):
    """The collaborative update is written."""
    _written(state, l, worker, number)
    _done(state, l, worker)


# what several events do


@compiled
def _summed(state, tree, l, number):
    """Add a term at party ``l``; the whole goes up. Tell whether the dominator has all it needs."""
    step = state.steps[number]
    a = step.of
    state.missing[tree, a, l] -= 1
    if state.missing[tree, a, l]:
        return False
    if l == state.active[a]:
        return state.rule.trees == 1 or state.missing[1 - tree, a, l] == 0
    link = state.links[a, l]
    time = state.clock[0].now + (link.second if tree else link.answer)
    _push(state.clock, state.heap, time, GATHER + tree, state.above[tree, a, l], 0, number)
    return False


@inlined
def _send(state, link, time, what, l, number):
    """Send to party ``l``; what was sent before arrives before."""
    time += state.clock[0].now
    if state.rule.ordered:
        time = max(time, link.last)
        link.last = time
    _push(state.clock, state.heap, time, what, l, 0, number)


@inlined
def _sent(state, theta, i, l, z, label):
    """Note a ϑ that is formed."""
    clock = state.clock[0]
    new = state.sent[clock.formed]
    new.theta, new.i, new.dominator, new.score = theta, i, l, z
    new.time, new.label = clock.now, label
    clock.formed += 1


@inlined
def _label(state, l, thread, place, read):
    """Give the next label to the update that a thread begins, and note what it has read."""
    clock = state.clock[0]
    state.slots[l, thread].label = clock.labels
    if state.rule.log:
        new = state.updates[clock.labels]
        new.time, new.party, new.step, new.read = clock.now, l, place, read
    clock.labels += 1


@inlined
def _written(state, l, thread, number):
    """Write an update; when it is its step's last, the next step may be free to begin."""
    clock = state.clock[0]
    step = state.steps[number]
    if state.rule.log:
        new = state.updates[state.slots[l, thread].label]
        new.written, new.write = clock.now, state.parties[l].version
    clock.crowded = _write(state, l, thread, step.theta, step.i)
    state.parties[l].version += 1
    step.left -= 1
    if clock.oldest != number or step.left:
        return
    while clock.oldest < clock.started and state.steps[clock.oldest].left == 0:
        clock.oldest += 1
    for j in range(clock.waiting):  # each looks again whether it may
        a = state.waiting[j]
        _push(state.clock, state.heap, clock.now, BEGIN, state.active[a], 0, a)
    clock.waiting = 0


@inlined
def _done(state, l, worker):
    """A thread of party ``l`` takes up the next job, if there is one."""
    party = state.parties[l]
    state.idle[l, party.free] = worker
    party.free += 1
    _serve(state, l)


# --- rounds ---------------------------------------------------------------------------------------


@compiled
def run_rounds(state, until):
    """Go on in whole rounds of synchronous VFB; return early for draws or room."""
    clock = state.clock[0]
    m = len(state.active)
    while clock.formed < min(until, clock.target):
        if clock.need:
            return REFILL
        if clock.crowded:
            return ROOM
        r = min(m, clock.target - clock.formed)
        lasts = _duration(state, r)
        for a in range(r):
            at, z = state.begun[a] % state.samples.shape[1], 0.0
            i = state.samples[a, at]
            state.begun[a] += 1
            clock.need |= at + 1 == state.samples.shape[1]
            for l in range(state.rule.q):
                z += _score(state, l, i)
            step, theta = state.steps[a], _theta(state.rule.loss, z, state.y[i])
            step.i, step.theta = i, theta
            _sent(state, theta, i, state.active[a], z, -1)
        for l in range(state.rule.q):
            for a in range(r):
                _hold(state, l, a)
                _estimate(state, l, a, state.steps[a].theta, state.steps[a].i)
            for a in range(r):
                clock.crowded |= _write(state, l, a, state.steps[a].theta, state.steps[a].i)
        clock.now += lasts
    return DONE


@compiled
def _duration(state, r):
    """Return how long a round of the first ``r`` dominators lasts, see ``synchronous``."""
    gather, update = 0.0, 0.0
    for a in range(r):
        at = state.begun[a] % state.samples.shape[1]
        i = state.samples[a, at]
        for l in range(state.rule.q):
            others = r
            for j in range(r):
                others -= state.active[j] == l
            jobs = 1 if l == state.active[a] else -(-others // state.rule.threads)
            drawn = state.drawn[a, at, l]
            state.links[a, l].ready = drawn[0] + _reading(state, l, i) * jobs
            update = max(update, drawn[2] + _writing(state, l, i) * jobs)
        for tree in range(state.rule.trees):
            for l in state.upward[a]:
                link, drawn = state.links[a, l], state.drawn[a, at, l]
                if l == state.active[a]:
                    gather = max(gather, link.ready)
                else:
                    above = state.links[a, state.above[tree, a, l]]
                    above.ready = max(above.ready, link.ready + drawn[3 if tree else 1])
            for l in range(state.rule.q):  # masks wait for nothing
                state.links[a, l].ready = state.drawn[a, at, l, 0]
    return gather + update


@inlined
def _reading(state, l, i):
    """Return how long the score of a sample takes: as long as it has entries there."""
    if not state.rule.sparse:
        return state.rate[l] * (state.off[l + 1] - state.off[l])
    at = i * state.rule.q + l
    return state.rate[l] * (state.ptr[at + 1] - state.ptr[at])


@inlined
def _writing(state, l, i):
    """Return how long an update takes: through those entries (lazy), or through the block."""
    if state.rule.lazy:
        return _reading(state, l, i)
    return state.rate[l] * (state.off[l + 1] - state.off[l])


# --- the numbers ----------------------------------------------------------------------------------


@compiled
def _theta(loss, z, y):
    if loss == 0:
        return -y / (1 + np.exp(min(y * z, 700.0)))
    if loss == 1:
        return 2 * (z - y)
    return (z - y) / (1 + (z - y) ** 2 / 2)


@compiled
def _pull(rule, w, out):
    """Write ``λ ∇g(w)``."""
    lam = rule.lam
    if rule.penalty == NONE:
        out[:] = 0.0
    elif rule.penalty == L2:
        for j in range(len(w)):
            out[j] = lam * w[j]
    else:
        for j in range(len(w)):
            square = 1.0 + w[j] * w[j]
            out[j] = lam * w[j] / (square * square)


@compiled
def _sum(to, factor, what):
    """Add a multiple of one vector to another."""
    for j in range(len(to)):
        to[j] += factor * what[j]


@compiled
def _add(state, l, i, factor, to, start):
    """Add ``factor · (x_i)_l`` to a vector that begins at column ``start``."""
    if not state.rule.sparse:
        first, last = state.off[l], state.off[l + 1]
        _sum(to[first - start : last - start], factor, state.x[i, first:last])
        return
    at = i * state.rule.q + l
    for e in range(state.ptr[at], state.ptr[at + 1]):
        to[state.col[e] - start] += factor * state.val[e]


@inlined
def _score(state, l, i):
    """Return the local score of a sample."""
    rule = state.rule
    total = 0.0
    if not rule.sparse:
        for j in range(state.off[l], state.off[l + 1]):
            total += state.x[i, j] * state.w[j]
        return total
    first, last = state.ptr[i * rule.q + l], state.ptr[i * rule.q + l + 1]
    for e in range(first, last):
        total += state.val[e] * state.w[state.col[e]]
    if rule.lazy:
        total *= state.parties[l].c
        if rule.method != SGD:
            other = 0.0
            for e in range(first, last):
                other += state.val[e] * state.mean[state.col[e]]
            total += state.parties[l].b * other
    return total


@inlined
def _hold(state, l, thread):
    """Remember the block as it is now, for what this thread will write."""
    if state.rule.lazy:
        slot, party = state.slots[l, thread], state.parties[l]
        slot.live, slot.c, slot.b, slot.at = 1, party.c, party.b, party.pairs
        return
    start = state.off[l]
    for j in range(start, state.off[l + 1]):
        state.read[l, thread, j - start] = state.w[j]


@inlined
def _estimate(state, l, thread, theta, i):
    """Form the estimator from the block that was read and the memory as it is now."""
    rule = state.rule
    beta, slot = theta, state.slots[l, thread]
    if rule.method == SVRG:
        beta -= state.kept[0, i]
    elif rule.method == SAGA and not rule.full:
        beta -= state.kept[l, i]
    slot.beta, slot.mean_at = beta, state.parties[l].pairs
    if rule.lazy:
        return
    start, stop = state.off[l], state.off[l + 1]
    v = state.v[l, thread, : stop - start]
    _pull(rule, state.read[l, thread, : stop - start], v)
    if rule.method != SGD:
        _sum(v, 1.0, state.mean[start:stop])
    if rule.method == SVRG:
        _sum(v, -1.0, state.fixed[start:stop])
    elif rule.full:
        _sum(v, -1.0, state.table[i, start:stop])
    _add(state, l, i, beta, v, start)


@inlined
def _write(state, l, thread, theta, i):
    """Add the estimator to the block, and remember; return whether pairs need room (lazy)."""
    rule = state.rule
    if rule.lazy:
        return _write_lazy(state, l, thread, theta, i)
    start, stop, n = state.off[l], state.off[l + 1], len(state.y)
    v = state.v[l, thread, : stop - start]
    _sum(state.w[start:stop], -rule.lr, v)
    if rule.full:
        _pull(rule, state.read[l, thread, : stop - start], v)  # u into v, which is done with
        _add(state, l, i, theta, v, start)
        for j in range(start, stop):
            state.mean[j] += (v[j - start] - state.table[i, j]) / n
            state.table[i, j] = v[j - start]
    elif rule.method == SAGA:
        _add(state, l, i, (theta - state.kept[l, i]) / n, state.mean, 0)
        state.kept[l, i] = theta
    return False


@compiled
def _write_lazy(state, l, thread, theta, i):
    """Add the estimator through the non-zero columns (lazy); return whether pairs need room.

    The formula stands at the top of this module.
    """
    rule = state.rule
    slot, party = state.slots[l, thread], state.parties[l]
    pairs, sums = state.pairs[l], state.sums
    h = rule.lr * rule.lam if rule.penalty == L2 else 0.0
    party.c -= h * slot.c
    if rule.method != SGD:
        party.b -= h * slot.b + rule.lr
    # The same row may be noted many times: coefficients are added up first, so that each row is
    # written once.
    count, top = 0, abs(rule.lr * slot.beta)
    for k in range(slot.at, party.pairs):  # h c_B Δz + h b_B ΔD + γ ΔD_T, row by row
        pair = pairs[k]
        g = h * (slot.c * pair.z + slot.b * pair.d)
        if k >= slot.mean_at:
            g += rule.lr * pair.d
        if g != 0.0:
            if sums[pair.row] == 0.0:
                state.touched[count] = pair.row
                count += 1
            sums[pair.row] += g
            top = max(top, abs(g))
    for k in range(count):
        row = state.touched[k]
        g = sums[row]
        sums[row] = 0.0
        if abs(g) > TINY * top:
            _pair(state, l, row, g / party.c, 0.0)
    change = 0.0
    if rule.method == SAGA:
        change = (theta - state.kept[l, i]) / len(state.y)
        state.kept[l, i] = theta
        _add(state, l, i, change, state.mean, 0)
    _pair(state, l, i, -(rule.lr * slot.beta + party.b * change) / party.c, change)
    slot.live = 0  # its read is used up
    _forget(party, state.slots[l], pairs)
    if abs(party.c) < 1e-6:
        _rescale(state, l)
    return 2 * party.pairs + 2 > len(pairs)


@compiled
def _pair(state, l, row, z, d):
    """Add a row to z, and note the pair."""
    party = state.parties[l]
    _add(state, l, row, z, state.w, 0)
    pair = state.pairs[l, party.pairs]
    pair.row, pair.z, pair.d = row, z, d
    party.pairs += 1


@compiled
def _forget(party, slots, pairs):
    """Drop the pairs that no thread of this party needs any more."""
    first = party.pairs
    for t in range(len(slots)):
        if slots[t].live:
            first = min(first, slots[t].at)
    if first == 0 or 2 * first < party.pairs:  # moving pays when half of them can go
        return
    for k in range(first, party.pairs):
        pairs[k - first] = pairs[k]
    party.pairs -= first
    for t in range(len(slots)):
        slots[t].at -= first
        slots[t].mean_at -= first


@compiled
def _rescale(state, l):
    """Move the factor c into z before it gets too small."""
    c, slots, pairs = state.parties[l].c, state.slots[l], state.pairs[l]
    for j in range(state.off[l], state.off[l + 1]):
        state.w[j] *= c
    for k in range(state.parties[l].pairs):
        pairs[k].z *= c
    for t in range(len(slots)):
        slots[t].c /= c
    state.parties[l].c = 1.0


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


class Simulation:
    """The parties of a setup on a simulated clock, from outside the compiled loop."""

    def __init__(self, setup: Setup, draws: Draws) -> None:
        self.setup, self.draws = setup, draws
        self.columns = np.concatenate(setup.problem.blocks)
        rule = _rule(setup)
        self.state = State(
            rule, **_data(setup, self.columns), **_under_way(setup), **_memory(setup, rule),
            **_notes(setup),
        )  # fmt: skip
        if setup.start is not None:
            self.state.w[:] = setup.start[self.columns]
        self._pieces = np.full(setup.m, -1)

    @property
    def now(self) -> float:
        """The simulated time."""
        return float(self.state.clock["now"][0])

    @property
    def formed(self) -> int:
        """Values of ϑ."""
        return int(self.state.clock["formed"][0])

    @property
    def w(self) -> np.ndarray:
        """The model as it is now, ``[d]``."""
        w = np.empty(self.setup.problem.d)
        w[self.columns] = self._whole()
        return w

    def _whole(self) -> np.ndarray:
        """Return the model in the parties' order."""
        state = self.state
        if not state.rule.lazy:
            return state.w
        whole = state.w.copy()
        for party, first, last in zip(state.parties, state.off[:-1], state.off[1:], strict=True):
            whole[first:last] *= party["c"]
            if state.rule.method != SGD:
                whole[first:last] += party["b"] * state.mean[first:last]
        return whole

    def receive(self, theta: np.ndarray) -> None:
        """Let every party take in ϑ of all n samples."""
        state, rule, problem = self.state, self.state.rule, self.setup.problem
        state.w[:] = self._whole()
        state.parties["c"], state.parties["b"], state.parties["pairs"] = 1, 0, 0
        state.kept[:] = theta
        state.mean[:] = (problem.x.T @ (theta / problem.n))[self.columns]
        if rule.lazy:
            return
        if rule.method == SVRG:
            state.fixed[:] = problem.penalty_gradient(state.w)
            state.mean[:] += state.fixed
        elif rule.full:
            x = problem.x.toarray()[:, self.columns] if rule.sparse else state.x
            state.table[:] = theta[:, None] * x + problem.penalty_gradient(state.w)
            state.mean[:] = state.table.mean(0)

    def restart(self, target: int, time: float) -> None:
        """After a barrier: let all dominators begin at a time, until ``target`` steps are begun."""
        clock, m = self.state.clock, self.setup.m
        clock["now"], clock["target"], clock["waiting"], clock["heap"] = time, target, 0, m
        for a, party in enumerate(self.setup.active):
            self.state.heap[a] = time, clock["order"][0] + a, BEGIN, party, 0, a
        clock["order"] += m
        self._refill()

    def advance(self, formed: int) -> None:
        """Let things happen until so many values of ϑ are formed, or nothing is left to happen."""
        while (status := self.run(formed)) != DONE:
            self._refill() if status == REFILL else self._grow()

    def run(self, formed: int) -> int:
        """Call the compiled loop."""
        return _run(self.state, formed)

    def finish(self) -> None:
        """Let everything happen that is under way."""
        self.advance(np.iinfo(np.int64).max)

    def _refill(self) -> None:
        """Draw the next piece for every dominator that is at the end of its last."""
        state = self.state
        for a, party in enumerate(self.setup.active):
            piece = int(state.begun[a] // CHUNK)
            if piece != self._pieces[a]:
                self._pieces[a], drawn = piece, state.drawn[a]
                state.samples[a], drawn[:, :, :4], drawn[:, :, 4] = self.draws.piece(party, piece)
        state.clock["need"] = 0

    def _grow(self) -> None:
        """Double the room for events, inboxes and pairs."""
        state, head = self.state, self.state.parties["head"]
        turned = [np.roll(row, -first) for row, first in zip(state.inbox, head, strict=True)]
        head[:] = state.clock["crowded"] = 0
        longer = {"inbox": np.stack(turned), "heap": state.heap}
        if state.rule.lazy:
            longer |= {"pairs": state.pairs, "touched": state.touched}
        self.state = state._replace(
            **{key: np.concatenate([a, np.zeros_like(a)], axis=-1) for key, a in longer.items()}  # type: ignore[arg-type]
        )

    def records(self) -> tuple[Messages, Log | None]:
        """Return what was noted on the way."""
        state, formed = self.state, self.formed
        assert SENT.names and UPDATE.names
        sent = state.sent[:formed]
        messages = Messages(*(sent[f].copy() for f in SENT.names[:5]))
        if not state.rule.log:
            return messages, None
        done = state.updates[: int(state.clock["labels"][0])]
        ints = (done[f].astype(WHOLE) for f in UPDATE.names[2:])
        reads = state.reads[:formed].astype(WHOLE)
        log = Log(done["time"].copy(), done["written"].copy(), *ints, reads, sent["label"].copy())  # type: ignore[call-arg]
        return messages, log


class Rounds(Simulation):
    """The rounds of synchronous VFB, see :func:`~fedlib.papers.vertical.baselines.synchronous`."""

    def restart(self, target: int, time: float) -> None:
        """Begin again at a time, until ``target`` steps are done."""
        self.state.clock["target"], self.state.clock["now"] = target, time
        self._refill()

    def run(self, formed: int) -> int:
        """Go on in whole rounds until so many values of ϑ are formed, or the barrier is reached."""
        return run_rounds(self.state, formed)


def _rule(setup: Setup) -> Rule:
    """Return what the loop is told; names become numbers."""
    problem, is_sparse = setup.problem, sparse.issparse(setup.problem.x)
    penalty = ("none", "l2", "nonconvex").index(problem.regulariser)
    method = ("sgd", "svrg", "saga").index(setup.method)
    full = method == SAGA and setup.table == "full"
    bound = -1 if setup.bound is None else int(setup.bound)
    return Rule(
        is_sparse, setup.lazy, method, LOSSES.index(problem.loss), penalty,
        full, float(problem.lam), setup.lr, problem.q, int(setup.threads), bound,
        bool(setup.ordered), bool(setup.backward), bool(setup.log), setup.prompt,
        1 if setup.trees is None else 2,
    )  # fmt: skip


def _data(setup: Setup, columns: np.ndarray) -> dict[str, np.ndarray]:
    """Return the data with the parties' columns side by side."""
    problem, q, x = setup.problem, setup.problem.q, setup.problem.x
    sizes = [len(block) for block in problem.blocks]
    arrays = {
        "off": np.concatenate([[0], np.cumsum(sizes)]).astype(WHOLE), "y": problem.y,
        "rate": setup.compute.astype(REAL), "active": np.array(setup.active, WHOLE),
        "x": np.zeros((1, 1)), "val": np.zeros(1), "col": np.zeros(1, HALF),
        "ptr": np.zeros(1, WHOLE),
    }  # fmt: skip
    if not sparse.issparse(x):
        ordered = (columns[1:] > columns[:-1]).all()
        return arrays | {"x": x if ordered else np.ascontiguousarray(x[:, columns])}
    party, place = np.empty(problem.d, HALF), np.empty(problem.d, HALF)
    party[columns], place[columns] = np.repeat(np.arange(q), sizes), np.arange(problem.d)
    val, col, ptr = _split(x.indptr, x.indices, x.data, party, place, q)
    return arrays | {"val": val, "col": col, "ptr": ptr}


def _under_way(setup: Setup) -> dict[str, np.ndarray]:
    """Return the queue at time 0: nothing is under way."""
    q, m, k = setup.problem.q, setup.m, setup.threads
    above, upward = setup.routes()
    below = np.array([[np.bincount(row, minlength=q) for row in tree] for tree in above])
    terms = below + (above != np.arange(q))  # and its own; a dominator counts as below itself
    return {
        "above": above, "upward": upward, "terms": terms, "missing": np.zeros_like(terms),
        "clock": np.zeros(1, CLOCK), "heap": np.zeros(4 * (m + 1) * (q + 2), EVENT),
        "inbox": np.zeros((q, 4 * m + 4), JOB), "idle": np.tile(np.arange(k), (q, 1)),
        "waiting": np.zeros(m, WHOLE), "begun": np.zeros(m, WHOLE),
        "samples": np.zeros((m, CHUNK), WHOLE), "drawn": np.zeros((m, CHUNK, q, 5)),
        "links": np.zeros((m, q), LINK), "steps": np.zeros(max(setup.steps, m), STEP),
    }  # fmt: skip


def _memory(setup: Setup, rule: Rule) -> dict[str, np.ndarray]:
    """Return what parties and threads remember at time 0, with room for what is needed alone."""
    n, d, q = setup.problem.n, setup.problem.d, setup.problem.q
    block = 0 if rule.lazy else max(len(columns) for columns in setup.problem.blocks)
    threads = max(setup.threads + 1, setup.m)  # a round of VFB holds m at once
    room = max(64, 2 * (setup.m + 1) ** 2)  # enough for a round, whose writes follow at once
    rows = 0 if rule.method == SGD else q if rule.method == SAGA and not rule.full else 1
    parties = np.zeros(q, PARTY)
    parties["free"], parties["c"] = setup.threads, 1
    return {
        "parties": parties, "slots": np.zeros((q, threads), SLOT), "w": np.zeros(d),
        "mean": np.zeros(d if rows else 0), "kept": np.zeros((rows, n)),
        "fixed": np.zeros(d if rule.method == SVRG and block else 0),
        "table": np.zeros((n, d) if rule.full else (0, 0)),
        "read": np.zeros((q, threads, block)), "v": np.zeros((q, threads, block)),
        "pairs": np.zeros((q, room), PAIR), "sums": np.zeros(n), "touched": np.zeros(room, WHOLE),
    }  # fmt: skip


def _notes(setup: Setup) -> dict[str, np.ndarray]:
    """Return room for what is written down."""
    T = setup.steps
    logged = T if setup.log else 0
    return {
        "sent": np.empty(T, SENT), "reads": np.empty((logged, setup.problem.q), HALF),
        "updates": np.empty(logged * setup.updates, UPDATE),
    }  # fmt: skip
