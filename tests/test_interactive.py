"""The widget without a kernel: all its data, safe HTML, names for every control."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser

import browser
import build
import numpy as np
import pytest

from fedlib.errors import FedlibError
from fedlib.lab.show.interactive import Explorer, Frame
from fedlib.lab.show.plotting import Style

RATES, KINDS = [0.1, 0.2, 0.5], ["calm", "</script><b>wild"]


def frame(rate: float, kind: str) -> Frame:
    turn = np.arange(7.0)
    path = np.stack([turn, np.cos(rate * turn) + len(kind)], axis=1)
    path[3, 1] = np.nan
    strip = np.arange(12).reshape(3, 4) % (2 + len(kind))
    return Frame(
        lines={"amplified": path},
        points={"optimum": [[1 + rate, 2.0]]},
        strip=strip,
        cuts=[2],
        readouts={"value": rate / 3, "kind": kind},
    )


def explorer(title: str = "A & B", **options) -> Explorer:
    return Explorer(title, {"rate γ": RATES, "kind": KINDS}, frame, **options)


class Page(HTMLParser):
    """All elements, and the text of the scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)

    def every(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(explorer()._repr_html_())


def test_every_frame_is_in_the_page_rounded(page):
    data = json.loads(page.scripts[0])
    assert data["n"] == [3, 2]
    for k, (rate, kind) in enumerate((r, k) for r in RATES for k in KINDS):
        (line, point), strip, cuts, texts = data["f"][k]
        want = frame(rate, kind)
        got = np.array([np.nan if v is None else v for v in data["v"][line]]).reshape(-1, 2)
        np.testing.assert_allclose(got, want.lines["amplified"].round(3), atol=6e-4)
        np.testing.assert_allclose(data["v"][point], [1 + rate, 2])
        top = max(np.max(frame(r, k).strip) for r in RATES for k in KINDS)
        assert data["v"][strip] == [
            "".join(str(int(np.ceil(9 * v / top))) for v in row) for row in want.strip
        ]
        assert data["v"][cuts] == [2]
        assert texts == [f"{rate / 3:.3g}", kind]


def test_equal_arrays_are_stored_once(page):
    data = json.loads(page.scripts[0])
    assert len({f[1] for f in data["f"]}) == len(KINDS)


def test_text_cannot_leave_the_script(page):
    html = explorer()._repr_html_()
    assert html.count("</script>") == len(page.scripts) == 2
    assert "<b>" not in html
    assert KINDS[1] in json.loads(page.scripts[0])["t"][1]


def test_ids_follow_the_name_and_the_values():
    a, b = explorer(), explorer(name="second.one")
    assert a._repr_html_() == explorer()._repr_html_()
    ids = [
        attrs["id"] for x in (a, b) for _, attrs in Page(x._repr_html_()).elements if "id" in attrs
    ]
    assert len(ids) == len(set(ids)) == 18
    assert "a-b" in ids and "second.one:rate-γ=0.5" in ids
    assert "second.one:kind=script-b-wild" in ids


def test_controls_have_names_and_changes_are_announced(page):
    ids = {a["id"] for a in page.every("input") + page.every("select")}
    assert {a["for"] for a in page.every("label")} == ids
    assert len(ids) == 2
    assert [a["type"] for a in page.every("input")] == ["range"]
    status = [a for a in page.every("div") if a.get("role") == "status"]
    assert status[0]["aria-live"] == "polite"
    pictures = [a for a in page.every("svg") if a.get("role") == "img"]
    assert pictures[0]["aria-label"].startswith("A & B")


def ticks(values: list) -> list[str]:
    """The words below a slider, one for each value."""
    html = Explorer("t", {"a": values}, lambda a: Frame(lines={"x": [[0, a]]}))._repr_html_()
    return re.findall(
        r"<span id=[^>]*>([^<]*)</span>", html[html.index('class="fedx-v"') : html.index("<svg")]
    )


def test_a_slider_has_a_tick_for_every_value_and_as_many_numbers_as_have_room():
    assert ticks([1, 2, 5]) == ["1", "2", "5"]
    assert ticks([0.05, 0.1, 0.25, 0.5]) == ["0.05", "0.1", "0.25", "0.5"]
    assert ticks([1000, 10_000, 1_000_000]) == ["1000", "10000", "1000000"]
    many = ticks(list(range(-50, 51)))
    assert len(many) == 101 and many[0] == "−50" and many[-1] == "50"
    told = [t for t in many if t]
    assert 3 < len(told) < 10
    long = ticks([1.2345e-10 * 10**k for k in range(5)])
    assert [bool(t) for t in long] == [True, False, True, False, True]


def test_first_state_needs_no_script(page):
    first = explorer().drawing(*explorer().start)
    drawn = [a["d"] for a in page.every("path") if a.get("class") in ("fedx-l", "fedx-m")]
    assert first[0].count("M") == 2  # broken at the NaN
    assert set(first[:4]) - {""} <= set(drawn)
    assert "rate γ = 0.1, kind = calm" in repr(explorer())


def test_figure_without_data_is_small():
    single = Explorer(
        "t", {"a": [1, 2, 3]}, lambda a: Frame(lines={"amplified": [[0, 0], [1, a]]}), xlabel="x"
    )
    assert len(single._repr_html_().encode()) < 7100


def test_logarithmic_axes_place_decades_evenly():
    figure = Explorer(
        "t",
        {"a": [1]},
        lambda a: Frame(lines={"x": [[1, 1], [10, 0.1], [100, 0.01], [-1, 1]]}),
        xlog=True,
        ylog=True,
    )
    xy = np.array(re.findall(r"[ML](\S+) ([\d.]+)", figure.drawing(1)[0]), float)
    np.testing.assert_allclose(np.diff(xy, 2, axis=0), 0, atol=0.11)
    assert len(xy) == 3  # what is negative has no place on a logarithmic axis
    assert ">0</text>" not in figure._repr_html_()


@pytest.mark.parametrize("limits", [None, (1e-3, 1)])
def test_zero_stands_at_the_border_of_a_logarithmic_axis_with_its_own_tick(limits):
    figure = Explorer(
        "t", {"a": [1]}, lambda a: Frame(lines={"x": [[0, 1], [1, 1e-3], [2, 0], [3, 0]]}),
        ylog=True, ylim=limits,
    )  # fmt: skip
    assert "goes on outside" not in figure._repr_html_()
    ys = [float(y) for y in re.findall(r"[ML]\S+ ([-\d.]+)", figure.drawing(1)[0])]
    assert ys[2] == ys[3] == 250
    ticks = re.findall(r'class="fedx-y" x="-6" y="([^"]+)"[^>]*>([^<]*)<', figure._repr_html_())
    places = {text: float(y) for y, text in ticks}
    assert places["0"] == 250
    assert places["1"] == ys[0] and places["10⁻³"] == ys[1]  # the others stand where they did
    assert 10 < places["0"] - places["10⁻³"] < 40  # and leave room for it
    grid = re.search(r'class="fedx-g" d="([^"]*)"', figure._repr_html_()).group(1)
    assert "M0 250.0h" in grid


@pytest.mark.parametrize("log", [False, True])
def test_ticks_and_points_stand_where_their_values_do(log):
    limits = {"x": (1.0, 1000.0), "y": (0.01, 100.0)}
    corners = {"x": [[1, 0.01], [1000, 100]]}
    figure = Explorer(
        "t", {"a": [1]}, lambda a: Frame(lines=corners),
        xlim=limits["x"], ylim=limits["y"], xlog=log, ylog=log,
    )  # fmt: skip
    html, scale = figure._repr_html_(), math.log if log else float
    box = re.search(r'class="fedx-p" x="-6" y="-6" width="(\d+)" height="(\d+)"', html)
    wide, high = (int(size) - 12 for size in box.groups())
    assert figure.drawing(1)[0] == f"M0.0 {high}.0L{wide}.0 0.0"
    grid = re.search(r'class="fedx-g" d="([^"]*)"', html).group(1)
    for axis, line in (("x", r"M(\S+) 0v"), ("y", r"M0 (\S+)h")):
        texts = re.findall(rf'class="fedx-{axis}" x="(\S+)" y="([^" ]+)"[^>]*>([\d.]+)<', html)
        low, high_ = map(scale, limits[axis])
        for x, y, text in texts:
            share = (scale(float(text)) - low) / (high_ - low)
            want = wide * share if axis == "x" else high * (1 - share)
            assert float(x if axis == "x" else y) == pytest.approx(want, abs=0.06), (axis, text)
        assert [x if axis == "x" else y for x, y, _ in texts] == re.findall(line, grid)
        assert len(texts) > 3


def shown(limits: tuple[float, float]) -> list[str]:
    """The numbers on a logarithmic axis."""
    lines = {"x": [[0, limits[0]], [1, limits[1]]]}
    figure = Explorer("t", {"a": [1]}, lambda a: Frame(lines=lines), ylog=True, ylim=limits)
    return re.findall(r'class="fedx-y"[^>]*>([^<]*)<', figure._repr_html_())


def test_an_axis_of_few_decades_has_numbers_between_them():
    assert shown((0.3, 6)) == ["0.5", "1", "2", "5"]
    assert shown((3000, 40_000)) == ["5000", "10⁴", "20000"]
    assert shown((0.09, 11)) == ["0.1", "1", "10"]


def test_a_colour_too_dark_for_a_dark_page_has_a_lighter_one_there():
    def inks(color: str) -> list[str]:
        style = {"x": Style("x", color)}
        figure = Explorer("t", {"a": [1]}, lambda a: Frame(lines={"x": [[0, 0]]}), styles=style)
        html = figure._repr_html_()
        assert f'stroke="{color}"' in html and f'fill="{color}"' in html
        return re.findall(r"light-dark\(([^)]*)\)", html[html.index("<svg") :])

    assert inks("#0072b2") == [], "3.7 times as bright as the page"
    both = inks("#440154")
    assert len(set(both)) == 1 and len(both) == 4  # line and marks, in the figure and in the key
    assert both[0] == "#440154,#8f6798", "four parts of white in ten"


def test_the_readouts_are_those_of_the_start():
    page = explorer(start=(0.5, KINDS[0]))._repr_html_()
    assert "<dt>value</dt><dd>0.167</dd>" in page


def crosses(line: list, **options) -> list[tuple[float, float]]:
    """Where the crosses of a figure with one line stand, in user units."""
    limits = {"xlim": (0, 10), "ylim": (0, 10)} | options
    figure = Explorer("t", {"a": [1]}, lambda a: Frame(lines={"x": line}), **limits)
    paths = figure.drawing(1)
    assert ("goes on outside" in figure._repr_html_()) == (len(paths) == 4)
    found = re.findall(r"M(\S+) ([-\d.]+)m", paths[3]) if len(paths) == 4 else []
    return [(float(x), float(y)) for x, y in found]


WIDE, HIGH, IN = 380, 250, 6  # the panel; a cross stands this far inside so that all of it is seen


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ([[0, 5], [2, 15]], [(WIDE / 10, IN)]),  # through the upper border at (1, 10)
        ([[0, 5], [2, -5]], [(WIDE / 10, HIGH - IN)]),
        ([[0, 5], [2, 15], [4, 5], [8, 25]], [(5 * WIDE / 10, IN)]),  # the last time counts
        ([[0, 5], [2, 15], [4, -5], [6, 30]], [(WIDE / 10, IN)]),  # swings, and never comes back
        ([[0, 5], [4, 5], [6, math.inf]], [(4 * WIDE / 10, IN)]),
        ([[0, 5], [4, 5], [6, -math.inf], [8, math.nan]], [(4 * WIDE / 10, HIGH - IN)]),
        ([[0, 5], [4, 5], [6, math.nan], [8, math.nan]], [(4 * WIDE / 10, HIGH / 2)]),
        ([[0, 5], [2, 15], [4, 5]], []),  # comes back
        ([[0, 5], [2, math.nan], [4, 5]], []),  # a gap
        ([[0, 5], [2, 5], [math.nan, math.nan]], []),  # a gap before nothing
        ([[0, 5], [20, 5]], []),  # more rounds than are shown
        ([[0, 15], [2, 15]], []),  # was never inside
    ],
)
def test_a_line_that_leaves_for_good_ends_at_a_cross(line, want):
    found = crosses(line)
    np.testing.assert_allclose(np.reshape(found, (-1, 2)), np.reshape(want, (-1, 2)), atol=1.5)


def test_a_plane_may_be_left_on_any_side_and_zero_is_no_divergence():
    plane = {"equal": True, "xlim": (0, 10), "ylim": (0, 10)}
    assert len(crosses([[5, 5], [30, 5]], **plane)) == 1
    log = {"ylog": True, "ylim": (0.01, 100)}
    assert crosses([[0, 1], [5, 0.0001]], **log) == []
    assert crosses([[0, 1], [5, 1e4]], **log) == [pytest.approx((95, IN), abs=0.2)]


def named() -> Explorer:
    """A figure with a line for every value of a control, and one more, not at the last rate."""
    lines = {name: [[0, k], [1, k + 1]] for k, name in enumerate(["calm", "wild", "mean"])}
    frame = lambda rate, kind: Frame(lines=dict(list(lines.items())[: 3 - (rate == 3)]))  # noqa: E731
    controls = {"rate": [1, 2, 3], "kind": ["calm", "wild"]}
    return Explorer("named", controls, frame, start=(1, "wild"))


def test_the_chosen_line_stands_out():
    marks = [a for a in Page(named()._repr_html_()).every("path") if "data-c" in a]
    assert [(a["data-c"], "data-on" in a) for a in marks] == [("1,0", False), ("1,1", True)]


def test_the_legend_names_what_is_drawn():
    for rate, gone in ((1, 0), (3, 1)):
        legend = Page("".join(named().picture((rate, "wild"))))
        assert sum("hidden" in a for a in legend.every("span")) == gone


def test_a_readout_that_is_not_finite_says_so():
    for value in (math.inf, -math.inf, math.nan, np.float64("inf"), np.float32("nan")):
        figure = Explorer("t", {"a": [1]}, lambda a, v=value: Frame(readouts={"far": v}))
        assert "<dt>far</dt><dd>diverged</dd>" in figure._repr_html_()


def test_equal_scale():
    figure = Explorer("t", {"a": [1]}, lambda a: Frame(lines={"x": [[0, 0], [3, 1]]}), equal=True)
    assert figure._x[1] == pytest.approx(-figure._y[1])


def test_errors_say_what_is_missing():
    with pytest.raises(FedlibError, match="1 of 2 frames are missing"):
        Explorer("t", {"a": [1, 2]}, {(1,): Frame()})
    with pytest.raises(FedlibError, match="no combination"):
        explorer(start=(0.3, "calm"))
    with pytest.raises(FedlibError, match="has no values"):
        Explorer("t", {"a": []}, {})
    with pytest.raises(FedlibError, match="'my-toy' would be one"):
        explorer(name="my toy")
    with pytest.raises(FedlibError, match="same address"):
        Explorer("t", {"a": ["b c", "b-c"]}, lambda a: Frame())
    with pytest.raises(FedlibError, match="same readouts"):
        Explorer("t", {"a": [1, 2]}, lambda a: Frame(readouts={str(a): a}))


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_script_parses(page, tmp_path):
    file = tmp_path / "script.js"
    file.write_text(page.scripts[1])
    subprocess.run(["node", "--check", str(file)], check=True)


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("#a-b", True),
        ("#a-b:rate-γ=0.5", True),
        ("#a-b:rate-γ=0.5&kind=calm", True),
        ("page.html#a-b:rate-%CE%B3=0.5&amp;kind=calm", True),
        ("#b-a:rate-γ=0.5", False),
        ("#a-b:rate=0.5", False),
        ("#a-b:rate-γ=0.3", False),
        ("#a-b:rate-γ=0.5&kind=odd", False),
        ("#a-b:", False),
        ("other.html#a-b:rate-γ=0.5", False),
    ],
)
def test_the_link_check_knows_figures_controls_and_values(link, leads, tmp_path):
    (tmp_path / "other.html").write_text("<p id=other></p>")
    figure = explorer()._repr_html_()
    (tmp_path / "page.html").write_text(f'<a href="{link}">x</a>{figure}', "utf-8")
    wrong = [] if leads else [f"page.html: {unescape(link)} leads to no such place on that page"]
    assert build.check_links(tmp_path) == wrong


# --- in a browser ---------------------------------------------------------------------------

DRAWN = """[...document.querySelectorAll(".fedx")].map(root =>
  [...root.querySelectorAll("svg[role=img] path")]
    .filter(path => /^fedx-[lmhk]$/.test(path.className.baseVal) && !path.closest(".fedx-o"))
    .map(path => path.getAttribute("d")))"""
MOVE = """(([k, value]) => {
  const control = document.querySelectorAll("input,select")[k];
  control.value = value;
  control.dispatchEvent(new Event("input"));
})(%s)"""


LINKS = [
    "a-b:rate-γ=0.2&amp;kind=calm",
    "a-b:kind=script-b-wild",
    "a-b:rate-γ=0.3",
    "a-b:rate-γ=0.5&amp;kind=odd",
    "another:rate-γ=0.5",
]


@pytest.fixture
def tab(chromium, tmp_path) -> Iterator[browser.Page]:
    """A page with two figures in which nothing has been moved yet."""
    figures = explorer()._repr_html_() + explorer("Another")._repr_html_()
    figures += (
        named()._repr_html_()
        + "<p style='height:4000px'></p>"
        + "".join(f'<a href="#{to}">{to}</a> ' for to in LINKS)
    )
    file = tmp_path / "page.html"
    file.write_text(f"<!doctype html><meta charset=utf-8>{figures}")
    page = chromium.open()
    page.show(file.as_uri())
    yield page
    assert page.complaints == []
    page.close()


def in_order(figure: Explorer, *values: object) -> list[str]:
    paths = figure.drawing(*values)
    return paths[4:] + paths[:4]  # the strip stands above the axes


@pytest.mark.slow
def test_browser_draws_what_python_draws(tab):
    tab.evaluate(MOVE % [0, 2])
    tab.evaluate(MOVE % [1, 1])
    moved, still, _ = tab.evaluate(DRAWN)
    assert_drawn(moved, in_order(explorer(), RATES[2], KINDS[1]))
    assert_drawn(still, in_order(explorer(), *explorer().start))  # the other did not move
    assert tab.evaluate("document.querySelector('dd').textContent") == "0.167"
    slider = "document.querySelector('input')"
    assert tab.evaluate(f"{slider}.getAttribute('aria-valuetext')") == "0.5"
    assert tab.evaluate("document.querySelector('.fedx .on').textContent") == "0.5"


@pytest.mark.slow
def test_the_line_that_stands_out_follows_the_control(tab):
    wide = """[...document.querySelectorAll("#named .fedx-p>.fedx-l")].map(e =>
      getComputedStyle(e).strokeWidth)"""
    assert tab.evaluate(wide) == ["2px", "4px", "2px"]
    tab.evaluate(MOVE % [5, 0])
    assert tab.evaluate(wide) == ["4px", "2px", "2px"]
    faint = "getComputedStyle(document.querySelectorAll('#named .fedx-o path')[1]).strokeWidth"
    assert tab.evaluate(faint) == "1px"


@pytest.mark.slow
def test_the_legend_follows_the_control(tab):
    shown = """[...document.querySelectorAll("#named .fedx-e span")].filter(e =>
      e.checkVisibility()).map(e => e.textContent)"""
    assert tab.evaluate(shown) == ["calm", "wild", "mean"]
    tab.evaluate(MOVE % [4, 2])
    assert tab.evaluate(shown) == ["calm", "wild"]


@pytest.mark.slow
def test_controls_are_easy_to_hit(tab):
    sizes = "[...document.querySelectorAll('input,select')].map(e => e.getBoundingClientRect())"
    boxes = tab.evaluate(f"{sizes}.map(b => [b.x, b.y, b.width, b.height])")
    assert all(height >= 24 for *_, height in boxes)
    x, y, wide, high = boxes[0]
    for share, value in ((0.98, "2"), (0.5, "1")):  # at the upper border, far from the thumb
        at = {"x": x + share * wide, "y": y + 1.5, "button": "left", "clickCount": 1}
        tab.call("Input.dispatchMouseEvent", type="mousePressed", **at)
        tab.call("Input.dispatchMouseEvent", type="mouseReleased", **at)
        assert tab.evaluate("document.querySelector('input').value") == value


@pytest.mark.slow
def test_the_lines_before_a_change_stay_as_a_ghost_on_the_screen(tab):
    ghost = "[...document.querySelectorAll('.fedx-o path')].map(e => e.getAttribute('d'))"
    assert tab.evaluate(ghost) == []
    tab.evaluate(MOVE % [0, 1])
    assert_drawn(tab.evaluate(ghost), [explorer().drawing(RATES[0], KINDS[0])[0], ""])
    tab.evaluate(MOVE % [0, 1])  # no change, the ghost stays
    assert_drawn(tab.evaluate(ghost), [explorer().drawing(RATES[0], KINDS[0])[0], ""])
    tab.evaluate(MOVE % [0, 2])
    assert_drawn(tab.evaluate(ghost), [explorer().drawing(RATES[1], KINDS[0])[0], ""])
    shown = "getComputedStyle(document.querySelector('.fedx-o')).display"
    assert tab.evaluate(shown) != "none"
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.evaluate(shown) == "none"


@pytest.mark.slow
def test_a_link_in_prose_sets_the_figure_and_leads_to_it(tab):
    def click(k: int) -> list[str]:
        script = f"""(async () => {{
          document.querySelectorAll("p ~ a")[{k}].click();
          await new Promise(done => setTimeout(done, 50));
          const all = [...document.querySelectorAll("input,select")];
          return all.slice(0, 4).map(e => e.value);
        }})()"""
        return tab.evaluate(script)

    top = "document.querySelector('.fedx').getBoundingClientRect().top"
    tab.evaluate("scrollTo(0, 4000)")
    assert click(0) == ["1", "0", "0", "0"]
    assert abs(tab.evaluate(top)) < 20
    assert tab.evaluate("document.activeElement.tagName") == "SELECT"
    assert_drawn(tab.evaluate(DRAWN)[0], in_order(explorer(), RATES[1], KINDS[0]))
    assert click(1) == ["1", "1", "0", "0"]  # the other control stays
    assert click(2) == click(3) == ["1", "1", "0", "0"]  # values that do not exist
    assert click(4) == ["1", "1", "2", "0"]
    tab.evaluate(MOVE % [2, 0])
    assert click(4) == ["1", "1", "2", "0"]  # the same link once more
    tab.evaluate("""new Promise(done => {
      addEventListener("hashchange", () => setTimeout(done, 50), {once: true});
      history.go(-4);
    })""")
    assert tab.evaluate("document.querySelectorAll('select')[0].value") == "0"  # and back


@pytest.mark.slow
def test_a_page_opened_with_a_setting_shows_it(tab):
    address = tab.evaluate("location.href")
    tab.show("about:blank")
    tab.show(f"{address}#a-b:rate-%CE%B3=0.5&kind=calm")
    assert_drawn(tab.evaluate(DRAWN)[0], in_order(explorer(), RATES[2], KINDS[0]))


def assert_drawn(got: list[str], want: list[str]) -> None:
    """The paths are the wanted ones, up to one unit in the last place."""
    numbers = r"-?\d*\.?\d+"
    for mine, theirs in zip(want, got, strict=True):
        assert re.sub(numbers, "", mine) == re.sub(numbers, "", theirs)
        a, b = (np.array(re.findall(numbers, d), float) for d in (mine, theirs))
        np.testing.assert_allclose(a, b, atol=0.11)
