"""sfu-features: extract beforehand, list, remove; as a command, from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from sfu.cli import features as features_cli
from sfu.data.features.store import cached_features
from sfu.store import cache_dir

# files that are left open
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")

DIGITS = ["dataset=digits", "backbone=pixels"]


def command(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sfu.cli.features", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80", **environment},
    )  # fmt: skip


def test_extract_ls_and_rm(tmp_path, monkeypatch, capsys):
    features_cli.main(["ls"])
    assert "No features are cached" in capsys.readouterr().out
    done = command("extract", *DIGITS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1,797 images in" in done.stdout
    (entry,) = cached_features(cache_dir("features"))
    monkeypatch.setenv("COLUMNS", "80")
    features_cli.main(["ls"])
    listing = capsys.readouterr().out
    assert entry.key[:12] in listing
    assert all(len(line) <= 80 for line in listing.splitlines()[:-1])
    for word in ("digits", "pixels", "1,797", "1/1"):
        assert word in listing
    features_cli.main(["rm", entry.key[:6]])
    assert "Removed 1 entry" in capsys.readouterr().out
    assert cached_features(cache_dir("features")) == []
    assert not list(cache_dir("features").iterdir())


def test_unfinished_and_all(capsys):
    features_cli.main(["extract", *DIGITS])
    (entry,) = cached_features(cache_dir("features"))
    features_cli.main(["rm", "--unfinished"])
    assert "Nothing to remove" in capsys.readouterr().out
    shutil.rmtree(next(path for path in entry.folder.iterdir() if path.is_dir()))
    features_cli.main(["rm", "--unfinished"])
    assert not entry.folder.exists()
    features_cli.main(["extract", *DIGITS])
    (cache_dir("features") / "notes").mkdir()
    features_cli.main(["rm", "--all"])
    assert [path.name for path in cache_dir("features").iterdir()] == ["notes"]  # nothing but features is removed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm", "abc"], "abc names no features"),
        (["rm"], "rm needs keys, or --all, or --unfinished"),
        (["rm", "abc", "--all"], "rm needs keys, or --all, or --unfinished"),
        (["extract", "dataset=digits"], "backbone=none extracts nothing"),
        (
            ["extract", "dataset=digits", "backbone=resnet"],
            "backbone=resnet is unknown. Choose one of auto, none, pixels",
        ),
        (["extract", "dataset=digits", "backbone=pixels", "datset.path=1"], "datset"),
        (["extract", "dataset=digits", "backbone=.5"], "backbone=.5 does not name a choice of backbone. Name one of"),
        (["extract", "dataset=digits", "backbone=torchvision"], "backbone.name"),
        (["extract", "dataset=features", "backbone=pixels"], "holds features"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        features_cli.main(arguments)
    assert stopped.value.code == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "about",
    [
        "", "[]", "[" * 100_000, '{"record": 3}', '{"shown": {"dataset": 5, "chunks": "x"}}',
        '{"shown": {"chunks": -1}}',
        '{"record": {"n_images": "many"}}', '{"record": {"transform": []}}', '{"shown": null}',
        '{"shown": {"dataset": "[/red]x", "chunks": 1}, "record": {"backbone": "[bold]", "n_images": 3}}',
    ],
)  # fmt: skip
def test_a_damaged_description_and_markup_in_a_name_are_listed_and_removed(tmp_path, capsys, about):
    cache, key = tmp_path / "cache", "0" * 32
    (cache / key).mkdir(parents=True)
    (cache / key / "entry.json").write_text(about.replace("{", f'{{"key": "{key}", ', 1))
    features_cli.main(["ls", "--cache", str(cache)])
    shown = capsys.readouterr().out
    assert key[:12] in shown
    assert ("[/red]x" in shown) == ("[/red]x" in about)
    features_cli.main(["forget", "--dry-run", "--digest", "0" * 64, "--cache", str(cache)])
    assert "1 features of " in capsys.readouterr().out
    features_cli.main(["rm", key[:6], "--cache", str(cache)])
    assert not (cache / key).exists()


def test_features_under_extraction_are_not_removed(capsys):
    features_cli.main(["extract", *DIGITS])
    (entry,) = cached_features(cache_dir("features"))
    with FileLock(entry.folder.with_name(f".{entry.key}.lock")), pytest.raises(SystemExit):
        features_cli.main(["rm", "--all"])
    assert "is in use by a run" in capsys.readouterr().err
    assert entry.folder.exists()


def test_an_experiment_under_torchrun_is_told_what_to_do(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sfu"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "extract the features first" in done.stderr
