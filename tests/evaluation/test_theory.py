from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sfu.curvature.settings import Regularization, curvature_settings
from sfu.evaluation.theory import DELTA, PERTURBATIONS, theory_of
from sfu.heads.linear import LinearHead
from sfu.heads.recipe import EARLY_STOPPED
from sfu.losses.base import make_loss
from sfu.losses.softmax import Softmax
from sfu.request import ForgetRequest, RetainedSet
from sfu.unlearning.gaussian_mechanism import delta_of
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained
from sfu.unlearning.step_curvature import StepCurvature
from tests.unlearning.cases import CONFIG, CONTEXT, RETAINED_CURVATURE, case

KEEPS = replace(CONTEXT, keep_curvature=True)


def checked(curvature, loss=None, *, noise_sigma=0.0, bias=False, n_forget=40):
    """Return a Newton row's curvature, its head, and its theory."""
    request, retained = case(loss, bias=bias, n_forget=n_forget)
    method = Newton(curvature, noise_sigma=noise_sigma)
    given = retained if curvature is RETAINED_CURVATURE else None
    result = method.unlearn(request, KEEPS, given)
    assert result.curvature is not None
    retrained = Retrained(replace(CONFIG, bias=bias)).unlearn(request, CONTEXT, retained).head
    found = theory_of(result.curvature, request, retained, retrained, seed=0)
    return result, found, (request, retained, retrained)


CURVATURES = {
    "exact": RETAINED_CURVATURE,
    "closed_form": curvature_settings(estimator="closed_form"),
    "undamped": curvature_settings(estimator="closed_form", regularization=Regularization.none, on_doubt="apply"),
    "fixed": curvature_settings(estimator="closed_form", regularization="fixed", rho=0.3, on_doubt="apply"),
    "fit": curvature_settings(estimator="psd_fit", perturbations=40, on_doubt="apply"),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", CURVATURES)
def test_the_residual_identity_is_exact_for_the_quadratic_loss(name: str, bias: bool):
    """The measured retain gradient is ``q (H_r M^-1 - I) b``, from the estimate that the row inverted."""
    result, found, (request, retained, _) = checked(CURVATURES[name], bias=bias)
    residual = found["residual"]
    assert residual["difference"] < 1e-8
    assert residual["predicted"] == pytest.approx(residual["measured"], rel=1e-8, abs=1e-12)
    assert residual["remainder_bound"] == 0.0
    assert not residual["violated"]
    head = request.head
    rows = head.rows(retained.features_RD, retained.labels_R)
    measured = float(head.objective().gradient(rows, result.head.parameters_CE).norm())
    assert residual["measured"] == pytest.approx(measured, rel=1e-10, abs=1e-14)
    assert (residual["measured"] < 1e-12) == (name == "exact")
    assert found["theorem_1"]["not_applicable"]
    assert (found["theorem_1"]["vacuous"], found["theorem_1"]["violated"]) == (None, None)


def test_a_wrong_curvature_violates_the_identity():
    result, _, (request, retained, retrained) = checked(CURVATURES["fixed"])
    wrong = replace(result.curvature, scale=2 * result.curvature.scale)
    assert theory_of(wrong, request, retained, retrained, seed=0)["residual"]["violated"]


@pytest.mark.parametrize("loss", ["softmax", "logistic"])
@pytest.mark.parametrize("name", ["exact", "closed_form", "fit"])
def test_the_remainder_stays_within_its_bound_for_curved_losses(name: str, loss: str):
    _, found, _ = checked(CURVATURES[name], make_loss(loss))
    residual, theorem = found["residual"], found["theorem_1"]
    assert 1e-9 < residual["difference"] <= residual["remainder_bound"]
    assert residual["measured"] <= residual["bound"]
    assert not residual["violated"]
    assert not theorem["not_applicable"]
    assert theorem["bound"] <= theorem["bound_smallest_eigenvalue"]
    assert theorem["measured"] == residual["measured"]
    assert theorem["trivial"] == pytest.approx(residual["trivial"], rel=1e-6)


def test_theorem_1_by_hand():
    result, found, (request, retained, _) = checked(CURVATURES["exact"], Softmax())
    head, theorem = request.head, found["theorem_1"]
    eigenvalues = torch.linalg.eigvalsh(result.curvature.estimate_BKK[0])
    row, forget = (float(part.norm(dim=1).max()) for part in (retained.features_RD, request.features_FD))
    gradient = math.sqrt(2) * forget + head.l2 * float(head.parameters_CE.norm())
    ratio = 40 / 360
    for key, one in (("bound", eigenvalues[-1]), ("bound_smallest_eigenvalue", eigenvalues[0])):
        assert theorem[key] == pytest.approx(math.sqrt(2 / 27) * row**3 * (ratio * gradient / float(one)) ** 2)


def axes(side: int, retained: float, forget: float) -> tuple[ForgetRequest, RetainedSet]:
    """Rows along the axes: the second moments are multiples of the identity, ``length^2 / side``."""
    head = LinearHead(torch.zeros(2, side).double(), torch.zeros(2, side).double(), 0.1, 2 * side)
    labels, unit = torch.arange(side) % 2, torch.eye(side).double()
    return ForgetRequest(head, forget * unit, labels), RetainedSet(retained * unit, labels)


def test_lemma_1_by_hand_where_it_holds():
    """Hessians that differ by a multiple of the identity are the one case that the two envelopes have."""
    request, retained = axes(6, 1.0, 2.0)
    curvature = StepCurvature((0.1 + 4 / 6) * torch.eye(6).double()[None], torch.zeros(2, 6).double(), 0.0, 1.0)
    lemma = theory_of(curvature, request, retained, None, seed=3)["lemma_1"]
    drawn = torch.randn(PERTURBATIONS, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    epsilon = 0.25 * float(drawn.square().sum(1).max())  # 1/2 z^T (4/6 - 1/6) I z
    assert lemma["epsilon"] == pytest.approx(epsilon)
    assert lemma["bound"] == pytest.approx(2 * epsilon * math.sqrt(6) / 8)
    assert lemma["measured"] == pytest.approx(0.5 * math.sqrt(6))
    assert lemma["trivial"] == pytest.approx(math.sqrt(6) / 6)
    assert not lemma["violated"]
    assert lemma["vacuous"]


def test_lemma_1_fails_for_a_difference_without_a_trace():
    """The fit to the difference is the difference, whose changes are small for its size in many dimensions."""
    side = 60
    signs = torch.where(torch.arange(side) % 2 == 0, 1.0, -1.0).double()
    request, retained = axes(side, 2.0, 1.0)
    request = replace(request, features_FD=torch.diag((4 + signs).sqrt()))
    estimate = torch.diag(0.1 + (4 + signs) / side)[None]
    curvature = StepCurvature(estimate, torch.zeros(2, side).double(), 0.0, 1.0)
    lemma = theory_of(curvature, request, retained, None, seed=0)["lemma_1"]
    assert lemma["measured"] == pytest.approx(math.sqrt(side) / side)
    assert lemma["violated"]
    assert lemma["measured"] < lemma["bound_corrected"]


def test_noise_hides_the_shift_with_the_epsilon_that_is_told():
    result, found, (_, _, retrained) = checked(CURVATURES["fixed"], noise_sigma=0.05)
    noise = found["noise"]
    assert torch.equal(result.curvature.end_CE, result.head.parameters_CE) is False
    shift = float((result.curvature.end_CE - retrained.parameters_CE).norm())
    assert noise["shift"] == pytest.approx(shift)
    assert shift <= noise["shift_bound"]
    for suffix in ("", "_bound"):
        moved = noise[f"shift{suffix}"]
        assert delta_of(moved / 0.05, noise[f"epsilon{suffix}"]) == pytest.approx(DELTA, rel=1e-6)
        assert delta_of(moved / noise[f"sigma_for_epsilon_1{suffix}"], 1.0) == pytest.approx(DELTA, rel=1e-6)
    quiet = checked(CURVATURES["fixed"])[1]["noise"]
    assert (quiet["epsilon"], quiet["epsilon_bound"]) == (None, None)
    assert quiet["sigma_for_epsilon_1"] == pytest.approx(noise["sigma_for_epsilon_1"])


def test_without_retrained_the_shift_is_only_bounded_and_a_bias_leaves_no_bound():
    result, _, (request, retained, _) = checked(CURVATURES["fixed"], noise_sigma=0.05, bias=True)
    noise = theory_of(result.curvature, request, retained, None, seed=0)["noise"]
    assert [noise[key] for key in ("shift", "epsilon", "shift_bound", "epsilon_bound")] == [None] * 4


def test_a_head_that_was_stopped_early_has_no_theory():
    result, _, (request, retained, retrained) = checked(CURVATURES["fixed"])
    stopped = replace(request.head, recipe=replace(request.head.recipe, trained=EARLY_STOPPED))
    assert theory_of(result.curvature, replace(request, head=stopped), retained, retrained, seed=0) is None


def test_curvature_is_kept_on_demand_only_and_changes_nothing():
    request, _ = case(n_forget=5)  # few rows: the request is otherwise reduced to their span
    method = Newton(curvature_settings(estimator="closed_form", on_doubt="apply"))
    plain, keeping = (method.unlearn(request, context) for context in (CONTEXT, KEEPS))
    assert plain.curvature is None
    assert torch.allclose(plain.head.parameters_CE, keeping.head.parameters_CE, atol=1e-9)
    assert keeping.curvature.estimate_BKK.shape == (1, 12, 12)
    twice = replace(method, steps=2).unlearn(request, KEEPS)
    assert twice.curvature is None


@pytest.mark.parametrize(("loss", "structure"), [("softmax", (1, 48, 48)), ("logistic", (4, 12, 12))])
def test_products_are_kept_as_matrices(loss: str, structure: tuple[int, ...]):
    curvature = curvature_settings(estimator="exact", structure="products", regularization=Regularization.none)
    request, retained = case(make_loss(loss))
    products, matrices = (
        Newton(one).unlearn(request, KEEPS, retained).curvature for one in (curvature, RETAINED_CURVATURE)
    )
    assert products.estimate_BKK.shape == structure
    assert torch.allclose(products.estimate_BKK, matrices.estimate_BKK, atol=1e-12)


def test_kept_curvature_survives_its_file_and_refuses_another_shape():
    kept = checked(CURVATURES["fixed"], noise_sigma=0.5)[0].curvature
    tensors = kept.tensors()
    again = StepCurvature.restored(tensors["estimate"], tensors["end"], tensors["numbers"])
    assert (again.rho, again.scale, again.noise_sigma, again.is_safe) == (0.3, 1.0, 0.5, False)
    assert torch.equal(again.estimate_BKK, kept.estimate_BKK)
    with pytest.raises(ValueError, match="no Hessian of parameters"):
        StepCurvature.restored(torch.zeros(2, 12, 12), tensors["end"], tensors["numbers"])
    with pytest.raises(ValueError, match="rho, scale"):
        StepCurvature.restored(tensors["estimate"], tensors["end"], torch.zeros(5))
