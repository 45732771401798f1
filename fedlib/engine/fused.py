"""A fourth way to convolve many copies on a GPU: their patches are never laid out in memory.

A convolution is a matrix product of the filters with the patches of the images. The other ways
write the patches down, 25 times the images, or launch one convolution a copy. Here each block of
the product gathers its patches itself, in a kernel written with Triton, which comes with PyTorch
for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlib.engine import convolution

PIXELS = 64  # of a block
PROGRAMS = 1024  # wanted at once where few copies would leave the device idle


@triton.jit
def _seen(images, tap, channel, n, pixels, inward, height, width, REACH: tl.constexpr):
    """Gather ``[channels, pixels]`` of one copy: what one tap sees at pixels ``n``."""
    area = height * width
    image, place = n // area, n % area
    row, column = place // width, place % width
    down, right = tap // REACH - REACH // 2, tap % REACH - REACH // 2
    inside = (row + down >= 0) & (row + down < height) & (n < pixels)
    inside &= (column + right >= 0) & (column + right < width)
    at = ((image * inward) * area + place)[None, :] + (channel * area)[:, None]
    real = (channel < inward)[:, None] & inside[None, :]
    return tl.load(images + at + (down * width + right), mask=real, other=0.0)


@triton.jit
def _convolve(
    x, weight, bias, out, batch, inward, outward, height, width, REACH: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    PIXELS: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    m = tl.program_id(2) * OUT + tl.arange(0, OUT)
    area = height * width
    pixels = batch * area
    images, filters = x + copy * inward * pixels, weight + copy * outward * inward * REACH * REACH
    total = tl.zeros((OUT, PIXELS), tl.float32)
    for first in range(0, inward, IN):
        channel = first + tl.arange(0, IN)
        real = (m < outward)[:, None] & (channel < inward)[None, :]
        for tap in range(REACH * REACH):
            at = (tap * outward + m)[:, None] * inward + channel[None, :]
            part = tl.load(filters + at, mask=real, other=0.0)
            seen = _seen(images, tap, channel, n, pixels, inward, height, width, REACH)
            total = tl.dot(part, seen, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + copy * outward + m, mask=m < outward, other=0.0)[:, None]
    at = (((n // area) * outward) * area + n % area)[None, :] + (m * area)[:, None]
    real = (m < outward)[:, None] & (n < pixels)[None, :]
    tl.store(out + copy * outward * pixels + at, total, mask=real)


@triton.jit
def _slopes(
    x, slope, out, batch, inward, outward, height, width, parts, REACH: tl.constexpr,
    PRECISION: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Sum over one part of the pixels by how much one tap of a copy's filters is to move."""
    tap, across = tl.program_id(0) % (REACH * REACH), tl.program_id(0) // (REACH * REACH)
    copy, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    blocks, area = tl.cdiv(inward, IN), height * width
    channel = (across % blocks) * IN + tl.arange(0, IN)
    m = (across // blocks) * OUT + tl.arange(0, OUT)
    pixels = batch * area
    images, slopes = x + copy * inward * pixels, slope + copy * outward * pixels
    total = tl.zeros((OUT, IN), tl.float32)
    for start in range(part * PIXELS, pixels, parts * PIXELS):
        n = start + tl.arange(0, PIXELS)
        at = (((n // area) * outward) * area + n % area)[None, :] + (m * area)[:, None]
        real = (m < outward)[:, None] & (n < pixels)[None, :]
        due = tl.load(slopes + at, mask=real, other=0.0)
        seen = _seen(images, tap, channel, n, pixels, inward, height, width, REACH)
        total = tl.dot(due, tl.trans(seen), total, input_precision=PRECISION)
    which = (part * tl.num_programs(1) + copy) * REACH * REACH + tap
    at = (which * outward + m)[:, None] * inward + channel[None, :]
    tl.store(out + at, total, mask=(m < outward)[:, None] & (channel < inward)[None, :])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return _launch(x, weight, bias.contiguous())

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slope = slope.contiguous()
        back = None
        if ctx.needs_input_grad[0]:  # the same, with the filters turned round
            back = _launch(slope, weight.flip(-1, -2).transpose(1, 2).contiguous(), None)
        return back, _filter_slopes(x, slope, weight.shape), slope.sum((1, 3, 4))


def _options(inward: int, outward: int) -> dict[str, Any]:
    exact = not torch.backends.cuda.matmul.allow_tf32
    wide = [min(64, max(16, triton.next_power_of_2(n))) for n in (inward, outward)]
    return dict(PRECISION="ieee" if exact else "tf32", IN=wide[0], OUT=wide[1], PIXELS=PIXELS)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (copies, batch, inward, height, width), outward = x.shape, weight.shape[1]
    out, options = x.new_empty(copies, batch, outward, height, width), _options(inward, outward)
    grid = (triton.cdiv(batch * height * width, PIXELS), copies,
            triton.cdiv(outward, options["OUT"]))  # fmt: skip
    by_tap = weight.flatten(3).permute(0, 3, 1, 2).contiguous()  # [copies, k k, out, in]
    _convolve[grid](
        x, by_tap, x if bias is None else bias, out, batch, inward, outward, height, width,
        REACH=weight.shape[-1], BIASED=bias is not None, **options,
    )  # fmt: skip
    return out


def _filter_slopes(x: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    (copies, batch, inward, height, width), (_, outward, *_, reach) = x.shape, shape
    options = _options(inward, outward)
    blocks = reach**2 * triton.cdiv(inward, options["IN"]) * triton.cdiv(outward, options["OUT"])
    most = triton.cdiv(batch * height * width, PIXELS)
    parts = min(most, triton.cdiv(PROGRAMS, blocks * copies))
    out = x.new_empty(parts, copies, reach**2, outward, inward)
    _slopes[blocks, copies, parts](
        x, slope, out, batch, inward, outward, height, width, parts, REACH=reach, **options
    )
    return out.sum(0).permute(0, 2, 3, 1).unflatten(3, (reach, reach))  # in one order, so the same


def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve each copy's images with its own filters: see :func:`convolution.convolve`."""
    if x.dtype != torch.float32:
        raise RuntimeError(f"Only float32; got {x.dtype}.")
    return _Fused.apply(x, weight, bias)


convolution.WAYS["fused"] = fused  # by this import; whoever computes on a GPU asks for it
