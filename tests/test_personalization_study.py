"""What the personalization chapter runs: phases, looks, costs, weights, rates side by side."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib.engine.draws import upload
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, records, tuning
from fedlib.lab.job import Job
from fedlib.lab.studies import personalization as study
from fedlib.lab.studies import personalization_theorems as theorems
from fedlib.lab.studies.personalization_people import Judges, people
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
from fedlib.papers.personalization.discrepancy import estimate, halves

S = dict(
    kind="", where="", title="", seeds=2, split="halves", clients=6, samples=20, judging=0.25,
    features=5, model=["softmax", 5, 2], l2=0.01, local_steps=2, batch_size=4, rounds=14, looks=7,
    lam=30.0, inner_lr=0.05, pull=1.0, mixing=0.5, tune_steps=2, clusters=2,
)  # fmt: skip


def build_task(s, population):
    return study.build_task(s, population.train, "cpu", population.x, population.y)


def outcome(*runs, **changes):
    named = [dict(run=run.get("run", run["method"]), lr=0.3) | run for run in runs]
    return study.serving(Job({**S, **changes, "runs": named}, (1, 2), progress=False))


def served(*runs, **changes):
    return outcome(*runs, **changes).frame


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


def test_what_an_experiment_says_is_what_a_method_gets():
    """No setting has the value that it has by default."""
    said = S | dict(
        lam=7.0, inner_lr=0.2, pull=3.0, mixing=0.25, tune_steps=3, visits="printed", unbiased=True,
        clusters=4,
    )
    lr, population = (0.3, 0.4), people(S, (1, 2))
    mixing, groups = Mixing(7.0, unbiased=True), population.groups
    expected = {
        "perm": PERM(lr, 2, 4, "printed", mixing=mixing, global_lr=lr),
        "perm-each-round": PERM(lr, 2, 4, "printed", mixing=mixing, global_lr=lr, refresh=1),
        "two-stage": ShuffledSGD(lr, 2, 4, "printed"),
        "fedavg": LocalizedFedAvg(lr, 2, 4, tune_steps=0),
        "localized": LocalizedFedAvg(lr, 2, 4, tune_steps=3),
        "per-fedavg": PerFedAvg(lr, 2, 4, inner_lr=0.2),
        "pfedme": PFedMe(lr, 2, 4, inner_lr=0.2, lam=3.0),
        "ditto": Ditto(lr, 2, 4, lam=3.0),
        "apfl": APFL(lr, 2, 4, mixing=0.25),
        "apfl-adaptive": APFL(lr, 2, 4, mixing=0.25, adaptive=True),
        "ifca": IFCA(lr, 2, 4, clusters=4),
        "local": LocalOnly(lr, 2, 4),
        "oracle": Oracle(lr, 2, 4, groups=groups),
    }
    basic = (lr, 2, 4)
    built = {name: build(basic, said, population) for name, build in study.METHODS.items()}
    assert built == expected


def test_the_task_has_the_ridge_that_an_experiment_says():
    population = people(S, (1, 2))
    with_l2, without = (build_task(S | dict(l2=l2), population) for l2 in (0.5, 0.0))
    theta = torch.ones(1, 12)
    apart = with_l2.of(1).client_gradients(theta) - without.of(1).client_gradients(theta)
    assert_allclose(apart, 0.5 * theta.expand(6, -1), rtol=1e-6)
    bare = {k: v for k, v in S.items() if k != "l2"}
    assert build_task(bare, population).l2 == 0


def test_a_run_is_the_algorithm_judged_on_rows_of_each_clients_own():
    frame = served(dict(method="perm"))
    population = people(S, (1, 2))
    task = build_task(S, population)
    perm = PERM((0.3, 0.3), 2, 4, mixing=Mixing(30.0), global_lr=(0.3, 0.3))
    blind = Evaluation(splits=())
    state = simulate(perm, task, 14, (1, 2), progress=False, evaluation=blind).state
    for split, parts in (("train", population.train), ("test", population.judging)):
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


def test_two_stages_by_hand():
    """FedAvg first; weights from the gradients where it ends; then models travel from there."""
    frame = served(dict(method="two-stage", warmup=8))
    population = people(S, (1, 2))
    task, lr, quiet = build_task(S, population), (0.3, 0.3), dict(progress=False)
    quiet["evaluation"] = Evaluation(splits=())
    x = simulate(LocalizedFedAvg(lr, 2, 4, 0), task, 8, (1, 2), **quiet).state.x
    found = estimate(task, x, upload([halves(task.data, (1, 2))], "cpu")[0])
    A = Mixing(30.0).weights(found, None)
    moving = ShuffledSGD(lr, 2, 4)
    start = moving.init(task, (1, 2), x, A)
    v = simulate(moving, task, 6, (1, 2), state=start, **quiet).state.v
    judged = Judges(population.judging, (1, 2))(task, v)["loss"].mean(1)
    for r, seed in enumerate((1, 2)):
        own = float(A[r].diagonal().mean())
        assert_allclose(curve(frame, "two-stage", "weights", "own", seed), own, rtol=1e-6)
        assert curve(frame, "two-stage", seed=seed).loc[14] == pytest.approx(float(judged[r]))


def test_looks_meet_all_phases_of_an_epoch():
    rounds = curve(served(dict(method="perm"), rounds=60, looks=20), "perm").index
    assert {t % 6 for t in rounds if 21 < t < 60} == set(range(6))


def test_runs_with_other_clients_have_other_clients():
    angles = [dict(run=f"{angle}", method="local", angle=angle) for angle in (20.0, 180.0)]
    both = served(*angles)
    for run in angles:
        alone = served(run)
        for split in ("train", "test"):
            pair = (curve(frame, run["run"], split) for frame in (both, alone))
            assert_allclose(*pair, rtol=1e-6)


@pytest.mark.parametrize(
    ("run", "changes", "phase"),
    [
        (dict(method="two-stage", visits="printed", lam=1e-3, warmup=5, lr=0.45), {}, "own"),
        (dict(method="local", warmup=40, lr=0.9), dict(local_steps=3), "warm-up"),
    ],
)
def test_the_round_of_divergence_counts_the_warm_up(run, changes, phase):
    """A ridge of 4 makes steps of 0.9 diverge, and of 0.45 only where a visit counts six times."""
    found = outcome(run, **{"l2": 4.0, "rounds": 200, **changes})
    (lost,) = found.diverged.values()
    assert set(lost) == {1, 2}
    for seed, t in lost.items():
        loss = curve(found.frame, run["method"], seed=seed)
        wild = loss.index[~np.isfinite(loss)]
        assert t == wild[0] and np.isfinite(loss.loc[: t - 1]).all()
        assert (t <= run["warmup"]) == (phase == "warm-up")


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
    found = {k[1]: v.item() for k, v in study.weight_metrics(A, np.array([[0, 0, 1, 1]])).items()}
    assert found["own"] == pytest.approx((0.5 + 0.25 + 1 + 0.01) / 4)
    assert found["outside"] == pytest.approx((0 + 0.5 + 0 + 0.01) / 4)
    assert found["listened"] == 4
    row = -(0.01 * np.log(0.005) + 0.98 * np.log(0.98) + 0.01 * np.log(0.01))
    assert found["entropy"] == pytest.approx((np.log(2) + np.log(4) + 0 + row) / 4 / np.log(4))


def test_halves_are_compared_with_guessing():
    frame, population = served(dict(method="local")), people(S, (1, 2))
    for k in range(2):
        rows = np.concatenate(population.judging[2][3 * k : 3 * k + 3])
        guess = max(population.y[rows].mean(), 1 - population.y[rows].mean())
        accuracy = curve(frame, "local", f"group {k}", "accuracy", 2)
        assert_allclose(curve(frame, "local", f"group {k}", "above guessing", 2), accuracy - guess)
    mean = sum(curve(frame, "local", f"group {k}", "accuracy", 2) for k in range(2)) / 2
    assert_allclose(mean, curve(frame, "local", "test", "accuracy", 2))


def test_the_most_frequent_class_is_that_of_the_rows_that_judge_one_kind():
    held = SimpleNamespace(
        y=np.array([0, 0, 1, 2, 2, 1, 1]),
        judging={7: [np.array([0, 1, 2]), np.array([3, 4]), np.array([5])]},
        groups={7: np.array([0, 1, 1])},
    )
    assert [study.majority(held, 7, kind) for kind in range(3)] == [2 / 3, 2 / 3, 0]


def test_fedavg_is_fedavg():
    frame = served(dict(method="fedavg"), dict(method="localized"))
    population = people(S, (1, 2))
    task = build_task(S, population)
    plain = LocalizedFedAvg((0.3, 0.3), 2, 4, 0)
    blind = Evaluation(splits=())
    x = simulate(plain, task, 14, (1, 2), progress=False, evaluation=blind).state.x
    judged = Judges(population.judging, (1, 2))(task, x.unsqueeze(1).expand(-1, 6, -1))
    assert curve(frame, "fedavg").iloc[-1] == pytest.approx(float(judged["loss"][0].mean()))
    assert curve(frame, "localized").iloc[-1] != curve(frame, "fedavg").iloc[-1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(method="fedsgd"), "Unknown method of run 'last' 'fedsgd'"),
        (dict(model=["forest", 3]), "Unknown model 'forest'"),
        (dict(model=[]), "model is empty"),
        (dict(model=["softmax"]), "Expected .'softmax', features, classes"),
        (dict(model=["softmax", "5", 2]), "Expected .'softmax', features, classes"),
        (dict(model=["softmax", 9, 2]), r"samples are \[5\], 5 features"),
        (dict(split="thirds"), "Unknown split 'thirds'"),
        (dict(split="random"), "split 'random' needs dataset"),
        (dict(split="classes", dataset="digits"), "split 'classes' needs classes"),
        (dict(split="random", dataset="digit"), "Did you mean 'digits'"),
        (dict(judging=1.5), "judging is the share .* got 1.5"),
        (dict(clients=1), "Two halves have two clients or more; got clients = 1"),
        (dict(samples=1), "too few samples: of 1, judging = 0.25 leaves 1 to learn from and 0"),
        (dict(features=1, model=["softmax", 1, 2]), "1 features leave no second direction"),
        (dict(method="perm", visits="often"), "Unknown visits of run 'last'"),
        (dict(method="apfl", mixing=1.5), "Run 'last': mixing is a share, at most 1; got 1.5"),
        (dict(warmup=14), "14 rounds of warm-up leave none of 14"),
        (dict(batch_size=50), "a minibatch of 50, and clients learn from 15 samples"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_computed(change, match, monkeypatch):
    def computed(*_, **__):
        raise AssertionError("a run was carried out")

    monkeypatch.setattr(study, "simulate", computed)
    own = {k: v for k, v in dict(run="last", method="perm", lr=0.3).items() if k not in change}
    first = [] if change.keys() & {"features"} else [dict(method="local")]
    with pytest.raises(FedlibError, match=match):
        served(*first, own | change)


@pytest.mark.parametrize(
    "change",
    [
        dict(method="apfl", mixing=1.0),
        dict(warmup=13),
        dict(batch_size=15),
        dict(clients=2),
        dict(samples=4, judging=0.5, batch_size=2),
        dict(features=2, model=["mlp", 2, 3, 2]),
    ],
)
def test_what_can_just_be_served_is(change):
    frame = served(dict(run="edge", method="perm") | change)
    assert np.isfinite(curve(frame, "edge")).all()


@pytest.mark.parametrize("name", study.METHOD_NEEDS)
def test_a_method_says_what_it_lacks(name):
    for key in study.METHOD_NEEDS[name]:
        bare = {k: v for k, v in S.items() if k != key}
        job = Job(bare | dict(runs=[dict(run="a", method=name, lr=0.3)]), (1,), progress=False)
        with pytest.raises(FedlibError, match=f"Run 'a': the method '{name}' needs {key}. Set it"):
            study.serving(job)


RATES = dict(
    clients=4, local_steps=1, kappa=3.0, dim=2, lam=2.0, copies=1, rounds_grid=[4], noise=0.0,
    order="fixed", stages=1, global_noise=0.0, global_batch=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(clients=1), "two clients or more can differ; got 1"),
        (dict(kappa=0.5), "kappa = L/mu is 1 or more; got 0.5"),
        (dict(rounds_grid=[]), "rounds_grid is empty"),
        (dict(order="often"), "Unknown order of run 'b' 'often'"),
        (dict(stages=3), "stages of run 'b' '3'. Valid: 1, 2"),
    ],
)
def test_rates_that_cannot_be_measured_are_refused_in_a_sentence(change, match):
    job = Job(RATES | dict(runs=[dict(run="a"), dict(run="b") | change]), (1,), progress=False)
    for carry_out in (theorems.rates_of_weights, theorems.rates_of_models, theorems.single_loop):
        with pytest.raises(FedlibError, match=match):
            carry_out(job)


@pytest.mark.parametrize("figure", ["fig1", "fig2"])
def test_what_has_a_rate_as_a_number_has_the_one_that_was_tuned(figure):
    best = tuning.table(records.load("personalization", f"rates-{figure}", "quick").frame)
    best = best.set_index("method")["at"]
    given = [run for run in catalogue.settings("personalization", f"{figure}-more", "quick")["runs"]
             if run["lr"] != "tuned"]  # fmt: skip
    assert len(given) > 3
    for run in given:  # all that is called PERM, in whichever reading, has PERM's
        assert run["lr"] == pytest.approx(best[run["run"].partition(",")[0]], rel=1e-4)


def test_each_seed_pays_for_its_own_clients():
    """PERM's gradients at an epoch's end count in minibatches of what its clients hold."""
    algorithm = study.PERM(0.1, 2, 5)
    sizes = {1: [10, 20], 2: [30, 40]}
    frame = pd.DataFrame(dict(seed=[1, 2, 1, 2], round=[1, 1, 2, 2]))
    told = study._dated(frame, algorithm, 0, 2, sizes)
    assert told["gradients"].tolist() == [2, 2, 4 + 2 * 15 / 5, 4 + 2 * 35 / 5]
    assert told["models"].tolist() == [2, 2, 4 + 4, 4 + 4]


def test_what_keeps_weights_of_one_seed_is_made_by_itself():
    """Else a record would have more rows, or fewer, for what is carried out beside it."""
    s = catalogue.settings("personalization", "fig3", "smoke")
    assert study.serving.alike(s) == set()
    for other in ({"clients": 10**3}, {"runs": [dict(run="a", method="local")]}):
        assert study.serving.alike(s | other) == {"seeds", "runs"}
