"""This chapter's algorithm once, in small; see :mod:`fedlib.papers.trials`."""

from __future__ import annotations

from fedlib.papers.beyond.algorithm import AmplifiedHierarchicalSGD
from fedlib.papers.hierarchy.trials import UNEQUAL
from fedlib.papers.trials import MODELS, Trial

TRIALS: dict[str, Trial] = {
    "AmplifiedHierarchicalSGD": lambda d: (
        AmplifiedHierarchicalSGD(*UNEQUAL, 4, amplify=3.0, interval=2),
        MODELS["mlp"](d),
    ),
}
