"""The PSD fit: certificates, closed forms, structure, isolation, and settings. The reference is in its own file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sfu.curvature.psd_fit import (
    GradientMeasurements,
    LossMeasurements,
    Status,
    fit_psd,
)
from sfu.curvature.psd_fit.loss_form import LossForm
from sfu.curvature.psd_fit.problem import symmetric_term
from sfu.curvature.psd_fit.projected_gradient import solve_projected_gradient
from sfu.curvature.psd_fit.standard_form import perron_bound
from sfu.curvature.settings import curvature_settings
from sfu.errors import ConfigError, DataError
from tests.curvature.cases import assert_kkt, curvature, draw, fitted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def gradients(count: int, dimension: int, noise: float = 0.0, seed: int = 0) -> tuple[GradientMeasurements, Tensor]:
    delta_PD, _, truth_DD = draw(count, dimension, seed=seed)
    response_PD = delta_PD @ truth_DD
    generator = torch.Generator().manual_seed(seed + 1)
    noise_PD = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return GradientMeasurements.from_pairs(delta_PD, response_PD + noise * response_PD.std() * noise_PD), truth_DD


def objective(
    measurements: LossMeasurements | GradientMeasurements, value_DD: Tensor, mu: float, prior: Tensor
) -> float:
    return float(measurements.mean_square(value_DD) + mu / 2 * (value_DD - prior).square().sum())


LOSS_CASES = [  # P, D, noise, prior: constraint inactive, active but met, not met, overdetermined
    (20, 12, 0.0, 0.5),
    (60, 24, 0.3, 0.0),
    (100, 24, 6.0, 0.0),
    (40, 24, 9.0, -0.2),
    (150, 8, 0.5, 0.0),
]


@pytest.mark.parametrize(("count", "dimension", "noise", "prior"), LOSS_CASES)
@pytest.mark.parametrize("strength", [1e-8, 1e-3])
def test_loss_fit_satisfies_kkt(count: int, dimension: int, noise: float, prior: float, strength: float) -> None:
    delta_PD, target_P, _ = draw(count, dimension, noise)
    measurements = LossMeasurements(delta_PD, target_P)
    result = fit_psd(measurements, prior=prior, prior_strength=strength, tolerance=1e-13)
    eye_DD = torch.eye(dimension, dtype=torch.float64)
    # a gap g allows a gradient error of about sqrt(g times the condition number), and that is 1 / strength
    assert_kkt(measurements, result, 0 * eye_DD, prior * eye_DD, 1e-6 + 3 * (result.gap / strength) ** 0.5)
    assert result.objective == pytest.approx(
        objective(measurements, result.value_DD, result.mu, prior * eye_DD), rel=1e-9
    )


@pytest.mark.parametrize(("count", "noise"), [(60, 0.5), (60, 3.0), (30, 3.0), (10, 1.0)])
def test_gradient_fit_satisfies_kkt(count: int, noise: float) -> None:
    measurements, _ = gradients(count, 24, noise)
    generator = torch.Generator().manual_seed(5)
    lower_DD = torch.diag(0.02 * torch.rand(24, generator=generator, dtype=torch.float64))
    prior_DD = curvature(24, seed=9)
    result = fit_psd(measurements, lower_bound=lower_DD, prior=prior_DD, prior_strength=1e-3, tolerance=1e-12)
    assert result.algorithm == "dual_newton"
    assert_kkt(measurements, result, lower_DD, prior_DD, 1e-6)
    assert result.objective == pytest.approx(objective(measurements, result.value_DD, result.mu, prior_DD), rel=1e-9)


@pytest.mark.parametrize("algorithm", ["dual_newton", "projected_gradient"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_algorithms_agree(algorithm: str, kind: str) -> None:
    delta_PD, target_P, _ = draw(60, 12, 2.0)
    measurements = LossMeasurements(delta_PD, target_P) if kind == "loss" else gradients(40, 12, 3.0)[0]
    settings = {"prior_strength": 1e-4, "prior": 0.1, "lower_bound": 0.01, "tolerance": 1e-11}
    expected = fitted(fit_psd(measurements, **settings))
    found = fit_psd(measurements, algorithm=algorithm, **settings)
    assert found.algorithm == algorithm
    torch.testing.assert_close(fitted(found), expected, rtol=0, atol=1e-5)


def test_gap_bounds_the_error_of_an_early_stop() -> None:
    delta_PD, target_P, _ = draw(100, 16, 4.0)
    measurements = LossMeasurements(delta_PD, target_P)
    best = fit_psd(measurements, prior_strength=1e-3, tolerance=1e-13).objective
    for steps in (1, 5, 25):
        early = fit_psd(
            measurements, prior_strength=1e-3, algorithm="projected_gradient", max_iterations=steps, tolerance=1e-12
        )
        assert early.status is Status.MAX_ITERATIONS
        assert early.objective * (1 - early.gap) <= best * (1 + 1e-12) <= early.objective * (1 + 1e-12)
        assert "raise max_iterations" in early.message


def test_gradients_without_noise_return_the_curvature() -> None:
    for count in (24, 200):
        measurements, truth_DD = gradients(count, 24)
        result = fit_psd(measurements)
        assert result.algorithm == "unconstrained"
        torch.testing.assert_close(fitted(result), truth_DD, rtol=0, atol=1e-10)


def test_the_data_terms_are_mean_squares_of_residuals() -> None:
    delta_PD, target_P, truth_DD = draw(30, 8, 0.5)
    value_DD, response_PD = curvature(8, 3), delta_PD @ truth_DD + 0.1
    losses, pairs = LossMeasurements(delta_PD, target_P), GradientMeasurements.from_pairs(delta_PD, response_PD)
    residual_P = torch.stack([d @ value_DD @ d / 2 for d in delta_PD]) - target_P
    torch.testing.assert_close(losses.mean_square(value_DD), residual_P.square().mean())
    torch.testing.assert_close(pairs.mean_square(value_DD), (delta_PD @ value_DD - response_PD).square().sum(1).mean())


def test_inactive_loss_fit_is_the_kernel_ridge_formula() -> None:
    delta_PD, target_P, _ = draw(10, 12)
    prior, mu = 0.3, 50.0
    result = fit_psd(LossMeasurements(delta_PD, target_P), prior=prior, mu=mu)
    gram_PP = (delta_PD @ delta_PD.T) ** 2 / 4 + mu * 10 / 2 * torch.eye(10, dtype=torch.float64)
    dual_P = torch.linalg.solve(gram_PP, target_P - prior * delta_PD.square().sum(1) / 2)
    expected = prior * torch.eye(12, dtype=torch.float64) + delta_PD.T @ (dual_P[:, None] * delta_PD) / 2
    assert result.algorithm == "unconstrained"
    torch.testing.assert_close(fitted(result), expected)


def test_enough_losses_return_the_curvature() -> None:
    delta_PD, target_P, truth_DD = draw(120, 12)
    torch.testing.assert_close(
        fitted(fit_psd(LossMeasurements(delta_PD, target_P), prior_strength=1e-13)), truth_DD, rtol=0, atol=1e-8
    )


def test_default_mu_is_relative_to_the_largest_curvature() -> None:
    delta_PD, target_P, _ = draw(30, 12)
    largest = float(torch.linalg.eigvalsh((delta_PD @ delta_PD.T) ** 2 / 4)[-1])
    assert fit_psd(LossMeasurements(delta_PD, target_P)).mu == pytest.approx(1e-8 * 2 / 30 * largest, rel=1e-6)


@pytest.mark.parametrize(("lower", "prior"), [(0.0, 0.0), (0.01, 0.2), (0.3, 0.1), (0.0, -0.2)])
def test_span_reduction_equals_the_full_problem(lower: float, prior: float) -> None:
    delta_PD, target_P, _ = draw(9, 30, 2.0)
    measurements = LossMeasurements(delta_PD, target_P)
    settings = {"mu": 0.05, "tolerance": 1e-13}
    reduced = fit_psd(measurements, lower_bound=lower, prior=prior, **settings)
    ones_D = torch.ones(30, dtype=torch.float64)
    full = fit_psd(measurements, lower_bound=lower * ones_D, prior=prior * ones_D, **settings)
    term = symmetric_term("prior", prior, 30)
    form = LossForm(measurements, symmetric_term("lower_bound", lower, 30), term, 0.05, 1e-8)
    assert form.base_DD.shape == (9, 9)
    torch.testing.assert_close(fitted(reduced), fitted(full), rtol=0, atol=1e-7)
    assert reduced.objective == pytest.approx(full.objective, rel=1e-9)


def test_matrix_bound_is_respected() -> None:
    delta_PD, target_P, truth_DD = draw(60, 20, 3.0)
    lower_DD = 0.5 * truth_DD
    value_DD = fitted(fit_psd(LossMeasurements(delta_PD, target_P), lower_bound=lower_DD))
    assert float(torch.linalg.eigvalsh(value_DD - lower_DD)[0]) >= -1e-10


def test_all_losses_negative_gives_the_bound() -> None:
    delta_PD, target_P, _ = draw(40, 10)
    result = fit_psd(LossMeasurements(delta_PD, -target_P), lower_bound=0.02)
    torch.testing.assert_close(fitted(result), 0.02 * torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-9)


def test_perturbations_of_zero_give_the_prior() -> None:
    zeros_PD = torch.zeros(5, 4, dtype=torch.float64)
    for measurements in (
        LossMeasurements(zeros_PD, torch.ones(5, dtype=torch.float64)),
        GradientMeasurements.from_pairs(zeros_PD, zeros_PD),
    ):
        value_DD = fitted(fit_psd(measurements, prior=0.7))
        torch.testing.assert_close(value_DD, 0.7 * torch.eye(4, dtype=torch.float64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_every_device_gives_the_same_answer_in_float64(device: str, kind: str) -> None:
    delta_PD, target_P, truth_DD = draw(100, 32, 1.0)
    if kind == "loss":
        here = LossMeasurements(delta_PD, target_P)
        there = LossMeasurements(delta_PD.to(device), target_P.to(device))
    else:
        response_PD = delta_PD @ truth_DD + 0.3 * torch.randn(100, 32, dtype=torch.float64)
        here = GradientMeasurements.from_pairs(delta_PD, response_PD)
        there = GradientMeasurements.from_pairs(delta_PD.to(device), response_PD.to(device))
    expected = fitted(fit_psd(here, prior_strength=1e-6, tolerance=1e-12))
    result = fit_psd(there, prior_strength=1e-6, tolerance=1e-12)
    assert fitted(result).device.type == device
    assert result.value_DD.dtype is torch.float64
    torch.testing.assert_close(result.value_DD.cpu(), expected, rtol=0, atol=1e-6)


def test_float32_inputs_are_fitted_in_float64() -> None:
    delta_PD, target_P, _ = draw(40, 12, 0.5)
    result = fit_psd(LossMeasurements(delta_PD.float(), target_P.float()))
    assert fitted(result).dtype is torch.float64


def test_bad_measurements_are_data_errors() -> None:
    ones = torch.ones
    with pytest.raises(DataError, match="at least one row"):
        LossMeasurements(ones(0, 3), ones(0))
    with pytest.raises(DataError, match="3 rows"):
        LossMeasurements(ones(3, 2), ones(4))
    with pytest.raises(DataError, match=r"delta_PD holds 6 values that are not finite"):
        LossMeasurements(ones(3, 2) * float("nan"), ones(3))
    with pytest.raises(DataError, match="response_PD has shape"):
        GradientMeasurements.from_pairs(ones(3, 2), ones(3, 3))
    with pytest.raises(DataError, match="at least one row"):
        GradientMeasurements.from_pairs(ones(0, 2), ones(0, 2))
    with pytest.raises(DataError, match="response_PD holds"):
        GradientMeasurements.from_pairs(ones(3, 2), ones(3, 2) / 0)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"lower_bound": float("nan")}, DataError, "lower_bound is not finite"),
        ({"lower_bound": np.inf}, DataError, "lower_bound is not finite"),
        ({"prior": torch.ones(3)}, DataError, r"prior has shape \(3,\)"),
        ({"prior": torch.triu(torch.ones(4, 4))}, DataError, "not symmetric"),
        ({"mu": 0.0}, ConfigError, "do not determine"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], match: str) -> None:
    delta_PD, target_P, _ = draw(6, 4)
    with pytest.raises(error, match=match):
        fit_psd(LossMeasurements(delta_PD, target_P), **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prior_strength": 0.0}, r"curvature\.prior_strength=0\.0\. Give a finite number above 0"),
        ({"tolerance": 2.0}, r"curvature\.tolerance=2\.0\. Give a finite number above 0 and below 1"),
        ({"max_iterations": 0}, r"curvature\.max_iterations=0\. Give a whole number of at least 1"),
        ({"solver": "magic"}, r"curvature\.solver=magic is unknown"),
    ],
)
def test_the_estimator_checks_the_settings_of_the_fit(settings: dict, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        curvature_settings(**settings)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="do not span"):
        fit_psd(gradients(3, 6)[0], mu=0.0)
    delta_PD, target_P, _ = draw(60, 12, 3.0)
    assert fit_psd(LossMeasurements(delta_PD, target_P)).algorithm != "unconstrained"  # the constraint binds


@pytest.mark.parametrize("scale", [1e100, 1e200])
def test_overflow_is_a_status(scale: float) -> None:
    delta_PD, target_P, truth_DD = draw(30, 6, 1.0)
    for measurements in (
        LossMeasurements(delta_PD, target_P * scale),
        GradientMeasurements(truth_DD * scale, truth_DD * scale, scale),
    ):
        result = fit_psd(measurements)
        assert result.status is Status.CONVERGED or result.message
    result = fit_psd(LossMeasurements(delta_PD * scale, target_P))
    assert result.status is Status.FAILED
    assert "rescale" in result.message


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e6, 1e9])
def test_the_units_of_the_perturbations_do_not_matter(scale: float) -> None:
    delta_PD, target_P, _ = draw(30, 6, 1.0)
    plain = fitted(fit_psd(LossMeasurements(delta_PD, target_P), prior_strength=1e-6))
    scaled = fitted(fit_psd(LossMeasurements(delta_PD * scale, target_P * scale**2), prior_strength=1e-6))
    assert float((scaled - plain).norm() / plain.norm()) < 1e-3


def test_nothing_of_size_p_by_d_squared() -> None:
    delta_PD, target_P, _ = draw(300, 96, 0.5)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in out if isinstance(out, tuple | list) else (out,):
                if isinstance(item, Tensor):
                    largest = max(largest, item.numel())
            return out

    with Watch():
        fitted(fit_psd(LossMeasurements(delta_PD, target_P)))
    assert largest <= 300 * 300


def test_perron_bound_is_an_upper_bound_and_tight() -> None:
    generator = torch.Generator().manual_seed(3)
    for count in (1, 5, 40):
        matrix_PP = torch.rand(count, count, generator=generator, dtype=torch.float64)
        matrix_PP = matrix_PP @ matrix_PP.T
        exact = float(torch.linalg.eigvalsh(matrix_PP)[-1])
        assert exact * (1 - 1e-12) <= perron_bound(matrix_PP.mv, matrix_PP.diagonal()) <= exact * (1 + 1e-6)
    assert perron_bound(torch.zeros(3, 3).mv, torch.zeros(3)) == 0


@pytest.mark.parametrize("smallest", [-1e-6, -0.05])
def test_a_closed_form_that_violates_the_bound_a_little_is_refused(smallest: float) -> None:
    eye_DD = torch.eye(4, dtype=torch.float64)
    response_DD = torch.diag(torch.tensor([1.0, 0.5, 0.25, smallest], dtype=torch.float64))
    measurements = GradientMeasurements.from_pairs(eye_DD, response_DD)
    result = fit_psd(measurements)
    assert result.algorithm != "unconstrained"
    torch.testing.assert_close(fitted(result), response_DD.clamp(min=0), rtol=0, atol=1e-8)


@pytest.mark.parametrize("steps", [1, 40])
def test_the_gap_of_projected_gradient_is_primal_less_dual(steps: int) -> None:
    """The dual value at z is ``f(Y(z)) - |F(z)|^2 / (2c)``."""
    delta_PD, target_P, _ = draw(60, 12, 3.0)
    zero = symmetric_term("bound", 0.0, 12)
    form = LossForm(LossMeasurements(delta_PD, target_P), zero, zero, None, 1e-3)
    found = solve_projected_gradient(form, 1e-14, steps)
    spectrum, image = form.evaluate(found.dual)
    residual = image - form.target + form.weight * found.dual
    dual = form.value(spectrum.projection(), image) - float(residual.square().sum()) / (2 * form.weight)
    assert found.relative_gap == pytest.approx(form.relative_gap(found.value - dual, found.value), rel=1e-6)
