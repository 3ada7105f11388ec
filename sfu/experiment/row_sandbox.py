"""What the process of a row may open: Python, its packages, code that is imported already, and what it is given."""

from __future__ import annotations

import glob
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from sfu.config_files import config_dir
from sfu.registry import member_modules

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/etc/localtime",
           "/usr/share/zoneinfo", "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system",
           "/sys/fs/cgroup", "/dev/urandom", "/dev/zero")  # fmt: skip
_CUDA = ("/usr/local/cuda", "/opt/cuda", "/proc/driver/nvidia", "/sys/bus/pci", "/sys/class", "/sys/devices")
_LIBRARIES = (f"{sys.base_prefix}/lib", "/usr/lib", "/usr/local/lib")
_OTHERS_DATA = "*/datasets/data"
"""Datasets that packages bring along, such as scikit-learn's, from a folder of packages."""


def places(scratch: str, *, device: str, files: Sequence[str], closed: Sequence[Path]) -> dict[str, Any]:
    """Return what a process is told of where it may read and write, as JSON values.

    Args:
        scratch: The empty folder for its result.
        device: Type of the device it computes on.
        files: Files that it may read.
        closed: Files and folders that it must not read even if they lie among Python's packages.
    """
    readable = _readable(device)
    modules = _modules_elsewhere(readable)
    code = [Path(place) for file, folders in modules.values() for place in folders or filter(None, [file])]
    return {
        "read": [str(path) for path in (*readable, *code, *map(Path, files))],
        "modules": modules, "members": member_modules(),
        "closed": [str(path) for path in (*closed, *_data_of_packages())],
        "write": [scratch, "/dev/null", *(_nvidia_devices() if device == "cuda" else [])],
        "scratch": scratch, "folder": _working_folder(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return os.sep


def _readable(device: str) -> list[Path]:
    """Return what imports need of Python, installed packages and the configuration, and what the device needs."""
    roots = [Path(place) for place in (*_SYSTEM, *(_CUDA if device == "cuda" else ()))]
    return [*roots, *_package_folders(), Path(sys.base_prefix) / "lib", config_dir()]


def _modules_elsewhere(readable: Sequence[Path]) -> dict[str, tuple[str | None, list[str]]]:
    """Return file and folders of the modules and packages that are imported already and lie outside of ``readable``."""
    inside = tuple(os.path.realpath(root) + os.sep for root in readable)
    found = {}
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if "." in name or name == "__main__" or not isinstance(spec, ModuleSpec):
            continue
        file, folders = spec.origin if spec.has_location else None, list(spec.submodule_search_locations or ())
        places = folders or ([file] if file else [])
        if places and not os.path.realpath(places[0]).startswith(inside):
            found[name] = file, folders
    return found


class KnownModules(MetaPathFinder):
    """Finds the modules that the caller has imported, where the folder around them cannot be listed."""

    def __init__(self, modules: Mapping[str, tuple[str | None, list[str]]]) -> None:
        self._modules = modules

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        file, folders = self._modules[name]
        if file is not None:
            return spec_from_file_location(name, file, submodule_search_locations=folders or None)
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = folders
        return spec


@cache
def _package_folders() -> list[Path]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return [Path(place) for place in (*places, *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []))]


@cache
def _data_of_packages() -> list[Path]:
    folders = [
        *_package_folders(),
        *(Path(place) for root in _LIBRARIES for place in glob.glob(f"{root}/python3*/*-packages")),
    ]
    return [path for folder in folders for path in folder.glob(_OTHERS_DATA)]


def _nvidia_devices() -> list[str]:
    return [str(path) for path in Path("/dev").glob("nvidia*")]
