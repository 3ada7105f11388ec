"""The stages that run the methods, measured and cached, and the one that scores them."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfu.data.augmentations import numbered
from sfu.data.backbones.weights import weights_digest
from sfu.data.features.store import VIEWS, views_folder
from sfu.data.images.images import AugmentedImages
from sfu.data.seal import sealed
from sfu.data.settings import NO_BACKBONE
from sfu.errors import ConfigError, SfuError
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.theory import theory_of
from sfu.evaluation.white_box import WhiteBox
from sfu.experiment.context import RowResult, RunContext
from sfu.experiment.ensembles import klom_of_rows
from sfu.experiment.row_files import read_row, run_method, write_row
from sfu.experiment.row_process import RowTask, packed, run_in_process
from sfu.experiment.shadows import attack_rows
from sfu.heads.base import Head
from sfu.isolation.sandbox import NOTHING, protections
from sfu.reporting.loggers.base import NullLogger
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.results.artifacts import write_json
from sfu.store import cache_dir
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.result import UnlearningResult
from sfu.unlearning.rows import row_spec
from sfu.unlearning.tuning import nearest

log = logging.getLogger(__name__)


def check_augmentations(run: RunContext) -> None:
    """Refuse methods that augment images where there are none.

    Raises:
        ConfigError: The message names the row.
    """
    for name, method in run.methods.items():
        if method.augmentations and run.config.backbone.name == NO_BACKBONE:
            raise ConfigError(
                f"curvature.augment={list(method.augmentations)} (row {name}) augments images, but backbone=none reads "
                "features. Choose a dataset of images and a backbone, or leave curvature.augment empty."
            )


def run_source_free_rows(run: RunContext) -> None:
    """Run the methods that need no retained data, where the data can be neither loaded nor opened."""
    allowed: list[Path] = []
    if run.forget_images is not None:
        allowed = [*run.forget_images.paths, views_folder(run.config.backbone)]
    with sealed(run.sealed_paths, allowed=allowed):
        views = _augment(run)
        for name, method in run.methods.items():
            if method.access is Access.RETAINED:
                continue
            request = run.request.without_summary() if method.access is Access.FORGET else run.request
            if method.augmentations:
                own = [views[view] for view in numbered(method.augmentations)]
                features_VFD, partners_VF = (torch.stack(parts) for parts in zip(*own, strict=True))
                request = replace(request, views_VFD=features_VFD, partners_VF=partners_VF)
            _run_row(run, name, method, request, None)


def run_rows_with_data(run: RunContext) -> None:
    """Run the methods that need the retained data, and get the retrained head to compare with."""
    for name, method in run.methods.items():
        if method.access is Access.RETAINED:
            _run_row(run, name, method, run.request, _retained_set(run))
    run.retrained = _retrained(run)


def evaluate(run: RunContext) -> dict[str, Any]:
    """Score every row, save its head, and return the rows of the table."""
    rows: dict[str, Any] = {}
    ensembles = klom_of_rows(run, _compute_row)
    with run.display.stage("evaluating") as tick, run.timed("evaluate"):
        evaluator = Evaluator(
            run.data, run.split, run.request.head, run.retrained,
            membership_splits=run.config.evaluation.membership_splits, seed=run.seeds["evaluation"],
            canaries=run.canaries,
        )  # fmt: skip
        results = {name: _choose_trial(run.results[name], evaluator) for name in run.methods}
        if run.config.evaluation.trade_off:
            paths = {
                name: evaluator.trade_off(result.unlearned.path or [result.unlearned.head.parameters_CE])
                for name, result in results.items()
                if result.unlearned is not None
            }
            write_json(run.folder / "trade_off.json", paths)
        attacker = None
        if run.config.evaluation.white_box:
            attacker = WhiteBox(run.request, _retained_set(run), run.data.test_features_TD)
        heads = {name: result.unlearned.head for name, result in results.items() if result.unlearned is not None}
        scored = dict(zip(heads, evaluator.evaluate(*heads.values()), strict=True))
        for done, (name, result) in enumerate(results.items(), start=1):
            scores: dict[str, Any] = {}
            if result.unlearned is not None:
                result.unlearned.head.save(run.folder / "heads" / name)
                scores |= scored[name]
                if attacker is not None:
                    scores["white_box"] = attacker.attack(result.unlearned.head)
                if run.config.evaluation.theory:
                    scores["theory"] = _theory(run, result.unlearned)
            rows[name] = _describe_row(run.methods[name], result, scores | ensembles.get(name, {}))
            tick(done, len(results))
    if run.config.evaluation.attacks:
        with run.display.stage("attacking") as tick, run.timed("attack"):
            for name, found in attack_rows(run, results, tick).items():
                rows[name]["attacks"] = found
    return rows


def _theory(run: RunContext, result: UnlearningResult) -> dict[str, Any] | None:
    """Check the paper's bounds on a Newton step, if the row took one whose Hessian it kept."""
    if result.curvature is None:
        return None
    seed = run.seeds["perturbation"]
    return theory_of(result.curvature, run.request, _retained_set(run), run.retrained, seed=seed)


def _augment(run: RunContext) -> dict[tuple[str, int], tuple[Tensor, Tensor]]:
    """Features ``[F, D]`` of the forget images under each augmentation and draw that a method wants; no other image.

    With them comes the number of the image that each is mixed with, ``[F]``.
    """
    views: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    wanted = [view for method in run.methods.values() for view in numbered(method.augmentations)]
    for view in dict.fromkeys(wanted):
        assert run.forget_images is not None
        images = AugmentedImages(run.forget_images, *view)
        with run.display.stage(f"augmenting the images to forget ({images.title})") as tick:
            shown = {"dataset": f"{run.config.dataset.name}, {images.title}"}
            found = run.extractor(tick).extract(images, shown=shown, folder=VIEWS)
        features = found.features_MD
        features = torch.nn.functional.normalize(features, dim=1) if run.config.dataset.normalize_rows else features
        views[view] = features, torch.tensor([images.partner(index) for index in range(len(images))])
    return views


def _run_row(
    run: RunContext, name: str, method: UnlearningMethod, request: ForgetRequest, retained: RetainedSet | None
) -> None:
    sees = "source-free" if retained is None else "with the retained data"
    with run.display.stage(f"{name} ({sees})") as tick:
        make = partial(_compute_row, run, name, method, request, retained, run.method_context(tick))
        if run.cache is None:
            result = make()
        else:
            result = run.cache.cached(
                run.cache.keys.rows[name], make, write_row, lambda entry: read_row(entry, run.core, run.device),
                name=name, waiting=run.waiting(name), worth_caching=lambda made: made.unlearned is not None,
            )  # fmt: skip
    run.results[name] = result
    run.on_stage(name, result.usage.seconds)


def _compute_row(
    run: RunContext, name: str, method: UnlearningMethod, request: ForgetRequest, retained: RetainedSet | None,
    context: MethodContext,
) -> RowResult:  # fmt: skip
    """Run a row: a source-free one in a process of its own, if there can be one, and any other on its own copies."""
    if retained is None and protections(isolate=run.config.isolate) != NOTHING:
        config = replace(run.config, logger=NullLogger())
        given = row_spec(config, name) if run.methods_named else method
        task = RowTask(name, given, config, request, context, run.sealed_paths)
        if (payload := packed(task)) is not None:
            closed = [*run.sealed_paths, cache_dir(""), run.folder]
            result = run_in_process(
                payload, device=run.device, files=method.files, closed=closed, core=run.core, tick=context.report
            )
            return _fitting(result, request.head)
    parts = run.config.forget.parts
    result = _fitting(run_method(name, method, request.private(), context, retained, parts), request.head)
    if run.core is not None and weights_digest(run.core.top) != run.core.digest:
        raise SfuError(
            f"The row {name} changed the weights of the network below the head, which other rows use. No figure of "
            "this run would mean anything. Have the method work on a copy (copy.deepcopy(head.core))."
        )
    return result if retained is not None else replace(result, isolation=NOTHING)


def _fitting(result: RowResult, original: Head) -> RowResult:
    """Return the row, or its failure if a head of it cannot take the original's place."""
    results = [] if result.unlearned is None else [result.unlearned, *result.unlearned.trials]
    for head in (one.head for one in results):
        what = [(type(one).__name__, list(one.parameters_CE.shape), one.n_features, one.n_classes, one.bias)
                for one in (head, original)]  # fmt: skip
        if what[0] != what[1]:
            kind, shape, *_ = what[0]
            error = f"it returned a {kind} with parameters {shape}, which does not fit a {what[1][0]} with {what[1][1]}"
            return replace(result, unlearned=None, error=error)
    return result


def _retained_set(run: RunContext) -> RetainedSet:
    """The retained rows: a copy for each method, which may change it."""
    retain_R = run.split.retain_R
    return RetainedSet(run.data.train_features_ND[retain_R], run.data.train_labels_N[retain_R])


def _retrained(run: RunContext) -> Head | None:
    """Retrained's head: that of its row, or one trained for the comparison alone; ``None`` if training fails."""
    for name, method in run.methods.items():
        if isinstance(method, Retrained):
            outcome = run.results[name].unlearned
            return None if outcome is None else outcome.head
    try:
        return Retrained(run.config.head).unlearn(run.request, run.method_context(), _retained_set(run)).head
    except SfuError as error:
        log.warning("Retrained could not be trained, so nothing is compared with it: %s", error)
        return None


def _choose_trial(result: RowResult, evaluator: Evaluator) -> RowResult:
    """Choose the trial nearest to Retrained, where a method left the choice open (``tune=oracle``)."""
    if result.unlearned is None:
        return result
    try:
        return replace(result, unlearned=nearest(result.unlearned, evaluator.distance))
    except ConfigError as error:
        return replace(result, unlearned=None, error=f"ConfigError: {error}")


def _describe_row(method: UnlearningMethod, result: RowResult, scores: dict[str, Any]) -> dict[str, Any]:
    """One row of the table; ``scores`` is empty if the method failed."""
    row: dict[str, Any] = {"access": method.access.value, "tuning": method.tuning, **scores}
    if result.unlearned is None:
        row |= {"applied": False, "details": {}, "note": f"failed: {result.error}", "error": result.error}
    else:
        row |= {
            "applied": result.unlearned.applied,
            "predicted_distance_gain": result.unlearned.predicted_distance_gain,
            "predicted_share": result.unlearned.predicted_share,
            "predicted_share_interval": result.unlearned.predicted_share_interval,
            "predicted_distance": result.unlearned.predicted_distance,
            "details": dict(result.unlearned.details),
            "note": result.unlearned.note,
        }
    return row | asdict(result.usage) | {"isolation": result.isolation}
