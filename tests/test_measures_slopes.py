"""Slopes of two runs, compared: known powers, paired by seed."""

from __future__ import annotations

import pandas as pd
import pytest
from curves import record

from fedlib.lab.evidence import measures

POWERS = {"a": {1: -1.0, 2: -0.5, 3: -2.0}, "b": {3: -1.5, 1: -2.0, 2: 0.0}}
KNOWN = pytest.approx([1.0, -0.5, -0.5])


def held(powers=POWERS, below=None):
    """Return a record of powers of x; below 5 the value is ``below``, where that is given."""
    return record(pd.DataFrame([
        dict(run=run, seed=seed, metric="excess", R=x,
             value=below if below and x < 5 else seed * x**power)
        for run, own in powers.items() for seed, power in own.items() for x in (1.0, 2, 5, 10, 100)
    ]))  # fmt: skip


def test_the_difference_of_slopes_goes_by_seed_not_by_row():
    got = measures.flatter(held(), "a", "b", "excess", "R")
    assert got.low == KNOWN
    swapped = measures.flatter(held(), "b", "a", "excess", "R")
    assert swapped.low == pytest.approx([-1.0, 0.5, 0.5])


def test_it_begins_at_its_start():
    bent = held(below=1.0)
    assert measures.flatter(bent, "a", "b", "excess", "R", 5).low == KNOWN
    assert measures.flatter(bent, "a", "b", "excess", "R").low != KNOWN


def test_both_runs_have_the_same_seeds():
    with pytest.raises(measures.MissingRows, match="differ in seeds"):
        measures.flatter(held({"a": {1: -1.0, 2: -1.0}, "b": {1: -1.0}}), "a", "b", "excess", "R")
