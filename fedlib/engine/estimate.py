"""Estimates of the constants in a theorem: smoothness and gradient noise of a task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from fedlib.engine.checks import check_between, check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError


def smoothness(
    task: Any,
    theta: torch.Tensor,
    client: int | None = None,
    iterations: int = 100,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> float:
    """Return the largest absolute eigenvalue of the Hessian at ``theta``, by power iteration.

    Hessian-vector products are central differences of ``task.client_gradients``. The result
    approaches the spectral norm at this point from below, and a point gives a lower estimate of the
    smoothness constant L.

    Parameters
    ----------
    task
        Anything with ``client_gradients(theta[1, P]) -> [N, P]``.
    theta
        ``[1, P]``, where to look.
    client
        ``None`` for the average objective f, a number for that client's objective.
    iterations, tolerance
        Stop after this many products, or when the estimate moves by less than this fraction.
    seed
        Of the starting direction.
    """
    check_whole_number("iterations", iterations)
    check_whole_number("seed", seed, 0)
    check_between("tolerance", tolerance, 0)
    check_whole_number("client", 0 if client is None else client, 0)
    start = stream(seed, "power iteration").standard_normal(theta.shape)
    v = torch.as_tensor(start, dtype=theta.dtype)
    v = v.to(theta.device)
    v /= v.norm()
    scale = max(1.0, theta.norm().item())
    eps = torch.finfo(theta.dtype).eps ** (1 / 3) * scale
    estimate = 0.0
    for _ in range(iterations):
        change = task.client_gradients(theta + eps * v) - task.client_gradients(theta - eps * v)
        if client is not None and client >= len(change):
            raise FedlibError(f"Clients are numbers from 0 to {len(change) - 1}; got {client}.")
        product = change / (2 * eps)
        product = product.mean(0) if client is None else product[client]
        previous, estimate = estimate, product.norm().item()
        if estimate == 0 or abs(estimate - previous) <= tolerance * estimate:
            break
        v = (product / estimate).reshape(theta.shape)
    return estimate


def gradient_noise(task: Any, theta: torch.Tensor, batches: Iterable[Any]) -> np.ndarray:
    """Return each client's mean squared minibatch error, ``[N]``; sigma^2 is its maximum.

    Parameters
    ----------
    task
        Anything with ``grad(theta[N, P], batch) -> [N, P]`` and
        ``client_gradients(theta[1, P]) -> [N, P]``.
    theta
        ``[1, P]``, where to look.
    batches
        Draws, each with one row of samples for every client, in the order of the clients.
    """
    exact = task.client_gradients(theta)
    everyone = theta.expand(len(exact), -1).contiguous()
    errors = [((task.grad(everyone, b) - exact) ** 2).sum(1) for b in batches]
    if not errors:
        raise FedlibError("No batches came; expected at least one draw for every client.")
    return torch.stack(errors).mean(0).double().cpu().numpy()
