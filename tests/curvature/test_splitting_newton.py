"""The fit of losses that no matrix can meet: optimality, agreement with other solvers, and the cost in steps."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sfu.curvature.psd_fit import LossMeasurements, Status, fit_psd
from sfu.curvature.psd_fit.compressed_loss_form import CompressedLossForm
from sfu.curvature.psd_fit.loss_form import LossForm
from sfu.curvature.psd_fit.problem import symmetric_term
from sfu.curvature.psd_fit.splitting_newton import solve_splitting_newton
from sfu.operators.threads import one_thread
from tests.curvature.cases import assert_kkt, draw, fitted

KINDS = ["independent", "duplicates", "antithetic", "low rank", "some zero", "scaled"]


def problem(kind: str, count: int, dimension: int, noise: float, seed: int) -> LossMeasurements:
    delta_PD, target_P, truth_DD = draw(count, dimension, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    half = count // 2
    if kind == "duplicates":
        delta_PD = torch.cat([delta_PD[: count - half], delta_PD[:half]])
    elif kind == "antithetic":
        delta_PD = torch.cat([delta_PD[: count - half], -delta_PD[:half]])
    elif kind == "low rank":
        rank = max(1, dimension // 2)
        delta_PD = delta_PD[:, :rank] @ torch.randn(rank, dimension, generator=generator, dtype=torch.float64)
    elif kind == "some zero":
        delta_PD[::3] = 0
    elif kind == "scaled":
        delta_PD = 1e3 * delta_PD / torch.arange(1, dimension + 1)
    target_P = ((delta_PD @ truth_DD) * delta_PD).sum(1) / 2
    size = float(target_P.square().mean()) ** 0.5
    return LossMeasurements(
        delta_PD, target_P + noise * size * torch.randn(count, generator=generator, dtype=torch.float64)
    )


def loss_form(measurements: LossMeasurements, strength: float, kind: type[LossForm] = LossForm) -> LossForm:
    zero = symmetric_term("lower_bound", 0.0, measurements.dimension)
    return kind(measurements, zero, zero, None, strength)


def dual_value(form: LossForm, dual: Tensor) -> float:
    """A lower bound on the minimum of f, from nothing but the definition of the dual."""
    positive_D = torch.linalg.eigvalsh(form.base_DD + form.adjoint(dual)).clamp(min=0)
    norms = form.base_DD.square().sum() - positive_D.square().sum() - form.weight * dual.square().sum()
    return float(norms / 2 + form.target @ dual)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    dimension=st.integers(1, 12),
    share=st.floats(0.05, 1.3),
    noise=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    lower=st.sampled_from([0.0, 0.02, "diagonal"]),
    prior=st.sampled_from([0.0, 0.1, -0.1, "matrix"]),
    strength=st.sampled_from([1e-8, 1e-4]),
    seed=st.integers(0, 10_000),
)
@example("some zero", 12, 0.2, 1.0, "diagonal", "matrix", 1e-8, 0)
@example("independent", 12, 0.5, 0.1, 0.0, 0.0, 1e-8, 0)
@example("duplicates", 10, 0.2, 1.0, 0.0, -0.1, 1e-8, 0)
def test_every_fit_converges_to_a_point_that_is_optimal(
    kind: str,
    dimension: int,
    share: float,
    noise: float,
    lower: float | str,
    prior: float | str,
    strength: float,
    seed: int,
) -> None:
    count = max(1, round(share * dimension * (dimension + 1) / 2))
    measurements = problem(kind, count, dimension, noise, seed)
    generator = torch.Generator().manual_seed(seed)
    matrix_DD = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64) / 10
    eye_DD = torch.eye(dimension, dtype=torch.float64)
    lower_DD = matrix_DD.diagonal().abs().diag() / 2 if lower == "diagonal" else float(lower) * eye_DD
    prior_DD = matrix_DD + matrix_DD.T if prior == "matrix" else float(prior) * eye_DD
    result = fit_psd(measurements, lower_bound=lower_DD, prior=prior_DD, prior_strength=strength)
    assert result.algorithm in ("unconstrained", "dual_newton")
    # a gap g allows a gradient error of about sqrt(g times the condition number), and that is 1 / strength
    assert_kkt(measurements, result, lower_DD, prior_DD, 1e-6 + 3 * (result.gap / strength) ** 0.5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_objective_is_clarabels(kind: str) -> None:
    cvxpy = pytest.importorskip("cvxpy")
    pytest.importorskip("clarabel")
    measurements = problem(kind, 14, 6, 1.0, seed=3)
    ours = fit_psd(measurements, prior=0.05, lower_bound=0.01, prior_strength=1e-4, tolerance=1e-11)
    eye, unit = torch.eye(6).numpy(), ours.objective  # conic solvers want numbers of size 1
    value = cvxpy.Variable((6, 6), PSD=True)
    delta_PD = measurements.delta_PD
    rows = (delta_PD[:, :, None] * delta_PD[:, None, :]).flatten(1).numpy() / 2
    misfit = rows @ cvxpy.vec(value + 0.01 * eye, order="C") - measurements.target_P.numpy()
    anchor = cvxpy.sum_squares(value + (0.01 - 0.05) * eye)
    least = cvxpy.sum_squares(misfit) / (14 * unit) + ours.mu / (2 * unit) * anchor
    theirs = cvxpy.Problem(cvxpy.Minimize(least)).solve(solver="CLARABEL")
    assert fitted(ours).shape == (6, 6)
    assert theirs == pytest.approx(1.0, rel=1e-6)
    assert theirs >= 1 - 1e-7  # ours is the lower one, to the accuracy of theirs


@pytest.mark.parametrize(("count", "dimension", "noise"), [(150, 24, 0.1), (60, 24, 3.0), (100, 32, 1.0), (40, 8, 1.0)])
def test_the_dual_value_proves_the_minimum(count: int, dimension: int, noise: float) -> None:
    form = loss_form(problem("independent", count, dimension, noise, seed=0), 1e-8)
    found = solve_splitting_newton(form, 1e-10, 200)
    least = dual_value(form, found.dual)
    assert found.relative_gap <= 1e-10
    assert float(torch.linalg.eigvalsh(found.matrix_DD)[0]) >= -1e-12
    assert found.value == pytest.approx(form.value(found.matrix_DD, form.forward(found.matrix_DD)), rel=1e-12)
    assert -1e-12 * found.value <= found.value - least <= 1e-9 * found.value


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_nearly_determined_noisy_losses_take_few_steps(noise: float) -> None:
    """Between D^2/8 and D^2/2 losses, projected gradient took hundreds to thousands of steps."""
    measurements = problem("independent", 160, 24, noise, seed=0)
    quick = fit_psd(measurements, prior_strength=1e-6)
    slow = fit_psd(measurements, prior_strength=1e-6, algorithm="projected_gradient")
    assert quick.iterations < 80 < slow.iterations
    assert quick.objective == pytest.approx(slow.objective, rel=3e-8)
    value_DD = fitted(slow)
    assert float((fitted(quick) - value_DD).norm()) <= 1e-3 * float(value_DD.norm())


def test_compression_changes_nothing() -> None:
    measurements = problem("independent", 120, 8, 1.0, seed=1)
    plain, compressed = loss_form(measurements, 1e-6), loss_form(measurements, 1e-6, CompressedLossForm)
    assert compressed.target.shape == (36,)
    assert compressed.mu == pytest.approx(plain.mu, rel=1e-6)
    results = [solve_splitting_newton(form, 1e-12, 200) for form in (plain, compressed)]
    torch.testing.assert_close(results[0].matrix_DD, results[1].matrix_DD, rtol=0, atol=1e-8)
    objectives = [form.objective(found.value) for form, found in zip((plain, compressed), results, strict=True)]
    assert objectives[0] == pytest.approx(objectives[1], rel=1e-9)
    chosen = fit_psd(measurements, prior_strength=1e-6, tolerance=1e-12)
    assert chosen.objective == pytest.approx(objectives[0], rel=1e-9)


def test_a_budget_is_kept() -> None:
    measurements = problem("independent", 150, 24, 0.3, seed=0)
    for limit in (1, 10, 27):
        result = fit_psd(measurements, algorithm="dual_newton", max_iterations=limit)
        assert result.iterations <= limit
        assert result.status is Status.MAX_ITERATIONS
        assert torch.isfinite(result.value_DD).all()


def test_one_thread_ends_with_its_block() -> None:
    seen: list[int] = []

    def work() -> None:
        torch.set_num_threads(2)
        with one_thread(True):
            seen.append(torch.get_num_threads())
        with one_thread(False):
            seen.append(torch.get_num_threads())
        with suppress(ZeroDivisionError), one_thread(True):
            seen.append(1 // 0)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.set_num_threads(before)  # some builds apply a thread's number to the whole process
    assert seen == [1, 2, 2]
