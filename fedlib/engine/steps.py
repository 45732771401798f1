"""Local rules: what a copy does with its gradient, apart from how fast that is computed.

A rule is a function of what the rows see :class:`Now`. It returns their next parameters, one line
as the papers write it::

    def proximal(now):
        pull = 0.1 * (now.theta - now.extras["anchor"])
        return now.theta - now.rate * (now.gradient + pull)

    y = local_sgd(task, x, batches, lr, step=proximal, extras={"anchor": x})

It sees some of the rows at a time, on one of several threads. So it computes with whole rows,
leaves ``now.theta`` and ``now.gradient`` as they are, and keeps nothing outside ``now.extras``.

The rules below change what ``now`` says and hand it to the next one, ``then``, at last to
:func:`sgd`: ``clip(1.0, then=momentum(0.9))``. Docstrings name the ``extras`` they need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlib.engine.checks import check_between, check_positive
from fedlib.engine.data import Batch


@dataclass(frozen=True)
class Now:
    """What a rule sees of the ``C`` rows it is called for.

    Attributes
    ----------
    theta
        ``[C, P]``, where the rows stand.
    gradient
        ``[C, P]`` of each row's regularised loss on its batch.
    t
        The step's number, from 0 in every call of ``local_sgd``.
    rate
        The step size, a number or ``[C, 1]``.
    extras
        The rows' own tensors by name, ``[C, ...]``. They are parts of the caller's: what is
        written into them is there after the call. A new entry lasts until the last step.
    batch
        The samples of this step.
    grad
        ``grad(point[C, P]) -> [C, P]``: the gradient elsewhere, on the same batch.
    """

    theta: Tensor
    gradient: Tensor
    t: int
    rate: float | Tensor
    extras: dict[str, Tensor]
    batch: Batch
    grad: Callable[[Tensor], Tensor]


Step = Callable[[Now], Tensor]


def sgd(now: Now) -> Tensor:
    """Step against the gradient; ``local_sgd`` without a rule does the same, faster."""
    return now.theta - now.rate * now.gradient


def proximal(mu: float | None = None, then: Step = sgd) -> Step:
    """Pull the rows towards ``anchor[C, P]``: adds ``mu (theta - anchor)``, as FedProx does.

    Without a number it is ``mu[C, 1]``, a row's own.
    """
    if mu is not None:
        check_between("mu", mu, 0)

    def step(now: Now) -> Tensor:
        strength = now.extras["mu"] if mu is None else mu
        pull = strength * (now.theta - now.extras["anchor"])
        return then(replace(now, gradient=now.gradient + pull))

    return step


def corrected(then: Step = sgd) -> Step:
    """Add ``correction[C, P]`` to the gradient; SCAFFOLD's is ``c - c_i``."""

    def step(now: Now) -> Tensor:
        return then(replace(now, gradient=now.gradient + now.extras["correction"]))

    return step


def svrg(then: Step = sgd) -> Step:
    """Subtract ``grad(anchor[C, P])`` on the batch and add ``full[C, P]``, its gradient on all."""

    def step(now: Now) -> Tensor:
        noise = now.grad(now.extras["anchor"]) - now.extras["full"]
        return then(replace(now, gradient=now.gradient - noise))

    return step


def momentum(beta: float, then: Step = sgd) -> Step:
    """Follow ``v <- beta v + gradient``; give ``velocity[C, P]`` to keep v over the rounds."""
    check_between("beta", beta, 0, 1)

    def step(now: Now) -> Tensor:
        v = now.extras.setdefault("velocity", torch.zeros_like(now.theta))
        v.mul_(beta).add_(now.gradient)
        return then(replace(now, gradient=v))

    return step


def clip(norm: float, then: Step = sgd) -> Step:
    """Shorten every row's gradient to at most ``norm``."""
    check_positive("norm", norm)

    def step(now: Now) -> Tensor:
        shrink = (norm / now.gradient.norm(dim=1, keepdim=True)).clamp(max=1)
        return then(replace(now, gradient=now.gradient * shrink))

    return step


def masked(then: Step = sgd) -> Step:
    """Move only where ``mask[C, P]`` is true; ``[C, 1]`` for whole rows."""

    def step(now: Now) -> Tensor:
        return torch.where(now.extras["mask"], then(now), now.theta)

    return step
