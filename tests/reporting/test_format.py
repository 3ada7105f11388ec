from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from sfu.reporting import format as fmt


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (1.2e-15, "0"),
        (3e-7, "3e-7"),
        (0.00001, "1e-5"),
        (0.0001, "0.0001"),
        (0.000949, "0.0009"),
        (0.00096, "0.001"),
        (0.305, "0.305"),
        (1.0, "1.000"),
        (1.0003, "1.0003"),
        (9.9996, "10.0"),
        (22.13, "22.1"),
        (99.96, "100"),
        (801.3, "801"),
        (10617.4, "10617"),
        (99999.6, "1e5"),
        (1.23e8, "1.2e8"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
        (True, "-"),
    ],
)
def test_compact(value: object, shown: str) -> None:
    assert fmt.compact(value) == shown
    assert len(shown) <= 6


def test_gradient_norm_keeps_what_a_distance_would_call_zero() -> None:
    assert fmt.compact(2.5e-11) == "0"
    assert fmt.gradient_norm(2.5e-11) == "2.5e-11"
    assert fmt.gradient_norm(2.5e-14) == "0"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.1, "+0.1"), (-61.7, "-61.7"), (-0.04, "+0.0"), (0, "+0.0"), (100.0, "+100.0"), (None, "")]
)
def test_points(value: object, shown: str) -> None:
    assert fmt.points(value) == shown


def test_fixed_has_no_negative_zero() -> None:
    assert fmt.fixed(-0.01) == "0.0"
    assert fmt.fixed(73.66) == "73.7"
    assert fmt.fixed(612.5, 0) == "612"


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0001, "0"), (0.42, "0.420"), (12.34, "12.3"), (1234.5, "1234"), (None, "-")]
)
def test_seconds(value: object, shown: str) -> None:
    assert fmt.seconds(value) == shown


@pytest.mark.parametrize(
    ("mean", "deviation", "write", "shown"),
    [
        (73.66, 0.14, fmt.fixed, "73.7 ± 0.1"),
        (73.66, None, fmt.fixed, "73.7"),
        (0.1, 0.04, fmt.points, "+0.1 ± 0.0"),
        (0.305, 0.0123, fmt.compact, "0.305 ± 0.012"),
        (10617.2, 120.6, fmt.compact, "10617 ± 121"),
        (0.0, 0.0, fmt.compact, "0 ± 0"),
        (0.0, 0.01, fmt.compact, "0 ± 0.010"),
        (1.2e8, 3.4e6, fmt.compact, "1.2e8 ± 3.4e6"),
        (None, None, fmt.compact, "-"),
    ],
)
def test_spread(mean: float | None, deviation: float | None, write: Callable[[Any], str], shown: str) -> None:
    assert fmt.spread(mean, deviation, write) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.000270927, "2.71e-4"),
        (-0.000270927, "-2.71e-4"),
        (-0.47695, "-0.477"),
        (0.0, "0"),
        (1234.5, "1.23e3"),
        (3007.9e3, "3.01e6"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_significant(value: object, shown: str) -> None:
    assert fmt.significant(value) == shown
