"""Compute what a head keeps of its training rows (:class:`~sfu.heads.kept.Kept`), once training is done.

Shapes: N rows, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from sfu.errors import ConfigError
from sfu.heads.base import Head
from sfu.heads.kept import Kept
from sfu.heads.projections import projected_sums
from sfu.heads.settings import HeadSettings, Keep
from sfu.heads.sketch import Sketch
from sfu.lazy import torch
from sfu.losses.base import Layout, Loss
from sfu.losses.quadratic import Quadratic
from sfu.losses.rows import Rows
from sfu.operators.build import build_operator
from sfu.operators.largest_eigenvalue import bound_by_products
from sfu.operators.plan import plan_structure
from sfu.operators.structure import Structure

if TYPE_CHECKING:
    from torch import Tensor

_DECOMPOSED = 1024  # largest E whose second moments are decomposed
_FORMED = 2048  # largest E whose second moments are formed for the bound alone
_EPS_64 = 2.0**-52
_SMALLEST, _LARGEST = 1e-20, 1e30  # traces between which squares in float32 neither underflow nor overflow


def summarise(trained: Head, rows: Rows, config: HeadSettings) -> Kept:
    """Return what ``head.keep`` asks for of the training rows, at the trained head."""
    counts_C = rows.summed(rows.labels_N.bincount(minlength=trained.n_classes))
    bound = curvature_bound(trained, rows)
    numbers = Kept(
        None if bound is None else float(rows.same(torch.tensor(bound, dtype=torch.float64))),
        (counts_C.double() / rows.count).to(rows.device), trace=float(rows.summed(trained.traces(rows).sum())),
        projected_2K=(rows.summed(projected_sums(rows.features_ND)) / rows.count).to(rows.device),
    )  # fmt: skip
    if config.keep is Keep.bound:
        return numbers
    mean_D = (rows.summed(rows.features_ND.sum(0, dtype=torch.float64)) / rows.count).to(rows.device)
    hessian = trained.objective().data_hessian(rows, trained.parameters_CE, trained.loss.layout)
    if config.keep is Keep.full:
        return replace(numbers, mean_D=mean_D, data_hessian=hessian)
    sketch = Sketch.encode(hessian, config.sketch)
    return replace(numbers, mean_D=mean_D, sketch=Sketch(*(rows.same(one) for one in sketch.tensors().values())))


def check_keep(head: Head, keep: Keep) -> None:
    """Raise ``ConfigError`` if the Hessian of the training rows is asked for and would not be held as a matrix."""
    if keep is Keep.bound:
        return
    n_classes, width = head.parameters_CE.shape
    plan = plan_structure(head.layout, n_classes, width, head.n_train, head.parameters_CE.device)
    if plan.structure is Structure.products:
        remedy = " or use loss=logistic" if head.layout is Layout.dense else ""
        raise ConfigError(f"head.keep={keep.value} does not fit this head: {plan.reason}. Set head.keep=bound{remedy}.")


def curvature_bound(head: Head, rows: Rows) -> float | None:
    r"""Return an upper bound of the largest eigenvalue of the data term's Hessian, at the head's parameters.

    Under losses whose curvature is constant, or jumps, it holds at any parameters: the loss's curvature bound times the
    largest eigenvalue of the rows' second moments. Where these are not formed, because there are many parameters, and
    under other losses, products bound it (:mod:`sfu.operators.largest_eigenvalue`).

    Returns:
        The bound; ``None`` if the loss or the rows have none that is finite.
    """
    constants = head.loss.constants
    if not math.isfinite(constants.curvature_bound):
        return None
    smooth = 0 < constants.curvature_lipschitz < math.inf
    factor = 1.0 if smooth else constants.curvature_bound
    if smooth or rows.shared or (rows.width > _FORMED and not rows.has_moments):
        objective = replace(head.objective(), loss=head.loss if smooth else Quadratic(), l2=0.0)
        hessian = build_operator(objective, rows, head.parameters_CE, Structure.products)
        near, most = (1.2, 15) if rows.shared else (1.05, 40)  # Jacobians are dear
        eps = torch.finfo(rows.precision).eps
        largest = bound_by_products(hessian.matmul, head.parameters_CE, near=near, max_products=most, eps=eps)
    else:
        quick = rows if rows.has_moments else rows.to_float32()
        if not _SMALLEST < float(quick.moments().trace()) < _LARGEST:
            quick = rows
        eps = torch.finfo(quick.precision).eps
        return bound_of_moments(head.loss, quick.moments().double(), rows=quick.count, step=quick.step, eps=eps)
    return factor * largest if math.isfinite(largest) else None


def bound_of_moments(loss: Loss, moments_EE: Tensor, *, rows: int, step: int = 1, eps: float = _EPS_64) -> float | None:
    """Return :func:`curvature_bound` under a loss whose curvature is constant, or jumps, from the second moments.

    Args:
        loss: The loss.
        moments_EE: The rows' second moments, in float64.
        rows: How many rows there are.
        step: How many of them were summed at a time.
        eps: Relative rounding of the sums.
    """
    # sums of a chunk's rows, then of chunks (Higham, Accuracy and stability, section 3.1)
    width = len(moments_EE)
    rounding = eps * (step + rows / step + width)
    if width <= _DECOMPOSED:
        largest = float(torch.linalg.eigvalsh(moments_EE)[-1])
    else:
        largest = bound_by_products(moments_EE.matmul, moments_EE[0], near=1.001, max_products=100, eps=_EPS_64)
    largest = loss.constants.curvature_bound * (largest + rounding * float(moments_EE.trace()))
    return largest if math.isfinite(largest) else None
