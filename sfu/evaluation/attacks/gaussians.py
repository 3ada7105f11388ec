r"""Per-row likelihood ratios under Gaussians that are fitted to shadows.

For each row there are two sets of confidences: of shadows that were trained on it, and of others. Each set has a mean,
and a variance that is moderated: with d degrees of freedom, the sample variance :math:`s^2` of a row is combined with
that of all rows,

.. math:: \tilde s^2 = \frac{d_0 s_0^2 + d\, s^2}{d_0 + d},

where :math:`d_0` and :math:`s_0^2` are fitted to the spread of :math:`\log s^2` over rows. If all rows have the same
variance, :math:`d_0` is infinite and the variances are pooled, as Carlini et al. do with few shadows; if they differ,
each row keeps its own. The score is the log-likelihood ratio of the head's own confidence.

Sources: Carlini et al. 2022, "Membership inference attacks from first principles"; Smyth 2004, "Linear models and
empirical Bayes methods", section 6, for the moderated variance. Shapes: S shadows, T rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sfu.evaluation.attacks.base import ShadowSignals

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEPS = 50


def log_likelihood_ratio(own_T: NDArray[Any], shadows: ShadowSignals) -> NDArray[Any]:
    """Return the log-likelihood ratio of each row's confidence, trained on against never seen, ``[T]``.

    Rows whose shadows do not vary at all, or that have fewer than two of a kind, get 0.
    """
    import numpy as np

    logs = []
    for mask_ST in (shadows.inside_ST, ~shadows.inside_ST):
        count_T = mask_ST.sum(0)
        mean_T = (shadows.confidence_ST * mask_ST).sum(0) / count_T.clip(1)
        square_T = ((shadows.confidence_ST - mean_T) ** 2 * mask_ST).sum(0)
        variance_T = moderated(square_T, (count_T - 1).clip(0)) * (1 + 1 / count_T.clip(1))  # of one more head
        known_T = variance_T > (np.finfo(np.float64).eps * np.abs(mean_T)) ** 2
        safe_T = np.where(known_T, variance_T, 1.0)
        log_T = -0.5 * np.log(safe_T) - 0.5 * (own_T - mean_T) ** 2 / safe_T
        logs.append(np.where(known_T & (count_T > 1), log_T, np.nan))
    return np.nan_to_num(logs[0] - logs[1], nan=0.0)


def moderated(square_T: NDArray[Any], freedom_T: NDArray[Any]) -> NDArray[Any]:
    """Return moderated variances from sums of squares about the mean and their degrees of freedom."""
    import numpy as np
    from scipy.special import digamma, polygamma

    sample_T = square_T / np.maximum(freedom_T, 1)
    known_T = (freedom_T > 0) & (sample_T > 0)
    if known_T.sum() < 2:
        return sample_T
    half_T = freedom_T[known_T] / 2
    level_T = np.log(sample_T[known_T]) - digamma(half_T) + np.log(half_T)
    excess = level_T.var(ddof=1) - polygamma(1, half_T).mean()
    if excess <= 0:
        return np.full_like(sample_T, square_T[known_T].sum() / freedom_T[known_T].sum())
    half_prior = _inverse_trigamma(float(excess))
    prior = float(np.exp(level_T.mean() + digamma(half_prior) - np.log(half_prior)))
    return (2 * half_prior * prior + square_T) / (2 * half_prior + freedom_T)


def _inverse_trigamma(value: float) -> float:
    """Solve ``trigamma(x) = value`` by Newton's method on its reciprocal, which is convex and nearly linear."""
    from scipy.special import polygamma

    x = 0.5 + 1 / value
    for _ in range(_STEPS):
        here = float(polygamma(1, x))
        step = here * (1 - here / value) / float(polygamma(2, x))
        x += step
        if abs(step) <= 1e-10 * x:
            break
    return x
