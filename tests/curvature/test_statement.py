"""What is said of a head against its rows: each mistake is named, and what is right contradicts nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from sklearn.linear_model import Ridge

import sfu
from sfu.curvature import readings as module
from sfu.curvature.evidence import compare_gradient
from sfu.curvature.readings import described, readings
from sfu.curvature.statement import check_loss, check_readings, check_statement, check_sums
from sfu.errors import ConfigError, DataError
from sfu.heads.certificate import Certificate
from sfu.heads.recipe import Recipe
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_like
from sfu.losses.base import make_loss
from sfu.request import ForgetRequest
from tests.curvature.test_effective_l2 import CLASSES, CLOSED, L2, N, layer_of, random_set, rows

LOSSES = {
    "softmax": make_loss("softmax"), "smoothed": make_loss("softmax", label_smoothing=0.1),
    "one-hot": make_loss("quadratic"), "+-1": make_loss("quadratic", other_target=-1.0),
    "logistic": make_loss("logistic"), "squared_hinge": make_loss("squared_hinge"),
    "weighted": make_loss("logistic", class_weights=(1.0, 3.0, 1.0, 2.0)),
}  # fmt: skip
SELECTED = 'request="selected"'


@cache
def trained(loss: str, *, bias: bool = True, l2: float = L2, penalize_bias: bool = False) -> sfu.LinearHead:
    config = LinearSettings(l2=l2, bias=bias)
    blank = sfu.LinearHead.untrained(config, LOSSES[loss], 8, CLASSES, None)
    return train_like(replace(blank, recipe=Recipe(penalize_bias)), *rows(), config, seed=0)


def told(head: sfu.LinearHead, **changes: object) -> sfu.LinearHead:
    """The head as its owner gives it."""
    weight = None if head.loss.class_weights is None else head.total_weight
    about = {
        "loss": head.loss,
        "l2": head.l2,
        "n_train": N,
        "weight": weight,
        "penalize_bias": head.recipe.penalize_bias,
    }
    return sfu.LinearHead.from_module(layer_of(head), **{**about, **changes})


def knowing(head: sfu.LinearHead, training_loss: float) -> sfu.LinearHead:
    return replace(head, recipe=replace(head.recipe, training_loss=training_loss))


def mean_loss(head: sfu.LinearHead, features: torch.Tensor, labels: torch.Tensor) -> float:
    return float(head.loss.values(head.logits(features), labels).sum(1).mean())


def request_of(head: sfu.LinearHead, index: torch.Tensor | None = None, **changes: object) -> ForgetRequest:
    features, labels = rows()
    index = random_set(400, 0) if index is None else index
    return ForgetRequest(head, features[index], labels[index], **changes)


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [("softmax", "logistic"), ("softmax", "squared_hinge"), ("smoothed", "logistic"), ("logistic", "squared_hinge")],
)
def test_another_loss_is_refused_by_the_name_of_the_right_one(loss, wrong):
    request = request_of(told(trained(loss), loss=LOSSES[wrong]))
    with pytest.raises(ConfigError) as caught:
        check_statement(request)
    message = str(caught.value)
    assert message.startswith(f"loss={wrong!r} contradicts the head: the gradient of the forget rows deviates")
    assert f"But with loss={described(LOSSES[loss])} the rows to forget look like a random sample" in message
    assert f"Give loss={described(LOSSES[loss])}. If nothing is wrong, give {SELECTED}" in message


def test_class_weights_stay_where_the_loss_is_another_one():
    head = trained("weighted")
    wrong = make_loss("squared_hinge", class_weights=head.loss.class_weights)
    with pytest.raises(ConfigError, match=r"Give loss='logistic'\."):
        check_statement(request_of(replace(head, loss=wrong)))


@pytest.mark.parametrize(("loss", "wrong"), [("smoothed", "softmax"), ("logistic", "softmax")])
def test_where_another_l2_explains_the_rows_too_the_loss_is_named_beside_it(loss, wrong):
    with pytest.raises(sfu.SfuError, match="With the l2 that is stated, they look like") as caught:
        check_statement(request_of(told(trained(loss), loss=LOSSES[wrong])))
    assert f"with loss={described(LOSSES[loss])}" in str(caught.value)


def permuted(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return features, torch.tensor([2, 0, 1, 3])[labels]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda features, labels: (features, (labels + 1) % CLASSES), "classes renamed (0 to 3, 1 to 0, 2 to 1, ...)"),
        (permuted, "classes renamed (0 to 1, 1 to 2, 2 to 0)"),
    ],
)
@pytest.mark.parametrize("loss", ["softmax", "one-hot", "logistic"])
def test_wrong_labels_are_refused_by_name(loss, change, named):
    head, given = told(trained(loss)), change(*rows())
    index = random_set(400, 0)
    features, labels = (one[index] for one in given)
    with pytest.raises(DataError, match="the head: the gradient of the forget rows deviates") as caught:
        sfu.unlearn(head, features, labels, curvature=CLOSED)
    assert named in str(caught.value)
    check_statement(ForgetRequest(head, features, labels, kind="selected"))
    check_statement(ForgetRequest(head, features[:99], labels[:99]))
    stopped = replace(head, gradient_CE=torch.nn.functional.pad(0.1 * head.weight_CD, (0, 1)))
    check_readings(ForgetRequest(stopped, features, labels))
    served = request_of(head).unlearned_head(head.parameters_CE)
    check_statement(ForgetRequest(served, features, labels))
    assert sfu.unlearn(head, features, labels, curvature={**CLOSED, "on_doubt": "apply"}).applied


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("loss", ["softmax", "one-hot", "logistic"])
def test_a_wrong_scale_is_refused_or_withheld_by_name(loss, factor):
    """The smallest of all rows may look like a random sample on another scale, so no factor is refused by itself."""
    features, labels = rows()
    head, index = told(trained(loss)), random_set(400, 0)
    request = ForgetRequest(head, factor * features[index], labels[index])
    (found,) = readings(request)
    assert found.kind == "factor"
    check_readings(request)
    assert float(found.what.removeprefix("with the features multiplied by ")) == pytest.approx(1 / factor, rel=0.1)
    try:
        result = sfu.unlearn(head, factor * features[index], labels[index], curvature=CLOSED)
        applied, said, named = result.applied, result.note, "or scale of the features are not those of training"
    except sfu.SfuError as error:
        applied, said, named = False, str(error), found.what
    assert not applied
    assert named in said


def test_rows_that_were_normalised_in_training_are_recognised():
    features, labels = rows()
    units = torch.nn.functional.normalize(features)
    config = LinearSettings(l2=L2, bias=True)
    blank = sfu.LinearHead.untrained(config, LOSSES["logistic"], 8, CLASSES, None)
    head, index = train_like(blank, units, labels, config, seed=0), random_set(400, 0)
    with pytest.raises(DataError, match=r"the features contradict .* with every row divided by its norm"):
        check_statement(ForgetRequest(head, 3 * features[index], labels[index]))
    check_statement(ForgetRequest(head, units[index], labels[index]))


def test_a_scale_counts_for_a_penalised_bias_too():
    head = trained("logistic", l2=0.2, penalize_bias=True)
    features, labels = rows()
    changed = ForgetRequest(replace(head, n_train=10**9), 2 * features, labels)  # all rows: kappa is l2
    (found,) = (reading for reading in readings(changed) if "multiplied" in reading.what)
    assert found.what == "with the features multiplied by 0.5"


def test_a_scale_is_named_last_and_a_head_with_a_certificate_has_no_reading():
    request = request_of(told(trained("smoothed"), loss="softmax"), random_set(400, 14))
    found = readings(request)
    assert [reading.kind for reading in found] == ["loss", "factor"]
    assert found[0].p < found[1].p
    certificate = Certificate(1.0, torch.zeros_like(request.head.parameters_CE), 0.0)
    assert not readings(replace(request, head=replace(request.head, certificate=certificate)))


def test_whole_numbers_are_read_as_other_features_are():
    features, labels = (10 * rows()[0]).round().long(), rows()[1]
    config, index = LinearSettings(l2=L2, bias=True), random_set(400, 0)
    blank = sfu.LinearHead.untrained(config, LOSSES["softmax"], 8, CLASSES, None)
    head = train_like(blank, features, labels, config, seed=0)
    with pytest.raises(DataError, match=r"the labels contradict the head: .* classes renamed"):
        check_statement(ForgetRequest(head, features[index], (labels[index] + 1) % CLASSES))


def test_an_l2_that_is_to_be_estimated_leaves_the_mistake_to_be_named():
    features, labels = rows()
    index = random_set(400, 0)
    head = told(trained("logistic"), l2="estimate", loss=LOSSES["squared_hinge"])
    with pytest.raises(DataError, match=r"above 0.* They look like .* with loss='logistic'"):
        sfu.unlearn(head, features[index], labels[index], curvature=CLOSED)
    head = told(trained("softmax"), l2="estimate")
    with pytest.raises(DataError, match=r"above 0.* They look like .* with the classes renamed \(0 to 3, "):
        sfu.unlearn(head, features[index], (labels[index] + 1) % CLASSES, curvature=CLOSED)
    head = told(trained("one-hot"), l2="estimate", loss="softmax")
    with pytest.raises(ConfigError, match="every row sum to 1"):
        sfu.unlearn(head, features[index], labels[index], curvature=CLOSED)


def kinds_of_rows(head: sfu.LinearHead) -> dict[str, torch.Tensor]:
    features, labels = rows()
    losses = head.loss.values(head.logits(features), labels).sum(1)
    distances = (features - features[5]).square().sum(1)
    one_class = (labels == 1).nonzero()[:, 0]
    return {
        "one class": one_class, "half of a class": one_class[::2], "hardest": losses.argsort()[-200:],
        "easiest": losses.argsort()[:200], "near": distances.argsort()[:200],
        "mixed": torch.cat([random_set(200, 3), one_class[:60]]).unique(),
        "norms": features.norm(dim=1).argsort()[:200],
    }  # fmt: skip


@pytest.mark.parametrize("loss", ["softmax", "+-1", "logistic", "weighted"])
def test_no_other_reading_explains_rows_that_are_no_random_sample(loss):
    head = told(trained(loss))
    for name, index in kinds_of_rows(head).items():
        request = request_of(head, index)
        check_sums(request)
        check_readings(request)  # hard rows may contradict the l2
        assert name == "mixed" or not readings(request), name


@pytest.mark.parametrize("loss", ["softmax", "one-hot"])
def test_right_statements_about_random_rows_are_rarely_refused(loss):
    head, refused = told(trained(loss)), 0
    head = knowing(head, mean_loss(head, *rows()))
    for seed in range(2, 102):
        try:
            check_statement(request_of(head, random_set(100 + seed, seed)))
        except sfu.SfuError:
            refused += 1
    assert refused <= 3


def test_few_rows_with_a_gradient_look_like_a_sample_of_anything(monkeypatch):
    """Under a hinge, rows that are classified well have no gradient."""
    labels, head = rows()[1], told(trained("logistic", l2=1e-5))
    own = (labels == 0).nonzero()[:, 0]
    margins = head.logits(rows()[0][own])[:, 0]
    request = request_of(head, own[margins.argsort(descending=True)[:120]])
    check_readings(request)
    monkeypatch.setattr(module, "_FEW", 0)
    with pytest.raises(ConfigError, match="Give loss='squared_hinge'"):
        check_readings(request)


# Sums of outputs


@pytest.mark.parametrize("wrong", ["softmax", "logistic", "squared_hinge"])
@pytest.mark.parametrize(("loss", "total"), [("one-hot", "1"), ("+-1", "-2")])
def test_squared_error_is_known_by_the_sums_of_its_outputs(loss, total, wrong):
    head = told(trained(loss), loss=LOSSES[wrong])
    features, labels = rows()
    with pytest.raises(ConfigError, match=rf"outputs of every row sum to {total}, .*Give loss=.*quadratic'") as caught:
        sfu.unlearn(head, features[:3], labels[:3], request="person", curvature=CLOSED)
    assert described(LOSSES[loss]) in str(caught.value)
    assert sfu.unlearn(head, features[:300], labels[:300], curvature={**CLOSED, "on_doubt": "apply"}).applied


@pytest.mark.parametrize(("loss", "wrong"), [("softmax", "one-hot"), ("+-1", "one-hot"), ("one-hot", "+-1")])
def test_squared_error_is_not_believed_where_the_sums_are_others(loss, wrong):
    head = told(trained(loss), loss=LOSSES[wrong])
    of_class = (rows()[1] == 2).nonzero()[:30, 0]
    with pytest.raises(ConfigError, match=r"a row's outputs sum to .* targets of training"):
        check_statement(request_of(head, of_class))


def test_sums_may_be_others_where_the_training_says_so():
    of_class = (rows()[1] == 2).nonzero()[:30, 0]
    check_sums(request_of(replace(trained("softmax", bias=False), loss=LOSSES["one-hot"]), of_class))
    penalized = trained("+-1", l2=5.0, penalize_bias=True)
    sums = penalized.logits(rows()[0]).sum(1)
    assert abs(float(sums.mean()) - (2 - CLASSES)) > 0.8  # the bias is far from what it would be
    check_sums(request_of(penalized))
    with pytest.raises(ConfigError, match=r"sum to -0\.56 .* but to -2 where"):
        check_sums(request_of(replace(penalized, recipe=Recipe())))
    wrong = told(trained("softmax"), loss="quadratic")
    check_sums(request_of(replace(wrong, recipe=Recipe(trained="early_stopped")), of_class))
    features, labels = rows()
    gradient_CE = wrong.objective().gradient(wrong.rows(features, labels), wrong.parameters_CE)
    check_sums(request_of(replace(wrong, gradient_CE=gradient_CE), of_class))


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_targets_have_any_sum_and_no_other_reading(n_outputs):
    features, labels = rows()
    targets = 5 + torch.nn.functional.one_hot(labels, CLASSES)[:, :n_outputs].double()
    fitted, layer = Ridge(alpha=N * L2).fit(features, targets), torch.nn.Linear(8, n_outputs, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(fitted.coef_.reshape(n_outputs, 8)))
        layer.bias.copy_(torch.from_numpy(fitted.intercept_))
    head = sfu.LinearHead.from_module(layer, l2=L2, n_train=N, loss="quadratic")
    assert float(head.logits(features).sum(1).mean()) > 4  # far from 1
    wrong = ForgetRequest(head, 2 * features[:300], targets[:300])
    assert not readings(wrong)
    for request in (ForgetRequest(head, features[:300], targets[:300]), wrong):
        check_sums(request)
        check_readings(request)


def test_two_classes_have_sums_of_0_under_any_loss():
    config = LinearSettings(l2=L2, bias=True)
    blank = sfu.LinearHead.untrained(config, LOSSES["softmax"], 8, 2, None)
    features, labels = rows()
    head = train_like(blank, features, labels % 2, config, seed=0)
    assert float(head.logits(features).sum(1).abs().max()) < 1e-6
    check_sums(ForgetRequest(head, features[:300], labels[:300] % 2))


# The mean loss


def overfitted() -> tuple[sfu.LinearHead, torch.Tensor, torch.Tensor]:
    """A head of the first 400 rows that knows their mean loss, and all rows."""
    features, labels = rows()
    config = LinearSettings(l2=1e-3, bias=True)
    noise = torch.randn(N, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = torch.cat([features, noise], 1)
    blank = sfu.LinearHead.untrained(config, LOSSES["softmax"], 68, CLASSES, None)
    head = train_like(blank, wide[:400], labels[:400], config, seed=0)
    return knowing(head, mean_loss(head, wide[:400], labels[:400])), wide, labels


def test_rows_that_were_not_trained_on_have_a_larger_loss_than_training():
    head, features, labels = overfitted()
    request = ForgetRequest(head, features[800:1000], labels[800:1000])
    loss = f"training rows is {head.recipe.training_loss:.3g}, .* These rows were not trained on, or"
    with pytest.raises(DataError, match=loss):
        check_loss(request)
    for estimate in (True, False):
        unknown = replace(head, l2=0.0 if estimate else 1e-3, recipe=replace(head.recipe, estimate_l2=estimate))
        with pytest.raises(DataError, match="above 0" if estimate else loss):
            sfu.unlearn(unknown, features[800:1000], labels[800:1000], curvature=CLOSED)
    check_loss(replace(request, kind="selected"))
    check_loss(request.rows(torch.arange(99)))
    check_loss(replace(request, head=replace(head, recipe=Recipe())))
    check_loss(ForgetRequest(head, features[100:300], labels[100:300]))
    check_loss(ForgetRequest(knowing(head, 9.9), features[100:300], labels[100:300]))  # an average over an epoch


def test_the_loss_is_compared_where_l2_was_estimated():
    features, labels = rows()
    head = told(trained("softmax"), l2="estimate")
    low = 0.7 * mean_loss(head, features, labels)
    with pytest.raises(DataError, match="the mean loss of the rows to forget is"):
        sfu.unlearn(knowing(head, low), features[:300], labels[:300], curvature=CLOSED)
    about = {"features": features[:300], "labels": labels[:300]}
    assert sfu.unlearn(knowing(head, low), **about, curvature={**CLOSED, "on_doubt": "apply"}).applied


def test_a_request_whose_gradient_gives_it_away_is_left_to_the_short_step():
    features, labels = rows()
    head = told(trained("softmax"))
    of_class = (labels == 1).nonzero()[:, 0]
    request = request_of(head, of_class)
    found = mean_loss(head, features[of_class], labels[of_class])
    assert compare_gradient(request).alarm
    check_loss(replace(request, head=knowing(head, 0.5 * found)))


def test_a_difference_of_a_few_percent_is_no_contradiction():
    head = told(trained("softmax"))
    request = request_of(head, random_set(1190, 5))
    mean = mean_loss(head, request.features_FD, request.labels_F)
    check_loss(replace(request, head=knowing(head, mean / 1.04)))
    with pytest.raises(DataError, match="the mean loss of the rows"):
        check_loss(replace(request, head=knowing(head, mean / 1.06)))


def test_the_weights_of_training_count_in_the_mean_loss():
    head, (features, labels) = trained("weighted"), rows()
    losses = head.loss.values(head.logits(features), labels).sum(1)
    weights = torch.tensor(head.loss.class_weights, dtype=losses.dtype)[labels]
    mean = float(weights @ losses / weights.sum())
    assert mean < 0.95 * float(losses.mean()) or mean > 1.05 * float(losses.mean())
    request = request_of(head, random_set(1190, 5))
    check_loss(replace(request, head=knowing(head, mean)))
    with pytest.raises(DataError, match="the mean loss of the rows"):
        check_loss(replace(request, head=knowing(head, mean / 1.08)))


def test_a_kept_mean_shows_the_scale_where_l2_is_not_known():
    features, labels = rows()[0] + 2, rows()[1]
    config, index = LinearSettings(l2=L2, bias=True), random_set(400, 0)
    blank = sfu.LinearHead.untrained(config, LOSSES["logistic"], 8, CLASSES, None)
    head = told(train_like(blank, features, labels, config, seed=0), l2="estimate")
    request = ForgetRequest(head, 3 * features[index], labels[index])
    assert not readings(request)
    known = replace(request, head=replace(head, kept=sfu.Kept(mean_D=features.mean(0))))
    (found,) = readings(known)
    assert found.what.startswith("with the features multiplied by 0.3")


@pytest.mark.parametrize("keep", ["bound", "sketch", "full"])
def test_what_the_head_keeps_does_not_change_what_is_refused(keep):
    features = torch.randn(900, 5, generator=torch.Generator().manual_seed(0)).double()
    labels = (features[:, :3] + 0.5 * torch.randn(900, 3, generator=torch.Generator().manual_seed(1))).argmax(1)
    head = sfu.fit(features, labels, l2=1e-2, loss="quadratic", keep=keep)
    with pytest.raises(DataError, match="with the classes renamed"):
        sfu.unlearn(head, features[:200], (labels[:200] + 1) % 3)
