"""Where fedlib finds the facts it ships: cards, experiments, claims and results."""

from __future__ import annotations

from pathlib import Path

from fedlib.errors import FedlibError

_MARK = Path("datasets") / "digits.toml"


def data_folder() -> Path:
    """Return the folder with ``datasets/``, ``experiments/``, ``claims/`` and ``results/``.

    In a checkout this is the ``data/`` beside the package; an installed wheel carries its own
    copy inside the package. The working directory plays no part.

    Raises
    ------
    FedlibError
        If neither folder is there, which means that the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    candidates = [package.parent / "data", package / "data"]
    for folder in candidates:
        if (folder / _MARK).is_file():
            return folder
    looked = " nor ".join(str(folder / _MARK) for folder in candidates)
    raise FedlibError(f"fedlib's data folder is missing: found neither {looked}. Reinstall fedlib.")
