"""Batched forward and backward passes equal one module a copy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlib.engine import convolution, models
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.model import Model
from fedlib.engine.rng import GOLDEN, scrambled, stream
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError


def _module_with(model, row):
    module = copy.deepcopy(model.module).to_empty(device="cpu").double()
    vector_to_parameters(row, module.parameters())
    return module


class _Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 5)
        self.b = nn.Linear(5, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


CASES = {
    "softmax": (lambda: models.softmax(16, 3), (1, 4, 4)),
    "mlp": (lambda: models.mlp(16, 7, 6, 3), (1, 4, 4)),
    "fashion_cnn": (models.fashion_cnn, (1, 28, 28)),
    "cifar_cnn": (models.cifar_cnn, (3, 32, 32)),
    "lenet": (lambda: models.lenet((3, 32, 32), 10), (3, 32, 32)),
    "lenet, grey": (lambda: models.lenet((1, 17, 18), 3), (1, 17, 18)),
    "small_cnn": (lambda: models.small_cnn((1, 8, 12), 3), (1, 8, 12)),
    "normed_cnn": (lambda: models.normed_cnn((1, 4, 6), 3), (1, 4, 6)),
    "lstm": (lambda: models.lstm(5, 4, 3), (6, 5)),
    "any module": (lambda: models.Model(_Plain()), (8,)),
}


def _task(name, samples=12):
    build, shape = CASES[name]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((samples, *shape)), rng.integers(0, 3, samples)
    parts = np.array_split(np.arange(samples), 3)
    return Task(build(), FederatedDataset.build(x, y, parts))


@pytest.mark.parametrize("name", CASES)
def test_batched_gradient_equals_autograd_on_each_copy(name):
    task = _task(name)
    theta = torch.cat([task.model.init(stream(s, "init")) for s in range(2)])
    batch = Batch(torch.tensor([[0, 1, 2], [5, 3, 9]]))
    gradients = task.grad(theta, batch)
    for c in range(2):
        module = _module_with(task.model, theta[c])
        out = module(task.data.x[batch.rows[c]])
        assert torch.allclose(task.model.apply(theta, task.features(batch)[0])[c], out, atol=1e-12)
        nn.functional.cross_entropy(out, task.data.y[batch.rows[c]]).backward()
        alone = parameters_to_vector([p.grad for p in module.parameters()])
        assert torch.allclose(gradients[c], alone, atol=1e-12)


SHAPES = [(1, 28, 28), (3, 32, 32), (2, 9, 7), (1, 4, 5), (3, 5, 6), (2, 16, 19)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("copies, samples", [(1, 1), (2, 13)])
def test_pooling_and_its_gradient_are_the_modules(shape, ties, copies, samples):
    """Also where several pixels of a window are equally large, zero, or all of them negative."""
    builds = {SHAPES[0]: models.fashion_cnn, SHAPES[1]: models.cifar_cnn}
    builds[SHAPES[-1]] = lambda: models.lenet(SHAPES[-1], 3)
    model = builds.get(shape, lambda: models.small_cnn(shape, 3))()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((copies, samples, *shape))
    theta = 0.05 * rng.standard_normal((copies, model.size))
    if ties:
        x, theta = rng.integers(-1, 2, x.shape).astype(float), np.round(10 * theta)
        x[:, -1] = 0
    x, theta = torch.from_numpy(x), torch.from_numpy(theta)
    leaf = theta.clone().requires_grad_()
    out = model.apply(leaf, x)
    slope = torch.from_numpy(rng.integers(-2, 3, out.shape).astype(float))
    (gradient,) = torch.autograd.grad(out, leaf, slope)
    with torch.no_grad():
        assert torch.equal(model.apply(theta, x), out)
    for c in range(copies):
        module = _module_with(model, theta[c])
        sample = x[c].clone().requires_grad_()
        alone = module(sample)
        expected = torch.autograd.grad(alone, [sample, *module.parameters()], slope[c])
        flat = parameters_to_vector(expected[1:])
        assert (out[c] - alone).abs().max() <= 1e-12 * alone.abs().max()
        assert (gradient[c] - flat).abs().max() <= 1e-12 * flat.abs().max()
        again = x[c : c + 1].clone().requires_grad_()
        (found,) = torch.autograd.grad(model.apply(theta[c : c + 1], again)[0], again, slope[c])
        assert (found[0] - expected[0]).abs().max() <= 1e-12 * expected[0].abs().max()


class Elsewhere(torch.Tensor):
    """A tensor on a CPU that says otherwise."""

    device = torch.device("meta")


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 17, 19)])
def test_lenet_on_a_gpu_is_the_one_on_a_cpu(shape, monkeypatch):
    """The way of a GPU, which convolves all copies together and cuts the borders."""
    seen, rng = [], np.random.default_rng(0)
    monkeypatch.setattr(
        models, "convolve", lambda *given: seen.append(given) or convolution.convolve(*given)
    )
    model = models.lenet(shape, 4)
    theta = torch.from_numpy(0.1 * rng.standard_normal((3, model.size)))
    x = torch.from_numpy(rng.standard_normal((3, 5, *shape)))
    found = []
    for kind in (torch.Tensor, Elsewhere):
        leaves = [tensor.clone().requires_grad_() for tensor in (theta, x)]
        out = model.apply(leaves[0], leaves[1].as_subclass(kind)).as_subclass(torch.Tensor)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert len(seen) == 2 * (kind is Elsewhere)
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-12 * a.abs().max()


@pytest.mark.parametrize("place", [torch.Tensor, Elsewhere])
@pytest.mark.parametrize("kind", [np.uint8, np.int64])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_characters_are_predicted_as_pytorch_does(layers, kind, place):
    """On a CPU, and the way of a GPU, which takes all copies together."""
    symbols, copies, rng = 7, 3, np.random.default_rng(0)
    model = models.char_lstm(symbols, 3, 5, layers)
    x = torch.from_numpy(rng.integers(0, symbols, (copies, 4, 9)).astype(kind))
    y = torch.from_numpy(rng.integers(0, symbols, (copies, 4)))
    theta = torch.from_numpy(rng.standard_normal((copies, model.size))).requires_grad_()
    out = model.apply(theta, x.as_subclass(place)).as_subclass(torch.Tensor)
    losses = [nn.functional.cross_entropy(*one) for one in zip(out, y, strict=True)]
    (gradient,) = torch.autograd.grad(sum(losses), theta)
    views = model.views(gradient)
    for c in range(copies):
        module = _module_with(model, theta[c].detach())
        alone = module(x[c])
        assert torch.allclose(out[c], alone, atol=1e-13)
        nn.functional.cross_entropy(alone, y[c]).backward()
        for name, parameter in module.named_parameters():
            assert torch.allclose(views[name][c], parameter.grad, atol=1e-13), name
    unseen = sorted(set(range(symbols)) - set(x[0].flatten().tolist()))
    assert not views["embed.weight"][0][unseen].any() and views["embed.weight"][0].any()


def test_one_prediction_a_window_of_what_comes_after_it():
    """One LSTM layer written out, number by number, for one window of two characters."""
    model = models.char_lstm(3, 1, 1, 1)
    theta = torch.from_numpy(np.random.default_rng(0).standard_normal((1, model.size)))
    v = {name: view[0].numpy() for name, view in model.views(theta).items()}
    h = c = 0.0
    for symbol in (2, 0):
        e = v["embed.weight"][symbol, 0]
        gate = v["lstm.weight_ih_l0"][:, 0] * e + v["lstm.weight_hh_l0"][:, 0] * h
        gate = gate + v["lstm.bias_ih_l0"] + v["lstm.bias_hh_l0"]
        i, f, o = (1 / (1 + np.exp(-gate[k])) for k in (0, 1, 3))
        c = f * c + i * np.tanh(gate[2])
        h = o * np.tanh(c)
    expected = v["head.weight"][:, 0] * h + v["head.bias"]
    out = model.apply(theta, torch.tensor([[[2, 0]]]))
    assert np.allclose(out[0, 0].numpy(), expected, atol=1e-14)


def test_a_character_that_does_not_exist_is_refused():
    model = models.char_lstm(4, 2, 3)
    theta = model.init(stream(0, "init"), 2)
    for wrong in (4, -1):
        x = torch.zeros(2, 1, 3, dtype=torch.long)
        x[0, 0, 1] = wrong
        with pytest.raises(FedlibError, match="numbered 0 to 3; got"):
            model.apply(theta, x)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: models.lenet((1, 15, 28), 10), "Height or width is a whole number of at least 16"),
        (lambda: models.char_lstm(0), "symbols is a whole number of at least 1; got 0"),
        (lambda: models.char_lstm(5, 0), "embedding is a whole number"),
        (lambda: models.char_lstm(5, hidden=1.5), "hidden is a whole number"),
        (lambda: models.char_lstm(5, layers=0), "layers is a whole number"),
    ],
)
def test_sizes_that_cannot_be_are_refused(build, said):
    with pytest.raises(FedlibError, match=said):
        build()


@pytest.mark.parametrize("build", [models.lenet, models.char_lstm], ids=lambda f: f.__name__)
def test_a_fresh_network_starts_as_pytorchs(build):
    """The same spread as the plain module's own ``reset_parameters``, layer by layer."""
    model = build((3, 32, 32), 10) if build is models.lenet else build(90, 8, 64)
    row, other = (model.init(stream(seed, "init")) for seed in (0, 1))
    assert (row != other).double().mean() > 0.99
    own = model.module.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in own.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    for name, parameter in own.named_parameters():
        view = model.views(row)[name][0]
        if view.numel() > 400:
            assert view.std().item() == pytest.approx(parameter.std().item(), rel=0.1), name
        if view.numel() > 80 and name != "embed.weight":  # normal, the others uniform
            assert (view.abs().max() / parameter.abs().max()).item() == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_resnet18_batched_equals_the_module():
    model = models.resnet18((3, 16, 16), 3)
    theta = model.init(stream(0, "init"), 2)
    theta[1] += 0.01
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 2, 3, 16, 16)))
    with torch.no_grad():
        out = model.apply(theta, x)
        assert torch.allclose(out[1], _module_with(model, theta[1])(x[1]), atol=1e-10)
    with pytest.raises(FedlibError, match="batch, group"):
        models.resnet18((3, 16, 16), 3, "layer")


def test_parameter_counts_of_the_paper():
    assert models.fashion_cnn().size == 228_586
    assert models.cifar_cnn().size == 2_218_314
    assert models.lenet((3, 32, 32), 10).size == 62_006
    assert models.lenet((1, 28, 28), 10).size == 44_426
    assert models.mlp(784, 50, 10).size == 39_760 == 784 * 50 + 50 + 50 * 10 + 10
    gates = [4 * 256 * (8 + 256 + 2), 4 * 256 * (256 + 256 + 2)]
    assert models.char_lstm(80).size == 80 * 8 + sum(gates) + 257 * 80 == 819_920
    assert models.char_lstm(90).size == 822_570
    for norm in ("group", "batch"):
        assert models.resnet18((3, 32, 16), 10, norm).size == 11_179_082
    for silos, widths, total in (
        (1, [76], 36_417),
        (4, [19] * 4, 9_540),
        (16, [5] * 12 + [4] * 4, 2_832),
    ):
        assert sum(models.lstm(width, 64 // silos).size for width in widths) == total


def test_initialisation_follows_the_official_code():
    model = models.fashion_cnn()
    views = model.views(model.init(stream(0, "init")))
    assert views["conv2.weight"].std().item() == pytest.approx((2 / (32 * 25)) ** 0.5, rel=0.02)
    assert views["fc.0.weight"].std().item() == pytest.approx((2 / 1568) ** 0.5, rel=0.02)
    assert (views["conv1.bias"] == 0).all() and (views["fc.0.bias"] == 0).all()
    assert views["fc.1.weight"].abs().max().item() <= 1 / 128**0.5
    assert views["fc.1.bias"].abs().max().item() > 0


def test_initialisation_depends_on_the_seed_alone():
    task = _task("mlp")
    assert torch.equal(task.init([3, 4])[1], task.init([4])[0])
    assert not torch.equal(task.init([3])[0], task.init([4])[0])


def test_padded_full_batches_have_no_effect_from_padding():
    task = _task("softmax", samples=11)
    theta = task.model.init(stream(0, "init"))
    together = task.grad(theta.expand(3, -1), task.data.full_batch())
    for n, part in enumerate(task.data.parts):
        alone = task.grad(theta, Batch(torch.from_numpy(part).view(1, -1)))
        assert torch.allclose(together[n], alone[0], atol=1e-13)


def test_evaluation_equals_a_direct_computation():
    task = _task("mlp")
    theta = torch.cat([task.model.init(stream(s, "init")) for s in range(2)])
    task.chunk = 100
    got = task.evaluate(theta)
    for c in range(2):
        out = _module_with(task.model, theta[c])(task.data.x)
        loss = nn.functional.cross_entropy(out, task.data.y)
        assert got["loss"][c].item() == pytest.approx(loss.item(), abs=1e-12)
        right = (out.argmax(1) == task.data.y).double().mean()
        assert got["accuracy"][c].item() == pytest.approx(right.item())


def test_minibatches_walk_through_all_samples_and_drop_the_incomplete_last():
    task = _task("softmax", samples=33)  # 11 samples a client, minibatches of 4: two a pass
    clients = torch.tensor([[1, 1]])
    cursor = np.zeros((1, 3), dtype=np.int64)
    batches, cursor = task.data.next_batches([0], clients, cursor, 2, 4)
    assert cursor.tolist() == [[0, 4, 0]]
    first = torch.stack([b.rows[0] for b in batches]).flatten().tolist()
    second = torch.stack([b.rows[1] for b in batches]).flatten().tolist()
    own = set(task.data.parts[1].tolist())
    for one_pass in (first, second):
        assert len(set(one_pass)) == 8 and set(one_pass) <= own
    assert first != second
    again, _ = task.data.next_batches([0], clients, np.zeros((1, 3), dtype=np.int64), 2, 4)
    assert torch.equal(again[0].rows, batches[0].rows)


def test_augmentation_is_one_crop_and_flip_a_batch():
    task = _task("cifar_cnn")
    task.data.augment = True
    batches, _ = task.data.next_batches(
        [0], torch.tensor([[0, 2]]), np.zeros((1, 3), dtype=np.int64), 3, 2
    )
    x, _ = task.features(batches[0])
    down, right, flip = batches[0].jitter[0].tolist()
    plain = nn.functional.pad(task.data.x[batches[0].rows[0]], (4, 4, 4, 4))
    plain = plain[..., down : down + 32, right : right + 32]
    assert torch.equal(x[0], plain.flip(-1) if flip else plain)
    assert len({tuple(b.jitter[i].tolist()) for b in batches for i in range(2)}) > 1


def test_errors_say_what_came_and_what_was_expected():
    x, y = np.zeros((4, 2)), np.zeros(4, dtype=int)
    with pytest.raises(FedlibError, match="given twice"):
        FederatedDataset.build(x, y, [np.array([0, 1]), np.array([1, 2])])
    with pytest.raises(FedlibError, match="no samples"):
        FederatedDataset.build(x, y, [np.array([0]), np.array([], dtype=int)])
    data = FederatedDataset.build(x, y, [np.array([0]), np.array([1, 2])])
    with pytest.raises(FedlibError, match="fewer than a minibatch of 2"):
        data.next_batches([0], torch.tensor([[0]]), np.zeros((1, 2), dtype=int), 1, 2)
    with pytest.raises(FedlibError, match="cross_entropy"):
        Task(models.softmax(2, 2), data, "cross-entropy")
    with pytest.raises(FedlibError, match="no test split"):
        Task(models.softmax(2, 2), data).evaluate(torch.zeros(1, 6), "test")


def test_dropout_keys_take_seed_client_and_number_in_turn():
    key = torch.tensor(0)
    for part in (1, 2, 3):
        key = scrambled(key + part + GOLDEN)
    assert Batch(torch.zeros(1, 1).long(), visits=[(1, 2, 3)]).keys().tolist() == [key]


def test_scrambling_is_splitmix_for_negative_numbers_too():
    def mix(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    bits = [1, -1, 2**62 + 5, GOLDEN]
    assert [b % 2**64 for b in scrambled(torch.tensor(bits)).tolist()] == [
        mix(b % 2**64) for b in bits
    ]


def test_a_reading_says_whether_it_is_padded():
    data = FederatedDataset.build(np.zeros((3, 2)), np.zeros(3, int), [np.arange(2), np.array([2])])
    for clients, padded in (([[0, 1]], True), ([[1]], False)):
        batches, _ = data.next_batches((0,), torch.tensor(clients), np.zeros((1, 2), int), 2, None)
        assert [b.padded for b in batches] == [padded] * 2


def test_weights_of_whole_numbers_are_double():
    data = FederatedDataset.build(np.zeros((3, 2), int), np.zeros(3, int), [np.arange(3)])
    assert data.full_batch().weight.tolist() == [[1 / 3] * 3]


def test_all_of_the_data_move():
    x, y = np.zeros((3, 2)), np.zeros(3, int)
    moved = FederatedDataset.build(x, y, [np.arange(3)], x, y).to("meta")
    assert {getattr(moved, n).device.type for n in ("x", "y", "test_x", "test_y")} == {"meta"}


def test_batchnorm_refuses_padding_that_nobody_told_of():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    x, y = np.zeros((5, 2), "f"), np.zeros(5, int)
    task = Task(Model(net), FederatedDataset.build(x, y, [np.arange(3), np.arange(3, 5)]))
    with pytest.raises(FedlibError, match="BatchNorm"):
        task.grad(task.init([0, 1]), task.data.full_batch())


def test_an_lstm_starts_as_pytorchs():
    model = models.lstm(2, 16, 3)
    theta = torch.cat([model.init(stream(seed, "init")) for seed in range(20)])
    for name, view in model.views(theta).items():
        assert 0.9 / 4 < view.abs().max() <= 1 / 4, name


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_normalisation_starts_as_the_identity(norm):
    model = models.resnet18((1, 16, 16), 2, norm)
    module = model.to_module(model.init(stream(0, "init")))
    kinds = (nn.GroupNorm, nn.BatchNorm2d)
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    assert len(layers) == 20  # two in each of eight blocks, three on shortcuts, one at the stem
    for layer in layers:
        assert (layer.weight == 1).all() and (layer.bias == 0).all()


def test_a_rule_is_told_the_inputs_of_its_layer():
    seen = {}

    def rule(name, shape, fan_in, rng):
        seen[name] = fan_in
        return np.zeros(tuple(shape))

    net = nn.Sequential(nn.LayerNorm(6), nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 5, 3))
    Model(net, None, rule).init(stream(0, "init"))
    assert seen == {"0.weight": 1, "0.bias": 1, "2.weight": 2 * 3, "2.bias": 2 * 3}
