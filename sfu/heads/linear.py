"""The linear head: weights, bias and what must be known about its training to unlearn from it later.

Shapes: D features, E = D (+ 1 with bias), C classes, N training rows.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sfu.errors import ArtifactError, DataError
from sfu.files import write_tensors, write_text
from sfu.heads.moments import CHUNK_ROWS, design_matrix
from sfu.losses import QuadraticLoss

SCHEMA = 1


@dataclass(frozen=True)
class LinearHead:
    """A trained linear classifier ``f(x) = W x + b`` under the quadratic loss of :mod:`sfu.losses`.

    Attributes:
        parameters_CE: Weights, with the bias as last column if ``bias``.
        gradient_CE: Gradient of the mean training objective at these parameters; 0 at the optimum. The Newton step
            corrects for it, so a head that was stopped early can be unlearned from too.
        l2: Weight of the regulariser (of the mean objective; never on the bias).
        n_train: Number N of training rows.
        bias: Whether there is a bias.
        target_scale: Value of the hot target in training.
        second_EE: Mean of ``a a^T`` over the training rows, if it was stored: a summary, from which no single example
            can be read unless they are very few. ``None`` otherwise.
    """

    parameters_CE: Tensor
    gradient_CE: Tensor
    l2: float
    n_train: int
    bias: bool = False
    target_scale: float = 1.0
    second_EE: Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes and values.

        Raises:
            DataError: Parameters and gradient differ in shape or are not finite, or a number is out of range.
        """
        if isinstance(self.n_train, bool) or not isinstance(self.n_train, int) or self.n_train < 1:
            raise DataError(f"n_train={self.n_train}; the number of training rows, a whole number above 0, is needed.")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise DataError(f"l2={self.l2}; a finite number of at least 0 is needed.")
        if not (math.isfinite(self.target_scale) and self.target_scale > 0):
            raise DataError(f"target_scale={self.target_scale}; a finite number above 0 is needed.")
        if self.parameters_CE.ndim != 2 or self.parameters_CE.shape != self.gradient_CE.shape:
            raise DataError(
                f"head parameters {list(self.parameters_CE.shape)} and gradient {list(self.gradient_CE.shape)} must "
                "both be [classes, features (+ 1 with bias)]."
            )
        width = self.parameters_CE.shape[1]
        if self.second_EE is not None and self.second_EE.shape != (width, width):
            raise DataError(f"the head's stored curvature is {list(self.second_EE.shape)}, not [{width}, {width}].")
        if not (torch.isfinite(self.parameters_CE).all() and torch.isfinite(self.gradient_CE).all()):
            raise DataError("the head has NaN or infinite parameters or gradient; it cannot be unlearned from.")

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Linear,
        *,
        l2: float,
        n_train: int,
        gradient_CE: Tensor | None = None,
        target_scale: float = 1.0,
    ) -> LinearHead:
        """Wrap a trained :class:`torch.nn.Linear`; without ``gradient_CE`` it is taken to be at its optimum.

        Raises:
            DataError: ``module`` is no linear layer, or a number is out of range.
        """
        if not isinstance(module, torch.nn.Linear):
            raise DataError(
                f"a torch.nn.Linear is needed, not a {type(module).__name__}; give the classifier layer alone."
            )
        parameters = module.weight.detach().double()
        if module.bias is not None:
            parameters = torch.cat([parameters, module.bias.detach().double()[:, None]], dim=1)
        gradient = torch.zeros_like(parameters) if gradient_CE is None else torch.as_tensor(gradient_CE).to(parameters)
        return cls(parameters.clone(), gradient, l2, n_train, module.bias is not None, target_scale)

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

    def loss(self) -> QuadraticLoss:
        """The loss this head was trained with."""
        return QuadraticLoss(self.l2, self.target_scale, self.regularized_E, self.n_classes)

    def after_unlearning(self, parameters_CE: Tensor, n_retain: int) -> LinearHead:
        """The head of the retained data at ``parameters_CE``, taken to be at its optimum there.

        A stored summary of the old training data is dropped with the examples it still contains.
        """
        return replace(
            self,
            parameters_CE=parameters_CE,
            gradient_CE=torch.zeros_like(parameters_CE),
            n_train=n_retain,
            second_EE=None,
        )

    def without_summary(self) -> LinearHead:
        """The same head without what was stored of the training data's curvature."""
        return replace(self, second_EE=None)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> LinearHead:
        """The same head on another device or in another dtype."""
        return replace(
            self,
            parameters_CE=self.parameters_CE.to(device, dtype),
            gradient_CE=self.gradient_CE.to(device, dtype),
            second_EE=None if self.second_EE is None else self.second_EE.to(device, dtype),
        )

    def logits(self, features_ND: Tensor) -> Tensor:
        """Outputs ``[N, C]``, in the head's dtype and on its device, computed in chunks."""
        parameters = self.parameters_CE
        chunks = [
            design_matrix(chunk, self.bias, parameters.device, parameters.dtype) @ parameters.T
            for chunk in features_ND.split(CHUNK_ROWS)
        ]
        return torch.cat(chunks) if chunks else parameters.new_empty(0, self.n_classes)

    def save(self, stem: Path) -> list[Path]:
        """Write ``stem.safetensors`` (tensors) and ``stem.json`` (settings); returns both paths.

        Raises:
            ArtifactError: A file cannot be written.
        """
        tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
        stored = {} if self.second_EE is None else {"second": self.second_EE}
        write_tensors(tensors, {"parameters": self.parameters_CE, "gradient": self.gradient_CE, **stored})
        about = {
            "schema": SCHEMA, "kind": "linear", "loss": "quadratic", "n_classes": self.n_classes,
            "n_features": self.n_features, "bias": self.bias, "l2": self.l2, "n_train": self.n_train,
            "target_scale": self.target_scale,
        }  # fmt: skip
        write_text(settings, json.dumps(about, indent=2) + "\n")
        return [tensors, settings]

    @classmethod
    def load(cls, stem: Path) -> LinearHead:
        """Read what :meth:`save` wrote.

        Raises:
            ArtifactError: A file is missing, damaged, of another schema, or the two disagree.
        """
        from safetensors.torch import load_file

        tensors, settings = stem.with_name(stem.name + ".safetensors"), stem.with_name(stem.name + ".json")
        try:
            about = json.loads(settings.read_text())
            arrays = load_file(tensors)
            if about["schema"] != SCHEMA:
                raise ArtifactError(f"{settings} has schema {about['schema']}; this sfu reads schema {SCHEMA}.")
            head = cls(
                arrays["parameters"], arrays["gradient"], float(about["l2"]), int(about["n_train"]),
                bool(about["bias"]), float(about["target_scale"]), arrays.get("second"),
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
