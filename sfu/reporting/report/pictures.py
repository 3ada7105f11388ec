"""Which pictures a section deserves: bars as the paper's Figure 1, curves over every numeric key, and the plane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from sfu.reporting import format as fmt
from sfu.reporting.aggregate import SPREADS, mean_of, mean_rows, methods_of, number_of, spread_of
from sfu.reporting.figures import png_of
from sfu.reporting.plane_plot import plane_figure, plane_names
from sfu.reporting.plot import bar_figure
from sfu.reporting.sweep_plot import curve_figure, sweep_bar_figure
from sfu.reporting.sweep_words import Aggregate, count_of, setting_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 6
MOST_BARS = 3


@dataclass(frozen=True)
class Picture:
    """One picture of a section.

    Attributes:
        kind: ``bars``, ``curve`` or ``plane``; the file's name begins with it.
        caption: What it shows.
        alt: The same in words and numbers, for who cannot see it.
        draw: Makes the figure; True for the narrow form.
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


def pictures_of(total: Aggregate, curves: Sequence[str] = ()) -> tuple[list[Picture], list[str]]:
    """The pictures of a section.

    Args:
        total: What ``aggregate`` returned.
        curves: Keys to draw curves over; empty: every key with three numbers or more (or two, if none has more).

    Returns:
        The pictures, and a sentence for each that was left out for being one too many.
    """
    groups = [group for group in total["groups"] if group["rows"]]
    if not groups:
        return [], []
    found = [_curve(part, key) for key in (curves or _worth_a_curve(total)) for part in along(total, key)]
    drawn, left_out = found[:MOST_CURVES], [picture.caption for picture in found[MOST_CURVES:]]
    if plane_names(total):
        drawn.append(_plane(total))
    if len(groups) <= MOST_BARS:
        drawn += [_bars(total, group) for group in groups]
    else:
        drawn.append(_all_bars(total))
    return drawn, [f"Not drawn: {caption}" for caption in left_out]


def _worth_a_curve(total: Aggregate) -> list[str]:
    """Keys with three numbers or more or, where none has, with two."""
    sizes = {key: len({group["overrides"][key] for group in total["groups"]}) for key in total["varied"]}
    return [key for key, size in sizes.items() if size > 2] or list(sizes)


def along(total: Aggregate, key: str) -> Iterator[dict[str, Any]]:
    """The parts of an aggregate in which nothing but one numeric key varies, at least two values in each."""
    parts: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for group in total["groups"]:
        if group["rows"] and number_of(group["overrides"].get(key, "")) is not None:
            rest = tuple((name, value) for name, value in group["overrides"].items() if name != key)
            parts.setdefault(rest, []).append(group)
    for rest, groups in parts.items():
        if len(groups) > 1:
            failed = [job for job in total["failed"] if all(job["overrides"].get(k) == v for k, v in rest)]
            yield {
                **total,
                "varied": [key],
                "at": dict(rest),
                "groups": [{**group, "overrides": {key: group["overrides"][key]}} for group in groups],
                "n_runs": sum(group["n"] for group in groups) + len(failed),
                "failed": failed,
            }


def _at(total: Aggregate) -> str:
    return ", ".join(f"{key} = {value}" for key, value in (total.get("at") or {}).items())


def _band(total: Aggregate) -> str:
    return f"{SPREADS[total['spread']]} over {' and '.join(total['over']) or 'nothing'}"


def _curve(total: Aggregate, key: str) -> Picture:
    at = f" at {_at(total)}" if _at(total) else ""
    caption = f"Test accuracy and distance to Retrained against {key}{at}; bands: {_band(total)}."
    first, last = total["groups"][0], total["groups"][-1]
    said = []
    for name in methods_of(total):
        ends = [mean_of(group["rows"][name], "distance") if name in group["rows"] else None for group in (first, last)]
        if all(end is not None for end in ends):
            said.append(f"{name} {fmt.compact(ends[0])} to {fmt.compact(ends[1])}")
    span = f"{first['overrides'][key]} to {last['overrides'][key]}"
    alt = f"Curves against {key} from {span}{at}. Distance to Retrained: {'; '.join(said) or 'unknown'}."
    return Picture("curve", caption, alt, partial(curve_figure, total, key))


def _plane(total: Aggregate) -> Picture:
    caption = (
        "The distance-accuracy plane: Retrained is at the origin, the untouched head on the dashed line; a point for "
        f"each setting; bars: {_band(total)}."
    )
    said = []
    for name in methods_of(total):
        values = [mean_of(group["rows"][name], "distance") for group in total["groups"] if name in group["rows"]]
        known = [value for value in values if value is not None]
        if known:
            said.append(f"{name} {fmt.compact(min(known))} to {fmt.compact(max(known))}")
    alt = f"Distance to Retrained against the gap in test accuracy. Distances: {'; '.join(said)}."
    return Picture("plane", caption, alt, partial(plane_figure, total))


def _bars(total: Aggregate, group: Mapping[str, Any]) -> Picture:
    rows = mean_rows(group)
    spreads = {
        name: {key: found for key, entry in row["metrics"].items() if (found := spread_of(total, entry)) is not None}
        for name, row in group["rows"].items()
    }
    title = ", ".join(part for part in (setting_of(group), count_of(group)) if part)
    said = [
        f"{name} test {fmt.fixed(row.get('test_accuracy'))} %, distance {fmt.compact(row.get('distance'))}"
        for name, row in rows.items()
    ]
    caption = f"Accuracies, membership inference and distance, {title}; error bars: {_band(total)}."
    return Picture("bars", caption, f"Bars, {title}. {'; '.join(said)}.", partial(bar_figure, rows, spreads, title))


def _all_bars(total: Aggregate) -> Picture:
    caption = f"Test accuracy and distance to Retrained at every setting; error bars: {_band(total)}."
    said = [
        f"{setting_of(group)}: "
        + ", ".join(f"{name} {fmt.compact(mean_of(row, 'distance'))}" for name, row in group["rows"].items())
        for group in total["groups"][:6]
    ]
    more = "" if len(total["groups"]) <= 6 else " The others are in the table."
    return Picture("bars", caption, f"Bars. Distances at {'; at '.join(said)}.{more}", partial(sweep_bar_figure, total))
