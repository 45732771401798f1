"""The event simulation of VFB²: delays as logged, the compiled loop, threads, laws, seeds."""

from dataclasses import fields

import numpy as np
import pytest
from plain_vertical import Plain, Uniform, plain
from scipy import sparse

from fedlib.errors import FedlibError
from fedlib.papers.vertical import Problem, simulate_parties, split_features, synchronous
from fedlib.papers.vertical.compiled import Simulation
from fedlib.papers.vertical.secure import FIGURE_5, chains, log_depth
from fedlib.papers.vertical.setup import CHUNK, Draws, Setup
from fedlib.population.delays import Deterministic, ShiftedExponential

N, D, Q = 30, 10, 4
RNG = np.random.default_rng(1)
X = RNG.standard_normal((N, D)) * (RNG.random((N, D)) < 0.5)
Y = np.sign(X @ RNG.standard_normal(D) + 0.3 * RNG.standard_normal(N))
METHODS = ["sgd", "svrg", "saga"]
LAWS = {
    "fixed": Deterministic(3.0),
    "uniform": Uniform(1.0, 9.0),
    "exponential": ShiftedExponential(0.0, 6.0),
    "shifted": ShiftedExponential(2.0, 6.0),
    "none": Deterministic(0.0),
    "mixed": [Deterministic(1.0), Uniform(0, 5), ShiftedExponential(1, 30), Deterministic(0)],
}
RANDOM = ShiftedExponential(1.0, 15.0)


def problem(x=X, q=Q, regulariser="l2", lam=0.05):
    return Problem(x, Y, split_features(x.shape[1], q), "logistic", lam, regulariser)


def setup_of(task, method, lr=0.1, **told):
    base = dict(active=3, threads=2, compute=[0.5, 1, 2, 1], delays=RANDOM, steps=60)
    return Setup(task, method, lr, **base | told)


# --- test 9: the delay identities -----------------------------------------------------------------


class Witness(Plain):
    """Notes what the log does not hold: every update, every version of every block."""

    def __init__(self, setup, draws):
        super().__init__(setup, draws)
        self.v, self.versions = {}, [[party.w] for party in self.parties]

    def write(self, step, l, label, v, w):
        super().write(step, l, label, v, w)
        self.v[label] = v
        self.versions[l].append(self.parties[l].w)


def witnessed(method, **told):
    setup = setup_of(problem(), method, **told)
    sim = Witness(setup, Draws(setup))
    if method != "sgd":
        sim.receive(setup.problem.theta(np.zeros(N), Y))
    sim.restart(setup.steps, 0.0)
    sim.finish()
    return sim, *sim.records()


def embedded(sim, labels, party):
    """``γ Σ U_ψ(u) ṽ_u`` over labels, ``[d]``."""
    out = np.zeros(D)
    for u in labels:
        out[sim.setup.problem.blocks[party[u]]] += sim.setup.lr * sim.v[u]
    return out


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ordered", [True, False])
def test_both_delay_identities_hold(method, ordered):
    sim, sent, log = witnessed(method, ordered=ordered)
    blocks, count = sim.setup.problem.blocks, len(log.party)
    assert sorted(sim.v) == list(range(count)) and count == 60 * Q
    tau1, tau2 = log.staleness()
    w = [np.zeros(D)]  # the paper's w_t: updates taken off in the order of their labels
    for t in range(count):
        w.append(w[-1] - embedded(sim, [t], log.party))
    assert np.allclose(w[-1], sim.w, atol=1e-13)
    read, missed = [], []
    for s, d in enumerate(log.label):
        seen = log.reads[s]
        read.append(np.empty(D))
        for l, block in enumerate(blocks):
            read[s][block] = sim.versions[l][seen[l]]
        missed.append([u for u in range(d) if log.write[u] >= seen[log.party[u]]])
        assert sent.score[s] == pytest.approx(X[sent.i[s]] @ read[s], abs=1e-13)
        assert np.allclose(read[s], w[d] + embedded(sim, missed[s], log.party), atol=1e-13)  # (4)
        assert tau1[d] == (d - min(missed[s]) if missed[s] else 0) and tau2[d] == 0
    for t in range(count):
        s = log.step[t]
        if t == log.label[s]:
            continue
        late = sorted({*missed[s], *range(log.label[s], t)})
        assert np.allclose(read[s], w[t] + embedded(sim, late, log.party), atol=1e-13)  # (5)
        assert tau2[t] == t - min(late)
        l = log.party[t]
        own = [u for u in range(t) if log.party[u] == l and log.write[u] >= log.read[t]]
        assert np.allclose(
            sim.versions[l][log.read[t]], (w[t] + embedded(sim, own, log.party))[blocks[l]]
        )
        assert tau1[t] == (t - min(own) if own else 0)
    assert tau1.max() > Q and tau2.max() > 2 * Q


@pytest.mark.parametrize("bound", [0, 1, 3, 8])
def test_the_bound_bounds_staleness(bound):
    told = dict(epochs=20, active=3, threads=3, delays=LAWS["mixed"], ordered=False)
    run = simulate_parties(problem(), "sgd", 0.1, bound=bound, **told)
    tau1, tau2 = run.log.staleness()
    most = Q * (3 * bound + 1) - 1
    assert tau1.max() <= most and tau2.max() <= most
    assert tau1.max() == 0 if bound == 0 else tau1.max() >= bound
    free = simulate_parties(problem(), "sgd", 0.1, **told)
    assert free.rows[-1].time < run.rows[-1].time


def test_what_is_logged_makes_sense():
    _, sent, log = witnessed("sgd")
    assert (np.diff(log.time) >= 0).all() and (np.diff(sent.time) >= 0).all()
    assert (log.written >= log.time + np.array([1.5, 3, 4, 2])[log.party] - 1e-9).all()
    assert (log.step[log.label] == np.arange(60)).all()
    assert (log.party[log.label] == sent.dominator).all()
    for l in range(Q):
        mine = log.party == l
        assert sorted(log.write[mine]) == list(range(60)) == sorted(log.step[mine])
        assert (np.diff(log.written[mine][np.argsort(log.write[mine])]) >= 0).all()
    assert (log.time >= log.time[log.label][log.step]).all()


# --- the compiled loop ----------------------------------------------------------------------------


def same(a, b, tolerance=1e-12):
    """Two runs are equal event by event; numbers up to rounding."""
    for name in ("dominator", "i", "time"):
        assert np.array_equal(getattr(a.messages, name), getattr(b.messages, name)), name
    if a.log is not None:
        for f in fields(a.log):
            assert np.array_equal(getattr(a.log, f.name), getattr(b.log, f.name)), f.name
    for name in ("theta", "score"):
        one, two = getattr(a.messages, name), getattr(b.messages, name)
        assert np.allclose(one, two, rtol=0, atol=tolerance), name
    assert np.allclose(a.w, b.w, rtol=0, atol=tolerance)
    for one, two in zip(a.rows, b.rows, strict=True):
        assert one[:3] == two[:3] and one.loss == pytest.approx(two.loss, abs=tolerance)
    assert a.counts == b.counts


KINDS = [
    (x, g, t) for x in ("dense", "csr") for g in ("l2", "nonconvex") for t in ("full", "theta")
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("x,regulariser,table", KINDS)
def test_compiled_is_plain_event_by_event(method, x, regulariser, table):
    if method != "saga" and table == "full":
        return
    task = problem(X if x == "dense" else sparse.csr_array(X), regulariser=regulariser)
    told = dict(steps=70, every=0.37, inner=33, keep="snapshots", compute=[0.5, 1, 2, 1], seed=3)
    for more in (
        dict(active=3, delays=RANDOM, table=table),
        dict(active=[3, 1], threads=4, delays=RANDOM, table=table, ordered=False, mask=2.0),
        dict(active=4, threads=1, delays=LAWS["mixed"], table=table, bound=2),
        dict(active=2, delays=RANDOM, table=table, backward=False),
        dict(active=2, delays=RANDOM, table=table, prompt=True),
        dict(active=3, delays=RANDOM, table=table, trees=log_depth(Q)),
        dict(active=[2], delays=LAWS["mixed"], table=table, trees=FIGURE_5, prompt=True),
    ):
        a, b = (run(task, method, 0.15, **told, **more) for run in (plain, simulate_parties))
        same(a, b)
        assert np.allclose(a.snapshots, b.snapshots, atol=1e-12)
        assert a.log.staleness()[0].max() > 0


@pytest.mark.parametrize("name", LAWS)
def test_compiled_is_plain_for_every_law(name):
    told = dict(steps=60, active=2, delays=LAWS[name])
    a, b = (run(problem(), "sgd", 0.1, **told) for run in (plain, simulate_parties))
    same(a, b)
    assert a.rows[-1].time > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("regulariser", ["l2", "none"])
def test_only_the_nonzero_columns_are_touched_and_nothing_is_lost(method, regulariser):
    """Long sparse runs with many threads and much overtaking, against the whole blocks."""
    told = dict(steps=5000, active=4, threads=5, table="theta", ordered=False, every=20, log=False)
    told |= dict(delays=ShiftedExponential(0.0, 60.0), inner=2500)
    x, rng = np.zeros_like(X), np.random.default_rng(7)
    for block in problem().blocks:  # one number a party in each row: whole blocks take as long
        x[range(N), rng.choice(block, N)] = rng.standard_normal(N)
    sizes = np.array([len(block) for block in problem().blocks])
    runs = []
    for kind, compute in ((x, 3 / sizes), (sparse.csr_array(x), 3.0)):
        task = problem(kind, regulariser=regulariser)
        runs.append(simulate_parties(task, method, 0.19, compute=compute, **told))
    same(*runs, tolerance=1e-10)
    lazy, eager = (
        Simulation(setup_of(problem(sparse.csr_array(X)), method, lr), None) for lr in (0.19, 0.21)
    )
    assert lazy.state.rule.lazy and not eager.state.rule.lazy


@pytest.mark.parametrize("regulariser", ["l2", "nonconvex"])
def test_a_sparse_step_takes_as_long_as_its_entries(regulariser):
    """One party and one step: a score goes through its row, an update may have to go further."""
    x = sparse.csr_array(X)
    told = dict(steps=1, compute=2.0, seed=5, log=False)
    run = simulate_parties(problem(x, q=1, regulariser=regulariser), "sgd", 0.1, **told)
    entries = np.count_nonzero(X[run.messages.i[0]])
    further = D if regulariser == "nonconvex" else entries
    assert 0 < entries < D and run.rows[-1].time == 2 * (entries + further)
    snapshot = simulate_parties(problem(x, q=1), "svrg", 0.1, **told)
    assert snapshot.rows[-1].time == 2 * (2 * np.count_nonzero(X) + 2 * entries)


def test_more_room_changes_nothing():
    setup = setup_of(problem(sparse.csr_array(X)), "saga", threads=4, ordered=False)
    sims = [Simulation(setup, Draws(setup)) for _ in range(2)]
    for grow, sim in enumerate(sims):
        sim.receive(setup.problem.theta(np.zeros(N), Y))
        sim.restart(60, 0.0)
        for step in range(5, 60, 8):
            sim.advance(step)
            if grow:
                sim._grow()
        sim.finish()
    assert len(sims[1].state.heap) > 100 * len(sims[0].state.heap)
    assert np.array_equal(sims[0].w, sims[1].w) and sims[0].now == sims[1].now


def test_draws_go_on_from_piece_to_piece():
    task, told = problem(q=2), dict(steps=2 * CHUNK + 10, delays=RANDOM, log=False)
    a, b = (run(task, "sgd", 0.01, **told) for run in (plain, simulate_parties))
    same(a, b)
    assert abs(a.messages.i[:CHUNK] - a.messages.i[CHUNK : 2 * CHUNK]).max() > 0


# --- threads and links ----------------------------------------------------------------------------


def test_one_thread_reads_what_is_there_and_several_miss_each_other():
    task, told = problem(), dict(epochs=10, active=2, compute=4.0, delays=Uniform(0, 2))
    stale = []
    for threads in (1, 2, 6):
        run = simulate_parties(task, "sgd", 0.1, threads=threads, **told)
        passive = run.log.party >= 2  # no dominator's thread writes there
        stale.append(run.log.staleness()[0][passive].max())
    assert stale[0] == 0 < stale[1]


def test_more_threads_take_less_time():
    told = dict(epochs=10, active=4, compute=4.0)
    times = [
        simulate_parties(problem(), "sgd", 0.1, threads=k, **told).rows[-1].time for k in (1, 2, 4)
    ]
    assert times[0] > times[1] > times[2]


def test_an_inbox_is_first_come_first_served():
    """With one thread and links that take a fixed time, in the order in which ϑ was formed."""
    told = dict(epochs=5, active=3, threads=1, delays=Deterministic(7.0), compute=[1, 1, 1, 3])
    run = simulate_parties(problem(), "sgd", 0.1, **told)
    mine = run.log.party == 3
    assert (np.diff(run.log.step[mine]) == 1).all()
    waited = run.log.time[mine] - run.messages.time - 7.0
    assert waited.min() >= -1e-9 and waited.max() > 3


def test_a_slow_party_holds_up_the_dominators_but_its_inbox_stays_short():
    told = dict(epochs=30, active=3, delays=Deterministic(0.1))
    run = simulate_parties(problem(), "sgd", 0.1, compute=[1, 1, 1, 8], **told)
    tau2 = run.log.staleness()[1]
    late = len(tau2) // 2
    assert tau2[late:].max() <= 2 * tau2[:late].max() < 60


@pytest.mark.parametrize("q", [2, 4, 8])
def test_a_sum_takes_as_many_hops_as_its_deeper_tree(q):
    """A request, and then up: log₂ q levels, or from the last party to the first, one by one."""
    task, told = problem(RNG.standard_normal((N, 8)), q), dict(steps=20, compute=0.0)
    told |= dict(delays=Deterministic(3.0), active=[q - 1])
    for trees, hops in ((None, 1), (log_depth(q), np.log2(q)), (chains(q), q - 1)):
        run = simulate_parties(task, "sgd", 0.1, trees=trees, **told)
        assert run.messages.time[-1] == 20 * 3 * (1 + hops)
        run = synchronous(task, "sgd", 0.1, trees=trees, **told)
        assert run.rows[-1].time == 20 * 3 * (1 + hops + 1)  # and back, before the next round
        run = simulate_parties(task, "svrg", 0.1, trees=trees, **told)
        assert run.messages.time[0] == 3 * (hops + 1) + 3 * (1 + hops)  # the pass comes first


def test_a_mask_waits_for_nothing_and_a_sum_of_scores_for_the_slowest_below():
    told = dict(steps=1, delays=Deterministic(1.0), trees=FIGURE_5, prompt=True)
    for slow, time in ((1, 1 + 90 + 1), (2, 1 + 90 + 1), (3, 1 + 90 + 2)):  # 4 sends to 3, 3 to 1
        compute = np.where(np.arange(4) == slow, 90.0, 0.0)
        run = simulate_parties(problem(X[:, :4]), "sgd", 0.1, compute=compute, **told)
        assert run.messages.time.tolist() == [time]
    run = simulate_parties(problem(X[:, :4]), "sgd", 0.1, compute=0.0, **told)
    assert run.messages.time.tolist() == [3]


def test_a_pass_goes_up_the_trees_by_hand():
    """Parties need 30, 60, 90 and 120; the last goes over the third, which takes a message more."""
    told = dict(active=[0], threads=1, compute=[1, 2, 3, 4], delays=Deterministic(1.0))
    setup = setup_of(problem(X[:, :4]), "svrg", trees=FIGURE_5, **told)
    assert setup.pass_time(0) == (120 + 2) + (120 + 1)
    setup = setup_of(problem(X[:, :4]), "svrg", trees=FIGURE_5, **told | dict(compute=[1, 0, 0, 0]))
    assert setup.pass_time(0) == 30 + 30


def test_trees_are_for_all_parties():
    with pytest.raises(FedlibError, match="Trees for 3 parties; there are 4"):
        simulate_parties(problem(), "sgd", 0.1, steps=1, trees=log_depth(3))


def test_dominators_take_turns_as_fast_as_they_are():
    told = dict(epochs=30, active=2, delays=Deterministic(0.0), threads=4)
    run = simulate_parties(problem(), "sgd", 0.1, compute=[1, 20, 1, 1], bound=None, **told)
    assert (run.messages.dominator == 0).sum() > (run.messages.dominator == 1).sum() > 0


def test_prompt_answers_keep_nobody_waiting_and_see_old_blocks():
    told = dict(epochs=30, active=3, delays=Deterministic(0.1), compute=[1, 1, 1, 3])
    runs = [simulate_parties(problem(), "sgd", 0.1, prompt=p, **told) for p in (False, True)]
    assert runs[1].rows[-1].time < 0.95 * runs[0].rows[-1].time
    assert runs[1].log.staleness()[0].max() > runs[0].log.staleness()[0].max()
    one = dict(told, active=1, epochs=2)
    for prompt, stale in ((False, False), (True, True)):
        run = simulate_parties(problem(), "sgd", 0.1, prompt=prompt, **one)
        assert (run.log.staleness()[0].max() > 0) == stale


# --- chance ---------------------------------------------------------------------------------------


def test_a_seed_names_a_run():
    told = dict(epochs=3, active=3, delays=RANDOM, mask=1.0)
    a, b, c = (simulate_parties(problem(), "saga", 0.1, seed=s, **told) for s in (5, 5, 6))
    same(a, b, tolerance=0)
    assert not np.array_equal(a.messages.i, c.messages.i)
    assert not np.array_equal(a.messages.time, c.messages.time)


def test_every_stream_is_its_own():
    """Samples, delays and masks: by seed, dominator, other party, leg and piece."""
    found = []
    for seed in (0, 1):
        setup = setup_of(problem(), "sgd", seed=seed, mask=1.0, delays=Uniform(0, 1))
        draws = Draws(setup)
        for a in range(Q):
            for number in (0, 1):
                samples, delays, masks = draws.piece(a, number)
                assert not delays[:, a].any() and samples.min() == 0 and samples.max() == N - 1
                found.append((samples + 0.5) / N)
                found += [delays[:, l, leg] for l in range(Q) if l != a for leg in range(3)]
                found += [(masks[:, l] + 1) / 2 for l in range(Q)]
    found = np.array(found)
    assert len(found) == 2 * Q * 2 * (1 + 9 + 4)
    close = np.abs(np.corrcoef(found) - np.eye(len(found))).max()
    assert close < 6 / np.sqrt(CHUNK)
    assert np.abs(found.mean(1) - 0.5).max() < 6 * np.sqrt(1 / 12 / CHUNK)


def test_the_chance_of_a_step_does_not_depend_on_when_it_happens():
    told = dict(epochs=4, active=2, delays=RANDOM)
    fast, slow = (simulate_parties(problem(), "sgd", 0.1, compute=c, **told) for c in (1, [5] * 4))
    for a in (0, 1):
        one, two = (r.messages.i[r.messages.dominator == a] for r in (fast, slow))
        both = min(len(one), len(two))
        assert both > 20 and np.array_equal(one[:both], two[:both])


def test_a_pass_by_hand():
    """Every party but the one with labels waits for its own messages, drawn anew each pass."""
    law, cost = Uniform(0.0, 200.0), [3.0, 40.0, 7.0, 20.0]
    task = Problem(X[:, :4], Y, tuple(np.arange(4)[:, None]))
    setup = setup_of(task, "svrg", active=[2], threads=3, compute=cost, delays=law, seed=5)
    for number in (0, 1):
        ends = [[], []]
        for l in range(4):
            drawn = law.draws(5, "pass", l, number, size=2) if l != 2 else (0, 0)
            for leg in (0, 1):
                ends[leg].append(drawn[leg] + N * cost[l] / 3)
        assert setup.pass_time(number) == pytest.approx(max(ends[0]) + max(ends[1]))
    assert setup.pass_time(0) != setup.pass_time(1)
    slow = [Deterministic(1.0), Deterministic(2.0), Deterministic(500.0), Deterministic(3.0)]
    own = setup_of(task, "svrg", active=[2], threads=1, compute=[1] * 4, delays=slow)
    assert own.pass_time(0) == 2 * (N + 3)  # the party with the labels sends nothing to itself


def test_a_party_has_as_many_threads_as_there_are_dominators():
    told = dict(steps=30, active=3, delays=RANDOM)
    free, three, one = (
        simulate_parties(problem(), "sgd", 0.1, **told, **more)
        for more in ({}, dict(threads=3), dict(threads=1))
    )
    assert np.array_equal(free.log.written, three.log.written)
    assert not np.array_equal(free.log.written, one.log.written)


def test_evaluations_do_not_disturb():
    told = dict(steps=100, active=3, delays=RANDOM, inner=40)
    for method in METHODS:
        a = simulate_parties(problem(), method, 0.1, every=0.1, **told)
        b = simulate_parties(problem(), method, 0.1, every=50, **told)
        assert np.array_equal(a.w, b.w) and len(b.rows) == 2
        assert [row.steps for row in a.rows] == [0, *range(3, 100, 3), 100]
        assert a.rows[-1] == b.rows[-1]
        assert (np.diff([row.time for row in a.rows]) >= 0).all()
