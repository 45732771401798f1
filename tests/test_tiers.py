"""Tiered decentralized coordinate descent: the specification's exact identities, in float64."""

import numpy as np
import pytest
import torch

from fedlib.datasets import partition
from fedlib.engine import draws
from fedlib.engine.draws import upload
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.models import Model, linear, mlp, normed_cnn
from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.lab import gpu
from fedlib.lab.evidence import catalogue, records
from fedlib.papers.tiers import LabelPrivateTDCD, ledger, theory
from fedlib.papers.tiers.algorithm import TDCD, Cohort, Drawn, draw_ids
from fedlib.papers.tiers.task import TieredTask

M, D = 24, 6
RNG = np.random.default_rng(0)
X, TARGET = RNG.standard_normal((M, D)), RNG.standard_normal(M)
LABELS = RNG.integers(0, 3, M)


def least_squares(blocks, rows, x=X):
    """Linear silos with one shared target."""
    models = [linear(len(block)) for block in blocks]
    return TieredTask(models, [x[:, b] for b in blocks], TARGET, rows, loss_name="half_square")


def network(clients, silos=2, seed=0, aligned=False):
    """Small networks with three-way labels; all silos share one architecture."""
    model = mlp(D // silos, 4, 3)
    blocks = partition.contiguous_features(D, silos)
    rows = partition.grid(M, [clients] * silos, seed, aligned)
    return TieredTask([model] * silos, [X[:, b] for b in blocks], LABELS, rows)


def pictures(norm, clients=1, batch_norm=None):
    """Two silos of images with networks that normalise, by the batch or by the sample."""
    x = [RNG.standard_normal((M, 1, 4, 3)) for _ in range(2)]
    rows = partition.grid(M, [clients] * 2)
    model = normed_cnn((1, 4, 3), 3, norm)
    allowed = norm == "batch" if batch_norm is None else batch_norm
    return TieredTask([model] * 2, x, LABELS, rows, batch_norm=allowed)


def whole(count=1):
    return [[np.arange(M)] for _ in range(count)]


def run(algorithm, task, rounds=3, seeds=(0, 1), x=None):
    state = algorithm.init(task, seeds, x)
    path = [state.x]
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        path.append(state.x)
    return torch.stack(path)


def sgd(task, x, ids, lr, steps=1, weight=None):
    """Centralised SGD on the sum model, by autograd on the whole loss."""
    for _ in range(steps):
        x = x.detach().requires_grad_()
        out = task.predict(x, [f[ids] for f in task.x])[0]
        if task.loss_name == "half_square":
            each = 0.5 * (out.squeeze(-1) - task.y[ids]).square()
        else:
            each = torch.nn.functional.cross_entropy(out, task.y[ids], reduction="none")
        loss = each.mean() if weight is None else (each * weight).sum()
        x = x - lr * torch.autograd.grad(loss, x)[0]
    return x.detach()


@pytest.mark.parametrize("batch", [None, 8])
def test_01_one_step_one_client_is_centralised_sgd(batch):
    task = network(1)
    path = run(TDCD(0.3, 1, batch), task, seeds=(5,))
    x = path[0]
    for t in range(3):
        ids = draw_ids((5,), t, M, batch)[0]
        x = sgd(task, x, ids, 0.3)
        assert torch.allclose(path[t + 1], x, atol=1e-12)


def test_02_many_clients_with_equal_parts_are_centralised_sgd_too():
    task = network(4, aligned=True)
    path = run(TDCD(0.3, 1), task, seeds=(5,))
    x = path[0]
    for t in range(3):
        x = sgd(task, x, torch.arange(M), 0.3)
        assert torch.allclose(path[t + 1], x, atol=1e-12)


def test_02_unequal_parts_are_weighted_sgd():
    task = network(5, aligned=True)  # parts of 5, 5, 5, 5 and 4 rows
    path = run(TDCD(0.3, 1), task, 1, seeds=(5,))
    weight = torch.empty(M, dtype=torch.float64)
    for part in task.rows[0]:
        weight[part] = 1 / (5 * len(part))
    weighted = sgd(task, path[0], torch.arange(M), 0.3, weight=weight)
    plain = sgd(task, path[0], torch.arange(M), 0.3)
    assert torch.allclose(path[1], weighted, atol=1e-12)
    assert (path[1] - plain).abs().max() > 1e-6


def test_03_one_silo_one_client_repeats_its_minibatch():
    task = network(1, silos=1)
    path = run(TDCD(0.3, 4, 8), task, seeds=(5,))
    x = path[0]
    for t in range(3):
        x = sgd(task, x, draw_ids((5,), t, M, 8)[0], 0.3, steps=4)
        assert torch.allclose(path[t + 1], x, atol=1e-12)


def test_04_one_silo_is_local_sgd_with_a_frozen_batch():
    task = network(3, silos=1)
    path = run(TDCD(0.3, 4), task, 2, seeds=(5,))
    x = path[0]
    for t in range(2):
        x = torch.stack([sgd(task, x, torch.from_numpy(p), 0.3, 4) for p in task.rows[0]]).mean(0)
        assert torch.allclose(path[t + 1], x, atol=1e-12)
    (drawn,) = upload([Drawn.of(task, (1,), torch.arange(M).view(1, -1))], "cpu")
    silo = Cohort.of(task, 0, drawn, path[0])
    assert (silo.union(silo.embed(task)) - task.predict(path[0], task.x)[0]).abs().max() < 1e-12


def test_05_linear_silos_at_q_1_do_not_see_the_vertical_partition():
    results = []
    for silos in (1, 2, 3, 6):
        for split in (partition.contiguous_features, partition.random_features):
            blocks = split(D, silos, 3)
            task = least_squares(blocks, whole(silos))
            end = run(TDCD(0.1, 1, 12), task, 4, seeds=(7,))[-1][0]
            back = torch.empty(D, dtype=torch.float64)
            back[np.concatenate(blocks)] = end
            results.append(back)
    for other in results[1:]:
        assert torch.allclose(results[0], other, atol=1e-12)


def test_06_order_of_silos_and_clients_does_not_matter():
    blocks = partition.contiguous_features(D, 3)
    rows = partition.grid(M, [2, 3, 4], 1)
    task = least_squares(blocks, rows)
    order = [2, 0, 1]
    shuffled = least_squares([blocks[j] for j in order], [rows[j][::-1] for j in order])
    start = torch.randn(1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = run(TDCD(0.1, 3, 10), task, seeds=(2,), x=start)[-1]
    moved = torch.cat([start[:, task.columns[j]] for j in order], 1)
    b = run(TDCD(0.1, 3, 10), shuffled, seeds=(2,), x=moved)[-1]
    for place, j in enumerate(order):
        assert torch.allclose(a[:, task.columns[j]], b[:, shuffled.columns[place]], atol=1e-12)


def test_07_a_silo_is_isolated_within_a_round():
    task = network(3)
    start = task.init((4,))
    together = run(TDCD(0.3, 5, 12), task, 1, seeds=(4,), x=start)[1]
    ids = draw_ids((4,), 0, M, 12)[0]
    with torch.no_grad():
        foreign = task.models[1].apply(start[:, task.columns[1]], task.x[1][ids].unsqueeze(0))[0]
    copies = []
    for part in task.rows[0]:
        mine = [i for i, p in enumerate(ids.tolist()) if p in set(part.tolist())]
        theta = start[:, task.columns[0]]
        for _ in range(5):
            theta = theta.detach().requires_grad_()
            own = task.models[0].apply(theta, task.x[0][ids[mine]].unsqueeze(0))[0]
            loss = torch.nn.functional.cross_entropy(own + foreign[mine], task.y[ids[mine]])
            theta = theta - 0.3 * torch.autograd.grad(loss, theta)[0]
        copies.append(theta.detach())
    alone = torch.stack(copies).mean(0)
    assert torch.allclose(together[:, task.columns[0]], alone, atol=1e-12)


def test_08_virtual_average_moves_by_the_mean_gradient():
    task = least_squares(partition.contiguous_features(D, 2), partition.grid(M, [3, 3], 2))
    start = torch.zeros(1, D, dtype=torch.float64)
    shorter, longer = (run(TDCD(0.1, q), task, 1, seeds=(0,), x=start)[1] for q in (2, 3))
    moved = torch.zeros_like(start)
    for j in range(2):
        x, c = task.x[j], task.columns[j]
        for part in task.rows[j]:
            theta = torch.zeros(3, dtype=torch.float64)
            for _ in range(2):
                theta = theta - 0.1 * x[part].T @ (x[part] @ theta - task.y[part]) / len(part)
            g = x[part].T @ (x[part] @ theta - task.y[part]) / len(part)
            moved[0, c] += g / len(task.rows[j])
    assert torch.allclose(longer, shorter - 0.1 * moved, atol=1e-12)


def test_09_clients_with_identical_parts_equal_one_client():
    x, y = np.tile(X[:8], (3, 1)), np.tile(TARGET[:8], 3)
    blocks = partition.contiguous_features(D, 2)
    three = [np.arange(8) + 8 * k for k in range(3)]
    models = [linear(3), linear(3)]
    many = TieredTask(models, [x[:, b] for b in blocks], y, [three] * 2, loss_name="half_square")
    one = TieredTask(
        models, [x[:8, b] for b in blocks], y[:8], [[np.arange(8)]] * 2, loss_name="half_square"
    )
    a, b = (run(TDCD(0.1, 4), task, seeds=(0,)) for task in (many, one))
    assert torch.allclose(a, b, atol=1e-12)


def test_10_a_silo_of_zeros_changes_nothing():
    blocks = partition.contiguous_features(D, 2)
    task = least_squares(blocks, partition.grid(M, [2, 2], 0))
    wide = np.concatenate([X, np.zeros((M, 2))], 1)
    more = least_squares(
        [*blocks, np.array([D, D + 1])], [*task.rows, partition.grid(M, [3], 5)[0]], wide
    )
    a, b = (run(TDCD(0.1, 4, 12), t, seeds=(1,)) for t in (task, more))
    assert torch.equal(a, b[..., :D]) and (b[..., D:] == 0).all()


def test_11_closed_form_of_a_round():
    blocks = partition.contiguous_features(D, 2)
    task = least_squares(blocks, whole(2))
    start = torch.randn(1, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Q, lr = 7, 0.2
    end = run(TDCD(lr, Q), task, 1, seeds=(0,), x=start)[1]
    residual = torch.from_numpy(X) @ start[0] - task.y
    for j in range(2):
        x, c = task.x[j], task.columns[j]
        H, eye = x.T @ x / M, torch.eye(3, dtype=torch.float64)
        step = torch.linalg.pinv(H) @ (eye - torch.linalg.matrix_power(eye - lr * H, Q))
        assert torch.allclose(end[0, c], start[0, c] - step @ x.T @ residual / M, atol=1e-12)


@pytest.mark.parametrize("silos", [1, 2, 3])
def test_12_identical_silos_multiply_the_residual_by_one_minus_n(silos):
    x = np.tile(X[:, :3], (1, silos))
    realisable = X[:, :3] @ np.array([1.0, -2.0, 0.5])
    blocks = partition.contiguous_features(3 * silos, silos)
    models = [linear(3)] * silos
    task = TieredTask(
        models, [x[:, b] for b in blocks], realisable, whole(silos), loss_name="half_square"
    )
    top = float(np.linalg.eigvalsh(X[:, :3].T @ X[:, :3] / M).max())
    path = run(TDCD(1 / top, 2000), task, 4, seeds=(0,))
    residuals = [task.predict(p, task.x)[0, :, 0] - task.y for p in path]
    for before, after in zip(residuals[:-1], residuals[1:], strict=True):
        assert torch.allclose(after, (1 - silos) * before, atol=1e-9 * 2**silos)


def test_16_label_private_exact_equals_and_stale_only_at_q_1():
    task = network(3)
    reference = run(TDCD(0.3, 4, 12), task)
    exact = run(LabelPrivateTDCD(0.3, 4, 12), task)
    stale = run(LabelPrivateTDCD(0.3, 4, 12, fresh=False), task)
    assert torch.allclose(reference, exact, atol=1e-12)
    assert (reference - stale).abs().max() > 1e-4
    a, b = (run(TDCD(0.3, 1, 12), task), run(LabelPrivateTDCD(0.3, 1, 12, fresh=False), task))
    assert torch.allclose(a, b, atol=1e-12)


def test_17_misaligned_clients_still_equal_centralised_sgd():
    task = network(4, seed=3, aligned=False)
    assert any((a != b).any() for a, b in zip(*task.rows, strict=True))
    path = run(TDCD(0.3, 1), task, seeds=(5,))
    x = path[0]
    for t in range(3):
        x = sgd(task, x, torch.arange(M), 0.3)
        assert torch.allclose(path[t + 1], x, atol=1e-12)


def test_18_zero_gradient_is_a_fixed_point():
    blocks = partition.contiguous_features(D, 2)
    solution = np.linalg.lstsq(X, TARGET, rcond=None)[0]
    task = TieredTask(
        [linear(3), linear(3)], [X[:, b] for b in blocks], X @ solution, whole(2),
        loss_name="half_square",
    )  # fmt: skip
    start = torch.from_numpy(solution).view(1, -1)
    path = run(TDCD(0.1, 5, 10), task, seeds=(0,), x=start)
    assert (path - start).abs().max() < 1e-13


def test_an_empty_part_has_no_gradient_and_still_counts():
    task = least_squares([np.arange(D)], [[np.arange(2), np.arange(2, M)]])
    seed = next(
        s for s in range(99) if set(draw_ids((s,), 0, M, 3)[0].tolist()) <= set(range(2, M))
    )
    path = run(TDCD(0.2, 1, 3), task, 1, seeds=(seed,))
    full = sgd(task, path[0], draw_ids((seed,), 0, M, 3)[0], 0.2)
    assert torch.allclose(path[1], 0.5 * (path[0] + full), atol=1e-13)


def test_runs_and_silos_side_by_side_equal_each_alone():
    shared = network(3, silos=3)
    own = TieredTask(
        [mlp(2, 4, 3) for _ in range(3)], shared.x, LABELS, shared.rows
    )  # the same networks as different objects: computed one after the other
    a, b = (run(TDCD(0.3, 4, 12), task, seeds=(1, 2, 3)) for task in (shared, own))
    assert torch.allclose(a, b, atol=1e-12)
    for r, seed in enumerate((1, 2, 3)):
        alone = run(TDCD(0.3, 4, 12), shared, seeds=(seed,))
        assert torch.allclose(a[:, r], alone[:, 0], atol=1e-12)


def test_silos_may_have_different_numbers_of_clients_and_networks():
    blocks = partition.contiguous_features(D, 2)
    models = [mlp(3, 5, 3), Model(torch.nn.Linear(3, 3))]
    rows = partition.grid(M, [2, 5], 0)
    task = TieredTask(models, [X[:, b] for b in blocks], LABELS, rows)
    twice = Evaluation(every=20)
    history = simulate(TDCD(0.5, 3, 12), task, 40, (0, 1), evaluation=twice, progress=False)
    loss = history.frame.query("metric == 'loss'").groupby("round")["value"].mean()
    assert loss.loc[40] < loss.loc[0] and history.frame["clock"].max() == 120


def test_targets_may_have_several_numbers():
    """Half squares of three outputs; runs side by side are evaluated like each alone."""
    target = RNG.standard_normal((M, 3))
    models, x = [mlp(3, 4, 3), mlp(3, 3)], [X[:, :3], X[:, 3:]]
    task = TieredTask(models, x, target, partition.grid(M, [2, 3]), x, target, "half_square")
    theta = simulate(TDCD(0.1, 2, 8), task, 3, (0, 1), progress=False).state.x
    off = task.predict(theta, task.x) - torch.from_numpy(target)
    expected = 0.5 * off.square().sum(2).mean(1)
    for found in (
        task.loss(theta),
        task.evaluate(theta)["loss"],
        task.evaluate(theta, "test")["loss"],
    ):
        assert torch.allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("asked", [None, True, False])
def test_messages_add_up_to_the_cost_model(asked):
    task, Q, B, E = network(4, silos=3), 5, 10, 3
    algorithm = TDCD(0.1, Q, B) if asked is None else LabelPrivateTDCD(0.1, Q, B, asked)
    sent = ledger.messages(algorithm, task, algorithm.init(task, (0, 1)))
    assert {m.round for m in sent} == {0} and all(m.bytes == 8 * np.prod(m.shape) for m in sent)
    ids = [m for m in sent if m.content == "sample ids"]
    assert [m.shape for m in ids] == [(B,)] * 12  # line 4: every client of every silo
    numbers = sum(np.prod(m.shape) for m in sent) - 12 * B
    plain = sum(2 * 4 * m.size + 2 * B * E + 2 * B * E for m in task.models)
    private = {None: 0, True: Q, False: 1}[asked]
    assert numbers == plain + 2 * (2 * private * B * E)
    for j, model in enumerate(task.models):
        parts = theory.volume(silos=3, clients=4, size=model.size, batch_size=B, width=E)
        own = [m for m in sent if m.sender == f"hub {j}" or m.sender.endswith(f",{j}")]
        if asked is None:
            assert sum(np.prod(m.shape) for m in own) == sum(parts.values()) + 4 * B


def test_splits_of_features_and_images():
    for split in (partition.contiguous_features, partition.random_features):
        blocks = split(76, 16, 1)
        assert np.array_equal(np.sort(np.concatenate(blocks)), np.arange(76))
        assert sorted(len(b) for b in blocks) == [4] * 4 + [5] * 12
    images = np.arange(2 * 1 * 4 * 6).reshape(2, 1, 4, 6)
    left, right = partition.halves(images)
    assert np.array_equal(np.concatenate([left, right], -1), images)
    quarters = partition.tiles(images, 2, 2)
    assert len(quarters) == 4 and quarters[3][0, 0, 0, 0] == images[0, 0, 2, 3]
    with pytest.raises(FedlibError, match="equal tiles"):
        partition.tiles(images, 3, 2)
    assert partition.views(np.zeros((5, 12, 8, 8)))[11].shape == (5, 1, 8, 8)
    with pytest.raises(FedlibError, match="silos"):
        partition.contiguous_features(3, 4)


def test_grid_splits():
    rows = partition.grid(M, [3, 5], seed=1)
    for silo, count in zip(rows, (3, 5), strict=True):
        assert len(silo) == count and np.array_equal(np.sort(np.concatenate(silo)), np.arange(M))
    assert any(
        len(a) != len(b) or (a != b).any()
        for a, b in zip(*partition.grid(M, [3, 3], 1), strict=True)
    )
    mirror = partition.grid(M, [3, 3], 1, aligned=True)
    assert all(np.array_equal(a, b) for a, b in zip(*mirror, strict=True))
    with pytest.raises(FedlibError, match="Silo 1"):
        partition.grid(M, [3, 0])


def test_errors_say_what_is_wrong():
    blocks = partition.contiguous_features(D, 2)
    features, rows = [X[:, b] for b in blocks], whole(2)
    with pytest.raises(FedlibError, match="23 rows, the labels 24"):
        TieredTask([linear(3)] * 2, [features[0], features[1][:-1]], TARGET, rows)
    with pytest.raises(FedlibError, match=r"widths \[3, 2\] differ"):
        TieredTask([mlp(3, 3), mlp(3, 2)], features, LABELS, rows)
    with pytest.raises(FedlibError, match="exactly one client"):
        TieredTask([linear(3)] * 2, features, TARGET, [rows[0], [np.arange(20)]])
    with pytest.raises(FedlibError, match="a list for each silo"):
        TieredTask([linear(3)] * 2, features, TARGET, partition.iid(LABELS, 2))
    with pytest.raises(FedlibError, match="one of each"):
        TieredTask([linear(3)], features, TARGET, rows)
    with pytest.raises(FedlibError, match="local_steps is a whole number of at least 1; got 0"):
        TDCD(0.1, 0)
    task = TieredTask([linear(3)] * 2, features, TARGET, rows, loss_name="half_square")
    with pytest.raises(FedlibError, match="batch_size must be between 1 and 24"):
        TDCD(0.1, 1, 25).init(task, (0,))


def test_weights_are_of_the_models_type():
    from fedlib.papers.tiers.algorithm import Cohort

    algorithm, task = gpu.trials()["tiers: TDCD"](np.float32)
    state = algorithm.init(task, (0,))
    drawn = draws.draw_one(algorithm, state, task)
    assert Cohort.of(task, 0, drawn, state.x).batch.weight.dtype == torch.float32


def test_silos_that_share_a_model_begin_apart():
    task = network(2)
    assert task.models[0] is task.models[1]
    one, other = (task.init((0, 1))[:, block] for block in task.columns)
    assert not torch.equal(one, other) and not torch.equal(one[0], one[1])


@pytest.mark.parametrize("limit", [0, 2.5, "3"])
def test_a_limit_is_a_whole_number(limit):
    task = network(2)
    with pytest.raises(FedlibError, match=f"limit is a whole number of at least 1; got {limit!r}"):
        task.evaluate(task.init((0,)), "train", limit)


@pytest.mark.parametrize("limit", [None, 5, 100])
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_evaluation_reads_the_split_evenly(split, limit):
    rng, blocks = np.random.default_rng(3), [[0, 1, 2], [3, 4, 5]]
    x, y = rng.standard_normal((9, D)), rng.integers(0, 3, 9)
    task = TieredTask(
        [mlp(3, 4, 3)] * 2,
        [X[:, b] for b in blocks],
        LABELS,
        whole(2),
        [x[:, b] for b in blocks],
        y,
    )
    theta = task.init((4,))
    x, y = (X, LABELS) if split == "train" else (x, y)
    n = min(limit or len(y), len(y))
    rows = [k * (len(y) - 1) // (n - 1) for k in range(n)]
    out = sum(
        model.to_module(theta[:, columns])(torch.from_numpy(x[:, b])).detach()
        for model, columns, b in zip(task.models, task.columns, blocks, strict=True)
    )
    found = task.evaluate(theta, split, limit)
    right = out.argmax(1).numpy() == y
    expected = torch.nn.functional.cross_entropy(out[rows], torch.from_numpy(y)[rows])
    assert found["loss"].item() == pytest.approx(expected.item())
    assert found["accuracy"].item() == pytest.approx(right[rows].mean())


def test_a_minibatch_has_no_row_twice_and_is_drawn_anew():
    first, second = (draw_ids((0, 1), t, M, 20) for t in (3, 4))
    for ids in (*first, *second):
        assert len(set(ids.tolist())) == 20 and set(ids.tolist()) <= set(range(M))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ({"features": [X[:, :3] * np.nan, X[:, 3:]]}, "features of silo 0 are nan"),
        ({"features": [X[:, :3].astype(np.float32), X[:, 3:]]}, "Use one"),
        ({"rows": [[np.arange(M) + 0.0], [np.arange(M)]]}, "whole numbers; got .* float64"),
        ({"test_features": [X[:, :3]], "test_labels": LABELS}, "every test sample"),
        ({"test_features": [X[:3, :3], X[:3, 3:]], "test_labels": LABELS}, "every test sample"),
        ({"test_features": [X, X], "test_labels": LABELS}, r"test features of silo 0 are \[6\]"),
        ({"models": [torch.nn.Linear(3, 3)] * 2}, r"Wrap it: Model\(module\)"),
    ],
)
def test_silos_that_do_not_fit(held, told):
    given = dict(models=[mlp(3, 3)] * 2, features=[X[:, :3], X[:, 3:]], labels=LABELS)
    with pytest.raises(FedlibError, match=told):
        TieredTask(**{**given, "rows": whole(2), **held})


def test_a_test_split_that_is_not_there():
    with pytest.raises(FedlibError, match="no test split"):
        simulate(TDCD(0.1, 1), network(2), 1, evaluation=Evaluation(splits="test"), progress=False)
    with pytest.raises(FedlibError, match="^theta"):
        network(2).evaluate(torch.zeros(1, 3))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_norms_of_the_batch_and_of_the_sample_against_torch(norm):
    """Two local steps with the foreign embedding frozen; minibatch statistics on both sides."""
    task = pictures(norm)
    x, ids = task.init((3,)), draw_ids((3,), 0, M, 8)[0]
    after, _ = TDCD(0.3, 2, 8).round(TDCD(0.3, 2, 8).init(task, (3,), x), task)
    kinds = {"batch": torch.nn.BatchNorm2d, "group": lambda c, **_: torch.nn.GroupNorm(4, c)}
    modules = []
    for j in range(2):
        norms = [kinds[norm](c, track_running_stats=False) for c in (8, 16)]
        net = torch.nn.Sequential(
            *(torch.nn.Conv2d(1, 8, 3, padding=1), norms[0], torch.nn.ReLU()),
            *(torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 16, 3, padding=1), norms[1]),
            *(torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(32, 3)),
        ).double()
        torch.nn.utils.vector_to_parameters(x[0, task.columns[j]], net.parameters())
        modules.append(net)
    with torch.no_grad():
        frozen = [net(task.x[j][ids]) for j, net in enumerate(modules)]
    for j, net in enumerate(modules):
        for _ in range(2):
            out = net(task.x[j][ids]) + frozen[1 - j]
            grads = torch.autograd.grad(
                torch.nn.functional.cross_entropy(out, task.y[ids]), list(net.parameters())
            )
            with torch.no_grad():
                for parameter, grad in zip(net.parameters(), grads, strict=True):
                    parameter -= 0.3 * grad
        mine = torch.nn.utils.parameters_to_vector(net.parameters())
        assert torch.allclose(after.x[0, task.columns[j]], mine, atol=1e-12)


def test_norms_of_the_batch_are_refused_where_minibatches_are_cut():
    with pytest.raises(FedlibError, match="one sample alone"):
        pictures("batch", batch_norm=False)
    with pytest.raises(FedlibError, match="one client a silo"):
        pictures("batch", clients=2)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(FedlibError, match="without running statistics"):
        TieredTask([Model(net)], [X[:, :2]], LABELS, whole(), batch_norm=True)


SOONEST = {
    "fig3-soonest": ("rates-images", "accuracy", 0.8),
    "fig4-soonest": ("rates-sequences", "f1", 0.25),
    "fig5-soonest": ("rates-views", "top5", 0.75),
}


@pytest.mark.parametrize("name", SOONEST)
def test_the_soonest_rates_are_those_of_the_tuning_record(name):
    record, metric, target = SOONEST[name]
    frame = records.load("tiers", record, "quick").frame
    reached = frame[(frame["metric"] == metric) & (frame["split"] == "test")]
    reached = reached[reached["method"].str.endswith("few") & (reached["value"] >= target)]
    for run in catalogue.settings("tiers", name, "quick")["runs"]:
        rounds = {}
        for at, own in reached[reached["Q"] == run["Q"]].groupby("at"):
            first = own.groupby("seed")["round"].min()
            if len(first) == 3:  # all tuning seeds
                rounds[at] = first.mean()
        assert run["lr"] == pytest.approx(min(rounds, key=rounds.get), rel=1e-3)
