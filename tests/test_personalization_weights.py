"""Mixing weights: water-filling against a general solver, its thresholds, projected descent."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.optimize import linprog, minimize

from fedlib.errors import FedlibError
from fedlib.papers.personalization import weights


def problem(rng, clients=7, scale=1.0):
    """Discrepancies of random gradients, sizes, and a λ that leaves some clients out."""
    g = rng.normal(size=(clients, 3)) * rng.uniform(0.2, 2, (clients, 1))
    z = ((g[:, None] - g[None]) ** 2).sum(2) * scale
    n = rng.integers(1, 40, clients).astype(float)
    return torch.from_numpy(z), torch.from_numpy(n), float(rng.uniform(0.5, 40) * scale)


def solved(z, n, lam):
    """Equation (2) by a general solver (SLSQP), one client."""
    N = len(z)

    def g(a):
        return a @ z + lam * (a**2 / n).sum()

    found = minimize(g, np.full(N, 1 / N), jac=lambda a: z + 2 * lam * a / n, method="SLSQP",
                     bounds=[(0, 1)] * N, constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
                     options={"ftol": 1e-13, "maxiter": 1000})  # fmt: skip
    assert found.success or found.status == 8  # no way further down that it could see
    return found.x


def test_water_filling_against_a_general_solver():
    rng = np.random.default_rng(0)
    for _ in range(20):
        z, n, lam = problem(rng)
        A = weights.water_fill(z, n, lam)
        for i in range(len(z)):
            assert_allclose(A[i], solved(z[i].numpy(), n.numpy(), lam), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(1e-6, 1e6))
def test_01_and_04_kkt_and_the_simplex(seed, clients, lam):
    """Duality gap zero: no vertex of the simplex lies downhill of the weights."""
    z, n, _ = problem(np.random.default_rng(seed), clients)
    A = weights.water_fill(z, n, lam)
    assert (A >= 0).all()
    assert_allclose(A.sum(1), 1, rtol=1e-12)
    slope = z + 2 * lam * A / n
    gap = (A * slope).sum(1) - slope.amin(1)
    assert (gap <= 1e-12 * (z.max() + lam)).all()
    assert (A.diagonal() > 0).all(), "z_ii = 0 is below every level"
    larger = n[:, None] >= n[None]
    assert (A.diagonal()[:, None] >= A - 1e-15)[larger].all()


def test_a_small_problem_by_hand():
    """n = (1, 2, 4), z = (0, 1, 5), λ = 1: levels 2, 4/3, 24/7; two are under water."""
    z, n = torch.tensor([0.0, 1, 5]).double(), torch.tensor([1.0, 2, 4]).double()
    level = (2 + 0 + 2) / 3
    assert_allclose(weights.water_fill(z, n, 1.0), [level / 2, level - 1, 0], rtol=1e-15)
    assert weights.objective(torch.tensor([0.5, 0.5, 0]).double(), z, n, 1.0) == 0.5 + 0.25 + 0.125


def test_02_thresholds_of_full_support():
    rng = np.random.default_rng(1)
    z, n, _ = problem(rng)
    at = weights.full_support(z, n)
    for i in range(len(z)):
        above, below = (weights.water_fill(z[i], n, f * at[i]) for f in (1 + 1e-6, 1 - 1e-6))
        assert (above > 0).all() and (below == 0).sum() == 1
        mean = (n * z[i]).sum() / n.sum()
        linear = n / n.sum() - n * (z[i] - mean) / (2 * float(at[i]) * (1 + 1e-6))
        assert_allclose(above, linear, atol=1e-12)
    assert_allclose(weights.water_fill(z, n, 1e12), (n / n.sum()).expand(7, 7), rtol=1e-9)


def test_03_thresholds_of_learning_alone():
    z, n, _ = problem(np.random.default_rng(2))
    at = weights.self_only(z, n)
    for i in range(len(z)):
        nearest = min(z[i, j].item() for j in range(7) if j != i)
        assert_allclose(at[i], 0.5 * n[i] * nearest)
        alone, no_more = (weights.water_fill(z[i], n, f * at[i])[i] for f in (1 - 1e-9, 1 + 1e-6))
        assert abs(alone - 1) < 1e-14 and no_more < 1 - 1e-8
    tied = torch.zeros(2, 2).double()
    found = weights.water_fill(tied, torch.tensor([1.0, 3]).double(), 1e-9)
    assert_allclose(found, [[0.25, 0.75]] * 2, rtol=1e-12)
    assert torch.isinf(weights.self_only(torch.zeros(1, 1).double(), torch.ones(1))).all()


def test_06_scaling_and_permutations():
    rng = np.random.default_rng(3)
    z, n, lam = problem(rng)
    A = weights.water_fill(z, n, lam)
    assert_allclose(weights.water_fill(7.5 * z, n, 7.5 * lam), A, rtol=1e-10, atol=1e-14)
    order = torch.from_numpy(rng.permutation(7))
    moved = weights.water_fill(z[order][:, order], n[order], lam)
    assert_allclose(moved, A[order][:, order], rtol=1e-10, atol=1e-14)


def test_05_one_step_is_exact_for_equal_sizes():
    rng = np.random.default_rng(4)
    z, _, lam = problem(rng)
    n = torch.full((7,), 5.0).double()
    for _ in range(5):
        start = torch.from_numpy(rng.dirichlet(np.ones(7), 7))
        step = weights.descend(start, z, n, lam, 1)
        assert_allclose(step, weights.water_fill(z, n, lam), atol=1e-14)


@pytest.mark.parametrize("lam", [3.0, 30.0, 3000.0])
def test_descent_contracts_as_the_sizes_say_whatever_lambda_is(lam):
    rng = np.random.default_rng(5)
    z, n, _ = problem(rng, clients=9)
    best, rho = weights.water_fill(z, n, lam), 1 - float(n.min() / n.max())
    alpha = torch.full((9, 9), 1 / 9, dtype=torch.float64)
    before = (alpha - best).norm(dim=1)
    for _ in range(60):
        alpha = weights.descend(alpha, z, n, lam, 1)
        after = (alpha - best).norm(dim=1)
        assert (after <= rho * before + 1e-14).all()
        before = after
    assert_allclose(weights.descend(alpha, z, n, lam, 3000), best, atol=1e-10)


def test_a_gradient_step_by_hand():
    """Two clients, z = (0, 1), n = (1, 2), λ = 1: L_g = 2; the plane through the simplex."""
    z, n = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([1.0, 2.0])
    start = torch.tensor([[0.5, 0.5]]).double()
    slope = np.array([0 + 2 * 0.5 / 1, 1 + 2 * 0.5 / 2])
    moved = np.array([0.5, 0.5]) - slope / 2
    shift = (1 - moved.sum()) / 2
    assert_allclose(weights.descend(start, z, n, 1.0, 1)[0], moved + shift)


def test_the_nearest_point_of_the_simplex():
    """Against the optimality of a projection: no vertex makes an acute angle with the way back."""
    rng = np.random.default_rng(6)
    v = torch.from_numpy(rng.normal(size=(50, 6)))
    p = weights.project(v)
    assert (p >= 0).all()
    assert_allclose(p.sum(1), 1, rtol=1e-14)
    for away, point in zip((v - p).numpy(), p.numpy(), strict=True):
        best = -linprog(-away, A_eq=np.ones((1, 6)), b_eq=[1], bounds=(0, None)).fun
        assert best <= away @ point + 1e-12
    assert_allclose(weights.project(p), p, atol=1e-15)


def test_each_problem_may_have_its_own_lambda():
    rng = np.random.default_rng(7)
    z, n, _ = problem(rng)
    lams = torch.tensor([1.0, 10, 100, 5, 50, 2, 20]).double()
    together = weights.water_fill(z, n, lams)
    for i, lam in enumerate(lams.tolist()):
        assert_allclose(together[i], weights.water_fill(z[i], n, lam), rtol=1e-12)
    many = z.repeat(30, 1)  # more rows than a core takes at a time
    lams = torch.from_numpy(rng.uniform(0.5, 60, len(many)))
    together = weights.water_fill(many, n, lams)
    for k in range(len(many)):
        assert_allclose(together[k], weights.water_fill(many[k], n, float(lams[k])), rtol=1e-12)
    start = torch.full_like(z, 1 / 7)
    stepped = weights.descend(start, z, n, lams[:7], 2)
    for k in range(7):
        assert_allclose(stepped[k], weights.descend(start[k], z[k], n, float(lams[k]), 2))
    both = torch.stack([z, 2 * z])
    assert_allclose(weights.water_fill(both, n, 5.0)[1], weights.water_fill(2 * z, n, 5.0))


def test_many_rows_are_the_rows_one_by_one_on_any_number_of_threads():
    rng = np.random.default_rng(8)
    z, n = torch.from_numpy(rng.random((200, 200))).float(), torch.ones(200)
    whole, threads = weights.water_fill(z, n, 3.0), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(weights.water_fill(z, n, 3.0), whole)
    finally:
        torch.set_num_threads(threads)
    for i in (0, 63, 64, 199):
        assert torch.equal(weights.water_fill(z[i], n, 3.0), whole[i])
    assert whole.dtype == torch.float32


def test_entropy():
    A = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4])
    assert_allclose(weights.entropy(A), np.log([1, 2, 4]), rtol=1e-6)


def test_rows_are_weights_up_to_the_rounding_of_their_type():
    for dtype, fine, wrong in ((torch.float32, 1e-5, 1e-3), (torch.float64, 1e-10, 1e-7)):
        for off in ((1.0, 0.0), (1.0, -1.0)):  # another sum; the sum one, and one below zero
            row = torch.tensor([1.0, 0.0], dtype=dtype)
            weights.check_simplex(row + fine * torch.tensor(off, dtype=dtype))
            with pytest.raises(FedlibError, match="on the simplex"):
                weights.check_simplex(row + wrong * torch.tensor(off, dtype=dtype))


Z = torch.zeros(2, 2).double()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: weights.water_fill(Z, torch.ones(2), 0.0), "λ must be positive"),
        (lambda: weights.water_fill(Z, torch.ones(2), float("nan")), "λ must be positive"),
        (lambda: weights.water_fill(Z, torch.tensor([1.0, 0.0]), 1.0), "without samples"),
        (lambda: weights.water_fill(Z, torch.ones(3), 1.0), r"n is \[3\]"),
        (lambda: weights.water_fill(Z / 0, torch.ones(2), 1.0), "has diverged"),
        (lambda: weights.water_fill([[0.0]], torch.ones(1), 1.0), "z holds real"),
        (lambda: weights.water_fill(Z / 0, torch.ones(2), float("nan")), "has diverged"),
        (
            lambda: weights.water_fill(Z, torch.ones(2), torch.ones(3)),
            r"λ is \[3\]. Expected a num",
        ),
        (lambda: weights.water_fill(Z[0], torch.ones(2), torch.ones(1)), r"λ is \[1\]. Expected"),
        (lambda: weights.objective(torch.ones(3), Z, torch.ones(2), 1.0), r"alpha is \[3\]"),
        (lambda: weights.self_only(Z[0], torch.ones(2)), "of all with all"),
        (lambda: weights.self_only(Z, torch.ones(3)), r"n is \[3\]"),
        (lambda: weights.full_support(Z, torch.zeros(2)), "without samples"),
        (lambda: weights.descend(Z, Z, torch.ones(2), 1.0, 1), "on the simplex"),
        (lambda: weights.descend(Z + 0.5, Z, torch.ones(2), 1.0, -1), "steps is a whole"),
        (lambda: weights.check_simplex(torch.tensor([[1.5, -0.5]])), "on the simplex"),
        (lambda: weights.check_simplex(torch.tensor([[float("nan"), 1.0]])), "on the simplex"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(call, match):
    with pytest.raises(FedlibError, match=match):
        call()


def test_large_distances_swallow_no_width():
    """Only differences count; from 0 and 1e6 on at so small a width all goes to the nearer one."""
    z = torch.tensor([1e6, 2e6], dtype=torch.float64)
    assert weights.water_fill(z, torch.ones(2), 1e-11).tolist() == [1, 0]
    assert weights.project(torch.tensor([1e17, 0.0], dtype=torch.float64)).tolist() == [1, 0]
