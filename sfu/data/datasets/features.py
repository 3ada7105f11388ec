"""Features of your own: an npz or safetensors file of ``train_features``, ``train_labels`` and a test part.

The file must hold exactly what the headers of its arrays say. A compressed npz file of more than 64 MiB when unpacked
may unpack to 100 times its own size. Without ``test_features`` and ``test_labels`` a seeded stratified test part is
held out. Features in uint8 beside ``offset`` and ``scale``, one number for each feature, stand for
``offset + scale * features``. ``train_groups`` says whose each training row is: text (npz) or whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sfu.data.datasets.base import FeatureDataset
from sfu.data.raw_arrays import RawArrays, Shape, stratified_test_split
from sfu.errors import ConfigError, DataError
from sfu.readers import array_names, array_shapes, read_arrays, refusing
from sfu.schema import setting

TRAIN = ("train_features", "train_labels")
TEST = ("test_features", "test_labels")
GROUPS = "train_groups"
_USUAL = {
    "train_features": ("train_features", "x_train", "train_x", "x", "features", "train", "data", "embeddings"),
    "train_labels": ("train_labels", "y_train", "train_y", "y", "labels", "targets", "target"),
    "test_features": ("test_features", "x_test", "test_x"),
    "test_labels": ("test_labels", "y_test", "test_y"),
}
"""What others call these arrays, in lower case."""
CODES = ("offset", "scale")
SUFFIXES = (".npz", ".safetensors")


@dataclass
class FeatureFile(FeatureDataset, name="features"):
    """The arrays of one file."""

    path: str | None = setting(None, "File of features, .npz or .safetensors.", location=True)

    def load(self, seed: int) -> RawArrays:
        path = self._path()
        arrays = read_feature_file(path, (*TRAIN, *TEST, GROUPS), "dataset.path")
        lacking = [key for key in TRAIN if key not in arrays]
        if lacking:
            raise DataError(_rename(path, lacking))
        tests = [key for key in TEST if key in arrays]
        if len(tests) == 1:
            raise DataError(f"dataset.path={path} has {tests[0]} alone. Give both of {', '.join(TEST)}, or neither.")
        features, labels, groups = *(arrays[key] for key in TRAIN), arrays.get(GROUPS)
        if tests:
            return RawArrays(features, labels, arrays[TEST[0]], arrays[TEST[1]], groups)
        return stratified_test_split(features, labels, self.test_fraction, seed, self.source, groups)

    def shape(self) -> Shape | None:
        path = self._path()
        with refusing(self.source, "Write it again with numpy.savez, safetensors or sfu-features export.", DataError):
            shapes = array_shapes(path, (*TRAIN, *TEST))
            labels = read_arrays(path, ("train_labels",)).get("train_labels")
            if labels is None or not labels.size or len(shapes.get("train_features", ((), 0))[0]) != 2:
                return None  # loading says what is wrong
            (rows, features), itemsize = shapes["train_features"]
            test = shapes["test_features"][0][0] if "test_features" in shapes else round(self.test_fraction * rows)
            rows = rows if "test_features" in shapes else rows - test
            classes = self.n_classes or int(labels.max()) + 1
        if min(rows, features) < 1 or classes < 2:
            return None
        return Shape(rows, test, features, classes, 8 if itemsize == 8 else 4)

    def source_files(self) -> list[Path]:
        return [self._path()]

    def _path(self) -> Path:
        if not self.path:
            raise ConfigError("dataset=features needs dataset.path: an .npz or .safetensors file of features.")
        path = Path(self.path).expanduser()
        if not path.exists():
            raise DataError(
                f"dataset.path={path} does not exist (looked from {Path.cwd()}). Give the path of an .npz or "
                ".safetensors file of features, from this folder or from the root."
            )
        require_suffix(path, "dataset.path")
        return path


def require_suffix(path: Path, setting: str, accepted: tuple[str, ...] = SUFFIXES) -> None:
    """Raise :class:`ConfigError` unless the file is of a type that holds features; ``setting`` names the key."""
    if path.suffix not in accepted:
        ends = f"ends in '{path.suffix}'" if path.suffix else "has no ending"
        raise ConfigError(
            f"{setting}={path} {ends}. sfu reads {', '.join(accepted[:-1])} and {accepted[-1]}. Save the features "
            "with numpy.savez, safetensors or sfu-features export."
        )


def _rename(path: Path, lacking: list[str]) -> str:
    """Say which arrays a file lacks and holds, and how to save those it holds under the names that sfu reads."""
    held = array_names(path)
    known = {name.lower(): name for name in held}
    meant = {want: next((known[name] for name in usual if name in known), None) for want, usual in _USUAL.items()}
    renamed = ", ".join(
        f"{want}=data[{'NAME' if name is None else repr(name)}]"
        for want, name in meant.items()
        if name is not None or want in TRAIN
    )
    return (
        f"dataset.path={path} has no {' and no '.join(lacking)}. It holds {', '.join(held) or 'no arrays'}. sfu reads "
        f"{', '.join(TRAIN)} and, optionally, {', '.join(TEST)}. Save the arrays again under these names: "
        + (
            f"data = numpy.load({path.name!r}); numpy.savez('renamed.npz', {renamed})."
            if path.suffix == ".npz"
            else f"data = safetensors.numpy.load_file({path.name!r}); "
            f"safetensors.numpy.save_file(dict({renamed}), 'renamed.safetensors')."
        )
    )


def read_feature_file(path: Path, keys: tuple[str, ...], setting: str) -> dict[str, np.ndarray]:
    """Return those of ``keys`` that an npz or safetensors file holds. Nothing is ever unpickled.

    Raises:
        ConfigError: The file is of another type; ``setting`` names the config key in the message.
        DataError: It is damaged, holds something else than numbers, or unpacks to far more than its own size.
    """
    require_suffix(path, setting)
    with refusing(
        f"{setting}={path}", "Write it again with numpy.savez, safetensors or sfu-features export.", DataError
    ):
        arrays = read_arrays(path, (*keys, *CODES), texts=(GROUPS,))
        codes = {name: arrays.pop(name) for name in CODES if name in arrays}
        return _decoded(arrays, codes) if codes else arrays


def _decoded(arrays: dict[str, np.ndarray], codes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turn features in uint8 into float32 by an offset and a scale; leave other arrays as they are."""
    coded = [name for name, values in arrays.items() if name.endswith("features") and values.dtype == np.uint8]
    if not coded:
        return arrays
    for name in CODES:
        if name not in codes:
            raise ValueError(f"{coded[0]} is uint8 and has {next(iter(codes))}, but no {name}")
        values = codes[name]
        if values.dtype.kind != "f" or not np.isfinite(values).all() or (name == "scale" and (values < 0).any()):
            raise ValueError(f"{name} must hold finite floats{' of at least 0' if name == 'scale' else ''}")
    decoded = dict(arrays)
    for name in coded:
        widths = {arrays[name].shape[1:], *(values.shape for values in codes.values())}
        if len(widths) > 1:
            shapes = ", ".join(f"{key} {list(values.shape)}" for key, values in ({name: arrays[name]} | codes).items())
            raise ValueError(f"the shapes do not fit together: {shapes}")
        decoded[name] = arrays[name].astype(np.float32)
        decoded[name] *= codes["scale"].astype(np.float32)
        decoded[name] += codes["offset"].astype(np.float32)
    return decoded
