"""What there is to learn from: cards, verified downloads, generators, and who holds which part."""

from fedlib.datasets.cards import Card, DataFile, Dataset, all_cards, card, fingerprint
from fedlib.datasets.fetch import cache_folder, cached, get, verify
from fedlib.datasets.loading import load
from fedlib.datasets.tables import from_frame

__all__ = ["Card", "DataFile", "Dataset", "all_cards", "cache_folder", "cached", "card"]
__all__ += ["fingerprint", "from_frame", "get", "load", "verify"]
