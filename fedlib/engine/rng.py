"""Random streams. Every draw in fedlib has a name, and the same name gives the same draw."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from fedlib.engine.checks import check_whole_number

if TYPE_CHECKING:
    from torch import Tensor


def stream(seed: int, name: str, *keys: int) -> np.random.Generator:
    """Return the generator of one named stream.

    Streams with different names or keys are independent, and drawing from one never moves
    another: changing who takes part in a round leaves the data order untouched.

    Parameters
    ----------
    seed
        The run's seed, a non-negative integer.
    name
        What is drawn: ``"init"``, ``"data"``, ``"participation"``, ...
    *keys
        What it is drawn for, usually a round and a client.
    """
    check_whole_number("A seed", seed, 0)
    entropy = (int(seed), zlib.crc32(name.encode()), *(int(key) for key in keys))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer


def scrambled(bits: Tensor) -> Tensor:
    """Return 64-bit integers with no pattern of theirs left (the last step of SplitMix64).

    It takes whole tensors, on any device, where a generator for each number would not.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
