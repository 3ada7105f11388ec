"""Test from the head alone whether the forget set is like a random sample of the training data.

At the head, the mean gradient over all training rows is known (the stored g without the b/V of objective
perturbation; 0 at an optimum without it). The forget rows' mean gradient differs from it by sampling noise, if they are
a random sample, of expected square ``tr(cov) / N_f (1 - N_f/N)``. The ratio of the observed square to the expected one
is about 1 for random samples, and in the hundreds for a whole class.
"""

from __future__ import annotations

import math

from sfu.lazy import torch
from sfu.request import ForgetRequest

UNLIKE_A_SAMPLE = 20.0
"""Above this ratio the forget set's curvature does not represent the retained data's."""


def sampling_ratio(request: ForgetRequest) -> float | None:
    """Return the squared deviation of the forget gradient over its expectation for a random sample.

    A row's gradient is its slope pulled back, so the trace of the covariance over rows needs no matrix. With weights
    the mean is a ratio of sums, and its variance is linearised. ``None`` for a single row.
    """
    head, count = request.head, request.n_forget
    if count < 2:
        return None
    mean_CE, twice_CE = (torch.zeros_like(head.parameters_CE) for _ in range(2))
    square = shares = 0.0
    for chunk in request.data().chunks():
        share_B1 = chunk.share_B[:, None]
        slope_BC = head.loss.slopes(chunk.outputs(head.parameters_CE), chunk.labels_B)
        mean_CE += chunk.pull(share_B1 * slope_BC)
        twice_CE += chunk.pull(share_B1.square() * slope_BC)
        square += chunk.squares(share_B1 * slope_BC)
        shares += float(share_B1.square().sum())
    spread = square - 2 * float((twice_CE * mean_CE).sum()) + shares * float(mean_CE.square().sum())
    gradient_CE = mean_CE + head.objective().gradient_without_rows(head.parameters_CE)
    deviation = float((gradient_CE - head.rows_gradient_CE).square().sum())
    expected = max(0.0, spread - 1e-12 * square) * count / (count - 1) * (1 - count / head.n_train)
    if expected <= 0:  # copies of one row, or no gradient at all
        return math.inf if deviation > 0 else None
    return deviation / expected
