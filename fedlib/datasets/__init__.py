"""What there is to learn from: cards, verified downloads, generators, and who holds which part."""

from fedlib.cards import Card, DataFile, all_cards, card
from fedlib.datasets.cards import Dataset, fingerprint
from fedlib.datasets.fetch import cache_folder, cached, get, verify
from fedlib.datasets.loading import load
from fedlib.datasets.owned import OwnedDataset, Owners, only, owners
from fedlib.datasets.tables import from_frame

__all__ = ["Card", "DataFile", "Dataset", "OwnedDataset", "Owners", "all_cards", "cache_folder"]
__all__ += ["cached", "card", "fingerprint", "from_frame", "get", "load", "only", "owners"]
__all__ += ["verify"]
