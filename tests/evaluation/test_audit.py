"""An audit of two models, whoever made them."""

from __future__ import annotations

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
    assert "Give retrained=" in audit.summary()
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
    logit = sfu.LinearHead.from_module(nn.Linear(12, 1), l2=0.1, n_train=400, loss="logistic")
    with pytest.raises(ConfigError, match="the forget labels are targets"):
        sfu.evaluate(logit, logit, (FORGET[0], (FORGET[1] > 1).double()))
