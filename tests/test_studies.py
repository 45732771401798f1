"""What the studies build, run and record, against the same by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlib import datasets
from fedlib.engine.data import FederatedDataset
from fedlib.engine.models import location
from fedlib.engine.tasks import Task
from fedlib.lab.job import Job
from fedlib.lab.studies import participation as study
from fedlib.lab.studies import tiers as tiers
from fedlib.papers.fedavg import FedAvg
from fedlib.papers.participation import theory, toy
from fedlib.papers.tiers.theory import theorem_1
from fedlib.population.participation import Full

DIGITS = dict(dataset="digits", partition="similarity", clients=10, model=["softmax", 16, 10])
RUN = dict(
    **DIGITS, pool=2, process="periodic", cohort=1, window=100, compression=4, lr=0.01,
    warmup_lr=0.1, warmup_rounds=3, local_steps=2, batch_size=8, rounds=12,
)  # fmt: skip
SILOS = dict(
    dataset="digits", split="halves", loss="cross_entropy", model=["mlp", 4, 10], clients=3,
    samples=90, batch_size=20, evaluate_on=50, aligned=True, seeds=1,
)  # fmt: skip


def job(settings, seeds=(1, 2)):
    return Job(settings, seeds, progress=False)


def values(outcome, **where):
    """Return a study's values, where its columns are as asked."""
    frame = outcome.frame
    for column, wanted in where.items():
        frame = frame[frame[column] == wanted]
    assert len(frame), where
    return frame["value"].to_numpy()


# --- participation -------------------------------------------------------------------------------


def test_training_and_test_rows_are_those_of_the_data_set_pooled():
    held = datasets.load("digits", progress=False)
    task, _ = study.build_task({**DIGITS, "pool": 2}, (0,))
    for mine, x in ((task.data.x, held.train_x), (task.data.test_x, held.test_x)):
        blocks = x.reshape(len(x), 1, 4, 2, 4, 2).mean((3, 5))
        assert np.abs(mine.numpy() - blocks).max() < 1e-6
    assert torch.equal(task.data.y, torch.from_numpy(held.train_y))
    assert torch.equal(task.data.test_y, torch.from_numpy(held.test_y))


@pytest.mark.parametrize(
    ("changes", "lr", "interval"),
    [({}, 0.04, 5), (dict(compress_lr=False), 0.01, 5), (dict(interval=3), 0.04, 1)],
)
def test_time_compressed_by_four(changes, lr, interval):
    s = {**RUN, "algorithm": "generalized-fedavg", "amplify": 3, "interval": 20, **changes}
    algorithm = study.build_algorithm([s], 2)
    assert (algorithm.lr, algorithm.interval, algorithm.amplify) == (lr, interval, 3)
    assert (algorithm.local_steps, algorithm.batch_size) == (2, 8)
    assert (algorithm.participation.window, algorithm.participation.S) == (25, 1)


def test_what_every_algorithm_and_process_is_given():
    plain = study.build_algorithm([{**RUN, "algorithm": "fedavg"}], 2)
    assert isinstance(plain, FedAvg) and plain.lr == 0.04
    assert study.build_algorithm([{**RUN, "algorithm": "wait-minibatch"}], 2).batch_size == 8
    assert study.build_algorithm([{**RUN, "algorithm": "wait-full"}], 2).batch_size is None
    given = {**RUN, "cohort": 2, "speed": 7, "on": 0.2, "off": 0.3, "cap": 4}
    made = {name: study.build_process({**given, "process": name}) for name in study.PROCESSES}
    assert made["full"].N == made["cyclic"].N == made["independent"].N == 10
    assert made["independent"].S == made["regularized"].S == made["drift"].S == 2
    assert made["drift"].speed == 7
    chain = made["markov"]
    assert (chain.on, chain.off, chain.cap) == (0.2, 0.3, 4)


def test_the_warm_up_is_fedavg_at_its_own_rate():
    task, _ = study.build_task({**DIGITS, "pool": 2}, (1, 2))
    process = study.build_process(RUN)
    fedavg = FedAvg(process, lr=0.1, local_steps=2, batch_size=8)
    state = fedavg.init(task, (1, 2))
    for _ in range(3):
        state, _ = fedavg.round(state, task)
    assert torch.equal(study.warm_up(job(RUN), task, process), state.x)


def test_the_toy_starts_at_one_two():
    run = dict(run="a", lr=0.2, amplify=3.0, interval=3)
    outcome = study.toy(job(dict(runs=[run], toy_rounds=7)))
    z = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, math.sqrt(3)]])
    path = toy.toy_run(z, (1.0, 2.0), 0.2, 3.0, 7, 3)
    assert np.allclose(values(outcome, metric="x1"), path[:, 0], atol=1e-12)
    assert np.allclose(values(outcome, metric="x2"), path[:, 1], atol=1e-12)
    away = np.hypot(path[:, 0], path[:, 1] - math.sqrt(3) / 3)
    assert np.allclose(values(outcome, metric="distance"), away, atol=1e-12)


def test_factor_and_squares_are_the_two_bounds_for_unit_heterogeneity():
    s = {**RUN, "runs": [dict(run="a", process="independent", cohort=2)], "intervals": [1, 4]}
    outcome = study.factor(job(s))
    process = study.build_process({**s, **s["runs"][0]})
    for seed in (1, 2):
        for P in (1, 4):
            means = process.weights(seed, 3, 15).reshape(12 // P, P, 10).mean(1)
            where = dict(seed=seed, interval=P)
            (factor,) = values(outcome, metric="factor", **where)
            (squares,) = values(outcome, metric="squares", **where)
            assert factor == pytest.approx(theory.factor(means).mean())
            assert squares == pytest.approx(theory.variance_bound(1.0, means).mean())


def test_heterogeneity_is_measured_at_each_seeds_own_model():
    s = {**RUN, "runs": [dict(run="a", process="cyclic")], "intervals": [4, 10]}
    outcome = study.heterogeneity(job(s))
    task, _ = study.build_task(s, (1, 2))
    start = study.warm_up(job(s), task, study.build_process(s))
    for seed, model in zip((1, 2), start, strict=True):
        gradients = task.of(seed).client_gradients(model).numpy().astype(float)
        away = ((gradients - gradients.mean(0)) ** 2).sum(1)
        found = {m: values(outcome, seed=seed, metric=m) for m in outcome.frame["metric"].unique()}
        assert found["d2"] == pytest.approx(away.max(), rel=1e-5)
        assert found["beta2"] == pytest.approx(away.max(), rel=1e-5)  # one client a round, in turn
        assert found["nu2"] == pytest.approx(0, abs=1e-9) and found["identity gap"] < 1e-12
        four = [gradients[np.arange(t, t + 4) % 10].mean(0) for t in (3, 7, 11)]
        away = [((one - gradients.mean(0)) ** 2).sum() for one in four]
        mean, ten = found["delta2"]
        assert mean == pytest.approx(np.mean(away), rel=1e-5) and ten == pytest.approx(0, abs=1e-9)
        assert found["delta2 max"][0] == pytest.approx(max(away), rel=1e-5)


def test_the_stationary_error_is_that_of_the_second_half():
    data = FederatedDataset.build(np.array([[3.0, 4.0]] * 2), None, [np.array([0]), np.array([1])])
    task = Task(location(2), data, "half_square")
    (error,) = study._stationary_error(job(dict(rounds=4), (0,)), task, FedAvg(Full(2), 0.1))
    assert error == pytest.approx(25 * (0.9**6 + 0.9**8) / 2)


def test_speedup_averages_the_clients_noise():
    run = dict(run="a", samples=50)
    s = dict(clients=4, runs=[run], cohorts=[1, 4], lr=0.2, rounds=600)
    outcome = study.speedup(job(s))
    one, four = (values(outcome, cohort=cohort).mean() for cohort in (1, 4))
    assert 2.5 < one / four < 6


# --- tiers ---------------------------------------------------------------------------------------


def test_norms_of_a_batch_are_allowed_where_the_model_asks_for_them():
    for norm, clients in (("batch", 1), ("group", 3)):
        s = {**SILOS, "model": ["normed_cnn", 10, norm], "clients": clients}
        task, _ = tiers.build_task(s, (0,))
        assert task.batch_norm == (norm == "batch") == task.models[0].normalises


@pytest.mark.parametrize("aligned", [True, False])
def test_columns_and_rows_are_cut_as_asked(aligned):
    held = datasets.load("digits", progress=False)
    task, _ = tiers.build_task({**SILOS, "aligned": aligned}, (1, 2))
    for x, y, mine, labels in (
        (held.train_x[:90], held.train_y[:90], task.x, task.y),
        (held.test_x, held.test_y, task.test_x, task.test_y),
    ):
        assert np.array_equal(labels.numpy(), y)
        assert np.array_equal(np.concatenate([part.numpy() for part in mine], -1), x)
    assert any({*a} != {*b} for a, b in zip(task.splits[1][0], task.splits[2][0], strict=True))
    one, other = task.splits[2]
    assert [len(part) for part in one] == [30] * 3
    same = all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert same == aligned


SWEEP = {**SILOS, "steps": 12, "looks": 9, "clients_grid": [3, 5]}


def test_every_run_of_a_sweep_makes_the_same_local_steps():
    runs = [dict(run=f"Q={Q}", Q=Q, lr=0.3 / Q, crowd="few") for Q in (1, 3)]
    runs += [dict(run="many", Q=3, lr=0.1, crowd="many")]
    outcome = tiers.sweep(job({**SWEEP, "runs": runs}))
    for run, frame in outcome.frame.groupby("run"):
        Q = 1 if run == "Q=1" else 3
        assert (frame["clock"] == Q * frame["round"]).all() and frame["clock"].max() == 12
        assert {0, 1, 2, 12 // Q} <= {*frame["round"]}
        assert (
            frame["lr"].to_numpy() == pytest.approx(0.3 / Q)
            and {*frame["Q"]} == {Q}
            and {*frame["silos"]} == {2}
        )
        assert {*frame["clients"]} == {5 if run == "many" else 3}


def test_rates_side_by_side_are_rates_one_by_one():
    runs = [dict(run=f"{lr}", Q=3, lr=lr) for lr in (0.1, 1e38, 0.4)]
    together = tiers.sweep(job({**SWEEP, "runs": runs}))
    alone = [tiers.sweep(job({**SWEEP, "runs": [run]})) for run in runs]
    for run, outcome in zip(runs, alone, strict=True):
        mine = together.frame[together.frame["run"] == run["run"]]
        assert mine.drop(columns="value").values.tolist() == (
            outcome.frame.drop(columns="value").values.tolist()
        )
        assert np.array_equal(mine["value"], outcome.frame["value"], equal_nan=True)
    assert together.diverged == alone[1].diverged and {*together.diverged} == {"1e+38"}


def test_looks_are_dense_early_and_even_at_the_end():
    found = tiers.log_rounds(600, 30)
    assert found[:4] == [0, 1, 2, 3] and found[-1] == 600 and found == sorted({*found})
    assert 25 <= len(found) <= 32
    ends = np.array([t for t in found if t >= 540])
    assert len(ends) >= 10 and np.diff(ends).max() < 10
    assert tiers.log_rounds(1, 30) == [0, 1]


def test_a_local_step_costs_three_trips_shared_by_q():
    outcome = tiers.latency(job(dict(local_steps=[1, 10])))
    for t_comm in (10, 100):
        for Q in (1, 10):
            where = dict(run=f"t_comm={t_comm}", Q=Q)
            step = 3 * t_comm / Q + 1
            assert values(outcome, metric="step", **where) == pytest.approx(step)
            gain = (3 * t_comm + 1) / step
            assert values(outcome, metric="gain", **where) == pytest.approx(gain)


def test_the_bound_has_the_smoothness_of_the_loss(monkeypatch):
    made = []

    def keep(*args, **options):
        made.append(tiers_task(*args, **options))
        return made[-1]

    tiers_task = tiers.TieredTask
    monkeypatch.setattr(tiers, "TieredTask", keep)
    outcome = tiers.theorem(job(dict(Q=2, rounds_grid=[256])))
    zero = torch.zeros(1, 12, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda x: made[0].loss(x).sum(), zero)
    L = np.linalg.eigvalsh(hessian.reshape(12, 12).numpy()).max()  # steepest where all are unsure
    assert made[0].loss(zero).item() == pytest.approx(math.log(2))
    known = dict(L_max=0.25, gap=math.log(2), sigma2=0.25)
    bound = theorem_1(L=L, lr=2 / (2 * 16 * 0.25), Q=2, rounds=256, **known).total
    assert values(outcome, metric="bound") == pytest.approx(bound)
    measured = values(outcome, metric="measured")
    assert values(outcome, metric="ratio") == pytest.approx(measured.mean() / bound)


def test_delays_have_the_means_of_the_settings(monkeypatch):
    class Seen(Exception):
        pass

    def look(algorithm, *args, **options):
        raise Seen(algorithm)

    monkeypatch.setattr(tiers, "simulate", look)
    run = dict(run="a", wait=True, slow=4, lr=0.3)  # of its own
    s = {**SILOS, "comm": 10, "Q": 5, "lr": 0.1, "tick": 50, "ticks": 2, "runs": [run]}
    with pytest.raises(Seen) as found:
        tiers.waiting(job({**s, "evaluate_every": 1}))
    (algorithm,) = found.value.args
    assert algorithm.lr == 0.3 and algorithm.comm.expected == 10
    assert [law.expected for law in algorithm.comp] == [1, 4]
    assert (algorithm.local_steps, algorithm.batch_size, algorithm.tick) == (5, 20, 50)
    assert algorithm.wait
