"""Requests for whole classes, and methods that know no other."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sfu.errors import ConfigError
from sfu.request import ForgetRequest
from sfu.unlearning.base import UnlearningMethod


def whole_classes(labels_N: Tensor, forget_F: Tensor) -> tuple[int, ...] | None:
    """The classes to forget, if the forget set is all training rows of some classes; else ``None``."""
    counts_K = labels_N.bincount()
    of_forget_K = labels_N[forget_F].bincount(minlength=counts_K.numel())
    asked = of_forget_K > 0
    return tuple(asked.nonzero()[:, 0].tolist()) if bool((of_forget_K == counts_K)[asked].all()) else None


def refuse_instances(methods: Iterable[UnlearningMethod], labels_N: Tensor, forget_F: Tensor) -> None:
    """Refuse a request for instances before any work, if a method can forget whole classes only.

    Raises:
        ConfigError: Naming the method.
    """
    for method in methods:
        if method.whole_classes and whole_classes(labels_N, forget_F) is None:
            raise _refusal(type(method).__module__.rsplit(".", 1)[-1])


def classes_of(request: ForgetRequest, method: str) -> tuple[int, ...]:
    """The classes the request is for.

    Raises:
        ConfigError: It is for instances.
    """
    if request.classes is None:
        raise _refusal(method)
    return request.classes


def _refusal(method: str) -> ConfigError:
    return ConfigError(
        f"{method} forgets whole classes only, and this request is for single examples; give forget.classes=[...] "
        f"without forget.fraction, or leave {method} out of methods."
    )
