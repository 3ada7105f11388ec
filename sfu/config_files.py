"""Where the configuration files stand: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from sfu.errors import ConfigError

MAIN_CONFIG = "sfu"


def config_dir() -> Path:
    """The folder that holds ``sfu.yaml``.

    Raises:
        ConfigError: Neither ``sfu/configs`` nor ``configs`` beside the package holds it.
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "configs", package.parent / "configs")
    for candidate in candidates:
        if (candidate / f"{MAIN_CONFIG}.yaml").is_file():
            return candidate
    raise ConfigError(f"no {MAIN_CONFIG}.yaml in {' or '.join(map(str, candidates))}; reinstall sfu.")


def group_options(group: str) -> list[str]:
    """Names of the files in one config group."""
    return sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))
