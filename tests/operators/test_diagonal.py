"""A diagonal curvature by hand, a bias that is never damped among its parameters."""

from __future__ import annotations

import pytest
import torch

from sfu.errors import SingularHessianError
from sfu.operators.diagonal import DiagonalOperator

MASK = torch.tensor([1.0, 0.0]).double()
RIGHT = torch.tensor([[4.0, 4.0], [4.0, 4.0]]).double()


def operator(*values: float) -> DiagonalOperator:
    return DiagonalOperator(torch.tensor(values).double().reshape(2, 2), MASK)


def test_solves_divide_and_biases_are_not_damped():
    found = operator(1.0, 2.0, 4.0, 8.0).solve(RIGHT, 1.0)
    torch.testing.assert_close(found.value_CE, torch.tensor([[2.0, 2.0], [0.8, 0.5]]).double())
    assert (found.solver, found.residual) == ("diagonal", 0.0)
    with pytest.raises(SingularHessianError, match=r"smallest entry of the estimated diagonal is -1.*Set head\.l2"):
        operator(-1.0, 1.0, 1.0, 1.0).solve(RIGHT)


def test_the_family_raises_entries_to_the_floor_and_leaves_out_zeros():
    family = operator(-1.0, 2.0, 0.0, 4.0).damped()
    assert family.mean_eigenvalue == 1.5
    assert not family.invertible
    torch.testing.assert_close(family.solve(RIGHT), torch.tensor([[0.0, 2.0], [0.0, 1.0]]).double())
    torch.testing.assert_close(family.solve(RIGHT, floor=0.5), torch.tensor([[8.0, 2.0], [8.0, 1.0]]).double())
    many = family.solve_many(RIGHT, [1.0, 3.0], floor=0.0)
    torch.testing.assert_close(many[:, 0, 0], torch.tensor([4.0, 4 / 3]).double())


def test_combinations_trace_and_products():
    one, other = operator(1.0, 2.0, 3.0, 4.0), operator(5.0, 6.0, 7.0, 8.0)
    mixed = one.combine([other], [0.75, 0.25])
    torch.testing.assert_close(mixed.values_CE, torch.tensor([[2.0, 3.0], [4.0, 5.0]]).double())
    assert mixed.trace() == 14.0
    torch.testing.assert_close(mixed.matmul(RIGHT), 4 * mixed.values_CE)
    assert float(mixed.quadratic(RIGHT)) == 16 * 14.0
