"""sfu-report: as a command, on folders as `sfu` leaves them and on what else a person may point it at."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfu.cli import report as report_cli
from sfu.reporting.report import write
from tests.reporting.report.folders import config_with, killed_status, write_run, write_sweep
from tests.reporting.report.html_checks import check
from tests.reporting.samples import good_run

# files that are left open
pytestmark = pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")


def command(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "sfu.cli.report", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures take time and are looked at elsewhere."""
    monkeypatch.setattr(write, "pictures_of", lambda total, curves=(): ([], []))


def refused(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        report_cli.main(list(arguments))
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("sfu-report: ")
    assert "Traceback" not in error
    return error


def test_from_a_real_sweep_to_the_page(tmp_path, undrawn, capsys, monkeypatch, feature_file):
    from tests.experiment.cases import sfu

    overrides = ["-m", "head.l2=1e-3,1e-2", "methods=[original,retrained,closed_form]", "logger=none"]
    data = ["dataset=features", f"dataset.path={feature_file}"]
    assert sfu(monkeypatch, *overrides, *data, f"hydra.sweep.dir={tmp_path / 'runs'}") == 0
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    report_cli.main(["runs", "--out", "out"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "head.l2 = 0.01  n = 1 (seed 0)" in text
    assert "Closest to Retrained without source data: closed_form at both settings" in " ".join(text.split())
    assert "Saved out/report.html and 3 more files beside it" in text
    parsed = check((tmp_path / "out" / "report.html").read_text())
    for word in ("head.l2 = 0.001", "scikit-learn", "dataset.normalize_rows", "closed_form"):
        assert word in parsed.text
    assert str(tmp_path / "runs") not in parsed.text


def test_in_a_pipe_80_columns_no_colour_and_head_does_not_lose_the_files(tmp_path):
    write_run(tmp_path / "runs" / "0", good_run())
    done = command("runs", "--no-files", folder=tmp_path, COLUMNS="80")
    assert done.returncode == 0
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not (tmp_path / "report").exists()
    code = (
        "from sfu.reporting.report import write; write.pictures_of = lambda *_: ([], []); "
        "from sfu.cli.report import main; main(['runs'])"
    )
    piped = subprocess.run(
        f'{sys.executable} -c "{code}" | head -1',
        shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert piped.stderr == ""
    assert (tmp_path / "report" / "report.html").is_file()


def test_a_table_for_a_program_stands_alone_on_standard_output(tmp_path, undrawn, capsys):
    write_sweep(tmp_path / "runs", fractions=(0.1,))
    report_cli.main([str(tmp_path / "runs"), "--print", "csv", "--out", str(tmp_path / "out"), "--spread", "sd"])
    captured = capsys.readouterr()
    assert len(list(csv.DictReader(io.StringIO(captured.out)))) == 6
    assert "Saved" in captured.err
    report_cli.main([str(tmp_path / "runs"), "--print", "latex", "--no-files"])
    assert capsys.readouterr().out.count(r"\toprule") == 2  # results, and differences from Retrained
    report_cli.main([str(tmp_path / "runs"), "--print", "markdown", "--no-files", "--spread", "sd"])
    assert "mean and sample standard deviation over seed" in capsys.readouterr().out


def test_by_and_curve_name_their_keys(tmp_path, undrawn, capsys):
    write_sweep(tmp_path)
    report_cli.main([str(tmp_path), "--by", "forget.fraction", "--no-files"])
    assert "digits, by forget.fraction" in capsys.readouterr().out
    error = refused(capsys, str(tmp_path), "--curve", "head.l3", "--no-files")
    assert "--curve head.l3" in error
    assert "Did you mean head.l2?" in error
    assert "--by forget.fractoin is a setting that no run has. Did you mean forget.fraction?" in refused(
        capsys, str(tmp_path), "--by", "forget.fractoin", "--no-files"
    )


def test_paths_that_hold_nothing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = ["--out", str(tmp_path / "out")]
    assert "nowhere does not exist" in refused(capsys, str(tmp_path / "nowhere"), *out)
    assert "no runs in" in refused(capsys, str(tmp_path / "empty"), *out)
    assert not (tmp_path / "out" / "report.html").exists()


def test_nothing_finished_is_listed_and_told_by_the_exit_code(tmp_path, capsys):
    killed = killed_status() | {"overrides": ("seed=7",)}
    write_run(tmp_path / "runs" / "killed", None, config_with(seed=7), **killed)
    with pytest.raises(SystemExit) as stopped:
        report_cli.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 1
    captured = capsys.readouterr()
    assert "killed (killed, seed=7): killed midway" in " ".join(captured.out.split())
    assert "No run has results" in captured.err


def test_a_folder_that_cannot_be_written_is_refused_before_any_run_is_read(tmp_path, capsys, monkeypatch):
    from sfu.reporting.report import build

    write_run(tmp_path / "runs" / "0", good_run())
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(build, "read_run", lambda *_, **__: pytest.fail("read first"))
    error = refused(capsys, str(tmp_path / "runs"), "--out", str(tmp_path / "file" / "out"))
    assert "cannot be written (Not a directory). Choose another folder" in error


def test_it_starts_without_torch(tmp_path):
    write_run(tmp_path / "0", good_run())
    code = (
        "import sys; from sfu.cli.report import main; main(['.', '--no-files']); "
        "print([name for name in ('torch', 'wandb', 'matplotlib', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
