from __future__ import annotations

import pytest
import torch

from sfu.curvature.cross_validation import Fold, choose_step, cross_validate, fold_indices, noise_factor, predict_gain
from sfu.curvature.estimators.base import make_estimator
from sfu.heads.settings import Training
from sfu.operators.explicit import ExplicitOperator
from sfu.operators.spectral import SpectralInverse
from sfu.operators.structure import Structure
from tests.unlearning.cases import CONTEXT, FORGET_CURVATURE, situation


def shared(block: torch.Tensor) -> ExplicitOperator:
    """One block for however many classes."""
    return ExplicitOperator(block, 1, torch.ones(block.shape[0], dtype=block.dtype))


def folds_of(n_folds: int = 4, width: int = 6, rows: int = 40):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(rows // n_folds, width, generator=generator, dtype=torch.float64) for _ in range(n_folds)]
    gradient = torch.randn(n_folds, 2, width, generator=generator, dtype=torch.float64)
    mask = torch.ones(width, dtype=torch.float64)
    folds = []
    for k, part in enumerate(parts):
        others = torch.cat([p for j, p in enumerate(parts) if j != k])
        estimate = others.T @ others / others.shape[0]
        folds.append(
            Fold(SpectralInverse(estimate, mask), gradient[k], 0 * gradient[k], shared(part.T @ part / part.shape[0]))
        )
    return folds, parts, gradient


def held_out_error(folds, parts, gradient, rho, scale):
    """The score by its definition, with dense solves."""
    total = 0.0
    for k, part in enumerate(parts):
        others = torch.cat([p for j, p in enumerate(parts) if j != k])
        damped = others.T @ others / others.shape[0] + rho * torch.eye(6).double()
        step = scale * torch.linalg.solve(damped, gradient[k].T).T
        held_out = part.T @ part / part.shape[0]
        total += float(((step @ held_out) * step).sum() - 2 * (step * gradient[k]).sum()) / len(parts)
    return total


def test_the_choice_is_the_best_of_its_neighbourhood_by_the_definition():
    folds, parts, gradient = folds_of()
    choice = choose_step(folds, 0.75)
    best = held_out_error(folds, parts, gradient, choice.rho, choice.scale)
    assert choice.gain == pytest.approx(-best * 3 / 4, rel=1e-10)
    for rho in (choice.rho * 0.5, choice.rho * 2.0):
        for scale in (choice.scale * 0.9, choice.scale, choice.scale * 1.1):
            assert held_out_error(folds, parts, gradient, rho, scale) > best


def test_the_choice_is_the_best_of_the_whole_grid():
    """Each rho with the c that is best for it, by the definition; so also where small steps score well by ratio."""
    folds, parts, gradient = folds_of()
    choice = choose_step(folds, 0.75)
    best = held_out_error(folds, parts, gradient, choice.rho, choice.scale)
    mean = sum(fold.inverse.mean_eigenvalue for fold in folds) / len(folds)
    for rho in (mean * torch.logspace(-6, 4, 81, dtype=torch.float64)).tolist():
        full, half = (held_out_error(folds, parts, gradient, rho, scale) for scale in (1.0, 0.5))
        curved, along = 2 * full - 4 * half, (full - 4 * half) / 2  # error = c^2 curved - 2 c along
        assert best <= -(along**2) / curved + 1e-12


def test_a_given_rho_is_scored_at_full_length_and_may_be_worse_than_nothing():
    folds, parts, gradient = folds_of()
    for rho in (0.0, 0.3):
        expected = -held_out_error(folds, parts, gradient, rho, 1.0) * 3 / 4
        assert predict_gain(folds, rho, 0.75).gain == pytest.approx(expected, rel=1e-10)
    tiny = [
        Fold(
            SpectralInverse(1e-3 * torch.eye(6).double(), torch.ones(6).double()),
            f.gradient_CE,
            f.signal_CE,
            f.held_out,
        )
        for f in folds
    ]
    assert predict_gain(tiny, 0.0, 0.75).gain < 0


def test_a_singular_estimate_is_never_used_undamped():
    folds, _, _ = folds_of()
    flat = torch.diag(torch.tensor([1.0, 1, 1, 1, 1, 0]).double())
    singular = [
        Fold(SpectralInverse(flat, torch.ones(6).double()), f.gradient_CE, f.signal_CE, f.held_out) for f in folds
    ]
    assert choose_step(singular, 0.75).rho > 0


def test_folds_partition_the_rows():
    parts = fold_indices(23, 5, torch.Generator().manual_seed(0))
    assert sorted(p.numel() for p in parts) == [4, 4, 5, 5, 5]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(23))


def test_the_noise_factor_is_that_of_draws_without_replacement():
    """Var of a mean of n of N rows is proportional to 1/n - 1/N."""
    for folds, n_forget, total in ((5, 100, 1000), (3, 900, 1000), (10, 10, 10**6)):
        left = n_forget * (folds - 1) / folds
        expected = (1 / n_forget - 1 / total) / (1 / left - 1 / total)
        assert noise_factor(folds, n_forget / total) == pytest.approx(expected)


def test_a_zero_gradient_has_nothing_to_gain():
    folds, _, _ = folds_of()
    nothing = [Fold(f.inverse, 0 * f.gradient_CE, f.signal_CE, f.held_out) for f in folds]
    choice = choose_step(nothing, 0.75)
    assert (choice.scale, choice.gain) == (0.0, 0.0)


def test_a_known_signal_is_not_scaled_as_if_it_were_noise():
    folds, parts, gradient = folds_of()
    known = [Fold(f.inverse, f.gradient_CE, f.gradient_CE, f.held_out) for f in folds]
    assert predict_gain(known, 0.3, 0.75).gain == pytest.approx(
        -held_out_error(folds, parts, gradient, 0.3, 1.0), rel=1e-10
    )


@pytest.mark.parametrize(("n_forget", "allowed"), [(200, 0.1), (2000, 0.1), (3200, 0.15)])
def test_the_predicted_gain_is_unbiased_at_the_optimum(n_forget, allowed):
    """Over many random forget sets of one population, predicted and true gain agree on average."""
    generator = torch.Generator().manual_seed(0)
    n, width, n_folds = 4000, 8, 5
    scale = torch.logspace(0, -1, width, dtype=torch.float64)
    rows = torch.randn(n, width, generator=generator, dtype=torch.float64) * scale
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    second = rows.T @ rows / n
    optimum = torch.linalg.solve(second, rows.T @ noise / n)
    mask = torch.ones(width, dtype=torch.float64)
    predicted, true = [], []
    for _ in range(60):
        forget = torch.randperm(n, generator=generator)[:n_forget]
        keep = torch.ones(n, dtype=torch.bool)
        keep[forget] = False
        hessian = rows[keep].T @ rows[keep] / (n - n_forget)
        per_row = (rows @ optimum - noise)[:, None] * rows
        parts = forget.tensor_split(n_folds)
        folds = []
        for k, part in enumerate(parts):
            others = torch.cat([p for j, p in enumerate(parts) if j != k])
            estimate = SpectralInverse(rows[others].T @ rows[others] / others.numel(), mask)
            folds.append(
                Fold(
                    estimate,
                    per_row[others].mean(0)[None],
                    torch.zeros(1, width).double(),
                    shared(rows[part].T @ rows[part] / part.numel()),
                )
            )
        choice = choose_step(folds, noise_factor(n_folds, n_forget / n))
        gradient = per_row[forget].mean(0)
        whole = SpectralInverse(rows[forget].T @ rows[forget] / n_forget, mask)
        step = choice.scale * whole.solve(gradient[None], choice.rho)[0]
        exact = torch.linalg.solve(hessian, gradient)
        true.append(float(exact @ hessian @ exact - (step - exact) @ hessian @ (step - exact)))
        predicted.append(choice.gain)
    assert sum(predicted) / sum(true) == pytest.approx(1.0, abs=allowed)


@pytest.mark.parametrize("training", list(Training))
def test_a_fold_is_the_curvature_of_the_others_and_is_scored_by_its_own(training):
    request, _, _ = situation(training=training, n_forget=50)
    head = request.head
    validation = cross_validate(make_estimator(FORGET_CURVATURE), request, CONTEXT, 5)
    (folds,) = validation.folds
    correction = 400 / 50 * head.gradient_CE
    order = torch.randperm(50, generator=CONTEXT.generator("folds")).tensor_split(5)
    assert float(head.gradient_CE.norm()) > 0.01 or training is Training.exact
    for k, fold in enumerate(folds):
        others = request.rows(torch.cat([part for j, part in enumerate(order) if j != k]))
        own = request.rows(order[k])
        drawn = torch.randn(4, 12, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        expected = torch.linalg.solve(
            others.hessian(Structure.shared).blocks_BKK[0] + 0.1 * torch.eye(12).double(), drawn.T
        ).T
        torch.testing.assert_close(fold.inverse.solve(drawn, 0.1), expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(fold.gradient_CE, others.forget_gradient() - correction, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(fold.signal_CE, head.gradient_CE - correction, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(
            fold.held_out.matmul(drawn), own.hessian(Structure.shared).matmul(drawn), rtol=1e-9, atol=1e-12
        )
    whole = request.hessian(Structure.shared).blocks_BKK
    torch.testing.assert_close(validation.observation.operator.blocks_BKK, whole, rtol=1e-9, atol=1e-12)
    assert validation.failed_fits == 0
