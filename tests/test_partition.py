"""Partitioners: every sample once, the promised shape of heterogeneity, loud failure."""

from functools import partial

import numpy as np
import pytest

from fedlib.datasets import partition
from fedlib.engine.rng import stream
from fedlib.errors import FedlibError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


@pytest.mark.parametrize("name", partition.PARTITIONERS)
def test_every_sample_once_and_seeded(name):
    split = partition.PARTITIONERS[name]
    parts = split(LABELS, 50, 1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    again, other = split(LABELS, 50, 1), split(LABELS, 50, 2)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(parts, other, strict=True))


def test_similarity_split_of_the_official_code():  # exact test 19
    labels = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 6000))
    parts = partition.similarity(labels, 250, 0)
    table = partition.summary(labels, parts)
    assert (table["majority"].to_numpy() == np.arange(250) // 25).all()
    overall = sum((labels[part] == n // 25).sum() for n, part in enumerate(parts)) / len(labels)
    assert overall == pytest.approx(0.955, abs=0.003)
    for c in range(10):
        sizes = table["size"].to_numpy()[25 * c : 25 * c + 25]
        assert sizes.max() - sizes.min() <= 3  # strays that land late upset the balance a little


def test_dirichlet_uses_up_every_class_and_fails_loudly():
    parts = partition.dirichlet(LABELS, 20, 0, alpha=0.3)
    counts = partition.histogram(LABELS, parts)
    assert (counts.sum(0) == 600).all()
    spread = [
        partition.summary(LABELS, partition.dirichlet(LABELS, 20, 0, alpha=a))["distance"].mean()
        for a in (100.0, 1.0, 0.1)
    ]
    assert spread[0] < 0.1 < spread[1] < spread[2]
    with pytest.raises(FedlibError, match="larger alpha"):
        partition.dirichlet(LABELS, 500, 0, alpha=0.01)
    with pytest.raises(FedlibError, match="alpha must be positive"):
        partition.dirichlet(LABELS, 5, 0, alpha=0)


def loop_of_fedml(labels, clients, alpha, rng):
    """FedML's rule, client by client, with lists."""
    while True:
        held = [[] for _ in range(clients)]
        for c in sorted(set(labels.tolist())):
            rows = rng.permutation([n for n, label in enumerate(labels) if label == c]).tolist()
            shares = rng.dirichlet([alpha] * clients).tolist()
            open_ = [p if len(own) < len(labels) / clients else 0.0
                     for p, own in zip(shares, held, strict=True)]  # fmt: skip
            start, done = 0, 0.0
            for k, p in enumerate(open_):
                done += p
                stop = len(rows) if k == clients - 1 else int(done / sum(open_) * len(rows))
                held[k] += rows[start:stop]
                start = stop
        if min(map(len, held)) >= 10:
            return held


@pytest.mark.parametrize(("clients", "alpha"), [(10, 0.1), (30, 0.3), (40, 5.0)])
def test_fedmls_rule_is_that_of_a_plain_loop(clients, alpha):
    for seed in (0, 3):
        parts = partition.fedml(LABELS, clients, seed, alpha)
        loop = loop_of_fedml(LABELS, clients, alpha, stream(seed, "partition"))
        assert [part.tolist() for part in parts] == [sorted(own) for own in loop]


def test_fedmls_rule_levels_sizes_and_says_when_it_gives_up():
    for alpha in (0.1, 0.5):
        capped, free = (
            [np.std([*map(len, split(LABELS, 30, seed, alpha))]) for seed in range(5)]
            for split in (partition.fedml, partial(partition.dirichlet, smallest=0))
        )
        assert np.mean(capped) < 0.8 * np.mean(free)
    with pytest.raises(FedlibError, match="A thousand draws"):
        partition.fedml(LABELS[:200], 30, 0, 0.01)


def test_shards_give_few_classes():
    counts = partition.histogram(LABELS, partition.shards(LABELS, 50, 0, shards_per_client=2))
    assert (counts.sum(1) == 120).all() and ((counts > 0).sum(1) <= 2).all()
    with pytest.raises(FedlibError, match="samples at least"):
        partition.shards(LABELS, 4000, 0, shards_per_client=2)


def test_iid_is_close_to_the_whole():
    table = partition.summary(LABELS, partition.iid(LABELS, 10, 0))
    assert table["size"].max() - table["size"].min() <= 1
    assert table["distance"].max() < 0.1


def test_wrong_numbers_of_clients():
    for clients in (0, 10_000):
        with pytest.raises(FedlibError, match="clients"):
            partition.iid(LABELS, clients)
    with pytest.raises(FedlibError, match="multiple of 10"):
        partition.similarity(LABELS, 25)


def test_first_blocks_take_the_remainder():
    blocks = partition.contiguous_features(76, 16)
    assert [len(block) for block in blocks] == [5] * 12 + [4] * 4
    assert np.array_equal(np.concatenate(blocks), np.arange(76))


def test_dirichlet_shuffles_a_class_and_rounds_by_largest_remainder(monkeypatch):
    class Fixed:
        def permutation(self, rows):
            return rows[::-1]

        def dirichlet(self, alpha):
            return np.array([0.26, 0.07, 0.67])  # of ten rows 2.6, 0.7 and 6.7

    monkeypatch.setattr(partition, "stream", lambda *name: Fixed())
    parts = partition.dirichlet(np.zeros(10), 3, smallest=1)
    assert [part.tolist() for part in parts] == [[8, 9], [7], [0, 1, 2, 3, 4, 5, 6]]


def test_what_no_partitioner_takes():
    for wrong in (2.5, "3", -1, None):
        with pytest.raises(FedlibError, match="clients"):
            partition.iid(LABELS, wrong)
    with pytest.raises(FedlibError, match="Expected one a sample"):
        partition.shards(LABELS[:, None], 3)
    with pytest.raises(FedlibError, match="seed is a whole number"):
        partition.iid(LABELS, 3, -1)
    for wrong in (float("nan"), float("inf"), "1", 0):
        with pytest.raises(FedlibError, match="alpha must be positive"):
            partition.dirichlet(LABELS, 3, alpha=wrong)
    for wrong in (2.0, -0.1, float("nan")):
        with pytest.raises(FedlibError, match="other, a share"):
            partition.similarity(LABELS, 10, other=wrong)


@pytest.mark.parametrize("deal", partition.PARTITIONERS.values())
@pytest.mark.parametrize("labels", [np.full(20, np.nan), [1, None] * 10, [[1], [1, 2]]])
def test_missing_labels_are_not_dealt_out(deal, labels):
    with pytest.raises(FedlibError, match="labels are"):
        deal(labels, 2)


@pytest.mark.parametrize("parts", [[], None, [[-1]], [[20]], [[0.5]], [[[0, 1]]], {1: [0]}, "ab"])
def test_a_histogram_is_of_rows_that_there_are(parts):
    with pytest.raises(FedlibError, match="Row numbers must|The split is|rows are whole"):
        partition.histogram(np.arange(20), parts)


def test_what_cannot_be_cut():
    images = np.zeros((2, 3, 4, 4))
    for wrong in (images[0], images[0, 0], None):
        with pytest.raises(FedlibError, match="Images are an array"):
            partition.tiles(wrong, 2, 2)
    for rows in (0, -1, 1.5):
        with pytest.raises(FedlibError, match="rows is a whole number"):
            partition.tiles(images, rows, 2)
    for clients in ([], 3, [2.5], [0]):
        with pytest.raises(FedlibError, match="clients"):
            partition.grid(20, clients)
