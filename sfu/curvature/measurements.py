r"""Perturb the head, observe the forget loss or its gradient.

At :math:`w_i = w^* + \delta_i` one observes, on the forget set,

- ``loss``: :math:`\Delta J_i = J_f(w_i) - J_f(w^*)`, one number for each class, or one in all if the classes share a
  perturbation ("Towards Source-Free Machine Unlearning", CVPR 2025);
- ``gradient``: :math:`\nabla J_f(w_i) - \nabla J_f(w^*)`, which is :math:`H_f \delta_i` for the quadratic loss.

An antithetic pair averages the even part of what is seen at +d and -d, which cancels the loss's odd term.

Shapes: P perturbations, C classes, E = D (+ 1 with bias), Q observed vectors (P C, or P if shared), F forget rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sfu.errors import ConfigError
from sfu.heads.moments import Moments
from sfu.settings import CurvatureConfig, Measurement, Pairs
from sfu.unlearning.request import ForgetRequest

_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Observations:
    """What was seen of a set of forget rows; means over its rows, so that disjoint sets merge.

    Attributes:
        delta_QE: The perturbations, one row an observed vector (the same for every set).
        response: Loss changes ``[Q]`` or gradient changes ``[Q, E]``.
        slope_Q: ``g_f . d`` of each observed vector.
        moments: Second moments of the rows (for a bound that needs them).
    """

    delta_QE: Tensor
    response: Tensor
    slope_Q: Tensor
    moments: Moments

    @staticmethod
    def merge(parts: Sequence[Observations]) -> Observations:
        """Observations of the union of disjoint sets under the same perturbations."""
        moments = Moments.merge([part.moments for part in parts])
        weights = [part.moments.count / moments.count for part in parts]
        return Observations(
            parts[0].delta_QE,
            torch.stack([part.response * w for part, w in zip(parts, weights, strict=True)]).sum(0),
            torch.stack([part.slope_Q * w for part, w in zip(parts, weights, strict=True)]).sum(0),
            moments,
        )


def count_perturbations(config: CurvatureConfig, n_classes: int, width: int) -> int:
    """How many perturbations are drawn: ``curvature.perturbations``, or as many as can tell anything.

    Gradient changes are ``H d`` without noise, so E of them determine H; beyond 2 E (for conditioning) more change
    nothing but the bill.
    """
    if config.measurement is Measurement.loss:
        return config.perturbations
    enough = -(-2 * width // (n_classes if config.per_class else 1))
    return min(config.perturbations, 2 * enough if config.pairs is Pairs.antithetic else enough)


def draw_perturbations(config: CurvatureConfig, n_classes: int, width: int, generator: torch.Generator) -> Tensor:
    """Gaussian perturbations of scale ``curvature.scale``, ``[P, C, E]`` float64 on the CPU.

    Shared perturbations (``per_class=false``) repeat over C. Antithetic pairs are drawn once each: P // 2 rows.

    Raises:
        ConfigError: They would not fit in half of this machine's memory.
    """
    count = count_perturbations(config, n_classes, width)
    count = count // 2 if config.pairs is Pairs.antithetic else count
    classes = n_classes if config.per_class else 1
    vectors = count * classes
    needed, memory = 8 * vectors * width, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.measurement is Measurement.loss:
        needed += 30 * vectors**2  # the fit's matrices over pairs of measurements
    if needed > memory / 2:
        raise ConfigError(
            f"curvature.perturbations={config.perturbations} need {needed / 2**30:.0f} GiB for {classes} classes of "
            f"{width} parameters, and this machine has {memory / 2**30:.0f} GiB; use fewer, or "
            "curvature.per_class=false."
        )
    delta = torch.randn(count, classes, width, generator=generator, dtype=torch.float64) * config.scale
    return delta.expand(count, n_classes, width)


def observe(config: CurvatureConfig, request: ForgetRequest, delta_PCE: Tensor) -> Observations:
    """Observe the forget set of ``request`` at the heads perturbed by ``delta_PCE``.

    Losses and gradients are evaluated on the examples, in chunks of perturbations that bound memory.
    """
    head = request.head
    base_CE = head.parameters_CE
    n_classes, width = base_CE.shape
    loss, design, labels = head.loss(), request.design_FE, request.labels_F
    by_gradient = config.measurement is Measurement.gradient
    evaluate = loss.gradients if by_gradient else loss.values
    at_base = evaluate(design, labels, base_CE[None])
    step = max(1, _CHUNK_ELEMENTS // (design.shape[0] * n_classes))
    seen = []
    for chunk_PCE in delta_PCE.split(step):
        there = evaluate(design, labels, base_CE + chunk_PCE)
        if config.pairs is Pairs.antithetic:
            back = evaluate(design, labels, base_CE - chunk_PCE)
            seen.append((there - back) / 2 if by_gradient else (there + back) / 2 - at_base)
        else:
            seen.append(there - at_base)
    response = torch.cat(seen)
    gradient_CE = at_base[0] if by_gradient else request.forget_gradient()
    slope_PC = torch.einsum("pce,ce->pc", delta_PCE, gradient_CE)
    if config.per_class:
        delta_QE, response, slope_Q = delta_PCE.reshape(-1, width), response.flatten(0, 1), slope_PC.flatten()
    else:
        delta_QE, response, slope_Q = delta_PCE[:, 0], response.mean(1), slope_PC.mean(1)
    return Observations(delta_QE, response, slope_Q, request.moments())
