"""Identical images on both sides of a cut: copies of one picture that a request leaves behind, or that are tested.

Shapes: N images of all parts together.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sfu.data.images.images import Images
from sfu.names import warn_once


def tell_of_copies(images: Images, source: str, forget: np.ndarray, retained: np.ndarray) -> dict[str, int]:
    """Warn of images to forget that are among the retained ones, too, and of test images among the training images.

    Images are the same if their files are, byte for byte, or their pixels if they are in memory.

    Args:
        images: All N images.
        source: How messages name the dataset.
        forget: Row numbers of the images to forget.
        retained: Row numbers of all other images that the model has seen, public ones included. The rest is tested.

    Returns:
        ``n_forget_copies`` and ``n_test_copies``: how many images to forget, and to test, have such copies.
    """
    digests = images.digests()
    trained = np.concatenate([forget, retained])
    tested = np.setdiff1d(np.arange(len(images)), trained)
    found = {}
    for key, few, many, what, remedy in (
        (
            "n_forget_copies", forget, retained, "images to forget that are identical to a retained image",
            "The model keeps what they show. Forget the copies, too (forget.files), or remove them.",
        ),
        (
            "n_test_copies", tested, trained, "test images that are identical to a training image",
            "They make the test accuracy too high. Remove the copies.",
        ),
    ):  # fmt: skip
        pairs = _pairs(digests, few.tolist(), many.tolist())
        found[key] = len(pairs)
        if pairs:
            one, other = (images.name(row) for row in pairs[0])
            message = f"{source}: {what}: {len(pairs)} (such as {one} and {other}). {remedy}"
            warn_once(__name__, message, about=f"{source} {key}")  # with many seeds, of the first split
    return found


def _pairs(digests: list[bytes], few: Iterable[int], many: Iterable[int]) -> list[tuple[int, int]]:
    """Return each row of the few with the first of the many that is the same, if there is one."""
    first: dict[bytes, int] = {}
    for row in many:
        first.setdefault(digests[row], row)
    return [(row, first[digests[row]]) for row in few if digests[row] in first]
