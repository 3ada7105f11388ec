"""``sfu-unlearn purge``: nothing is left in caches and run folders from which a row could be recovered."""

from __future__ import annotations

import itertools
import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

import sfu
from sfu.data.examples import RUN_EXAMPLES
from sfu.experiment.cache import StageCache
from sfu.experiment.keys import stage_keys
from sfu.experiment.result_store import result_store
from sfu.heads.forgotten import Forgotten
from sfu.heads.ledger import Ledger
from sfu.records.chain import verify
from sfu.records.record import read_deletion_record
from tests.conftest import make_arrays
from tests.experiment.cases import config_for, image_config, write_folder
from tests.experiment.cases import run as run_pipeline
from tests.records.cases import everything, message_of, run
from tests.unlearning.cases import rows, trained


def holds_bytes(folder: Path, row: np.ndarray) -> list[str]:
    """The files that hold a row as it is or with norm 1, in 32 or 64 bits."""
    forms = [(row / scale).astype(kind).tobytes() for scale in (1, np.linalg.norm(row)) for kind in ("<f4", "<f8")]
    return [name for name, content in everything(folder).items() if any(form in content for form in forms)]


def squares(folder: Path, width: int) -> list[torch.Tensor]:
    """All square matrices of that width in the files of a folder."""
    found = []
    for content in everything(folder).values():
        try:
            tensors = load_tensors(content)
        except SafetensorError:
            continue
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.shape[-2:] == (width, width):
                found += [*tensor.double().reshape(-1, width, width)]
    return found


def is_difference(row: np.ndarray, matrices: list[torch.Tensor]) -> bool:
    """Whether two matrices are proportional but for the square of the row: it is then what only one of them sums."""
    direction = torch.from_numpy(row).double() / np.linalg.norm(row)
    along = torch.eye(len(row), dtype=torch.float64) - torch.outer(direction, direction)

    def angle(first: torch.Tensor, second: torch.Tensor) -> float:
        return 1 - float((first * second).sum() / (first.norm() * second.norm()))

    return any(
        angle(along @ one @ along, along @ other @ along) < 1e-12 < 1e-9 < angle(one, other)
        for one, other in itertools.combinations(matrices, 2)
    )


def write_features(path: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    arrays = make_arrays(400, seed=seed)
    np.savez(path, **arrays)
    return arrays["train_features"].astype(np.float64), arrays["train_labels"]


def run_on(config, folder: Path) -> None:
    run_pipeline(config, folder, cache=StageCache(result_store(), stage_keys(config)))
    (folder / "metrics.json").write_text('{"schema": 1, "rows": {}}')


def served(tmp_path: Path, head: Path, features: np.ndarray, labels: np.ndarray, *further: str) -> tuple[str, str]:
    """Serve a request for some rows; return the folder and the file of the rows."""
    file, new = tmp_path / "rows.npz", tmp_path / "new"
    np.savez(file, features=features, labels=labels)
    assert run(str(head), str(file), "--out", str(new), "--apply", "--on-doubt", "apply", *further) == 0
    return str(new), str(file)


@pytest.mark.parametrize("normalize", [False, True])
def test_no_row_can_be_recovered_after_a_purge(tmp_path, monkeypatch, capsys, normalize):
    features, labels = write_features(tmp_path / "data.npz")
    write_features(tmp_path / "other.npz", seed=1)
    (tmp_path / "one.txt").write_text("7")
    outputs, cache = tmp_path / "outputs", tmp_path / "sfu-cache"
    for name in ("data", "other"):
        config = config_for(
            tmp_path / f"{name}.npz", "head.keep=full", f"forget.indices={tmp_path / 'one.txt'}",
            f"dataset.normalize_rows={str(normalize).lower()}",
        )  # fmt: skip
        config.methods = ["original", "retrained"]
        (outputs / "2026" / name).mkdir(parents=True)
        run_on(config, outputs / "2026" / name)
    row = features[7]
    if normalize:
        row = torch.nn.functional.normalize(torch.from_numpy(row).float(), dim=0).double().numpy()
    for folder in (outputs, cache):  # as long as both heads are there, they give the row back
        assert is_difference(row, squares(folder, len(row)))
    other = everything(outputs / "2026" / "other")
    new, rows = served(tmp_path, outputs / "2026" / "data" / "heads" / "original", row[None], labels[7:8])
    capsys.readouterr()
    state = everything(tmp_path)
    assert run("purge", new, rows, "--runs", str(outputs)) == 0
    shown = capsys.readouterr().out
    assert "Nothing was removed (no --apply)." in shown
    assert f"{outputs / '2026' / 'data'}: heads of a run whose data held one of these rows." in shown
    assert everything(tmp_path) == state
    assert run("purge", new, rows, "--runs", str(outputs), "--apply") == 0
    for folder in (outputs, cache):
        assert not holds_bytes(folder, features[7])
        assert not is_difference(row, squares(folder, len(row)))
    assert not (outputs / "2026" / "data" / "heads").exists()
    assert everything(outputs / "2026" / "other") == other
    assert len(squares(cache, len(row))) > 1  # those of the other data
    record = read_deletion_record(Path(new) / "record-2.json")
    assert (record.event, record.purged.rows, record.purged.runs.made_of_them) == ("purge", 1, 1)
    assert record.purged.caches["results"].made_of_them > 3
    assert record.before == record.after
    text = (Path(new) / "record-2.md").read_text()
    assert "| heads of run folders | 1 | 0 |" in text
    assert not verify([Path(new)]).problems
    assert run("purge", new, rows, "--runs", str(outputs), "--apply") == 0
    again = read_deletion_record(Path(new) / "record-3.json").purged
    assert (again.caches["results"].made_of_them, again.runs.made_of_them) == (0, 0)


def test_the_cache_of_features_is_searched_by_content(tmp_path, capsys):
    for name in ("data", "other"):
        write_folder(tmp_path / name)
    for path in (tmp_path / "other").rglob("*.png"):
        Image.new("RGB", (6, 6), (int(path.stem), 9, 9)).save(path)
    for name in ("data", "other"):
        config = image_config(tmp_path / name)
        run_on(config, tmp_path / name / "run")
    cache = tmp_path / "sfu-cache"
    entries = [path for path in (cache / "features").iterdir() if (path / "entry.json").is_file()]
    assert len(entries) == 2
    head = sfu.load_head(tmp_path / "data" / "run" / "heads" / "original")
    stored = [next(entry.rglob("features.safetensors")) for entry in entries]
    chunks = [load_tensors(path.read_bytes())["features"] for path in stored]
    own = max(range(2), key=lambda number: float(chunks[number].var(0).sum()))  # other images have no contrast
    rows = chunks[own][:3].double().numpy()
    assert holds_bytes(cache, rows[0])
    new, file = served(tmp_path, tmp_path / "data" / "run" / "heads" / "original", rows, np.zeros(3, int))
    assert run("purge", new, file, "--runs", str(tmp_path / "data"), "--runs", str(tmp_path / "other"), "--apply") == 0
    assert not holds_bytes(cache, rows[0])
    assert not entries[own].exists()
    assert entries[1 - own].exists()
    assert not (tmp_path / "data" / "run" / "heads").exists()
    assert (tmp_path / "other" / "run" / "heads").exists()
    assert head.n_features == rows.shape[1]


def test_runs_that_name_no_examples_go_too_and_the_folder_loses_its_ledger_and_old_head(tmp_path, capsys):
    features, labels = (tensor.numpy() for tensor in rows())
    head = replace(trained(), forgotten=Forgotten(ledger=Ledger()))
    head.save(tmp_path / "head")
    new, gone = served(tmp_path, tmp_path / "head", features[:40], labels[:40])
    np.savez(tmp_path / "more.npz", features=features[40:80], labels=labels[40:80])
    more = [str(tmp_path / "more.npz"), "--in-place", "--apply", "--keep-old", "--on-doubt", "apply"]
    assert run(new, *more) == 0
    assert sfu.load_head(Path(new) / "head").forgotten.ledger is not None
    runs = {name: tmp_path / "runs" / name for name in ("old", "no_run")}
    for name, folder in runs.items():
        head.save(folder / "heads" / "original")
        if name == "old":
            (folder / "metrics.json").write_text("{}")
    capsys.readouterr()
    assert run("purge", new, gone, "--runs", str(tmp_path / "runs"), "--apply") == 0
    shown = capsys.readouterr().out
    assert f"{runs['old']}: heads of a run whose data are not known." in shown
    assert f"{new}: the ledger of the head." in shown
    assert not (runs["old"] / "heads").exists()
    assert (runs["no_run"] / "heads").exists()
    assert not (Path(new) / "before").exists()
    made = sfu.load_head(Path(new) / "head")
    assert made.forgotten.ledger is None
    assert (made.forgotten.rows, made.n_train) == (80, len(labels) - 80)
    record = read_deletion_record(Path(new) / "record-3.json")
    assert (record.purged.kept_head, record.purged.ledger, record.purged.runs.unknown) == (True, True, 1)
    assert record.after.secret != record.before.secret
    assert not verify([Path(new)]).problems
    assert run("undo", new) == 2


def test_what_cannot_be_purged_is_named(tmp_path, capsys):
    features, labels = write_features(tmp_path / "data.npz")
    sfu.fit(features, labels, l2=1e-2, loss="quadratic").save(tmp_path / "head")
    new, rows = served(tmp_path, tmp_path / "head", features[:40], labels[:40])
    for given, message in (
        (["purge", str(tmp_path), rows], "holds a head without a record"),
        (["purge", str(tmp_path / "new" / "x"), rows], "is no folder that sfu-unlearn wrote"),
        (["purge", new, rows, "--runs", str(tmp_path / "nowhere")], "nowhere does not exist"),
        (["purge", new, str(tmp_path / "nothing.npz")], "nothing.npz"),
    ):
        assert run(*given) == 2
        assert message in message_of(capsys)


def test_a_run_that_is_under_way_is_not_purged(tmp_path, capsys):
    features, labels = write_features(tmp_path / "data.npz")
    sfu.fit(features, labels, l2=1e-2, loss="quadratic").save(tmp_path / "runs" / "one" / "heads" / "original")
    new, rows = served(tmp_path, tmp_path / "runs" / "one" / "heads" / "original", features[:40], labels[:40])
    about = {"state": "running", "started": "2026-11-29T10:00:00+00:00", "overrides": [], "pid": os.getpid()}
    (tmp_path / "runs" / "one" / "status.json").write_text(json.dumps(about | {"host": platform.node()}))
    before = everything(tmp_path)
    assert run("purge", new, rows, "--runs", str(tmp_path / "runs"), "--apply") == 2
    assert "is under way, and would write heads again. Wait, or stop it." in message_of(capsys)
    assert everything(tmp_path) == before


def test_every_run_folder_has_the_digests_of_its_examples_for_its_owner_alone(tmp_path):
    write_features(tmp_path / "data.npz")
    config = config_for(tmp_path / "data.npz")
    config.methods = ["original"]
    for name, cached in (("plain", False), ("first", True), ("again", True)):
        folder = tmp_path / name
        run_pipeline(config, folder, cache=StageCache(result_store(), stage_keys(config)) if cached else None)
        assert (folder / RUN_EXAMPLES).stat().st_mode & 0o777 == 0o600
    contents = {(tmp_path / name / RUN_EXAMPLES).read_bytes() for name in ("plain", "first", "again")}
    assert len(contents) == 1
