"""A reader's own module: rows of fedlib against the plain module and torch.optim.SGD."""

from __future__ import annotations

import copy
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlib.engine import models, steps
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import BACKENDS, local_sgd
from fedlib.engine.model import Model, uniform
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.tiers import TieredTask
from fedlib.population.participation import Full

RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((24, 6)), RNG.integers(0, 3, 24)
TOKENS = RNG.integers(0, 7, (24, 5))


class Last(nn.Module):
    """An embedding, a recurrent layer and the last state: vmap cannot map the LSTM."""

    def __init__(self, layer=nn.LSTM):
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.layer = layer(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0][:, -1])


def with_norm():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def with_dropout(p=0.5):
    return nn.Sequential(nn.Linear(6, 40), nn.Dropout(p), nn.Linear(40, 3)).double()


def words():
    return nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)).double()


def attention():
    return nn.Sequential(
        nn.Embedding(7, 4),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(20, 3),
    ).double()


def images():
    """Two tied layers, a buffer that only shifts, channels normalised and averaged."""
    tied = nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(
        nn.Unflatten(1, (2, 3, 1)), tied, nn.BatchNorm2d(2, momentum=0.3), tied, nn.Flatten(),
        nn.LayerNorm(6), nn.Linear(6, 3),
    ).double()  # fmt: skip


CASES = {
    "BatchNorm": (with_norm, X),
    "tied convolutions": (images, X),
    "embedding": (words, TOKENS),
    "LSTM": (lambda: Last().double(), TOKENS),
    "GRU": (lambda: Last(nn.GRU).double(), TOKENS),
    "attention": (attention, TOKENS),
}


def task_of(name, clients=1, **options):
    build, x = CASES[name]
    parts = np.array_split(np.arange(24), clients)
    return Task(Model(build()), FederatedDataset.build(x, Y, parts, x[:7], Y[:7]), **options)


def by_torch(module, x, y, batches, lr, decay=0.0):
    """Train a plain module; batches are row numbers."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, weight_decay=decay)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    return module.eval()


@pytest.mark.parametrize("name", CASES)
def test_one_client_is_the_plain_module_with_sgd(name):
    task = task_of(name, l2=0.01)
    algorithm = FedAvg(Full(1), 0.1, local_steps=3, batch_size=4)
    state = algorithm.init(task, (0,))
    module = task.model.to_module(state.x)
    drawn, _ = task.data.next_batches((0,), torch.tensor([[0]]), state.cursor, 6, 4)
    for _ in range(2):
        state, _ = algorithm.round(state, task)
    x, y = task.data.x, task.data.y
    by_torch(module, x, y, [batch.rows[0] for batch in drawn], 0.1, 0.01)
    assert (task.model.to_row(module) - state.x).abs().max() < 1e-12
    assert (state.x - algorithm.init(task, (0,)).x).abs().max() > 0.01
    out, found = module(x[:7]), task.evaluate(state.x, "test")
    decay = 0.005 * sum(p.square().sum() for p in module.parameters())
    assert abs(F.cross_entropy(out, y[:7]) + decay - found["loss"]).item() < 1e-12
    assert found["accuracy"].item() == pytest.approx((out.argmax(1) == y[:7]).double().mean())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_several_copies_are_each_the_plain_module(name, backend):
    task = task_of(name)
    theta = task.init((0, 1, 2))
    rows = torch.from_numpy(RNG.integers(0, 24, (2, 3, 4)))
    found = local_sgd(task, theta, [Batch(step) for step in rows], 0.1, 2, backend)
    for c in range(3):
        module = task.model.to_module(theta[c])
        by_torch(module, task.data.x, task.data.y, [step[c] for step in rows], 0.1)
        assert (task.model.to_row(module) - found[c]).abs().max() < 1e-12


def test_vmap_where_it_can_and_a_loop_where_not():
    ways = {name: task_of(name).model._maps["cpu"] for name in CASES}
    assert ways["BatchNorm"] and ways["tied convolutions"] and ways["embedding"]
    assert not ways["LSTM"] and not ways["GRU"]

    class Wrong(nn.Module):  # what vmap sees is not what one copy sees
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(6, 3)

        def forward(self, x):
            return self.inside(x) * (2 if torch._C._functorch.is_batchedtensor(x) else 1)

    model = Model(Wrong().double())
    theta, x = torch.ones(2, model.size).double(), torch.from_numpy(X[:8]).view(2, 4, 6)
    assert torch.allclose(model.apply(theta, x)[1], model.to_module(theta[1])(x[1]))
    assert model._maps == {"cpu": False}


# --- rows ----------------------------------------------------------------------------------------


def test_the_callers_module_stays_whole():
    module = with_norm()
    held = copy.deepcopy(module.state_dict())
    generator = torch.get_rng_state()
    model = Model(module)
    task = Task(model, FederatedDataset.build(X, Y, [np.arange(24)]))
    simulate(FedAvg(Full(1), 0.1), task, 2, progress=False)
    assert torch.equal(generator, torch.get_rng_state()), "nobody touches torch's generator"
    assert all(torch.equal(held[name], t) for name, t in module.state_dict().items())
    assert module.training and next(module.parameters()).device.type == "cpu"
    assert torch.equal(model.to_row(model.to_module(model.to_row(module))), model.to_row(module))


def test_a_fresh_row_is_the_modules_own_draw():
    module = nn.Sequential(nn.Conv1d(2, 3, 2), nn.LayerNorm(5), nn.GroupNorm(3, 3), nn.Linear(5, 4))
    model, seed = Model(module), int(stream(4, "init").integers(2**63))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    for layer in module:
        layer.reset_parameters()
    torch.set_rng_state(state)
    assert torch.equal(model.init(stream(4, "init")), model.to_row(module))
    views = model.views(model.init(stream(5, "init"), 2))
    assert (views["1.weight"] == 1).all() and (views["2.bias"] == 0).all()
    assert not torch.equal(views["0.weight"][0], module[0].weight)
    assert torch.equal(views["0.weight"][0], views["0.weight"][1])


def test_columns_are_parameters_then_buffers():
    model = Model(with_norm())
    assert (model.size, model.trained) == (6 * 5 + 5 + 10 + 15 + 3 + 10, 63)
    row = model.init(stream(0, "init"))
    assert torch.equal(row[0, 63:], torch.tensor([0.0] * 5 + [1.0] * 5).double())
    assert list(model.buffers) == ["1.running_mean", "1.running_var"]


def test_running_statistics_are_averaged_and_only_training_moves_them():
    task = task_of("BatchNorm", clients=2)
    algorithm = FedAvg(Full(2), 0.1, local_steps=1, batch_size=12)
    state = algorithm.init(task, (0,))
    after, _ = algorithm.round(state, task)
    hidden = task.model.to_module(state.x)[0](task.data.x).detach()
    halves = torch.stack([hidden[part] for part in task.data.parts])
    expected = torch.cat([0.1 * halves.mean((0, 1)), 0.9 + 0.1 * halves.var(1).mean(0)])
    assert (after.x[0, 63:] - expected).abs().max() < 1e-14
    kept = after.x.clone()
    task.evaluate(after.x)
    gradient = task.grad(after.x, Batch(torch.arange(8).view(1, -1)))
    assert torch.equal(after.x, kept)
    assert (gradient[0, 63:] == 0).all() and (gradient[0, :63] != 0).any()


def test_the_l2_term_leaves_buffers_alone():
    plain, decayed = task_of("BatchNorm"), task_of("BatchNorm", l2=2.0)
    theta, batch = plain.init((0,)), Batch(torch.arange(8).view(1, -1))
    weights = theta[:, :63]
    assert (decayed.loss(theta, batch) - plain.loss(theta, batch)).item() == pytest.approx(
        weights.square().sum().item()
    )
    change = decayed.grad(theta, batch) - plain.grad(theta, batch)
    assert torch.allclose(change, F.pad(2 * weights, (0, 10)), atol=1e-14)


def test_frozen_parameters_and_integer_buffers_keep_their_values():
    module = with_norm()
    module[0].requires_grad_(False)
    module.register_buffer("order", torch.arange(3))
    task = Task(Model(module), FederatedDataset.build(X, Y, [np.arange(24)]))
    assert task.size == 28 + 10 and "0.weight" not in task.model.shapes
    algorithm = FedAvg(Full(1), 0.1, local_steps=2, batch_size=24)
    state, _ = algorithm.round(algorithm.init(task, (0,)), task)
    trained = task.model.to_module(state.x)
    assert torch.equal(trained[0].weight, module[0].weight)
    out = module[2](trained[1].eval()(module[0](task.data.x)))
    assert torch.allclose(task.model.apply(state.x, task.data.x[None])[0], trained[3](out))


def test_padding_is_refused_where_it_would_be_taken_for_samples():
    task = task_of("BatchNorm", clients=5)
    algorithm = FedAvg(Full(5), 0.1)
    with pytest.raises(FedlibError, match="GroupNorm"):
        algorithm.round(algorithm.init(task, (0,)), task)
    assert task.client_gradients(task.init((0,))).shape == (5, task.size), "one client, no padding"
    one = FedAvg(Full(5), 0.1, batch_size=1)
    with pytest.raises(FedlibError, match="one sample"):
        one.round(one.init(task, (0,)), task)
    even = task_of("BatchNorm", clients=4)
    fine = FedAvg(Full(4), 0.1)
    fine.round(fine.init(even, (0,)), even)


# --- dropout -------------------------------------------------------------------------------------


def splitmix(state):
    """The generator as Steele, Lea and Flood wrote it, in Python's own integers."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_draws_are_splitmix_and_look_uniform():
    golden, key = 0x9E3779B97F4A7C15, 2**62 + 12345
    found = uniform(torch.tensor(key), 3, (2, 2), torch.device("cpu"))
    start = splitmix(key + 3 * -(2**64 - golden) % 2**62)
    expected = [(splitmix(start + i * golden) >> 11) / 2**53 for i in (1, 2, 3, 4)]
    assert found.flatten().tolist() == expected
    many = torch.stack([uniform(torch.tensor(k), 1, (1000,), found.device) for k in range(100)])
    assert many.mean().item() == pytest.approx(0.5, abs=0.004)
    assert many.var().item() == pytest.approx(1 / 12, abs=0.001)
    assert torch.corrcoef(many).fill_diagonal_(0).abs().max() < 0.2


def dropped(task, seed=0, client=0, number=0):
    """Return which hidden units of eight samples survive, read off a network of ones."""
    theta = torch.zeros(1, task.size).double()
    task.model.views(theta)["0.bias"].fill_(1.0)
    seen = []
    layer = task.model._own.body[2]
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    batch = Batch(torch.arange(8).view(1, -1), visits=[(seed, client, number)])
    task.model._maps["cpu"] = False
    task.losses(theta, batch)
    return seen[0]


def test_dropout_draws_by_seed_client_and_minibatch():
    task = Task(Model(with_dropout(0.25)), FederatedDataset.build(X, Y, [np.arange(24)]))
    first = dropped(task)
    values, counts = first.unique(return_counts=True)
    assert values.tolist() == [0, 1 / 0.75] and 40 < counts[0] < 120
    assert torch.equal(first, dropped(task))
    for other in (dict(seed=1), dict(client=1), dict(number=1)):
        assert not torch.equal(first, dropped(task, **other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_gives_the_same_whatever_the_pieces(backend):
    task = Task(Model(with_dropout()), FederatedDataset.build(X, Y, np.split(np.arange(24), 3)))
    clients, cursor = torch.tensor([[0, 1, 2], [2, 0, 0]]), np.zeros((2, 3), dtype=int)
    batches, _ = task.data.next_batches((0, 1), clients, cursor, 3, 4)
    theta = task.init((0,)).expand(6, -1)
    assert task.model._maps == {"cpu": True}
    expected = local_sgd(task, theta, batches, 0.1, 6, "batched")
    for copies in (1, 2):
        found = local_sgd(task, theta, batches, 0.1, copies, backend)
        assert (found - expected).abs().max() < 1e-13
    task.model._maps["cpu"] = False
    looped = local_sgd(task, theta, batches, 0.1, copies, backend)
    assert (looped - expected).abs().max() < 1e-13


@pytest.mark.parametrize("build", [with_dropout, with_norm])
def test_the_number_of_cores_and_a_pause_do_not_change_a_bit(build):
    data = FederatedDataset.build(X, Y, np.split(np.arange(24), 3))
    task, algorithm = Task(Model(build()), data), FedAvg(Full(3), 0.1, 2, 4)
    threads, found = torch.get_num_threads(), []
    batches, _ = data.next_batches(
        (0,), torch.tensor([[0, 1, 2]]), np.zeros((1, 3), dtype=int), 3, 4
    )
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(local_sgd(task, task.init((0, 1, 2)), batches, 0.1, copies=1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    whole = simulate(algorithm, task, 4, (0, 1), progress=False).state
    half = simulate(algorithm, task, 2, (0, 1), progress=False).state
    again = simulate(algorithm, task, 2, (0, 1), state=half, progress=False).state
    assert torch.equal(whole.x, again.x) and not torch.equal(whole.x[0], whole.x[1])


class Meets(nn.Linear):
    """A layer in which two threads wait for each other, as soon as there is a place to meet."""

    place = None

    def forward(self, x):
        if self.place is not None:
            self.place.wait()  # passes only when two threads are here at once
        return super().forward(x)


@pytest.mark.parametrize("mapped", [True, False])
def test_two_threads_are_in_the_forward_pass_at_once(mapped, monkeypatch):
    module = nn.Sequential(Meets(6, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    data = FederatedDataset.build(X, Y, np.split(np.arange(24), 2))
    task, threads = Task(Model(module.double()), data), torch.get_num_threads()
    assert task.model._maps == {"cpu": True}
    task.model._maps["cpu"] = mapped
    clients, cursor = torch.tensor([[0, 1]]), np.zeros((1, 2), dtype=int)
    batches, _ = data.next_batches((0,), clients, cursor, 3, 4)
    theta = task.init((0, 1))
    alone = local_sgd(task, theta, batches, 0.1, copies=1, backend="loop")
    monkeypatch.setattr(Meets, "place", threading.Barrier(2, timeout=20))
    try:
        torch.set_num_threads(2)
        found = local_sgd(task, theta, batches, 0.1, copies=1, backend="threads")
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-14)


def test_dropout_is_off_in_evaluation_and_needs_to_know_whose_batch_it_is():
    module = with_dropout()
    task = Task(Model(module), FederatedDataset.build(X, Y, [np.arange(24)]))
    theta = task.init((0,))
    plain = task.model.to_module(theta).eval()
    assert type(plain[1]) is nn.Dropout
    loss = F.cross_entropy(plain(task.data.x), task.data.y)
    assert task.evaluate(theta)["loss"].item() == pytest.approx(loss.item(), abs=1e-12)
    with pytest.raises(FedlibError, match="visits"):
        task.losses(theta, Batch(torch.arange(4).view(1, -1)))


def test_channels_are_dropped_whole():
    module = nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.Conv1d(3, 60, 1),
        nn.Dropout1d(0.5),
        nn.Flatten(),
        nn.Linear(120, 2),
    )
    model = Model(module)
    model.outputs(torch.zeros(4, 6))
    seen = []
    model._own.body[3].register_forward_pre_hook(lambda _, args: seen.append(args[0] != 0))
    model._maps["cpu"] = False
    model.apply(model.to_row(module).float(), torch.ones(1, 4, 6), True, torch.tensor([5]))
    assert torch.equal(seen[0][..., 0], seen[0][..., 1]) and 60 < seen[0][..., 0].sum() < 180


# --- what cannot be done, in a sentence ----------------------------------------------------------


class Noise(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(3)


class Counts(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count = self.count + 1
        return super().forward(x)


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, device="meta"))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("net", "got str"),
        (lambda: None, "got function"),
        (nn.LazyLinear(3), "lazy"),
        (nn.Linear(2, 2, dtype=torch.complex64), "Complex"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter"),
        (nn.Sequential(nn.Embedding(5, 2, sparse=True)), "Layer '0' .*sparse=False"),
        (nn.Embedding(5, 2, max_norm=1.0), "max_norm"),
        (nn.BatchNorm1d(3, momentum=None), "momentum"),
        (Meta(), "on the CPU"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "Part of the module"),
        (nn.Sequential(nn.Linear(2, 2, device="meta").requires_grad_(False), Meta()), "on the CPU"),
        (models.softmax(2, 2), "got Model"),
    ],
)
def test_modules_that_cannot_be_rows(module, words):
    with pytest.raises(FedlibError, match=words):
        Model(module)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: Noise(6, 3), "global generator"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.RReLU()), "global generator"),
        (Counts, "'count' changes"),
        (lambda: nn.Linear(5, 3), r"shape \[6\], type torch.float64, failed"),
        (lambda: nn.Embedding(7, 3), "type torch.float64, failed"),
        (lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), r"shape \[2\]; expected \[2, K\]"),
    ],
)
def test_modules_that_do_not_fit_a_task(module, words):
    with pytest.raises(FedlibError, match=words):
        Task(Model(module().double()), FederatedDataset.build(X, Y, [np.arange(24)]))


def test_a_bare_module_a_tuple_and_tiers():
    data = FederatedDataset.build(X, Y, [np.arange(24)])
    with pytest.raises(FedlibError, match=r"Model\(module\)"):
        Task(nn.Linear(6, 3), data)
    with pytest.raises(FedlibError, match="one tensor"):
        Task(Model(nn.LSTM(6, 3).double()), data)
    for module in (with_norm(), with_dropout()):
        with pytest.raises(FedlibError, match="Silo 0.*GroupNorm"):
            TieredTask([Model(module)], [X], Y, [[np.arange(24)]])


def test_a_forward_pass_of_ones_own_is_for_parameters_alone():
    for module in (with_norm(), with_dropout()):
        with pytest.raises(FedlibError, match="trained parameters only"):
            Model(module, lambda views, x: x)


def test_a_module_without_memory_is_drawn_where_its_layers_can():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model = Model(module)
    row = model.init(stream(0, "init"))
    here = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert torch.equal(row, Model(here).init(stream(0, "init")))
    assert torch.equal(model.to_row(model.to_module(row)), row)
    assert model.to_module(row)[1].num_batches_tracked == 0


def test_nothing_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_of("attention").evaluate(task_of("attention").init((0,)))


# --- rules beside buffers -------------------------------------------------------------------------


def normalised():
    task = Task(Model(with_norm()), FederatedDataset.build(X, Y, [np.arange(24)]), "cross_entropy")
    rows = torch.arange(24).view(2, 12)
    return task, task.init((0, 1)), [Batch(rows), Batch(rows.flip(1))]


def test_a_rule_moves_no_buffer():
    """FedProx pulls parameters, not running statistics: those follow the batches alone."""
    task, theta, batches = normalised()
    k, extras = task.model.trained, {"anchor": torch.zeros_like(theta)}
    first = batches[:1]
    plain = local_sgd(task, theta, first, 0.1)
    pulled = local_sgd(task, theta, first, 0.1, step=steps.proximal(0.7), extras=extras)
    assert torch.equal(plain[:, k:], pulled[:, k:]) and not torch.equal(plain[:, k:], theta[:, k:])
    assert not torch.equal(plain[:, :k], pulled[:, :k])


def test_a_gradient_elsewhere_leaves_that_point_as_it_is():
    task, theta, batches = normalised()
    anchor = theta.clone()
    extras = {"anchor": anchor, "full": torch.zeros_like(theta)}
    local_sgd(task, theta, batches, 0.1, step=steps.svrg(), extras=extras)
    assert torch.equal(anchor, theta)


def test_the_l2_term_of_an_evaluation_leaves_buffers_out():
    task, theta, _ = normalised()
    heavy = Task(task.model, task.data, l2=2.0)
    more = heavy.evaluate(theta)["loss"] - task.evaluate(theta)["loss"]
    expected = theta[:, : task.model.trained].double().square().sum(1)
    assert torch.allclose(more, expected, atol=1e-9)


def test_whatever_a_module_raises_is_told_as_a_sentence():
    class Missing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x):
            return self.nowhere(x)

    with pytest.raises(FedlibError, match="Trying the model on features.*'nowhere'") as error:
        Task(Model(Missing()), FederatedDataset.build(np.zeros((2, 12)), [0, 1], [[0, 1]]))
    assert isinstance(error.value.__cause__, AttributeError)
