"""What chance decides, apart from what is computed: drawn on the host, uploaded in blocks.

Who takes part, which samples a client reads, how long a message takes: none of it depends on a
model. So an algorithm may draw it ahead of its rounds, many rounds at a time. A device then gets
one upload a block, and between two uploads neither waits for the other, except where a run is
evaluated.

An algorithm that does so is :class:`~fedlib.engine.protocols.Drawing`: it has ``draws(state,
task)``, a generator of one round's draws after the other, and its ``round`` takes one of them.
Draws are dataclasses of NumPy arrays, ``Drawn[np.ndarray]``; uploaded they are ``Drawn[Tensor]``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.protocols import Algorithm, Drawing, K, S
from fedlib.errors import FedlibError

Array = TypeVar("Array", np.ndarray, Tensor)
"""What draws consist of, arrays on the host, tensors once they are uploaded."""

ON_HOST: dict[str, Any] = {"on_host": True}
"""``field(metadata=ON_HOST)`` marks what a draw says for the host alone, and no device gets."""

BLOCK_ROUNDS = 64  # at most in a block
BLOCK_BYTES = 2**25  # a block ends when it holds as much


def upload(draws: Sequence[Any], device: torch.device | str) -> list[Any]:
    """Return draws with their arrays as tensors on a device, one transfer for each type of number.

    Parameters
    ----------
    draws
        Dataclasses, lists and tuples of arrays; anything else stays as it is.
    device
        Where to. On a CPU the tensors share the arrays' memory.
    """
    if torch.device(device).type == "cpu":
        return [_changed(drawn, torch.from_numpy) for drawn in draws]
    arrays: dict[int, np.ndarray] = {}

    def collect(array: np.ndarray) -> np.ndarray:
        return arrays.setdefault(id(array), array)  # kept, so that no other gets its number

    for drawn in draws:
        _changed(drawn, collect)
    moved = {}
    for dtype in {array.dtype for array in arrays.values()}:
        alike = {key: array for key, array in arrays.items() if array.dtype == dtype}
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in alike.values()]))
        if torch.cuda.is_available():
            packed = packed.pin_memory()
        pieces = packed.to(device, non_blocking=True).split([a.size for a in alike.values()])
        for (key, array), piece in zip(alike.items(), pieces, strict=True):
            moved[key] = piece.view(array.shape)
    return [_changed(drawn, lambda array: moved[id(array)]) for drawn in draws]


def ahead(algorithm: Algorithm[S, K], state: S, task: K, rounds: int) -> Iterator[tuple[Any, ...]]:
    """Yield what ``round`` takes beside state and task: the draws of the next rounds.

    They lie on the state's device, a block uploaded at a time. An algorithm that draws while it
    computes, and is no :class:`~fedlib.engine.protocols.Drawing`, gets nothing more.
    """
    if not isinstance(algorithm, Drawing):
        yield from itertools.repeat((), rounds)
        return
    _check_round(algorithm)
    draws = itertools.islice(algorithm.draws(state, task), rounds)
    while block := list(_block(draws)):
        yield from ((drawn,) for drawn in upload(block, state.x.device))
        rounds -= len(block)
    if rounds:
        raise FedlibError(
            f"The draws of {type(algorithm).__name__} ended {rounds} rounds too soon. draws(state, "
            "task) goes on for ever: for t in itertools.count(state.t)."
        )


def draw_one(algorithm: Drawing[S, K], state: S, task: K) -> Any:
    """Return the draws of the next round alone, on the state's device."""
    if not isinstance(algorithm, Drawing):
        raise FedlibError(f"{type(algorithm).__name__} has no generator draws(state, task).")
    return upload([next(algorithm.draws(state, task))], state.x.device)[0]


def _check_round(algorithm: Drawing) -> None:
    """Refuse a round that does not take what is drawn for it."""
    try:
        inspect.signature(algorithm.round).bind("state", "task", "drawn")
    except TypeError as error:
        raise FedlibError(
            f"{type(algorithm).__name__} has draws, and its round takes none. Write "
            "round(self, state, task, drawn=None); or say draws = None in the class: it draws "
            "while it computes."
        ) from error


def _block(draws: Iterator[Any]) -> Iterator[Any]:
    size = 0

    def weigh(array: np.ndarray) -> np.ndarray:
        nonlocal size
        size += array.nbytes
        return array

    for drawn in itertools.islice(draws, BLOCK_ROUNDS):
        yield drawn
        _changed(drawn, weigh)
        if size > BLOCK_BYTES:
            return


def _changed(thing: Any, change: Callable[[np.ndarray], Any]) -> Any:
    """Return the same dataclasses, lists and tuples with every array changed."""
    if isinstance(thing, np.ndarray):
        return change(thing)
    if isinstance(thing, list | tuple):
        inner = [_changed(one, change) for one in thing]
        return type(thing)(*inner) if hasattr(thing, "_fields") else type(thing)(inner)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        fields = [f.name for f in dataclasses.fields(thing) if not f.metadata.get("on_host")]
        new = {name: _changed(getattr(thing, name), change) for name in fields}
        return dataclasses.replace(thing, **new)
    if isinstance(thing, dict | torch.Tensor):
        raise FedlibError(
            f"Draws hold a {type(thing).__name__}. They are made on the host, of NumPy arrays in "
            "dataclasses, lists and tuples; a tensor gives its array by .numpy()."
        )
    return thing
