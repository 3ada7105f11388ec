"""Build the Hessian of an objective over a set of rows, in the structure that was planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.lazy import torch
from sfu.losses.base import Layout, OutputHessian
from sfu.losses.objective import Objective
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator, Unseen
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.products import Part, ProductOperator
from sfu.operators.structure import Structure

if TYPE_CHECKING:
    from torch import Tensor


def build_operator(objective: Objective, rows: Rows, parameters_CE: Tensor, structure: Structure) -> CurvatureOperator:
    """Return the Hessian of the mean objective of ``rows`` at ``parameters_CE``, the regulariser included.

    ``shared`` averages the blocks of a loss whose classes differ; ``blocks`` takes the diagonal blocks of a loss that
    couples the classes.
    """
    n_classes = parameters_CE.shape[0]
    if structure is Structure.products:
        hessians = [objective.loss.curvature(chunk.outputs(parameters_CE), chunk.labels_B) for chunk in rows.chunks()]
        return products_of(objective, rows, hessians, n_classes)
    if structure is Structure.shared and objective.loss.layout is not Layout.shared:
        data = objective.data_hessian(rows, parameters_CE, Layout.blocks).mean(0)
    else:
        data = objective.data_hessian(rows, parameters_CE, Layout(structure.value))
    return with_ridge(data, objective, n_classes)


def products_of(objective: Objective, rows: Rows, hessians: list[OutputHessian], n_classes: int) -> ProductOperator:
    """Return the product operator of known output Hessians, one for each chunk."""
    part, unseen = Part(rows, hessians, 1.0), Unseen(objective.unseen, objective.l2)
    return ProductOperator((part,), objective.ridge_E, objective.regularized_E, n_classes, unseen)


def with_ridge(data: Tensor, objective: Objective, n_classes: int) -> ExplicitOperator:
    """Add the regulariser to blocks of the data term."""
    ridge_K = objective.ridge_E.repeat(data.shape[-1] // objective.ridge_E.shape[0])
    unseen = Unseen(objective.unseen, objective.l2)
    return ExplicitOperator(data + torch.diag(ridge_K), n_classes, objective.regularized_E, unseen)
