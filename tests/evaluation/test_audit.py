"""An audit of two models, whoever made them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sfu
from sfu.errors import ConfigError, DataError
from tests.conftest import make_arrays
from tests.unlearning.cases import rows

FEATURES, LABELS = rows()
ARRAYS = make_arrays()
TEST = torch.from_numpy(ARRAYS["test_features"]).double(), torch.from_numpy(ARRAYS["test_labels"])
FORGET, RETAINED = (FEATURES[:60], LABELS[:60]), (FEATURES[60:], LABELS[60:])
OLD = sfu.fit(FEATURES, LABELS, l2=1e-2, loss="softmax")
NEW = sfu.unlearn(OLD, *FORGET, curvature={"estimator": "closed_form"}).head


def test_two_heads_stand_beside_the_one_that_is_retrained():
    audit = sfu.evaluate(OLD, NEW, FORGET, test=TEST, retained=RETAINED)
    retrained = sfu.fit(*RETAINED, l2=1e-2, loss="softmax")
    shares = [float((head.logits(FORGET[0]).argmax(1) == FORGET[1]).double().mean()) for head in (OLD, NEW, retrained)]
    found = audit.scores["forget"]
    assert [found[name].accuracy for name in ("old", "new", "retrained")] == pytest.approx([100 * s for s in shares])
    wanted = nn.functional.cross_entropy(retrained.logits(TEST[0]), TEST[1])
    assert audit.scores["test"]["retrained"].loss == pytest.approx(float(wanted), abs=1e-6)
    assert set(audit.membership) == {"old", "new", "retrained"}
    design = torch.cat([RETAINED[0], torch.ones(340, 1)], 1)
    chance = torch.softmax(OLD.logits(RETAINED[0]), 1)

    def square(head):
        moved = head.parameters_CE - retrained.parameters_CE
        out = design @ moved.T
        curved = ((chance * out.square()).sum(1) - (chance * out).sum(1).square()).mean()
        return float(curved + 1e-2 * moved[:, :-1].square().sum())

    assert audit.distance == pytest.approx((square(NEW) / square(OLD)) ** 0.5, rel=1e-5)
    assert audit.distance < 0.7
    assert json.loads(json.dumps(audit.to_dict()))["distance"] == audit.distance
    shown = audit.summary()
    assert max(map(len, shown.splitlines())) <= 80
    assert "distance to Retrained: 0." in repr(audit)


def test_models_are_compared_as_they_are_used():
    torch.manual_seed(0)
    old = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    new = nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    audit = sfu.evaluate(old, new, FORGET, retrained=new)
    assert old.training
    assert audit.distance is None
    assert audit.membership == {}
    assert audit.scores["forget"]["new"] == audit.scores["forget"]["retrained"]
    old.eval(), new.eval()
    same = (old(FORGET[0]).argmax(1) == new(FORGET[0]).argmax(1)).double().mean()
    assert audit.agreement == pytest.approx(100 * float(same))
    assert sfu.evaluate(old, old, FORGET).forget_kl == pytest.approx(0, abs=1e-12)
    loader = DataLoader(TensorDataset(*FORGET), batch_size=7)
    assert sfu.evaluate(old, new, loader).scores == sfu.evaluate(old, new, FORGET).scores
    with pytest.raises(DataError, match="60 labels from 10 to 13"):
        sfu.evaluate(old, new, (FORGET[0], FORGET[1] + 10))
    with pytest.raises(DataError, match="the model fails on rows 0"):
        sfu.evaluate(old, new, (FORGET[0][:, :5], FORGET[1]))


def test_without_an_optimum_retrained_must_be_given():
    stopped = sfu.LinearHead.from_module(nn.Linear(12, 4), l2="estimate", n_train=400, loss="softmax")
    audit = sfu.evaluate(stopped, stopped, FORGET, retained=RETAINED)
    assert audit.distance is None
    assert "Give retrained=" in " ".join(audit.summary().split())
    assert max(map(len, audit.summary().splitlines())) <= 80
    assert sfu.evaluate(stopped, stopped, FORGET, retained=RETAINED, retrained=OLD).distance == 1


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(DataError, match="heads can only be compared with heads"):
        sfu.evaluate(OLD, nn.Linear(12, 4), FORGET)
    with pytest.raises(DataError, match="different numbers of outputs"):
        sfu.evaluate(nn.Linear(12, 4).double(), nn.Linear(12, 3).double(), FORGET)
    with pytest.raises(DataError, match="the retained set has 300 rows"):
        sfu.evaluate(OLD, NEW, FORGET, retained=(FEATURES[100:], LABELS[100:]))
    with pytest.raises(DataError, match="labels run from"):
        sfu.evaluate(OLD, NEW, (FORGET[0], FORGET[1] + 9))
    line = sfu.LinearHead.from_module(nn.Linear(12, 1), l2=0.1, n_train=400, loss="quadratic")
    with pytest.raises(ConfigError, match="the forget labels are targets"):
        sfu.evaluate(line, line, (FORGET[0], (FORGET[1] > 1).double()))
    model = nn.Linear(12, 1).double()
    with pytest.raises(ConfigError, match="the forget labels are targets"):
        sfu.evaluate(model, model, (FORGET[0], FORGET[1] / 2))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"old": None}, DataError, "old is a NoneType"), ({"new": 5}, DataError, "new is a int"),
        ({"new": sfu.UnlearningResult(OLD)}, DataError, "Give its .head"), ({"forget": None}, DataError, "forget=None"),
        ({"forget": (FEATURES[:0], LABELS[:0])}, DataError, "features of forget"),
        ({"test": (TEST[0][:0], TEST[1][:0])}, DataError, "features of test have shape .0, 12"),
        ({"test": (TEST[0] / 0, TEST[1])}, DataError, "not all finite"),
        ({"forget": (FEATURES[0], LABELS[0])}, DataError, "features of forget have shape .12.,"),
        ({"new": sfu.fit(FEATURES, LABELS, l2=1e-2, loss="softmax", bias=False)}, DataError, "without bias"),
        ({"seed": "a"}, ConfigError, "seed=a"), ({"seed": -1}, ConfigError, "seed=-1"),
    ],
)  # fmt: skip
def test_arguments_that_are_none_are_named(given, error, message):
    about = {"old": OLD, "new": NEW, "forget": FORGET, "test": TEST} | given
    with pytest.raises(error, match=message):
        sfu.evaluate(about.pop("old"), about.pop("new"), about.pop("forget"), **about)


def test_heads_of_two_precisions_are_compared():
    single = OLD.to(torch.device("cpu"), torch.float32)
    wanted = sfu.evaluate(OLD, NEW, FORGET, retained=RETAINED).distance
    for pair in ((single, NEW), (OLD, NEW.to(torch.device("cpu"), torch.float32))):
        assert sfu.evaluate(*pair, FORGET, retained=RETAINED).distance == pytest.approx(wanted, rel=1e-3)


def test_a_single_output_is_that_of_two_classes():
    labels = (LABELS > 1).long()
    torch.manual_seed(0)
    layers = [nn.Linear(12, 1).double() for _ in range(2)]
    old, new = (sfu.LinearHead.from_module(layer, l2=1e-2, n_train=400, loss="logistic") for layer in layers)
    forget, retained = (FEATURES[:60], labels[:60]), (FEATURES[60:], labels[60:])
    audit = sfu.evaluate(old, new, forget, retained=retained)
    for name, layer in zip(("old", "new"), layers, strict=True):
        logits = layer(forget[0])[:, 0]
        wanted = nn.functional.binary_cross_entropy_with_logits(logits, forget[1].double())
        assert audit.scores["forget"][name].loss == pytest.approx(wanted.item())
        right = ((logits > 0).long() == forget[1]).double().mean()
        assert audit.scores["forget"][name].accuracy == pytest.approx(100 * float(right))
    assert "does not train heads of one output" in audit.note
    assert sfu.evaluate(old, new, forget, retained=retained, retrained=new).distance == 0
    assert sfu.evaluate(old, old, forget, retained=retained, retrained=new).distance == pytest.approx(1)
    assert sfu.evaluate(*layers, forget).scores["forget"] == {
        name: audit.scores["forget"][name] for name in ("old", "new")
    }


def test_retrained_has_the_larger_l2_of_a_sum_and_the_attack_sees_the_forgotten_classes_alone():
    summed = dataclasses.replace(OLD, recipe=dataclasses.replace(OLD.recipe, l2_reduction="sum"))
    audit = sfu.evaluate(summed, summed, FORGET, retained=RETAINED)
    retrained = sfu.fit(*RETAINED, l2=1e-2 * 400 / 340, loss="softmax")
    wanted = nn.functional.cross_entropy(retrained.logits(FORGET[0]), FORGET[1])
    assert audit.scores["forget"]["retrained"].loss == pytest.approx(float(wanted), abs=1e-7)
    of_one, alike = LABELS == 1, TEST[1] == 1
    one_class = FEATURES[of_one], LABELS[of_one]
    whole = sfu.evaluate(OLD, NEW, one_class, test=TEST)
    assert whole.membership == sfu.evaluate(OLD, NEW, one_class, test=(TEST[0][alike], TEST[1][alike])).membership
    assert None not in whole.membership.values()
