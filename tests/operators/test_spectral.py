from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sfu.errors import SingularHessianError
from sfu.losses.base import make_loss
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.spectral import SpectralInverse, bias_inverse


def problem(width: int, seed: int, bias: bool, shift: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3 * width, width, generator=generator, dtype=torch.float64) + shift
    mask = torch.ones(width, dtype=torch.float64)
    if bias:
        rows[:, -1] = 1.0
        mask[-1] = 0.0
    hessian = rows.T @ rows / rows.shape[0] + torch.diag(1e-3 * mask)
    return hessian, mask, torch.randn(3, width, generator=generator, dtype=torch.float64)


@given(width=st.integers(2, 12), seed=st.integers(0, 999), bias=st.booleans(), rho=st.floats(0, 10))
def test_equals_a_dense_solve(width, seed, bias, rho):
    hessian, mask, right = problem(width, seed, bias)
    expected = torch.linalg.solve(hessian + rho * torch.diag(mask), right.T).T
    torch.testing.assert_close(SpectralInverse(hessian, mask).solve(right, rho), expected, rtol=1e-7, atol=1e-9)


@given(
    width=st.integers(2, 9), count=st.sampled_from([1, 40]), seed=st.integers(0, 99), bias=st.booleans(),
    floor=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_scores_are_those_of_the_solutions(width, count, seed, bias, floor):
    """Whether the solutions are formed (one right-hand side) or not."""
    hessian, mask, _ = problem(width, seed, bias)
    held_out, _, _ = problem(width, seed + 1, bias)
    right, rhos = torch.randn(count, width, dtype=torch.float64), [0.0, 0.1]
    inverse = SpectralInverse(hessian, mask)
    along, curved, square = inverse.scores(right, rhos, ExplicitOperator(held_out, count, mask), floor=floor)
    solved = inverse.solve_many(right, rhos, floor=floor)
    torch.testing.assert_close(along, (solved * right).sum((1, 2)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(curved, ((solved @ held_out) * solved).sum((1, 2)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(square, solved.square().sum((1, 2)), rtol=1e-9, atol=1e-9)


def test_many_rhos_equal_one_at_a_time(device):
    hessian, mask, right = (t.to(device) for t in problem(9, 0, True))
    inverse = SpectralInverse(hessian, mask)
    rhos = [0.0, 1e-3, 2.0]
    for rho, solved in zip(rhos, inverse.solve_many(right, rhos), strict=True):
        torch.testing.assert_close(solved, inverse.solve(right, rho), rtol=1e-12, atol=1e-14)


def test_damping_ignores_a_shift_of_the_features_when_there_is_a_bias():
    """w -> w, b -> b - w.shift maps the shifted problem to the unshifted one; damping must respect it."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    shift = torch.tensor([5.0, -3.0, 0.5, 2.0]).double()
    mask = torch.tensor([1.0, 1, 1, 1, 0]).double()
    residual = torch.randn(2, 50, generator=generator, dtype=torch.float64)

    def step(features):
        design = torch.cat([features, torch.ones(50, 1).double()], 1)
        return SpectralInverse(design.T @ design / 50, mask).solve(residual @ design / 50, 0.7)

    plain, shifted = step(rows), step(rows + shift)
    torch.testing.assert_close(shifted[:, :4], plain[:, :4], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(shifted[:, 4] + shifted[:, :4] @ shift, plain[:, 4], rtol=1e-9, atol=1e-11)


def test_singular_matrices_get_the_pseudo_inverse_or_the_floor():
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64)).Q
    spectrum = torch.tensor([0.0, 1e-19, 0.5, 2.0]).double()
    inverse = SpectralInverse(basis @ torch.diag(spectrum) @ basis.T, torch.ones(4).double())
    right = torch.eye(4).double()
    expected = basis @ torch.diag(torch.tensor([0.0, 0.0, 2.0, 0.5]).double()) @ basis.T
    torch.testing.assert_close(inverse.solve(right), expected, rtol=1e-9, atol=1e-12)
    floored = basis @ torch.diag(torch.tensor([10.0, 10.0, 2.0, 0.5]).double()) @ basis.T
    torch.testing.assert_close(inverse.solve(right, floor=0.1), floored, rtol=1e-9, atol=1e-12)


def test_a_bias_without_curvature_is_refused():
    hessian = torch.eye(3).double()
    hessian[2, 2] = 0.0
    with pytest.raises(SingularHessianError, match="curvature of the bias"):
        SpectralInverse(hessian, torch.tensor([1.0, 1.0, 0.0]).double())


def test_a_well_fitted_softmax_has_a_bias_curvature_below_its_own_rounding():
    outputs = torch.randn(300, 3, generator=torch.Generator().manual_seed(0)).double()
    outputs[:, 0] += 25
    own = make_loss("softmax").curvature(outputs, torch.zeros(300, dtype=torch.long)).dense().mean(0)
    inverse = bias_inverse(own - 3e-15)  # as folds leave it that are taken out of a sum
    exact = torch.linalg.pinv(own, hermitian=True, rtol=1e-3)
    torch.testing.assert_close(inverse, exact, rtol=1e-2, atol=1e-2 * float(exact.abs().max()))


def test_the_natural_damping_is_the_mean_of_the_positive_eigenvalues():
    inverse = SpectralInverse(torch.diag(torch.tensor([-1.0, 2.0, 3.0]).double()), torch.ones(3).double())
    assert inverse.mean_eigenvalue == pytest.approx(5 / 3)
    assert not inverse.invertible
    assert SpectralInverse(torch.eye(2).double(), torch.ones(2).double()).invertible
