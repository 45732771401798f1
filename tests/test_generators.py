"""Made data: the same bytes from the same seed, and the properties that their cards promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from fedlib import cards, datasets
from fedlib.datasets import generators
from fedlib.datasets.generators import depth_views, ehr_like, shapes
from fedlib.errors import FedlibError
from fedlib.paths import data_folder

MADE = ["ehr-like", "ehr-like-small", "shapes-12view", "shapes-12view-small"]
SMALL = [name for name in MADE if name.endswith("small")]


# --- cards and loading ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_cards_of_made_sets_are_complete(name):
    card = datasets.card(name)
    assert card.embedded and datasets.cached(name) and datasets.get(name) == []
    assert card.stands_in_for and card.cannot_show and card.traps
    assert set(card.stands_in_for) <= set(datasets.all_cards())
    assert card.generator["kind"] in generators.GENERATORS and "seed" in card.generator
    value = {"ehr-like": 2, "shapes": 1}[card.generator["kind"]]
    row = value * int(np.prod(card.shape)) + 1
    assert card.files[0].decoded_bytes == (card.train + card.test) * row
    assert len(card.files[0].sha256) == 64


def test_the_large_sets_have_the_sizes_of_the_originals():
    for made, original in (("ehr-like", "mimic3-ihm"), ("shapes-12view", "modelnet40-12view")):
        ours, theirs = datasets.card(made), datasets.card(original)
        for fact in ("shape", "train", "test"):
            assert getattr(ours, fact) == getattr(theirs, fact)
        assert len(ours.classes) == len(theirs.classes)


@pytest.mark.parametrize("name", SMALL)
def test_small_sets_load_verified_from_memory(name, tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    data, card = datasets.load(name), datasets.card(name)
    assert data.fidelity == "canonical" and not recwarn, "the bytes differ from the card's hash"
    assert data.hashes == {f"{name} arrays": card.files[0].sha256}
    assert data.train_x.shape == (card.train, *card.shape) and data.train_x.dtype == np.float32
    assert data.test_x.shape == (card.test, *card.shape) and data.test_y.dtype == np.int64
    assert set(data.train_y) == set(range(len(card.classes)))
    assert list(tmp_path.iterdir()) == []
    assert datasets.verify(name)[0]["state"] == "ok"
    data.train_x[:] = 0  # belongs to the caller; what is kept stays as it is
    assert datasets.load(name).train_x.std() > 0.1


def test_normalisation_is_that_of_the_card():
    raw = datasets.load("shapes-12view-small", normalise=False)
    data = datasets.load("shapes-12view-small")
    assert raw.train_x.min() == 0 and raw.train_x.max() <= 1
    assert abs(data.train_x.mean()) < 1e-3 and abs(data.train_x.std() - 1) < 1e-3
    stays = datasets.load("ehr-like-small")
    assert set(np.unique(stays.train_x[..., 1::2])) == {0, 1}
    values = stays.train_x[..., 0::2]
    assert abs(values.mean()) < 0.02 and 0.9 < values.std() < 1


def tiny(name: str, **changes):
    card = datasets.card(name)
    return replace(card, train=30, test=10, **changes)


def test_two_sets_are_kept_and_read_only(monkeypatch):
    monkeypatch.setattr(generators, "_kept", {})
    cards = [tiny("ehr-like-small", shape=(steps, 8)) for steps in (2, 3, 4)]
    first = generators.generate(cards[0])
    assert generators.generate(cards[0], progress=False) is first
    assert not any(array.flags.writeable for array in first[0])
    again = [generators.generate(card) for card in cards]
    assert len(generators._kept) == 2 and generators.generate(cards[2]) is again[2]
    made = generators.generate(cards[0])
    assert made is not first and made[1] == first[1]


def test_other_bytes_than_the_card_s_are_unverified(tmp_path, monkeypatch):
    text = (data_folder() / "datasets" / "ehr-like-small.toml").read_text()
    (tmp_path / "datasets").mkdir()
    changed = text.replace("seed = 2021", "seed = 7").replace("train = 2000", "train = 20")
    (tmp_path / "datasets" / "ehr-like-small.toml").write_text(changed)
    monkeypatch.setattr(cards, "data_folder", lambda: tmp_path)
    with pytest.warns(UserWarning, match="'ehr-like-small' is unverified"):
        data = datasets.load("ehr-like-small")
    assert data.fidelity == "unverified" and len(data.train_x) == 20
    assert datasets.verify() == [], "made sets are checked only when named"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"kind": "ehr-lik"}, "generator 'ehr-lik'. Did you mean 'ehr-like'"),
        ({"kind": "ehr-like", "correlations": 0.1}, "'correlations'. Did you mean 'correlation'"),
        ({"kind": "shapes", "progress": 1}, "'progress'"),
        ({"kind": "ehr-like", "positives": 0.0}, "positives in"),
        ({"kind": "ehr-like", "correlation": 1.1}, "correlation in"),
        ({"kind": "ehr-like", "persistence": 1.0}, "persistence in"),
    ],
)
def test_wrong_tables_are_named(table, reason):
    with pytest.raises(FedlibError, match=reason):
        generators.generate(tiny("ehr-like-small", generator=table))


def test_shapes_that_cannot_be_made_are_refused():
    with pytest.raises(FedlibError, match="even number of columns"):
        ehr_like(0, "train", 5, (3, 7))
    with pytest.raises(FedlibError, match="square images"):
        shapes(0, "train", 5, (12, 8, 9))
    with pytest.raises(FedlibError, match="one point a part"):
        shapes(0, "train", 5, (12, 8, 8), points=3)


@pytest.mark.parametrize("make", [ehr_like, shapes])
def test_same_seed_same_data_and_other_streams_differ(make):
    shape = (6, 8) if make is ehr_like else (3, 8, 8)
    kind = {} if make is ehr_like else {"points": 50}
    ask = [(0, "train"), (0, "train"), (0, "test"), (1, "train")]
    first, again, test, other = (make(seed, split, 600, shape, 2, **kind) for seed, split in ask)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    for different in (test, other):
        assert (first[0] != different[0]).mean() > 0.1
    assert (first[0][:88] != first[0][512:]).mean() > 0.1, "blocks of rows are not repeated"


# --- hospital stays ------------------------------------------------------------------------------

PLAIN = dict(noise=0.0, informative=0.0, measured=(0.9999, 0.99999))
"""Severities are seen as they are, in almost every hour."""


def auc(train, test, columns) -> float:
    def features(x):
        x = x[..., columns]
        return np.hstack([x[:, -1], x[:, -8:].mean(axis=1), x.mean(axis=1)])

    model = LogisticRegression(C=0.01, max_iter=200).fit(features(train[0]), train[1])
    return roc_auc_score(test[1], model.decision_function(features(test[0])))


def test_every_quarter_tells_something_and_all_four_tell_more():
    data = datasets.load("ehr-like-small")
    train, test = (data.train_x, data.train_y), (data.test_x, data.test_y)
    quarters = [auc(train, test, slice(start, start + 19)) for start in (0, 19, 38, 57)]
    assert min(quarters) > 0.62, "chance is 0.5 with a standard error of 0.03"
    assert auc(train, test, slice(None)) > max(quarters) + 0.05


@pytest.mark.parametrize(("positives", "strength"), [(0.13, 3.0), (0.3, 1.0), (0.6, 5.0)])
def test_the_intercept_gives_the_share_of_positives(positives, strength):
    _, y = ehr_like(3, "train", 20_000, (3, 2), positives=positives, strength=strength)
    assert abs(y.mean() - positives) < 4 * np.sqrt(positives * (1 - positives) / len(y))


def test_the_label_follows_last_state_and_change():
    x, y = ehr_like(5, "train", 20_000, (6, 8), correlation=0.0, positives=0.4, trend=0.8,
                    strength=3.0, persistence=0.7, **PLAIN)  # fmt: skip
    z = x[..., 0::2] / 1000
    model = LogisticRegression(C=1e6).fit(np.hstack([z[:, -1], z[:, -1] - z[:, 0]]), y)
    last, change = np.abs(model.coef_[0, :4]), np.abs(model.coef_[0, 4:])
    np.testing.assert_allclose(change / last, 0.8, atol=0.12)
    score = model.decision_function(np.hstack([z[:, -1], z[:, -1] - z[:, 0]]))
    assert abs(score.std() - 3.0) < 0.2


@pytest.mark.parametrize("persistence", [0.0, 0.6, 0.95])
def test_severities_persist_with_variance_one(persistence):
    x, _ = ehr_like(1, "train", 4000, (8, 4), persistence=persistence, **PLAIN)
    x = x[..., 0::2] / 1000
    assert np.abs(x.var(axis=0) - 1).max() < 0.12
    assert np.abs((x[:, 1:] * x[:, :-1]).mean(axis=0) - persistence).max() < 0.08


def test_values_stay_until_measured_again():
    x, _ = ehr_like(0, "train", 200, (20, 10))
    value, mask = x[..., 0::2], x[..., 1::2]
    assert x.dtype == np.int16 and set(np.unique(mask)) == {0, 1000}
    gap = mask[:, 1:] == 0
    assert (value[:, 1:][gap] == value[:, :-1][gap]).all()
    assert (value[:, 0][mask[:, 0] == 0] == 0).all()
    assert (value[:, 1:] != value[:, :-1])[~gap].mean() > 0.99


def test_noise_hides_the_severities_and_keeps_the_variance():
    kept = PLAIN | {"noise": 2.0}
    x, _ = ehr_like(1, "train", 4000, (8, 4), persistence=0.9, **kept)
    x = x[..., 0::2] / 1000
    assert abs(x.var() - 1) < 0.05
    assert np.abs((x[:, 1:] * x[:, :-1]).mean(axis=0) - 0.9 / 5).max() < 0.05


def test_channels_are_measured_as_often_as_asked_and_more_when_ill():
    x, _ = ehr_like(0, "train", 2000, (6, 40), measured=(0.2, 0.3), informative=0.0)
    shares = x[..., 1::2].mean(axis=(0, 1)) / 1000
    assert 0.19 < shares.min() and shares.max() < 0.31 and np.ptp(shares) > 0.03
    x, y = ehr_like(0, "train", 4000, (6, 40), informative=1.0)
    ill, well = (x[y == label][..., 1::2].mean() / 1000 for label in (1, 0))
    assert ill > well + 0.03
    x, y = ehr_like(0, "train", 4000, (6, 40), informative=0.0)
    ill, well = (x[y == label][..., 1::2].mean() / 1000 for label in (1, 0))
    assert abs(ill - well) < 0.01


def explained(correlation: float) -> float:
    """Share of quarter 0's variance that the other three explain linearly, in the last hour."""
    x, _ = ehr_like(2, "train", 1500, (2, 40), correlation=correlation, **PLAIN)
    z = x[:, -1, 0::2] / 1000
    fit, *_ = np.linalg.lstsq(z[:, 5:], z[:, :5], rcond=1e-2)
    return 1 - (z[:, :5] - z[:, 5:] @ fit).var() / z[:, :5].var()


def test_correlation_makes_quarters_redundant():
    shares = [explained(c) for c in (0.0, 0.3, 0.7, 1.0)]
    assert shares[0] < 0.02 and shares[3] > 0.99
    assert shares[0] + 0.1 < shares[1] < shares[2] - 0.1 < shares[3] - 0.2


# --- shapes --------------------------------------------------------------------------------------


def look(*points, views=4, size=5, elevation=0.0):
    return depth_views(np.array([points], dtype=np.float32), views, size, elevation)[0]


def seen(image) -> list[tuple[int, int, int]]:
    """Return (row, column, depth) of every pixel that shows a point."""
    return [(int(r), int(c), int(image[r, c])) for r, c in zip(*np.nonzero(image), strict=True)]


def test_cameras_walk_round_anticlockwise():
    before = look((1, 0, 0))
    assert seen(before[0]) == [(2, 2, 255)], "it is right before the first camera"
    assert [(r, c) for r, c, _ in seen(before[1])] == [(2, 0)]
    assert [(r, c) for r, c, _ in seen(before[2])] == [(2, 2)] and before[2].max() <= 2
    assert [(r, c) for r, c, _ in seen(before[3])] == [(2, 4)]


def test_up_is_up_and_cameras_look_down():
    assert [(r, c) for r, c, _ in seen(look((0, 0, 1))[0])] == [(0, 2)]
    assert [(r, c) for r, c, _ in seen(look((0, 0, -1))[0])] == [(4, 2)]
    from_above = look((0, 0, 1), (1, 0, 0), elevation=90.0)[0]
    assert seen(from_above) == [(2, 2, 255), (4, 2, 128)]


def test_the_nearest_point_is_seen():
    for points in ([(0.9, 0, 0), (-0.9, 0, 0)], [(-0.9, 0, 0), (0.9, 0, 0)]):
        images = look(*points)
        assert images[0].max() == images[2].max() > 230
        assert len(seen(images[0])) == 1 and len(seen(images[1])) == 2


def test_opposite_outlines_are_mirrored_at_the_horizon():
    x, _ = shapes(0, "train", 20, (12, 16, 16), 5, points=400, elevation=0.0)
    outline = x > 0
    assert (outline[:, :6] == outline[:, 6:, :, ::-1]).mean() > 0.999
    assert (x[:, :6] != x[:, 6:, :, ::-1])[outline[:, :6]].mean() > 0.5, "depths differ"


def test_turning_the_object_is_going_round_it():
    cloud = np.random.default_rng(0).uniform(-0.5, 0.5, (3, 200, 3))
    turn = np.radians(30)
    c, s = np.cos(turn), np.sin(turn)
    turned = cloud @ np.array([[c, s, 0], [-s, c, 0], [0, 0, 1]])
    before, after = (depth_views(each, 12, 16, 30.0) for each in (cloud, turned))
    assert (np.roll(before, 1, axis=1) == after).mean() > 0.99


@pytest.mark.parametrize("surface", generators._SURFACES, ids=lambda f: f.__name__)
def test_points_lie_on_the_surface_and_follow_its_area(surface):
    half = np.array([0.1, 0.1, 0.5])
    points = surface(np.random.default_rng(0), (50, 100), half).reshape(-1, 3)
    assert np.abs(points.mean(axis=0)).max() < 0.05
    radius = np.linalg.norm(points[:, :2], axis=1)
    top = np.abs(points[:, 2]) == 1
    if surface is generators._box:
        np.testing.assert_allclose(np.abs(points).max(axis=1), 1)
        assert abs(top.mean() - 0.01 / 0.11) < 0.02
    elif surface is generators._ellipsoid:
        np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=1e-5)
    else:
        np.testing.assert_allclose(radius[~top], 1, rtol=1e-5)
        assert radius.max() < 1.0001 and abs(top.mean() - 0.01 / 0.11) < 0.02
        assert abs((radius[top] ** 2).mean() - 0.5) < 0.1, "lids are covered evenly"


def test_classes_are_equally_frequent_and_shuffled():
    _, y = shapes(0, "train", 600, (1, 4, 4), 7, points=10)
    counts = np.bincount(y)
    assert len(counts) == 7 and np.ptp(counts) <= 1 and len(set(y[:7])) < 7


def test_one_view_tells_the_class_and_twelve_tell_more():
    data = datasets.load("shapes-12view-small")

    def accuracy(views) -> float:
        train = data.train_x[:, views].reshape(len(data.train_x), -1)
        test = data.test_x[:, views].reshape(len(data.test_x), -1)
        means = np.stack([train[data.train_y == label].mean(axis=0) for label in range(10)])
        near = ((means**2).sum(axis=1) - 2 * test @ means.T).argmin(axis=1)
        return (near == data.test_y).mean()

    single = [accuracy(slice(k, k + 1)) for k in range(12)]
    assert min(single) > 0.25, "chance is 0.1"
    assert accuracy(slice(None)) > np.mean(single) + 0.05
