"""What the owner of a head tells of its training, in the terms of PyTorch, and what sfu makes of it.

Shapes: D features, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sfu.arrays import Array, as_tensor
from sfu.errors import ConfigError
from sfu.heads.linear import LinearHead
from sfu.heads.plain_layer import require_plain
from sfu.heads.recipe import OPTIMUM
from sfu.losses.base import Loss, as_loss, make_loss
from sfu.schema import Meta, check_number

ESTIMATE: Literal["estimate"] = "estimate"


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """How a classifier layer was trained, as far as unlearning depends on it; :meth:`head` makes the head.

    Attributes:
        n_train: Number N of training rows.
        loss: The loss: ``torch.nn.CrossEntropyLoss``, ``BCEWithLogitsLoss`` or ``MSELoss`` as it was used, with label
            smoothing and class weights; or a loss of sfu, or its name.
        optimizer: The optimiser of the training, from which l2 and the decay of the bias are read. Weight decay is an
            l2 only where it is part of the gradient (not in AdamW) and training reached the optimum
            (``trained="optimum"``); otherwise l2 is estimated.
        l2: In place of an optimiser: weight of ``l2/2 |W|^2``, or ``"estimate"``.
        l2_reduction: ``mean`` if the regulariser was added to the mean of the losses, ``sum`` if to their sum.
        penalize_bias: Whether the bias is regularised; by default, what the optimiser says, or else not.
        trained: ``optimum`` if training went on until nothing changed, or ``early_stopped``; by default, ``optimum`` if
            l2 is a number.
        batch_size: Rows of a batch; needed for a loss that sums over them.
        weight: Total weight of the training rows, if they had sample weights.
        class_counts: Number of training rows of each class, ``[C]``. A loss with class weights needs it, or ``weight``;
            and a request is compared with it.
        feature_mean: Mean of the training rows' features, ``[D]``. A request is compared with it, so that features in
            another scale are found.
        training_loss: Mean loss of the training rows at the end of training, by ``loss``, without the regulariser and
            without mixing rows. A request is compared with it, so that rows that were not trained on are found.
        mixup: Whether rows were mixed with others in training (mixup, CutMix). The optimum is then not that of the rows
            themselves, so l2 is estimated.
        classes: Names of the classes, ``[C]``, by which labels can be given; two of them for a single output.
        frozen_backbone: Whether the backbone never saw the training rows. Otherwise it holds what it learned from the
            rows to forget, and every result says so. An optimiser that trained more than the layer tells the same.
    """

    n_train: int
    loss: Loss | str | nn.Module
    optimizer: torch.optim.Optimizer | None = None
    l2: float | Literal["estimate"] | None = None
    l2_reduction: Literal["mean", "sum"] = "mean"
    penalize_bias: bool | None = None
    trained: Literal["optimum", "early_stopped"] | None = None
    batch_size: int | None = None
    weight: float | None = None
    class_counts: Sequence[int] | Mapping[Any, int] | Tensor | None = None
    feature_mean: Array | None = None
    training_loss: float | None = None
    mixup: bool = False
    classes: Sequence[str] | None = None
    frozen_backbone: bool = True

    def head(
        self, layer: nn.Linear | nn.Conv2d, *, bound: float | None = None, ledger: bool = False,
        gradient_CE: Array | None = None,
    ) -> LinearHead:  # fmt: skip
        """Return the head of a layer that was trained so; the arguments are those of :meth:`LinearHead.from_module`.

        Raises:
            DataError: The layer is no plain linear layer, or a number does not fit it.
            ConfigError: The record contradicts itself, lacks something, or has a loss or an optimiser that sfu cannot
                translate.
        """
        if (self.optimizer is None) == (self.l2 is None):
            raise ConfigError(
                f"the training record has {'both' if self.l2 is not None else 'neither'} optimizer and l2. Give the "
                "optimizer of the training, or l2 as a number or 'estimate'."
            )
        self._check()
        n_outputs = require_plain(layer).out_features
        loss, times, of_row = self._loss(n_outputs)
        l2, decayed_bias = self.l2, False
        if self.optimizer is not None:
            decay, decayed_bias, is_l2 = _weight_decay(self.optimizer, layer)
            exact = self.trained == OPTIMUM and is_l2 and (decay > 0 or loss.attained)
            l2 = decay * times if exact else ESTIMATE
        assert l2 is not None, "there is one without an optimiser"
        shares_C, weight = None, self.weight
        if self.class_counts is not None:
            counts_C = self._counts(n_outputs)
            shares_C = counts_C / counts_C.sum()
            if weight is None and loss.class_weights is not None:
                weight = float(counts_C @ counts_C.new_tensor(loss.class_weights))
        head = LinearHead.from_module(
            layer, l2=ESTIMATE if self.mixup else l2, n_train=self.n_train, loss=loss, l2_reduction=self.l2_reduction,
            penalize_bias=decayed_bias if self.penalize_bias is None else self.penalize_bias,
            trained=self.trained, weight=weight, bound=bound, ledger=ledger, gradient_CE=gradient_CE,
        )  # fmt: skip
        mean_D = None if self.feature_mean is None else as_tensor(self.feature_mean, "feature_mean").double()
        recipe = replace(
            head.recipe, training_loss=self.training_loss,
            frozen_backbone=False if self.optimizer and _trained_more(self.optimizer, layer) else self.frozen_backbone,
            classes=None if self.classes is None else tuple(self.classes),
        )  # fmt: skip
        if recipe.training_loss is not None:  # sfu's mean is another one
            recipe = replace(recipe, training_loss=of_row * recipe.training_loss)
        return replace(head, kept=replace(head.kept, shares_C=shares_C, mean_D=mean_D), recipe=recipe)

    def _check(self) -> None:
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={type(self.optimizer).__name__} is no torch.optim.Optimizer. Give the one that trained the "
                "layer."
            )
        if not isinstance(self.mixup, bool):
            raise ConfigError(f"mixup={self.mixup!r}. Give True or False.")
        if self.batch_size is not None:
            check_number("batch_size", self.batch_size, Meta(at_least=1), whole=True)
        if self.classes is not None and not isinstance(self.classes, list | tuple):
            raise ConfigError(f"classes={type(self.classes).__name__} has no order. Give a list of names.")
        mean_D = None if self.feature_mean is None else as_tensor(self.feature_mean, "feature_mean")
        if mean_D is not None and not bool(torch.isfinite(mean_D).all()):
            raise ConfigError("feature_mean has NaN or infinite values. Give the mean of the training rows' features.")

    def _loss(self, n_outputs: int) -> tuple[Loss, float, float]:
        """Return the loss of sfu, and what weight decay and mean loss of a row are to be multiplied by for its mean."""
        given = self.loss
        name = _NAMES.get(type(given)) if isinstance(given, nn.Module) else None
        if not isinstance(given, nn.Module) or name is None:
            return as_loss(given).for_labels(torch.empty(0, dtype=torch.int64), n_outputs), 1.0, 1.0
        settings = {}
        if isinstance(given, nn.CrossEntropyLoss):
            if given.weight is not None and given.label_smoothing > 0:
                raise ConfigError(
                    "loss=CrossEntropyLoss has a weight and label_smoothing. PyTorch then weighs the other classes' "
                    "share of the target by their own weights, and sfu has no such loss. Train without one of the two."
                )
            settings = {
                "label_smoothing": given.label_smoothing,
                "class_weights": None if given.weight is None else given.weight.tolist(),
            }
        elif any(getattr(given, key, None) is not None for key in ("weight", "pos_weight")):
            raise ConfigError(
                f"loss={type(given).__name__} has a weight or pos_weight, and sfu weighs rows alone. For a layer with "
                "a single output, give loss='logistic' and the weights of the rows (docs/heads.md). For others, train "
                "without it."
            )
        halved = 2.0 if isinstance(given, nn.MSELoss) else 1.0  # sfu's quadratic loss is half the squared error
        loss = make_loss(name, **settings)
        if given.reduction == "mean":
            per_row = 1 if isinstance(given, nn.CrossEntropyLoss) else n_outputs
            return loss, per_row / halved, per_row / halved
        if given.reduction != "sum" or self.batch_size is None:
            raise ConfigError(
                f"loss={type(given).__name__} has reduction='{given.reduction}', so its size depends on the batch. "
                "Give batch_size and reduction='sum', or the loss with reduction='mean'."
            )
        return loss, 1 / (halved * self.batch_size), 1 / halved

    def _counts(self, n_outputs: int) -> Tensor:
        counts_C = as_tensor(cast("Array", in_order(self.class_counts, self.classes)), "class_counts").double()
        fits = counts_C.shape == (n_outputs,) and bool((counts_C >= 0).all()) and float(counts_C.sum()) == self.n_train
        if not fits:
            raise ConfigError(
                f"class_counts={counts_C.tolist()} must be {n_outputs} numbers of rows whose sum is "
                f"n_train={self.n_train}. Count the labels of the training rows."
            )
        return counts_C


def in_order(counts: Any, classes: Sequence[Any] | None) -> Any:
    """Return counts by class, such as a mapping or what ``value_counts`` returns, in the order of the classes.

    Raises:
        ConfigError: A class has no count.
    """
    by_class = counts.to_dict() if hasattr(counts, "to_dict") else counts
    if not isinstance(by_class, Mapping):
        return counts
    order = list(range(len(by_class))) if classes is None else list(classes)
    missing = [one for one in order if one not in by_class]
    if missing:
        raise ConfigError(f"class_counts have no number for class {str(missing[0])!r}. Give one for every class.")
    return [by_class[one] for one in order]


_NAMES = {nn.CrossEntropyLoss: "softmax", nn.BCEWithLogitsLoss: "logistic", nn.MSELoss: "quadratic"}


_COUPLED = ("SGD", "Adam", "Adamax", "Adagrad", "Adadelta", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "LBFGS")
"""PyTorch's optimisers that add the decay to the gradient; ``decoupled_weight_decay`` may say otherwise."""


def _trained_more(optimizer: torch.optim.Optimizer, layer: nn.Module) -> bool:
    """Whether the optimiser trained other parameters than those of the layer, or of one that the layer is a copy of."""
    own, stepped = {id(one) for one in layer.parameters(recurse=False)}, {id(one) for one in optimizer.state}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    others = [one for one in held if id(one) not in own and (one.requires_grad or id(one) in stepped)]
    return len(others) > (0 if any(id(one) in own for one in held) else len(own))


def _weight_decay(optimizer: torch.optim.Optimizer, layer: nn.Linear | nn.Conv2d) -> tuple[float, bool, bool]:
    """Return the decay of the layer's weight, whether it is that of the bias, too, and whether it is an l2."""
    groups, kind = optimizer.param_groups, type(optimizer).__name__

    def holds(parameter: Tensor | None) -> dict[str, Any] | None:
        return next((group for group in groups if any(one is parameter for one in group["params"])), None)

    group, own_bias = holds(layer.weight), holds(layer.bias)
    if group is None:  # the layer may be a copy of the one that was trained
        remedy = "Give the optimizer that trained this layer, or l2 and penalize_bias."
        if not any(one.shape == layer.weight.shape for part in groups for one in part["params"]):
            shape = list(layer.weight.shape)
            raise ConfigError(f"the {kind} holds nothing of the shape of the layer's weight, {shape}. {remedy}")
        if len({(part.get("weight_decay", 0.0), part.get("decoupled_weight_decay")) for part in groups}) > 1:
            raise ConfigError(
                f"the {kind} does not hold the layer's weight, and its groups have different weight decays. {remedy}"
            )
        group = own_bias = groups[0]
    decay = float(group.get("weight_decay", 0.0))
    of_bias = 0.0 if layer.bias is None or own_bias is None else float(own_bias.get("weight_decay", 0.0))
    if of_bias not in (0.0, decay):
        raise ConfigError(
            f"the {kind} decays the layer's weight by {decay:g} and its bias by {of_bias:g}. sfu knows one l2 for "
            "both, or none for the bias; give l2 and penalize_bias as what comes nearest."
        )
    coupled = kind in _COUPLED and not group.get("decoupled_weight_decay", False)
    return decay, of_bias > 0, coupled
