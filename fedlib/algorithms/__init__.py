"""One file a paper. An algorithm is a frozen dataclass with ``init`` and ``round``."""

from fedlib.algorithms.participation import FedAvg, GeneralizedFedAvg, WaitFull, WaitMinibatch

__all__ = ["FedAvg", "GeneralizedFedAvg", "WaitFull", "WaitMinibatch"]
