"""The controls of a running notebook: sliders, links that set them, and an explorer as a widget."""

from __future__ import annotations

import copy
import functools
import html
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from fedlib.errors import FedlibError

VIEW = "application/vnd.jupyter.widget-view+json"
STEPS = 60  # values along a slider, besides those on the page
KEPT = 4  # settings that stay as ghosts


def bundle(widget: Callable[[], Any]) -> dict:
    """Return a widget's display data, or nothing where no kernel or no ipywidgets runs."""
    try:
        import ipywidgets  # noqa: F401
        from IPython import get_ipython
    except ImportError:
        return {}
    if getattr(get_ipython(), "kernel", None) is None:
        return {}
    return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget().model_id}}


def frozen(function: Callable) -> Callable:
    """Return a function that keeps the names of its notebook as they are now.

    A later cell may give ``w`` or ``step`` another meaning; a figure above it goes on with its own.
    Functions that it calls are kept too; methods of classes, and what is changed in place, are not.
    """
    if not isinstance(function, FunctionType):
        return function
    old = function.__globals__
    names = {name: value for name, value in old.items() if name.startswith("__")}  # to import by

    def rebound(one: FunctionType) -> FunctionType:
        new = FunctionType(one.__code__, names, one.__name__, one.__defaults__, one.__closure__)
        new.__kwdefaults__ = one.__kwdefaults__
        for name in _names(one.__code__) & old.keys() - names.keys():
            value = names[name] = old[name]
            if isinstance(value, FunctionType) and value.__globals__ is old:
                names[name] = rebound(value)
        return new

    return rebound(function)


def _names(code: CodeType) -> set[str]:
    """Return the names that a piece of code asks for, with those of the functions inside it."""
    inside = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*inside)


# --- controls -------------------------------------------------------------------------------------


def slider_stops(values: Sequence[float]) -> list:
    """Return values of a slider from the smallest to the largest of the given ones.

    The given ones are among them and whole numbers stay whole. Steps are equal, or equal factors
    where the range is a decade or more.
    """
    low, high = min(values), max(values)
    space = np.geomspace if low > 0 and high >= 10 * low else np.linspace
    whole = all(isinstance(v, int) for v in values)
    steps = {round(v) if whole else float(f"{v:.3g}") for v in space(low, high, STEPS).tolist()}
    new = {v for v in steps if low < v < high and not np.isclose(v, values, rtol=1e-3).any()}
    return sorted(new | {*values})


def control(label: str, values: Sequence, start: object, free: bool) -> Any:
    """Return a slider along numbers, or a list to choose from."""
    import ipywidgets as widgets

    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    slides = len(numbers) == len(values) > 2
    if slides:
        label = f"{label} ({in_words(min(values))} to {in_words(max(values))})"
    steps = slider_stops(values) if slides and free else list(values)
    kind = widgets.SelectionSlider if slides else widgets.Dropdown
    return kind(
        options=[(in_words(v), v) for v in steps],
        value=start,
        description=label,
        style={"description_width": "initial"},
        layout={"width": "min(36rem, 98%)"},
    )


def make_controls(controls: Mapping[str, Sequence], start: Sequence, free: bool) -> list:
    """Return a widget for each control, at its value to begin with."""
    pairs = zip(controls.items(), start, strict=True)
    return [control(label, values, first, free) for (label, values), first in pairs]


def framed(title: str, parts: Sequence[str]) -> str:
    """Return a picture in the frame that it has on the page."""
    head = f'<style>{asset("interactive.css")}</style><p class="fedx-t">{html.escape(title)}</p>'
    return f'<div class="fedx">{head}{"".join(parts)}</div>'


def alarm(error: Exception) -> str:
    """Return an error as a line for people."""
    kind = "" if isinstance(error, FedlibError) else f"{type(error).__name__}: "
    return f'<p role="alert"><b>{html.escape(kind + str(error))}</b></p>'


def box(*parts: Any) -> Any:
    """Put widgets below each other, with the script that follows links and names the sliders."""
    import ipywidgets as widgets

    go = f"<script>{asset('go.js')}</script>"
    script = {"output_type": "display_data", "data": {"text/html": go}, "metadata": {}}
    return widgets.VBox([*parts, widgets.Output(outputs=(script,))]).add_class("fedx-live")


# --- explorers ------------------------------------------------------------------------------------


def explorer(figure: Any) -> Any:
    """Return an explorer's widget.

    Parameters
    ----------
    figure
        If it is ``free`` and its frames are a function, its sliders take any value.
    """
    import ipywidgets as widgets

    figure = copy.copy(figure)
    if callable(figure.frames):
        figure.frames = functools.lru_cache(8)(frozen(figure.frames))
    sliders = make_controls(figure.controls, figure.start, figure.free and callable(figure.frames))
    picture, problem = widgets.HTML(), widgets.HTML()
    kept: list[tuple] = []
    shown = [figure.start]
    moving: list[bool] = []

    def draw(*_: object) -> None:
        if moving:
            return
        values = tuple(slider.value for slider in sliders)
        try:
            ghosts = [figure.lines(*v) for v in dict.fromkeys([*kept, *shown]) if v != values]
            picture.value = framed(figure.title, figure.picture(values, "".join(ghosts)))
            shown[:], problem.value = [values], ""
        except Exception as error:  # what an author's function raises at this setting
            problem.value = alarm(error)

    def move(values: Sequence) -> None:
        """Set all sliders, and draw once."""
        moving.append(True)
        for slider, value in zip(sliders, values, strict=True):
            slider.value = value
        moving.clear()
        draw()

    def back(*_: object) -> None:
        kept.clear()
        shown[:] = [figure.start]
        move(figure.start)

    def follow(change: Mapping) -> None:
        """Set what a link asks for; the same link may ask again."""
        if not change["new"]:
            return
        wanted = [slider.value for slider in sliders]
        asked = {f"{figure.name}:{part}" for part in change["new"].partition(":")[2].split("&")}
        for k, (label, values) in enumerate(figure.controls.items()):
            for value, place in zip(values, figure.addresses[label], strict=True):
                if place in asked:
                    wanted[k] = value
        move(wanted)
        address.value = ""

    for slider in sliders:
        slider.observe(draw, "value")
    keep = widgets.Button(description="Keep these lines", icon="thumb-tack")
    keep.on_click(lambda _: kept.__setitem__(slice(None), [*kept, *shown][-KEPT:]))
    again = widgets.Button(description="Start again", icon="undo")
    again.on_click(back)
    address = widgets.Text(layout={"display": "none"}).add_class(f"fedx-go-{figure.name}")
    address.observe(follow, "value")
    draw()
    return box(*sliders, picture, problem, widgets.HBox([keep, again, address]))


# --- words and files ----------------------------------------------------------------------------


def in_words(v: object) -> str:
    """A control's value or a tick in words."""
    if isinstance(v, int):
        return str(v).replace("-", "−")
    return f"{v:g}".replace("-", "−") if isinstance(v, (int, float)) else str(v)


@functools.cache
def asset(name: str) -> str:
    """Return a style or a script that lies beside this file, in one line."""
    text = resources.files("fedlib.lab.show").joinpath(name).read_text("utf-8")
    return "".join(line.strip() for line in text.splitlines())
