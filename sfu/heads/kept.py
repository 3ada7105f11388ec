r"""What a head keeps of its training rows besides the weights: numbers and sums over rows, and no row.

All of it is of the *data term* of the mean objective, :math:`S = \frac1V \sum_i v_i \nabla^2 l_i`, without the
regulariser.

Shapes: D features, E = D (+ 1 with bias), C classes, F rows of a request, K = E or C E, the side of a Hessian's block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from sfu.errors import DataError
from sfu.heads.projections import DIRECTIONS, projected_moments
from sfu.heads.sketch import Sketch
from sfu.lazy import torch
from sfu.losses.base import Layout
from sfu.operators.spectral import without_negative
from sfu.readers import Record, Size, floats
from sfu.schema import Meta, check_number, plain_value

if TYPE_CHECKING:
    from torch import Tensor

_HESSIAN, _MEAN, _PROJECTED, _SKETCH = "data_hessian", "mean", "projected", "sketch_"
_FIRST_HESSIAN = "second"  # its name in the first schema
Share = Annotated[float, Field(ge=0, le=1)]


class KeptRecord(Record):
    """What a head's JSON file says of its training rows: the numbers."""

    bound: Size | None = None
    trace: Size | None = None
    shares: list[Share] | None = None


@dataclass(frozen=True)
class Kept:
    r"""What a head keeps of its training rows; ``None`` for each part that is not kept.

    Attributes:
        bound: Upper bound of the largest eigenvalue of the data term's Hessian at the parameters. Under losses whose
            curvature is constant, or jumps, it holds at *any* parameters: the loss's curvature bound times the largest
            eigenvalue of :math:`\sum_i v_i a_i a_i^T / V`, with design rows a and weights v (a linearised head has
            :math:`J_i^T J_i` for :math:`a_i a_i^T`).
        shares_C: Share of each class among the training rows.
        mean_D: Mean of the feature rows.
        sketch: The data term's Hessian at the parameters, encoded.
        data_hessian: That Hessian itself: ``[E, E]``, ``[C, E, E]`` or ``[C E, C E]``, by the loss. It is a sum over
            rows, so the difference of two such sums gives back the row that only one of them holds.
        trace: Trace of the data term's Hessian at the parameters, of a block of one class on average. Under a quadratic
            loss it is the mean squared norm of the design rows; for a linearised head, of the Jacobians.
        projected_2K: Means of the feature rows along random directions, and of the squares
            (:mod:`sfu.heads.projections`). They are sums over rows, too: two of them give 2 K equations of a row that
            only one of them holds.
    """

    bound: float | None = None
    shares_C: Tensor | None = None
    mean_D: Tensor | None = field(default=None, repr=False)
    sketch: Sketch | None = field(default=None, repr=False)
    data_hessian: Tensor | None = field(default=None, repr=False)
    trace: float | None = None
    projected_2K: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raise :class:`ConfigError` unless the numbers are finite and at least 0."""
        for name in ("bound", "trace"):
            object.__setattr__(self, name, plain_value(getattr(self, name)))
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), Meta(at_least=0))

    def check(self, n_classes: int, n_features: int, hessian_shape: list[int]) -> None:
        """Compare all shapes with those of a head.

        Raises:
            DataError: One differs; the message names it.
        """
        shares_C, mean_D, sketch, hessian = self.shares_C, self.mean_D, self.sketch, self.data_hessian
        if shares_C is not None and list(shares_C.shape) != [n_classes]:
            raise DataError(f"the head's class shares are {list(shares_C.shape)}. Give one for each class.")
        if mean_D is not None and list(mean_D.shape) != [n_features]:
            raise DataError(f"the head's feature mean is {list(mean_D.shape)}. Give one number for each feature.")
        if hessian is not None and list(hessian.shape) != hessian_shape:
            raise DataError(f"the head's data_hessian is {list(hessian.shape)}. Its loss needs {hessian_shape}.")
        if self.projected_2K is not None and list(self.projected_2K.shape) != [2, DIRECTIONS]:
            raise DataError(
                f"the head's projected moments are {list(self.projected_2K.shape)}. Give [2, {DIRECTIONS}] of them."
            )
        if sketch is None:
            return
        (count, side), wanted = sketch.norms_BK.shape, [[1, *hessian_shape][-3], hessian_shape[-1]]
        if [count, side] != wanted:
            raise DataError(f"the head's sketch has {count} x {side} rows. Its loss needs {wanted[0]} x {wanted[1]}.")

    @property
    def has_curvature(self) -> bool:
        """Whether there is a sketch or a Hessian."""
        return self.sketch is not None or self.data_hessian is not None

    def hessian(self, layout: Layout) -> Tensor | None:
        """Return the Hessian, decoded if only its sketch is kept, in the shape of the loss; ``None`` without either."""
        if self.data_hessian is not None or self.sketch is None:
            return self.data_hessian
        return _in_shape(self.sketch.decode(), layout)

    def numbers(self) -> Self:
        """Return it with the numbers alone: all but the feature mean, the sketch and the Hessian."""
        if self.mean_D is None and not self.has_curvature:
            return self
        return replace(self, mean_D=None, sketch=None, data_hessian=None)

    def without_rows(
        self,
        features_FD: Tensor,
        labels_F: Tensor,
        *,
        n_train: int,
        weights: tuple[float, float],
        trace: float | None,
        forgotten_hessian: Tensor | None,
    ) -> Self:
        r"""Return it for the training rows without some of them.

        The bound becomes that of the retained rows, since :math:`V_r S_r \le V S`; under a smooth loss that is not
        quadratic, at the parameters before. Sketch and Hessian stay only under a quadratic loss: those of another loss
        belong to the parameters, which have moved.

        Args:
            features_FD: Features of the rows to leave out.
            labels_F: Their labels. Class shares are dropped if these are targets, since they say no classes.
            n_train: Number N of training rows before.
            weights: Total weights V and V_f of the training rows before and of the rows to leave out.
            trace: That of the rows to leave out.
            forgotten_hessian: The Hessian of the data term of those rows, if it does not depend on the parameters.
        """
        whole, part = weights
        left, n_left = whole - part, n_train - len(labels_F)
        shares_C, mean_D, sketch, hessian = self.shares_C, self.mean_D, None, None
        projected_2K = self.projected_2K
        if labels_F.ndim > 1:
            shares_C = None
        if shares_C is not None:
            counts_C = n_train * shares_C - labels_F.bincount(minlength=len(shares_C)).to(shares_C)
            shares_C = (counts_C / n_left).clamp(0, 1)
        if mean_D is not None:
            mean_D = (n_train * mean_D - features_FD.to(mean_D).sum(0)) / n_left
        if projected_2K is not None:
            own_2K = projected_moments(features_FD).to(projected_2K)
            projected_2K = (n_train * projected_2K - len(labels_F) * own_2K) / n_left
        before = self.hessian(Layout.shared)
        if before is not None and forgotten_hessian is not None:
            after = without_negative((whole * before - part * forgotten_hessian.to(before)) / left)
            sketch = self.sketch and Sketch.encode(after, self.sketch.kind)
            hessian = None if self.data_hessian is None else after
        bound = None if self.bound is None else self.bound * whole / left
        trace_left = None
        if self.trace is not None and trace is not None:
            trace_left = max(0.0, (whole * self.trace - part * trace) / left)
        return type(self)(bound, shares_C, mean_D, sketch, hessian, trace_left, projected_2K)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Self:
        """Return it on another device, with mean and Hessian in another dtype."""
        shares_C, mean_D, sketch, hessian = self.shares_C, self.mean_D, self.sketch, self.data_hessian
        return type(self)(
            self.bound,
            None if shares_C is None else shares_C.to(device),
            None if mean_D is None else mean_D.to(device, dtype),
            sketch and sketch.to(device),
            None if hessian is None else hessian.to(device, dtype),
            self.trace,
            None if self.projected_2K is None else self.projected_2K.to(device),
        )

    def laid_out(self, lay_out: Callable[[Tensor], Tensor]) -> Self:
        """Return it with the tensors that sums run over laid out; itself if they are already."""
        names = ("mean_D", "data_hessian", "projected_2K")
        laid: dict[str, Any] = {name: lay_out(one) for name in names if (one := getattr(self, name)) is not None}
        return self if all(getattr(self, name) is one for name, one in laid.items()) else replace(self, **laid)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, for a JSON file."""
        shares = None if self.shares_C is None else self.shares_C.tolist()
        return {"bound": self.bound, "trace": self.trace, "shares": shares}

    def as_secrets(self) -> dict[str, Tensor]:
        """Return the sums over rows as tensors, for a file that the owner alone may read."""
        sketch = {} if self.sketch is None else self.sketch.tensors()
        found = {
            _HESSIAN: self.data_hessian,
            _MEAN: self.mean_D,
            _PROJECTED: self.projected_2K,
            **{_SKETCH + name: one for name, one in sketch.items()},
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def restored(cls, about: KeptRecord | None, tensors: Mapping[str, Tensor]) -> Self:
        """Return what :meth:`as_json` and :meth:`as_secrets` wrote; older files have a Hessian or nothing.

        Raises:
            ValueError: A tensor is of another shape or type, or not finite.
        """
        numbers = about or KeptRecord()
        sketch = {name.removeprefix(_SKETCH): one for name, one in tensors.items() if name.startswith(_SKETCH)}
        hessian = next((name for name in (_HESSIAN, _FIRST_HESSIAN) if name in tensors), None)
        return cls(
            numbers.bound,
            None if numbers.shares is None else torch.tensor(numbers.shares, dtype=torch.float64),
            floats(tensors, _MEAN, 1) if _MEAN in tensors else None,
            Sketch.restored(sketch) if sketch else None,
            None if hessian is None else floats(tensors, hessian, tensors[hessian].ndim),
            numbers.trace,
            floats(tensors, _PROJECTED, 2) if _PROJECTED in tensors else None,
        )


def _in_shape(blocks_BKK: Tensor, layout: Layout) -> Tensor:
    return blocks_BKK if layout is Layout.blocks else blocks_BKK[0]
