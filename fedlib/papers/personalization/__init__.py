"""Personalized empirical risk minimization by mixing and shuffling (Deng et al., 2023)."""

from fedlib.papers.personalization.algorithm import PERM, Mixing, ShuffledSGD

__all__ = ["PERM", "Mixing", "ShuffledSGD"]
