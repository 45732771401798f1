"""What the personalization chapter runs: many ways to serve clients that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedlib.engine.draws import upload
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.simulation import History, simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, alike, apart, checkpoint, joined, off_cycle
from fedlib.lab.studies.personalization_people import (
    Judges,
    People,
    Population,
    check_people,
    people,
)
from fedlib.lab.studies.shared import build_task, check_model, side_by_side
from fedlib.papers.personalization import masks, others, weights
from fedlib.papers.personalization.algorithm import PERM, VISITS, Mixing, ShuffledSGD, State
from fedlib.papers.personalization.discrepancy import estimate, halves
from fedlib.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Serving(People):
    """One way to serve clients."""

    model: list[str | PositiveInt]  # its name, and sizes
    l2: NotRequired[NonNegativeFloat]
    method: str
    lr: PositiveFloat
    local_steps: PositiveInt
    batch_size: PositiveInt
    rounds: PositiveInt  # of communication, warm-up included
    warmup: NotRequired[NonNegativeInt]  # rounds of FedAvg before
    looks: PositiveInt
    lam: NotRequired[PositiveFloat]  # λ of PERM, in tr Σ
    unbiased: NotRequired[bool]
    visits: NotRequired[str]
    inner_lr: NotRequired[PositiveFloat]  # of Per-FedAvg and pFedMe
    pull: NotRequired[PositiveFloat]  # λ of pFedMe and of Ditto
    mixing: NotRequired[PositiveFloat]  # α of APFL
    tune_steps: NotRequired[PositiveInt]  # of localized FedAvg


Rates = tuple[float, ...]
Build = Callable[[Serving, Rates, Population], Any]


def _basic(s: Serving, lr: Rates) -> tuple[Rates, int, int]:
    return lr, s["local_steps"], s["batch_size"]


def _shuffled(s: Serving, lr: Rates, _: Population) -> ShuffledSGD:
    return ShuffledSGD(*_basic(s, lr), s.get("visits", "relative"))


def _perm(s: Serving, lr: Rates, _: Population) -> PERM:
    visits = s.get("visits", "relative")
    return PERM(*_basic(s, lr), visits, mixing=_mixing(s), global_lr=lr)


def _mixing(s: Serving) -> Mixing:
    return Mixing(s["lam"], unbiased=s.get("unbiased", False))


METHODS: dict[str, Build] = {
    "perm": _perm,
    "two-stage": _shuffled,
    "fedavg": lambda s, lr, _: others.LocalizedFedAvg(*_basic(s, lr), 0),
    "localized": lambda s, lr, _: others.LocalizedFedAvg(*_basic(s, lr), s["tune_steps"]),
    "per-fedavg": lambda s, lr, _: others.PerFedAvg(*_basic(s, lr), s["inner_lr"]),
    "pfedme": lambda s, lr, _: others.PFedMe(*_basic(s, lr), s["inner_lr"], lam=s["pull"]),
    "ditto": lambda s, lr, _: others.Ditto(*_basic(s, lr), s["pull"]),
    "apfl": lambda s, lr, _: others.APFL(*_basic(s, lr), s["mixing"]),
    "local": lambda s, lr, _: others.LocalOnly(*_basic(s, lr)),
    "oracle": lambda s, lr, p: others.Oracle(*_basic(s, lr), p.groups),
}
ASKS = {
    "perm": ["lam"],
    "two-stage": ["lam"],
    "localized": ["tune_steps"],
    "per-fedavg": ["inner_lr"],
    "pfedme": ["inner_lr", "pull"],
    "ditto": ["pull"],
    "apfl": ["mixing"],
}  # of a run's settings
ALONE = ("run", "lr", "tuned_as")  # in what rows of one batch may differ
MANY = 0.01  # a weight from which on a client counts as listened to
MAPPED = 200  # clients up to which a record keeps all weights


@alike("seeds", "runs")
def serving(job: Job[Serving]) -> Outcome:
    """Serve clients in every way that an experiment names, all seeds side by side.

    Metrics are means over the clients, each judged by its own model: ``train`` on the rows that it
    learned from, ``test`` on its own that it did not; ``group k`` the same for clients of one kind,
    where there are two kinds, and how far it is above guessing their most
    frequent class. Rows of the split ``weights`` tell of the mixing weights; those of ``final
    weights`` hold them, client i's weight for j, at the end, for the first seed and up to 200
    clients. ``models`` and ``gradients`` are
    what a client has spent by then.
    """
    check_runs(job.settings)
    s, frames, diverged, made = job.settings, {}, {}, {}
    for runs in side_by_side(s, ALONE):
        key = repr([runs[0].get(name) for name in People.__annotations__])
        if key not in made:
            made[key] = people(runs[0], job.seeds)
        names = [run["run"] for run in runs]
        history, first = _served(job, runs, made[key])
        found, lost = apart(history, names, len(job.seeds))
        frames |= {name: pd.concat([frame, bill(frame)]) for name, frame in found.items()}
        diverged |= lost
        if first is not None:
            frames[names[0]] = pd.concat([frames[names[0]], first.assign(run=names[0])])
    hashes = {k: v for population in made.values() for k, v in population.hashes.items()}
    return joined(frames, diverged, s["runs"], hashes)


def check_runs(s: Serving) -> None:
    """Refuse an experiment with a run that cannot be carried out, before the first one is.

    Raises
    ------
    FedlibError
        With the run, what came, and what is expected.
    """
    for run in s["runs"]:
        own, told = {**s, **run}, f"Run '{run['run']}':"
        check_people(own)
        if own["method"] not in METHODS:
            raise unknown("method", own["method"], METHODS)
        if missing := [key for key in ASKS.get(own["method"], []) if key not in own]:
            needs = " and ".join(missing)
            raise FedlibError(f"{told} the method '{own['method']}' needs {needs}. Set it.")
        check_model(own["model"], (own["features"],) if own["split"] == "halves" else None)
        if own.get("visits", VISITS[0]) not in VISITS:
            raise unknown("kind of visits", own["visits"], VISITS)
        if own.get("mixing", 0) > 1:
            raise FedlibError(f"{told} mixing is a share, at most 1; got {own['mixing']}.")
        if own.get("warmup", 0) >= own["rounds"]:
            raise FedlibError(
                f"{told} {own['warmup']} rounds of warm-up leave none of {own['rounds']} for "
                f"'{own['method']}'. Take fewer, or more rounds."
            )
        held = own["samples"] * (1 if own["split"] == "owners" else 1 - own["judging"])
        if own["batch_size"] > round(held):
            raise FedlibError(
                f"{told} a minibatch of {own['batch_size']}, and clients learn from {round(held)} "
                "samples. Take a smaller batch_size, or more samples."
            )


def bill(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each seed of a run has spent at its end, as rows of the split ``spent``."""
    own = frame[(frame["split"] == "test") & (frame["metric"] == "loss")]
    end = own.sort_values("round").groupby("seed", sort=False).tail(1)
    told = [end.assign(metric=name, value=end[name]) for name in ("models", "gradients")]
    return pd.concat(told).assign(split="spent")


def _served(
    job: Job[Serving], runs: list[Serving], population: Population
) -> tuple[History, pd.DataFrame | None]:
    """Carry out runs that differ in their rates; also return the final weights of the first."""
    s, every = runs[0], job.seeds * len(runs)
    lr = tuple(run["lr"] for run in runs for _ in job.seeds)
    task = build_task(s, population.train, job.device, population.x, population.y)
    look = Looks(population, every)
    looks, x = off_cycle(s["rounds"], s["looks"], task.N), task.init(job.seeds)
    sizes = np.array([len(part) for part in population.train[job.seeds[0]]])
    x, frames, lost = x.repeat(len(runs), 1), [], {}
    for method, start, stop in phases(s):
        algorithm = METHODS[method](s, lr, population)
        state = algorithm.init(task, every, x)
        if method == "two-stage":
            found = estimate(task, x, upload([halves(task.data, every)], x.device)[0])
            state = replace(state, A=_mixing(s).weights(found, state.A))
        part = simulate(
            algorithm, task, stop - start, every, state=state,
            evaluation=Evaluation(
                at=[t - start for t in looks if start < t < stop], measure=look.of(algorithm)
            ),
            name=[run["run"] for run in runs for _ in job.seeds], progress=job.progress,
            checkpoint=checkpoint(job, f"{s['run']} {method}", 50),
        )  # fmt: skip
        frames.append(_dated(part.frame, algorithm, start, s["local_steps"], sizes))
        late = {run: t + start for run, t in part.diverged.items()}
        lost = late | lost  # the first time counts
        x = part.state.x
    history = History(pd.concat(frames, ignore_index=True), part.state, lost)
    return history, _final(part.state, population, job.seeds[0], s["rounds"])


def phases(s: Serving) -> list[tuple[str, int, int]]:
    """Return which method rules from which round to which: FedAvg before others, where wanted."""
    warm = s.get("warmup", 0)
    own = (s["method"], warm, s["rounds"])
    return [("fedavg", 0, warm), own] if warm else [own]


def _dated(
    frame: pd.DataFrame, algorithm: Any, start: int, steps: int, sizes: np.ndarray
) -> pd.DataFrame:
    """Return the rows of a phase that began after ``start`` rounds of FedAvg, with their costs."""
    frame = frame[frame["round"] > 0] if start else frame
    asked = [int(t) for t in frame["round"].unique()]
    shuffled = isinstance(algorithm, ShuffledSGD)
    spent = {
        t: others.spent(algorithm, t, sizes) if shuffled else algorithm.spent(t) for t in asked
    }
    costs = {
        name: frame["round"].map({t: v[name] for t, v in spent.items()}) + start * before
        for name, before in (("models", 2), ("gradients", steps))
    }
    return frame.assign(round=frame["round"] + start, **costs)


def _final(state: Any, population: Population, seed: int, rounds: int) -> pd.DataFrame | None:
    """Return the mixing weights of the first run at the end, and every client's kind, if few."""
    if not isinstance(state, State) or state.A.shape[1] > MAPPED:
        return None
    A, N = state.A[0].double().cpu().numpy(), state.A.shape[1]
    i, j = np.divmod(np.arange(N * N), N)
    common = dict(seed=seed, round=rounds, clock=float(rounds), split="final weights")
    table = pd.DataFrame(dict(i=i, j=j, metric="weight", value=A.ravel()))
    kinds = pd.DataFrame(dict(i=np.arange(N), j=-1, metric="kind", value=population.groups[seed]))
    return pd.concat([table, kinds]).assign(**common)


class Looks:
    """The evaluation of a round: every client by its own model."""

    def __init__(self, population: Population, seeds: tuple[int, ...]) -> None:
        self.learned = Judges(population.train, seeds)
        self.own = Judges(population.own, seeds)
        self.groups = np.stack([population.groups[seed] for seed in seeds])
        self.majority = [
            torch.tensor([majority(population, seed, k) for seed in seeds], dtype=torch.float64)
            for k in range(2)
        ]

    def of(self, algorithm: Any) -> Callable[[Any, Task], dict[tuple[str, str], Tensor]]:
        """Return the evaluation of an algorithm's runs."""

        def look(state: Any, task: Task) -> dict[tuple[str, str], Tensor]:
            mixed = isinstance(state, State)
            theta = state.v if mixed else algorithm.personal(state, task)
            judged = {"train": self.learned(task, theta), "test": self.own(task, theta)}
            found = {
                (split, metric): value.mean(1)
                for split, each in judged.items()
                for metric, value in each.items()
            }
            if len(np.unique(self.groups)) == 2:
                for k in range(2):
                    mine = torch.from_numpy(self.groups == k)
                    mean = (judged["test"]["accuracy"] * mine).sum(1) / mine.sum(1)
                    found[f"group {k}", "accuracy"] = mean
                    found[f"group {k}", "above guessing"] = mean - self.majority[k]
            return found | (told(state.A, self.groups) if mixed else {})

        return look


def majority(population: Population, seed: int, kind: int) -> float:
    """Return the accuracy of guessing the most frequent class, on what judges one kind."""
    held = zip(population.own[seed], population.groups[seed], strict=True)
    labels = [population.y[part] for part, own in held if own == kind]
    return float(np.bincount(np.concatenate(labels)).max() / sum(map(len, labels))) if labels else 0


def told(A: Tensor, groups: np.ndarray) -> dict[tuple[str, str], Tensor]:
    """Return what there is to tell of mixing weights ``[R, N, N]``, each ``[R]``.

    ``entropy``: of a row, as a share of ``log N``; ``own``: the weight for oneself; ``outside``:
    the weight for clients of another kind (all means over rows); ``listened``: the largest number
    of weights above 0.01 in a row.
    """
    A = A.double().cpu()
    other = torch.from_numpy(groups[:, :, None] != groups[:, None, :])
    entropy = weights.entropy(A) / np.log(max(2, A.shape[1]))
    return {
        ("weights", "entropy"): entropy.mean(1),
        ("weights", "own"): A.diagonal(dim1=1, dim2=2).mean(1),
        ("weights", "outside"): (A * other).sum(2).mean(1),
        ("weights", "listened"): (A > MANY).sum(2).amax(1).double(),
    }


# --- what a device is tried with ------------------------------------------------------------------

def _with(algorithm: Any, model: str = "mlp") -> trials.Trial:
    return lambda d: (algorithm, trials.MODELS[model](d))


BY_STEPS = Mixing((20.0, 40.0), steps=2)

TRIALS: dict[str, trials.Trial] = {
    "ShuffledSGD": _with(ShuffledSGD(0.05, 2, 4)),
    "ShuffledSGD, visits as printed": _with(ShuffledSGD((0.02, 0.03), 2, None, "printed", 3.0)),
    "PERM": _with(PERM(0.05, 2, 4)),
    "PERM, weights by steps": _with(PERM(0.05, 2, 4, mixing=BY_STEPS, global_batch=6)),
    "LocalizedFedAvg": _with(others.LocalizedFedAvg(0.05, 2, 4), "small_cnn"),
    "PerFedAvg": _with(others.PerFedAvg((0.05, 0.1), 2, 4)),
    "PerFedAvg, hessian-free": _with(others.PerFedAvg(0.05, 2, 4, (0.1, 0.2), "hessian-free")),
    "PFedMe": _with(others.PFedMe(0.01, 2, 4, inner_steps=3)),
    "Ditto": _with(others.Ditto(0.05, 2, 4)),
    "APFL": _with(others.APFL(0.05, 2, None)),
    "APFL, adaptive": _with(others.APFL(0.05, 2, 4, (0.3, 0.6), True)),
    "LocalOnly": _with(others.LocalOnly(0.05, 2, 4)),
    "Oracle": _with(others.Oracle(0.05, 2, 4, (0, 1, 1, 0))),
    "PartialFedAvg": _with(masks.PartialFedAvg(0.05, 2, 4, (1.0, 0.5, 0.5, 0.25))),
    "PartialFedAvg, random, of inputs": _with(
        masks.PartialFedAvg((0.05, 0.1), 2, None, (1.0, 0.5, 0.5, 0.25), "random"), "softmax"
    ),
}
