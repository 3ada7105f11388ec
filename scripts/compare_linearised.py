"""Linearised networks on a folder of images: every row of the table, and the best (rho, c) chosen with retained data.

    python scripts/compare_linearised.py cifar10_images --layers 1 2 3 --l2 5e-3 5e-2 --fractions 0.1 0.15 0.2

A core is trained on public images of the folder (and cached); the other images are the users'. For each K, l2 and
share forgotten: accuracies on test, remaining and forget set and distance to Retrained of Original, Retrained,
Unlearned(+), the closed form with rho and c cross-validated, and the oracle of that family.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sfu.curvature.settings import Regularization, curvature_settings
from sfu.data.datasets.base import Dataset
from sfu.data.features.extract import Extractor
from sfu.data.load import extract_features, load_image_parts
from sfu.data.settings import BackboneSettings, ForgetSettings
from sfu.data.split import make_split
from sfu.evaluation.evaluate import Evaluator
from sfu.evaluation.measures import squared_norm
from sfu.heads.base import Head
from sfu.heads.cores.build_core import build_core
from sfu.heads.cores.preflight import preflight
from sfu.heads.normal_equations import Checkpoint
from sfu.heads.settings import CoreWeights, HeadSettings, LinearisedSettings, PretrainSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.seeds import derive_seed
from sfu.store import Store
from sfu.unlearning.methods.newton import Newton

CPU = torch.device("cpu")


def oracle(request: ForgetRequest, retrained: Tensor, hessian: object, n_rhos: int) -> float:
    """Smallest distance over rho, with the best c for each, both chosen with Retrained in hand."""
    inverse = request.hessian(Structure.products).damped()
    rhos = (inverse.mean_eigenvalue * torch.logspace(-5, 4, n_rhos, dtype=torch.float64)).tolist()
    target = retrained - request.head.parameters_CE
    image, nothing = hessian.matmul(target), float(hessian.quadratic(target))
    gain = 0.0
    for steps in inverse.solutions(request.newton_gradient(), rhos):
        along, curved = (steps * image).sum((1, 2)), hessian.quadratic(steps)
        gain = max(gain, float(torch.where(along > 0, along.square() / curved, 0.0).max()))
    return (max(0.0, nothing - gain) / nothing) ** 0.5


def warm_start(original: Head) -> Checkpoint:
    """The optimum does not depend on where training starts; from Original it takes fewer products."""
    store = Store(Path(tempfile.mkdtemp()))
    store.write_tensors("original", {"parameters": original.parameters_CE})
    return Checkpoint("original", store)


def line(name: str, scores: dict, seconds: float, more: str = "") -> None:
    figures = "  ".join(f"{scores[key]:5.1f}" for key in ("test_accuracy", "remain_accuracy", "forget_accuracy", "mia"))
    print(f"  {name:16s} {figures}  {scores['distance']:8.4f} {seconds:7.0f} s {more}", flush=True)


def situation(arguments: argparse.Namespace, layers: int) -> tuple:
    """The users' data as activations below K components, and the core."""
    dataset = Dataset.make(
        name="image_folder", path=arguments.path, limit_per_class=arguments.limit, core_fraction=arguments.core_fraction
    )
    backbone = BackboneSettings(name=arguments.network, weights="none", size=arguments.size)
    head = LinearisedSettings(
        layers=layers, core=CoreWeights.pretrain, pretrain=PretrainSettings(epochs=arguments.epochs),
        tolerance=arguments.tolerance, max_iterations=5000,
    )  # fmt: skip
    parts = load_image_parts(dataset, 0)
    public, labels = (
        parts.images.images.take(parts.public.tolist()),
        torch.from_numpy(parts.images.labels_N[parts.public]),
    )
    trunk, core = build_core(backbone, head, parts.n_classes, public, labels, parts.example(), CPU, say=print)
    data = extract_features(parts, Extractor(backbone, CPU, say=print, backbone=trunk))
    if arguments.users:
        some = torch.randperm(data.n_train, generator=torch.Generator().manual_seed(0))[: arguments.users]
        data = replace(data, train_features_ND=data.train_features_ND[some], train_labels_N=data.train_labels_N[some])
    print(f"K = {layers} ({', '.join(core.components)}): {preflight(core, data.n_train)}")
    return data, core, head


def compare(data: object, core: object, head: HeadSettings, l2: float, arguments: argparse.Namespace) -> None:
    head.l2, loss = l2, make_loss("quadratic", target_scale=arguments.target_scale)
    where = {"seed": 0, "device": CPU, "dtype": torch.float64, "core": core}
    products: list[int] = [0]
    note = lambda done, _: products.__setitem__(0, done)  # noqa: E731
    start = time.perf_counter()
    original = train_head(data.train_features_ND, data.train_labels_N, data.n_classes, head, loss, progress=note,
                          **where)  # fmt: skip
    spent = time.perf_counter() - start
    print(f" l2 = {l2:g}: N = {data.n_train}, {products[0]} products, {spent:.0f} s to train")
    for fraction in arguments.fractions:
        split = make_split(ForgetSettings(fraction=fraction), data.train_labels_N, data.n_classes, 0)
        retained = RetainedSet(data.train_features_ND[split.retain_R], data.train_labels_N[split.retain_R])
        request = ForgetRequest(original, data.train_features_ND[split.forget_F], data.train_labels_N[split.forget_F])
        start = time.perf_counter()
        retrained = train_head(retained.features_RD, retained.labels_R, data.n_classes, head, loss,
                               checkpoint=warm_start(original), **where)  # fmt: skip
        spent = time.perf_counter() - start
        evaluator = Evaluator(data, split, original, retrained)
        print(f"  {fraction:.0%} forgotten      test  remain forget    MIA  distance")
        line("original", evaluator.evaluate(original), 0.0)
        line("retrained", evaluator.evaluate(retrained), spent)
        for name, estimator, rule in (
            ("unlearned_plus", "exact", Regularization.none),
            ("closed_form", "closed_form", Regularization.cross_validated),
        ):
            if arguments.without_plus and estimator == "exact":
                continue
            start = time.perf_counter()
            config = curvature_settings(estimator=estimator, regularization=rule)
            context = MethodContext({"folds": derive_seed(0, "folds")})
            made = Newton(config).unlearn(request, context, retained if estimator == "exact" else None)
            spent = time.perf_counter() - start
            scores, more = evaluator.evaluate(made.head), ""
            if estimator == "closed_form":
                promised = (made.predicted_distance_gain or 0.0) / scores["measured_distance_gain"]
                more = (
                    f"c {made.details['step_scale']:.2f}, rho {made.details['rho']:.2g}, predicted/measured "
                    f"{promised:.2f}, applied {made.applied}"
                )
            line(name, scores, spent, more)
        rows = original.rows(retained.features_RD, retained.labels_R)
        hessian = build_operator(original.objective(), rows, original.parameters_CE, Structure.products)
        start = time.perf_counter()
        best = oracle(request, retrained.parameters_CE, hessian, arguments.rhos)
        nothing = squared_norm(original.parameters_CE - retrained.parameters_CE, hessian)
        print(f"  oracle {best:45.4f} ({time.perf_counter() - start:.0f} s; |w - w_r|_H = {nothing**0.5:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder of images, as for dataset=image_folder")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--l2", type=float, nargs="+", default=[5e-3, 5e-2])
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.1, 0.15, 0.2])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--limit", type=int, default=1200, help="images of each class and part")
    parser.add_argument("--core-fraction", type=float, default=5 / 6)
    parser.add_argument("--epochs", type=int, default=8, help="of the core")
    parser.add_argument("--target-scale", type=float, default=5.0)
    parser.add_argument("--users", type=int, default=None, help="user images, of those that are not public")
    parser.add_argument("--rhos", type=int, default=46, help="of the oracle's grid")
    parser.add_argument("--without-plus", action="store_true", help="leave Unlearned(+) out: it equals Retrained")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    arguments = parser.parse_args()
    Path(arguments.path).stat()
    for layers in arguments.layers:
        data, core, head = situation(arguments, layers)
        for l2 in arguments.l2:
            compare(data, core, head, l2, arguments)


if __name__ == "__main__":
    main()
