"""Every experiment without a record starts: one round on made-up data of the right shape.

Shapes and names only. A setting that no study reads the same way at the paper's scale is found
here, not after hours on a GPU. What has a record has run, and no record is stale: test_records.py.
"""

from __future__ import annotations

import functools
import json

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from scipy.optimize import minimize

from fedlib import datasets
from fedlib.datasets.owned import OwnedDataset, Owners
from fedlib.engine import models
from fedlib.lab.evidence import catalogue, records, tuning
from fedlib.lab.job import Job
from fedlib.lab.studies import shared
from fedlib.lab.studies import vertical as columnwise
from fedlib.papers.vertical import Columns

pytestmark = pytest.mark.slow

RUN = {(m["paper"], m["experiment"], m["profile"]) for m in records.manifests()}
CASES = [
    (paper, name, profile)
    for paper in catalogue.papers()
    for name in catalogue.experiment_names(paper)
    for profile in catalogue.profiles(paper, name)
    if (paper, name, profile) not in RUN
]
SHORT = dict(
    rounds=1, warmup_rounds=0, compression=1, evaluate_on=20, evaluate_every=1, looks=1, steps=1,
    ticks=1, rounds_grid=[256], seeds=1, local_steps=1, grid=[1e-3], minibatches=1, products=1,
    passes=1.0, goal=1.0, every=1.0, pairs=6, chains=3,
)  # fmt: skip
FEW = dict(clients=2, clients_grid=[2], batch_size=4, samples=40, evaluate_on=4)
COHORT = dict(clients=20, cohort=2)
CLOCKED = ("hierarchy", "beyond")
CLOCK = dict(time=1.0, batch_size=1, alpha=100.0, owners=40)  # one round, everybody with data


OWNERS = 50  # of made-up data whose rows have owners
MADE: dict[str, pd.DataFrame] = {}


@functools.lru_cache(maxsize=2)
def stand_in(name: str, rows: int) -> datasets.Dataset:
    """Return random data of a card's shape, every class in both parts."""
    card, rng = datasets.card(name), np.random.default_rng(0)
    parts, text = [], card.format == "plays-folder"
    for count in (rows, OWNERS):
        x = rng.standard_normal((count, *card.shape), dtype=np.float32)
        x = rng.integers(0, len(card.classes), x.shape, dtype=np.uint8) if text else x
        parts += [x, rng.permutation(np.arange(count) % len(card.classes))]
    made = (name, *parts, card.classes, card, {"made": "up"}, "unverified")
    if not text and card.generator.get("kind") != "writers":
        return datasets.Dataset(*made)
    names = tuple(f"owner {n}" for n in range(OWNERS))
    return OwnedDataset(*made, Owners(names, np.arange(rows) % OWNERS, np.arange(OWNERS)))


def columns_stand_in(name: str, **options) -> Columns:
    """Return random rows of a card's shape, few of them, sparse where the columns are many."""
    card, rng, parts = datasets.card(name), np.random.default_rng(0), []
    for rows in (50, 20):
        if (d := card.shape[0]) > 1000:
            places = rng.integers(0, d, (rows, 5))
            held = np.ones(places.size), (np.repeat(np.arange(rows), 5), places.ravel())
            x = sparse.csr_array(sparse.coo_array(held, shape=(rows, d)))
        else:
            x = rng.standard_normal((rows, d))
        y = rng.permutation(np.arange(rows) % 2)
        parts += [x, 2.0 * y - 1 if card.classes else y + 0.1 * rng.random(rows)]
    span = None if card.classes else (0.0, 1.0)
    return Columns(name, *parts, card.classes, card, {"made": "up"}, "unverified", span=span)


@pytest.mark.parametrize("paper, name, profile", CASES, ids=map(" ".join, CASES))
def test_one_round_of_every_experiment_of_every_profile(paper, name, profile, monkeypatch):
    settings = catalogue.settings(paper, name, profile)
    short = {k: v for k, v in SHORT.items() if k in settings}
    if isinstance(settings.get("local_steps"), list):
        short["local_steps"] = [1] if settings["local_steps"] else []
    if "intervals" in settings:
        short |= dict(rounds=20, intervals=[5, 10])
    if "cohorts" in settings:
        short["rounds"] = 4
    if paper == "tiers":
        short |= {k: v for k, v in FEW.items() if k in (*settings, "samples")}
        short["clients"] = min(FEW["clients"], settings.get("clients", 2))
        short["runs"] = [{**run, "Q": 1} if "Q" in run else run for run in settings.get("runs", [])]
    if "cohort" in settings and "cohorts" not in settings:
        short |= COHORT
    if paper in CLOCKED:
        known = ("time", "batch_size", "alpha", "owners") if "split" in settings else ("time",)
        short |= {k: CLOCK[k] for k in known}
        short.pop("rounds_grid", None)
        if "minibatches" in settings:  # every client's gradients, at each model
            short["groups"] = [2] * len(settings["groups"])
    if paper == "personalization" and "judging" in settings:
        short |= dict(clients=5, samples=20, batch_size=2, warmup=0)
        few = ("clients", "samples", "warmup")
        short["runs"] = [run | {k: short[k] for k in few if k in run} for run in settings["runs"]]
    if paper == "vertical":
        short |= {
            k: v for k, v in dict(rows=40, tests=20, columns=64, folded=64).items() if k in settings
        }
        short["runs"] = [run | {k: 40 for k in run if k == "rows"} for run in settings["runs"]]
        monkeypatch.setattr(columnwise, "load_columns", columns_stand_in)
        few = functools.partial(minimize, options={"maxiter": 3})
        monkeypatch.setattr(columnwise, "minimize", lambda *a, options, **k: few(*a, **k))
    if paper == "methods":
        short |= dict(batch_size=2, **({"samples": 10} if "samples" in settings else {}))
    rows = 40 if paper == "tiers" else 400
    if paper in CLOCKED and "minibatches" not in settings:
        rows = 4000
    monkeypatch.setattr(datasets, "load", lambda name, **options: stand_in(name, rows))
    asked = {**settings, **short}
    if "tuned" in asked:
        asked = tuning.apply(asked, {run["run"]: 1e-3 for run in asked["runs"]})
    monkeypatch.setattr(tuning, "MOST", 1)  # values of a grid
    monkeypatch.setitem(shared.FITTED, "resnet18", models.normed_cnn)  # whole ones: see test_models
    same = json.dumps(asked, sort_keys=True)  # two profiles often differ by what is short here
    if same not in MADE:
        MADE[same] = tuning.study(settings["kind"])(Job(asked, (1,), progress=False)).frame
    frame = MADE[same]
    assert len(frame) and {"run", "seed", "metric", "value"} <= set(frame.columns)
    named = {run["run"] for run in asked.get("runs", [])}
    own = frame["method" if "method" in frame else "run"]
    assert named <= set(own), "every run has rows under its own name"
