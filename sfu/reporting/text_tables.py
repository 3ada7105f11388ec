"""Results as Markdown, CSV and LaTeX (booktabs): the same renderers for a run, a sweep and a section of a report."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from sfu.names import visible
from sfu.reporting import format as fmt
from sfu.reporting import words
from sfu.reporting.attacks import READING, TITLE, attack_cells, attacks_of
from sfu.reporting.columns import (
    DIFFERENCES,
    DIFFERENT,
    PRINTED,
    ResultCell,
    cells_of,
    column_of,
    compared_rows,
    difference_cells,
    metrics_in,
    tidy_table,
)
from sfu.reporting.verdict import verdicts
from sfu.results.aggregate import Group, ResultTable, number_of, table_of_run
from sfu.results.rows import Metrics

CSV_LEAD = ("method", "access", "tuning", "n", "n_applied")
_STATISTICS = ("mean", "std", "stderr", "low", "high", "n")
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What begins a formula in a spreadsheet: the last four are the same characters at full width."""
_MARKDOWN = str.maketrans({"\\": r"\\", "|": r"\|", "<": "&lt;", "&": "&amp;"})
_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}", "*": "{*}",  # after a line end, these two would be its options
})  # fmt: skip


def escape_cell(value: str) -> str:
    """Return text that Markdown shows as it stands, in one line: no cell ends, no HTML, no link or picture."""
    return visible(" ".join(value.split())).translate(_MARKDOWN).replace("](", "]\\(")


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, the first column left and the others right aligned."""
    lines = [f"| {' | '.join(map(escape_cell, header))} |", f"|:---|{'---:|' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(map(escape_cell, row))} |" for row in rows]
    return "\n".join(lines)


def markdown_list(title: str, lines: Sequence[str]) -> list[str]:
    """Return a titled list as one paragraph, or nothing if it is empty."""
    return ["\n".join([title, "", *(f"- {escape_cell(line)}" for line in lines)])] if lines else []


def csv_rows(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    r"""Return a CSV document at full precision, with ``\n`` line ends; a missing value is an empty cell.

    Text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows(map(_csv_cell, row) for row in (header, *rows))
    return buffer.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return value
    shown = visible(value, keep="\n")
    return f"'{shown}" if shown.startswith(_FORMULA) and number_of(shown) is None else shown


def markdown_table(table: ResultTable, title: str | None = None) -> str:
    """Return every metric of every setting and method as Markdown, with what failed and what is missing.

    The best source-free values are bold; a distance worse than doing nothing carries ``!``. Without a ``title``, the
    first line says how many runs there are.
    """
    keys, several = metrics_in(table), table.n_runs > 1
    tuned = any(row.tuning for row in table.results)
    body = []
    for group in table.groups:
        for name, row, cells in cells_of(table, group, keys):
            line = [*group.overrides.values(), words.marked(name, row), *([str(row.n)] if several else [])]
            for cell in cells:
                value = f"{cell.text} !" if cell.worse else f"**{cell.text}**" if cell.best else cell.text
                line.append(value + (f" (n={cell.n})" if cell.n else ""))
            applied = f"{row.n_applied} of {row.n}" if several else fmt.MISSING
            applied = "yes" if row.n_applied == row.n else "no" if row.n_applied == 0 else applied
            body.append([*line, row.access or fmt.MISSING, *([row.tuning or fmt.MISSING] if tuned else []), applied])
    labels = ["Data seen", *(["Settings"] if tuned else []), "Applied"]
    header = [*table.varied, "Method", *(["n"] if several else []), *(column_of(key).heading for key in keys), *labels]
    parts = [f"**{escape_cell(title or words.headline(table))}**", markdown_rows(header, body)]
    best = f"**Bold**: best among the methods without source data{' at this setting' if table.varied else ''}."
    parts.append(f"{words.SIGNED} {words.SCALE} {best} `!`: worse than doing nothing.")
    parts += _markdown_differences(table) or ([words.ONE_RUN] if table.n_runs == 1 else [])
    parts += _markdown_attacks(table)
    parts += markdown_list("Averaged over fewer runs:", words.gaps_in_data(table))
    parts += markdown_list("Failed:", words.failures(table))
    parts += map(escape_cell, words.unenforced(table))
    return "\n\n".join(parts) + "\n"


def _markdown_differences(table: ResultTable) -> list[str]:
    """The paired differences from Retrained of a table over several runs."""
    body = [
        [
            *group.overrides.values(),
            words.marked(name, row),
            *(" ".join(cell) for cell in difference_cells(row).values()),
        ]
        for group in table.groups
        for name, row in compared_rows(group).items()
    ]
    header = [*table.varied, "Method", *(column_of(key).heading for key in DIFFERENCES)]
    return (
        ["**Differences from Retrained**", markdown_rows(header, body), escape_cell(words.DIFFERENCE)] if body else []
    )


def _markdown_attacks(table: ResultTable) -> list[str]:
    """The areas of all attacks, if there are attacks besides the paper's."""
    names = attacks_of(table)
    body = [
        [*group.overrides.values(), words.marked(name, group.rows[name]), *cells]
        for group in table.groups
        for name, cells in attack_cells(table, group)
    ]
    header = [*table.varied, "Method", *names]
    return [f"**{TITLE}**", markdown_rows(header, body), READING] if names else []


def run_markdown(metrics: Metrics) -> str:
    """Return a run as Markdown: headline, table, verdict and notes."""
    table = table_of_run(metrics)
    title = ", ".join(part for part in (words.run_headline(metrics), words.machine_line(metrics)) if part)
    notes = [f"- {escape_cell(name)}: {escape_cell(note)}" for name, _, note in words.remarks(table)]
    return "\n\n".join([markdown_table(table, title).rstrip(), *map(escape_cell, verdicts(table)), *notes]) + "\n"


def run_csv(metrics: Metrics) -> str:
    """Return a run as CSV: a line a method, every scalar at full precision, a row's details as ``details.<key>``."""
    return csv_rows(*tidy_table(metrics))


def csv_records(table: ResultTable) -> list[dict[str, Any]]:
    """Return a record for each setting and method: its settings, ``CSV_LEAD``, then ``<metric>.mean``, ``.std`` ..."""
    keys = metrics_in(table)
    return [
        {
            **group.overrides,
            **dict(zip(CSV_LEAD, (name, row.access, row.tuning, row.n, row.n_applied), strict=True)),
            **{f"{key}.{part}": getattr(row[key], part) for key in keys for part in _STATISTICS},
        }
        for group in table.groups
        for name, row in group.rows.items()
    ]


def csv_table(table: ResultTable) -> str:
    """Return a line for each setting and method, with all of ``_STATISTICS`` of every metric."""
    metrics = [f"{key}.{part}" for key in metrics_in(table) for part in _STATISTICS]
    header = [*table.varied, *CSV_LEAD, *metrics]
    return csv_rows(header, [[record[key] for key in header] for record in csv_records(table)])


def escape_latex(text: str) -> str:
    """Return text that LaTeX prints as it stands."""
    return visible(" ".join(text.split())).translate(_LATEX)


def latex_comment(text: str) -> str:
    """Return text as a line that LaTeX ignores."""
    return f"% {visible(' '.join(text.split()))}\n"


def latex_table(table: ResultTable) -> str:
    r"""Return the paper's columns and the distance as a ``tabular`` for ``\usepackage{booktabs}``.

    A line in italics names each setting. Best source-free values are bold, distances worse than doing nothing carry a
    dagger; accuracies and the attack are per cent.
    """
    keys = metrics_in(table, PRINTED)
    header = ["Method", *(escape_latex(column_of(key).heading.removesuffix(" %")) for key in keys)]
    lines = [rf"\begin{{tabular}}{{l{'r' * len(keys)}}}", r"\toprule", " & ".join(header) + r" \\"]
    for group in table.groups:
        lines += [r"\midrule", *_latex_setting(group, len(header))]
        for name, row, cells in cells_of(table, group, keys):
            lines.append(" & ".join([escape_latex(words.marked(name, row)), *map(_latex_cell, cells)]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", *_latex_differences(table)]
    comments = [words.headline(table), *(f"averaged over fewer runs: {line}" for line in words.gaps_in_data(table))]
    comments += [*(f"failed: {line}" for line in words.failures(table)), *words.unenforced(table)]
    return "".join(map(latex_comment, comments)) + "\n".join(lines) + "\n"


def _latex_differences(table: ResultTable) -> list[str]:
    """A second ``tabular``, of the paired differences from Retrained, if the table is over several runs."""
    lines = []
    for group in table.groups:
        if rows := compared_rows(group):
            lines += [r"\midrule", *_latex_setting(group, len(DIFFERENCES) + 1)]
        for name, row in rows.items():
            cells = [_latex_difference(*cell) for cell in difference_cells(row).values()]
            lines.append(" & ".join([escape_latex(words.marked(name, row)), *cells]) + r" \\")
    if not lines:
        return []
    header = ["Method", *(escape_latex(column_of(key).heading) for key in DIFFERENCES)]
    head = [rf"\begin{{tabular}}{{l{'r' * len(DIFFERENCES)}}}", r"\toprule", " & ".join(header) + r" \\"]
    return ["", latex_comment(words.DIFFERENCE).rstrip(), *head, *lines, r"\bottomrule", r"\end{tabular}"]


def _latex_difference(text: str, shows: str) -> str:
    return "--" if text == fmt.MISSING else f"${text}^{{{shows}}}$".replace(DIFFERENT, r"\neq").replace("^{}", "")


def _latex_setting(group: Group, columns: int) -> list[str]:
    """The line that names a group's setting."""
    setting = escape_latex(words.setting_of(group))
    return [rf"\multicolumn{{{columns}}}{{l}}{{\emph{{{setting}}}}} \\"] if setting else []


def _latex_cell(cell: ResultCell) -> str:
    if cell.text == fmt.MISSING:
        return "--"
    value = re.sub(r"(\d)e(-?\d+)", r"\1 \\times 10^{\2}", cell.text.replace("±", r"\pm"))
    value = rf"$\mathbf{{{value}}}$" if cell.best else f"${value}$"
    return value + (r"$^\dagger$" if cell.worse else "") + (f" ({cell.n})" if cell.n else "")
