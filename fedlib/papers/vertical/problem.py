"""A linear model whose features lie with several parties: what is minimised, and its gradient.

The objective of Zhang, Gu, Deng and Huang (AAAI 2021), problem (P)::

    f(w) = 1/n Σ_i L(wᵀx_i, y_i) + λ Σ_l g(w_l)

where party ``l`` holds the columns ``blocks[l]`` of the data and the same entries of ``w``.
Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from fedlib.engine.checks import check_between
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown

LOSSES = ("logistic", "squared", "robust")
REGULARISERS = ("l2", "nonconvex", "none")


@dataclass(frozen=True)
class Problem:
    """Data split by columns, a loss and a regulariser.

    Parameters
    ----------
    x
        Features ``[n, d]``, an array or a ``scipy.sparse`` matrix. Kept as float64, sparse ones in
        CSR form with the columns of every row in increasing order.
    y
        ``[n]``: -1 or +1 for the logistic loss, real numbers for the others.
    blocks
        The columns of each of the q parties; together they are every column, each once.
    loss
        ``"logistic"``: ``log(1 + exp(-yz))``; ``"squared"``: ``(z - y)²``; ``"robust"``:
        ``log(1 + (y - z)²/2)``.
    lam
        λ, at least 0.
    regulariser
        ``"l2"``: ``g(w) = ‖w‖²/2``; ``"nonconvex"``: ``½ Σ w²/(1 + w²)``; ``"none"``: 0.

    Raises
    ------
    FedlibError
        When data, labels or blocks do not fit, saying what came and what was expected.

    Notes
    -----
    Source: problems (13) (logistic, l2), (7) (logistic, nonconvex), (17) (squared, l2) and (18)
    (robust, none) of the paper.
    """

    x: Any  # an array, or sparse rows
    y: np.ndarray
    blocks: tuple[np.ndarray, ...]
    loss: str = "logistic"
    lam: float = 1e-4
    regulariser: str = "l2"

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        if self.regulariser not in REGULARISERS:
            raise unknown("regulariser", self.regulariser, REGULARISERS)
        check_between("lam", self.lam, 0)
        x = checked_features(self.x)
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "y", checked_labels(self.y, x.shape[0], self.loss))
        object.__setattr__(self, "blocks", checked_blocks(self.blocks, x.shape[1]))

    @property
    def n(self) -> int:
        """Number of samples."""
        return self.x.shape[0]

    @property
    def d(self) -> int:
        """Number of features, all parties together."""
        return self.x.shape[1]

    @property
    def q(self) -> int:
        """Number of parties."""
        return len(self.blocks)

    def scores(self, w: np.ndarray) -> np.ndarray:
        """Return ``wᵀx_i`` for all samples, ``[n]``."""
        if np.shape(w) != (self.d,):
            raise FedlibError(f"w is one number a feature, [{self.d}]; got shape {np.shape(w)}.")
        return self.x @ w

    def theta(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``ϑ = dL/dz`` at scores ``z``, one by one."""
        return theta(self.loss, z, y)

    def losses(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return ``L(z, y)``, one by one."""
        if self.loss == "logistic":
            return np.logaddexp(0.0, -y * z)
        if self.loss == "squared":
            return (z - y) ** 2
        return np.log1p((y - z) ** 2 / 2)

    def penalty(self, w: np.ndarray) -> float:
        """Return ``λ g(w)``."""
        if self.regulariser == "none":
            return 0.0
        square = np.square(w)
        each = square if self.regulariser == "l2" else square / (1 + square)
        return self.lam * 0.5 * float(each.sum())

    def penalty_gradient(self, w: np.ndarray) -> np.ndarray:
        """Return ``λ ∇g(w)``, coordinate by coordinate."""
        if self.regulariser == "none":
            return np.zeros_like(w)
        return self.lam * (w if self.regulariser == "l2" else w / (1 + w**2) ** 2)

    def objective(self, w: np.ndarray) -> float:
        """Return ``f(w)``."""
        return float(self.losses(self.scores(w), self.y).mean()) + self.penalty(w)

    def gradient(self, w: np.ndarray) -> np.ndarray:
        """Return ``∇f(w)``, ``[d]``."""
        return self.x.T @ (self.theta(self.scores(w), self.y) / self.n) + self.penalty_gradient(w)


def theta(loss: str, z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return ``ϑ = dL/dz`` elementwise: the scalar that a dominator sends backward.

    ``-y σ(-yz)`` for the logistic loss, ``2(z - y)`` for squares, and ``-r/(1 + r²/2)`` with
    ``r = y - z`` for the robust loss.
    """
    if loss == "logistic":
        return -y / (1 + np.exp(np.minimum(y * z, 700.0)))  # exp overflows above 709
    if loss == "squared":
        return 2 * (z - y)
    return (z - y) / (1 + (z - y) ** 2 / 2)


def split_features(d: int, q: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return a random partition of ``range(d)`` into q blocks of nearly equal size, each sorted."""
    if not 1 <= q <= d:
        raise FedlibError(f"{q} parties for {d} features. Every party holds at least one.")
    order = stream(seed, "feature partition").permutation(d)
    return tuple(np.sort(part) for part in np.array_split(order, q))


def checked_features(x: Any) -> Any:
    """Return features as float64, rows in one piece, having refused what are none."""
    if sparse.issparse(x):
        if not hasattr(x, "check_format"):
            raise FedlibError(f"Sparse rows are in format csr; got {x.format}: x.tocsr().")
        try:
            x.check_format(full_check=True)
        except ValueError as error:
            raise FedlibError(
                f"The sparse rows do not fit: {error}. Columns are numbered from 0 to "
                f"{x.shape[1] - 1}; files often count from 1."
            ) from error
        x = sparse.csr_array(x).astype(np.float64, copy=False)
        if not x.has_canonical_format:
            x = x.copy()  # what came stays as it is
            x.sum_duplicates()
        values = x.data
    else:
        values = np.asarray(x)
        if values.ndim != 2 or values.dtype.kind not in "fiub":
            raise FedlibError(
                f"x is an array of numbers [n, d]; got shape {values.shape} of {values.dtype}."
            )
        x = values = np.ascontiguousarray(values, dtype=np.float64)
    if not all(x.shape):
        raise FedlibError(f"x is {x.shape}: at least one sample and one feature are needed.")
    if not np.isfinite(values).all():
        entries = sparse.coo_array(x)
        bad = np.flatnonzero(~np.isfinite(entries.data))[0]
        row, column = (axis[bad] for axis in entries.coords)
        raise FedlibError(
            f"Feature {column} of sample {row} is {entries.data[bad]}. Fill missing values in, or "
            "leave such samples out, before the data is split."
        )
    return x


def checked_labels(y: np.ndarray, n: int, loss: str) -> np.ndarray:
    """Return labels as float64 ``[n]``, having refused what the loss cannot use."""
    y = np.asarray(y)
    if y.shape != (n,) or y.dtype.kind not in "fiub":
        raise FedlibError(
            f"y is {y.shape} of {y.dtype}; expected a number for each of {n} samples."
        )
    y = y.astype(np.float64)
    if not np.isfinite(y).all():
        raise FedlibError(f"Label {np.flatnonzero(~np.isfinite(y))[0]} is missing or infinite.")
    if loss == "logistic" and not np.isin(y, (-1.0, 1.0)).all():
        labels = np.unique(y)
        more = ", ..." if len(labels) > 4 else ""
        raise FedlibError(
            "The logistic loss takes labels -1 and +1; got "
            f"{', '.join(f'{value:g}' for value in labels[:4])}{more}. From 0 and 1: 2 * y - 1."
        )
    return y


def checked_blocks(blocks: Sequence[np.ndarray], d: int) -> tuple[np.ndarray, ...]:
    """Return each party's columns as int64, having refused what is no partition."""
    if isinstance(blocks, str) or not isinstance(blocks, Sequence) or not len(blocks):
        raise FedlibError(
            "blocks are the columns of each party, such as (array([0, 2]), array([1])). "
            f"For q parties at random: split_features({d}, q)."
        )
    kept = tuple(np.asarray(block) for block in blocks)
    for party, block in enumerate(kept):
        if block.ndim != 1 or block.dtype.kind not in "iu" or not len(block):
            raise FedlibError(
                f"Party {party} holds {block.tolist()!r}; expected a list of columns, at least one."
            )
    used = np.concatenate(kept).astype(np.int64)
    inside = used[(used >= 0) & (used < d)]
    count = np.bincount(inside, minlength=d)
    for wrong, what in (
        (used[(used < 0) | (used >= d)], f"do not exist (there are {d})"),
        (np.flatnonzero(count > 1), "are held twice"),
        (np.flatnonzero(count == 0), "are held by nobody"),
    ):
        if len(wrong):
            some = wrong[:5].tolist()
            raise FedlibError(f"Columns {some} {what}. Every column needs exactly one party.")
    return tuple(block.astype(np.int64) for block in kept)
