"""The linear head.

Shapes: D features, E = D (+ 1 with bias), C classes, N training rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfu.errors import ArtifactError, DataError
from sfu.files import write_tensors, write_text
from sfu.heads.base import Head
from sfu.heads.certificate import Certificate
from sfu.heads.linear_outputs import LinearOutputs
from sfu.losses import Layout, Loss, Quadratic, Rows, loss_from_json, make_loss
from sfu.losses.rows import design_matrix

SCHEMA = 2


@dataclass(frozen=True)
class LinearHead(Head):
    """A linear classifier ``f(x) = W x + b``; see the base for what it holds."""

    def _check(self) -> None:
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
            weight: Total weight of the training rows; needed if they had sample or class weights.

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
    def feature_weights_CD(self) -> Tensor:
        """The weights."""
        return self.weight_CD

    @property
    def layout(self) -> Layout:
        """The loss's."""
        return self.loss.layout

    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        """Labelled rows as this head's loss sees them, on its device and in its dtype."""
        like = self.parameters_CE
        return Rows(
            features_ND, labels_N, self.loss, bias=self.bias, device=like.device, dtype=like.dtype,
            sample_weights_N=weights_N, **options,
        )  # fmt: skip

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        """One product."""
        design_NE = design_matrix(features_ND, self.bias, parameters_CE.device, parameters_CE.dtype)
        found: Tensor = LinearOutputs.apply(design_NE, parameters_CE)
        return found

    def squared_pulls(self, features_BD: Tensor, bent_BC: Tensor, share_B: Tensor) -> Tensor:
        """One product."""
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
            about["certificate"] = self.certificate.as_json()
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
        "certificate": certificate and Certificate.from_json(certificate, arrays["noise"]),
    }
