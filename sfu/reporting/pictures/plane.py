"""The distance-accuracy plane: how far from Retrained a method ended, against what its test accuracy lost by it.

Retrained stands at the origin. This picture tells methods apart that have the same accuracy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sfu.reporting.pictures import drawing as draw
from sfu.reporting.pictures.labels import label_points
from sfu.results.aggregate import ResultTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Point(NamedTuple):
    """One method at one setting: distance, gap in test accuracy (points), the spread of both, and its step's fate."""

    distance: float
    gap: float
    distance_spread: float
    gap_spread: float
    applied: bool


def plane_points(table: ResultTable) -> dict[str, list[Point]]:
    """Return the points of each method, one for each setting.

    Methods of which the distance or the gap is never known have no place in the plane.
    """
    found: dict[str, list[Point]] = {name: [] for name in table.methods}
    for group in table.groups:
        for name, row in group.rows.items():
            distance, gap = row["distance"], row["test_gap"]
            if distance.mean is not None and gap.mean is not None:
                spreads = table.spread_of(distance) or 0.0, table.spread_of(gap) or 0.0
                found[name].append(Point(distance.mean, gap.mean, *spreads, applied=not row.is_withheld))
    return {name: points for name, points in found.items() if points}


def plane_figure(table: ResultTable, title: str, narrow: bool = False) -> Figure:
    """Draw every setting of every method that has a place (one at least), its settings joined if one key varies."""
    points = plane_points(table)
    known = [point for found in points.values() for point in found]
    others = [name for name in points if name not in draw.LOOKS]
    figure = draw.new_figure(draw.NARROW_INCHES if narrow else draw.WIDE_INCHES, 4.8 + 0.12 * len(others))
    axes = figure.subplots()
    for name, found in points.items():
        look = draw.look_of(name)
        xs, ys, dxs, dys, applied = zip(*found, strict=True)
        if len(table.varied) == 1:
            axes.plot(xs, ys, color=look.colour, linewidth=0.7, alpha=0.7, zorder=1)
        axes.errorbar(xs, ys, xerr=dxs, yerr=dys, fmt="none", ecolor=look.colour, elinewidth=0.9, capsize=2, zorder=2)
        for x, y, whole in zip(xs, ys, applied, strict=True):
            axes.plot(x, y, linestyle="none", **draw.marker_style(name, whole))
        if name in draw.LOOKS:
            label = draw.plain(name) + ("" if any(applied) else " (not applied)")
            axes.plot([], [], linestyle="none", label=label, **draw.marker_style(name, any(applied)))
    draw.finish_distance(axes, [point.distance + point.distance_spread for point in known], room=0.12)
    axes.set_xlim(left=-0.04)
    gaps = [point.gap for point in known]
    draw.finish_gap(axes, gaps, "y", _TICKS)
    note = f"\nlogarithmic beyond {draw.LINEAR_POINTS:g}" if axes.get_yscale() == "symlog" else ""
    axes.set_ylabel(f"test accuracy, points from Retrained{note}")
    axes.axhline(0, color=draw.BLACK, linewidth=0.8, zorder=0)
    draw.finish_axes(axes, grid="y")
    draw.finish_figure(figure, title, narrow, 2 if narrow else 5)
    ends = [
        (name + ("" if any(p.applied for p in points[name]) else " (not applied)"), points[name][-1]) for name in others
    ]
    label_points(axes, [(name, end.distance, end.gap) for name, end in ends], [point[:2] for point in known])
    return figure
