"""The attacks of a table in cells: the area under each ROC curve, read against one half and against Retrained."""

from __future__ import annotations

from typing import Any

from sfu.reporting import format as fmt
from sfu.results.aggregate import Group, MethodResult, ResultTable
from sfu.results.statistic import Statistic

PAPER = "paper"
TITLE = "Membership attacks: area under the ROC curve"
FOUND = "≠"
READING = (
    "0.5: forgotten rows look like rows that were never seen. Compare with retrained. "
    f"{FOUND}: the 95 % interval leaves out 0.5."
)


def attacks_of(table: ResultTable) -> list[str]:
    """Return the attacks to show: none if there are none besides the paper's, whose accuracy is in the main table."""
    found = list(dict.fromkeys(name for row in table.results for name in row.attacks))
    return found if any(name != PAPER for name in found) else []


def attack_cells(table: ResultTable, group: Group, plus_minus: str = "±") -> list[tuple[str, list[str]]]:
    """Return each method of a group with a cell for each attack: ``0.633 ± 0.004 ≠``, or ``-``."""
    names = attacks_of(table)
    return [(method, [_cell(table, row, name, plus_minus) for name in names]) for method, row in group.rows.items()]


def _cell(table: ResultTable, row: MethodResult, name: str, plus_minus: str) -> str:
    figures = row.attacks.get(name, {})
    area = figures.get("auc", Statistic())
    text = fmt.spread(area.mean, table.spread_of(area), _area, plus_minus)
    own = [figures.get(f"auc_interval.{end}", Statistic()).mean for end in ("low", "high")]
    low, high = own if area.interval is None else area.interval
    return f"{text} {FOUND}" if _leaves_out_half(low, high) else text


def _leaves_out_half(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and not low <= 0.5 <= high


def _area(value: Any) -> str:
    return fmt.fixed(value, 3)
