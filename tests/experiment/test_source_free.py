"""The contract that matters most: a source-free method cannot reach a retained row."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from sfu.data.datasets.base import Dataset
from sfu.data.load import load_dataset
from sfu.errors import SourceFreeError
from sfu.experiment import pipeline, prepare
from sfu.experiment.context import RunContext
from sfu.heads.settings import Keep
from sfu.request import Access, ForgetRequest, RetainedSet
from tests.conftest import make_arrays
from tests.experiment.cases import Probe, config_for, run, sfu


def probed(path: Path, folder: Path, probe: Probe, **options) -> dict:
    return run(config_for(path), folder, methods={"probe": probe}, **options)


def trained(path: Path, folder: Path) -> RunContext:
    """A run whose head is trained and whose data are not yet discarded."""
    context = RunContext(config_for(path), folder, {})
    for stage in (prepare.load, prepare.choose_forget_set, prepare.train):
        stage(context)
    return context


def row_keys(array: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in array.astype(np.float64)}


def keys_in_memory(wanted: set[bytes], width: int) -> set[bytes]:
    """The wanted rows that occur in any tensor or array that can be reached through the garbage collector."""
    gc.collect()
    found: set[bytes] = set()
    for holder in gc.get_objects():
        for value in (holder, *(gc.get_referents(holder) if type(holder) in (dict, list, tuple) else ())):
            if type(value) is torch.Tensor and value.dtype in (torch.float32, torch.float64) and value.is_cpu:
                value = value.detach().to_dense().numpy()
            if type(value) is np.ndarray and value.shape[1:] == (width,) and value.dtype.kind == "f":
                found |= wanted & row_keys(value)
    return found


def write_secret(path: Path) -> tuple[Path, set[bytes]]:
    """A feature file, and its training rows as bytes: no array of them is left alive."""
    arrays = make_arrays(seed=99)
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        safetensors.numpy.save_file(arrays, path)
    return path, row_keys(arrays["train_features"])


@pytest.fixture(params=[".npz", ".safetensors"])
def secret(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, set[bytes]]:
    return write_secret(tmp_path / f"secret{request.param}")


def test_no_retained_row_is_in_memory_while_a_source_free_method_runs(tmp_path, secret):
    path, keys = secret

    def search(request: ForgetRequest, retained: RetainedSet | None):
        return retained, row_keys(request.features_FD.numpy()), keys_in_memory(keys, 12)

    probe = Probe(search)
    probed(path, tmp_path, probe)
    retained, forget, found = probe.found
    assert retained is None
    assert len(keys) == 400
    assert len(forget) == 40
    assert found == forget  # the search does see: it finds the forget rows, and those alone


def test_a_discard_that_does_not_discard_is_noticed_and_the_search_would_find_the_rows(tmp_path, secret):
    path, keys = secret
    context = trained(path, tmp_path)
    held = context.data
    with pytest.raises(SourceFreeError, match="still referenced after the discard"):
        prepare.discard(context)
    assert keys_in_memory(keys, 12) == keys
    context.data = held
    del held
    prepare.discard(context)  # the same run, and nothing holds its data
    assert len(keys_in_memory(keys, 12)) == 40


def test_a_failed_job_of_a_sweep_leaves_no_training_row_to_the_next(tmp_path, monkeypatch, capsys):
    path, keys = write_secret(tmp_path / "secret.npz")
    found, real = [], pipeline.run

    def search_first(*arguments, **options):
        found.append(keys_in_memory(keys, 12))
        return real(*arguments, **options)

    monkeypatch.setattr(pipeline, "run", search_first)
    code = sfu(
        monkeypatch, "-m", "dataset=features", f"dataset.path={path}", "loss=softmax", "head.max_iterations=1,200",
        "methods=[original]", "logger=none", "evaluation.membership_splits=2", f"hydra.sweep.dir={tmp_path / 'sweep'}",
    )  # fmt: skip
    assert code == 1
    assert "head.max_iterations=1" in capsys.readouterr().err
    assert found == [set(), set()]


@pytest.mark.parametrize(
    "reach",
    [
        lambda path: load_dataset(Dataset.make(name="features", path=str(path)), 0),
        lambda path: np.load(path) if path.suffix == ".npz" else safetensors.numpy.load_file(path),
        lambda path: safetensors.safe_open(path, "np"),
        lambda path: safetensors.torch.load_file(path),
        lambda path: path.read_bytes(),
        lambda path: (path.parent / ".." / path.parent.name / path.name).open("rb"),
        lambda path: load_dataset(Dataset.make(name="digits"), 0),
    ],
    ids=["loader", "numpy", "safe_open", "safetensors", "pathlib", "other-spelling", "another-dataset"],
)
def test_reaching_for_the_data_again_ends_the_row(tmp_path, secret, reach):
    path, _ = secret
    metrics = probed(path, tmp_path, Probe(lambda *_: reach(path)))
    row = metrics["rows"]["probe"]
    assert "SourceFreeError" in row["error"]
    assert "discarded" in row["error"]
    assert "distance" not in row


def test_a_method_that_declares_it_gets_the_retained_data_and_only_then(tmp_path, secret):
    path, keys = secret
    probe = Probe(lambda request, retained: retained, Access.RETAINED)
    metrics = probed(path, tmp_path, probe)
    assert probe.found.features_RD.shape == (360, 12)
    assert metrics["rows"]["probe"]["access"] == "retained"
    assert len(row_keys(probe.found.features_RD.numpy()) & keys) == 360


def test_nothing_in_the_request_leads_to_another_row(tmp_path, secret):
    path, keys = secret
    context = trained(path, tmp_path)
    others = keys - row_keys(context.data.train_features_ND[context.split.forget_F].numpy())
    assert len(others) == 360
    visited, todo = set(), [context.request]
    while todo:
        item = todo.pop()
        if id(item) in visited or isinstance(item, type) or callable(item):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            whole = torch.tensor([], dtype=item.dtype).set_(item.untyped_storage())
            assert whole.numel() == item.numel()
            if item.ndim == 2 and item.shape[1] == 12:
                assert not others & row_keys(item.numpy())
        elif hasattr(item, "__dataclass_fields__"):
            todo.extend(getattr(item, name) for name in item.__dataclass_fields__)
        else:
            todo.extend(gc.get_referents(item))
    assert len(visited) > 5


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, IndexError, AssertionError, MemoryError])
def test_any_error_of_a_method_ends_its_own_row_only(tmp_path, feature_file, error):
    def fail(*_):
        raise error("oops")

    rows = run(config_for(feature_file), tmp_path, methods={"bad": Probe(fail), "good": Probe()})["rows"]
    assert rows["bad"]["error"].startswith(error.__name__)
    assert rows["good"]["distance"] == 1.0


def test_a_stored_summary_reaches_only_methods_that_declare_it(tmp_path, feature_file):
    probes = {
        access: Probe(lambda request, retained: request.head.kept, access) for access in (Access.FORGET, Access.STORED)
    }
    methods = {access.value: probe for access, probe in probes.items()}
    run(config_for(feature_file, head__keep=Keep.full), tmp_path, methods=methods)
    without, whole = (probes[access].found for access in (Access.FORGET, Access.STORED))
    assert (whole.data_hessian.shape, whole.mean_D.shape) == ((12, 12), (12,))
    assert (without.data_hessian, without.mean_D) == (None, None)
    assert without.bound == whole.bound > 0
    assert torch.equal(without.shares_C, whole.shares_C)
    assert torch.equal(without.projected_2K, whole.projected_2K)
