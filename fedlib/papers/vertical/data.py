"""Data for parties that hold columns: float64 arrays, or sparse rows, with labels -1 and +1.

Facts stand on the cards, as for every data set (``fedlib data list``); here is how their rows
become the columns that the chapter learns from. Nothing that a column is scaled with is taken from
test rows.

Sources: Q. Zhang, B. Gu, C. Deng and H. Huang, *Secure Bilevel Asynchronous Vertical Federated
Learning with Backward Updating*, AAAI 2021, Section 7 (which sets, how many rows and columns). The
encodings, where the paper names none, are ours and stand on the cards.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from scipy import sparse

from fedlib import datasets
from fedlib.datasets.folders import unreadable
from fedlib.engine.checks import check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown
from fedlib.files import open_regular
from fedlib.papers.vertical.made import gaussian_rows, zipf_rows

_MOST = 1 << 37  # bytes that a file may have: more than any here
_UNPACK: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}


@dataclass(frozen=True, eq=False)
class Columns(datasets.Dataset):
    """A data set in memory, to be dealt out by columns.

    ``train_x`` and ``test_x`` are ``float64 [n, d]`` or ``scipy.sparse.csr_array``, ``train_y`` and
    ``test_y`` ``float64 [n]``: -1 and +1 for the two ``classes``, or real numbers when there are
    none. The card says how many rows and columns were read.

    Attributes
    ----------
    columns
        Name of each column; empty for sparse and made sets.
    mean, std
        What was subtracted from each column and what it was divided by, ``float64 [d]``; None when
        nothing was.
    span
        The training targets that became 0 and 1; None when targets stayed as they were.
    """

    columns: tuple[str, ...] = ()
    mean: np.ndarray | None = None
    std: np.ndarray | None = None
    span: tuple[float, float] | None = None


@dataclass
class _Raw:
    """What a reader returns: all rows, nothing scaled.

    ``numbers`` marks the columns that are quantities, not ones and zeros; None marks all. The first
    ``first`` rows train if that is given; else rows are drawn. With ``span`` the lowest and highest
    training targets become 0 and 1.
    """

    x: Any  # an array, or sparse rows
    y: np.ndarray
    hashes: dict[str, str]
    columns: tuple[str, ...] = ()
    numbers: np.ndarray | None = None
    first: int | None = None
    span: bool = False
    fidelity: str = "unverified"


def load_columns(
    name: str, seed: int = 0, standardise: bool | str = True, folder: str | Path | None = None
) -> Columns:
    """Load a data set of the chapter, split it, and scale it by its training part.

    Parameters
    ----------
    name
        One of `names`.
    seed
        Draws the test rows of sets without a split of their own.
    standardise
        Subtract the training mean and divide by the training standard deviation: of columns that
        are quantities (True), of all, ones and zeros too (``"all"``), or of none (False). A column
        that never varies is only centred. Sparse rows stay as they are.
    folder
        Where the files lie, for a set that its owner hands out. By default the folder ``NAME`` in
        the cache or in ``FEDLIB_MIRROR``.

    Returns
    -------
    Columns
        A `UserWarning` says so when rows could not be verified equal to what the card names.

    Raises
    ------
    FedlibError
        For an unknown set, files that are not there, and rows that are not as described: the
        message names file, row and column.
    """
    if name not in names():
        raise unknown("data set of columns", name, names())
    if standardise not in (True, False, "all"):
        raise FedlibError(f"standardise is True, False or 'all'; got {standardise!r}.")
    check_whole_number("seed", seed, 0)
    card = datasets.card(name)
    raw = _read(card, folder)
    if raw.fidelity != "canonical":
        warnings.warn(
            f"'{name}' is {raw.fidelity}: not verified equal to what its card names.", stacklevel=2
        )
    train, test = _split(card, raw, seed)
    x, y, mean, std, span = (raw.x[train], raw.x[test]), (raw.y[train], raw.y[test]), *3 * (None,)
    if standardise and not sparse.issparse(raw.x):
        every = raw.numbers is None or standardise == "all"
        mean, std = scales(x[0], slice(None) if every else raw.numbers)
        x = tuple((part - mean) / std for part in x)
    if raw.span:
        span = low, high = float(y[0].min()), float(y[0].max())
        y = tuple((part - low) / (high - low) for part in y)
    return Columns(
        name=name,
        train_x=x[0],
        train_y=y[0],
        test_x=x[1],
        test_y=y[1],
        classes=card.classes,
        card=replace(card, shape=(raw.x.shape[1],), train=len(y[0]), test=len(y[1])),
        hashes=raw.hashes,
        fidelity=raw.fidelity,
        columns=raw.columns,
        mean=mean,
        std=std,
        span=span,
    )


def names() -> list[str]:
    """Return the names of the sets that `load_columns` reads."""
    return [n for n, card in datasets.all_cards().items() if card.format.startswith("columns-")]


def scales(x: np.ndarray, columns: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Return what to subtract from and divide columns by, 0 and 1 for all others."""
    mean, std = np.zeros(x.shape[1]), np.ones(x.shape[1])
    mean[columns], std[columns] = x[:, columns].mean(axis=0), x[:, columns].std(axis=0)
    return mean, np.where(std > 1e-12 * np.maximum(1, np.abs(mean)), std, 1.0)


def _read(card: datasets.Card, folder: str | Path | None) -> _Raw:
    kind = card.format.removeprefix("columns-")
    if kind in ("folder", "part"):
        home = Path(folder) if folder is not None else datasets.get(card.name)[0]
        return _READERS[card.base or card.name](card, home)
    if folder is not None:
        raise FedlibError(f"'{card.name}' is {kind}, not read from a folder; leave folder out.")
    return {"bundled": _bundled, "made": _made}[kind](card)


def _split(card: datasets.Card, raw: _Raw, seed: int) -> tuple[Any, Any]:
    """Return training and test rows; drawn ones in the order of the file."""
    n = len(raw.y)
    if raw.first is not None:
        return slice(0, raw.first), slice(raw.first, n)
    count = int(n * card.test / (card.train + card.test) + 0.5)
    if not 0 < count < n:
        raise FedlibError(f"'{card.name}': {n} rows are too few to train and to test on.")
    tests = stream(seed, "test rows").permutation(n)[:count]
    return np.setdiff1d(np.arange(n), tests), np.sort(tests)


# --- bundled, and made ----------------------------------------------------------------------------


def _bundled(card: datasets.Card) -> _Raw:
    from sklearn import datasets as theirs

    loader, regression = card.generator["loader"], not card.classes
    bunch = getattr(theirs, loader)(**({"scaled": False} if regression else {}))
    x, y = (np.ascontiguousarray(part, dtype="<f8") for part in (bunch.data, bunch.target))
    digest = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    if digest != card.generator["sha256"]:
        raise FedlibError(
            f"scikit-learn's {loader}() does not give the rows of the card '{card.name}': expected "
            f"SHA-256 {card.generator['sha256']}, found {digest}. Install another version of it."
        )
    if not regression:
        y = 2.0 * (y % 2) - 1  # of ten digits the odd ones, of two classes the second
    columns = tuple(map(str, bunch.feature_names))
    return _Raw(x, y, {loader: digest}, columns, span=regression, fidelity="canonical")


def _made(card: datasets.Card) -> _Raw:
    options, rows = dict(card.generator), card.train + card.test
    kind, sha256 = options.pop("kind"), options.pop("sha256", None)
    x, y = GENERATORS[kind](rows, card.train, *card.shape, **options)
    digest = _rounded_sha256(*((x.indptr, x.indices, x.data) if sparse.issparse(x) else (x,)), y)
    same = digest == card.rounded_sha256  # then it goes by the card's hash, whatever its last bits
    hashes = {f"{card.name} arrays": sha256 if same else digest}
    fidelity = "canonical" if same else "unverified"
    return _Raw(x, y, hashes, first=card.train, span=kind == "gaussian", fidelity=fidelity)


def _rounded_sha256(*parts: np.ndarray) -> str:
    """Return a hash of arrays, real numbers to four digits after the point.

    The last bit of a logarithm or of a product is the processor's own. It moves a number by about
    1e-16, and borders of rounding lie 1e-4 apart: one of six million numbers crosses one with a
    probability of 1e-5.
    """
    digest = hashlib.sha256()
    for part in parts:
        if part.dtype.kind == "f":
            part = 1e4 * part
            part = np.rint(part, out=part).astype("<i8")
        digest.update(np.ascontiguousarray(part, dtype=part.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


# --- tables ---------------------------------------------------------------------------------------

UCI_SHA256 = "a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1"
"""Of UCI_Credit_Card.csv, decoded; other copies spell their numbers otherwise."""

UCI_ONE_HOT: dict[str, Iterable[int]] = {
    "EDUCATION": range(7),
    "MARRIAGE": range(4),
    **{f"PAY_{month}": range(-2, 9) for month in (0, 2, 3, 4)},
    **{f"PAY_{month}": (-2, -1, 0, *range(2, 9)) for month in (5, 6)},
}
"""Values of each one-hot column of UCI credit; together they make 75 columns of ones and zeros."""

UCI_NUMBERS = (
    "LIMIT_BAL",
    "AGE",
    *(f"BILL_AMT{month}" for month in range(1, 7)),
    *(f"PAY_AMT{month}" for month in range(1, 7)),
)

CREDIT_NUMBERS = (
    "RevolvingUtilizationOfUnsecuredLines",
    "age",
    "DebtRatio",
    "MonthlyIncome",
    "NumberOfOpenCreditLinesAndLoans",
)
CREDIT_ONE_HOT = (
    "NumberOfTime30-59DaysPastDueNotWorse",
    "NumberOfTimes90DaysLate",
    "NumberRealEstateLoansOrLines",
    "NumberOfTime60-89DaysPastDueNotWorse",
    "NumberOfDependents",
)


def _uci_credit(card: datasets.Card, home: Path) -> _Raw:
    target, path = "default.payment.next.month", _find(home, "UCI_Credit_Card.csv")
    frame, found = _table(path, [target, "SEX", *UCI_NUMBERS, *UCI_ONE_HOT])
    parts, columns = [_one_hot(frame, "SEX", (1, 2), path)[:, :1]], ["SEX=1"]
    for name, values in UCI_ONE_HOT.items():
        parts.append(_one_hot(frame, name, values, path))
        columns += [f"{name}={value}" for value in values]
    return _encoded(frame, target, path, found, found == UCI_SHA256, UCI_NUMBERS, parts, columns)


def _give_me_some_credit(card: datasets.Card, home: Path) -> _Raw:
    if not card.base and not _found(home, _WHOLE) and _found(home, _HEAD):
        raise FedlibError(
            f"{home} holds the first rows only. Load 'givemesomecredit-partial', and call it so; "
            f"or put {_WHOLE} there. {card.if_missing}"
        )
    target, path = "SeriousDlqin2yrs", _find(home, _HEAD if card.base else _WHOLE)
    frame, found = _table(path, [target, *CREDIT_NUMBERS, *CREDIT_ONE_HOT], missing=True)
    frame = frame.dropna()
    parts, columns = [], []
    for name in CREDIT_ONE_HOT:
        values = sorted(frame[name].unique())
        parts.append(_one_hot(frame, name, values, path))
        columns += [f"{name}={value:g}" for value in values]
    known = bool(card.base) and found == card.files[0].sha256
    return _encoded(frame, target, path, found, known, CREDIT_NUMBERS, parts, columns)


_WHOLE, _HEAD = "cs-training.csv", "cs-training-head.csv"


def _encoded(
    frame: Any,
    target: str,
    path: Path,
    found: str,
    known: bool,
    numbers: tuple[str, ...],
    hot: list[np.ndarray],
    columns: list[str],
) -> _Raw:
    """Return a table as columns: ones and zeros first, then numbers."""
    x = np.hstack([*hot, frame[list(numbers)].to_numpy(np.float64)])
    y = 2 * _one_hot(frame, target, (0, 1), path)[:, 1] - 1
    marked = np.arange(x.shape[1]) >= len(columns)
    fidelity = "canonical" if known else "unverified"
    return _Raw(x, y, {path.name: found}, (*columns, *numbers), marked, fidelity=fidelity)


def _year(card: datasets.Card, home: Path) -> _Raw:
    path = _find(home, "YearPredictionMSD.txt")
    frame, found = _table(path, list(range(card.shape[0] + 1)), header=None)
    held, rows = frame.to_numpy(np.float64), card.train + card.test
    if len(held) != rows:
        raise FedlibError(f"{path} has {len(held)} rows; {rows} were expected.")
    timbre = [f"timbre mean {k}" for k in range(1, 13)]
    timbre += [f"timbre covariance {k}" for k in range(1, card.shape[0] - 11)]
    hashes = {path.name: found}
    return _Raw(held[:, 1:], held[:, 0], hashes, tuple(timbre), first=card.train, span=True)


def _table(
    path: Path, columns: list[Any], missing: bool = False, header: int | None = 0
) -> tuple[Any, str]:
    """Return columns of a csv file as numbers, and the hash of its decoded content."""
    import pandas as pd

    try:
        with _opened(path) as file:
            held = file.read()
        frame = pd.read_csv(io.BytesIO(held), header=header, low_memory=False)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise unreadable(path, "a table of numbers with commas", error) from error
    if lacking := [name for name in columns if name not in frame.columns]:
        raise FedlibError(f"{path} lacks the column {lacking[0]!r} of {len(columns)}.")
    if not len(frame):
        raise FedlibError(f"{path} has no rows.")
    frame = frame[columns]
    kept = frame.apply(pd.to_numeric, errors="coerce").astype(np.float64)
    wrong = np.isinf(kept.to_numpy()) | (kept.isna() & ~(frame.isna() & missing)).to_numpy()
    if wrong.any():
        row, at = np.argwhere(wrong)[0]
        raise FedlibError(
            f"{path}, row {row + 1}, column {columns[at]!r}: {str(frame.iloc[row, at])!r} is not a "
            "number."
        )
    return kept, hashlib.sha256(held).hexdigest()


def _one_hot(frame: Any, name: str, values: Iterable[float], path: Path) -> np.ndarray:
    """Return a column as ones and zeros, ``[n, values]``."""
    values, held = [float(value) for value in values], frame[name].to_numpy()
    hot = held[:, None] == np.array(values)
    if not hot.any(axis=1).all():
        at = int(np.flatnonzero(~hot.any(axis=1))[0])
        asked = ", ".join(f"{value:g}" for value in values)
        raise FedlibError(
            f"{path}, row {frame.index[at] + 1}, column {name!r}: {held[at]:g} is none of {asked}."
        )
    return hot.astype(np.float64)


# --- sparse files ---------------------------------------------------------------------------------

SPARSE = {
    "news20": ("news20.binary",),
    "webspam": ("webspam_wc_normalized_trigram.svm",),
    "e2006-tfidf": ("E2006.train", "E2006.test"),
}
"""Files of each sparse set; when there are two, the second one is for testing."""


def _svmlight(card: datasets.Card, home: Path) -> _Raw:
    held, hashes = [], {}
    for name in SPARSE[card.base or card.name]:
        path = _find(home, name)
        x, y, hashes[name] = read_svmlight(path, card.shape[0], bool(card.classes))
        held.append((x, y))
    known = bool(card.base) and hashes[name] == card.files[0].sha256
    if card.base and not known:
        raise FedlibError(f"{path} is not the file of '{card.name}': its hash is {hashes[name]}.")
    rows = card.train + card.test
    if card.name == "news20" and len(y) != rows:
        raise FedlibError(
            f"{path} has {len(y)} rows; news20.binary has {rows}. The substitute with 19997 rows "
            "is called 'news20-like'."
        )
    if len(held) == 1:
        return _Raw(x, y, hashes, fidelity="canonical" if known else "unverified")
    xs, ys = zip(*held, strict=True)
    whole = sparse.csr_array(sparse.vstack(xs, format="csr"))
    return _Raw(whole, np.concatenate(ys), hashes, first=len(ys[0]))


def read_svmlight(
    path: str | Path, columns: int, binary: bool = True
) -> tuple[sparse.csr_array, np.ndarray, str]:
    """Read a file of sparse rows, ``LABEL COLUMN:VALUE COLUMN:VALUE ...``, columns counted from 1.

    Parameters
    ----------
    path
        Plain or packed, as ``.gz``, ``.bz2`` or ``.xz``.
    columns
        How many columns there are.
    binary
        Labels must be -1 and +1; else any numbers.

    Returns
    -------
    x, y, sha256
        ``float64 [n, columns]`` with sorted columns counted from 0, ``float64 [n]``, and the hash
        of the decoded content.

    Raises
    ------
    FedlibError
        For rows, values and labels that are not as asked: with the first such row.
    """
    from sklearn.datasets import load_svmlight_file

    check_whole_number("columns", columns)
    path = Path(path)
    try:
        with _opened(path) as file:
            lines = _Hashed(file)
            x, y = load_svmlight_file(lines, n_features=columns, zero_based=False)
        fine = len(y) and np.isfinite(x.data).all() and np.isfinite(y).all()
        if not fine or (binary and not (np.abs(y) == 1).all()):
            raise ValueError("a row is odd")
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise unreadable(path, "rows such as +1 3:0.5 17:1", error) from error
    except (ValueError, OverflowError) as error:
        with _opened(path) as file:
            raise FedlibError(_fault(path, file, columns, binary, error)) from error
    return _narrow(x), y, lines.digest.hexdigest()


def _narrow(x: Any) -> sparse.csr_array:
    """Return sparse rows with indices of 32 bits where they are enough."""
    kind = np.int32 if max(x.nnz, *x.shape) < 2**31 else np.int64
    return sparse.csr_array((x.data, x.indices.astype(kind), x.indptr.astype(kind)), x.shape)


class _Hashed:
    """Lines of a file, hashed as they pass."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for line in self.file:
            self.digest.update(line)
            yield line

    def read(self, *size: int) -> bytes:
        """Mark this as a file; its lines are what is taken."""
        raise io.UnsupportedOperation("read")

    def close(self) -> None:
        """Leave the file to who opened it."""


def _fault(path: Path, lines: Iterable[bytes], columns: int, binary: bool, error: Exception) -> str:
    """Return what is wrong with the first odd row of a sparse file."""
    from sklearn.datasets import load_svmlight_file

    asked, number = "-1 or +1" if binary else "a number", 0
    for number, line in enumerate((one for one in lines if one.split(b"#")[0].strip()), 1):
        where = f"{path}, row {number}"
        try:
            x, (label,) = load_svmlight_file(io.BytesIO(line), n_features=columns, zero_based=False)
        except (ValueError, OverflowError) as odd:
            return (
                f"{where}: {odd}. Expected is a row such as +1 3:0.5 17:1, with columns that "
                f"increase, from 1 to {columns} at most."
            )
        if not (abs(label) == 1 if binary else np.isfinite(label)):
            return f"{where}: the label is {label:g}; expected {asked}."
        for column, value in zip(x.indices, x.data, strict=True):
            if not np.isfinite(value):
                return f"{where}, column {column + 1}: {value:g} is not finite."
    return f"{path} cannot be read: {error}." if number else f"{path} has no rows."


# --- files ----------------------------------------------------------------------------------------


def _found(home: Path, name: str) -> Path | None:
    """Return the file of that name, plain or packed, if there is one."""
    paths = [home / f"{name}{end}" for end in ("", *_UNPACK)]
    return next((path for path in paths if path.is_file()), None)


def _find(home: Path, name: str) -> Path:
    if found := _found(home, name):
        return found
    raise FedlibError(f"{home} has no file {name}, plain or as {', '.join(_UNPACK)}.")


def _opened(path: Path) -> Any:
    """Return a file opened for reading, unpacked."""
    try:
        raw = open_regular(path, _MOST)
    except OSError as error:
        raise unreadable(path, "a data file", error) from error
    return _UNPACK.get(path.suffix, lambda file: file)(raw)


_READERS: dict[str, Callable[[datasets.Card, Path], _Raw]] = {
    "uci-credit": _uci_credit,
    "givemesomecredit": _give_me_some_credit,
    "yearprediction-msd": _year,
    "news20": _svmlight,
    "webspam": _svmlight,
    "e2006-tfidf": _svmlight,
}
"""Readers of folders, by the name of the set."""

GENERATORS: dict[str, Callable[..., Any]] = {"zipf": zipf_rows, "gaussian": gaussian_rows}
"""Generators, by the kind that a card names."""
