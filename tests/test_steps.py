"""Local rules against plain loops over one copy at a time, in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from fedlib.engine import models, steps
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.local import BACKENDS, local_sgd
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError

C, T, B, M, LR = 5, 4, 3, 12, 0.2
RNG = np.random.default_rng(0)
X, Y = torch.from_numpy(RNG.standard_normal((M, 6))), torch.from_numpy(RNG.integers(0, 3, M))
ROWS = torch.from_numpy(RNG.integers(0, M, (T, C, B)))
BATCHES = [Batch(rows) for rows in ROWS]
MODELS = {
    "dense": lambda: models.mlp(6, 5, 3),
    "module": lambda: models.Model(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
}
L2 = 0.05


def problem(name="dense"):
    task = Task(MODELS[name](), FederatedDataset.build(X, Y, [np.arange(M)]), l2=L2)
    return task, task.init(range(C))


def normal(*shape, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def module_gradient(name, theta, rows):
    """One copy's gradient from torch alone: a module, its loss, ``backward``."""
    layers = [nn.Linear(6, 5), nn.ReLU() if name == "dense" else nn.Tanh(), nn.Linear(5, 3)]
    module = nn.Sequential(*layers).double()
    nn.utils.vector_to_parameters(theta, module.parameters())
    nn.functional.cross_entropy(module(X[rows]), Y[rows]).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()]) + L2 * theta


def plain_loop(name, theta, rule):
    """One copy after the other; ``rule(c, t, w, g, gradient, memory) -> w`` is the step."""
    out = []
    for c in range(C):
        w, memory = theta[c].clone(), {}
        for t in range(T):
            gradient = lambda at, rows=ROWS[t, c]: module_gradient(name, at, rows)  # noqa: E731
            w = rule(c, t, w, gradient(w), gradient, memory)
        out.append(w)
    return torch.stack(out)


ANCHOR, EXTRA, FULL = (normal(C, problem()[0].size, seed=s) for s in (2, 3, 4))
MASK, PULL = EXTRA > 0, torch.tensor([[0.0], [0.1], [0.4], [0.2], [0.9]]).double()


def with_momentum(c, t, w, g, gradient, memory):
    memory["v"] = 0.9 * memory.get("v", 0) + g
    return w - LR * memory["v"]


def clipped_momentum(c, t, w, g, gradient, memory):
    return with_momentum(c, t, w, g * min(1, 0.3 / g.norm().item()), gradient, memory)


RULES = {  # name: step, extras, the same by hand
    "sgd": (steps.sgd, {}, lambda c, t, w, g, gradient, memory: w - LR * g),
    "proximal": (
        steps.proximal(0.7),
        dict(anchor=ANCHOR),
        lambda c, t, w, g, gradient, memory: w - LR * (g + 0.7 * (w - ANCHOR[c])),
    ),
    "proximal, each row its own": (
        steps.proximal(),
        dict(anchor=ANCHOR, mu=PULL),
        lambda c, t, w, g, gradient, memory: w - LR * (g + PULL[c] * (w - ANCHOR[c])),
    ),
    "corrected": (
        steps.corrected(),
        dict(correction=EXTRA),
        lambda c, t, w, g, gradient, memory: w - LR * (g + EXTRA[c]),
    ),
    "svrg": (
        steps.svrg(),
        dict(anchor=ANCHOR, full=FULL),
        lambda c, t, w, g, gradient, memory: w - LR * (g - gradient(ANCHOR[c]) + FULL[c]),
    ),
    "momentum": (steps.momentum(0.9), {}, with_momentum),
    "clip": (
        steps.clip(0.3),
        {},
        lambda c, t, w, g, gradient, memory: w - LR * g * min(1, 0.3 / g.norm().item()),
    ),
    "masked": (
        steps.masked(),
        dict(mask=MASK),
        lambda c, t, w, g, gradient, memory: w - LR * g * MASK[c],
    ),
    "one after the other": (steps.clip(0.3, then=steps.momentum(0.9)), {}, clipped_momentum),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_its_formula_with_every_backend_and_cut(name, model):
    (step, extras, rule), (task, theta) = RULES[name], problem(model)
    expected, before = plain_loop(model, theta, rule), theta.clone()
    assert name == "sgd" or (expected - local_sgd(task, theta, BATCHES, LR)).abs().max() > 1e-3
    for backend in BACKENDS:
        for copies in (0, 1, 2):
            found = local_sgd(task, theta, BATCHES, LR, copies, backend, step, extras)
            assert (found - expected).abs().max() < 1e-12
    assert torch.equal(theta, before)


def test_every_copy_may_have_a_rate_of_its_own():
    task, theta = problem()
    rates = torch.linspace(0.1, 0.5, C, dtype=torch.float64)
    found = local_sgd(task, theta, BATCHES, rates, 2, step=steps.sgd)
    hand = plain_loop("dense", theta, lambda c, t, w, g, gradient, memory: w - rates[c] * g)
    assert (found - hand).abs().max() < 1e-12


def test_what_a_rule_writes_into_extras_is_the_callers():
    """Momentum over two calls is momentum over all steps, however the rows are cut."""
    task, theta = problem()
    whole = local_sgd(task, theta, BATCHES, LR, step=steps.momentum(0.9))
    for copies in (0, 1, 2):
        kept = dict(velocity=torch.zeros_like(theta))
        half = local_sgd(
            task, theta, BATCHES[:2], LR, copies, step=steps.momentum(0.9), extras=kept
        )
        full = local_sgd(task, half, BATCHES[2:], LR, copies, step=steps.momentum(0.9), extras=kept)
        assert (full - whole).abs().max() < 1e-14 < kept["velocity"].abs().min()


def test_a_rule_sees_its_samples_saga():
    """SAGA keeps one gradient a copy and sample: a table that travels with the rows."""
    task, theta = problem()
    single = [Batch(rows[:, :1]) for rows in ROWS]
    table = normal(C, M, task.size, seed=5)

    def saga(now):
        each, rows = torch.arange(len(now.theta)), now.batch.rows[:, 0]
        old, mean = now.extras["table"][each, rows], now.extras["table"].mean(1)
        now.extras["table"][each, rows] = now.gradient
        return now.theta - now.rate * (now.gradient - old + mean)

    expected, tables = theta.clone(), table.clone()
    for c in range(C):
        for t in range(T):
            i = ROWS[t, c, 0]
            g = module_gradient("dense", expected[c], ROWS[t, c, :1])
            expected[c] -= LR * (g - tables[c, i] + tables[c].mean(0))
            tables[c, i] = g
    for copies in (0, 1, 2):
        kept = table.clone()
        found = local_sgd(task, theta, single, LR, copies, step=saga, extras=dict(table=kept))
        assert (found - expected).abs().max() < 1e-12 and (kept - tables).abs().max() < 1e-12


def test_the_number_of_cores_does_not_change_a_bit():
    task, theta = problem("module")
    before, found = torch.get_num_threads(), []
    for cores in (1, 2):
        torch.set_num_threads(cores)
        step = steps.proximal(0.7, then=steps.momentum(0.9))
        found.append(
            local_sgd(task, theta, BATCHES, LR, 1, "threads", step, dict(anchor=ANCHOR)),
        )
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_extras_without_a_row_for_every_copy_are_refused():
    task, theta = problem()
    for wrong, came in ((ANCHOR[:2], rf"\(2, {task.size}\)"), (0.5, "0.5")):
        with pytest.raises(FedlibError, match=rf"extras\['anchor'\] is {came}.*each of the 5"):
            local_sgd(task, theta, BATCHES, LR, step=steps.sgd, extras=dict(anchor=wrong))


@pytest.mark.parametrize(
    "rule, came", [(lambda now: None, "None"), (lambda now: now.theta[:, 0], "5,")]
)
def test_a_rule_that_returns_something_else_is_refused(rule, came):
    task, theta = problem()
    with pytest.raises(FedlibError, match=f"returned .*{came}.*Expected the rows' next parameters"):
        local_sgd(task, theta, BATCHES, LR, step=rule)


CHAINS = {
    "proximal": (steps.proximal, (0.7,)), "corrected": (steps.corrected, ()),
    "svrg": (steps.svrg, ()), "momentum": (steps.momentum, (0.9,)),
    "masked": (steps.masked, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_a_rule_hands_on_to_the_next(name):
    """With clipping behind it no rule moves a row further than the clipped steps reach."""
    make, arguments = CHAINS[name]
    task, theta = problem()
    extras = dict(anchor=ANCHOR.clone(), full=FULL, correction=EXTRA, mask=MASK)
    step = make(*arguments, then=steps.clip(0.01))
    moved = local_sgd(task, theta, BATCHES, LR, step=step, extras=extras) - theta
    assert (moved.norm(dim=1) <= LR * 0.01 * T + 1e-12).all()
    assert moved.norm() > 0.001, "and yet they move"
