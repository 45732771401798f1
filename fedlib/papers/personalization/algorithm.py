"""PERM: every client learns a model of its own, from those who are like it.

Deng, Kamani, Mahdavinia and Mahdavi, *Distributed Personalized Empirical Risk Minimization*,
NeurIPS 2023 (arXiv 2310.17761). Line numbers refer to the algorithm boxes of the book.

N models learn at once: in a round each client hosts one of them, and the next round moves every
model on. So a round is a permutation of rows, a few local steps, and the permutation back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_flag, check_positive, check_whole_number, checked_seeds
from fedlib.engine.cost import check_room
from fedlib.engine.data import Reading
from fedlib.engine.draws import ON_HOST, Array, draw_one
from fedlib.engine.local import local_sgd
from fedlib.engine.mixing import mix
from fedlib.engine.rng import stream
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.papers.fedavg import check_settings, first_models
from fedlib.papers.personalization import weights
from fedlib.papers.personalization.discrepancy import Estimate, Half, estimate, halves

VISITS = ("relative", "printed")


@dataclass(frozen=True)
class Mixing:
    """Mixing weights from gradients: the last lines of Algorithm 3.

    Parameters
    ----------
    lam
        λ of equation (2); a number, or one a run.
    unit
        ``"noise"``: λ counts in ``tr Σ``, the variance of one sample's gradient, estimated at the
        same model. ``"one"``: λ as it stands.
    steps
        Projected gradient steps ``T_α`` from the weights before; None solves the problem exactly.
    unbiased
        Take the two-batch estimator instead of the full gradients' distances.
    """

    lam: float | tuple[float, ...] = 30.0
    unit: str = "noise"
    steps: int | None = None
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_positive("lam", self.lam, True)
        check_flag("unbiased", self.unbiased)
        if self.steps is not None:
            check_whole_number("steps", self.steps)
        if self.unit not in ("noise", "one"):
            raise unknown("unit of lam", self.unit, ["noise", "one"])

    def weights(self, measured: Estimate, A: Tensor) -> Tensor:
        """Return the weights of all clients, ``[R, N, N]``; ``A`` are those before."""
        z = measured.unbiased() if self.unbiased else measured.zeta()
        lam = column(self.lam, z[:, 0])
        if self.unit == "noise":
            noise = measured.noise()
            if (noise == 0).any():
                raise FedlibError(
                    "The halves of all clients have the same gradients, so the noise is estimated "
                    "as zero, and λ counts in it. Give λ itself with unit='one', or clients whose "
                    "samples differ."
                )
            lam = lam * noise.unsqueeze(1)
        out = torch.empty_like(z)
        for r, n in enumerate(measured.n.to(z)):  # each run has clients of its own
            strength = lam if isinstance(lam, float) else lam[r]
            if not (z[r].isfinite().all() and np.isfinite(float(strength))):
                out[r] = torch.nan  # a run that has diverged ends no other
                continue
            if self.steps is None:
                out[r] = weights.water_fill(z[r], n, strength)
            else:
                out[r] = weights.descend(A[r], z[r], n, strength, self.steps)
        return out


@dataclass(frozen=True)
class State:
    """What a checkpoint holds. Row ``r`` of every array belongs to run ``r``.

    Attributes
    ----------
    x
        The global model ``w``, at which clients are compared, ``[R, P]``.
    v
        The personal models, ``[R, N, P]``: row i is client i's, wherever it is hosted.
    A
        Mixing weights, ``[R, N, N]``: row i is client i's.
    seeds
        One seed a run.
    cursor
        Minibatches each client has used, ``[R, N]``.
    t
        The next round; an epoch has N of them.
    """

    x: Tensor
    v: Tensor
    A: Tensor
    seeds: tuple[int, ...]
    cursor: np.ndarray
    t: int = 0


@dataclass(frozen=True)
class Refresh(Generic[Array]):
    """What chance decides when weights change, at the end of an epoch.

    Attributes
    ----------
    reading
        A minibatch of every client, for the step of the global model.
    halves
        Its samples, cut in two, for the weights.
    """

    reading: Reading[Array]
    halves: tuple[Half[Array], Half[Array]]


@dataclass(frozen=True)
class Drawn(Generic[Array]):
    """What chance decides in a round.

    Attributes
    ----------
    guests
        ``[R, N]``: whose model each client hosts.
    hosts
        ``[R, N]``: the inverse, who hosts each model.
    reading
        The minibatches of all clients, ``R * N`` copies.
    refresh
        Where weights of :class:`PERM` change after the round, else None.
    cursor
        As in :class:`State`, after the round.
    """

    guests: Array
    hosts: Array
    reading: Reading[Array]
    refresh: Refresh[Array] | None
    cursor: np.ndarray = field(metadata=ON_HOST)


@dataclass(frozen=True)
class ShuffledSGD:
    """Algorithm 1: with given mixing weights, models travel from client to client.

    Parameters
    ----------
    lr
        Local step size η; a number, or one a run.
    local_steps
        Local steps K of each visit.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    visits
        ``"relative"``: a visit of model i to client c has the rate ``η α_i(c) / max_j α_i(j)``,
        so that no step is larger than η. ``"printed"``: ``η α_i(c) N``, as in the paper, where η is
        small.
    radius
        Models are projected on the ball of this radius around zero once an epoch; None does not.
    """

    lr: float | tuple[float, ...]
    local_steps: int = 1
    batch_size: int | None = None
    visits: str = "relative"
    radius: float | None = None

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.radius is not None:
            check_positive("radius", self.radius)
        if self.visits not in VISITS:
            raise unknown("kind of visits", self.visits, VISITS)

    def init(
        self,
        task: Task,
        seeds: Sequence[int],
        x: Tensor | None = None,
        A: Tensor | None = None,
    ) -> State:
        """Return the state before the first round.

        Parameters
        ----------
        x
            Models ``[R, P]`` from which all clients start; fresh ones by default.
        A
            Mixing weights ``[R, N, N]`` or ``[N, N]``; all alike by default.
        """
        check_room(len(checked_seeds(seeds)) * task.N, task.size, 3, task.data.x)
        x, seeds = first_models(task, seeds, x)
        shape = (len(seeds), task.N, task.N)
        A = x.new_full(shape, 1 / task.N) if A is None else checked(A, shape).to(x)
        v = x.unsqueeze(1).repeat(1, task.N, 1)
        return State(x, v, A, seeds, np.zeros((len(seeds), task.N), dtype=np.int64))

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: who hosts whom, and which samples are read."""
        cursor, N = state.cursor, task.N
        everyone = np.broadcast_to(np.arange(N), cursor.shape)
        for t in itertools.count(state.t):
            hosts = schedule(state.seeds, N, t)
            reading, cursor = task.data.read(
                state.seeds, everyone, cursor, self.local_steps, self.batch_size
            )
            refresh, cursor = self.refreshing(state, task, t, cursor)
            yield Drawn(np.argsort(hosts, 1), hosts, reading, refresh, cursor)

    def refreshing(
        self, state: State, task: Task, t: int, cursor: np.ndarray
    ) -> tuple[Refresh[np.ndarray] | None, np.ndarray]:
        """Draw what comes after round ``t``: nothing, as the weights are given."""
        return None, cursor

    def round(
        self, state: State, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[State, dict[str, Any]]:
        """Run one round of every run: every model visits one client."""
        drawn = drawn or draw_one(self, state, task)
        rate = self.rates(state)  # what each client counts for each model
        rate = mix(rate, drawn.guests).diagonal(dim1=1, dim2=2)  # at each host
        hosted = mix(state.v, drawn.guests).flatten(0, 1)  # line 5: models move
        batches = drawn.reading.batches(task.data.dtype)
        hosted = local_sgd(task, hosted, batches, rate.flatten())  # line 6
        v = mix(hosted, drawn.hosts)
        after = replace(state, v=v, cursor=drawn.cursor, t=state.t + 1)
        if after.t % task.N == 0 and self.radius is not None:  # line 7
            after = replace(after, v=ball(v, self.radius))
        return self.refreshed(after, task, drawn), {}

    def rates(self, state: State) -> Tensor:
        """Return the rate of a visit of model i to client c, ``[R, N, N]``."""
        A, lr = state.A, column(self.lr, state.x, 1)
        lr = lr if isinstance(lr, float) else lr.unsqueeze(2)
        if self.visits == "printed":
            return lr * A * A.shape[1]
        return lr * A / A.amax(2, keepdim=True)

    def refreshed(self, state: State, task: Task, drawn: Drawn[Tensor]) -> State:
        """Return the state with what an epoch's end changes: nothing, the weights are given."""
        return state


@dataclass(frozen=True)
class PERM(ShuffledSGD):
    """Algorithm 2: models travel, and after each epoch everybody looks anew whom to learn from.

    Parameters
    ----------
    lr, local_steps, batch_size, visits, radius
        As for :class:`ShuffledSGD`.
    mixing
        How weights follow from gradients.
    global_lr
        Step size γ of the global model; a number, or one a run.
    global_batch
        Samples M of every client in the global step; None takes all of them.
    refresh
        Rounds after which global model and weights change, each time; None is an epoch, as in the
        box, and 1 every round, as in the paper's Section 3.2.
    """

    mixing: Mixing = Mixing()
    global_lr: float | tuple[float, ...] = 0.1
    global_batch: int | None = None
    refresh: int | None = None

    per_run: ClassVar = ("lr", "global_lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("global_lr", self.global_lr, True)
        if not hasattr(self.mixing, "weights"):
            raise FedlibError(f"mixing is a Mixing, such as Mixing(lam=30.0); got {self.mixing!r}.")
        if self.global_batch is not None:
            check_whole_number("global_batch", self.global_batch)
        if self.refresh is not None:
            check_whole_number("refresh", self.refresh)

    def refreshing(
        self, state: State, task: Task, t: int, cursor: np.ndarray
    ) -> tuple[Refresh[np.ndarray] | None, np.ndarray]:
        """Draw what comes after round ``t``; something only where weights change."""
        number, last = divmod(t + 1, self.refresh or task.N)
        if last:
            return None, cursor
        everyone = np.broadcast_to(np.arange(task.N), cursor.shape)
        if self.global_batch is None:
            reading, _ = task.data.read(state.seeds, everyone, cursor, 1, None)
        else:
            reading, cursor = task.data.read(state.seeds, everyone, cursor, 1, self.global_batch)
        return Refresh(reading, halves(task.data, state.seeds, number)), cursor

    def refreshed(self, state: State, task: Task, drawn: Drawn[Tensor]) -> State:
        """Return the state with a step of the global model and new weights, after an epoch."""
        if drawn.refresh is None:
            return state
        start = state.x.repeat_interleave(task.N, 0)
        batches = drawn.refresh.reading.batches(task.data.dtype)
        rate = column(self.global_lr, state.x, task.N)
        x = local_sgd(task, start, batches, rate).view(len(state.x), task.N, -1).mean(1)  # line 8
        x = x if self.radius is None else ball(x, self.radius)
        measured = estimate(task, x, drawn.refresh.halves)
        return replace(state, x=x, A=self.mixing.weights(measured, state.A))  # lines 9-10


def schedule(seeds: Sequence[int], N: int, t: int) -> np.ndarray:
    """Return who hosts each model in round ``t``, ``[R, N]``: ``σ((i + j) mod N)``.

    ``t = r N + j``, and σ is a permutation of the clients drawn for epoch r. In an epoch every
    model visits every client once.
    """
    epoch, j = divmod(t, N)
    orders = [stream(seed, "shuffling", epoch).permutation(N) for seed in seeds]
    return np.stack([np.roll(order, -j) for order in orders])


def ball(theta: Tensor, radius: float) -> Tensor:
    """Return every model of ``[..., P]``, projected on the ball around zero."""
    return theta * (radius / theta.norm(dim=-1, keepdim=True)).clamp(max=1)


def final_step(
    task: Task,
    v: Tensor,
    A: Tensor,
    L: float,
    drawn: tuple[Half[Tensor], Half[Tensor]],
    radius: float | None = None,
) -> Tensor:
    """Return the models after the closing step of Algorithms 1 and 2, ``[R, N, P]``.

    ``v_i − (1/L) Σ_j α_i(j) ∇f_j(v_i)``, with full gradients: ``N²`` of them, taken model by model.
    """
    check_positive("L", L)
    if v.dim() != 3 or v.shape[1] != task.N:
        raise FedlibError(f"v is {[*v.shape]}. Expected the models of all clients, [R, N, P].")
    A = checked(A, (len(v), task.N, task.N))
    out = []
    for i in range(v.shape[1]):
        full = estimate(task, v[:, i], drawn).full  # [R, N, P]
        out.append(v[:, i] - mix(full, A[:, i : i + 1]).squeeze(1) / L)
    after = torch.stack(out, 1)
    return after if radius is None else ball(after, radius)


def checked(A: Any, shape: tuple[int, ...]) -> Tensor:
    """Return weights ``[R, N, N]``, having refused what are none."""
    if isinstance(A, Tensor) and not A.is_floating_point():
        raise FedlibError(f"A holds {A.dtype}. Mixing weights are real numbers: A.double().")
    if not isinstance(A, Tensor) or not A.is_floating_point() or A.shape not in (shape, shape[1:]):
        came = [*A.shape] if isinstance(A, Tensor) else type(A).__name__
        raise FedlibError(f"A is {came}. Expected mixing weights {[*shape]} or {[*shape[1:]]}.")
    weights.check_simplex(A)
    return A.expand(shape)
