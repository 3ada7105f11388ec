"""What all pictures share: colours, the distance scale, quiet axes, legends, and saving.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart; hatches and markers read in grey.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sfu.files import replacing
from sfu.names import visible
from sfu.reporting.format import compact
from sfu.results.aggregate import ResultTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, BLACK = "#56B4E9", "#CC79A7", "#767676", "#000000"

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo", "----")

NARROW_INCHES = 4.4
"""Width of a picture whose panels stand one under the other: letters stay readable at 360 pixels."""
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


def pick(choices: Sequence[str], index: int) -> str:
    """Return a choice by its index, beginning again after the last."""
    return choices[index % len(choices)]


def plain(text: str, width: int = 105) -> str:
    """Return text that matplotlib shows as it is: no mathematics between dollar signs, long lines broken."""
    return textwrap.fill(visible(text, keep="\n"), width, break_on_hyphens=False).replace("$", r"\$")


def distance_ends(table: ResultTable) -> list[float]:
    """Return how far every known distance and its spread reach."""
    entries = [row["distance"] for row in table.results]
    return [entry.mean + (table.spread_of(entry) or 0.0) for entry in entries if entry.mean is not None]


def finish_distance(axes: Axes, ends: Sequence[float], along: Literal["x", "y"] = "x") -> None:
    """Scale a panel of distances and draw where Retrained and the untouched head stand; say so if there are none.

    The scale is linear up to 2; beyond, it is linear to 1 and logarithmic after, so that 0.3 and 10617 are both read.
    Along x, a quarter of the axis stays free past the largest value, for its label.
    ``ends`` says how far the values and their spreads reach.
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

    label, largest, room = "0 = Retrained, 1 = untouched (dashed)", max(1.0, *ends), 0.35 if along == "x" else 0.06
    end = largest * (1 + room)
    if largest > 2:
        label += "\nlogarithmic above 1"
        decades = math.log10(largest)
        linear = max(1.0, decades / 3)  # the stretch from 0 to 1 takes about a quarter of the axis
        end = 10 ** (decades + room * (decades + linear))
        ticks = [0.0, 0.5, *(10.0**power for power in range(0, math.ceil(decades) + 1, 1 + int(decades) // 5))]
        put("scale", "symlog", linthresh=1.0, linscale=linear)
        put("ticks", ticks, [f"{tick:g}" if tick < 1e5 else compact(tick) for tick in ticks])
        put("ticks", [], minor=True)
    put("label", label)
    put("lim", 0, end)


def finish_axes(axes: Axes, title: str = "", grid: Literal["x", "y"] = "x") -> None:
    """Set a panel's title and take away what is not data: two spines, heavy grid lines, large tick labels."""
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8.5)
    axes.yaxis.label.set_fontsize(8.5)


def finish_figure(figure: Figure, title: str, narrow: bool, columns: int) -> Figure:
    """Set the line above all panels, and one legend below them."""
    figure.suptitle(plain(title, 56 if narrow else 105), fontsize=9 if narrow else 10.5)
    handles = figure.axes[0].get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
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
