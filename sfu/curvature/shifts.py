r"""Compare means of vectors (gradients, features, predicted shares) with known means or with each other.

The squared deviation of a mean is divided by its expectation under random sampling. This ratio is distributed as
:math:`\sum_i \lambda_i z_i^2 / \sum_i \lambda_i`, with standard normal z and the eigenvalues of the covariance
:math:`\Sigma` of a row. Its mean, variance and skewness follow from tr Sigma, tr Sigma^2 and tr Sigma^3, which the
rows' inner products estimate however many dimensions they have; a chi-square distribution is shifted and scaled
to them. The expectation is an estimate, too. It is treated as an independent chi-square variable, with degrees of
freedom by the spread of the rows' squared norms: few where some rows carry most.

Sources: A. P. Dempster, A high dimensional two sample significance test, 1958 (the ratio, and matching it);
S. X. Chen and Y.-L. Qin, A two-sample test for high-dimensional data, 2010 (tr Sigma^2 from inner products of different
rows); H. Liu, Y. Tang and H. H. Zhang, A new chi-square approximation, 2009 (three moments).

Shapes: N rows, M of them (a subset), D dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

SUBSET = 512
"""A random subset of so many rows tells the moments of the covariance."""
_CHUNK_ROWS = 4096
FEWEST = 8
"""Fewer rows tell nothing of the tails."""
ROUNDING = 1e-12
"""Squares that are relatively so small may be rounding."""
_DOUBT = 2.0


class Moments(NamedTuple):
    """Moments of the covariance Sigma of rows.

    Attributes:
        trace: tr Sigma.
        second: tr Sigma^2 over (tr Sigma)^2: 1 over the number of dimensions in which rows effectively scatter.
        third: tr Sigma^3 over (tr Sigma)^3.
        freedom: Degrees of freedom of the trace, for each row.
    """

    trace: float
    second: float
    third: float
    freedom: float


def moments(gram_MM: Tensor, width: int) -> Moments | None:
    """Return the moments from inner products of centred rows with ``width`` dimensions; ``None`` if all are alike."""
    count = gram_MM.shape[0]
    squares_M = gram_MM.diagonal()
    mean = float(squares_M.mean())
    if count < FEWEST or mean <= 0:
        return None
    trace = mean * count / (count - 1)
    others_MM = gram_MM - squares_M.diag()
    # rows that are centred by their own mean have inner products of variance tr Sigma^2 and mean -tr Sigma / M
    second = float(others_MM.square().sum()) / (count * (count - 1)) - (trace / count) ** 2
    second /= ((1 - 1 / count) ** 2 + 1 / count**2) * trace**2
    second = min(max(second, 1 / width), 1.0)
    third = float((others_MM @ others_MM * others_MM).sum()) / (count * (count - 1) * (count - 2) * trace**3)
    third = min(max(third, second**2), second**1.5)
    freedom = 2 * mean**2 / max(float(squares_M.var()), 1e-12 * mean**2)
    return Moments(trace, second, third, min(freedom, 1 / second))


def p_value(ratio: float, spread: Moments, freedom: float) -> float:
    """Return the probability of a larger ratio; its expectation was estimated with ``freedom`` degrees of freedom."""
    import numpy as np
    from scipy.special import chdtrc, chdtri

    freedom = max(freedom, 1.0)
    degrees, scale = spread.second**3 / spread.third**2, spread.third / spread.second
    low, high = (math.log(chdtri(freedom, tail) / freedom) for tail in (1 - 1e-12, 1e-12))
    edges = np.exp(np.linspace(low, high, 513))
    estimate = np.sqrt(edges[:-1] * edges[1:])
    likely = -np.diff(chdtrc(freedom, freedom * edges))
    exceeds = chdtrc(degrees, np.maximum((ratio * estimate - 1) / scale + degrees, 0.0))
    return float(min(1.0, (likely * exceeds).sum()))


def subset(count: int, most: int) -> Tensor:
    """Return at most so many row numbers, drawn at random but always the same."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most]


class Shift(NamedTuple):
    """How far a mean is from where it should be.

    Attributes:
        ratio: The squared deviation over its expectation.
        p: Probability of a larger ratio.
        effect: The squared shift, in units of the variance of a row (summed over dimensions).
        at_most: What it is at most, unless the ratio is above its mean by more than :data:`_DOUBT` deviations.
    """

    ratio: float
    p: float | None
    effect: float
    at_most: float


def compare_means(
    samples: Sequence[Tensor], shares: Sequence[float], mean_D: Tensor | None = None, unit: float | None = None
) -> Shift | None:
    """Compare the mean of a sample with a known mean, or with that of another sample; ``None`` if rows are too few.

    The variance of the mean of sample k is ``shares[k]`` times that of one of its rows. ``unit`` takes the place of the
    variance of a row in what is said of the shift's size.
    """
    if min(len(sample) for sample in samples) < FEWEST:
        return None
    means = [sample.mean(0, dtype=torch.float64) for sample in samples]
    deviation = float((means[0] - (means[1] if mean_D is None else mean_D.double())).square().sum())
    rounding = ROUNDING * float(means[0].square().sum())
    centred = []
    for sample, average_D in zip(samples, means, strict=True):
        part_MD = sample[subset(len(sample), SUBSET).to(sample.device)].double() - average_D
        centred.append(part_MD - part_MD.mean(0))
    spreads = [moments(part_MD @ part_MD.T, part_MD.shape[1]) for part_MD in centred]
    traces = [_trace(sample, average_D) for sample, average_D in zip(samples, means, strict=True)]
    parts = [share * trace for share, trace in zip(shares, traces, strict=True)]
    expected = sum(parts)
    both_MD = torch.cat(centred)
    both_MD = both_MD[subset(len(both_MD), SUBSET).to(both_MD.device)]
    pooled = moments(both_MD @ both_MD.T, both_MD.shape[1])
    if pooled is None or expected <= rounding**2:  # copies of one row
        return Shift(math.inf, 0.0, math.inf, math.inf) if deviation > rounding else Shift(0.0, None, 0.0, 0.0)
    inverse = sum(
        part**2 / (len(sample) * spread.freedom)
        for part, sample, spread in zip(parts, samples, spreads, strict=True)
        if spread is not None
    )
    ratio = deviation / expected
    shift, doubt = deviation - expected, _DOUBT * expected * math.sqrt(2 * pooled.second)
    effect, at_most = (max(0.0, one) / (unit or max(traces)) for one in (shift, shift + doubt))
    return Shift(ratio, p_value(ratio, pooled, expected**2 / inverse), effect, at_most)


def _trace(sample_ND: Tensor, average_D: Tensor) -> float:
    squares = [float((part.double() - average_D).square().sum()) for part in sample_ND.split(_CHUNK_ROWS)]
    return sum(squares) / (len(sample_ND) - 1)
