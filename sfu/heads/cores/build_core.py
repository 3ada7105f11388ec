"""The network of a linearised head: a frozen trunk that extracts activations, and the core above it, trained if asked.

Shapes: M public images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfu.data.backbones.backbone import Backbone
from sfu.data.images.images import Images
from sfu.errors import ConfigError
from sfu.heads.cores.core import Core
from sfu.heads.cores.network import build_network
from sfu.heads.cores.preflight import with_batch_size
from sfu.heads.cores.pretrain import Public, pretrain
from sfu.heads.settings import CoreWeights

if TYPE_CHECKING:
    from sfu.data.settings import BackboneSettings
    from sfu.heads.settings import LinearisedSettings


def build_core(
    backbone: BackboneSettings,
    head: LinearisedSettings,
    n_classes: int,
    public: Images,
    public_labels_M: Tensor,
    example: Tensor,
    device: torch.device,
    *,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Backbone, Core]:
    """Build a linearised head's network, and train it on the public images, if there are any.

    Args:
        backbone: The ``backbone`` group: a classification network of torchvision.
        head: The ``head`` group.
        n_classes: C.
        public: Public images; with none, the weights stay as they are.
        public_labels_M: Their labels.
        example: Pixels of one image, uint8 ``[K, H, W]``: its size decides the shape of activations.
        device: Where to train, and where the results lie.
        progress: Called with (batches done, batches in all).
        say: Called with a sentence when training begins.

    Returns:
        The trunk as a backbone, whose features are the activations below the core; and the core.

    Raises:
        ConfigError: The network cannot be split there, or ``head.core=pretrain`` has no images to train on.
        DataError: The weights cannot be loaded.
        SolverError: Training diverged.
    """
    network = build_network(backbone, head, n_classes)
    train_all = head.core is CoreWeights.pretrain
    if len(public):
        images = Public.of(public, public_labels_M, network)
        pretrain(
            network, images, head.pretrain, device, class_layer_alone=not train_all, progress=progress, say=say
        )  # fmt: skip
    elif train_all:
        raise ConfigError("head.core=pretrain needs public images to train on. Set dataset.core_fraction above 0.")
    trunk = network.backbone(backbone).to(device)
    pixels = network.transform.pixels([example] * 2)
    core = network.core(network.transform.normalized(pixels, device, trunk.dtype), device)
    return trunk, with_batch_size(core, head.batch_size)
