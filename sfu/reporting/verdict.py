"""What the numbers say: which method is best at what, which came closest to Retrained, which did harm.

"Best" is decided among source-free methods only (``access: forget``). Methods that may read retained data or stored
statistics, Retrained itself and Original are references, not competitors. Every comparison follows
:class:`sfu.results.statistic.Relation`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from sfu.reporting import format as fmt
from sfu.results.aggregate import Group, MethodResult, ResultTable
from sfu.results.statistic import MARGINS, Relation, relation

_FEWEST_RANKED = 4
CRITERIA: Mapping[str, str] = {
    "test_accuracy": "test_gap",
    "remain_accuracy": "remain_gap",
    "forget_accuracy": "forget_gap",
    "mia": "mia_gap",
    "distance": "distance",
}
"""Shown metric -> the metric whose magnitude, averaged over the runs, is compared."""


def compared(first: MethodResult, second: MethodResult, metric: str) -> Relation | None:
    """Say whether the first is nearer to Retrained in a metric of ``CRITERIA``, over the runs that have both."""
    pairs = zip(first[CRITERIA[metric]].values, second[CRITERIA[metric]].values, strict=True)
    return relation((abs(a) - abs(b) for a, b in pairs if a is not None and b is not None), MARGINS[metric])


def best_rows(rows: Mapping[str, MethodResult]) -> dict[str, set[str]]:
    """Find the source-free methods that are best by each of ``CRITERIA``: the nearest and all that are equal to it.

    Only a method that changed the head and came nearer than the untouched head can be best, so there may be none.
    """
    best: dict[str, set[str]] = {}
    for metric in CRITERIA:
        scores = _scores({name: row for name, row in rows.items() if _beats_nothing(rows, row, metric)}, metric)
        if scores:
            first = min(scores, key=scores.__getitem__)
            alike = {name for name in scores if compared(rows[name], rows[first], metric) is Relation.equal}
            best[metric] = {first} | alike
        else:
            best[metric] = set()
    return best


def _beats_nothing(rows: Mapping[str, MethodResult], row: MethodResult, metric: str) -> bool:
    if row.is_withheld or row.mean(metric) is None:
        return False
    if metric == "distance":
        return row.is_closer_than_nothing
    relations = [compared(row, other, metric) for other in rows.values() if other.is_untouched]
    return all(found in (Relation.better, None) for found in relations)


def verdicts(table: ResultTable) -> list[str]:
    """Say which source-free method came closest to Retrained and at how many settings, and which did harm.

    Methods that are equal to the closest, or that the runs do not tell apart from it, are named, so that nobody takes
    an order that is due to noise for a result.
    """
    return [*closest(table), *ranked(table), *harm([table])]


def ranked(table: ResultTable) -> list[str]:
    """Say how the methods rank by distance, and how sure that is; nothing if there are few methods or runs."""
    ranks = table.ranks
    if len(ranks) < _FEWEST_RANKED:
        return []
    shown = []
    for name, rank in ranks.items():
        low, high = fmt.fixed(rank.low), fmt.fixed(rank.high)
        first = f" (first in {100 * rank.best:.0f} % of draws)" if 0.005 < rank.best < 0.995 else ""
        shown.append(f"{name} {fmt.fixed(rank.mean)}" + ("" if low == high else f" [{low}, {high}]") + first)
    settings = sum(bool(group.rows) for group in table.groups)
    over = f", mean over {settings} settings" if settings > 1 else ""
    return [f"Ranks by distance{over} [95 % over seeds]: {', '.join(shown)}."]


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
    known = [group for group in groups if _scores(group.rows, "distance")]
    if not known:
        return _closest_by_accuracy(groups)
    beaten = [group for group in known if not _helped(group)]
    found = [
        f"Closest to Retrained without source data: {name}{_ties(at, name)}{_count(at, known)}, {_how_close(at, name)}."
        for name, at in _winners(list(filter(_helped, known)), "distance")
    ]
    if beaten:
        at = min(beaten, key=lambda group: min(_scores(group.rows, "distance").values()))
        nearest = _nearest(at, "distance")
        found.append(
            f"No source-free method {_was_shown(beaten)} closer to Retrained than doing nothing (distance 1)"
            f"{_count(beaten, known)}. "
            f"The nearest is {nearest}: {_how_close([at], nearest)}."
        )
    return found


def _closest_by_accuracy(groups: Sequence[Group]) -> list[str]:
    if known := [group for group in groups if _scores(group.rows, "test_accuracy")]:
        lead = "Closest to Retrained in test accuracy without source data"
        return [f"{lead}: {n}{_count(at, known)}, {_accuracy(at, n)}." for n, at in _winners(known, "test_accuracy")]
    if not any("retrained" in group.rows for group in groups):
        return ["There is no retrained row, so gaps and distances are unknown. Add `retrained` to `methods`."]
    return ["No gap or distance to Retrained is known for the source-free methods."]


def _source_free(group: Group) -> dict[str, MethodResult]:
    return {name: row for name, row in group.rows.items() if row.is_source_free}


def _helped(group: Group) -> bool:
    return any(row.is_closer_than_nothing for row in _source_free(group).values())


def _was_shown(groups: Sequence[Group]) -> str:
    return "came" if all(group.n == 1 for group in groups) else "was shown to come"


def _scores(rows: Mapping[str, MethodResult], metric: str) -> dict[str, float]:
    """The mean magnitude of what is compared, of each source-free method that has it."""
    found = {}
    for name, row in rows.items():
        values = [abs(value) for value in row[CRITERIA[metric]].values if value is not None]
        if row.is_source_free and values:
            found[name] = statistics.fmean(values)
    return found


def _winners(groups: Sequence[Group], metric: str) -> list[tuple[str, list[Group]]]:
    """Each method that is nearest somewhere, with its groups; the one with most of them first."""
    wins: dict[str, list[Group]] = {}
    for group in groups:
        wins.setdefault(_nearest(group, metric), []).append(group)
    return sorted(wins.items(), key=lambda item: -len(item[1]))


def _nearest(group: Group, metric: str) -> str:
    """The nearest of the methods that helped, or of all if none did."""
    helped = {name: row for name, row in group.rows.items() if row.is_closer_than_nothing}
    scores = _scores(helped, metric) or _scores(group.rows, metric)
    return min(scores, key=scores.__getitem__)


def _ties(groups: Sequence[Group], best: str) -> str:
    """The methods that are equal to the best one or not told apart from it, and at how many of its settings."""
    found = []
    for says, wanted in (
        (f"equal within {MARGINS['distance']:g}", Relation.equal),
        ("not told apart", Relation.unclear),
    ):
        times = Counter(
            name
            for group in groups
            for name, row in _source_free(group).items()
            if name != best and row.is_closer_than_nothing and compared(row, group.rows[best], "distance") is wanted
        )
        named = [name if n == len(groups) else f"{name} at {n} of them" for name, n in sorted(times.items())]
        if named:
            found.append(f"{says}: {', '.join(named)}")
    return f" ({'; '.join(found)})" if found else ""


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
