"""Every structure of a curvature operator against the dense matrix, and its solves against dense solves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sfu.errors import ConfigError
from sfu.losses.base import Layout, make_loss
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators import plan as plan_module
from sfu.operators.build import build_operator
from sfu.operators.conjugate_gradients import conjugate_gradients, multishift_conjugate_gradients
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.plan import DENSE_LIMIT, memory_estimate, plan_structure
from sfu.operators.structure import Structure

CPU = torch.device("cpu")
CASES = [
    ("quadratic", Structure.shared), ("quadratic", Structure.products),
    ("logistic", Structure.blocks), ("logistic", Structure.products),
    ("huber_hinge", Structure.blocks), ("huber_hinge", Structure.products),
    ("softmax", Structure.dense), ("softmax", Structure.products),
]  # fmt: skip
every_case = pytest.mark.parametrize(("name", "structure"), CASES, ids=lambda v: getattr(v, "value", v))


def problem(name, structure, bias=True, device=CPU, seed=0, n=60, width=5, classes=3, l2=1e-2):
    """(operator, dense matrix, mask over all parameters, a right-hand side in its range)."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n, width, generator=generator, dtype=torch.float64) + 0.5
    labels = torch.randint(classes, (n,), generator=generator)
    loss = make_loss(name, class_weights=[1.0, 2.0, 0.5])
    mask = torch.ones(width + bias, dtype=torch.float64, device=device)
    if bias:
        mask[-1] = 0
    objective = Objective(loss, l2, mask)
    rows = Rows(features, labels, loss, bias=bias, device=device)
    point = torch.randn(classes, width + bias, generator=generator, dtype=torch.float64).to(device)
    operator = build_operator(objective, rows, point, structure)
    dense = objective.data_hessian(rows, point, Layout.dense) + torch.diag(objective.ridge_E.repeat(classes))
    seed_vector = torch.randn(classes, width + bias, generator=generator, dtype=torch.float64).to(device)
    return operator, dense, mask.repeat(classes), (dense @ seed_vector.flatten()).reshape_as(seed_vector)


@every_case
@pytest.mark.parametrize("bias", [False, True])
def test_products_trace_and_forms_are_the_dense_ones(name, structure, bias, device):
    operator, dense, _, _ = problem(name, structure, bias, device)
    assert operator.structure == structure.value
    vectors = torch.randn(2, 7, 3, 5 + bias, dtype=torch.float64).to(device)
    flat = vectors.flatten(-2)
    torch.testing.assert_close(operator.matmul(vectors).flatten(-2), flat @ dense, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.quadratic(vectors), ((flat @ dense) * flat).sum(-1), rtol=1e-10, atol=1e-12)
    assert operator.trace() == pytest.approx(float(dense.trace()), rel=1e-12)


@every_case
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_solves_are_dense_solves(name, structure, bias, rho, device):
    operator, dense, mask, right = problem(name, structure, bias, device)
    damped = dense + rho * torch.diag(mask)
    solution = operator.solve(right, rho)
    expected = torch.linalg.lstsq(damped, right.flatten()[:, None], driver="gelsd" if device == CPU else None).solution
    left = damped @ solution.value_CE.flatten()
    torch.testing.assert_close(left, damped @ expected[:, 0], rtol=1e-7, atol=1e-9)
    assert solution.residual < 1e-8
    assert solution.converged
    if not (name == "softmax" and bias):  # equal biases are free
        torch.testing.assert_close(solution.value_CE.flatten(), expected[:, 0], rtol=1e-6, atol=1e-8)
    singular = name == "softmax" and bias and structure is Structure.dense
    expected_solver = {Structure.products: "conjugate_gradients"}.get(structure, "cholesky")
    assert solution.solver == ("eigenvalues" if singular else expected_solver)
    measured = float((left - right.flatten()).norm() / right.norm())
    assert solution.residual == pytest.approx(measured, rel=1e-3, abs=1e-15)


@pytest.mark.parametrize("structure", [Structure.shared, Structure.products])
def test_each_solve_is_for_its_own_damping(structure):
    operator, dense, mask, right = problem("quadratic", structure)
    for rho in (0.3, 2.0, 2.0, 0.3):
        expected = torch.linalg.solve(dense + rho * torch.diag(mask), right.flatten())
        torch.testing.assert_close(operator.solve(right, rho).value_CE.flatten(), expected, rtol=1e-6, atol=1e-8)


def test_one_matrix_is_factored_once_for_one_damping(monkeypatch):
    operator, _, _, right = problem("quadratic", Structure.shared)
    factor, dampings = torch.linalg.cholesky_ex, []
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda matrix: (dampings.append(matrix), factor(matrix))[1])
    for rho in (0.3, 0.3, 2.0):
        operator.solve(right, rho)
    assert len(dampings) == 2


@every_case
@pytest.mark.parametrize("bias", [False, True])
def test_the_family_of_inverses_is_the_dense_one(name, structure, bias, device):
    operator, dense, mask, right = problem(name, structure, bias, device)
    family, rhos = operator.damped(), [0.0, 1e-3, 0.1, 10.0]
    assert family.invertible
    for rho, found in zip(rhos, family.solve_many(right, rhos), strict=True):
        damped = dense + rho * torch.diag(mask)
        torch.testing.assert_close(damped @ found.flatten(), right.flatten(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(family.solve(right, rho), found, rtol=1e-6, atol=1e-8)
    regularized = mask == 1
    own, cross = dense[~regularized][:, ~regularized], dense[~regularized][:, regularized]
    schur = dense[regularized][:, regularized] - cross.T @ torch.linalg.pinv(own, hermitian=True, rtol=1e-10) @ cross
    assert family.mean_eigenvalue == pytest.approx(float(schur.trace()) / schur.shape[0], rel=1e-8)


@every_case
def test_combinations_are_combinations_of_the_matrices(name, structure):
    first, dense_first, _, _ = problem(name, structure, seed=1)
    second, dense_second, _, _ = problem(name, structure, seed=2)
    mixed = first.combine([second], [0.25, 0.75])
    vector = torch.randn(3, 6, dtype=torch.float64)
    expected = (0.25 * dense_first + 0.75 * dense_second) @ vector.flatten()
    torch.testing.assert_close(mixed.matmul(vector).flatten(), expected, rtol=1e-10, atol=1e-12)
    assert mixed.trace() == pytest.approx(0.25 * first.trace() + 0.75 * second.trace(), rel=1e-12)


def test_blocks_of_softmax_are_its_diagonal_and_shared_of_logistic_their_mean():
    blocks, dense, _, _ = problem("softmax", Structure.blocks)
    quartered = dense.reshape(3, 6, 3, 6)
    torch.testing.assert_close(blocks.blocks_BKK, torch.stack([quartered[c, :, c] for c in range(3)]))
    shared = problem("logistic", Structure.shared)[0]
    mean = problem("logistic", Structure.blocks)[0].blocks_BKK.mean(0)
    torch.testing.assert_close(shared.blocks_BKK[0], mean)


def test_a_singular_block_is_solved_by_eigenvalues_and_says_so():
    flat = torch.diag(torch.tensor([2.0, 1.0, 0.0]).double())
    operator = ExplicitOperator(flat, 2, torch.ones(3).double())
    solution = operator.solve(torch.tensor([[2.0, 1.0, 0.0], [4.0, 0.0, 0.0]]).double())
    assert solution.solver == "eigenvalues"
    torch.testing.assert_close(solution.value_CE, torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0]]).double())
    assert operator.solve(torch.ones(2, 3).double(), 1.0).solver == "cholesky"


@settings(max_examples=40)
@given(
    size=st.integers(1, 30), seed=st.integers(0, 999), smallest=st.sampled_from([1e-4, 1e-2, 1.0]),
    shifts=st.lists(st.one_of(st.just(0.0), st.floats(1e-5, 1e3)), min_size=1, max_size=6),
)  # fmt: skip
def test_multishift_conjugate_gradients_solve_every_shift(size, seed, smallest, shifts):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = (basis * torch.logspace(float(torch.tensor(smallest).log10()), 0, size, dtype=torch.float64)) @ basis.T
    right = torch.randn(size, generator=generator, dtype=torch.float64)
    found = multishift_conjugate_gradients(
        lambda v: matrix @ v, right, shifts, tolerance=1e-11, max_iterations=40 * size + 100
    )  # fmt: skip
    for shift, value, residual in zip(shifts, found.values, found.residuals_M, strict=True):
        left = matrix @ value + shift * value - right
        assert float(left.norm() / right.norm()) < 1e-8
        assert float(residual) <= 1e-11
    alone = conjugate_gradients(lambda v: matrix @ v, right, lambda v: v, tolerance=1e-11, max_iterations=10_000)
    assert float((matrix @ alone.value_CE - right).norm() / right.norm()) < 1e-8


def test_all_shifts_cost_the_products_of_the_hardest_one():
    matrix = torch.diag(torch.linspace(1e-3, 1, 50, dtype=torch.float64))
    count = [0]

    def product(vector):
        count[0] += 1
        return matrix @ vector

    right = torch.ones(50, dtype=torch.float64)
    settings_ = {"tolerance": 1e-9, "max_iterations": 500}
    alone = multishift_conjugate_gradients(product, right, [0.0], **settings_)
    spent, count[0] = count[0], 0
    together = multishift_conjugate_gradients(product, right, [0.0, 1e-3, 0.1, 10.0], **settings_)
    assert count[0] == spent == together.iterations
    torch.testing.assert_close(alone.values[0], together.values[0])
    nothing = multishift_conjugate_gradients(product, 0 * right, [0.0, 1.0], **settings_)
    assert (nothing.iterations, float(nothing.values.abs().max())) == (0, 0.0)


def test_the_preconditioner_is_the_inverse_where_the_curvature_is_the_same_everywhere():
    operator, _, _, right = problem("quadratic", Structure.products)
    solution = operator.solve(right)
    assert solution.iterations <= 3


def test_the_structure_is_chosen_by_size():
    def chosen(layout, classes, width, **more):
        return plan_structure(layout, classes, width, 1000, CPU, **more).structure

    assert chosen(Layout.shared, 1000, 512) is Structure.shared
    assert chosen(Layout.blocks, 10, 512) is Structure.blocks
    assert chosen(Layout.dense, 10, DENSE_LIMIT // 10) is Structure.dense
    plan = plan_structure(Layout.dense, 10, 512, 1000, CPU)
    assert plan.structure is Structure.products
    assert "C*E = 5120 is above 2048" in plan.reason
    assert chosen(Layout.dense, 10, 512, wanted=Structure.blocks) is Structure.blocks


def test_what_will_not_fit_is_refused_before_it_starts_and_the_cheaper_is_named(monkeypatch):
    monkeypatch.setattr(plan_module, "available_memory", lambda device: 1 << 30)
    with pytest.raises(
        ConfigError, match=r"blocks needs about 15\.6 GiB .*has 1\.0 GiB\. Set curvature\.structure=products"
    ):
        plan_structure(Layout.blocks, 1000, 836, 1000, CPU, Structure.blocks)
    assert plan_structure(Layout.blocks, 1000, 836, 1000, CPU).structure is Structure.products
    with pytest.raises(ConfigError, match=r"shared does not fit the loss\. Choose one of auto, dense, blocks"):
        plan_structure(Layout.dense, 3, 5, 10, CPU, Structure.shared)
    assert memory_estimate(Structure.dense, 3, 5, 10, copies=2) == 8 * 2 * 15**2
    need = memory_estimate(Structure.blocks, 10, 512, 1000)  # a half may be asked for; sfu chooses a quarter at most
    monkeypatch.setattr(plan_module, "available_memory", lambda device: 3 * need)
    assert plan_structure(Layout.blocks, 10, 512, 1000, CPU).structure is Structure.products
    assert plan_structure(Layout.blocks, 10, 512, 1000, CPU, Structure.blocks).structure is Structure.blocks


@pytest.mark.parametrize(
    ("layout", "classes", "width", "count", "expected"),
    [
        (Layout.shared, 10, 512, 1000, Structure.shared),
        (Layout.shared, 10, 4096, 400, Structure.products),
        (Layout.dense, 4, 12, 12, Structure.dense),
        (Layout.dense, 2, 1000, 1000, Structure.products),
        (Layout.blocks, 4, 12, 12, Structure.blocks),
        (Layout.blocks, 100, 512, 1000, Structure.products),
    ],
)
def test_the_quicker_structure_is_chosen_for_cross_validation_and_said(layout, classes, width, count, expected):
    plan = plan_structure(layout, classes, width, count, CPU, validated=True)
    assert plan.structure is expected
    assert ("are quicker than" in plan.reason) == (expected is Structure.products)
    assert plan_structure(layout, classes, width, count, CPU).structure is not Structure.products
    asked = next(structure for structure in Structure if structure.value == layout.value)
    assert plan_structure(layout, classes, width, count, CPU, asked, validated=True).structure is asked
