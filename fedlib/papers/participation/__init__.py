"""Generalized FedAvg with amplified updates under arbitrary participation (Wang and Ji, 2022)."""

from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitFull, WaitMinibatch

__all__ = ["GeneralizedFedAvg", "WaitFull", "WaitMinibatch"]
