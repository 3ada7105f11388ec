"""The linear head: weights, bias and what must be known about its training to unlearn from it later.

Shapes: D features, E = D (+ 1 with bias), C classes, N training rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfu.errors import ArtifactError, DataError
from sfu.files import write_tensors, write_text
from sfu.losses import Layout, Loss, Objective, Quadratic, Rows, loss_from_json, make_loss
from sfu.losses.rows import design_matrix

SCHEMA = 2
_LOGIT_ROWS = 8192


@dataclass(frozen=True)
class Certificate:
    """What certified removal must know of a head; see :mod:`sfu.unlearning.methods.certified_removal`.

    Attributes:
        noise_std: Standard deviation of the entries of b.
        noise_CE: The b of the term ``<b, W>`` that was added to the *sum* objective in training. Secret: the guarantee
            is for those who see the weights and not b.
        residual_bound: Bound on the gradient norm of the perturbed sum objective, accumulated over removals;
            ``None`` once another method has moved the head.
    """

    noise_std: float
    noise_CE: Tensor
    residual_bound: float | None


@dataclass(frozen=True)
class LinearHead:
    """A trained linear classifier ``f(x) = W x + b`` under one of the losses of :mod:`sfu.losses`.

    Attributes:
        parameters_CE: Weights, with the bias as last column if ``bias``.
        gradient_CE: Gradient of the mean training objective at these parameters; 0 at the optimum. The Newton step
            corrects for it, so a head that was stopped early can be unlearned from too.
        l2: Weight of the regulariser (of the mean objective; never on the bias).
        n_train: Number N of training rows.
        bias: Whether there is a bias.
        loss: The loss it was trained with, class weights included.
        data_hessian: Hessian of the data term of the training objective at these parameters, if it was stored: a
            summary, from which no single example can be read unless they are very few. ``[E, E]``, ``[C, E, E]`` or
            ``[C E, C E]``, by the loss; ``None`` otherwise.
        weight: Total weight V of the training rows; ``None`` for N, as it is without sample and class weights.
        certificate: Of a head trained for certified removal. Its gradient is that of the perturbed objective.
    """

    parameters_CE: Tensor
    gradient_CE: Tensor
    l2: float
    n_train: int
    bias: bool = False
    loss: Loss = field(default_factory=Quadratic)
    data_hessian: Tensor | None = None
    weight: float | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            DataError: Parameters and gradient differ in shape or are not finite, or a number is out of range.
        """
        if isinstance(self.n_train, bool) or not isinstance(self.n_train, int) or self.n_train < 1:
            raise DataError(f"n_train={self.n_train}; the number of training rows, a whole number above 0, is needed.")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise DataError(f"l2={self.l2}; a finite number of at least 0 is needed.")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise DataError(f"weight={self.weight}; the total weight of the training rows is a finite number above 0.")
        if self.parameters_CE.ndim != 2 or self.parameters_CE.shape != self.gradient_CE.shape:
            raise DataError(
                f"head parameters {list(self.parameters_CE.shape)} and gradient {list(self.gradient_CE.shape)} must "
                "both be [classes, features (+ 1 with bias)]."
            )
        self._check_summary()
        if not (torch.isfinite(self.parameters_CE).all() and torch.isfinite(self.gradient_CE).all()):
            raise DataError("the head has NaN or infinite parameters or gradient; it cannot be unlearned from.")

    def _check_summary(self) -> None:
        n_classes, width = self.parameters_CE.shape
        shapes = {
            Layout.shared: [width, width],
            Layout.blocks: [n_classes, width, width],
            Layout.dense: [n_classes * width, n_classes * width],
        }
        wanted = shapes[self.loss.layout]
        if self.data_hessian is not None and list(self.data_hessian.shape) != wanted:
            raise DataError(f"the head's stored curvature is {list(self.data_hessian.shape)}, not {wanted}.")

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Linear,
        *,
        l2: float,
        n_train: int,
        loss: Loss | str = "quadratic",
        gradient_CE: Tensor | None = None,
        weight: float | None = None,
    ) -> LinearHead:
        """Wrap a trained :class:`torch.nn.Linear`; without ``gradient_CE`` it is taken to be at its optimum.

        Args:
            module: The classifier layer.
            l2: Weight of the regulariser of the mean objective.
            n_train: Number N of training rows.
            loss: The loss it was trained with: a name, or one with settings of its own (:func:`sfu.losses.make_loss`).
            gradient_CE: Gradient of the mean training objective at the layer's weights.
            weight: Total weight of the training rows, if they had sample or class weights.

        Raises:
            DataError: ``module`` is no linear layer, or a number is out of range.
            ConfigError: The loss is unknown.
        """
        if not isinstance(module, torch.nn.Linear):
            raise DataError(
                f"a torch.nn.Linear is needed, not a {type(module).__name__}; give the classifier layer alone."
            )
        parameters = module.weight.detach().double()
        if module.bias is not None:
            parameters = torch.cat([parameters, module.bias.detach().double()[:, None]], dim=1)
        gradient = torch.zeros_like(parameters) if gradient_CE is None else torch.as_tensor(gradient_CE).to(parameters)
        kind = make_loss(loss) if isinstance(loss, str) else loss
        return cls(parameters.clone(), gradient, l2, n_train, module.bias is not None, kind, weight=weight)

    def copy_to(self, module: torch.nn.Linear) -> None:
        """Write these weights into ``module``, in its own dtype and on its own device.

        Raises:
            DataError: The module's shape or its having a bias differs from the head's.
        """
        shape, wanted = tuple(module.weight.shape), tuple(self.weight_CD.shape)
        if shape != wanted or (module.bias is not None) != self.bias:
            raise DataError(
                f"the head is {list(wanted)} with{'' if self.bias else 'out'} bias; the module is {list(shape)} "
                f"with{'out' if module.bias is None else ''} bias."
            )
        with torch.no_grad():
            module.weight.copy_(self.weight_CD)
            if self.bias:
                module.bias.copy_(self.parameters_CE[:, -1])

    @property
    def n_classes(self) -> int:
        """C."""
        return self.parameters_CE.shape[0]

    @property
    def n_features(self) -> int:
        """D, without the bias column."""
        return self.parameters_CE.shape[1] - int(self.bias)

    @property
    def weight_CD(self) -> Tensor:
        """Weights without the bias column."""
        return self.parameters_CE[:, : self.n_features]

    @property
    def regularized_E(self) -> Tensor:
        """1 for each regularised parameter of a class, 0 for the bias."""
        mask = torch.ones_like(self.parameters_CE[0])
        if self.bias:
            mask[-1] = 0.0
        return mask

    @property
    def total_weight(self) -> float:
        """V: what the training rows weigh together."""
        return float(self.n_train) if self.weight is None else self.weight

    def objective(self) -> Objective:
        """Loss and regulariser, as of any set of rows."""
        return Objective(self.loss, self.l2, self.regularized_E)

    def objective_of(self, weight: float) -> Objective:
        """The mean objective of a training set of this total weight: with objective perturbation, if there was any."""
        objective, certificate = self.objective(), self.certificate
        return objective if certificate is None else replace(objective, linear_CE=certificate.noise_CE / weight)

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        """Labelled rows as this head's loss sees them, on its device and in its dtype."""
        like = self.parameters_CE
        return Rows(
            features_ND, labels_N, self.loss, bias=self.bias, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def without_summary(self) -> LinearHead:
        """The same head without what was stored of the training data's curvature."""
        return replace(self, data_hessian=None)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> LinearHead:
        """The same head on another device or in another dtype."""
        certificate = self.certificate
        return replace(
            self,
            parameters_CE=self.parameters_CE.to(device, dtype),
            gradient_CE=self.gradient_CE.to(device, dtype),
            data_hessian=None if self.data_hessian is None else self.data_hessian.to(device, dtype),
            certificate=certificate and replace(certificate, noise_CE=certificate.noise_CE.to(device, dtype)),
        )

    def logits(self, features_ND: Tensor) -> Tensor:
        """Outputs ``[N, C]``, in the head's dtype and on its device, computed in chunks."""
        parameters = self.parameters_CE
        if not features_ND.shape[0]:
            return parameters.new_empty(0, self.n_classes)
        with torch.no_grad():
            return torch.cat([self.outputs(chunk, parameters) for chunk in features_ND.split(_LOGIT_ROWS)])

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        """Outputs ``[N, C]`` at any parameters, through which autograd may differentiate (both ways)."""
        return design_matrix(features_ND, self.bias, parameters_CE.device, parameters_CE.dtype) @ parameters_CE.T

    def squared_pulls(self, features_BD: Tensor, bent_BC: Tensor, share_B: Tensor) -> Tensor:
        """``sum_i share_i (J_i^T b_i)^2`` with the Jacobians J of the outputs: importances, by one product."""
        design_BE = design_matrix(features_BD, self.bias, self.parameters_CE.device, self.parameters_CE.dtype)
        return (bent_BC.square() * share_B[:, None]).T @ design_BE.square()

    def save(self, stem: Path) -> list[Path]:
        """Write ``stem.safetensors`` (tensors) and ``stem.json`` (settings); returns both paths.

        Raises:
            ArtifactError: A file cannot be written.
        """
        tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
        arrays = {"parameters": self.parameters_CE, "gradient": self.gradient_CE}
        if self.data_hessian is not None:
            arrays["data_hessian"] = self.data_hessian
        about: dict[str, Any] = {
            "schema": SCHEMA, "kind": "linear", "loss": self.loss.as_json(), "n_classes": self.n_classes,
            "n_features": self.n_features, "bias": self.bias, "l2": self.l2, "n_train": self.n_train,
            "weight": self.weight,
        }  # fmt: skip
        if self.certificate is not None:
            arrays["noise"] = self.certificate.noise_CE
            about["certificate"] = {
                "noise_std": self.certificate.noise_std, "residual_bound": self.certificate.residual_bound,
            }  # fmt: skip
        write_tensors(tensors, arrays)
        write_text(settings, json.dumps(about, indent=2) + "\n")
        return [tensors, settings]

    @classmethod
    def load(cls, stem: Path) -> LinearHead:
        """Read what :meth:`save` wrote (schema 1 of sfu before it had other losses than the quadratic, too).

        Raises:
            ArtifactError: A file is missing, damaged, of another schema, or the two disagree.
        """
        from safetensors.torch import load_file

        tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
        try:
            about = json.loads(settings.read_text())
            arrays = load_file(tensors)
            if about["schema"] not in (1, SCHEMA):
                raise ArtifactError(f"{settings} has schema {about['schema']}; this sfu reads schemas 1 and {SCHEMA}.")
            head = cls(
                arrays["parameters"], arrays["gradient"], float(about["l2"]), int(about["n_train"]),
                bool(about["bias"]), **_read_rest(about, arrays),
            )  # fmt: skip
        except ArtifactError:
            raise
        except FileNotFoundError as error:
            raise ArtifactError(f"no head at {stem}: {error.filename or tensors} is missing.") from error
        except Exception as error:
            raise ArtifactError(f"the head at {stem} cannot be read ({type(error).__name__}: {error}).") from error
        if (head.n_classes, head.n_features) != (about["n_classes"], about["n_features"]):
            raise ArtifactError(f"{settings} and {tensors} do not belong together: their shapes differ.")
        return head


def _read_rest(about: dict[str, Any], arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Loss, stored curvature, weight and certificate of a saved head."""
    if about["schema"] == 1:
        return {"loss": Quadratic(target_scale=float(about["target_scale"])), "data_hessian": arrays.get("second")}
    certificate = about.get("certificate")
    return {
        "loss": loss_from_json(about["loss"]),
        "data_hessian": arrays.get("data_hessian"),
        "weight": about["weight"],
        "certificate": certificate
        and Certificate(float(certificate["noise_std"]), arrays["noise"], certificate["residual_bound"]),
    }
