"""Small multiples: the distance to Retrained and the gaps to its accuracies, one panel each, a line for every row.

Accuracies themselves look all the same, so bars show the difference from Retrained, whose line has its own value.
Without Retrained, they show accuracies. Any number of rows fits: the figure grows, the letters do not shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.columns import COLUMNS
from sfu.reporting.pictures import drawing as draw
from sfu.reporting.verdict import CRITERIA
from sfu.reporting.words import count_of, run_headline, setting_of
from sfu.results.aggregate import MethodResult, ResultTable, table_of_run
from sfu.results.rows import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = ("distance", "test_accuracy", "remain_accuracy", "forget_accuracy", "mia")
TALLEST_INCHES = 60.0
"""Settings that would begin below this height are not drawn."""
SpreadOf = Callable[[MethodResult, str], float | None]

_LINE_INCHES, _BAR, _BAND = 0.2, 0.62, "#EEF0F2"
_HARMED, _SKIPPED = "worse than doing nothing", "step not applied"
_SEES_MORE, _SOURCE_FREE = "sees more than the forget set", "source-free"
_TICKS = (0.0, 10.0)


@dataclass(frozen=True)
class _Line:
    """One row of a group and the place of its bars, counted downwards in lines of text."""

    name: str
    row: MethodResult
    place: float


def save_gap_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draw a run into a file; the attack has the deviation over its splits as its error bar."""
    figure = gap_figure(
        table_of_run(metrics),
        run_headline(metrics),
        spread_of=lambda row, key: row.mean("mia_std") if key in ("mia", "mia_gap") else None,
    )
    return draw.save_figure(figure, path)


def gap_figure(table: ResultTable, title: str, narrow: bool = False, spread_of: SpreadOf | None = None) -> Figure:
    """Draw every row at every setting; in narrow form one panel under the other.

    ``spread_of`` gives the length of the error bar of a row's metric, or None; by default the table's spread.
    """
    spreads = spread_of or (lambda row, key: table.spread_of(row[key]))
    lines, headings, end = _places(table, narrow, TALLEST_INCHES / _LINE_INCHES / (len(PANELS) if narrow else 1))
    results = [line.row for line in lines]
    gaps = any(row.mean(CRITERIA[key]) is not None for row in results for key in PANELS[1:])
    panels = [key for key in PANELS if any(row.mean(key) is not None for row in results)] or ["test_accuracy"]
    height = end * _LINE_INCHES + 0.75
    height = (height * len(panels) if narrow else height + 0.35) + 0.65
    figure = draw.new_figure(draw.NARROW_INCHES if narrow else draw.WIDE_INCHES, height)
    shape: dict[str, Any] = {"nrows": len(panels)}
    if not narrow:
        shape = {"ncols": len(panels), "width_ratios": [1.5 if key == "distance" else 1.0 for key in panels]}
    all_axes = list(figure.subplots(**shape, sharey=True, squeeze=False).flat)
    for axes, key in zip(all_axes, panels, strict=True):
        _draw_panel(axes, key, lines, spreads, gaps)
        for _, place, height in headings:
            axes.axhspan(place, place + height, color=_BAND, zorder=0.5, linewidth=0)
        if key == "distance":
            draw.finish_distance(axes, _ends(lines, key, spreads), room=0.6, coarse=True)
        elif gaps:
            alike = [key] if key == "mia" else [other for other in panels if other not in ("distance", "mia")]
            shown = [end for other in alike for end in _ends(lines, CRITERIA[other], spreads)]
            draw.finish_gap(axes, shown, "x", _TICKS)
            _widen(axes, shown, 0.6)
            beyond = "" if axes.get_xscale() == "linear" else f"\nlogarithmic beyond {draw.LINEAR_POINTS:g}"
            axes.set_xlabel(f"points from Retrained{beyond}")
        else:
            axes.set_xlim(0, 135)
            axes.set_xlabel("per cent")
        name = COLUMNS[key].name.capitalize().replace(" ", " " if narrow else "\n")
        draw.finish_axes(axes, name or "Distance to Retrained")
    _name_lines(all_axes if narrow else all_axes[:1], lines, headings)
    all_axes[0].set_ylim(end, 0)
    for axes in all_axes:
        axes.tick_params(axis="y", length=0)
    draw.finish_figure(figure, title, narrow, 2 if narrow else 4, _legend(results))
    return figure


def _places(table: ResultTable, narrow: bool, most: float) -> tuple[list[_Line], list[tuple[str, float, int]], float]:
    """The lines with their places, each setting's heading with its place and number of lines, and the end of all.

    Settings that begin after ``most`` lines are counted in a last heading.
    """
    lines: list[_Line] = []
    headings: list[tuple[str, float, int]] = []
    place, groups = 0.0, [group for group in table.groups if group.rows]
    for index, group in enumerate(groups):
        if index and place > most:
            headings.append((f"and {len(groups) - index} more settings, in the table", place, 1))
            place += 1
            break
        if group.overrides:
            text = draw.plain(f"{setting_of(group)}; {count_of(group)}", 30 if narrow else 100)
            headings.append((text, place, text.count("\n") + 1))
            place += headings[-1][2] + 0.15
        for name, row in group.rows.items():
            n_lines = _label(name, row).count("\n") + 1
            lines.append(_Line(name, row, place + n_lines / 2))
            place += n_lines
        place += 0.15
    return lines, headings, max(place, 2.0)


def _label(name: str, row: MethodResult) -> str:
    return draw.plain(name, 26) + ("\n(tuned on Retrained)" if row.is_tuned_on_retrained else "")


def _name_lines(panels: Sequence[Axes], lines: Sequence[_Line], headings: Sequence[tuple[str, float, int]]) -> None:
    """Write names and markers to the left of panels, and settings into the bands above their rows."""
    from matplotlib.transforms import offset_copy

    for axes in panels:
        axes.set_yticks([line.place for line in lines], [_label(line.name, line.row) for line in lines])
        axes.tick_params(axis="y", pad=14, labelleft=True)
        beside = offset_copy(axes.get_yaxis_transform(), axes.figure.figure, x=-7, units="points")
        for line in lines:
            style = draw.marker_style(line.name, not line.row.is_withheld) | {"markersize": 5.5}
            axes.plot([0], [line.place], transform=beside, clip_on=False, **style)
        for text, place, height in headings:
            axes.figure.text(
                0.01, place + height / 2, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8,
                fontweight="bold", in_layout=False, bbox={"facecolor": _BAND, "linewidth": 0, "pad": 1},
            )  # fmt: skip


def _draw_panel(axes: Axes, key: str, lines: Sequence[_Line], spread_of: SpreadOf, gaps: bool) -> None:
    """Draw the bars of one metric, each with its value after it."""
    measured = CRITERIA[key] if gaps else key
    values = [line.row.mean(measured) for line in lines]
    errors = [spread_of(line.row, measured) for line in lines]
    bars = axes.barh(
        [line.place for line in lines], [value or 0.0 for value in values], height=_BAR,
        xerr=[nan if error is None else error for error in errors], error_kw={"elinewidth": 0.9, "capsize": 1.8},
    )  # fmt: skip
    for bar, line, value, error in zip(bars, lines, values, errors, strict=True):
        style, state = bar_style(line.name, line.row)
        bar.set(**style)
        text = _value_text(line, key, value, measured != key, state)
        left = measured != key and (value or 0.0) < 0
        end = (value or 0.0) + (-1 if left else 1) * (error or 0.0)
        shown = axes.annotate(
            text, (end, line.place), (-4 if left else 4, 0), textcoords="offset points", va="center",
            ha="right" if left else "left", fontsize=7, zorder=4, in_layout=False,
        )  # fmt: skip
        if key == "distance":
            shown.set(path_effects=draw.halo(), fontweight="bold" if state == _HARMED else "normal")
    axes.axvline(0, color=draw.BLACK, linewidth=0.8, zorder=1)


def _value_text(line: _Line, key: str, value: float | None, is_gap: bool, state: str) -> str:
    if line.name == "retrained" and is_gap:
        return f"{fmt.fixed(line.row.mean(key))} %"
    if value is None:
        return "n/a"
    if key == "distance":
        return fmt.compact(value) + {_HARMED: " worse", _SKIPPED: " not applied"}.get(state, "")
    return fmt.points(value) if is_gap else fmt.fixed(value)


def bar_style(name: str, row: MethodResult) -> tuple[dict[str, Any], str]:
    """Return how a row's bar looks, and what that says, as in the legend.

    The colour is the row's own. A step that was not applied is an empty bar with a broken outline, a row worse than
    nothing an empty crossed one, so that neither is taken for a success.
    """
    colour = draw.look_of(name).colour
    if row.is_worse_than_nothing:
        return {"facecolor": "white", "edgecolor": colour, "hatch": "xxxxx", "linewidth": 1.0}, _HARMED
    if row.is_withheld:
        return {"facecolor": "white", "edgecolor": draw.GREY, "linestyle": "--", "linewidth": 1.0}, _SKIPPED
    if draw.sees_more(row):
        return {"facecolor": "white", "edgecolor": colour, "hatch": "/////", "linewidth": 0.6}, _SEES_MORE
    return {"facecolor": colour, "edgecolor": colour, "linewidth": 0.6}, _SOURCE_FREE


def _legend(rows: Sequence[MethodResult]) -> list[Any]:
    """A patch for each kind of bar in the picture."""
    from matplotlib.patches import Patch

    found = {state: style for row in rows if not row.is_untouched for style, state in [bar_style("", row)]}
    order = (_SOURCE_FREE, _SEES_MORE, _SKIPPED, _HARMED)
    return [Patch(label=state, **found[state]) for state in order if state in found]


def _ends(lines: Sequence[_Line], key: str, spread_of: SpreadOf) -> list[float]:
    """How far the values of a metric reach with their spreads, on both sides."""
    known = [(mean, spread_of(line.row, key) or 0.0) for line in lines if (mean := line.row.mean(key)) is not None]
    return [end for mean, spread in known for end in (mean - spread, mean + spread)]


def _widen(axes: Axes, gaps: Sequence[float], share: float) -> None:
    """Give panels of the same gaps one scale, with room beside the bars for their values."""
    axes.dataLim.update_from_data_x([-0.5, 0.5, *gaps], ignore=False)
    axes.margins(x=share)
    axes.autoscale(axis="x")
