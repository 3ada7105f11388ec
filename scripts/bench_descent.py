"""Why sfu writes SGD out and runs descents together: the cost of the first optimiser, and of nine learning rates.

    python scripts/bench_descent.py

Prints the seconds of NegGrad in a fresh process with sfu's own step and with ``torch.optim.SGD`` (whose first use loads
PyTorch's compiler), and of nine learning rates one after another and together (``DescentMethod.unlearn_together``), on
5,000 rows of 512 features and 10 classes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import torch

from sfu.heads.linear import LinearHead
from sfu.request import ForgetRequest, MethodContext
from sfu.unlearning.methods.neg_grad import NegGrad


def request() -> ForgetRequest:
    drawn = torch.Generator().manual_seed(0)
    weights_CE = 0.1 * torch.randn(10, 512, generator=drawn, dtype=torch.float64)
    head = LinearHead(weights_CE, torch.zeros_like(weights_CE), 1e-4, 50_000)
    features_FD = torch.nn.functional.normalize(torch.randn(5_000, 512, generator=drawn), dim=1)
    return ForgetRequest(head, features_FD, torch.randint(10, (5_000,), generator=drawn))


def first_step(kind: str) -> float:
    """Seconds of the first descent in this process."""
    given, start = request(), time.perf_counter()
    if kind == "sfu":
        NegGrad().unlearn(given, MethodContext())
    else:
        point = torch.nn.Parameter(given.head.parameters_CE.clone())
        optimizer = torch.optim.SGD([point], lr=1e-4, momentum=0.9, weight_decay=5e-4)
        for _ in range(100):
            optimizer.zero_grad()
            (-given.head.outputs(given.features_FD[:256], point).square().mean()).backward()
            optimizer.step()
    return time.perf_counter() - start


def main() -> None:
    if len(sys.argv) > 1:
        print(first_step(sys.argv[1]))
        return
    for kind in ("sfu", "torch.optim.SGD"):
        done = subprocess.run([sys.executable, __file__, kind], capture_output=True, text=True, check=True)
        print(f"first descent of a process, {kind}: {float(done.stdout):.2f} s")
    given, context = request(), MethodContext()
    methods = [replace(NegGrad(), lr=10.0 ** (k / 2 - 4)) for k in range(9)]
    methods[0].unlearn(given, context)  # warm
    start = time.perf_counter()
    for method in methods:
        method.unlearn(given, context)
    alone = time.perf_counter() - start
    methods[0].unlearn_together(methods, given, context, None)  # warm
    start = time.perf_counter()
    methods[0].unlearn_together(methods, given, context, None)
    print(f"nine learning rates: {alone:.2f} s one after another, {time.perf_counter() - start:.2f} s together")


if __name__ == "__main__":
    main()
