r"""The folds on which a fit of curvature sources is scored: what the other folds estimate, and what this one shows.

Curvature comes from several sources: the forget rows, as the estimator sees them; augmented views of them; and
unlabelled rows. Each is split into K folds. Everything of a fold is estimated *without* its rows and the views of them.
A step u is then scored with the fold's own curvature, which is independent of u: an unbiased estimate of its error that
needs no source data.

If the forget set is a random sample, its own rows stand for the retained ones. If it is not, unlabelled rows do: they
are like the training rows T, so that the retained curvature is

.. math:: H_r = (V H_T - V_f H_f) / V_r

where the share of the two is :attr:`Validation.trust`. That difference is a source of its own too, with negative
eigenvalues raised to 0, where curvature is held as matrices.

Shapes: K folds, J sources, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sfu.curvature.calibration import factors_of_unlabelled, stretch_of_forget_rows
from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.folds import fold_indices, random_folds
from sfu.curvature.observations import HessianObservation, merge_hessians
from sfu.errors import ConfigError
from sfu.heads.ledger import PARTS, Sums, joined
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator, DampedInverse
from sfu.operators.build import build_operator, with_ridge
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.galerkin import share_subspace
from sfu.operators.products import ProductOperator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext

if TYPE_CHECKING:
    from torch import Tensor

FORGET, VIEWS, UNLABELLED, RETAINED = "forget", "views", "unlabelled", "retained"
"""Names of sources; those of several sets of unlabelled rows are numbered."""


@dataclass(frozen=True)
class Sources:
    """Curvatures of several sources, all of mean objectives with the regulariser, by name; the forget rows first."""

    operators: dict[str, CurvatureOperator]
    rows: dict[str, float]
    _inverses: dict[tuple[float, ...], DampedInverse] = field(default_factory=dict, repr=False, compare=False)

    def without(self, dropped: Set[str]) -> Sources:
        """Return all but the sources of these names."""
        operators = {name: one for name, one in self.operators.items() if name not in dropped}
        return Sources(operators, {name: self.rows[name] for name in operators})

    def mixed(self, weights: Sequence[float]) -> CurvatureOperator:
        """Return the mean with these weights, which sum to 1."""
        first, *others = self.operators.values()
        return first.combine(others, weights) if others else first

    def damped(self, weights: tuple[float, ...]) -> DampedInverse:
        """Return the damped inverse of the mean, prepared once for the last weights asked for."""
        if weights not in self._inverses:
            self._inverses.clear()
            self._inverses[weights] = self.mixed(weights).damped()
        return self._inverses[weights]


@dataclass(frozen=True)
class Fold:
    """One fold.

    Attributes:
        sources: Curvatures without this fold.
        gradient_CE: Right-hand side of the Newton step without this fold.
        signal_CE: The part of it that is not sampling noise: ``g - b / V - (V / V_f) g`` for the stored training
            gradient g and the b of objective perturbation, if there was any.
        held_out: What this fold shows of the retained data's Hessian.
        training: What its unlabelled rows show of the training data's, times the trust in them, if they stand for it.
            Differences of sampled curvatures may be negative where those of the data are not; this bounds them.
    """

    sources: Sources
    gradient_CE: Tensor
    signal_CE: Tensor
    held_out: CurvatureOperator
    training: CurvatureOperator | None = None


@dataclass(frozen=True)
class Validation:
    """What cross-validation observed.

    Attributes:
        estimate: The estimator's, of the whole forget set.
        sources: The curvatures of all rows.
        folds: Those of the folds; none if there are too few rows.
        trust: Share of the unlabelled rows, against the forget rows, in what is held out.
        failed_fits: How many of the folds' estimates came with a note.
        divided: Whether the folds lack some of the forget rows; otherwise each has their whole gradient.
    """

    estimate: CurvatureEstimate
    sources: Sources
    folds: Sequence[Fold] = ()
    trust: float = 0.0
    failed_fits: int = 0
    divided: bool = False


def observe_once(estimator: CurvatureEstimator[Any, Any], request: ForgetRequest, observation: Any) -> Validation:
    """Return the sources of all rows, without folds."""
    estimate = estimator.estimate(observation, request)
    own, *others = [[torch.arange(len(rows_ND))] for rows_ND in (request.features_FD, *request.unlabelled)]
    return Validation(estimate, _Further(request, estimate.operator, own, others).joined(estimate))


def cross_validate(
    estimator: CurvatureEstimator[Any, Any],
    request: ForgetRequest,
    context: MethodContext,
    n_folds: int,
    trust: float = 0.0,
    likeness: Sequence[float] = (),
    groups_F: Tensor | None = None,
) -> Validation:
    """Split all sources at random (seed ``folds``) and, for every fold, estimate the curvatures from the others.

    A fold is scored with its own Hessian: one block under the quadratic loss, products with its rows otherwise. A
    forget set of fewer rows than folds, or of copies of one row, stays whole: only unlabelled rows are held out, and
    without any there are no folds. Rows of earlier requests are in the folds, as sums; there are then as many folds as
    parts of these. ``likeness`` is what a row of each set of unlabelled rows counts for; by default 1. ``groups_F`` are
    the forget rows' groups of near-duplicates, if they are known.

    Raises:
        ConfigError: There are views or unlabelled rows, and the estimator's curvature cannot be mixed with theirs.
    """
    drawn = context.generator("folds")
    earlier = request.earlier_sums
    fewest = 1 if earlier else n_folds
    most = min(PARTS if earlier else n_folds, request.n_forget)
    indices = random_folds(request, most, drawn, groups_F) if request.n_forget >= fewest else []
    sums = joined(earlier, [request.sums(index) for index in indices]) if earlier else ()
    divided = len(sums or indices) > 1
    if not divided and not request.unlabelled:
        return observe_once(estimator, request, estimator.observe(request, context))
    parts = [request.rows(index) for index in indices] if divided and not sums else [request]
    n_folds, trust = (len(sums or parts), trust) if divided else (n_folds, 1.0)
    observations: list[Any] = [_observation(request, one) for one in sums]
    for done, part in enumerate(() if sums else parts, start=1):
        observations.append(estimator.observe(part, context))
        context.report(done, len(parts) + n_folds)
    estimate = estimator.estimate(estimator.merge(observations), request)
    indices = indices if divided else [torch.arange(request.n_forget)]
    splits = [fold_indices(rows_UD.shape[0], min(n_folds, rows_UD.shape[0]), drawn) for rows_UD in request.unlabelled]
    further = _Further(request, estimate.operator, indices, splits, trust, likeness)
    gradients, signal_CE = _gradients(request, sums or parts, n_folds)
    if estimator.is_forget_hessian(request):
        observations = further.in_a_subspace(observations, gradients)
        estimate = replace(estimate, operator=merge_hessians(observations).operator)
    held_out = further.held_out(parts * len(sums) if sums else parts, observations, n_folds)
    folds, failed_fits = [], 0
    for k, gradient_CE in enumerate(gradients):
        others = estimate
        if divided:
            others = estimator.estimate(estimator.merge(observations[:k] + observations[k + 1 :]), request)
            failed_fits += others.note is not None
        folds.append(Fold(further.joined(others, k), gradient_CE, signal_CE, *held_out[k]))
        context.report(len(parts) + k + 1, len(parts) + n_folds)
    return Validation(estimate, further.joined(estimate), folds, trust, failed_fits, divided)


def _observation(request: ForgetRequest, sums: Sums) -> HessianObservation:
    head = request.head
    hessian_EE = sums.hessian_EE.to(head.parameters_CE) / sums.weight
    return HessianObservation(with_ridge(hessian_EE, head.objective(), head.n_classes), sums.weight)


def _gradients(
    request: ForgetRequest, parts: Sequence[ForgetRequest | Sums], n_folds: int
) -> tuple[list[Tensor], Tensor]:
    """Return the right-hand side of the Newton step without each fold, and the part that is not sampling noise."""
    head = request.head
    correction_CE = (head.total_weight / request.weight) * head.gradient_CE
    constant_CE = head.objective().gradient_without_rows(head.parameters_CE)
    sums = [
        part.gradient_CE.to(constant_CE) + part.weight * constant_CE
        if isinstance(part, Sums)
        else part.forget_gradient() * part.weight
        for part in parts
    ]
    left = [(sums[0], request.weight)] * n_folds
    if len(parts) > 1:
        left = [(sum(sums) - own_CE, request.weight - part.weight) for own_CE, part in zip(sums, parts, strict=True)]
    return [sum_CE / weight - correction_CE for sum_CE, weight in left], head.rows_gradient_CE - correction_CE


class _Part(NamedTuple):
    """The Hessian of some rows, and the folds of which they show something; none if the source is not divided."""

    folds: frozenset[int]
    hessian: HessianObservation


class _Further:
    """The Hessians of views and unlabelled rows, fold by fold, to be joined with those of the estimator."""

    def __init__(
        self,
        request: ForgetRequest,
        like: CurvatureOperator,
        indices: Sequence[Tensor],
        splits: Sequence[Sequence[Tensor]],
        trust: float = 0.0,
        likeness: Sequence[float] = (),
    ) -> None:
        """Compute the Hessians; ``indices`` divide the forget rows, and ``splits`` each set of unlabelled rows."""
        self._request, self._trust = request, trust
        self._likeness = likeness or [1.0] * len(request.unlabelled)
        by_products = like.structure == Structure.products.value or request.head.layout is not Layout.shared
        self._scored_by = Structure.products if by_products else Structure.shared
        self._found: dict[str, list[_Part]] = {}
        self._factors = factors_of_unlabelled(request)
        self._unlabelled = self._scored = dict(self._found)
        if not request.unlabelled and request.views_VFD is None:
            return
        if like.structure not in {known.value for known in Structure}:
            raise ConfigError(
                f"The curvature of this estimator is held as {like.structure} and cannot be mixed with that of views "
                "or unlabelled rows. Use curvature.estimator=closed_form, or leave out curvature.augment and "
                "curvature.unlabelled."
            )
        structure = Structure(like.structure)
        if request.views_VFD is not None:
            self._found[VIEWS] = self._of_views(indices, structure)
        self._unlabelled = self._scored = self._of_unlabelled(splits, structure)
        self._found |= self._unlabelled
        if trust > 0 and structure is not self._scored_by:
            self._scored = self._of_unlabelled(splits, self._scored_by)

    def _of_unlabelled(self, splits: Sequence[Sequence[Tensor]], structure: Structure) -> dict[str, list[_Part]]:
        """Return the Hessians of the folds of each set."""
        request, found = self._request, dict[str, list[_Part]]()
        for j, (name, split) in enumerate(zip(_names(request.unlabelled), splits, strict=True)):
            found[name] = []
            for k, index in enumerate(split):
                rows = request.unlabelled_rows(request.unlabelled[j][index])
                if self._factors is not None:
                    rows = rows.scaled(self._factors[j][index])
                hessian = self._hessian(rows, structure)
                hessian = hessian._replace(weight=self._likeness[j] * hessian.weight)
                found[name].append(_Part(frozenset({k} if len(split) > 1 else ()), hessian))
        return found

    def _of_views(self, indices: Sequence[Tensor], structure: Structure) -> list[_Part]:
        """Return the Hessians of the views of each fold, and of those that show rows of two folds."""
        request, parts = self._request, []
        views_VFD, partners_VF, weights_F = request.views_VFD, request.partners_VF, request.weights_F
        assert views_VFD is not None, "it is asked for views only if there are some"
        rows_F = torch.arange(request.n_forget, device=request.labels_F.device)
        fold_F = torch.empty_like(rows_F)
        for k, index in enumerate(indices):
            fold_F[index] = k
        own_VF = fold_F.expand(views_VFD.shape[:2])
        other_VF = own_VF if partners_VF is None else fold_F[partners_VF]
        lower_VF, upper_VF = torch.minimum(own_VF, other_VF), torch.maximum(own_VF, other_VF)
        for lower, upper in torch.stack([lower_VF, upper_VF]).flatten(1).unique(dim=1).T.tolist():
            here_VF = (lower_VF == lower) & (upper_VF == upper)
            weights_N = None if weights_F is None else weights_F.expand_as(here_VF)[here_VF]
            labels_N = request.labels_F[rows_F.expand_as(here_VF)[here_VF]]
            rows = request.head.rows(views_VFD[here_VF], labels_N, weights_N, cache=True)
            parts.append(_Part(frozenset({lower, upper} if len(indices) > 1 else ()), self._hessian(rows, structure)))
        return parts

    def _hessian(self, rows: Rows, structure: Structure) -> HessianObservation:
        head = self._request.head
        return HessianObservation(build_operator(head.objective(), rows, head.parameters_CE, structure), rows.weight)

    def in_a_subspace(
        self, observations: Sequence[HessianObservation], gradients: Sequence[Tensor]
    ) -> list[HessianObservation]:
        """Let all Hessians, these and the further ones, be inverted in one subspace, if they are held by products.

        Where the classes share all parameters, they need another way.
        """
        seen = [*observations, *(part.hessian for parts in self._found.values() for part in parts)]
        products = [one.operator for one in seen if isinstance(one.operator, ProductOperator)]
        if len(products) < len(seen) or products[0].shared:
            return list(observations)
        shared = share_subspace(products, [one.weight for one in seen], gradients)
        found = iter(HessianObservation(operator, one.weight) for operator, one in zip(shared, seen, strict=True))
        own = [next(found) for _ in observations]
        self._found = {name: [_Part(part.folds, next(found)) for part in parts] for name, parts in self._found.items()}
        self._unlabelled = self._scored = {name: self._found[name] for name in self._unlabelled}
        return own

    def joined(self, estimate: CurvatureEstimate, left_out: int | None = None) -> Sources:
        """Join the estimate with the Hessians of all folds, or of all but one."""
        merged = {FORGET: HessianObservation(estimate.operator, self._request.weight)}
        for name, parts in self._found.items():
            left = [part.hessian for part in parts if left_out not in part.folds]
            merged[name] = merge_hessians(left or [merged[FORGET]])  # each view may show a row of the fold
        operators = {name: one.operator for name, one in merged.items()}
        rows = {name: one.weight for name, one in merged.items()}
        if self._trust > 0 and isinstance(estimate.operator, ExplicitOperator):
            training = merge_hessians([merged[name] for name in self._unlabelled]).operator
            retained = self._request.retained_hessian(training, estimate.operator)
            assert isinstance(retained, ExplicitOperator)
            operators[RETAINED], rows[RETAINED] = retained.raised(self._request.head.objective().ridge_E), 0.0
        return Sources(operators, rows)

    def held_out(
        self, parts: Sequence[ForgetRequest], observations: Sequence[Any], n_folds: int
    ) -> Sequence[tuple[CurvatureOperator, CurvatureOperator | None]]:
        """Return what each fold shows of the retained data's Hessian, and of the training data's."""
        own = [self._own(*pair) for pair in zip(parts, observations, strict=True)]
        scored = self._stretched(parts, own)
        if self._trust == 0:
            return [(one, None) for one in scored]
        forget, shown = merge_hessians(own).operator, []
        for k in range(n_folds):
            training = merge_hessians([of[k % len(of)].hessian for of in self._scored.values()]).operator
            retained = self._request.retained_hessian(training, forget)
            if len(own) > 1:
                retained = scored[k].combine([retained], [1 - self._trust, self._trust])
            shown.append((retained, training.combine([], [self._trust])))
        return shown

    def _stretched(
        self, parts: Sequence[ForgetRequest], own: Sequence[HessianObservation]
    ) -> Sequence[CurvatureOperator]:
        """Return the Hessians of the folds' own rows, of a linearised head stretched to the retained rows' trace."""
        head = self._request.head
        linear = head.feature_weights_CD is not None
        stretch = 1.0 if linear else stretch_of_forget_rows(self._request)
        if stretch == 1:
            return [one.operator for one in own]
        every = [part.data(cache=True) for part in parts]
        factors = [torch.full((rows.count,), stretch, dtype=torch.float64) for rows in every]
        return [
            self._hessian(rows.scaled(factor_N), self._scored_by).operator
            for rows, factor_N in zip(every, factors, strict=True)
        ]

    def _own(self, part: ForgetRequest, observation: Any) -> HessianObservation:
        """Return the Hessian of a fold's own rows; the observation may be it already."""
        seen = isinstance(observation, HessianObservation) and observation.operator.structure == self._scored_by.value
        return observation if seen else HessianObservation(part.hessian(self._scored_by), part.weight)


def _names(unlabelled: Sequence[Tensor]) -> list[str]:
    return [UNLABELLED] if len(unlabelled) == 1 else [f"{UNLABELLED}_{n}" for n in range(1, len(unlabelled) + 1)]
