"""The trade-off: forget against test accuracy, a point for every step of every iterative method.

Methods that take one step, or none, are single points. What counts is how near a curve comes to Retrained, not how
low the forget accuracy falls: a method that ends below Retrained went on after it had forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sfu.readers import Percent, Record, read_json, refusing
from sfu.reporting.pictures import drawing as draw
from sfu.reporting.words import run_headline
from sfu.results.aggregate import MethodResult, table_of_run
from sfu.results.rows import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Steps = Mapping[str, Sequence[float]]


class StepsRecord(Record):
    """One row of trade_off.json: accuracies in per cent after each step."""

    test_accuracy: Annotated[list[Percent], Field(min_length=1)]
    forget_accuracy: Annotated[list[Percent], Field(min_length=1)]


OURS = ("unlearned_minus", "closed_form")
NEAREST, FURTHEST = 0.5, 6.0
"""Bounds of half the width of the enlarged panel, in points around Retrained."""
_OTHERS = (draw.BLUE, draw.VERMILLION, draw.ORANGE, draw.PURPLE, draw.SKY, draw.GREY, "#6A3D9A", "#8C510A")


def read_steps(path: Path) -> dict[str, Steps]:
    """Read a trade_off.json.

    Raises:
        ArtifactError: It is missing or damaged.
    """
    with refusing(path, "Run again, with evaluation.trade_off=true."):
        return {name: dict(steps) for name, steps in read_json(path, dict[str, StepsRecord]).items()}


def save_trade_off_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draw ``trade_off.json``, which lies beside ``path``: all of it, and the neighbourhood of Retrained enlarged."""
    paths = read_steps(Path(path).with_name("trade_off.json"))
    rows = table_of_run(metrics).groups[0].rows
    figure = draw.new_figure(11.5, 5.0 + 0.2 * (len(paths) // 4))
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, ("Every step; the marker is the end", "Around Retrained (star)"), strict=True):
        _draw_paths(axes, rows, paths)
        axes.set(xlabel="forget accuracy (per cent)", ylabel="test accuracy (per cent)")
        draw.finish_axes(axes, title, grid="y")
    centre = paths.get("retrained") or paths.get("original")
    if centre is not None:
        forget, test = centre["forget_accuracy"][-1], centre["test_accuracy"][-1]
        half = half_width(paths, forget, test)
        panels[1].set(xlim=(forget - half, forget + half), ylim=(test - half, test + half))
    return draw.save_figure(draw.finish_figure(figure, run_headline(metrics), narrow=False, columns=4), path)


def _draw_paths(axes: Axes, rows: Mapping[str, MethodResult], paths: Mapping[str, Steps]) -> None:
    others = [name for name in paths if name != "retrained" and name not in OURS]
    for name, path in paths.items():
        forget, test, row = path["forget_accuracy"], path["test_accuracy"], rows.get(name)
        sees_retained = row is not None and row.access == "retained"
        label = name + (" (retained data)" if sees_retained else "")
        label += " (tuned on Retrained)" if row is not None and row.is_tuned_on_retrained else ""
        end: dict[str, Any]
        if name == "retrained":
            colour, end = draw.BLACK, {"marker": "*", "markersize": 17, "markeredgewidth": 1.5, "zorder": 5}
        elif name in OURS:
            colour, end = draw.GREEN, {"marker": "D", "markersize": 7, "zorder": 5}
        else:
            index = others.index(name)
            colour, end = draw.pick(_OTHERS, index), {"marker": draw.pick(draw.MARKERS[:-1], index), "zorder": 3}
        end["markerfacecolor"] = "none" if name == "retrained" else "white" if sees_retained else colour
        if len(forget) > 1:
            axes.plot(forget, test, "--" if sees_retained else "-", color=colour, linewidth=0.8, alpha=0.6, zorder=2)
            axes.plot(forget, test, ".", color=colour, markersize=2.5, alpha=0.6, zorder=2)
        axes.plot(forget[-1], test[-1], linestyle="none", color=colour, label=draw.plain(label), **end)


def half_width(paths: Mapping[str, Steps], forget: float, test: float) -> float:
    """Return what holds the ends of three methods in four around Retrained, within bounds."""
    ends = [(path["forget_accuracy"][-1] - forget, path["test_accuracy"][-1] - test) for path in paths.values()]
    away = sorted(max(abs(x), abs(y)) for x, y in ends)
    return min(max(NEAREST, 1.25 * away[(3 * (len(away) - 1)) // 4]), FURTHEST)
