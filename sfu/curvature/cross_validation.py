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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sfu.curvature.calibration import factors_of_unlabelled, stretch_of_forget_rows
from sfu.curvature.estimators.base import CurvatureEstimate, CurvatureEstimator
from sfu.curvature.folds import fold_indices, random_folds
from sfu.curvature.observations import HessianObservation, merge_hessians
from sfu.errors import ConfigError
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.rows import Rows
from sfu.operators.base import CurvatureOperator, DampedInverse
from sfu.operators.build import build_operator
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
        training: What its unlabelled rows show of the training data's, if they stand for it. Differences of sampled
            curvatures may be negative where those of the data are not; this bounds them.
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
        observation: The estimator's, of the whole forget set.
        estimate: Its estimate.
        sources: The curvatures of all rows.
        folds: Those of the folds; none if there are too few rows.
        trust: Share of the unlabelled rows, against the forget rows, in what is held out.
        failed_fits: How many of the folds' estimates came with a note.
    """

    observation: Any
    estimate: CurvatureEstimate
    sources: Sources
    folds: Sequence[Fold] = ()
    trust: float = 0.0
    failed_fits: int = 0


def observe_once(estimator: CurvatureEstimator[Any, Any], request: ForgetRequest, observation: Any) -> Validation:
    """Return the sources of all rows, without folds."""
    estimate = estimator.estimate(observation, request)
    whole = [[torch.arange(rows_UD.shape[0])] for rows_UD in request.unlabelled]
    return Validation(observation, estimate, _Further(request, estimate.operator, [request], whole).with_all(estimate))


def cross_validate(
    estimator: CurvatureEstimator[Any, Any],
    request: ForgetRequest,
    context: MethodContext,
    n_folds: int,
    trust: float = 0.0,
) -> Validation:
    """Split all sources at random (seed ``folds``) and, for every fold, estimate the curvatures from the others.

    A fold is scored with its own Hessian: one block under the quadratic loss, products with its rows otherwise. A
    forget set of fewer rows than folds, or of copies of one row, stays whole: only unlabelled rows are held out, and
    without any there are no folds.

    Raises:
        ConfigError: There are views or unlabelled rows, and the estimator's curvature cannot be mixed with theirs.
    """
    head, drawn = request.head, context.generator("folds")
    indices = random_folds(request, n_folds, drawn) if request.n_forget >= n_folds else []
    divided = len(indices) > 1
    if not divided and not request.unlabelled:
        return observe_once(estimator, request, estimator.observe(request, context))
    trust = trust if divided else 1.0
    parts = [request.rows(index) for index in indices] if divided else [request]
    n_folds = len(parts) if divided else n_folds
    steps = len(parts) + n_folds
    observations = []
    for done, part in enumerate(parts, start=1):
        observations.append(estimator.observe(part, context))
        context.report(done, steps)
    observation = estimator.merge(observations)
    estimate = estimator.estimate(observation, request)
    splits = [fold_indices(rows_UD.shape[0], min(n_folds, rows_UD.shape[0]), drawn) for rows_UD in request.unlabelled]
    further = _Further(request, estimate.operator, parts, splits, trust)
    held_out = [further.held_out(k, observations) for k in range(n_folds)]
    sums = torch.stack([part.forget_gradient() * part.weight for part in parts])
    correction = (head.total_weight / request.weight) * head.gradient_CE
    signal_CE = head.rows_gradient_CE - correction
    gradients = [sums.sum(0) / request.weight - correction] * n_folds
    if divided:
        gradients = [
            (sums.sum(0) - own_CE) / (request.weight - part.weight) - correction
            for own_CE, part in zip(sums, parts, strict=True)
        ]
    if divided and further.is_empty and estimator.is_forget_hessian(request):
        found = _in_a_subspace(observations, gradients, [own for own, _ in held_out])
        if found is not None:
            inverses, whole = found
            rows = {FORGET: request.weight}
            folds = [
                Fold(Sources({FORGET: whole}, rows, {(1.0,): inverse}), gradient_CE, signal_CE, own)
                for inverse, gradient_CE, (own, _) in zip(inverses, gradients, held_out, strict=True)
            ]
            sources = Sources({FORGET: whole}, rows, {(1.0,): whole.damped()})
            return Validation(observation, replace(estimate, operator=whole), sources, folds)
    folds, failed_fits = [], 0
    for k, gradient_CE in enumerate(gradients):
        others = estimate
        if divided:
            others = estimator.estimate(estimator.merge([observations[j] for j in range(n_folds) if j != k]), request)
            failed_fits += others.note is not None
        folds.append(Fold(further.without(k, others), gradient_CE, signal_CE, *held_out[k]))
        context.report(len(parts) + k + 1, steps)
    return Validation(observation, estimate, further.with_all(estimate), folds, trust, failed_fits)


def _in_a_subspace(
    observations: Sequence[HessianObservation], gradients: Sequence[Tensor], held_out: Sequence[CurvatureOperator]
) -> tuple[Sequence[DampedInverse], ProductOperator] | None:
    """Return the folds' inverses and the whole set's Hessian by products in one subspace, if they are products.

    Where the classes share all parameters, they need another way.
    """
    own = [part.operator for part in observations if isinstance(part.operator, ProductOperator)]
    scored = [operator for operator in held_out if isinstance(operator, ProductOperator)]
    if len(own) < len(observations) or own[0].shared:
        return None
    return share_subspace(own, [part.weight for part in observations], gradients, scored)


def _own_hessian(part: ForgetRequest, observation: Any, stretch: float) -> CurvatureOperator:
    """Return the Hessian of a fold's own rows, stretched; the observation may be it already."""
    if stretch != 1:
        head, rows = part.head, part.data(cache=True)
        rows = rows.scaled(torch.full((rows.count,), stretch, dtype=torch.float64))
        return build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
    seen = observation.operator if isinstance(observation, HessianObservation) else None
    by_products = isinstance(seen, ProductOperator) or part.head.layout is not Layout.shared
    structure = Structure.products if by_products else Structure.shared
    return seen if seen is not None and seen.structure == structure.value else part.hessian(structure)


class _Further:
    """The Hessians of views and unlabelled rows, fold by fold, to be joined with those of the estimator."""

    def __init__(
        self,
        request: ForgetRequest,
        like: CurvatureOperator,
        parts: Sequence[ForgetRequest],
        splits: Sequence[Sequence[Tensor]],
        trust: float = 0.0,
    ) -> None:
        """Compute the Hessians; ``parts`` are those of the forget rows, and ``splits`` those of the unlabelled rows."""
        self._request, self._parts, self._trust = request, parts, trust
        by_products = like.structure == Structure.products.value or request.head.layout is not Layout.shared
        self._scored_by = Structure.products if by_products else Structure.shared
        self._found: dict[str, list[HessianObservation]] = {}
        self._unlabelled: dict[str, list[Rows]] = {}
        self._splits = dict(zip(_names(request.unlabelled), splits, strict=True))
        self._own = request.hessian(self._scored_by) if trust > 0 else None
        linear = request.head.feature_weights_CD is not None
        self._stretch = 1.0 if linear else stretch_of_forget_rows(request)
        if not request.unlabelled and request.views_VFD is None:
            return
        if like.structure not in {known.value for known in Structure}:
            raise ConfigError(
                f"The curvature of this estimator is held as {like.structure} and cannot be mixed with that of views "
                "or unlabelled rows. Use curvature.estimator=closed_form, or leave out curvature.augment and "
                "curvature.unlabelled."
            )
        self._structure = Structure(like.structure)
        if request.views_VFD is not None:
            self._found[VIEWS] = [self._views(part) for part in parts]
        head = request.head
        factors = factors_of_unlabelled(request)
        for j, (name, split) in enumerate(self._splits.items()):
            every = [head.unlabelled_rows(request.unlabelled[j][index]) for index in split]
            if factors is not None:
                every = [rows.scaled(factors[j][index]) for rows, index in zip(every, split, strict=True)]
            self._unlabelled[name] = every
            self._found[name] = [self._hessian(rows, self._structure) for rows in every]

    def _views(self, part: ForgetRequest) -> HessianObservation:
        views_VFD, weights_F = part.views_VFD, part.weights_F
        assert views_VFD is not None, "the request has views, so its parts have"
        count = len(views_VFD)
        weights_N = None if weights_F is None else weights_F.repeat(count)
        rows = part.head.rows(views_VFD.flatten(0, 1), part.labels_F.repeat(count), weights_N, cache=True)
        return self._hessian(rows, self._structure)

    def _hessian(self, rows: Rows, structure: Structure) -> HessianObservation:
        head = self._request.head
        return HessianObservation(build_operator(head.objective(), rows, head.parameters_CE, structure), rows.weight)

    def without(self, k: int, estimate: CurvatureEstimate) -> Sources:
        """Join the estimate of fold k with the Hessians of the other folds."""
        return self._joined(estimate, {
            name: [part for j, part in enumerate(parts) if j != k or len(parts) == 1]
            for name, parts in self._found.items()
        })  # fmt: skip

    def with_all(self, estimate: CurvatureEstimate) -> Sources:
        """Join the estimate with the Hessians of all rows."""
        return self._joined(estimate, self._found)

    def _joined(self, estimate: CurvatureEstimate, found: dict[str, list[HessianObservation]]) -> Sources:
        request = self._request
        merged = {name: merge_hessians(parts) for name, parts in found.items()}
        operators = {FORGET: estimate.operator, **{name: one.operator for name, one in merged.items()}}
        rows = {FORGET: request.weight, **{name: one.weight for name, one in merged.items()}}
        unlabelled = [merged[name] for name in self._splits]
        if self._trust > 0 and isinstance(estimate.operator, ExplicitOperator):
            retained = self._retained(merge_hessians(unlabelled).operator, estimate.operator)
            assert isinstance(retained, ExplicitOperator)
            operators[RETAINED], rows[RETAINED] = retained.raised(request.head.objective().ridge_E), 0.0
        return Sources(operators, rows)

    def _retained(self, training: CurvatureOperator, forget: CurvatureOperator) -> CurvatureOperator:
        request = self._request
        return training.combine([forget], [request.head.total_weight / request.retained_weight, -request.step_ratio])

    @property
    def is_empty(self) -> bool:
        """Whether there are no sources but the forget rows."""
        return not self._found

    def held_out(self, k: int, observations: Sequence[Any]) -> tuple[CurvatureOperator, CurvatureOperator | None]:
        """Return what fold k shows of the retained data's Hessian, and of the training data's."""
        own = _own_hessian(self._parts[k], observations[k], self._stretch) if len(self._parts) > 1 else None
        if self._own is None:
            assert own is not None, "without unlabelled rows, a fold has forget rows"
            return own, None
        training = merge_hessians([
            self._hessian(every[k % len(every)], self._scored_by) for every in self._unlabelled.values()
        ])  # fmt: skip
        retained = self._retained(training.operator, self._own)
        if own is not None:
            retained = own.combine([retained], [1 - self._trust, self._trust])
        return retained, training.operator


def _names(unlabelled: Sequence[Tensor]) -> list[str]:
    return [UNLABELLED] if len(unlabelled) == 1 else [f"{UNLABELLED}_{n}" for n in range(1, len(unlabelled) + 1)]
