"""A subspace that several sums of product operators share, against dense matrices."""

from __future__ import annotations

import pytest
import torch

from sfu.losses.base import Layout, make_loss
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator
from sfu.operators.galerkin import LIMITS, Limits, SubspaceInverse, SubspaceProducts, refine, share_subspace
from sfu.operators.preconditioner import Kronecker
from sfu.operators.products import ProductOperator
from sfu.operators.spectral import SpectralInverse
from sfu.operators.structure import Structure

CLASSES, WIDTH, L2 = 3, 8, 1e-2
COUNTS = [30, 40, 50]


class Case:
    """Three sets of rows: their operators, dense Hessians, and a right-hand side for the union of all but each."""

    def __init__(self, loss: str = "softmax", bias: bool = True) -> None:
        drawn = torch.Generator().manual_seed(0)
        self.mask = torch.ones(WIDTH + bias, dtype=torch.float64)
        self.mask[WIDTH:] = 0
        scales = torch.logspace(0, -1, WIDTH, dtype=torch.float64)
        point = torch.randn(CLASSES, WIDTH + bias, generator=drawn, dtype=torch.float64)
        objective, self.operators, self.dense, gradients = Objective(make_loss(loss), L2, self.mask), [], [], []
        for count in COUNTS:
            features = torch.randn(count, WIDTH, generator=drawn, dtype=torch.float64) * scales + 0.3
            labels = torch.randint(CLASSES, (count,), generator=drawn)
            rows = Rows(features, labels, objective.loss, bias=bias, device=torch.device("cpu"))
            self.operators.append(build_operator(objective, rows, point, Structure.products))
            ridge = torch.diag(objective.ridge_E.repeat(CLASSES))
            self.dense.append(objective.data_hessian(rows, point, Layout.dense) + ridge)
            gradients.append(objective.gradient(rows, point))
        self.weights = [float(count) for count in COUNTS]
        self.rights = [sum(w * g for w, g in zip(share, gradients, strict=True)) for share in self.shares()]

    def shares(self) -> list[list[float]]:
        total = sum(COUNTS)
        return [[(j != k) * count / (total - COUNTS[k]) for j, count in enumerate(COUNTS)] for k in range(3)]

    def share(self, limits: Limits = LIMITS) -> tuple[list[SubspaceInverse], SubspaceProducts]:
        """Return the inverses of the union of all sets but each, and the union of all; ``members`` are the sets."""
        first, *others = self.members = share_subspace(self.operators, self.weights, self.rights, limits)
        whole = first.combine(others, [count / sum(COUNTS) for count in COUNTS])
        return [first.combine(others, share).damped() for share in self.shares()], whole

    def sum(self, share: list[float]) -> torch.Tensor:
        return sum(weight * dense for weight, dense in zip(share, self.dense, strict=True))

    def solved(self, share: list[float], right: torch.Tensor, rho: float) -> torch.Tensor:
        damped = self.sum(share) + rho * torch.diag(self.mask.repeat(CLASSES))
        return torch.linalg.lstsq(damped, right.reshape(-1, 1), driver="gelsd").solution[:, 0]


every_loss = pytest.mark.parametrize("loss", ["quadratic", "logistic", "softmax"])


@every_loss
@pytest.mark.parametrize("bias", [False, True])
def test_operators_are_the_dense_ones_restricted_to_a_basis(loss, bias):
    case = Case(loss, bias)
    inverses, _ = case.share()
    subspace = inverses[0].subspace
    basis = subspace.basis_MCE
    along = (basis * case.mask).flatten(1)
    torch.testing.assert_close(along @ along.T, torch.eye(len(basis)).double(), rtol=1e-9, atol=1e-9)
    for share in case.shares():
        restricted = basis.flatten(1) @ case.sum(share) @ basis.flatten(1).T
        torch.testing.assert_close(subspace.combined(share).blocks_BKK[0], restricted, rtol=1e-9, atol=1e-10)
    assert not subspace.extend(basis[:2] + basis[1:3])
    assert len(subspace.basis_MCE) == len(basis)


@every_loss
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.1])
def test_refined_scores_are_those_of_dense_solves(loss, bias, rho):
    case = Case(loss, bias)
    inverses, _ = case.share()
    for _ in range(30):
        if not refine(inverses, case.rights, rho):
            break
    for k, (inverse, right, share) in enumerate(zip(inverses, case.rights, case.shares(), strict=True)):
        solution = case.solved(share, right, rho)
        along, curved, square = inverse.scores(right, [rho], case.members[k])
        assert float(along) == pytest.approx(float(solution @ right.flatten()), rel=1e-5)
        assert float(curved) == pytest.approx(float(solution @ case.dense[k] @ solution), rel=5e-3)
        assert float(square) == pytest.approx(float(solution @ solution), rel=5e-3)
    assert not refine(inverses, case.rights, rho)


@every_loss
@pytest.mark.parametrize("bias", [False, True])
def test_the_whole_sets_step_is_the_dense_one(loss, bias):
    case = Case(loss, bias)
    inverses, whole = case.share()
    share = [count / sum(COUNTS) for count in COUNTS]
    right = sum(weight * given for weight, given in zip(share, case.rights, strict=True))
    inverse = whole.damped()
    for rho in (0.0, 0.1):
        error = inverse.solve(right, rho).flatten() - case.solved(share, right, rho)
        size = case.solved(share, right, rho)
        assert float(error @ case.sum(share) @ error) < 1e-8 * float(size @ case.sum(share) @ size)
    account = inverse.account()
    assert account["solver"] == "subspace"
    assert 0 < account["solve_residual"] < 1e-4
    trace = float(case.sum(share).diagonal() @ case.mask.repeat(CLASSES)) / (CLASSES * WIDTH)
    assert inverse.mean_eigenvalue == inverses[0].mean_eigenvalue == pytest.approx(trace, rel=1e-9)
    assert inverse.invertible
    vector = torch.randn(CLASSES, WIDTH + bias, dtype=torch.float64)
    torch.testing.assert_close(whole.matmul(vector).flatten(), case.sum(share) @ vector.flatten())
    solution = whole.solve(right, 0.1)
    error = solution.value_CE.flatten() - case.solved(share, right, 0.1)
    assert (solution.solver, solution.converged) == ("subspace", True)
    assert float(error @ case.sum(share) @ error) < 1e-8 * float(size @ case.sum(share) @ size)
    moved = whole.combine([case.members[0], case.operators[1]], [1.0, 1.0, -1.0])  # plain products are in no subspace
    assert type(moved) is ProductOperator
    assert type(whole.combine(Case().share()[1:], [0.5, 0.5])) is ProductOperator  # nor are those of another one


def test_operators_that_score_need_not_be_among_those_that_are_inverted():
    case = Case()
    inverses, _ = case.share()
    views = [case.members[k].combine([case.members[k - 1]], [0.5, 0.5]) for k in range(3)]
    right, basis = case.rights[0], inverses[0].subspace.basis_MCE.flatten(1)
    along, curved, _ = inverses[0].scores(right, [0.1], views[0])
    matrix = basis @ (case.sum(case.shares()[0]) + 0.1 * torch.diag(case.mask.repeat(CLASSES))) @ basis.T
    solution = basis.T @ torch.linalg.solve(matrix, basis @ right.flatten())
    assert float(along) == pytest.approx(float(solution @ right.flatten()), rel=1e-9)
    expected = (case.dense[0] + case.dense[-1]) / 2
    assert float(curved) == pytest.approx(float(solution @ expected @ solution), rel=1e-9)


def test_large_products_are_float32_and_are_solved_less_tightly():
    right, exact = sum(Case().rights) / 3, Case().share()[1].damped()
    solved = exact.solve(right, 0.1)
    tolerances = exact.subspace.tolerance, exact.subspace.step_tolerance
    inverses, whole = Case().share(limits=Limits(cheap=0, single=0))
    subspace = inverses[0].subspace
    assert subspace.basis_MCE.dtype == torch.float32
    assert (subspace.tolerance, subspace.step_tolerance) > tolerances
    difference = whole.damped().solve(right, 0.1) - solved
    assert 0 < float(difference.norm()) < 1e-2 * float(solved.norm())


def test_the_basis_stops_growing_at_its_limit():
    inverses, _ = Case().share(limits=Limits(numbers=7 * CLASSES * (WIDTH + 1)))
    assert len(inverses[0].subspace.basis_MCE) == 6  # as it begins
    assert refine(inverses[:1], Case().rights[:1], 0.1)
    assert not refine(inverses[:1], Case().rights[:1], 0.1)


def test_the_preconditioner_inverts_the_product_of_both_means():
    operator = Case("softmax", bias=False).operators[0]
    outputs = operator.output_mean()
    rows = next(operator.parts[0].rows.linear_chunks()).design_BE
    moments = rows.T @ rows / len(rows)
    values, vectors = torch.linalg.eigh(outputs)
    means = vectors @ torch.diag(values.clamp(min=max(1e-4 * float(values[-1]), 0.1 + L2))) @ vectors.T
    dense = torch.kron(means, moments) + (0.1 + L2) * torch.eye(CLASSES * WIDTH)
    residual = torch.randn(CLASSES, WIDTH, dtype=torch.float64)
    found = operator.preconditioner(operator.moments(), 0.1)(residual)
    torch.testing.assert_close(dense @ found.flatten(), residual.flatten(), rtol=1e-8, atol=1e-10)


def test_the_preconditioner_of_many_classes_takes_the_diagonal_of_their_mean():
    drawn = torch.Generator().manual_seed(0)
    factor, rows = (torch.randn(*shape, generator=drawn, dtype=torch.float64) for shape in ((257, 257), (9, 2)))
    outputs, moments = torch.eye(257).double() + factor @ factor.T / 257, rows.T @ rows / 9
    residual = torch.randn(257, 2, generator=drawn, dtype=torch.float64)
    found = Kronecker(SpectralInverse(moments, torch.ones(2)), outputs).inverse(0.1)(residual)
    for own, right, solved in zip(outputs.diagonal(), residual, found, strict=True):
        torch.testing.assert_close(own * moments @ solved + 0.1 * solved, right, rtol=1e-9, atol=1e-10)
