"""Attack the rows of a run: train shadows, have each row's method unlearn them, and score the targets.

Shadows are trained where the data are. A source-free method meets them as it met the run's own request: in processes of
its own, which are given the shadows' requests one after the other and nothing else (:mod:`sfu.experiment.row_process`).
They are trained, unlearned and forgotten in batches, so that no more of them are held than fit into memory.

Shapes: S shadows, T targets, C classes, E parameters of a class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfu.data.seal import sealed
from sfu.errors import SfuError
from sfu.evaluation.attacks.base import Needs, Outcome, ShadowSignals
from sfu.evaluation.attacks.design import Design, make_design
from sfu.evaluation.attacks.report import Attacker, Signals, with_gaps
from sfu.evaluation.attacks.signals import confidences_under
from sfu.evaluation.attacks.statistics import thinned
from sfu.experiment.context import RowResult, RunContext
from sfu.experiment.row_files import run_method
from sfu.experiment.row_process import RowTask, packed, steps_in_process
from sfu.heads.base import Head
from sfu.heads.subsets import SubsetTrainer
from sfu.isolation.sandbox import NOTHING, protections
from sfu.progress import Tick
from sfu.reporting.loggers.base import NullLogger
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.results.artifacts import write_json
from sfu.seeds import derive_seed
from sfu.store import cache_dir
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.baselines import Original
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.rows import row_spec
from sfu.unlearning.tuning import Oracle

log = logging.getLogger(__name__)


def attack_rows(run: RunContext, results: dict[str, RowResult], tick: Tick) -> dict[str, dict[str, Any]]:
    """Return the figures of every attack by row, and write the ROC curves if there are attacks besides the paper's."""
    settings, seed = run.config.evaluation, run.seeds["evaluation"]
    data = run.data
    design = make_design(
        data.train_labels_N, data.test_labels_T, run.split,
        n_shadows=settings.shadows, seed=derive_seed(seed, "shadows"),
    )  # fmt: skip
    attacker = Attacker(settings.attacks, data, run.split, design, splits=settings.membership_splits, seed=seed)
    heads = {name: one.unlearned.head for name, one in results.items() if one.unlearned is not None}
    shadows: Signals = None
    unlearned: dict[str, Signals] = {}
    if attacker.needs(Needs.shadows, Needs.unlearned_shadows) and len(design.member_T):
        rows = list(heads) if attacker.needs(Needs.unlearned_shadows) else []
        shadows, unlearned = _Shadows(run, design, attacker).signals(rows, tick)
    found = {
        name: attacker.attack(head, shadows, unlearned.get(name), _noise_shift(run, results[name], run.methods[name]))
        for name, head in heads.items()
    }
    reference = next((name for name, one in run.methods.items() if _is_retrained(one) and name in heads), None)
    if settings.has_more_attacks:
        write_json(run.folder / "roc.json", {name: _curves(outcomes) for name, outcomes in found.items()})
    return with_gaps(found, reference)


def _noise_shift(run: RunContext, result: RowResult, method: UnlearningMethod) -> float | str:
    """Return how far a head without its noise is from Retrained, in standard deviations of the noise; or why not."""
    if not isinstance(method, Newton) or method.noise_sigma == 0:
        return "no noise was added to the head (newton.noise_sigma)"
    if result.unlearned is None or not result.unlearned.applied or method.batches > 1 or run.retrained is None:
        return "the step was not applied at once, or there is no retrained head to compare with"
    head_CE = result.unlearned.head.parameters_CE.double()
    noise_CE = method.noise(head_CE, run.method_context())
    return float((head_CE - noise_CE - run.retrained.parameters_CE.double()).norm()) / method.noise_sigma


def _curves(outcomes: dict[str, Outcome]) -> dict[str, dict[str, list[float]]]:
    return {name: thinned(one.curve) for name, one in outcomes.items() if one.curve is not None}


def _is_retrained(method: UnlearningMethod) -> bool:
    return isinstance(method, Retrained) and not method.again


@dataclass(frozen=True)
class _Batch:
    """Some shadows: their numbers, their heads as trained, and the rows that each forgets and retains."""

    numbers: range
    heads: Sequence[Head]
    forgotten: Sequence[Tensor]
    retained: Sequence[Tensor]


class _Shadows:
    """The shadows of one run."""

    def __init__(self, run: RunContext, design: Design, attacker: Attacker) -> None:
        self._run, self._design = run, design
        self._targets = attacker.targets
        self._features_PD = torch.cat([run.data.train_features_ND, run.data.test_features_TD])
        self._labels_P = torch.cat([run.data.train_labels_N, run.data.test_labels_T])
        seed = derive_seed(run.seeds["training"], "shadows")
        original = run.request.head
        self._trainer = SubsetTrainer(
            original, self._features_PD, self._labels_P, run.config.head,
            seed=seed, known=[design.targets_T, design.others_O],
        )  # fmt: skip

    def signals(self, rows: Sequence[str], tick: Tick) -> tuple[Signals, dict[str, Signals]]:
        """Return what shadows say of the targets, as trained and after the method of each row."""
        design, total, done = self._design, self._design.n_shadows * (1 + len(rows)), 0
        trained: list[Tensor] = []
        unlearned: dict[str, list[Tensor] | str] = {name: self._why_not(name) or [] for name in rows}
        for first in range(0, design.n_shadows, self._trainer.batch):
            try:
                batch = self._train(range(first, min(first + self._trainer.batch, design.n_shadows)))
            except SfuError as error:
                log.warning("The shadows of the attacks could not be trained: %s", error)
                return str(error), dict.fromkeys(rows, str(error))
            trained.append(self._confidences([head.parameters_CE for head in batch.heads]))
            for name in rows:
                done += len(batch.numbers)
                tick(done, total)
                if isinstance(so_far := unlearned[name], str):
                    continue
                try:
                    so_far.append(self._confidences(self._unlearn(name, batch)))
                except SfuError as error:
                    log.warning("The shadows of the row %s could not be unlearned: %s", name, error)
                    unlearned[name] = str(error)
        return self._signals(trained), {
            name: one if isinstance(one, str) else self._signals(one) for name, one in unlearned.items()
        }

    def _why_not(self, name: str) -> str | None:
        """Return why a row's method cannot be applied to shadows."""
        method = self._run.methods[name]
        if method.augmentations:
            return "the method augments images, and shadows forget rows of features"
        if isinstance(method, Oracle):
            return "the settings of the row were chosen by its distance to Retrained, which shadows do not have"
        return None

    def _train(self, numbers: range) -> _Batch:
        design, original = self._design, self._run.request.head
        forgotten = [design.forgotten(number) for number in numbers]
        retained = [design.retained(number) for number in numbers]
        subsets = [(*parts, rows) for parts, rows in zip(forgotten, retained, strict=True)]
        self._trainer.clear()
        heads = self._trainer.train(subsets, [original] * len(subsets), first=2 * numbers.start)
        return _Batch(numbers, heads, [torch.cat(parts) for parts in forgotten], retained)

    def _confidences(self, parameters: Sequence[Tensor] | Tensor) -> Tensor:
        parameters_SCE = parameters if isinstance(parameters, Tensor) else torch.stack(list(parameters))
        return confidences_under(self._run.request.head, parameters_SCE, *self._targets).cpu()

    def _signals(self, parts: Sequence[Tensor]) -> Signals:
        confidence_ST = torch.cat(list(parts)).numpy()
        if not np.isfinite(confidence_ST).all():
            return "some shadows have outputs that are not finite"
        return ShadowSignals(confidence_ST, self._design.inside_ST)

    def _unlearn(self, name: str, batch: _Batch) -> Sequence[Tensor] | Tensor:
        """Return the parameters of all shadows of a batch after the method of a row."""
        run, method, parts = self._run, self._run.methods[name], self._run.config.forget.parts
        if isinstance(method, Original):
            return [head.parameters_CE for head in batch.heads]
        if _is_retrained(method):
            first, subsets = 2 * batch.numbers.start + 1, [(rows,) for rows in batch.retained]
            heads = self._trainer.train(subsets, batch.heads, first=first, summarised=False)
            return [head.parameters_CE for head in heads]
        requests = self._requests(method, batch)
        if method.access is Access.RETAINED:
            sets = (RetainedSet(self._features_PD[index], self._labels_P[index]) for index in batch.retained)
            return [_step(name, method, *one, rows, parts) for one, rows in zip(requests, sets, strict=True)]
        if protections(isolate=run.config.isolate) != NOTHING:
            given = row_spec(run.config, name) if run.methods_named else method
            config = replace(run.config, logger=NullLogger())
            task = RowTask(name, given, config, None, run.method_context(), run.sealed_paths)
            if (payload := packed(task)) is not None:
                closed = [*run.sealed_paths, cache_dir(""), run.folder]
                return steps_in_process(
                    payload, requests, len(batch.numbers), device=run.device, files=method.files, closed=closed
                )
        with sealed(run.sealed_paths):
            return [_step(name, method, *one, None, parts) for one in requests]

    def _requests(self, method: UnlearningMethod, batch: _Batch) -> Iterator[tuple[ForgetRequest, MethodContext]]:
        run = self._run
        for number, head, index in zip(batch.numbers, batch.heads, batch.forgotten, strict=True):
            request = ForgetRequest(
                head, self._features_PD[index], self._labels_P[index],
                kind=run.request.kind, classes=run.request.classes,
            )  # fmt: skip
            seeds = {purpose: derive_seed(seed, f"shadow {number}") for purpose, seed in run.seeds.items()}
            context = replace(run.method_context(), seeds=seeds, keep_path=False, keep_curvature=False, predict=False)
            yield request.without_summary() if method.access is Access.FORGET else request, context


def _step(
    name: str, method: UnlearningMethod, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None,
    parts: int,
) -> Tensor:  # fmt: skip
    result = run_method(name, method, request.private(), context, retained, parts)
    if result.unlearned is None:
        raise SfuError(f"a shadow was not unlearned: {result.error}")
    return result.unlearned.head.parameters_CE
