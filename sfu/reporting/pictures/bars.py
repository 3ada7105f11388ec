"""Bars: the paper's Figure 1 (accuracies and membership inference) with the distance beside it, and bars of a sweep.

Bars lie on their side, so that names of any length can be read without turning the head, and any number of methods
fits: the figure grows, the letters do not shrink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.columns import COLUMNS
from sfu.reporting.pictures import drawing as draw
from sfu.reporting.words import run_headline
from sfu.results.aggregate import MethodResult, ResultTable, table_of_run
from sfu.results.rows import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_1 = {
    "test_accuracy": (draw.BLUE, ""),
    "remain_accuracy": (draw.SKY, "////"),
    "forget_accuracy": (draw.ORANGE, "...."),
    "mia": ("#BBBBBB", "xxxx"),
}
"""Colour and hatch of each metric."""
TALLEST_INCHES = 100.0

SpreadOf = Callable[[MethodResult, str], float | None]
Bar = tuple[float | None, float | None, str]
"""Length, spread and the text after it."""


def bar_figure(rows: Mapping[str, MethodResult], spread_of: SpreadOf, title: str, narrow: bool = False) -> Figure:
    """Draw one run, or one setting of many; in narrow form, for a telephone, one panel under the other.

    ``spread_of`` gives the length of the error bar of a method's metric, or None.
    """
    longest = max((len(name) for name in rows), default=0)
    tall = 1.75 + 0.62 * max(len(rows), 2)
    if narrow:
        figure = draw.new_figure(draw.NARROW_INCHES, tall * 1.65)
        left, right = figure.subplots(2, 1, sharey=True, height_ratios=(1.5, 1.0))
    else:
        figure = draw.new_figure(8.4 + 0.065 * max(longest, 20), tall)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1.0))
        right.tick_params(axis="y", left=False)
    _draw_accuracies(left, list(rows.values()), spread_of)
    _draw_distances(right, list(rows.values()), spread_of)
    left.set_yticks(range(len(rows)), [_label(name, row) for name, row in rows.items()])
    left.set_ylim(max(len(rows), 1) - 0.45, -0.55)
    return draw.finish_figure(figure, title, narrow, 2 if narrow else 4)


def save_bar_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draw a run into a file: its accuracies, the attack's accuracy with its deviation, and the distances."""
    rows = table_of_run(metrics).groups[0].rows
    figure = bar_figure(rows, lambda row, key: row.mean("mia_std") if key == "mia" else None, run_headline(metrics))
    return draw.save_figure(figure, path)


def sweep_bar_figure(table: ResultTable, title: str, narrow: bool = False) -> Figure:
    """Draw test accuracies and distances, one block of bars a setting; in narrow form one panel under the other."""
    methods, groups = table.methods, table.groups
    blocks, step = max(len(groups), 1), 1.0 / (len(methods) + 1)
    height = 1.6 + blocks * max(0.18 * (len(methods) + 1), 0.5) + 0.2 * ((len(methods) + 2) // 3)
    height = min(1.9 * height if narrow else height, TALLEST_INCHES)
    figure = draw.new_figure(draw.NARROW_INCHES if narrow else 10.0, height)
    left, right = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
    for axes, (metric, panel) in zip((left, right), draw.PANELS, strict=True):
        for index, name in enumerate(methods):
            centres = [block + (index - (len(methods) - 1) / 2) * step for block in range(len(groups))]
            bars = []
            for group in groups:
                mean, spread = (entry := group.entry(name, metric)).mean, table.spread_of(entry)
                bars.append((mean, spread, "" if mean is None else fmt.spread(mean, spread, COLUMNS[metric].write)))
            style = {"color": draw.pick(draw.COLOURS, index), "hatch": draw.pick(draw.HATCHES, index)}
            style |= {"edgecolor": "white", "label": draw.plain(name)}
            _draw_bars(axes, centres, bars, step * 0.9, **style)
        draw.finish_axes(axes, panel)
    draw.finish_distance(right, draw.distance_ends(table))
    labels = ["\n".join(draw.plain(f"{key} = {value}") for key, value in group.overrides.items()) for group in groups]
    left.set_yticks(range(len(groups)), labels)
    left.set_ylim(blocks - 0.45, -0.55)
    left.set_xlim(0, 125)
    left.set_xticks(range(0, 101, 20))
    return draw.finish_figure(figure, title, narrow, 2 if narrow else 3)


def _label(name: str, row: MethodResult) -> str:
    """The method's name and, under it, the data it may have read beyond the forget set."""
    reads = {"retained": "\n(sees retained data)", "stored": "\n(sees stored statistics)"}.get(row.access or "", "")
    return draw.plain(name) + reads + ("\n(tuned on Retrained)" if row.is_tuned_on_retrained else "")


def _draw_accuracies(axes: Axes, rows: Sequence[MethodResult], spread_of: SpreadOf) -> None:
    for position, (key, (colour, hatch)) in enumerate(FIGURE_1.items()):
        bars = [(row.mean(key), spread_of(row, key), _or_none(row.mean(key), fmt.fixed)) for row in rows]
        centres = [index + 0.2 * (position - 1.5) for index in range(len(rows))]
        style = {"color": colour, "hatch": hatch, "label": COLUMNS[key].name}
        style["edgecolor"] = "#333333" if hatch else "white"
        _draw_bars(axes, centres, bars, 0.184, **style)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("per cent")
    draw.finish_axes(axes, "Accuracy and membership inference")


def _draw_distances(axes: Axes, rows: Sequence[MethodResult], spread_of: SpreadOf) -> None:
    bars = []
    for row in rows:
        value, worse = row.mean("distance"), " worse" if row.is_worse_than_nothing else ""
        bars.append((value, spread_of(row, "distance"), _or_none(value, fmt.compact) + worse))
    known = [value + (spread or 0.0) for value, spread, _ in bars if value is not None]
    if known:
        worst, free, other = (draw.VERMILLION, "xxxx"), (draw.GREEN, ""), ("#CCCCCC", "////")
        looks = [worst if row.is_worse_than_nothing else free if row.is_source_free else other for row in rows]
        colours, hatches = zip(*looks, strict=True)
        _draw_bars(axes, range(len(rows)), bars, 0.5, edgecolor="#333333", color=colours, hatch=hatches)
        for row, text in zip(rows, axes.texts, strict=True):
            text.set(fontsize=8, fontweight="bold" if row.is_worse_than_nothing else "normal")
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    draw.finish_distance(axes, known)
    draw.finish_axes(axes, "Distance to Retrained")


def _or_none(value: float | None, write: Callable[[float], str]) -> str:
    return "n/a" if value is None else write(value)


def _draw_bars(axes: Axes, centres: Sequence[float], bars: Sequence[Bar], height: float, **style: Any) -> None:
    """Draw bars with an error bar where there is a spread, each with its text after it."""
    lengths = [value or 0.0 for value, _, _ in bars]
    errors = [nan if value is None or spread is None else spread for value, spread, _ in bars]
    error_style = {"elinewidth": 0.9, "capsize": 1.8}
    axes.barh(centres, lengths, height=height, xerr=errors, error_kw=error_style, linewidth=0.4, **style)
    for centre, length, error, (_, _, text) in zip(centres, lengths, errors, bars, strict=True):
        end = length + (0.0 if isnan(error) else error)
        axes.annotate(text, (end, centre), (4, 0), textcoords="offset points", va="center", fontsize=7)
