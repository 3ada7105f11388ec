"""Curves over one swept number: test accuracy and distance to Retrained, with bands of one spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sfu.reporting.pictures import drawing as draw
from sfu.reporting.pictures.labels import label_ends
from sfu.results.aggregate import ResultTable, number_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def numeric_key(table: ResultTable) -> str | None:
    """Return the key that varies if it is the only one and all its values are numbers."""
    if len(table.varied) != 1 or len(table.groups) < 2:
        return None
    (key,) = table.varied
    return None if any(number_of(group.overrides[key]) is None for group in table.groups) else key


def curve_figure(table: ResultTable, key: str, title: str, narrow: bool = False) -> Figure:
    """Draw curves over one numeric key, the only one that varies; in narrow form one panel under the other."""
    zoom = enlargement(table)
    others = [name for name in table.methods if name not in draw.LOOKS]
    panels = list(draw.PANELS)
    if zoom:
        panels.insert(1, ("test_accuracy", "Test accuracy, enlarged"))
    tall = max(3.0, 0.8 + 0.13 * len(others))
    if narrow:
        figure = draw.new_figure(draw.NARROW_INCHES, 1.2 + (tall + 0.4) * len(panels))
        all_axes = figure.subplots(len(panels), 1)
    else:
        figure = draw.new_figure(draw.WIDE_INCHES, 1.2 + tall)
        all_axes = figure.subplots(1, len(panels))
    values = [float(group.overrides[key]) for group in table.groups]
    for axes, (metric, panel) in zip(all_axes, panels, strict=True):
        _draw_curves(axes, table, key, metric)
        _scale_swept(axes, values)
        draw.finish_axes(axes, panel, grid="y")
    if zoom:
        all_axes[1].set_ylim(*zoom)
    draw.finish_distance(all_axes[-1], draw.distance_ends(table), along="y")
    draw.finish_figure(figure, title, narrow, 2 if narrow else 5)
    figure.draw_without_rendering()
    for index, (axes, (metric, _)) in enumerate(zip(all_axes, panels, strict=True)):
        ends = [(name, *points[-1][:2]) for name in others if (points := _points(table, key, metric, name))]
        if zoom and index == 0:  # what the next panel shows enlarged has its name there
            ends = [end for end in ends if not zoom[0] <= end[2] <= zoom[1]]
        label_ends(axes, ends)
    return figure


def _points(table: ResultTable, key: str, metric: str, name: str) -> list[tuple[float, float, float]]:
    """The value of the key, the mean and the spread of one method at each setting where the metric is known."""
    entries = [(float(group.overrides[key]), group.entry(name, metric)) for group in table.groups]
    return [(x, entry.mean, table.spread_of(entry) or 0.0) for x, entry in entries if entry.mean is not None]


def _draw_curves(axes: Axes, table: ResultTable, key: str, metric: str) -> None:
    """Draw a line for each method: dashed if it sees more than the forget set, hollow where a step was not applied."""
    for name in table.methods:
        points = _points(table, key, metric, name)
        if not points:
            continue
        rows = {float(group.overrides[key]): group.rows[name] for group in table.groups if name in group.rows}
        xs, means, spreads = zip(*points, strict=True)
        dashes = "--" if any(map(draw.sees_more, rows.values())) else "-"
        style = draw.marker_style(name)
        line: dict[str, Any] = {key: style[key] for key in ("color", "zorder")} | {"clip_on": metric != "distance"}
        axes.plot(xs, means, dashes, linewidth=1.4 if name in draw.LOOKS else 0.9, **line)
        for x, mean in zip(xs, means, strict=True):
            axes.plot(
                x,
                mean,
                linestyle="none",
                **draw.marker_style(name, not rows[x].is_withheld),
                clip_on=metric != "distance",
            )
        if name in draw.LOOKS:
            axes.plot([], [], dashes, **style, label=draw.plain(name))
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.set_xlabel(draw.plain(key))


def _scale_swept(axes: Axes, values: Sequence[float]) -> None:
    """Scale logarithmically where values span more than a factor of 30, linearly around a swept zero."""
    positive = [value for value in values if value > 0]
    if positive and min(values) >= 0 and max(positive) / min(positive) > 30:
        if min(values) > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=min(positive))
    if len(values) <= 8:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)


def enlargement(table: ResultTable) -> tuple[float, float] | None:
    """Return limits that show the good curves apart where a bad one would flatten them, or None where none does."""
    known = [mean for row in table.results if (mean := row.mean("test_accuracy")) is not None]
    near = [mean for mean in known if mean > max(known) - 5.0]
    if len(near) < 2 or max(known) - min(known) < 15.0:
        return None
    margin = 0.1 + 0.08 * (max(near) - min(near))
    return min(near) - margin, max(near) + margin
