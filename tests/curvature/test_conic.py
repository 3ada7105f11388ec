"""fit_psd against the same problem given to a modelling language and a conic solver."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, Measurements, Status, fit_psd
from sfu.curvature.psd_fit.conic import fit_psd_conic
from sfu.errors import ConfigError
from tests.curvature.cases import fitted

pytest.importorskip("cvxpylayers")  # not for Python 3.14

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def term(kind: str, dimension: int, scale: float, generator: torch.Generator) -> float | Tensor:
    if kind == "zero":
        return 0.0
    if kind == "scalar":
        return scale
    if kind == "diagonal":
        return scale * torch.rand(dimension, generator=generator, dtype=torch.float64)
    matrix_DD = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    return scale * (matrix_DD + matrix_DD.T) / 2


def problem(kind: str, count: int, dimension: int, noise: float, generator: torch.Generator) -> Measurements:
    factor_DD = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    truth_DD = factor_DD @ factor_DD.T / dimension
    delta_PD = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    response_PD = delta_PD @ truth_DD
    if kind == "loss":
        noise_P = torch.randn(count, generator=generator, dtype=torch.float64)
        return LossMeasurements(delta_PD, (response_PD * delta_PD).sum(1) / 2 + noise * noise_P)
    noise_PD = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    return GradientMeasurements.from_pairs(delta_PD, response_PD + noise * noise_PD)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["loss", "gradient"]),
    dimension=st.integers(1, 6),
    count=st.integers(1, 30),
    noise=st.sampled_from([0.0, 0.3, 3.0]),
    lower=st.sampled_from(["zero", "scalar", "diagonal", "matrix"]),
    prior=st.sampled_from(["zero", "scalar", "diagonal", "matrix"]),
    scale=st.sampled_from([-0.5, 0.2, 1.0]),
    strength=st.sampled_from([1e-3, 1e-1]),
    seed=st.integers(0, 10_000),
)
@example("loss", 6, 30, 3.0, "matrix", "matrix", 1.0, 1e-3, 0)
@example("gradient", 6, 3, 3.0, "diagonal", "matrix", 1.0, 1e-3, 1)
def test_matches_the_reference(
    kind: str,
    dimension: int,
    count: int,
    noise: float,
    lower: str,
    prior: str,
    scale: float,
    strength: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    measurements = problem(kind, count, dimension, noise, generator)
    bounds = {
        "lower_bound": term(lower, dimension, 0.3, generator),
        "prior": term(prior, dimension, scale, generator),
    }
    ours = fit_psd(measurements, prior_strength=strength, tolerance=1e-11, **bounds)
    found_DD = fitted(ours)
    reference = fit_psd_conic(measurements, mu=ours.mu, **bounds)
    scale_of_data = float(measurements.mean_square(torch.zeros_like(found_DD)))
    assert ours.objective <= reference.objective + 1e-6 * reference.objective + 1e-9 * scale_of_data
    assert ours.objective == pytest.approx(reference.objective, rel=1e-4, abs=1e-6 * scale_of_data)
    assert ours.min_eigenvalue >= -1e-10
    torch.testing.assert_close(found_DD, reference.value_DD, rtol=0, atol=2e-3 * (1 + float(found_DD.norm())))


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_reference_gradients_match_finite_differences(kind: str) -> None:
    """Through the layer, and independently through finite differences of fit_psd."""
    generator = torch.Generator().manual_seed(0)
    measurements = problem(kind, 8, 4, 1.0, generator)
    mu = fit_psd(measurements, prior_strength=1e-2).mu
    weight_DD = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    weight_DD = (weight_DD + weight_DD.T) / 2
    observed = (measurements.target_P if kind == "loss" else measurements.cross_DD).clone().requires_grad_()

    def rebuilt(values: Tensor) -> Measurements:
        if kind == "loss":
            return LossMeasurements(measurements.delta_PD, values)
        return GradientMeasurements(measurements.gram_DD, (values + values.T) / 2, measurements.response_square)

    value_DD = fit_psd_conic(rebuilt(observed), mu=mu).value_DD
    (found,) = torch.autograd.grad((value_DD * weight_DD).sum(), observed)
    flat, step = torch.zeros(observed.numel(), dtype=torch.float64), 1e-5
    for index in range(observed.numel()):
        move = torch.zeros_like(flat)
        move[index] = step
        ends = [
            fitted(fit_psd(rebuilt(observed.detach() + sign * move.view_as(observed)), mu=mu, tolerance=1e-14))
            for sign in (1, -1)
        ]
        flat[index] = ((ends[0] - ends[1]) * weight_DD).sum() / (2 * step)
    assert float(flat.norm()) > 0.1
    torch.testing.assert_close(found.flatten(), flat, rtol=1e-4, atol=1e-5)


def test_reference_refuses_what_it_cannot_do() -> None:
    wide = LossMeasurements(torch.ones(2, 65), torch.ones(2))
    with pytest.raises(ConfigError, match="D is 65"):
        fit_psd_conic(wide, mu=1.0)
    with pytest.raises(ConfigError, match="mu is 0"):
        fit_psd_conic(LossMeasurements(torch.ones(2, 3), torch.ones(2)), mu=0.0)


def test_a_solution_that_is_not_accurate_is_not_called_converged() -> None:
    generator = torch.Generator().manual_seed(0)
    result = fit_psd_conic(problem("loss", 30, 6, 0.1, generator), mu=1e-3, iterations=20)
    assert result.status is Status.STALLED
    assert "above the certified minimum" in result.message
