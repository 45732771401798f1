"""Time a round of federated averaging in fedlib, and in a plain loop: the work of this folder."""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

import fedlib
from fedlib.engine import FederatedDataset, Task, models, stream
from fedlib.lab import bench
from fedlib.papers.fedavg import FedAvg
from fedlib.population.participation import Independent

CLIENTS, SAMPLES, COHORT, STEPS, BATCH, LR = 250, 240, 10, 5, 16, 0.01
WARM_UP = 2


def build() -> tuple[Task, FedAvg]:
    """Return random images, split evenly over the clients, and the algorithm."""
    rng = stream(0, "peers")
    x = rng.standard_normal((CLIENTS * SAMPLES, 1, 28, 28), dtype=np.float32)
    parts = list(np.arange(len(x)).reshape(CLIENTS, SAMPLES))
    data = FederatedDataset.build(x, rng.integers(0, 10, len(x)), parts)
    process = Independent(CLIENTS, COHORT)
    return Task(models.fashion_cnn(), data), FedAvg(process, LR, STEPS, BATCH)


def ours(task: Task, algorithm: FedAvg) -> Callable[[], Tensor]:
    """Return a function that runs the next round and returns the model."""
    state = algorithm.init(task, (0,))

    def work() -> Tensor:
        nonlocal state
        state, _ = algorithm.round(state, task)
        return state.x

    return work


def plain(task: Task, algorithm: FedAvg) -> Callable[[], Tensor]:
    """Return the same with a module and an optimizer for each client of a round."""
    state = algorithm.init(task, (0,))
    x, cursor, t = state.x, state.cursor, 0
    theta, batches = x.repeat(COHORT, 1), []
    loop = bench.plain_loop(task, theta, batches, LR)

    def work() -> Tensor:
        nonlocal x, cursor, t
        clients, q = algorithm.participation.cohort((0,), t)
        batches[:], cursor = task.data.next_batches((0,), clients, cursor, STEPS, BATCH)
        theta.copy_(x.expand(COHORT, -1))
        x, t = q.to(x.dtype) @ loop(), t + 1
        return x

    return work


def main() -> None:
    """Print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds to time")
    rounds = parser.parse_args().rounds
    task, algorithm = build()
    cores = torch.get_num_threads()
    for peer, make, what in (
        ("plain loop", plain, f"a module and an optimizer a client, {cores} intra-op threads"),
        ("fedlib", ours, f"one process, {cores} cores"),
    ):
        work, taken = make(task, algorithm), []
        for _ in range(WARM_UP + rounds):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
        row = {"peer": peer, "version": fedlib.__version__ if peer == "fedlib" else ""}
        row |= {"torch": torch.__version__, "rounds": rounds, "what": what}
        row |= {"seconds_per_round": float(np.median(taken[WARM_UP:]))}
        print(json.dumps(row | {"date": datetime.date.today().isoformat()}), flush=True)


if __name__ == "__main__":
    main()
