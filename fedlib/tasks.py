"""A task is a model, a loss and federated data, with gradients for many copies at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlib.errors import FedlibError, unknown
from fedlib.models import Model, location
from fedlib.rng import stream


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
    """

    rows: Tensor
    weight: Tensor | None = None
    jitter: Tensor | None = None


@functools.lru_cache(maxsize=200_000)
def _pass_order(seed: int, client: int, number: int, size: int) -> np.ndarray:
    """Return the order in which a client reads its own samples in pass ``number``."""
    return stream(seed, "data", client, number).permutation(size)


class FederatedDataset:
    """Features and labels once, and a list of row numbers for each client.

    Build one with :meth:`build`. ``parts[n]`` are the rows of client ``n``; the test split
    stays apart and belongs to nobody.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        parts: list[np.ndarray],
        test_x: Tensor | None,
        test_y: Tensor | None,
        augment: bool = False,
    ) -> None:
        self.x, self.y, self.test_x, self.test_y = x, y, test_x, test_y
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
    ) -> FederatedDataset:
        """Place the data on a device and check the split.

        Raises
        ------
        FedlibError
            When a client has no samples, or a row number is out of range or given twice.
        """
        place = functools.partial(torch.as_tensor, device=device)
        x = place(x)
        y = place(y) if y is not None else torch.zeros(len(x), dtype=torch.long, device=device)
        parts = [np.asarray(part, dtype=np.int64) for part in parts]
        empty = [n for n, part in enumerate(parts) if len(part) == 0]
        if empty:
            raise FedlibError(f"Clients {empty[:5]} have no samples. Use fewer clients.")
        used = np.concatenate(parts)
        if used.min() < 0 or used.max() >= len(x):
            raise FedlibError(f"Row numbers must lie in 0..{len(x) - 1}; got {used.max()}.")
        if len(np.unique(used)) != len(used):
            raise FedlibError("A sample belongs to two clients. Each row may be given once.")
        test_x = None if test_x is None else place(test_x)
        test_y = None if test_y is None else place(test_y)
        return cls(x, y, parts, test_x, test_y, augment)

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
        if self.augment:
            batches = [
                Batch(batch.rows, batch.weight, _jitter(visits, i))
                for i, batch in enumerate(batches)
            ]
        return batches, cursor

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
        device, dtype = self.x.device, self.x.dtype
        return Batch(torch.from_numpy(rows).to(device), torch.from_numpy(weight).to(device, dtype))


def _cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _half_square(out: Tensor, y: Tensor) -> Tensor:
    target = y.unsqueeze(-1) if y.is_floating_point() else 0.0
    return 0.5 * (out - target).square().sum(-1)


LOSSES = {"cross_entropy": _cross_entropy, "half_square": _half_square}


@dataclass
class Task:
    """A model, a loss and federated data.

    Parameters
    ----------
    model
        See :mod:`fedlib.models`.
    data
        The clients' samples.
    loss_name
        ``"cross_entropy"`` on integer labels, or ``"half_square"``: half the squared distance
        to a real target, or to zero when the labels are integers (for residual models).
    l2
        Adds ``l2/2 ‖theta‖²`` to every client's loss.
    """

    model: Model
    data: FederatedDataset
    loss_name: str = "cross_entropy"
    l2: float = 0.0
    chunk: int = field(default=4_000_000, repr=False)

    def __post_init__(self) -> None:
        if self.loss_name not in LOSSES:
            raise unknown("loss", self.loss_name, LOSSES)

    @property
    def N(self) -> int:
        """Number of clients."""
        return self.data.N

    @property
    def size(self) -> int:
        """Number of parameters ``P`` of one model copy."""
        return self.model.size

    def init(self, seeds: Sequence[int]) -> Tensor:
        """Return one freshly initialised model a seed, ``[R, P]``."""
        rows = [self.model.init(stream(seed, "init")) for seed in seeds]
        return torch.cat(rows).to(self.data.x.device, self.data.x.dtype)

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gather ``x[copies, B, ...]`` and ``y[copies, B]``, with augmentation applied."""
        rows = batch.rows.flatten()
        x = self.data.x.index_select(0, rows).unflatten(0, batch.rows.shape)
        y = self.data.y.index_select(0, rows).unflatten(0, batch.rows.shape)
        if batch.jitter is not None:
            x = torch.stack([_crop_and_flip(xi, j) for xi, j in zip(x, batch.jitter, strict=True)])
        return x, y

    def losses(self, theta: Tensor | dict[str, Tensor], batch: Batch) -> Tensor:
        """Return every copy's mean loss on its batch without the l2 term, ``[copies]``."""
        x, y = self.features(batch)
        each = LOSSES[self.loss_name](self.model.apply(theta, x), y)
        return each.mean(1) if batch.weight is None else (each * batch.weight).sum(1)

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return every copy's regularised loss on its batch, ``[copies]``."""
        return self.losses(theta, batch) + 0.5 * self.l2 * theta.square().sum(1)

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return every copy's gradient, ``[copies, P]``.

        The copies do not interact, so one backward pass over the sum of their losses gives
        all the gradients at once.
        """
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(theta, batch).sum(), theta)
        return gradient.add_(theta.detach(), alpha=self.l2) if self.l2 else gradient

    def client_gradients(self, theta: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        """Return the exact gradient of each client's own loss at one model, ``[N, P]``.

        Parameters
        ----------
        theta
            ``[1, P]`` or ``[P]``.
        clients
            Which clients; default all.
        """
        chosen = range(self.N) if clients is None else clients
        theta = theta.reshape(1, -1)
        return torch.cat([self.grad(theta, self.data.full_batch([n])) for n in chosen])

    @torch.no_grad()
    def evaluate(
        self, theta: Tensor, split: str = "train", limit: int | None = None
    ) -> dict[str, Tensor]:
        """Return mean loss and, for classification, accuracy of every copy.

        Parameters
        ----------
        theta
            ``[R, P]``.
        split
            ``"train"`` or ``"test"``.
        limit
            Use a fixed, evenly spread subset of at most this many samples.

        Returns
        -------
        dict
            ``"loss"`` and ``"accuracy"``, each ``[R]`` in float64 on the CPU.
        """
        if split not in ("train", "test"):
            raise unknown("split", split, ["train", "test"])
        x, y = (
            (self.data.x, self.data.y) if split == "train" else (self.data.test_x, self.data.test_y)
        )
        if x is None:
            raise FedlibError("This data set has no test split. Evaluate on 'train'.")
        if limit is not None and limit < len(x):
            keep = torch.linspace(0, len(x) - 1, limit, device=x.device).long()
            x, y = x[keep], y[keep]
        copies = len(theta)
        step = max(1, self.chunk // (copies * max(1, x[0].numel())))
        sums = torch.zeros(2, copies, dtype=torch.float64, device=x.device)
        for xs, ys in zip(x.split(step), y.split(step), strict=True):
            xs, ys = xs.expand(copies, *xs.shape), ys.expand(copies, *ys.shape)
            out = self.model.apply(theta, xs)
            sums[0] += LOSSES[self.loss_name](out, ys).double().sum(1)
            if self.loss_name == "cross_entropy":
                sums[1] += (out.argmax(-1) == ys).double().sum(1)
        loss, right = (sums / len(x)).cpu()
        loss = loss + 0.5 * self.l2 * theta.double().square().sum(1).cpu()
        return (
            {"loss": loss, "accuracy": right}
            if self.loss_name == "cross_entropy"
            else {"loss": loss}
        )


def _jitter(visits: list[tuple[int, int, int]], step: int) -> Tensor:
    """Draw (down, right, flip) once a visited client and step."""
    draws = [
        stream(seed, "augment", client, start + step).integers(0, (9, 9, 2))
        for seed, client, start in visits
    ]
    return torch.from_numpy(np.stack(draws))


def _crop_and_flip(x: Tensor, jitter: Tensor) -> Tensor:
    """Shift a batch ``[B, C, H, W]`` by up to 4 pixels with zero padding, then maybe mirror it."""
    down, right, flip = (int(v) for v in jitter)
    height, width = x.shape[-2:]
    padded = F.pad(x, (4, 4, 4, 4))[..., down : down + height, right : right + width]
    return padded.flip(-1) if flip else padded


def toy_task() -> Task:
    """Three quadratic bowls in the plane, ``F_n(x) = ½‖x - z_n‖²``, in float64.

    The centres are (-1, 0), (1, 0) and (0, √3), so the optimum is (0, √3/3). From the
    participation paper, appendix B.
    """
    z = np.array([[-1.0, 0.0], [1.0, 0.0], [0.0, np.sqrt(3.0)]])
    data = FederatedDataset.build(z, None, [np.array([n]) for n in range(3)])
    return Task(location(2), data, "half_square")
