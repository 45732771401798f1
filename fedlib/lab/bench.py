"""Benchmarks: the batched engine against a plain loop, measured in the same run."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import conv2d, cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlib import files
from fedlib.datasets import partition
from fedlib.engine import models
from fedlib.engine.cost import count
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.draws import draw_one
from fedlib.engine.local import BACKENDS, copies_that_fit, local_sgd
from fedlib.engine.losses import LOSSES
from fedlib.engine.recording import Recording
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import unknown
from fedlib.lab import batch as batches
from fedlib.lab.evidence import experiments
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.hierarchy import HierarchicalSGD, timeline
from fedlib.papers.personalization import PERM, PerFedAvg, PFedMe
from fedlib.papers.personalization.weights import water_fill
from fedlib.papers.tiers.algorithm import TDCD, Cohort
from fedlib.papers.tiers.task import TieredTask
from fedlib.papers.vertical import Problem, pooled, simulate_parties, split_features
from fedlib.papers.vertical.algorithm import Simulation
from fedlib.papers.vertical.setup import Draws, checked_setup
from fedlib.paths import data_folder
from fedlib.population.delays import Deterministic, ShiftedExponential
from fedlib.population.participation import Full, PeriodicSampler

WORK = {  # name: model, input shape, copies, batch, steps
    "softmax 784-10": (lambda: models.softmax(784, 10), (1, 28, 28), 50, 16, 5),
    "logistic 60-2": (lambda: models.softmax(60, 2), (60,), 50, 16, 5),
    "mlp 784-50-10": (lambda: models.mlp(784, 50, 10), (1, 28, 28), 50, 16, 5),
    "mlp 784-200-200-10": (lambda: models.mlp(784, 200, 200, 10), (1, 28, 28), 50, 16, 5),
    "fashion_cnn": (models.fashion_cnn, (1, 28, 28), 10, 16, 5),
}


def plain_loop(
    task: Task, theta: torch.Tensor, batches: list[Batch], lr: float
) -> Callable[[], torch.Tensor]:
    """Return the same work done with one module and one optimizer a client, as most code does.

    Modules and optimizers are made here, once. A call loads ``theta`` into them, takes the
    steps and returns the new parameters ``[C, P]``; only that is timed.
    """
    place = dict(device=theta.device, dtype=theta.dtype)
    modules = [copy.deepcopy(task.model.module).to_empty(device="cpu").to(**place) for _ in theta]
    optimizers = [torch.optim.SGD(module.parameters(), lr=lr) for module in modules]

    def work() -> torch.Tensor:
        out = []
        for c, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            vector_to_parameters(theta[c].clone(), module.parameters())
            for batch in batches:
                optimizer.zero_grad()
                x, y = task.data.x[batch.rows[c]], task.data.y[batch.rows[c]]
                cross_entropy(module(x), y).backward()
                optimizer.step()
            out.append(parameters_to_vector(module.parameters()).detach())
        return torch.stack(out)

    return work


def workload(name: str, device: str) -> tuple[Task, torch.Tensor, list[Batch]]:
    """Return the task, the starting points and the batches of one line of :data:`WORK`."""
    build, shape, copies, size, steps = WORK[name]
    rng = stream(0, "bench")
    x = rng.standard_normal((2000, *shape)).astype(np.float32)
    y = rng.integers(0, 2 if "logistic" in name else 10, 2000)
    data = FederatedDataset.build(x, y, [np.arange(2000)], device=device)
    task = Task(build(), data)
    rows = torch.from_numpy(rng.integers(0, 2000, (steps, copies, size))).to(device)
    return task, task.init(range(copies)), [Batch(step) for step in rows]


def measure(
    works: dict[str, Callable[[], Any]],
    device: str = "cpu",
    repeats: int = 5,
    seconds: float = 8.0,
) -> dict[str, float]:
    """Return the median seconds of each piece of work.

    They take turns, so that a slow minute of the machine falls on all of them alike. In its
    turn each is done four times and the first does not count: in training, too, a round
    follows a round of the same kind. A short pause comes before each turn. After ``seconds`` no
    further turn begins, so a slow machine takes fewer.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    start = time.perf_counter()
    for turns in range(repeats):
        if turns and time.perf_counter() - start > seconds:
            break
        for name, work in works.items():
            time.sleep(0.03)  # until the threads of the work before, which wait awake, are asleep
            for turn in range(4):
                began = time.perf_counter()
                work()
                if device == "cuda":
                    torch.cuda.synchronize()
                if turn:
                    times[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak_flops(device: str = "cpu") -> float:
    """Measure operations a second of the faster of a large product and a large convolution."""
    side, images = (4096, 1024) if device == "cuda" else (1024, 32)
    a = torch.randn(side, side).to(device)  # drawn on the host: a device's stream is left alone
    image = torch.randn(images, 32, 28, 28).to(device).to(memory_format=torch.channels_last)
    filters = torch.randn(32, 32, 5, 5).to(device)
    work = {
        "product": lambda: a @ a,
        "convolution": lambda: conv2d(image, filters, padding=2),
    }
    seconds = measure(work, device)
    return max(2 * side**3 / seconds["product"], 2 * image.numel() * 800 / seconds["convolution"])


def local_sgd_table() -> list[dict[str, Any]]:
    """Time :func:`fedlib.engine.local.local_sgd` for the models of the book.

    One call of 50 copies (the CNN: 10) and five steps of batch 16. The plain loop's modules and
    optimizers are made before its clock starts.

    Returns
    -------
    list of dict
        Rows with name; milliseconds of the plain loop and of every backend; the chosen backend
        and its ratio (plain loop over ours: above one is faster); the arithmetic floor, which is
        the time that the operations would take at the speed of one large product or
        convolution; the memory floor, which is the time to read and write every model once, and
        to read every sample once, at the speed of a copy; and the device.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = [b for b in BACKENDS if b != ("recorded" if device == "cpu" else "threads")]
    chosen, can, rows = backends[-1], limits(device), []
    for name in WORK:
        task, theta, batches = workload(name, device)
        works = {"plain loop": plain_loop(task, theta, batches, 0.01)}
        for backend in backends:
            works[backend] = functools.partial(
                local_sgd, task, theta, batches, 0.01, backend=backend
            )
        seconds = measure(works, device)
        row = {"name": name} | {f"{w} [ms]": round(1000 * s, 3) for w, s in seconds.items()}
        row |= {"chosen": chosen, "ratio": round(seconds["plain loop"] / seconds[chosen], 2)}
        cost = count(functools.partial(local_sgd, task, theta, batches, 0.01, backend="batched"))
        row["floor [ms]"] = round(1000 * cost.flops / can["flops"], 3)
        row["memory floor [ms]"] = round(1000 * least_bytes(task, theta, batches) / can["bytes"], 3)
        rows.append(row | {"device": device})
    return rows


def least_bytes(task: Task, theta: torch.Tensor, batches: list[Batch]) -> int:
    """Count what must move even if a cache holds all between: models in and out, samples in."""
    samples = sum(batch.rows.numel() for batch in batches) * task.data.x[0].numel()
    return (2 * theta.numel() + samples) * theta.element_size()


# --- what holds a device back ---------------------------------------------------------------------


def limits(device: str) -> dict[str, float]:
    """Measure what a device can do: operations and bytes a second, and seconds a launch.

    On a GPU that is the time of a launch in a replayed recording, on a CPU of calling PyTorch.
    """
    many = torch.ones(2**28 if device == "cuda" else 2**24, device=device)
    copy = torch.empty_like(many)

    def launches(few: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            few = few + 1
        return few

    few, again = torch.ones(1, device=device), launches
    if device == "cuda":
        launches(few)
        again = Recording(launches, [few])
    works = {"copy": lambda: copy.copy_(many), "launches": lambda: again(few)}
    seconds = measure(works, device)
    return {
        "flops": peak_flops(device),
        "bytes": 2 * many.numel() * many.element_size() / seconds["copy"],
        "launch": seconds["launches"] / 200,
    }


def roofline(name: str, device: str, can: dict[str, float]) -> dict[str, Any]:
    """Time the local steps of one of the book's models on a device, and say what holds them back.

    Parameters
    ----------
    name
        Of :data:`WORK`.
    device
        ``"cpu"`` or ``"cuda"``.
    can
        What the device can do, from :func:`limits`.

    Returns
    -------
    dict
        The name; milliseconds of the plain loop, of the batched launches and of our
        choice, with the ratio of the first to the last; operations, bytes and launches, counted;
        the milliseconds that each of the three would take alone at the device's measured speed;
        the largest of them and its share of our time; and how many copies fit at once. Bytes are
        those of operations that keep nothing in a cache and are not fused: more than must move.
    """
    task, theta, batches = workload(name, device)
    steps = functools.partial(local_sgd, task, theta, batches, 0.01)
    seconds = measure(
        {
            "plain loop": plain_loop(task, theta, batches, 0.01),
            "batched": functools.partial(steps, backend="batched"),
            "ours": steps,
        },
        device,
    )
    cost = count(functools.partial(steps, backend="batched"))
    alone = {
        "arithmetic": cost.flops / can["flops"],
        "memory": cost.moved / can["bytes"],
        "launches": cost.launches * can["launch"],
    }
    most = max(alone, key=alone.__getitem__)
    row = {"name": name} | {f"{w} [ms]": round(1000 * s, 3) for w, s in seconds.items()}
    row["ratio"] = round(seconds["plain loop"] / seconds["ours"], 2)
    row |= {"GFLOP": round(cost.flops / 1e9, 4), "GB": round(cost.moved / 1e9, 4)}
    row["launches"] = cost.launches
    row |= {f"{what} alone [ms]": round(1000 * s, 3) for what, s in alone.items()}
    part = f"{alone[most] / seconds['ours']:.0%} of our time"
    row["held back by"] = f"{most} (alone {'at most ' * (most == 'memory')}{part})"
    return row | {"copies that fit": copies_that_fit(task, theta, batches[0])}


def roofline_table() -> list[dict[str, Any]]:
    """Return the rows of :func:`roofline` for every line of :data:`WORK`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    can = limits(device)
    return [roofline(name, device, can) | {"device": device} for name in WORK]


def whole_rounds(device: str, seeds: int, seconds: float, samples: int = 60_000) -> dict[str, Any]:
    """Count whole rounds a second of Figure 1's FedAvg, drawing and averaging included.

    10 clients of 250 take 5 steps of batch 16 with the Fashion-MNIST CNN, on random images.

    Parameters
    ----------
    seeds
        Runs side by side.
    seconds
        How long to count, after some rounds for warming up.
    samples
        Images in all.
    """
    rng = stream(0, "bench")
    x = rng.standard_normal((samples, 1, 28, 28), dtype=np.float32)
    parts = list(np.arange(samples).reshape(250, -1))
    task = Task(
        models.fashion_cnn(),
        FederatedDataset.build(x, rng.integers(0, 10, samples), parts, device=device),
    )
    algorithm = FedAvg(PeriodicSampler(250, 10), 1e-3, 5, 16)

    def go(state: Any, rounds: int) -> tuple[Any, float]:
        began = time.perf_counter()
        options = dict(evaluate=lambda state, task: {}, progress=False)
        state = simulate(algorithm, task, rounds, state.seeds, state=state, **options).state
        if device == "cuda":
            torch.cuda.synchronize()
        return state, time.perf_counter() - began

    warm = 4 if device == "cuda" else 1
    state, once = go(algorithm.init(task, range(1, 1 + seeds)), warm)
    rounds = max(1, min(2000, int(seconds * warm / once)))
    taken = go(state, rounds)[1]
    if taken < seconds / 2:  # the first rounds recorded, and were slow
        rounds = int(rounds * seconds / taken)
        taken = go(state, rounds)[1]
    return {"seeds": seeds, "rounds": rounds, "seconds": round(taken, 2),
            "seed-rounds a second": round(seeds * rounds / taken, 1)}  # fmt: skip


def compiled(task: Task, theta: torch.Tensor, lr: float) -> Callable[[list[Batch]], torch.Tensor]:
    """Return the steps with a loss that ``torch.compile`` has fused, the alternative to ours."""
    total = torch.compile(lambda theta, rows: task.losses(theta, Batch(rows)).sum())

    def steps(batches: list[Batch]) -> torch.Tensor:
        here = theta
        for batch in batches:
            leaf = here.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(total(leaf, batch.rows), leaf)
            here = here - lr * gradient
        return here

    return steps


TIERS = {  # name: model of a silo's features, feature shape, silos, clients, B, Q, loss
    "linear 76-1, 4 silos": (lambda: models.mlp(19, 1), (19,), 4, 20, 400, 10, "logistic"),
    "lstm 19-16-1, 4 silos": (lambda: models.lstm(19, 16), (12, 19), 4, 20, 400, 10, "logistic"),
    "small_cnn, 2 halves": (
        lambda: models.small_cnn((1, 28, 14), 10), (1, 28, 14), 2, 10, 400, 5, "cross_entropy",
    ),
}  # fmt: skip


def tiers_loop(task: TieredTask, algorithm: TDCD, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a round of TDCD, client by client: one module and one optimizer for each."""
    drawn = draw_one(algorithm, algorithm.init(task, (0,)), task)
    silos = [Cohort.of(task, j, drawn, x) for j in range(task.N)]
    sets = [
        [copy.deepcopy(task.models[s.j].module).to_empty(device="cpu") for _ in s.theta]
        for s in silos
    ]
    rows = [[r[w > 0] for r, w in zip(s.batch.rows, s.batch.weight, strict=True)] for s in silos]

    def work() -> torch.Tensor:
        phi = torch.zeros(len(silos), algorithm.batch_size, task.widths[0])
        for silo, modules, parts in zip(silos, sets, rows, strict=True):
            for module, part in zip(modules, parts, strict=True):
                vector_to_parameters(x[0, task.columns[silo.j]].clone(), module.parameters())
                with torch.no_grad():
                    phi[silo.j, part] = module(silo.x[part])
        blocks = []
        for silo, modules, parts in zip(silos, sets, rows, strict=True):
            foreign = phi.sum(0) - phi[silo.j]
            for module, part in zip(modules, parts, strict=True):
                optimizer = torch.optim.SGD(module.parameters(), lr=algorithm.lr)
                for _ in range(algorithm.local_steps):
                    optimizer.zero_grad()
                    out = module(silo.x[part]) + foreign[part]
                    LOSSES[task.loss_name](out[None], silo.y[part][None]).mean().backward()
                    optimizer.step()
            each = [parameters_to_vector(m.parameters()).detach() for m in modules]
            blocks.append(torch.stack(each).mean(0))
        return torch.cat(blocks)

    return work


def tiers_workload(name: str) -> tuple[TieredTask, TDCD]:
    """Return the task and the algorithm of one line of the tiers benchmark."""
    build, shape, silos, clients, B, Q, loss = TIERS[name]
    rng = stream(0, "bench")
    features = [rng.standard_normal((2000, *shape)).astype(np.float32) for _ in range(silos)]
    labels = rng.integers(0, 2 if loss == "logistic" else 10, 2000)
    rows = partition.grid(2000, [clients] * silos)
    return TieredTask([build()] * silos, features, labels, rows, loss_name=loss), TDCD(0.01, Q, B)


def tiers_table() -> list[dict[str, Any]]:
    """Time a round of TDCD, all silos' and clients' copies batched, against the loop.

    Returns
    -------
    list of dict
        Rows with name, milliseconds of the plain loop and of ours, ratio and device (CPU).
    """
    rows = []
    for name in TIERS:
        task, algorithm = tiers_workload(name)
        state = algorithm.init(task, (0,))
        ours = functools.partial(algorithm.round, state, task)
        seconds = measure({"plain loop": tiers_loop(task, algorithm, state.x), "ours": ours})
        row = {"name": name} | {f"{w} [ms]": round(1000 * s, 3) for w, s in seconds.items()}
        ratio = round(seconds["plain loop"] / seconds["ours"], 2)
        rows.append(row | {"ratio": ratio, "device": "cpu"})
    return rows


# --- hierarchy ------------------------------------------------------------------------------------


def crowd(clients: int = 500, sync: float = 5.0) -> tuple[Task, HierarchicalSGD]:
    """Return the shape of the hierarchical paper's Figure 6: two groups of so many clients."""
    rng, n = stream(0, "bench"), 60 * 2 * clients
    x = rng.standard_normal((n, 784)).astype(np.float32)
    data = FederatedDataset.build(x, rng.integers(0, 10, n), np.split(np.arange(n), 2 * clients))
    local, server = ShiftedExponential(1.0, 0.55), ShiftedExponential(20.0, 0.052)
    groups = (clients, clients)
    return Task(models.mlp(784, 50, 10), data), HierarchicalSGD(
        groups, 0.1, sync, 1000.0, local, server, 2
    )


def hierarchy_loop(
    task: Task, algorithm: HierarchicalSGD, x: torch.Tensor, seed: int = 0
) -> Callable[[], torch.Tensor]:
    """Return the first round, client by client: one module and one optimizer for each."""
    counts, first, members = algorithm.timelines((seed,))[0].counts[0], 0, []
    for size in algorithm.groups:
        members.append(range(first, first + size))
        first += size
    module = copy.deepcopy(task.model.module).to_empty(device="cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=algorithm.lr)
    everyone = torch.arange(task.N).unsqueeze(0)
    batches, _ = task.data.next_batches(
        (seed,), everyone, np.zeros((1, task.N), dtype=np.int64), int(counts.max()), 2
    )

    def work() -> torch.Tensor:
        moved = torch.zeros_like(x)
        for clients, t in zip(members, counts, strict=True):
            y = x
            for batch in batches[:t]:
                after = torch.zeros_like(x)
                for n in clients:
                    vector_to_parameters(y.clone(), module.parameters())
                    optimizer.zero_grad()
                    out = module(task.data.x[batch.rows[n]])
                    cross_entropy(out, task.data.y[batch.rows[n]]).backward()
                    optimizer.step()
                    after += parameters_to_vector(module.parameters()).detach()
                y = after / len(clients)
            moved += len(clients) / task.N * (y - x) / t
        return x + moved

    return work


def clock_loop(sync: float, time: float, c: float, m: float, server: float) -> int:
    """Return the rounds of two groups on a clock, one delay after the other."""
    rng, clock, rounds = stream(0, "bench"), 0.0, 0
    while clock < time:
        busy = [0.0, 0.0]
        for i in range(2):
            while busy[i] < sync:
                busy[i] += c + rng.exponential(m)
        clock += max(busy) + server + rng.exponential(1.0)
        rounds += 1
    return rounds


def hierarchy_table() -> list[dict[str, Any]]:
    """Time hierarchical SGD against loops that do the same.

    Returns
    -------
    list of dict
        Rows with name, milliseconds of the loop and of ours, ratio and device (CPU): a round of
        Figure 6 client by client; five seeds one after the other; 20,000 rounds of the clock
        alone, delay by delay.
    """
    task, algorithm = crowd()
    state = algorithm.init(task, (0,))
    pairs = {
        "a round of 2 x 500 clients": (
            hierarchy_loop(task, algorithm, state.x[0]),
            functools.partial(algorithm.round, state, task),
        )
    }
    few, small = crowd(15)
    quick = functools.partial(simulate, small, few, progress=False, evaluate=lambda s, k: {})
    seeds = range(5)
    pairs["5 seeds of 2 x 15 clients, whole runs"] = (
        lambda: [quick(small.rounds((n,)), (n,)) for n in seeds],
        lambda: quick(small.rounds(seeds), seeds),
    )
    law, server = ShiftedExponential(1.0, 0.1), ShiftedExponential(10.0, 1.0)
    long = 20_000 * 31.75
    pairs["20,000 rounds of the clock, S = 20"] = (
        lambda: clock_loop(20.0, long, 1.0, 0.1, 10.0),
        lambda: timeline(0, 20.0, long, [law, law], server),
    )
    rows = []
    for name, (loop, ours) in pairs.items():
        seconds = measure({"loop": loop, "ours": ours}, repeats=3)
        row = {"name": name} | {f"{w} [ms]": round(1000 * s, 1) for w, s in seconds.items()}
        rows.append(row | {"ratio": round(seconds["loop"] / seconds["ours"], 2), "device": "cpu"})
    return rows


# --- personalization ------------------------------------------------------------------------------

PERSONAL: dict[str, tuple[Callable[[], Any], int, int, int]] = {  # model, inputs, classes, samples
    "logistic 60-2": (lambda: models.softmax(60, 2), 60, 2, 500),
    "mlp 784-200-200-10": (lambda: models.mlp(784, 200, 200, 10), 784, 10, 150),
}


def personal_task(name: str, clients: int) -> Task:
    """Return so many clients with random samples, of a line of :data:`PERSONAL`."""
    build, inputs, classes, samples = PERSONAL[name]
    rng, n = stream(0, "bench"), clients * samples
    x = rng.standard_normal((n, inputs), dtype=np.float32)
    parts = np.split(np.arange(n), clients)
    return Task(build(), FederatedDataset.build(x, rng.integers(0, classes, n), parts))


def perm_loop(task: Task, algorithm: PERM, state: Any) -> Callable[[], torch.Tensor]:
    """Return the next round, client by client: one module and one optimizer for each."""
    drawn = draw_one(algorithm, state, task)
    batches, rates = drawn.reading.batches(task.data.dtype), algorithm.rates(state)[0]
    modules = [copy.deepcopy(task.model.module).to_empty(device="cpu") for _ in range(task.N)]
    made = [
        torch.optim.SGD(module.parameters(), lr=float(rates[i, c]))
        for c, (module, i) in enumerate(zip(modules, drawn.guests[0], strict=True))
    ]

    def work() -> torch.Tensor:
        v = state.v[0].clone()
        for c, (module, optimizer) in enumerate(zip(modules, made, strict=True)):
            guest = drawn.guests[0, c]
            vector_to_parameters(state.v[0, guest].clone(), module.parameters())
            for batch in batches:
                optimizer.zero_grad()
                out = module(task.data.x[batch.rows[c]])
                cross_entropy(out, task.data.y[batch.rows[c]]).backward()
                optimizer.step()
            v[guest] = parameters_to_vector(module.parameters()).detach()
        return v

    return work


def personal_rounds(name: str, clients: int, repeats: int) -> dict[str, float]:
    """Return the seconds of a round of PERM and of others, 20 local steps of batch 20 each.

    A round of PERM that ends an epoch has the weights in it. Where they come once an epoch, each
    round bears its part. FedAvg and PERM are plain SGD, which for dense networks has a path of its
    own; the rules of the others take gradients by automatic differentiation, two for each step of
    PerFedAvg. PFedMe takes 20 gradients as FedAvg does.
    """
    task, steps, size = personal_task(name, clients), 20, 20
    perm = PERM(0.05, steps, size)
    state = perm.init(task, (0,))
    last = replace(state, t=clients - 1)
    works = {
        "PERM": functools.partial(perm.round, state, task),
        "PERM, weights each round": functools.partial(perm.round, last, task),
    }
    others = {
        "FedAvg": FedAvg(Full(clients), 0.05, steps, size),
        "PerFedAvg": PerFedAvg(0.05, steps, size),
        "PFedMe, 4 rounds of 5": PFedMe(0.005, steps // 5, size, inner_steps=5),
    }
    for other, algorithm in others.items():
        works[other] = functools.partial(algorithm.round, algorithm.init(task, (0,)), task)
    seconds = measure(works, repeats=repeats)
    once = seconds["PERM, weights each round"]
    return {"PERM, weights each epoch": ((clients - 1) * seconds.pop("PERM") + once) / clients,
            **seconds}  # fmt: skip


def figure_one(seeds: int, clients: int, epochs: int = 2, of: int = 40) -> float:
    """Return the seconds a seed of PERM at the scale of Figure 1, estimated from some epochs."""
    task, perm = personal_task("logistic 60-2", clients), PERM(0.1, 10, 20)
    go = functools.partial(simulate, perm, task, progress=False, evaluate=lambda s, k: {})
    go(1, range(seeds))
    began = time.perf_counter()
    go(epochs * clients, range(seeds))
    return (time.perf_counter() - began) * of / epochs / seeds


def filling(clients: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two ways to all weights of so many clients: by sorting each row, and ours."""
    rng = stream(0, "bench")
    z = torch.from_numpy(rng.exponential(size=(clients, clients)).astype(np.float32))
    z.fill_diagonal_(0)
    n = torch.from_numpy(rng.integers(100, 1000, clients)).float()
    lam = float(n.mean())

    def by_sorting() -> torch.Tensor:
        parts = []
        for rows in z.split(500):
            up, order = rows.double().sort(1)
            weight = n.double()[order]
            level = (2 * lam + (weight * up).cumsum(1)) / weight.cumsum(1)
            last = (level > up).sum(1, keepdim=True) - 1
            alpha = n.double() / (2 * lam) * (level.gather(1, last) - rows).clamp(min=0)
            parts.append(alpha.float())
        return torch.cat(parts)

    return by_sorting, lambda: water_fill(z, n, lam)


def personalization_table(
    clients: int = 50,
    crowded: int = 10_000,
    repeats: int = 7,
    crowds: Sequence[int] = (10, 200, 2000),
) -> list[dict[str, Any]]:
    """Time PERM against a loop that does the same, and against other methods.

    Parameters
    ----------
    clients
        As in the paper's experiments, each with as many samples as :data:`PERSONAL` says.
    crowded
        Clients whose weights are computed.
    repeats
        Turns of :func:`measure`, of three rounds each.
    crowds
        Numbers of clients for which a round is compared with one of FedAvg.

    Returns
    -------
    list of dict
        Rows with name, what is compared, the milliseconds of both, ratio (the first over the
        second) and device (CPU): a round of 10 local steps of batch 20, client by client and all
        together, and for crowds over one of FedAvg, the weights aside; rounds of 20 local steps,
        as in Figure 3, over those of FedAvg, PERM's with an update of its weights each epoch, which
        its rounds share, and each round; all weights of many clients; and Figure 1 at full scale,
        40 epochs without looking at the models, for a seed alone and for one of ten together,
        estimated from two epochs.
    """
    found = []
    for name in PERSONAL:
        task, perm = personal_task(name, clients), PERM(0.05, 10, 20)
        state = perm.init(task, (0,))
        works = {"plain loop": perm_loop(task, perm, state)}
        works["PERM"] = functools.partial(perm.round, state, task)
        found.append((f"{name}, a round", *measure(works, repeats=repeats).items()))
    for name in PERSONAL:
        seconds = personal_rounds(name, clients, repeats)
        average = ("FedAvg", seconds.pop("FedAvg"))
        found += [(f"{name}, Figure 3", one, average) for one in seconds.items()]
    for many in crowds:
        task = personal_task("logistic 60-2", many)
        average = FedAvg(Full(many), 0.05, 10, 20)
        works = {
            name: functools.partial(one.round, one.init(task, (0,)), task)
            for name, one in (("PERM", perm), ("FedAvg", average))
        }
        seconds = measure(works, repeats=repeats)
        found.append((f"logistic 60-2, {many:,} clients", *seconds.items()))
    ways = dict(zip(("sorting", "water_fill"), filling(crowded), strict=True))
    seconds = measure(ways, repeats=1)
    found.append((f"weights of {crowded:,} clients", *seconds.items()))
    alone = {f"{seeds} together": figure_one(seeds, clients) for seeds in (1, 10)}
    found.append(("Figure 1, a seed", *alone.items()))
    rows = []
    for name, (one, first), (other, second) in found:
        row = {"name": name, "first": one, "first [ms]": round(1000 * first, 2)}
        row |= {"second": other, "second [ms]": round(1000 * second, 2)}
        rows.append(row | {"ratio": round(first / second, 2), "device": "cpu"})
    return rows


# --- vertical -------------------------------------------------------------------------------------

VERTICAL = {  # name: samples, columns, how many of them are not zero in a row
    "24,000 x 90": (24_000, 90, 90),
    "18,000 x 1,048,576 sparse": (18_000, 2**20, 315),
}
PARTIES, HOLDERS, RATE = 8, 3, 0.5


def columns_problem(name: str) -> Problem:
    """Return a line of :data:`VERTICAL`, split over all parties: rows of length 1, two classes."""
    (n, d, filled), rng = VERTICAL[name], stream(0, "bench")
    values = rng.standard_normal((n, filled))
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    x = values
    if filled < d:
        columns, rows = rng.integers(d, size=n * filled), np.repeat(np.arange(n), filled)
        x = sparse.csr_array((values.ravel(), (rows, columns)), shape=(n, d))  # twice: added
    y = np.where(x @ rng.standard_normal(d) > 0, 1.0, -1.0)
    return Problem(x, y, split_features(d, PARTIES), lam=1e-4)


def columns_loop(problem: Problem, method: str, table: str | None, steps: int) -> Callable:
    """Return so many dominated steps of the plain version; made, with its first pass, once."""
    setup = checked_setup(
        problem, method, RATE, HOLDERS, None, 1.0, Deterministic(0.0), None, True, table, 0.0,
        True, 0, None, 0, False,
    )  # fmt: skip
    sim = Simulation(setup, Draws(setup))
    if method != "sgd":
        sim.receive(problem.theta(problem.scores(sim.w), problem.y))

    def work() -> np.ndarray:
        sim.restart(sim.target + steps, sim.now)
        sim.finish()
        return sim.w

    return work


def pooled_peer(problem: Problem, epochs: int) -> Callable[[], LogisticRegression]:
    """Return so many epochs of scikit-learn's SAGA on the pooled data, the same problem."""
    x = problem.x
    if sparse.issparse(x):  # scikit-learn takes 32-bit places
        places = x.indices.astype(np.int32), x.indptr.astype(np.int32)
        x = sparse.csr_matrix((x.data, *places), shape=x.shape)
    model = LogisticRegression(
        C=1 / (problem.n * problem.lam), solver="saga", fit_intercept=False, tol=0,
        max_iter=epochs, random_state=0,
    )  # fmt: skip

    def work() -> LogisticRegression:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(x, problem.y)

    return work


def events(parties: int) -> int:
    """Return how many events a dominated step has.

    For every other party a request that arrives, an answer, its arrival, a message backward and an
    update; and the dominator begins, has its own part, and writes.
    """
    return 5 * (parties - 1) + 3


def vertical_table(epochs: int = 2, steps: int = 200, repeats: int = 2) -> list[dict[str, Any]]:
    """Time VFB² with eight parties, three of them active, nothing on the way.

    Parameters
    ----------
    epochs
        Passes of n dominated steps that are timed; the table is for one.
    steps
        Dominated steps of the plain loop, whose time for an epoch is estimated from them; a tenth
        for sparse data, where each touches all columns.
    repeats
        Turns of :func:`measure`.

    Returns
    -------
    list of dict
        Rows with name, what is compared, the milliseconds of both for an epoch, ratio (the first
        over the second), events a second of the second, and device (CPU): the plain version of
        the same events, its loop alone, against whole runs with their setting up and their passes;
        and scikit-learn's SAGA on the pooled data against SAGA that remembers ϑ alone, as
        scikit-learn's does, with eight parties and with one.
    """
    rows = []
    for name in VERTICAL:
        problem, peer = columns_problem(name), "scikit-learn"
        is_sparse, setting = sparse.issparse(problem.x), dict(epochs=epochs, every=epochs)
        ways = {"SGD": ("sgd", None), "SVRG": ("svrg", None), "SAGA": ("saga", "theta")}
        if not is_sparse:
            ways["SAGA, full table"] = ("saga", "full")
        few, found = max(1, steps // 10) if is_sparse else steps, []
        for label, (method, table) in ways.items():
            setting |= dict(table=table, log=False)
            ours = functools.partial(
                simulate_parties, problem, method, RATE, active=HOLDERS, **setting
            )
            works = {"plain loop": columns_loop(problem, method, table, few), "VFB²": ours}
            if label == "SAGA":
                works[peer] = pooled_peer(problem, epochs)
                works["pooled"] = functools.partial(pooled, problem, method, RATE, **setting)
            seconds = {k: s / epochs for k, s in measure(works, repeats=repeats).items()}
            seconds["plain loop"] *= epochs * problem.n / few
            found.append((label, "plain loop", "VFB²", seconds))
            if label == "SAGA":
                found += [(label, peer, one, seconds) for one in ("VFB²", "pooled")]
        for label, one, other, seconds in found:
            many = problem.n * events(1 if other == "pooled" else PARTIES)
            row = {"name": f"{name}, {label}", "first": one}
            row |= {"first [ms]": round(1000 * seconds[one], 1), "second": other}
            row |= {"second [ms]": round(1000 * seconds[other], 1)}
            row["ratio"] = round(seconds[one] / seconds[other], 2)
            row["events a second"] = round(many / seconds[other])
            rows.append(row | {"device": "cpu"})
    return rows


# --- batches --------------------------------------------------------------------------------------

SMOKE = {"paper": "participation", "experiment": "fig1", "profile": "smoke"}


def batch_table(jobs: int = 40) -> list[dict[str, Any]]:
    """Count jobs a minute of ``fedlib batch`` and of loops that do the same.

    The jobs are small runs of Figure 1 that differ in a setting which lets none be joined with
    another, and one grid of as many seeds, which are. The loops: a shell that starts ``fedlib run``
    or ``papermill`` for each job, and Python in one process.

    Parameters
    ----------
    jobs
        How many, as experiments and as notebooks. With 40 it takes a quarter of an hour.

    Returns
    -------
    list of dict
        Rows with name, jobs, seconds, jobs a minute, and ``"to the loop"``: seconds over those of
        the Python loop.
    """
    grid = {"set": SMOKE, "grid": {"window": [50 * (k + 1) for k in range(jobs)]}}
    seeds = {"set": SMOKE, "grid": {"seed": list(range(1, jobs + 1))}}
    rows = []
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        (home / "cell.ipynb").write_text(_small_notebook())
        sheets = {"notebook": str(home / "cell.ipynb"), "set": {"out": str(home / "loop")}}
        sheets["grid"] = {"window": grid["grid"]["window"]}

        def command(job: batches.BatchJob, n: int) -> list[str]:
            if job.notebook:
                given = [w for k, v in job.parameters.items() for w in ("-p", k, str(v))]
                done = str(home / f"{n}.ipynb")
                return [
                    sys.executable,
                    "-m",
                    "papermill",
                    "--no-progress-bar",
                    job.notebook,
                    done,
                    *given,
                ]
            words = [f"{k}={v}" for k, v in job.changes.items()]
            run = [sys.executable, "-m", "fedlib", "run", *list(SMOKE.values())[:2]]
            run += ["--profile", "smoke", "--out", str(home / f"shell{n}")]
            return [*run, *[w for word in words for w in ("--set", word)]]

        def shell(page: dict[str, Any]) -> None:
            for n, job in enumerate(batches.read(page)):
                subprocess.run(command(job, n), capture_output=True, check=True)

        def loop() -> None:
            subprocess.run([sys.executable, "-c", LOOP, json.dumps(grid), str(home / "python")],
                           capture_output=True, check=True)  # fmt: skip

        works: dict[str, Callable[[], Any]] = {
            "Python loop, one process": loop,
            "shell loop of fedlib run": lambda: shell(grid),
            "shell loop of papermill": lambda: shell(sheets),
        }
        pages = (("experiments", grid), ("seeds", seeds), ("notebooks", sheets))
        for workers, (kind, page) in itertools.product((1, 2), pages):
            works[f"batch of {kind}, workers: {workers}"] = functools.partial(
                batches.run, page, home / f"{kind}{workers}", workers, progress=False
            )
        for name, do in works.items():
            began = time.perf_counter()
            do()
            taken = time.perf_counter() - began
            rows.append({"name": name, "jobs": jobs, "seconds": round(taken, 1),
                         "jobs a minute": round(60 * jobs / taken, 1)})  # fmt: skip
    loop_seconds = rows[0]["seconds"]
    return [row | {"to the loop": round(row["seconds"] / loop_seconds, 2)} for row in rows]


LOOP = """
import json, sys
from fedlib import batch
from fedlib.lab.evidence import experiments
for job in batch.read(json.loads(sys.argv[1])):
    experiments.run(job.paper, job.experiment, job.profile, job.seeds, job.device,
                    f"{sys.argv[2]}/{job.id}", False, changes=job.changes)
"""


def _small_notebook() -> str:
    """Return a notebook that runs the same as a job of the grid."""
    import nbformat

    run = (
        f"from fedlib.lab.evidence import experiments\nexperiments.run(*{[*SMOKE.values()]}, "
        "out=f'{out}/{window}', progress=False, changes={'window': window})"
    )
    cells = [nbformat.v4.new_code_cell(text) for text in ("window, out = 50, ''", run)]
    cells[0]["source"], cells[0]["metadata"]["tags"] = "window = 50\nout = ''", ["parameters"]
    held = nbformat.v4.new_notebook(cells=cells)
    held["metadata"]["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    return nbformat.writes(held)


BENCHES = {
    "local-sgd": local_sgd_table,
    "tiers": tiers_table,
    "hierarchy": hierarchy_table,
    "personalization": personalization_table,
    "vertical": vertical_table,
    "roofline": roofline_table,
    "batch": batch_table,
}


def run(name: str) -> list[dict[str, Any]]:
    """Run a benchmark by name."""
    if name not in BENCHES:
        raise unknown("benchmark", name, BENCHES)
    return BENCHES[name]()


# --- keeping them ---------------------------------------------------------------------------------


def folder(out: str | Path | None = None) -> Path:
    """Return the folder of kept measurements; default is the one that ships with fedlib."""
    return (data_folder() / "results" if out is None else Path(out)) / "bench"


def save(name: str, rows: list[dict[str, Any]], out: str | Path | None = None) -> Path:
    """Keep a measurement with what it was measured on, as ``bench/NAME/DATE.json``.

    Rows that name no device were measured on the CPU, whatever else the machine has.

    Raises
    ------
    FedlibError
        When the folder cannot be written.
    """
    (device,) = {row.get("device", "cpu") for row in rows}
    about = experiments.provenance(device)
    target = files.make_folder(folder(out) / name)
    path = target / f"{about['date'][:16].replace(':', '-')}.json"
    page = json.dumps({"bench": name, **about, "rows": rows}, indent=1) + "\n"
    files.publish(path, page.encode())
    return path


def load(name: str, out: str | Path | None = None) -> list[dict[str, Any]]:
    """Return every kept measurement of a benchmark, oldest first."""
    paths = sorted((folder(out) / name).glob("*.json"))
    return [json.loads(path.read_text()) for path in paths]
