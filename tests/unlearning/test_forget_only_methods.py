"""NegGrad, random labels, JiT, the trivial rows: each against a few lines of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfu.errors import ConfigError
from sfu.losses.softmax import Softmax
from sfu.request import Access, MethodContext
from sfu.unlearning.differentiable import all_wrong, wrong_labels
from sfu.unlearning.methods.adversarial import Adversarial
from sfu.unlearning.methods.baselines import GradientStep, Rescale
from sfu.unlearning.methods.fine_tune import RandomLabels
from sfu.unlearning.methods.jit import Jit, local_lipschitz
from sfu.unlearning.methods.neg_grad import NegGrad
from tests.unlearning.cases import CONTEXT, PLAIN, case, flattened, name_of

QUICK_L2UL = {"examples": 2, "attack_steps": 5, "step_size": 1.0, "max_steps": 3}
ALL = [
    NegGrad(), RandomLabels(), Jit(sigma=0.1), Rescale(), GradientStep(), Adversarial(**QUICK_L2UL),
]  # fmt: skip


def test_neg_grad_is_ascent_on_the_mean_loss():
    request, _ = case()
    head, features = request.head, request.features_FD
    targets = torch.nn.functional.one_hot(request.labels_F, 4).double()
    w = head.parameters_CE
    for _ in range(3):
        w = w + 0.01 * (features @ w.T - targets).T @ features / 40
    out = NegGrad(lr=0.01, epochs=3, batch_size=40, **PLAIN).unlearn(request, CONTEXT).head
    torch.testing.assert_close(out.parameters_CE, w, rtol=1e-12, atol=1e-14)
    assert out.n_train == 360


def test_random_labels_descends_on_wrong_labels_that_are_drawn_once():
    request, _ = case(Softmax())
    labels = wrong_labels(request.labels_F, 4, CONTEXT.generator("perturbation"))
    features, w = request.features_FD, request.head.parameters_CE
    for _ in range(3):
        slopes = (features @ w.T).softmax(1) - torch.nn.functional.one_hot(labels, 4)
        w = w - 0.1 * slopes.T @ features / 40
    out = RandomLabels(lr=0.1, epochs=3, batch_size=64, **PLAIN).unlearn(request, CONTEXT).head
    torch.testing.assert_close(out.parameters_CE, w, rtol=1e-12, atol=1e-14)


def test_jit_by_hand_value_and_step():
    request, _ = case(n_forget=3)
    w, features = request.head.parameters_CE, request.features_FD
    noise = 0.1 * torch.randn(5, 3, 12, generator=CONTEXT.generator("noise")).double()
    value = local_lipschitz(request.head, w, features, noise)
    by_hand, gradient = torch.zeros(3).double(), torch.zeros_like(w)
    for i in range(3):
        for j in range(5):
            apart = -w @ noise[j, i]  # f(x) - f(x + v)
            by_hand[i] += apart.norm() / noise[j, i].norm() / 5
            gradient += torch.outer(apart / apart.norm(), features[i]) / noise[j, i].norm() / 5
    torch.testing.assert_close(value, by_hand, rtol=1e-10, atol=0)
    out = Jit(lr=0.01, sigma=0.1, samples=5, batch_size=3).unlearn(request, CONTEXT)
    torch.testing.assert_close(out.head.parameters_CE, w - 0.01 * gradient_in_order(request, w, 5), rtol=1e-9, atol=0)
    assert out.details["lr_on_the_mean"] == pytest.approx(0.03)


def gradient_in_order(request, w, samples: int):
    """The gradient with the noise in the order in which the method draws it for its shuffled batch."""
    order = torch.randperm(request.n_forget, generator=CONTEXT.generator("training"))
    features = request.features_FD[order]
    noise = 0.1 * torch.randn(samples, *features.shape, generator=CONTEXT.generator("noise")).double()
    apart = -torch.einsum("cd,nbd->nbc", w, noise)
    unit = apart / apart.norm(dim=2, keepdim=True) / noise.norm(dim=2, keepdim=True)
    return torch.einsum("nbc,bd->cd", unit, features) / samples


@pytest.mark.parametrize("accumulate", [True, False])
def test_jit_steps_along_all_gradients_so_far_as_its_authors_code_does(accumulate):
    request, _ = case(n_forget=9)
    drawn, w = CONTEXT.generator("noise"), request.head.parameters_CE
    total = torch.zeros_like(w)
    for index in torch.randperm(9, generator=CONTEXT.generator("training")).split(3):
        features = request.features_FD[index]
        noise = 0.1 * torch.randn(5, *features.shape, generator=drawn).double()
        v = w.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(local_lipschitz(request.head, v, features, noise).sum(), v)
        total = total + gradient if accumulate else gradient
        w = w - 0.01 * total
    method = Jit(lr=0.01, sigma=0.1, samples=5, batch_size=3, accumulate=accumulate)
    assert (Jit().accumulate, method.unlearn(request, CONTEXT).details["steps"]) == (True, 3)
    torch.testing.assert_close(method.unlearn(request, CONTEXT).head.parameters_CE, w, rtol=1e-9, atol=1e-12)


def test_jits_value_normalised_is_the_same_for_any_batch_size():
    request, _ = case()
    noise = 0.1 * torch.randn(25, 40, 12, generator=CONTEXT.generator("noise")).double()

    def mean(batch_size: int) -> float:
        parts = zip(request.features_FD.split(batch_size), noise.split(batch_size, dim=1), strict=True)
        return sum(float(local_lipschitz(request.head, request.head.parameters_CE, *part).sum()) for part in parts) / 40

    assert mean(1) == pytest.approx(mean(7), rel=1e-12)
    assert mean(40) == pytest.approx(mean(7), rel=1e-12)
    mean_wise = Jit(lr=0.1 * 40, reduction="mean", batch_size=40).unlearn(request, CONTEXT).head.parameters_CE
    sum_wise = Jit(lr=0.1, reduction="sum", batch_size=40).unlearn(request, CONTEXT).head.parameters_CE
    torch.testing.assert_close(mean_wise, sum_wise, rtol=1e-9, atol=1e-12)


def test_on_an_affine_head_jits_value_knows_no_example_and_its_gradient_is_noise_of_mean_zero():
    request, _ = case(n_forget=4)
    noise = torch.randn(2000, 4, 12, generator=CONTEXT.generator("noise")).double()
    head, features = request.head, request.features_FD
    there = local_lipschitz(head, head.parameters_CE, features, noise)
    elsewhere = local_lipschitz(head, head.parameters_CE, 100 * features + 7, noise)
    torch.testing.assert_close(there, elsewhere, rtol=1e-9, atol=0)

    def gradient(signed):
        w = head.parameters_CE.clone().requires_grad_()
        local_lipschitz(head, w, features, signed).sum().backward()
        return w.grad

    pairs = torch.cat([noise, -noise])
    assert float(gradient(pairs).norm()) < 1e-12 < 0.01 < float(gradient(noise[:25]).norm())


def test_trivial_rows():
    request, _ = case()
    head = request.head
    shrunk = Rescale(0.5).unlearn(request, CONTEXT).head
    assert torch.equal(shrunk.parameters_CE, 0.5 * head.parameters_CE)
    assert torch.equal(shrunk.logits(request.features_FD).argmax(1), head.logits(request.features_FD).argmax(1))
    step = GradientStep(lr=2.0).unlearn(request, CONTEXT).head.parameters_CE - head.parameters_CE
    expected = 2.0 * 40 / 360 * (request.forget_gradient() - 10 * head.gradient_CE)
    torch.testing.assert_close(step, expected, rtol=1e-9, atol=1e-12)
    for method, message in ((Rescale, "rescale: factor=nan"), (GradientStep, "gradient_step: lr=nan")):
        with pytest.raises(ConfigError, match=message):
            method(float("nan"))


@pytest.mark.parametrize("method", ALL, ids=name_of)
def test_the_seed_decides_and_the_request_alone_is_seen(method):
    request, _ = case()
    once, twice = (method.unlearn(request, CONTEXT).head.parameters_CE for _ in range(2))
    assert torch.equal(once, twice)
    assert method.access is Access.FORGET
    assert not method.whole_classes
    other = method.unlearn(request, MethodContext(dict.fromkeys(CONTEXT.seeds, 9))).head.parameters_CE
    random = not isinstance(method, Rescale | GradientStep | NegGrad)  # NegGrad's forget set is one batch here
    assert torch.allclose(once, other, rtol=1e-12, atol=1e-14) is not random


@pytest.mark.parametrize("method", [m for m in ALL if not isinstance(m, GradientStep)], ids=name_of)
def test_the_shape_of_the_parameters_does_not_matter(method):
    request, _ = case()
    plain = method.unlearn(request, CONTEXT).head.parameters_CE
    flat = method.unlearn(flattened(request), CONTEXT).head.parameters_CE
    assert flat.shape == (1, 48)
    torch.testing.assert_close(flat.reshape(4, 12), plain, rtol=1e-9, atol=1e-12)


def test_the_path_is_kept_when_asked_for_and_ends_where_the_method_ends():
    request, _ = case()
    out = NegGrad().unlearn(request, replace(CONTEXT, keep_path=True))
    assert len(out.path) == 6
    assert torch.equal(out.path[0], request.head.parameters_CE)
    assert torch.equal(out.path[-1], out.head.parameters_CE)


def test_ascent_forgets():
    request, _ = case()
    out = NegGrad(lr=0.03, epochs=20).unlearn(request, CONTEXT).head
    right = [(head.logits(request.features_FD).argmax(1) == request.labels_F) for head in (request.head, out)]
    assert right[1].sum() < 0.5 * right[0].sum()
    assert not all_wrong(request.head, request.head.parameters_CE, request.features_FD, request.labels_F)
    wrong = request.head.logits(request.features_FD).argmin(1)
    assert all_wrong(request.head, request.head.parameters_CE, request.features_FD, wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": 0.0}, "jit: sigma=0"),
        ({"samples": 0}, "jit: samples=0"),
        ({"reduction": "max"}, "jit: reduction=max"),
        ({"accumulate": "no"}, r"jit: accumulate=no\. Choose true or false"),
    ],
)
def test_jit_settings_that_cannot_work_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        Jit(**settings)
