"""Mixing: what happens between local steps is a weight matrix times the rows of ``theta``.

A run has ``C`` rows, its copies. Averaging, a hierarchy, personalization and the shuffling of
models differ in the matrix alone, and :func:`mix` is the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.errors import FedlibError


@dataclass(frozen=True)
class Groups:
    """Averages within equal groups of neighbouring rows: ``count`` groups of ``size`` rows each.

    This is the ``[count, count * size]`` matrix with a block of weights in every row, never
    written down. Several, one after the other, are a hierarchy.

    Attributes
    ----------
    count
        Groups in a run, ``M``.
    size
        Rows in a group; a run has ``C = count * size``.
    weights
        ``[C]``, or ``[R, C]`` for each run its own; in the order of the rows. None is the mean.
    """

    count: int
    size: int
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        check_groups(self)


def mix(theta: Tensor, W: Tensor | Groups) -> Tensor:
    """Return the rows of every run, mixed: ``W`` times ``theta``.

    Parameters
    ----------
    theta
        ``[R, C, P]``, or ``[R * C, P]`` with the rows of a run next to each other.
    W
        Weights ``[R, M, C]``, or ``[M, C]`` for all runs: row ``m`` of the result is
        ``Σ_c W[m, c] theta[c]``. ``M = 1`` is federated averaging, one row a group a hierarchy,
        ``M = C`` personalization. Integers ``[R, C]``, or ``[C]`` for all runs, are a
        permutation: row ``c`` of the result is row ``W[c]``. Or :class:`Groups`.

    Returns
    -------
    Tensor
        ``[R, M, P]``; floating-point weights are taken in theta's type and on its device.

    Raises
    ------
    FedlibError
        When the shapes do not fit.
    """
    if isinstance(W, Groups):
        if not isinstance(theta, Tensor) or not theta.is_floating_point():
            raise FedlibError(f"theta is real rows [R, C, P] or [R C, P]; got {theta!r}.")
        return _mix_groups(_runs(theta, W.count * W.size), W)
    check_weights(theta, W)
    theta, weights = _runs(theta, W.shape[-1]), W.is_floating_point()
    if W.dim() == (3 if weights else 2) and len(W) != len(theta):
        raise FedlibError(f"W is for {len(W)} runs, theta has {len(theta)} of {W.shape[-1]} rows.")
    if weights:
        return torch.matmul(W.to(theta), theta)
    order = W.to(theta.device).long().expand(len(theta), -1)
    return theta.gather(1, order.unsqueeze(2).expand(-1, -1, theta.shape[2]))


def average(theta: Tensor, q: Tensor) -> Tensor:
    """Return one row a run, ``Σ_c q[c] theta[c]``: :func:`mix` with ``M = 1``.

    Parameters
    ----------
    theta
        ``[R, C, P]`` or ``[R * C, P]``.
    q
        ``[R, C]``, as :meth:`~fedlib.population.participation.Participation.cohort` gives them.

    Returns
    -------
    Tensor
        ``[R, P]``.
    """
    if not isinstance(q, Tensor):
        raise FedlibError(f"q is a {type(q).__name__}. Expected a tensor.")
    if q.dim() != 2:
        raise FedlibError(f"q is {list(q.shape)}. Expected weights [R, C], one row a run.")
    return mix(theta, q.unsqueeze(1)).squeeze(1)


def check_groups(groups: Groups) -> None:
    """Refuse groups of no rows, and weights that are not one for each row."""
    check_whole_number("count", groups.count)
    check_whole_number("size", groups.size)
    weights, rows = groups.weights, groups.count * groups.size
    fits = isinstance(weights, Tensor) and weights.dim() in (1, 2) and weights.shape[-1] == rows
    if weights is not None and not fits:
        came = list(weights.shape) if isinstance(weights, Tensor) else repr(weights)
        raise FedlibError(
            f"The weights of {groups.count} groups of {groups.size} rows are {came}. Expected a "
            f"tensor [{rows}], or [R, {rows}]."
        )


def check_weights(theta: Tensor, W: Tensor) -> None:
    """Refuse weights that are none, by shape and type: no number of theirs is read."""
    for name, value in (("theta", theta), ("W", W)):
        if not isinstance(value, Tensor):
            raise FedlibError(f"{name} is a {type(value).__name__}. Expected a tensor.")
    axes = (2, 3) if W.is_floating_point() else (1, 2)
    if W.dim() not in axes or W.dtype == torch.bool or not theta.is_floating_point():
        raise FedlibError(
            f"W is {list(W.shape)} of {W.dtype}, theta of {theta.dtype}. Expected real rows, and "
            "real weights [R, M, C] or [M, C], or a permutation in whole numbers [R, C] or [C]."
        )


def _mix_groups(theta: Tensor, groups: Groups) -> Tensor:
    blocks = theta.unflatten(1, (groups.count, groups.size))  # [R, M, size, P]
    if groups.weights is None:
        return blocks.mean(2)
    weights = groups.weights.to(theta).expand(len(theta), -1).reshape(-1, 1, groups.size)
    return torch.bmm(weights, blocks.flatten(0, 1)).view(len(theta), groups.count, -1)


def _runs(theta: Tensor, C: int) -> Tensor:
    """Return ``theta[R, C, P]``."""
    flat = theta.dim() == 2
    fits = len(theta) % C == 0 if flat else theta.dim() == 3 and theta.shape[1] == C
    if not fits:
        raise FedlibError(
            f"theta {tuple(theta.shape)} does not fit weights of {C} rows a run. Expected "
            f"[R, {C}, P], or [R * {C}, P] with the rows of a run next to each other."
        )
    return theta.unflatten(0, (-1, C)) if flat else theta
