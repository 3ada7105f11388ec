r"""Gated knowledge transfer: a fresh student learns from the head on generated rows that pass a gate; whole classes.

A generator G makes features from noise, trained to maximise the disagreement :math:`KL(p_T(x) \| p_S(x))` of teacher
and student, which the student minimises. The band-pass gate drops every row to which the teacher gives a class to
forget with a probability above ``threshold``: of those classes nothing is ever taught.

Source: Chundawat et al., Zero-shot machine unlearning, IEEE TIFS 2023. Defaults of the authors' code: 4,000 batches of
256 (each: 1 generator and 10 student steps), noise of 128 numbers, threshold 0.01, temperature 1, Adam with lr 1e-3,
gradients clipped to 5.

**Caveat.** On an affine head GKT undoes itself: two affine heads that agree on an open set agree everywhere, so a
student that has learned everything the gate lets through is the teacher again, forgotten class included. Different from
the paper: the generator has one hidden layer and makes features, with the mean and spread of the examples to forget;
the term on inner activations is omitted, because heads have none; sfu stops after 400 batches, which is enough for a
head. The student starts at zero, its learning rate is constant (the authors lower it by the loss on retained rows), and
a batch of which no row passes the gate counts.

Shapes: B rows of a batch, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.errors import SolverError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.request import ForgetRequest, MethodContext, Retained
from sfu.schema import setting
from sfu.unlearning.classes import ClassMethod
from sfu.unlearning.descent import Path
from sfu.unlearning.result import UnlearningResult

if TYPE_CHECKING:
    from torch import Tensor


class Generator:
    """A network of one hidden layer that turns noise into features with the mean and spread of some examples."""

    def __init__(self, noise: int, like_FD: Tensor, drawn: torch.Generator) -> None:
        nn, width = torch.nn, like_FD.shape[1]
        self.layers = nn.Sequential(
            nn.Linear(noise, noise), nn.BatchNorm1d(noise), nn.LeakyReLU(0.2), nn.Linear(noise, width),
            nn.BatchNorm1d(width),
        )  # fmt: skip
        with torch.no_grad():
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(torch.randn(layer.weight.shape, generator=drawn) / layer.in_features**0.5)
                    layer.bias.zero_()
        self.layers.to(like_FD)
        self._mean_D, self._spread = like_FD.mean(0), like_FD.std(0).mean()

    def __call__(self, noise_BZ: Tensor) -> Tensor:
        return self._mean_D + self._spread * self.layers(noise_BZ)


@dataclass(frozen=True)
class Gkt(ClassMethod, name="gkt"):
    """Teach a new student on generated rows that the head does not give to a class to forget."""

    batches: int = setting(400, "Number of batches of noise.", at_least=1)
    batch_size: int = setting(256, "B.", at_least=2)
    student_steps: int = setting(10, "Steps of the student for each of the generator.", at_least=1)
    noise: int = setting(128, "Numbers that a row is made from.", at_least=1)
    threshold: float = setting(0.01, "Largest probability of a class to forget that passes the gate.", above=0, below=1)
    temperature: float = setting(1.0, "Temperature of the divergence.", above=0)
    lr: float = setting(1e-3, "Learning rate of the student.", above=0)
    generator_lr: float = setting(1e-3, "Learning rate of the generator.", above=0)
    clip: float = setting(5.0, "Largest gradient norm of both.", above=0)

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        gone, head = self.classes_of(request), request.head
        drawn, path = context.generator("noise"), Path(context.keep_path)
        like_FD = request.features_FD.to(head.parameters_CE)
        generator = Generator(self.noise, like_FD, drawn)
        weights = list(generator.layers.parameters())
        student = torch.nn.Parameter(torch.zeros_like(head.parameters_CE))
        learning = torch.optim.Adam([student], lr=self.lr)
        making = torch.optim.Adam(weights, lr=self.generator_lr)
        path.add(student)
        passed = 0
        for done in range(self.batches):
            noise_BZ = torch.randn(self.batch_size, self.noise, generator=drawn).to(like_FD)
            self._step(making, -self._disagreement(head, student, generator(noise_BZ), gone), weights)
            with torch.no_grad():
                features_BD = generator(noise_BZ)
            open_B = self._gate(head, features_BD, gone)
            passed += int(open_B.sum())
            for _ in range(self.student_steps if open_B.any() else 0):
                self._step(learning, self._disagreement(head, student, features_BD, gone), [student])
            path.add(student)
            context.report(done + 1, self.batches)
        if passed == 0:
            raise SolverError(
                f"gkt: none of {self.batches * self.batch_size} generated rows passes the gate, because the head "
                f"gives the classes {gone} a probability above threshold={self.threshold:g} everywhere. Raise "
                "threshold."
            )
        details = {"batches": self.batches, "passed": passed / (self.batches * self.batch_size), "classes": len(gone)}
        end_CE = student.detach()
        return UnlearningResult(request.unlearned_head(end_CE), details=details, path=path.ended(end_CE))

    def _gate(self, head: Head, features_BD: Tensor, gone: list[int]) -> Tensor:
        """Return which rows pass the gate, ``[B]``."""
        with torch.no_grad():
            probability_BC = head.outputs(features_BD, head.parameters_CE).softmax(1)
        return (probability_BC[:, gone] <= self.threshold).all(1)

    def _disagreement(self, head: Head, student: Tensor, features_BD: Tensor, gone: list[int]) -> Tensor:
        """Return the mean divergence over the rows that pass the gate; 0 if none does."""
        open_BD = features_BD[self._gate(head, features_BD.detach(), gone)]
        if not open_BD.shape[0]:
            return 0.0 * features_BD.sum()
        mine, theirs = (
            (head.outputs(open_BD, at) / self.temperature).log_softmax(1) for at in (student, head.parameters_CE)
        )
        return torch.nn.functional.kl_div(mine, theirs, log_target=True, reduction="batchmean")

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Iterable[Tensor]) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, self.clip)
        optimizer.step()
