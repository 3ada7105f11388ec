"""Curves over one swept number: test accuracy and distance to Retrained, with bands of one spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sfu.reporting.pictures import drawing as draw
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
    zoom, n_methods = enlargement(table), len(table.methods)
    panels = list(draw.PANELS)
    if zoom:
        panels.insert(1, ("test_accuracy", "Test accuracy, enlarged"))
    if narrow:
        figure = draw.new_figure(draw.NARROW_INCHES, 0.8 + 2.9 * len(panels) + 0.2 * n_methods / 2)
        all_axes = figure.subplots(len(panels), 1)
    else:
        figure = draw.new_figure(5.0 * len(panels) - (2.0 if zoom else 0.0), 4.0 + 0.2 * ((n_methods + 2) // 3))
        all_axes = figure.subplots(1, len(panels))
    values = [float(group.overrides[key]) for group in table.groups]
    for axes, (metric, panel) in zip(all_axes, panels, strict=True):
        _draw_curves(axes, table, key, metric)
        _scale_swept(axes, values)
        draw.finish_axes(axes, panel, grid="y")
    if zoom:
        all_axes[1].set_ylim(*zoom)
    draw.finish_distance(all_axes[-1], draw.distance_ends(table), along="y")
    return draw.finish_figure(figure, title, narrow, 2 if narrow else 3)


def _draw_curves(axes: Axes, table: ResultTable, key: str, metric: str) -> None:
    for index, name in enumerate(table.methods):
        entries = [(float(group.overrides[key]), group.entry(name, metric)) for group in table.groups]
        points = [(x, entry.mean, table.spread_of(entry) or 0.0) for x, entry in entries if entry.mean is not None]
        ours = all(group.rows[name].access == "forget" for group in table.groups if name in group.rows)
        if not points:
            continue
        xs, means, spreads = zip(*points, strict=True)
        colour, dashes = draw.pick(draw.COLOURS, index), index // len(draw.COLOURS) + (not ours)
        line: dict[str, Any] = {"color": colour, "linestyle": draw.pick(draw.DASHES, dashes), "linewidth": 1.4}
        line |= {"marker": draw.pick(draw.MARKERS, index), "markerfacecolor": colour if ours else "white"}
        label = draw.plain(name)
        axes.plot(xs, means, **line, markersize=5, clip_on=metric != "distance", label=label)
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
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
