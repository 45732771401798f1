"""A new algorithm from outside: the public interface, few lines, the right numbers."""

import inspect
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedlib.engine import (
    FederatedDataset,
    Task,
    average,
    column,
    local_sgd,
    models,
    simulate,
    steps,
    sweep,
)
from fedlib.papers import fedavg
from fedlib.population.participation import Full, Independent, PeriodicSampler

PAGE = Path(__file__).parents[1] / "book" / "guides" / "add_an_algorithm.md"


class Learner(fedavg.FedAvg):
    def learn(self, state, task, clients, q, step, **extras):
        """Return the models sent and the models learned, each [R S, P], and the cursor."""
        S, work = clients.shape[1], (self.local_steps, self.batch_size)
        batches, cursor = task.data.next_batches(state.seeds, clients, state.cursor, *work, q)
        x, rate = state.x.repeat_interleave(S, 0), column(self.lr, state.x, S)
        extras = {"anchor": x} | extras
        return x, local_sgd(task, x, batches, rate, step=step, extras=extras), cursor


@dataclass(frozen=True)
class FedProx(Learner):
    mu: float = 0.1
    draws = None

    def round(self, state, task):
        clients, q = self.participation.cohort(state.seeds, state.t)
        _, y, cursor = self.learn(state, task, clients, q, steps.proximal(self.mu))
        return replace(state, x=average(y, q), cursor=cursor, t=state.t + 1), {}


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(fedavg.State):
    c: torch.Tensor  # [R, P], the server's control variate
    own: torch.Tensor  # [R, N, P], the clients'


@dataclass(frozen=True)
class Scaffold(Learner):
    draws = None

    def init(self, task, seeds):
        start = super().init(task, seeds)
        c = torch.zeros_like(start.x)
        return ScaffoldState(**vars(start), c=c, own=c.unsqueeze(1).repeat(1, task.N, 1))

    def round(self, state, task):
        clients, q = self.participation.cohort(state.seeds, state.t)
        runs, own = torch.arange(len(clients)).unsqueeze(1), state.own.clone()
        pull = (state.c.unsqueeze(1) - own[runs, clients]).flatten(0, 1)  # c - c_n
        x, y, cursor = self.learn(state, task, clients, q, steps.corrected(), correction=pull)
        gain = (x - y) / (self.local_steps * column(self.lr, state.x, clients.shape[1])) - pull
        own[runs, clients] = gain.view(*clients.shape, -1)  # c_n+ = c_n - c + (x - y) / (K γ)
        state = replace(state, c=own.mean(1), own=own, cursor=cursor, t=state.t + 1)
        return replace(state, x=average(y, q)), {}


# --- plain loops ----------------------------------------------------------------------------------

N, D, H, K = 6, 5, 4, 3
SEEDS, RATES, STEPS, B, ROUNDS, MU = (0, 3, 7), (0.05, 0.1, 0.2, 0.4), 3, 4, 6, 0.7


def problem(dtype=np.float64):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((12 * N, D)).astype(dtype), rng.integers(0, K, 12 * N)
    parts = np.split(rng.permutation(12 * N), [8, 20, 35, 44, 60])
    return Task(models.mlp(D, H, K), FederatedDataset.build(x, y, parts))


def gradient(task, w, rows):
    """One model's gradient on some samples, from a module and ``backward``."""
    module = nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, K)).double()
    nn.utils.vector_to_parameters(w, module.parameters())
    cross_entropy(module(task.data.x[rows]), task.data.y[rows]).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def samples(task, seed, n, used):
    """The next minibatches of one client."""
    cursor = np.full((1, N), used)
    batches, _ = task.data.next_batches((seed,), torch.tensor([[n]]), cursor, STEPS, B)
    return [batch.rows[0] for batch in batches]


def plain_fedprox(task, process, seed, lr):
    x, used = task.init((seed,))[0], [0] * N
    for t in range(ROUNDS):
        clients, q = process.draw(seed, t)
        new = torch.zeros_like(x)
        for n, weight in zip(clients, q, strict=True):
            y = x.clone()
            for rows in samples(task, seed, n, used[n]):
                y = y - lr * (gradient(task, y, rows) + MU * (y - x))
            used[n] += STEPS
            new += weight * y
        x = new
    return x


def plain_scaffold(task, process, seed, lr):
    x, used = task.init((seed,))[0], [0] * N
    c, own = torch.zeros_like(x), [torch.zeros_like(x) for _ in range(N)]
    for t in range(ROUNDS):
        clients, _ = process.draw(seed, t)
        models, gains = [], []
        for n in clients:
            y = x.clone()
            for rows in samples(task, seed, n, used[n]):
                y = y - lr * (gradient(task, y, rows) - own[n] + c)
            used[n] += STEPS
            better = own[n] - c + (x - y) / (STEPS * lr)
            models.append(y)
            gains.append(better - own[n])
            own[n] = better
        x = sum(models) / len(models)
        c = c + sum(gains) / N
    return x


LOOPS = {FedProx: plain_fedprox, Scaffold: plain_scaffold}
OWN = {FedProx: dict(mu=MU), Scaffold: {}}


@pytest.mark.parametrize("process", [Independent(N, 3), Full(N)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("kind", LOOPS)
def test_a_new_algorithm_equals_its_plain_loop(kind, process):
    task = problem()
    algorithm = kind(process, 0.2, STEPS, B, **OWN[kind])
    state = simulate(algorithm, task, ROUNDS, SEEDS, progress=False).state
    for r, seed in enumerate(SEEDS):
        assert (state.x[r] - LOOPS[kind](task, process, seed, 0.2)).abs().max() < 1e-12
    plain = fedavg.FedAvg(process, 0.2, STEPS, B)
    other = simulate(plain, task, ROUNDS, SEEDS, progress=False).state
    assert (state.x - other.x).abs().max() > 1e-3


def test_both_are_few_lines():
    lines = [
        line
        for kind in (Learner, FedProx, ScaffoldState, Scaffold)
        for line in inspect.getsource(kind).splitlines()
        if line.strip() and not line.strip().startswith(('"""', "#"))
    ]
    assert len(lines) < 40


@pytest.mark.parametrize("kind", LOOPS)
def test_four_rates_and_three_seeds_in_one_call(kind):
    task, process = problem(), PeriodicSampler(N, 2, 2, 4)
    process = Independent(N, 3) if kind is Scaffold else process
    algorithm = kind(process, 0.1, STEPS, B, **OWN[kind])
    found = sweep(algorithm, task, ROUNDS, {"lr": RATES}, SEEDS, progress=False)
    rows = found.frame.groupby(["run", "seed"]).size()
    assert len(rows) == 12 and set(found.frame["run"]) == {f"lr={rate}" for rate in RATES}
    pairs = [(rate, seed) for rate in RATES for seed in SEEDS]
    for row, (rate, seed) in zip(found.state.x, pairs, strict=True):
        assert (row - LOOPS[kind](task, process, seed, rate)).abs().max() < 1e-12


# --- the page -------------------------------------------------------------------------------------


def test_the_guide_runs_as_it_stands_and_its_example_is_fedprox(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    code = "\n".join(blocks)
    assert max(map(len, code.splitlines())) <= 88
    names = {"__name__": "guide"}
    exec(compile(code, str(PAGE), "exec"), names)
    told = capsys.readouterr().out
    assert told.count("lr=") == 4 and told.count("the same bits: True") == 2
    assert np.isfinite(names["found"].frame["value"]).all()
    losses = names["history"].frame.query("split == 'test' and metric == 'loss'")
    means = losses.groupby("round")["value"].mean()
    assert means.iloc[-1] < 0.5 * means.iloc[0]
    task, process = problem(), Independent(N, 3)
    state = simulate(
        names["FedProx"](process, 0.2, STEPS, B, mu=MU), task, ROUNDS, SEEDS, progress=False
    ).state
    for r, seed in enumerate(SEEDS):
        assert (state.x[r] - plain_fedprox(task, process, seed, 0.2)).abs().max() < 1e-12
    ahead = simulate(
        names["AheadFedProx"](process, 0.2, STEPS, B, mu=MU), task, ROUNDS, SEEDS, progress=False
    ).state
    assert torch.equal(ahead.x, state.x), "drawn ahead or in turn"
