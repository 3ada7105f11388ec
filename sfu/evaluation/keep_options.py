r"""What to keep of the training rows before they are discarded: bytes, distance to Retrained, and what it gives away.

With features at hand, every way is tried on them (:func:`measured_options`). With a saved head alone, what is known of
its training rows predicts random forget sets (:func:`predicted_options`). Under the quadratic loss, a random sample of
n rows in place of the N_r retained ones leaves

.. math:: \text{distance}^2 = d_2 \left(\tfrac1n + \tfrac1{N_r}\right), \qquad
          d_2 = \operatorname{tr}\bigl[(S (S + l_2)^{-1})^2\bigr]

with the second moments S, if n is several times the number of features. Damping brings the head nearer than that.

Shapes: N training rows, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from sfu.curvature.settings import curvature_settings
from sfu.errors import ConfigError
from sfu.evaluation.measures import squared_norm
from sfu.heads.base import Head
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.heads.settings import Keep, LinearSettings, SketchKind
from sfu.heads.sketch import Sketch, bytes_of_sketch
from sfu.heads.summary import check_keep
from sfu.heads.train import train_head
from sfu.lazy import torch
from sfu.losses.base import Layout, Loss
from sfu.operators.build import build_operator
from sfu.operators.plan import plan_structure
from sfu.operators.spectral import without_negative
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.data.feature_data import FeatureData

SHARES = (0.01, 0.1)
MORE_ROWS = (1_000, 10_000)
_SEVERAL = 4
"""Rows for each feature from which the law holds."""
_FLOAT = 8


class Outlook(NamedTuple):
    """A distance to Retrained (0: Retrained, 1: nothing done), and whether it was measured or follows from the law."""

    distance: float
    measured: bool


@dataclass(frozen=True)
class KeepOption:
    """One way.

    Attributes:
        name: What is kept.
        n_bytes: Bytes that it takes with the head.
        gives_away: What it tells of the training rows, in a few words.
        outlooks: One for each of :data:`SHARES`, as random sets, and one for a whole class; ``None`` if it is unknown.
    """

    name: str
    n_bytes: int
    gives_away: str
    outlooks: tuple[Outlook | None, ...]


@dataclass(frozen=True)
class KeepPlan:
    """All ways, and remarks as whole sentences."""

    options: list[KeepOption]
    remarks: list[str]


class _Way(NamedTuple):
    """What is kept with the head, and further rows that are at hand later."""

    name: str
    gives_away: str
    kept: Kept
    more: tuple[Tensor, ...] = ()


_LEFT_OUT = "Sketches and the full Hessian are left out"
_NOTHING = "weights alone", "nothing"
_BOUND = "bound (the default)", "class sizes"
_MORE = "{:,} unlabelled rows", "those rows, later"
_SKETCH = "sketch: {}", "second moments, mean"
_FULL = "full", "second moments, mean"


def measured_options(
    data: FeatureData,
    config: LinearSettings,
    loss: Loss,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> KeepPlan:
    """Train a head, forget random rows and one class from it in every way, and measure the distance to Retrained.

    The test rows stand for unlabelled rows of the same kind; where there are too few, the law takes their place.

    Raises:
        SfuError: The head cannot be trained.
    """
    rows, labels = data.train_features_ND, data.train_labels_N
    train = partial(train_head, rows, labels, data.n_classes, loss=loss, device=device, dtype=dtype, seed=seed)
    remarks = []
    try:
        head = train(head=replace(config, keep=Keep.full))
    except ConfigError as error:
        head = train(head=replace(config, keep=Keep.bound))
        remarks.append(f"{_LEFT_OUT}: {error}")
    ways, sets = _ways(head, data.test_features_TD), _forget_sets(labels, seed)
    found: list[dict[str, float]] = []
    for done, (_, forget_F) in enumerate(sets):
        found.append(_measured(head, rows, labels, forget_F, ways, config, seed))
        if progress is not None:
            progress(done + 1, len(sets))
    options = [
        KeepOption(way.name, _bytes_of(way.kept), way.gives_away, tuple(Outlook(one[way.name], True) for one in found))
        for way in ways
    ]
    tried = {way.name for way in ways}
    further = _with_more_rows(_Law.of(head), head)
    place = 2 + len(MORE_ROWS) - len([one for one in further if one.name not in tried])
    options[place:place] = [one for one in further if one.name not in tried]
    remarks.append(f"Measured on these rows: one random draw of each size, and class {sets[-1][0]}.")
    return KeepPlan(options, remarks)


def predicted_options(head: Head) -> KeepPlan:
    """Predict random forget sets from what the head keeps of its training rows."""
    law, unknown = _Law.of(head), (None,) * (len(SHARES) + 1)
    bound = Kept(0.0, torch.zeros(head.n_classes, dtype=torch.float64), trace=0.0)
    remarks = ["Whole classes cannot be predicted from a head. Give a file of features."]
    if law is None:
        why = "it keeps no second moments" if head.layout is Layout.shared else f"its loss is {head.loss.name}"
        remarks = [f"Distances cannot be predicted from this head, because {why}. Give a file of features."]
    options = [
        KeepOption(_NOTHING[0], 0, _NOTHING[1], _by_law(law, head.n_train)),
        KeepOption(_BOUND[0], _bytes_of(bound), _BOUND[1], _by_law(law, head.n_train)),
        *_with_more_rows(law, head),
    ]
    try:
        check_keep(head, Keep.full)
    except ConfigError as error:
        return KeepPlan(options, [*remarks, f"{_LEFT_OUT}: {error}"])
    assert isinstance(head, LinearHead)
    mean, shape = _bytes_of(bound) + _FLOAT * head.n_features, head.hessian_shape
    for kind in SketchKind:
        n_bytes = mean + bytes_of_sketch(kind, math.prod(shape[:-2]), shape[-1])
        outlooks = unknown if law is None else (*law.sketched(kind), None)
        options.append(KeepOption(_SKETCH[0].format(kind.value), n_bytes, _SKETCH[1], outlooks))
    exact = (Outlook(0.0, False),) * (len(SHARES) + 1)
    n_bytes = mean + _FLOAT * math.prod(shape)
    options.append(KeepOption(_FULL[0], n_bytes, _FULL[1], exact if head.layout is Layout.shared else unknown))
    return KeepPlan(options, remarks)


def _ways(head: Head, more_UD: Tensor) -> list[_Way]:
    numbers, kept = head.kept.numbers(), head.kept
    ways = [_Way(*_NOTHING, Kept()), _Way(*_BOUND, numbers)]
    ways += [
        _Way(_MORE[0].format(count), _MORE[1], numbers, (more_UD[:count],))
        for count in MORE_ROWS
        if count <= len(more_UD)
    ]
    if (hessian := kept.data_hessian) is not None:
        for kind in SketchKind:
            sketch = Sketch.encode(hessian, kind)
            ways.append(
                _Way(_SKETCH[0].format(kind.value), _SKETCH[1], replace(kept, sketch=sketch, data_hessian=None))
            )
        ways.append(_Way(*_FULL, kept))
    return ways


def _bytes_of(kept: Kept) -> int:
    numbers = sum(one is not None for one in (kept.bound, kept.trace))
    numbers += 0 if kept.shares_C is None else len(kept.shares_C)
    return _FLOAT * numbers + sum(one.numel() * one.element_size() for one in kept.as_secrets().values())


def _forget_sets(labels_N: Tensor, seed: int) -> list[tuple[int | None, Tensor]]:
    """Return rows drawn at random, for each share, and those of the class of median size (with its number)."""
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(seed))
    counts_C = labels_N.bincount()
    present = sorted(counts_C.nonzero()[:, 0].tolist(), key=lambda c: int(counts_C[c]))
    middle = present[(len(present) - 1) // 2]
    random = [order_N[: max(1, round(share * len(labels_N)))] for share in SHARES]
    return [*((None, rows) for rows in random), (middle, (labels_N == middle).nonzero()[:, 0])]


def _measured(
    head: Head,
    features_ND: Tensor,
    labels_N: Tensor,
    forget_F: Tensor,
    ways: list[_Way],
    config: LinearSettings,
    seed: int,
) -> dict[str, float]:
    """Return the distance to Retrained of every way, for one forget set."""
    keep_N = torch.ones(len(labels_N), dtype=torch.bool)
    keep_N[forget_F] = False
    retained = RetainedSet(features_ND[keep_N], labels_N[keep_N])
    context = MethodContext({"training": seed, "folds": seed, "perturbation": seed})
    request = ForgetRequest(head, features_ND[forget_F], labels_N[forget_F])
    target_CE = Retrained(replace(config, keep=Keep.bound)).unlearn(request, context, retained).head.parameters_CE
    rows = head.rows(retained.features_RD, retained.labels_R, cache=True)
    n_blocks, width = head.parameters_CE.shape
    plan = plan_structure(head.layout, n_blocks, width, rows.count, rows.device)
    hessian = build_operator(head.objective(), rows, head.parameters_CE, plan.structure)
    nothing = squared_norm(head.parameters_CE - target_CE, hessian)
    found = {}
    for way in ways:
        estimator = "stored" if way.kept.has_curvature else "closed_form"
        one = replace(request, head=replace(head, kept=way.kept), unlabelled=way.more)
        reached = Newton(curvature_settings(estimator=estimator)).unlearn(one, context).head
        left = squared_norm(reached.parameters_CE - target_CE, hessian)
        found[way.name] = math.sqrt(left / nothing) if nothing > 0 else 0.0
    return found


def _with_more_rows(law: _Law | None, head: Head) -> list[KeepOption]:
    """Return the options of rows that are at hand later, by the law."""
    n_bytes = _FLOAT * (2 + head.n_classes)
    return [
        KeepOption(_MORE[0].format(more), n_bytes, _MORE[1], _by_law(law, head.n_train, more)) for more in MORE_ROWS
    ]


def _by_law(law: _Law | None, n_train: int, more: int = 0) -> tuple[Outlook | None, ...]:
    if law is None:
        return (None,) * (len(SHARES) + 1)
    return (*(law.distance(n_train, round(share * n_train), more) for share in SHARES), None)


@dataclass(frozen=True)
class _Law:
    """Predictions for random forget sets under a quadratic loss."""

    moments_EE: Tensor
    ridge_EE: Tensor

    @classmethod
    def of(cls, head: Head) -> _Law | None:
        """Return the law; ``None`` if second moments are not known, or the loss has another."""
        hessian = head.kept.hessian(head.layout) if head.layout is Layout.shared else None
        return None if hessian is None else cls(hessian.double(), torch.diag(head.objective().ridge_E.double()))

    @cached_property
    def d2(self) -> float:
        """The factor of the law."""
        kept_EE = self.moments_EE @ _inverse(self.moments_EE + self.ridge_EE)
        return float((kept_EE @ kept_EE).trace())

    def distance(self, n_train: int, n_forget: int, more: int = 0) -> Outlook | None:
        """Return what forget rows and ``more`` others of their kind leave; ``None`` if they are too few for the law."""
        count = n_forget + more
        if count < _SEVERAL * len(self.moments_EE):
            return None
        return Outlook(min(1.0, math.sqrt(self.d2 * (1 / count + 1 / (n_train - n_forget)))), False)

    def sketched(self, kind: SketchKind) -> list[Outlook]:
        """Return the distances that the rounding of a sketch leaves, for random sets of each size.

        Features are encoded in reverse order, so that a matrix that comes from a sketch is rounded anew.
        """
        exact_EE = self.moments_EE
        off_EE = Sketch.encode(exact_EE.flip(0, 1), kind).decode()[0].flip(0, 1) - exact_EE
        inverse_EE = _inverse(exact_EE + self.ridge_EE)
        whole = float((inverse_EE @ exact_EE).trace())  # the mean squared step, up to the residuals
        outlooks = []
        for share in SHARES:
            rounded_EE = without_negative(exact_EE + off_EE / (1 - share)) + self.ridge_EE
            wrong_EE = _inverse(rounded_EE) - inverse_EE
            square = float((wrong_EE @ (exact_EE + self.ridge_EE) @ wrong_EE @ exact_EE).trace())
            outlooks.append(Outlook(math.sqrt(max(0.0, square) / whole) if whole > 0 else 0.0, False))
        return outlooks


def _inverse(matrix_EE: Tensor) -> Tensor:
    return torch.linalg.pinv(matrix_EE, hermitian=True)
