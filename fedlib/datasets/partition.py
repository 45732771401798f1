"""Horizontal partitioners: which client owns which sample.

Each is a function of ``(labels, clients, seed)`` and returns one sorted index array a client.
Every sample goes to exactly one client.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from fedlib.engine.checks import (
    check_between,
    check_flag,
    check_positive,
    check_whole_number,
    checked_parts,
)
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError

Parts = list[np.ndarray]


def _checked(labels: np.ndarray, clients: int, seed: int) -> np.ndarray:
    check_labels(labels)
    labels = np.asarray(labels)
    check_whole_number("seed", seed, 0)
    check_whole_number("clients", clients)
    if clients > len(labels):
        raise FedlibError(
            f"{clients} clients for {len(labels)} samples. Use between 1 and {len(labels)}."
        )
    return labels


def check_labels(labels: np.ndarray) -> None:
    """Refuse labels that are not one a sample, or missing."""
    try:
        labels = np.asarray(labels)
    except ValueError as error:
        raise FedlibError(
            f"labels are one a sample, [n]; got a list that is none: {error}"
        ) from error
    if labels.ndim != 1:
        raise FedlibError(f"labels are {[*labels.shape]}. Expected one a sample, [n].")
    if missing := int(pd.isna(labels).sum()):
        raise FedlibError(f"{missing} of the labels are missing (nan or None). Drop those samples.")


def _group(owner: np.ndarray, clients: int) -> Parts:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.searchsorted(owner[order], np.arange(1, clients)))


def iid(labels: np.ndarray, clients: int, seed: int = 0) -> Parts:
    """Shuffle the samples and deal them out; sizes differ by at most one."""
    labels = _checked(labels, clients, seed)
    order = stream(seed, "partition").permutation(len(labels))
    return [np.sort(part) for part in np.array_split(order, clients)]


def dirichlet(
    labels: np.ndarray, clients: int, seed: int = 0, alpha: float = 0.5, smallest: int = 1
) -> Parts:
    """Split every class over the clients with Dirichlet(alpha) proportions.

    Counts are rounded by largest remainder, so each class is used up exactly.

    Parameters
    ----------
    alpha
        Concentration: small gives a class to few clients, large gives everybody the same mix.
    smallest
        Samples that every client must have at least.

    Raises
    ------
    FedlibError
        When some client ends up with fewer than ``smallest`` samples. We do not draw again
        until it fits: that would silently change the distribution.
    """
    labels = _checked(labels, clients, seed)
    check_positive("alpha", alpha)
    check_whole_number("smallest", smallest, 0)
    rng = stream(seed, "partition")
    owner = np.empty(len(labels), dtype=np.int64)
    for c in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == c))
        ideal = rng.dirichlet(np.full(clients, alpha)) * len(rows)
        counts = np.floor(ideal).astype(int)
        short = len(rows) - counts.sum()
        counts[np.argsort(counts - ideal, kind="stable")[:short]] += 1
        owner[rows] = np.repeat(np.arange(clients), counts)
    parts = _group(owner, clients)
    least = min(map(len, parts))
    if least < smallest:
        raise FedlibError(
            f"Dirichlet(alpha={alpha}) with seed {seed} leaves a client with {least} samples, "
            f"fewer than {smallest}. Use a larger alpha, fewer clients or another seed."
        )
    return parts


def fedml(
    labels: np.ndarray, clients: int, seed: int = 0, alpha: float = 0.5, smallest: int = 10
) -> Parts:
    """Split every class over the clients with Dirichlet(alpha) proportions, as FedML does.

    Unlike :func:`dirichlet`, a client that holds an even share of all samples already gets none of
    the classes that follow, and everything is drawn anew until each client has ``smallest``
    samples. So sizes differ less, and no client is tiny; and the classes that come late in the
    order of labels go to whoever is still short. Cuts are rounded down.

    Parameters
    ----------
    alpha
        Concentration: small gives a class to few clients, large gives everybody the same mix.
    smallest
        Samples that every client must have at least; FedML's number is ten.

    Raises
    ------
    FedlibError
        When a thousand draws have left some client with fewer.
    """
    labels = _checked(labels, clients, seed)
    check_positive("alpha", alpha)
    check_whole_number("smallest", smallest, 0)
    rng, classes = stream(seed, "partition"), np.unique(labels)
    for _ in range(1000):
        owner, held = np.empty(len(labels), dtype=np.int64), np.zeros(clients)
        for c in classes:
            rows = rng.permutation(np.flatnonzero(labels == c))
            share = rng.dirichlet(np.full(clients, alpha)) * (held < len(labels) / clients)
            if not share.sum():  # all of it fell to clients that are full
                break
            cuts = (share.cumsum() / share.sum() * len(rows)).astype(int)[:-1]
            counts = np.diff([0, *cuts, len(rows)])
            owner[rows] = np.repeat(np.arange(clients), counts)
            held += counts
        else:
            if held.min() >= smallest:
                return _group(owner, clients)
    raise FedlibError(
        f"A thousand draws of Dirichlet(alpha={alpha}) with seed {seed} all left a client with "
        f"fewer than {smallest} samples. Use a larger alpha or fewer clients."
    )


def shards(labels: np.ndarray, clients: int, seed: int = 0, shards_per_client: int = 2) -> Parts:
    """Sort by label, cut into equal shards, and deal ``shards_per_client`` to each client."""
    labels = _checked(labels, clients, seed)
    check_whole_number("shards_per_client", shards_per_client)
    pieces = clients * shards_per_client
    if pieces > len(labels):
        raise FedlibError(
            f"{clients} clients × {shards_per_client} shards need {pieces} samples at least; "
            f"there are {len(labels)}."
        )
    cut = np.array_split(np.argsort(labels, kind="stable"), pieces)
    dealt = stream(seed, "partition").permutation(pieces).reshape(clients, shards_per_client)
    return [np.sort(np.concatenate([cut[i] for i in row])) for row in dealt]


def similarity(labels: np.ndarray, clients: int, seed: int = 0, other: float = 0.05) -> Parts:
    """Give each client one majority class, with a share of samples from anywhere.

    Sample by sample: with probability ``other`` to any client, else to the currently smallest
    client of the sample's class (lowest number on ties). Class ``c`` owns an equal block of
    clients. This is the split of the participation paper's official code.

    Raises
    ------
    FedlibError
        When the number of clients is not a multiple of the number of classes.
    """
    labels = _checked(labels, clients, seed)
    check_between("other, a share,", other, 0, 1)
    classes = np.unique(labels)
    if clients % len(classes):
        raise FedlibError(
            f"{clients} clients cannot be shared equally by {len(classes)} classes. "
            f"Use a multiple of {len(classes)}."
        )
    block = clients // len(classes)
    rng = stream(seed, "partition")
    astray = rng.random(len(labels)) < other
    anywhere = rng.integers(clients, size=len(labels))
    position = np.searchsorted(classes, labels)
    size = np.zeros(clients, dtype=np.int64)
    owner = np.empty(len(labels), dtype=np.int64)
    for i in range(len(labels)):
        first = position[i] * block
        n = anywhere[i] if astray[i] else first + int(size[first : first + block].argmin())
        owner[i] = n
        size[n] += 1
    return _group(owner, clients)


PARTITIONERS = {
    "iid": iid,
    "dirichlet": dirichlet,
    "fedml": fedml,
    "shards": shards,
    "similarity": similarity,
}


def histogram(labels: np.ndarray, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Count labels by client, ``[clients, classes]``."""
    check_labels(labels)
    parts = checked_parts(parts, len(labels))
    classes, position = np.unique(labels, return_inverse=True)
    return np.stack([np.bincount(position[part], minlength=len(classes)) for part in parts])


def summary(labels: np.ndarray, parts: Sequence[np.ndarray]) -> pd.DataFrame:
    """Describe a partition, one row a client.

    Returns
    -------
    pandas.DataFrame
        ``size``; ``majority``, the label it has most of; ``share`` of that label;
        ``distance``, half the L1 distance between its label distribution and that of all
        samples (0: the same, towards 1: nothing in common). Of a client without samples the
        shares are 0.
    """
    counts = histogram(labels, parts)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    overall = counts.sum(0) / counts.sum()
    return pd.DataFrame(
        {
            "size": counts.sum(1),
            "majority": np.unique(labels)[counts.argmax(1)],
            "share": shares.max(1),
            "distance": 0.5 * np.abs(shares - overall).sum(1),
        }
    ).rename_axis("client")


# ---------------------------------------------------------------- vertical: who owns which feature


def _cut(features: int, silos: int) -> list[int]:
    """Return block sizes that differ by at most one, larger ones first."""
    check_whole_number("features", features)
    check_whole_number("silos", silos)
    if silos > features:
        raise FedlibError(
            f"{silos} silos for {features} features. Use between 1 and {features} silos."
        )
    return [features // silos + (j < features % silos) for j in range(silos)]


def contiguous_features(features: int, silos: int, seed: int = 0) -> Parts:
    """Cut the features into neighbouring blocks; the first blocks take the remainder."""
    check_whole_number("features", features)
    check_whole_number("seed", seed, 0)
    return np.split(np.arange(features), np.cumsum(_cut(features, silos))[:-1])


def random_features(features: int, silos: int, seed: int = 0) -> Parts:
    """Deal the features out at random, blocks as equal as possible."""
    check_whole_number("features", features)
    order = stream(seed, "feature partition").permutation(features)
    return [np.sort(block) for block in np.split(order, np.cumsum(_cut(features, silos))[:-1])]


def tiles(images: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    """Cut images ``[n, C, H, W]`` into ``rows × columns`` equal tiles, one a silo.

    Raises
    ------
    FedlibError
        When height or width cannot be divided.
    """
    check_four(images, "n, C, H, W")
    check_whole_number("rows", rows)
    check_whole_number("columns", columns)
    height, width = images.shape[-2:]
    if height % rows or width % columns:
        raise FedlibError(
            f"Images of {height}×{width} cannot be cut into {rows}×{columns} equal tiles."
        )
    bands = np.split(images, rows, axis=-2)
    return [tile for band in bands for tile in np.split(band, columns, axis=-1)]


def halves(images: np.ndarray) -> list[np.ndarray]:
    """Cut images ``[n, C, H, W]`` into a left and a right half."""
    return tiles(images, 1, 2)


def views(images: np.ndarray) -> list[np.ndarray]:
    """Give every view of ``[n, V, H, W]`` to a silo of its own, each ``[n, 1, H, W]``."""
    check_four(images, "n, V, H, W")
    return [images[:, v : v + 1] for v in range(images.shape[1])]


def check_client_counts(clients: Sequence[int]) -> None:
    """Refuse what is no number of clients for each silo."""
    if not isinstance(clients, Sequence | np.ndarray) or not len(clients):
        raise FedlibError(f"clients are a number for each silo, in a list; got {clients!r}.")
    for j, count in enumerate(clients):
        check_whole_number(f"Silo {j}: the number of clients", count)


def check_four(images: np.ndarray, axes: str) -> None:
    """Refuse what are no images."""
    shape = getattr(images, "shape", None)
    if shape is None or len(shape) != 4:
        came = type(images).__name__ if shape is None else [*shape]
        raise FedlibError(f"Images are an array [{axes}]; got {came}.")


def grid(samples: int, clients: Sequence[int], seed: int = 0, aligned: bool = False) -> list[Parts]:
    """Split the rows over the clients of every silo.

    Parameters
    ----------
    samples
        Number of rows, the same in every silo.
    clients
        Number of clients of each silo.
    aligned
        Use one permutation for all silos, so that client ``k`` holds the same rows in each
        (the official code's mirror clients). By default every silo has its own.

    Returns
    -------
    list of list of numpy.ndarray
        ``[silo][client]`` sorted row numbers; sizes differ by at most one.
    """
    check_whole_number("samples", samples)
    check_client_counts(clients)
    check_flag("aligned", aligned)
    split = []
    for j, count in enumerate(clients):
        if not 1 <= count <= samples:
            raise FedlibError(f"Silo {j}: {count} clients for {samples} rows.")
        order = stream(seed, "row partition", 0 if aligned else j).permutation(samples)
        split.append([np.sort(part) for part in np.array_split(order, count)])
    return split
