"""Claims follow from records: questions that can come out each way, three fields, the claims."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from curves import curves, record

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.lab.evidence import (
    ages,
    catalogue,
    claims,
    experiments,
    freshness,
    measures,
    records,
    scale,
)
from fedlib.lab.evidence.claims import Check
from fedlib.lab.evidence.outcomes import (
    DIFFERS,
    HOLDS,
    LEVEL,
    NO_RECORD,
    OPEN,
    OUTSIDE,
    REVERSED,
    SMALLER,
)

PAPER = "participation"
EVERY = [
    (paper, claim) for paper in paths.papers("claims.toml") for claim in claims.claims_of(paper)
]
IDS = [claim["id"] for _, claim in EVERY]
every_claim = pytest.mark.parametrize("paper, claim", EVERY, ids=IDS)
CHECKS = [(p, claim, check) for p, claim in EVERY for check in claim.get("check", [])]
NAN, INF = float("nan"), float("inf")

# --- every kind of question can come out each way -------------------------------------------------


def signature(claim, check):
    """Return what a check measures, what it asks, the shape of its bounds, and how it is read."""
    asked = claims.question(claim, check)
    low, high = (not math.isinf(end) for end in asked.bounds)
    shape = {(0, 0): "", (1, 1): "band", (1, 0): "at least", (0, 1): "at most"}[low, high]
    if shape == "band" and asked.bounds[0] == asked.bounds[1]:
        shape = "exactly"
    metric = check["with"].get("metric") == "loss" and check["measure"] in ("advantage", "during")
    random = claim["kind"] != "arithmetic"
    return check["measure"], asked.kind, asked.sign, shape, metric, random


def use(claim, check):
    """Return a claim with one check of the same signature, on runs ``a`` and ``b``."""
    measure, kind, sign, shape, metric, random = signature(claim, check)
    roles = {"a": "a", "b": "b", "run": "a", "of": "b", "metric": "loss" if metric else "accuracy",
             "split": "train", "x": "x", "target": 0.5, "t_comm": 10.0, "start": 0.25,
             "stop": 0.5, "share": 0.1, "runs": ["a"], "than_a": "b", "than_b": "b"}  # fmt: skip
    roles |= {"than": "other", "than_metric": "top5", "relative": False, "rounds": 0.5, "looks": 3}
    if measure == "widens":
        roles["t_comm"] = [10.0, 100.0]
    asked = {"with": {k: v for k, v in roles.items() if k in check["with"]}}
    asked |= {"what": "q", "asks": check["asks"], "experiment": "e", "measure": measure}
    ends = {"band": [2.0, 3.0], "exactly": [2.0, 2.0], "at least": [2.0, INF], "at most": [-INF, 2]}
    if check["asks"] == "within":
        thresholds = {"better": [0.2, INF], "no worse": [-0.2, INF]}
        asked["bounds"] = ends.get(shape) or thresholds[kind]
        if sign < 0:
            asked["bounds"] = [-end for end in reversed(asked["bounds"])]
        if measure == "diverged":
            asked["bounds"] = [0.4, 1.0]
    key = claims.RATIOS.get(measure) or asked["with"].get("metric", "")
    s = math.exp(0.2) if measure in claims.RATIOS else 0.2
    made = {"id": "A-C1", "kind": "measured" if random else "arithmetic", "check": [asked]}
    return made | {"smallest": {key: s}}, asked


SIGNATURES = {signature(claim, check): use(claim, check) for _, claim, check in CHECKS}
every_signature = pytest.mark.parametrize(
    "kind", SIGNATURES, ids=[" ".join(str(part) for part in kind if part) for kind in SIGNATURES]
)


def imitation(check, values):
    """Return a record in which the check measures ``values``, one a seed."""
    measure, w = check["measure"], check["with"]
    metric, split = w.get("metric", "loss"), w.get("split", "train")
    up, many = (-1 if metric == "loss" else 1), 0 * values[:, None]
    zigzag = np.array([0.0, 1.0] * 20)
    if measure in ("advantage", "during", "best_of", "gains_more"):
        runs = {"a": 0.5 + up * values[:, None] + np.zeros(21), "b": 0.5 + many + np.zeros(21)}
        return curves(runs, metric, split)
    if measure == "with_fewer_rounds":
        runs = {"a": 0.5 + up * values[:, None] + np.zeros(21), "b": 0.5 + many + np.zeros(21)}
        made = curves(runs, metric, split)
        pace = made["run"].map({"a": 1, "b": 2})
        return made.assign(clock=made["round"], rounds=pace * made["round"])
    if measure == "across":
        than = {"a": 0.5 - values[:, None] + np.zeros(21), "b": 0.5 + many + np.zeros(21)}
        here = curves({run: 0.5 + many + np.zeros(21) for run in "ab"}, metric, split)
        return pd.concat([here, curves(than, w["than_metric"], split)])
    if measure == "sooner":
        shifts = [("a", 10, seed, s) for seed, s in enumerate(values, start=1)]
        shifts += [("b", 1, seed, 0.0) for seed in range(1, len(values) + 1)]
        parts = []
        for run, Q, seed, s in shifts:
            at = 1000.0 * np.exp(-s) / (3 * w["t_comm"] / Q + 1)
            there = np.array([0.0, 0.0, 1.0, 1.0])
            row = dict(run=run, seed=seed, Q=Q, metric=metric, split=split, round=range(4))
            row |= dict(clock=[0.0, at * 0.999999, at, 9 * at])
            parts.append(pd.DataFrame(row | dict(value=1 - there if metric == "loss" else there)))
        return pd.concat(parts)
    if measure == "earlier":  # two lines from 1 to 0
        ends = [("a", 2 * np.exp(-values)), ("b", 2 + 0 * values)]
        row = dict(metric=metric, split=split)
        return pd.DataFrame([row | dict(run=run, seed=k, round=i, clock=i * end, value=1.0 - i)
                             for run, times in ends for k, end in enumerate(times, 1)
                             for i in (0, 1)])  # fmt: skip
    if measure == "widens":  # a line, of whose way little is done by then with slower messages
        fast, slow = (3 * t + 1 for t in w["t_comm"])
        runs = {"a": up * 2 * values / (fast / slow - 1), "b": 0 * values}
        at = [(run, seed, end, step) for run, ends in runs.items()
              for seed, end in enumerate(ends, 1) for step in (0, 1)]  # fmt: skip
        row = dict(metric=metric, split=split, Q=1)
        return pd.DataFrame([row | dict(run=r, seed=k, round=step, clock=step, value=step * end)
                             for r, k, end, step in at])  # fmt: skip
    if measure.startswith("smoother"):
        zigzag = np.repeat(zigzag, w.get("looks", 1))
        return curves({"a": np.exp(-values)[:, None] * zigzag, "b": many + zigzag}, metric, split)
    if measure == "settles":
        size = np.where(np.arange(40) < 20, np.exp(values)[:, None], 1.0)
        return curves({"a": size * zigzag}, metric, split)
    if measure == "saved":
        return curves({"a": 50 * (1 - values), "b": 50 + 0 * values}, metric, split)
    if measure in ("slope", "flatter"):
        runs = {"a": values, "b": 0 * values} if measure == "flatter" else {"a": values}
        at = [(run, seed, v, x) for run, powers in runs.items()
              for seed, v in enumerate(powers, 1) for x in (1.0, 10, 50, 100, 1000)]  # fmt: skip
        row = dict(metric=metric, split=split)
        return pd.DataFrame([row | dict(run=r, seed=k, x=x, value=x**v) for r, k, v, x in at])
    if measure == "diverged":
        return curves({"a": np.where(values > 0.5, NAN, 1.0)})
    return curves({"a": values}, metric, split)


def outcome(monkeypatch, kind, values):
    claim, check = SIGNATURES[kind]
    frame = imitation(check, np.asarray(values, dtype=float))
    held = record(frame, settings={"seeds": 5})
    monkeypatch.setattr(claims.records, "load", lambda *names: held)
    return claims._check(PAPER, claim, check, None).outcome


FEW = np.array([-2.0, -1.0, 0.0, 1.0, 2.0])


@every_signature
def test_a_record_can_bring_about_each_outcome(kind, monkeypatch):
    measure, asked, sign, shape, _, random = kind
    seen = {
        "better": {HOLDS: sign * 0.6, SMALLER: sign * 0.1, LEVEL: 0.0, REVERSED: -sign * 0.6},
        "no worse": {HOLDS: sign * 0.6, REVERSED: -sign * 0.6},
        "same": {HOLDS: 0.0, DIFFERS: 0.6},
        "within": {HOLDS: {"at least": 2.5, "at most": 1.5, "exactly": 2.0}.get(shape, 2.5),
                   OUTSIDE: {"at least": 1.5, "at most": 2.5}.get(shape, 3.5)},
    }[asked]  # fmt: skip
    if measure == "diverged":
        assert outcome(monkeypatch, kind, np.ones(9)) == HOLDS
        assert outcome(monkeypatch, kind, np.zeros(9)) == OUTSIDE
        assert outcome(monkeypatch, kind, [0, 1, 1, 0, 1]) == OPEN
        return
    still = 0 * FEW if shape == "exactly" else 1e-5 * FEW
    for word, value in seen.items():
        assert outcome(monkeypatch, kind, value + still) == word, value
    if asked == "no worse":
        assert outcome(monkeypatch, kind, still) == HOLDS, "no difference costs nothing"
    if measure == "largest":
        return  # one number, nothing random
    assert outcome(monkeypatch, kind, seen[HOLDS] + 2 * FEW / (1 + abs(seen[HOLDS]))) == OPEN
    if random:
        assert outcome(monkeypatch, kind, seen[HOLDS] + still[:2]) == OPEN, "too few seeds"


@pytest.mark.slow
@pytest.mark.parametrize("kind", {kind[:4]: kind for kind in SIGNATURES}.values(), ids=str)
def test_noise_in_place_of_the_curve_is_seldom_taken_for_support(kind, monkeypatch):
    """What lies on the border of support is supported in at most one case of forty."""
    measure, asked, sign, shape, _, _ = kind
    if measure in ("largest", "diverged") or shape == "exactly":
        pytest.skip("nothing random")
    border = {"better": 0.0, "no worse": -sign * 0.2, "same": 0.2}.get(asked, 2.0)
    draws = border + 0.1 * np.random.default_rng(1).standard_normal((60, 5))
    if measure == "sooner":
        draws = draws.clip(-3, 3)
    assert sum(outcome(monkeypatch, kind, row) == HOLDS for row in draws) <= 6


def test_every_check_in_use_has_a_question_that_is_tried():
    assert {signature(claim, check) for _, claim, check in CHECKS} == {*SIGNATURES}
    for kind, (claim, check) in SIGNATURES.items():
        assert signature(claim, check)[:4] == kind[:4], "the one that is tried is of this kind"
    tried = {kind[0] for kind in SIGNATURES}
    assert tried == {*claims.MEASURES}, "a measure that no check uses is not there"


# --- from outcomes to three fields ----------------------------------------------------------------


def made(*words, essential=True, reading=""):
    return [Check("q", "asked", "m", word, essential, reading) for word in words]


@pytest.mark.parametrize(
    ("kind", "checks", "finding"),
    [
        ("measured", made(HOLDS, SMALLER), "confirmed in direction"),
        ("measured", made(HOLDS) + made(REVERSED, essential=False), "confirmed"),
        ("measured", [], "needs data"),
        ("measured", made(HOLDS, HOLDS, essential=False), "shown, not counted"),
        ("measured", made(NO_RECORD, essential=False), NO_RECORD),
        ("proved", made(REVERSED, essential=False), "proved"),
        ("proved", made(OPEN), OPEN),
    ],
)
def test_the_finding_is_that_of_the_essential_checks(kind, checks, finding):
    assert claims.find(dict(kind=kind), checks) == (finding, {})


def test_a_sentence_with_two_readings_has_a_finding_for_each():
    shared = made(HOLDS)
    near, far = made(HOLDS, reading="near"), made(REVERSED, reading="far")
    each = {"near": "confirmed", "far": "contradicted in part"}
    assert claims.find(dict(kind="measured"), shared + near + far) == (
        "depends on the reading",
        each,
    )
    agree = near + made(HOLDS, reading="far")
    assert claims.find(dict(kind="measured"), agree) == (
        "confirmed", {"near": "confirmed", "far": "confirmed"})  # fmt: skip
    unsure = near + made(OPEN, reading="far")
    assert claims.find(dict(kind="measured"), unsure) == (
        "open in part", {"near": "confirmed", "far": "open"})  # fmt: skip
    against = made(REVERSED, reading="near") + made(OPEN, reading="far")
    assert claims.find(dict(kind="measured"), against)[0] == "depends on the reading"
    lacking = near + made(NO_RECORD, reading="far")
    assert claims.find(dict(kind="measured"), lacking)[0] == NO_RECORD


@pytest.mark.parametrize(
    ("found", "none"),
    [(["contradicted", "open"], True), (["contradicted in part", "arithmetic"], False),
     (["contradicted", "proved"], False), (["open", "confirmed in part"], False)],
)  # fmt: skip
def test_a_reading_that_holds_by_counting_is_borne_out(found, none):
    row = {"finding": "depends on the reading", "readings": dict(enumerate(found))}
    said = "depends on the reading" + ", confirmed in none" * none
    assert claims.finding_in_words(row) == said
    assert claims.finding_in_words(row | {"finding": "contradicted"}) == "contradicted"


def test_controls_are_told_apart():
    controls = made(HOLDS) + made(HOLDS, OPEN, essential=False)
    assert claims.tally_checks(controls) == "1 of 1 holds; controls: 1 of 2 hold, 1 open"


# --- the claims as they stand ---------------------------------------------------------------------


def test_all_claims_of_the_specification_are_there():
    assert {f"GFA-C{k}" for k in range(1, 9)} | {"GFA-C1-control"} <= set(IDS)
    assert len(IDS) == len(set(IDS))


@every_claim
def test_claim_is_complete(paper, claim):
    assert claim["statement"] and claim["where"] and claim["paper_reports"] and claim["expected"]
    words = [check["what"] for check in claim["check"]]
    assert len(set(words)) == len(words)
    for check in claim["check"]:
        if check["asks"] in ("better", "same"):
            assert claims._smallest(claim, check) > 0 and claim["because"]
        else:
            assert check["bounds"][0] <= check["bounds"][1]


@pytest.mark.parametrize("paper", paths.papers("claims.toml"))
def test_the_same_numbers_count_in_one_claim_only(paper):
    """And once in each reading of it."""
    seen = {}
    for claim in claims.claims_of(paper):
        for check in claim.get("check", []):
            if check.get("essential", True):
                key = check["experiment"], check["measure"], str(sorted(check["with"].items()))
                here, reading = seen.setdefault(key, (claim["id"], set()))
                assert here == claim["id"], (here, claim["id"])
                assert check.get("reading") not in reading, (here, check["what"])
                reading.add(check.get("reading"))


@every_claim
def test_the_runs_of_a_rule_are_those_of_every_profile(paper, claim):
    """Smoke and the stored records by their rows, the paper's profile by its settings.

    An experiment of a hundred runs has few of them at smoke, and says which.
    """
    for check in claim["check"]:
        for profile in catalogue.profiles(paper, check["experiment"]):
            own = catalogue._table(paper)[check["experiment"]].get(profile, {})
            if profile == "smoke" and "runs" in own:
                continue
            settings = catalogue.settings(paper, check["experiment"], profile)
            asked = {v for k, v in check["with"].items()
                     if k in ("a", "b", "run", "of", "than_a", "than_b")}  # fmt: skip
            asked |= {*check["with"].get("runs", [])}
            try:
                runs = set(records.load(paper, check["experiment"], profile).frame["run"])
            except records.MissingRecord:
                runs = {run["run"] for run in settings.get("runs", [])} or asked
            assert asked <= runs, (check["what"], profile)


@every_claim
def test_finding_is_the_expected_one(paper, claim, verdicts):
    (row,) = (row for row in verdicts[paper] if row["id"] == claim["id"])
    assert row["finding"] == claim["expected"], row["tally"]


def test_no_sure_difference_with_the_right_sign_is_called_none_or_the_opposite(verdicts):
    for rows in verdicts.values():
        for check in (
            check for row in rows for check in row["checks"] if row["kind"] == "measured"
        ):
            few = "seeds are fewer than" in check["why"]  # of which no word is said
            if check["asked"].startswith("above 0") and (check["low"] or 0) > 0 and not few:
                negligible = check["estimate"] < check["s"] / 10
                assert check["outcome"] in (HOLDS, SMALLER) or negligible, check


@pytest.mark.slow
def test_rows_hold_what_readers_and_machines_need(verdicts):
    rows = verdicts[PAPER]
    assert [row["id"] for row in rows] == [claim["id"] for claim in claims.claims_of(PAPER)]
    for row, claim in zip(rows, claims.claims_of(PAPER), strict=True):
        assert row["finding"] in claims.FINDINGS and row["statement"] == claim["statement"]
    most = max(rows, key=lambda row: len(row["checks"]))
    found = claims.checks(PAPER, most["id"])
    assert most["checks"] == [vars(check) for check in found]
    assert most["tally"] == claims.tally_checks(found)


def test_without_records_there_is_no_finding(tmp_path):
    for row in claims.judge(PAPER, tmp_path):
        counts = any(check["essential"] for check in row["checks"])  # else it is proved without
        assert row["finding"] == (NO_RECORD if counts else "proved")
        assert row["profile"] == row["data"] == ""
        assert {check["measured"] for check in row["checks"]} == {NO_RECORD}


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(FedlibError, match=r"Did you mean 'participation'\?"):
        claims.judge("participaton")
    with pytest.raises(FedlibError, match=r"claim 'GFA-C9'\. .*Valid: GFA-C1, "):
        claims.checks(PAPER, "GFA-C9")


# --- scale, data and foresight --------------------------------------------------------------------

IDEAL = {"amplified": 0.3, "wait-minibatch": 0.4, "wait-full": 0.405, "matched-rate": 0.5,
         "no-amplification": 0.6}  # fmt: skip


def fig1(tmp_path, losses, profile="quick", like="", fidelity="canonical", **changed):
    """Store Figure 1 with these final losses (accuracy is one minus loss); judge GFA-C1.

    ``like`` is the profile whose settings the records have, by default their own, and ``changed``
    are other settings.
    """
    noise = 0.001 * np.arange(5)
    loss = curves({run: value + noise for run, value in losses.items()})
    accuracy = curves({r: 1 - v + noise for r, v in losses.items()}, "accuracy", "test")
    for name in ("fig1", "fig1-tuned"):
        settings = catalogue.settings(PAPER, name, like or profile) | {"seeds": 5} | changed
        manifest = dict(
            paper=PAPER, experiment=name, profile=profile, settings=settings,
            seeds=[1, 2, 3, 4, 5],
            fidelity=fidelity, data={"file": "hash"}, device="CPU", date="2026-05-04T03:02:01",
            commit="a" * 40, wall_seconds=1.0, diverged={}, versions={},
            instructions="AVX2", small=None,
            **freshness.present_code(settings),
        )  # fmt: skip
        records.save(tmp_path, pd.concat([loss, accuracy]), manifest)
    (row,) = claims.judge(PAPER, tmp_path, ["GFA-C1"])
    return row


def test_order_in_the_record_decides(tmp_path):
    row = fig1(tmp_path, IDEAL)
    assert row["finding"] == "confirmed" and row["tally"].startswith("28 of 28 hold;")
    assert row["profile"] == "quick" and row["record"].startswith("fig1-tuned.quick, ")
    swapped = IDEAL | {"amplified": IDEAL["no-amplification"], "no-amplification": 0.3}
    assert fig1(tmp_path, swapped)["tally"].startswith("4 of 28 hold, 24 reversed;")
    backwards = {run: -value for run, value in IDEAL.items()} | {"wait-full": -0.5}
    assert fig1(tmp_path, backwards)["finding"] == "contradicted"


def test_reproduced_takes_the_paper_s_scale_and_the_paper_s_data(tmp_path):
    """The name of a profile decides nothing, and no data set is the paper's own for every paper."""
    own = fig1(tmp_path, IDEAL, "paper")
    assert (own["scale"], own["data"]) == ([], scale.THEIR_BYTES) and claims.is_reproduced(own)
    copy = fig1(tmp_path, IDEAL, "paper", fidelity="re-encoded")
    assert copy["data"] == scale.COPY and claims.is_reproduced(copy)
    assert fig1(tmp_path, IDEAL, "quick", like="paper")["scale"] == [], "whatever it is called"
    other = fig1(tmp_path, IDEAL, "paper", dataset="cifar10")
    assert other["data"] == scale.ANOTHER and not claims.is_reproduced(other)
    digits = fig1(tmp_path, IDEAL, "paper", dataset="digits")
    assert digits["data"] == scale.SUBSTITUTE and not claims.is_reproduced(digits)
    short = fig1(tmp_path, IDEAL, "paper", rounds=150_000, looks=3)
    assert short["scale"] == ["rounds: 150,000, the paper's: 300,000"]
    assert not claims.is_reproduced(short)


def test_what_no_profile_has_of_the_paper_s_scale_is_said_of_every_record():
    (row,) = claims.judge("hierarchy", ids=["HFL-C8"])
    (line,) = (line for line in row["scale"] if "3,400" in line)
    assert not claims.is_own_scale(row) and not row["own"]
    assert "clients" in scale.sentence(row["scale"], row["data"]) and "40 active" in line
    claim = {c["id"]: c for c in claims.claims_of("hierarchy")}["HFL-C8"]
    held = claims.read_from("hierarchy", row["record"])
    bare = claims.measured_at({k: v for k, v in claim.items() if k != "differs"}, held)
    assert row["scale"] == [line, *bare["scale"]]


def test_what_was_judged_already_is_not_judged_again(tmp_path, monkeypatch):
    (row,) = rows = claims.judge("vertical", ids=["VFB2-C9"])
    assert json.loads(json.dumps(rows)) == rows
    page = tmp_path / "judged.json"
    page.write_text(json.dumps({"vertical": [row | {"finding": "handed over"}]}))
    monkeypatch.setenv("FEDLIB_JUDGED", str(page))
    monkeypatch.setattr(claims, "_handed_over", claims._handed_over.__wrapped__)
    again, other = claims.judge("vertical", ids=["VFB2-C9", "VFB2-C8"])
    assert again == row | {"finding": "handed over"} and other["finding"] != "handed over"
    (there,) = claims.judge("vertical", tmp_path, ["VFB2-C9"])
    assert there["finding"] != "handed over", "other records"


def test_a_setting_of_one_run_is_part_of_the_scale():
    settings = catalogue.settings(PAPER, "fig1", "paper")
    runs = [dict(run) for run in settings["runs"]]
    held = record(pd.DataFrame(), paper=PAPER, experiment="fig1", settings=settings)
    assert scale.differences_in_scale(held) == []
    settings = settings | {"runs": [runs[0] | {"rounds": 5}, *runs[1:]]}
    held = record(pd.DataFrame(), paper=PAPER, experiment="fig1", settings=settings)
    (line,) = scale.differences_in_scale(held)
    assert line.startswith("rounds: 5, the paper's: ")


def test_numbers_of_clients_are_compared_where_runs_take_one_of_them():
    five, nine = (scale.differences_in_scale(records.load("tiers", n)) for n in ("fig5", "fig9"))
    assert not [line for line in five if "clients" in line], "ten and twenty, as in the paper"
    assert [line for line in nine if "clients" in line] == ["clients: 10, the paper's: 50"]


def test_a_claim_of_several_records_says_which_of_them_differ(tmp_path):
    (row,) = claims.judge("tiers", None, ["TDCD-C8"])
    each = {name: scale.differences_in_scale(records.load("tiers", name))
            for name in ("fig3", "fig4", "fig5")}  # fmt: skip
    for differ in each.values():
        assert differ
        for line in differ:
            (told,) = [t for t in row["scale"] if t.startswith(line)]
            where = [other for other, lines in each.items() if line in lines]
            assert told == line + (f" ({', '.join(where)})" if len(where) < 3 else "")
    assert row["sets"] == {"fashion-mnist": scale.ANOTHER, "ehr-like": scale.SUBSTITUTE,
                           "shapes-12view": scale.SUBSTITUTE}  # fmt: skip
    assert row["data"] == scale.SUBSTITUTE, "the furthest from the paper's"


def test_a_run_that_is_never_at_its_goal_has_not_diverged():
    values = np.array([-np.inf, 0.1])
    got = measures.Measured(values, values, lost="one diverged in 1 of 2 seeds")
    for metric, verb in (("log speed", "did not come to the goal"), ("loss", "diverged")):
        check = {"measure": "advantage", "asks": "better", "with": {"metric": metric}}
        assert claims._said(check, got, 0.95) == f"one {verb} in 1 of 2 seeds"


def test_a_part_of_a_set_is_a_copy_of_it():
    held = record(pd.DataFrame(), settings={"dataset": "givemesomecredit-partial"},
                  fidelity="canonical")  # fmt: skip
    assert scale.data(held, ["givemesomecredit"]) == scale.COPY
    made = record(pd.DataFrame(), settings={"dataset": "news20-like"}, fidelity="canonical")
    assert scale.data(made, ["news20"]) == scale.SUBSTITUTE, "other posts, of the same shape"
    assert scale.data(held, ["uci-credit"]) == scale.ANOTHER
    for named in ("givemesomecredit-partial", "givemesomecredit"):  # the whole, and a part of it
        assert scale.data(held, [named, "unnamed"]) == scale.ASSUMED
    assert scale.data(held, ["uci-credit", "unnamed"]) == scale.ANOTHER


def test_scale_and_data_in_a_sentence():
    lines = ["network: mlp, the paper's: lenet", "rounds: 5, the paper's: 9 (fig1)"]
    exact = scale.sentence([], scale.THEIR_BYTES)
    assert exact == "At the paper's own scale, on the paper's own bytes."
    assert scale.sentence(lines, scale.ANOTHER) == (
        "Not at the paper's scale (network, rounds), on another set."
    )
    assert scale.sentence([scale.OUR_EXPERIMENT], scale.COPY) == (
        "In an experiment of ours, on the paper's set, another copy."
    )
    assert scale.sentence([], scale.NONE) == "At the paper's own scale."
    assert scale.sentence([], "") == ""


@pytest.mark.parametrize("paper", paths.papers("claims.toml"))
def test_what_already_runs_at_the_paper_s_own_setting_is_said_to(paper, verdicts):
    own = {"PERM-C1", "HFL-C4", "HFL-C9-why", "HFL-C13", "VFB2-C9"}
    ours = {"PERM-C1-control", "PERM-C2", "PERM-C8", "PERM-C10", "PERM-C11"}
    ours |= {"HFL-C16", "VFB2-C8"}
    for row in verdicts[paper]:
        if row["id"] in own:
            assert claims.is_own_scale(row) and claims.is_own_data(row), row["id"]
        if row["id"] in ours:  # the paper runs nothing there
            assert row["scale"] == [scale.OUR_EXPERIMENT] and not claims.is_reproduced(row)
    if paper == "hierarchy":
        held = records.load(paper, "fig3", "quick")
        assert held.manifest["settings"]["dataset"] == "fashion-mnist"
        assert scale.data(held, ["cifar10"]) == scale.ANOTHER, "Fashion-MNIST is not CIFAR-10"
        assert scale.differences_in_scale(held)


def test_who_does_not_write_down_the_paper_s_size_is_not_said_to_run_at_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_PAPERS", str(tmp_path))
    often = '[often]\nwhere = ""\ntitle = "Often"\nkind = "mine:often"\nseeds = 5\nrounds = 5\n'
    for name, more, differ in (
        ("neither", "", [scale.OUR_EXPERIMENT]),
        ("all", "[profiles.paper]\n", []),
        ("this", "[often.paper]\n", []),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "experiments.toml").write_text(often + more)
        assert ("paper" in catalogue.profiles(name, "often")) is (not differ)
        held = record(pd.DataFrame(), paper=name, experiment="often", settings={"rounds": 5})
        assert scale.differences_in_scale(held) == differ


def test_fewer_seeds_than_the_profile_asks_for_decide_nothing(tmp_path):
    row = fig1(tmp_path, IDEAL, seeds=6)
    assert row["finding"] == OPEN
    told = {check["why"] for check in row["checks"] if check["essential"]}
    assert told == {"5 seeds are fewer than 6"}


def test_intervals_are_simultaneous_over_essential_checks_and_over_controls(monkeypatch):
    held = record(curves({"a": np.zeros(5), "b": [1, 2, 3, 4, 6]}))
    monkeypatch.setattr(claims.records, "load", lambda *names: held)
    check = dict(asks="better", experiment="e", measure="advantage", what="q") | {
        "with": dict(a="a", b="b", metric="loss", split="train")
    }
    control = check | {"essential": False}
    claim = dict(kind="measured", smallest={"loss": 0.1}, check=[check] * 5 + [control] * 2)
    gain = measures.advantage(held, "a", "b", "loss", "train")
    for one, level in ((check, 0.99), (control, 0.975), (check | {"looks": 2}, 0.995)):
        got = claims._check(PAPER, claim, one, None)
        assert (got.low, got.high) == gain.interval(level)
        assert got.measured == gain.words(level) != gain.words(0.95)
        assert got.estimate == pytest.approx(3.2) and got.s == 0.1


def test_what_numbers_do_not_say_is_said(monkeypatch):
    """Why nothing was decided, which way it differs, and that s is near."""

    def why(kind, values):
        claim, check = SIGNATURES[kind]
        held = record(imitation(check, np.asarray(values, float)), settings={})
        monkeypatch.setattr(claims.records, "load", lambda *names: held)
        return claims._check(PAPER, claim, check, None).why

    better, same = (next(k for k in SIGNATURES if k[:3] == ("advantage", asked, 1))
                    for asked in ("better", "same"))  # fmt: skip
    band = next(k for k in SIGNATURES if k[:4] == ("final", "within", 1, "band"))
    assert why(better, 0.21 + 0.02 * FEW) == "about as much as asked"
    assert why(better, 0.6 + 0.001 * FEW) == ""
    assert why(same, 0.6 + 0.001 * FEW) == "better" and why(same, -0.6 + 0.001 * FEW) == "worse"
    assert why(band, 3.5 + 0.001 * FEW) == "above" and why(band, 1.5 + 0.001 * FEW) == "below"
    assert why(better, 3 * FEW) == "40 seeds would not decide"


def test_a_record_without_the_run_counts_as_no_record(tmp_path):
    row = fig1(tmp_path, {run: v for run, v in IDEAL.items() if run != "amplified"})
    assert row["finding"] == NO_RECORD
    assert "no rows for {'run': 'amplified'" in row["checks"][0]["why"]


CLAIM = """
[[claim]]
id = "A-C1"
where = "Figure 1"
kind = "measured"
statement = "One is better."
data = ["mnist"]
"""
SOONER = """smallest = {{ time = 1.0 }}
check = [{{ what = "w", asks = "{}", experiment = "e", measure = "sooner", with = {{ a = "a", b = "b", metric = "loss", split = "train", target = 1.0, t_comm = 1.0 }} }}]
"""  # noqa: E501
NO_NUMBER = """smallest = { loss = nan }
check = [{ what = "w", asks = "better", experiment = "e", measure = "advantage", with = { a = "a", b = "b", metric = "loss", split = "train" } }]
"""  # noqa: E501
PERCENT = """smallest = { loss = 1.0 }
check = [{ what = "w", asks = "better", experiment = "e", measure = "advantage", with = { a = "a", b = "b", metric = "loss", split = "train", share = 10.0 } }]
"""  # noqa: E501


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('data = ["mnist"]', "", "claim A-C1: the paper's own data set is not named. Add data ="),
        ('"mnist"', '"minst"', "data set in .*claim A-C1: 'minst'. Did you mean 'mnist'"),
        ("data", 'expected = "mixed"\ndata', "finding in .*claim A-C1: 'mixed'"),
        ("data", SOONER.format("same") + "data", "a factor can be 'better' alone; got same"),
        ("data", SOONER.format("better") + "data", "above 1, and finite; got time = 1.0"),
        ("data", NO_NUMBER + "data", "above 1, and finite; got loss = nan"),
        ("data", PERCENT + "data", "claim A-C1: share is a part of the run, 0 to 1; got 10"),
    ],
)
def test_a_claim_that_lacks_something_is_named_with_what_to_add(tmp_path, old, new, message):
    page = tmp_path / "claims.toml"
    page.write_text(CLAIM)
    claims._read(page)
    claims._read.cache_clear()
    page.write_text(CLAIM.replace(old, new))
    with pytest.raises(FedlibError, match=message):
        claims._read(page)


def test_a_run_keeps_the_rules_of_its_day(tmp_path):
    held = experiments.run(PAPER, "figB2", "smoke", seeds=[7], out=tmp_path, progress=False)
    assert held.manifest["rules"] == ages.rules(PAPER, "figB2") != {}


def test_a_claim_tried_at_two_sizes_shows_both(monkeypatch, tmp_path):
    """A larger record of the other sign: the smaller one's finding stands beside."""
    small = records.load("hierarchy", "fig6", "quick")
    records.save(tmp_path, small.frame, small.manifest)
    (row,) = claims.judge("hierarchy", tmp_path, ["HFL-C4"])
    assert row["profile"] == "quick" and row["sizes"] == []
    settings = small.manifest["settings"] | {"model": ["mlp", 784, 60, 10]}
    rows = small.frame.assign(value=-small.frame["value"])
    records.save(tmp_path, rows, small.manifest | {"profile": "paper", "settings": settings})
    tiny = small.manifest["settings"] | {"model": ["softmax", 784, 10]}  # tells nothing: not shown
    records.save(tmp_path, small.frame, small.manifest | {"profile": "smoke", "settings": tiny})
    (row,) = claims.judge("hierarchy", tmp_path, ["HFL-C4"])
    (smaller,) = row["sizes"]
    assert row["profile"] == "paper" and row["finding"] == "contradicted in part"
    assert smaller["finding"] == "depends on the reading"
    assert row["scale"] and smaller["scale"] == [] and smaller["profile"] == "quick"


def test_the_part_of_a_claim_that_is_the_paper_s_own(tmp_path):
    """One of four data sets is the paper's, in full: what it says by itself stands beside."""
    for data, form in itertools.product(
        ("credit", "partial", "news", "webspam"), ("convex", "nonconvex")
    ):
        profile = "paper" if data == "credit" else "quick"
        held = records.load("vertical", f"{data}-{form}", profile)
        wrong = -1 if data == "credit" else 1  # then SGD ends below the others there
        records.save(tmp_path, held.frame.assign(value=wrong * held.frame["value"]), held.manifest)
    (row,) = claims.judge("vertical", tmp_path, ["VFB2-C4"])
    own = row["own"]
    assert (own["finding"], own["checks"], own["of"]) == ("contradicted", 4, 16)
    assert own["record"] == "credit-convex.paper, credit-nonconvex.paper"
    assert row["finding"] == "contradicted in part" and row["data"] == scale.SUBSTITUTE
    assert claims.own_in_words(row).startswith("4 of 16 checks are at the paper's own scale and")
    for form in ("convex", "nonconvex"):
        held = records.load("vertical", f"credit-{form}", "paper")
        short = held.manifest | {"settings": held.manifest["settings"] | {"m": 1}}
        records.save(tmp_path, held.frame, short)
    (row,) = claims.judge("vertical", tmp_path, ["VFB2-C4"])
    assert row["own"] == {} and claims.own_in_words(row) == ""
    (whole,) = claims.judge("personalization", ids=["PERM-C1"])
    assert whole["scale"] == [] and whole["own"] == {}


LOG = {"with": {"metric": "log gap"}}


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (dict(asks="better"), "above 0, by 0.4"),
        (dict(asks="same"), "within ±0.4"),
        (dict(asks="within", bounds=[1.0, 1.0]), "exactly 1"),
        (dict(asks="within", bounds=[0.5, math.inf]), "at least 0.5"),
        (dict(asks="within", bounds=[-math.inf, 2.0]), "at most 2"),
        (dict(asks="within", bounds=[1.0, 2.0]), "between 1 and 2"),
        (dict(asks="better", measure=next(iter(claims.RATIOS))), "above 1, by a factor 1.49"),
        (dict(asks="better") | LOG, "above 1, by a factor 1.49"),
        (dict(asks="within", bounds=[-math.inf, -23.0259]) | LOG, "at most 1e-10"),
    ],
)
def test_what_is_asked_in_words(check, words):
    assert claims._words(dict(measure="final") | check, 0.4) == words


def test_a_question_the_other_way_round():
    turned, plain = (claims.Question("better", 0.1, sign) for sign in (-1, 1))
    for low, high, d in ((-0.3, -0.05, -0.15), (-0.1, -0.01, -0.05), (-0.1, 0.3, 0.1)):
        assert turned.outcome(low, high, d) == plain.outcome(-high, -low, -d)
    assert turned.outcome(-0.3, -0.05, -0.15) == HOLDS != plain.outcome(-0.3, -0.05, -0.15)
    least = dict(asks="within", measure="advantage", bounds=[0.0, math.inf])
    assert claims.question({}, least) == claims.Question("no worse", 0.0)


def test_four_seeds_are_too_few_and_five_are_enough(monkeypatch):
    check = dict(asks="better", experiment="e", measure="advantage", what="q")
    check |= {"with": dict(a="a", b="b", metric="loss", split="train")}
    claim = dict(kind="measured", smallest={"loss": 0.1}, check=[check])
    for seeds, outcome in ((4, OPEN), (5, HOLDS)):
        values = np.linspace(1, 1.1, seeds)
        held = record(curves({"a": np.zeros(seeds), "b": values}), settings={})
        monkeypatch.setattr(claims.records, "load", lambda *names, held=held: held)
        assert claims._check(PAPER, claim, check, None).outcome == outcome


def test_images_averaged_by_one_are_not_averaged():
    assert scale._different({"pool": None}, {"pool": 1}, {}) == {}
    assert scale._different({}, {"pool": 2}, {}) == {"pool": "inputs averaged: 1, the paper's: 2"}
    assert scale._different({"pool": 2}, {}, {}) == {"pool": "inputs averaged: 2, the paper's: 1"}
    words = scale._different({"iid": True, "folded": None}, {"iid": False, "folded": 8}, {})
    assert [line.partition(": ")[2] for line in words.values()] == [
        "none, the paper's: 8", "yes, the paper's: no"]  # fmt: skip


def test_what_a_text_does_not_give_is_not_said_to_be_the_paper_s():
    theirs = {"steps": 9, "model": ["lstm", 8], "rounds": 3}
    untold = {"steps": "by its curves", "lstm": "in its code"}
    assert [*scale._different({}, theirs, untold).values()] == [
        "network: none, at full size lstm 8 (in its code)", "rounds: none, the paper's: 3",
        "steps: none, at full size 9 (by its curves)"]  # fmt: skip
    for names, line in (
        (("tiers", "fig3"), "steps: 6,000, at full size 36,000 (ours, the text gives none)"),
        (("personalization", "fig6"),
         "samples a client: 300, at full size 1,084 (ours, all that the set can give)"),
        (("vertical", "convergence"), scale.OUR_EXPERIMENT),
    ):
        assert line in scale.differences_in_scale(records.load(*names, "quick"))
