"""Measures that compare more than two runs, against numbers made by hand."""

from __future__ import annotations

import numpy as np
import pytest
from curves import curves, record

from fedlib.lab.evidence import measures

AT = dict(metric="accuracy", split="test")
NAN = float("nan")


def test_the_best_run_is_chosen_by_the_other_seeds():
    runs = {"one": [0.5, 0.5, 0.9], "two": [0.6, 0.6, 0.3], "base": [0.4, 0.4, 0.4]}
    held = record(curves(runs, **AT))
    got = measures.best_of(held, ["one", "two"], "base", **AT)
    # seeds 2 and 3 add up to 1.4 and 0.9, so do 1 and 3; seeds 1 and 2 to 1.0 and 1.2
    assert got.low == pytest.approx([0.1, 0.1, -0.1]) and (got.low == got.high).all()
    assert got.beside == (pytest.approx(0.4), "accuracy")
    alone = measures.best_of(held, ["one"], "base", **AT)
    assert (alone.low == measures.advantage(held, "one", "base", **AT).low).all()


def test_noise_has_no_best_run():
    """The largest of eight means of noise lies above zero; the one that others choose does not."""
    noise = np.random.default_rng(3).standard_normal((8, 400))
    runs = {str(k): row for k, row in enumerate(noise)} | {"base": np.zeros(400)}
    got = measures.best_of(record(curves(runs, **AT)), [str(k) for k in range(8)], "base", **AT)
    low, high = got.interval(0.95)
    assert low < 0 < high and noise.mean(1).max() > 0.05


def test_a_run_that_diverges_is_not_the_best():
    runs = {"one": [NAN, 0.6, 0.6], "two": [0.5, 0.5, 0.5], "base": [0.4, 0.4, 0.4]}
    got = measures.best_of(record(curves(runs, **AT)), ["one", "two"], "base", **AT)
    assert got.low == pytest.approx([-np.inf, 0.1, 0.1]), "seed 1 does not see that one is lost"
    assert got.lost == "one diverged in 1 of 3 seeds"


def test_after_fewer_rounds_the_other_run_is_looked_at_later_by_so_many():
    """Each run grows by its rounds, at a pace of its own: half of them is half as far."""
    looks = np.arange(11.0)
    runs = {"a": [looks, 2 * looks], "b": [3 * looks, 3 * looks]}
    made = curves(runs, **AT)
    made["clock"], made["rounds"] = made["round"], made["round"] / 10
    held = record(made.assign(rounds=made["rounds"].where(made["run"] == "b", made["rounds"] / 2)))
    got = measures.with_fewer_rounds(held, "a", "b", **AT, rounds=0.5)
    # the last tenth of a has its rounds 4.5 to 5; b is at its rounds 9 to 10 then, from 27 to 30
    assert got.low == pytest.approx([9.5 - 28.5, 19 - 28.5]) and (got.high == got.low).all()
    assert got.beside == (pytest.approx(28.5), "accuracy")
    between = measures.with_fewer_rounds(held, "a", "b", **AT, rounds=5 / 8.5)
    assert between.low == pytest.approx([9.5 - 24.225, 19 - 24.225]), "on a line between two looks"
    with pytest.raises(measures.MissingRows, match="'b' in made.csv.gz is over before so many"):
        measures.with_fewer_rounds(held, "a", "b", **AT, rounds=0.49)
    loss = record(held.frame.assign(metric="loss"))
    less = measures.with_fewer_rounds(loss, "a", "b", "loss", "test", rounds=0.5)
    assert less.low == pytest.approx([19, 9.5])


def test_one_gain_less_another_over_a_part_of_the_time():
    rise = np.linspace(0, 1, 11)
    runs = {"a": [3 * rise, 4 * rise], "b": [rise, rise], "c": [2 * rise, 2 * rise],
            "d": [rise, 0 * rise]}  # fmt: skip
    held = record(curves(runs, **AT))
    got = measures.gains_more(held, "a", "b", "c", "d", **AT, start=0.0, stop=1.0)
    assert got.low == pytest.approx([(2 - 1) * 0.5, (3 - 2) * 0.5])
    late = measures.gains_more(held, "a", "b", "c", "d", **AT, start=0.9, stop=1.0)
    assert late.low == pytest.approx([0.95, 0.95])
    assert late.beside == (pytest.approx(0.95), "accuracy")
