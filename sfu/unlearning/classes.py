"""Requests for whole classes, and methods that take no others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sfu.errors import ConfigError
from sfu.request import ForgetRequest
from sfu.unlearning.base import UnlearningMethod

if TYPE_CHECKING:
    from torch import Tensor


def whole_classes(labels_N: Tensor, forget_F: Tensor) -> tuple[int, ...] | None:
    """Return the classes to forget if the forget set is all training rows of some classes, and ``None`` otherwise."""
    counts_K = labels_N.bincount()
    of_forget_K = labels_N[forget_F].bincount(minlength=counts_K.numel())
    asked = of_forget_K > 0
    return tuple(asked.nonzero()[:, 0].tolist()) if bool((of_forget_K == counts_K)[asked].all()) else None


def refuse_instances(methods: Iterable[UnlearningMethod], labels_N: Tensor, forget_F: Tensor) -> None:
    """Refuse a request for single examples, before any work, if a method can only forget whole classes.

    Raises:
        ConfigError: The message names the method.
    """
    for method in methods:
        if method.whole_classes and whole_classes(labels_N, forget_F) is None:
            raise _refusal(method.method_name)


class ClassMethod(UnlearningMethod):
    """A method that needs no example, only the classes to forget."""

    whole_classes = True

    def classes_of(self, request: ForgetRequest) -> list[int]:
        """Return the classes to forget.

        Raises:
            ConfigError: The request is for single examples.
        """
        if request.classes is None:
            raise _refusal(self.method_name)
        return list(request.classes)


def _refusal(method: str) -> ConfigError:
    return ConfigError(
        f"{method} forgets whole classes only, but this request is for single examples. Give forget.classes=[...] "
        f"without forget.fraction, or remove {method} from methods."
    )
