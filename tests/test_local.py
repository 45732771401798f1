"""Every backend takes the same steps, for every algorithm, on any number of cores.

Run as a script this file is the child process of its own memory tests: ``KIND``.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedlib
from fedlib.datasets import partition
from fedlib.engine import local, models
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import BACKENDS, local_sgd
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers import fedavg
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import (
    GeneralizedFedAvg,
    WaitFull,
    WaitMinibatch,
)
from fedlib.papers.tiers import LabelPrivateTDCD, TieredTask, private
from fedlib.papers.tiers import algorithm as tiers
from fedlib.population import participation as pt


def any_module() -> models.Model:
    return models.Model(nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)))


CASES = {  # name: model, shape of a sample
    "softmax": (lambda: models.softmax(16, 3), (1, 4, 4)),
    "mlp": (lambda: models.mlp(16, 7, 6, 3), (1, 4, 4)),
    "fashion_cnn": (models.fashion_cnn, (1, 28, 28)),
    "small_cnn": (lambda: models.small_cnn((1, 8, 12), 3), (1, 8, 12)),
    "lstm": (lambda: models.lstm(5, 4, 3), (6, 5)),
    "any module": (any_module, (8,)),
}
COPIES, STEPS, B = 5, 3, 4


def problem(name: str, dtype=np.float64, **options) -> tuple[Task, torch.Tensor, list[Batch]]:
    """Return a task, different starting points and batches for five copies."""
    build, shape = CASES[name]
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12, *shape)).astype(dtype), rng.integers(0, 3, 12)
    task = Task(build(), FederatedDataset.build(x, y, [np.arange(12)]), **options)
    rows = torch.from_numpy(rng.integers(0, 12, (STEPS, COPIES, B)))
    return task, task.init(range(COPIES)), [Batch(step) for step in rows]


def by_hand(task: Task, theta: torch.Tensor, batches: list[Batch], rates) -> torch.Tensor:
    """One copy, one step at a time, straight from the gradient of the regularised loss."""
    out = theta.clone()
    for c in range(len(theta)):
        for batch in batches:
            weight = None if batch.weight is None else batch.weight[c : c + 1]
            leaf = out[c : c + 1].clone().requires_grad_()
            loss = task.loss(leaf, Batch(batch.rows[c : c + 1], weight))
            out[c] -= rates[c] * torch.autograd.grad(loss.sum(), leaf)[0][0]
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_every_backend_takes_the_steps_of_plain_sgd(name, backend):
    task, theta, batches = problem(name)
    before = theta.clone()
    expected = by_hand(task, theta, batches, [0.1] * COPIES)
    for copies in (0, 2):
        found = local_sgd(task, theta, batches, 0.1, copies, backend)
        assert (found - expected).abs().max() < 1e-12 < (found - theta).abs().max()
    assert torch.equal(theta, before), "the starting points stay as they are"


@pytest.mark.parametrize("name", ["mlp", "any module"])
def test_rates_weights_and_the_l2_term(name):
    task, theta, batches = problem(name, l2=0.3)
    rates = torch.linspace(0.1, 0.5, COPIES, dtype=torch.float64)
    weight = torch.from_numpy(np.random.default_rng(1).dirichlet([1] * B, COPIES))
    weight[0] = torch.tensor([0.5, 0.5, 0, 0])  # padded
    batches = [Batch(batch.rows, weight) for batch in batches]
    expected = by_hand(task, theta, batches, rates)
    for backend in BACKENDS:
        found = local_sgd(task, theta, batches, rates, 2, backend)
        assert (found - expected).abs().max() < 1e-13


def test_only_the_models_own_loss_is_differentiated_by_hand(monkeypatch):
    """The dense shortcut stands for cross-entropy on dense layers, and for nothing else."""
    task, theta, batches = problem("mlp")
    monkeypatch.setattr(local, "_descend", None)
    local_sgd(task, theta, batches, 0.1)

    class Doubled(Task):
        def losses(self, theta, batch):
            return 2 * super().losses(theta, batch)

    aimless = FederatedDataset.build(task.data.x, None, task.data.parts)
    others = [Doubled(task.model, task.data), Task(task.model, aimless, "half_square")]
    for other in (*others, problem("any module")[0]):
        with pytest.raises(TypeError):
            local_sgd(other, other.init(range(len(theta))), batches, 0.1)


def test_a_lost_copy_leaves_the_others_alone():
    task, theta, batches = problem("mlp")
    clean = local_sgd(task, theta, batches, 0.1)
    theta[1] = float("nan")
    found = local_sgd(task, theta, batches, 0.1)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


# --- algorithms -----------------------------------------------------------------------------------

STEP = dict(lr=0.1, local_steps=3)
FEDERATED = {
    "FedAvg": FedAvg(pt.Independent(6, 3), batch_size=2, **STEP),
    "generalized FedAvg": GeneralizedFedAvg(
        pt.PeriodicSampler(6, 3, 2, 2), amplify=3, interval=2, batch_size=2, **STEP
    ),
    "wait-minibatch": WaitMinibatch(pt.Independent(6, 2), interval=2, batch_size=2, **STEP),
    "wait-full": WaitFull(pt.Independent(6, 2), interval=2, **STEP),
}


def federated(name: str, backend: str, patch) -> torch.Tensor:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 9)), rng.integers(0, 3, 40)
    task = Task(
        models.mlp(9, 5, 3),
        FederatedDataset.build(x, y, np.split(np.arange(40), [4, 9, 15, 22, 30])),
    )
    patch.setattr(fedavg, "local_sgd", functools.partial(local_sgd, backend=backend))
    algorithm = FEDERATED[name]
    state = start = algorithm.init(task, (0, 1))
    for _ in range(4):
        state, _ = algorithm.round(state, task)
    assert (state.x - start.x).abs().max() > 0.01
    return state.x


TIERED = {
    "shared labels": tiers.TDCD(0.1, 3, 8),
    "fresh derivatives": LabelPrivateTDCD(0.1, 3, 8),
    "stale derivatives": LabelPrivateTDCD(0.1, 3, 8, fresh=False),
}


def tiered(name: str, backend: str, patch) -> torch.Tensor:
    rng = np.random.default_rng(0)
    features = [rng.standard_normal((24, 4)), rng.standard_normal((24, 4))]
    task = TieredTask(
        [models.mlp(4, 5, 3)] * 2, features, rng.integers(0, 3, 24), partition.grid(24, [3, 2])
    )
    for module in (tiers, private):
        patch.setattr(module, "local_sgd", functools.partial(local_sgd, backend=backend))
    algorithm = TIERED[name]
    state = start = algorithm.init(task, (0, 1))
    for _ in range(4):
        state, _ = algorithm.round(state, task)
    assert (state.x - start.x).abs().max() > 0.01
    return state.x


@pytest.mark.parametrize("name", [*FEDERATED, *TIERED])
def test_every_algorithm_is_the_same_with_every_backend(name, monkeypatch):
    work = federated if name in FEDERATED else tiered
    expected = work(name, "loop", monkeypatch)
    for backend in BACKENDS[1:]:
        assert (work(name, backend, monkeypatch) - expected).abs().max() < 1e-13


# --- cores ----------------------------------------------------------------------------------------


@pytest.fixture
def cores():
    """Set the number of threads; put it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_cores_does_not_change_a_bit(name, cores):
    task, theta, batches = problem(name, np.float32)
    found = []
    for count in (1, 2, 3, 2, 3):
        cores(count)
        found.append(local_sgd(task, theta, batches, 0.05, copies=1))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", [*FEDERATED, *TIERED])
def test_nor_does_it_change_a_bit_of_any_algorithm(name, cores, monkeypatch):
    work, found = federated if name in FEDERATED else tiered, []
    monkeypatch.setattr(local, "CACHED", 1)  # as many pieces as copies
    for count in (1, 2):
        cores(count)
        found.append(work(name, "threads", monkeypatch))
    assert torch.equal(*found)


def test_the_cut_is_even_and_does_not_look_at_the_cores(cores, monkeypatch):
    assert local._cut(10, 4) == [slice(0, 2), slice(2, 5), slice(5, 7), slice(7, 10)]
    assert local._cut(3, 7) == [slice(0, 3)] and local._cut(0, 7) == []
    assert local._cut(3, 1) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    task, theta, batches = problem("fashion_cnn", np.float32)
    monkeypatch.setattr(torch, "get_num_threads", None)
    assert local._copies_at_once(task, theta, batches, "threads") == 2
    assert local._copies_at_once(task, theta, batches, "loop") == 1
    assert local._copies_at_once(task, theta, batches, "batched") > 100


def test_copies_at_once_are_those_that_fit(monkeypatch):
    task, theta, batches = problem("fashion_cnn", np.float32)
    read = batches[0].rows.shape[1] * 28 * 28
    threads, batched = task.size + read, 2 * task.size + 4 * read
    monkeypatch.setattr(local, "CACHED", 3 * threads)
    monkeypatch.setattr(local, "HELD", 5 * batched)
    assert local._copies_at_once(task, theta, batches, "threads") == 3
    assert local._copies_at_once(task, theta, batches, "batched") == 5
    monkeypatch.setattr(local, "CACHED", 3 * threads - 1)
    monkeypatch.setattr(local, "HELD", 1)
    assert local._copies_at_once(task, theta, batches, "threads") == 2
    assert local._copies_at_once(task, theta, batches, "batched") == 1
    assert local._copies_at_once(task, theta, [], "batched") == 1


def test_pieces_are_spread_over_the_cores(cores, monkeypatch):
    cores(2)
    task, theta, batches = problem("any module")
    seen, both = set(), threading.Barrier(2, timeout=20)

    def meet(*_):
        both.wait()  # passes only when two threads are here at once
        seen.add(threading.current_thread().name)
        assert torch.get_num_threads() == 1

    monkeypatch.setattr(local, "_descend", meet)
    first = [Batch(batch.rows[:4]) for batch in batches]
    local_sgd(task, theta[:4], first, 0.1, copies=1)
    assert len(seen) == 2 and threading.current_thread().name in seen
    assert torch.get_num_threads() == 2


def test_an_error_ends_all_work_and_gives_the_threads_back(cores, monkeypatch):
    cores(2)
    task, theta, batches = problem("any module")
    begun, ended = [], []

    def fail(*_):
        begun.append(1)
        time.sleep(0.05 * len(begun))
        ended.append(1)
        raise ZeroDivisionError

    monkeypatch.setattr(local, "_descend", fail)
    with pytest.raises(ZeroDivisionError):
        local_sgd(task, theta, batches, 0.1, copies=1)
    count = len(begun)
    assert len(ended) == count < COPIES, "when the error is raised, nothing runs any more"
    time.sleep(0.2)
    assert len(begun) == count and torch.get_num_threads() == 2


def test_a_single_piece_is_computed_by_one_core_too(cores, monkeypatch):
    cores(2)
    seen = []
    monkeypatch.setattr(local, "_descend", lambda *_: seen.append(torch.get_num_threads()))
    local_sgd(*problem("any module"), 0.1)
    assert seen == [1]


def test_unknown_and_unfit_backends():
    task, theta, batches = problem("softmax")
    with pytest.raises(FedlibError, match="Did you mean 'threads'"):
        local_sgd(task, theta, batches, 0.1, backend="thread")
    with pytest.raises(FedlibError, match="'threads' is for the CPU"):
        local_sgd(task, theta.to("meta"), batches, 0.1, backend="threads")
    with pytest.raises(FedlibError, match=f"2 rates for {COPIES} copies"):
        local_sgd(task, theta, batches, torch.tensor([0.1, 0.2]))


# --- memory ---------------------------------------------------------------------------------------


def peak() -> int:
    """Return the most memory this process has held, in bytes."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", text)[1])


def measure_memory() -> None:
    """Print by how much a round of 2,000 clients raises the memory, and what is allowed."""
    torch.set_num_threads(1)
    clients, per_client, features = 2000, 8, 64
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * per_client, features), dtype=np.float32)
    parts = list(np.arange(clients * per_client).reshape(clients, per_client))
    task = Task(
        models.mlp(features, 280, 10), FederatedDataset.build(x, rng.integers(0, 10, len(x)), parts)
    )
    algorithm = WaitMinibatch(pt.Full(clients), 0.1, interval=1, local_steps=2, batch_size=4)
    state = algorithm.init(task, (0,))
    local_sgd(task, state.x, [task.data.full_batch([0])], 0.1)  # libraries make their buffers
    before = peak()
    after, _ = algorithm.round(state, task)
    assert (after.x - state.x).abs().sum() > 0 and (after.cursor == 2).all()
    copy = 4 * task.size  # bytes
    print(peak() - before, x.nbytes + 4 * 50 * copy + 64_000_000, 2 * clients * copy)


def measure_one_call() -> None:
    """Print the memory of a round with 2,000 clients in one call, and what is allowed."""
    clients, per_client = 2000, 8
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * per_client, 1, 28, 28), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    parts = list(np.arange(len(x)).reshape(clients, per_client))
    algorithm = FedAvg(pt.Full(clients), 0.1, local_steps=2, batch_size=4)
    warm = Task(models.mlp(784, 50, 10), FederatedDataset.build(x[:8], y[:8], parts[:1]))
    local_sgd(warm, warm.init((0, 1)), [Batch(torch.zeros(2, 4, dtype=torch.long))], 0.1, 1)
    before = peak()
    task = Task(warm.model, FederatedDataset.build(x.copy(), y, parts))
    algorithm.round(algorithm.init(task, (0,)), task)
    copies = 4 * clients * task.size  # bytes
    print(peak() - before, x.nbytes + 4 * copies, x.nbytes + 2 * copies)


def measured(kind: str) -> tuple[int, int, int]:
    """Measure in a process of its own: the peak never falls again."""
    env = os.environ | {"PYTHONPATH": str(Path(fedlib.__file__).parents[1])}
    command = [sys.executable, __file__, kind]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=True)
    return tuple(map(int, done.stdout.split()))


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's /proc"
)


@pytest.mark.slow
@needs_proc
def test_2000_clients_in_one_call_need_the_data_and_four_floats_a_parameter():
    grown, allowed, least = measured("one call")
    assert least < grown < allowed, f"{grown / 1e6:.0f} MB, allowed {allowed / 1e6:.0f} MB"


@pytest.mark.slow
@needs_proc
def test_a_round_of_everyone_holds_few_copies_at_a_time():
    grown, allowed, all_at_once = measured("everyone")
    assert 3 * allowed < all_at_once
    assert grown < allowed, f"{grown / 1e6:.0f} MB, expected below {allowed / 1e6:.0f} MB"


if __name__ == "__main__":
    {"everyone": measure_memory, "one call": measure_one_call}[sys.argv[1]]()
