"""The curvature of a row comes back from its process, and from the cache, and theory is checked against the data."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sfu.errors import ArtifactError
from sfu.experiment.context import RowResult
from sfu.experiment.keys import stage_keys
from sfu.experiment.resources import Usage
from sfu.experiment.row_files import read_row, write_row
from sfu.request import MethodContext
from sfu.unlearning.methods.newton import Newton
from tests.experiment.cases import config_for, run
from tests.unlearning.cases import FORGET_CURVATURE, case


def test_rows_with_a_curvature_have_a_theory(feature_file: Path, tmp_path: Path):
    config = config_for(feature_file, evaluation__theory=True, forget__fraction=0.2, newton__noise_sigma=1e-5)
    config.evaluation.white_box = True
    config.methods = ["original", "unlearned_plus", "closed_form"]
    rows = run(config, tmp_path / "run")["rows"]
    assert (rows["original"]["theory"], rows["original"]["white_box"]) == (None, None)
    assert rows["unlearned_plus"]["white_box"]["exact"]["gradient_cosine"] > 0.99
    assert rows["closed_form"]["white_box"]["identity"]["directions"] == 4
    assert rows["closed_form"]["isolation"] == "process, files, network"
    for name, most in (("unlearned_plus", 1e-12), ("closed_form", 1.0)):
        theory = rows[name]["theory"]
        assert theory["residual"]["difference"] < 1e-8
        assert theory["residual"]["measured"] < most
        assert theory["noise"]["sigma"] == 1e-5
        assert theory["theorem_1"]["not_applicable"]
    assert rows["closed_form"]["theory"]["lemma_1"]["measured"] > 0
    assert (
        "theory"
        not in run(config_for(feature_file, forget__fraction=0.2, methods=["original"]), tmp_path / "b")["rows"][
            "original"
        ]
    )


def test_rows_with_and_without_their_curvature_are_two_entries_of_the_cache(feature_file: Path):
    with_it, without = (stage_keys(config_for(feature_file, evaluation__theory=keep)) for keep in (True, False))
    assert not set(with_it.rows.values()) & set(without.rows.values())
    assert with_it.head == without.head


def test_a_damaged_curvature_is_refused(tmp_path: Path):
    request, _ = case()
    result = Newton(FORGET_CURVATURE).unlearn(request, MethodContext({}, keep_curvature=True))
    write_row(RowResult(Usage(1.0, None), result), tmp_path)
    path = tmp_path / "head.curvature.safetensors"
    assert read_row(tmp_path, None, request.head.parameters_CE.device).unlearned.curvature is not None
    tensors = load_file(path)
    save_file({**tensors, "end": tensors["end"][:2].contiguous()}, path)
    with pytest.raises(ArtifactError, match="curvature"):
        read_row(tmp_path, None, request.head.parameters_CE.device)
