"""Pages of facts against the shape they must have: no unknown keys, none missing, no wrong types.

A shape is a `TypedDict <https://docs.python.org/3/library/typing.html#typing.TypedDict>`_ that
inherits from :class:`Page`, a dataclass with the same ``__pydantic_config__``, or a container of
them. Pydantic does the checking. A machine that only computes may lack it; pages are then read as
they are, and that of experiments warns.
"""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict, is_typeddict

from fedlib.errors import FedlibError, nearest

try:
    import pydantic
    from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
except ImportError:
    pydantic = None  # type: ignore[assignment]
    NonNegativeInt = PositiveInt = int
    NonNegativeFloat = PositiveFloat = float

__all__ = ["CLOSED", "NonNegativeFloat", "NonNegativeInt", "Page", "PositiveFloat", "PositiveInt",
           "conform", "keys", "read_toml"]  # fmt: skip

CLOSED = {"extra": "forbid", "strict": True}
FAULTS_SHOWN = 5  # faults told at once


class Page(TypedDict):
    """What every closed table inherits from: keys that it does not name are errors."""


Page.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]  # where pydantic looks for it


def read_toml(path: Path, shape: Any) -> Any:
    """Read a TOML file that has a shape.

    Raises
    ------
    FedlibError
        When it cannot be read, or has another shape: with file, table, key and the nearest valid
        one.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise FedlibError(f"{path} cannot be read: {error}.") from error
    return conform(values, shape, str(path))


def conform(values: Any, shape: Any, source: str) -> Any:
    """Return plain values in the shape they must have: lists as tuples, tables as dataclasses.

    Parameters
    ----------
    values
        Dictionaries, lists, words, numbers.
    source
        What they were read from, for the message.

    Raises
    ------
    FedlibError
        With table, key, what was there and what was expected; the first few faults.
    """
    if pydantic is None:
        return _unchecked(values, shape)
    try:
        return _adapter(shape).validate_json(json.dumps(values), strict=True)
    except pydantic.ValidationError as error:
        faults = list(dict.fromkeys(_fault(fault, values, shape) for fault in error.errors()))
    except (TypeError, ValueError, RecursionError) as error:
        faults = [f"{error}"]
    more = [f"and {len(faults) - FAULTS_SHOWN} more."] * (len(faults) > FAULTS_SHOWN)
    lines = [f"{source} is not as it should be:", *faults[:FAULTS_SHOWN], *more]
    raise FedlibError("\n  ".join(lines))


@functools.lru_cache(maxsize=64)
def _adapter(shape: Any) -> Any:
    """Return what checks a shape; making it takes longer than most checks."""
    return pydantic.TypeAdapter(shape)


@functools.lru_cache(maxsize=64)
def keys(shape: Any) -> tuple[str, ...]:
    """Return the keys that a shape knows."""
    if is_dataclass(shape):
        return tuple(field.name for field in fields(shape))
    return tuple(get_type_hints(shape)) if is_typeddict(shape) else ()


def _fault(fault: Mapping[str, Any], values: Any, shape: Any) -> str:
    """Return a sentence about one fault that Pydantic found."""
    place, (key, value) = fault["loc"], (fault["loc"][-1] if fault["loc"] else "", fault["input"])
    table = " ".join(_labels(place[:-1], values))
    where = f"in {table}, " if table else ""
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}unknown key '{key}'.{nearest(str(key), keys(_at(place[:-1], shape)))}"
    if fault["type"] == "missing":
        return f"{where}'{key}' is missing."
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) < 60 else shown[:57] + "..."
    return f"{where}'{key}' is {shown}: {fault['msg'][0].lower()}{fault['msg'][1:]}."


def _labels(place: tuple[str | int, ...], value: Any) -> Iterator[str]:
    """Yield words for the way to a place; an item of a list goes by its own name."""
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return  # a part of the shape, not of what is held
        if isinstance(step, str):
            yield f"[{step}]" if isinstance(value, dict | list) else step
        else:
            table = value if isinstance(value, dict) else {}
            names = [table[k] for k in ("id", "run", "name") if k in table]
            yield f"'{names[0]}'" if names else f"number {step + 1}"


def _at(place: tuple[Any, ...], shape: Any) -> Any:
    """Return the shape at a place: the value of a key, or of any key or item of a container."""
    for step in place:
        shape = get_type_hints(shape).get(step) if keys(shape) else _inner(shape)
    return shape if keys(shape) else _inner(shape)


def _inner(shape: Any) -> Any:
    return next((a for a in reversed(get_args(shape)) if get_args(a) or keys(a)), None)


def _unchecked(values: Any, shape: Any) -> Any:
    """Return plain values in a shape, as far as that goes without a look at them."""
    if is_dataclass(shape) and isinstance(shape, type):
        hints = get_type_hints(shape)
        return shape(**{key: _unchecked(value, hints[key]) for key, value in values.items()})
    if isinstance(values, dict) and is_dataclass(inner := _inner(shape)):  # or None
        return _unchecked(values, inner)
    if isinstance(values, list) and get_origin(shape) is tuple:
        return tuple(_unchecked(value, get_args(shape)[0]) for value in values)
    return float(values) if shape is float else values
