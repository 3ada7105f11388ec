"""Run a model without changing it, and look at what its layers take and give.

Shapes: B rows of a batch, T positions of a row, D inputs of a layer, C outputs of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sfu.errors import DataError
from sfu.models.batches import Batch

_ROUNDING = 16  # times the precision of the layer, of the sum of sizes: the same product may differ by this


@dataclass(frozen=True)
class Call:
    """One call of a layer: inputs ``[..., D]`` and outputs ``[..., C]``; channels are last."""

    inputs: Tensor
    outputs: Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model under ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``.

    Raises:
        DataError: It is a script, whose layers cannot be watched.
    """
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif any(isinstance(one, torch.jit.ScriptModule) for one in model.modules()):
            raise DataError(
                f"model={type(model).__name__} has parts in TorchScript, whose layers cannot be watched. Give the "
                "model that the script was made from."
            )
        else:
            return model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode, without gradients, autocast and TF32; leave it as it was."""
    modes = {module: module.training for module in model.modules()}
    compiled = any(hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) for one in modes)
    device = placed(model)[0].type
    precision = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in {device, "cpu"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if device == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        if compiled:  # compiled code does not call hooks
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            torch.set_float32_matmul_precision("highest")
            model.eval()
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for module, mode in modes.items():
                module.training = mode


def placed(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device of the model's first floating-point parameter, and its dtype."""
    found = next((one for one in model.parameters() if one.is_floating_point()), None)
    if found is None:
        raise DataError(f"model={type(model).__name__} has no parameters. Give the trained model.")
    return found.device, found.dtype


def run(model: nn.Module, batch: Batch, layers: Mapping[str, nn.Module]) -> tuple[Tensor, dict[str, list[Call]]]:
    """Return the model's outputs for a batch, ``[B, C]``, and the calls of some of its layers.

    Raises:
        DataError: The model fails, or its outputs are not one finite row for each example.
    """
    calls: dict[str, list[Call]] = {name: [] for name in layers}

    def watch(name: str, of_positions: bool) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], outputs: Tensor) -> None:
            inputs = args[0] if args else next(iter(keywords.values()), None)
            if not isinstance(inputs, Tensor) or not isinstance(outputs, Tensor):
                return  # of no layer that sfu knows
            held = (inputs.detach().clone(), outputs.detach().clone())  # what follows may work in place
            calls[name].append(Call(*(one.movedim(-3, -1) for one in held)) if of_positions else Call(*held))

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            hook = watch(name, isinstance(layer, nn.Conv2d))
            stack.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
        outputs = batch.call(model)
    return _logits(outputs, batch), calls


def _logits(outputs: Any, batch: Batch) -> Tensor:
    """Return the logits of what a model returns."""
    found = outputs
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif hasattr(found, "logits"):
        found = found.logits
    elif isinstance(found, list | tuple) and found:
        found = found[0]
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise DataError(
            f"the model returns a {type(outputs).__name__} without logits. Give a classifier that returns its outputs "
            "as a tensor, as the first of a tuple, or as `logits`."
        )
    if not bool(torch.isfinite(found).all()):
        raise DataError(
            f"the model's outputs have NaN or infinite values on {batch.name}. Check the inputs and the weights."
        )
    return found.detach()


def is_close(found_BC: Tensor, wanted_BC: Tensor, size_BC: Tensor, precision: float) -> bool:
    """Whether numbers agree but for rounding, where ``size`` bounds what was summed up."""
    return bool(((found_BC.double() - wanted_BC.double()).abs() <= _ROUNDING * precision * size_BC.double()).all())


def rows_of(call: Call, logits_BC: Tensor) -> Tensor | None:
    """Return the inputs ``[B, D]`` for which the layer gives the model's outputs; ``None`` if there are none.

    A layer that is applied to several positions of each row (tokens, pixels) has these inputs at one of them, or, if
    the model's outputs are the mean over positions, as their mean.

    Raises:
        DataError: Several positions of a row have the model's outputs.
    """
    n_rows, n_outputs = logits_BC.shape
    if call.outputs.shape[0] != n_rows or call.outputs.shape[-1] != n_outputs:
        return None
    inputs_BTD = call.inputs.reshape(n_rows, -1, call.inputs.shape[-1])
    outputs_BTC = call.outputs.reshape(n_rows, -1, n_outputs).double()
    same_BT = (outputs_BTC == logits_BC.double()[:, None]).all(-1)
    if bool(same_BT.any(1).all()):
        rows_BD = inputs_BTD[torch.arange(n_rows, device=same_BT.device), same_BT.int().argmax(1)]
        others_BT = same_BT & (inputs_BTD != rows_BD[:, None]).any(-1)
        if bool(others_BT.any()):
            raise DataError(
                f"the layer's {call.outputs.dtype} outputs are the same at several positions of an example, though its "
                "inputs differ, so they do not tell which position counts. Give the model in a finer precision "
                "(model.float() or model.double()) or with pooled inputs."
            )
        return rows_BD
    size_BC = outputs_BTC.abs().mean(1)
    if inputs_BTD.shape[1] > 1 and is_close(
        outputs_BTC.mean(1), logits_BC, size_BC, torch.finfo(call.outputs.dtype).eps
    ):
        return inputs_BTD.mean(1)
    return None
