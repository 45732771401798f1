"""Benchmarks: the library against a plain loop and against the floor of the machine.

What is compared takes turns in one run, so the ratios hold on a busy machine, too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlib import files
from fedlib.engine import models
from fedlib.engine.cores import steady
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.local import copies_that_fit, local_sgd
from fedlib.engine.recording import Recording
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import unknown
from fedlib.lab.evidence import experiments
from fedlib.lab.vertical.measured import messages_table, processes_table
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.personalization import PERM, PerFedAvg, PFedMe
from fedlib.paths import data_folder, expand
from fedlib.population.participation import Full, PeriodicSampler

WORK = {  # name: model, input shape, copies, batch, steps
    "softmax 784-10": (lambda: models.softmax(784, 10), (1, 28, 28), 50, 16, 5),
    "logistic 60-2": (lambda: models.softmax(60, 2), (60,), 50, 16, 5),
    "mlp 784-50-10": (lambda: models.mlp(784, 50, 10), (1, 28, 28), 50, 16, 5),
    "mlp 784-200-200-10": (lambda: models.mlp(784, 200, 200, 10), (1, 28, 28), 50, 16, 5),
    "fashion_cnn": (models.fashion_cnn, (1, 28, 28), 10, 16, 5),
    "a module of one's own": (lambda: models.Model(own_module()), (1, 28, 28), 50, 16, 5),
}


def own_module() -> nn.Module:
    """Return a module whose forward pass nobody has written for many copies at once."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 200, device="meta"), nn.Tanh()),
        nn.Linear(200, 10, device="meta"),
    )


def plain_loop(task: Task, theta: Tensor, batches: list[Batch], lr: float) -> Callable[[], Tensor]:
    """Return the same work done with one module and one optimizer a client, as most code does.

    Modules and optimizers are made here, once. A call loads ``theta`` into them, takes the
    steps and returns the new parameters ``[C, P]``; only that is timed.
    """
    place = dict(device=theta.device, dtype=theta.dtype)
    modules = [copy.deepcopy(task.model.module).to_empty(device="cpu").to(**place) for _ in theta]
    optimizers = [torch.optim.SGD(module.parameters(), lr=lr) for module in modules]

    def work() -> Tensor:
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


def median_seconds(
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


def compared(name: str, seconds: dict[str, float]) -> dict[str, Any]:
    """Return a line of a table: milliseconds of each way, and the first's over the last's."""
    first, *_, last = seconds.values()
    row = {"name": name} | {f"{way} [ms]": round(1000 * s, 3) for way, s in seconds.items()}
    return row | {"ratio": round(first / last, 2)}


# --- local steps, and their floor -----------------------------------------------------------------


Ways = list[tuple[Callable[..., Tensor], list[Tensor]]]  # operations, and what each is given


def workload(name: str, device: str) -> tuple[Task, Tensor, list[Batch]]:
    """Return the task, the starting points and the batches of one line of :data:`WORK`."""
    build, shape, copies, size, steps = WORK[name]
    rng = stream(0, "bench")
    x = rng.standard_normal((2000, *shape)).astype(np.float32)
    y = rng.integers(0, 2 if "logistic" in name else 10, 2000)
    data = FederatedDataset.build(x, y, [np.arange(2000)], device=device)
    task = Task(build(), data)
    rows = torch.from_numpy(rng.integers(0, 2000, (steps, copies, size))).to(device)
    return task, task.init(range(copies)), [Batch(step) for step in rows]


def least(work: Callable[..., Tensor], inputs: list[Tensor], seconds: float = 0.1) -> float:
    """Return the least seconds of some work, which many calls have: nothing disturbed that one.

    On a GPU it is recorded many times over, so that no launch counts that a recording saves.
    """
    again, times, taken = work, 1, []
    work(*inputs)  # libraries settle
    if inputs[0].is_cuda:
        times = 16
        again = Recording(lambda *args: [work(*args) for _ in range(times)][-1], inputs)
    until = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        again(*inputs)
        if inputs[0].is_cuda:
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began) / times)
    return min(taken)


def products(copies: int, x: int, inward: int, outward: int, like: Tensor) -> Ways:
    """Return a dense layer's products for ``x`` columns a copy: forward, for the weights, below."""
    shapes = ((outward, inward), (x, inward), (x, outward))
    w, h, slope = (like.new_ones(copies, *shape) for shape in shapes)
    return [
        (lambda w, h: torch.bmm(w, h.mT), [w, h]),
        (lambda slope, h: torch.bmm(slope.mT, h), [slope, h]),
        (lambda w, slope: torch.bmm(w.mT, slope.mT), [w, slope]),
    ]


def convolutions(
    copies: int, layer: nn.Conv2d, x: Tensor, out: Tensor, below: bool, like: Tensor, order: Any
) -> Ways:
    """Return a convolution, the copies' channels side by side, and its gradients."""

    def side_by_side(one: Tensor, axis: int) -> Tensor:
        sizes = [size * copies if i == axis else size for i, size in enumerate(one.shape)]
        return like.new_ones(sizes).to(memory_format=order)

    h, w, slope = (side_by_side(*one) for one in ((x, 1), (layer.weight, 0), (out, 1)))
    how, mask = (layer.stride, layer.padding, layer.dilation), [below, True, False]
    back = torch.ops.aten.convolution_backward
    return [
        (lambda h, w: torch.conv2d(h, w, None, *how, copies), [h, w]),
        (lambda slope, h, w: back(slope, h, w, None, *how, False, [0, 0], copies, mask)[1],
         [slope, h, w]),
    ]  # fmt: skip


def floor(task: Task, theta: Tensor, batches: list[Batch]) -> float:
    """Return the seconds that the products and convolutions of some local steps take at least.

    Those of each dense and each convolutional layer, forward and backward, are done alone and
    warm, at their very shapes: for one copy, for some and for all at once, and convolutions in
    either order of memory and as products of patches that are laid out already. The least time of
    the best way counts, on one core, as if all cores kept its speed and shared the copies evenly.
    """
    copies, size = batches[0].rows.shape
    cores = torch.get_num_threads() if theta.device.type == "cpu" else 1
    module, layers = copy.deepcopy(task.model.module).to_empty(device="cpu"), []
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            part.register_forward_hook(lambda part, x, out: layers.append((part, *x, out)))
    module(torch.zeros(size, *task.data.x.shape[1:]))
    seconds = 0.0
    with steady():
        for i, (layer, x, out) in enumerate(layers):
            outward, inward = layer.weight.flatten(1).shape
            columns, several = out.numel() // outward, {1, min(8, copies), copies}
            due = 3 if i else 2  # the first layer's inputs are data
            ways = [(n, products(n, columns, inward, outward, theta)[:due]) for n in several]
            if isinstance(layer, nn.Conv2d):
                orders = (torch.contiguous_format, torch.channels_last)
                for n, order in itertools.product((1, copies), orders):
                    ways.append((n, convolutions(n, layer, x, out, i > 0, theta, order)))
            seconds += min(sum(least(*one) for one in way) / n for n, way in ways)
    return len(batches) * copies * seconds / cores


def local_steps(name: str, device: str) -> dict[str, Any]:
    """Time :func:`fedlib.engine.local.local_sgd` on one line of :data:`WORK`.

    The plain loop's modules and optimizers are made before its clock starts.

    Returns
    -------
    dict
        The name; milliseconds of the plain loop and of every backend, the last of which is the
        one that the library chooses here; ratio, the plain loop's over the chosen one's: above
        one is faster; the milliseconds of :func:`floor`; share, the floor over the chosen one: at
        most about one; which was chosen; the device; and how many copies it has room for.
    """
    task, theta, batches = work = workload(name, device)
    usual = "recorded" if device == "cuda" else "threads"
    works = {"plain loop": plain_loop(*work, 0.01)}
    for way in ("loop", "batched", usual):
        works[way] = functools.partial(local_sgd, *work, 0.01, backend=way)
    seconds, low = median_seconds(works, device), floor(*work)
    row = compared(name, seconds) | {"floor [ms]": round(1000 * low, 3)}
    row |= {"share": round(low / seconds[usual], 2), "chosen": usual, "device": device}
    return row | {"copies that fit": copies_that_fit(task, theta, batches[0])}


def local_sgd_table() -> list[dict[str, Any]]:
    """Return the rows of :func:`local_steps` for every line of :data:`WORK`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [local_steps(name, device) for name in WORK]


# --- whole rounds ---------------------------------------------------------------------------------


def whole_rounds(device: str, seeds: int, seconds: float, samples: int = 60_000) -> dict[str, Any]:
    """Count whole rounds a second of Figure 1's FedAvg, drawing and averaging included.

    10 clients of 250 take 5 steps of batch 16 with the Fashion-MNIST CNN, on random images.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"cuda"``.
    seeds
        Runs side by side.
    seconds
        How long to count, at least half of it; some rounds come before, for warming up.
    samples
        Images in all.
    """
    rng = stream(0, "bench")
    x = rng.standard_normal((samples, 1, 28, 28), dtype=np.float32)
    parts = list(np.arange(samples).reshape(250, -1))
    data = FederatedDataset.build(x, rng.integers(0, 10, samples), parts, device=device)
    task = Task(models.fashion_cnn(), data)
    algorithm = FedAvg(PeriodicSampler(250, 10), 1e-3, 5, 16)
    state, rounds, taken = algorithm.init(task, range(1, 1 + seeds)), 4, 0.0
    options = dict(evaluation=Evaluation(splits=()), progress=False)
    state = simulate(algorithm, task, rounds, state.seeds, state=state, **options).state
    while taken < seconds / 2:
        rounds, began = 2 * rounds, time.perf_counter()
        state = simulate(algorithm, task, rounds, state.seeds, state=state, **options).state
        if device == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    return {"seeds": seeds, "rounds": rounds, "seconds": round(taken, 2),
            "seed-rounds a second": round(seeds * rounds / taken, 1)}  # fmt: skip


PERSONAL = {  # name: widths of the network, clients, samples of each
    "logistic 60-2, 50 clients": ((60, 2), 50, 500),
    "mlp 784-200-200-10, 50 clients": ((784, 200, 200, 10), 50, 150),
    "logistic 60-2, 2,000 clients": ((60, 2), 2000, 100),
}


def personalization_table() -> list[dict[str, Any]]:
    """Time a round of PERM and of other methods, 20 local steps of batch 20 each, on the CPU.

    A round of PERM that ends an epoch has the weights in it. Where they come once an epoch, each
    round bears its part. FedAvg and PERM are plain SGD, which for dense networks has a path of its
    own; the rules of the others take gradients by automatic differentiation, two for each step of
    PerFedAvg. PFedMe takes 20 gradients as FedAvg does.

    Returns
    -------
    list of dict
        Rows with name; milliseconds of a round of PERM with weights each epoch, the same with
        weights each round, PerFedAvg, PFedMe and FedAvg; ratio, PERM's with weights each epoch
        over FedAvg's.
    """
    rows = []
    for name, (widths, clients, samples) in PERSONAL.items():
        rng, n = stream(0, "bench"), clients * samples
        x = rng.standard_normal((n, widths[0]), dtype=np.float32)
        parts = np.split(np.arange(n), clients)
        data = FederatedDataset.build(x, rng.integers(0, widths[-1], n), parts)
        task, perm = Task(models.mlp(*widths), data), PERM(0.05, 20, 20)
        last = replace(perm.init(task, (0,)), t=clients - 1)
        methods = {
            "PERM, weights each epoch": perm,
            "PERM, weights each round": perm,
            "PerFedAvg": PerFedAvg(0.05, 20, 20),
            "PFedMe, 4 rounds of 5": PFedMe(0.005, 4, 20, inner_steps=5),
            "FedAvg": FedAvg(Full(clients), 0.05, 20, 20),
        }
        works = {
            method: functools.partial(how.round, last if "each round" in method else
                                      how.init(task, (0,)), task)
            for method, how in methods.items()
        }  # fmt: skip
        seconds = median_seconds(works)
        usual, once = (seconds[f"PERM, weights each {when}"] for when in ("epoch", "round"))
        seconds["PERM, weights each epoch"] = ((clients - 1) * usual + once) / clients
        rows.append(compared(name, seconds))
    return rows


BENCHES = {"local-sgd": local_sgd_table, "personalization": personalization_table}
BENCHES["processes"] = processes_table
BENCHES["messages"] = messages_table


def run(name: str) -> list[dict[str, Any]]:
    """Run a benchmark by name."""
    if name not in BENCHES:
        raise unknown("benchmark", name, BENCHES)
    return BENCHES[name]()


# --- keeping them ---------------------------------------------------------------------------------


def bench_folder(out: str | Path | None = None) -> Path:
    """Return the folder of kept measurements; default is the one that ships with fedlib."""
    return (data_folder() / "results" if out is None else expand(out, "out")) / "bench"


def save_bench(name: str, rows: list[dict[str, Any]], out: str | Path | None = None) -> Path:
    """Keep a measurement with what it was measured on, as ``bench/NAME/DATE.json``.

    Rows that name no device were measured on the CPU, whatever else the machine has. A file that
    is there stays; of two in one second the later has a number behind its date.

    Raises
    ------
    FedlibError
        When the folder cannot be written.
    """
    (device,) = {row.get("device", "cpu") for row in rows}
    about = experiments.provenance(device)
    target = files.make_folder(bench_folder(out) / name)
    page = json.dumps({"bench": name, **about, "rows": rows}, indent=1) + "\n"
    when = about["date"][:19].replace(":", "-")
    taken = len(list(target.glob(f"{when}*.json")))
    path = target / f"{when}{f'_{taken + 1}' * (taken > 0)}.json"
    files.publish(path, page.encode())
    return path


def load_bench(name: str, out: str | Path | None = None) -> list[dict[str, Any]]:
    """Return every kept measurement of a benchmark, oldest first."""
    paths = sorted((bench_folder(out) / name).glob("*.json"))
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda page: page["date"])
