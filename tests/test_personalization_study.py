"""What the personalization chapter runs: phases, looks, costs, weights, rates side by side."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.papers.job import Job
from fedlib.papers.personalization import PERM, Mixing, study
from fedlib.papers.personalization.others import LocalizedFedAvg
from fedlib.papers.personalization.people import Judges, people

S = dict(
    kind="", where="", title="", seeds=2, split="halves", clients=6, samples=20, judging=0.25,
    features=5, model=["softmax", 5, 2], l2=0.01, local_steps=2, batch_size=4, rounds=14, looks=7,
    lam=30.0, inner_lr=0.05, pull=1.0, mixing=0.5, tune_steps=2,
)  # fmt: skip


def served(*runs, **changes):
    named = [dict(run=run.get("run", run["method"]), lr=0.3) | run for run in runs]
    return study.serving(Job({**S, **changes, "runs": named}, (1, 2), progress=False)).frame


def curve(frame, run, split="test", metric="loss", seed=1):
    own = frame[(frame["run"] == run) & (frame["split"] == split) & (frame["metric"] == metric)]
    return own[own["seed"] == seed].set_index("round")["value"].sort_index()


def test_every_method_learns_and_tells_the_same_things():
    frame = served(*[dict(method=name) for name in study.METHODS], rounds=24)
    assert set(frame["run"]) == set(study.METHODS)
    for name in study.METHODS:
        for split in ("train", "test"):
            loss = curve(frame, name, split)
            assert np.isfinite(loss).all() and loss.index[0] == 0 and loss.index[-1] == 24
        loss = curve(frame, name, "train")
        assert loss.iloc[-1] < loss.iloc[0], name
    # the same start for all, and no two that go the same way
    first = {curve(frame, name).iloc[0] for name in ("perm", "local", "ditto", "oracle", "fedavg")}
    assert len(first) == 1
    last = [curve(frame, name).iloc[-1] for name in study.METHODS]
    assert len(set(last)) == len(last)


def test_a_run_is_the_algorithm_judged_on_rows_of_each_clients_own():
    frame = served(dict(method="perm"))
    population = people(S, (1, 2))
    task = study.build_task(S, population)
    perm = PERM((0.3, 0.3), 2, 4, mixing=Mixing(30.0), global_lr=(0.3, 0.3))
    state = simulate(perm, task, 14, (1, 2), progress=False, evaluate=lambda s, k: {}).state
    for split, parts in (("train", population.train), ("test", population.own)):
        judged = Judges(parts, (1, 2))(task, state.v)
        for r, seed in enumerate((1, 2)):
            for metric in ("loss", "accuracy"):
                found = curve(frame, "perm", split, metric, seed).iloc[-1]
                assert found == pytest.approx(float(judged[metric][r].mean()), rel=1e-6)


def test_rates_side_by_side_are_the_rates_one_by_one():
    rates = [dict(run=f"{lr}", method="perm", lr=lr) for lr in (0.1, 0.5)]
    both = served(*rates)
    for run in rates:
        alone = served(run)
        for split, metric in (("test", "loss"), ("weights", "entropy")):
            for seed in (1, 2):
                pair = (curve(f, run["run"], split, metric, seed) for f in (both, alone))
                assert_allclose(*pair, rtol=1e-5)
    final = both[both["split"] == "final weights"]
    assert set(final["run"]) == {"0.1"}, "once for runs that differ in their rates"


def test_a_warm_up_is_fedavg_and_is_paid_for():
    frame = served(dict(method="perm", warmup=5), dict(method="fedavg"))
    warm, plain = (curve(frame, name) for name in ("perm", "fedavg"))
    common = [t for t in warm.index if t <= 5]
    assert len(common) >= 3
    assert_allclose(warm[common], plain[common], rtol=1e-6)
    assert warm.index.tolist() == plain.index.tolist(), "looked at in the same rounds"
    assert abs(warm[14] - plain[14]) > 1e-4
    own = frame[(frame["run"] == "perm") & (frame["metric"] == "loss")]
    own = own[(own["split"] == "test") & (own["seed"] == 1)].set_index("round")
    # two models and two gradients a round; an epoch of six rounds adds four models, and the
    # full gradients of 15 samples twice in minibatches of 4
    assert own.loc[5, "models"] == 10 and own.loc[5, "gradients"] == 10
    assert own.loc[14, "models"] == 28 + 4
    assert own.loc[14, "gradients"] == 28 + 2 * 15 / 4
    spent = frame[(frame["split"] == "spent") & (frame["run"] == "perm")]
    assert spent.groupby("metric")["value"].unique().map(list).to_dict() == {
        "models": [32.0], "gradients": [28 + 7.5],
    }  # fmt: skip


def test_two_stages_keep_the_weights_of_the_warm_up():
    frame = served(dict(method="two-stage", warmup=8))
    entropy = curve(frame, "two-stage", "weights", "entropy")
    assert entropy.nunique() == 1 and entropy.index.min() > 8
    assert entropy.iloc[0] < 1


def test_the_final_weights_and_kinds_are_in_the_record():
    frame = served(dict(method="perm"))
    held = frame[frame["split"] == "final weights"]
    A = held[held["metric"] == "weight"].pivot(index="i", columns="j", values="value")
    assert A.shape == (6, 6) and set(held["seed"]) == {1}
    assert_allclose(A.sum(axis=1), 1, rtol=1e-6)
    kinds = held[held["metric"] == "kind"].sort_values("i")["value"].tolist()
    assert kinds == [0, 0, 0, 1, 1, 1]
    own = np.diag(A).mean()
    assert curve(frame, "perm", "weights", "own").iloc[-1] == pytest.approx(own, rel=1e-6)


def test_a_crowd_keeps_no_map_of_its_weights(monkeypatch):
    monkeypatch.setattr(study, "MAPPED", 5)
    frame = served(dict(method="perm"))
    assert "final weights" not in set(frame["split"]) and "weights" in set(frame["split"])


def test_what_is_told_of_weights_by_hand():
    A = torch.tensor([[[0.5, 0.5, 0, 0], [0.25] * 4, [0, 0, 1.0, 0], [0.005, 0.005, 0.98, 0.01]]])
    found = {k[1]: v.item() for k, v in study.told(A, np.array([[0, 0, 1, 1]])).items()}
    assert found["own"] == pytest.approx((0.5 + 0.25 + 1 + 0.01) / 4)
    assert found["outside"] == pytest.approx((0 + 0.5 + 0 + 0.01) / 4)
    assert found["listened"] == 4
    row = -(0.01 * np.log(0.005) + 0.98 * np.log(0.98) + 0.01 * np.log(0.01))
    assert found["entropy"] == pytest.approx((np.log(2) + np.log(4) + 0 + row) / 4 / np.log(4))


def test_halves_are_compared_with_guessing():
    frame, population = served(dict(method="local")), people(S, (1, 2))
    for k in range(2):
        rows = np.concatenate(population.own[2][3 * k : 3 * k + 3])
        guess = max(population.y[rows].mean(), 1 - population.y[rows].mean())
        accuracy = curve(frame, "local", f"group {k}", "accuracy", 2)
        assert_allclose(curve(frame, "local", f"group {k}", "above guessing", 2), accuracy - guess)
    mean = sum(curve(frame, "local", f"group {k}", "accuracy", 2) for k in range(2)) / 2
    assert_allclose(mean, curve(frame, "local", "test", "accuracy", 2))


def test_fedavg_is_fedavg():
    frame = served(dict(method="fedavg"), dict(method="localized"))
    population = people(S, (1, 2))
    task = study.build_task(S, population)
    plain = LocalizedFedAvg((0.3, 0.3), 2, 4, 0)
    x = simulate(plain, task, 14, (1, 2), progress=False, evaluate=lambda s, k: {}).state.x
    judged = Judges(population.own, (1, 2))(task, x.unsqueeze(1).expand(-1, 6, -1))
    assert curve(frame, "fedavg").iloc[-1] == pytest.approx(float(judged["loss"][0].mean()))
    assert curve(frame, "localized").iloc[-1] != curve(frame, "fedavg").iloc[-1]


@pytest.mark.parametrize(
    ("change", "match"), [(dict(method="fedsgd"), "method"), (dict(model=["forest", 3]), "model")]
)
def test_what_is_unknown_is_named(change, match):
    with pytest.raises(FedlibError, match=match):
        served(dict(method="perm") | change)
