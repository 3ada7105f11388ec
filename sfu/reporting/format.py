"""Numbers as a person wants to read them: one rule for each kind of quantity, the same in every table and picture."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

MISSING = "-"
"""What a table shows where a metric is null or absent."""

ZERO = 1e-9
"""Magnitudes below this are rounding error of an exact result and are shown as ``0``."""


def is_number(value: Any) -> TypeGuard[float]:
    """True for a finite int or float; a bool, None, text, NaN or infinity is not a number here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def fixed(value: Any, digits: int = 1) -> str:
    """``digits`` decimals and never a negative zero: ``73.7``; ``-`` where missing."""
    if not is_number(value):
        return MISSING
    return f"{round(value, digits) + 0.0:.{digits}f}"


def points(value: Any) -> str:
    """A signed difference in percentage points: ``+0.1``, ``-61.7``, and ``+0.0`` for nothing."""
    if not is_number(value):
        return ""
    return f"{round(value, 1) + 0.0:+.1f}"


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def decimals(value: float) -> int | None:
    """Decimals that ``compact`` gives a value, or None where it uses powers of ten."""
    size = abs(value)
    if size < ZERO:
        return 0
    if size < 9.5e-5 or size >= 99999.5:
        return None
    if size < 9.5e-4 or (5e-7 < abs(size - 1.0) < 5e-4):  # 0.0001 is not 0, and 1.0003 is not "nothing done"
        return 4
    if size < 9.9995:
        return 3
    return 1 if size < 99.95 else 0


def compact(value: Any, zero: float = ZERO) -> str:
    """A positive quantity of any magnitude in about six characters.

    ``0.0001``, ``0.305``, ``22.1``, ``10617``, ``1.2e8``, ``3e-7``; anything below ``zero`` is ``0``.
    """
    if not is_number(value):
        return MISSING
    if abs(value) < zero:
        return "0"
    digits = decimals(value) if abs(value) >= ZERO else None
    return _scientific(value) if digits is None else f"{value:.{digits}f}"


def significant(value: Any) -> str:
    """Three significant digits, for numbers that are read against each other: ``2.71e-4``."""
    if not is_number(value):
        return MISSING
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


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


def text(value: Any) -> str:
    """Any other value: true, false, the text itself, or ``-``."""
    if value is None:
        return MISSING
    return str(value).lower() if isinstance(value, bool) else str(value)


def spread(mean: Any, std: Any, kind: str, plus_minus: str = "±") -> str:
    """A mean and its standard deviation with the same decimals: ``73.7 ± 0.1``, or the mean alone where there is none.

    Args:
        mean: The mean, or None.
        std: The sample standard deviation, or None when fewer than two values exist.
        kind: ``percent`` (one decimal), ``points`` (one decimal and a sign) or ``compact`` (decimals from the mean).
        plus_minus: The sign between the two.
    """
    if not is_number(mean):
        return MISSING
    if kind == "compact":
        centre, digits = compact(mean), decimals(mean) if abs(mean) >= ZERO else None
    else:
        centre, digits = points(mean) if kind == "points" else fixed(mean), 1
    if not is_number(std):
        return centre
    return f"{centre} {plus_minus} {compact(std) if digits is None else fixed(std, digits)}"
