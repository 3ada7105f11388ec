r"""Weigh all sources of curvature, and choose damping and length of the step, by one fit to held-out folds.

With weights a_j that sum to 1, the family of steps is

.. math:: u = c \, M^{-1} g_f, \qquad M = \sum_j a_j H_j + \rho R

where each :math:`H_j` includes the regulariser, so that l2 always counts once. The error of a step in the
retain-Hessian norm is :math:`u^T H_r u - 2 u^T g + const`. With everything of a fold k made without its rows, the best
c and its gain are

.. math:: c = \frac{num}{den}, \quad gain = \frac{num^2}{den}, \qquad
          num = \sum_k \langle u_k, g_{-k}\rangle, \quad den = \sum_k \langle u_k, \tilde H_k u_k\rangle

The start is the best of a wide grid of rho for a few choices of weights. With more than one source, L-BFGS then moves
the logarithms of weights and rho, unless each product is a pass through a network (linearised heads). For
:math:`v_k = M_{-k}^{-1} \tilde H_k u_k`, a change dM of M changes num by :math:`-\langle u_k, dM u_k\rangle` and den by
:math:`-2\langle v_k, dM u_k\rangle`.

How far the held-out rows can be relied on decides the curvature that scores a step (:class:`Caution`),

.. math:: \tilde H_k = (1 - \delta) \bigl((1 - \phi)\, s\, H_k + \phi\, r\bigr) + \delta\, (\beta + l_2)

where :math:`2\beta` bounds the curvature of any retained data. What a few rows do not show is more of the same kind:
:math:`r = (2 g^T H g / g^T g)^{1-\phi} (\beta + l_2)^\phi` goes from twice the curvature that the held-out rows show
along their gradient to the bound. At delta = 1 the best M is a multiple of the identity, and the step
:math:`g_f / (\beta + l_2)` brings a quadratic head nearer to Retrained whatever the forget set.

At the optimum the forget gradient is sampling noise, of which K - 1 folds have more (squared) than the whole set, by a
known factor, so the predicted gain is scaled down by it. The part of the gradient that is not noise is not scaled: what
an early stop left of the training gradient, and the -b/V of objective perturbation.

Shapes: K folds, J sources, M values of rho, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sfu.curvature.cross_validation import FORGET, RETAINED, VIEWS, Fold, Sources, Validation
from sfu.lazy import torch
from sfu.operators.galerkin import refine, solve_together
from sfu.operators.products import ProductOperator

_GRID_POINTS = 81
_GRID_DECADES = (-6.0, 4.0)  # of the mean eigenvalue
_REFINEMENTS = 30
_NO_SIGNAL = 1e-6  # of the gradient; it counts by its square
_LITTLE = 0.05  # weight of a source that a start leaves out, so that L-BFGS can bring it in
_LEAST = 0.5
"""At least this share of the training rows' curvature, along a step, is taken to be that of the retained rows."""
_ITERATIONS = 40
_GAINED = 1e-6
"""L-BFGS ends when the logarithm of the gain rises by less."""


class Caution(NamedTuple):
    """How far to rely on held-out rows.

    Attributes:
        share: delta, the share of the curvature that they cannot show because they are of another kind.
        few: phi, the share that they do not show because they are few.
        bound: beta, half of an upper bound of the largest eigenvalue of the retained rows' Hessian.
        stretch: s, what rows smaller than the retained ones are stretched by.
        along: r; see :meth:`of`.
        doubts: Share by which the gain with each set of unlabelled rows must exceed that without it, for the set to be
            a source.
    """

    share: float = 0.0
    few: float = 0.0
    bound: float = math.inf
    stretch: float = 1.0
    along: float = 0.0
    doubts: tuple[float, ...] = ()

    def of(self, folds: Sequence[Fold], l2: float) -> Caution:
        """Return it with the r of these folds, nearer to beta + l2 the fewer the rows are."""
        square = sum(float(fold.gradient_CE.square().sum()) for fold in folds)
        if self.few == 0 or square == 0:
            return self
        curved = sum(float(fold.held_out.quadratic(fold.gradient_CE)) for fold in folds)
        most = self.bound + l2
        seen = min(most, max(0.0, 2 * self.stretch * curved / square))
        return self._replace(along=seen ** (1 - self.few) * most**self.few)

    def curved(self, held_out: Any, square: Any, l2: float) -> Any:
        """Return ``u^T H~ u`` from ``u^T H u`` and ``|u|^2``, or ``H~ u`` from ``H u`` and u."""
        seen = (1 - self.few) * self.stretch * held_out + self.few * self.along * square
        return seen if self.share == 0 else (1 - self.share) * seen + self.share * (self.bound + l2) * square


@dataclass(frozen=True)
class StepChoice:
    """How to damp (rho) and scale (c) the step, the weights of the sources, and its expected gain.

    An infinite rho stands for the step ``c g``, without any curvature.

    The gain is the reduction of the squared distance to Retrained in the retain-Hessian norm, for a step of ratio
    V_f / V_r = 1; negative if the step is expected to do harm.
    """

    rho: float
    scale: float
    gain: float
    weights: tuple[float, ...] = (1.0,)

    @property
    def is_safe(self) -> bool:
        """Whether it is the step ``c g`` that no retained data can turn into harm."""
        return math.isinf(self.rho)


def noise_factor(n_folds: int, forget_share: float) -> float:
    """Return the squared sampling noise of the whole forget gradient over that of K - 1 folds.

    ``forget_share`` is N_f / N; the rows are drawn without replacement.
    """
    return (n_folds - 1) * (1 - forget_share) / (n_folds - forget_share * (n_folds - 1))


def pooled_weights(sources: Sources) -> tuple[float, ...]:
    """Return weights in proportion to the rows of each source."""
    total = sum(sources.rows.values())
    return tuple(rows / total for rows in sources.rows.values())


def choose_step(validation: Validation, noise: float, caution: Caution, l2: float) -> StepChoice:
    """Return weights, rho and c of the smallest error on held-out folds; ``noise`` is :func:`noise_factor`."""
    folds = validation.folds
    if validation.trust == 1:  # the forget rows are held out nowhere, so they show nothing along their gradient
        caution = caution._replace(share=max(caution.share, caution.few), few=0.0)
    caution = caution.of(folds, l2)
    names = [name for name in folds[0].sources.rows if name not in (FORGET, VIEWS, RETAINED)]
    best = _beyond_doubt(folds, caution, l2, validation.trust, dict(zip(names, caution.doubts, strict=False)))
    if best.gain == 0:  # the gradient is zero
        return best
    return replace(best, gain=expected_gain(folds, best, noise))


def _beyond_doubt(
    folds: Sequence[Fold], caution: Caution, l2: float, trust: float, doubts: dict[str, float]
) -> StepChoice:
    """Return the best choice in which each source in doubt gains clearly more than none."""
    best, most = _best(folds, caution, l2, trust), max(doubts.values(), default=0.0)
    if most == 0 or best.gain == 0:
        return best
    left = {name: doubt for name, doubt in doubts.items() if doubt < most}
    dropped = {*doubts, RETAINED} - {*left, *([RETAINED] if left else [])}
    fewer = [replace(fold, sources=fold.sources.without(dropped)) for fold in folds]
    other = _beyond_doubt(fewer, caution, l2, trust if left else 0.0, left)
    if best.gain >= (1 + most) * other.gain:
        return best
    weights = dict(zip(fewer[0].sources.rows, other.weights, strict=True))
    return replace(other, weights=tuple(weights.get(name, 0.0) for name in folds[0].sources.rows))


def _best(folds: Sequence[Fold], caution: Caution, l2: float, trust: float) -> StepChoice:
    sources = folds[0].sources
    found = [_on_grid(folds, weights, caution, l2) for weights in _starts(sources, trust)]
    best = max(found, key=lambda one: one.gain)
    if best.gain == 0:
        return best
    first = sources.operators[FORGET]
    costly = isinstance(first, ProductOperator) and first.shared
    if len(sources.rows) > 1 and not costly:
        best = _refine(folds, best, caution, l2)
    return max(best, _safe(folds, best, caution, l2), key=lambda one: one.gain)


def expected_gain(folds: Sequence[Fold], choice: StepChoice, noise: float, *, floor: float = 0.0) -> float:
    """Return ``2 c <u, g> - c^2 <u, H u>``, with its sampling noise scaled to that of the whole set."""
    whole = signal = 0.0
    for fold in folds:
        inverse = fold.sources.damped(choice.weights)
        for _ in range(0 if choice.is_safe else _REFINEMENTS):
            if not refine([inverse], [fold.gradient_CE], choice.rho):
                break
        for of_signal, right_CE in ((False, fold.gradient_CE), (True, fold.signal_CE)):
            if of_signal and float(right_CE.norm()) <= _NO_SIGNAL * float(fold.gradient_CE.norm()):
                continue
            if choice.is_safe:
                along, curved = right_CE.square().sum()[None], fold.held_out.quadratic(right_CE)[None]
            else:
                along, curved, _ = inverse.scores(right_CE, [choice.rho], fold.held_out, floor=floor)
            gain = float(2 * choice.scale * along[0] - choice.scale**2 * curved[0]) / len(folds)
            whole, signal = (whole, signal + gain) if of_signal else (whole + gain, signal)
    return noise * whole + (1 - noise) * signal


def _starts(sources: Sources, trust: float) -> list[tuple[float, ...]]:
    """Return weights to start from: all rows alike, the forget rows alone, and unlabelled rows that are trusted."""
    names, starts = list(sources.rows), [pooled_weights(sources)]
    if len(names) > 1:
        starts.append(tuple(float(name == FORGET) for name in names))
    if trust > 0:
        further = [RETAINED] if RETAINED in names else []
        for alone in ([name for name in names if name not in (FORGET, VIEWS, RETAINED)], further):
            rows = [max(sources.rows[name], 1.0) if name in alone else 0.0 for name in names]
            if sum(rows) > 0:
                starts.append(tuple(row / sum(rows) for row in rows))
    return starts


def _on_grid(
    folds: Sequence[Fold], weights: tuple[float, ...], caution: Caution, l2: float, refinements: int = _REFINEMENTS
) -> StepChoice:
    """Return the best rho of a wide grid for given weights; its gain is that of the scores, noise and all.

    Inverses that are approximate are refined at the best rho, until that changes nothing.
    """
    inverses = [fold.sources.damped(weights) for fold in folds]
    mean = sum(inverse.mean_eigenvalue for inverse in inverses) / len(folds)
    rhos = (mean * torch.logspace(*_GRID_DECADES, _GRID_POINTS, dtype=torch.float64)).tolist()
    if all(inverse.invertible for inverse in inverses):
        rhos = [0.0, *rhos]
    along_M = torch.zeros(len(rhos), dtype=torch.float64)
    held_M, least_M, square_M = (torch.zeros_like(along_M) for _ in range(3))
    for inverse, fold in zip(inverses, folds, strict=True):
        scores = inverse.scores(fold.gradient_CE, rhos, fold.held_out)
        for total_M, score in zip((along_M, held_M, square_M), scores, strict=True):
            total_M += score.double().cpu() / len(folds)
        if fold.training is not None:
            least_M += inverse.scores(fold.gradient_CE, rhos, fold.training)[1].double().cpu() / len(folds)
    curved_M = caution.curved(torch.maximum(held_M, _LEAST * least_M), square_M, l2)
    usable_M = (curved_M > 0) & (along_M > 0)
    if not bool(usable_M.any()):
        return StepChoice(rhos[-1], 0.0, 0.0, weights)
    gains_M = torch.where(usable_M, along_M.square() / curved_M, -1.0)
    best = int(gains_M.argmax())
    if refinements > 0 and refine(inverses, [fold.gradient_CE for fold in folds], rhos[best]):
        return _on_grid(folds, weights, caution, l2, refinements - 1)
    return StepChoice(rhos[best], float(along_M[best] / curved_M[best]), float(gains_M[best]), weights)


def _safe(folds: Sequence[Fold], other: StepChoice, caution: Caution, l2: float) -> StepChoice:
    """Return the step ``c g``, scored like the others; it is the best if nothing is seen (delta = 1)."""
    square = sum(float(fold.gradient_CE.square().sum()) for fold in folds) / len(folds)
    held_out, least = (
        sum(float(shown.quadratic(fold.gradient_CE)) for fold in folds if (shown := getattr(fold, of)) is not None)
        for of in ("held_out", "training")
    )
    along, curved = square, caution.curved(max(held_out, _LEAST * least) / len(folds), square, l2)
    if not curved > 0:
        return StepChoice(math.inf, 0.0, 0.0, other.weights)
    return StepChoice(math.inf, along / curved, along**2 / curved, other.weights)


def _refine(folds: Sequence[Fold], start: StepChoice, caution: Caution, l2: float) -> StepChoice:
    """Move weights and rho by L-BFGS."""
    from scipy.optimize import minimize

    mean = folds[0].sources.damped(start.weights).mean_eigenvalue
    unit = max(start.rho, 10 ** _GRID_DECADES[0] * mean)
    logits = np.log(np.maximum(start.weights, _LITTLE))
    best = start

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best
        weights, rho = _softmax(point[:-1]), unit * math.exp(point[-1])
        along, curved, along_by, curved_by = _slopes(folds, weights, rho, caution, l2)
        if not (along > 0 and curved > 0):
            return math.inf, np.zeros_like(point)
        if (gain := along**2 / curved) > best.gain:
            best = StepChoice(rho, along / curved, gain, tuple(weights))
        by = -(2 * along_by / along - curved_by / curved)  # of -log gain, in weights and rho
        return -math.log(gain), np.append(weights * (by[:-1] - weights @ by[:-1]), rho * by[-1])

    minimize(
        loss, np.append(logits, math.log(max(start.rho, unit) / unit)), jac=True, method="L-BFGS-B",
        bounds=[(-14.0, 14.0)] * len(logits) + [(-25.0, 25.0)], options={"maxiter": _ITERATIONS, "ftol": _GAINED},
    )  # fmt: skip
    return best


def _slopes(
    folds: Sequence[Fold], weights: np.ndarray, rho: float, caution: Caution, l2: float
) -> tuple[float, float, np.ndarray, np.ndarray]:
    """Return num and den, and their derivatives in the weights and rho; means over folds."""
    mixed = [fold.sources.mixed(list(weights)) for fold in folds]
    steps = solve_together(mixed, [fold.gradient_CE for fold in folds], rho)
    images = [fold.held_out.matmul(u_CE) for fold, u_CE in zip(folds, steps, strict=True)]
    held_out = [(image_CE * u_CE).sum() for image_CE, u_CE in zip(images, steps, strict=True)]
    least = [fold.training.matmul(u_CE) for fold, u_CE in zip(folds, steps, strict=True) if fold.training is not None]
    if least and sum(held_out) < _LEAST * sum((one * u_CE).sum() for one, u_CE in zip(least, steps, strict=True)):
        images = [_LEAST * image_CE for image_CE in least]
    images = [caution.curved(image_CE, u_CE, l2) for image_CE, u_CE in zip(images, steps, strict=True)]
    solved = solve_together(mixed, images, rho)
    along = curved = 0.0
    along_by, curved_by = np.zeros(len(weights) + 1), np.zeros(len(weights) + 1)
    for fold, operator, u_CE, image_CE, v_CE in zip(folds, mixed, steps, images, solved, strict=True):
        along += float((u_CE * fold.gradient_CE).sum()) / len(folds)
        curved += float((u_CE * image_CE).sum()) / len(folds)
        changes = [source.matmul(u_CE) for source in fold.sources.operators.values()]
        for j, changed_CE in enumerate([*changes, operator.regularized_E * u_CE]):
            along_by[j] -= float((u_CE * changed_CE).sum()) / len(folds)
            curved_by[j] -= 2 * float((v_CE * changed_CE).sum()) / len(folds)
    return along, curved, along_by, curved_by


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max())
    return raised / raised.sum()
