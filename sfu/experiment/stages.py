"""The stages of a run, one way through: prepare, discard, unlearn, reload, evaluate.

:func:`prepare` is the only place where training data and head training meet; what it returns holds no training row but
those of the request. :func:`discard` makes sure of it.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfu.data.backbones.backbone import NO_BACKBONE
from sfu.data.feature_data import FeatureData
from sfu.data.features.augment import AugmentedImages
from sfu.data.features.store import VIEWS, cache_root
from sfu.data.images.images import Images
from sfu.data.load import load_dataset, source_files
from sfu.data.seal import real_places
from sfu.data.split import ForgetSplit, make_split
from sfu.errors import DataError, SourceFreeError
from sfu.experiment.progress import ProgressDisplay, Tick
from sfu.experiment.resources import Usage, measured
from sfu.heads.linearised.core_extractor import CoreExtractor
from sfu.heads.linearised.preflight import preflight
from sfu.heads.normal_equations import checkpoint_of
from sfu.heads.train import train_head
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.settings import RunConfig
from sfu.unlearning.base import UnlearningMethod, UnlearningResult
from sfu.unlearning.classes import refuse_instances, whole_classes

if TYPE_CHECKING:
    from sfu.data.features.extract import Extractor
    from sfu.experiment.reuse import StageResults

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What is left when the training data are gone.

    Attributes:
        request: Head and forget set.
        split: Row numbers of both sides.
        fingerprint: Of the dataset, to know it again.
        data: Counts and names for the record.
        sources: The dataset's files and folders, and the folder of its features.
        network: Of a linearised head: what turns images into activations, its core trained.
        forget_images: The images to forget, and no others, where a method wants them augmented.
        forget_files: Their files, if they are files.
        watches: Weak references to the training arrays, for :func:`discard`.
    """

    request: ForgetRequest
    split: ForgetSplit
    fingerprint: str
    data: dict[str, object]
    sources: list[Path]
    watches: list[weakref.ref[torch.Tensor] | weakref.ref[Images]]
    network: CoreExtractor | None = None
    forget_images: Images | None = None
    forget_files: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RowResult:
    """One method's outcome: a head, or the error that stopped it."""

    usage: Usage
    unlearned: UnlearningResult | None
    error: str | None = None


def prepare(
    config: RunConfig,
    seeds: dict[str, int],
    device: torch.device,
    dtype: torch.dtype,
    methods: Sequence[UnlearningMethod],
    display: ProgressDisplay,
    kept: StageResults,
) -> Prepared:
    """Load, split, train (or take the head that is ``kept``); return the request and nothing else of the training data.

    Every method may refuse the size of the forget set before training starts.
    """
    with display.stage("loading the data") as tick:
        extractor = _extractor(config, device, tick, display.say)
        data = load_dataset(config.dataset, seeds["split"], extractor, partial(_split, config, seeds, methods))
    if config.forget.indices is not None and data.about_images.get("n_damaged"):
        raise DataError(
            f"forget.indices={config.forget.indices} counts rows, and {data.about_images['n_damaged']} damaged images "
            "are left out, which shifts them; name the images instead (forget.files), or repair the dataset."
        )
    names = [] if data.train_images is None else data.train_images.names()
    split = _split(config, seeds, methods, data.train_labels_N, data.n_classes, data.class_names, names)
    network = extractor if isinstance(extractor, CoreExtractor) else None
    core = None if network is None else network.core
    if core is not None:
        if config.forget.indices is not None and data.about_images["n_public"]:
            raise DataError(
                f"forget.indices={config.forget.indices} counts rows, and dataset.core_fraction takes some away; "
                "name the images instead (forget.files)."
            )
        display.say(str(preflight(core, data.n_train)))
    with display.stage("training the original head") as tick:
        train = partial(
            train_head, data.train_features_ND, data.train_labels_N, data.n_classes, config.head, config.loss,
            seed=seeds["training"], noise_seed=seeds.get("objective"), device=device, dtype=dtype, core=core,
            progress=tick, gram=kept.gram,
            checkpoint=None if core is None else checkpoint_of(core, data.fingerprint(), config, dtype),
        )  # fmt: skip
        head = kept.head(train, device, partial(display.say, "another job trains the same head; waiting for it"), core)
        del train
    request = ForgetRequest(
        head, data.train_features_ND[split.forget_F], data.train_labels_N[split.forget_F],
        classes=whole_classes(data.train_labels_N, split.forget_F),
    )  # fmt: skip
    about: dict[str, object] = {
        "name": data.name, "path": config.dataset.path, "fingerprint": data.fingerprint(), "n_train": data.n_train,
        "n_forget": request.n_forget, "n_retain": request.n_retain, "n_test": data.test_labels_T.shape[0],
        "n_features": data.n_features, "n_classes": data.n_classes, "class_names": list(data.class_names) or None,
    }  # fmt: skip
    sources = source_files(config.dataset)
    if data.train_images is not None:
        about |= {"backbone": asdict(config.backbone), "images": data.about_images}
        sources += [cache_root(config.backbone), *real_places(data.train_images.images.paths)]
    wanted = any(method.augmentations for method in methods)
    images = data.train_images.take(split.forget_F) if wanted and data.train_images is not None else None
    watches: list[weakref.ref[torch.Tensor] | weakref.ref[Images]] = [
        weakref.ref(array)
        for array in (data.train_features_ND, data.train_labels_N, data.test_features_TD, data.test_labels_T)
    ]
    if data.train_images is not None:
        watches.append(weakref.ref(data.train_images.images))
    files = [names[row] for row in split.forget_F.tolist()] if _are_files(data) else []
    return Prepared(request, split, str(about["fingerprint"]), about, sources, watches, network, images, files)


def _split(
    config: RunConfig,
    seeds: dict[str, int],
    methods: Sequence[UnlearningMethod],
    labels_N: torch.Tensor,
    n_classes: int,
    class_names: tuple[str, ...],
    image_names: list[str],
) -> ForgetSplit:
    """The forget set; called beforehand, too, so that what cannot work is refused before features are extracted."""
    split = make_split(config.forget, labels_N, n_classes, seeds["split"], class_names, image_names)
    refuse_instances(methods, labels_N, split.forget_F)
    for method in methods:
        method.check(split.forget_F.numel())
    return split


def _are_files(data: FeatureData) -> bool:
    return data.train_images is not None and bool(data.train_images.images.paths)


def discard(prepared: Prepared) -> None:
    """Collect garbage and make sure that the training arrays are really gone.

    Raises:
        SourceFreeError: Something still holds them.
    """
    gc.collect()
    if any(watch() is not None for watch in prepared.watches):
        raise SourceFreeError("the training features are still referenced after the discard; this is a defect in sfu.")


def augment(
    config: RunConfig,
    device: torch.device,
    prepared: Prepared,
    methods: Iterable[UnlearningMethod],
    display: ProgressDisplay,
) -> dict[str, torch.Tensor]:
    """Features ``[F, D]`` of the forget images after each augmentation that a method wants; opens no other image.

    Raises:
        DataError: An image to forget cannot be decoded any more.
    """
    views: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for method in methods for name in method.augmentations):
        assert prepared.forget_images is not None
        with display.stage(f"augmenting the images to forget ({name})") as tick:
            extractor = _extractor(config, device, tick, display.say, prepared.network)
            assert extractor is not None
            found = extractor.extract(
                AugmentedImages(prepared.forget_images, name),
                shown={"dataset": f"{config.dataset.name}, {name}"},
                folder=VIEWS,
            )
        features = found.features_MD
        views[name] = torch.nn.functional.normalize(features, dim=1) if config.dataset.normalize_rows else features
    return views


def reload(config: RunConfig, seeds: dict[str, int], device: torch.device, prepared: Prepared) -> FeatureData:
    """Load the dataset again, for retraining and evaluation.

    Raises:
        DataError: It is not the same any more.
    """
    data = load_dataset(config.dataset, seeds["split"], _extractor(config, device, known=prepared.network))
    if data.fingerprint() != prepared.fingerprint:
        raise DataError(
            f"the dataset changed while the run was under way (fingerprint {prepared.fingerprint}, now "
            f"{data.fingerprint()}); nothing measured on it would mean anything."
        )
    return data


def _extractor(
    config: RunConfig,
    device: torch.device,
    tick: Tick | None = None,
    say: Callable[[str], None] | None = None,
    known: CoreExtractor | None = None,
) -> Extractor | None:
    """What turns images into features (``known``: with this network); ``None`` for a dataset of features."""
    if known is not None:
        return known.again(tick, say)
    if config.head.name == "linearised":
        return CoreExtractor(config.backbone, config.head, device, progress=tick, say=say)
    if config.backbone.name == NO_BACKBONE:
        return None
    from sfu.data.features.extract import Extractor

    return Extractor(config.backbone, device, progress=tick, say=say)


def run_method(
    name: str,
    method: UnlearningMethod,
    request: ForgetRequest,
    context: MethodContext,
    retained: RetainedSet | None = None,
) -> RowResult:
    """Run one method, measured; an error ends this row, not the run."""
    unlearned, error = None, None
    with measured(request.head.parameters_CE.device) as usage:
        try:
            unlearned = method.unlearn(request, context, retained)
            if not torch.isfinite(unlearned.head.parameters_CE).all():
                unlearned, error = None, "the unlearned head has NaN or infinite parameters"
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            log.debug("%s failed", name, exc_info=True)
    return RowResult(usage, unlearned, error)
