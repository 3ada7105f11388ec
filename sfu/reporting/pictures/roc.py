"""ROC curves of every attack on log axes, where the small false-positive rates are that an attacker wants.

A curve on the diagonal tells nothing. Rates of 0 have no place on log axes, so a curve begins at its first rate above.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sfu.readers import Record, read_json, refusing
from sfu.reporting.attacks import PAPER
from sfu.reporting.pictures import drawing as draw
from sfu.reporting.words import run_headline
from sfu.results.rows import Metrics

Rate = Annotated[float, Field(ge=0, le=1)]
_COLUMNS, _STYLES = 3, ("-", "--", ":", "-.")


class CurveRecord(Record):
    """One curve of roc.json: rates from (0, 0) to (1, 1)."""

    fpr: Annotated[list[Rate], Field(min_length=2)]
    tpr: Annotated[list[Rate], Field(min_length=2)]


def read_curves(path: Path) -> dict[str, dict[str, CurveRecord]]:
    """Read a roc.json: curves by row and attack.

    Raises:
        ArtifactError: It is missing or damaged.
    """
    with refusing(path, "Run again, with evaluation.attacks."):
        return read_json(path, dict[str, dict[str, CurveRecord]])


def save_roc_plot(metrics: Metrics, path: str | Path) -> Path:
    """Draw ``roc.json``, which lies beside ``path``: a panel for each attack but the paper's, a curve for each row."""
    rows = read_curves(Path(path).with_name("roc.json"))
    attacks = list(dict.fromkeys(name for curves in rows.values() for name in curves if name != PAPER))
    n_columns = min(_COLUMNS, max(1, len(attacks)))
    n_lines = max(1, math.ceil(len(attacks) / n_columns))
    figure = draw.new_figure(draw.WIDE_INCHES, 0.7 + 3.4 * n_lines)
    panels = figure.subplots(n_lines, n_columns, squeeze=False).flat
    styles = _styles(list(rows))
    for axes, attack in zip(panels, attacks, strict=False):
        curves = {row: found[attack] for row, found in rows.items() if attack in found}
        least = min((rate for one in curves.values() for rate in one.fpr if rate > 0), default=0.1)
        axes.plot([least, 1], [least, 1], color=draw.GREY, linewidth=0.8, zorder=0)
        for row, one in curves.items():
            shown = [(x, y) for x, y in zip(one.fpr, one.tpr, strict=True) if x > 0 and y > 0]
            colour, style = styles[row]
            axes.plot(*zip(*shown, strict=True), style, color=colour, linewidth=1.3, label=draw.plain(row))
        axes.set(xscale="log", yscale="log", xlim=(least, 1), ylim=(least, 1))
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate")
        axes.minorticks_off()  # they take most of the time to draw
        draw.finish_axes(axes, attack, grid="y")
    for axes in list(figure.axes)[len(attacks) :]:
        axes.set_visible(False)
    draw.finish_figure(figure, run_headline(metrics), narrow=False, columns=5)
    return draw.save_figure(figure, path)


def _styles(rows: Sequence[str]) -> Mapping[str, tuple[str, str]]:
    """Return the colour and line of every row; rows without a look of their own share a colour and differ in lines."""
    others = [row for row in rows if row not in draw.LOOKS]
    return {
        row: (draw.look_of(row).colour, "-" if row in draw.LOOKS else _STYLES[1 + others.index(row) % 3])
        for row in rows
    }
