r"""Targeted adversarial examples by projected gradient descent within an L2 ball, in the space of the features.

.. math:: x \leftarrow \Pi_{\|x - x_0\| \le \epsilon}\!\left(x - \alpha \frac{g}{\|g\|}\right),
          \qquad g = \nabla_x\, CE(f(x; w), t)

Source: Madry et al., ICLR 2018 (L2, targeted), started at a random point of the ball as in advertorch's L2PGDAttack,
which L2UL uses. Images are kept in [0, 1] there; features have no range.

Shapes: B rows, D features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sfu.heads.base import Head

_NUMBERS = 1 << 17
"""Features attacked at a time, in numbers: few enough for the cache."""


@dataclass(frozen=True)
class Attack:
    """An L2 attack.

    Attributes:
        radius: epsilon.
        steps: How many.
        step_size: alpha.
    """

    radius: float
    steps: int
    step_size: float

    def perturb(self, head: Head, features_BD: Tensor, targets_B: Tensor, generator: torch.Generator) -> Tensor:
        """Adversarial examples, ``[B, D]``, in the dtype of the features (float32 at least)."""
        parameters = head.parameters_CE.to(features_BD.dtype)
        drawn_BD = torch.randn(features_BD.shape, generator=generator).to(features_BD)
        length_B1 = torch.rand(features_BD.shape[0], 1, generator=generator).to(features_BD)
        start_BD = features_BD + self.radius * length_B1 * drawn_BD / _norm(drawn_BD)
        step = max(1, _NUMBERS // features_BD.shape[1])
        parts = zip(features_BD.split(step), start_BD.split(step), targets_B.split(step), strict=True)
        return torch.cat([self._chunk(head, parameters, *part) for part in parts])

    def _chunk(self, head: Head, parameters: Tensor, centre_BD: Tensor, point_BD: Tensor, targets_B: Tensor) -> Tensor:
        for _ in range(self.steps):
            point_BD = point_BD.detach().requires_grad_()
            loss = cross_entropy(head.outputs(point_BD, parameters), targets_B, reduction="sum")
            (gradient_BD,) = torch.autograd.grad(loss, point_BD)
            away_BD = point_BD.detach() - self.step_size * gradient_BD / _norm(gradient_BD) - centre_BD
            point_BD = centre_BD + away_BD * (self.radius / _norm(away_BD)).clamp(max=1.0)
        return point_BD.detach()


def _norm(vectors_BD: Tensor) -> Tensor:
    """Of each row, never 0."""
    return vectors_BD.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors_BD.dtype).tiny)
