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
from sfu.reporting.columns import COLUMNS, column_of
from sfu.reporting.pictures.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    HATCHES,
    NARROW_INCHES,
    ORANGE,
    SKY,
    VERMILLION,
    ends_of,
    finish_axes,
    finish_distance,
    finish_figure,
    new_figure,
    plain,
    save_figure,
)
from sfu.reporting.words import run_headline
from sfu.results.aggregate import MethodResult, ResultTable, table_of_run
from sfu.results.rows import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BARS = (
    ("test_accuracy", BLUE, ""),
    ("remain_accuracy", SKY, "////"),
    ("forget_accuracy", ORANGE, "...."),
    ("mia", "#BBBBBB", "xxxx"),
)
"""Metric, colour and hatch of the four bars of Figure 1."""
PANELS = (("test_accuracy", "Test accuracy (per cent)"), ("distance", "Distance to Retrained"))
"""What pictures of many settings show."""
TALLEST_INCHES = 100.0

SpreadOf = Callable[[MethodResult, str], float | None]


def draw_bars(
    axes: Axes,
    centres: Sequence[float],
    values: Sequence[float | None],
    spreads: Sequence[float | None],
    texts: Sequence[str],
    height: float,
    **style: Any,
) -> None:
    """Draw bars with error bars, each with its text after it; a missing value is an empty bar.

    Args:
        axes: The panel.
        centres: Where the bars stand.
        values: How long they are.
        spreads: Half the length of each error bar; None: no error bar.
        texts: What stands after each bar that has a value.
        height: How thick the bars are.
        **style: What ``Axes.barh`` takes.
    """
    lengths = [0.0 if value is None else value for value in values]
    errors = [nan if value is None or spread is None else spread for value, spread in zip(values, spreads, strict=True)]
    error_style = {"elinewidth": 0.9, "capsize": 1.8}
    axes.barh(centres, lengths, height=height, xerr=errors, error_kw=error_style, **style)
    place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7}
    for centre, value, error, text in zip(centres, values, errors, texts, strict=True):
        end = (value or 0.0) + (0.0 if isnan(error) else error)
        axes.annotate("n/a" if value is None else text, (end, centre), (4, 0), **place)


def _label(name: str, row: MethodResult) -> str:
    """The method's name and, under it, the data it may have read beyond the forget set."""
    reads = {"retained": "\n(sees retained data)", "stored": "\n(sees stored statistics)"}.get(row.access or "", "")
    return plain(name) + reads + ("\n(tuned on Retrained)" if row.is_tuned_on_retrained else "")


def _draw_accuracies(axes: Axes, rows: Sequence[MethodResult], spread_of: SpreadOf) -> None:
    height = 0.2
    for position, (key, colour, hatch) in enumerate(BARS):
        values = [row.mean(key) for row in rows]
        draw_bars(
            axes,
            [index + (position - 1.5) * height for index in range(len(rows))],
            values,
            [spread_of(row, key) for row in rows],
            list(map(fmt.fixed, values)),
            height * 0.92,
            color=colour,
            hatch=hatch,
            edgecolor="#333333" if hatch else "white",
            linewidth=0.4,
            label=COLUMNS[key].name,
        )
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("per cent")
    finish_axes(axes, "Accuracy and membership inference")


def _draw_distances(axes: Axes, rows: Sequence[MethodResult], spread_of: SpreadOf) -> None:
    values = [row.mean("distance") for row in rows]
    spreads = [spread_of(row, "distance") for row in rows]
    known = [value + (spread or 0.0) for value, spread in zip(values, spreads, strict=True) if value is not None]
    if known:
        worse = [row.is_worse_than_nothing for row in rows]
        free = [row.is_source_free for row in rows]
        draw_bars(
            axes,
            range(len(rows)),
            values,
            spreads,
            [fmt.compact(value) + (" worse" if bad else "") for value, bad in zip(values, worse, strict=True)],
            0.5,
            color=[VERMILLION if bad else GREEN if ours else "#CCCCCC" for bad, ours in zip(worse, free, strict=True)],
            hatch=["xxxx" if bad else "" if ours else "////" for bad, ours in zip(worse, free, strict=True)],
            edgecolor="#333333",
            linewidth=0.4,
        )
        for text, bad in zip(axes.texts, worse, strict=True):
            text.set(fontsize=8, fontweight="bold" if bad else "normal")
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})
    finish_distance(axes, known)
    finish_axes(axes, "Distance to Retrained")


def bar_figure(rows: Mapping[str, MethodResult], spread_of: SpreadOf, title: str, narrow: bool = False) -> Figure:
    """Draw one run, or one setting of many.

    Args:
        rows: The methods by name.
        spread_of: The length of the error bar of a method's metric, or None.
        title: What stands above.
        narrow: One panel under the other, for the width of a telephone.
    """
    longest = max((len(name) for name in rows), default=0)
    tall = 1.75 + 0.62 * max(len(rows), 2)
    if narrow:
        figure = new_figure(NARROW_INCHES, tall * 1.65)
        left, right = figure.subplots(2, 1, sharey=True, height_ratios=(1.5, 1.0))
    else:
        figure = new_figure(8.4 + 0.065 * max(longest, 20), tall)
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1.0))
        right.tick_params(axis="y", left=False)
    _draw_accuracies(left, list(rows.values()), spread_of)
    _draw_distances(right, list(rows.values()), spread_of)
    left.set_yticks(range(len(rows)), [_label(name, row) for name, row in rows.items()])
    left.set_ylim(max(len(rows), 1) - 0.45, -0.55)
    return finish_figure(figure, title, narrow, 2 if narrow else 4)


def save_bar_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draw a run: each method's accuracies, the attack's accuracy with its deviation, and the distance to Retrained.

    Args:
        metrics: The content of metrics.json.
        path: The file; its suffix (``.png``, ``.pdf``, ``.svg``) chooses the format.
    """
    rows = table_of_run(metrics).groups[0].rows
    figure = bar_figure(rows, lambda row, key: row.mean("mia_std") if key == "mia" else None, run_headline(metrics))
    return save_figure(figure, path)


def sweep_bar_figure(table: ResultTable, title: str, narrow: bool = False) -> Figure:
    """Draw test accuracies and distances, one block of bars a setting; in narrow form one panel under the other."""
    methods, groups = table.methods, table.groups
    blocks, step = max(len(groups), 1), 1.0 / (len(methods) + 1)
    height = 1.6 + blocks * max(0.18 * (len(methods) + 1), 0.5) + 0.2 * ((len(methods) + 2) // 3)
    height = min(1.9 * height if narrow else height, TALLEST_INCHES)
    figure = new_figure(NARROW_INCHES if narrow else 10.0, height)
    left, right = figure.subplots(2, 1, sharey=True) if narrow else figure.subplots(1, 2, sharey=True)
    for axes, (metric, panel) in zip((left, right), PANELS, strict=True):
        for index, name in enumerate(methods):
            found = [
                (block + (index - (len(methods) - 1) / 2) * step, group.rows[name][metric])
                for block, group in enumerate(groups)
                if name in group.rows and group.rows[name].mean(metric) is not None
            ]
            entries = [entry for _, entry in found]
            spreads = [table.spread_of(entry) for entry in entries]
            texts = [
                fmt.spread(entry.mean, spread, column_of(metric).write)
                for entry, spread in zip(entries, spreads, strict=True)
            ]
            draw_bars(
                axes,
                [centre for centre, _ in found],
                [entry.mean for entry in entries],
                spreads,
                texts,
                step * 0.9,
                color=COLOURS[index % len(COLOURS)],
                hatch=HATCHES[index % len(HATCHES)],
                edgecolor="white",
                linewidth=0.3,
                label=plain(name),
            )
        finish_axes(axes, panel)
    finish_distance(right, ends_of(table, table.results, "distance"))
    labels = ["\n".join(plain(f"{key} = {value}") for key, value in group.overrides.items()) for group in groups]
    left.set_yticks(range(len(groups)), labels)
    left.set_ylim(blocks - 0.45, -0.55)
    left.set_xlim(0, 125)
    left.set_xticks(range(0, 101, 20))
    return finish_figure(figure, title, narrow, 2 if narrow else 3)
