"""Retrained from scratch on the retained data: what every method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from sfu.heads.settings import HeadSettings
from sfu.heads.train import train_like
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.differentiable import remaining
from sfu.unlearning.settings import RunSettings


@dataclass(frozen=True)
class Retrained(UnlearningMethod, name="retrained"):
    """Train on the retained rows as Original was trained (loss, class weights, objective perturbation)."""

    head: HeadSettings
    settings_used = ()
    access = Access.RETAINED

    @classmethod
    def from_config(cls, run: RunSettings, curvature: Any, settings: dict[str, Any]) -> Self:
        return super().from_config(run, curvature, {"head": run.head, **settings})

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        rows = remaining(retained, request, self.method_name)
        head = train_like(
            request.head, rows.features_ND, rows.labels_N, self.head, seed=context.seeds.get("training", 0),
            weights_N=rows.weights_N, noise=request.head.certificate, progress=context.progress,
        )  # fmt: skip
        return UnlearningResult(head, details={"gradient_norm": float(head.gradient_CE.norm())})
