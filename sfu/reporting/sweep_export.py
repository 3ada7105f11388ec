"""The result of a sweep as Markdown, as CSV and as a LaTeX table (booktabs)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import mean_rows, spread_of
from sfu.reporting.columns import COLUMNS
from sfu.reporting.export import csv_rows, escape_cell, markdown_rows
from sfu.reporting.sweep_words import Aggregate, failures, gaps_in_data, headline, setting_of
from sfu.reporting.verdict import best_rows, is_tuned_on_retrained, is_worse_than_nothing

PAPER_COLUMNS = ("test_accuracy", "remain_accuracy", "forget_accuracy", "mia", "distance")
"""What a printed table shows: the paper's four columns and the distance."""

_KINDS = {
    **dict.fromkeys(("test_accuracy", "remain_accuracy", "forget_accuracy", "mia", "mia_std", "agreement"), "percent"),
    **dict.fromkeys(("test_gap", "remain_gap", "forget_gap", "mia_gap"), "points"),
}
CSV_LEAD = ("method", "access", "tuning", "n", "n_applied")
_CSV_PARTS = ("mean", "std", "stderr", "n")
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


@dataclass(frozen=True)
class SweepCell:
    """One metric of one method at one setting.

    Attributes:
        text: ``73.7 ± 0.1``, or ``-``.
        n: Runs that have the metric, where fewer than the method has; else None.
        best: Best among the source-free methods of its setting.
        worse: A distance beyond that of the untouched head.
    """

    text: str
    n: int | None = None
    best: bool = False
    worse: bool = False


def cells_of(
    total: Aggregate, group: Mapping[str, Any], keys: Sequence[str]
) -> Iterator[tuple[str, Mapping[str, Any], list[SweepCell]]]:
    """Each method of a group: its name, its aggregated row, and its cells in the order of ``keys``."""
    means = mean_rows(group)
    best = best_rows(means)
    for name, row in group["rows"].items():
        cells = []
        for key in keys:
            entry = row["metrics"].get(key) or {}
            text = fmt.spread(entry.get("mean"), spread_of(total, entry), _KINDS.get(key, "compact"))
            fewer = entry["n"] if entry.get("n") and entry["n"] != row["n"] else None
            worse = key == "distance" and is_worse_than_nothing(means[name])
            cells.append(SweepCell(text, fewer, not worse and name in best.get(key, ()), worse))
        yield name, row, cells


def marked(name: str, row: Mapping[str, Any]) -> str:
    """The name of a row, which says so if its settings were chosen with Retrained in hand."""
    return f"{name} ({row['tuning']})" if is_tuned_on_retrained(row) else name


def metric_keys(total: Aggregate, among: Sequence[str] | None = None) -> list[str]:
    """Metrics that some row has at least one value of: the known ones in order, then any others; or those ``among``."""
    found = dict.fromkeys(
        key
        for group in total["groups"]
        for row in group["rows"].values()
        for key, entry in row["metrics"].items()
        if entry["n"]
    )
    known = [column.key for column in COLUMNS if column.key in found]
    keys = known + [key for key in found if key not in known]
    return keys if among is None else [key for key in keys if key in among]


def heading_of(key: str) -> str:
    """The heading of a metric's column, with its unit."""
    return next((column.heading for column in COLUMNS if column.key == key), key)


def markdown_sweep_table(total: Aggregate) -> str:
    """Every metric of every setting and method as a Markdown table of ``mean ± spread``.

    Args:
        total: What ``aggregate`` returned.
    """
    keys = metric_keys(total)
    body = []
    for group in total["groups"]:
        for name, row, cells in cells_of(total, group, keys):
            shown = [*group["overrides"].values(), marked(name, row), str(row["n"])]
            for cell in cells:
                value = f"{cell.text} !" if cell.worse else f"**{cell.text}**" if cell.best else cell.text
                shown.append(value + (f" (n={cell.n})" if cell.n else ""))
            body.append([escape_cell(value) for value in shown])
    header = [*map(escape_cell, total["varied"]), "Method", "n", *map(heading_of, keys)]
    parts = [f"**{escape_cell(headline(total))}**", markdown_rows(header, body)]
    parts.append(
        "Gaps are percentage points from Retrained. Distance: 0 = Retrained, 1 = nothing done. "
        "**Bold**: best among the methods without source data at this setting. `!`: worse than doing nothing."
    )
    for title, lines in (("Averaged over fewer runs:", gaps_in_data(total)), ("Failed jobs:", failures(total))):
        if lines:
            parts.append("\n".join([title, "", *(f"- {escape_cell(line)}" for line in lines)]))
    return "\n\n".join(parts) + "\n"


def sweep_records(total: Aggregate) -> list[dict[str, Any]]:
    """One record for each setting and method: its settings, ``method`` ..., then ``<metric>.mean``, ``.std`` ..."""
    keys = metric_keys(total)
    records = []
    for group in total["groups"]:
        for name, row in group["rows"].items():
            record = {**group["overrides"], "method": name, "access": row["access"], "tuning": row["tuning"]}
            record |= {"n": row["n"], "n_applied": row["n_applied"]}
            for key in keys:
                entry = row["metrics"].get(key) or {"n": 0}
                record |= {f"{key}.{part}": entry.get(part) for part in _CSV_PARTS}
            records.append(record)
    return records


def csv_sweep_table(total: Aggregate) -> str:
    """One line for each setting and method: ``<metric>.mean``, ``.std``, ``.stderr`` and ``.n`` at full precision.

    Args:
        total: What ``aggregate`` returned.
    """
    metrics = [f"{key}.{part}" for key in metric_keys(total) for part in _CSV_PARTS]
    header = [*total["varied"], *CSV_LEAD, *metrics]
    return csv_rows(header, [[record.get(key) for key in header] for record in sweep_records(total)])


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it stands."""
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def latex_sweep_table(total: Aggregate) -> str:
    r"""The paper's columns and the distance as a ``tabular`` for ``\usepackage{booktabs}``.

    A line in italics names each setting. Best source-free values are bold, distances worse than doing nothing carry a
    dagger; accuracies and the attack are per cent.

    Args:
        total: What ``aggregate`` returned.
    """
    keys = metric_keys(total, PAPER_COLUMNS)
    header = ["Method", *(escape_latex(heading_of(key).removesuffix(" %")) for key in keys)]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(keys)}}}", r"\toprule", " & ".join(header) + r" \\"]
    for group in total["groups"]:
        lines.append(r"\midrule")
        if setting := setting_of(group):
            lines.append(rf"\multicolumn{{{len(header)}}}{{l}}{{\emph{{{escape_latex(setting)}}}}} \\")
        for name, row, cells in cells_of(total, group, keys):
            lines.append(" & ".join([escape_latex(marked(name, row)), *map(_latex_cell, cells)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    notes = [headline(total), *(f"averaged over fewer runs: {line}" for line in gaps_in_data(total))]
    notes += [f"failed: {line}" for line in failures(total)]
    return "".join(f"% {' '.join(note.split())}\n" for note in notes) + "\n".join(lines) + "\n"


def _latex_cell(cell: SweepCell) -> str:
    if cell.text == fmt.MISSING:
        return "--"
    value = re.sub(r"(\d)e(-?\d+)", r"\1 \\times 10^{\2}", cell.text.replace("±", r"\pm"))
    value = rf"$\mathbf{{{value}}}$" if cell.best else f"${value}$"
    return value + (r"$^\dagger$" if cell.worse else "") + (f" ({cell.n})" if cell.n else "")
