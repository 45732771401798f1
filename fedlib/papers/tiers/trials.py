"""This paper's algorithms once, in small; see :mod:`fedlib.papers.trials`."""

from __future__ import annotations

from typing import Any

from fedlib.datasets import partition
from fedlib.engine import models
from fedlib.engine.rng import stream
from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.asynchronous import AsyncTDCD
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask
from fedlib.papers.trials import Trial
from fedlib.population.delays import ShiftedExponential

ROWS = 24


def tiered(dtype: Any) -> TieredTask:
    """Return three silos: two that share a model, and one with another; 2, 3 and 1 clients."""
    rng, shared = stream(0, "trial"), models.mlp(4, 5, 1)
    x = [rng.standard_normal((ROWS, 4)).astype(dtype) for _ in range(3)]
    y = rng.integers(0, 2, ROWS)
    parts = partition.grid(ROWS, [2, 3, 1])
    held = [shared, shared, models.mlp(4, 3, 1)]
    return TieredTask(held, x, y, parts, x, y, "logistic")


def _hubs(wait: bool) -> AsyncTDCD:
    return AsyncTDCD(0.1, 2, 8, ShiftedExponential(1, 1), ShiftedExponential(0.5, 0.5), wait, 6.0)


TRIALS: dict[str, Trial] = {
    "TDCD": lambda d: (TDCD(0.1, 3, 8), tiered(d)),
    "TDCD, all rows": lambda d: (TDCD((0.1, 0.2), 2), tiered(d)),
    "LabelPrivateTDCD": lambda d: (LabelPrivateTDCD(0.1, 2, 8), tiered(d)),
    "LabelPrivateTDCD, old derivatives": lambda d: (
        LabelPrivateTDCD(0.1, 2, 8, fresh=False), tiered(d),
    ),
    "AsyncTDCD": lambda d: (_hubs(False), tiered(d)),
    "AsyncTDCD, waiting": lambda d: (_hubs(True), tiered(d)),
}  # fmt: skip
