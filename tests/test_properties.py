"""Whatever the settings: the engine computes what a plain loop computes, and runs never mix.

The loops below know one model, one client and one step at a time, in float64. They share with the
library what is *drawn* (initial models, cohorts, the orders of samples, minibatches of rows) and
nothing of what is computed.

Hypothesis chooses the cases, 200 in all, always the same ones. For more, and others each time:
``FEDLIB_CASES=5000 pytest tests/test_properties.py``.
"""

import copy
import dataclasses
import itertools
import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedlib.engine import local
from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.losses import LOSSES
from fedlib.engine.model import Model
from fedlib.engine.models import linear, mlp
from fedlib.engine.rng import stream
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitFull, WaitMinibatch
from fedlib.papers.tiers.algorithm import TDCD
from fedlib.papers.tiers.private import LabelPrivateTDCD
from fedlib.papers.tiers.task import TieredTask
from fedlib.population import participation as pt

CASES = int(os.environ.get("FEDLIB_CASES", 200))
FEATURES = 3


def cases(share):
    """Run a share of all cases: the same ones every time, unless more are asked for."""
    return settings(
        max_examples=max(1, int(CASES * share)),
        derandomize="FEDLIB_CASES" not in os.environ,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# --------------------------------------------------------------------------------------------------
# What a case is made of


def dense(*widths):
    """The plain module whose rows are those of ``mlp(*widths)``."""
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*sum(layers, [])[:-1])


def curved(outputs):
    return nn.Sequential(nn.Linear(FEATURES, 2), nn.Tanh(), nn.Linear(2, outputs))


MODELS = {  # the library's model and a plain module, both with some outputs
    "softmax": lambda k: (mlp(FEATURES, k), dense(FEATURES, k)),
    "mlp": lambda k: (mlp(FEATURES, 4, k), dense(FEATURES, 4, k)),
    "deep": lambda k: (mlp(FEATURES, 2, 3, k), dense(FEATURES, 2, 3, k)),
    "module": lambda k: (Model(curved(k)), curved(k)),
    "linear": lambda _: (linear(FEATURES), nn.Linear(FEATURES, 1, bias=False)),
}
PLAIN = {  # mean over a batch, by PyTorch's own modules
    "cross_entropy": nn.CrossEntropyLoss(),
    "half_square": lambda out, y: 0.5 * (out - y.view(out.shape)).pow(2).sum(1).mean(),
    "logistic": lambda out, y: nn.BCEWithLogitsLoss()(out.squeeze(1), y.double()),
}
OUTPUTS = {"cross_entropy": (3, 2, 5), "half_square": (1, 2), "logistic": (1,)}


@st.composite
def problems(draw):
    """A model with its plain module, a loss with fitting targets, and features ``[n, 3]``."""
    loss = draw(st.sampled_from(sorted(PLAIN)))
    kinds = [kind for kind in MODELS if kind != "linear" or loss != "cross_entropy"]
    kind = draw(st.sampled_from(kinds))
    outputs = 1 if kind == "linear" else draw(st.sampled_from(OUTPUTS[loss]))
    model, module = MODELS[kind](outputs)
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def samples(n):
        x = rng.standard_normal((n, FEATURES))
        if loss == "half_square":
            return x, rng.standard_normal(n if outputs == 1 else (n, outputs))
        return x, rng.integers(0, max(2, outputs), n)

    return model, module.double(), loss, samples


def divisors(n):
    return st.sampled_from([d for d in range(1, n + 1) if n % d == 0])


def windows(kind):
    @st.composite
    def build(draw, n):
        groups = draw(divisors(n))
        offset = draw(st.none() | st.integers(0, 5))
        some = draw(st.integers(1, n // groups))
        return kind(n, some, groups, draw(st.integers(1, 4)), offset)

    return build


@st.composite
def markov(draw, n):
    rate = st.sampled_from([0.1, 0.5, 1.0])
    return pt.Markov(n, draw(rate), draw(rate), draw(st.none() | st.integers(1, n)))


@st.composite
def trace(draw, n):
    row = st.lists(st.integers(0, 3), min_size=n, max_size=n).filter(any)
    rows = np.array(draw(st.lists(row, min_size=1, max_size=4)), dtype=float)
    return pt.Trace(rows / rows.sum(1, keepdims=True))


PROCESSES = {
    "full": lambda n: st.just(pt.Full(n)),
    "independent": lambda n: st.builds(pt.Independent, st.just(n), st.integers(1, n)),
    "regularized": lambda n: st.builds(pt.Regularized, st.just(n), divisors(n)),
    "periodic": windows(pt.Periodic),
    "periodic-sampler": windows(pt.PeriodicSampler),
    "cyclic": lambda n: st.just(pt.Cyclic(n)),
    "markov": markov,
    "drift": lambda n: st.builds(pt.Drift, st.just(n), st.integers(1, n), st.integers(0, 2)),
    "trace": trace,  # the only one whose weights differ within a round
}


def several(values, runs):
    """One setting for all runs, or one for each."""
    one = st.sampled_from(values)
    return one | st.tuples(*[one] * runs)


SEEDS = st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True).map(tuple)


@st.composite
def federations(draw):
    """An algorithm, its task, a plain module, seeds, and the first round."""
    model, module, loss, samples = draw(problems())
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=6))
    n, rows = len(sizes), sum(sizes)
    order = np.random.default_rng(draw(st.integers(0, 9))).permutation(rows)
    data = FederatedDataset.build(*samples(rows), np.split(order, np.cumsum(sizes)[:-1]))
    task = Task(model, data, loss, draw(st.sampled_from([0.0, 0.1])))
    seeds = draw(SEEDS)
    kind = draw(st.sampled_from([GeneralizedFedAvg, FedAvg, WaitMinibatch, WaitFull]))
    fits = st.integers(1, min(sizes))
    given = dict(
        participation=draw(PROCESSES[draw(st.sampled_from(sorted(PROCESSES)))](n)),
        lr=draw(several([0.01, 0.1, 0.3], len(seeds))),
        local_steps=draw(st.integers(1, 4)),
        batch_size=None if kind is WaitFull else draw(st.none() | fits | st.integers(1, 7)),
    )
    if kind is FedAvg:
        given["weights"] = draw(st.sampled_from(["process", "sizes"]))
    else:
        given["amplify"] = draw(several([0.5, 1.0, 3.0], len(seeds)))
        given["interval"] = draw(st.integers(1, 4))
    return kind(**given), task, module, seeds, draw(st.integers(0, 5))


@st.composite
def tiers(draw):
    """An algorithm, its task, a plain module for each silo, and seeds."""
    model, module, loss, samples = draw(problems())
    silos, rows = draw(st.integers(1, 3)), draw(st.integers(2, 12))
    blocks, y = zip(*[samples(rows) for _ in range(silos)], strict=True)
    clients = draw(st.lists(st.integers(1, 4), min_size=silos, max_size=silos))
    rng = np.random.default_rng(draw(st.integers(0, 9)))  # a client may hold no row
    whose = [rng.integers(0, k, rows) for k in clients]
    parts = [
        [np.flatnonzero(w == c) for c in range(k)] for w, k in zip(whose, clients, strict=True)
    ]
    models = [model if draw(st.booleans()) else copy.deepcopy(model) for _ in range(silos)]
    task = TieredTask(models, blocks, y[0], parts, loss_name=loss)
    seeds = draw(SEEDS)
    rate, batch = (
        draw(several([0.01, 0.1, 0.3], len(seeds))),
        draw(st.none() | st.integers(1, rows)),
    )
    kind = draw(st.sampled_from([TDCD, LabelPrivateTDCD]))
    return kind(rate, draw(st.integers(1, 4)), batch), task, module, seeds


# --------------------------------------------------------------------------------------------------
# The plain loops


class TooFew(Exception):
    """A client holds fewer samples than a minibatch."""


def walk(seed, client, rows, size):
    """Yield a client's minibatches, pass after pass; what does not fill one is left out."""
    if size is None:
        yield from itertools.repeat(rows)
    if size > len(rows):
        raise TooFew
    for number in itertools.count():
        order = stream(seed, "data", client, number).permutation(len(rows))
        for i in range(len(rows) // size):
            yield rows[order[size * i : size * (i + 1)]]


def plain(module, x):
    """Return the module with the values of a row ``x[P]``."""
    nn.utils.vector_to_parameters(x.clone(), module.parameters())
    return module


def descended(module, x, loss, batches, lr, l2=0.0):
    """Return ``x[P]`` after a step of SGD on each batch ``(features, targets, foreign)``."""
    sgd = torch.optim.SGD(plain(module, x).parameters(), lr, weight_decay=l2)
    for features, y, foreign in batches:
        sgd.zero_grad()
        loss(module(features) + foreign, y).backward()
        sgd.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def of_run(setting, r):
    return setting[r] if isinstance(setting, tuple) else setting


def averaging(algorithm, task, module, x, seed, r, first, rounds):
    """Return one run's model ``[P]`` after some rounds: one client after the other."""
    data, loss = task.data, PLAIN[task.loss_name]
    walks = [walk(seed, n, rows, algorithm.batch_size) for n, rows in enumerate(data.parts)]
    waits = isinstance(algorithm, WaitMinibatch)
    interval, u = getattr(algorithm, "interval", 1), torch.zeros_like(x)
    for t in range(first, first + rounds):
        last = (t + 1 - first) % interval == 0
        if waits and not last:
            continue
        clients, q = algorithm.participation.draw(seed, t)
        if waits:
            clients, q = range(task.N), [1 / task.N] * task.N
        if getattr(algorithm, "weights", "") == "sizes":
            q = q * np.array([len(data.parts[n]) for n in clients])
            q = q / q.sum()
        d = torch.zeros_like(x)
        for n, weight in zip(clients, q, strict=True):
            read = [next(walks[n]) for _ in range(algorithm.local_steps)]
            batches = [(data.x[rows], data.y[rows], 0) for rows in read]
            rate = of_run(algorithm.lr, r)
            d += weight * (descended(module, x, loss, batches, rate, task.l2) - x)
        x, u = x + d, u + d
        if last and not waits:
            x, u = x + (of_run(getattr(algorithm, "amplify", 1), r) - 1) * u, torch.zeros_like(u)
    return x


def exchanging(algorithm, task, module, x, seed, r, rounds):
    """Return one run's blocks ``[P]`` after some rounds: one client of one silo after the other."""
    rate, loss, samples = of_run(algorithm.lr, r), PLAIN[task.loss_name], len(task.y)

    blocks = list(x.split(len(x) // task.N))
    for t in range(rounds):
        ids = np.arange(samples)
        if algorithm.batch_size is not None:
            ids = stream(seed, "minibatch", t).choice(samples, algorithm.batch_size, replace=False)
        phi = [plain(module, b)(f[ids]).detach() for b, f in zip(blocks, task.x, strict=True)]
        for j, block in enumerate(blocks):
            foreign, copies = sum(phi[:j] + phi[j + 1 :], torch.zeros_like(phi[j])), []
            for part in task.rows[j]:
                mine = np.flatnonzero(np.isin(ids, part))
                batch = (task.x[j][ids[mine]], task.y[ids[mine]], foreign[mine])
                batches = [batch] * algorithm.local_steps if len(mine) else []
                copies.append(descended(module, block, loss, batches, rate))
            blocks[j] = torch.stack(copies).mean(0)
    return torch.cat(blocks)


# --------------------------------------------------------------------------------------------------
# The properties

ROUNDS = st.integers(1, 5)
HOW = st.tuples(st.sampled_from([None, *local.BACKENDS]), st.sampled_from([local.CACHED, 40]))


def simulated(algorithm, task, state, rounds, how=(None, local.CACHED)):
    """Simulate with one backend; where cores share the work, in pieces of so many numbers."""
    backend, cached = how
    with mock.patch.object(local, "CACHED", cached), local.everywhere(backend):
        last = Evaluation(every=rounds)
        return simulate(algorithm, task, rounds, state=state, evaluation=last, progress=False)


def check_near(history, expected, objective):
    """Compare the last models, and the loss that the history tells of them."""
    rows = history.frame.query("metric == 'loss' and round == round.max()")
    told = torch.tensor(rows["value"].to_numpy())
    want = torch.stack([objective(x) for x in expected])
    for found, wanted in ((history.state.x, torch.stack(expected)), (told, want)):
        assert (found - wanted).abs().max() <= 1e-9 * max(1, wanted.abs().max())


def of_one(algorithm, r):
    """Return the algorithm with the settings of one run."""
    own = {name: of_run(getattr(algorithm, name), r) for name in algorithm.per_run}
    return dataclasses.replace(algorithm, **own)


def check_same(alone, beside, padded):
    """Compare a run by itself and among others: the same bits, where no row was padded."""
    assert torch.allclose(alone, beside, 1e-12, 1e-12)
    assert padded or torch.equal(alone, beside)


def test_every_process_and_loss_has_its_cases():
    assert set(PROCESSES) == {*pt.PROCESSES, "trace"} and set(PLAIN) == set(LOSSES)


@pytest.mark.slow
@cases(0.7)
@given(federations(), ROUNDS, HOW)
def test_averaging_equals_the_plain_loop_and_runs_do_not_mix(case, rounds, how):
    algorithm, task, module, seeds, first = case
    state = algorithm.init(task, seeds, t=first)
    try:
        expected = [
            averaging(algorithm, task, module, x, seed, r, first, rounds)
            for r, (x, seed) in enumerate(zip(state.x, seeds, strict=True))
        ]
    except TooFew:
        with pytest.raises(FedlibError, match="fewer than a minibatch"):
            simulated(algorithm, task, state, rounds, how)
        return

    def objective(x):
        out = plain(module, x)(task.data.x).detach()
        return PLAIN[task.loss_name](out, task.data.y) + task.l2 / 2 * x.square().sum()

    check_near(simulated(algorithm, task, state, rounds, how), expected, objective)
    widths = [
        len(algorithm.participation.draw(s, first + t)[0]) for s in seeds for t in range(rounds)
    ]
    padded = len(set(widths)) > 1 or (
        algorithm.batch_size is None and len(set(task.data.sizes)) > 1
    )
    together = simulated(algorithm, task, state, rounds)
    for r, seed in enumerate(seeds):
        single = of_one(algorithm, r)
        alone = simulated(single, task, single.init(task, (seed,), t=first), rounds)
        check_same(alone.state.x[0], together.state.x[r], padded)


@pytest.mark.slow
@cases(0.3)
@given(tiers(), ROUNDS, HOW)
def test_tiers_equal_the_plain_loop_and_runs_do_not_mix(case, rounds, how):
    algorithm, task, module, seeds = case
    state = algorithm.init(task, seeds)
    expected = [
        exchanging(algorithm, task, module, x, seed, r, rounds)
        for r, (x, seed) in enumerate(zip(state.x, seeds, strict=True))
    ]

    def objective(x):
        blocks = x.split(len(x) // task.N)
        out = sum(plain(module, b)(f).detach() for b, f in zip(blocks, task.x, strict=True))
        return PLAIN[task.loss_name](out, task.y)

    check_near(simulated(algorithm, task, state, rounds, how), expected, objective)
    together = simulated(algorithm, task, state, rounds)
    for r, seed in enumerate(seeds):
        single = of_one(algorithm, r)
        alone = simulated(single, task, single.init(task, (seed,)), rounds)
        check_same(alone.state.x[0], together.state.x[r], padded=True)
