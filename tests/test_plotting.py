"""One look a method, and lines that show the numbers they claim to show."""

from __future__ import annotations

import itertools

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from fedlib.errors import FedlibError
from fedlib.lab.show import plotting

METHODS = ["amplified", "no-amplification", "wait-minibatch", "wait-full", "matched-rate"]
PROCESSES = [
    *["full", "independent", "regularized", "periodic", "periodic-sampler"],
    *["cyclic", "markov", "drift"],
]


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def luminance(color: str) -> float:
    """Relative luminance after WCAG."""
    rgb = np.array(matplotlib.colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def records(values: dict[str, list[list[float]]]) -> pd.DataFrame:
    """Tidy rows from method -> seeds -> values at the rounds 0, 10, 20, ..."""
    return pd.DataFrame(
        [
            dict(
                method=m,
                seed=s,
                round=10 * k,
                clock=50.0 * k,
                split="train",
                metric="loss",
                value=v,
            )
            for m, runs in values.items()
            for s, run in enumerate(runs)
            for k, v in enumerate(run)
        ]
    )


def test_the_styles_of_the_table_differ_in_colour_and_in_grey():
    for group in (METHODS, PROCESSES):
        looks = [plotting.style(name) for name in group]
        assert len({s.color for s in looks}) == len(group)
        for a, b in itertools.combinations(looks, 2):
            assert a.marker != b.marker
    looks = [plotting.style(name) for name in METHODS + PROCESSES]
    assert len({(s.marker, s.dashes) for s in looks}) == len(looks)


@pytest.mark.parametrize("color", plotting.PALETTE)
def test_colours_stand_out_on_white_and_on_a_dark_page(color):
    dark = luminance("#14181e")
    assert 1.05 / (luminance(color) + 0.05) >= 3
    assert (luminance(color) + 0.05) / (dark + 0.05) >= 3


def test_unknown_name_gets_the_same_look_every_time():
    look = plotting.style("some-new-method")
    assert look == plotting.style("some-new-method")
    assert look.label == "some new method"
    assert look.marker not in {plotting.style(n).marker for n in METHODS + PROCESSES}


def test_curves_draw_the_mean_and_the_sample_deviation():
    runs = np.array([[1.0, 2.0, 4.0], [3.0, 2.0, 0.0], [2.0, 5.0, 5.0]])
    ax = plotting.curves(records({"amplified": runs.tolist()}), "loss")
    line = ax.lines[0]
    np.testing.assert_allclose(line.get_xdata(), [0, 10, 20])
    np.testing.assert_allclose(line.get_ydata(), runs.mean(0), rtol=0, atol=1e-15)
    assert line.get_color() == plotting.style("amplified").color
    corners = ax.collections[0].get_paths()[0].vertices
    low, high = runs.mean(0) - runs.std(0, ddof=1), runs.mean(0) + runs.std(0, ddof=1)
    for k, r in enumerate((0, 10, 20)):
        assert {round(v, 9) for v in corners[corners[:, 0] == r, 1]} == {
            round(low[k], 9),
            round(high[k], 9),
        }


def test_band_can_be_the_range_and_one_seed_has_none():
    frame = records({"amplified": [[1, 2], [5, 0]], "wait-full": [[1, 1]]})
    ax = plotting.curves(frame, "loss", band="range")
    assert len(ax.collections) == 1
    ys = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (ys.min(), ys.max()) == (0, 5)
    with pytest.raises(FedlibError, match="band"):
        plotting.curves(frame, "loss", band="stdd")


def test_smoothing_is_a_centred_mean():
    frame = records({"amplified": [[0.0, 3.0, 6.0, 0.0, 3.0]]})
    for width in (3, 0.6):
        ax = plotting.curves(frame, "loss", smooth=width)
        np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.5, 3, 3, 3, 1.5])
    lost = records({"amplified": [[0.0, 3.0, 6.0, np.nan, np.nan]]})
    ax = plotting.curves(lost, "loss", smooth=3)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1.5, 3, 4.5, np.nan, np.nan])


def test_diverged_run_is_marked_where_it_ends_and_counted():
    nan = float("nan")
    frame = records({"amplified": [[3, 2, 1], [5, 8, nan]], "wait-full": [[1, float("inf"), nan]]})
    ax = plotting.curves(frame, "loss")
    mean, cross, gone, end = ax.lines
    np.testing.assert_allclose(mean.get_ydata(), [4, 5, 1])
    assert cross.get_marker() == "x"
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([10], [8])
    assert (list(end.get_xdata()), list(end.get_ydata())) == ([0], [1])
    assert np.isnan(gone.get_ydata()[1:]).all()
    words = [t.get_text() for t in ax.get_legend().get_texts()]
    assert words == ["amplified (1 of 2 diverged)", "wait, full data (1 of 1 diverged)"]


def test_numeric_settings_get_ordered_styles():
    frame = records({"amplified": [[1, 2]]}).assign(amplify=10.0)
    frame = pd.concat([frame, frame.assign(amplify=2.0)])
    ax = plotting.curves(frame, "loss", by="amplify", x="clock")
    assert ax.get_xlabel() == "clock"
    colors = [line.get_color() for line in ax.lines]
    assert colors == [plotting.sweep([2.0, 10.0])[v].color for v in (10.0, 2.0)]


def test_records_that_are_ambiguous_are_refused():
    frame = records({"amplified": [[1, 2]]})
    with pytest.raises(FedlibError, match="several splits"):
        plotting.curves(pd.concat([frame, frame.assign(split="test")]), "loss")
    with pytest.raises(FedlibError, match="several values"):
        plotting.curves(pd.concat([frame, frame]), "loss")
    with pytest.raises(FedlibError, match="Did you mean 'loss'"):
        plotting.curves(frame, "los")
    with pytest.raises(FedlibError, match="eta is missing"):
        plotting.curves(frame, "loss", by="eta")
    apart = records({"amplified": [[3, 2], [5, 8]]}).assign(spent=[0.0, 10, 0, 11])
    with pytest.raises(FedlibError, match="looked at at different values of spent.*regrid"):
        plotting.curves(apart, "loss", x="spent")


def test_seeds_that_were_looked_at_elsewhere_get_common_points():
    frame = records({"a": [[0, 2, 4], [1, 3, 9]], "b": [[5, 7], [6, 6]]})
    frame["rounds"] = [0, 1, 4, 0, 2, 2, 0, 2, 0, 4]
    found = plotting.regrid(frame, "rounds", by="method", points=3)
    wide = found.pivot(index=["method", "rounds"], columns="seed", values="value")
    by_hand = {0: [0, 2, 2 + 2 / 3], 1: [1, 5, 9]}  # up to 2 rounds; at 2 rounds the last look
    np.testing.assert_allclose(wide.loc["a"], pd.DataFrame(by_hand))
    assert list(wide.loc["a"].index) == [0, 1, 2] == list(wide.loc["b"].index)
    np.testing.assert_allclose(wide.loc["b", 1], 6)
    plotting.curves(found, "loss", "train", x="rounds", by="method")
    lost = frame.assign(value=frame["value"].where(frame["rounds"] < 4))
    found = plotting.regrid(lost, "rounds", by="method", points=3)
    assert found[(found["method"] == "a") & (found["seed"] == 0)]["value"].isna().sum() == 1


def test_label_histogram_shows_shares():
    table = pd.DataFrame([[3, 1], [0, 5]], columns=[0, 1]).assign(size=[4, 5])
    ax = plotting.label_histogram(table)
    np.testing.assert_allclose(ax.images[0].get_array(), [[0.75, 0], [0.25, 1]])


def test_use_gives_opaque_white_figures():
    with matplotlib.rc_context():
        plotting.use()
        assert plt.rcParams["figure.facecolor"] == "white"
        assert not plt.rcParams["savefig.transparent"]
