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
KINDS = (RANDOM, CLASS, "person", "selected")
"""What a deletion request is, as far as its owner knows; all but the first are no random sample of the training set."""


@dataclass
class ForgetSettings(Settings):
    """What to forget; see :func:`sfu.data.split.make_split`."""

    prefix: ClassVar[str] = "forget"

    fraction: float | None = setting(
        None, "Random share of the rows (or of the classes' rows); 0.1 if nothing is given.", above=0, at_most=1
    )
    classes: list[Any] | None = setting(None, "Whole classes, by name, or by number if no name is a number.")
    indices: str | None = setting(None, "File of training row numbers: .txt, .json or .npy.", location=True)
    files: str | None = setting(
        None, "Text file of image files, one a line, as paths or their last parts.", location=True
    )
    request: str = setting(
        RANDOM, "What the set is: a random sample, a class, a person's rows, or selected otherwise.", choices=KINDS
    )

    def require_files(self) -> None:
        """Raise :class:`ConfigError` for lists that are not files."""
        for key in ("indices", "files"):
            given = getattr(self, key)
            if given is not None and not Path(given).expanduser().is_file():
                raise ConfigError(
                    f"forget.{key}={given} is not a file (looked from {Path.cwd()}). Give the path of a list of what "
                    "to forget, from this folder or from the root."
                )
