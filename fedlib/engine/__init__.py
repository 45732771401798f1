"""How rows of ``theta`` learn and mix: models, losses, data, tasks, local steps, the round loop."""

from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import local_sgd
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task

__all__ = ["Batch", "FederatedDataset", "Model", "Task", "local_sgd", "simulate", "stream"]
