"""The round loop: evaluation, callbacks, progress, checkpoints and resuming."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm.auto import tqdm

from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError

Callback = Callable[[Any, dict[str, Any]], None]


@dataclass
class History:
    """What a simulation leaves behind.

    Attributes
    ----------
    frame
        Tidy rows: run, seed, round, clock, split, metric, value.
    state
        The algorithm's state after the last round.
    diverged
        Round in which each diverged seed was first seen with a value that is not finite.
    """

    frame: pd.DataFrame
    state: Any
    diverged: dict[int, int]


def simulate(
    algorithm: Any,
    task: Task,
    rounds: int,
    seeds: Sequence[int] = (0,),
    *,
    state: Any = None,
    evaluate_every: int = 1,
    splits: Iterable[str] = ("train",),
    limit: int | None = None,
    evaluate: Callable[[Any, Task], dict[tuple[str, str], torch.Tensor]] | None = None,
    callbacks: Iterable[Callback] = (),
    name: str = "",
    progress: bool = True,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 0,
) -> History:
    """Run an algorithm for a number of rounds, all seeds side by side.

    Parameters
    ----------
    algorithm
        Anything with ``init(task, seeds)`` and ``round(state, task)``.
    task
        What is learned.
    rounds
        Rounds to run after the given or initial state.
    seeds
        One run a seed.
    state
        Start from this state instead of ``algorithm.init``.
    evaluate_every
        Evaluate before the first round, every so many rounds, and after the last.
    splits, limit
        Passed to :meth:`Task.evaluate`: which splits, and on how many samples of ``train``.
    evaluate
        Replaces the evaluation: ``(state, task) -> {(split, metric): [R]}``.
    callbacks
        Called after each round with the state and the round's metrics.
    name
        Shown in the progress bar and stored in the column ``run``.
    progress
        Show a progress bar.
    checkpoint, checkpoint_every
        Save to this file every so many rounds, and go on from it if it exists.

    Returns
    -------
    History
        When every run has diverged the loop ends early; ``History.diverged`` says when.
    """
    if rounds < 0 or evaluate_every < 1:
        raise FedlibError(
            f"rounds must be at least 0 and evaluate_every at least 1; "
            f"got {rounds} and {evaluate_every}."
        )
    splits = tuple(splits)
    measure = evaluate or (lambda s, k: _evaluate(s, k, splits, limit))
    state = algorithm.init(task, seeds) if state is None else state
    first, rows, diverged = state.t, [], {}
    label = (
        f"{algorithm!r} from {first} for {rounds} rounds, seeds {tuple(seeds)}, models "
        f"{tuple(state.x.shape)}, evaluated every {evaluate_every} on {splits}, limit {limit}"
    )
    if checkpoint is not None and Path(checkpoint).exists():
        state, rows, diverged = _restore(Path(checkpoint), state, label)
    with tqdm(total=rounds, initial=state.t - first, desc=name, disable=not progress) as bar:
        if not rows:
            _record(rows, diverged, measure(state, task), state, name)
        while state.t < first + rounds and len(diverged) < len(state.seeds):
            state, metrics = algorithm.round(state, task)
            for callback in callbacks:
                callback(state, metrics)
            done = state.t - first
            if done % evaluate_every == 0 or done == rounds:
                _record(rows, diverged, measure(state, task), state, name)
            if checkpoint is not None and checkpoint_every and done % checkpoint_every == 0:
                _save(Path(checkpoint), state, rows, diverged, label)
            bar.update()
    return History(pd.DataFrame(rows), state, diverged)


def _evaluate(state: Any, task: Task, splits: Iterable[str], limit: int | None) -> dict:
    values = {}
    for split in splits:
        few = limit if split == "train" else None
        for metric, value in task.evaluate(state.x, split, few).items():
            values[split, metric] = value
    return values


def _record(rows: list, diverged: dict, values: dict, state: Any, name: str) -> None:
    """Append one row a run and metric; a value that is not finite marks the run as diverged."""
    clock = float(getattr(state, "clock", state.t))
    for (split, metric), value in values.items():
        for seed, v in zip(state.seeds, value.tolist(), strict=True):
            row = dict(run=name, seed=seed, round=state.t, clock=clock)
            rows.append(row | dict(split=split, metric=metric, value=v))
            if not abs(v) < float("inf"):
                diverged.setdefault(seed, state.t)


def _save(path: Path, state: Any, rows: list, diverged: dict, label: str) -> None:
    """Write a checkpoint beside its place and move it there in one step."""
    fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save({"label": label, "state": fields, "rows": rows, "diverged": diverged}, part)
    os.replace(part, path)


def _restore(path: Path, state: Any, label: str) -> tuple[Any, list, dict]:
    try:
        held = torch.load(path, weights_only=False, map_location=state.x.device)
        found, fields = held["label"], held["state"]
    except Exception as error:
        raise FedlibError(f"Checkpoint {path} cannot be read ({error!r}). Delete it.") from error
    if found != label:
        raise FedlibError(
            f"Checkpoint {path} belongs to another run.\n  found:    {found}\n"
            f"  expected: {label}\nDelete it or choose another file."
        )
    return type(state)(**fields), held["rows"], held["diverged"]
