"""Writers with hands of their own, made from images of digits: a substitute for FEMNIST."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
from scipy import ndimage

from fedlib.engine.checks import check_whole_number
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError, unknown

HAND = ("slant", "rotation", "scale", "stroke", "contrast")
"""What makes a hand, in the order of the columns of a style."""

BASES: dict[str, Callable[[], Any]] = {}
"""Sets of real images to make others from, each a function that loads it with pixels from 0 to 1;
`fedlib.datasets.loading` enters them."""

_ROWS = 2048  # images drawn at a time

Owned = tuple[tuple[str, ...], np.ndarray, np.ndarray, dict[str, np.ndarray]]


def writers(
    seed: int,
    split: str,
    rows: int,
    shape: tuple[int, int, int],
    classes: int,
    *,
    base: str,
    count: int,
    families: int = 0,
    deviation: float = 0.2,
    prior: float = 1.0,
    spread: float = 0.5,
    smallest: int = 2,
    slant: float = 0.4,
    rotation: float = 15.0,
    scale: float = 0.15,
    stroke: float = 0.8,
    contrast: float = 0.8,
    progress: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Let writers copy images, each in a hand and with favourite classes of its own.

    A writer has a style, five numbers from -1 to 1 that are fixed for all it writes, see `styles`
    and `drawn`; class probabilities from a symmetric Dirichlet law; and a log-normal weight by
    which it gets its share of the rows, the same share in both splits. Its training samples are
    copies of training images of the base set, its test samples copies of test images; it copies
    no image twice while there are others of that class. Two writers may copy the same image.

    Parameters
    ----------
    seed, split, rows
        Style, class probabilities and weight of a writer depend on the seed and its number; what
        it copies on the split's name, too.
    shape, classes
        Those of the base set.
    base
        Name of the set of real images.
    count
        Number of writers. Rows lie writer by writer, see `writer_owners`.
    families, deviation
        As in `styles`.
    prior
        Concentration of the Dirichlet law: small gives a writer few classes, large all equally.
    spread
        Standard deviation of the logarithm of a weight; 0 makes all writers equally large.
    smallest
        Rows that every writer has at least, in either split.
    slant, rotation, scale, stroke, contrast
        How far a style reaches, see `drawn`.
    progress
        Show a progress bar.

    Returns
    -------
    x
        ``uint8 [rows, *shape]``.
    y
        ``uint8 [rows]``, class numbers.

    Raises
    ------
    FedlibError
        For an unknown base set, one of another shape, too few rows, or a number out of range.
    """
    from tqdm import tqdm

    _check(families, deviation, prior, spread, stroke, scale)
    sizes = shares(seed, count, rows, spread, smallest)
    images, labels = _images(base, split, shape, classes)
    pools = [np.flatnonzero(labels == c) for c in range(classes)]
    source = np.concatenate(
        [_copied(seed, split, n, size, pools, prior) for n, size in enumerate(sizes)]
    )
    reach = np.array([slant, rotation, scale, stroke, contrast])
    style = np.repeat(reach * styles(seed, count, families, deviation)[0], sizes, axis=0)
    x = np.empty((rows, *shape), dtype=np.uint8)
    chunks = range(0, rows, _ROWS)
    for start in tqdm(chunks, f"writers {split}", leave=False, disable=not progress):
        part = slice(start, start + _ROWS)
        x[part, 0] = np.rint(255 * drawn(images[source[part]], style[part]))
    return x, labels[source].astype(np.uint8)


def writer_owners(card: Any) -> Owned:
    """Return names of writers, whose each training and test row is, and what is known of them.

    Parameters
    ----------
    card
        `fedlib.datasets.Card` with a ``generator`` table of the kind ``"writers"``.

    Returns
    -------
    names, train, test
        ``"writer 000"``, ...; the writer's number for each row.
    traits
        ``"style"``: ``[writers, 5]``, columns as in `HAND`, each from -1 to 1; ``"family"``:
        ``[writers]``, -1 where there are none; ``"prior"``: ``[writers, classes]``.
    """
    asked = {p.name: p.default for p in signature(writers).parameters.values()} | card.generator
    seed, count = asked["seed"], asked["count"]
    style, family = styles(seed, count, asked["families"], asked["deviation"])
    train, test = (
        np.repeat(np.arange(count), shares(seed, count, rows, asked["spread"], asked["smallest"]))
        for rows in (card.train, card.test)
    )
    prior = [_chances(seed, n, len(card.classes), asked["prior"]) for n in range(count)]
    names = tuple(f"writer {n:03d}" for n in range(count))
    return names, train, test, {"style": style, "family": family, "prior": np.stack(prior)}


def styles(
    seed: int, count: int, families: int = 0, deviation: float = 0.2
) -> tuple[np.ndarray, np.ndarray]:
    """Return the style of each writer, ``[writers, 5]``, and its family, ``[writers]``.

    Without families every number is uniform from -1 to 1. With them a style is
    ``(1 - deviation) centre + deviation own``, where the centre belongs to the family and both
    are uniform from -1 to 1; writers join the families in turn. Adding writers changes no style
    of those before.

    Parameters
    ----------
    deviation
        From 0, one hand a family, to 1, as without families.
    """
    personal = np.stack(
        [stream(seed, "writer style", n).uniform(-1, 1, len(HAND)) for n in range(count)]
    )
    if not families:
        return personal, np.full(count, -1)
    centre = np.stack(
        [stream(seed, "writer family", k).uniform(-1, 1, len(HAND)) for k in range(families)]
    )
    family = np.arange(count) % families
    return (1 - deviation) * centre[family] + deviation * personal, family


def drawn(images: np.ndarray, style: np.ndarray) -> np.ndarray:
    """Draw each image in a hand: thicken or thin, then turn and stretch, then darken or pale.

    Parameters
    ----------
    images
        Ink from 0 to 1, ``[n, height, width]``.
    style
        ``[n, 5]``. *slant*: each row moves right by so many pixels for every pixel that it lies
        above the middle. *rotation*: degrees, anticlockwise. *scale*: so much larger, as a share.
        *stroke*, from -1 to 1: how far ink goes towards the largest of its 3x3 neighbourhood, or,
        below 0, towards the smallest. *contrast*: ink becomes ``ink ** (2 ** -contrast)``.

    Returns
    -------
    numpy.ndarray
        Ink from 0 to 1, ``float64 [n, height, width]``. A style of zeros leaves the images as they
        are.
    """
    ink = images.astype(np.float64)
    slant, turn, scale, stroke, contrast = style.T
    weight = np.abs(stroke)[:, None, None]
    wide, thin = (f(ink, (1, 3, 3)) for f in (ndimage.grey_dilation, ndimage.grey_erosion))
    ink = (1 - weight) * ink + weight * np.where(stroke[:, None, None] > 0, wide, thin)
    sin, cos = np.sin(np.radians(turn)), np.cos(np.radians(turn))
    lean = np.array([[np.ones_like(slant), np.zeros_like(slant)], [-slant, np.ones_like(slant)]])
    twist = np.array([[cos, -sin], [sin, cos]])  # of (down, right)
    forward = (1 + scale) * np.einsum("ijn,jkn->ikn", twist, lean)
    back = np.linalg.inv(forward.transpose(2, 0, 1))  # where the ink of a pixel comes from
    middle = (np.array(ink.shape[1:]) - 1) / 2
    moved = [
        ndimage.affine_transform(image, matrix, middle - matrix @ middle, order=1)
        for image, matrix in zip(ink, back, strict=True)
    ]
    return np.clip(moved, 0, 1) ** (2.0 ** -contrast[:, None, None])


def shares(seed: int, count: int, rows: int, spread: float, smallest: int) -> np.ndarray:
    """Return how many rows each writer has: ``smallest``, and of the rest by its weight.

    Raises
    ------
    FedlibError
        When there are not enough rows for that.
    """
    check_whole_number("count", count)
    check_whole_number("smallest", smallest)
    rest = rows - count * smallest
    if rest < 0:
        raise FedlibError(f"{rows} rows are too few for {count} writers with {smallest} each.")
    weight = np.array([stream(seed, "writer size", n).lognormal(0, spread) for n in range(count)])
    ideal = rest * weight / weight.sum()
    sizes = np.floor(ideal).astype(int)
    sizes[np.argsort(sizes - ideal, kind="stable")[: rest - sizes.sum()]] += 1
    return smallest + sizes


def _chances(seed: int, writer: int, classes: int, prior: float) -> np.ndarray:
    """Return how likely each class is with a writer."""
    return stream(seed, "writer classes", writer).dirichlet(np.full(classes, prior))


def _copied(
    seed: int, split: str, writer: int, size: int, pools: list[np.ndarray], prior: float
) -> np.ndarray:
    """Return which images of the base set a writer copies, ``[size]``."""
    rng = stream(seed, f"writer copies {split}", writer)
    label = rng.choice(len(pools), size, p=_chances(seed, writer, len(pools), prior))
    source = np.empty(size, dtype=np.int64)
    for c in np.unique(label):
        here = np.flatnonzero(label == c)
        source[here] = rng.choice(pools[c], len(here), replace=len(here) > len(pools[c]))
    return source


def _images(
    base: str, split: str, shape: tuple[int, ...], classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[n, height, width]`` and labels of one split of the base set."""
    if base not in BASES:
        raise unknown("set of images to make writers from", base, BASES)
    data = BASES[base]()
    if data.train_x.shape[1:] != tuple(shape) or len(data.classes) != classes or shape[0] != 1:
        raise FedlibError(
            f"Writers made from '{base}' have its grey images, {data.train_x.shape[1:]}, and its "
            f"{len(data.classes)} classes; asked for were {tuple(shape)} and {classes}."
        )
    train = split == "train"
    x, y = (data.train_x, data.train_y) if train else (data.test_x, data.test_y)
    return x[:, 0], y


def _check(
    families: int, deviation: float, prior: float, spread: float, stroke: float, scale: float
) -> None:
    check_whole_number("families", families, 0)
    fine = 0 <= deviation <= 1 and 0 < prior < np.inf and 0 <= spread < np.inf
    if not (fine and 0 <= stroke <= 1 and 0 <= scale < 1):
        raise FedlibError(
            "Writers need deviation and stroke in [0, 1], scale in [0, 1), prior above 0 and "
            f"spread of at least 0; got {deviation}, {stroke}, {scale}, {prior} and {spread}."
        )
