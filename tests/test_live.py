"""Explorers and trainings as widgets: what their controls do, held against the plain calls."""

import re
import subprocess
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib.engine import Evaluation, FederatedDataset, Model, Task, simulate
from fedlib.errors import FedlibError
from fedlib.lab.show import controls, live
from fedlib.lab.show.controls import slider_stops
from fedlib.lab.show.interactive import Explorer, Frame
from fedlib.lab.show.live import Live
from fedlib.papers.fedavg import FedAvg
from fedlib.population.participation import Full


def falls(rate, steps):
    x = np.arange(steps + 1)
    return Frame(lines={"x": np.stack([x, (1 - rate) ** x], 1)}, readouts={"end": rate})


def toy(**options):
    controls = {"rate γ": [0.1, 0.5, 0.9], "steps": [2, 4, 8], "kind": ["a"]}
    frames = lambda rate, steps, _: falls(rate, steps)  # noqa: E731
    return Explorer("Toy", controls, frames, start=(0.1, 4, "a"), name="toy", **options)


def parts(box, *kinds):
    """Return the widgets of some kinds inside a box, in their order."""
    inside = [box]
    for widget in inside:
        inside += getattr(widget, "children", ())
    return [w for w in inside if type(w).__name__ in kinds]


def picture(box):
    return parts(box, "HTML")[0].value


def button(box, name):
    return next(b for b in parts(box, "Button") if b.description == name)


@pytest.mark.parametrize(
    ("values", "count"), [([1, 2, 5], 5), ([0.0, 0.3, 1.0], 62), ([0.01, 10], 62), ([1, 500], 49)]
)
def test_a_slider_goes_from_the_smallest_to_the_largest_value(values, count):
    steps = slider_stops(values)
    assert steps == sorted(set(steps)) and {*values} <= {*steps}
    assert (steps[0], steps[-1]) == (min(values), max(values)) and abs(len(steps) - count) <= 3
    assert all(isinstance(v, int) for v in steps) == isinstance(values[0], int)
    ratios = np.diff(np.log(steps)) if values[-1] >= 10 * values[0] > 0 else np.diff(steps)
    assert isinstance(values[0], int) or ratios.max() < 2.2 * np.median(ratios)


def test_any_value_is_drawn_as_the_page_would_draw_it():
    box = toy().live()
    rate, steps = parts(box, "SelectionSlider")
    new = [v for v in (v for _, v in rate.options) if v not in (0.1, 0.5, 0.9)][10]
    rate.value, steps.value = new, 7
    x = np.arange(8)
    line = np.stack([x, (1 - new) ** x], 1)
    limits = dict(xlim=toy()._span[0], ylim=toy()._span[1])
    alone = Explorer("Toy", {}, {(): Frame(lines={"x": line})}, **limits)
    assert alone.drawing()[0] in picture(box) and f"<dd>{new:.3g}</dd>" in picture(box)


def test_a_link_sets_a_control_and_start_again_puts_it_back():
    box = toy().live()
    (address,) = parts(box, "Text")
    first = picture(box)
    address.value = "toy:rate-γ=0.5&steps=8"
    assert [s.value for s in parts(box, "SelectionSlider")] == [0.5, 8] and picture(box) != first
    button(box, "Keep these lines").click()
    parts(box, "SelectionSlider")[0].value = 0.9
    ghost = picture(box).partition('class="fedx-o">')[2].partition("</g>")[0]
    assert toy().lines(0.5, 8, "a") in ghost
    button(box, "Start again").click()
    assert picture(box) == first
    address.value = "toy:rate-γ=0.5&steps=8"
    assert [s.value for s in parts(box, "SelectionSlider")] == [0.5, 8], "the same link again"


def test_an_author_s_function_is_asked_once_a_setting():
    asked = []

    def frames(rate):
        asked.append(rate)
        return falls(rate, 3)

    box = Explorer("Toy", {"rate": [0.1, 0.5, 0.9]}, frames).live()
    (rate,) = parts(box, "SelectionSlider")
    del asked[:]
    rate.value = rate.options[7][1]
    rate.value = rate.options[8][1]
    assert asked == [rate.options[7][1], rate.options[8][1]]


def test_a_picture_that_cannot_be_drawn_leaves_a_panel_that_can_start_again():
    one = panel(strip=lambda state, task: [["no number"]])
    one.run = live.PanelRun((2, 0.1), 10)
    box = one.widget()
    button(box, "Train").click()
    settled(one)
    assert not button(box, "Train").disabled and button(box, "Stop").disabled
    assert 'role="alert"' in parts(box, "HTML")[1].value


def test_a_metric_that_is_not_there():
    with pytest.raises(FedlibError, match="Nothing is called 'train f1': there is train"):
        panel(metric="f1")._repr_html_()


def test_values_that_were_not_computed_are_no_stops_of_a_figure_that_is_not_free():
    (rate, steps) = parts(toy(free=False).live(), "SelectionSlider")
    assert [v for _, v in rate.options] == [0.1, 0.5, 0.9]
    assert [v for _, v in steps.options] == [2, 4, 8]


def test_what_an_author_s_function_raises_is_said_and_the_figure_goes_on():
    def frames(rate):
        if rate not in (0.1, 0.5, 0.9):
            raise ValueError(f"no {rate}")
        return falls(rate, 3)

    box = Explorer("Toy", {"rate": [0.1, 0.5, 0.9]}, frames).live()
    (rate,) = parts(box, "SelectionSlider")
    before = picture(box)
    rate.value = rate.options[3][1]
    assert f"ValueError: no {rate.value}" in parts(box, "HTML")[1].value
    assert picture(box) == before
    rate.value = 0.9
    assert picture(box) != before and not parts(box, "HTML")[1].value


def test_no_kernel_no_widget():
    assert controls.bundle(toy().live) == {} and toy()._repr_mimebundle_() == {}


# --- trainings ------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 3))
DATA = FederatedDataset.build(X, (X[:, 0] > 0).astype(int), np.split(np.arange(40), 4))
TASK = Task(Model(torch.nn.Linear(3, 2).double()), DATA)


def build(steps, rate):
    return FedAvg(Full(4), rate, local_steps=steps, batch_size=5), TASK


def panel(**options):
    controls = {"local steps": [1, 2, 5], "rate": [0.01, 0.1, 1.0]}
    settings = dict(rounds=10, every=3, seeds=(1, 2), start=(2, 0.1)) | options
    return Live("Toy", controls, settings.pop("build", build), **settings)


def until(true, patience=20.0):
    """Wait for something that another thread does."""
    over = time.monotonic() + patience
    while not true():
        assert time.monotonic() < over
        time.sleep(0.01)


def settled(one, patience=20.0):
    """Wait for a panel's thread."""
    one.run.thread.join(patience)
    assert not one.run.thread.is_alive()


def test_a_panel_trains_as_simulate_does():
    algorithm, task = build(5, 0.01)
    whole = simulate(algorithm, task, 10, (1, 2), evaluation=Evaluation(3), progress=False)
    history = panel().train(5, 0.01)
    assert torch.equal(history.state.x, whole.state.x)
    pd.testing.assert_frame_equal(history.frame, whole.frame)


def test_the_picture_has_the_run_and_the_run_before():
    one = panel(ylog=True)
    page = one._repr_html_()
    assert "local steps = 2, rate = 0.1" in page and "10 of 10" in page
    assert "the run before" not in page
    one.train(1, 1.0)
    assert "the run before" in one.picture()
    drawn = one.curve(one.run)
    rows = one.history.frame.query("metric == 'loss'").groupby("round")["value"].mean()
    assert np.allclose(drawn, np.stack([rows.index, rows], 1), rtol=1e-14)


def test_pause_go_on_and_stop():
    reached, gate = threading.Event(), threading.Semaphore(0)

    def measure(state, task):
        reached.set()
        gate.acquire()
        return {("train", "loss"): torch.zeros(2)}

    one = panel(rounds=9, every=1, measure=measure)
    one.run = live.PanelRun((2, 0.1), 9)  # nothing has been trained
    box = one.widget()
    button(box, "Train").click()
    assert reached.wait(20)  # the thread is in its first look: it has one round to end
    button(box, "Pause").click()
    for _ in range(3):  # two looks for that round, and one that a second would use
        gate.release()
    until(lambda: "paused after 1 of 9 rounds" in parts(box, "HTML")[1].value)
    done = one.run.done
    time.sleep(0.2)
    assert one.run.done == done == 1 and one.run.thread.is_alive()
    button(box, "Go on").click()
    for _ in range(2):
        gate.release()
    until(lambda: one.run.done > done)
    button(box, "Stop").click()
    for _ in range(20):
        gate.release()
    settled(one)
    assert done < one.run.done < 9 and f"stopped after {one.run.done} of 9 rounds" in str(
        [w.value for w in parts(box, "HTML")]
    )
    assert one.history.frame["round"].max() == one.run.done


def test_two_panels_at_once_and_an_error_in_one():
    def wrong(steps, rate):
        raise FedlibError("There is no such method.")

    good, bad = panel(), panel(build=wrong)
    for one in (good, bad):
        one.run = live.PanelRun((2, 0.1), 10)
    boxes = [one.widget() for one in (good, bad)]
    for box in boxes:
        button(box, "Train").click()
    settled(good), settled(bad)
    assert good.run.done == 10
    assert "no such method" in str([w.value for w in parts(boxes[1], "HTML")])
    with pytest.raises(FedlibError, match="no such method"):
        bad.train()


def test_a_run_that_diverges_ends_at_a_cross():
    def steep(steps, rate):
        return FedAvg(Full(4), 1e200, local_steps=2), Task(TASK.model, DATA, l2=1.0)

    one = panel(build=steep, every=1)
    one.train()
    assert one.history.diverged and one.run.done < 10
    assert "goes on outside" in one.picture() and "diverged" in one.picture()


def test_a_run_that_diverged_before_does_not_set_the_axis():
    def rates(steps, rate):
        return FedAvg(Full(4), rate, local_steps=2), Task(TASK.model, DATA, l2=1.0)

    alone, after = panel(build=rates, ylog=True), panel(build=rates, ylog=True)
    alone.train(2, 0.1)
    after.train(2, 1e9)
    assert after.history.diverged or after.curve(after.run)[-1, 1] > 1e6
    after.train(2, 0.1)
    drawn = [re.search(r'class="fedx-l"[^>]* d="([^"]+)"/>(?!.*fedx-l)', one.picture(), re.S)
             for one in (alone, after)]  # fmt: skip
    assert drawn[0][1] == drawn[1][1], "the curve is as high as without the run before"


def test_a_new_start_stops_the_training_before_it():
    one = panel(rounds=10**6, every=1)
    one.run = live.PanelRun((2, 0.1), 1)
    box = one.widget()
    button(box, "Train").click()
    first = one.run
    until(lambda: first.done)
    one.rounds = 5
    one._begin((1, 0.1))
    assert not first.thread.is_alive() and 0 < first.done < 10**6
    assert one.before is first and one.run is not first


def test_a_panel_shown_twice_is_one_panel():
    one = panel()
    assert one.widget() is one.widget() and one.run.done == 10


def test_a_figure_goes_on_with_the_names_of_its_moment():
    names = {"slope": 2.0, "unused": object()}
    code = "def helper(x):\n    return slope * x\ndef f(x):\n    return [helper(y) for y in (x, 1)]"
    exec(code, names)
    kept = controls.frozen(names["f"])
    names["slope"] = 3.0
    assert names["f"](1) == [3.0, 3.0] and kept(1) == [2.0, 2.0]
    assert "unused" not in kept.__globals__


def test_a_frozen_function_makes_tensors():
    """The first tensor of a process imports, by the builtins of whoever asks for it."""
    code = "import torch\nfrom fedlib.lab.show.controls import frozen\n"
    code += "def make(x):\n    return torch.tensor([max(x, 0.1)])\nprint(frozen(make)(0.5).item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0.5", done.stderr


def test_a_control_without_values():
    with pytest.raises(FedlibError, match="'rate' has no values"):
        Live("Toy", {"rate": []}, build, rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(start=(1,)), "start has 1 values for 2 controls"),
        (dict(rounds=-1), "rounds is 1 or more; got -1"),
        (dict(rounds=None), "FedAvg goes on for ever. Give rounds="),
        (dict(build=lambda steps, rate: build(steps, rate)[0]), "an algorithm and a task; got"),
    ],
)
def test_a_panel_that_was_put_together_wrongly_says_how(options, message):
    with pytest.raises(FedlibError, match=message):
        panel(**options).train()
