"""This paper's algorithms once, in small; see :mod:`fedlib.papers.trials`."""

from __future__ import annotations

from typing import Any

from fedlib.papers.personalization import (
    APFL,
    PERM,
    Ditto,
    LocalizedFedAvg,
    LocalOnly,
    Mixing,
    Oracle,
    PartialFedAvg,
    PerFedAvg,
    PFedMe,
    ShuffledSGD,
)
from fedlib.papers.trials import MODELS, Trial


def _with(algorithm: Any, model: str = "mlp") -> Trial:
    return lambda d: (algorithm, MODELS[model](d))


BY_STEPS = Mixing((20.0, 40.0), steps=2)

TRIALS: dict[str, Trial] = {
    "ShuffledSGD": _with(ShuffledSGD(0.05, 2, 4)),
    "ShuffledSGD, visits as printed": _with(ShuffledSGD((0.02, 0.03), 2, None, "printed", 3.0)),
    "PERM": _with(PERM(0.05, 2, 4)),
    "PERM, weights by steps": _with(PERM(0.05, 2, 4, mixing=BY_STEPS, global_batch=6)),
    "LocalizedFedAvg": _with(LocalizedFedAvg(0.05, 2, 4), "small_cnn"),
    "PerFedAvg": _with(PerFedAvg((0.05, 0.1), 2, 4)),
    "PerFedAvg, hessian-free": _with(PerFedAvg(0.05, 2, 4, (0.1, 0.2), "hessian-free")),
    "PFedMe": _with(PFedMe(0.01, 2, 4, inner_steps=3)),
    "Ditto": _with(Ditto(0.05, 2, 4)),
    "APFL": _with(APFL(0.05, 2, None)),
    "APFL, adaptive": _with(APFL(0.05, 2, 4, (0.3, 0.6), True)),
    "LocalOnly": _with(LocalOnly(0.05, 2, 4)),
    "Oracle": _with(Oracle(0.05, 2, 4, (0, 1, 1, 0))),
    "PartialFedAvg": _with(PartialFedAvg(0.05, 2, 4, (1.0, 0.5, 0.5, 0.25))),
    "PartialFedAvg, random, of inputs": _with(
        PartialFedAvg((0.05, 0.1), 2, None, (1.0, 0.5, 0.5, 0.25), "random"), "softmax"
    ),
}
