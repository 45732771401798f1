"""What the personalization chapter runs: many ways to serve clients that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
from fedlib.errors import FedlibError
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, alike, checkpoint, joined, off_cycle, split_runs
from fedlib.lab.studies.personalization_people import (
    Judges,
    People,
    Population,
    check_people,
    people,
)
from fedlib.lab.studies.shared import build_task, check_known, check_model, side_by_side
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
    clusters: NotRequired[PositiveInt]  # of IFCA


Basic = tuple[tuple[float, ...], int, int]  # rates, local steps, batch size


def _mixing(s: Serving) -> Mixing:
    return Mixing(s["lam"], unbiased=s.get("unbiased", False))


def _visits(s: Serving) -> str:
    return s.get("visits", "relative")


METHODS: dict[str, Callable[[Basic, Serving, Population], Any]] = {
    "perm": lambda b, s, _: PERM(*b, _visits(s), mixing=_mixing(s), global_lr=b[0]),
    "perm-each-round": lambda b, s, _: PERM(
        *b, _visits(s), mixing=_mixing(s), global_lr=b[0], refresh=1
    ),
    "two-stage": lambda b, s, _: ShuffledSGD(*b, _visits(s)),
    "fedavg": lambda b, s, _: others.LocalizedFedAvg(*b, 0),
    "localized": lambda b, s, _: others.LocalizedFedAvg(*b, s["tune_steps"]),
    "per-fedavg": lambda b, s, _: others.PerFedAvg(*b, s["inner_lr"]),
    "pfedme": lambda b, s, _: others.PFedMe(*b, s["inner_lr"], lam=s["pull"]),
    "ditto": lambda b, s, _: others.Ditto(*b, s["pull"]),
    "apfl": lambda b, s, _: others.APFL(*b, s["mixing"]),
    "apfl-adaptive": lambda b, s, _: others.APFL(*b, s["mixing"], True),
    "ifca": lambda b, s, _: others.IFCA(*b, s["clusters"]),
    "local": lambda b, s, _: others.LocalOnly(*b),
    "oracle": lambda b, s, p: others.Oracle(*b, p.groups),
}
METHOD_NEEDS = {
    "perm": ["lam"],
    "perm-each-round": ["lam"],
    "two-stage": ["lam"],
    "localized": ["tune_steps"],
    "per-fedavg": ["inner_lr"],
    "pfedme": ["inner_lr", "pull"],
    "ditto": ["pull"],
    "apfl": ["mixing"],
    "apfl-adaptive": ["mixing"],
    "ifca": ["clusters"],
}  # of a run's settings
TOGETHER = ("run", "lr", "tuned_as")  # in what rows of one batch may differ
LISTENED = 0.01  # a weight from which on a client counts as listened to
MAPPED = 200  # clients up to which a record keeps all weights


def _keeps_weights(s: Serving) -> bool:
    """Say whether the record keeps final weights: those of its first seed and run alone."""
    each = [{**s, **run} for run in s["runs"]]
    return any(r["clients"] <= MAPPED and "lam" in METHOD_NEEDS.get(r["method"], ()) for r in each)


@alike("seeds", "runs", unless=_keeps_weights)
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
    for runs in side_by_side(s, TOGETHER):
        key = repr([runs[0].get(name) for name in People.__annotations__])
        if key not in made:
            made[key] = people(runs[0], job.seeds)
        names = [run["run"] for run in runs]
        history, first = _served(job, runs, made[key])
        parts, lost = split_runs(history, names, len(job.seeds))
        frames |= {name: pd.concat([frame, bill(frame)]) for name, frame in parts.items()}
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
        r, where = {**s, **run}, f"Run '{run['run']}':"
        check_people(r)
        check_known(r, method=METHODS, visits=VISITS)
        if missing := [key for key in METHOD_NEEDS.get(r["method"], []) if key not in r]:
            needs = " and ".join(missing)
            raise FedlibError(f"{where} the method '{r['method']}' needs {needs}. Set it.")
        check_model(r["model"], (r["features"],) if r["split"] == "halves" else None)
        if r.get("mixing", 0) > 1:
            raise FedlibError(f"{where} mixing is a share, at most 1; got {r['mixing']}.")
        if r.get("warmup", 0) >= r["rounds"]:
            raise FedlibError(
                f"{where} {r['warmup']} rounds of warm-up leave none of {r['rounds']} for "
                f"'{r['method']}'. Take fewer, or more rounds."
            )
        learned = round(r["samples"] * (1 if r["split"] == "owners" else 1 - r["judging"]))
        if r["batch_size"] > learned:
            raise FedlibError(
                f"{where} a minibatch of {r['batch_size']}, and clients learn from {learned} "
                "samples. Take a smaller batch_size, or more samples."
            )


def bill(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what each seed of a run has spent at its end, as rows of the split ``spent``."""
    losses = frame[(frame["split"] == "test") & (frame["metric"] == "loss")]
    end = losses.sort_values("round").groupby("seed", sort=False).tail(1)
    spent = [end.assign(metric=name, value=end[name]) for name in ("models", "gradients")]
    return pd.concat(spent).assign(split="spent")


def _served(
    job: Job[Serving], runs: list[Serving], population: Population
) -> tuple[History, pd.DataFrame | None]:
    """Carry out runs that differ in their rates; also return the final weights of the first."""
    s, every = runs[0], job.seeds * len(runs)
    basic = tuple(run["lr"] for run in runs for _ in job.seeds), s["local_steps"], s["batch_size"]
    task = build_task(s, population.train, job.device, population.x, population.y)
    evaluation = ClientMetrics(population, every)
    rounds, x = off_cycle(s["rounds"], s["looks"], task.N), task.init(job.seeds)
    sizes = {seed: [*map(len, population.train[seed])] for seed in job.seeds}
    x, frames, lost = x.repeat(len(runs), 1), [], {}
    for method, start, stop in phases(s):
        algorithm = METHODS[method](basic, s, population)
        state = algorithm.init(task, every, x)
        if method == "two-stage":
            discrepancies = estimate(task, x, upload([halves(task.data, every)], x.device)[0])
            state = replace(state, A=_mixing(s).weights(discrepancies, state.A))
        part = simulate(
            algorithm, task, stop - start, every, state=state,
            evaluation=Evaluation(
                at=[t - start for t in rounds if start < t < stop],
                measure=evaluation.of(algorithm),
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
    last = (s["method"], warm, s["rounds"])
    return [("fedavg", 0, warm), last] if warm else [last]


def _dated(
    frame: pd.DataFrame, algorithm: Any, start: int, steps: int, sizes: Mapping[int, Sequence[int]]
) -> pd.DataFrame:
    """Return the rows of a phase that began after ``start`` rounds of FedAvg, with their costs."""
    frame = frame[frame["round"] > 0] if start else frame

    @functools.cache
    def spent(seed: int, t: int) -> dict[str, float]:
        shuffled = isinstance(algorithm, ShuffledSGD)
        return others.spent(algorithm, t, sizes[seed]) if shuffled else algorithm.spent(t)

    bills = [spent(seed, t) for seed, t in zip(frame["seed"], frame["round"], strict=True)]
    costs = {name: [bill[name] + start * before for bill in bills]
             for name, before in (("models", 2), ("gradients", steps))}  # fmt: skip
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


class ClientMetrics:
    """The evaluation of a round: every client by its own model."""

    def __init__(self, population: Population, seeds: tuple[int, ...]) -> None:
        self.learned = Judges(population.train, seeds)
        self.judging = Judges(population.judging, seeds)
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
            judged = {"train": self.learned(task, theta), "test": self.judging(task, theta)}
            metrics = {
                (split, metric): value.mean(1)
                for split, each in judged.items()
                for metric, value in each.items()
            }
            if all((self.groups == k).any(1).all() for k in range(2)) and self.groups.max() == 1:
                for k in range(2):
                    mine = torch.from_numpy(self.groups == k)
                    mean = (judged["test"]["accuracy"] * mine).sum(1) / mine.sum(1)
                    metrics[f"group {k}", "accuracy"] = mean
                    metrics[f"group {k}", "above guessing"] = mean - self.majority[k]
            return metrics | (weight_metrics(state.A, self.groups) if mixed else {})

        return look


def majority(population: Population, seed: int, kind: int) -> float:
    """Return the accuracy of guessing the most frequent class, on what judges one kind."""
    clients = zip(population.judging[seed], population.groups[seed], strict=True)
    labels = [population.y[part] for part, group in clients if group == kind]
    return float(np.bincount(np.concatenate(labels)).max() / sum(map(len, labels))) if labels else 0


def weight_metrics(A: Tensor, groups: np.ndarray) -> dict[tuple[str, str], Tensor]:
    """Return the metrics of mixing weights ``[R, N, N]``, each ``[R]``.

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
        ("weights", "listened"): (A > LISTENED).sum(2).amax(1).double(),
    }


# --- what a device is tried with ------------------------------------------------------------------

def _with(algorithm: Any, model: str = "mlp") -> trials.Trial:
    return lambda d: (algorithm, trials.TASKS[model](d))


BY_STEPS = Mixing((20.0, 40.0), steps=2)

TRIALS: dict[str, trials.Trial] = {
    "ShuffledSGD": _with(ShuffledSGD(0.05, 2, 4)),
    "ShuffledSGD, visits as printed": _with(ShuffledSGD((0.02, 0.03), 2, None, "printed", 3.0)),
    "PERM": _with(PERM(0.05, 2, 4)),
    "PERM, weights in every round": _with(PERM(0.05, 2, 4, refresh=1)),
    "PERM, weights by steps": _with(PERM(0.05, 2, 4, mixing=BY_STEPS, global_batch=6)),
    "LocalizedFedAvg": _with(others.LocalizedFedAvg(0.05, 2, 4), "small_cnn"),
    "PerFedAvg": _with(others.PerFedAvg((0.05, 0.1), 2, 4)),
    "PerFedAvg, hessian-free": _with(others.PerFedAvg(0.05, 2, 4, (0.1, 0.2), "hessian-free")),
    "PFedMe": _with(others.PFedMe(0.01, 2, 4, inner_steps=3)),
    "Ditto": _with(others.Ditto(0.05, 2, 4)),
    "APFL": _with(others.APFL(0.05, 2, None)),
    "APFL, adaptive": _with(others.APFL(0.05, 2, 4, (0.3, 0.6), True)),
    "IFCA": _with(others.IFCA(0.05, 2, 4, 3)),
    "LocalOnly": _with(others.LocalOnly(0.05, 2, 4)),
    "Oracle": _with(others.Oracle(0.05, 2, 4, (0, 1, 1, 0))),
    "PartialFedAvg": _with(masks.PartialFedAvg(0.05, 2, 4, (1.0, 0.5, 0.5, 0.25))),
    "PartialFedAvg, random, of inputs": _with(
        masks.PartialFedAvg((0.05, 0.1), 2, None, (1.0, 0.5, 0.5, 0.25), "random"), "softmax"
    ),
}
