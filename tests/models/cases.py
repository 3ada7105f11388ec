"""Small models of each kind that people have, with random weights, and a data set of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sfu

N, F, D, C = 200, 40, 5, 3
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(N, 4, generator=GENERATOR).double()
LABELS = (INPUTS[:, :C] + torch.randn(N, C, generator=GENERATOR)).argmax(1)
RECORD = sfu.TrainingRecord(n_train=N, loss="quadratic", l2=1e-2)
CLOSED = {"estimator": "closed_form", "on_doubt": "apply"}


class Output(dict):
    """What models of Hugging Face return: a mapping that has its keys as attributes."""

    __getattr__ = dict.__getitem__


@dataclass
class Plain:
    """The same without being a mapping."""

    logits: Tensor


class Dense(nn.Module):
    """A backbone, a classifier of a given name, and something that is done with its outputs."""

    def __init__(
        self, name: str = "fc", layer: nn.Module | None = None, after: Callable[[Tensor], Any] = lambda x: x
    ) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, D), nn.BatchNorm1d(D), nn.Tanh(), nn.Dropout(0.5))
        self.name, self.after = name, after
        self.add_module(name, nn.Linear(D, C) if layer is None else layer)
        self.double()

    def forward(self, inputs: Tensor) -> Any:
        return self.after(self.get_submodule(self.name)(self.backbone(inputs)))


class Timm(Dense):
    def get_classifier(self) -> nn.Module:
        return self.get_submodule(self.name)


class Distilled(Dense):
    """Two classifiers whose outputs are averaged, as in timm."""

    def __init__(self) -> None:
        super().__init__("head")
        self.head_dist = nn.Linear(D, C).double()

    def get_classifier(self) -> tuple[nn.Module, nn.Module]:
        return self.head, self.head_dist  # type: ignore[return-value]

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.backbone(inputs)
        return (self.head(rows) + self.head_dist(rows)) / 2


class Text(nn.Module):
    """Tokens, one of which is classified, or all of which are; the batch is a mapping, as for Hugging Face."""

    def __init__(self, pooled: str, output: Callable[[Tensor], Any] = lambda logits: Output(logits=logits)) -> None:
        super().__init__()
        self.pooled, self.output = pooled, output
        self.backbone = nn.Sequential(nn.Linear(4, D), nn.Tanh())
        self.score = nn.Linear(D, C, bias=False)
        self.double()

    def forward(self, *, input_values: Tensor, attention_mask: Tensor) -> Any:
        tokens = self.backbone(torch.stack([input_values, 2 * input_values, input_values - 1], 1))
        if self.pooled == "before":
            return self.output(self.score(tokens[:, 0]))
        logits = self.score(tokens)
        if self.pooled == "mean":
            return self.output(logits.mean(1))
        last = attention_mask.sum(1) - 1
        return self.output(logits if self.pooled == "none" else logits[torch.arange(len(last)), last])


class Convolution(nn.Module):
    """A 1 x 1 convolution as the classifier, averaged over pixels before, after, or not at all."""

    def __init__(self, pooled: str = "after") -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, D, 2), nn.ReLU())
        self.classifier = nn.Conv2d(D, C, 1)
        self.pool, self.pooled = nn.AdaptiveAvgPool2d(1), pooled
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        pixels = self.backbone(inputs.reshape(-1, 1, 2, 2).repeat(1, 1, 2, 2))
        if self.pooled == "before":
            return self.classifier(self.pool(pixels)).flatten(1)
        outputs = self.classifier(pixels)
        return outputs if self.pooled == "none" else self.pool(outputs).flatten(1)


def text_batch(rows: slice = slice(F)) -> dict[str, Tensor]:
    mask = torch.ones(len(INPUTS[rows]), 3, dtype=torch.int64)
    mask[::2, 2] = 0
    return {"input_values": INPUTS[rows], "attention_mask": mask, "labels": LABELS[rows]}
