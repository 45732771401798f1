"""Who to learn with: mixing weights, a small convex problem for each client with an exact answer.

Client i minimises, over the simplex, equation (2) of the paper::

    g_i(α) = Σ_j α(j) z_j + λ Σ_j α(j)² / n_j ,    z_j = ‖∇f_i(w) − ∇f_j(w)‖²

Deng, Kamani, Mahdavinia and Mahdavi, *Distributed Personalized Empirical Risk Minimization*,
NeurIPS 2023. The closed form and the thresholds are ours, proved in the book.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.engine.cores import side_by_side
from fedlib.errors import FedlibError

ROWS_A_CORE = 64  # that a core works on at a time


def water_fill(z: Tensor, n: Tensor, lam: float | Tensor) -> Tensor:
    """Return the weights that minimise equation (2), exactly.

    ``α(j) = n_j/(2λ) (ν − z_j)₊`` with the level ν at which they sum to one. Clients that lie above
    the level are left out and the level is computed anew, until none does; a client that is left
    out never comes back (Michelot's algorithm for the simplex).

    Parameters
    ----------
    z
        Discrepancies ``[..., N, N]`` or ``[..., N]``, the last axis being what is mixed; finite.
    n
        Samples of each client, ``[N]``, positive.
    lam
        λ > 0, a number, or one for each problem, of a shape that fits ``z[..., 0]``.

    Returns
    -------
    Tensor
        Weights of the shape of ``z``; every row sums to one. Computed on the host, all cores.

    Raises
    ------
    FedlibError
        For λ or sizes that are not positive, and z that is not finite or does not fit.
    """
    n, lam = _checked(z, n, lam)
    rows = z.detach().cpu().reshape(-1, z.shape[-1])
    width = 2 * lam.cpu().expand(z.shape[:-1]).reshape(-1, 1).double()
    sizes, out = n.cpu().double(), torch.empty_like(rows)

    def work(some: slice) -> None:
        out[some] = _fill(rows[some].double(), sizes, width[some])

    starts = range(0, len(rows), ROWS_A_CORE)
    side_by_side(work, [slice(first, first + ROWS_A_CORE) for first in starts])
    return out.view(z.shape).to(z.device)


def _fill(z: Tensor, n: Tensor, width: Tensor) -> Tensor:
    """Return the weights ``[B, N]`` for ``z[B, N]`` and ``width = 2 λ``, ``[B, 1]``."""
    z = z - z.amin(-1, keepdim=True)  # else a large one swallows the width
    left = torch.ones_like(z, dtype=torch.bool)
    while True:
        sizes = n * left
        level = (width + (sizes * z).sum(-1, keepdim=True)) / sizes.sum(-1, keepdim=True)
        before, left = left, left & (z < level)
        if torch.equal(left, before):
            return sizes * (level - z) / width


def objective(alpha: Tensor, z: Tensor, n: Tensor, lam: float | Tensor) -> Tensor:
    """Return ``g(α)`` of equation (2), ``[...]`` from ``[..., N]``."""
    n, lam = _checked(z, n, lam)
    if alpha.shape[-1:] != n.shape:
        raise FedlibError(f"alpha is {[*alpha.shape]}. Expected one weight a client, [{len(n)}].")
    return (alpha * z).sum(-1) + lam * (alpha.square() / n).sum(-1)


def project(v: Tensor) -> Tensor:
    """Return the nearest points of the simplex, row by row; ``[..., N]``.

    Projecting is water-filling: ``½‖α − v‖²`` is, up to a constant, equation (2) with z = −v, every
    ``n_j = 1`` and ``λ = ½``.
    """
    _check_last(v)
    return water_fill(-v, v.new_ones(v.shape[-1]), 0.5)


def descend(alpha: Tensor, z: Tensor, n: Tensor, lam: float | Tensor, steps: int) -> Tensor:
    """Return weights after projected gradient steps on equation (2), with the step ``1/L_g``.

    ``L_g = 2λ/n_min``. Each step brings the weights nearer to the minimiser by the factor
    ``1 − n_min/n_max`` at least, whatever λ is; with equal ``n_j`` one step is exact.

    Parameters
    ----------
    alpha
        Where to start, on the simplex, of the shape of ``z``.
    z, n, lam
        As in :func:`water_fill`.
    steps
        The paper's ``T_α``.
    """
    check_whole_number("steps", steps, 0)
    n, lam = _checked(z, n, lam)
    check_simplex(alpha)
    lam = lam.expand(z.shape[:-1]).unsqueeze(-1)
    for _ in range(steps):
        alpha = project(alpha - n.min() * (z / (2 * lam) + alpha / n))
    return alpha


def self_only(z: Tensor, n: Tensor) -> Tensor:
    """Return the largest λ at which each client learns alone, ``[..., N]`` from ``[..., N, N]``.

    ``½ n_i min_{j≠i} z_ij``: from it on the nearest other client gets a weight.
    """
    _check_square(z)
    _checked(z, n, 1.0)
    others = z + torch.diag_embed(z.new_full(z.shape[:-1], torch.inf))
    return 0.5 * n.to(z) * others.amin(-1)


def full_support(z: Tensor, n: Tensor) -> Tensor:
    """Return the λ above which every weight is positive, ``[...]`` from ``[..., N]``.

    ``½ Σ_j n_j (z_max − z_j)``. There ``α(j) = n_j/n − n_j (z_j − mean z)/(2λ)``.
    """
    _checked(z, n, 1.0)
    return 0.5 * ((z.amax(-1, keepdim=True) - z) * n.to(z)).sum(-1)


def entropy(A: Tensor) -> Tensor:
    """Return the entropy of each row, in nats; ``log N`` where all weights are alike."""
    return -torch.special.xlogy(A, A).sum(-1)


def _check_last(v: Tensor) -> None:
    """Refuse what has no last axis of clients."""
    if not isinstance(v, Tensor) or not v.dim() or not v.shape[-1]:
        came = [*v.shape] if isinstance(v, Tensor) else type(v).__name__
        raise FedlibError(f"v is {came}. Expected rows of weights in a tensor, [..., N].")


def _check_numbers(name: str, value: Any) -> None:
    """Refuse what no tensor of real numbers can be made of."""
    try:
        torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedlibError(f"{name} is a number or a tensor of them; got {value!r}.") from error


def _check_square(z: Tensor) -> None:
    """Refuse what is no discrepancy of all with all."""
    if not isinstance(z, Tensor) or z.dim() < 2 or z.shape[-1] != z.shape[-2]:
        came = [*z.shape] if isinstance(z, Tensor) else type(z).__name__
        raise FedlibError(f"z is {came}. Expected discrepancies of all with all, [..., N, N].")


def _checked(z: Tensor, n: Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return sizes and λ as tensors like z, having refused what makes no problem."""
    if not isinstance(z, Tensor) or not z.is_floating_point() or z.dim() < 1:
        raise FedlibError(f"z holds real discrepancies [..., N] in a tensor; got {z!r}.")
    _check_numbers("n", n)
    _check_numbers("λ", lam)
    n, lam = (torch.as_tensor(value, dtype=z.dtype, device=z.device) for value in (n, lam))
    if n.shape != z.shape[-1:]:
        raise FedlibError(f"n is {[*n.shape]}. Expected one size a client, [{z.shape[-1]}].")
    if not bool(z.isfinite().all()):
        raise FedlibError("z is not finite: a gradient has diverged. Take a smaller rate.")
    if not bool((n > 0).all()) or not bool(n.isfinite().all()):
        raise FedlibError(f"A client without samples has no weight to get: n = {n.tolist()}.")
    if lam.dim() >= z.dim() or any(
        a not in (1, b) for a, b in zip(lam.shape[::-1], z.shape[-2::-1], strict=False)
    ):
        raise FedlibError(f"λ is {[*lam.shape]}. Expected a number, or one for each of z[..., 0].")
    if not bool((lam > 0).all()) or not bool(lam.isfinite().all()):
        raise FedlibError(
            f"λ must be positive and finite; got {lam.tolist()}. Without it the problem has no "
            "single answer: a client would take the nearest others, however few samples they have."
        )
    return n, lam


def check_simplex(A: Tensor) -> None:
    """Refuse rows that are no weights: negative, not finite, or with a sum other than one."""
    if not isinstance(A, Tensor):
        raise FedlibError(f"Mixing weights are a tensor [..., N, N]; got {type(A).__name__}.")
    slack = 1e-4 if A.dtype == torch.float32 else 1e-9
    sums = A.sum(-1)
    if not bool((A >= -slack).all()) or not bool(((sums - 1).abs() <= slack).all()):
        raise FedlibError(
            "Mixing weights lie on the simplex: none below zero, every row with the sum one; the "
            f"smallest is {float(A.min()):.3g}, sums go from {float(sums.min()):.6g} to "
            f"{float(sums.max()):.6g}. project(A) brings them there."
        )
