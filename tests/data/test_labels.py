"""Labels that are no class indices get a remedy that works."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from sfu.data.labels import label_problem

INDICES = np.array([1, 0, 2, 1])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (INDICES > 1, "has dtype bool"),
        (INDICES.astype(np.float32), "has dtype float32"),
        (INDICES[:, None], "has shape [4, 1]"),
        (INDICES[:, None].astype(np.float64), "has shape [4, 1]"),
        ((INDICES > 1)[:, None], "has shape [4, 1]"),
        (np.eye(3)[INDICES], "has shape [4, 3] and is one-hot"),
        (np.eye(3, dtype=bool)[INDICES], "has shape [4, 3] and is one-hot"),
        (np.eye(3, dtype=np.uint8)[INDICES], "has shape [4, 3] and is one-hot"),
    ],
)
def test_the_call_that_the_message_names_makes_class_indices(library, labels, what):
    given = labels if library == "numpy" else torch.from_numpy(labels)
    problem = label_problem(given, 4)
    assert problem.startswith(f"{what}. Give [4], one class index for each row of features: labels.")
    made = eval(re.search(r"(labels\..*)\.$", problem)[1], {"labels": given})
    assert label_problem(made, 4) is None
    wanted = (labels > 0).reshape(4, -1).argmax(1) if labels.shape[-1] == 3 else labels.reshape(-1)
    assert np.asarray(made).tolist() == wanted.astype(int).tolist()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (np.array([0.5, 1, 2, 1]), "has dtype float64. Give integer class indices 0 .. C-1."),
        (np.array([np.nan, 1, 2, 1]), "has dtype float64. Give integer class indices 0 .. C-1."),
        (np.full((4, 3), 1 / 3), "has shape [4, 3]. Give [4], one class index for each row of features."),
        (INDICES[:3], "has shape [3]. Give [4], one class index for each row of features."),
        (INDICES.astype(np.int8), None),
        (INDICES.astype(np.uint8), None),
    ],
)
def test_labels_that_no_call_mends_and_labels_that_are_good(library, labels, problem):
    assert label_problem(labels if library == "numpy" else torch.from_numpy(labels), 4) == problem
