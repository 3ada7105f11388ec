"""Projections onto the cone, the derivative of the projection, and the eigen-solve that falls back to the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sfu.curvature.psd_fit.standard_form import Spectrum, project
from sfu.operators.spectral import eigh


def symmetric(size: int, seed: int) -> Tensor:
    matrix_DD = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (matrix_DD + matrix_DD.T) / 2


def test_projection_is_the_nearest_matrix_with_clipped_eigenvalues() -> None:
    basis_DD = torch.linalg.qr(symmetric(5, 1)).Q
    value_D = torch.tensor([-2.0, -1e-3, 0.0, 0.5, 3.0], dtype=torch.float64)
    expected_DD = (basis_DD * value_D.clamp(min=0)) @ basis_DD.T
    torch.testing.assert_close(project((basis_DD * value_D) @ basis_DD.T), expected_DD, rtol=0, atol=1e-12)
    assert torch.equal(project(torch.zeros(4, 4)), torch.zeros(4, 4))


@pytest.mark.parametrize("shift", [-9.0, -0.5, 0.5, 9.0])
def test_derivative_matches_finite_differences(shift: float) -> None:
    matrix_DD = symmetric(10, 3) + shift * torch.eye(10, dtype=torch.float64)
    direction_DD = symmetric(10, 4)
    step = 1e-6
    difference_DD = project(matrix_DD + step * direction_DD) - project(matrix_DD - step * direction_DD)
    found_DD = Spectrum.of(matrix_DD).derivative(direction_DD)
    torch.testing.assert_close(found_DD, difference_DD / (2 * step), rtol=0, atol=1e-7)


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
