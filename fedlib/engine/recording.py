"""Work recorded once on a GPU and replayed: hundreds of small launches become one.

A recording reads and writes tensors that stay in place. New numbers are copied into them, the
recorded launches run again, and the result is copied out. It is the same work on the same device;
only the host has nothing left to do in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., Tensor]
BEFORE = 2  # plain calls, in which libraries settle, before a third one is recorded
MOST = 16  # recordings that a task keeps; each holds memory


class Recording:
    """Some work, recorded on tensors of its own.

    Parameters
    ----------
    work
        A function of tensors alone that returns a tensor, and reads no number of theirs on the
        host.
    inputs
        Tensors of the right shapes and types, all on one device.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self._work, self._inputs = work, [tensor.clone() for tensor in inputs]
        self._graph = None
        if inputs[0].is_cuda:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = work(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what ``work`` returns for other numbers in tensors of the same shapes."""
        for held, new in zip(self._inputs, inputs, strict=True):
            held.copy_(new)
        if self._graph is None:  # only CUDA records; elsewhere the work itself is done again
            return self._work(*self._inputs)
        self._graph.replay()
        return self._output.clone()


def replayed(kept: dict[Hashable, Any], key: Hashable, work: Work, inputs: Sequence[Tensor]) -> Any:
    """Do some work, from the third time on by replaying it.

    Parameters
    ----------
    kept
        What lasts as long as the work's meaning does; recordings are kept in it.
    key
        Everything but the inputs' numbers on which the work depends.
    work, inputs
        See :class:`Recording`.
    """
    shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
    found = kept.setdefault((key, shapes), 0)
    if found == BEFORE and len(kept) <= MOST:
        try:
            kept[key, shapes] = found = Recording(work, inputs)
        except RuntimeError as error:
            warnings.warn(
                f"This work cannot be recorded, and runs launch by launch: {error}", stacklevel=2
            )
            kept[key, shapes] = -1
    if isinstance(found, Recording):
        return found(*inputs)
    if 0 <= found < BEFORE:
        kept[key, shapes] += 1
    return work(*inputs)
