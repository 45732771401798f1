"""The theorems' rates, on quadratics whose constants are all known.

``f_j(v) = ½ Σ_k H_jk (v_k − c_jk)²`` with curvatures between μ and L, both of which occur, so
``κ = L/μ`` exactly; minimisers are weighted means. A stochastic gradient adds Gaussian noise of
variance δ², anew in every step. The library's own loop is not used here, though it does the same on
such clients without noise (tested): its clients walk through shuffled samples, so that noise
cancels over a pass. That is the remedy that the paper names for the term that is to be measured,
and a way of its own here (``walk``).

Rates are those of the theorems' proofs. Every seed draws a problem; expectations over the noise are
means over ``copies``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NotRequired

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.lab.job import Job, Outcome, Settings
from fedlib.lab.studies.shared import check_known, measured
from fedlib.papers.personalization import theory, weights
from fedlib.papers.personalization.algorithm import schedule
from fedlib.papers.personalization.theory import Constants
from fedlib.schema import NonNegativeFloat, PositiveFloat, PositiveInt

ORDERS = ("random", "fixed", "replacement")


class Quadratics(Settings):
    """Clients with quadratic losses, and how long they train."""

    clients: PositiveInt
    local_steps: PositiveInt
    kappa: PositiveFloat
    dim: PositiveInt
    lam: PositiveFloat  # λ, as a multiple of the least that gives everybody a weight for all
    copies: PositiveInt
    rounds_grid: list[PositiveInt]
    noise: NonNegativeFloat  # δ² of a personal model's visits, or of local SGD


class Models(Quadratics):
    """Models for given weights."""

    order: str  # "random", "fixed", or "replacement": visits drawn anew each time
    walk: NotRequired[bool]  # a visit walks once through the host's K samples, in a new order


class SingleLoop(Quadratics):
    """Algorithm 2 with exact weights; or, in two stages, Algorithm 3 before Algorithm 1."""

    stages: PositiveInt  # 1 or 2
    global_noise: NonNegativeFloat  # δ² of a sample's gradient where the global model learns
    global_batch: PositiveInt  # samples of every client in a step of the global model
    rate_of: NotRequired[PositiveInt]  # visits at the rate of 1 or 2 stages; default is its own


@dataclass(frozen=True)
class QuadraticClients:
    """Clients ``½ Σ_k H_jk (v_k − c_jk)²``; curvatures and centres are ``[N, d]``.

    Attributes
    ----------
    curvatures, centres
        H and c.
    sizes
        Samples that each client counts for, ``[N]``.
    lam
        λ of equation (2).
    """

    curvatures: np.ndarray
    centres: np.ndarray
    sizes: np.ndarray
    lam: float = 1.0

    def minimiser(self, A: np.ndarray) -> np.ndarray:
        """Return the minimisers of ``Σ_j α(j) f_j``, ``[..., d]`` from weights ``[..., N]``."""
        return A @ (self.curvatures * self.centres) / (A @ self.curvatures)

    def optimum(self) -> np.ndarray:
        """Return w*, the global minimiser, ``[d]``."""
        return self.minimiser(np.full(len(self.sizes), 1 / len(self.sizes)))

    def discrepancies(self, w: np.ndarray) -> np.ndarray:
        """Return ``ζ_ij(w)``, ``[..., N, N]`` from models ``[..., d]``."""
        g = self.curvatures * (w[..., None, :] - self.centres)
        return ((g[..., :, None, :] - g[..., None, :, :]) ** 2).sum(-1)

    def weights(self, w: np.ndarray) -> np.ndarray:
        """Return the exact mixing weights at models ``[..., d]``, ``[..., N, N]``."""
        z = torch.from_numpy(self.discrepancies(w))
        return weights.water_fill(z, torch.from_numpy(self.sizes), self.lam).numpy()

    def excess(self, A: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return ``Φ(α_i, v_i) − min Φ(α_i, ·)``, ``[..., N]`` from models ``[..., N, d]``."""
        away = v - self.minimiser(A)
        return 0.5 * (A @ self.curvatures * away**2).sum(-1)


def draw_clients(seed: int, s: Quadratics) -> QuadraticClients:
    """Return a seed's problem: ``μ = 1``, ``L = κ``, centres around zero, sizes from 50 to 100."""
    rng, shape = stream(seed, "quadratics"), (s["clients"], s["dim"])
    u = rng.random(shape)
    H = 1 + (s["kappa"] - 1) * (u - u.min()) / (u.max() - u.min())
    sizes = rng.integers(50, 101, s["clients"]).astype(float)
    made = QuadraticClients(H, rng.standard_normal(shape), sizes)
    z = torch.from_numpy(made.discrepancies(made.optimum()))
    least = weights.full_support(z, torch.from_numpy(sizes)).max()
    return QuadraticClients(H, made.centres, sizes, s["lam"] * float(least))


def known_constants(s: Quadratics) -> Constants:
    """Return what the prescribed rates need to know."""
    return Constants(s["clients"], s["local_steps"], 1.0, s["kappa"])


def orders(seed: int, N: int, kind: str) -> Iterator[np.ndarray]:
    """Yield for every epoch who hosts each model in each of its rounds, ``[N rounds, N models]``.

    The order of the library, the same in all epochs, or hosts drawn with replacement.
    """
    epoch, rng = 0, stream(seed, "replacement")
    while True:
        if kind == "replacement":
            yield rng.integers(0, N, (N, N))
        else:
            (first,) = schedule([seed], N, N * (epoch if kind == "random" else 0))
            yield np.stack([np.roll(first, -j) for j in range(N)])
        epoch += 1


def steps(H: np.ndarray, rate: np.ndarray | float, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what K steps ``u ← u − rate (H u + noise)`` are: ``u ← shrink u + spread noise``.

    A sum of K Gaussian noises, each shrunk by the steps after it, is one Gaussian noise.
    """
    q = 1 - rate * H
    return q**K, rate * np.sqrt(sum(q ** (2 * k) for k in range(K)))


def epoch(
    p: QuadraticClients, v: np.ndarray, A: np.ndarray, hosts: np.ndarray, lr: float, K: int,
    noise: Callable[[], np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return models ``[copies, N, d]`` after an epoch of Algorithm 1.

    ``A`` is ``[N, N]``, or one a copy; ``hosts[j, i]`` hosts model i in round j.
    """
    models = np.arange(len(p.sizes))
    rate = lr * len(models) * A[..., models, hosts][..., None]
    shrink, spread = steps(p.curvatures[hosts], rate, K)
    for j, host in enumerate(hosts):
        c = p.centres[host]
        v = c + shrink[..., j, :, :] * (v - c)
        v = v if noise is None else v + spread[..., j, :, :] * noise()
    return v


def samples(rng: np.random.Generator, p: QuadraticClients, K: int, variance: float) -> np.ndarray:
    """Return how the gradients of each client's K samples differ from their mean, ``[N, K, d]``.

    Over a client's samples they sum to zero, and their mean squared norm is ``variance``.
    """
    e = rng.standard_normal((len(p.sizes), K, p.centres.shape[1]))
    e -= e.mean(1, keepdims=True)
    return e * np.sqrt(variance / (e**2).sum(2).mean(1))[:, None, None]


def walked(
    p: QuadraticClients, v: np.ndarray, A: np.ndarray, hosts: np.ndarray, lr: float, e: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Return models ``[copies, N, d]`` after an epoch whose visits walk through samples.

    ``e`` is ``[N, K, d]``, see :func:`samples`; each visit takes its host's K samples in an order
    of its own.
    """
    models = np.arange(len(p.sizes))
    rate = lr * len(models) * A[models, hosts][..., None]
    for a, host in zip(rate, hosts, strict=True):
        every = np.broadcast_to(np.arange(e.shape[1]), (*v.shape[:2], e.shape[1]))
        order = rng.permuted(every, axis=2)
        for k in np.moveaxis(order, 2, 0):
            v = v - a * (p.curvatures[host] * (v - p.centres[host]) + e[host, k])
    return v


def closing(p: QuadraticClients, v: np.ndarray, A: np.ndarray, L: float) -> np.ndarray:
    """Return models after the closing step of size 1/L on each model's own objective."""
    return v - A @ p.curvatures * (v - p.minimiser(A)) / L


def quadratic_sgd(
    p: QuadraticClients, w: np.ndarray, rounds: int, K: int, lr: float,
    noise: Callable[[], np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the global models ``[copies, d]`` after rounds of local SGD with everybody."""
    shrink, spread = steps(p.curvatures, lr, K)
    for _ in range(rounds):
        v = p.centres + shrink * (w[:, None] - p.centres)
        w = (v if noise is None else v + spread * noise()).mean(1)
    return w


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], variance: float):
    """Return a function that draws noise with this mean squared norm; None without noise."""
    if not variance:
        return None
    scale = (variance / shape[-1]) ** 0.5
    return lambda: scale * rng.standard_normal(shape)


def check_runs(s: Quadratics) -> None:
    """Refuse an experiment with a run that cannot be carried out, before the first one is.

    Raises
    ------
    FedlibError
        With the run, what came, and what is expected.
    """
    for run in s["runs"]:
        r, where = {**s, **run}, f"Run '{run['run']}':"
        check_known(r, order=ORDERS, stages=(1, 2), rate_of=(1, 2))
        if r["clients"] < 2:
            raise FedlibError(f"{where} two clients or more can differ; got {r['clients']}.")
        if r["kappa"] < 1:
            raise FedlibError(f"{where} kappa = L/mu is 1 or more; got {r['kappa']}.")
        if not r["rounds_grid"]:
            raise FedlibError(f"{where} rounds_grid is empty. Give at least one number of rounds.")


def _study(job: Job, measure: Callable) -> Outcome:
    """Measure every run at every length for every seed; a measure returns values by metric."""
    check_runs(job.settings)
    rows, s = [], job.settings
    for run in tqdm(s["runs"], disable=not job.progress):
        r = {**s, **run}
        for seed in job.seeds:
            p = draw_clients(seed, r)
            for R in r["rounds_grid"]:
                base = dict(run=run["run"], seed=seed, round=R, split="train")
                rows += measured(base, measure(r, p, seed, R))
    return Outcome(pd.DataFrame(rows), {}, {})


def rates_of_weights(job: Job[Quadratics]) -> Outcome:
    """Measure the squared errors of w and of the weights after R rounds of Algorithm 3."""
    return _study(job, _weights)


def _weights(s: Quadratics, p: QuadraticClients, seed: int, R: int) -> dict[str, float]:
    c, (N, d) = known_constants(s), p.centres.shape
    draw = gaussian(stream(seed, "weights", R), (s["copies"], N, d), s["noise"])
    lr, start = theory.local_rate(c, R), np.zeros((s["copies"], d))
    w = quadratic_sgd(p, start, R, s["local_steps"], lr, draw)
    best, log = p.optimum(), np.log(R * s["local_steps"])
    off = ((p.weights(w) - p.weights(best)) ** 2).sum(-1).mean()
    away = ((w - best) ** 2).sum(-1).mean()
    return {"model error": away, "weights error": off, "weights error by log": off / log}


def rates_of_models(job: Job[Models]) -> Outcome:
    """Measure how far personal models are from the best after R epochs, for given weights."""
    return _study(job, _models)


def _models(s: Models, p: QuadraticClients, seed: int, R: int) -> dict[str, float]:
    c, (N, d) = known_constants(s), p.centres.shape
    A, copies = p.weights(p.optimum()), s["copies"] if s["noise"] else 1
    draw = gaussian(stream(seed, "models", R), (copies, N, d), s["noise"])
    v, lr, visits = np.zeros((copies, N, d)), theory.visit_rate(c, R), orders(seed, N, s["order"])
    rng = stream(seed, "walks", R)
    e = samples(rng, p, s["local_steps"], s["noise"]) if s.get("walk") else None
    for _ in range(R):
        hosts = next(visits)
        if e is None:
            v = epoch(p, v, A, hosts, lr, s["local_steps"], draw)
        else:
            v = walked(p, v, A, hosts, lr, e, rng)
    excess = p.excess(A, closing(p, v, A, c.L)).mean()
    log = theory.log_factor(c, R)
    return {"excess": excess, "excess by Λ": excess / log, "excess by Λ²": excess / log**2}


def single_loop(job: Job[SingleLoop]) -> Outcome:
    """Measure how far models are from the best after R epochs, when the weights are learned too."""
    return _study(job, _loop)


def _loop(s: SingleLoop, p: QuadraticClients, seed: int, R: int) -> dict[str, float]:
    c, (N, d), K, copies = known_constants(s), p.centres.shape, s["local_steps"], s["copies"]
    variance = s["global_noise"] / s["global_batch"]
    draw = gaussian(stream(seed, "global", R), (copies, N, d), variance)
    visit = gaussian(stream(seed, "visits", R), (copies, N, d), s["noise"])
    w, v, visits = np.zeros((copies, d)), np.zeros((copies, N, d)), orders(seed, N, "random")
    A = np.full((copies, N, N), 1 / N)
    if s["stages"] == 2:
        A = p.weights(quadratic_sgd(p, w, R, K, theory.local_rate(c, R), draw))
    rate = (theory.visit_rate_single, theory.visit_rate)[s.get("rate_of", s["stages"]) - 1]
    lr = rate(c, R)
    for _ in range(R):
        v = epoch(p, v, A, next(visits), lr, K, visit)
        if s["stages"] == 1:
            w = quadratic_sgd(p, w, 1, 1, theory.global_rate(c, R), draw)
            A = p.weights(w)
    best = p.weights(p.optimum())
    excess = p.excess(best, closing(p, v, A, c.L)).mean()
    off = ((A - best) ** 2).sum(-1).mean()
    return {"excess": excess, "log excess": np.log(excess), "weights error": off}
