"""What the participation chapter runs: training, the toy, and measurements of participation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from fedlib import datasets
from fedlib.datasets import partition
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.models import location
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import unknown
from fedlib.lab import trials
from fedlib.lab.job import (
    Job,
    Outcome,
    Settings,
    alike,
    checkpoint,
    joined,
    off_cycle,
    split_runs,
)
from fedlib.lab.studies.shared import dealt, measured, side_by_side
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation import theory
from fedlib.papers.participation.algorithm import (
    ALGORITHMS,
    GeneralizedFedAvg,
    WaitFull,
    WaitMinibatch,
)
from fedlib.papers.participation.toy import toy_task
from fedlib.population.participation import (
    PROCESSES,
    Cyclic,
    Full,
    Independent,
    Participation,
    PeriodicSampler,
)
from fedlib.schema import NonNegativeInt, PositiveFloat, PositiveInt


class Split(Settings):
    """A data set, dealt out to clients, and the model they train."""

    dataset: str
    pool: NotRequired[PositiveInt]  # side of the square blocks of pixels that are averaged
    augment: NotRequired[bool]  # crop and flip
    partition: str
    clients: PositiveInt
    model: list[str | PositiveInt]  # its name in MODELS, and sizes


class Availability(Settings):
    """Who takes part when: a process of PROCESSES and what it needs."""

    process: str
    clients: PositiveInt
    cohort: PositiveInt  # clients a round
    window: PositiveInt  # rounds
    compression: PositiveInt  # how many of the paper's rounds one round stands for
    speed: NotRequired[PositiveInt]  # of drift: clients a round
    on: NotRequired[PositiveFloat]  # of a Markov chain: probability of coming,
    off: NotRequired[PositiveFloat]  # and of leaving
    cap: NotRequired[PositiveInt]  # and the most clients a round


class WarmUp(Split, Availability):
    """FedAvg at a larger rate, from which all runs start."""

    warmup_rounds: NonNegativeInt
    warmup_lr: PositiveFloat
    local_steps: PositiveInt
    batch_size: PositiveInt


class Training(WarmUp):
    """Runs after a common warm-up. Rounds, rates and intervals are those of the paper."""

    algorithm: str  # of ALGORITHMS
    rounds: PositiveInt
    lr: PositiveFloat
    compress_lr: NotRequired[bool]  # multiply the rate by the compression; default true
    amplify: NotRequired[PositiveFloat]
    interval: NotRequired[PositiveInt]
    looks: PositiveInt  # about how many evaluations, see fedlib.lab.job.off_cycle
    evaluate_on: PositiveInt  # training samples


class Toy(Settings):
    """The three-client toy."""

    toy_rounds: PositiveInt
    lr: PositiveFloat
    amplify: PositiveFloat
    interval: PositiveInt


class Factor(Availability):
    """Means of participation weights over intervals."""

    rounds: PositiveInt
    warmup_rounds: NonNegativeInt  # that are passed over
    intervals: list[PositiveInt]


class Heterogeneity(WarmUp):
    """Distances between client gradients, at the end of the warm-up."""

    rounds: PositiveInt
    intervals: list[PositiveInt]


class Speedup(Settings):
    """The mean of a Gaussian, estimated by cohorts of several sizes."""

    clients: PositiveInt
    cohorts: list[PositiveInt]
    samples: PositiveInt  # a client
    rounds: PositiveInt
    lr: PositiveFloat


def build_task(s: Split, seeds: Sequence[int], device: str = "cpu") -> tuple[Task, dict[str, str]]:
    """Load the data, split it over the clients anew for each seed and attach the model.

    ``pool`` averages square blocks of pixels, which makes images small enough for a laptop.
    """
    data = datasets.load(s["dataset"], progress=False)
    if s["partition"] not in partition.PARTITIONERS:
        raise unknown("partitioner", s["partition"], partition.PARTITIONERS)
    deal = partition.PARTITIONERS[s["partition"]]
    return dealt(s, data, {n: deal(data.train_y, s["clients"], n) for n in seeds}, device)


def build_process(s: Availability) -> Participation:
    """Return the participation process, with its window compressed in time."""
    name, N, S = s["process"], s["clients"], s["cohort"]
    if name not in PROCESSES:
        raise unknown("participation process", name, PROCESSES)
    if name in ("periodic", "periodic-sampler"):
        return PROCESSES[name](N, S, window=s["window"] // s["compression"])
    if name == "drift":
        return PROCESSES[name](N, S, s["speed"])
    if name == "markov":
        return PROCESSES[name](N, s["on"], s["off"], s.get("cap"))
    return PROCESSES[name](N, S) if name in ("independent", "regularized") else PROCESSES[name](N)


def build_algorithm(runs: list[Training], seeds: int) -> FedAvg | GeneralizedFedAvg:
    """Return the algorithm of runs that differ in rates alone, compressed in time."""
    s, k = runs[0], runs[0]["compression"]
    if s["algorithm"] not in ALGORITHMS:
        raise unknown("algorithm", s["algorithm"], ALGORITHMS)

    def each(values: list[float]) -> Any:
        """Return one value, or as many as there are rows."""
        return values[0] if len(set(values)) == 1 else tuple(np.repeat(values, seeds).tolist())

    settings: dict[str, Any] = dict(
        lr=each([run["lr"] * (k if run.get("compress_lr", True) else 1) for run in runs]),
        local_steps=s["local_steps"],
        batch_size=None if s["algorithm"] == "wait-full" else s["batch_size"],
    )
    if s["algorithm"] != "fedavg":
        settings["amplify"] = each([run.get("amplify", 1.0) for run in runs])
        settings["interval"] = max(1, s.get("interval", 1) // k)
    return ALGORITHMS[s["algorithm"]](build_process(s), **settings)


# In what rows of one batch may differ.
TOGETHER = ("run", "tuned_as", *GeneralizedFedAvg.per_run)


def _unequal_cohorts(s: WarmUp) -> bool:
    """A seed's rows are then padded to the longest beside it, and their sums rounded otherwise."""
    return "markov" in (s["process"], *(run.get("process") for run in s["runs"]))


@alike("seeds", "runs", unless=_unequal_cohorts)
def training(job: Job[Training]) -> Outcome:
    """Train every run of an experiment, all seeds side by side, after a common warm-up.

    Runs that differ in rates alone are rows of one batch, too; on a CPU their bits are those of
    runs apart, on a GPU they are up to rounding. Splits of the data, models, minibatches and
    participation differ between seeds, and are the same for all runs of one. Finished batches are
    kept, so an interrupted experiment goes on where it stopped.
    """
    s = job.settings
    task, hashes = build_task(s, job.seeds, job.device)
    rounds, seeds = s["rounds"] // s["compression"], job.seeds
    starts: dict[Participation, torch.Tensor] = {}
    frames, diverged = {}, {}
    for runs in side_by_side(s, TOGETHER):
        names, algorithm = [run["run"] for run in runs], build_algorithm(runs, len(seeds))
        process = algorithm.participation
        if process not in starts:
            starts[process] = warm_up(job, task, process)
        start = starts[process].repeat(len(names), 1)
        every = seeds * len(names)
        history = simulate(
            algorithm, task, rounds, every,
            state=algorithm.init(task, every, start, s["warmup_rounds"]),
            evaluation=Evaluation(
                at=off_cycle(rounds, s["looks"], process.cycle), splits=("train", "test"),
                limit=s["evaluate_on"],
            ),
            name=[name for name in names for _ in seeds], progress=job.progress,
            checkpoint=checkpoint(job, names[0], 500),
        )  # fmt: skip
        parts, lost = split_runs(history, names, len(seeds), s["warmup_rounds"])
        frames, diverged = frames | parts, diverged | lost
    return joined(frames, diverged, s["runs"], hashes)


def warm_up(job: Job[WarmUp], task: Task, process: Participation) -> torch.Tensor:
    """Return models ``[R, P]`` after the warm-up: FedAvg at a larger rate, same availability."""
    s = job.settings
    fedavg = FedAvg(process, s["warmup_lr"], s["local_steps"], s["batch_size"])
    history = simulate(
        fedavg, task, s["warmup_rounds"], job.seeds,
        evaluation=Evaluation(splits=()), name="warm-up", progress=job.progress,
        checkpoint=checkpoint(job, f"warm-up {process}", 500),
    )  # fmt: skip
    return history.state.x


@alike("seeds", "runs")
def toy(job: Job[Toy]) -> Outcome:
    """Run the three-client toy with exact gradients; there is nothing random in it."""
    s, task, frames = job.settings, toy_task(), []
    optimum = task.data.x.mean(0)
    start = torch.tensor([[1.0, 2.0]], dtype=torch.float64)

    def position(state: Any, task: Task) -> dict:
        metrics = dict(x1=state.x[:, 0], x2=state.x[:, 1])
        metrics["distance"] = (state.x - optimum).norm(dim=1)
        return {("toy", metric): value for metric, value in metrics.items()}

    for r in ({**s, **run} for run in s["runs"]):
        algorithm = GeneralizedFedAvg(Cyclic(3), r["lr"], r["amplify"], r["interval"])
        history = simulate(
            algorithm, task, r["toy_rounds"], (0,), state=algorithm.init(task, (0,), start),
            evaluation=Evaluation(measure=position), name=r["run"], progress=False,
        )  # fmt: skip
        frames.append(history.frame)
    return Outcome(pd.concat(frames, ignore_index=True), {}, {})


@alike("seeds", "runs")
def factor(job: Job[Factor]) -> Outcome:
    """Measure the participation factor ``(Σ_n|q̄_n - 1/N|)²`` for processes and intervals."""
    s, rows = job.settings, []
    for run in tqdm(s["runs"], desc="participation", disable=not job.progress):
        process = build_process({**s, **run})
        for seed in job.seeds:
            q = process.weights(seed, s["warmup_rounds"], s["warmup_rounds"] + s["rounds"])
            for P in s["intervals"]:
                means = theory.interval_means(q, P)
                rows += measured(
                    dict(run=run["run"], seed=seed, interval=P, split="participation"),
                    {
                        "factor": theory.factor(means).mean(),
                        "squares": theory.variance_bound(1.0, means).mean(),
                    },
                )
    return Outcome(pd.DataFrame(rows), {}, {})


@alike("seeds", "runs", unless=_unequal_cohorts)
def heterogeneity(job: Job[Heterogeneity]) -> Outcome:
    """Measure d², β², ν² and δ²(P) of real clients at a warmed-up model.

    All of them come from one Gram matrix of centred client gradients.
    """
    s, rows = job.settings, []
    task, hashes = build_task(s, job.seeds, job.device)
    start = warm_up(job, task, build_process(s))
    for r, seed in enumerate(job.seeds):
        gradients = task.of(seed).client_gradients(start[r]).double().cpu()
        K = theory.gram(gradients)
        norms = np.diagonal(np.asarray(K))
        for run in s["runs"]:
            process = build_process({**s, **run})
            q = process.weights(seed, s["warmup_rounds"], s["warmup_rounds"] + s["rounds"])
            beta2, nu2 = np.asarray(theory.beta2(K, q)), np.asarray(theory.nu2(K, q))
            centred = (gradients - gradients.mean(0)).numpy()
            direct = np.stack([(row[:, None] * centred).sum(0) for row in q[:50]])
            spread = np.stack(
                [((centred - d) ** 2).sum(1) @ row for d, row in zip(direct, q, strict=False)]
            )
            gap = np.abs((direct**2).sum(1) + spread - q[:50] @ norms) / norms.max()
            base = dict(run=run["run"], seed=seed, interval=1, split="train")
            largest = {"d2": norms, "beta2": beta2, "nu2": nu2, "identity gap": gap}
            rows += measured(base, {metric: values.max() for metric, values in largest.items()})
            for P in s["intervals"]:
                delta2 = np.asarray(theory.delta2(K, theory.interval_means(q, P)))
                values = {"delta2": delta2.mean(), "delta2 max": delta2.max()}
                rows += measured(base | {"interval": P}, values)
    return Outcome(pd.DataFrame(rows), {}, hashes)


@alike("seeds", "runs")
def speedup(job: Job[Speedup]) -> Outcome:
    """Measure the stationary error of FedAvg against the number of clients a round.

    All clients hold the same Gaussian samples, so that only gradient noise is left: their mean
    is estimated from single draws, and ``E‖x - x*‖²`` is averaged over the second half of the
    rounds. With long lists of samples each draw is nearly unbiased given the past, as the proofs
    ask; with short ones the reshuffled passes cancel part of the noise.
    """
    s, rows = job.settings, []
    clients = s["clients"]
    for run in s["runs"]:
        size = run["samples"]
        samples = np.tile(stream(0, "speedup").standard_normal((size, 2)), (clients, 1))
        parts = list(np.arange(size * clients).reshape(clients, size))
        data = FederatedDataset.build(samples, None, parts)
        task = Task(location(2), data, "half_square")
        for cohort in tqdm(s["cohorts"], desc=run["run"], disable=not job.progress):
            process = Full(clients) if cohort == clients else Independent(clients, cohort)
            error = _stationary_error(job, task, FedAvg(process, s["lr"], batch_size=1))
            row = dict(run=run["run"], cohort=cohort, split="train", metric="error")
            rows += [row | dict(seed=n, value=e) for n, e in zip(job.seeds, error, strict=True)]
    return Outcome(pd.DataFrame(rows), {}, {})


def _stationary_error(job: Job[Speedup], task: Task, algorithm: FedAvg) -> list[float]:
    """Return each seed's mean square distance to the optimum over the second half of a run."""
    optimum, squares = task.data.x.mean(0), []

    def keep(state: Any, _: Any) -> None:
        squares.append((state.x - optimum).square().sum(1))

    simulate(
        algorithm, task, job.settings["rounds"], job.seeds,
        evaluation=Evaluation(splits=()), callbacks=[keep], progress=False,
    )  # fmt: skip
    return torch.stack(squares)[len(squares) // 2 :].mean(0).tolist()


# --- what a device is tried with ------------------------------------------------------------------

PROCESS = PeriodicSampler(trials.CLIENTS, 1, 2, 2)

TRIALS: dict[str, trials.Trial] = {
    "GeneralizedFedAvg": lambda d: (
        GeneralizedFedAvg(PROCESS, 0.05, (2.0, 5.0), 2, 2, 4), trials.TASKS["mlp"](d),
    ),
    "WaitMinibatch": lambda d: (
        WaitMinibatch(PROCESS, 0.05, 1, 2, 2, 4), trials.TASKS["softmax"](d),
    ),
    "WaitFull": lambda d: (WaitFull(PROCESS, 0.05, 1, 2, 2), trials.TASKS["small_cnn"](d)),
}  # fmt: skip
