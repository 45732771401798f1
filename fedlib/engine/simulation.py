"""The round loop: evaluation, callbacks, progress, checkpoints and resuming."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from fedlib.engine.checks import check_whole_number, checked_seeds
from fedlib.engine.draws import ahead
from fedlib.engine.pilot import few_rounds
from fedlib.engine.protocols import Algorithm, K, S, State, TaskLike
from fedlib.errors import FedlibError
from fedlib.files import check_regular, digest, make_folder, publish

Callback = Callable[[Any, dict[str, Any]], None]


class OutOfTime(FedlibError):
    """The time given is over. What was done is kept; started again, the work goes on."""


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
        Round in which each diverged seed was first seen with a value that is not finite. Where
        every run was given a name, that of each name: ``{run: {seed: round}}``.
    """

    frame: pd.DataFrame
    state: State
    diverged: dict[int, int] | dict[str, dict[int, int]]


@few_rounds
def simulate(
    algorithm: Algorithm[S, K],
    task: K,
    rounds: int,
    seeds: Sequence[int] = (0,),
    *,
    state: S | None = None,
    evaluate_every: int = 1,
    evaluate_at: Iterable[int] | None = None,
    splits: Iterable[str] = ("train",),
    limit: int | None = None,
    evaluate: Callable[[S, K], dict[tuple[str, str], Tensor]] | None = None,
    callbacks: Iterable[Callback] = (),
    name: str | Sequence[str] = "",
    progress: bool = True,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 0,
    until: float | None = None,
) -> History:
    """Run an algorithm for a number of rounds, all seeds side by side.

    Parameters
    ----------
    algorithm
        Anything with ``init(task, seeds)`` and ``round(state, task)``, see
        :class:`~fedlib.engine.protocols.Algorithm`.
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
    evaluate_at
        Evaluate after these rounds instead, and before the first and after the last; see
        :func:`~fedlib.lab.job.off_cycle`.
    splits, limit
        Passed to :meth:`Task.evaluate`: which splits, and on how many samples of ``train``.
    evaluate
        Replaces the evaluation: ``(state, task) -> {(split, metric): [R]}``.
    callbacks
        Called after each round with the state and the round's metrics.
    name
        Shown in the progress bar and stored in the column ``run``; or a name for each run.
    progress
        Show a progress bar.
    checkpoint, checkpoint_every
        Save to this file every so many rounds and after the last, and go on from it if it exists
        and belongs to the same algorithm, task, start and schedule.
    until
        Stop when ``time.monotonic()`` has passed this, leaving a checkpoint.

    Returns
    -------
    History
        When every run has diverged the loop ends early; ``History.diverged`` says when.

    Raises
    ------
    FedlibError
        For numbers out of range, two runs of one name and seed, or another run's checkpoint.
    OutOfTime
        When the time is over before the last round.
    """
    check_whole_number("rounds", rounds, 0)
    check_whole_number("evaluate_every", evaluate_every)
    check_whole_number("checkpoint_every", checkpoint_every, 0)
    if limit is not None:
        check_whole_number("limit", limit)
    seeds = checked_seeds(seeds)
    splits = (splits,) if isinstance(splits, str) else tuple(splits)
    looks = None if evaluate_at is None else checked_looks(evaluate_at)
    state = algorithm.init(task, seeds) if state is None else state
    runs = _named(name, state.seeds)
    measure = evaluate or (lambda s, k: _evaluate(s, k, runs, splits, limit))
    first, rows, diverged = state.t, [], {}
    label = ""
    if checkpoint is not None:
        label = (
            f"{name!r}: {type(algorithm).__name__} {digest(algorithm)[:16]} from {first} for "
            f"{rounds} rounds, seeds {state.seeds}, models {tuple(state.x.shape)}, evaluated "
            f"{_when(evaluate_every, looks)} on {splits}, limit {limit}, task {_digest(task)}, "
            f"start {digest(list(_fields(state).values()))[:16]}"
        )
        if Path(checkpoint).exists():
            state, rows, diverged = _restore(Path(checkpoint), state, label, repr(algorithm))
    told = name if isinstance(name, str) else f"{len(runs)} runs"
    with tqdm(total=rounds, initial=state.t - first, desc=told, disable=not progress) as bar:
        if not rows:
            _record(rows, diverged, measure(state, task), state, runs)
        luck = ahead(algorithm, state, task, first + rounds - state.t)
        while state.t < first + rounds and len(diverged) < len(state.seeds):
            state, metrics = algorithm.round(state, task, *next(luck))
            for callback in callbacks:
                callback(state, metrics)
            done = state.t - first
            look = done % evaluate_every == 0 if looks is None else done in looks
            if look or done == rounds:
                _record(rows, diverged, measure(state, task), state, runs)
            over = until is not None and done < rounds and time.monotonic() > until
            due = checkpoint_every and (done % checkpoint_every == 0 or done == rounds)
            if checkpoint is not None and (due or over):
                _save(Path(checkpoint), state, rows, diverged, label, repr(algorithm))
            bar.update()
            if over:
                raise OutOfTime(f"{told}: stopped in time after {done:,} of {rounds:,} rounds.")
    lost: dict[str, dict[int, int]] = {}
    for (run, seed), t in diverged.items():
        lost.setdefault(run, {})[seed] = t
    lost = lost.get(name, {}) if isinstance(name, str) else lost
    return History(pd.DataFrame(rows), state, lost)


def checked_looks(evaluate_at: Iterable[int]) -> set[int]:
    """Return the rounds at which to look, having refused what are no whole numbers from 0 on."""
    looks = tuple(evaluate_at)
    for t in looks:
        check_whole_number("Each of evaluate_at", t, 0)
    return set(looks)


def _when(evaluate_every: int, looks: set[int] | None) -> str:
    return f"every {evaluate_every}" if looks is None else f"at {sorted(looks)}"


def _named(name: str | Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Return the name and the seed of every run, which together occur once."""
    names = [name] * len(seeds) if isinstance(name, str) else list(name)
    if len(names) != len(seeds):
        raise FedlibError(f"{len(names)} names for {len(seeds)} runs. Give one, or one for each.")
    runs = list(zip(names, seeds, strict=True))
    for run, seed in runs:
        if runs.count((run, seed)) > 1:
            raise FedlibError(f"Seed {seed} occurs twice in run {run!r}: {tuple(seeds)}.")
    return runs


def _evaluate(
    state: State,
    task: TaskLike,
    runs: list[tuple[str, int]],
    splits: Iterable[str],
    limit: int | None,
) -> dict[tuple[str, str], Tensor]:
    """Measure all models; those of one name together, whatever else is in the batch."""
    names = [name for name, _ in runs]
    together = [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]
    values = {}
    for split in splits:
        few = limit if split == "train" else None
        found = [task.evaluate(state.x[rows], split, few) for rows in together]
        order = torch.tensor(sum(together, [])).argsort()
        for metric in found[0]:
            values[split, metric] = torch.cat([part[metric] for part in found])[order]
    return values


def _record(
    rows: list, diverged: dict, values: dict, state: State, runs: list[tuple[str, int]]
) -> None:
    """Append one row a run and metric; a value that is not finite marks the run as diverged."""
    clocks = np.broadcast_to(getattr(state, "clock", state.t), len(runs)).tolist()
    for (split, metric), value in values.items():
        for (run, seed), clock, v in zip(runs, clocks, value.tolist(), strict=True):
            row = dict(run=run, seed=seed, round=state.t, clock=float(clock))
            rows.append(row | dict(split=split, metric=metric, value=v))
            if not abs(v) < float("inf"):
                diverged.setdefault((run, seed), state.t)


LARGEST = 1 << 36  # bytes that a checkpoint may have
MARK = b"fedlib checkpoint, SHA-256 of what follows the line: "


def _fields(state: State) -> dict[str, Any]:
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def _digest(task: TaskLike) -> str:
    """Return a digest of all that a task computes with, as far as it can say."""
    return task.digest()[:16] if hasattr(task, "digest") else type(task).__name__


def _save(path: Path, state: State, rows: list, diverged: dict, label: str, algorithm: str) -> None:
    """Write a checkpoint of plain values and tensors, with a hash of itself."""
    held = io.BytesIO()
    fields = {name: _plain(value, name) for name, value in _fields(state).items()}
    whole = {"label": label, "algorithm": algorithm, "state": fields}
    torch.save(whole | {"rows": rows, "diverged": diverged}, held)
    content = held.getvalue()
    make_folder(path.parent)
    publish(path, MARK + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def _restore(path: Path, state: S, label: str, algorithm: str) -> tuple[S, list, dict]:
    """Read a checkpoint of this label; nothing in it is ever run. The algorithm is shown only."""
    try:
        check_regular(path, LARGEST)
        first, _, content = path.read_bytes().partition(b"\n")
        if first != MARK + hashlib.sha256(content).hexdigest().encode():
            raise ValueError("it is damaged, or no checkpoint")
        held = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        check_held(held)
    except Exception as error:
        raise FedlibError(f"Checkpoint {path} cannot be read ({error}). Delete it.") from error
    if held["label"] != label:
        raise FedlibError(
            f"Checkpoint {path} belongs to another run.\n"
            f"  found:    {held['label']}, {held.get('algorithm', '')}\n"
            f"  expected: {label}, {algorithm}\nDelete it or choose another file."
        )
    if set(held["state"]) != set(_fields(state)):
        raise FedlibError(f"Checkpoint {path} does not hold a whole state. Delete it.")
    fields = {name: _whole(value, state.x.device) for name, value in held["state"].items()}
    return type(state)(**fields), held["rows"], held["diverged"]


def check_held(held: Any) -> None:
    """Refuse what is no checkpoint, though its hash is right."""
    kinds = {"label": str, "state": dict, "rows": list, "diverged": dict}
    if not isinstance(held, dict) or any(not isinstance(held.get(k), v) for k, v in kinds.items()):
        raise ValueError(f"it holds no {', '.join(kinds)}")


def _plain(value: Any, name: str) -> Any:
    """Return a value as a checkpoint holds it: arrays as tensors in a box."""
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)([_plain(one, name) for one in value])
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        return value
    raise FedlibError(
        f"The state's {name} holds a {type(value).__name__}. A checkpoint holds tensors, arrays, "
        "numbers and words, and lists and tuples of them."
    )


def _whole(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return value["array"].numpy()
    if isinstance(value, list | tuple):
        return type(value)([_whole(one, device) for one in value])
    return value.to(device) if isinstance(value, torch.Tensor) else value
