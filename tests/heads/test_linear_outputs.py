"""Outputs of many linear heads at once are those of each; so are their gradients, in both arguments and twice."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev, vmap

from sfu.heads.linear_outputs import LinearOutputs

DESIGN, HEADS = torch.randn(7, 4).double(), torch.randn(3, 2, 4).double()


def value(parameters, design):
    return LinearOutputs.apply(design, parameters).sin().sum()


def test_values_and_both_gradients_twice():
    inputs = DESIGN.clone().requires_grad_(), HEADS[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(LinearOutputs.apply, inputs)
    assert torch.autograd.gradgradcheck(LinearOutputs.apply, inputs)


@pytest.mark.parametrize("heads", [HEADS, HEADS.movedim(0, 2)], ids=["first", "last"])
def test_many_heads_on_the_same_rows(heads):
    dim = 0 if heads is HEADS else 2
    together = vmap(LinearOutputs.apply, in_dims=(None, dim))(DESIGN, heads)
    torch.testing.assert_close(together, torch.stack([DESIGN @ head.T for head in HEADS]))
    slopes = vmap(grad(value), in_dims=(dim, None))(heads, DESIGN)
    torch.testing.assert_close(slopes, torch.stack([(DESIGN @ head.T).cos().T @ DESIGN for head in HEADS]))


def test_rows_of_their_own():
    designs = torch.randn(3, 7, 4).double()
    torch.testing.assert_close(vmap(LinearOutputs.apply)(designs, HEADS), designs @ HEADS.mT)
    torch.testing.assert_close(vmap(LinearOutputs.apply, in_dims=(0, None))(designs, HEADS[0]), designs @ HEADS[0].T)
    jacobian = jacrev(lambda head: LinearOutputs.apply(DESIGN, head))(HEADS[0])
    torch.testing.assert_close(jacobian, torch.einsum("be,cd->bcde", DESIGN, torch.eye(2).double()))
