"""Tables: a pandas DataFrame with a label and a client column becomes federated data."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_complex_dtype, is_float_dtype, is_integer_dtype, is_numeric_dtype

from fedlib.engine.checks import check_flag
from fedlib.engine.data import FederatedDataset
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown


class Table(FederatedDataset):
    """Federated data that remembers what its numbers were called.

    Attributes
    ----------
    columns
        Names of the features, in their order.
    clients
        Name of each client, in their order.
    classes
        Name of each class; empty when the labels are numbers, which are kept as they are.
    mean, std
        Of each feature over the training rows, float64 ``[features]``, when ``standardise`` took
        them out of ``x``; else None.
    """

    columns: list[str]
    clients: list
    classes: list
    mean: np.ndarray | None = None
    std: np.ndarray | None = None


def from_frame(
    frame: pd.DataFrame,
    label: str,
    client: str,
    test: float | str | None = None,
    standardise: bool = False,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Table:
    """Return a table as federated data; every column not named here is a feature.

    Parameters
    ----------
    frame
        One row a sample. Features are numbers or booleans and become float32.
    label
        Column of the targets: whole numbers are classes, real numbers are targets for
        ``"half_square"``, and anything else is numbered in sorted order, see ``classes``.
    client
        Column that says whose row it is. Clients are numbered in the order of their names.
    test
        A share in (0, 1) that each client holds out, rounded, at random, never all it has; or a
        column that is true for test rows; None for no test split.
    standardise
        Subtract each feature's mean over the training rows and divide by its standard deviation.
    seed
        Of the rows held out.
    device
        Where the data will lie.

    Returns
    -------
    Table
        A :class:`~fedlib.engine.data.FederatedDataset`; rows keep the table's order.

    Raises
    ------
    FedlibError
        For an unknown column, features that are not numbers, missing or infinite values, a share
        out of range or that holds nothing out, and clients without a training row.
    """
    check_columns(frame, label, client, test)
    named = {label, client} | ({test} if isinstance(test, str) else set())
    features = [column for column in frame.columns if column not in named]
    check_numbers(frame, features)
    x = frame[features].to_numpy(dtype=np.float64, na_value=np.nan)
    y, classes = _targets(frame[label])
    owner, names = pd.factorize(np.asarray(frame[client]), sort=True)
    is_test = _held_out(frame, test, owner, len(names), seed)
    check_owners(names, owner[~is_test])
    mean = std = None
    check_flag("standardise", standardise)
    if standardise:
        check_finite_columns(x, features)
        rows = x[~is_test]
        varies = rows.max(0) > rows.min(0)
        mean, std = np.where(varies, rows.mean(0), rows[0]), rows.std(0) * varies
        x = (x - mean) / np.where(std > 0, std, 1)
    wide, x = x, _narrowed(x)
    check_finite_columns(x, features)
    check_apart(wide, x, features)
    parts = [np.flatnonzero(owner[~is_test] == n) for n in range(len(names))]
    test_x, test_y = (x[is_test], y[is_test]) if is_test.any() else (None, None)
    data = Table.build(x[~is_test], y[~is_test], parts, test_x, test_y, device=device)
    data.columns, data.clients, data.classes = features, list(names), classes
    data.mean, data.std = mean, std
    return data


def _targets(labels: pd.Series) -> tuple[np.ndarray, list]:
    """Return targets and the names of their classes, if they had any."""
    missing = int(labels.isna().sum())
    if missing:
        raise FedlibError(f"Label column '{labels.name}' lacks {missing} values. Drop these rows.")
    if is_complex_dtype(labels) or is_integer_dtype(labels) and labels.max() > 2**63 - 1:
        raise FedlibError(
            f"Label column '{labels.name}' holds {labels.dtype} values that are no targets. "
            "Expected real numbers, whole ones below 2^63, or names of classes."
        )
    if is_integer_dtype(labels):
        return labels.to_numpy(dtype=np.int64), []
    if is_float_dtype(labels):
        y = labels.to_numpy(dtype=np.float32)
        check_finite_columns(y[:, None], [labels.name])
        return y, []
    numbers, names = pd.factorize(np.asarray(labels), sort=True)
    return numbers, list(names)


def _held_out(
    frame: pd.DataFrame, test: float | str | None, owner: np.ndarray, clients: int, seed: int
) -> np.ndarray:
    """Tell for every row whether it belongs to the test split, ``[n]``."""
    is_test = np.zeros(len(frame), dtype=bool)
    if test is None:
        return is_test
    if isinstance(test, str):
        if not frame[test].isin([0, 1]).all():
            raise FedlibError(f"Test column '{test}' must hold true and false only.")
        is_test = frame[test].to_numpy(dtype=bool)
    else:
        for n in range(clients):
            rows = np.flatnonzero(owner == n)
            count = min(int(test * len(rows) + 0.5), len(rows) - 1)
            is_test[stream(seed, "held out", n).permutation(rows)[:count]] = True
    if not is_test.any():
        raise FedlibError(f"test={test!r} holds no row out. Take a larger share, or test=None.")
    return is_test


def check_columns(frame: pd.DataFrame, label: str, client: str, test: float | str | None) -> None:
    """Refuse what is no table, columns that are not there or come twice, a share off (0, 1)."""
    if not isinstance(frame, pd.DataFrame):
        kind = type(frame).__name__
        raise FedlibError(f"from_frame takes a pandas DataFrame; got {kind}. Try pd.read_csv.")
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()].tolist()
        raise FedlibError(f"Columns {twice} come twice. Give every column a name of its own.")
    if not len(frame):
        raise FedlibError("The table has no rows.")
    for what, name in (("label", label), ("client", client), ("test", test)):
        if not isinstance(name, Hashable):
            kind = type(name).__name__
            raise FedlibError(f"{what} is the name of a column of the table; got a {kind}.")
    for name in (label, client, *([test] if isinstance(test, str) else [])):
        if name not in frame.columns:
            raise unknown("column", str(name), map(str, frame.columns))
    if len({label, client, test}) < 3:
        raise FedlibError("label, client and test must be different columns.")
    if not (test is None or isinstance(test, str) or 0 < test < 1):
        raise FedlibError(f"test is a share between 0 and 1 or the name of a column; got {test}.")
    if frame[client].isna().any():
        raise FedlibError(f"Client column '{client}' has missing values. Drop or name these rows.")


def check_numbers(frame: pd.DataFrame, features: list[str]) -> None:
    """Refuse features that are not numbers, and a table without features."""
    if not features:
        raise FedlibError("No column is left for the features.")
    real = lambda column: is_numeric_dtype(column) and not is_complex_dtype(column)  # noqa: E731
    words = [name for name in features if not real(frame[name])]
    if words:
        raise FedlibError(
            f"Columns {words} are not numbers. Make a column of zeros and ones of each value, "
            f"frame = pd.get_dummies(frame, columns={words}), or drop them."
        )


def check_finite_columns(x: np.ndarray, columns: list[str]) -> None:
    """Refuse missing and infinite values, naming their columns."""
    wrong = [name for name, bad in zip(columns, ~np.isfinite(x).all(0), strict=True) if bad]
    if wrong:
        raise FedlibError(
            f"Columns {wrong} have values that are missing, infinite or too large for float32. "
            "Fill them, frame.fillna(...), or drop these rows, frame.dropna()."
        )


def _narrowed(x: np.ndarray) -> np.ndarray:
    """Return numbers as float32; what is too large for it is infinite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float32)


def check_apart(wide: np.ndarray, x: np.ndarray, columns: list[str]) -> None:
    """Refuse columns of large numbers of which float32 makes fewer than half as many."""
    for n in np.flatnonzero(np.abs(wide).max(0) > 1 << 24):
        before, after = len(np.unique(wide[:, n])), len(np.unique(x[:, n]))
        if after < before / 2:
            raise FedlibError(
                f"Column '{columns[n]}' has {before:,} different numbers, of which float32 makes "
                f"{after:,}. Take standardise=True, subtract the smallest, or drop the column."
            )


def check_owners(names: np.ndarray, owner: np.ndarray) -> None:
    """Refuse clients all of whose rows are in the test split."""
    idle = [name for n, name in enumerate(names) if not (owner == n).any()]
    if idle:
        raise FedlibError(f"Clients {idle[:5]} have test rows only. Leave a row for training.")
