"""Made data: substitutes for sets that may not be passed on.

A card whose ``[generator]`` table names a kind is made from its seed, and from the real images of
its ``base`` where it has one. Values are rounded to the card's ``scale``, so that one seed gives
the same bytes on every machine; the card holds their hash. What a substitute can and cannot show
stands on its card.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import numpy as np
from scipy.special import expit, logit

from fedlib.datasets.writers import writers
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown

QUARTERS = 4
"""Feature blocks of `ehr_like` that have a hidden cause of their own."""

_SHARED = 2  # hidden causes common to all quarters
_ROWS = 512  # rows made at a time, so that nothing large is ever held twice

_KEEP = 2  # sets kept in memory

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

_kept: dict[str, tuple[Arrays, str]] = {}


def generate(card: Any, progress: bool = True) -> tuple[Arrays, str]:
    """Make the arrays of a card; the two last sets made are kept in memory.

    Parameters
    ----------
    card
        `fedlib.datasets.Card` with a ``generator`` table: ``kind``, ``seed`` and the keyword
        arguments of the function of that kind, `ehr_like`, `shapes` or
        `fedlib.datasets.writers.writers`.
    progress
        Show a progress bar for a set that takes more than a moment.

    Returns
    -------
    arrays
        Training features and labels, test features and labels, read-only. Features are whole
        numbers ``[n, *card.shape]``, to be divided by ``card.scale``; labels ``uint8 [n]``.
    sha256
        Hash of the four arrays' bytes, one after the other.

    Raises
    ------
    FedlibError
        If the table names an unknown kind, or an option that this kind does not have.
    """
    key = repr((sorted(card.generator.items()), card.shape, card.train, card.test, card.classes))
    if key not in _kept:
        made = _make(card, progress)
        while len(_kept) >= _KEEP:
            _kept.pop(next(iter(_kept)))
        _kept[key] = made
    return _kept[key]


def _make(card: Any, progress: bool) -> tuple[Arrays, str]:
    options = dict(card.generator)
    kind, seed = options.pop("kind", ""), options.pop("seed", 0)
    if kind not in GENERATORS:
        raise unknown("generator", kind, GENERATORS)
    known = signature(GENERATORS[kind]).parameters.values()
    allowed = [p.name for p in known if p.kind == p.KEYWORD_ONLY and p.name != "progress"]
    for name in options:
        if name not in allowed:
            raise unknown(f"option of the generator {kind}:", name, allowed)
    arrays: list[np.ndarray] = []
    digest = hashlib.sha256()
    for split, rows in (("train", card.train), ("test", card.test)):
        made = GENERATORS[kind](
            seed, split, rows, card.shape, len(card.classes), progress=progress, **options
        )
        arrays.extend(made)
    for array in arrays:
        array.setflags(write=False)
        digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).data)
    train_x, train_y, test_x, test_y = arrays
    return (train_x, train_y, test_x, test_y), digest.hexdigest()


# --- hospital stays ------------------------------------------------------------------------------


def ehr_like(
    seed: int,
    split: str,
    rows: int,
    shape: tuple[int, int] = (48, 76),
    classes: int = 2,
    *,
    positives: float = 0.13,
    correlation: float = 0.3,
    persistence: float = 0.95,
    strength: float = 3.0,
    trend: float = 0.5,
    noise: float = 1.0,
    informative: float = 0.5,
    measured: tuple[float, float] = (0.1, 0.9),
    progress: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Make stays: hourly channels driven by hidden severities, most of them often not measured.

    Six severities follow ``z_t = a z_{t-1} + sqrt(1 - a^2) e_t`` with variance 1. Two are shared;
    each quarter of the columns has one of its own. A channel of quarter q is
    ``x_t = (w . z_t + noise e) / sqrt(1 + noise^2)`` with ``|w| = 1``, of which a share
    ``correlation`` of ``|w|^2`` lies on the shared severities. Where a channel is not measured its
    last value is carried forward, or 0, its mean, when there is none. Columns alternate: value of
    channel 0, its mask (1: measured), value of channel 1, its mask, ...

    With ``g_t = b . z_t``, ``|b| = 1`` and the same shares, the label is Bernoulli with logit
    ``strength s + intercept``, where ``s`` is ``g_T + trend (g_T - g_1)`` scaled to variance 1.

    Parameters
    ----------
    seed, split, rows
        Channels depend on the seed; stays on the seed and the split's name.
    shape
        Steps (hours) and columns; the columns are an even number, two a channel.
    classes
        Always 2.
    positives
        Probability of label 1, in (0, 1); it fixes the intercept.
    correlation
        Share of every channel's signal that all quarters have in common, in [0, 1]: 0 makes the
        quarters independent, 1 makes them redundant.
    persistence
        ``a``, in [0, 1).
    strength, trend, noise
        As above.
    informative
        How much the log-odds of being measured grow with the quarter's own severity.
    measured
        Lowest and highest share of hours in which a channel of average severity is measured.
    progress
        Show a progress bar.

    Returns
    -------
    x
        ``int16 [rows, steps, columns]``, in thousandths.
    y
        ``uint8 [rows]``, 0 or 1.

    Raises
    ------
    FedlibError
        If the number of columns is odd or a parameter is out of its range.
    """
    steps, columns = shape
    if columns % 2 or classes != 2:
        raise FedlibError(
            f"ehr_like makes an even number of columns and 2 classes; {columns} and {classes} "
            "were asked for."
        )
    if not (0 < positives < 1 and 0 <= correlation <= 1 and 0 <= persistence < 1):
        raise FedlibError(
            f"ehr_like needs positives in (0, 1), correlation in [0, 1] and persistence in [0, 1); "
            f"got {positives}, {correlation} and {persistence}."
        )
    channels = columns // 2
    quarter = 2 * np.arange(channels) * QUARTERS // columns
    rng = stream(seed, "ehr-like")
    w = _loadings(rng, quarter, correlation)
    rate = logit(rng.uniform(*measured, channels))
    directions, b = _severity(correlation)
    memory = persistence ** (steps - 1)
    scale = strength / np.sqrt((1 + trend) ** 2 + trend**2 - 2 * trend * (1 + trend) * memory)
    intercept = _intercept(positives, strength)
    x = np.empty((rows, steps, columns), dtype=np.int16)
    y = np.empty(rows, dtype=np.uint8)
    for start, stop in _chunks(rows, f"ehr-like {split}", progress):
        rng = stream(seed, f"ehr-like {split}", start)
        z = _autoregression(rng, stop - start, steps, persistence)
        values = z @ w.T + noise * rng.standard_normal((stop - start, steps, channels))
        chance = expit(rate + informative * (z @ directions.T)[:, :, quarter])
        mask = rng.random(chance.shape) < chance
        x[start:stop, :, 0::2] = np.rint(1000 * _carried(values / np.hypot(1, noise), mask))
        x[start:stop, :, 1::2] = 1000 * mask
        g = z @ b
        odds = scale * (g[:, -1] + trend * (g[:, -1] - g[:, 0])) + intercept
        y[start:stop] = rng.random(stop - start) < expit(odds)
    return x, y


def _loadings(rng: np.random.Generator, quarter: np.ndarray, correlation: float) -> np.ndarray:
    """Return unit rows ``[channels, 6]``, zero on the severities of other quarters."""
    shared = rng.standard_normal((len(quarter), _SHARED))
    shared /= np.linalg.norm(shared, axis=1, keepdims=True)
    w = np.zeros((len(quarter), _SHARED + QUARTERS))
    w[:, :_SHARED] = np.sqrt(correlation) * shared
    sign = rng.choice([-1.0, 1.0], len(quarter))
    w[np.arange(len(quarter)), _SHARED + quarter] = np.sqrt(1 - correlation) * sign
    return w


def _severity(correlation: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the directions of each quarter's severity ``[4, 6]`` and of the whole's ``[6]``."""
    common = np.full((QUARTERS, _SHARED), np.sqrt(correlation / _SHARED))
    quarters = np.hstack([common, np.sqrt(1 - correlation) * np.eye(QUARTERS)])
    whole = np.append(common[0], np.full(QUARTERS, np.sqrt((1 - correlation) / QUARTERS)))
    return quarters, whole


def _intercept(positives: float, strength: float) -> float:
    """Return c with ``E sigmoid(strength s + c) = positives`` for a standard normal s."""
    from scipy.optimize import brentq  # slow to import, and seldom wanted

    s = np.linspace(-9, 9, 2001)
    density = np.exp(-(s**2) / 2)
    density /= density.sum()
    reach = 10 * (1 + abs(strength)) - logit(min(positives, 1 - positives))
    return brentq(lambda c: density @ expit(strength * s + c) - positives, -reach, reach)


def _autoregression(rng: np.random.Generator, rows: int, steps: int, a: float) -> np.ndarray:
    z = rng.standard_normal((rows, steps, _SHARED + QUARTERS))
    z[:, 1:] *= np.sqrt(1 - a**2)
    for t in range(1, steps):
        z[:, t] += a * z[:, t - 1]
    return z


def _carried(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Carry the last measured value forward along axis 1; 0 before the first."""
    step = np.arange(values.shape[1])[:, None]
    last = np.maximum.accumulate(np.where(mask, step, -1), axis=1)
    return np.where(last >= 0, np.take_along_axis(values, np.maximum(last, 0), axis=1), 0.0)


# --- shapes seen from all sides ------------------------------------------------------------------


def shapes(
    seed: int,
    split: str,
    rows: int,
    shape: tuple[int, int, int] = (12, 32, 32),
    classes: int = 40,
    *,
    points: int = 2048,
    parts: tuple[int, int] = (2, 4),
    spread: float = 0.5,
    shift: float = 0.25,
    heading: float = 45.0,
    elevation: float = 30.0,
    progress: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Make objects of random classes and look at each from all sides.

    A class is a list of boxes, ellipsoids and upright cylinders with sizes and places. An object
    of the class varies all of them; points are drawn on its surfaces, moved and scaled into the
    unit ball, and seen by `depth_views`.

    Parameters
    ----------
    seed, split, rows
        Classes depend on the seed; objects on the seed and the split's name.
    shape
        Views, image height and width; height and width are equal.
    classes
        Number of classes; they occur equally often, up to one object.
    points
        Surface points an object.
    parts
        Lowest and highest number of parts of a class.
    spread
        Every length of every part is multiplied by a factor drawn evenly from ``1 - spread`` to
        ``1 + spread``.
    shift
        Every part moves by up to this much along every axis; half-lengths are 0.1 to 0.5.
    heading
        The object turns about the vertical by up to this many degrees, either way.
    elevation
        Height of the cameras, in degrees above the horizon.
    progress
        Show a progress bar.

    Returns
    -------
    x
        ``uint8 [rows, views, height, width]``: 0 background, 1 farthest, 255 nearest.
    y
        ``uint8 [rows]``, class numbers.

    Raises
    ------
    FedlibError
        If the images are not square, or fewer points than parts are asked for.
    """
    views, height, width = shape
    if height != width or points < parts[1] or not 0 < parts[0] <= parts[1]:
        raise FedlibError(
            "shapes makes square images of objects with at least one point a part; asked for were "
            f"{height} x {width} pixels, {points} points and {parts[0]} to {parts[1]} parts."
        )
    recipes = [_recipe(stream(seed, "shapes class", label), parts) for label in range(classes)]
    y = (np.arange(rows) % classes).astype(np.uint8)
    stream(seed, f"shapes labels {split}").shuffle(y)
    x = np.empty((rows, *shape), dtype=np.uint8)
    for start, stop in _chunks(rows, f"shapes {split}", progress):
        for label in range(classes):
            here = start + np.flatnonzero(y[start:stop] == label)
            if len(here):
                rng = stream(seed, f"shapes {split}", start, label)
                cloud = _objects(rng, recipes[label], len(here), points, spread, shift, heading)
                x[here] = depth_views(cloud, views, height, elevation)
    return x, y


def depth_views(cloud: np.ndarray, views: int, size: int, elevation: float) -> np.ndarray:
    """Look at points from cameras on a circle, all turned to the origin, without perspective.

    Parameters
    ----------
    cloud
        Points ``float32 [n, points, 3]`` in the unit ball; the last coordinate is up.
    views
        Number of cameras. Camera k stands at ``360 k / views`` degrees from the first axis, seen
        from above and counted anticlockwise.
    size
        Image height and width in pixels.
    elevation
        Degrees above the horizon.

    Returns
    -------
    numpy.ndarray
        ``uint8 [n, views, size, size]``, first row on top: 0 where there is no point, else from 1
        (a full radius behind the origin) to 255 (a full radius before it), the nearest point.
    """
    images = np.zeros((len(cloud), views, size * size), dtype=np.uint8)
    tilt = np.radians(elevation)
    first = (np.arange(len(cloud)) * size * size)[:, None]
    x, y, z = np.moveaxis(cloud.astype(np.float32), -1, 0)
    sin, cos = np.float32(np.sin(tilt)), np.float32(np.cos(tilt))
    for k, turn in enumerate(2 * np.pi * np.arange(views) / views):
        c, s = np.float32(np.cos(turn)), np.float32(np.sin(turn))
        towards, right = x * c + y * s, y * c - x * s
        up, near = z * cos - towards * sin, towards * cos + z * sin
        pixel = first + _cell(-up, size) * size + _cell(right, size)
        image = np.zeros(len(cloud) * size * size, dtype=np.uint8)
        np.maximum.at(image, pixel.ravel(), (1 + _cell(near, 255)).astype(np.uint8).ravel())
        images[:, k] = image.reshape(len(cloud), -1)
    return images.reshape(len(cloud), views, size, size)


def _cell(at: np.ndarray, cells: int) -> np.ndarray:
    """Return which of the equal cells of [-1, 1] a coordinate lies in."""
    return np.clip((at + 1) * np.float32(cells / 2), 0, cells - 1).astype(np.int64)


def _recipe(rng: np.random.Generator, parts: tuple[int, int]) -> list[tuple]:
    """Return (surface, half-lengths, centre) of each part of a class; the first is central."""
    count = rng.integers(parts[0], parts[1] + 1)
    kinds = rng.integers(len(_SURFACES), size=count)
    halves = rng.uniform(0.1, 0.5, (count, 3))
    centres = rng.uniform(-0.6, 0.6, (count, 3)) * (np.arange(count) > 0)[:, None]
    return [(_SURFACES[k], h, c) for k, h, c in zip(kinds, halves, centres, strict=True)]


def _objects(
    rng: np.random.Generator,
    recipe: list[tuple],
    rows: int,
    points: int,
    spread: float,
    shift: float,
    heading: float,
) -> np.ndarray:
    """Return surface points of objects of one class, ``float32 [rows, points, 3]``."""
    area = np.array([h[0] * h[1] + h[1] * h[2] + h[2] * h[0] for _, h, _ in recipe])
    ends = np.rint(points * np.cumsum(area) / area.sum()).astype(int)
    cloud = np.empty((rows, points, 3), dtype=np.float32)
    for (surface, half, centre), start, stop in zip(recipe, [0, *ends], ends, strict=False):
        sizes = half * rng.uniform(1 - spread, 1 + spread, (rows, 1, 3))
        places = centre + rng.uniform(-shift, shift, (rows, 1, 3))
        on = surface(rng, (rows, stop - start), half)
        cloud[:, start:stop] = on * sizes.astype(np.float32) + places.astype(np.float32)
    turn = np.radians(rng.uniform(-heading, heading, (rows, 1)))
    c, s = np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)
    x, y = cloud[..., 0].copy(), cloud[..., 1].copy()
    cloud[..., 0], cloud[..., 1] = x * c - y * s, x * s + y * c
    cloud -= (cloud.min(axis=1, keepdims=True) + cloud.max(axis=1, keepdims=True)) / 2
    squared = cloud[..., 0] ** 2 + cloud[..., 1] ** 2 + cloud[..., 2] ** 2
    return cloud / np.sqrt(squared.max(axis=1))[:, None, None]


def _box(rng: np.random.Generator, shape: tuple[int, int], half: np.ndarray) -> np.ndarray:
    """Points on the cube [-1, 1]^3; faces get points by their area at the given half-lengths."""
    point = 2 * rng.random((*shape, 3), dtype=np.float32) - 1
    area = np.prod(half) / half
    axis = rng.choice(3, size=(*shape, 1), p=area / area.sum())
    side = np.take_along_axis(point, axis, axis=-1)
    np.put_along_axis(point, axis, np.where(side < 0, np.float32(-1), np.float32(1)), axis=-1)
    return point


def _ellipsoid(rng: np.random.Generator, shape: tuple[int, int], half: np.ndarray) -> np.ndarray:
    """Points on the unit sphere."""
    point = rng.standard_normal((*shape, 3), dtype=np.float32)
    return point / np.sqrt((point * point).sum(axis=-1, keepdims=True))


def _cylinder(rng: np.random.Generator, shape: tuple[int, int], half: np.ndarray) -> np.ndarray:
    """Points on the upright cylinder of radius 1 and half-height 1, lids included."""
    point = rng.standard_normal((*shape, 3), dtype=np.float32)
    point[..., :2] /= np.sqrt((point[..., :2] * point[..., :2]).sum(axis=-1, keepdims=True))
    point[..., 2] = 2 * rng.random(shape, dtype=np.float32) - 1
    side = half[2] * (half[0] + half[1])
    lid = rng.random(shape) < half[0] * half[1] / (half[0] * half[1] + side)
    radius = np.where(lid, np.sqrt(rng.random(shape, dtype=np.float32)), np.float32(1))
    point[..., :2] *= radius[..., None]
    point[..., 2] = np.where(lid, np.where(point[..., 2] < 0, -1, 1), point[..., 2])
    return point


def _chunks(rows: int, what: str, progress: bool) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) over all rows, with a bar when there are many."""
    from tqdm import tqdm

    hidden = not progress or rows < 8 * _ROWS
    for start in tqdm(range(0, rows, _ROWS), desc=what, leave=False, disable=hidden):
        yield start, min(start + _ROWS, rows)


_SURFACES = (_box, _ellipsoid, _cylinder)

GENERATORS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "ehr-like": ehr_like,
    "shapes": shapes,
    "writers": writers,
}
"""What a card's ``generator.kind`` may be."""
