"""The exact identities of the participation paper's specification, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib.engine.data import FederatedDataset
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.models import linear, softmax
from fedlib.engine.simulation import simulate
from fedlib.engine.tasks import Task
from fedlib.lab.trials import TRIALS
from fedlib.papers import fedavg
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation.algorithm import GeneralizedFedAvg, WaitFull, WaitMinibatch
from fedlib.papers.participation.toy import toy_task
from fedlib.population import participation as pt

N = 6


def regression(identical=False):
    """Least squares, six clients with eight samples each."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8 * N, 3)), rng.standard_normal(8 * N)
    if identical:
        x, y = np.tile(x[:8], (N, 1)), np.tile(y[:8], N)
    parts = np.arange(8 * N).reshape(N, 8)
    return Task(linear(3), FederatedDataset.build(x, y, list(parts)), "half_square")


def classification():
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((12 * N, 4)), rng.integers(0, 3, 12 * N)
    parts = list(np.arange(12 * N).reshape(N, 12))
    return Task(softmax(4, 3), FederatedDataset.build(x, y, parts))


def run(algorithm, task, rounds, seeds=(0, 1)):
    state, path = algorithm.init(task, seeds), []
    for _ in range(rounds):
        path.append(state.x)
        state, _ = algorithm.round(state, task)
    return torch.stack([*path, state.x]), state


SOME = pt.Independent(N, 2)
MINI = dict(lr=0.05, local_steps=3, batch_size=4)


def test_01_without_amplification_the_interval_is_irrelevant():
    task = classification()
    reference, _ = run(FedAvg(SOME, **MINI), task, 9)
    for P in (1, 2, 4):
        path, _ = run(GeneralizedFedAvg(SOME, amplify=1.0, interval=P, **MINI), task, 9)
        assert torch.equal(path, reference)


def test_02_interval_one_is_a_server_rate():
    task = classification()
    path, _ = run(GeneralizedFedAvg(SOME, amplify=2.5, interval=1, **MINI), task, 6)
    state = FedAvg(SOME, **MINI).init(task, (0, 1))
    for t in range(6):
        after, _ = FedAvg(SOME, **MINI).round(state, task)
        x = state.x + 2.5 * (after.x - state.x)
        state = replace(after, x=x)
        assert torch.allclose(path[t + 1], x, atol=1e-13)


def test_03_accumulator_equals_reference_weights():
    task, eta, P = classification(), 3.0, 4
    path, _ = run(GeneralizedFedAvg(SOME, amplify=eta, interval=P, **MINI), task, 12)
    plain = FedAvg(SOME, **MINI)
    state = plain.init(task, (0, 1))
    reference, u = state.x, torch.zeros_like(state.x)
    for t in range(12):
        before = state.x
        state, _ = plain.round(state, task)
        u = u + (state.x - before)
        if (t + 1) % P == 0:
            x = state.x + (eta - 1) * (state.x - reference)
            assert torch.allclose(x, reference + eta * u, atol=1e-13)
            state = replace(state, x=x)
            reference, u = x, torch.zeros_like(u)
        assert torch.allclose(path[t + 1], state.x, atol=1e-13)


def test_04_full_participation_is_gradient_descent():
    task = regression()
    path, _ = run(FedAvg(pt.Full(N), lr=0.1), task, 5, seeds=(0,))
    x = path[0]
    for t in range(5):
        gradients = task.client_gradients(x)
        x = x - 0.1 * gradients.mean(0)
        assert torch.allclose(path[t + 1], x, atol=1e-13)
    q = pt.Full(N).weights(0, 0, 1)[0]
    centred = task.client_gradients(x) - task.client_gradients(x).mean(0)
    assert (torch.from_numpy(q) @ centred).norm() < 1e-14


def test_05_one_step_one_round_only_the_product_matters():
    task = classification()
    a, _ = run(GeneralizedFedAvg(SOME, lr=0.02, amplify=5.0, batch_size=4), task, 8)
    b, _ = run(FedAvg(SOME, lr=0.1, batch_size=4), task, 8)
    assert torch.allclose(a, b, atol=1e-13)


def test_06_clients_with_weight_zero_have_no_effect():
    task = classification()
    q = np.zeros((2, N))
    q[0, [0, 3]] = q[1, [1, 3]] = 0.5
    path, _ = run(GeneralizedFedAvg(pt.Trace(q), amplify=2.0, interval=2, **MINI), task, 6)
    task.data.x[task.data.parts[5]] += 100.0
    again, _ = run(GeneralizedFedAvg(pt.Trace(q), amplify=2.0, interval=2, **MINI), task, 6)
    assert torch.equal(path, again)
    task.data.x[task.data.parts[3]] += 100.0
    other, _ = run(GeneralizedFedAvg(pt.Trace(q), amplify=2.0, interval=2, **MINI), task, 6)
    assert not torch.equal(path, other)


TABLE = [  # gamma, eta, x_3, x_15, |x_15 - x*|
    (0.05, 1, (0.85975, 1.80135), (0.47223, 1.25247), 0.82389),
    (0.1, 1, (0.738, 1.63121), (0.23226, 0.91932), 0.41339),
    (0.25, 1, (0.46875, 1.27676), (0.09336, 0.76571), 0.21023),
    (0.5, 1, (0.25, 1.11603), (0.14288, 0.98977), 0.43647),
    (0.05, 2, (0.7195, 1.60271), (0.20009, 0.86702), 0.35205),
    (0.05, 5, (0.29875, 1.00676), (0.01856, 0.60991), 0.03748),
    (0.05, 10, (-0.4025, 0.01353), (0.00282, 0.58761), 0.01064),
]


def toy(gamma, eta, rounds=15, local_steps=1):
    task = toy_task()
    algorithm = GeneralizedFedAvg(pt.Cyclic(3), gamma, eta, 3, local_steps)
    state = algorithm.init(task, [0], x=torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    path = [state.x[0]]
    for _ in range(rounds):
        state, _ = algorithm.round(state, task)
        path.append(state.x[0])
    return torch.stack(path)


@pytest.mark.parametrize("gamma, eta, x3, x15, distance", TABLE)
def test_14_toy_table(gamma, eta, x3, x15, distance):
    path = toy(gamma, eta)
    optimum = torch.tensor([0.0, 3**0.5 / 3], dtype=torch.float64)
    assert np.abs(path[3].numpy() - x3).max() < 6e-6
    assert np.abs(path[15].numpy() - x15).max() < 6e-6
    assert (path[15] - optimum).norm().item() == pytest.approx(distance, abs=6e-6)


def test_14_toy_contraction_stability_and_fixed_point():
    gamma, a = 0.05, 0.95**3
    z = toy_task().data.x
    fixed = gamma * (0.95**2 * z[0] + 0.95 * z[1] + z[2]) / (1 - a)
    for eta in (1.0, 2.0, 5.0, 10.0, 14.0):
        path = toy(gamma, eta, rounds=30)[::3]
        ratio = (path[1:] - fixed) / (path[:-1] - fixed)
        assert torch.allclose(ratio, torch.full_like(ratio, 1 - eta * (1 - a)), atol=1e-9)
    assert 2 / (1 - a) == pytest.approx(14.02, abs=0.01)
    assert toy(gamma, 14.1, 900)[-1].norm() > 10 and toy(gamma, 13.9, 900)[-1].norm() < 10


def test_15_identical_clients_make_participation_irrelevant():
    task = regression(identical=True)
    algorithm = dict(lr=0.05, amplify=2.0, interval=3, local_steps=2)
    reference, _ = run(GeneralizedFedAvg(pt.Full(N), **algorithm), task, 7)
    for process in (SOME, pt.Cyclic(N), pt.Markov(N), pt.Regularized(N, 3)):
        path, _ = run(GeneralizedFedAvg(process, **algorithm), task, 7)
        assert torch.allclose(path, reference, atol=1e-13)


def test_16_incomplete_last_interval_is_not_amplified():
    task = classification()
    amplified, state = run(GeneralizedFedAvg(SOME, amplify=4.0, interval=5, **MINI), task, 4)
    plain, _ = run(FedAvg(SOME, **MINI), task, 4)
    assert torch.equal(amplified, plain)
    assert torch.allclose(state.u, state.x - amplified[0], atol=1e-14)


def test_17_waiting_is_full_participation_once_an_interval():
    task = classification()
    waiting, _ = run(WaitMinibatch(SOME, interval=4, **MINI), task, 12)
    everyone, _ = run(FedAvg(pt.Full(N), **MINI), task, 3)
    for t in range(12):
        assert torch.allclose(waiting[t], everyone[t // 4], atol=1e-13)
    full = dict(lr=0.05, local_steps=3)
    a, _ = run(WaitFull(SOME, interval=2, **full), task, 4, seeds=(0,))
    start = WaitFull(SOME, interval=2, **full).init(task, (9,), x=a[0])
    for _ in range(4):
        start, _ = WaitFull(SOME, interval=2, **full).round(start, task)
    assert torch.equal(a[-1], start.x)


def test_18_toy_local_steps_act_as_one_larger_step():
    for steps in (2, 5):
        merged = 1 - (1 - 0.05) ** steps
        assert torch.allclose(toy(0.05, 3.0, 12, steps), toy(merged, 3.0, 12), atol=1e-13)


def test_runs_side_by_side_equal_runs_alone():
    task = classification()
    algorithm = GeneralizedFedAvg(pt.Markov(N), amplify=2.0, interval=2, **MINI)
    together, _ = run(algorithm, task, 30, seeds=(5, 6, 7))
    widths = [{len(algorithm.participation.draw(s, t)[0]) for s in (5, 6, 7)} for t in range(30)]
    assert sum(len(width) > 1 for width in widths) > 10, "short rows are padded"
    for r, seed in enumerate((5, 6, 7)):
        alone, _ = run(algorithm, task, 30, seeds=(seed,))
        assert torch.allclose(together[:, r], alone[:, 0], atol=1e-13)


def test_padding_reads_nothing_and_computes_nothing_of_anybody_else():
    """Client 0, whose data are not finite, takes part in no run; a short row is padded."""
    task = classification()
    task.data.x[task.data.parts[0]] = float("nan")

    class Uneven(pt.Participation):
        def draw(self, seed, t):
            return pt.equal(np.array([3]) if seed else np.array([2, 1, 4]))

    clients, q = Uneven(N).cohort((0, 1), 0)
    assert clients.tolist() == [[2, 1, 4], [3, 3, 3]] and q[1].tolist() == [1, 0, 0]
    algorithm = FedAvg(Uneven(N), **MINI)
    state, _ = algorithm.round(algorithm.init(task, [0, 1]), task)
    assert state.cursor.tolist() == [[0, 3, 3, 0, 3, 0], [0, 0, 0, 3, 0, 0]]
    assert torch.isfinite(state.x).all()
    alone, _ = algorithm.round(algorithm.init(task, [1]), task)
    assert torch.equal(state.x[1], alone.x[0])


def test_a_client_drawn_twice_trains_twice_from_the_same_model():
    task = classification()

    class Twice(pt.Participation):
        def draw(self, seed, t):
            return pt.equal(np.array([2, 2]))

    algorithm = FedAvg(Twice(N), **MINI)
    state, _ = algorithm.round(algorithm.init(task, [0]), task)
    assert state.cursor[0].tolist() == [0, 0, 6, 0, 0, 0]


def test_simulate_matches_the_bare_loop_and_reports_divergence():
    task = classification()
    algorithm = FedAvg(SOME, **MINI)
    path, _ = run(algorithm, task, 6)
    history = simulate(algorithm, task, 6, (0, 1), evaluation=Evaluation(4), progress=False)
    assert torch.equal(history.state.x, path[-1])
    assert history.frame["round"].unique().tolist() == [0, 4, 6] and not history.diverged
    assert set(history.frame.columns) == {
        "run",
        "seed",
        "round",
        "clock",
        "split",
        "metric",
        "value",
    }
    wild = simulate(FedAvg(pt.Full(N), lr=1e3), regression(), 500, (0, 1), progress=False)
    assert set(wild.diverged) == {("", 0), ("", 1)} and wild.state.t < 500


def test_fedavg_knows_nothing_of_amplification():
    with pytest.raises(TypeError, match="amplify"):
        FedAvg(SOME, amplify=10, **MINI)


def test_room_is_asked_for_every_copy_of_every_run(monkeypatch):
    asked = []
    monkeypatch.setattr(fedavg, "check_room", lambda *given: asked.append(given[:3]))
    algorithm, task = TRIALS["FedAvg, mlp"](np.float64)
    algorithm.round(algorithm.init(task, (1, 2, 3)), task)
    S = algorithm.participation.cohort((1,), 0)[0].shape[1]
    assert asked == [(3 * S, task.size, 4)]


def test_an_interval_begins_where_the_warm_up_ended():
    task = classification()
    algorithm = GeneralizedFedAvg(SOME, amplify=3.0, interval=3, **MINI)
    x = task.init((0, 1))
    state = algorithm.init(task, (0, 1), x, t=7)
    plain = FedAvg(SOME, **MINI)
    other = plain.init(task, (0, 1), x, t=7)
    for _ in range(3):
        state, _ = algorithm.round(state, task)
        other, _ = plain.round(other, task)
    assert state.t == other.t == 10 and (other.x - x).norm() > 0.01
    assert torch.allclose(state.x, x + 3.0 * (other.x - x), atol=1e-13)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_everyone_comes_in_pieces_and_moves_the_model_as_one(batch_size):
    rng, many = np.random.default_rng(2), 120
    x, y = rng.standard_normal((2 * many, 3)), rng.standard_normal(2 * many)
    parts = list(np.arange(2 * many).reshape(many, 2))
    task = Task(linear(3), FederatedDataset.build(x, y, parts), "half_square")
    both = dict(lr=0.1, local_steps=2, batch_size=batch_size)
    waiting, _ = run(WaitMinibatch(pt.Cyclic(many), **both), task, 2)
    at_once, _ = run(FedAvg(pt.Full(many), **both), task, 2)
    assert torch.allclose(waiting, at_once, atol=1e-13)
