"""The network of a linearised head: a frozen trunk that extracts activations, and the core above it, trained if asked.

Shapes: M public images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sfu.data.backbones.backbone import Backbone
from sfu.data.images.images import Images
from sfu.data.settings import BackboneSettings
from sfu.heads.cores.core import Core
from sfu.heads.cores.network import build_network
from sfu.heads.cores.preflight import with_batch_size
from sfu.heads.cores.pretrain import Public, pretrain
from sfu.heads.settings import CoreWeights, LinearisedSettings


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

    The trunk is returned as a backbone, whose features are the activations below the core. The size of ``example``, the
    pixels of one image in uint8 ``[K, H, W]``, decides their shape. ``progress`` is called with (batches done, batches
    in all), ``say`` with a sentence when training begins.

    Raises:
        ConfigError: The network cannot be split there.
        DataError: The weights cannot be loaded.
        SolverError: Training diverged.
    """
    network = build_network(backbone, head, n_classes)
    if len(public):
        images, class_layer_alone = Public.of(public, public_labels_M, network), head.core is CoreWeights.pretrained
        pretrain(
            network, images, head.pretrain, device, class_layer_alone=class_layer_alone, progress=progress, say=say
        )  # fmt: skip
    trunk = network.backbone(backbone).to(device)
    pixels = network.transform.pixels([example] * 2)
    core = network.core(network.transform.normalized(pixels, device, trunk.dtype), device)
    return trunk, with_batch_size(core, head.batch_size)
