r"""L2UL, learning to unlearn: instance-wise forgetting with adversarial examples and weight importance.

.. math:: \min_w\; -\tfrac{|B|}{|B| + |A|} CE(D_f) + \tfrac{|A|}{|B| + |A|} CE(D_{adv})
          + \tfrac{\lambda}{2} \sum_j \bar\Omega_j (w_j - w^*_j)^2

:math:`D_{adv}` holds, for every example to forget, some adversarial examples near it with their targets, wrong classes
drawn at random. They represent the retained data near the decision boundary. :math:`\bar\Omega` is one minus the
MAS importance, scaled to [0, 1] over all parameters: what matters little to the forget set is held in place. The
descent ends when the head errs on the whole forget set.

Source: Cha et al., Learning to unlearn: instance-wise unlearning for pre-trained classifiers, AAAI 2024. Defaults of
the authors' CIFAR-10 run: radius 4, 100 steps of 0.1, 20 adversarial examples each (200 for CIFAR-100 and ImageNet),
SGD with lr 1e-3, momentum 0.9, weight decay 1e-4, lambda 1, batches of 32 forget and 256 adversarial examples. They
stop after 1,000 epochs at the latest; here ``max_steps`` bounds the steps. Their radius was made for images in [0, 1]
with a norm of about 28; the details say how long the features are. docs/methods.md lists what else differs from their
code: the start of the attack, its targets, the scale of the importance and the order of the rows.

Shapes: A adversarial rows, F forget rows, D features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from sfu.errors import SolverError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.attack import Attack
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches
from sfu.unlearning.differentiable import all_wrong, forgotten, wrong_labels
from sfu.unlearning.importance import output_sensitivity

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adversarial(DescentMethod, name="adversarial"):
    """Ascend on the forget set and hold the head near adversarial examples; ``max_steps`` replaces ``epochs``."""

    lr: float = setting(1e-3, above=0)
    epochs: int = field(default=1, init=False)
    batch_size: int = setting(32, "Forget rows of a step.", at_least=1)
    weight_decay: float | None = setting(1e-4, at_least=0)
    adversarial_batch_size: int = setting(256, "Adversarial rows of a step.", at_least=1)
    max_steps: int = setting(500, "Largest number of steps.", at_least=1)
    radius: float = setting(4.0, "Radius of the attack, in the units of the features.", above=0)
    attack_steps: int = setting(100, "Steps of the attack.", at_least=1)
    step_size: float = setting(0.1, "Length of a step of the attack.", above=0)
    examples: int = setting(20, "Adversarial examples for each example to forget.", at_least=1)
    importance: float = setting(1.0, "lambda.", at_least=0)

    def problem(self, request: ForgetRequest, context: MethodContext, retained: Retained) -> DescentProblem:
        head, forget = request.head, forgotten(request)
        features_FD, labels_F = forget.features_ND, forget.labels_N
        key = f"attack {self.radius} {self.attack_steps} {self.step_size} {self.examples}"
        near_AD, targets_A = context.remember(key, lambda: self._attack(request, context))
        success = self._success(head, features_FD, near_AD, targets_A)
        length = float(features_FD.norm(dim=1).mean())
        if success == 0.0:
            raise SolverError(
                f"adversarial: the attack found no adversarial example with radius={self.radius:g} on features of mean "
                f"norm {length:.3g}. Raise radius, step_size or attack_steps."
            )
        held_CE = held_in_place(output_sensitivity(head, features_FD, self.batch_size))

        def loss(parameters_CE: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            adversarial, index = batch
            share = len(index) / (len(index) + len(adversarial))
            ascent = torch.nn.functional.cross_entropy(head.outputs(features_FD[index], parameters_CE), labels_F[index])
            anchor = torch.nn.functional.cross_entropy(
                head.outputs(near_AD[adversarial], parameters_CE), targets_A[adversarial]
            )
            moved = (held_CE * (parameters_CE - head.parameters_CE).square()).sum() / 2
            return (1 - share) * anchor - share * ascent + self.importance * moved

        def forgot(parameters_CE: Tensor) -> bool:
            return all_wrong(head, parameters_CE, features_FD, labels_F)

        pairs = zip(
            minibatches(near_AD.shape[0], self.adversarial_batch_size, None, context.generator("training")),
            minibatches(request.n_forget, self.batch_size, None, context.generator("folds")),
            strict=True,
        )
        about = {"attack_success": success, "mean_feature_norm": length, "radius": self.radius}
        return DescentProblem(islice(pairs, self.max_steps), loss, self.max_steps, about, done=forgot)

    def descends_with(self, other: UnlearningMethod) -> bool:
        """Return false: each descent ends where its own head has forgotten."""
        return False

    def _success(self, head: Head, features_FD: Tensor, near_AD: Tensor, targets_A: Tensor) -> float:
        """Return the share of rows that reach their target, among those not classified as the target beforehand."""
        already_A = head.logits(features_FD).argmax(1).repeat(self.examples) == targets_A
        reached_A = head.logits(near_AD).argmax(1) == targets_A
        return float(reached_A[~already_A].double().mean()) if not already_A.all() else 1.0

    def _attack(self, request: ForgetRequest, context: MethodContext) -> tuple[Tensor, Tensor]:
        """Return adversarial examples and their targets, ``examples`` for each example to forget."""
        drawn = context.generator("perturbation")
        rows_AD, labels_A = request.features_FD.repeat(self.examples, 1), request.labels_F.repeat(self.examples)
        targets_A = wrong_labels(labels_A, request.head.n_classes, drawn)
        attack = Attack(self.radius, self.attack_steps, self.step_size)
        return attack.perturb(request.head, rows_AD, targets_A, drawn), targets_A


def held_in_place(importance_CE: Tensor) -> Tensor:
    """Return one minus the importance, scaled to [0, 1]; ones if all importances are equal."""
    low, high = importance_CE.min(), importance_CE.max()
    if not high > low:
        return torch.ones_like(importance_CE)
    return 1 - (importance_CE - low) / (high - low)
