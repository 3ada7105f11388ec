"""A whole model as a head and its features, and back.

Shapes: F examples, D inputs of the classifier layer, E = D (+ 1 with bias), C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from sfu.errors import ConfigError, DataError
from sfu.heads.base import Head
from sfu.heads.linear import LinearHead
from sfu.heads.plain_layer import require_plain
from sfu.heads.training_record import TrainingRecord
from sfu.models.batches import Batch, read_batches
from sfu.models.find_layer import Layer, as_rows, described, find_layer
from sfu.models.running import evaluating, is_close, placed, rows_of, run, unwrap
from sfu.progress import ProgressDisplay

_changed: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Layers that have forgotten rows, with their weights then: their number of training rows is not the record's."""


@dataclass(frozen=True)
class Classifier:
    """A model that is to forget some examples, as what unlearning needs.

    Attributes:
        model: The model as it was given.
        name: Name of the classifier layer.
        head: The head of that layer.
        features_FD: The layer's inputs for the examples.
        labels_F: Their labels, ``[F]`` or ``[F, C]``.
        probe: The first batch of them, on the model's device.
        marks_FB: What tells an example from others, by its raw inputs; ``None`` if these are no rows.
    """

    model: nn.Module
    name: str
    head: LinearHead
    features_FD: Tensor
    labels_F: Tensor
    probe: Batch
    marks_FB: Tensor | None

    @classmethod
    def read(
        cls, model: nn.Module, data: Any, labels: Any, record: TrainingRecord | Head | None, layer: str | None
    ) -> Classifier:
        """Find the classifier layer of a model, and its inputs for the examples to forget.

        Args:
            model: Any classifier of PyTorch.
            data: The examples (:func:`sfu.models.batches.read_batches`).
            labels: Their labels, if ``data`` has none.
            record: How the layer was trained; or the head of the request before.
            layer: Name of the layer, if it is known.

        Raises:
            ConfigError: There is no record, it contradicts itself, or is that of before an earlier request.
            DataError: The layer, the examples or the model's outputs cannot be used; the message says what to do.
        """
        if not isinstance(record, TrainingRecord | LinearHead):
            raise ConfigError(
                f"record={type(record).__name__ if record is not None else None} does not say how the model was "
                "trained. Give record=sfu.TrainingRecord(n_train=..., loss=..., optimizer=...), or, for a later "
                "request, the head of the result before."
            )
        network = unwrap(model)
        classes = record.classes if isinstance(record, TrainingRecord) else record.recipe.classes
        batches, total = read_batches(data, labels, name="features", classes=classes)
        probe = next(batches, None)
        if probe is None:
            raise DataError(f"features={type(data).__name__} gives no examples. Give at least one.")
        with evaluating(network):
            name = find_layer(network, on_device := probe.to(*placed(network)), layer)
            own = _layer(network, name)
            head = _head_of(own, name, record)
            examples = _layer_inputs(network, name, head, chain([probe], batches), total)
        assert examples.labels_N is not None, "labels were asked for"
        return cls(model, name, head, examples.features_ND, examples.labels_N, on_device, examples.marks_NB)

    def more(self, data: Any, name: str) -> Tensor:
        """Return the layer's inputs for further examples, whose labels are of no use.

        Raises:
            DataError: The examples or the model's outputs cannot be used.
        """
        network = unwrap(self.model)
        batches, total = read_batches(data, name=name, labelled=False)
        with evaluating(network):
            return _layer_inputs(network, self.name, self.head, batches, total).features_ND

    def with_head(self, head: Head, in_place: bool) -> nn.Module:
        """Return the model with the head's weights in its layer: itself, or a copy without wrappers.

        Raises:
            DataError: The model cannot be copied, or its outputs do not follow the new weights; it then keeps its own.
        """
        assert isinstance(head, LinearHead), "the head of a layer"
        network = unwrap(self.model)
        if not in_place:
            try:
                network = copy.deepcopy(network)
            except Exception as error:
                raise DataError(
                    f"the model cannot be copied ({type(error).__name__}: {str(error)[:300].rstrip('.')}). Give "
                    "in_place=True to change it itself."
                ) from error
        own = _layer(network, self.name)
        head.copy_to(own)
        try:
            with evaluating(network):
                logits_BC = as_rows(run(network, self.probe, {})[0], self.probe)
                rows_BD = self.features_FD[: len(logits_BC)]
                _require_outputs(rows_BD, logits_BC, head, require_plain(own).weight.dtype, "after the change, ")
        except BaseException:
            self.head.copy_to(own)
            raise
        if not torch.equal(head.parameters_CE, self.head.parameters_CE):
            _changed[own] = own.weight.detach().clone()
        return self.model if in_place else network


def require_order(data: Any, **given: Any) -> None:
    """Refuse what belongs to examples row by row, if these come in an order of their own.

    Raises:
        ConfigError: They do.
    """
    if isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler):
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"{name} are given for examples in a fixed order, but features=DataLoader shuffles them. Give a "
                    "loader with shuffle=False."
                )


class _Examples(NamedTuple):
    features_ND: Tensor
    labels_N: Tensor | None
    marks_NB: Tensor | None


def _layer(network: nn.Module, name: str) -> Layer:
    return cast("Layer", network.get_submodule(name))


def _head_of(own: Layer, name: str, record: TrainingRecord | LinearHead) -> LinearHead:
    linear = require_plain(own)
    if isinstance(record, TrainingRecord):
        before = _changed.get(own)
        if before is not None and torch.equal(before, own.weight):
            raise ConfigError(
                f"record.n_train={record.n_train:,} counts rows that the layer {name!r} has forgotten in an earlier "
                "request. Give record=result.head, the head of the result before."
            )
        return record.head(own)
    own_CE = LinearHead.from_module(own, l2=0.0, n_train=1, loss="quadratic").parameters_CE
    rounded_CE = record.parameters_CE.to(linear.weight).to(own_CE)
    if rounded_CE.shape != own_CE.shape or not torch.equal(rounded_CE, own_CE):
        raise ConfigError(
            f"record is a head of {record.n_features} features and {record.n_classes} outputs whose weights are not "
            f"those of the layer {described(name, own)}. Give the head of the result that gave this model."
        )
    return record.to(linear.weight.device)


def _layer_inputs(
    network: nn.Module, name: str, head: LinearHead, batches: Iterator[Batch], total: int | None
) -> _Examples:
    """Return the layer's inputs, the labels and the marks of all batches, and show the progress.

    Raises:
        DataError: The layer's outputs for these inputs are not those of the model, or labels do not fit the batch.
    """
    own, where = _layer(network, name), placed(network)
    dtype = require_plain(own).weight.dtype
    features, labels, marks = list[Tensor](), list[Tensor](), list[Tensor | None]()
    with ProgressDisplay() as display, display.stage("running the model") as tick:
        for number, batch in enumerate(batches):
            logits, calls = run(network, batch.to(*where), {name: own})
            logits_BC = as_rows(logits, batch)
            rows_BD = rows_of(calls[name][-1], logits_BC) if calls[name] else None
            if rows_BD is None:
                raise DataError(
                    f"on {batch.name}, the model's outputs {list(logits.shape)} are not those of the layer {name!r}, "
                    "as they are on the first batch. Give batches that the model treats alike."
                )
            _require_outputs(rows_BD, logits_BC, head, dtype, f"on {batch.name}, ")
            if batch.labels_B is not None:
                labels_B = batch.labels_B.reshape(1) if batch.labels_B.ndim == 0 else batch.labels_B
                if len(labels_B) != len(rows_BD):
                    raise DataError(
                        f"{batch.name} has labels of shape {list(labels_B.shape)}, but the model gives {len(rows_BD)} "
                        "rows of outputs for it. Give one label for each example."
                    )
                labels.append(labels_B)
                marks.append(batch.to(torch.device("cpu"), where[1]).marks(len(rows_BD)))
            features.append(rows_BD if rows_BD.dtype == torch.float64 else rows_BD.float())
            tick(number + 1, total or number + 1)
    if not features:
        raise DataError("there are no examples. Give at least one.")
    if len({one.shape[1:] for one in labels}) > 1:
        shapes = sorted({str(list(one.shape[1:])) for one in labels})
        raise DataError(f"labels have different shapes in different batches: {' and '.join(shapes)}. Give one form.")
    known = [one for one in marks if one is not None]
    return _Examples(
        torch.cat(features),
        torch.cat(labels) if labels else None,
        torch.cat(known) if known and len(known) == len(marks) else None,
    )


def _require_outputs(rows_BD: Tensor, logits_BC: Tensor, head: LinearHead, dtype: torch.dtype, when: str) -> None:
    """Compare the outputs of a head with those of the model, whose layer is in ``dtype``.

    Raises:
        DataError: They differ by more than rounding.
    """
    wanted_BC = head.logits(rows_BD)
    size_BC = head.outputs(rows_BD.abs(), head.parameters_CE.abs())
    precision = max(torch.finfo(dtype).eps, torch.finfo(logits_BC.dtype).eps)
    if not is_close(logits_BC, wanted_BC, size_BC, precision):
        apart = float((logits_BC.double() - wanted_BC).abs().max())
        raise DataError(
            f"{when}the layer's weights and inputs do not give the model's own outputs: they differ by up to "
            f"{apart:.3g}, where the outputs reach {float(logits_BC.abs().max()):.3g}. Something else takes part, such "
            "as weights that another layer shares, or dropout that ignores eval(). Give a model whose outputs are "
            "those of the layer."
        )
