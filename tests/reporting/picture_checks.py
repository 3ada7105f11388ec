"""What every picture must hold to: texts that neither overlap nor leave it, and colours that all readers tell apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

SEEN_BY = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Linear RGB as people without one kind of cones see it (Machado, Oliveira and Fernandes 2009, severity 1)."""


def least_difference(colours: list[str]) -> float:
    """The smallest CIE76 difference between two of the colours, for the reader who finds it hardest."""
    rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    least = np.inf
    for seen in SEEN_BY.values():
        xyz = np.clip(linear @ np.array(seen).T, 0, 1) @ to_xyz.T / [0.9505, 1, 1.089]
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
        lab = np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)
        least = min(least, *(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(lab, 2)))
    return least


def shown_ticks(axes: Any) -> list[Any]:
    """Tick labels within the limits; matplotlib keeps others that it does not draw."""
    (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    across = [text for text in axes.get_xticklabels() if left <= text.get_position()[0] <= right]
    return [*across, *(text for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high)]


def text_faults(figure: Figure) -> list[str]:
    """Texts that cover each other or leave the picture."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        texts += [*axes.texts, *shown_ticks(axes), axes.title, axes.xaxis.label, axes.yaxis.label]
    boxes = [
        (text.get_text(), Text.get_window_extent(text))  # that of an annotation would hold its line, too
        for text in texts
        if text.get_text() and text.get_visible()
    ]
    width, height = figure.bbox.width, figure.bbox.height
    found = [
        f"{name!r} leaves the picture"
        for name, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    for (first, one), (second, two) in itertools.combinations(boxes, 2):
        across = min(one.x1, two.x1) - max(one.x0, two.x0)
        up = min(one.y1, two.y1) - max(one.y0, two.y0)
        if across > 1 and up > 3:  # bounding boxes hold some air above and below the letters
            found.append(f"{first!r} covers {second!r}")
    return found


def markers_of(axes: Any) -> list[tuple[str, str, bool]]:
    """Colour, marker and whether it is filled, of every marker drawn in a panel, without legend and error bars."""
    return [
        (line.get_color(), line.get_marker(), line.get_markerfacecolor() == line.get_color())
        for line in axes.lines
        if line.get_marker() not in ("None", "", ".", "|", "_") and len(line.get_xdata())
    ]
