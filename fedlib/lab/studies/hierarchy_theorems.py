"""The theorems: on a problem whose constants are all known, and with constants of real tasks.

The problem is logistic regression on rows of norm one: every gradient of a sample has a norm of at
most one, so ``G = 1``, and a client's minibatch of ``B`` has a variance of at most ``1/B``; the
loss is ``λ_max/4``-smooth with ``λ_max`` of the mean outer product, a client's 1/4-smooth at most.

One assumption holds nearly only: a client walks through its shuffled samples without replacement,
so its minibatch gradient is unbiased over all orders, but not given what it has drawn before in the
same pass. The bounds on deviations do not ask for it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.draws import upload
from fedlib.engine.local import local_sgd
from fedlib.engine.rng import stream
from fedlib.engine.tasks import Task
from fedlib.lab.job import Job, Outcome
from fedlib.lab.studies.hierarchy import Delays, Training, build_algorithm, build_task, delay_laws
from fedlib.lab.studies.shared import measured
from fedlib.papers.hierarchy import theory
from fedlib.papers.hierarchy.algorithm import Drawn, HierarchicalSGD, State
from fedlib.schema import PositiveFloat, PositiveInt

L, FEATURES, SAMPLES = 0.25, 12, 240  # smoothness of every client; samples of a client


class Bounds(Delays):
    """Both sides of Lemma 1 and of Theorems 1 and 2."""

    lr: PositiveFloat
    batch_size: PositiveInt


class Estimates(Training):
    """Estimates at the first model, and at those of a run after some shares of its rounds."""

    shares: list[PositiveFloat]
    minibatches: PositiveInt  # of every client, for the variance
    products: PositiveInt  # with a Hessian, at most, for the curvature


def problem(clients: int) -> Task:
    """Return logistic regression whose clients lean towards directions of their own."""
    rng = stream(0, "theorems")
    centres = rng.standard_normal((clients, 1, FEATURES))
    x = centres + rng.standard_normal((clients, SAMPLES, FEATURES))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    odds = x @ rng.standard_normal(FEATURES) * 4
    y = rng.random((clients, SAMPLES)) < 1 / (1 + np.exp(-odds))
    parts = list(np.arange(clients * SAMPLES).reshape(clients, SAMPLES))
    flat = x.reshape(-1, FEATURES)
    data = FederatedDataset.build(flat, y.ravel().astype(np.int64), parts)
    return Task(models.linear(FEATURES), data, "logistic")


def group_gradients(task: Task, groups: tuple[int, ...], theta: Tensor) -> Tensor:
    """Return each group's exact gradient at its own model, ``[R, G, P]`` from ``[R, G, P]``."""
    x = task.data.x.view(sum(groups), SAMPLES, FEATURES).split(groups)
    y = task.data.y.view(sum(groups), SAMPLES).split(groups)
    gradients = []
    for i, (rows, labels) in enumerate(zip(x, y, strict=True)):
        rows, labels = rows.flatten(0, 1), labels.flatten()
        wrong = (theta[:, i] @ rows.T).sigmoid() - labels
        gradients.append(wrong @ rows / len(rows))
    return torch.stack(gradients, 1)


def global_gradient(task: Task, groups: tuple[int, ...], x: Tensor) -> Tensor:
    """Return the exact gradient of f, ``[R, P]`` from models ``[R, P]``."""
    each = group_gradients(task, groups, x.unsqueeze(1).expand(-1, len(groups), -1))
    return torch.einsum("g,rgp->rp", torch.tensor(groups).to(x) / sum(groups), each)


def along_the_paths(
    algorithm: HierarchicalSGD, task: Task, state: State, drawn: Drawn
) -> tuple[Tensor, Tensor]:
    """Walk a round, and sum the squared gradients of every group along its own path.

    Returns
    -------
    Tensor
        Sums over the local iterations, ``[R, G]``.
    Tensor
        Where the groups end, ``[R, G, P]``.
    """
    y = state.x.unsqueeze(1).repeat(1, len(algorithm.groups), 1)
    total, rows = y.new_zeros(y.shape[:2]), y.flatten(0, 1)  # rows share y's memory
    for stretch in drawn.stretches:
        at = stretch.rows
        for batch in stretch.reading.batches(task.data.dtype):
            squares = group_gradients(task, algorithm.groups, y).square().sum(2)
            total.flatten()[at] += squares.flatten()[at]
            rows[at] = local_sgd(task, rows[at], [batch], algorithm.lr)
    return total, y


def bounds(job: Job[Bounds]) -> Outcome:
    """Compare what is measured with Lemma 1, Theorems 1 and 2 and the sharper forms.

    Rows with a column ``t`` hold mean squared deviations of groups that made ``t`` iterations from
    the merged model; ratios are what is measured by what is allowed.
    """
    s, frames = job.settings, []
    for run in tqdm(s["runs"], desc="bounds", disable=not job.progress):
        frames.append(_both_sides({**s, **run}, job.seeds).assign(run=run["run"]))
    return Outcome(pd.concat(frames, ignore_index=True), {}, {})


def _both_sides(s: Bounds, seeds: tuple[int, ...]) -> pd.DataFrame:
    groups, (local, server) = tuple(s["groups"]), delay_laws(s)
    task = problem(sum(groups))
    algorithm = HierarchicalSGD(
        groups, s["lr"], s["sync"], s["time"], local, server, s["batch_size"]
    )
    state, lines = algorithm.init(task, seeds), algorithm.timelines(seeds)
    luck = algorithm.draws(state, task)
    paths, squares, away, allowed = [], [], [], []
    for _ in range(algorithm.rounds(seeds)):
        drawn = upload([next(luck)], "cpu")[0]
        squares.append(global_gradient(task, groups, state.x).square().sum(1))
        total, y = along_the_paths(algorithm, task, state, drawn)
        paths.append(total)
        state, _ = algorithm.round(state, task, drawn)
        away.append((state.x.unsqueeze(1) - y).square().sum(2))
        allowed.append(theory.lemma_1(drawn.counts, sizes=groups, lr=s["lr"], G2=1.0))
    rows, common = [], dict(
        lr=s["lr"], L=L, G2=1.0, sigma2=1 / s["batch_size"],
        gap=float(np.log(2)),  # the loss is at least 0
    )  # fmt: skip
    squares, paths, away = (torch.stack(part).numpy() for part in (squares, paths, away))
    for r, (seed, line) in enumerate(zip(seeds, lines, strict=True)):
        U, t = len(line.end), line.counts
        left = squares[:U, r].mean()
        ratios = {
            "Lemma 1": (away[:U, r] / np.array(allowed)[:U, r]).max(),
            "Theorem 2": left / theory.theorem_2(t, sizes=groups, **common).total,
            "sharper": left / theory.theorem_2_sharper(t, sizes=groups, **common).total,
        }
        for i, size in enumerate(groups):
            right = theory.theorem_1(t[:, i], size=size, kappa=theory.kappa(groups), **common)
            path = paths[:U, r, i].sum() / t[:, i].sum()
            ratios[f"Theorem 1, group {i}"] = path / right.total
        base = dict(seed=seed, split="train", round=0, t=0)
        rows += measured(base, {f"{name}: ratio": ratio for name, ratio in ratios.items()})
        for n in np.unique(t):
            rows += measured(base | {"t": int(n)}, {"deviation": away[:U, r][t == n].mean()})
    return pd.DataFrame(rows)


def constants(job: Job[Estimates]) -> Outcome:
    """Estimate the constants of every run's task for :func:`theory.theorem_2_sharper`.

    Rows: ``L``, ``sigma2``, ``G2``, and ``gap``, the first loss, which is at least its fall.
    """
    s, rows, hashes = job.settings, [], {}
    for run in tqdm(s["runs"], desc="constants", disable=not job.progress):
        r = {**s, **run}
        task, hashes = build_task(r, job.seeds, job.device)
        for seed in job.seeds:
            one, points = task.of(seed), along(build_algorithm([r], 1), task, seed, r["shares"])
            clients, unread = torch.arange(task.N), np.zeros((1, task.N), dtype=int)
            reading = one.data.next_batches(
                [seed], clients[None], unread, r["minibatches"], r["batch_size"]
            )[0]
            estimates = theory.group_constants(
                one, r["groups"], points, reading, iterations=r["products"]
            )
            estimates["gap"] = one.evaluate(points[0], "train", average="clients")["loss"]
            base = dict(run=run["run"], seed=seed, split="train", round=0)
            rows += measured(base, estimates)
    return Outcome(pd.DataFrame(rows), {}, hashes)


def along(algorithm: HierarchicalSGD, task: Task, seed: int, shares: list[float]) -> list[Tensor]:
    """Return the first model of a run, and those after these shares of its rounds, ``[1, P]``."""
    state = algorithm.init(task, (seed,))
    luck, models = algorithm.draws(state, task), [state.x]
    rounds = algorithm.rounds((seed,))
    wanted = [max(1, round(share * rounds)) for share in shares]
    for u in range(1, max(wanted) + 1):
        state, _ = algorithm.round(state, task, upload([next(luck)], task.data.x.device)[0])
        models += [state.x] * wanted.count(u)
    return models
