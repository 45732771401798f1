"""Losses: what a prediction costs, one number a sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def _cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _half_square(out: Tensor, y: Tensor) -> Tensor:
    target = y.unsqueeze(-1) if y.is_floating_point() else 0.0
    return 0.5 * (out - target).square().sum(-1)


def _logistic(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out.squeeze(-1), y.to(out.dtype), reduction="none")


LOSSES = {
    "cross_entropy": _cross_entropy,
    "half_square": _half_square,
    "logistic": _logistic,
}
