"""Personalized empirical risk minimization by mixing and shuffling (Deng et al., 2023)."""

from fedlib.papers.personalization.algorithm import PERM, Mixing, ShuffledSGD
from fedlib.papers.personalization.masks import PartialFedAvg
from fedlib.papers.personalization.others import (
    APFL,
    IFCA,
    Ditto,
    LocalizedFedAvg,
    LocalOnly,
    Oracle,
    PerFedAvg,
    PFedMe,
)

__all__ = [
    "APFL",
    "IFCA",
    "PERM",
    "Ditto",
    "LocalOnly",
    "LocalizedFedAvg",
    "Mixing",
    "Oracle",
    "PFedMe",
    "PartialFedAvg",
    "PerFedAvg",
    "ShuffledSGD",
]
