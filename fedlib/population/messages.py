"""The message ledger: every array that crosses a link, with its size."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """One array on its way: who sends what to whom, in which round."""

    round: int
    sender: str
    receiver: str
    content: str
    shape: tuple[int, ...]
    bytes: int
