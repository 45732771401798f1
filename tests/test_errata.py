"""The errata: their form, and by hand-sized numbers what no other test shows of them."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import build
import numpy as np
import pytest
from _ext.fedbook.facts import Errata

from fedlib import paths
from fedlib.errors import FedlibError
from fedlib.papers.participation import theory
from fedlib.papers.tiers import theory as tiers
from fedlib.schema import read_toml

BOOKS = {
    home.name: read_toml(home / "errata.toml", Errata)["erratum"]
    for home in paths.papers("errata.toml").values()
}
ALL = [entry for entries in BOOKS.values() for entry in entries]
IDS = [entry["id"] for entry in ALL]
NAMED = re.compile(r"(?<![\w-])([A-Z]{3,}\d?-E\d+)(?!\w)")


def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    trees = [ast.parse(path.read_text("utf-8")) for path in Path(__file__).parent.glob("test_*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_no_two_entries_have_one_name():
    assert len(IDS) == len(set(IDS)) > 25


def test_every_entry_names_tests_that_exist_or_says_that_it_was_read():
    there = names_of_tests()
    for entry in ALL:
        assert set(entry["test"]) <= there, entry["id"]
        if not entry["test"]:
            assert entry["kind"] != "error", f"{entry['id']}: an error needs a test"
            assert "y reading" in entry["checked"], entry["id"]


def test_an_entry_that_is_named_somewhere_exists():
    """Made-up papers of the guides have names of their own."""
    ours = {name.rsplit("-", 1)[0] for name in IDS}
    for folder in ("notebooks", "book", "data", "fedlib", "tests"):
        for path in (build.ROOT / folder).rglob("*"):
            if path.suffix in {".ipynb", ".md", ".toml", ".py"} and "_build" not in path.parts:
                named = set(NAMED.findall(path.read_text("utf-8")))
                lost = {name for name in named if name.rsplit("-", 1)[0] in ours} - set(IDS)
                assert not lost, f"{path} names {sorted(lost)}"


# ---- generalized FedAvg


def test_uniform_suprema_can_add_up_to_twice_the_divergence():
    """GFA-E18: gradients +1 and -1 around the mean; the first alone, then both."""
    K = theory.gram(np.array([[1.0], [-1.0]]))
    q = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert theory.d2(K) == 1
    assert theory.beta2(K, q).tolist() == [1, 0] and theory.nu2(K, q).tolist() == [0, 1]
    assert (theory.beta2(K, q) + theory.nu2(K, q) <= theory.d2(K)).all()  # round by round: true
    assert theory.beta2(K, q).max() + theory.nu2(K, q).max() == 2 * theory.d2(K)


def test_the_first_term_of_equation_11_is_that_of_equation_6():
    """GFA-E19: a client is alone, so nobody differs from the mean of those who take part."""
    gradients, q = np.array([3.0, -1.0]), np.array([1.0, 0.0])
    inside, mean = q @ gradients, gradients.mean()
    first, second = q @ (gradients - inside) ** 2, (inside - mean) ** 2
    left_of_5 = (q @ (gradients - mean)) ** 2
    assert (first, second) == (0, 4) and left_of_5 == second != first


def test_the_mean_over_intervals_needs_no_union():
    """GFA-E2: one coin a round; ln(2 / c^2) in place of ln(2 / c) covers the mean, not the worst.

    Six rounds, counted exactly, for the step that everything rests on; then many intervals.
    """
    P = 6
    deviation = np.arange(P + 1) / P - 0.5
    chance = np.array([math.comb(P, k) for k in range(P + 1)]) / 2**P
    assert chance @ np.exp(P * deviation**2) <= math.sqrt(2)
    rng, c, interval, count = np.random.default_rng(8), 0.1, 100, 200
    hits = rng.binomial(interval, 0.5, size=(400, count)) / interval
    sizes = theory.variance_bound(1.0, np.stack([hits, 1 - hits], -1))
    bound = 2**2 / interval * math.log(math.sqrt(2) / c)
    printed = theory.proposition_4_7_hoeffding(1.0, 2, interval, c, union=False)
    assert printed < bound < 2 * printed
    assert (sizes.mean(1) <= bound).mean() >= 1 - c > (sizes.max(1) <= printed).mean()


def test_turns_that_grow_are_ergodic_but_not_uniformly():
    """GFA-E20: turns of 1, 2, 3, ... rounds; the coin swaps the clients, not the square."""
    turns = np.repeat(np.arange(1, 1500) % 2, np.arange(1, 1500)).astype(float)
    total = np.concatenate([[0.0], turns.cumsum()])
    for start in (0, 7, 1000):
        square = [((total[start + P] - total[start]) / P - 0.5) ** 2 for P in (10**2, 10**4, 10**6)]
        assert square[2] < 1e-5 and square[2] <= square[1] <= square[0]
    for P in (1, 10, 100, 500):
        means = theory.interval_means(np.stack([turns, 1 - turns], -1), P)
        assert means.max() == 1, "somebody is alone in a whole interval"


def test_a_run_can_choose_an_interval_that_evens_out():
    """GFA-E20: with P = T^(3/4) the worst interval of a run goes to 1/2 each, with √T it does not.

    By the derivation an interval is at most 2K times as uneven as the longest average from 0 on.
    """
    turns = np.repeat(np.arange(1, 1500) % 2, np.arange(1, 1500)).astype(float)
    worst = []
    for T in (10**4, 10**5, 10**6):
        P = round(T**0.75)
        K = T // P
        means = turns[: K * P].reshape(K, P).mean(1)
        far = np.abs(turns.cumsum() / np.arange(1, len(turns) + 1) - 0.5)[P - 1 : T].max()
        worst.append(np.abs(means - 0.5).max())
        assert worst[-1] <= 2 * K * far
        rooted = turns[: int(T**0.5) ** 2].reshape(-1, int(T**0.5)).mean(1)
        assert np.abs(rooted - 0.5).max() > 0.4
    assert worst[0] > worst[1] > worst[2] and worst[2] < 0.02


def test_table_d1_edges_and_integrated_steps():
    """GFA-E7: the grid is five decades down from the initial rate; a cycle is 500 rounds."""
    initial = {"FashionMNIST": 0.1, "CIFAR-10": 0.05}
    chosen = {
        "wait-minibatch": (0.1, 0.05),
        "wait-full": (0.1, 0.05),
        "no amplification": (1e-5, 5e-5),
        "amplification": (1e-5, 5e-6),
    }
    decades = {
        (method, data): round(math.log10(rate / initial[data]))
        for method, rates in chosen.items()
        for data, rate in zip(initial, rates, strict=True)
    }
    assert {place for place, decade in decades.items() if decade not in (0, -4)} == {
        ("no amplification", "CIFAR-10")
    }
    assert all(
        (decade == 0) == method.startswith("wait") for (method, _), decade in decades.items()
    )
    plain, amplified = (np.array(chosen[name]) for name in ("no amplification", "amplification"))
    np.testing.assert_allclose(10 * amplified / plain, [10, 1])


def test_corollary_3_3_depends_on_the_scale_of_the_objective():
    """GFA-E11: f times a; gradients scale with a, their squares with a^2."""

    def known(a):
        squares = {"sigma2": 0.5, "nu2": 0.3, "beta2": 0.2, "delta2": 0.1}
        squares = {name: a**2 * value for name, value in squares.items()}
        return {"L": 2.0 * a, "gap": 0.7 * a, "rho2": 0.25, **squares}

    shape, a = {"local_steps": 2, "interval": 5, "rounds": 40_000}, 3.0
    for name in ("corollary_3_3", "theorem_3_1"):
        totals = []
        for scale in (1.0, a):
            rates = {"lr": 1e-3 / scale, "amplify": 4.0} if name == "theorem_3_1" else {}
            totals.append(getattr(theory, name)(**known(scale), **shape, **rates).total)
        exact = totals[1] == pytest.approx(a**2 * totals[0], rel=1e-12)
        assert exact == (name == "theorem_3_1")


def test_corollary_4_3_at_the_size_of_the_experiments():
    """GFA-E12: P = 500, I = 5, 300 000 rounds, the tuned pair of FashionMNIST, L = 1."""
    size = {"local_steps": 5, "interval": 500, "rounds": 300_000}
    known = {"gap": 2.0, "sigma2": 1.0, "rho2": 0.1}
    lr, _ = theory.step_sizes_3_2(L=1.0, **known, **size)
    assert 1e-5 / lr == pytest.approx(164, abs=1)
    squares = {"nu2": 1.0, "beta2": 1.0, "delta2": 0.0}
    tuned = {"lr": 1e-5, "amplify": 10.0}
    assert theory.theorem_3_1(L=2.0, **known, **squares, **tuned, **size).total > 0
    with pytest.raises(FedlibError, match="2 L I P"):
        theory.theorem_3_1(L=2.01, **known, **squares, **tuned, **size)


def test_at_a_fixed_product_the_bound_falls_with_the_rate():
    """GFA-E14: towards gradients at a frozen model; and the bias of the toy goes with it."""
    known = {"L": 1.0, "gap": 2.0, "sigma2": 1.0, "nu2": 1.0, "beta2": 1.0, "rho2": 0.1}
    size = {"delta2": 0.1, "local_steps": 5, "interval": 20, "rounds": 1000}
    bounds = [
        theory.theorem_3_1(**known, **size, lr=8e-4 / f, amplify=6 * f).total for f in (1, 10, 100)
    ]
    assert bounds[0] > bounds[1] > bounds[2]
    more = theory.theorem_3_1(**known, **size, lr=8e-6, amplify=60.0).total
    assert more < theory.theorem_3_1(**known, **size, lr=8e-6, amplify=1.0).total  # what is shown


@pytest.mark.parametrize("samples", [60_000, 50_000])
def test_sum_of_batch_means_over_samples_is_a_255th(samples):
    """GFA-E16: with a last batch that is not full."""
    assert samples / math.ceil(samples / 256) == pytest.approx(255, abs=0.5)


# ---- TDCD


def printed_box(Q: int, rounds: int) -> tuple[float, float]:
    """Return the hub's number by Algorithm 1's line 32, and by Equation 13: theta^2/2, rate 1/2."""
    hub = virtual = 8.0
    for _ in range(rounds):
        copies = [hub]
        for _ in range(Q):
            copies.append(copies[-1] / 2)
            virtual /= 2
        hub = copies[-2]
    return hub, virtual


def test_the_printed_box_loses_the_last_step_of_a_round():
    """TDCD-E1: two rounds of three steps are four, and with one step a round nothing moves."""
    assert printed_box(Q=3, rounds=2) == (8 / 2**4, 8 / 2**6)
    assert printed_box(Q=1, rounds=5) == (8, 8 / 2**5)


def test_the_printed_end_of_a_round_finds_a_fall_where_nothing_moves():
    """TDCD-E3: theta^2/2 at 1, Q = 1, so the printed end of the round is its start."""
    lr, theta, L = 0.5, 1.0, 1.0
    fall = -lr * theta * theta + L / 2 * (lr * theta) ** 2  # Equation 59, one gradient in the sum
    start, printed_end = theta, theta  # the index t_0 + Q - 1 is t_0
    assert (printed_end**2 - start**2) / 2 > fall
    after = theta - lr * theta  # the index t_0 + Q
    assert (after**2 - start**2) / 2 <= fall


def test_theorem_1_counts_rounds_not_local_steps():
    """TDCD-E4: theta^2/2 from 1 at the largest step, one silo, one client, no noise."""
    Q, R = 8, 200
    lr = 1 / (8 * Q)
    bound = tiers.theorem_1(L=1.0, L_max=1.0, gap=0.5, sigma2=0.0, lr=lr, Q=Q, rounds=R).total
    gradients = (1 - lr) ** np.arange(Q * R)
    assert (gradients[:R] ** 2).mean() > 1.5 * bound
    assert (gradients[::Q] ** 2).mean() < bound / 2


def test_two_lines_of_algebra():
    """TDCD-E7: the first at A = B = 1, the second at Q = 2, up to the common factor Xi."""
    A = B = 1.0
    assert A * B == (A**2 + B**2 - (A - B) ** 2) / 2 != (A**2 + B**2 - (A + B) ** 2) / 2
    Q = 2
    power = (1 + 2 / Q) ** Q
    line_54 = Q**2 / 2 * ((power - 1) / 2 - 1)
    assert Q / 2 * (Q * (power - 1) / 2 - Q) == line_54 != Q / 2 * ((Q * power - 1) / 2 - Q)


def test_the_bound_of_theorem_1_is_blind_to_clients():
    """TDCD-E18: with uncorrelated noises the same proof divides the leading noise term by K_j."""
    known = {"L": 1.0, "L_max": 1.0, "gap": 1.0, "sigma2": [0.3, 0.4], "rounds": 50}
    step = {"lr": 0.01, "Q": 4}
    printed = tiers.theorem_1(**known, **step)
    for K in (1, 4, 16):
        improved = tiers.theorem_1_independent(**known, **step, clients=[K, K])
        assert improved["noise"] == pytest.approx(printed["noise"] / K)
        assert improved["drift"] == pytest.approx(printed["drift"])


def test_the_variance_of_least_squares_grows_with_the_distance():
    """TDCD-E10: rows (1, 0) and (0, 1), targets 0: gradients are (a, 0) and (0, b) at (a, b)."""
    for far in (1.0, 2.0, 10.0):
        gradients = np.array([[far, 0.0], [0.0, far]])
        spread = ((gradients - gradients.mean(0)) ** 2).sum(1).mean()
        assert spread == pytest.approx(far**2 / 2)
