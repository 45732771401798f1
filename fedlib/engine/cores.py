"""Pieces of work side by side, each on one core. Who computes a piece never changes a number."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import torch
from threadpoolctl import threadpool_limits

_here = threading.local()  # whether this thread is at a piece


def side_by_side(work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
    """Call ``work`` once with each piece, on as many cores as torch was given threads.

    Within a piece PyTorch uses one core. An error in one piece ends all: those at work are
    waited for, no further one is begun, and the error is raised.
    """
    if getattr(_here, "helps", False):  # of a piece: all cores are taken
        for piece in pieces:
            work(piece)
        return
    shared = iter(pieces)  # whoever is free takes the next one

    def help_out() -> None:
        _here.helps = True
        try:
            for rows in shared:
                work(rows)
        finally:
            list(shared)  # after an error or Ctrl-C there is nothing left to take
            _here.helps = False

    # this thread takes pieces as well, so one helper fewer than there are cores
    with _one_core_each() as cores:
        helpers = min(cores, len(pieces)) - 1
        others = [_pool(cores, os.getpid()).submit(help_out) for _ in range(helpers)]
        try:
            help_out()
        finally:
            wait(others)
        for other in others:
            other.result()


def each(work: Callable[[Any], Any], pieces: Sequence[Any], device: torch.device) -> list[Any]:
    """Return ``work(piece)`` of each piece, without gradients; on a CPU they are made side by side.

    How the pieces are cut must not depend on the number of cores: then no result does.
    """
    results: list[Any] = [None] * len(pieces)

    @torch.no_grad()  # every thread has a switch of its own
    def keep(i: int) -> None:
        results[i] = work(pieces[i])

    if device.type == "cpu":
        side_by_side(keep, range(len(pieces)))
    else:
        for i in range(len(pieces)):
            keep(i)
    return results


@contextmanager
def steady() -> Iterator[None]:
    """Compute everything on one core, but for what is computed side by side.

    A sum or a product that is cut among threads is rounded by the cut, which depends on their
    number. That goes for torch and for NumPy's products.
    """
    with _one_core_each(), threadpool_limits(1, "blas"):
        yield


_held: int | None = None  # cores, while torch is told to use one


@contextmanager
def _one_core_each() -> Iterator[int]:
    """Switch off torch's own threads, and say how many it had.

    Two threads inside every operation wait for each other at the end of each; when something
    else needs one of the cores, they wait long.
    """
    global _held
    before, threads = _held, torch.get_num_threads()
    _held = before or threads
    torch.set_num_threads(1)
    try:
        yield _held
    finally:
        _held = before
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=1)
def _pool(cores: int, process: int) -> ThreadPoolExecutor:
    """Start the threads beside this one, once; a forked process needs its own."""
    pool = ThreadPoolExecutor(cores - 1, "local_sgd", torch.set_num_threads, (1,))
    started = Barrier(cores - 1)
    list(pool.map(lambda _: started.wait(), range(cores - 1)))
    return pool
