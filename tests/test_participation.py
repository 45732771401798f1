"""Participation processes against what the specification derives about them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.papers.participation.theory import factor, interval_means
from fedlib.population import participation as pt

ALL = {
    "full": pt.Full(20),
    "independent": pt.Independent(20, 4),
    "regularized": pt.Regularized(20, 4),
    "cyclic": pt.Cyclic(20),
    "periodic": pt.Periodic(20, 2, groups=5, window=4),
    "periodic-sampler": pt.PeriodicSampler(20, 2, groups=5, window=4),
    "markov": pt.Markov(20, on=0.1, off=0.3),
    "markov capped": pt.Markov(20, on=0.3, off=0.1, cap=5),
    "drift": pt.Drift(20, 3),
    "trace": pt.Trace(np.random.default_rng(0).dirichlet(np.ones(20), size=7)),
}


def mean_factor(process, seed, P, rounds, start=0):
    return factor(interval_means(process.weights(seed, start, start + rounds), P)).mean()


@pytest.mark.parametrize("name", ALL)
def test_weights_are_a_distribution_and_a_function_of_seed_and_round(name):  # exact test 7
    process = ALL[name]
    q = process.weights(3, 0, 60)
    assert q.min() >= 0 and np.allclose(q.sum(1), 1)
    assert np.array_equal(process.weights(3, 41, 44), q[41:44])
    rho2 = process.rho2(3, 60)
    assert 1 / 20 <= rho2 + 1e-12 and rho2 <= 1
    clients, weight = process.cohort([3, 4], 17)
    dense = np.zeros(20)
    np.add.at(dense, clients[0].numpy(), weight[0].numpy())
    assert np.allclose(dense, q[17]) and clients.shape == weight.shape


def test_rho2_of_distinct_equal_draws():  # exact test 7
    for process, s in ((ALL["independent"], 4), (ALL["regularized"], 4), (ALL["drift"], 3)):
        assert process.rho2(0, 100) == pytest.approx(1 / s)
    assert ALL["full"].rho2(0, 10) == pytest.approx(1 / 20)


def test_regularized_has_equal_interval_means():  # exact test 9
    process = pt.Regularized(250, 10)
    for P in (25, 50, 75):
        assert np.abs(interval_means(process.weights(1, 0, 4 * P), P) - 1 / 250).max() < 1e-15
    assert mean_factor(process, 1, 10, 100) > 1


@pytest.mark.parametrize("offset", [0, 1, 37, 99])
def test_ideal_periodic_is_balanced_over_any_whole_cycle(offset):  # exact test 10
    process = pt.Periodic(250, 10, groups=5, window=100, offset=offset)
    for start in (0, 13, 250):
        mean = process.weights(0, start, start + 500).mean(0)
        assert np.abs(mean.reshape(5, 50).sum(1) - 1 / 5).max() < 1e-12
    aligned = process.weights(0, 100 - offset, 600 - offset).mean(0)
    assert np.abs(aligned - 1 / 250).max() < 1e-12


def test_independent_participation_factor():  # exact test 11
    process = pt.Independent(250, 10)
    q = process.weights(0, 0, 4000)
    for P, expected in ((1, 24.0), (25, 0.96), (500, 0.048)):
        means = q.reshape(-1, P, 250).mean(1)
        got = 250 * ((means - 1 / 250) ** 2).sum(1).mean()
        assert got == pytest.approx(expected, rel=0.03 if P < 500 else 0.15)


def test_two_state_chain_moments():  # exact test 12
    a, b, rounds = 0.2, 0.1, 4000
    process = pt.Markov(200, on=b, off=a)
    on = process.weights(0, 0, rounds) > 0
    pi = b / (a + b)
    x = on - pi
    assert on.mean() == pytest.approx(pi, rel=0.02)
    for lag in (0, 1, 3, 8):
        covariance = (x[: rounds - lag] * x[lag:]).mean()
        assert covariance == pytest.approx(pi * (1 - pi) * (1 - a - b) ** lag, abs=0.004)
    P = 200
    means = x.reshape(-1, P, 200).mean(1)
    long_run = pi * (1 - pi) * (2 - a - b) / (a + b)
    assert P * means.var() == pytest.approx(long_run, rel=0.06)


def test_markov_gives_everyone_the_same_expected_weight():
    q = pt.Markov(10, on=0.05, off=0.3).weights(0, 0, 40_000)
    assert np.abs(q.mean(0) - 0.1).max() < 0.01


def test_drift_is_ergodic():
    process = pt.Drift(50, 5)
    factors = [mean_factor(process, 0, P, 20_000) for P in (1, 100, 2000)]
    assert factors[0] > factors[1] > factors[2] and factors[2] < 0.02
    assert np.array_equal(process.weights(0, 1023, 1026)[1:], process.weights(0, 1024, 1026))


def test_official_sampler():
    process = pt.PeriodicSampler(250, 10, groups=5, window=100)
    q = process.weights(0, 0, 6000)
    shift = process.shift(0)
    for t in (0, 99 - shift, 100 - shift, 777):
        group = (t + shift) // 100 % 5
        assert q[t, 50 * group : 50 * group + 50].sum() == pytest.approx(1)
    duplicates = (q > 0.15).any(1).mean()
    assert 0.04 < duplicates < 0.07
    draws = q[: 500 * 12].reshape(12, 500, 250).sum(1) * 10
    assert draws.mean() == pytest.approx(20) and 0.4 < draws.std() < 0.75
    assert draws.min() >= 17 and draws.max() <= 23


def test_participation_factor_of_the_official_sampler():
    """Averaged over offsets: no decay below a cycle, none left at a whole one, 900 below 100."""
    samplers = [pt.PeriodicSampler(250, 10, offset=offset) for offset in range(5, 100, 10)]
    mean = {
        P: np.mean([mean_factor(each, 0, P, 3600, 500) for each in samplers])
        for P in (1, 100, 300, 500, 900)
    }
    assert mean[1] == pytest.approx(3.69, rel=0.01)
    assert mean[100] == pytest.approx(1.6, rel=0.1) and mean[300] == pytest.approx(0.4, rel=0.15)
    assert mean[500] < 0.001 and mean[500] < mean[900] < 0.03


def test_errors():
    with pytest.raises(FedlibError, match="between 1 and N=5"):
        pt.Independent(5, 6)
    with pytest.raises(FedlibError, match="multiple of S"):
        pt.Regularized(10, 3)
    with pytest.raises(FedlibError, match="groups"):
        pt.Periodic(250, 60)
    with pytest.raises(FedlibError, match="summing to one"):
        pt.Trace(np.ones((3, 2)))
    with pytest.raises(FedlibError, match=r"\(0, 1\]"):
        pt.Markov(10, on=0.0)
    with pytest.raises(FedlibError, match=r"\(0, 1\]"):
        pt.Markov(10, off=0.0)


def test_a_whole_group_may_take_part_at_once():
    process = pt.Periodic(6, 2, groups=3, window=2, offset=0)
    assert [sorted(process.draw(5, t)[0]) for t in (1, 2, 4)] == [[0, 1], [2, 3], [4, 5]]


RANDOM = [name for name in ALL if name not in ("full", "cyclic", "trace")]


@pytest.mark.parametrize("name", RANDOM)
def test_seeds_draw_apart(name):
    one, other = (ALL[name].weights(seed, 0, 30) for seed in (3, 4))
    assert not np.array_equal(one, other)


def orders(process, start, rounds):
    """Return the clients of each round, in the order of a pass."""
    return [process.draw(3, t)[0].tolist() for t in range(start, start + rounds)]


def test_every_pass_has_an_order_of_its_own():
    process = ALL["regularized"]  # five rounds a pass
    assert orders(process, 0, 5) != orders(process, 5, 5)
    process = pt.Periodic(50, 1, groups=5, window=20, offset=0)  # two passes of ten a window
    passes = [orders(process, start, 10) for start in (0, 10, 100, 110)]  # the first group
    assert all(sorted(sum(one, [])) == list(range(10)) for one in passes)
    assert len({str(one) for one in passes}) == 4


def test_phases_are_spread_over_the_window():
    process = pt.PeriodicSampler(20, 2, groups=5, window=10)
    shifts = [process.shift(seed) for seed in range(200)]
    assert set(shifts) == set(range(10)) and 3.5 < np.mean(shifts) < 5.5


def test_two_threads_draw_what_one_does():
    process = pt.Markov(20, on=0.1, off=0.3)
    alone = [process.draw(1, t)[0].tolist() for t in range(2000)]
    pt._memory.cache_clear()
    with ThreadPoolExecutor(2) as pool:
        drawn = pool.map(lambda _: [process.draw(1, t)[0].tolist() for t in range(2000)], "ab")
        assert all(found == alone for found in drawn)


def test_chains_start_in_their_stationary_law():
    process = pt.Markov(20_000, on=0.1, off=0.3)
    assert len(process.draw(0, 0)[0]) / 20_000 == pytest.approx(0.1 / 0.4, abs=0.01)


def test_a_cap_favours_nobody():
    q = pt.Markov(10, on=0.9, off=0.1, cap=3).weights(0, 0, 3000)
    assert ((q > 0).sum(1) <= 3).all()
    assert np.abs(q.mean(0) - 0.1).max() < 0.02


def test_the_drift_moves_by_its_speed():
    process = pt.Drift(1001, 1, speed=3)
    place = np.array([process.draw(5, t)[0][0] for t in range(10_000)])
    steps = np.diff(place) % 1001
    assert steps.max() == 6 and steps.min() == 0
    assert steps.mean() == pytest.approx(3, abs=0.1)


def test_rho2_is_of_the_most_unequal_round():
    process = pt.Trace([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    assert process.rho2(0, 3) == 1 and process.rho2(0, 1) == 0.375
    assert process.rho2(0, 1, start=2) == 0.5


def test_the_official_sampler_takes_permutations_from_their_ends():
    process = pt.PeriodicSampler(6, 2, groups=1, window=4)
    first, second = (stream(3, "participation", k).permutation(6)[::-1] for k in (0, 1))
    assert sum(orders(process, 0, 6), []) == [*first, *second]


@pytest.mark.parametrize(
    "make",
    [
        lambda: pt.Full(0), lambda: pt.Full("4"), lambda: pt.Full(2.5), lambda: pt.Cyclic(0),
        lambda: pt.Independent(4, 1.5), lambda: pt.Independent(4, "2"),
        lambda: pt.Periodic(4, 1, groups=0), lambda: pt.Periodic(4, 1, groups=2, window=0),
        lambda: pt.Periodic(4, 1, groups=2, window=-5), lambda: pt.Periodic(4, 1, 2, 2, 0.5),
        lambda: pt.PeriodicSampler(4, 1, groups=0), lambda: pt.Markov(4, cap=0),
        lambda: pt.Markov(4, cap=1.5), lambda: pt.Drift(4, 1, speed=-1), lambda: pt.Trace("abc"),
        lambda: pt.Trace([[1.0], [0.5, 0.5]]), lambda: pt.Trace(np.zeros((0, 4))),
        lambda: pt.Trace([[-0.5, 1.5]]),
    ],
)  # fmt: skip
def test_processes_that_cannot_be(make):
    with pytest.raises(FedlibError, match="whole number|A trace needs"):
        make()


@pytest.mark.parametrize(
    "clients, weights",
    [([0, 1], [0.5, 0.6]), ([0, 1], [1.5, -0.5]), ([0, 3], [0.5, 0.5]), ([-1], [1.0]),
     ([], []), ([0, 1], [1.0]), ([0], [np.nan]), ([0], [0.0]), ([0.2, 1.7], [0.5, 0.5]),
     ([True, False, True], [0.5, 0.0, 0.5])],
)  # fmt: skip
def test_a_process_of_ones_own_draws_clients_that_are_there_with_weights_that_sum_to_one(
    clients, weights
):
    class Mine(pt.Participation):
        def draw(self, seed, t):
            return np.array(clients), np.array(weights)

    with pytest.raises(FedlibError, match="clients 0 to 2, .*together 1; got"):
        Mine(3).cohort((1,), 0)


def test_a_recording_begins_again_after_its_rounds_and_is_a_copy():
    weights = np.eye(3)
    trace = pt.Trace(weights)
    weights[:] = [0, 0, 1]
    assert trace.cycle == 3
    assert [trace.draw(0, t)[0].tolist() for t in range(4)] == [[0], [1], [2], [0]]


def test_a_window_drifts_on_for_as_long_as_one_likes():
    drift, t = pt.Drift(10, 2, 1), 1024 * 1100
    steps = [stream(3, "participation", n).integers(0, 3, 1024).sum() for n in range(1100)]
    start = stream(3, "participation start").integers(10) + sum(steps)
    step = stream(3, "participation", 1100).integers(0, 3, 1024)[0]
    assert drift.draw(3, t)[0][0] == (start + step) % 10


def test_probabilities_of_all_clients_are_a_tuple():
    with pytest.raises(FedlibError, match=r"a number, or a tuple of one a client; got \[0.1"):
        pt.Markov(2, on=[0.1, 0.2])
