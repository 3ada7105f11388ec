from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu.errors import DataError
from sfu.heads.linear import LinearHead
from sfu.request import ForgetRequest


def head(n_train: int = 20) -> LinearHead:
    zero = torch.zeros(3, 5).double()
    return LinearHead(zero, zero, 0.1, n_train)


def test_it_holds_copies_and_is_frozen():
    features, labels = torch.randn(100, 5), torch.arange(100) % 3
    request = ForgetRequest(head(), features[10:14], labels[10:14])
    for mine, source in ((request.features_FD, features), (request.labels_F, labels)):
        assert mine.untyped_storage().nbytes() == mine.numel() * mine.element_size()
        assert mine.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        assert mine._base is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.features_FD = features
    with pytest.raises((AttributeError, TypeError)):
        request.retained = features
    assert (request.n_forget, request.n_retain, request.step_ratio) == (4, 16, 0.25)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), "at least one row"),
        (torch.zeros(2, 4), torch.tensor([0, 1]), "4 wide but the head takes 5"),
        (torch.zeros(2, 5), torch.tensor([0.0, 1.0]), "must be 2 integers"),
        (torch.zeros(2, 5), torch.tensor([0]), "must be 2 integers"),
        (torch.zeros(2, 5), torch.tensor([0, 3]), r"classes 0 \.\. 2"),
        (torch.zeros(2, 5), torch.tensor([-1, 1]), r"run from -1"),
        (torch.full((2, 5), torch.nan), torch.tensor([0, 1]), "NaN or infinite"),
        (torch.zeros(20, 5), torch.zeros(20, dtype=torch.long), "leave none retained"),
    ],
)
def test_requests_that_cannot_work(features, labels, message):
    with pytest.raises(DataError, match=message):
        ForgetRequest(head(), features, labels)
