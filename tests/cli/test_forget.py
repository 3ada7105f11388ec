"""sfu-results forget and sfu-features forget: nothing made of an example is left, and nothing else is touched."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from sfu.cli import features as features_cli
from sfu.cli import results as results_cli
from sfu.cli.forget import _of_files
from sfu.data.examples import EXAMPLES, path_digest
from sfu.data.features.store import cached_features
from sfu.experiment.cache import StageCache
from sfu.experiment.keys import stage_keys
from sfu.experiment.result_store import kind_of, result_store
from sfu.heads.normal_equations import Checkpoint
from sfu.store import Store, cache_dir
from tests.conftest import make_arrays
from tests.experiment.cases import config_for, image_config, run, write_folder


def cached_run(config, folder: Path) -> None:
    cache = StageCache(result_store(), stage_keys(config))
    metrics = run(config, folder, cache=cache)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    cache.save_run(folder)


def results_of(path: Path, folder: Path, **changes) -> set[str]:
    """Cache a run on a file of features; return the keys of the entries it added."""
    before = {entry.key for entry in result_store().entries()}
    config = config_for(path, **changes)
    config.methods = ["original", "retrained"]
    cached_run(config, folder)
    return {entry.key for entry in result_store().entries()} - before


def keys() -> set[str]:
    return {entry.key for entry in result_store().entries()}


def test_results_of_every_dataset_that_held_a_row_go_and_no_others(tmp_path, feature_file, capsys):
    arrays = dict(np.load(feature_file))
    kept = np.arange(len(arrays["train_labels"])) != 17
    without, double, other = (tmp_path / f"{name}.npz" for name in ("without", "double", "other"))
    np.savez(without, **{key: value[kept] if "train" in key else value for key, value in arrays.items()})
    both = {key: np.concatenate([arrays[f"train_{key}"], arrays[f"test_{key}"]]) for key in ("features", "labels")}
    np.savez(double, train_features=both["features"].astype(np.float64), train_labels=both["labels"])
    np.savez(other, **make_arrays(seed=1))
    gone = results_of(feature_file, tmp_path / "a")
    gone |= results_of(feature_file, tmp_path / "b", dataset__normalize_rows=True)
    gone |= results_of(double, tmp_path / "c", seed=3)  # the same row as a 64-bit number, on either side of a split
    stay = results_of(without, tmp_path / "d") | results_of(other, tmp_path / "e")
    assert len(gone) == 3 * 5
    rows = tmp_path / "rows.txt"
    rows.write_text("17\n")
    asked = ["forget", "--indices", str(rows), "dataset=features", f"dataset.path={feature_file}"]
    capsys.readouterr()
    results_cli.main([*asked, "--dry-run"])
    shown = capsys.readouterr().out
    assert re.search(r"results: .*3 head.*: made of data that held one of these examples\.", shown)
    for kind in ("6 row", "3 run", "3 examples"):
        assert kind in shown
    assert "Nothing was removed (--dry-run)." in shown
    assert keys() == gone | stay
    results_cli.main(asked)
    shown = capsys.readouterr().out
    assert "Removed 15 entries from" in shown
    assert "Not searched: run folders" in shown
    assert keys() == stay
    results_cli.main(asked)
    assert "1 of 1 examples were found in none of these caches." in capsys.readouterr().out


def test_an_image_is_forgotten_by_digest_or_by_name_even_after_its_file_is_gone(tmp_path, capsys):
    first = write_folder(tmp_path / "first", per_class=6, n_test=3)
    second = write_folder(tmp_path / "second", per_class=7, n_test=3)
    other = write_folder(tmp_path / "other", per_class=6, n_test=3)
    image = first / "train" / "class-1" / "002.png"
    (second / "test" / "class-2" / "001.png").write_bytes(image.read_bytes())
    for one in other.rglob("*.png"):
        one.write_bytes(one.read_bytes() + b" ")  # the same pixels, but no file of the others
    for name, folder in (("a", first), ("b", second), ("c", other)):
        config = image_config(folder)
        config.methods = ["original", "unlearned_minus_augmented"]
        config.forget.fraction = 0.5
        cached_run(config, tmp_path / name)
    paths = {entry.key for entry in cached_features(cache_dir("features"))}
    assert len(paths) > 3  # of three folders, and views of their forget sets
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    features_cli.main(["forget", "--digest", digest, "--dry-run"])
    by_digest = capsys.readouterr().out
    listed = tmp_path / "listed.txt"
    listed.write_text("class-1/002.png\n")
    of_dataset = ["--files", str(listed), "dataset=image_folder", f"dataset.path={first}"]
    features_cli.main(["forget", *of_dataset, "--dry-run"])
    assert capsys.readouterr().out == by_digest
    image.unlink()
    listed.write_text(f"{image}\n")
    features_cli.main(["forget", "--files", str(listed), "--dry-run"])
    assert "1 of 1 files do not exist; they are looked for by their path alone." in capsys.readouterr().out
    for command in (features_cli, results_cli):
        command.main(["forget", "--digest", digest])
    left = cached_features(cache_dir("features"))
    assert 0 < len(left) < len(paths)
    roots = [cache_dir("features"), cache_dir("results"), cache_dir("fingerprints")]
    names = (EXAMPLES, "digests.bin")
    for path in (path for root in roots for path in root.rglob("*") if path.name in names):
        assert bytes.fromhex(digest) not in path.read_bytes()
    kinds = sorted(kind_of(entry) for entry in result_store().entries())
    assert kinds == ["examples", "head", "row", "row", "run"]  # of the other folder


def test_what_does_not_say_what_it_was_made_of_goes_too(tmp_path, feature_file, capsys):
    """Entries of 0.1, entries whose list is damaged or missing, checkpoints, and what a killed write has left."""
    results_of(feature_file, tmp_path / "a")
    store = result_store()
    store.put("a" * 32, lambda folder: (folder / "gram.safetensors").touch())
    store.put("b" * 32, lambda folder: (folder / "row.json").touch(), about={"examples": "../../x"})
    store.put("c" * 32, lambda folder: (folder / "row.json").touch(), about={"examples": "0" * 32})
    store.put("d" * 32, lambda folder: (folder / EXAMPLES).write_bytes(b"short"))
    (store.root / f".{'e' * 32}.0").mkdir()
    checkpoint = Checkpoint("f" * 32, seconds=0.0)
    checkpoint.write(torch.zeros(1, 3))
    results_cli.main(["forget", "--digest", "0" * 64])
    shown = capsys.readouterr().out
    assert re.search(r"results: .*2 row.*: do not say what they were made of, so they go, too\.", shown)
    assert "training: 1 checkpoint: do not say" in shown
    assert len(store.entries()) == 5
    assert not [path for path in store.root.iterdir() if path.name.startswith(".") and path.is_dir()]
    assert Store(cache_dir("training")).entries() == []


def test_an_entry_in_use_is_named_and_the_others_go(tmp_path, feature_file, capsys):
    results_of(feature_file, tmp_path / "a")
    used = next(entry for entry in result_store().entries() if kind_of(entry) == "head")
    rows = tmp_path / "rows.txt"
    rows.write_text("0\n1\n")
    asked = ["forget", "--indices", str(rows), "dataset=features", f"dataset.path={feature_file}"]
    with FileLock(used.folder.with_name(f".{used.key}.lock")), pytest.raises(SystemExit) as stop:
        results_cli.main(asked)
    assert stop.value.code == 1
    assert "is in use by a run" in capsys.readouterr().err
    assert keys() == {used.key}
    results_cli.main(asked)
    assert keys() == set()


ROWS = ["--indices", "rows.txt"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_list_of_files_may_be_written_on_another_system(tmp_path, encoding, capsys):
    (tmp_path / "Zoe\u0308.jpg").write_bytes(b"a picture")
    (tmp_path / "wish.txt").write_text(f"{tmp_path}/Zo\u00eb.jpg\r\n", encoding=encoding)
    (example,) = _of_files(tmp_path / "wish.txt")
    assert hashlib.sha256(b"a picture").digest() in example
    assert path_digest(tmp_path / "Zoe\u0308.jpg") in example
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "forget needs --files LIST, --indices LIST or --digest SHA256"),
        (["--digest", "abc"], "--digest abc is no SHA-256. Give 64 hexadecimal digits"),
        (["--digest", "0" * 64, "dataset=digits"], "name the dataset of --files or --indices"),
        (ROWS, "--indices rows.txt counts rows of a dataset. Name it"),
        (["--indices", "none.txt", "dataset=digits"], "--indices none.txt is not a file"),
        ([*ROWS, "dataset=digits"], "--indices rows.txt names rows 5 .. 9999"),
        ([*ROWS, "dataset=digit"], "digit"),
        ([*ROWS, "dataset=image_folder", "dataset.path=folder"], "Name the image files instead (--files)"),
        (["--files", "none.txt"], "--files none.txt cannot be read"),
        (["--files", "empty.txt"], "--files empty.txt names no file"),
        (["--files", "rows.txt", "dataset=features", "dataset.path=x.npz"], "has no files to name. Use --indices"),
        (["--files", "rows.txt", "dataset=image_folder", "dataset.path=folder"], "'5' is not an image of the training"),
    ],
)
@pytest.mark.parametrize("command", [results_cli, features_cli])
def test_what_cannot_be_understood_is_refused_and_nothing_goes(
    tmp_path, monkeypatch, capsys, command, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("5\n9999\n")
    (tmp_path / "empty.txt").write_text("\n")
    write_folder(tmp_path / "folder", per_class=2, n_test=1)
    result_store().put("a" * 32, lambda folder: (folder / "row.json").touch())
    with pytest.raises(SystemExit) as stop:
        command.main(["forget", *arguments])
    assert stop.value.code == 1
    assert message in capsys.readouterr().err
    assert keys() == {"a" * 32}
