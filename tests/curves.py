"""Records made by hand, for the tests of what is measured in records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.lab.evidence.records import Record


def curves(values, metric="loss", split="train", **columns):
    """Return rows for runs: ``values[run]`` is ``[seeds, evaluations]`` or ``[seeds]``."""
    rows = []
    for run, array in values.items():
        for seed, curve in enumerate(np.asarray(array, dtype=float), start=1):
            for t, value in enumerate(np.atleast_1d(curve)):
                row = dict(run=run, seed=seed, round=10 * t, split=split, metric=metric)
                rows.append(row | columns | dict(value=value))
    return pd.DataFrame(rows)


def record(frame, **manifest):
    return Record(frame, dict(profile="quick", settings={}) | manifest, Path("made.csv.gz"))
