"""Which runs belong together: by their resolved configuration, never by what happened to be typed.

Runs are averaged over seeds alone (or over what the reader names). Whatever else differs tells settings apart. Two runs
with the same configuration and the same seed are one result, not two: rows of the later replace those of the earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sfu.errors import ConfigError
from sfu.registry import did_you_mean
from sfu.results.aggregate import ResultTable, Run, Spread, aggregate
from sfu.results.rows import flat_items, rows_of
from sfu.results.run_folder import FoundRun

SEEDS = ("seed", "seed_for")
EXPERIMENT = "experiment"
_REQUEST = "request"

Settings = dict[str, str]


@dataclass(frozen=True)
class Configured:
    """A run and the settings that tell it from others, flat."""

    run: FoundRun
    settings: Settings


@dataclass(frozen=True)
class Section:
    """Runs that are shown in one table. Sections never share a run, and nothing is averaged across them.

    Attributes:
        fixed: Settings that tell this section from the others.
        implied: Settings that differ only where a shown one does, by the name of the shown one.
        runs: The runs of the table.
    """

    title: str
    fixed: Settings
    table: ResultTable
    implied: dict[str, list[str]] = field(default_factory=dict)
    runs: list[FoundRun] = field(default_factory=list)

    @property
    def has_results(self) -> bool:
        """True if not every run failed."""
        return len(self.table.failed) < self.table.n_runs


def flatten(config: Mapping[str, Any] | None) -> Settings:
    """Return a nested configuration as ``{"head.l2": "0.001"}``; lists and empty mappings are one value."""
    return {key: _text(value) for key, value in flat_items(config or {})}


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


def values_by_key(found: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Return every key with its distinct values, both in the order in which they came."""
    values: dict[str, dict[str, None]] = {}
    for entries in found:
        for key, value in entries.items():
            values.setdefault(key, {})[value] = None
    return {key: list(given) for key, given in values.items()}


def configured(run: FoundRun, neutral: Iterable[str] = ()) -> Configured:
    """Return a run with its settings, without the keys (with all below them) that do not change results.

    The names of its experiment and of its request, where it has them, come first.
    """
    named = {key: run.overrides[key] for key in (EXPERIMENT, _REQUEST) if key in run.overrides}
    settings = {key: value for key, value in flatten(run.config).items() if not under(key, neutral)}
    return Configured(run, named | settings)


def merge_repeats(found: Sequence[Configured]) -> tuple[list[Configured], list[tuple[FoundRun, FoundRun]]]:
    """Merge runs of one configuration and seed; also return pairs of a repeated run and the later that replaces it."""
    told_apart_by = [EXPERIMENT, *_varied(found)]  # not by what only some have, such as a variant or a newer setting
    by_settings: dict[tuple[str | None, ...], list[Configured]] = {}
    for one in found:
        by_settings.setdefault(tuple(one.settings.get(key) for key in told_apart_by), []).append(one)
    merged, repeated = [], []
    for same in by_settings.values():
        done = [one for one in same if one.run.metrics is not None]
        *earlier, last = sorted(done or same, key=lambda one: one.run.started.timestamp() if one.run.started else 0.0)
        repeated += [(one.run, last.run) for one in same if one is not last]
        if last.run.metrics is not None:
            rows = {name: row for one in [*earlier, last] for name, row in rows_of(one.run.metrics or {}).items()}
            last = replace(last, run=replace(last.run, metrics={**last.run.metrics, "rows": rows}))
        merged.append(last)
    return merged, repeated


def sections(
    found: Sequence[Configured], by: Sequence[str] = (), over: Sequence[str] = SEEDS, spread: Spread = "stderr"
) -> list[Section]:
    """Split runs into tables, and each table into settings.

    Args:
        found: Runs without repeats.
        by: Keys whose values are the settings of a table; whatever else differs makes tables of its own. Empty: one
            table for each experiment, its settings told apart by everything that differs.
        over: Keys to average over, with all below them.
        spread: What stands after ± in tables and pictures.

    Raises:
        ConfigError: A key of ``by`` or ``over`` occurs in no run, or in both.
    """
    check_keys(found, "--by", by)
    check_keys(found, "--over", [key for key in over if key not in SEEDS])
    if both := [key for key in by if under(key, over)]:
        raise ConfigError(
            f"--by {both[0]} is averaged over (--over {' '.join(over)}), so it cannot tell settings apart. "
            "Leave it out of one of the two."
        )
    others = [key for key in _order(found, _varied(found, over)) if not under(key, by)]
    split_by = _telling(found, others, _swept(found))[0] if by else []
    parts: dict[tuple[str, ...], list[Configured]] = {}
    for one in found:
        settings = one.settings
        default = (settings.get(EXPERIMENT) or _dataset(settings),)  # by name or, without one, by data
        mark = tuple(settings.get(key, "") for key in split_by) if by else default
        parts.setdefault(mark, []).append(one)
    return [
        _section({key: value for key, value in zip(split_by, values, strict=False) if value}, part, by, over, spread)
        for values, part in parts.items()
    ]


def _swept(found: Sequence[Configured]) -> set[str]:
    """Keys that were given more than one value on the command lines; they are always shown."""
    return {key for key, given in values_by_key(one.run.overrides for one in found).items() if len(given) > 1}


def _order(found: Sequence[Configured], keys: Iterable[str]) -> list[str]:
    """Keys that were typed first (``loss=x`` types ``loss.name``), the others after them in their own order."""
    typed = {name for one in found for key in one.run.overrides for name in (key, f"{key}.name")}
    return sorted(keys, key=lambda key: key not in typed)


def _section(
    fixed: Settings, found: Sequence[Configured], by: Sequence[str], over: Sequence[str], spread: Spread
) -> Section:
    differing = [*by, *(key for key in _order(found, _varied(found, over)) if key not in by)]
    shown, implied = _telling(found, differing, {*by, *_swept(found)})
    averaged = [key for key in values_by_key(one.settings for one in found) if under(key, over)]
    averaged = [key for key in averaged if key == "seed" or len({one.settings.get(key) for one in found}) > 1]
    runs: list[Run] = []
    for one in found:
        run, settings = one.run, {key: one.settings[key] for key in (*shown, *averaged) if key in one.settings}
        failed = {"error": f"{run.folder.name}: {run.problem}"}
        runs.append((settings, failed if run.metrics is None else run.metrics))
    table = aggregate(runs, averaged, spread)
    return Section(_title(fixed, found, table.varied), fixed, table, implied, [one.run for one in found])


def _varied(found: Sequence[Configured], over: Sequence[str] = ()) -> list[str]:
    """Keys with more than one value among the runs that have them, in their own order; not those under ``over``."""
    values = values_by_key(one.settings for one in found)
    return [key for key, given in values.items() if len(given) > 1 and not under(key, over)]


def _telling(
    found: Sequence[Configured], keys: Sequence[str], always: set[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """The keys that tell the runs apart, in order, and those that differ only where an earlier one does."""
    shown: list[str] = []
    implied: dict[str, list[str]] = {}
    for key in keys:
        cause = next((other for other in shown if _follows(found, other, key)), None) if key not in always else None
        if cause is None:
            shown.append(key)
        else:
            implied.setdefault(cause, []).append(key)
    return shown, implied


def _follows(found: Sequence[Configured], cause: str, key: str) -> bool:
    """True if the value of ``key`` is the same wherever that of ``cause`` is."""
    values: dict[str | None, str | None] = {}
    pairs = [(one.settings.get(cause), one.settings.get(key)) for one in found]
    return all(values.setdefault(given, value) == value for given, value in pairs)


def _title(fixed: Settings, found: Sequence[Configured], by: Sequence[str]) -> str:
    data = ", ".join(dict.fromkeys(_dataset(one.settings) for one in found))
    if names := dict.fromkeys(one.settings[EXPERIMENT] for one in found if EXPERIMENT in one.settings):
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


def check_keys(found: Sequence[Configured], option: str, keys: Iterable[str]) -> None:
    """Refuse keys by which no run can be told from another.

    Raises:
        ConfigError: No run has the key, or the key changes no result.
    """
    known = list(values_by_key(one.settings for one in found))
    configs = {key for one in found for key in flatten(one.run.config)}
    for key in keys:
        below = [name for name in known if under(name, [key])]
        if not found or key in below or (below and option == "--over"):
            continue
        if not below and any(under(name, [key]) for name in configs):
            raise ConfigError(f"{option} {key} does not tell runs apart, because it changes no result. Leave it out.")
        hint = did_you_mean(key, known) or " The keys are those of a run's config.yaml."
        raise ConfigError(f"{option} {key} is a setting that no run has.{hint}")
