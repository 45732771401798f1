"""Clients with data of their own: how rows are dealt out, and which of them are kept for judging.

Every client holds some rows for training and some that only judge its model. Nothing else is held
out, so what is measured is how well each client is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired

import numpy as np
import torch
from torch import Tensor

from fedlib import datasets
from fedlib.engine.checks import check_between, check_whole_number
from fedlib.engine.data import Batch
from fedlib.engine.losses import tally, values
from fedlib.engine.rng import stream
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown
from fedlib.lab.job import Settings
from fedlib.lab.studies.shared import pool_pixels
from fedlib.schema import NonNegativeFloat, PositiveFloat, PositiveInt

CLIENT_SPLITS = ("halves", "random", "classes", "owners")
SPLIT_NEEDS = {"halves": ["features"], "classes": ["dataset", "classes"]}  # else a data set


class People(Settings):
    """Who holds what."""

    split: str  # halves: the paper's synthetic task, made anew for each seed; random; classes:
    # each client has rows of so many classes; owners: of a set whose rows have owners
    clients: PositiveInt
    samples: PositiveInt  # of each client, judging ones included
    judging: PositiveFloat  # share of them
    dataset: NotRequired[str]
    pool: NotRequired[PositiveInt]  # side of the square blocks of pixels that are averaged
    classes: NotRequired[PositiveInt]  # of each client
    features: NotRequired[PositiveInt]  # of the synthetic task
    balanced: NotRequired[bool]  # draw its direction so that both classes are equally likely
    angle: NotRequired[NonNegativeFloat]  # between the halves' directions, in degrees; 180


@dataclass(frozen=True)
class Population:
    """All rows, and whose they are.

    Attributes
    ----------
    x, y
        Features and labels of all rows.
    train, judging
        For each seed the rows of every client: to learn from, and to be judged by.
    groups
        For each seed a number for every client, the same where they are of one kind; -1 where
        that is not known.
    hashes
        Of the data set; none where rows are drawn anew for each seed.
    """

    x: Tensor
    y: np.ndarray
    train: dict[int, list[np.ndarray]]
    judging: dict[int, list[np.ndarray]]
    groups: dict[int, np.ndarray]
    hashes: dict[str, str]


def people(s: People, seeds: Sequence[int]) -> Population:
    """Deal rows out to clients, anew for each seed."""
    check_people(s)
    if s["split"] == "halves":
        return _two_halves(s, seeds)
    data = datasets.load(s["dataset"], progress=False)
    x = pool_pixels(np.concatenate([data.train_x, data.test_x]), s.get("pool", 1))
    y = np.concatenate([data.train_y, data.test_y])
    dealt = {seed: _deal(data, s, seed) for seed in seeds}
    used = {**data.hashes, "as used": datasets.fingerprint(x, y)}
    train, judging, groups = ({n: d[k] for n, d in dealt.items()} for k in range(3))
    return Population(x, y, train, judging, groups, used)


def check_people(s: People) -> None:
    """Refuse what no rows can be dealt by: an unknown split, what it lacks, a share that is none.

    Raises
    ------
    FedlibError
        With what came, and what is expected.
    """
    if s["split"] not in CLIENT_SPLITS:
        raise unknown("split", s["split"], CLIENT_SPLITS)
    if missing := [key for key in SPLIT_NEEDS.get(s["split"], ["dataset"]) if key not in s]:
        raise FedlibError(f"The split '{s['split']}' needs {' and '.join(missing)}. Set it.")
    if not 0 < s["judging"] < 1:
        raise FedlibError(
            f"judging is the share of each client's samples that judges its model, above 0 and "
            f"below 1; got {s['judging']}."
        )
    learned = round(s["samples"] * (1 - s["judging"]))
    if s["split"] != "owners" and not 2 <= learned < s["samples"]:
        raise FedlibError(
            f"A client has too few samples: of {s['samples']}, judging = {s['judging']} leaves "
            f"{learned} to learn from and {s['samples'] - learned} to be judged by; two and one "
            "are the least. Use more samples, or another share."
        )
    if s["split"] == "halves" and s["clients"] < 2:
        raise FedlibError(f"Two halves have two clients or more; got clients = {s['clients']}.")
    if s["split"] != "halves":
        datasets.card(s["dataset"])


def _deal(
    data: datasets.Dataset, s: People, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Return rows to learn from and to be judged by, and who is of one kind."""
    rng, N, count = stream(seed, "people"), s["clients"], s["samples"]
    if s["split"] == "owners":
        owners = datasets.owners(data)
        who = rng.permutation(len(owners.names))[:N]
        if len(who) < N:
            raise FedlibError(f"{N} clients, and rows of {len(who)} owners.")
        train = [rng.permutation(owners.train_parts[n])[:count] for n in who]
        judging = [owners.test_parts[n] + len(data.train_y) for n in who]
        return train, judging, owners.traits.get("family", np.full(len(owners.names), -1))[who]
    if s["split"] == "random" and N * count > len(data.train_y):
        raise FedlibError(
            f"{N} clients with {count} samples each take {N * count} rows; '{s['dataset']}' has "
            f"{len(data.train_y)}. Take fewer clients, or fewer samples."
        )
    if s["split"] == "random":
        rows = rng.permutation(len(data.train_y))[: N * count].reshape(N, -1)
        return *_held_out(rows, s["judging"]), np.zeros(N, dtype=int)
    classes, each = len(np.unique(data.train_y)), s["classes"]
    order = np.concatenate([rng.permutation(classes) for _ in range(-(-N * each // classes))])
    mine = order[: N * each].reshape(N, each)  # every class as often as can be
    if any(len(set(some)) < each for some in mine):
        raise FedlibError(
            f"With {each} of {classes} classes a client, some client would have one class twice. "
            "Take a number of classes that divides all of them."
        )
    pools = {c: list(rng.permutation(np.flatnonzero(data.train_y == c))) for c in range(classes)}
    rows = []
    for some in mine:
        taken = [np.array(pools[c][: count // each], dtype=int) for c in some]
        for c in some:
            del pools[c][: count // each]
        rows.append(rng.permutation(np.concatenate(taken)))
    groups = mine[:, 0] if each == 1 else np.full(N, -1)
    return *_held_out(rows, s["judging"]), groups


def _held_out(
    rows: Sequence[np.ndarray], share: float
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Cut every client's rows, which come in no order, into those to learn from and the rest."""
    cuts = [round(len(part) * (1 - share)) for part in rows]
    if short := [n for n, (part, cut) in enumerate(zip(rows, cuts, strict=True))
                 if not 2 <= cut < len(part)]:  # fmt: skip
        raise FedlibError(
            f"Clients {short[:5]} have too few samples: client {short[0]} has "
            f"{len(rows[short[0]])}, {cuts[short[0]]} of them to learn from; two to learn from and "
            "one to be judged by are the least. Use more samples, fewer clients, or another share."
        )
    pieces = [np.split(part, [cut]) for part, cut in zip(rows, cuts, strict=True)]
    return [a for a, _ in pieces], [b for _, b in pieces]


def _two_halves(s: People, seeds: Sequence[int]) -> Population:
    N, count, d = s["clients"], s["samples"], s["features"]
    balanced, angle = s.get("balanced", False), s.get("angle", 180.0)
    drawn = [two_halves(seed, N, count, d, balanced, angle) for seed in seeds]
    x, y = (np.concatenate(part) for part in zip(*drawn, strict=True))
    rows = np.arange(len(y)).reshape(len(seeds), N, count)
    parts = {n: _held_out(list(r), s["judging"]) for n, r in zip(seeds, rows, strict=True)}
    groups = dict.fromkeys(seeds, np.arange(N) * 2 // N)
    train, judging = ({seed: part[i] for seed, part in parts.items()} for i in range(2))
    return Population(torch.from_numpy(x.astype(np.float32)), y, train, judging, groups, {})


def two_halves(
    seed: int,
    clients: int,
    samples: int,
    features: int,
    balanced: bool = False,
    angle: float = 180.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw the synthetic task of Figure 1: two halves of clients with opposite labels.

    ``x ~ N(±0.2 · 1, Σ)`` and ``y = sign(±wᵀx)`` with the same sign, ``Σ_kk = k^{-1.2}``, and one
    ``w ~ N(0.1 · 1, I)`` for all. What the paper leaves open, the law of w, is ours.

    Parameters
    ----------
    balanced
        Take from w its part along the mean of x, so that both classes are equally likely.
    angle
        Turn the second half's direction by so many degrees from w; at 180 it is ``−w``, as in the
        paper, and at 0 both halves have the same labels.

    Returns
    -------
    numpy.ndarray, numpy.ndarray
        Features ``[clients * samples, features]``, client after client, and labels 0 and 1.
    """
    check_whole_number("clients", clients)
    check_whole_number("samples", samples)
    check_whole_number("features", features)
    check_between("angle", angle, -360, 360)
    if features < 2 + balanced:
        raise FedlibError(
            f"{features} features leave no second direction to turn to. Take {2 + balanced} or more"
            f"{', as balanced takes one away' * balanced}."
        )
    rng = stream(seed, "two halves")
    w = rng.normal(0.1, 1, features)
    w = w - w.mean() if balanced else w
    sign = np.where(np.arange(clients) * 2 < clients, 1.0, -1.0)[:, None, None]
    spread = np.arange(1, features + 1) ** -0.6  # the root of Σ
    x = 0.2 * sign + spread * rng.standard_normal((clients, samples, features))
    aside = rng.normal(0, 1, features)
    aside -= aside.mean() if balanced else 0.0
    aside -= (aside @ w) / (w @ w) * w
    aside *= np.linalg.norm(w) / np.linalg.norm(aside)
    turned = np.cos(np.radians(angle)) * w + np.sin(np.radians(angle)) * aside
    score = np.where(sign[..., 0] > 0, x @ w, x @ turned)
    return x.reshape(-1, features), (score > 0).astype(np.int64).ravel()


class Judges:
    """Rows of each client's own, on which its model is judged.

    Parameters
    ----------
    parts
        For each seed the rows of every client.
    seeds
        One a run.
    """

    def __init__(self, parts: Mapping[int, Sequence[np.ndarray]], seeds: Sequence[int]) -> None:
        if missing := [seed for seed in seeds if seed not in parts]:
            raise FedlibError(f"There are no rows for seeds {missing}; there are for {[*parts]}.")
        each = [part for seed in seeds for part in parts[seed]]
        sizes = np.array([len(part) for part in each])
        if not sizes.all():
            raise FedlibError(
                f"Client {int(np.argmin(sizes)) % len(parts[seeds[0]])} has no rows to be judged "
                "by. Give each at least one."
            )
        mask = np.arange(sizes.max()) < sizes[:, None]
        rows = np.zeros(mask.shape, dtype=np.int64)
        rows[mask] = np.concatenate(each)
        self.rows, self.mask = torch.from_numpy(rows), torch.from_numpy(mask).double()

    @torch.no_grad()
    def __call__(self, task: Task, theta: Tensor) -> dict[str, Tensor]:
        """Return every client's metrics under its own model, ``[R, N]`` each in float64.

        Parameters
        ----------
        theta
            Personal models ``[R, N, P]``.
        """
        copies, device = theta.flatten(0, 1), theta.device
        step = max(1, task.chunk // (self.rows.shape[1] * task.data.x[0].numel()))
        results = []
        pieces = (a.split(step) for a in (copies, self.rows.to(device), self.mask.to(device)))
        for some, rows, mask in zip(*pieces, strict=True):
            x, y = task.features(Batch(rows))
            sums = tally(task.loss_name, task.model.apply(some, x), y, mask)
            results.append({k: v.cpu() for k, v in values(sums, mask.sum(1)).items()})
        return {
            name: torch.cat([one[name] for one in results]).view(theta.shape[:2])
            for name in results[0]
        }
