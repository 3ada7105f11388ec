"""Heads that are trained on subsets together are those that are trained alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sfu.heads.settings import AdamSettings, Keep, LinearSettings, Training
from sfu.heads.subsets import SubsetTrainer
from sfu.heads.train import train_head, train_like
from sfu.losses.base import make_loss
from tests.conftest import make_arrays

CASES = {
    "quadratic": ({}, {}),
    "bias": ({"bias": True}, {}),
    "weighted": ({}, {"class_weights": "balanced"}),
    "targets": ({"bias": True}, {"target_scale": 3.0, "other_target": -1.0}),
    "kept": ({"keep": Keep.full}, {}),
    "ledger": ({"ledger": True}, {}),
}


def pool(loss: str, head: dict, settings: dict, device: torch.device, dtype=torch.float64):
    arrays = make_arrays(n_train=300, n_test=80)
    features = torch.from_numpy(arrays["train_features"])
    labels = torch.from_numpy(arrays["train_labels"])
    config = LinearSettings(l2=1e-3, **head)
    made = make_loss(loss, **settings)
    original = train_head(features[:220], labels[:220], 4, config, made, seed=0, device=device, dtype=dtype)
    drawn = torch.Generator().manual_seed(1)
    sizes = (220, 220, 90)  # the last one is summed, the others are what is left of the pool
    return features, labels, config, original, [(torch.randperm(300, generator=drawn)[:size],) for size in sizes]


@pytest.mark.parametrize("case", CASES)
def test_heads_from_sums_are_those_trained_directly(case, device):
    features, labels, config, original, subsets = pool("quadratic", *CASES[case], device)
    found = SubsetTrainer(original, features, labels, config, seed=0).train(subsets, [original] * 3)
    for head, index in zip(found, subsets, strict=True):
        alone = train_like(original, features[index[0]], labels[index[0]], config, seed=0)
        assert (head.parameters_CE - alone.parameters_CE).norm() <= 1e-8 * alone.parameters_CE.norm()
        assert (head.n_train, head.weight) == (alone.n_train, pytest.approx(alone.weight))
        assert float(head.gradient_CE.norm()) <= config.tolerance
        assert head.kept.bound == pytest.approx(alone.kept.bound, rel=1e-2)
        assert head.kept.trace == pytest.approx(alone.kept.trace)
        for name in ("shares_C", "mean_D", "data_hessian", "projected_2K"):
            one, other = getattr(head.kept, name), getattr(alone.kept, name)
            assert (one is None) == (other is None), name
            assert one is None or torch.allclose(one, other, atol=1e-9), name
        assert (head.forgotten, head.recipe) == (alone.forgotten, alone.recipe)


def test_parts_are_summed_once_by_whichever_way_is_shortest(monkeypatch):
    features, labels, config, original, _ = pool("quadratic", {}, {}, torch.device("cpu"))
    targets, others = torch.arange(80), torch.arange(80, 300)
    trainer = SubsetTrainer(original, features, labels, config, seed=0, known=[targets, others])
    summed, own = [], SubsetTrainer._sums
    monkeypatch.setattr(SubsetTrainer, "_sums", lambda self, index: summed.append(len(index)) or own(self, index))
    subsets = [(targets[:40], others[:200]), (targets[40:], others[:200])]
    found = trainer.train(subsets, [original] * 2)
    trainer.train([subsets[0][1:]], [original])  # as Retrained has it
    assert summed == [40, 20]  # one half of the targets gives the other, and 20 rows are left out of the others
    for head, parts in zip(found, subsets, strict=True):
        index = torch.cat(parts)
        alone = train_like(original, features[index], labels[index], config, seed=0)
        assert (head.parameters_CE - alone.parameters_CE).norm() <= 1e-8 * alone.parameters_CE.norm()
    trainer.clear()
    trainer.train(subsets[:1], [original])
    assert summed == [40, 20, 40, 20]


def test_the_bound_from_sums_is_an_upper_bound():
    features, labels, config, original, subsets = pool("quadratic", {}, {}, torch.device("cpu"))
    head = SubsetTrainer(original, features, labels, config, seed=0).train(subsets[:1], [original])[0]
    rows = features[subsets[0][0]].double()
    assert head.kept.bound >= float(torch.linalg.eigvalsh(rows.T @ rows / len(rows))[-1])


def test_heads_in_float32_keep_the_gradient_of_the_rounded_head():
    features, labels, config, original, subsets = pool("quadratic", {}, {}, torch.device("cpu"), torch.float32)
    head = SubsetTrainer(original, features, labels, config, seed=0).train(subsets[:1], [original])[0]
    alone = train_like(original, features[subsets[0][0]], labels[subsets[0][0]], config, seed=0)
    assert head.parameters_CE.dtype == torch.float32
    assert torch.allclose(head.parameters_CE, alone.parameters_CE, atol=1e-6)
    assert float(head.gradient_CE.norm()) < 1e-5


@pytest.mark.parametrize("loss", ["softmax", "logistic"])
def test_heads_of_other_losses_start_warm_and_end_at_the_optimum(loss):
    features, labels, config, original, subsets = pool(loss, {"bias": True}, {}, torch.device("cpu"))
    found = SubsetTrainer(original, features, labels, config, seed=0).train(subsets, [original] * 3)
    for head, index in zip(found, subsets, strict=True):
        alone = train_like(original, features[index[0]], labels[index[0]], config, seed=0)
        assert (head.parameters_CE - alone.parameters_CE).norm() <= 1e-5 * alone.parameters_CE.norm()
        assert float(head.gradient_CE.norm()) <= config.tolerance


def test_heads_of_other_training_are_trained_as_they_are_with_seeds_of_their_own():
    features, labels, _, original, subsets = pool("softmax", {}, {}, torch.device("cpu"))
    config = LinearSettings(l2=1e-3, training=Training.adam, adam=AdamSettings(max_epochs=2))
    trainer = SubsetTrainer(original, features, labels, config, seed=0)
    first, second = trainer.train([subsets[0]] * 2, [original] * 2)
    assert not torch.equal(first.parameters_CE, second.parameters_CE)
    assert torch.equal(trainer.train([subsets[0]], [original], first=1)[0].parameters_CE, second.parameters_CE)


def test_noise_of_the_objective_is_drawn_anew():
    features, labels, config, original, subsets = pool("quadratic", {}, {}, torch.device("cpu"))
    noisy = replace(config, objective_noise=0.5)
    found = SubsetTrainer(original, features, labels, noisy, seed=0).train([subsets[0]] * 2, [original] * 2)
    assert not torch.allclose(found[0].parameters_CE, found[1].parameters_CE)
    assert all(head.certificate is not None for head in found)
