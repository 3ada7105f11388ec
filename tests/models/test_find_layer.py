"""Which layer computes a model's outputs; models for which no plain layer does are refused, and the message helps."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import sfu
from sfu.errors import DataError
from tests.models.cases import (
    CLOSED,
    INPUTS,
    LABELS,
    RECORD,
    C,
    Convolution,
    D,
    Dense,
    Distilled,
    F,
    Text,
    Timm,
    text_batch,
)

PAIR = (INPUTS[:F], LABELS[:F])


class Cosine(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 7 * nn.functional.linear(nn.functional.normalize(inputs), nn.functional.normalize(self.weight))


class CosineModule(nn.Module):
    """The same without being a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(C, D))

    def forward(self, inputs: Tensor) -> Tensor:
        return Cosine.forward(self, inputs)  # type: ignore[arg-type]


class Adapter(nn.Module):
    """A layer of peft: the own one, and a product beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(D, C)
        self.lora_A, self.lora_B = nn.Linear(D, 2, bias=False), nn.Linear(2, C, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base_layer(inputs) + self.lora_B(self.lora_A(inputs))


class Twice(Dense):
    """One layer for two versions of the inputs, the second of which counts."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.fc(self.backbone(inputs + 1))
        return self.fc(self.backbone(inputs))


class Twins(Timm):
    """Two layers with the same weights, of which either may be the classifier."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__(names[0])
        self.names = names
        self.add_module(names[1], copy.deepcopy(self.get_submodule(names[0])))

    def get_classifier(self) -> nn.Module | None:
        return self.get_submodule("second") if "second" in self.names and "third" not in self.names else None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = [self.get_submodule(name)(self.backbone(inputs)) for name in self.names]
        return outputs[0]  # all are computed


def without_weights(model: Text) -> Text:
    model.score.weight.data.zero_()
    return model


def noisy(outputs: Tensor) -> Tensor:
    return nn.functional.dropout(outputs, 0.5, training=True)


def with_layer(change: Callable[[nn.Linear], Any]) -> Dense:
    layer = nn.Linear(D, C)
    return Dense(layer=change(layer) or layer)


REMOVE = r"torch\.nn\.utils\.parametrize\.remove_parametrizations\(layer, 'weight'\)"
PRUNED = partial(prune.l1_unstructured, name="weight", amount=0.5)
REFUSED = {
    "scaled": (lambda: Dense(after=lambda x: 2 * x), (
        r"'fc' \(5 -> 3\) gives other numbers, which differ by up to \S+, where the outputs reach \S+; the model "
        r"returns 2 times them.*sfu\.unlearn\(record\.head\(layer\), features, labels\)"
    )),
    "softmax": (lambda: nn.Sequential(Dense(), nn.Softmax(1)), "the model returns their softmax"),
    "log_softmax": (lambda: Dense(after=lambda x: x.log_softmax(1)), "the model returns their log_softmax"),
    "sigmoid": (lambda: Dense(after=torch.sigmoid), "the model returns their sigmoid"),
    "relu in place": (lambda: nn.Sequential(Dense(), nn.ReLU(inplace=True)), "the model returns their relu"),
    "dropout": (lambda: Dense(after=noisy), "other outputs for the same inputs in evaluation mode: they differ"),
    "distilled": (Distilled, r"2 classifiers, 'head' and 'head_dist', and returns a mean"),
    "tokens": (lambda: Text("none"), r"rows 0 \.\.\. of features are \[40, 3, 3\], several for each example"),
    "pixels": (lambda: Convolution("none"), r"are \[40, 3, 3, 3\], several for each example"),
    "relu between": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, C, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ).double(),
        r"gives other numbers \(of shape \[40, 2, 2, 3\], of which the model makes \[40, 3\]\)",
    ),
    "no layer": (
        lambda: nn.Sequential(
            Dense(), nn.Linear(C, 4), nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 7, 2), nn.Flatten(1)
        ).double(),
        r"no linear layer of 7 outputs is called.*'0\.fc' \(5 -> 3\), '1' \(3 -> 4\)",
    ),
    "cosine": (lambda: Dense(layer=Cosine(D, C)), r"'fc' \(Cosine\) is a cosine classifier.*weights times 7,"),
    "cosine module": (lambda: Dense(layer=CosineModule()), r"'fc' \(CosineModule\) is a cosine classifier.*times 7,"),
    "mean, scaled a little": (
        lambda: Text("mean", lambda logits: (logits * (1 + 1e-8),)), r"gives other numbers \(of shape \[40, 3, 3\], of"
    ),
    "positions alike": (lambda: without_weights(Text("last")), "outputs are the same at several positions"),
    "adapter": (lambda: Dense(layer=Adapter()), r"'fc\.base_layer' has an adapter beside it .*merge_and_unload\(\)"),
    "twice": (Twice, r"'fc' is used 2 times for one batch"),
    "weight norm": (lambda: with_layer(parametrizations.weight_norm), REMOVE),
    "spectral norm": (lambda: with_layer(parametrizations.spectral_norm), REMOVE),
    "pruning": (lambda: with_layer(PRUNED), r"prune\.remove\(layer, 'weight'\)"),
    "parametrised bias": (
        lambda: with_layer(lambda layer: parametrize.register_parametrization(layer, "bias", nn.Tanh())),
        "layer, 'bias'",
    ),
    "two layers": (
        lambda: Twins(("second", "third")),
        r"the outputs of 2 layers are those of .*: 'second' \(5 -> 3\), 'third' \(5 -> 3\)\. Give layer='\.\.\.'",
    ),
    "another of the same weights": (lambda: Twins(("other", "fc")), "after the change, .* they differ by up to"),
    "not finite": (lambda: Dense(after=lambda x: x / 0), "NaN or infinite values on rows 0"),
    "no logits": (lambda: Dense(after=lambda x: {"scores": x}), "returns a dict without logits"),
    "script": (lambda: torch.jit.trace(Dense().eval(), INPUTS), "parts in TorchScript.*Give the model that the script"),
    "no parameters": (nn.Flatten, "model=Flatten has no parameters"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_no_plain_layer_decides_are_refused_and_untouched(kind):
    make, message = REFUSED[kind]
    model = make().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError, match=message):
        sfu.unlearn(
            model, text_batch() if isinstance(model, Text) else PAIR, record=RECORD, curvature=CLOSED, in_place=True
        )
    assert all(module.training for module in model.modules())
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


@pytest.mark.parametrize("make", [parametrizations.weight_norm, PRUNED])
def test_a_layer_that_is_not_plain_is_refused_before_the_examples_are_read(make):
    """Only the batch that finds the layer is read, and the model is not run on it if the layer is named."""
    model, read = with_layer(make), list[int]()
    model.after = lambda outputs: ran.append(len(outputs)) or outputs
    ran = list[int]()

    def rows() -> Any:
        for number in range(9):
            read.append(number)
            yield PAIR

    with pytest.raises(DataError, match="recomputed"):
        sfu.unlearn(model, rows(), record=RECORD)
    assert (read, ran) == ([0], [F, F])
    with pytest.raises(DataError, match="recomputed"):
        sfu.unlearn(model, rows(), record=RECORD, layer="fc")
    assert (read, ran) == ([0, 0], [F, F])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("head", r"layer='head' is no layer of the model\. Its .* are 'backbone\.0' \(4 -> 5\), 'fc' \(5 -> 3\)"),
        ("backbone", r"layer='backbone' is a Sequential, not a linear layer"),
        ("backbone.0", r"layer='backbone\.0' \(4 -> 5\) is not of 3 outputs, but the"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_with_the_right_ones(layer, message):
    with pytest.raises(DataError, match=message):
        sfu.unlearn(Dense(), PAIR, record=RECORD, layer=layer)
    assert sfu.unlearn(Dense(), PAIR, record=RECORD, layer="fc", curvature=CLOSED).details["layer"] == "fc"


@pytest.mark.parametrize(
    ("names", "given", "wanted"),
    [
        (("second", "first"), None, "second"), (("fc", "other"), None, "fc"),
        (("third", "second"), "third", "third"),
    ],
)  # fmt: skip
def test_names_decide_between_layers_of_the_same_outputs(names, given, wanted):
    result = sfu.unlearn(
        Twins(names), INPUTS[:F], LABELS[:F], record=RECORD, layer=given, curvature=CLOSED, in_place=False
    )
    assert result.details["layer"] == wanted


def test_a_layer_of_the_right_shape_elsewhere_is_not_taken():
    """Neither the last one by its place, nor one that is called last."""

    class Other(Dense):
        def __init__(self) -> None:
            super().__init__("first")
            self.fc = nn.Linear(D, C).double()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.first(self.backbone(inputs))
            self.fc(self.backbone(inputs))
            return outputs

    assert sfu.unlearn(Other(), PAIR, record=RECORD, curvature=CLOSED).details["layer"] == "first"
    with pytest.raises(DataError, match=r"'fc' \(5 -> 3\) gives other numbers, which differ by up to"):
        sfu.unlearn(Other(), PAIR, record=RECORD, layer="fc")


def test_a_model_that_treats_a_later_batch_otherwise_is_refused():
    calls = list[int]()

    def after(outputs: Tensor) -> Tensor:
        calls.append(len(outputs))
        return outputs if len(outputs) == F // 2 else 2 * outputs

    batches = [(INPUTS[: F // 2], LABELS[: F // 2]), (INPUTS[F // 2 : F - 1], LABELS[F // 2 : F - 1])]
    with pytest.raises(DataError, match=re.escape("on batch 1 of features=list, the model's outputs [19, 3] are not")):
        sfu.unlearn(Dense(after=after), batches, record=RECORD)


def test_a_hook_that_acts_on_large_outputs_alone_is_found_by_the_examples():
    """No probe of the layer reaches so far."""
    layer = nn.Linear(4, C).double()
    layer.register_forward_hook(lambda layer, inputs, outputs: outputs.clamp(max=50))
    RECORD.head(layer)
    small = sfu.unlearn(layer, PAIR, record=RECORD, curvature=CLOSED)
    assert small.applied
    with pytest.raises(
        DataError, match=r"on batch 1 of .*the layer's weights and inputs do not give .* differ by up to"
    ):
        sfu.unlearn(layer, [PAIR, (1000 * INPUTS[F : 2 * F], LABELS[F : 2 * F])], record=RECORD)


def test_a_small_difference_from_the_layer_is_told_by_its_size():
    """As of a hook that works on one output, or weights that are used elsewhere."""

    def after(outputs: Tensor) -> Tensor:
        outputs = outputs.clone()
        outputs[0, 1] += 1e-6
        return outputs

    with pytest.raises(DataError, match=r"which differ by up to 1e-06, where the outputs reach"):
        sfu.unlearn(Dense(after=after), PAIR, record=RECORD)
