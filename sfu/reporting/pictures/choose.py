"""Which pictures a table deserves: curves over swept numbers, a grid over names, the plane, and gaps to Retrained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sfu.reporting import format as fmt
from sfu.reporting.pictures.curves import curve_figure, numeric_key
from sfu.reporting.pictures.drawing import png_of, save_figure
from sfu.reporting.pictures.gaps import gap_figure
from sfu.reporting.pictures.grid import grid_figure, named_key
from sfu.reporting.pictures.plane import plane_figure, plane_points
from sfu.reporting.words import averaged, setting_of, spread_words
from sfu.results.aggregate import Group, ResultTable, number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 6


@dataclass(frozen=True)
class Picture:
    """One picture of a table: its kind, with which the file's name begins, and the figure, in narrow form on request.

    ``alt`` says what it shows in words and numbers, for readers who cannot see it.
    """

    kind: str
    caption: str
    alt: str
    draw: Callable[[bool], Figure]

    @cached_property
    def wide(self) -> bytes:
        """The picture as PNG, panels side by side."""
        return png_of(self.draw(False))

    @cached_property
    def narrow(self) -> bytes:
        """The picture as PNG, panels one under the other."""
        return png_of(self.draw(True))


def save_sweep_plot(table: ResultTable, path: str | Path) -> Path:
    """Draw a sweep into a file: curves if one numeric key varies, a grid if one of several names does, else gaps."""
    title = averaged(table)
    if key := numeric_key(table):
        return save_figure(curve_figure(table, key, title), path)
    if key := named_key(table):
        return save_figure(grid_figure(table, key, title), path)
    return save_figure(gap_figure(table, title), path)


def pictures_of(table: ResultTable, curves: Sequence[str] = ()) -> tuple[list[Picture], list[str]]:
    """Choose the pictures of a table; also return a sentence for each that was left out because there were too many.

    Curves are drawn over the keys of ``curves``. If it is empty, they are drawn over every key with three numbers or
    more (with two, if none has more).
    """
    if not table.results:
        return [], []
    sizes = {key: len({group.overrides[key] for group in table.groups}) for key in table.varied}
    keys = curves or [key for key, size in sizes.items() if size > 2] or list(sizes)
    found = [_curve(part, key, at) for key in keys for at, part in along(table, key)]
    drawn, left_out = found[:MOST_CURVES], [picture.caption for picture in found[MOST_CURVES:]]
    if key := named_key(table):
        drawn.append(_grid(table, key))
    if plane_points(table):
        drawn.append(_plane(table))
    return [*drawn, _gaps(table)], [f"Not drawn: {caption}" for caption in left_out]


def along(table: ResultTable, key: str) -> Iterator[tuple[dict[str, str], ResultTable]]:
    """Yield the parts of a table in which nothing but one numeric key varies, each after its fixed setting."""
    parts: dict[tuple[tuple[str, str], ...], list[Group]] = {}
    for group in table.groups:
        if group.rows and number_of(group.overrides.get(key, "")) is not None:
            others = tuple((name, value) for name, value in group.overrides.items() if name != key)
            parts.setdefault(others, []).append(group)
    for others, groups in parts.items():
        if len(groups) > 1:
            failed = [job for job in table.failed if all(job["overrides"].get(k) == v for k, v in others)]
            n_runs = sum(group.n for group in groups) + len(failed)
            groups = [replace(group, overrides={key: group.overrides[key]}) for group in groups]
            yield dict(others), replace(table, varied=[key], groups=groups, n_runs=n_runs, failed=failed)


def _spans(table: ResultTable) -> str:
    """The distances of every method, smallest to largest."""
    found = {
        name: fmt.span([group.entry(name, "distance").mean for group in table.groups], fmt.compact)
        for name in table.methods
    }
    return "; ".join(f"{name} {span}" for name, span in found.items() if span) or "unknown"


def _curve(table: ResultTable, key: str, at: dict[str, str]) -> Picture:
    setting = ", ".join(f"{name} = {value}" for name, value in at.items())
    where = f" at {setting}" if setting else ""
    caption = f"Test accuracy and distance to Retrained against {key}{where}; bands: {spread_words(table)}; "
    caption += "dashed: sees more than the forget set; hollow: step not applied."
    values = f"{table.groups[0].overrides[key]} to {table.groups[-1].overrides[key]}"
    alt = f"Curves against {key} from {values}{where}. Distance to Retrained: {_spans(table)}."
    title = averaged(table) + (f", {setting}" if setting else "")
    return Picture("curve", caption, alt, lambda narrow: curve_figure(table, key, title, narrow))


def _grid(table: ResultTable, key: str) -> Picture:
    caption = (
        f"Mean distance to Retrained by {key}, a line for each method that sees no more than the forget set: blue is "
        "nearer than doing nothing, red further."
    )
    alt = f"A grid of distances. {_spans(table)}."
    return Picture("grid", caption, alt, lambda narrow: grid_figure(table, key, averaged(table), narrow))


def _plane(table: ResultTable) -> Picture:
    caption = (
        "The distance-accuracy plane: Retrained is at the origin, the untouched head on the dashed line; a point for "
        f"each setting, hollow if the step was not applied; bars: {spread_words(table)}."
    )
    alt = f"Distance to Retrained against the gap in test accuracy. Distances: {_spans(table)}."
    return Picture("plane", caption, alt, lambda narrow: plane_figure(table, averaged(table), narrow))


def _gaps(table: ResultTable) -> Picture:
    caption = (
        "Distance to Retrained, and the differences from Retrained in accuracy and membership inference"
        f"{' at every setting' if table.varied else ''}; error bars: {spread_words(table)}."
    )
    values = [
        (f"{setting_of(group)}: " if group.overrides else "")
        + ", ".join(f"{name} {fmt.compact(row.mean('distance'))}" for name, row in group.rows.items())
        for group in table.groups[:6]
    ]
    more = "" if len(table.groups) <= 6 else " The others are in the table."
    alt = f"Bars. Distances: {'; '.join(values)}.{more}"
    return Picture("gaps", caption, alt, lambda narrow: gap_figure(table, averaged(table), narrow))
