r"""Compare a request with random sets of training rows: what its gradient shows, and what its gradient does not.

Every test needs only the request, a few numbers kept with the head, or unlabelled rows; the ones that lack their data
say so. A finding has a p-value, where there is one, and an effect: how large the deviation is, once what random sets
show on average is taken off. A finding is an alarm if both are beyond their limits, since a large request makes
deviations significant that are too small to matter.

Shapes: F forget rows, U unlabelled rows, N training rows, M rows of a subset, D features, E = D (+ 1 with bias), C
classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sfu.curvature.folds import row_weights
from sfu.curvature.near_duplicates import effective_rows, near_groups
from sfu.curvature.sampling import sampling_ratio
from sfu.curvature.shifts import FEWEST, ROUNDING, SUBSET, compare_means, moments, p_value, subset
from sfu.errors import DataError
from sfu.heads.projections import DIRECTIONS, projected
from sfu.lazy import torch
from sfu.losses.gram import add_gram
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor

FALSE_ALARMS = 1e-3
"""Nominal probability that any test raises an alarm on a random set, shared equally by the tests that can be run.
Measured: below 1 %, since the tails of real rows are heavier than those of the distributions that are matched."""
_SURE = (0.005, 1e-4)
"""Between these p-values a shift begins to count, and unlabelled rows take the place of the forget rows."""
_LEAST_EFFECT = {"gradient": 0.01, "mean": 0.01, "drift": 0.01, "classes": 0.02, "norms": 0.05}
_TANGENT_ROWS, _TANGENT_NUMBERS = 64, 1 << 26  # at most so many row gradients of a linearised head, and numbers in them
_SPECTRUM = 2048  # a random subset of so many rows tells the effective dimension
_DRAWS, _DRAWN = 9999, 1 << 25  # random sets whose classes are drawn, and numbers in them
_FEW_ROWS = 20
_MANY = 2.0  # retained rows for each effective dimension; at 2, their curvature along a step is half as large again


@dataclass(frozen=True)
class Finding:
    """What one test found.

    Attributes:
        name: Name of the test.
        value: The number that the reason states; ``None`` if the test could not be run.
        p: Probability of so large a deviation for a random set; ``None`` for findings that are no matter of chance.
        effect: Size of the deviation. For ``gradient``, ``mean`` and ``drift``: the squared shift, in units of the
            variance of a row (summed over dimensions). For ``classes``: the total variation distance of the shares. For
            ``norms``: the relative difference of the mean squared norms. What random sets show on average is taken off
            these, down to 0. For ``weights``: the relative difference of the mean weights. ``None`` otherwise.
        alarm: Whether the reader should be told.
        reason: What was found, or why the test could not be run: a clause for a note.
        at_most: Of the drift, the largest effect that the rows do not rule out; the fewer they are, the larger.
    """

    name: str
    value: float | None
    p: float | None
    effect: float | None
    alarm: bool
    reason: str
    at_most: float | None = None

    @property
    def significance(self) -> float:
        """0 for p-values that random sets have, 1 for those that they almost never have, and something between."""
        if self.p is None:
            return 0.0
        doubtful, sure = (math.log(level) for level in _SURE)
        return min(1.0, max(0.0, (math.log(max(self.p, 1e-300)) - doubtful) / (sure - doubtful)))


@dataclass(frozen=True)
class Evidence:
    """All findings on a request.

    Attributes:
        findings: One for each test, those that could not be run included.
        effective_rows: Number of rows of equal weight, none near another, whose mean would scatter as much as that of
            the forget rows.
        groups_F: The groups of near-duplicates among them (:func:`sfu.curvature.near_duplicates.near_groups`).
    """

    findings: tuple[Finding, ...]
    effective_rows: float
    groups_F: Tensor = field(repr=False, compare=False)

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The findings that are alarms."""
        return tuple(finding for finding in self.findings if finding.alarm)

    def __getitem__(self, name: str) -> Finding:
        """Return the (first) finding of a test by its name."""
        return self.each(name)[0]

    def each(self, name: str) -> tuple[Finding, ...]:
        """Return the findings of a test; one for each set of unlabelled rows, if it is about these."""
        return tuple(finding for finding in self.findings if finding.name == name)


def examine(
    request: ForgetRequest,
    unlabelled: Sequence[Tensor] = (),
    *,
    shares_C: Tensor | None = None,
    mean_D: Tensor | None = None,
    projected_2K: Tensor | None = None,
) -> Evidence:
    """Run every test that the data allow: ``gradient``, ``mean``, ``classes``, ``norms``, ``drift``, ``duplicates``,
    ``weights`` and ``few_retained``.

    Args:
        request: The request, without views as further rows.
        unlabelled: Sets ``[U, D]`` of rows like the training rows, such as the model's traffic, tested one by one.
        shares_C: Share of every class among the training rows, as kept with the head.
        mean_D: Mean of the training rows' features, as kept with the head.
        projected_2K: Moments of their projections (:mod:`sfu.heads.projections`), as kept with the head.

    Raises:
        DataError: The unlabelled rows, the shares, the mean or the moments do not fit the head.
    """
    features_FD = request.features_FD
    numbers = [""] if len(unlabelled) == 1 else [f" of set {n}" for n in range(1, len(unlabelled) + 1)]
    names = [f"the unlabelled rows{number}" for number in numbers]
    like = partial(_like, shape=(-1, features_FD.shape[1]), like=features_FD)
    sets = [(name, like(name, rows_UD)) for name, rows_UD in zip(names, unlabelled, strict=True)] or [("", None)]
    shares_C = _like("the class shares", shares_C, (request.head.n_classes,), features_FD)
    mean_D = _like("the mean of the training features", mean_D, (features_FD.shape[1],), features_FD)
    projected_2K = _like("the projected moments", projected_2K, (2, DIRECTIONS), features_FD)
    weights_F, groups_F = row_weights(request), near_groups(features_FD, mean_D)
    tests = [
        _gradient(request, effective_rows(weights_F)),
        *(_mean(request, mean_D, *one) for one in (sets if mean_D is None else sets[:1])),
        _classes(request, shares_C),
        *(_norms(features_FD, *one) for one in sets),
        *(_drift(request, *one, mean_D, projected_2K) for one in sets),
    ]
    run = sum(test.p is not None for test in tests)
    distinct = effective_rows(torch.ones_like(weights_F), groups_F)
    others = [_duplicates(distinct, len(weights_F)), _weights(request, weights_F), _few_retained(request)]
    findings = (*(test.finding(FALSE_ALARMS / max(run, 1)) for test in tests), *others)
    return Evidence(findings, effective_rows(weights_F, groups_F), groups_F)


def compare_gradient(request: ForgetRequest) -> Finding:
    """Run the test ``gradient`` alone, as if no other could be run."""
    return _gradient(request, effective_rows(row_weights(request))).finding(FALSE_ALARMS)


class _Test(NamedTuple):
    """A test before it is known how many others could be run."""

    name: str
    reason: str
    value: float | None = None
    p: float | None = None
    effect: float | None = None
    smallest_p: float = 0.0  # that the test can give
    at_most: float | None = None

    def finding(self, level: float) -> Finding:
        significant = self.p is not None and self.p <= max(level, self.smallest_p)
        alarm = significant and self.effect is not None and self.effect >= _LEAST_EFFECT[self.name]
        return Finding(self.name, self.value, self.p, self.effect, alarm, self.reason, self.at_most)


def _like(what: str, given: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Return a tensor on the device of the features.

    Raises:
        DataError: It has another shape, no rows, or values that are not finite.
    """
    if given is None:
        return None
    fits = given.ndim == len(shape) and given.shape[-1] == shape[-1] and given.numel() > 0
    if not fits or not bool(torch.isfinite(given).all()):
        wanted = str(list(shape)).replace("-1", "rows")
        raise DataError(
            f"{what} must be finite numbers of shape {wanted}, but their shape is {list(given.shape)} or a value is "
            "not finite. Give those of the data the head was trained on."
        )
    return given.detach().to(like.device)


def _gradient(request: ForgetRequest, effective: float) -> _Test:
    ratio = sampling_ratio(request)
    if ratio is None:
        return _Test("gradient", "a single row, or rows without a gradient, cannot be compared with the training set")
    reason = _deviates("the gradient of the forget rows", "the training gradient", ratio)
    if ratio == math.inf:
        return _Test("gradient", reason, ratio, 0.0, math.inf)
    spread = moments(_gradient_gram(request), request.head.parameters_CE.numel())
    p = None if spread is None else p_value(ratio, spread, request.n_forget * spread.freedom)
    left = 1 - request.n_forget / request.head.n_train
    return _Test("gradient", reason, ratio, p, max(0.0, ratio - 1) * left / effective)


def _gradient_gram(request: ForgetRequest) -> Tensor:
    """Return inner products of weighted row gradients of a subset, centred."""
    head = request.head
    linear = head.feature_weights_CD is not None
    most = SUBSET if linear else max(FEWEST, min(_TANGENT_ROWS, _TANGENT_NUMBERS // head.parameters_CE.numel()))
    index = subset(request.n_forget, most)
    part = request.rows(index.to(request.labels_F.device))
    if linear:
        chunks = list(part.data().linear_chunks())
        outputs = [chunk.outputs(head.parameters_CE) for chunk in chunks]
        slopes = [head.loss.slopes(out_BC, chunk.labels_B) for out_BC, chunk in zip(outputs, chunks, strict=True)]
        slopes_MC, design_ME = torch.cat(slopes), torch.cat([chunk.design_BE for chunk in chunks])
        gram_MM = (slopes_MC @ slopes_MC.T) * (design_ME @ design_ME.T)
    else:
        rows_MP = torch.stack([_row_gradient(request, int(row)) for row in index])
        gram_MM = rows_MP @ rows_MP.T
    weights_M = part.data().weights_N
    share_M = gram_MM.new_full((len(gram_MM),), 1 / len(gram_MM))
    if weights_M is not None:
        share_M = (weights_M / weights_M.sum()).to(gram_MM)
    across_M = gram_MM @ share_M
    centred_MM = gram_MM - across_M - across_M[:, None] + share_M @ across_M
    return centred_MM * torch.outer(share_M, share_M)


def _row_gradient(request: ForgetRequest, row: int) -> Tensor:
    (chunk,) = request.rows(torch.tensor([row], device=request.labels_F.device)).data().chunks()
    slope_BC = request.head.loss.slopes(chunk.outputs(request.head.parameters_CE), chunk.labels_B)
    return chunk.pull(slope_BC).flatten()


def _deviates(what: str, whence: str, ratio: float) -> str:
    times = "which is infinitely more than" if ratio == math.inf else f"{ratio:.2g} times what"
    return f"{what} deviates from {whence} by {times} sampling explains (squared)"


def _mean(request: ForgetRequest, mean_D: Tensor | None, name: str, unlabelled_UD: Tensor | None) -> _Test:
    features_FD, count = request.features_FD, request.n_forget
    if mean_D is not None:
        found = compare_means([features_FD], [(1 - count / request.head.n_train) / count], mean_D)
        whence = "that of the training set"
    elif unlabelled_UD is not None:
        found = compare_means([features_FD, unlabelled_UD], [1 / count, 1 / len(unlabelled_UD)])
        whence = f"that of {name}"
    else:
        return _Test("mean", "the mean of the forget features has nothing to be compared with")
    if found is None:
        return _Test("mean", f"fewer than {FEWEST} rows are too few to compare means of features")
    reason = _deviates("the mean of the forget features", whence, found.ratio)
    return _Test("mean", reason, found.ratio, found.p, found.effect)


def _drift(
    request: ForgetRequest, name: str, unlabelled_UD: Tensor | None, mean_D: Tensor | None, projected_2K: Tensor | None
) -> _Test:
    """Compare a set of unlabelled rows with the training rows, by the moments of these that were kept."""
    if unlabelled_UD is None:
        return _Test("drift", "there are no unlabelled rows to compare with the training set")
    variance = [1 / len(unlabelled_UD) + 1 / request.head.n_train]
    if projected_2K is not None:
        what = "the mean and the variance along random directions of"
        rows_UM, known_M = _standardised(unlabelled_UD, mean_D, projected_2K)
        found = compare_means([rows_UM], variance, known_M, unit=projected_2K.numel())
    elif mean_D is not None:
        what, found = "the mean of", compare_means([unlabelled_UD], variance, mean_D)
    else:
        return _Test("drift", "the head keeps no mean with which its unlabelled rows can be compared")
    if found is None:
        return _Test(
            "drift",
            f"fewer than {FEWEST} unlabelled rows are too few to compare with the training set",
            at_most=math.inf,
        )
    reason = _deviates(f"{what} {name}", "the training set", found.ratio)
    return _Test("drift", reason, found.ratio, found.p, found.effect, at_most=found.at_most)


def _standardised(rows_UD: Tensor, mean_D: Tensor | None, projected_2K: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows along the random directions, and their squares, in units of the training rows' variance.

    Beside them stands what their means are for the training rows, M numbers. Where the mean of the features was kept,
    it takes the place of that of the projections, and as much of the variance.
    """
    mean_K, square_K = projected_2K.double()
    variance_K = (square_K - mean_K.square()).clamp(min=0)
    varies_K = variance_K > ROUNDING * square_K  # others are constant, such as features that are all 0
    along_UK = ((projected(rows_UD) - mean_K) / variance_K.sqrt())[:, varies_K]
    first_UM, known_M = along_UK, along_UK.new_zeros(along_UK.shape[1])
    if mean_D is not None and bool(varies_K.any()):
        unit = float(variance_K.mean() / len(variance_K)) ** 0.5
        first_UM, known_M = rows_UD.double() / unit, mean_D.double() / unit
    return torch.cat([first_UM, along_UK.square()], 1), torch.cat([known_M, along_UK.new_ones(along_UK.shape[1])])


# Other tests


def _classes(request: ForgetRequest, shares_C: Tensor | None) -> _Test:
    """Compare the labels with random sets drawn without replacement, by the likelihood ratio (G) of their counts."""
    import numpy as np
    from scipy.special import xlogy

    if request.has_targets:
        return _Test("classes", "the forget rows have targets and no class numbers that can be counted")
    if shares_C is None:
        return _Test("classes", "the head keeps no class shares with which the forget labels can be compared")
    head, count = request.head, request.n_forget
    counts_C = request.labels_F.bincount(minlength=head.n_classes).cpu().numpy()
    population_C = np.maximum(np.rint(shares_C.double().cpu().numpy() * head.n_train).astype(np.int64), counts_C)
    shares = population_C / population_C.sum()

    def deviations(counts: Any) -> tuple[Any, Any]:
        found = counts / count
        return (xlogy(found, found) - xlogy(found, np.maximum(shares, 1e-300))).sum(-1), np.abs(found - shares).sum(
            -1
        ) / 2

    draws = min(_DRAWS, max(1, _DRAWN // head.n_classes))
    drawn = np.random.default_rng(0).multivariate_hypergeometric(population_C, count, size=draws, method="marginals")
    (divergence, distance), (of_random, random_distance) = deviations(counts_C), deviations(drawn)
    smallest = 1 / (draws + 1)
    p = smallest * (1 + int((of_random >= divergence * (1 - 1e-12)).sum()))
    mean = float(of_random.mean())
    ratio = float(divergence) / mean if mean > 0 else 1.0
    reason = _deviates("the class histogram of the forget labels", "that of the training set", ratio)
    return _Test("classes", reason, ratio, p, max(0.0, float(distance - random_distance.mean())), smallest)


def _norms(features_FD: Tensor, name: str, unlabelled_UD: Tensor | None) -> _Test:
    """Compare the norms with those of the unlabelled rows by their ranks (Mann-Whitney)."""
    if unlabelled_UD is None:
        return _Test("norms", "there are no unlabelled rows with whose norms those of the forget rows can be compared")
    squares = [rows.double().square().sum(1) for rows in (features_FD, unlabelled_UD)]
    counts, total = [len(part) for part in squares], sum(len(part) for part in squares)
    _, place, ties = torch.cat(squares).unique(return_inverse=True, return_counts=True)
    ranks = (ties.cumsum(0) - (ties - 1) / 2).double()[place]
    alike = float((ties.double() ** 3 - ties).sum()) / (total * (total - 1))
    variance = counts[0] * counts[1] / 12 * (total + 1 - alike)
    means = [float(part.mean()) for part in squares]
    if min(counts) < FEWEST or variance <= 0 or means[1] <= 0:
        return _Test("norms", "the rows are too few, or their norms too alike, to compare norms")
    deviation = abs(float(ranks[: counts[0]].sum()) - counts[0] * (total + 1) / 2) - 0.5
    p = math.erfc(max(deviation, 0.0) / math.sqrt(2 * variance))
    ratio = means[0] / means[1]
    noise = sum(float(part.var()) / len(part) for part in squares) / means[1] ** 2
    effect = math.sqrt(max(0.0, (ratio - 1) ** 2 - noise))
    reason = f"the mean squared norm of the forget rows is {ratio:.2g} times that of {name}"
    return _Test("norms", reason, ratio, p, effect)


# Numbers of rows


def _duplicates(effective: float, count: int) -> Finding:
    reason = f"the {count} forget rows count for {effective:.4g} distinct ones"
    return Finding("duplicates", effective, None, None, effective < count / 2, reason)


def _weights(request: ForgetRequest, weights_F: Tensor) -> Finding:
    """Say how many rows carry the weight, and whether their mean weight is that of the training rows."""
    effective = effective_rows(weights_F)
    head, count = request.head, request.n_forget
    ratio = float(weights_F.mean()) * head.n_train / head.total_weight
    few = effective < min(_FEW_ROWS, count / 2)
    reason = f"by their weights, the {count} forget rows count for {effective:.3g}"
    reason += f", and their mean weight is {ratio:.2g} times that of the training rows"
    return Finding("weights", effective, None, abs(ratio - 1), few or not 0.5 < ratio < 2, reason)


def _few_retained(request: ForgetRequest) -> Finding:
    """Compare the number of retained rows with the effective dimension tr[S (S + l2)^-1] of the forget rows."""
    head, count = request.head, request.n_retain
    if head.feature_weights_CD is None:
        return Finding("few_retained", None, None, None, False, "the effective dimension of the rows is not known")
    index = subset(request.n_forget, _SPECTRUM).to(request.labels_F.device)
    rows_ME = request.rows(index).design_FE.double() / math.sqrt(len(index))
    tall = rows_ME if rows_ME.shape[0] > rows_ME.shape[1] else rows_ME.T
    gram = tall.new_zeros((tall.shape[1],) * 2)
    add_gram(gram, tall)
    values = torch.linalg.eigvalsh(gram).clamp(min=0)
    floor = max(head.l2 / head.loss.constants.curvature_bound, ROUNDING * float(values.max()), 1e-300)
    dimensions = max(1.0, float((values / (values + floor)).sum()))
    reason = f"{count} rows are retained for {dimensions:.3g} effective dimensions"
    if count < _MANY * dimensions:
        reason += ": so few that a step cannot be predicted well"
    return Finding("few_retained", count / dimensions, None, None, count < _MANY * dimensions, reason)
