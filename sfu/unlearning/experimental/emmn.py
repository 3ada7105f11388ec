r"""Error-maximising and error-minimising noise: whole classes, from the head alone.

For every class c a batch of noise n is learned from random numbers on the frozen head: for a class to forget it
maximises the loss of the label c, for any other it minimises it,

.. math:: \min_n\; \mp\, CE(f(n; w^*), c) + \lambda\, \overline{n^2}.

Then the head is trained for one epoch on all noise with its labels (impair), in which the forgotten classes' noise
breaks what the head knows of them, and for one on the others' (repair).

Source: Chundawat et al., Zero-shot machine unlearning, IEEE TIFS 2023, whose noise is that of Tarun et al., Fast yet
effective machine unlearning (UNSIR), 2021, and so are the defaults: batches of 256, Adam with lr 0.1 for 5 epochs of 8
steps, lambda 0.1; impair with lr 0.02, repair with 0.01. UNSIR's code sums the squares of a row where sfu takes their
mean, repeats the noise 20 times, and impairs and repairs with Adam, where sfu uses plain SGD.

**Caveat.** The method only knows classes, and it was made for images that are normalised. Here its noise lies in the
space of the features, and its scale is the root mean square of the examples to forget.

Shapes: B rows of noise a class, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.classes import ClassMethod
from sfu.unlearning.descent import DescentProblem, Sgd, descend, minibatches, n_batches
from sfu.unlearning.result import UnlearningResult

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Emmn(ClassMethod, name="emmn"):
    """Learn noise for every class, impair the head on it, and repair the head on the noise of the other classes."""

    noise_rows: int = setting(256, "B.", at_least=1)
    noise_steps: int = setting(40, "Steps of Adam on the noise.", at_least=1)
    noise_lr: float = setting(0.1, "Learning rate of the noise.", above=0)
    noise_penalty: float = setting(0.1, "lambda.", at_least=0)
    batch_size: int = setting(256, "Rows of a step on the head.", at_least=1)
    impair_lr: float = setting(0.02, "Learning rate of the first epoch.", above=0)
    repair_lr: float = setting(0.01, "Learning rate of the second epoch; 0 skips it.", at_least=0)

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        gone, head = self.classes_of(request), request.head
        labels_C = torch.arange(head.n_classes, device=head.parameters_CE.device)
        sign_C = torch.ones_like(labels_C)
        sign_C[gone] = -1
        noise_ND, labels_N = self._noise(request, labels_C, sign_C, context)
        others_M = (sign_C[labels_N] > 0).nonzero()[:, 0]
        point_CE, steps = head.parameters_CE, 0
        path: tuple[Tensor, ...] = ()
        for lr, rows_M in ((self.impair_lr, torch.arange(labels_N.numel())), (self.repair_lr, others_M.cpu())):
            if lr == 0:
                continue

            def loss(parameters_CE: Tensor, index: Tensor, rows_M: Tensor = rows_M) -> Tensor:
                rows = rows_M[index]
                return torch.nn.functional.cross_entropy(head.outputs(noise_ND[rows], parameters_CE), labels_N[rows])

            batches: Iterator[Tensor] = minibatches(rows_M.numel(), self.batch_size, 1, context.generator("training"))
            problem = DescentProblem(batches, loss, n_batches(rows_M.numel(), self.batch_size))
            end = descend(point_CE, problem, Sgd(lr), context)
            point_CE, path, steps = end.parameters_CE, (*path, *end.path), steps + end.steps
        details = {"steps": steps, "classes": len(gone)}
        return UnlearningResult(request.unlearned_head(point_CE), details=details, path=path)

    def _noise(
        self, request: ForgetRequest, labels_C: Tensor, sign_C: Tensor, context: MethodContext
    ) -> tuple[Tensor, Tensor]:
        """Return the learned noise of every class, ``[C B, D]``, and its labels."""
        head = request.head
        scale = float(request.features_FD.square().mean().sqrt())
        labels_N = labels_C.repeat_interleave(self.noise_rows)
        drawn = torch.randn(labels_N.numel(), head.n_features, generator=context.generator("noise"))
        noise_ND = torch.nn.Parameter(drawn.to(head.parameters_CE))
        optimizer = torch.optim.Adam([noise_ND], lr=self.noise_lr)
        sign_N = sign_C[labels_N].to(noise_ND)
        for _ in range(self.noise_steps):
            optimizer.zero_grad()
            losses_N = torch.nn.functional.cross_entropy(
                head.outputs(scale * noise_ND, head.parameters_CE), labels_N, reduction="none"
            )
            per_class = (sign_N * losses_N).sum() / self.noise_rows
            (per_class + self.noise_penalty * noise_ND.square().mean() * labels_C.numel()).backward()
            optimizer.step()
        return scale * noise_ND.detach(), labels_N
