"""Train the weights w_c of a core on public images: cross-entropy, momentum, one cycle of the learning rate.

The weights are cached, after every epoch too, so that an interrupted run continues and a sweep trains one core. No
user's image may be among the public ones, because w_c is never unlearned.

Shapes: B images of a batch, M public images, S pixels a side.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from sfu.data.examples import image_digests, note_examples
from sfu.data.images.images import Images
from sfu.errors import SolverError
from sfu.heads.cores.network import Network
from sfu.heads.settings import PretrainSettings
from sfu.store import Store, cache_dir, key_of

_MOMENTUM = 0.85, 0.95  # least and most of the cycle


@dataclass(frozen=True)
class Public:
    """Public images, decoded to uint8 ``[K, S, S]``, with their labels, a digest of both, and digests of the images."""

    pixels: list[Tensor]
    labels_M: Tensor
    digest: str
    examples: list[bytes]

    @classmethod
    def of(cls, images: Images, labels_M: Tensor, network: Network) -> Public:
        """Decode all of them; they must fit in memory."""
        pixels = [network.transform.pixels([images.decode(index)])[0] for index in range(len(images))]
        digest = hashlib.sha256(images.fingerprint().encode())
        digest.update(labels_M.numpy().tobytes())
        return cls(pixels, labels_M, digest.hexdigest(), [known for one in image_digests(images) for known in one])


def pretrain(
    network: Network,
    public: Public,
    config: PretrainSettings,
    device: torch.device,
    *,
    class_layer_alone: bool,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Train ``network`` in place, or load its weights from the cache.

    With ``class_layer_alone``, only the last component's weights are trained, and all layers are in evaluation mode.
    ``say`` is called with a sentence when training begins.

    Raises:
        SolverError: The loss became NaN or infinite.
    """
    cached = _CachedCore(network, public, config, class_layer_alone)
    if cached.load(network):
        return
    finished, network = network, network.on(device, public.pixels[0])
    modules = [network.top.get_submodule(network.components[0])] if class_layer_alone else [network.trunk, network.top]
    trained = [tensor for module in modules for tensor in module.parameters()]
    for tensor in trained:
        tensor.requires_grad_(True)
    least, most = _MOMENTUM
    optimizer = torch.optim.SGD(trained, lr=config.lr, momentum=most, weight_decay=config.weight_decay, nesterov=True)
    steps = -(-len(public.pixels) // config.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=max(2, config.epochs * steps), base_momentum=least, max_momentum=most
    )
    begun = cached.resume(network, optimizer, trained)
    if say is not None:
        some = f" (from epoch {begun + 1})" if begun else ""
        say(f"training the core on {len(public.pixels):,} public images, {config.epochs} epochs{some}")
    with warnings.catch_warnings():
        # the optimiser took its steps before the interruption
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(begun * steps):
            schedule.step()
    for epoch in range(begun, config.epochs):
        for part in (network.trunk, network.top):
            part.train(not class_layer_alone)
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
        cached.save_epoch(network, optimizer, trained, epoch + 1)
    _copy_into(finished, network.state())
    cached.save(finished)


def _batches(
    network: Network, public: Public, config: PretrainSettings, epoch: int, device: torch.device
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


class _CachedCore:
    """The cache of one core: its final weights, and the last complete epoch while training lasts."""

    def __init__(self, network: Network, public: Public, config: PretrainSettings, class_layer_alone: bool) -> None:
        record = {
            "network": network.digest(), "n_classes": network.source.n_classes,
            "transform": asdict(network.transform), "public": public.digest,
            "pretrain": asdict(config), "class_layer_alone": class_layer_alone, "torch": torch.__version__,
        }  # fmt: skip
        self._store, self._epochs = Store(cache_dir("cores")), config.epochs
        self._examples, self._public = key_of({"stage": "examples", "public": public.digest}), public
        self._final, self._partial = key_of({**record, "state": "final"}), key_of({**record, "state": "partial"})

    def load(self, network: Network) -> bool:
        """Load the final weights, and return whether they were there."""
        found = self._store.read_tensors(self._final, partial(_check_like, network.state()))
        if found is not None:
            _copy_into(network, found)
        return found is not None

    def resume(self, network: Network, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> int:
        """Load the last complete epoch, and return the number of epochs done."""

        def check(tensors: dict[str, Tensor]) -> None:
            momentum = {f"momentum.{index}": tensor for index, tensor in enumerate(trained)}
            wanted = {**network.state(), **{name: momentum[name] for name in momentum if name in tensors}}
            _check_like({**wanted, "epochs": torch.tensor(0)}, tensors)
            if not 0 <= int(tensors["epochs"]) <= self._epochs:
                raise ValueError(f"it says that {int(tensors['epochs'])} of {self._epochs} epochs are done")

        found = self._store.read_tensors(self._partial, check)
        if found is None:
            return 0
        _copy_into(network, found)
        for index, tensor in enumerate(trained):
            if f"momentum.{index}" in found:
                optimizer.state[tensor]["momentum_buffer"] = found[f"momentum.{index}"].to(tensor)
        return int(found["epochs"])

    def save_epoch(
        self, network: Network, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], epochs: int
    ) -> None:
        momentum = {
            f"momentum.{index}": optimizer.state[tensor]["momentum_buffer"]
            for index, tensor in enumerate(trained)
            if optimizer.state.get(tensor, {}).get("momentum_buffer") is not None
        }
        self._write(self._partial, {**network.state(), **momentum, "epochs": torch.tensor(epochs)})

    def save(self, network: Network) -> None:
        """Cache the final weights, and remove the last epoch."""
        self._write(self._final, network.state())
        with self._store.optional():
            self._store.remove(self._partial)

    def _write(self, key: str, tensors: dict[str, Tensor]) -> None:
        with self._store.optional():
            about = note_examples(self._store, self._examples, lambda: self._public.examples)
            self._store.write_tensors(key, tensors, about)


def _check_like(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise :class:`ValueError` unless all that is wanted was found, in its shape and type, and finite."""
    for name, tensor in wanted.items():
        given = found.get(name)
        if given is None or given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise ValueError(f"{name} is missing, or not {tensor.dtype} of shape {list(tensor.shape)}")
        if given.is_floating_point() and not torch.isfinite(given).all():
            raise ValueError(f"{name} has NaN or infinite values")


@torch.no_grad()
def _copy_into(network: Network, weights: dict[str, Tensor]) -> None:
    for name, tensor in network.state().items():
        tensor.copy_(weights[name])
