"""``sfu.unlearn`` of whole models: the right layer changes, in the way that its head does, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sfu
from sfu.errors import ConfigError, DataError, SfuError
from tests.models.cases import (
    CLOSED,
    INPUTS,
    LABELS,
    RECORD,
    C,
    Convolution,
    D,
    Dense,
    F,
    N,
    Output,
    Plain,
    Text,
    Timm,
    text_batch,
)  # fmt: skip

PAIR = (INPUTS[:F], LABELS[:F])


def logits_of(model: nn.Module, given: Any) -> Tensor:
    inputs = {key: value for key, value in given.items() if key != "labels"} if isinstance(given, dict) else {}
    with torch.no_grad():
        outputs = model.eval()(**inputs) if inputs else model.eval()(given)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def inputs_of(model: nn.Module, layer: nn.Module, given: Any) -> Tensor:
    seen = list[Tensor]()
    handle = layer.register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    logits_of(model, given)
    handle.remove()
    return seen[0]


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[row] for key, value in batch.items()} for row in range(len(batch["labels"]))]


MODELS = {
    "torchvision": lambda: Dense("fc"), "Sequential": lambda: nn.Sequential(Dense().backbone, nn.Linear(D, C).double()),
    "timm": lambda: Timm("head"), "1 x 1 after the mean": lambda: Convolution("before"),
    "the layer alone": lambda: nn.Linear(4, C).double(), "a tuple": lambda: Dense(after=lambda x: (x, x.sum())),
    "an output": lambda: Dense(after=Plain), "a mapping": lambda: Dense(after=lambda x: Output(logits=x, other=1)),
    "two names": lambda: nn.Sequential(Dense().backbone, nn.Linear(D, C).double(), nn.Identity(), nn.Dropout(0.3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_unlearns_as_the_head_of_its_layer_does(kind):
    model = MODELS[kind]().train()
    before = copy.deepcopy(model.state_dict())
    result = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())
    assert all(module.training for module in model.modules())
    changed = {name for name, now in result.model.state_dict().items() if not torch.equal(now, before[name])}
    name = result.details["layer"]
    assert changed == {f"{name}.{part}" if name else part for part in ("weight", "bias")}
    layer = model.get_submodule(name)
    features = inputs_of(model, layer, INPUTS[:F]).flatten(1)
    by_hand = sfu.unlearn(RECORD.head(layer), features, LABELS[:F], curvature=CLOSED)
    torch.testing.assert_close(result.head.parameters_CE, by_hand.head.parameters_CE, rtol=1e-9, atol=1e-12)
    rest = inputs_of(model, layer, INPUTS[F:]).flatten(1)
    torch.testing.assert_close(logits_of(result.model, INPUTS[F:]), by_hand.head.logits(rest), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pooled", ["before", "last", "mean"])
@pytest.mark.parametrize("output", [Plain, lambda logits: Output(logits=logits), lambda logits: (logits, 1)])
def test_a_model_of_tokens_unlearns_from_batches_of_keywords(pooled, output):
    model, batch = Text(pooled, output), text_batch()
    layer_inputs = inputs_of(model, model.score, batch)
    last = batch["attention_mask"].sum(1) - 1
    pool = {"before": lambda x: x, "mean": lambda x: x.mean(1), "last": lambda x: x[torch.arange(F), last]}[pooled]
    by_hand = sfu.unlearn(RECORD.head(model.score), pool(layer_inputs), batch["labels"], curvature=CLOSED)
    for data in (batch, DataLoader(rows_of(batch), batch_size=7)):
        result = sfu.unlearn(model, data, record=RECORD, curvature=CLOSED)
        torch.testing.assert_close(result.head.parameters_CE, by_hand.head.parameters_CE, rtol=1e-9, atol=1e-12)


def test_a_convolution_whose_outputs_are_averaged_is_a_layer_of_the_average():
    model, rest = Convolution("after"), INPUTS[F:]
    result = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    features = inputs_of(model, model.classifier, INPUTS).mean((2, 3))
    by_hand = sfu.unlearn(RECORD.head(model.classifier), features[:F], LABELS[:F], curvature=CLOSED)
    torch.testing.assert_close(logits_of(result.model, rest), by_hand.head.logits(features[F:]), rtol=1e-9, atol=1e-12)
    assert not torch.equal(result.model.classifier.weight, model.classifier.weight)


def ridge(model: nn.Sequential, rows: slice, l2: float) -> tuple[Tensor, Tensor]:
    """Fit the last layer to rows without sfu, and return its weights, and what the rows' Hessian is."""
    features = inputs_of(model, model[-1], INPUTS[rows])
    design = torch.cat([features, torch.ones(len(features), 1).double()], 1)
    gram = design.T @ design / len(design)
    penalty = l2 * torch.diag(torch.tensor([1.0] * features.shape[1] + [0.0]).double())
    hot = nn.functional.one_hot(LABELS[rows], C).double()
    return torch.linalg.solve(gram + penalty, design.T @ hot / len(design)).T, gram


def test_the_outputs_are_those_of_a_model_whose_layer_was_retrained():
    """With the training rows' Hessian exactly; without it, nearer, by the share that is predicted."""
    model, l2 = nn.Sequential(Dense().backbone, nn.Linear(D, C).double()), 1e-2
    optimum, gram = ridge(model, slice(None), l2)
    retrained, _ = ridge(model, slice(F, None), l2)
    with torch.no_grad():
        model[-1].weight.copy_(optimum[:, :D])
        model[-1].bias.copy_(optimum[:, D])
    record = dataclasses.replace(RECORD, l2=l2)
    head = record.head(model[-1])
    kept = dataclasses.replace(head, kept=dataclasses.replace(head.kept, data_hessian=gram))
    settings = {"estimator": "stored", "regularization": "none"}
    exact = sfu.unlearn(model, PAIR, record=kept, curvature=settings)
    features = inputs_of(model, model[-1], INPUTS)
    wanted = features @ retrained[:, :D].T + retrained[:, D]
    torch.testing.assert_close(logits_of(exact.model, INPUTS), wanted, rtol=1e-6, atol=1e-6)
    result = sfu.unlearn(model, PAIR, record=record)
    hessian = torch.cat([features[F:], torch.ones(N - F, 1).double()], 1)
    hessian = hessian.T @ hessian / (N - F) + l2 * torch.diag(torch.tensor([1.0] * D + [0.0]).double())

    def distance(at: Tensor) -> float:
        return float((((at - retrained) @ hessian) * (at - retrained)).sum())

    low, high = result.predicted_share_interval
    assert low < 1 - distance(result.head.parameters_CE) / distance(optimum) < high


def test_a_resnet_unlearns_and_keeps_its_precision(device):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=C).to(device)
    images, labels = torch.randn(F, 3, 32, 32), LABELS[:F]
    loader = DataLoader(TensorDataset(images, labels), batch_size=16)
    record = sfu.TrainingRecord(n_train=N, loss=nn.CrossEntropyLoss(), l2=1e-2)
    statistics = model.bn1.running_mean.clone()
    result = sfu.unlearn(model, loader, record=record, curvature=CLOSED)
    assert result.details["layer"] == "fc"
    assert result.model.fc.weight.dtype == torch.float32
    assert torch.equal(model.bn1.running_mean, statistics)
    assert not torch.equal(result.model.fc.weight, model.fc.weight)
    assert all(module.training for module in model.modules())
    assert "model: ResNet" in repr(result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_models_of_every_precision_take_inputs_of_any(dtype):
    model = Dense().to(dtype)
    result = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    assert result.model.fc.weight.dtype == dtype
    assert not torch.equal(result.model.fc.weight, model.fc.weight)


def test_in_place_changes_the_model_that_is_given_under_its_wrappers():
    inner = Dense()
    model = nn.DataParallel(inner)
    before = inner.fc.weight.detach().clone()
    copied = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    assert isinstance(copied.model, Dense)
    assert torch.equal(inner.fc.weight, before)
    result = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED, in_place=True)
    assert result.model is model
    assert torch.equal(inner.fc.weight, copied.model.fc.weight)
    assert not torch.equal(inner.fc.weight, before)


def test_compiled_models_are_unwrapped():
    inner = Dense()
    for model in (torch.compile(inner, backend="eager"), nn.Sequential(torch.compile(inner, backend="eager"))):
        before = inner.fc.weight.detach().clone()
        logits_of(model, INPUTS)  # compiles
        result = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
        assert result.details["layer"].endswith("fc")
        assert torch.equal(inner.fc.weight, before)
        assert result.applied


def test_autocast_gradients_and_modes_are_off_and_come_back_after_an_error():
    seen = list[tuple[bool, bool, bool]]()

    def look(logits: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), model.training))
        if len(seen) > 5:
            raise RuntimeError("enough")
        return logits

    model = Dense(after=look).train()
    model.backbone[1].eval()  # frozen, as some train
    modes = [module.training for module in model.modules()]
    with torch.autocast("cpu", torch.bfloat16):
        sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED, in_place=True)
        assert set(seen) == {(False, False, False)}
        with pytest.raises(DataError, match=r"the model fails on .*\(RuntimeError: enough\)\. Give raw inputs"):
            sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not any(module._forward_hooks for module in model.modules())


def test_unlabelled_inputs_and_views_go_through_the_model_too():
    model = Dense()
    features = inputs_of(model, model.fc, INPUTS)
    views = INPUTS[:F].flip(1)
    seen = inputs_of(model, model.fc, views)
    rest = features[F:]
    by_hand = sfu.unlearn(
        RECORD.head(model.fc), features[:F], LABELS[:F], unlabelled=[rest[:80], rest[80:]], views=seen[None],
        curvature=CLOSED,
    )  # fmt: skip
    for sets in ([INPUTS[F : F + 80], INPUTS[F + 80 :]], [TensorDataset(INPUTS[F : F + 80]), (INPUTS[F + 80 :],)]):
        result = sfu.unlearn(model, PAIR, record=RECORD, unlabelled=sets, views=[views], curvature=CLOSED)
        torch.testing.assert_close(result.head.parameters_CE, by_hand.head.parameters_CE, rtol=1e-9, atol=1e-12)
    pairs = DataLoader(TensorDataset(INPUTS[F:], LABELS[F:]), batch_size=50)
    one = sfu.unlearn(model, PAIR, record=RECORD, unlabelled=pairs, curvature=CLOSED)
    by_hand = sfu.unlearn(RECORD.head(model.fc), features[:F], LABELS[:F], unlabelled=rest, curvature=CLOSED)
    torch.testing.assert_close(one.head.parameters_CE, by_hand.head.parameters_CE, rtol=1e-9, atol=1e-12)


def test_a_later_request_needs_the_head_of_the_one_before(tmp_path):
    model = Dense()
    first = sfu.unlearn(model, (INPUTS[:20], LABELS[:20]), record=RECORD, curvature=CLOSED)
    with pytest.raises(ConfigError, match=r"record\.n_train=200 counts rows .*Give record=result\.head"):
        sfu.unlearn(first.model, (INPUTS[20:F], LABELS[20:F]), record=RECORD)
    with pytest.raises(ConfigError, match=r"record is a head .* are not those of the layer 'fc' \(5 -> 3\)"):
        sfu.unlearn(model, (INPUTS[20:F], LABELS[20:F]), record=first.head)
    first.head.save(tmp_path / "head")
    saved = sfu.load_head(tmp_path / "head")
    again = sfu.unlearn(first.model, (INPUTS[10:F], LABELS[10:F]), record=saved, curvature=CLOSED)
    assert "10 of 30 rows had been forgotten" in again.note
    assert (again.head.n_train, again.head.forgotten.requests) == (N - F, 2)
    first.model.load_state_dict(model.state_dict())  # the model of before
    sfu.unlearn(first.model, PAIR, record=RECORD, curvature=CLOSED)


def test_rows_are_recognised_by_their_inputs_in_other_batches():
    model, batch = Text("last"), text_batch(slice(30))
    first = sfu.unlearn(model, batch, record=RECORD, curvature=CLOSED)
    model.backbone[0].bias.data += 1e-12  # as rounding in another batch may do
    first.model.backbone[0].bias.data += 1e-12
    again = sfu.unlearn(first.model, DataLoader(rows_of(batch), batch_size=7), record=first.head, curvature=CLOSED)
    assert (again.applied, again.verdict) == (False, "applied")
    assert "30 of 30 rows had been forgotten" in again.note
    twice = {key: torch.cat([one, one[:9]]) for key, one in batch.items()}
    once = sfu.unlearn(model, DataLoader(rows_of(twice), batch_size=7), record=RECORD, curvature=CLOSED)
    assert once.head.forgotten.rows == 30
    assert "9 rows given again in this request count once" in once.note


def test_a_backbone_that_the_optimiser_trained_is_found_by_itself():
    model = Dense()
    for parameters, trained in (
        (model.fc.parameters(), False), (model.parameters(), True), ([model.fc.weight], False),
        (copy.deepcopy(model.fc).parameters(), False), (copy.deepcopy(model).parameters(), True),
    ):  # fmt: skip
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-2)
        record = sfu.TrainingRecord(n_train=N, loss="quadratic", optimizer=optimizer, trained="optimum")
        result = sfu.unlearn(model, PAIR, record=record, curvature=CLOSED)
        assert ("the backbone was trained on these rows, too" in result.note) == trained
        assert ("trained_backbone" in result.reasons) == trained
    later = sfu.unlearn(result.model, (INPUTS[F : 2 * F], LABELS[F : 2 * F]), record=result.head, curvature=CLOSED)
    assert "trained_backbone" in later.reasons
    model.backbone.requires_grad_(False)
    frozen = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    record = sfu.TrainingRecord(n_train=N, loss="quadratic", optimizer=frozen, trained="optimum")
    assert "trained_backbone" not in sfu.unlearn(model, PAIR, record=record, curvature=CLOSED).reasons
    model.backbone.requires_grad_(True)
    logits_of(model, INPUTS)
    model(INPUTS).sum().backward()
    frozen.step()
    model.backbone.requires_grad_(False)  # after the training
    assert "trained_backbone" in sfu.unlearn(model, PAIR, record=record, curvature=CLOSED).reasons


def test_one_output_multi_label_and_regression_models():
    for layer, after, loss, labels in (
        (nn.Linear(D, 1), lambda x: x.squeeze(), "logistic", LABELS[:F] == 0),
        (nn.Linear(D, 1), lambda x: x, "quadratic", INPUTS[:F, 0]),
        (nn.Linear(D, C), lambda x: x, "logistic", nn.functional.one_hot(LABELS[:F], C)),
        (nn.Linear(D, C), lambda x: x, "quadratic", INPUTS[:F, :C]),
    ):
        model, record = Dense(layer=layer, after=after), sfu.TrainingRecord(n_train=N, loss=loss, l2=1e-2)
        result = sfu.unlearn(model, INPUTS[:F], labels, record=record, curvature=CLOSED)
        features = inputs_of(model, model.fc, INPUTS[:F])
        by_hand = sfu.unlearn(record.head(model.fc), features, labels, curvature=CLOSED)
        torch.testing.assert_close(result.head.parameters_CE, by_hand.head.parameters_CE, rtol=1e-9, atol=1e-12)


def outcome(unlearn: Callable[[], sfu.UnlearningResult]) -> tuple[Tensor, str] | str:
    try:
        result = unlearn()
    except SfuError as error:
        return str(error)
    return result.head.parameters_CE, result.verdict


@settings(max_examples=20)
@given(
    rows=st.integers(1, N), size=st.integers(1, 70), n_outputs=st.integers(1, 4), bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]), loss=st.sampled_from(["quadratic", "logistic", "softmax"]),
    shift=st.integers(0, 1),
)  # fmt: skip
def test_a_model_and_its_layer_with_features_have_the_same_outcome(rows, size, n_outputs, bias, dtype, loss, shift):
    """The same head, or the same refusal, whatever the number of rows, the batches and the labels."""
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(4, D), nn.Tanh(), nn.Linear(D, n_outputs, bias=bias)).to(dtype)
    record = sfu.TrainingRecord(n_train=N, loss=loss, l2=1e-2)
    labels = LABELS[:rows] % max(2, n_outputs) + shift  # class n_outputs is none
    loader = DataLoader(TensorDataset(INPUTS[:rows], labels), batch_size=size)
    features = model[:-1](INPUTS[:rows].to(dtype))
    found = outcome(lambda: sfu.unlearn(model, loader, record=record, curvature=CLOSED))
    wanted = outcome(lambda: sfu.unlearn(record.head(model[-1]), features, labels, curvature=CLOSED))
    assert type(found) is type(wanted)
    if isinstance(found, str) or isinstance(wanted, str):
        assert found == wanted
    else:
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-6)
        assert found[1] == wanted[1]


def test_labels_may_be_names_of_classes():
    record = dataclasses.replace(RECORD, classes=["ant", "bee", "cat"])
    names = [record.classes[label] for label in LABELS[:F].tolist()]
    model = Dense()
    wanted = sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED).head.parameters_CE
    rows = list(zip(INPUTS[:F], names, strict=True))
    one_by_one = [(INPUTS[row : row + 1], [names[row]]) for row in range(F)]
    scalars = [(INPUTS[row : row + 1], LABELS[row]) for row in range(F)]
    for data in ((INPUTS[:F], names), DataLoader(rows, batch_size=9), one_by_one, scalars):
        found = sfu.unlearn(model, data, record=record, curvature=CLOSED).head.parameters_CE
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


class Tied(Dense):
    """The classifier's weights are used in the backbone, too."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.backbone(inputs)
        return self.fc(rows + 0.1 * (rows @ self.fc.weight.T @ self.fc.weight))


def test_a_change_that_reaches_further_than_the_layer_is_taken_back():
    model = Tied("fc")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DataError, match=r"after the change, .* they differ by up to .* weights that another layer"):
        sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED, in_place=True)
    assert all(torch.equal(now, before[name]) for name, now in model.state_dict().items())


def test_a_model_that_cannot_be_copied_can_be_changed_in_place():
    model = Dense()
    model.held = model(INPUTS)  # no leaf, so it has no copy
    with pytest.raises(DataError, match=r"cannot be copied \(.*Give in_place=True"):
        sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED)
    assert sfu.unlearn(model, PAIR, record=RECORD, curvature=CLOSED, in_place=True).model is model


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"record": RECORD}, "record=TrainingRecord is for a whole model, but a LinearHead is given"),
        ({"layer": "fc"}, "layer=fc is for a whole model"), ({"in_place": True}, "in_place=True is for a whole model"),
    ],
)  # fmt: skip
def test_arguments_of_models_are_refused_with_a_head(given, message):
    with pytest.raises(ConfigError, match=message):
        sfu.unlearn(RECORD.head(Dense().fc), INPUTS[:F, :1].expand(F, D), LABELS[:F], **given)


def test_what_a_model_needs_is_asked_for():
    model = Dense()
    for record in (None, {"n_train": N}):
        with pytest.raises(ConfigError, match=r"record=(None|dict) does not say how .*sfu\.TrainingRecord\(n_train"):
            sfu.unlearn(model, PAIR, record=record)
    shuffled = DataLoader(TensorDataset(*PAIR), shuffle=True)
    with pytest.raises(ConfigError, match=r"weights are given .* shuffles them\. Give a loader with shuffle=False"):
        sfu.unlearn(model, shuffled, record=RECORD, weights=torch.ones(F))
    with pytest.raises(ConfigError, match=r"reference='best' is unknown"):
        sfu.unlearn(model, None, record=RECORD, reference="best")
    with pytest.raises(DataError, match="or give the whole model"):
        sfu.unlearn("resnet18", PAIR, record=RECORD)
