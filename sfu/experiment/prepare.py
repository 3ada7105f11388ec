"""The stages from the data to the trained head, the discard of the data, and their reload.

No stage between :func:`discard` and :func:`reload` can reach the training data.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfu.data.canaries import canary_rows, spoiled
from sfu.data.copies import tell_of_copies
from sfu.data.datasets.base import FeatureDataset, ImageDataset
from sfu.data.examples import image_digests, row_digests, write_run_examples
from sfu.data.features.store import cache_root
from sfu.data.load import dataset_digests, extract_features, load_dataset, load_image_parts
from sfu.data.seal import real_places
from sfu.data.settings import NO_BACKBONE
from sfu.data.split import ForgetSplit, make_split
from sfu.errors import DataError, SourceFreeError
from sfu.experiment.cache import HEAD
from sfu.experiment.context import RunContext
from sfu.files import write_text
from sfu.heads.cores.build_core import build_core
from sfu.heads.cores.preflight import preflight
from sfu.heads.files import load_head
from sfu.heads.normal_equations import checkpoint_of
from sfu.heads.settings import LinearisedSettings
from sfu.heads.train import train_head
from sfu.request import ForgetRequest
from sfu.results.artifacts import save_split
from sfu.unlearning.classes import refuse_instances, whole_classes


def load(run: RunContext) -> None:
    """Load features, or images with their labels."""
    with run.display.stage("loading the data"):
        dataset, seed = run.config.dataset, run.seeds["split"]
        if run.config.backbone.name != NO_BACKBONE and isinstance(dataset, ImageDataset):
            run.images = load_image_parts(dataset, seed)
        elif isinstance(dataset, FeatureDataset):
            run.data = load_dataset(dataset, seed)
            _spoil(run)


def check_forget_set(run: RunContext) -> None:
    """Refuse a forget set that cannot work before a network is trained or features are extracted.

    Raises:
        ConfigError: A method cannot handle it.
        DataError: It is empty, is everything, or names images that do not exist.
    """
    if run.images is None:
        return
    if run.config.forget.indices is not None and len(run.images.public):
        raise DataError(
            f"forget.indices={run.config.forget.indices} counts rows, and dataset.core_fraction takes some away. "
            "Name the images instead (forget.files)."
        )
    images, settings = run.images, run.config.canaries
    if settings.count:
        generator = torch.Generator().manual_seed(run.seeds["split"])
        canary_rows(settings, images.train_labels_N, images.n_classes, images.images.class_names, generator)
        return
    names = images.images.class_names, images.train_names()
    _check(run, images.train_labels_N, make_split(
        run.config.forget, images.train_labels_N, images.n_classes, run.seeds["split"], *names, images.groups
    ))  # fmt: skip


def pretrain_core(run: RunContext) -> None:
    """Build the network of a linearised head, and train its core on the public images, if there are any."""
    head, images = run.config.head, run.images
    if not isinstance(head, LinearisedSettings) or images is None:
        return
    with run.display.stage("training the core") as tick:
        run.trunk, run.core = build_core(
            run.config.backbone, head, images.n_classes, *images.public_images(), images.example(),
            run.device, progress=tick, say=run.display.say,
        )  # fmt: skip


def extract(run: RunContext) -> None:
    """Turn images into features."""
    if run.images is not None:
        with run.display.stage("extracting features") as tick:
            run.data = extract_features(run.images, run.extractor(tick))
        _spoil(run)


def choose_forget_set(run: RunContext) -> None:
    """Choose the forget set, and note what the record needs from the data before they go.

    Raises:
        ConfigError: A method cannot handle the forget set.
        DataError: It is empty, is everything, or names rows that do not exist.
    """
    data, indices = run.data, run.config.forget.indices
    if indices is not None and data.about_images.get("n_damaged"):
        raise DataError(
            f"forget.indices={indices} counts rows, and {data.about_images['n_damaged']} damaged images are left out, "
            "which shifts them. Name the images instead (forget.files), or repair the dataset."
        )
    names = [] if data.train_images is None else data.train_images.names()
    forget, labels_N = run.config.forget, data.train_labels_N
    if run.canaries is not None:
        run.split = run.canaries.split(data.n_train, forget.request)
    else:
        run.split = make_split(
            forget, labels_N, data.n_classes, run.seeds["split"], data.class_names, names, data.groups,
            data.train_features_ND,
        )  # fmt: skip
    _check(run, labels_N, run.split)
    run.data_record = _describe_data(run)
    if run.images is not None and data.train_images is not None:
        rows, public = data.train_images.rows_N, run.images.public
        retained = np.concatenate([rows[run.split.retain_R.numpy()], public])
        forget, source = rows[run.split.forget_F.numpy()], run.config.dataset.source
        copies = tell_of_copies(run.images.images.images, source, forget, retained)
        run.data_record["images"] = {**data.about_images, **copies}
    if data.train_images is not None and any(method.augmentations for method in run.methods.values()):
        run.forget_images = data.train_images.take(run.split.forget_F)


def train(run: RunContext) -> None:
    """Train the original head, or read it from the cache, and form the request.

    Raises:
        ConfigError: A setting does not fit the data, or a linearised head does not fit the device's memory.
        SolverError: Training did not converge.
    """
    data, config, forget_F = run.data, run.config, run.split.forget_F
    checkpoint = None
    if run.core is not None:
        run.display.say(str(preflight(run.core, data.n_train)))
        checkpoint = checkpoint_of(run.core, data.fingerprint(), config.head.l2, config.loss, run.dtype)
    if run.cache is not None:
        run.cache.note_examples(lambda: [*_digests(run), *_stored_digests(run)])
    listed = None if run.cache is None else run.cache.examples()
    write_run_examples(run.folder, _digests(run) if listed is None else listed)
    with run.display.stage("training the original head") as tick:
        make = partial(
            train_head, data.train_features_ND, data.train_labels_N, data.n_classes, config.head, config.loss,
            seed=run.seeds["training"], noise_seed=run.seeds.get("objective"), device=run.device, dtype=run.dtype,
            core=run.core, progress=tick, checkpoint=checkpoint,
        )  # fmt: skip
        if run.cache is None:
            head = make()
        else:
            head = run.cache.cached(
                run.cache.keys.head, make, lambda made, entry: made.save(entry / HEAD),
                lambda entry: load_head(entry / HEAD, run.core).to(run.device), name=HEAD,
                waiting=run.waiting("the original head"),
            )  # fmt: skip
    run.request = ForgetRequest(
        head, data.train_features_ND[forget_F], data.train_labels_N[forget_F],
        kind=run.split.request, classes=whole_classes(data.train_labels_N, forget_F),
    )  # fmt: skip


def save_inputs(run: RunContext) -> None:
    """Write the split, the names of the images to forget, and the original head."""
    save_split(run.folder / "split.safetensors", run.split)
    images = run.data.train_images
    if images is not None and images.images.paths:
        names = images.names()
        write_text(run.folder / "forget_files.txt", "".join(f"{names[row]}\n" for row in run.split.forget_F.tolist()))
    run.request.head.save(run.folder / "heads" / "original")


def _digests(run: RunContext) -> list[bytes]:
    """Return digests of all examples of the data: of their images, if there are any, and as the head sees them."""
    parts = (run.data.train_features_ND, run.data.test_features_TD)
    rows = [digest for features in parts for digest in row_digests(features.numpy())]
    images = [] if run.images is None else image_digests(run.images.images.images)
    return [*rows, *(digest for one in images for digest in one)]


def _stored_digests(run: RunContext) -> list[bytes]:
    """Return digests of the examples as the dataset stores them; this reads it again."""
    return dataset_digests(run.config.dataset, run.config.backbone.name, run.seeds["split"])


def discard(run: RunContext) -> None:
    """Drop the training data, and make sure that nothing holds them any more.

    Raises:
        SourceFreeError: Something still holds them.
    """
    data, images = run.data, run.data.train_images
    arrays = (data.train_features_ND, data.train_labels_N, data.test_features_TD, data.test_labels_T)
    watches: list[weakref.ref[Any]] = [weakref.ref(array) for array in arrays]
    run.sealed_paths = run.config.dataset.source_files()
    if images is not None:
        watches.append(weakref.ref(images.images))
        run.sealed_paths += [cache_root(run.config.backbone), *real_places(images.images.paths)]
    run.images = None
    del run.data, data, images, arrays
    gc.collect()
    if any(watch() is not None for watch in watches):
        raise SourceFreeError("The training features are still referenced after the discard. This is a defect in sfu.")


def reload(run: RunContext) -> None:
    """Load the data again, for methods that need them and for the evaluation.

    Raises:
        DataError: They have changed.
    """
    load(run)
    extract(run)
    before, now = run.data_record["fingerprint"], run.data.fingerprint()
    if now != before:
        raise DataError(
            f"The dataset changed while the run was under way (fingerprint {before}, now {now}), so no figure would "
            "mean anything. Run again, and leave the files alone meanwhile."
        )


def _spoil(run: RunContext) -> None:
    """Make canaries of some training rows, always of the same ones."""
    config = run.config
    if config.canaries.count:
        normalized = config.dataset.normalize_rows
        run.data, run.canaries = spoiled(run.data, config.canaries, run.seeds["split"], normalized=normalized)


def _check(run: RunContext, labels_N: Tensor, split: ForgetSplit) -> None:
    """Let every method refuse the forget set."""
    refuse_instances(run.methods.values(), labels_N, split.forget_F)
    for method in run.methods.values():
        method.check(split.forget_F.numel())


def _describe_data(run: RunContext) -> dict[str, object]:
    """Counts and names of the data, and a fingerprint by which a reload knows them again."""
    data, n_forget = run.data, run.split.forget_F.numel()
    about: dict[str, object] = {
        "name": data.name, "path": run.config.dataset.path, "fingerprint": data.fingerprint(), "n_train": data.n_train,
        "n_forget": n_forget, "n_retain": data.n_train - n_forget, "n_test": data.test_labels_T.shape[0],
        "n_features": data.n_features, "n_classes": data.n_classes, "class_names": list(data.class_names) or None,
    }  # fmt: skip
    if data.train_images is not None:
        about |= {"backbone": asdict(run.config.backbone), "images": data.about_images}
    return about
