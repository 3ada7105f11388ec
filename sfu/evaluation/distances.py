r"""How far a head is from Retrained on rows, and how far an ensemble of heads is from one of retrained heads.

The margin of a row is the log odds of its label under the softmax of the outputs z,

.. math:: m = \log \frac{p_y}{1 - p_y} = z_y - \log \sum_{c \ne y} e^{z_c}

KLoM compares the margins of a row over two ensembles of heads: those that unlearned, and those that were retrained. In
sfu both populations are taken for Gaussian, because a histogram needs hundreds of heads:

.. math:: KL = \log \frac{s_r}{s_u} + \frac{s_u^2 + (m_u - m_r)^2}{2 s_r^2} - \frac12

with means m and standard deviations s (with n - 1) of the margins of unlearned (u) and retrained (r) heads.

Source of KLoM: Georgiev, Rinberg, Park, Garg, Ilyas, Madry and Neel, Attribute-to-Delete: machine unlearning via
datamodel matching, 2024, which bins the margins of each row. The limit of 12 nats is about that of their bins.

Shapes: N rows, M heads of an ensemble, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sfu.errors import DataError

KLOM_LIMIT = 12.0
"""KLoM of a row at most, in nats: beyond it, heads are told apart without doubt."""
PERCENTILES = (50, 95, 99)


def mean_jensen_shannon(logits_NC: Tensor, reference_NC: Tensor) -> float:
    """Return the mean Jensen-Shannon divergence of softmax outputs in nats, 0 to ln 2; it is the same both ways."""
    first_NC, second_NC = logits_NC.log_softmax(1), reference_NC.log_softmax(1)
    middle_NC = torch.logaddexp(first_NC, second_NC) - torch.log(torch.tensor(2.0, dtype=first_NC.dtype))
    both = [(one.exp() * (one - middle_NC)).sum(1).mean() for one in (first_NC, second_NC)]
    return max(0.0, 0.5 * float(both[0] + both[1]))


def label_margins(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the log odds of each row's label under the softmax of its outputs, ``[N]``.

    Raises:
        DataError: There is only one class.
    """
    if logits_NC.shape[1] < 2:
        raise DataError("a margin compares the label's output with others, and there is only one class.")
    own_N1 = labels_N.to(logits_NC.device)[:, None]
    others_NC = logits_NC.scatter(1, own_N1, -torch.inf)
    return logits_NC.gather(1, own_N1)[:, 0] - others_NC.logsumexp(1)


def margin_difference(logits_NC: Tensor, reference_NC: Tensor, labels_N: Tensor) -> float | None:
    """Return the mean absolute difference of the label margins of two heads in nats; ``None`` with only one class."""
    if logits_NC.shape[1] < 2:
        return None
    return float((label_margins(logits_NC, labels_N) - label_margins(reference_NC, labels_N)).abs().mean())


def klom(unlearned_MN: Tensor, retrained_MN: Tensor) -> Tensor:
    """Return KLoM of each row, ``[N]`` in nats, at most :data:`KLOM_LIMIT`.

    Where margins have no spread, two equal populations have a KLoM of 0 and others that of the limit.

    Raises:
        DataError: An ensemble has fewer than two heads, so it has no spread, or the rows differ.
    """
    if min(len(unlearned_MN), len(retrained_MN)) < 2 or unlearned_MN.shape[1:] != retrained_MN.shape[1:]:
        raise DataError(
            f"KLoM compares ensembles of margins {list(unlearned_MN.shape)} and {list(retrained_MN.shape)}. Give two "
            "heads or more on each side, and the same rows."
        )
    means, variances = (
        [function(part.double()) for part in (unlearned_MN, retrained_MN)]
        for function in (lambda part: part.mean(0), lambda part: part.var(0))
    )
    smallest = torch.finfo(torch.float64).tiny
    ratio_N = variances[0].clamp(min=smallest) / variances[1].clamp(min=smallest)
    shift_N = (means[0] - means[1]).square() / variances[1].clamp(min=smallest)
    return (0.5 * (ratio_N + shift_N - 1 - ratio_N.log())).clamp(0, KLOM_LIMIT)


def klom_summary(klom_N: Tensor) -> dict[str, float]:
    """Return mean and percentiles over rows."""
    quantiles = torch.tensor([percent / 100 for percent in PERCENTILES], dtype=torch.float64)
    found = klom_N.double().quantile(quantiles.to(klom_N.device)).tolist()
    return {"mean": float(klom_N.mean())} | {
        f"percentile_{percent}": value for percent, value in zip(PERCENTILES, found, strict=True)
    }
