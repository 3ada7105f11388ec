"""Layers whose outputs do not follow from ``weight`` and ``bias`` are refused, and keep what they had."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from sfu.errors import DataError
from sfu.heads.linear import LinearHead

D, C = 700, 3  # more features than one chunk of the probe


class Lora(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.down, self.up = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Cosine(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(nn.functional.normalize(x, dim=-1), nn.functional.normalize(self.weight, dim=-1))


class OfTimm(nn.Linear):
    """The layer of timm, which does the same outside of compiled scripts."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


OfTimm.__module__, OfTimm.__qualname__ = "timm.layers.linear", "Linear"


class Renamed(nn.Linear):
    """The same forward under another name."""


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


def replaced_forward(layer):
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight, layer.bias)
    return layer


def tensor_for_weight(layer):
    made = layer.weight.detach().clone()
    del layer._parameters["weight"]
    layer.weight = made
    return layer


def changed_by(hook, before=False):
    def change(layer):
        (layer.register_forward_pre_hook if before else layer.register_forward_hook)(hook)
        return layer

    return change


def one_entry(layer, inputs, outputs):
    """Ignore one weight of one class."""
    outputs = outputs.clone()
    outputs[:, 1] -= inputs[0][:, 650] * layer.weight[1, 650]
    return outputs


def fails(layer, inputs):
    raise RuntimeError("not now")


REMOVE = r"torch\.nn\.utils\.parametrize\.remove_parametrizations\(layer, 'weight'\)"
NOT_PLAIN = {
    "weight norm": (parametrizations.weight_norm, REMOVE),
    "spectral norm": (parametrizations.spectral_norm, REMOVE),
    "orthogonal": (parametrizations.orthogonal, REMOVE),
    "bias": (lambda layer: parametrize.register_parametrization(layer, "bias", nn.Tanh()) and layer, "layer, 'bias'"),
    "old weight norm": (old_weight_norm, r"torch\.nn\.utils\.remove_weight_norm\(layer, 'weight'\)"),
    "old spectral norm": (nn.utils.spectral_norm, r"torch\.nn\.utils\.remove_spectral_norm\(layer, 'weight'\)"),
    "pruned weight": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5), r"torch\.nn\.utils\.prune\.remove\(layer, 'weight'\)"
    ),
    "pruned bias": (lambda layer: prune.random_unstructured(layer, "bias", 1), r"prune\.remove\(layer, 'bias'\)"),
    "no parameter": (tensor_for_weight, "not a parameter"),
    "LoRA": (lambda layer: Lora(D, C), r"merge_and_unload\(\)"),
    "cosine": (lambda layer: Cosine(D, C), "Cosine with a forward of its own"),
    "forward": (replaced_forward, "forward of its own"),
    "hook": (changed_by(lambda layer, inputs, outputs: outputs / 2), r"call remove\(\) on their handles"),
    "hook on one weight": (changed_by(one_entry), r"call remove\(\) on their handles"),
    "hook on inputs": (
        changed_by(lambda layer, inputs: (nn.functional.normalize(inputs[0], dim=1),), before=True), "outputs are not"
    ),
    "failing hook": (changed_by(fails, before=True), r"RuntimeError: not now"),
    "integers": (lambda layer: layer.requires_grad_(False).to(torch.float16) and _integers(layer), "torch.int8"),
    "convolution": (lambda layer: nn.Conv2d(D, C, 3), "only a convolution of kernel 1 x 1, stride 1 and one group"),
    "stride": (lambda layer: nn.Conv2d(D, C, 1, stride=2), "only a convolution of kernel 1 x 1, stride 1"),
    "groups": (lambda layer: nn.Conv2d(C, C, 1, groups=C), "only a convolution of kernel 1 x 1, stride 1"),
    "pruned convolution": (
        lambda layer: prune.l1_unstructured(nn.Conv2d(D, C, 1), "weight", 0.5), r"prune\.remove\(layer, 'weight'\)"
    ),
    "no layer": (lambda layer: nn.Sequential(layer), "must be a torch.nn.Linear"),
}  # fmt: skip


def _integers(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_a_layer_that_its_weights_do_not_decide_is_refused_and_untouched(kind):
    make, message = NOT_PLAIN[kind]
    layer = make(nn.Linear(D, C))
    before = copy.deepcopy({name: tensor.detach() for name, tensor in layer.state_dict().items()})
    with pytest.raises(DataError, match=message):
        LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic")
    with pytest.raises(DataError, match=message):
        LinearHead.from_module(nn.Linear(D, C), l2=0.1, n_train=9, loss="quadratic").copy_to(layer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items() if "_u" not in name)


@pytest.mark.parametrize(
    ("make", "undo"),
    [
        (parametrizations.weight_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
        (parametrizations.spectral_norm, lambda layer: parametrize.remove_parametrizations(layer, "weight")),
        (old_weight_norm, lambda layer: nn.utils.remove_weight_norm(layer, "weight")),
        (nn.utils.spectral_norm, lambda layer: nn.utils.remove_spectral_norm(layer, "weight")),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
    ],
)
def test_the_call_that_the_message_names_makes_the_layer_plain(make, undo):
    layer, rows = make(nn.Linear(6, 3)), torch.randn(5, 6)
    undo(layer)
    LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic")
    other = LinearHead.from_module(nn.Linear(6, 3), l2=0.1, n_train=9, loss="quadratic")
    other.copy_to(layer)
    torch.testing.assert_close(layer(rows).double(), other.logits(rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_plain_layers_of_every_precision_are_taken(device, dtype, bias):
    """So are a subclass without a forward of its own, and hooks that only look."""
    layer = Renamed(D, C, bias=bias).to(device, dtype)
    seen = []
    layer.register_forward_hook(lambda layer, inputs, outputs: seen.append(len(outputs)))
    head = LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic")
    twin = nn.Linear(D, C, bias=bias).to(device, dtype)
    head.to(torch.device("cpu")).copy_to(twin)
    assert torch.equal(twin.weight, layer.weight)
    assert seen


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_pointwise_convolution_is_a_linear_layer_of_each_pixel(bias, memory, device):
    layer = nn.Conv2d(6, C, 1, bias=bias, padding="same").to(device, memory_format=memory)
    pixels = torch.randn(5, 6, 2, 2, device=device)
    head = LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic")
    wanted = layer(pixels).permute(0, 2, 3, 1).reshape(-1, C)
    torch.testing.assert_close(
        head.logits(pixels.permute(0, 2, 3, 1).reshape(-1, 6)).float(), wanted, atol=1e-3, rtol=0
    )
    other = LinearHead.from_module(nn.Linear(6, C, bias=bias), l2=0.1, n_train=9, loss="quadratic")
    other.copy_to(layer)
    torch.testing.assert_close(
        layer(pixels)[:, :, 1, 0].double(), other.logits(pixels[:, :, 1, 0]).to(device), atol=1e-3, rtol=0
    )


def test_the_layer_of_timm_is_plain():
    layer = OfTimm(D, C)
    assert torch.equal(
        LinearHead.from_module(layer, l2=0.1, n_train=9, loss="quadratic").weight_CD.float(), layer.weight
    )


def test_weights_that_the_layer_cannot_hold_are_refused_and_it_keeps_its_own():
    zero = torch.zeros(C, 4).double()
    layer = nn.Linear(4, C, bias=False).half()
    before = layer.weight.detach().clone()
    with pytest.raises(DataError, match=r"torch\.float16, which cannot hold numbers as large as 1e\+06"):
        LinearHead(zero + 1e6, zero, 0.1, 9).copy_to(layer)
    assert torch.equal(layer.weight, before)
