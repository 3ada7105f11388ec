r"""The interface of a loss, as a function of the outputs :math:`z = W a` of one example.

With :math:`l(z, y)` convex in z, the derivatives in the parameters follow from those in the outputs by the design row
a:

.. math:: \nabla_W\, l = \nabla_z l \; a^T, \qquad \nabla^2_W\, l = \nabla^2_z l \otimes a a^T

so a loss is its value, its slope :math:`\nabla_z l` and its :math:`C \times C` output Hessian. The output Hessian is
never formed: it is a diagonal, minus a rank-one matrix for softmax.

Labels y are class numbers, int64 ``[N]``, or, for rows that no class number describes, targets: floats ``[N, C]``, one
for each output. The loss of a class number is that of its one-hot row.

Shapes: N rows, C classes (outputs, where labels are targets); outputs are ``[N, ..., C]``, the axes between holding
several parameter points. B blocks of values: C for a loss that is a sum over classes, else 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sfu.errors import ConfigError
from sfu.registry import add_modules
from sfu.schema import Choice, make, plain_value, setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sfu.distributed import Ranks


BALANCED = "balanced"


class Layout(Enum):
    """The shape of the Hessian over all parameters."""

    shared = "shared"  # the same E x E block for every class, whatever the parameters
    blocks = "blocks"  # an E x E block for each class
    dense = "dense"  # classes are coupled
    products = "products"  # classes share all parameters: no matrix, whatever the loss


class Targets(Enum):
    """What targets a loss can have; the value completes "Give ..."."""

    real = "any finite number for each output"
    binary = "0 or 1 (or -1 or 1) for each output"
    shares = "a number from 0 to 1 (or -1 or 1) for each output"
    distribution = "shares of at least 0 that sum to 1"


@dataclass(frozen=True)
class Constants:
    r"""Bounds on the derivatives of a loss in its outputs; infinite where there is none.

    Multiply by powers of the largest row norm for the parameters: ``|grad| <= C |a|``, and
    :math:`\|\nabla^2 l(W) - \nabla^2 l(W')\| \le \gamma \|W - W'\| |a|^3`.

    Attributes:
        gradient_bound: C, the largest norm of the slope (of one class's slope for a sum over classes).
        curvature_bound: The largest eigenvalue of the output Hessian.
        curvature_lipschitz: gamma, the Lipschitz constant of the output Hessian.
    """

    gradient_bound: float
    curvature_bound: float
    curvature_lipschitz: float


@dataclass(frozen=True)
class OutputHessian:
    """``diag(diagonal) - rank_one rank_one^T`` for each row, both ``[N, ..., C]``; no rank one in sums over classes."""

    diagonal: Tensor
    rank_one: Tensor | None = None

    def apply(self, vectors: Tensor) -> Tensor:
        """Multiply vectors of the outputs' shape (broadcast over the middle axes)."""
        if self.rank_one is None:
            return self.diagonal * vectors
        along = (self.rank_one * vectors).sum(-1, keepdim=True)
        return self.diagonal * vectors - self.rank_one * along

    def dense(self) -> Tensor:
        """The matrices themselves, ``[N, ..., C, C]``."""
        full = self.diagonal.diag_embed()
        if self.rank_one is not None:
            full = full - self.rank_one[..., :, None] * self.rank_one[..., None, :]
        return full

    def to_float32(self) -> OutputHessian:
        """Convert; where both are one tensor, as for softmax, they stay one."""
        diagonal = self.diagonal.float()
        if self.rank_one is None:
            return OutputHessian(diagonal)
        return OutputHessian(diagonal, diagonal if self.rank_one is self.diagonal else self.rank_one.float())

    def unsqueeze(self) -> OutputHessian:
        """Insert an axis before the last, to apply it to several vectors a row, ``[N, M, C]``."""
        rank_one = None if self.rank_one is None else self.rank_one[:, None]
        return OutputHessian(self.diagonal[:, None], rank_one)

    def trace(self) -> Tensor:
        """Trace of each row's matrix, ``[N, ...]``."""
        trace = self.diagonal.sum(-1)
        return trace if self.rank_one is None else trace - self.rank_one.square().sum(-1)


@dataclass(frozen=True)
class Loss(Choice, ABC, kind="loss"):
    """A convex differentiable loss; its fields are the keys of the group ``loss``.

    A class weight is multiplied into the weight of each example of its class. ``balanced`` stands until
    :meth:`for_labels` has counted the classes.
    """

    prefix: ClassVar[str] = "loss"
    synonyms: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("crossentropy", "crossentropyloss", "categoricalcrossentropy", "ce", "nll", "nllloss",
                         "multinomial"), "softmax"),
        **dict.fromkeys(("mse", "mseloss", "squarederror", "squared", "leastsquares", "ridge",
                         "ridgeclassifier"), "quadratic"),
        **dict.fromkeys(("bce", "bceloss", "bcewithlogits", "bcewithlogitsloss", "binarycrossentropy", "sigmoid"),
                        "logistic"),
        **dict.fromkeys(("hinge", "hingeloss", "multimarginloss", "svm"), "huber_hinge"),
        **dict.fromkeys(("squaredhinge", "linearsvc"), "squared_hinge"),
    }  # fmt: skip

    class_weights: Any = setting(None, "null, balanced, or a number for every class.")
    name: str = setting("", "Name of the loss.")

    layout: ClassVar[Layout]
    shift_invariant: ClassVar[bool] = False
    """Whether adding one number to all outputs changes nothing."""
    attained: ClassVar[bool] = True
    """Whether an example's loss is smallest somewhere, rather than falling forever as its outputs grow."""

    def check_settings(self) -> None:
        """Turn class weights into a tuple of floats."""
        given = plain_value(self.class_weights)
        if given is None or given == BALANCED:
            return
        wanted = "Give null, balanced, or a finite number above 0 for every class."
        if isinstance(given, str | Mapping) or not hasattr(given, "__iter__"):
            raise ConfigError(f"loss.class_weights={given} is not a list. {wanted}")
        try:
            weights = tuple(float(weight) for weight in given)
        except (TypeError, ValueError):
            raise ConfigError(f"loss.class_weights={list(given)} are not all numbers. {wanted}") from None
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ConfigError(f"loss.class_weights={list(weights)} are not all above 0 and finite. {wanted}")
        object.__setattr__(self, "class_weights", weights)

    def for_labels(self, labels_N: Tensor, n_classes: int, ranks: Ranks | None = None) -> Self:
        """Return the loss for these training labels; ``balanced`` becomes ``N / (C n_c)``, so classes weigh the same.

        The rows of all ``ranks`` are counted together.

        Raises:
            ConfigError: There are not C class weights.
        """
        weights = self.class_weights
        if weights == BALANCED:
            counts_C = labels_N.bincount(minlength=n_classes)
            counts_C = counts_C if ranks is None else ranks.add_up(counts_C)
            total, counts = int(counts_C.sum()), counts_C.clamp(min=1).tolist()
            return replace(self, class_weights=tuple(total / (n_classes * count) for count in counts))
        if weights is not None and len(weights) != n_classes:
            raise ConfigError(
                f"loss.class_weights={list(weights)} has {len(weights)} entries for {n_classes} classes. Give one for "
                "every class."
            )
        return self

    @property
    def targets(self) -> Targets:
        """What targets it can have."""
        return Targets.binary

    @property
    @abstractmethod
    def constants(self) -> Constants:
        """Bounds for theory, each with its derivation."""

    @abstractmethod
    def values(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """Value of each example, ``[N, ..., B]``; their sum over B is the loss."""

    @abstractmethod
    def slopes(self, outputs: Tensor, labels_N: Tensor) -> Tensor:
        """Gradient in the outputs, ``[N, ..., C]``."""

    @abstractmethod
    def curvature(self, outputs: Tensor, labels_N: Tensor) -> OutputHessian:
        """Hessian in the outputs."""

    @property
    def separable(self) -> bool:
        """Whether the loss is a sum over classes."""
        return self.layout is not Layout.dense

    def row_weights(self, labels_N: Tensor, sample_weights_N: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return each example's sample weight times its class weight, ``[N]``, or ``None`` if all are 1.

        Raises:
            ConfigError: There are fewer class weights than classes among the labels, or the labels are targets.
        """
        if self.class_weights is None:
            return None if sample_weights_N is None else sample_weights_N.to(labels_N.device, dtype)
        if labels_N.ndim > 1:
            raise ConfigError(
                f"loss.class_weights={self.class_weights} are for rows with one class number each, but these rows have "
                "targets. Leave class_weights out, and give each row's weight as its sample weight."
            )
        if labels_N.numel() and int(labels_N.max()) >= len(self.class_weights):
            raise ConfigError(
                f"loss.class_weights has {len(self.class_weights)} entries but a label is {int(labels_N.max())}. Give "
                "one weight for each class."
            )
        of_class_N = labels_N.new_tensor(self.class_weights, dtype=dtype)[labels_N]
        return of_class_N if sample_weights_N is None else of_class_N * sample_weights_N.to(of_class_N)

    def as_json(self) -> dict[str, Any]:
        """Return name and settings, from which :func:`read_loss` makes the loss again."""
        return asdict(self)


add_modules(Loss, "sfu.losses", skip=("chunks", "objective", "rows", "targets"))  # they hold no loss


def signs(labels_N: Tensor, like: Tensor) -> Tensor:
    """Return 1 for the label's class (or a target of 1) and -1 for the others, in the shape of :func:`one_hot`."""
    return 2 * one_hot(labels_N, like) - 1


def one_hot(labels_N: Tensor, like: Tensor) -> Tensor:
    """``[N, 1, ..., C]`` zeros and ones, or given targets, that broadcast against outputs ``[N, ..., C]``."""
    from torch.nn.functional import one_hot as encode

    hot = (labels_N if labels_N.ndim > 1 else encode(labels_N, like.shape[-1])).to(like.dtype)
    return hot.reshape(labels_N.shape[0], *[1] * (like.ndim - 2), like.shape[-1])


def as_loss(given: object) -> Loss:
    """Return a loss that is given as itself or by its name.

    Raises:
        ConfigError: It is neither; for a loss of PyTorch, the message names the one of sfu.
    """
    if isinstance(given, Loss):
        return given
    if isinstance(given, str):
        return make_loss(given)
    kind = given if isinstance(given, type) else type(given)
    name = kind.registered_name if issubclass(kind, Loss) else kind.__name__
    meant = name if name in Loss.names() else Loss.synonyms.get(name.lower())
    raise ConfigError(
        f"loss={given if isinstance(given, type) else kind.__name__} is not a loss of sfu. Give a name, such as "
        f"loss={(meant or 'softmax')!r}, or what make_loss returns for it. The names are {', '.join(Loss.names())}."
    )


def make_loss(name: str, **settings: Any) -> Loss:
    """Return the loss ``name`` with its own settings.

    Raises:
        ConfigError: The name is unknown, the loss has no such setting, or a value is out of range.
    """
    return Loss.make(name, **settings)


def read_loss(plain: Mapping[str, Any]) -> Loss:
    """Return the loss of name and settings as a JSON file holds them (:meth:`Loss.as_json`).

    Raises:
        ConfigError: There is no name, no such loss or setting, or a value is of another type or out of range.
    """
    name = plain.get("name")
    if not isinstance(name, str):
        raise ConfigError('loss has no name. Give one, as in {"name": "softmax", "label_smoothing": 0.1}.')
    return make(Loss.named(name, "loss"), plain, f"loss={name}")
