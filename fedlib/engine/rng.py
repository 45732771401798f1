"""Random streams. Every draw in fedlib has a name, and the same name gives the same draw."""

from __future__ import annotations

import zlib

import numpy as np


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
    entropy = (int(seed), zlib.crc32(name.encode()), *(int(key) for key in keys))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
