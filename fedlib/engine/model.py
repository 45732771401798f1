"""A model as a function of a flat row: any ``torch.nn.Module``, many copies at once.

``theta[copies, P]`` holds one model a row: first the trained parameters, then the floating-point
buffers, such as the running statistics of BatchNorm. What a module holds besides is shared by all
copies: frozen parameters and integer buffers.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fedlib.engine.checks import check_rows
from fedlib.engine.rng import GOLDEN, scrambled, stream
from fedlib.errors import FedlibError
from fedlib.files import digest, own_code

Forward = Callable[[dict[str, Tensor], Tensor], Tensor]
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_trying = threading.RLock()


class Model:
    """A module seen as ``f(theta, x)`` with flat rows.

    The module is copied and stays as it is. The rows of ``theta`` hold its trained parameters and,
    after them, its floating-point buffers. So the running statistics of BatchNorm are averaged,
    mixed and stored like parameters, the common practice for FedAvg; gradients and weight decay
    leave them alone. Frozen parameters (``requires_grad=False``) and integer buffers keep the
    module's values, are shared by all copies and are never sent. BatchNorm's count of batches is
    not kept.

    A fresh row is a fresh draw: every layer with a ``reset_parameters`` of its own is drawn anew;
    a trained parameter of any other layer starts at the module's value. To start every run from
    the module's values instead, for example pretrained ones, give ``algorithm.init`` rows of
    :meth:`to_row`.

    Parameters
    ----------
    module
        Takes ``[B, ...]`` and returns ``[B, K]``. Dropout layers draw from a stream of their own
        (see :class:`~fedlib.engine.data.Batch`); other random layers are refused when a
        :class:`~fedlib.engine.tasks.Task` is made.
    forward
        Optional batched forward pass ``(views, x[copies, B, ...]) -> [copies, B, K]``, where
        ``views[name]`` has shape ``[copies, *shape]``. Without it the module is mapped over
        the copies by ``torch.func.vmap``, or, where that cannot be done, run copy by copy.
    initialise
        Optional rule ``(name, shape, fan_in, rng) -> array`` for one parameter, in place of the
        module's own.
    dense
        Names of the layers, when the model is dense layers with ReLU between them and nothing
        else. :func:`fedlib.engine.local.local_sgd` then needs no automatic differentiation.

    Attributes
    ----------
    size
        Columns ``P`` of a row.
    trained
        How many of them are trained parameters; they come first.
    shapes, buffers
        Shape of each trained parameter and of each buffer in the row, by name.
    normalises
        Whether a layer uses the statistics of its batch, which must then hold no padding.
    drops
        Whether a layer drops out.

    Raises
    ------
    FedlibError
        For what cannot be a row: lazy, complex, sparse or scripted modules and the like.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward | None = None,
        initialise: Callable[..., np.ndarray] | None = None,
        dense: Sequence[str] = (),
    ) -> None:
        check_module(module, initialise is not None)
        self.dense, self._forward, self._initialise = tuple(dense), forward, initialise
        try:
            self.module = copy.deepcopy(module)
        except Exception as error:
            raise FedlibError(f"The module cannot be copied: {error}") from error
        if not any(p.is_meta for p in module.parameters()):
            self.module.cpu()
        tensors = _tensors(self.module)
        trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        counted = {n for n, _ in self.module.named_buffers() if n.endswith("num_batches_tracked")}
        moving = {n for n, b in self.module.named_buffers() if b.is_floating_point()}
        self.shapes = {name: t.shape for name, t in tensors.items() if name in trained}
        self.buffers = {name: t.shape for name, t in tensors.items() if name in moving}
        self.trained = sum(shape.numel() for shape in self.shapes.values())
        self.size = self.trained + sum(shape.numel() for shape in self.buffers.values())
        self.normalises = any(_uses_batch(layer) for layer in self.module.modules())
        self.drops = any(type(layer) in DROPOUT and layer.p for layer in self.module.modules())
        self._constants = {n: t for n, t in tensors.items() if n not in trained | moving | counted}
        if forward is not None and (self.buffers or self._constants or self.drops):
            raise FedlibError(
                "A forward pass of your own gets trained parameters only. Leave it out for a "
                "module with buffers, frozen parameters or dropout."
            )
        self._dtype = next(t.dtype for name, t in tensors.items() if name in trained)
        self.fits: dict[Hashable, int] = {}  # by device and shapes: copies in a step
        self._maps: dict[str, bool] = {}  # by kind of device: can vmap map it?
        self._placed: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        self._own = _Own(self.module)

    # --- rows ------------------------------------------------------------------------------------

    def init(self, rng: np.random.Generator, copies: int = 1) -> Tensor:
        """Draw an initial row, float64 ``[copies, P]``; all copies are equal."""
        if self._initialise is None:
            return self.to_row(self._drawn(rng)).expand(copies, -1).clone()
        parts = []
        fan_in = 1
        for name, shape in self.shapes.items():
            if len(shape) > 1:
                fan_in = shape[1:].numel()
            parts.append(np.asarray(self._initialise(name, shape, fan_in, rng)).ravel())
        tensors = _tensors(self.module)
        parts += [tensors[name].double().numpy().ravel() for name in self.buffers]
        row = torch.from_numpy(np.concatenate(parts))
        return row.expand(copies, -1).clone()

    def to_row(self, module: nn.Module) -> Tensor:
        """Return the values of a module of the same kind as a row, float64 ``[1, P]``."""
        tensors = _tensors(module)
        for name, shape in (self.shapes | self.buffers).items():
            if name not in tensors or tensors[name].shape != shape:
                there = list(tensors[name].shape) if name in tensors else "not there"
                raise FedlibError(
                    f"'{name}' is {there}; this model's is {list(shape)}. A row holds a module of "
                    "the same kind."
                )
        parts = [tensors[name].detach().flatten() for name in (*self.shapes, *self.buffers)]
        return torch.cat([part.to("cpu", torch.float64) for part in parts]).unsqueeze(0)

    def to_module(self, row: Tensor) -> nn.Module:
        """Return a module of its own with the values of one row, ``[P]`` or ``[1, P]``."""
        if not isinstance(row, Tensor):
            raise FedlibError(f"A row is a tensor, [{self.size}]; got {type(row).__name__}.")
        if row.numel() != self.size:
            raise FedlibError(
                f"The row is {list(row.shape)}. Expected one row, [{self.size}] or [1, "
                f"{self.size}]; of several take one: state.x[0]."
            )
        empty = any(p.is_meta for p in self.module.parameters())
        module = self._drawn(stream(0, "init")) if empty else copy.deepcopy(self.module)
        module.to(row.device, row.dtype)
        tensors = _tensors(module)
        with torch.no_grad():
            for name, view in self.views(row.reshape(1, -1)).items():
                tensors[name].copy_(view[0])
        return module

    def digest(self) -> str:
        """Return a SHA-256 of the architecture, its code, and of what all copies share."""
        shared = [value for _, value in sorted(self._constants.items())]
        code = [own_code(kind) for kind in dict.fromkeys(map(type, self.module.modules()))]
        return digest(repr(self.module), {**self.shapes, **self.buffers}, shared, code)

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return the type of a row that meets features ``x``: theirs, or for integers its own."""
        return x.dtype if x.is_floating_point() else self._dtype

    def views(self, theta: Tensor) -> dict[str, Tensor]:
        """Split ``theta[copies, P]`` into named views ``[copies, *shape]`` of the same memory."""
        out, start = {}, 0
        for name, shape in itertools.chain(self.shapes.items(), self.buffers.items()):
            stop = start + shape.numel()
            out[name] = theta[:, start:stop].unflatten(1, shape) if shape else theta[:, start]
            start = stop
        return out

    # --- the forward pass ------------------------------------------------------------------------

    def apply(
        self,
        theta: Tensor | dict[str, Tensor],
        x: Tensor,
        train: bool = False,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Run every copy on its batch.

        Parameters
        ----------
        theta
            ``[copies, P]``, or the named views of it.
        x
            ``[copies, B, ...]``.
        train
            Run the module in training mode: BatchNorm takes the statistics of the batch, dropout
            drops. New running statistics are written into named views; a matrix stays as it is.
        keys
            ``[copies]`` integers from which dropout draws in training; equal keys, equal draws.

        Returns
        -------
        Tensor
            ``[copies, B, K]``.
        """
        check_fits(self, theta, x)
        views = theta if isinstance(theta, dict) else self.views(theta)
        if self._forward is not None:
            return self._forward(views, x)
        if x.device.type not in self._maps:
            with _trying:  # no two threads at once: warnings and torch's generator are everybody's
                self._try(x[0])
        out, moved = self._call(views, x, train, keys, self._maps[x.device.type])
        if train and isinstance(theta, dict):
            for name, value in moved.items():
                theta[name].data.copy_(value.detach())  # unseen by autograd, which owns the rest
        return out

    def outputs(self, x: Tensor) -> int:
        """Return the number of outputs ``K`` for features ``x[n, ...]``, having tried it on two.

        Of whole numbers, such as those of words, it tries the smallest and the largest.

        Raises
        ------
        FedlibError
            When the module cannot read the features, returns another shape than ``[B, K]``, draws
            from PyTorch's global generator, or changes what all copies share.
        """
        tried = [0, -1]
        if not x.is_floating_point():
            rows = x.reshape(len(x), -1)
            tried = [int(rows.amin(1).argmin()), int(rows.amax(1).argmax())]
        x = x[tried].cpu()
        row = torch.zeros(1, self.size, dtype=self.dtype(x))
        try:
            with torch.no_grad():
                out = self.apply(row, x.unsqueeze(0))
        except FedlibError:
            raise
        except Exception as error:
            hint = ""
            if not x.is_floating_point():
                hint = (
                    f". Here are whole numbers, {int(x.min())} to {int(x.max())}. Words count from "
                    "0, up to those that the model knows; real features are x.astype('float32')."
                )
            raise FedlibError(
                f"Trying the model on features of shape {[*x.shape[1:]]}, type {x.dtype}, failed: "
                f"{(str(error).splitlines() or [type(error).__name__])[0]}{hint}"
            ) from error
        if out.shape[:2] != (1, 2) or out.dim() != 3:
            raise FedlibError(
                f"For two samples the model returns shape {[*out.shape[1:]]}; expected [2, K], one "
                "row of K outputs a sample. A single output is a column: [2, 1]."
            )
        return out.shape[2]

    def _call(
        self,
        views: dict[str, Tensor],
        x: Tensor,
        train: bool,
        keys: Tensor | None,
        mapped: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs ``[copies, B, K]`` and buffers after the pass, ``[copies, *shape]``."""
        values = dict(views)
        for name in self.buffers:  # the pass may write into them
            values[name] = views[name].detach().clone(memory_format=torch.contiguous_format)
        keys = torch.zeros(len(x), dtype=torch.long, device=x.device) if keys is None else keys
        self._own.body.train(train)
        alone = functools.partial(self._alone, self._shared(next(iter(values.values()))))
        if mapped:
            return vmap(alone)(values, x, keys)
        each = [
            alone({name: value[c] for name, value in values.items()}, x[c], keys[c])
            for c in range(len(x))
        ]
        outs, moved = zip(*each, strict=True)
        return torch.stack(outs), {n: torch.stack([m[n] for m in moved]) for n in self.buffers}

    def _alone(
        self, shared: dict[str, Tensor], values: dict[str, Tensor], x: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one copy."""
        self._own.key, self._own.calls = key, 0
        values = {**shared, **values}
        try:
            out = functional_call(self._own.body, values, (x,))
        except ValueError as error:
            if not self.normalises or "more than 1 value" not in str(error):
                raise
            raise FedlibError(
                "BatchNorm met a minibatch of one sample, which has no variance. Use a larger "
                "batch_size, or GroupNorm."
            ) from error
        return out, {name: values[name] for name in self.buffers}

    def _shared(self, like: Tensor) -> dict[str, Tensor]:
        """Return frozen parameters and integer buffers where the rows are."""
        place = (like.device, like.dtype)
        if place not in self._placed:
            self._placed[place] = {
                name: t.detach().to(like.device, like.dtype if t.is_floating_point() else t.dtype)
                for name, t in self._constants.items()
            }
        return self._placed[place]

    # --- what is done once -----------------------------------------------------------------------

    def _drawn(self, rng: np.random.Generator) -> nn.Module:
        """Return a copy of the module, drawn anew without moving torch's own generator."""
        module = copy.deepcopy(self.module)
        if any(p.is_meta for p in module.parameters()):
            module.to_empty(device="cpu")

        def draw(layer: nn.Module) -> None:
            rule = _rule(layer)
            if rule and any(p.requires_grad for p in layer.parameters()):
                rule()

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
            return module.apply(draw)

    def _try(self, x: Tensor) -> None:
        """Try the module on two samples of ``x[B, ...]``, and see whether vmap can map it.

        vmap must give what a loop gives: outputs, gradients and buffers, in training and after.
        """
        rng = stream(0, "try")
        x = x[[0, -1]].detach()
        theta = torch.cat([self.init(rng) for _ in range(2)])
        theta[:, : self.trained] += 0.1 * torch.from_numpy(rng.standard_normal(self.trained))
        theta = theta.to(self.dtype(x))
        check_pass(self, theta, x.cpu())
        theta, pair = theta.to(x.device), torch.stack([x, x.flip(0)])
        keys = torch.tensor([1, 2], device=x.device)

        def run(mapped: bool) -> list[Tensor]:
            views = self.views(theta)
            leaves = {name: views[name].detach().requires_grad_() for name in self.shapes}
            with torch.enable_grad():
                out, moved = self._call(views | leaves, pair, True, keys, mapped)
                slopes = torch.autograd.grad(
                    out.square().sum(), list(leaves.values()), materialize_grads=True
                )
            after, _ = self._call(views, pair, False, keys, mapped)
            return [out.detach(), after, *slopes, *moved.values()]

        expected = run(mapped=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # vmap warns where it loops inside an operation
                found = run(mapped=True)
        except Exception:  # whatever vmap cannot do, the loop can
            self._maps[x.device.type] = False
            return
        self._maps[x.device.type] = all(
            (a - b).norm() <= 1e-3 * b.norm() + 1e-6 for a, b in zip(found, expected, strict=True)
        )


class _Own(threading.local):
    """A thread's own working copy of a module: a call lends its values to it.

    The copy shares the module's tensors, has our dropout, and does not count batches.
    """

    key: Tensor  # what dropout draws from
    calls: int  # how many layers have drawn

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        tensors = itertools.chain(module.parameters(), module.buffers())
        self.body = copy.deepcopy(module, {id(t): t for t in tensors})
        for layer in self.body.modules():
            if isinstance(layer, _NormBase):
                layer.num_batches_tracked = None
            elif isinstance(layer, _DropoutNd) and type(layer) in DROPOUT:
                layer.forward = functools.partial(self.drop, layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)  # a copy of a model makes its own anew

    def drop(self, layer: _DropoutNd, x: Tensor) -> Tensor:
        """Drop entries, or whole channels ``x[B, C, ...]``, with numbers from the copy's key."""
        if not layer.training or layer.p == 0:
            return x
        whole = type(layer) is not nn.Dropout
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if whole else x.shape
        self.calls += 1
        keep = uniform(self.key, self.calls, shape, x.device) >= layer.p
        return x * keep * (1 / (1 - layer.p) if layer.p < 1 else 0)


def uniform(key: Tensor, number: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return float64 draws from [0, 1), a function of key and call number alone (SplitMix64).

    Parameters
    ----------
    key
        A 64-bit integer without axes; may be mapped over by vmap.
    number
        The how manieth draw from this key it is.
    shape, device
        Of the result.
    """
    places = torch.arange(1, 1 + int(np.prod(shape)), device=device)
    bits = scrambled(scrambled(key + number * GOLDEN % 2**62) + places * GOLDEN)
    return (((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53).view(tuple(shape))


def check_fits(model: Model, theta: Tensor | dict[str, Tensor], x: Tensor) -> None:
    """Refuse rows of another model, and features that are not a batch for each of them."""
    if isinstance(theta, dict):
        return
    if not isinstance(x, Tensor) or x.dim() < 2:
        came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise FedlibError(f"x is {came}. Expected a batch for each copy, [copies, B, ...].")
    check_rows(theta, model.size, model.dtype(x) if x.is_floating_point() else None)
    if len(x) != len(theta):
        raise FedlibError(f"x has batches for {len(x)} copies, theta has {len(theta)}.")


def check_module(module: nn.Module, has_rule: bool) -> None:
    """Refuse a module that cannot be a row, saying what to do instead."""
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise FedlibError(f"Model takes a plain torch.nn.Module; got {type(module).__name__}.")
    named = [*module.named_parameters(), *module.named_buffers()]
    if any(is_lazy(t) for _, t in named):
        raise FedlibError("The module has lazy layers. Run it once on a sample to give them sizes.")
    if wrong := [name for name, t in named if t.is_complex()]:
        raise FedlibError(f"Complex values ({wrong[0]}) are not supported. Use two real ones.")
    if len({t.is_meta for _, t in named}) > 1:
        raise FedlibError("Part of the module is on the meta device. Build all of it on the CPU.")
    if not any(p.requires_grad for p in module.parameters()):
        raise FedlibError("The module has no parameter that is trained (requires_grad).")
    for name, layer in module.named_modules():
        label = f"Layer '{name}' ({type(layer).__name__})"
        sides = (layer.parameters(recurse=False), layer.buffers(recurse=False))
        blank = [[t for t in side if t.is_meta] for side in sides]
        frozen = any(not p.requires_grad for p in blank[0])
        if frozen or (blank[1] if has_rule else any(blank) and not _rule(layer)):
            raise FedlibError(
                f"{label} was built on the meta device, and nothing gives it values. Build the "
                "module on the CPU."
            )
        if getattr(layer, "sparse", False):
            raise FedlibError(f"{label} has sparse gradients. Use sparse=False.")
        if getattr(layer, "max_norm", None) is not None:
            raise FedlibError(f"{label} rescales its weights when it reads them. Drop max_norm.")
        if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
            raise FedlibError(
                f"{label} averages over all batches so far, and a row holds no count of them. "
                "Give it a momentum."
            )


def check_pass(model: Model, theta: Tensor, x: Tensor) -> None:
    """Refuse a module whose training pass draws at random, or changes what all copies share."""
    views = {name: view[0].clone() for name, view in model.views(theta.cpu()).items()}
    shared = {name: t.clone() for name, t in model._shared(theta.cpu()).items()}
    working = model._own
    working.body.train()
    working.key, working.calls = torch.tensor(0), 0
    values = {**shared, **views}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        out = functional_call(working.body, values, (x,))
        drawn = not torch.equal(before, torch.get_rng_state())
    if not isinstance(out, Tensor):
        raise FedlibError(f"The module returns a {type(out).__name__}; expected one tensor [B, K].")
    if drawn:
        raise FedlibError(
            "The module draws from PyTorch's global generator in training, so its results could "
            "not be repeated. Use nn.Dropout or nn.Dropout1d to 3d layers (not F.dropout, nor the "
            "dropout= of a recurrent or attention layer), and no other random layer."
        )
    for name, t in model._shared(theta.cpu()).items():
        if not torch.equal(t, values[name]) or not torch.equal(t, shared[name]):
            raise FedlibError(
                f"'{name}' changes in the forward pass, but all copies share it. Only "
                "floating-point buffers may change."
            )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(itertools.chain(module.named_parameters(), module.named_buffers()))


def _rule(layer: nn.Module) -> Callable[[], None] | None:
    rule = getattr(layer, "reset_parameters", None)
    return rule or getattr(layer, "_reset_parameters", None)


def _uses_batch(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) or (
        isinstance(layer, _NormBase) and layer.track_running_stats
    )
