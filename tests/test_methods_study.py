"""The matrix of methods: its situations, and what its runs spend."""

from __future__ import annotations

import dataclasses
import math
import re

import build
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from fedlib import datasets, paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, records, tuning
from fedlib.lab.job import Job
from fedlib.lab.show import matrix
from fedlib.lab.studies import methods
from fedlib.papers.fedavg import FedAvg

SMALL = dict(
    kind="", where="", title="", seeds=2, dataset="digits", model=["softmax", 64, 10], clients=10,
    cohort=2, local_steps=4, batch_size=4, rounds=6, looks=3, evaluate_on=100, lr=0.1, skew=0.1,
)  # fmt: skip
SEEDS = (1, 2)


def run(*runs: dict, **more) -> pd.DataFrame:
    job = Job({**SMALL, **more, "runs": list(runs)}, SEEDS, progress=False)
    return methods.trying(job).frame


def end(frame: pd.DataFrame, name: str, metric: str, split: str = "train") -> np.ndarray:
    rows = frame.query("run == @name and metric == @metric and split == @split")
    return rows.groupby("seed")["value"].last().to_numpy()


def test_merges_amplified_by_the_mean_count_are_fednova():
    """Neither knows of the other: one lives on a clock, one has steps by client."""
    frame = run(
        dict(run="nova", method="fednova"),
        dict(run="merges", method="amplified merges", strength=3.0),  # (4 + 2) / 2
        dict(run="plain", method="uneven"),
        situation="slow", knob=2.0,
    )  # fmt: skip
    assert end(frame, "merges", "loss") == pytest.approx(end(frame, "nova", "loss"), rel=1e-5)
    assert end(frame, "plain", "loss") != pytest.approx(end(frame, "nova", "loss"), rel=1e-3)


def test_who_waits_has_fewer_rounds_in_the_same_time():
    frame = run(
        dict(run="few", method="fedavg"), dict(run="waits", method="fedavg", waits=True),
        dict(run="uneven", method="uneven"), situation="slow", knob=2.0,
    )  # fmt: skip
    last = frame.groupby("run")[["round", "clock"]].max()
    assert last["round"].to_dict() == {"few": 6, "waits": 3, "uneven": 6}
    assert last["clock"].to_dict() == {"few": 6, "waits": 6, "uneven": 6}
    steps = {name: end(frame, name, "gradients", "spent")[0] for name in last.index}
    assert steps == {"few": 6 * 10 * 2, "waits": 3 * 10 * 4, "uneven": 6 * (5 * 4 + 5 * 2)}


@pytest.mark.parametrize(
    ("method", "models", "kept"),
    [
        ("fedavg", 2, 1),
        ("scaffold", 4, 1 + 1 + 10),  # the model, c, and a c_i of each client
        ("mifa", 2, 1 + 10),
        ("fedadam", 2, 1 + 2),
    ],
)
def test_what_a_run_has_spent(method, models, kept):
    frame = run(dict(run="x", method=method, strength=0.1), situation="sampled", knob=0.3)
    spent = frame[frame["split"] == "spent"].groupby("metric")["value"].unique()
    assert spent["gradients"] == [6 * 2 * 4] and spent["models"] == [6 * 2 * models]
    assert spent["kept"] == [kept]


def test_clients_of_half_of_the_labels_come_more_rarely():
    place = methods.SITUATIONS["come and go"]({**SMALL, "knob": 3.0, "cohort": 10}, SEEDS, "cpu")
    there = (place.process.weights(1, 0, 20_000) > 0).mean(0)
    # all ten count as there when nobody is, which the product of ten absences says how often
    nobody = np.prod(np.where(np.arange(10) < 5, 1 - 0.5 / 3, 0.5))
    expected = np.where(np.arange(10) < 5, 0.5 / 3, 0.5) + nobody
    assert there == pytest.approx(expected, abs=0.04)
    labels = place.task.data.y
    rare = np.concatenate([labels[part] for part in place.task.data.splits[1][:5]])
    assert np.mean(rare < 5) > 0.9, "a tenth of the samples are from anywhere"


def test_some_call_things_by_opposite_labels():
    place = methods.opposite({**SMALL, "knob": 0.3, "samples": 20}, SEEDS, "cpu")
    data, whole = datasets.load("digits"), place.task.data
    n = len(data.train_y) + len(data.test_y)
    truth = np.concatenate([data.train_y, data.test_y])
    for seed in SEEDS:
        for parts in (whole.splits[seed], place.judging[seed]):
            for client, rows in enumerate(parts):
                expected = 9 - truth[rows - n] if client < 3 else truth[rows]
                assert (np.asarray(whole.y)[rows] == expected).all()
        used = np.concatenate([*whole.splits[seed], *place.judging[seed]]) % n
        assert len(set(used.tolist())) == len(used), "nobody is judged by what somebody learned"


def test_a_global_model_cannot_serve_two_truths_and_clusters_can():
    frame = run(
        dict(run="one", method="fedavg"), dict(run="two", method="ifca"),
        situation="opposite", knob=0.5, samples=100, rounds=40, lr=0.3,
    )  # fmt: skip
    assert end(frame, "one", "accuracy", "test").max() < 0.65
    assert end(frame, "two", "accuracy", "test").min() > 0.8


def test_the_last_letters_are_columns():
    text = np.array([[7, 1, 0, 2, 1], [7, 0, 0, 0, 2]], dtype=np.uint8)
    seen = methods._seen(text, {"model": ["mlp", 12, 8, 3]})
    assert seen.shape == (2, 12)
    assert torch.nonzero(seen[0]).flatten().tolist() == [0 + 1, 3 + 0, 6 + 2, 9 + 1]


def own(setup: methods.Conditions) -> FedAvg:
    """Stand for a method that is not in the book."""
    return FedAvg(*setup.basic)


def test_a_method_of_ones_own_is_tried_like_the_others():
    frame = run(
        dict(run="own", method=f"{__name__}:own"), dict(run="FedAvg", method="fedavg"),
        situation="cycles", knob=1.0,
    )  # fmt: skip
    assert (end(frame, "own", "loss") == end(frame, "FedAvg", "loss")).all()


def test_what_cannot_be_tried_is_said():
    with pytest.raises(FedlibError, match=r"Unknown method 'fedavgg'.*fedavg"):
        run(dict(run="x", method="fedavgg"), situation="cycles", knob=1.0)
    with pytest.raises(FedlibError, match="Unknown situation 'cycle'.*cycles"):
        run(dict(run="x", method="fedavg"), situation="cycle", knob=1.0)
    with pytest.raises(FedlibError, match="has no init"):
        run(dict(run="x", method="builtins:repr"), situation="cycles", knob=1.0)


def test_every_method_is_somewhere_in_the_matrix():
    runs = {n: catalogue.settings("methods", n, "quick")["runs"] for n in matrix.KNOBS}
    assert {run["method"] for some in runs.values() for run in some} == {*methods.METHODS}
    knobs = [{run["knob"] for run in some} for some in runs.values()]
    assert [len(values) for values in knobs] == [3] * 8


# --- the matrix -----------------------------------------------------------------------------------


def found(**accuracies: list[float]) -> pd.DataFrame:
    """Return a cell's table from the accuracies of each method, one a seed."""
    rows = [dict(situation="slow", knob=2.0, method=name, run=name, each=pd.Series(each),
                 accuracy=np.mean(each)) for name, each in accuracies.items()]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_cell_names_the_best_and_those_that_cannot_be_told_from_it():
    wave = 0.01 * np.sin(np.arange(10.0))
    (cell,) = matrix.cells(found(
        a=0.80 + wave, b=0.77 + wave, c=0.795 + wave, d=0.78 - 8 * wave,
    )).to_dict("records")  # fmt: skip
    assert cell["best"] == "a" and cell["second"] == "c" and not cell["sure"]
    # c is behind in every seed, by half a point; d by two points, and now before, now behind
    assert cell["level"] == ["c", "d"] and cell["behind"] == pytest.approx(0.005)
    (cell,) = matrix.cells(found(a=0.80 + wave, b=0.77 + wave)).to_dict("records")
    assert cell["sure"] and cell["behind"] == pytest.approx(0.03)
    assert matrix.beside(cell) == "3.0 points before b"


def test_cells_are_counted_in_short():
    wave = 0.01 * np.sin(np.arange(10.0))
    tables = [found(a=0.8 + wave, b=0.7 + wave), found(a=0.8 + wave, b=0.7 + wave),
              found(a=0.8 + wave, b=0.84 - 8 * wave)]  # fmt: skip
    said = matrix.in_short(pd.concat(map(matrix.cells, tables)))
    assert said.startswith("Of 3 cells") and "the best is a in 2, b in 1. In 1 another" in said


def test_more_methods_make_wider_intervals():
    """A difference that is sure between two is not among twenty, of which the best was picked."""
    noise = np.random.default_rng(0).normal(0, 0.02, 10)
    noise -= noise.mean()
    pair = dict(a=[0.8] * 10, b=list(0.785 + noise))
    assert matrix.cells(found(**pair))["sure"].item()
    many = {f"m{n}": [0.5] * 10 for n in range(20)}
    assert not matrix.cells(found(**pair, **many))["sure"].item()


def test_a_method_stands_for_its_settings_by_the_one_that_tuning_chose():
    frame = matrix.ends(lambda name: records.load("methods", name, "smoke"))
    assert frame["situation"].nunique() == 8 and len(matrix.cells(frame)) == 8
    both = {"FedAdam, η = 0.1 at 0.3", "FedYogi, η = 0.1 at 0.3"}
    adaptive = frame.query("situation == 'sampled' and method == 'adaptive server'")
    losses = tuning.table(records.load("methods", "rates-sampled", "smoke").frame)
    losses = losses.set_index("method")["loss"][sorted(both)]
    assert adaptive["run"].item() == losses.idxmin()
    names = {"FedProx, few steps, μ = 0.1 at 2.0": ("FedProx, few steps", 0.1),
             "FedAvg, waits at 2.0": ("FedAvg, waits", None)}  # fmt: skip
    for run, (name, strength) in names.items():
        assert matrix.label(dict(run=run) | ({"strength": strength} if strength else {})) == name


def test_a_method_of_ones_own_gets_a_row(tmp_path):
    said: list[str] = []
    more = dict(out=tmp_path, names=["slow", "writers"], say=said.append)
    frame = matrix.enter(f"{__name__}:own", "smoke", **more)
    assert said[0].startswith("As the book's records say, this takes about ") and len(said) == 3
    assert said[1].startswith("slow, 2 times slower: ") and "of 5; " in said[1]
    mine = frame.query("method == 'own' and situation == 'writers'")["each"].item()
    fedavg = frame.query("method == 'FedAvg' and situation == 'writers'")["each"].item()
    assert (mine == fedavg).all(), "it is FedAvg, tuned the same way"
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    again = matrix.enter(f"{__name__}:own", "smoke", seeds=1, **more)  # there are more
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == before
    assert again["accuracy"].equals(frame["accuracy"])


def still(setup):
    basic = list(setup.basic)
    return FedAvg(basic[0], [1e-9 * rate for rate in basic[1]], *basic[2:])


class Wild(FedAvg):
    def round(self, state, task, drawn=None):
        state, told = super().round(state, task, drawn)
        return dataclasses.replace(state, x=state.x * torch.nan), told


def wild(setup):
    return Wild(*setup.basic)


def test_a_method_without_a_best_rate_has_no_place_and_the_others_are_told_of(tmp_path):
    said: list[str] = []
    names = ["writers", "slow"]
    more = dict(out=tmp_path, names=names, say=said.append)
    frame = matrix.enter(f"{__name__}:still", "smoke", **more)
    assert frame.empty and list(frame) == matrix.ENDS
    assert [line.partition(": no place. The best value of 'still")[0] for line in said[1:]] == names
    matrix.enter(f"{__name__}:wild", "smoke", **more)
    lost = "no place. It diverges at every rate of its grid."
    assert said[4:] == [f"{name}: {lost}" for name in names]


def scaffold(setup):
    return own(setup)


def test_a_method_of_ones_own_with_the_name_of_the_books_is_not_taken_for_it(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "SCAFFOLD", scaffold)
    more = dict(out=tmp_path, names=["writers"], say=lambda line: None, seeds=1)
    frame = matrix.enter(f"{__name__}:SCAFFOLD", "smoke", **more).set_index("method")["each"]
    tried = frame[f"{__name__}:SCAFFOLD"]
    assert len(tried) == 1 and (tried == frame["FedAvg"]).all(), "it is FedAvg, one seed"
    assert not (frame["SCAFFOLD"] == frame["FedAvg"]).all(), "compared over the same seed"
    book = matrix.ends(lambda n: records.load("methods", n, "smoke"), ["writers"])
    assert len(book["each"].iloc[0]) > 1 and len(frame["SCAFFOLD"]) == 1


def test_a_method_that_is_none_is_refused_before_anything_runs(tmp_path, monkeypatch):
    for name, words in (
        ("own", "'package.module:function'"), ("nowhere:own", "cannot be found"),
        (f"{__name__}:nothing", "cannot be found"),
    ):  # fmt: skip
        with pytest.raises(FedlibError, match=words):
            matrix.enter(name, "smoke", out=tmp_path)
    with pytest.raises(FedlibError, match="Unknown situation 'slo'.*slow"):
        matrix.enter(f"{__name__}:own", "smoke", out=tmp_path, names=["slo"])
    with pytest.raises(FedlibError, match="no records of .* at the profile 'paper'"):
        matrix.enter(f"{__name__}:own", "paper", out=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "half_written.py").write_text("def method(setup:")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FedlibError, match="cannot read .*half_written.py, line 1"):
        matrix.enter("half_written:method", "smoke", out=tmp_path)


def pulled(setup):
    return FedAvg(*setup.basic, amplify=1 + setup.strength)


def unknown(setup):
    return FedAvg(setup.writers_per_round)


def test_a_method_that_fails_without_its_own_setting_says_so(tmp_path):
    more = dict(out=tmp_path, names=["writers"], say=lambda line: None)
    with pytest.raises(TypeError, match="NoneType") as failed:
        matrix.enter(f"{__name__}:pulled", "smoke", **more)
    assert "no --strength was given" in failed.value.__notes__[0]
    with pytest.raises(AttributeError, match="writers_per_round") as failed:
        matrix.enter(f"{__name__}:unknown", "smoke", **more)
    assert not hasattr(failed.value, "__notes__"), "another mistake"


# --- the picture, from the rows, by other code ----------------------------------------------------

SHARES = {"cycles": 1 / 2, "come-and-go": 1 / 5}  # as the page says; else a tenth


def rows(name: str) -> pd.DataFrame:
    return pd.read_csv(paths.paper_folder("methods") / "results" / f"{name}.quick.csv.gz")


def of(run: str) -> str:
    """Return a run's method, by its words."""
    words = [w for w in run.split(" at ")[0].split(", ") if " = " not in w]
    return re.sub("FedAdam|FedYogi", "adaptive server", ", ".join(words))


def stands(name: str) -> dict[float, dict[str, str]]:
    """Return which run stands for each method at each knob: the lowest loss on the tuning seeds."""
    f = rows(f"rates-{name}")
    f = f[(f["metric"] == "loss") & f["split"].isin(["train", "validation"])]
    f = f[f["split"] == ("validation" if "validation" in set(f["split"]) else "train")]
    stop = f.groupby(["run", "seed"])["round"].transform("max")
    late = f[f["round"] > stop * 2 / 3].groupby(["method", "run"])["value"]
    lost = late.apply(lambda v: np.inf if v.isna().any() else v.mean()).groupby("method").min()
    best: dict[float, dict[str, str]] = {}
    for method in lost.sort_values(ascending=False).index:
        best.setdefault(float(method.split(" at ")[1]), {})[of(method)] = method
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", matrix.KNOBS)
def test_the_picture_says_what_the_rows_say(name):
    """By pandas and scipy alone: who stands for a method, who is best, who is not told from it."""
    said = matrix.cells(matrix.ends(lambda n: records.load("methods", n, "quick"), [name]))
    if said.empty:
        pytest.skip("no record yet")
    frame, chosen = rows(name), stands(name)
    frame = frame[(frame["metric"] == "accuracy") & (frame["split"] == "test")]
    fine = np.linspace(1 - SHARES.get(name, 1 / 10), 1, 2001)  # of the run
    each = pd.DataFrame({
        run: {seed: np.interp(fine * v.index.max(), v.index, v).mean() for seed, v in own.items()}
        for run, own in frame.groupby("run")
        for own in [own.pivot(index="round", columns="seed", values="value")]
    }).T  # fmt: skip
    assert len(said) == len(chosen) == 3
    for cell in said.to_dict("records"):
        ends = {method: each.loc[run] for method, run in chosen[cell["knob"]].items()}
        best = max(ends, key=lambda method: ends[method].mean())
        level = 1 - 0.05 / math.comb(len(ends), 2)
        intervals = {m: stats.ttest_rel(ends[best], v).confidence_interval(level)
                     for m, v in ends.items() if m != best}  # fmt: skip
        near = {m for m, (low, high) in intervals.items() if low <= 0 or low + high < 2 * 0.01}
        assert (cell["best"], {*cell["level"]}) == (best, near)


def test_who_diverges_in_some_seeds_is_not_judged_by_the_others():
    def load(name: str) -> records.Record:
        record = records.load("methods", name, "smoke")
        frame = record.frame.copy()
        frame.loc[(frame["run"] == "MIFA at 0.3") & (frame["seed"] == 2), "value"] = np.nan
        return record if name.startswith("rates-") else dataclasses.replace(record, frame=frame)

    each = matrix.ends(load, ["sampled"]).set_index("method")["each"]
    assert each["MIFA"][1] > 0.5 and each["MIFA"][2] == 0 and (each["FedAvg"] > 0.5).all()


def test_waiting_costs_a_round_of_everybody_once_a_cycle():
    frame = run(dict(run="x", method="waiting"), situation="cycles", knob=1.0, rounds=12)
    spent = frame[frame["split"] == "spent"].groupby("metric")["value"].unique()
    assert spent["gradients"] == [2 * 10 * 4] and spent["models"] == [2 * 10 * 2]


def test_the_table_of_situations_has_their_clients_and_rounds():
    page = nbformat.read(build.ROOT / "notebooks" / "07_beyond" / "3_which_method.ipynb", 4)
    text = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    told = re.findall(r"^\| ([a-z ]+) \|.*\| (\d+), (\d+) \|$", text, re.M)
    made = {name: catalogue.settings("methods", name, "quick") for name in matrix.KNOBS}
    assert {name.replace(" ", "-"): (int(N), int(T)) for name, N, T in told} == {
        name: (s["clients"], s["rounds"]) for name, s in made.items()
    }
