"""Smaller models for weaker clients: parts of one network, cut out by masks (Section 3.3).

Client i trains ``m_i ⊙ w``. The paper leaves open what a mask looks like; here it keeps a share of
every hidden layer's units, with all that goes in and out of them, or of the inputs where there is
no hidden layer, so that the part is a smaller network of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_between
from fedlib.engine.data import Batch
from fedlib.engine.draws import Array
from fedlib.engine.local import local_sgd
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.engine.steps import masked
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.papers import fedavg
from fedlib.papers.fedavg import State
from fedlib.papers.personalization.discrepancy import Estimate, Half, estimate
from fedlib.papers.personalization.others import Forgetful, everyones, paid

MASKS = ("static", "random", "rolling")


def widths(model: Model) -> list[int]:
    """Return how many units each masked layer has: the hidden ones, or the inputs without any.

    Raises
    ------
    FedlibError
        For a model that is not made of dense layers.
    """
    if not model.dense:
        raise FedlibError("Masks cut units out of dense layers. Take models.mlp or models.softmax.")
    inputs = [model.shapes[f"{name}.weight"][1] for name in model.dense]
    return inputs[1:] or inputs


def units(
    model: Model, share: Sequence[float], kind: str, seeds: Sequence[int], t: int
) -> list[np.ndarray]:
    """Return which units each client trains in round ``t``, ``[R * N, width]`` for each layer.

    Parameters
    ----------
    share
        The part of every layer's units that each client has room for, ``[N]``, above 0, at most 1.
    kind
        ``"static"``: the first units. ``"random"``: others in every round. ``"rolling"``: a window
        that moves on by one unit a round, around the end.
    """
    if kind not in MASKS:
        raise unknown("kind of mask", kind, MASKS)
    check_share(share)
    out = []
    for layer, width in enumerate(widths(model)):
        many = [max(1, round(part * width)) for part in share]
        rows = np.zeros((len(seeds), len(share), width), dtype=bool)
        for r, seed in enumerate(seeds):
            for n, size in enumerate(many):
                order = (np.arange(width) + (t if kind == "rolling" else 0)) % width
                if kind == "random":
                    order = stream(seed, "mask", t, n, layer).permutation(width)
                rows[r, n, order[:size]] = True
        out.append(rows.reshape(-1, width))
    return out


def check_share(share: Sequence[float]) -> None:
    """Refuse shares of a layer's units that are none."""
    if not isinstance(share, Sequence | np.ndarray) or isinstance(share, str):
        raise FedlibError(f"share is a list, one a client; got {share!r}.")
    if not len(share) or not all(isinstance(part, Real) and 0 < part <= 1 for part in share):
        raise FedlibError(f"Each share is above 0 and at most 1, one a client; got {share}.")


def mask(model: Model, kept: Sequence[Tensor]) -> Tensor:
    """Return which parameters belong to the units that are kept, ``[C, P]``."""
    if [one.shape[-1] for one in kept] != widths(model):
        raise FedlibError(
            f"kept is for layers of {[one.shape[-1] for one in kept]} units; the model has "
            f"{widths(model)}. Take what units(model, ...) returns."
        )
    result = torch.ones(len(kept[0]), model.size, dtype=torch.bool, device=kept[0].device)
    views = model.views(result)
    inner = len(model.dense) > 1
    for layer, units in enumerate(kept):
        if inner:
            views[f"{model.dense[layer]}.weight"] &= units.unsqueeze(2)
            views[f"{model.dense[layer]}.bias"] &= units
        views[f"{model.dense[layer + inner]}.weight"] &= units.unsqueeze(1)
    return result


@dataclass(frozen=True)
class Drawn(fedavg.Drawn[Array]):
    """What chance decides in a round of partial training.

    Attributes
    ----------
    kept
        As :func:`units` returns them.
    """

    kept: list[Array]


@dataclass(frozen=True)
class PartialFedAvg(Forgetful):
    """FedAvg of parts: a client trains its ``m_i ⊙ w``, and who trained a coordinate averages it.

    The partial training of Section 3.3, after Alam, Liu, Yan and Zhang, *FedRolex:
    Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction*, NeurIPS 2022. What
    nobody trained stays.

    Parameters
    ----------
    lr
        Step size; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes all samples.
    share
        Part of the units that each client has room for, ``[N]``.
    kind
        How the part is chosen, see :func:`units`.
    """

    share: tuple[float, ...] = ()
    kind: str = "rolling"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in MASKS:
            raise unknown("kind of mask", self.kind, MASKS)
        check_share(self.share if np.size(self.share) else (1.0,))

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        widths(task.model)
        if len(self.share) != task.N:
            raise FedlibError(f"{len(self.share)} shares for {task.N} clients. Give one each.")
        return super().init(task, seeds, x)

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: what everyone reads, and trains."""
        for t, drawn in enumerate(super().draws(state, task), state.t):
            kept = units(task.model, self.share, self.kind, state.seeds, t)
            yield Drawn(drawn.q, drawn.reading, drawn.cursor, kept)

    def trained(  # type: ignore[override]  # its draws say what is kept, too
        self, state: State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> State:
        """Return the state after everyone's steps and the means of the coordinates."""
        masks = mask(task.model, drawn.kept)
        start, rate = everyones(state.x, task) * masks, column(self.lr, state.x, task.N)
        y = local_sgd(task, start, batches, rate, step=masked(), extras={"mask": masks})
        y, masks = (one.view(len(state.x), task.N, -1) for one in (y, masks))
        many = masks.sum(1)
        mean = (y * masks).sum(1) / many.clamp(min=1)
        return replace(state, x=torch.where(many > 0, mean, state.x))

    def personal(self, state: State, task: Task) -> Tensor:
        """Return the parts of the global model that are the clients' next, ``[R, N, P]``."""
        kept = units(task.model, self.share, self.kind, state.seeds, state.t)
        masks = mask(task.model, [torch.from_numpy(one).to(state.x.device) for one in kept])
        return (everyones(state.x, task) * masks).view(len(state.x), task.N, -1)

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client, the mean: of a part, that part counts."""
        part = float(np.mean(self.share))
        return paid(rounds, 2 * part, part * self.local_steps)


# --- the weights ----------------------------------------------------------------------------------


def partial_estimate(
    task: Task, w: Tensor, m: Tensor, drawn: tuple[Half[Tensor], Half[Tensor]]
) -> Estimate:
    """Return ``m_i ⊙ ∇f_i(m_i ⊙ w)`` of both halves of each client, for ``w[R, P]``.

    Parameters
    ----------
    m
        ``[R, N, P]``.
    """
    if m.shape != (len(w), task.N, task.size):
        raise FedlibError(f"m is {[*m.shape]}. Expected masks {[len(w), task.N, task.size]}.")
    full = estimate(task, (w.unsqueeze(1) * m).flatten(0, 1), drawn)
    a, b = (g.view_as(m) * m for g in (full.a, full.b))
    one, other = full.sizes
    return Estimate(a, b, (one.view(len(w), -1), other.view(len(w), -1)))


def common_distances(g: Tensor, m: Tensor) -> Tensor:
    """Return ``Σ_p m_i m_j (g_i - g_j)²``, compared on what both have, ``[R, N, N]``.

    With other supports as well, clients with equal data and different masks would look different.
    The mean of each coordinate over those who have it is taken off first, and cancels.
    """
    if m.shape != g.shape:
        raise FedlibError(f"g is {[*g.shape]}, m is {[*m.shape]}. Expected both [R, N, P].")
    m = m.to(g)
    mean = (m * g).sum(1, keepdim=True) / m.sum(1, keepdim=True).clamp(min=1)
    g = m * (g - mean)
    squares = g.square() @ m.mT
    result = (squares + squares.mT - 2 * g @ g.mT).clamp(min=0)
    return result - torch.diag_embed(result.diagonal(dim1=1, dim2=2))


def with_complexity(z: Tensor, n: Tensor, m: Tensor, scale: float) -> Tensor:
    """Return ``z_ij + sqrt(VC_j / n_j)``, for which :func:`~.weights.water_fill` has the weights.

    The VC dimension of client j's models is taken as ``scale`` times their number of parameters.
    The own term is not zero any more, so a client with a large model may give itself no weight.

    Parameters
    ----------
    z
        ``[R, N, N]``.
    n
        Samples of each client, ``[N]`` or ``[R, N]``.
    m
        ``[R, N, P]``.
    """
    check_between("scale", scale, 0)
    if m.dim() != 3 or z.shape[-1] != m.shape[1] or n.shape[-1:] != m.shape[1:2]:
        raise FedlibError(
            f"z is {[*z.shape]}, n {[*n.shape]}, m {[*m.shape]}. Expected [R, N, N], [N] or "
            "[R, N], and [R, N, P]."
        )
    if not bool((n > 0).all()):
        raise FedlibError(f"Every client has a sample or more; got n = {n.tolist()}.")
    vc = scale * m.sum(2).to(z)
    return z + (vc / n.to(z)).sqrt().unsqueeze(1)
