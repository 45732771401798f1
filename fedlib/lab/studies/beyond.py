"""What the last chapter runs: groups on a clock, whose merges are amplified."""

from __future__ import annotations

from typing import NotRequired

from fedlib.errors import FedlibError
from fedlib.lab import trials
from fedlib.lab.job import Job, Outcome, alike
from fedlib.lab.studies import hierarchy as study
from fedlib.lab.studies.hierarchy import UNEQUAL
from fedlib.papers.beyond.algorithm import AmplifiedHierarchicalSGD
from fedlib.schema import PositiveFloat, PositiveInt


class Amplified(study.Training):
    """Hierarchical SGD on a clock, amplified."""

    amplify: NotRequired[PositiveFloat]  # factor η
    interval: NotRequired[PositiveInt]  # P, in rounds


@alike("seeds", "runs")
def training(job: Job[Amplified]) -> Outcome:
    """Train every run of an experiment, see :func:`fedlib.lab.studies.hierarchy.train`."""
    return study.train(job, build_algorithm, (*study.TOGETHER, "amplify"))


def build_algorithm(runs: list[Amplified], seeds: int) -> AmplifiedHierarchicalSGD:
    """Return the algorithm of runs that differ in rates, factors and sync times alone."""
    if runs[0].get("asynchronous") or "isolated" in runs[0]:
        raise FedlibError("Amplified merges are of groups that wait for each other; leave out "
                          "'asynchronous' and 'isolated'.")  # fmt: skip
    amplify = tuple(run.get("amplify", 1.0) for run in runs for _ in range(seeds))
    plain = study.build_algorithm(runs, seeds)
    return AmplifiedHierarchicalSGD(
        **vars(plain), amplify=amplify, interval=runs[0].get("interval", 1)
    )


# --- what a device is tried with ------------------------------------------------------------------

TRIALS: dict[str, trials.Trial] = {
    "AmplifiedHierarchicalSGD": lambda d: (
        AmplifiedHierarchicalSGD(*UNEQUAL, 4, amplify=3.0, interval=2),
        trials.TASKS["mlp"](d),
    ),
}
