"""What a task says to the bound that chooses a sync time: its constants, along a run."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from fedlib.engine.draws import upload
from fedlib.engine.tasks import Task
from fedlib.lab.job import Job, Outcome
from fedlib.lab.studies.hierarchy import Training, build_algorithm, build_task
from fedlib.papers.hierarchy import theory
from fedlib.papers.hierarchy.algorithm import HierarchicalSGD
from fedlib.schema import PositiveFloat, PositiveInt


class Constants(Training):
    """Estimates at the first model, and at those of a run after some shares of its rounds."""

    shares: list[PositiveFloat]
    minibatches: PositiveInt  # of every client, for the variance
    products: PositiveInt  # with a Hessian, at most, for the curvature


def constants(job: Job[Constants]) -> Outcome:
    """Estimate the constants of every run's task for :func:`theory.theorem_2_sharper`.

    Rows: ``L``, ``sigma2``, ``G2``, and ``gap``, the first loss, which is at least its fall.
    """
    s, rows, hashes = job.settings, [], {}
    for run in tqdm(s["runs"], desc="constants", disable=not job.progress):
        own = {**s, **run}
        task, hashes = build_task(own, job.seeds, job.device)
        for seed in job.seeds:
            one, models = task.of(seed), along(build_algorithm([own], 1), task, seed, own["shares"])
            clients, unread = torch.arange(task.N), np.zeros((1, task.N), dtype=int)
            reading = one.data.next_batches(
                [seed], clients[None], unread, own["minibatches"], own["batch_size"]
            )[0]
            found = theory.group_constants(
                one, own["groups"], models, reading, iterations=own["products"]
            )
            found["gap"] = float(one.evaluate(models[0], "train", average="clients")["loss"])
            told = dict(run=run["run"], seed=seed, split="train", round=0)
            rows += [told | dict(metric=name, value=value) for name, value in found.items()]
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
