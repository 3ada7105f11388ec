from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from sfu.errors import ConfigError
from sfu.reporting.loggers.content import public_metrics, summary_of
from sfu.reporting.loggers.tensorboard_logger import TensorBoardLogger
from sfu.reporting.text_tables import run_markdown
from tests.experiment.cases import sfu

from .samples import catastrophic_run


def read(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return events.Reload()


def text(events: Any, name: str) -> str:
    return events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode()


def scalar(events: Any, name: str) -> float:
    (event,) = events.Scalars(name)
    return event.value


def test_a_run_reads_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    metrics = catastrophic_run()
    metrics["rows"]["closed_form"]["details"] = {"structure": "shared", "rho": 1e-3}
    picture = tmp_path / "figure.png"
    Figure(figsize=(1, 2)).savefig(picture)
    about = {"name": "digits", "folder": str(tmp_path)}
    for _ in range(2):  # a folder used again holds the last run alone
        with TensorBoardLogger() as logger:
            logger.start({"head": {"l2": 5e-4, "bias": None}, "methods": ["original"]}, about)
            logger.log_stage("train", 1.5)
            logger.log_result(metrics, picture)
            logger.log_files(tmp_path)
    events = read(tmp_path / "tensorboard")
    metrics = public_metrics(metrics)
    numbers = {k: v for k, v in summary_of(metrics).items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    assert len(numbers) > 60
    assert {key: scalar(events, key) for key in numbers} == pytest.approx(numbers, rel=1e-6)  # kept in float32
    assert scalar(events, "stages/train/seconds") == 1.5
    assert scalar(events, "run/exit_code") == 0
    assert scalar(events, "hparam/rows/closed_form/distance") == pytest.approx(0.351)
    assert json.loads(text(events, "config"))["head"]["l2"] == 5e-4
    assert text(events, "results") == run_markdown(metrics)
    (image,) = events.Images("figure")
    with Image.open(io.BytesIO(image.encoded_image_string)) as kept, Image.open(picture) as given:
        assert np.array_equal(np.asarray(kept), np.asarray(given.convert("RGB")))


def test_a_real_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature_file: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    data = ["dataset=features", f"dataset.path={feature_file}"]
    assert sfu(monkeypatch, "experiment=quick", *data, "logger=tensorboard", f"hydra.run.dir={out}") == 0
    expected = summary_of(json.loads((out / "metrics.json").read_text()))
    events = read(out / "tensorboard")
    for name in ("rows/closed_form/distance", "rows/original/mia", "rows/closed_form/details/rho"):
        assert scalar(events, name) == pytest.approx(expected[name], rel=1e-6)
    stages = {f"stages/{name}/seconds" for name in ("prepare", "closed_form", "evaluate")}
    assert stages <= set(events.Tags()["scalars"])
    assert events.Tags()["images"] == ["figure"]


def test_without_the_package_the_remedy_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"needs the tensorboard package.*pip install 'sfu\[tensorboard\]'"):
        TensorBoardLogger().start({}, {"folder": str(tmp_path)})
    assert sfu(monkeypatch, "experiment=quick", "logger=tensorboard", f"hydra.run.dir={tmp_path / 'out'}") == 1
    assert "sfu[tensorboard]" in capsys.readouterr().err
    assert not (tmp_path / "out" / "heads").exists()


def test_settings_of_other_loggers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["experiment=quick", "logger=tensorboard", "logger.project=x", f"hydra.run.dir={tmp_path / 'out'}"]
    assert sfu(monkeypatch, *arguments) == 1
    assert "logger.project is not a setting of logger=tensorboard." in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ConfigError, match="logger=tensorboard cannot write to"):
        TensorBoardLogger().start({}, {"folder": str(tmp_path)})
