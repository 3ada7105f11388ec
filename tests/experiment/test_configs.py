"""Every config composes, and every row of configs/method can be built from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from sfu.config_files import config_dir, group_options
from sfu.curvature.settings import curvature_settings
from sfu.experiment.config import RunConfig, register
from sfu.experiment.validate import validate
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import composed

GROUPS = ("dataset", "backbone", "head", "loss", "curvature", "request", "logger", "experiment")
LINEARISED = ["dataset=digits", "backbone.weights=none"]
CHOICES = [(group, option) for group in GROUPS for option in group_options(group)]


def needed(group: str, option: str, feature_file: Path) -> list[str]:
    """What a choice cannot do without: a file, a folder of images, a backbone, a name."""
    folder = feature_file.parent
    for part in ("train", "test"):
        (folder / "images" / part / "a").mkdir(parents=True, exist_ok=True)
    if group == "backbone":
        named = {"torchvision": ["backbone.name=resnet34"], "timm": ["backbone.name=resnet18"]}
        if option == "timm":
            pytest.importorskip("timm")
        return [] if option == "none" else ["dataset=digits", *named.get(option, [])]
    return {
        "features": [f"dataset.path={feature_file}"],
        "image_folder": [f"dataset.path={folder / 'images'}", "backbone=pixels"],
        **dict.fromkeys(("linearised", "paper_table_4", "paper_table_s2"), LINEARISED),
    }.get(option, [])


def test_there_is_a_file_for_every_group():
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), CHOICES, ids=lambda value: str(value))
def test_every_choice_composes_and_is_valid(group, option, feature_file):
    stored = [] if option in ("linearised", "paper_table_4", "paper_table_s2") else ["head.keep=full"]
    config = composed(f"{group}={option}", *stored, *needed(group, option, feature_file))
    validate(config)
    assert list(make_methods(config)) == config.methods


def test_every_method_file_can_be_built(feature_file):
    names = [name for name in group_options("method") if name != "retrained_again"]
    trained_by_steps = composed("methods=[retrained_again]", "head.training=adam")
    assert list(make_methods(trained_by_steps)) == ["retrained_again"]
    assert (
        list(
            make_methods(
                composed(
                    f"methods={names}",
                    f"curvature.unlabelled={feature_file}",
                    "head.keep=full",
                    "head.objective_noise=1.0",
                )
            )
        )
        == names
    )


def test_several_seeds_of_a_training_by_steps_show_the_spread_of_retrained():
    methods = "methods=[original,retrained,closed_form]"
    assert composed("head.training=sgd", "seeds=2", methods).methods == [
        "original", "retrained", "retrained_again", "closed_form",
    ]  # fmt: skip
    for given in (["head.training=sgd"], ["seeds=2"], ["head.training=adam", "seeds=2"]):
        rows = "methods=[retrained_again,retrained]" if "head.training=adam" in given else methods
        assert composed(*given, rows).methods == rows.removeprefix("methods=[").rstrip("]").split(",")


def test_an_experiment_file_prevails_over_the_main_one_and_the_command_line_over_both():
    assert composed("experiment=quick").methods == ["original", "retrained", "closed_form"]
    assert composed("experiment=quick", "methods=[original]").methods == ["original"]


@pytest.mark.parametrize("launcher", group_options("launcher"))
def test_every_launcher_composes(launcher):
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("sfu", overrides=[f"launcher={launcher}"], return_hydra_config=True)
    kind = {"local_2": "joblib", "slurm": "submitit_slurm", "submitit_local": "submitit_local"}[launcher]
    assert config.hydra.runtime.choices["hydra/launcher"] == kind


def test_the_default_curvature_file_and_the_schema_agree():
    """unlearned_minus in a Python call without Hydra is the same method as on the command line."""
    assert composed().curvature == RunConfig().curvature == curvature_settings()
