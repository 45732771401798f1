"""Figures with one fixed look: the same colour, marker and line for a method all through a chapter.

Nothing here is called by an algorithm, and nothing of Jupyter is imported: the functions take
tidy records or plain arrays and draw on matplotlib axes.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fedlib.errors import FedlibError, unknown

# Eight hues after Okabe and Ito, each moved to a middle lightness, so that the contrast with
# white paper and with a dark page is at least 3 : 1. Meaning never rests on colour alone:
# markers and dashes tell the lines apart in grey.
BLUE, VERMILION, GREEN, ORANGE = "#0072b2", "#d55e00", "#00976e", "#b98200"
PURPLE, SKY, GREY, RED = "#b8629a", "#3f93cf", "#77736d", "#a8443f"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY, RED)

SOLID: tuple[float, ...] = ()
DASHED = (6.0, 2.0)
DASHDOT = (6.0, 2.0, 1.5, 2.0)
DOTTED = (1.5, 1.7)
LONG = (10.0, 2.5)
DASHDOTDOT = (6.0, 2.0, 1.5, 2.0, 1.5, 2.0)

# JupyterLab scales other images to its column, and leaves wide drawings wide.
FIT = "<style>.jp-RenderedSVG img{max-width:100%;height:auto}</style>"

_SPARE_MARKERS = ("H", "8", "1", "2", "3", "4", "+", "|")
_SPARE_DASHES = (DASHED, LONG, DASHDOT, DASHDOTDOT, DOTTED)


@dataclass(frozen=True)
class Style:
    """How one method looks.

    Attributes
    ----------
    label
        The words of the legend.
    color
        Hexadecimal colour.
    marker
        A matplotlib marker code.
    dashes
        Lengths of dash and gap in turn, in units of the line width; empty is a solid line.
    """

    label: str
    color: str
    marker: str = "o"
    dashes: tuple[float, ...] = SOLID

    @property
    def linestyle(self) -> str | tuple[int, tuple[float, ...]]:
        """The dashes in the form that matplotlib expects."""
        return (0, self.dashes) if self.dashes else "solid"

    @property
    def line(self) -> dict[str, object]:
        """Keywords for ``Axes.plot`` without the label, as ``plot(x, y, **style(name).line)``."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.linestyle}


_STYLES: dict[str, Style] = {
    # algorithms
    "amplified": Style("amplified", BLUE, "o", SOLID),
    "no-amplification": Style("no amplification", VERMILION, "s", DASHED),
    "wait-minibatch": Style("wait, minibatch", GREEN, "^", DASHDOT),
    "wait-full": Style("wait, full data", ORANGE, "D", DOTTED),
    "matched-rate": Style("matched rate", PURPLE, "v", LONG),
    # participation
    "full": Style("full", GREY, "P", SOLID),
    "independent": Style("independent", SKY, "<", DASHED),
    "regularized": Style("regularized", GREEN, ">", SOLID),
    "periodic": Style("periodic", VERMILION, "X", LONG),
    "periodic-sampler": Style("periodic, coded sampler", RED, "p", DASHDOT),
    "cyclic": Style("cyclic", ORANGE, "h", DASHDOTDOT),
    "markov": Style("Markov", PURPLE, "*", DOTTED),
    "drift": Style("drift", BLUE, "d", DASHDOT),
}


def style(name: str) -> Style:
    """Return the one style of a method or participation process.

    A name that is not in the table above gets a style computed from its letters: the same in every
    session, and with a marker that no name of the table uses.

    Parameters
    ----------
    name
        ``"amplified"``, ``"wait-full"``, ``"markov"``, ...
    """
    if name in _STYLES:
        return _STYLES[name]
    code = zlib.crc32(str(name).encode())
    code, color = divmod(code, len(PALETTE))
    code, marker = divmod(code, len(_SPARE_MARKERS))
    dashes = _SPARE_DASHES[code % len(_SPARE_DASHES)]
    return Style(str(name).replace("-", " "), PALETTE[color], _SPARE_MARKERS[marker], dashes)


def sweep(values: Iterable[Hashable], label: str = "{}") -> dict[Hashable, Style]:
    """Return ordered styles for the values of one setting, dark to bright.

    Parameters
    ----------
    values
        The values in the order of the legend.
    label
        A pattern for the legend: ``"η = {}"``.
    """
    values = list(values)
    shades = mpl.colormaps["viridis"](np.linspace(0.0, 0.72, max(len(values), 2)))
    markers, dashes = "os^DvP<X>p", (SOLID, DASHED, DASHDOT, DOTTED, LONG, DASHDOTDOT)
    return {
        value: Style(
            label.format(f"{value:g}" if isinstance(value, (int, float)) else value),
            mpl.colors.to_hex(shades[k]),
            markers[k % len(markers)],
            dashes[k % len(dashes)],
        )
        for k, value in enumerate(values)
    }


def use() -> None:
    """Set the defaults of every figure in the book.

    The background is white and opaque, so that a figure stays readable, as a card, on a dark
    page. In a running notebook the inline format is set as well, and drawings scale to its column.
    """
    mpl.style.use("fedlib.lab.show.book")
    mpl.rcParams["axes.prop_cycle"] = mpl.cycler(color=PALETTE)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.run_line_magic("config", "InlineBackend.figure_formats = ['svg']")
        shell.display_pub.publish({"text/html": FIT}, metadata={"live": True})  # not on the page


# --- curves from tidy records ---------------------------------------------------------------


def curves(
    frame: pd.DataFrame,
    metric: str,
    split: str | None = None,
    x: str = "round",
    by: str = "method",
    ax: Axes | None = None,
    band: str | None = "std",
    smooth: float = 1,
    xlabel: str | None = None,
    ylabel: str | None = None,
    styles: Mapping[Hashable, Style] | None = None,
    markers: int = 8,
    legend: bool = True,
) -> Axes:
    """Draw the mean over seeds of one metric, one line a method.

    Parameters
    ----------
    frame
        Tidy records with the columns ``seed``, ``split``, ``metric``, ``value``, the column
        named by ``x`` and the one named by ``by``.
    metric, split
        Which rows are drawn; ``split`` may be left out if only one split has the metric.
    x
        ``"round"`` or ``"clock"``.
    by
        The column that tells the lines apart. Numbers get the ordered styles of :func:`sweep`.
    ax
        Axes to draw on; a new figure by default.
    band
        ``"std"``: one sample standard deviation over seeds on each side of the mean;
        ``"range"``: from the smallest seed to the largest; ``None``: no band.
    smooth
        Width of a centred moving mean over each seed's record: a number of points, or, below
        one, a share of all points.
    xlabel, ylabel
        Names with units; the column and the metric by default.
    styles
        A :class:`Style` for values of ``by``; the others, and numbers, have one of their own.
    markers
        About how many markers stand on a line.
    legend
        Whether to draw one.

    Returns
    -------
    matplotlib.axes.Axes
        The axes, for further touches.

    Raises
    ------
    FedlibError
        If nothing matches, if rows remain that differ in more than method, seed and ``x``, or if
        seeds were looked at at different ``x``.

    Notes
    -----
    A run that ends in values that are not finite has diverged. It is not dropped in silence: a
    cross stands at its last finite value, the legend counts such runs, and from there on the
    mean is that of the seeds that are left.
    """
    rows = _rows(frame, metric, split, x, by)
    names = list(dict.fromkeys(rows[by]))
    if styles is None and all(isinstance(name, (int, float, np.number)) for name in names):
        styles = sweep(sorted(names))
    look = {name: style(str(name)) for name in names} | dict(styles or {})
    ax = plt.subplots()[1] if ax is None else ax
    for k, name in enumerate(names):
        table = _table(rows[rows[by] == name], x, by, name)
        _curve(ax, _smooth(table, smooth), look[name], band, markers, k / len(names))
    ax.set_xlabel(x if xlabel is None else xlabel)
    ax.set_ylabel(f"{split} {metric}" if ylabel is None and split else ylabel or metric)
    if legend:
        ax.legend()
    return ax


def _rows(frame: pd.DataFrame, metric: str, split: str | None, x: str, by: str) -> pd.DataFrame:
    """The rows of one metric and one split."""
    missing = {"seed", "metric", "value", x, by} - set(frame.columns)
    if missing:
        raise FedlibError(
            f"The records have the columns {', '.join(map(str, frame.columns))}; "
            f"{', '.join(sorted(missing))} is missing. Choose x and by among the columns."
        )
    rows = frame[frame["metric"] == metric]
    if rows.empty:
        raise unknown("metric", metric, map(str, frame["metric"].unique()))
    if "split" not in rows:
        return rows
    splits = [str(s) for s in rows["split"].unique()]
    if split is None and len(splits) > 1:
        raise FedlibError(
            f"'{metric}' is recorded on several splits, {', '.join(splits)}: choose one by split=."
        )
    if split is not None and split not in splits:
        raise unknown("split", split, splits)
    return rows if split is None else rows[rows["split"] == split]


def _table(rows: pd.DataFrame, x: str, by: str, name: Hashable) -> pd.DataFrame:
    """One method as a table [points, seeds]; what is not finite becomes NaN."""
    if rows.duplicated(["seed", x]).any():
        raise FedlibError(
            f"'{name}' has several values for one seed at one {x}. Filter the records first, or "
            f"choose for by= (now '{by}') a column that tells those runs apart."
        )
    finite = rows["value"].where(np.isfinite(rows["value"].astype(float)), np.inf)
    table = rows.assign(value=finite).pivot(index=x, columns="seed", values="value").sort_index()
    if (table.isna() & table.bfill().notna()).any(axis=None):  # not looked at, and later again
        raise FedlibError(
            f"Seeds of '{name}' were looked at at different values of {x}, so there is no mean "
            "over them. plotting.regrid puts them on common ones."
        )
    return table.where(np.isfinite(table))


def _smooth(table: pd.DataFrame, width: float) -> pd.DataFrame:
    """Centred moving mean; a value that is not there stays not there."""
    points = round(width * len(table)) if width < 1 else int(width)
    if points <= 1:
        return table
    return table.rolling(points, center=True, min_periods=1).mean().where(table.notna())


def _curve(
    ax: Axes, table: pd.DataFrame, look: Style, band: str | None, markers: int, shift: float
) -> None:
    """One line with its band, its sparse markers and a cross for each diverged run."""
    mean, spread = table.mean(axis=1), table.std(axis=1, ddof=1)
    last = {seed: table[seed].last_valid_index() for seed in table}
    diverged = [seed for seed in table if last[seed] != table.index[-1]]
    if diverged:
        look = replace(look, label=f"{look.label} ({len(diverged)} of {table.shape[1]} diverged)")
    step = max(1, len(table) // max(1, markers))
    every = (int(shift * step), step)
    ax.plot(table.index, mean, label=look.label, markevery=every, **look.line)
    if band is not None and table.shape[1] > 1:
        edges = {"std": (mean - spread, mean + spread), "range": (table.min(1), table.max(1))}
        if band not in edges:
            raise unknown("band", band, edges)
        ax.fill_between(table.index, *edges[band], color=look.color, alpha=0.18, linewidth=0)
    ends = [(last[seed], table.at[last[seed], seed]) for seed in diverged if last[seed] is not None]
    if ends:
        ax.plot(*zip(*ends, strict=True), "x", color=look.color, markersize=9, markeredgewidth=2.2)


def regrid(frame: pd.DataFrame, x: str, by: str = "run", points: int = 60) -> pd.DataFrame:
    """Return rows at common values of ``x``, so that seeds which were looked at elsewhere compare.

    For each line, split and metric, values run evenly from the smallest to the largest that *all*
    seeds have; between two looks of a seed they are interpolated. Of several looks at one ``x`` the
    last counts. What is not finite stays so.

    Parameters
    ----------
    frame
        Tidy records, see :func:`curves`.
    x
        A column of numbers, as ``"rounds"``.
    by
        The column that tells the lines apart.
    points
        How many values of ``x`` there are.
    """
    parts, keys = [], [by, "split", "metric"]
    for names, rows in frame.groupby(keys, sort=False):
        seeds = [one.drop_duplicates(x, keep="last").sort_values(x)
                 for _, one in rows.groupby("seed")]  # fmt: skip
        at = np.linspace(max(s[x].min() for s in seeds), min(s[x].max() for s in seeds), points)
        for one in seeds:
            labels = {**dict(zip(keys, names, strict=True)), "seed": one["seed"].iloc[0]}
            value = np.interp(at, one[x].astype(float), one["value"])
            parts.append(pd.DataFrame({**labels, x: at, "value": value}))
    return pd.concat(parts, ignore_index=True)


# --- other pictures -------------------------------------------------------------------------


def missing(message: str) -> Axes:
    """Draw a note in the place of a figure whose record is not there."""
    ax = plt.gca()
    ax.figure.set_figheight(1.0)
    ax.set_axis_off()
    ax.text(0.5, 0.5, message, ha="center", va="center", wrap=True, transform=ax.transAxes)
    return ax


def label_histogram(table: pd.DataFrame | np.ndarray, ax: Axes | None = None) -> Axes:
    """Show which classes each client holds, as shares of its samples.

    Parameters
    ----------
    table
        Counts ``[clients, classes]``, as from :func:`fedlib.datasets.partition.histogram`; a
        column that is not a class (its name is not a number) is left out.
    ax
        Axes to draw on; a new wide figure by default.
    """
    if isinstance(table, pd.DataFrame):
        table = table[[c for c in table.columns if str(c).removeprefix("class ").isdigit()]]
    counts = np.asarray(table, float)
    if counts.ndim != 2 or counts.size == 0:
        raise FedlibError(f"Expected counts [clients, classes], got the shape {counts.shape}.")
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if ax is None:
        width, _ = mpl.rcParams["figure.figsize"]
        height = float(np.clip(0.8 + 0.16 * shares.shape[1], 1.8, 4))
        ax = plt.subplots(figsize=(width, height))[1]
    image = ax.imshow(
        shares.T, aspect="auto", interpolation="nearest", vmin=0, vmax=1.0, cmap="Blues"
    )
    ax.grid(False)
    ax.set(xlabel="client", ylabel="class")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(mpl.ticker.MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    ax.figure.colorbar(image, ax=ax, label="share of samples", pad=0.02)
    return ax
