r"""Many solves with weighted sums of a few product operators, in one subspace that grows.

Cross-validation solves :math:`(\sum_j w_{kj} H_j + \rho R)\, u = g_k` for each fold k and many rho. The operators
:math:`H_j` are always the same, those of disjoint sets of rows. In a subspace with basis V each system is a small one,
with the matrix :math:`\sum_j w_{kj} V^T H_j V`, and one product of all :math:`H_j` with a new basis vector (one pass
over the rows) extends all of them. The subspace grows by the systems' preconditioned residuals until these are small: a
block Davidson method, and for one system conjugate gradients.

The basis is orthonormal on regularised parameters, so R is the identity in the subspace; biases go along.

Shapes: J operators, M basis vectors, N new ones, C classes, E = D (+ 1 with bias).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sfu.lazy import torch
from sfu.operators.base import CurvatureOperator, DampedInverse, LinearSolution
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.preconditioner import Kronecker
from sfu.operators.products import ProductOperator
from sfu.operators.spectral import SpectralInverse

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING = 1e-5  # of a vector that is left outside the subspace: its direction is rounding
_FIRST = (1e-2, 10.0)
"""Dampings, in mean eigenvalues, with whose preconditioned right-hand sides the subspace begins."""
_TIGHT, _LOOSE = 1e-6, 3e-4
"""Squared error of a fold's solution in the norm of its operator, relative to the solution's own square."""
_STEP, _SINGLE_STEP = 1e-9, 1e-6
"""The same of the step itself, with products in float64 and in float32."""
_STEPS, _REMEMBERED = 100, 32


class Limits(NamedTuple):
    """Sizes at which a subspace is treated in another way.

    Attributes:
        cheap: Multiplications of a product up to which folds are solved tightly (about 10 ms).
        single: Multiplications of a product above which it is float32.
        numbers: Largest basis (1 GiB in float32).
    """

    cheap: float = 1e8
    single: float = 2e9
    numbers: int = 1 << 28


LIMITS = Limits()


class SharedSubspace:
    """A growing subspace, and operators restricted to it.

    Attributes:
        ridge: The l2 of all operators.
        unit: The mean eigenvalue of their union on regularised parameters, from its trace.
        basis_MCE: The basis V, in float32 if products are.
    """

    def __init__(
        self, operators: Sequence[ProductOperator], unit: float, preconditioner: Kronecker, limits: Limits = LIMITS
    ) -> None:
        """Start with no direction; l2 and R are the same in all operators, and the preconditioner suits their union."""
        first, self.preconditioner, self._limits = operators[0], preconditioner, limits
        self.work = first.ridge_E.shape[0] * sum(operator.n_outputs for operator in operators)
        self.ridge, self.unit, single = first.ridge, unit, self.work > limits.single
        self._operators = [operator.to_float32() for operator in operators] if single else list(operators)
        self._regularized_E = self._operators[0].regularized_E
        self.basis_MCE = self._regularized_E.new_zeros(0, first.n_classes, len(first.regularized_E))
        self._coordinates: list[tuple[Tensor, Tensor]] = []
        self._matrices_JMM = torch.zeros(len(operators), 0, 0, dtype=torch.float64, device=self.basis_MCE.device)

    @property
    def tolerance(self) -> float:
        """The error to which folds are solved."""
        return _TIGHT if self.work <= self._limits.cheap else _LOOSE

    @property
    def step_tolerance(self) -> float:
        """The error to which the step itself is solved."""
        return _STEP if self.basis_MCE.dtype == torch.float64 else _SINGLE_STEP

    @property
    def full(self) -> bool:
        """Whether memory allows no further direction."""
        return len(self.basis_MCE) > 0 and self.basis_MCE.numel() + self.basis_MCE[0].numel() > self._limits.numbers

    def extend(self, vectors_NCE: Tensor) -> bool:
        """Add what vectors have outside the subspace; return whether there was anything."""
        left_NCE = vectors_NCE.to(self.basis_MCE)
        sizes = (left_NCE * self._regularized_E).flatten(1).norm(dim=1).tolist()
        left_NCE, found_NCE = self._outside(left_NCE, self.basis_MCE), self.basis_MCE[:0]
        for left_CE, size in zip(left_NCE, sizes, strict=True):
            alone_CE = self._outside(left_CE[None], found_NCE)[0]
            norm = float((alone_CE * self._regularized_E).norm())
            if norm > _NOTHING * size:
                found_NCE = torch.cat([found_NCE, alone_CE[None] / norm])
        if len(found_NCE):
            added_NCE = self._outside(found_NCE, self.basis_MCE)
            added_NCE /= (added_NCE * self._regularized_E).flatten(1).norm(dim=1)[:, None, None]
            self.basis_MCE = torch.cat([self.basis_MCE, added_NCE])
            images_JNCE = torch.stack([operator.matmul(added_NCE) for operator in self._operators])
            images_JNCE -= self._operators[0].ridge_E * added_NCE
            self._matrices_JMM = self._bordered(images_JNCE)
        return len(found_NCE) > 0

    def _outside(self, vectors_NCE: Tensor, basis_MCE: Tensor) -> Tensor:
        """Return what vectors have outside the span of orthonormal ones."""
        inside_NM = (vectors_NCE * self._regularized_E).flatten(1) @ basis_MCE.flatten(1).T
        return vectors_NCE - (inside_NM @ basis_MCE.flatten(1)).view_as(vectors_NCE)

    def _bordered(self, images_JNCE: Tensor) -> Tensor:
        """Return the restricted matrices with rows and columns for the new directions."""
        new_JNM = (images_JNCE.flatten(2) @ self.basis_MCE.flatten(1).T).double()
        before = self._matrices_JMM.shape[1]
        corner_JNN = (new_JNM[..., before:] + new_JNM[..., before:].mT) / 2
        above = torch.cat([self._matrices_JMM, new_JNM[..., :before].mT], 2)
        return torch.cat([above, torch.cat([new_JNM[..., :before], corner_JNN], 2)], 1)

    def coordinates(self, right_CE: Tensor) -> Tensor:
        """Return ``V^T b``, ``[1, M]`` in float64; those of a tensor that was given before are extended."""
        known = next((pair for pair in self._coordinates if pair[0] is right_CE), None)
        if known is None:
            known = (right_CE, self._matrices_JMM.new_zeros(1, 0))
        new_MCE = self.basis_MCE[known[1].shape[1] :]
        added_1M = (new_MCE.flatten(1) @ right_CE.to(self.basis_MCE).flatten()).double()[None]
        found_1M = torch.cat([known[1], added_1M], 1)
        others = [pair for pair in self._coordinates if pair[0] is not right_CE]
        self._coordinates = [*others[-_REMEMBERED:], (right_CE, found_1M)]
        return found_1M

    def lift(self, coordinates_1M: Tensor) -> Tensor:
        """Return ``V c``, ``[C, E]`` in float64."""
        return torch.einsum("m,mce->ce", coordinates_1M[0].to(self.basis_MCE), self.basis_MCE).double()

    def combined(self, weights: Sequence[float]) -> ExplicitOperator:
        """Return a weighted sum of the operators' data terms, and the regulariser, restricted to the subspace."""
        data_MM = torch.einsum("j,jmn->mn", self._matrices_JMM.new_tensor(list(weights)), self._matrices_JMM)
        ones_M = data_MM.new_ones(len(data_MM))
        return ExplicitOperator(data_MM + self.ridge * torch.diag(ones_M), 1, ones_M)

    def lengths(self) -> ExplicitOperator | None:
        """Return ``V^T V``; ``None`` without biases, where it is the identity."""
        of_biases_MB = self.basis_MCE[..., self._regularized_E == 0].flatten(1).double()
        if not of_biases_MB.shape[1]:
            return None
        ones_M = of_biases_MB.new_ones(len(of_biases_MB))
        return ExplicitOperator(of_biases_MB @ of_biases_MB.T + torch.diag(ones_M), 1, ones_M)

    def residuals(self, weights_KJ: Tensor, rho: float, coordinates_KM: Tensor, rights_KCE: Tensor) -> Tensor:
        """Return ``b_k - (sum_j w_kj H_j + rho R) V c_k`` of each system, ``[K, C, E]``, for weights that sum to 1."""
        lifted_KCE = torch.einsum("km,mce->kce", coordinates_KM.to(self.basis_MCE), self.basis_MCE)
        left_KCE = rights_KCE - rho * self._regularized_E * lifted_KCE
        for weights_K, operator in zip(weights_KJ.T, self._operators, strict=True):
            with_it = weights_K != 0
            if bool(with_it.any()):
                left_KCE[with_it] -= weights_K[with_it, None, None] * operator.matmul(lifted_KCE[with_it])
        return left_KCE


class SubspaceInverse(DampedInverse):
    """The damped inverses of one weighted sum of operators, in a subspace that several sums share.

    Attributes:
        error: Squared error of the last solution in the norm of the sum, relative to the solution's own square.
        steps: How often the subspace was extended for it.
    """

    def __init__(self, subspace: SharedSubspace, weights: Sequence[float]) -> None:
        """Take weights that sum to 1."""
        self.subspace, self.weights = subspace, list(weights)
        self.error = 0.0
        self._known: SpectralInverse | None = None
        self._restricted: ExplicitOperator | None = None
        self.steps = 0

    @property
    def mean_eigenvalue(self) -> float:
        """That of the union of all operators."""
        return self.subspace.unit

    @property
    def eigenvalues(self) -> Tensor:
        """Those of the union of all operators, as the preconditioner has them."""
        return self.subspace.preconditioner.eigenvalues + self.subspace.ridge

    @property
    def invertible(self) -> bool:
        return self.subspace.ridge > 0

    def account(self) -> dict[str, float | int | str]:
        return {"solver": "subspace", "solve_residual": self.error**0.5, "solve_iterations": self.steps}

    def restricted(self) -> ExplicitOperator:
        """Return the operator restricted to the subspace."""
        if self._restricted is None or len(self._restricted.regularized_E) != len(self.subspace.basis_MCE):
            self._restricted = self.subspace.combined(self.weights)
        return self._restricted

    def small(self) -> SpectralInverse:
        """Return the inverses restricted to the subspace, for many rho."""
        if self._known is None or self._known.eigenvalues_BD.shape[1] != len(self.subspace.basis_MCE):
            operator = self.restricted()
            self._known = SpectralInverse(operator.blocks_BKK, operator.regularized_K)
        return self._known

    def solve_many(self, right_CE: Tensor, rhos: list[float], *, floor: float = 0.0) -> Tensor:
        """Solve for each rho to a small error in the norm of H; a floor of at most l2 changes nothing."""
        return torch.stack([self.solved(right_CE, rho, self.subspace.step_tolerance) for rho in rhos])

    def solved(self, right_CE: Tensor, rho: float, tolerance: float) -> Tensor:
        """Extend the subspace until the error is below the tolerance, and return the solution, ``[C, E]``."""
        self.steps = 0
        while self.steps < _STEPS and self.improve(right_CE, rho, tolerance):
            self.steps += 1
        return self.value(right_CE, rho)

    def value(self, right_CE: Tensor, rho: float) -> Tensor:
        """Return the solution in the subspace as it is, ``[C, E]``."""
        return self.subspace.lift(self.restricted().solve(self.subspace.coordinates(right_CE), rho).value_CE)

    def scores(
        self, right_CE: Tensor, rhos: list[float], held_out: CurvatureOperator, *, floor: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score in the subspace; ``held_out`` is another sum of its operators."""
        assert isinstance(held_out, SubspaceProducts)
        coordinates_1M, small = self.subspace.coordinates(right_CE), self.subspace.combined(held_out.weights)
        along_M, curved_M, square_M = self.small().scores(coordinates_1M, rhos, small, floor=floor)
        if (lengths := self.subspace.lengths()) is not None:
            _, square_M, _ = self.small().scores(coordinates_1M, rhos, lengths, floor=floor)
        return along_M, curved_M, square_M

    def improve(self, right_CE: Tensor, rho: float, tolerance: float) -> bool:
        """Extend the subspace unless the error at one rho is below the tolerance already; return whether it grew."""
        return _improve([self], [right_CE], rho, tolerance)


def _improve(inverses: Sequence[SubspaceInverse], rights: Sequence[Tensor], rho: float, tolerance: float) -> bool:
    """Extend the subspace by the preconditioned residuals of the systems whose error is above the tolerance."""
    subspace = inverses[0].subspace
    solve = subspace.preconditioner.inverse(subspace.ridge + rho)
    rights_KM = torch.cat([subspace.coordinates(right_CE) for right_CE in rights])
    solved_KM = torch.cat(
        [inverse.restricted().solve(b_M[None], rho).value_CE for inverse, b_M in zip(inverses, rights_KM, strict=True)]
    )
    weights_KJ = torch.stack([rights_KM.new_tensor(inverse.weights) for inverse in inverses])
    residuals_KCE = subspace.residuals(weights_KJ, rho, solved_KM, torch.stack(list(rights)))
    sizes_K, directions = (rights_KM * solved_KM).sum(1), []
    for inverse, residual_CE, size in zip(inverses, residuals_KCE, sizes_K.tolist(), strict=True):
        direction_CE = solve(residual_CE)
        inverse.error = float((residual_CE * direction_CE).sum()) / size if size > 0 else 0.0
        if inverse.error > tolerance:
            directions.append(direction_CE)
    return len(directions) > 0 and not subspace.full and subspace.extend(torch.stack(directions))


def refine(inverses: Sequence[DampedInverse], rights: Sequence[Tensor], rho: float) -> bool:
    """Improve what the inverses of folds return for one rho; ``False`` if they are exact, or good enough."""
    shared = [inverse for inverse in inverses if isinstance(inverse, SubspaceInverse)]
    return len(shared) == len(inverses) > 0 and _improve(shared, rights, rho, shared[0].subspace.tolerance)


def solve_together(operators: Sequence[CurvatureOperator], rights: Sequence[Tensor], rho: float) -> list[Tensor]:
    """Solve ``(H + rho R) x = b`` for each operator and right-hand side; a subspace that they share grows for all."""
    members = [one for one in operators if isinstance(one, SubspaceProducts)]
    if len(members) < len(operators):
        return [one.solve(right_CE, rho).value_CE for one, right_CE in zip(operators, rights, strict=True)]
    inverses, tolerance = [one.damped() for one in members], members[0].subspace.step_tolerance
    for _ in range(_STEPS):
        if not _improve(inverses, rights, rho, tolerance):
            break
    return [inverse.value(right_CE, rho) for inverse, right_CE in zip(inverses, rights, strict=True)]


@dataclass(frozen=True)
class SubspaceProducts(ProductOperator):
    """Products with a weighted sum of operators that share a subspace, in which their inverses are found."""

    subspace: SharedSubspace = field(kw_only=True)
    weights: tuple[float, ...] = field(kw_only=True)

    def damped(self) -> SubspaceInverse:
        return SubspaceInverse(self.subspace, self.weights)

    def solve(self, right_CE: Tensor, rho: float = 0.0) -> LinearSolution:
        """Solve in the subspace, as tightly as the step itself."""
        inverse, tolerance = self.damped(), self.subspace.step_tolerance
        value_CE, converged = inverse.solved(right_CE, rho, tolerance), inverse.error <= tolerance
        return LinearSolution(value_CE, "subspace", inverse.error**0.5, inverse.steps, converged)

    def combine(self, others: Sequence[CurvatureOperator], coefficients: Sequence[float]) -> ProductOperator:
        """Return a sum in the same subspace, or plain products if another operator is not in it."""
        plain = ProductOperator(self.parts, self.ridge_E, self.regularized_E, self.n_classes, self.unseen)
        found = plain.combine(others, coefficients)
        members = [self, *(other for other in others if isinstance(other, SubspaceProducts))]
        if len(members) <= len(others) or any(member.subspace is not self.subspace for member in members):
            return found
        rows = zip(*(member.weights for member in members), strict=True)
        weights = tuple(sum(c * w for c, w in zip(coefficients, row, strict=True)) for row in rows)
        return _member(found, self.subspace, weights)


def _member(plain: ProductOperator, subspace: SharedSubspace, weights: tuple[float, ...]) -> SubspaceProducts:
    return SubspaceProducts(
        plain.parts, plain.ridge_E, plain.regularized_E, plain.n_classes, plain.unseen, subspace=subspace,
        weights=weights,
    )  # fmt: skip


def share_subspace(
    operators: Sequence[ProductOperator],
    weights: Sequence[float],
    rights: Sequence[Tensor],
    limits: Limits = LIMITS,
) -> list[SubspaceProducts]:
    """Return the same operators, whose weighted sums are inverted in one subspace.

    Args:
        operators: Those of disjoint sets of rows.
        weights: The total weight of each.
        rights: Right-hand sides ``[C, E]`` with which the subspace begins.
        limits: Sizes at which the subspace is treated in another way.
    """
    total = sum(weights)
    union = operators[0].combine(operators[1:], [weight / total for weight in weights])
    moments = union.moments()
    assert moments is not None
    outputs_CC, count = union.output_mean(), float(union.regularized_E.sum()) + union.unseen.directions
    of_biases = float(outputs_CC.trace()) * float((union.regularized_E == 0).sum())
    preconditioner = Kronecker(moments, outputs_CC)
    unit = (union.trace() - of_biases) / (count * union.n_classes)
    subspace = SharedSubspace(operators, unit, preconditioner, limits)
    for damping in _FIRST:
        solve = preconditioner.inverse(subspace.ridge + damping * subspace.unit)
        subspace.extend(torch.stack([solve(right_CE) for right_CE in rights]))
    ones = torch.eye(len(operators)).tolist()
    return [_member(one, subspace, tuple(row)) for one, row in zip(operators, ones, strict=True)]
