"""What studies share: models by their name, pooled images, data dealt out, runs side by side."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib import datasets
from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError, unknown

MODELS = {
    "softmax": models.softmax,
    "mlp": models.mlp,
    "fashion_cnn": models.fashion_cnn,
    "cifar_cnn": models.cifar_cnn,
    "lenet": lambda channels, side, classes: models.lenet((channels, side, side), classes),
    "small_cnn": lambda channels, side, classes: models.small_cnn((channels, side, side), classes),
    "char_lstm": models.char_lstm,
}
"""By the name that settings begin with; all sizes follow."""

FITTED = {
    "mlp": lambda shape, *sizes: models.mlp(math.prod(shape), *sizes),
    "small_cnn": models.small_cnn,
    "normed_cnn": models.normed_cnn,
    "lstm": lambda shape, *sizes: models.lstm(shape[-1], *sizes),
    "resnet18": models.resnet18,
}
"""The same where settings name the sizes after those of the features, which are cut before."""


def check_model(model: Sequence[Any], shape: Sequence[int] | None = None) -> None:
    """Refuse a model that is unknown, or whose sizes are not those that it asks for.

    Parameters
    ----------
    model
        Its name in :data:`MODELS`, and its sizes.
    shape
        Of one sample, where that is known.
    """
    if not model:
        raise FedlibError("model is empty. Expected a name and sizes, such as ['mlp', 64, 32, 10].")
    name, *sizes = model
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    asked = inspect.signature(MODELS[name])
    try:
        asked.bind(*sizes)
    except TypeError:
        sizes = [""]
    if not all(isinstance(size, int) for size in sizes):
        expected = ", ".join([f"'{name}'", *asked.parameters])
        raise FedlibError(f"model is {list(model)}. Expected [{expected}], whole numbers.")
    features = math.prod(shape or ())
    if shape and (
        (name in ("softmax", "mlp") and sizes[:1] != [features])
        or ("cnn" in name and len(shape) != 3)
    ):
        raise FedlibError(
            f"model is {list(model)}, and samples are {[*shape]}, {features} features. 'softmax' "
            f"and 'mlp' begin with their number, {features}; the others want images."
        )


def pool_pixels(x: np.ndarray, size: int | Sequence[int]) -> Tensor:
    """Return samples ``[n, ...]`` whose blocks of pixels, so many a side, are averaged."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    small = x.shape[-2:] if x.ndim > 2 else (1, 1)
    if len(sides) != 2 or any(a > b for a, b in zip(sides, small, strict=True)):
        raise FedlibError(
            f"pool = {size}, and samples are {[*x.shape[1:]]}. Take at most their height and width."
        )
    x = torch.from_numpy(x)
    return torch.nn.functional.avg_pool2d(x, sides) if max(sides) > 1 else x


def build_task(
    s: Mapping[str, Any],
    splits: Mapping[int, Sequence[np.ndarray]],
    device: str,
    x: Tensor,
    y: np.ndarray,
    test_x: Tensor | None = None,
    test_y: np.ndarray | None = None,
) -> Task:
    """Return the task of the model that settings name, on data that are dealt out.

    Parameters
    ----------
    s
        Settings: ``model``; ``augment`` and ``l2``, if any.
    splits
        For each seed the training rows of every client.
    device
        Where the data lie.
    x, y, test_x, test_y
        Features and labels, and those of the test split, if any.
    """
    check_model(s["model"], x.shape[1:])
    first, augment, (name, *sizes) = next(iter(splits)), s.get("augment", False), s["model"]
    data = FederatedDataset.build(x, y, splits[first], test_x, test_y, device, augment)
    return Task(MODELS[name](*sizes), data.with_splits(splits), l2=s.get("l2", 0.0))


def dealt(
    s: Mapping[str, Any],
    data: datasets.Dataset,
    splits: Mapping[int, Sequence[np.ndarray]],
    device: str,
) -> tuple[Task, dict[str, str]]:
    """Return the task of a data set at the size that ``pool`` says, and hashes of the data."""
    train_x, test_x = (pool_pixels(x, s.get("pool", 1)) for x in (data.train_x, data.test_x))
    arrays = train_x, data.train_y, test_x, data.test_y
    used = {**data.hashes, "as used": datasets.fingerprint(*arrays)}
    return build_task(s, splits, device, *arrays), used


def check_known(run: Mapping[str, Any], **known: Collection[Any]) -> None:
    """Refuse a run that names what is not known; one that leaves a setting out is fine."""
    for key, names in known.items():
        if key in run and run[key] not in names:
            raise unknown(f"{key} of run '{run['run']}'", str(run[key]), map(str, names))


def measured(base: Mapping[str, Any], values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return tidy rows of what was measured, one a metric."""
    return [{**base, "metric": metric, "value": float(value)} for metric, value in values.items()]


def side_by_side(s: Mapping[str, Any], rows: Collection[str]) -> list[list[dict[str, Any]]]:
    """Return the settings of every run, in lists of those that differ in ``rows`` alone."""
    together: dict[str, list[dict[str, Any]]] = {}
    for run in s["runs"]:
        rest = sorted((key, value) for key, value in run.items() if key not in rows)
        together.setdefault(repr(rest), []).append({**s, **run})
    return list(together.values())
