"""Settings as rows: a setting may be one number a run, so a sweep is one batched run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlib.engine.checks import checked_seeds
from fedlib.engine.protocols import K, S, Varied
from fedlib.engine.simulation import History, simulate
from fedlib.errors import FedlibError

Setting = float | Sequence[float] | np.ndarray


def column(value: Setting, x: Tensor, copies: int = 1) -> float | Tensor:
    """Return a setting as it multiplies rows: a number, or a column with one value a row.

    Parameters
    ----------
    value
        A number for all runs, or one a run, ``R`` of them.
    x
        ``[R, P]``, one row a run.
    copies
        Rows of each run, next to each other.

    Returns
    -------
    float or Tensor
        A number as it is, else ``[R * copies, 1]``.

    Raises
    ------
    FedlibError
        When there are not as many values as runs.
    """
    if np.ndim(value) == 0:
        return float(np.asarray(value, dtype=float))
    each = of_runs(value, len(x))
    place = _uploaded_once if x.is_cuda else _uploaded_once.__wrapped__
    return place(tuple(each.tolist()), copies, x.dtype, x.device)


def of_runs(value: Setting, runs: int) -> np.ndarray:
    """Return a setting's value in each run, ``[R]``; as many as runs came, or one for all."""
    each = np.asarray(value, dtype=float)
    if each.size not in (1, runs):
        raise FedlibError(
            f"{len(each)} values for {runs} runs: {tuple(each.tolist())}. Give one number for all "
            "runs, or one for each."
        )
    return np.broadcast_to(each, runs)


@functools.lru_cache(maxsize=256)
def _uploaded_once(
    value: tuple[float, ...], copies: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the column; an upload in every round would make the host wait for the device."""
    each = torch.tensor(value, dtype=dtype).to(device)
    return each.repeat_interleave(copies).unsqueeze(1)


def sweep(
    algorithm: Varied[S, K],
    task: K,
    rounds: int,
    grid: Mapping[str, Sequence[float]],
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> History[S]:
    """Run every setting of a grid with every seed, all of them side by side in one batch.

    The rows are bit for bit those of ``simulate`` called for each setting with these seeds (up to
    rounding with BatchNorm, with functions such as GELU that PyTorch rounds by their place in
    memory, and on some processors with the products of a module of your own). All models of all
    settings are held at once; where memory is short, sweep parts of the grid.

    Parameters
    ----------
    algorithm
        Gives the settings that stay.
    task, rounds, seeds, options
        As for :func:`~fedlib.engine.simulation.simulate`; the names of runs are ours.
    grid
        Values to try by field: ``{"lr": [0.1, 0.2]}``; all combinations of several fields.

    Returns
    -------
    History
        The column ``run`` names the setting, ``"lr=0.1"`` or ``"lr=0.1, amplify=2"``.

    Raises
    ------
    FedlibError
        For a field that cannot differ between the runs of a batch, and values that are no list.
    """
    can = getattr(algorithm, "per_run", ())
    for field in grid:
        if field not in can:
            raise FedlibError(
                f"{type(algorithm).__name__} cannot have several values of {field} in one run; it "
                f"can of: {', '.join(can) or 'nothing'}. Call sweep or simulate for each {field}."
            )
        values = grid[field]
        if isinstance(values, str) or not np.ndim(values) or not len(values):
            raise FedlibError(f"grid['{field}'] is a list of values to try; got {values!r}.")
        if len(set(values)) < len(values):
            raise FedlibError(f"grid['{field}'] has a value twice: {list(values)}.")
    seeds = checked_seeds(seeds)
    settings = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    names = [", ".join(f"{field}={value}" for field, value in s.items()) for s in settings]
    fields = {field: tuple(s[field] for s in settings for _ in seeds) for field in grid}
    return simulate(
        dataclasses.replace(algorithm, **fields),
        task,
        rounds,
        tuple(seeds) * len(settings),
        name=[name for name in names for _ in seeds],
        **options,
    )
