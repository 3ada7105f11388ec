"""A frozen backbone: images in, features out, in evaluation mode whatever happens.

Shapes: B images, K channels, H rows, W columns, D features.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor, nn

from sfu.data.backbones.library import library_of
from sfu.data.backbones.memo import recall
from sfu.data.backbones.transform import ImageTransform
from sfu.data.backbones.weights import weights_digest
from sfu.data.settings import NO_BACKBONE, BackboneSettings
from sfu.errors import DataError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_flags = threading.Lock()


def check_backbone(config: BackboneSettings) -> None:
    """Raise :class:`ConfigError` for settings that cannot work, before any image is read."""
    if config.name != NO_BACKBONE and recall(config) is None:  # one that was built before has a name its library knows
        library_of(config).check(config)


def build_backbone(config: BackboneSettings) -> Backbone:
    """Build and freeze the backbone of ``config``, on the CPU.

    Random weights (``weights=none``) are drawn from ``config.seed`` without touching the global generator.

    Raises:
        ConfigError: A setting cannot work.
        DataError: The weights cannot be had or do not fit.
    """
    check_backbone(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = library_of(config).build(config)
    transform = network.transform
    if config.size is not None:
        transform = replace(transform, resize=config.size, crop=config.size)
    if config.mean is not None and config.std is not None:
        transform = replace(transform, mean=tuple(config.mean), std=tuple(config.std))
    module = network.module.to(memory_format=torch.channels_last).eval().requires_grad_(False)
    return Backbone(config.name, module, transform, network.pooling, DTYPES[config.dtype], weights_digest(module))


@contextmanager
def _exact_convolutions(device: torch.device) -> Iterator[None]:
    """No TF32 and no choice of algorithm by timing; for one thread at a time, since these flags are everybody's."""
    if device.type != "cuda":
        yield
        return
    with _flags, torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@dataclass
class Backbone:
    """A frozen network and its transform.

    Attributes:
        name: Of the model.
        module: In evaluation mode, without gradients.
        transform: What is done to every image.
        pooling: What the features are, for the record.
        dtype: Of the forward pass.
        digest: SHA-256 of the weights.
        device: Where the module lies.
    """

    name: str
    module: nn.Module
    transform: ImageTransform
    pooling: str
    dtype: torch.dtype
    digest: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def to(self, device: torch.device) -> Backbone:
        """The same backbone on ``device``, in its dtype."""
        return replace(self, module=self.module.to(device, self.dtype), device=device)

    def record(self) -> dict[str, object]:
        """Everything that decides what features come out, for the key of the cache."""
        return {
            "backbone": self.name, "weights": self.digest, "transform": asdict(self.transform),
            "dtype": str(self.dtype).removeprefix("torch."), "pooling": self.pooling,
        }  # fmt: skip

    @torch.inference_mode()
    def features(self, pixels: Sequence[Tensor]) -> Tensor:
        """Features, on the device, of what ``transform.pixels`` made of images: uint8 ``[K, S, S]``.

        TF32 is off, and every layer is in evaluation mode: statistics of a batch never enter.

        Returns:
            ``[B, D]``, float32, or float64 from a float64 backbone.

        Raises:
            DataError: The images do not fit the network, or features come out NaN or infinite.
        """
        self.module.eval()
        batch = self.transform.normalized(pixels, self.device, self.dtype)
        try:
            with _exact_convolutions(self.device):
                features = self.module(batch)
        except (RuntimeError, AssertionError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise DataError(f"memory is out on the device. Lower backbone.batch_size ({len(pixels)}).") from error
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"backbone.name={self.name} cannot take images of {tuple(batch.shape[1:])} ({first}). Set "
                "backbone.size to the size it was made for."
            ) from error
        if features.ndim != 2:
            raise DataError(f"backbone.name={self.name} gives features of shape {tuple(features.shape)}, not [B, D].")
        return features.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
