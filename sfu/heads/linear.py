"""The linear head.

Shapes: D features, E = D (+ 1 with bias), C classes, N training rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from sfu.arrays import Array, as_tensor
from sfu.errors import ConfigError, DataError
from sfu.heads.base import Head, HeadRecord, TrainedRecord
from sfu.heads.certificate import Certificate, CertificateRecord
from sfu.heads.cores.core import Core
from sfu.heads.forgotten import Forgotten
from sfu.heads.kept import Kept
from sfu.heads.ledger import Ledger
from sfu.heads.plain_layer import check_outputs, require_plain, write_weights
from sfu.heads.recipe import EARLY_STOPPED, MEAN, OPTIMUM, SUM, Recipe
from sfu.heads.settings import HeadSettings
from sfu.losses.base import Layout, Loss, as_loss, read_loss
from sfu.losses.chunks import outputs_of
from sfu.losses.quadratic import Quadratic
from sfu.losses.rows import Rows, design_matrix
from sfu.readers import Above0, floats


class FirstRecord(HeadRecord):
    """The JSON file of a linear head before there were other losses than the quadratic."""

    bias: bool
    loss: Literal["quadratic"] = "quadratic"
    target_scale: Above0


class LinearRecord(TrainedRecord):
    """The JSON file of a linear head."""

    bias: bool
    certificate: CertificateRecord | None = None


@dataclass(frozen=True, repr=False)
class LinearHead(Head, name="linear"):
    """A linear classifier or regression ``f(x) = W x + b``; :class:`~sfu.heads.base.Head` lists its attributes."""

    records: ClassVar[Mapping[int, type[HeadRecord]]] = {
        1: FirstRecord, 2: LinearRecord, 3: LinearRecord, 4: LinearRecord, 5: LinearRecord, 6: LinearRecord,
    }  # fmt: skip
    """1: before there were other losses than the quadratic; 2: with noise and Hessian among the other tensors; 3:
    without the numbers of forgotten rows; 4: without a bound, class shares, feature mean and sketch;
    5: without how the regulariser works."""
    stackable: ClassVar[bool] = True

    def _check(self) -> None:
        self.kept.check(self.n_classes, self.n_features, self.hessian_shape)

    @property
    def hessian_shape(self) -> list[int]:
        """Shape of the Hessian of the data term, by the loss."""
        n_classes, width = self.parameters_CE.shape
        return {
            Layout.shared: [width, width],
            Layout.blocks: [n_classes, width, width],
            Layout.dense: [n_classes * width, n_classes * width],
        }[self.loss.layout]

    @classmethod
    def untrained(cls, config: HeadSettings, loss: Loss, n_features: int, n_classes: int, core: Core | None) -> Self:
        zero_CE = torch.zeros(n_classes, n_features + int(config.bias), dtype=torch.float64)
        return cls(zero_CE, zero_CE, config.l2, 1, config.bias, loss, weight=1.0)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Linear | torch.nn.Conv2d,
        *,
        l2: float | Literal["estimate"],
        n_train: int,
        loss: Loss | str,
        l2_reduction: str = MEAN,
        penalize_bias: bool = False,
        trained: str | None = None,
        gradient_CE: Array | None = None,
        weight: float | None = None,
        bound: float | None = None,
        ledger: bool = False,
    ) -> LinearHead:
        """Wrap a trained :class:`torch.nn.Linear`.

        :class:`~sfu.heads.training_record.TrainingRecord` finds the arguments from the loss and the optimiser of a
        training in PyTorch, and ``docs/heads.md`` says what to give for other heads.

        Args:
            module: The classifier layer: a linear layer, or a 1 x 1 convolution.
            l2: Weight of the regulariser ``l2/2 |W|^2``; ``"estimate"`` if it is not known, or if the optimiser's
                weight decay is no such term (AdamW). :func:`sfu.unlearn` then estimates it from the first request.
            n_train: Number N of training rows.
            loss: The loss that the layer was trained with: a name, or a loss with settings of its own
                (:func:`sfu.losses.base.make_loss`). A multi-label classifier has ``logistic``, a regression
                ``quadratic``, and a binary classifier of one output any loss but ``softmax``.
            l2_reduction: ``mean`` if the regulariser was added to the mean of the losses, or ``sum`` if it was added to
                their sum, as scikit-learn's C and alpha are. It is then worth more once rows are forgotten.
            penalize_bias: Whether the bias is regularised, too, as by the ``weight_decay`` of PyTorch's optimisers.
            trained: ``optimum`` if training went on until nothing changed, else ``early_stopped``, which keeps the step
                from being stretched and predicts no gain. By default, a head whose l2 is to be estimated or that has a
                gradient is taken to have been stopped early, and any other to be at its optimum.
            gradient_CE: Gradient of the mean training objective at the layer's weights, l2 included. It tells the l2 of
                a head that was stopped early, and is what ``unlearn(..., reference="optimum")`` needs to finish the
                training.
            weight: Total weight of the training rows; needed if they had sample or class weights.
            bound: Upper bound of the largest eigenvalue of the data term's Hessian at the layer's weights
                (:class:`~sfu.heads.kept.Kept`), if you know one.
            ledger: Whether the head keeps sums over the rows that it has forgotten, so that requests one after another
                end as near as one for all rows (quadratic loss). :mod:`sfu.heads.ledger` says what they give away.

        Raises:
            DataError: ``module`` is not a linear layer, its weights are recomputed (weight norm, spectral norm,
                pruning) or do not decide its outputs (LoRA, hooks).
            ConfigError: The loss is unknown, or cannot be that of a single output; a number is out of range; or there
                is a gradient of an objective whose l2 is to be estimated.
        """
        if not isinstance(ledger, bool):
            raise ConfigError(f"ledger={ledger!r}. Give True or False.")
        estimate = isinstance(l2, str) and l2 == "estimate"
        if estimate and gradient_CE is not None:
            raise ConfigError(
                "gradient_CE is the gradient of an objective with its l2, so l2 must be known. Give l2 as a number, or "
                "leave gradient_CE out."
            )
        layer = require_plain(module)
        parameters = layer.weight.detach().double()
        if layer.bias is not None:
            parameters = torch.cat([parameters, layer.bias.detach().double()[:, None]], dim=1)
        gradient = torch.zeros_like(parameters)
        if gradient_CE is not None:
            gradient = as_tensor(gradient_CE, "gradient_CE").to(parameters)
        by_default = EARLY_STOPPED if estimate or gradient_CE is not None else OPTIMUM
        recipe = Recipe(penalize_bias, l2_reduction, estimate, trained or by_default)
        head = cls(
            parameters.clone(), gradient, 0.0 if estimate else cast("float", l2), n_train, layer.bias is not None,
            as_loss(loss), Kept(bound), weight, recipe=recipe,
            forgotten=Forgotten(ledger=Ledger() if ledger else None),
        )  # fmt: skip
        if l2_reduction == SUM:
            head = replace(head, l2=head.l2 / head.total_weight)
        check_outputs(layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
        return head

    def copy_to(self, module: torch.nn.Linear | torch.nn.Conv2d) -> None:
        """Write these weights into ``module``, in its own dtype and on its own device, and check its outputs.

        A few rows are passed through the module. A module that is refused keeps its weights. If the module's dtype is
        so coarse that rounding undoes much of the change (float16 and bfloat16 often are), a warning says how much.

        Raises:
            DataError: The module's shape differs from the head's, only one of them has a bias, the module's weights are
                recomputed (weight norm, spectral norm, pruning), its outputs do not follow from them (LoRA, hooks), or
                its dtype cannot hold them.
        """
        layer = require_plain(module)
        shape, wanted = tuple(layer.weight.shape), tuple(self.weight_CD.shape)
        if shape != wanted or (layer.bias is not None) != self.bias:
            raise DataError(
                f"the head is {list(wanted)} with{'' if self.bias else 'out'} bias, but the module is {list(shape)} "
                f"with{'out' if layer.bias is None else ''} bias. Give a module of the head's shape."
            )
        write_weights(layer, self.weight_CD, self.parameters_CE[:, -1] if self.bias else None)

    @property
    def n_classes(self) -> int:
        return self.parameters_CE.shape[0]

    @property
    def n_features(self) -> int:
        return self.parameters_CE.shape[1] - int(self.bias)

    @property
    def weight_CD(self) -> Tensor:
        """Weights without the bias column."""
        return self.parameters_CE[:, : self.n_features]

    @property
    def feature_weights_CD(self) -> Tensor:
        return self.weight_CD

    @property
    def layout(self) -> Layout:
        return self.loss.layout

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        like = self.parameters_CE
        return Rows(
            features_ND, labels_N, self.loss, bias=self.bias, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        design_NE = design_matrix(features_ND, self.bias, parameters_CE.device, parameters_CE.dtype)
        return outputs_of(design_NE, parameters_CE.contiguous())  # the same bits before and after saving

    def squared_pulls(self, features_BD: Tensor, cotangent_BC: Tensor, share_B: Tensor) -> Tensor:
        design_BE = design_matrix(features_BD, self.bias, self.parameters_CE.device, self.parameters_CE.dtype)
        return (cotangent_BC.square() * share_B[:, None]).T @ design_BE.square()

    def _settings(self) -> dict[str, Any]:
        certificate = {} if self.certificate is None else {"certificate": self.certificate.as_json()}
        return {"bias": self.bias, **certificate}

    def _tensors(self) -> dict[str, Tensor]:
        return {"gradient": self.gradient_CE}

    def _secrets(self) -> dict[str, Tensor]:
        noise_CE = None if self.certificate is None else self.certificate.secret_CE
        return {} if noise_CE is None else {"noise": noise_CE}

    @classmethod
    def restored(cls, about: Any, tensors: Mapping[str, Tensor], stem: Path, core: Core | None) -> Self:
        known = floats(tensors, "parameters", 2), floats(tensors, "gradient", 2), about.l2, about.n_train, about.bias
        if isinstance(about, FirstRecord):
            return cls(*known, Quadratic(target_scale=about.target_scale))
        given = about.certificate
        certificate = given and Certificate(
            given.noise_std,
            floats(tensors, "noise", 2) if "noise" in tensors else None,
            given.residual_bound,
            given.seeded,
        )
        return cls(*known, read_loss(about.loss), weight=about.weight, certificate=certificate)
