r"""Targeted adversarial examples by projected gradient descent within an L2 ball, in the space of the features.

.. math:: x \leftarrow \Pi_{\|x - x_0\| \le \epsilon}\!\left(x - \alpha \frac{g}{\|g\|}\right),
          \qquad g = \nabla_x\, CE(f(x; w), t)

Source: Madry et al., ICLR 2018 (L2, targeted). The start lies in a uniformly random direction from :math:`x_0`, at a
distance drawn uniformly from 0 to epsilon. advertorch's L2PGDAttack, which L2UL uses, starts on the way from the image
to one of uniform noise in [0, 1], which is on the surface of the ball for images, and clips to [0, 1]; features have no
range.

Shapes: B rows, D features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import one_hot

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS = 1 << 17
"""Numbers in a chunk of rows: few enough for the CPU's cache."""


@dataclass(frozen=True)
class Attack:
    """Settings of the attack.

    Attributes:
        radius: epsilon, the largest distance from the row attacked, in the units of the features.
        steps: Number of gradient steps.
        step_size: alpha, the length of a step, in the units of the features.
        numbers: Numbers in a chunk of rows, which bounds the memory.
    """

    radius: float
    steps: int
    step_size: float
    numbers: int = _NUMBERS

    def perturb(self, head: Head, features_BD: Tensor, targets_B: Tensor, generator: torch.Generator) -> Tensor:
        """Return adversarial examples, ``[B, D]``, in the dtype of the features (float32 at least)."""
        drawn_BD = torch.randn(features_BD.shape, generator=generator).to(features_BD)
        length_B1 = self.radius * torch.rand(features_BD.shape[0], 1, generator=generator).to(features_BD)
        attack, width = self._within_span, head.n_classes
        if head.feature_weights_CD is None:
            attack, width = self._anywhere, features_BD.shape[1]
        step = max(1, self.numbers // width)
        parts = zip(*(rows.split(step) for rows in (features_BD, drawn_BD, length_B1, targets_B)), strict=True)
        return torch.cat([attack(head, *part) for part in parts])

    def _anywhere(
        self, head: Head, centre_BD: Tensor, drawn_BD: Tensor, length_B1: Tensor, targets_B: Tensor
    ) -> Tensor:
        """Attack any head, by a reverse pass for every step."""
        parameters = head.parameters_CE.to(centre_BD.dtype)
        point_BD = centre_BD + length_B1 * drawn_BD / _norm(drawn_BD)
        for _ in range(self.steps):
            point_BD = point_BD.detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(head.outputs(point_BD, parameters), targets_B, reduction="sum")
            (gradient_BD,) = torch.autograd.grad(loss, point_BD)
            away_BD = point_BD.detach() - self.step_size * gradient_BD / _norm(gradient_BD) - centre_BD
            point_BD = centre_BD + away_BD * (self.radius / _norm(away_BD)).clamp(max=1.0)
        return point_BD.detach()

    def _within_span(
        self, head: Head, centre_BD: Tensor, drawn_BD: Tensor, length_B1: Tensor, targets_B: Tensor
    ) -> Tensor:
        r"""Attack a head that is affine in the features: every step is a combination of the C rows of W.

        A point is ``x_0 + t n + A W`` with n the unit vector drawn. Its outputs and its distance from x_0 follow from t
        and A, so rows of D numbers are touched only at the beginning and at the end.
        """
        weights_CD = head.feature_weights_CD
        assert weights_CD is not None
        gram_CC, unit_BD = weights_CD @ weights_CD.T, drawn_BD / _norm(drawn_BD)
        at_BC, along_BC = head.outputs(centre_BD, head.parameters_CE), unit_BD.to(weights_CD) @ weights_CD.T
        hot_BC = one_hot(targets_B, at_BC)
        t_B1, moved_BC = length_B1.to(at_BC), torch.zeros_like(at_BC)
        for _ in range(self.steps):
            slopes_BC = (at_BC + t_B1 * along_BC + moved_BC @ gram_CC).softmax(1) - hot_BC
            length_of_gradient_B1 = _root((slopes_BC @ gram_CC * slopes_BC).sum(1, keepdim=True))
            moved_BC = moved_BC - self.step_size * slopes_BC / length_of_gradient_B1
            cross_B1 = 2 * t_B1 * (along_BC * moved_BC).sum(1, keepdim=True)
            square_B1 = t_B1.square() + cross_B1 + (moved_BC @ gram_CC * moved_BC).sum(1, keepdim=True)
            shrink_B1 = (self.radius / _root(square_B1)).clamp(max=1.0)
            t_B1, moved_BC = shrink_B1 * t_B1, shrink_B1 * moved_BC
        return centre_BD + t_B1.to(unit_BD) * unit_BD + (moved_BC @ weights_CD).to(unit_BD)


def _root(squares_B1: Tensor) -> Tensor:
    return squares_B1.clamp(min=torch.finfo(squares_B1.dtype).tiny).sqrt()


def _norm(vectors_BD: Tensor) -> Tensor:
    """Return the norm of each row, never 0."""
    return vectors_BD.norm(dim=1, keepdim=True).clamp(min=torch.finfo(vectors_BD.dtype).tiny)
