"""What the chapter on VFB² runs: splits, goals, times, slopes, attacks, trees, by hand."""

import math
import time

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import sparse
from sklearn.datasets import load_breast_cancer

from fedlib.engine.simulation import OutOfTime
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, claims
from fedlib.lab.evidence.outcomes import OUTSIDE
from fedlib.lab.job import Job
from fedlib.lab.studies import vertical as study
from fedlib.papers.vertical import secure
from fedlib.papers.vertical.runs import Row

S = dict(
    kind="", where="", title="", seeds=2, dataset="breast-cancer", rows=60, tests=40,
    loss="logistic", regulariser="l2", lam=1e-3, parties=4, active=2, lr=0.05, passes=4.0,
    goal=3.0, every=0.25, looks=50, trees=True, prompt=True,
)  # fmt: skip
RUNS = [
    dict(run=f"{name} {method}", method=method, way=way, links="far")
    for method in ("sgd", "svrg", "saga")
    for name, way in (("free", "not waiting"), ("all", "waiting"))
] + [
    dict(run="NonF", method="svrg", way="pooled"),
    dict(run="own", method="svrg", way="own labels"),
]


def race(runs=RUNS, seeds=(1, 2), **changes):
    return study.race(Job({**S, **changes, "runs": runs}, seeds, progress=False)).frame


@pytest.fixture(scope="module")
def table():
    return study.read(S)


@pytest.fixture(scope="module")
def raced():
    return race()


def values(frame, run, metric, split, seed=1):
    own = frame[(frame["run"] == run) & (frame["metric"] == metric) & (frame["split"] == split)]
    return own[own["seed"] == seed].set_index("round")["value"]


# --- who gets what --------------------------------------------------------------------------------


def test_rows_are_scaled_by_those_that_train(table):
    problem, test_x, test_y = study.deal(S, table, 1)
    raw, labels = load_breast_cancer(return_X_y=True)
    assert problem.x.shape == (60, 30) and test_x.shape == (40, 30)
    assert_allclose(problem.x.mean(0), 0, atol=1e-12)
    assert_allclose(problem.x.std(0), 1, atol=1e-12)
    # every scaled row is one of the file's, by the line that two training rows fix, and none twice
    first, second = problem.x[0], problem.x[1]
    known = {tuple(row): k for k, row in enumerate(raw)}
    drawn = study.stream(1, "rows").permutation(569)
    place = [known[tuple(table.x[k])] for k in drawn[:100]]
    assert len(set(place)) == 100
    slope = (raw[place[0]] - raw[place[1]]) / (first - second)
    back = raw[place[0]] + slope * (np.vstack([problem.x, test_x]) - first)
    assert_allclose(back, raw[place], rtol=1e-7, atol=1e-9)
    assert_allclose(np.r_[problem.y, test_y], 2.0 * labels[place] - 1)


def test_ones_and_zeros_stay_and_targets_have_span_1_and_mean_0():
    rng = np.random.default_rng(0)
    x = np.c_[rng.normal(5, 3, 50), rng.integers(0, 2, 50)]
    held = study.AllRows(x, rng.normal(100, 9, 50), True, {})
    s = S | dict(rows=30, tests=20, parties=2, loss="squared")
    problem, test_x, test_y = study.deal(s, held, 3)
    assert set(np.unique(problem.x[:, 1])) == set(np.unique(test_x[:, 1])) == {0.0, 1.0}
    assert abs(problem.x[:, 0].mean()) < 1e-12 < abs(test_x[:, 0].mean())
    assert np.ptp(problem.y) == pytest.approx(1) and abs(problem.y.mean()) < 1e-12
    raw = held.y[study.stream(3, "rows").permutation(50)]
    assert_allclose(test_y, (raw[30:] - raw[:30].mean()) / np.ptp(raw[:30]), rtol=1e-10)


def test_the_commonest_columns_are_kept_and_rows_have_length_1_again():
    x = np.array([[0.0, 1, 2, 0, 0], [3, 4, 0, 0, 5], [6, 7, 0, 0, 0], [0, 0, 0, 9, 0]])
    held = sparse.csr_array(x)
    two = [[0, 1], [0.6, 0.8], [6 / math.sqrt(85), 7 / math.sqrt(85)], [0, 0]]
    assert_allclose(study.commonest(held, 2).toarray(), two)
    kept = study.commonest(held, 3).toarray()
    assert_allclose(kept[0], [0, 1 / math.sqrt(5), 2 / math.sqrt(5)], err_msg="of a tie the first")
    assert_allclose(study.commonest(held, 9).toarray(), x)


def test_sparse_columns_of_the_same_number_are_added_up():
    x = sparse.csr_array(np.array([[1.0, 0, 2, 0, 4], [0, 3, 0, 5, 0]]))
    assert_allclose(study.folded(x, 2).toarray(), [[7, 0], [0, 8]])
    assert_allclose(study.folded(x, 9).toarray()[:, :5], x.toarray())


@pytest.mark.slow
def test_every_seed_has_rows_columns_and_a_slow_party_of_its_own(table):
    one, other = (study.deal(S, table, seed)[0] for seed in (1, 2))
    assert not np.array_equal(one.y, other.y)
    assert any(not np.array_equal(a, b) for a, b in zip(one.blocks, other.blocks, strict=True))
    seen = [study.costs(one, seed, False) * 30 / 4 for seed in range(1, 30)]
    slow = np.array([cost.max() for cost in seen])
    assert ((slow >= 1.3) & (slow <= 1.5)).all() and len(set(slow)) == 29
    assert {int(cost.argmax()) for cost in seen} == {0, 1, 2, 3}
    assert [(cost == 1).sum() for cost in seen] == [3] * 29
    assert_allclose(study.costs(one, 1, True), 4 / 30)
    runs = [study.carried_out({**S, **RUNS[0]}, one, seed).messages.i for seed in (1, 2)]
    assert not np.array_equal(*runs)


@pytest.mark.slow
def test_all_methods_of_a_seed_have_the_same_rows_and_draws(table, raced):
    problem, *_ = study.deal(S, table, 1)
    free, waits = (study.carried_out({**S, **run}, problem, 1).messages for run in RUNS[:2])
    for a in (0, 1):  # a dominator's own draws, as far as it gets
        one, other = (m.i[m.dominator == a] for m in (free, waits))
        assert len(one) > 50 and (one[:100] == other[:100]).all()
    first = [values(raced, run["run"], "loss", "train").iloc[0] for run in RUNS]
    assert_allclose(first, math.log(2), rtol=1e-12)


# --- a race ---------------------------------------------------------------------------------------


def test_loss_gap_and_test_metrics_are_recomputed_naively(table, raced):
    problem, test_x, test_y = study.deal(S, table, 2)
    for run in RUNS[:3]:
        w = study.carried_out({**S, **run}, problem, 2).w
        naive = sum(
            math.log(1 + math.exp(-y * sum(a * b for a, b in zip(x, w, strict=True))))
            for x, y in zip(problem.x, problem.y, strict=True)
        ) / 60 + 1e-3 / 2 * sum(b * b for b in w)
        told = values(raced, run["run"], "loss", "train", 2)
        assert told.iloc[-1] == pytest.approx(naive, rel=1e-12)
        right = [(sum(a * b for a, b in zip(x, w, strict=True)) > 0) == (y > 0)
                 for x, y in zip(test_x, test_y, strict=True)]  # fmt: skip
        assert values(raced, run["run"], "accuracy", "test", 2).item() == pytest.approx(
            sum(right) / 40
        )
    # the best known: where the gradient vanishes, by Newton's method
    w = np.zeros(30)
    for _ in range(50):
        p = 1 / (1 + np.exp(problem.y * (problem.x @ w)))
        gradient = -problem.x.T @ (p * problem.y) / 60 + 1e-3 * w
        hessian = problem.x.T @ (problem.x * (p * (1 - p))[:, None]) / 60 + 1e-3 * np.eye(30)
        w = w - np.linalg.solve(hessian, gradient)
    best = np.log1p(np.exp(-problem.y * (problem.x @ w))).mean() + 1e-3 / 2 * w @ w
    loss, gap = (values(raced, "all sgd", name, "train", 2) for name in ("loss", "log gap"))
    assert_allclose(np.exp(gap), loss - best, rtol=1e-5)


def test_every_run_has_its_passes(raced):
    for run in RUNS:
        last = values(raced, run["run"], "loss", "train").index.max()
        # two snapshots and two passes; the baseline steps for each of two blocks that move
        assert last == pytest.approx(6.0 if run["run"] == "own" else 4.0), run["run"]
    for method in ("sgd", "svrg", "saga"):
        assert study.dominated(method, 30.0) == dict(sgd=30, svrg=15, saga=29)[method]


def test_a_goal_is_the_mean_of_a_tenth_and_the_first_look_at_it_counts():
    rows = [Row(10.0 * k, k / 10, k, 1.0 / (1 + k)) for k in range(41)]
    run = type("R", (), {"rows": rows})
    own = {"all": dict(way="waiting", method="sgd", links="far", goal=2.0),
           "free": dict(way="not waiting", method="sgd", links="far", goal=2.0)}  # fmt: skip
    goals = study.set_goals(own, {"all": run, "free": run})
    assert goals == {("sgd", "far"): pytest.approx(np.mean([1 / 19, 1 / 20, 1 / 21]))}
    there = study.reached(rows, goals["sgd", "far"])
    assert (there.time, there.epoch) == (190.0, 1.9)
    assert study.reached(rows, 1e-9) is None
    twice = own | {"other": own["all"]}
    assert study.set_goals(twice, dict.fromkeys(twice, run)) == {}, "of two, none sets it"


def test_log_speeds_are_those_of_the_runs(table, raced):
    problem, *_ = study.deal(S, table, 1)
    free, waits = (study.carried_out({**S, **run}, problem, 1).rows for run in RUNS[:2])
    goal = np.mean([row.loss for row in waits if 2.7 <= row.epoch <= 3.0])
    for name, rows in (("free sgd", free), ("all sgd", waits)):
        at = [row.time for row in rows if row.loss <= goal][0]
        assert values(raced, name, "log speed", "time").item() == pytest.approx(-math.log(at))
    assert not len(values(raced, "NonF", "log speed", "time"))


def test_messages_under_way_make_waiting_slow_and_none_make_it_even():
    both = [run | dict(links=links, run=f"{run['run']} {links}")
            for run in RUNS[:2] for links in ("near", "far")]  # fmt: skip
    frame = race(both, passes=8.0, goal=6.0, every=0.05, prompt=False)
    for seed in (1, 2):
        saved = {links: values(frame, f"free sgd {links}", "log speed", "time", seed).item()
                 - values(frame, f"all sgd {links}", "log speed", "time", seed).item()
                 for links in ("near", "far")}  # fmt: skip
        assert abs(saved["near"]) < 0.1 < saved["far"]


def test_a_job_takes_one_on_average_and_longer_at_the_slow_party():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 12)) * (rng.random((50, 12)) < 0.3)
    for rows, regulariser in ((x, "l2"), (sparse.csr_array(x), "l2"),
                              (sparse.csr_array(x), "nonconvex")):  # fmt: skip
        problem = study.Problem(rows, np.ones(50), study.split_features(12, 4), "logistic", 0.1,
                                regulariser)  # fmt: skip
        score = [np.count_nonzero(x[:, block]) / 50 if sparse.issparse(rows) else len(block)
                 for block in problem.blocks]  # fmt: skip
        whole = [len(block) for block in problem.blocks]
        update = whole if regulariser == "nonconvex" else score
        even, slow = (study.costs(problem, 1, even) for even in (True, False))
        assert np.mean(even * (np.array(score) + update) / 2) == pytest.approx(1)
        party, share = study.slow_party(4, 1)
        ratio = slow / even
        assert ratio[party] == pytest.approx(1 + share) and 0.3 <= share < 0.5
        assert np.delete(ratio, party) == pytest.approx(1)


def test_tuning_tells_no_goals_and_no_gaps():
    frame = race(RUNS[:2], tunes="lr")
    assert set(frame["metric"]) == {"loss", "accuracy", "AUC", "log-loss"}


@pytest.mark.slow
def test_a_run_that_diverges_is_in_the_manifest():
    runs = [RUNS[0] | dict(lr=1e200, loss="squared"), RUNS[1] | dict(lr=1e-4)]
    outcome = study.race(Job({**S, "runs": runs, "loss": "squared"}, (1,), progress=False))
    assert set(outcome.diverged) == {"free sgd"} and set(outcome.diverged["free sgd"]) == {1}
    assert np.isinf(values(outcome.frame, "free sgd", "loss", "train").iloc[-1])
    assert np.isnan(values(outcome.frame, "free sgd", "log speed", "time").item())


def test_auc_counts_pairs():
    rng = np.random.default_rng(1)
    z, y = rng.integers(0, 6, 40).astype(float), rng.choice([-1.0, 1.0], 40)
    pairs = [1.0 * (a > b) + 0.5 * (a == b) for a in z[y > 0] for b in z[y < 0]]
    assert study.judged("logistic", z, y)["AUC"] == pytest.approx(np.mean(pairs))
    assert math.isnan(study.judged("logistic", z + np.inf, y)["AUC"])
    told = study.judged("squared", np.array([1.0, 2.0]), np.array([1.0, 5.0]))
    assert told == {"RMSE": pytest.approx(math.sqrt(4.5))}


# --- unfinished work ------------------------------------------------------------------------------


@pytest.mark.slow
def test_finished_seeds_are_kept_and_give_the_same(tmp_path):
    runs, made = RUNS[:2], []
    job = Job({**S, "runs": runs}, (1, 2), progress=False, folder=tmp_path)
    whole = study.race(job).frame
    assert len(list(tmp_path.glob("*.pickle"))) == 2

    def make(seed):
        made.append(seed)
        return [dict(run="a", value=1.0)]

    assert study.each_seed(job, make).shape == whole.shape and not made
    pd.testing.assert_frame_equal(study.race(job).frame, whole, check_exact=True)
    pd.testing.assert_frame_equal(race(runs), whole, check_exact=True)
    other = Job({**S, "runs": runs[:1]}, (1,), progress=False, folder=tmp_path)
    assert len(study.each_seed(other, make)) == 1 and made == [1], "other runs, other files"


def test_out_of_time_is_said_before_a_seed_is_begun(tmp_path):
    job = Job({**S, "runs": RUNS[:1]}, (1, 2), progress=False, folder=tmp_path,
              until=time.monotonic() - 1)  # fmt: skip
    with pytest.raises(OutOfTime, match="after 0 of 2 seeds"):
        study.race(job)


# --- speed-up and rates ---------------------------------------------------------------------------


def test_slopes_of_speed_ups_by_hand():
    times = {1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}
    rows = study.speed_up_rows("a", times, times, 30.0)
    told = {(r["metric"], r["parties"]): r["value"] for r in rows}
    assert [told["speed-up", q] for q in times] == [1, 2, 4, 8]
    assert told["slope", 0] == told["slope from two", 0] == 1.0
    half = {1: 8.0, 2: 8.0, 4: 4.0}  # speed-up 1, 1, 2
    rows = study.speed_up_rows("a", half, half | {1: 16.0}, 30.0)
    told = {r["metric"]: r["value"] for r in rows if not r["parties"]}
    assert told["slope"] == pytest.approx((1 + 2 + 8) / (1 + 4 + 16))
    assert told["slope from two"] == pytest.approx((1 + 4) / (1 + 4))
    assert told["slope, alone too"] == pytest.approx((1 + 4 + 16) / (1 + 4 + 16))
    never = {1: math.inf, 2: 4.0, 4: math.inf}
    lost = study.speed_up_rows("a", never, never, 30.0)
    told = {r["metric"]: r["value"] for r in lost if not r["parties"]}
    assert math.isnan(told["slope"]) and told["slope from two"] == pytest.approx(1 / 5)


def test_speed_up_is_of_simulated_times_with_no_party_slower_when_there_is_one():
    runs = [dict(run="free", method="saga", way="not waiting", links="near", gap=0.05)]
    s = {**S, "parties_grid": [1, 2], "runs": runs, "passes": 20.0, "lr": 0.02}
    frame = study.speedup(Job(s, (1,), progress=False)).frame
    time_of = frame[frame["metric"] == "time"].set_index("parties")["value"]
    problem = study.deal({**S, "parties": 1}, study.read(S), 1)[0]
    run = study.simulate_parties(problem, "saga", 0.02, epochs=19, every=0.2375, seed=1,
                                 compute=4 / 30)  # fmt: skip
    best = study.optimum(problem, np.zeros(30))
    at = [row.time for row in run.rows if row.loss <= best + 0.05][0]
    assert time_of[1] == pytest.approx(at)
    assert time_of[2] < time_of[1]
    slope = frame[frame["parties"] == 0].set_index("metric")["value"]
    with_two = 5 * slope[["slope", "slope, alone too"]] - 1  # twice the speed-up of two parties
    assert 1.3 < with_two["slope, alone too"] / with_two["slope"] < 1.5, "slow by 30 to 50 %"


def test_straightness_is_one_for_an_exponential_and_low_for_noise():
    x = np.arange(60.0)
    assert study.straightness(x, 10 ** (-x / 6)) == pytest.approx(1.0)
    noise = 10 ** np.random.default_rng(2).uniform(-8, -1, 60)
    assert study.straightness(x, noise) < 0.3
    bent = np.where(x < 30, 10 ** (-x / 60), 10 ** (-(x - 28) / 4))
    assert study.straightness(x, bent) < 0.98


def test_rates_of_sgd_svrg_and_saga_at_a_fixed_rate():
    kinds = (("sgd", 0.02), ("sgd", 0.01), ("svrg", 0.02), ("saga", 0.02))
    runs = [dict(run=f"{method} {lr}", method=method, lr=lr) for method, lr in kinds]
    s = {**S, "runs": runs, "lam": 0.1, "passes": 240.0, "bound": 4, "every": 0.6}
    frame = study.convergence(Job(s, (1,), progress=False)).frame
    end = frame[frame["split"] == "end"].set_index(["run", "metric"])["value"]
    assert 1.5 < math.exp(end["sgd 0.02", "log plateau"] - end["sgd 0.01", "log plateau"]) < 2.6
    for name in ("svrg 0.02", "saga 0.02"):
        assert end[name, "lowest"] < -10 and end[name, "straightness"] > 0.95
    assert end["sgd 0.02", "lowest"] > -6
    gaps = frame[(frame["run"] == "sgd 0.01") & (frame["metric"] == "log10 gap")]
    late = 10 ** gaps.loc[gaps["round"] > gaps["round"].max() / 2, "value"]
    assert_allclose(end["sgd 0.01", "log plateau"], math.log(late.mean()))


def test_the_straight_line_may_begin_after_some_passes():
    runs = [dict(run="saga", method="saga", lr=0.02)]
    s = {**S, "runs": runs, "lam": 0.1, "passes": 60.0, "bound": 4, "every": 0.6}
    found = {}
    for start in ({}, {"start": 30.0}):
        frame = study.convergence(Job(s | start, (1,), progress=False)).frame
        (found[start.get("start", 0.0)],) = frame[frame["metric"] == "straightness"]["value"]
    gaps = frame[frame["metric"] == "log10 gap"]
    for start, r2 in found.items():
        x, y = gaps[gaps["round"] >= start][["round", "value"]].to_numpy().T
        assert y.min() > -11
        _, (left,), *_ = np.polyfit(x, y, 1, full=True)
        assert_allclose(r2, 1 - left / ((y - y.mean()) ** 2).sum(), rtol=1e-4)
    assert found[0.0] != found[30.0]


# --- attacks and trees ----------------------------------------------------------------------------


def test_labels_come_from_signs_and_columns_from_snapshots():
    runs = [
        dict(run="sgd", attack="labels", method="sgd"),
        dict(run="saga", attack="labels", method="saga"),
        dict(run="one", attack="features", width=1, lr=0.1),
        dict(run="three", attack="features", width=3, lr=0.1),
        dict(run="bent", attack="features", width=2, lr=0.1, regulariser="nonconvex"),
    ]
    outcome = study.secrets(Job({**S, "runs": runs}, (1, 2), progress=False)).frame
    end = outcome.groupby(["run", "metric"])["value"].agg(["min", "max"])
    assert (end.loc["sgd", "right"] == 1).all() and (end.loc["saga", "told"] == 1).all()
    assert (end.loc["sgd", "told"] < 0.75).all(), "some rows are never drawn in a pass"
    guessing = end.loc["sgd", "guessing"]
    assert (0.5 < guessing).all() and (guessing < 0.8).all()
    assert end.loc["one", "error"]["max"] < 1e-6 and end.loc["bent", "error"]["max"] < 1e-5
    assert end.loc["three", "error"]["min"] > 0.05 > 1e-6 > end.loc["three", "shape error"]["max"]
    assert [end.loc[name, "rank"]["max"] for name in ("one", "three", "bent")] == [1, 3, 2]


def test_all_trees_are_there_once():
    for q, count in ((2, 1), (3, 3), (4, 15), (5, 105)):
        forest = list(study.binary_trees(range(1, q + 1)))
        shapes = {frozenset(map(frozenset, subtrees(tree))) for tree in forest}
        assert len(forest) == len(shapes) == count  # (2q - 3)!!
        assert all(secure.leaves(tree) == tuple(range(1, q + 1)) for tree in forest)
    assert len(list(study.pairs_of_trees(3, 100))) == 6
    drawn = list(study.pairs_of_trees(5, 50))
    assert len(drawn) == 50 and all(one != other for one, other in drawn)


def subtrees(tree):
    """Yield the leaves of every subtree."""
    yield secure.leaves(tree) if isinstance(tree, tuple) else (tree,)
    if isinstance(tree, tuple):
        for child in tree:
            yield from subtrees(child)


def test_pairs_of_three_parties_by_hand():
    """Party 1 gets both masked scores and both masks where each of the others goes to it alone."""
    a, b, c = ((1, 2), 3), ((1, 3), 2), (1, (2, 3))
    assert [study.unsafe(pair) for pair in ((a, b), (b, a))] == [1, 1]
    assert [study.unsafe(pair) for pair in ((a, c), (c, a), (b, c), (c, b))] == [0, 0, 0, 0]
    s = dict(parties_grid=[3], pairs=100, chains=5)
    frame = study.trees(Job(s, (1,), progress=False)).frame.set_index(["run", "metric"])["value"]
    assert frame["3 parties", "opens"] == pytest.approx(1 / 3)
    assert frame["3 parties", "pairs"] == frame["3 parties", "tried"] == 6
    assert frame["Figure 5", "opens"] == frame["chains", "opens"] == 0
    assert frame["two parties", "opens"] == 1
    assert frame["Figure 5, parties 2 and 3 together", "opens"] == 1


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(method="sdg"), "method of run 'a' 'sdg'. Did you mean 'sgd'"),
        (dict(way="waits"), "way of run 'a' 'waits'.*waiting"),
        (dict(links="fast"), "links of run 'a' 'fast'"),
        (dict(active=9), "9 of 4 parties are to have labels"),
        (dict(way="own labels"), "AFSVRG-VP: the method is svrg"),
        (dict(goal=9.0), "the goal is set after 9 passes, and there are 4"),
        (dict(columns=7), "columns = 7.*Leave the setting out"),
        (dict(run=dict(lam=9.0, rows=3)), "Run 'a': lam, rows: one value for all runs"),
        (dict(parties_grid=[2, 4]), "a speed-up is over one party"),
        (dict(rows=600), "rows = 600 and tests = 40.*569 rows in all"),
    ],
)
def test_what_cannot_be_run_is_said(change, message):
    change = dict(change)
    run = dict(run="a", method="sgd", way="waiting") | change.pop("run", {}) | {
        k: v for k, v in change.items() if k in ("method", "way", "links")
    }
    with pytest.raises(FedlibError, match=message):
        race([run], **{k: v for k, v in change.items() if k not in run})


def test_attacks_say_what_they_need():
    squared = dict(attack="labels", method="sgd", loss="squared")
    for run, message in ((dict(attack="labels"), "Name it"), (dict(attack="features"), "width"),
                         (squared, "logistic loss")):  # fmt: skip
        s = {**S, "runs": [run | {"run": "a"}]}
        with pytest.raises(FedlibError, match=message):
            study.secrets(Job(s, (1,), progress=False))


# --- rules ----------------------------------------------------------------------------------------


def outcome_of(monkeypatch, claim, check, values):
    w = check["with"]
    frame = pd.DataFrame(
        dict(run=w["run"], seed=k, round=0, split=w["split"], metric=w["metric"], value=v)
        for k, v in enumerate(values)
    )
    settings = catalogue.settings("vertical", check["experiment"], "smoke") | {"seeds": 5}
    held = claims.Record(frame, dict(profile="quick", settings=settings), None)
    monkeypatch.setattr(claims.records, "load", lambda *names: held)
    return claims._check("vertical", claim, check, None).outcome


def test_a_speed_up_of_noise_is_not_linear(monkeypatch):
    """The rule of Figures 2 and 7, fed with times that have nothing to do with the parties."""
    claim = next(c for c in claims.claims_of("vertical") if c["id"] == "VFB2-C5")
    check = next(c for c in claim["check"] if c["measure"] == "final")
    rng, slopes = np.random.default_rng(4), []
    for _ in range(10):
        times = dict(zip((1, 2, 4, 8, 12), np.exp(0.3 * rng.standard_normal(5)), strict=True))
        rows = study.speed_up_rows("a", times, times, 1)
        told = {r["metric"]: r["value"] for r in rows if not r["parties"]}
        slopes.append(told["slope"])
    assert outcome_of(monkeypatch, claim, check, slopes) == OUTSIDE


def test_claims_and_findings_of_the_specification_are_there():
    ids = [claim["id"] for claim in claims.claims_of("vertical")]
    assert {f"VFB2-C{k}" for k in range(1, 11)} <= set(ids)
    for name in catalogue.experiment_names("vertical"):
        for profile in catalogue.profiles("vertical", name):
            catalogue.check_experiment("vertical", name, profile)
            s = catalogue.settings("vertical", name, profile)
            drawn = profile != "smoke" and name != "trees"  # where nothing is, one seed is enough
            assert not drawn or (s["seeds"] == 3 if "tunes" in s else s["seeds"] >= 10)
