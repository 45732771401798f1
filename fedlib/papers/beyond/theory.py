"""Where amplified merges end on quadratic bowls, how fast they get there, and the best factor.

One unamplified merge takes the share m off the distance to its end. Group i with curvature L,
``t_i`` exact iterations of size α and the share ``w_i`` of the clients gives
``m = Σ_i (w_i / t_i) (1 - (1 - α L)^t_i)``, whose parts are :func:`pulls`; the end is the mean of
the minimisers with these parts as weights. The derivations are in the last chapter of the book.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedlib.engine.checks import check_between, check_positive, check_whole_number
from fedlib.papers.bound import as_array
from fedlib.papers.hierarchy.algorithm import weights
from fedlib.papers.methods.theory import pull


def pulls(
    curvature: Any, lr: float, counts: Any, sizes: Sequence[int], merge: str = "normalised"
) -> np.ndarray:
    """Return by which share of the way to its minimiser each group moves the model in a merge.

    Parameters
    ----------
    curvature
        Of each group, ``[..., G]``.
    lr
        Step size α.
    counts
        Iterations of each group, ``[G]``.
    sizes
        Clients of each group, ``[G]``.
    merge
        As for :class:`~fedlib.papers.hierarchy.algorithm.HierarchicalSGD`.
    """
    return weights(merge, sizes, np.atleast_2d(counts))[0] * pull(curvature, lr, counts)


def _taken(m: Any, interval: int) -> np.ndarray:
    """Return which share of the distance an interval takes off before it is amplified."""
    check_whole_number("interval", interval)
    return 1 - (1 - as_array(m)) ** interval


def kept(m: Any, amplify: float, interval: int) -> np.ndarray:
    """Return ``1 - η (1 - (1 - m)^P)``: by what an interval multiplies the distance to the end.

    Parameters
    ----------
    m
        What one unamplified merge takes off, of any shape.
    amplify, interval
        η and P.
    """
    return 1 - amplify * _taken(m, interval)


def largest_factor(m: Any, interval: int) -> np.ndarray:
    """Return ``2 / (1 - (1 - m)^P)``: all smaller η > 0 converge, no other does."""
    return 2 / _taken(m, interval)


def best_factor(slow: float, fast: float, interval: int = 1) -> tuple[float, float]:
    """Return the best η at an interval P, and what of the distance it keeps a *merge*.

    Of all directions whose shares m lie between ``slow`` and ``fast`` the worst one counts. With
    ``s = 1 - (1 - m)^P`` at either end, ``η = 2 / (s_slow + s_fast)`` keeps
    ``(s_fast - s_slow) / (s_fast + s_slow)`` an interval. No P keeps less a merge than 1.

    Parameters
    ----------
    slow, fast
        The smallest and the largest m, ``0 < slow <= fast <= 1``.
    interval
        P.
    """
    check_between("slow", slow, 0)
    check_between("fast", fast, slow, 1 + 1e-12)
    check_positive("slow", slow)
    check_whole_number("interval", interval)
    low, high = (1 - fast) ** interval, (1 - slow) ** interval  # what is left, 1 - s
    return 2 / (2 - low - high), ((high - low) / (2 - low - high)) ** (1 / interval)


def cycle(m: Any, ends: Any, amplify: float = 1.0, every: bool = False) -> tuple[Any, Any]:
    """Return where a cycle of merges ends where it began, and by what it multiplies the distance.

    Parameters
    ----------
    m
        What each merge of the cycle takes off, ``[C]`` or ``[C, D]``, below 1.
    ends
        Where it alone would lead, ``[C]`` or ``[C, D]``: the mean of the minimisers of those who
        are there.
    amplify
        η, after the last merge of the cycle; with ``every`` after each of them.

    Returns
    -------
    end, keep
        Of shape ``[]`` or ``[D]``.
    """
    x, keep, eta = 0.0, 1.0, amplify if every else 1.0
    for one, end in zip(eta * as_array(m), as_array(ends), strict=True):
        x, keep = x + one * (end - x), keep * (1 - one)
    return x / (1 - keep), keep if every else 1 - amplify * (1 - keep)
