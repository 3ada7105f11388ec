"""Cached results: their keys, their store, and that reading one is the same as computing it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sfu.experiment import keys
from sfu.experiment.cache import StageCache
from sfu.experiment.config import Reuse
from sfu.experiment.context import RowResult
from sfu.experiment.job import open_cache
from sfu.experiment.keys import stage_keys
from sfu.experiment.resources import Usage
from sfu.experiment.result_store import result_store
from sfu.experiment.row_files import read_row, write_row
from sfu.heads.files import load_head
from sfu.heads.linear import LinearHead
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.quadratic import Quadratic
from sfu.results.artifacts import write_json
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.result import UnlearningResult
from tests.conftest import make_arrays
from tests.experiment.cases import changed, composed, run

METHODS = ["original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form"]


def configured(feature_file, *overrides, **changes):
    """The defaults with some choices and keys changed; ``head__l2`` is ``head.l2``."""
    config = composed("dataset=features", "backbone=none", *(overrides or ["logger=none"]))
    return changed(config, **{"dataset__path": str(feature_file), "methods": METHODS, **changes})


def cached_run(config, folder):
    cache = StageCache(result_store(), stage_keys(config))
    return run(config, folder, cache=cache), cache


def bare(value):
    """Metrics without times, sizes, and what came from the cache."""
    if isinstance(value, dict):
        unlike = ("seconds", "peak_memory_mb", "fit_seconds", "started", "reused", "name", "expected")
        return {key: bare(item) for key, item in value.items() if key not in unlike}
    return [bare(item) for item in value] if isinstance(value, list) else value


def same(first, second):
    """To the last bit."""
    return json.dumps(bare(first)) == json.dumps(bare(second))


def test_a_key_is_a_digest_of_what_decides_the_result(feature_file):
    base = stage_keys(configured(feature_file))
    assert stage_keys(configured(feature_file)) == base
    for same in ({"threads": 1}, {"reuse": Reuse.never}, {"published": "table_1"}):
        assert stage_keys(configured(feature_file, **same)) == base, same
    assert stage_keys(configured(feature_file, "logger=wandb")) == base
    for other in ({"head__l2": 0.5}, {"dtype": "float32"}, {"seed": 1}, {"head__bias": True}):
        assert stage_keys(configured(feature_file, **other)).head != base.head, other
    assert stage_keys(configured(feature_file, "loss=softmax", "logger=none")).head != base.head
    forgetting = stage_keys(configured(feature_file, forget__fraction=0.2))
    assert forgetting.head == base.head
    assert not set(forgetting.rows.values()) & set(base.rows.values())
    judged = stage_keys(configured(feature_file, evaluation__membership_splits=3))
    assert judged.rows == base.rows
    assert judged.run != base.run


def test_a_sweep_over_the_curvature_computes_only_the_rows_it_changes(feature_file):
    base, swept = (stage_keys(configured(feature_file, curvature__perturbations=p)) for p in (10, 20))
    same = {name for name in base.rows if base.rows[name] == swept.rows[name]}
    assert same == set(METHODS) - {"unlearned_minus"}
    stepped = stage_keys(configured(feature_file, curvature__perturbations=10, newton__steps=2))
    assert {name for name in base.rows if base.rows[name] == stepped.rows[name]} == {"original", "retrained"}
    others = [
        name
        for name in UnlearningMethod.names()
        if UnlearningMethod.named(name).__module__.startswith("sfu.") and name not in ("newton", "certified_removal")
    ]
    one, two = (
        stage_keys(configured(feature_file, methods=others, curvature__perturbations=n, newton__steps=n))
        for n in (1, 2)
    )
    assert one.rows == two.rows


def test_a_method_that_builds_itself_from_the_run_is_keyed_by_all_of_it():
    class Itself(UnlearningMethod):
        @classmethod
        def from_config(cls, run, curvature, settings):
            return cls()

    class Careful(Itself):
        settings_used = ("newton",)

    assert Itself.groups_used() == type("Child", (Itself,), {}).groups_used() == ("curvature", "newton")
    assert Careful.groups_used() == ("newton",)
    assert type("Plain", (UnlearningMethod,), {}).groups_used() == ()


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


def test_a_run_from_the_cache_is_the_run(feature_file, tmp_path):
    config = configured(feature_file, seed=3)
    plain = run(config, tmp_path / "plain")
    first, cache = cached_run(config, tmp_path / "first")
    assert cache.reused == []
    (tmp_path / "first" / "metrics.json").write_text(json.dumps(first))
    cache.save_run(tmp_path / "first")
    again, again_cache = cached_run(config, tmp_path / "again")
    assert set(again_cache.reused) == {"head", *config.methods}
    assert same(first, again)
    assert same(plain, first)
    assert [row["seconds"] for row in again["rows"].values()] == [row["seconds"] for row in first["rows"].values()]
    whole = StageCache(result_store(), stage_keys(config)).restore_run(tmp_path / "whole")
    assert same(whole, first)
    for path in (tmp_path / "first").rglob("*.safetensors"):
        assert (tmp_path / "whole" / path.relative_to(tmp_path / "first")).read_bytes() == path.read_bytes()


def test_paths_are_cached_and_no_file_of_the_store_strays_into_a_run(feature_file, tmp_path):
    config = configured(feature_file, methods=["original", "neg_grad"], evaluation__trade_off=True)
    for name in ("first", "again"):
        metrics, cache = cached_run(config, tmp_path / name)
    assert cache.reused == ["head", "original", "neg_grad"]
    first, again = (json.loads((tmp_path / name / "trade_off.json").read_text()) for name in ("first", "again"))
    assert first == again
    assert len(again["neg_grad"]["test_accuracy"]) > 2
    (tmp_path / "again" / "metrics.json").write_text(json.dumps(metrics))
    cache.save_run(tmp_path / "again")
    assert StageCache(result_store(), stage_keys(config)).restore_run(tmp_path / "whole") is not None
    heads = [sorted(path.name for path in (tmp_path / name / "heads").iterdir()) for name in ("first", "whole")]
    assert heads[0] == heads[1]


BITS = [
    ("head.bias=true", "evaluation.trade_off=true", "methods=[original,retrained,unlearned_minus,neg_grad]"),
    ("loss=softmax", "dtype=float32", "methods=[original,retrained,unlearned_plus,closed_form]"),
    ("head.keep=full", "tune=oracle", "methods=[original,stored,neg_grad]"),
]
QUICK = ("logger=none", "evaluation.membership_splits=2", "curvature.perturbations=60")


@pytest.mark.parametrize("overrides", BITS)
def test_all_digits_are_the_same_whatever_comes_from_the_cache(tmp_path, overrides):
    np.savez(tmp_path / "odd.npz", **make_arrays(n_features=12, n_classes=3))
    config = configured(tmp_path / "odd.npz", *QUICK, *overrides, methods=None)
    config.methods = composed(*overrides).methods
    cold, _ = cached_run(config, tmp_path / "cold")
    assert same(cold, run(config, tmp_path / "uncached"))
    keys_of, store = stage_keys(config), result_store()
    for name, dropped in {
        "without a head": [keys_of.head],
        "without rows": list(keys_of.rows.values())[::2],
        "warm": [],
    }.items():
        for key in dropped:
            store.remove(key)
        metrics, cache = cached_run(config, tmp_path / name)
        assert len(cache.reused) == 1 + len(keys_of.rows) - len(dropped)
        assert same(metrics, cold), name
        assert trade_off(tmp_path / name) == trade_off(tmp_path / "cold"), name


def test_what_a_row_predicted_is_the_same_from_the_cache(tmp_path):
    head = LinearHead(torch.zeros(2, 3), torch.zeros(2, 3), l2=0.1, n_train=10)
    result = UnlearningResult(
        head, predicted_distance_gain=0.1, predicted_share=0.75, predicted_share_interval=(0.5, 0.9)
    )
    write_row(RowResult(Usage(1.0, None), result), tmp_path)
    read = read_row(tmp_path, None, torch.device("cpu")).unlearned
    assert (read.predicted_share, read.predicted_share_interval, read.predicted_distance) == (0.75, (0.5, 0.9), 0.5)


def trade_off(folder):
    path = folder / "trade_off.json"
    return path.read_text() if path.is_file() else None


def test_jobs_with_other_threads_do_not_share_results_since_their_digits_differ(feature_file):
    one, two = (stage_keys(configured(feature_file, threads=count)) for count in (1, 2))
    assert not {one.head, one.run, *one.rows.values()} & {two.head, two.run, *two.rows.values()}
    assert one == stage_keys(configured(feature_file, threads=1))


def test_a_method_that_returns_tensors_in_another_order_of_memory(feature_file, tmp_path):
    head = train_head_on(feature_file)
    turned = dataclasses.replace(head, parameters_CE=head.parameters_CE.T.clone().T)
    result = UnlearningResult(turned, path=(turned.parameters_CE, torch.zeros(2, 53, dtype=torch.float64).T[:, 1:]))
    for tensor in (result.head.parameters_CE, *result.path):
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


def train_head_on(path):
    arrays = np.load(path)
    features, labels = torch.from_numpy(arrays["train_features"]), torch.from_numpy(arrays["train_labels"])
    return train_head(
        features, labels, 4, LinearSettings(), Quadratic(), seed=0, device=torch.device("cpu"), dtype=torch.float64
    )


def test_only_what_is_missing_is_computed(feature_file, tmp_path):
    cached_run(configured(feature_file, methods=["original", "retrained"]), tmp_path / "a")
    metrics, cache = cached_run(configured(feature_file), tmp_path / "b")
    assert cache.reused == ["head", "original", "retrained"]
    assert same(metrics, run(configured(feature_file), tmp_path / "c"))


@pytest.mark.parametrize("head", ["head.keep=bound", "head.keep=full"])
def test_the_cache_holds_no_sum_over_rows_but_in_a_file_of_its_owner(feature_file, tmp_path, head):
    """Two Gram matrices, of training sets that differ by a row, give the row back."""
    config = configured(feature_file, head, "logger=none")
    metrics, cache = cached_run(config, tmp_path / "a")
    files = [path for path in result_store().root.rglob("*") if path.is_file()]
    for path in files:
        if path.suffix == ".safetensors":
            shapes = {tuple(tensor.shape) for tensor in load_file(path).values()}
            assert shapes == {(4, 12)}, path
    (tmp_path / "a" / "metrics.json").write_text(json.dumps(metrics))
    cache.save_run(tmp_path / "a")
    assert StageCache(result_store(), stage_keys(config)).restore_run(tmp_path / "whole") is not None
    secrets = [path for path in [*files, *(tmp_path / "whole").rglob("*")] if path.suffix == ".secret"]
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    kept = [load_head(tmp_path / name / "heads" / "original").kept for name in ("a", "whole")]
    assert torch.equal(*(one.projected_2K for one in kept))
    assert (kept[0].data_hessian is not None) == head.endswith("full")
    if head.endswith("full"):
        assert torch.equal(*(one.data_hessian for one in kept))


def test_a_row_that_failed_is_not_cached(feature_file, tmp_path):
    config = configured(feature_file, methods=["original", "fast"])
    config.variants = {"fast": {"base": "neg_grad", "settings": {"lr": 1e3}}}
    for name in ("first", "again"):
        metrics, cache = cached_run(config, tmp_path / name)
        assert "DivergedError" in metrics["rows"]["fast"]["error"]
    assert cache.reused == ["head", "original"]


def test_a_damaged_entry_is_made_again(feature_file, tmp_path, caplog):
    config = configured(feature_file, methods=["original", "retrained"])
    cached_run(config, tmp_path / "a")
    store, key = result_store(), stage_keys(config).rows["retrained"]
    head = store.root / key / "head.safetensors"
    head.write_bytes(head.read_bytes()[:-8] + b"\0" * 7 + b"\1")
    metrics, cache = cached_run(config, tmp_path / "b")
    assert cache.reused == ["head", "original"]
    assert "damaged" in caplog.text
    assert metrics["rows"]["retrained"]["distance"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "change",
    [
        {"applied": "true"}, {"seconds": -1.0}, {"details": [1]}, {"trials": None}, {"trials": [{"applied": True}]},
        {"predicted_distance_gain": "0"}, {"predicted_share_interval": [0.5]}, {"note": 3}, {"peak_memory_mb": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_row_with_right_digests_is_made_again(feature_file, tmp_path, caplog, change):
    config = configured(feature_file, methods=["original"])
    cached_run(config, tmp_path / "a")
    replace_file(stage_keys(config).rows["original"], "row.json", lambda about: about | change)
    _, cache = cached_run(config, tmp_path / "b")
    assert cache.reused == ["head"]
    assert next(iter(change)) in caplog.text
    assert cached_run(config, tmp_path / "c")[1].reused == ["head", "original"]


@pytest.mark.parametrize(
    "change",
    [{"rows": "original"}, {"rows": {}}, {"run": None}, {"rows": {"original": {"test_accuracy": 900}}}],
    ids=str,
)
def test_a_malformed_run_with_right_digests_counts_as_absent(feature_file, tmp_path, change):
    config = configured(feature_file, methods=["original"])
    metrics, cache = cached_run(config, tmp_path / "a")
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir(exist_ok=True)
    write_json(tmp_path / "a" / "metrics.json", metrics)
    cache.save_run(tmp_path / "a")
    assert cache.restore_run(tmp_path / "b") == metrics
    replace_file(stage_keys(config).run, "metrics.json", lambda about: about | change)
    assert cache.restore_run(tmp_path / "b") is None
    assert not cache.has_run()


def replace_file(key, name, change):
    """Change the JSON of a cached entry, and make its digests right."""
    store = result_store()
    files = {path.name: path.read_bytes() for path in store.find(key).iterdir() if path.name != "entry.json"}
    files[name] = json.dumps(change(json.loads(files[name]))).encode()
    store.put(key, lambda made: [(made / file).write_bytes(body) for file, body in files.items()], replace=True)


def test_jobs_side_by_side_compute_a_stage_once(feature_file):
    stages, made, read, waited = stage_keys(configured(feature_file)), [], [], []

    def make():
        made.append(1)
        time.sleep(0.2)
        return "result"

    def job():
        result = StageCache(result_store(), stages).cached(
            stages.head, make, lambda result, entry: (entry / "it").write_text(result),
            lambda entry: (entry / "it").read_text(), waiting=lambda: waited.append(1),
        )  # fmt: skip
        read.append(result)

    threads = [threading.Thread(target=job) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(made) == 1
    assert read == ["result"] * 3
    assert waited


def test_single_runs_leave_the_store_alone(feature_file):
    config = configured(feature_file)
    assert open_cache(config, in_sweep=False) is None
    assert open_cache(dataclasses.replace(config, reuse=Reuse.never), in_sweep=True) is None
    always = open_cache(dataclasses.replace(config, reuse=Reuse.always), in_sweep=False)
    assert always.available() == []
    assert not always.has_run()
    assert not result_store().root.exists()
