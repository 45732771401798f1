"""Which average is meant: of models by the clients' sizes, of losses by samples or by clients."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedlib.engine.data import FederatedDataset
from fedlib.engine.local import local_sgd
from fedlib.engine.models import location, softmax
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.population import participation as pt

SIZES, D, K, TESTS = [3, 8, 5, 14], 4, 3, [2, 6, 1, 3]
N = len(SIZES)


def unequal(test_parts=True, spare=2):
    """Clients of different sizes, and ``spare`` samples that nobody holds."""
    rng = np.random.default_rng(0)
    M, T = sum(SIZES) + spare, sum(TESTS)
    x, y = rng.standard_normal((M, D)), rng.integers(0, K, M)
    parts = np.split(rng.permutation(M)[: sum(SIZES)], np.cumsum(SIZES)[:-1])
    tests = np.split(rng.permutation(T), np.cumsum(TESTS)[:-1]) if test_parts else None
    data = FederatedDataset.build(
        x, y, parts, rng.standard_normal((T, D)), rng.integers(0, K, T), test_parts=tests
    )
    return Task(softmax(D, K), data, l2=0.1)


def by_hand(theta, x, y):
    """Loss without the l2 term and accuracy of one linear model on some samples."""
    out = x @ theta[: D * K].view(K, D).T + theta[D * K :]
    return cross_entropy(out, y), (out.argmax(1) == y).double().mean()


@pytest.mark.parametrize("chunk", [4_000_000, 30])
def test_the_average_over_clients_and_over_samples(chunk):
    task = unequal()
    task.chunk, data = chunk, task.data
    theta = torch.from_numpy(np.random.default_rng(1).standard_normal((2, task.size)))
    sides = {
        "train": (data.x, data.y, data.parts),
        "test": (data.test_x, data.test_y, data.test_parts),
    }
    for split, (x, y, parts) in sides.items():
        pooled, clients = task.evaluate(theta, split), task.evaluate(theta, split, None, "clients")
        for r, row in enumerate(theta):
            penalty = 0.05 * (row**2).sum()
            loss, right = by_hand(row, x, y)
            assert abs(pooled["loss"][r] - loss - penalty) < 1e-12
            assert abs(pooled["accuracy"][r] - right) < 1e-12
            each = [by_hand(row, x[part], y[part]) for part in parts]
            assert abs(clients["loss"][r] - sum(e[0] for e in each) / N - penalty) < 1e-12
            assert abs(clients["accuracy"][r] - sum(e[1] for e in each) / N) < 1e-12
        assert (pooled["loss"] - clients["loss"]).abs().min() > 1e-3


def test_averages_that_are_not_there_are_refused():
    task = unequal(test_parts=False)
    theta = task.init((0,))
    with pytest.raises(FedlibError, match="No client holds test samples"):
        task.evaluate(theta, "test", average="clients")
    with pytest.raises(FedlibError, match="Unknown average 'client'. Did you mean 'clients'"):
        task.evaluate(theta, average="client")
    with pytest.raises(FedlibError, match="test_parts are for 1 clients, parts for 2"):
        FederatedDataset.build(np.eye(4), None, [[0], [1]], np.eye(2), None, test_parts=[[0]])
    with pytest.raises(FedlibError, match=r"Row numbers must lie in 0\.\.1; got 2"):
        FederatedDataset.build(np.eye(4), None, [[0], [1]], np.eye(2), None, test_parts=[[0], [2]])


RECORDED = np.array([[0.5, 0.25, 0, 0.25], [0, 0.5, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])


@pytest.mark.parametrize(
    "process", [pt.Independent(N, 2), pt.Markov(N, 0.4, 0.4), pt.Trace(RECORDED)]
)
def test_weights_by_size(process):
    task, seeds = unequal(), (0, 1, 2)
    algorithm = FedAvg(process, 0.3, local_steps=2, weights="sizes")
    state = algorithm.init(task, seeds)
    for t in range(3):
        after, _ = algorithm.round(state, task)
        for r, seed in enumerate(seeds):
            clients, q = process.draw(seed, t)
            share = [w * SIZES[n] for n, w in zip(clients, q, strict=True)]
            expected = torch.zeros(task.size, dtype=torch.float64)
            for n, part in zip(clients, share, strict=True):
                batch = task.data.full_batch([n])
                y = local_sgd(task, state.x[r : r + 1], [batch] * 2, 0.3)[0]
                expected += part / sum(share) * y
            assert (after.x[r] - expected).abs().max() < 1e-12
        state = after


def test_unknown_weights_are_refused():
    with pytest.raises(FedlibError, match="Unknown kind of weights 'size'. Did you mean 'sizes'"):
        FedAvg(pt.Full(N), 0.1, weights="size")


def test_a_limited_evaluation_keeps_each_sample_s_own_weight():
    """Rows 0 and 3 are looked at: half squares 0 and 18, weights 1/3 and 1, mean 13.5."""
    x = np.array([[0.0], [2.0], [4.0], [6.0]])
    data = FederatedDataset.build(x, None, [np.array([0, 1, 2]), np.array([3])])
    task = Task(location(1), data, "half_square")
    found = task.evaluate(torch.zeros(1, 1).double(), limit=2, average="clients")
    assert found["loss"].tolist() == [13.5]


@pytest.mark.parametrize("limit", [2, 5, 100])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_limited_evaluation_is_spread_over_the_split(split, limit):
    task = unequal()
    theta = task.init((0,))
    x, y = (task.data.x, task.data.y) if split == "train" else (task.data.test_x, task.data.test_y)
    n = min(limit, len(x))
    rows = [k * (len(x) - 1) // (n - 1) for k in range(n)]
    loss, right = by_hand(theta[0], x[rows], y[rows])
    found = task.evaluate(theta, split, limit)
    assert found["loss"].item() == pytest.approx((loss + 0.05 * (theta**2).sum()).item())
    assert found["accuracy"].item() == pytest.approx(right.item())


def test_a_gradient_has_all_of_the_l2_term():
    task = unequal()
    theta = task.init((0,))
    leaf = theta.clone().requires_grad_()
    part = task.data.parts[1]
    (by_hand(leaf[0], task.data.x[part], task.data.y[part])[0] + 0.05 * (leaf**2).sum()).backward()
    assert (task.client_gradients(theta)[1] - leaf.grad[0]).abs().max() < 1e-12


def test_weights_by_size_are_each_seeds_own():
    task, halves = unequal(test_parts=False), np.split(np.arange(13), [7, 9, 12])
    task = Task(task.model, task.data.with_splits({3: task.data.parts, 4: halves}))
    algorithm = FedAvg(pt.Full(N), 0.3, weights="sizes")
    together, _ = algorithm.round(algorithm.init(task, (3, 4)), task)
    for r, seed in enumerate((3, 4)):
        mine = Task(task.model, task.data.of(seed))
        alone, _ = algorithm.round(algorithm.init(mine, (seed,)), mine)
        assert torch.equal(together.x[r], alone.x[0])
