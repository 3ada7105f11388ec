"""The distance-accuracy plane: how far from Retrained a method ended, against what its test accuracy lost by it.

Retrained stands at the origin. This picture tells methods apart that have the same accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sfu.reporting.pictures import drawing as draw
from sfu.results.aggregate import ResultTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR_POINTS = 2.0
"""Gaps up to this many points are drawn to scale; beyond, logarithmically."""

Point = tuple[float, float, float, float]


def plane_points(table: ResultTable) -> dict[str, list[Point]]:
    """Return the distance and the test gap of each method at each setting, then the spread of both.

    Methods of which the distance or the gap is never known have no place in the plane.
    """
    found: dict[str, list[Point]] = {name: [] for name in table.methods}
    for group in table.groups:
        for name, row in group.rows.items():
            distance, gap = row["distance"], row["test_gap"]
            if distance.mean is not None and gap.mean is not None:
                spreads = table.spread_of(distance) or 0.0, table.spread_of(gap) or 0.0
                found[name].append((distance.mean, gap.mean, *spreads))
    return {name: points for name, points in found.items() if points}


def plane_figure(table: ResultTable, title: str, narrow: bool = False) -> Figure:
    """Draw every setting of every method that has a place (one at least), its settings joined if one key varies."""
    points = plane_points(table)
    known = [point for found in points.values() for point in found]
    figure = draw.new_figure(draw.NARROW_INCHES if narrow else 8.4, 4.6 + 0.2 * len(points) / (2 if narrow else 3))
    axes = figure.subplots()
    line: dict[str, Any] = {"linestyle": "-" if len(table.varied) == 1 else "none", "linewidth": 0.7, "alpha": 0.9}
    line |= {"elinewidth": 0.9, "capsize": 2, "markersize": 6}
    for index, (name, found) in enumerate(points.items()):
        xs, ys, dxs, dys = zip(*found, strict=True)
        look: dict[str, Any] = {"color": draw.pick(draw.COLOURS, index), "marker": draw.pick(draw.MARKERS, index)}
        look |= {"markerfacecolor": "white"} if index % 2 else {}
        axes.errorbar(xs, ys, xerr=dxs, yerr=dys, label=draw.plain(name), **look, **line)
    draw.finish_distance(axes, [x + dx for x, _, dx, _ in known])
    axes.set_xlim(left=-0.04)
    _scale_gap(axes, [y for _, y, _, _ in known])
    axes.axhline(0, color=draw.BLACK, linewidth=0.8, zorder=0)
    draw.finish_axes(axes, grid="y")
    return draw.finish_figure(figure, title, narrow, 2 if narrow else 3)


def _scale_gap(axes: Axes, gaps: Sequence[float]) -> None:
    note = ""
    if max(abs(gap) for gap in gaps) > 5 * LINEAR_POINTS:
        note = f"\nlogarithmic beyond {LINEAR_POINTS:g}"
        axes.set_yscale("symlog", linthresh=LINEAR_POINTS, linscale=1.5)
        low, high = min([*gaps, -1.0]) * 1.3, max([*gaps, 1.0]) * 1.3
        ticks = [sign * tick for tick in (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0) for sign in (1, -1)]
        axes.set_yticks(sorted({tick for tick in ticks if low <= tick <= high}))
        axes.set_yticks([], minor=True)
        axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+.3g}" if value else "0")
    axes.set_ylabel(f"test accuracy, points from Retrained{note}")
