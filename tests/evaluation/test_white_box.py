from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.linalg import orth, subspace_angles

from sfu.evaluation.white_box import ATTACKERS, WhiteBox
from sfu.losses.base import make_loss
from sfu.losses.softmax import Softmax
from sfu.request import ForgetRequest, RetainedSet
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from tests.unlearning.cases import CONFIG, CONTEXT, RETAINED_CURVATURE, case


def retrained(request: ForgetRequest, retained: RetainedSet, bias: bool = False):
    return Retrained(replace(CONFIG, bias=bias)).unlearn(request, CONTEXT, retained).head


def own_rows(seed: int = 9) -> torch.Tensor:
    return torch.randn(300, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_one_row_of_a_quadratic_head_is_reconstructed_exactly(bias: bool):
    """Publishing Retrained beside Original gives the row away to whoever knows the Hessian."""
    request, retained = case(n_forget=1, bias=bias)
    box, new = WhiteBox(request, retained, own_rows()), retrained(request, retained, bias)
    found = box.attack(new)
    assert found["exact"]["row_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert found["exact"]["gradient_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert found["exact"]["subspace_overlap"] == pytest.approx(1.0, abs=1e-6)
    assert found["exact"]["directions"] == 1
    gradient = box.reconstruct(new.parameters_CE - request.head.parameters_CE, "exact")
    residual = request.head.logits(request.features_FD)[0] - torch.eye(4).double()[request.labels_F[0]]
    row = torch.cat([request.features_FD[0], torch.ones(int(bias)).double()])
    assert torch.allclose(gradient, torch.outer(residual, row), atol=1e-6)  # with its scale, too
    for name in ("own_data", "identity"):
        assert 0 < found[name]["row_cosine"] < 0.999
    assert found["exact"]["other_row_cosine"] < 0.7


@pytest.mark.parametrize("n_forget", [2, 10])
def test_several_rows_are_found_as_a_subspace(n_forget: int):
    request, retained = case(n_forget=n_forget)
    box, new = WhiteBox(request, retained, own_rows()), retrained(request, retained)
    for name, about in box.attack(new).items():
        found = box.reconstruct(new.parameters_CE - request.head.parameters_CE, name).numpy()
        directions = np.linalg.svd(found)[2][: min(n_forget, 4)]
        cosines = np.cos(subspace_angles(orth(request.features_FD.numpy().T), directions.T))
        assert about["subspace_overlap"] == pytest.approx((cosines**2).mean())
        rows = request.features_FD.numpy()
        each = np.linalg.norm(rows @ directions.T, axis=1) / np.linalg.norm(rows, axis=1)
        assert about["row_cosine"] == pytest.approx(each.mean())
        assert about["directions"] == len(directions)
    assert box.attack(new)["exact"]["subspace_overlap"] == pytest.approx(1.0, abs=1e-6)


def test_a_softmax_head_gives_the_row_away_nearly_as_well():
    request, retained = case(Softmax(), n_forget=1)
    box = WhiteBox(request, retained, own_rows())
    found = box.attack(retrained(request, retained))
    assert found["exact"]["row_cosine"] > 0.99
    assert box.attack(Newton(RETAINED_CURVATURE).unlearn(request, CONTEXT, retained).head)["exact"][
        "row_cosine"
    ] == pytest.approx(1.0, abs=1e-6)


def test_noise_hides_the_row_and_moves_the_head_away():
    request, retained = case(n_forget=1)
    box, target = WhiteBox(request, retained, own_rows()), retrained(request, retained)
    cosines, away = [], []
    for sigma in (0.0, 1e-5, 1e-4, 1e-3):
        drawn = torch.randn(20, 4, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        heads = [replace(target, parameters_CE=target.parameters_CE + sigma * one) for one in drawn]
        cosines.append(np.mean([box.attack(head)["exact"]["row_cosine"] for head in heads]))
        away.append(np.mean([float((head.parameters_CE - target.parameters_CE).norm()) for head in heads]))
    assert cosines[0] == pytest.approx(1.0, abs=1e-6)
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[-1] < 0.8
    assert away == sorted(away)


def test_what_cannot_be_attacked():
    request, retained = case(make_loss("logistic"), n_forget=3)
    assert WhiteBox(request, retained, own_rows()).attack(request.head) is None  # nothing was done
    moved = replace(request.head, parameters_CE=request.head.parameters_CE + 1)
    assert set(WhiteBox(request, retained, own_rows()).attack(moved)) == set(ATTACKERS)
