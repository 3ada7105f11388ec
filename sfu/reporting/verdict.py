"""What the numbers say: which source-free row is best at what, which rows are worse than doing nothing, the verdict.

"Best" is decided among source-free rows only (``access: forget``); a row that may read retained data or stored
statistics, Retrained itself and Original are references, not competitors.
"""

from __future__ import annotations

from collections.abc import Mapping

from sfu.reporting import format as fmt
from sfu.reporting.columns import Metrics, Row, rows_of

RETRAINED = "retrained"
WORSE_THAN_NOTHING = 1.0 + 1e-6
"""Distances above this are worse than doing nothing; the slack is for rounding of an exact 1."""
NO_CLOSER = 1.0 - 1e-6
"""Distances from here on are no better than doing nothing."""

CRITERIA: Mapping[str, str] = {
    "test_accuracy": "test_gap",
    "remain_accuracy": "remain_gap",
    "forget_accuracy": "forget_gap",
    "mia": "mia_gap",
    "distance": "distance",
}
"""Shown metric -> the metric whose smallest magnitude is best."""


def is_source_free(row: Row) -> bool:
    """True if the method, and who chose its settings, saw the head and the forget set only."""
    return row.get("access") == "forget" and not is_tuned_on_retrained(row)


def is_tuned_on_retrained(row: Row) -> bool:
    """True if its settings were chosen by the distance to Retrained: an upper bound, not source-free."""
    return str(row.get("tuning") or "").startswith("oracle")


def sees_retained(row: Row) -> bool:
    """True if the method may read retained data."""
    return row.get("access") == "retained"


def sees_stored(row: Row) -> bool:
    """True if the method may use statistics stored with the head at training time."""
    return row.get("access") == "stored"


def is_worse_than_nothing(row: Row) -> bool:
    """True if the row ended further from Retrained than the untouched head."""
    distance = row.get("distance")
    return row.get("access") != "none" and fmt.is_number(distance) and distance > WORSE_THAN_NOTHING


def was_withheld(row: Row) -> bool:
    """True if a step was computed but not applied."""
    return row.get("applied") is False and row.get("access") != "none"


def _shown(metric: str, value: float) -> str:
    return fmt.compact(abs(value)) if metric == "distance" else fmt.fixed(abs(value))


def _is_untouched(row: Row, criterion: str) -> bool:
    return row.get("access") == "none" and fmt.is_number(row.get(criterion))


def best_rows(rows: Mapping[str, Row]) -> dict[str, set[str]]:
    """For each criterion, the source-free rows that are best; rows whose shown values are equal tie.

    Returns:
        Metric name (a key of ``CRITERIA``) -> names of the best rows; empty where no row has a value, and for
        a metric on which none does at least as well as the untouched head.
    """
    best: dict[str, set[str]] = {}
    for metric, criterion in CRITERIA.items():
        scores = {
            name: abs(row[criterion])
            for name, row in rows.items()
            if is_source_free(row) and fmt.is_number(row.get(criterion)) and fmt.is_number(row.get(metric))
        }
        untouched = min((abs(r[criterion]) for r in rows.values() if _is_untouched(r, criterion)), default=None)
        if untouched is not None and metric != "distance":  # no prize for ending further off than the untouched head
            scores = {name: score for name, score in scores.items() if score <= untouched}
        if metric == "distance":  # no prize for a row that is no closer than the untouched head
            scores = {name: score for name, score in scores.items() if score < NO_CLOSER}
        least = _shown(metric, min(scores.values())) if scores else ""
        best[metric] = {name for name, score in scores.items() if _shown(metric, score) == least}
    return best


def _accuracy_phrase(row: Row) -> str:
    if not fmt.is_number(row.get("test_accuracy")):
        return ""
    phrase = f"test accuracy {fmt.fixed(row['test_accuracy'])} %"
    gap = fmt.points(row.get("test_gap"))
    return f"{phrase} ({gap} points from Retrained)" if gap else phrase


def _closest(rows: Mapping[str, Row], key: str) -> str | None:
    scores = {name: abs(row[key]) for name, row in rows.items() if fmt.is_number(row.get(key))}
    return min(scores, key=lambda name: scores[name]) if scores else None


def verdict(metrics: Metrics) -> str:
    """One sentence: which source-free row came closest to Retrained, and how close in distance and accuracy."""
    rows = rows_of(metrics)
    candidates = {name: row for name, row in rows.items() if is_source_free(row)}
    if not candidates:
        return "No source-free method in this run."
    name = _closest(candidates, "distance")
    if name is not None:
        row = candidates[name]
        distance = row["distance"]
        accuracy = _accuracy_phrase(row)
        tail = f", {accuracy}." if accuracy else "."
        if distance >= NO_CLOSER:
            return (
                f"No source-free method came closer to Retrained than doing nothing (distance 1); "
                f"the nearest is {name}: distance {fmt.compact(distance)}{tail}"
            )
        share = "all" if distance < fmt.ZERO else f"{100 * (1 - distance):.{0 if distance > 0.01 else 2}f} %"
        return (
            f"Closest to Retrained without source data: {name}, distance {fmt.compact(distance)} "
            f"({share} of the gap closed){tail}"
        )
    name = _closest(candidates, "test_gap")
    if name is not None:
        phrase = _accuracy_phrase(candidates[name])
        return f"Closest to Retrained without source data: {name}" + (f", {phrase}" if phrase else "") + "."
    if RETRAINED not in rows:
        return "No retrained row in this run, so no gap or distance: add `retrained` to `methods` to have them."
    return "No gap or distance to Retrained is known for the source-free methods."


def worse_sentence(metrics: Metrics) -> str | None:
    """Names the rows that ended further from Retrained than the untouched head, or None."""
    worse = [
        f"{name} (distance {fmt.compact(row['distance'])})"
        for name, row in rows_of(metrics).items()
        if is_worse_than_nothing(row)
    ]
    return f"Worse than doing nothing: {', '.join(worse)}." if worse else None


def notes(metrics: Metrics) -> list[tuple[str, str]]:
    """Each row's note as (method, text); a step withheld without a note gets a plain one."""
    found = []
    for name, row in rows_of(metrics).items():
        note = str(row.get("note") or "").strip()
        if not note and was_withheld(row):
            note = "the step was computed but not applied"
        if note:
            found.append((name, note))
    return found
