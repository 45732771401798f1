"""Work recorded once on a GPU and replayed: hundreds of small launches become one.

A recording reads and writes tensors that stay in place. New numbers are copied into them, the
recorded launches run again, and the result is copied out. It is the same work on the same device;
only the host has nothing left to do in between.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Work = Callable[..., Tensor]
PLAIN_CALLS = 2  # plain calls, in which libraries settle, before a third one is recorded
MOST_RECORDINGS = 16  # recordings that a task keeps; each holds memory
BROKEN: list[str] = []  # why recording has failed here; then no further one is tried


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
        types = {tensor.dtype for tensor in inputs}
        self._alike = [[i for i, t in enumerate(inputs) if t.dtype == kind] for kind in types]
        self._graph = None
        if inputs[0].is_cuda:
            self._graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.graph(self._graph, pool=_pool()):
                self._output = work(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return what ``work`` returns for other numbers in tensors of the same shapes."""
        for which in self._alike:  # one launch for each type of number
            torch._foreach_copy_([self._inputs[i] for i in which], [inputs[i] for i in which])
        if self._graph is None:  # only CUDA records; elsewhere the work itself is done again
            return self._work(*self._inputs)
        self._graph.replay()
        return self._output.clone()

    @property
    def replays(self) -> bool:
        """Whether launches were recorded, which needs CUDA."""
        return self._graph is not None


def _pool() -> Any:
    """Return the memory that all recordings share: they run in turn, and results are copied."""
    return _keeper().pool()


@functools.cache
def _keeper() -> torch.cuda.CUDAGraph:
    """Return an empty recording that is never dropped: with its last one, the memory goes, too."""
    keeper = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(), torch.cuda.graph(keeper):
        warnings.simplefilter("ignore")  # that it is empty
    return keeper


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from clearing away an old recording while a new one is being made."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


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
    key = (key, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
    entry = kept.setdefault(key, 0)
    if isinstance(entry, Recording):
        return entry(*inputs)
    if entry < PLAIN_CALLS:
        kept[key] += 1
    elif sum(isinstance(v, Recording) for v in kept.values()) < MOST_RECORDINGS and not BROKEN:
        try:
            kept[key] = Recording(work, inputs)
            return kept[key](*inputs)
        except RuntimeError as error:
            BROKEN.append(str(error))
            warnings.warn(
                f"Work cannot be recorded here, and runs launch by launch: {error}", stacklevel=2
            )
    return work(*inputs)
