"""Results in words: what was forgotten, what a table averages, what failed, what is missing, what methods noted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sfu.reporting import format as fmt
from sfu.results.aggregate import SPREADS, Group, MethodResult, ResultTable
from sfu.results.rows import Metrics, is_number
from sfu.results.statistic import MARGINS

SCALE = "Distance: 0 = Retrained, 1 = untouched."
PREDICTED = "pred.: the distance predicted from the forget set."
_OPEN = {"process": "this process", "files": "files", "network": "the network"}
SIGNED = "Signed numbers: points from Retrained."
ONE_RUN = "One run, so no spread. Add seeds=10 for means with intervals."
DIFFERENCE = (
    "Points from Retrained in the same run: mean and 95 % interval. "
    f"=: equal within {MARGINS['test_accuracy']:g} points, MIA within {MARGINS['mia']:g} (two one-sided tests at 5 %). "
    "≠: different. ?: these runs do not tell."
)


def run_headline(metrics: Metrics) -> str:
    """For example ``digits: forgot 144 of 1437 examples (random 10 %), softmax, l2 0.0005, seed 0``."""
    run = metrics.get("run") or {}
    data, head, seeds = run.get("data") or {}, run.get("head") or {}, run.get("seeds") or {}
    n_forget, n_train = data.get("n_forget"), data.get("n_train")
    parts = []
    if n_forget is not None:
        of, what = f" of {n_train} examples" if n_train is not None else "", _forgotten(run.get("forget") or {})
        parts.append(f"forgot {n_forget}{of}" + (f" ({what})" if what else ""))
    if (loss := (head.get("loss") or {}).get("name")) not in (None, "quadratic"):
        parts.append(loss)
    if is_number(head.get("l2")):
        parts.append(f"l2 {head['l2']:g}")
    if seeds.get("seed") is not None:
        parts.append(f"seed {seeds['seed']}")
    name = str(data.get("name") or run.get("name") or "run")
    if backbone := (data.get("backbone") or {}).get("name"):
        name += f" through {backbone}"
    return f"{name}: {', '.join(parts)}" if parts else name


def _forgotten(forget: Mapping[str, Any]) -> str:
    kind = forget.get("kind")
    if kind == "classes" and not forget.get("classes"):
        return "whole classes"
    if kind == "classes":
        classes = [str(label) for label in forget["classes"]]
        shown = ", ".join(classes[:8]) + (f" and {len(classes) - 8} more" if len(classes) > 8 else "")
        return f"class{'es' if len(classes) > 1 else ''} {shown}"
    if kind == "fraction" and is_number(forget.get("fraction")):
        return f"random {100 * forget['fraction']:g} %"
    return {"indices": "chosen by index", "files": "chosen by file name"}.get(str(kind), "")


def machine_line(metrics: Metrics) -> str:
    """For example ``cpu, float64, 12.3 s``; empty when nothing is known."""
    run = metrics.get("run") or {}
    parts = [str(run[key]) for key in ("device", "dtype") if run.get(key)]
    if is_number(run.get("seconds")):
        parts.append(f"{fmt.seconds(run['seconds'])} s")
    return ", ".join(parts)


def averaged(table: ResultTable) -> str:
    """How many runs a table averages, and over what: ``8 of 9 runs, mean and standard error over seed``.

    Where no setting has two runs, nothing is averaged: ``1 of 2 runs``.
    """
    runs = f"{table.n_runs - len(table.failed)} of {table.n_runs} run{'s' if table.n_runs > 1 else ''}"
    return f"{runs}, mean and {spread_words(table)}" if any(group.n > 1 for group in table.groups) else runs


def spread_words(table: ResultTable) -> str:
    """What stands after ±: ``standard error over seed``."""
    return f"{SPREADS[table.spread]} over {' and '.join(table.over) or 'nothing'}"


def headline(table: ResultTable) -> str:
    """The first line of the table of several runs."""
    fixed = ", ".join(f"{key}={value}" for key, value in table.fixed.items())
    return averaged(table) + (f" ({fixed})" if fixed else "")


def setting_of(group: Group) -> str:
    """A group's setting: ``head.l2 = 0.001, forget.fraction = 0.1``; empty if nothing varied."""
    return ", ".join(f"{key} = {value or '(default)'}" for key, value in group.overrides.items())


def count_of(group: Group) -> str:
    """How many runs a group averages: ``n = 3 (seed 0, 1, 2)``, with failures named."""
    over = "; ".join(f"{key} {', '.join(values)}" for key, values in group.over.items() if values)
    failed = f", {group.n_failed} failed" if group.n_failed else ""
    return f"n = {group.n}" + (f" ({over})" if over else "") + failed


def marked(name: str, row: MethodResult) -> str:
    """A method's name, which says so if its settings were chosen with Retrained at hand."""
    return f"{name} ({row.tuning})" if row.is_tuned_on_retrained else name


def failures(table: ResultTable) -> list[str]:
    """One line for each way of failing, with the jobs (or the method and its jobs) that failed so."""
    unnamed = "" if table.n_runs == 1 else "(no overrides)"
    ways: dict[str, list[str]] = {}
    for job in [*table.failed, *table.failed_rows]:
        told_apart_by = {key: value for key, value in job["overrides"].items() if key not in table.fixed}
        overrides = " ".join(f"{key}={value}" for key, value in told_apart_by.items()) or unnamed
        row = f"{job['row']}: " if "row" in job else ""
        error = " ".join(re.sub(r"^job \d+: ", "", job["error"] or "").split())
        ways.setdefault(row + error, []).append(overrides)
    return [": ".join(filter(None, ("; ".join(filter(None, jobs)), error))) for error, jobs in ways.items()]


def gaps_in_data(table: ResultTable) -> list[str]:
    """One line for each method whose averages do not cover all runs of its group."""
    lines = []
    for group in table.groups:
        where = f" at {setting_of(group)}" if group.overrides else ""
        for name, row in group.rows.items():
            partial: dict[int, list[str]] = {}
            for key, entry in row.metrics.items():
                if 0 < entry.n < group.n:
                    partial.setdefault(entry.n, []).append(key)
            n_metrics = sum(entry.n > 0 for entry in row.metrics.values())
            for count, keys in partial.items():
                what = "every metric" if len(keys) == n_metrics else ", ".join(keys)
                lines.append(f"{name}{where}: {what} over {count} of {group.n} runs")
    return lines


def unenforced(table: ResultTable) -> list[str]:
    """Say which rows without source data ran without protection by the kernel, and by what; nothing if none did."""
    rows: dict[str, list[str]] = {}
    for group in table.groups:
        for name, row in group.rows.items():
            rows[name] = max(rows.get(name, []), row.unenforced, key=len)
    ways: dict[str, list[str]] = {}
    for name, missing in rows.items():
        if missing:
            ways.setdefault(", ".join(_OPEN[one] for one in missing), []).append(name)
    return [
        f"Isolation was not enforced for {', '.join(names)}: the system left {missing} open, and only sfu's own checks "
        "kept the training data from the method."
        for missing, names in ways.items()
    ]


def remarks(table: ResultTable) -> list[tuple[str, str, str]]:
    """What each method noted, each text once: method, where (empty in a table of one setting), text."""
    where: dict[tuple[str, str], list[str]] = {}
    for group in table.groups:
        for name, row in group.rows.items():
            for note in row.notes:
                where.setdefault((name, " ".join(note.split())), []).append(setting_of(group))
    n_groups = len(table.groups)
    return [
        (name, "" if n_groups == 1 else "at every setting" if len(at) == n_groups else f"at {'; '.join(at)}", note)
        for (name, note), at in where.items()
    ]
