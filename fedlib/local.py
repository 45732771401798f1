"""Local SGD for many copies at once: the one hot path of the library."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlib.tasks import Batch, Task


def local_sgd(
    task: Task, theta: Tensor, batches: Sequence[Batch], lr: float | Tensor, copies: int = 0
) -> Tensor:
    """Run plain SGD on every row of ``theta``, one batch a step.

    Parameters
    ----------
    task
        Gives the loss.
    theta
        ``[C, P]`` starting points; left unchanged.
    batches
        One :class:`~fedlib.tasks.Batch` of ``C`` rows for each step.
    lr
        Step size, a number or one a copy ``[C]``.
    copies
        At most this many copies are worked on at a time, which bounds the memory; 0 chooses.

    Returns
    -------
    Tensor
        ``[C, P]``: row ``c`` is ``theta[c]`` after ``len(batches)`` steps.
    """
    out = theta.detach().clone()
    copies = copies or _copies_at_once(task, batches)
    for part in torch.arange(len(theta)).split(copies):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        rate = lr[rows] if isinstance(lr, Tensor) and lr.dim() else float(lr)
        _descend(task, out[rows], [_rows(batch, rows) for batch in batches], rate)
    return out


def _descend(task: Task, theta: Tensor, batches: list[Batch], rate: float | Tensor) -> None:
    """Update ``theta`` in place. Each layer is a leaf that shares theta's memory.

    Splitting one flat leaf would copy the whole gradient once a layer in the backward pass.
    """
    views = task.model.views(theta)
    leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
    for batch in batches:
        gradients = torch.autograd.grad(task.losses(leaves, batch).sum(), list(leaves.values()))
        for view, gradient in zip(views.values(), gradients, strict=True):
            if task.l2:
                gradient = gradient + task.l2 * view
            if isinstance(rate, float):
                view.sub_(gradient, alpha=rate)
            else:
                view.sub_(rate.view(-1, *[1] * (view.dim() - 1)) * gradient)


def _rows(batch: Batch, rows: slice) -> Batch:
    pick = lambda t: None if t is None else t[rows]  # noqa: E731
    return Batch(batch.rows[rows], pick(batch.weight), pick(batch.jitter))


def _copies_at_once(task: Task, batches: Sequence[Batch]) -> int:
    """Keep gradients and gathered features of one step within some 256 MB."""
    if not batches:
        return 1
    floats = 2 * task.size + batches[0].rows.shape[1] * 4 * task.data.x[0].numel()
    return max(1, 64_000_000 // floats)
