"""What the chapter on VFB² runs: races on a simulated clock, speed-up, rates, attacks, trees.

A *race* takes one data set and one problem, and runs every method on it: VFB² and its synchronous
twin VFB, and the two baselines of the paper's tables. Seconds do not occur: time is that of the
cost model (:mod:`fedlib.papers.vertical.algorithm`), in units of an ordinary party's job, the mean
of forming a score and of updating its block.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NotRequired

import numpy as np
import pandas as pd
from scipy import sparse
from scipy.optimize import minimize
from sklearn.metrics import roc_auc_score
from tqdm.auto import tqdm

from fedlib import datasets
from fedlib.engine.rng import stream
from fedlib.engine.simulation import OutOfTime
from fedlib.errors import FedlibError
from fedlib.files import make_folder, publish
from fedlib.lab.job import Job, Outcome, Settings, alike
from fedlib.lab.studies.shared import check_known, measured
from fedlib.lab.vertical import attacks
from fedlib.papers.vertical import secure
from fedlib.papers.vertical.algorithm import simulate_parties
from fedlib.papers.vertical.baselines import afsvrg_vp, pooled, synchronous
from fedlib.papers.vertical.data import load_columns, scales
from fedlib.papers.vertical.problem import LOSSES, REGULARISERS, Problem, split_features
from fedlib.papers.vertical.runs import Row, Run, speed_up, time_to
from fedlib.papers.vertical.setup import METHODS, straggler
from fedlib.population.delays import Deterministic, ShiftedExponential
from fedlib.schema import NonNegativeFloat, PositiveFloat, PositiveInt

LINKS = {
    "near": Deterministic(0.0),  # messages take no time
    "far": ShiftedExponential(0.5, 0.5),  # on average as long as an ordinary party's job
}
WAYS = ("not waiting", "waiting", "pooled", "own labels")
SLOW = ("no run", "the waiting run", "both runs")
SLOWER = (0.3, 0.5)  # the share by which one party is slower, drawn for each seed
FLOOR = 1e-15  # gaps below are rounding


class Cut(Settings):
    """A data set of columns, a problem on it, and who holds what."""

    dataset: str
    rows: PositiveInt  # that train, drawn anew for each seed
    tests: PositiveInt  # other rows
    columns: NotRequired[PositiveInt]  # so many sparse ones, those that most rows have
    folded: NotRequired[PositiveInt]  # or sparse ones are added up, by their number modulo this
    loss: str
    regulariser: str
    lam: NonNegativeFloat
    parties: PositiveInt
    active: PositiveInt  # of them; as many threads a party


class Timed(Cut):
    """And how messages travel."""

    trees: bool  # sums go up two trees, or straight to the dominator
    prompt: bool  # requests are answered at once, or in turn


class Racing(Timed):
    """Every method on one problem, for as many passes over the data."""

    method: str  # sgd, svrg, saga
    way: str
    links: NotRequired[str]  # the law of a message's time; default near
    even: NotRequired[bool]  # nobody is slower; by default one party is, by 30 to 50 per cent
    lr: PositiveFloat
    passes: PositiveFloat  # those of a snapshot and of a first table included
    goal: PositiveFloat  # the passes after which a synchronous run sets the loss to be reached
    every: PositiveFloat  # passes between two looks at the loss
    looks: PositiveInt  # about how many of them are kept


class Scaling(Timed):
    """Time to a given gap, by the number of parties."""

    parties_grid: list[PositiveInt]
    method: str
    way: str
    links: str
    even: NotRequired[bool]  # nobody is slower
    lr: PositiveFloat
    passes: PositiveFloat
    every: PositiveFloat
    gap: PositiveFloat


class Pacing(Timed):
    """Time to a loss with and without waiting, by how long a message takes."""

    messages: list[NonNegativeFloat]  # mean times, in those of a party's job
    method: str
    slow: str  # in which runs one party is slower
    lr: PositiveFloat
    passes: PositiveFloat
    goal: PositiveFloat
    every: PositiveFloat


class Converging(Cut):
    """Long runs at fixed rates, with a bound on delays."""

    method: str
    lr: PositiveFloat
    passes: PositiveFloat
    every: PositiveFloat
    bound: PositiveInt
    start: NotRequired[float]  # of the straight line, in passes; 0, if not said


class Prying(Cut):
    """Attacks on what was sent in real runs."""

    attack: str  # labels, features
    method: NotRequired[str]
    lr: PositiveFloat
    width: NotRequired[PositiveInt]  # columns of the attacked party


class Forest(Settings):
    """Pairs of trees, all of them or so many drawn ones."""

    parties_grid: list[PositiveInt]
    pairs: PositiveInt
    chains: PositiveInt  # the largest number of parties in a pair of chains


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AllRows:
    """All rows of a data set as they come, before they are dealt out.

    Attributes
    ----------
    x, y
        ``[n, d]`` and ``[n]``, nothing scaled.
    spanned
        Whether targets are counted in the span of those that train, from their mean.
    hashes
        Of what was read, and of the arrays.
    """

    x: Any
    y: np.ndarray
    spanned: bool
    hashes: dict[str, str]


def read(s: Cut) -> AllRows:
    """Load all rows of a data set, with fewer of sparse columns where settings say so."""
    with warnings.catch_warnings():  # what is not verified is said on the card, and on the page
        warnings.simplefilter("ignore")
        data = load_columns(s["dataset"], standardise=False)
    parts = data.train_x, data.test_x
    x = sparse.vstack(parts, "csr") if sparse.issparse(parts[0]) else np.concatenate(parts)
    for key, fewer in (("columns", commonest), ("folded", folded)):
        if key in s:
            if not sparse.issparse(x):
                raise FedlibError(
                    f"{key} = {s[key]}, and the columns of '{s['dataset']}' are no sparse ones. "
                    "Leave the setting out."
                )
            x = fewer(x, s[key])
    y = np.concatenate([data.train_y, data.test_y])
    arrays = (x.data, x.indices, x.indptr, y) if sparse.issparse(x) else (x, y)
    used = datasets.fingerprint(*arrays)
    return AllRows(x, y, data.span is not None, {**data.hashes, "as used": used})


def commonest(x: sparse.csr_array, columns: int) -> sparse.csr_array:
    """Return sparse rows with the columns alone that most rows have, of length 1 again."""
    if columns >= x.shape[1]:
        return x
    often = np.bincount(x.indices, minlength=x.shape[1])
    x = x[:, np.sort(np.argsort(-often, kind="stable")[:columns])]
    lengths = np.sqrt(x.multiply(x).sum(axis=1))
    return sparse.csr_array(x.multiply(1 / np.where(lengths > 0, lengths, 1.0)[:, None]))


def folded(x: sparse.csr_array, columns: int) -> sparse.csr_array:
    """Return sparse rows with columns of the same number modulo ``columns`` added up."""
    whole = x.tocoo()
    small = sparse.coo_array((whole.data, (whole.row, whole.col % columns)), (x.shape[0], columns))
    return small.tocsr()


def deal(s: Cut, table: AllRows, seed: int) -> tuple[Problem, Any, np.ndarray]:
    """Draw the rows of a seed, scale them by its training part, and deal out the columns.

    Quantities get mean 0 and variance 1; columns of ones and zeros, and sparse ones, stay. Targets
    that are spanned go from 0 to 1 less their mean, of the training rows.

    Returns
    -------
    tuple
        The problem; features ``[tests, d]`` and labels ``[tests]`` of other rows.
    """
    if s["rows"] + s["tests"] > len(table.y):
        raise FedlibError(
            f"rows = {s['rows']} and tests = {s['tests']}, and '{s['dataset']}' has {len(table.y)} "
            "rows in all. Take fewer."
        )
    drawn = stream(seed, "rows").permutation(len(table.y))
    parts = drawn[: s["rows"]], drawn[s["rows"] : s["rows"] + s["tests"]]
    x, y = [table.x[part] for part in parts], [table.y[part] for part in parts]
    if not sparse.issparse(table.x):
        mean, std = scales(x[0], ~np.isin(table.x, (0.0, 1.0)).all(axis=0))
        x = [(part - mean) / std for part in x]
    if table.spanned:
        low, high = y[0].min(), y[0].max()
        y = [(part - low) / (high - low) for part in y]
        middle = y[0].mean()  # columns have mean 0, and there is no intercept
        y = [part - middle for part in y]
    blocks = split_features(x[0].shape[1], s["parties"], seed)
    problem = Problem(x[0], y[0], blocks, s["loss"], float(s["lam"]), s["regulariser"])
    return problem, x[1], y[1]


# --- settings -------------------------------------------------------------------------------------


WHOLE = {"dataset", "rows", "tests", "columns", "folded", "loss", "regulariser", "lam", "parties",
         "parties_grid", "looks", "messages"}  # fmt: skip
OF_AN_ATTACK = {"rows", "tests", "loss", "regulariser", "lam", "parties"}


def check_runs(s: Settings) -> None:
    """Refuse an experiment with a run that cannot be carried out, before the first one is.

    Raises
    ------
    FedlibError
        With the run, what came, and what is expected.
    """
    for run in s["runs"]:
        r, where = {**s, **run}, f"Run '{run['run']}':"
        check_known(r, method=METHODS, way=WAYS, links=LINKS, loss=LOSSES,
                    regulariser=REGULARISERS, attack=ATTACKS, slow=SLOW)  # fmt: skip
        if r["active"] > r["parties"] and "parties_grid" not in r:
            raise FedlibError(
                f"{where} {r['active']} of {r['parties']} parties are to have labels. Take fewer, "
                "or more parties."
            )
        if r.get("way") == "own labels" and (r["method"] != "svrg" or r["parties"] < 2):
            raise FedlibError(
                f"{where} '{r['way']}' is AFSVRG-VP: the method is svrg, with two parties or more."
            )
        if r.get("goal", 0) > r.get("passes", np.inf):
            raise FedlibError(
                f"{where} the goal is set after {r['goal']:g} passes, and there are "
                f"{r['passes']:g}. Set it earlier."
            )
        shared = WHOLE if "attack" not in r else WHOLE - OF_AN_ATTACK
        if own := sorted(key for key in shared & {*run} if run[key] != s.get(key)):
            raise FedlibError(f"{where} {', '.join(own)}: one value for all runs, beside them.")
        if 1 not in r.get("parties_grid", [1]):
            raise FedlibError(f"{where} a speed-up is over one party. Add 1 to parties_grid.")
        if r.get("attack") == "labels" and ("method" not in r or r["loss"] != "logistic"):
            raise FedlibError(
                f"{where} labels are two classes, read from the messages of a method. Name it, and "
                "take the logistic loss."
            )
        if r.get("attack") == "features" and "width" not in r:
            raise FedlibError(f"{where} how many columns does the attacked party hold? Set width.")


# --- seeds, one by one ----------------------------------------------------------------------------


def each_seed(job: Job, make: Callable[[int], list[dict[str, Any]]]) -> pd.DataFrame:
    """Return the rows of all seeds; what is finished is kept in the job's folder.

    Raises
    ------
    OutOfTime
        When the job's time is over before a seed is begun.
    """
    frames = []
    runs = hashlib.sha256(repr(job.settings["runs"]).encode()).hexdigest()[:12]
    for done, seed in enumerate(tqdm(job.seeds, "seeds", disable=not job.progress)):
        place = job.folder and job.folder / f"{runs}.{seed}.pickle"
        if place and place.exists():
            frames.append(pd.read_pickle(place))
            continue
        if job.until is not None and time.monotonic() > job.until:
            raise OutOfTime(f"Stopped in time after {done} of {len(job.seeds)} seeds.")
        with np.errstate(over="ignore", invalid="ignore"):  # of runs that diverge
            frame = pd.DataFrame(make(seed)).assign(seed=seed)
        if place:
            make_folder(place.parent)
            publish(place, pickle.dumps(frame))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def lost(frame: pd.DataFrame) -> dict[str, dict[int, int]]:
    """Return the seeds of each run whose training loss is no number at some look, with its pass."""
    loss = frame[(frame["metric"] == "loss") & (frame["split"] == "train")]
    bad = loss[~(loss["value"].abs() < 1e30)].groupby(["run", "seed"])["round"].min()
    result: dict[str, dict[int, int]] = {}
    for (run, seed), at in bad.items():
        result.setdefault(run, {})[int(seed)] = int(at)
    return result


# --- the race -------------------------------------------------------------------------------------


@alike("seeds")
def race(job: Job[Racing]) -> Outcome:
    """Run every method of an experiment on the same rows, draws, columns and slow party.

    Rows of the split ``train`` hold the ``loss`` and, but for tuning, the ``log gap`` to the best
    loss known; ``round`` is passes over the data, ``clock`` simulated time. Of the split ``time``:
    ``log speed``, minus the logarithm of the simulated time at which a run first reaches its goal,
    and ``passes`` until then. A goal is the mean loss of the synchronous run of the same method and
    links, over the last tenth of its passes until the goal is set. Of the split ``end``:
    ``distance``, of the model from that of the run on pooled data, relative to its length. Of the
    split ``test``, at the end: ``accuracy``, ``AUC`` and ``log-loss``, or ``RMSE``.
    """
    check_runs(job.settings)
    s, table = job.settings, read(job.settings)
    frame = each_seed(job, lambda seed: raced(s, table, seed))
    return Outcome(frame, lost(frame), table.hashes)


def raced(s: Racing, table: AllRows, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    problem, test_x, test_y = deal(s, table, seed)
    runs = {run["run"]: {**s, **run} for run in s["runs"]}
    made = {name: carried_out(r, problem, seed) for name, r in runs.items()}
    tunes = "tunes" in s
    goals = {} if tunes else set_goals(runs, made)
    best = None if tunes else best_known(problem, made.values())
    reference = [made[name].w for name, r in runs.items() if r["way"] == "pooled"]
    rows: list[dict[str, Any]] = []
    for name, run in made.items():
        for row in kept(run.rows, s["looks"]):
            base = dict(run=name, round=round(row.epoch, 4), clock=row.time, split="train")
            values = {"loss": row.loss if np.isfinite(row.loss) else np.inf}
            if best is not None:
                fine = np.isfinite(row.loss)
                values["log gap"] = np.log(max(row.loss - best, FLOOR)) if fine else np.nan
            rows += measured(base, values)
        base = dict(run=name, round=round(run.rows[-1].epoch, 4), clock=run.rows[-1].time)
        goal = goals.get(twin(runs[name]))
        if goal is not None and runs[name]["way"] in WAYS[:2]:
            there = reached(run.rows, goal)
            speed, passes = (-np.log(there.time), there.epoch) if there else (np.nan, np.nan)
            rows += measured(base | {"split": "time"}, {"log speed": speed, "passes": passes})
        if best is not None and len(reference) == 1:
            away = np.linalg.norm(run.w - reference[0]) / np.linalg.norm(reference[0])
            rows += measured(base | {"split": "end"}, {"distance": away})
        rows += measured(base | {"split": "test"}, judged(s["loss"], test_x @ run.w, test_y))
    return rows


def carried_out(r: Racing, problem: Problem, seed: int) -> Run:
    """Carry out one run of a race."""
    setting: dict[str, Any] = dict(
        **lengths(r), seed=seed, compute=costs(problem, seed, r.get("even", False)),
        delays=LINKS[r.get("links", "near")],
    )  # fmt: skip
    if r["way"] == "pooled":
        return pooled(problem, r["method"], r["lr"], log=False, **setting | {"compute": 1.0})
    setting["trees"] = up(r, problem)
    if r["way"] == "own labels":  # as many steps for each block that moves as elsewhere
        half = problem.q // 2
        for key in ("epochs", "every"):
            setting[key] *= half
        return afsvrg_vp(problem, r["lr"], active=half, inner=half * problem.n, log=False,
                         prompt=r["prompt"], **setting)  # fmt: skip
    return simulated(r, problem, active=r["active"], **setting)


def simulated(r: Mapping[str, Any], problem: Problem, **setting: Any) -> Run:
    """Run VFB², or its synchronous twin where a run is one that waits."""
    if r["way"] == "waiting":
        return synchronous(problem, r["method"], r["lr"], **setting)
    return simulate_parties(
        problem, r["method"], r["lr"], prompt=r["prompt"], log=False, **setting
    )


def up(r: Mapping[str, Any], problem: Problem) -> secure.Trees | None:
    """Return the trees that sums go up, where a run has them and there is somebody to send."""
    return secure.log_depth(problem.q) if r["trees"] and problem.q > 1 else None


def lengths(r: Mapping[str, Any]) -> dict[str, float]:
    """Return how long a run is and how often it is looked at, in passes of dominated steps."""
    share = dominated(r["method"], r["passes"]) / r["passes"]
    return dict(epochs=share * r["passes"], every=share * r["every"])


def dominated(method: str, passes: float) -> float:
    """Return the passes of n dominated steps among all: SVRG's n steps follow a whole pass each."""
    return {"sgd": passes, "svrg": passes / 2, "saga": max(passes - 1, passes / 2)}[method]


def costs(problem: Problem, seed: int, even: bool, parties: int | None = None) -> np.ndarray:
    """Return times per number, ``[q]``; an ordinary one of so many parties has jobs of length 1."""
    (party, slow), many = slow_party(problem.q, seed), parties or problem.q
    return straggler(problem.q, party, 0.0 if even else slow, compute=many / job_of(problem))


def slow_party(q: int, seed: int) -> tuple[int, float]:
    """Draw which party is slower than the others, and by what share."""
    draw = stream(seed, "straggler")
    return int(draw.integers(q)), float(draw.uniform(*SLOWER))


def job_of(problem: Problem) -> float:
    """Return the numbers that all parties go through for a score and for an update, their mean.

    Of sparse rows those that are there; an update goes through all columns where the regulariser is
    not linear.
    """
    if not sparse.issparse(problem.x):
        return problem.d
    score = problem.x.nnz / problem.n
    return (score + (problem.d if problem.regulariser == "nonconvex" else score)) / 2


def twin(r: Racing) -> tuple[str, str]:
    """Return what a run and the synchronous run that sets its goal have in common."""
    return r["method"], r.get("links", "near")


def set_goals(runs: dict[str, Racing], made: dict[str, Run]) -> dict[tuple[str, str], float]:
    """Return the loss that each synchronous run sets, where there is one of its kind alone."""
    kinds = {name: twin(r) for name, r in runs.items() if r["way"] == "waiting"}
    goals = {}
    for name, kind in kinds.items():
        if [*kinds.values()].count(kind) == 1:
            until = runs[name]["goal"]
            rows = [row for row in made[name].rows if row.epoch <= until]
            late = [row.loss for row in rows if 0.9 * until <= row.epoch] or [rows[-1].loss]
            goals[kind] = float(np.mean(late))
    return goals


def reached(rows: Sequence[Row], goal: float) -> Row | None:
    """Return the first look after the start at or below a loss; None if there is none."""
    return next((row for row in rows if row.loss <= goal and row.time > 0), None)


def best_known(problem: Problem, runs: Collection[Run]) -> float:
    """Return the lowest loss that is found by L-BFGS, from 0 and from the best end, or by a run."""
    ends = [run for run in runs if np.isfinite(run.rows[-1].loss)]
    starts = [np.zeros(problem.d)]
    if ends:
        starts.append(min(ends, key=lambda run: run.rows[-1].loss).w)
    losses = (row.loss for run in runs for row in run.rows if row.loss == row.loss)
    return min(*(optimum(problem, start) for start in starts), *losses)


def optimum(problem: Problem, start: np.ndarray) -> float:
    """Return the loss at which L-BFGS ends."""
    limits = dict(maxiter=5000, maxfun=20000, ftol=1e-16, gtol=1e-11, maxcor=30)
    end = minimize(
        problem.objective, start, jac=problem.gradient, method="L-BFGS-B", options=limits
    )
    return float(end.fun)


def kept(rows: Sequence[Row], looks: int) -> Iterator[Row]:
    """Yield about so many of the looks, evenly in passes, and every one of the first five."""
    places = np.linspace(0, len(rows) - 1, min(looks, len(rows))).astype(int)
    yield from (rows[k] for k in sorted({*range(min(5, len(rows))), *places.tolist()}))


def judged(loss: str, z: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return how good scores ``z [tests]`` are, by name."""
    if loss != "logistic":
        return {"RMSE": np.sqrt(np.mean((z - y) ** 2))}
    return {
        "accuracy": np.mean(np.where(z > 0, 1.0, -1.0) == y),
        "AUC": roc_auc_score(y > 0, z) if np.isfinite(z).all() else np.nan,
        "log-loss": np.mean(np.logaddexp(0.0, -y * z)),
    }


# --- the time of a message ------------------------------------------------------------------------


@alike("seeds")
def pacing(job: Job[Pacing]) -> Outcome:
    """Compare the times to one loss with and without waiting, by how long a message takes.

    Rows have the column ``message``, its mean time in those of a party's job. Of the split
    ``time``: ``log speed``, the logarithm of how many times sooner VFB² has the loss that VFB has
    after ``goal`` passes.
    """
    check_runs(job.settings)
    s, table = job.settings, read(job.settings)
    return Outcome(each_seed(job, lambda seed: paced(s, table, seed)), {}, table.hashes)


def paced(s: Pacing, table: AllRows, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    problem, rows = deal(s, table, seed)[0], []
    for run in s["runs"]:
        r = {**s, **run}
        ways: dict[str, Any] = {way: r | {"way": way} for way in WAYS[:2]}
        told: dict[str, Any] = dict(**lengths(r), active=r["active"], seed=seed)
        told["trees"] = up(r, problem)
        slowed, even = costs(problem, seed, even=False), costs(problem, seed, even=True)
        for mean in s["messages"]:
            law = ShiftedExponential(mean / 2, mean / 2) if mean else Deterministic(0.0)
            made = {
                "waiting": synchronous(
                    problem, r["method"], r["lr"], delays=law,
                    compute=even if r["slow"] == SLOW[0] else slowed, **told,
                ),
                "not waiting": simulate_parties(
                    problem, r["method"], r["lr"], delays=law, prompt=r["prompt"], log=False,
                    compute=slowed if r["slow"] == SLOW[2] else even, **told,
                ),
            }  # fmt: skip
            (goal,) = set_goals(ways, made).values()
            ends = [reached(made[way].rows, goal) for way in ("waiting", "not waiting")]
            value = np.log(ends[0].time / ends[1].time) if all(ends) else np.nan
            base = dict(run=run["run"], round=r["goal"], split="time", message=mean)
            rows += measured(base, {"log speed": value})
    return rows


# --- speed-up -------------------------------------------------------------------------------------


@alike("seeds")
def speedup(job: Job[Scaling]) -> Outcome:
    """Measure the simulated time to a gap for several numbers of parties.

    Rows have the column ``parties``. ``time``: of the first look at a gap of at most ``gap``;
    ``speed-up``: that of one party over it; ``slope``: of the straight line through 0 that fits
    the speed-up against the parties best; ``slope from two``: of the speed-up over two parties
    against half the parties; ``slope, alone too``: as ``slope``, where in a run with a slow party a
    party that is alone is that one.
    """
    check_runs(job.settings)
    s, table = job.settings, read(job.settings)
    return Outcome(each_seed(job, lambda seed: scaled(s, table, seed)), {}, table.hashes)


def scaled(s: Scaling, table: AllRows, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    problem = deal({**s, "parties": 1}, table, seed)[0]
    zero = np.zeros(problem.d)
    step = -problem.gradient(zero)  # another start: a long step down from 0
    step /= max(float(np.linalg.norm(step)), FLOOR)
    best, rows = min(optimum(problem, zero), optimum(problem, step)), []

    def timed(r: dict[str, Any], q: int, even: bool) -> float:
        dealt = replace(problem, blocks=split_features(problem.d, q, seed))
        result = simulated(
            r, dealt, **lengths(r), seed=seed, active=min(r["active"], q), trees=up(r, dealt),
            compute=costs(dealt, seed, even, s["parties"]), delays=LINKS[r["links"]],
        )  # fmt: skip
        return time_to(result.rows[1:], best + r["gap"])  # the start is no way there

    for run in s["runs"]:
        r = {**s, **run}
        even = r.get("even", False)
        times = {q: timed(r, q, even or q == 1) for q in s["parties_grid"]}
        alone = times if even else times | {1: timed(r, 1, even)}
        rows += speed_up_rows(run["run"], times, alone, r["passes"])
    return rows


def speed_up_rows(
    name: str, times: dict[int, float], alone: dict[int, float], passes: float
) -> list[dict[str, Any]]:
    """Return rows on times by the number of parties; a gap never reached has no speed-up.

    ``alone`` are the times where a party that is alone may be the slow one.
    """
    base = dict(run=name, round=passes, split="speed-up")
    ratios = speed_up(times) if np.isfinite(times[1]) else dict.fromkeys(times, np.nan)
    rows = [base | dict(parties=q, metric="time", value=t) for q, t in times.items()]
    rows += [base | dict(parties=q, metric="speed-up", value=v) for q, v in ratios.items()]
    slopes = ("slope", 1, times), ("slope from two", 2, times), ("slope, alone too", 1, alone)
    for metric, first, found in slopes:
        slope = np.nan
        if np.isfinite(found.get(first, np.inf)):
            several = {q: t for q, t in found.items() if q >= first}
            slope = slope_through_0(speed_up(several, first), first)
        rows.append(base | dict(parties=0, metric=metric, value=slope))
    return rows


def slope_through_0(ratios: dict[int, float], base: int = 1) -> float:
    """Return the least-squares slope of speed-ups against ``parties / base``, through 0."""
    x, y = np.array([*ratios]) / base, np.array([*ratios.values()])
    return float(x @ y / (x @ x))


# --- rates ----------------------------------------------------------------------------------------


@alike("seeds")
def convergence(job: Job[Converging]) -> Outcome:
    """Run to the floor at fixed rates, with a bound on how late an update may be.

    Rows of the split ``train`` hold the ``log10 gap``; those of the split ``end`` the ``log
    plateau``, the logarithm of the mean gap over the second half, ``lowest``, the lowest log10 gap,
    and ``straightness``, R² of the best straight line through the log10 gaps from ``start`` on that
    are above 1e-11.
    """
    check_runs(job.settings)
    s, table = job.settings, read(job.settings)
    return Outcome(each_seed(job, lambda seed: converged(s, table, seed)), {}, table.hashes)


def converged(s: Converging, table: AllRows, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    problem, rows, made = deal(s, table, seed)[0], [], {}
    for run in s["runs"]:
        r = {**s, **run}
        made[run["run"]] = simulate_parties(
            problem, r["method"], r["lr"], **lengths(r), active=r["active"], bound=r["bound"],
            delays=LINKS["far"], seed=seed, log=False, compute=costs(problem, seed, False),
        )  # fmt: skip
    best = best_known(problem, made.values())
    for name, run in made.items():
        passes = np.array([row.epoch for row in run.rows])
        gaps = np.maximum([row.loss - best for row in run.rows], FLOOR)
        for at, gap in zip(passes, np.log10(gaps), strict=True):
            base = dict(run=name, round=round(at, 4), split="train")
            rows += measured(base, {"log10 gap": gap})
        late, line = gaps[passes > passes[-1] / 2], passes >= s.get("start", 0.0)
        rows += measured(dict(run=name, round=round(passes[-1], 4), split="end"), {
            "log plateau": np.log(late.mean()),
            "lowest": np.log10(gaps.min()),
            "straightness": straightness(passes[line], gaps[line]),
        })  # fmt: skip
    return rows


def straightness(passes: np.ndarray, gaps: np.ndarray, floor: float = 1e-11) -> float:
    """Return R² of the straight line that fits the logarithm of the gaps until a floor best."""
    below = np.flatnonzero(gaps < floor)
    stop = below[0] if len(below) else len(gaps)
    x, y = passes[:stop], np.log10(gaps[:stop])
    return float(np.corrcoef(x, y)[0, 1] ** 2) if stop > 2 else float("nan")


# --- attacks --------------------------------------------------------------------------------------


@alike("seeds")
def secrets(job: Job[Prying]) -> Outcome:
    """Attack the messages of runs: what does a party learn that has no labels, or other columns?

    Rows of the split ``labels``: ``right``, the share of the labels that it reads correctly among
    those that a message was about, ``told``, the share of all that this is, and ``guessing``, that
    of the more frequent class. Of the split ``features``: ``error``, the relative error of another
    party's features but for order and signs of its columns, ``shape error``, the same but for a
    rotation, and ``rank``, how many features it sees there to be.
    """
    check_runs(job.settings)
    s, table = job.settings, read(job.settings)

    def attacked(seed: int) -> list[dict[str, Any]]:
        rows = []
        for run in s["runs"]:
            r = {**s, **run}
            base = dict(run=run["run"], round=0, split=r["attack"])
            rows += measured(base, ATTACKS[r["attack"]](r, deal(r, table, seed)[0], seed))
        return rows

    return Outcome(each_seed(job, attacked), {}, table.hashes)


def label_attack(r: Prying, problem: Problem, seed: int) -> dict[str, float]:
    """Read labels off ``(ϑ, i)``, as the last party gets them, which has no labels."""
    run = simulate_parties(
        problem, r["method"], r["lr"], epochs=1, active=r["active"], delays=LINKS["far"],
        compute=costs(problem, seed, False), seed=seed, log=False,
    )  # fmt: skip
    labels = attacks.labels(run.messages.theta, run.messages.i, problem.n)
    if r["method"] != "sgd":  # one value for each sample, before the first step
        start = problem.theta(problem.scores(np.zeros(problem.d)), problem.y)
        labels = attacks.labels(start, np.arange(problem.n), problem.n)
    read = labels != 0
    return {
        "right": (labels == problem.y)[read].mean(),
        "told": read.mean(),
        "guessing": max((problem.y > 0).mean(), (problem.y < 0).mean()),
    }


def feature_attack(r: Prying, problem: Problem, seed: int) -> dict[str, float]:
    """Let the dominator of two parties go after the other's columns, from SVRG's snapshots."""
    width, d = r["width"], problem.d
    order = stream(seed, "attacked columns").permutation(d)
    theirs = np.sort(order[:width])
    blocks = (np.sort(order[width:]), theirs)
    problem = replace(problem, blocks=blocks)
    loops = 2 * width + 2
    run = simulate_parties(
        problem, "svrg", r["lr"], epochs=loops, active=1, seed=seed, log=False, keep="snapshots"
    )
    models = np.vstack([run.snapshots, run.w])
    seen = (
        models[:, theirs] @ problem.x[:, theirs].T,
        run.messages.theta.reshape(loops, -1),
        run.messages.i.reshape(loops, -1),
        np.array([problem.theta(problem.scores(w), problem.y) for w in models[:-1]]),
    )
    secret, lam = problem.x[:, theirs], problem.lam
    if problem.regulariser == "nonconvex":
        x = attacks.features_up_to_signs(*seen, r["lr"], lam, seed=seed).x
    else:
        x = attacks.embedding(attacks.gram_from_snapshots(*seen, r["lr"], lam), width)
    return {
        "error": attacks.distance(x, secret, "signs"),
        "shape error": attacks.distance(x, secret, "rotation"),
        "rank": attacks.snapshot_rank(seen[0]),
    }


ATTACKS = {"labels": label_attack, "features": feature_attack}


# --- trees ----------------------------------------------------------------------------------------


def trees(job: Job[Forest]) -> Outcome:
    """Look for single parties that learn more than they may from a run of Algorithm 1.

    ``opens`` is the share of pairs of trees from which some party alone learns a sum of others'
    scores other than the total at the root, or the number of such parties where there is one pair;
    ``pairs`` is how many satisfied Definition 4, out of ``tried``.
    """
    s, rows = job.settings, []
    figure, lone = secure.FIGURE_5, ((1, 2), (1, 2))
    for name, count in (
        ("Figure 5", unsafe(figure)),
        ("two parties", unsafe(lone) + len(secure.opened(lone, [1]))),
        ("Figure 5, parties 2 and 3 together", len(secure.opened(figure, [2, 3]))),
        ("chains", sum(unsafe(secure.chains(q)) for q in range(3, s["chains"] + 1))),
    ):
        rows += measured({"run": name}, {"opens": count})
    for q in s["parties_grid"]:
        pairs = list(pairs_of_trees(q, s["pairs"]))
        valid = [pair for pair in pairs if secure.significantly_different(pair)]
        opens = np.mean([unsafe(pair) > 0 for pair in valid])
        values = {"opens": opens, "pairs": len(valid), "tried": len(pairs)}
        rows += measured({"run": f"{q} parties"}, values)
    return Outcome(pd.DataFrame(rows).assign(seed=0, round=0, split="trees"), {}, {})


def unsafe(pair: secure.Trees) -> int:
    """Return how many single parties learn more than they may."""
    q = secure.check_trees(pair)
    return sum(not secure.safe(pair, [party]) for party in range(1, q + 1))


def binary_trees(parties: Sequence[int]) -> Iterator[secure.Tree]:
    """Yield every binary tree over some parties, each once: the first party is on the left."""
    if len(parties) == 1:
        yield parties[0]
        return
    first, rest = parties[0], parties[1:]
    for mask in range(2 ** len(rest) - 1):
        left = [first, *(p for k, p in enumerate(rest) if mask >> k & 1)]
        right = [p for k, p in enumerate(rest) if not mask >> k & 1]
        yield from itertools.product(binary_trees(left), binary_trees(right))


def pairs_of_trees(q: int, most: int) -> Iterator[secure.Trees]:
    """Yield all pairs of two different binary trees over q parties, or so many drawn ones."""
    forest = list(binary_trees(range(1, q + 1)))
    if len(forest) * (len(forest) - 1) <= most:
        yield from itertools.permutations(forest, 2)
        return
    draw = stream(0, "pairs of trees", q)
    for _ in range(most):
        one, other = draw.choice(len(forest), 2, replace=False)
        yield forest[one], forest[other]
