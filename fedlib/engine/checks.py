"""Settings checked once, where they come in: what came, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from fedlib.errors import FedlibError


def check_whole_number(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number of at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise FedlibError(f"{name} is a whole number of at least {least}; got {value!r}.")


def check_positive(name: str, value: Any, several: bool = False) -> None:
    """Refuse what is no positive, finite number, or where ``several`` a sequence of them."""
    if several and isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        for one in value:
            check_positive(f"Each {name}", one)
        return
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not 0 < value < float("inf"):
        one = " (or one for each run)" if several else " for all runs"
        raise FedlibError(f"{name} must be positive, one number{one}; got {value!r}.")


def check_between(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Refuse what is no finite number from ``low`` to ``high``."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not low <= value <= high or value == float("inf"):
        kind, most = ("finite ", "") if high == float("inf") else ("", f" and at most {high:g}")
        raise FedlibError(f"{name} is a {kind}number of at least {low:g}{most}; got {value!r}.")


def check_each(name: str, value: Any, most: float = float("inf")) -> None:
    """Refuse what is no finite number from 0 to ``most``, or one for each run."""
    for one in np.ravel(value).tolist():
        check_between(name, one, 0, most)


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither True nor False: words such as "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise FedlibError(f"{name} is True or False; got {value!r}.")


def check_device(device: Any) -> None:
    """Refuse what is no device that PyTorch has here."""
    if not has_device(device):
        raise FedlibError(
            "device is 'cpu', or 'cuda' where PyTorch sees a GPU (torch.cuda.is_available()); got "
            f"{device!r}."
        )


def has_device(device: Any) -> bool:
    """Return whether PyTorch can place something there."""
    import torch

    try:
        return not torch.empty(0, device=device).numel()
    except (RuntimeError, AssertionError, TypeError):
        return False


def check_images(shape: Any, outputs: Any, least: int = 1) -> None:
    """Refuse what is no shape of images, or of too small ones, and no number of outputs."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
        raise FedlibError(f"shape is (channels, height, width); got {shape!r}.")
    check_whole_number("The number of channels", shape[0])
    for side in shape[1:]:
        check_whole_number("Height or width", side, least)
    check_whole_number("The number of outputs", outputs)


def checked_seeds(seeds: Any) -> tuple[int, ...]:
    """Return seeds as a tuple, having refused what are no whole numbers from 0 on."""
    if isinstance(seeds, Integral):
        raise FedlibError(
            f"seeds are a list, one run each; got {seeds}. For one run: seeds=[{seeds}]; for that "
            f"many: seeds=range({seeds})."
        )
    try:
        result = tuple(seeds)
    except TypeError:
        result = ()
    if not result:
        raise FedlibError(f"seeds are a list with at least one; got {seeds!r}.")
    for seed in result:
        check_whole_number("A seed", seed, 0)
        if seed >= 2**63:
            raise FedlibError(f"A seed is below 2**63; got {seed}.")
    return result


def checked_parts(parts: Any, rows: int) -> list[np.ndarray]:
    """Return a split as int64 arrays, having refused what are no row numbers of each client."""
    try:
        arrays = [np.asarray(part) for part in parts]
    except (TypeError, ValueError):
        arrays = []
    if not arrays or isinstance(parts, Mapping) or any(part.ndim != 1 for part in arrays):
        raise FedlibError(
            "The split is a list with row numbers for each client, [[0, 3, ...], [1, 2, ...], ...]."
        )
    if wrong := [part.dtype for part in arrays if part.size and part.dtype.kind not in "iu"]:
        raise FedlibError(f"Clients' rows are whole numbers; got an array of type {wrong[0]}.")
    if wrong := [row for part in arrays for row in part[(part < 0) | (part >= rows)][:1]]:
        raise FedlibError(f"Row numbers must lie in 0..{rows - 1}; got {wrong[0]}.")
    return [part.astype(np.int64) for part in arrays]


def check_rows(theta: Any, size: int, dtype: Any = None) -> None:
    """Refuse what are no models of a task, ``[C, size]``, or of another type where it is given."""
    from torch import Tensor

    if not isinstance(theta, Tensor) or theta.dim() != 2 or theta.shape[1] != size:
        came = list(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
        raise FedlibError(
            f"theta is {came}. Expected one copy a row, [C, {size}], in a tensor; one model "
            "alone: row.reshape(1, -1)."
        )
    if not len(theta):
        raise FedlibError(f"theta holds no model: {list(theta.shape)}.")
    if not theta.is_floating_point() or dtype not in (None, theta.dtype):
        raise FedlibError(
            f"theta holds {theta.dtype}. Expected {dtype or 'real numbers'}, as the features are: "
            f"theta.to({dtype or 'torch.float32'})."
        )


def check_models(x: Any, runs: int, size: int) -> None:
    """Refuse starting points that are not a model a run, ``[runs, size]``."""
    from torch import Tensor

    real = isinstance(x, Tensor) and x.is_floating_point()
    if not real or tuple(x.shape) != (runs, size):
        came = f"{tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor | np.ndarray) else repr(x)
        raise FedlibError(
            f"x is {came}. Expected a tensor with a model for each seed, [{runs}, {size}], of "
            "real numbers; one model for all of them: row.expand(len(seeds), -1)."
        )
