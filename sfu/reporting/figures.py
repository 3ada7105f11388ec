"""What every picture shares: the distance scale, quiet axes, and saving without pyplot."""

from __future__ import annotations

import io
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sfu.reporting.format import compact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NARROW_INCHES = 4.4
"""Width of a picture whose panels stand one under the other: letters stay readable at 360 pixels."""


def plain(text: str, width: int = 105) -> str:
    """Text that matplotlib shows as it is: no mathematics between dollar signs, long lines broken."""
    return textwrap.fill(text, width, break_on_hyphens=False).replace("$", r"\$")


def scale_distance(axes: Axes, largest: float, along: str = "x") -> None:
    """Linear up to 2; beyond, linear to 1 and logarithmic after, so that 0.3 and 10617 are both read.

    Along x, a quarter of the axis stays free past the largest value, for its label.
    """
    room = 0.35 if along == "x" else 0.06
    set_limits = axes.set_xlim if along == "x" else axes.set_ylim
    set_label = axes.set_xlabel if along == "x" else axes.set_ylabel
    logarithmic = "" if largest <= 2 else "\nlogarithmic above 1"
    set_label(f"0 = Retrained, 1 = nothing done (dashed){logarithmic}")
    if largest <= 2:
        set_limits(0, max(largest, 1.0) * (1 + room))
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    decades = math.log10(largest)
    linear = max(1.0, decades / 3)  # the stretch from 0 to 1 keeps about a quarter of the axis
    (axes.set_xscale if along == "x" else axes.set_yscale)("symlog", linthresh=1.0, linscale=linear)
    set_limits(0, 10 ** (decades + room * (decades + linear)))
    axis = axes.xaxis if along == "x" else axes.yaxis
    step = 1 + int(decades) // 5
    axis.set_major_locator(FixedLocator([0.0, 0.5, *(10.0**power for power in range(0, math.ceil(decades) + 1, step))]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e5 else compact(value)))
    axis.set_minor_locator(NullLocator())


def finish_axes(axes: Axes, grid: Literal["x", "y"] = "x") -> None:
    """Takes away what is not data: two spines, heavy grid lines, large tick labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(8.5)
    axes.yaxis.label.set_fontsize(8.5)


def add_title(figure: Figure, title: str, narrow: bool = False) -> None:
    """The line above all panels, broken to fit."""
    figure.suptitle(plain(title, 56 if narrow else 105), fontsize=9 if narrow else 10.5)


def add_legend(figure: Figure, axes: Axes, columns: int) -> None:
    """One legend for all panels, below them."""
    handles = axes.get_legend_handles_labels()
    if handles[0]:
        figure.legend(*handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def png_of(figure: Figure) -> bytes:
    """A figure as a small PNG: 64 colours are all that bars and curves have."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as its suffix says (png, pdf or svg), making the folder if need be."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150, facecolor="white")
    return target
