"""Small trained heads with forget and retained rows, and measures of the distance to the retrained head."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor

from sfu.curvature.settings import Regularization, curvature_settings
from sfu.evaluation.measures import squared_norm
from sfu.experiment.config import RunConfig
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.settings import AdamSettings, LinearSettings, Training
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.losses.quadratic import Quadratic
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.retrained import Retrained
from tests.conftest import make_arrays

CONFIG = LinearSettings(l2=1e-2)
CONTEXT = MethodContext({"training": 1, "perturbation": 2, "noise": 3, "folds": 4})
LOSS = make_loss(name="quadratic", target_scale=2.0)
RETAINED_CURVATURE = curvature_settings(estimator="exact", regularization=Regularization.none)
FORGET_CURVATURE = curvature_settings(estimator="closed_form")
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
WITH_L2 = {"momentum": 0.0}


def name_of(method: object) -> str:
    return type(method).__name__


def run_config(**changes: object) -> RunConfig:
    """A run on a linear head, without data."""
    return RunConfig(head=LinearSettings(), loss=make_loss(name="quadratic"), **changes)


def rows(n_train: int = 400) -> tuple[Tensor, Tensor]:
    arrays = make_arrays(n_train)
    return torch.from_numpy(arrays["train_features"]).double(), torch.from_numpy(arrays["train_labels"])


def trained(loss: Loss | None = None, bias: bool = False) -> LinearHead:
    features, labels = rows()
    config = LinearSettings(l2=1e-2, bias=bias)
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


def situation(
    bias: bool = False, l2: float = 1e-3, training: Training = Training.exact, n_forget: int = 60, seed: int = 0
):
    """(request, retained, head config) of a small classification problem."""
    features, labels, config, head = copy.deepcopy(_problem(bias, l2, training, seed))
    order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
    forget, keep = order[:n_forget], order[n_forget:]
    return ForgetRequest(head, features[forget], labels[forget]), RetainedSet(features[keep], labels[keep]), config


@functools.cache
def _problem(bias: bool, l2: float, training: Training, seed: int) -> tuple[Tensor, Tensor, LinearSettings, LinearHead]:
    """Rows, and a head trained on them: many tests ask for the same ones."""
    arrays = make_arrays(seed=seed)
    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    adam = AdamSettings(lr=1e-2, batch_size=100, max_epochs=5, patience=5)
    config = LinearSettings(l2=l2, bias=bias, training=training, adam=adam)
    head = train_head(features, labels, 4, config, LOSS, seed=1, device=torch.device("cpu"), dtype=torch.float64)
    return features, labels, config, head


def relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return float(difference.norm() / reference.norm())


def retained_hessian(request, retained, structure: Structure = Structure.products) -> CurvatureOperator:
    """That of the retained rows at the trained head."""
    head = request.head
    rows = head.rows(retained.features_RD, retained.labels_R)
    return build_operator(head.objective(), rows, head.parameters_CE, structure)


def squared_distances(head, request, retained, config) -> tuple[float, float]:
    """Squared distances to Retrained, in the retain-Hessian norm: of a head, and of the trained one."""
    retrained = Retrained(config).unlearn(request, CONTEXT, retained).head.parameters_CE
    hessian = retained_hessian(request, retained)
    return tuple(squared_norm(of.parameters_CE - retrained, hessian) for of in (head, request.head))


def distance(head, request, retained, config) -> float:
    """Distance to Retrained, relative to doing nothing."""
    after, before = squared_distances(head, request, retained, config)
    return (after / before) ** 0.5


def measured_gain(head, request, retained, config) -> float:
    """Fall of the squared distance to Retrained."""
    after, before = squared_distances(head, request, retained, config)
    return before - after
