"""Figures that answer in a running notebook: explorers with free controls, trainings to watch.

ipywidgets makes the controls; the drawing is that of :mod:`fedlib.lab.show.interactive`. Where no
kernel or no ipywidgets is, what stands on the page is shown instead.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fedlib.engine.evaluation import Evaluation, Measures
from fedlib.engine.simulation import History, simulate
from fedlib.errors import FedlibError
from fedlib.lab.show import plotting
from fedlib.lab.show.controls import alarm, box, bundle, framed, frozen, in_words, make_controls
from fedlib.lab.show.interactive import Explorer, Frame, Pairs, limits

REDRAW = 0.2  # seconds between two drawings of a training


# --- trainings ------------------------------------------------------------------------------------


@dataclass
class PanelRun:
    """A training under way, and what is known of it."""

    values: tuple
    rounds: int
    go: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    seconds: float = 0.0
    history: History | None = None
    error: Exception | None = None
    thread: threading.Thread | None = None

    def stop(self) -> None:
        """End after the rounds that are being computed."""
        self.over.set()
        self.go.set()


class Live:
    """A training to start, watch, pause and stop, with a few settings as controls.

    On the last line of a cell it trains once as it stands and shows the curve. In a running
    notebook its controls start it anew, in the background.

    Parameters
    ----------
    title
        One line above the figure.
    controls
        Label of a control (with its unit) to its values; three or more numbers make a slider.
    build
        A function of the controls' values: ``(algorithm, task)``, as
        :func:`~fedlib.engine.simulation.simulate` takes them.
    rounds, every
        How many rounds, None for as many as the algorithm's ``rounds(seeds)`` says; and how many
        from one look to the next.
    seeds
        One run each; the curve is their mean.
    start
        The values to begin with; the first of each control by default.
    split, metric
        What is drawn.
    measure
        Measures something else: ``(state, task) -> {(split, metric): [R]}``.
    strip
        ``(state, task) -> [rows, columns]``, a heat strip above the curve as it forms.
    strip_label
        The name of the strip's horizontal axis.
    clock, ylog
        Draw against the run's own clock; a logarithmic axis.
    xlabel, ylabel
        Names of the axes with units.

    Raises
    ------
    FedlibError
        If a control has no values, or if start or rounds do not fit.
    """

    def __init__(
        self,
        title: str,
        controls: Mapping[str, Sequence],
        build: Callable[..., tuple[Any, Any]],
        *,
        rounds: int | None = None,
        every: int = 1,
        seeds: Sequence[int] = (0,),
        start: Sequence | None = None,
        split: str = "train",
        metric: str = "loss",
        measure: Callable[[Any, Any], Measures] | None = None,
        strip: Callable[[Any, Any], Any] | None = None,
        strip_label: str = "",
        clock: bool = False,
        ylog: bool = False,
        xlabel: str = "round",
        ylabel: str = "",
    ) -> None:
        for label, values in controls.items():
            if not len(values):
                raise FedlibError(f"The control '{label}' has no values; give at least one.")
        self.title, self.controls, self.build = title, controls, frozen(build)
        self.rounds, self.every, self.seeds = rounds, every, tuple(seeds)
        self.start = tuple(start or (values[0] for values in controls.values()))
        if len(self.start) != len(controls):
            raise FedlibError(f"start has {len(self.start)} values for {len(controls)} controls.")
        if rounds is not None and rounds < 1:
            raise FedlibError(f"rounds is 1 or more; got {rounds!r}.")
        for value, (label, values) in zip(self.start, controls.items(), strict=True):
            if value not in values:
                raise FedlibError(f"'{label}' cannot start at {value!r}. Its values: {values}.")
        self.split, self.metric, self.strip = split, metric, frozen(strip)
        self.look = Evaluation(every=every, splits=split, measure=frozen(measure))
        self.strip_label = strip_label
        self.clock, self.ylog, self.xlabel = clock, ylog, xlabel
        self.ylabel = ylabel or f"{metric}, {split}"
        self.before: PanelRun | None = None
        self.run: PanelRun | None = None
        self._strip: Any = None
        self._widget: Any = None
        _PANELS.add(self)

    @property
    def history(self) -> History | None:
        """What the training has left so far, like any other."""
        return self.run.history if self.run else None

    def train(self, *values: object) -> History:
        """Train with these values, or as the panel starts, and return when it is done."""
        self._begin(values or self.start)
        self._work(lambda: None)
        if self.run.error is not None:
            raise self.run.error
        return self.run.history

    # --- work -------------------------------------------------------------------------------------

    def _begin(self, values: Sequence) -> None:
        self.halt()
        finished = self.run is not None and self.run.history is not None
        self.before, self.run = (
            (self.run if finished else self.before),
            PanelRun(tuple(values), self.rounds or 0),
        )
        self._strip = None
        self.run.go.set()

    def _work(self, tell: Callable[[], None]) -> None:
        """Train to the end, stretch by stretch, and tell after each."""
        run, looked = self.run, {}

        def measure(state: Any, task: Any) -> Measures:
            """Look once at each round, though a stretch begins where another has ended."""
            if state.t not in looked:
                looked.clear()
                looked[state.t] = self.look.of(state, task, [""] * len(self.seeds))
            return looked[state.t]

        try:
            built = self.build(*run.values)
            if not isinstance(built, tuple) or len(built) != 2:
                raise FedlibError(f"build returns an algorithm and a task; got {built!r:.80}.")
            algorithm, task = built
            if not self.rounds and not hasattr(algorithm, "rounds"):
                raise FedlibError(f"{type(algorithm).__name__} goes on for ever. Give rounds=.")
            run.rounds = self.rounds or algorithm.rounds(self.seeds)
            look = Evaluation(every=self.every, measure=measure)
            while run.done < run.rounds:
                run.go.wait()
                if run.over.is_set():
                    break
                began, stretch = time.perf_counter(), min(self.every, run.rounds - run.done)
                state = run.history.state if run.history else None
                options = dict(state=state, evaluation=look, progress=False)
                part = simulate(algorithm, task, stretch, self.seeds, **options)
                run.history = _joined(run.history, part)
                run.done += stretch
                run.seconds += time.perf_counter() - began
                if self.strip is not None:
                    self._strip = np.asarray(self.strip(part.state, task))
                tell()
                if len(run.history.diverged) == len(self.seeds):
                    break
        except Exception as error:  # shown in the panel, or raised by train
            run.error = error

    def halt(self) -> None:
        """Stop the training, if one is under way, and wait until it has stopped."""
        if self.run is not None and self.run.thread is not None:
            self.run.stop()
            self.run.thread.join()

    # --- picture ----------------------------------------------------------------------------------

    def curve(self, run: PanelRun) -> Pairs:
        """Return the mean over seeds of what a run has reached: ``[looks, 2]``."""
        frame = run.history.frame
        rows = frame[(frame["split"] == self.split) & (frame["metric"] == self.metric)]
        if rows.empty:
            have = ", ".join(sorted({*(frame["split"] + " " + frame["metric"])}))
            raise FedlibError(f"Nothing is called '{self.split} {self.metric}': there is {have}.")
        means = rows.groupby("round")[["clock", "value"]].agg(lambda v: np.mean(v.to_numpy()))
        x = means["clock"] if self.clock else means.index
        return np.stack([x, means["value"]], axis=1)

    def picture(self) -> str:
        """Return the curves so far as HTML."""
        lines, readouts = {}, {"rounds": f"{self.run.done} of {self.run.rounds}"}
        if self.before is not None:
            lines["before"] = self.curve(self.before)
        if self.run.history is not None:
            lines["now"] = self.curve(self.run)
            readouts[self.ylabel] = float(lines["now"][-1, 1])
        ylim = None
        if len(lines) == 2 and self.before.history.diverged and not self.run.history.diverged:
            shown = np.r_[lines["before"][0, 1], lines["now"][:, 1]]
            ylim = limits(shown, None, self.ylog)  # where the run before exploded is cut off
        figure = Explorer(
            self.title,
            {},
            {(): Frame(lines, strip=self._strip, readouts=readouts)},
            xlabel=self.xlabel,
            ylabel=self.ylabel,
            ylim=ylim,
            ylog=self.ylog,
            styles={
                "before": plotting.Style("the run before", plotting.GREY, "", plotting.DASHED),
                "now": plotting.Style(self._said(self.run.values), plotting.BLUE),
            },
            strip_label=self.strip_label,
        )
        return framed(self.title, figure.picture(()))

    def _said(self, values: Sequence) -> str:
        pairs = zip(self.controls, values, strict=True)
        return ", ".join(f"{label} = {in_words(v)}" for label, v in pairs)

    def _first(self) -> None:
        """Train once as the panel starts, unless it has been trained."""
        if self.run is None:
            self.train()

    def _repr_html_(self) -> str:
        """Return the picture of the training; to train, run the notebook."""
        self._first()
        return self.picture()

    def _repr_mimebundle_(self, **_: object) -> dict:
        self._first()
        return bundle(self.widget)

    def __repr__(self) -> str:
        done = f"{self.run.done} of {self.run.rounds} rounds" if self.run else "not trained yet"
        return f"{self.title}. {self._said(self.run.values if self.run else self.start)}. {done}"

    # --- widget -----------------------------------------------------------------------------------

    def widget(self) -> Any:
        """Return the panel: one, wherever it is shown."""
        if self._widget is None:
            self._first()
            self._widget = self._made()
        return self._widget

    def _made(self) -> Any:
        import ipywidgets as widgets

        sliders = make_controls(self.controls, self.start, free=True)
        picture, words = widgets.HTML(), widgets.HTML()
        bar = widgets.IntProgress(description="Rounds")
        train = widgets.Button(description="Train", icon="play", button_style="primary")
        pause = widgets.Button(description="Pause", icon="pause", disabled=True)
        stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        drawn = [0.0]

        def show(*, last: bool = False) -> None:
            run = self.run
            busy = not last and run.thread is not None
            if busy and run.go.is_set() and time.monotonic() - drawn[0] < REDRAW:
                return
            bar.max, bar.value, drawn[0] = max(run.rounds, 1), run.done, time.monotonic()
            words.value = _under_way(run) if busy else _ended(run)
            picture.value = self.picture()
            train.disabled, pause.disabled, stop.disabled = busy, not busy, not busy

        def work() -> None:
            self._work(show)
            try:
                show(last=True)
            except Exception as error:  # a picture that cannot be drawn
                self.run.error = self.run.error or error
            if self.run.error is not None:
                words.value = alarm(self.run.error)
            train.disabled, pause.disabled, stop.disabled = False, True, True

        def begin(_: object) -> None:
            self._begin([slider.value for slider in sliders])
            train.disabled, pause.disabled, stop.disabled = True, False, False
            pause.description, words.value = "Pause", "begins"
            self.run.thread = threading.Thread(target=work, daemon=True, name=self.title)
            self.run.thread.start()
            _watch()

        def hold(_: object) -> None:
            go = self.run.go
            if self.run.over.is_set():
                return
            (go.clear if go.is_set() else go.set)()
            pause.description = "Pause" if go.is_set() else "Go on"
            words.value = _under_way(self.run)

        train.on_click(begin)
        pause.on_click(hold)
        stop.on_click(lambda _: self.run.stop())
        show(last=True)
        return box(*sliders, widgets.HBox([train, pause, stop, bar, words]), picture)


_PANELS: weakref.WeakSet[Live] = weakref.WeakSet()


def _joined(first: History | None, then: History) -> History:
    """Return two stretches of one run as one history."""
    if first is None:
        return then
    new = then.frame[then.frame["round"] > first.frame["round"].max()]
    frame = pd.concat([first.frame, new], ignore_index=True)
    return History(frame, then.state, then.diverged | first.diverged)


def _under_way(run: PanelRun) -> str:
    if not run.go.is_set():
        return f"paused after {run.done} of {run.rounds} rounds"
    return f"{run.seconds / max(run.done, 1) * (run.rounds - run.done):.0f} s left"


def _ended(run: PanelRun) -> str:
    if run.history is not None and run.history.diverged:
        return f"diverged in round {min(run.history.diverged.values())}"
    return "done" if run.done == run.rounds else f"stopped after {run.done} of {run.rounds} rounds"


def _watch() -> None:
    """Let an interrupt of the kernel stop all trainings, whether a cell runs or none."""
    from IPython import get_ipython

    def stop(*_: object) -> None:
        for panel in _PANELS:
            if panel.run is not None:
                panel.run.stop()

    def interrupted(result: Any) -> None:
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            stop()

    shell = get_ipython()
    if shell is None or getattr(shell, "_fedlib_watches", False):
        return
    shell._fedlib_watches = True
    shell.events.register("post_run_cell", interrupted)
    # after the message that is being handled, since the kernel then puts back its own handler
    asyncio.get_event_loop().call_later(0.1, signal.signal, signal.SIGINT, stop)
