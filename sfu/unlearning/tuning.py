r"""Choose a method's settings from its grid, by one of three rules and the same number of tries for every method.

- ``authors``: as published (or, for ours, as sfu sets them). Nothing is tried.
- ``source_free``: by the forget set and the head alone. A fifth of the forget set is held out and the method forgets
  the other four: the held-out rows are then a sample of what that smaller request retains. For a move :math:`\Delta`,
  the fall of the squared distance to Retrained, in the retain-Hessian norm, is to second order

  .. math:: 2 \tfrac{V_f}{V_r} \langle \Delta, g_f - \tfrac{V}{V_f} g \rangle - \langle \Delta, \hat H \Delta \rangle

  whose first term is known exactly and whose :math:`\hat H` is the Hessian of the held-out rows, which no method has
  seen. The setting with the largest value forgets the whole set. It takes the forget
  set for a random sample: where the head shows that it is none, or with too few rows, the published settings stay.
  sfu's own damping is judged alike.
- ``oracle``: every setting is tried, and who may see Retrained takes the nearest. **Not source-free**, whatever the
  method sees: an upper bound on what the method can do on its grid.

A setting that fails (diverges, finds no adversarial example, ...) is out; if all do, so is the row.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sfu.curvature.sampling import UNLIKE_A_SAMPLE, sampling_ratio
from sfu.errors import ConfigError, SfuError, SourceFreeError
from sfu.heads.base import Head
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.settings import Structure, Tune
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.batches import TrainingSet
from sfu.unlearning.descent import DescentMethod

Candidate = tuple[dict[str, Any], UnlearningMethod]
ORACLE = "oracle (not source-free)"
FEWEST = 20
_HELD_OUT = 5  # one in so many


def settings_of(grid: dict[str, Any], budget: int, what: str) -> list[dict[str, Any]]:
    """Every combination of a grid's values.

    Raises:
        ConfigError: A value is no list, or there are not ``budget`` combinations.
    """
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{what}: grid.{key}={values}; a list of values to try is needed.")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(points) != budget:
        raise ConfigError(
            f"{what}: its grid has {len(points)} settings and tune_budget={budget}: every method tries as many as any "
            "other. Change the grid (variants.NAME.grid), or tune_budget for all."
        )
    return points


class Tuned(UnlearningMethod):
    """Settings of one method to choose from."""

    def __init__(self, candidates: Sequence[Candidate], published: UnlearningMethod) -> None:
        """Keep the candidates, and the method as published for requests that cannot be tuned on."""
        self.candidates, self.published = list(candidates), published

    @property
    def whole_classes(self) -> bool:
        """The method's own."""
        return self.published.whole_classes

    @property
    def access(self) -> Access:
        """The method's own: a choice by the oracle happens elsewhere, after the method is done."""
        return self.published.access

    @property
    def augmentations(self) -> tuple[str, ...]:
        """The method's own."""
        return self.published.augmentations

    def check(self, n_forget: int) -> None:
        """What every setting asks."""
        for _, method in [({}, self.published), *self.candidates]:
            method.check(n_forget)

    def _count(self, worked: int) -> dict[str, Any]:
        return {"tried": len(self.candidates), "failed": len(self.candidates) - worked}

    @abstractmethod
    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Try, and choose if that can be done here."""

    def _try_all(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> list[tuple[dict[str, Any], UnlearningMethod, UnlearningResult]]:
        """Every setting that does not fail.

        Raises:
            SfuError: All do; the first one's error.
            SourceFreeError: One reached for the data.
        """
        outcomes: dict[int, UnlearningResult | SfuError] = {}
        shared = replace(context, memory={}, progress=None)
        for group in _alike([method for _, method in self.candidates], request):
            outcomes |= zip(group, self._try(group, request, shared, retained), strict=True)
            if context.progress is not None:
                context.progress(len(outcomes), len(self.candidates) + 1)
        found = [
            (given, method, outcome)
            for index, (given, method) in enumerate(self.candidates)
            if isinstance(outcome := outcomes[index], UnlearningResult)
            and torch.isfinite(outcome.head.parameters_CE).all()
        ]
        if not found:
            first = next((error for _, error in sorted(outcomes.items()) if isinstance(error, SfuError)), SfuError())
            raise type(first)(f"none of {len(self.candidates)} settings works; the first: {first}")
        return found

    def _try(
        self, group: Sequence[int], request: ForgetRequest, context: MethodContext, retained: RetainedSet | None
    ) -> Sequence[UnlearningResult | SfuError]:
        """The outcomes of some candidates that can be tried together, or of one."""
        methods = [self.candidates[index][1] for index in group]
        try:
            if len(methods) == 1:
                return [methods[0].unlearn(request, context, retained)]
            descents = [method for method in methods if isinstance(method, DescentMethod)]
            return descents[0].unlearn_together(descents, request, context, retained)
        except SourceFreeError:
            raise
        except SfuError as error:
            return [error] * len(methods)


class SourceFree(Tuned):
    """The largest predicted gain on a held-out fifth of the forget set."""

    tuning = Tune.source_free.value

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Choose, then forget all.

        Raises:
            SfuError: Every setting fails.
        """
        why_not = _no_sample(request)
        if why_not is not None:
            outcome = self.published.unlearn(request, context, retained)
            return _with(outcome, {}, f"settings as published: {why_not}, so none can be chosen from the forget set")
        order = torch.randperm(request.n_forget, generator=context.generator("folds"))
        held_out, rest = order[: request.n_forget // _HELD_OUT], order[request.n_forget // _HELD_OUT :]
        small = request.rows(rest)
        trials = self._try_all(
            small,
            replace(context, keep_path=False),
            None if retained is None else TrainingSet(retained, request).keeping(held_out),
        )
        gains = [predicted_gain(small, request.rows(held_out), outcome.head) for _, _, outcome in trials]
        best = max(range(len(trials)), key=gains.__getitem__)
        given, method, _ = trials[best]
        about = self._count(len(trials)) | {"tuning_gain": gains[best]}
        note = "no setting is predicted to be better than nothing" if gains[best] <= 0 else None
        return _with(method.unlearn(request, context, retained), given | about, note)


class Oracle(Tuned):
    """Leaves the choice to :func:`nearest`."""

    tuning = ORACLE

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """Every setting's outcome, the first one's standing for it until the choice is made.

        Raises:
            SfuError: Every setting fails.
        """
        trials = self._try_all(request, context, retained)
        counts = self._count(len(trials))
        outcomes = [_with(outcome, given | counts) for given, _, outcome in trials]
        return replace(outcomes[0], trials=tuple(outcomes))


def nearest(outcome: UnlearningResult, distance: Callable[[Head], float | None]) -> UnlearningResult:
    """The trial of smallest distance to Retrained; the outcome itself if there are no trials.

    Raises:
        ConfigError: There is no Retrained to be near to.
    """
    if not outcome.trials:
        return outcome
    distances = [distance(trial.head) for trial in outcome.trials]
    known = [value for value in distances if value is not None]
    if not known:
        raise ConfigError("tune=oracle chooses by the distance to Retrained, which is not known in this run.")
    return outcome.trials[distances.index(min(known))]


def predicted_gain(request: ForgetRequest, held_out: ForgetRequest, head: Head) -> float:
    """Predicted fall of the squared distance to Retrained; see the module."""
    move_CE = head.parameters_CE - request.head.parameters_CE
    along = float((move_CE * request.newton_gradient()).sum())
    return 2 * request.step_ratio * along - float(held_out.hessian(Structure.products).quadratic(move_CE))


def _alike(methods: Sequence[UnlearningMethod], request: ForgetRequest) -> list[list[int]]:
    """Numbers of methods that can descend together: alike but for the learning rate, on a linear head."""
    groups: list[list[int]] = []
    for index, method in enumerate(methods):
        for group in groups:
            first = methods[group[0]]
            if isinstance(first, DescentMethod) and request.head.stackable and first.alike(method):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _no_sample(request: ForgetRequest) -> str | None:
    """Why the forget set cannot stand for the rest, or ``None``."""
    if request.n_forget < FEWEST:
        return f"{request.n_forget} rows are too few to hold any out"
    ratio = sampling_ratio(request)
    if request.classes is not None or (ratio is not None and ratio > UNLIKE_A_SAMPLE):
        return "the forget set is unlike a random sample"
    return None


def _with(outcome: UnlearningResult, chosen: dict[str, Any], note: str | None = None) -> UnlearningResult:
    """The outcome, saying what was chosen."""
    details = {**outcome.details, **{f"tuned.{key}": value for key, value in chosen.items()}}
    return replace(outcome, details=details, note="; ".join(filter(None, (outcome.note, note))) or None)
