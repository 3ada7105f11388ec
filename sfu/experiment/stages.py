"""The stages of a run, one way through: prepare, discard, unlearn, reload, evaluate.

:func:`prepare` is the only place where training data and head training meet; what it returns holds no training row but
those of the request. :func:`discard` makes sure of it.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from sfu.data.feature_data import FeatureData
from sfu.data.load import load_dataset, source_files
from sfu.data.split import ForgetSplit, make_split
from sfu.errors import DataError, SourceFreeError
from sfu.experiment.progress import Tick
from sfu.experiment.resources import Usage, measured
from sfu.heads.train import train_head
from sfu.settings import RunConfig
from sfu.unlearning.method import RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What is left when the training data are gone.

    Attributes:
        request: Head and forget set.
        split: Row numbers of both sides.
        fingerprint: Of the dataset, to know it again.
        data: Counts and names for the record.
        sources: The dataset's files.
        watches: Weak references to the training arrays, for :func:`discard`.
    """

    request: ForgetRequest
    split: ForgetSplit
    fingerprint: str
    data: dict[str, object]
    sources: list[Path]
    watches: list[weakref.ref[torch.Tensor]]


@dataclass(frozen=True)
class RowResult:
    """One method's outcome: a head, or the error that stopped it."""

    usage: Usage
    unlearned: Unlearned | None
    error: str | None = None


def prepare(
    config: RunConfig,
    seeds: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
    methods: Iterable[UnlearningMethod],
    tick: Tick,
) -> Prepared:
    """Load, split, train; return the request and nothing else of the training data.

    Every method may refuse the size of the forget set before training starts.
    """
    data = load_dataset(config.dataset, seeds["split"])
    split = make_split(config.forget, data.train_labels_N, data.n_classes, seeds["split"])
    for method in methods:
        method.check(split.forget_F.numel())
    head = train_head(
        data.train_features_ND, data.train_labels_N, data.n_classes, config.head, config.loss,
        seed=seeds["training"], device=device, dtype=dtype, progress=tick,
    )  # fmt: skip
    request = ForgetRequest(head, data.train_features_ND[split.forget_F], data.train_labels_N[split.forget_F])
    about: dict[str, object] = {
        "name": data.name, "path": config.dataset.path, "fingerprint": data.fingerprint(), "n_train": data.n_train,
        "n_forget": request.n_forget, "n_retain": request.n_retain, "n_test": data.test_labels_T.shape[0],
        "n_features": data.n_features, "n_classes": data.n_classes,
    }  # fmt: skip
    watches = [
        weakref.ref(array)
        for array in (data.train_features_ND, data.train_labels_N, data.test_features_TD, data.test_labels_T)
    ]
    return Prepared(request, split, str(about["fingerprint"]), about, source_files(config.dataset), watches)


def discard(prepared: Prepared) -> None:
    """Collect garbage and make sure that the training arrays are really gone.

    Raises:
        SourceFreeError: Something still holds them.
    """
    gc.collect()
    if any(watch() is not None for watch in prepared.watches):
        raise SourceFreeError("the training features are still referenced after the discard; this is a defect in sfu.")


def reload(config: RunConfig, seeds: dict[str, int], prepared: Prepared) -> FeatureData:
    """Load the dataset again, for retraining and evaluation.

    Raises:
        DataError: It is not the same any more.
    """
    data = load_dataset(config.dataset, seeds["split"])
    if data.fingerprint() != prepared.fingerprint:
        raise DataError(
            f"the dataset changed while the run was under way (fingerprint {prepared.fingerprint}, now "
            f"{data.fingerprint()}); nothing measured on it would mean anything."
        )
    return data


def run_method(
    name: str, method: UnlearningMethod, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None
) -> RowResult:
    """Run one method, measured; an error ends this row, not the run."""
    unlearned, error = None, None
    with measured(request.head.parameters_CE.device) as usage:
        try:
            unlearned = method.unlearn(request, tools, retained)
            if not torch.isfinite(unlearned.head.parameters_CE).all():
                unlearned, error = None, "the unlearned head has NaN or infinite parameters"
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            log.debug("%s failed", name, exc_info=True)
    return RowResult(usage, unlearned, error)
