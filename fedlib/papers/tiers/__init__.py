"""TDCD: tiered decentralized coordinate descent, data split both ways (Das et al., 2022)."""

from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.asynchronous import AsyncTDCD
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask

__all__ = ["TDCD", "AsyncTDCD", "LabelPrivateTDCD", "TieredTask"]
