"""Nothing done: the row every method must beat."""

from __future__ import annotations

from sfu.unlearning.method import Access, RetainedSet, Tools, Unlearned, UnlearningMethod
from sfu.unlearning.request import ForgetRequest


class Original(UnlearningMethod):
    """Returns the head as it is."""

    settings_used = ()

    @property
    def access(self) -> Access:
        """Looks at nothing."""
        return Access.NONE

    def unlearn(self, request: ForgetRequest, tools: Tools, retained: RetainedSet | None = None) -> Unlearned:
        """The head, untouched."""
        return Unlearned(request.head, applied=False)
