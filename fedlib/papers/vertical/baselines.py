"""What VFB² is compared with: pooled data, no backward messages, and everybody waiting.

- :func:`centralised`, the optimisers on pooled data (NonF), one global vector and a plain loop;
  :func:`pooled` is the same through the compiled loop, as fast as VFB².
- :func:`afsvrg_vp`: Gu et al. (2020b) as the paper uses it. Nobody learns from another's labels, so
  parties without labels keep their first block.
- :func:`synchronous` (VFB): the updates of VFB², in rounds that end when the slowest party is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy import sparse

from fedlib.engine.pilot import few_passes
from fedlib.errors import FedlibError, unknown
from fedlib.papers.vertical.algorithm import drive, simulate_parties
from fedlib.papers.vertical.compiled import Rounds
from fedlib.papers.vertical.problem import Problem
from fedlib.papers.vertical.runs import Run
from fedlib.papers.vertical.secure import Trees
from fedlib.papers.vertical.setup import Draws, Setup, total_steps
from fedlib.population.delays import Deterministic, Law


def centralised(
    problem: Problem,
    method: str,
    lr: float,
    indices: Sequence[int],
    *,
    inner: int | None = None,
    table: str = "full",
    start: np.ndarray | None = None,
) -> np.ndarray:
    """Return the iterates ``[T + 1, d]`` of an optimiser on pooled data, sample by sample.

    A plain loop over one global vector, which knows nothing of parties.

    Parameters
    ----------
    indices
        The sample of each step, ``[T]``.
    inner
        Steps between two snapshots of SVRG; None is n.
    table
        What SAGA remembers, see :func:`~fedlib.papers.vertical.algorithm.simulate_parties`.
    """
    x = problem.x.toarray() if sparse.issparse(problem.x) else problem.x
    w = np.zeros(problem.d) if start is None else np.array(start, dtype=np.float64)
    n, path = problem.n, [w]
    if table not in ("full", "theta"):
        raise unknown("table", table, ["full", "theta"])
    if not all(0 <= i < n for i in indices):
        raise FedlibError(f"Samples are numbered from 0 to {n - 1}; got {[*indices][:5]}.")
    exact = table == "theta"

    def loss_gradient(i: int, w: np.ndarray) -> np.ndarray:
        return problem.theta(x[i] @ w, problem.y[i]) * x[i]

    def gradient(i: int, w: np.ndarray) -> np.ndarray:
        return loss_gradient(i, w) + problem.penalty_gradient(w)

    kept = loss_gradient if exact else gradient
    if method == "saga":
        memory = np.array([kept(i, w) for i in range(n)])
    for t, i in enumerate(indices):
        if method == "sgd":
            v = gradient(i, w)
        elif method == "svrg":
            if t % (inner or n) == 0:
                anchor, full = w, problem.gradient(w)
            v = gradient(i, w) - gradient(i, anchor) + full
        elif method == "saga":
            v = gradient(i, w) - memory[i] + memory.mean(0)
            memory[i] = kept(i, w)
        else:
            raise unknown("method", method, ("sgd", "svrg", "saga"))
        w = w - lr * v
        path.append(w)
    return np.array(path)


def pooled(problem: Problem, method: str, lr: float, **settings: Any) -> Run:
    """Run an optimiser on pooled data (NonF): VFB² with a single party that holds all columns.

    ``settings`` are those of :func:`~fedlib.papers.vertical.algorithm.simulate_parties`.
    """
    whole = replace(problem, blocks=(np.arange(problem.d),))
    return simulate_parties(whole, method, lr, **settings)


def afsvrg_vp(problem: Problem, lr: float, *, active: int | Sequence[int], **settings: Any) -> Run:
    """Run AFSVRG-VP: asynchronous SVRG without backward messages.

    Each label holder draws samples of its own, gathers scores from all parties, and updates its
    own block alone. The paper gives labels to half the parties. A step here moves one block, a
    step of VFB² moves all; both gather one score.

    Source: Gu, Xu, Huo, Deng and Huang, *Privacy-Preserving Asynchronous Federated Learning
    Algorithms for Multi-Party Vertically Collaborative Learning* (2020), as cited and used in the
    paper's experiments.
    """
    return simulate_parties(problem, "svrg", lr, active=active, backward=False, **settings)


@few_passes
def synchronous(
    problem: Problem,
    method: str,
    lr: float,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    active: int | Sequence[int] = 1,
    threads: int | None = None,
    compute: float | Sequence[float] = 1.0,
    delays: Law | Sequence[Law] = Deterministic(0.0),  # noqa: B008, a frozen value
    trees: Trees | None = None,
    inner: int | None = None,
    table: str | None = None,
    every: float = 1.0,
    start: np.ndarray | None = None,
    seed: int = 0,
) -> Run:
    """Run VFB, the synchronous counterpart: rounds in which everybody waits for the slowest.

    A round: all m active parties draw a sample, all with the same ``w``; each gets its score and
    sends its ϑ; every party updates its block with all m of them, each estimator taken at the
    round's ``w``; barrier. Samples and delays are those that the asynchronous run of the same seed
    draws. The paper leaves the round open; this one is our choice, as a round of a single update
    would hand asynchrony a factor m.

    The simulated time of a round is that of its two halves, each as long as its slowest party::

        max_{a,l} (request + p_l cost_l + answer)  +  max_{a,l} (backward + p_l cost_l)

    with ``p_l = ⌈(steps of others at l) / k⌉``, and 1 for a dominator's own step, for which it has
    a thread of its own. Of sparse rows ``cost_l`` is that of the dominator's sample, read in the
    first half and written in the second. With ``trees`` the first half ends when both sums are at
    every root.

    Parameters
    ----------
    problem, method, lr
        As in :func:`~fedlib.papers.vertical.algorithm.simulate_parties`, as all others.
    epochs, steps
        Dominated steps, m a round; the last round may have fewer.

    Returns
    -------
    Run
        Model, evaluations and messages; no log, as nothing is stale.
    """
    total = total_steps(problem.n, epochs, steps)
    setup = Setup(
        problem, method, lr, active, threads, compute, delays, table=table, seed=seed, start=start,
        steps=total, log=False, trees=trees,
    )  # fmt: skip
    return drive(Rounds(setup, Draws(setup)), inner, every)
