"""What some work costs, counted and not timed: operations, bytes, launches; and what fits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedlib.errors import FedlibError

PICKING = ("index_select", "index", "gather", "embedding")
"""Operations that read as much as they write, however large the table they read from."""

SMALL = 2**29  # bytes about which nobody is asked: asking a GPU takes its time
SPARE = 0.1  # of a device's memory that is left alone: libraries, fragments


@dataclass(frozen=True)
class Cost:
    """What was counted.

    Attributes
    ----------
    flops
        Floating-point operations of matrix products and convolutions.
    moved
        Bytes that all operations read and write, each by itself: what moves when no operation is
        fused with its neighbour and nothing stays in a cache.
    made
        Bytes of new tensors: a bound on the memory that the work needs beside what it is given.
    launches
        Operations that do something, which views do not.
    """

    flops: int
    moved: int
    made: int
    launches: int


def count(work: Callable[[], Any]) -> Cost:
    """Do some work and count what it costs."""
    flops = FlopCounterMode(display=False, custom_mapping=COUNTED_HERE)
    with flops, _Traffic() as traffic:
        work()
    return Cost(flops.get_total_flops(), traffic.moved, traffic.made, traffic.launches)


def _in_place(added: Any, a: Any, b: Any, **_: Any) -> int:
    """Count a batched product that is added in place, by shapes."""
    return 2 * a[0] * a[1] * a[2] * b[2]


def _backward(slope: Any, x: Any, weight: Any, *_: Any, output_mask: Any = None, **__: Any) -> int:
    """Count a convolution's gradients, each as much as the convolution, whatever its groups."""
    due = output_mask or _[-1]
    return 2 * math.prod(slope) * math.prod(weight[1:]) * sum(due[:2])


COUNTED_HERE = {torch.ops.aten.baddbmm_: _in_place, torch.ops.aten.convolution_backward: _backward}
"""Operations that PyTorch does not count, or counts too high."""


class _Traffic(TorchDispatchMode):
    """Sees every operation that reaches a device."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.made = self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        storages = {leaf.untyped_storage()._cdata for leaf in inputs}
        new = [leaf for leaf in outputs if leaf.untyped_storage()._cdata not in storages]
        if new or func._schema.is_mutable:
            self.launches += 1
            self.made += _bytes(new)
            picks = func._schema.name.split("::")[1] in PICKING
            self.moved += _bytes(outputs) + _bytes(outputs if picks else inputs)
        return out


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def room(device: torch.device) -> int:
    """Return how many bytes may still be used on a device; on a CPU, all memory there is."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved - SPARE * total)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows does not say
        return 2**62


def check_room(copies: int, size: int, times: int, like: Tensor) -> None:
    """Refuse to hold copies of a model that no memory has room for, before trying.

    Parameters
    ----------
    copies, size
        ``C`` and ``P``.
    times
        How many matrices ``[C, P]`` are needed at once.
    like
        A tensor of their type, on their device.

    Raises
    ------
    FedlibError
        Saying how many copies fit.
    """
    each = times * size * like.element_size()
    if copies * each > SMALL and copies * each > (free := room(like.device)):
        raise FedlibError(
            f"{copies:,} copies of {size:,} parameters need {copies * each / 1e9:.1f} GB, and "
            f"{like.device.type} has room for {free / 1e9:.1f} GB: at most {free // each:,} copies "
            "at once. Take fewer clients a round, fewer seeds or settings side by side, or a "
            "smaller model."
        )
