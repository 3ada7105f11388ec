"""What the numbers say: which method is best at what, which came closest to Retrained, which did harm.

"Best" is decided among source-free methods only (``access: forget``). Methods that may read retained data or stored
statistics, Retrained itself and Original are references, not competitors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sfu.reporting import format as fmt
from sfu.results.aggregate import Group, MethodResult, ResultTable

CRITERIA: Mapping[str, str] = {
    "test_accuracy": "test_gap",
    "remain_accuracy": "remain_gap",
    "forget_accuracy": "forget_gap",
    "mia": "mia_gap",
    "distance": "distance",
}
"""Shown metric -> the metric whose smallest magnitude is best."""


def best_rows(rows: Mapping[str, MethodResult]) -> dict[str, set[str]]:
    """Find the source-free methods that are best by each of ``CRITERIA``; those whose shown values are equal tie.

    None is best if none does at least as well as the untouched head (on distance: better than it).
    """
    best: dict[str, set[str]] = {}
    for metric, criterion in CRITERIA.items():
        scores = {
            name: abs(score)
            for name, row in rows.items()
            if row.is_source_free and (score := row.mean(criterion)) is not None and row.mean(metric) is not None
        }
        if metric == "distance":
            scores = {name: score for name, score in scores.items() if rows[name].is_closer_than_nothing}
        else:
            untouched = [abs(s) for row in rows.values() if row.is_untouched and (s := row.mean(criterion)) is not None]
            scores = {name: score for name, score in scores.items() if score <= min(untouched, default=score)}
        write = fmt.compact if metric == "distance" else fmt.fixed
        least = write(min(scores.values(), default=None))
        best[metric] = {name for name, score in scores.items() if write(score) == least}
    return best


def verdicts(table: ResultTable) -> list[str]:
    """Say which source-free method came closest to Retrained and at how many settings, and which did harm.

    Methods whose distances differ by less than two standard errors of the difference are named as not told apart, so
    that nobody takes an order that is due to noise for a result.
    """
    return [*closest(table), *harm([table])]


def closest(table: ResultTable) -> list[str]:
    """Say which source-free method came closest to Retrained, or why nobody knows."""
    groups = [group for group in table.groups if group.rows]
    if not groups:
        return ["No source-free method was run." if table.n_runs > len(table.failed) else "No run finished."]
    return _closest(groups)


def harm(tables: Sequence[ResultTable]) -> list[str]:
    """Say which methods did harm and which steps were not applied, a sentence each over all settings of all tables."""
    groups = [group for table in tables for group in table.groups if group.rows]
    found = []
    for says, flag in (
        ("Worse than doing nothing", "is_worse_than_nothing"), ("Step not applied, or not in full", "is_withheld"),
    ):  # fmt: skip
        named = []
        for name in dict.fromkeys(name for table in tables for name in table.methods):
            if at := [group for group in groups if name in group.rows and getattr(group.rows[name], flag)]:
                span = fmt.span([group.entry(name, "distance").mean for group in at], fmt.compact)
                named.append(f"{name}{_count(at, groups)}" + (f" (distance {span})" if span else ""))
        if named:
            found.append(f"{says}: {', '.join(named)}.")
    return found


def _closest(groups: Sequence[Group]) -> list[str]:
    if not any(_source_free(group) for group in groups):
        return ["No source-free method was run."]
    known = [group for group in groups if _scores(group, "distance")]
    if not known:
        return _closest_by_accuracy(groups)
    beaten = [group for group in known if not _helped(group)]
    found = [
        f"Closest to Retrained without source data: {name}{_ties(at, name)}{_count(at, known)}, {_how_close(at, name)}."
        for name, at in _winners(list(filter(_helped, known)), "distance")
    ]
    if beaten:
        at = min(beaten, key=lambda group: min(_scores(group, "distance").values()))
        nearest = _nearest(at, "distance")
        found.append(
            f"No source-free method came closer to Retrained than doing nothing (distance 1){_count(beaten, known)}. "
            f"The nearest is {nearest}: {_how_close([at], nearest)}."
        )
    return found


def _closest_by_accuracy(groups: Sequence[Group]) -> list[str]:
    if known := [group for group in groups if _scores(group, "test_gap")]:
        lead = "Closest to Retrained in test accuracy without source data"
        return [f"{lead}: {n}{_count(at, known)}, {_accuracy(at, n)}." for n, at in _winners(known, "test_gap")]
    if not any("retrained" in group.rows for group in groups):
        return ["There is no retrained row, so gaps and distances are unknown. Add `retrained` to `methods`."]
    return ["No gap or distance to Retrained is known for the source-free methods."]


def _source_free(group: Group) -> dict[str, MethodResult]:
    return {name: row for name, row in group.rows.items() if row.is_source_free}


def _helped(group: Group) -> bool:
    return any(row.is_closer_than_nothing for row in _source_free(group).values())


def _scores(group: Group, metric: str) -> dict[str, float]:
    """The magnitude of a metric of each source-free method that has it."""
    return {name: abs(m) for name, row in _source_free(group).items() if (m := row.mean(metric)) is not None}


def _winners(groups: Sequence[Group], metric: str) -> list[tuple[str, list[Group]]]:
    """Each method that is nearest somewhere, with its groups; the one with most of them first."""
    wins: dict[str, list[Group]] = {}
    for group in groups:
        wins.setdefault(_nearest(group, metric), []).append(group)
    return sorted(wins.items(), key=lambda item: -len(item[1]))


def _nearest(group: Group, metric: str) -> str:
    scores = _scores(group, metric)
    return min(scores, key=scores.__getitem__)


def _ties(groups: Sequence[Group], best: str) -> str:
    """The methods that cannot be told apart from the best one, and at how many of its settings if not at all."""
    times = Counter(name for group in groups for name in _not_told_apart(group, best))
    named = [name if n == len(groups) else f"{name} at {n} of them" for name, n in sorted(times.items())]
    return f" (not told apart from {', '.join(named)})" if named else ""


def _not_told_apart(group: Group, best: str) -> list[str]:
    """Other source-free methods within two standard errors of the best one's mean distance, or shown the same."""
    of_best, least = group.rows[best]["distance"], _scores(group, "distance")[best]
    found = []
    for name, mean in _scores(group, "distance").items():
        noise = ((of_best.stderr or 0.0) ** 2 + (group.rows[name]["distance"].stderr or 0.0) ** 2) ** 0.5
        alike = fmt.compact(mean) == fmt.compact(least) or mean - least < 2 * noise
        if name != best and alike and group.rows[name].is_closer_than_nothing:
            found.append(name)
    return found


def _count(part: Sequence[Group], whole: Sequence[Group]) -> str:
    if len(whole) == 1:
        return ""
    if len(whole) == 2:
        return " at both settings" if len(part) == 2 else " at one of two settings"
    return f" at all {len(whole)} settings" if len(part) == len(whole) else f" at {len(part)} of {len(whole)} settings"


def _how_close(groups: Sequence[Group], name: str) -> str:
    """``distance 0.305 (70 % of the gap closed), test accuracy 73.6 % (-0.1 points from Retrained)``."""
    distances = [group.rows[name].mean("distance") for group in groups]
    found = f"distance {fmt.span(distances, fmt.compact)}"
    if all(group.rows[name].is_closer_than_nothing for group in groups):
        closed = fmt.span([1 - distance for distance in distances if distance is not None], _share)
        found += f" ({closed} of the gap closed)"
    accuracy = _accuracy(groups, name)
    return f"{found}, {accuracy}" if accuracy else found


def _share(closed: float) -> str:
    if 1 - closed < fmt.ZERO:
        return "all"
    return f"{100 * closed:.{0 if 1 - closed > 0.01 else 2}f} %"


def _accuracy(groups: Sequence[Group], name: str) -> str:
    span = fmt.span([group.rows[name].mean("test_accuracy") for group in groups], fmt.fixed)
    if not span:
        return ""
    gaps = fmt.span([group.rows[name].mean("test_gap") for group in groups], fmt.points)
    return f"test accuracy {span} %" + (f" ({gaps} points from Retrained)" if gaps else "")
