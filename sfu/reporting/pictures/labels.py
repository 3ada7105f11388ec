"""Names beside points and lines, placed so that they cover neither each other nor what is drawn, and stay inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sfu.reporting.pictures import drawing as draw

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

Anchor = tuple[str, float, float]
"""A name and the place that it belongs to, in the panel's own coordinates."""

_FONT, _LETTERS = 7.0, 30
_STYLE: dict[str, Any] = {
    "fontsize": _FONT, "color": "#444444", "annotation_clip": False,
    "arrowprops": {"arrowstyle": "-", "linewidth": 0.5, "color": "#999999", "shrinkA": 1.0, "shrinkB": 2.0},
}  # fmt: skip
_BESIDE = _STYLE | {"arrowprops": _STYLE["arrowprops"] | {"relpos": (0.0, 0.5)}}
_MARGIN = 4.0
"""Points around every marker that no label may cover."""
_COLLIDES = 1e5
"""The cost of a place where a label covers something: above that of all others."""
_RINGS = (7, 11, 16, 22, 30, 40, 52, 66, 82, 100, 125, 155, 190, 230, 280, 340)
"""Distances from a point at which places for its label are tried, in points."""


def label_points(axes: Axes, anchors: Sequence[Anchor], points: Sequence[tuple[float, float]]) -> None:
    """Write the name of each anchor near it, joined to it by a thin line, clear of all ``points`` and other names.

    A name for which there is no room is left out. The picture must be complete: its layout is settled here and not
    changed any more.
    """
    import numpy as np

    figure = axes.figure.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    pixels = figure.dpi / 72
    frame = axes.get_window_extent()
    places = axes.transData.transform(np.reshape(points, (-1, 2)))
    places = places[[bool(frame.contains(*place)) for place in places]]
    taken = np.concatenate([places - _MARGIN * pixels, places + _MARGIN * pixels], axis=1)
    angles = (np.arange(16) + 0.2) * np.pi / 8  # no line lies on the zero line
    rings = np.repeat(_RINGS, len(angles)) * pixels
    across, up = np.tile(np.cos(angles), len(_RINGS)), np.tile(np.sin(angles), len(_RINGS))
    edges = np.array([frame.x0, frame.y0, frame.x1, frame.y1])
    for name, x, y in anchors:
        at = axes.transData.transform((x, y))
        if not frame.contains(*at):
            continue
        text = axes.annotate(
            draw.plain(name, _LETTERS), (x, y), (0, 0), textcoords="offset points", va="center", ha="center", **_STYLE
        )
        text.set_path_effects(draw.halo())
        box = text.get_window_extent()
        size = np.array([box.width, box.height])
        centres = at + np.stack([across * (rings + size[0] / 2), up * (rings + size[1] / 2)], axis=1)
        boxes = np.concatenate([centres - size / 2, centres + size / 2], axis=1)
        cost = rings + 10 * _COLLIDES * ((boxes[:, :2] < edges[:2]) | (boxes[:, 2:] > edges[2:])).any(axis=1)
        lines = _lines(at, centres, size)
        own = ((taken[:, :2] < at) & (at < taken[:, 2:])).all(axis=1)
        cost = cost + _COLLIDES * _covered(boxes, taken) + 20 * pixels * _covered(lines, taken[~own]).sum(axis=1)
        best = int(cost.argmin())
        if cost[best] >= _COLLIDES:
            text.remove()
            continue
        text.set_position(tuple((centres[best] - at) / pixels))
        taken = np.concatenate([taken, boxes[best : best + 1], lines[best]])


def _covered(boxes: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """How many of the places taken each box covers; boxes are ``[..., 4]``: left, bottom, right, top."""
    apart = (boxes[..., None, :2] >= taken[:, 2:]) | (boxes[..., None, 2:] <= taken[:, :2])
    return (~apart.any(axis=-1)).sum(axis=-1)


def _lines(at: np.ndarray, centres: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The lines from a point to labels as small boxes ``[labels, steps, 4]``, without their beginning at the marker."""
    import numpy as np

    way = centres - at
    reach = 1 - np.minimum(1.0, (size / 2 / np.maximum(np.abs(way), 1e-9)).min(axis=1))  # there it meets the label
    shares = np.linspace(0.15, np.maximum(reach, 0.15), 12, axis=1)[..., None]
    places = at + shares * way[:, None]
    return np.concatenate([places - 0.5, places + 0.5], axis=-1)


def label_ends(axes: Axes, anchors: Sequence[Anchor]) -> None:
    """Write names to the right of a panel, apart, in the order of the heights at which their lines end."""
    frame, gap = axes.get_window_extent(), 1.3 * _FONT * axes.figure.figure.dpi / 72
    ends = sorted((axes.transData.transform((x, y))[1], name, x, y) for name, x, y in anchors)
    ends = [end for end in ends if frame.y0 - 1 <= end[0] <= frame.y1 + 1]
    heights: list[float] = []
    for wanted, *_ in ends:
        heights.append(max([wanted, *(height + gap for height in heights[-1:])]))
    ceiling = frame.y1
    for index in reversed(range(len(heights))):
        heights[index] = min(heights[index], ceiling)
        ceiling = heights[index] - gap
    for height, (_, name, x, y) in zip(heights, ends, strict=True):
        place = 1.07, (height - frame.y0) / frame.height
        shown = draw.plain(name, 1000)
        shown = shown if len(shown) <= _LETTERS else f"{shown[: _LETTERS - 3]}..."
        axes.annotate(shown, (x, y), place, textcoords="axes fraction", va="center", ha="left", **_BESIDE)
