r"""Perturb the head, observe the forget loss or its gradient.

At :math:`w_i = w^* + \delta_i` one observes, on the forget set,

- ``loss``: :math:`\Delta J_i = J_f(w_i) - J_f(w^*)`, one number for each class, or one in all if the classes share a
  perturbation ("Towards Source-Free Machine Unlearning", CVPR 2025);
- ``gradient``: :math:`\nabla J_f(w_i) - \nabla J_f(w^*)`, which is :math:`H_f \delta_i` for the quadratic loss, and
  nearly so for others where the perturbation is small.

An antithetic pair averages the observations at +d and -d, which cancels the loss's odd term.

The observations fall into K problems of side S, each the fit of one matrix: one block for all classes (K = 1, S = E;
each class adds an observation), one block a class (K = C, S = E), or one matrix over all parameters
(K = 1, S = C E). For the blocks of coupled classes, one class is perturbed at a time.

Shapes: P perturbations, C classes, E = D (+ 1 with bias), Q observations of a problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sfu.curvature.settings import LowerBound, Measurement, Pairs, PsdFitSettings
from sfu.errors import ConfigError
from sfu.lazy import torch
from sfu.operators.base import CurvatureOperator
from sfu.operators.plan import available_memory
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
DEFAULT_LOSSES = 500
_SMALL = 1e-3
"""Standard deviation of the outputs' change if the loss is not quadratic and no scale is given."""


class HessianObservation(NamedTuple):
    """The Hessian of a set of rows, and their total weight."""

    operator: CurvatureOperator
    weight: float


def merge_hessians(parts: Sequence[HessianObservation]) -> HessianObservation:
    """Return the Hessian of the union of disjoint sets."""
    weight = sum(part.weight for part in parts)
    first, *others = (part.operator for part in parts)
    return HessianObservation(first.combine(others, [part.weight / weight for part in parts]), weight)


@dataclass(frozen=True)
class Observations:
    """Losses or gradients of a set of forget rows at perturbed heads; means over the rows, so disjoint sets merge.

    Attributes:
        structure: Which problems these are.
        delta_KQS: The perturbations (the same for every set).
        response: Loss changes ``[K, Q]`` or gradient changes ``[K, Q, S]``.
        slope_KQ: ``g_f . d`` of each observation.
        weight: Total weight of the rows.
        hessian: The rows' Hessian, if the lower bound needs it.
    """

    structure: Structure
    delta_KQS: Tensor
    response: Tensor
    slope_KQ: Tensor
    weight: float
    hessian: HessianObservation | None = None

    @staticmethod
    def merge(parts: Sequence[Observations]) -> Observations:
        """Return the observations of the union of disjoint sets under the same perturbations."""
        weight = sum(part.weight for part in parts)
        shares = [part.weight / weight for part in parts]
        hessians = [part.hessian for part in parts if part.hessian is not None]
        return Observations(
            parts[0].structure,
            parts[0].delta_KQS,
            torch.stack([part.response * w for part, w in zip(parts, shares, strict=True)]).sum(0),
            torch.stack([part.slope_KQ * w for part, w in zip(parts, shares, strict=True)]).sum(0),
            weight,
            merge_hessians(hessians) if hessians else None,
        )


def count_perturbations(settings: PsdFitSettings, n_classes: int, width: int, structure: Structure) -> int:
    """Return the number of perturbations to draw: ``curvature.perturbations``, or as many as carry information."""
    if settings.measurement is Measurement.loss:
        return settings.perturbations or DEFAULT_LOSSES
    enough = enough_gradients(settings, n_classes, width, structure)
    return min(settings.perturbations or enough, enough)


def enough_gradients(settings: PsdFitSettings, n_classes: int, width: int, structure: Structure) -> int:
    """Return the number of perturbations whose gradients determine the Hessian.

    Gradient changes are ``H d`` without noise, so as many of them as H has rows determine H. Twice as many, for
    conditioning, are drawn at most: more would only cost more.
    """
    side = n_classes * width if structure is Structure.dense else width
    at_once = n_classes if structure is Structure.shared and settings.per_class else 1
    enough = -(-2 * side // at_once)
    return 2 * enough if settings.pairs is Pairs.antithetic else enough


def draw_perturbations(
    settings: PsdFitSettings,
    n_classes: int,
    width: int,
    generator: torch.Generator,
    *,
    structure: Structure = Structure.shared,
    scale: float = 1.0,
) -> Tensor:
    """Draw Gaussian perturbations, ``[P, C, E]`` float64 on the CPU.

    Shared perturbations (``per_class=false``) repeat over C, unless the problem is dense. Antithetic pairs are drawn
    once each: P // 2 rows. ``scale`` is the standard deviation of an entry if ``curvature.scale`` is not given.

    Raises:
        ConfigError: They do not fit in half of this machine's memory.
    """
    count = count_perturbations(settings, n_classes, width, structure)
    count = count // 2 if settings.pairs is Pairs.antithetic else count
    classes = n_classes if settings.per_class or structure is Structure.dense else 1
    vectors = count * classes
    needed, memory = 8 * vectors * width, available_memory(torch.device("cpu"))
    if settings.measurement is Measurement.loss:
        needed += 30 * (vectors if structure is Structure.shared else count) ** 2  # pairs of measurements, in the fit
    if needed > memory / 2:
        raise ConfigError(
            f"curvature.perturbations={count} need {needed / 2**30:.0f} GiB for {classes} classes of "
            f"{width} parameters, and this machine has {memory / 2**30:.0f} GiB. Use fewer, or "
            "curvature.per_class=false."
        )
    delta = torch.randn(count, classes, width, generator=generator, dtype=torch.float64)
    return delta.mul_(settings.scale or scale).expand(count, n_classes, width)


def default_scale(request: ForgetRequest) -> float:
    """Return 1 if the loss is quadratic, and otherwise the scale that changes outputs by about a thousandth."""
    if request.head.loss.constants.curvature_lipschitz == 0:
        return 1.0
    n_classes, total = request.head.n_classes, 0.0
    for chunk in request.data().chunks():
        for c in range(n_classes):
            only_BC = chunk.share_B.new_zeros(chunk.share_B.shape[0], n_classes)
            only_BC[:, c] = 1.0
            total += chunk.squares(only_BC)
    return _SMALL / max((total / (request.labels_F.shape[0] * n_classes)) ** 0.5, 1e-300)


def observe(settings: PsdFitSettings, request: ForgetRequest, delta_PCE: Tensor, structure: Structure) -> Observations:
    """Observe the forget set of ``request`` at the heads perturbed by ``delta_PCE``, in chunks that bound memory."""
    by_gradient = settings.measurement is Measurement.gradient
    gradient_CE = request.forget_gradient()
    slope_PC = torch.einsum("pce,ce->pc", delta_PCE, gradient_CE)
    coupled_blocks = structure is Structure.blocks and not request.head.loss.separable
    if coupled_blocks:
        classes_CC1 = torch.eye(delta_PCE.shape[1])[..., None].to(delta_PCE)
        changes = [_changes(settings, request, delta_PCE * only_C1) for only_C1 in classes_CC1]  # [P, 1] or [P, C, E]
        response = torch.stack([r[:, c] if by_gradient else r[:, 0] for c, r in enumerate(changes)])
    else:
        response = _changes(settings, request, delta_PCE)
        if structure is Structure.blocks:
            response = response.transpose(0, 1)
    delta_KQS, slope_KQ = delta_PCE.transpose(0, 1), slope_PC.T
    if structure is Structure.dense:
        delta_KQS, slope_KQ = delta_PCE.reshape(1, delta_PCE.shape[0], -1), slope_PC.sum(1)[None]
        response = response.flatten(1)[None] if by_gradient else response.sum(1)[None]
    elif structure is Structure.shared and settings.per_class:
        delta_KQS = delta_PCE.reshape(1, -1, delta_PCE.shape[2])
        response, slope_KQ = response.flatten(0, 1)[None], slope_PC.reshape(1, -1)
    elif structure is Structure.shared:
        delta_KQS, response, slope_KQ = delta_PCE[None, :, 0], response.mean(1)[None], slope_PC.mean(1)[None]
    bound = None
    if settings.lower_bound is LowerBound.forget_share:
        bound = HessianObservation(request.hessian(structure), request.weight)
    return Observations(structure, delta_KQS, response, slope_KQ, request.weight, bound)


def _changes(settings: PsdFitSettings, request: ForgetRequest, delta_PCE: Tensor) -> Tensor:
    """Return changes of the loss ``[P, G]`` (G = C, or 1 for coupled classes) or of the gradient ``[P, C, E]``."""
    base_CE, rows, objective = request.head.parameters_CE, request.data(cache=True), request.head.objective()
    by_gradient = settings.measurement is Measurement.gradient
    evaluate = objective.gradients_at if by_gradient else objective.values_at
    at_base = evaluate(rows, base_CE[None])
    step = max(1, _CHUNK_ELEMENTS // (request.features_FD.shape[0] * base_CE.shape[0]))
    changes = []
    for chunk_PCE in delta_PCE.split(step):
        there = evaluate(rows, base_CE + chunk_PCE)
        if settings.pairs is Pairs.antithetic:
            back = evaluate(rows, base_CE - chunk_PCE)
            changes.append((there - back) / 2 if by_gradient else (there + back) / 2 - at_base)
        else:
            changes.append(there - at_base)
    return torch.cat(changes)
