from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sfu.evaluation.attacks.signals import confidences, confidences_under, cross_entropies, modified_entropies
from sfu.heads.linear import LinearHead


def drawn(rows=50, classes=5, scale=3.0):
    made = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(rows, classes, generator=made, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=made)


def test_signals_are_their_definitions():
    logits, labels = drawn()
    p = logits.softmax(1).numpy()
    own = p[np.arange(50), labels.numpy()]
    others = np.ones_like(p, dtype=bool)
    others[np.arange(50), labels.numpy()] = False
    assert confidences(logits, labels).numpy() == pytest.approx(np.log(own / (1 - own)))
    assert cross_entropies(logits, labels).numpy() == pytest.approx(-np.log(own))
    expected = -(1 - own) * np.log(own) - (np.where(others, p * np.log(1 - p), 0)).sum(1)
    assert modified_entropies(logits, labels).numpy() == pytest.approx(expected)


@pytest.mark.parametrize("gap", [40.0, 800.0, 1e5])
def test_signals_keep_their_digits_however_sure_the_head_is(gap):
    logits, right, wrong = torch.tensor([[gap, 0.0, 0.0]]).double(), torch.tensor([0]), torch.tensor([1])
    assert float(confidences(logits, right)) == pytest.approx(gap - math.log(2))
    assert float(confidences(logits, wrong)) == pytest.approx(-gap, abs=1e-9)
    assert float(cross_entropies(logits, wrong)) == pytest.approx(gap)
    rest = 2 * math.exp(-gap)  # 1 - p of the first class
    assert float(modified_entropies(logits, right)) == pytest.approx(1.5 * rest * rest, rel=1e-6, abs=1e-300)
    assert float(modified_entropies(logits, wrong)) == pytest.approx(
        gap - math.log(rest) if rest else 2 * gap, rel=0.01
    )


def test_confidences_under_many_heads_are_those_under_each():
    made = torch.Generator().manual_seed(1)
    heads = torch.randn(7, 4, 6, generator=made).double()
    original = LinearHead(heads[0], torch.zeros(4, 6).double(), 0.0, 30, bias=True)
    features, labels = torch.randn(30, 5, generator=made), torch.randint(4, (30,), generator=made)
    found = confidences_under(original, heads, features, labels)
    for row, parameters in zip(found, heads, strict=True):
        logits = original.outputs(features, parameters)
        assert torch.allclose(row, confidences(logits, labels))
