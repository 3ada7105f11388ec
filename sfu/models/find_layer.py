"""Find the layer that computes a classifier's outputs: the one whose outputs are those of the model.

Shapes: B rows of a batch, D inputs of a layer, C outputs of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sfu.errors import DataError
from sfu.heads.plain_layer import is_pointwise, require_plain
from sfu.models.batches import Batch
from sfu.models.running import Call, rows_of, run

Layer: TypeAlias = nn.Linear | nn.Conv2d

_USUAL = ("fc", "classifier", "head", "score", "logits_proj")
"""Names that libraries give to the layer, which decide between layers with the same outputs."""
_LISTED = 6
_REPEATS = 1e-3  # of the outputs' size: differences between two runs above this are no rounding
_BY_HAND = "Extract the inputs of the layer yourself, and give them: sfu.unlearn(record.head(layer), features, labels)"


def find_layer(model: nn.Module, batch: Batch, layer: str | None = None) -> str:
    """Return the name of the linear layer, or 1 x 1 convolution, that computes a model's outputs.

    The model is run on the batch, which shows which layer's outputs are its own; names decide between several.

    Args:
        model: The model without wrappers, in evaluation mode.
        batch: A small batch on its device.
        layer: The name, if it is known; it is checked.

    Raises:
        DataError: There is none, or several; the outputs are no rows of classes; the model gives other outputs for the
            same inputs; or the layer that is named is not plain.
    """
    linear = {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear) or (isinstance(one, nn.Conv2d) and is_pointwise(one))
    }
    if layer is not None and layer not in linear:
        found = dict(model.named_modules()).get(layer)
        what = "is no layer of the model" if found is None else f"is a {type(found).__name__}, not a linear layer"
        raise DataError(f"layer={layer!r} {what}. Its linear layers are {_listed(linear)}. Give one of these names.")
    if layer is None:
        _refuse_several(model)
    else:
        require_plain(linear[layer])
    first, _ = run(model, batch, {})
    logits_BC = as_rows(first, batch)
    n_outputs = logits_BC.shape[1]
    fitting = {name: one for name, one in linear.items() if one.weight.shape[0] == n_outputs and layer in (None, name)}
    again, calls = run(model, batch, fitting)
    _require_repeats(first, again)
    logits_BC = as_rows(again, batch)
    for name, own in calls.items():
        if own:
            _refuse_adapter(name)
            _refuse_cosine(name, linear[name], own[-1], logits_BC)
    found = [name for name, own in calls.items() if own and rows_of(own[-1], logits_BC) is not None]
    if len(found) > 1:
        found = _by_name(model, found) or found
    if len(found) > 1:
        raise DataError(
            f"the outputs of {len(found)} layers are those of the model: {_listed({n: linear[n] for n in found})}. "
            "Give layer='...', the one to change."
        )
    if not found:
        raise _none(model, linear, calls, logits_BC, batch, layer)
    name = found[0]
    if len(calls[name]) > 1:
        raise DataError(
            f"the layer {name!r} is used {len(calls[name])} times for one batch, and sfu knows the last one alone. "
            f"{_BY_HAND}."
        )
    return name


def as_rows(logits: Tensor, batch: Batch) -> Tensor:
    """Return a model's outputs as ``[B, C]``.

    Raises:
        DataError: They have several positions for each row.
    """
    n_rows = logits.shape[0] if logits.ndim else 1
    if logits.ndim > 2 and logits.shape[2:].numel() > 1:
        raise DataError(
            f"the model's outputs on {batch.name} are {list(logits.shape)}, several for each example, as those of a "
            "classifier of tokens or a segmentation. sfu forgets examples with one row of outputs each, [B, C]."
        )
    return logits.reshape(n_rows, -1)


def described(name: str, layer: Layer) -> str:
    """Return how messages name a layer."""
    n_outputs, n_inputs = layer.weight.shape[:2]
    return f"{repr(name) if name else 'the model itself'} ({n_inputs} -> {n_outputs})"


def _listed(layers: Mapping[str, Layer]) -> str:
    """Name the last layers."""
    last = list(layers.items())[-_LISTED:]
    before = f"(after {len(layers) - len(last)} others) " if len(layers) > len(last) else ""
    return before + (", ".join(described(name, one) for name, one in last) or "none")


def _refuse_several(model: nn.Module) -> None:
    """Refuse a model of timm that has several classifiers, of whose outputs it returns the mean."""
    own = _classifier_of(model)
    if not isinstance(own, list | tuple) or len(own) < 2:
        return
    names = [name for name, one in model.named_modules() if any(one is each for each in own)]
    raise DataError(
        f"the model has {len(own)} classifiers, {' and '.join(map(repr, names))}, and returns a mean of their outputs, "
        f"so none of them computes the outputs. Unlearn each by itself. {_BY_HAND}."
    )


def _classifier_of(model: nn.Module) -> Any:
    get: Any = getattr(model, "get_classifier", None)
    try:
        return get() if callable(get) else None
    except TypeError:  # another library's, with arguments
        return None


def _by_name(model: nn.Module, names: list[str]) -> list[str]:
    own = _classifier_of(model)
    modules = dict(model.named_modules())
    preferred = [name for name in names if modules[name] is own]
    return preferred or [name for name in names if name.rpartition(".")[2] in _USUAL]


def _require_repeats(first: Tensor, again: Tensor) -> None:
    size = float(first.abs().max()) if first.numel() else 0.0
    apart = float((first.double() - again.double()).abs().max()) if first.shape == again.shape else size
    if apart > _REPEATS * size:
        raise DataError(
            f"the model gives other outputs for the same inputs in evaluation mode: they differ by up to {apart:.3g}, "
            f"where the outputs reach {size:.3g}. Turn off what is random in it, such as dropout that ignores eval()."
        )


def _refuse_adapter(name: str) -> None:
    if name.rpartition(".")[2] == "base_layer":  # of peft
        raise DataError(
            f"the layer {name!r} has an adapter beside it (LoRA), so its weights alone do not decide the outputs. "
            "Merge it first, in peft with model = model.merge_and_unload()."
        )


def _refuse_cosine(name: str, layer: nn.Module, call: Call, logits_BC: Tensor) -> None:
    """Refuse a layer that divides its inputs and its weights by their length."""
    weight_CD = getattr(layer, "weight", None)
    inputs_BD = call.inputs.reshape(-1, call.inputs.shape[-1]).double()
    if not isinstance(weight_CD, Tensor) or weight_CD.shape != (logits_BC.shape[1], inputs_BD.shape[1]):
        return
    if type(layer).forward is nn.Linear.forward and "forward" not in vars(layer):
        return
    cosine_BC = nn.functional.normalize(inputs_BD) @ nn.functional.normalize(weight_CD.double()).T
    wanted_BC = call.outputs.reshape(-1, call.outputs.shape[-1]).double()
    scale = float((cosine_BC * wanted_BC).sum() / cosine_BC.square().sum().clamp_min(1e-30))
    if float((scale * cosine_BC - wanted_BC).abs().max()) < _REPEATS * float(wanted_BC.abs().max()):
        raise DataError(
            f"the layer {name!r} ({type(layer).__name__}) is a cosine classifier: it divides its inputs and its "
            "weights by their length, so its outputs are not linear in the weights. Put torch.nn.functional.normalize "
            f"before a plain torch.nn.Linear(..., bias=False) with the normalised weights times {scale:.3g}, and give "
            "the record l2='estimate'."
        )


def _none(
    model: nn.Module, linear: Mapping[str, Layer], calls: Mapping[str, list[Call]], logits_BC: Tensor,
    batch: Batch, layer: str | None,
) -> DataError:  # fmt: skip
    """Say why no layer's outputs are those of the model."""
    others = {
        name: one
        for name, one in model.named_modules()
        if name not in linear and getattr(getattr(one, "weight", None), "ndim", 0) == 2
    }
    for name, own in run(model, batch, others)[1].items() if others and layer is None else ():
        if own:
            _refuse_cosine(name, others[name], own[-1], logits_BC)
    n_outputs = logits_BC.shape[1]
    called = [name for name, own in calls.items() if own]
    if not called:
        why = f"no linear layer of {n_outputs} outputs is called" if layer is None else f"layer={layer!r} is not called"
        if layer is not None and linear[layer].weight.shape[0] != n_outputs:
            why = f"layer={described(layer, linear[layer])} is not of {n_outputs} outputs"
        return DataError(
            f"{why}, but the model's outputs have {n_outputs} columns. Its linear layers are {_listed(linear)}. Give "
            f"the classifier that ends in one of them, or its name as layer='...'. {_BY_HAND}."
        )
    name = called[-1]
    outputs_BC = calls[name][-1].outputs
    return DataError(
        f"the outputs of the model are not those of a linear layer: {described(name, linear[name])} gives other numbers"
        f"{_difference(outputs_BC, logits_BC)}. The linear layers are {_listed(linear)}. If another one is meant, give "
        f"layer='...'. {_BY_HAND}, if the loss of the training was that of the layer's own outputs."
    )


def _difference(outputs: Tensor, logits_BC: Tensor) -> str:
    """Say how far a layer's outputs are from those of the model, and what may have been made of them."""
    if outputs.numel() != logits_BC.numel():
        return f" (of shape {list(outputs.shape)}, of which the model makes {list(logits_BC.shape)})"
    given_BC, wanted_BC = outputs.reshape(logits_BC.shape).double(), logits_BC.double()
    apart, size = float((given_BC - wanted_BC).abs().max()), float(wanted_BC.abs().max())
    ratio = float((given_BC * wanted_BC).sum() / given_BC.square().sum().clamp_min(1e-30))
    made = {
        "their softmax": given_BC.softmax(1), "their log_softmax": given_BC.log_softmax(1),
        "their sigmoid": given_BC.sigmoid(), "their relu": given_BC.relu(), f"{ratio:.4g} times them": ratio * given_BC,
    }  # fmt: skip
    known = [name for name, one in made.items() if torch.allclose(one, wanted_BC, rtol=1e-3, atol=1e-6)]
    what = f"; the model returns {known[0]}" if known else ""
    return f", which differ by up to {apart:.3g}, where the outputs reach {size:.3g}{what}"
