"""The tiers chapter's studies: TDCD on data split both ways, over rates and local steps."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from fedlib import datasets, models, partition, theory
from fedlib.algorithms.tiers import TDCD, TieredTask
from fedlib.errors import unknown
from fedlib.simulate import simulate
from fedlib.studies import Job, Outcome, Settings, _file


def build_task(s: Settings, seed: int, device: str = "cpu") -> tuple[TieredTask, dict[str, str]]:
    """Load the data and split columns over the silos, rows over their clients."""
    held = datasets.load(s["dataset"], progress=False)
    keep = s.get("samples") or len(held.train_y)
    cut = [_cut(s, _pooled(x, s.get("pool", 1))) for x in (held.train_x[:keep], held.test_x)]
    rows = partition.grid(keep, [s["clients"]] * len(cut[0]), seed, s["aligned"])
    task = TieredTask(
        build_models(s, cut[0]), cut[0], held.train_y[:keep], rows, cut[1], held.test_y,
        s["loss"], device,
    )  # fmt: skip
    return task, dict(held.hashes)


def _pooled(x: np.ndarray, size: int) -> np.ndarray:
    return torch.nn.functional.avg_pool2d(torch.from_numpy(x), size).numpy() if size > 1 else x


def _cut(s: Settings, x: np.ndarray) -> list[np.ndarray]:
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


def build_models(s: Settings, features: list[np.ndarray]) -> list[models.Model]:
    """Return one model a silo; silos with features of the same shape share one object."""
    name, *sizes = s["model"]
    made: dict[tuple[int, ...], models.Model] = {}
    for x in features:
        shape = x.shape[1:]
        if shape in made:
            continue
        if name == "mlp":
            made[shape] = models.mlp(int(np.prod(shape)), *sizes)
        elif name == "small_cnn":
            made[shape] = models.small_cnn(shape, *sizes)
        elif name == "lstm":
            made[shape] = models.lstm(shape[-1], *sizes)
        elif name == "resnet18":
            made[shape] = models.resnet18(shape, *sizes)
        else:
            raise unknown("model", name, ["mlp", "small_cnn", "lstm", "resnet18"])
    return [made[x.shape[1:]] for x in features]


def runs_of(s: Settings) -> list[dict]:
    """Return the runs of a sweep.

    For every Q: each product ηQ of the grid, and each equal η with each number of clients.
    """
    runs = list(s.get("runs", []))
    for Q in s.get("local_steps", []):
        for product in s.get("products", []):
            runs.append(dict(run=f"Q={Q}, ηQ={product:g}", Q=Q, lr=product / Q))
        for K in s.get("clients_grid", []):
            for lr in s.get("equal_lr", []):
                runs.append(dict(run=f"Q={Q}, K={K}", Q=Q, lr=lr, clients=K))
    return runs


def sweep(job: Job) -> Outcome:
    """Run TDCD for every run of the sweep, all seeds side by side.

    All runs make the same number of local steps. Rows have the columns Q, lr, silos and clients
    beside the usual ones; ``clock`` counts local steps.
    """
    frames, diverged, hashes = [], {}, {}
    tasks: dict[tuple, TieredTask] = {}
    for run in runs_of(job.settings):
        s = {**job.settings, **run}
        key = (s.get("silos"), s["clients"], tuple(s["model"]))
        if key not in tasks:
            tasks[key], hashes = build_task(s, job.seeds[0], job.device)
        task, Q = tasks[key], s["Q"]
        history = simulate(
            TDCD(s["lr"], Q, s["batch_size"]),
            task,
            s["steps"] // Q,
            job.seeds,
            evaluate_every=s["evaluate_every"] // Q,
            splits=("train", "test"),
            limit=s["evaluate_on"],
            name=run["run"],
            progress=job.progress,
            checkpoint=_file(job, run["run"]),
            checkpoint_every=max(1, 300 // Q),
        )
        columns = dict(Q=Q, lr=s["lr"], silos=task.N, clients=s["clients"])
        frames.append(history.frame.assign(**columns))
        diverged |= {run["run"]: history.diverged} if history.diverged else {}
    return Outcome(pd.concat(frames, ignore_index=True), diverged, hashes)


def latency(job: Job) -> Outcome:
    """Tabulate the time of a local step relative to ``Q = 1``, in the paper's units."""
    rows = []
    for t_comm in (10.0, 100.0):
        one = theory.tdcd_round_time(t_comm=t_comm, t_comp=1.0, Q=1)
        for Q in job.settings["local_steps"]:
            step = theory.tdcd_round_time(t_comm=t_comm, t_comp=1.0, Q=Q) / Q
            row = dict(run=f"t_comm={t_comm:g}", seed=0, Q=Q, split="time")
            rows += [row | dict(metric="step", value=step)]
            rows += [row | dict(metric="gain", value=one / step)]
    return Outcome(pd.DataFrame(rows), {}, {})
