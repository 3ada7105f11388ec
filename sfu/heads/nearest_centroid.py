"""The nearest class mean, where many embeddings end: its rows are forgotten exactly, from sums and counts.

Shapes: N rows, F rows to forget, D features, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from sfu.arrays import Array, as_tensor, numbered
from sfu.data.labels import label_problem
from sfu.errors import DataError
from sfu.heads.fit import names_of

_ROUNDING = 1e-12
"""A class whose last row is gone has a sum of 0; what is left of it is rounding."""


@dataclass(frozen=True)
class NearestCentroid:
    """A classifier that predicts the class with the nearest mean.

    The mean of a class without rows is not known, so the class is never predicted.

    Attributes:
        sums_CD: Sum of the rows of each class, float64. The sum of a class of one row is that row.
        counts_C: Number of rows of each class.
        classes: Names of the classes, if labels are names.
        normalize: Whether means are scaled to norm 1, as where the cosine is compared.
    """

    sums_CD: Tensor = field(repr=False)
    counts_C: Tensor
    classes: tuple[str, ...] | None = None
    normalize: bool = False

    @classmethod
    def fit(
        cls, features: Array, labels: Array, *, classes: Sequence[str] | None = None, normalize: bool = False
    ) -> Self:
        """Return the classifier of rows ``[N, D]`` and class numbers (or names) ``[N]``.

        Without ``classes``, labels that are names are numbered in sorted order, as in :func:`sfu.fit`.

        Raises:
            DataError: The rows are not finite or do not fit the labels, or a label is no class.
        """
        classes = names_of(labels) if classes is None else tuple(classes)
        features_ND, labels_N = _rows(features, labels, classes)
        if classes is not None and int(labels_N.max()) >= len(classes):
            raise DataError(
                f"the labels reach {int(labels_N.max())}, but classes has {len(classes)} names. Give a name for each "
                "class, in their order."
            )
        n_classes = max(int(labels_N.max()) + 1, len(classes or ()))
        empty = torch.zeros(n_classes, features_ND.shape[1], dtype=torch.float64)
        return cls(
            empty.index_add(0, labels_N, features_ND), labels_N.bincount(minlength=n_classes), classes, normalize
        )

    @property
    def means_CD(self) -> Tensor:
        """Means of the classes, NaN for one without rows."""
        means_CD = self.sums_CD / self.counts_C[:, None]
        return torch.nn.functional.normalize(means_CD, dim=1) if self.normalize else means_CD

    def forget(self, features: Array, labels: Array) -> Self:
        """Return the classifier without these rows, as it would have been without them up to rounding.

        Raises:
            DataError: The rows do not fit, or are more of a class than it has: they were not all in it.
        """
        features_FD, labels_F = _rows(features, labels, self.classes)
        if features_FD.shape[1] != self.sums_CD.shape[1] or int(labels_F.max()) >= len(self.counts_C):
            raise DataError(
                f"the rows are {features_FD.shape[1]} wide with labels up to {int(labels_F.max())}, but the classifier "
                f"has {self.sums_CD.shape[1]} features and {len(self.counts_C)} classes. Give rows that were in it."
            )
        left_C = self.counts_C - labels_F.bincount(minlength=len(self.counts_C))
        if bool((left_C < 0).any()):
            number = int((left_C < 0).int().argmax())
            raise DataError(
                f"class {number} has {int(self.counts_C[number])} rows, fewer than are to be forgotten. Give only rows "
                "that were in the classifier and were not forgotten before."
            )
        sums_CD = self.sums_CD.index_add(0, labels_F, features_FD, alpha=-1)
        gone_C1 = (left_C == 0)[:, None]
        scale = float(self.sums_CD.abs().max()) + float(features_FD.abs().max()) * len(labels_F)
        if bool((gone_C1 & (sums_CD.abs() > _ROUNDING * scale)).any()):
            raise DataError(
                "a class has no row left, but the rows do not add up to its sum, so they are not those that were in "
                "the classifier. Give the rows as they were in fit."
            )
        return replace(self, sums_CD=sums_CD.masked_fill(gone_C1, 0.0), counts_C=left_C)

    def distances(self, features: Array) -> Tensor:
        """Return Euclidean distances ``[N, C]`` to the means; infinite for a class without rows.

        Raises:
            DataError: The rows are not finite or have another width, or no class has a row left.
        """
        features_ND = _finite(features)
        if features_ND.shape[1] != self.sums_CD.shape[1]:
            raise DataError(
                f"the rows are {features_ND.shape[1]} wide, but the classifier has {self.sums_CD.shape[1]} features. "
                "Give rows of its features."
            )
        if not bool(self.counts_C.any()):
            raise DataError("all rows of the classifier were forgotten, so it knows no class. Fit it to other rows.")
        if self.normalize:
            features_ND = torch.nn.functional.normalize(features_ND, dim=1)
        return torch.cdist(features_ND, self.means_CD).nan_to_num(nan=torch.inf)

    def predict(self, features: Array) -> Tensor:
        """Return class numbers ``[N]``.

        Raises:
            DataError: As for :meth:`distances`.
        """
        return self.distances(features).argmin(1)


def _rows(features: Array, labels: Array, classes: tuple[str, ...] | None) -> tuple[Tensor, Tensor]:
    features_ND, known = _finite(features), classes or ()
    strange = [name for name in names_of(labels) or () if name not in known]
    if strange:
        names = f"Its classes are {', '.join(known)}" if known else "Its classes have no names"
        raise DataError(f"the label {strange[0]!r} is no class of the classifier. {names}. Give one of its classes.")
    labels_N = as_tensor(numbered(labels, classes), "labels")
    if (problem := label_problem(labels_N, len(features_ND))) is not None:
        raise DataError(f"the tensor of labels {problem}")
    if int(labels_N.min()) < 0:
        raise DataError(f"a label is {int(labels_N.min())}. Number the classes from 0.")
    return features_ND, labels_N.cpu().long()


def _finite(features: Array) -> Tensor:
    features_ND = as_tensor(features, "features")
    wrong = features_ND.ndim != 2 or not features_ND.numel() or features_ND.is_complex()
    if wrong or not bool(torch.isfinite(features_ND).all()):
        raise DataError(
            f"the features are {features_ND.dtype} {list(features_ND.shape)}, or not all finite. Give at least one row "
            "[N, D] of real numbers."
        )
    return features_ND.cpu().double()
