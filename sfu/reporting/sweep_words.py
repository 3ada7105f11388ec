"""A sweep in words: its first line, the setting of each group, what failed and what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sfu.reporting.aggregate import SPREADS

Aggregate = Mapping[str, Any]


def setting_of(group: Mapping[str, Any]) -> str:
    """A group's settings in words: ``head.l2 = 0.001, forget.fraction = 0.1``; empty if nothing varied."""
    return ", ".join(f"{key} = {value or '(default)'}" for key, value in group["overrides"].items())


def count_of(group: Mapping[str, Any]) -> str:
    """How many runs a group averages: ``n = 3 (seed 0, 1, 2)``, with failures named."""
    over = "; ".join(f"{key} {', '.join(values)}" for key, values in group["over"].items() if values)
    return (
        f"n = {group['n']}"
        + (f" ({over})" if over else "")
        + (f", {group['n_failed']} failed" if group["n_failed"] else "")
    )


def headline(total: Aggregate) -> str:
    """The first line of every sweep table."""
    fixed = ", ".join(f"{key}={value}" for key, value in total["fixed"].items())
    over = " and ".join(total["over"]) or "nothing"
    done = total["n_runs"] - len(total["failed"])
    return f"{done} of {total['n_runs']} runs, mean and {SPREADS[total['spread']]} over {over}" + (
        f" ({fixed})" if fixed else ""
    )


def failures(total: Aggregate) -> list[str]:
    """One line for each way of failing, with the jobs that failed so, or a row of which did."""
    ways: dict[str, list[str]] = {}
    for job in [*total["failed"], *total["failed_rows"]]:
        told_apart_by = {key: value for key, value in job["overrides"].items() if key not in total["fixed"]}
        overrides = " ".join(f"{key}={value}" for key, value in told_apart_by.items()) or "(no overrides)"
        row = f"{job['row']}: " if "row" in job else ""
        ways.setdefault(row + re.sub(r"^job \d+: ", "", job["error"] or ""), []).append(overrides)
    return ["; ".join(jobs) + (f": {error}" if error else "") for error, jobs in ways.items()]


def gaps_in_data(total: Aggregate) -> list[str]:
    """One line for each method whose averages do not cover all runs of its group."""
    lines = []
    for group in total["groups"]:
        where = f" at {setting_of(group)}" if group["overrides"] else ""
        for name, row in group["rows"].items():
            partial: dict[int, list[str]] = {}
            for key, entry in row["metrics"].items():
                if 0 < entry["n"] < group["n"]:
                    partial.setdefault(entry["n"], []).append(key)
            for count, keys in partial.items():
                what = (
                    "every metric"
                    if len(keys) == sum(entry["n"] > 0 for entry in row["metrics"].values())
                    else ", ".join(keys)
                )
                lines.append(f"{name}{where}: {what} over {count} of {group['n']} runs")
    return lines
