from __future__ import annotations

import base64
import hashlib
import json
import logging
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from safetensors.torch import load_file

from sfu.errors import ConfigError
from sfu.processes import exit_code_of
from sfu.reporting.loggers.base import NullLogger, RunLogger
from sfu.reporting.loggers.content import FAILED, UPLOADED_RECORD, heads_of, picked, public_metrics, summary_of
from sfu.reporting.loggers.wandb_logger import WandbLogger
from tests.experiment.cases import sfu

from .samples import catastrophic_run
from .scripts import load_script


@dataclass
class Recorder(RunLogger):
    """A logger that remembers its calls and fails on demand."""

    name: str = "recorder"
    fail: bool = False
    calls: list[Any] = field(default_factory=list)

    def _start(self, config: Mapping[str, Any], run_info: Mapping[str, Any]) -> None:
        self.calls.append(("start", config, run_info))

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self.fail:
            raise OSError("disk full")

    def _log_stage(self, name: str, seconds: float) -> None:
        self._note("stage", name, seconds)

    def _log_result(self, metrics: Mapping[str, Any], picture_path: Path | None) -> None:
        self._note("result", picture_path)

    def _log_files(self, folder: Path) -> None:
        self._note("files", folder)

    def _finish(self, exit_code: int) -> None:
        self._note("finish", exit_code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError(), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("x"), 1),
    ],
)
def test_finish_is_always_called_with_the_right_code(error: BaseException | None, code: int) -> None:
    assert exit_code_of(error) == code
    logger = Recorder()

    def run() -> None:
        with logger:
            logger.start({})
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert logger.calls[-1] == ("finish", code)
    assert [call[0] for call in logger.calls].count("finish") == 1


def test_a_failing_logger_warns_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    logger = Recorder(fail=True)
    with caplog.at_level(logging.WARNING), logger:
        logger.start({"a": 1}, {"name": "x"})
        logger.log_stage("train", 1.0)
        logger.log_result({"rows": {}}, "p.png")
        logger.log_files("out")
    assert [call[0] for call in logger.calls] == ["start", "stage", "result", "files", "finish"]
    assert caplog.text.count("disk full") == 4
    assert "logger=recorder could not log the result (OSError: disk full); the run goes on" in caplog.text


def test_finish_twice_and_before_start_do_nothing() -> None:
    logger = Recorder()
    logger.finish(0)
    logger.log_stage("early", 1.0)
    with logger:
        logger.start({})
        logger.finish(7)
    assert logger.calls == [("start", {}, {}), ("finish", 7)]


def test_a_logger_is_made_by_its_name() -> None:
    assert isinstance(RunLogger.make("none"), NullLogger)
    made = RunLogger.make("wandb", group="g", tags=["a"])
    assert isinstance(made, WandbLogger)
    assert (made.mode, made.group, made.tags) == ("offline", "g", ["a"])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mlflow", {}, r"logger=mlflow is unknown\. Choose one of none, tensorboard, wandb\."),
        ("wandb", {"grop": "x"}, r"logger\.grop is not a setting of logger=wandb\. .*Did you mean logger\.group\?"),
        ("wandb", {"mode": "onlin"}, r"logger\.mode=onlin is unknown\. Choose one of disabled, offline, online\."),
        (
            "wandb",
            {"project": "a/b"},
            r"logger\.project=a/b is no name that W&B takes\. Give 1 to 128 characters w",
        ),
        ("wandb", {"project": ""}, r"logger\.project= is no name that W&B takes"),
        ("wandb", {"group": "g" * 129}, r"logger\.group=g+ is no name that W&B takes\. Give 1 to 128 characters, and"),
        ("wandb", {"entity": "me\x1b[2J"}, r"logger\.entity=me\\x1b\[2J is no name that W&B takes"),
        ("wandb", {"tags": ["a", "t" * 65]}, r"logger\.tags=t+ is no name that W&B takes\. Give 1 to 64 characters"),
        ("wandb", {"init_timeout": 0}, r"logger\.init_timeout=0.*\. Give a finite number above 0\."),
        ("tensorboard", {"group": "g"}, r"logger\.group is not a setting of logger=tensorboard\."),
    ],
)
def test_settings_that_a_logger_does_not_have_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunLogger.make(name, **settings)


def test_null_logger_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with NullLogger() as logger:
        logger.start({})
        logger.log_stage("train", 1.0)
        logger.log_result(catastrophic_run(), None)
    assert list(tmp_path.iterdir()) == []


def test_missing_wandb_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logger\.mode=offline needs the wandb package.*logger=none"):
        WandbLogger().start({})


def test_summary_leaves_nulls_out() -> None:
    found = summary_of({"run": {"seconds": 2.0, "data": {}}, "rows": {"a": {"mia": None, "details": {"rho": 0.1}}}})
    assert found == {"rows/a/details/rho": 0.1, "run/seconds": 2.0}


@pytest.fixture
def wandb_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps W&B out of the user's folders, logins and settings."""
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "HOME"):
        folder = tmp_path / name.lower()
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing answers here
    return tmp_path


def in_folder(home: Path) -> dict[str, str]:
    """What a run tells its logger, at the least."""
    return {"folder": str(home / "run")}


def inspect(run_dir: Path) -> dict[str, Any]:
    """The run as the public reader gives it back."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run_dir)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_offline_run_reads_back(wandb_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = catastrophic_run()
    metrics["rows"]["v1.5"] = {**metrics["rows"]["closed_form"], "details": {"rho": "auto"}}
    picture = wandb_home / "result.png"
    Figure(figsize=(1, 1)).savefig(picture)
    folder = wandb_home / "run"
    capfd.readouterr()
    about = {"name": "digits", "folder": str(folder), "group": "run's", "job_type": "run", "tags": ["digits"]}
    with WandbLogger(group="sweep7", tags=["mine"]) as logger:
        logger.start({"head": {"l2": 5e-4}, "methods": ["original"]}, about)
        logger.log_stage("train", 1.5)
        logger.log_result(metrics, picture)
        run_dir = logger.run_dir
    assert capfd.readouterr() == ("", "")
    assert run_dir is not None
    assert run_dir.is_relative_to(folder)

    found = inspect(run_dir)
    assert (found["exit_code"], found["state"], found["name"]) == (0, "finished", "digits")
    assert (found["project"], found["tags"]) == ("sfu", ["mine", "digits"])
    assert found["config"]["head"] == {"l2": 5e-4}
    assert set(found["config"]) <= {"head", "methods", "_wandb"}
    (run,) = records(run_dir)["run"]
    assert (run["run_group"], run["job_type"]) == ("sweep7", "run")  # what was set comes before what the run offers
    summary = found["summary"]
    assert summary["stages/train/seconds"] == 1.5
    expected = {
        f"rows/{name}/{key}": value
        for name, row in metrics["rows"].items()
        for key, value in row.items()
        if value is not None and key != "details"
    }
    assert {key: summary.get(key) for key in expected} == expected
    assert summary["rows/unlearned_minus/details/rho"] == 1e-3

    table = json.loads((run_dir / "files" / summary["results"]["path"]).read_text())
    cells = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["data"]}
    assert list(cells) == list(metrics["rows"])
    assert cells["unlearned_minus_paper"]["distance"] == 801.3
    assert cells["original"]["note"] is None
    assert (run_dir / "files" / summary["figure"]["path"]).read_bytes() == picture.read_bytes()


def records(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything that was recorded, by kind, as the public reader prints it."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run_dir)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, lines):
        found.setdefault(record["type"], []).append(record[record["type"]])
    return found


def digest(path: Path) -> str:
    """A file's MD5 as W&B writes it."""
    return base64.b64encode(hashlib.md5(path.read_bytes()).digest()).decode()


def test_a_real_sweep_as_wandb_has_it(wandb_home: Path, monkeypatch: pytest.MonkeyPatch, feature_file: Path) -> None:
    """Names, group, kind of job, tags, every panel's metric and the files, against metrics.json and the folder."""
    dashboard = load_script("make_dashboard")
    folder = wandb_home / "my-sweep"
    code = sfu(
        monkeypatch, "-m", "experiment=quick", f"methods=[{','.join(dashboard.METHODS)}]", "seed=0",
        "dataset=features", f"dataset.path={feature_file}", "curvature.perturbations=30", "logger=wandb",
        "logger.mode=offline", "logger.tags=[mine]", "logger.heads=true", f"hydra.sweep.dir={folder}",
    )  # fmt: skip
    assert code == 0
    (run_dir,) = (folder / "0" / "wandb").glob("offline-run-*")
    metrics = json.loads((folder / "0" / "metrics.json").read_text())
    found = records(run_dir)
    summary = {key: value for item in found["summary"] for key, value in item["update"].items()}
    history = {key: value for item in found["history"] for key, value in item["item"].items()}
    expected = summary_of(public_metrics(metrics))
    assert {key: summary.get(key) for key in expected} == expected
    numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
    assert {key: history.get(key) for key in numbers} == numbers
    logged = {key.split("._type")[0] for key in history}  # tables and pictures are figure._type and so on
    assert dashboard.logged_names() <= logged
    (run,) = found["run"]
    assert (run["run_group"], run["job_type"]) == ("quick-my-sweep", "quick")
    assert run["tags"] == ["mine", "features", "quadratic"]
    assert run["config"]["update"]["curvature"]["perturbations"] == 30
    kept = {artifact["type"]: artifact["manifest"]["contents"] for artifact in found["artifact"]}
    assert [item["path"] for item in kept["result"]] == ["metrics.json"]
    saved = (folder / "0" / "heads").iterdir()
    heads = {path.name: digest(path) for path in saved if path.suffix != ".secret"}
    assert {item["path"]: item["digest"] for item in kept["heads"]} == heads
    assert len(heads) == 2 * len(dashboard.METHODS)


def test_loggers_are_given_a_short_list_of_the_record() -> None:
    metrics = catastrophic_run()
    metrics["rows"]["lost"] = {
        "access": "forget",
        "error": "OSError: /home/me/x",
        "note": "failed: OSError: /home/me/x",
    }
    given = public_metrics(metrics)
    assert given["run"] == picked(metrics["run"], UPLOADED_RECORD)
    assert not {"overrides", "path", "fingerprint", "class_names"} & {*given["run"], *given["run"]["data"]}
    assert given["run"]["data"]["n_train"] == 1437
    assert given["rows"]["lost"] == {"access": "forget", "error": FAILED, "note": FAILED}
    assert {**given["rows"], "lost": None} == {**metrics["rows"], "lost": None}
    logger = Recorder()
    logger.start({})
    logger.log_result(metrics)
    assert "/home/me" not in str(logger.calls)


SECRETS = ("hunter2", "top-secret-group", "Jane Doe")
HOST = "very-private-host"


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_no_secret_path_or_host_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature_file: Path, name: str
) -> None:
    """Every byte that a logger leaves is searched: settings from the environment, the dataset's path, a failing row."""
    pytest.importorskip(name)
    password, group, person = SECRETS
    monkeypatch.setenv("PASSWORD", password)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    private = tmp_path / password / group / f"{person}.npz"
    private.parent.mkdir(parents=True)
    private.write_bytes(feature_file.read_bytes())
    rows = tmp_path / f"{person}.txt"
    rows.write_text("1\n2\n3\n")
    out = tmp_path / "out"
    code = sfu(
        monkeypatch, "dataset=features", f"dataset.path='{tmp_path}/${{oc.env:PASSWORD}}/{group}/{person}.npz'",
        f"forget.indices='{rows}'", f"logger={name}", f"hydra.run.dir={out}", "backbone.cache=${oc.env:PASSWORD}",
        "methods=[original,retrained,public]",
        "+variants.public={base:closed_form,curvature:{unlabelled:'" + str(private) + "'}}",
    )  # fmt: skip
    assert code == 1  # the row `public` fails, with a message that names the file
    assert str(private) in json.loads((out / "metrics.json").read_text())["rows"]["public"]["error"]
    written = [path for path in (out / name).rglob("*") if path.is_file()]
    uploaded = b"".join(path.read_bytes() for path in written)
    assert b"retrained" in uploaded
    if name == "wandb":
        staged = [path for path in (tmp_path / "wandb-home").rglob("*") if path.is_file()]
        assert any(path.read_bytes().startswith(b"{") for path in staged)
        uploaded += b"".join(path.read_bytes() for path in staged)
    for secret in (*SECRETS, str(private.parent), str(rows), HOST):
        assert secret.encode() not in uploaded, secret
        assert not any(secret in path.name for path in written) or (name == "tensorboard" and secret == HOST)


def test_secrets_of_heads_and_who_asked_to_be_forgotten_stay_in_the_folder(
    wandb_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default no head is uploaded; with logger.heads=true those without noise and Hessian are."""
    settings = (
        "loss=logistic", "head.l2=1e-2", "head.objective_noise=1", "head.keep=full", "logger.mode=offline",
        "methods=[original,retrained]", "dataset.normalize_rows=true",
    )  # fmt: skip
    kept = {}
    for heads in ("false", "true"):
        out = wandb_home / heads
        assert sfu(monkeypatch, *settings, f"logger.heads={heads}", f"hydra.run.dir={out}") == 0
        (run_dir,) = (out / "wandb").glob("offline-run-*")
        artifacts = [one for one in records(run_dir)["artifact"] if one["type"] in ("heads", "result")]
        kept[heads] = {item["path"] for one in artifacts for item in one["manifest"]["contents"]}
        assert (out / "heads" / "original.secret").is_file()
    assert kept["false"] == {"metrics.json"}
    names = {f"{row}.{ending}" for row in ("original", "retrained") for ending in ("json", "safetensors")}
    assert kept["true"] == {"metrics.json", *names}
    for path in heads_of(wandb_home / "true"):
        if path.suffix == ".safetensors":
            assert set(load_file(path)) == {"parameters", "gradient"}


def test_an_interrupted_run_is_recorded_as_failed(wandb_home: Path) -> None:
    logger = WandbLogger()

    def run() -> None:
        with logger:
            logger.start({}, in_folder(wandb_home))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert logger.run_dir is not None
    found = inspect(logger.run_dir)
    assert (found["exit_code"], found["state"]) == (130, "failed")


def test_a_lost_picture_does_not_lose_the_numbers(wandb_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = WandbLogger()
    with caplog.at_level(logging.WARNING), logger:
        logger.start({}, in_folder(wandb_home))
        logger.log_result(catastrophic_run(), wandb_home / "absent.png")
    assert "could not log the result" in caplog.text
    assert logger.run_dir is not None
    found = inspect(logger.run_dir)
    assert found["summary"]["rows/closed_form/distance"] == 0.351
    assert found["summary"]["results"]["nrows"] == 6
    assert found["exit_code"] == 0


def test_online_without_login_names_the_remedy(wandb_home: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"mode=online cannot start: .*wandb login.*logger\.mode=offline.*logger=none"
    ):
        WandbLogger(mode="online").start({}, in_folder(wandb_home))


def test_online_without_network_names_the_remedy(wandb_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def refuse(**settings: Any) -> None:
        assert settings["mode"] == "online"
        raise wandb.errors.CommError("failed to upsert bucket")

    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match=r"CommError: failed to upsert.*logger\.mode=offline.*logger=none"):
        WandbLogger(mode="online").start({}, in_folder(wandb_home))


def test_disabled_mode_keeps_nothing(wandb_home: Path) -> None:
    logger = WandbLogger(mode="disabled")
    with logger:
        logger.start({}, in_folder(wandb_home))
        logger.log_result(catastrophic_run(), None)
    assert logger.run_dir is None
    assert not list((wandb_home / "run").rglob("*.wandb"))
