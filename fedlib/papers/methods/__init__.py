"""The methods between the papers: what else is tried where FedAvg ends in the wrong place."""

from fedlib.papers.methods.fednova import FedNova, UnevenFedAvg
from fedlib.papers.methods.fedprox import FedProx
from fedlib.papers.methods.lookahead import Lookahead
from fedlib.papers.methods.mifa import MIFA
from fedlib.papers.methods.scaffold import SCAFFOLD
from fedlib.papers.methods.server import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "MIFA",
    "SCAFFOLD",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedNova",
    "FedProx",
    "FedYogi",
    "Lookahead",
    "UnevenFedAvg",
]
