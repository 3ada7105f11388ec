"""Sums of outer products, against the whole product."""

from __future__ import annotations

import pytest
import torch

from sfu.losses.gram import add_gram


@pytest.mark.parametrize("width", [1, 127, 128, 129, 300, 1100])
@pytest.mark.parametrize("scaled", [True, False])
def test_it_adds_the_whole_product(width, scaled, device):
    drawn = torch.Generator().manual_seed(width)
    rows_BE = torch.randn(40, width, generator=drawn, dtype=torch.float64).to(device)
    factors_B1 = torch.rand(40, 1, generator=drawn, dtype=torch.float64).to(device) - 0.3
    start_EE = torch.randn(width, width, generator=drawn, dtype=torch.float64).to(device)
    start_EE = start_EE + start_EE.T
    total_EE, scaled_BE = start_EE.clone(), rows_BE * factors_B1 if scaled else None
    for alpha in (1.0, -2.5):
        add_gram(total_EE, rows_BE, scaled_BE, alpha=alpha)
    other_BE = rows_BE if scaled_BE is None else scaled_BE
    assert torch.allclose(total_EE, start_EE - 1.5 * rows_BE.T @ other_BE, atol=1e-11)
    assert torch.allclose(total_EE, total_EE.T, atol=1e-12)
