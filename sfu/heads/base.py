"""What every head has: parameters in which its outputs are affine, and what unlearning must know of its training.

Shapes: N rows, D features, C classes. Parameters ``_CE`` are ``[C, E]``, E = D (+ 1 with bias), for a linear head, and
``[1, p]`` for a head whose classes share all p of them, such as a linearised one: read C as 1 and E as p there.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import Field

from sfu.arrays import Array, as_tensor
from sfu.errors import ArtifactError, ConfigError, DataError
from sfu.files import SECRET, file_digest, write_tensors, write_text
from sfu.heads.certificate import Certificate
from sfu.heads.forgotten import Forgotten, ForgottenRecord
from sfu.heads.kept import Kept, KeptRecord
from sfu.heads.recipe import Recipe, RecipeRecord
from sfu.heads.settings import HeadSettings
from sfu.lazy import torch
from sfu.losses.base import Layout, Loss, as_loss
from sfu.losses.objective import Objective
from sfu.losses.quadratic import Quadratic
from sfu.losses.rows import Rows
from sfu.readers import Above0, Count, Scalar, Size, Versioned
from sfu.registry import Registered, add_modules
from sfu.schema import Meta, check_number, plain_value

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.heads.cores.core import Core


LOGIT_ROWS = 8192
_ALIGNMENT = 64  # bytes: that of PyTorch's new tensors


class HeadRecord(Versioned):
    """What the JSON file of every head holds; a kind of head adds what it needs."""

    kind: str
    n_classes: Annotated[Count, Field(gt=0)]
    n_features: Annotated[Count, Field(gt=0)]
    l2: Size
    n_train: Annotated[Count, Field(gt=0)]
    forgotten: ForgottenRecord | None = None
    kept: KeptRecord | None = None
    recipe: RecipeRecord | None = None


class TrainedRecord(HeadRecord):
    """The JSON file of a head with one of the losses of :mod:`sfu.losses`."""

    loss: dict[str, Scalar | list[float]]
    weight: Above0 | None


@dataclass(frozen=True)
class Head(Registered, ABC, kind="head"):
    """A trained classifier whose outputs are affine in its parameters, under one of the losses of :mod:`sfu.losses`.

    Attributes:
        parameters_CE: The parameters (of a linear head with the bias as last column, if ``bias``).
        gradient_CE: Gradient of the mean training objective at these parameters; 0 at the optimum. It shows what a head
            that was stopped early is near to (:meth:`sfu.request.ForgetRequest.toward`).
        l2: Weight of the regulariser of the mean objective; 0 as long as it is to be estimated.
        n_train: Number N of training rows, without those that were forgotten.
        bias: Whether there is a bias.
        loss: The loss it was trained with, class weights included.
        kept: What it keeps of its training rows besides the weights (``head.keep``); by default, nothing.
        weight: Total weight V of the training rows; ``None`` means N, as it is without sample and class weights. A loss
            with class weights needs it.
        certificate: The certificate of a head trained for certified removal. The stored gradient is then that of the
            perturbed objective.
        forgotten: The requests that the head has served. A head that is saved and loaded keeps it.
        recipe: How it was trained, besides the loss and l2.
        unfinished_CE: Gradient of training that was left undone, and is to stay so. The objective is tilted by it, so
            that the head is at its optimum; ``None`` but within a step (:meth:`sfu.request.ForgetRequest.toward`).
    """

    parameters_CE: Tensor
    gradient_CE: Tensor
    l2: float
    n_train: int
    bias: bool = False
    loss: Loss = field(default_factory=Quadratic)
    kept: Kept = field(default_factory=Kept)
    weight: float | None = None
    certificate: Certificate | None = None
    forgotten: Forgotten = field(default_factory=Forgotten)
    recipe: Recipe = field(default_factory=Recipe)
    unfinished_CE: Tensor | None = field(default=None, repr=False)

    records: ClassVar[Mapping[int, type[HeadRecord]]] = {1: HeadRecord}
    """What the JSON files of each version hold that can be read; the last version is written."""
    stackable: ClassVar[bool] = False
    """Whether ``torch.func.vmap`` over the parameters makes one product of the outputs of many heads."""

    def __post_init__(self) -> None:
        """Check the head; a loss may be given by its name.

        Raises:
            ConfigError: The loss is unknown, or cannot be that of a single output, or ``l2``, ``n_train`` or ``weight``
                is out of range.
            DataError: Shapes differ, or a value is missing or not finite.
        """
        object.__setattr__(self, "loss", as_loss(self.loss))
        for name in ("n_train", "l2", "weight"):
            object.__setattr__(self, name, plain_value(getattr(self, name)))
        if isinstance(self.n_train, bool) or not isinstance(self.n_train, int) or self.n_train < 1:
            raise ConfigError(f"n_train={self.n_train}. Give the number of training rows, a whole number above 0.")
        check_number("l2", self.l2, Meta(at_least=0))
        if self.weight is not None:
            check_number("weight", self.weight, Meta(above=0))
        if self.loss.shift_invariant and self.n_classes == 1:
            raise ConfigError(
                f"a head with one output cannot have loss={self.loss.name}, because the gradient is always 0. Give "
                "loss='logistic' for a binary classifier, or loss='quadratic' for a regression."
            )
        if self.weight is None and self.loss.class_weights is not None:
            raise DataError(
                "a loss with class weights needs the head's `weight`: the sum over the training rows of sample weight "
                "times class weight. Give weight=."
            )
        if not {self.parameters_CE.dtype, self.gradient_CE.dtype} <= {torch.float32, torch.float64}:
            raise DataError(
                f"the head's parameters are {self.parameters_CE.dtype} and its gradient is {self.gradient_CE.dtype}. "
                "Give both as torch.float32 or torch.float64."
            )
        if self.parameters_CE.ndim != 2 or self.parameters_CE.shape != self.gradient_CE.shape:
            raise DataError(
                f"the head's parameters are {list(self.parameters_CE.shape)} and its gradient is "
                f"{list(self.gradient_CE.shape)}. They must both be [classes, features (+ 1 with bias)]."
            )
        secret_CE = None if self.certificate is None else self.certificate.secret_CE
        if secret_CE is not None and secret_CE.shape != self.parameters_CE.shape:
            raise DataError(
                f"the certificate's noise is {list(secret_CE.shape)}, but the head's parameters are "
                f"{list(self.parameters_CE.shape)}. Give the noise that the head was trained with."
            )
        classes, n_named = self.recipe.classes, max(2, self.n_classes)  # a binary classifier may have one output
        if classes is not None and len(classes) != n_named:
            raise ConfigError(
                f"classes={list(classes)} are {len(classes)} names, but the head has {n_named} classes. Give one for "
                "each, in their order."
            )
        if self.forgotten.ledger is not None and self.layout is not Layout.shared:
            raise ConfigError(
                f"a head with loss={self.loss.name} cannot keep a ledger, because its curvature changes with the "
                "parameters and sums over forgotten rows do not tell how. Leave the ledger out, or use loss=quadratic."
            )
        self._check()
        if not (torch.isfinite(self.parameters_CE).all() and torch.isfinite(self.gradient_CE).all()):
            raise DataError(
                "the head has NaN or infinite parameters or gradient, so it cannot be unlearned from. Train it again."
            )

    def _check(self) -> None:
        """Check what only this kind of head has."""

    @classmethod
    def untrained(cls, config: HeadSettings, loss: Loss, n_features: int, n_classes: int, core: Core | None) -> Self:
        """Return a head of zeros in float64 on the CPU, for training.

        Raises:
            ConfigError: This kind of head needs a core and has none.
        """
        raise NotImplementedError(f"{cls.__name__} is not trained.")

    @property
    @abstractmethod
    def n_classes(self) -> int:
        """C."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """D, the numbers of a row."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The shape of the Hessian over all parameters."""

    @property
    def regularized_E(self) -> Tensor:
        """1 for each regularised parameter of a class, 0 for a bias that is not."""
        mask = torch.ones_like(self.parameters_CE[0])
        if self.bias and not self.recipe.penalize_bias:
            mask[-1] = 0.0
        return mask

    @property
    def total_weight(self) -> float:
        """V, the sum of the training rows' weights."""
        return float(self.n_train) if self.weight is None else self.weight

    @property
    def rows_gradient_CE(self) -> Tensor:
        """Mean gradient of the training rows alone (regulariser included), without the b/V of objective perturbation.

        The gradient of a random sample of the rows scatters about it.

        Raises:
            ArtifactError: The head was trained with noise and read without its secret file.
        """
        if self.certificate is None:
            return self.gradient_CE
        return self.gradient_CE - self.certificate.noise_CE.to(self.gradient_CE) / self.total_weight

    def objective(self) -> Objective:
        """Return the loss and the regulariser, for any set of rows.

        Raises:
            ConfigError: The head's l2 is not known yet.
        """
        if self.recipe.estimate_l2:
            raise ConfigError(
                "the head's l2 is to be estimated, so it has no objective yet. sfu.unlearn estimates it from a random "
                "request; otherwise give l2 as a number."
            )
        linear_CE = None if self.unfinished_CE is None else -self.unfinished_CE
        return Objective(self.loss, self.l2, self.regularized_E, linear_CE)

    def objective_of(self, weight: float) -> Objective:
        """Return the mean objective of a training set of this total weight, objective perturbation included."""
        objective, certificate = self.objective(), self.certificate
        return objective if certificate is None else replace(objective, linear_CE=certificate.noise_CE / weight)

    @abstractmethod
    def rows(self, features_ND: Tensor, labels_N: Tensor, weights_N: Tensor | None = None, **options: Any) -> Rows:
        """Return labelled rows for this head's loss, on its device and in its dtype (:class:`sfu.losses.rows.Rows`)."""

    def unlabelled_rows(self, features_ND: Tensor, *, targets: bool = False) -> Rows:
        """Return unlabelled rows; where curvature depends on labels, the head's own predictions stand for them.

        These are the class of the largest output or, for rows that would have ``targets``, 1 for outputs above 0.
        """
        logits_NC = self.logits(features_ND)
        predicted = (logits_NC > 0).double() if targets else logits_NC.argmax(1)
        return self.rows(features_ND, predicted, cache=True)

    def traces(self, rows: Rows) -> Tensor:
        r"""Return what each row adds to the trace of the data term's Hessian, ``[N]``: their sum is the trace.

        It is :math:`s_i \, tr(M_i) |a_i|^2 / C`, with shares s, output Hessians M at the parameters and design rows a:
        of a block of one class, on average. Where the classes share their parameters, :math:`|J_i|_F^2` of the Jacobian
        (an estimate, :meth:`sfu.losses.chunks.Chunk.squares_of_rows`) takes the place of :math:`|a_i|^2`.
        """
        # small tensors that outlive large ones would leave memory in pieces too small to be used again
        found_N, done = torch.empty(len(rows.labels_N), dtype=torch.float64, device=rows.device), 0
        for chunk in rows.chunks():
            hessian = self.loss.curvature(chunk.outputs(self.parameters_CE), chunk.labels_B)
            own_B = chunk.share_B.double() * hessian.trace().double() / self.n_classes
            found_N[done : done + len(own_B)] = own_B * chunk.squares_of_rows().double()
            done += len(own_B)
        return found_N

    @abstractmethod
    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        """Return the outputs ``[N, C]`` at any parameters; autograd can differentiate them in both arguments."""

    @property
    def feature_weights_CD(self) -> Tensor | None:
        """W, if the outputs are also linear in the features, ``W x + b``; else ``None``."""
        return None

    def parameter_groups(self) -> Tensor:
        """Return the number of each parameter's group, ``[C, E]``: parameters of one group play the same part."""
        n_rows, width = self.parameters_CE.shape
        return torch.arange(width).repeat(n_rows, 1)

    def __repr__(self) -> str:
        """Say in one line what kind of head it is, without its numbers."""
        parts = [
            "1 output" if self.n_classes == 1 else f"{self.n_classes} classes", f"{self.n_features} features",
            f"bias={self.bias}", f"loss={self.loss.name}",
            f"l2={'estimate' if self.recipe.estimate_l2 else format(self.l2, 'g')}", f"n_train={self.n_train}",
        ]  # fmt: skip
        if self.forgotten.requests:
            parts.append(f"forgotten={self.forgotten}")
        device, dtype = self.parameters_CE.device, str(self.parameters_CE.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({', '.join([*parts, dtype, str(device)])})"

    def about(self) -> dict[str, Any]:
        """Describe what the run's record should say of this kind of head."""
        return {}

    def squared_pulls(self, features_BD: Tensor, cotangent_BC: Tensor, share_B: Tensor) -> Tensor:
        """Return ``sum_i share_i (J_i^T b_i)^2`` with the Jacobians J of the outputs, in the shape of the parameters.

        This takes a reverse pass for each row; a head may have a shorter way.
        """
        parameters_CE = self.parameters_CE.detach().clone().requires_grad_()
        total_CE = torch.zeros_like(self.parameters_CE)
        for feature_D, cotangent_C, share in zip(features_BD, cotangent_BC, share_B.tolist(), strict=True):
            along = self.outputs(feature_D[None], parameters_CE)[0] @ cotangent_C
            total_CE += share * torch.autograd.grad(along, parameters_CE)[0].square()
        return total_CE

    def without_summary(self) -> Self:
        """Return the head without the sums over its training rows; a bound and class shares stay."""
        return replace(self, kept=self.kept.numbers())

    def without_ledger(self) -> Self:
        """Return the head without the sums over forgotten rows and the head before them."""
        return replace(self, forgotten=replace(self.forgotten, ledger=None))

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return the head on another device or in another dtype."""
        certificate = self.certificate
        return replace(
            self,
            parameters_CE=self.parameters_CE.to(device, dtype),
            gradient_CE=self.gradient_CE.to(device, dtype),
            kept=self.kept.to(device, dtype),
            certificate=certificate and certificate.to(device, dtype),
        )

    def laid_out(self) -> Self:
        """Return the head with its tensors in memory as those of a saved head are, so sums over them end alike."""
        certificate = self.certificate
        secret_CE = None if certificate is None else certificate.secret_CE
        changes: dict[str, Any] = {
            "parameters_CE": lay_out(self.parameters_CE),
            "gradient_CE": lay_out(self.gradient_CE),
            "kept": self.kept.laid_out(lay_out),
        }
        if certificate is not None and secret_CE is not None and lay_out(secret_CE) is not secret_CE:
            return replace(self, **changes, certificate=replace(certificate, secret_CE=lay_out(secret_CE)))
        return (
            self if all(getattr(self, name) is tensor for name, tensor in changes.items()) else replace(self, **changes)
        )

    def logits(self, features_ND: Array) -> Tensor:
        """Return the outputs ``[N, C]``, in the head's dtype and on its device, computed in chunks.

        Raises:
            DataError: The features are no numbers, or not ``[N, D]``.
        """
        parameters_CE, features_ND = self.parameters_CE, as_tensor(features_ND, "features")
        if features_ND.shape[1:] != (self.n_features,):
            raise DataError(
                f"features are {list(features_ND.shape)}, but the head takes [rows, {self.n_features}]. Extract them "
                "with the backbone the head was trained on."
            )
        if not features_ND.shape[0]:
            return parameters_CE.new_empty(0, self.n_classes)
        found_NC = parameters_CE.new_empty(len(features_ND), self.n_classes)
        with torch.no_grad():
            for found, chunk in zip(found_NC.split(LOGIT_ROWS), features_ND.split(LOGIT_ROWS), strict=True):
                found.copy_(self.outputs(chunk, parameters_CE))
        return found_NC

    def save(self, stem: str | Path) -> list[Path]:
        """Write ``stem.safetensors`` (tensors), ``stem.json`` (settings) and what the kind of head needs beside them.

        What must not be published goes to ``stem.secret``, which only its owner can read: the noise of a certificate,
        the stored Hessian, sketch and feature mean, and the digests by which a head recognises rows that it has
        forgotten. Return the paths. Read them with :func:`sfu.heads.files.load_head`.

        Raises:
            ArtifactError: The path names no file, a file cannot be written, or this kind of head is never saved.
        """
        if not self.registered_name:
            raise ArtifactError(f"a {type(self).__name__} cannot be saved, because it has no registered name.")
        stem = Path(stem).expanduser()
        tensors, settings, secret = paths_of(stem)
        beside = self._save_beside(stem)
        about = {
            "schema": max(self.records), "kind": self.registered_name, "loss": self.loss.as_json(),
            "n_classes": self.n_classes, "n_features": self.n_features, "l2": self.l2, "n_train": self.n_train,
            "weight": self.weight, "forgotten": self.forgotten.as_json(),
            "kept": self.kept.as_json(), "recipe": self.recipe.as_json(), **self._settings(),
        }  # fmt: skip
        write_tensors(tensors, {"parameters": self.parameters_CE, **self._tensors()})
        secrets = {**self.kept.as_secrets(), **self._secrets(), **self.forgotten.as_secrets()}
        if secrets:
            write_tensors(secret, secrets, {"head": file_digest(tensors)}, private=True)
        else:
            secret.unlink(missing_ok=True)  # of an earlier head
        write_text(settings, json.dumps(about, indent=2) + "\n")
        return [tensors, settings, *([secret] if secrets else []), *beside]

    def _settings(self) -> dict[str, Any]:
        """Return what the JSON file holds besides what all heads have."""
        return {}

    def _tensors(self) -> dict[str, Tensor]:
        """Return what the tensor file holds besides the parameters."""
        return {"gradient": self.gradient_CE}

    def _secrets(self) -> dict[str, Tensor]:
        """Return what the owner alone may read."""
        return {}

    def _save_beside(self, stem: Path) -> list[Path]:
        """Write further files before the head's own; return their paths."""
        return []

    @classmethod
    def restored(cls, about: Any, tensors: Mapping[str, Tensor], stem: Path, core: Core | None) -> Self:
        """Return the head of the record (one of :attr:`records`) and the tensors that :meth:`save` wrote at ``stem``.

        Raises:
            SfuError, ValueError: Something is missing, not finite, or does not belong to the head.
        """
        raise NotImplementedError(f"{cls.__name__} is not saved.")


add_modules(Head, "sfu.heads.linear")
add_modules(Head, "sfu.heads.linearised")


def lay_out(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows lie one after the other, aligned as new tensors are: itself, or a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def paths_of(stem: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a head's tensors, settings and secrets.

    Raises:
        ArtifactError: The path has no last part.
    """
    if not stem.name:
        raise ArtifactError(f"'{stem}' names no head. Give the path of its files without their suffixes.")
    tensors, settings, secret = (stem.with_name(stem.name + suffix) for suffix in (".safetensors", ".json", SECRET))
    return tensors, settings, secret
