"""The curvature that a Newton step inverted, kept so that theory can be checked against the retained data.

Shapes: B blocks of side K (:mod:`sfu.operators.explicit`), C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.base import CurvatureOperator
from sfu.operators.explicit import ExplicitOperator
from sfu.unlearning.further_steps import Candidate

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 4096
"""Side of the largest matrix that is formed of products."""
_NAMES = ("rho", "scale", "floor", "noise_sigma", "is_safe")


@dataclass(frozen=True)
class StepCurvature:
    """A step ``end = w* + c V_f/V_r (H + rho R)^-1 (g_f - V/V_f g)``, before noise.

    Attributes:
        estimate_BKK: The estimated Hessian H, without damping.
        end_CE: Parameters after the step, before noise.
        rho: Damping; 0 if ``is_safe``.
        scale: The factor c.
        floor: Eigenvalues of H below it were raised to it.
        noise_sigma: Standard deviation of the noise that was added.
        is_safe: Whether H was not used at all, and the identity took the place of the damped H.
    """

    estimate_BKK: Tensor
    end_CE: Tensor
    rho: float
    scale: float
    floor: float = 0.0
    noise_sigma: float = 0.0
    is_safe: bool = False

    @classmethod
    def of(cls, chosen: Candidate, end_CE: Tensor, layout: Layout, noise_sigma: float) -> StepCurvature | None:
        """Return that of a step; ``None`` if there was no step, or if the matrices would be too large."""
        choice, blocks_BKK = chosen.choice, _blocks(chosen.operator, end_CE, layout)
        if blocks_BKK is None or choice.scale == 0:
            return None
        rho = 0.0 if math.isinf(choice.rho) else choice.rho
        return cls(blocks_BKK, end_CE, rho, choice.scale, chosen.floor, noise_sigma, choice.is_safe)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors, for a file."""
        numbers = torch.tensor([float(getattr(self, name)) for name in _NAMES], dtype=torch.float64)
        return {"estimate": self.estimate_BKK, "end": self.end_CE, "numbers": numbers}

    @classmethod
    def restored(cls, estimate_BKK: Tensor, end_CE: Tensor, numbers: Tensor) -> StepCurvature:
        """Return what :meth:`tensors` has written.

        Raises:
            ValueError: The shapes do not fit each other.
        """
        (n_blocks, side, other), (n_classes, width) = estimate_BKK.shape, end_CE.shape
        if (n_blocks, side) not in {(1, width), (n_classes, width), (1, n_classes * width)} or side != other:
            raise ValueError(f"blocks {list(estimate_BKK.shape)} are no Hessian of parameters {list(end_CE.shape)}")
        if numbers.shape != (len(_NAMES),) or not bool(numbers[1] != 0):
            raise ValueError(f"{numbers.tolist()} are not {', '.join(_NAMES)}")
        rho, scale, floor, noise_sigma, is_safe = numbers.tolist()
        return cls(estimate_BKK, end_CE, rho, scale, floor, noise_sigma, bool(is_safe))

    def inverse(self, right_CE: Tensor, regularized_E: Tensor) -> Tensor:
        """Return ``c (H + rho R)^-1`` times a vector, as the step had it."""
        if self.is_safe:
            return self.scale * right_CE
        operator = ExplicitOperator(self.estimate_BKK, right_CE.shape[0], regularized_E)
        return self.scale * operator.damped().solve(right_CE, self.rho, floor=self.floor)

    def eigenvalues(self, regularized_E: Tensor) -> Tensor:
        """Return the eigenvalues of ``(H + rho R) / c``, with biases eliminated."""
        if self.is_safe:
            return self.estimate_BKK.new_tensor([1 / self.scale])
        operator = ExplicitOperator(self.estimate_BKK, self.end_CE.shape[0], regularized_E)
        found = operator.damped().eigenvalues
        assert found is not None
        return (found.clamp(min=self.floor) + self.rho) / self.scale


def _blocks(operator: CurvatureOperator, like_CE: Tensor, layout: Layout) -> Tensor | None:
    """Return the blocks of an operator, formed by products with unit vectors if it does not hold them."""
    if isinstance(operator, ExplicitOperator):
        return operator.blocks_BKK
    n_classes, width = like_CE.shape
    side = n_classes * width if layout is Layout.dense else width
    if layout is Layout.products or side > _LARGEST:
        return None
    unit_KK = torch.eye(side, dtype=like_CE.dtype, device=like_CE.device)
    if layout is Layout.dense:
        return operator.matmul(unit_KK.unflatten(1, (n_classes, width))).flatten(1)[None]
    blocks_CEE = operator.matmul(unit_KK[:, None].expand(-1, n_classes, -1)).transpose(0, 1).contiguous()
    return blocks_CEE[:1] if layout is Layout.shared else blocks_CEE
