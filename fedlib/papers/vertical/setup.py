"""What a simulation of VFB² is told, checked once, and its chance, drawn ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from fedlib.engine.checks import check_between, check_flag, check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.papers.vertical.problem import Problem
from fedlib.papers.vertical.secure import Trees, check_trees, seats, sends
from fedlib.population.delays import Deterministic, check_law

METHODS = ("sgd", "svrg", "saga")
TABLES = ("full", "theta")
LAZY = 0.01
"""The largest γλ for which sparse updates shrink all of ``w`` by one factor."""
CHUNK = 1024
"""Steps of a dominator whose chance is drawn at once; each such piece has its own streams."""


@dataclass(frozen=True)
class Setup:
    """All that a simulation is told, checked; see `simulate_parties` for what it means."""

    problem: Problem
    method: str
    lr: float
    active: Any = 1  # how many parties, or which; then a tuple of which
    threads: Any = None  # then how many
    compute: Any = 1.0  # one number, or one each; then an array [q]
    delays: Any = Deterministic(0.0)  # a law, or one each; then a list of one each
    bound: int | None = None
    ordered: bool = True
    table: str | None = None  # then which
    mask: float = 0.0
    backward: bool = True
    seed: int = 0
    start: np.ndarray | None = None
    steps: int = 0  # dominated ones, in all
    log: bool = True
    prompt: bool = False
    trees: Trees | None = None

    def __post_init__(self) -> None:
        q = self.problem.q
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        table = self.table or ("theta" if sparse.issparse(self.problem.x) else "full")
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        active = _active(self.active, q)
        threads = len(active) if self.threads is None else self.threads
        check_whole_number("threads", threads)
        check_whole_number("seed", self.seed, 0)
        if self.bound is not None:
            check_whole_number("bound", self.bound, 0)
        at_least("lr", self.lr, 0)
        check_flag("ordered", self.ordered)
        check_flag("backward", self.backward)
        check_flag("log", self.log)
        check_flag("prompt", self.prompt)
        lost = q**2 * at_least("mask", self.mask, 0) * 2.0**-53
        if lost > 1e-3:
            raise FedlibError(
                f"Masks as wide as {self.mask:g} wash the sum out: with {q} parties float64 loses "
                f"up to {lost:.1g}. Take narrower masks, or whole numbers modulo 2⁶⁴."
            )
        if self.trees is not None and check_trees(self.trees) != q:
            raise FedlibError(f"Trees for {check_trees(self.trees)} parties; there are {q}.")
        check_law("delays", self.delays)
        times = np.array([at_least("compute", c, 0) for c in np.atleast_1d(self.compute)])
        if len(times) not in (1, q):
            raise FedlibError(
                f"{len(times)} times per feature for {q} parties: one for all, or one each."
            )
        laws = list(self.delays) if isinstance(self.delays, Sequence) else [self.delays] * q
        if len(laws) != q:
            raise FedlibError(f"{len(laws)} delay laws for {q} parties: one for all, or one each.")
        d, start = self.problem.d, self.start
        if start is not None:
            if np.shape(start) != (d,):
                raise FedlibError(f"start is {np.shape(start)}; expected [{d}].")
            start = np.array(start, dtype=np.float64)
        for name, value in (
            ("lr", float(self.lr)), ("active", active), ("threads", threads), ("table", table),
            ("compute", np.broadcast_to(times, q)), ("delays", laws), ("start", start),
        ):  # fmt: skip
            object.__setattr__(self, name, value)

    @property
    def lazy(self) -> bool:
        """Whether an update goes through the entries of its sample alone, and no further."""
        problem = self.problem
        late = max(self.threads + 1, self.m)  # so many updates may follow one read of the block
        small = problem.regulariser == "l2" and self.lr * problem.lam <= min(LAZY, 0.5 / late)
        linear = problem.regulariser == "none" or small
        full = self.method == "saga" and self.table == "full"
        return sparse.issparse(problem.x) and linear and not full

    @property
    def m(self) -> int:
        """Number of active parties."""
        return len(self.active)

    @property
    def updates(self) -> int:
        """Block updates in a dominated step."""
        return self.problem.q if self.backward else 1

    def pass_time(self, number: int) -> float:
        """Return how long the pass takes in which every party learns all n values of ϑ.

        Scores of all samples go to the first active party, and its n values come back, in one
        message a hop; then every party forms its full gradient or table. Both go through all
        entries of a party's columns once. Threads share the rows.
        """
        x = self.problem.x
        if sparse.issparse(x):
            each = np.bincount(x.indices, minlength=x.shape[1])
        else:
            each = np.full(x.shape[1], x.shape[0])
        entries = np.array([each[block].sum() for block in self.problem.blocks])
        work = self.compute * entries / self.threads
        above, upward = self.routes()
        legs = np.array([
            law.draws(self.seed, "pass", l, number, size=1 + len(above))
            for l, law in enumerate(self.delays)
        ])  # fmt: skip
        *others, first = upward[0]
        legs[first] = 0
        scores, masks = work.copy(), np.zeros(len(work))
        for ready, to, hop in zip((scores, masks), above[:, 0], legs.T[[0, -1]], strict=False):
            for l in others:
                ready[to[l]] = max(ready[to[l]], ready[l] + hop[l])
        return float(max(scores[first], masks[first]) + (work + legs[:, 1]).max())

    def routes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return to whom parties send sums, ``[trees, m, q]``, and in which order, ``[m, q]``.

        A dominator sends to itself and comes last in the order, where everybody comes before the
        one that it sends to. Without trees all send to the dominator.
        """
        q, trees = self.problem.q, self.trees
        above = np.zeros((1 if trees is None else 2, self.m, q), np.int64)
        upward = np.zeros((self.m, q), np.int64)
        for a, dominator in enumerate(self.active):
            above[:, a] = dominator
            place = np.array(seats(q, dominator) if q > 1 else [0])
            upward[a] = place[::-1]  # the higher seat sends to the lower
            for row, tree in zip(above[:, a], trees or (), strict=False):
                for send in sends(tree):
                    row[place[send.sender - 1]] = place[send.receiver - 1]
        return above, upward


class Draws:
    """The chance of a simulation, drawn ahead: samples, delays and masks of every step.

    Every stream is named by the seed, the dominator, its piece of :data:`CHUNK` steps and, for
    delays and masks, the other party. So what a step meets does not depend on when it happens.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def piece(self, a: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a dominator's samples ``[CHUNK]``, delays ``[CHUNK, q, 4]``, masks ``[CHUNK, q]``.

        The delays are those of the request, of a sum of scores, of ``(ϑ, i)``, and, with trees, of
        a sum of masks.
        """
        setup, q = self.setup, self.setup.problem.q
        samples = stream(setup.seed, "sample", a, number).integers(setup.problem.n, size=CHUNK)
        delays, masks = np.zeros((CHUNK, q, 4)), np.zeros((CHUNK, q))
        for l, law in enumerate(setup.delays):
            if l != a:
                legs = ("request", "score", "backward", "masks")
                for leg, name in enumerate(legs if setup.trees else legs[:3]):
                    delays[:, l, leg] = law.draws(setup.seed, name, a, l, number, size=CHUNK)
            if setup.mask:
                draw = stream(setup.seed, "mask", a, l, number).random(CHUNK)
                masks[:, l] = setup.mask * (2 * draw - 1)
        if not (delays >= 0).all():
            raise FedlibError(
                f"A delay law gave {delays[~(delays >= 0)][0]}. Delays are times of at least 0."
            )
        return samples, delays, masks


def straggler(q: int, party: int, slow: float, compute: float = 1.0) -> np.ndarray:
    """Return times per feature, ``[q]``, of parties of which one takes ``1 + slow`` times as long.

    Raises
    ------
    FedlibError
        For a party that is not there, or ``slow`` outside [0, 1).
    """
    if not 0 <= party < q or not 0 <= slow < 1:
        raise FedlibError(
            f"Party {party} of {q}, slower by {slow}: a party from 0 to {q - 1} and a share from 0 "
            "to below 1 are needed."
        )
    times = np.full(q, float(compute))
    times[party] *= 1 + slow
    return times


def _active(active: Any, q: int) -> tuple[int, ...]:
    """Return which parties hold labels."""
    if isinstance(active, int | np.integer) and not isinstance(active, bool):
        if not 1 <= active <= q:
            raise FedlibError(
                f"{active} active parties of {q}: at least one holds labels, and at most all do."
            )
        return tuple(range(active))
    if isinstance(active, str | float | None) or any(int(a) != a for a in active):
        raise FedlibError(f"active is how many parties hold labels, or which; got {active!r}.")
    parties = tuple(int(a) for a in active)
    if not parties or len(set(parties)) < len(parties) or not all(0 <= a < q for a in parties):
        raise FedlibError(
            f"active parties {list(parties)}: at least one, none twice, each from 0 to {q - 1}."
        )
    return parties


def at_least(name: str, value: Any, least: float) -> float:
    """Return a finite number, having refused what is none or too small."""
    check_between(name, value, least)
    return float(value)


def total_steps(n: int, epochs: float | None, steps: int | None) -> int:
    """Return the dominated steps to take."""
    if (epochs is None) == (steps is None):
        raise FedlibError(
            "Give either epochs or steps: how many dominated steps to take; got "
            f"epochs={epochs!r} and steps={steps!r}."
        )
    if steps is None:
        return round(at_least("epochs", epochs, 0) * n)
    check_whole_number("steps", steps, 0)
    return int(steps)
