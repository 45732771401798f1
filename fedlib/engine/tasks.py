"""A task is a model, a loss and federated data, with gradients for many copies at once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlib.engine.checks import check_between, check_rows, check_whole_number, checked_seeds
from fedlib.engine.cores import each
from fedlib.engine.data import Batch, FederatedDataset
from fedlib.engine.losses import LOSSES, check_targets, tally, values
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.files import digest


@dataclass
class Task:
    """A model, a loss and federated data.

    Parameters
    ----------
    model
        See :mod:`fedlib.engine.models`.
    data
        The clients' samples.
    loss_name
        ``"cross_entropy"`` on classes 0 to K-1; ``"logistic"`` on classes 0 and 1, with one
        output; or ``"half_square"``, half the squared distance to a real target.
    l2
        Adds ``l2/2 ‖theta‖²`` to every client's loss, buffers left out.

    Raises
    ------
    FedlibError
        When model, features, targets and loss do not fit together.
    """

    model: Model
    data: FederatedDataset
    loss_name: str = "cross_entropy"
    l2: float = 0.0
    chunk: int = field(default=1_000_000, repr=False)
    recordings: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_task(self)

    @property
    def N(self) -> int:
        """Number of clients."""
        return self.data.N

    @property
    def size(self) -> int:
        """Number of columns ``P`` of one model copy."""
        return self.model.size

    def to(self, device: str | torch.device) -> Task:
        """Return the same task with its data on a device."""
        moved = copy.copy(self)  # already checked
        moved.data, moved.recordings = self.data.to(device), {}
        return moved

    def of(self, seed: int) -> Task:
        """Return the same task with the split of one seed."""
        one = copy.copy(self)
        one.data, one.recordings = self.data.of(seed), {}
        return one

    def digest(self) -> str:
        """Return a SHA-256 of data, splits, model and loss."""
        d = self.data
        contents = (d.x, d.y, d.test_x, d.test_y, [*d.splits.items()], d.test_parts, d.augment)
        return digest(*contents, self.model.digest(), self.loss_name, self.l2)

    def init(self, seeds: Sequence[int]) -> Tensor:
        """Return one freshly initialised model a seed, ``[R, P]``."""
        checked_seeds(seeds)
        rows = [self.model.init(stream(seed, "init")) for seed in seeds]
        return torch.cat(rows).to(self.data.x.device, self.model.dtype(self.data.x))

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Gather ``x[copies, B, ...]`` and ``y[copies, B]``, with augmentation applied."""
        rows = batch.rows.flatten()
        x = self.data.x.index_select(0, rows).unflatten(0, batch.rows.shape)
        y = self.data.y.index_select(0, rows).unflatten(0, batch.rows.shape)
        return (x if batch.jitter is None else crop_and_flip(x, batch.jitter)), y

    def losses(self, theta: Tensor | dict[str, Tensor], batch: Batch) -> Tensor:
        """Return every copy's mean loss on its batch without the l2 term, ``[copies]``.

        The model runs in training mode; :meth:`~fedlib.engine.model.Model.apply` says what
        becomes of buffers.
        """
        if self.model.normalises:
            check_whole(batch)
        x, y = self.features(batch)
        keys = batch.keys() if self.model.drops else None
        each = LOSSES[self.loss_name](self.model.apply(theta, x, True, keys), y)
        return batch.mean(each)

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return every copy's regularised loss on its batch, ``[copies]``."""
        trained = theta[:, : self.model.trained]
        return self.losses(theta, batch) + 0.5 * self.l2 * trained.square().sum(1)

    def grad(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return every copy's gradient, ``[copies, P]``.

        The copies do not interact, so one backward pass over the sum of their losses gives
        all the gradients at once.
        """
        check_rows(theta, self.size)
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(theta, batch).sum(), theta)
        if self.l2:
            trained = slice(self.model.trained)
            gradient[:, trained].add_(theta.detach()[:, trained], alpha=self.l2)
        return gradient

    def client_gradients(self, theta: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        """Return the exact gradient of each client's own loss at one model, ``[N, P]``.

        Parameters
        ----------
        theta
            ``[1, P]`` or ``[P]``.
        clients
            Which clients; default all.
        """
        selected = range(self.N) if clients is None else clients
        if not len(selected):
            raise FedlibError("No client was chosen. Leave clients out for all.")
        theta = theta.unsqueeze(0) if theta.dim() == 1 else theta
        if len(theta) != 1:
            raise FedlibError(f"theta is {[*theta.shape]}. Expected one model, [1, {self.size}].")
        return torch.cat([self.grad(theta, self.data.full_batch([n])) for n in selected])

    @torch.no_grad()
    def evaluate(
        self,
        theta: Tensor,
        split: str = "train",
        limit: int | None = None,
        average: str = "samples",
    ) -> dict[str, Tensor]:
        """Return mean loss, and accuracy and F1 where the loss has them, of every copy.

        The two averages are the same when all clients hold equally many samples.

        Parameters
        ----------
        theta
            ``[R, P]``.
        split
            ``"train"`` or ``"test"``.
        limit
            Use a fixed, evenly spread subset of at most this many samples. Each counts as much as
            without a limit; so with ``"clients"`` a small client's few may outweigh all others'.
        average
            ``"samples"``: over all samples of the split pooled, whoever holds them, and those that
            nobody holds. ``"clients"``: each client's mean over its own samples first, then the
            plain mean over the clients, f of the theorems; the test split then needs
            ``test_parts``.

        Returns
        -------
        dict
            What :func:`~fedlib.engine.losses.values` reports, ``[R]`` in float64 on the CPU.

        Raises
        ------
        FedlibError
            For an unknown split or average, or one that the data do not have.
        """
        check_rows(theta, self.size)
        if split not in ("train", "test"):
            raise unknown("split", split, ["train", "test"])
        check_whole_number("limit", 1 if limit is None else limit)
        x, y = (
            (self.data.x, self.data.y) if split == "train" else (self.data.test_x, self.data.test_y)
        )
        if x is None or y is None:
            raise FedlibError("This data set has no test split. Evaluate on 'train'.")
        weight = self._weight(split, average, len(x))
        if limit is not None and limit < len(x):
            keep = torch.linspace(0, len(x) - 1, limit).long()  # the same on every device
            x, y, weight = x[keep.to(x.device)], y[keep.to(y.device)], weight[keep]
        copies = len(theta)
        step = max(1, self.chunk // (copies * max(1, x[0].numel())))
        parts = (x.split(step), y.split(step), weight.to(x.device).split(step))

        def measure(part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            xs, ys = (t.expand(copies, *t.shape) for t in part[:2])
            return tally(self.loss_name, self.model.apply(theta, xs), ys, part[2])

        sums = sum(each(measure, list(zip(*parts, strict=True)), x.device))
        metrics = values(sums.cpu(), weight.sum())
        trained = theta[:, : self.model.trained]
        metrics["loss"] = metrics["loss"] + 0.5 * self.l2 * trained.double().square().sum(1).cpu()
        return metrics

    def _weight(self, split: str, average: str, samples: int) -> Tensor:
        """Return how much each sample of a split counts, ``[samples]``."""
        if average == "samples":
            return torch.ones(samples, dtype=torch.float64)
        if average != "clients":
            raise unknown("average", average, ["samples", "clients"])
        parts = self.data.parts if split == "train" else self.data.test_parts
        if parts is None:
            raise FedlibError(
                "No client holds test samples. Build the data with test_parts, or take "
                "average='samples'."
            )
        weight = torch.zeros(samples, dtype=torch.float64)
        for part in parts:
            weight[torch.from_numpy(part)] = 1 / len(part)
        return weight


def check_task(task: Task) -> None:
    """Refuse a task whose model, features, targets and loss do not fit together."""
    if not isinstance(task.loss_name, str) or task.loss_name not in LOSSES:
        raise unknown("loss", task.loss_name, LOSSES)
    if not isinstance(task.model, Model):
        raise FedlibError(
            f"Task takes a fedlib Model; got {type(task.model).__name__}. Wrap it: Model(module)."
        )
    check_between("l2", task.l2, 0)
    data = task.data
    if not isinstance(data, FederatedDataset):
        raise FedlibError(
            f"Task takes federated data; got {type(data).__name__}. See FederatedDataset.build."
        )
    outputs = task.model.outputs(data.x)
    check_targets(task.loss_name, data.y, outputs)
    if data.test_x is not None and data.test_y is not None:
        check_targets(task.loss_name, data.test_y, task.model.outputs(data.test_x), "test")


def check_whole(batch: Batch) -> None:
    """Refuse padding for a model that takes the statistics of its batch."""
    if batch.weight is None or batch.padded is False:
        return
    if batch.padded or not batch.weight.all():
        raise FedlibError(
            "BatchNorm would take padding for samples: the full batches of these clients differ in "
            "length. Give every client as many samples, set a batch_size, or use GroupNorm."
        )


def crop_and_flip(x: Tensor, jitter: Tensor) -> Tensor:
    """Shift every copy's images by up to 4 pixels with zero padding, then maybe mirror them.

    Parameters
    ----------
    x
        ``[copies, B, C, H, W]``.
    jitter
        ``[copies, 3]``: down and right from 0 to 8, where 4 leaves an image in place, and 1 to
        mirror it. It may lie on a device: no number of it is read on the host.
    """
    height, width = x.shape[-2:]
    down, right, flip = jitter.unsqueeze(2).unbind(1)  # [copies, 1] each
    i, j = (torch.arange(side, device=x.device) for side in (height, width))
    rows, columns = down + i, right + torch.where(flip > 0, width - 1 - j, j)
    copy = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    padded = F.pad(x, (4, 4, 4, 4)).permute(0, 3, 4, 1, 2)
    return padded[copy, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 4, 1, 2)
