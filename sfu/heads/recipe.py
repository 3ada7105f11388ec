"""How a head was trained, as far as a step depends on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Literal

from sfu.errors import ConfigError
from sfu.readers import Record, Size
from sfu.schema import Meta, check_number, plain_value

MEAN, SUM = "mean", "sum"
OPTIMUM, EARLY_STOPPED = "optimum", "early_stopped"


class Reference(Enum):
    """What a step is to lead to."""

    same_recipe = "same_recipe"  # where the same training would have ended without the forget rows
    optimum = "optimum"  # the optimum without the forget rows: the training is finished, too


class RecipeRecord(Record):
    """What a head's JSON file says of its training; files of before there was one say nothing."""

    penalize_bias: bool = False
    l2_reduction: Literal["mean", "sum"] = "mean"
    estimate_l2: bool = False
    trained: Literal["optimum", "early_stopped"] = "optimum"
    frozen_backbone: bool = True
    training_loss: Size | None = None
    classes: list[str] | None = None


@dataclass(frozen=True)
class Recipe:
    """How a head was trained.

    Attributes:
        penalize_bias: Whether the bias is regularised, too.
        l2_reduction: What stays as it is when rows are forgotten: ``mean`` for l2, ``sum`` for l2 times the total
            weight of the training rows, as where the regulariser was added to the sum of the losses.
        estimate_l2: Whether l2 is to be estimated from the rows of the first request (:func:`sfu.unlearn`).
        trained: How far: to the ``optimum``, or, if it was ``early_stopped``, perhaps not. The same training without
            the forget rows then ends before the optimum, too, so no step is longer than Newton's.
        frozen_backbone: Whether the backbone never saw the training rows.
        training_loss: Mean loss of the training rows, without the regulariser, if it is known.
        classes: Names of the classes, if they are known.
    """

    penalize_bias: bool = False
    l2_reduction: str = MEAN
    estimate_l2: bool = False
    trained: str = OPTIMUM
    frozen_backbone: bool = True
    training_loss: float | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the choices.

        Raises:
            ConfigError: One is unknown.
        """
        for name in ("penalize_bias", "estimate_l2", "frozen_backbone"):
            object.__setattr__(self, name, value := plain_value(getattr(self, name)))
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}. Give True or False.")
        if self.l2_reduction not in (MEAN, SUM):
            raise ConfigError(
                f"l2_reduction={self.l2_reduction!r} is unknown. Choose 'mean' if l2 was added to the mean of the "
                "losses, or 'sum' if it was added to their sum."
            )
        if self.trained not in (OPTIMUM, EARLY_STOPPED):
            raise ConfigError(
                f"trained={self.trained!r} is unknown. Choose 'optimum' if training went on until nothing changed, or "
                "'early_stopped'."
            )
        object.__setattr__(self, "training_loss", plain_value(self.training_loss))
        if self.training_loss is not None:
            check_number("training_loss", self.training_loss, Meta(at_least=0))
        if self.classes is not None and (
            not all(isinstance(name, str) for name in self.classes) or len(set(self.classes)) < len(self.classes)
        ):
            raise ConfigError(f"classes={list(self.classes)} are not all texts, or not all different. Name each class.")

    def as_json(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        return asdict(self)

    @classmethod
    def restored(cls, about: RecipeRecord | None) -> Recipe:
        """Return what :meth:`as_json` wrote."""
        if about is None:
            return cls()
        return cls(**{**about.model_dump(), "classes": None if about.classes is None else tuple(about.classes)})
