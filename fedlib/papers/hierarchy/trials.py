"""This paper's algorithms once, in small; see :mod:`fedlib.papers.trials`."""

from __future__ import annotations

from fedlib.papers.hierarchy import AsyncHierarchicalSGD, HierarchicalSGD
from fedlib.papers.trials import MODELS, Trial
from fedlib.population.delays import ShiftedExponential

LOCAL, SERVER = ShiftedExponential(0.5, 0.5), ShiftedExponential(2.0, 1.0)
UNEQUAL = ((1, 3), 0.05, 2.0, 60.0, LOCAL, SERVER)

TRIALS: dict[str, Trial] = {
    "HierarchicalSGD": lambda d: (HierarchicalSGD(*UNEQUAL, 4), MODELS["mlp"](d)),
    "HierarchicalSGD, full batches, merged as nova": lambda d: (
        HierarchicalSGD(*UNEQUAL, None, "nova"),
        MODELS["small_cnn"](d),
    ),
    "HierarchicalSGD, characters": lambda d: (
        HierarchicalSGD((2, 2), *UNEQUAL[1:], 4),
        MODELS["char_lstm"](d),
    ),
    "AsyncHierarchicalSGD": lambda d: (
        AsyncHierarchicalSGD(*UNEQUAL, 4, decay=0.5),
        MODELS["mlp"](d),
    ),
}
