"""The record of a training in PyTorch: the head that is made of it is at the optimum that the training reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import sfu
from sfu.errors import ConfigError, DataError
from sfu.heads.recipe import OPTIMUM
from sfu.request import ForgetRequest

N, D, C = 60, 4, 3
GENERATOR = torch.Generator().manual_seed(0)
FEATURES = torch.randn(N, D, generator=GENERATOR, dtype=torch.float64)
LABELS = (FEATURES[:, :C] + torch.randn(N, C, generator=GENERATOR)).argmax(1)
COUNTS = LABELS.bincount(minlength=C)
DECAY = 0.05
WEIGHTS = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def groups_of(layer: nn.Linear, of_bias: float) -> list[dict]:
    return [{"params": [layer.weight], "weight_decay": DECAY}, {"params": [layer.bias], "weight_decay": of_bias}]


def trained(criterion: nn.Module, of_bias: float = DECAY) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Gradient descent with all rows in every batch, until nothing changes."""
    torch.manual_seed(0)
    layer = nn.Linear(D, C, dtype=torch.float64)
    rate = 0.5 / (N if criterion.reduction == "sum" else 1)
    optimizer = torch.optim.SGD(groups_of(layer, of_bias), lr=rate, momentum=0.9)
    hot = nn.functional.one_hot(LABELS, C).double()
    targets = LABELS if isinstance(criterion, nn.CrossEntropyLoss) else hot
    for _ in range(2000 if criterion.reduction == "mean" else 40_000):
        optimizer.zero_grad()
        criterion(layer(FEATURES), targets).backward()
        optimizer.step()
        if float(layer.weight.grad.add(layer.weight.detach(), alpha=DECAY).norm()) < 1e-13:
            break
    return layer, optimizer


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(WEIGHTS),
        nn.CrossEntropyLoss(reduction="sum"), nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.MSELoss(reduction="sum"),
        nn.BCEWithLogitsLoss(reduction="sum"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("of_bias", [0.0, DECAY])
def test_the_head_is_at_the_optimum_that_pytorch_reached(criterion, of_bias):
    layer, optimizer = trained(criterion, of_bias)
    record = sfu.TrainingRecord(
        n_train=N, loss=criterion, optimizer=optimizer, trained="optimum", batch_size=N, class_counts=COUNTS
    )
    head = record.head(layer)
    gradient = head.objective().gradient(head.rows(FEATURES, LABELS), head.parameters_CE)
    assert float(gradient.norm()) < 1e-10
    assert head.recipe.penalize_bias == (of_bias > 0)
    assert head.total_weight == pytest.approx(float(head.rows(FEATURES, LABELS).weight))
    other = sfu.TrainingRecord(n_train=N, loss=criterion, optimizer=optimizer, batch_size=N, class_counts=COUNTS)
    assert other.head(layer).recipe.estimate_l2


@pytest.mark.parametrize(
    ("kind", "settings", "l2"),
    [
        ("SGD", {"weight_decay": 0.1}, 0.1), ("Adam", {"weight_decay": 0.1}, 0.1), ("SGD", {}, "estimate"),
        ("AdamW", {"weight_decay": 0.1}, "estimate"), ("LBFGS", {}, "estimate"),
    ],
)  # fmt: skip
def test_only_a_decay_that_is_part_of_the_gradient_is_an_l2(kind, settings, l2):
    layer = nn.Linear(D, C)
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.1, **settings)
    head = sfu.TrainingRecord(n_train=N, loss="softmax", optimizer=optimizer, trained="optimum").head(layer)
    assert (("estimate" if head.recipe.estimate_l2 else head.l2), head.recipe.trained) == (l2, OPTIMUM)
    assert head.recipe.penalize_bias == ("weight_decay" in settings)
    early = sfu.TrainingRecord(n_train=N, loss="softmax", optimizer=optimizer).head(layer)
    assert early.recipe.estimate_l2
    assert early.recipe.trained == "early_stopped"
    plain = sfu.TrainingRecord(n_train=N, loss="quadratic", optimizer=optimizer, trained="optimum").head(layer)
    assert plain.recipe.estimate_l2 == (kind == "AdamW")  # a quadratic loss has an optimum without an l2


def test_a_copy_of_the_layer_needs_groups_of_one_decay():
    layer, copy = nn.Linear(D, C), nn.Linear(D, C)
    about = {"n_train": N, "loss": "softmax", "trained": "optimum"}
    alike = torch.optim.SGD(groups_of(layer, DECAY), lr=0.1)
    assert sfu.TrainingRecord(**about, optimizer=alike).head(copy).l2 == DECAY
    differ = torch.optim.SGD(groups_of(layer, 0.0), lr=0.1)
    with pytest.raises(ConfigError, match=r"the SGD does not hold the layer's weight.*Give the optimizer that trained"):
        sfu.TrainingRecord(**about, optimizer=differ).head(copy)
    of_weight = torch.optim.SGD([layer.weight], lr=0.1, weight_decay=DECAY)
    assert not sfu.TrainingRecord(**about, optimizer=of_weight).head(layer).recipe.penalize_bias
    uneven = torch.optim.SGD(groups_of(layer, 0.01), lr=0.1)
    with pytest.raises(ConfigError, match=r"decays the layer's weight by 0.05 and its bias by 0.01"):
        sfu.TrainingRecord(**about, optimizer=uneven).head(layer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "has neither optimizer and l2"),
        ({"l2": 0.1, "optimizer": torch.optim.SGD(nn.Linear(D, C).parameters())}, "has both optimizer and l2"),
        ({"l2": 0.1, "loss": nn.CrossEntropyLoss(reduction="sum")}, r"reduction='sum', so its size depends"),
        ({"l2": 0.1, "loss": nn.CrossEntropyLoss(reduction="none"), "batch_size": 8}, "reduction='none'"),
        ({"l2": 0.1, "loss": nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)}, "has a weight or pos_weight"),
        ({"l2": 0.1, "loss": nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)}, "a weight and label_smoothing"),
        ({"optimizer": "AdamW"}, r"optimizer=str is no torch.optim.Optimizer"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(9, 9).parameters())},
            r"holds nothing of the shape of the layer's weight",
        ),
        ({"l2": 0.1, "mixup": "no"}, "mixup='no'. Give True or False"),
        ({"l2": 0.1, "batch_size": 0}, "batch_size=0"),
        ({"l2": 0.1, "classes": {"a", "b", "c"}}, "set has no order"),
        ({"l2": 0.1, "feature_mean": [float("nan")] * D}, "feature_mean has NaN"),
        ({"l2": 0.1, "class_counts": {0: 30, 2: 30, 3: 0}}, "no number for class '1'"),
        ({"l2": 0.1, "loss": nn.HuberLoss()}, "loss=HuberLoss is not a loss of sfu"),
        ({"l2": 0.1, "class_counts": [1, 2]}, r"class_counts=\[1.0, 2.0\] must be 3 numbers"),
        ({"l2": 0.1, "class_counts": [1, 2, 3]}, "whose sum is n_train=60"),
        ({"l2": 0.1, "classes": ["a", "b"]}, "are 2 names, but the head has 3 classes"),
        ({"l2": 0.1, "classes": ["a", "a", "b"]}, "not all different"),
        ({"l2": 0.1, "training_loss": float("nan")}, "training_loss=nan"),
        ({"l2": 0.1, "training_loss": -1.0}, "training_loss=-1.0"),
        ({"l2": 0.1, "frozen_backbone": "no"}, "frozen_backbone='no'. Give True or False"),
        ({"l2": 0.1, "loss": nn.CrossEntropyLoss(WEIGHTS)}, "needs the head's `weight`"),
    ],
)
def test_a_record_that_does_not_hold_together_is_refused(given, message):
    with pytest.raises((ConfigError, DataError), match=message):
        sfu.TrainingRecord(**{"n_train": N, "loss": "softmax", **given}).head(nn.Linear(D, C))


def test_the_record_stays_with_the_head_and_is_heeded(tmp_path):
    layer, optimizer = trained(nn.CrossEntropyLoss())
    record = sfu.TrainingRecord(
        n_train=N, loss=nn.CrossEntropyLoss(), optimizer=optimizer, trained="optimum", class_counts=COUNTS,
        feature_mean=FEATURES.mean(0), training_loss=0.5, classes=["ant", "bee", "cat"], frozen_backbone=False,
    )  # fmt: skip
    record.head(layer).save(tmp_path / "head")
    head = sfu.load_head(tmp_path / "head")
    assert head.recipe == record.head(layer).recipe
    assert head.recipe.training_loss == 0.5
    halved = replace(record, loss=nn.MSELoss()).head(layer)
    assert halved.recipe.training_loss == 0.5 * C / 2  # sfu's loss is half the sum over outputs
    assert torch.allclose(head.kept.shares_C, COUNTS.double() / N)
    names = [["ant", "bee", "cat"][label] for label in LABELS[:20].tolist()]
    by_name = sfu.unlearn(head, FEATURES[:20], names, curvature={"estimator": "closed_form"})
    by_number = sfu.unlearn(head, FEATURES[:20], LABELS[:20], curvature={"estimator": "closed_form"})
    assert torch.equal(by_name.head.parameters_CE, by_number.head.parameters_CE)
    assert "the backbone was trained on these rows, too" in by_name.note
    assert "the backbone was trained" in sfu.unlearn(by_name.head, FEATURES[20:40], LABELS[20:40]).note
    with pytest.raises(DataError, match=r"the label 'dog' is no class of the head\. The classes are ant, bee, cat"):
        sfu.unlearn(head, FEATURES[:2], ["ant", "dog"])
    for missing, shown in ((None, "None"), (float("nan"), "nan"), (["ant"], r"\['ant'\]")):
        with pytest.raises(DataError, match=f"the label {shown} is no class of the head"):
            sfu.unlearn(head, FEATURES[:2], ["ant", missing])
    unnamed = sfu.TrainingRecord(n_train=N, loss="softmax", l2=0.1).head(layer)
    with pytest.raises(DataError, match=r"The head has no names of its classes"):
        sfu.unlearn(unnamed, FEATURES[:2], ["ant", "bee"])
    elsewhere = sfu.unlearn(head, FEATURES[:20] + 3, LABELS[:20], curvature={"estimator": "closed_form"})
    assert "the mean of the forget features" in elsewhere.note


def test_an_optimiser_that_sfu_does_not_know_has_no_l2():
    layer = nn.Linear(D, C)
    optimizer = torch.optim.Adafactor(layer.parameters(), weight_decay=0.1)
    assert (
        sfu.TrainingRecord(n_train=N, loss="softmax", optimizer=optimizer, trained="optimum")
        .head(layer)
        .recipe.estimate_l2
    )


@pytest.mark.parametrize(
    ("criterion", "of_row"),
    [
        (nn.MSELoss(), C / 2), (nn.MSELoss(reduction="sum"), 0.5), (nn.BCEWithLogitsLoss(), C),
        (nn.CrossEntropyLoss(), 1.0),
    ],
)  # fmt: skip
def test_the_training_loss_is_that_of_a_row(criterion, of_row):
    record = sfu.TrainingRecord(n_train=N, loss=criterion, l2=0.1, batch_size=7, training_loss=2.0)
    assert record.head(nn.Linear(D, C)).recipe.training_loss == pytest.approx(2.0 * of_row)


def test_counts_go_by_class_and_a_gradient_asks_for_the_optimum():
    by_class = {2: int(COUNTS[2]), 0: int(COUNTS[0]), 1: int(COUNTS[1])}
    layer = nn.Linear(D, C, dtype=torch.float64)
    record = sfu.TrainingRecord(n_train=N, loss="quadratic", l2=0.1, class_counts=by_class)
    assert torch.allclose(record.head(layer).kept.shares_C, COUNTS.double() / N)
    plain = record.head(layer)
    gradient = plain.objective().gradient(plain.rows(FEATURES, LABELS), plain.parameters_CE)
    head = record.head(layer, gradient_CE=gradient)
    assert head.recipe.trained == "early_stopped"
    about = {"curvature": {"estimator": "closed_form", "on_doubt": "apply"}}
    assert "gain_of_training" in sfu.unlearn(head, FEATURES[:20], LABELS[:20], reference="optimum", **about).details


def test_mixed_rows_show_no_l2_of_their_own():
    layer, optimizer = nn.Linear(D, C), None
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
    about = {"n_train": N, "loss": "softmax", "mixup": True}
    assert sfu.TrainingRecord(**about, optimizer=optimizer, trained="optimum").head(layer).recipe.estimate_l2
    assert sfu.TrainingRecord(**about, l2=0.1).head(layer).recipe.estimate_l2


def test_a_loss_that_pytorch_means_by_batches_is_a_mean_over_all_rows():
    """PyTorch divides a batch's weighted cross-entropy by the batch's weights; sfu by those of all rows."""
    head = sfu.TrainingRecord(n_train=N, loss=nn.CrossEntropyLoss(WEIGHTS), l2=0.1, class_counts=COUNTS).head(
        nn.Linear(D, C, dtype=torch.float64)
    )
    request = ForgetRequest(head, FEATURES[:20], LABELS[:20])
    assert request.weight == pytest.approx(float(WEIGHTS[LABELS[:20]].sum()))
    assert head.total_weight == pytest.approx(float(WEIGHTS[LABELS].sum()))
