"""What the last chapter runs: groups on a clock, whose merges are amplified."""

from __future__ import annotations

from dataclasses import replace
from typing import NotRequired

from fedlib.errors import FedlibError, unknown
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, alike
from fedlib.lab.studies import hierarchy as study
from fedlib.lab.studies.hierarchy import UNEQUAL
from fedlib.papers.beyond.algorithm import AmplifiedHierarchicalSGD
from fedlib.population.participation import PROCESSES, Cyclic
from fedlib.schema import PositiveFloat, PositiveInt

AVAILABILITY = ("full", "cyclic", "markov")  # those of PROCESSES that ask for nothing


class Amplified(study.Training):
    """Hierarchical SGD on a clock, amplified."""

    amplify: NotRequired[PositiveFloat]  # factor η
    interval: NotRequired[PositiveInt]  # P, in rounds
    availability: NotRequired[str]  # of groups: full, cyclic or markov


class Phases(Amplified):
    """The same at each of some rates, for each of some ratios of the two groups' speeds."""

    rates: list[PositiveFloat]
    ratios: list[PositiveFloat]  # the second group's iteration lasts so many times the first's


@alike("seeds", "runs")
def training(job: Job[Amplified]) -> Outcome:
    """Train every run of an experiment, see :func:`fedlib.lab.studies.hierarchy.train`."""
    return study.train(job, build_algorithm, (*study.TOGETHER, "amplify"))


@alike("seeds", "runs")
def phases(job: Job[Phases]) -> Outcome:
    """Train every run at all rates and ratios; the second group keeps its speed.

    Rows have the columns ``method``, ``at`` and ``ratio`` beside those of :func:`training`.
    """
    s = job.settings
    every = {
        f"{run['run']} @ {rate:.4g}, {ratio:g}": (run, rate, ratio)
        for run in s["runs"] for rate in s["rates"] for ratio in s["ratios"]
    }  # fmt: skip
    runs = [
        {**run, "run": name, "lr": rate, "shifts": [s["shifts"][1] / ratio, s["shifts"][1]]}
        for name, (run, rate, ratio) in every.items()
    ]
    out = training(replace(job, settings={**s, "runs": runs}))
    told = {name: (run["run"], rate, ratio) for name, (run, rate, ratio) in every.items()}
    columns = zip(*out.frame["run"].map(told), strict=True)
    frame = out.frame.assign(**dict(zip(("method", "at", "ratio"), columns, strict=True)))
    return Outcome(frame, out.diverged, out.hashes)


def build_algorithm(runs: list[Amplified], seeds: int) -> AmplifiedHierarchicalSGD:
    """Return the algorithm of runs that differ in rates, factors and sync times alone."""
    if runs[0].get("asynchronous") or "isolated" in runs[0]:
        raise FedlibError("Amplified merges are of groups that wait for each other; leave out "
                          "'asynchronous' and 'isolated'.")  # fmt: skip
    amplify = tuple(run.get("amplify", 1.0) for run in runs for _ in range(seeds))
    plain, groups = study.build_algorithm(runs, seeds), len(runs[0]["groups"])
    name = runs[0].get("availability", "full")
    if name not in AVAILABILITY:
        raise unknown("availability", name, AVAILABILITY)
    return AmplifiedHierarchicalSGD(
        **vars(plain), amplify=amplify, interval=runs[0].get("interval", 1),
        availability=PROCESSES[name](groups) if name != "full" else None,
    )  # fmt: skip


# --- what a device is tried with ------------------------------------------------------------------

TRIALS: dict[str, trials.Trial] = {
    "AmplifiedHierarchicalSGD": lambda d: (
        AmplifiedHierarchicalSGD(*UNEQUAL, 4, amplify=3.0, interval=2),
        trials.TASKS["mlp"](d),
    ),
    "AmplifiedHierarchicalSGD, groups in turn": lambda d: (
        AmplifiedHierarchicalSGD(*UNEQUAL, 4, amplify=3.0, interval=2, availability=Cyclic(2)),
        trials.TASKS["mlp"](d),
    ),
}
