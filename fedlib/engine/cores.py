"""Pieces of work side by side, each on one core. Who computes a piece never changes a number."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import torch


def side_by_side(work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
    """Call ``work`` once with each piece, on as many cores as ``torch.get_num_threads()`` says.

    Within a piece PyTorch uses one core. An error in one piece ends all: those at work are
    waited for, no further one is begun, and the error is raised.
    """
    shared = iter(pieces)  # whoever is free takes the next one

    def help_out() -> None:
        try:
            for rows in shared:
                work(rows)
        finally:
            list(shared)  # after an error or Ctrl-C there is nothing left to take

    with _one_core_each() as cores:
        helpers = min(cores, len(pieces)) - 1
        others = [_pool(cores, os.getpid()).submit(help_out) for _ in range(helpers)]
        try:
            help_out()
        finally:
            wait(others)
        for other in others:
            other.result()


@contextmanager
def _one_core_each() -> Iterator[int]:
    """Switch off torch's own threads, and say how many it had.

    Two threads inside every operation wait for each other at the end of each; when something
    else needs one of the cores, they wait long.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield cores
    finally:
        torch.set_num_threads(cores)


@functools.lru_cache(maxsize=1)
def _pool(cores: int, process: int) -> ThreadPoolExecutor:
    """Start the threads beside this one, once; a forked process needs its own."""
    pool = ThreadPoolExecutor(cores - 1, "local_sgd", torch.set_num_threads, (1,))
    started = Barrier(cores - 1)
    list(pool.map(lambda _: started.wait(), range(cores - 1)))
    return pool
