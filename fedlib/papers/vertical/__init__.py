"""VFB²: asynchronous vertical federated learning with backward updating (Zhang et al., 2021)."""

from fedlib.papers.vertical.algorithm import simulate_parties
from fedlib.papers.vertical.baselines import afsvrg_vp, centralised, pooled, synchronous
from fedlib.papers.vertical.data import Columns, load_columns
from fedlib.papers.vertical.problem import Problem, split_features
from fedlib.papers.vertical.runs import Log, Messages, Row, Run, speed_up, time_to
from fedlib.papers.vertical.setup import Uniform, straggler

__all__ = [
    "Columns",
    "Log",
    "Messages",
    "Problem",
    "Row",
    "Run",
    "Uniform",
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
