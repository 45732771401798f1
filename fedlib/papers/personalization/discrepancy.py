"""How different clients are, from their gradients at one model, and how much of it is chance.

``ζ_ij(w) = ‖∇f_i(w) − ∇f_j(w)‖²`` is defined with full gradients (Section 3.1 of the paper).
Minibatches of size M would add ``(tr Σ_i + tr Σ_j)/M`` to every entry off the diagonal. Here each
client computes the gradients of two halves of its samples: their mean is the full gradient, and
their difference says how much of it is chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.data import Batch, FederatedDataset, padded
from fedlib.engine.draws import Array
from fedlib.engine.rng import stream
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError


@dataclass(frozen=True)
class Half(Generic[Array]):
    """Half of every client's samples.

    Attributes
    ----------
    rows, weight
        ``[R * N, longest]`` row numbers and what they count; padding counts nothing.
    sizes
        ``[R * N]``, how many samples it has.
    """

    rows: Array
    weight: Array
    sizes: Array


def halves(
    data: FederatedDataset, seeds: Sequence[int], number: int = 0
) -> tuple[Half[np.ndarray], Half[np.ndarray]]:
    """Cut every client's samples in two, at random; anew for each ``number``.

    Raises
    ------
    FedlibError
        For a client with a single sample.
    """
    pieces = []
    for seed in seeds:
        for n, part in enumerate(data.of(seed).parts):
            if len(part) < 2:
                raise FedlibError(
                    f"Client {n} has one sample, which cannot be cut in two. Give every client at "
                    "least two."
                )
            order = stream(seed, "halves", number, n).permutation(part)
            pieces.append(np.array_split(order, 2))
    first, second = (
        Half(*padded(parts), np.array([len(part) for part in parts]))
        for parts in zip(*pieces, strict=True)
    )
    return first, second


def gradients(task: Task, w: Tensor, half: Half[Tensor]) -> Tensor:
    """Return every client's gradient on its half at its run's model.

    Parameters
    ----------
    w
        ``[R, P]``.
    half
        On the device of ``w``.

    Returns
    -------
    Tensor
        ``[R, N, P]``.
    """
    copies, longest = half.rows.shape
    step = max(1, task.chunk // (longest * task.data.x[0].numel()))
    theta, weight = w.repeat_interleave(copies // len(w), 0), half.weight.to(task.data.dtype)
    batches = map(Batch, half.rows.split(step), weight.split(step))
    slopes = [task.grad(*piece) for piece in zip(theta.split(step), batches, strict=True)]
    return torch.cat(slopes).view(len(w), -1, task.size)


@dataclass(frozen=True)
class Estimate:
    """What gradients of two halves say about the clients.

    Attributes
    ----------
    a, b
        Gradients of the halves, ``[R, N, P]``.
    sizes
        Samples of each client in its halves, two tensors ``[R, N]``.
    """

    a: Tensor
    b: Tensor
    sizes: tuple[Tensor, Tensor]

    @property
    def n(self) -> Tensor:
        """Samples of each client, ``[R, N]``."""
        return self.sizes[0] + self.sizes[1]

    @property
    def full(self) -> Tensor:
        """Full gradients, ``[R, N, P]``."""
        first, second = (size.unsqueeze(2).to(self.a) for size in self.sizes)
        return (first * self.a + second * self.b) / (first + second)

    def zeta(self) -> Tensor:
        """Return ``ζ_ij`` of the full gradients, ``[R, N, N]``."""
        return squared_distances(self.full)

    def unbiased(self) -> Tensor:
        """Return ``⟨a_i − a_j, b_i − b_j⟩``, whose mean has no noise in it, ``[R, N, N]``.

        Entries may be negative where clients are alike.
        """
        a, b = (g - g.mean(1, keepdim=True) for g in (self.a, self.b))
        cross = a @ b.mT
        diagonal = cross.diagonal(dim1=1, dim2=2)
        return diagonal.unsqueeze(2) + diagonal.unsqueeze(1) - cross - cross.mT

    def noise(self) -> Tensor:
        """Return ``tr Σ``, the variance of one sample's gradient, the mean over clients, ``[R]``.

        ``E‖a_i − b_i‖² = tr Σ_i (1/n_a + 1/n_b)``.
        """
        squares = (self.a - self.b).square().sum(2)
        first, second = (size.to(squares) for size in self.sizes)
        return (squares / (1 / first + 1 / second)).mean(1)


def estimate(task: Task, w: Tensor, drawn: tuple[Half[Tensor], Half[Tensor]]) -> Estimate:
    """Return what the clients' gradients at ``w[R, P]`` say, from halves drawn before."""
    (a, b), (one, other) = (gradients(task, w, half) for half in drawn), drawn
    return Estimate(a, b, (one.sizes.view(len(w), -1), other.sizes.view(len(w), -1)))


def squared_distances(g: Tensor) -> Tensor:
    """Return ``‖g_i − g_j‖²`` through the Gram matrix, ``[R, N, N]`` from ``[R, N, P]``.

    Gradients are centred first, so that what they have in common does not cancel digits.
    """
    g = g - g.mean(1, keepdim=True)
    gram = g @ g.mT
    diagonal = gram.diagonal(dim1=1, dim2=2)
    result = (diagonal.unsqueeze(2) + diagonal.unsqueeze(1) - 2 * gram).clamp(min=0)
    return result - torch.diag_embed(result.diagonal(dim1=1, dim2=2))
