r"""An upper bound of the largest eigenvalue of a positive semidefinite operator, from a few products.

Lanczos's method runs from a random unit vector b. With its Ritz values :math:`\theta_j` and off-diagonal entries
:math:`\beta_j` after k products, :math:`\bigl\|\prod_j (A - \theta_j) b\bigr\| = \prod_j \beta_j`. The part of the left
side along the leading eigenvector u is :math:`|\langle u, b \rangle| \prod_j (\lambda_{max} - \theta_j)`, so

.. math:: \prod_{j=1}^k (\lambda_{max} - \theta_j) \le \frac{\sqrt n}{t} \prod_{j=1}^k \beta_j
          \quad\text{if}\quad |\langle u, b \rangle| \ge t / \sqrt n

in n dimensions, and the random b fails the condition with a probability of at most :math:`\sqrt{2 / \pi}\, t`, whatever
the eigenvalues are. The largest number that satisfies the inequality is the bound. It holds after any number of
products, so they stop once it is near the largest Ritz value, which is a lower bound.

Source: van Dorsselaer, Hochstenbach and van der Vorst, Computing probabilistic bounds for extreme eigenvalues of
symmetric matrices with the Lanczos method, 2000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from sfu.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

FAILURE = 1e-3
"""Probability that the bound is too small, over the random vector."""
_UNITS = 100.0  # of the precision of the products
_HALVINGS = 60


def bound_by_products(
    matmul: Callable[[Tensor], Tensor], like: Tensor, *, near: float, max_products: int, eps: float
) -> float:
    r"""Return a number that is below :math:`\lambda_{max}` with a probability of at most :data:`FAILURE`.

    Args:
        matmul: Multiplies by the operator.
        like: A vector of the shape, dtype and device that it takes; its values do not matter.
        near: How many times the largest Ritz value the bound may be for the products to stop.
        max_products: Number of products at most; the bound is then what it is.
        eps: Unit roundoff of the products.
    """
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
    vector, before = vector / vector.norm(), torch.zeros_like(vector)
    alphas, betas, bound = list[float](), list[float](), 0.0
    for _ in range(max_products):
        image = matmul(vector)
        alphas.append(float((image * vector).sum()))
        image = image - alphas[-1] * vector - (betas[-1] if betas else 0.0) * before
        betas.append(float(image.norm()))
        off = torch.diag(torch.tensor(betas[:-1], dtype=torch.float64), 1)
        ritz = torch.linalg.eigvalsh(torch.diag(torch.tensor(alphas, dtype=torch.float64)) + off + off.T).tolist()
        if betas[-1] <= eps * abs(ritz[-1]):  # all that b can reach was seen
            bound = ritz[-1]
            break
        bound = _largest(ritz, betas, like.numel())
        if bound <= near * ritz[-1]:
            break
        before, vector = vector, image / betas[-1]
    return (1 + _UNITS * eps) * bound


def _largest(ritz: list[float], betas: list[float], width: int) -> float:
    """Return the largest number that satisfies the inequality, rounded up."""
    reach = math.log(math.sqrt(2 * width / math.pi) / FAILURE) + sum(map(math.log, betas))
    low, high = 0.0, math.exp(reach / len(ritz))  # of the distance to the largest Ritz value
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle > 0 and sum(math.log(middle + ritz[-1] - value) for value in ritz) <= reach:
            low = middle
        else:
            high = middle
    return ritz[-1] + high
