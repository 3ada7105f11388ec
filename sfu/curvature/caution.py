r"""Decide from the evidence how cautious a step must be, before anything is estimated.

The forget set's curvature can stand for the retained data's if it is a random sample. Where it is not, the step still
cannot do harm if it is short enough: with the gradient of the training objective known and :math:`M \ge H_r / 2`, the
step :math:`M^{-1} (g_f - \frac{V}{V_f} g)` brings a quadratic head nearer to Retrained, whatever the forget set. Since
:math:`V_r S_r \le V S`, half the largest eigenvalue of the training rows' curvature, times V / V_r, is such a bound.
Under other smooth losses it is that of the curvature at the head, since one that holds at any parameters is up to 1,100
times as large at a well-fitted head. The curvature may then grow along the step: nothing is proved for them.

Significance is not harm: a large set shows a shift that is too small to matter, and a small one hides a shift that does
not. So the *size* of a shift decides how much of the curvature is taken to be unseen, delta
(:class:`sfu.curvature.source_fit.Caution`), and nothing jumps at a threshold. Few rows leave much unseen, too. With
unlabelled rows like the training rows there is a better answer: they show the curvature. How far they take the place of
the forget rows is decided by significance, because both show the same if the forget set is a random sample.

Shapes: F forget rows, D features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfu.curvature.calibration import stretch_of_forget_rows
from sfu.curvature.evidence import Evidence, examine
from sfu.curvature.likeness import NO_ROWS, counted, judge
from sfu.curvature.source_fit import Caution
from sfu.data.settings import RANDOM
from sfu.heads.recipe import OPTIMUM
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest

if TYPE_CHECKING:
    from torch import Tensor


_UNSEEN = {"gradient": 3.0, "classes": 2.0, "mean": 1.0}
"""Share of the curvature taken to be unseen for a shift of size 1; chosen on 2,124 requests, see docs/limits.md."""
_NEGLIGIBLE = 1e-3
"""So much less is taken to be unseen than the sizes of the shifts say: large sets show shifts too small to matter."""
_UNDONE = 0.01
"""A shift of the gradient up to this size, which raises no alarm, may be training that was left undone."""
_FEW = 8.5
"""Of this many rows all is taken to be unseen, of more the cube of this over their number."""
_TOO_FEW = 0.08
"""No gain is predicted if few rows leave more than this unseen: below 20 rows that are equally curved."""
_TOO_LIGHT = 1.5
"""No gain is predicted if the retained rows' trace is this times that of the rows that show their curvature."""
_FEW_UNLABELLED = 50.0
"""So few unlabelled rows, of a set that is no random sample, show half of what is unseen, and 1,000 nearly all."""
_EQUAL = 1e-3
"""Largest relative deviation of the squared norms of rows that are taken to be normalised."""


@dataclass(frozen=True)
class Assessment:
    """What the evidence asks for.

    Attributes:
        caution: How far to rely on held-out rows.
        trust: How far unlabelled rows take the place of the forget rows, 0 to 1.
        unlike: How sure it is that the forget set is no random sample, 0 to 1.
        evidence: The findings.
        reasons: Why the forget set is not taken for a random sample of the training data; none if it may be one.
        bounded: Whether a bound of the training rows' curvature is known.
        enough: Whether the rows show enough of the curvature for a gain to be predicted.
        likeness: What a row of each set of unlabelled rows counts for (:class:`~sfu.curvature.likeness.Likeness`).
        rows: For how many equally curved rows of equal weight the rows to forget count.
    """

    caution: Caution
    trust: float
    unlike: float
    evidence: Evidence
    reasons: tuple[str, ...]
    bounded: bool
    enough: bool = True
    likeness: tuple[float, ...] = ()
    rows: float = 0.0

    @property
    def replaced(self) -> bool:
        """Whether unlabelled rows take the place of the forget rows, rather than these."""
        return self.trust > 0.5 and self.caution.share < 0.5

    @property
    def predictable(self) -> bool:
        """Whether a gain can be predicted: the forget set may be a random sample, or there are unlabelled rows."""
        return (not self.reasons or self.replaced) and self.enough

    @property
    def harmless(self) -> bool:
        """Whether the bound alone makes the step, which a quadratic head cannot be harmed by."""
        return self.bounded and self.caution.share == 1

    @property
    def ratio(self) -> float | None:
        """The sampling ratio of the gradient."""
        return self.evidence["gradient"].value


def assess(request: ForgetRequest, *, force: bool = False) -> Assessment:
    """Weigh the evidence; ``force`` takes the forget set for a random sample all the same.

    Rows of earlier requests count as further rows that have passed.
    """
    earlier, pooled, request = request.earlier, request, request.alone()
    head, kept = request.head, request.head.kept
    evidence = examine(
        request, request.unlabelled, shares_C=kept.shares_C, mean_D=kept.mean_D, projected_2K=kept.projected_2K
    )
    declared = "class" if request.classes is not None else request.kind
    telling = [finding for finding in evidence.findings if finding.name in _UNSEEN]
    if kept.mean_D is None:  # a mean unlike that of unlabelled rows may be their fault
        telling = [finding for finding in telling if finding.name != "mean"]
    alarms = [finding for finding in telling if finding.alarm]
    reasons = [finding.reason for finding in alarms] if declared == RANDOM else [_DECLARED[declared]]
    bound = curvature_bound(request)
    known = bound if bound is not None else _of_rows(request)
    half = known * request.head.total_weight / pooled.retained_weight / 2
    rows = max(1e-9, min(evidence.effective_rows, counted(request.head.traces(request.data()))))
    rows += 0.0 if earlier is None else earlier.effective
    if force:
        return Assessment(Caution(bound=half), 0.0, 0.0, evidence, tuple(reasons), bound is not None, rows=rows)
    shift = unlike = 1.0 if declared != RANDOM else 0.0
    found = -_NEGLIGIBLE
    undone = head.recipe.trained != OPTIMUM and head.unfinished_CE is None
    for finding in telling:
        sure, effect = finding.significance, finding.effect or 0.0
        if undone and finding.name == "gradient":
            effect = max(0.0, effect - _UNDONE)
        found += _UNSEEN[finding.name] * sure * effect
        unlike = max(unlike, sure)
    shift += max(0.0, found)
    if earlier is not None:
        count = request.n_forget + earlier.count
        shift = (request.n_forget * shift + earlier.count * earlier.unseen) / count
    few, trust, stretch, others = _of_few(rows), 0.0, stretch_of_forget_rows(request), NO_ROWS
    if request.unlabelled:
        part = 3.0
        if request.head.feature_weights_CD is None and kept.trace is not None:
            rows, part = rows / stretch**2, 1.0  # scaled rows show as much as forget rows, and stretched ones little
        others = judge(request, evidence, rows)
        like, more = others.like, others.rows
        wanted = max(unlike, few, others.alike * more / (rows + more))
        few = (1 - like) * few + like * _of_few(rows + wanted * like * more / part)
        # what neither of the two shows is left to the bound, so that it does not count as the forget rows'
        shift = min(1.0, shift)
        unseen = shift * wanted * (1 - like)
        trust = wanted * like / (1 - unseen) if like > 0 else 0.0
        shift *= 1 - wanted * like / (1 + (_FEW_UNLABELLED / more) ** 3)
    stretch = 1 + (1 - trust) * (stretch - 1)  # what unlabelled rows score needs none
    enough = few < _TOO_FEW and stretch < _TOO_LIGHT
    if request.head.feature_weights_CD is None:  # cross-validation stretches the rows of these itself
        enough, stretch = enough and kept.trace is not None, 1.0
    caution = Caution(min(1.0, shift), few, half, stretch * _of_few_retained(evidence), doubts=others.doubts)
    return Assessment(caution, trust, unlike, evidence, tuple(reasons), bound is not None, enough, others.weights, rows)


_DECLARED = {
    "class": "the request is for whole classes or rows of one class",
    "person": "the request is for one person's rows",
    "selected": "the request is for rows that were selected",
}


def curvature_bound(request: ForgetRequest) -> float | None:
    """Return an upper bound of the largest eigenvalue of the training data term's Hessian at the head.

    It is the one kept with the head, or follows from rows that are all of norm 1; ``None`` if neither is there.
    """
    head = request.head
    if head.kept.bound is not None:
        return head.kept.bound
    squares_F = _squares(request)
    if head.feature_weights_CD is None or len(squares_F) < 2 or head.weight is not None:
        return None
    one = 2.0 if head.bias else 1.0
    equal = float((squares_F - one).abs().max()) <= _EQUAL
    return one * (1 + _EQUAL) * head.loss.constants.curvature_bound if equal else None


def _of_rows(request: ForgetRequest) -> float:
    """Return what the bound would be if no training row were larger than the largest forget row."""
    head = request.head
    if head.feature_weights_CD is None:  # no eigenvalue of the forget rows' Hessian is above its trace
        return request.hessian(Structure.products).trace() - head.l2 * float(head.regularized_E.sum())
    return float(_squares(request).max()) * head.loss.constants.curvature_bound


def _squares(request: ForgetRequest) -> Tensor:
    return request.design_FE.double().square().sum(1)


def _of_few_retained(evidence: Evidence) -> float:
    """Return by how much the retained rows' curvature along a step exceeds that of other rows of the same kind.

    The gradient of N_r retained rows is a mean of gradients of just these rows, so the step points along them:
    :math:`u^T H_r u` exceeds that of as many other rows by a factor of about ``1 + d / N_r``, with d effective
    dimensions.
    """
    rows_of_a_dimension = evidence["few_retained"].value
    return 1.0 if rows_of_a_dimension is None else 1 + 1 / rows_of_a_dimension


def _of_few(rows: float) -> float:
    return min(1.0, (_FEW / rows) ** 3)
