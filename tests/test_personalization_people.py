"""Who holds what in the personalization chapter, and how each client's own model is judged."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fedlib import datasets
from fedlib.engine import models
from fedlib.engine.data import FederatedDataset
from fedlib.engine.tasks import Task
from fedlib.errors import FedlibError
from fedlib.lab.studies.personalization_people import Judges, people, two_halves

HALVES = dict(split="halves", clients=6, samples=20, judging=0.25, features=8)
DIGITS = dict(dataset="digits", clients=10, samples=30, judging=0.2)
WRITERS = dict(dataset="writers-digits", split="owners", clients=8, samples=30, judging=0.2)
KINDS = [
    HALVES,
    DIGITS | dict(split="random"),
    DIGITS | dict(split="classes", classes=1),
    DIGITS | dict(split="classes", classes=2),
    WRITERS,
]


@pytest.mark.parametrize("s", KINDS, ids=lambda s: f"{s['split']} {s.get('classes', '')}")
def test_no_row_is_given_twice_and_none_that_judges_is_learned_from(s):
    found = people(s, [3, 4])
    for seed in (3, 4):
        train, own = found.train[seed], found.judging[seed]
        rows = np.concatenate([*train, *own])
        assert len(train) == len(own) == len(found.groups[seed]) == s["clients"]
        assert len(np.unique(rows)) == len(rows) and rows.max() < len(found.y)
        assert min(map(len, train)) >= 2 and min(map(len, own)) >= 1
    assert any((a != b).any() if len(a) == len(b) else True
               for a, b in zip(found.train[3], found.train[4], strict=True))  # fmt: skip
    again = people(s, [4, 3])
    if s["split"] != "halves":
        assert all((a == b).all() for a, b in zip(found.judging[3], again.judging[3], strict=True))


def test_a_share_of_each_clients_rows_judges():
    found = people(HALVES, [0])
    assert {len(part) for part in found.train[0]} == {15}
    assert {len(part) for part in found.judging[0]} == {5}


def test_clients_of_one_class_are_of_one_kind():
    s = DIGITS | dict(split="classes", classes=1, clients=20, samples=16)
    found = people(s, [1])
    labels = [np.unique(found.y[np.r_[a, b]])
              for a, b in zip(found.train[1], found.judging[1], strict=True)]  # fmt: skip
    assert [len(c) for c in labels] == [1] * 20
    assert [int(c[0]) for c in labels] == found.groups[1].tolist()
    assert (np.bincount(found.groups[1]) == 2).all(), "every class as often as the others"


def test_clients_of_two_classes_hold_two_and_know_no_kind():
    found = people(DIGITS | dict(split="classes", classes=2, samples=60), [1])
    for parts in (found.train[1], found.judging[1]):  # twelve rows judge, six of a class on average
        assert all(len(np.unique(found.y[part])) == 2 for part in parts)
    assert (found.groups[1] == -1).all()


def test_rows_and_classes_are_drawn_anew_for_each_seed():
    """The same rows of a class in every seed, or classes in order, would be no draw."""
    one, other = (people(DIGITS | dict(split="classes", classes=1), [seed]) for seed in (1, 2))
    assert (one.groups[1] != other.groups[2]).any() and (one.groups[1] != np.arange(10)).any()
    for c in range(10):
        rows = [
            set(np.r_[d.train[seed][n], d.judging[seed][n]])
            for d, seed in ((one, 1), (other, 2))
            for n in np.flatnonzero(d.groups[seed] == c)
        ]
        assert len(rows) == 2 and rows[0] != rows[1]


def test_writers_keep_their_rows():
    found = people(WRITERS, [2])
    held = datasets.load("writers-digits")
    owners = datasets.owners(held)
    whose = np.r_[owners.train, owners.test]
    n = len(held.train_y)
    for train, own in zip(found.train[2], found.judging[2], strict=True):
        (name,) = np.unique(whose[np.r_[train, own]])
        assert (train < n).all() and (own >= n).all() and len(train) <= 30
        assert len(own) == (owners.test == name).sum()
        every = np.flatnonzero(owners.train == name)
        assert len(every) == len(train) or set(train) != set(every[:30]), "drawn, not the first"


def test_writers_are_of_the_family_of_their_style():
    found, owners = people(WRITERS, [2]), datasets.owners(datasets.load("writers-digits"))
    whose = [np.unique(owners.train[rows]) for rows in found.train[2]]
    assert found.groups[2].tolist() == [int(owners.traits["family"][n]) for (n,) in whose]
    assert len(set(found.groups[2])) > 1


def test_the_synthetic_task_by_its_law():
    x, y = two_halves(0, 4, 20_000, 5)
    x, y = x.reshape(2, 40_000, 5), y.reshape(2, 40_000)
    for half, sign in zip(x, (1, -1), strict=True):
        assert_allclose(half.mean(0), 0.2 * sign, atol=0.02)
        assert_allclose(half.var(0), np.arange(1, 6) ** -1.2, rtol=0.03)
        assert_allclose(np.corrcoef(half.T) - np.eye(5), 0, atol=0.02)
    # one w parts the classes in both halves, with opposite signs
    w = np.linalg.lstsq(x[0] - 0, 2.0 * y[0] - 1, rcond=None)[0]
    assert ((x[0] @ w > 0) == y[0]).mean() > 0.9 and ((x[1] @ w > 0) == y[1]).mean() < 0.1
    other, _ = two_halves(1, 4, 20_000, 5)
    assert not np.allclose(other[:10], x[0, :10])


def test_a_balanced_draw_has_both_classes_alike():
    shares = [two_halves(seed, 2, 40_000, 60, balanced=True)[1].mean() for seed in range(3)]
    assert_allclose(shares, 0.5, atol=0.01)
    free = [two_halves(seed, 2, 4000, 60)[1].reshape(2, -1).mean(1) for seed in range(6)]
    assert np.ptp(free) > 0.2, "the paper's draw differs from seed to seed"


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("angle", [0.0, 60.0, 90.0, 180.0])
def test_the_directions_of_the_halves_are_so_many_degrees_apart(angle, balanced):
    """Features are Gaussian, so least squares finds a half's direction (Stein's identity)."""
    x, y = two_halves(5, 2, 100_000, 4, balanced, angle)
    found = []
    for half, labels in zip(x.reshape(2, -1, 4), y.reshape(2, -1), strict=True):
        w = np.linalg.lstsq(half - half.mean(0), labels - labels.mean(), rcond=None)[0]
        found.append(w / np.linalg.norm(w))
        assert not balanced or labels.mean() == pytest.approx(0.5, abs=0.01)
    cosine = np.clip(found[0] @ found[1], -1, 1)
    assert cosine == pytest.approx(np.cos(np.radians(angle)), abs=0.02)


def test_halves_are_of_the_kind_that_their_features_say():
    found = people(HALVES | dict(clients=7, samples=2000), [3])
    above = [bool(found.x[rows].mean() > 0) for rows in found.train[3]]
    assert above == [True] * 4 + [False] * 3
    assert [kind == 0 for kind in found.groups[3]] == above


def test_pixels_are_pooled():
    whole, pooled = (people(DIGITS | dict(split="random", pool=n), [1]) for n in (1, 2))
    blocks = whole.x.numpy().reshape(-1, 1, 4, 2, 4, 2).mean((3, 5))
    assert_allclose(pooled.x, blocks, atol=1e-6)


def test_each_client_is_judged_by_its_own_model_on_its_own_rows():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)), rng.integers(0, 3, 40)
    parts = np.split(rng.permutation(40), [10, 17, 30])
    data = FederatedDataset.build(torch.from_numpy(x), y, parts)
    task = Task(models.mlp(4, 3), data)
    theta = torch.from_numpy(rng.normal(size=(2, 4, task.size)))
    judges = Judges({0: parts, 5: parts[::-1]}, (0, 5))
    for chunk in (1_000_000, 1):
        task.chunk = chunk
        found = judges(task, theta)
        for r, held in enumerate((parts, parts[::-1])):
            for n, rows in enumerate(held):
                W, b = theta[r, n, :12].view(3, 4).numpy(), theta[r, n, 12:].numpy()
                out = x[rows] @ W.T + b
                right = (out.argmax(1) == y[rows]).mean()
                logs = out - np.log(np.exp(out).sum(1, keepdims=True))
                assert found["accuracy"][r, n] == pytest.approx(right)
                loss = -logs[np.arange(len(rows)), y[rows]].mean()
                assert found["loss"][r, n] == pytest.approx(loss)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(split="thirds"), "split"),
        (dict(split="random", samples=2), "too few samples"),
        (dict(split="random", judging=0.99), "too few samples"),
        (dict(split="classes", clients=1000), "too few samples: client .* has 0, 0 of them"),
        (dict(split="random", clients=1000), "1000 clients with 30 samples each take 30000 rows"),
        (dict(split="random", judging=1.0), "judging is the share"),
        (dict(split="classes", classes=11), "11 of 10 classes a client"),
        (dict(split="classes", classes=4), "4 of 10 classes a client"),
        (dict(split="random", pool=9), "pool = 9, and samples are"),
        (dict(split="halves"), "needs features"),
        (dict(split="halves", features=3, clients=1), "two clients or more"),
        (dict(split="halves", features=1), "Take 2 or more"),
        (dict(split="halves", features=2, balanced=True), "Take 3 or more, as balanced"),
        (dict(split="owners", dataset="writers-digits", clients=10_000), "rows of"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_a_sentence(change, match):
    with pytest.raises(FedlibError, match=match):
        people(DIGITS | dict(classes=1) | change, [0])


@pytest.mark.parametrize(
    ("parts", "match"),
    [({0: [np.arange(3), np.arange(0)]}, "Client 1 has no rows"), ({3: []}, r"seeds \[0\]")],
)
def test_whom_nothing_judges_is_refused_in_a_sentence(parts, match):
    with pytest.raises(FedlibError, match=match):
        Judges(parts, (0,))
