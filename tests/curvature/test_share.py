"""The predicted share: against populations that are known, as often right as it says, and None where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

from sfu.curvature.cross_validation import FORGET, UNLABELLED, Sources
from sfu.curvature.settings import curvature_settings
from sfu.curvature.share import predict_share
from sfu.curvature.source_fit import StepChoice
from sfu.heads.forgotten import Forgotten
from sfu.heads.kept import Kept
from sfu.heads.linear import LinearHead
from sfu.heads.settings import Training
from sfu.operators.explicit import ExplicitOperator
from sfu.request import ForgetRequest
from sfu.unlearning.methods.newton import Newton
from tests.reporting.scripts import load_script
from tests.unlearning.cases import CONTEXT, situation

L2, WIDTH, DRAWS = 0.02, 20, 60
VARIANCES = torch.logspace(0, -1.5, WIDTH, dtype=torch.float64)


def drawn(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) * VARIANCES.sqrt()


def moments(rows: torch.Tensor) -> torch.Tensor:
    return rows.T @ rows / len(rows)


def operator(data: torch.Tensor, n_classes: int) -> ExplicitOperator:
    eye = torch.eye(WIDTH, dtype=torch.float64)
    return ExplicitOperator(data + L2 * eye, n_classes, torch.ones(WIDTH).double())


def prediction(rows: torch.Tensor, choice: StepChoice, unlabelled: torch.Tensor | None = None, n_train: int = 10**9):
    """Predict the share of a step of a head of two classes; the law needs nothing of its parameters."""
    zero = torch.zeros(2, WIDTH).double()
    kept = Kept(projected_2K=torch.ones(2, 16).double())
    head = LinearHead(zero, zero, L2, n_train, kept=kept)
    labels = torch.zeros(len(rows), dtype=torch.int64)
    request = ForgetRequest(head, rows, labels, unlabelled=() if unlabelled is None else (unlabelled,))
    sets = {FORGET: rows} if unlabelled is None else {FORGET: rows, UNLABELLED: unlabelled}
    operators = {name: operator(moments(one), 2) for name, one in sets.items()}
    sources = Sources(operators, {name: float(len(one)) for name, one in sets.items()})
    return predict_share(request, sources, choice, sources.damped(choice.weights), len(rows))


def truth(
    rows: torch.Tensor,
    choice: StepChoice,
    unlabelled: torch.Tensor | None = None,
    population: torch.Tensor = VARIANCES.diag(),
) -> float:
    """The share that the step removes on average over the noise of the rows, with the population's Hessian."""
    eye = torch.eye(WIDTH).double()
    seen = moments(rows)
    if unlabelled is not None:
        seen = choice.weights[0] * seen + choice.weights[1] * moments(unlabelled)
    step = choice.scale * (eye if choice.is_safe else torch.linalg.inv(seen + (L2 + choice.rho) * eye))
    retained, noise = population + L2 * eye, moments(rows)
    gained = 2 * torch.trace(step @ noise) - torch.trace(step @ retained @ step @ noise)
    return float(gained / torch.trace(torch.linalg.inv(retained) @ noise))


@pytest.mark.parametrize(
    ("count", "choice"),
    [
        (60, StepChoice(0.0, 0.5, 0.0)), (60, StepChoice(0.05, 1.0, 0.0)), (25, StepChoice(0.1, 1.2, 0.0)),
        (200, StepChoice(0.0, 0.95, 0.0)), (60, StepChoice(torch.inf, 1.5, 0.0)),
    ],
    ids=["undamped", "damped", "few", "many", "safe"],
)  # fmt: skip
def test_the_share_is_that_of_a_known_population(count, choice):
    found = [(prediction(rows, choice).value, truth(rows, choice)) for rows in (drawn(count, n) for n in range(DRAWS))]
    predicted, true = (sum(part) / DRAWS for part in zip(*found, strict=True))
    assert predicted == pytest.approx(true, abs=0.015)


@pytest.mark.parametrize(
    ("weights", "count"), [((0.3, 0.7), 120), ((0.0, 1.0), 120), ((0.5, 0.5), 2000)], ids=["mixed", "alone", "subset"]
)
def test_with_unlabelled_rows_the_noise_is_that_of_the_forget_rows_alone(weights, count):
    choice, found = StepChoice(0.02, 1.0, 0.0, weights), []
    for seed in range(DRAWS):
        rows, more = drawn(40, seed), drawn(count, 1000 + seed)
        found.append((prediction(rows, choice, more).value, truth(rows, choice, more)))
    predicted, true = (sum(part) / DRAWS for part in zip(*found, strict=True))
    assert predicted == pytest.approx(true, abs=0.015)


def test_fewer_rows_than_features_still_tell_the_distance_if_they_are_alike(monkeypatch):
    """Naively, the dimensions that l2 leaves undamped are at most the rows, so the share would be far too large."""
    choice, population = StepChoice(0.1, 1.0, 0.0), moments(normalize(drawn(20_000, 1)))
    sets = [normalize(drawn(18, seed)) for seed in range(DRAWS)]
    found = [(prediction(rows, choice).value, truth(rows, choice, None, population)) for rows in sets]
    predicted, true = (sum(part) / DRAWS for part in zip(*found, strict=True))
    assert predicted == pytest.approx(true, abs=0.015)
    assert prediction(sets[0] * torch.logspace(-1, 1, 18).double()[:, None], choice) is None
    monkeypatch.setitem(globals(), "L2", 0.002)
    assert prediction(sets[0], choice) is None
    assert prediction(sets[0][:3], choice) is None


def test_retained_rows_that_are_few_cost_a_share_for_each_dimension():
    rows = normalize(drawn(60, 0))
    many, few = (prediction(rows, StepChoice(0.05, 1.0, 0.0), n_train=count).value for count in (10**9, 260))
    eigenvalues = VARIANCES / VARIANCES.sum()  # of rows of norm 1
    dimensions = float((eigenvalues / (eigenvalues + L2)).sum())
    assert few / many == pytest.approx(1 - dimensions / 200, rel=0.01)


def test_the_interval_is_wider_for_fewer_rows_and_dimensions():
    rows = normalize(drawn(120, 0))
    low, high = prediction(rows, StepChoice(0.05, 1.0, 0.0)).interval
    fewer_low, fewer_high = prediction(rows[:30], StepChoice(0.05, 1.0, 0.0)).interval
    assert 0 < low < prediction(rows, StepChoice(0.05, 1.0, 0.0)).value < high < 1
    assert fewer_high - fewer_low > high - low


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "class"}, {"noise_sigma": 1e-6}, {"settings": {"estimator": "ledoit_wolf"}}, {"n_forget": 12},
        {"forgotten": Forgotten(1, 10, removed=None)}, {"gradient": 1.0}, {"unlabelled": True}, {"n_forget": 150},
        {"settings": {"estimator": "closed_form", "regularization": "mean_eigenvalue"}},
    ],
    ids=str,
)  # fmt: skip
def test_no_share_is_told_where_none_is_known(changed):
    request, _, _ = situation(n_forget=changed.get("n_forget", 60))
    options = {name: changed[name] for name in ("noise_sigma",) if name in changed}
    method = Newton(curvature_settings(**changed.get("settings", {"estimator": "closed_form"})), **options)
    plain = Newton(method.curvature if "settings" not in changed else curvature_settings(estimator="closed_form"))
    head = request.head
    if "forgotten" in changed:
        head = replace(head, forgotten=changed["forgotten"])
    if "gradient" in changed:
        gradient = request.newton_gradient() * 0.3 * request.weight / head.total_weight
        head = replace(head, gradient_CE=gradient)
    if "unlabelled" in changed:
        head = replace(head, kept=replace(head.kept, projected_2K=None))
    unlabelled = (request.features_FD[:30],) if "unlabelled" in changed else ()
    given = replace(request, head=head, kind=changed.get("kind", "random"), unlabelled=unlabelled)
    result = method.unlearn(given, CONTEXT)
    assert (result.predicted_share, result.predicted_share_interval, result.predicted_distance) == (None, None, None)
    if "n_forget" not in changed:
        assert plain.unlearn(request, CONTEXT).predicted_share > 0


def test_unlabelled_rows_in_the_place_of_the_forget_rows_tell_a_gain_but_no_share():
    request, retained, _ = situation()
    declared = replace(request, kind="class", unlabelled=(retained.features_RD,))
    result = Newton(curvature_settings(estimator="closed_form")).unlearn(declared, CONTEXT)
    assert result.predicted_distance_gain > 0
    assert result.predicted_share is None


def test_a_head_that_was_stopped_just_before_its_optimum_has_a_share():
    request, _, _ = situation(training=Training.exact)
    head = replace(request.head, gradient_CE=request.newton_gradient() * 0.01 * request.weight / request.head.n_train)
    result = Newton(curvature_settings(estimator="closed_form")).unlearn(replace(request, head=head), CONTEXT)
    assert result.predicted_distance == pytest.approx((1 - result.predicted_share) ** 0.5)
    assert f"predicted_share: {result.predicted_share:.2f}" in repr(result)


def test_the_interval_is_right_as_often_as_it_says(capsys, monkeypatch):
    """A slice of ``scripts/coverage.py``; run the whole of it after a change to the prediction."""
    script = load_script("coverage")
    assert script.main(["--quick", "--draws", "8"]) == 0
    assert "coverage of all 40 sets" in capsys.readouterr().out
    first = next(script.cases(None, quick=True))
    monkeypatch.setattr(script, "cases", lambda path, quick: [first])
    monkeypatch.setattr(script, "LEAST", 1.01)
    assert script.main(["--draws", "2"]) == 1
