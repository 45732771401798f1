"""The tiers chapter's studies: TDCD on data split both ways, over rates and local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NotRequired

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from fedlib import datasets
from fedlib.datasets import partition
from fedlib.engine import models
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.errors import unknown
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, Settings, alike, checkpoint, joined, split_runs
from fedlib.lab.studies.shared import FITTED, measured, pool_pixels, side_by_side
from fedlib.papers.tiers import theory
from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.asynchronous import AsyncTDCD, HubRound
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.delays import ShiftedExponential
from fedlib.schema import PositiveFloat, PositiveInt


class Split(Settings):
    """A data set, its features split over silos and its rows over their clients."""

    dataset: str
    samples: NotRequired[PositiveInt]  # the first so many training rows; default all
    pool: NotRequired[PositiveInt | list[PositiveInt]]  # sides of the blocks that are averaged
    split: str  # of the features: halves, quarters, views, columns
    silos: NotRequired[PositiveInt]  # for columns
    clients: PositiveInt  # a silo
    aligned: bool  # rows are dealt out alike in all silos
    model: list[str | PositiveInt]  # a silo's: its name, and sizes after the features
    loss: str


class Sweep(Split):
    """TDCD over rates, local steps and numbers of clients. All runs make as many local steps."""

    batch_size: PositiveInt
    steps: PositiveInt  # local steps in all
    Q: NotRequired[PositiveInt]  # local steps a round
    lr: NotRequired[PositiveFloat]
    clients_grid: NotRequired[list[PositiveInt]]  # numbers of clients,
    crowd: NotRequired[Literal["few", "many"]]  # of which a run takes the smallest or the largest
    looks: PositiveInt  # about how many evaluations
    evaluate_on: PositiveInt  # training samples


class Latency(Settings):
    """The time of a local step."""

    local_steps: list[PositiveInt]  # values of Q


class Theorem(Settings):
    """Theorem 1 on a small problem."""

    Q: PositiveInt
    rounds_grid: list[PositiveInt]


class Waiting(Split):
    """Hubs that wait for each other, and hubs that do not. Times in local steps of a fast silo."""

    wait: bool
    slow: PositiveFloat  # by what factor the last silo's local steps are slower
    comm: PositiveFloat  # mean time of a round trip
    Q: PositiveInt
    lr: PositiveFloat
    batch_size: PositiveInt
    tick: PositiveFloat  # between two looks at the hubs
    ticks: PositiveInt
    evaluate_every: PositiveInt  # ticks
    evaluate_on: PositiveInt  # training samples


def build_task(
    s: Split, seeds: Sequence[int], device: str = "cpu"
) -> tuple[TieredTask, dict[str, str]]:
    """Load the data; split columns over the silos, and rows over clients, anew for each seed."""
    data = datasets.load(s["dataset"], progress=False)
    keep = s.get("samples") or len(data.train_y)
    small = (pool_pixels(x, s.get("pool", 1)).numpy() for x in (data.train_x[:keep], data.test_x))
    cut = [_cut(s, x) for x in small]
    clients = [s["clients"]] * len(cut[0])
    rows = {seed: partition.grid(keep, clients, seed, s["aligned"]) for seed in seeds}
    task = TieredTask(
        build_models(s, cut[0]), cut[0], data.train_y[:keep], rows, cut[1], data.test_y,
        s["loss"], device, batch_norm="batch" in s["model"],
    )  # fmt: skip
    used = datasets.fingerprint(*cut[0], data.train_y[:keep], *cut[1], data.test_y)
    return task, {**data.hashes, "as used": used}


def _cut(s: Split, x: np.ndarray) -> list[np.ndarray]:
    """Split features: image ``halves`` or ``quarters``, ``views``, or columns of sequences."""
    if s["split"] == "halves":
        return partition.halves(x)
    if s["split"] == "quarters":
        return partition.tiles(x, 2, 2)
    if s["split"] == "views":
        return partition.views(x)
    if s["split"] == "columns":
        blocks = partition.contiguous_features(x.shape[-1], s["silos"])
        return [x[..., block] for block in blocks]
    raise unknown("feature split", s["split"], ["halves", "quarters", "views", "columns"])


def build_models(s: Split, features: list[np.ndarray]) -> list[models.Model]:
    """Return one model a silo; silos with features of the same shape share one object."""
    name, *sizes = s["model"] or [""]
    if name not in FITTED:
        raise unknown("model", name, FITTED)
    made = {shape: FITTED[name](shape, *sizes) for shape in {x.shape[1:] for x in features}}
    return [made[x.shape[1:]] for x in features]


@alike("runs")
def sweep(job: Job[Sweep]) -> Outcome:
    """Run TDCD for every run of the sweep, all seeds side by side.

    Runs that differ in their rates alone are rows of one batch. Rows have the columns Q, lr, silos
    and clients beside the usual ones; ``clock`` counts local steps.
    """
    s, frames, diverged = job.settings, {}, {}
    tasks: dict[str, TieredTask] = {}
    for runs in side_by_side(s, ("run", "lr")):
        r, names = runs[0], [run["run"] for run in runs]
        if "crowd" in r:
            r["clients"] = {"few": min, "many": max}[r["crowd"]](r["clients_grid"])
        key = repr([r.get(name) for name in Split.__annotations__])
        if key not in tasks:
            tasks[key], hashes = build_task(r, job.seeds, job.device)
        task = tasks[key]
        rates, seeds = [run["lr"] for run in runs], job.seeds * len(runs)
        lr = tuple(rate for rate in rates for _ in job.seeds) if len(runs) > 1 else rates[0]
        rounds = r["steps"] // r["Q"]
        start = task.init(job.seeds).repeat(len(runs), 1)
        algorithm = TDCD(lr, r["Q"], r["batch_size"])
        history = simulate(
            algorithm, task, rounds, seeds, state=algorithm.init(task, seeds, start),
            evaluation=Evaluation(
                at=log_rounds(rounds, r["looks"]), splits=("train", "test"), limit=r["evaluate_on"]
            ),
            name=[name for name in names for _ in job.seeds], progress=job.progress,
            checkpoint=checkpoint(job, names[0], max(1, 300 // r["Q"])),
        )  # fmt: skip
        parts, lost = split_runs(history, names, len(job.seeds))
        for name, rate in zip(names, rates, strict=True):
            frames[name] = parts[name].assign(
                Q=r["Q"], lr=rate, silos=task.N, clients=r["clients"]
            )
        diverged |= lost
    return joined(frames, diverged, s["runs"], hashes)


def log_rounds(rounds: int, points: int) -> list[int]:
    """Return the rounds at which to look at a run: evenly in log time, and evenly at its end.

    Every look meets a global model, which exists at the end of rounds only. What is learnt early
    is seen in detail, and what counts as final is a mean of several looks.

    Parameters
    ----------
    rounds
        The last round, which is always looked at, as is round 0.
    points
        About how many rounds to return: two thirds over the whole run, the others over its last
        tenth.
    """
    whole = np.geomspace(1, rounds, max(2, 2 * points // 3))
    end = np.linspace(0.9 * rounds, rounds, max(2, points // 3))
    return sorted({0, *(int(t) for t in np.round([*whole, *end]))})


def latency(job: Job[Latency]) -> Outcome:
    """Tabulate the time of a local step relative to ``Q = 1``, in the paper's units."""
    rows = []
    for t_comm in (10.0, 100.0):
        one = theory.round_time(t_comm=t_comm, t_comp=1.0, Q=1)
        for Q in job.settings["local_steps"]:
            step = theory.round_time(t_comm=t_comm, t_comp=1.0, Q=Q) / Q
            base = dict(run=f"t_comm={t_comm:g}", seed=0, Q=Q, split="time")
            rows += measured(base, {"step": step, "gain": one / step})
    return Outcome(pd.DataFrame(rows), {}, {})


def theorem(job: Job[Theorem]) -> Outcome:
    """Compare the average squared gradient norm with Theorem 1 on logistic regression.

    All constants are known: rows have norm one, so the loss is ``λ_max/4``-smooth with
    ``λ_max`` of the mean outer product, every minibatch block gradient is 1/4-smooth at most, and
    ``Σ_j σ_j² <= 1/B``. The step is ``η = 2/(Q √R max(L, L_max))``, of the form of the paper's
    Remark 5; the constant is ours, the largest that the theorem allows at R = 256.
    """
    s, rows, B, Q = job.settings, [], 4, job.settings["Q"]
    rng = stream(0, "theorem")
    x = rng.standard_normal((512, 12))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    blocks = partition.contiguous_features(12, 3)
    task = TieredTask(
        [models.linear(4)] * 3, [x[:, b] for b in blocks], rng.integers(0, 2, 512),
        partition.grid(512, [1] * 3), loss_name="logistic",
    )  # fmt: skip
    L = float(np.linalg.eigvalsh(x.T @ x / 512).max()) / 4
    for R in s["rounds_grid"]:
        lr, squares = 2 / (Q * np.sqrt(R) * max(L, 0.25)), []
        algorithm = TDCD(lr, Q, B)
        state = algorithm.init(task, job.seeds)
        for _ in tqdm(range(R), desc=f"R = {R}", disable=not job.progress):
            point = state.x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(task.loss(point).sum(), point)
            squares.append(gradient.square().sum(1))
            state, _ = algorithm.round(state, task)
        each = torch.stack(squares).mean(0)
        mean = each.mean().item()
        bound = theory.theorem_1(
            L=L, L_max=0.25, gap=float(np.log(2)), sigma2=1 / B, lr=lr, Q=Q, rounds=R
        ).total
        for seed, value in zip(job.seeds, each.tolist(), strict=True):
            base = dict(run="theorem", seed=seed, rounds=R, split="train")
            rows += measured(base, {"measured": value, "bound": bound, "ratio": mean / bound})
    return Outcome(pd.DataFrame(rows), {}, {})


@alike("runs")
def waiting(job: Job[Waiting]) -> Outcome:
    """Compare hubs that wait for each other with hubs that do not, under random delays.

    Beyond the paper: its future work. Every run uses the same drawn delays; ``slow`` makes the
    last silo's local steps that many times slower.
    """
    s = job.settings
    task, hashes = build_task(s, job.seeds, job.device)
    frames, staleness, diverged = [], [], {}
    for r in ({**s, **run} for run in s["runs"]):
        comm = ShiftedExponential(r["comm"] / 2, r["comm"] / 2)
        paces = [1.0] * (task.N - 1) + [float(r["slow"])]
        comp = tuple(ShiftedExponential(0.5 * pace, 0.5 * pace) for pace in paces)
        algorithm = AsyncTDCD(
            r["lr"], r["Q"], r["batch_size"], comm, comp, wait=r["wait"], tick=r["tick"]
        )
        kept: list[HubRound] = []
        history = simulate(
            algorithm, task, r["ticks"], job.seeds,
            evaluation=Evaluation(
                r["evaluate_every"], splits=("train", "test"), limit=r["evaluate_on"]
            ),
            callbacks=[lambda _, metrics, kept=kept: kept.extend(metrics["hub_rounds"])],
            name=r["run"], progress=job.progress, checkpoint=Checkpoint(until=job.until),
        )  # fmt: skip
        frames.append(history.frame)
        if history.diverged:
            diverged[r["run"]] = {seed: t for (_, seed), t in history.diverged.items()}
        for seed in job.seeds:
            hubs = [hub for hub in kept if hub.seed == seed]
            staleness += measured(dict(run=r["run"], seed=seed, split="time"), {
                "hub rounds": len(hubs),
                "staleness": np.mean([max(hub.staleness) for hub in hubs]),
                "idle time": np.mean([hub.finish - hub.start - hub.busy for hub in hubs]),
            })  # fmt: skip
    frame = pd.concat([*frames, pd.DataFrame(staleness)], ignore_index=True)
    return Outcome(frame, diverged, hashes)


# --- what a device is tried with ------------------------------------------------------------------

def tiered(dtype: Any) -> TieredTask:
    """Return three silos: two that share a model, and one with another; 2, 3 and 1 clients."""
    rng, shared, rows = stream(0, "trial"), models.mlp(4, 5, 1), 24
    x = [rng.standard_normal((rows, 4)).astype(dtype) for _ in range(3)]
    y = rng.integers(0, 2, rows)
    silos = [shared, shared, models.mlp(4, 3, 1)]
    return TieredTask(silos, x, y, partition.grid(rows, [2, 3, 1]), x, y, "logistic")


def _hubs(wait: bool) -> AsyncTDCD:
    return AsyncTDCD(0.1, 2, 8, ShiftedExponential(1, 1), ShiftedExponential(0.5, 0.5), wait, 6.0)


TRIALS: dict[str, trials.Trial] = {
    "TDCD": lambda d: (TDCD(0.1, 3, 8), tiered(d)),
    "TDCD, all rows": lambda d: (TDCD((0.1, 0.2), 2), tiered(d)),
    "LabelPrivateTDCD": lambda d: (LabelPrivateTDCD(0.1, 2, 8), tiered(d)),
    "LabelPrivateTDCD, old derivatives": lambda d: (
        LabelPrivateTDCD(0.1, 2, 8, fresh=False), tiered(d),
    ),
    "AsyncTDCD": lambda d: (_hubs(False), tiered(d)),
    "AsyncTDCD, waiting": lambda d: (_hubs(True), tiered(d)),
}  # fmt: skip
