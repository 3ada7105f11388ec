"""The head of a linearised network: parameters w that multiply the Jacobian of its last layers.

Shapes: N rows, D numbers of an activation, C classes, p parameters. Parameters are ``[1, p]``: of the suffix ``_CE`` of
:class:`~sfu.heads.base.Head`, C is 1 and E is p here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from sfu.errors import ArtifactError, ConfigError, DataError
from sfu.heads.base import Head, HeadRecord, TrainedRecord
from sfu.heads.cores.core import Core
from sfu.heads.cores.network import load_core, save_core
from sfu.heads.cores.rows import TangentRows
from sfu.heads.settings import HeadSettings
from sfu.losses.base import Layout, Loss, read_loss
from sfu.losses.rows import Rows
from sfu.readers import Count, Record, floats


class CoreRecord(Record):
    """The digest of a core and, if it is saved, how to build it (:class:`~sfu.heads.cores.network.SourceRecord`)."""

    model_config = ConfigDict(extra="allow")

    top_digest: Annotated[str, Field(min_length=1)]


class LinearisedRecord(TrainedRecord):
    """The JSON file of a linearised head."""

    n_parameters: Count
    components: list[str]
    core: CoreRecord


@dataclass(frozen=True, repr=False)
class LinearisedHead(Head, name="linearised"):
    """``f(x) = f_c(x) + J_c(x) w``; everything in w is regularised, the layers' biases too.

    Attributes:
        core: The network at w_c, which was trained without user data.
    """

    core: Core = field(kw_only=True)

    records: ClassVar[Mapping[int, type[HeadRecord]]] = {
        1: LinearisedRecord, 2: LinearisedRecord, 3: LinearisedRecord, 4: LinearisedRecord,
    }  # fmt: skip
    """1: without the numbers of forgotten rows; 2: without a bound and class shares; 3: without how the regulariser
    works."""

    def _check(self) -> None:
        if self.parameters_CE.shape != (1, self.core.n_parameters):
            raise DataError(
                f"the head's parameters are {list(self.parameters_CE.shape)}, but the linearised layers have "
                f"[1, {self.core.n_parameters}]. Give the core that the head belongs to."
            )
        if self.bias or self.kept.numbers() is not self.kept or self.certificate is not None:
            raise DataError("a linearised head has no bias of its own, no stored curvature and no certificate.")
        self.kept.check(self.n_classes, self.n_features, [])

    @classmethod
    def untrained(cls, config: HeadSettings, loss: Loss, n_features: int, n_classes: int, core: Core | None) -> Self:
        if core is None:
            raise ConfigError("head=linearised needs the network that is linearised. Give core=.")
        zero_1P = torch.zeros(1, core.n_parameters, dtype=torch.float64)
        return cls(zero_1P, zero_1P, config.l2, 1, loss=loss, weight=1.0, core=core)

    @property
    def n_classes(self) -> int:
        return self.core.n_classes

    @property
    def n_features(self) -> int:
        return self.core.n_features

    @property
    def layout(self) -> Layout:
        return Layout.products

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        like = self.parameters_CE
        return TangentRows(
            features_ND, labels_N, self.loss, self.core, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Move the parameters to the device and dtype, and the core to the device; the core keeps its dtype."""
        return replace(super().to(device, dtype), core=self.core.to(device))

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        if features_ND.requires_grad:
            return self.core.push(features_ND, parameters_CE, affine=True)
        found: Tensor = _Push.apply(parameters_CE, features_ND, self.core, True)
        return found

    def parameter_groups(self) -> Tensor:
        """Return one group for each output channel of each parameter tensor, ``[1, p]``."""
        parts, start = [], 0
        for tensor in self.core.parameters.values():
            channels = tensor.shape[0]
            parts.append(torch.arange(start, start + channels).repeat_interleave(tensor.numel() // channels))
            start += channels
        return torch.cat(parts)[None]

    def about(self) -> dict[str, Any]:
        core = self.core
        return {"layers": list(core.components), "n_parameters": core.n_parameters, "core": core.digest}

    def _settings(self) -> dict[str, Any]:
        core = self.core
        return {
            "n_parameters": core.n_parameters, "components": list(core.components),
            "core": {**core.source, "top_digest": core.digest},
        }  # fmt: skip

    def _tensors(self) -> dict[str, Tensor]:
        return {"gradient": self.gradient_CE} if bool(self.gradient_CE.any()) else {}

    def _save_beside(self, stem: Path) -> list[Path]:
        return save_core(self.core, stem.parent)

    @classmethod
    def restored(cls, about: Any, tensors: Mapping[str, Tensor], stem: Path, core: Core | None) -> Self:
        found = core or load_core(about.core.model_extra or {}, stem)
        if found.digest != about.core.top_digest:
            raise ArtifactError(
                f"the head at {stem} belongs to a core of digest {about.core.top_digest[:12]}, not "
                f"{found.digest[:12]}: other weights, or another architecture."
            )
        parameters_CE = floats(tensors, "parameters", 2)
        gradient_CE = floats(tensors, "gradient", 2) if "gradient" in tensors else torch.zeros_like(parameters_CE)
        loss = read_loss(about.loss)
        return cls(parameters_CE, gradient_CE, about.l2, about.n_train, loss=loss, weight=about.weight, core=found)


class _Push(torch.autograd.Function):
    """``J v`` or ``f_c + J v``, whose gradient in v is :class:`_Pull`; autograd records neither step by step."""

    @staticmethod
    def forward(context: Any, vector_1P: Tensor, features_ND: Tensor, core: Core, affine: bool) -> Tensor:
        context.features_ND, context.core = features_ND, core
        return core.push(features_ND, vector_1P.detach(), affine=affine)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Pull.apply(gradients[0], context.features_ND, context.core), None, None, None


class _Pull(torch.autograd.Function):
    """``J^T b``, whose gradient in b is :class:`_Push`."""

    @staticmethod
    def forward(context: Any, cotangent_NC: Tensor, features_ND: Tensor, core: Core) -> Tensor:
        context.features_ND, context.core = features_ND, core
        return core.pull(features_ND, cotangent_NC.detach())

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Push.apply(gradients[0], context.features_ND, context.core, False), None, None
