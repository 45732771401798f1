"""Losses: what a prediction costs, which targets fit it, and what an evaluation reports."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlib.errors import FedlibError


def _cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _half_square(out: Tensor, y: Tensor) -> Tensor:
    target = y if y.dim() == out.dim() else y.unsqueeze(-1)
    return 0.5 * (out - target).square().sum(-1)


def _logistic(out: Tensor, y: Tensor) -> Tensor:
    """Return ``-log σ(±out)``; PyTorch's own cross-entropy of two is rounded by place in memory."""
    return -F.logsigmoid((2 * y.to(out.dtype) - 1) * out.squeeze(-1))


TOP5_ABOVE = 10  # classes; with more of them the five likeliest are looked at, too
LOSSES = {
    "cross_entropy": _cross_entropy,
    "half_square": _half_square,
    "logistic": _logistic,
}


def tally(loss_name: str, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sums over samples from which :func:`values` follow.

    Parameters
    ----------
    loss_name
        A key of ``LOSSES``.
    out
        Predictions ``[copies, B, K]``.
    y
        Targets ``[copies, B]``, or ``[copies, B, K]`` for half squares.
    weight
        How much each sample counts, float64 ``[B]``; None counts each once.

    Returns
    -------
    Tensor
        Float64 ``[sums, copies]``: the loss; for classes also how many are right, and for more
        than ten of them how often the right one is among the five likeliest; for two classes with
        one output also the hits, the samples taken for class 1, and those of class 1.
    """
    counts = [LOSSES[loss_name](out, y)]
    if loss_name != "half_square":
        guess = (out.squeeze(-1) > 0).long() if loss_name == "logistic" else out.argmax(-1)
        counts.append(guess == y)
        if out.shape[-1] > TOP5_ABOVE:
            counts.append((out.topk(5).indices == y.unsqueeze(-1)).any(-1))
        if loss_name == "logistic":
            counts += [guess * y, guess, y]
    each = 1.0 if weight is None else weight
    return torch.stack([(count.double() * each).sum(1) for count in counts])


def values(sums: Tensor, samples: float | Tensor) -> dict[str, Tensor]:
    """Return what an evaluation reports, ``[copies]`` each, from sums of :func:`tally`.

    Returns
    -------
    dict
        ``"loss"``; for classes ``"accuracy"``; for more than ten ``"top5"``; for two classes with
        one output ``"f1"``, which is 0 when nothing is of class 1 and nothing is taken for it.
    """
    metrics = dict(zip(("loss", "accuracy"), sums[:2] / samples, strict=False))
    if len(sums) == 3:
        metrics["top5"] = sums[2] / samples
    if len(sums) > 3:
        hits, taken, there = sums[2:]
        metrics["f1"] = torch.where(taken + there > 0, 2 * hits / (taken + there), 0.0)
    return metrics


def auroc(out: Tensor, y: Tensor) -> Tensor:
    """Return how often a sample of class 1 has the larger output than one of class 0, ``[copies]``.

    The area under the curve of true against false positives. Equal outputs count one half; so
    does a missing class.

    Parameters
    ----------
    out
        ``[copies, B]``.
    y
        Classes 0 and 1, ``[B]``.
    """
    ordered, out = out.sort(1).values, out.contiguous()
    below, upto = (torch.searchsorted(ordered, out, right=right) for right in (False, True))
    ones = (y == 1).double()
    n, m = ones.sum(), (1 - ones).sum()
    ranks = ((below + upto + 1) / 2 * ones).sum(1)
    return torch.where(n * m > 0, (ranks - n * (n + 1) / 2) / (n * m), 0.5)


def check_targets(loss_name: str, y: Tensor, outputs: int, split: str = "train") -> None:
    """Refuse targets that do not fit the loss or the model's number of outputs.

    Raises
    ------
    FedlibError
        Saying what came, what was expected and what to do.
    """
    came = f"'{loss_name}' with {outputs} outputs, {split} targets {[*y.shape]} of type {y.dtype}"
    if loss_name == "half_square":
        if not y.is_floating_point():
            raise FedlibError(
                f"{came}: half squares need real targets, y.astype('float32'). For residual "
                "models without a target give y=None; for classes take 'cross_entropy'."
            )
        if not torch.isfinite(y).all():
            raise FedlibError(f"{came}: some are nan or infinite.")
        zero = y.dim() == 1 and not y.any()  # pulls every output to zero, whatever their number
        expected = [len(y)] if outputs == 1 else [len(y), outputs]
        if [*y.shape] != expected and not zero:
            raise FedlibError(f"{came}: expected shape {expected}.")
        return
    if y.dim() != 1:
        columns = "argmax(1), if a column is a class" if y.shape[-1] > 1 else "squeeze(1)"
        raise FedlibError(f"{came}: expected one class a sample, [{len(y)}]. Try y.{columns}.")
    if loss_name == "logistic":
        if outputs != 1:
            raise FedlibError(f"{came}: it takes one output. For {outputs} use 'cross_entropy'.")
        if not ((y == 0) | (y == 1)).all():
            raise FedlibError(
                f"{came}: classes are 0 and 1; got {y.unique()[:5].tolist()}. For one class "
                "against all others: y == 1."
            )
        return
    if y.is_floating_point():
        raise FedlibError(f"{came}: classes are whole numbers. If y holds some: y.astype(int).")
    if y.min() < 0 or y.max() >= outputs:
        raise FedlibError(
            f"{came}: classes are numbered 0 to {outputs - 1}; got {int(y.min())} to "
            f"{int(y.max())}. If they count from 1, take y - 1; samples without a label are left "
            "out before x and y are given."
        )
