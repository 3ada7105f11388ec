"""What tests of the PSD fit share."""

from __future__ import annotations

from torch import Tensor

from sfu.curvature.psd_fit import PsdFitResult, Status


def fitted(result: PsdFitResult) -> Tensor:
    """The matrix of a fit that reached its tolerance."""
    assert result.status is Status.CONVERGED, result.message
    assert result.value_DD is not None
    return result.value_DD
