"""Retrained from scratch on the retained data: what every method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from sfu.errors import ConfigError
from sfu.heads.settings import HeadSettings, Training
from sfu.heads.train import train_like
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.schema import check_fields, setting
from sfu.seeds import derive_seed
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.differentiable import remaining
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.settings import RunSettings

_SPREAD = "this is how far apart two Retrained heads are: no method can come much nearer to one of them than that"


@dataclass(frozen=True)
class Retrained(UnlearningMethod, name="retrained"):
    """Train on the retained rows as Original was trained (loss, class weights, objective perturbation)."""

    head: HeadSettings
    again: bool = setting(False, "Draw another order of rows; the distance is then how far apart two Retrained are.")
    settings_used = ()
    access = Access.RETAINED

    def __post_init__(self) -> None:
        """Refuse a second draw of what is not drawn.

        Raises:
            ConfigError: Training is exact.
        """
        check_fields(self, "retrained")
        if self.again and self.head.training is Training.exact:
            raise ConfigError(
                "retrained.again=true needs head.training=adam or sgd: exact training reaches the same optimum in any "
                "order of rows. Leave out the row retrained_again."
            )

    @classmethod
    def from_config(cls, run: RunSettings, curvature: Any, settings: dict[str, Any]) -> Self:
        return super().from_config(run, curvature, {"head": run.head, **settings})

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        rows, seed = remaining(retained, request, self.method_name), context.seeds.get("training", 0)
        head = train_like(
            request.head, rows.features_ND, rows.labels_N, self.head,
            seed=derive_seed(seed, "again") if self.again else seed, weights_N=rows.weights_N,
            noise=request.head.certificate, progress=context.progress,
        )  # fmt: skip
        details = {"gradient_norm": float(head.gradient_CE.norm())}
        return UnlearningResult(head, details=details, note=_SPREAD if self.again else None)
