"""One run, or one setting of many: the paper's Figure 1 (accuracies and membership inference) with the distance beside.

Bars lie on their side, so that names of any length are read without turning the head and any number of methods fits:
the figure grows, the letters do not shrink. Nothing here touches pyplot or its global state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.columns import Metrics, Row, rows_of
from sfu.reporting.figures import NARROW_INCHES, add_legend, add_title, finish_axes, plain, save_figure, scale_distance
from sfu.reporting.heading import headline
from sfu.reporting.palette import BARS, GREEN, GREY, VERMILLION
from sfu.reporting.sweep_plot import save_sweep_plot
from sfu.reporting.verdict import (
    is_source_free,
    is_tuned_on_retrained,
    is_worse_than_nothing,
    sees_retained,
    sees_stored,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["bar_figure", "save_bar_plot", "save_sweep_plot"]

Spreads = Mapping[str, Mapping[str, float]]

BAR_HEIGHT = 0.2
INCHES_PER_METHOD = 0.62
LABEL_SIZE = 7


def _label(name: str, row: Row) -> str:
    """The method's name and, under it, the data it may have read beyond the forget set."""
    seen = "\n(sees retained data)" if sees_retained(row) else "\n(sees stored statistics)" if sees_stored(row) else ""
    return plain(name) + seen + ("\n(tuned on Retrained)" if is_tuned_on_retrained(row) else "")


def _draw_accuracies(axes: Axes, rows: Mapping[str, Row], spreads: Spreads) -> None:
    for position, (key, label, colour, hatch) in enumerate(BARS):
        centres = [index + (position - 1.5) * BAR_HEIGHT for index in range(len(rows))]
        values = [row.get(key) for row in rows.values()]
        found = [spreads.get(name, {}).get(key) for name in rows]
        axes.barh(
            centres,
            [value if fmt.is_number(value) else 0.0 for value in values],
            height=BAR_HEIGHT * 0.92,
            color=colour,
            hatch=hatch,
            edgecolor="white" if not hatch else "#333333",
            linewidth=0.4,
            label=label,
        )
        for centre, value, spread in zip(centres, values, found, strict=True):
            end = value if fmt.is_number(value) else 0.0
            if fmt.is_number(value) and fmt.is_number(spread):
                axes.errorbar(end, centre, xerr=spread, color="black", capsize=1.8, linewidth=0.9, capthick=0.9)
                end += spread
            shown = fmt.fixed(value) if fmt.is_number(value) else "n/a"
            axes.annotate(shown, (end, centre), (3, 0), textcoords="offset points", va="center", fontsize=LABEL_SIZE)
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("per cent")
    axes.set_title("Accuracy and membership inference", fontsize=10)


def _draw_distance(axes: Axes, rows: Mapping[str, Row], spreads: Spreads) -> None:
    axes.set_title("Distance to Retrained", fontsize=10)
    values: Sequence[Any] = [row.get("distance") for row in rows.values()]
    known = [value for value in values if fmt.is_number(value)]
    if not known:
        axes.set_xticks([])
        axes.text(
            0.5, 0.5, "no distance:\nno Retrained row\nin this run", transform=axes.transAxes, ha="center", va="center"
        )
        return
    for index, (name, row, value) in enumerate(zip(rows, rows.values(), values, strict=True)):
        spread = spreads.get(name, {}).get("distance") or 0.0
        worse = is_worse_than_nothing(row)
        source_free = is_source_free(row)
        axes.barh(
            index,
            value if fmt.is_number(value) else 0.0,
            height=0.5,
            color=VERMILLION if worse else GREEN if source_free else "#CCCCCC",
            hatch="xxxx" if worse else "" if source_free else "////",
            edgecolor="#333333",
            linewidth=0.4,
            xerr=spread or None,
            error_kw={"elinewidth": 0.9, "capsize": 1.8},
        )
        shown = fmt.compact(value) if fmt.is_number(value) else "n/a"
        axes.annotate(
            f"{shown} worse" if worse else shown,
            (value + spread if fmt.is_number(value) else 0.0, index),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_SIZE + 1,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            fontweight="bold" if worse else "normal",
        )
    reach = [spreads.get(name, {}).get("distance") or 0.0 for name in rows]
    scale_distance(axes, max(value + r for value, r in zip(values, reach, strict=True) if fmt.is_number(value)))
    axes.axvline(0, color="black", linewidth=1.2)
    axes.axvline(1, color=GREY, linewidth=1.2, linestyle="--", zorder=0)


def save_bar_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draws one run: for each method its accuracies and the attack's accuracy, and its distance to Retrained.

    Args:
        metrics: The content of metrics.json.
        path: The file; its suffix (``.png``, ``.pdf``, ``.svg``) chooses the format.

    Returns:
        The path written.
    """
    rows = rows_of(metrics)
    spreads = {name: {"mia": row["mia_std"]} for name, row in rows.items() if fmt.is_number(row.get("mia_std"))}
    return save_figure(bar_figure(rows, spreads, headline(metrics)), path)


def bar_figure(rows: Mapping[str, Row], spreads: Spreads, title: str, narrow: bool = False) -> Figure:
    """The picture itself.

    Args:
        rows: What metrics.json holds under ``rows``, or the means of several runs in that shape.
        spreads: The length of each error bar, by method and metric.
        title: What stands above.
        narrow: One panel under the other, for the width of a telephone.
    """
    from matplotlib.figure import Figure

    longest = max((len(name) for name in rows), default=0)
    tall = 1.75 + INCHES_PER_METHOD * max(len(rows), 2)
    size = (NARROW_INCHES, tall * 1.65) if narrow else (8.4 + 0.065 * max(longest, 20), tall)
    figure = Figure(figsize=size, layout="constrained")
    if narrow:
        left, right = figure.subplots(2, 1, sharey=True, height_ratios=(1.5, 1.0))
    else:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.7, 1.0))
        right.tick_params(axis="y", left=False)
    _draw_accuracies(left, rows, spreads)
    _draw_distance(right, rows, spreads)
    left.set_yticks(range(len(rows)), [_label(name, row) for name, row in rows.items()])
    left.set_ylim(max(len(rows), 1) - 0.45, -0.55)
    for axes in (left, right):
        finish_axes(axes)
    add_title(figure, title, narrow)
    add_legend(figure, left, 2 if narrow else 4)
    return figure
