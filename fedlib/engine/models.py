"""The architectures of the papers, with a batched forward pass of their own where it pays.

Each is tested equal to the plain module. For any other module see
:class:`~fedlib.engine.model.Model`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlib.engine.checks import check_images, check_whole_number
from fedlib.engine.convolution import convolve
from fedlib.engine.model import Model
from fedlib.errors import FedlibError, unknown


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are no positive whole numbers."""
    for name, size in sizes.items():
        check_whole_number(name, size)


def uniform_init(name: str, shape: torch.Size, fan_in: int, rng: np.random.Generator) -> np.ndarray:
    """PyTorch's default for dense and convolution layers: uniform in ±1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    return rng.uniform(-bound, bound, size=tuple(shape))


def kaiming_init(last: str) -> Callable[..., np.ndarray]:
    """Kaiming normal weights and zero biases, except for the layer called ``last``.

    This is the initialisation of the participation paper's official code; the output layer
    keeps PyTorch's default.
    """

    def rule(name: str, shape: torch.Size, fan_in: int, rng: np.random.Generator) -> np.ndarray:
        if name.startswith(last):
            return uniform_init(name, shape, fan_in, rng)
        if name.endswith("bias"):
            return np.zeros(tuple(shape))
        return rng.normal(0.0, math.sqrt(2 / fan_in), size=tuple(shape))

    return rule


def _dense(views: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
    """Apply ``x[copies, B, in] -> [copies, B, out]`` for every copy with one batched product.

    Computed as ``W xᵀ``: with the weight in front, its gradient ``δ xᵀ`` comes out in the
    weight's own order, several times faster than its transpose.
    """
    weight, bias = views[f"{layer}.weight"], views[f"{layer}.bias"]
    return torch.baddbmm(bias.unsqueeze(2), weight, x.transpose(1, 2)).transpose(1, 2)


def softmax(features: int, classes: int) -> Model:
    """Softmax regression: one dense layer on flattened inputs, ``P = (features + 1) classes``."""
    return mlp(features, classes)


def mlp(*widths: int) -> Model:
    """Fully connected ReLU network on flattened inputs: ``mlp(784, 50, 10)``."""
    if len(widths) < 2:
        raise FedlibError(f"A network has two widths or more: mlp(784, 50, 10); got {widths}.")
    for width in widths:
        check_whole_number("A width", width)
    layers: list[nn.Module] = [nn.Flatten()]
    for i, (a, b) in enumerate(zip(widths[:-1], widths[1:], strict=True)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(a, b, device="meta")]
    module = nn.Sequential(*layers)
    names = [name for name, layer in module.named_children() if isinstance(layer, nn.Linear)]

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        h = x.flatten(2)
        for i, name in enumerate(names):
            h = _dense(views, name, F.relu(h) if i else h)
        return h

    return Model(module, forward, kaiming_init(last=names[-1]), dense=names)


class _TwoConv(nn.Module):
    """Two convolutions with max pooling, then dense layers: the shape of both papers' CNNs."""

    def __init__(
        self, shape: tuple[int, int, int], channels: tuple[int, int], dense: tuple[int, ...]
    ) -> None:
        super().__init__()
        (a, height, width), (b, c) = shape, channels
        self.conv1 = nn.Conv2d(a, b, 5, padding=2, device="meta")
        self.conv2 = nn.Conv2d(b, c, 5, padding=2, device="meta")
        widths = (c * (height // 4) * (width // 4), *dense)
        self.fc = nn.ModuleList(
            nn.Linear(i, o, device="meta") for i, o in zip(widths[:-1], widths[1:], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.conv1(x)), 2)
        h = F.max_pool2d(F.relu(self.conv2(h)), 2).flatten(1)
        for layer in self.fc[:-1]:
            h = F.relu(layer(h))
        return self.fc[-1](h)


def _two_conv(views: dict[str, Tensor], x: Tensor) -> Tensor:
    """Convolve 5×5 with padding 2, ReLU, pool 2×2, and again: ``[copies, B, features]``."""
    layers = ("conv1", "conv2")
    if x.device.type == "cpu":
        weights = [views[f"{layer}.{kind}"] for layer in layers for kind in ("weight", "bias")]
        return torch.stack([_two_conv_alone(*one) for one in zip(x, *weights, strict=True)])
    h = x
    for layer in layers:
        h = convolve(h, views[f"{layer}.weight"], views[f"{layer}.bias"])
        h = F.relu(F.max_pool2d(h.flatten(0, 1), 2)).unflatten(0, h.shape[:2])
    return h.flatten(2)


def _two_conv_alone(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """One copy. With the channels last in memory a CPU pools some ten times faster.

    The largest of four is the same before ReLU and after, and so are the gradients; after
    pooling there is a quarter left to do. The second convolution does most of the arithmetic:
    with AVX2 oneDNN is slower at it with the channels last, so they go first for it alone.
    """
    last = torch.channels_last
    h = F.conv2d(x.to(memory_format=last), w1, b1, padding=2)
    h = F.relu(F.max_pool2d(h, 2))
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        h = h.contiguous()
    h = F.conv2d(h, w2, b2, padding=2).to(memory_format=last)
    return F.relu(F.max_pool2d(h, 2)).flatten(1)


def _cnn(shape: tuple[int, int, int], channels: tuple[int, int], dense: tuple[int, ...]) -> Model:
    module, last = _TwoConv(shape, channels, dense), len(dense) - 1

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        h = _two_conv(views, x)
        for i in range(last + 1):
            h = _dense(views, f"fc.{i}", F.relu(h) if i else h)
        return h

    return Model(module, forward, kaiming_init(last=f"fc.{last}"))


def fashion_cnn() -> Model:
    """The participation paper's CNN for 1×28×28 images, 228,586 parameters (appendix D)."""
    return _cnn((1, 28, 28), (32, 32), (128, 10))


def cifar_cnn() -> Model:
    """The participation paper's CNN for 3×32×32 images, 2,218,314 parameters (appendix D)."""
    return _cnn((3, 32, 32), (32, 64), (512, 128, 10))


def small_cnn(shape: tuple[int, int, int], outputs: int) -> Model:
    """Two 5×5 convolutions (8 and 16 channels) with pooling and a dense head, for a CPU.

    Parameters
    ----------
    shape
        Channels, height and width of the input; height and width at least 4.
    outputs
        Embedding width or number of classes.
    """
    check_images(shape, outputs, 4)
    return _cnn(shape, (8, 16), (outputs,))


def _norm(kind: str, groups: int) -> Callable[[int], nn.Module]:
    """Return what makes the norm of so many channels."""
    kinds = {
        "group": lambda c: nn.GroupNorm(groups, c, device="meta"),
        "batch": lambda c: nn.BatchNorm2d(c, track_running_stats=False, device="meta"),
    }
    if kind not in kinds:
        raise unknown("norm", kind, kinds)
    return kinds[kind]


def normed_cnn(shape: tuple[int, int, int], outputs: int, norm: str = "group") -> Model:
    """Two 3×3 convolutions (8 and 16 channels), each normalised, and a dense head.

    The smallest network in which the choice of norm can be seen; see :func:`resnet18` for it.

    Parameters
    ----------
    shape
        Channels, height and width of the input; height and width at least 2.
    outputs
        Embedding width or number of classes.
    norm
        ``"group"``: four groups of channels. ``"batch"``: the statistics of the current batch, when
        trained and when evaluated, where it is the rows that are looked at together: how many that
        are depends on how many runs stand beside each other. An incomplete batch must not be
        padded.
    """
    normed = _norm(norm, 4)
    check_images(shape, outputs, 2)
    channels, height, width = shape
    left = 16 * (height // 2) * (width // 2)
    layers = [
        *(nn.Conv2d(channels, 8, 3, padding=1, device="meta"), normed(8), nn.ReLU()),
        nn.MaxPool2d(2),
        *(nn.Conv2d(8, 16, 3, padding=1, device="meta"), normed(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(left, outputs, device="meta")),
    ]

    def initialise(name, shape, fan_in, rng):
        if name.startswith(("1.", "5.")):  # the norms
            return np.full(tuple(shape), float(name.endswith("weight")))
        return uniform_init(name, shape, fan_in, rng)

    return Model(nn.Sequential(*layers), None, initialise)


class _LeNet(nn.Module):
    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5, device="meta")
        self.conv2 = nn.Conv2d(6, 16, 5, device="meta")
        left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
        widths = (16 * left[0] * left[1], 120, 84, classes)
        self.fc = nn.ModuleList(
            nn.Linear(i, o, device="meta") for i, o in zip(widths[:-1], widths[1:], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(F.max_pool2d(self.conv1(x), 2))
        h = F.relu(F.max_pool2d(self.conv2(h), 2)).flatten(1)
        return self.fc[2](F.relu(self.fc[1](F.relu(self.fc[0](h)))))


def lenet(shape: tuple[int, int, int], classes: int) -> Model:
    """LeNet: two 5×5 convolutions without padding, 6 and 16 channels, and dense layers 120 and 84.

    After each convolution comes 2×2 max pooling. ``lenet((3, 32, 32), 10)`` has 62,006 parameters,
    ``lenet((1, 28, 28), 10)`` 44,426. The hierarchical paper gives these layers without the
    channels, which are LeNet's. Weights start as PyTorch's do.

    Parameters
    ----------
    shape
        Channels, height and width of the input; height and width at least 16.
    classes
        Number of outputs.
    """
    check_images(shape, classes)
    for side in shape[1:]:
        check_whole_number("Height or width", side, 16)

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        layers = ("conv1", "conv2")
        if x.device.type == "cpu":
            each = [views[f"{layer}.{kind}"] for layer in layers for kind in ("weight", "bias")]
            h = torch.stack([_lenet_alone(*one) for one in zip(x, *each, strict=True)])
        else:
            h = x
            for layer in layers:  # the middle of a convolution with padding is one without
                h = convolve(h, views[f"{layer}.weight"], views[f"{layer}.bias"])
                h = F.max_pool2d(h[..., 2:-2, 2:-2].flatten(0, 1), 2)
                h = F.relu(h).unflatten(0, x.shape[:2])
            h = h.flatten(2)
        for i in range(3):
            h = _dense(views, f"fc.{i}", F.relu(h) if i else h)
        return h

    return Model(_LeNet(shape, classes), forward, uniform_init)


def _lenet_alone(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """Convolve and pool one copy's images, with the channels last in memory: on a CPU faster."""
    h = F.conv2d(x.to(memory_format=torch.channels_last), w1, b1)
    h = F.conv2d(F.relu(F.max_pool2d(h, 2)), w2, b2)
    return F.relu(F.max_pool2d(h, 2)).flatten(1)


class _LSTM(nn.Module):
    """One LSTM layer and a dense head on its last state, for ``[B, T, features]``."""

    def __init__(self, features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True, device="meta")
        self.head = nn.Linear(hidden, outputs, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm(features: int, hidden: int, outputs: int = 1) -> Model:
    """LSTM over ``[B, T, features]`` with a dense head on the last state (TDCD paper, MIMIC-III).

    Weights are uniform in ±1/√hidden, PyTorch's default for this layer.
    """
    check_sizes(features=features, hidden=hidden, outputs=outputs)

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        copies, batch, steps, _ = x.shape
        bias = (views["lstm.bias_ih_l0"] + views["lstm.bias_hh_l0"]).unsqueeze(2)
        inward, again = (views[f"lstm.weight_{way}_l0"] for way in ("ih", "hh"))
        sequence = x.permute(0, 3, 2, 1).flatten(2)  # [copies, features, T B], as in _dense
        driven = torch.baddbmm(bias, inward, sequence).unflatten(2, (steps, batch))
        h = c = x.new_zeros(copies, hidden, batch)
        for gates in driven.unbind(2):
            i, f, g, o = torch.baddbmm(gates, again, h).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return _dense(views, "head", h.transpose(1, 2))

    def initialise(name, shape, fan_in, rng):
        return uniform_init(name, shape, hidden, rng)

    return Model(_LSTM(features, hidden, outputs), forward, initialise)


class _CharLSTM(nn.Module):
    def __init__(self, symbols: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        meta: dict[str, Any] = dict(device="meta")
        self.embed = nn.Embedding(symbols, embedding, **meta)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, **meta)
        self.head = nn.Linear(hidden, symbols, **meta)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x.long()))[0][:, -1])


def char_lstm(symbols: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> Model:
    """Predict the character that follows a window of them, ``[B, T]`` whole numbers (Shakespeare).

    An embedding, LSTM layers one upon the other, and a dense head on the last state of the last
    layer: one prediction a window, of the character after it, as the benchmark LEAF trains it
    with its windows of 80. Weights start as PyTorch's do.

    Parameters
    ----------
    symbols
        Size of the alphabet, which is also the number of outputs.
    embedding, hidden, layers
        Width of the embedding, of each layer's state, and how many layers there are.
    """
    sizes = {"symbols": symbols, "embedding": embedding, "hidden": hidden, "layers": layers}
    for name, size in sizes.items():
        check_whole_number(name, size)

    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    names = [f"lstm.{kind}_l{layer}" for layer in range(layers) for kind in kinds]

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        tables, held = views["embed.weight"], [views[name] for name in names]
        if x.device.type == "cpu":
            if ((x < 0) | (x >= symbols)).any():
                raise FedlibError(
                    f"Symbols are numbered 0 to {symbols - 1}; got {int(x.min())} to "
                    f"{int(x.max())}."
                )
            h = torch.stack([_lstm_alone(*one) for one in zip(x, tables, *held, strict=True)])
            return _dense(views, "head", h)
        first = symbols * torch.arange(len(x), device=tables.device).view(-1, 1, 1)
        h = F.embedding(x.long() + first, tables.flatten(0, 1)).permute(0, 3, 2, 1)
        for layer in range(layers):
            h = _lstm_states(h, *held[4 * layer : 4 * layer + 4])
        return _dense(views, "head", h[:, :, -1].transpose(1, 2))

    def initialise(name, shape, fan_in, rng):
        if name == "embed.weight":
            return rng.standard_normal(tuple(shape))
        return uniform_init(name, shape, hidden, rng)

    return Model(_CharLSTM(symbols, embedding, hidden, layers), forward, initialise)


def _lstm_alone(x: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
    """Return one copy's last state ``[B, hidden]``: on a CPU PyTorch's own layers are faster."""
    layers = len(weights) // 4
    zero = table.new_zeros(layers, len(x), weights[1].shape[1])
    h = F.embedding(x.long(), table)
    return torch.lstm(h, (zero, zero), weights, True, layers, 0.0, False, False, True)[0][:, -1]


def _lstm_states(x: Tensor, inward: Tensor, again: Tensor, *biases: Tensor) -> Tensor:
    """Run one LSTM layer over ``x[copies, in, T, B]``: its states, ``[copies, hidden, T, B]``."""
    driven = torch.baddbmm(
        sum(biases).unsqueeze(2),  # type: ignore[union-attr]  # never an empty sum
        inward,
        x.flatten(2),
    ).unflatten(2, x.shape[2:])
    h = c = x.new_zeros(len(x), again.shape[2], x.shape[3])
    states = []
    for gates in driven.unbind(2):
        i, f, g, o = torch.baddbmm(gates, again, h).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, 2)


class _Residual(nn.Module):
    """Two 3×3 convolutions with a shortcut."""

    def __init__(self, inward: int, outward: int, stride: int, norm: Callable) -> None:
        super().__init__()
        conv: dict[str, Any] = dict(bias=False, device="meta")
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, **conv)
        self.norm1 = norm(outward)
        self.conv2 = nn.Conv2d(outward, outward, 3, 1, 1, **conv)
        self.norm2 = norm(outward)
        self.shortcut = nn.Sequential()
        if stride != 1 or inward != outward:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, **conv), norm(outward)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class _ResNet18(nn.Module):
    def __init__(self, shape: tuple[int, int, int], outputs: int, norm: Callable) -> None:
        super().__init__()
        channels, height, width = shape
        self.stem = nn.Conv2d(channels, 64, 3, 1, 1, bias=False, device="meta")
        self.norm = norm(64)
        blocks, inward = [], 64
        for outward, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [
                _Residual(inward, outward, stride, norm),
                _Residual(outward, outward, 1, norm),
            ]
            inward = outward
        self.blocks = nn.Sequential(*blocks)
        down = [-(-side // 8) // 2 for side in (height, width)]
        self.head = nn.Linear(512 * down[0] * down[1], outputs, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.avg_pool2d(h, 2).flatten(1))


def resnet18(shape: tuple[int, int, int], outputs: int, norm: str = "group") -> Model:
    """ResNet18 with a 3×3 stem of stride 1, for halves of CIFAR-10 images (TDCD paper).

    Parameters
    ----------
    shape
        Channels, height and width, at least 9 each: ``(3, 32, 16)`` for a half. With
        ``outputs=10`` this has the paper's 11,179,082 parameters.
    outputs
        Embedding width E.
    norm
        ``"group"``: GroupNorm with 32 groups, ours, a function of each sample alone as the theory
        assumes. ``"batch"``: BatchNorm by the statistics of the current batch, as in the
        official code during training; an incomplete batch must not be padded.
    """
    normed = _norm(norm, 32)
    check_images(shape, outputs, 9)

    def initialise(name, shape, fan_in, rng):
        if "norm" in name or ("shortcut.1" in name):
            return np.full(tuple(shape), float(name.endswith("weight")))
        return uniform_init(name, shape, fan_in, rng)

    return Model(_ResNet18(shape, outputs, normed), None, initialise)


def linear(features: int) -> Model:
    """Linear prediction without bias, ``theta · x``, for least squares; starts at zero."""
    check_sizes(features=features)
    module = nn.Linear(features, 1, bias=False, device="meta")

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.bmm(x.flatten(2), views["weight"].transpose(1, 2))

    return Model(module, forward, lambda name, shape, fan_in, rng: np.zeros(tuple(shape)))


class _Location(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.empty(dim, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self.point - x


def location(dim: int) -> Model:
    """The residual ``theta - z``: with half squares as loss, every client is a quadratic bowl."""
    check_sizes(dim=dim)

    def forward(views: dict[str, Tensor], x: Tensor) -> Tensor:
        return views["point"].unsqueeze(1) - x

    return Model(_Location(dim), forward, lambda name, shape, fan_in, rng: np.zeros(tuple(shape)))
