"""Numbers as people read them: one rule for each kind of quantity, the same in every table and picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sfu.results.rows import is_number

MISSING = "-"
"""What a table shows where a metric is null or absent."""

ZERO = 1e-9
"""Magnitudes below this are rounding errors of an exact result and are shown as ``0``."""


def fixed(value: Any, digits: int = 1) -> str:
    """``digits`` decimals and never a negative zero: ``73.7``; ``-`` where missing."""
    if not is_number(value):
        return MISSING
    return f"{round(value, digits) + 0.0:.{digits}f}"


def whole(value: Any) -> str:
    """No decimals: ``612``."""
    return fixed(value, 0)


def points(value: Any) -> str:
    """A signed difference in percentage points: ``+0.1``, ``-61.7``, and ``+0.0`` for nothing."""
    if not is_number(value):
        return ""
    return f"{round(value, 1) + 0.0:+.1f}"


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def compact(value: Any, zero: float = ZERO) -> str:
    """A positive quantity of any magnitude in about six characters.

    ``0.0001``, ``0.305``, ``22.1``, ``10617``, ``1.2e8``, ``3e-7``; anything below ``zero`` is ``0``.
    """
    if not is_number(value):
        return MISSING
    size = abs(value)
    if size < zero:
        return "0"
    if size < 9.5e-5 or size >= 99999.5:
        return _scientific(value, 1).replace(".0e", "e")
    if size < 9.5e-4 or (5e-7 < abs(size - 1.0) < 5e-4):  # 0.0001 is not 0, and 1.0003 is not "nothing done"
        return f"{value:.4f}"
    return f"{value:.{3 if size < 9.9995 else 1 if size < 99.95 else 0}f}"


def significant(value: Any) -> str:
    """Three significant digits, for numbers that are read against each other: ``2.71e-4``."""
    if not is_number(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    return _scientific(value, 2)


def gradient_norm(value: Any) -> str:
    """A gradient norm, where 1e-10 still says something but 1e-13 is rounding error."""
    return compact(value, zero=1e-12)


def seconds(value: Any) -> str:
    """A duration in seconds with three useful figures."""
    if not is_number(value):
        return MISSING
    if abs(value) < 0.0005:
        return "0"
    return fixed(value, 3 if value < 1 else 1 if value < 100 else 0)


def span(values: Iterable[Any], write: Callable[[float], str]) -> str:
    """The smallest and the largest value, ``0.31 to 0.34``; once if they look the same; empty if none is known."""
    known = [value for value in values if is_number(value)]
    return " to ".join(dict.fromkeys(map(write, (min(known), max(known))))) if known else ""


def interval(centre: Any, ends: Sequence[float] | None, write: Callable[[Any], str]) -> str:
    """A mean and its interval: ``+0.1 [-0.2, +0.4]``; the mean alone where there is no interval."""
    if not is_number(centre):
        return MISSING
    return write(centre) + (f" [{write(ends[0])}, {write(ends[1])}]" if ends else "")


def spread(mean: Any, deviation: Any, write: Callable[[Any], str], plus_minus: str = "±") -> str:
    """A mean and its spread with the same decimals: ``73.7 ± 0.1``, or the mean alone where there is no spread."""
    if not is_number(mean):
        return MISSING
    centre = write(mean)
    if not is_number(deviation):
        return centre
    after_point = len(centre.partition(".")[2])
    same_decimals = centre != "0" and "e" not in centre
    return f"{centre} {plus_minus} {fixed(deviation, after_point) if same_decimals else compact(deviation)}"
