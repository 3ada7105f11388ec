"""Unlearn from a softmax head too large for a Hessian matrix (C D = 51,200): seconds, distance and peak memory.

    python scripts/large_softmax.py cifar10_512.npz

The rows are real and the classes are made up: each of the file's ten is split into --parts by the largest of as many
random projections. A tenth of the rows is forgotten, by default at l2 = 5e-4.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch

from sfu.curvature.settings import Regularization, curvature_settings
from sfu.data.datasets.base import Dataset
from sfu.data.load import load_dataset
from sfu.evaluation.measures import squared_norm
from sfu.heads.settings import LinearSettings
from sfu.heads.train import train_head
from sfu.losses.softmax import Softmax
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext, RetainedSet
from sfu.unlearning.base import UnlearningMethod
from sfu.unlearning.methods.newton import Newton
from sfu.unlearning.methods.retrained import Retrained

CPU = torch.device("cpu")
EXACT = curvature_settings(estimator="exact", regularization=Regularization.none)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="an npz or safetensors file of features")
    parser.add_argument("--parts", type=int, default=10, help="made classes for each class of the file")
    parser.add_argument("--l2", type=float, default=5e-4)
    arguments = parser.parse_args()
    data = load_dataset(Dataset.make(name="features", path=arguments.path), 0)
    features = data.train_features_ND
    generator = torch.Generator().manual_seed(0)
    projections = torch.randn(features.shape[1], arguments.parts, generator=generator).to(features)
    labels = data.train_labels_N * arguments.parts + (features @ projections).argmax(1)
    n_classes = data.n_classes * arguments.parts
    config = LinearSettings(l2=arguments.l2)
    head = train_head(features, labels, n_classes, config, Softmax(), seed=0, device=CPU, dtype=torch.float64)
    print(f"N = {len(labels)}, C D = {head.parameters_CE.numel()}, |gradient| {float(head.gradient_CE.norm()):.1e}")
    order = torch.randperm(len(labels), generator=generator)
    forget, keep = order[: len(labels) // 10], order[len(labels) // 10 :]
    request = ForgetRequest(head, features[forget], labels[forget])
    retained = RetainedSet(features[keep], labels[keep])
    rows = head.rows(retained.features_RD, retained.labels_R, cache=True)
    hessian = build_operator(head.objective(), rows, head.parameters_CE, Structure.products)
    methods: dict[str, UnlearningMethod] = {
        "retrained": Retrained(config),
        "unlearned_plus": Newton(EXACT),
        "closed_form": Newton(curvature_settings(estimator="closed_form")),
    }
    target, nothing = head.parameters_CE, 1.0
    for name, method in methods.items():
        start = time.perf_counter()
        moved = method.unlearn(request, MethodContext(), retained).head.parameters_CE
        seconds = time.perf_counter() - start
        if name == "retrained":
            target, nothing = moved, squared_norm(head.parameters_CE - moved, hessian)
        away = (squared_norm(moved - target, hessian) / nothing) ** 0.5
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{name:16s} {seconds:7.1f} s   distance {away:.4f}   peak so far {peak:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
