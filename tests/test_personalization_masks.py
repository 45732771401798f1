"""Parts of a network: the masks, their training against smaller networks, and the weights."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.draws import upload
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.personalization.discrepancy import estimate, halves, squared_distances
from fedlib.papers.personalization.masks import (
    MASKS,
    PartialFedAvg,
    common_distances,
    mask,
    partial_estimate,
    units,
    widths,
    with_complexity,
)
from fedlib.papers.personalization.weights import water_fill
from fedlib.population.participation import Full

SIZES, SHARE = (8, 6, 10), (1.0, 0.5, 0.34)
N, B, K = len(SIZES), 3, 2
IN, WIDE, OUT = 4, (6, 5), 3


def task_of(*hidden):
    rng = np.random.default_rng(0)
    n = sum(SIZES)
    x, y = rng.normal(size=(n, IN)), rng.integers(0, OUT, n)
    parts = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    return Task(models.mlp(IN, *hidden, OUT), FederatedDataset.build(x, y, parts))


def masks_of(task, share=SHARE, kind="static", seeds=(0,), t=0):
    kept = [torch.from_numpy(one) for one in units(task.model, share, kind, seeds, t)]
    return mask(task.model, kept), kept


def test_units_by_hand():
    model = models.mlp(IN, *WIDE, OUT)
    assert widths(model) == [6, 5] and widths(models.softmax(IN, OUT)) == [IN]
    first, second = units(model, SHARE, "static", (0,), 7)
    assert first.sum(1).tolist() == [6, 3, 2] and second.sum(1).tolist() == [5, 2, 2]
    assert first[1].tolist() == [True] * 3 + [False] * 3
    rolled = units(model, SHARE, "rolling", (0,), 5)[0]
    assert rolled[1].nonzero()[0].tolist() == [0, 1, 5] and rolled[2].nonzero()[0].tolist() == [
        0,
        5,
    ]
    assert units(model, (0.01,), "static", (0,), 0)[0].sum() == 1, "at least one unit"


def test_a_rolling_window_comes_to_every_unit_equally_often():
    model = models.mlp(IN, *WIDE, OUT)
    times = sum(units(model, SHARE, "rolling", (0,), t)[0].astype(int) for t in range(3, 9))
    assert (times == [[6], [3], [2]]).all()


def test_random_units_differ_by_seed_round_client_and_layer():
    model = models.mlp(4, 40, 40, 3)
    found = [
        row.tobytes() for t in (0, 1) for one in units(model, (0.5,) * 3, "random", (0, 1), t)
        for row in one
    ]  # fmt: skip
    assert len(set(found)) == len(found) == 2 * 2 * 6


def small(theta, kept):
    """Return weights and biases of the smaller network, as nested tensors that can be trained."""
    task = task_of(*WIDE)
    views = task.model.views(theta[None])
    sides = [torch.ones(IN, dtype=torch.bool), *kept, torch.ones(OUT, dtype=torch.bool)]
    out = []
    for layer, name in enumerate(task.model.dense):
        weight, bias = views[f"{name}.weight"][0], views[f"{name}.bias"][0]
        out += [weight[sides[layer + 1]][:, sides[layer]], bias[sides[layer + 1]]]
    return out


def placed(theta, kept, parts):
    """Return theta with a smaller network written into its place, and where that is."""
    task = task_of(*WIDE)
    theta, there = theta.clone(), torch.zeros_like(theta)
    sides = [torch.ones(IN, dtype=torch.bool), *kept, torch.ones(OUT, dtype=torch.bool)]
    for held, values in ((theta, parts), (there, [torch.ones_like(p) for p in parts])):
        views = task.model.views(held[None])
        for layer, name in enumerate(task.model.dense):
            rows, columns = (side.nonzero()[:, 0] for side in (sides[layer + 1], sides[layer]))
            views[f"{name}.weight"][0][rows[:, None], columns] = values[2 * layer]
            views[f"{name}.bias"][0][rows] = values[2 * layer + 1]
    return theta, there


def forward(parts, x):
    for layer in range(0, len(parts), 2):
        x = (torch.relu(x) if layer else x) @ parts[layer].T + parts[layer + 1]
    return x


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_cuts_out_a_smaller_network(kind):
    task = task_of(*WIDE)
    theta = task.init([3])[0]
    m, kept = masks_of(task, kind=kind, t=2)
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(N, 7, IN)))
    whole = task.model.apply(theta * m, x)
    for n in range(N):
        own = [one[n] for one in kept]
        assert_allclose(whole[n], forward(small(theta, own), x[n]), rtol=1e-12, atol=1e-15)
        assert torch.equal(placed(theta, own, small(theta, own))[1] > 0, m[n])


def loop(task, seed, kind, rounds, lr):
    """Partial training: each client trains a smaller network of its own; who has it, averages."""
    w, used = task.init([seed])[0], np.zeros((1, N), dtype=np.int64)
    for t in range(rounds):
        kept = masks_of(task, kind=kind, seeds=(seed,), t=t)[1]
        total, many = torch.zeros_like(w), torch.zeros_like(w)
        for n in range(N):
            own = [one[n] for one in kept]
            parts = small(w, own)
            batches, moved = task.data.next_batches([seed], torch.tensor([[n]]), used, K, B)
            for batch in batches:
                parts = [part.detach().requires_grad_() for part in parts]
                x, y = task.data.x[batch.rows[0]], task.data.y[batch.rows[0]]
                loss = torch.nn.functional.cross_entropy(forward(parts, x), y)
                slopes = torch.autograd.grad(loss, parts)
                parts = [p.detach() - lr * g for p, g in zip(parts, slopes, strict=True)]
            after, there = placed(torch.zeros_like(w), own, parts)
            total, many = total + after * there, many + there
            used = used.copy()
            used[0, n] = moved[0, n]
        w = torch.where(many > 0, total / many.clamp(min=1), w)
    return w


@pytest.mark.parametrize("kind", MASKS)
def test_partial_training_is_the_loop_over_smaller_networks(kind):
    task, algorithm = task_of(*WIDE), PartialFedAvg((0.3, 0.2), K, B, SHARE, kind)
    state = simulate(algorithm, task, 4, (1, 5), progress=False).state
    for r, seed in enumerate((1, 5)):
        expected = loop(task, seed, kind, 4, (0.3, 0.2)[r])
        assert_allclose(state.x[r], expected, rtol=1e-12, atol=1e-14)
        assert (expected - task.init([seed])[0]).norm() > 0.05


@pytest.mark.parametrize("kind", MASKS)
def test_without_hidden_layers_a_part_never_sees_its_other_inputs(kind):
    """Softmax regression on the columns that a client keeps, and on nothing else."""
    task, lr = task_of(), 0.3
    state = simulate(PartialFedAvg(lr, K, B, SHARE, kind), task, 4, (5,), progress=False).state
    w, used = task.init([5])[0], np.zeros((1, N), dtype=np.int64)
    for t in range(4):
        (kept,) = units(task.model, SHARE, kind, (5,), t)
        W, total, biases = w[: OUT * IN].view(OUT, IN), torch.zeros(OUT, IN).double(), []
        after = used.copy()
        for n, own in enumerate(kept):
            part, bias = W[:, own].clone(), w[OUT * IN :].clone()
            batches, moved = task.data.next_batches([5], torch.tensor([[n]]), used, K, B)
            after[0, n] = moved[0, n]
            for batch in batches:
                x, y = task.data.x[batch.rows[0]], task.data.y[batch.rows[0]]
                error = torch.softmax(x[:, own] @ part.T + bias, 1)
                error = (error - torch.nn.functional.one_hot(y, OUT)) / B
                part, bias = part - lr * error.T @ x[:, own], bias - lr * error.sum(0)
            total[:, own] += part
            biases.append(bias)
        many, used = torch.from_numpy(kept.sum(0)), after
        W = torch.where(many > 0, total / many.clamp(min=1), W)
        w = torch.cat([W.flatten(), torch.stack(biases).mean(0)])
    assert_allclose(state.x[0], w, rtol=1e-12, atol=1e-14)


def test_what_nobody_trains_stays():
    task = task_of(*WIDE)
    m = masks_of(task, (0.5,) * N)[0].any(0)
    state = simulate(PartialFedAvg(0.3, K, B, (0.5,) * N, "static"), task, 3, progress=False).state
    moved = state.x[0] != task.init([0])[0]
    assert not moved[~m].any() and moved[m].float().mean() > 0.8 and (~m).any()


def test_whole_shares_are_fedavg():
    for task in (task_of(*WIDE), task_of()):
        found = simulate(PartialFedAvg(0.3, K, B, (1.0,) * N), task, 3, (2,), progress=False).state
        plain = simulate(FedAvg(Full(N), 0.3, K, B), task, 3, (2,), progress=False).state
        assert_allclose(found.x, plain.x, rtol=1e-12)
        assert PartialFedAvg(0.3, K, B, np.ones(N)).personal(found, task).shape == (1, N, task.size)


def test_personal_parts_are_those_of_the_next_round():
    task, algorithm = task_of(*WIDE), PartialFedAvg(0.3, K, B, SHARE, "random")
    state = dataclasses.replace(algorithm.init(task, (3, 4)), t=6)
    m = masks_of(task, kind="random", seeds=(3, 4), t=6)[0].view(2, N, -1)
    assert torch.equal(algorithm.personal(state, task), state.x[:, None] * m)
    assert algorithm.spent(6)["models"] == pytest.approx(12 * np.mean(SHARE))
    assert algorithm.spent(6)["gradients"] == pytest.approx(6 * K * (1 + 0.5 + 0.34) / 3)


# ---- distances and weights


def test_gradients_of_parts_are_compared_on_what_both_have():
    task = task_of(*WIDE)
    w, drawn = task.init([0, 1]), upload([halves(task.data, (0, 1))], "cpu")[0]
    m = masks_of(task, seeds=(0, 1))[0].view(2, N, -1)
    found = partial_estimate(task, w, m, drawn)
    z = common_distances(found.full, m)
    for r in range(2):
        g = [task.client_gradients(w[r] * m[r, n], [n])[0] * m[r, n] for n in range(N)]
        assert_allclose(found.full[r], torch.stack(g), rtol=1e-12, atol=1e-15)
        for i in range(N):
            for j in range(N):
                both = m[r, i] & m[r, j]
                direct = (g[i] - g[j])[both].square().sum()
                assert_allclose(z[r, i, j], direct, rtol=1e-10, atol=1e-15)
    assert (z.diagonal(dim1=1, dim2=2) == 0).all()
    assert_allclose(z, z.mT, rtol=1e-12)


def test_equal_data_under_different_masks_look_alike_where_the_model_is_linear_in_them():
    """Gradients at zero depend on the samples alone, so all that differs is the masks."""
    rng = np.random.default_rng(2)
    x, y = np.tile(rng.normal(size=(9, IN)), (N, 1)), np.tile(rng.integers(0, OUT, 9), N)
    data = FederatedDataset.build(x, y, np.split(np.arange(9 * N), N))
    task = Task(models.mlp(IN, OUT), data)
    m = masks_of(task)[0].view(1, N, -1)
    drawn = upload([halves(data, (0,))], "cpu")[0]
    g = partial_estimate(task, torch.zeros(1, task.size).double(), m, drawn).full
    assert common_distances(g, m).abs().max() < 1e-15
    assert squared_distances(g)[0, 0, 1] > 1e-3


def test_16_whole_masks_and_equal_complexity_change_nothing():
    task = task_of(*WIDE)
    w, drawn = task.init([0]), upload([halves(task.data, (0,))], "cpu")[0]
    m = masks_of(task, (1.0,) * N)[0].view(1, N, -1)
    plain = estimate(task, w, drawn)
    z = common_distances(partial_estimate(task, w, m, drawn).full, m)
    assert_allclose(z, plain.zeta(), rtol=1e-10, atol=1e-15)
    n = torch.full((N,), 8.0).double()
    supports = set()
    for lam in (0.1, 5.0, 10.0, 100.0):
        expected = water_fill(plain.zeta(), n, lam)
        supports.add(int((expected > 0).sum()))
        assert_allclose(water_fill(with_complexity(z, n, m, 0.3), n, lam), expected, atol=1e-10)
    assert {N, N**2} <= supports and len(supports) > 2, "alone, all with all, and between"


def test_complexity_by_hand():
    z = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]).double()
    m = torch.tensor([[[True, True, True, True], [True, False, False, False]]])
    n = torch.tensor([4.0, 25.0])
    found = with_complexity(z, n, m, 9.0)
    assert_allclose(found[0], [[3, 1.6], [4, 0.6]])
    A = water_fill(found, n, 0.1)
    assert A[0, 0, 0] == 0, "the own weight may vanish"
    assert A[0, 0, 1] == pytest.approx(1)


def test_random_masks_read_a_stream_of_their_own():
    task = task_of(*WIDE)
    expected = stream(7, "mask", 3, 1, 0).permutation(6)[:3]
    found = units(task.model, SHARE, "random", (7,), 3)[0][1]
    assert sorted(expected) == found.nonzero()[0].tolist()


ONES = torch.ones(1, 3, 3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: PartialFedAvg(0.1, share=(0.5, 0.0)), "Each share is above 0"),
        (lambda: units(task_of().model, (0.5,), "roling", (0,), 0), "Did you mean 'rolling'"),
        (lambda: units(task_of().model, (1.5,), "static", (0,), 0), "Each share is above 0"),
        (lambda: units(task_of().model, (), "static", (0,), 0), "Each share is above 0"),
        (
            lambda: mask(task_of(6).model, [torch.ones(2, 5) > 0]),
            r"layers of \[5\] units; the model has \[6\]",
        ),
        (lambda: mask(task_of(6).model, []), r"layers of \[\] units"),
        (lambda: common_distances(ONES, torch.ones(1, 3, 5)), r"m is \[1, 3, 5\]"),
        (lambda: partial_estimate(task_of(), ONES[0, :1], ONES > 0, ()), r"Expected masks \[1, 3,"),
        (lambda: with_complexity(ONES, torch.ones(2), ONES, 1.0), r"n \[2\]"),
        (lambda: with_complexity(ONES, torch.zeros(3), ONES, 1.0), "has a sample or more"),
        (lambda: with_complexity(ONES, torch.ones(3), ONES, -1.0), "scale is a finite number"),
        (lambda: PartialFedAvg(0.1, share=(0.5,), kind="roling"), "Did you mean 'rolling'"),
        (lambda: PartialFedAvg(0.1, share=(0.5,)).init(task_of(4), (0,)), "1 shares for 3 clients"),
        (lambda: widths(models.small_cnn((2, 8, 9), 3)), "out of dense layers"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call, match):
    with pytest.raises(FedlibError, match=match):
        call()
