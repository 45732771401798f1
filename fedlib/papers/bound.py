"""What every paper's theory shares: a bound with its parts, and numbers in double precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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


def as_array(values: Any) -> np.ndarray:
    """Return a tensor, array or list as a numpy array in double precision."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
    return np.asarray(values, dtype=np.float64)
