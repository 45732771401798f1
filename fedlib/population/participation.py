"""Who takes part in a round, and with what weight.

A participation process gives weights ``q[t, n]``, non-negative, summing to one in every round.
They depend on the seed and the round alone, never on the model. Its influence on convergence
is measured by how far the average weights over an interval are from ``1/N``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.files import digest

Draw = tuple[np.ndarray, np.ndarray]  # clients [S], weights [S]


def equal(clients: np.ndarray) -> Draw:
    """Give all drawn clients the same weight."""
    return clients, np.full(len(clients), 1 / len(clients))


@dataclass(frozen=True)
class Participation:
    """Base class. A process defines ``draw(seed, t)``; the rest follows.

    Parameters
    ----------
    N
        Number of clients.
    """

    N: int

    def __post_init__(self) -> None:
        check_whole_number("N", self.N)

    @property
    def cycle(self) -> int:
        """Number of rounds after which availability or cohorts repeat, 1 where nothing does."""
        return 1

    def draw(self, seed: int, t: int) -> Draw:
        """Return the clients of round ``t`` and their weights; a client may appear twice."""
        raise NotImplementedError

    def cohort(self, seeds: Sequence[int], t: int) -> tuple[Tensor, Tensor]:
        """Return clients ``[R, S]`` and weights ``[R, S]`` of round ``t``, one row a seed.

        Where runs draw different numbers of clients, a short row is padded with its own first
        client at weight zero.
        """
        clients, q = self.cohort_arrays(seeds, t)
        return torch.from_numpy(clients), torch.from_numpy(q)

    def cohort_arrays(self, seeds: Sequence[int], t: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what :meth:`cohort` returns, as arrays: for draws, which stay on the host."""
        draws = [self.draw(int(seed), t) for seed in seeds]
        check_draws(draws, self.N)
        width = max(len(clients) for clients, _ in draws)
        clients = np.empty((len(draws), width), dtype=np.int64)
        q = np.zeros((len(draws), width))
        for r, (drawn, weight) in enumerate(draws):
            clients[r, : len(drawn)], q[r, : len(drawn)] = drawn, weight
            clients[r, len(drawn) :] = drawn[0]
        return clients, q

    def weights(self, seed: int, start: int, stop: int) -> np.ndarray:
        """Return the dense weights ``q[t, n]`` of rounds ``start..stop-1``."""
        check_whole_number("start", start, 0)
        check_whole_number("stop", stop, start)
        q = np.zeros((stop - start, self.N))
        for row, t in zip(q, range(start, stop), strict=True):
            np.add.at(row, *self.draw(seed, t))
        return q

    def rho2(self, seed: int, rounds: int, start: int = 0) -> float:
        """Return the largest ``Σ_n q²`` over ``rounds`` rounds; 1/ρ² is the speed-up."""
        check_whole_number("rounds", rounds)
        return float((self.weights(seed, start, start + rounds) ** 2).sum(1).max())


def check_draws(draws: Sequence[Draw], N: int) -> None:
    """Refuse draws that are not some of ``N`` clients with weights that sum to one."""
    for draw in draws:
        try:
            clients, q = map(np.asarray, draw)
            lists = clients.ndim == q.ndim == 1 and len(clients) == len(q) > 0
            numbers = clients.dtype.kind in "iu" and q.dtype.kind in "iuf"
        except (TypeError, ValueError):
            lists = numbers = False
        known = lists and numbers and clients.min() >= 0 and clients.max() < N
        if not known or not q.min() >= 0 or not abs(q.sum() - 1) < 1e-6:
            raise FedlibError(
                f"A draw is two lists, some of the clients 0 to {N - 1}, and for each a weight of "
                f"at least 0, together 1; got {draw!r}."
            )


@dataclass(frozen=True)
class _Some(Participation):
    """``S`` clients of ``N`` a round."""

    S: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("S", self.S)
        if self.S > self.N:
            raise FedlibError(f"S must be between 1 and N={self.N}; got {self.S}.")


@dataclass(frozen=True)
class Full(Participation):
    """Everybody, always, with weight 1/N."""

    def draw(self, seed: int, t: int) -> Draw:
        """Return all clients."""
        return equal(np.arange(self.N))


@dataclass(frozen=True)
class Independent(_Some):
    """``S`` clients without replacement, afresh each round."""

    def draw(self, seed: int, t: int) -> Draw:
        """Return a uniform subset."""
        return equal(stream(seed, "participation", t).choice(self.N, self.S, replace=False))


@dataclass(frozen=True)
class Regularized(_Some):
    """Walk through a random permutation ``S`` at a time; reshuffle after ``N/S`` rounds.

    Every interval of a multiple of ``N/S`` rounds that starts with a permutation has
    q̄ = 1/N for every client, so δ̃(P) = 0 (Proposition 4.2).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.N % self.S:
            raise FedlibError(f"N must be a multiple of S; got N={self.N}, S={self.S}.")

    @property
    def cycle(self) -> int:
        """One permutation."""
        return self.N // self.S

    def draw(self, seed: int, t: int) -> Draw:
        """Return the next ``S`` clients of the current permutation."""
        number, k = divmod(t, self.N // self.S)
        order = _permutation(seed, number, self.N)
        return equal(order[k * self.S : (k + 1) * self.S])


@dataclass(frozen=True)
class Cyclic(Participation):
    """One client a round, in turn."""

    @property
    def cycle(self) -> int:
        """Everybody once."""
        return self.N

    def draw(self, seed: int, t: int) -> Draw:
        """Return client ``t mod N``."""
        return equal(np.array([t % self.N]))


@dataclass(frozen=True)
class _Windows(_Some):
    """Groups of clients that are available in turn, ``window`` rounds each."""

    groups: int = 5
    window: int = 100
    offset: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("groups", self.groups)
        check_whole_number("window", self.window)
        if self.offset is not None:
            check_whole_number("offset", self.offset, 0)
        if self.N % self.groups or self.S > self.N // self.groups:
            raise FedlibError(
                f"{self.groups} groups of N={self.N} clients must be equal and hold S={self.S}."
            )

    @property
    def cycle(self) -> int:
        """One window for each group."""
        return self.groups * self.window

    def shift(self, seed: int) -> int:
        """Return the offset of a run: how many rounds its first window is cut short."""
        if self.offset is not None:
            return self.offset
        return int(self.window * stream(seed, "participation offset").random())

    def available(self, seed: int, t: int) -> np.ndarray:
        """Return the clients of the group whose window contains round ``t``."""
        group = (t + self.shift(seed)) // self.window % self.groups
        size = self.N // self.groups
        return np.arange(group * size, (group + 1) * size)


@dataclass(frozen=True)
class Periodic(_Windows):
    """Periodic availability, ideal: permutations of the available group, aligned to windows.

    When ``window`` is a multiple of the group size over ``S``, each available client takes
    part equally often in a window, and δ over a whole cycle that begins with a window is zero.
    """

    def draw(self, seed: int, t: int) -> Draw:
        """Return the next ``S`` clients of the available group's permutation."""
        group = self.available(seed, t)
        passes = len(group) // self.S
        window, k = divmod(t + self.shift(seed), self.window)
        number, k = divmod(k, passes)
        order = _permutation(seed, window * (self.window + 1) + number, len(group))
        return equal(group[order[k * self.S : (k + 1) * self.S]])


class _Sequential(Participation):
    """A process with memory: rounds are generated in order and kept."""

    def start(self, seed: int) -> dict[str, Any]:
        """Return the state before round 0."""
        raise NotImplementedError

    def step(self, state: dict[str, Any], seed: int, t: int) -> Draw:
        """Draw round ``t`` and move the state on, in place."""
        raise NotImplementedError

    def draw(self, seed: int, t: int) -> Draw:
        """Return round ``t``, generating all rounds before it the first time."""
        check_whole_number("t", t, 0)
        with _ONE_AT_A_TIME:  # a panel may run beside a notebook's cells
            state, rounds = _memory(self, seed)
            try:
                while len(rounds) <= t:
                    rounds.append(self.step(state, seed, len(rounds)))
            except BaseException:  # stopped in the middle of a step: what is kept is no good
                _memory.cache_clear()
                raise
            return rounds[t]


_ONE_AT_A_TIME = threading.RLock()


@functools.lru_cache(maxsize=256)
def _memory(process: _Sequential, seed: int) -> tuple[dict[str, Any], list[Draw]]:
    return process.start(seed), []


@functools.lru_cache(maxsize=4096)
def _permutation(seed: int, number: int, size: int) -> np.ndarray:
    return stream(seed, "participation", number).permutation(size)


@dataclass(frozen=True)
class PeriodicSampler(_Windows, _Sequential):
    """Periodic availability exactly as the participation paper's official code samples it.

    One permutation of *all* clients is consumed from its end. Clients that are not available
    are skipped and lost until the next permutation; a round may straddle two permutations, so
    a client may be drawn twice and then counts twice. With ``groups=1`` everybody is always
    available.
    """

    def start(self, seed: int) -> dict[str, Any]:
        """Begin with an empty permutation."""
        return {"order": [], "number": 0}

    def step(self, state: dict[str, Any], seed: int, t: int) -> Draw:
        """Take the next ``S`` available clients off the permutation."""
        group = self.available(seed, t)
        low, high = group[0], group[-1]
        drawn: list[int] = []
        while len(drawn) < self.S:
            if not state["order"]:
                rng = stream(seed, "participation", state["number"])
                state["order"] = rng.permutation(self.N).tolist()
                state["number"] += 1
            n = state["order"].pop()
            if low <= n <= high:
                drawn.append(n)
        return equal(np.array(drawn))


@dataclass(frozen=True)
class Markov(_Sequential):
    """Independent two-state chains, one a client; those that are on share the weight.

    Our construction for the paper's strongly mixing case. The chains start in their
    stationary law, on with probability ``on / (on + off)``. Everybody takes part when nobody
    is on, which keeps E q = 1/N.

    Parameters
    ----------
    on
        Probability off → on in a round; a number, or one for each client, which then are there for
        different shares of the time, so that E q is not 1/N.
    off
        Probability on → off in a round.
    cap
        At most this many clients a round, chosen uniformly among those that are on.
    """

    on: float | tuple[float, ...] = 0.1
    off: float = 0.1
    cap: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap is not None:
            check_whole_number("cap", self.cap)
        if not isinstance(self.on, Real | tuple):
            raise FedlibError(f"on is a number, or a tuple of one a client; got {self.on!r}.")
        if isinstance(self.on, tuple) and len(self.on) != self.N:
            raise FedlibError(f"on has {len(self.on)} numbers, and there are {self.N} clients.")
        both = (*(self.on if isinstance(self.on, tuple) else (self.on,)), self.off)
        if not all(isinstance(p, Real) and 0 < p <= 1 for p in both):
            raise FedlibError(
                f"on and off must lie in (0, 1], and off is one number; got {self.on!r} and "
                f"{self.off!r}."
            )

    def start(self, seed: int) -> dict[str, Any]:
        """Draw the stationary start."""
        uniform = stream(seed, "participation start").random(self.N)
        return {"on": uniform < self.on / np.add(self.on, self.off)}

    def step(self, state: dict[str, Any], seed: int, t: int) -> Draw:
        """Let those that are on take part, then move every chain."""
        rng = stream(seed, "participation", t)
        drawn = np.flatnonzero(state["on"])
        if len(drawn) == 0:
            drawn = np.arange(self.N)
        if self.cap is not None and len(drawn) > self.cap:
            drawn = rng.choice(drawn, self.cap, replace=False)
        flip = rng.random(self.N)
        state["on"] = np.where(state["on"], flip >= self.off, flip < self.on)
        return equal(drawn)


@dataclass(frozen=True)
class Drift(_Some):
    """Ergodic slow phase drift: a window of ``S`` neighbours that moves round the clients.

    The window starts at a random client and moves by a step of 0 to ``2 speed`` clients a
    round, uniformly. Its long-run average is uniform, so δ̃²(P) → 0 as P grows.
    """

    speed: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_number("speed", self.speed, 0)

    def draw(self, seed: int, t: int) -> Draw:
        """Return the ``S`` clients under the window."""
        for block in range(0, t // 1024, 256):  # no recursion deeper than that
            _drift(seed, self.N, self.speed, block)
        position = _drift(seed, self.N, self.speed, t // 1024)[t % 1024]
        return equal((position + np.arange(self.S)) % self.N)


@functools.lru_cache(maxsize=4096)
def _drift(seed: int, clients: int, speed: int, block: int) -> np.ndarray:
    steps = stream(seed, "participation", block).integers(0, 2 * speed + 1, size=1024)
    if block:
        start = _drift(seed, clients, speed, block - 1)[-1]
    else:
        start = stream(seed, "participation start").integers(clients)
    return start + np.cumsum(steps)


class Trace(Participation):
    """Replay recorded weights ``[T, N]``, again from the start after ``T`` rounds."""

    recorded: np.ndarray
    digest: str

    def __init__(self, recorded: np.ndarray) -> None:
        try:
            recorded = np.array(recorded, dtype=float)
        except (TypeError, ValueError):
            recorded = np.zeros(0)
        sums = recorded.sum(1) if recorded.ndim == 2 and recorded.size else np.zeros(1)
        if recorded.ndim != 2 or not np.allclose(sums, 1) or recorded.min() < 0:
            raise FedlibError(
                "A trace needs weights [T, N], non-negative, each row summing to one; "
                f"got shape {recorded.shape} with row sums {sums.min():.3g} to {sums.max():.3g}."
            )
        super().__init__(recorded.shape[1])
        object.__setattr__(self, "recorded", recorded)
        object.__setattr__(self, "digest", digest(recorded)[:16])

    @property
    def cycle(self) -> int:
        """Rounds after which the recording starts again."""
        return len(self.recorded)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def draw(self, seed: int, t: int) -> Draw:
        """Return the clients with positive weight in recorded round ``t mod T``."""
        row = self.recorded[t % len(self.recorded)]
        clients = np.flatnonzero(row)
        return clients, row[clients]


PROCESSES = {
    "full": Full,
    "independent": Independent,
    "regularized": Regularized,
    "periodic": Periodic,
    "periodic-sampler": PeriodicSampler,
    "cyclic": Cyclic,
    "markov": Markov,
    "drift": Drift,
}
