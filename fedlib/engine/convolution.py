"""Convolutions of many copies on a GPU: three ways, and the fastest is found by trying."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlib.engine.recording import BROKEN, Recording


def unfolded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Lay out the patches of each image as columns, and multiply them by their copy's filters."""
    copies, batch, inward, height, width = x.shape
    reach = weight.shape[-1]
    padded = F.pad(x.flatten(0, 1), [reach // 2] * 4)
    patches = padded.unfold(2, reach, 1).unfold(3, reach, 1)  # [copies B, in, H, W, k, k]
    columns = patches.permute(0, 1, 4, 5, 2, 3).reshape(
        copies * batch, inward * reach**2, height * width
    )
    filters = weight.flatten(2).repeat_interleave(batch, 0)
    h = torch.baddbmm(bias.repeat_interleave(batch, 0).unsqueeze(2), filters, columns)
    return h.view(copies, batch, -1, height, width)


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Put the copies' channels side by side: one convolution in as many groups as copies."""
    copies, reach = len(x), weight.shape[-1]
    side = x.transpose(0, 1).flatten(1, 2)  # [B, copies channels, H, W]
    h = F.conv2d(side, weight.flatten(0, 1), bias.flatten(), padding=reach // 2, groups=copies)
    return h.unflatten(1, (copies, -1)).transpose(0, 1)


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve copy after copy: best for few copies with many samples."""
    each = zip(x, weight, bias, strict=True)
    return torch.stack([F.conv2d(a, w, b, padding=weight.shape[-1] // 2) for a, w, b in each])


WAYS = {"unfolded": unfolded, "grouped": grouped, "one by one": one_by_one}
chosen: dict[tuple[Any, ...], str] = {}  # by device, shapes and type: what was fastest here


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve every copy's images with its own filters, the image keeping its size.

    Parameters
    ----------
    x
        ``[copies, B, in, H, W]``.
    weight
        ``[copies, out, in, k, k]`` with odd ``k``.
    bias
        ``[copies, out]``.

    Returns
    -------
    Tensor
        ``[copies, B, out, H, W]``. On a GPU the first call for some shapes measures all ways and
        remembers the fastest in ``chosen``; they agree up to rounding.
    """
    key = (str(x.device), x.shape, weight.shape, x.dtype, x.requires_grad, weight.requires_grad)
    if key not in chosen:
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return unfolded(x, weight, bias)
        chosen[key] = fastest(x, weight, bias)
    return WAYS[chosen[key]](x, weight, bias)


def choices() -> dict[str, str]:
    """Return what was chosen in words: for images and filters of some shapes, which way."""
    words = {}
    for (_, images, filters, dtype, *slopes), way in chosen.items():
        due = "with gradients" if any(slopes) else "alone"
        words[f"{tuple(images)} * {tuple(filters)}, {str(dtype)[6:]}, {due}"] = way
    return words


def fastest(x: Tensor, weight: Tensor, bias: Tensor, repeats: int = 5) -> str:
    """Return the way that takes the least time here, backward pass included where one is due.

    On a GPU the ways are recorded and replayed, as they will be in training. A way that this
    device cannot do, or has no room for, is left out.
    """
    seconds = {}
    for name, way in WAYS.items():
        try:
            seconds[name] = _time(way, (x, weight, bias), repeats)
        except RuntimeError:
            continue
    return min(seconds, key=seconds.__getitem__) if seconds else "one by one"


def _time(way: Callable[..., Tensor], given: tuple[Tensor, ...], repeats: int) -> float:
    """Return the least of some times; the first two are for warming up."""
    due = [i for i, tensor in enumerate(given) if tensor.requires_grad]

    def work(*inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(i in due) for i, t in enumerate(inputs)]
            out = way(*leaves)
            if not due:
                return out
            slopes = torch.autograd.grad(out, [leaves[i] for i in due], torch.ones_like(out))
            return slopes[-1]

    plain = [tensor.detach() for tensor in given]
    for _ in range(2):
        work(*plain)
    again = Recording(work, plain) if given[0].is_cuda and not BROKEN else work
    times = []
    for _ in range(repeats):
        _wait(given[0])
        began = time.perf_counter()
        again(*plain)
        _wait(given[0])
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
