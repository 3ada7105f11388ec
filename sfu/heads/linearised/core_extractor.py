"""Features of a linearised head: activations at the cut, of a network whose core may have to be trained first.

Shapes: N images, D numbers of an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.data.features.extract import Extractor
from sfu.data.images.images import Images
from sfu.errors import ConfigError
from sfu.heads.linearised.core import Core
from sfu.heads.linearised.network import build_network
from sfu.heads.linearised.preflight import with_batch_size
from sfu.heads.linearised.pretrain import Public, pretrain
from sfu.settings import CoreWeights

if TYPE_CHECKING:
    from sfu.settings import BackboneConfig, HeadConfig

Progress = Callable[[int, int], None]


class CoreExtractor(Extractor):
    """An extractor whose backbone is the trunk of a network that :meth:`prepare` makes.

    Attributes:
        core: The tangent of the layers after the trunk, once it is prepared.
    """

    def __init__(
        self,
        config: BackboneConfig,
        head: HeadConfig,
        device: torch.device,
        *,
        progress: Progress | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Keep the settings."""
        super().__init__(config, device, progress=progress, say=say)
        self.head = head
        self.core: Core | None = None

    def prepare(self, images: Images, labels_M: Tensor, n_classes: int, example: Callable[[], Tensor]) -> None:
        """Build the network, and train its core on public ``images`` (there may be none).

        The pixels of an ``example`` decide the size of activations.

        Raises:
            ConfigError: The layers cannot be cut off, or there is nothing to train the core on.
            SolverError: Training diverged.
        """
        if self.core is not None:
            return
        network = build_network(self.config, self.head, n_classes)
        whole = self.head.core is CoreWeights.pretrain
        if len(images):
            pretrain(
                network, Public.of(images, labels_M, network), self.head.pretrain, self.device,
                class_layer_alone=not whole, progress=self.progress, say=self.say,
            )  # fmt: skip
        elif whole:
            raise ConfigError("head.core=pretrain needs public images: set dataset.core_fraction above 0.")
        self._backbone = network.backbone(self.config).to(self.device)
        pixels = network.transform.pixels([example()] * 2)
        self.core = with_batch_size(
            network.core(network.transform.normalized(pixels, self.device, self._backbone.dtype), self.device),
            self.head.batch_size,
        )

    def again(self, progress: Progress | None, say: Callable[[str], None] | None) -> CoreExtractor:
        """The same network, for another stage."""
        twin = CoreExtractor(self.config, self.head, self.device, progress=progress, say=say)
        twin.core, twin._backbone = self.core, self._backbone
        return twin

    @property
    def record(self) -> dict[str, object]:
        """What decides the features; known only once the core is."""
        return self.backbone.record()

    def require_remembered(self) -> None:
        """Nothing is remembered of a backbone that was trained here."""
