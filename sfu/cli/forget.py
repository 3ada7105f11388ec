"""What ``sfu-results forget`` and ``sfu-features forget`` share: remove whatever was made of given examples."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.cli.commands import compose_settings, remove_entries
from sfu.errors import ArtifactError, ConfigError, DataError
from sfu.files import file_digest
from sfu.names import forms_of, visible
from sfu.readers import read_text, refusing
from sfu.store import Entry, Store, cache_dir

if TYPE_CHECKING:
    from sfu.data.datasets.base import Dataset
    from sfu.data.settings import ForgetSettings

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_LIST_BYTES = 1 << 30
_NOT_SEARCHED = (
    "Not searched: run folders, whose heads still hold what they learned; what loggers have uploaded; files you made."
)


@dataclass(frozen=True)
class Cache:
    """A cache to search.

    Attributes:
        root: Its folder.
        entries: Its entries.
        kind_of: What to call an entry in messages.
        list_file: The file of an entry that holds the digests of its examples.
    """

    root: Path
    entries: Sequence[Entry]
    kind_of: Callable[[Entry], str]
    list_file: str | None = None


def add_forget(add_parser: Callable[..., ArgumentParser], kind: str, run: Callable[[Namespace], None]) -> None:
    """Add the command ``forget`` for a kind of cache."""
    parser = add_parser("forget", help="remove whatever was made of given examples")
    parser.set_defaults(run=run)
    for option, metavar, what in (
        ("--files", "LIST", "text file of image files, one a line"),
        ("--indices", "LIST", "file of training row numbers of the dataset, as for forget.indices"),
    ):
        parser.add_argument(option, type=Path, metavar=metavar, help=what)
    digest = "of an image file, as sha256sum prints it (repeatable)"
    parser.add_argument("--digest", action="append", default=[], metavar="SHA256", help=digest)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--cache", type=Path, default=cache_dir(kind), help="folder (default: %(default)s)")
    dataset = "the dataset of --files or --indices, as for sfu: dataset=... dataset.path=..."
    parser.add_argument("settings", nargs="*", metavar="key=value", help=dataset)


def forget(given: Namespace, caches: Sequence[Cache]) -> None:
    """Remove from the caches what was made of the examples that the arguments name, and say what was removed.

    Raises:
        ConfigError: No example is named, or not in a way that can be understood.
        DataError: A list of examples cannot be read.
        ArtifactError: An entry is in use or cannot be removed; all others are.
    """
    from sfu.data.examples import EXAMPLES, find_entries

    examples = examples_of(given)
    found: set[int] = set()
    problems: list[ArtifactError] = []
    for cache in caches:
        purge = find_entries(cache.entries, examples, cache.list_file or EXAMPLES)
        found |= purge.found
        for entries, why in (
            (purge.made_of_them, "made of data that held one of these examples"),
            (purge.unknown, "do not say what they were made of, so they go, too"),
        ):
            if entries:
                kinds = ", ".join(f"{n:,} {kind}" for kind, n in Counter(map(cache.kind_of, entries)).items())
                print(f"{cache.root}: {kinds}: {why}.")
        if given.dry_run:
            continue
        try:
            remove_entries([*purge.made_of_them, *purge.unknown], cache.root)
        except ArtifactError as error:
            problems.append(error)
        Store(cache.root).remove_leftovers(older_than=0.0)
    missing = len(examples) - len(found)
    if missing:
        print(f"{missing:,} of {len(examples):,} examples were found in none of these caches.")
    print("Nothing was removed (--dry-run)." if given.dry_run else _NOT_SEARCHED)
    if problems:
        raise problems[0]


def examples_of(given: Namespace) -> list[frozenset[bytes]]:
    """Return the examples that the arguments name, each as all digests that it is known by.

    Raises:
        ConfigError: None is named, a digest is malformed, or row numbers come without a dataset.
        DataError: A list cannot be read, or names what the dataset does not have.
    """
    if not (given.digest or given.files or given.indices):
        raise ConfigError("forget needs --files LIST, --indices LIST or --digest SHA256. Name the examples to forget.")
    examples = []
    for digest in given.digest:
        if not _DIGEST.fullmatch(digest):
            raise ConfigError(
                f"--digest {visible(digest)} is no SHA-256. Give 64 hexadecimal digits, as sha256sum prints them."
            )
        examples.append(frozenset([bytes.fromhex(digest)]))
    if given.indices and not given.settings:
        raise ConfigError(
            f"--indices {given.indices} counts rows of a dataset. Name it, as in dataset=features "
            "dataset.path=features.npz, with the seed of the runs if the dataset has no test part of its own."
        )
    if given.settings and not (given.indices or given.files):
        raise ConfigError("key=value settings name the dataset of --files or --indices. Give one of them.")
    if given.settings:
        return [*examples, *_in_dataset(given)]
    return [*examples, *(_of_files(given.files) if given.files else [])]


def _of_files(path: Path) -> list[frozenset[bytes]]:
    """Examples by the paths in a list; a file that is gone is known by its path alone."""
    from sfu.data.examples import path_digest

    with refusing(f"--files {path}", "Give a text file with one file a line.", DataError):
        lines = [line.strip() for line in read_text(path, _LIST_BYTES).splitlines() if line.strip()]
    if not lines:
        raise DataError(f"--files {path} names no file. Give a text file with one file a line.")
    examples, gone = [], 0
    for line in lines:
        files = [Path(form).expanduser() for form in forms_of(line)]
        there = [bytes.fromhex(file_digest(file)) for file in files if os.path.isfile(file)]
        gone += not there
        examples.append(frozenset([*map(path_digest, files), *there]))
    if gone:
        print(f"{gone:,} of {len(lines):,} files do not exist; they are looked for by their path alone.")
    return examples


def _in_dataset(given: Namespace) -> list[frozenset[bytes]]:
    """Examples by their names or row numbers in the training part of a dataset."""
    from sfu.data.settings import ForgetSettings

    config = compose_settings(given.settings)
    dataset, seed = config.dataset, config.seed_for.resolve(config.seed)["split"]
    examples: list[frozenset[bytes]] = []
    files, indices = (None if path is None else str(path) for path in (given.files, given.indices))
    named = ([ForgetSettings(files=files)] if files else []) + ([ForgetSettings(indices=indices)] if indices else [])
    try:
        for chosen in named:
            chosen.require_files()
            examples += _chosen(dataset, chosen, seed)
    except (ConfigError, DataError) as error:
        said = str(error).replace("forget.indices=", "--indices ").replace("forget.files=", "--files ")
        raise type(error)(said) from error
    return examples


def _chosen(dataset: Dataset, chosen: ForgetSettings, seed: int) -> list[frozenset[bytes]]:
    """Examples of a dataset, each as a feature row and as an image if the dataset has both."""
    import torch

    from sfu.data.datasets.base import FeatureDataset, ImageDataset
    from sfu.data.examples import image_digests, row_digests
    from sfu.data.load import load_image_parts
    from sfu.data.split import choose_rows

    found: list[list[list[bytes]]] = []
    if isinstance(dataset, FeatureDataset) and chosen.indices is not None:
        arrays = dataset.load(seed)
        rows, _ = choose_rows(chosen, torch.from_numpy(arrays.train_labels), 0, seed)
        found.append([[digest] for digest in row_digests(arrays.train_features[rows.numpy()])])
    if isinstance(dataset, ImageDataset):
        parts = load_image_parts(dataset, seed)
        images = parts.images.images
        if chosen.indices is not None and (images.paths or len(parts.public)):
            raise ConfigError(f"--indices does not fit {dataset.source}. Name the image files instead (--files).")
        rows, _ = choose_rows(chosen, parts.train_labels_N, parts.n_classes, seed, (), parts.train_names())
        found.append(image_digests(images.take(parts.train[rows.numpy()].tolist())))
    if not found:
        raise ConfigError(f"--files {chosen.files}: {dataset.source} has no files to name. Use --indices.")
    return [frozenset(digest for one in known for digest in one) for known in zip(*found, strict=True)]
