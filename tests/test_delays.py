"""Delay laws and the virtual clock."""

import numpy as np
import pytest

from fedlib.errors import FedlibError
from fedlib.population.delays import (
    Deterministic,
    EventQueue,
    ShiftedExponential,
    check_law,
    laws_of,
)

LAWS = [ShiftedExponential(1.0, 0.5), Deterministic(3.0)]


@pytest.mark.parametrize("law", LAWS)
def test_a_name_fixes_the_draw(law):
    long = law.draws(3, "comp", 1, 7, size=5)
    assert long.shape == (5,)
    assert np.array_equal(long, law.draws(3, "comp", 1, 7, size=5))
    assert np.array_equal(long[:2], law.draws(3, "comp", 1, 7, size=2))
    assert law.draw(3, "comp", 1, 7) == long[0]


def test_other_seeds_names_and_keys_give_other_draws():
    law = ShiftedExponential(0.0, 1.0)
    names = [(3, "comp", 1, 7), (4, "comp", 1, 7), (3, "comm", 1, 7), (3, "comp", 7, 1)]
    assert len({law.draw(*name) for name in names}) == 4


def test_shifted_exponential_has_its_law():
    law = ShiftedExponential(2.0, 0.5)
    times = law.draws(0, "comm", size=40_000)
    assert times.min() >= 2.0 and law.expected == 2.5
    error = 4 * 0.5 / np.sqrt(len(times))
    assert abs(times.mean() - law.expected) < error
    assert abs((times > 2.5).mean() - np.exp(-1)) < error
    assert abs(times.std() - 0.5) < 0.02


def test_laws_of_one_name_share_their_luck():
    a, b = ShiftedExponential(1.0, 2.0), ShiftedExponential(5.0, 4.0)
    unit = (a.draws(1, "comm", 0, 0, size=9) - 1) / 2
    assert np.allclose(unit, (b.draws(1, "comm", 0, 0, size=9) - 5) / 4, atol=1e-14)


def test_no_random_part_is_deterministic():
    assert (ShiftedExponential(3.0, 0.0).draws(0, "comm", size=4) == 3.0).all()
    assert (Deterministic(3.0).draws(0, "comm", size=4) == 3.0).all()
    assert Deterministic(3.0).expected == 3.0


BAD = [-1.0, float("nan"), float("inf"), -float("inf"), True, np.True_, np.float32("nan"), 1j, [1]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_impossible_times_are_refused(bad):
    for make in (
        Deterministic,
        lambda v: ShiftedExponential(v, 1),
        lambda v: ShiftedExponential(1, v),
    ):
        with pytest.raises(FedlibError, match="at least 0"):
            make(bad)


def test_one_law_serves_all_and_a_list_must_fit():
    law, slow = LAWS[:2]
    assert laws_of(law, 3) == [law] * 3
    assert laws_of((law, slow), 2) == [law, slow]
    with pytest.raises(FedlibError, match="2 delay laws for 3 groups"):
        laws_of([law, slow], 3, "group")


def test_events_come_in_order_of_time_then_of_insertion():
    queue = EventQueue()
    for time, event in [(2.0, "c"), (1.0, {"a": 1}), (2.0, "b"), (1.0, {"a": 0}), (0.5, None)]:
        queue.push(time, event)  # dictionaries cannot be compared, and need not be
    assert len(queue) == 5 and queue.next_time == 0.5
    assert [queue.pop() for _ in range(3)] == [(0.5, None), (1.0, {"a": 1}), (1.0, {"a": 0})]
    assert queue.now == 1.0
    queue.push(2.0, "d")
    queue.push(3.0, "e")
    assert queue.pop_all() == (2.0, ["c", "b", "d"])
    assert queue.pop_all() == (3.0, ["e"])
    assert len(queue) == 0 and queue.next_time == float("inf")
    with pytest.raises(FedlibError, match="No event is left"):
        queue.pop()


def test_the_clock_never_goes_back():
    queue = EventQueue(now=5.0)
    queue.push(5.0, "now")
    for bad in (4.9, float("nan"), float("inf")):
        with pytest.raises(FedlibError, match="cannot be added"):
            queue.push(bad, "never")
    assert queue.pop() == (5.0, "now")


def test_every_key_counts():
    law = ShiftedExponential(0.0, 1.0)
    assert law.draw(3, "comp", 1, 7) != law.draw(3, "comp", 1, 8)


def test_what_is_no_law_is_refused_at_once():
    for wrong in (None, 1.0, (Deterministic(1.0), 2.0)):
        with pytest.raises(FedlibError, match=r"comp is a delay law.*Deterministic\(1.0\)"):
            check_law("comp", wrong)
    for wrong in ("1", None):
        with pytest.raises(FedlibError, match="value is a time"):
            Deterministic(wrong)
