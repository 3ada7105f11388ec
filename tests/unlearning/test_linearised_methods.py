"""Every comparison method on a network whose tangent is trained, against what little can be known without it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu.heads.base import Head
from sfu.heads.settings import LinearisedSettings
from sfu.request import RetainedSet
from sfu.unlearning.differentiable import forgotten
from sfu.unlearning.experimental.delta_grad import DeltaGrad
from sfu.unlearning.experimental.emmn import Emmn
from sfu.unlearning.experimental.gkt import Gkt
from sfu.unlearning.experimental.sisa import Sisa
from sfu.unlearning.importance import squared_gradients
from sfu.unlearning.methods.adversarial import Adversarial
from sfu.unlearning.methods.baselines import GradientStep, Rescale
from sfu.unlearning.methods.fine_tune import FineTune, RandomLabels
from sfu.unlearning.methods.fisher import Fisher
from sfu.unlearning.methods.jit import Jit
from sfu.unlearning.methods.neg_grad import NegGrad, NegGradPlus
from sfu.unlearning.methods.scrub import Scrub
from sfu.unlearning.methods.ssd import Ssd
from tests.heads.linearised.tiny import C, Case, tiny_case
from tests.unlearning.cases import CONTEXT, name_of

CONFIG = LinearisedSettings(l2=1e-2, tolerance=1e-9, max_iterations=3000)
FORGET_ONLY = [NegGrad(lr=1e-4), RandomLabels(lr=1e-4), Jit(lr=1e-4, sigma=0.1), Rescale(), GradientStep(),
               Adversarial(examples=1, attack_steps=5, step_size=0.5, max_steps=3, lr=1e-4)]  # fmt: skip
RETAINED = [FineTune(epochs=1, lr=1e-4), NegGradPlus(epochs=1, lr=1e-4), Scrub(epochs=1, lr=1e-4), Ssd(alpha=1.0),
            Fisher(), DeltaGrad(steps=25), Sisa(CONFIG, shards=2)]  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Case:
    return tiny_case()


@pytest.fixture(scope="module")
def head(tiny: Case) -> Head:
    return tiny.train()


@pytest.mark.parametrize("method", [*FORGET_ONLY, *RETAINED], ids=name_of)
def test_every_method_unlearns_the_tangents_parameters(tiny, head, method):
    retained = RetainedSet(tiny.features[tiny.keep], tiny.labels[tiny.keep])
    made = method.unlearn(tiny.request(head), CONTEXT, None if method in FORGET_ONLY else retained).head
    assert made.core is head.core
    assert made.parameters_CE.shape == head.parameters_CE.shape
    assert not torch.equal(made.parameters_CE, head.parameters_CE)


@pytest.mark.parametrize(
    "method", [Emmn(noise_rows=16, noise_steps=5), Gkt(batches=2, student_steps=2, threshold=0.34)], ids=name_of
)
def test_class_methods_do_too(tiny, head, method):
    gone = tiny.labels == 1
    request = dataclasses.replace(
        tiny.request(head), features_FD=tiny.features[gone], labels_F=tiny.labels[gone], classes=(1,)
    )
    assert method.unlearn(request, CONTEXT).head.parameters_CE.shape == head.parameters_CE.shape


def test_importances_are_those_of_the_jacobian(tiny, head):
    request = tiny.request(head)
    J = tiny.jacobian[tiny.forget]
    slopes = tiny.fixed[tiny.forget] + J @ head.parameters_CE[0] - 5.0 * torch.eye(C).double()[tiny.labels[tiny.forget]]
    expected = torch.einsum("nc,ncp->np", slopes, J).square().mean(0, keepdim=True)
    torch.testing.assert_close(squared_gradients(head, forgotten(request)), expected, rtol=1e-8, atol=1e-14)
