"""What the matrix of methods runs: every method in every situation, at three values of its knob."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedlib import datasets
from fedlib.datasets import partition
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.rng import stream
from fedlib.engine.simulation import History, simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, Settings, alike, checkpoint, joined, off_cycle, split_runs
from fedlib.lab.job import study as function_of
from fedlib.lab.studies.personalization_people import Judges
from fedlib.lab.studies.shared import build_task, dealt, measured, pool_pixels, side_by_side
from fedlib.papers.beyond.algorithm import AmplifiedHierarchicalSGD
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.methods import fednova, fedprox, lookahead, mifa, scaffold, server
from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitMinibatch
from fedlib.papers.personalization import others
from fedlib.papers.personalization.algorithm import PERM, Mixing, ShuffledSGD
from fedlib.papers.personalization.algorithm import State as Mixed
from fedlib.population.delays import Deterministic
from fedlib.population.participation import Full, Independent, Markov, Participation, Periodic
from fedlib.schema import NonNegativeFloat, PositiveFloat, PositiveInt


class Trying(Settings):
    """One method in one situation."""

    situation: str  # of SITUATIONS
    knob: NonNegativeFloat  # how hard it is; what it is, SITUATIONS says
    method: str  # of METHODS, or "package.module:function", a function of a Conditions
    strength: NotRequired[PositiveFloat]  # the method's own setting, where it has one
    interval: NotRequired[PositiveInt]  # of amplification, where availability has no cycle
    waits: NotRequired[bool]  # a round lasts until the slowest client has taken all its steps
    dataset: str
    pool: NotRequired[PositiveInt]  # side of the square blocks of pixels that are averaged
    model: list[str | PositiveInt]
    clients: PositiveInt
    cohort: NotRequired[PositiveInt]  # clients a round, where not everybody comes
    samples: NotRequired[PositiveInt]  # of each client, where they are not all of the set
    skew: NotRequired[NonNegativeFloat]  # share of a client's samples from anywhere; 1 is no skew
    local_steps: PositiveInt  # of a client that is not slow, in a round
    batch_size: PositiveInt
    lr: PositiveFloat
    rounds: PositiveInt
    looks: PositiveInt
    evaluate_on: PositiveInt  # training samples


METHOD = ("method", "strength", "interval", "waits", "lr", "batch_size", "rounds", "looks",
          "evaluate_on")  # settings that are no part of a situation  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A situation, made for some seeds.

    Attributes
    ----------
    task
        Its data, and the model.
    process
        Who takes part when.
    steps
        Local steps that each client can take while a round lasts, ``[N]``.
    hashes
        Of the data.
    judging
        For each seed the rows that each client's model is judged by, where each has its own truth.
    """

    task: Task
    process: Participation
    steps: tuple[int, ...]
    hashes: dict[str, str]
    judging: dict[int, list[np.ndarray]] | None = None


@dataclass(frozen=True)
class Conditions:
    """What a method is made from.

    Attributes
    ----------
    participation
        Who takes part when.
    lr
        Local step size, one for each row.
    local_steps
        Local steps of each client in a round; of the slowest, where some are slow.
    batch_size
        Minibatch size.
    strength
        The method's own setting, or None.
    steps
        Local steps that each client has time for in a round, ``[N]``.
    cycle
        Rounds after which everybody has been there once, where that is fixed; else 1, or what the
        settings say.
    rounds
        How many there are.
    """

    participation: Participation
    lr: tuple[float, ...]
    local_steps: int
    batch_size: int
    strength: float | None
    steps: tuple[int, ...]
    cycle: int
    rounds: int

    @property
    def basic(self) -> tuple[Participation, tuple[float, ...], int, int]:
        """What most methods begin with, from participation and step size to the minibatch size."""
        return self.participation, self.lr, self.local_steps, self.batch_size


# --- situations -----------------------------------------------------------------------------------


def _hashes(data: datasets.Dataset, *used: Any) -> dict[str, str]:
    return {**data.hashes, "as used": datasets.fingerprint(*used)}


def _place(
    s: Trying, seeds: Sequence[int], device: str, process: Participation, steps: Any = None
) -> Place:
    """Return the situation of a process: a class for each client, but for a share from anywhere."""
    data, N = datasets.load(s["dataset"], progress=False), s["clients"]
    splits = {seed: partition.similarity(data.train_y, N, seed, other=s["skew"]) for seed in seeds}
    task, hashes = dealt(s, data, splits, device)
    every = np.broadcast_to(s["local_steps"] if steps is None else steps, N)
    return Place(task, process, tuple(every.tolist()), hashes)


def everybody(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """Everybody is always there; the knob is the share of samples that are from anywhere."""
    return _place({**s, "skew": s["knob"]}, seeds, device, Full(s["clients"]))


def sampled(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """Some are drawn, afresh each round; the knob is the share of samples from anywhere."""
    process = Independent(s["clients"], s["cohort"])
    return _place({**s, "skew": s["knob"]}, seeds, device, process)


def cycles(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """Five groups by label are there in turn; the knob is the rounds of each group's window."""
    window = int(s["knob"])
    return _place(s, seeds, device, Periodic(s["clients"], s["cohort"], 5, window))


STAY = 0.1  # probability of leaving in a round
OFTEN = 0.5  # share of time that clients are there


def come_and_go(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """Clients come and go; the knob is how many times rarer those of half of the labels are there.

    Each is a Markov chain of its own, which leaves with probability 0.1 and is there half of the
    time, or a part of that.
    """
    shares = np.where(np.arange(s["clients"]) * 2 < s["clients"], OFTEN / s["knob"], OFTEN)
    on = tuple((STAY * shares / (1 - shares)).tolist())
    return _place(s, seeds, device, Markov(s["clients"], on, STAY, s["cohort"]))


def slow(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """All come, and those of half of the labels are slow; the knob is how many times slower."""
    fast = s["local_steps"]
    steps = np.where(np.arange(s["clients"]) * 2 < s["clients"], max(1, fast // s["knob"]), fast)
    return _place(s, seeds, device, Full(s["clients"]), steps.astype(int))


def opposite(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """All come, and some call class c what others call C − 1 − c; the knob is their share.

    Each client has as many samples to learn from, and a hundred to be judged by.
    """
    data, N, count = datasets.load(s["dataset"], progress=False), s["clients"], s["samples"]
    x = pool_pixels(np.concatenate([data.train_x, data.test_x]), s.get("pool", 1))
    y = np.concatenate([data.train_y, data.test_y])
    judged = min(100, len(y) // N - count)
    kind = np.arange(N) < round(s["knob"] * N)
    rows = {}
    for seed in seeds:
        order = stream(seed, "opposite").permutation(len(y))[: N * (count + judged)]
        rows[seed] = order.reshape(N, -1) + kind[:, None] * len(y)
    both, labels = torch.cat([x, x]), np.concatenate([y, y.max() - y])
    train = {seed: list(part[:, :count]) for seed, part in rows.items()}
    judging = {seed: list(part[:, count:]) for seed, part in rows.items()}
    steps = (s["local_steps"],) * N
    task = build_task(s, train, device, both, labels)
    return Place(task, Full(N), steps, _hashes(data, both, labels), judging)


LETTERS = 4  # before the one that is to be told


def people(s: Trying, seeds: Sequence[int], device: str) -> Place:
    """Real or made people, some of them drawn afresh each round; the knob is how many.

    Those with the most rows, and of each so many. Of a text the last four characters are features,
    one column for each character at each place.
    """
    data, N, count = datasets.load(s["dataset"], progress=False), s["clients"], s["samples"]
    own, rng = datasets.owners(data), stream(0, "people")
    most = np.argsort(-own.sizes, kind="stable")[: 2 * N]
    pick = [rng.permutation(own.train_parts[n])[:count] for n in most]
    judge = np.concatenate([rng.permutation(own.test_parts[n])[:count] for n in most])
    rows, ends = np.concatenate(pick), np.cumsum([len(part) for part in pick])
    train_x, test_x = (_seen(x, s) for x in (data.train_x[rows], data.test_x[judge]))
    y, test_y = data.train_y[rows], data.test_y[judge]
    parts = np.split(np.arange(len(rows)), ends[:-1])
    who = {seed: stream(seed, "people").permutation(len(most))[:N] for seed in seeds}
    splits = {seed: [parts[n] for n in numbers] for seed, numbers in who.items()}
    task = build_task(s, splits, device, train_x, y, test_x, test_y)
    process = Independent(N, int(s["knob"]))
    steps = (s["local_steps"],) * N
    return Place(task, process, steps, _hashes(data, train_x, y, test_x, test_y))


def _seen(x: np.ndarray, s: Trying) -> Tensor:
    """Return images with their pixels averaged, or the last characters of a text as columns."""
    if x.dtype != np.uint8 or x.ndim != 2:
        return pool_pixels(x, s.get("pool", 1))
    symbols = s["model"][1] // LETTERS
    last = torch.from_numpy(x[:, -LETTERS:].astype(np.int64))
    return torch.nn.functional.one_hot(last, symbols).flatten(1).float()


SITUATIONS: dict[str, Callable[[Trying, Sequence[int], str], Place]] = {
    "everybody": everybody,
    "sampled": sampled,
    "cycles": cycles,
    "come and go": come_and_go,
    "slow": slow,
    "opposite": opposite,
    "people": people,
}


# --- methods --------------------------------------------------------------------------------------


def amplified_merges(s: Conditions) -> AmplifiedHierarchicalSGD:
    """Return amplified merges of groups of one client, each iterating as fast as it can."""
    most = max(s.steps)
    delays, sync = tuple(Deterministic(most / steps) for steps in s.steps), most - 0.5
    return AmplifiedHierarchicalSGD(
        (1,) * len(s.steps), s.lr, sync, 2.0 * most * s.rounds, delays, Deterministic(0.0),
        s.batch_size, amplify=s.strength,
    )  # fmt: skip


METHODS: dict[str, Callable[[Conditions], Any]] = {
    "fedavg": lambda s: FedAvg(*s.basic),
    "fedprox": lambda s: fedprox.FedProx(*s.basic, mu=s.strength),
    "scaffold": lambda s: scaffold.SCAFFOLD(*s.basic),
    "fedavgm": lambda s: server.FedAvgM(*s.basic, beta=s.strength),
    "fedadam": lambda s: server.FedAdam(*s.basic, server_lr=s.strength),
    "fedyogi": lambda s: server.FedYogi(*s.basic, server_lr=s.strength),
    "lookahead": lambda s: lookahead.Lookahead(*s.basic, alpha=s.strength),
    "mifa": lambda s: mifa.MIFA(*s.basic),
    "amplified": lambda s: GeneralizedFedAvg(
        s.participation, s.lr, s.strength, s.cycle, s.local_steps, s.batch_size
    ),
    "waiting": lambda s: WaitMinibatch(
        s.participation, s.lr, 1.0, s.cycle, s.local_steps, s.batch_size
    ),
    "uneven": lambda s: fednova.UnevenFedAvg(s.participation, s.lr, s.steps, s.batch_size),
    "fednova": lambda s: fednova.FedNova(s.participation, s.lr, s.steps, s.batch_size),
    "amplified merges": amplified_merges,
    "local": lambda s: others.LocalOnly(*s.basic[1:]),
    "localized": lambda s: others.LocalizedFedAvg(*s.basic[1:], 10),
    "ditto": lambda s: others.Ditto(*s.basic[1:], s.strength),
    "apfl": lambda s: others.APFL(*s.basic[1:], s.strength),
    "ifca": lambda s: others.IFCA(*s.basic[1:], 2),
    "perm": lambda s: PERM(*s.basic[1:], mixing=Mixing(s.strength), global_lr=s.lr),
}
TOGETHER = ("run", "lr", "tuned_as")  # in what rows of one batch may differ


def build(name: str, setup: Conditions) -> Any:
    """Return a method by its name in :data:`METHODS`, or one of your own, ``"module:function"``."""
    if name in METHODS:
        return METHODS[name](setup)
    if ":" not in name:
        raise unknown("method", name, METHODS)
    algorithm = function_of(name)(setup)  # type: ignore[arg-type]  # a function, of a setup
    if missing := [part for part in ("init", "draws", "round") if not hasattr(algorithm, part)]:
        raise FedlibError(f"{name} returns {algorithm!r}, which has no {missing[0]}(). Return an "
                          "algorithm, see the guide 'Add an algorithm'.")  # fmt: skip
    return algorithm


@alike("seeds", "runs")
def trying(job: Job[Trying]) -> Outcome:
    """Train every method in its situation, all seeds side by side.

    Every run has the same rounds, and clients take the same steps, unless they are slow or the
    others wait for them; ``clock`` is the time, one for a round in which nobody waits. Rows of the
    split ``spent`` say what a run has taken by its end: minibatch ``gradients`` and ``models``
    sent, both of all clients together, and models ``kept`` by server and clients.
    """
    s, frames, diverged, places = job.settings, {}, {}, {}
    for runs in side_by_side(s, TOGETHER):
        first, names = runs[0], [run["run"] for run in runs]
        if first["situation"] not in SITUATIONS:
            raise unknown("situation", first["situation"], SITUATIONS)
        key = repr([first.get(name) for name in Trying.__annotations__ if name not in METHOD])
        if key not in places:
            places[key] = SITUATIONS[first["situation"]](first, job.seeds, job.device)
        setup = _setup(places[key], runs, len(job.seeds))
        algorithm = build(first["method"], setup)
        history = _trained(job, runs, places[key], algorithm, setup.rounds)
        parts, lost = split_runs(history, names, len(job.seeds))
        bill = _spent(job, places[key], setup, algorithm, history)
        for name, frame in parts.items():
            rows = pd.concat([frame, bill.assign(run=name)], ignore_index=True)
            frames[name] = rows.assign(clock=rows["round"] * (first["rounds"] / setup.rounds))
        diverged |= lost
    hashes = {k: v for place in places.values() for k, v in place.hashes.items()}
    return joined(frames, diverged, s["runs"], hashes)


def _setup(place: Place, runs: Sequence[Trying], seeds: int) -> Conditions:
    """Return what the method of runs that differ in rates is made from."""
    s, slowest, most = runs[0], min(place.steps), max(place.steps)
    waits, rounds = s.get("waits", False), s["rounds"]
    return Conditions(
        place.process, tuple(run["lr"] for run in runs for _ in range(seeds)),
        most if waits else slowest, s["batch_size"], s.get("strength"), place.steps,
        s.get("interval", place.process.cycle),
        max(1, rounds * slowest // most) if waits else rounds,
    )  # fmt: skip


def _trained(
    job: Job[Trying], runs: list[Trying], place: Place, algorithm: Any, rounds: int
) -> History:
    """Train the rows of some runs; where truths differ, each client's own model is judged."""
    s, every, task = runs[0], job.seeds * len(runs), place.task
    at, judges = off_cycle(rounds, s["looks"], place.process.cycle), {}
    if place.judging is not None:
        parts = {"train": task.data.splits, "test": place.judging}
        judges = {split: Judges(rows, every) for split, rows in parts.items()}

    def look(state: Any, task: Task) -> dict[tuple[str, str], Tensor]:
        theta = _personal(algorithm, state, task)
        found = {split: judge(task, theta) for split, judge in judges.items()}
        return {(k, metric): v.mean(1) for k, ms in found.items() for metric, v in ms.items()}

    splits = () if judges else ("train", "test")
    return simulate(
        algorithm, task, rounds, every, state=algorithm.init(task, every),
        evaluation=Evaluation(
            at=at, splits=splits, limit=s["evaluate_on"], measure=look if judges else None
        ),
        name=[run["run"] for run in runs for _ in job.seeds], progress=job.progress,
        checkpoint=checkpoint(job, s["run"], 500),
    )  # fmt: skip


def _personal(algorithm: Any, state: Any, task: Task) -> Tensor:
    """Return the model that each client uses, ``[R, N, P]``: its own, or the global one."""
    if hasattr(algorithm, "personal"):
        return algorithm.personal(state, task)
    return state.v if isinstance(state, Mixed) else state.x.unsqueeze(1).expand(-1, task.N, -1)


def _spent(
    job: Job[Trying], place: Place, setup: Conditions, algorithm: Any, history: History
) -> pd.DataFrame:
    """Return rows of what every seed has spent: gradients, models sent and models kept."""
    N, T, rows = place.task.N, setup.rounds, []
    tensors = (getattr(history.state, field.name) for field in fields(history.state))
    kept = sum(t.numel() for t in tensors if isinstance(t, Tensor)) / history.state.x.numel()
    uneven = isinstance(algorithm, fednova.UnevenFedAvg | AmplifiedHierarchicalSGD)
    steps = np.array(place.steps if uneven else [setup.local_steps] * N)
    for seed in job.seeds:
        present = (setup.participation.weights(seed, 0, T) > 0).sum(0)
        if isinstance(algorithm, WaitMinibatch):
            present = np.full(N, T // setup.cycle)
        models = (4 if isinstance(algorithm, scaffold.SCAFFOLD) else 2) * present.sum()
        spent = dict(gradients=present @ steps, models=models)
        if isinstance(algorithm, ShuffledSGD):
            sizes = np.array([len(part) for part in place.task.data.splits[seed]])
            own = others.spent(algorithm, T, sizes)
            spent = {name: N * value for name, value in own.items()}
        elif hasattr(algorithm, "spent"):
            spent = {name: N * value for name, value in algorithm.spent(T).items()}
        rows += measured(dict(seed=seed, round=T, split="spent"), {**spent, "kept": kept})
    return pd.DataFrame(rows)


# --- what a device is tried with ------------------------------------------------------------------

SOME = Independent(trials.CLIENTS, 2)

TRIALS: dict[str, trials.Trial] = {
    "FedProx": lambda d: (fedprox.FedProx(SOME, 0.05, 2, 4, mu=0.1), trials.TASKS["mlp"](d)),
    "SCAFFOLD": lambda d: (scaffold.SCAFFOLD(SOME, 0.05, 2, 4), trials.TASKS["mlp"](d)),
    "UnevenFedAvg": lambda d: (
        fednova.UnevenFedAvg(SOME, 0.05, (1, 2, 3, 4), 4), trials.TASKS["softmax"](d),
    ),
    "FedNova": lambda d: (fednova.FedNova(SOME, 0.05, (1, 2, 3, 4), 4), trials.TASKS["mlp"](d)),
    "FedAvgM": lambda d: (server.FedAvgM(SOME, 0.05, 2, 4), trials.TASKS["mlp"](d)),
    "FedAdagrad": lambda d: (
        server.FedAdagrad(SOME, 0.05, 2, 4, server_lr=0.1), trials.TASKS["softmax"](d),
    ),
    "FedAdam": lambda d: (server.FedAdam(SOME, 0.05, 2, 4, server_lr=0.1), trials.TASKS["mlp"](d)),
    "FedYogi": lambda d: (
        server.FedYogi(SOME, 0.05, 2, 4, server_lr=0.1), trials.TASKS["softmax"](d),
    ),
    "MIFA": lambda d: (mifa.MIFA(SOME, 0.05, 2, 4), trials.TASKS["mlp"](d)),
    "Lookahead": lambda d: (
        lookahead.Lookahead(SOME, 0.05, 2, 4, interval=2), trials.TASKS["mlp"](d),
    ),
}  # fmt: skip
