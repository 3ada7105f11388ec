r"""What a head may keep of the rows that it has forgotten, so that requests one after another are as good as one.

After an estimated step a head is no longer at an optimum, and nothing tells a later request how far from one it is.
With a ledger, a later request begins where the first began: its step is that of a single request for all rows so far.
Under a quadratic loss, that needs no rows, only the sums

.. math:: \sum_i w_i a_i a_i^T, \qquad \sum_i w_i (f(x_i) - y_i) a_i^T

over design rows a, at the parameters before the first request, and in parts that serve as folds. The sum of one row
*is* that row, and those parameters are the head before anything was forgotten. So a ledger is for the owner of the head
alone, and kept only if asked for.

Shapes: P parts, C classes, E = D features (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Self

from sfu.lazy import torch
from sfu.readers import floats

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 5
"""Rows are summed in at most so many parts; a cross-validation leaves out one after another."""
_TENSORS = ("hessians", "gradients", "weights", "parameters", "gradient", "numbers")
_PREFIX = "ledger_"


class Sums(NamedTuple):
    """Weighted sums over some rows, float64.

    Attributes:
        hessian_EE: Of a class's Hessian of the data term.
        gradient_CE: Of the gradient of the data term.
        weight: Total weight of the rows.
    """

    hessian_EE: Tensor
    gradient_CE: Tensor
    weight: float


def joined(earlier: Sequence[Sums], new: Sequence[Sums]) -> tuple[Sums, ...]:
    """Add new parts, at most :data:`PARTS` of them, one to each of the lightest if there are no places left."""
    assert len(new) <= PARTS, "no part would be left out"
    ordered = sorted(earlier, key=lambda sums: sums.weight)
    spare = max(0, min(PARTS, len(ordered) + len(new)) - len(ordered))
    alone, rest = list(new[:spare]), new[spare:]
    both = [
        Sums(one.hessian_EE + other.hessian_EE, one.gradient_CE + other.gradient_CE, one.weight + other.weight)
        for one, other in zip(ordered, rest, strict=False)
    ]
    return (*alone, *both, *ordered[len(rest) :])


@dataclass(frozen=True)
class Start:
    """A head before its first request: parameters, stored gradient, number and weight of training rows, l2."""

    parameters_CE: Tensor
    gradient_CE: Tensor
    n_train: int
    weight: float
    l2: float


@dataclass(frozen=True)
class Ledger:
    """The sums over all rows that a head has forgotten, and the head before them.

    Attributes:
        start: The head before the first request; ``None`` as long as there was none.
        parts: The sums.
        count: Number of rows.
        effective: For how many equally curved rows of equal weight they count.
        unseen: Share of the curvature that the requests were taken to leave unseen, the mean over their rows.
        unlabelled: Whether unlabelled rows have shown more of it; a request without any would lose that again.
    """

    start: Start | None = None
    parts: tuple[Sums, ...] = ()
    count: int = 0
    effective: float = 0.0
    unseen: float = 0.0
    unlabelled: bool = False

    def after(
        self, start: Start, new: Sequence[Sums], count: int, *, effective: float, unseen: float, unlabelled: bool
    ) -> Self:
        """Return it after a request for ``count`` rows; the rest is of all rows so far."""
        parts = joined(self.parts, new)
        return replace(
            self, start=self.start or start, parts=parts, count=self.count + count, effective=effective,
            unseen=unseen, unlabelled=unlabelled,
        )  # fmt: skip

    def as_secrets(self) -> dict[str, Tensor]:
        """Return it as tensors for the head's secret file; nothing if there was no request."""
        if self.start is None:
            return {}
        start = self.start
        numbers = (
            start.n_train, start.weight, start.l2, self.count, self.effective, self.unseen, float(self.unlabelled),
        )  # fmt: skip
        tensors = (
            torch.stack([sums.hessian_EE for sums in self.parts]),
            torch.stack([sums.gradient_CE for sums in self.parts]),
            torch.tensor([sums.weight for sums in self.parts], dtype=torch.float64),
            self.start.parameters_CE,
            self.start.gradient_CE,
            torch.tensor(numbers, dtype=torch.float64),
        )
        return {_PREFIX + name: tensor for name, tensor in zip(_TENSORS, tensors, strict=True)}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], shape: tuple[int, int], n_train: int) -> Self:
        """Return what :meth:`as_secrets` wrote, for a head of that shape with so many training rows left.

        Raises:
            ValueError: A tensor is missing, of another shape or type, or does not fit the head.
        """
        if _PREFIX + "parameters" not in tensors:
            return cls()
        axes = (3, 3, 1, 2, 2, 1)
        found = [floats(tensors, _PREFIX + name, n).double() for name, n in zip(_TENSORS, axes, strict=True)]
        hessians_PEE, gradients_PCE, weights_P, parameters_CE, gradient_CE, numbers = found
        n_parts, width = len(weights_P), shape[1]
        wanted = [(n_parts, width, width), (n_parts, *shape), (n_parts,), shape, shape, (7,)]
        if [tuple(one.shape) for one in found] != wanted or not 0 < n_parts <= PARTS:
            raise ValueError(f"the ledger's tensors have shapes {[list(one.shape) for one in found]}")
        first, weight, l2, count, effective, unseen, unlabelled = numbers.tolist()
        fits = first - count == n_train and 0 <= unseen <= 1 and min(l2, effective, count - 1) >= 0
        if not (fits and bool((weights_P > 0).all()) and float(weights_P.sum()) < weight):
            raise ValueError(f"the ledger's numbers {numbers.tolist()} do not fit a head with {n_train} training rows")
        parts = tuple(map(Sums, hessians_PEE, gradients_PCE, weights_P.tolist()))
        start = Start(parameters_CE, gradient_CE, int(first), weight, l2)
        return cls(start, parts, int(count), effective, unseen, bool(unlabelled))
