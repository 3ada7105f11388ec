"""Compare hand-written kernels with the plain way, side by side in one run.

    OMP_NUM_THREADS=2 python scripts/bench_kernels.py

- small maps: a gradient of the last blocks of a network with :class:`sfu.heads.cores.small_maps.SmallMapConv` and
  with :class:`torch.nn.Conv2d`, on a CPU.
- many heads: the gradients of M linear heads on the same rows, mapped by ``torch.func.vmap``, with outputs written as
  :func:`sfu.losses.chunks.outputs_of` and as ``design @ parameters.T``.
- sgd: the first step of a process with :class:`sfu.unlearning.descent.Sgd` and with :class:`torch.optim.SGD`, which
  makes PyTorch load its compiler. Each is measured in a process of its own.

Every line gives the seconds of the quickest of --repeats runs (of --processes processes for sgd) and the ratio
plain / own. A kernel whose ratio is below 1.3 does not pay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from sfu.heads.cores.small_maps import use_small_maps
from sfu.heads.cores.split_network import split_network
from sfu.losses.chunks import outputs_of

_FIRST_STEP = """
import time, torch
from sfu.unlearning.descent import Sgd
w, g = torch.zeros(10, 512), torch.ones(10, 512)
start = time.perf_counter()
{step}
print(time.perf_counter() - start)
"""
_OWN = "Sgd(0.1, 0.9).step(w, g, torch.zeros_like(w))"
_PLAIN = "p = torch.nn.Parameter(w); p.grad = g; torch.optim.SGD([p], lr=0.1, momentum=0.9).step()"


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest run, after one to warm up."""
    work()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def show(what: str, own: float, plain: float) -> None:
    print(f"{what:60s} {own:9.4f} {plain:9.4f} {plain / own:6.2f}", flush=True)


def gradient(top: nn.Module, rows: Tensor) -> tuple[Tensor, ...]:
    parameters = {name: tensor.detach().clone().requires_grad_() for name, tensor in top.named_parameters()}
    return torch.autograd.grad(functional_call(top, parameters, (rows,)).sum(), list(parameters.values()))


def small_maps(network: str, size: int, layers: int, rows: int, repeats: int) -> None:
    from torchvision import models

    torch.manual_seed(0)
    split = split_network(models.get_model(network, weights=None, num_classes=10), layers)
    with torch.no_grad():
        activations = split.trunk(torch.randn(rows, 3, size, size))
    plain = best(lambda: gradient(split.top, activations), repeats)
    use_small_maps(split.top, activations[:2])
    own = best(lambda: gradient(split.top, activations), repeats)
    show(f"small maps: {network}, {size} px, K={layers}, {rows} rows", own, plain)


def many_heads(heads: int, rows: int, width: int, classes: int, repeats: int) -> None:
    torch.manual_seed(0)
    design_BE, weights_MCE = torch.randn(rows, width).double(), torch.randn(heads, classes, width).double()

    def gradients(outputs: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parameters = weights_MCE.clone().requires_grad_()
        values = vmap(lambda one_CE: outputs(design_BE, one_CE).logsumexp(1).mean())(parameters)
        return torch.autograd.grad(values.sum(), parameters)[0]

    own = best(lambda: gradients(outputs_of), repeats)
    plain = best(lambda: gradients(lambda design_BE, one_CE: design_BE @ one_CE.T), repeats)
    show(f"many heads: M={heads}, B={rows}, E={width}, C={classes}", own, plain)


def sgd(processes: int) -> None:
    def first(step: str) -> float:
        command = [sys.executable, "-c", _FIRST_STEP.format(step=step)]
        runs = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(processes))
        return min(float(run.stdout) for run in runs)

    show("sgd: the first step of a process", first(_OWN), first(_PLAIN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--heads", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=3)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':60s} {'own':>9s} {'plain':>9s} {'ratio':>6s}")
    for size in arguments.sizes:
        small_maps(arguments.network, size, arguments.layers, arguments.rows, arguments.repeats)
    for heads in arguments.heads:
        many_heads(heads, arguments.rows, 512, 10, 20 * arguments.repeats)
    sgd(arguments.processes)


if __name__ == "__main__":
    main()
