"""The exact Gaussian mechanism against its formula in high precision, and its limits."""

from __future__ import annotations

import math

import pytest
from scipy.integrate import quad
from scipy.stats import norm

from sfu.unlearning.gaussian_mechanism import delta_of, largest_shift, smallest_epsilon


@pytest.mark.parametrize(("shift", "epsilon"), [(0.3, 0.5), (1.0, 1.0), (4.0, 3.0), (0.05, 0.0), (6.0, 20.0)])
def test_delta_is_the_hockey_stick_divergence_of_two_gaussians(shift, epsilon):
    start = epsilon / shift + shift / 2  # where the densities' ratio is e^epsilon
    found, _ = quad(
        lambda z: norm.pdf(z - shift) - math.exp(epsilon) * norm.pdf(z), start, start + 40, epsabs=0, limit=200
    )
    assert delta_of(shift, epsilon) == pytest.approx(found, rel=1e-7)


@pytest.mark.parametrize("delta", [1e-12, 1e-4, 0.1])
@pytest.mark.parametrize("epsilon", [1e-4, 0.1, 1.0, 8.0, 50.0, 1e4, 1e12])
def test_the_largest_shift_is_on_the_border_and_inverts(epsilon, delta):
    shift = largest_shift(epsilon, delta)
    assert delta_of(shift, epsilon) <= delta < delta_of(shift * (1 + 1e-3), epsilon)
    assert smallest_epsilon(shift, delta) == pytest.approx(epsilon, rel=1e-6)


def test_the_classical_formula_is_smaller_for_small_epsilon_and_no_bound_for_large():
    def classical(epsilon: float) -> float:
        return epsilon / math.sqrt(2 * math.log(1.5 / 1e-4))

    for epsilon in (0.01, 1.0, 8.3):
        assert classical(epsilon) < largest_shift(epsilon, 1e-4)
    for epsilon in (8.5, 100.0, 1e6):
        assert delta_of(classical(epsilon), epsilon) > 1e-4
    assert largest_shift(1e12, 1e-4) == pytest.approx(math.sqrt(2e12), rel=1e-5)


def test_a_shift_that_delta_alone_covers_costs_no_epsilon():
    assert smallest_epsilon(1e-5, 1e-4) == 0.0
    assert smallest_epsilon(0.0, 1e-4) == 0.0


@pytest.mark.parametrize("shift", [0.01, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-4])
def test_the_smallest_epsilon_is_on_the_safe_side_of_the_border(shift, delta):
    epsilon = smallest_epsilon(shift, delta)
    assert delta_of(shift, epsilon) <= delta < delta_of(shift, math.nextafter(epsilon, 0.0))
