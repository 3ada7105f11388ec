"""CONTRIBUTING.md word for word: its examples work in a package of one's own and in sfu, and pass lint and types."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = re.compile(r"`([\w.]+)`(?:, in sfu: `([\w/.]+)`)?:\n\n```\w+\n(.*?)```", re.S)
WITHOUT_PYTORCH = """
[[tool.mypy.overrides]]
module = ["torch.*"]
follow_imports = "skip"
"""  # PyTorch alone would take three quarters of mypy's time; the examples use it when they run
COMMAND = [
    "dataset=rings", "dataset.noise=0.3", "head.bias=true", "loss=pseudo_huber", "loss.width=0.5",
    "curvature=cautious", "curvature.caution=0.5", "logger=lines", "logger.filename=distances.txt", "seed=1",
    "head.l2=1e-2",
    "methods=[original,retrained,unlearned_minus,shrink_weights,more]",
    "+variants.more={base:shrink_weights,settings:{share:0.5}}", "hydra.run.dir=out",
]  # fmt: skip


def examples() -> dict[str, tuple[str, str]]:
    """Every example by its file: where it stands in sfu, and its text."""
    return {name: (inside, text) for name, inside, text in EXAMPLES.findall(PAGE)}


def run(folder: Path, *python_path: Path, isolate: bool = True) -> None:
    """Run all examples at once in a fresh process, as the page's commands do one by one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, python_path))}
    done = subprocess.run(
        [sys.executable, "-m", "sfu", *COMMAND, f"isolate={str(isolate).lower()}"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((folder / "out" / "metrics.json").read_text())["rows"]
    lines = (folder / "out" / "distances.txt").read_text().splitlines()
    assert lines == [f"{name} {row['distance']}" for name, row in rows.items()]
    assert rows["more"]["distance"] > rows["shrink_weights"]["distance"] > 0
    assert not any(row.get("error") for row in rows.values())
    assert rows["original"]["test_accuracy"] > 80


def test_the_page_has_an_example_of_each() -> None:
    assert list(examples()) == [
        "pyproject.toml", "my_method.py", "my_dataset.py", "my_loss.py", "my_estimator.py", "my_logger.py",
    ]  # fmt: skip


@pytest.mark.slow
def test_from_a_package_of_ones_own(tmp_path: Path) -> None:
    package, site, folder = tmp_path / "package", tmp_path / "site", tmp_path / "elsewhere"
    package.mkdir()
    folder.mkdir()
    for name, (_, text) in examples().items():
        (package / name).write_text(text, encoding="utf-8")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index",
         "--target", str(site), str(package)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    run(folder, site, ROOT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    for flag, shown in (("--help", ("rings", "pseudo_huber", "cautious", "lines")), ("--rows", ("shrink_weights",))):
        done = subprocess.run(
            [sys.executable, "-m", "sfu", flag], env=environment, cwd=folder, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert set(shown) <= set(done.stdout.split())
    benchmark = [
        "experiment=benchmark", "request=class", "methods=[original,retrained,gradient_step]", "seeds=2",
        "logger=none", "isolate=false", "hydra.sweep.dir=benchmark",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "sfu", *benchmark], env=environment, cwd=folder, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads((folder / "benchmark" / "sweep.json").read_text())
    assert [list(group["rows"]) for group in table["groups"]] == [
        ["original", "retrained", "gradient_step", "shrink_weights"]
    ]
    assert set(table["ranks"]) == {"original", "gradient_step", "shrink_weights"}


@pytest.mark.slow
def test_inside_sfu(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sfu", tmp_path / "sfu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for inside, text in examples().values():
        if inside:
            (tmp_path / inside).write_text(text, encoding="utf-8")
    run(tmp_path, tmp_path, isolate=False)  # sfu's own methods are isolated in other tests


@pytest.mark.slow
def test_the_examples_pass_lint_and_types(tmp_path: Path) -> None:
    for name, (_, text) in examples().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8") + WITHOUT_PYTORCH)
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."]):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
    files = [name for name in examples() if name.endswith(".py")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, *files],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
