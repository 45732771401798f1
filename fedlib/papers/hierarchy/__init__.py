"""Delay-sensitive hierarchical federated learning (Ali and Arafa, 2023)."""
