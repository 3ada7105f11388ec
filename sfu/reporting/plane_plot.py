"""The distance-accuracy plane: how far from Retrained a method ended, against what its test accuracy lost by it.

Retrained stands at the origin. Accuracy alone cannot tell methods apart that this picture puts far from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import methods_of, spread_of
from sfu.reporting.figures import NARROW_INCHES, add_legend, add_title, finish_axes, plain, scale_distance
from sfu.reporting.palette import CURVES, GREY, MARKERS
from sfu.reporting.sweep_plot import title_of
from sfu.reporting.sweep_words import Aggregate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR_POINTS = 2.0
"""Gaps up to this many points are drawn to scale; beyond, logarithmically."""

Point = tuple[float, float, float, float]


def plane_points(total: Aggregate, name: str) -> list[Point]:
    """Distance and test gap of a method at each setting, each followed by its spread."""
    found = []
    for group in total["groups"]:
        metrics: Mapping[str, Any] = (group["rows"].get(name) or {}).get("metrics") or {}
        distance, gap = metrics.get("distance") or {}, metrics.get("test_gap") or {}
        if fmt.is_number(distance.get("mean")) and fmt.is_number(gap.get("mean")):
            spreads = (spread_of(total, distance) or 0.0, spread_of(total, gap) or 0.0)
            found.append((distance["mean"], gap["mean"], *spreads))
    return found


def plane_names(total: Aggregate) -> list[str]:
    """Methods that have a place in the plane: both a distance and a gap are known at some setting."""
    return [name for name in methods_of(total) if plane_points(total, name)]


def plane_figure(total: Aggregate, narrow: bool = False) -> Figure:
    """Every setting of every method of ``plane_names`` (one at least), a method's settings joined if one key varies."""
    from matplotlib.figure import Figure

    points = {name: plane_points(total, name) for name in plane_names(total)}
    known = [point for found in points.values() for point in found]
    width = NARROW_INCHES if narrow else 8.4
    figure = Figure(figsize=(width, 4.6 + 0.2 * len(points) / (2 if narrow else 3)), layout="constrained")
    axes = figure.subplots()
    for index, (name, found) in enumerate(points.items()):
        _draw_method(axes, index, name, found, joined=len(total["varied"]) == 1)
    scale_distance(axes, max(max(x + dx for x, _, dx, _ in known), 1.0))
    axes.set_xlim(left=-0.04)
    _scale_gap(axes, [y for _, y, _, _ in known])
    axes.axhline(0, color="black", linewidth=0.8, zorder=0)
    axes.axvline(0, color="black", linewidth=0.8, zorder=0)
    axes.axvline(1, color=GREY, linewidth=1.2, linestyle="--", zorder=0)
    finish_axes(axes, grid="y")
    add_title(figure, title_of(total), narrow)
    add_legend(figure, axes, 2 if narrow else 3)
    return figure


def _draw_method(axes: Axes, index: int, name: str, found: Sequence[Point], joined: bool) -> None:
    xs, ys, dxs, dys = zip(*found, strict=True)
    axes.errorbar(
        xs,
        ys,
        xerr=dxs,
        yerr=dys,
        color=CURVES[index % len(CURVES)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=6,
        markerfacecolor="white" if index % 2 else None,
        linewidth=0.7,
        linestyle="-" if joined else "none",
        elinewidth=0.9,
        capsize=2,
        alpha=0.9,
        label=plain(name),
    )


def _scale_gap(axes: Axes, gaps: Sequence[float]) -> None:
    widest = max(abs(gap) for gap in gaps)
    if widest > 5 * LINEAR_POINTS:
        axes.set_yscale("symlog", linthresh=LINEAR_POINTS, linscale=1.5)
        ticks = [0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
        low, high = min([*gaps, -1.0]) * 1.3, max([*gaps, 1.0]) * 1.3
        axes.set_yticks(sorted({s * t for t in ticks for s in (1, -1) if low <= s * t <= high}))
        axes.set_ylim(low, high)
        axes.yaxis.set_minor_locator(_nothing())
    axes.yaxis.set_major_formatter(_signed())
    note = f"\nlogarithmic beyond {LINEAR_POINTS:g}" if widest > 5 * LINEAR_POINTS else ""
    axes.set_ylabel(f"test accuracy, points from Retrained{note}")


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _signed() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:+.3g}" if value else "0")
