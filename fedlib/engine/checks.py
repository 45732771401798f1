"""Settings checked once, where they come in: what came, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch import Tensor

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
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 < value < float("inf"):
        one = " (or one for each run)" if several else " for all runs"
        raise FedlibError(f"{name} must be positive, one number{one}; got {value!r}.")


def checked_seeds(seeds: Any) -> tuple[int, ...]:
    """Return seeds as a tuple, having refused what are no whole numbers from 0 on."""
    if isinstance(seeds, Integral):
        raise FedlibError(
            f"seeds are a list, one run each; got {seeds}. For one run: seeds=[{seeds}]; for that "
            f"many: seeds=range({seeds})."
        )
    try:
        found = tuple(seeds)
    except TypeError:
        found = ()
    if not found:
        raise FedlibError(f"seeds are a list with at least one; got {seeds!r}.")
    for seed in found:
        check_whole_number("A seed", seed, 0)
    return found


def check_models(x: Any, runs: int, size: int) -> None:
    """Refuse starting points that are not a model a run, ``[runs, size]``."""
    if not isinstance(x, Tensor) or tuple(x.shape) != (runs, size):
        came = tuple(x.shape) if isinstance(x, Tensor | np.ndarray) else repr(x)
        raise FedlibError(
            f"x is {came}. Expected a tensor with a model for each seed, [{runs}, {size}]; one "
            "model for all of them: row.expand(len(seeds), -1)."
        )
