"""The paper's toy (appendix B): three quadratic bowls, one client a round, everything exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlib.engine.checks import check_whole_number
from fedlib.engine.data import FederatedDataset
from fedlib.engine.models import location
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.bound import as_array, check_constants


def toy_task() -> Task:
    """Three quadratic bowls in the plane, ``F_n(x) = ½‖x - z_n‖²``, in float64.

    The centres are (-1, 0), (1, 0) and (0, √3), so the optimum is (0, √3/3). From the
    participation paper, appendix B.
    """
    z = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, np.sqrt(3.0)]])
    data = FederatedDataset.build(z, None, [np.array([n]) for n in range(3)])
    return Task(location(2), data, "half_square")


def toy_run(
    z: Any,
    start: Any,
    gamma: float,
    eta: float,
    rounds: int,
    interval: int,
    local_steps: int = 1,
) -> np.ndarray:
    """Return the path ``x[rounds + 1, D]`` of Algorithm 1 on the toy, by its closed-form round.

    I exact steps of client n from x end at ``z_n + (1 - gamma)^I (x - z_n)``.
    """
    check_constants(gamma=gamma, eta=eta)
    check_whole_number("rounds", rounds, 0)
    check_whole_number("interval", interval)
    check_whole_number("local_steps", local_steps)
    z, x = as_array(z), as_array(start).copy()
    if not z.ndim or not len(z):
        raise FedlibError(f"z holds a minimiser for each client, [N, D]; got {[*z.shape]}.")
    path, reference = [x], x
    for t in range(rounds):
        x = x + (1 - (1 - gamma) ** local_steps) * (z[t % len(z)] - x)
        if (t + 1) % interval == 0:
            x = reference + eta * (x - reference)
            reference = x
        path.append(x)
    return np.array(path)


def toy_fixed_point(z: Any, gamma: float, local_steps: int = 1) -> np.ndarray:
    """Return where a cycle of the toy ends where it began, for every amplification factor.

    Parameters
    ----------
    z
        ``[N, D]``, the clients' minimisers in the order of their turns.

    Returns
    -------
    numpy.ndarray
        ``[D]``, at distance O(gamma) from the optimum ``z.mean(0)``.
    """
    z = as_array(z)
    keep = (1 - gamma) ** local_steps
    weights = (1 - keep) * keep ** np.arange(len(z) - 1, -1, -1)
    return weights @ z / (1 - keep ** len(z))


def toy_contraction(gamma: float, eta: float, clients: int = 3, local_steps: int = 1) -> float:
    """Return ``1 - eta (1 - a)``, ``a = (1 - gamma)^(N I)``: the error's factor a cycle."""
    return 1 - eta * (1 - (1 - gamma) ** (clients * local_steps))


def toy_eta_max(gamma: float, clients: int = 3, local_steps: int = 1) -> float:
    """Return ``2 / (1 - a)``: the toy with P = N converges exactly for ``0 < eta < eta_max``."""
    return 2 / (1 - (1 - gamma) ** (clients * local_steps))
