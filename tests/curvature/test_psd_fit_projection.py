"""Projections onto the cone, the derivative of the projection, and the eigen-solve that falls back to the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfu.curvature.psd_fit import GradientMeasurements, LossMeasurements, fit_psd
from sfu.curvature.psd_fit.projection import Spectrum, project_eigh, project_newton_schulz
from sfu.operators.spectral import eigh

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def symmetric(size: int, seed: int) -> Tensor:
    matrix_DD = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (matrix_DD + matrix_DD.T) / 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_newton_schulz_equals_eigh(device: str, scale: float, shift: float) -> None:
    matrix_DD = scale * (symmetric(20, 0) + shift * torch.eye(20, dtype=torch.float64)).to(device)
    torch.testing.assert_close(
        project_newton_schulz(matrix_DD), project_eigh(matrix_DD), rtol=0, atol=1e-10 * float(matrix_DD.norm())
    )


def test_newton_schulz_of_singular_matrices() -> None:
    low_DD = symmetric(3, 1)
    basis_FD = torch.linalg.qr(torch.randn(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).Q
    matrix_FF = basis_FD @ low_DD @ basis_FD.T
    torch.testing.assert_close(project_newton_schulz(matrix_FF), project_eigh(matrix_FF), rtol=0, atol=1e-12)
    zeros_DD = torch.zeros(4, 4)
    assert torch.equal(project_newton_schulz(zeros_DD), zeros_DD)


@pytest.mark.parametrize("shift", [-9.0, -0.5, 0.5, 9.0])
def test_derivative_matches_finite_differences(shift: float) -> None:
    matrix_DD = symmetric(10, 3) + shift * torch.eye(10, dtype=torch.float64)
    direction_DD = symmetric(10, 4)
    step = 1e-6
    difference_DD = project_eigh(matrix_DD + step * direction_DD) - project_eigh(matrix_DD - step * direction_DD)
    found_DD = Spectrum.of(matrix_DD).derivative(direction_DD)
    torch.testing.assert_close(found_DD, difference_DD / (2 * step), rtol=0, atol=1e-7)


def test_fit_by_newton_schulz_equals_fit_by_eigh() -> None:
    generator = torch.Generator().manual_seed(0)
    delta_PD = torch.randn(60, 12, generator=generator, dtype=torch.float64)
    target_P = delta_PD.square().sum(1) / 20 + torch.randn(60, generator=generator, dtype=torch.float64)
    response_PD = torch.randn(60, 12, generator=generator, dtype=torch.float64)
    for measurements in (
        LossMeasurements(delta_PD, target_P),
        GradientMeasurements.from_pairs(delta_PD, response_PD),
    ):
        values = [
            fit_psd(
                measurements,
                algorithm="projected_gradient",
                projection=projection,
                prior_strength=1e-3,
                tolerance=1e-11,
            ).require()
            for projection in ("eigh", "newton_schulz")
        ]
        torch.testing.assert_close(values[1], values[0], rtol=0, atol=1e-6)


class FailingOnce:
    """An eigen-solve that fails for tensors that are not on the CPU, tried without one."""

    def __init__(self) -> None:
        self.calls: list[torch.device] = []
        self.real = torch.linalg.eigh

    def __call__(self, matrix_DD: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(matrix_DD.device)
        if matrix_DD.device.type != "cpu":
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return self.real(matrix_DD)


def test_a_failing_eigh_is_repeated_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    solver = FailingOnce()
    monkeypatch.setattr(torch.linalg, "eigh", solver)
    plain_DD = symmetric(5, 6)

    class Elsewhere:
        """Stands in for a tensor on a GPU."""

        device, dtype, shape = torch.device("cuda"), torch.float64, (5, 5)

        def double(self) -> Elsewhere:
            return self

        def cpu(self) -> Tensor:
            return plain_DD

    monkeypatch.setattr(Tensor, "to", lambda self, *_: self)
    value_D, _ = eigh(Elsewhere())  # type: ignore[arg-type]
    torch.testing.assert_close(value_D, torch.linalg.eigvalsh(plain_DD))
    assert [device.type for device in solver.calls] == ["cuda", "cpu"]
    assert "repeated on the CPU" in caplog.text


def test_a_failing_eigh_on_the_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.raises(torch.linalg.LinAlgError):
        eigh(torch.eye(3))
