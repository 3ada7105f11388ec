r"""Choose a method's settings from its grid, by one of three rules and with the same number of tries for every method.

- ``authors``: use the published settings (for ours, sfu's defaults). Nothing is tried.
- ``source_free``: choose by the forget set and the head alone. A fifth of the forget set is held out and the method
  forgets the rest, so the held-out rows are a sample of what that smaller request retains. For a move :math:`\Delta`,
  the squared distance to Retrained, in the retain-Hessian norm, falls to second order by

  .. math:: 2 \tfrac{V_f}{V_r} \langle \Delta, g_f - \tfrac{V}{V_f} g \rangle - \langle \Delta, \hat H \Delta \rangle

  The first term is known without error, and :math:`\hat H` is the Hessian of the held-out rows, which no method has
  seen. The setting with the largest value is then used to forget the whole set. The rule takes the forget set for a
  random sample. If the head shows that it is not, or there are too few rows, the published settings are used. sfu's own
  damping is tuned in the same way.
- ``oracle``: try every setting and keep the one closest to the retrained model. This uses the retained data, so it is
  **not source-free**, whatever the method sees: it is an upper bound on what the method can do on its grid.

A setting that fails (diverges, finds no adversarial example, ...) is left out. If all fail, the row fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sfu.curvature.sampling import UNLIKE_A_SAMPLE, sampling_ratio
from sfu.errors import ConfigError, SfuError, SourceFreeError
from sfu.heads.base import Head
from sfu.lazy import torch
from sfu.operators.structure import Structure
from sfu.request import Access, ForgetRequest, MethodContext, Retained
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.batches import with_rows
from sfu.unlearning.descent import DescentMethod
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.settings import Tune

Candidate = tuple[dict[str, Any], UnlearningMethod]
ORACLE = "oracle (not source-free)"
FEWEST = 20
_HELD_OUT = 5  # one in so many


def settings_of(grid: dict[str, Any], budget: int, what: str) -> list[dict[str, Any]]:
    """Return every combination of a grid's values.

    Raises:
        ConfigError: A value is not a list, or there are not ``budget`` combinations.
    """
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{what}: grid.{key}={values}. Give a list of values to try.")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(points) != budget:
        raise ConfigError(
            f"{what}: its grid has {len(points)} settings, but tune_budget={budget} and every method must try equally "
            "many. Change the grid (variants.NAME.grid), or tune_budget for all."
        )
    return points


class Tuned(UnlearningMethod):
    """A method with several settings to choose from, and its published settings for requests that allow no choice."""

    def __init__(self, candidates: Sequence[Candidate], published: UnlearningMethod) -> None:
        self.candidates, self.published = list(candidates), published

    @property
    def method_name(self) -> str:
        return self.published.method_name

    @property
    def whole_classes(self) -> bool:
        return self.published.whole_classes

    @property
    def access(self) -> Access:
        """The method's own access; the oracle chooses elsewhere, after the method is done."""
        return self.published.access

    @property
    def augmentations(self) -> tuple[str, ...]:
        return self.published.augmentations

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for _, method in [({}, self.published), *self.candidates] for path in method.files)

    def check(self, n_forget: int) -> None:
        for _, method in [({}, self.published), *self.candidates]:
            method.check(n_forget)

    def _count(self, worked: int) -> dict[str, Any]:
        return {"tried": len(self.candidates), "failed": len(self.candidates) - worked}

    def _try_all(
        self, request: ForgetRequest, context: MethodContext, retained: Retained
    ) -> list[tuple[dict[str, Any], UnlearningMethod, UnlearningResult]]:
        """Return every setting that does not fail, with its method and result.

        Raises:
            SfuError: All settings fail; this is the first one's error.
            SourceFreeError: A setting reached for the data.
        """
        results: dict[int, UnlearningResult | SfuError] = {}
        shared = replace(context, memory={}, progress=None)
        for group in _descending_together([method for _, method in self.candidates], request):
            results |= zip(group, self._try(group, request, shared, retained), strict=True)
            context.report(len(results), len(self.candidates) + 1)
        found = [
            (given, method, result)
            for index, (given, method) in enumerate(self.candidates)
            if isinstance(result := results[index], UnlearningResult)  # heads refuse values that are not finite
        ]
        if not found:
            first = next((error for _, error in sorted(results.items()) if isinstance(error, SfuError)), SfuError())
            raise type(first)(f"none of {len(self.candidates)} settings works. The first one's error: {first}")
        return found

    def _try(
        self, group: Sequence[int], request: ForgetRequest, context: MethodContext, retained: Retained
    ) -> Sequence[UnlearningResult | SfuError]:
        """Return the results of one candidate, or of several that can be tried together."""
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
    """Chooses the setting of the largest predicted gain on a held-out fifth of the forget set."""

    tuning = Tune.source_free.value

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        why_not = _no_sample(request)
        if why_not is not None:
            result = self.published.unlearn(request, context, retained)
            return _with(result, {}, f"settings as published: {why_not}, so none can be chosen from the forget set")
        order = torch.randperm(request.n_forget, generator=context.generator("folds"))
        held_out, others = order[: request.n_forget // _HELD_OUT], order[request.n_forget // _HELD_OUT :]
        small = request.rows(others)
        more = None if retained is None else with_rows(retained, request, held_out)
        trials = self._try_all(small, replace(context, keep_path=False), more)
        gains = [predicted_distance_gain(small, request.rows(held_out), result.head) for _, _, result in trials]
        best = max(range(len(trials)), key=gains.__getitem__)
        given, method, _ = trials[best]
        about = self._count(len(trials)) | {"tuning_gain": gains[best]}
        note = "no setting is predicted to be better than nothing" if gains[best] <= 0 else None
        return _with(method.unlearn(request, context, retained), given | about, note)


class Oracle(Tuned):
    """Returns every setting's result as a trial of the first one, and leaves the choice to :func:`nearest`."""

    tuning = ORACLE

    def unlearn(self, request: ForgetRequest, context: MethodContext, retained: Retained = None) -> UnlearningResult:
        trials = self._try_all(request, context, retained)
        counts = self._count(len(trials))
        results = [_with(result, given | counts) for given, _, result in trials]
        return replace(results[0], trials=tuple(results))


def nearest(result: UnlearningResult, distance: Callable[[Head], float | None]) -> UnlearningResult:
    """Return the trial of smallest distance to Retrained, or the result itself if there are no trials.

    Raises:
        ConfigError: The distance to Retrained is not known.
    """
    if not result.trials:
        return result
    distances = [distance(trial.head) for trial in result.trials]
    known = [value for value in distances if value is not None]
    if not known:
        raise ConfigError(
            "tune=oracle chooses by the distance to Retrained, which is not known in this run. Add retrained to "
            "methods."
        )
    return result.trials[distances.index(min(known))]


def predicted_distance_gain(request: ForgetRequest, held_out: ForgetRequest, head: Head) -> float:
    """Return the predicted fall of the squared distance to Retrained, by the formula above."""
    move_CE = head.parameters_CE - request.head.parameters_CE
    along = float((move_CE * request.newton_gradient()).sum())
    return 2 * request.step_ratio * along - float(held_out.hessian(Structure.products).quadratic(move_CE))


def _descending_together(methods: Sequence[UnlearningMethod], request: ForgetRequest) -> list[list[int]]:
    """Group methods that differ only in their learning rate, which can descend together on a linear head."""
    groups: list[list[int]] = []
    for index, method in enumerate(methods):
        for group in groups:
            first = methods[group[0]]
            if isinstance(first, DescentMethod) and request.head.stackable and first.descends_with(method):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def _no_sample(request: ForgetRequest) -> str | None:
    """Return why the forget set does not represent the rest, or ``None`` if it does."""
    if request.n_forget < FEWEST:
        return f"{request.n_forget} rows are too few to hold any out"
    ratio = sampling_ratio(request)
    if request.classes is not None or (ratio is not None and ratio > UNLIKE_A_SAMPLE):
        return "the forget set is unlike a random sample"
    return None


def _with(result: UnlearningResult, chosen: dict[str, Any], note: str | None = None) -> UnlearningResult:
    """Add what was chosen to the result."""
    details = {**result.details, **{f"tuned.{key}": value for key, value in chosen.items()}}
    return replace(result, details=details, note="; ".join(filter(None, (result.note, note))) or None)
