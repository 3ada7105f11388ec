r"""The analytic Gaussian mechanism: which shift Gaussian noise hides, for every epsilon and without slack.

Two Gaussians of standard deviation sigma whose means are :math:`\Delta = x \sigma` apart are
:math:`(\epsilon, \delta)`-indistinguishable if and only if

.. math:: \delta \ge \Phi(x/2 - \epsilon/x) - e^\epsilon\, \Phi(-x/2 - \epsilon/x)

which is solved here for the shift x, or for epsilon. The classical formula
:math:`x = \epsilon / \sqrt{2 \log(1.5/\delta)}` is smaller for moderate epsilon. It grows with epsilon, and
the true shift only with its root, so it is no bound once it exceeds the true x (at delta 1e-4 from epsilon 8.4 on).

Source: Balle and Wang, Improving the Gaussian mechanism for differential privacy, 2018, theorem 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

_HALVINGS = 200


def delta_of(shift: float, epsilon: float) -> float:
    """Return the smallest delta for a shift, in standard deviations.

    The scaled complementary error function prevents overflow:
    ``e^epsilon Phi(-x/2 - epsilon/x) = 1/2 exp(-(x/2 - epsilon/x)^2 / 2) erfcx((x/2 + epsilon/x) / sqrt 2)``.
    """
    from scipy.special import erfcx, ndtr

    if shift == 0:
        return 0.0
    low, high = shift / 2 - epsilon / shift, shift / 2 + epsilon / shift
    scale = math.exp(-(low**2) / 2)
    subtrahend = 0.5 * scale * float(erfcx(high / math.sqrt(2)))
    return float(ndtr(low)) - subtrahend if low > 0 else 0.5 * scale * float(erfcx(-low / math.sqrt(2))) - subtrahend


@cache
def largest_shift(epsilon: float, delta: float) -> float:
    """Return the largest shift, in standard deviations, that stays within (epsilon, delta)."""
    return _last(lambda shift: delta_of(shift, epsilon) <= delta)


def smallest_epsilon(shift: float, delta: float) -> float:
    """Return the smallest epsilon (0 or more) at which a shift, in standard deviations, is within (epsilon, delta)."""
    if delta_of(shift, 0.0) <= delta:
        return 0.0
    below = _last(lambda epsilon: delta_of(shift, epsilon) > delta)
    return math.nextafter(below, math.inf)


def _last(holds: Callable[[float], bool]) -> float:
    """Return the largest number, to working precision, up to which a condition holds."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
