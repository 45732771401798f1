"""When a simulation looks at its models, and what it then measures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.engine.protocols import State, TaskLike
from fedlib.errors import FedlibError
from fedlib.files import digest

Measures = dict[tuple[str, str], Tensor]  # values [R] by split and metric


@dataclass(frozen=True)
class Evaluation:
    """When to look and what to measure. The first and the last models are looked at in any case.

    Parameters
    ----------
    every
        Look every so many rounds.
    at
        Look after these rounds instead.
    splits, limit
        Passed to :meth:`Task.evaluate`: which splits, and on how many samples of ``train``. With no
        split nothing is measured.
    measure
        Replaces all that: ``(state, task) -> {(split, metric): [R]}``.

    Raises
    ------
    FedlibError
        For numbers out of range, and what is of another kind.
    """

    every: int = 1
    at: Collection[int] | None = None
    splits: str | Sequence[str] = ("train",)
    limit: int | None = None
    measure: Callable[[Any, Any], Measures] | None = None

    def __post_init__(self) -> None:
        check_whole_number("every", self.every)
        if self.limit is not None:
            check_whole_number("limit", self.limit)
        if not isinstance(self.at, Collection | None):
            raise FedlibError(f"at is rounds, such as (1, 10); got {self.at!r}.")
        for t in () if self.at is None else self.at:
            check_whole_number("Each of at", t, 0)
        if not isinstance(self.splits, Sequence):
            raise FedlibError(f"splits are names, such as ('train', 'test'); got {self.splits!r}.")
        if not (self.measure is None or callable(self.measure)):
            raise FedlibError(f"measure is a function of (state, task); got {self.measure!r}.")

    def due(self, done: int) -> bool:
        """Say whether to look after so many rounds."""
        return done % self.every == 0 if self.at is None else done in self.at

    def of(self, state: State, task: TaskLike, names: Sequence[str]) -> Measures:
        """Measure all models; those of one name together, whatever else is in the batch."""
        if self.measure is not None:
            measured = self.measure(state, task)
            check_measured(measured, len(names))
            return measured
        together = [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
        values = {}
        for split in self.named:
            few = self.limit if split == "train" else None
            results = [task.evaluate(state.x[rows], split, few) for rows in together]
            order = torch.tensor(sum(together, [])).argsort()
            for metric in results[0]:
                values[split, metric] = torch.cat([part[metric] for part in results])[order]
        return values

    @property
    def named(self) -> tuple[str, ...]:
        """The splits, also where one was given alone."""
        return (self.splits,) if isinstance(self.splits, str) else tuple(self.splits)

    def __str__(self) -> str:
        when = f"every {self.every}" if self.at is None else f"at {sorted({*self.at})}"
        own = f", measure {digest(self.measure)[:16]}" if self.measure else ""
        return f"{when} on {self.named}, limit {self.limit}{own}"


def check_measured(measured: Any, runs: int) -> None:
    """Refuse what a measure of one's own returned, unless it has a value for every run."""
    for key, values in measured.items() if isinstance(measured, Mapping) else [(None, measured)]:
        pair = isinstance(key, tuple) and len(key) == 2
        if not pair or not hasattr(values, "tolist") or np.shape(values) != (runs,):
            shape = [*np.shape(values)] if hasattr(values, "tolist") else type(values).__name__
            raise FedlibError(
                "measure(state, task) returns {(split, metric): values}, one value for each of "
                f"{runs} runs, [{runs}]; got {key!r}: {shape}."
            )
