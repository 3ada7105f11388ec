"""Settings of backbones and of the forget set. This module imports neither PyTorch nor NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from sfu.errors import ConfigError
from sfu.schema import Settings, setting

NO_BACKBONE, AUTO_BACKBONE, PAPER_BACKBONE, PIXELS = "none", "auto", "resnet18", "pixels"
DTYPES = ("float32", "float64", "bfloat16", "float16")
NAMED_WEIGHTS = ("default", "none")


@dataclass
class BackboneSettings(Settings):
    """What turns images into features. A backbone is frozen and always in evaluation mode."""

    prefix: ClassVar[str] = "backbone"

    name: str = setting("", "none, pixels, or a model of the library; auto: none for features, resnet18 for images.")
    library: str = setting("torchvision", "Library of models.")
    weights: str = setting("default", "default, none (random), or a file: .safetensors, or a torch file of tensors.")
    seed: int = setting(0, "Seed of random weights.", at_least=0)
    size: int | None = setting(
        None, "Resize the shorter side, then crop the centre; null: as the weights were made.", at_least=1
    )
    mean: list[float] | None = setting(None, "Mean of each channel in 0..1; null: as the weights were made.")
    std: list[float] | None = setting(None, "Standard deviation of each channel; null: as the weights were made.")
    dtype: str = setting("float32", "Of the forward pass; features are stored in float32.", choices=DTYPES)
    batch_size: int = setting(256, "Images of one forward pass.", at_least=1)
    workers: int | None = setting(
        None, "Threads that decode; null: one for each core.", at_least=1, affects_results=False
    )
    cache: str | None = setting(None, "Folder of extracted features; null: sfu's cache.", affects_results=False)

    def check_settings(self) -> None:
        """Check the normalisation; the library checks name and weights when it is needed."""
        if self.name == PIXELS and self.weights not in NAMED_WEIGHTS:
            raise ConfigError(f"backbone.weights={self.weights} has no effect on backbone=pixels. Leave it out.")
        if (self.mean is None) != (self.std is None):
            raise ConfigError("backbone.mean and backbone.std belong together. Give both or neither.")
        if self.mean is not None and self.std is not None:
            given = f"backbone.mean={list(self.mean)} and backbone.std={list(self.std)}"
            if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
                raise ConfigError(f"{given} do not fit together. Give 1 or 3 values of each.")
            if not all(0 <= value <= 1 for value in self.mean) or not all(0 < value <= 1 for value in self.std):
                raise ConfigError(f"{given} must describe pixels in 0..1 (divide by 255), and std must be above 0.")

    @property
    def weights_file(self) -> Path | None:
        """The file of weights, if ``weights`` names one; raises :class:`ConfigError` if it is not there."""
        if self.weights in NAMED_WEIGHTS:
            return None
        path = Path(self.weights).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"backbone.weights={self.weights} is not a file (looked from {Path.cwd()}). Give default, none, or a "
                "file of weights."
            )
        return path


RANDOM = "random"
CLASS = "class"
PERSON = "person"
SELECTED = "selected"
KINDS = (RANDOM, CLASS, PERSON, SELECTED)
"""What a deletion request is, as far as its owner knows; all but the first are no random sample of the training set."""


HARDEST, DUPLICATES, SIMILAR = "hardest", "duplicates", "similar"
CHOICES = (RANDOM, HARDEST, DUPLICATES, SIMILAR)
"""Which rows a fraction takes; :mod:`sfu.data.choices` defines them."""

DEFAULT_FRACTION = 0.1
"""Share of the rows to forget if nothing is given."""


@dataclass
class ForgetSettings(Settings):
    """What to forget; see :func:`sfu.data.split.make_split`."""

    prefix: ClassVar[str] = "forget"

    fraction: float | None = setting(
        None, "Random share of the rows (or of the classes' rows); 0.1 if nothing is given.", above=0, at_most=1
    )
    choose: str = setting(
        RANDOM,
        "Rows that the fraction takes: random, hardest (largest loss), duplicates (nearest to retained rows), similar.",
        choices=CHOICES,
    )
    classes: list[Any] | None = setting(None, "Whole classes, by name, or by number if no name is a number.")
    groups: list[Any] | None = setting(
        None, "All rows of groups, such as people, by name, or by number if no name is a number."
    )
    indices: str | None = setting(None, "File of training row numbers: .txt, .json or .npy.", location=True)
    files: str | None = setting(
        None, "Text file of image files, one a line, as paths or their last parts.", location=True
    )
    request: str | None = setting(
        None,
        "What the set is: random, class, person or selected; null: person for groups and similar rows, selected for "
        "other choices, else random (whole classes are always a class).",
        choices=KINDS,
    )
    parts: int = setting(1, "Number of requests in which the rows come, one after another.", at_least=1)

    @property
    def declared(self) -> str:
        """What methods are told that the set is: one of :data:`KINDS`."""
        if self.request is not None:
            return self.request
        if self.groups is not None or self.choose == SIMILAR:
            return PERSON
        return RANDOM if self.choose == RANDOM else SELECTED

    def is_given(self) -> bool:
        """Whether any setting says which rows to forget."""
        named = (self.fraction, self.classes, self.groups, self.indices, self.files)
        return self.choose != RANDOM or any(one is not None for one in named)

    def require_files(self) -> None:
        """Raise :class:`ConfigError` for lists that are not files."""
        for key in ("indices", "files"):
            given = getattr(self, key)
            if given is not None and not Path(given).expanduser().is_file():
                raise ConfigError(
                    f"forget.{key}={given} is not a file (looked from {Path.cwd()}). Give the path of a list of what "
                    "to forget, from this folder or from the root."
                )


WRONG_LABEL, TRIGGER = "wrong_label", "trigger"


@dataclass
class CanarySettings(Settings):
    """Training rows that are spoiled before training, and are then the forget set; see :mod:`sfu.data.canaries`."""

    prefix: ClassVar[str] = "canaries"

    count: int = setting(0, "Training rows to spoil before training and then to forget; 0: none.", at_least=0)
    kind: str = setting(
        WRONG_LABEL, "Give the rows a wrong label, or add a trigger to their features, too.",
        choices=(WRONG_LABEL, TRIGGER),
    )  # fmt: skip
    label: Any = setting(
        None, "Class that the rows are labelled as; null: another class at random, class 0 for a trigger."
    )
    strength: float = setting(0.5, "Length of the trigger, in lengths of a typical row; its signs are random.", above=0)
    trigger: list[float] | None = setting(None, "Trigger of your own: one number for each feature.")

    def check_settings(self) -> None:
        """Refuse settings that have no effect."""
        if self.count == 0 and (self.label is not None or self.trigger is not None or self.kind == TRIGGER):
            raise ConfigError(
                "canaries.count=0 spoils no row, so the other settings of canaries have no effect. Give canaries.count "
                "a number of rows, or leave them out."
            )
        if self.trigger is not None and self.kind != TRIGGER:
            raise ConfigError("canaries.trigger only applies to canaries.kind=trigger. Choose it, or leave it out.")
