"""VFB²: asynchronous learning over parties that hold different features, on a simulated clock.

Zhang, Gu, Deng and Huang, *Secure Bilevel Asynchronous Vertical Federated Learning with Backward
Updating* (AAAI 2021), Algorithms 2 to 7. An active party (one with labels) draws a sample ``i``,
gathers the score ``wᵀx_i`` from all parties, and sends ``ϑ = dL/dz`` and ``i`` backward to every
other party. Each party updates its own block of ``w`` with them, as soon as it gets to it.

Nothing runs in parallel here, and no time is measured. Events happen one after the other on a
**simulated clock**: a time in this module is what the cost model says, not what a computer took.
The model:

- reading or updating its block costs party ``l`` the time ``compute[l] · d_l``; of sparse rows the
  entries that party ``l`` has are counted instead of ``d_l``, in an update only where the
  regulariser lets it pass by all other columns (none, or λ‖w‖²/2);
- a message to or from party ``l`` takes a time drawn from ``delays[l]``. A step has three a party:
  the request with ``i``, the score on its way back, ``(ϑ, i)``. Messages from one sender to one
  receiver arrive in the order sent, as over TCP or MPI, unless ``ordered=False``;
- with ``trees`` scores and masks travel as in Algorithm 1: up two trees, where a party sends its
  sum on when its own term and those of all parties below it are there, and each hop takes the time
  of a message of its sender. A mask is there as soon as the request is. Without trees everybody
  sends to the dominator;
- what arrives at a party waits in its inbox, first come first served, for one of ``threads``
  collaborator threads; requests wait in turn, too, unless ``prompt=True``. A dominator has a
  thread of its own for its steps;
- a thread reads the block when it takes a job up and writes when the job ends. Between the two
  others may write: updates are added without a lock, and what was read is then stale.

The loop itself is compiled (:mod:`fedlib.papers.vertical.compiled`). The chapter's second notebook
has it written for reading, one method an event, and compares the two event by event.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlib.engine.checks import check_whole_number
from fedlib.engine.pilot import few_passes
from fedlib.errors import unknown
from fedlib.papers.vertical.compiled import Simulation
from fedlib.papers.vertical.problem import Problem
from fedlib.papers.vertical.runs import Row, Run
from fedlib.papers.vertical.secure import Trees
from fedlib.papers.vertical.setup import Draws, Setup, at_least, total_steps
from fedlib.population.delays import Deterministic, Law


@few_passes
def simulate_parties(
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
    bound: int | None = None,
    ordered: bool = True,
    prompt: bool = False,
    trees: Trees | None = None,
    inner: int | None = None,
    table: str | None = None,
    mask: float = 0.0,
    backward: bool = True,
    every: float = 1.0,
    start: np.ndarray | None = None,
    seed: int = 0,
    log: bool = True,
    keep: str | None = None,
) -> Run:
    """Run VFB² event by event on a simulated clock.

    Parameters
    ----------
    problem
        Data, parties and objective.
    method
        ``"sgd"``, ``"svrg"`` or ``"saga"``.
    lr
        Step size γ, at least 0.
    epochs, steps
        How long: dominated steps, or passes of n dominated steps. Give one of the two.
    active
        m, and then the first m parties hold labels; or which ones do.
    threads
        Collaborator threads k of every party; None is m, as in the paper's experiments.
    compute
        Time per number read or updated, one for all parties or one each. For a slow
        party: ``straggler(q, party, 0.4)``.
    delays
        Law of a message's time: one for all parties, or one a party.
    bound
        A dominator begins its next step only when all but the last ``bound`` steps begun are
        finished everywhere; then ``τ₁, τ₂ ≤ q (3 bound + 1) - 1``. 0 lets one step happen at a
        time, None never waits.
    ordered
        Whether messages from one sender to one receiver keep their order.
    prompt
        Whether a party answers requests for its score at once, whatever its threads are at,
        instead of in turn. The inboxes of slow parties may then grow without end; ``bound`` stops
        that.
    trees
        The two trees of Algorithm 1, such as ``secure.log_depth(q)``, on the clock: seat 1 is the
        dominator's. None: scores go straight to the dominator.
    inner
        Dominated steps between two snapshots of SVRG; None is n.
    table
        What SAGA remembers: ``"full"`` gradients, n × d numbers, or ϑ alone (``"theta"``), where
        the regulariser's gradient is exact instead of remembered. None: full for arrays, ϑ alone
        for sparse data.
    mask
        Width B of masks uniform on ``[-B, B]``, added to local scores and taken off their sum.
    backward
        False: ϑ is sent to nobody and only dominators update (AFSVRG-VP).
    every
        Passes of n dominated steps between two evaluations.
    start
        The first ``w``; None is 0.
    seed
        Names every random stream.
    log
        Whether to keep a row for every block update.
    keep
        ``"snapshots"`` keeps ``w`` at every barrier of SVRG.

    Returns
    -------
    Run
        Model, evaluations, messages and log.

    Raises
    ------
    FedlibError
        When a setting does not fit.
    """
    total = total_steps(problem.n, epochs, steps)
    setup = Setup(
        problem, method, lr, active, threads, compute, delays, bound, ordered, table, mask,
        backward, seed, start, total, log, prompt, trees,
    )  # fmt: skip
    return drive(Simulation(setup, Draws(setup)), inner, every, keep)


def drive(sim: Simulation, inner: int | None, every: float, keep: str | None = None) -> Run:
    """Take a simulation from barrier to barrier, with a pass over the data where one is needed.

    Parameters
    ----------
    sim
        A simulation at time 0.
    inner, every, keep
        As in :func:`simulate_parties`.
    """
    setup, problem, total = sim.setup, sim.setup.problem, sim.setup.steps
    stride = max(1, round(at_least("every", every, 1e-9) * problem.n))
    length = total if setup.method != "svrg" else problem.n if inner is None else inner
    check_whole_number("inner", length, min(total, 1))
    if keep not in (None, "snapshots"):
        raise unknown("thing to keep", str(keep), ("snapshots",))
    rows, snapshots, time, passes = [], [], 0.0, 0

    def note() -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            loss = problem.objective(sim.w)
        rows.append(Row(sim.now, sim.formed / problem.n + passes, sim.formed, loss))

    note()
    for first in range(0, total, length) if total else ():
        if setup.method != "sgd":
            w = sim.w
            sim.receive(problem.theta(problem.scores(w), problem.y))
            time += setup.pass_time(passes)
            passes += 1
            if keep and setup.method == "svrg":
                snapshots.append(w)
            del w  # as long as all of the data's columns
        last = min(first + length, total)
        sim.restart(last, time)
        for point in range((first // stride + 1) * stride, last, stride):
            sim.advance(point)
            note()
        sim.finish()
        time = sim.now
        if last == total or last % stride == 0:
            note()
    q, T = problem.q, sim.formed
    counts = {
        "tree": 2 * (q - 1) * T,
        "backward": (q - 1) * T if setup.backward else 0,
        "request": (q - 1) * T,
        "pass": 3 * (q - 1) * passes,
    }
    messages, log = sim.records()
    kept = np.array(snapshots).reshape(-1, problem.d) if keep else None
    return Run(sim.w, rows, messages, log if setup.log else None, kept, counts)
