"""Hierarchical federated learning timed by a clock (Ali and Arafa, 2023)."""

from fedlib.papers.hierarchy.algorithm import HierarchicalSGD
from fedlib.papers.hierarchy.clock import Timeline, timeline

__all__ = ["HierarchicalSGD", "Timeline", "timeline"]
