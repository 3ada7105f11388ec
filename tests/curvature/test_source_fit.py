"""The choice of weights, damping and length: its score by the definition, its derivatives, and its predictions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import optimize

from sfu.curvature.cross_validation import FORGET, RETAINED, UNLABELLED, VIEWS, Fold, Sources, Validation
from sfu.curvature.settings import curvature_settings
from sfu.curvature.source_fit import (
    Caution,
    StepChoice,
    _on_grid,
    _refine,
    _slopes,
    _starts,
    choose_step,
    expected_gain,
    noise_factor,
)
from sfu.operators.explicit import ExplicitOperator
from sfu.unlearning.methods.newton import Newton
from tests.unlearning.cases import CONTEXT, measured_gain, situation

WIDTH, L2, FOLDS = 6, 0.05, 4
CAUTIONS = [
    Caution(), Caution(share=0.3, bound=2.0), Caution(few=0.4, bound=2.0, stretch=1.5, along=0.7),
    Caution(0.2, 0.3, 2.0, 1.2, 0.5),
]  # fmt: skip


def operator(rows: torch.Tensor, times: float = 1.0) -> ExplicitOperator:
    block = times * rows.T @ rows / len(rows) + L2 * torch.eye(WIDTH).double()
    return ExplicitOperator(block, 1, torch.ones(WIDTH).double())


def validation_of(n_sources: int = 1, training: float | None = None, seed: int = 3, rows: int = 40) -> Validation:
    """Folds of 40 rows, and of as many rows of every further source, each of other scales."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    names = [FORGET, *(f"{UNLABELLED}_{n}" for n in range(1, n_sources))]
    scales = {name: torch.logspace(0, -n, WIDTH, dtype=torch.float64) for n, name in enumerate(names)}
    parts = {name: (draw(rows, WIDTH) * scales[name]).tensor_split(FOLDS) for name in names}
    folds = []
    for k in range(FOLDS):
        sources = {
            name: operator(torch.cat([part for j, part in enumerate(split) if j != k])) for name, split in parts.items()
        }
        gradient, held_out = draw(2, WIDTH), operator(parts[FORGET][k])
        shown = None if training is None else operator(parts[FORGET][k], training)
        folds.append(Fold(Sources(sources, dict.fromkeys(names, 30.0)), gradient, 0 * gradient, held_out, shown))
    whole = Sources({name: operator(torch.cat(split)) for name, split in parts.items()}, dict.fromkeys(names, 40.0))
    return Validation(None, whole, folds)


def error(validation: Validation, weights, rho: float, scale: float, caution: Caution = CAUTIONS[0]) -> float:
    """The score by its definition, with dense solves."""
    total = 0.0
    for fold in validation.folds:
        blocks = [source.blocks_BKK[0] for source in fold.sources.operators.values()]
        damped = sum(w * block for w, block in zip(weights, blocks, strict=True)) + rho * torch.eye(WIDTH).double()
        step = scale * torch.linalg.solve(damped, fold.gradient_CE.T).T
        scored = (1 - caution.few) * caution.stretch * fold.held_out.blocks_BKK[0]
        scored = scored + caution.few * caution.along * torch.eye(WIDTH).double()
        if caution.share:
            whole = (caution.bound + L2) * torch.eye(WIDTH).double()
            scored = (1 - caution.share) * scored + caution.share * whole
        total += float(((step @ scored) * step).sum() - 2 * (step * fold.gradient_CE).sum()) / FOLDS
    return total


def best_gain(validation: Validation, weights, rho: float, caution: Caution = CAUTIONS[0]) -> float:
    """The gain with the best length, by two lengths: error = c^2 curved - 2 c along."""
    full, half = (error(validation, weights, rho, scale, caution) for scale in (1.0, 0.5))
    curved, along = 2 * full - 4 * half, (full - 4 * half) / 2
    return along**2 / curved


def test_the_choice_is_the_best_of_its_neighbourhood_and_its_gain_is_scaled_by_the_noise():
    validation = validation_of()
    choice = choose_step(validation, 0.75, Caution(), L2)
    best = error(validation, [1.0], choice.rho, choice.scale)
    assert choice.gain == pytest.approx(-best * 3 / 4, rel=1e-10)
    for rho in (choice.rho * 0.5, choice.rho * 2.0):
        for scale in (choice.scale * 0.9, choice.scale, choice.scale * 1.1):
            assert error(validation, [1.0], rho, scale) > best


@pytest.mark.parametrize("caution", [CAUTIONS[0], CAUTIONS[1]])
def test_the_choice_is_the_best_of_the_whole_grid(caution):
    validation = validation_of()
    choice = choose_step(validation, 0.75, caution, L2)
    best = -error(validation, [1.0], choice.rho, choice.scale, caution)
    mean = float(np.mean([fold.sources.damped((1.0,)).mean_eigenvalue for fold in validation.folds]))
    for rho in (mean * np.logspace(-6, 4, 81)).tolist():
        assert best >= best_gain(validation, [1.0], rho, caution) - 1e-12


def test_fitted_weights_are_as_good_as_a_fine_grid():
    for seed in range(6):
        validation = validation_of(2, seed=seed)
        choice = choose_step(validation, 1.0, Caution(), L2)
        found = best_gain(validation, choice.weights, min(choice.rho, 1e6))
        grid = max(
            best_gain(validation, [1 - weight, weight], rho)
            for weight in np.linspace(0, 1, 21)
            for rho in np.logspace(-4, 1.5, 34)
        )
        assert found > 0.998 * grid
        assert sum(choice.weights) == pytest.approx(1)


@pytest.mark.parametrize("caution", CAUTIONS)
@pytest.mark.parametrize("training", [None, 1.0, 3.0])  # the last makes the floor that of the training rows
def test_derivatives_are_finite_differences(caution, training):
    validation, rho = validation_of(3, training), 0.2
    weights, step = np.array([0.5, 0.3, 0.2]), 1e-5
    along, curved, *slopes = _slopes(validation.folds, weights, rho, caution, L2)
    floored = _slopes(validation_of(3).folds, weights, rho, caution, L2)[1] != pytest.approx(curved)
    assert floored == (training == 3.0)
    for j in range(4):
        there, back = (
            _slopes(validation.folds, weights + moved * (np.arange(3) == j), rho + moved * (j == 3), caution, L2)[:2]
            for moved in (step, -step)
        )
        found = [slope[j] for slope in slopes]
        np.testing.assert_allclose(found, (np.array(there) - np.array(back)) / (2 * step), rtol=1e-6)
    if training is None:
        assert along**2 / curved == pytest.approx(best_gain(validation, weights, rho, caution), rel=1e-8)


def test_a_given_rho_is_scored_at_full_length_and_may_be_worse_than_nothing():
    validation = validation_of()
    for rho in (0.0, 0.3):
        given = StepChoice(rho, 1.0, 0.0)
        assert expected_gain(validation.folds, given, 0.75) == pytest.approx(-error(validation, [1.0], rho, 1.0) * 0.75)
    tiny = Sources({FORGET: operator(torch.zeros(1, WIDTH).double())}, {FORGET: 30.0})
    folds = [dataclasses.replace(fold, sources=tiny) for fold in validation.folds]
    assert expected_gain(folds, StepChoice(0.0, 1.0, 0.0), 0.75) < 0


def test_a_singular_estimate_is_never_used_undamped():
    flat = ExplicitOperator(torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]).double()), 1, torch.ones(WIDTH).double())
    whole = validation_of()
    folds = [dataclasses.replace(fold, sources=Sources({FORGET: flat}, {FORGET: 30.0})) for fold in whole.folds]
    assert choose_step(dataclasses.replace(whole, folds=folds), 0.75, Caution(), L2).rho > 0


def test_the_noise_factor_is_that_of_draws_without_replacement():
    """Var of a mean of n of N rows is proportional to 1/n - 1/N."""
    for folds, n_forget, total in ((5, 100, 1000), (3, 900, 1000), (10, 10, 10**6)):
        left = n_forget * (folds - 1) / folds
        expected = (1 / n_forget - 1 / total) / (1 / left - 1 / total)
        assert noise_factor(folds, n_forget / total) == pytest.approx(expected)


def test_a_zero_gradient_has_nothing_to_gain():
    whole = validation_of()
    folds = [dataclasses.replace(fold, gradient_CE=0 * fold.gradient_CE) for fold in whole.folds]
    choice = choose_step(dataclasses.replace(whole, folds=folds), 0.75, Caution(), L2)
    assert (choice.scale, choice.gain) == (0.0, 0.0)


def test_a_known_signal_is_not_scaled_as_if_it_were_noise():
    whole = validation_of()
    folds = [dataclasses.replace(fold, signal_CE=fold.gradient_CE) for fold in whole.folds]
    assert expected_gain(folds, StepChoice(0.3, 1.0, 0.0), 0.75) == pytest.approx(-error(whole, [1.0], 0.3, 1.0))


@pytest.mark.parametrize("n_sources", [1, 2])
def test_if_nothing_is_seen_the_step_is_that_of_the_bound(n_sources):
    validation = validation_of(n_sources)
    choice = choose_step(validation, 1.0, Caution(share=1.0, bound=2.0), L2)
    assert choice.is_safe
    assert choice.scale == pytest.approx(1 / (2.0 + L2))
    scored = [
        float(2 * choice.scale * fold.gradient_CE.square().sum())
        - choice.scale**2 * float(fold.held_out.quadratic(fold.gradient_CE))
        for fold in validation.folds
    ]
    assert choice.gain == pytest.approx(float(np.mean(scored)))


def test_a_source_that_a_start_leaves_out_is_brought_in():
    validation = validation_of(2)
    start = _on_grid(validation.folds, (1.0, 0.0), Caution(), L2)
    found = _refine(validation.folds, start, Caution(), L2)
    assert found.weights[1] > 0.1
    assert found.gain > 1.001 * start.gain
    assert found.gain == pytest.approx(choose_step(validation, 1.0, Caution(), L2).gain, rel=1e-3)


def test_the_best_point_of_a_search_is_kept(monkeypatch):
    folds = validation_of(2).folds
    start = _on_grid(folds, (0.5, 0.5), Caution(), L2)
    monkeypatch.setattr(optimize, "minimize", lambda loss, at, **_: (loss(at), loss(at + np.array([0.0, 0.0, 20.0]))))
    assert _refine(folds, start, Caution(), L2) == start


def test_few_rows_that_are_held_out_nowhere_count_as_unseen():
    validation = validation_of()
    alone = dataclasses.replace(validation, trust=1.0)
    few, unseen = Caution(few=0.4, bound=2.0), Caution(share=0.4, bound=2.0)
    assert choose_step(alone, 0.75, few, L2) == choose_step(validation, 0.75, unseen, L2)
    assert choose_step(alone, 0.75, few, L2) != choose_step(validation, 0.75, few, L2)


def test_the_search_starts_from_the_sources_that_are_trusted():
    rows = {FORGET: 10.0, VIEWS: 10.0, f"{UNLABELLED}_1": 15.0, f"{UNLABELLED}_2": 5.0, RETAINED: 0.0}
    sources = Sources(dict.fromkeys(rows), rows)
    of_forget_rows = [(0.25, 0.25, 0.375, 0.125, 0), (1, 0, 0, 0, 0)]
    assert _starts(sources, 0.0) == of_forget_rows
    assert _starts(sources, 0.5) == [*of_forget_rows, (0, 0, 0.75, 0.25, 0), (0, 0, 0, 0, 1)]


def test_no_step_counts_on_less_than_half_of_the_training_rows_curvature():
    """Sampled differences may show almost no curvature, or less than none."""
    whole = validation_of(training=1.0)
    blank = torch.zeros(WIDTH, WIDTH).double()
    for shown in (1e-9, 0.0, -0.3):
        small = ExplicitOperator(blank + shown * torch.eye(WIDTH).double(), 1, torch.ones(WIDTH).double())
        flat = ExplicitOperator(blank + torch.eye(WIDTH).double(), 1, torch.ones(WIDTH).double())
        folds = [dataclasses.replace(fold, held_out=small, training=flat) for fold in whole.folds]
        choice = choose_step(dataclasses.replace(whole, folds=folds), 1.0, Caution(), L2)
        along = square = 0.0
        for fold in folds:
            step = choice.scale * fold.gradient_CE
            if not choice.is_safe:
                step = choice.scale * fold.sources.damped(choice.weights).solve(fold.gradient_CE, choice.rho)
            along += float((step * fold.gradient_CE).sum())
            square += float(fold.gradient_CE.square().sum())
        assert 0 < along / square <= 2 * (1 + 1e-9)


@pytest.mark.parametrize(("n_forget", "unlabelled"), [(100, 0), (100, 150), (4, 150)])
def test_the_predicted_gain_is_unbiased(n_forget, unlabelled):
    """Over many random forget sets, predicted and measured gain agree on average, whatever sources are weighed."""
    predicted = measured = 0.0
    for seed in range(30):
        request, retained, config = situation(n_forget=n_forget, seed=seed)
        given = (retained.features_RD[:unlabelled],) if unlabelled else ()
        closed = Newton(curvature_settings(estimator="closed_form"))
        result = closed.unlearn(dataclasses.replace(request, unlabelled=given), CONTEXT)
        predicted += result.predicted_distance_gain
        measured += measured_gain(result.head, request, retained, config)
    assert predicted / measured == pytest.approx(1.0, abs=0.05)
