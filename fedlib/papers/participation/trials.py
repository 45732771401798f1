"""This paper's algorithms once, in small; see :mod:`fedlib.papers.trials`."""

from __future__ import annotations

from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitFull, WaitMinibatch
from fedlib.papers.trials import CLIENTS, MODELS, Trial
from fedlib.population.participation import PeriodicSampler

PROCESS = PeriodicSampler(CLIENTS, 1, 2, 2)

TRIALS: dict[str, Trial] = {
    "GeneralizedFedAvg": lambda d: (
        GeneralizedFedAvg(PROCESS, 0.05, (2.0, 5.0), 2, 2, 4), MODELS["mlp"](d),
    ),
    "WaitMinibatch": lambda d: (WaitMinibatch(PROCESS, 0.05, 1, 2, 2, 4), MODELS["softmax"](d)),
    "WaitFull": lambda d: (WaitFull(PROCESS, 0.05, 1, 2, 2), MODELS["small_cnn"](d)),
}  # fmt: skip
