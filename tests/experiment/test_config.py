"""The configuration: every choice has its own keys, composing needs no PyTorch, metadata decide the cache's keys."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from sfu.errors import ConfigError
from sfu.experiment.config import GROUPS, check_run, neutral_keys, plain
from sfu.experiment.explain import explain
from sfu.schema import hydra_schema, meta_of
from tests.experiment.cases import composed


def refusal(*overrides: str) -> str:
    with pytest.raises((HydraException, ConfigError)) as caught:
        check_run(composed(*overrides))
    return explain(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.path=x.npz"], "dataset.path is not a setting of dataset=digits."),
        (["dataset.path=x.npz"], "dataset=features or dataset=image_folder takes it."),
        (["head.layers=3"], "head.layers is not a setting of head=linear."),
        (["head=linearised", "head.bias=true"], "head.bias is not a setting of head=linearised."),
        (["loss=softmax", "loss.smoothing=0.5"], "loss.smoothing is not a setting of loss=softmax."),
        (["curvature=closed_form", "curvature.perturbations=9"], "curvature=diagonal or curvature=psd_fit takes it."),
        (["curvature=exact", "curvature.folds=3"], "curvature.folds is not a setting of curvature=exact."),
        (["logger=none", "logger.project=x"], "logger.project is not a setting of logger=none."),
        (["head.adam.lrr=1"], "Did you mean head.adam.lr?"),
        (["colour=red"], "colour is not a setting of sfu."),
        (["+dataset.colour=red"], "dataset.colour is not a setting of dataset=digits."),
        (["+head.adam.momentum=1"], "head.adam.momentum is not a setting of head.adam."),
        (["head=linearised", "head.pretrain.momentum=0.5"], "head.pretrain.momentum is not a setting of"),
        (["head.l2=-1"], "head.l2=-1.0. Give a finite number of at least 0."),
        (["head.adam.batch_size=0"], "head.adam.batch_size=0. Give a whole number of at least 1."),
        (["seed=1.5"], "seed=1.5 is not a whole number. Give a whole number of at least 0 and below 4294967296."),
        (["curvature.measurement=sound"], "curvature.measurement=sound is unknown. Choose one of gradient, loss."),
        (
            ["curvature.augment=[flop]"],
            "curvature.augment=flop is unknown. Choose one of brightness, color_jitter",
        ),
        (["dataset=imagenet"], "dataset=imagenet is unknown. Choose one of caltech256,"),
        (["dtype=float16"], "dtype=float16 is unknown. Choose one of float32, float64."),
        (["methods=[]"], "methods=[] leaves nothing to do."),
        (["threads=100000"], "threads=100000 is more than this machine can use."),
        (["published=table_9"], "published=table_9 is unknown. Choose one of table_1,"),
        (["backbone=pixels", "dataset=features", "dataset.path=x"], "which backbone=pixels cannot read"),
        (["dataset=cifar10", "backbone=none"], "dataset=cifar10 holds images, and backbone=none"),
        (["dataset.core_fraction=0.5"], "dataset.core_fraction=0.5 only applies to a linearised head"),
        (["head=linearised", "head.core=pretrain"], "head.core=pretrain needs public images to train on."),
        (["head=linearised", "backbone=pixels"], "head=linearised needs a network of torchvision"),
        (["head.objective_noise=1", "head.training=adam"], "head.objective_noise=1 needs head.training=exact"),
    ],
)
def test_what_cannot_work_is_refused_by_key_and_value(overrides, message):
    assert message in refusal(*overrides)


@pytest.mark.parametrize("group", GROUPS)
def test_every_registered_choice_has_a_schema_that_gives_its_defaults(group):
    base = GROUPS[group]
    for name in base.names():
        kind = base.named(name)
        node = OmegaConf.structured(hydra_schema(kind))
        assert node[base.chosen_by] == name
        made = kind()
        assert {str(key) for key in node} == {one.name for one in fields(made) if one.init}


def test_settings_changed_after_they_were_made_are_checked_again():
    run = composed()
    run.head.adam.lr = -1.0
    with pytest.raises(ConfigError, match=r"head\.adam\.lr=-1\.0"):
        check_run(run)


def test_metadata_say_what_changes_no_result():
    neutral = neutral_keys()
    assert {"threads", "reuse", "methods", "backbone.cache", "backbone.workers", "dataset.root"} <= set(neutral)
    assert not {"head.l2", "dataset.path", "backbone.size", "curvature.folds", "variants"} & set(neutral)
    assert any(key == "logger" for key in neutral)


def test_locations_and_neutral_settings_stay_out_of_keys():
    run = composed("dataset=features", "dataset.path=a.npz")
    assert plain(run.dataset)["path"] == "a.npz"
    assert "path" not in plain(run.dataset, effective=True)
    assert plain(replace(run.backbone, workers=3), effective=True) == plain(run.backbone, effective=True)


def test_every_setting_but_the_choices_themselves_says_what_it_means():
    silent = [
        f"{group}.{one.name}"
        for group, base in GROUPS.items()
        for name in base.names()
        for one in fields(base.named(name))
        if one.init and not meta_of(one).help and one.name not in ("adam", "sgd", "pretrain")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "Choices (group=choice):"),
        (["--rows"], "unlearned_minus_paper"),
        (["--keys", "head.l2"], "Weight of the L2 regulariser"),
        (["--cfg", "job", "loss=softmax"], "class_weights: null"),
        (["head.l3=1"], "Did you mean head.l2?"),
        (["--version"], "sfu "),
    ],
)
def test_commands_that_only_parse_do_not_import_pytorch(arguments, shown, tmp_path):
    code = (
        "import sys\n"
        f"sys.argv = ['sfu', *{arguments!r}]\n"
        "from sfu.cli.run import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_the_help_fits_a_screen(tmp_path):
    from sfu.cli.help import help_text

    lines = help_text().splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) < 80
