"""A labelled image dataset, as a dataset module returns it before features are extracted.

Shapes: N images of both parts together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sfu.data.images.images import Images
from sfu.errors import DataError


@dataclass(frozen=True)
class ImageSet:
    """All images of a dataset, in one order that depends on no seed, so that features are extracted once.

    Attributes:
        images: The images of the training and the test part.
        labels_N: Class indices ``0 .. C-1``, int64.
        is_test_N: Which images belong to the test part; ``None`` if one must be drawn (``dataset.test_fraction``).
        class_names: C names.
        groups_N: Names of the groups, such as people, that the images belong to; ``None`` if the dataset has none.
    """

    images: Images
    labels_N: np.ndarray
    is_test_N: np.ndarray | None
    class_names: tuple[str, ...]
    groups_N: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Raise :class:`DataError` if there are no images or the lengths differ."""
        n_images = len(self.images)
        if n_images == 0:
            raise DataError("the dataset holds no image.")
        lengths = {len(self.labels_N), n_images, *([] if self.is_test_N is None else [len(self.is_test_N)])}
        if len(lengths) > 1:
            raise DataError(f"{n_images} images, {len(self.labels_N)} labels and the test part do not fit together.")

    def limited(self, per_class: int | None) -> ImageSet:
        """Return the first ``per_class`` images of each class and part, in order; all of them for ``None``."""
        if per_class is None:
            return self
        part_N = np.zeros_like(self.labels_N) if self.is_test_N is None else self.is_test_N.astype(np.int64)
        group_N = 2 * self.labels_N + part_N
        order = np.argsort(group_N, kind="stable")  # rows of a group together, in their own order
        _, starts = np.unique(group_N[order], return_index=True)
        return self.rows(np.sort(np.concatenate([rows[:per_class] for rows in np.split(order, starts[1:])])))

    def rows(self, index: np.ndarray) -> ImageSet:
        """Return some of the images, with their labels and parts."""
        is_test_N = None if self.is_test_N is None else self.is_test_N[index]
        groups_N = None if self.groups_N is None else self.groups_N[index]
        return ImageSet(self.images.take(index.tolist()), self.labels_N[index], is_test_N, self.class_names, groups_N)
