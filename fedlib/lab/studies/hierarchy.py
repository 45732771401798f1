"""What the hierarchy chapter runs: groups on a clock, and the counts that the clock gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NotRequired

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fedlib import datasets
from fedlib.datasets import partition
from fedlib.engine.evaluation import Evaluation
from fedlib.engine.rng import stream
from fedlib.engine.simulation import History, simulate
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, Settings, alike, checkpoint, joined
from fedlib.lab.studies.shared import dealt, measured, side_by_side
from fedlib.papers.hierarchy import counts
from fedlib.papers.hierarchy.algorithm import HierarchicalSGD, State
from fedlib.papers.hierarchy.asynchronous import AsyncHierarchicalSGD
from fedlib.papers.hierarchy.clock import timeline
from fedlib.population.delays import Deterministic, Law, ShiftedExponential
from fedlib.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

GROUP_SPLITS = ("iid", "dirichlet", "fedml", "groups", "labels", "owners")


class Split(Settings):
    """A data set, dealt out to the clients of the groups, and the model they train."""

    dataset: str
    pool: NotRequired[PositiveInt]  # side of the square blocks of pixels that are averaged
    groups: list[PositiveInt]  # clients of each
    split: str  # iid; dirichlet: over clients; fedml: the same by FedML's rule; groups: dirichlet
    # over groups, iid inside;
    # labels: every group has labels of its own, every client two of them; owners: of a set whose
    # rows have owners, as many as there are clients, drawn anew for each seed
    owners: NotRequired[PositiveInt]  # among those that have the most rows, so many
    per_owner: NotRequired[list[PositiveInt]]  # training and test rows that each keeps at most
    alpha: NotRequired[PositiveFloat]  # concentration of the Dirichlet law
    model: list[str | PositiveInt]  # its name, and sizes


class Delays(Settings):
    """The delay laws: a shift and an exponential part each."""

    groups: list[PositiveInt]
    delays: list[NonNegativeFloat]  # the paper's {d, b, e, f, d_g, b_g, e_g, f_g}
    shifts: NotRequired[list[PositiveFloat]]  # of the groups, instead; the mean is a tenth
    server_shift: NotRequired[PositiveFloat]  # of the exchange, instead
    sync: NonNegativeFloat  # S
    grow: NotRequired[NonNegativeFloat]  # by which S grows from round to round up to sync
    time: PositiveFloat  # T


class Training(Split, Delays):
    """Hierarchical SGD on a clock."""

    lr: PositiveFloat
    batch_size: PositiveInt  # of every client
    merge: NotRequired[str]  # normalised, plain or nova
    asynchronous: NotRequired[bool]  # merge groups as they arrive
    decay: NotRequired[NonNegativeFloat]  # of movements that have missed merges
    isolated: NotRequired[NonNegativeInt]  # this group alone, which never meets the others
    watch: NotRequired[bool]  # evaluate the groups' models too
    looks: PositiveInt  # evenly over the system time
    evaluate_on: PositiveInt  # training samples


class Counts(Delays):
    """Rounds and local iterations alone, without a model."""


def build_task(s: Split, seeds: Sequence[int], device: str = "cpu") -> tuple[Task, dict[str, str]]:
    """Load the data and deal them out anew for each seed; clients are numbered group by group."""
    data = datasets.load(s["dataset"], progress=False)
    if s["split"] == "owners":
        most = np.argsort(-datasets.owners(data).sizes, kind="stable")[: s.get("owners")]
        data = datasets.only(data, sorted(most.tolist()), *s.get("per_owner", ()))
    return dealt(s, data, {seed: deal(data, s, seed) for seed in seeds}, device)


def deal(data: datasets.Dataset, s: Split, seed: int) -> list[np.ndarray]:
    """Return the rows of every client, group by group; of one group where it is isolated."""
    labels, groups, alpha = data.train_y, s["groups"], s.get("alpha", 0.1)
    cuts = np.cumsum([0, *groups])
    if s["split"] == "iid":
        parts = partition.iid(labels, sum(groups), seed)
    elif s["split"] == "dirichlet":
        parts = partition.dirichlet(labels, sum(groups), seed, alpha)
    elif s["split"] == "fedml":
        parts = partition.fedml(labels, sum(groups), seed, alpha)
    elif s["split"] == "groups":
        whole = partition.dirichlet(labels, len(groups), seed, alpha)
        parts = _inside(whole, groups, lambda rows, n: partition.iid(labels[rows], n, seed))
    elif s["split"] == "labels":
        order = stream(seed, "labels").permutation(np.unique(labels))
        owned = np.array_split(order, len(groups))
        whole = [np.flatnonzero(np.isin(labels, some)) for some in owned]
        parts = _inside(whole, groups, lambda rows, n: partition.shards(labels[rows], n, seed))
    elif s["split"] == "owners":
        every = datasets.owners(data).train_parts
        who = stream(seed, "owners").permutation(len(every))
        if len(every) < sum(groups):
            raise FedlibError(f"{sum(groups)} clients, and rows of {len(every)} owners.")
        parts = [every[n] for n in who[: sum(groups)]]
    else:
        raise unknown("split", s["split"], GROUP_SPLITS)
    if "isolated" not in s:
        return parts
    return parts[cuts[s["isolated"]] : cuts[s["isolated"] + 1]]


def _inside(whole: list[np.ndarray], groups: Sequence[int], cut: Any) -> list[np.ndarray]:
    """Deal the rows of each group out to its clients."""
    return [rows[part] for rows, n in zip(whole, groups, strict=True) for part in cut(rows, n)]


def delay_laws(s: Delays) -> tuple[tuple[Law, ...], Law]:
    """Return the delay law of each group's iterations, and that of the exchange."""
    local, server = counts.laws(s["delays"], s["groups"])
    if "shifts" in s:
        local = [ShiftedExponential(c, c / 10) for c in s["shifts"]]
    if "server_shift" in s:
        server = ShiftedExponential(s["server_shift"], server.mean)
    return tuple(local), server


def build_algorithm(runs: list[Training], seeds: int) -> HierarchicalSGD:
    """Return the algorithm of runs that differ in rates and sync times alone."""
    s, i = runs[0], runs[0].get("isolated")
    local, server = delay_laws(s)
    lr, sync, grow = (
        tuple(run.get(name, 0.0) for run in runs for _ in range(seeds))
        for name in ("lr", "sync", "grow")
    )
    if i is not None:  # a group alone goes on from its own model, which is looked at now and then
        alone, pause = (s["groups"][i],), s["time"] / s["looks"] / 2
        rest = (s["time"], (local[i],), Deterministic(0.0), s["batch_size"], "plain")
        return HierarchicalSGD(alone, lr, pause, *rest)
    merge, groups = s.get("merge", "normalised"), tuple(s["groups"])
    settings = (groups, lr, sync, s["time"], local, server, s["batch_size"], merge, grow)
    if s.get("asynchronous"):
        return AsyncHierarchicalSGD(*settings, decay=s.get("decay", 0.0))
    return HierarchicalSGD(*settings)


# In what rows of one batch may differ.
TOGETHER = ("run", "tuned_as", *HierarchicalSGD.per_run)


@alike("seeds", "runs")
def training(job: Job[Training]) -> Outcome:
    """Train every run of an experiment, see :func:`train`."""
    return train(job, build_algorithm, TOGETHER)


def train(
    job: Job[Any], build: Callable[[list[Any], int], HierarchicalSGD], rows: Sequence[str]
) -> Outcome:
    """Train every run of an experiment, all seeds side by side, until the system time is over.

    Runs that differ in ``rows`` alone are rows of one batch. Delays are the same for all runs of
    a seed; splits, models and minibatches too.

    A model exists at the end of a round. Rows tell what is there at even times: at ``clock``, the
    last merged model by then, after ``rounds`` rounds; ``round`` is the number of the look. Rows
    with the split ``clock`` tell of a run as a whole.
    """
    s, frames, diverged, tasks = job.settings, {}, {}, {}
    for runs in side_by_side(s, rows):
        r, names, seeds = runs[0], [run["run"] for run in runs], job.seeds
        key = repr([r.get(name) for name in (*Split.__annotations__, "isolated")])
        if key not in tasks:
            tasks[key], hashes = build_task(r, seeds, job.device)
        task, every = tasks[key], seeds * len(runs)
        algorithm = build(runs, len(seeds))
        lines = algorithm.timelines(every)
        due = [set(rounds_by(line, r["time"], s["looks"]).tolist()) for line in lines]
        history = simulate(
            algorithm, task, algorithm.rounds(every), every,
            state=algorithm.init(task, every, task.init(seeds).repeat(len(runs), 1)),
            evaluation=Evaluation(at=set().union(*due) - {0}, measure=GroupMetrics(r, due)),
            name=[name for name in names for _ in seeds], progress=job.progress,
            checkpoint=checkpoint(job, names[0], 20),
        )  # fmt: skip
        for i, name in enumerate(names):
            mine = lines[i * len(seeds) : (i + 1) * len(seeds)]
            frames[name], lost = on_time(history, name, seeds, mine, r["time"], s["looks"])
            if lost:
                diverged[name] = lost
    return joined(frames, diverged, s["runs"], hashes)


class GroupMetrics:
    """The evaluation of a round: the merged models, and where wanted those of the groups.

    Parameters
    ----------
    s
        Settings of the runs. A group that is isolated is evaluated on training samples of its own.
    due
        After which rounds each run is wanted; by default after all. Where another one is, it is not
        evaluated, and has zeros.
    """

    def __init__(self, s: Training, due: Sequence[set[int]] | None = None) -> None:
        self.limit, self.groups, self.alone = s["evaluate_on"], s.get("watch"), "isolated" in s
        self.due = due

    def __call__(self, state: State, task: Task) -> dict[tuple[str, str], Tensor]:
        every = range(len(state.seeds))
        rows = [r for r in every if self.due is None or state.t in self.due[r]]
        if not rows:
            return {}
        metrics = {("train", k): v for k, v in self.training(state, task, rows).items()}
        metrics |= {("test", k): v for k, v in task.evaluate(state.x[rows], "test").items()}
        for i in range(state.y.shape[1] if self.groups else 0):
            accuracy = task.evaluate(state.y[rows, i], "test")["accuracy"]
            metrics[f"group {i}", "accuracy"] = accuracy
        at = torch.tensor(rows)
        return {k: v.new_zeros(len(every)).index_put((at,), v) for k, v in metrics.items()}

    def training(self, state: State, task: Task, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the metrics of some runs on training samples, one value a run."""
        if not self.alone:
            return task.evaluate(state.x[rows], "train", self.limit)
        each = [
            task.of(state.seeds[r]).evaluate(state.x[r : r + 1], "train", self.limit, "clients")
            for r in rows
        ]
        return {metric: torch.cat([one[metric] for one in each]) for metric in each[0]}


def rounds_by(line: Any, time: float, looks: int) -> np.ndarray:
    """Return how many rounds of a timeline are over at even times, ``[looks + 1]``."""
    at = np.linspace(0, time, looks + 1)
    return np.searchsorted(line.end, at * (1 + 1e-12), side="right")


def on_time(
    history: History, name: str, seeds: Sequence[int], lines: list[Any], time: float, looks: int
) -> tuple[pd.DataFrame, dict[int, int]]:
    """Return a run's rows at even times, and at which look its diverged seeds were lost.

    Parameters
    ----------
    history
        Evaluated after each round that a look shows, see :func:`rounds_by`.
    lines
        The timeline of each seed.
    time, looks
        System time, and into how many parts it is cut.
    """
    frame, parts, lost = history.frame, [], {}
    at = np.linspace(0, time, looks + 1)
    for seed, line in zip(seeds, lines, strict=True):
        done = rounds_by(line, time, looks)
        mine = frame[(frame["run"] == name) & (frame["seed"] == seed)]
        wide = mine.pivot(index="round", columns=["split", "metric"], values="value")
        wide = wide[wide.index.isin(done)]  # in other rounds stands what another run was due for
        wide = wide.reindex(done, method="ffill").set_index(np.arange(looks + 1))
        when = history.diverged.get((name, seed))
        if when is not None:
            lost[seed] = int(np.searchsorted(done, when))
        long = wide.rename_axis(index="round").stack(["split", "metric"], future_stack=True)
        long = long.rename("value").reset_index()
        long = long.assign(run=name, seed=seed, clock=at[long["round"]], rounds=done[long["round"]])
        parts += [long, _whole(name, seed, line)]
    columns = ["run", "seed", "round", "clock", "rounds", "split", "metric", "value"]
    return pd.concat(parts, ignore_index=True)[columns], lost


def _whole(name: str, seed: int, line: Any) -> pd.DataFrame:
    """Return the rows on a run as a whole."""
    U = len(line.end)
    values = {"rounds": U, "round length": line.end[-1] / U}
    for i, iterations in enumerate(line.counts.T):
        there = iterations > 0  # a group that is merged as it arrives may never have been
        if there.any():
            values[f"iterations of group {i}"] = iterations[there].mean()
            waits = hasattr(line, "idle")
            name_of, other = ("idle time", line.idle) if waits else ("staleness", line.staleness)
            values[f"{name_of} of group {i}"] = other[there, i].mean()
    whole = dict(run=name, seed=seed, round=0, clock=line.end[-1], rounds=U, split="clock")
    return pd.DataFrame(measured({}, values)).assign(**whole)


@alike("seeds", "runs")
def clocks(job: Job[Counts]) -> Outcome:
    """Let the clocks of all runs go, without any model; the same rows as those of training."""
    s, parts = job.settings, []
    for run in s["runs"]:
        r = {**s, **run}
        local, server = delay_laws(r)
        for seed in job.seeds:
            line = timeline(seed, r["sync"], r["time"], local, server, r.get("grow", 0.0))
            parts.append(_whole(run["run"], seed, line))
    return Outcome(pd.concat(parts, ignore_index=True), {}, {})


# --- what a device is tried with ------------------------------------------------------------------

LOCAL, SERVER = ShiftedExponential(0.5, 0.5), ShiftedExponential(2.0, 1.0)
UNEQUAL = ((1, 3), 0.05, 2.0, 60.0, LOCAL, SERVER)

TRIALS: dict[str, trials.Trial] = {
    "HierarchicalSGD": lambda d: (HierarchicalSGD(*UNEQUAL, 4), trials.TASKS["mlp"](d)),
    "HierarchicalSGD, full batches, merged as nova": lambda d: (
        HierarchicalSGD(*UNEQUAL, None, "nova"),
        trials.TASKS["small_cnn"](d),
    ),
    "HierarchicalSGD, characters": lambda d: (
        HierarchicalSGD((2, 2), *UNEQUAL[1:], 4),
        trials.TASKS["char_lstm"](d),
    ),
    "AsyncHierarchicalSGD": lambda d: (
        AsyncHierarchicalSGD(*UNEQUAL, 4, decay=0.5),
        trials.TASKS["mlp"](d),
    ),
}
