"""The picture of the trade-off: forget against test accuracy, a point for every step of every iterative method.

Methods that take one step, or none, are single points. What counts is how near a curve comes to Retrained, not how
low forget accuracy falls: below Retrained's it tells of a method that goes on after it has forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfu.reporting.columns import Metrics, rows_of
from sfu.reporting.figures import finish_axes, plain, save_figure
from sfu.reporting.heading import headline
from sfu.reporting.palette import BLACK, CURVES, GREEN, MARKERS
from sfu.reporting.verdict import is_tuned_on_retrained, sees_retained

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Path_ = Mapping[str, Sequence[float]]
OURS = ("unlearned_minus", "closed_form")
_OTHERS = (*(colour for colour in CURVES if colour not in (BLACK, GREEN)), "#6A3D9A", "#8C510A")
NEAREST, FURTHEST = 0.5, 6.0
"""Bounds of half the width of the enlarged panel, in points around Retrained."""


def _draw(axes: Axes, rows: Metrics, paths: Mapping[str, Path_]) -> None:
    others = [name for name in paths if name != "retrained" and name not in OURS]
    for name, path in paths.items():
        index = others.index(name) if name in others else 0
        forget, test = path["forget_accuracy"], path["test_accuracy"]
        marked = name == "retrained" or name in OURS
        colour = BLACK if name == "retrained" else GREEN if name in OURS else _OTHERS[index % len(_OTHERS)]
        row = rows_of(rows).get(name, {})
        seen = " (retained data)" if sees_retained(row) else ""
        tuned = " (tuned on Retrained)" if is_tuned_on_retrained(row) else ""
        if len(forget) > 1:
            axes.plot(forget, test, "--" if seen else "-", color=colour, linewidth=0.8, alpha=0.6, zorder=2)
            axes.plot(forget, test, ".", color=colour, markersize=2.5, alpha=0.6, zorder=2)
        axes.plot(
            forget[-1], test[-1], linestyle="none", color=colour, zorder=5 if marked else 3,
            marker="*" if name == "retrained" else "D" if name in OURS else MARKERS[index % (len(MARKERS) - 1)],
            markersize=17 if name == "retrained" else 7 if marked else 6,
            markerfacecolor="none" if name == "retrained" else "white" if seen else colour,
            markeredgewidth=1.5 if name == "retrained" else 1.0, label=plain(name + seen + tuned),
        )  # fmt: skip


def half_width(paths: Mapping[str, Path_], forget: float, test: float) -> float:
    """Around Retrained, what holds the ends of three methods in four, within bounds."""
    ends = [(path["forget_accuracy"][-1] - forget, path["test_accuracy"][-1] - test) for path in paths.values()]
    away = sorted(max(abs(x), abs(y)) for x, y in ends)
    return min(max(NEAREST, 1.25 * away[(3 * (len(away) - 1)) // 4]), FURTHEST)


def save_trade_off_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draws ``trade_off.json``, which lies beside ``path``: all of it, and the neighbourhood of Retrained enlarged.

    Args:
        metrics: The content of metrics.json, for names and marks.
        path: The file; its suffix (``.png``, ``.pdf``, ``.svg``) chooses the format.
    """
    from matplotlib.figure import Figure

    paths: dict[str, Any] = json.loads(Path(path).with_name("trade_off.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(11.5, 5.0 + 0.2 * (len(paths) // 4)), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes in panels:
        _draw(axes, metrics, paths)
        axes.set_xlabel("forget accuracy (per cent)")
        axes.set_ylabel("test accuracy (per cent)")
        finish_axes(axes, grid="y")
    panels[0].set_title("Every step; the marker is the end", fontsize=10)
    centre = paths.get("retrained") or paths.get("original")
    if centre is not None:
        forget, test = centre["forget_accuracy"][-1], centre["test_accuracy"][-1]
        half = half_width(paths, forget, test)
        panels[1].set_xlim(forget - half, forget + half)
        panels[1].set_ylim(test - half, test + half)
    panels[1].set_title("Around Retrained (star)", fontsize=10)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(plain(headline(metrics)), fontsize=10.5)
    return save_figure(figure, path)
