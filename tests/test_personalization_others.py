"""The methods PERM is compared with, each against a plain loop over clients, with autograd."""

import dataclasses

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.checkpoint import Checkpoint
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.sweeps import sweep
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.personalization import (
    APFL,
    IFCA,
    PERM,
    Ditto,
    LocalizedFedAvg,
    LocalOnly,
    Mixing,
    Oracle,
    PerFedAvg,
    PFedMe,
    ShuffledSGD,
)
from fedlib.papers.personalization.others import spent
from fedlib.population.participation import Full

N, SIZES, B, K = 4, (7, 9, 6, 8), 3, 3
GROUPS = (0, 1, 0, 1)
SEEDS = (4, 9)
CLOSE = dict(rtol=1e-12, atol=1e-14)


def task_of(seed=0):
    """Softmax regression in float64."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    x, y = rng.normal(size=(n, 4)), rng.integers(0, 3, n)
    parts = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    data = FederatedDataset.build(torch.from_numpy(x), y, parts)
    return Task(models.mlp(4, 3), data)


def run(algorithm, task, rounds, seeds=(0,), **start):
    state = algorithm.init(task, seeds, **start)
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
    return state


METHODS = {
    "LocalizedFedAvg": LocalizedFedAvg(0.2, K, B, 5),
    "PerFedAvg, first-order": PerFedAvg(0.2, K, B, 0.3),
    "PerFedAvg, hessian-free": PerFedAvg(0.2, K, B, 0.3, "hessian-free"),
    "PFedMe": PFedMe(0.02, K, B, 0.05, 4, 12.0, 0.7),
    "Ditto": Ditto(0.2, K, B, 0.6),
    "APFL": APFL(0.2, K, B, 0.3),
    "APFL, adaptive": APFL(0.2, K, B, 0.3, True),
    "IFCA": IFCA(0.2, K, B, 3),
    "LocalOnly": LocalOnly(0.2, K, B),
    "Oracle": Oracle(0.2, K, B, GROUPS),
}


# ---- the same in plain loops: one client, one model, one minibatch after the other


class Client:
    """A client's gradients on rows of the data, and its walk through its own samples."""

    def __init__(self, task, seed, n):
        self.task, self.n, self.used = task, n, 0
        self.seed, self.part = seed, task.data.parts[n]

    def reads(self):
        """Return the rows of the next minibatch: shuffled passes, a rest is dropped."""
        per_pass = len(self.part) // B
        order = stream(self.seed, "data", self.n, self.used // per_pass).permutation(self.part)
        first = self.used % per_pass * B
        self.used += 1
        return order[first : first + B]

    def grad(self, theta, rows):
        theta = theta.clone().requires_grad_()
        logits = self.task.data.x[rows] @ theta[:12].view(3, 4).T + theta[12:]
        loss = torch.nn.functional.cross_entropy(logits, self.task.data.y[rows])
        return torch.autograd.grad(loss, theta)[0]


def clients(task, seed):
    return [Client(task, seed, n) for n in range(N)]


def tuned(task, seed, t, w, lr, steps):
    """Return every client's copy of w after steps on minibatches of the stream for looking."""
    other = int(stream(seed, "personal", t).integers(2**63))
    out = []
    for client in clients(task, other):
        theta = w
        for _ in range(steps):
            theta = theta - lr * client.grad(theta, client.reads())
        out.append(theta)
    return out


def localized(task, seed, rounds):
    w, everyone = task.init([seed])[0], clients(task, seed)
    for _ in range(rounds):
        ends = []
        for client in everyone:
            theta = w
            for _ in range(K):
                theta = theta - 0.2 * client.grad(theta, client.reads())
            ends.append(theta)
        w = sum(ends) / N
    return w, tuned(task, seed, rounds, w, 0.2, 5)


def meta_learned(task, seed, rounds, free=False, eps=0.01):
    w, everyone = task.init([seed])[0], clients(task, seed)
    for _ in range(rounds):
        ends = []
        for client in everyone:
            theta = w
            for _ in range(K):
                inner = theta - 0.3 * client.grad(theta, client.reads())
                g = client.grad(inner, client.reads())
                if free:
                    rows = client.reads()
                    ahead = client.grad(theta + eps * g, rows)
                    behind = client.grad(theta - eps * g, rows)
                    g = g - 0.3 * (ahead - behind) / (2 * eps)
                theta = theta - 0.2 * g
            ends.append(theta)
        w = sum(ends) / N
    return w, tuned(task, seed, rounds, w, 0.3, 1)


def enveloped(task, seed, rounds):
    w, everyone, personal = task.init([seed])[0], clients(task, seed), None
    for _ in range(rounds):
        ends, personal = [], []
        for client in everyone:
            own = theta = w
            for _ in range(K):
                rows = client.reads()
                for _ in range(4):
                    theta = theta - 0.05 * (client.grad(theta, rows) + 12 * (theta - own))
                own = own - 0.02 * 12 * (own - theta)
            ends.append(own)
            personal.append(theta)
        w = 0.3 * w + 0.7 * sum(ends) / N
    return w, personal


def ditto(task, seed, rounds):
    w, everyone = task.init([seed])[0], clients(task, seed)
    v = [w] * N
    for _ in range(rounds):
        ends = []
        for i, client in enumerate(everyone):
            theta = w
            for _ in range(K):
                rows = client.reads()
                theta = theta - 0.2 * client.grad(theta, rows)
                v[i] = v[i] - 0.2 * (client.grad(v[i], rows) + 0.6 * (v[i] - w))
            ends.append(theta)
        w = sum(ends) / N
    return w, v


def apfl(task, seed, rounds, adaptive=False):
    w, everyone = task.init([seed])[0], clients(task, seed)
    v, a = [w] * N, [0.3] * N
    for _ in range(rounds):
        ends = []
        for i, client in enumerate(everyone):
            theta = w
            for k in range(K):
                rows = client.reads()
                g = client.grad(a[i] * v[i] + (1 - a[i]) * theta, rows)
                slope = float((v[i] - theta) @ g)
                v[i] = v[i] - 0.2 * a[i] * g
                theta = theta - 0.2 * client.grad(theta, rows)
                if adaptive and k == 0:
                    a[i] = min(1.0, max(0.0, a[i] - 0.2 * slope))
            ends.append(theta)
        w = sum(ends) / N
    return w, [a[i] * v[i] + (1 - a[i]) * w for i in range(N)]


def clustered(task, seed, rounds):
    everyone = clients(task, seed)
    c = [task.model.init(stream(seed, "init", *j))[0] for j in ((), (1,), (2,))]

    def nearest(client):
        x, y = (part[client.part] for part in (task.data.x, task.data.y))
        fits = [torch.nn.functional.cross_entropy(x @ one[:12].view(3, 4).T + one[12:], y)
                for one in c]  # fmt: skip
        return int(np.argmin([float(fit) for fit in fits]))

    c = [one.to(task.data.x) for one in c]
    for _ in range(rounds):
        ends, chosen = [], [nearest(client) for client in everyone]
        for client, j in zip(everyone, chosen, strict=True):
            theta = c[j]
            for _ in range(K):
                theta = theta - 0.2 * client.grad(theta, client.reads())
            ends.append(theta)
        for j in set(chosen):
            own = [end for end, k in zip(ends, chosen, strict=True) if k == j]
            c[j] = sum(own) / len(own)
    return sum(ends) / N, [c[nearest(client)] for client in everyone]


def alone(task, seed, rounds, groups=range(N)):
    everyone, groups = clients(task, seed), list(groups)
    v = [task.init([seed])[0]] * N
    for _ in range(rounds):
        for i, client in enumerate(everyone):
            for _ in range(K):
                v[i] = v[i] - 0.2 * client.grad(v[i], client.reads())
        together = [[v[j] for j in range(N) if groups[j] == g] for g in groups]
        v = [sum(ones) / len(ones) for ones in together]
    return sum(v) / N, v


LOOPS = {
    "LocalizedFedAvg": localized,
    "PerFedAvg, first-order": meta_learned,
    "PerFedAvg, hessian-free": lambda *args: meta_learned(*args, free=True),
    "PFedMe": enveloped,
    "Ditto": ditto,
    "APFL": apfl,
    "APFL, adaptive": lambda *args: apfl(*args, adaptive=True),
    "IFCA": clustered,
    "LocalOnly": alone,
    "Oracle": lambda *args: alone(*args, groups=GROUPS),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_loop_over_clients(name):
    task, algorithm = task_of(), METHODS[name]
    state = run(algorithm, task, 3, SEEDS)
    personal = algorithm.personal(state, task)
    assert personal.shape == (2, N, task.size)
    for r, seed in enumerate(SEEDS):
        w, own = LOOPS[name](task, seed, 3)
        assert (w - task.init([seed])[0]).norm() > 0.01
        assert_allclose(state.x[r], w, **CLOSE)
        assert_allclose(personal[r], torch.stack(own), **CLOSE)
    apart = (personal[0, :, None] - personal[0]).norm(dim=2) + torch.eye(N)
    assert apart.min() > 1e-3 or name in ("IFCA", "Oracle"), "personal models differ"


def test_a_choice_takes_no_padding_for_samples():
    x, y = torch.rand(20, 1, 4, 4), np.arange(20) % 2
    data = FederatedDataset.build(x, y, [np.arange(3), np.arange(3, 20)])
    task = Task(models.normed_cnn((1, 4, 4), 2, "batch"), data)
    ifca = IFCA(0.5, K, 3, 2)
    with pytest.raises(FedlibError, match="take padding for samples"):
        ifca.round(ifca.init(task, (0,)), task)


def test_clusters_that_are_there_are_found_and_empty_ones_wait():
    """Two halves with opposite labels; a third model far from both, which nobody chooses."""
    rng, n = np.random.default_rng(0), 20
    x = rng.normal(size=(N * n, 4))
    flip = np.repeat((1, -1, 1, -1), n)
    y = (flip * (x @ [1.0, -2, 0.5, 1]) > 0).astype(int)
    data = FederatedDataset.build(torch.from_numpy(x), y, np.split(np.arange(N * n), N))
    task, ifca = Task(models.mlp(4, 2), data), IFCA(0.5, K, 5, 3)
    state = ifca.init(task, (0,))
    c = state.c.clone()
    c[:, 2] = 50.0 * torch.arange(10)
    state = dataclasses.replace(state, c=c)
    for _ in range(60):
        state, _ = ifca.round(state, task)
    own = ifca.personal(state, task)[0]
    assert torch.equal(own[0], own[2]) and torch.equal(own[1], own[3])
    assert torch.nn.functional.cosine_similarity(own[0, :8], own[1, :8], 0) < -0.9
    assert torch.equal(state.c[0, 2], c[0, 2])


def test_adaptive_mixing_moves_and_stays_a_share():
    task = task_of()
    a = run(APFL(0.2, K, B, 0.3, True), task, 4).a
    assert a.shape == (1, N) and (a != 0.3).all() and a.unique().numel() == N
    wild = run(APFL(5.0, K, B, 0.3, True), task, 4).a
    assert (wild >= 0).all() and (wild <= 1).all() and ((wild == 0) | (wild == 1)).any()


def test_the_hessian_free_step_nears_the_one_with_the_hessian():
    """Against ``(I - a ∇²f) g`` with the exact product, on one minibatch after the other."""
    task, a, lr = task_of(), 0.3, 0.2
    w = task.init([0])[0]
    errors = []
    for eps in (0.1, 0.05):
        found = run(PerFedAvg(lr, 1, B, a, "hessian-free", eps), task, 1).x[0]
        ends = []
        for client in clients(task, 0):
            inner = w - a * client.grad(w, client.reads())
            g, rows = client.grad(inner, client.reads()), client.reads()

            def loss(theta, rows=rows):
                logits = task.data.x[rows] @ theta[:12].view(3, 4).T + theta[12:]
                return torch.nn.functional.cross_entropy(logits, task.data.y[rows])

            curved = torch.autograd.functional.hvp(loss, w, g)[1]
            ends.append(w - lr * (g - a * curved))
        errors.append((found - sum(ends) / N).norm().item())
    assert 0 < errors[0] < 1e-4 and errors[1] == pytest.approx(errors[0] / 4, rel=0.02)


# ---- 15: special cases


def fedavg(task, rounds, seeds, batch_size=B, steps=K, lr=0.2):
    algorithm = FedAvg(Full(N), lr, steps, batch_size)
    return simulate(algorithm, task, rounds, seeds, progress=False).state.x


def test_15_without_tuning_it_is_fedavg():
    task, algorithm = task_of(), LocalizedFedAvg(0.2, K, B, 0)
    state = run(algorithm, task, 4, SEEDS)
    expected = fedavg(task, 4, SEEDS)
    assert_allclose(state.x, expected, rtol=0, atol=1e-14)
    assert_allclose(algorithm.personal(state, task), expected[:, None].expand(-1, N, -1))


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_15_per_fedavg_without_an_inner_step_is_fedavg(variant):
    task, algorithm = task_of(), PerFedAvg(0.2, K, None, 0.0, variant)
    state = run(algorithm, task, 4, SEEDS)
    expected = fedavg(task, 4, SEEDS, None)
    assert_allclose(state.x, expected, rtol=1e-12)
    assert_allclose(algorithm.personal(state, task), expected[:, None].expand(-1, N, -1))


def test_15_pfedme_with_a_stiff_pull_is_fedavg():
    """θ - w_i tends to -∇f/λ, so a local round is a step of size η; the rest falls like 1/λ."""
    task, lr = task_of(), 1e-6
    start = task.init([0])
    plain = (fedavg(task, 2, (0,), None, K, lr) - start) / lr
    errors = []
    for lam in (1e3, 1e4):
        state = run(PFedMe(lr, K, None, 1 / lam, 3, lam), task, 2)
        errors.append(((state.x - start) / lr - plain).norm().item() / plain.norm().item())
    assert errors[0] < 1e-3 and errors[1] == pytest.approx(errors[0] / 10, rel=0.05)


def test_ends_of_the_scales_agree_with_the_simple_methods():
    task = task_of()
    average = fedavg(task, 3, SEEDS)
    alone = run(LocalOnly(0.2, K, B), task, 3, SEEDS).v
    ditto = run(Ditto(0.2, K, B, 0.0), task, 3, SEEDS)
    assert_allclose(ditto.x, average, **CLOSE)
    assert_allclose(ditto.v, alone, **CLOSE)
    for a, expected in ((0.0, average[:, None].expand(-1, N, -1)), (1.0, alone)):
        algorithm = APFL(0.2, K, B, a)
        state = run(algorithm, task, 3, SEEDS)
        assert_allclose(algorithm.personal(state, task), expected, **CLOSE)
        assert_allclose(state.x, average, **CLOSE)
    one, own = (run(Oracle(0.2, K, B, groups), task, 3, SEEDS) for groups in ((7,) * N, range(N)))
    assert_allclose(one.v, average[:, None].expand(-1, N, -1), **CLOSE)
    assert_allclose(own.v, alone, **CLOSE)
    assert_allclose(run(IFCA(0.2, K, B, 1), task, 3, SEEDS).c[:, 0], average, **CLOSE)


def test_groups_may_differ_from_seed_to_seed():
    task, other = task_of(), (0, 0, 1, 1)
    both = run(Oracle(0.2, K, B, {4: GROUPS, 9: other}), task, 3, SEEDS)
    for r, groups in enumerate((GROUPS, other)):
        apart = run(Oracle(0.2, K, B, groups), task, 3, (SEEDS[r],))
        assert_allclose(both.v[r], apart.v[0], **CLOSE)
    assert torch.equal(both.v[0, 0], both.v[0, 2]) and torch.equal(both.v[1, 0], both.v[1, 1])


# ---- side by side and apart


PER_RUN = {
    "LocalizedFedAvg": dict(lr=(0.1, 0.3)),
    "PerFedAvg, first-order": dict(lr=(0.1, 0.3), inner_lr=(0.0, 0.2)),
    "PerFedAvg, hessian-free": dict(lr=(0.1, 0.3), inner_lr=(0.4, 0.2)),
    "PFedMe": dict(lr=(0.01, 0.02), inner_lr=(0.05, 0.03), lam=(15.0, 10.0)),
    "Ditto": dict(lr=(0.1, 0.3), lam=(0.0, 2.0)),
    "APFL": dict(lr=(0.1, 0.3), mixing=(0.0, 0.7)),
    "APFL, adaptive": dict(lr=(0.1, 0.3), mixing=(0.2, 0.7)),
    "IFCA": dict(lr=(0.1, 0.3)),
    "LocalOnly": dict(lr=(0.1, 0.3)),
    "Oracle": dict(lr=(0.1, 0.3)),
}


@pytest.mark.parametrize("name", METHODS)
def test_runs_side_by_side_are_the_runs_apart(name):
    task = task_of()
    together = dataclasses.replace(METHODS[name], **PER_RUN[name])
    assert set(PER_RUN[name]) == set(together.per_run)
    both = run(together, task, 3, SEEDS)
    for r, seed in enumerate(SEEDS):
        own = dataclasses.replace(together, **{k: v[r] for k, v in PER_RUN[name].items()})
        one = run(own, task, 3, (seed,))
        assert_allclose(both.x[r], one.x[0], rtol=1e-12)
        personal = together.personal(both, task)[r]
        assert_allclose(personal, own.personal(one, task)[0], rtol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_looking_changes_nothing_and_a_checkpoint_goes_on(name, tmp_path):
    task, algorithm = task_of(), METHODS[name]
    looked = []

    def look(state, task):
        looked.append(algorithm.personal(state, task))
        return {}

    options = dict(seeds=SEEDS, progress=False)
    seen = simulate(algorithm, task, 5, evaluation=Evaluation(measure=look), **options).state
    options["evaluation"] = Evaluation(splits=())
    blind = simulate(algorithm, task, 5, **options).state
    assert torch.equal(seen.x, blind.x) and (seen.cursor == blind.cursor).all()
    assert torch.equal(algorithm.personal(seen, task), looked[-1]), "the same look, the same models"
    for until in (0.0, 0.0, None):
        kept = Checkpoint(tmp_path / "c.pt", 3, until)
        try:
            found = simulate(algorithm, task, 5, checkpoint=kept, **options)
        except FedlibError:
            continue
    assert torch.equal(found.state.x, blind.x)
    assert torch.equal(algorithm.personal(found.state, task), looked[-1])


def test_a_look_and_a_round_leave_the_state_as_it_is():
    task = task_of()
    for algorithm in METHODS.values():
        state, same = (run(algorithm, task, 1) for _ in range(2))
        algorithm.personal(state, task)
        algorithm.round(state, task)
        assert torch.equal(state.x, same.x) and (state.cursor == same.cursor).all()
        for name in {"v", "a", "c"} & vars(state).keys():
            assert torch.equal(getattr(state, name), getattr(same, name))


def test_minibatches_for_looking_differ_by_seed_round_and_client_and_from_training():
    """Clients with the same samples, so that only what they read tells them apart."""
    rng = np.random.default_rng(0)
    x, y = np.tile(rng.normal(size=(30, 4)), (N, 1)), np.tile(rng.integers(0, 3, 30), N)
    data = FederatedDataset.build(x, y, list(np.arange(30 * N).reshape(N, 30)))
    task, start = Task(models.mlp(4, 3), data), torch.ones(2, 15, dtype=torch.double)
    for algorithm in (LocalizedFedAvg(0.2, 1, 8, 1), PerFedAvg(0.2, 1, 8, 0.2)):
        state = algorithm.init(task, SEEDS, x=start)
        looks = [algorithm.personal(dataclasses.replace(state, t=t), task) for t in (0, 1)]
        found = torch.stack(looks).flatten(0, 2)
        trained = run(LocalOnly(0.2, 1, 8), task, 1, SEEDS, x=start).v.flatten(0, 1)
        assert len(torch.cat([found, trained]).unique(dim=0)) == 2 * 2 * N + 2 * N


def test_training_reads_differ_by_seed_round_and_client():
    task = task_of()
    for name, algorithm in METHODS.items():
        state = algorithm.init(task, SEEDS)
        draws = algorithm.draws(state, task)
        rows = [next(draws).reading.rows for _ in range(2)]
        assert rows[0].shape == (algorithm.reads, 2 * N, B), name
        assert len({row.tobytes() for step in rows for row in step.swapaxes(0, 1)}) == 4 * N, name


def test_per_fedavg_reads_independent_minibatches():
    task = task_of()
    for variant, parts in (("first-order", 2), ("hessian-free", 3)):
        algorithm = PerFedAvg(0.2, 1, B, 0.1, variant)
        (rows,) = (next(algorithm.draws(algorithm.init(task, (0,)), task)).reading.rows,)
        assert rows.shape[0] == parts
        assert all(len({step.tobytes() for step in rows[:, n]}) == parts for n in range(N))


def test_a_sweep_over_two_settings():
    task = task_of()
    grid = dict(lr=[0.1, 0.2], lam=[0.5, 2.0])
    history = sweep(Ditto(0.1, K, B), task, 2, grid, (0,), progress=False)
    own = run(Ditto(0.2, K, B, 0.5), task, 2)
    assert_allclose(history.state.v[2], own.v[0], rtol=1e-12)


def test_each_seed_may_have_a_split_of_its_own():
    task, order = task_of(), np.random.default_rng(1).permutation(sum(SIZES))
    cuts = np.cumsum(SIZES)[:-1]
    splits = {4: task.data.parts, 9: np.split(order, cuts)}
    both = Task(task.model, task.data.with_splits(splits))
    for algorithm in METHODS.values():
        state = run(algorithm, both, 2, SEEDS)
        one = run(algorithm, both.of(9), 2, (9,))
        personal = algorithm.personal(state, both)[1]
        assert_allclose(personal, algorithm.personal(one, both.of(9))[0], rtol=1e-12)


def test_buffers_and_dropout_come_along():
    layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.25)]
    model = models.Model(torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(6, 3)))
    task = Task(model, task_of().data)
    for algorithm in METHODS.values():
        state = run(algorithm, task, 3)
        buffers = algorithm.personal(state, task)[0, :, model.trained :]
        assert buffers.isfinite().all()
        shared = isinstance(algorithm, IFCA)  # clients 0 and 1 may have chosen one model
        assert shared or (buffers[0] - buffers[1]).norm() > 0, "each client has seen other samples"
        assert (state.x[:, model.trained :] != task.init([0])[:, model.trained :]).any()


# ---- what it costs


def test_spent_counts_what_is_computed(monkeypatch):
    """Gradients are counted where they are taken: a row and a step each."""
    task, counted = task_of(), [0]
    features = Task.features

    def counting(self, batch):
        counted[0] += len(batch.rows)
        return features(self, batch)

    monkeypatch.setattr(Task, "features", counting)
    for name, algorithm in METHODS.items():
        counted[0] = 0
        state = run(algorithm, task, 3)
        algorithm.personal(state, task)
        choosing = N * 4 if name == "IFCA" else 0  # rows of samples whose losses choose
        assert algorithm.spent(3)["gradients"] == (counted[0] - choosing) / N, name
        assert algorithm.spent(3)["models"] == {"LocalOnly": 0, "IFCA": 12}.get(name, 6)
    assert LocalizedFedAvg(0.2, K, B, 5).spent(0) == {"models": 0, "gradients": 5}


def test_spent_by_hand():
    rounds = {
        "LocalizedFedAvg": 3 * 3 + 5, "PerFedAvg, first-order": 3 * 6 + 1,
        "PerFedAvg, hessian-free": 3 * 12 + 1, "PFedMe": 3 * 12, "Ditto": 18, "APFL": 18,
        "APFL, adaptive": 18, "IFCA": 9, "LocalOnly": 9, "Oracle": 9,
    }  # fmt: skip
    assert {name: a.spent(3)["gradients"] for name, a in METHODS.items()} == rounds


def test_spent_by_perm():
    sizes = [40, 80, 120]
    moving = ShuffledSGD(0.1, 10, 20)
    assert spent(moving, 7, sizes) == {"models": 14, "gradients": 70}
    perm = PERM(0.1, 10, 20)
    assert spent(perm, 2, sizes) == {"models": 4, "gradients": 20}
    full = (2 + 4 + 6) / 3
    assert spent(perm, 7, sizes) == {"models": 14 + 8, "gradients": 70 + 2 * 2 * full}
    small = PERM(0.1, 10, 20, global_batch=10)
    assert spent(small, 3, sizes)["gradients"] == 30 + full + 0.5
    often = PERM(0.1, 10, 20, refresh=1)
    assert spent(often, 7, sizes) == {"models": 14 + 28, "gradients": 70 + 7 * 2 * full}
    exact = PERM(0.1, 10)
    assert spent(exact, 3, sizes)["gradients"] == 30 + 2


def test_spent_by_perm_counts_what_is_computed(monkeypatch):
    task, counted = task_of(), [0]
    features = Task.features

    def counting(self, batch):
        weight = batch.weight
        counted[0] += batch.rows.numel() if weight is None else int((weight > 0).sum())
        return features(self, batch)

    monkeypatch.setattr(Task, "features", counting)
    perm = PERM(0.1, K, B, mixing=Mixing(5.0))
    run(perm, task, N + 1)
    assert spent(perm, N + 1, SIZES)["gradients"] == pytest.approx(counted[0] / B / N)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: LocalizedFedAvg(0.1, tune_steps=-1), "tune_steps is a whole number of at least 0"),
        (lambda: LocalizedFedAvg(-0.1), "lr must be positive"),
        (lambda: PerFedAvg(0.1, inner_lr=-0.1), "inner_lr is a finite number of at least 0"),
        (lambda: PerFedAvg(0.1, inner_lr=(0.1, float("nan"))), "inner_lr is a finite number"),
        (lambda: PerFedAvg(0.1, variant="hesian-free"), "Did you mean 'hessian-free'"),
        (lambda: PerFedAvg(0.1, eps=0), "eps must be positive"),
        (lambda: PFedMe(0.1, lam=0), "lam must be positive"),
        (lambda: PFedMe(0.1, inner_steps=0), "inner_steps is a whole number"),
        (lambda: PFedMe(0.1, global_lr=(0.1, 0.2)), "global_lr must be positive"),
        (lambda: Ditto(0.1, lam=float("inf")), "lam is a finite number of at least 0"),
        (lambda: Ditto(0.1, lam="much"), "lam is a finite number of at least 0"),
        (lambda: APFL(0.1, mixing=1.2), "mixing is a number of at least 0 and at most 1"),
        (lambda: IFCA(0.1, clusters=0), "clusters is a whole number"),
        (lambda: PERM(0.1, refresh=0), "refresh is a whole number"),
        (lambda: LocalOnly(0.1, 0), "local_steps is a whole number"),
        (
            lambda: Oracle(0.1, groups=(0, 1)).init(task_of(), (0,)),
            "2 labels for seed 0, and there",
        ),
        (lambda: Oracle(0.1, groups={1: GROUPS}).init(task_of(), (0,)), "0 labels for seed 0"),
        (lambda: Ditto((0.1, 0.2)).round(Ditto(0.1).init(task_of(), (0,)), task_of()), "2 values"),
        (lambda: APFL(0.1).init(task_of(), (0,), x=torch.ones(2, 3)), "Expected a tensor with a"),
        (lambda: Ditto(0.1).spent(-1), "rounds is a whole number"),
        (lambda: spent(PERM(0.1), 3, []), "sizes are each client's samples"),
        (lambda: spent(PERM(0.1), 3, [4, 0]), "all positive; got"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call, match):
    with pytest.raises(FedlibError, match=match):
        call()
