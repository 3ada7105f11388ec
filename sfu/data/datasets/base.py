"""What a dataset offers: its settings, the files it reads, and feature rows or images, or both.

A dataset is one dataclass whose fields are its keys in the group ``dataset``. It imports PyTorch only when it loads, so
that configurations can be composed without.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sfu.errors import ConfigError
from sfu.registry import add_modules
from sfu.schema import Choice, setting
from sfu.store import cache_dir

if TYPE_CHECKING:
    from sfu.data.download import Archive
    from sfu.data.images.image_set import ImageSet
    from sfu.data.raw_arrays import RawArrays, Shape


class Damaged(Enum):
    """What to do with images that cannot be decoded: stop, or leave them out and list them."""

    fail = "fail"
    skip = "skip"


@dataclass
class Dataset(Choice, kind="dataset"):
    """Base of all datasets; a subclass is :class:`FeatureDataset`, :class:`ImageDataset` or both."""

    prefix: ClassVar[str] = "dataset"

    path: str | None = field(default=None, init=False)
    test_fraction: float = field(default=0.0, init=False)
    name: str = setting("", "Name of the dataset.")
    normalize_rows: bool = setting(False, "Scale every feature row of every part to norm 1.")
    n_classes: int | None = setting(None, "Number of classes; null counts them in the labels.", at_least=2)

    @property
    def source(self) -> str:
        """How messages name the dataset."""
        return f"dataset.path={self.path}" if self.path else f"dataset={self.name}"

    @abstractmethod
    def source_files(self) -> list[Path]:
        """Return the files and folders that the dataset reads. They are sealed while a source-free method runs.

        Raises:
            ConfigError: A setting cannot work.
            DataError: What must be there is missing.
        """


add_modules(Dataset, "sfu.data.datasets")


@dataclass
class FeatureDataset(Dataset):
    """A dataset of feature rows, for ``backbone=none``."""

    test_fraction: float = setting(0.2, "Share held out for testing where there is no test part.", above=0, below=1)

    @abstractmethod
    def load(self, seed: int) -> RawArrays:
        """Return features and labels of both parts; ``seed`` draws a test part where there is none."""

    def shape(self) -> Shape | None:
        """Return how large the dataset is, if that can be told without reading its features; by default it cannot."""
        return None


@dataclass
class ImageDataset(Dataset):
    """A dataset of images, for a backbone."""

    limit_per_class: int | None = setting(None, "Use only the first images of each class and part.", at_least=1)
    damaged: Damaged = setting(Damaged.fail, "Stop at images that cannot be decoded, or skip them.")
    core_fraction: float = setting(
        0.0, "Linearised heads: share of the training images that is public and trains the core.", at_least=0, below=1
    )
    core_seed: int = setting(0, "Linearised heads: which images are public.", at_least=0)

    @abstractmethod
    def images(self) -> ImageSet:
        """Return all images of both parts, in one order that depends on no seed.

        Raises:
            DataError: The images are missing and cannot be fetched, or contradict their labels.
        """


@dataclass
class PublicDataset(ImageDataset):
    """A published dataset of images, which sfu can download to the ``subfolder`` of ``dataset.root``."""

    subfolder: ClassVar[str] = ""

    root: str | None = setting(
        None, "Folder that holds the dataset or receives it; null is sfu's cache.", affects_results=False
    )
    download: bool = setting(True, "Download the dataset if it is not there.", affects_results=False)

    @abstractmethod
    def archives(self) -> tuple[Archive, ...]:
        """Return what is published, and where."""

    def source_files(self) -> list[Path]:
        from sfu.data.download import require_obtainable

        return require_obtainable(self.archives(), self.folder(), self.download)

    def to_download(self) -> list[Archive]:
        """Return the archives that :meth:`obtain` would download."""
        folder = self.folder()
        return [one for one in self.archives() if one.lacking(folder) and not (folder / one.filename).exists()]

    def obtain(self) -> Path:
        """Download and extract what is missing, and return the folder that holds it.

        Raises:
            DataError: Something is missing and cannot be downloaded, or is not what was published.
            ArtifactError: No room, or no permission to write.
        """
        from sfu.data.download import obtain

        obtain(self.archives(), self.folder(), self.download)
        return self.folder()

    def folder(self) -> Path:
        """Return the folder of the dataset's files: in ``dataset.root``, or among the datasets in sfu's cache."""
        root = Path(self.root).expanduser() if self.root else cache_dir("datasets")
        if root.exists() and not root.is_dir():
            raise ConfigError(f"dataset.root={root} is not a folder. Name the folder that holds the dataset.")
        return root / self.subfolder
