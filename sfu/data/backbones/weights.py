"""Weights from a local file, without unpickling; and the digest by which a network is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from sfu.errors import DataError
from sfu.readers import NotOnlyTensorsError, read_torch

_WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file of weights: safetensors, or a torch file read with ``weights_only=True``.

    Checkpoints that wrap the weights (``state_dict`` and the like) or prefix every name with ``module.`` are unwrapped.

    Raises:
        DataError: It is damaged, holds objects other than tensors, or no tensors at all.
    """
    where = f"backbone.weights={path}"
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: object = load_file(path)
        else:
            found = read_torch(path)
    except NotOnlyTensorsError as error:
        raise DataError(f"{where}: {error}. Save model.state_dict() as safetensors or with torch.save.") from error
    except Exception as error:  # torch and safetensors raise many kinds on damaged files
        first = (str(error).splitlines() or [""])[0]
        raise DataError(f"{where} cannot be read ({type(error).__name__}: {first}). It may be cut short.") from error
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    tensors = {str(k): v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else {}
    if not tensors:
        raise DataError(f"{where} holds no tensors by name. Save model.state_dict().")
    if all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return tensors


def load_weights(model: nn.Module, tensors: dict[str, Tensor], ignored: tuple[str, ...], setting: str) -> None:
    """Copy ``tensors`` into ``model``, all of it; names that begin with one of ``ignored`` are skipped.

    Names of older versions are accepted where the model itself translates them.

    Raises:
        DataError: A tensor is missing, left over or of another shape: the file is of another architecture.
    """
    given = {name: t for name, t in tensors.items() if not name.startswith(ignored)} if ignored else tensors
    check_fit(model, given, setting)
    bad = [name for name, t in model.state_dict().items() if t.is_floating_point() and not torch.isfinite(t).all()]
    if bad:
        raise DataError(f"backbone.weights={setting} has NaN or infinite values in {_some(bad)}.")


def check_fit(model: nn.Module, given: Mapping[str, Tensor], setting: str) -> None:
    """Copy ``given`` into ``model``, or only check names and shapes if that is on the device ``meta``.

    Raises:
        DataError: A tensor is missing, left over or of another shape: the file is of another architecture.
    """
    own = model.state_dict()
    misfits = sorted(name for name in set(own) & set(given) if not _alike(own[name], given[name]))
    fitting = {name: t for name, t in given.items() if name not in misfits}
    without_memory = any(tensor.is_meta for tensor in own.values())
    result = model.load_state_dict(fitting, strict=False, assign=without_memory)
    missing = [name for name in result.missing_keys if name not in given and not name.endswith("num_batches_tracked")]
    left_over = list(result.unexpected_keys)
    if missing or left_over or misfits:
        kinds = (("lacks", missing), ("has besides", left_over), ("has in other shapes or types", misfits))
        what = "; ".join(f"{verb} {_some(names)}" for verb, names in kinds if names)
        raise DataError(f"backbone.weights={setting} does not fit this architecture: it {what}.")


def _alike(own: Tensor, given: Tensor) -> bool:
    return own.shape == given.shape and own.is_floating_point() == given.is_floating_point()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over every parameter and buffer with its name, 64 hex digits."""
    return tensors_digest(model.state_dict())


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over every tensor with its name, 64 hex digits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
