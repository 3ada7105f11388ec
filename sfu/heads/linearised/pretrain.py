"""Train the weights w_c of a core on public images: cross-entropy, momentum, one cycle of the learning rate.

The result is cached under a key of everything that decides it, so a sweep trains one core. Every epoch is saved, so a
run that was stopped goes on. No user's image may be among the public ones, because w_c is never unlearned.

Shapes: B images of a batch, M public images, S pixels a side.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sfu.cache_dir import cache_dir
from sfu.data.images.images import Images
from sfu.errors import SolverError
from sfu.files import write_tensors
from sfu.heads.linearised.network import Network

if TYPE_CHECKING:
    from sfu.settings import PretrainConfig

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Public:
    """Public images, decoded, and their labels.

    Attributes:
        pixels: uint8 ``[K, S, S]`` each.
        labels_M: Class indices.
        digest: Digest of the images and labels.
    """

    pixels: list[Tensor]
    labels_M: Tensor
    digest: str

    @classmethod
    def of(cls, images: Images, labels_M: Tensor, network: Network) -> Public:
        """Decode all of them; they must fit in memory."""
        pixels = [network.transform.pixels([images.decode(index)])[0] for index in range(len(images))]
        digest = hashlib.sha256(images.fingerprint().encode())
        digest.update(labels_M.numpy().tobytes())
        return cls(pixels, labels_M, digest.hexdigest())


def pretrain(
    network: Network,
    public: Public,
    config: PretrainConfig,
    device: torch.device,
    *,
    class_layer_alone: bool,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Train ``network`` in place, or load its weights from the cache.

    Args:
        network: Trunk and top.
        public: The training set.
        config: The ``head.pretrain`` settings.
        device: Where to train.
        class_layer_alone: Train the last component's weights only.
        progress: Called with (batches done, batches in all).
        say: Called with a sentence when training begins.

    Raises:
        SolverError: The loss became NaN or infinite.
    """
    place = _Place(network, public, config, class_layer_alone)
    if place.fetch(network):
        return
    finished, network = network, network.on(device, public.pixels[0])
    trained = _trainable(network, class_layer_alone)
    optimizer = torch.optim.SGD(
        trained, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=True
    )
    steps = -(-len(public.pixels) // config.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=max(2, config.epochs * steps))
    begun = place.resume(network, optimizer, trained)
    if say is not None:
        some = f" (from epoch {begun + 1})" if begun else ""
        say(f"training the core on {len(public.pixels):,} public images, {config.epochs} epochs{some}")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Detected call of `lr_scheduler.step", UserWarning
        )  # the steps were taken before
        for _ in range(begun * steps):
            schedule.step()
    for epoch in range(begun, config.epochs):
        _mode(network, train=not class_layer_alone)
        for done, (images, labels) in enumerate(_batches(network, public, config, epoch, device), start=1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network.top(network.trunk(images)), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            if progress is not None:
                progress(epoch * steps + done, config.epochs * steps)
        if not torch.isfinite(loss):
            raise SolverError(f"training the core diverged in epoch {epoch + 1}. Lower head.pretrain.lr={config.lr:g}.")
        place.keep(network, optimizer, trained, epoch + 1)
    _put(finished, network.state())
    place.finish(finished)


def _trainable(network: Network, class_layer_alone: bool) -> list[nn.Parameter]:
    modules = [network.top.get_submodule(network.components[0])] if class_layer_alone else [network.trunk, network.top]
    found = [tensor for module in modules for tensor in module.parameters()]
    for tensor in found:
        tensor.requires_grad_(True)
    return found


def _mode(network: Network, *, train: bool) -> None:
    network.trunk.train(train)
    network.top.train(train)


def _batches(
    network: Network, public: Public, config: PretrainConfig, epoch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every image once, in a random order that only depends on the seed and the epoch."""
    drawn = torch.Generator().manual_seed(config.seed * 100_003 + epoch)
    for index in torch.randperm(len(public.pixels), generator=drawn).split(config.batch_size):
        if len(index) == 1 and len(public.pixels) > 1:
            continue  # one image has no batch statistics
        images = network.transform.normalized([public.pixels[i] for i in index.tolist()], device, torch.float32)
        if config.augment:
            images = _moved(images, drawn)
        yield images, public.labels_M[index].to(device)


def _moved(images: Tensor, drawn: torch.Generator) -> Tensor:
    """Mirror half of the images, and shift all alike by up to an eighth of their side."""
    mirrored = (torch.rand(images.shape[0], generator=drawn) < 0.5).to(images.device)
    images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
    most = images.shape[-1] // 8
    down, right = torch.randint(-most, most + 1, (2,), generator=drawn).tolist() if most else (0, 0)
    return images.roll((down, right), (2, 3))


class _Place:
    """The files of one core."""

    def __init__(self, network: Network, public: Public, config: PretrainConfig, class_layer_alone: bool) -> None:
        record = {
            "network": network.digest(), "n_classes": network.source.n_classes,
            "transform": asdict(network.transform), "public": public.digest,
            "pretrain": asdict(config), "class_layer_alone": class_layer_alone, "torch": torch.__version__,
        }  # fmt: skip
        key = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]
        self._done: Path = cache_dir("cores") / f"{key}.safetensors"
        self._partial: Path = cache_dir("cores") / f"{key}.partial.safetensors"

    def fetch(self, network: Network) -> bool:
        """Load the finished weights, if they are there and whole."""
        found = _read(self._done)
        return found is not None and _put(network, found)

    def resume(self, network: Network, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> int:
        """Load the last whole epoch; the number of epochs done."""
        found = _read(self._partial)
        if found is None or not _put(network, found):
            return 0
        for index, tensor in enumerate(trained):
            if f"momentum.{index}" in found:
                optimizer.state[tensor]["momentum_buffer"] = found[f"momentum.{index}"].to(tensor)
        return int(found["epochs"])

    def keep(
        self, network: Network, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], epochs: int
    ) -> None:
        """Write a whole epoch."""
        momentum = {
            f"momentum.{index}": optimizer.state[tensor]["momentum_buffer"]
            for index, tensor in enumerate(trained)
            if optimizer.state.get(tensor, {}).get("momentum_buffer") is not None
        }
        write_tensors(self._partial, {**network.state(), **momentum, "epochs": torch.tensor(epochs)})

    def finish(self, network: Network) -> None:
        """Write the result, and forget the way to it."""
        write_tensors(self._done, network.state())
        self._partial.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Tensor] | None:
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except Exception:  # absent or damaged: it is made again
        return None


def _put(network: Network, found: dict[str, Tensor]) -> bool:
    state = network.state()
    if any(name not in found or found[name].shape != tensor.shape for name, tensor in state.items()):
        return False
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(found[name])
    return True
