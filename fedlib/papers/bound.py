"""What every paper's theory shares: a bound with its parts, and numbers in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedlib.errors import FedlibError


@dataclass(frozen=True)
class Bound:
    """A bound as the sum of named terms: ``bound["noise"]``, ``bound.total``."""

    terms: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of the terms."""
        return float(sum(self.terms.values()))

    def __getitem__(self, name: str) -> float:
        return self.terms[name]


def check_constants(above: bool = False, **constants: Any) -> None:
    """Refuse squares, rates, counts and the like below zero, or at it where they are ``above``."""
    for name, value in constants.items():
        try:
            array = as_array(value)
            fits = not isinstance(value, str) and (array > 0 if above else array >= 0).all()
        except FedlibError:
            fits = False
        if not fits:
            raise FedlibError(f"{name} is {'above' if above else 'at least'} 0; got {value!r}.")


def as_array(values: Any) -> np.ndarray:
    """Return a tensor, array or list as a numpy array in double precision."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise FedlibError(f"Expected numbers in an array or a list; got {values!r}.") from error
