"""Tuning: the same grid for all, grown until it holds the best, on seeds of its own."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from fedlib.errors import FedlibError
from fedlib.lab.evidence import catalogue, experiments, freshness, records, tuning
from fedlib.lab.job import Job, Outcome, off_cycle

BEST = {"slow": 0.01, "fast": 3.0}


def valley(job: Job) -> Outcome:
    """A made-up study: the loss of a run is the squared distance of log lr from the best one."""
    rows = []
    for run in job.settings["runs"]:
        best = BEST[run["run"].split(" @ ")[0]]
        for seed in job.seeds:
            for t in range(0, 31, 10):
                late = math.log(run["lr"] / best) ** 2 + 0.01 * seed % 3
                value = 5.0 if t <= 20 else late  # only the last third tells
                rows.append(dict(run=run["run"], seed=seed, round=t, split="train",
                                 metric="loss", value=value))  # fmt: skip
    return Outcome(pd.DataFrame(rows), {}, {})


SETTINGS = dict(
    kind="fedlib.lab.evidence.tuning:grid", study=f"{__name__}:valley", tunes="lr",
    grid=[0.1, 0.1 * tuning.HALF_DECADE, 1.0], runs=[dict(run="slow"), dict(run="fast")],
)  # fmt: skip


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setattr(tuning, "study", lambda kind: valley)
    return tuning.grid(Job(SETTINGS, tuning.TUNING_SEEDS, progress=False))


def test_the_grid_grows_until_every_best_value_is_inside(wide):
    tried = sorted(wide.frame["at"].unique())
    assert np.allclose(np.diff(np.log10(tried)), 0.5), "half a decade apart"
    found = tuning.table(wide.frame).set_index("method")
    assert found["interior"].all()
    for method, best in BEST.items():
        assert abs(math.log10(found.loc[method, "at"] / best)) <= 0.25 + 1e-9
        own = wide.frame[wide.frame["method"] == method]
        assert set(own["at"]) == set(tried), "every method has the same grid"


def test_held_out_samples_decide_where_they_are_asked(monkeypatch):
    """A made-up study: training loss falls with the rate, held-out loss is lowest at 1."""

    def overfits(job: Job) -> Outcome:
        rows = []
        for run in job.settings["runs"]:
            common = dict(run=run["run"], seed=1, round=3, metric="loss")
            rows.append(common | dict(split="train", value=-run["lr"]))
            rows.append(common | dict(split="test", value=math.log(run["lr"]) ** 2))
        return Outcome(pd.DataFrame(rows), {}, {})

    monkeypatch.setattr(tuning, "study", lambda kind: overfits)
    settings = SETTINGS | dict(by="test", runs=[dict(run="a")], grid=[0.1, 1.0, 10.0])
    frame = tuning.grid(Job(settings, (1001,), progress=False)).frame
    found = tuning.table(frame)
    assert found["at"].tolist() == [1.0] and found["interior"].all()
    assert set(frame["split"]) == {"train", "validation"}, "nothing is called a test of it"


def test_a_grid_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(tuning, "study", lambda kind: valley)
    monkeypatch.setitem(BEST, "slow", 1e-30)
    wide = tuning.grid(Job(SETTINGS, (1001,), progress=False))
    assert len(wide.frame["at"].unique()) == tuning.MOST
    assert not tuning.table(wide.frame).set_index("method").loc["slow", "interior"]
    with pytest.raises(FedlibError, match="'slow'.* lies at the edge"):
        tuning.tuned_values(wide.frame, dict(runs=[dict(run="slow", lr="tuned")]))


def test_a_diverged_value_is_never_chosen():
    rows = [dict(method="a", at=at, seed=s, round=t, metric="loss", split="train", value=v)
            for at, values in ((0.1, (3, 3)), (1.0, (2, 2)), (10.0, (0.1, np.nan)))
            for s, v in enumerate(values) for t in (1, 3)]  # fmt: skip
    found = tuning.table(pd.DataFrame(rows))
    assert found["at"].tolist() == [1.0] and found["loss"].tolist() == [2.0]


def test_the_choice_is_made_on_the_last_third():
    losses = {0.1: (9, 9, 1), 1.0: (1, 1, 2), 10.0: (5, 5, 5)}
    rows = [dict(method="a", at=at, seed=1, round=10 * i, metric="loss", split="train", value=v)
            for at, curve in losses.items() for i, v in enumerate(curve, start=1)]  # fmt: skip
    found = tuning.table(pd.DataFrame(rows))
    assert found["at"].tolist() == [0.1] and found["loss"].tolist() == [1.0]


def test_tuned_values_take_their_places(wide):
    asked = dict(runs=[dict(run="slow", lr="tuned", Q=2), dict(run="x", lr="tuned",
                 tuned_as="fast"), dict(run="fixed", lr=7.0)])  # fmt: skip
    values = tuning.tuned_values(wide.frame, asked)
    found = tuning.table(wide.frame).set_index("method")["at"]
    assert values == {"slow": found["slow"], "x": found["fast"]}
    runs = tuning.apply(asked, values)["runs"]
    assert [run["lr"] for run in runs] == [found["slow"], found["fast"], 7.0]
    assert asked["runs"][0]["lr"] == "tuned", "the settings themselves stay as they were"
    with pytest.raises(FedlibError, match="'other' was not tuned"):
        tuning.tuned_values(wide.frame, dict(runs=[dict(run="other", lr="tuned")]))


# --- as experiments -------------------------------------------------------------------------------


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """Add two experiments to the participation paper: rates, and one that uses them."""
    table = json.loads(json.dumps(catalogue._table("participation")))
    runs = [dict(run="plain", algorithm="fedavg")]
    table["grid"] = dict(
        where="", title="", kind="fedlib.lab.evidence.tuning:grid", tunes="lr",
        grid=[0.01, 0.1, 1.0], study="fedlib.lab.studies.participation:training",
        runs=runs, seeds=2,
    )  # fmt: skip
    table["tuned"] = dict(where="", title="", tuned="grid",
                          runs=[runs[0] | dict(lr="tuned", compress_lr=False)])  # fmt: skip
    for name in ("grid", "tuned"):
        table[name]["process"] = "independent"
        table[name]["smoke"] = dict(rounds=1000, compression=50, warmup_rounds=2)
    monkeypatch.setattr(catalogue, "_table", lambda name: table)
    return tmp_path


def test_a_tuned_experiment_says_where_its_values_come_from(paper):
    with pytest.raises(records.MissingRecord, match="participation grid"):
        experiments.run("participation", "tuned", "smoke", out=paper, progress=False)
    rates = experiments.run("participation", "grid", "smoke", out=paper, progress=False)
    assert rates.manifest["seeds"] == [1001, 1002]
    names = {name.partition(":")[2] for name in rates.manifest["code"]}
    assert {"training", "grid"} <= names, "both studies count"
    made = experiments.run("participation", "tuned", "smoke", out=paper, progress=False)
    told = made.manifest["tuning"]
    assert told["record"] == "grid.smoke" and told["rows"] == rates.manifest["rows"]
    at = tuning.table(rates.frame)["at"].tolist()
    assert list(told["chosen"].values()) == at
    assert made.state.word == "fresh"
    changed = rates.frame.assign(value=rates.frame["value"] + 1)
    part = rates.manifest | {"joined": [rates.manifest["rows"]]}  # of which it was one
    for manifest in (rates.manifest, part):
        records.save(paper, changed, manifest)
        assert made.state == ("stale", "Tuning has changed: grid.smoke.")
    rates.manifest_path.write_text("{")
    assert made.state == ("stale", "Tuning has changed: grid.smoke.")


def test_seeds_of_tuning_and_of_evaluation_are_kept_apart(paper):
    with pytest.raises(FedlibError, match="1001, 1002, 1003 are kept for tuning"):
        experiments.run("participation", "fig1", "smoke", seeds=[1, 1002], out=paper)


def test_seeds_as_a_text_are_refused_with_the_way_to_give_a_list(paper):
    with pytest.raises(FedlibError, match=r"got the text '1,2'.*-y 'seeds: \[1, 2\]'"):
        experiments.run("participation", "fig1", "smoke", seeds="1,2", out=paper)


def test_tuning_takes_no_seed_of_evaluation(paper):
    with pytest.raises(FedlibError, match=r"seeds of its own, 1001, .*got \[1, 2\]"):
        experiments.run("participation", "grid", "smoke", seeds=[1, 2], out=paper)


def test_a_study_that_is_not_there_is_named():
    for kind in ("nowhere:f", "fedlib.lab.job:nothing", "fedlib"):
        with pytest.raises(FedlibError, match=f"study '{kind}' cannot be found.*PYTHONPATH"):
            tuning.study(kind)


# --- when to look ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rounds, points, cycle", [(15_000, 150, 25), (6000, 60, 5), (1000, 50, 1), (3455, 100, 25)]
)
def test_looking_out_of_step_meets_every_phase(rounds, points, cycle):
    found = off_cycle(rounds, points, cycle)
    assert found == sorted(set(found)) and found[0] == 0 and found[-1] == rounds
    assert found[1:6] == [1, 2, 3, 5, 8], "early rounds densely"
    late = np.array([t for t in found if 100 < t < rounds])
    assert abs(len(late) - points) <= 0.1 * points + 2
    counts = np.bincount(late % cycle, minlength=cycle)
    assert counts.min() > 0 and counts.max() <= counts.mean() + 2, "phases fill the cycle evenly"
    tenth = late[late > 0.9 * rounds]
    assert len(tenth) >= 4 and len(set(tenth % cycle)) >= min(4, cycle)


# --- joining --------------------------------------------------------------------------------------


def test_joined_seeds_are_the_seeds_run_together(tmp_path):
    run = lambda seeds, out: experiments.run(  # noqa: E731
        "participation", "factor", "smoke", seeds=seeds, out=tmp_path / out, progress=False
    )
    run([1, 2], "a"), run([3], "b")
    whole = run([1, 2, 3], "c")
    made = records.join("participation", "factor", "smoke", [tmp_path / "a", tmp_path / "b"],
                        tmp_path / "d")  # fmt: skip
    key = ["run", "seed", "interval", "metric"]
    sort = lambda frame: frame.sort_values(key).reset_index(drop=True)  # noqa: E731
    pd.testing.assert_frame_equal(sort(made.frame), sort(whole.frame))
    m = made.manifest
    assert m["seeds"] == [1, 2, 3] and len(m["joined"]) == 2 and made.state.word == "fresh"
    assert m["wall_seconds"] >= 0 and m["settings"] == whole.manifest["settings"]
    assert m["rules"] == whole.manifest["rules"] != {} and "looked" not in m
    old = tmp_path / "old"
    for part, day, more in (("a", "2026-01-02", {"Y": "2"}), ("b", "2026-01-01", {})):
        held = records.load("participation", "factor", "smoke", tmp_path / part)
        told = held.manifest | {"looked": day, "rules": {"X": "1"} | more}
        records.save(old / part, held.frame, told)
    told = records.join("participation", "factor", "smoke", [old / "a", old / "b"], old).manifest
    assert (told["looked"], told["rules"]) == ("2026-01-01", {"X": "1"})
    with pytest.raises(FedlibError, match=r"Seeds \[3\] are in more than one"):
        records.join("participation", "factor", "smoke", [tmp_path / "b", tmp_path / "c"])
    other = records.load("participation", "factor", "smoke", tmp_path / "b")
    for key in ("settings", "code", "cards", "data", "fidelity", "tuning"):
        changed = "re-encoded" if key == "fidelity" else {"x": "y"}
        records.save(tmp_path / "e", other.frame, other.manifest | {key: changed})
        with pytest.raises(FedlibError, match=f"other {key} than the one"):
            records.join("participation", "factor", "smoke", [tmp_path / "a", tmp_path / "e"])
    grown = other.manifest["settings"] | {"seeds": 30}  # since "a" was made
    records.save(tmp_path / "e", other.frame, other.manifest | {"settings": grown})
    more = records.join("participation", "factor", "smoke", [tmp_path / "a", tmp_path / "e"],
                        tmp_path / "f")  # fmt: skip
    assert more.manifest["settings"] == grown and more.manifest["seeds"] == [1, 2, 3]
    parts = [tmp_path / "a", tmp_path / "b"]
    records.join("participation", "factor", "smoke", parts, tmp_path / "f")  # the same seeds
    run([4], "g")
    with pytest.raises(FedlibError, match=r"is there already, .* seeds 4\. .*--replace"):
        records.join("participation", "factor", "smoke", parts, tmp_path / "g")
    assert records.load("participation", "factor", "smoke", tmp_path / "g").manifest["seeds"] == [4]
    records.join("participation", "factor", "smoke", parts, tmp_path / "g", replace=True)
    held = records.load("participation", "factor", "smoke", tmp_path / "g")
    told = held.manifest | {"settings": held.manifest["settings"] | {"clients": 7}}
    records.save(tmp_path / "h", held.frame, told)  # the same seeds, something else
    with pytest.raises(FedlibError, match="is there already, with other settings"):
        records.join("participation", "factor", "smoke", parts, tmp_path / "h")
    with pytest.raises(FedlibError, match="at least two"):
        records.join("participation", "factor", "smoke", [tmp_path / "a"])


def test_the_digest_of_settings_with_a_study_covers_it():
    plain = catalogue.settings("participation", "factor", "smoke")
    with_study = plain | dict(study="fedlib.lab.studies.tiers:latency")
    assert (
        freshness.present_code(plain)["code"].keys()
        < freshness.present_code(with_study)["code"].keys()
    )


def test_early_rounds_are_fibonacci_numbers():
    early = [1, 2]
    while early[-1] < 89:
        early.append(early[-1] + early[-2])
    assert off_cycle(1000, 1) == [0, *early, 1000]
    assert off_cycle(1000, 5) == [0, *early, 200, 400, 600, 800, 1000], "where nothing recurs"
    assert off_cycle(21, 1) == [0, 1, 2, 3, 5, 8, 13, 21]
