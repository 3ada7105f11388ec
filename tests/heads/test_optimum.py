"""What is known of an optimum: how exact its gradient is, and the certificate that says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sfu.heads.certificate import Certificate
from sfu.heads.linear import LinearHead
from sfu.heads.optimum import not_reached, rounding_bound
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.logistic import Logistic
from sfu.losses.quadratic import Quadratic

CPU = torch.device("cpu")


def test_the_bound_on_rounding_by_hand():
    """Rows (3, 4) and (0, 1) of weights 1 and 2, W = [[1, 0], [0, 0]]: norms 5 and 1, outputs (3, 0) and (0, 0)."""
    weights = torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double()
    noise = Certificate(1.0, torch.tensor([[0.0, 3.0], [4.0, 0.0]]).double(), 0.0)
    head = LinearHead(weights, torch.zeros(2, 2).double(), 0.5, 2, loss=Quadratic(), weight=3.0, certificate=noise)
    features, labels = torch.tensor([[3.0, 4.0], [0.0, 1.0]]).double(), torch.tensor([0, 1])
    rows = head.rows(features, labels, torch.tensor([1.0, 2.0]).double())
    slopes = 2.0, 1.0  # (3, 0) - (1, 0) and (0, 0) - (0, 1)
    total = 1 * 5 * (slopes[0] + 5 * 1) + 2 * 1 * (slopes[1] + 1 * 1) + 3 * 0.5 * 1 + 5
    assert rounding_bound(head, rows) == pytest.approx(2.0**-53 * (2 + 2 + 16) * total, rel=1e-14, abs=0)


def test_a_certificate_starts_with_the_gradient_that_is_left_and_its_rounding():
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 3, generator=generator).double(), torch.arange(60) % 2
    config = LinearSettings(l2=1e-2, objective_noise=0.7)
    head = train_head(
        features, labels, 2, config, Logistic(), seed=0, noise_seed=4, device=CPU, dtype=torch.float64
    )  # fmt: skip
    rows = head.rows(features, labels)
    gradient = head.objective_of(60.0).gradient(rows, head.parameters_CE)
    torch.testing.assert_close(head.gradient_CE, gradient, rtol=1e-6, atol=1e-15)
    assert head.certificate.residual_bound == pytest.approx(
        60 * float(head.gradient_CE.norm()) + rounding_bound(head, rows), rel=1e-12, abs=0
    )
    drawn = 0.7 * torch.from_numpy(np.random.default_rng(4).standard_normal((2, 3)))
    assert torch.equal(head.certificate.noise_CE, drawn)
    assert head.certificate.seeded
    plain = head.objective().gradient(rows, head.parameters_CE)
    torch.testing.assert_close(head.rows_gradient_CE, plain, rtol=1e-6, atol=1e-10)
    assert not math.isclose(float(plain.norm()), 0.0, abs_tol=1e-6)


def test_the_message_names_the_norm_the_tolerance_and_the_remedy():
    message = str(not_reached(2e-3, 1e-8, "after head.max_iterations=5 steps"))
    assert "gradient norm of 2.0e-03, not head.tolerance=1e-08, after head.max_iterations=5 steps. Raise" in message
