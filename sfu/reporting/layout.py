"""Columns of fixed width for the terminal: cells whose parts line up, and as many columns as the width allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

BEST_STYLE = "bold green"
WORSE_STYLE = "bold red"
RETAINED_STYLE = "cyan"
BEST, WORSE, RETAINED, STORED, WITHHELD, ORACLE = "*", "!", "r", "s", "=", "o"
FLAG_STYLES: Mapping[str, str] = {
    WORSE: WORSE_STYLE,
    RETAINED: RETAINED_STYLE,
    STORED: RETAINED_STYLE,
    WITHHELD: "yellow",
    ORACLE: RETAINED_STYLE,
}
LEGEND: Mapping[str, str] = {
    BEST: "best source-free",
    WORSE: "worse than nothing",
    RETAINED: "sees retained data",
    STORED: "sees stored statistics",
    WITHHELD: "not (all) applied",
    ORACLE: "tuned on Retrained",
}
FOLDED_NAME = 12
NARROWEST_NAME = 8


@dataclass(frozen=True)
class Cell:
    """A value, an optional second part (a gap), and a one-character mark."""

    value: str
    gap: str = ""
    mark: str = ""
    style: str = ""


@dataclass(frozen=True)
class Strip:
    """One column of cells, aligned part by part."""

    heading: str
    cells: tuple[Cell, ...]

    def _widths(self) -> tuple[int, int, int]:
        parts = [(cell_len(cell.value), cell_len(cell.gap), len(cell.mark)) for cell in self.cells]
        value, gap, mark = (max(column) for column in zip(*parts, strict=True)) if parts else (0, 0, 0)
        return value, gap, mark

    @property
    def width(self) -> int:
        """Characters the column takes."""
        value, gap, mark = self._widths()
        return max(cell_len(self.heading), value + (gap + 1 if gap else 0) + mark)

    def head(self) -> Text:
        """The heading, ending where the numbers end."""
        return Text((self.heading + " " * self._widths()[2])[: self.width].rjust(self.width), no_wrap=True)

    def texts(self) -> list[Text]:
        """The cells, each ``width`` characters wide."""
        value, gap, mark = self._widths()
        found = []
        for cell in self.cells:
            body = cell.value.rjust(value) + (f" {cell.gap.rjust(gap)}" if gap else "") + cell.mark.ljust(mark)
            body = body.rjust(self.width)
            shown = Text(body, no_wrap=True)
            if cell.style:
                start = len(body) - len(body.lstrip())
                shown.stylize(cell.style, start, len(body))
            found.append(shown)
        return found


def total_width(strips: Sequence[Strip], name_width: int, flag_width: int) -> int:
    """Characters a line takes: flags, names and strips, one blank between neighbours."""
    return (flag_width + 1 if flag_width else 0) + name_width + sum(strip.width + 1 for strip in strips)


def fitting(
    choices: Sequence[Sequence[Strip]],
    fallbacks: Sequence[Sequence[Strip]],
    names: Sequence[str],
    flags: Sequence[str],
    width: int,
) -> Sequence[Strip]:
    """The richest columns for a width.

    Args:
        choices: Sets of columns worth having, richest first. Names are folded before the last of them is given up.
        fallbacks: Barer sets for narrow consoles, richest first.
        names: The names beside them.
        flags: The marks before the names.
        width: Characters available.
    """
    name_width = max((cell_len(name) for name in [*names, "method"]), default=0)
    flag_width = max((len(flag) for flag in flags), default=0)
    tries = [(strips, name_width) for strips in choices]
    tries.append((choices[-1], min(name_width, FOLDED_NAME)))
    tries += [(strips, min(name_width, FOLDED_NAME)) for strips in fallbacks]
    for strips, room in tries:
        if total_width(strips, room, flag_width) <= width:
            return strips
    return fallbacks[-1]


def grid(
    strips: Sequence[Strip],
    names: Sequence[str],
    flags: Sequence[str],
    styles: Sequence[str],
    width: int,
    rows: range | None = None,
    header: bool = True,
) -> Table:
    """Flags, names and strips as a table at most ``width`` wide; names too long are folded, never cut.

    Args:
        strips: The columns of numbers.
        names: A name for each row.
        flags: The marks before each name.
        styles: The style of each name.
        width: Characters available.
        rows: The rows to show (all by default); widths are those of all rows, so parts of one table line up.
        header: Whether to show the headings.
    """
    flag_width = max((len(flag) for flag in flags), default=0)
    longest = max((cell_len(name) for name in [*names, "method"]), default=0)
    room = width - total_width(strips, 0, flag_width)
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False, header_style="bold", show_header=header
    )
    if flag_width:
        table.add_column("", width=flag_width, no_wrap=True)
    table.add_column("method", width=max(min(longest, room), NARROWEST_NAME), overflow="fold")
    for strip in strips:
        table.add_column(strip.head(), width=strip.width, no_wrap=True)
    columns = [strip.texts() for strip in strips]
    for index in range(len(names)) if rows is None else rows:
        lead = [_flag_text(flags[index].ljust(flag_width))] if flag_width else []
        name = Text(names[index], style=styles[index], overflow="fold")
        table.add_row(*lead, name, *(column[index] for column in columns))
    return table


def _flag_text(flag: str) -> Text:
    shown = Text(no_wrap=True)
    for character in flag:
        shown.append(character, style=FLAG_STYLES.get(character, ""))
    return shown


def legend(marks: set[str]) -> Text | None:
    """One line that explains the marks in use, or None when there are none."""
    used = [mark for mark in LEGEND if mark in marks]
    if not used:
        return None
    shown = Text()
    styles = {BEST: BEST_STYLE, **FLAG_STYLES}
    for index, mark in enumerate(used):
        shown.append("  " if index else "").append(mark, style=styles[mark]).append(f" {LEGEND[mark]}", style="dim")
    return shown
