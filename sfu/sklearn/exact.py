"""Forget rows exactly from estimators of scikit-learn that are their rows, or their rows' means.

``KNeighborsClassifier`` and ``KNeighborsRegressor`` hold their training rows: the rows to forget are taken out, and a
copy is fitted to the others. ``NearestCentroid`` holds means, from which rows are taken out if the number of rows of
each class is known.

Shapes: N training rows, F rows to forget, D features, C classes, T targets of a row.
"""

from __future__ import annotations

import copy
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import numpy as np
import torch

from sfu.arrays import as_tensor, numpy_of
from sfu.errors import ConfigError, DataError
from sfu.heads.nearest_centroid import NearestCentroid
from sfu.heads.training_record import in_order
from sfu.names import counted
from sfu.unlearning.result import EQUAL_ROWS_LEFT, FACTS, REASONS, REPEATED_ROWS

_ROUNDING = 64  # units in the last place by which two computations of one row by a pipeline may differ
_NEIGHBORS = ("KNeighborsClassifier", "KNeighborsRegressor")
EXACT = (*_NEIGHBORS, "NearestCentroid")


@dataclass(frozen=True)
class ExactResult:
    """What is told of rows that were forgotten exactly, by the names of :class:`sfu.UnlearningResult`.

    Attributes:
        rows: Number of rows that were taken out.
        n_train: Number of rows that are left.
        how: What was done, as a sentence.
        reasons: Codes of what the note says (:data:`sfu.unlearning.result.REASONS`).
        note: What the reader should know; ``None`` if there is nothing.
    """

    rows: int
    n_train: int
    how: str
    reasons: tuple[str, ...] = ()
    note: str | None = None

    method = "exact"
    applied = True
    predicted_share, predicted_share_interval, predicted_distance = 1.0, (1.0, 1.0), 0.0

    @property
    def verdict(self) -> Literal["applied", "applied_with_reservations"]:
        """Whether there is something to add to: the rows are forgotten."""
        return "applied" if FACTS.issuperset(self.reasons) else "applied_with_reservations"

    def to_dict(self) -> dict[str, Any]:
        """Return what there is to tell, for JSON; no example."""
        return {
            "verdict": self.verdict, "reasons": list(self.reasons), "note": self.note, "method": self.method,
            "predicted_share": self.predicted_share, "predicted_distance": self.predicted_distance,
            "predicted_share_interval": list(self.predicted_share_interval), "rows_forgotten": self.rows,
            "n_train": self.n_train,
        }  # fmt: skip

    def summary(self) -> str:
        """Return the verdict, the method and the reasons, a line each."""
        told = [f"{code}: {REASONS[code]}" for code in self.reasons]
        return "\n".join([f"verdict: {self.verdict.replace('_', ' ')}", "method: exact, no estimate", *told])

    def explain(self) -> str:
        """Say what happened in plain words, in lines of 80 columns."""
        start = f"The {counted(self.rows, 'row')} were forgotten." if self.rows != 1 else "The row was forgotten."
        return textwrap.fill(" ".join([start, self.how, *(REASONS[code] for code in self.reasons)]), 80)

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        about = {"verdict": self.verdict, "rows forgotten": self.rows, "rows left": self.n_train, "note": self.note}
        cells = [f"<tr><th>{name}</th><td>{escape(str(one))}</td></tr>" for name, one in about.items() if one]
        return f"<table>{''.join(cells)}</table>"


def forget_exactly(
    estimator: Any,
    X: Any,
    y: Any,
    n_train: int | None,
    class_counts: Mapping[Any, int] | Sequence[int] | None,
    steps: str = "",
) -> tuple[Any, ExactResult]:
    """Return a fitted copy of an estimator, one of :data:`EXACT`, without some rows.

    ``steps`` names the steps of a pipeline that made the rows, if there are any.

    Raises:
        ConfigError: It has a setting with which nothing can be taken out, or class counts are missing.
        DataError: It is not fitted, or the rows are not those it was fitted to.
    """
    name = type(estimator).__name__
    if not hasattr(estimator, "classes_" if name == "NearestCentroid" else "n_samples_fit_"):
        raise DataError(f"the {name} is not fitted, so it has learned nothing. Fit it first.")
    if y is None:
        raise DataError("y is missing. Give the labels or targets of the rows to forget, as they were given to fit.")
    if name == "NearestCentroid":
        return _from_means(estimator, X, y, n_train, class_counts)
    return _from_rows(estimator, X, y, n_train, steps)


# Neighbours


def _from_rows(estimator: Any, X: Any, y: Any, n_train: int | None, steps: str) -> tuple[Any, ExactResult]:
    from sklearn.base import clone

    name, n_rows = type(estimator).__name__, estimator.n_samples_fit_
    if estimator.metric == "precomputed":
        raise ConfigError(f"{name} has metric='precomputed', so it holds no rows. Delete them from your distances.")
    if n_train not in (None, n_rows):
        raise DataError(f"n_train={n_train}, but the {name} holds {n_rows} rows. Leave n_train out.")
    rows_FD = _features(X, estimator)
    targets_FT = _targets(estimator, y)
    if len(targets_FT) != rows_FD.shape[0]:
        raise DataError(f"there are {rows_FD.shape[0]} rows and {len(targets_FT)} labels. Give one for each row.")
    own_NT = np.asarray(estimator._y).reshape(n_rows, -1)
    found, missing, left = _places(estimator._fit_X, own_NT, rows_FD, targets_FT.astype(own_NT.dtype))
    if missing:
        theirs = "is not in it with its label" if len(missing) == 1 else "are not in it with their labels"
        of_steps = f" A step ({steps}) that treats rows otherwise at fit, as a randomized PCA does, hides them."
        raise DataError(
            f"the {name} has other rows: {counted(len(missing), 'row')} of X {theirs}, first row {missing[0]}. Give "
            f"rows as they were given to fit, and none that were forgotten before.{of_steps if steps else ''}"
        )
    repeated = len(targets_FT) - len(found)
    kept = np.setdiff1d(np.arange(n_rows), found)
    if len(kept) < estimator.n_neighbors:
        raise DataError(
            f"{counted(len(kept), 'row')} would be left, fewer than n_neighbors={estimator.n_neighbors}. Fit a new "
            f"{name} to other rows, or set a smaller n_neighbors."
        )
    changed = clone(estimator).fit(estimator._fit_X[kept], _labels_of(estimator, own_NT[kept]))
    if hasattr(estimator, "feature_names_in_"):
        changed.feature_names_in_ = estimator.feature_names_in_
    remarks = {
        REPEATED_ROWS: f"{repeated:,} rows were given more often than to fit" if repeated else "",
        EQUAL_ROWS_LEFT: f"{left:,} equal rows stay, because fit was given them more often" if left else "",
    }
    told = {code: text for code, text in remarks.items() if text}
    how = "The estimator is what fitting without them gives, because it holds its rows: they are gone from it."
    return changed, ExactResult(len(found), len(kept), how, tuple(told), "; ".join(told.values()) or None)


def _features(X: Any, estimator: Any) -> Any:
    """Return rows in the form and dtype of those that the estimator holds."""
    fitted = estimator._fit_X
    if hasattr(fitted, "tocsr"):
        from scipy.sparse import csr_matrix

        rows = csr_matrix(X if hasattr(X, "tocsr") else as_tensor(X, "X").numpy(), dtype=fitted.dtype)
    else:
        rows = (X.toarray() if hasattr(X, "toarray") else as_tensor(X, "X").numpy()).astype(fitted.dtype)
    if rows.ndim != 2 or rows.shape[1] != fitted.shape[1] or not rows.shape[0]:
        raise DataError(
            f"X has shape {list(rows.shape)}, but the {type(estimator).__name__} has {fitted.shape[1]} features. Give "
            "at least one row, as it was given to fit."
        )
    return rows


def _targets(estimator: Any, y: Any) -> np.ndarray:
    """Return targets ``[F, T]``, those of a classifier as class numbers."""
    if not hasattr(estimator, "classes_"):
        targets = as_tensor(y, "y").numpy()
        return targets.reshape(len(targets), -1)
    given = numpy_of(y)
    given_FT = given.reshape(len(given), -1)
    classes = estimator.classes_ if estimator.outputs_2d_ else [estimator.classes_]
    if given_FT.shape[1] != len(classes):
        raise DataError(f"y has {given_FT.shape[1]} labels a row, and fit had {len(classes)}. Give as many.")
    return np.stack([_numbers(one, known, estimator) for one, known in zip(given_FT.T, classes, strict=True)], 1)


def _numbers(labels: np.ndarray, classes: np.ndarray, estimator: Any) -> np.ndarray:
    known = {label: number for number, label in enumerate(classes.tolist())}
    for label in labels.tolist():
        if label not in known:
            raise DataError(
                f"the label {label!r} is no class of the {type(estimator).__name__}. Its classes are "
                f"{', '.join(map(repr, known))}."
            )
    return np.array([known[label] for label in labels.tolist()])


def _labels_of(estimator: Any, targets_NT: np.ndarray) -> np.ndarray:
    """Return targets as ``fit`` was given them."""
    if not hasattr(estimator, "classes_"):
        return targets_NT if np.ndim(estimator._y) > 1 else targets_NT[:, 0]
    if not estimator.outputs_2d_:
        return np.asarray(estimator.classes_[targets_NT[:, 0]])
    return np.stack([known[column] for known, column in zip(estimator.classes_, targets_NT.T, strict=True)], 1)


def _keys(rows: Any, targets: np.ndarray) -> list[bytes]:
    if hasattr(rows, "tocsr"):
        rows = rows.tocsr(copy=True)
        rows.sum_duplicates()
        rows.eliminate_zeros()
        cuts = [slice(*ends) for ends in zip(rows.indptr[:-1], rows.indptr[1:], strict=True)]
        parts = [rows.indices[cut].astype(np.int64).tobytes() + rows.data[cut].tobytes() for cut in cuts]
    else:
        parts = [row.tobytes() for row in np.ascontiguousarray(rows + 0)]  # -0.0 + 0 is 0.0
    return [part + target.tobytes() for part, target in zip(parts, np.ascontiguousarray(targets + 0), strict=True)]


def _places(
    fitted_ND: Any, own_NT: np.ndarray, rows_FD: Any, targets_FT: np.ndarray
) -> tuple[list[int], list[int], int]:
    """Return where rows are among those of fit, which of them are not, and how many equal ones would be left."""
    places: dict[bytes, list[int]] = defaultdict(list)
    for place, key in enumerate(_keys(fitted_ND, own_NT)):
        places[key].append(place)
    keys, missing, found, asked = _keys(rows_FD, targets_FT), [], set[int](), set[int]()
    near = None
    for row, key in enumerate(keys):
        equal = places.get(key)
        if equal is None and not hasattr(fitted_ND, "tocsr"):
            near = near or _Rounded(fitted_ND, own_NT)
            equal = near.places(rows_FD[row], targets_FT[row])
        if not equal:
            missing.append(row)
            continue
        asked.update(equal)
        found.update([place for place in equal if place not in found][:1])
    return sorted(found), missing, len(asked - found)


class _Rounded:
    """Find rows that differ by rounding alone, as two computations of one row by a pipeline may."""

    def __init__(self, fitted_ND: np.ndarray, own_NT: np.ndarray) -> None:
        self.fitted_ND, self.own_NT = fitted_ND, own_NT
        whole = fitted_ND.dtype.kind != "f"
        self.tolerance = 0.0 if whole else _ROUNDING * float(np.finfo(fitted_ND.dtype).eps * np.abs(fitted_ND).max())
        self.order_N = np.argsort(fitted_ND[:, 0], kind="stable")
        self.first_N = fitted_ND[self.order_N, 0]

    def places(self, row_D: np.ndarray, target_T: np.ndarray) -> list[int]:
        start = np.searchsorted(self.first_N, row_D[0] - self.tolerance, "left")
        end = np.searchsorted(self.first_N, row_D[0] + self.tolerance, "right")
        at = self.order_N[start:end]
        same = (np.abs(self.fitted_ND[at] - row_D) <= self.tolerance).all(1) & (self.own_NT[at] == target_T).all(1)
        return sorted(at[same].tolist())


# Means


def _from_means(
    estimator: Any, X: Any, y: Any, n_train: int | None, class_counts: Mapping[Any, int] | Sequence[int] | None
) -> tuple[Any, ExactResult]:
    for key, accepted in (("metric", "euclidean"), ("shrink_threshold", None)):
        if getattr(estimator, key) != accepted:
            raise ConfigError(
                f"NearestCentroid has {key}={getattr(estimator, key)!r}, so its centroids are no means. Only those of "
                f"{key}={accepted!r} are, from which rows can be taken out."
            )
    if class_counts is None:
        raise ConfigError(
            "NearestCentroid keeps means and no counts. Give class_counts, the number of training rows of each class; "
            "sfu.NearestCentroid keeps them by itself."
        )
    classes = estimator.classes_.tolist()
    counts_C = as_tensor(in_order(class_counts, classes), "class_counts").long()
    if list(counts_C.shape) != [len(classes)] or int(counts_C.min()) < 1:
        raise ConfigError(
            f"class_counts={counts_C.tolist()} must be {len(classes)} counts of at least 1. Count the labels of fit."
        )
    if n_train not in (None, int(counts_C.sum())):
        raise ConfigError(f"class_counts sum to {int(counts_C.sum())}, not n_train={n_train}. Count the labels.")
    means_CD = torch.from_numpy(estimator.centroids_.copy()).double()
    labels_F = torch.from_numpy(_numbers(numpy_of(y).reshape(-1), estimator.classes_, estimator))
    rows_FD = as_tensor(X, "X").double()
    before = NearestCentroid(means_CD * counts_C[:, None], counts_C)
    after = before.forget(rows_FD, labels_F)
    kept_C = (after.counts_C > 0).numpy()
    if kept_C.sum() < 2 or int(after.counts_C.sum()) <= kept_C.sum():
        raise DataError(
            f"{counted(int(after.counts_C.sum()), 'row')} would be left, and classes with any: {kept_C.sum()}. "
            "scikit-learn fits no NearestCentroid to them. Fit a new one to other rows."
        )
    counts, left = after.counts_C.numpy()[kept_C], int(after.counts_C.sum())
    new_CD, old_CD = after.means_CD.numpy()[kept_C], means_CD.numpy()
    changed = copy.deepcopy(estimator)
    changed.classes_, changed.centroids_ = estimator.classes_[kept_C], new_CD
    changed.class_prior_ = _priors(estimator, counts, kept_C)
    within = estimator.within_class_std_dev_**2 * (int(counts_C.sum()) - len(classes))
    squares = (counts_C.numpy()[:, None] * old_CD**2).sum(0) - (rows_FD.numpy() ** 2).sum(0)
    within = within + squares - (counts[:, None] * new_CD**2).sum(0)
    changed.within_class_std_dev_ = np.sqrt(np.maximum(within, 0) / (left - len(counts)))
    spread = changed.within_class_std_dev_ + np.median(changed.within_class_std_dev_)
    scale_CD = np.sqrt(1 / counts - 1 / left)[:, None] * spread
    changed.deviations_ = (new_CD - counts @ new_CD / left) / scale_CD
    how = (
        "The estimator is what fitting without them gives, up to rounding, because means follow from sums and counts. "
        "Whether the rows were in it cannot be seen from means."
    )
    return changed, ExactResult(len(labels_F), left, how)


def _priors(estimator: Any, counts: np.ndarray, kept_C: np.ndarray) -> np.ndarray:
    if isinstance(estimator.priors, str):
        shares = counts / counts.sum()
        return shares if estimator.priors == "empirical" else np.full(len(counts), 1 / len(counts))
    if not kept_C.all():
        raise DataError("a class would have no row left, but priors name one for each class. Fit without priors.")
    return np.asarray(estimator.class_prior_)
