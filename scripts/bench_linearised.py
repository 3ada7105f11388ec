"""Compare a Hessian product with a linearised network to a forward and backward pass, and show how it grows.

    python scripts/bench_linearised.py --layers 1 2 3 --rows 256 512 --classes 10 100
    python scripts/bench_linearised.py --train --layers 3 --rows 2000 --l2 1

Every line gives, for N rows, K components and C classes: p, the seconds of one Hessian product over all rows, the
seconds of one forward and backward pass of the linearised part over the same rows (with the library's convolutions, and
with small maps as matrix products), the ratio of the product to the quicker pass, and the process's peak memory during
the product. ``--train`` trains a head on random images and labels instead, unlearns a tenth, and shows time and peak
memory. On a GPU: --device cuda.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call

from sfu.curvature.settings import curvature_settings
from sfu.experiment.resources import measured
from sfu.heads.cores.core import Core
from sfu.heads.cores.preflight import preflight, with_batch_size
from sfu.heads.cores.split_network import split_network
from sfu.heads.linearised import LinearisedHead
from sfu.heads.settings import LinearisedSettings
from sfu.heads.train import train_head
from sfu.losses.base import make_loss
from sfu.operators.build import build_operator
from sfu.operators.structure import Structure
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.newton import Newton


def best(work: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of the quickest of some runs, and the peak memory of the last in MiB."""
    work()
    seconds = []
    for _ in range(repeats):
        with measured(device) as usage:
            work()
        seconds.append(usage.seconds)
    return min(seconds), usage.peak_memory_mb


def forward_backward(top: nn.Module, rows: torch.Tensor, batch_size: int) -> None:
    """Compute the gradient of the sum of outputs in all parameters of the linearised part."""
    parameters = {name: tensor.detach().clone().requires_grad_() for name, tensor in top.named_parameters()}
    for batch in rows.split(batch_size):
        outputs = functional_call(top, parameters, (batch,))
        torch.autograd.grad(outputs.sum(), list(parameters.values()))


def situation(arguments: argparse.Namespace, layers: int, count: int, classes: int) -> tuple:
    from torchvision import models

    torch.manual_seed(0)
    device = torch.device(arguments.device)
    split = split_network(models.get_model(arguments.network, weights=None, num_classes=classes), layers)
    with torch.no_grad():
        images = torch.randn(count, 3, arguments.size, arguments.size)
        activations = torch.cat([split.trunk(batch) for batch in images.split(256)])
    core = Core.of(split.top, activations[:2], components=split.components).to(device)
    return split.top.to(device), with_batch_size(core, arguments.batch_size), activations, torch.arange(count) % classes


def row(arguments: argparse.Namespace, layers: int, count: int, classes: int) -> None:
    top, core, activations, labels = situation(arguments, layers, count, classes)
    device, w = core.device, torch.randn(1, core.n_parameters, dtype=torch.float64).to(core.device)
    head = LinearisedHead(w, torch.zeros_like(w), 1e-3, count, core=core)
    rows = head.rows(activations.flatten(1), labels)
    operator = build_operator(head.objective(), rows, w, Structure.products)
    product, peak = best(lambda: operator.matmul(w), arguments.repeats, device)
    on_device = activations.to(device)
    plain, _ = best(lambda: forward_backward(top, on_device, core.batch_size), arguments.repeats, device)
    quick, _ = best(lambda: forward_backward(core.top, on_device, core.batch_size), arguments.repeats, device)
    print(
        f"{layers:3d} {count:7d} {classes:5d} {core.n_parameters / 1e6:8.2f}M {core.batch_size:6d} {product:9.3f} "
        f"{plain:9.3f} {quick:9.3f} {product / min(plain, quick):6.2f} {peak:8.0f}", flush=True,
    )  # fmt: skip


def train(arguments: argparse.Namespace, layers: int, count: int, classes: int) -> None:
    _, core, activations, labels = situation(arguments, layers, count, classes)
    print(preflight(core, count))
    config = LinearisedSettings(l2=arguments.l2, tolerance=1e-3, max_iterations=5000)
    features = activations.flatten(1)
    for what in ("train", "unlearn"):
        start = time.perf_counter()
        with measured(core.device) as usage:
            if what == "train":
                head = train_head(
                    features, labels, classes, config, make_loss("quadratic", target_scale=5.0), seed=0,
                    device=core.device, dtype=torch.float64, core=core,
                )  # fmt: skip
            else:
                request = ForgetRequest(head, features[: count // 10], labels[: count // 10])
                Newton(curvature_settings(estimator="closed_form", on_doubt="apply")).unlearn(request, MethodContext())
        print(f"{what}: {time.perf_counter() - start:.0f} s, peak {usage.peak_memory_mb / 1024:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batch-size", type=lambda given: given if given == "auto" else int(given), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--l2", type=float, default=1.0)
    arguments = parser.parse_args()
    if not arguments.train:
        print("  K       N     C         p  batch   product  fwd+bwd small maps ratio peak MiB")
    for layers in arguments.layers:
        for count in arguments.rows:
            for classes in arguments.classes:
                (train if arguments.train else row)(arguments, layers, count, classes)


if __name__ == "__main__":
    main()
