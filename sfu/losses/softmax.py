r"""Cross-entropy over C classes: :math:`l = \log \sum_c e^{z_c} - \sum_c t_c z_c`, with targets
:math:`t = (1 - s) e_y + s / C`; s is the label smoothing, 0 by default. Outputs may be divided by a temperature first.

Adding one number to all outputs changes nothing, so a bias for every class is one too many: the Hessian is singular
along equal biases, the gradient has no part there, and solves leave that direction alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from sfu.losses.base import Constants, Layout, Loss, OutputHessian, Targets, one_hot
from sfu.schema import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Softmax(Loss, name="softmax"):
    """Stable at any output: nothing is exponentiated before the largest output is taken off."""

    label_smoothing: float = setting(0.0, "Share of the target that all classes divide evenly.", at_least=0, below=1)
    temperature: float = setting(1.0, "What the outputs are divided by before the softmax.", above=0)

    layout: ClassVar[Layout] = Layout.dense
    targets: ClassVar[Targets] = Targets.distribution
    shift_invariant: ClassVar[bool] = True
    attained: ClassVar[bool] = False

    @property
    def constants(self) -> Constants:
        r"""Bounds for the vector of outputs.

        The slope :math:`p - t` has norm at most :math:`\sqrt2` (all mass on a wrong class, no smoothing). Along a unit
        vector u the second derivative is the variance, and the third the third central moment, of a variable that takes
        the value :math:`u_c` with probability :math:`p_c` and so has range :math:`r \le \sqrt2`. The variance is at
        most :math:`r^2/4 = 1/2`. For a given mean the third central moment is linear in the distribution, so two values
        are worst: :math:`p(1-p)(1-2p) r^3 \le r^3 / (6\sqrt3)`, which gives :math:`\gamma = \sqrt{2/27}`. (The third
        derivative is a symmetric form, whose norm is reached on equal arguments.)
        """
        cold = 1 / self.temperature
        return Constants(math.sqrt(2) * cold, 0.5 * cold**2, math.sqrt(2 / 27) * cold**3)

    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        outputs = self._divided(outputs)
        hot = one_hot(labels_N, outputs)
        own = (outputs * hot).sum(-1, keepdim=True)
        values = (outputs - own).logsumexp(-1, keepdim=True)
        if self.label_smoothing == 0:
            return values
        return values + self.label_smoothing * (own - outputs.mean(-1, keepdim=True))

    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        hot = one_hot(labels_N, outputs)
        probability = self._divided(outputs).softmax(-1)
        others, own = probability * (1 - hot), probability * hot
        # p_y - 1 would lose its digits when p_y is near 1; with targets t, 1 - p_c is left of the terms that t_c weighs
        rest = others.sum(-1, keepdim=True) + (own.sum(-1, keepdim=True) - probability)
        slopes = others - hot * rest
        if self.label_smoothing > 0:
            slopes = slopes + self.label_smoothing * (hot - 1 / outputs.shape[-1])
        return self._divided(slopes)

    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        probability = self._divided(outputs).softmax(-1)
        divided = self._divided(probability)
        return OutputHessian(self._divided(divided), divided)

    def _divided(self, outputs: Tensor) -> Tensor:
        """Divide by the temperature; at 1, the tensor itself is returned."""
        return outputs if self.temperature == 1 else outputs / self.temperature
