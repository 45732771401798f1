"""Federated data: samples once, and for each client a list of the rows that are its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.rng import stream
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
        ``(seed, client, number)`` of each copy, the number counting the client's minibatches:
        what dropout draws from. None where nobody says; dropout then refuses.
    """

    rows: Tensor
    weight: Tensor | None = None
    jitter: Tensor | None = None
    visits: Sequence[tuple[int, int, int]] | None = None

    def keys(self) -> Tensor:
        """Return the key of each copy's dropout, ``[copies]``, from the stream ``"dropout"``."""
        if self.visits is None:
            raise FedlibError(
                "This model has dropout, and the batch does not say whose it is. Draw batches with "
                "next_batches, or give visits, a (seed, client, number) a copy. Exact gradients "
                "do not exist with dropout."
            )
        drawn = [stream(seed, "dropout", *keys).integers(2**63) for seed, *keys in self.visits]
        return torch.tensor(drawn, device=self.rows.device)


@functools.lru_cache(maxsize=200_000)
def _pass_order(seed: int, client: int, number: int, size: int) -> np.ndarray:
    """Return the order in which a client reads its own samples in pass ``number``."""
    return stream(seed, "data", client, number).permutation(size)


class FederatedDataset:
    """Features and labels once, and a list of row numbers for each client.

    Build one with :meth:`build`. ``parts[n]`` are the rows of client ``n``. The test split stays
    apart and belongs to nobody, unless ``test_parts[n]`` give its rows to clients.
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
        self.parts, self.augment = parts, augment
        self.N = len(parts)
        self.sizes = np.array([len(part) for part in parts])

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
    ) -> FederatedDataset:
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

        Raises
        ------
        FedlibError
            When features or targets are no numbers or differ in length, a client has no samples,
            a row number is out of range or given twice, or ``test_parts`` are for another number
            of clients.
        """
        x, y = _pair(x, y, device, "train")
        parts = _checked_parts(parts, len(x))
        if test_parts is not None:
            test_parts = _checked_parts(test_parts, 0 if test_x is None else len(test_x))
            if len(test_parts) != len(parts):
                raise FedlibError(
                    f"test_parts are for {len(test_parts)} clients, parts for {len(parts)}."
                )
        if test_x is not None:
            test_x, test_y = _pair(test_x, test_y, device, "test")
        return cls(x, y, parts, test_x, test_y, augment, test_parts)

    def next_batches(
        self,
        seeds: Sequence[int],
        clients: Tensor,
        cursor: np.ndarray,
        steps: int,
        batch_size: int | None,
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

        Returns
        -------
        list of Batch, numpy.ndarray
            ``steps`` batches for ``R * S`` copies, and the new cursor.
        """
        chosen, cursor = clients.cpu().numpy(), cursor.copy()
        start = np.empty(chosen.shape, dtype=np.int64)
        for visit, n in np.ndenumerate(chosen):
            start[visit] = cursor[visit[0], n]
            cursor[visit[0], n] += steps
        visits = [(int(seeds[r]), int(n), int(start[r, s])) for (r, s), n in np.ndenumerate(chosen)]
        if batch_size is None:
            full = self.full_batch(clients.reshape(-1))
            batches = [full] * steps
        else:
            rows = np.stack([self._walk(*visit, steps, batch_size) for visit in visits])
            batches = [Batch(row) for row in torch.from_numpy(rows).to(self.x.device).unbind(1)]
        return [
            replace(
                batch,
                jitter=_jitter(visits, i) if self.augment else None,
                visits=[(seed, n, k + i) for seed, n, k in visits],
            )
            for i, batch in enumerate(batches)
        ], cursor

    def _walk(self, seed: int, client: int, start: int, steps: int, batch_size: int) -> np.ndarray:
        """Return rows ``[steps, batch_size]`` of a client, ``start`` minibatches into its walk."""
        own = self.parts[client]
        if len(own) < batch_size:
            raise FedlibError(
                f"Client {client} has {len(own)} samples, fewer than a minibatch of {batch_size}. "
                "Use a smaller batch_size, fewer clients, or batch_size=None for full batches."
            )
        per_pass = len(own) // batch_size
        rows = np.empty((steps, batch_size), dtype=np.int64)
        for i in range(steps):
            number, k = divmod(start + i, per_pass)
            order = _pass_order(seed, client, number, len(own))
            rows[i] = own[order[k * batch_size : (k + 1) * batch_size]]
        return rows

    def full_batch(self, clients: Tensor | Sequence[int] | None = None) -> Batch:
        """Return every sample of each given client (default: all), padded with weight zero."""
        chosen = (
            np.arange(self.N) if clients is None else np.asarray(torch.as_tensor(clients).cpu())
        )
        longest = int(self.sizes[chosen].max())
        rows = np.zeros((len(chosen), longest), dtype=np.int64)
        weight = np.zeros((len(chosen), longest))
        for i, n in enumerate(chosen):
            rows[i, : self.sizes[n]] = self.parts[n]
            weight[i, : self.sizes[n]] = 1 / self.sizes[n]
        device, dtype = self.x.device, self.x.dtype if self.x.is_floating_point() else torch.double
        return Batch(torch.from_numpy(rows).to(device), torch.from_numpy(weight).to(device, dtype))


def _checked_parts(parts: Sequence[np.ndarray], rows: int) -> list[np.ndarray]:
    parts = [np.asarray(part, dtype=np.int64) for part in parts]
    empty = [n for n, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise FedlibError(f"Clients {empty[:5]} have no samples. Use fewer clients.")
    used = np.concatenate(parts)
    if used.min() < 0 or used.max() >= rows:
        raise FedlibError(f"Row numbers must lie in 0..{rows - 1}; got {used.max()}.")
    if len(np.unique(used)) != len(used):
        raise FedlibError("A sample belongs to two clients. Each row may be given once.")
    return parts


def _pair(x: Any, y: Any, device: Any, split: str) -> tuple[Tensor, Tensor]:
    """Return features and targets of one split on the device; whole numbers become int64."""
    x = _numbers(x, device, f"{split} features")
    if y is None:
        real = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return x, torch.zeros(len(x), dtype=real, device=device)
    y = as_targets(y, device, split)
    if len(y) != len(x):
        raise FedlibError(f"{len(x)} {split} samples and {len(y)} targets: one each is needed.")
    return x, y


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
        by_place = values.to_numpy(copy=True) if hasattr(values, "to_numpy") else values
        return torch.as_tensor(by_place, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"{type(values).__name__} {getattr(values, 'dtype', '')}".strip()
        raise FedlibError(
            f"The {what} must be an array of numbers; got {kind}. Labels that are words: "
            "y = np.unique(words, return_inverse=True)[1]. A table: fedlib.datasets.from_frame."
        ) from error


def _jitter(visits: list[tuple[int, int, int]], step: int) -> Tensor:
    """Draw (down, right, flip) once a visited client and step."""
    draws = [
        stream(seed, "augment", client, start + step).integers(0, (9, 9, 2))
        for seed, client, start in visits
    ]
    return torch.from_numpy(np.stack(draws))
