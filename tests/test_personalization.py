"""PERM: the schedule, the visits, the epoch's end, against a plain loop and closed forms."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.draws import upload
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import sweep
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.personalization import PERM, Mixing, ShuffledSGD, weights
from fedlib.papers.personalization.algorithm import ball, final_step, schedule
from fedlib.papers.personalization.discrepancy import Estimate, estimate, halves, squared_distances
from fedlib.population.participation import Full

N = 5


def task_of(sizes=(8, 8, 8, 8, 8), seed=0, model=None):
    """Softmax regression in float64."""
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    x, y = rng.normal(size=(n, 4)), rng.integers(0, 3, n)
    parts = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    data = FederatedDataset.build(torch.from_numpy(x), y, parts)
    return Task(model or models.mlp(4, 3), data)


def points(centres, samples=4, l2=0.0):
    """Every sample of client j lies at ``centres[j]``: f_j(v) = ½‖v − c_j‖²."""
    x = torch.as_tensor(np.repeat(centres, samples, 0))
    parts = np.split(np.arange(len(x)), len(centres))
    data = FederatedDataset.build(x, None, parts)
    return Task(models.location(x.shape[1]), data, "half_square", l2=l2)


def random_weights(rng, runs=1, clients=N):
    return torch.from_numpy(rng.dirichlet(np.ones(clients), (runs, clients)))


def run(algorithm, task, rounds, seeds=(0,), **start):
    state = algorithm.init(task, seeds, **start)
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
    return state


def test_07_an_epoch_takes_every_model_to_every_client_once():
    seen = np.zeros((2, 7, 7), dtype=int)
    for t in range(14, 21):
        hosts = schedule((0, 3), 7, t)
        for r, own in enumerate(hosts):
            assert sorted(own) == list(range(7)), "one model a host"
            seen[r, np.arange(7), own] += 1
    assert (seen == 1).all()


def test_the_order_differs_by_seed_and_epoch_and_not_within():
    first = schedule((0, 1), 20, 0)
    assert (first[0] != first[1]).any() and (schedule((0,), 20, 20)[0] != first[0]).any()
    later = schedule((0,), 20, 7)[0]
    assert (np.roll(first[0], -7) == later).all()


def loop(task, seed, A, lr, K, B, epochs, visits):
    """Algorithm 1, model by model, with autograd on a plain loss."""
    n = task.N
    v = [task.init([seed])[0] for _ in range(n)]
    cursor = np.zeros((1, n), dtype=np.int64)
    for r in range(epochs):
        sigma = stream(seed, "shuffling", r).permutation(n)
        for j in range(n):
            after = list(v)
            moved = cursor.copy()
            for i in range(n):
                c = sigma[(i + j) % n]
                a = A[i, c] * n if visits == "printed" else A[i, c] / A[i].max()
                batches, used = task.data.next_batches([seed], torch.tensor([[c]]), cursor, K, B)
                moved[0, c] = used[0, c]
                theta = v[i].clone()
                for batch in batches:
                    own = theta.clone().requires_grad_()
                    x, y = task.data.x[batch.rows[0]], task.data.y[batch.rows[0]]
                    logits = x @ own[:12].view(3, 4).T + own[12:]
                    (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), own)
                    theta = theta - lr * a * g
                after[i] = theta
            v, cursor = after, moved
    return torch.stack(v)


@pytest.mark.parametrize("visits", ["relative", "printed"])
def test_shuffling_is_the_loop_over_models(visits):
    task, rng = task_of(), np.random.default_rng(1)
    A = random_weights(rng, runs=2)
    state = run(ShuffledSGD(0.3, 3, 2, visits), task, 2 * N, (4, 9), A=A)
    for r, seed in enumerate((4, 9)):
        found = loop(task, seed, A[r], 0.3, 3, 2, 2, visits)
        assert_allclose(state.v[r], found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("visits", ["relative", "printed"])
def test_08_one_client_alone_is_plain_sgd(visits):
    task = task_of((16,))
    state = run(ShuffledSGD(0.2, 3, 4, visits), task, 5)
    plain = FedAvg(Full(1), 0.2, 3, 4)
    expected = simulate(plain, task, 5, progress=False).state.x
    assert_allclose(state.v[:, 0], expected, rtol=0, atol=1e-14)  # 15 steps of numbers below 1


def test_09_whoever_learns_alone_does_local_sgd_once_an_epoch():
    task = task_of()
    A = torch.eye(N).double()
    printed = run(ShuffledSGD(0.1, 2, None, "printed"), task, N, A=A).v[0]
    relative = run(ShuffledSGD(0.1 * N, 2, None), task, N, A=A).v[0]
    theta = task.init([0]).repeat(N, 1)
    for _ in range(2):
        theta = theta - 0.1 * N * task.grad(theta, task.data.full_batch())
    assert_allclose(printed, theta, rtol=1e-12)
    assert_allclose(relative, theta, rtol=1e-12)


def test_10_identical_clients_keep_identical_models():
    centre = np.random.default_rng(0).normal(size=(1, 3))
    task = points(np.repeat(centre, N, 0))
    A = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(N))).expand(1, N, N)
    algorithm = ShuffledSGD(0.1, 2)
    state = algorithm.init(task, (0,), A=A)
    for t in range(1, 3 * N + 1):
        state, _ = algorithm.round(state, task)
        apart = (state.v - state.v[:, :1]).abs().max()
        assert apart < 1e-13 if t % N == 0 else apart > 1e-4, "equal at the end of every epoch"
    assert (state.v[0, 0] - task.init([0])[0]).abs().max() > 1e-3


def test_11_a_small_epoch_is_a_gradient_step():
    centres = np.random.default_rng(2).normal(size=(N, 3))
    task, A = points(centres), random_weights(np.random.default_rng(3))
    start = torch.ones(1, 3).double()
    error = []
    for lr in (1e-3, 1e-4):
        v = run(ShuffledSGD(lr, 3, None, "printed"), task, N, x=start, A=A).v[0]
        moved = (v - start) / (lr * N * 3)
        error.append((moved + (start - A[0] @ torch.from_numpy(centres))).abs().max().item())
    assert error[0] < 0.05 and error[1] == pytest.approx(error[0] / 10, rel=0.1)


def test_12_quadratics_by_hand():
    rng = np.random.default_rng(4)
    centres, lr, K = rng.normal(size=(N, 3)), 0.07, 3
    task, A = points(centres), random_weights(rng)
    state = run(ShuffledSGD(lr, K, None, "printed"), task, N, x=torch.zeros(1, 3).double(), A=A)
    sigma = stream(0, "shuffling", 0).permutation(N)
    for i in range(N):
        v = np.zeros(3)
        for j in range(N):
            c = sigma[(i + j) % N]
            v = centres[c] + (1 - lr * A[0, i, c].item() * N) ** K * (v - centres[c])
        assert_allclose(state.v[0, i], v, rtol=1e-12)


@pytest.mark.long
def test_repeated_epochs_with_small_steps_reach_the_personal_minimiser():
    centres = np.random.default_rng(5).normal(size=(N, 3))
    task, A = points(centres), random_weights(np.random.default_rng(6))
    v = run(ShuffledSGD(1e-3, 1, None, "printed"), task, 1200 * N, A=A).v[0]
    assert_allclose(v, A[0] @ torch.from_numpy(centres), atol=0.01)


def test_projection_is_idempotent_and_nonexpansive():
    rng = np.random.default_rng(7)
    a, b = (torch.from_numpy(3 * rng.normal(size=(40, 3))) for _ in range(2))
    pa, pb = ball(a, 1.0), ball(b, 1.0)
    assert_allclose(ball(pa, 1.0), pa, rtol=1e-14)
    assert (pa.norm(dim=1) <= 1 + 1e-12).all() and (pa.norm(dim=1) < 0.99).any()
    assert ((pa - pb).norm(dim=1) <= (a - b).norm(dim=1) + 1e-12).all()


def test_models_are_projected_once_an_epoch():
    centres = 10 * np.ones((N, 2))
    task = points(centres)
    start = torch.zeros(1, 2).double()
    algorithm = ShuffledSGD(0.5, 1, None, radius=1.0)
    before = run(algorithm, task, N - 1, x=start).v.norm(dim=2)
    after = run(algorithm, task, N, x=start).v.norm(dim=2)
    assert (before > 2).all()
    assert_allclose(after, 1.0, rtol=1e-12)


def test_17_the_closing_step():
    rng = np.random.default_rng(8)
    centres = rng.normal(size=(N, 3))
    task, A = points(centres), random_weights(rng)
    drawn = upload([halves(task.data, (0,))], "cpu")[0]
    optimum = (A[0] @ torch.from_numpy(centres)).unsqueeze(0)
    assert_allclose(final_step(task, optimum, A, 2.0, drawn), optimum, atol=1e-14)
    v = torch.from_numpy(rng.normal(size=(1, N, 3)))
    assert_allclose(final_step(task, v, A, 4.0, drawn), v - (v - optimum) / 4, atol=1e-14)


# ---- the epoch's end of PERM


def test_the_end_of_an_epoch_by_hand():
    task = task_of((6, 8, 10, 12, 4))
    perm = PERM(0.2, 2, 2, mixing=Mixing(8.0, "one"), global_lr=0.5)
    state = run(perm, task, N, (3,))
    w = task.init([3])
    w = w - 0.5 * task.client_gradients(w).mean(0)
    assert_allclose(state.x, w, rtol=1e-12)
    g = task.client_gradients(w)
    z = (g[:, None] - g[None]).square().sum(2)
    n = torch.tensor([6.0, 8, 10, 12, 4]).double()
    assert_allclose(state.A[0], weights.water_fill(z, n, 8.0), atol=1e-12)
    assert N < (state.A[0] > 0).sum() < N**2, "neither alone nor all with all"
    assert (run(perm, task, N - 1, (3,)).A == 1 / N).all()


def test_weights_of_an_epoch_rule_the_next():
    task = task_of()
    perm = PERM(0.2, 2, None, mixing=Mixing(8.0, "one"))
    first = run(perm, task, N)
    assert N < (first.A[0] > 0).sum() < N**2
    second, _ = perm.round(first, task)
    hosts = schedule((0,), N, N)[0]
    for i in range(N):
        c = hosts[i]
        rate = 0.2 * first.A[0, i, c] / first.A[0, i].max()
        v = first.v[0, i : i + 1]
        for _ in range(2):
            v = v - rate * task.grad(v, task.data.full_batch([c]))
        assert_allclose(second.v[0, i : i + 1], v, rtol=1e-12)


def test_weights_of_every_round_rule_the_next():
    """Section 3.2's text: what an epoch's end does in the box, after each round."""
    task, w = task_of(), task_of().init([0])
    often = PERM(0.2, 2, None, mixing=Mixing(8.0, "one"), global_lr=0.5, refresh=1)
    moving, sizes, A = ShuffledSGD(0.2, 2, None), torch.full((N,), 8.0).double(), []
    for _ in range(2):
        w = w - 0.5 * task.client_gradients(w).mean(0)
        z = squared_distances(task.client_gradients(w)[None])
        A.append(weights.water_fill(z, sizes, 8.0))
    state = run(often, task, 2)
    assert_allclose(state.x, w, rtol=1e-12)
    assert_allclose(state.A, A[1], atol=1e-12)
    one = dataclasses.replace(run(moving, task, 1), A=A[0])
    assert_allclose(state.v, moving.round(one, task)[0].v, rtol=1e-11)


def test_weights_from_gradients_by_their_definitions():
    """λ in one sample's variance, products of two halves, steps from the weights before."""
    rng = np.random.default_rng(11)
    a, b = rng.normal(size=(2, 2, N, 3))
    sizes = rng.integers(2, 9, (2, 2, N))
    before = random_weights(rng, runs=2)
    found = Estimate(*map(torch.from_numpy, (a, b)), tuple(map(torch.from_numpy, sizes)))
    lams = (0.4, 2.0)
    for r in range(2):
        m, n = sizes[:, r]
        noise = np.mean(((a - b)[r] ** 2).sum(1) / (1 / m + 1 / n))
        full = (m[:, None] * a[r] + n[:, None] * b[r]) / (m + n)[:, None]
        apart = [v[:, None] - v[None] for v in (a[r], b[r], full)]
        z, cross = (apart[2] ** 2).sum(2), (apart[0] * apart[1]).sum(2)
        assert_allclose(found.noise()[r], noise, rtol=1e-6)
        assert_allclose(found.unbiased()[r], cross, atol=1e-13)
        for options, distances, lam in (
            (dict(), z, lams[r] * noise),
            (dict(unit="one"), z, lams[r]),
            (dict(unbiased=True), cross, lams[r] * noise),
        ):
            sides = torch.from_numpy(distances), torch.from_numpy(m + n), lam
            exact = weights.water_fill(*sides)
            assert_allclose(
                Mixing(lams, **options).weights(found, before)[r], exact, rtol=1e-5, atol=1e-7
            )
            few = Mixing(lams, steps=2, **options).weights(found, before)[r]
            assert_allclose(few, weights.descend(before[r], *sides, 2), rtol=1e-5, atol=1e-7)


def test_samples_are_cut_anew_for_each_epoch():
    task = task_of()
    perm = PERM(0.2, 2, 2)
    drawn = [
        one.refresh for one in itertools.islice(perm.draws(perm.init(task, (0,)), task), 2 * N)
    ]
    first, second = (one.halves[0].rows for one in drawn if one is not None)
    assert drawn[N - 1] is not None and drawn[-1] is not None and (first != second).any(1).all()


def test_the_global_model_and_the_closing_step_stay_in_the_ball():
    task = points(10 * np.ones((N, 2)))
    start = torch.zeros(1, 2).double()
    perm = PERM(0.5, 1, radius=1.0, global_lr=0.5, mixing=Mixing(1.0, "one"))
    assert_allclose(run(perm, task, N, x=start).x.norm(), 1.0, rtol=1e-12)
    drawn = upload([halves(task.data, (0,))], "cpu")[0]
    v, A = torch.zeros(1, N, 2).double(), torch.eye(N).double()[None]
    assert_allclose(final_step(task, v, A, 2.0, drawn), np.full((1, N, 2), 5.0))
    after = final_step(task, v, A, 2.0, drawn, radius=1.0)
    assert_allclose(after, np.full((1, N, 2), 0.5**0.5), rtol=1e-12)


def test_a_global_minibatch_reads_on_in_each_clients_walk():
    task = task_of()
    perm = PERM(0.2, 2, 2, mixing=Mixing(0.5, "one"), global_lr=0.5, global_batch=3)
    state = run(perm, task, N)
    w, cursor = task.init([0]), np.full((1, N), 2 * N)
    batches, _ = task.data.next_batches([0], torch.arange(N)[None], cursor, 1, 3)
    w = w - 0.5 * task.grad(w.repeat(N, 1), batches[0]).mean(0)
    assert_allclose(state.x, w, rtol=1e-12)
    assert (state.cursor == 2 * N + 1).all()
    whole = run(PERM(0.2, 2, 2, mixing=perm.mixing, global_lr=0.5), task, N)
    assert (whole.cursor == 2 * N).all(), "all samples, and nobody reads on"


def test_runs_side_by_side_are_the_runs_apart():
    task, start = task_of(), dict(rounds=2 * N)
    rates = (0.1, 0.3)
    both = run(PERM(rates, 2, 2, mixing=Mixing((5.0, 50.0)), global_lr=0.3), task, 2 * N, (1, 2))
    for r in range(2):
        mixing = Mixing((5.0, 50.0)[r])
        one = run(PERM(rates[r], 2, 2, mixing=mixing, global_lr=0.3), task, seeds=(1 + r,), **start)
        assert_allclose(both.v[r], one.v[0], rtol=1e-12)
        assert_allclose(both.A[r], one.A[0], rtol=1e-10, atol=1e-14)


def test_both_rates_may_be_swept():
    task = task_of()
    grid = dict(lr=[0.1, 0.3], global_lr=[0.2, 0.8])
    found = sweep(PERM(0.1, 2, 2), task, 2 * N, grid, (3,), progress=False).state
    for k, (lr, global_lr) in enumerate(itertools.product(*grid.values())):
        one = run(PERM(lr, 2, 2, global_lr=global_lr), task, 2 * N, (3,))
        assert_allclose(found.v[k], one.v[0], rtol=1e-12)
        assert_allclose(found.x[k], one.x[0], rtol=1e-12)


def test_simulate_goes_on_from_a_checkpoint(tmp_path):
    task = task_of()
    perm = PERM(0.2, 2, 2)
    looks = dict(progress=False, evaluation=Evaluation(splits=()))
    whole = simulate(perm, task, 2 * N + 2, (0,), **looks).state
    half = simulate(perm, task, N + 1, (0,), **looks).state
    rest = simulate(perm, task, N + 1, (0,), state=half, **looks).state
    assert torch.equal(whole.v, rest.v) and torch.equal(whole.A, rest.A)


# ---- discrepancies


def test_13_squared_distances_through_the_gram_matrix():
    g = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 6, 9))) + 1000.0
    z = squared_distances(g)
    direct = (g[:, :, None] - g[:, None]).square().sum(3)
    assert_allclose(z, direct, rtol=1e-9)
    assert (z.diagonal(dim1=1, dim2=2) == 0).all() and torch.equal(z, z.mT)


def test_the_two_halves_make_the_full_gradient():
    task = task_of((3, 7, 4, 9, 6))
    theta = task.init([5])
    found = estimate(task, theta, upload([halves(task.data, (5,))], "cpu")[0])
    assert_allclose(found.full[0], task.client_gradients(theta), rtol=1e-12, atol=1e-15)
    assert found.n[0].tolist() == [3, 7, 4, 9, 6]


@pytest.mark.parametrize("chunk", [1_000_000, 30, 1])
def test_each_seed_has_a_split_and_a_model_of_its_own_in_pieces_of_any_size(chunk):
    task = task_of((3, 7, 4, 9, 6))
    order = np.random.default_rng(1).permutation(29)
    splits = {5: task.data.parts, 6: np.split(order, [8, 11, 20, 24])}
    both = Task(task.model, task.data.with_splits(splits))
    both.chunk, theta = chunk, task.init([5, 6])
    found = estimate(both, theta, upload([halves(both.data, (5, 6))], "cpu")[0])
    for r, seed in enumerate((5, 6)):
        for n, part in enumerate(splits[seed]):
            batch = Batch(torch.as_tensor(part)[None])
            full = task.grad(theta[r : r + 1], batch)[0]
            assert_allclose(found.full[r, n], full, rtol=1e-12, atol=1e-15)
    assert found.n.tolist() == [[len(part) for part in splits[seed]] for seed in (5, 6)]


def test_halves_are_a_partition_that_differs_by_seed_client_and_number():
    data = task_of((20, 20, 20)).data
    first, second = halves(data, (0, 1))
    for k in range(6):
        own = np.r_[first.rows[k], second.rows[k]] - 20 * (k % 3)
        assert sorted(own) == list(range(20))
    order = [tuple(first.rows[k] - 20 * (k % 3)) for k in range(6)]
    assert len({*order, tuple(halves(data, (0,), 1)[0].rows[0])}) == 7


def test_18_the_two_batch_estimator_has_no_bias_and_minibatches_have():
    """Gaussian gradients: distances of means, with and without the noise of the halves."""
    rng = np.random.default_rng(1)
    mean, M, draws = rng.normal(size=(4, 3)), 10, 40_000
    a, b = (torch.from_numpy(mean + rng.normal(size=(draws, 4, 3)) / np.sqrt(M)) for _ in range(2))
    sizes = (torch.full((draws, 4), M),) * 2
    found = Estimate(a, b, sizes)
    exact = ((mean[:, None] - mean[None]) ** 2).sum(2)
    assert_allclose(found.unbiased().mean(0), exact, atol=0.02)
    off = ~np.eye(4, dtype=bool)
    excess = squared_distances(a).mean(0).numpy() - exact
    assert_allclose(excess[off], 2 * 3 / M, atol=0.02)  # (tr Σ_i + tr Σ_j)/M
    assert_allclose(excess[~off], 0, atol=1e-12)
    assert_allclose(found.noise().mean(), 3, atol=0.02)


def test_14_reflected_halves():
    """(x, y) → (−x, y) maps one half of the clients on the other: w* = 0, one distance between."""
    rng = np.random.default_rng(2)
    x = rng.normal(0.2, 1, size=(4000, 3))
    y = (x @ np.ones(3) > 0).astype(int)
    data = FederatedDataset.build(
        torch.from_numpy(np.r_[x, -x]), np.r_[y, y], np.split(np.arange(8000), 4)
    )
    task = Task(models.mlp(3, 2), data)
    w = task.init([0])
    for _ in range(400):
        w = w - 0.5 * task.client_gradients(w).mean(0)
    assert (w[0, :3] - w[0, 3:6]).abs().max() < 1e-6, "no direction is left, only the log-odds"
    z = squared_distances(task.client_gradients(w)[None])[0]
    within, between = z[0, 1], z[:2, 2:]
    assert between.min() > 20 * within
    assert_allclose(between, between.mean(), rtol=0.1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Mixing(0.0), "lam must be positive"),
        (lambda: Mixing(unit="samples"), "unit of lam"),
        (lambda: ShuffledSGD(0.1, visits="often"), "kind of visits"),
        (lambda: ShuffledSGD(0.1, radius=0.0), "radius must be positive"),
        (lambda: PERM(0.1, global_batch=0), "global_batch is a whole number"),
        (lambda: ShuffledSGD(0.1).init(task_of(), (0,), A=torch.ones(N, N)), "on the simplex"),
        (lambda: ShuffledSGD(0.1).init(task_of(), (0,), A=torch.ones(3, 3)), "Expected mixing"),
        (
            lambda: ShuffledSGD(0.1).init(task_of(), (0,), A=torch.eye(N).long()),
            "A holds torch.int",
        ),
        (lambda: halves(task_of((1, 5)).data, (0,)), "Client 0 has one sample"),
        (lambda: final_step(task_of(), torch.ones(1, 2, 15), None, 1.0, ()), r"v is \[1, 2, 15\]"),
        (lambda: final_step(task_of(), torch.ones(1, N, 15), torch.ones(N, N), 1.0, ()), "simplex"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call, match):
    with pytest.raises(FedlibError, match=match):
        call()


def test_the_noise_is_counted_in_the_precision_of_the_gradients():
    rng = np.random.default_rng(3)
    a, b = (torch.from_numpy(rng.normal(size=(1, 2, 4))) for _ in range(2))
    found = Estimate(a, b, (torch.tensor([[3, 5]]), torch.tensor([[2, 7]]))).noise()
    apart = ((a - b) ** 2).sum(2)[0].numpy()
    assert_allclose(found, (apart / [1 / 3 + 1 / 2, 1 / 5 + 1 / 7]).mean(), rtol=1e-14)


def test_without_noise_there_is_no_unit_for_lambda():
    a, n = torch.ones(1, 2, 4), torch.tensor([[2, 2]])
    same = Estimate(a, a, (n // 2, n // 2))
    with pytest.raises(FedlibError, match="noise is estimated as zero.*unit='one'"):
        Mixing().weights(same, torch.full((1, 2, 2), 0.5))


def test_a_run_that_has_diverged_ends_no_other():
    """Beside a model that is no number the other run's bits are those of a run alone."""
    task, quiet = task_of(), dict(progress=False, evaluation=Evaluation(splits=()))
    perm, rounds = PERM(0.05, 2, 4), 2 * task.N
    start = perm.init(task, (1, 1))
    start.x[1] = torch.nan
    names = dict(name=["good", "bad"], state=start)
    both = simulate(perm, task, rounds, (1, 1), **names, **quiet).state
    alone = simulate(perm, task, rounds, (1,), **quiet).state
    assert torch.equal(both.x[0], alone.x[0]) and torch.equal(both.A[0], alone.A[0])
    assert both.x[1].isnan().all()
