"""Errors written for people: what came, what was expected, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedlibError(Exception):
    """A mistake in what was asked for. The command line prints it without a traceback."""


def unknown(kind: str, name: str, valid: Iterable[str]) -> FedlibError:
    """Return the error for an unknown name, with the nearest valid one suggested.

    Parameters
    ----------
    kind
        What the name was meant to name, in words: ``"data set"``.
    name
        What was given.
    valid
        Every name that would have worked.
    """
    valid = sorted(valid)
    return FedlibError(f"Unknown {kind} '{name}'.{nearest(name, valid)}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a hint at the nearest valid name and the list of all, to follow a sentence."""
    near = difflib.get_close_matches(str(name), valid := list(valid), n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"{hint} Valid: {', '.join(valid)}."
