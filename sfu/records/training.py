"""What the owner of a checkpoint tells of its training, in a JSON file. No PyTorch is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field

from sfu.errors import ConfigError
from sfu.readers import Above0, Count, Record, Scalar, Size, read_record

if TYPE_CHECKING:
    from torch import nn

    from sfu.heads.linear import LinearHead

_EXAMPLE = '{"n_train": 50000, "loss": "softmax", "l2": "estimate"}'


class TrainingFile(Record):
    """How a layer was trained: the fields of :class:`~sfu.heads.training_record.TrainingRecord`, but for the optimiser.

    Attributes:
        loss: Name of the loss, or a mapping with its ``name`` and its settings.
        l2: Weight of ``l2/2 |W|^2``, or ``"estimate"``.
        bound: Upper bound of the largest eigenvalue of the data term's Hessian.
        ledger: Whether the head keeps sums over the rows that it has forgotten.
    """

    model_config = ConfigDict(extra="forbid")

    n_train: Annotated[Count, Field(gt=0)]
    loss: str | dict[str, Scalar | list[float]]
    l2: Size | Literal["estimate"]
    l2_reduction: Literal["mean", "sum"] = "mean"
    penalize_bias: bool = False
    trained: Literal["optimum", "early_stopped"] | None = None
    weight: Above0 | None = None
    class_counts: list[Count] | None = None
    feature_mean: list[float] | None = None
    training_loss: Size | None = None
    mixup: bool = False
    classes: list[str] | None = None
    frozen_backbone: bool = True
    bound: Size | None = None
    ledger: bool = False

    def head(self, layer: nn.Linear) -> LinearHead:
        """Return the head of a layer that was trained so.

        Raises:
            ConfigError: The loss is unknown or has no such setting, or a value does not fit the layer.
        """
        from sfu.heads.training_record import TrainingRecord
        from sfu.losses.base import make_loss, read_loss

        loss = make_loss(self.loss) if isinstance(self.loss, str) else read_loss(self.loss)
        about: dict[str, Any] = {**dict(self), "loss": loss}
        bound, ledger = about.pop("bound"), about.pop("ledger")
        return TrainingRecord(**about).head(layer, bound=bound, ledger=ledger)


def read_training(path: Path) -> TrainingFile:
    """Return what a JSON file tells of a training.

    Raises:
        ConfigError: It cannot be read, or a value is unknown or out of range.
    """
    remedy = f"Give a JSON file such as {_EXAMPLE}; docs/records.md lists the keys."
    return read_record(path, TrainingFile, remedy, ConfigError)
