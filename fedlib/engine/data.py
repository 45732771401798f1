"""Federated data: samples once, and for each client a list of the rows that are its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import (
    check_device,
    check_flag,
    check_whole_number,
    checked_parts,
    checked_seeds,
)
from fedlib.engine.draws import Array, upload
from fedlib.engine.rng import GOLDEN, scrambled, stream
from fedlib.errors import FedlibError


@dataclass(frozen=True)
class Batch:
    """One batch a copy: row numbers into the data, and how much each row counts.

    Attributes
    ----------
    rows
        ``[copies, B]`` row numbers.
    weight
        ``[copies, B]``, each row summing to one, or None for the plain mean. Full local
        batches of unequal size are padded with weight zero.
    jitter
        ``[copies, 3]`` (vertical shift, horizontal shift, flip) for image augmentation, one
        crop and one flip shared by a batch, or None.
    visits
        ``[copies, 3]``: the seed, the client and a number that counts the client's minibatches;
        what dropout draws from. None where nobody says; dropout then refuses.
    padded
        Whether weights are zero somewhere; None lets who needs it look.
    """

    rows: Tensor
    weight: Tensor | None = None
    jitter: Tensor | None = None
    visits: Tensor | Sequence[tuple[int, int, int]] | None = None
    padded: bool | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return each copy's mean ``[copies]`` of one value a row, ``[copies, B]``."""
        if self.weight is None:
            return values.mean(1)
        return (values * self.weight.to(values.dtype)).sum(1)

    def keys(self) -> Tensor:
        """Return the key of each copy's dropout, ``[copies]``, a scrambling of its visit."""
        if self.visits is None:
            raise FedlibError(
                "This model has dropout, and the batch does not say whose it is. Draw batches with "
                "next_batches, or give visits, a (seed, client, number) a copy. Exact gradients "
                "do not exist with dropout."
            )
        seed, client, number = torch.as_tensor(self.visits, device=self.rows.device).unbind(1)
        key = scrambled(seed + GOLDEN)
        for part in (client, number):
            key = scrambled(key + part + GOLDEN)
        return key


@dataclass(frozen=True)
class Reading(Generic[Array]):
    """The batches of several steps: arrays as they are drawn on the host, tensors once uploaded.

    Attributes
    ----------
    rows
        ``[steps, copies, B]``, or ``[copies, B]`` where all steps read the same.
    weight
        As in :class:`Batch`, the same in all steps.
    jitter
        ``[steps, copies, 3]`` or None.
    visits
        ``[steps, copies, 3]``.
    padded
        As in :class:`Batch`.
    """

    rows: Array
    weight: Array | None
    jitter: Array | None
    visits: Array
    padded: bool

    def batches(self: Reading[Tensor], dtype: torch.dtype) -> list[Batch]:
        """Return a batch for each step, weights in some type."""
        weight = None if self.weight is None else self.weight.to(dtype)
        each = [self.rows] * len(self.visits) if self.rows.dim() == 2 else self.rows
        jitter = [None] * len(self.visits) if self.jitter is None else self.jitter
        return [
            Batch(rows, weight, shake, visits, self.padded)
            for rows, shake, visits in zip(each, jitter, self.visits, strict=True)
        ]


class Orders:
    """The orders in which clients read their samples; those used last are kept, up to a size.

    Parameters
    ----------
    most
        Bytes to keep.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._kept: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()

    def of(self, seed: int, client: int, number: int, size: int) -> np.ndarray:
        """Return the order in which a client reads its own samples in pass ``number``."""
        key = (seed, client, number, size)
        order = self._kept.pop(key, None)
        if order is None:
            order = stream(seed, "data", client, number).permutation(size)
            self.bytes += order.nbytes + OVERHEAD
        self._kept[key] = order
        while self.bytes > self.most:
            self.bytes -= self._kept.popitem(last=False)[1].nbytes + OVERHEAD
        return order


OVERHEAD = 500  # bytes of an array and its key beside the numbers
_orders = Orders(2**26)


class FederatedDataset:
    """Features and labels once, and a list of row numbers for each client.

    Build one with :meth:`build`. ``parts[n]`` are the rows of client ``n``. The test split stays
    apart and belongs to nobody, unless ``test_parts[n]`` give its rows to clients. Each seed may
    have a split of its own, see :meth:`with_splits`.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        parts: list[np.ndarray],
        test_x: Tensor | None,
        test_y: Tensor | None,
        augment: bool = False,
        test_parts: list[np.ndarray] | None = None,
    ) -> None:
        self.x, self.y, self.test_x, self.test_y = x, y, test_x, test_y
        self.test_parts = test_parts
        self.augment, self.N = augment, len(parts)
        self.splits: dict[int | None, list[np.ndarray]] = {None: parts}

    @classmethod
    def build(
        cls,
        x: np.ndarray | Tensor,
        y: np.ndarray | Tensor | None,
        parts: Sequence[np.ndarray],
        test_x: np.ndarray | Tensor | None = None,
        test_y: np.ndarray | Tensor | None = None,
        device: str | torch.device = "cpu",
        augment: bool = False,
        test_parts: Sequence[np.ndarray] | None = None,
        finite: bool = True,
    ) -> Self:
        """Place the data on a device and check the split, and that of the test rows if given.

        Parameters
        ----------
        x
            Features ``[n, ...]``: real, or whole numbers for models that begin with an embedding.
        y
            Targets ``[n]``: classes in any type of whole numbers, or real values, ``[n, K]`` for
            K outputs. None means no target, which is a target of zero: the loss of residual
            models such as :func:`~fedlib.engine.models.location` is the half square itself.
        parts
            Row numbers, one array a client.
        test_x, test_y
            The test split.
        device
            Where the data will lie.
        augment
            Shift and flip images ``[n, C, H, W]`` at random in training.
        test_parts
            Row numbers of the test split, one array a client, where clients hold their own.
        finite
            Refuse features and targets that are nan or infinite.

        Raises
        ------
        FedlibError
            When features or targets are no numbers, not finite, or differ in length, a client has
            no samples, a row number is no whole number, out of range or given twice, or
            ``test_parts`` are for another number of clients.
        """
        if test_y is not None and test_x is None:
            raise FedlibError("test_y came without test_x. Give both, or neither.")
        if test_x is not None and (y is None) != (test_y is None):
            raise FedlibError("The test targets and y are both given, or both None: no target.")
        check_device(device)
        check_flag("augment", augment)
        x, y = pair(x, y, device, "train", finite)
        parts = _one_owner_each(parts, len(x))
        if augment and x.dim() != 4:
            raise FedlibError(f"augment is for images [n, C, H, W]; the features are {[*x.shape]}.")
        if test_parts is not None:
            if test_x is None:
                raise FedlibError("test_parts give rows of test_x to clients. Give test_x, too.")
            test_parts = _one_owner_each(test_parts, len(test_x))
            if len(test_parts) != len(parts):
                raise FedlibError(
                    f"test_parts are for {len(test_parts)} clients, parts for {len(parts)}."
                )
        if test_x is None:
            return cls(x, y, parts, None, None, augment)
        test_x, test_y = pair(test_x, test_y, device, "test", finite)
        check_alike(x, test_x, "test features")
        return cls(x, y, parts, test_x, test_y, augment, test_parts)

    @property
    def parts(self) -> list[np.ndarray]:
        """Rows of every client.

        Raises
        ------
        FedlibError
            Where each seed has a split of its own.
        """
        return self._parts(None)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of every client, ``[N]``."""
        return np.array([len(part) for part in self.parts])

    def with_splits(self, splits: Mapping[int, Sequence[np.ndarray]]) -> Self:
        """Return the same data, dealt out to as many clients in another way for each seed.

        Parameters
        ----------
        splits
            For each seed, row numbers of every client.

        Raises
        ------
        FedlibError
            As :meth:`build`, also where seeds have other numbers of clients, or clients hold test
            samples.
        """
        data = copy.copy(self)
        data.splits = {int(n): _one_owner_each(parts, len(self.x)) for n, parts in splits.items()}
        if not splits or any(len(parts) != self.N for parts in data.splits.values()):
            raise FedlibError(
                f"Splits for seeds need {self.N} clients each; got "
                f"{ {n: len(parts) for n, parts in data.splits.items()} }."
            )
        if self.test_parts is not None:
            raise FedlibError("Clients hold test samples, which would stay where they are.")
        return data

    def of(self, seed: int) -> Self:
        """Return the same data with the split of one seed, or the only one."""
        data = copy.copy(self)
        data.splits = {None: self._parts(seed)}
        return data

    def _parts(self, seed: int | None) -> list[np.ndarray]:
        if None in self.splits:
            return self.splits[None]
        if seed not in self.splits:
            asked = "none was named" if seed is None else f"seed {seed} has none"
            raise FedlibError(
                f"Each seed has a split of its own here, and {asked}. Seeds with one: "
                f"{', '.join(map(str, self.splits))}; data.of(seed) are the data of one."
            )
        return self.splits[seed]

    def next_batches(
        self,
        seeds: Sequence[int],
        clients: Tensor,
        cursor: np.ndarray,
        steps: int,
        batch_size: int | None,
        q: Tensor | None = None,
    ) -> tuple[list[Batch], np.ndarray]:
        """Draw the next ``steps`` minibatches of every chosen client.

        Each client walks through its samples in a shuffled order that goes on over the rounds.
        An incomplete last batch is dropped and the samples are reshuffled, as in the
        participation paper's official code. A client chosen twice in a round gets the next
        minibatches the second time.

        Parameters
        ----------
        seeds
            One seed a run, ``R`` of them.
        clients
            ``[R, S]`` client numbers.
        cursor
            ``[R, N]`` minibatches that each client has used so far.
        steps
            Number of minibatches a client.
        batch_size
            Samples in a minibatch; None means all of the client's samples in each step.
        q
            Weights ``[R, S]`` of the cohort. A client at weight zero fills up a short row: it reads
            something, and its cursor stays. None means that all take part.

        Returns
        -------
        list of Batch, numpy.ndarray
            ``steps`` batches for ``R * S`` copies, and the new cursor.
        """
        part = None if q is None else np.asarray(q.cpu()) > 0
        cohort = np.asarray(torch.as_tensor(clients).cpu())
        self.check_visits(seeds, cohort, cursor, steps, batch_size, part)
        reading, cursor = self.read(seeds, cohort, cursor, steps, batch_size, part)
        return upload([reading], self.x.device)[0].batches(self.dtype), cursor

    def check_visits(
        self,
        seeds: Sequence[int],
        clients: np.ndarray,
        cursor: np.ndarray,
        steps: int,
        batch_size: int | None,
        part: np.ndarray | None,
    ) -> None:
        """Refuse what :meth:`next_batches` cannot draw from."""
        check_whole_number("steps", steps)
        if batch_size is not None:
            check_whole_number("batch_size", batch_size)
        runs, shape = len(checked_seeds(seeds)), clients.shape
        if len(shape) != 2 or shape[0] != runs or part is not None and part.shape != shape:
            raise FedlibError(
                f"clients are {[*shape]}, and q {None if part is None else [*part.shape]}, for "
                f"{runs} seeds. Expected [{runs}, S] each."
            )
        check_clients(clients, self.N)
        if cursor.shape != (runs, self.N):
            raise FedlibError(f"cursor is {[*cursor.shape]}. Expected [{runs}, {self.N}].")

    def read(
        self,
        seeds: Sequence[int],
        clients: np.ndarray,
        cursor: np.ndarray,
        steps: int,
        batch_size: int | None,
        part: np.ndarray | None = None,
    ) -> tuple[Reading[np.ndarray], np.ndarray]:
        """Draw what :meth:`next_batches` returns, on the host; ``part[R, S]`` says who counts."""
        cursor, start = cursor.copy(), np.empty(clients.shape, dtype=np.int64)
        for visit, n in np.ndenumerate(clients):
            start[visit] = cursor[visit[0], n]
            if part is None or part[visit]:
                cursor[visit[0], n] += steps
        whose = np.broadcast_arrays(np.array(seeds)[:, None], clients, start)
        first = np.stack(whose, 2).reshape(-1, 3)
        visits = first + np.arange(steps)[:, None, None] * (0, 0, 1)  # [steps, copies, 3]
        jitter = np.array([_jitter(step) for step in visits]) if self.augment else None
        if batch_size is None:
            rows, weight = padded([self._parts(n)[k] for n, k, _ in first.tolist()])
            return Reading(rows, weight, jitter, visits, bool((weight == 0).any())), cursor
        each = [self._walk(n, k, start, steps, batch_size) for n, k, start in first.tolist()]
        return Reading(np.stack(each, 1), None, jitter, visits, False), cursor

    def _walk(self, seed: int, client: int, start: int, steps: int, batch_size: int) -> np.ndarray:
        """Return rows ``[steps, batch_size]`` of a client, ``start`` minibatches into its walk."""
        rows = self._parts(seed)[client]
        if len(rows) < batch_size:
            raise FedlibError(
                f"Client {client} has {len(rows)} samples, fewer than a minibatch of {batch_size}. "
                "Use a smaller batch_size, fewer clients, or batch_size=None for full batches."
            )
        per_pass, samples = len(rows) // batch_size, steps * batch_size
        first, last = start // per_pass, (start + steps - 1) // per_pass
        passes = [_orders.of(seed, client, i, len(rows)) for i in range(first, last + 1)]
        order = np.concatenate([one[: per_pass * batch_size] for one in passes])
        skip = (start - first * per_pass) * batch_size
        return rows[order[skip : skip + samples]].reshape(steps, batch_size)

    def full_batch(self, clients: Tensor | Sequence[int] | None = None) -> Batch:
        """Return every sample of each given client (default: all), padded with weight zero."""
        numbers = (
            np.arange(self.N) if clients is None else np.asarray(torch.as_tensor(clients).cpu())
        )
        check_clients(numbers, self.N)
        arrays = padded([self.parts[n] for n in numbers])
        rows, weight = (torch.from_numpy(part).to(self.x.device) for part in arrays)
        return Batch(rows, weight.to(self.dtype))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the features, or float64 where they are whole numbers."""
        return self.x.dtype if self.x.is_floating_point() else torch.double

    def to(self, device: str | torch.device) -> Self:
        """Return the same data on a device."""
        check_device(device)
        moved = copy.copy(self)
        for name in ("x", "y", "test_x", "test_y"):
            tensor = getattr(self, name)
            setattr(moved, name, None if tensor is None else tensor.to(device))
        return moved


def check_clients(clients: np.ndarray, N: int) -> None:
    """Refuse what are no numbers of clients."""
    whole = clients.ndim and clients.size and clients.dtype.kind in "iu"
    if not whole or clients.min() < 0 or clients.max() >= N:
        raise FedlibError(f"Clients are a list of numbers from 0 to {N - 1}; got {clients}.")


def padded(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all rows of every client and their weights, both ``[copies, longest]``."""
    sizes = np.array([len(part) for part in parts])
    filled = np.arange(sizes.max()) < sizes[:, None]
    rows = np.zeros(filled.shape, dtype=np.int64)
    rows[filled] = np.concatenate(parts)
    return rows, filled / sizes[:, None]


def _one_owner_each(parts: Sequence[np.ndarray], rows: int) -> list[np.ndarray]:
    """Return a split, having refused clients without a sample and samples of two clients."""
    parts = checked_parts(parts, rows)
    if empty := [n for n, part in enumerate(parts) if not len(part)]:
        raise FedlibError(f"Clients {empty[:5]} have no samples. Use fewer clients.")
    used = np.concatenate(parts)
    if len(np.unique(used)) != len(used):
        raise FedlibError(
            f"Row {np.sort(used)[1:][np.diff(np.sort(used)) == 0][0]} is given twice. A sample "
            "belongs to one client."
        )
    return parts


def features(x: Any, device: Any, what: str, finite: bool = True) -> Tensor:
    """Return features on the device, having refused what are no finite numbers, one row a sample.

    Raises
    ------
    FedlibError
        Also when there is no sample.
    """
    x = _numbers(x, device, what)
    if finite:
        check_finite(x, what)
    if not len(x):
        raise FedlibError(f"The {what} hold no sample.")
    return x


def check_alike(x: Tensor, other: Tensor, what: str) -> None:
    """Refuse features of another shape or type than those of the training split."""
    if (x.shape[1:], x.dtype) != (other.shape[1:], other.dtype):
        raise FedlibError(
            f"The {what} are {[*other.shape[1:]]} of {other.dtype} a sample, those of training "
            f"{[*x.shape[1:]]} of {x.dtype}. Give both one shape and type."
        )


def pair(x: Any, y: Any, device: Any, split: str, finite: bool) -> tuple[Tensor, Tensor]:
    """Return features and targets of one split on the device; whole numbers become int64."""
    x = features(x, device, f"{split} features", finite)
    if y is None:
        real = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return x, torch.zeros(len(x), dtype=real, device=device)
    y = as_targets(y, device, split)
    if finite:
        check_finite(y, f"{split} targets")
    if len(y) != len(x):
        raise FedlibError(f"{len(x)} {split} samples and {len(y)} targets: one each is needed.")
    return x, y


def check_finite(values: Tensor, what: str) -> None:
    """Refuse nan and infinity, saying how many there are and where the first one is."""
    if values.is_floating_point() and not (good := torch.isfinite(values)).all():
        bad = (~good).nonzero()
        raise FedlibError(
            f"{len(bad)} of the {what} are nan or infinite, the first at {bad[0].tolist()}. Fill "
            "or drop them, or say finite=False."
        )


def as_targets(y: Any, device: str | torch.device, split: str = "train") -> Tensor:
    """Return targets on the device, whole numbers of any type as int64.

    Raises
    ------
    FedlibError
        When they are no numbers.
    """
    y = _numbers(y, device, f"{split} targets")
    return y if y.is_floating_point() else y.long()


def _numbers(values: Any, device: Any, what: str) -> Tensor:
    try:
        if np.ma.is_masked(values):
            raise TypeError("masked")
        by_place = values.to_numpy(copy=True) if hasattr(values, "to_numpy") else values
        tensor = torch.as_tensor(by_place, device=device)
        if tensor.is_complex() or not tensor.dim():
            raise TypeError("complex, or a single number")
        return tensor
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(values).__name__} {getattr(values, 'dtype', '')}".strip()
        raise FedlibError(
            f"The {what} must be an array of numbers; got {kind}"
            f"{', a view in reverse order: take a copy' * _is_reversed(values)}. Labels that are "
            "words: y = np.unique(words, return_inverse=True)[1]. A table: "
            "fedlib.datasets.from_frame."
        ) from error


def _is_reversed(values: Any) -> bool:
    """Say whether an array is a view with steps below zero, which tensors cannot have."""
    return any(step < 0 for step in getattr(values, "strides", ()))


def _jitter(visits: np.ndarray) -> np.ndarray:
    """Draw (down, right, flip) once a visit, ``[copies, 3]``."""
    draws = [
        stream(seed, "augment", client, number).integers(0, (9, 9, 2))
        for seed, client, number in visits.tolist()
    ]
    return np.stack(draws)
