"""TDCD as released: BatchNorm's running statistics, the exchange in train mode, skipped clients."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlib import partition
from fedlib.algorithms.tiers import TDCD, TieredTask, draw_ids
from fedlib.algorithms.tiers_official import BufferedModel, Client, OfficialTDCD, _placed
from fedlib.errors import FedlibError
from fedlib.models import Model, lstm, mlp, resnet18
from fedlib.simulate import simulate

M, D, E = 24, 6, 3
RNG = np.random.default_rng(0)
X, LABELS = RNG.standard_normal((M, D)) + 1.0, RNG.integers(0, E, M)


def net(norm=True):
    """A small network on three features: dense, BatchNorm or nothing, ReLU, dense."""
    middle = nn.BatchNorm1d(4) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(3, 4), middle, nn.ReLU(), nn.Linear(4, E))


def build(model, clients=3, aligned=True, rows=None, test=False):
    blocks = [X[:, :3], X[:, 3:]]
    rows = partition.grid(M, [clients] * 2, 1, aligned) if rows is None else rows
    extra = dict(test_features=[b[:10] for b in blocks], test_labels=LABELS[:10]) if test else {}
    return TieredTask([model] * 2, blocks, LABELS, rows, **extra)


def advance(algorithm, task, rounds=1, seeds=(5,), state=None):
    state = algorithm.init(task, seeds) if state is None else state
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
    return state


def by_hand(state, task, algorithm, ids, r=0):
    """Run one round with ordinary modules and optimizers: modules ``[silo][client]``."""
    modules, phi = [], []
    for j, K in enumerate(task.K):
        hub = net().double()
        vector_to_parameters(state.x[r, task.columns[j]].clone(), hub.parameters())
        hub.load_state_dict(state.of_run(j, r), strict=False)
        modules.append([copy.deepcopy(hub) for _ in range(K)])
        table = torch.zeros(len(ids), E, dtype=torch.float64)
        for k, module in enumerate(modules[j]):
            held = task.owner[j][ids] == k
            module.train(algorithm.exchange_in_train_mode)
            with torch.no_grad():
                for _ in range(algorithm.local_steps if held.any() else 0):
                    table[held] = module(task.x[j][ids][held])
        phi.append(table)
    for j, clients in enumerate(modules):
        for k, module in enumerate(clients):
            held = task.owner[j][ids] == k
            optimizer = torch.optim.SGD(module.train().parameters(), algorithm.lr)
            for _ in range(algorithm.local_steps if held.any() else 0):
                optimizer.zero_grad()
                out = module(task.x[j][ids][held]) + phi[1 - j][held]
                nn.functional.cross_entropy(out, task.y[ids][held]).backward()
                optimizer.step()
    return modules


def same(a, b):
    return torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("batch", [None, 7])
def test_without_batchnorm_it_is_tdcd(batch, aligned, train):
    algorithm, reference = OfficialTDCD(0.3, 3, batch, train), TDCD(0.3, 3, batch)
    for model in (mlp(3, 4, E), BufferedModel(net(norm=False))):
        task = build(model, 5, aligned)
        ours, theirs = (advance(a, task, 4, seeds=(0, 1)) for a in (algorithm, reference))
        assert same(ours.x, theirs.x) and (ours.t, ours.clock) == (4, 12)
        assert ours.buffers == ({}, {})
        values = algorithm.evaluate(ours, task)
        for metric, value in task.evaluate(theirs.x).items():
            assert same(values["train", metric], value)


def test_other_architectures_are_tdcd_too():
    x = RNG.standard_normal((M, 4, 3))
    task = TieredTask([lstm(3, 2, E)] * 2, [x, -x], LABELS, partition.grid(M, [2, 2], 0, True))
    pair = [advance(a, task, 2) for a in (OfficialTDCD(0.3, 2, 9), TDCD(0.3, 2, 9))]
    assert same(pair[0].x, pair[1].x)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch", [None, 15])
def test_rounds_are_those_of_ordinary_modules(batch, train):
    task, algorithm = build(BufferedModel(net())), OfficialTDCD(0.2, 3, batch, train)
    state = algorithm.init(task, (5, 6))
    for t in range(3):
        after = advance(algorithm, task, state=state)
        for r, seed in enumerate((5, 6)):
            ids = draw_ids((seed,), t, M, batch)[0]
            for j, clients in enumerate(by_hand(state, task, algorithm, ids, r)):
                rows = torch.stack([parameters_to_vector(c.parameters()) for c in clients])
                assert same(after.x[r, task.columns[j]], rows.mean(0))
                for name, value in clients[0].named_buffers():
                    assert same(after.buffers[j][name][r], value)
        state = after


@pytest.mark.parametrize("passes", [None, 1, 5])
def test_statistics_of_the_first_client_by_hand(passes):
    """With parameters at rest every pass sees the same activations and counts for a tenth."""
    Q = 1 if passes else 2
    task = build(BufferedModel(net()))
    algorithm = OfficialTDCD(1e-300, Q, exchange_passes=passes)  # parameters stand still
    state = algorithm.init(task, (5,))
    after = advance(algorithm, task, state=state)
    for j in range(2):
        views = task.models[j].views(state.x[:, task.columns[j]])
        own = task.x[j][task.rows[j][0]] @ views["0.weight"][0].T + views["0.bias"][0]
        keep = 0.9 ** ((passes or Q) + Q)
        mean = (1 - keep) * own.mean(0)
        var = keep + (1 - keep) * own.var(0, unbiased=True)
        assert same(after.buffers[j]["1.running_mean"][0], mean)
        assert same(after.buffers[j]["1.running_var"][0], var)
        assert after.buffers[j]["1.num_batches_tracked"].item() == (passes or Q) + Q
    assert same(after.x, state.x)


def test_exchange_in_eval_mode_leaves_the_statistics():
    task = build(BufferedModel(net()))
    after = advance(OfficialTDCD(0.2, 3, None, exchange_in_train_mode=False), task)
    assert after.buffers[0]["1.num_batches_tracked"].item() == 3


@pytest.mark.parametrize("train", [True, False])
def test_an_embedding_depends_on_its_sub_batch_in_train_mode_only(train):
    model = BufferedModel(net())
    algorithm, theta = OfficialTDCD(0.1, 2, None, train), model.init(RNG)
    x, y = torch.from_numpy(X[:8, :3]), torch.from_numpy(LABELS[:8])

    def first(rows):
        buffers = _placed(model.buffers, x)
        client = Client(model, theta, buffers, torch.arange(len(rows)), x[rows], y[rows])
        return algorithm._exchange([client], len(rows), E)[0]

    gap = (first([0, 1, 2, 3]) - first([0, 4, 5, 6])).abs().max()
    assert gap > 1e-2 if train else gap == 0


def test_parameters_are_averaged_and_buffers_are_not():
    task, algorithm = build(BufferedModel(net())), OfficialTDCD(0.2, 2)
    state = algorithm.init(task, (5,))
    modules = by_hand(state, task, algorithm, torch.arange(M))
    first, mean = (
        advance(OfficialTDCD(0.2, 2, buffers_from_first_client=flag), task)
        for flag in (True, False)
    )
    assert torch.equal(first.x, mean.x)
    for j, clients in enumerate(modules):
        rows = torch.stack([parameters_to_vector(c.parameters()) for c in clients])
        means = torch.stack([c[1].running_mean for c in clients])
        assert same(first.x[0, task.columns[j]], rows.mean(0))
        assert (first.x[0, task.columns[j]] - rows[0]).abs().max() > 1e-3
        assert same(first.buffers[j]["1.running_mean"][0], means[0])
        assert same(mean.buffers[j]["1.running_mean"][0], means.mean(0))
        assert (means[0] - means.mean(0)).abs().max() > 1e-3


@pytest.mark.parametrize("empty", [0, 2])
def test_an_empty_sub_batch_skips_its_step_but_is_averaged(empty):
    parts = [np.arange(0, 10), np.arange(10, 20), np.arange(20, 24)]
    parts = [parts[i] for i in {0: (2, 0, 1), 2: (0, 1, 2)}[empty]]
    task, algorithm = build(BufferedModel(net()), rows=[parts, parts]), OfficialTDCD(0.2, 2, 8)
    others = [k for k in range(3) if k != empty]
    seed = next(
        s
        for s in range(1000)
        for held in [np.bincount(task.owner[0][draw_ids((s,), 0, M, 8)[0]], minlength=3)]
        if held[empty] == 0 and held[others].min() > 1
    )
    state = algorithm.init(task, (seed,))
    after = advance(algorithm, task, state=state)
    modules = by_hand(state, task, algorithm, draw_ids((seed,), 0, M, 8)[0])
    for j, clients in enumerate(modules):
        rows = torch.stack([parameters_to_vector(c.parameters()) for c in clients])
        assert torch.equal(rows[empty], state.x[0, task.columns[j]])
        assert same(after.x[0, task.columns[j]], rows.mean(0))
        for name, old in state.buffers[j].items():  # the hub takes client 0's, moved or not
            assert torch.equal(after.buffers[j][name], old) == (empty == 0)


def test_evaluation_uses_the_broadcast_statistics_and_leaves_them():
    task, algorithm = build(BufferedModel(net()), test=True), OfficialTDCD(0.2, 2)
    state = advance(algorithm, task, 2, seeds=(5, 6))
    before = copy.deepcopy(state.buffers)
    values = algorithm.evaluate(state, task, ("train", "test"))
    for r in range(2):
        out = 0
        for j, x in enumerate(task.test_x):
            module = net().double().eval()
            vector_to_parameters(state.x[r, task.columns[j]].clone(), module.parameters())
            module.load_state_dict(state.of_run(j, r), strict=False)
            out = out + module(x)
        loss = nn.functional.cross_entropy(out, task.test_y)
        assert same(values["test", "loss"][r], loss.detach())
        right = (out.argmax(1) == task.test_y).double().mean()
        assert same(values["test", "accuracy"][r], right)
    for old, new in zip(before, state.buffers, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    with pytest.raises(FedlibError, match="OfficialTDCD.evaluate"):
        task.evaluate(state.x)


def test_simulate_evaluates_and_resumes(tmp_path):
    task, algorithm = build(BufferedModel(net())), OfficialTDCD(0.2, 2, 18)
    options = dict(evaluate=algorithm.evaluate, progress=False, seeds=(0, 1))
    whole = simulate(algorithm, task, 4, **options)
    file = tmp_path / "state.pt"
    simulate(algorithm, task, 4, checkpoint=file, checkpoint_every=3, **options)
    again = simulate(algorithm, task, 4, checkpoint=file, checkpoint_every=3, **options)
    assert torch.equal(whole.state.x, again.state.x)
    for a, b in zip(whole.state.buffers, again.state.buffers, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert whole.frame.equals(again.frame)


def test_seeds_do_not_meet():
    task, algorithm = build(BufferedModel(net())), OfficialTDCD(0.2, 2, 18)
    both, alone = (advance(algorithm, task, 2, seeds) for seeds in ((3, 4), (4,)))
    assert torch.equal(both.x[1], alone.x[0])
    assert torch.equal(both.buffers[1]["1.running_var"][1], alone.buffers[1]["1.running_var"][0])


def test_a_published_network_gets_running_statistics():
    plain = resnet18((3, 16, 16), 2, norm="batch")
    model = BufferedModel.of(plain)
    assert not list(plain.module.buffers()) and model.size == plain.size
    assert sum(name.endswith("running_mean") for name in model.buffers) == 20
    theta = model.init(np.random.default_rng(0))
    assert torch.equal(theta, plain.init(np.random.default_rng(0)))
    x = torch.from_numpy(RNG.standard_normal((3, 3, 16, 16)))
    buffers = _placed(model.buffers, x)
    views = {name: view[0] for name, view in model.views(theta).items()}
    out = model.call(views, buffers, x, train=True)
    assert torch.allclose(out, plain.apply(theta, x[None])[0], atol=1e-10)
    assert all(b.item() == 1 for n, b in buffers.items() if n.endswith("tracked"))


def test_mistakes_are_explained():
    with pytest.raises(FedlibError, match="exchange_passes"):
        OfficialTDCD(0.1, 2, exchange_passes=0)
    with pytest.raises(FedlibError, match="local_steps"):
        OfficialTDCD(0.1, 0)
    task = build(BufferedModel(net()), M)  # one sample a client
    with pytest.raises(FedlibError, match="larger batch_size"):
        advance(OfficialTDCD(0.1, 1), task)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(2, device="meta"))

    with pytest.raises(FedlibError, match="'table'"):
        BufferedModel(Table())
    assert isinstance(BufferedModel.of(mlp(3, 4, E)), Model)
