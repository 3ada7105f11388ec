"""What every picture must hold to: labels that neither overlap nor leave it."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure


def shown_ticks(axes: Any) -> list[Any]:
    """Tick labels within the limits; matplotlib keeps others that it does not draw."""
    (left, right), (low, high) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
    across = [text for text in axes.get_xticklabels() if left <= text.get_position()[0] <= right]
    return [*across, *(text for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high)]


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    figure.draw_without_rendering()
    found = []
    boxes = [
        (text.get_text(), text.get_window_extent())
        for axes in figure.axes
        for text in [
            *axes.texts,
            *shown_ticks(axes),
            axes.title,
            axes.xaxis.label,
            axes.yaxis.label,
        ]
        if text.get_text() and text.get_visible()
    ]
    for index, (first, one) in enumerate(boxes):
        for second, two in boxes[index + 1 :]:
            width = min(one.x1, two.x1) - max(one.x0, two.x0)
            height = min(one.y1, two.y1) - max(one.y0, two.y0)
            if width > 1 and height > 3:  # bounding boxes hold some air above and below the letters
                found.append((first, second))
    return found
