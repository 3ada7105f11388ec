"""L2UL: the attack, the importance, and one step by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from sfu.errors import ConfigError, SolverError
from sfu.heads.linear import LinearHead
from sfu.unlearning.attack import Attack
from sfu.unlearning.differentiable import wrong_labels
from sfu.unlearning.importance import output_sensitivity
from sfu.unlearning.methods.adversarial import Adversarial, held_in_place
from tests.unlearning.cases import CONTEXT, case, flattened


@pytest.mark.parametrize("shape", [lambda request: request, flattened], ids=["affine in the features", "any head"])
def test_one_attack_step_by_hand(shape):
    request, _ = case(n_forget=2)
    w, x = request.head.parameters_CE, request.features_FD
    targets = torch.tensor([1, 3])
    drawn = torch.Generator().manual_seed(0)
    noise, length = torch.randn(2, 12, generator=drawn).double(), torch.rand(2, 1, generator=drawn).double()
    start = x + 0.5 * length * noise / noise.norm(dim=1, keepdim=True)
    gradient = ((start @ w.T).softmax(1) - torch.nn.functional.one_hot(targets, 4)) @ w
    away = start - 0.2 * gradient / gradient.norm(dim=1, keepdim=True) - x
    expected = x + away * (0.5 / away.norm(dim=1, keepdim=True)).clamp(max=1)
    found = Attack(0.5, 1, 0.2).perturb(shape(request).head, x, targets, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_attack_reaches_its_targets_and_stays_within_its_radius():
    request, _ = case()
    drawn = CONTEXT.generator("perturbation")
    targets = wrong_labels(request.labels_F, 4, drawn)
    near = Attack(4.0, 100, 0.1).perturb(request.head, request.features_FD, targets, drawn)
    assert float((near - request.features_FD).norm(dim=1).max()) <= 4.0 * (1 + 1e-9)
    assert float((request.head.logits(near).argmax(1) == targets).double().mean()) > 0.9
    drawn = CONTEXT.generator("perturbation")
    targets = wrong_labels(request.labels_F, 4, drawn)
    again = Attack(4.0, 100, 0.1, numbers=24).perturb(request.head, request.features_FD, targets, drawn)
    torch.testing.assert_close(again, near, rtol=1e-9, atol=1e-9)


def test_an_attack_within_the_span_of_the_weights_is_the_general_one():
    request, _ = case(bias=True)
    targets = wrong_labels(request.labels_F, 4, CONTEXT.generator("folds"))

    class NoShortWay(LinearHead):
        feature_weights_CD = None

    head = request.head
    general = NoShortWay(head.parameters_CE, head.gradient_CE, head.l2, head.n_train, bias=True)
    for radius, step_size in ((4.0, 0.1), (0.3, 0.1)):  # the second leaves the ball at every step but the first ones
        short, long = (
            Attack(radius, 30, step_size).perturb(of, request.features_FD, targets, CONTEXT.generator("noise"))
            for of in (head, general)
        )
        torch.testing.assert_close(short, long, rtol=1e-9, atol=1e-9)


def test_importance_is_mas_and_what_is_held_lies_between_0_and_1():
    request, _ = case(n_forget=10)
    w, x = request.head.parameters_CE, request.features_FD
    by_hand = torch.zeros_like(w)
    for batch in x.split(4):
        outputs = batch @ w.T
        by_hand += ((outputs / outputs.norm(dim=1, keepdim=True)).T @ batch / len(batch)).abs() * len(batch) / 10
    importance = output_sensitivity(request.head, x, 4)
    torch.testing.assert_close(importance, by_hand, rtol=1e-12, atol=1e-14)
    held = held_in_place(importance)
    assert (float(held.min()), float(held.max())) == (0.0, 1.0)
    assert int(held.argmin()) == int(importance.argmax())
    assert torch.equal(held_in_place(torch.full((2, 2), 3.0)), torch.ones(2, 2))


def test_the_attack_starts_in_any_direction_at_any_distance_within_its_radius():
    """advertorch starts on the surface, towards an image of noise; features have no range to draw one from."""
    request, _ = case()
    features = request.features_FD.repeat(25, 1)
    targets = torch.zeros(1000, dtype=torch.int64)
    start = Attack(4.0, 1, 1e-12).perturb(request.head, features, targets, CONTEXT.generator("noise")) - features
    distances = start.norm(dim=1) / 4.0
    assert abs(float(distances.mean()) - 0.5) < 0.03
    assert 0 < float(distances.min()) < 0.01 < 0.99 < float(distances.max()) < 1
    assert float((start / start.norm(dim=1, keepdim=True)).mean(0).norm()) < 0.05


def test_two_steps_by_hand():
    request, _ = case(n_forget=4)
    head, x, y = request.head, request.features_FD, request.labels_F
    method = Adversarial(
        lr=0.1, examples=3, attack_steps=20, max_steps=2, importance=2.0, momentum=0.0, weight_decay=0.0
    )
    drawn = CONTEXT.generator("perturbation")
    targets = wrong_labels(y.repeat(3), 4, drawn)
    near = Attack(4.0, 20, 0.1).perturb(head, x.repeat(3, 1), targets, drawn)
    held = held_in_place(output_sensitivity(head, x, 32))
    w = head.parameters_CE
    for _ in range(2):
        v = w.clone().requires_grad_()
        value = -4 / 16 * cross_entropy(x @ v.T, y) + 12 / 16 * cross_entropy(near @ v.T, targets)
        (value + 2.0 / 2 * (held * (v - head.parameters_CE) ** 2).sum()).backward()
        w = w - 0.1 * v.grad
    out = method.unlearn(request, CONTEXT)
    torch.testing.assert_close(out.head.parameters_CE, w, rtol=1e-8, atol=1e-10)
    assert out.details["attack_success"] > 0
    assert out.details["all_forgotten"] is False
    flat = method.unlearn(flattened(request), CONTEXT).head.parameters_CE
    torch.testing.assert_close(flat.reshape(4, 12), w, rtol=1e-8, atol=1e-10)


def test_it_stops_once_the_forget_set_is_forgotten():
    request, _ = case(n_forget=4)
    out = Adversarial(lr=0.5, examples=1, attack_steps=20, importance=0.0, adversarial_batch_size=1).unlearn(
        request, CONTEXT
    )
    assert out.details["all_forgotten"]
    assert out.details["steps"] < 500


def test_an_attack_that_finds_nothing_is_an_error_that_says_what_to_change():
    request, _ = case(n_forget=40)  # some of which the head takes for their target as they are
    drawn = wrong_labels(request.labels_F, 4, CONTEXT.generator("perturbation"))
    assert bool((request.head.logits(request.features_FD).argmax(1) == drawn).any())
    with pytest.raises(SolverError, match=r"no adversarial example with radius=1e-09 on features of mean .*\. Raise"):
        Adversarial(radius=1e-9, examples=1, attack_steps=2).unlearn(request, CONTEXT)


@pytest.mark.parametrize(
    "key", ["radius", "step_size", "examples", "attack_steps", "max_steps", "adversarial_batch_size"]
)
def test_settings_that_cannot_work_are_named(key):
    with pytest.raises(ConfigError, match=f"adversarial: {key}=0"):
        Adversarial(**{key: 0})
