r"""Just in time: smooth the classifier around the examples to forget, by one pass of SGD on a local Lipschitz constant.

.. math:: \ell(x) = \frac1N \sum_{j=1}^N \frac{\|f(x; w) - f(x + v_j; w)\|}{\|v_j\|}, \qquad v_j \sim N(0, \sigma^2 I)

No gradient flows through the perturbed branch. The authors' code zeroes its gradients once, before the loop, so that
every step follows the sum of all gradients so far (``accumulate: true``); with ``false``, a step follows the gradient
of its own batch, as in plain SGD. The authors sum :math:`\ell` over a batch, so that their learning rate
belongs to their batch size: ``reduction: sum`` at 128 rows and lr 3e-4 is a step of 0.038 on the mean. ``mean`` makes
the value independent of the batch size.

On a head that is affine in its features, :math:`f(x) - f(x + v) = -W v` depends on no example, and the gradient with
the perturbed branch held is :math:`-\frac{W v}{\|W v\| \|v\|} x^T`, an odd function of v: its expectation is zero. What
remains is a random walk whose length grows as :math:`\eta / (\sigma \sqrt D)` (a test shows it), with a momentum of 1
if gradients accumulate.

Source: Foster et al., An information theoretic approach to machine unlearning (first: Zero-shot machine unlearning at
scale via Lipschitz regularization), 2024; N = 25, one epoch, batches of 128, plain SGD. Defaults for random subsets and
the network that their code calls VGG16: sigma 0.01, lr 3e-4 (the ViT has 0.5 and 0.1). Noisy images are clamped to the
range of their batch there; features have none. Batches are drawn in a random order here.

Shapes: N noises, B rows, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.descent import DescentMethod, DescentProblem, Sgd, minibatches, n_batches

if TYPE_CHECKING:
    from torch import Tensor


def local_lipschitz(head: Head, parameters_CE: Tensor, features_BD: Tensor, noise_NBD: Tensor) -> Tensor:
    """Return the constant of each row, ``[B]``; no gradient flows through the perturbed branch."""
    outputs_BC = head.outputs(features_BD, parameters_CE)
    with torch.no_grad():
        around_NBC = head.outputs((features_BD + noise_NBD).flatten(0, 1), parameters_CE).unflatten(
            0, noise_NBD.shape[:2]
        )
    apart_NB = (outputs_BC - around_NBC).norm(dim=2)
    return (apart_NB / noise_NBD.to(apart_NB).norm(dim=2)).mean(0)


@dataclass(frozen=True)
class Jit(DescentMethod, name="jit"):
    """Descend once over the forget set on the local Lipschitz constant."""

    lr: float = setting(3e-4, above=0)
    epochs: int = setting(1, at_least=1)
    batch_size: int = setting(128, at_least=1)
    momentum: float = setting(0.0, at_least=0, below=1)
    weight_decay: float | None = setting(0.0, at_least=0)
    sigma: float = setting(0.01, "Standard deviation of the noise, in the units of the features.", above=0)
    samples: int = setting(25, "N.", at_least=1)
    accumulate: bool = setting(
        True, "Step along the sum of all gradients so far (as published), or along the last one."
    )
    reduction: str = setting("sum", "Over the rows of a batch; ``sum`` is as published.", choices=("sum", "mean"))

    def sgd(self, head: Head) -> Sgd:
        return replace(super().sgd(head), accumulate=self.accumulate)

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        drawn, head = context.generator("noise"), request.head
        count = request.n_forget

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for index in minibatches(count, self.batch_size, self.epochs, context.generator("training")):
                features_BD = request.features_FD[index]
                noise_NBD = torch.randn(self.samples, *features_BD.shape, generator=drawn).to(features_BD)
                yield features_BD, self.sigma * noise_NBD

        def loss(parameters_CE: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            constant_B = local_lipschitz(head, parameters_CE, *batch)
            return constant_B.sum() if self.reduction == "sum" else constant_B.mean()

        return DescentProblem(batches(), loss, self.epochs * n_batches(count, self.batch_size), {"sigma": self.sigma})

    @property
    def own_details(self) -> dict[str, Any]:
        return {"lr_on_the_mean": self.lr * (self.batch_size if self.reduction == "sum" else 1)}
