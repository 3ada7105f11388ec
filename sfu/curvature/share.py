r"""Predict what part of the squared distance to Retrained a Newton step removes, on a random forget set.

A step u removes :math:`2 \langle u, g\rangle - u^T H_r u` of the squared distance :math:`g^T H_r^{-1} g`. On a random
set, g is sampling noise whose covariance is proportional to the curvature, so both are traces over the retained
Hessian. The theory of random matrices gives these traces from the eigenvalues of the estimate. Let
:math:`\hat H = \hat S + l_2` be the estimate, S the curvature of which its rows are a sample, and
:math:`R = (\hat S + \lambda)^{-1}` for any ridge :math:`\lambda`. Then

.. math:: d(\lambda) = tr \, \hat S R = \sum_i \frac{\omega_i e}{1 + \omega_i e}, \qquad e(\lambda) = tr \, S R

defines e by leverages of the rows that are in proportion to known :math:`\omega_i`, which sum to 1. For n equal ones it
is :math:`d / (1 - d / n)`, as in generalised cross-validation. Three facts follow. Traces of S alone are those of the
estimate at another ridge: :math:`tr \, S (S + l_2)^{-1} = d(\lambda)` where :math:`\lambda e(\lambda) / d(\lambda) =
l_2`. The curvature of a step is :math:`tr \, R \hat S R S = (\lambda e)'`. So with :math:`\lambda = l_2 + \rho`, the
step :math:`c (\hat H + \rho)^{-1} g` removes the share

.. math:: \frac{2 c \, d(\lambda) - c^2 \bigl[ (\lambda e)' - l_2 d'(\lambda) \bigr]}{tr \, S (S + l_2)^{-1}}

If there are unlabelled rows among those of the estimate, g is still the noise of the forget rows alone, whose weight is
then a part of the whole. Retained rows are few, too: they cost one share of their number for each dimension of the
denominator.

The :math:`\omega_i` are the rows' own leverages, where one block serves all classes and there are more rows than
features. Elsewhere they are what a row adds to the trace, divided by its norm, because large rows are large in
directions in which others are large.

Sources: O. Ledoit and S. Peche, Eigenvectors of some large sample covariance matrix ensembles, 2011; E. Dobriban and
S. Wager, High-dimensional asymptotics of prediction: ridge regression and classification, 2018.

Shapes: K eigenvalues, N rows, B of a chunk, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sfu.curvature.cross_validation import FORGET, RETAINED, UNLABELLED, VIEWS, Sources
from sfu.curvature.shifts import SUBSET, subset
from sfu.curvature.source_fit import StepChoice
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.rows import Rows
from sfu.operators.base import DampedInverse
from sfu.operators.spectral import SpectralInverse
from sfu.request import ForgetRequest

_BINS = 256
_ROUNDING = 1e-11
"""Eigenvalues below this share of the largest are rounding."""
_LEAST, _FAR = 1e-9, 1e3
"""Ridges relative to l2 or the largest eigenvalue that stand for 0 and for infinity."""
_ALIKE, _TOO_STEEP = 3.0, 5.0
"""Rows are alike if none has this times the leverage of another. Beyond this slope of l2 over the ridge that stands for
it, a small error of the eigenvalues is a large one of the denominator."""
_BY_DIMENSIONS, _BY_ROWS, _NINE_IN_TEN = 3.0, 2.0, 1.645
"""Variance of the logit of the share, times the dimensions of the whole distance and times the number of forget rows,
and the half-width of the interval in standard deviations; ``scripts/coverage.py`` counts how often it is right."""


class PredictedShare(NamedTuple):
    """The share of the squared distance to Retrained that a step removes, and the interval it lies in 9 times in 10.

    At ``ridge`` in place of l2, traces of the estimate are those of the curvature of which its rows are a sample.
    """

    value: float
    interval: tuple[float, float]
    ridge: float


def predict_share(
    request: ForgetRequest, sources: Sources, choice: StepChoice, inverse: DampedInverse, rows: float
) -> PredictedShare | None:
    """Predict the share that a step of a linear head at its optimum removes, if the forget set is a random sample.

    ``inverse`` is that of the sources, mixed by the weights of ``choice``, and ``rows`` is how many rows of equal
    weight the forget rows count for. Of rows of earlier requests, only sums are known, so these rows stand for them,
    too. ``None`` if the eigenvalues are not known, if the rows are too few to tell the
    curvature that l2 leaves undamped, if views of the forget rows are mixed in, or if there are unlabelled rows and the
    head keeps no moments of its training rows with which they can be compared.
    """
    head = request.head
    sets, eigenvalues_K = _sets(request, dict(zip(sources.rows, choice.weights, strict=True))), inverse.eigenvalues
    compared = not request.unlabelled or head.kept.projected_2K is not None
    if sets is None or eigenvalues_K is None or not compared:
        return None
    if len(sets) > 1 and not isinstance(inverse, SpectralInverse):  # the eigenvalues are those of other weights
        return None
    data_K = (eigenvalues_K - head.l2).clamp(min=0).double().cpu().numpy()
    data_K = data_K[data_K > _ROUNDING * data_K.max()]
    curvatures = [(_curvatures(head, part, n_rows, inverse, choice), weight) for part, n_rows, weight in sets]
    count = 1 / sum(weight**2 / n_rows for _, n_rows, weight in sets)
    if choice.scale == 0 or not len(data_K) or not all(len(sizes) for (sizes, _), _ in curvatures):
        return None
    width = float(head.regularized_E.sum())
    law = _Law(data_K, head.n_classes * width / len(eigenvalues_K), curvatures, count)
    most = head.n_classes * (width + head.objective().unseen)
    return law.predict(choice, head.l2, request.step_ratio, rows, most)


def _sets(request: ForgetRequest, weights: dict[str, float]) -> list[tuple[Rows, int, float]] | None:
    """Return the forget rows and the unlabelled rows, each set with how many rows it stands for, and its weight.

    ``None`` if there are others.
    """
    if weights.get(VIEWS, 0.0) > 0:
        return None
    own, retained, head = weights[FORGET], weights.get(RETAINED, 0.0), request.head
    own -= retained * request.step_ratio
    unlabelled = [weight for name, weight in weights.items() if name.startswith(UNLABELLED)]
    total = sum(len(rows_UD) for rows_UD in request.unlabelled)
    sets = [(request.data(), request.count, own)]
    for rows_UD, weight in zip(request.unlabelled, unlabelled, strict=True):
        weight += retained * head.total_weight / request.retained_weight * len(rows_UD) / total
        if weight > 0:
            sets.append((request.unlabelled_rows(rows_UD), len(rows_UD), weight))
    return sets if own >= 0 else None


def _curvatures(
    head: Head, rows: Rows, n_rows: int, inverse: DampedInverse, choice: StepChoice
) -> tuple[np.ndarray, np.ndarray]:
    """Return leverages of each output of a subset of the rows, up to a factor, and how many outputs each stands for.

    All rows together stand for ``n_rows``. A rank one that is subtracted takes one of its C outputs from a row.
    """
    index = subset(rows.count, SUBSET).to(rows.labels_N.device)
    one_block = head.layout is Layout.shared and isinstance(inverse, SpectralInverse)
    solved = one_block and not choice.is_safe and n_rows > rows.width  # fewer rows are all of high leverage
    part, stands_for, sizes, counts = rows.batch(index), n_rows / len(index), [], []
    for chunk in part.linear_chunks():
        outputs_BC = chunk.outputs(head.parameters_CE)
        hessian = head.loss.curvature(outputs_BC, chunk.labels_B)
        diagonal_BC, left = hessian.diagonal.expand_as(outputs_BC), 1.0
        if hessian.rank_one is not None and head.n_classes > 1:
            diagonal_BC, left = diagonal_BC - hessian.rank_one.square(), 1 - 1 / head.n_classes
        size_B = chunk.squares_of_rows().sqrt()
        if solved:
            size_B = (inverse.solve(chunk.design_BE, choice.rho) * chunk.design_BE).sum(1) - float(head.bias)
        size_B = size_B * chunk.share_B / stands_for
        sizes.append((diagonal_BC.clamp(min=0) / left * size_B[:, None]).flatten().double().cpu())
        counts.append(torch.full_like(sizes[-1], left * stands_for))
    return _in_bins(torch.cat(sizes).numpy(), torch.cat(counts).numpy())


def _in_bins(sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Replace sizes by means of neighbours, and leave out those that are 0."""
    order = np.argsort(sizes)
    order = order[sizes[order] > 0]
    sizes, counts = sizes[order], counts[order]
    if len(sizes) <= _BINS:
        return sizes, counts
    starts = np.linspace(0, len(sizes), _BINS + 1).astype(int)[:-1]
    together = np.add.reduceat(counts, starts)
    return np.add.reduceat(sizes * counts, starts) / together, together


class _Law:
    """The law that the module describes, for one estimate; y is 1 / e."""

    def __init__(
        self,
        eigenvalues_K: np.ndarray,
        repeats: float,
        sets: Sequence[tuple[tuple[np.ndarray, np.ndarray], float]],
        count: float,
    ) -> None:
        """Take the eigenvalues without l2, how often each occurs, the sizes and counts of sets of rows with the sets'
        weights, and the number of rows of equal weight.
        """
        self._values, self._repeats, self._count = eigenvalues_K, repeats, count
        total = sum(weight * float(sizes @ counts) for (sizes, counts), weight in sets)
        self._sizes = np.concatenate([weight / total * sizes for (sizes, _), weight in sets])
        self._counts = np.concatenate([counts for (_, counts), _ in sets])
        self._sizes, self._counts = _in_bins(self._sizes, self._counts)
        (sizes, self._own_counts), weight = sets[0]
        own = float(sizes @ self._own_counts)
        self._own, self._part = sizes / own, weight / total * own

    def _dimensions(self, ridge: float) -> tuple[float, float]:
        """Return d at a ridge, and how fast it falls there as the ridge grows."""
        inverse = 1 / (self._values + ridge)
        return self._repeats * float(self._values @ inverse), self._repeats * float(self._values @ inverse**2)

    def _inverse_trace(self, dimensions: float) -> float:
        """Return 1 / e for a d: negative if d exceeds the number of outputs, as it does for some negative ridges."""
        from scipy.optimize import brentq

        def excess(y: float) -> float:
            return float((self._counts * self._sizes / (y + self._sizes)).sum()) - dimensions

        low = 0.0 if dimensions < self._counts.sum() else -float(self._sizes.min()) * (1 - 1e-9)
        return float(low if excess(low) <= 0 else brentq(excess, low, 1 / dimensions, xtol=1e-300, rtol=1e-12))

    def _fall(self, y: float) -> float:
        """Return by how much d falls if 1 / e = y rises."""
        return float((self._counts * self._sizes / (y + self._sizes) ** 2).sum())

    def _resolved(self, l2: float) -> float | None:
        """Return the ridge at which the traces are those of S at l2; ``None`` if the rows are too few to tell it.

        It is negative where there are fewer rows than features; then only rows that are alike tell it.
        """
        from scipy.optimize import brentq

        def excess(ridge: float) -> float:
            dimensions, _ = self._dimensions(ridge)
            return ridge - l2 * dimensions * self._inverse_trace(dimensions)

        low, high = _LEAST * l2, l2
        if excess(low) >= 0:
            least, rank = float(self._values.min()), self._repeats * len(self._values)
            if rank < self._counts.sum() * (1 - 1e-6) or self._sizes.max() > _ALIKE * self._sizes.min():
                return None
            low, high = -least * (1 - 1e-4), -_LEAST * min(l2, least)
            if not excess(low) > 0 > excess(high):
                return None
        ridge = float(brentq(excess, low, high, xtol=1e-300, rtol=1e-10))
        dimensions, falls = self._dimensions(ridge)
        y = self._inverse_trace(dimensions)
        steepness = l2 * (1 / ridge + falls / dimensions - falls / self._fall(y) / y)
        return ridge if steepness < _TOO_STEEP else None

    def predict(
        self, choice: StepChoice, l2: float, step_ratio: float, rows: float, most: float
    ) -> PredictedShare | None:
        """Predict the share; ``step_ratio`` is V_f / V_r, and the denominator at most ``most``."""
        largest = float(self._values.max())
        l2, scale = max(l2, _LEAST * largest), choice.scale
        ridge = l2 + choice.rho
        if choice.is_safe:  # c g is the limit of c ridge (H + ridge)^-1 g
            ridge = _FAR * largest
            scale *= ridge
        resolved, (dimensions, falls) = self._resolved(l2), self._dimensions(ridge)
        y = self._inverse_trace(dimensions)
        if resolved is None or y <= 0:
            return None
        rise = falls / self._fall(y)  # of y with the ridge
        weights = self._own_counts * self._own / (y + self._part * self._own)
        along, spread = float(weights.sum()), float((weights / (y + self._part * self._own)).sum())
        curved = (1 / y - ridge * rise / y**2) * spread / self._fall(y)
        whole, _ = self._dimensions(resolved)
        removed = (2 * scale * along - scale**2 * (curved + l2 * spread * rise)) / whole
        few = whole * step_ratio * float(self._own_counts @ self._own**2)
        share = min(removed, 1 - 1 / (2 * self._count)) * (1 - few)  # so few rows never tell all of the curvature
        if not 0 < share < 1 or whole > most:
            return None
        variance = _BY_DIMENSIONS / whole + _BY_ROWS / rows
        middle, half = math.log(share / (1 - share)) + variance / 2, _NINE_IN_TEN * math.sqrt(variance)
        return PredictedShare(share, (_logistic(middle - half), _logistic(middle + half)), resolved)


def _logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
