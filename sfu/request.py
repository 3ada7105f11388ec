"""What a method receives: the request (head, examples to forget, their number) and the context; nothing else.

Shapes: F forget rows, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sfu.data.settings import CLASS, KINDS, RANDOM
from sfu.deadline import check_time
from sfu.errors import ConfigError, DataError, SourceFreeError
from sfu.heads.base import Head
from sfu.heads.ledger import Ledger, Sums
from sfu.heads.recipe import MEAN, OPTIMUM, Reference
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.losses.rows import Rows, check_weights, design_matrix
from sfu.losses.targets import read_labels
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure

if TYPE_CHECKING:
    from torch import Tensor

Cached = TypeVar("Cached")


class Access(Enum):
    """What a method may see; the pipeline enforces it."""

    NONE = "none"  # looks at nothing, changes nothing
    FORGET = "forget"  # the request alone: source-free
    STORED = "stored"  # the request and what was stored with the head at training time (no examples)
    RETAINED = "retained"  # the request and the retained data


@dataclass(frozen=True)
class RetainedSet:
    """The retained rows, given only to methods of :attr:`Access.RETAINED`; labels as in :class:`ForgetRequest`."""

    features_RD: Tensor
    labels_R: Tensor
    weights_R: Tensor | None = None

    def __repr__(self) -> str:
        """Say how many rows there are, without any example."""
        return f"RetainedSet({len(self.labels_R)} rows)"


Retained = RetainedSet | None
"""The retained rows, or ``None`` for a method that may not see them."""


@dataclass(frozen=True)
class MethodContext:
    """What the pipeline gives to every method.

    Attributes:
        seeds: Derived seeds by name: ``training``, ``perturbation``, ``noise``, ``folds``.
        progress: Called with (done, total) by long work.
        normalize_rows: Whether features were normalised row by row; further feature files must be too.
        keep_path: Whether iterative methods record their parameters after each step, as ``UnlearningResult.path``.
        keep_curvature: Whether Newton steps record the Hessian they inverted, as ``UnlearningResult.curvature``.
        predict: Whether to predict what the step is worth, where nothing is decided by it.
        memory: A cache shared by all settings of a method that are tried on one request; ``None`` for no cache.
    """

    seeds: dict[str, int] = field(default_factory=dict)
    progress: Callable[[int, int], None] | None = None
    normalize_rows: bool = False
    keep_path: bool = False
    keep_curvature: bool = False
    predict: bool = True
    memory: dict[str, Any] | None = None

    def remember(self, key: str, make: Callable[[], Cached]) -> Cached:
        """Return ``make()``, cached in :attr:`memory`; ``key`` must name everything it depends on."""
        if self.memory is None:
            return make()
        if key not in self.memory:
            self.memory[key] = make()
        return cast(Cached, self.memory[key])

    def report(self, done: int, total: int) -> None:
        """Tell :attr:`progress`, if anyone wants to know, and stop if there is no time left."""
        check_time()
        if self.progress is not None:
            self.progress(done, total)

    def generator(self, name: str) -> torch.Generator:
        """Return a fresh CPU generator for the seed ``name``; it gives the same numbers on every device."""
        return torch.Generator().manual_seed(self.seeds.get(name, 0))


@dataclass(frozen=True, slots=True)
class ForgetRequest:
    """A deletion request. It is frozen and holds private copies, so no retained example can be reached from it.

    Attributes:
        head: The trained head.
        features_FD: Features of the examples to forget, on the head's device.
        labels_F: Their labels: class numbers ``[F]``, or targets ``[F, C]`` (:func:`sfu.losses.targets.read_labels`).
        weights_F: Their sample weights, if the head was trained with sample weights.
        views_VFD: Features of V augmented copies (flipped, cropped, ...) of the same examples, used for the curvature
            only; ``None`` if there are none.
        partners_VF: The row that each view shows besides its own, if some are mixed from two rows; a row's own number
            where there is none. ``None`` if there are no such views.
        unlabelled: Sets of features ``[U, D]`` of unlabelled rows like the training rows, for the curvature only.
        kind: What the rows are: one of :data:`KINDS`. Whole classes are of kind ``class`` in any case.
        classes: The classes to forget, if the rows are all training rows of whole classes; ``None`` otherwise.
        earlier: What the head's ledger says of earlier requests, if their rows are to be forgotten again, with these,
            from the head before all of them (:meth:`rewound`). Weights, gradients and counts include them.
        marks_FB: What rows are recognised by if they are requested again, where features are the same but for rounding.
    """

    head: Head
    features_FD: Tensor
    labels_F: Tensor
    weights_F: Tensor | None = None
    views_VFD: Tensor | None = None
    partners_VF: Tensor | None = None
    unlabelled: tuple[Tensor, ...] = ()
    kind: str = RANDOM
    classes: tuple[int, ...] | None = None
    earlier: Ledger | None = None
    marks_FB: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the examples against the head, and copy them out of the storage they came from.

        Raises:
            DataError: The forget set is empty, is the whole training set, is not finite, or does not fit the head.
            ConfigError: The rows have targets, and the loss has class weights or the request is for a class.
        """
        features, head = self.features_FD, self.head
        if features.is_complex() or features.dtype == torch.bool:
            raise DataError(f"the forget features are {features.dtype}. Give real numbers.")
        if features.ndim != 2 or features.shape[0] == 0:
            one = ", such as features[None] for one example" if features.shape == (head.n_features,) else ""
            raise DataError(
                f"the forget features have shape {list(features.shape)}. Give at least one row [F, D]{one}."
            )
        if features.shape[1] != head.n_features:
            raise DataError(
                f"the forget features are {features.shape[1]} wide but the head takes {head.n_features}. Extract them "
                "with the backbone the head was trained on."
            )
        labels = read_labels(self.labels_F, features.shape[0], head.n_classes, head.loss)
        object.__setattr__(self, "labels_F", labels.detach().to(head.parameters_CE.device, copy=True).contiguous())
        finite_F = torch.isfinite(features).all(1)
        if not finite_F.all():
            raise DataError(
                f"the forget features have NaN or infinite values in {int((~finite_F).sum())} of {len(finite_F)} rows "
                f"(first: row {int(finite_F.int().argmin())}). Remove or repair those rows."
            )
        if self.n_forget >= head.n_train:
            raise DataError(
                f"{self.n_forget} examples to forget of N = {head.n_train} leave none retained. Check n_train."
            )
        self._check_classes()
        views = self.views_VFD
        if views is not None and (views.ndim != 3 or views.shape[1:] != features.shape or views.shape[0] == 0):
            raise DataError(
                f"the augmented features (views) are {list(views.shape)}. Give [views, {features.shape[0]}, "
                f"{features.shape[1]}], every view with a row for each example to forget."
            )
        if views is not None and not torch.isfinite(views).all():
            raise DataError("the augmented features (views) have NaN or infinite values. Remove or repair them.")
        partners = self.partners_VF
        if partners is not None and (views is None or partners.shape != views.shape[:2]):
            raise DataError(f"the partners of the views are {list(partners.shape)}. Give the number of a row for each.")
        if self.kind not in KINDS:
            raise ConfigError(f"request={self.kind!r} is no kind of request. Choose one of {', '.join(KINDS)}.")
        for rows in self.unlabelled:
            if rows.ndim != 2 or rows.shape[0] == 0 or rows.shape[1] != head.n_features:
                raise DataError(
                    f"the unlabelled rows are {list(rows.shape)}. Give features [rows, {head.n_features}] from the "
                    "backbone that the head was trained on."
                )
            if not torch.isfinite(rows).all():
                raise DataError("the unlabelled rows have NaN or infinite values. Remove or repair those rows.")
        device = head.parameters_CE.device
        moved = tuple(rows.detach().to(device, copy=True).contiguous() for rows in self.unlabelled)
        object.__setattr__(self, "unlabelled", moved)
        if views is not None:
            object.__setattr__(self, "views_VFD", views.detach().to(device, copy=True).contiguous())
        if partners is not None:
            object.__setattr__(self, "partners_VF", partners.to(device, torch.int64, copy=True))
        object.__setattr__(self, "features_FD", features.detach().to(device, copy=True).contiguous())
        if self.weights_F is not None:
            if head.weight is None:
                raise DataError(
                    "the examples to forget have sample weights, but the head has none. Give the total weight of its "
                    "training rows as the head's `weight`."
                )
            object.__setattr__(self, "weights_F", check_weights(self.weights_F, self.labels_F))
        if not self.weight < head.total_weight:
            raise DataError(
                f"the forget set weighs {self.weight:g} and the training set {head.total_weight:g}. It must weigh "
                "less; give the total weight of the training rows as the head's `weight`."
            )

    def __repr__(self) -> str:
        """Say what is requested, without any example."""
        views = "" if self.views_VFD is None else f", {len(self.views_VFD)} views of each"
        return f"ForgetRequest({self.n_forget} of {self.head.n_train} rows{views}, head={self.head})"

    def _check_classes(self) -> None:
        if self.has_targets and (self.kind == CLASS or self.classes is not None):
            raise ConfigError(
                "the request is for a class, but its rows have targets and no class numbers. Give request='selected', "
                "which asks for the same caution."
            )
        if self.classes is None:
            return
        present = self.labels_F.unique().tolist()
        if sorted(self.classes) != present:
            raise DataError(f"the request is to forget the classes {list(self.classes)} but its labels are {present}.")
        if len(present) >= self.head.n_classes:
            raise DataError(
                f"forgetting all {self.head.n_classes} classes would leave an empty head. Keep at least one class."
            )

    @property
    def has_targets(self) -> bool:
        """Whether the labels are targets rather than class numbers."""
        return self.labels_F.ndim > 1

    @property
    def n_forget(self) -> int:
        """N_f."""
        return self.labels_F.shape[0]

    @property
    def recognised_by(self) -> Tensor:
        """The numbers that tell a row from others, ``[F, ...]``."""
        return self.features_FD if self.marks_FB is None else self.marks_FB

    @property
    def count(self) -> int:
        """Number of all rows to forget, those of earlier requests included."""
        return self.n_forget + (0 if self.earlier is None else self.earlier.count)

    @property
    def n_retain(self) -> int:
        """N_r = N - N_f."""
        return self.head.n_train - self.count

    @property
    def weight(self) -> float:
        """V_f: total weight of the forget rows; N_f without sample and class weights."""
        return self.data().weight + sum(sums.weight for sums in self.earlier_sums)

    @property
    def earlier_sums(self) -> tuple[Sums, ...]:
        """The sums over the rows of earlier requests; none unless they are to be forgotten with these."""
        return () if self.earlier is None else self.earlier.parts

    @property
    def trace(self) -> float:
        """Trace of the data term's Hessian of the forget rows, as :attr:`sfu.heads.kept.Kept.trace` has it."""
        return float(self.head.traces(self.data()).sum())

    @property
    def retained_weight(self) -> float:
        """V_r = V - V_f."""
        return self.head.total_weight - self.weight

    @property
    def step_ratio(self) -> float:
        """V_f / V_r (N_f / N_r unweighted): length of the Newton step under mean-normalised curvature and gradient."""
        return self.weight / self.retained_weight

    @property
    def design_FE(self) -> Tensor:
        """Forget rows in the head's dtype, with the bias column."""
        head = self.head.parameters_CE
        return design_matrix(self.features_FD, self.head.bias, head.device, head.dtype)

    def without_summary(self) -> ForgetRequest:
        """Return the request without the sums over training rows that are kept with the head."""
        kept = self.head.kept
        return self if kept.numbers() is kept else replace(self, head=self.head.without_summary())

    def private(self) -> ForgetRequest:
        """Return the request with copies of the head and of all rows. A linearised head's network stays shared."""
        core = getattr(self.head, "core", None)
        return copy.deepcopy(self, {} if core is None else {id(core): core})

    def in_float64(self) -> ForgetRequest:
        """Return the request with the head in float64, in which curvature and solves are computed."""
        head = self.head
        double = head.to(head.parameters_CE.device, torch.float64)
        return self if head.parameters_CE.dtype == torch.float64 else replace(self, head=double)

    def rows(self, index: Tensor) -> ForgetRequest:
        """Return the request for some of its rows (a cross-validation fold); other rows are nobody's partners."""
        partners_VF = self.partners_VF
        if partners_VF is not None:
            places_F = partners_VF.new_full((self.n_forget,), -1)
            places_F[index] = own_F = torch.arange(len(index)).to(places_F)
            places_VF = places_F[partners_VF[:, index]]
            partners_VF = torch.where(places_VF < 0, own_F, places_VF)
        return replace(
            self,
            features_FD=self.features_FD[index],
            labels_F=self.labels_F[index],
            weights_F=None if self.weights_F is None else self.weights_F[index],
            views_VFD=None if self.views_VFD is None else self.views_VFD[:, index],
            partners_VF=partners_VF,
            earlier=None,
            marks_FB=None if self.marks_FB is None else self.marks_FB[index],
        )

    def rewound(self) -> ForgetRequest:
        """Return the request for these rows and all that the head's ledger has sums of, from the head before them."""
        ledger, head = self.head.forgotten.ledger, self.head
        if ledger is None or ledger.start is None:
            return self
        start, like = ledger.start, head.parameters_CE
        parameters_CE = start.parameters_CE.to(like)
        # l2 may be another for the retained data (see at_retained_l2)
        gradient_CE = start.gradient_CE.to(like) + (head.l2 - start.l2) * head.regularized_E * parameters_CE
        weight = None if head.weight is None else start.weight
        before = replace(
            head, parameters_CE=parameters_CE, gradient_CE=gradient_CE, n_train=start.n_train, weight=weight
        )
        return replace(self, head=before, earlier=ledger)

    def alone(self) -> ForgetRequest:
        """Return the request without earlier ones."""
        return self if self.earlier is None else replace(self, earlier=None)

    def sums(self, index: Tensor) -> Sums:
        """Return the sums over some of the rows at the head; its loss must be quadratic."""
        part, head = self.rows(index), self.head
        rows, objective = part.data(), head.objective()
        gradient_CE = part.forget_gradient() - objective.l2 * head.regularized_E * head.parameters_CE
        hessian_EE = objective.data_hessian(rows, head.parameters_CE, Layout.shared)
        hessian_EE, gradient_CE = (sums.double().cpu() * rows.weight for sums in (hessian_EE, gradient_CE))
        return Sums(hessian_EE, gradient_CE, rows.weight)

    def at(self, parameters_CE: Tensor) -> ForgetRequest:
        """Return the request with the head moved."""
        return replace(self, head=replace(self.head, parameters_CE=parameters_CE))

    def data(self, *, cache: bool = False) -> Rows:
        """Return the forget rows in the form the head's loss takes."""
        return self.head.rows(self.features_FD, self.labels_F, self.weights_F, cache=cache)

    def unlabelled_rows(self, features_ND: Tensor) -> Rows:
        """Return unlabelled rows in the form the head's loss takes; its predictions stand for labels like these."""
        return self.head.unlabelled_rows(features_ND, targets=self.has_targets)

    def labels_of(self, retained: RetainedSet) -> Tensor:
        """Return the labels of retained rows as class numbers or targets, as :attr:`labels_F` has them.

        Raises:
            DataError: They do not fit the head.
        """
        head, labels_R = self.head, retained.labels_R
        return read_labels(labels_R, len(retained.features_RD), head.n_classes, head.loss, "retained")

    def retained_rows(
        self, retained: Retained, *, user: str = "this method", progress: Callable[[int, int], None] | None = None
    ) -> Rows:
        """Return the retained rows in the form the head's loss takes.

        Raises:
            SourceFreeError: No retained data were given; the message names the ``user``.
            DataError: Their labels do not fit the head, or they are not N - N_f rows of total weight V - V_f, so they
                are not the training set without the forget set.
        """
        if retained is None:
            raise SourceFreeError(f"{user} needs the retained data.")
        head, labels_R = self.head, self.labels_of(retained)
        rows = head.rows(retained.features_RD, labels_R, retained.weights_R, cache=True, progress=progress)
        if rows.count != self.n_retain or not math.isclose(rows.weight, self.retained_weight, rel_tol=1e-9):
            raise DataError(
                f"the retained set has {rows.count} rows of total weight {rows.weight:.12g}; the training set without "
                f"the examples to forget has {self.n_retain} of {self.retained_weight:.12g}. Give those rows, with "
                "their sample weights if they had any."
            )
        return rows

    def at_retained_l2(self) -> ForgetRequest:
        """Return the request with the l2 of the retained data's objective.

        It differs from that of the training data if l2 times their total weight stays as it is
        (``head.recipe.l2_reduction="sum"``). The training gradient then includes what the larger regulariser adds.
        """
        head = self.head
        if head.recipe.l2_reduction == MEAN:
            return self
        l2 = head.l2 * head.total_weight / self.retained_weight
        gradient_CE = head.gradient_CE + (l2 - head.l2) * head.regularized_E * head.parameters_CE
        return replace(self, head=replace(head, l2=l2, gradient_CE=gradient_CE))

    def toward(self, reference: Reference) -> ForgetRequest:
        """Return the request with a head that is at the optimum which stands for the reference.

        For the optimum itself, the stored gradient is what is left of the training. For the same recipe, a head that
        was stopped early is taken for the optimum of its objective without the linear part that its gradient shows, and
        with the l2 under which that part is smallest, as :func:`sfu.effective_l2` has it for heads without a gradient.

        Raises:
            ConfigError: The optimum is asked for, and what is left of the training is not known.
        """
        head, gradient_CE = self.head, self.head.gradient_CE
        if head.recipe.trained == OPTIMUM:
            return self
        if reference is Reference.optimum:
            if not bool(gradient_CE.any()):
                raise ConfigError(
                    "reference=optimum needs the gradient of the training objective at a head that was stopped "
                    "early, and the head has none. Give from_module or TrainingRecord.head the gradient_CE, or leave "
                    "the reference out."
                )
            return replace(self, head=replace(head, recipe=replace(head.recipe, trained=OPTIMUM)))
        if not bool(gradient_CE.any()):
            return self
        weight_CE = head.parameters_CE * head.regularized_E
        square = float(weight_CE.square().sum())
        more = -float((gradient_CE * weight_CE).sum()) / square if square > 0 else 0.0
        l2 = max(head.l2 + more, 0.0)
        left_CE = gradient_CE + (l2 - head.l2) * weight_CE
        return replace(
            self, head=replace(head, l2=l2, gradient_CE=torch.zeros_like(gradient_CE), unfinished_CE=left_CE)
        )

    def unlearned_head(self, parameters_CE: Tensor) -> Head:
        """Return the head of the retained data at ``parameters_CE``, assumed to be at its optimum there.

        What the head keeps of its training rows is rewritten without the forgotten ones; a sketch or a Hessian is
        dropped if the loss is not quadratic, because it belongs to the parameters before. A certificate loses its
        bound, which only certified removal can update. The head remembers that it has served a request for these rows.
        """
        head = self.head
        kept = head.kept.without_rows(
            self.features_FD, self.labels_F, n_train=head.n_train, weights=(head.total_weight, self.weight),
            trace=None if head.kept.trace is None else self.trace,
            forgotten_hessian=self._constant_hessian() if head.kept.has_curvature else None,
        )  # fmt: skip
        return replace(
            head,
            parameters_CE=parameters_CE,
            gradient_CE=torch.zeros_like(parameters_CE),
            n_train=self.n_retain,
            weight=None if head.weight is None else self.retained_weight,
            kept=kept,
            certificate=head.certificate and replace(head.certificate, residual_bound=None),
            forgotten=head.forgotten.after(self.recognised_by, self.labels_F),
        )

    def _constant_hessian(self) -> Tensor | None:
        """Return the Hessian of the data term of the forget rows; ``None`` if it depends on the parameters."""
        head = self.head
        if head.layout is not Layout.shared:
            return None
        return head.objective().data_hessian(self.data(), head.parameters_CE, Layout.shared)

    def hessian(self, structure: Structure) -> CurvatureOperator:
        """``H_f``: Hessian of the mean objective of the forget rows at the head."""
        head = self.head
        return build_operator(head.objective(), self.data(cache=True), head.parameters_CE, structure)

    def retained_hessian(self, training: CurvatureOperator, forget: CurvatureOperator) -> CurvatureOperator:
        """``(V H - V_f H_f) / V_r``; Hessians of samples may give it negative eigenvalues."""
        return training.combine([forget], [self.head.total_weight / self.retained_weight, -self.step_ratio])

    def forget_gradient(self) -> Tensor:
        """``g_f``: gradient of the mean objective of the forget rows at the head, ``[C, E]``."""
        head, rows = self.head, self.data()
        own_CE = head.objective().gradient(rows, head.parameters_CE)
        if not self.earlier_sums:
            return own_CE
        sums_CE, constant_CE = rows.weight * own_CE, head.objective().gradient_without_rows(head.parameters_CE)
        for sums in self.earlier_sums:
            sums_CE += sums.gradient_CE.to(own_CE) + sums.weight * constant_CE
        return sums_CE / self.weight

    def newton_gradient(self) -> Tensor:
        """``g_f - (V / V_f) g``: the right-hand side of the Newton step, ``[C, E]``."""
        return self.forget_gradient() - (self.head.total_weight / self.weight) * self.head.gradient_CE


def merge_requests(parts: Sequence[ForgetRequest]) -> ForgetRequest:
    """Merge requests for disjoint sets of rows of one head."""
    weights = [part.weights_F for part in parts if part.weights_F is not None]
    marks = [part.marks_FB for part in parts if part.marks_FB is not None]
    return replace(
        parts[0],
        features_FD=torch.cat([part.features_FD for part in parts]),
        labels_F=torch.cat([part.labels_F for part in parts]),
        weights_F=torch.cat(weights) if weights else None,
        marks_FB=torch.cat(marks) if marks else None,
    )
