"""Settings and rows that cannot work are refused by name before any work."""

from __future__ import annotations

import pytest
import torch

from sfu.errors import ConfigError
from sfu.experiment.validate import resolve_device, validate
from sfu.losses.base import make_loss
from sfu.seeds import SeedSettings
from sfu.unlearning.rows import make_methods
from tests.experiment.cases import config_for


@pytest.mark.parametrize(
    ("variants", "methods", "message"),
    [
        ({}, ["nothing_like_it"], r"methods=nothing_like_it is unknown\. Choose one of .*closed_form, .*original"),
        ({}, ["../../etc/passwd"], "the name '../../etc/passwd' contains '/'"),
        ({}, ["original", "original"], "lists a row twice"),
        ({"a": {"base": "a"}}, ["a"], "circle"),
        ({"a": {"bass": "closed_form"}}, ["a"], r"variants\.a\.bass is not a setting of a row\. It takes base, method"),
        ({"a": 3}, ["a"], r"variants\.a"),
        ({"a": {"method": "os.system"}}, ["a"], r"the row 'a': method=os\.system is unknown"),
        (
            {"a": {"base": "closed_form", "curvature": {"rhoo": 1}}},
            ["a"],
            r"curvature\.rhoo is not a setting of .*closed_form",
        ),
        ({"a": {"base": "closed_form", "curvature": {"rho": "x"}}}, ["a"], "curvature.rho=x is not a number"),
        (
            {"a": {"base": "closed_form", "curvature": "nope"}},
            ["a"],
            r"the row 'a': curvature=nope is unknown\. Choose one of .*closed_form",
        ),
        (
            {"a": {"base": "closed_form", "settings": {"sigma": 1}}},
            ["a"],
            r"sigma is not a setting of method=newton\. It takes curvature, noise_sigma, steps, batches",
        ),
    ],
)
def test_rows_that_cannot_be_built(variants, methods, message):
    with pytest.raises(ConfigError, match=message):
        make_methods(config_for(variants=variants, methods=methods))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head__l2", -1e-3, r"head\.l2=-0\.001"),
        ("head__l2", float("nan"), r"head\.l2=nan"),
        ("methods", [], r"methods=\[\]"),
        ("dtype", "float16", r"dtype=float16 is unknown\. Choose one of float32, float64"),
        ("dataset__test_fraction", 1.0, "test_fraction"),
        ("dataset__n_classes", 1, "n_classes"),
        ("newton__noise_sigma", -0.1, "noise_sigma"),
        ("forget__fraction", 0.0, r"forget\.fraction=0\.0"),
        ("forget__indices", "missing.txt", "is not a file"),
        ("seed", -1, "seed=-1"),
    ],
)
def test_settings_out_of_range_are_named(key, value, message):
    validate(config_for())
    with pytest.raises(ConfigError, match=message):
        validate(config_for(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perturbations", 0),
        ("scale", 0.0),
        ("scale", float("inf")),
        ("rho", -1.0),
        ("folds", 1),
        ("folds", 0),
        ("tolerance", 0.0),
        ("prior_strength", -1.0),
        ("max_iterations", 0),
    ],
)
def test_curvature_out_of_range_is_named_with_its_row(key, value):
    config = config_for(methods=["a"], variants={"a": {"base": "unlearned_minus", "curvature": {key: value}}})
    with pytest.raises(ConfigError, match=rf"^the row 'a': curvature\.{key}={value:g}"):
        make_methods(config)


def test_a_ledger_of_another_loss_is_refused_before_any_work():
    validate(config_for(head__ledger=True))
    with pytest.raises(ConfigError, match=r"head\.ledger=true needs loss=quadratic, not softmax"):
        validate(config_for(head__ledger=True, loss=make_loss("softmax")))


def test_devices():
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("cuda:99", "tpu9", "meta"):
        with pytest.raises(ConfigError, match=f"device={name}"):
            resolve_device(name)


def test_derived_seeds_differ_by_purpose_and_seed():
    one, two = SeedSettings().resolve(0), SeedSettings().resolve(1)
    assert len(set(one.values()) | set(two.values())) == 2 * len(one)


def test_the_paper_row_takes_the_runs_perturbations_and_keeps_its_own_rules():
    paper = make_methods(config_for())["unlearned_minus_paper"].curvature
    assert paper.perturbations == 60
    assert (paper.measurement.value, paper.lower_bound.value, paper.gradient_term.value) == ("loss", "zero", "paper")
    assert paper.applies_anyway
