"""Hierarchical federated learning timed by a clock (Ali and Arafa, 2023)."""

from fedlib.papers.hierarchy.algorithm import HierarchicalSGD
from fedlib.papers.hierarchy.asynchronous import Arrivals, AsyncHierarchicalSGD, arrivals
from fedlib.papers.hierarchy.clock import Timeline, timeline

__all__ = [
    "Arrivals",
    "AsyncHierarchicalSGD",
    "HierarchicalSGD",
    "Timeline",
    "arrivals",
    "timeline",
]
