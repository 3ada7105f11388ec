"""The command ``sfu-features``: extract features beforehand, see what is kept, remove it.

``extract`` takes the same ``key=value`` settings as ``sfu`` and is the one command that runs under torchrun.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.cache_dir import cache_dir
from sfu.errors import ConfigError, SfuError
from sfu.files import human_size

if TYPE_CHECKING:
    from sfu.settings import RunConfig


def main(arguments: list[str] | None = None) -> None:
    """Entry point; exits with 1 after a clear message if anything failed."""
    given = _parser().parse_args(arguments)
    try:
        if given.command == "extract":
            _extract(given.settings)
        elif given.command == "rm":
            _remove(given)
        else:
            _list(given.cache)
    except KeyboardInterrupt:
        print("sfu-features: interrupted; what was extracted is kept.", file=sys.stderr)
        sys.exit(130)
    except (SfuError, OSError) as error:
        print(f"sfu-features: {error}", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sfu-features", description="The features that sfu has extracted and kept.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("ls", help="show what is kept, the last used first")
    removing = commands.add_parser("rm", help="remove what is kept")
    removing.add_argument("keys", nargs="*", metavar="KEY", help="the beginning of a key")
    removing.add_argument("--all", action="store_true", help="everything")
    removing.add_argument("--unfinished", action="store_true", help="whatever is not complete")
    for command in (listing, removing):
        command.add_argument("--cache", type=Path, default=cache_dir("features"), help="folder (default: %(default)s)")
    extracting = commands.add_parser("extract", help="extract beforehand; under torchrun, with several processes")
    extracting.add_argument("settings", nargs="*", metavar="key=value", help="as for sfu: dataset=... backbone=...")
    return parser


def _list(root: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from sfu.data.features.listing import list_stores

    stores = list_stores(root)
    if not stores:
        print(f"No features are kept in {root}.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("key", "dataset", "backbone", "images", "size", "chunks", "last used"):
        number = name in ("images", "size", "chunks")
        table.add_column(name, justify="right" if number else "left", no_wrap=name == "key")
    for info in stores:
        about, shown = info.about, info.about.get("shown") or {}
        crop = (about.get("transform") or {}).get("crop")
        table.add_row(
            info.key[:12],
            str(shown.get("dataset", "?")),
            f"{about.get('backbone', '?')}" + (f" {crop} px" if crop else ""),
            f"{about.get('n_images', 0):,}",
            human_size(info.size),
            f"{info.chunks}/{shown.get('chunks', '?')}",
            f"{info.used:%Y-%m-%d}",
        )
    Console().print(table)
    print(f"{len(stores)} in {root}, {human_size(sum(info.size for info in stores))} in all.")


def _remove(given: argparse.Namespace) -> None:
    from sfu.data.features.listing import find_stores, list_stores, remove_store

    if sum((bool(given.keys), given.all, given.unfinished)) != 1:
        raise ConfigError("rm needs keys, or --all, or --unfinished.")
    if given.keys:
        chosen = find_stores(given.cache, given.keys)
    else:
        chosen = [info for info in list_stores(given.cache) if given.all or info.unfinished]
    for info in chosen:
        remove_store(info)
        print(f"removed {info.key[:12]} ({human_size(info.size)})")
    if not chosen:
        print(f"Nothing to remove in {given.cache}.")


def _extract(settings: list[str]) -> None:
    import time

    from sfu.data.backbones.backbone import NO_BACKBONE, check_backbone
    from sfu.data.features.extract import Extractor
    from sfu.data.features.ranks import joined, local_device
    from sfu.data.load import check_dataset, load_images
    from sfu.experiment.progress import ProgressDisplay
    from sfu.experiment.validate import resolve_device
    from sfu.settings import Damaged

    config = _compose(settings)
    check_dataset(config.dataset, config.backbone)
    check_backbone(config.backbone)
    if config.backbone.name == NO_BACKBONE:
        raise ConfigError("backbone=none extracts nothing; choose one, such as backbone=resnet18.")
    device = local_device(resolve_device(config.device))
    with joined(device) as ranks, ProgressDisplay(ranks.rank == 0) as display:
        images = load_images(config.dataset).images
        with display.stage("extracting features") as tick:
            extractor = Extractor(config.backbone, device, progress=tick, say=display.say, ranks=ranks)
            started = time.perf_counter()
            store = extractor.store(images)
            damaged = extractor.fill(
                store, images, fail_on_damage=config.dataset.damaged is Damaged.fail,
                shown={"dataset": config.dataset.name, "path": config.dataset.path},
            )  # fmt: skip
        if ranks.rank == 0:
            left_out = f" ({len(damaged):,} of this process's share cannot be decoded)" if damaged else ""
            print(f"{len(images):,} images{left_out} in {time.perf_counter() - started:.1f} s: {store.folder}")


def _compose(settings: list[str]) -> RunConfig:
    """The typed configuration of ``key=value`` settings.

    Raises:
        ConfigError: A setting is unknown or of the wrong type.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from sfu.config_files import MAIN_CONFIG, config_dir
    from sfu.data.load import choose_backbone
    from sfu.experiment.explain import explain
    from sfu.settings import RunConfig, register

    register()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            typed = OmegaConf.to_object(compose(MAIN_CONFIG, overrides=settings))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(typed, RunConfig)
    typed.backbone.name = choose_backbone(typed.dataset, typed.backbone)
    return typed


if __name__ == "__main__":
    main()
