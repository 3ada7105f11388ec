"""What all pictures share: the look of each row, the scales, quiet axes, legends, and saving.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart; markers and hatches read in grey.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfu.files import replacing
from sfu.names import visible
from sfu.reporting.format import compact
from sfu.results.aggregate import MethodResult, ResultTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, VERMILLION, SKY = "#0072B2", "#E69F00", "#D55E00", "#56B4E9"
GREY, BLACK = "#767676", "#000000"


@dataclass(frozen=True)
class Look:
    """How a row looks wherever it is shown: its colour, its marker in pictures, and its symbol on the page."""

    colour: str
    marker: str
    symbol: str


LOOKS = {
    "original": Look(ORANGE, "s", "\u25a0"),
    "retrained": Look(BLACK, "*", "\u2605"),
    "unlearned_plus": Look(SKY, "^", "\u25b2"),
    "unlearned_minus": Look(BLUE, "o", "\u25cf"),
    "unlearned_minus_paper": Look(VERMILLION, "X", "\u2715"),
}
"""The rows that have a look of their own. All others are grey, and pictures write their names beside them."""
OTHERS = Look(GREY, "D", "\u25c7")

WIDE_INCHES, NARROW_INCHES = 10.0, 4.4
"""Widths of pictures with panels side by side, and one under the other for 360 pixels: letters stay readable."""
LINEAR_POINTS = 2.0
"""Gaps up to this many points are drawn to scale; beyond, logarithmically."""
PANELS = (("test_accuracy", "Test accuracy (per cent)"), ("distance", "Distance to Retrained"))
"""What pictures of many settings show."""


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that lays itself out."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def _figure_class() -> type[Figure]:
    """Import matplotlib, whatever backend the environment names: saving a figure takes Agg and no other.

    A notebook sets MPLBACKEND for all commands that it starts, and matplotlib cannot be imported with a backend that is
    not installed there. If the home folder cannot be written, matplotlib warns at length and uses a temporary one.
    """
    named, logger = os.environ.get("MPLBACKEND"), logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if named and "matplotlib" not in sys.modules:
            os.environ["MPLBACKEND"] = "agg"
            import matplotlib

            with suppress(ValueError):  # what is imported later in this process may want it
                matplotlib.rcParams["backend"] = named
        from matplotlib.figure import Figure
    finally:
        logger.setLevel(level)
        if named:
            os.environ["MPLBACKEND"] = named
    return Figure


def look_of(name: str) -> Look:
    """Return the look of a row."""
    return LOOKS.get(name, OTHERS)


def marker_style(name: str, applied: bool = True) -> dict[str, Any]:
    """Return the colour and marker of a row for matplotlib; hollow if its step was not applied."""
    look = look_of(name)
    size = {"*": 11.0, "D": 4.5}.get(look.marker, 6.5)
    return {
        "color": look.colour, "marker": look.marker, "markersize": size, "markeredgewidth": 1.2,
        "markerfacecolor": look.colour if applied else "white", "zorder": 3 if name in LOOKS else 2.5,
    }  # fmt: skip


def plain(text: str, width: int = 105) -> str:
    """Return text that matplotlib shows as it is: no mathematics between dollar signs, long lines broken."""
    return textwrap.fill(visible(text, keep="\n"), width, break_on_hyphens=False).replace("$", r"\$")


def distance_ends(table: ResultTable) -> list[float]:
    """Return how far every known distance and its spread reach."""
    entries = [row["distance"] for row in table.results]
    return [entry.mean + (table.spread_of(entry) or 0.0) for entry in entries if entry.mean is not None]


def sees_more(row: MethodResult) -> bool:
    """True for a row that sees more than the forget set, or whose settings were chosen with Retrained at hand."""
    return not (row.is_source_free or row.is_untouched)


def halo() -> list[Any]:
    """Return the effects that keep text readable over lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]


def finish_distance(
    axes: Axes, ends: Sequence[float], along: Literal["x", "y"] = "x", room: float = 0.06, coarse: bool = False
) -> None:
    """Scale a panel of distances and draw where Retrained and the untouched head stand; say so if there are none.

    The scale is linear up to 2; beyond, it is linear to 1 and logarithmic after, so that 0.3 and 10617 are both read.
    Distances above 1 are worse than nothing, and their part of the panel is tinted. ``ends`` says how far the values
    and their spreads reach, ``room`` which share of the axis stays free past the largest, for its label. ``coarse``
    is for panels that have no room for many ticks.
    """
    if not ends:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no distance:\nno Retrained row", transform=axes.transAxes, ha="center", va="center")
        return
    draw_line = axes.axvline if along == "x" else axes.axhline
    draw_line(0, color=BLACK, linewidth=1.2, zorder=0)
    draw_line(1, color=GREY, linewidth=1.2, linestyle="--", zorder=0)

    def put(what: str, *values: Any, **options: Any) -> None:
        getattr(axes, f"set_{along}{what}")(*values, **options)

    largest = max(1.0, *ends)
    label = f"0 = Retrained, 1 = untouched\n{'logarithmic above 1, ' if largest > 2 else ''}tinted: worse"
    end = largest * (1 + room)
    if largest > 2:
        decades = math.log10(largest)
        linear = max(1.0, decades / 3)  # the stretch from 0 to 1 takes about a quarter of the axis
        end = 10 ** (decades + room * (decades + linear))
        step = 1 + int(decades) // (3 if coarse else 5)
        powers = [10.0**power for power in range(0, math.ceil(decades) + 1, step)]
        ticks = [0.0, *([] if coarse else [0.5]), *powers, *([2.0, 5.0] if decades < 1 and not coarse else [])]
        put("scale", "symlog", linthresh=1.0, linscale=linear)
        put("ticks", ticks, [f"{tick:g}" if tick < 1e5 else compact(tick) for tick in ticks])
        put("ticks", [], minor=True)
    put("label", label)
    put("lim", 0, end)
    tint = axes.axvspan if along == "x" else axes.axhspan
    tint(1, end, color=VERMILLION, alpha=0.1, linewidth=0, zorder=-1)


def finish_gap(axes: Axes, gaps: Sequence[float], along: Literal["x", "y"], ticks: Iterable[float]) -> None:
    """Scale a panel of differences from Retrained in points, with signs; beyond 5 linear stretches logarithmically."""
    if max(map(abs, gaps), default=0.0) > 5 * LINEAR_POINTS:
        getattr(axes, f"set_{along}scale")("symlog", linthresh=LINEAR_POINTS, linscale=1.5)
        low, high = min([*gaps, -1.0]) * 1.3, max([*gaps, 1.0]) * 1.3
        signed = sorted({sign * tick for tick in ticks for sign in (1, -1) if low <= sign * tick <= high})
        getattr(axes, f"set_{along}ticks")(signed)
        getattr(axes, f"set_{along}ticks")([], minor=True)
        getattr(axes, f"set_{along}lim")(low, high)
    axis = getattr(axes, f"{along}axis")
    axis.set_major_formatter(lambda value, _: f"{value:+.3g}" if value else "0")


def finish_axes(axes: Axes, title: str = "", grid: Literal["x", "y"] = "x") -> None:
    """Set a panel's title and take away what is not data: two spines, heavy grid lines, large tick labels."""
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8.5)
    axes.yaxis.label.set_fontsize(8.5)


def finish_figure(
    figure: Figure, title: str, narrow: bool, columns: int, handles: Sequence[Any] | None = None
) -> Figure:
    """Set the line above all panels, and one legend below them, by default of what the first panel has labels for."""
    figure.suptitle(plain(title, 56 if narrow else 105), fontsize=9 if narrow else 10.5)
    shown = figure.axes[0].get_legend_handles_labels()[0] if handles is None else handles
    if shown:
        figure.legend(handles=shown, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def png_of(figure: Figure) -> bytes:
    """Return a figure as a small PNG.

    An octree leaves the colours of the methods apart; Pillow's default, the median cut, merges those that cover little.
    """
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return small.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure in the format of the file's suffix (png, pdf or svg), making the folder if need be.

    Raises:
        ArtifactError: It cannot be written.
    """
    target, drawn = Path(path), io.BytesIO()
    figure.savefig(drawn, format=target.suffix[1:], dpi=150, facecolor="white")
    with replacing(target) as temporary:
        temporary.write_bytes(drawn.getvalue())
    return target
