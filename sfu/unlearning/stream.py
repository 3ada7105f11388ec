r"""Requests one after another from a head that keeps its full Hessian, exactly and at the price of a few products.

Under the quadratic loss the head is :math:`W = B A^{-1}` with sums over the training rows, :math:`A = \sum_i v_i a_i
a_i^T + \lambda R` and :math:`B = \sum_i v_i y_i a_i^T`, where :math:`\lambda = V l_2` and R leaves the bias alone.
Rows are taken off both sums, and off the inverse by the formula of Sherman, Morrison and Woodbury. With an l2 of the
mean, :math:`\lambda` falls with every row, which no low-rank formula follows. So the inverse keeps the
:math:`\lambda_0` of its last factorisation, in float32, and refinement in float64 solves for the head. The residual is
measured after every request, and the inverse is factorised anew where that does not fall, or where :math:`\lambda` has
fallen far.

Shapes: F rows of a request, D features, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sfu.arrays import Array, as_tensor, numbered
from sfu.errors import ConfigError, DataError
from sfu.heads.linear import LinearHead
from sfu.heads.recipe import OPTIMUM, SUM
from sfu.losses.base import Layout
from sfu.losses.targets import class_numbers
from sfu.operators.explicit import solve_positive_definite
from sfu.request import ForgetRequest

_TOLERANCE = 1e-10
"""Largest ``|B - W A| / |B|`` that is left."""
_REFINEMENTS = 12
_LAG = 0.002
"""The inverse is factorised anew once lambda has fallen by this share."""
_FEW = 0.25
"""Requests of more rows than this share of E are factorised at once."""


class RequestStream:
    """A head that forgets rows as requests come in; :attr:`head` is what it is after the last.

    Memory does not grow with the requests, but for 16 bytes a row by which it is recognised.
    """

    def __init__(self, head: LinearHead) -> None:
        """Factorise the Hessian.

        Raises:
            DataError: ``head`` is no linear head.
            ConfigError: The loss is not quadratic, or the head does not keep its full Hessian or is not at its optimum.
        """
        if not isinstance(head, LinearHead):
            own = "the .head of the result" if hasattr(head, "head") else "sfu.fit(..., loss='quadratic', keep='full')"
            raise DataError(
                f"head is a {type(head).__name__}, and a stream of requests needs a linear head of sfu. Give {own}."
            )
        if head.layout is not Layout.shared or head.kept.data_hessian is None:
            raise ConfigError(
                "a stream of requests needs a head with loss=quadratic and its full Hessian, and this one has "
                f"loss={head.loss.name} and {'a' if head.kept.data_hessian is not None else 'no'} full Hessian. Train "
                "it with head.keep=full, or sfu.fit(..., keep='full')."
            )
        if head.recipe.trained != OPTIMUM or head.recipe.estimate_l2:
            raise ConfigError(
                "a stream of requests needs a head at the optimum of a known objective, and this one was stopped "
                "early. Serve its requests by sfu.unlearn."
            )
        self._dtype, self._mask_E = head.parameters_CE.dtype, head.regularized_E.double()
        self._given = replace(head, forgotten=head.forgotten.keyed()).to(head.parameters_CE.device, torch.float64)
        self._forgotten, self._weight, self._count = self._given.forgotten, head.total_weight, head.n_train
        like = self._given.parameters_CE
        assert self._given.kept.data_hessian is not None
        self._sums_EE = self._given.kept.data_hessian * self._weight
        self._kept = replace(self._given.kept, sketch=None, data_hessian=None)
        self._parameters_CE = like.clone()
        self._right_CE = self._times(like) - self._given.gradient_CE * self._weight
        self.factorizations = 0
        self._factorize()

    @property
    def drift(self) -> float:
        """``|B - W A| / |B|`` of the head: 0 if it is Retrained, given that all requests held training rows.

        The sums cannot tell rows that were not trained on, or wrong labels: they are taken off like others.
        """
        left_CE = self._right_CE - self._times(self._parameters_CE)
        return float(left_CE.norm() / self._right_CE.norm())

    @property
    def head(self) -> LinearHead:
        """The head after all requests so far, in the dtype of the head that was given.

        Each row of the requests counts as wholly removed in its predicted share.
        """
        given = self._given
        kept = replace(self._kept, data_hessian=self._sums_EE / self._weight)
        if kept.trace is not None:
            kept = replace(kept, trace=float(self._sums_EE.trace()) / self._weight)
        weight = None if given.weight is None else self._weight
        l2 = self._ridge() / self._weight
        return replace(
            given, parameters_CE=self._parameters_CE.clone(), gradient_CE=torch.zeros_like(self._parameters_CE), l2=l2,
            n_train=self._count, weight=weight, kept=kept, forgotten=self._forgotten,
        ).to(given.parameters_CE.device, self._dtype)  # fmt: skip

    def forget(self, features: Array, labels: Any, *, weights: Array | None = None, copies: bool = False) -> int:
        """Forget rows ``[F, D]``, or one row ``[D]`` with its label, and return how many of them were new.

        Rows that this head has forgotten before are left out. Equal rows with equal labels count once, unless
        ``copies`` says that the training set held each as often as it is given. Give only rows that were trained on,
        with the labels they had: most others cannot be told. If the call raises an error, the stream is as it was.

        Raises:
            DataError: The rows do not fit the head, as for :func:`sfu.unlearn`.
            SingularHessianError: The rows left do not determine the head.
        """
        features_FD = as_tensor(features, "features")
        one = features_FD.ndim == 1
        labels_F = as_tensor(numbered([labels] if one else labels, self._given.recipe.classes), "labels")
        request = ForgetRequest(
            replace(self._given, n_train=self._count, weight=None if self._given.weight is None else self._weight),
            features_FD[None] if one else features_FD,
            class_numbers(labels_F, self._given.n_classes),
            weights_F=None if weights is None else as_tensor(weights, "weights"),
        )
        new = self._forgotten.new_rows(request.features_FD, request.labels_F, copies=copies)
        if not len(new):
            return 0
        before = dict(vars(self))
        try:
            self._take(request.rows(new) if len(new) < request.n_forget else request)
        except BaseException:
            vars(self).update(before)
            raise
        return len(new)

    def _take(self, request: ForgetRequest) -> None:
        """Take rows off all sums. No tensor is changed in place, so that those before can be had back."""
        rows = request.data()
        weights_F = torch.ones(request.n_forget).to(request.design_FE) if rows.weights_N is None else rows.weights_N
        design_FE = request.design_FE * weights_F.sqrt()[:, None]
        targets_FC = self._targets(request.labels_F) * weights_F.sqrt()[:, None]
        self._kept = self._kept.without_rows(
            request.features_FD, request.labels_F, n_train=self._count, weights=(self._weight, rows.weight),
            trace=self._kept.trace and float(design_FE.square().sum()) / rows.weight, forgotten_hessian=None,
        )  # fmt: skip
        removed, count = self._forgotten.removed, request.n_forget
        self._forgotten = replace(
            self._forgotten.after(request.features_FD, request.labels_F),
            removed=removed and (removed[0] + count, removed[1] + count, removed[2] + count),
        )
        self._weight, self._count = self._weight - rows.weight, self._count - request.n_forget
        self._sums_EE = self._sums_EE.addmm(design_FE.T, design_FE, alpha=-1)
        self._right_CE = self._right_CE.addmm(targets_FC.T, design_FE, alpha=-1)
        lags = self._ridge() < (1 - _LAG) * self._factorized_ridge
        if lags or not self._downdated(design_FE, targets_FC) or not self._refined():
            self._factorize()

    def _targets(self, labels_F: Tensor) -> Tensor:
        """Return the targets of the loss, ``[F, C]``: minus its slope where the outputs are 0."""
        at_zero = self._parameters_CE.new_zeros(len(labels_F), self._given.n_classes)
        return -self._given.loss.slopes(at_zero, labels_F)

    def _ridge(self) -> float:
        """Return the weight of the regulariser in the sums."""
        given = self._given
        return given.l2 * (given.total_weight if given.recipe.l2_reduction == SUM else self._weight)

    def _times(self, parameters_CE: Tensor) -> Tensor:
        """Return ``W A``."""
        return parameters_CE @ self._sums_EE + self._ridge() * self._mask_E * parameters_CE

    def _factorize(self) -> None:
        """Invert the matrix, and solve for the head with it."""
        matrix_EE = self._sums_EE + self._ridge() * self._mask_E.diag()
        inverse_EE = solve_positive_definite(
            matrix_EE, torch.eye(len(matrix_EE)).to(matrix_EE), "The rows that are left", lambda: "Keep more rows."
        )
        self._inverse_EE = inverse_EE.float()
        self.factorizations += 1
        self._factorized_ridge = self._last_ridge = self._ridge()
        self._parameters_CE = self._right_CE @ inverse_EE
        self._refined()

    def _downdated(self, design_FE: Tensor, targets_FC: Tensor) -> bool:
        """Take rows off the inverse, and the head with it; false if they are too many or leave too little."""
        if len(design_FE) > max(1, int(_FEW * len(self._inverse_EE))):
            return False
        single_FE = design_FE.float()
        along_EF = self._inverse_EE @ single_FE.T
        left_FF = torch.eye(len(design_FE)).to(along_EF) - single_FE @ along_EF
        solved_FE, info = torch.linalg.solve_ex(left_FF, along_EF.T)
        if int(info) or not bool(torch.isfinite(solved_FE).all()):
            return False
        self._inverse_EE = self._inverse_EE.addmm(along_EF, solved_FE)
        missed_FC = targets_FC - design_FE @ self._parameters_CE.T
        fallen = self._last_ridge - self._ridge()
        self._moved(fallen * self._mask_E * self._parameters_CE - missed_FC.T @ design_FE)
        return True

    def _moved(self, right_CE: Tensor) -> None:
        self._parameters_CE = self._parameters_CE + (right_CE.float() @ self._inverse_EE).double()
        self._last_ridge = self._ridge()

    def _refined(self) -> bool:
        """Solve for the head by refinement with the inverse; false if the residual does not fall to the tolerance."""
        size, before = _TOLERANCE * float(self._right_CE.norm()), float("inf")
        for _ in range(_REFINEMENTS):
            left_CE = self._right_CE - self._times(self._parameters_CE)
            norm = float(left_CE.norm())
            if norm <= size:
                return True
            if not norm < 0.5 * before:
                return False
            self._moved(left_CE)
            before = norm
        return False
