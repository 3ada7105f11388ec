from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.spatial.distance import jensenshannon
from scipy.special import softmax
from scipy.stats import entropy, norm

from sfu.data.feature_data import make_feature_data
from sfu.data.split import ForgetSplit
from sfu.errors import DataError
from sfu.evaluation.distances import (
    KLOM_LIMIT,
    klom,
    klom_summary,
    label_margins,
    margin_difference,
    mean_jensen_shannon,
)
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.measures import mean_kl
from sfu.heads.linear import LinearHead


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_divergences_are_those_of_scipy():
    one, other = drawn(30, 5), 3 * drawn(30, 5, seed=1)
    p, q = softmax(one.numpy(), axis=1), softmax(other.numpy(), axis=1)
    assert mean_jensen_shannon(one, other) == pytest.approx((jensenshannon(p, q, axis=1) ** 2).mean(), rel=1e-12)
    assert mean_jensen_shannon(other, one) == pytest.approx(mean_jensen_shannon(one, other), rel=1e-12)
    assert mean_kl(one, other) == pytest.approx(entropy(p, q, axis=1).mean(), rel=1e-12)


def test_jensen_shannon_ends_at_zero_and_at_the_logarithm_of_two():
    sure = torch.tensor([[800.0, 0.0], [0.0, 800.0]], dtype=torch.float64)
    assert mean_jensen_shannon(sure, sure) == 0.0
    assert mean_jensen_shannon(sure, -sure) == pytest.approx(math.log(2))


def test_margins_are_log_odds():
    logits, labels = drawn(20, 4), torch.arange(20) % 4
    own = logits.softmax(1)[torch.arange(20), labels]
    assert torch.allclose(label_margins(logits, labels), torch.log(own / (1 - own)))
    by_hand = label_margins(torch.tensor([[2.0, 0.5]]), torch.tensor([0]))
    assert float(by_hand) == pytest.approx(1.5)
    assert margin_difference(torch.tensor([[2.0, 0.5], [1.0, 0.0]]), torch.zeros(2, 2), torch.tensor([0, 1])) == 1.25


def test_one_class_has_no_margins():
    with pytest.raises(DataError, match="only one class"):
        label_margins(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    assert margin_difference(torch.zeros(3, 1), torch.ones(3, 1), torch.zeros(3, dtype=torch.int64)) is None


def test_klom_of_gaussians_is_their_divergence():
    """A population of 4,000 heads, against the integral of the two densities."""
    means, deviations = ([0.0, 1.0, -2.0], [0.0, 0.5, 1.0]), ([1.0, 2.0, 0.7], [1.0, 1.5, 2.0])
    unlearned, retrained = (
        torch.tensor(mean) + torch.tensor(deviation) * drawn(4000, 3, seed=seed)
        for seed, (mean, deviation) in enumerate(zip(means, deviations, strict=True))
    )
    expected = [
        quad(lambda x, p=norm(m, s), q=norm(n, t): p.pdf(x) * (p.logpdf(x) - q.logpdf(x)), m - 9 * s, m + 9 * s)[0]
        for m, s, n, t in zip(means[0], deviations[0], means[1], deviations[1], strict=True)
    ]
    assert klom(unlearned, retrained).tolist() == pytest.approx(expected, abs=0.04)
    assert max(expected) > 1
    assert klom(retrained, unlearned).tolist() != pytest.approx(expected, abs=0.1)  # it has a direction


def test_klom_of_equal_populations_is_small_and_of_distant_ones_is_clipped():
    one, other = drawn(50, 200), drawn(50, 200, seed=1)
    assert float(klom(one, one).abs().max()) == 0.0
    assert float(klom(one, other).mean()) == pytest.approx(2 / 50, rel=0.2)  # what sampling alone leaves
    assert klom(one + 100, other).tolist() == [KLOM_LIMIT] * 200
    constant = torch.ones(3, 2)
    assert klom(constant, constant).tolist() == [0.0, 0.0]
    assert klom(constant, constant + 1).tolist() == [KLOM_LIMIT, KLOM_LIMIT]


def test_an_ensemble_of_one_is_refused():
    with pytest.raises(DataError, match="two heads or more"):
        klom(torch.zeros(1, 3), torch.zeros(5, 3))
    with pytest.raises(DataError, match="the same rows"):
        klom(torch.zeros(4, 3), torch.zeros(4, 2))


def test_percentiles_are_those_of_numpy():
    values = drawn(37).abs()
    found = klom_summary(values)
    assert found.pop("mean") == pytest.approx(float(values.mean()))
    assert list(found.values()) == pytest.approx(np.percentile(values.numpy(), [50, 95, 99]).tolist())


def evaluator(original: LinearHead, retrained: LinearHead | None) -> Evaluator:
    features, labels = drawn(30, 3, seed=5).numpy(), np.arange(30) % 3
    data = make_feature_data("drawn", features[:20], labels[:20], features[20:], labels[20:])
    return Evaluator(data, ForgetSplit(torch.arange(6), torch.arange(6, 20), "indices"), original, retrained)


def test_the_evaluator_names_both_directions_and_measures_margins():
    heads = [LinearHead(drawn(3, 3, seed=seed), torch.zeros(3, 3).double(), 0.1, 20) for seed in range(3)]
    found = evaluator(heads[0], heads[1]).evaluate(heads[2])[0]
    other = evaluator(heads[0], heads[2]).evaluate(heads[1])[0]
    assert found["forget_kl"] == pytest.approx(other["forget_kl_reversed"]) != pytest.approx(other["forget_kl"])
    assert found["forget_js"] == pytest.approx(other["forget_js"])
    assert found["weight_distance"] == pytest.approx(
        float(np.linalg.norm(drawn(3, 3, seed=2) - heads[1].parameters_CE))
    )
    features, labels = drawn(30, 3, seed=5).float().double(), torch.arange(30) % 3
    for name, part in (("forget", slice(0, 6)), ("test", slice(20, 30))):
        own, reference = (label_margins(head.logits(features[part]), labels[part]) for head in (heads[2], heads[1]))
        assert found[f"{name}_margin_difference"] == pytest.approx(float((own - reference).abs().mean()))


def test_without_retrained_nothing_is_compared():
    head = LinearHead(drawn(3, 3), torch.zeros(3, 3).double(), 0.1, 20)
    found = evaluator(head, None).evaluate(head)[0]
    names = ("weight_distance", "forget_kl_reversed", "forget_js", "forget_margin_difference", "test_margin_difference")
    assert [found[name] for name in names] == [None] * 5
    assert found["test_accuracy"] is not None
