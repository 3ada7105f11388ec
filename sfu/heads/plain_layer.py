"""Check that a ``torch.nn.Linear`` computes ``W x + b`` with the weights it shows, and write others into it.

Shapes: D features, C classes, B rows of a probe.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sfu.errors import DataError

log = logging.getLogger(__name__)

MUCH_LOST = 0.1
"""Share of a change that may be lost to rounding without a word."""
_SAME_FORWARD = {"timm.layers.linear.Linear"}
"""Subclasses whose forward differs from that of ``torch.nn.Linear`` in compiled scripts alone."""

_PROBE_SEED, _RANDOM_ROWS, _CHUNK = 0, 8, 512
_ROUNDING = 16  # times the precision of the layer: the same product twice may differ by this, on another kernel


def require_plain(layer: nn.Module) -> nn.Linear:
    """Return a layer whose own ``weight`` and ``bias`` decide its outputs.

    A 1 x 1 convolution is a linear layer of each position: one that shares its numbers is returned.

    Raises:
        DataError: It is not a linear layer, or something recomputes its weights or changes its outputs. The message
            names the call that makes it plain.
    """
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise DataError(
            f"the module must be a torch.nn.Linear, not a {type(layer).__name__}. Give the classifier layer alone."
        )
    for name in ("weight", "bias"):
        if (remedy := _recomputed(layer, name)) is not None:
            what, call = remedy
            raise DataError(
                f"the {name} of the layer is recomputed from other parameters ({what}), so numbers that are written "
                f"into it have no effect. Make the layer plain first: {call}."
            )
    kind = nn.Linear if isinstance(layer, nn.Linear) else nn.Conv2d
    own = type(layer).forward is not kind.forward and _full_name(type(layer)) not in _SAME_FORWARD
    if own or "forward" in vars(layer):
        raise DataError(
            f"the layer is a {type(layer).__name__} with a forward of its own, so its weight and bias alone do not "
            "decide its outputs. Give a plain torch.nn.Linear. An adapter (LoRA) must be merged first, in peft with "
            "model.merge_and_unload()."
        )
    if nn.parameter.is_lazy(layer.weight) or layer.weight.is_meta:
        raise DataError(
            f"the layer has no weights yet (it is a {type(layer).__name__} on {layer.weight.device}). Load the trained "
            "weights into it, and run a lazy layer once."
        )
    if not layer.weight.is_floating_point():
        raise DataError(f"the layer's weight is {layer.weight.dtype}. Give a layer in a floating-point dtype.")
    return layer if isinstance(layer, nn.Linear) else _linear_of(layer)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Whether the layer is a convolution that takes each position by itself."""
    return (layer.kernel_size, layer.stride, layer.groups) == ((1, 1), (1, 1), 1) and layer.padding in (
        (0, 0),
        "same",
        "valid",
    )


def _linear_of(layer: nn.Conv2d) -> nn.Linear:
    """Return a linear layer with the numbers of a 1 x 1 convolution, in the same memory."""
    if not is_pointwise(layer):
        raise DataError(
            f"the layer is {layer}, and only a convolution of kernel 1 x 1, stride 1 and one group without padding is "
            "a linear layer. Give the layer that computes the classes."
        )
    twin = nn.Linear(layer.in_channels, layer.out_channels, bias=layer.bias is not None, device="meta")
    twin.weight = nn.Parameter(layer.weight.detach()[:, :, 0, 0], requires_grad=False)
    if layer.bias is not None:
        twin.bias = nn.Parameter(layer.bias.detach(), requires_grad=False)
    return twin


def check_outputs(layer: nn.Linear, weight_CD: Tensor, bias_C: Tensor | None) -> None:
    """Compare the layer's outputs with ``W x + b``, for the zero row, each feature by itself, and random rows.

    Args:
        layer: The layer.
        weight_CD: W, in the layer's dtype and on its device.
        bias_C: b, likewise; ``None`` if there is none.

    Raises:
        DataError: They differ by more than rounding.
    """
    precision = _ROUNDING * torch.finfo(weight_CD.dtype).eps
    with torch.no_grad():
        for probe_BD in _probes(weight_CD):
            try:
                found_BC = layer(probe_BD)
            except Exception as error:
                raise DataError(
                    f"the layer fails on rows of its own width and dtype ({type(error).__name__}: {error}). Give a "
                    "plain torch.nn.Linear without hooks."
                ) from error
            wanted_BC = nn.functional.linear(probe_BD, weight_CD, bias_C)
            if found_BC.shape == wanted_BC.shape and torch.equal(found_BC, wanted_BC):
                continue
            size_BC = nn.functional.linear(probe_BD.abs(), weight_CD.abs(), None if bias_C is None else bias_C.abs())
            if found_BC.shape != wanted_BC.shape or not bool(
                ((found_BC.double() - wanted_BC.double()).abs() <= precision * size_BC.double()).all()
            ):
                hooks = " It has forward hooks: call remove() on their handles." if _has_hooks(layer) else ""
                raise DataError(
                    "the layer's outputs are not weight x + bias on a probe, so a head with these weights is another "
                    f"model.{hooks} Give a plain torch.nn.Linear without hooks."
                )


def write_weights(layer: nn.Linear, weight_CD: Tensor, bias_C: Tensor | None) -> float:
    """Write weights of the layer's shape into it, and check its outputs; a layer that fails keeps what it had.

    Return the norm of what rounding to the layer's dtype changed, over that of the whole change.

    Raises:
        DataError: The layer's dtype cannot hold the weights, or its outputs do not follow them.
    """
    given = {"weight": weight_CD, **({} if bias_C is None else {"bias": bias_C})}
    own = {name: getattr(layer, name) for name in given}
    rounded = {name: tensor.to(own[name]) for name, tensor in given.items()}
    for name, tensor in rounded.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DataError(
                f"the layer's {name} is {tensor.dtype}, which cannot hold numbers as large as "
                f"{float(given[name].abs().max()):.3g}. Give a layer in float32 or float64."
            )
    before = {name: tensor.detach().clone() for name, tensor in own.items()}
    lost = _share_lost(before, given, rounded)
    try:
        with torch.no_grad():
            for name, tensor in rounded.items():
                own[name].copy_(tensor)
        check_outputs(layer, rounded["weight"], rounded.get("bias"))
    except BaseException:
        with torch.no_grad():
            for name, tensor in before.items():
                own[name].copy_(tensor)
        raise
    if lost > MUCH_LOST:
        log.warning(
            "the layer is %s: rounding its new weights moves them by %.0f %% of the change that was to be made. Use a "
            "layer in float32, so that the change is kept.", rounded["weight"].dtype, 100 * lost,
        )  # fmt: skip
    return lost


def _share_lost(before: dict[str, Tensor], wanted: dict[str, Tensor], rounded: dict[str, Tensor]) -> float:
    """Return the norm of what rounding changed over that of the change from ``before``; 0 if there was none."""
    start, aim, end = (
        torch.cat([part[name].to(rounded[name].device, torch.float64).flatten() for name in rounded])
        for part in (before, wanted, rounded)
    )
    change = float((aim - start).norm())
    return float((end - aim).norm()) / change if change > 0 else 0.0


def _probes(weight_CD: Tensor) -> Iterator[Tensor]:
    """Rows ``[B, D]``: zero, a few random ones, and twice each unit vector, which shows every entry of W."""
    n_features = weight_CD.shape[1]
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    drawn_BD = torch.randn(_RANDOM_ROWS, n_features, generator=generator, device="cpu").to(weight_CD)
    yield torch.cat([weight_CD.new_zeros(1, n_features), drawn_BD])
    for start in range(0, n_features, _CHUNK):
        count = min(_CHUNK, n_features - start)
        unit_BD = weight_CD.new_zeros(count, n_features)
        unit_BD[torch.arange(count), torch.arange(start, start + count)] = 2.0
        yield unit_BD


def _recomputed(layer: nn.Module, name: str) -> tuple[str, str] | None:
    """What computes a parameter of the layer anew before each use, and the call that ends it."""
    from torch.nn.utils import parametrize

    if parametrize.is_parametrized(layer, name):
        return "a parametrization", f"torch.nn.utils.parametrize.remove_parametrizations(layer, {name!r})"
    if hasattr(layer, f"{name}_mask"):
        return "pruning", f"torch.nn.utils.prune.remove(layer, {name!r})"
    if hasattr(layer, f"{name}_g") and hasattr(layer, f"{name}_v"):
        return "weight norm", f"torch.nn.utils.remove_weight_norm(layer, {name!r})"
    if hasattr(layer, f"{name}_orig") and hasattr(layer, f"{name}_u"):
        return "spectral norm", f"torch.nn.utils.remove_spectral_norm(layer, {name!r})"
    if name not in layer._parameters:
        return "it is not a parameter of the layer", "copy its weights into a new torch.nn.Linear"
    return None


def _has_hooks(layer: nn.Linear) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
