"""A figure with controls that needs no kernel and no network.

Every state is computed beforehand and travels as rounded numbers inside the figure; some sixty
lines of JavaScript only pick one and draw it. The first state is drawn here, in Python, so the
figure is complete on paper and where scripts do not run. Nothing of Jupyter is imported.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import ticker

from fedlib.errors import FedlibError
from fedlib.lab.show import controls, plotting
from fedlib.lab.show.controls import asset, in_words
from fedlib.lab.show.plotting import Style

Pairs = Sequence[Sequence[float]] | np.ndarray

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 78, 22, 8, 58  # user units of the drawing
INNER = WIDTH - LEFT - RIGHT
EDGE = 6  # around the axes, for marks on the border
GONE = "goes on outside"
ROOM = 38  # characters below the narrowest slider, two between neighbours


@dataclass(frozen=True)
class Frame:
    """What the figure shows at one setting of its controls.

    Attributes
    ----------
    lines
        Name to points ``[K, 2]`` (x, y), joined by a line. NaN breaks it; a line that does not
        come back from NaN in y, from infinity or from beyond the limits ends at a cross. A line
        named as a control's value is drawn thicker while that value is chosen.
    points
        Name to points ``[K, 2]``, markers only.
    strip
        A heat strip ``[rows, columns]`` of values that are not negative, or nothing.
    cuts
        Columns of the strip at which a thin vertical rule stands.
    readouts
        Name to a number or a short text, shown below and read out after every change. A number
        that is not finite reads "diverged"; what has diverged is for the author to say.
    """

    lines: Mapping[str, Pairs] = field(default_factory=dict)
    points: Mapping[str, Pairs] = field(default_factory=dict)
    strip: np.ndarray | Sequence[Sequence[float]] | None = None
    cuts: Sequence[float] = ()
    readouts: Mapping[str, float | str] = field(default_factory=dict)


@dataclass
class Explorer:
    """A figure of precomputed frames, one for every combination of its controls.

    A control with three or more numbers is a slider with a tick for every value, any other one a
    list to choose from. Put an explorer on the last line of a notebook cell to show it.

    Attributes
    ----------
    title
        One line above the figure.
    controls
        Label of a control (with its unit) to its values.
    frames
        A mapping from tuples of values, in the order of the controls, to frames, or a function
        of those values that returns one.
    free
        In a running notebook sliders take values between those of the controls, too; for a
        function that has an answer there.
    xlabel, ylabel
        Axis names with units.
    xlim, ylim
        Fixed limits; what lies outside is cut off. Taken from all frames by default.
    xlog, ylog
        Logarithmic axes. An exact zero stands at the lower border, which then lies a little
        below the limit and has a tick of its own; what is negative is left out.
    equal
        Same scale on both axes; the limits are widened as needed.
    styles
        Name of a line or of points to its :class:`~fedlib.lab.show.plotting.Style`; the registry of
        :func:`fedlib.lab.show.plotting.style` by default.
    rows, strip_label
        Names of the rows of the heat strip, and the name of its horizontal axis.
    start
        The values shown first; the first of each control by default.
    description
        What is drawn, in a sentence, for readers who do not see it.
    name
        The figure's address on its page; made from the title by default. A link to ``#NAME``
        leads to the figure, one to ``#NAME:LABEL=VALUE`` also sets that control, as the slider
        shows the value and with hyphens for blanks (several settings are joined by ``&``). In
        Markdown it is an HTML link, ``<a href="#toy:interval-P=3&amp;local-rate-γ=0.5">P = 3</a>``,
        since Markdown's own links want a heading there.

    Raises
    ------
    FedlibError
        If the name holds other signs than letters, digits, ``.``, ``+``, ``-`` and ``_``,
        if two values of a control would have the same address,
        if a control has no value, if a frame is missing, or if frames differ in their readouts
        or in the shape of their strip.
    """

    title: str
    controls: Mapping[str, Sequence]
    frames: Mapping[tuple, Frame] | Callable[..., Frame]
    xlabel: str = ""
    ylabel: str = ""
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    xlog: bool = False
    ylog: bool = False
    equal: bool = False
    styles: Mapping[str, Style] = field(default_factory=dict)
    rows: Sequence[str] = ()
    strip_label: str = "round"
    start: tuple | None = None
    description: str = ""
    name: str = ""
    free: bool = True

    def __post_init__(self) -> None:
        self.name = self.name or _slug(self.title).lower()
        if self.name != _slug(self.name):
            raise FedlibError(
                f"name='{self.name}' is no address; '{_slug(self.name)}' would be one."
            )
        self.addresses = {
            label: [f"{self.name}:{_slug(label)}={_slug(in_words(v))}" for v in values]
            for label, values in self.controls.items()
        }
        for label, ids in self.addresses.items():
            if len(set(ids)) < len(ids):
                raise FedlibError(f"Two values of '{label}' have the same address, of {ids}.")
        self._states = _states(self.controls, self.frames)
        keys, frames = list(self._states), list(self._states.values())
        self.start = keys[0] if self.start is None else tuple(self.start)
        if self.start not in self._states:
            raise FedlibError(f"start={self.start} is no combination of the controls' values.")
        _same("readouts", [list(f.readouts) for f in frames])
        _same("shape of the strip", [np.shape(f.strip) for f in frames if f.strip is not None])
        kinds = {n: True for f in frames for n in f.lines}
        kinds |= {n: False for f in frames for n in f.points}
        self._series = [
            (n, line, self.styles.get(n) or plotting.style(n)) for n, line in kinds.items()
        ]
        clouds = [c for f in frames for c in (*f.lines.values(), *f.points.values())]
        cloud = np.concatenate([np.asarray(c, float).reshape(-1, 2) for c in [[], *clouds]])
        xlim = limits(cloud[:, 0], self.xlim, self.xlog)
        ylim = limits(cloud[:, 1], self.ylim, self.ylog)
        self._height = 372 if self.equal else 250
        if self.equal:
            xlim, ylim = _equal(xlim, ylim, INNER, self._height)
        xlim, self._xticks = _with_zero(xlim, self.xlog, cloud[:, 0])
        ylim, self._yticks = _with_zero(ylim, self.ylog, cloud[:, 1])
        self._x = _scale(xlim, self.xlog, 0, INNER)
        self._y = _scale(ylim, self.ylog, self._height, 0)
        self._span = (xlim, ylim)
        crossed = [self._crossed(f) for f in frames]
        if any(GONE in f.points for f in crossed):
            self._series.append((GONE, False, Style(GONE, "currentColor", "X")))
        strips = [f.strip for f in frames if f.strip is not None]
        self._top = max((float(np.nanmax(strip)) for strip in strips), default=0.0)
        self._data = self._pack(crossed)

    # --- data -------------------------------------------------------------------------------

    def _pack(self, frames: list[Frame]) -> dict:
        """Everything the script needs; arrays that return are stored once."""
        pool: dict[str, int] = {}

        def store(value: list) -> int:
            return pool.setdefault(json.dumps(value), len(pool))

        packed = []
        for f in frames:
            both = {**f.lines, **f.points}
            index = [store(self._flat(both.get(name, []))) for name, *_ in self._series]
            strip = store([] if f.strip is None else _digits(np.asarray(f.strip, float), self._top))
            texts = [_text(v) for v in f.readouts.values()]
            packed.append([index, strip, store([_short(c) for c in f.cuts]), texts])
        return {
            "n": [len(v) for v in self.controls.values()],
            "t": [[in_words(v) for v in values] for values in self.controls.values()],
            "x": self._x,
            "y": self._y,
            "m": [[int(line), _mark(s)] for _, line, s in self._series],
            "v": [json.loads(text) for text in pool],
            "f": packed,
        }

    def _flat(self, points: Pairs) -> list:
        """Points as x, y, x, y, ...; rounded far below what the eye can see."""
        flat = []
        for pair in np.asarray(points, float).reshape(-1, 2):
            for v, (low, high), log in zip(pair, self._span, (self.xlog, self.ylog), strict=True):
                if math.isnan(v) or (log and v < 0):
                    flat.append(None)
                elif log and v == 0:
                    flat.append(_short(float(f"{low:.4g}")))
                elif math.isinf(v):
                    flat.append(math.copysign(1e300, v))
                elif log:
                    flat.append(_short(float(f"{v:.4g}")))
                else:
                    flat.append(_short(round(float(v), 4 - math.floor(math.log10(high - low)))))
        return flat

    def _crossed(self, frame: Frame) -> Frame:
        """Return a frame with crosses where its lines end, if any does."""
        at = [place for line in frame.lines.values() for place in self._exit(line)]
        return replace(frame, points={**frame.points, GONE: at}) if at else frame

    def _exit(self, line: Pairs) -> list[tuple[float, float]]:
        """Where a line leaves the picture for good; nothing if it does not, or never was inside.

        It has left if its last point lies beyond the limits or is not finite. Points beyond the
        right or left limit say nothing if x is a clock (not ``equal``), nor does a fall towards
        zero on a logarithmic axis. The place is where it crosses the border, or its last point
        before NaN.
        """
        x, y = np.asarray(line, float).reshape(-1, 2).T
        at = np.stack([_units(self._x, x), _units(self._y, y)], axis=1)[~np.isnan(x)]
        size = np.array([INNER, self._height])
        far = size * [1, math.inf if self.ylog else 1]
        if not self.equal:
            at = at[~((at[:, 0] < 0) | (at[:, 0] > INNER))]
        inside = ((at >= 0) & (at <= far)).all(1)
        if not inside.any() or inside[-1]:
            return []
        k = np.flatnonzero(inside)[-1]
        here, step = at[k], at[k + 1] - at[k]
        if not np.isnan(step).any():
            moves = step != 0
            here = here + step * np.min((np.where(step > 0, size, 0) - here)[moves] / step[moves])
        here = np.clip(here, 6, size - 6)
        return [(_value_at(self._x, here[0]), _value_at(self._y, here[1]))]

    def frame(self, *values: object) -> Frame:
        """The frame at one setting, computed now if it was not before and ``frames`` is a function.

        Raises
        ------
        FedlibError
            If there is no such frame.
        """
        if values in self._states:
            return self._states[values]
        if not callable(self.frames):
            raise FedlibError(f"There is no frame {values}, and no function that makes it.")
        return self.frames(*values)

    def drawing(self, *values: object) -> list[str]:
        """The SVG paths at one setting: line and markers of each series, strip levels, cuts."""
        data = self._pack([self._crossed(self.frame(*values))])
        (index, strip, cuts, _), pool, paths = data["f"][0], data["v"], []
        for (line, mark), i in zip(data["m"], index, strict=True):
            paths += [_trace(pool[i], self._x, self._y) if line else ""]
            paths += [_trace(pool[i], self._x, self._y, mark) if mark else ""]
        if self._top:
            paths += _runs(pool[strip])
            paths += ["".join(f"M{c} 0v{len(pool[strip])}" for c in pool[cuts])]
        return paths

    # --- text -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The first state in words: what a page without graphics shows."""
        frame = self._states[self.start]
        said = "; ".join(f"{k}: {_text(v)}" for k, v in frame.readouts.items())
        return f"{self.title}. {self._setting()}. {said}"

    def _setting(self) -> str:
        pairs = zip(self.controls, self.start, strict=True)
        return ", ".join(f"{name} = {in_words(v)}" for name, v in pairs)

    def _repr_mimebundle_(self, **_: object) -> dict:
        """What a notebook with a kernel shows instead: live controls, see ``controls.py``."""
        return controls.bundle(self.live)

    def live(self) -> Any:
        """The same figure as a widget, whose controls take any value along their sliders."""
        return controls.explorer(self)

    def _repr_html_(self) -> str:
        """The figure as one piece of HTML that looks after itself."""
        data = json.dumps(self._data, separators=(",", ":"), ensure_ascii=False)
        data = data.replace("<", "\\u003c")  # so that no text can close the script element
        return "".join(
            [
                f'<div class="fedx mathjax_ignore tex2jax_ignore" id="{self.name}" role="group" ',
                f'aria-labelledby="{self.name}-t"><style>{asset("interactive.css")}</style>',
                f'<p class="fedx-t"><span id="{self.name}-t">{html.escape(self.title)}</span> ',
                f'<a href="#{self.name}" aria-label="Link to this figure">#</a></p>',
                self._controls(),
                *self.picture(self.start),
                f"<noscript><p>Shown: {html.escape(self._setting())}. ",
                "The other settings need JavaScript.</p></noscript>",
                f'<script type="application/json">{data}</script>',
                f"<script>{asset('interactive.js').replace('NAME', self.name)}</script></div>",
            ]
        )

    def _controls(self) -> str:
        out = ['<div class="fedx-c" hidden>']
        for k, (name, values) in enumerate(self.controls.items()):
            ref, at = f"{self.name}-{k}", list(values).index(self.start[k])
            texts = [html.escape(in_words(v)) for v in values]
            ids = self.addresses[name]
            out.append(f'<div><label for="{ref}">{html.escape(name)}</label>')
            if len(values) > 2 and all(isinstance(v, (int, float)) for v in values):
                told = _told(texts)
                ticks = (
                    f'<span id="{ids[i]}">{t if i in told else ""}</span>'
                    for i, t in enumerate(texts)
                )
                out.append(
                    f'<output for="{ref}">{texts[at]}</output><input type="range" id="{ref}" '
                    f'min="0" max="{len(values) - 1}" value="{at}" autocomplete="off">'
                    f'<div class="fedx-v" aria-hidden="true">{"".join(ticks)}</div></div>'
                )
                continue
            options = (
                f'<option id="{ids[i]}" value="{i}"{" selected" * (i == at)}>{t}</option>'
                for i, t in enumerate(texts)
            )
            out.append(f'<select id="{ref}" autocomplete="off">{"".join(options)}</select></div>')
        return "".join(out) + "</div>"

    def _readouts(self, values: tuple) -> str:
        pairs = "".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(_text(v))}</dd></div>"
            for k, v in self.frame(*values).readouts.items()
        )
        return f'<div role="status" aria-live="polite" aria-atomic="true"><dl>{pairs}</dl></div>'

    # --- drawing ----------------------------------------------------------------------------

    def picture(self, values: tuple, ghosts: str = "") -> list[str]:
        """The drawing, its legend and its readouts; ``ghosts`` are lines of earlier settings."""
        paths = self.drawing(*values)
        drawn = [self._svg(paths, values, ghosts), self._legend(paths)]
        return [*drawn, self._readouts(values)]

    def _svg(self, paths: list[str], values: tuple, ghosts: str) -> str:
        parts, y = [], TOP
        if self._top:
            strip, deep = self._strip(paths[2 * len(self._series) :], y)
            parts, y = [strip], y + deep
        if self._series:
            parts.append(self._panel(paths, y, values, ghosts))
            y += self._height + BOTTOM
        said = self.description or f"{self.title}: {self.ylabel} against {self.xlabel}"
        size = f'viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{html.escape(said)}"'
        return f"<svg {size}>{''.join(parts)}</svg>"

    def lines(self, *values: object) -> str:
        """The lines at one setting, without marks: what stays of it as a ghost."""
        drawn = zip(self._series, self.drawing(*values)[::2], strict=False)
        return "".join(f'<path class="fedx-l"{_ink(s)} d="{d}"/>' for (_, on, s), d in drawn if on)

    def _panel(self, paths: list[str], y: float, values: tuple, ghosts: str) -> str:
        """Axes, ticks and the traces, cut at the border."""
        high = self._height
        out = [f'<g transform="translate({LEFT} {y})">']
        grid = ""
        for v, text in self._xticks:
            at = _place(self._x, v)
            grid += f"M{at} 0v{high}"
            out.append(_label(at, high + 21, text))
        for v, text in self._yticks:
            at = _place(self._y, v)
            grid += f"M0 {at}h{INNER}"
            out.append(_label(-6, at, text, "y"))
        out.append(f'<path class="fedx-g" d="{grid}"/>')
        out.append(f'<path class="fedx-a" d="M0 0V{high}H{INNER}"/>')
        wide, deep = INNER + 2 * EDGE, high + 2 * EDGE
        out.append(f'<svg class="fedx-p" x="-{EDGE}" y="-{EDGE}" width="{wide}" height="{deep}" '
                   f'viewBox="-{EDGE} -{EDGE} {wide} {deep}" overflow="hidden">')  # fmt: skip
        out.append(f'<g class="fedx-o">{ghosts}</g>')  # the script puts earlier lines here, too
        for k, (name, _, s) in enumerate(self._series):
            ink = _ink(s) + self._named(name, values)
            out.append(f'<path class="fedx-l"{ink} d="{paths[2 * k]}"/>')
            out.append(f'<path class="fedx-m"{_paint("fill", s)} d="{paths[2 * k + 1]}"/>')
        return "".join(out) + "</svg>" + self._names(high, self.xlabel, self.ylabel) + "</g>"

    def _named(self, name: str, current: tuple) -> str:
        """Which control and value a line is named after, and whether that is the current one."""
        for k, values in enumerate(self.controls.values()):
            if name in list(values):
                on = ' data-on=""' if name == current[k] else ""
                return f' data-c="{k},{list(values).index(name)}"{on}'
        return ""

    def _strip(self, paths: list[str], y: float) -> tuple[str, float]:
        """The heat strip with its row names and its axis; also its depth."""
        strips = (frame.strip for frame in self._states.values() if frame.strip is not None)
        rows, columns = np.shape(next(strips))
        high = min(22 * rows, 170)
        scale, out = (0.0, INNER / columns, 0), [f'<g transform="translate({LEFT} {y})">']
        skip = math.ceil(rows / 8)
        for k in range(0, rows, skip):
            name = str(self.rows[k] if k < len(self.rows) else k)
            out.append(_label(-6, round((k + 0.5) * high / rows, 1), name, "y"))
        for v in _ticks((0, columns), False):
            at = _place(scale, v)
            out.append(f'<path class="fedx-a" d="M{at} {high}v4"/>')
            out.append(_label(at, high + 21, _tick(v, False)))
        out.append(
            f'<svg width="{INNER}" height="{high}" viewBox="0 0 {columns} {rows}" '
            'preserveAspectRatio="none">'
        )
        for k, d in enumerate(paths[:-1], 1):
            out.append(f'<path class="fedx-h" fill-opacity="{k / 9:.2f}" d="{d}"/>')
        out.append(f'<path class="fedx-k" d="{paths[-1]}"/></svg>')
        out.append(f'<path class="fedx-a" d="M0 0V{high}H{INNER}"/>')
        return "".join(out) + self._names(high, self.strip_label, "") + "</g>", high + BOTTOM + 4

    def _names(self, high: float, xlabel: str, ylabel: str) -> str:
        turned = f'<g transform="translate({16 - LEFT} {high / 2:g})rotate(-90)">'
        across = _label(INNER // 2, high + 45, xlabel)
        return across + (turned + _label(0, 0, ylabel) + "</g>" if ylabel else "")

    def _legend(self, paths: list[str]) -> str:
        """What is drawn, by name; the script names the others where they are."""
        out = []
        for k, (_, line, s) in enumerate(self._series):
            drawn, ink = any(paths[2 * k : 2 * k + 2]), _ink(s)
            key = KEY if drawn else KEY.replace("<span", "<span hidden", 1)
            rule = f'<path class="fedx-l"{ink} d="M1 9H33"/>' if line else ""
            mark = f'<path{_paint("fill", s)} d="M17 9{_mark(s)}"/>'
            out.append(f"{key}{rule}{mark}</svg>{html.escape(s.label)}</span>")
        if self._top:
            box = '<path class="fedx-h" d="M1 3h32v12H1z"/>'
            out.append(f"{KEY}{box}</svg>strongest cell: {_text(self._top)}</span>")
        return f'<p class="fedx-e">{"".join(out)}</p>'


# --- helpers --------------------------------------------------------------------------------


def _states(controls: Mapping[str, Sequence], frames: Mapping | Callable) -> dict[tuple, Frame]:
    """Every combination of values with its frame, the last control fastest."""
    for name, values in controls.items():
        if not len(values):
            raise FedlibError(f"The control '{name}' has no values; give at least one.")
    keys = list(itertools.product(*controls.values()))
    if callable(frames):
        return {key: frames(*key) for key in keys}
    missing = [key for key in keys if key not in frames]
    if missing:
        raise FedlibError(
            f"{len(missing)} of {len(keys)} frames are missing, first {missing[0]}. Give one for "
            "every combination of the controls' values, in their order."
        )
    return {key: frames[key] for key in keys}


def _same(what: str, seen: list) -> None:
    for other in seen[1:]:
        if other != seen[0]:
            raise FedlibError(f"All frames need the same {what}; found {seen[0]} and {other}.")


def limits(values: np.ndarray, given: tuple | None, log: bool) -> tuple[float, float]:
    """The given limits, or those of the data with a little air."""
    if given is not None:
        return float(given[0]), float(given[1])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    if not len(values):
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = (float(f(np.log10(values) if log else values)) for f in (np.min, np.max))
    air = 0.05 * (high - low) or 0.5
    low, high = low - air, high + air
    return (10**low, 10**high) if log else (low, high)


def _equal(xlim: tuple, ylim: tuple, wide: float, high: float) -> tuple[tuple, tuple]:
    """Widen one pair of limits until a unit is as long on both axes."""
    unit = max((xlim[1] - xlim[0]) / wide, (ylim[1] - ylim[0]) / high)
    middle = [(sum(xlim) / 2, unit * wide / 2), (sum(ylim) / 2, unit * high / 2)]
    return tuple((m - half, m + half) for m, half in middle)


def _with_zero(limits: tuple, log: bool, values: np.ndarray) -> tuple[tuple, list]:
    """Limits with room for zero on a logarithmic axis that needs it, and ticks with their words."""
    ticks = [(v, _tick(v, log)) for v in _ticks(limits, log)]
    if log and (values == 0).any():
        low = float(f"{limits[0] * (limits[0] / limits[1]) ** 0.1:.4g}")
        return (low, limits[1]), [(low, "0"), *ticks]
    return limits, ticks


def _scale(limits: tuple[float, float], log: bool, start: float, stop: float) -> tuple:
    """Offset, factor and kind of a map from data to user units."""
    low, high = np.log10(limits) if log else limits
    factor = (stop - start) / (high - low)
    return float(f"{start - factor * low:.7g}"), float(f"{factor:.7g}"), int(log)


def _units(scale: tuple, v: np.ndarray | float) -> np.ndarray:
    """From data to user units; what is far outside, or infinite, comes to 9000."""
    offset, factor, log = scale
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip(offset + factor * (np.log10(v) if log else np.asarray(v)), -9000, 9000)


def _value_at(scale: tuple, at: float) -> float:
    """From user units to data."""
    offset, factor, log = scale
    v = (at - offset) / factor
    return 10**v if log else v


def _place(scale: tuple, v: float) -> str:
    return f"{_units(scale, v):.1f}"


def _trace(flat: list, x: tuple, y: tuple, mark: str = "") -> str:
    """A path through the points, or, with a mark, some two dozen marks along them."""
    out, on = [], False
    step = 2 * math.ceil(len(flat) / 48) if mark else 2
    for i in range(0, len(flat), max(step, 2)):
        if flat[i] is None or flat[i + 1] is None:
            on = False
            continue
        pen = "M" if mark or not on else "L"
        out.append(f"{pen}{_place(x, flat[i])} {_place(y, flat[i + 1])}{mark}")
        on = True
    return "".join(out)


def _digits(strip: np.ndarray, top: float) -> list[str]:
    """A strip as rows of digits, 0 for nothing and 9 for the largest value of all frames."""
    levels = np.ceil(9 * np.clip(np.nan_to_num(strip), 0, top) / (top or 1.0) - 1e-9).astype(int)
    return ["".join(map(str, row)) for row in levels]


def _runs(rows: list[str]) -> list[str]:
    """One path for each level from 1 to 9: the runs of equal cells."""
    paths = [""] * 10
    for j, row in enumerate(rows):
        at = 0
        for digit, cells in itertools.groupby(row):
            long = len(list(cells))
            paths[int(digit)] += f"M{at} {j}.1h{long}v.8h-{long}z"
            at += long
    return paths[1:]


def _ticks(limits: tuple[float, float], log: bool) -> list[float]:
    low, high = limits
    if log and math.log10(high / low) > 1:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        if len(powers) > 2:
            return [10.0**p for p in powers][:: math.ceil(len(powers) / 6)]
        found = (k * 10.0**p for p in range(powers[0] - 1, powers[-1] + 1) for k in (1, 2, 5))
        return [v for v in found if low <= v * (1 + 1e-9) and v <= high * (1 + 1e-9)]
    slack = 1e-9 * (high - low)
    found = ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(v) for v in found if low - slack <= v <= high + slack]


def _tick(v: float, log: bool) -> str:
    if log and not 0.01 <= v <= 1000 and math.isclose(v, 10.0 ** round(math.log10(v))):
        return _power(round(math.log10(v)))
    return in_words(0.0 if abs(v) < 1e-12 else v)


def _slug(text: str) -> str:
    """Words as a part of an address."""
    return "-".join(re.findall(r"[\w.+-]+", text.replace("−", "-")))


def _told(texts: list[str]) -> set[int]:
    """Which ticks of a slider carry their value: all, or first, last and as many as have room."""
    last = len(texts) - 1
    for step in range(1, last + 1):
        told = {*range(0, last - step + 1, step), last}
        if sum(len(texts[i]) + 2 for i in told) <= ROOM:
            break
    return told


def _text(v: object) -> str:
    """A readout in words: three significant figures."""
    if isinstance(v, (bool, str)) or not isinstance(v, (int, float, np.number)):
        return str(v)
    if not math.isfinite(v):
        return "diverged"
    if isinstance(v, (int, np.integer)) or 999.5 <= abs(v) < 1e7:
        return f"{v:.0f}".replace("-", "−")
    number, _, power = f"{v:.3g}".partition("e")
    return number.replace("-", "−") + (f" · {_power(int(power))}" if power else "")


def _power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _label(x: object, y: object, text: str, side: str = "x") -> str:
    """Text centred under a point ("x"), or to the left of it ("y")."""
    drop = ' dy=".35em"' if side == "y" else ""
    return f'<text class="fedx-{side}" x="{x}" y="{y}"{drop}>{html.escape(text)}</text>'


def _ink(s: Style) -> str:
    """Stroke attributes of a line."""
    dash = " ".join(f"{2 * d:g}" for d in s.dashes)
    return _paint("stroke", s) + (f' stroke-dasharray="{dash}"' if dash else "")


def _paint(what: str, s: Style) -> str:
    """A style's colour, and a lighter one on a dark page if it would be hard to see there."""
    plain = f' {what}="{s.color}"'
    if not mpl.colors.is_color_like(s.color):  # the page's own ink
        return plain
    rgb = np.array(mpl.colors.to_rgb(s.color))
    mixed = (rgb + (1 - rgb) * k / 10 for k in range(11))
    light = next(c for c in mixed if _luminance(c) > 0.15)  # a contrast of 3.5 there
    both = f"light-dark({s.color},{mpl.colors.to_hex(light)})"
    return plain if (light == rgb).all() else f'{plain} style="{what}:{both}"'


def _luminance(rgb: np.ndarray) -> float:
    """How bright a colour is beside white: WCAG's relative luminance."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _mark(s: Style) -> str:
    return MARKS.get(s.marker, MARKS["+"])


def _short(v: float) -> float | int:
    return int(v) if float(v).is_integer() and abs(v) < 1e15 else float(v)


KEY = '<span><svg width="34" height="18" aria-hidden="true">'

# Marks as relative paths of about nine units, by matplotlib's codes; "ring" goes round another.
MARKS = {
    "": "",
    "o": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "s": "m-3.5-3.5h7v7h-7z",
    "^": "m0-4.5l4.5 8h-9z",
    "v": "m0 4.5l4.5-8h-9z",
    "<": "m-4.5 0l8-4.5v9z",
    ">": "m4.5 0l-8-4.5v9z",
    "D": "m0-5l5 5l-5 5l-5-5z",
    "d": "m0-5.5l3.2 5.5l-3.2 5.5l-3.2-5.5z",
    "P": "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "X": "m0-2l2.6-2.6l2 2l-2.6 2.6l2.6 2.6l-2 2l-2.6-2.6l-2.6 2.6l-2-2l2.6-2.6l-2.6-2.6l2-2z",
    "p": "m0-4.6l4.4 3.2l-1.7 5.1h-5.4l-1.7-5.1z",
    "h": "m0-4.6l4 2.3v4.6l-4 2.3l-4-2.3v-4.6z",
    "*": "m0-6.5l1.6 4.5h4.7l-3.8 2.9l1.4 4.7l-3.9-2.8l-3.9 2.8l1.4-4.7l-3.8-2.9h4.7z",
    "+": "m-.8-5h1.6v4.2h4.2v1.6h-4.2v4.2h-1.6v-4.2h-4.2v-1.6h4.2z",
    "ring": "m-8 0a8 8 0 1 0 16 0a8 8 0 1 0-16 0zm2.2 0a5.8 5.8 0 1 1 11.6 0a5.8 5.8 0 1 1-11.6 0z",
}
