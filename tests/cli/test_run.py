"""The command, as a user meets it: in this process for refusals, as a subprocess elsewhere, and from a built wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from sfu.experiment.job import line_of_job
from sfu.heads.files import load_head
from tests.experiment.cases import sfu

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["logger=none", "methods=[original,retrained,closed_form]", "evaluation.membership_splits=2"]


def subprocess_sfu(where: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; files and folders that it leaves open are errors on standard error."""
    inherited = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-m", "sfu", *arguments],
        cwd=where, env={**inherited, "COLUMNS": "80", **environment}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_leaves_everything_it_promises(tmp_path, feature_file):
    """From another folder, with W&B on, a home that cannot be written, and the backend of a notebook."""
    closed = str(feature_file / "home")  # below a file, no folder can be made
    done = subprocess_sfu(
        tmp_path, "dataset=features", f"dataset.path={feature_file.name}", "forget.fraction=0.1", "head.l2=5e-4",
        "methods=[original,retrained,unlearned_plus,unlearned_minus,closed_form,unlearned_minus_paper]",
        "curvature.perturbations=50", "hydra.run.dir=out", HOME=closed, WANDB_CACHE_DIR=closed, WANDB_DATA_DIR=closed,
        WANDB_CONFIG_DIR=closed, XDG_CACHE_HOME=closed, MPLBACKEND="module://matplotlib_inline.backend_inline",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        rf"logger=wandb: {closed} and .* cannot be written, so W&B keeps its files in the run's folder\. Set "
        r"WANDB_CACHE_DIR and WANDB_DATA_DIR and WANDB_CONFIG_DIR to choose another place\.\n", done.stderr,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("original", "retrained", "unlearned_plus", "unlearned_minus", "closed_form", "unlearned_minus_paper"):
        assert any(re.match(rf"[!r=]? *{name} ", line) for line in lines), name
    out = tmp_path / "out"
    files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert {
        "config.yaml", "metrics.json", "metrics.csv", "table.md", "figure.png", "split.safetensors", "status.json",
        "heads/original.safetensors", "heads/original.json", "heads/unlearned_minus.safetensors",
    } <= files  # fmt: skip
    assert any(name.startswith("wandb/offline-run-") for name in files)
    assert any(name.startswith("wandb/home/artifacts/") for name in files)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["schema"] == 1
    assert metrics["rows"]["unlearned_plus"]["distance"] < 1e-6
    assert metrics["run"]["overrides"][0] == "dataset=features"
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["head"]["l2"] == 5e-4
    assert config["forget"]["fraction"] == 0.1
    assert json.loads((out / "status.json").read_text())["state"] == "finished"
    assert load_head(out / "heads" / "closed_form").n_features == 12
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_makes_one_table_over_its_seeds(tmp_path, feature_file, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    jobs = ("-m", "forget.fraction=0.05,0.1", "seeds=2", "dataset=features", f"dataset.path={feature_file}")
    assert sfu(monkeypatch, *jobs, *QUICK, f"hydra.sweep.dir={folder}") == 0
    total = json.loads((folder / "sweep.json").read_text())
    assert total["n_runs"] == 4
    assert [group["overrides"] for group in total["groups"]] == [
        {"forget.fraction": "0.05"},
        {"forget.fraction": "0.1"},
    ]
    for group in total["groups"]:
        distances = [
            json.loads((folder / str(job) / "metrics.json").read_text())["rows"]["closed_form"]["distance"]
            for job in ((0, 2) if group["overrides"]["forget.fraction"] == "0.05" else (1, 3))
        ]
        cell = group["rows"]["closed_form"]["metrics"]["distance"]
        assert cell["n"] == 2
        assert cell["mean"] == pytest.approx(np.mean(distances))
        assert cell["std"] == pytest.approx(np.std(distances, ddof=1))
        assert cell["stderr"] == pytest.approx(np.std(distances, ddof=1) / 2**0.5)
        assert cell["values"] == distances
        half = 12.7062 * cell["stderr"]  # t(0.975, 1)
        assert cell["interval"] == pytest.approx([np.mean(distances) - half, np.mean(distances) + half], rel=1e-4)
    assert {p.name for p in folder.iterdir()} >= {"sweep.csv", "sweep.md", "sweep.png", "sweep.tex"}
    shown = capsys.readouterr().out
    assert "mean and standard error over seed" in shown
    assert "minus retrained" in shown
    assert "No source-free method was shown to come closer to Retrained" in shown  # two runs show nothing


def test_a_failing_job_neither_stops_nor_hides_the_others(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    code = sfu(monkeypatch, "-m", "head.l2=0,0.1,0.01", *QUICK, f"hydra.sweep.dir={folder}")
    assert code == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("sfu: the Gram matrix of the 1437 training rows plus head.l2=0 is singular")
    assert "head.l2=0: SingularHessianError" in captured.out
    total = json.loads((folder / "sweep.json").read_text())
    assert len(total["groups"]) == 3
    assert [f["overrides"]["head.l2"] for f in total["failed"]] == ["0"]
    assert json.loads((folder / "0" / "status.json").read_text())["state"] == "failed"
    assert (folder / "2" / "metrics.json").is_file()


def test_a_sweep_in_a_used_folder_counts_its_own_jobs_only_wherever_they_write(tmp_path, feature_file, monkeypatch):
    folder = tmp_path / "sweep"
    quick = (*QUICK, "methods=[original]", "dataset=features", f"dataset.path={feature_file}")
    for seeds, n_runs in ((("seeds=2",), 2), (("-m", "seed=2"), 1)):  # several seeds are a sweep without -m
        assert sfu(monkeypatch, *quick, *seeds, f"hydra.sweep.dir={folder}") == 0  # -m may stand anywhere
        assert json.loads((folder / "sweep.json").read_text())["n_runs"] == n_runs
    named = "hydra.sweep.subdir=by_seed/${seed}"
    assert sfu(monkeypatch, "-m", "seed=4", *quick, named, f"hydra.sweep.dir={folder}") == 0
    total = json.loads((folder / "sweep.json").read_text())
    assert total["n_runs"] == 1
    assert total["groups"][0]["over"] == {"seed": ["4"]}


def test_a_variant_from_the_command_line_as_contributing_has_it(tmp_path, monkeypatch):
    code = sfu(
        monkeypatch, "methods=[original,closed_form,strong]", "logger=none", f"hydra.run.dir={tmp_path}",
        "+variants.strong={base:closed_form,curvature:{regularization:fixed,rho:0.5}}",
    )  # fmt: skip
    assert code == 0
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert rows["strong"]["details"]["rho"] == 0.5
    assert rows["closed_form"]["details"]["rho"] != 0.5


def test_version(monkeypatch, capsys):
    import sfu as package

    assert sfu(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"sfu {package.__version__}\n"


@pytest.mark.slow
def test_jobs_side_by_side(tmp_path, feature_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    jobs = ("-m", "seed=0,1", "launcher=local_2", "dataset=features", f"dataset.path={feature_file}", *QUICK)
    assert sfu(monkeypatch, *jobs, "hydra.sweep.dir=s") == 0
    assert "n = 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["n_runs"] == 2
    assert sfu(monkeypatch, *jobs, "--dry-run") == 0
    assert "2 jobs: 2 cached" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_that_fails_in_another_process_is_told_in_its_own_words(tmp_path, feature_file, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = ("dataset=features", f"dataset.path={feature_file}")
    jobs = (*data, "-m", "forget.fraction=0.1,2", "launcher=submitit_local", "isolate=false")
    assert sfu(monkeypatch, *jobs, *QUICK, "hydra.sweep.dir=s") == 1
    shown = capsys.readouterr()
    assert shown.err == "sfu: job 1: ConfigError: forget.fraction=2.0. Give a finite number above 0 and at most 1.\n"
    assert "1 of 2 runs" in shown.out


@pytest.mark.skipif(shutil.which("srun") is not None, reason="Slurm is here")
def test_slurm_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    assert sfu(monkeypatch, "-m", "seed=0,1", "launcher=slurm", *QUICK, f"hydra.sweep.dir={tmp_path / 's'}") == 1
    assert "launcher=slurm needs Slurm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["head.l3=1"],
            r"head\.l3 is not a setting of head=linear\. It takes name, l2, training, .*\. Did you mean head\.l2\?",
        ),
        (["curvature.perturbation=1"], r"Did you mean curvature\.perturbations\?"),
        (["colour=red"], r"colour is not a setting of sfu\. It takes dataset"),
        (["head.l2=small"], r"^sfu: head\.l2=small is not a number\. Give a finite number of at least 0\.$"),
        (["head.l2=null"], r"head\.l2=null is not a number\."),
        (["forget.fraction=10%"], r"forget\.fraction=10% is not a number\. Give .* above 0 and at most 1, or null\."),
        (["seed=1.5"], r"seed=1\.5 is not a whole number\. Give a whole number of at least 0 and below 4294967296\."),
        (["head.bias=maybe"], r"head\.bias=maybe is neither true nor false\. Choose true or false\."),
        (["curvature.measurement=sound"], r"curvature\.measurement=sound is unknown\. Choose one of gradient, loss\."),
        (["curvature.augment=flip"], r"curvature\.augment=flip is not a list\. Write curvature\.augment=\[flip\]\."),
        (["head.sgd.milestones=[a]"], r"milestones=\[a\] does not hold whole numbers alone\. Give a list of them\."),
        (["forget=0.1"], r"forget=0\.1 is one value for a group of settings\. Set one of them: forget\.fraction, "),
        (["variants=3"], r"variants=3 is not a mapping\. Write variants={name: value}\."),
        (["forget.indices=[1]"], r"forget\.indices=\[1\] is not text\."),
        (
            ["method=scrub"],
            r"^sfu: method is not a setting of sfu\. Rows are chosen by the key methods, as in methods=\[",
        ),
        (["scrub.lr=0.1"], r"scrub is not a setting of sfu\. .* variant: methods=\[original,mine\] '\+variants\.mine="),
        (["l2=1e-3"], r"l2 is not a setting of sfu\. .* Did you mean head\.l2\?"),
        (["lr=0.1"], r"lr is not a setting of sfu\. .* Did you mean head\.adam\.lr or head\.sgd\.lr or "),
        (["loss=cross_entropy"], r"loss=cross_entropy is unknown\. .* Did you mean softmax\?"),
        (["loss=MSELoss"], r"loss=MSELoss is unknown\. .* Did you mean quadratic\?"),
        (["methods=original"], r"methods=original is not a list\. Write methods=\[original\]\."),
        (
            ["methods=[a]", "+variants.a={base:adversarial,settings:{epochs:3}}"],
            r"the row 'a': epochs is not a setting of method=adversarial\.",
        ),
        (
            ["methods=[a]", "+variants.a={base:scrub,settings:{lr:fast}}"],
            r"the row 'a': lr=fast is not a number\. Give a finite number above 0\.",
        ),
        (["dataset=imagenet"], r"dataset=imagenet is unknown\. Choose one of caltech256, cifar10"),
        (["dataset=cifar"], r"dataset=cifar is unknown\. .*Did you mean cifar10"),
        (["experiment=nope"], r"experiment=nope is unknown\. Choose one of .*quick"),
        (["methods=[original,magic]"], r"methods=magic is unknown\. Choose one of .*closed_form"),
        (["head.l2=-1"], r"head\.l2=-1"),
        (
            ["head.layers=3"],
            r"head\.layers is not a setting of head=linear\. It takes [^.]*\. head=linearised takes it",
        ),
        (["head.core=pretrain"], r"head\.core is not a setting of head=linear\. .*head=linearised takes it"),
        (["head.l2=0"], r"Gram matrix .* singular"),
        (["forget.fraction=0"], r"forget\.fraction=0"),
        (["forget.fraction=1"], r"all 1437 training rows"),
        (["forget.classes=[]"], r"empty forget set"),
        (["forget.classes=[10]"], r"classes are 0 \.\. 9"),
        (["forget.indices=nowhere.txt"], r"nowhere\.txt is not a file"),
        (["curvature.folds=500"], r"curvature\.folds=500 but there are only 144 rows"),
        (["dataset=features"], r"needs dataset\.path"),
        (
            ["dataset=features", "dataset.path=no/such.npz"],
            r"dataset\.path=no/such\.npz does not exist \(looked from .*\)\. Give the path of an \.npz or ",
        ),
        (["device=cuda:7"], r"device=cuda:7, but \d+ CUDA"),
        (["logger=wandb", "logger.mode=sideways"], r"sideways"),
        (
            ["+variants.a={_target_:os.system,base:original}", "methods=[a]"],
            r"variants\.a\._target_ is not a setting of a row",
        ),
        (["dataset=null"], r"dataset=null does not name a choice of dataset\. Name one of caltech256, "),
        (["backbone=.5"], r"backbone=\.5 does not name a choice of backbone\. Name one of auto, none, pixels"),
        (["curvature=[1]"], r"curvature=\[1\] does not name a choice of curvature\."),
        (["+evil=1"], r"evil is not a setting of sfu\. It takes dataset"),
        (["+head.adam.momentum=1"], r"head\.adam\.momentum is not a setting of head\.adam\. It takes lr, [^.]*\.\n"),
        (["+dataset._target_=os.system"], r"dataset\._target_ is not a setting"),
        (["threads=100000"], r"threads=100000"),
        (["dataset.n_classes=1000000000"], r"1000000000 classes for 1437 training rows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_clear_and_come_before_any_result(tmp_path, monkeypatch, capsys, arguments, message):
    base = [] if any(a.startswith(("methods=", "logger=")) for a in arguments) else ["logger=none"]
    code = sfu(monkeypatch, *base, *arguments, f"hydra.run.dir={tmp_path / 'out'}")
    error = capsys.readouterr().err
    assert code == 1
    assert re.search(message, error), error
    assert "Traceback" not in error
    assert "Error executing" not in error
    assert not (tmp_path / "out" / "metrics.json").exists()


def test_an_output_folder_that_cannot_be_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("in the way")
    assert sfu(monkeypatch, *QUICK, f"hydra.run.dir={tmp_path / 'file' / 'out'}") == 1
    error = capsys.readouterr().err
    assert "cannot use" in error
    assert "hydra.run.dir=FOLDER" in error


def test_a_failed_run_is_recorded_as_failed(tmp_path, monkeypatch):
    assert sfu(monkeypatch, "head.l2=0", *QUICK, f"hydra.run.dir={tmp_path}") == 1
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "failed"
    assert "SingularHessianError" in status["error"]


def test_one_bad_row_fails_the_run_but_keeps_the_rest(tmp_path, monkeypatch, capsys):
    bad = ("methods=[original,retrained,fast]", "+variants.fast={base:neg_grad,settings:{lr:1000}}")
    assert sfu(monkeypatch, *QUICK, *bad, f"hydra.run.dir={tmp_path}") == 1
    assert "1 of 3 rows failed (fast: DivergedError: diverged at step" in capsys.readouterr().err
    rows = json.loads((tmp_path / "metrics.json").read_text())["rows"]
    assert rows["retrained"]["test_accuracy"] > 80
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_built_wheel_carries_its_configs_and_runs_alone_without_optional_packages(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shipped = {p.relative_to(site / "sfu" / "configs") for p in (site / "sfu" / "configs").rglob("*.yaml")}
    assert shipped == {p.relative_to(ROOT / "configs") for p in (ROOT / "configs").rglob("*.yaml")}
    for name in ("py.typed", "reporting/report/page.html.jinja", "reporting/report/page.css"):
        assert (site / "sfu" / name).is_file()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "sys.modules['wandb'] = sys.modules['cvxpy'] = sys.modules['cvxpylayers'] = None\n"
        "import sfu; assert 'torch' not in sys.modules and 'hydra' not in sys.modules\n"
        "from sfu.cli.run import main; assert 'torch' not in sys.modules\n"
        "print(sfu.__file__); main()\n"
        "import gc; assert gc.isenabled() and gc.get_freeze_count() > 100_000"  # collections search no imports
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "experiment=quick", "logger=none"],
        cwd=elsewhere, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(site) in done.stdout
    assert len(list(elsewhere.glob("outputs/*/*/metrics.json"))) == 1


def test_the_line_of_a_job_fits_the_terminal_while_anything_can_be_left_out():
    overrides = ["head.l2=0.1", "seed=0", "dataset=features", "dataset.path=/a/long/way/to/features.npz"]
    assert line_of_job("job 0: ", overrides[:2], ": 3 rows", 80) == "job 0: head.l2=0.1 seed=0: 3 rows"
    assert line_of_job("job 0: ", overrides, ": 3 rows", 60) == "job 0: head.l2=0.1 seed=0 dataset=features ...: 3 rows"
    assert line_of_job("job 0: ", overrides, ": 3 rows", 10) == f"job 0: {' '.join(overrides)}: 3 rows"
