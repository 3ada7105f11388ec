"""Training in one call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sfu
from sfu.errors import ConfigError, DataError, SingularHessianError
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton
from tests.unlearning.cases import rows

FEATURES, LABELS = rows()
NAMES = np.array(["ant", "bee", "cow", "dog"])[LABELS.numpy()]


@pytest.mark.parametrize("loss", ["quadratic", "softmax"])
@pytest.mark.parametrize("form", ["tensor", "numpy", "names", "one-hot"])
def test_a_head_is_trained_as_the_framework_trains_it(loss, form):
    labels = {
        "tensor": LABELS, "numpy": LABELS.numpy(), "names": NAMES, "one-hot": torch.nn.functional.one_hot(LABELS, 4),
    }[form]  # fmt: skip
    head = sfu.fit(FEATURES.numpy() if form == "numpy" else FEATURES, labels, l2=1e-2, loss=loss)
    where = {"seed": 0, "device": torch.device("cpu"), "dtype": torch.float64}
    wanted = train_head(FEATURES, LABELS, 4, LinearSettings(l2=1e-2, bias=True), sfu.make_loss(loss), **where)
    assert torch.equal(head.parameters_CE, wanted.parameters_CE)
    assert head.recipe.classes == (("ant", "bee", "cow", "dog") if form == "names" else None)
    assert head.kept.bound == wanted.kept.bound
    result = sfu.unlearn(head, FEATURES[:60], labels[:60], curvature={"estimator": "closed_form"})
    assert result.predicted_share > 0


def test_with_the_full_hessian_a_request_is_exact(tmp_path):
    head = sfu.fit(FEATURES, NAMES, l2=1e-2, loss="quadratic", keep="full")
    head.save(tmp_path / "head")
    loaded = sfu.load_head(tmp_path / "head")
    request = ForgetRequest(loaded, FEATURES[:60], LABELS[:60])
    step = Newton(sfu.curvature_settings(estimator="stored", regularization="none")).unlearn(request, MethodContext())
    wanted = sfu.fit(FEATURES[60:], LABELS[60:], l2=1e-2, loss="quadratic")
    torch.testing.assert_close(step.head.parameters_CE, wanted.parameters_CE, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": "all"}, "keep='all' is unknown"), ({"l2": -1.0}, "l2=-1"), ({"loss": "hnge"}, "hnge"),
        ({"features": FEATURES[0]}, r"the features have shape \[12\]"),
        ({"features": FEATURES[:0], "labels": LABELS[:0]}, r"the features have shape \[0, 12\]"),
        ({"features": FEATURES.where(FEATURES > -1, float("nan"))}, "NaN or infinite values, first in row"),
        ({"labels": LABELS[:5]}, "the tensor of labels"), ({"labels": LABELS - 1}, "Number the classes from 0"),
        ({"labels": LABELS, "classes": ["a", "b"]}, "Number the classes from 0"),
        ({"labels": NAMES, "classes": ["ant", "bee"]}, "the label '...' is no class of the head"),
        ({"labels": NAMES, "classes": ["ant", "ant", "bee", "cow", "dog"]}, "not all different"),
        ({"keep": ["full"]}, r"keep=\['full'\] is unknown"), ({"l2": -1.0}, "^l2=-1"), ({"bias": "no"}, "^bias=no"),
        ({"features": torch.zeros(400, 2), "bias": False, "l2": 0.0}, "plus l2=0 is singular"),
        ({"labels": [None, *NAMES[1:]]}, "label 0 is None, where others are names"),
        ({"labels": [None, *NAMES[1:]], "classes": ["ant", "bee", "cow", "dog"]}, "label 0 is None"),
        ({"labels": LABELS + 10**9}, "the labels reach 100000000., but there are 400 rows"),
        ({"features": FEATURES * 1j}, "features are complex"), ({"weights": torch.ones(400) * 1j}, "weights are"),
        ({"loss": torch.nn.CrossEntropyLoss()}, "Give a name, such as loss='softmax'"),
        ({"weights": -torch.ones(400)}, "the sample weights"), ({"loss": "softmax", "ledger": True}, "ledger"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(given, message):
    about = {"features": FEATURES, "labels": LABELS, "l2": 1e-2, "loss": "quadratic"} | given
    with pytest.raises((ConfigError, DataError, SingularHessianError), match=message):
        sfu.fit(about.pop("features"), about.pop("labels"), **about)
