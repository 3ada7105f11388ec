"""Is the forget set like a random sample of the training data? The head alone can tell.

At the head, the mean gradient over all training rows is known (the stored g without the b/V of objective
perturbation; 0 at an optimum without it). The forget rows' mean gradient differs from it by sampling noise, if they are
a random sample, of expected square ``tr(cov) / N_f (1 - N_f/N)``. The ratio of what is seen to that is about 1 for
random samples; for a whole class it is in the hundreds.
"""

from __future__ import annotations

import math

from sfu.unlearning.request import ForgetRequest

UNLIKE_A_SAMPLE = 20.0
"""Above this ratio the forget set's curvature is not taken to stand for the rest."""
DOUBTFUL = 5.0
"""Random samples of digits and CIFAR-10 features stay below this 999 times in 1000 (fewer where one direction
dominates); above it the reader is warned."""


def sampling_ratio(request: ForgetRequest) -> float | None:
    """Squared deviation of the forget gradient over its expectation for a random sample; ``None`` for a single row.

    A row's gradient is the outer product of its slope and its design row, so the trace of the covariance over rows
    needs no matrix. With weights the mean is a ratio of sums, and its variance is linearised.
    """
    head, count = request.head, request.n_forget
    if count < 2:
        return None
    design_FE, rows = request.design_FE, request.data()
    slope_FC = head.loss.slopes(design_FE @ head.parameters_CE.T, request.labels_F)
    share_F = slope_FC.new_full((count,), 1 / count) if rows.weights_N is None else rows.weights_N.to(slope_FC)
    share_F = share_F / share_F.sum()
    square_F = share_F.square()
    mean_CE = (slope_FC * share_F[:, None]).T @ design_FE
    across = float((((slope_FC * square_F[:, None]).T @ design_FE) * mean_CE).sum())
    square = float((square_F * slope_FC.square().sum(1) * design_FE.square().sum(1)).sum())
    spread = square - 2 * across + float(square_F.sum() * mean_CE.square().sum())
    deviation = float((request.forget_gradient() - head.rows_gradient_CE).square().sum())
    expected = max(0.0, spread - 1e-12 * square) * count / (count - 1) * (1 - count / head.n_train)
    if expected <= 0:  # copies of one row, or no gradient at all
        return math.inf if deviation > 0 else None
    return deviation / expected
