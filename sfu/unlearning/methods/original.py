"""Nothing done: the row every method must beat."""

from __future__ import annotations

from sfu.request import Access, ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod, UnlearningResult


class Original(UnlearningMethod):
    """Returns the head as it is."""

    settings_used = ()

    @property
    def access(self) -> Access:
        """Looks at nothing."""
        return Access.NONE

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        """The head, untouched."""
        return UnlearningResult(request.head, applied=False)
