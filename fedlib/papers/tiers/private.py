"""TDCD with private labels (Remark 2 of the paper): one silo knows them and sends derivatives.

The loss of a sample depends on a silo's model through the sum of the embeddings alone. Whoever
holds the label can send ``ℓ'(Φ; y)``, and the silo goes on by the chain rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlib.engine.checks import check_flag
from fedlib.engine.data import Batch
from fedlib.engine.local import local_sgd
from fedlib.engine.losses import LOSSES
from fedlib.papers.tiers.algorithm import TDCD, Frozen, unpadded


@dataclass(frozen=True)
class LabelPrivateTDCD(TDCD):
    """TDCD whose steps follow derivatives from the silo that holds the labels.

    Parameters
    ----------
    lr, local_steps, batch_size
        As for :class:`~fedlib.papers.tiers.algorithm.TDCD`.
    fresh
        Ask for new derivatives before every local step: the iterates are those of
        :class:`~fedlib.papers.tiers.algorithm.TDCD`. Otherwise those of the round's start serve
        for all Q steps.
    """

    fresh: bool = True

    def __post_init__(self) -> None:
        check_flag("fresh", self.fresh)
        super().__post_init__()

    def walk(self, local: Frozen, theta: Tensor, batch: Batch, rate: float | Tensor) -> Tensor:
        """Take the Q local steps of all copies ``[copies, P_j]`` without looking at a label."""
        for q in range(self.local_steps):
            if q == 0 or self.fresh:
                driven = Driven.by(derivatives(local, theta, batch), local)
            theta = local_sgd(driven, theta, [batch], rate)
        return theta


class Driven(Frozen):
    """The local problem of a silo that was told the derivative of the loss, not the label.

    ``foreign`` holds ``ℓ'[B, E]``, and the gradient of ``<h_j(θ), ℓ'>`` is that of the loss.
    """

    @classmethod
    def by(cls, derivative: Tensor, local: Frozen) -> Driven:
        """Replace labels and foreign sum of a local problem by derivatives ``[B, E]``."""
        return cls(local.model, local.data.x, local.data.y, derivative, local.loss_name)

    def losses(self, theta: Tensor | dict[str, Tensor], batch: Batch) -> Tensor:
        """Return every copy's product with the derivatives of its rows, ``[copies]``."""
        own = self.model.apply(theta, self.data.x[batch.rows])
        return batch.mean((own * self.foreign[batch.rows]).sum(-1))


def derivatives(local: Frozen, theta: Tensor, batch: Batch) -> Tensor:
    """Return ``ℓ'(Φ_j + Φ_{-j}; y)`` in the minibatch's order, ``[B, E]``: the label holder."""
    with torch.no_grad():
        own = local.model.apply(theta, local.data.x[batch.rows])
    out = (own + local.foreign[batch.rows]).requires_grad_()
    total = LOSSES[local.loss_name](out, local.data.y[batch.rows]).sum()
    (d,) = torch.autograd.grad(total, out)
    return unpadded(d, batch, len(local.foreign))
