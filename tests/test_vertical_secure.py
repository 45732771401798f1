"""Masked tree aggregation: exact sums, Definition 4, and what coalitions can compute."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, permutations, product

import numpy as np
import pytest
from numpy.testing import assert_allclose

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.lab.vertical.mitigations import Protection, sample_bytes
from fedlib.papers.vertical.secure import (
    FIGURE_5,
    ModularMasks,
    RealMasks,
    aggregate,
    aggregate_survivors,
    chains,
    check_trees,
    deal,
    expanded,
    joined,
    known,
    leak,
    leaves,
    log_depth,
    opened,
    pairwise_masked,
    safe,
    seats,
    seen_by,
    sends,
    shares,
    significantly_different,
    survivor_bytes,
    view,
)


def depth(tree):
    """Return how many sums follow one another from a leaf to the root."""
    return 1 + max(map(depth, tree)) if isinstance(tree, tuple) else 0


THREE = (((1, 2), 3), ((1, 3), 2))
FIVE = ((((1, 2), 3), (4, 5)), (((1, 3), 5), (2, 4)))


def rng(*keys):
    return stream(0, "masks", *keys)


def singles(trees):
    return all(safe(trees, [l]) for l in range(1, check_trees(trees) + 1))


# --- trees ----------------------------------------------------------------------------------------


def test_figure_5_sends_what_it_says():
    first, second = FIGURE_5
    arrows = [[(one.sender, one.receiver) for one in sends(tree)] for tree in (first, second)]
    assert arrows == [[(2, 1), (4, 3), (3, 1)], [(3, 1), (4, 2), (2, 1)]]
    assert sends(first)[-1].over == (3, 4) and sends(second)[-1].over == (2, 4)


def test_constructions_by_hand():
    assert chains(4) == ((((1, 2), 3), 4), (((4, 3), 2), 1))
    assert log_depth(5) == (((1, 2), (3, (4, 5))), ((1, (3, 5)), (2, 4)))
    assert log_depth(5, "up") == ((((1, 2), 3), (4, 5)), (((1, 3), 5), (2, 4))) == FIVE
    assert log_depth(4) == log_depth(4, "up") == FIGURE_5
    assert seats(4, 2) == (2, 0, 1, 3)


@pytest.mark.parametrize("q", range(2, 65))
def test_trees_have_one_message_a_party_and_their_depth(q):
    for trees in (chains(q), log_depth(q), log_depth(q, "up")):
        assert check_trees(trees) == q
        for tree in trees:
            assert sorted(one.sender for one in sends(tree)) == list(range(2, q + 1))
    assert depth(chains(q)[0]) == q - 1
    assert max(map(depth, log_depth(q))) <= np.ceil(np.log2(q)) + 1


def naive_definition_4(trees):
    """Compare all proper subtrees of the two, as sets of leaves."""

    def subtrees(tree):
        inner = [child for child in tree if isinstance(child, tuple)]
        return [tree] + [one for child in inner for one in subtrees(child)]

    q = len(leaves(trees[0]))
    sets = [[frozenset(leaves(one)) for one in subtrees(tree)] for tree in trees]
    return not any(a == b for a in sets[0] for b in sets[1] if 1 < len(a) < q)


@pytest.mark.parametrize("q", range(3, 65))
def test_both_constructions_satisfy_definition_4(q):
    for trees in (chains(q), log_depth(q), log_depth(q, "up")):
        assert significantly_different(trees)


def test_definition_4_against_comparing_all_subtrees():
    shapes = [
        lambda a, b, c, d, e: (((a, b), c), (d, e)),
        lambda a, b, c, d, e: ((((a, b), c), d), e),
        lambda a, b, c, d, e: ((a, b), (c, d), e),
        lambda a, b, c, d, e: ((a, b, c), (d, e)),
    ]
    found = Counter()
    orders = list(permutations(range(1, 6)))[::7]
    for make, other, order in product(shapes, shapes, orders):
        trees = (make(1, 2, 3, 4, 5), other(*order))
        assert significantly_different(trees) == naive_definition_4(trees)
        found[significantly_different(trees)] += 1
    assert min(found.values()) > 50  # both answers occur


@pytest.mark.parametrize("trees", [FIGURE_5, THREE, FIVE, chains(6)])
def test_equal_trees_are_not_significantly_different(trees):
    assert significantly_different(trees)
    assert not significantly_different((trees[0], trees[0]))


def test_two_equal_stars_meet_the_definition_emptily():
    star = (1, 2, 3, 4)
    assert significantly_different((star, star))
    assert opened((star, star), [1]) == (2, 3, 4)


# --- what a coalition can compute -----------------------------------------------------------------


def leak_by_ranks(trees, coalition):
    """The formula with floating-point ranks: another way than elimination in whole numbers."""
    A_o, A_delta = view(trees, coalition)
    rank = np.linalg.matrix_rank
    return rank(np.hstack([A_o, A_delta])) - rank(A_delta) - len(set(coalition))


def opened_by_ranks(trees, coalition):
    A_o, A_delta = view(trees, coalition)
    whole, found = np.hstack([A_o, A_delta]), []
    for l in range(1, check_trees(trees) + 1):
        unit = np.zeros((1, whole.shape[1]))
        unit[0, l - 1] = 1
        more = np.linalg.matrix_rank(np.vstack([whole, unit])) > np.linalg.matrix_rank(whole)
        if not more and l not in coalition:
            found.append(l)
    return tuple(found)


def test_the_view_of_party_3_in_figure_5_by_hand():
    A_o, A_delta = view(FIGURE_5, [3])
    assert A_o.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert A_delta.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_figure_5_hides_from_single_parties_and_not_from_two():
    assert singles(FIGURE_5)
    assert [leak(FIGURE_5, [l]) for l in range(1, 5)] == [1, 0, 0, 0]
    assert opened(FIGURE_5, [2, 3]) == (4,)  # the example of Appendix B
    assert opened(FIGURE_5, [1, 4]) == (2, 3)
    assert leak(FIGURE_5, [1, 4]) == 2 and leak(FIGURE_5, [2, 3]) == 1


def test_definition_4_is_not_sufficient():
    assert significantly_different(THREE) and opened(THREE, [1]) == (2, 3) and leak(THREE, [1]) == 2
    assert significantly_different(FIVE) and opened(FIVE, [1]) == (3,) and leak(FIVE, [1]) == 2
    assert [leak(FIVE, [l]) for l in range(2, 6)] == [0, 0, 0, 0]
    assert singles(log_depth(4)) and singles(chains(3)) and singles(chains(5))


@pytest.mark.parametrize("q", range(3, 41))
def test_chains_and_left_halves_rounded_down_hide_from_every_single_party(q):
    assert singles(chains(q)) and singles(log_depth(q))


def test_left_halves_rounded_up_hide_only_for_powers_of_two():
    assert [q for q in range(3, 17) if singles(log_depth(q, "up"))] == [4, 8, 16]


def test_two_parties_hide_nothing_from_the_dominator():
    for trees in (chains(2), log_depth(2)):
        assert opened(trees, [1]) == (2,) and leak(trees, [1]) == 1 and leak(trees, [2]) == 0


@pytest.mark.parametrize(
    "trees", [FIGURE_5, THREE, FIVE, chains(6), log_depth(7), ((1, 2, (3, 4)), ((1, 4), (2, 3)))]
)
def test_elimination_agrees_with_ranks_for_every_coalition(trees):
    q = check_trees(trees)
    for size in range(1, q + 1):
        for coalition in combinations(range(1, q + 1), size):
            assert leak(trees, coalition) == leak_by_ranks(trees, coalition)
            assert opened(trees, coalition) == opened_by_ranks(trees, coalition)


@pytest.mark.parametrize("trees", [FIGURE_5, THREE, FIVE, chains(5), log_depth(11)])
def test_two_colluders_open_a_party_that_sends_its_leaf_alone_twice(trees):
    for party in range(1, check_trees(trees) + 1):
        hosts = [one.receiver for tree in trees for one in sends(tree) if one.over == (party,)]
        if len(hosts) == 2:
            assert party in opened(trees, hosts)


def rows_of(transcript):
    """Return what was seen in the order of the rows of :func:`view`."""
    order = ("own score", "own mask", "masked score", "mask")
    return [one for content in order for one in transcript if one.content == content]


@pytest.mark.parametrize("coalition", [(1,), (2, 3), (1, 4), (2, 5), (3, 4, 5)])
def test_a_recipe_computes_its_sums_from_a_transcript(coalition):
    scores = rng(1).integers(-50, 50, 5)
    transcript = aggregate(scores, FIVE, ModularMasks(0), rng(2)).transcript
    values = [int(one.value) for one in rows_of(seen_by(transcript, coalition))]
    found = known(FIVE, coalition)
    for row, recipe in zip(found.sums, found.recipe, strict=True):
        got = sum(int(c) * v for c, v in zip(recipe, values, strict=True))
        want = sum(int(c) * int(o) for c, o in zip(row, scores, strict=True))
        assert (got - want) % 2**64 == 0


@pytest.mark.parametrize("trees", [THREE, chains(3)])
@pytest.mark.parametrize("coalition", [(1,), (2,), (3,), (1, 2), (2, 3)])
def test_uniform_masks_hide_all_but_the_known_sums_exactly(trees, coalition):
    """Modulo 4 all masks can be tried: views are equally distributed exactly where sums agree."""
    A_o, A_delta = view(trees, coalition)
    sums = known(trees, coalition).sums.astype(int)
    spread = {}
    for o in product(range(4), repeat=3):
        views = Counter(
            tuple((A_o @ o + A_delta @ delta) % 4) for delta in product(range(4), repeat=3)
        )
        told = tuple((sums @ o) % 4)
        assert spread.setdefault(told, views) == views
    kinds = list(spread.values())
    assert all(a != b for a, b in combinations(kinds, 2))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: leaves((1, (2, 1))), "one leaf"),
        (lambda: leaves((1, (2,))), "two children"),
        (lambda: check_trees(((1, 2), (2, 3))), "1 .. q"),
        (lambda: check_trees((1, 2, 3)), "Two trees"),
        (lambda: view(FIGURE_5, [5]), "from 1 to 4"),
        (lambda: view(FIGURE_5, []), "from 1 to 4"),
        (lambda: chains(1), "at least 2"),
        (lambda: log_depth(5, "upp"), "Did you mean"),
        (lambda: seats(3, 3), "does not exist"),
    ],
)
def test_bad_trees_and_coalitions(call, why):
    with pytest.raises(FedlibError, match=why):
        call()


# --- sums -----------------------------------------------------------------------------------------


def exact(scores, bits):
    """The sum of the rounded scores in fractions."""
    return sum(Fraction(round(Fraction(float(o)) * 2**bits), 2**bits) for o in scores)


@pytest.mark.parametrize("q", [2, 3, 5, 8, 13])
@pytest.mark.parametrize("bits", [0, 20, 32, 44])
def test_modular_sums_are_exact_and_the_same_up_any_trees(q, bits):
    scores = rng(q, bits).normal(0, 20, q)
    star = (tuple(range(1, q + 1)),) * 2
    want = exact(scores, bits)
    for number, trees in enumerate((chains(q), log_depth(q), log_depth(q, "up"), star)):
        got = aggregate(scores, trees, ModularMasks(bits), rng(number)).total
        assert Fraction(float(got)) == want
    assert abs(float(want) - scores.sum()) <= ModularMasks(bits).rounding(q) + 1e-12


def test_many_samples_at_once_are_the_samples_one_by_one():
    scores = rng(3).normal(size=(4, 6))
    many = aggregate(scores, FIGURE_5, ModularMasks(), rng(4))
    assert many.total.shape == (6,)
    for i in range(6):
        alone = aggregate(scores[:, i], FIGURE_5, ModularMasks(), rng(i))
        assert alone.total == many.total[i]


@pytest.mark.parametrize("width", [1e3, 1.0])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_real_masks_leave_an_error_within_the_bound(width, dtype):
    masks = RealMasks(width, dtype, accuracy=1.0)
    q, worst = 8, 0.0
    scores = rng(5).normal(size=(q, 400)).astype(dtype)
    for trees in (chains(q), log_depth(q)):
        got = aggregate(scores, trees, masks, rng(6)).total
        worst = max(worst, np.abs(got - scores.astype(float).sum(0)).max())
    assert 0 < worst <= q * masks.rounding(q)


def test_masks_that_wash_the_sum_out_are_refused():
    scores = np.ones(8)
    assert_allclose(RealMasks(1e6, dtype="float32").rounding(8), 0.5, rtol=0.05)  # q B u
    with pytest.raises(FedlibError, match=r"wash out the sum: in float32.*ModularMasks"):
        aggregate(scores, chains(8), RealMasks(1e6, dtype="float32"), rng())
    assert_allclose(aggregate(scores, chains(8), RealMasks(1e6), rng()).total, 8, atol=1e-6)
    with pytest.raises(FedlibError, match="float64"):
        aggregate(scores, chains(8), RealMasks(1e15), rng())


def test_fifty_two_bits_are_allowed_and_exact():
    scores = np.array([0.1, 0.2])
    got = aggregate(scores, chains(2), ModularMasks(52), rng()).total
    assert got == float(exact(scores, 52))


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: RealMasks(0.0), "above 0"),
        (lambda: RealMasks(np.inf), "ModularMasks"),
        (lambda: RealMasks(1.0, dtype="float16"), "precision"),
        (lambda: RealMasks(1.0, step=2.0), "step"),
        (lambda: ModularMasks(53), "52"),
        (lambda: ModularMasks(-1), "at least 0"),
        (lambda: aggregate(np.ones(3), FIGURE_5, ModularMasks(), rng()), "4 parties"),
        (lambda: aggregate([1, np.nan], chains(2), ModularMasks(), rng()), "does not fit"),
        (lambda: aggregate([1.0, 2.0**30], chains(2), ModularMasks(32), rng()), "fewer bits"),
    ],
)
def test_bad_masks_and_scores(call, why):
    with pytest.raises(FedlibError, match=why):
        call()


def test_a_modular_masked_score_is_uniform_whatever_the_score():
    for score in (0.0, 1e6, -3.25):
        seen = [
            one.value
            for one in aggregate(
                np.full((2, 20_000), score), chains(2), ModularMasks(), rng(8)
            ).transcript
            if one.content == "masked score"
        ]
        top = np.bincount((seen[0] >> np.uint64(60)).astype(int), minlength=16)
        assert (np.abs(top - 1250) < 5 * np.sqrt(1250)).all()


# --- parties that leave ---------------------------------------------------------------------------


def test_shares_give_the_secret_from_the_threshold_on_and_nothing_below_it():
    for holders, threshold in ((range(1, 6), 3), (range(1, 5), 4), ((2, 7, 9), 1)):
        dealt = shares(12345, holders, threshold, rng(60))
        for some in combinations(dealt, threshold):
            assert joined({x: dealt[x] for x in some}) == 12345
        assert joined(dealt) == 12345
        if threshold > 1:
            assert joined({x: dealt[x] for x in list(dealt)[: threshold - 1]}) != 12345

    class Fixed:
        """Gives coefficients in turn, so that all polynomials can be gone through."""

        def __init__(self, numbers):
            self.numbers = iter(numbers)

        def bytes(self, size):
            return next(self.numbers).to_bytes(size, "little")

    p, views = 7, {}
    for secret in range(p):  # two of four holders, threshold three: the same view for any secret
        views[secret] = Counter(
            tuple(shares(secret, range(1, 5), 3, Fixed(terms), p)[x] for x in (2, 4))
            for terms in product(range(p), repeat=2)
        )
    assert all(view == views[0] for view in views.values()) and len(views[0]) == p**2


LEAVERS = [((), ()), ((3,), ()), ((), (2, 5)), ((4,), (2,)), ((2, 6), ())]


@pytest.mark.parametrize(("gone", "silent"), LEAVERS)
def test_sums_survive_parties_that_leave(gone, silent):
    scores = rng(61).integers(-1000, 1000, (6, 5)) / 8
    found = aggregate_survivors(scores, 4, rng(62), gone, silent)
    stay = [l for l in range(1, 7) if l not in gone]
    assert found.over == tuple(stay)
    assert (found.total == scores[[l - 1 for l in stay]].sum(0)).all()  # exact in fixed point
    for name, points in found.told.items():  # never both kinds for one party
        assert set(points) == set(stay) - set(silent)
        assert sum(l in stay for l in name) == 1
    own = {name[0] for name in found.told if len(name) == 1}
    of_pairs = {l for name in found.told if len(name) == 2 for l in name if l in gone}
    assert own == set(stay) and of_pairs == set(gone)


def test_too_few_left_is_said():
    with pytest.raises(FedlibError, match="3 parties answer and 4 are needed"):
        aggregate_survivors(np.ones((6, 2)), 4, rng(63), gone=(3, 5), silent=(2,))
    with pytest.raises(FedlibError, match="cannot leave"):
        aggregate_survivors(np.ones((4, 2)), 3, rng(63), gone=(1,))
    with pytest.raises(FedlibError, match="at least 2"):
        aggregate_survivors(np.ones((4, 2)), 1, rng(63))
    with pytest.raises(FedlibError, match="cannot reach"):
        aggregate_survivors(np.ones((4, 2)), 5, rng(63))


def pairwise_leak(q, coalition, threshold, gone, silent=()):
    """Count the independent sums of others' scores that a coalition computes, by ranks.

    Unknown are scores and seeds' masks. The coalition knows what was sent to party 1, its members'
    scores, own masks and pairs' masks, and every mask whose seed was told or that it can join.
    """
    found = aggregate_survivors(np.zeros((q, 1)), threshold, rng(64), gone, silent)
    parties = range(1, q + 1)
    names = [(l,) for l in parties] + [(l, m) for l in parties for m in parties if l < m]
    known = [name for name in names if name in found.told or set(name) & set(coalition)]
    if len(coalition) >= threshold:
        known = names
    column = {name: q + k for k, name in enumerate(names)}
    rows = []
    if 1 in coalition:
        for l in found.sent:
            row = np.zeros(q + len(names))
            row[l - 1] = row[column[(l,)]] = 1
            for m in parties:
                if m != l:
                    row[column[(min(l, m), max(l, m))]] = 1 if l < m else -1
            rows.append(row)
    for name in known:
        rows.append(np.eye(q + len(names))[column[name]])
    for l in coalition:
        rows.append(np.eye(q + len(names))[l - 1])
    rows = np.array(rows)
    rank = np.linalg.matrix_rank
    return rank(rows) - rank(rows[:, q:]) - len(coalition)


@pytest.mark.parametrize("gone", [(), (4,), (3, 4)])
def test_a_coalition_below_the_threshold_learns_one_sum_and_at_it_everything(gone):
    q, threshold = 6, 4
    for size in (1, 2, 3):
        for others in combinations((2, 5, 6), size - 1):
            assert pairwise_leak(q, (1, *others), threshold, gone) == 1
    for coalition in combinations((2, 5, 6), 2):
        assert pairwise_leak(q, coalition, threshold, gone) == 0
    left = q - len(gone)
    for others in ((2, 5, 6),):  # four together: the others' scores one by one
        assert pairwise_leak(q, (1, *others), threshold, gone) == left - 4
    if not gone:  # without party 1 they can join all seeds, and have nothing to take masks off
        assert pairwise_leak(q, (2, 3, 5, 6), threshold, gone) == 0


@pytest.mark.parametrize("threshold", [2, 3, 4])
def test_when_all_leave_that_may_one_colluder_less_is_enough(threshold):
    """A sum over the others who have sent can be a sum over one: t - 1 take theirs off."""
    q, scores = 5, np.array([[3.0], [-5.0], [7.0], [11.0], [-13.0]])
    found = aggregate_survivors(scores, threshold, rng(67), gone=range(threshold + 1, q + 1))
    assert found.total - scores[: threshold - 1].sum(0) == scores[threshold - 1]
    for leave in range(q - threshold + 1):  # one colluder less has two others at least
        for gone in combinations(range(2, q + 1), leave):
            over = aggregate_survivors(scores, threshold, rng(68), gone).over
            assert len(over) - (threshold - 2) >= 2


def test_a_pair_of_trees_is_opened_by_colluders_that_pairs_of_masks_withstand():
    assert leak(chains(6), [1, 3]) > 1  # trees: two colluders open a neighbour
    assert pairwise_leak(6, (1, 3), 4, ()) == 1


def test_seeds_used_twice_open_what_was_sent_before():
    """Why seeds are for one sum: what is told when party 3 has left opens its old score."""
    score = np.full(4, 7, dtype=np.uint64)
    seeds, held = deal(4, 3, rng(65))
    before = pairwise_masked(3, score, seeds)  # it had sent then: its own seed was told
    told = [(3,), (1, 3), (2, 3), (3, 4)]  # and now, that it is gone, those of its pairs
    opened_seeds = {name: joined({l: held[l][name] for l in (1, 2, 4)}) for name in told}
    nothing = pairwise_masked(3, np.zeros(4, dtype=np.uint64), opened_seeds)
    assert (before - nothing == score).all()
    fresh = deal(4, 3, rng(66)).seeds
    assert (before - pairwise_masked(3, np.zeros(4, dtype=np.uint64), fresh) != score).all()


def test_masks_of_seeds_are_uniform_and_repeat():
    assert (expanded(5, (3, 2)) == expanded(5, (3, 2))).all()
    top = np.bincount((expanded(6, (20_000,)) >> np.uint64(60)).astype(int), minlength=16)
    assert (np.abs(top - 1250) < 5 * np.sqrt(1250)).all()
    assert survivor_bytes(3, 10) == 6 * 2 * 16 + 2 * (80 + 48)


# --- transcripts and counts -----------------------------------------------------------------------


def test_everybody_saw_what_the_view_says():
    scores = np.array([3, -1, 4, 10])
    found = aggregate(scores, FIGURE_5, ModularMasks(0), rng(9))
    masks = {one.party: int(one.value) for one in found.transcript if one.content == "own mask"}
    delta = [masks[l] for l in range(1, 5)]
    for l in range(1, 5):
        A_o, A_delta = view(FIGURE_5, [l])
        mine = rows_of(seen_by(found.transcript, [l]))
        want = [
            sum(int(a) * int(o) for a, o in zip(row, scores, strict=True))
            + sum(int(a) * m for a, m in zip(line, delta, strict=True))
            for row, line in zip(A_o, A_delta, strict=True)
        ]
        assert [int(one.value) for one in mine] == [value % 2**64 for value in want]
    assert [one.party for one in found.transcript if one.content == "total"] == [1]
    assert found.total == 16


@pytest.mark.parametrize("q", [2, 3, 8])
def test_messages_and_bytes(q):
    def sent(shape, masks):
        seen = aggregate(np.zeros(shape), log_depth(q), masks, rng()).transcript
        return [np.asarray(one.value).nbytes for one in seen if one.sender != one.party]

    for masks, size in (
        (ModularMasks(), 8), (RealMasks(1.0), 8), (RealMasks(1.0, dtype="float32"), 4),
    ):  # fmt: skip
        assert sent(q, masks) == [size] * (2 * (q - 1))
    assert sent((q, 50), ModularMasks()) == [50 * 8] * (2 * (q - 1))
    step = sum(sent(q, ModularMasks())) + (q - 1) * (8 + 8)  # and theta with its index
    assert sample_bytes(Protection(), [np.arange(2)] * q) == step
