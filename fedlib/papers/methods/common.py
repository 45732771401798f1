"""What the methods share: local steps by a rule, and what clients keep between their visits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.cost import check_room
from fedlib.engine.draws import Array
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Averaging, Drawn, read

Rate = float | tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Visits(Drawn[Array]):
    """What chance decides in a round, for methods that know their clients again.

    Attributes
    ----------
    clients
        Who takes part, ``[R, S]``. Those of weight zero fill up a row and do not.
    """

    clients: Array


def visits(algorithm: Averaging, state: fedavg.State, task: Task) -> Iterator[Visits[np.ndarray]]:
    """Draw the rounds after a state, and refuse those in which a client comes twice."""
    cursor = state.cursor
    for t in itertools.count(state.t):
        clients, q = algorithm.participation.cohort_arrays(state.seeds, t)
        check_once(algorithm, clients, q, t)
        drawn = read(algorithm, state.seeds, task, clients, q, cursor)
        cursor = drawn.cursor
        yield Visits(**vars(drawn), clients=clients)


def check_once(algorithm: Averaging, clients: np.ndarray, q: np.ndarray, t: int) -> None:
    """Refuse a client that comes twice: it keeps one thing, and both visits would change it."""
    for row, weight in zip(clients, q, strict=True):
        numbers, times = np.unique(row[weight > 0], return_counts=True)
        if (times > 1).any():
            raise FedlibError(
                f"Client {numbers[times > 1][0]} comes twice in round {t}, and "
                f"{type(algorithm).__name__} keeps one thing for each client. Take a process that "
                "draws without replacement, such as Independent or Periodic."
            )


def nothing(x: Tensor, N: int) -> Tensor:
    """Return zeros for every client of every run to keep, ``[R, N, P]``, if memory has room."""
    check_room(len(x) * N, x.shape[1], 2, x)
    return x.new_zeros(len(x), N, x.shape[1])


def kept(things: Tensor, drawn: Visits[Tensor]) -> Tensor:
    """Return what those who came keep, ``[R * S, P]`` of ``things[R, N, P]``."""
    runs = torch.arange(len(things), device=things.device).unsqueeze(1)
    return things[runs, drawn.clients].flatten(0, 1)


def changed(things: Tensor, drawn: Visits[Tensor], change: Tensor) -> Tensor:
    """Return ``things[R, N, P]`` with ``change[R * S, P]`` added for those who came."""
    runs = torch.arange(len(things), device=things.device).unsqueeze(1)
    change = change.view(*drawn.q.shape, -1) * came(drawn, change).unsqueeze(2)
    return things.index_put((runs, drawn.clients), change, accumulate=True)


def came(drawn: Visits[Tensor], x: Tensor) -> Tensor:
    """Return a one for each client that takes part and zero for each that fills up, ``[R, S]``."""
    return (drawn.q > 0).to(x)
