"""The picture of a sweep: test accuracy and distance to Retrained, with the spread over seeds.

One numeric setting swept: curves with bands of one spread (standard deviation, or standard error where the aggregate
says so). Anything else: bars, one block a setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import SPREADS, mean_of, methods_of, number_of, spread_of
from sfu.reporting.figures import (
    NARROW_INCHES,
    add_legend,
    add_title,
    finish_axes,
    plain,
    save_figure,
    scale_distance,
)
from sfu.reporting.palette import CURVES, DASHES, GREY, HATCHES, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Aggregate = Mapping[str, Any]
PANELS = (("test_accuracy", "Test accuracy (per cent)"), ("distance", "Distance to Retrained"))
TALLEST_INCHES = 100.0


def numeric_key(total: Aggregate) -> str | None:
    """The swept key if exactly one key varies and all its values are numbers."""
    if len(total["varied"]) != 1:
        return None
    key = str(total["varied"][0])
    values = [number_of(group["overrides"][key]) for group in total["groups"]]
    return key if len(values) > 1 and None not in values else None


def _largest_distance(total: Aggregate) -> float:
    found = [1.0]
    for group in total["groups"]:
        for row in group["rows"].values():
            entry = row["metrics"].get("distance") or {}
            if entry.get("mean") is not None:
                found.append(entry["mean"] + (spread_of(total, entry) or 0.0))
    return max(found)


def _has_distance(total: Aggregate) -> bool:
    return any(mean_of(row, "distance") is not None for group in total["groups"] for row in group["rows"].values())


def _scale_swept(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where values span more than a factor of 30, with a linear stretch around a swept zero."""
    positive = [value for value in values if value > 0]
    if positive and min(values) >= 0 and max(positive) / min(positive) > 30:
        if min(values) > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=min(positive))
    if len(values) <= 8:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.set_xticks([], minor=True)


def _draw_curves(axes: Axes, total: Aggregate, key: str, metric: str) -> None:
    for index, name in enumerate(methods_of(total)):
        found = []
        access = None
        for group in total["groups"]:
            row = group["rows"].get(name)
            mean = mean_of(row, metric) if row else None
            if row and mean is not None:
                access = row["access"]
                found.append((float(group["overrides"][key]), mean, spread_of(total, row["metrics"][metric]) or 0.0))
        if not found:
            continue
        xs, means, stds = (list(column) for column in zip(*found, strict=True))
        colour = CURVES[index % len(CURVES)]
        axes.plot(
            xs,
            means,
            color=colour,
            linestyle=DASHES[(index // len(CURVES) + (access != "forget")) % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            markerfacecolor=colour if access == "forget" else "white",
            linewidth=1.4,
            clip_on=metric != "distance",
            label=plain(name),
        )
        low = [mean - std for mean, std in zip(means, stds, strict=True)]
        high = [mean + std for mean, std in zip(means, stds, strict=True)]
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(key)


def enlargement(total: Aggregate) -> tuple[float, float] | None:
    """Limits that show the good curves apart where a bad one would flatten them, or None where none does."""
    means = [mean_of(row, "test_accuracy") for group in total["groups"] for row in group["rows"].values()]
    known = [mean for mean in means if mean is not None]
    near = [mean for mean in known if mean > max(known) - 5.0]
    if len(near) < 2 or max(known) - min(known) < 15.0:
        return None
    margin = 0.1 + 0.08 * (max(near) - min(near))
    return min(near) - margin, max(near) + margin


def curve_figure(total: Aggregate, key: str, narrow: bool = False) -> Figure:
    """Curves over one numeric key, the only one that varies; in narrow form one panel under the other."""
    from matplotlib.figure import Figure

    zoom = enlargement(total)
    specs = [PANELS[0], *([("test_accuracy", "Test accuracy, enlarged")] if zoom else []), PANELS[1]]
    height = 4.0 + 0.2 * ((len(methods_of(total)) + 2) // 3)
    wide = (5.0 * len(specs) - (2.0 if zoom else 0.0), height)
    size = (NARROW_INCHES, 0.8 + 2.9 * len(specs) + 0.2 * len(methods_of(total)) / 2) if narrow else wide
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(specs), 1) if narrow else figure.subplots(1, len(specs))
    values = [float(group["overrides"][key]) for group in total["groups"]]
    for axes, (metric, title) in zip(panels, specs, strict=True):
        _draw_curves(axes, total, key, metric)
        axes.set_title(title, fontsize=10)
        _scale_swept(axes, values)
        finish_axes(axes, grid="y")
    if zoom:
        panels[1].set_ylim(*zoom)
    last = panels[-1]
    if _has_distance(total):
        scale_distance(last, _largest_distance(total), along="y")
        last.axhline(0, color="black", linewidth=1.0, zorder=0)
        last.axhline(1, color=GREY, linewidth=1.2, linestyle="--", zorder=0)
    else:
        last.text(0.5, 0.5, "no distance known", transform=last.transAxes, ha="center")
    add_title(figure, title_of(total), narrow)
    add_legend(figure, panels[0], 2 if narrow else 3)
    return figure


def _draw_bars(axes: Axes, total: Aggregate, metric: str, methods: Sequence[str], step: float) -> None:
    kind = "compact" if metric == "distance" else "percent"
    for index, name in enumerate(methods):
        centres, means, stds, texts = [], [], [], []
        for block, group in enumerate(total["groups"]):
            row = group["rows"].get(name)
            entry = (row["metrics"].get(metric) if row else None) or {}
            if entry.get("mean") is not None:
                centres.append(block + (index - (len(methods) - 1) / 2) * step)
                means.append(entry["mean"])
                stds.append(spread_of(total, entry) or 0.0)
                texts.append(fmt.spread(entry["mean"], spread_of(total, entry), kind))
        axes.barh(
            centres,
            means,
            height=step * 0.9,
            color=CURVES[index % len(CURVES)],
            hatch=HATCHES[index % len(HATCHES)],
            edgecolor="white",
            linewidth=0.3,
            xerr=stds,
            error_kw={"elinewidth": 0.9, "capsize": 1.8},
            label=plain(name),
        )
        for centre, mean, std, shown in zip(centres, means, stds, texts, strict=True):
            place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            axes.annotate(shown, (mean + std, centre), (4, 0), **place)


def sweep_bar_figure(total: Aggregate, narrow: bool = False) -> Figure:
    """Bars, one block a setting; in narrow form one panel under the other."""
    from matplotlib.figure import Figure

    methods = methods_of(total)
    groups = total["groups"]
    blocks = max(len(groups), 1)
    per_block = 0.18 * (len(methods) + 1)
    height = min(1.6 + blocks * max(per_block, 0.5) + 0.2 * ((len(methods) + 2) // 3), TALLEST_INCHES)
    size = (NARROW_INCHES, min(1.9 * height, TALLEST_INCHES)) if narrow else (10.0, height)
    figure = Figure(figsize=size, layout="constrained")
    left, right = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
    for axes, (metric, title) in zip((left, right), PANELS, strict=True):
        _draw_bars(axes, total, metric, methods, 1.0 / (len(methods) + 1))
        axes.set_title(title, fontsize=10)
        finish_axes(axes)
    labels = ["\n".join(plain(f"{key} = {value}") for key, value in group["overrides"].items()) for group in groups]
    left.set_yticks(range(len(groups)), labels)
    left.set_ylim(blocks - 0.45, -0.55)
    left.set_xlim(0, 125)
    left.set_xticks(range(0, 101, 20))
    if _has_distance(total):
        scale_distance(right, _largest_distance(total))
        right.axvline(1, color=GREY, linewidth=1.2, linestyle="--", zorder=0)
    else:
        right.text(0.5, 0.5, "no distance known", transform=right.transAxes, ha="center")
    add_title(figure, title_of(total), narrow)
    add_legend(figure, left, 2 if narrow else 3)
    return figure


def title_of(total: Aggregate) -> str:
    """What stands above a picture of many runs."""
    over = " and ".join(total["over"]) or "nothing"
    done = total["n_runs"] - len(total["failed"])
    fixed = "".join(f", {key} = {value}" for key, value in (total.get("at") or {}).items())
    return f"{done} of {total['n_runs']} runs{fixed}: mean and {SPREADS[total['spread']]} over {over}"


def save_sweep_plot(total: Aggregate, path: str | Path) -> Path:
    """Draws a sweep: curves with bands over one numeric key, else bars.

    Args:
        total: What ``aggregate`` returned.
        path: The file; its suffix (``.png``, ``.pdf``, ``.svg``) chooses the format.

    Returns:
        The path written.
    """
    key = numeric_key(total)
    return save_figure(curve_figure(total, key) if key else sweep_bar_figure(total), path)
