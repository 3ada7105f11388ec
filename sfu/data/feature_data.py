"""A dataset as feature rows and integer labels, checked once on entry.

Shapes: N training rows, T test rows, D features, C classes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.raw_arrays import check_features, check_groups, check_labels
from sfu.errors import DataError
from sfu.lazy import torch
from sfu.names import composed

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.data.images.images import Images


@dataclass(frozen=True)
class ImageRows:
    """Some rows of a sequence of images, not yet read."""

    images: Images
    rows_N: np.ndarray

    def names(self) -> list[str]:
        """What the images are called (their paths, if they are files)."""
        return [self.images.name(row) for row in self.rows_N.tolist()]

    def take(self, index: Tensor) -> Images:
        """Those of some rows, from which no other image can be reached."""
        return self.images.take(self.rows_N[index.numpy()].tolist())


@dataclass(frozen=True)
class Groups:
    """Whose the training rows are.

    Attributes:
        numbers_N: The number of each row's group; -1 for a row that belongs to none.
        names: Names of the groups, sorted.
    """

    numbers_N: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(cls, names_N: np.ndarray | None) -> Groups | None:
        """Return the groups of rows with these names ``[N]``, of which an empty one belongs to no group."""
        if names_N is None:
            return None
        names, numbers_N = np.unique([composed(str(name)) for name in names_N], return_inverse=True)
        blank = int(len(names) > 0 and names[0] == "")
        return cls(numbers_N - blank, tuple(names[blank:].tolist()))


@dataclass(frozen=True)
class FeatureData:
    """Features and labels of one dataset, on the CPU.

    Attributes:
        name: The dataset's name.
        train_features_ND: Training features, float32 or float64.
        train_labels_N: Training labels, int64, in ``0 .. C-1``.
        test_features_TD: Test features, same width and dtype.
        test_labels_T: Test labels, int64.
        n_classes: C.
        class_names: C names, or none.
        train_images: The images behind the training rows, in the same order; ``None`` if there are none.
        about_images: Where the features came from, for the record.
        groups: Whose the training rows are, if the dataset says so.
    """

    name: str
    train_features_ND: Tensor
    train_labels_N: Tensor
    test_features_TD: Tensor
    test_labels_T: Tensor
    n_classes: int
    class_names: tuple[str, ...] = ()
    train_images: ImageRows | None = None
    about_images: dict[str, object] = field(default_factory=dict)
    groups: Groups | None = None

    @property
    def n_train(self) -> int:
        """Number of training rows N."""
        return self.train_labels_N.shape[0]

    @property
    def n_features(self) -> int:
        """Feature width D."""
        return self.train_features_ND.shape[1]

    def fingerprint(self) -> str:
        """SHA-256 (first 16 hex digits) over shapes, dtypes and bytes of the four arrays."""
        digest = hashlib.sha256()
        for array in (self.train_features_ND, self.train_labels_N, self.test_features_TD, self.test_labels_T):
            values = array.contiguous().numpy()
            digest.update(f"{values.dtype}{values.shape}".encode())
            digest.update(values.data)
        return digest.hexdigest()[:16]


def make_feature_data(
    name: str,
    train_features: np.ndarray,
    train_labels: np.ndarray,
    test_features: np.ndarray,
    test_labels: np.ndarray,
    train_groups: np.ndarray | None = None,
    *,
    n_classes: int | None = None,
    normalize_rows: bool = False,
    source: str = "dataset",
) -> FeatureData:
    """Check raw arrays, features ``[N, D]``, labels and groups ``[N]``, and build a :class:`FeatureData`.

    Args:
        n_classes: C; ``None`` takes ``max(train_labels) + 1`` and requires every class to occur.
        normalize_rows: Scale every row of both parts to Euclidean norm 1; zero rows stay zero.
        source: How messages name the data.

    Raises:
        DataError: A shape, dtype, label or value is unusable; the message says which and what to do.
    """
    train_x = check_features(train_features, f"{source}: train_features")
    test_x = check_features(test_features, f"{source}: test_features")
    if test_x.shape[1] != train_x.shape[1]:
        raise DataError(
            f"{source}: train_features have {train_x.shape[1]} columns but test_features have {test_x.shape[1]}. "
            "Extract both with the same backbone."
        )
    train_y = check_labels(train_labels, train_x.shape[0], f"{source}: train_labels")
    test_y = check_labels(test_labels, test_x.shape[0], f"{source}: test_labels")
    classes = _n_classes(train_y, n_classes, source)
    for part, labels in (("train_labels", train_y), ("test_labels", test_y)):
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise DataError(
                f"{source}: {part} run from {low} to {high}, outside 0 .. {classes - 1}. Number the classes from 0 "
                "without gaps, or give their number in dataset.n_classes."
            )
    dtype = np.result_type(train_x.dtype, test_x.dtype)
    parts = [torch.from_numpy(np.array(x, dtype=dtype, order="C")) for x in (train_x, test_x)]
    if normalize_rows:
        parts = [torch.nn.functional.normalize(x, dim=1) for x in parts]
    if train_groups is not None:
        train_groups = check_groups(train_groups, train_x.shape[0], f"{source}: train_groups")
    return FeatureData(
        name, parts[0], torch.from_numpy(train_y), parts[1], torch.from_numpy(test_y), classes,
        groups=Groups.of(train_groups),
    )  # fmt: skip


def _n_classes(train_labels: np.ndarray, n_classes: int | None, source: str) -> int:
    present = np.unique(train_labels)
    if n_classes is None:
        n_classes = int(present[-1]) + 1
        if present[0] >= 0 and present.size < n_classes:
            first_missing = int(np.setdiff1d(np.arange(min(n_classes, present.size + 1)), present)[0])
            raise DataError(
                f"{source}: train_labels reach {n_classes - 1} but class {first_missing} never occurs. Number the "
                "classes from 0 without gaps, or set dataset.n_classes."
            )
    if n_classes > 10 * max(train_labels.size, 100):
        raise DataError(
            f"{source}: {n_classes} classes for {train_labels.size} training rows. Class indices are 0 .. C-1, and "
            "dataset.n_classes is their number."
        )
    if present.size < 2:
        raise DataError(
            f"{source}: train_labels hold one class only ({int(present[0])}). A classifier needs at least two."
        )
    return n_classes
