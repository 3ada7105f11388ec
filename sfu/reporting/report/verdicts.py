"""What all settings of a section say together, in a few sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import mean_rows, methods_of
from sfu.reporting.sweep_words import Aggregate
from sfu.reporting.verdict import NO_CLOSER, best_rows, is_source_free, is_worse_than_nothing, was_withheld

Groups = list[Mapping[str, Any]]


def verdicts(total: Aggregate) -> list[str]:
    """Which source-free method came closest to Retrained and how often, which did harm, which held back.

    Methods whose distances differ by less than two standard errors of the difference are named as not told apart: the
    reader should not take the order of noise for a result.
    """
    groups = [group for group in total["groups"] if group["rows"]]
    if not groups:
        return ["No run finished, so nothing can be said."]
    judged = [group for group in groups if _distances(group)]
    if judged:
        found = _closest(judged)
    elif any(is_source_free(row) for group in groups for row in mean_rows(group).values()):
        found = ["No distance to Retrained is known, so no method is called closest."]
    else:
        found = ["No source-free method was run."]
    for name, where in _where(groups, is_worse_than_nothing).items():
        found.append(f"Worse than doing nothing: {name}{_count(where, groups)} (distance {_span(where, name)}).")
    for name, where in _where(groups, was_withheld).items():
        found.append(f"Withheld, because it was predicted not to help: {name}{_count(where, groups)}.")
    return found


def _distances(group: Mapping[str, Any]) -> dict[str, float]:
    rows = mean_rows(group)
    return {n: r["distance"] for n, r in rows.items() if is_source_free(r) and fmt.is_number(r.get("distance"))}


def _closest(groups: Groups) -> list[str]:
    wins: dict[str, Groups] = {}
    beaten = []
    for group in groups:
        names = best_rows(mean_rows(group))["distance"]
        if not names:
            beaten.append(group)
            continue
        name = next(method for method in group["rows"] if method in names)
        wins.setdefault(name, []).append(group)
    found = []
    for name, where in sorted(wins.items(), key=lambda item: -len(item[1])):
        found.append(
            f"Closest to Retrained without source data: {name}{_ties(where, name)}{_count(where, groups)}, "
            f"distance {_span(where, name)}{_gap(where, name)}."
        )
    if beaten:
        found.append(f"No source-free method came closer to Retrained than doing nothing{_count(beaten, groups)}.")
    return found


def _ties(groups: Groups, best: str) -> str:
    """The methods that cannot be told from the best, and at how many of its settings where not at all."""
    times = Counter(name for group in groups for name in _not_told_apart(group, best))
    said = [name if n == len(groups) else f"{name} at {n} of them" for name, n in sorted(times.items())]
    return f" (not told apart from {', '.join(said)})" if said else ""


def _not_told_apart(group: Mapping[str, Any], best: str) -> list[str]:
    """Other source-free methods within two standard errors of the best one's mean distance, or shown the same."""
    of_best, found = group["rows"][best]["metrics"]["distance"], []
    for name, mean in _distances(group).items():
        entry = group["rows"][name]["metrics"]["distance"]
        noise = ((of_best["stderr"] or 0.0) ** 2 + (entry["stderr"] or 0.0) ** 2) ** 0.5
        same = fmt.compact(mean) == fmt.compact(of_best["mean"])
        if name != best and mean < NO_CLOSER and (same or mean - of_best["mean"] < 2 * noise):
            found.append(name)
    return found


def _where(groups: Groups, judge: Any) -> dict[str, Groups]:
    found: dict[str, Groups] = {}
    for name in methods_of({"groups": groups}):
        where = [group for group in groups if name in group["rows"] and judge(mean_rows(group)[name])]
        if where:
            found[name] = where
    return found


def _count(part: Groups, whole: Groups) -> str:
    if len(whole) == 1:
        return ""
    if len(whole) == 2:
        return " at both settings" if len(part) == 2 else " at one of two settings"
    return f" at all {len(whole)} settings" if len(part) == len(whole) else f" at {len(part)} of {len(whole)} settings"


def _span(groups: Groups, name: str) -> str:
    means = [group["rows"][name]["metrics"]["distance"]["mean"] for group in groups]
    low, high = fmt.compact(min(means)), fmt.compact(max(means))
    return low if low == high else f"{low} to {high}"


def _gap(groups: Groups, name: str) -> str:
    gaps = [(group["rows"][name]["metrics"].get("test_gap") or {}).get("mean") for group in groups]
    known = [gap for gap in gaps if fmt.is_number(gap)]
    if not known:
        return ""
    low, high = fmt.points(min(known)), fmt.points(max(known))
    return f", test accuracy {low if low == high else f'{low} to {high}'} points from Retrained"
