"""Writer-styled digits: hands that are what they are said to be, and rows that know their owner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlib import datasets
from fedlib.datasets import generators, loading, writers
from fedlib.datasets.writers import drawn, shares, styles
from fedlib.errors import FedlibError

CARDS = ["writers-digits", "writers-mnist", "writers-mnist-families"]
PLAIN = dict(slant=0.0, rotation=0.0, scale=0.0, stroke=0.0, contrast=0.0)


def make(seed=0, split="train", rows=300, shape=(1, 8, 8), classes=10, **options):
    options = {"base": "digits", "count": 12, **options}
    return writers.writers(seed, split, rows, shape, classes, **options)


def made(train=600, test=200, **options):
    """Return the small set with other options."""
    held = datasets.card("writers-digits")
    return replace(held, train=train, test=test, generator={**held.generator, **options})


# --- cards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CARDS)
def test_cards_are_complete(name):
    card = datasets.card(name)
    assert card.embedded and card.base in loading.BASES and "femnist" in card.stands_in_for
    assert set(card.stands_in_for) <= set(datasets.all_cards())
    assert card.files[0].decoded_bytes == (card.train + card.test) * (int(np.prod(card.shape)) + 1)
    assert "substitute" in card.traps[0] and len(card.files[0].sha256) == 64
    base = datasets.card(card.base)
    assert base.shape == card.shape and base.classes == card.classes


def test_the_small_set_loads_verified_without_a_cache(tmp_path, monkeypatch, recwarn):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    assert datasets.cached("writers-digits") and datasets.get("writers-digits") == []
    data, card = datasets.load("writers-digits", progress=False), datasets.card("writers-digits")
    assert data.fidelity == "canonical" and not recwarn, "the bytes differ from the card's hash"
    assert data.train_x.shape == (1600, 1, 8, 8) and data.test_x.shape == (400, 1, 8, 8)
    assert abs(data.train_x.mean()) < 1e-3 and abs(data.train_x.std() - 1) < 1e-3
    assert data.hashes == {"writers-digits arrays": card.files[0].sha256}
    assert list(tmp_path.iterdir()) == [] and datasets.verify("writers-digits")[0]["state"] == "ok"


def test_a_set_made_from_another_needs_that_one(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    monkeypatch.setenv("FEDLIB_MIRROR", str(tmp_path / "empty"))
    monkeypatch.setattr(datasets.fetch, "_sources", lambda *_: [])
    assert not datasets.cached("writers-mnist")
    for ask in (datasets.get, datasets.load):
        with pytest.raises(FedlibError, match="of data set 'mnist'"):
            ask("writers-mnist")


def test_images_of_mnist_are_written_in_hands(monkeypatch):
    """As the large cards ask, on a few images in place of MNIST."""
    rng = np.random.default_rng(0)
    few = replace(
        datasets.load("digits"),
        train_x=rng.random((50, 1, 28, 28), dtype=np.float32), train_y=np.arange(50) % 10,
        test_x=rng.random((20, 1, 28, 28), dtype=np.float32), test_y=np.arange(20) % 10,
    )  # fmt: skip
    monkeypatch.setitem(writers.BASES, "mnist", lambda: few)
    for name in CARDS[1:]:
        card = replace(datasets.card(name), train=900, test=850)
        (x, y, test_x, test_y), _ = generators.generate(card, progress=False)
        assert x.shape == (900, 1, 28, 28) and test_y.shape == (850,) and x.std() > 10
        assert len(set(y)) == 10 and not np.array_equal(x[:850], test_x)


# --- one image in a hand -------------------------------------------------------------------------

COLUMN = {name: i for i, name in enumerate(writers.HAND)}


def hand(**what) -> np.ndarray:
    style = np.zeros((1, 5))
    for name, value in what.items():
        style[0, COLUMN[name]] = value
    return style


@pytest.fixture
def image():
    rng = np.random.default_rng(0)
    whole = np.zeros((1, 9, 9))
    whole[0, 2:7, 2:7] = rng.random((5, 5))
    return whole


def test_no_style_leaves_an_image_as_it_is(image):
    assert np.array_equal(drawn(image, hand()), image)
    assert np.array_equal(drawn(image.astype(np.float32), hand()), image.astype(np.float32))


def test_a_quarter_turn_is_anticlockwise(image):
    np.testing.assert_allclose(drawn(image, hand(rotation=90))[0], np.rot90(image[0]), atol=1e-12)


def test_a_slant_moves_rows_to_the_right_by_their_height(image):
    found = drawn(image, hand(slant=1))[0]
    for row in range(9):
        np.testing.assert_allclose(found[row], np.roll(image[0, row], 4 - row), atol=1e-12)


def test_twice_the_size_is_twice_as_far_from_the_middle(image):
    found = drawn(image, hand(scale=1))[0]
    np.testing.assert_allclose(found[::2, ::2], image[0, 2:7, 2:7], atol=1e-12)
    between = (image[0, 2:7, 2:6] + image[0, 2:7, 3:7]) / 2
    np.testing.assert_allclose(found[::2, 1::2], between, atol=1e-12)


@pytest.mark.parametrize("stroke", [1.0, 0.25, -0.25, -1.0])
def test_a_stroke_goes_towards_the_largest_or_smallest_neighbour(image, stroke):
    found = drawn(image, hand(stroke=stroke))[0]
    extreme = max if stroke > 0 else min
    for i in range(1, 8):
        for j in range(1, 8):
            near = extreme(image[0, i - 1 : i + 2, j - 1 : j + 2].ravel())
            expected = (1 - abs(stroke)) * image[0, i, j] + abs(stroke) * near
            assert found[i, j] == pytest.approx(expected, abs=1e-12)


def test_contrast_darkens_and_pales(image):
    np.testing.assert_allclose(drawn(image, hand(contrast=1))[0], np.sqrt(image[0]), atol=1e-12)
    np.testing.assert_allclose(drawn(image, hand(contrast=-1))[0], image[0] ** 2, atol=1e-12)


def test_a_slanted_hand_is_turned_after_it_was_slanted(image):
    both = drawn(image, hand(slant=1, rotation=90))[0]
    np.testing.assert_allclose(both, np.rot90(drawn(image, hand(slant=1))[0]), atol=1e-12)


def test_each_image_has_its_own_hand(image):
    pair = np.concatenate([image, image])
    mixed = np.concatenate([hand(rotation=10), hand(stroke=0.5, contrast=-0.3)])
    found = drawn(pair, mixed)
    for n in range(2):
        assert np.array_equal(found[n], drawn(image, mixed[n : n + 1])[0])


# --- who writes how ------------------------------------------------------------------------------


def test_styles_are_even_and_stay_when_writers_come():
    style, family = styles(3, 400)
    assert style.shape == (400, 5) and np.abs(style).max() <= 1 and (family == -1).all()
    assert np.abs(style.mean(0)).max() < 4 / np.sqrt(3 * 400)
    assert np.abs(style.var(0) - 1 / 3).max() < 0.06
    assert np.array_equal(styles(3, 7)[0], style[:7])


def test_a_family_has_nearly_one_hand():
    style, family = styles(3, 12, families=4, deviation=0.1)
    assert family.tolist() == [0, 1, 2, 3] * 3 and np.abs(style).max() <= 1
    gap = np.abs(style[:, None] - style).max(-1)
    assert gap[family[:, None] == family].max() <= 0.2 < gap[family[:, None] != family].min()
    one, _ = styles(3, 12, families=4, deviation=0.0)
    assert all(len(np.unique(one[family == k], axis=0)) == 1 for k in range(4))
    assert np.array_equal(styles(3, 12, families=4, deviation=1.0)[0], styles(3, 12)[0])


def test_streams_differ_by_seed_and_by_writer():
    for draw in (
        lambda seed: styles(seed, 6)[0],
        lambda seed: styles(seed, 6, 6, 0.0)[0],
        lambda seed: np.stack([writers._chances(seed, n, 4, 1.0) for n in range(6)]),
        lambda seed: shares(seed, 6, 10_000, 1.0, 1)[:, None],
    ):
        a, b = draw(0), draw(1)
        assert np.array_equal(a, draw(0)) and (a != b).all()
        assert len(np.unique(a, axis=0)) == 6, "no two writers alike"
    pools = [np.arange(1000)]
    copied = [
        tuple(writers._copied(seed, split, n, 20, pools, 1.0))
        for seed in (0, 1) for split in ("train", "test") for n in (0, 1)
    ]  # fmt: skip
    assert len(set(copied)) == 8


def test_same_seed_same_data_and_other_streams_differ():
    ask = [(0, "train"), (0, "train"), (0, "test"), (1, "train")]
    first, again, test, other = (make(seed, split) for seed, split in ask)
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a, b)
    for different in (test, other):
        assert (first[0] != different[0]).mean() > 0.1 and (first[1] != different[1]).mean() > 0.5


def test_shares_use_up_the_rows_and_follow_the_weights():
    sizes = shares(5, 40, 3001, 0.6, 3)
    assert sizes.sum() == 3001 and sizes.min() >= 3
    assert shares(5, 4, 4, 0.6, 1).tolist() == [1] * 4
    assert sorted(shares(5, 7, 30, 0.0, 2)) == [4] * 5 + [5] * 2, "equal weights"
    many = np.log(shares(5, 4000, 40_000_000, 0.6, 1))
    assert many.std() == pytest.approx(0.6, rel=0.05)
    twice = shares(5, 40, 6000, 0.6, 1)
    assert np.abs(2 * shares(5, 40, 3000, 0.6, 1) - twice).max() <= 4, "the same in both splits"


def test_labels_follow_a_writers_own_classes():
    card = made(train=40_000, test=8000, count=8, families=0, prior=0.5, **PLAIN)
    (_, y, _, test_y), _ = generators.generate(card, progress=False)
    names, train, test, traits = writers.writer_owners(card)
    assert names[:2] == ("writer 000", "writer 001") and traits["prior"].shape == (8, 10)
    for labels, owner in ((y, train), (test_y, test)):
        for n in range(8):
            share = np.bincount(labels[owner == n], minlength=10) / (owner == n).sum()
            error = np.sqrt(traits["prior"][n] / (owner == n).sum())
            assert (np.abs(share - traits["prior"][n]) < 4.5 * error + 1e-9).all()
    even = made(count=8, prior=1e6)
    assert np.abs(writers.writer_owners(even)[3]["prior"] - 0.1).max() < 0.001


def test_without_a_style_rows_are_images_of_their_own_split():
    base = datasets.load("digits", normalise=False)
    for split in ("train", "test"):
        x, y = make(split=split, **PLAIN)
        images, labels = getattr(base, f"{split}_x"), getattr(base, f"{split}_y")
        known = {np.rint(255 * i).astype(np.uint8).tobytes(): n for n, i in enumerate(images)}
        source = [known[row.tobytes()] for row in x]
        assert np.array_equal(labels[source], y)


def test_a_writer_copies_no_image_twice_while_there_are_others():
    pools = [np.arange(0, 30), np.arange(30, 60), np.array([99])]
    source = writers._copied(0, "train", 0, 40, pools, 1e6)
    few = source[source < 60]
    assert len(set(few)) == len(few) and (source == 99).sum() > 3


def test_the_style_of_a_row_is_that_of_its_owner():
    card = made(count=10, families=3)
    (x, *_), _ = generators.generate(card, progress=False)
    (plain, *_), _ = generators.generate(
        replace(card, generator={**card.generator, **PLAIN}), progress=False
    )
    _, train, _, traits = writers.writer_owners(card)
    assert traits["style"].shape == (10, 5) and set(traits["family"]) == {0, 1, 2}
    reach = [card.generator[name] for name in writers.HAND]
    redrawn = drawn(plain[:, 0] / 255, (traits["style"] * reach)[train])
    assert np.abs(255 * redrawn - x[:, 0]).max() < 2, "drawn again from rounded images"


def test_what_the_card_leaves_out_is_the_default():
    card = made()
    for name in ("families", "deviation", "prior", "spread", "smallest"):
        card.generator.pop(name)
    full = replace(card, generator={**card.generator, "families": 0, "deviation": 0.2, "prior": 1.0,
                                    "spread": 0.5, "smallest": 2})  # fmt: skip
    a, b = writers.writer_owners(card), writers.writer_owners(full)
    assert a[0] == b[0] and all(np.array_equal(a[1 + i], b[1 + i]) for i in range(2))
    assert all(np.array_equal(a[3][key], b[3][key]) for key in a[3])
    assert generators.generate(card, False)[1] == generators.generate(full, False)[1]


def test_families_can_be_told_apart_by_their_ink():
    """Nearest of the other writers by mean image of each class: the same family nearly always."""
    data = datasets.load("writers-digits", progress=False)
    own = datasets.owners(data)
    overall = np.stack([data.train_x[data.train_y == c].mean(0) for c in range(10)])
    rest = data.train_x - overall[data.train_y]
    mean = np.stack([rest[part].mean(0).ravel() for part in own.train_parts])
    gap = np.linalg.norm(mean[:, None] - mean, axis=-1) + np.diag([np.inf] * len(mean))
    family = own.traits["family"]
    assert (family[gap.argmin(1)] == family).mean() > 0.9, "chance is about 0.25"


def test_some_writers_keep_their_traits():
    data = datasets.load("writers-digits", progress=False)
    own, few = datasets.owners(data), datasets.only(data, [7, "writer 002"])
    assert few.owners.names == ("writer 007", "writer 002")
    with pytest.raises(FedlibError, match="are a list, of numbers or names; got 'writer 002'"):
        datasets.only(data, "writer 002")
    for name in own.traits:
        assert np.array_equal(few.owners.traits[name], own.traits[name][[7, 2]])
    assert np.array_equal(few.test_x[few.owners.test_parts[1]], data.test_x[own.test_parts[2]])
    assert len(own.train) == len(data.train_x) and len(own.test) == len(data.test_x)


# --- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"base": "digit"}, "images to make writers from 'digit'. Did you mean 'digits'"),
        ({"shape": (1, 8, 9)}, r"its grey images, \(1, 8, 8\), and its 10 classes"),
        ({"classes": 9}, "asked for were .* and 9"),
        ({"rows": 23}, "23 rows are too few for 12 writers with 2 each"),
        ({"count": 0}, "count is a whole number of at least 1"),
        ({"smallest": 0}, "smallest is a whole number of at least 1"),
        ({"families": -1}, "families is a whole number of at least 0"),
        ({"deviation": 1.1}, r"deviation and stroke in \[0, 1\].*got 1.1"),
        ({"prior": 0.0}, "prior above 0"),
        ({"spread": -1.0}, "spread of at least 0"),
        ({"stroke": 1.5}, "deviation and stroke"),
        ({"scale": 1.0}, r"scale in \[0, 1\)"),
        ({"spread": float("nan")}, "spread of at least 0"),
    ],
)
def test_what_cannot_be_is_refused(options, reason):
    with pytest.raises(FedlibError, match=reason):
        make(**options)


def test_an_unknown_option_of_a_card_is_named():
    with pytest.raises(FedlibError, match="'family'. Did you mean 'families'"):
        generators.generate(made(family=3))
