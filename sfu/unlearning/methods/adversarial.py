r"""L2UL, learning to unlearn: instance-wise forgetting with adversarial examples and weight importance.

.. math:: \min_w\; -\tfrac{|B|}{|B| + |A|} CE(D_f) + \tfrac{|A|}{|B| + |A|} CE(D_{adv})
          + \tfrac{\lambda}{2} \sum_j \bar\Omega_j (w_j - w^*_j)^2

:math:`D_{adv}` holds, for every example to forget, some adversarial examples near it with their targets, wrong classes
drawn at random: they stand for the retained data near the decision boundary. :math:`\bar\Omega` is one minus the
example's MAS importance, scaled to [0, 1]: what matters little to the forget set is held in place. The descent ends
when the head errs on the whole forget set.

Source: Cha et al., Learning to unlearn: instance-wise unlearning for pre-trained classifiers, AAAI 2024. Defaults of
the authors' CIFAR-10 run: radius 4, 100 steps of 0.1, 20 adversarial examples each (200 for CIFAR-100 and ImageNet),
SGD with lr 1e-3, momentum 0.9, weight decay 1e-4, lambda 1, batches of 32 forget and 256 adversarial examples. They
stop after 1,000 epochs at the latest; here ``max_steps`` bounds the steps. Their radius was made for images in [0, 1]
with a norm of about 28; the details say how long the features are.

Shapes: A adversarial rows, F forget rows, D features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sfu.checks import above, at_least, whole
from sfu.errors import SolverError
from sfu.heads.base import Head
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.attack import Attack
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.descent import DescentMethod, DescentProblem, minibatches
from sfu.unlearning.differentiable import all_wrong, forgotten, wrong_labels
from sfu.unlearning.importance import output_sensitivity


@dataclass(frozen=True)
class Adversarial(DescentMethod):
    """See the module.

    Attributes:
        batch_size: Forget rows of a step.
        adversarial_batch_size: Adversarial rows of a step.
        max_steps: Bound of the number of steps (``epochs`` has no part here).
        radius: Of the attack, in the units of the features.
        attack_steps: Of the attack.
        step_size: Of the attack.
        examples: Adversarial examples for each example to forget.
        importance: lambda.
    """

    lr: float = 1e-3
    epochs: int = 1
    batch_size: int = 32
    weight_decay: float = 1e-4
    adversarial_batch_size: int = 256
    max_steps: int = 500
    radius: float = 4.0
    attack_steps: int = 100
    step_size: float = 0.1
    examples: int = 20
    importance: float = 1.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        super().__post_init__()
        for key in ("adversarial_batch_size", "max_steps", "attack_steps", "examples"):
            whole(f"adversarial: {key}", getattr(self, key), 1)
        above("adversarial: radius", self.radius, 0.0)
        above("adversarial: step_size", self.step_size, 0.0)
        at_least("adversarial: importance", self.importance, 0.0)

    def course(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> DescentProblem[Any]:
        """See the module."""
        head, gone = request.head, forgotten(request)
        features_FD, labels_F = gone.features_ND, gone.labels_N
        key = f"attack {self.radius} {self.attack_steps} {self.step_size} {self.examples}"
        near_AD, targets_A = context.remember(key, lambda: self._attack(request, context))
        success = self._success(head, features_FD, near_AD, targets_A)
        length = float(features_FD.norm(dim=1).mean())
        if success == 0.0:
            raise SolverError(
                f"adversarial: the attack found no adversarial example with radius={self.radius:g} on features of mean "
                f"norm {length:.3g}; raise radius, step_size or attack_steps"
            )
        held_CE = held_in_place(output_sensitivity(head, features_FD, self.batch_size))

        def loss(parameters_CE: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            adversarial, forget = batch
            share = len(forget) / (len(forget) + len(adversarial))
            ascent = cross_entropy(head.outputs(features_FD[forget], parameters_CE), labels_F[forget])
            anchor = cross_entropy(head.outputs(near_AD[adversarial], parameters_CE), targets_A[adversarial])
            moved = (held_CE * (parameters_CE - head.parameters_CE).square()).sum() / 2
            return (1 - share) * anchor - share * ascent + self.importance * moved

        def forgot(parameters_CE: Tensor) -> bool:
            return all_wrong(head, parameters_CE, features_FD, labels_F)

        about = {"attack_success": success, "mean_feature_norm": length, "radius": self.radius}
        return DescentProblem(
            islice(self._batches(near_AD.shape[0], request.n_forget, context), self.max_steps), loss, self.max_steps,
            about, done=forgot, after=lambda parameters_CE: {"all_forgotten": forgot(parameters_CE)},
        )  # fmt: skip

    def alike(self, other: UnlearningMethod) -> bool:
        """Never: each descent ends where its own head has forgotten."""
        return False

    def _success(self, head: Head, features_FD: Tensor, near_AD: Tensor, targets_A: Tensor) -> float:
        """Share of the rows that reach their target, of those that the head did not take for it beforehand."""
        already_A = head.logits(features_FD).argmax(1).repeat(self.examples) == targets_A
        reached_A = head.logits(near_AD).argmax(1) == targets_A
        return float(reached_A[~already_A].double().mean()) if not already_A.all() else 1.0

    def _attack(self, request: ForgetRequest, context: MethodContext) -> tuple[Tensor, Tensor]:
        """Adversarial examples and their targets, ``examples`` for each example to forget."""
        drawn = context.generator("perturbation")
        rows_AD, labels_A = request.features_FD.repeat(self.examples, 1), request.labels_F.repeat(self.examples)
        targets_A = wrong_labels(labels_A, request.head.n_classes, drawn)
        attack = Attack(self.radius, self.attack_steps, self.step_size)
        return attack.perturb(request.head, rows_AD, targets_A, drawn), targets_A

    def _batches(self, n_adversarial: int, n_forget: int, context: MethodContext) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless pairs, each side in an order of its own."""

        def endless(size: int, batch_size: int, drawn: torch.Generator) -> Iterator[Tensor]:
            for _ in count():
                yield from minibatches(size, batch_size, 1, drawn)

        yield from zip(
            endless(n_adversarial, self.adversarial_batch_size, context.generator("training")),
            endless(n_forget, self.batch_size, context.generator("folds")),
            strict=True,
        )


def held_in_place(importance_CE: Tensor) -> Tensor:
    """One minus the importance, scaled to [0, 1]; ones where all are alike."""
    low, high = importance_CE.min(), importance_CE.max()
    if not high > low:
        return torch.ones_like(importance_CE)
    return 1 - (importance_CE - low) / (high - low)
