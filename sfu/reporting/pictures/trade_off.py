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
from sfu.reporting.pictures.labels import label_points
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


NEAREST, FURTHEST = 0.5, 6.0
"""Bounds of half the width of the enlarged panel, in points around Retrained."""


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
    figure = draw.new_figure(draw.WIDE_INCHES, 5.0 + 0.1 * len(paths))
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, ("Every step; the marker is the end", "Around Retrained (star)"), strict=True):
        _draw_paths(axes, rows, paths)
        axes.set(xlabel="forget accuracy (per cent)", ylabel="test accuracy (per cent)")
        draw.finish_axes(axes, title, grid="y")
    centre = paths.get("retrained") or paths.get("original")
    if centre is not None:
        forget, test = _end(centre)
        half = half_width(paths, forget, test)
        panels[1].set(xlim=(forget - half, forget + half), ylim=(test - half, test + half))
    draw.finish_figure(figure, run_headline(metrics), narrow=False, columns=5)
    names = [(_label(name, rows.get(name)), *_end(path)) for name, path in paths.items() if name not in draw.LOOKS]
    for axes in panels:
        label_points(axes, names, [_end(path) for path in paths.values()])
    return draw.save_figure(figure, path)


def _end(path: Steps) -> tuple[float, float]:
    return path["forget_accuracy"][-1], path["test_accuracy"][-1]


def _label(name: str, row: MethodResult | None) -> str:
    sees = " (retained data)" if row is not None and row.access == "retained" else ""
    return name + sees + (" (tuned on Retrained)" if row is not None and row.is_tuned_on_retrained else "")


def _draw_paths(axes: Axes, rows: Mapping[str, MethodResult], paths: Mapping[str, Steps]) -> None:
    """Draw every path: dashed if it sees more than the forget set, with a hollow end if its step was not applied."""
    for name, path in paths.items():
        forget, test, row = path["forget_accuracy"], path["test_accuracy"], rows.get(name)
        style = draw.marker_style(name, row is None or not row.is_withheld)
        if len(forget) > 1:
            dashes = "--" if row is not None and draw.sees_more(row) else "-"
            line: dict[str, Any] = {"color": style["color"], "alpha": 0.6, "zorder": 2}
            axes.plot(forget, test, dashes, linewidth=0.8, **line)
            axes.plot(forget, test, ".", markersize=2.5, **line)
        label = draw.plain(_label(name, row)) if name in draw.LOOKS else None
        axes.plot(*_end(path), linestyle="none", label=label, **style)


def half_width(paths: Mapping[str, Steps], forget: float, test: float) -> float:
    """Return what holds the ends of three methods in four around Retrained, within bounds."""
    away = sorted(max(abs(x - forget), abs(y - test)) for x, y in map(_end, paths.values()))
    return min(max(NEAREST, 1.25 * away[(3 * (len(away) - 1)) // 4]), FURTHEST)
