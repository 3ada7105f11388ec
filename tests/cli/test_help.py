"""What sfu --keys prints: defaults as a run composes them, and what differs between the choices of a group."""

from __future__ import annotations

import pytest

from sfu.cli.help import keys_text


def test_every_line_fits_and_every_key_stands_there_once():
    lines = keys_text([]).splitlines()
    assert max(map(len, lines)) < 80
    keys = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert len(set(keys)) == len(keys) > 100


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("head.tolerance", "head.tolerance: float = 1e-08 (1e-5 with head=linearised)"),
        ("dataset.normalize_rows", "dataset.normalize_rows: bool = true (false with dataset=features)"),
        ("backbone.name", "backbone.name: str = auto"),
        ("methods", "methods: list[str] = [original, retrained,"),
        ("dataset.path", "dataset=features: File of features, .npz or .safetensors."),
        ("dataset.damaged", "or skip them. Not with dataset=features."),
        ("loss.smoothing", "Only with loss=huber_hinge."),
        ("loss.name", "loss.name: huber_hinge | logistic | quadratic | softmax | squared_hinge The choice itself;"),
        ("colour", "No key begins with colour."),
    ],
)
def test_defaults_and_meanings_are_told_by_choice_where_they_differ(key, told):
    assert told in " ".join(keys_text([key]).split())
