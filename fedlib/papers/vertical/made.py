"""Made rows with many columns: substitutes for text and for songs, called so on their cards."""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import brentq

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError

_ROWS = 2048  # rows made at a time, so that nothing large is held twice


def zipf_rows(
    rows: int,
    train: int,
    d: int,
    *,
    seed: int = 0,
    density: float = 0.0003,
    exponent: float = 1.0,
    planted: int = 1000,
    deepest: int | None = None,
    flips: float | None = None,
    explained: float = 0.5,
    level: float = 0.0,
    spread: float = 1.0,
) -> tuple[sparse.csr_array, np.ndarray]:
    """Make sparse rows of length 1 whose columns have the popularity of words.

    A row is a number of draws, Poisson, from the law ``1 / r^exponent`` on ranks ``r = 1 .. d``;
    their mean is such that a row has ``density * d`` columns that are not 0, on average. A column
    drawn ``k`` times has the value ``(1 + log k) log(1 / p)``, with the probability ``p`` that a
    row has the column, and the row is scaled to length 1. Ranks are dealt to column numbers at
    random. Gaussian weights are planted on columns with ranks drawn evenly in their logarithm,
    from 11 to ``deepest``; ``s = x @ w``.

    Parameters
    ----------
    rows, train, d
        All rows; those that train, the first; columns.
    seed
        Draws everything.
    planted, deepest
        So many draws of columns that the target depends on, and the rank of the least popular one
        that can be drawn; None is ``d``.
    flips
        Labels are -1 and +1, by the side of the training median on which ``s`` lies, and this
        share of them is turned round. None makes a real target: ``level + spread (sqrt(explained)
        s + sqrt(1 - explained) noise)`` with ``s`` scaled to mean 0 and variance 1 over the
        training rows.

    Returns
    -------
    x, y
        ``csr_array float64 [rows, d]``, columns sorted; ``float64 [rows]``.
    """
    deepest = d if deepest is None else deepest
    if not (0 < density < 0.2 and planted > 0 and 11 <= deepest <= d and 0 < train <= rows):
        raise FedlibError(
            f"Zipf rows need density in (0, 0.2), a planted column or more, deepest from 11 to {d} "
            f"and 1 to {rows} training rows; got {density}, {planted}, {deepest} and {train}."
        )
    popular = 1 / np.arange(1, d + 1) ** exponent
    popular /= popular.sum()
    draws = brentq(lambda m: -np.expm1(-m * popular).sum() - density * d, 0, 50.0 * d)
    weight = -np.log(-np.expm1(-draws * popular))  # of a column: the rarer, the heavier
    column = stream(seed, "zipf columns").permutation(d).astype(np.int32)
    x = _counts(seed, rows, column, np.cumsum(popular), draws)
    by_column = np.empty(d)
    by_column[column] = weight
    np.log(x.data, out=x.data)
    x.data += 1
    for start in range(0, rows, _ROWS):
        ends = x.indptr[start : start + _ROWS + 1]
        part, owner = slice(ends[0], ends[-1]), np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        x.data[part] *= by_column[x.indices[part]]
        x.data[part] /= np.sqrt(np.bincount(owner, x.data[part] ** 2))[owner]
    score = x @ _planted(seed, column, planted, deepest)
    if flips is not None:
        return x, _sides(seed, score, train, flips)
    score = (score - score[:train].mean()) / score[:train].std()
    noise = stream(seed, "zipf noise").standard_normal(rows)
    return x, level + spread * (np.sqrt(explained) * score + np.sqrt(1 - explained) * noise)


def _counts(
    seed: int, rows: int, column: np.ndarray, until: np.ndarray, draws: float
) -> sparse.csr_array:
    """Return how often each row has drawn each column."""
    d, ends, columns, counts = len(column), [np.zeros(1, dtype=np.int64)], [], []
    for start in range(0, rows, _ROWS):
        rng, count = stream(seed, "zipf rows", start), min(_ROWS, rows - start)
        sizes = np.maximum(rng.poisson(draws, count), 1)
        rank = np.minimum(np.searchsorted(until, rng.random(sizes.sum())), d - 1)
        key = np.repeat(np.arange(count), sizes) * d + column[rank]
        key, times = np.unique(key, return_counts=True)
        row, at = np.divmod(key, d)
        columns.append(at.astype(np.int32))
        counts.append(times.astype(np.int32))
        ends.append(ends[-1][-1] + np.cumsum(np.bincount(row, minlength=count)))
    ends = np.concatenate(ends)  # type: ignore[assignment]
    kind = np.int32 if ends[-1] < 2**31 else np.int64  # scipy holds both arrays alike
    places = np.concatenate(columns).astype(kind, copy=False)
    arrays = np.concatenate(counts).astype(np.float64), places, ends.astype(kind)  # type: ignore[attr-defined]
    return sparse.csr_array(arrays, shape=(rows, d))


def _planted(seed: int, column: np.ndarray, count: int, deepest: int) -> np.ndarray:
    """Return weights, 0 but for some columns of all ranks."""
    rng, w = stream(seed, "zipf weights"), np.zeros(len(column))
    rank = np.exp(rng.uniform(np.log(11), np.log(deepest + 1), count)).astype(np.int64) - 1
    rank = np.unique(np.minimum(rank, deepest - 1))
    w[column[rank]] = rng.standard_normal(len(rank))
    return w


def _sides(seed: int, score: np.ndarray, train: int, flips: float) -> np.ndarray:
    """Return labels by the side of the training median, some turned round."""
    side = np.where(score > np.median(score[:train]), 1.0, -1.0)
    return np.where(stream(seed, "zipf flips").random(len(side)) < flips, -side, side)


def gaussian_rows(
    rows: int,
    train: int,
    d: int,
    *,
    seed: int = 0,
    factors: int = 12,
    common: float = 0.6,
    explained: float = 0.25,
) -> tuple[np.ndarray, np.ndarray]:
    """Make correlated Gaussian columns and a skewed target, a year from 1922 to 2011.

    ``x = sqrt(common) A z + sqrt(1 - common) e`` with unit rows of ``A [d, factors]``: every column
    has variance 1. With ``t = sqrt(explained) x @ b + sqrt(1 - explained) noise``, ``b`` such that
    ``x @ b`` has variance 1, the year is ``2011 - exp(2.1 + 0.75 t)``, rounded and cut off at
    1922.

    Parameters
    ----------
    rows, train, d
        All rows; ``train`` plays no part; columns.
    seed
        Draws everything.

    Returns
    -------
    x, y
        ``float64 [rows, d]``, to six digits after the point, and ``float64 [rows]``, in years.
    """
    if not (0 <= common <= 1 and 0 <= explained <= 1 and factors > 0):
        raise FedlibError(
            "Gaussian rows need common and explained in [0, 1] and a factor or more; got "
            f"{common}, {explained} and {factors}."
        )
    rng = stream(seed, "gaussian columns")
    a = rng.standard_normal((d, factors))
    a *= np.sqrt(common) / np.linalg.norm(a, axis=1, keepdims=True)
    b = rng.standard_normal(d)
    b /= np.sqrt(np.sum((a.T @ b) ** 2) + (1 - common) * (b @ b))
    x, t = np.empty((rows, d)), np.empty(rows)
    for start in range(0, rows, _ROWS):
        rng, part = stream(seed, "gaussian rows", start), slice(start, min(start + _ROWS, rows))
        count = part.stop - start
        x[part] = rng.standard_normal((count, factors)) @ a.T
        x[part] += np.sqrt(1 - common) * rng.standard_normal((count, d))
        t[part] = np.sqrt(explained) * (x[part] @ b)
        t[part] += np.sqrt(1 - explained) * rng.standard_normal(count)
    return np.rint(x * 1e6) / 1e6, np.maximum(np.rint(2011 - np.exp(2.1 + 0.75 * t)), 1922.0)
