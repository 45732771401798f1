"""Attacks on small runs: each is measured, and fails where it should; and what protects."""

import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.stats import norm
from sklearn.datasets import load_breast_cancer

from fedlib.engine.rng import stream
from fedlib.errors import FedlibError
from fedlib.lab.vertical import attacks, mitigations
from fedlib.lab.vertical.mitigations import (
    Guard,
    Protection,
    debiased_theta,
    encrypted_gradient,
    flip_probability,
    gaussian_scale,
    laplace_scale,
    measure,
    randomised_response,
    theta_from_gradient,
)
from fedlib.papers.vertical.secure import FIGURE_5, ModularMasks, RealMasks, aggregate, chains

THETA = {
    "logistic": lambda z, y: -y / (1 + np.exp(y * z)),
    "exponential": lambda z, y: -y * np.exp(-y * z),
    "squared": lambda z, y: 2 * (z - y),
    "robust": lambda z, y: (z - y) / (1 + (z - y) ** 2 / 2),
}
SLOPE = {"l2": lambda w: w, "nonconvex": lambda w: w / (1 + w**2) ** 2, "none": np.zeros_like}


def rng(*keys):
    return stream(0, "attack tests", *keys)


def problem(d, n=40, own=3, seed=0):
    """Two parties' features and labels: the second party, with d features, is attacked."""
    draw = rng(d, n, seed)
    x = draw.normal(size=(n, own + d))
    return x, np.sign(x.sum(1) + draw.normal(size=n)), (np.arange(own), np.arange(own, own + d))


class SVRG:
    """What VFB² does without delay, centralised, and what an observer of such a run has.

    The attacked party applies messages up to ``late`` steps late, and so out of order.
    """

    def __init__(self, x, y, block, loops, lr=0.1, lam=1e-4, g="l2", loss="logistic", late=0):
        n, d = x.shape
        draw, w, T = rng(n, d), np.zeros(d), n
        self.lr, self.lam, self.attacked = lr, lam, block[1]
        self.snapshots, self.theta, self.i, self.theta0, self.order = [], [], [], [], []
        for _ in range(loops):
            self.snapshots.append(x[:, block[1]] @ w[block[1]])
            theta0 = THETA[loss](x @ w, y)
            mean, i = x.T @ theta0 / n, draw.integers(0, n, T)
            due = np.arange(T) + draw.integers(0, late + 1, T)  # when the attacked party applies
            order = np.argsort(due, kind="stable")
            theta, done = np.empty(T), 0
            for t in range(T + late):
                if t < T:
                    theta[t] = THETA[loss](x[i[t]] @ w, y[i[t]])
                    self._step(w, block[0], x, i[t], theta[t] - theta0[i[t]], mean, g)
                while done < T and due[order[done]] <= t:
                    s = order[done]
                    self._step(w, block[1], x, i[s], theta[s] - theta0[i[s]], mean, g)
                    done += 1
            self.theta.append(theta)
            self.i.append(i)
            self.theta0.append(theta0)
            self.order.append(order)
        self.snapshots.append(x[:, block[1]] @ w[block[1]])
        self.w = w

    def _step(self, w, part, x, i, change, mean, g):
        w[part] -= self.lr * (change * x[i, part] + mean[part] + self.lam * SLOPE[g](w[part]))

    def seen(self, applied=False):
        """What an observer of the whole run has: in the order sent, or in that applied."""
        theta, i = np.array(self.theta), np.array(self.i)
        if applied:
            order = np.array(self.order)
            theta, i = (np.take_along_axis(a, order, 1) for a in (theta, i))
        return np.array(self.snapshots), theta, i, np.array(self.theta0)


def sgd(x, y, steps, lr=0.1, lam=1e-4, loss="logistic", block=None):
    """A centralised SGD run: gathered scores (of a block), ϑ and i of each step, and w."""
    draw, w = rng(7, *x.shape), np.zeros(x.shape[1])
    block = slice(None) if block is None else block
    gathered, theta, i = np.empty(steps), np.empty(steps), draw.integers(0, len(x), steps)
    for t, k in enumerate(i):
        gathered[t] = x[k, block] @ w[block]
        theta[t] = THETA[loss](x[k] @ w, y[k])
        w -= lr * (theta[t] * x[k] + lam * w)
    return gathered, theta, i, w


# --- S1 to S3 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["logistic", "exponential"])
def test_s1_gives_every_label_from_one_message(loss):
    x, y, _ = problem(3, n=100)
    _, theta, i, _ = sgd(x, y, 800, lr=0.05, loss=loss)
    found = attacks.labels(theta, i, len(y))
    assert np.unique(i).size == 100 and (found == y).all()
    seen = np.zeros(100, dtype=bool)
    seen[i[:60]] = True
    few = attacks.labels(theta[:60], i[:60], len(y))
    assert (few[seen] == y[seen]).all() and not few[~seen].any() and not seen.all()


def test_s1_the_first_broadcast_of_svrg_gives_all():
    x, y, blocks = problem(3)
    theta0 = SVRG(x, y, blocks, 1).theta0[0]
    assert (attacks.labels(theta0, np.arange(len(y)), len(y)) == y).all()


def test_s1_without_the_loss_two_values_at_the_start():
    y = np.sign(rng(1).normal(size=50))
    strange = lambda z, y: np.where(y > 0, -0.3 - z, 0.9 * z - 0.2)  # noqa: E731
    found = attacks.two_groups(strange(np.zeros(50), y))
    assert (found == y).all() or (found == -y).all()
    with pytest.raises(FedlibError, match="before the first update"):
        attacks.two_groups(strange(rng(2).normal(size=50), y))


def test_s1_fails_where_the_loss_does_not_fall_in_the_margin():
    z, y = rng(3).normal(0, 3, 400), np.sign(rng(4).normal(size=400))
    found = attacks.labels(THETA["squared"](z, y), np.arange(400), 400)
    assert 0.5 < (found == y).mean() < 0.9


def test_s2_gives_scores_to_rounding():
    z = np.linspace(-15, 15, 4001)
    for y in (-1.0, 1.0):
        theta = THETA["logistic"](z, y)
        guessed = attacks.labels(theta, np.arange(len(z)), len(z))
        assert_allclose(attacks.scores(theta, guessed), z, atol=1e-8, rtol=0)
        assert_allclose(attacks.scores(2 * (z - y), np.full(len(z), y), "squared"), z, atol=1e-13)
    x, y, _ = problem(3)
    gathered, theta, i, _ = sgd(x, y, 300)
    assert_allclose(attacks.scores(theta, attacks.labels(theta, i, 40)[i]), gathered, atol=1e-12)


def test_s3_gives_real_labels_from_the_first_pass():
    y = rng(5).uniform(0, 1, 60)
    for loss in ("squared", "robust"):
        theta = THETA[loss](np.zeros(60), y)
        assert_allclose(attacks.regression_labels(theta, loss), y, atol=1e-15)
    wide = np.array([-3.0, -1.2, 0.0, 1.4, 2.5])
    found = attacks.regression_labels(THETA["robust"](np.zeros(5), wide), "robust")
    assert_allclose(found, [-2 / 3, -1.2, 0, 1.4, 0.8], atol=1e-12)  # beyond √2 the other root


# --- S9 -------------------------------------------------------------------------------------------


def test_s9_names_what_a_party_s_own_columns_tell_and_no_more():
    """Known answers: all labels where own columns decide them, half where they know nothing."""
    draw = rng(50)
    x = draw.normal(size=(2000, 2))
    decided, unrelated = np.sign(x[:, 0] - 2 * x[:, 1]), np.sign(draw.normal(size=2000))
    w = np.array([0.3, -0.6])
    assert (attacks.labels_from_own(x, w) == decided).all()
    assert abs((attacks.labels_from_own(x, w) == unrelated).mean() - 0.5) < 0.05
    assert not attacks.labels_from_own(x, np.zeros(2)).any()


def test_s9_with_answers_is_better_than_the_answers_and_needs_them():
    draw = rng(51)
    x = draw.normal(size=(1000, 3))
    y = np.sign(x @ [1.0, -1.0, 0.5] + 0.3 * draw.normal(size=1000))
    epsilon = 0.5
    answers = randomised_response(y, epsilon, draw)
    most = 1 / (1 + np.exp(-epsilon))
    assert abs((answers == y).mean() - most) < 0.05
    assert (attacks.labels_from_odds(x, epsilon * answers) == y).mean() > most + 0.25
    assert not attacks.labels_from_odds(x, np.zeros(1000)).any()
    apart = np.sign(draw.normal(size=1000))  # columns that say nothing: nothing beyond the bound
    told = attacks.labels_from_odds(x, epsilon * randomised_response(apart, epsilon, draw))
    assert (told == apart).mean() < most


# --- S4 to S6, R2, R3 -----------------------------------------------------------------------------


def lone(scores, masks, key=0):
    """Return what party 1 receives from party 2 up the first tree when 2 sends its leaf alone."""
    transcript = aggregate(scores, chains(len(scores)), masks, rng(9, key)).transcript
    (one,) = [s for s in transcript if s.content == "masked score" and s.over == (2,)]
    return one.value


def test_r2_two_parties_and_r3_definition_4_is_not_enough():
    scores = rng(10).normal(size=(3, 20))
    trees = (((1, 2), 3), ((1, 3), 2))
    for masks in (ModularMasks(), RealMasks(10.0)):
        decode = masks.decode
        found = attacks.unmask(aggregate(scores, trees, masks, rng(11)).transcript, trees, [1])
        assert set(found) == {2, 3}
        for party, values in found.items():
            assert_allclose(decode(values), scores[party - 1], atol=1e-9)
        pair = aggregate(scores[:2], chains(2), masks, rng(12)).transcript
        opened = attacks.unmask(pair, chains(2), [1])
        assert_allclose(decode(opened[2]), scores[1], atol=1e-9)


def test_colluders_in_figure_5():
    scores = np.array([0.5, -1.25, 3.0, 8.0])
    transcript = aggregate(scores, FIGURE_5, ModularMasks(), rng(13)).transcript
    for coalition, want in (([2, 3], {4: 8.0}), ([1, 4], {2: -1.25, 3: 3.0}), ([1], {}), ([4], {})):
        found = attacks.unmask(transcript, FIGURE_5, iter(coalition))
        assert {party: ModularMasks().decode(v) for party, v in found.items()} == want


def test_the_total_of_three_says_of_each_other_what_its_share_of_the_spread_is():
    """Known answer: for independent parts the correlation is σ₂/√(σ₂² + σ₃²); others see none."""
    scores = rng(54).normal(size=(3, 20_000)) * np.array([[1.0], [1.0], [2.0]])
    masks = ModularMasks()
    done = aggregate(scores, chains(3), masks, rng(55))
    left = done.total - scores[0]
    for part, want in ((scores[1], 1 / np.sqrt(5)), (scores[2], 2 / np.sqrt(5))):
        assert abs(np.corrcoef(left, part)[0, 1] - want) < 0.03
    for one in done.transcript:  # what party 3 gets from others has nothing to do with the parts
        if one.party == 3 and one.sender != 3:
            for part in scores[:2]:
                assert abs(np.corrcoef(masks.decode(one.value), part)[0, 1]) < 0.04


def test_s4_a_sign_is_certain_as_often_as_the_formula_says():
    scores = rng(14).uniform(-1, 1, (3, 40_000))
    B = 2.0
    seen = attacks.mask_range(lone(scores, RealMasks(B)), B)
    true, certain = scores[1], seen.sign != 0
    assert ((seen.low <= true) & (true <= seen.high)).all()
    assert (seen.sign[certain] == np.sign(true[certain])).all()
    want = np.abs(true).mean() / (2 * B)
    assert abs(certain.mean() - want) < 4 * np.sqrt(want / 40_000)


def test_s5_masks_average_out():
    n, visits, B = 50, 400, 3.0
    scores = rng(15).normal(size=(3, n))
    i = np.tile(np.arange(n), visits)
    masked = np.concatenate([lone(scores, RealMasks(B), key) for key in range(visits)])
    found = attacks.averaged(masked, i, n)
    assert (found.visits == visits).all()
    error = np.sqrt(np.mean((found.mean - scores[1]) ** 2))
    assert_allclose(error, B / np.sqrt(3 * visits), rtol=0.35)
    one = np.sqrt(np.mean((masked[:n] - scores[1]) ** 2))
    assert error < one / 10
    assert np.isnan(attacks.averaged(masked[:3], i[:3], n).mean[5])


def test_s6_wide_masks_cost_accuracy_in_float32():
    q, B = 8, 1e6
    scores = rng(16).normal(size=(q, 500))
    errors = []
    for width in (1e2, 1e4, B):
        masks = RealMasks(width, dtype="float32", accuracy=10.0)
        total = aggregate(scores, chains(q), masks, rng(17)).total
        errors.append(np.abs(total - scores.sum(0)).mean())
        assert errors[-1] < q * masks.rounding(q)
    assert 30 < errors[1] / errors[0] < 300 and 30 < errors[2] / errors[1] < 300
    assert errors[2] > 0.1


def test_s6_masks_on_a_grid_leave_low_digits():
    scores = rng(18).uniform(-0.4, 0.4, (3, 100))
    seen = lone(scores, RealMasks(1e5, step=1.0))
    assert_allclose(attacks.low_digits(seen, 1.0), scores[1], atol=1e-9)
    assert_allclose(
        np.abs(attacks.low_digits(lone(scores, RealMasks(1e5)), 1.0) - scores[1]).mean(),
        0.27,
        atol=0.06,
    )


def test_modular_masks_end_s4_to_s6():
    """The same scores, masked: neither sign, nor mean, nor low digits can be told."""
    n, visits = 40, 200
    scores = np.full((3, n), 0.25)
    masked = np.concatenate(
        [ModularMasks().decode(lone(scores, ModularMasks(), key)) for key in range(visits)]
    )
    B = 2.0**31  # as a number it is uniform on [-B, B)
    assert (attacks.mask_range(masked, B).sign == np.sign(masked) * 0).mean() > 0.999
    found = attacks.averaged(masked, np.tile(np.arange(n), visits), n).mean
    assert np.abs(found).mean() > 1e6
    assert abs(np.mean(masked > 0) - 0.5) < 5 * 0.5 / np.sqrt(len(masked))
    low = attacks.low_digits(masked, 1.0)
    assert_allclose(np.histogram(low, 4, (-0.5, 0.5))[0], len(masked) / 4, rtol=0.1)


# --- S7, S8, R5 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_s7_recovers_features_and_weights(d, loss):
    x, y, blocks = problem(d)
    run = SVRG(x, y, blocks, 2 * d + 1, lr=0.02, loss=loss)
    O, secret = np.array(run.snapshots), x[:, blocks[1]]
    assert len(O) == 2 * d + 2 and attacks.snapshot_rank(O) == d
    assert attacks.snapshot_rank(O[: max(d, 2)]) == max(d - 1, 1)  # the first is 0
    rows = np.array([4, 11, 30])[:d]
    found = attacks.factor_snapshots(O, rows, secret[rows])
    assert attacks.distance(found.x, secret) <= 1e-8
    assert_allclose(found.w[-1], run.w[blocks[1]], rtol=1e-8)


def test_s7_one_column_needs_no_known_row():
    x, y, blocks = problem(1)
    x[:, 3] = x[:, 3] > 0.2
    found = attacks.lone_column(np.array(SVRG(x, y, blocks, 3).snapshots))
    assert_allclose(found, x[:, 3], atol=1e-12)


def test_s7_all_others_are_one_block():
    x, y, _ = problem(4)
    run = SVRG(x, y, (np.arange(2), np.arange(2, 7)), 12)
    rows = np.arange(5)
    found = attacks.factor_snapshots(np.array(run.snapshots), rows, x[:5, 2:])
    assert attacks.distance(found.x, x[:, 2:]) <= 1e-8


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("g", ["l2", "none"])
def test_s8_recovers_the_gram_matrix(d, g):
    x, y, blocks = problem(d)
    run = SVRG(x, y, blocks, 2 * d + 1, g=g, lam=1e-3)
    secret = x[:, blocks[1]]
    G = attacks.gram_from_snapshots(*run.seen(), run.lr, run.lam if g == "l2" else 0.0)
    assert np.linalg.norm(G - secret @ secret.T) <= 1e-8 * np.linalg.norm(secret @ secret.T)
    turned = attacks.embedding(G, d)
    assert attacks.distance(turned, secret, "rotation") <= 1e-8
    if d == 1:
        assert attacks.distance(turned, secret, "signs") <= 1e-8
    else:
        assert attacks.distance(turned, secret, "signs") > 0.1  # and no more than that


def test_s8_in_another_order_than_assumed():
    x, y, blocks = problem(3)
    secret = x[:, blocks[1]]
    run = SVRG(x, y, blocks, 7, lam=1e-3, late=6)
    true = secret @ secret.T

    def error(seen):
        G = attacks.gram_from_snapshots(*seen, run.lr, run.lam)
        return np.linalg.norm(G - true) / np.linalg.norm(true)

    assert not (np.array(run.order) == np.arange(40)).all()
    assert error(run.seen(applied=True)) < 1e-8  # delays do no harm where the order is known
    assert 1e-7 < error(run.seen()) < 1e-3  # nor much where it is not
    snapshots, theta, i, theta0 = run.seen(applied=True)
    any_order = rng(41).permuted(np.tile(np.arange(40), (7, 1)), axis=1)
    mixed = [np.take_along_axis(a, any_order, 1) for a in (theta, i)]
    assert 1e-7 < error((snapshots, *mixed, theta0)) < run.lr * run.lam * 40
    flat = SVRG(x, y, blocks, 7, lam=0.0, late=6)
    G = attacks.gram_from_snapshots(*flat.seen(), flat.lr, 0.0)
    assert np.linalg.norm(G - true) < 1e-8 * np.linalg.norm(true)  # and not at all without λ


@pytest.mark.parametrize(("d", "passes"), [(1, 4), (2, 8), (3, 9)])
def test_s8_from_the_gathers_of_sgd(d, passes):
    """All inner products of fifty patients from a few passes: fifty passes' worth are unknown."""
    x, y, blocks = problem(d, n=50)
    gathered, theta, i, _ = sgd(x, y, 50 * passes, block=blocks[1])
    secret = x[:, blocks[1]]
    found = attacks.features_from_gathers(gathered, theta, i, 50, d, 0.1, 1e-4)
    assert found.residual < 1e-12
    seen = np.isin(np.arange(50), i[50:])  # drawn once weights have moved
    assert seen.mean() > 0.9
    assert attacks.distance(found.x[seen], secret[seen], "rotation") < 1e-6
    if d > 1:
        assert attacks.distance(found.x[seen], secret[seen], "signs") > 0.01


def test_s8_from_gathers_fails_where_it_must():
    """With less columns than there are nothing fits; with fewer steps than unknowns nothing is."""
    x, y, blocks = problem(2, n=50)
    gathered, theta, i, _ = sgd(x, y, 400, block=blocks[1])
    assert attacks.features_from_gathers(gathered, theta, i, 50, 1, 0.1, 1e-4).residual > 1e-3
    with pytest.raises(FedlibError, match="99 numbers. Wait"):
        attacks.features_from_gathers(gathered[:98], theta[:98], i[:98], 50, 2, 0.1, 1e-4)


def test_a_jacobian_of_gathers_is_that_of_differences():
    """A full step from near the truth lands far nearer: the squares of the distances."""
    x, y, blocks = problem(2, n=20)
    gathered, theta, i, _ = sgd(x, y, 200, block=blocks[1])
    secret = x[:, blocks[1]]
    pushes, pushed = np.zeros((200, 20)), np.zeros(20)
    for t, (value, sample) in enumerate(zip(theta, i, strict=True)):
        pushes[t] = pushed
        pushed = (1 - 1e-5) * pushed - 0.1 * value * (np.arange(20) == sample)
    assert_allclose(np.sum(secret[i] * (pushes @ secret), axis=1), gathered, atol=1e-12)
    near = secret + 1e-3 * rng(40).normal(size=secret.shape)
    found, residual = attacks._fit_gathers(near, gathered, pushes, i)
    assert residual < 1e-13 and attacks.distance(found, secret, "rotation") < 1e-9


def test_which_changes_of_features_a_run_cannot_see():
    """VFB2-E28: Lemma 1's solutions of one equation, put to a whole run."""
    turn = np.linalg.qr(rng(22).normal(size=(3, 3)))[0]
    swap = np.eye(3)[[2, 0, 1]] * [1, -1, -1]
    seen = {}
    for g in ("l2", "nonconvex"):
        for name, change in (("as is", np.eye(3)), ("turned", turn), ("swapped", swap)):
            x, y, blocks = problem(3)
            x[:, blocks[1]] = x[:, blocks[1]] @ change
            seen[g, name] = SVRG(x, y, blocks, 4, g=g, lam=1e-3).seen()

    def gap(g, name):
        return max(
            np.abs(one - other).max()
            for one, other in zip(seen[g, name], seen[g, "as is"], strict=True)
        )

    assert gap("l2", "turned") < 1e-12 and gap("l2", "swapped") < 1e-12
    assert gap("nonconvex", "turned") > 1e-6 and gap("nonconvex", "swapped") < 1e-12
    x, y, blocks = problem(1)
    scaled = x * np.where(np.arange(x.shape[1]) == blocks[1], 2.0, 1.0)
    runs = [SVRG(rows, y, blocks, 2).seen()[0] for rows in (x, -x + 2 * x * (np.arange(4) < 3))]
    assert np.abs(runs[0] - runs[1]).max() < 1e-12  # one column: its sign, and no other factor
    assert np.abs(SVRG(scaled, y, blocks, 2).seen()[0] - runs[0]).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("d", "lam"), [(1, 1e-4), (2, 1e-4), (3, 1e-4), (5, 1e-4), (8, 1e-2)])
def test_r5_recovers_features_under_the_nonconvex_regulariser(d, lam):
    x, y, blocks = problem(d, n=max(40, 10 * d))
    run = SVRG(x, y, blocks, 2 * d + 2, g="nonconvex", lam=lam)
    found = attacks.features_up_to_signs(*run.seen(), run.lr, lam)
    assert found.residual < 1e-11
    assert attacks.distance(found.x, x[:, blocks[1]], "signs") < 1e-6


@pytest.mark.slow
def test_r5_recovers_columns_that_are_much_alike(cancer):
    """Radius, perimeter and area: more loops do what more starts do not."""
    (x, y), _, _ = cancer
    alike = np.array([0, 2, 3])
    blocks = (np.setdiff1d(np.arange(30), alike), alike)
    assert np.corrcoef(x[:, alike].T).min() > 0.98
    found = {}
    for loops in (8, 30):
        run = SVRG(x, y, blocks, loops, lr=0.02, g="nonconvex", lam=1e-3)
        fit = attacks.features_up_to_signs(*run.seen(), run.lr, 1e-3, starts=2)
        found[loops] = fit.residual, attacks.distance(fit.x, x[:, alike], "signs")
    assert found[30][0] < 1e-11 and found[30][1] < 1e-6
    assert found[8][0] > 1e-9 and found[8][1] > 0.01


def test_r5_begins_each_time_from_another_rotation_of_one_shape(monkeypatch):
    x, y, blocks = problem(3)
    run, begun = SVRG(x, y, blocks, 8, g="nonconvex", lam=1e-3), []
    monkeypatch.setattr(attacks, "_fit", lambda drive, R, lr, lam: (begun.append(R) or R, 1.0))
    assert attacks.features_up_to_signs(*run.seen(), run.lr, 1e-3, starts=3).starts == 3
    assert len(begun) == 3
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(begun[one] - begun[other]).max() > 0.1
        assert_allclose(begun[one] @ begun[one].T, begun[other] @ begun[other].T, atol=1e-9)


def test_r5_has_nothing_to_hold_on_to_under_l2():
    """Rotation invariance: fitted to an l2 run, the nonconvex model does not reach the features."""
    x, y, blocks = problem(3)
    run = SVRG(x, y, blocks, 8, g="l2")
    found = attacks.features_up_to_signs(*run.seen(), run.lr, run.lam, starts=2)
    assert found.residual > 1e-9 and attacks.distance(found.x, x[:, 3:], "signs") > 0.05


@pytest.mark.parametrize(("d", "error"), [(2, 1e-2), (3, 0.3)])
def test_r5_with_delays(d, error):
    x, y, blocks = problem(d)
    run = SVRG(x, y, blocks, 2 * d + 2, g="nonconvex", lam=1e-3, late=4)
    secret = x[:, blocks[1]]
    told = attacks.features_up_to_signs(*run.seen(applied=True), run.lr, 1e-3)
    assert told.residual < 1e-11 and attacks.distance(told.x, secret, "signs") < 1e-6
    guessed = attacks.features_up_to_signs(*run.seen(), run.lr, 1e-3, starts=3)
    assert guessed.residual > 1e-10
    assert attacks.distance(guessed.x, secret, "signs") < error


# --- asking wrongly -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: attacks.labels([0.1, 0.2], [0, 5], 3), "0 to 2"),
        (lambda: attacks.labels([0.1], [0, 1], 3), "number of its sample"),
        (lambda: attacks.scores([1.5], [1.0]), "from another one"),
        (lambda: attacks.scores([0.5], [1.0], "logistik"), "Did you mean 'logistic'"),
        (lambda: attacks.regression_labels([0.9], "robust"), "not from it"),
        (lambda: attacks.mask_range(1.0, 0.0), "positive"),
        (lambda: attacks.snapshot_rank(np.zeros((2, 5))), "first snapshot"),
        (lambda: attacks.factor_snapshots(np.eye(3), [0], [[1.0, 2.0]]), "rank 3"),
        (lambda: attacks.lone_column(np.eye(3)), "rank 1"),
        (
            lambda: attacks.gram_from_snapshots(
                np.eye(3), np.ones((3, 2)), np.ones((3, 2), int), 1, 1, 0
            ),
            "S \\+ 1",
        ),
        (lambda: attacks.distance(np.eye(2), np.eye(3)), "the same"),
    ],
)
def test_attacks_say_what_they_need(call, why):
    with pytest.raises(FedlibError, match=why):
        call()


def test_distances():
    x = rng(20).normal(size=(30, 3))
    turn = np.linalg.qr(rng(21).normal(size=(3, 3)))[0]
    shuffled = x[:, [2, 0, 1]] * [1, -1, -1]
    assert attacks.distance(x, x) == 0 and attacks.distance(2 * x, x) == pytest.approx(1)
    assert attacks.distance(shuffled, x, "signs") < 1e-15 < attacks.distance(shuffled, x)
    assert attacks.distance(x @ turn, x, "rotation") < 1e-14
    assert attacks.distance(x @ turn, x, "signs") > 0.1


# --- protections ----------------------------------------------------------------------------------


def test_randomised_response_is_private_by_enumeration():
    for epsilon in (0.1, 1.0, 3.0):
        p = flip_probability(epsilon)
        says_plus = {1: 1 - p, -1: p}
        for answer in (lambda one: one, lambda one: 1 - one):
            ratio = answer(says_plus[1]) / answer(says_plus[-1])
            assert max(ratio, 1 / ratio) == pytest.approx(np.exp(epsilon))
        y = np.ones(40_000)
        turned = (randomised_response(y, epsilon, rng(30)) < 0).mean()
        assert abs(turned - p) < 4 * np.sqrt(p * (1 - p) / len(y))


@pytest.mark.parametrize("knows", [True, False])
def test_even_odds_are_odds_given_the_columns_of_all(knows):
    """The attacker's column is noise; another's is the label, and the scores tell it on.

    So even odds given *own* columns bound nothing. Where no column knows the label, they do.
    """
    draw, n, epsilon = rng(57, knows), 600, 1.0
    y = draw.choice([-1.0, 1.0], n)
    x = np.c_[y if knows else draw.normal(size=n), draw.normal(size=n)]
    answers, theta, w = randomised_response(y, epsilon, draw), np.empty(n), np.zeros(2)
    for _ in range(3):
        for k in range(n):
            theta[k] = THETA["logistic"](x[k] @ w, answers[k])
            w = w - 0.02 * theta[k] * x[k]
    answered = attacks.labels(theta, np.arange(n), n)
    assert (answered == answers).all()
    named = max((np.sign(one) == y).mean() for one in (answered, attacks.scores(theta, answered)))
    most = 1 / (1 + np.exp(-epsilon))
    assert named == 1 if knows else named < most + 3 * np.sqrt(most * (1 - most) / n)


def test_debiased_theta_has_the_right_mean():
    z = np.linspace(-4, 4, 9)
    for y, epsilon in ((1.0, 0.5), (-1.0, 2.0)):
        p = flip_probability(epsilon)
        mean = (1 - p) * debiased_theta(z, y, epsilon) + p * debiased_theta(z, -y, epsilon)
        assert_allclose(mean, THETA["logistic"](z, y), atol=1e-14)


def test_a_label_moves_theta_by_one():
    z = np.linspace(-30, 30, 101)
    assert_allclose(THETA["logistic"](z, -1) - THETA["logistic"](z, 1), 1, atol=1e-15)


def test_laplace_noise_is_private_over_all_visits():
    epsilon, visits = 1.5, 4
    b = laplace_scale(epsilon, visits)
    at = rng(31).normal(0, 5, (1000, visits))
    ratio = (np.abs(at - 1) - np.abs(at)).sum(1) / b  # log of the densities' ratio
    assert np.abs(ratio).max() <= epsilon + 1e-12
    assert np.abs(ratio).max() == pytest.approx(epsilon)  # and no less noise would do


@pytest.mark.parametrize(
    ("epsilon", "delta", "visits"), [(1, 1e-5, 1), (3, 1e-6, 10), (8, 1e-3, 2), (1e-6, 1e-6, 1)]
)
def test_gaussian_noise_is_private_by_integration(epsilon, delta, visits):
    """δ is the mass by which one law exceeds e^ε times the other: integrated on a grid."""
    mu = np.sqrt(visits) / gaussian_scale(epsilon, delta, visits)
    at = np.linspace(-12 - mu, 12 + mu, 400_001)
    over = np.maximum(norm.pdf(at, mu) - np.exp(epsilon) * norm.pdf(at), 0)
    assert_allclose(over.sum() * (at[1] - at[0]), delta, rtol=1e-4)


@pytest.mark.slow  # opacus takes long to import
def test_the_accountant_counts_what_the_closed_form_says():
    pytest.importorskip("opacus", reason="opacus is not installed: pip install opacus")
    for epsilon, delta, times in ((1.0, 1e-6, 5), (3.0, 1e-5, 40)):
        noise = gaussian_scale(epsilon, delta, times)
        assert epsilon <= mitigations.total_epsilon([(noise, times)], delta) < epsilon + 0.02
    both = mitigations.total_epsilon([(10.0, 20), (5.0, 20)], 1e-5)  # two kinds of release
    mu = np.sqrt(20 / 100 + 20 / 25)
    assert mitigations.gaussian_delta(mu, both) <= 1e-5
    assert mitigations.gaussian_delta(mu, both - 0.02) > 1e-5


def test_the_accountant_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(FedlibError, match="pip install opacus"):
        mitigations.total_epsilon([(1.0, 1)], 1e-5)


def test_what_noise_lets_be_named_at_even_odds():
    mu, draw = 0.8, rng(53)
    secret = draw.random(200_000) < 0.5
    named = mu * secret + draw.normal(size=200_000) > mu / 2  # the best test there is
    assert abs((named == secret).mean() - mitigations.named_at_most(mu)) < 0.005
    assert mitigations.named_at_most(1e-9) == pytest.approx(0.5)


# --- columns and labels together ------------------------------------------------------------------


def explained(guess, truth):
    """Return which share of the secret columns lies in the space of the guessed ones."""
    return (np.linalg.norm(np.linalg.qr(guess)[0].T @ truth) / np.linalg.norm(truth)) ** 2


@pytest.mark.parametrize(("row", "found"), [(0.0, True), (10.0, False)])
def test_a_guard_keeps_features_that_are_read_off_without_it(cancer, row, found):
    (x, y), _, _ = cancer
    secret, steps = np.array([1, 4, 9]), 8
    blocks = [np.setdiff1d(np.arange(30), secret), secret]
    run = mitigations.guarded(Guard(row=row, score_limit=5.0), x, y, blocks, steps, 1e-3)
    length = np.linalg.norm(x[:, secret], axis=1, keepdims=True)
    true = x[:, secret] * np.minimum(1, 3.0 / length)
    snapshots = run.parts[:, 1]
    left, sizes, right = np.linalg.svd(snapshots, full_matrices=False)
    assert (explained(right[:3].T, true) > 0.999) == found
    G = attacks.gram_from_snapshots(
        (left[:, :3] * sizes[:3]) @ right[:3], run.theta[:-1, :1],
        np.zeros((steps - 1, 1), int), run.theta[:-1], 4 / (2 * 3.0**2), 1e-3,
    )  # fmt: skip
    gap = np.linalg.norm(G - true @ true.T) / np.linalg.norm(true @ true.T)
    assert gap < 1e-6 if found else gap > 1
    if not found:
        assert explained(right[:3].T, true) < 0.1


def test_a_guarded_step_is_the_plain_one_and_moves_by_what_the_noise_counts_on():
    """Without noise it is gradient descent; one sample moves scores and steps by at most 2."""
    x, y, blocks = problem(3, n=30)
    plain = mitigations.guarded(Guard(row_limit=100.0, score_limit=1e3), x, y, blocks, 3, 0.1)
    w = np.zeros(6)
    for _ in range(3):
        z = x @ w
        w = w - 4 / (2 * 100.0**2) * (THETA["logistic"](z, y) @ x / 30 + 0.1 * w)
    assert_allclose(plain.w[-1], w, atol=1e-9)
    guard = Guard(row_limit=2.0, score_limit=1e-4)
    other = x.copy()
    other[7, blocks[1]] *= -40
    one, two = (mitigations.guarded(guard, a, y, blocks, 2, 0.1) for a in (x, other))
    assert np.abs(one.parts - two.parts)[:, 1, 7].max() <= 2 * 1e-4 + 1e-15
    push = np.linalg.norm(one.w[1] - two.w[1]) * 30 / (4 / (2 * 2.0**2))
    assert 1 < push <= 2 * 2.0  # theta is 1/2 at the start


def test_labels_at_even_odds_are_named_within_the_bound_of_the_guard():
    """Columns that say nothing, labels by coin: the best that is sent stays below Φ(μ/2)."""
    draw, n, steps = rng(56), 2000, 6
    x, y = draw.normal(size=(n, 4)), np.sign(draw.normal(size=n))
    guard = Guard(label=3.0)
    run = mitigations.guarded(guard, x, y, np.split(np.arange(4), 2), steps)
    bound = mitigations.named_at_most(np.sqrt(steps) / guard.label)
    named = np.mean(-np.sign(run.theta.sum(axis=0)) == y)
    assert 0.55 < named < bound + 3 * 0.5 / np.sqrt(n) < 0.75
    bare = mitigations.guarded(Guard(), x, y, np.split(np.arange(4), 2), steps)
    assert (-np.sign(bare.theta.sum(axis=0)) == y).all()


def test_a_guard_that_is_none_is_refused(cancer):
    (x, y), _, blocks = cancer
    for one in (1, 0, 99):
        with pytest.raises(FedlibError, match=rf"Parties that leave are of 2 to .*\[{one}\]"):
            mitigations.guarded(Guard(), x, y, blocks, 2, leaves={one: 1})
    for wrong in (dict(row_limit=0), dict(score_limit=-1.0), dict(row=-1.0)):
        with pytest.raises(FedlibError, match=[*wrong][0]):
            Guard(**wrong)


def test_a_guarded_training_goes_on_when_a_party_leaves(cancer):
    (x, y), _, blocks = cancer
    run = mitigations.guarded(Guard(), x, y, blocks, 6, leaves={3: 3})
    whole = mitigations.guarded(Guard(), x, y, blocks, 6)
    assert_allclose(run.w[:4], whole.w[:4])
    assert not run.w[4:, blocks[2]].any() and np.abs(run.w[6] - run.w[4]).max() > 1e-3
    assert np.mean(np.sign(x @ run.w[-1]) == y) > 0.9
    with pytest.raises(FedlibError, match="1 parties answer and 2"):
        mitigations.guarded(Guard(), x, y, blocks, 6, leaves={2: 1, 3: 3})


@pytest.fixture(scope="module")
def keys():
    pytest.importorskip("phe", reason="phe is not installed: pip install phe")
    return mitigations.keypair(256)  # a toy's length, for speed


def test_encrypted_gradients_are_gradients(keys):
    x, theta = rng(32).normal(size=(6, 3)), rng(33).uniform(-1, 1, 6)
    found = encrypted_gradient(theta, x, keys, bits=40)
    assert_allclose(found.gradient, theta @ x, atol=1e-10)
    again = encrypted_gradient(theta, x, keys, bits=40)
    assert found.blinded != again.blinded and all(0 <= v < keys[0].n for v in found.blinded)
    assert found.bytes == 6 * 64 + 3 * (64 + 32) and set(found.seconds) == {
        "encrypt",
        "multiply",
        "decrypt",
    }
    with pytest.raises(FedlibError, match="too short"):
        encrypted_gradient(theta * 1e70, x, keys)


def test_the_blinded_sum_tells_the_dominator_nothing(keys, monkeypatch):
    """For every two gradients there are blinds that give the same view, one for each."""
    x, theta = rng(34).normal(size=(2, 1)), np.array([0.25, -0.5])
    n, found = keys[0].n, []
    plain = lambda a: round(float(a @ theta) * 2**64)  # noqa: E731
    for features in (np.round(x, 3), np.round(x, 3) + 1):
        whole = sum(
            round(float(v) * 2**32) * round(float(t) * 2**32)
            for v, t in zip(features[:, 0], theta, strict=True)
        )
        monkeypatch.setattr(mitigations.secrets, "randbelow", lambda _, w=whole: (12345 - w) % n)
        found.append(encrypted_gradient(theta, features, keys).blinded)
        assert abs(whole - plain(features[:, 0])) < 2**34
    assert found == [[12345], [12345]]


def test_phe_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "phe", None)
    with pytest.raises(FedlibError, match="pip install phe"):
        mitigations.keypair()


def test_a_small_batch_gives_theta_away_and_a_large_one_does_not():
    x, theta = rng(35).normal(size=(60, 8)), rng(36).uniform(-1, 1, 60)
    few = theta_from_gradient(x[:8], theta[:8] @ x[:8])
    assert_allclose(few, theta[:8], atol=1e-12)
    many = theta_from_gradient(x, theta @ x)
    assert np.abs(many - theta).max() > 0.3
    assert_allclose(theta_from_gradient(x[:1], theta[0] * x[0]), theta[:1], atol=1e-14)


def test_the_first_sum_over_a_batch_gives_labels_and_a_later_one_does_not():
    draw = rng(38)
    for B, d in ((16, 8), (5, 8), (18, 6)):
        x, y = draw.normal(size=(B, d)), np.sign(draw.normal(size=B))
        first = THETA["logistic"](np.zeros(B), y) @ x
        assert (attacks.labels_from_first_sum(x, first) == y).all()
    later = THETA["logistic"](x @ draw.normal(size=6), y) @ x
    with pytest.raises(FedlibError, match="were all scores 0"):
        attacks.labels_from_first_sum(x, later)
    with pytest.raises(FedlibError, match="too many"):
        attacks.labels_from_first_sum(np.ones((40, 8)), np.ones(8))
    coarse = np.ones((12, 1))  # one column of ones: only the sum of labels is told
    with pytest.raises(FedlibError, match="patterns of labels"):
        attacks.labels_from_first_sum(coarse, -0.5 * np.array([2.0]))


@pytest.fixture(scope="module")
def cancer():
    data = load_breast_cancer()
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    order = rng(37).permutation(len(x))
    x, y = x[order], 2.0 * data.target[order] - 1
    blocks = (np.arange(0, 10), np.arange(10, 20), np.arange(20, 30))
    return (x[:400], y[:400]), (x[400:], y[400:]), blocks


def test_protections_measured(cancer):
    def cost(lr=0.05, **protection):
        return measure(Protection(**protection), *cancer, lr=lr, passes=5)

    bare = cost()
    assert bare.sent == 1 and bare.accuracy > 0.93 and bare.bytes == 2 * (8 + 8 + 16)
    modular = cost(bits=32)
    assert modular == bare  # neither accuracy nor bytes, and no label either
    alone = cost(key=2048)
    assert alone.sent == 1 and alone.accuracy == bare.accuracy
    assert alone.bytes == 2 * (8 + 8 + 8 + 512 + 10 * (512 + 256))
    small, large = cost(batch=10, key=2048, lr=0.5), cost(batch=100, key=2048, lr=0.5)
    assert small.sent > 0.99 and 0.5 < large.sent < 0.97
    assert small.accuracy > 0.93 and large.accuracy > 0.9
    assert bare.bytes < large.bytes < small.bytes < alone.bytes
    for epsilon in (1.0, 3.0):
        once = cost(noise="response", epsilon=epsilon, lr=0.01)
        assert abs(once.sent - 1 / (1 + np.exp(-epsilon))) < 0.06
        assert bare.accuracy - 0.25 < once.accuracy and once.bytes == bare.bytes
    for noise in ("laplace", "gaussian"):
        weak = cost(noise=noise, epsilon=0.5, lr=0.002)
        assert weak.sent < 0.65 < cost(noise=noise, epsilon=50.0, lr=0.01).sent
        assert weak.own > 0.75  # and by its own columns a party names far more


def test_noise_does_not_bound_what_own_columns_name_and_no_columns_meet_the_bound():
    """One column decides the label, another is noise: the first names all, the other half.

    At even odds, and with columns that say nothing, nobody is above the bound of the noise.
    """
    draw = rng(52)
    x = draw.normal(size=(800, 3))
    y = np.sign(x[:, 1])
    blocks = [np.array([0]), np.array([1]), np.array([2])]
    shy = Protection(noise="response", epsilon=1.0)
    found = measure(shy, (x, y), (x, y), blocks, 0.03, 5)
    assert found.own == 1.0
    useless = measure(shy, (x, y), (x, y), [np.array([1]), np.array([0]), np.array([2])], 0.03, 5)
    bound = 1 / (1 + np.exp(-1))
    assert useless.own < 0.6 and max(found.sent, useless.sent) < bound + 3 * np.sqrt(0.2 / 800)


def test_measured_accuracy_is_that_of_a_plain_loop():
    """Another order in each pass, and a regulariser that matters."""
    draw = rng(77)
    x, turned = draw.normal(size=(600, 8)) + 0.5, draw.random(600) < 0.3
    y = np.where(turned, -1, 1) * np.sign(x @ draw.normal(size=8) + 0.5)
    train, test = (x[:200], y[:200]), (x[200:], y[200:])

    def plain(lam, order):
        w = np.zeros(8)
        for number in range(3):
            for i in stream(4, "protected pass", *order(number)).permutation(200):
                w = w - 0.3 * (THETA["logistic"](x[i] @ w, y[i]) * x[i] + lam * w)
        return np.mean(np.sign(test[0] @ w) == test[1])

    found = measure(Protection(), train, test, np.split(np.arange(8), 2), 0.3, 3, lam=0.5, seed=4)
    assert found.accuracy == plain(0.5, lambda number: (number,))
    assert found.accuracy != plain(0.0, lambda number: (number,))
    assert found.accuracy != plain(0.5, lambda number: ())


def test_the_party_without_labels_solves_with_its_own_columns():
    """Batches of five are solved by a party with ten columns, and not by one with a single one."""
    x, y, _ = problem(8)
    for wide, named in ((1, True), (0, False)):
        blocks = [np.arange(10), np.array([10])]
        if wide:
            blocks = blocks[::-1]
        found = measure(Protection(batch=5, key=2048), (x, y), (x, y), blocks, 0.1, 2)
        assert (found.sent == 1) == named


def test_fresh_noise_averages_out_where_visits_are_not_counted(cancer):
    """The same noise on a message, twenty times the visits: more labels are named."""
    few, many = (
        measure(Protection(noise="laplace", epsilon=visits), *cancer, lr=1e-5, passes=visits)
        for visits in (1, 20)
    )
    assert laplace_scale(1, 1) == laplace_scale(20, 20) == 1
    assert abs(few.sent - (1 - np.exp(-0.5) / 2)) < 0.08  # |theta| is 1/2 at the start
    assert many.sent > 0.88


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: Protection(batch=4), "encryption"),
        (lambda: Protection(noise="laplace"), "its epsilon"),
        (lambda: Protection(epsilon=1.0), "kind of noise"),
        (lambda: Protection(noise="gaussiann", epsilon=1.0), "Did you mean 'gaussian'"),
        (lambda: laplace_scale(0.0, 3), "positive"),
        (lambda: gaussian_scale(1.0, 0.0, 3), "delta"),
        (lambda: gaussian_scale(1.0, 1e-6, 0), "at least 1"),
    ],
)
def test_protections_say_what_they_need(call, why):
    with pytest.raises(FedlibError, match=why):
        call()
