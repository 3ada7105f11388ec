"""Results in the terminal: one table for a run, a sweep or a section of a report, with as many columns as fit.

Colour is never the only sign: every mark has a character of its own (see ``MARKS``). Where nothing was averaged, the
gap to Retrained stands beside each value; elsewhere its spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from sfu.names import visible
from sfu.reporting import format as fmt
from sfu.reporting import words
from sfu.reporting.attacks import FOUND, READING, TITLE, attack_cells, attacks_of
from sfu.reporting.columns import (
    COLUMNS,
    DIFFERENCES,
    DIFFERENT,
    PRINTED,
    ResultCell,
    cells_of,
    compared_rows,
    difference_cells,
)
from sfu.reporting.verdict import CRITERIA, verdicts
from sfu.results.aggregate import MethodResult, ResultTable, table_of_run
from sfu.results.rows import Metrics, rows_of


class Text(RichText):
    """Text for the terminal: one line, in which names can neither hide, clear nor colour anything.

    Markup such as ``[red]`` has no effect in any ``rich`` text. Every text of sfu's tables is made here.
    """

    def __init__(self, text: str = "", *args: Any, **options: Any) -> None:
        super().__init__(visible(text), *args, **options)

    def append(self, text: RichText | str, style: Any = None) -> RichText:
        return super().append(visible(text) if isinstance(text, str) else text, style)


def stacked(*lines: RichText) -> RichText:
    """Return several lines as one text."""
    return RichText("\n").join(lines)


BEST, WORSE, RETAINED, STORED, WITHHELD, ORACLE = "*", "!", "r", "s", "n", "o"
MARKS = {
    BEST: ("best source-free", "bold green"),
    WORSE: ("worse than nothing", "bold red"),
    RETAINED: ("sees retained data", "cyan"),
    STORED: ("sees stored statistics", "cyan"),
    WITHHELD: ("not (all) applied", "yellow"),
    ORACLE: ("tuned on Retrained", "cyan"),
}
"""Each mark with its meaning and its style."""
WORSE_STYLE = MARKS[WORSE][1]

_FOLDED_NAME, _NARROWEST_NAME, _FROM = 12, 8, "minus retrained"
_PREDICTED, _CANARIES = "predicted_distance", "canary_accuracy"
_OPTIONAL = (_PREDICTED, _CANARIES)
"""What is only shown where some row has it."""
_KEYS = (*PRINTED, _CANARIES, _PREDICTED, "test_gap", "agreement", "retain_gradient_norm", "seconds", "peak_memory_mb")
_NAMES, _ALL_GAPS = "names", "gaps"
_GIVEN_UP = (
    "peak_memory_mb", "seconds", "retain_gradient_norm", "agreement", _PREDICTED, "test_gap", "mia_gap",
    "remain_accuracy", _NAMES, _ALL_GAPS, "mia", "forget_accuracy",
)  # fmt: skip
"""What a narrow console does without, first to last; ``names``: long names are folded, ``gaps``: all gaps go."""
_CHOICES = (frozenset(), frozenset({"mia_gap"}), *(frozenset(_GIVEN_UP[:n]) for n in range(1, len(_GIVEN_UP) + 1)))


def flags_of(row: MethodResult) -> str:
    """Return the marks before a method's name, for example ``r``, ``o!`` or nothing."""
    reads = {"retained": RETAINED, "stored": STORED}.get(row.access or "", "")
    tuned = ORACLE if row.is_tuned_on_retrained else ""
    return reads + tuned + (WORSE if row.is_worse_than_nothing else WITHHELD if row.is_withheld else "")


def legend(marks: Iterable[str]) -> RenderableType | None:
    """Return an explanation of the marks in use, or None if there are none; no meaning is broken between lines."""
    used = {mark: MARKS[mark] for mark in MARKS if mark in marks}
    found = [Text(mark, style=style).append(f" {meaning}", style="dim") for mark, (meaning, style) in used.items()]
    return _Flow(found) if found else None


@dataclass(frozen=True)
class _Flow:
    """Short texts side by side, as many in a line as fit."""

    texts: Sequence[RichText]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        line = RichText()
        for text in self.texts:
            if line and line.cell_len + 2 + text.cell_len > options.max_width:
                yield line
                line = RichText()
            line = line + "  " + text if line else text
        yield line


def _folded(name: str, width: int) -> str:
    """Break a name that is too long into lines, after an underscore, dot or hyphen where there is one."""
    lines = []
    while cell_len(name) > width:
        fits = next(n for n in range(len(name), 0, -1) if n == 1 or cell_len(name[:n]) <= width)
        part = max((name.rfind(mark, width // 3, fits) + 1 for mark in "_.-"), default=0) or fits
        lines.append(name[:part])
        name = name[part:]
    return "\n".join([*lines, name])


def _column(heading: str, cells: Sequence[tuple[str, str, str]]) -> list[Text]:
    """Return a heading and its cells, all of one width; value, gap and mark of each cell stand under those above."""
    value, gap, mark = (max(map(cell_len, parts)) for parts in zip(*cells, strict=True))
    bodies = [v.rjust(value) + (f" {g.rjust(gap)}" if gap else "") + m.ljust(mark) for v, g, m in cells]
    width = max(cell_len(heading), cell_len(bodies[0]))
    found = [Text((heading + " " * mark)[:width].rjust(width), no_wrap=True)]
    for body, (_, _, m) in zip(bodies, cells, strict=True):
        text = Text(body.rjust(width), no_wrap=True)
        if m:
            text.stylize(MARKS[m][1], len(text) - len(body.lstrip()))
        found.append(text)
    return found


class _Body:
    """The groups one under the other, with the same columns in all; the columns depend on the width."""

    def __init__(self, table: ResultTable) -> None:
        self.table = table
        self.groups = [group for group in table.groups if group.rows]
        self.rows = [(visible(name), row) for group in self.groups for name, row in group.rows.items()]
        self.flags = [flags_of(row) for _, row in self.rows]
        self.averages = any(row.n > 1 for _, row in self.rows)
        self.predicted = any(row.mean(_PREDICTED) is not None for _, row in self.rows)

    def _columns(self, cells: Sequence[Mapping[str, ResultCell]], given_up: frozenset[str]) -> list[list[Text]]:
        """The columns of numbers without what was given up."""
        no_gaps = self.averages or _ALL_GAPS in given_up
        found = []
        for key in _KEYS:
            if key in given_up or (key == "test_gap" and not self.averages):
                continue
            if key in _OPTIONAL and all(row.mean(key) is None for _, row in self.rows):
                continue
            hidden = no_gaps or key == "distance" or (key == "mia" and "mia_gap" in given_up)
            gap = None if hidden else CRITERIA.get(key)
            parts = []
            for (name, row), line in zip(self.rows, cells, strict=True):
                value = line[key].text.split()[0] if key == "test_gap" else line[key].text
                beside = fmt.points(row.mean(gap)) if gap and name != "retrained" else ""
                parts.append((value, beside, WORSE if line[key].worse else BEST if line[key].best else ""))
            found.append(_column(COLUMNS[key].short, parts))
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        plus_minus = "+-" if options.ascii_only else "±"
        lines = [line for group in self.groups for _, _, line in cells_of(self.table, group, _KEYS, plus_minus)]
        cells = [dict(zip(_KEYS, line, strict=True)) for line in lines]
        names = max(cell_len(name) for name in ["method", *(name for name, _ in self.rows)])
        flags = max(map(len, self.flags))
        for given_up in _CHOICES:
            columns = self._columns(cells, given_up)
            room = options.max_width - (flags + 1 if flags else 0) - sum(len(column[0]) + 1 for column in columns)
            if room >= (min(names, _FOLDED_NAME) if _NAMES in given_up else names):
                break
        widths = flags, max(min(names, room), _NARROWEST_NAME)
        yield self._grid(columns, range(0), *widths)
        start = 0
        for group in self.groups:
            setting = words.setting_of(group)
            if setting or group.over or group.n_failed:
                lead = Text(f"{setting}  " if setting else "", style="bold")
                yield lead.append(words.count_of(group), style="not bold dim")
            yield self._grid(columns, range(start, start := start + len(group.rows)), *widths)
        if hidden := [COLUMNS[key].name for key in PRINTED if key in given_up]:
            yield Text(f"Not shown at this width: {', '.join(hidden)}.", style="dim")
        yield Text("")
        marks = legend({*"".join(self.flags), *(BEST for line in lines for cell in line if cell.best)})
        if marks is not None:
            yield marks
        if any(row.mean(key) is not None for _, row in self.rows for key in ("distance", "test_gap")):
            signed = "test_gap" not in given_up if self.averages else _ALL_GAPS not in given_up
            told = [words.PREDICTED] if self.predicted and _PREDICTED not in given_up else []
            remarks = [*([words.SIGNED] if signed else []), words.SCALE, *told]
            yield _Flow([Text(remark, style="dim") for remark in remarks])

    def _grid(self, columns: Sequence[Sequence[Text]], rows: range, flags: int, name_width: int) -> Table:
        """Some rows, or the headings if there are none; names too long are folded, never truncated."""
        grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, show_header=not rows)
        if flags:
            grid.add_column("", width=flags, no_wrap=True)
        grid.add_column("method", width=name_width, overflow="fold")
        for head, *_ in columns:
            grid.add_column(head, width=len(head), no_wrap=True)
        for index in rows:
            marks = Text.assemble(*((mark, MARKS[mark][1]) for mark in self.flags[index]))
            style = next((MARKS[mark][1] for mark in (WORSE, RETAINED, STORED) if mark in self.flags[index]), "")
            name = RichText(_folded(self.rows[index][0], name_width), style=style, overflow="fold")
            grid.add_row(*([marks] if flags else []), name, *(column[index + 1] for column in columns))
        return grid


class _Differences:
    """The paired differences from Retrained of a table over several runs: as many columns as fit."""

    def __init__(self, table: ResultTable) -> None:
        self.groups = [(words.setting_of(group), rows) for group in table.groups if (rows := compared_rows(group))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        differs = "!=" if options.ascii_only else DIFFERENT
        rows = [(visible(name), difference_cells(row)) for _, group in self.groups for name, row in group.items()]
        columns = {}
        for key, metric in DIFFERENCES.items():
            width = max(cell_len(line[key][0]) for _, line in rows)
            mark = 0 if key == "distance" else 1 + len(differs)
            shown = [
                line[key][0].rjust(width) + line[key][1].replace(DIFFERENT, differs).rjust(mark) for _, line in rows
            ]
            columns[key] = [Text(COLUMNS[metric].short.rjust(width).ljust(width + mark)), *map(Text, shown)]
        longest = max(cell_len(name) for name in (_FROM, *(name for name, _ in rows)))
        for key in ("remain_gap", "mia_gap", "forget_gap"):
            if longest + sum(len(column[0]) + 1 for column in columns.values()) > options.max_width:
                del columns[key]
        room = options.max_width - sum(len(column[0]) + 1 for column in columns.values())
        width, start = max(min(longest, room), _NARROWEST_NAME), 0
        yield _grid([[Text(_FROM), *(column[0] for column in columns.values())]], width, header=True)
        for setting, group in self.groups:
            if setting:
                yield Text(setting, style="bold")
            lines = range(start, start := start + len(group))
            yield _grid([[Text(rows[i][0]), *(column[i + 1] for column in columns.values())] for i in lines], width)
        yield Text(words.DIFFERENCE.replace(DIFFERENT, differs), style="dim")


class _Attacks:
    """The areas of all attacks: as many columns as fit, the last ones first, which are the strongest."""

    def __init__(self, table: ResultTable) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        plus_minus, differs = ("+-", "!=") if options.ascii_only else ("±", FOUND)
        groups = [(group, attack_cells(self.table, group, plus_minus)) for group in self.table.groups if group.rows]
        lines = [(visible(name), [cell.replace(FOUND, differs) for cell in cells]) for _, rows in groups
                 for name, cells in rows]  # fmt: skip
        names = attacks_of(self.table)
        room = options.max_width - max(_NARROWEST_NAME, max(cell_len(name) for name, _ in lines))
        columns: list[list[Text]] = []
        for index in reversed(range(len(names))):
            cells = [line[index] for _, line in lines]
            marks = max(map(cell_len, (cell[cell.find(differs) - 1 :] for cell in cells if differs in cell)), default=0)
            shown = [names[index], *(cell if differs in cell else cell + marks * " " for cell in cells)]
            width = max(map(cell_len, shown))
            if width + 1 > room and columns:
                break
            room -= width + 1
            columns.insert(0, [Text(one.rjust(width)) for one in shown])
        width = min(max(cell_len(name) for name, _ in lines), max(options.max_width // 2, _NARROWEST_NAME))
        yield _grid([[Text("method"), *(column[0] for column in columns)]], width, header=True)
        start = 0
        for group, rows in groups:
            if setting := words.setting_of(group):
                yield Text(setting, style="bold")
            places = range(start, start := start + len(rows))
            yield _grid([[Text(lines[i][0]), *(column[i + 1] for column in columns)] for i in places], width)
        if hidden := names[: len(names) - len(columns)]:
            yield Text(f"Not shown at this width: {', '.join(hidden)}.", style="dim")
        yield Text(READING.replace(FOUND, differs), style="dim")


def _grid(lines: Sequence[Sequence[Text]], width: int, *, header: bool = False) -> Table:
    """Lines of a table, or its heading, whose names are folded at a width."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, show_header=header)
    for index, cell in enumerate(lines[0]):
        head = cell if header else ""
        grid.add_column(head, width=len(cell) if index else width, no_wrap=index > 0, overflow="fold")
    for name, *cells in [] if header else lines:
        grid.add_row(RichText(_folded(name.plain, width), overflow="fold"), *cells)
    return grid


def terminal_table(table: ResultTable, title: RenderableType | None = None) -> RenderableType:
    """Return the table of a run or of many, its legend, what failed and what is missing.

    The columns are chosen when it is printed. Test accuracy and distance are always shown; 60 characters are enough for
    all but the remaining accuracy. Without a ``title``, the first line says how many runs there are.
    """
    parts = [title or Text(words.headline(table), style="bold"), Text("")]
    body = _Body(table)
    if not body.rows:
        parts.append(Text("No run finished." if len(table.failed) == table.n_runs else "No rows."))
    else:
        parts.append(body)
        differences = _Differences(table)
        if differences.groups:
            parts += [Text(""), differences]
        elif any(row.n == 1 for _, row in body.rows):
            parts.append(Text(words.ONE_RUN, style="dim"))
        if attacks_of(table):
            parts += [Text(""), Text(TITLE, style="bold"), _Attacks(table)]
    for title, lines, style in (
        ("Averaged over fewer runs:", words.gaps_in_data(table), ""),
        ("Failed:", words.failures(table), WORSE_STYLE),
    ):
        if lines:
            parts += [
                Text(""),
                Text(title, style=style or "bold"),
                *(indented(Text(line, style=style)) for line in lines),
            ]
    parts += [Text(line, style=WORSE_STYLE) for line in words.unenforced(table)]
    return Group(*parts)


def theory_table(metrics: Metrics) -> RenderableType | None:
    """Return the paper's bounds beside what was measured (``evaluation.theory``); ``None`` if no row has them."""
    found = {name: row["theory"] for name, row in rows_of(metrics).items() if row.get("theory")}
    if not found:
        return None
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("theory", "|H - H_r|", "Lemma 1", "|grad|", "Theorem 1", "nothing done"):
        grid.add_column(heading, justify="left" if heading == "theory" else "right", overflow="fold")
    for name, theory in found.items():
        lemma, theorem = theory["lemma_1"], theory["theorem_1"]
        grid.add_row(
            Text(name), fmt.significant(lemma["measured"]), _bound(lemma), fmt.significant(theorem["measured"]),
            _bound(theorem), fmt.significant(theorem["trivial"]),
        )  # fmt: skip
    note = f"{WORSE}: violated.  v: vacuous, above what is known without it.  -: does not apply."
    return Group(Text(""), grid, Text(note, style="dim"))


def _bound(said: Mapping[str, Any]) -> Text:
    """Return a bound of the theory with its flags."""
    if said["not_applicable"]:
        return Text("-")
    flags = (WORSE if said["violated"] else "") + ("v" if said["vacuous"] else "")
    return Text(fmt.significant(said["bound"]) + f" {flags}".rstrip(), style=WORSE_STYLE if said["violated"] else "")


def indented(line: RichText) -> Padding:
    """Return a line of a list; what does not fit goes on under its beginning."""
    return Padding(line, (0, 0, 0, 2), expand=False)


def print_verdicts(table: ResultTable, console: Console) -> None:
    """Print what the numbers say, a sentence a line."""
    for sentence in verdicts(table):
        console.print(Text(sentence, style=WORSE_STYLE if sentence.startswith("Worse") else "bold"))


def print_run(metrics: Metrics, folder: str | Path, console: Console) -> None:
    """Print the table of a run, the verdict, the methods' notes, and where the files were saved."""
    table = table_of_run(metrics)
    title: RichText = Text(words.run_headline(metrics), style="bold")
    machine = words.machine_line(metrics)
    title = stacked(title, Text(machine, style="dim")) if machine else title
    console.print(terminal_table(table, title), highlight=False)
    console.print()
    print_verdicts(table, console)
    if (theory := theory_table(metrics)) is not None:
        console.print(theory, highlight=False)
    for name, _, note in words.remarks(table):
        console.print(indented(Text(f"{name}: ", style="bold").append(note, style="not bold")))
    path = Path(folder).absolute()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    console.print(Text("Saved in ").append(str(shown), style="bold"), overflow="fold")
    files = sorted(entry.name for entry in path.iterdir() if entry.is_file()) if path.is_dir() else []
    if files:
        console.print(indented(Text(", ".join(files), style="dim")))
