"""The methods that PERM is compared with: the same clients, other ideas of a model of one's own.

Every client takes part in every round, as in the experiments of the paper. What the methods differ
in is a rule of local steps, what a client keeps, and the models by which it is judged, which
``personal`` returns. Where that takes further steps, they read minibatches of a stream of their
own: looking at a run changes nothing in it.

Each has ``spent(rounds)``, what a client has paid for its personal model after so many rounds:
``models``, messages of a model's size that it got and sent, and ``gradients`` of one minibatch.
:func:`spent` says the same of PERM. A message of a few numbers counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_each, check_flag, check_whole_number
from fedlib.engine.cost import check_room
from fedlib.engine.data import Batch
from fedlib.engine.draws import draw_one, upload
from fedlib.engine.local import local_sgd
from fedlib.engine.losses import LOSSES
from fedlib.engine.mixing import average, mix
from fedlib.engine.rng import stream
from fedlib.engine.steps import Now, Step, proximal, sgd
from fedlib.engine.sweeps import column
from fedlib.engine.tasks import Task, check_whole
from fedlib.errors import FedlibError, unknown
from fedlib.papers import fedavg
from fedlib.papers.fedavg import Drawn, FedAvg, check_settings
from fedlib.papers.personalization.algorithm import PERM, ShuffledSGD
from fedlib.population.participation import Full

Rate = float | tuple[float, ...]
VARIANTS = ("first-order", "hessian-free")


@dataclass(frozen=True, kw_only=True)
class State(fedavg.State):
    """What a checkpoint holds: that of FedAvg, and what the clients keep from round to round.

    Attributes
    ----------
    v
        A model of each client's own, ``[R, N, P]``.
    """

    v: Tensor


@dataclass(frozen=True, kw_only=True)
class Mixed(State):
    """What a checkpoint of :class:`APFL` holds.

    Attributes
    ----------
    a
        Each client's mixing parameter, ``[R, N]``.
    """

    a: Tensor


@dataclass(frozen=True, kw_only=True)
class Clustered(fedavg.State):
    """What a checkpoint of :class:`IFCA` holds.

    Attributes
    ----------
    c
        The models of the clusters, ``[R, k, P]``.
    """

    c: Tensor


S = TypeVar("S", bound=fedavg.State)


@dataclass(frozen=True)
class Everyone(Generic[S]):
    """What the methods share; a method adds ``trained``, ``personal`` and what a round reads.

    Parameters
    ----------
    lr
        Step size; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes all samples.
    """

    lr: Rate
    local_steps: int = 1
    batch_size: int | None = None

    per_run: ClassVar[tuple[str, ...]] = ("lr",)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def reads(self) -> int:
        """Minibatches that a client reads in a round."""
        return self.local_steps

    def average(self, task: Task) -> FedAvg:
        """Return FedAvg of everyone, which reads as many minibatches in a round."""
        return FedAvg(Full(task.N), self.lr, self.reads, self.batch_size)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> S:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        raise NotImplementedError

    def start(self, task: Task, seeds: Sequence[int], x: Tensor | None) -> fedavg.State:
        """Return what FedAvg starts from, having refused what no memory has room for."""
        first = self.average(task).init(task, seeds, x)
        check_room(len(first.x) * task.N, task.size, 4, first.x)
        return first

    def draws(self, state: S, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds on the host: which samples everyone reads."""
        return self.average(task).draws(state, task)

    def round(
        self, state: S, task: Task, drawn: Drawn[Tensor] | None = None
    ) -> tuple[S, dict[str, Any]]:
        """Run one round of every run; nothing drawn before means to draw now."""
        drawn = drawn or draw_one(self, state, task)
        after = self.trained(state, task, drawn.reading.batches(task.data.dtype), drawn)
        return replace(after, cursor=drawn.cursor, t=state.t + 1), {}

    def trained(self, state: S, task: Task, batches: list[Batch], drawn: Drawn[Tensor]) -> S:
        """Return the state with what a round has learned."""
        raise NotImplementedError

    def personal(self, state: S, task: Task) -> Tensor:
        """Return the models by which the clients are judged, ``[R, N, P]``."""
        raise NotImplementedError


class Forgetful(Everyone[fedavg.State]):
    """Everyone, when clients keep nothing from round to round."""

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> fedavg.State:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        return self.start(task, seeds, x)


class Keeping(Everyone[State]):
    """Everyone, when clients keep a model of their own, by which they are judged."""

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        first = self.start(task, seeds, x)
        return State(**vars(first), v=first.x.unsqueeze(1).repeat(1, task.N, 1))

    def personal(self, state: State, task: Task) -> Tensor:
        """Return the clients' own models, ``[R, N, P]``."""
        return state.v


# --- the rules of local steps ---------------------------------------------------------------------


def meta(eps: float | None = None) -> Step:
    """Take every 2 steps, or 3 with ``eps``, together as one of Per-FedAvg; see there.

    Each reads a batch of its own. The rows go to ``w - a g``, where the second step finds the outer
    gradient, and to ``w + eps`` times that, where the third finds one half of the difference.
    ``inner[C, 1]`` is ``a``.
    """
    parts = 2 if eps is None else 3

    def step(now: Now) -> Tensor:
        extras, part = now.extras, now.t % parts
        if part == 0:
            extras["w"] = now.theta
            return now.theta - extras["inner"] * now.gradient
        if eps is None:
            return sgd(replace(now, theta=extras["w"]))
        if part == 1:
            extras["outer"] = now.gradient
            return extras["w"] + eps * now.gradient
        behind = now.grad(extras["w"] - eps * extras["outer"])
        curved = extras["inner"] * (now.gradient - behind) / (2 * eps)
        return sgd(replace(now, theta=extras["w"], gradient=extras["outer"] - curved))

    return step


def envelope(steps: int) -> Step:
    """Pull the row to an anchor; after every so many ``steps`` the anchor moves to the row.

    By ``share[C, 1]`` of the way: ``anchor <- anchor - share (anchor - theta)``.
    """
    near = proximal()

    def step(now: Now) -> Tensor:
        after, anchor = near(now), now.extras["anchor"]
        if (now.t + 1) % steps == 0:
            anchor.sub_(now.extras["share"] * (anchor - after))
        return after

    return step


def interpolated(adaptive: bool) -> Step:
    """Move the row by SGD, and ``v[C, P]`` by the gradient at ``a v + (1 - a) theta``.

    ``a[C, 1]`` moves in the first step, if it may, by the gradient that was taken there.
    """

    def step(now: Now) -> Tensor:
        v, a = now.extras["v"], now.extras["a"]
        gradient = now.grad(a * v + (1 - a) * now.theta)
        slope = ((v - now.theta) * gradient).sum(1, keepdim=True)
        v.sub_(now.rate * a * gradient)
        if adaptive and now.t == 0:
            a.sub_(now.rate * slope).clamp_(0, 1)
        return sgd(now)

    return step


# --- the methods ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalizedFedAvg(Forgetful):
    """FedAvg, whose clients tune a copy of the global model on their own samples.

    McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
    AISTATS 2017, with the fine-tuning that the paper on PERM calls localized FedAvg. The server
    takes the plain mean, as that paper's objective does.

    Parameters
    ----------
    lr
        Step size of both; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes each client's exact gradient.
    tune_steps
        Steps from the global model to a personal one; 0 is FedAvg.
    """

    tune_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("tune_steps", self.tune_steps, 0)

    def trained(
        self, state: fedavg.State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> fedavg.State:
        """Return the state after local steps and their mean."""
        start = everyones(state.x, task)
        y = local_sgd(task, start, batches, column(self.lr, state.x, task.N))
        return replace(state, x=state.x + average(y - start, drawn.q))

    def personal(self, state: fedavg.State, task: Task) -> Tensor:
        """Return the tuned copies, ``[R, N, P]``."""
        return tuned(state, task, self.lr, self.tune_steps, self.batch_size)

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client; the tuning counts once, at the end."""
        return paid(rounds, 2, self.local_steps, self.tune_steps)


@dataclass(frozen=True)
class PerFedAvg(Forgetful):
    """Per-FedAvg: a global model that is good one gradient step later.

    Fallah, Mokhtari and Ozdaglar, *Personalized Federated Learning with Theoretical Guarantees: A
    Model-Agnostic Meta-Learning Approach*, NeurIPS 2020, Algorithm 1. A local step, with
    ``a`` for ``inner_lr``, β for ``lr`` and three independent minibatches ``D, D', D''``::

        w <- w - β (I - a ∇²f(w; D'')) g ,    g = ∇f(w - a ∇f(w; D); D')

    Parameters
    ----------
    lr
        Outer step size β; a number, or one a run.
    local_steps
        Such steps of each client in a round.
    batch_size
        Size of each of the minibatches; None takes all samples.
    inner_lr
        Inner step size a, 0 or more; a number, or one a run. With 0 it is FedAvg.
    variant
        ``"first-order"``: without the Hessian, and without D''. ``"hessian-free"``: its product
        with g is ``(∇f(w + ε g; D'') - ∇f(w - ε g; D'')) / 2ε``.
    eps
        That ε.
    """

    inner_lr: Rate = 0.01
    variant: str = "first-order"
    eps: float = 0.01

    per_run: ClassVar = ("lr", "inner_lr")

    def __post_init__(self) -> None:
        check_settings(self, ("lr", "eps"))
        check_each("inner_lr", self.inner_lr)
        if self.variant not in VARIANTS:
            raise unknown("variant of Per-FedAvg", self.variant, VARIANTS)

    @property
    def parts(self) -> int:
        """Minibatches of a local step."""
        return 2 if self.variant == "first-order" else 3

    @property
    def reads(self) -> int:
        """Minibatches that a client reads in a round."""
        return self.parts * self.local_steps

    def trained(
        self, state: fedavg.State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> fedavg.State:
        """Return the state after meta steps and their mean."""
        start = everyones(state.x, task)
        rule = meta(None if self.parts == 2 else self.eps)
        extras = {"inner": each_client(self.inner_lr, state.x, task)}
        rate = column(self.lr, state.x, task.N)
        y = local_sgd(task, start, batches, rate, step=rule, extras=extras)
        return replace(state, x=state.x + average(y - start, drawn.q))

    def personal(self, state: fedavg.State, task: Task) -> Tensor:
        """Return the global model after one inner step of each client, ``[R, N, P]``."""
        return tuned(state, task, self.inner_lr, 1, self.batch_size)

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client; a Hessian-free product is two gradients."""
        of_a_step = 2 if self.parts == 2 else 4
        return paid(rounds, 2, of_a_step * self.local_steps, 1)


@dataclass(frozen=True)
class PFedMe(Keeping):
    """pFedMe: personal models near a global one, which follows the gradients of Moreau envelopes.

    T. Dinh, Tran and Nguyen, *Personalized Federated Learning with Moreau Envelopes*, NeurIPS 2020,
    Algorithm 1. A local round of client i draws a minibatch, takes ``inner_steps`` steps on it for
    ``θ ≈ argmin f_i(θ) + λ/2 ‖θ - w_i‖²``, and moves ``w_i <- w_i - η λ (w_i - θ)``. A round starts
    with ``θ = w_i = w``; within it θ goes on from where it is.

    Parameters
    ----------
    lr
        Step size η of the local models w_i; a number, or one a run.
    local_steps
        Local rounds R of each client in a round.
    batch_size
        Minibatch size; None takes all samples.
    inner_lr
        Step size of θ; a number, or one a run.
    inner_steps
        Steps K of θ in a local round.
    lam
        λ; a number, or one a run.
    global_lr
        The server's β: ``w <- (1 - β) w + β mean w_i``.
    """

    inner_lr: Rate = 0.05
    inner_steps: int = 5
    lam: Rate = 15.0
    global_lr: float = 1.0

    per_run: ClassVar = ("lr", "inner_lr", "lam")

    def __post_init__(self) -> None:
        rates = ("lr", "inner_lr", "lam", "global_lr")
        check_settings(self, rates, ("local_steps", "inner_steps"))

    def trained(
        self, state: State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> State:
        """Return the state after the local rounds and the server's step; θ stays with clients."""
        start, lam = everyones(state.x, task), each_client(self.lam, state.x, task)
        share = lam * each_client(self.lr, state.x, task)
        extras = {"anchor": start.clone(), "mu": lam, "share": share}
        again = [batch for batch in batches for _ in range(self.inner_steps)]
        rate = column(self.inner_lr, state.x, task.N)
        theta = local_sgd(task, start, again, rate, step=envelope(self.inner_steps), extras=extras)
        x = state.x + self.global_lr * average(extras["anchor"] - start, drawn.q)
        return replace(state, x=x, v=theta.view_as(state.v))

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client; each step of θ is one."""
        return paid(rounds, 2, self.local_steps * self.inner_steps)


@dataclass(frozen=True)
class Ditto(Keeping):
    """Ditto: FedAvg, and beside it a model of each client's own that is pulled towards it.

    Li, Hu, Beirami and Smith, *Ditto: Fair and Robust Federated Learning Through Personalization*,
    ICML 2021, Algorithm 1: ``v_i <- v_i - η (∇f_i(v_i) + λ (v_i - w))``, w being the global model
    at the round's start. Both models take their steps on the same minibatches, so the global one
    is FedAvg's, whatever λ is.

    Parameters
    ----------
    lr
        Step size η of both; a number, or one a run.
    local_steps
        Steps of each of the two in a round.
    batch_size
        Minibatch size; None takes all samples.
    lam
        λ, 0 or more; a number, or one a run. With 0 clients learn alone.
    """

    lam: Rate = 1.0

    per_run: ClassVar = ("lr", "lam")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("lam", self.lam)

    def trained(
        self, state: State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> State:
        """Return the state after a round of FedAvg and as many steps of the clients' own."""
        start, rate = everyones(state.x, task), column(self.lr, state.x, task.N)
        y = local_sgd(task, start, batches, rate)
        extras = {"anchor": start, "mu": each_client(self.lam, state.x, task)}
        v = local_sgd(task, state.v.flatten(0, 1), batches, rate, step=proximal(), extras=extras)
        return replace(state, x=state.x + average(y - start, drawn.q), v=v.view_as(state.v))

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client: two models learn, one travels."""
        return paid(rounds, 2, 2 * self.local_steps)


@dataclass(frozen=True)
class APFL(Everyone[Mixed]):
    """APFL: a client's model is a mixture of its own and the global one, ``α v_i + (1 - α) w``.

    Deng, Kamani and Mahdavi, *Adaptive Personalized Federated Learning*, arXiv 2003.13461, 2020,
    Algorithm 1. In each step w_i follows its own gradient, and v_i that of the mixture
    ``α v_i + (1 - α) w_i``, with the factor α of the chain rule. Everyone takes part, so w_i starts
    each round at w.

    Parameters
    ----------
    lr
        Step size η of both models, and of α; a number, or one a run.
    local_steps
        Local steps in a round.
    batch_size
        Minibatch size; None takes all samples.
    mixing
        α at the start, from 0 (FedAvg) to 1 (alone); a number, or one a run.
    adaptive
        Let each client's α follow ``α <- α - η ⟨v_i - w_i, ∇f_i⟩``, the gradient being that of the
        mixture, once a round, in the first of its steps, and stay within 0 and 1. The steps of
        the round that follow have the new α; how often α moves is our choice.
    """

    mixing: Rate = 0.5
    adaptive: bool = False

    per_run: ClassVar = ("lr", "mixing")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_each("mixing", self.mixing, 1)
        check_flag("adaptive", self.adaptive)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> Mixed:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        first = self.start(task, seeds, x)
        v = first.x.unsqueeze(1).repeat(1, task.N, 1)
        a = each_client(self.mixing, first.x, task).view(len(first.x), -1)
        return Mixed(**vars(first), v=v, a=a)

    def trained(
        self, state: Mixed, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> Mixed:
        """Return the state after the steps of both models and the mean of one of them."""
        start = everyones(state.x, task)
        extras = {"v": state.v.flatten(0, 1).clone(), "a": state.a.view(-1, 1).clone()}
        rate, rule = column(self.lr, state.x, task.N), interpolated(self.adaptive)
        y = local_sgd(task, start, batches, rate, step=rule, extras=extras)
        extras["v"][:, task.model.trained :] = y[:, task.model.trained :]  # buffers
        x = state.x + average(y - start, drawn.q)
        return replace(state, x=x, v=extras["v"].view_as(state.v), a=extras["a"].view_as(state.a))

    def personal(self, state: Mixed, task: Task) -> Tensor:
        """Return the mixtures with the global model, ``[R, N, P]``."""
        return torch.lerp(state.x.unsqueeze(1), state.v, state.a.unsqueeze(2))

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client: two models learn, one travels."""
        return paid(rounds, 2, 2 * self.local_steps)


@dataclass(frozen=True)
class LocalOnly(Keeping):
    """Every client learns alone. The global model is the mean of theirs, and nobody sees it.

    Parameters
    ----------
    lr
        Step size; a number, or one a run.
    local_steps
        Steps that count as a round.
    batch_size
        Minibatch size; None takes all samples.
    """

    def trained(
        self, state: State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> State:
        """Return the state after everyone's steps."""
        rate = column(self.lr, state.x, task.N)
        v = local_sgd(task, state.v.flatten(0, 1), batches, rate).view_as(state.v)
        return replace(state, x=v.mean(1), v=v)

    def spent(self, rounds: int) -> dict[str, float]:
        """Return gradients of a client; nothing travels."""
        return paid(rounds, 0, self.local_steps)


@dataclass(frozen=True)
class Oracle(LocalOnly):
    """Who knows which clients are alike: FedAvg within each group, by the plain mean.

    One group of all is FedAvg, and each client a group is :class:`LocalOnly`.

    Parameters
    ----------
    lr, local_steps, batch_size
        As for :class:`LocalOnly`.
    groups
        A label for each client, ``N`` of them; or such labels for each seed, ``{seed: labels}``.
    """

    groups: Sequence[int] | Mapping[int, Sequence[int]] = ()

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> State:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        state = super().init(task, seeds, x)
        self.within(state.seeds, task.N)
        return state

    def draws(self, state: State, task: Task) -> Iterator[Drawn[np.ndarray]]:
        """Draw the next rounds; their ``q[R, N, N]`` has the weights of each client's group."""
        q = self.within(state.seeds, task.N)
        return (replace(drawn, q=q) for drawn in super().draws(state, task))

    def within(self, seeds: Sequence[int], N: int) -> np.ndarray:
        """Return in row i the mean over client i's group, ``[R, N, N]``."""
        rows = []
        for seed in seeds:
            groups = self.groups.get(seed, ()) if isinstance(self.groups, Mapping) else self.groups
            labels = np.asarray(groups)
            if labels.shape != (N,):
                raise FedlibError(
                    f"groups have {labels.size} labels for seed {seed}, and there are {N} clients. "
                    "Give one label a client, or such labels for each seed, {seed: labels}."
                )
            alike = labels[:, None] == labels
            rows.append(alike / alike.sum(1, keepdims=True))
        return np.stack(rows)

    def trained(
        self, state: State, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> State:
        """Return the state after everyone's steps and the mean of each group."""
        v = mix(super().trained(state, task, batches, drawn).v, drawn.q)
        return replace(state, x=v.mean(1), v=v)

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients of a client."""
        return paid(rounds, 2, self.local_steps)


@dataclass(frozen=True)
class IFCA(Everyone[Clustered]):
    """k models, and every client trains the one that fits its samples best.

    Ghosh, Chung, Yin and Ramchandran, *An Efficient Framework for Clustered Federated Learning*,
    NeurIPS 2020, Algorithm 1 with model averaging. In each round every client gets all k models,
    chooses ``j = argmin_j f_i(c_j)`` by its loss on all of its samples, and takes its local steps
    from ``c_j``; a new ``c_j`` is the mean over those who chose it. The original draws a part of
    the clients, and advises several random starts; here all take part, from one start, and a model
    that nobody chose stays. The first model is FedAvg's, the others are drawn beside it.

    Parameters
    ----------
    lr
        Step size; a number, or one a run.
    local_steps
        Local steps of each client in a round.
    batch_size
        Minibatch size; None takes all samples.
    clusters
        How many models k; 1 is FedAvg.
    """

    clusters: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("clusters", self.clusters)

    def init(self, task: Task, seeds: Sequence[int], x: Tensor | None = None) -> Clustered:
        """Return the state before the first round, from fresh models or from given ``x[R, P]``."""
        first = self.start(task, seeds, x)
        others = [
            torch.cat([task.model.init(stream(seed, "init", j)) for seed in first.seeds])
            for j in range(1, self.clusters)
        ]
        c = torch.stack([first.x, *(other.to(first.x) for other in others)], 1)
        return Clustered(**vars(first), c=c)

    def trained(
        self, state: Clustered, task: Task, batches: list[Batch], drawn: Drawn[Tensor]
    ) -> Clustered:
        """Return the state after everyone's choice, steps, and the mean of each cluster."""
        chosen = choices(task, state.c, state.seeds)  # [R, N, k], a one in each row
        start = mix(state.c, chosen).flatten(0, 1)
        y = local_sgd(task, start, batches, column(self.lr, state.x, task.N))
        many = chosen.sum(1).unsqueeze(2)  # [R, k, 1]
        c = torch.where(many > 0, mix(y, chosen.mT / many.clamp(min=1)), state.c)
        return replace(state, x=average(y, drawn.q), c=c)

    def personal(self, state: Clustered, task: Task) -> Tensor:
        """Return for every client the model that it would choose now, ``[R, N, P]``."""
        return mix(state.c, choices(task, state.c, state.seeds))

    def spent(self, rounds: int) -> dict[str, float]:
        """Return models and gradients; k losses on all samples a round are not counted."""
        return paid(rounds, self.clusters + 1, self.local_steps)


# --- what they share ------------------------------------------------------------------------------


@torch.no_grad()
def choices(task: Task, c: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return a one where a client's own samples fit best, ``[R, N, k]``, for ``c[R, k, P]``."""
    out = []
    for seed, models in zip(seeds, c, strict=True):
        batch = task.data.of(seed).full_batch()
        if task.model.normalises and not task.model.buffers:  # no running statistics: its batch's
            check_whole(batch)
        x, y = task.features(batch)
        each = [
            batch.mean(LOSSES[task.loss_name](task.model.apply(one.expand(task.N, -1), x), y))
            for one in models
        ]
        out.append(torch.stack(each, 1).argmin(1))
    return torch.nn.functional.one_hot(torch.stack(out), c.shape[1]).to(c)


def everyones(x: Tensor, task: Task) -> Tensor:
    """Return a copy of each run's model for every client, ``[R * N, P]``."""
    return x.repeat_interleave(task.N, 0)


def each_client(value: Rate, x: Tensor, task: Task) -> Tensor:
    """Return a setting as every client's, ``[R * N, 1]``."""
    setting = column(value, x, task.N)
    return x.new_full((len(x) * task.N, 1), setting) if isinstance(setting, float) else setting


def tuned(
    state: fedavg.State, task: Task, rate: Rate, steps: int, batch_size: int | None
) -> Tensor:
    """Return the global model after some steps on each client's own samples, ``[R, N, P]``.

    The minibatches are those of another seed, made of the run's seed and the round: they differ
    from client to client, and training reads the same whether somebody looks or not.
    """
    if not steps:
        return everyones(state.x, task).view(len(state.x), task.N, -1)
    rates, out = each_client(rate, state.x, task).split(task.N), []
    everyone, unread = np.arange(task.N)[None], np.zeros((1, task.N), dtype=np.int64)
    for seed, x, lr in zip(state.seeds, state.x, rates, strict=True):
        other = int(stream(seed, "personal", state.t).integers(2**63))
        data = task.data.of(seed)
        reading, _ = data.read((other,), everyone, unread, steps, batch_size)
        batches = upload([reading], state.x.device)[0].batches(data.dtype)
        out.append(local_sgd(task, x.repeat(task.N, 1), batches, lr))
    return torch.stack(out)


def paid(rounds: int, models: float, gradients: float, last: float = 0) -> dict[str, float]:
    """Return what so many rounds cost, given what one does; ``last`` gradients come at the end."""
    check_whole_number("rounds", rounds, 0)
    return {"models": models * rounds, "gradients": gradients * rounds + last}


def spent(algorithm: ShuffledSGD, rounds: int, sizes: Sequence[int]) -> dict[str, float]:
    """Return what a client has paid after so many rounds of :class:`ShuffledSGD` or :class:`PERM`.

    In every round a client gets a model, takes K steps on it and passes it on: two models, K
    gradients. When weights change, after an epoch of N rounds or after ``refresh`` of them, PERM
    adds four messages: the global model comes, a gradient goes for its step; the new one comes, a
    full gradient goes for the weights. The work of these counts in minibatches: a full gradient of
    n_j samples is ``n_j / batch_size`` of them, and a global step on M samples ``M / batch_size``;
    the mean over the clients is returned. Where batch_size is None, a minibatch is all that a
    client has. The closing step that neither takes by itself,
    :func:`~fedlib.papers.personalization.algorithm.final_step`, is not counted.

    Parameters
    ----------
    sizes
        Samples of each client, ``[N]``.
    """
    n = np.asarray(sizes, dtype=float)
    if n.ndim != 1 or not len(n) or not (n > 0).all():
        raise FedlibError(f"sizes are each client's samples, [N], all positive; got {n}.")
    cost = paid(rounds, 2, algorithm.local_steps)
    if not isinstance(algorithm, PERM):
        return cost
    read = n if algorithm.global_batch is None else np.full_like(n, algorithm.global_batch)
    unit = n if algorithm.batch_size is None else algorithm.batch_size
    ends = rounds // (algorithm.refresh or len(n))
    extra = ends * float(np.mean((read + n) / unit))
    return {"models": cost["models"] + 4 * ends, "gradients": cost["gradients"] + extra}
