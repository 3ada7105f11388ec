"""How close cross-validation on the forget set comes to choosing rho and c with the retained data, and to its promise.

    python scripts/compare_to_oracle.py cifar10_512.npz

For every number of forget rows, l2 and seed: the distance to Retrained of the cross-validated closed-form step, that
of the best (rho, c) chosen with the retained Hessian, their ratio, and predicted over measured gain. Then `stored`
(must be exact) and `reference` with the test rows as public data.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from sfu.heads.moments import Moments, compute_moments
from torch import Tensor

from sfu.curvature.operators.spectral import SpectralInverse
from sfu.data.load import load_dataset
from sfu.evaluation.measures import squared_norm
from sfu.heads.exact import train_exact
from sfu.seeds import derive_seed
from sfu.settings import CurvatureConfig, DatasetConfig, Estimator, Regularization
from sfu.unlearning.method import Tools
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.request import ForgetRequest

CPU = torch.device("cpu")


def retained_moments(whole: Moments, forget: Moments) -> Moments:
    left = whole.count - forget.count
    return Moments(
        left,
        (whole.count * whole.second_EE - forget.count * forget.second_EE) / left,
        (whole.count * whole.cross_CE - forget.count * forget.cross_CE) / left,
    )


def oracle(request: ForgetRequest, retrained: Tensor, hessian: Tensor) -> float:
    """Smallest distance over rho, with the best c for each, both chosen with the retained Hessian."""
    head, gradient = request.head, request.newton_gradient()
    inverse = SpectralInverse(request.moments().hessian(head.l2, head.regularized_E), head.regularized_E)
    rhos = (inverse.mean_eigenvalue * torch.logspace(-6, 4, 201, dtype=torch.float64)).tolist()
    nothing = squared_norm(head.parameters_CE - retrained, hessian)
    best = 1.0
    for step in inverse.solve_many(gradient, rhos):
        scale = float((step * gradient).sum() / ((step @ hessian) * step).sum())
        moved = head.parameters_CE + request.step_ratio * scale * step
        best = min(best, (squared_norm(moved - retrained, hessian) / nothing) ** 0.5)
    return best


def distance(
    config: CurvatureConfig, request: ForgetRequest, tools: Tools, retrained: Tensor, hessian: Tensor, nothing: float
) -> tuple[float, float, dict]:
    """Distance to Retrained, predicted over measured gain, and the details of one step."""
    result = Newton(config).unlearn(request, tools)
    left = squared_norm(result.head.parameters_CE - retrained, hessian)
    return (left / nothing) ** 0.5, (result.predicted_gain or 0.0) / (nothing - left), result.details


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a feature file, as for dataset=features")
    parser.add_argument("--forget", type=int, nargs="+", default=[500, 2500, 5000, 7500])
    parser.add_argument("--l2", type=float, nargs="+", default=[1e-6, 5e-4])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    data = load_dataset(DatasetConfig(name="features", path=arguments.path), 0)
    whole = compute_moments(data.train_features_ND, data.train_labels_N, data.n_classes, bias=False, device=CPU)
    public = Path(tempfile.mkdtemp()) / "public.npz"
    np.savez(public, features=data.test_features_TD.numpy())
    closed = CurvatureConfig(estimator=Estimator.closed_form)
    reference = CurvatureConfig(estimator=Estimator.reference, reference_path=str(public))
    stored = CurvatureConfig(estimator=Estimator.stored, regularization=Regularization.none)
    ratios, promises = [], []
    print("forget     l2 seed   ours oracle ratio predicted/measured   stored  reference (weight)")
    for n_forget in arguments.forget:
        for l2 in arguments.l2:
            for seed in range(arguments.seeds):
                head = train_exact(whole, l2=l2, bias=False, target_scale=1.0)
                order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(seed))[:n_forget]
                request = ForgetRequest(head, data.train_features_ND[order], data.train_labels_N[order])
                kept = retained_moments(whole, request.moments())
                hessian = kept.hessian(l2, head.regularized_E)
                retrained = train_exact(kept, l2=l2, bias=False, target_scale=1.0).parameters_CE
                nothing = squared_norm(head.parameters_CE - retrained, hessian)
                tools = Tools({"folds": derive_seed(seed, "folds")})
                truth = (retrained, hessian, nothing)
                ours, promise, _ = distance(closed, request, tools, *truth)
                best = oracle(request, retrained, hessian)
                full = dataclasses.replace(head, second_EE=whole.second_EE)
                exact, _, _ = distance(
                    stored, ForgetRequest(full, request.features_FD, request.labels_F), tools, *truth
                )
                mixed, _, details = distance(reference, request, tools, *truth)
                ratios.append(ours / best)
                promises.append(promise)
                print(
                    f"{n_forget:6d} {l2:6.0e} {seed:4d} {ours:6.4f} {best:6.4f} {ours / best:5.3f} {promise:18.3f} "
                    f"{exact:8.0e} {mixed:10.4f} ({details['reference_weight']:g})",
                    flush=True,
                )
    print(f"ratio to the oracle: worst {max(ratios):.3f}, mean {statistics.fmean(ratios):.3f}")
    low, high = min(promises), max(promises)
    print(f"predicted over measured gain: mean {statistics.fmean(promises):.3f}, {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
