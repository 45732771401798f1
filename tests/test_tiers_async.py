"""Asynchronous hubs: what must hold exactly, in float64."""

import copy
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from fedlib.datasets import partition
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.models import linear, mlp
from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.papers.tiers import ledger
from fedlib.papers.tiers.algorithm import TDCD, draw_ids
from fedlib.papers.tiers.asynchronous import AsyncTDCD, look_up
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.delays import Deterministic, ShiftedExponential

M, D = 24, 6
RNG = np.random.default_rng(0)
X, TARGET, LABELS = RNG.standard_normal((M, D)), RNG.standard_normal(M), RNG.integers(0, 3, M)
RANDOM = dict(comm=ShiftedExponential(2, 3), comp=ShiftedExponential(1, 0.5))
ZERO, ONE = Deterministic(0), Deterministic(1)


@dataclass(frozen=True)
class Listed:
    """A hand-made law: a step of round ``r`` takes ``times[r]``, the last one for ever."""

    times: tuple[float, ...]

    def draws(self, seed, name, *keys, size):
        hub, round = keys
        return np.full(size, self.times[min(round, len(self.times) - 1)])


def network(clients=3, silos=2):
    """Small networks with three-way labels, rows split differently in every silo."""
    model, blocks = mlp(D // silos, 4, 3), partition.contiguous_features(D, silos)
    rows = partition.grid(M, [clients] * silos, 0)
    return TieredTask([model] * silos, [X[:, b] for b in blocks], LABELS, rows)


def squares(silos=2):
    """Linear silos with one client each and a shared target."""
    blocks = partition.contiguous_features(D, silos)
    models, rows = [linear(len(b)) for b in blocks], [[np.arange(M)]] * silos
    return TieredTask(models, [X[:, b] for b in blocks], TARGET, rows, loss_name="half_square")


def run(algorithm, task, rounds, seeds=(0, 1), state=None):
    """Return the last state, all states' models and all finished hub rounds."""
    state = algorithm.init(task, seeds) if state is None else state
    path, done = [state.x], []
    for _ in range(rounds):
        state, metrics = algorithm.round(state, task)
        path.append(state.x)
        done += metrics.get("hub_rounds", [])
    return state, torch.stack(path), done


def same(a, b):
    """States with equal fields."""
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if not (torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y)):
            return False
    return True


@pytest.mark.parametrize("batch", [None, 8])
def test_equal_fixed_delays_are_synchronous_tdcd(batch):
    task = network()
    fixed = AsyncTDCD(0.3, 4, batch, Deterministic(10.0), ONE)
    state, path, done = run(fixed, task, 5)
    _, wanted, _ = run(TDCD(0.3, 4, batch), task, 5)
    assert torch.allclose(path, wanted, atol=1e-12) and (path[1:] - path[:-1]).abs().max() > 1e-3
    assert (state.clock == 5 * (3 * 10 + 4)).all()
    assert (state.rounds == 5).all() and not any(any(d.staleness) for d in done)


@pytest.mark.parametrize("batch", [None, 8])
def test_waiting_hubs_are_synchronous_tdcd_under_any_delays(batch):
    task = network(silos=3)
    waiting = AsyncTDCD(0.3, 4, batch, **RANDOM, wait=True)
    state, path, done = run(waiting, task, 5)
    _, wanted, _ = run(TDCD(0.3, 4, batch), task, 5)
    assert torch.allclose(path, wanted, atol=1e-12)
    assert not any(any(d.staleness) for d in done)
    for r, seed in enumerate(state.seeds):
        longest = [max(waiting.busy(task, seed, j, t) for j in range(3)) for t in range(5)]
        assert state.clock[r] == pytest.approx(sum(longest), abs=1e-12)


def test_one_silo_one_step_is_sgd():
    task = squares(1)
    state, path, _ = run(AsyncTDCD(0.1, 1, 8, **RANDOM), task, 6, seeds=(3,))
    x = path[0, 0].numpy()
    for t in range(6):
        ids = draw_ids((3,), t, M, 8)[0].numpy()
        x = x - 0.1 * X[ids].T @ (X[ids] @ x - TARGET[ids]) / 8
        assert np.allclose(path[t + 1, 0].numpy(), x, atol=1e-12)


def test_tables_hold_the_other_hubs_embeddings():
    task = network(silos=3)
    x, ids = task.init((4,)), torch.tensor([5, 0, 17])
    own = task.models[1].apply(x[:, task.columns[1]], task.x[1].unsqueeze(0))[0]
    table = task.predict(x, task.x)[0] - own
    assert torch.allclose(look_up(task, 1, ids, x), table[ids], atol=1e-12)
    assert not look_up(network(silos=1), 0, ids, task.init((4,))[:, : task.size // 3]).any()


HAND = AsyncTDCD(0.1, 2, 8, ZERO, (Listed((0.5,)), Listed((1.25, 0.5))))


def test_staleness_counts_missed_tables():
    """Hub 0 takes 1 each round, hub 1 takes 2.5, then 1."""
    _, _, done = run(HAND, squares(), 6, seeds=(0,))
    seen = [(d.finish, d.hub, d.round, d.staleness) for d in done]
    assert seen == [
        (1.0, 0, 0, (0, 0)),
        (2.0, 0, 1, (0, 0)),
        (2.5, 1, 0, (2, 0)),  # hub 0 published at 1 and 2
        (3.0, 0, 2, (0, 1)),  # hub 1 published at 2.5, hub 0 had read at 2
        (3.5, 1, 1, (1, 0)),
        (4.0, 0, 3, (0, 1)),
    ]


def test_a_table_published_at_the_same_instant_is_not_missed_and_is_read_next():
    slow = AsyncTDCD(0.1, 2, 8, ZERO, (Deterministic(0.5), Deterministic(1)))
    state, _, done = run(slow, squares(), 4, seeds=(0,))
    assert [(d.finish, d.hub, d.staleness) for d in done[:3]] == [
        (1.0, 0, (0, 0)), (2.0, 0, (0, 0)), (2.0, 1, (1, 0)),
    ]  # fmt: skip
    assert state.read[0].tolist() == [[4, 2], [4, 2]]


def test_hand_made_delays_replayed_with_plain_algebra():
    task = squares()
    state, path, _ = run(HAND, task, 6, seeds=(0,))
    x0, blocks = path[0, 0].numpy(), [slice(0, 3), slice(3, 6)]

    def local(j, r, own, other):
        ids = draw_ids((0,), r, M, 8)[0].numpy()
        A, rest = X[ids][:, blocks[j]], TARGET[ids] - X[ids][:, blocks[1 - j]] @ other
        for _ in range(2):
            own = own - 0.1 * A.T @ (A @ own - rest) / 8
        return own

    a, b = [x0[:3]], [x0[3:]]  # every table ever published
    a.append(local(0, 0, a[0], b[0]))  # 0 to 1
    a.append(local(0, 1, a[1], b[0]))  # 1 to 2
    b.append(local(1, 0, b[0], a[0]))  # 0 to 2.5
    a.append(local(0, 2, a[2], b[0]))  # 2 to 3
    b.append(local(1, 1, b[1], a[2]))  # 2.5 to 3.5
    a.append(local(0, 3, a[3], b[1]))  # 3 to 4
    assert np.allclose(state.x[0].numpy(), np.concatenate([a[4], b[2]]), atol=1e-12)
    assert np.allclose(path[3, 0].numpy(), np.concatenate([a[2], b[1]]), atol=1e-12)


def test_a_hub_round_lasts_what_was_drawn():
    task, law = network(), AsyncTDCD(0.1, 4, 8, **RANDOM)
    state, _, done = run(law, task, 12)
    assert {d.seed for d in done} == {0, 1} and {d.hub for d in done} == {0, 1}
    clock = np.zeros((2, 2))
    for d in done:
        trips = law.comm.draws(d.seed, "comm", d.hub, d.round, size=3).sum()
        steps = law.comp.draws(d.seed, "comp", d.hub, d.round, size=4).sum()
        assert d.busy == trips + steps and d.start == clock[d.seed, d.hub]
        clock[d.seed, d.hub] += d.busy
        assert d.finish == clock[d.seed, d.hub]
    assert (clock <= state.clock[:, None]).all() and (clock.max(1) == state.clock).all()


def test_fast_hubs_do_more_rounds_under_a_straggler():
    comp = (ONE, ONE, Deterministic(4))
    task = network(silos=3)
    state, _, done = run(AsyncTDCD(0.1, 5, 8, ZERO, comp, tick=20), task, 6)
    assert state.clock.tolist() == [120, 120] and state.rounds.tolist() == [[24, 24, 6]] * 2
    slow = [d.staleness for d in done if d.hub == 2]
    assert slow == [(3, 3, 0)] * 12  # the fourth comes at the same instant
    waiting, _, _ = run(AsyncTDCD(0.1, 5, 8, ZERO, comp, tick=20, wait=True), task, 6)
    assert waiting.rounds.tolist() == [[6, 6, 6]] * 2


def test_without_waiting_no_hub_does_fewer_rounds():
    task, law = network(silos=3), AsyncTDCD(0.1, 3, 8, **RANDOM, tick=150)
    free, _, _ = run(law, task, 2, seeds=(0, 1, 2))
    bound, _, done = run(replace(law, wait=True), task, 2, seeds=(0, 1, 2))
    assert (free.rounds >= bound.rounds).all() and free.rounds.sum() > bound.rounds.sum()
    assert all(d.finish - d.start >= d.busy - 1e-9 for d in done)


def test_same_seed_same_path_and_runs_do_not_disturb_each_other():
    task, law = network(), AsyncTDCD(0.3, 3, 8, **RANDOM)
    a, path, done = run(law, task, 8)
    b, _, again = run(law, task, 8)
    assert same(a, b) and done == again
    alone, single, _ = run(law, task, 8, seeds=(1,))
    assert torch.allclose(path[:, 1:], single, atol=1e-12) and a.clock[1] == alone.clock[0]


@pytest.mark.parametrize("tick", [None, 13.0])
def test_a_state_resumes_on_the_same_path_and_is_never_changed(tick):
    task, law = network(), AsyncTDCD(0.3, 3, 8, **RANDOM, tick=tick)
    middle, _, _ = run(law, task, 4)
    kept = copy.deepcopy(middle)
    end, _, _ = run(law, task, 8)
    for _ in range(2):
        resumed, _, _ = run(law, task, 4, state=middle)
        assert same(resumed, end) and same(middle, kept)


def test_ticks_only_say_when_to_look():
    task, law = network(), AsyncTDCD(0.3, 3, 8, **RANDOM, tick=7.0)
    coarse, _, few = run(replace(law, tick=70.0), task, 1)
    fine, _, many = run(law, task, 10)
    assert torch.allclose(coarse.x, fine.x, atol=1e-12) and sorted(few) == sorted(many)
    assert (
        (coarse.clock == 70).all() and (fine.clock == 70).all() and all(d.finish <= 70 for d in few)
    )


def test_simulate_records_losses_against_the_clock(tmp_path):
    task, law = network(), AsyncTDCD(0.3, 3, 8, **RANDOM, tick=15.0)
    full = simulate(law, task, 6, (0, 1), progress=False)
    assert sorted(full.frame["clock"].unique()) == [15.0 * k for k in range(7)]
    saved = dict(checkpoint=Checkpoint(tmp_path / "a.pt", 2), progress=False)
    simulate(law, task, 6, (0, 1), **saved)  # leaves the checkpoint of its last round
    assert same(simulate(law, task, 6, (0, 1), **saved).state, full.state)


def test_simulate_records_every_runs_own_clock():
    task, law = network(), AsyncTDCD(0.3, 3, 8, **RANDOM)
    frame = simulate(law, task, 4, (0, 1), progress=False).frame
    for seed in (0, 1):
        state, times = law.init(task, (seed,)), [0.0]
        for _ in range(4):
            times.append(state.finish.min())  # the next event
            state, _ = law.round(state, task)
        own = frame[(frame["seed"] == seed) & (frame["metric"] == "loss")]
        assert own["clock"].tolist() == times
    assert frame.groupby("round")["clock"].nunique().tolist() == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("batch", [None, 8])
def test_a_hub_that_does_not_wait_publishes_its_whole_table(batch):
    task, law, K, E = network(silos=3), AsyncTDCD(0.3, 4, batch, **RANDOM), 3, 3
    state, _, _ = run(law, task, 4)
    B, P = batch or M, task.models[0].size
    for j in range(3):
        sent = ledger.hub_messages(law, task, state, j)
        assert {m.round for m in sent} == {state.rounds[0, j]}
        total = dict.fromkeys(("model", "sample ids", "foreign embeddings", "embeddings"), 0)
        for m in sent:
            total[m.content] += int(np.prod(m.shape))
            assert m.bytes == 8 * np.prod(m.shape)
        assert total["model"] == 2 * K * P and total["sample ids"] == K * B
        assert total["foreign embeddings"] == B * E
        assert total["embeddings"] == M * E + 2 * M * E  # from the clients, to two hubs
        between = {m.receiver for m in sent if m.shape == (M, E)}
        assert between == {f"hub {l}" for l in range(3)} - {f"hub {j}"}


def test_bad_input():
    task = network()
    with pytest.raises(FedlibError, match="local_steps"):
        AsyncTDCD(0.1, 0, 8, ONE, ONE)
    with pytest.raises(FedlibError, match="tick is a positive time"):
        AsyncTDCD(0.1, 1, 8, ONE, ONE, tick=0)
    with pytest.raises(FedlibError, match="batch_size"):
        AsyncTDCD(0.1, 1, M + 1, ONE, ONE).init(task, (0,))
    with pytest.raises(FedlibError, match="3 delay laws for 2 silos"):
        AsyncTDCD(0.1, 1, 8, (ONE,) * 3, ONE).init(task, (0,))
    with pytest.raises(FedlibError, match="the clock never moves"):
        AsyncTDCD(0.1, 1, 8, ZERO, ZERO).init(task, (0,))
