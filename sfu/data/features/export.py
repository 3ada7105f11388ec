"""Write the features of a dataset's images to one file, which ``dataset=features`` reads.

The features are read from the cache one chunk at a time: once for the principal axes, once for the range of uint8, and
once to write each part. However many images there are, memory holds one chunk and, for a projection, D x D numbers.

Shapes: N images, M rows of a chunk, D features of the backbone, K numbers of an exported row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfu.data.datasets.features import CODES, SUFFIXES, TEST, TRAIN
from sfu.data.features.store import FeatureStore
from sfu.data.images.image_set import ImageSet
from sfu.errors import ArtifactError, ConfigError, DataError
from sfu.files import StreamedArray, write_arrays
from sfu.schema import Settings, setting

Progress = Callable[[int, int], None]
Stage = Callable[[str], AbstractContextManager[Progress]]
_WIDEST = 16_384  # features: their covariance takes 2 GiB, and finding its eigenvectors takes several times that
_STEPS = 255  # of uint8


@dataclass
class ExportSettings(Settings):
    """What ``sfu-features export`` makes of the features before it writes them."""

    projection: int | None = setting(
        None, "Principal axes of the training rows to keep; null keeps the features as they are.", at_least=1
    )
    rotation: int | None = setting(
        0, "Seed of the random rotation that follows a projection; null keeps the principal axes.", at_least=0
    )
    dtype: str = setting("float32", "How numbers are stored.", choices=("float32", "float16", "uint8"))
    overwrite: bool = setting(False, "Replace a file that is there.")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        n_train: Rows of the training part.
        n_test: Rows of the test part; 0 if the dataset has none of its own, so that all its rows are training rows.
        width: Numbers of a row, K.
        variance_kept: Share of the training rows' variance along the axes kept; ``None`` without a projection.
    """

    n_train: int
    n_test: int
    width: int
    variance_kept: float | None


class ExportedRows:
    """The cached features of a dataset, as they are exported."""

    def __init__(self, store: FeatureStore, axes_DK: Tensor | None = None, *, normalize: bool = False) -> None:
        """Read from a store whose chunks are all there; project on ``axes_DK`` (float64), then scale rows to norm 1."""
        self._store, self._axes_DK, self._normalize = store, axes_DK, normalize

    def of(self, wanted_N: np.ndarray, progress: Progress) -> Iterator[Tensor]:
        """Yield the rows of some images, ``[M, K]``, chunk by chunk and in order.

        Raises:
            ArtifactError: A chunk has been removed from the cache.
        """
        for index in range(self._store.n_chunks):
            rows = self._store.rows(index)
            if wanted_N[rows.start : rows.stop].any():
                chunk = self._store.read(index)
                if chunk is None:
                    raise ArtifactError(f"{self._store.folder} was removed while it was exported. Run again.")
                yield self._exported(chunk.features_MD[torch.from_numpy(wanted_N[chunk.rows_M.numpy()])])
            progress(rows.stop, self._store.n_images)

    def _exported(self, features_MD: Tensor) -> Tensor:
        made_MK = features_MD if self._axes_DK is None else features_MD.double() @ self._axes_DK
        return torch.nn.functional.normalize(made_MK, dim=1) if self._normalize else made_MK


def require_free(path: Path, overwrite: bool) -> None:
    """Refuse a file of another type, or one that is there already.

    Raises:
        ConfigError: The message says what to name instead.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path} ends in '{path.suffix}', and sfu writes {' and '.join(SUFFIXES)}. Name the file first: "
            "sfu-features export FILE.npz key=value ..."
        )
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Name a file.")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists, and export would replace it. Choose another file, or add overwrite=true.")


def export_features(
    path: Path,
    images: ImageSet,
    store: FeatureStore,
    damaged: dict[int, str],
    settings: ExportSettings,
    *,
    normalize_rows: bool,
    stage: Stage,
) -> Exported:
    """Write cached features and their labels to a file, which is either complete or absent.

    Args:
        path: An npz or safetensors file.
        images: The dataset's images, with labels and parts.
        store: The cached features of ``images``; every chunk must be there.
        damaged: What is wrong with images that cannot be decoded, by number; they are left out.
        settings: What to make of the features.
        normalize_rows: Scale every exported row to norm 1, after a projection.
        stage: Shows what is being done, and gives a function of (images done, images in all).

    Raises:
        ConfigError: The projection has more axes than there are features, or the features are too many for one.
        DataError: No image can be decoded, or a number is too large for float16.
        ArtifactError: The file cannot be written, or the features were removed meanwhile.
    """
    there_N = np.ones(len(images.labels_N), dtype=bool)
    there_N[list(damaged)] = False
    if not there_N.any():
        first = next(iter(damaged.values()))
        raise DataError(f"none of the {len(there_N)} images can be decoded. The first one: {first}.")
    is_test_N = np.zeros_like(there_N) if images.is_test_N is None else images.is_test_N
    train_N, test_N = there_N & ~is_test_N, there_N & is_test_N
    axes_DK, kept = None, None
    if settings.projection is not None:
        with stage("finding the principal axes") as tick:
            features = ExportedRows(store).of(train_N, tick)
            axes_DK, kept = principal_axes(features, settings.projection)
        if settings.rotation is not None:
            axes_DK = axes_DK @ random_rotation(settings.projection, settings.rotation)
    rows = ExportedRows(store, axes_DK, normalize=normalize_rows)
    with stage("measuring the range") as tick:
        low_K, high_K = value_range(rows.of(there_N, tick))
    encoding = _Encoding.of(settings.dtype, low_K, high_K)
    arrays: dict[str, StreamedArray] = {}
    with stage(f"writing {path.name}") as tick:
        for (name, labels), wanted_N in ((TRAIN, train_N), (TEST, test_N)):
            if wanted_N.any():
                shape = (int(wanted_N.sum()), len(low_K))
                pieces = map(encoding.encode, rows.of(wanted_N, tick))
                arrays[name] = StreamedArray(np.dtype(settings.dtype), shape, pieces)
                arrays[labels] = StreamedArray.of(images.labels_N[wanted_N].astype(np.int64))
        for name, values_K in zip(CODES, encoding.codes, strict=False):
            arrays[name] = StreamedArray.of(values_K.numpy())
        require_free(path, settings.overwrite)  # it may have appeared while the features were extracted
        write_arrays(path, arrays)
    return Exported(int(train_N.sum()), int(test_N.sum()), len(low_K), kept)


def principal_axes(features: Iterator[Tensor], n_axes: int) -> tuple[Tensor, float]:
    """Return the axes of largest variance, ``[D, n_axes]``, and the share of the variance along them.

    They are eigenvectors of the covariance, summed in float64 and decomposed exactly, largest eigenvalue first. The
    mean is removed to find them, and only for that. The largest number of each axis is positive.

    Args:
        features: Rows ``[M, D]``, in any number of pieces.
        n_axes: Number of axes.

    Raises:
        ConfigError: There are fewer features than axes, or more than can be decomposed.
    """
    count, shift_D, sum_D, moment_DD = 0, torch.empty(0), torch.empty(0), torch.empty(0)
    for piece_MD in features:
        if not piece_MD.numel():
            continue
        width = piece_MD.shape[1]
        if not count:
            if n_axes > width:
                raise ConfigError(f"projection={n_axes} keeps more axes than there are features ({width}). Lower it.")
            if width > _WIDEST:
                raise ConfigError(
                    f"projection={n_axes} needs the covariance of {width:,} features, and sfu decomposes at most "
                    f"{_WIDEST:,}. Choose a backbone with fewer features, or leave projection out."
                )
            shift_D = piece_MD.double().mean(0)  # near the mean, so that the difference of two sums loses no digits
            sum_D, moment_DD = torch.zeros_like(shift_D), shift_D.new_zeros(width, width)
        shifted_MD = piece_MD.double() - shift_D
        count += len(shifted_MD)
        sum_D += shifted_MD.sum(0)
        moment_DD.addmm_(shifted_MD.T, shifted_MD)
    covariance_DD = moment_DD / count - torch.outer(sum_D, sum_D) / count**2
    variances_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    axes_DK = vectors_DD.flip(1)[:, :n_axes]
    largest_K = axes_DK.gather(0, axes_DK.abs().argmax(0, keepdim=True))
    total = float(variances_D.sum())
    kept = float(variances_D[-n_axes:].sum()) / total if total > 0 else 1.0
    return axes_DK * largest_K.sign(), kept


def random_rotation(width: int, seed: int) -> Tensor:
    """Return an orthogonal matrix ``[width, width]``, float64, drawn uniformly from all of them."""
    square = np.random.default_rng(seed).standard_normal((width, width))
    rotation, triangle = np.linalg.qr(square)
    return torch.from_numpy(rotation * np.sign(np.diag(triangle)))


def value_range(rows: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest of each number of a row, ``[K]`` each, float64."""
    ranges = [torch.stack(piece_MK.double().aminmax(dim=0)) for piece_MK in rows if piece_MK.numel()]
    low_K, high_K = torch.stack(ranges).unbind(1)
    return low_K.amin(0), high_K.amax(0)


@dataclass(frozen=True)
class _Encoding:
    """How numbers are stored; ``codes`` are the offset and the scale of uint8, ``[K]`` each, float32."""

    dtype: np.dtype
    codes: tuple[Tensor, ...] = ()

    @staticmethod
    def of(dtype: str, low_K: Tensor, high_K: Tensor) -> _Encoding:
        largest = float(torch.maximum(low_K.abs(), high_K.abs()).max())
        if dtype == "float16" and largest > float(np.finfo(np.float16).max):
            raise DataError(f"a feature has the size {largest:g}, and float16 ends at 65,504. Choose dtype=float32.")
        if dtype != "uint8":
            return _Encoding(np.dtype(dtype))
        return _Encoding(np.dtype(dtype), (low_K.float(), ((high_K - low_K) / _STEPS).float()))

    def encode(self, rows_MK: Tensor) -> np.ndarray:
        """Return the rows as they are stored; those in uint8 are the nearest of 256 steps."""
        if self.codes:
            offset_K, scale_K = self.codes
            steps_MK = (rows_MK.double() - offset_K) / torch.where(scale_K > 0, scale_K, 1)
            rows_MK = steps_MK.round().clamp(0, _STEPS)
        return rows_MK.numpy().astype(self.dtype)
