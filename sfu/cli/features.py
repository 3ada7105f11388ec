"""The command ``sfu-features``: extract features beforehand, list, remove and export them.

``extract`` and ``export`` take the same ``key=value`` settings as ``sfu``. ``extract`` is the one command that runs
under torchrun.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.cli.commands import IN_CACHE, add_ls_and_rm, compose_settings, remove_entries, run_command
from sfu.cli.forget import Cache, add_forget, forget
from sfu.data.features.ranks import launched_by_torchrun
from sfu.errors import ConfigError
from sfu.files import human_size
from sfu.lazy import first_imports
from sfu.store import Entry, cache_dir, size_of

if TYPE_CHECKING:
    from sfu.data.datasets.base import ImageDataset
    from sfu.data.features.export import ExportSettings
    from sfu.data.features.extract import Extractor
    from sfu.data.features.store import FeatureStore
    from sfu.data.images.images import Images
    from sfu.experiment.config import RunConfig


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed."""
    parser = ArgumentParser(prog="sfu-features", description="The features that sfu has extracted and cached.")
    commands = parser.add_subparsers(dest="command", required=True)
    removing = add_ls_and_rm(commands.add_parser, "features", _list, _remove)
    removing.add_argument("keys", nargs="*", metavar="KEY", help="the beginning of a key")
    removing.add_argument("--unfinished", action="store_true", help="whatever is not complete")
    add_forget(commands.add_parser, "features", _forget)
    extracting = commands.add_parser("extract", help="extract beforehand; under torchrun, with several processes")
    extracting.add_argument("settings", nargs="*", metavar="key=value", help="as for sfu: dataset=... backbone=...")
    extracting.set_defaults(run=_extract)
    exporting = commands.add_parser("export", help="write the features of a dataset's images to one file")
    exporting.add_argument("file", type=Path, metavar="FILE", help="for dataset=features: .npz or .safetensors")
    exporting.add_argument(
        "settings", nargs="*", metavar="key=value",
        help="as for sfu, and projection=K, rotation=SEED, dtype=float32|float16|uint8, overwrite=true",
    )  # fmt: skip
    exporting.set_defaults(run=_export)
    run_command(parser, arguments, IN_CACHE)


def _list(given: Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from sfu.data.features.store import about_features, cached_features, count_chunks
    from sfu.reporting.terminal import Text

    entries = cached_features(given.cache)
    if not entries:
        print(f"No features are cached in {given.cache}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "dataset", "backbone", "images", "size", "chunks", "last used"):
        number = name in ("images", "size", "chunks")
        table.add_column(name, justify="right" if number else "left", no_wrap=name == "key")
    for entry in entries:
        about, (there, needed) = about_features(entry), count_chunks(entry)
        record, crop = about.record, about.record.transform.crop
        table.add_row(
            entry.key[:12],
            Text(about.shown.dataset),  # a name is no markup
            Text(record.backbone + (f" {crop} px" if crop else "")),
            "?" if record.n_images is None else f"{record.n_images:,}",
            human_size(size_of([entry])),
            f"{there}/{needed or '?'}",
            f"{entry.used:%Y-%m-%d}",
        )
    Console().print(table)
    print(f"{len(entries)} in {given.cache}, {human_size(size_of(entries))} in all.")


def _remove(given: Namespace) -> None:
    from sfu.data.features.store import cached_features, is_unfinished

    if sum((bool(given.keys), given.all, given.unfinished)) != 1:
        raise ConfigError("rm needs keys, or --all, or --unfinished.")
    entries = cached_features(given.cache)
    if given.unfinished:
        entries = [entry for entry in entries if is_unfinished(entry)]
    elif given.keys:
        entries = [_named(prefix, entries, given) for prefix in given.keys]
    remove_entries(entries, given.cache)


def _dataset_of(entry: Entry) -> str:
    from sfu.data.features.store import about_features
    from sfu.names import visible

    return f"features of {visible(about_features(entry).shown.dataset)}"


def _forget(given: Namespace) -> None:
    from sfu.data.features.store import cached_features
    from sfu.data.images.files import DIGESTS
    from sfu.store import Store

    digests = cache_dir("fingerprints")
    forget(given, [
        Cache(given.cache, cached_features(given.cache), _dataset_of),
        Cache(digests, Store(digests).entries(), lambda entry: "list of digests of files", DIGESTS),
    ])  # fmt: skip


def _named(prefix: str, entries: list[Entry], given: Namespace) -> Entry:
    matching = [entry for entry in entries if entry.key.startswith(prefix)]
    if len(matching) != 1:
        what = "no features" if not matching else f"{len(matching)} features"
        raise ConfigError(f"{prefix} names {what} in {given.cache}. sfu-features ls shows the keys.")
    return matching[0]


def _extract(given: Namespace) -> None:
    import time

    with first_imports():
        from sfu.data.features.extract import Extractor
    from sfu.data.features.ranks import joined, local_device
    from sfu.data.load import load_images
    from sfu.experiment.validate import resolve_device
    from sfu.progress import ProgressDisplay

    config, dataset = _of_images(given.settings)
    device = local_device(resolve_device(config.device))
    with joined(device) as ranks, ProgressDisplay(ranks.rank == 0) as display:
        images = load_images(dataset).images
        with display.stage("extracting features") as tick:
            extractor = Extractor(config.backbone, device, progress=tick, say=display.say, ranks=ranks)
            started = time.perf_counter()
            store, damaged = _filled(extractor, dataset, images)
        if ranks.rank == 0:
            left_out = f" ({len(damaged):,} of this process's share cannot be decoded)" if damaged else ""
            print(f"{len(images):,} images{left_out} in {time.perf_counter() - started:.1f} s: {store.folder}")


def _filled(extractor: Extractor, dataset: ImageDataset, images: Images) -> tuple[FeatureStore, dict[int, str]]:
    """Extract what is missing; return the features, and what is wrong with the images that cannot be decoded."""
    from sfu.data.datasets.base import Damaged

    store, shown = extractor.store(images), {"dataset": dataset.name, "path": dataset.path}
    return store, extractor.fill(store, images, fail_on_damage=dataset.damaged is Damaged.fail, shown=shown)


def _of_images(settings: list[str]) -> tuple[RunConfig, ImageDataset]:
    """Return a configuration whose dataset holds images and whose backbone can read them."""
    from sfu.data.backbones.backbone import check_backbone
    from sfu.data.datasets.base import ImageDataset
    from sfu.data.settings import NO_BACKBONE
    from sfu.experiment.config import check_dataset

    config = compose_settings(settings)
    check_dataset(config.dataset, config.backbone)
    check_backbone(config.backbone)
    if config.backbone.name == NO_BACKBONE or not isinstance(config.dataset, ImageDataset):
        raise ConfigError("backbone=none extracts nothing. Choose a backbone, such as backbone=resnet18.")
    return config, config.dataset


def _export(given: Namespace) -> None:
    with first_imports():
        from sfu.data.features.export import ExportSettings, export_features, require_free
        from sfu.data.features.extract import Extractor
    from sfu.data.load import load_images
    from sfu.experiment.validate import resolve_device
    from sfu.progress import ProgressDisplay
    from sfu.schema import accepted_names

    if launched_by_torchrun():
        raise ConfigError("export is one process. Under torchrun, extract the features first, then export them.")
    own = accepted_names(ExportSettings)
    mine = [one for one in given.settings if one.partition("=")[0] in own]
    settings = _export_settings(mine)
    path = given.file.expanduser()
    require_free(path, settings.overwrite)
    config, dataset = _of_images([one for one in given.settings if one not in mine])
    config.head.check_with(dataset, config.backbone)
    with ProgressDisplay() as display:
        images = load_images(dataset)
        with display.stage("extracting features") as tick:
            extractor = Extractor(config.backbone, resolve_device(config.device), progress=tick, say=display.say)
            store, damaged = _filled(extractor, dataset, images.images)
        done = export_features(
            path, images, store, damaged, settings, normalize_rows=dataset.normalize_rows, stage=display.stage
        )
    rows = f"{done.n_train:,} training and {done.n_test:,} test rows" if done.n_test else f"{done.n_train:,} rows"
    print(f"{path}: {rows} of {done.width:,} numbers, {settings.dtype}, {human_size(path.stat().st_size)}.")
    if damaged:
        print(f"{len(damaged):,} images cannot be decoded and are left out.")
    if done.variance_kept is not None:
        print(f"{done.width:,} principal axes hold {100 * done.variance_kept:.1f} % of the training rows' variance.")
    if not done.n_test:
        print("The dataset has no test part of its own. A run draws one from these rows, as it does from the images.")


def _export_settings(given: list[str]) -> ExportSettings:
    from omegaconf import OmegaConf

    from sfu.data.features.export import ExportSettings
    from sfu.schema import make, typed

    plain = {str(key): value for key, value in OmegaConf.from_dotlist(given).items()}
    return make(ExportSettings, typed(ExportSettings, plain), "sfu-features export")


if __name__ == "__main__":
    main()
