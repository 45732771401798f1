"""VFB²: asynchronous vertical federated learning with backward updating (Zhang et al., 2021)."""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlib.papers.vertical.algorithm import simulate_parties
    from fedlib.papers.vertical.baselines import afsvrg_vp, centralised, pooled, synchronous
    from fedlib.papers.vertical.data import Columns, load_columns
    from fedlib.papers.vertical.problem import Problem, split_features
    from fedlib.papers.vertical.runs import Log, Messages, Row, Run, speed_up, time_to
    from fedlib.papers.vertical.setup import straggler

__all__ = [
    "Columns",
    "Log",
    "Messages",
    "Problem",
    "Row",
    "Run",
    "afsvrg_vp",
    "centralised",
    "load_columns",
    "pooled",
    "simulate_parties",
    "speed_up",
    "split_features",
    "straggler",
    "synchronous",
    "time_to",
]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: a party's process needs neither numba nor torch."""
    homes = ("problem", "runs", "setup", "data", "algorithm", "baselines")
    for home in homes if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    return object.__getattribute__(sys.modules[__name__], name)  # says that there is none
