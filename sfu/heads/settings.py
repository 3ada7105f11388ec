"""Settings of heads and of their training. This module does not import PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from sfu.data.datasets.base import Dataset, ImageDataset
from sfu.data.settings import BackboneSettings
from sfu.errors import ConfigError
from sfu.schema import Choice, Meta, Settings, check_number, setting

CORE_PREFIX = "core-"
"""Start of the name of the file of a core, which lies beside the heads that share it."""


class Training(Enum):
    """How a head is trained."""

    exact = "exact"
    adam = "adam"
    sgd = "sgd"


class Keep(Enum):
    """What a head keeps of its training rows: a bound and class shares, also a sketch of the Hessian, or all of it."""

    bound = "bound"
    sketch = "sketch"
    full = "full"


class SketchKind(Enum):
    """How a sketch holds the Hessian (:mod:`sfu.heads.sketch`)."""

    cholesky = "cholesky"
    eigenpairs = "eigenpairs"


class CoreWeights(Enum):
    """The fixed weights of a linearised head: those of the backbone, or trained on public images."""

    pretrained = "pretrained"
    pretrain = "pretrain"


@dataclass
class AdamSettings(Settings):
    """Minibatch Adam with early stopping, for ``head.training=adam``."""

    prefix: ClassVar[str] = "head.adam"

    lr: float = setting(1e-2, "Learning rate.", above=0)
    batch_size: int = setting(256, "Rows of a step.", at_least=1)
    max_epochs: int = setting(100, "Epochs at most.", at_least=1)
    patience: int = setting(5, "Epochs without progress before training stops.", at_least=1)
    tolerance: float = setting(1e-4, "Relative fall of the objective that counts as progress.", at_least=0)


@dataclass
class SgdSettings(Settings):
    """Minibatch SGD with momentum, for ``head.training=sgd``."""

    prefix: ClassVar[str] = "head.sgd"

    lr: float = setting(0.05, "Learning rate.", above=0)
    momentum: float = setting(0.9, "Momentum.", at_least=0, below=1)
    batch_size: int = setting(64, "Rows of a step.", at_least=1)
    epochs: int = setting(50, "Epochs.", at_least=1)
    milestones: list[int] = setting([24, 39], "Epochs after which the learning rate falls.")
    decay: float = setting(0.1, "Factor by which it falls.", above=0)


@dataclass
class PretrainSettings(Settings):
    """How the core of a linearised head is trained on public images: cross-entropy, SGD, one cycle.

    The cycle moves the learning rate and, against it, the momentum between 0.85 and 0.95.
    """

    prefix: ClassVar[str] = "head.pretrain"

    epochs: int = setting(10, "Epochs.", at_least=1)
    lr: float = setting(0.1, "Largest learning rate of the cycle.", above=0)
    weight_decay: float = setting(5e-4, "Weight decay.", at_least=0)
    batch_size: int = setting(128, "Images of a step.", at_least=1)
    augment: bool = setting(True, "Flip and shift images, a new draw for every batch.")
    seed: int = setting(0, "Seed of the class layer, the order of images and their augmentation.", at_least=0)


@dataclass
class HeadSettings(Choice, kind="head"):
    """Base of the settings of all heads."""

    prefix: ClassVar[str] = "head"
    needs_network: ClassVar[bool] = False
    """Whether the head is a part of a network, so that it needs images."""

    name: str = setting("", "Kind of head.")
    l2: float = setting(1e-3, "Weight of the L2 regulariser of the mean objective.", at_least=0)
    training: Training = setting(Training.exact, "exact (to the optimum), adam (with early stopping) or sgd.")
    tolerance: float = setting(1e-8, "Exact training: gradient norm of the mean objective to reach.", above=0)
    max_iterations: int = setting(200, "Exact training: Newton steps at most (linearised: products).", at_least=1)
    adam: AdamSettings = setting(AdamSettings)
    sgd: SgdSettings = setting(SgdSettings)
    bias: bool = field(default=False, init=False)
    objective_noise: float = field(default=0.0, init=False)
    keep: Keep = field(default=Keep.bound, init=False)
    sketch: SketchKind = field(default=SketchKind.cholesky, init=False)
    ledger: bool = field(default=False, init=False)

    def check_with(self, dataset: Dataset, backbone: BackboneSettings) -> None:
        """Check the head against the dataset and the backbone.

        Raises:
            ConfigError: They do not go together.
        """
        if isinstance(dataset, ImageDataset) and dataset.core_fraction > 0 and not self.needs_network:
            raise ConfigError(
                f"dataset.core_fraction={dataset.core_fraction:g} only applies to a linearised head, whose core is "
                "trained on public images. Add head=linearised, or remove dataset.core_fraction."
            )


@dataclass
class LinearSettings(HeadSettings, name="linear"):
    """One linear layer on the features."""

    bias: bool = setting(False, "Add a bias, which is never regularised.")
    objective_noise: float = setting(
        0.0, "Exact training: standard deviation of the b of certified removal's term b^T w / n.", at_least=0
    )
    keep: Keep = setting(
        Keep.bound,
        "Curvature kept of the training rows: an upper bound; also a sketch in 8 bits; or the whole Hessian.",
    )
    sketch: SketchKind = setting(SketchKind.cholesky, "head.keep=sketch: how it is held.")
    ledger: bool = setting(
        False, "Keep sums over forgotten rows, so that a later request is served with those before it (quadratic)."
    )

    def check_settings(self) -> None:
        """Refuse objective perturbation without an optimum."""
        if self.objective_noise > 0 and self.training is not Training.exact:
            raise ConfigError(
                f"head.objective_noise={self.objective_noise:g} needs head.training=exact, not "
                f"{self.training.value}: certified removal starts at the optimum."
            )


@dataclass
class LinearisedSettings(HeadSettings, name="linearised"):
    """The last layers of a network, linearised at weights that saw no user data."""

    needs_network: ClassVar[bool] = True

    layers: int = setting(1, "Components to linearise, counted from the end; 1 is the last linear layer.", at_least=1)
    core: CoreWeights = setting(CoreWeights.pretrained, "Fixed weights: of the backbone, or trained on public images.")
    pretrain: PretrainSettings = setting(PretrainSettings)
    negative_slope: float = setting(0.0, "Slope of the linearised layers' rectifiers below 0.", at_least=0, below=1)
    dtype: str = setting("float32", "Of passes through the linearised layers.", choices=("float32", "float64"))
    batch_size: int | str = setting("auto", "Images of one pass; auto: what fits the device.")

    def check_settings(self) -> None:
        """Check the batch size, which may be a word."""
        if self.batch_size != "auto":
            check_number("head.batch_size", self.batch_size, Meta(at_least=1), whole=True)

    def check_with(self, dataset: Dataset, backbone: BackboneSettings) -> None:
        """Require a network over images, and public images where the core is trained on them."""
        if backbone.name in ("none", "pixels") or backbone.library != "torchvision":
            raise ConfigError(
                f"head=linearised needs a network of torchvision over images, not backbone.name={backbone.name} of "
                f"backbone.library={backbone.library}. Choose backbone=resnet18, for example."
            )
        public = isinstance(dataset, ImageDataset) and dataset.core_fraction > 0
        if self.core is CoreWeights.pretrain and not public:
            raise ConfigError("head.core=pretrain needs public images to train on. Set dataset.core_fraction above 0.")
