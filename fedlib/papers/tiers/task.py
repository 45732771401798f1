"""One supervised problem whose features lie in silos and whose rows lie with clients."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import check_device, check_flag, check_rows, check_whole_number
from fedlib.engine.cores import each
from fedlib.engine.data import as_targets, check_alike
from fedlib.engine.data import features as as_features
from fedlib.engine.losses import LOSSES, auroc, check_targets, tally, values
from fedlib.engine.model import Model
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.files import digest

RowSplit = Sequence[Sequence[np.ndarray]]  # [silo][client] row numbers


class TieredTask:
    """One supervised problem whose features lie in silos and whose rows lie with clients.

    The prediction is the sum of the silos' embeddings, ``Σ_j h_j(θ_j; x_j)``, each ``[B, E]``.

    Parameters
    ----------
    models
        ``h_j``, one a silo. Silos that share one :class:`Model` object are computed together.
    features
        ``x_j[M, ...]``, one a silo, row ``p`` of each belonging to the same sample.
    labels
        ``[M]``.
    rows
        ``[silo][client]`` row numbers: who holds which sample. Every silo's clients together
        hold all rows, each once; two silos may split them differently. Seeds may have splits of
        their own: a dictionary from each seed to such a list, with as many clients for every seed.
    test_features, test_labels
        The official test split, in the same silos.
    loss_name
        ``"cross_entropy"``, ``"logistic"`` (one output, labels 0 and 1) or ``"half_square"``.
    batch_norm
        Allow models that normalise by the statistics of a batch, as the official code does. An
        embedding is then no function of its sample alone, as the theory has it, but of the whole
        minibatch; every silo needs a single client, whose minibatch is whole.

    Raises
    ------
    FedlibError
        When silos disagree on the number of rows or the embedding width, or rows are missing
        or held twice.
    """

    def __init__(
        self,
        models: Sequence[Model],
        features: Sequence[Tensor | np.ndarray],
        labels: Tensor | np.ndarray,
        rows: RowSplit | Mapping[int, RowSplit],
        test_features: Sequence[Tensor | np.ndarray] | None = None,
        test_labels: Tensor | np.ndarray | None = None,
        loss_name: str = "cross_entropy",
        device: str = "cpu",
        batch_norm: bool = False,
    ) -> None:
        if loss_name not in LOSSES:
            raise unknown("loss", loss_name, LOSSES)
        check_device(device)
        check_flag("batch_norm", batch_norm)
        if (test_features is None) != (test_labels is None):
            raise FedlibError("test_features and test_labels: give both, or neither.")
        if isinstance(models, Model):
            raise FedlibError("models are a list, one for each silo: [model, ...]; got one Model.")
        splits = rows if isinstance(rows, Mapping) else {None: rows}
        for silos in splits.values():
            if not 0 < len(models) == len(features) == len(silos):
                raise FedlibError(
                    f"{len(models)} models, {len(features)} feature blocks and {len(silos)} row "
                    "splits: one of each is needed for every silo."
                )
        self.models, self.loss_name, self.batch_norm = list(models), loss_name, batch_norm
        names = [f"features of silo {j}" for j in range(len(models))]
        self.x = [as_features(x, device, name) for x, name in zip(features, names, strict=True)]
        self.y, self.test_x, self.test_y = as_targets(labels, device), None, None
        if test_features is not None:
            self.test_x = [as_features(x, device, "test features") for x in test_features]
            self.test_y = as_targets(test_labels, device, "test")
        self.splits = {
            seed: [[np.asarray(part) for part in silo] for silo in silos]
            for seed, silos in splits.items()
        }
        self._check()
        self.splits = {
            seed: [[part.astype(np.int64) for part in silo] for silo in silos]
            for seed, silos in self.splits.items()
        }
        self.K = [len(silo) for silo in next(iter(self.splits.values()))]
        if any([len(silo) for silo in silos] != self.K for silos in self.splits.values()):
            raise FedlibError(
                "Every seed's split has as many clients in each silo; got, by seed, "
                f"{ {seed: [len(silo) for silo in silos] for seed, silos in self.splits.items()} }."
            )
        stops = np.cumsum([model.size for model in self.models])
        self.columns = [slice(int(b - m.size), int(b)) for b, m in zip(stops, models, strict=True)]
        self.size = int(stops[-1])
        self._owners = {seed: self._owner(silos) for seed, silos in self.splits.items()}

    def _owner(self, rows: RowSplit) -> np.ndarray:
        """Return who holds each row, ``[silos, M]``."""
        owner = np.empty((len(rows), len(self.y)), dtype=np.int64)
        for j, silo in enumerate(rows):
            for k, part in enumerate(silo):
                owner[j, part] = k
        return owner

    def owner(self, seed: int) -> np.ndarray:
        """Return which client of each silo holds each row in the runs of a seed, ``[silos, M]``.

        Raises
        ------
        FedlibError
            For a seed without a split, where seeds have splits of their own.
        """
        if None in self._owners:
            return self._owners[None]
        if seed not in self._owners:
            raise FedlibError(
                f"Each seed has a split of its own here, and seed {seed} has none. Seeds with one: "
                f"{', '.join(map(str, self._owners))}."
            )
        return self._owners[seed]

    def _check(self) -> None:
        M = len(self.y)
        for model in self.models:
            if not isinstance(model, Model):
                raise FedlibError(
                    f"A silo's model is a fedlib Model; got {type(model).__name__}. Wrap it: "
                    "Model(module)."
                )
        if kinds := {x.dtype for x in self.x} - {self.x[0].dtype}:
            raise FedlibError(f"The silos' features are of {self.x[0].dtype} and {kinds}. Use one.")
        for j, x in enumerate(self.x):
            if len(x) != M:
                raise FedlibError(
                    f"Silo {j} has {len(x)} rows, the labels {M}. Silos must hold the same samples "
                    "in the same order; join them by id first."
                )
        for silos in self.splits.values():
            self._check_rows(silos)
        if len(set(self.widths)) > 1:
            raise FedlibError(
                f"Embedding widths {self.widths} differ between silos. They are summed, so all "
                "h_j need the same number of outputs."
            )
        for j, model in enumerate(self.models):
            if model.normalises and not self.batch_norm or model.drops:
                raise FedlibError(
                    f"Silo {j}: its model has BatchNorm or dropout. An embedding must depend on "
                    "one sample alone. Use GroupNorm, and no dropout."
                )
        crowds = {len(silo) for silos in self.splits.values() for silo in silos}
        if self.batch_norm and (crowds != {1} or any(model.buffers for model in self.models)):
            raise FedlibError(
                f"batch_norm needs one client a silo, whose minibatch is whole; got {crowds}. And "
                "models without running statistics: BatchNorm2d(..., track_running_stats=False)."
            )
        check_targets(self.loss_name, self.y, self.widths[0])
        if self.test_x is None or self.test_y is None:
            return
        check_targets(self.loss_name, self.test_y, self.widths[0], "test")
        if [len(x) for x in self.test_x] != [len(self.test_y)] * len(self.x):
            raise FedlibError(
                f"The test features have {[len(x) for x in self.test_x]} rows for {self.N} silos "
                f"and {len(self.test_y)} labels. Every silo must hold every test sample."
            )
        for j, (x, test) in enumerate(zip(self.x, self.test_x, strict=True)):
            check_alike(x, test, f"test features of silo {j}")

    def _check_rows(self, rows: RowSplit) -> None:
        """Refuse what is not a split of all rows."""
        M = len(self.y)
        if any(part.ndim != 1 for silo in rows for part in silo):
            raise FedlibError(
                "rows holds a list for each silo, of an array for each of its clients, as "
                "fedlib.datasets.partition.grid deals them out; got something flatter or deeper."
            )
        if wrong := [p.dtype for silo in rows for p in silo if p.dtype.kind not in "iu"]:
            raise FedlibError(f"Clients' rows are whole numbers; got an array of type {wrong[0]}.")
        for j, silo in enumerate(rows):
            numbers = np.concatenate(silo) if silo else np.array([], dtype=int)
            if len(numbers) != M or not np.array_equal(np.sort(numbers), np.arange(M)):
                raise FedlibError(
                    f"Silo {j}: its clients hold {len(np.unique(numbers))} of {M} rows in "
                    f"{len(numbers)} places. Each row needs exactly one client in every silo."
                )

    def to(self, device: str | torch.device) -> TieredTask:
        """Return the same task with its data on a device."""
        check_device(device)
        moved = copy.copy(self)  # already checked
        moved.x, moved.y = [x.to(device) for x in self.x], self.y.to(device)
        if self.test_x is not None and self.test_y is not None:
            moved.test_x = [x.to(device) for x in self.test_x]
            moved.test_y = self.test_y.to(device)
        return moved

    def digest(self) -> str:
        """Return a SHA-256 of data, splits, models and loss."""
        tests = (self.test_x, self.test_y) if self.test_x is not None else ()
        models = [model.digest() for model in self.models]
        return digest(self.x, self.y, *tests, [*self.splits.items()], models, self.loss_name)

    @property
    def rows(self) -> list[list[np.ndarray]]:
        """Row numbers, ``[silo][client]``.

        Raises
        ------
        FedlibError
            Where each seed has a split of its own.
        """
        if None not in self.splits:
            raise FedlibError("Each seed has a split of its own here: task.splits[seed].")
        return self.splits[None]

    @property
    def N(self) -> int:
        """Number of silos."""
        return len(self.models)

    @cached_property
    def widths(self) -> list[int]:
        """Embedding width E of each silo."""
        return [m.outputs(x) for m, x in zip(self.models, self.x, strict=True)]

    def init(self, seeds: Sequence[int]) -> Tensor:
        """Return one freshly initialised model a seed, ``[R, P]``."""
        rows = [
            torch.cat([m.init(stream(seed, "init", j)) for j, m in enumerate(self.models)], 1)
            for seed in seeds
        ]
        return torch.cat(rows).to(self.x[0].device, self.models[0].dtype(self.x[0]))

    def predict(self, theta: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Return the summed embeddings ``[R, B, E]`` of whole models ``[R, P]``."""
        parts = [
            model.apply(theta[:, block], x.expand(len(theta), *x.shape))
            for model, block, x in zip(self.models, self.columns, features, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def loss(self, theta: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the mean loss of whole models on some rows (default all), ``[R]``."""
        ids = torch.arange(len(self.y)) if ids is None else ids
        ids = ids.to(self.y.device)
        out = self.predict(theta, [x[ids] for x in self.x])
        y = self.y[ids]
        return LOSSES[self.loss_name](out, y.expand(len(theta), *y.shape)).mean(1)

    @torch.no_grad()
    def evaluate(
        self, theta: Tensor, split: str = "train", limit: int | None = None
    ) -> dict[str, Tensor]:
        """Return the loss of whole models, ``[R]``, and what else the loss reports.

        That is what :func:`~fedlib.engine.losses.values` says, and with the logistic loss also
        :func:`~fedlib.engine.losses.auroc`.
        """
        check_rows(theta, self.size)
        if split not in ("train", "test"):
            raise unknown("split", split, ["train", "test"])
        features, y = (self.x, self.y) if split == "train" else (self.test_x, self.test_y)
        if features is None or y is None:
            raise FedlibError("This task has no test split. Evaluate on 'train'.")
        check_whole_number("limit", 1 if limit is None else limit)
        keep = torch.linspace(0, len(y) - 1, min(limit or len(y), len(y))).long()
        keep = keep.to(y.device)
        measure = lambda part: self.predict(theta, [x[part] for x in features])  # noqa: E731
        outs = each(measure, keep.split(250), keep.device)
        out, y = torch.cat(outs, 1), y[keep]
        sums = tally(self.loss_name, out, y.expand(len(theta), *y.shape))
        metrics = values(sums.cpu(), len(keep))
        if self.loss_name == "logistic":
            metrics["auroc"] = auroc(out.squeeze(-1), y).cpu()
        return metrics
