"""What somebody who checks types writes with the public names. ``mypy`` checks this file; nothing runs it.

``warn_unused_ignores`` holds every ``type: ignore`` to an error that is really found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import sfu
from sfu import ForgetRequest, Head, LinearHead, MethodContext, RetainedSet, UnlearningMethod, UnlearningResult, setting


class Frame:
    """A data frame of any library."""

    def to_numpy(self, dtype: object = None, copy: bool = False) -> np.ndarray:
        raise NotImplementedError


def forget(layer: torch.nn.Linear, model: torch.nn.Module, features: torch.Tensor, labels: torch.Tensor) -> None:
    head = LinearHead.from_module(layer, l2=5e-4, n_train=50_000, loss="softmax")
    assert_type(head, LinearHead)
    result = sfu.unlearn(head, features, labels, curvature={"estimator": "closed_form"})
    assert_type(result, UnlearningResult)
    assert_type(result.head, Head)
    assert_type(result.predicted_distance_gain, float | None)
    assert_type(result.note, str | None)
    sfu.unlearn(head, features.numpy(), [0, 1], weights=[1.0, 2.0])
    sfu.unlearn(head, Frame(), Frame())
    sfu.unlearn(head, DataLoader(TensorDataset(features, labels)))
    sfu.unlearn(head, TensorDataset(features, labels))
    record = sfu.TrainingRecord(n_train=50_000, loss=torch.nn.CrossEntropyLoss(), l2="estimate")
    of_model = sfu.unlearn(model, {"pixel_values": features, "labels": labels}, record=record, layer="fc")
    assert_type(of_model.model, torch.nn.Module | None)
    sfu.unlearn(model, DataLoader(TensorDataset(features, labels)), record=of_model.head, in_place=True)
    sfu.unlearn(model, (features, labels), record={"n_train": 9})  # type: ignore[arg-type]
    head.copy_to(layer)
    assert_type(sfu.load_head("head"), Head)
    sfu.unlearn(head, 3, labels)  # type: ignore[arg-type]
    sfu.unlearn(head, features, labels, sed=0)  # type: ignore[call-arg]
    LinearHead.from_module(layer, l2="estimate", n_train=9, loss="softmax", penalize_bias=True, l2_reduction="sum")
    LinearHead.from_module(layer, l2="5e-4", n_train=9, loss="softmax")  # type: ignore[arg-type]
    LinearHead.from_module(model, l2=5e-4, n_train=9, loss="softmax")  # type: ignore[arg-type]
    LinearHead.from_module(layer, l2=5e-4, n_train=9)  # type: ignore[call-arg]
    sfu.learn(head)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Shrink(UnlearningMethod, name="typed_shrink"):
    """A method of one's own."""

    share: float = setting(0.1, "Share that is removed.", at_least=0)

    def unlearn(
        self, request: ForgetRequest, context: MethodContext, retained: RetainedSet | None = None
    ) -> UnlearningResult:
        assert_type(context.generator("noise"), torch.Generator)
        return UnlearningResult(request.unlearned_head((1 - self.share) * request.head.parameters_CE))
