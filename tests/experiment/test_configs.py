"""Every config composes, and every row of configs/method can be built from it."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sfu.experiment.paths import config_dir, group_options
from sfu.experiment.validate import validate
from sfu.settings import RunConfig, register
from sfu.unlearning.registry import make_methods

GROUPS = ("dataset", "backbone", "head", "loss", "curvature", "logger", "experiment")
CHOICES = [(group, option) for group in GROUPS for option in group_options(group)]


def composed(*overrides: str) -> RunConfig:
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = OmegaConf.to_object(compose("sfu", overrides=list(overrides)))
    assert isinstance(config, RunConfig)
    return config


def test_there_is_a_file_for_every_group():
    assert {group for group, _ in CHOICES} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), CHOICES, ids=lambda value: str(value))
def test_every_choice_composes_and_is_valid(group, option, feature_file):
    needs = {"features": "dataset.path", "reference": "curvature.reference_path"}
    extra = [f"{needs[option]}={feature_file}"] if option in needs else []
    config = composed(f"{group}={option}", "head.store_curvature=true", *extra)
    validate(config)
    assert list(make_methods(config)) == config.methods


def test_every_method_file_can_be_built(feature_file):
    names = group_options("method")
    assert (
        list(
            make_methods(
                composed(
                    f"methods={names}",
                    f"curvature.reference_path={feature_file}",
                    "head.store_curvature=true",
                    "head.objective_noise=1.0",
                )
            )
        )
        == names
    )


def test_an_experiment_file_prevails_over_the_main_one_and_the_command_line_over_both():
    assert composed("experiment=quick").methods == ["original", "retrained", "closed_form"]
    assert composed("experiment=quick", "methods=[original]").methods == ["original"]


@pytest.mark.parametrize("launcher", group_options("launcher"))
def test_every_launcher_composes(launcher):
    register()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = compose("sfu", overrides=[f"launcher={launcher}"], return_hydra_config=True)
    assert config.hydra.launcher.n_jobs == 2


def test_the_default_curvature_file_and_the_schema_agree():
    """unlearned_minus in a Python call without Hydra is the same method as on the command line."""
    assert composed().curvature == RunConfig().curvature
