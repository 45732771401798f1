"""Convolutions of many copies on a GPU: three ways, and the fastest is found by trying."""

from __future__ import annotations

import time
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.nn import functional as F


def unfolded(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Lay out the patches of each image as columns, and multiply them by their copy's filters."""
    copies, batch, _, height, width = x.shape
    reach = weight.shape[-1]
    patches = F.unfold(x.flatten(0, 1), reach, padding=reach // 2)  # [copies B, in k k, H W]
    filters = weight.flatten(2).repeat_interleave(batch, 0)
    h = torch.baddbmm(bias.repeat_interleave(batch, 0).unsqueeze(2), filters, patches)
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
chosen: dict[Hashable, str] = {}  # by device, shapes and type: what was fastest here


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
    key = (str(x.device), x.shape, weight.shape, x.dtype, weight.requires_grad)
    if key not in chosen:
        if not x.is_cuda or torch.cuda.is_current_stream_capturing():
            return unfolded(x, weight, bias)
        chosen[key] = fastest(x, weight, bias)
    return WAYS[chosen[key]](x, weight, bias)


def told() -> dict[str, str]:
    """Return what was chosen in words: for images and filters of some shapes, which way."""
    return {f"{tuple(key[1])} * {tuple(key[2])}": way for key, way in chosen.items()}


def fastest(x: Tensor, weight: Tensor, bias: Tensor, repeats: int = 3) -> str:
    """Return the way that takes the least time here, backward pass included where one is due."""
    seconds = {}
    for name, way in WAYS.items():
        try:
            once = [_time(way, x, weight, bias) for _ in range(1 + repeats)]
        except torch.OutOfMemoryError:
            continue
        seconds[name] = min(once[1:])
    return min(seconds, key=seconds.__getitem__)


def _time(way, x: Tensor, weight: Tensor, bias: Tensor) -> float:
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in (x, weight, bias)]
    _wait(x)
    began = time.perf_counter()
    out = way(*leaves)
    if due := [leaf for leaf in leaves if leaf.requires_grad]:
        torch.autograd.grad(out.sum(), due)
    _wait(x)
    return time.perf_counter() - began


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
