"""Class means, from which rows are forgotten exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestCentroid as Reference

import sfu
from sfu.errors import DataError


def made(seed: int, count: int = 40, n_classes: int = 3, width: int = 5):
    generator = torch.Generator().manual_seed(seed)
    features = 100 * torch.randn(count, width, generator=generator) + 10
    return features, torch.randint(n_classes, (count,), generator=generator)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n_forget=st.integers(1, 39), normalize=st.booleans())
def test_forgetting_is_never_having_seen(seed, n_forget, normalize):
    features, labels = made(seed)
    whole = sfu.NearestCentroid.fit(features, labels, normalize=normalize, classes=("a", "b", "c"))
    left = whole.forget(features[:n_forget], labels[:n_forget])
    wanted = sfu.NearestCentroid.fit(
        features[n_forget:], labels[n_forget:], normalize=normalize, classes=("a", "b", "c")
    )
    assert torch.equal(left.counts_C, wanted.counts_C)
    torch.testing.assert_close(left.means_CD, wanted.means_CD, rtol=1e-10, atol=1e-10, equal_nan=True)
    distances = left.distances(features)
    torch.testing.assert_close(distances, wanted.distances(features), rtol=1e-8, atol=1e-8)
    assert bool(torch.isin(left.predict(features), labels[n_forget:].unique()).all())


def test_it_predicts_what_scikit_learn_does():
    features, labels = made(0, 300)
    own = sfu.NearestCentroid.fit(features.numpy(), labels.tolist())
    reference = Reference().fit(features.double().numpy(), labels.numpy())
    others, _ = made(1, 500)
    assert own.predict(others).tolist() == reference.predict(others.double().numpy()).tolist()
    names = [["ant", "bee", "cow"][label] for label in labels]
    by_name = sfu.NearestCentroid.fit(features, names, classes=("ant", "bee", "cow")).forget(features[:5], names[:5])
    assert torch.equal(by_name.sums_CD, own.forget(features[:5], labels[:5]).sums_CD)
    assert "tensor([[" not in repr(own)


def test_rows_that_were_not_in_it_are_refused():
    features, labels = made(0)
    own = sfu.NearestCentroid.fit(features, labels)
    with pytest.raises(DataError, match="fewer than are to be forgotten"):
        own.forget(features.repeat(2, 1), labels.repeat(2))
    of_one = labels == 1
    with pytest.raises(DataError, match="do not add up to its sum"):
        own.forget(features[of_one] + 0.1, labels[of_one])
    assert int(own.forget(features[of_one], labels[of_one]).counts_C[1]) == 0
    for rows, numbers, message in (
        (features[:2, :3], labels[:2], "3 wide with labels up to"), (features[:2], [0, 7], "labels up to 7"),
        (features[:2] / 0, labels[:2], "not all finite"), (features[:0], labels[:0], "at least one row"),
        (features[:2], [0, -1], "Number the classes from 0"), (features[:2], labels[:3], "the tensor of labels"),
        (features[:2], ["ant", "bee"], "no class of the classifier. Its classes have no names"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            own.forget(rows, numbers)


def test_names_are_sorted_and_each_class_needs_one():
    features, labels = made(0)
    names = [["cow", "ant", "bee"][label] for label in labels]
    own = sfu.NearestCentroid.fit(features, names)
    assert own.classes == ("ant", "bee", "cow")
    assert int(own.counts_C[2]) == names.count("cow")
    assert isinstance(sfu.NearestCentroid.fit(features, labels, classes=["a", "b", "c"]).classes, tuple)
    with pytest.raises(DataError, match="classes has 2 names"):
        sfu.NearestCentroid.fit(features, labels, classes=["a", "b"])
    with pytest.raises(DataError, match="Its classes are ant, bee, cow"):
        own.forget(features[:1], ["dog"])


def test_what_cannot_be_predicted_is_refused():
    features, labels = made(0)
    own = sfu.NearestCentroid.fit(features, labels)
    broken = features.clone()
    broken[3, 0] = float("nan")
    for rows, message in (
        (features[:, :3], "3 wide, but the classifier has 5"), (features[0], r"\[5\], or not all finite"),
        (broken, "not all finite"), (features * 1j, "real numbers"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            own.predict(rows)
    with pytest.raises(DataError, match="it knows no class"):
        own.forget(features, labels).predict(features)
