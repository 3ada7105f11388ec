"""Arrays as a dataset file holds them, before any check; and a test part for those without one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sfu.data.feature_data import check_features, check_labels
from sfu.errors import DataError


class RawArrays(NamedTuple):
    """Features ``[N, D]`` and labels ``[N]`` of the training part, ``[T, D]`` and ``[T]`` of the test part."""

    train_features: np.ndarray
    train_labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray


def stratified_test_split(
    features: np.ndarray, labels: np.ndarray, test_fraction: float, seed: int, source: str
) -> RawArrays:
    """Hold out a seeded stratified test part (every class in proportion); see :func:`stratified_rows`.

    Raises:
        DataError: Features or labels cannot be used (rows are counted here as in the file), or a class is too small.
    """
    check_features(features, f"{source}: train_features")
    check_labels(labels, len(features), f"{source}: train_labels")
    train, test = stratified_rows(labels, test_fraction, seed, source)
    return RawArrays(features[train], labels[train], features[test], labels[test])


def stratified_rows(labels: np.ndarray, test_fraction: float, seed: int, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Ascending row numbers of the training part and of a seeded stratified test part.

    Raises:
        DataError: A class is too small to appear on both sides.
    """
    from sklearn.model_selection import train_test_split

    try:
        train, test = train_test_split(
            np.arange(len(labels)), test_size=test_fraction, random_state=seed, stratify=labels
        )
    except ValueError as error:
        raise DataError(
            f"{source}: no stratified test part of dataset.test_fraction={test_fraction} can be drawn "
            f"({str(error)[:200]}). Give a test part, more rows a class, or another fraction."
        ) from error
    return np.sort(train), np.sort(test)
