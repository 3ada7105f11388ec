"""A small trained head with forget and retained rows, for the comparison methods."""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.train import train_head
from sfu.losses import Loss, Quadratic
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.settings import HeadConfig
from tests.conftest import make_arrays

CONFIG = HeadConfig(name="linear", l2=1e-2)
CONTEXT = MethodContext({"training": 1, "perturbation": 2, "noise": 3, "folds": 4})


def rows(n_train: int = 400) -> tuple[Tensor, Tensor]:
    arrays = make_arrays(n_train)
    return torch.from_numpy(arrays["train_features"]).double(), torch.from_numpy(arrays["train_labels"])


def trained(loss: Loss | None = None, bias: bool = False) -> LinearHead:
    features, labels = rows()
    config = HeadConfig(name="linear", l2=1e-2, bias=bias)
    where = {"device": torch.device("cpu"), "dtype": torch.float64}
    return train_head(features, labels, 4, config, loss or Quadratic(), seed=0, **where)


def case(loss: Loss | None = None, n_forget: int = 40, bias: bool = False) -> tuple[ForgetRequest, RetainedSet]:
    """The first rows to forget, the others retained."""
    features, labels = rows()
    request = ForgetRequest(trained(loss, bias), features[:n_forget], labels[:n_forget])
    return request, RetainedSet(features[n_forget:], labels[n_forget:])


def class_case(forgotten: int = 2) -> tuple[ForgetRequest, RetainedSet]:
    """All rows of one class to forget."""
    features, labels = rows()
    gone = labels == forgotten
    request = ForgetRequest(trained(), features[gone], labels[gone], classes=(forgotten,))
    return request, RetainedSet(features[~gone], labels[~gone])


class FlatHead(LinearHead):
    """A head whose classes share one row of parameters, as a linearised network's do: only ``outputs`` knows how."""

    squared_pulls = Head.squared_pulls
    feature_weights_CD = Head.feature_weights_CD

    @property
    def n_classes(self) -> int:
        return 4

    @property
    def n_features(self) -> int:
        return self.parameters_CE.numel() // 4

    def outputs(self, features_ND: Tensor, parameters_CE: Tensor) -> Tensor:
        return features_ND.to(parameters_CE.dtype) @ parameters_CE.reshape(4, -1).T


def flattened(request: ForgetRequest) -> ForgetRequest:
    head = request.head
    parameters = head.parameters_CE.reshape(1, -1)
    flat = FlatHead(parameters, torch.zeros_like(parameters), head.l2, head.n_train)
    return ForgetRequest(flat, request.features_FD, request.labels_F, classes=request.classes)
