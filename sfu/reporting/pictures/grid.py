"""A grid: the distance to Retrained of every method (lines) at every value of one swept name (columns)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sfu.reporting import format as fmt
from sfu.reporting.pictures import drawing as draw
from sfu.reporting.pictures.curves import numeric_key
from sfu.results.aggregate import MethodResult, ResultTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST_COLUMNS = 3
_STRONGEST = 10.0  # a distance from which the colour grows no darker
_LINE_INCHES, _HEAD_INCHES, _NAME_INCHES, _CELL_INCHES = 0.27, 1.25, 2.2, 1.05


def named_key(table: ResultTable) -> str | None:
    """Return the key that varies if it is the only one, its values are names, and there are enough of them."""
    if len(table.varied) != 1 or numeric_key(table) or len(_columns(table)) < _FEWEST_COLUMNS or not _lines(table):
        return None
    return table.varied[0]


def grid_figure(table: ResultTable, key: str, title: str, narrow: bool = False) -> Figure:
    """Draw the grid; a distance is blue below 1 and red above, on a logarithmic scale there.

    The methods are those that see no more than the forget set. A distance in brackets is that of a step which was not
    applied, or not in full.
    """
    from matplotlib.colors import LinearSegmentedColormap

    columns, names = _columns(table), _lines(table)
    colours = LinearSegmentedColormap.from_list("distance", [draw.BLUE, "white", draw.VERMILLION])
    width = draw.NARROW_INCHES if narrow else min(draw.WIDE_INCHES, _NAME_INCHES + _CELL_INCHES * len(columns))
    figure = draw.new_figure(width, _HEAD_INCHES + _LINE_INCHES * len(names))
    axes = figure.subplots()
    rows = [[group.rows.get(name) for group in table.groups if group.rows] for name in names]
    shades = [[_shade(row) for row in line] for line in rows]
    axes.imshow(shades, cmap=colours, vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    for y, line in enumerate(rows):
        for x, row in enumerate(line):
            axes.text(
                x, y, _text(row), ha="center", va="center", fontsize=5.5 if narrow else 8, path_effects=draw.halo()
            )
    axes.set_yticks(range(len(names)), [draw.plain(name, 26) for name in names])
    axes.set_xticks(
        range(len(columns)), [draw.plain(value.replace("_", " "), 12) for value in columns],
        rotation=60 if narrow else 0,
    )  # fmt: skip
    draw.finish_axes(axes, "Distance to Retrained")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_xlabel(f"{draw.plain(key)}\n0 = Retrained, 1 = untouched, red: worse")
    return draw.finish_figure(figure, title, narrow, 1, [])


def _columns(table: ResultTable) -> list[str]:
    return [next(iter(group.overrides.values()), "") or "(default)" for group in table.groups if group.rows]


def _lines(table: ResultTable) -> list[str]:
    """The methods that see no more than the forget set and have a distance somewhere."""
    return [
        name
        for name in table.methods
        if any(
            (row := group.rows.get(name)) is not None and row.is_source_free and row.mean("distance") is not None
            for group in table.groups
        )
    ]


def _shade(row: MethodResult | None) -> float:
    """From -1 at a distance of 0 over 0 at 1 to 1 at the strongest; what is not known is white."""
    distance = None if row is None else row.mean("distance")
    if distance is None:
        return 0.0
    return distance - 1 if distance < 1 else min(math.log(distance) / math.log(_STRONGEST), 1.0)


def _text(row: MethodResult | None) -> str:
    distance = None if row is None else row.mean("distance")
    if row is None or distance is None:
        return fmt.MISSING
    return f"({fmt.compact(distance)})" if row.is_withheld else fmt.compact(distance)
