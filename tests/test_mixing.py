"""Mixing against explicit loops, in float64."""

import numpy as np
import pytest
import torch

from fedlib.engine.mixing import Groups, average, mix
from fedlib.errors import FedlibError

R, C, P = 3, 12, 7
RNG = np.random.default_rng(0)


def rows(*shape):
    return torch.from_numpy(RNG.standard_normal(shape))


def weights(*shape):
    return torch.from_numpy(RNG.dirichlet(np.ones(shape[-1]), shape[:-1]))


def by_hand(theta, W):
    """Row m of run r, one product after the other."""
    out = torch.zeros(len(theta), W.shape[1], theta.shape[2], dtype=torch.float64)
    for r in range(len(theta)):
        for m in range(W.shape[1]):
            for c in range(theta.shape[1]):
                out[r, m] += W[r, m, c] * theta[r, c]
    return out


def dense(count, weight):
    """The matrix of a block average, ``weight[C]`` in ``count`` groups."""
    matrix = torch.zeros(count, len(weight), dtype=torch.float64)
    for c, w in enumerate(weight):
        matrix[c * count // len(weight), c] = w
    return matrix


@pytest.mark.parametrize("M", [1, 4, C])
def test_weights_are_a_matrix_for_each_run_or_one_for_all(M):
    theta, W = rows(R, C, P), weights(R, M, C)
    expected = by_hand(theta, W)
    assert (mix(theta, W) - expected).abs().max() < 1e-14
    assert torch.equal(mix(theta.flatten(0, 1), W), mix(theta, W))
    shared = by_hand(theta, W[:1].expand(R, -1, -1))
    assert (mix(theta, W[0]) - shared).abs().max() < 1e-14
    if M == 1:
        assert torch.equal(average(theta.flatten(0, 1), W[:, 0]), mix(theta, W)[:, 0])


def test_rows_that_sum_to_one_keep_a_consensus():
    theta = rows(R, 1, P).expand(R, C, P)
    for W in (weights(R, 5, C), weights(2, C), Groups(3, 4), Groups(3, 4, weights(3, 4).flatten())):
        assert (mix(theta, W) - theta[:, :1]).abs().max() < 1e-14


def test_a_permutation_is_its_matrix():
    theta = rows(R, C, P)
    order = torch.from_numpy(np.stack([RNG.permutation(C) for _ in range(R)]))
    matrix = torch.zeros(R, C, C, dtype=torch.float64)
    for r in range(R):
        for c in range(C):
            matrix[r, c, order[r, c]] = 1
    assert torch.equal(mix(theta, order), by_hand(theta, matrix))
    one = mix(theta.flatten(0, 1), order[0])
    assert torch.equal(one, by_hand(theta, matrix[:1].expand(R, -1, -1)))


def test_groups_are_their_matrix():
    theta, weight = rows(R, C, P), weights(R, 4, 3).flatten(1)
    matrix = torch.stack([dense(4, w) for w in weight])
    assert (mix(theta, Groups(4, 3, weight)) - by_hand(theta, matrix)).abs().max() < 1e-14
    matrix = dense(4, weight[0]).expand(R, -1, -1)
    assert (mix(theta, Groups(4, 3, weight[0])) - by_hand(theta, matrix)).abs().max() < 1e-14
    matrix = dense(4, torch.ones(C).double() / 3).expand(R, -1, -1)
    assert (mix(theta, Groups(4, 3)) - by_hand(theta, matrix)).abs().max() < 1e-14


def test_a_hierarchy_is_blocks_after_blocks_and_a_kronecker_product():
    """Twelve clients, six edges, two clouds, one mean: equal groups throughout."""
    theta = rows(R, C, P)
    clouds = mix(mix(theta, Groups(6, 2)), Groups(2, 3))
    matrix = torch.kron(torch.eye(2).double(), torch.ones(1, 6).double() / 6)
    assert (clouds - by_hand(theta, matrix.expand(R, -1, -1))).abs().max() < 1e-14
    assert (mix(clouds, Groups(1, 2))[:, 0] - theta.mean(1)).abs().max() < 1e-14
    inner, outer = weights(2), weights(3)  # the same weights in every group
    tiers = mix(mix(theta, Groups(6, 2, inner.repeat(6))), Groups(2, 3, outer.repeat(2)))
    matrix = torch.kron(torch.eye(2).double(), torch.kron(outer, inner).view(1, -1))
    assert (tiers - by_hand(theta, matrix.expand(R, -1, -1))).abs().max() < 1e-14


def test_weights_come_in_any_precision():
    theta, q = rows(R * C, P).float(), weights(R, C)
    found = average(theta, q)
    assert found.dtype == torch.float32
    expected = by_hand(theta.double().view(R, C, P), q.unsqueeze(1))[:, 0]
    assert (found - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    "theta, W",
    [
        (rows(R * C + 1, P), weights(1, C)),
        (rows(R, C, P), weights(1, C - 1)),
        (rows(P), weights(1, C)),
        (rows(R, C, P), Groups(5, 2)),
    ],
)
def test_rows_that_do_not_fit_are_refused(theta, W):
    with pytest.raises(FedlibError, match="does not fit weights of"):
        mix(theta, W)


@pytest.mark.parametrize("W", [weights(R + 1, 1, C), torch.arange(C).expand(R - 1, -1)])
def test_another_number_of_runs_is_refused(W):
    with pytest.raises(FedlibError, match=f"{len(W)} runs, theta has {R}"):
        mix(rows(R * C, P), W)
