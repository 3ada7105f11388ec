"""What tests of the PSD fit share."""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, PsdFitResult, Status


def fitted(result: PsdFitResult) -> Tensor:
    """The matrix of a fit that reached its tolerance."""
    assert result.status is Status.CONVERGED, result.message
    assert result.value_DD is not None
    return result.value_DD


def curvature(dimension: int, seed: int = 0, decades: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis_DD = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)).Q
    return (basis_DD * (0.4 * torch.logspace(-decades, 0, dimension, dtype=torch.float64))) @ basis_DD.T


def draw(count: int, dimension: int, noise: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Perturbations, noisy half quadratic forms, and the curvature behind them."""
    generator = torch.Generator().manual_seed(seed)
    truth_DD = curvature(dimension, seed)
    delta_PD = torch.randn(count, dimension, generator=generator, dtype=torch.float64)
    target_P = ((delta_PD @ truth_DD) * delta_PD).sum(1) / 2
    noise_P = torch.randn(count, generator=generator, dtype=torch.float64)
    return delta_PD, target_P + (noise * target_P.std() if noise else 0.0) * noise_P, truth_DD


def assert_kkt(
    measurements: LossMeasurements | GradientMeasurements,
    result: PsdFitResult,
    lower: Tensor,
    prior: Tensor,
    tolerance: float,
) -> None:
    """Gradient S of the objective by autograd: S >= 0 and <S, X - L> = 0, relative to the gradient's own terms."""
    value_DD = fitted(result).clone().requires_grad_()
    data_term = measurements.mean_square(value_DD)
    (data_DD,) = torch.autograd.grad(data_term, value_DD)
    data_DD = (data_DD + data_DD.T) / 2
    value_DD = value_DD.detach()
    prior_DD = result.mu * (value_DD - prior)
    slack_DD = data_DD + prior_DD
    scale = float(data_DD.norm() + prior_DD.norm()) + 1e-300
    assert float(torch.linalg.eigvalsh(slack_DD)[0]) >= -tolerance * scale
    assert abs(float((slack_DD * (value_DD - lower)).sum())) <= tolerance * scale * float((value_DD - lower).norm())
    assert result.min_eigenvalue >= -1e-10
    assert float(torch.linalg.eigvalsh(value_DD - lower)[0]) >= -1e-10
