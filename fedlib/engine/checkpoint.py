"""What a simulation leaves in a file, so that it can go on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlib.engine.checks import check_whole_number
from fedlib.engine.protocols import S, State
from fedlib.errors import FedlibError
from fedlib.files import make_folder, open_regular, publish
from fedlib.paths import expand

LARGEST_CHECKPOINT = 1 << 36  # bytes that a checkpoint may have
MARK = b"fedlib checkpoint, SHA-256 of what follows the line: "

TidyRows = list[dict[str, Any]]
Diverged = dict[tuple[str, int], int]


@dataclass(frozen=True)
class Checkpoint:
    """Where and when to save what has been done, and when to stop.

    Parameters
    ----------
    path
        The file; a simulation goes on from it if it exists and belongs to the same algorithm, task,
        start, schedule and measure: to the code of its classes, and of functions in their modules
        that these call, and not of what is elsewhere. None saves nothing.
    every
        Save every so many rounds and after the last; 0 does not, and only goes on from a file.
    until
        Stop when ``time.monotonic()`` has passed this, and save then.

    Raises
    ------
    FedlibError
        For a number out of range.
    """

    path: str | Path | None = None
    every: int = 0
    until: float | None = None

    def __post_init__(self) -> None:
        check_whole_number("every", self.every, 0)
        if self.path is not None:
            object.__setattr__(self, "path", expand(self.path, "The path"))

    def due(self, done: int, last: bool) -> bool:
        """Say whether to save after so many rounds, or the last."""
        return self.every > 0 and (done % self.every == 0 or last)


def state_fields(state: State) -> dict[str, Any]:
    """Return what a state consists of, by name."""
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def save(
    path: str | Path, state: State, rows: TidyRows, diverged: Diverged, label: str, algorithm: str
) -> None:
    """Write a checkpoint of plain values and tensors, with a hash of itself."""
    buffer = io.BytesIO()
    plain = {name: _plain(value, name) for name, value in state_fields(state).items()}
    whole = {"label": label, "algorithm": algorithm, "state": plain}
    torch.save(whole | {"rows": rows, "diverged": diverged}, buffer)
    content = buffer.getvalue()
    make_folder(Path(path).parent)
    publish(Path(path), MARK + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def restore(path: str | Path, state: S, label: str, algorithm: str) -> tuple[S, TidyRows, Diverged]:
    """Read a checkpoint of this label; nothing in it is ever run. The algorithm is shown only."""
    try:
        with open_regular(Path(path), LARGEST_CHECKPOINT) as file:
            first, _, content = file.read().partition(b"\n")
        if first != MARK + hashlib.sha256(content).hexdigest().encode():
            raise ValueError("it is damaged, or no checkpoint")
        saved = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        check_saved(saved)
    except Exception as error:
        raise FedlibError(
            f"Checkpoint {path} cannot be read ({error}). Delete it if it is a checkpoint, "
            "or choose another file."
        ) from error
    if saved["label"] != label:
        raise FedlibError(
            f"Checkpoint {path} belongs to another run, or to other code.\n"
            f"  found:    {saved['label']}, {saved.get('algorithm', '')}\n"
            f"  expected: {label}, {algorithm}\nDelete it or choose another file."
        )
    if set(saved["state"]) != set(state_fields(state)):
        raise FedlibError(f"Checkpoint {path} does not hold a whole state. Delete it.")
    whole = {name: _whole(value, state.x.device) for name, value in saved["state"].items()}
    return dataclasses.replace(state, **whole), saved["rows"], saved["diverged"]


def check_saved(saved: Any) -> None:
    """Refuse what is no checkpoint, though its hash is right."""
    kinds = {"label": str, "state": dict, "rows": list, "diverged": dict}
    whole = isinstance(saved, dict) and all(isinstance(saved.get(k), v) for k, v in kinds.items())
    if not whole:
        raise ValueError(f"it holds no {', '.join(kinds)}")


def _plain(value: Any, name: str) -> Any:
    """Return a value as a checkpoint holds it: arrays as tensors in a box."""
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)([_plain(one, name) for one in value])
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        return value
    raise FedlibError(
        f"The state's {name} holds a {type(value).__name__}. A checkpoint holds tensors, arrays, "
        "numbers and words, and lists and tuples of them."
    )


def _whole(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return value["array"].numpy()
    if isinstance(value, list | tuple):
        return type(value)([_whole(one, device) for one in value])
    return value.to(device) if isinstance(value, torch.Tensor) else value
