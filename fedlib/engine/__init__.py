"""How rows of ``theta`` learn and mix: models, losses, data, tasks, local steps, the round loop."""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedlib.engine.checkpoint import Checkpoint
    from fedlib.engine.data import Batch, FederatedDataset
    from fedlib.engine.evaluation import Evaluation
    from fedlib.engine.local import local_sgd
    from fedlib.engine.mixing import Groups, average, mix
    from fedlib.engine.model import Model
    from fedlib.engine.rng import stream
    from fedlib.engine.simulation import simulate
    from fedlib.engine.sweeps import column, sweep
    from fedlib.engine.tasks import Task

__all__ = ["Batch", "Checkpoint", "Evaluation", "FederatedDataset", "Groups", "Model", "Task"]
__all__ += ["average", "column", "local_sgd", "mix", "simulate", "stream", "sweep"]


def __getattr__(name: str) -> object:
    """Import what is asked for when it is: who draws numbers alone does not wait for torch."""
    homes = "rng checkpoint data evaluation local mixing model simulation sweeps tasks"
    for home in homes.split() if name in __all__ else ():
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    return object.__getattribute__(sys.modules[__name__], name)  # says that there is none
