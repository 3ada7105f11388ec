r"""What a head says of rows, as numbers that attacks compare.

Outputs z are taken for logits, :math:`p = \operatorname{softmax}(z)`, whatever the head's loss is. Nothing is computed
from a rounded probability: :math:`\log p` and :math:`\log(1 - p)` keep their digits however certain the head is.

Shapes: T rows, S heads, C classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from sfu.heads.base import Head


def confidences(outputs: Tensor, labels_T: Tensor) -> Tensor:
    r"""Return :math:`\log p_y / (1 - p_y) = z_y - \log \sum_{c \ne y} e^{z_c}`, of outputs ``[T, ..., C]``.

    It is the logit-scaled confidence of Carlini et al. 2022, which is nearly Gaussian over heads.
    """
    own = _own(outputs, labels_T)
    others = outputs.scatter(-1, own, -torch.inf).logsumexp(-1)
    return outputs.gather(-1, own).squeeze(-1) - others


def cross_entropies(logits_TC: Tensor, labels_T: Tensor) -> Tensor:
    r""":math:`-\log p_y` in nats, ``[T]``."""
    return -torch.nn.functional.logsigmoid(confidences(logits_TC, labels_T))


def modified_entropies(logits_TC: Tensor, labels_T: Tensor) -> Tensor:
    r"""Return :math:`-(1 - p_y) \log p_y - \sum_{c \ne y} p_c \log(1 - p_c)`, ``[T]``.

    It is small for a row that the head is sure of, and rightly so. Where :math:`p_c` is near 1, as it can be for the
    largest class alone, :math:`\log(1 - p_c)` is summed over the other classes.

    Source: Song and Mittal 2021, "Systematic evaluation of privacy risks of machine learning models".
    """
    log_p_TC = logits_TC.log_softmax(-1)
    largest_T1 = logits_TC.argmax(-1, keepdim=True)
    rest_T1 = logits_TC.scatter(-1, largest_T1, -torch.inf).logsumexp(-1, keepdim=True)
    log_rest_TC = torch.log1p(-log_p_TC.exp().clamp(max=0.5))
    log_rest_TC = log_rest_TC.scatter(-1, largest_T1, rest_T1 - logits_TC.logsumexp(-1, keepdim=True))
    terms_TC = log_p_TC.exp() * log_rest_TC
    own_T1 = _own(logits_TC, labels_T)
    of_label_T1 = -log_rest_TC.gather(-1, own_T1).exp() * cross_entropies(logits_TC, labels_T)[:, None]
    return -terms_TC.scatter(-1, own_T1, of_label_T1).sum(-1)


def confidences_under(original: Head, parameters_SCE: Tensor, features_TD: Tensor, labels_T: Tensor) -> Tensor:
    """Return the confidences of rows under many heads of one kind, ``[S, T]``, in one pass over the rows."""
    rows = original.rows(features_TD, labels_T)
    found_TS, done = torch.empty(rows.count, len(parameters_SCE), dtype=torch.float64, device=rows.device), 0
    for chunk in rows.chunks():
        own_BS = confidences(chunk.outputs(parameters_SCE).double(), chunk.labels_B)
        found_TS[done : done + len(own_BS)] = own_BS
        done += len(own_BS)
    return found_TS.T


def _own(outputs: Tensor, labels_T: Tensor) -> Tensor:
    """Class numbers ``[T, ..., 1]`` that gather the outputs of the labels."""
    index = labels_T.to(outputs.device).reshape(-1, *[1] * (outputs.ndim - 1))
    return index.expand(*outputs.shape[:-1], 1)
