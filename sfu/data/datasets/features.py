"""Features of your own: an npz or safetensors file of ``train_features``, ``train_labels`` and a test part.

Without ``test_features`` and ``test_labels`` a seeded stratified test part is held out.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfu.data.raw_arrays import RawArrays, stratified_test_split
from sfu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfu.settings import DatasetConfig

_TRAIN = ("train_features", "train_labels")
_TEST = ("test_features", "test_labels")
_SUFFIXES = (".npz", ".safetensors")


def load(config: DatasetConfig, seed: int) -> RawArrays:
    """Read ``dataset.path``; hold out a test part if it has none.

    Raises:
        ConfigError: No path, or a file type other than .npz and .safetensors.
        DataError: The file is missing, corrupt, or lacks an array.
    """
    path = _path(config)
    arrays = read_arrays(path, _TRAIN + _TEST, "dataset.path")
    lacking = [key for key in _TRAIN if key not in arrays]
    if lacking:
        raise DataError(
            f"dataset.path={path} has no {' and no '.join(lacking)}; it holds {sorted(arrays) or 'nothing'}. "
            f"Needed: {', '.join(_TRAIN)}; optional: {', '.join(_TEST)}."
        )
    tests = [key for key in _TEST if key in arrays]
    if len(tests) == 1:
        raise DataError(f"dataset.path={path} has {tests[0]} alone; give both of {', '.join(_TEST)}, or neither.")
    if tests:
        return RawArrays(*(arrays[key] for key in _TRAIN + _TEST))
    return stratified_test_split(
        arrays["train_features"],
        arrays["train_labels"],
        test_fraction=config.test_fraction,
        seed=seed,
        source=f"dataset.path={path}",
    )


def source_files(config: DatasetConfig) -> list[Path]:
    """The feature file itself."""
    return [_path(config)]


def _path(config: DatasetConfig) -> Path:
    if not config.path:
        raise ConfigError("dataset=features needs dataset.path: an .npz or .safetensors file of features.")
    path = Path(config.path).expanduser()
    if not path.exists():
        raise DataError(f"dataset.path={path} does not exist (looked from {Path.cwd()}).")
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"dataset.path={path} ends in '{path.suffix}'; {' and '.join(_SUFFIXES)} are read.")
    return path


def read_arrays(path: Path, keys: tuple[str, ...], setting: str) -> dict[str, np.ndarray]:
    """Those of ``keys`` that an npz or safetensors file holds; nothing is ever unpickled.

    Raises:
        ConfigError: The file is of another type; ``setting`` names the config key in the message.
        DataError: It is damaged, or holds pickled objects.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{setting}={path} ends in '{path.suffix}'; {' and '.join(_SUFFIXES)} are read.")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {key: file[key] for key in keys if key in file.files}
        from safetensors import safe_open

        with safe_open(path, framework="np") as file:
            present = set(file.keys())
            return {key: file.get_tensor(key) for key in keys if key in present}
    except (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(_unreadable(path, setting, error)) from error
    except Exception as error:  # safetensors raises its own SafetensorError, a bare Exception
        if type(error).__name__ == "SafetensorError":
            raise DataError(_unreadable(path, setting, error)) from error
        raise


def _unreadable(path: Path, setting: str, error: Exception) -> str:
    return (
        f"{setting}={path} cannot be read as {path.suffix[1:]} ({type(error).__name__}: {error}); it is damaged or "
        "holds pickled objects, which sfu never loads. Write it again with numpy.savez or safetensors."
    )
