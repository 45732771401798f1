"""How rows of ``theta`` learn and mix: models, losses, data, tasks, local steps, the round loop."""

from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import Groups, average, mix
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import column, sweep
from fedlib.engine.tasks import Task

__all__ = [
    "Batch",
    "FederatedDataset",
    "Groups",
    "Model",
    "Task",
    "average",
    "column",
    "local_sgd",
    "mix",
    "simulate",
    "stream",
    "sweep",
]
