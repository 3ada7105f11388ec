"""The retained data's own Hessian. Not source-free: it makes Unlearned(+), the upper row."""

from __future__ import annotations

from sfu.curvature.estimators.base import HessianEstimator, HessianObservation
from sfu.errors import SourceFreeError
from sfu.operators.build import build_operator
from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet


class Exact(HessianEstimator):
    """``H_r``, the Hessian of the retained rows."""

    @property
    def access(self) -> Access:
        """Needs the retained data."""
        return Access.RETAINED

    @property
    def is_exact(self) -> bool:
        """It is."""
        return True

    def observe(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> HessianObservation:
        """Hessian of the retained rows.

        Raises:
            SourceFreeError: No retained data were given.
            DataError: They are not what the training set keeps.
        """
        if retained is None:
            raise SourceFreeError("curvature.estimator=exact needs the retained data.")
        head = request.head
        rows = request.retained_rows(retained, progress=context.progress)
        structure = self.plan(request, rows.count).structure
        return HessianObservation(build_operator(head.objective(), rows, head.parameters_CE, structure), rows.weight)
