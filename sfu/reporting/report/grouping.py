"""Which runs belong together: by their resolved configuration, never by what happened to be typed.

Runs are averaged over seeds alone (or over what the reader names). Whatever else differs tells settings apart. Two runs
with the same configuration and the same seed are one result, not two: rows of the later replace those of the earlier.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sfu.errors import ConfigError
from sfu.reporting.aggregate import Run, aggregate
from sfu.results.run_folder import FoundRun

SEEDS = ("seed", "seeds")
EXPERIMENT = "experiment"
NO_MATTER = (
    *("logger", "threads", "reuse", "methods"),
    *("backbone.cache", "backbone.workers", "dataset.root", "dataset.download"),
)
"""Keys, and all below them, that do not change what a row says."""

Settings = dict[str, str]


@dataclass(frozen=True)
class Section:
    """Runs that are shown in one table.

    Several sections never share a run, and nothing is averaged across them.

    Attributes:
        title: What it is about.
        fixed: Settings that tell this section from the others.
        total: Its aggregate.
        runs: The runs in it.
        implied: Settings that differ together with one that is shown, by the shown one's name.
    """

    title: str
    fixed: Settings
    total: dict[str, Any]
    runs: list[FoundRun]
    implied: dict[str, list[str]] = field(default_factory=dict)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Settings:
    """A nested configuration as ``{"head.l2": "0.001"}``; lists and empty mappings are one value."""
    flat: Settings = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def under(key: str, names: Iterable[str]) -> bool:
    """True if a key is one of ``names`` or stands below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def settings_of(run: FoundRun) -> Settings:
    """What a run computed with, flat; the name of its experiment, where it has one, comes first."""
    named = {EXPERIMENT: run.overrides[EXPERIMENT]} if EXPERIMENT in run.overrides else {}
    return named | {key: value for key, value in flatten(run.config or {}).items() if not under(key, NO_MATTER)}


def in_tables(run: FoundRun) -> bool:
    """True for a run that a table can place: its configuration is known."""
    return run.config is not None


def merge_repeats(runs: Sequence[FoundRun]) -> tuple[list[FoundRun], list[tuple[FoundRun, FoundRun]]]:
    """Runs of one configuration and seed as one.

    Returns:
        The runs that are left, and pairs of a run that was repeated and the later one that stands for it.
    """
    flat = [settings_of(run) for run in runs]
    told_apart_by = [EXPERIMENT, *varied(flat)]  # not by what only some have, such as a variant or a newer setting
    by_settings: dict[tuple[str | None, ...], list[FoundRun]] = {}
    for run, settings in zip(runs, flat, strict=True):
        by_settings.setdefault(tuple(settings.get(key) for key in told_apart_by), []).append(run)
    kept, repeated = [], []
    for same in by_settings.values():
        done = [run for run in same if run.metrics is not None]
        *earlier, last = sorted(done or same, key=lambda run: run.started.timestamp() if run.started else 0.0)
        repeated += [(run, last) for run in same if run is not last]
        rows = {name: row for run in [*earlier, last] for name, row in ((run.metrics or {}).get("rows") or {}).items()}
        kept.append(last if last.metrics is None else replace(last, metrics={**last.metrics, "rows": rows}))
    return kept, repeated


def sections(
    runs: Sequence[FoundRun], by: Sequence[str] = (), over: Sequence[str] = SEEDS, spread: str = "stderr"
) -> list[Section]:
    """Splits runs into tables, and each table into settings.

    Args:
        runs: Runs whose configuration is known, without repeats.
        by: Keys whose values are the settings of a table; whatever else differs makes tables of its own. Empty: one
            table for each experiment, its settings told apart by everything that differs.
        over: Keys to average over, with all below them.
        spread: See ``aggregate``.

    Raises:
        ConfigError: A key of ``by`` or ``over`` occurs in no run, or in both.
    """
    flat = [settings_of(run) for run in runs]
    _check(flat, by, over)
    others = [key for key in _order(flat, runs, varied(flat, over)) if not under(key, by)]
    split_by = _telling(flat, others, _swept(runs))[0] if by else []
    parts: dict[tuple[str, ...], list[int]] = {}
    for index, settings in enumerate(flat):
        mark = tuple(settings.get(key, "") for key in split_by) if by else (_experiment(settings),)
        parts.setdefault(mark, []).append(index)
    found = []
    for values, members in parts.items():
        fixed = {key: value for key, value in zip(split_by, values, strict=False) if value}
        found.append(_section(fixed, [runs[i] for i in members], [flat[i] for i in members], by, over, spread))
    return found


def _experiment(settings: Settings) -> str:
    """What runs must share to be in one table by default: an experiment's name or, without one, their data."""
    return settings.get(EXPERIMENT) or _dataset(settings)


def _swept(runs: Sequence[FoundRun]) -> set[str]:
    """Keys that were given more than one value on the command lines; they are always shown."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.overrides.items():
            values.setdefault(key, set()).add(value)
    return {key for key, given in values.items() if len(given) > 1}


def _order(flat: Sequence[Settings], runs: Sequence[FoundRun], keys: Iterable[str]) -> list[str]:
    """Keys that were typed first (``loss=x`` types ``loss.name``), the others after them in their own order."""
    typed = {name for run in runs for key in run.overrides for name in (key, f"{key}.name")}
    return sorted(keys, key=lambda key: key not in typed)


def _section(
    fixed: Settings,
    runs: list[FoundRun],
    flat: list[Settings],
    by: Sequence[str],
    over: Sequence[str],
    spread: str,
) -> Section:
    differing = [*by, *(key for key in _order(flat, runs, varied(flat, over)) if key not in by)]
    shown, implied = _telling(flat, differing, {*by, *_swept(runs)})
    averaged = [key for key in dict.fromkeys(key for s in flat for key in s) if under(key, over)]
    averaged = [key for key in averaged if key == "seed" or len({s.get(key) for s in flat}) > 1]
    pairs: list[Run] = [
        ({key: settings[key] for key in (*shown, *averaged) if key in settings}, _metrics(run))
        for run, settings in zip(runs, flat, strict=True)
    ]
    total = aggregate(pairs, averaged, spread)
    return Section(_title(fixed, flat, total["varied"]), fixed, total, runs, implied)


def _metrics(run: FoundRun) -> dict[str, Any]:
    return run.metrics if run.metrics is not None else {"error": f"{run.folder.name}: {run.problem}"}


def varied(flat: Sequence[Settings], over: Sequence[str] = ()) -> list[str]:
    """Keys with more than one value among the runs that have them, in their own order; not those under ``over``."""
    keys = dict.fromkeys(key for settings in flat for key in settings)
    return [
        key for key in keys if not under(key, over) and len({settings[key] for settings in flat if key in settings}) > 1
    ]


def _telling(flat: Sequence[Settings], keys: Sequence[str], always: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The keys that tell the runs apart, in order, and those that say nothing more than an earlier one."""
    shown: list[str] = []
    implied: dict[str, list[str]] = {}
    for key in keys:
        cause = next((other for other in shown if _follows(flat, other, key)), None) if key not in always else None
        if cause is None:
            shown.append(key)
        else:
            implied.setdefault(cause, []).append(key)
    return shown, implied


def _follows(flat: Sequence[Settings], cause: str, key: str) -> bool:
    """True if the value of ``key`` is the same wherever that of ``cause`` is."""
    values: dict[str | None, str | None] = {}
    return all(values.setdefault(s.get(cause), s.get(key)) == s.get(key) for s in flat)


def _title(fixed: Settings, flat: Sequence[Settings], by: Sequence[str]) -> str:
    data = ", ".join(dict.fromkeys(_dataset(settings) for settings in flat))
    if names := list(dict.fromkeys(settings[EXPERIMENT] for settings in flat if EXPERIMENT in settings)):
        data = f"{', '.join(names)}: {data}"
    told = (EXPERIMENT, "dataset", "backbone.name")
    others = ", ".join(f"{key} = {value}" for key, value in fixed.items() if not under(key, told))
    what = ", ".join(key for key in by if key != "dataset.name")
    return data + (f", {others}" if others else "") + (f", by {what}" if what else "")


def _dataset(settings: Settings) -> str:
    name, path = settings.get("dataset.name", "?"), settings.get("dataset.path", "null")
    backbone = settings.get("backbone.name", "none")
    stem = path.rstrip("/").rsplit("/", 1)[-1]
    return (name if path == "null" else f"{name} {stem}") + ("" if backbone == "none" else f" through {backbone}")


def check_keys(flat: Sequence[Settings], option: str, keys: Iterable[str]) -> None:
    """Refuses keys that no run has.

    Raises:
        ConfigError: Naming the option, the key and the nearest one.
    """
    known = list(dict.fromkeys(key for settings in flat for key in settings))
    for key in keys:
        if under(key, NO_MATTER):
            raise ConfigError(f"{option} {key}: runs are not told apart by it, since it changes no result.")
        if flat and not any(name == key or (option == "--over" and under(name, [key])) for name in known):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" did you mean {near[0]}?" if near else " keys are those of a run's config.yaml."
            raise ConfigError(f"{option} {key}: no run has this setting;{hint}")


def _check(flat: Sequence[Settings], by: Sequence[str], over: Sequence[str]) -> None:
    check_keys(flat, "--by", by)
    check_keys(flat, "--over", [key for key in over if key not in SEEDS])
    if both := [key for key in by if under(key, over)]:
        raise ConfigError(
            f"--by {both[0]}: it is averaged over (--over {' '.join(over)}); leave it out of one of them."
        )
