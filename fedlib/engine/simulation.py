"""The round loop: evaluation, callbacks, progress, checkpoints and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from fedlib.engine.checkpoint import Checkpoint, Diverged, TidyRows, restore, save, state_fields
from fedlib.engine.checks import check_whole_number, checked_seeds
from fedlib.engine.draws import ahead
from fedlib.engine.evaluation import Evaluation, Measures
from fedlib.engine.pilot import few_rounds
from fedlib.engine.protocols import Algorithm, K, S, State, TaskLike
from fedlib.errors import FedlibError
from fedlib.files import digest, own_code

Callback = Callable[[Any, dict[str, Any]], None]


class OutOfTime(FedlibError):
    """The time given is over. What was done is kept; started again, the work goes on."""


@dataclass
class History(Generic[S]):
    """What a simulation leaves behind.

    Attributes
    ----------
    frame
        Tidy rows: run, seed, round, clock, split, metric, value.
    state
        The algorithm's state after the last round.
    diverged
        Round in which each diverged run was first seen with a value that is not finite, by its name
        and seed: ``{(run, seed): round}``.
    """

    frame: pd.DataFrame
    state: S
    diverged: Diverged


@few_rounds
def simulate(
    algorithm: Algorithm[S, K],
    task: K,
    rounds: int,
    seeds: Sequence[int] = (0,),
    *,
    state: S | None = None,
    evaluation: Evaluation | None = None,
    callbacks: Collection[Callback] = (),
    name: str | Sequence[str] = "",
    progress: bool = True,
    checkpoint: Checkpoint | None = None,
) -> History[S]:
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
        Start from this state instead of ``algorithm.init``; its seeds are those of the runs then.
    evaluation
        When to look and what to measure; by default the training split, after every round.
    callbacks
        Called after each round with the state and the round's metrics.
    name
        Shown in the progress bar and stored in the column ``run``; or a name for each run.
    progress
        Show a progress bar.
    checkpoint
        Where and when to save, and when to stop; by default neither.

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
    if isinstance(algorithm, type) or not (
        hasattr(algorithm, "init") and hasattr(algorithm, "round")
    ):
        raise FedlibError(
            "An algorithm has init(task, seeds) and round(state, task), as FedAvg(...) has; got "
            f"{algorithm!r}."
        )
    if isinstance(task, str | int | float) or hasattr(task, "parts"):
        raise FedlibError(f"A task is what is learned, as Task(model, data); got {task!r}.")
    check_options(state, evaluation, callbacks, name, checkpoint)
    latest = 0 if evaluation is None or evaluation.at is None else max(evaluation.at, default=0)
    if rounds and latest > rounds:
        raise FedlibError(f"There is no round {latest} to look after: {rounds} rounds are run.")
    seeds, look, keep = checked_seeds(seeds), evaluation or Evaluation(), checkpoint or Checkpoint()
    if state is None:
        state = algorithm.init(task, seeds)
        check_state(state, task)
    else:
        check_state(state, task)
        check_begun(state, algorithm.init(task, state.seeds), algorithm)
    runs, first, label = _named(name, state.seeds), state.t, ""
    rows: TidyRows = []
    diverged: Diverged = {}
    if keep.path is not None:
        if not keep.every and keep.until is None and not Path(keep.path).exists():
            raise FedlibError("This saves nothing. Say how often: Checkpoint(path, every=10).")
        label = (
            f"{name!r}: {type(algorithm).__name__} {_digest_with_code(algorithm)} from {first} for "
            f"{rounds} rounds, seeds {state.seeds}, models {tuple(state.x.shape)}, evaluated "
            f"{look}, task {_digest(task)}, start {digest(list(state_fields(state).values()))[:16]}"
        )
        if Path(keep.path).exists():
            state, rows, diverged = restore(keep.path, state, label, repr(algorithm))

    def measure(state: S) -> None:
        _record(rows, diverged, look.of(state, task, [run for run, _ in runs]), state, runs)

    title = name if isinstance(name, str) else f"{len(runs)} runs"
    with tqdm(total=rounds, initial=state.t - first, desc=title, disable=not progress) as bar:
        if not rows:
            measure(state)
        luck = ahead(algorithm, state, task, first + rounds - state.t)
        while state.t < first + rounds and len(diverged) < len(state.seeds):
            state, metrics = _next(algorithm.round(state, task, *next(luck)), state)
            for callback in callbacks:
                callback(state, metrics)
            done = state.t - first
            if look.due(done) or done == rounds:
                measure(state)
            last = done == rounds or len(diverged) == len(state.seeds)
            over = keep.until is not None and not last and time.monotonic() > keep.until
            if keep.path is not None and (keep.due(done, last) or over):
                save(keep.path, state, rows, diverged, label, repr(algorithm))
            bar.update()
            if over:
                raise OutOfTime(f"{title}: stopped in time after {done:,} of {rounds:,} rounds.")
    return History(pd.DataFrame(rows), state, diverged)


def check_options(state: Any, evaluation: Any, callbacks: Any, name: Any, checkpoint: Any) -> None:
    """Refuse options of :func:`simulate` that are of another kind."""
    lists, functions = isinstance(callbacks, Collection), "a list of functions of (state, metrics)"
    saves = isinstance(checkpoint, Checkpoint | None)
    for option, value, fits, asked in (
        ("state", state, state is None or hasattr(state, "seeds"), "that of a History"),
        ("evaluation", evaluation, isinstance(evaluation, Evaluation | None), "Evaluation(every)"),
        ("checkpoint", checkpoint, saves, "Checkpoint(path, every=10), or some other number"),
        ("callbacks", callbacks, lists and all(map(callable, callbacks)), functions),
        ("name", name, isinstance(name, Sequence), "a word, or a list with one for each run"),
    ):
        if not fits:
            raise FedlibError(f"{option} is {asked}; got {value!r}.")


def check_state(state: Any, task: Any) -> None:
    """Refuse what ``init`` returned, or a caller gave, unless it is a state that fits the task."""
    lacks = [name for name in ("x", "seeds", "t") if not hasattr(state, name)]
    whole = is_dataclass(state) and not isinstance(state, type) and not lacks
    if not whole:
        raise FedlibError(
            "A state, which init(task, seeds) returns, is a dataclass with the models x, the seeds "
            f"and the round t; got {type(state).__name__}, which has no "
            f"{' and '.join(lacks) or 'fields'}."
        )
    check_whole_number("The state's round t", state.t, 0)
    ours = state.x.shape[-1]
    if (size := getattr(task, "size", ours)) != ours:
        raise FedlibError(f"The state has models of {ours} numbers, and the task's have {size}.")


def check_begun(state: State, fresh: State, algorithm: Any) -> None:
    """Refuse a state that lacks what the algorithm's own has, or has it in another shape."""
    held, name = state_fields(state), type(algorithm).__name__
    for field, value in state_fields(fresh).items():
        expected, came = (getattr(v, "shape", None) for v in (value, held.get(field)))
        if field in held and came == expected:
            continue
        odd = f"its {field} is {came}, not {expected}" if field in held else f"it has no {field}"
        raise FedlibError(
            f"This is no state of {name} for this task: {odd}. To go on from its models: "
            "state=algorithm.init(task, seeds, state.x)."
        )


def _next(made: Any, before: State) -> tuple[Any, dict[str, Any]]:
    """Return what a round returned, if it is the next state and what there is to tell."""
    whole = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping)
    if whole and getattr(made[0], "t", None) == before.t + 1:
        return made
    got = f"t = {getattr(made[0], 't', 'none')} after {before.t}" if whole else type(made).__name__
    raise FedlibError(
        "round(state, task) returns a state whose t is one larger, and a dictionary: "
        f"(replace(state, x=x, t=state.t + 1), {{}}). Got {got}."
    )


def _named(name: str | Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Return the name and the seed of every run, which together occur once."""
    names = [name] * len(seeds) if isinstance(name, str) else list(name)
    if len(names) != len(seeds):
        raise FedlibError(f"{len(names)} names for {len(seeds)} runs. Give one, or one for each.")
    runs = list(zip(names, map(int, seeds), strict=True))
    for run, seed in runs:
        if runs.count((run, seed)) > 1:
            raise FedlibError(f"Seed {seed} occurs twice in run {run!r}: {tuple(seeds)}.")
    return runs


def _record(
    rows: TidyRows, diverged: Diverged, values: Measures, state: State, runs: list[tuple[str, int]]
) -> None:
    """Append one row a run and metric; a value that is not finite marks the run as diverged."""
    clocks = np.broadcast_to(getattr(state, "clock", state.t), len(runs)).tolist()
    for (split, metric), value in values.items():
        for (run, seed), clock, v in zip(runs, clocks, value.tolist(), strict=True):
            row = dict(run=run, seed=seed, round=state.t, clock=float(clock))
            rows.append(row | dict(split=split, metric=metric, value=v))
            if not abs(v) < float("inf"):
                diverged.setdefault((run, seed), state.t)


def _digest_with_code(algorithm: Any) -> str:
    """Return a digest of an algorithm's fields and of the code of its class."""
    return digest(algorithm, own_code(type(algorithm)))[:16]


def _digest(task: TaskLike) -> str:
    """Return a digest of all that a task computes with, as far as it can say."""
    return task.digest()[:16] if hasattr(task, "digest") else type(task).__name__
