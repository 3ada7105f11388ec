"""The W&B sweeps drive the command line; the workspace shows what runs log (the other half: test_loggers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sfu.config_files import config_dir
from sfu.experiment.validate import validate
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import composed

from .scripts import load_script

SWEEPS = sorted((config_dir() / "wandb").glob("*.yaml"))


def ends(parameter: dict[str, Any]) -> tuple[Any, Any]:
    """The first and the last value a parameter can take."""
    if "values" in parameter:
        return parameter["values"][0], parameter["values"][-1]
    return (parameter["value"],) * 2 if "value" in parameter else (parameter["min"], parameter["max"])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_ends_of_a_sweep_compose_and_are_valid(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text())
    command = sweep["command"]
    assert command[:4] == ["${env}", "python", "-m", "sfu"]
    assert command[-1] == "${args_no_hyphens}"
    for end in (0, 1):
        values = [f"{key}={ends(parameter)[end]}" for key, parameter in sweep["parameters"].items()]
        config = composed(*command[4:-1], *values)
        validate(config)
        make_methods(config)
        assert (config.logger.name, config.logger.mode) == ("wandb", "online")
    assert sweep["method"] in ("grid", "random", "bayes")
    assert sweep["metric"]["name"] in load_script("make_dashboard").logged_names()


def test_there_are_sweeps() -> None:
    assert {path.stem for path in SWEEPS} >= {"l2", "perturbations", "damping"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces")
def test_dry_run_prints_every_panel_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb_workspaces")
    script = load_script("make_dashboard")
    script.main(["--dry-run", "--group-by", "head.l2"])
    text = capsys.readouterr().out
    sections = json.loads(text)["spec"]["section"]["panelBankConfig"]["sections"]
    shown = {section["name"]: len(section["panels"]) for section in sections if section["panels"]}
    assert shown == {name: len(panels) for name, panels in script.PANELS.items()}
    assert [name for name in script.logged_names() if name not in text] == []
    assert "stderr" in text


@pytest.mark.parametrize(("absent", "message"), [(True, "sfu[dashboard]"), (False, "--entity is needed")])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, absent: bool, message: str) -> None:
    script = load_script("make_dashboard")
    if absent:
        monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces", None)
        monkeypatch.setitem(__import__("sys").modules, "wandb_workspaces.reports.v2", None)
    else:
        pytest.importorskip("wandb_workspaces")
    with pytest.raises(SystemExit) as stopped:
        script.main([])
    assert message in str(stopped.value)
