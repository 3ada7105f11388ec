"""Results that are kept: their keys, their store, and that taking one is the same as computing it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import threading
import time

import numpy as np
import pytest
import torch

from sfu.experiment import keys
from sfu.experiment.keys import stage_keys
from sfu.experiment.result_store import ResultStore
from sfu.experiment.reuse import StageResults
from sfu.experiment.runner import run
from sfu.losses import Objective
from sfu.settings import Reuse
from sfu.unlearning.methods.newton import Newton
from tests.conftest import make_arrays
from tests.experiment.test_configs import composed

METHODS = ["original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form"]


@functools.cache
def base_config():
    return composed("dataset=features", "backbone=none", "logger=none")


def configured(feature_file, **changes):
    """The defaults with some keys changed; ``head__l2`` is ``head.l2``."""
    config = copy.deepcopy(base_config())
    for key, value in {"dataset__path": str(feature_file), "methods": METHODS, **changes}.items():
        *path, last = key.split("__")
        setattr(functools.reduce(getattr, path, config), last, value)
    return config


def kept_run(config, folder):
    kept = StageResults(ResultStore(), stage_keys(config))
    return run(config, folder, show_progress=False, kept=kept), kept


def figures(metrics):
    """Every figure of every row that is not a time or a size."""
    flat = {
        f"{name}.{key}": value
        for name, row in metrics["rows"].items()
        for key, value in {**row, **row["details"]}.items()
        if key not in ("details", "seconds", "peak_memory_mb", "fit_seconds")
    }
    numbers = {key: value for key, value in flat.items() if isinstance(value, float)}
    return numbers, {key: value for key, value in flat.items() if key not in numbers}


def same(first, second):
    """But for what sums in another order leave."""
    (numbers, others), (expected, rest) = figures(first), figures(second)
    return numbers == pytest.approx(expected, rel=1e-6, abs=1e-9) and others == rest


def test_a_key_is_a_digest_of_what_decides_the_result(feature_file):
    base = stage_keys(configured(feature_file))
    assert stage_keys(configured(feature_file)) == base
    for same in ({"logger__name": "wandb"}, {"threads": 1}, {"reuse": Reuse.never}, {"published": "table_1"}):
        assert stage_keys(configured(feature_file, **same)) == base, same
    for other in (
        {"head__l2": 0.5},
        {"loss__name": "softmax"},
        {"dtype": "float32"},
        {"seed": 1},
        {"head__bias": True},
    ):
        assert stage_keys(configured(feature_file, **other)).head != base.head, other
    forgetting = stage_keys(configured(feature_file, forget__fraction=0.2))
    assert forgetting.head == base.head
    assert not set(forgetting.rows.values()) & set(base.rows.values())
    judged = stage_keys(configured(feature_file, evaluation__membership_splits=3))
    assert judged.rows == base.rows
    assert judged.run != base.run


def test_a_sweep_over_the_curvature_keeps_the_rows_that_have_none(feature_file):
    base, swept = (stage_keys(configured(feature_file, curvature__perturbations=p)) for p in (10, 20))
    same = {name for name in base.rows if base.rows[name] == swept.rows[name]}
    assert same == {"original", "retrained"}
    stepped = stage_keys(configured(feature_file, curvature__perturbations=10, newton__steps=2))
    assert {name for name in base.rows if base.rows[name] == stepped.rows[name]} == same


def test_a_key_follows_the_content_of_files_and_the_code(feature_file, tmp_path, monkeypatch):
    base = stage_keys(configured(feature_file))
    moved = feature_file.rename(tmp_path / "elsewhere.npz")
    assert stage_keys(configured(moved)) == base
    np.savez(moved, **make_arrays(seed=1))
    assert stage_keys(configured(moved)).head != base.head
    rows = tmp_path / "rows.txt"
    rows.write_text("1\n2\n")
    first = stage_keys(configured(moved, forget__indices=str(rows)))
    rows.write_text("1\n3\n")
    second = stage_keys(configured(moved, forget__indices=str(rows)))
    assert first.head == second.head
    assert first.rows != second.rows
    monkeypatch.setattr(keys, "code_digest", lambda: "other")
    assert stage_keys(configured(moved, forget__indices=str(rows))).head != second.head


def test_a_run_taken_from_the_store_is_the_run(feature_file, tmp_path, monkeypatch):
    config = configured(feature_file, seed=3)
    plain = run(config, tmp_path / "plain", show_progress=False)
    first, kept = kept_run(config, tmp_path / "first")
    assert kept.reused == []
    (tmp_path / "first" / "metrics.json").write_text(json.dumps(first))
    kept.keep_run(tmp_path / "first")
    monkeypatch.setattr("sfu.experiment.stages.train_head", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(Newton, "unlearn", lambda *a, **k: pytest.fail("computed again"))
    again, taken = kept_run(config, tmp_path / "again")
    assert set(taken.reused) == {"head", *config.methods}
    assert figures(first) == figures(again)
    assert same(plain, first)
    assert [row["seconds"] for row in again["rows"].values()] == [row["seconds"] for row in first["rows"].values()]
    whole = StageResults(ResultStore(), stage_keys(config)).take_run(tmp_path / "whole")
    assert figures(whole) == figures(first)
    for path in (tmp_path / "first").rglob("*.safetensors"):
        assert (tmp_path / "whole" / path.relative_to(tmp_path / "first")).read_bytes() == path.read_bytes()


def test_paths_are_kept_and_no_file_of_the_store_strays_into_a_run(feature_file, tmp_path):
    config = configured(feature_file, methods=["original", "neg_grad"], evaluation__trade_off=True)
    for name in ("first", "again"):
        metrics, kept = kept_run(config, tmp_path / name)
    assert kept.reused == ["head", "original", "neg_grad"]
    first, again = (json.loads((tmp_path / name / "trade_off.json").read_text()) for name in ("first", "again"))
    assert first == again
    assert len(again["neg_grad"]["test_accuracy"]) > 2
    (tmp_path / "again" / "metrics.json").write_text(json.dumps(metrics))
    kept.keep_run(tmp_path / "again")
    assert StageResults(ResultStore(), stage_keys(config)).take_run(tmp_path / "whole") is not None
    heads = [sorted(path.name for path in (tmp_path / name / "heads").iterdir()) for name in ("first", "whole")]
    assert heads[0] == heads[1]


def test_only_what_is_missing_is_computed(feature_file, tmp_path):
    kept_run(configured(feature_file, methods=["original", "retrained"]), tmp_path / "a")
    metrics, kept = kept_run(configured(feature_file), tmp_path / "b")
    assert kept.reused == ["head", "original", "retrained"]
    assert same(metrics, run(configured(feature_file), tmp_path / "c", show_progress=False))


def test_a_sweep_over_l2_forms_the_gram_matrix_once(feature_file, tmp_path, monkeypatch):
    first, second = (configured(feature_file, methods=["original"], head__l2=l2) for l2 in (0.1, 0.01))
    assert stage_keys(first).gram == stage_keys(second).gram
    assert stage_keys(first).gram != stage_keys(configured(feature_file, head__bias=True)).gram
    formed = []
    real = Objective.data_hessian
    monkeypatch.setattr(Objective, "data_hessian", lambda *given: formed.append(1) or real(*given))
    alone = run(second, tmp_path / "alone", show_progress=False)
    count = len(formed)
    kept_run(first, tmp_path / "a")
    formed.clear()
    metrics, _ = kept_run(second, tmp_path / "b")
    assert len(formed) == count - 1
    assert same(metrics, alone)


def test_a_row_that_failed_is_not_kept(feature_file, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Newton, "_unlearn_at_once", lambda *arguments: 1 / 0)
        metrics, _ = kept_run(configured(feature_file), tmp_path / "a")
    assert "ZeroDivisionError" in metrics["rows"]["closed_form"]["error"]
    metrics, kept = kept_run(configured(feature_file), tmp_path / "b")
    assert kept.reused == ["head", "original", "retrained"]
    assert not any(row.get("error") for row in metrics["rows"].values())


def test_a_damaged_entry_is_made_again(feature_file, tmp_path, caplog):
    config = configured(feature_file, methods=["original", "retrained"])
    kept_run(config, tmp_path / "a")
    store, key = ResultStore(), stage_keys(config).rows["retrained"]
    head = store.root / key / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-8] + b"\0" * 7 + b"\1")
    metrics, kept = kept_run(config, tmp_path / "b")
    assert kept.reused == ["head", "original"]
    assert "damaged" in caplog.text
    assert metrics["rows"]["retrained"]["distance"] == pytest.approx(0, abs=1e-9)


def test_an_entry_is_whole_or_absent(tmp_path):
    store = ResultStore(tmp_path)

    def dies(folder):
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("a" * 32, dies)
    assert store.find("a" * 32) is None
    assert [path.name for path in tmp_path.iterdir()] == []
    (store.root / ("a" * 32)).mkdir()  # a folder without its entry.json
    assert store.find("a" * 32) is None
    store.put("b" * 32, lambda folder: (folder / "x").write_text("first"))
    store.put("b" * 32, lambda folder: (folder / "x").write_text("second"))
    assert (store.find("b" * 32) / "x").read_text() == "first"


def test_jobs_side_by_side_compute_a_stage_once(feature_file, tmp_path):
    config = configured(feature_file, methods=["original"])
    made, waited, head = [], [], run(config, tmp_path / "x", show_progress=False)

    def job():
        def make():
            made.append(1)
            time.sleep(0.3)
            return trained

        StageResults(ResultStore(), stage_keys(config)).head(make, torch.device("cpu"), lambda: waited.append(1))

    from sfu.heads.files import load_head

    assert head["rows"]
    trained = load_head(tmp_path / "x" / "heads" / "original")
    threads = [threading.Thread(target=job) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 1
    assert waited


def test_a_store_that_cannot_be_written_says_what_to_do(tmp_path):
    from sfu.errors import ArtifactError

    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="set SFU_CACHE to a folder you can write to, or reuse=never"):
        ResultStore(tmp_path / "file" / "results").put("c" * 32, lambda folder: None)


def test_single_runs_leave_the_store_alone(feature_file):
    from sfu.experiment.job import kept_results

    config = configured(feature_file)
    assert kept_results(config, in_sweep=False).there() == []
    always = dataclasses.replace(config, reuse=Reuse.always)
    run_twice = kept_results(always, in_sweep=False)
    assert run_twice.there() == []
    assert not run_twice.has_run()
    assert not ResultStore().root.exists()
