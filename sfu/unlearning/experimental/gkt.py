r"""Gated knowledge transfer: a fresh student learns from the head on generated rows that pass a gate; whole classes.

A generator G makes features from noise, trained to maximise the disagreement :math:`KL(p_T(x) \| p_S(x))` of teacher
and student, which the student minimises. The band-pass gate drops every row to which the teacher gives a class to
forget with a probability above ``threshold``: of those classes nothing is ever taught.

Source: Chundawat et al., Zero-shot machine unlearning, IEEE TIFS 2023. Defaults of the authors' code: 4,000 batches of
256 (each: 1 generator and 10 student steps), noise of 128 numbers, threshold 0.01, temperature 1, Adam with lr 1e-3,
gradients clipped to 5. Different here: the generator is a network of one hidden layer whose outputs have the mean and
spread of the examples to forget, as it makes features and not images; heads have no inner layers, so the term on their
attention has nothing to act on; and sfu stops after 400 batches, enough for a head. The student starts at zero.

Shapes: B rows of a batch, D features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from sfu.checks import above, between, whole
from sfu.errors import SolverError
from sfu.heads.base import Head
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.classes import classes_of
from sfu.unlearning.descent import Path


class Generator(nn.Module):
    """Noise to features: one hidden layer, batch-normalised, in the place and spread of some examples."""

    def __init__(self, noise: int, like_FD: Tensor, drawn: torch.Generator) -> None:
        """Random weights from ``drawn``."""
        super().__init__()
        width = like_FD.shape[1]
        self.layers = nn.Sequential(
            nn.Linear(noise, noise), nn.BatchNorm1d(noise), nn.LeakyReLU(0.2), nn.Linear(noise, width),
            nn.BatchNorm1d(width),
        )  # fmt: skip
        with torch.no_grad():
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(torch.randn(layer.weight.shape, generator=drawn) / layer.in_features**0.5)
                    layer.bias.zero_()
        self.to(like_FD)
        self._mean_D, self._spread = like_FD.mean(0), like_FD.std(0).mean()

    def forward(self, noise_BZ: Tensor) -> Tensor:
        """Features ``[B, D]``."""
        return self._mean_D + self._spread * self.layers(noise_BZ)


@dataclass(frozen=True)
class Gkt(UnlearningMethod):
    """See the module.

    Attributes:
        batches: How many batches of noise.
        batch_size: B.
        student_steps: Steps of the student for each of the generator.
        noise: Numbers that a row is made from.
        threshold: Of the gate.
        temperature: Of the divergence.
        lr: Of the student.
        generator_lr: Of the generator.
        clip: Largest gradient norm of both.
    """

    batches: int = 400
    batch_size: int = 256
    student_steps: int = 10
    noise: int = 128
    threshold: float = 0.01
    temperature: float = 1.0
    lr: float = 1e-3
    generator_lr: float = 1e-3
    clip: float = 5.0

    @property
    def whole_classes(self) -> bool:
        """It knows no examples."""
        return True

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the key, the value and what is accepted.
        """
        for key in ("batches", "student_steps", "noise"):
            whole(f"gkt: {key}", getattr(self, key), 1)
        whole("gkt: batch_size", self.batch_size, 2)
        between("gkt: threshold", self.threshold, 0.0, 1.0)
        for key in ("temperature", "lr", "generator_lr", "clip"):
            above(f"gkt: {key}", getattr(self, key), 0.0)

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Teach a student.

        Raises:
            ConfigError: The request is not for whole classes.
            SolverError: No generated row ever passes the gate.
        """
        gone, head = list(classes_of(request, "gkt")), request.head
        drawn, path = context.generator("noise"), Path(context.keep_path)
        like_FD = request.features_FD.to(head.parameters_CE)
        generator = Generator(self.noise, like_FD, drawn)
        student = nn.Parameter(torch.zeros_like(head.parameters_CE))
        learning = torch.optim.Adam([student], lr=self.lr)
        making = torch.optim.Adam(generator.parameters(), lr=self.generator_lr)
        path.add(student)
        passed = 0
        for done in range(self.batches):
            noise_BZ = torch.randn(self.batch_size, self.noise, generator=drawn).to(like_FD)
            self._step(making, -self._disagreement(head, student, generator(noise_BZ), gone), generator.parameters())
            with torch.no_grad():
                features_BD = generator(noise_BZ)
            open_B = self._gate(head, features_BD, gone)
            passed += int(open_B.sum())
            for _ in range(self.student_steps if open_B.any() else 0):
                self._step(learning, self._disagreement(head, student, features_BD, gone), [student])
            path.add(student)
            if context.progress is not None:
                context.progress(done + 1, self.batches)
        if passed == 0:
            raise SolverError(
                f"gkt: none of {self.batches * self.batch_size} generated rows passes the gate: the head gives the "
                f"classes {gone} at least threshold={self.threshold:g} everywhere; raise threshold"
            )
        details = {"batches": self.batches, "passed": passed / (self.batches * self.batch_size), "classes": len(gone)}
        end_CE = student.detach()
        return UnlearningResult(request.unlearned_head(end_CE), details=details, path=path.ended(end_CE))

    def _gate(self, head: Head, features_BD: Tensor, gone: list[int]) -> Tensor:
        """Which rows may teach, ``[B]``."""
        with torch.no_grad():
            probability_BC = head.outputs(features_BD, head.parameters_CE).softmax(1)
        return (probability_BC[:, gone] <= self.threshold).all(1)

    def _disagreement(self, head: Head, student: Tensor, features_BD: Tensor, gone: list[int]) -> Tensor:
        """Mean divergence over the rows that pass the gate; 0 if none does."""
        open_BD = features_BD[self._gate(head, features_BD.detach(), gone)]
        if not open_BD.shape[0]:
            return 0.0 * features_BD.sum()
        mine, theirs = (
            (head.outputs(open_BD, at) / self.temperature).log_softmax(1) for at in (student, head.parameters_CE)
        )
        return kl_div(mine, theirs, log_target=True, reduction="batchmean")

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor, parameters: object) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, self.clip)  # type: ignore[arg-type]
        optimizer.step()
