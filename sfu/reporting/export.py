"""The result of one run as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from sfu.reporting import format as fmt
from sfu.reporting.columns import COLUMNS, Metrics, flatten, rows_of, scalar_keys
from sfu.reporting.heading import headline, machine_line
from sfu.reporting.verdict import best_rows, is_worse_than_nothing, notes, verdict, worse_sentence


def escape_cell(value: str) -> str:
    """Text that cannot break a Markdown table: pipes escaped, one line."""
    return " ".join(value.replace("\\", "\\\\").replace("|", "\\|").split())


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column left and the others right aligned."""
    lines = [f"| {' | '.join(header)} |", f"|:---|{'---:|' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def csv_cell(value: Any) -> str:
    """A value at full precision; empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def csv_rows(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A CSV document with ``\\n`` line ends."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def markdown_table(metrics: Metrics) -> str:
    """Every metric of every method as a Markdown table, with headline, verdict and notes.

    The best source-free values are bold; a distance worse than doing nothing carries ``!``.

    Args:
        metrics: The content of metrics.json.
    """
    rows = rows_of(metrics)
    best = best_rows(rows)
    present = [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows.values())]
    body = []
    for name, row in rows.items():
        cells = [escape_cell(name)]
        for column in present:
            value = column.write(row.get(column.key)) or fmt.MISSING
            if name in best.get(column.key, ()):
                value = f"**{value}**"
            if column.key == "distance" and is_worse_than_nothing(row):
                value = f"{value.strip('*')} !"
            cells.append(escape_cell(value))
        body.append(cells)
    parts = [f"**{escape_cell(headline(metrics))}**"]
    if machine := machine_line(metrics):
        parts.append(machine)
    parts.append(markdown_rows(["Method", *(column.heading for column in present)], body))
    parts.append(
        "Gaps are percentage points from Retrained. Distance: 0 = Retrained, 1 = nothing done. "
        "**Bold**: best among the methods without source data. `!`: worse than doing nothing."
    )
    parts.append(verdict(metrics))
    if worse := worse_sentence(metrics):
        parts.append(worse)
    parts += [f"- `{name}`: {escape_cell(note)}" for name, note in notes(metrics)]
    return "\n\n".join(parts) + "\n"


def csv_table(metrics: Metrics) -> str:
    """One line a method, every scalar at full precision; a row's details as ``details.<key>``.

    Args:
        metrics: The content of metrics.json.
    """
    rows = rows_of(metrics)
    keys = scalar_keys(rows.values())
    flat = {name: flatten(row) for name, row in rows.items()}
    return csv_rows(["method", *keys], [[name, *(flat[name].get(key) for key in keys)] for name in rows])
