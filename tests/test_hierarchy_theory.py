"""The theory of the hierarchy chapter: laws of the counts, bounds, and counterexamples."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from fedlib.errors import FedlibError
from fedlib.papers.bound import Bound
from fedlib.papers.hierarchy import counts, theory
from fedlib.papers.hierarchy.algorithm import weights
from fedlib.papers.hierarchy.clock import timeline
from fedlib.population.delays import Deterministic, ShiftedExponential

LAWS = [(1.0, 0.1, 5.0), (1.0, 0.55, 5.0), (0.3, 1.0, 4.0), (0.0, 1.0, 4.0), (1.0, 0.1, 0.0)]
each_law = pytest.mark.parametrize(("c", "m", "S"), LAWS)


def walks(c, m, S, copies=40_000, steps=60, seed=0):
    """Draw t and Y by adding delays one after the other."""
    ends = np.random.default_rng(seed).standard_exponential((copies, steps))
    ends = (c + m * ends).cumsum(1)
    t = (ends < S).sum(1) + 1
    assert t.max() < steps
    return t, ends[np.arange(copies), t - 1]


def near(sample, exact, errors=4.5):
    """Tell whether a sample's mean is where it should be, in standard errors."""
    return abs(np.mean(sample) - exact) <= errors * np.std(sample) / math.sqrt(len(sample)) + 1e-9


# ---- counts of one group


@each_law
def test_06_the_law_of_t_is_the_poisson_formula(c, m, S):
    law = ShiftedExponential(c, m)
    t, Y = walks(c, m, S)
    mean, square = counts.moments(law, S)
    assert near(t, mean) and near(t**2.0, square)
    p = counts.law_of(law, S)
    assert p.sum() == pytest.approx(1, abs=1e-12) and (p >= 0).all()
    for n, chance in enumerate(p, 1):
        assert near(t == n, chance) or chance < 1e-3
    assert near(Y, mean * (c + m)) and counts.expected_busy(law, S) == mean * (c + m)  # Wald
    assert t.max() <= counts.largest(law, S)


def test_06_the_clock_draws_this_law():
    groups = [ShiftedExponential(1.0, 0.55), ShiftedExponential(0.4, 0.3)]
    line = timeline(3, 5.0, 40_000.0, groups, ShiftedExponential(0.0, 1.0))
    for i, law in enumerate(groups):
        assert near(line.counts[:, i], counts.moments(law, 5.0)[0])
        assert near(line.busy[:, i], counts.expected_busy(law, 5.0))
    assert near(line.busy.max(1), counts.slowest(groups, 5.0)[0])
    assert np.allclose(line.idle.mean(0), counts.expected_idle(groups, 5.0), rtol=0.05)


def test_expected_averages_are_those_of_a_long_record():
    groups = [ShiftedExponential(1.0, 0.55), ShiftedExponential(0.4, 0.3)]
    server = ShiftedExponential(0.0, 1.0)
    known = counts.averages(timeline(3, 5.0, 40_000.0, groups, server).counts)
    exact = counts.expected_averages(groups, server, 5.0, 40_000.0)
    for name in ("rounds", "inverse", "drift", "before", "pairs"):
        assert np.allclose(getattr(known, name), getattr(exact, name), rtol=0.02), name


def test_two_iterations_by_hand():
    """P(t > 2) = P(tau_1 + tau_2 < S), by integrating over the first delay."""
    c, m, S = 0.4, 0.7, 2.0
    chance, _ = integrate.quad(
        lambda g: math.exp(-g / m) / m * (1 - math.exp(-(S - 2 * c - g) / m)), 0, S - 2 * c
    )
    assert counts.survival(ShiftedExponential(c, m), S)[2] == pytest.approx(chance, rel=1e-10)
    assert counts.survival(ShiftedExponential(c, m), S)[1] == pytest.approx(
        1 - math.exp(-(S - c) / m), rel=1e-12
    )


def test_without_a_fixed_part_t_is_one_more_than_a_poisson_variable():
    law = ShiftedExponential(0.0, 2.0)
    for S in (0.0, 1.0, 50.0, 3000.0):
        p = counts.law_of(law, S)
        n = np.arange(len(p))
        assert np.allclose(p, stats.poisson.pmf(n, S / 2), atol=1e-14)
        assert counts.moments(law, S)[0] == pytest.approx(1 + S / 2, rel=1e-12)
        mean, square = counts.slowest([law], S)  # no memory: S and one more delay
        assert mean == pytest.approx(S + 2, rel=1e-10)
        assert square - mean**2 == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize(("c", "S"), [(1.0, 5.0), (0.1, 0.7), (0.3, 0.0), (2.0, 5.0), (7.0, 5.0)])
def test_04_fixed_delays_fill_the_sync_time(c, S):
    t = max(1, math.ceil(Fraction(str(S)) / Fraction(str(c))))
    for law in (Deterministic(c), ShiftedExponential(c, 0.0)):
        assert counts.moments(law, S) == (t, t**2)
        assert counts.largest(law, S) == t
        assert counts.slowest([law, Deterministic(c / 2)], S)[0] == pytest.approx(
            max(t * c, math.ceil(Fraction(str(S)) / Fraction(str(c / 2))) * c / 2)
        )
    T, line = 40.0, timeline(0, S, 40.0, [Deterministic(c)], Deterministic(0.5))
    assert (line.counts == t).all() and len(line.end) == math.ceil(T / (t * c + 0.5) - 1e-9)


def test_the_renewal_value_is_close_once_s_is_long():
    law = ShiftedExponential(0.5, 1.0)
    gaps = [abs(counts.renewal(law, S) - counts.moments(law, S)[0]) for S in (0.0, 3.0, 30.0)]
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 1e-9


# ---- the working time and the slowest group


@each_law
def test_the_law_of_the_working_time(c, m, S):
    law = ShiftedExponential(c, m)
    _, Y = walks(c, m, S, seed=1)
    for y in np.linspace(0.5 * S, S + c + 3 * m, 17):
        assert near(Y > y, float(counts.busy_survival(law, S, y)))
    whole, _ = integrate.quad(
        lambda y: float(counts.busy_survival(law, S, y)), 0, S + c + 40 * m, limit=400
    )
    assert whole == pytest.approx(counts.expected_busy(law, S), rel=1e-5)


def test_the_working_time_by_integrating_over_the_last_iteration():
    """P(Y > y) from the densities of the sums, for one y on each side of the kinks."""
    c, m, S = 0.5, 0.8, 1.7

    def left(y, n):
        if n == 0:
            return math.exp(-max(y - c, 0) / m)
        top = max(S - n * c, 0)
        return integrate.quad(
            lambda g: stats.gamma.pdf(g, n, scale=m) * math.exp(-max(y - n * c - g - c, 0) / m),
            0, top, points=sorted({min(max(y - (n + 1) * c, 0), top)}),
        )[0]  # fmt: skip

    for y in (1.75, 1.95, 2.1, 2.3, 4.0):
        found = float(counts.busy_survival(ShiftedExponential(c, m), S, y))
        assert found == pytest.approx(sum(left(y, n) for n in range(4)), rel=1e-7)


@pytest.mark.parametrize("G", [1, 2, 5, 40])
def test_the_slowest_of_equal_groups_at_s_0(G):
    mean, square = counts.slowest([ShiftedExponential(1.0, 0.3)] * G, 0.0)
    assert mean == pytest.approx(1 + 0.3 * sum(1 / k for k in range(1, G + 1)), rel=1e-12)
    spread = 0.09 * sum(1 / k**2 for k in range(1, G + 1))
    assert square - mean**2 == pytest.approx(spread, rel=1e-9)


def test_the_slowest_of_unequal_groups():
    """Two exponentials in closed form; five groups whose scales differ by 1000 against draws."""
    a, b = 2.0, 0.01
    pair = [ShiftedExponential(0.0, a), ShiftedExponential(0.0, b)]
    for S in (0.0, 3.0):
        exact = S + a + b - 1 / (1 / a + 1 / b)
        assert counts.slowest(pair, S)[0] == pytest.approx(exact, rel=1e-9)
    shapes = [(1.0, 0.1), (1.0, 0.1), (0.2, 2.0), (0.01, 0.002), (6.0, 0.5)]
    drawn = [walks(c, m, 5.0, steps=700, copies=8000, seed=i)[1] for i, (c, m) in enumerate(shapes)]
    mean, square = counts.slowest([ShiftedExponential(*shape) for shape in shapes], 5.0)
    assert near(np.max(drawn, 0), mean) and near(np.max(drawn, 0) ** 2, square)


@pytest.mark.parametrize("m", [1e-5, 1e-3, 0.1, 10.0])
def test_one_group_alone_takes_what_wald_says(m):
    """The integral over the law of Y against E t E tau, for random parts of any length."""
    for c, S in [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0), (2.1, 5.0), (0.3, 9.0)]:
        law = ShiftedExponential(c, m)
        assert counts.slowest([law], S)[0] == pytest.approx(counts.expected_busy(law, S), rel=1e-9)


def test_the_number_of_rounds():
    groups, server = counts.laws((0.01, 0.85, 1e-3, 0.085, 4, 2, 0.4, 0.2), [15, 15])
    found = [len(timeline(s, 5.0, 600.0, groups, server).end) for s in range(300)]
    assert near(found, counts.expected_rounds(groups, server, 5.0, 600.0))
    assert not near(found, 600 / counts.round_length(groups, server, 5.0)[0])
    assert counts.expected_rounds(groups, server, 600.0, 600.0) == pytest.approx(1, abs=0.5)


def test_08_longer_sync_times_and_exchanges_leave_fewer_rounds():
    groups = [ShiftedExponential(1.0, 0.3), ShiftedExponential(0.7, 0.2)]
    for c_g in (1.0, 10.0):
        server = ShiftedExponential(c_g, 1.0)
        rounds = [counts.expected_rounds(groups, server, S, 5000.0) for S in range(0, 30, 3)]
        assert (np.diff(rounds) < 0).all()
        fixed = [
            len(timeline(0, S, 200.0, [Deterministic(0.7)], Deterministic(c_g)).end)
            for S in range(0, 30, 3)
        ]
        assert (np.diff(fixed) <= 0).all()
        whole = [max(1, math.ceil(Fraction(10 * S, 7))) for S in range(0, 30, 3)]
        assert fixed == [math.ceil(200 / (0.7 * t + c_g) - 1e-9) for t in whole]
    rounds = [
        counts.expected_rounds(groups, ShiftedExponential(c, 1.0), 5.0, 5000.0) for c in range(5)
    ]
    assert (np.diff(rounds) < 0).all()


def test_19_one_unit_of_time_for_everything():
    groups, server = [ShiftedExponential(1.0, 0.3)] * 2, ShiftedExponential(4.0, 1.0)
    minutes = [ShiftedExponential(60.0, 18.0)] * 2, ShiftedExponential(240.0, 60.0)
    assert np.allclose(counts.survival(groups[0], 7.0), counts.survival(minutes[0][0], 420.0))
    a, b = counts.round_length(groups, server, 7.0), counts.round_length(*minutes, 420.0)
    assert (60 * a[0], 3600 * a[1]) == pytest.approx(b)
    one = timeline(5, 7.0, 300.0, groups, server)
    other = timeline(5, 420.0, 18_000.0, *minutes)
    assert np.array_equal(one.counts, other.counts)


FIGURES = {  # delays, sizes, then for each S: E t of the groups and the length of a round
    "3": ((0.09, 0.1, 0.009, 0.01, 1, 3, 0.05, 0.1), [10] * 2, {0: (1, 6.35), 5: (4.99, 10.81)}),
    "6": ((1e-3, 0.5, 1e-3, 0.05, 5, 10, 1e-3, 0.05), [500] * 2, {0: (1, 21.88), 5: (3.79, 26.26)}),
    "7a": (
        (0.01, 0.85, 1e-3, 0.085, 4, 2, 0.4, 0.2),
        [15] * 2,
        {0: (1, 12.15), 5: (4.99, 16.61), 20: (18.7, 31.76)},
    ),
    "8": ((0.1, 1.4, 0.01, 0.14, 4, 2, 0.5, 1), [850] * 4, dict.fromkeys((0, 12, 24), (1, 125.4))),
    "8 with ten active": (
        (0.1, 1.4, 0.01, 0.14, 4, 2, 0.5, 1),
        [10] * 4,
        {0: (1, 23.9), 12: (4.99, 34.73), 24: (9.67, 47.32)},
    ),
    "9, two": ((0.1, 1.4, 0.01, 0.14, 0.5, 5, 0.05, 0.5), [32] * 2, {6: (1.952, 16.92)}),
    "9, four": ((0.1, 1.4, 0.01, 0.14, 0.5, 5, 0.05, 0.5), [16] * 4, {6: (2.0, 14.764)}),
    "9, eight": ((0.1, 1.4, 0.01, 0.14, 0.5, 5, 0.05, 0.5), [8] * 8, {6: (2.994, 17.745)}),
    "11": ((0.1, 0.7, 0.001, 0.13, 3, 3, 0.01, 0.2), [10] * 2, {12: (6.99, 22.28)}),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_what_the_printed_delays_of_a_figure_mean(figure):
    delays, sizes, expected = FIGURES[figure]
    groups, server = counts.laws(delays, sizes)
    for S, (t, length) in expected.items():
        assert counts.moments(groups[0], S)[0] == pytest.approx(t, rel=1.1e-3)
        assert counts.round_length(groups, server, S)[0] == pytest.approx(length, rel=1e-3)


def test_thirty_seven_percent_is_the_saving_of_the_other_panel():
    """At equal time; rounds are drawn here, from the delays as the text prints them."""
    rng, draws = np.random.default_rng(1), 20_000
    steps = 0.01 * 15 + 0.85 + rng.exponential(0.001 * 15 + 0.085, (2, 60, draws))  # of two groups
    clock = steps.cumsum(1)
    ends = {S: np.take_along_axis(clock, (clock < S).sum(1, keepdims=True), 1).max((0, 1)).mean()
            for S in (0, 20)}  # fmt: skip
    saved = {shift: 1 - (ends[0] + shift + 0.4 * 2 + 0.2) / (ends[20] + shift + 0.4 * 2 + 0.2)
             for shift in (10, 30)}  # fmt: skip
    assert saved[10] == pytest.approx(0.616, abs=0.005) and 0.37 < saved[30] < 0.385


def test_figures_10_to_12_with_our_choices():
    pair = [ShiftedExponential(1.0, 0.1), ShiftedExponential(7.0, 0.7)]
    assert [counts.moments(law, 8.0)[0] for law in pair] == pytest.approx([7.87, 1.76], rel=2e-3)
    length = counts.round_length(pair, ShiftedExponential(10.0, 1.0), 8.0)[0]
    assert length == pytest.approx(24.6, rel=2e-3)
    delays = (0.1, 0.7, 0.001, 0.13, 3, 3, 0.01, 0.2)
    groups, server = counts.laws(delays, [15, 5])
    assert [counts.moments(law, 12.0)[0] for law in groups] == pytest.approx([5.82, 9.53], rel=1e-3)
    assert counts.round_length(groups, server, 12.0)[0] == pytest.approx(22.96, rel=1e-3)
    idle = (
        counts.expected_idle(groups, 12.0)[1],
        counts.expected_idle(counts.laws(delays, [10, 10])[0], 12.0)[0],
    )
    assert idle == pytest.approx((1.02, 0.20), abs=6e-3)
    last = [ShiftedExponential(1.0, 0.1)] * 2
    assert counts.slowest(last, 10.0)[0] + 1 == pytest.approx(11.8, rel=5e-3)


def test_rounds_saved_at_equal_time():
    """Figures 3, 6, 7a, 7b: how many rounds fewer than with S = 0, in the long run."""
    for figure, c_g, S, saved in [
        ("3", None, 5, 41.25), ("6", None, 5, 16.7), ("7a", None, 5, 26.8),
        ("7a", None, 20, 61.7), ("7a", 30.0, 5, 12.2), ("7a", 30.0, 20, 37.9),
    ]:  # fmt: skip
        groups, server = counts.laws(*FIGURES[figure][:2])
        server = ShiftedExponential(c_g or server.shift, server.mean)
        zero, mean = (counts.round_length(groups, server, s)[0] for s in (0.0, S))
        assert 100 * (1 - zero / mean) == pytest.approx(saved, abs=0.1)


def test_figure_6_has_three_times_the_local_iterations_at_s_5():
    """HFL-E8: iterations in equal time."""
    groups, server = counts.laws(*FIGURES["6"][:2])
    rate = [
        counts.moments(groups[0], S)[0] / counts.round_length(groups, server, S)[0] for S in (0, 5)
    ]
    assert rate[1] / rate[0] == pytest.approx(3.2, abs=0.1)


def test_figure_8_as_printed_never_iterates_twice():
    """HFL-E10: 850 clients a group make every iteration longer than the longest sync time."""
    groups, server = counts.laws(*FIGURES["8"][:2])
    assert groups[0].shift == pytest.approx(86.4) and groups[0].shift > 24
    assert [counts.law_of(groups[0], S).tolist() for S in (0, 12, 24)] == [[1.0]] * 3
    lines = [timeline(0, S, 300.0, groups, server) for S in (0.0, 12.0, 24.0)]
    assert all(np.array_equal(lines[0].end, line.end) for line in lines)
    assert groups[0].shift + server.shift == pytest.approx(104.4)
    assert (lines[0].end <= 300).sum() <= 2


def test_ten_active_clients_make_figure_8_five_and_ten_iterations():
    """HFL-E24: the sync times are five and ten times the fixed part of an iteration."""
    groups, _ = counts.laws(*FIGURES["8 with ten active"][:2])
    assert groups[0].shift == pytest.approx(2.4)
    assert [counts.largest(groups[0], S) for S in (0, 12, 24)] == [1, 5, 10]


def test_20_figure_9_and_its_mechanism():
    rate, rounds = [], []
    for figure in ("9, two", "9, four", "9, eight"):
        groups, server = counts.laws(*FIGURES[figure][:2])
        length = counts.round_length(groups, server, 6.0)[0]
        rounds.append(1000 / length)
        rate.append(counts.moments(groups[0], 6.0)[0] / length)
    assert rounds == pytest.approx([59, 68, 56], abs=0.6)
    assert rate[:2] == pytest.approx([0.115, 0.135], abs=6e-4)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda law: counts.laws((1, 2, 3), [1]), "eight numbers"),
        (lambda law: counts.laws((-1, 0, 0, 0, 0, 0, 0, 0), [1]), "eight numbers"),
        (lambda law: counts.laws((math.nan, *[0] * 7), [1]), "eight numbers"),
        (lambda law: counts.laws([1] * 8, []), "needs a client"),
        (lambda law: counts.laws([1] * 8, [3, 0]), "needs a client"),
        (lambda law: counts.moments(law, -1.0), "sync time"),
        (lambda law: counts.moments(law, math.nan), "sync time"),
        (lambda law: counts.moments(Deterministic(0.0), 1.0), "no time"),
        (lambda law: counts.moments("fast", 1.0), "Exact laws"),
        (lambda law: counts.slowest([], 1.0), "at least one group"),
        (lambda law: counts.expected_rounds([law], law, 1.0, 0.0), "system time"),
        (lambda law: counts.averages(np.array([[1, 0]])), r"\[U, G\].* with 0"),
        (lambda law: counts.averages(np.ones(3)), r"shape \(3,\)"),
        (lambda law: counts.averages(np.array([[1.5]])), "whole numbers"),
        (lambda law: theory.kappa([2, -1]), "needs a client"),
        (lambda law: bound(theory.theorem_2, np.ones((3, 2)), sizes=[1] * 3), "2 groups"),
        (lambda law: bound(theory.theorem_2, np.ones((3, 1)), lr=1.1), "lr <= 1/L"),
        (lambda law: bound(theory.theorem_2_sharper, np.ones((3, 1)), lr=0.0), "0 < lr"),
        (lambda law: theory.theorem_1([0, 2], size=1, kappa=1, **KNOWN), "whole numbers"),
        (lambda law: theory.best_sync([], None, groups=[law], server=law, time=9.0), "no sync"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call, match):
    with pytest.raises(FedlibError, match=match):
        call(ShiftedExponential(1.0, 0.1))


# ---- Lemma 1

KNOWN = {"lr": 0.5, "L": 1.0, "G2": 2.0, "sigma2": 0.7, "gap": 1.3}


def bound(rule, table, sizes=(1,), **changed):
    return rule(table, sizes=sizes, **(KNOWN | changed))


def test_09_kappa_measures_imbalance():
    assert theory.kappa([7]) == theory.kappa([3, 3, 3]) == pytest.approx(1)
    for sizes in ([1, 2], [5, 25], [1, 1, 50], [1, 10**9]):
        assert 1 < theory.kappa(sizes) < len(sizes)
    assert theory.kappa([1, 10**9]) == pytest.approx(2, abs=1e-6)


def test_16_lemma_1_holds_with_clipped_gradients():
    """Random clipped gradients, clients one by one, a round: both bounds on every path."""
    rng, lr = np.random.default_rng(2), 0.3
    for sizes in ([4], [2, 2], [1, 3], [1, 5, 2]):
        table, w = rng.integers(1, 6, len(sizes)), np.array(sizes) / sum(sizes)
        for _ in range(50):
            ends = []
            for size, t in zip(sizes, table, strict=True):
                y, pull = np.zeros(3), rng.standard_normal((size, 3))
                for _ in range(t):
                    g = pull + y + 0.2 * rng.standard_normal((size, 3))
                    g /= np.maximum(np.linalg.norm(g, axis=1, keepdims=True), 1)
                    y = y - lr * g.mean(0)
                ends.append(y)
            merged = sum(a * y / t for a, y, t in zip(w, ends, table, strict=True))
            square = np.array([((merged - y) ** 2).sum() for y in ends])
            sharp = theory.lemma_1_sharper(table, sizes=sizes, lr=lr, G2=1.0)
            assert (square <= sharp + 1e-12).all()
            assert (sharp <= theory.lemma_1(table, sizes=sizes, lr=lr, G2=1.0)).all()
    assert theory.lemma_1_sharper([1], sizes=[9], lr=lr, G2=1.0) == 0  # nothing can deviate


def test_16_groups_that_pull_apart_reach_the_sharper_bound():
    """Constant gradients; Lemma 1 itself is reached up to 2 at t = 1 by many groups."""
    lr, G = 0.3, 1.7
    for sizes, table in [([3, 1], [5, 2]), ([1] * 50, [1] * 50), ([2, 9, 4], [7, 1, 3])]:
        w = np.array(sizes) / sum(sizes)
        pull = np.where(np.arange(len(sizes)) == 0, G, -G)  # the first against all others
        ends = -lr * pull * np.array(table)
        merged = (w * -lr * pull).sum()
        sharp = theory.lemma_1_sharper(table, sizes=sizes, lr=lr, G2=G**2)
        printed = theory.lemma_1(table, sizes=sizes, lr=lr, G2=G**2)
        assert (merged - ends[0]) ** 2 == pytest.approx(sharp[0], rel=1e-12)
        if len(sizes) == 50:
            assert sharp[0] > 0.9 * printed[0]


def test_lemma_1_is_blind_to_the_number_of_equal_groups():
    """HFL-E15: kappa is 1 for one group and for seven; only unequal groups add to it."""
    known = {"lr": 0.1, "G2": 1.0}
    printed, sharper = [], []
    for groups in (1, 2, 7):
        table = np.full(groups, 4)
        printed.append(theory.lemma_1(table, sizes=[3] * groups, **known)[0])
        sharper.append(theory.lemma_1_sharper(table, sizes=[3] * groups, **known)[0])
    assert printed == pytest.approx([printed[0]] * 3) and sharper[0] < sharper[1] < sharper[2]
    assert theory.lemma_1([4, 4], sizes=[1, 5], **known)[0] > printed[0]


def test_remark_2_is_an_equality_at_one_iteration():
    """HFL-E17: the earlier bound for one group is 4 lr^2 t^2 G^2."""
    for t in (1, 2, 9):
        ours, earlier = theory.lemma_1(t, sizes=[5], lr=0.1, G2=3.0), 4 * 0.1**2 * t**2 * 3.0
        assert float(ours) == pytest.approx(earlier) if t == 1 else ours < earlier


@pytest.mark.parametrize(("sizes", "square"), [((5, 15), 1.0230), ((1, 99), 1.2346)])
def test_21_remark_3_can_exceed_one(sizes, square):
    """HFL-E16: a rate for each group at its limit; opposite constant gradients of norm G."""
    G, t = 2.3, np.array([100, 1])
    rates = theory.remark_3_rates(t, G2=G**2)
    assert np.allclose(theory.lemma_1(t, sizes=[1, 1], lr=1.0, G2=G**2) * 0 + 2 * rates**2
                       * (t**2 + 2) * G**2, 1)  # fmt: skip
    ends = -rates * t * np.array([G, -G])
    merged = np.array(sizes) / sum(sizes) @ (ends / t)
    assert (merged - ends[0]) ** 2 == pytest.approx(square, abs=5e-5)
    assert 1 < (merged - ends[0]) ** 2 < theory.remark_3_bound(2) < 1.245


def test_the_corrected_remark_3():
    """Over all splits and counts; one for groups of equal size."""
    for groups in (2, 3, 8):
        w = np.linspace(0, 1, 201)  # the share of the first; the others are alike, pulling back
        worst = 0.0
        for t in (1, 2, 10, 10**4):
            own = 1 / math.sqrt(2 * (t**2 + groups))
            other = 1 / math.sqrt(2 * (1 + groups))
            size = (t - w) * own + (1 - w) * other
            worst = max(worst, (size**2).max())
            assert ((t - 1 / groups) * own + (1 - 1 / groups) * other) ** 2 < 1
        assert 0.98 * theory.remark_3_bound(groups) < worst <= theory.remark_3_bound(groups)


# ---- Theorem 1


def printed_19(t, size, kappa, lr, L, G, sigma, gap):
    """Equation 19, read from the page with running sums."""
    A = squares = 0
    for count in t:
        A += count
    for count in t[:-1]:
        squares += count * count
    value = 2 / (lr * A) * gap + lr * L * sigma**2 / size
    value += (1 / (lr * A) + 2 * (L + 1) * kappa * lr / A) * (len(t) - 1) * G**2
    return value + 2 * (L + 1) * lr / A * squares * G**2


def test_theorem_1_is_equation_19():
    rng = np.random.default_rng(3)
    for _ in range(20):
        t, size, L = rng.integers(1, 9, rng.integers(1, 6)), int(rng.integers(1, 5)), rng.random()
        lr, G, sigma, gap = rng.random(4)
        ours = theory.theorem_1(
            t, size=size, kappa=1.4, lr=lr, L=L, G2=G**2, sigma2=sigma**2, gap=gap
        )
        assert ours.total == pytest.approx(printed_19(t, size, 1.4, lr, L, G, sigma, gap))


def test_no_constant_of_theorem_1_could_be_halved():
    """Each term beside a case that reaches more than half of it."""
    start = theory.theorem_1([1], size=1, kappa=1, lr=1.0, L=1.0, G2=1, sigma2=0, gap=1 / 2)
    assert start["start"] == 1  # x^2/2 from 1 with step 1: the gradient is 1, the loss gone
    for h in (0.1, 0.9):  # one noisy step away from the optimum, gradient 0
        rise = -(h**2) / 2
        noise = theory.theorem_1([1], size=1, kappa=1, lr=h, L=1.0, G2=1, sigma2=1, gap=rise)
        assert noise.total == pytest.approx(0, abs=1e-15)
    # two linear groups pull apart: how far the loss jumps where the groups are merged
    lr, t, rounds = 0.07, 10, 6
    x = [0.0]
    jumps = 0.0
    for _ in range(rounds - 1):
        ends = [x[-1] - lr * t, x[-1] + lr * t]
        x.append(x[-1] + sum(end - x[-1] for end in ends) / (2 * t))
        jumps += x[-1] - ends[0]  # f_1(x) = x
    found = theory.theorem_1([t] * rounds, size=1, kappa=1, lr=lr, L=1e-9, G2=1, sigma2=0, gap=0.0)
    allowed = sum(found[name] for name in ("slope", "merged", "own")) * lr * t * rounds / 2
    assert 0.65 * allowed < jumps < allowed


def test_theorem_1_is_weak_unless_the_last_round_is_long():
    """HFL-E7: never below the floor, and above the trivial bound with 64 % in the last round."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        t = rng.integers(1, 30, rng.integers(1, 8))
        known = {"L": 10 ** rng.uniform(-6, 1), "G2": 2.0}
        lr = 10 ** rng.uniform(-4, 0) / known["L"]
        found = theory.theorem_1(t, size=3, kappa=1.0, lr=lr, sigma2=0.0, gap=0.0, **known)
        assert found.total >= theory.theorem_1_floor(t, **known)
        if t[-1] < 0.64 * t.sum():
            assert found.total > known["G2"]
    assert theory.theorem_1_floor([9], L=1.0, G2=2.0) == 0
    table, known = [50] * 20, {"L": 0.3, "G2": 2.0}  # equal counts: nearly reached
    rates = np.geomspace(1e-3, 1, 400)
    least = min(
        theory.theorem_1(table, size=3, kappa=1.0, lr=lr, sigma2=0.0, gap=0.0, **known).total
        for lr in rates
    )
    assert least == pytest.approx(theory.theorem_1_floor(table, **known), rel=1e-3)


def test_an_upper_limit_on_the_rate_is_not_enough():
    """HFL-E18: x^2/2 from 1; rates below 1/sqrt t, but far below, leave the gradient at 1."""
    for t in (100, 10_000):
        slow, right = t**-2.0, t**-0.5
        path = [np.mean((1 - lr) ** (2 * np.arange(t))) for lr in (slow, right)]
        assert path[0] > 0.98 and path[1] < 6 / math.sqrt(t)


# ---- Theorem 2


def printed_20(table, sizes, lr, L, G, sigma, gap, with_G2=True):
    """Equation 20, read from the page: sums over groups, iterations and l^2, one by one."""
    U, groups, N = len(table), len(sizes), sum(sizes)
    squares = sum(n * n for n in sizes)
    total = [2 / lr / U * gap, 12 * lr**2 * L**2 * G**2 * groups**2 / N**4 * squares**2]
    total += [lr * L * groups * squares * sigma**2 / N**2, 0, 0]
    for u in range(U):
        for i, n in enumerate(sizes):
            before = table[u - 1][i] if u else 0
            scale = lr**2 * L**2 * groups / N**2 / U
            total[3] += 12 * scale * n * n * before**2 * (G**2 if with_G2 else 1)
            t = table[u][i]
            total[4] += 4 * scale * G**2 * n * n * sum(l * l for l in range(t)) / t
    return total


def test_theorem_2_is_equation_20():
    rng = np.random.default_rng(4)
    for _ in range(20):
        sizes = rng.integers(1, 6, rng.integers(1, 5)).tolist()
        table = rng.integers(1, 9, (int(rng.integers(1, 6)), len(sizes)))
        lr, L, G, sigma, gap = rng.random(5)
        ours = theory.theorem_2(table, sizes=sizes, lr=lr, L=L, G2=G**2, sigma2=sigma**2, gap=gap)
        printed = printed_20(table.tolist(), sizes, lr, L, G, sigma, gap)
        assert list(ours.terms.values()) == pytest.approx(printed, rel=1e-12)


def test_the_printed_fourth_term_has_another_unit():
    """HFL-E5: f times a and the rate over a; squared gradients are multiplied by a^2."""
    table, sizes, a = [[2, 3], [4, 1], [5, 5]], [2, 3], 3.0
    for with_G2, power in ((True, 2), (False, 0)):
        one = printed_20(table, sizes, 0.2, 1.5, 0.7, 0.4, 0.9, with_G2)
        scaled = printed_20(table, sizes, 0.2 / a, 1.5 * a, 0.7 * a, 0.4 * a, 0.9 * a, with_G2)
        assert [y / x for x, y in zip(one, scaled, strict=True)] == pytest.approx(
            [a**2, a**2, a**2, a**power, a**2]
        )


def test_18_the_bounds_know_the_counts_alone():
    table = np.array([[2, 3], [4, 1], [5, 5]])
    for rule in (theory.theorem_2, theory.theorem_2_sharper):
        direct = bound(rule, table, sizes=[2, 3])
        assert direct.terms == bound(rule, counts.averages(table), sizes=[2, 3]).terms
    ones = np.ones((9, 2))
    assert bound(theory.theorem_2, ones, sizes=[2, 3])["B5"] == 0
    assert bound(theory.theorem_2_sharper, ones, sizes=[2, 3])["drift"] == 0


def test_equal_sums_of_counts_do_not_make_equal_bounds():
    """HFL-E8: 12 iterations in two, three and twelve rounds, or spread unevenly."""
    tables = [[[6]] * 2, [[4]] * 3, [[1]] * 12, [[1], [11]]]
    for rule in (theory.theorem_2, theory.theorem_2_sharper):
        values = {round(bound(rule, np.array(table), lr=0.1).total, 9) for table in tables}
        assert len(values) == 4
    ones = {round(theory.theorem_1(np.ravel(t), size=1, kappa=1, **KNOWN).total, 9) for t in tables}
    assert len(ones) == 4


def test_b3_does_not_depend_on_the_counts():
    """HFL-E22: nor does B2; Remark 5 says all but the second."""
    found = [bound(theory.theorem_2, np.full((U, 1), t)) for U, t in ((3, 9), (50, 1))]
    assert found[0]["B3"] == found[1]["B3"] and found[0]["B2"] == found[1]["B2"]


def round_moments(A, b, C, sizes, table, x, lr, w=None, steps=1.0):
    """One round on quadratics with Gaussian noise, all moments exact.

    Client k of group i has gradient A[i][k] x - b[i][k] and noise of covariance C[i][k]. Groups
    count as the shares w say, by default as their clients; the merge goes so many steps of lr.
    """
    w = np.array(sizes) / sum(sizes) if w is None else w
    d, I = len(x), np.eye(len(x))
    H = [np.mean(a, 0) for a in A]
    z = [np.mean(v, 0) for v in b]
    hessian, linear = sum(w[:, None, None] * H), w @ z
    start = hessian @ x - linear
    mean, spread, drift, variance, moment = np.zeros(d), np.zeros((d, d)), 0.0, 0.0, 0.0
    for i, t in enumerate(table):
        cov = np.sum(C[i], 0) / sizes[i] ** 2  # of the group's noise in one iteration
        y, S, path = x.copy(), np.zeros((d, d)), []
        for _ in range(t):
            for a, v, c in zip(A[i], b[i], C[i], strict=True):
                g = a @ y - v
                moment = max(moment, g @ g + np.trace(a @ S @ a) + np.trace(c))
            path.append(H[i] @ y - z[i])
            step = I - lr * H[i]
            y, S = y - lr * path[-1], step @ S @ step.T + lr**2 * cov
        mean += w[i] * np.mean(path, 0)
        for m in range(t):  # what noise m does to the sum of the gradients: a power, telescoped
            K = np.linalg.matrix_power(I - lr * H[i], t - 1 - m) / t
            spread += w[i] ** 2 * K @ cov @ K.T
            drift += w[i] ** 2 * np.trace((K - I / t) @ cov @ (K - I / t).T)
        variance += w[i] ** 2 * np.trace(cov) / t
    drift += ((start - mean) ** 2).sum()
    x_new = x - lr * steps * mean
    value = [p @ hessian @ p / 2 - linear @ p for p in (x, x_new)]
    fall = value[0] - value[1] - (lr * steps) ** 2 / 2 * np.trace(hessian @ spread)
    return {"square": start @ start, "fall": fall, "drift": drift, "variance": variance,
            "G2": moment, "hat": mean @ mean + np.trace(spread)}  # fmt: skip


def quadratics(rng, sizes, d=3, L=1.0):
    """Random symmetric Hessians of norm at most L, some of it negative; optima; covariances."""
    A, b, C = [], [], []
    for n in sizes:
        raw = rng.standard_normal((n, d, d))
        raw = raw + raw.transpose(0, 2, 1)
        A.append(L * raw / np.abs(np.linalg.eigvalsh(raw)).max(-1)[:, None, None])
        b.append(rng.standard_normal((n, d)) * rng.choice([0.1, 1, 3]))
        root = rng.standard_normal((n, d, d)) * rng.choice([0.0, 0.3, 3.0])
        C.append(root @ root.transpose(0, 2, 1))
    return A, b, C


def test_the_exact_moments_against_draws():
    rng = np.random.default_rng(6)
    sizes, table, lr, x = [2, 1], [3, 2], 0.6, np.array([1.0, -0.5, 0.3])
    A, b, C = quadratics(rng, sizes)
    C = [np.stack([(0.2 + k) * np.eye(3) for k in range(n)]) for n in sizes]
    exact, copies = round_moments(A, b, C, sizes, table, x, lr), 40_000
    merged = np.zeros((copies, 3))
    for i, t in enumerate(table):
        y = np.tile(x, (copies, 1))
        for _ in range(t):
            g = [y @ a - v + rng.multivariate_normal(np.zeros(3), c, copies)
                 for a, v, c in zip(A[i], b[i], C[i], strict=True)]  # fmt: skip
            y = y - lr * np.mean(g, 0)
        merged += sizes[i] / sum(sizes) * (y - x) / t
    assert near((merged**2).sum(1) / lr**2, exact["hat"])
    flat = [(a, v) for group in zip(A, b, strict=True) for a, v in zip(*group, strict=True)]

    def f(p):
        return sum(np.einsum("...i,ij,...j", p, a, p) / 2 - p @ v for a, v in flat) / 3

    assert near(f(x) - f(x + merged), exact["fall"])


def test_22_the_sharper_theorem_on_random_quadratics():
    """Round by round with exact moments: the inequality, its parts, and Theorem 2 itself."""
    rng, tightest = np.random.default_rng(7), 0.0
    for _ in range(600):
        sizes = rng.integers(1, 4, rng.integers(1, 4)).tolist()
        table = rng.integers(1, 9, len(sizes))
        A, b, C = quadratics(rng, sizes)
        lr = rng.choice([1.0, 0.5, rng.random(), 0.01])
        x = rng.standard_normal(3) * rng.choice([0, 1, 5])
        found = round_moments(A, b, C, sizes, table, x, lr)
        sigma2 = max(np.trace(c) for group in C for c in group)
        known = {"sizes": sizes, "lr": lr, "L": 1.0, "G2": found["G2"], "sigma2": sigma2}
        ours = theory.theorem_2_sharper(table[None], **known, gap=found["fall"])
        paper = theory.theorem_2(table[None], **known, gap=found["fall"])
        slack = 1e-9 * (1 + found["square"] + found["G2"])
        a, b = (lr / (1 - lr), 1) if lr <= 1 / 2 else (2 * lr, 1 + lr)
        parts = a * found["variance"] + b * found["drift"] + 2 * found["fall"] / lr
        assert found["square"] <= parts + slack
        assert a * found["variance"] <= ours["noise"] + slack
        assert b * found["drift"] <= ours["drift"] + slack
        assert ours["drift"] <= paper["B5"] / 2 + slack
        one = sizes == [1] and table[0] == 1  # the one case in which noise may exceed B3
        assert one or ours["noise"] <= paper["B3"] + slack
        assert found["square"] <= paper["B1"] + paper["B3"] + paper["B5"] / 2 + slack
        if found["drift"] > 1e-6:
            tightest = max(tightest, b * found["drift"] / ours["drift"])
    assert tightest > 0.5


@pytest.mark.parametrize("merge", ["normalised", "plain", "nova"])
def test_the_theorem_for_every_merge_on_random_quadratics(merge):
    """Round by round with exact moments; shares and steps from the weights that the merge has."""
    rng = np.random.default_rng(12)
    for _ in range(150):
        sizes = rng.integers(1, 4, rng.integers(1, 4)).tolist()
        table = rng.integers(1, 7, len(sizes))
        q = weights(merge, sizes, table[None])[0]
        steps, p = q @ table, q * table / (q @ table)
        A, b, C = quadratics(rng, sizes)
        lr = rng.choice([1.0, 0.5, 0.3, 0.01]) / max(steps, 1.0)
        x = rng.standard_normal(3) * rng.choice([0, 1, 5])
        found = round_moments(A, b, C, sizes, table, x, lr, p, steps)
        sigma2 = max(np.trace(c) for group in C for c in group)
        known = {"sizes": sizes, "lr": lr, "L": 1.0, "G2": found["G2"], "sigma2": sigma2}
        ours = theory.other_merges(table, merge=merge, rounds=1, gap=found["fall"], **known)
        slack = 1e-9 * (1 + found["square"] + found["G2"])
        h = lr * steps
        a, b = (h / (1 - h), 1) if h <= 1 / 2 else (2 * h, 1 + h)
        parts = a * found["variance"] + b * found["drift"] + 2 * found["fall"] / h
        assert found["square"] <= parts + slack
        assert a * found["variance"] <= ours["noise"] + slack
        assert b * found["drift"] <= ours["drift"] + slack
        if merge == "normalised":
            same = theory.theorem_2_sharper(table[None], gap=found["fall"], **known)
            assert ours.terms == pytest.approx(same.terms)


def test_a_round_too_long_for_its_rate_is_told_with_the_rate_that_was_given():
    setting = {"sizes": [1, 1], "L": 1.0, "G2": 1.0, "sigma2": 0.0, "gap": 1.0, "rounds": 1}
    with pytest.raises(FedlibError, match="lr = 0.5, a round makes s = 4 steps"):
        theory.other_merges([4, 4], merge="plain", lr=0.5, **setting)


PAGE = "notebooks/03_hierarchy/1_derive.ipynb"
TIGHT = [f"hier-derive-{name}" for name in ("imports", "lemma-tight", "remark3", "thm1-tight",
         "floor-tight", "tight", "tight-2", "cor-tight", "merges-tight",
         "merges-unequal")]  # fmt: skip
RULES = {
    "lemma_1_sharper": [""],
    "lemma_1": ["own", "others"],
    "remark_3_bound": [""],
    "remark_3_rates": [""],
    "theorem_1": ["start", "noise", "slope", "merged", "own"],
    "theorem_1_floor": [""],
    "theorem_2": ["B1", "B2", "B3", "B4", "B5"],
    "theorem_2_sharper": ["start", "noise", "drift"],
    "corollary_1": ["B1", "B3"],
    "other_merges": ["start", "noise", "drift"],
}


@pytest.fixture(scope="module")
def tight_cells():
    page = json.loads((Path(__file__).parents[1] / PAGE).read_text("utf-8"))
    code = {cell["id"]: "".join(cell["source"]) for cell in page["cells"]}
    return [code[name] for name in TIGHT]


def check_the_page(cells):
    held = {}
    for cell in cells:
        exec(cell, held)


def test_the_page_holds_with_the_bounds_as_they_are(tight_cells):
    check_the_page(tight_cells)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("by", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("name", "term"), [(n, t) for n, terms in RULES.items() for t in terms])
def test_the_page_notices_a_term_that_is_too_small(name, term, by, tight_cells, monkeypatch):
    rule = getattr(theory, name)

    def smaller(*args, **kwargs):
        found = rule(*args, **kwargs)
        if isinstance(found, Bound):
            return Bound({k: v * (by if k == term else 1) for k, v in found.terms.items()})
        if not term:
            return by * found
        own = 2 * (kwargs["lr"] * np.asarray(args[0])) ** 2 * kwargs["G2"]
        return found - (1 - by) * (own if term == "own" else found - own)

    monkeypatch.setattr(theory, name, smaller)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check_the_page(tight_cells)


def test_no_constant_of_the_sharper_theorem_could_be_halved():
    one = {"sizes": [1], "L": 1.0, "G2": 1.0}
    start = theory.theorem_2_sharper([[1]], lr=1.0, sigma2=0.0, gap=1 / 2, **one)
    assert start.total == 1  # x^2/2 from 1 with step 1
    for h in (0.01, 0.2, 0.45):  # from the optimum: gradient 0, and the loss rises by h^2/2
        found = theory.theorem_2_sharper([[1]], lr=h, sigma2=1.0, gap=-(h**2) / 2, **one)
        assert 0 <= found.total < found["noise"] / 2
        paper = theory.theorem_2([[1]], lr=h, sigma2=1.0, gap=-(h**2) / 2, **one)
        assert paper["B1"] + paper["B3"] == pytest.approx(0, abs=1e-15)
    # two groups, slopes c + 1 and c - 1, curvatures +1 and -1: the paths' mean gradient is zero
    for t in (2, 50):
        lr = 1e-4 / t
        ends, c = [], 0.0
        for _ in range(60):  # c such that the two movements cancel
            ends = []
            for slope, bend in ((c + 1, 1.0), (c - 1, -1.0)):
                y, largest = 0.0, 0.0
                for _ in range(t):
                    largest = max(largest, abs(slope + bend * y))
                    y -= lr * (slope + bend * y)
                ends.append(y)
            c += sum(ends) / (2 * lr * t)
        found = theory.theorem_2_sharper(
            [[t, t]], sizes=[1, 1], lr=lr, L=1.0, G2=(1 + c) ** 2, sigma2=0.0, gap=0.0
        )
        assert abs(sum(ends)) < 1e-15 and largest <= 1 + c  # f is linear: it does not move
        assert 0.999 * found.total < c**2 <= found.total


def test_21_step_35_is_false_and_theorem_2_true():
    """HFL-E6: one client with gradient -clip(x, 3), noise +1 or -1, three iterations."""
    left = right = drift = fall = Fraction(0)

    def slope(x):
        return -max(min(x, Fraction(3)), Fraction(-3))

    for noise in itertools.product((-1, 1), repeat=3):
        x, noisy, exact = Fraction(0), Fraction(0), Fraction(0)
        for eps in noise:
            noisy, exact = noisy + slope(x) + eps, exact + slope(x)
            x -= slope(x) + eps
        left += noisy**2 / 9 / 8
        right += exact**2 / 9 / 8
        drift += (exact / 3) ** 2 / 8
        end = noisy / 3  # |end| <= 3, where f(x) = -x^2/2
        fall += end**2 / 2 / 8
    assert left == Fraction(21, 9) and right + 1 == Fraction(19, 9) < left
    known = {"sizes": [1], "lr": 1.0, "L": 1.0, "sigma2": 1.0, "gap": float(fall)}
    assert theory.theorem_2_sharper([[3]], G2=10.0, **known).total >= 0  # the gradient is 0 at 0
    assert 2 * float(fall) + 2 / 3 + 2 * float(drift) >= 0


@pytest.mark.parametrize(("clients", "first"), [(1, 3), (2, 5), (5, 7), (10, 9), (500, 16)])
def test_step_35_fails_for_groups_of_every_size(clients, first):
    """HFL-E6: curvature -L and lr = 1/L; noise m is doubled in each later step."""
    for t in range(1, first + 1):
        left = sum(Fraction(2) ** (2 * m) for m in range(t)) / (clients * t**2)
        right = 1 + sum((Fraction(2) ** m - 1) ** 2 for m in range(t)) / (clients * t**2)
        assert (left > right) == (t == first)
        assert (left > right) == (2 ** (t + 1) - 2 - t > clients * t**2)


def test_a_linear_loss_satisfies_the_printed_assumptions():
    """HFL-E21: upper smoothness only, and unbounded below; its gradient stays 1 for ever."""
    bounded = []
    for U in (10, 1000):
        lr = theory.corollary_1_rate(U, 1.0)
        known = {"sizes": [1], "lr": lr, "L": 1.0, "G2": 1.0, "sigma2": 0.0}
        fall = lr * U  # of f(x) = -x, one group, one iteration a round
        assert theory.theorem_2(np.ones((U, 1)), **known, gap=fall).total >= 1
        bounded.append(theory.theorem_2(np.ones((U, 1)), **known, gap=1.0).total)
    assert bounded[1] < 1, "a loss that can fall by one alone cannot keep a gradient of one"


def test_corollary_1():
    """Its bound is above Theorem 2 for all counts that are possible, and falls as 1/sqrt U."""
    rng = np.random.default_rng(8)
    known = {"sizes": [2, 5], "L": 0.8, "G2": 2.0, "sigma2": 0.7, "gap": 1.0}
    totals = []
    for U in (10**2, 10**8, 10**10, 10**12):
        lr = theory.corollary_1_rate(U, 0.8)
        table = np.minimum(rng.integers(1, 9, (100, 2)), [4, 8])
        slow = theory.corollary_1([4, 8], rounds=U, **known)
        fast = counts.averages(table)
        fast = replace(fast, rounds=U)
        assert theory.theorem_2(fast, lr=lr, **known).total <= slow.total
        totals.append(slow.total)
    assert totals[0] / totals[1] > 99 and totals[1] / totals[2] == pytest.approx(10, rel=0.1)
    assert totals[2] / totals[3] == pytest.approx(10, rel=0.01)
    for t in range(1, 60):
        assert (t - 1) * (2 * t - 1) / 6 <= t**2 / 3
    assert theory.corollary_1_rate(4, 1.0) == 0.5 and theory.corollary_1_rate(4, 10.0) == 0.1


# ---- the printed box


def box(lasts, T, add, strict):
    """Rounds until line 4 of Algorithm 1 ends, at most a hundred; rounds of a fixed length."""
    clock, rounds = 0.0, 0
    while (clock < T if strict else clock <= T) and rounds < 100:
        clock = clock + lasts if add else lasts
        rounds += 1
    return rounds


def test_the_printed_clock_never_arrives():
    """HFL-E2: line 21 assigns. HFL-E3: line 4 goes on at equality, Equation 13 does not."""
    assert box(2.0, 10.0, add=False, strict=False) == 100
    assert box(2.0, 10.0, add=True, strict=False) == 6
    assert box(2.0, 10.0, add=True, strict=True) == 5
    assert len(timeline(0, 0.0, 10.0, [Deterministic(1.5)], Deterministic(0.5)).end) == 5


def test_an_index_that_stands_still_repeats_the_first_iteration():
    """HFL-E4: x^2/2 from 8 with step 1/2, three iterations."""
    x = [8.0, None]
    for _ in range(3):
        x[1] = x[0] - x[0] / 2  # line 10 with l = 1
    y = 8.0
    for _ in range(3):
        y -= y / 2  # Equation 8
    assert (x[1], y) == (4.0, 1.0)


# ---- choosing the sync time

PAIR = {"groups": [ShiftedExponential(1.0, 0.1)] * 2, "server": ShiftedExponential(10.0, 1.0)}


def test_the_printed_bound_is_smallest_at_s_0():
    """HFL-E1: at a fixed rate, and at Corollary 1's; any time, any exchange."""
    syncs = np.arange(0.0, 25.0, 1.0)
    for c_g, time, lr in itertools.product((0.0, 10.0, 100.0), (1e3, 1e6), (1e-3, 0.5, None)):

        def rule(known, lr=lr):
            rate = lr or theory.corollary_1_rate(known.rounds, 1.0)
            return theory.theorem_2(known, sizes=[3, 3], lr=rate, L=1.0, G2=1.0, sigma2=0.9, gap=1)

        setting = PAIR | {"server": ShiftedExponential(c_g, 1.0)}
        found = theory.best_sync(syncs, rule, **setting, time=time)
        assert found.best == 0 and (np.diff(found.totals) > -1e-12).all()


@pytest.mark.slow
def test_the_sharper_bound_has_a_best_sync_time_inside():
    rule = partial(
        theory.theorem_2_sharper, sizes=[1, 1], lr=0.03, L=1.0, G2=1.0, sigma2=0.9, gap=1.0
    )
    found = theory.best_sync(np.arange(0.0, 25.0), rule, **PAIR, time=1e5)
    assert 0 < found.best < 24 and found.totals.min() < 0.8 * found.totals[0]

    def drawn(sync):
        return counts.averages(timeline(0, sync, 1e5, **PAIR).counts)

    simulated = theory.best_sync(np.arange(0.0, 25.0), rule, **PAIR, time=1e5, count=drawn)
    assert np.allclose(simulated.totals, found.totals, rtol=0.02) and simulated.best == found.best


def test_when_waiting_cannot_pay_in_the_sharper_bound_either():
    """Equal counts: for h (1 - h) N >= 2 a second iteration costs more than it saves of noise."""
    for N, h in itertools.product((2, 10, 60), (0.003, 0.02, 0.1, 0.3, 0.5)):
        known = {"sizes": [N // 2] * 2, "lr": h, "L": 1.0, "G2": 1.0, "sigma2": 1.0, "gap": 0.0}
        values = [theory.theorem_2_sharper([[t, t]], **known).total for t in range(1, 9)]
        if h * (1 - h) * N >= 2:
            assert min(values) == values[0]
        elif h * (1 - h) * N < 1.99:
            assert values[1] < values[0]


def test_a_farther_server_lifts_the_sharper_bound_alike_at_every_sync_time():
    """At a fixed rate with U = T / E R; at a rate that follows U it does not."""
    fixed, moving = [], []
    for c_g in (1.0, 30.0):
        server, totals = ShiftedExponential(c_g, 1.0), []
        for S in (0.0, 3.0, 7.0):
            known = counts.expected_averages(PAIR["groups"], server, S, 1e5)
            known = replace(known, rounds=1e5 / counts.round_length(PAIR["groups"], server, S)[0])
            here = {"sizes": [1, 1], "L": 1.0, "G2": 1.0, "sigma2": 0.9, "gap": 0.7}
            rates = 0.03, theory.corollary_1_rate(known.rounds, 1.0)
            totals.append([theory.theorem_2_sharper(known, lr=r, **here).total for r in rates])
        fixed.append([own for own, _ in totals])
        moving.append([own for _, own in totals])
    lift = 2 * 0.7 * 29 / (0.03 * 1e5)
    assert np.subtract(fixed[1], fixed[0]) == pytest.approx([lift] * 3, rel=1e-9)
    assert np.ptp(np.subtract(moving[1], moving[0])) > 1e-3


def test_noise_wants_clients_in_the_fast_group_and_drift_in_the_slow():
    """HFL-E9: Figure 10 with 30 clients; and its panels are one experiment with other labels."""
    server, fast, slow = ShiftedExponential(10.0, 1.0), (1.0, 0.1), (7.0, 0.7)
    groups = [ShiftedExponential(*fast), ShiftedExponential(*slow)]
    known = counts.expected_averages(groups, server, 8.0, 1000.0)
    other = counts.expected_averages(groups[::-1], server, 8.0, 1000.0)
    found = []
    for n in (5, 10, 15, 20, 25):
        for rule in (theory.theorem_2, theory.theorem_2_sharper):
            here = bound(rule, known, sizes=[n, 30 - n])
            assert here.total == pytest.approx(bound(rule, other, sizes=[30 - n, n]).total)
        found.append(here)
    assert (np.diff([one["noise"] for one in found]) < 0).all()  # more in the fast group: less
    assert (np.diff([one["drift"] for one in found]) > 0).all()


def test_a_group_averages_its_noise_in_the_drift_too():
    """G2 may be the second moment of a group's mean gradient: checked on the exact moments."""
    rng = np.random.default_rng(9)
    for _ in range(100):
        sizes, table, lr = [6, 2], rng.integers(1, 7, 2), rng.random()
        A, b, C = quadratics(rng, sizes)
        A, b = ([np.stack([g.mean(0)] * len(g)) for g in group] for group in (A, b))
        x = rng.standard_normal(3)
        found = round_moments(A, b, C, sizes, table, x, lr)
        # groups of one client with the mean noise: what A3 means for a group
        alone = [[c.sum(0, keepdims=True) / len(c) ** 2] for c in C]
        moments = []
        for i in range(2):
            one = round_moments([A[i][:1]], [b[i][:1]], alone[i], [1], table[i : i + 1], x, lr)
            moments.append(one["G2"])
        known = {"sizes": sizes, "lr": lr, "L": 1.0, "sigma2": 1.0, "gap": 0.0}
        ours = theory.theorem_2_sharper(table[None], G2=moments, **known)
        scale = 1.0 if lr <= 1 / 2 else 1 + lr
        assert scale * found["drift"] <= ours["drift"] * (1 + 1e-9) + 1e-12
        assert max(moments) <= found["G2"] * (1 + 1e-9)


# ---- constants of a task


class Quadratics:
    """Clients with gradient A_k x + noise of the batch."""

    def __init__(self, A):
        self.A = A

    def client_gradients(self, theta):
        return torch.einsum("kij,j->ki", self.A, theta[0])

    def grad(self, theta, batch):
        return torch.einsum("kij,kj->ki", self.A, theta) + batch


def test_estimators_of_the_constants():
    rng = np.random.default_rng(10)
    raw = rng.standard_normal((3, 4, 4))
    A = torch.as_tensor(raw + raw.transpose(0, 2, 1))
    task, thetas = Quadratics(A), [torch.ones(1, 4).double(), 2 * torch.ones(1, 4).double()]
    batches = [s * torch.eye(3, 4).double() * torch.tensor([[1.0], [2.0], [3.0]]).double()
               for s in (-1, 1)]  # fmt: skip
    found = theory.gradient_constants(task, thetas, batches)
    assert found["sigma2"] == pytest.approx(9)
    exact = max(
        (4 * (a.sum(1) ** 2).sum() + k**2).item() for a, k in zip(A, (1, 2, 3), strict=True)
    )
    assert found["G2"] == pytest.approx(exact)
    largest = np.abs(np.linalg.eigvalsh(A.numpy())).max(1)
    L = theory.client_smoothness(task, thetas[:1], range(3), iterations=2000, tolerance=1e-10)
    assert L == pytest.approx(largest.max(), rel=1e-4)


class Cubes:
    """Client k has the gradient c_k x^3, and noise that grows with x."""

    c = torch.tensor([[1.0], [2.0]]).double()

    def client_gradients(self, theta):
        return self.c * theta**3

    def grad(self, theta, batch):
        return self.c * theta**3 + theta * batch


@pytest.mark.parametrize("steps", [1, -1])
def test_constants_are_the_largest_over_the_models(steps):
    """At (2, 2): a Hessian of 3 c 2^2, a squared gradient of 2 (c 2^3)^2, a variance of 2^2."""
    models = [torch.full((1, 2), x).double() for x in (1.0, 2.0)][::steps]
    batches = [s * torch.tensor([[1.0, 0], [1, 0]]).double() for s in (-1, 1)]
    options = dict(iterations=2000, tolerance=1e-12)
    found = theory.group_constants(Cubes(), (1, 1), models, batches, **options)
    assert found["L"] == pytest.approx(24) and found["sigma2"] == pytest.approx(4)
    assert found["G2"] == pytest.approx(2 * 16**2 + 4)
    assert theory.gradient_constants(Cubes(), models, batches) == pytest.approx(
        {"G2": 2 * 16**2 + 4, "sigma2": 4}
    )


def test_constants_of_groups_are_those_of_their_mean_objectives():
    rng = np.random.default_rng(11)
    raw = rng.standard_normal((5, 4, 4))
    A, sizes = torch.as_tensor(raw + raw.transpose(0, 2, 1)), (2, 3)
    task, models = Quadratics(A), [torch.ones(1, 4).double(), -3 * torch.ones(1, 4).double()]
    batches = [s * torch.full((5, 4), 0.5).double() for s in (-1, 1)]
    found = theory.group_constants(task, sizes, models, batches, iterations=2000, tolerance=1e-12)
    means = [A[:2].mean(0).numpy(), A[2:].mean(0).numpy()]
    assert found["L"] == pytest.approx(max(np.abs(np.linalg.eigvalsh(m)).max() for m in means))
    assert found["sigma2"] == pytest.approx(4 * 0.25)
    squares = [(3 * m.sum(1)) @ (3 * m.sum(1)) for m in means]
    assert found["G2"] == pytest.approx(max(squares[0] + 1 / 2, squares[1] + 1 / 3))
