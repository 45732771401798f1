"""Groups merged as they arrive, against the synchronous algorithm, hand counts and a plain loop."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from test_hierarchy import ONE, QUICK, SERVER, states, task_of

from fedlib.engine.simulation import simulate
from fedlib.errors import FedlibError
from fedlib.papers.hierarchy import AsyncHierarchicalSGD, HierarchicalSGD, arrivals
from fedlib.papers.hierarchy.clock import timeline
from fedlib.population.delays import Deterministic, ShiftedExponential


def test_equal_fixed_delays_give_the_synchronous_iterates():
    task, settings = task_of(), ((2, 4), 0.3, 3.0, 30.0, ONE, Deterministic(2.0), 2)
    together, apart = HierarchicalSGD(*settings), AsyncHierarchicalSGD(*settings, decay=0.7)
    assert together.rounds((0, 1)) == apart.rounds((0, 1)) == 6
    for a, b in zip(states(together, task, 6, (0, 1)), states(apart, task, 6, (0, 1)), strict=True):
        assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and (a.clock == b.clock).all()


def test_one_group_has_nobody_to_wait_for():
    task, settings = task_of(), ((6,), 0.3, 3.0, 30.0, QUICK, Deterministic(2.0), 2)
    a, b = HierarchicalSGD(*settings), AsyncHierarchicalSGD(*settings, decay=0.7)
    assert torch.equal(states(a, task, 4)[-1].x, states(b, task, 4)[-1].x)


@pytest.mark.parametrize("grow", [0.0, 0.7])
def test_a_lone_group_arrives_when_the_synchronous_clock_says(grow):
    algorithm = AsyncHierarchicalSGD((6,), 0.3, 3.0, 60.0, QUICK, ONE, grow=grow)
    for seed, found in zip((3, 4), algorithm.timelines((3, 4)), strict=True):
        line = timeline(seed, 3.0, 60.0, [QUICK], ONE, grow)
        assert (found.counts == line.counts).all()
        assert_allclose(found.end, line.end, rtol=1e-13)


def test_arrivals_counted_by_hand():
    """Group 0: two iterations of 1 and a trip of 1. Group 1: one of 3 and a trip of 1."""
    found = arrivals(0, 2.0, 12.0, [ONE, Deterministic(3.0)], ONE)
    assert found.end.tolist() == [3, 4, 6, 8, 9, 12]
    assert found.counts.tolist() == [[2, 0], [0, 1], [2, 0], [0, 1], [2, 0], [2, 1]]
    assert found.staleness.tolist() == [[0, 0], [0, 1], [1, 0], [0, 1], [1, 0], [0, 1]]


def test_groups_that_arrive_together_are_two_merges_to_a_third():
    found = arrivals(0, 2.0, 6.0, [ONE, ONE, Deterministic(5.0)], ONE)
    assert found.end.tolist() == [3, 6]
    assert found.staleness.tolist() == [[0, 0, 0], [0, 0, 2]]


def test_every_merge_is_missed_by_whom_it_met_on_the_way():
    found = arrivals(5, 2.0, 400.0, [QUICK, ShiftedExponential(1.0, 2.0), ONE], SERVER)
    arrived, began = found.counts > 0, np.zeros(3)
    assert (arrived.sum(1) == 1).all() and (np.diff(found.end) > 0).all()
    for k, i in enumerate(arrived.argmax(1)):
        between = (found.end > began[i]) & (found.end < found.end[k])
        assert found.staleness[k, i] == between.sum()
        began[i] = found.end[k]
    assert found.end[-1] >= 400 > found.end[-2]


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_plain_loop_over_arrivals_gives_the_same_models(decay):
    task, groups = task_of(), (2, 4)
    law = (QUICK, ShiftedExponential(1.0, 1.0))
    algorithm = AsyncHierarchicalSGD(groups, 0.3, 2.0, 20.0, law, SERVER, decay=decay)
    found, x = algorithm.timelines((3,))[0], task.init((3,))[0]
    held, members, most = [x, x], [range(2), range(2, 6)], 0
    for k, state in enumerate(states(algorithm, task, len(found.end), (3,))):
        (i,) = np.flatnonzero(found.counts[k])
        y, t, s = held[i], found.counts[k, i], found.staleness[k, i]
        for _ in range(t):
            y = y - 0.3 * task.client_gradients(y)[list(members[i])].mean(0)
        x = x + groups[i] / 6 / t / (1 + s) ** decay * (y - held[i])
        held[i], most = x, max(most, s)
        assert_allclose(state.x[0], x, atol=1e-12)
        assert_allclose(state.y[0, i], y, atol=1e-12)
        assert_allclose(state.origin[0], torch.stack(held), atol=1e-12)
    assert most >= 1


def test_runs_side_by_side_are_those_alone_and_rest_when_they_are_over():
    task = task_of()
    many = AsyncHierarchicalSGD((3, 3), 0.2, (0.0, 6.0), 25.0, QUICK, SERVER, 2, decay=0.5)
    rounds = many.rounds((4, 4))
    both = simulate(many, task, rounds, (4, 4), name=["a", "b"], progress=False).state
    for r, S in enumerate(many.sync):
        own = replace(many, sync=S)
        assert own.rounds((4,)) < rounds or S == 0
        alone = simulate(own, task, own.rounds((4,)), (4,), progress=False).state
        assert_allclose(both.x[r], alone.x[0], atol=1e-14)
        assert both.clock[r] == alone.clock[0]


def test_exchanges_are_drawn_for_each_group_apart():
    a, b = (arrivals(seed, 0.0, 40.0, [ONE, ONE], SERVER) for seed in (0, 1))
    assert a.end[0] != a.end[1] and a.end[0] != b.end[0]


def test_the_clock_must_move_and_the_decay_be_a_number():
    with pytest.raises(FedlibError, match="would never move"):
        arrivals(0, 0.0, 9.0, [Deterministic(0.0)], Deterministic(0.0))
    with pytest.raises(FedlibError, match="decay is a finite number of at least 0"):
        AsyncHierarchicalSGD((3, 3), 0.1, 1.0, 9.0, ONE, SERVER, decay=-1)


def test_nova_needs_a_round_that_all_groups_share():
    settings = (3, 3), 0.1, 1.0, 9.0, ONE, SERVER
    for merge in ("normalised", "plain"):
        AsyncHierarchicalSGD(*settings, merge=merge)
    with pytest.raises(FedlibError, match="no round in common"):
        AsyncHierarchicalSGD(*settings, merge="nova")
