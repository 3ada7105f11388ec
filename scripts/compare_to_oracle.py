"""How close cross-validation on the forget set comes to choosing rho and c with the retained data, and to its promise.

    python scripts/compare_to_oracle.py cifar10_512.npz
    python scripts/compare_to_oracle.py cifar10_512.npz --loss softmax --forget 5000 --l2 1e-5 5e-4 --seeds 1

For every number of forget rows, l2 and seed: the distance to Retrained of the cross-validated closed-form step, that
of the best (rho, c) chosen with the retained Hessian, their ratio, and predicted over measured gain. For the quadratic
loss also `stored` (must be 0 to rounding) and `closed_form` with the test rows as unlabelled rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sfu.curvature.settings import CurvatureSettings, Regularization, curvature_settings
from sfu.data.datasets.base import Dataset
from sfu.data.feature_data import FeatureData
from sfu.data.load import load_dataset
from sfu.evaluation.measures import squared_norm
from sfu.heads.settings import Keep, LinearSettings
from sfu.heads.train import train_head
from sfu.losses.base import Loss, make_loss
from sfu.operators.base import CurvatureOperator
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.seeds import derive_seed
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

CPU = torch.device("cpu")
CLOSED = curvature_settings(estimator="closed_form")
STORED = curvature_settings(estimator="stored", regularization=Regularization.none)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What is known with the retained data: Retrained, the retained Hessian at w*, the distance of doing nothing."""

    retrained: Tensor
    hessian: CurvatureOperator
    nothing: float


def oracle(request: ForgetRequest, truth: Truth) -> float:
    """Smallest distance over rho, with the best c for each, both chosen with Retrained in hand."""
    structure = {"quadratic": Structure.shared, "softmax": Structure.products}
    inverse = request.hessian(structure.get(request.head.loss.name, Structure.blocks)).damped()
    rhos = (inverse.mean_eigenvalue * torch.logspace(-6, 4, 201, dtype=torch.float64)).tolist()
    target = truth.retrained - request.head.parameters_CE
    steps = inverse.solve_many(request.newton_gradient(), rhos)
    images = truth.hessian.matmul(steps)
    along, curved = (images * target).sum((1, 2)), (images * steps).sum((1, 2))
    gain = torch.where(along > 0, along.square() / curved, 0.0).max()
    return (max(0.0, truth.nothing - float(gain)) / truth.nothing) ** 0.5


def outcome(
    config: CurvatureSettings, request: ForgetRequest, context: MethodContext, truth: Truth
) -> tuple[float, float, dict]:
    """Distance to Retrained, predicted over measured gain, and the details of one step."""
    result = Newton(config).unlearn(request, context)
    left = squared_norm(result.head.parameters_CE - truth.retrained, truth.hessian)
    return (
        (left / truth.nothing) ** 0.5,
        (result.predicted_distance_gain or 0.0) / (truth.nothing - left),
        result.details,
    )


def situation(data: FeatureData, loss: str, l2: float, n_forget: int, seed: int) -> tuple[ForgetRequest, Truth]:
    """A random forget set, and the truth about it."""
    quadratic = loss == "quadratic"
    config = LinearSettings(l2=l2, keep=Keep.full if quadratic else Keep.bound)
    features, labels = data.train_features_ND, data.train_labels_N
    where = {"seed": 0, "device": CPU, "dtype": torch.float64}
    head = train_head(features, labels, data.n_classes, config, make_loss(loss), **where)
    order = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(seed))
    forget, keep = order[:n_forget], order[n_forget:]
    request = ForgetRequest(head, features[forget], labels[forget])
    retained = RetainedSet(features[keep], labels[keep])
    retrained = Retrained(config).unlearn(request, MethodContext(), retained).head.parameters_CE
    rows = head.rows(retained.features_RD, retained.labels_R, cache=True)
    structure = Structure.shared if quadratic else Structure.products
    hessian = build_operator(head.objective(), rows, head.parameters_CE, structure)
    return request, Truth(retrained, hessian, squared_norm(head.parameters_CE - retrained, hessian))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a feature file, as for dataset=features")
    parser.add_argument("--loss", choices=Loss.names(), default="quadratic")
    parser.add_argument("--forget", type=int, nargs="+", default=[500, 2500, 5000, 7500])
    parser.add_argument("--l2", type=float, nargs="+", default=[1e-6, 5e-4])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    data = load_dataset(Dataset.make(name="features", path=arguments.path), 0)
    public = Path(tempfile.mkdtemp()) / "public.npz"
    np.savez(public, features=data.test_features_TD.numpy())
    unlabelled = curvature_settings(estimator="closed_form", unlabelled=str(public))
    ratios, promises = [], []
    more = "   stored  unlabelled (weight)" if arguments.loss == "quadratic" else ""
    print(f"forget     l2 seed   ours oracle ratio predicted/measured{more}")
    for n_forget in arguments.forget:
        for l2 in arguments.l2:
            for seed in range(arguments.seeds):
                request, truth = situation(data, arguments.loss, l2, n_forget, seed)
                context = MethodContext({"folds": derive_seed(seed, "folds")})
                ours, promise, _ = outcome(CLOSED, request, context, truth)
                best = oracle(request, truth)
                ratios.append(ours / best)
                promises.append(promise)
                line = f"{n_forget:6d} {l2:6.0e} {seed:4d} {ours:6.4f} {best:6.4f} {ours / best:5.3f} {promise:18.3f}"
                if arguments.loss == "quadratic":
                    stored, _, _ = outcome(STORED, request, context, truth)
                    mixed, _, details = outcome(unlabelled, request, context, truth)
                    line += f" {stored:8.0e} {mixed:10.4f} ({1 - details['weight_forget']:.2g})"
                print(line, flush=True)
    print(f"ratio to the oracle: worst {max(ratios):.3f}, mean {statistics.fmean(ratios):.3f}")
    low, high = min(promises), max(promises)
    print(f"predicted over measured gain: mean {statistics.fmean(promises):.3f}, {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
