"""Everything that is to be known about a device, in one command: right? fast? and the next records.

Each part is short, and what it found is kept before the next one begins.
"""

from __future__ import annotations

import importlib
import importlib.util

from fedlib.evidence import catalogue
from fedlib.papers import trials as shared
from fedlib.papers.trials import Trial


def trials() -> dict[str, Trial]:
    """Return every trial by name: FedAvg with each model, then each paper's algorithms."""
    found = dict(shared.TRIALS)
    for paper in catalogue.papers():
        for package in catalogue.packages(paper):
            if importlib.util.find_spec(f"{package}.trials"):
                held = importlib.import_module(f"{package}.trials").TRIALS
                found |= {f"{paper}: {name}": trial for name, trial in held.items()}
    return found
