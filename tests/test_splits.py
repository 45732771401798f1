"""Splits by seed: every seed's run is what it is with its own split alone, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlib.datasets import partition
from fedlib.engine.data import FederatedDataset
from fedlib.engine.models import mlp, softmax
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import WaitFull
from fedlib.papers.tiers.algorithm import TDCD, Drawn
from fedlib.papers.tiers.task import TieredTask
from fedlib.population.participation import Independent

RNG = np.random.default_rng(5)
ROWS, CLIENTS, SEEDS = 60, 6, (3, 8, 11)
X = RNG.standard_normal((ROWS, 4)).astype(np.float32)
Y = RNG.integers(0, 3, ROWS)
SPLITS = {seed: np.split(np.random.default_rng(seed).permutation(ROWS), CLIENTS) for seed in SEEDS}
UNEVEN = {
    seed: np.split(np.random.default_rng(seed).permutation(ROWS), [5, 20 + seed, 40, 48, 55])
    for seed in SEEDS
}


def dealt(parts):
    return FederatedDataset.build(X, Y, parts, X[:9], Y[:9])


def walk(algorithm, task, seeds, rounds=4):
    state = algorithm.init(task, seeds)
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
    return state.x


@pytest.mark.parametrize("splits", [SPLITS, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(Independent(CLIENTS, 2), 0.1, local_steps=3, batch_size=4),
        FedAvg(Independent(CLIENTS, 2), 0.1, local_steps=2),
        WaitFull(Independent(CLIENTS, 2), 0.1, interval=2, local_steps=2),
    ],
    ids=["minibatches", "full batches", "waiting"],
)
def test_a_seed_among_others_is_the_seed_alone(algorithm, splits):
    whole = Task(softmax(4, 3), dealt(splits[3]).with_splits(splits))
    together = walk(algorithm, whole, SEEDS)
    for row, seed in zip(together, SEEDS, strict=True):
        alone = walk(algorithm, Task(whole.model, dealt(splits[seed])), (seed,))
        assert torch.allclose(row, alone[0], atol=1e-6)
        same_seed = walk(algorithm, whole.of(seed), (seed,))
        assert torch.equal(same_seed, alone)
    other = walk(algorithm, Task(whole.model, dealt(splits[3])), (8,))
    assert not torch.allclose(together[1], other[0], atol=1e-5), "the split matters"


def test_clients_read_their_own_rows_of_their_own_seed():
    data = dealt(SPLITS[3]).with_splits(SPLITS)
    clients = torch.tensor([[0, 5], [0, 5], [2, 2]])
    batches, _ = data.next_batches(SEEDS, clients, np.zeros((3, CLIENTS), int), 2, 5)
    read = torch.stack([batch.rows for batch in batches], 1).view(3, 2, -1)  # [seed, client, 10]
    for r, seed in enumerate(SEEDS):
        for s, n in enumerate(clients[r].tolist()):
            assert set(read[r, s].tolist()) <= set(SPLITS[seed][n].tolist())
    assert sorted(read[0, 0].tolist()) == sorted(SPLITS[3][0].tolist()), "one pass of the client"


def test_what_splits_by_seed_refuse():
    data = dealt(SPLITS[3])
    split = data.with_splits(SPLITS)
    assert [len(part) for part in data.parts] == data.sizes.tolist() == [10] * 6
    for ask in (lambda: split.parts, lambda: split.sizes, split.full_batch):
        with pytest.raises(FedlibError, match="split of its own here, and none was named.*3, 8, 1"):
            ask()
    with pytest.raises(FedlibError, match="seed 4 has none"):
        walk(FedAvg(Independent(CLIENTS, 2), 0.1, 1, 4), Task(softmax(4, 3), split), (3, 4))
    with pytest.raises(FedlibError, match="need 6 clients each; got {3: 5}"):
        data.with_splits({3: np.split(np.arange(60), 5)})
    with pytest.raises(FedlibError, match="need 6 clients"):
        data.with_splits({})
    with pytest.raises(FedlibError, match="Row 0 is given twice"):
        data.with_splits({3: [np.arange(10)] * 6})
    tests = FederatedDataset.build(
        X, Y, SPLITS[3], X[:6], Y[:6], test_parts=np.split(np.arange(6), 6)
    )
    with pytest.raises(FedlibError, match="hold test samples"):
        tests.with_splits(SPLITS)


def test_digests_tell_splits_apart():
    tasks = [
        Task(softmax(4, 3), data)
        for data in (
            dealt(SPLITS[3]),
            dealt(SPLITS[8]),
            dealt(SPLITS[3]).with_splits(SPLITS),
            dealt(SPLITS[3]).with_splits({n: SPLITS[11 if n == 8 else 8] for n in (3, 8)}),
        )
    ]
    assert len({task.digest() for task in tasks}) == 4
    assert tasks[2].of(8).digest() == tasks[1].digest()


# --- silos ---------------------------------------------------------------------------------------


def silos(rows):
    return TieredTask([mlp(2, 3, 3)] * 2, [X[:, :2], X[:, 2:]], Y, rows)


GRIDS = {seed: partition.grid(ROWS, [3, 3], seed) for seed in SEEDS}


def test_silos_of_a_seed_among_others_are_those_of_the_seed_alone():
    whole = silos(GRIDS)
    together = walk(TDCD(0.2, 3, 12), whole, SEEDS)
    for row, seed in zip(together, SEEDS, strict=True):
        alone = walk(TDCD(0.2, 3, 12), silos(GRIDS[seed]), (seed,))
        assert torch.allclose(row, alone[0], atol=1e-6)
    other = walk(TDCD(0.2, 3, 12), silos(GRIDS[3]), (8,))
    assert not torch.allclose(together[1], other[0], atol=1e-5), "the split matters"


def test_places_of_a_minibatch_lie_with_their_owners():
    task, ids = silos(GRIDS), torch.arange(24).view(3, 8)
    drawn = Drawn.of(task, SEEDS, ids)
    for j in (0, 1):
        places, held = drawn.places[j], drawn.weight[j] > 0
        for r, seed in enumerate(SEEDS):
            for k in range(3):
                mine = places[3 * r + k][held[3 * r + k]]  # places in the table of all runs
                rows = ids.flatten().numpy()[mine]
                assert set(rows) == set(GRIDS[seed][j][k].tolist()) & set(ids[r].tolist())


def test_what_silos_refuse():
    with pytest.raises(FedlibError, match="as many clients"):
        silos({3: GRIDS[3], 8: partition.grid(ROWS, [3, 2], 8)})
    with pytest.raises(FedlibError, match="exactly one client"):
        silos({3: GRIDS[3], 8: [[np.arange(60)] * 3] * 2})
    with pytest.raises(FedlibError, match="seed 4 has none. Seeds with one: 3, 8, 11"):
        walk(TDCD(0.2, 1, 12), silos(GRIDS), (4,))
    with pytest.raises(FedlibError, match="split of its own"):
        _ = silos(GRIDS).rows
    assert silos(GRIDS).digest() != silos({3: GRIDS[3]}).digest() != silos(GRIDS[3]).digest()
