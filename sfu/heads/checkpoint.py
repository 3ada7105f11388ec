"""Read a linear layer from the checkpoint of a whole model, and write the checkpoint again with that layer changed.

Two formats are read: safetensors, and what ``torch.save`` writes, as far as it holds tensors and plain values; no other
object is unpickled. Every other tensor stays as it is, bit by bit. Shapes: D features, C classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sfu.errors import DataError
from sfu.files import copy_file
from sfu.names import visible
from sfu.readers import read_torch, refusing, require_regular

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
TOP = "."
"""Names the layer whose tensors are called ``weight`` and ``bias``: the checkpoint of a lone layer."""
_SHOWN = 10
_WEIGHT = re.compile(r"(^|\.)weight$")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_REMEDY = "Save the weights alone: torch.save(model.state_dict(), FILE), or safetensors.torch.save_model(model, FILE)."


def read_layer(path: Path, name: str) -> nn.Linear:
    """Return a copy of a layer of a checkpoint, in its own dtype. A 1 x 1 convolution is a linear layer, too.

    Args:
        path: The checkpoint, of a type in :data:`SUFFIXES`.
        name: The layer's name in the model, such as ``fc`` or ``classifier.3``, or :data:`TOP`.

    Raises:
        DataError: The file cannot be read without unpickling, there is no such layer (those that could be meant are
            listed), or it is no plain linear layer of finite numbers.
    """
    with refusing(path, _REMEDY, DataError):
        require_regular(path)
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                keys = _keys_of(name, _shapes(file), path)
                return _layer([file.get_tensor(key) for key in keys], keys, path)
        state = _tensors(_state(read_torch(path), name, path))
        keys = _keys_of(name, {key: tuple(tensor.shape) for key, tensor in state.items()}, path)
        _require_own_memory(keys, state, path)
        return _layer([state[key].detach() for key in keys], keys, path)


def linear_layers(path: Path) -> str:
    """Return a sentence that lists the linear layers of a checkpoint.

    Raises:
        DataError: The file cannot be read without unpickling.
    """
    with refusing(path, _REMEDY, DataError):
        require_regular(path)
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return _listed(_shapes(file))
        state = _tensors(_state(read_torch(path), TOP, path))
        return _listed({key: tuple(tensor.shape) for key, tensor in state.items()})


def _shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - it is no mapping


def write_layer(source: Path, name: str, layer: nn.Linear, path: Path) -> None:
    """Write a checkpoint to ``path`` that differs from ``source`` in the numbers of one layer alone.

    Raises:
        DataError: See :func:`read_layer`; or what was written does not hold the layer.
        ArtifactError: The file cannot be written.
    """
    new = {_key(name, part): tensor.detach().cpu().contiguous() for part, tensor in layer.named_parameters()}
    copy_file(source, path)  # and its permissions
    with refusing(source, _REMEDY, DataError):
        if path.suffix == ".safetensors":
            _write_over(path, new)
        else:
            content = read_torch(source)
            state = _state(content, name, source)
            state.update({key: tensor.reshape(state[key].shape) for key, tensor in new.items()})
            torch.save(content, path)
    written = dict(read_layer(path, name).named_parameters())
    if any(not torch.equal(written[part], tensor.cpu()) for part, tensor in layer.named_parameters()):
        raise DataError(f"{path} does not hold the layer {name} that was written into it. {_REMEDY}")


def _write_over(path: Path, new: Mapping[str, Tensor]) -> None:
    """Replace the bytes of some tensors of a safetensors file; header and all other bytes stay."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for key, tensor in new.items():
            start, end = header[key]["data_offsets"]
            body = tensor.view(torch.uint8).numpy().tobytes()
            if len(body) != end - start:
                raise ValueError(f"{key} has {end - start:,} bytes, not {len(body):,}")
            file.seek(8 + size + start)
            file.write(body)


def _state(content: Any, name: str, path: Path) -> dict[Any, Any]:
    """Return the mapping that holds a layer's weight: the checkpoint itself, or a part of it such as ``state_dict``.

    Without such a layer, it is the mapping with the most tensors.
    """
    parts = {"the checkpoint": content, **(content if isinstance(content, dict) else {})}
    found = {title: part for title, part in parts.items() if isinstance(part, dict) and _tensors(part)}
    if not found:
        raise ValueError("it holds no tensors by name")
    holding = [title for title, part in found.items() if _key(name, "weight") in _tensors(part)]
    if len(holding) > 1:
        raise DataError(
            f"{path} holds the layer {name} {len(holding)} times, in "
            f"{' and '.join(visible(str(one)) for one in holding)}. "
            "A copy that is left as it is forgets nothing, so save the one that is in use alone."
        )
    return found[holding[0]] if holding else max(found.values(), key=lambda part: len(_tensors(part)))


def _tensors(part: Mapping[Any, Any]) -> dict[str, Tensor]:
    return {key: one for key, one in part.items() if isinstance(key, str) and isinstance(one, Tensor)}


def _key(name: str, part: str) -> str:
    return part if name == TOP else f"{name}.{part}"


def _keys_of(name: str, shapes: Shapes, path: Path) -> list[str]:
    """The keys of a layer's weight and, if it has one, bias."""
    prefix = _key(name, "")
    parts = {key.removeprefix(prefix) for key in shapes if key.startswith(prefix)}
    if name == TOP or parts - {"weight", "bias"} or "weight" not in parts:
        if name == TOP and parts <= {"weight", "bias"} and "weight" in parts:
            return [part for part in ("weight", "bias") if part in parts]
        held = ", ".join(visible(part) for part in sorted(parts)[:_SHOWN])
        wrong = (
            f"holds {held} under {visible(name)}, not weight and bias alone"
            if parts
            else f"has no layer {visible(name)}"
        )
        plain = " Merge adapters and remove parametrisations before you save the model." if parts else ""
        raise DataError(f"{path} {wrong}. {_listed(shapes)}{plain}")
    return [_key(name, part) for part in ("weight", "bias") if part in parts]


def _listed(shapes: Shapes) -> str:
    linear = {key.rpartition(".")[0]: shape for key, shape in shapes.items() if _WEIGHT.search(key) and len(shape) == 2}
    if not linear:
        return "It has no linear layer. Give the checkpoint of a model that ends in one."
    last = [f"{visible(name) or TOP} ({shape[0]} x {shape[1]})" for name, shape in [*linear.items()][-_SHOWN:]]
    return f"Its last linear layers are {', '.join(last)} (outputs x features). Give one of them as --layer."


def _require_own_memory(keys: list[str], state: Mapping[str, Tensor], path: Path) -> None:
    def place(tensor: Tensor) -> tuple[int, int]:
        return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()

    for key in keys:
        start, end = place(state[key])
        for other, tensor in state.items():
            first, last = place(tensor)
            if other not in keys and tensor.layout is torch.strided and start < last and first < end:
                raise DataError(
                    f"{path} has one memory for {key} and {other}, so changing one changes the other. Untie the "
                    "layers before you save the model."
                )


def _layer(tensors: list[Tensor], keys: list[str], path: Path) -> nn.Linear:
    for key, tensor in zip(keys, tensors, strict=True):
        if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
            raise DataError(
                f"{path}: {key} is {str(tensor.dtype).removeprefix('torch.')} ({tensor.layout}). Give a layer in "
                "float64, float32, float16 or bfloat16."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(f"{path}: {key} has NaN or infinite values. Give another copy of the model.")
    weight, *bias = tensors
    if weight.shape[2:] == (1, 1):  # a 1 x 1 convolution
        weight = weight.flatten(1)
    if weight.ndim != 2 or 0 in weight.shape or (bias and bias[0].shape != weight.shape[:1]):
        shapes = ", ".join(f"{key} {list(tensor.shape)}" for key, tensor in zip(keys, tensors, strict=True))
        raise DataError(f"{path} holds {shapes}, which is no linear layer. Give one with weight [C, D] and bias [C].")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bool(bias), dtype=weight.dtype)
    if bias and bias[0].dtype != weight.dtype:
        raise DataError(f"{path}: {' and '.join(keys)} have different dtypes. Save the layer in one.")
    with torch.no_grad():
        for own, tensor in zip(layer.parameters(), [weight, *bias], strict=True):
            own.copy_(tensor)
    return layer
