"""Files that are whole or not there, folders that can be written, and digests of what is held."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import os
import re
import stat
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedlib.errors import FedlibError

ANOTHER_FOLDER = "Choose another with --out."
GIVEN = ("torch", "builtins", "typing", "abc", "enum")  # packages whose code is not one's own
OLD = 3600  # seconds after which a half-written file was left by a process that was killed


def publish(path: Path, content: bytes, instead: str = ANOTHER_FOLDER) -> None:
    """Write a file under a name of its own beside its place, and move it there in one step.

    A link at that place is replaced, never followed. ``instead`` says what to do if it cannot be
    written.

    Raises
    ------
    FedlibError
        When it cannot be written; nothing half-written stays behind.
    """
    part = None
    try:
        for left in path.parent.glob(f".{path.name}.*.part"):
            with contextlib.suppress(FileNotFoundError):  # another process was at it
                if time.time() - left.lstat().st_mtime > OLD:
                    left.unlink()
        handle, part = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException as error:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
        if isinstance(error, OSError):
            raise cannot_write(path, error, instead) from error
        raise


def make_folder(path: Path, instead: str = ANOTHER_FOLDER) -> Path:
    """Make a folder that can be written, or say that another one has to be chosen."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise cannot_write(path, error, instead) from error
    return path


def open_regular(path: Path, most: int) -> io.BufferedReader:
    """Open a file of somebody else's, which may be anything, for reading.

    Raises
    ------
    OSError
        Also for more than ``most`` bytes, and for a pipe or a device: to wait for its first byte
        or its last one may take for ever.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > most:
        raise OSError(f"{status.st_size} bytes long, at most {most} were expected")
    return path.open("rb")


def cannot_write(path: Path, error: OSError, instead: str = ANOTHER_FOLDER) -> FedlibError:
    """Return the error for a file or folder that cannot be written."""
    return FedlibError(f"Cannot write to {path}: {error.strerror or error}. {instead}")


def digest(*things: Any) -> str:
    """Return a SHA-256 of what things hold, to the last entry, which ``repr`` may leave out.

    Arrays and tensors count by their bytes, objects by their fields, functions by their qualified
    name, their code and what they have closed over; all else counts as it prints.
    """
    sha256 = hashlib.sha256()
    for thing in things:
        _feed(sha256, thing, ())
    return sha256.hexdigest()


def own_code(kind: type) -> list[Any]:
    """Return what a class and its bases define, for :func:`digest`; those of torch left out.

    With the functions of their own modules that they call.
    """
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in GIVEN]
    found = [
        (name, _function(value)) for base in bases for name, value in vars(base).items()
        if not name.startswith("__") or isinstance(value, types.FunctionType)
    ]  # fmt: skip
    for _, value in found:  # which grows
        if isinstance(value, types.FunctionType):
            called = ((n, value.__globals__.get(n)) for n in value.__code__.co_names)
            found += [
                (n, f) for n, f in called
                if isinstance(f, types.FunctionType) and f.__module__ == value.__module__
                and (n, f) not in found
            ]  # fmt: skip
    return found


def _function(value: Any) -> Any:
    """Return the function behind what a class defines, or the value itself."""
    for name in ("__func__", "fget", "func"):  # static or class method, property, cached property
        value = getattr(value, name, value)
    return value


def _feed(sha256: Any, thing: Any, above: tuple[int, ...]) -> None:
    """Add one thing to a hash; what holds itself is not followed twice."""
    torch = sys.modules.get("torch")  # there are no tensors where nobody has imported it
    if torch and isinstance(thing, torch.Tensor):
        thing = thing.detach().cpu().numpy()
    if isinstance(thing, np.ndarray) and thing.dtype != object:
        sha256.update(f"{thing.dtype} {thing.shape}".encode())
        sha256.update(np.ascontiguousarray(thing).tobytes())
    elif (parts := _parts(thing)) is None:
        sha256.update(re.sub(" at 0x[0-9A-Fa-f]+", "", repr(thing)).encode())
    elif id(thing) not in above:
        inner = hashlib.sha256()
        for part in parts:
            _feed(inner, part, (*above, id(thing)))
        sha256.update(inner.hexdigest().encode())
    sha256.update(b"\0")


def _parts(thing: Any) -> Iterable[Any] | None:
    """Return what something is made of; None where it says all when it prints itself."""
    match thing:
        case list() | tuple():
            return thing
        case Mapping():
            return [*thing.keys(), *thing.values()]
        case set() | frozenset():
            return sorted(map(digest, thing))
        case np.ndarray():
            return [thing.shape, thing.tolist()]
        case functools.partial():
            return [thing.func, thing.args, thing.keywords]
        case types.MethodType() | types.BuiltinFunctionType():
            return [thing.__qualname__, thing.__self__]
        case types.FunctionType():
            enclosed = [cell.cell_contents for cell in thing.__closure__ or ()]
            defaults = [thing.__defaults__, thing.__kwdefaults__]
            return [thing.__module__, thing.__qualname__, thing.__code__, defaults, enclosed]
        case types.CodeType():
            return [thing.co_code, thing.co_names, thing.co_consts]
        case type() | types.ModuleType():
            return None
    fields = dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ()
    attributes = {f.name: getattr(thing, f.name) for f in fields} | getattr(thing, "__dict__", {})
    kept = {k: v for k, v in attributes.items() if not _cached(thing, k)}
    return [re.sub(" at 0x[0-9A-Fa-f]+", "", repr(thing)), kept] if attributes else None


def _cached(thing: Any, name: str) -> bool:
    return isinstance(getattr(type(thing), name, None), functools.cached_property)
