"""What every registered method promises, whoever registered it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sfu.curvature.settings import curvature_settings
from sfu.errors import ConfigError
from sfu.heads.settings import LinearSettings
from sfu.request import Access, ForgetRequest, RetainedSet
from sfu.schema import meta_of
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.classes import refuse_instances
from sfu.unlearning.tuning import Oracle
from tests.unlearning.cases import CONTEXT, class_case, run_config, trained

QUICK = {
    "adversarial": {"examples": 1, "attack_steps": 3, "step_size": 2.0, "max_steps": 2}, "emmn": {"noise_steps": 2},
    "gkt": {"batches": 2, "threshold": 0.5}, "delta_grad": {"steps": 12}, "sisa": {"shards": 2},
}  # fmt: skip
every_method = pytest.mark.parametrize("name", UnlearningMethod.names())
WITHOUT_NOISE = [name for name in UnlearningMethod.names() if name != "certified_removal"]  # it needs a head with noise


def make(name: str, **settings) -> UnlearningMethod:
    run = run_config()
    run.head = LinearSettings(l2=1e-2, bias=False, objective_noise=1.0)
    return UnlearningMethod.named(name).from_config(run, curvature_settings(), QUICK.get(name, {}) | settings)


@every_method
def test_it_is_a_frozen_dataclass_whose_settings_say_what_they_mean(name):
    method = make(name)
    assert method.method_name == name
    assert method.__dataclass_params__.frozen
    assert type(method).__doc__
    with pytest.raises(ConfigError, match=rf"speed is not a setting of method={name}\. It "):
        make(name, speed=1)
    for one in dataclasses.fields(method):
        if one.init and one.name not in ("head", "curvature"):
            described = [meta_of(of[one.name]).help for of in (k.__dict__.get("__dataclass_fields__", {}) for k in
                         type(method).__mro__) if one.name in of]  # fmt: skip
            assert any(described), one.name


@pytest.mark.parametrize("name", WITHOUT_NOISE)
def test_it_returns_a_head_like_the_given_one_and_leaves_the_request_alone(name):
    method, (request, retained) = make(name), class_case()
    before = [tensor.clone() for tensor in (request.head.parameters_CE, request.features_FD, request.labels_F)]
    result = method.unlearn(request, CONTEXT, retained if method.access is Access.RETAINED else None)
    assert result.head.parameters_CE.shape == request.head.parameters_CE.shape
    assert torch.isfinite(result.head.parameters_CE).all()
    if result.applied:
        assert result.head.n_train == request.n_retain
    else:
        assert torch.equal(result.head.parameters_CE, request.head.parameters_CE)
    assert all(map(torch.equal, before, (request.head.parameters_CE, request.features_FD, request.labels_F)))
    assert all(isinstance(value, float | int | str | bool | None) for value in result.details.values())


def test_a_method_that_is_tuned_goes_by_its_own_name():
    """So that messages name the method and not the rule that tunes it."""
    tuned = Oracle([({}, make("emmn"))], make("emmn"))
    with pytest.raises(ConfigError, match=r"^emmn forgets whole classes only"):
        refuse_instances([tuned], torch.tensor([0, 0, 1]), torch.tensor([0]))


def test_retained_rows_are_never_part_of_a_request():
    request, retained = class_case()
    assert not any(isinstance(getattr(request, one.name), RetainedSet) for one in dataclasses.fields(ForgetRequest))
    assert request.n_forget + retained.labels_R.numel() == trained().n_train
