"""What none of the papers has: two of their ideas in one algorithm."""

from fedlib.papers.beyond.algorithm import AmplifiedHierarchicalSGD

__all__ = ["AmplifiedHierarchicalSGD"]
