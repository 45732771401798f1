"""The methods between the papers: each against a plain loop, and where each of them ends."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.methods import (
    MIFA,
    SCAFFOLD,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedNova,
    FedProx,
    FedYogi,
    Lookahead,
    UnevenFedAvg,
)
from fedlib.papers.methods import theory as th
from fedlib.papers.participation.algorithm import GeneralizedFedAvg
from fedlib.population.participation import (
    Cyclic,
    Full,
    Independent,
    Participation,
    PeriodicSampler,
    Regularized,
)

N, SIZES, B, K, LR, T = 5, (7, 9, 6, 8, 11), 3, 3, 0.2, 6
SEEDS, STEPS = (4, 9), (1, 4, 2, 3, 5)
CLOSE = dict(rtol=0, atol=1e-12)


class Ragged(Participation):
    """One to three clients a round, each with a weight of its own; another number in each run."""

    def draw(self, seed, t):
        rng = np.random.default_rng([seed, t])
        clients = rng.permutation(self.N)[: rng.integers(1, 4)]
        q = rng.random(len(clients)) + 0.1
        return clients, q / q.sum()


WHO = Ragged(N)


def task_of(seed=0):
    """Softmax regression in float64, clients of different sizes."""
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    x, y = rng.normal(size=(n, 4)), rng.integers(0, 3, n)
    parts = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    return Task(models.softmax(4, 3), FederatedDataset.build(torch.from_numpy(x), y, parts))


def run(algorithm, task, rounds=T, seeds=SEEDS, x=None):
    state = algorithm.init(task, seeds, x)
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
    return state


# ---- the same in plain loops: one client, one model, one minibatch after the other


class Client:
    """A client's gradients, on the minibatches of its walk through its own samples."""

    def __init__(self, task, seed, n):
        self.task, self.seed, self.n, self.used = task, seed, n, 0

    def grad(self, theta):
        per_pass = SIZES[self.n] // B
        order = stream(self.seed, "data", self.n, self.used // per_pass).permutation(SIZES[self.n])
        first = self.used % per_pass * B
        rows = self.task.data.parts[self.n][order[first : first + B]]
        self.used += 1
        theta = theta.clone().requires_grad_()
        logits = self.task.data.x[rows] @ theta[:12].view(3, 4).T + theta[12:]
        loss = torch.nn.functional.cross_entropy(logits, self.task.data.y[rows])
        return torch.autograd.grad(loss, theta)[0]

    def walk(self, x, steps=K, add=0.0, mu=0.0):
        y = x
        for _ in range(steps):
            y = y - LR * (self.grad(y) + add + mu * (y - x))
        return y


def rounds(task, seed):
    """Return the start, and for each round the clients' walks with their numbers and weights."""
    clients = [Client(task, seed, n) for n in range(N)]
    each = [[(n, q, clients[n]) for n, q in zip(*WHO.draw(seed, t), strict=True)] for t in range(T)]
    return task.init([seed])[0], each


def pulled(task, seed):
    x, each = rounds(task, seed)
    for cohort in each:
        x = sum(q * client.walk(x, mu=0.7) for _, q, client in cohort)
    return x


def controlled(task, seed):
    x, each = rounds(task, seed)
    c, own = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(N)]
    for cohort in each:
        step, change = 0, 0
        for n, q, client in cohort:
            y = client.walk(x, add=c - own[n])
            new = own[n] - c + (x - y) / (K * LR)
            step, change = step + q * (y - x), change + (new - own[n])
            own[n] = new
        x, c = x + 1.3 * step, c + change / N
    return x


def remembered(task, seed):
    x, each = rounds(task, seed)
    memory = [torch.zeros_like(x) for _ in range(N)]
    for cohort in each:
        for n, _, client in cohort:
            memory[n] = (x - client.walk(x)) / LR
        x = x - LR / N * sum(memory)
    return x


def uneven(task, seed, normalised=False):
    x, each = rounds(task, seed)
    for cohort in each:
        effective = sum(q * STEPS[n] for n, q, _ in cohort)
        moved = 0
        for n, q, client in cohort:
            d = client.walk(x, STEPS[n]) - x
            moved = moved + q * (effective * d / STEPS[n] if normalised else d)
        x = x + moved
    return x


def served(task, seed, server):
    x, each = rounds(task, seed)
    for cohort in each:
        x = server(x, sum(q * (client.walk(x) - x) for _, q, client in cohort))
    return x


def heavy_ball():
    v = 0

    def server(x, d):
        nonlocal v
        v = 0.8 * v + d
        return x + 0.6 * v

    return server


def adaptive(kind):
    m, v = 0, 0.01**2

    def server(x, d):
        nonlocal m, v
        m = 0.9 * m + 0.1 * d
        if kind == "adagrad":
            v = v + d * d
        elif kind == "adam":
            v = 0.99 * v + 0.01 * d * d
        else:
            v = torch.where(v > d * d, v - 0.01 * d * d, v + 0.01 * d * d)
        return x + 0.05 * m / (v**0.5 + 0.01)

    return server


def looking():
    slow, t = None, 0

    def server(x, d):
        nonlocal slow, t
        slow, t, x = x if slow is None else slow, t + 1, x + d
        if t % 2 == 0:
            x = slow = slow + 0.3 * (x - slow)
        return x

    return server


BASE = dict(participation=WHO, lr=LR, batch_size=B)
LOCAL = dict(BASE, local_steps=K)
ADAPTIVE = dict(LOCAL, server_lr=0.05, adaptivity=0.01)
METHODS = {
    "FedProx": (FedProx(**LOCAL, mu=0.7), pulled),
    "SCAFFOLD": (SCAFFOLD(**LOCAL, server_lr=1.3), controlled),
    "MIFA": (MIFA(**LOCAL), remembered),
    "UnevenFedAvg": (UnevenFedAvg(**BASE, steps=STEPS), uneven),
    "FedNova": (FedNova(**BASE, steps=STEPS), lambda *at: uneven(*at, True)),
    "FedAvgM": (FedAvgM(**LOCAL, beta=0.8, server_lr=0.6), lambda *at: served(*at, heavy_ball())),
    "FedAdagrad": (FedAdagrad(**ADAPTIVE), lambda *at: served(*at, adaptive("adagrad"))),
    "FedAdam": (FedAdam(**ADAPTIVE), lambda *at: served(*at, adaptive("adam"))),
    "FedYogi": (FedYogi(**ADAPTIVE), lambda *at: served(*at, adaptive("yogi"))),
    "Lookahead": (
        Lookahead(**LOCAL, alpha=0.3, interval=2),
        lambda *at: served(*at, looking()),
    ),
}
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
def test_a_method_is_its_plain_loop(name):
    """Several rounds, two runs at once, parts of the clients; drawn round by round and ahead."""
    algorithm, plain = METHODS[name]
    task = task_of()
    ends = torch.stack([plain(task, seed) for seed in SEEDS])
    assert_allclose(run(algorithm, task).x, ends, **CLOSE)
    assert_allclose(simulate(algorithm, task, T, SEEDS).state.x, ends, **CLOSE)
    assert (ends - task.init(SEEDS)).abs().max() > 0.01


@every_method
def test_runs_of_a_batch_have_settings_of_their_own(name):
    algorithm, _ = METHODS[name]
    task = task_of()
    for field in algorithm.per_run:
        value = getattr(algorithm, field)
        pair = (value, value / 2)
        both = run(replace(algorithm, **{field: pair}), task).x
        for r, one in enumerate(pair):
            alone = run(replace(algorithm, **{field: one}), task, seeds=SEEDS[r : r + 1]).x[0]
            assert_allclose(both[r], alone, **CLOSE)
        assert (run(algorithm, task).x[1] - both[1]).abs().max() > 1e-6


# ---- special cases


def test_what_is_switched_off_is_fedavg():
    task, plain = task_of(), run(FedAvg(**LOCAL), task_of()).x
    for algorithm in (
        FedProx(**LOCAL, mu=0.0),
        UnevenFedAvg(**BASE, steps=K),
        FedNova(**BASE, steps=(K,) * N),
        FedAvgM(**LOCAL, beta=0.0),
        FedAdam(**LOCAL, server_lr=2.0, beta1=0.0, beta2=1.0, adaptivity=1.0),
        FedYogi(**LOCAL, server_lr=2.0, beta1=0.0, beta2=1.0, adaptivity=1.0),
        Lookahead(**LOCAL, alpha=1.0),
    ):
        assert_allclose(run(algorithm, task).x, plain, **CLOSE, err_msg=type(algorithm).__name__)


def test_weights_by_size_are_those_of_fedavg():
    task, plain = task_of(), run(FedAvg(**LOCAL, weights="sizes"), task_of()).x
    for algorithm in (
        FedProx(**LOCAL, mu=0.0, weights="sizes"),
        FedNova(**BASE, steps=K, weights="sizes"),
        FedAvgM(**LOCAL, beta=0.0, weights="sizes"),
        Lookahead(**LOCAL, alpha=1.0, weights="sizes"),
    ):
        assert_allclose(run(algorithm, task).x, plain, **CLOSE)
    assert (plain - run(FedAvg(**LOCAL), task).x).abs().max() > 1e-3


def test_with_everybody_there_memory_and_one_corrected_step_are_fedavg():
    task, everyone = task_of(), LOCAL | dict(participation=Full(N))
    assert_allclose(run(MIFA(**everyone), task).x, run(FedAvg(**everyone), task).x, **CLOSE)
    once = dict(participation=Full(N), lr=LR)
    x = task.init(SEEDS)
    for _ in range(T):
        x = x - LR * torch.stack([task.client_gradients(row[None]).mean(0) for row in x])
    assert_allclose(run(SCAFFOLD(**once), task).x, x, **CLOSE)
    assert_allclose(run(FedAvg(**once), task).x, x, **CLOSE)


def test_look_ahead_is_an_amplification_below_one():
    task = task_of()
    back = run(Lookahead(**LOCAL, alpha=0.4, interval=4), task, 9)
    damped = run(GeneralizedFedAvg(**LOCAL, amplify=0.4, interval=4), task, 9)
    assert_allclose(back.x, damped.x, **CLOSE)
    assert back.t0 == damped.t0 == 8


def test_the_servers_variate_is_the_mean_of_the_clients():
    state = run(SCAFFOLD(**LOCAL), task_of())
    assert_allclose(state.c, state.c_i.mean(1), **CLOSE)
    assert state.c.abs().max() > 0.01


def test_whoever_did_not_come_keeps_what_it_has():
    """A row that is filled up names its first client again, at weight zero."""
    task, algorithm = task_of(), SCAFFOLD(**LOCAL)
    state = run(algorithm, task, 1)
    for r, seed in enumerate(SEEDS):
        came = set(WHO.draw(seed, 0)[0])
        assert {n for n in range(N) if state.c_i[r, n].abs().max() > 0} == came
    sizes = [[len(WHO.draw(seed, t)[0]) for seed in SEEDS] for t in range(T)]
    assert any(one != other for one, other in sizes)


# ---- where they end: bowls F_i(x) = a_i/2 (x - z_i)², one number a model


def bowls(a, z):
    """One sample a client: u x against u z, with u² = a."""
    u = np.sqrt(np.asarray(a, dtype=float))
    data = FederatedDataset.build(u[:, None], u * z, [np.array([n]) for n in range(len(u))])
    return Task(models.linear(1), data, "half_square")


A, Z, P = np.array([0.5, 1.0, 2.0]), np.array([-1.0, 0.5, 4.0]), np.full(3, 1 / 3)
OPTIMUM = th.resting_point(Z, A)
ALL = dict(participation=Full(3), lr=0.2)


def path(algorithm, x, rounds, task=None):
    """Return where runs stand that start at x, one number each: ``[rounds + 1, R]``."""
    task = task or bowls(A, Z)
    state = algorithm.init(task, (0,) * len(x), torch.tensor(x, dtype=torch.float64)[:, None])
    found = [state.x]
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        found.append(state.x)
    return torch.cat(found, 1).T.numpy()


def after(algorithm, x, rounds):
    """Return where one run stands that starts at x."""
    return path(algorithm, [x], rounds)[-1, 0]


def ends_at(algorithm, point, share, rounds=1):
    """Check that rounds take the same share of any way to the point: there is no other end."""
    x = np.array([point, 0.0, 7.0])
    assert_allclose(path(algorithm, x, rounds)[-1] - x, share * (point - x), **CLOSE)
    assert 1e-3 < share < 2


def test_fedavg_ends_elsewhere_and_scaffold_at_the_optimum():
    local = dict(ALL, local_steps=5)
    kappa = th.pull(A, 0.2, 5)
    ends_at(FedAvg(**local), th.resting_point(Z, kappa), kappa.mean())
    assert_allclose(kappa, 1 - (1 - 0.2 * A) ** 5)
    assert_allclose(after(SCAFFOLD(**local), 0.0, 60), OPTIMUM, **CLOSE)
    some = dict(local, participation=Regularized(3, 1))
    assert_allclose(after(SCAFFOLD(**some), 0.0, 250), OPTIMUM, **CLOSE)
    assert abs(th.resting_point(Z, kappa) - OPTIMUM) > 0.4
    assert abs(path(FedAvg(**some), [0.0], 63)[-3:] - OPTIMUM).max() > 0.4


def test_scaffolds_variates_are_right_up_to_a_share_of_the_way():
    """Equal curvatures: ``c_i - c`` misses ``∇F_i - ∇f`` by ``1 - ρ`` of the last miss."""
    a, lr, steps = 0.7, 0.3, 4
    task, algorithm = bowls(np.full(3, a), Z), SCAFFOLD(Full(3), lr, steps)
    rho = (1 - (1 - lr * a) ** steps) / (steps * lr * a)
    state, aim = algorithm.init(task, (0,)), torch.from_numpy(a * (Z.mean() - Z))
    miss = -aim
    for _ in range(5):
        state, _ = algorithm.round(state, task)
        miss = (1 - rho) * miss
        assert_allclose((state.c_i - state.c.unsqueeze(1))[0, :, 0] - aim, miss, **CLOSE)
    assert 0.2 < 1 - rho < 0.5
    assert_allclose(state.x.item(), Z.mean() * (1 - (1 - lr * a) ** (5 * steps)), **CLOSE)


@pytest.mark.parametrize("mu", [0.0, 0.5, 3.0])
def test_fedprox_ends_where_the_formula_says(mu):
    kappa = th.pull(A, 0.2, 5, mu)
    ends_at(FedProx(**ALL, local_steps=5, mu=mu), th.resting_point(Z, kappa), kappa.mean())


def test_a_pull_brings_the_end_nearer_and_the_way_takes_longer():
    """Solved exactly, the weights are a / (a + μ): plain minimisers for 0, the optimum for ∞."""
    exact = [th.pull(A, 1 / (9 + mu), 2000, mu) for mu in (0.0, 1.0, 4.0, 1e9)]
    assert_allclose(exact[1], A / (A + 1))
    off = [abs(th.resting_point(Z, kappa) - OPTIMUM) for kappa in exact]
    assert_allclose(off[0], abs(Z.mean() - OPTIMUM))
    assert off[0] > off[1] > off[2] > 1e3 * off[3]
    means = [kappa.mean() for kappa in exact]
    assert means == sorted(means, reverse=True)


def test_fednova_ends_at_the_objective_and_fedavg_at_another():
    """Up to the step size: the way from the optimum halves with it, FedAvg's does not."""
    tau = (1, 4, 9)
    off = {FedNova: [], UnevenFedAvg: []}
    for lr in (0.02, 0.01, 0.001):
        kappa = th.pull(A, lr, tau)
        settings = dict(participation=Full(3), lr=lr, steps=tau)
        nova = th.resting_point(Z, kappa / tau)
        ends_at(FedNova(**settings), nova, np.mean(tau) * np.mean(kappa / tau))
        plain = th.resting_point(Z, kappa)
        ends_at(UnevenFedAvg(**settings), plain, kappa.mean())
        off[FedNova].append(nova - OPTIMUM)
        off[UnevenFedAvg].append(plain - OPTIMUM)
    wrong = th.resting_point(Z, A * tau) - OPTIMUM  # the objective that counts steps
    assert_allclose(off[UnevenFedAvg][-1], wrong, rtol=0.02)
    assert abs(wrong) > 0.1 * np.ptp(Z)
    assert 1.9 < off[FedNova][0] / off[FedNova][1] < 2.1
    assert abs(off[FedNova][-1]) < 0.02 * abs(wrong)


def test_memory_ends_where_everybody_would():
    """One client a round, in turn. With one local step that is the optimum, exactly."""
    turns = dict(participation=Cyclic(3), lr=0.2)
    assert_allclose(after(MIFA(**turns), 0.0, 200), OPTIMUM, **CLOSE)
    kappa = th.pull(A, 0.2, 3)
    end = after(MIFA(**turns, local_steps=3), 0.0, 200)
    assert_allclose(end, th.resting_point(Z, kappa), **CLOSE)
    keep = 1 - 0.2 * A  # FedAvg after a whole circle: the last counts most
    last = th.resting_point(Z, [0.2 * A[n] * np.prod(keep[n + 1 :]) for n in range(3)])
    ends_at(FedAvg(**turns), last, 1 - np.prod(keep), rounds=3)
    assert abs(last - OPTIMUM) > 0.02 * np.ptp(Z)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_memory_is_stable_up_to_its_limit(n):
    """Both sides, by the roots of its recursion and by runs that shrink and grow."""
    limit = th.memory_limit(n)
    for share in (0.999, 1.001):
        kappa = share * limit
        recursion = np.array([1.0, -1.0] + [0.0] * (n - 1))
        recursion[1:] += kappa / n
        assert (abs(np.roots(recursion)).max() < 1) == (share < 1)
    both = MIFA(Cyclic(n), (0.9 * limit, 1.1 * limit))
    calm, wild = abs(path(both, [1.0, 1.0], 150, bowls(np.ones(n), np.zeros(n)))[-n - 1 :]).max(0)
    assert calm < 0.9
    assert wild > 2
    assert_allclose(th.memory_limit(1000) * 1000, math.pi**2 / 2, rtol=1e-5)


def test_no_server_moves_the_fixed_point():
    local = dict(ALL, local_steps=5)
    point = th.resting_point(Z, th.pull(A, 0.2, 5))
    for kind in (FedAdagrad, FedAdam, FedYogi):
        algorithm = kind(**local, server_lr=0.1)
        assert_allclose(after(algorithm, point, 5), point, **CLOSE)
        assert abs(after(algorithm, OPTIMUM, 5) - OPTIMUM) > 0.05
    assert_allclose(after(FedAvgM(**local, beta=0.3), point, 5), point, **CLOSE)


def test_server_momentum_is_stable_up_to_its_limit_and_fastest_at_a_double_root():
    task, kappa = bowls([1.0], np.zeros(1)), 0.5
    one, pairs = (
        dict(participation=Full(1), lr=kappa),
        [(b, s) for b in (0, 0.5, 0.9) for s in (1, -1)],
    )
    beta = tuple(float(b) for b, _ in pairs)
    rate = tuple((1 - 0.02 * s) * th.momentum_limit(b) / kappa for b, s in pairs)
    ends = abs(path(FedAvgM(**one, beta=beta, server_lr=rate), [1.0] * 6, 250, task)[-1])
    assert (ends[::2] < 0.5).all()
    assert (ends[1::2] > 10).all()
    best = (1 - math.sqrt(kappa)) ** 2
    roots = [
        abs(np.roots([1, -(1 + beta - kappa), beta])).max()
        for beta in (0.0, best - 0.02, best, best + 0.02)
    ]
    assert_allclose(roots[2], 1 - math.sqrt(kappa), atol=1e-7)
    assert roots[0] == 1 - kappa > roots[1] > roots[2] < roots[3]
    x = path(FedAvgM(**one, beta=best), [1.0], 42, task)[:, 0]
    assert_allclose(x[42], 2 * math.sqrt(best) * x[41] - best * x[40], **CLOSE)


def steps_of(algorithm, d):
    """Return how far a server moves, in server rates, when the clients move by ``d[t]``."""
    state, out = algorithm.init(bowls([1.0], np.zeros(1)), (0,)), []
    for one in d:
        moved = algorithm.served(state, torch.full((1, 1), float(one), dtype=torch.float64))
        out.append(((moved.x - state.x) / algorithm.server_lr).item())
        state = moved
    return np.array(out), state


def test_adam_moves_no_coordinate_further_than_its_limit_and_sometimes_as_far():
    """With the paper's β the limit is above 2: one server rate a round would be wrong."""
    adam = FedAdam(Full(1), 0.1, server_lr=0.3, adaptivity=1e-12)
    limit, ones = th.largest_step(0.9, 0.99, 200), np.ones(1500)
    grows = (0.99 / 0.9) ** np.arange(200)
    assert 0.999 * limit < steps_of(adam, grows)[0][-1] <= limit * (1 + 1e-12)
    assert limit > 2
    assert_allclose(steps_of(adam, ones)[0][-1], 1, rtol=1e-6)
    rng = np.random.default_rng(3)
    for d in (rng.normal(size=200), rng.standard_cauchy(200)):
        assert abs(steps_of(adam, d)[0]).max() < limit
    sign = replace(adam, beta1=0.0, beta2=0.0)
    assert_allclose(steps_of(sign, [3.0, -0.2, 5.0])[0], [1, -1, 1], rtol=1e-9)


def test_yogi_forgets_only_what_it_replaces():
    """After a large movement come small ones: Adam's v falls by β₂ a round, Yogi's by theirs."""
    settings = dict(participation=Full(1), lr=0.1, server_lr=0.3)
    d, small = [10.0] + [0.01] * 50, 0.01 * 0.01**2
    _, adam = steps_of(FedAdam(**settings), d)
    _, yogi = steps_of(FedYogi(**settings), d)
    first = 1e-6 + 0.01 * 100
    assert_allclose(yogi.v.item(), first - 50 * small, rtol=1e-12)
    kept = 0.99**50
    assert_allclose(adam.v.item(), kept * (first - 0.01e-6) + (1 - kept) * 0.01**2, rtol=1e-12)


class Coins(Participation):
    """One of two clients a round: bit t of the seed. All seeds below 2^T are all sequences."""

    def draw(self, seed, t):
        return np.array([seed >> t & 1]), np.ones(1)


def test_look_ahead_has_the_variance_of_its_formula():
    """Over all 1024 sequences of ten draws; with α = 1 the inner optimizer's own."""
    z, lr, k, every = np.array([-1.0, 1.0]), 0.3, 5, range(2**10)
    task, keep = bowls(np.ones(2), z), 1 - lr
    inner = lr**2 / (1 - keep**2)  # its variance in the end, z having variance 1
    for alpha in (0.25, 0.5, 1.0):
        algorithm = Lookahead(Coins(2), lr, alpha=alpha, interval=k)
        x = run(algorithm, task, 2 * k, every).x
        c = 1 - alpha * (1 - keep**k)
        left = th.variance_left(keep, alpha, k)
        assert_allclose(x.mean(), 0, **CLOSE)
        assert_allclose((x**2).mean(), left * inner * (1 - c**4), **CLOSE)
        assert left < 1 or alpha == 1


def test_a_smaller_step_has_less_variance_than_look_ahead_of_the_same_speed():
    """On one curvature: what look-ahead gains, a smaller rate gains, too, and more."""
    for keep in (0.1, 0.5, 0.9, 0.99):
        for alpha in (0.2, 0.5, 0.8):
            for k in (2, 5, 20):
                look = th.variance_left(keep, alpha, k) * (1 - keep) / (1 + keep)
                slow = (1 - alpha * (1 - keep**k)) ** (1 / k)
                assert (1 - slow) / (1 + slow) < look


# ---- errors


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: FedProx(WHO, 0.1, mu=-1.0), "mu is a finite number of at least 0; got -1"),
        (lambda: FedProx(WHO, 0.1, mu=(0.1, math.nan)), "mu is a finite number of .*; got nan"),
        (lambda: SCAFFOLD(WHO, 0.1, server_lr=0.0), "server_lr must be positive"),
        (lambda: SCAFFOLD(WHO, -0.1), "lr must be positive"),
        (lambda: MIFA(WHO, 0.1, 0), "local_steps is a whole number"),
        (lambda: MIFA(Full, 0.1), "got its class Full alone"),
        (lambda: FedNova(WHO, 0.1, (1, 2)), "steps has 2 numbers, and there are 5 clients"),
        (lambda: FedNova(WHO, 0.1, (1, 2, 0, 1, 1)), "is a whole number of at least 1"),
        (lambda: FedNova(WHO, 0.1, 2, None, "size"), "Unknown kind of weights"),
        (lambda: FedAvgM(WHO, 0.1, beta=1.5), "beta is a number of at least 0 and at most 1"),
        (lambda: FedAdam(WHO, 0.1, server_lr=0.1, beta2=2.0), "beta2 is a number"),
        (lambda: FedYogi(WHO, 0.1, server_lr=0.1, adaptivity=0.0), "adaptivity must be positive"),
        (lambda: Lookahead(WHO, 0.1, alpha=1.5), "alpha is a number of at least 0 and at most 1"),
        (lambda: Lookahead(WHO, 0.1, interval=0), "interval is a whole number"),
        (lambda: th.memory_limit(0), "N is a whole number"),
        (lambda: th.pull(A, 0.1, 1, -1), "mu is a finite number"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, why):
    with pytest.raises(FedlibError, match=why):
        make()


def test_a_client_that_comes_twice_is_refused_where_it_keeps_something():
    twice = dict(participation=PeriodicSampler(N, 2, 1), lr=0.1)
    for algorithm in (SCAFFOLD(**twice), MIFA(**twice)):
        with pytest.raises(FedlibError, match="comes twice in round .* draws without replacement"):
            run(algorithm, task_of(), 60)
    with pytest.raises(FedlibError, match="for 4 clients, the data for 5"):
        MIFA(Independent(4, 2), 0.1).init(task_of(), SEEDS)


def test_batchnorm_is_refused_where_its_statistics_would_be_divided():
    task = task_of()
    task.model.buffers = {"mean": (1,)}
    with pytest.raises(FedlibError, match="FedAdam would divide .* GroupNorm"):
        FedAdam(WHO, 0.1, server_lr=0.1).init(task, SEEDS)


def test_states_hold_what_a_checkpoint_needs():
    """Every tensor of a state has a row a run."""
    task = task_of()
    for algorithm, _ in METHODS.values():
        state = run(algorithm, task, 1)
        for field in fields(state):
            value = getattr(state, field.name)
            assert not isinstance(value, torch.Tensor) or len(value) == len(SEEDS)
